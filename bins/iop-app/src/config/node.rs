//! Decides what a Node is told locally: flags first, then `IOP_NODE_…` variables, then `node.yaml`, then defaults.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use iop_execution::Redacted;
use iop_node_core::TrustedIssuers;
use iop_node_core::journal::sqlite;
use iop_node_core::upstream::AllowUpstream;
use iop_wire::{WorkloadIdentity, WorkloadRole};
use serde::Deserialize;

use super::edge::{TlsPair, read};
use super::exposure::{Protection, exposed};
use super::link::{CongestionConfig, LINK, LinkConfig};
use super::problem::{Position, Problems};
use super::schema::{self, Kind, Object, optional};
use super::secret::{read_secret, readable_by_all, resolve_path};
use super::tree::{Entry, Tree, Value};

#[cfg(test)]
mod tests;

static TLS: Object = Object {
    name: "tls",
    fields: &[
        optional("ca", Kind::Text, "PEM file with the CA of the Edge's certificate; default: what the system trusts"),
        optional("cert", Kind::Text, "PEM file with this Node's own certificate, for an Edge that asks for one"),
        optional("key", Kind::Text, "PEM file with the private key of `cert`"),
    ],
};
static RECONNECT: Object = Object {
    name: "reconnect",
    fields: &[
        optional(
            "max_attempts",
            Kind::Integer { min: 0, max: u64::MAX },
            "tries in a row before the Node gives up; 0 = never; default 10",
        ),
        optional("interval_sec", Kind::Integer { min: 1, max: 86_400 }, "longest wait between tries; default 10"),
    ],
};
static METRICS_LISTENER: Object = Object {
    name: "metrics",
    fields: &[
        optional("listen", Kind::Address, "address for metrics and health; default: none"),
        optional("insecure_plaintext", Kind::Bool, "metrics may be reachable from outside; default false"),
        optional("insecure_no_auth", Kind::Bool, "metrics may be reachable from outside; default false"),
    ],
};
static JOURNAL: Object = Object {
    name: "journal",
    fields: &[
        optional("enabled", Kind::Bool, "runs are written down, without prompts and outputs; default true"),
        optional(
            "dsn",
            Kind::Text,
            "SQLite URI or path, relative to the working directory; default: file:iop.db?cache=shared&mode=rwc",
        ),
        optional(
            "max_rows",
            Kind::Integer { min: 1, max: MAX_JOURNAL_ROWS },
            "most runs that are kept; default 100000",
        ),
        optional(
            "max_age_days",
            Kind::Integer { min: 1, max: MAX_JOURNAL_DAYS },
            "longest time a run is kept; default 30",
        ),
    ],
};
/// Most rows of the run journal that may be asked for.
const MAX_JOURNAL_ROWS: u64 = 100_000_000;
/// Longest age of a row of the run journal that may be asked for.
const MAX_JOURNAL_DAYS: u64 = 36_500;
/// The table of `node.yaml`.
pub static NODE_FILE: Object = Object {
    name: "the config",
    fields: &[
        optional("edge", Kind::Text, "URL of the Edge: https://host:8443"),
        optional("dial_address", Kind::Text, "host:port to connect to; default: that of the URL"),
        optional("tls_name", Kind::Text, "name in the Edge's certificate; default: the URL's host"),
        optional(
            "identity",
            Kind::Text,
            "workload identity the Edge must show, spiffe://<trust domain>/iop/edge/<id>; default: with `tls.cert` any Edge of \
             its trust domain, without one none",
        ),
        optional("token_file", Kind::Text, "file with this Node's token"),
        optional("tls", Kind::Object(&TLS), "certificates"),
        optional("reconnect", Kind::Object(&RECONNECT), "what happens when the connection ends"),
        optional(
            "allow_upstream",
            Kind::List(&Kind::Text),
            "what providers may be: loopback, private, hosts, addresses, networks; default: [loopback, private]",
        ),
        optional(
            "lease_issuers",
            Kind::List(&Kind::Text),
            "whose credential leases are taken: [edge] = those that the Edge names, once it has shown its workload identity; or \
             public keys, `ed25519:` and 64 hex digits or `file:PATH`, which is read again when it changes; [] = nobody's; default [edge]",
        ),
        optional("metrics", Kind::Object(&METRICS_LISTENER), "metrics and health"),
        optional("journal", Kind::Object(&JOURNAL), "what is written down about runs"),
        optional("link", Kind::Object(&LINK), "the connection to the Edge"),
        optional("insecure_plaintext", Kind::Bool, "an http:// Edge on another machine is all right; default false"),
    ],
};

