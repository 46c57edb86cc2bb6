//! Decides what `iop node` does: what a further Node of a managed fleet needs, and certificates that take the place of old ones.
//!
//! Both are made with the CA that `iop init --managed` wrote, wherever it is kept now. Nothing that runs reads that CA.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use iop_execution::Redacted;
use iop_wire::link::grpc::{WantedEdge, certificate_identity};
use iop_wire::{WorkloadIdentity, WorkloadRole};
use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, UnixTime};

use super::token::{self, Issued};
use super::{Target, say_json, told};
use crate::certs::{Ca, CaError, LOCAL_NAMES, PemPair, VALID_DAYS};
use crate::config::LoadedEdge;
use crate::config::edge::records::NODE_TOKENS;
use crate::config::edge::{NodeRecord, NodesTls};
use crate::config::secret::{MAX_SECRET_BYTES, resolve_path};
use crate::config::time::{Timestamp, parse_end};
use crate::doctor::certificate::facts;
use crate::exit::Failure;
use crate::files::{self, Readers};
use crate::init::directory::{self, NodeDirectory};
use crate::init::{CA_CERT, CA_DIR, CA_KEY, is_reserved};
use crate::term::{note, say};
use crate::tls;

#[cfg(test)]
mod tests;

/// Commands for Nodes of a managed fleet.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Make a directory with all that a further Node needs: certificate, token, config
    Add(Box<AddNode>),
    /// Make a new key and certificate for a Node, or for the Edge
    // What a default or a variable gives stands in the usage that is made, as if it had to be typed.
    #[command(override_usage = "iop node renew [OPTIONS] <NODE>\n       iop node renew [OPTIONS] --edge")]
    Renew {
        /// Id of the Node, as in edge.yaml
        #[arg(required_unless_present = "edge_itself")]
        node: Option<String>,
        /// Those of the Edge instead, in the files that edge.yaml names
        #[arg(long = "edge", conflicts_with_all = ["node", "out"])]
        edge_itself: bool,
        /// With --edge: replace a certificate of another CA, too
        #[arg(long, requires = "edge_itself", conflicts_with = "node")]
        force: bool,
        /// Where the Node's cert.pem and key.pem are, or go [default: the Node's directory beside the config]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// The CA
        #[command(flatten)]
        ca: CaPlace,
        /// The config
        #[command(flatten)]
        target: Target,
    },
}

/// Flags of `iop node add`.
#[derive(Debug, Args)]
pub struct AddNode {
    /// Id of the Node, as in edge.yaml
    node: String,
    /// Name or address under which the Node reaches the Edge [default: the first of the Edge's certificate that is not local]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Directory to write to [default: one of the Node's name beside the config]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// When the token ends: 90d, 24h, or 2027-01-31T00:00:00Z [default: never]
    #[arg(long, value_name = "WHEN", value_parser = parse_end)]
    expires: Option<Timestamp>,
    /// The CA
    #[command(flatten)]
    ca: CaPlace,
    /// The config
    #[command(flatten)]
    target: Target,
}

/// Where the CA is.
#[derive(Debug, Clone, Args)]
pub struct CaPlace {
    /// Directory with the CA's ca.pem and ca-key.pem, wherever it was moved to [default: ca beside the config]
    #[arg(long, value_name = "DIR")]
    ca: Option<PathBuf>,
}

/// Does it.
///
/// # Errors
/// [`Failure`] with the next step.
pub async fn run(command: NodeCommand) -> Result<(), Failure> {
    match command {
        NodeCommand::Add(add) => make(*add, SystemTime::now()).await,
        NodeCommand::Renew { node: Some(node), out, ca, target, .. } => {
            renew(&node, out.as_deref(), &ca, &target, SystemTime::now())
        }
        NodeCommand::Renew { node: None, ca, target, force, .. } => renew_edge(&ca, force, &target, SystemTime::now()),
    }
}

fn unreadable(error: &tls::TlsError) -> Failure {
    Failure::usage(error.to_string())
}

/// A small file as text.
fn read(path: &Path) -> Result<String, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::usage(format!("can't read {}: {error}", path.display()));
    match fs::metadata(path) {
        Ok(found) if found.len() > MAX_SECRET_BYTES => Err(failed(&"it is too large")),
        Ok(_) => fs::read_to_string(path).map_err(|error| failed(&error)),
        Err(error) => Err(failed(&error)),
    }
}

/// Certificates by which the Edge knows its Nodes, and its own.
struct Certificates<'a> {
    files: &'a NodesTls,
    ca: Ca,
    /// DER of the CA.
    root: CertificateDer<'static>,
    /// The Edge's own chain.
    chain: Vec<CertificateDer<'static>>,
}

/// Where a CA is that is not there.
const ELSEWHERE: &str = "`iop init --managed` wrote it to ca/; --ca DIR says where it is now";

/// The CA, if the Edge trusts Nodes by it.
fn open<'a>(place: &CaPlace, loaded: &'a LoadedEdge, now: SystemTime) -> Result<Certificates<'a>, Failure> {
    let files = loaded.config.tls.nodes.as_ref();
    let Some((files, client_ca)) = files.and_then(|files| Some((files, files.client_ca.as_ref()?))) else {
        return Err(Failure::usage(format!("{} asks Nodes for no certificate", loaded.path.display()))
            .hint("a token is all that a Node needs here: `iop token new NODE`"));
    };
    let directory = place.ca.clone().unwrap_or_else(|| loaded.base().join(CA_DIR));
    let (cert, key) = (directory.join(CA_CERT), directory.join(CA_KEY));
    only_its_owner(&key)?;
    let (pem, secret) = (read(&cert).map_err(|failure| failure.hint(ELSEWHERE))?, Redacted::new(read(&key)?));
    let ca = Ca::read(&pem, &secret, now)
        .map_err(|error| Failure::usage(format!("the CA in {}: {error}", directory.display())).hint(mend(&error)))?;
    let at = |path: &Path| resolve_path(loaded.base(), &path.to_string_lossy());
    let trusted = tls::load_certificates(&at(client_ca)).map_err(|error| unreadable(&error))?;
    let root = tls::load_certificates(&cert).map_err(|error| unreadable(&error))?.swap_remove(0);
    if !trusted.contains(&root) {
        let message = format!("the Edge trusts no Nodes of the CA in {}", directory.display());
        let hint = format!("its CAs are in {}, `tls.nodes.client_ca` of edge.yaml", at(client_ca).display());
        return Err(Failure::usage(message).hint(hint));
    }
    let chain = tls::load_certificates(&at(&files.cert)).map_err(|error| unreadable(&error))?;
    Ok(Certificates { files, ca, root, chain })
}

/// What to do with a CA that can't sign.
fn mend(error: &CaError) -> &'static str {
    match error {
        CaError::Time => {
            "look at this machine's clock. A CA that has ended is replaced by a new one, as `iop init --managed --dir NEW` \
             makes it: put its certificate beside the old one in the file of `tls.nodes.client_ca` and in each Node's ca.pem, and make new \
             certificates with --ca DIR"
        }
        CaError::Certificate | CaError::NoCa => {
            "ca.pem is to hold the CA's own certificate, as `iop init --managed` writes it"
        }
        CaError::Key | CaError::OtherKey => {
            "ca-key.pem is to hold the key of ca.pem: `openssl pkcs8 -topk8 -nocrypt` writes that form"
        }
    }
}

#[cfg(unix)]
fn only_its_owner(key: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::MetadataExt as _;
    match fs::metadata(key) {
        Ok(found) if found.mode() & 0o077 != 0 => {
            let message =
                format!("{} has mode {:04o}: only its owner may have access", key.display(), found.mode() & 0o7777);
            Err(Failure::usage(message).hint(format!("chmod 600 {}", key.display())))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::usage(format!("can't read {}: {error}", key.display())).hint(ELSEWHERE)),
    }
}