/// `node.yaml`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeFile {
    /// URL of the Edge.
    pub edge: Option<String>,
    /// Where to connect.
    pub dial_address: Option<String>,
    /// Name in the Edge's certificate.
    pub tls_name: Option<String>,
    /// Workload identity of the Edge.
    pub identity: Option<String>,
    /// File with the token.
    pub token_file: Option<PathBuf>,
    /// Certificates.
    pub tls: NodeTls,
    /// Reconnecting.
    pub reconnect: ReconnectFile,
    /// What providers may be.
    pub allow_upstream: Option<Vec<String>>,
    /// Whose credential leases are taken.
    pub lease_issuers: Option<Vec<String>>,
    /// Metrics and health.
    pub metrics: MetricsFile,
    /// What is written down about runs.
    pub journal: JournalFile,
    /// The connection to the Edge.
    pub link: LinkConfig,
    /// An http:// Edge on another machine is all right.
    pub insecure_plaintext: bool,
}

/// Certificates of a Node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeTls {
    /// CA of the Edge's certificate.
    pub ca: Option<PathBuf>,
    /// This Node's own certificate.
    pub cert: Option<PathBuf>,
    /// The private key of it.
    pub key: Option<PathBuf>,
}

/// Reconnecting.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReconnectFile {
    /// Tries in a row; 0 = without end.
    pub max_attempts: Option<u32>,
    /// Longest wait in seconds.
    pub interval_sec: Option<u64>,
}

/// Metrics of a Node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsFile {
    /// Where; none = off.
    pub listen: Option<SocketAddr>,
    /// It may be reachable from outside without TLS.
    pub insecure_plaintext: bool,
    /// It may be reachable from outside without auth.
    pub insecure_no_auth: bool,
}

/// The run journal; what is left out has its default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JournalFile {
    /// It is written.
    pub enabled: Option<bool>,
    /// Where.
    pub dsn: Option<String>,
    /// Most rows.
    pub max_rows: Option<u64>,
    /// Oldest row.
    pub max_age_days: Option<u64>,
}

/// Which Edge a Node dials, and what it shows there; each beats the file.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DialOptions {
    /// URL of the Edge, like `https://edge.example:8443`
    #[arg(long, env = "IOP_NODE_EDGE", value_name = "URL")]
    pub edge: Option<String>,
    /// Connect to this host:port instead of the URL's
    #[arg(long, env = "IOP_NODE_DIAL_ADDRESS", value_name = "HOST:PORT")]
    pub dial_address: Option<String>,
    /// Name in the Edge's certificate, if it is not the URL's host
    #[arg(long, env = "IOP_NODE_TLS_NAME", value_name = "NAME")]
    pub tls_name: Option<String>,
    /// File with this Node's token
    #[arg(long, env = "IOP_NODE_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// PEM file with the CA of the Edge's certificate [default: what the system trusts]
    #[arg(long, env = "IOP_NODE_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// PEM file with this Node's own certificate, for an Edge that asks for one
    #[arg(long, env = "IOP_NODE_CERT", value_name = "FILE", requires = "cert_key")]
    pub cert: Option<PathBuf>,
    /// PEM file with the private key of --cert
    #[arg(long, env = "IOP_NODE_CERT_KEY", value_name = "FILE", requires = "cert")]
    pub cert_key: Option<PathBuf>,
    /// Connect to an http:// Edge on another machine all the same: token and prompts can be read on the way
    #[arg(long, env = "IOP_NODE_INSECURE_PLAINTEXT")]
    pub insecure_plaintext: bool,
}

/// What flags and variables say; each beats the file.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct NodeOptions {
    /// Config file with the same settings
    #[arg(long, env = "IOP_NODE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Which Edge, and what is shown to it
    #[command(flatten)]
    pub dial: DialOptions,
    /// This Node's token itself (only as a variable: flags are visible to other users)
    #[arg(skip)]
    pub token: Option<Redacted<String>>,
    /// Tries in a row before the Node gives up; 0 = never [default: 10]
    #[arg(long, env = "IOP_NODE_RECONNECT_MAX_ATTEMPTS", value_name = "N")]
    pub reconnect_max_attempts: Option<u32>,
    /// Longest wait between tries [default: 10]
    #[arg(long, env = "IOP_NODE_RECONNECT_INTERVAL_SEC", value_name = "SECONDS")]
    pub reconnect_interval_sec: Option<u64>,
    /// What providers may be: `loopback`, `private`, a host, an address, a network; repeatable [default: loopback,private]
    #[arg(long, env = "IOP_NODE_ALLOW_UPSTREAM", value_name = "RULE", value_delimiter = ',')]
    pub allow_upstream: Vec<String>,
    /// Address for metrics and health [default: none]
    #[arg(long, env = "IOP_NODE_METRICS_LISTEN", value_name = "IP:PORT")]
    pub metrics_listen: Option<SocketAddr>,
    /// Write down what runs, without prompts and outputs [default: true]
    #[arg(long, env = "IOP_NODE_JOURNAL_ENABLED", value_name = "BOOL")]
    pub journal_enabled: Option<bool>,
    /// SQLite URI or path of the run journal [default: file:iop.db?cache=shared&mode=rwc]
    #[arg(long, env = "IOP_NODE_JOURNAL_DSN", value_name = "URI")]
    pub journal_dsn: Option<String>,
    /// Most runs that the journal keeps [default: 100000]
    #[arg(long, env = "IOP_NODE_JOURNAL_MAX_ROWS", value_name = "N")]
    pub journal_max_rows: Option<u64>,
    /// Longest time the journal keeps a run [default: 30]
    #[arg(long, env = "IOP_NODE_JOURNAL_MAX_AGE_DAYS", value_name = "DAYS")]
    pub journal_max_age_days: Option<u64>,
    /// Congestion control of the connection to the Edge
    #[arg(long, env = "IOP_NODE_LINK_CONGESTION", value_name = "NAME")]
    pub link_congestion: Option<CongestionConfig>,
}

/// How the Edge is reached. Where to connect, which name its certificate must have, and who it must be are three settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeAddress {
    /// TLS is spoken.
    pub tls: bool,
    /// `host:port` to connect to.
    pub dial: String,
    /// Name that the certificate must have.
    pub tls_name: String,
    /// Workload identity that it must show. None = any of the trust domain of the Node's own certificate; without one it need
    /// show none.
    pub identity: Option<WorkloadIdentity>,
}

/// Where and how much is written down about runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalSettings {
    /// SQLite URI or path.
    pub dsn: String,
    /// Most rows.
    pub max_rows: u64,
    /// Oldest row.
    pub max_age: Duration,
    /// Which Node writes: the public part of its token, the same after a restart.
    pub node: String,
}

/// A Node's settings, checked.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// How the Edge is reached.
    pub edge: EdgeAddress,
    /// The token.
    pub token: Redacted<String>,
    /// CA of the Edge's certificate.
    pub ca: Option<PathBuf>,
    /// This Node's own certificate.
    pub own: Option<TlsPair>,
    /// Tries in a row; `None` = the default, 0 = without end.
    pub max_attempts: Option<u32>,
    /// Longest wait; `None` = the default.
    pub interval: Option<Duration>,
    /// What providers may be; `None` = the default.
    pub allow_upstream: Option<Vec<String>>,
    /// Whose credential leases are taken.
    pub lease_issuers: IssuerSource,
    /// Metrics and health; `None` = off.
    pub metrics: Option<SocketAddr>,
    /// The run journal; `None` = off.
    pub journal: Option<JournalSettings>,
    /// Congestion control of the connection.
    pub congestion: CongestionConfig,
}

impl NodeOptions {
    /// Reads the file, if there is one, and checks everything together. Settings are there exactly when the problems hold
    /// no error.
    #[must_use]
    pub fn load(self) -> (Option<NodeSettings>, Problems) {
        let shown = self.config.as_ref().map_or_else(|| "iop-node".to_owned(), |path| path.display().to_string());
        let mut problems = Problems::of(shown);
        let (mut file, mut tree, mut base) = (NodeFile::default(), None, PathBuf::new());
        if let Some(path) = &self.config {
            base = path.parent().map(Path::to_path_buf).unwrap_or_default();
            match read(path) {
                Ok(text) => (file, tree) = parse(&text, &mut problems),
                Err(message) => problems.error(Position::default(), message, None),
            }
        }
        let settings = self.merge(file, tree.as_ref(), &base, &mut problems);
        (settings.filter(|_| !problems.has_errors()), problems)
    }