#[cfg(not(unix))]
fn only_its_owner(_: &Path) -> Result<(), Failure> {
    Ok(())
}

/// What the Node's certificate is to say.
fn identity_of(node: &NodeRecord, loaded: &LoadedEdge) -> Result<WorkloadIdentity, Failure> {
    let identity = match node.identities.first() {
        Some(text) => WorkloadIdentity::parse(text),
        None => WorkloadIdentity::new(loaded.config.trust_domain(), WorkloadRole::Node, &node.id),
    };
    identity.map_err(|error| Failure::usage(format!("node {}: {error}", node.id)))
}

fn signed(pair: Result<PemPair, rcgen::Error>) -> Result<PemPair, Failure> {
    pair.map_err(|error| Failure::fatal(format!("the certificate can't be made: {error}")))
}

/// The directory of a Node beside the config.
fn beside(node: &str, out: Option<PathBuf>, loaded: &LoadedEdge) -> Result<PathBuf, Failure> {
    match out {
        Some(out) => Ok(out),
        // The id may be any text where `identities` names the Node.
        None if is_reserved(node) || WorkloadIdentity::new(Default::default(), WorkloadRole::Node, node).is_err() => {
            Err(Failure::usage(format!("`{}` can't be the name of its directory", node.escape_debug()))
                .hint("--out DIR names another"))
        }
        None => Ok(loaded.base().join(node)),
    }
}

async fn make(add: AddNode, now: SystemTime) -> Result<(), Failure> {
    let AddNode { node, host, out, expires, ca, target } = add;
    let loaded = target.load()?;
    let certificates = open(&ca, &loaded, now)?;
    let record = known(&node, &target)?;
    if record.token_hash.is_some() {
        return Err(Failure::usage(format!("node {node} has a token already")).hint(format!(
            "`iop node renew {node}` makes a new certificate, `iop token rotate {node}` a new secret; \
             `iop token revoke {node}` lets you begin anew"
        )));
    }
    if target.file(&NODE_TOKENS)?.is_none() {
        return Err(Failure::usage(format!("{} names no file for tokens of Nodes", target.config.display()))
            .hint("write `auth: { node_tokens_file: node-tokens.yaml }` there"));
    }
    let identity = identity_of(&record, &loaded)?;
    let (edge, host) = reached(&certificates, host)?;
    let pair = signed(certificates.ca.node(&identity, now))?;
    let files = NodeDirectory {
        authority: directory::authority(&host, loaded.config.listen.nodes.address.port()),
        edge: &edge,
        ca: certificates.ca.pem(),
        pair: &pair,
        backends: record.providers.iter().filter_map(|provider| provider.base_url.as_deref()).collect(),
    };
    let written = Written::all(beside(&node, out, &loaded)?, &files.files())?;
    let token = written.directory.join(directory::TOKEN);
    let Issued { made, effect, file, .. } = token::issue(&node, expires, Some(&token), &target).await?;
    let shown = written.stays();
    if target.edge.json {
        say_json(&serde_json::json!({
            "node": node, "identity": identity.to_string(), "directory": shown.display().to_string(),
            "edge": format!("https://{}", files.authority), "valid_days": pair.valid_days(), "token_id": made.token_id, "effect": effect,
        }));
    } else {
        say(format!("{}: {identity}, certificate for {}, token", shown.display(), days(&pair)));
        note(told(&effect, file.as_deref()));
        note(format!(
            "Copy it to the Node's machine; it is all the Node needs. There: iop-node serve --config {}",
            Path::new(shown.file_name().unwrap_or_default()).join("node.yaml").display()
        ));
    }
    effect.settled()
}