    fn merge(self, file: NodeFile, tree: Option<&Tree>, base: &Path, problems: &mut Problems) -> Option<NodeSettings> {
        let at = |path: &str| tree.map_or_else(Position::default, |tree| tree.at(path));
        let plaintext = self.dial.insecure_plaintext || file.insecure_plaintext;
        let url = self.dial.edge.or(file.edge);
        let dial = self.dial.dial_address.or(file.dial_address);
        let name = self.dial.tls_name.or(file.tls_name);
        let edge = edge_address(url.as_deref(), dial, name, file.identity, plaintext, at("edge"), problems);

        let from_file = |path: &PathBuf| resolve_path(base, &path.to_string_lossy());
        let token_file = self.dial.token_file.or_else(|| file.token_file.as_ref().map(from_file));
        let token = match (self.token, token_file) {
            (Some(token), None) => check_token(token.expose(), "IOP_NODE_TOKEN", at("token_file"), problems),
            (None, Some(path)) => match read_secret(&path) {
                Ok(text) => check_token(&text, &path.display().to_string(), at("token_file"), problems),
                Err(message) => {
                    problems.error(at("token_file"), message, Some("`iop init` writes a token file".to_owned()));
                    None
                }
            },
            (Some(_), Some(_)) => {
                problems.error(
                    at("token_file"),
                    "IOP_NODE_TOKEN and a token file are both given",
                    Some("keep one of them".to_owned()),
                );
                None
            }
            (None, None) => {
                problems.error(at(""), "a Node needs its token", Some("--token-file node.token".to_owned()));
                None
            }
        };
        let ca = self.dial.ca.or_else(|| file.tls.ca.as_ref().map(from_file));
        if let Some(path) = &ca
            && let Err(error) = crate::tls::load_certificates(path)
        {
            problems.error(at("tls/ca"), error.to_string(), None);
        }
        let own = own_certificate(
            self.dial.cert.or_else(|| file.tls.cert.as_ref().map(from_file)),
            self.dial.cert_key.or_else(|| file.tls.key.as_ref().map(from_file)),
            edge.as_ref().is_some_and(|edge| edge.tls),
            [at("tls/cert"), at("tls/key")],
            problems,
        );
        let interval = self.reconnect_interval_sec.or(file.reconnect.interval_sec);
        if interval == Some(0) {
            problems.error(at("reconnect/interval_sec"), "reconnect interval must be at least 1 second", None);
        }
        let allow = if self.allow_upstream.is_empty() { file.allow_upstream } else { Some(self.allow_upstream) };
        for (index, rule) in allow.iter().flatten().enumerate() {
            if let Err(error) = AllowUpstream::parse([rule]) {
                problems.error(at(&format!("allow_upstream/{index}")), format!("`allow_upstream`: {error}"), None);
            }
        }
        let lease_issuers = lease_issuers(file.lease_issuers.as_deref(), base, &at, problems);
        let metrics = self.metrics_listen.or(file.metrics.listen);
        if let Some(address) = metrics {
            let protection = Protection {
                auth: false,
                tls: false,
                insecure_no_auth: file.metrics.insecure_no_auth,
                insecure_plaintext: file.metrics.insecure_plaintext,
            };
            for exposed in exposed(address, protection) {
                let hint = "listen on 127.0.0.1, or write metrics: { insecure_no_auth: true, insecure_plaintext: true } in node.yaml";
                problems.error(
                    at("metrics"),
                    format!("the metrics listener at {address} {exposed}"),
                    Some(hint.to_owned()),
                );
            }
        }
        let asked = JournalFile {
            enabled: self.journal_enabled.or(file.journal.enabled),
            dsn: self.journal_dsn.or(file.journal.dsn),
            max_rows: self.journal_max_rows.or(file.journal.max_rows),
            max_age_days: self.journal_max_age_days.or(file.journal.max_age_days),
        };
        let journal = journal(asked, token.as_deref().unwrap_or_default(), tree, problems);
        Some(NodeSettings {
            edge: edge?,
            token: Redacted::new(token?),
            journal,
            ca,
            own,
            max_attempts: self.reconnect_max_attempts.or(file.reconnect.max_attempts),
            interval: interval.map(Duration::from_secs),
            allow_upstream: allow,
            lease_issuers,
            metrics,
            congestion: self.link_congestion.unwrap_or(file.link.congestion),
        })
    }
}