/// True if the name in that question differs from this one in its digits only: gpu-2 is no slip of gpu-1.
fn is_next_of(question: &str, node: &str) -> bool {
    let letters = |text: &str| text.chars().filter(|letter| !letter.is_ascii_digit()).collect::<String>();
    question.split('`').nth(1).is_some_and(|meant| letters(meant) == letters(node))
}

/// The Node as the config has it; what to write there if it has none.
fn known(node: &str, target: &Target) -> Result<NodeRecord, Failure> {
    token::node_of(node, target).map_err(|failure| {
        let meant = failure.hint.as_deref().filter(|hint| hint.starts_with("did you mean") && !is_next_of(hint, node));
        let meant = meant.map(|hint| format!("{hint} If not, ")).unwrap_or_default();
        let id = super::record::quoted(node);
        failure.hint(format!(
            "{meant}say first what it runs, under `nodes:` there, and name its providers under `models:` if these are listed:\n      \
             - {{ id: {id}, providers: [ {{ id: {id}, kind: vllm, base_url: \"http://127.0.0.1:8000\" }} ] }}"
        ))
    })
}

/// The Edge's identity, and the name under which the Node reaches it: one for which it takes the Edge's certificate.
fn reached(certificates: &Certificates<'_>, host: Option<String>) -> Result<(WorkloadIdentity, String), Failure> {
    let Certificates { files, root, chain, .. } = certificates;
    let leaf = chain.first().map(|leaf| &**leaf).unwrap_or_default();
    let unusable = |why: &dyn std::fmt::Display| {
        Failure::usage(format!("the Edge's certificate {} is not one that the Node takes: {why}", files.cert.display()))
    };
    let edge = certificate_identity(leaf).map_err(|problem| unusable(&problem))?;
    let names = facts(leaf).map(|facts| facts.names).unwrap_or_default();
    let first = || names.iter().find(|name| !LOCAL_NAMES.contains(&name.as_str())).or(names.first()).cloned();
    let host = host.or_else(first).unwrap_or_default();
    let host = host.trim_matches(['[', ']']).to_owned();
    let mut roots = RootCertStore::empty();
    roots.add(root.clone()).map_err(|error| unusable(&error))?;
    tls::edge_for_nodes(chain, roots, WantedEdge::Exactly(edge.clone()), &host).map_err(|error| {
        let hint = format!("--host HOST with a name of the certificate: {}", names.join(", "));
        unusable(&error).hint(hint)
    })?;
    Ok((edge, host))
}

/// Files that were written and are taken away again unless they stay.
struct Written {
    directory: PathBuf,
    files: Vec<PathBuf>,
    /// The directory is new, too.
    fresh: bool,
}

impl Written {
    fn all(directory: PathBuf, files: &[crate::init::File]) -> Result<Self, Failure> {
        let there = files.iter().map(|file| directory.join(&file.name)).find(|path| path.exists());
        if let Some(path) = there {
            return Err(Failure::usage(format!("{} is there already; nothing was changed", path.display()))
                .hint("--out DIR writes elsewhere; `iop node renew NODE` replaces a certificate"));
        }
        let failed = |path: &Path, error: std::io::Error| {
            Failure::fatal(format!("can't write {}: {error}; nothing was changed", path.display()))
        };
        let fresh = !directory.exists();
        fs::create_dir_all(&directory).map_err(|error| failed(&directory, error))?;
        let mut written = Self { directory, files: Vec::new(), fresh };
        for file in files {
            let path = written.directory.join(&file.name);
            files::create(&path, &file.text, file.readers).map_err(|error| failed(&path, error))?;
            written.files.push(path);
        }
        Ok(written)
    }

    fn stays(mut self) -> PathBuf {
        self.files.clear();
        self.fresh = false;
        std::mem::take(&mut self.directory)
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        for path in &self.files {
            let _best_effort = fs::remove_file(path);
        }
        if self.fresh {
            let _not_empty = fs::remove_dir(&self.directory);
        }
    }
}