/// Whose credential leases are taken: the Edge's word, or a list of this Node's own (CRD-8).
fn lease_issuers(
    names: Option<&[String]>,
    base: &Path,
    at: &dyn Fn(&str) -> Position,
    problems: &mut Problems,
) -> IssuerSource {
    let Some(names) = names else { return IssuerSource::Edge };
    match names {
        [] => return IssuerSource::Nobody,
        [only] if only == "edge" => return IssuerSource::Edge,
        _ => {}
    }
    let named = NamedIssuers { names: names.to_vec(), base: base.to_path_buf() };
    for (index, name) in names.iter().enumerate() {
        if let Err(message) = super::edge::credentials::resolve_public_key(base, name) {
            let suggestion = "lease_issuers: [edge], or [\"ed25519:…\"]".to_owned();
            problems.error(at(&format!("lease_issuers/{index}")), message, Some(suggestion));
            return IssuerSource::Nobody;
        }
    }
    if let Err(message) = named.read() {
        problems.error(at("lease_issuers"), message, None);
    }
    IssuerSource::Named(named)
}

/// Where a Node has it from whose credential leases it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IssuerSource {
    /// It takes nobody's.
    Nobody,
    /// The Edge names them.
    Edge,
    /// Its own config names them.
    Named(NamedIssuers),
}

/// Public keys in a config, some of them perhaps in files that may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedIssuers {
    names: Vec<String>,
    base: PathBuf,
}

impl NamedIssuers {
    /// The files.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        self.names.iter().filter_map(|name| Some(resolve_path(&self.base, name.strip_prefix("file:")?))).collect()
    }

    /// The keys, as they are now.
    ///
    /// # Errors
    /// A text for people, without anything of a file.
    pub fn read(&self) -> Result<TrustedIssuers, String> {
        let keys = self.names.iter().map(|name| super::edge::credentials::resolve_public_key(&self.base, name));
        TrustedIssuers::new(keys.collect::<Result<Vec<_>, _>>()?).map_err(|error| error.to_string())
    }
}