/// Replaces a certificate and its key: both, or none.
fn replace_pair(cert: &Path, key: &Path, pair: &PemPair) -> Result<(), Failure> {
    let failed = |path: &Path, error: std::io::Error| {
        Failure::fatal(format!("can't write {}: {error}; nothing was changed", path.display()))
    };
    let kept = files::replace_keeping(key, pair.key.expose(), Readers::Owner).map_err(|error| failed(key, error))?;
    files::replace(cert, &pair.cert, Readers::All).map_err(|error| failed(cert, error))?;
    kept.stays();
    Ok(())
}

fn renew(node: &str, out: Option<&Path>, ca: &CaPlace, target: &Target, now: SystemTime) -> Result<(), Failure> {
    let loaded = target.load()?;
    let certificates = open(ca, &loaded, now)?;
    let identity = identity_of(&token::node_of(node, target)?, &loaded)?;
    let directory = beside(node, out.map(Path::to_path_buf), &loaded)?;
    let pair = signed(certificates.ca.node(&identity, now))?;
    let (cert, key) = (directory.join(directory::CERT), directory.join(directory::KEY));
    fs::create_dir_all(&directory)
        .map_err(|error| Failure::fatal(format!("can't make {}: {error}", directory.display())))?;
    replace_pair(&cert, &key, &pair)?;
    let next = "Put both in the place of the Node's own: it takes them by itself";
    renewed(&identity, (&cert, &key), &pair, next, target);
    Ok(())
}

/// How long it is valid, and why not as long as others.
fn days(pair: &PemPair) -> String {
    match pair.valid_days() {
        VALID_DAYS => format!("{VALID_DAYS} days"),
        days => format!("{days} day{}: the CA ends then", if days == 1 { "" } else { "s" }),
    }
}

fn renew_edge(ca: &CaPlace, force: bool, target: &Target, now: SystemTime) -> Result<(), Failure> {
    let loaded = target.load()?;
    let Certificates { files, ca, chain, root } = open(ca, &loaded, now)?;
    let at = |path: &Path| resolve_path(loaded.base(), &path.to_string_lossy());
    let leaf = chain.first().map(|leaf| &**leaf).unwrap_or_default();
    let identity = certificate_identity(leaf)
        .map_err(|problem| Failure::usage(format!("the Edge's identity, in {}: {problem}", files.cert.display())))?;
    let Some(facts) = facts(leaf) else {
        return Err(Failure::usage(format!("{} holds no certificate that can be read", files.cert.display())));
    };
    let then = UnixTime::since_unix_epoch(Duration::from_secs(facts.from.0));
    if !force && let Err(error) = tls::is_of_ca(&chain, root, then) {
        let (cert, issuer) = (files.cert.display(), facts.issuer);
        let message =
            format!("the Edge's certificate {cert} is not of this CA, but of {issuer} ({error}); nothing was changed");
        return Err(Failure::usage(message).hint(
            "renew it where it is from. --force puts one of this CA in its place, which only they take who trust this CA",
        ));
    }
    let pair = signed(ca.edge(facts.names, Some(&identity), now))?;
    let (cert, key) = (at(&files.cert), at(&files.key));
    replace_pair(&cert, &key, &pair)?;
    renewed(&identity, (&cert, &key), &pair, "A running Edge takes them by itself, within 10 s", target);
    if loaded.config.tls.openai.as_ref().is_some_and(|openai| openai.cert != files.cert) {
        note("`tls.openai` names another certificate, which stays as it is");
    }
    Ok(())
}

fn renewed(identity: &WorkloadIdentity, files: (&Path, &Path), pair: &PemPair, next: &str, target: &Target) {
    let (cert, key) = (files.0.display().to_string(), files.1.display().to_string());
    if target.edge.json {
        say_json(&serde_json::json!({
            "identity": identity.to_string(), "cert": cert, "key": key, "valid_days": pair.valid_days(),
        }));
    } else {
        say(format!("{cert}, {key}: {identity}, for {}", days(pair)));
        note(next);
    }
}