fn journal(asked: JournalFile, token: &str, tree: Option<&Tree>, problems: &mut Problems) -> Option<JournalSettings> {
    use iop_edge_core::token::{Token, TokenKind};
    if asked.enabled == Some(false) {
        return None;
    }
    let mut within = |name: &str, value: Option<u64>, max: u64| {
        if let Some(value) = value.filter(|value| !(1..=max).contains(value)) {
            let at = tree.map_or_else(Position::default, |tree| tree.at(&format!("journal/{name}")));
            problems.error(at, format!("`journal.{name}` can't be {value}"), Some(format!("it goes from 1 to {max}")));
        }
    };
    within("max_rows", asked.max_rows, MAX_JOURNAL_ROWS);
    within("max_age_days", asked.max_age_days, MAX_JOURNAL_DAYS);
    let token = Token::parse(TokenKind::Node, token)?;
    Some(JournalSettings {
        dsn: asked.dsn.unwrap_or_else(|| sqlite::DEFAULT_DSN.to_owned()),
        max_rows: asked.max_rows.unwrap_or(sqlite::DEFAULT_MAX_ROWS),
        max_age: asked
            .max_age_days
            .map_or(sqlite::DEFAULT_MAX_AGE, |days| DAY.saturating_mul(u32::try_from(days).unwrap_or(u32::MAX))),
        node: token.id().as_str().to_owned(),
    })
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn parse(text: &str, problems: &mut Problems) -> (NodeFile, Option<Tree>) {
    let Some(mut tree) = Tree::parse(text, problems) else { return (NodeFile::default(), None) };
    if let Value::Map(entries) = &tree.value
        && let Some(entry) = entries.iter().find(|entry| entry.key == "token")
    {
        let hint = "put it into a file of its own, readable by this user only, and write token_file: node.token";
        problems.error(entry.at, "a plain token must not stand in a config file", Some(hint.to_owned()));
    }
    schema::check(&mut tree, &NODE_FILE, problems);
    // A key with a mistake is left out and the others are used, so that what is missing is told only if it is.
    let usable = |entry: &&Entry| {
        let alone = Tree { value: Value::Map(vec![(*entry).clone()]), at: entry.at };
        serde_json::from_value::<NodeFile>(alone.to_json()).is_ok()
    };
    let entries = match &tree.value {
        Value::Map(entries) => entries.iter().filter(usable).cloned().collect(),
        _ => Vec::new(),
    };
    let file = serde_json::from_value(Tree { value: Value::Map(entries), at: tree.at }.to_json());
    (file.unwrap_or_default(), Some(tree))
}

/// This Node's certificate and its key: both or none, readable, and with the identity of a Node (CRD-10).
fn own_certificate(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    tls: bool,
    [cert_at, key_at]: [Position; 2],
    problems: &mut Problems,
) -> Option<TlsPair> {
    let (cert, key) = match (cert, key) {
        (None, None) => return None,
        (Some(cert), Some(key)) => (cert, key),
        (Some(_), None) => {
            problems.error(cert_at, "a certificate needs its private key", Some("--cert-key node-key.pem".to_owned()));
            return None;
        }
        (None, Some(_)) => {
            problems.error(key_at, "a private key needs its certificate", Some("--cert node.pem".to_owned()));
            return None;
        }
    };
    if !tls {
        let hint = "use https:// for the Edge, or leave the certificate out";
        problems.error(cert_at, "an http:// Edge can't be shown a certificate", Some(hint.to_owned()));
    }
    readable_by_all(&key, key_at, problems);
    let read = crate::tls::load_pair(&cert, &key);
    if let Err(error) = read.and_then(|pair| crate::tls::own_identity(&pair, WorkloadRole::Node)) {
        problems.error(if error.is_about_key() { key_at } else { cert_at }, error.to_string(), None);
    }
    Some(TlsPair { cert, key })
}

fn check_token(text: &str, source: &str, at: Position, problems: &mut Problems) -> Option<String> {
    use iop_edge_core::token::{Token, TokenKind};
    let text = text.trim();
    if Token::parse(TokenKind::Node, text).is_some() {
        return Some(text.to_owned());
    }
    let hint = if Token::parse(TokenKind::ApiKey, text).is_some() {
        "it is an API key of a client; a Node's token begins with iopn_"
    } else {
        "it must hold one line: iopn_<8 characters>_<43 characters>, as `iop init` prints it"
    };
    problems.error(at, format!("{source} holds no node token"), Some(hint.to_owned()));
    None
}

/// Reads the three settings that say where the Edge is.
fn edge_address(
    url: Option<&str>,
    dial: Option<String>,
    name: Option<String>,
    identity: Option<String>,
    plaintext: bool,
    at: Position,
    problems: &mut Problems,
) -> Option<EdgeAddress> {
    let Some(url) = url else {
        problems.error(at, "a Node needs the address of its Edge", Some("--edge https://edge.example:8443".to_owned()));
        return None;
    };
    let wrong = |problems: &mut Problems, message: &str| {
        let hint = if url.contains("://") {
            "for example https://edge.example:8443".to_owned()
        } else {
            format!("https://{url}")
        };
        problems.error(at, message, Some(hint));
    };
    let Ok(uri) = url.parse::<http::Uri>() else {
        wrong(problems, "the Edge's address is no URL");
        return None;
    };
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        wrong(problems, "the Edge's address must begin with https:// or http://");
        return None;
    }
    if !matches!(uri.path_and_query().map(http::uri::PathAndQuery::as_str), None | Some("/")) || url.contains('@') {
        wrong(problems, "the Edge's address must have no user, path or query");
    }
    let tls = uri.scheme_str() == Some("https");
    let host = uri.host().unwrap_or_default().to_owned();
    let port = uri.port_u16().unwrap_or(super::edge::NODES_PORT);
    let dial = dial.unwrap_or_else(|| format!("{host}:{port}"));
    if !dial.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
        problems.error(at, "the dial address must be host:port", Some(format!("for example {host}:{port}")));
    }
    if !tls && !plaintext && !is_loopback_host(&dial) {
        let message = "the Edge is on another machine and http:// has no TLS: the token and every prompt could be read on the way";
        let hint =
            format!("use https://{host}:{port}, or say --insecure-plaintext if the network is encrypted otherwise");
        problems.error(at, message, Some(hint));
    }
    let identity = identity.and_then(|text| {
        let parsed = WorkloadIdentity::parse(&text).ok().filter(|identity| identity.role() == WorkloadRole::Edge);
        if parsed.is_none() {
            let message = format!("`identity` can't be `{}`", text.escape_debug());
            problems.error(at, message, Some("for example spiffe://iop.local/iop/edge/edge".to_owned()));
        } else if !tls {
            problems.error(
                at,
                "an http:// Edge shows no identity",
                Some("use https://, or leave `identity` out".to_owned()),
            );
        }
        parsed
    });
    let tls_name = name.unwrap_or_else(|| host.trim_matches(['[', ']']).to_owned());
    Some(EdgeAddress { tls, dial, tls_name, identity })
}

/// True if `host:port` can only be this machine.
fn is_loopback_host(dial: &str) -> bool {
    let host = dial.rsplit_once(':').map_or(dial, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|ip| super::is_loopback(SocketAddr::new(ip, 0)))
}
