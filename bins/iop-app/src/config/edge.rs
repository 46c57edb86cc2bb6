//! Decides what `edge.yaml` can say, and what it means when it says nothing.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::problem::Problems;
use super::schema::{self, Kind, Object, optional, required};
use super::tree::{MAX_CONFIG_BYTES, Tree};

mod catalog;
mod check;
#[cfg(test)]
mod tests;

/// Port of the OpenAI listener.
pub const OPENAI_PORT: u16 = 8180;
/// Port that Nodes dial.
pub const NODES_PORT: u16 = 8443;
/// Port of metrics and health.
pub const ADMIN_PORT: u16 = 9190;
/// Adapter kinds that config may name, the one it should name first.
pub const KINDS: &[&str] = &["openai_compat", "demo", "vllm", "sglang", "llama_cpp", "lm_studio", "ollama"];

const DAY_MS: u64 = 86_400_000;

static LISTENER: Object = Object {
    name: "a listener",
    fields: &[
        required("address", Kind::Address, "IP address and port"),
        optional("insecure_no_auth", Kind::Bool, "accept everybody although it is reachable from outside; default false"),
        optional("insecure_plaintext", Kind::Bool, "no TLS although it is reachable from outside; default false"),
    ],
};
static LISTEN: Object = Object {
    name: "listen",
    fields: &[
        optional("openai", Kind::AddressOr(&LISTENER), "where clients connect; default 127.0.0.1:8180"),
        optional("nodes", Kind::AddressOr(&LISTENER), "where Nodes connect; default 127.0.0.1:8443"),
        optional("admin", Kind::AddressOr(&LISTENER), "metrics and health; default 127.0.0.1:9190"),
    ],
};
static TLS_PAIR: Object = Object {
    name: "a TLS pair",
    fields: &[
        required("cert", Kind::Text, "PEM file with the certificate chain"),
        required("key", Kind::Text, "PEM file with the private key"),
    ],
};
static TLS: Object = Object {
    name: "tls",
    fields: &[
        optional("openai", Kind::Object(&TLS_PAIR), "for the OpenAI listener"),
        optional("nodes", Kind::Object(&TLS_PAIR), "for the listener of Nodes"),
    ],
};
static API_KEY: Object = Object {
    name: "an API key",
    fields: &[
        required("id", Kind::TokenId, "the 8 characters after `iopk_`"),
        required("hash", Kind::Hash, "`sha256:` of the key's secret part, from `iop-edge hash`"),
        optional("principal", Kind::Text, "who uses it; default: the id"),
        optional("models", Kind::List(&Kind::Text), "models it may use; default [\"*\"] = all"),
    ],
};
static AUTH: Object = Object {
    name: "auth",
    fields: &[optional("api_keys", Kind::List(&Kind::Object(&API_KEY)), "keys of clients; none = open, on loopback only")],
};
static PROVIDER_AUTH: Object = Object {
    name: "auth of a provider",
    fields: &[required("bearer", Kind::Reference, "where the Node finds the key: `env:NAME` or `file:PATH`")],
};
static PROVIDER: Object = Object {
    name: "a provider",
    fields: &[
        required("id", Kind::Text, "unique among all Nodes"),
        optional("adapter", Kind::Text, "name of the adapter instance on the Node; default: the id"),
        required("kind", Kind::Choice(KINDS), "code that talks to the backend"),
        optional("base_url", Kind::Text, "where the backend is: http://host:port, with or without /v1"),
        optional("wire", Kind::Choice(&["auto", "run"]), "auto: tunnels where possible; run: normalised runs only; default auto"),
        optional("capacity", Kind::Integer { min: 1, max: 65_536 }, "requests at once; default: what the backend says, else 16"),
        optional("long_capacity", Kind::Integer { min: 0, max: 65_536 }, "of which for long requests; default all"),
        optional("targets", Kind::List(&Kind::Text), "models it may serve; default: what it lists"),
        optional("response_stall_timeout_ms", Kind::Integer { min: 0, max: 3_600_000 }, "1000 to 3600000; 0 = default 300000"),
        optional("close_grace_ms", Kind::Integer { min: 0, max: 60_000 }, "for a cancelled call to return; 0 = default 5000"),
        optional("terminal_linger_ms", Kind::Integer { min: 0, max: 60_000 }, "wait for usage after the end; 0 = default 2000"),
        optional("auth", Kind::Object(&PROVIDER_AUTH), "the provider's key"),
        optional("enabled", Kind::Bool, "default true"),
    ],
};
static NODE: Object = Object {
    name: "a node",
    fields: &[
        required("id", Kind::Text, "unique"),
        required("token_id", Kind::TokenId, "the 8 characters after `iopn_`"),
        required("token_hash", Kind::Hash, "`sha256:` of the token's secret part, from `iop-edge hash`"),
        optional("providers", Kind::List(&Kind::Object(&PROVIDER)), "what it runs"),
    ],
};
static CANDIDATE: Object = Object {
    name: "a candidate",
    fields: &[
        required("provider", Kind::Text, "id of a provider"),
        optional("target", Kind::Text, "the model as the provider knows it; default: the public name"),
        optional("weight", Kind::Integer { min: 1, max: 1000 }, "share of the load; default 1"),
    ],
};
static MODEL: Object = Object {
    name: "a model",
    fields: &[
        required("name", Kind::Text, "public name"),
        optional("aliases", Kind::List(&Kind::Text), "more public names"),
        required("candidates", Kind::List(&Kind::Object(&CANDIDATE)), "providers that can serve it"),
    ],
};
static QUEUE: Object = Object {
    name: "queue",
    fields: &[
        optional("max_waiting", Kind::Integer { min: 0, max: 1_000_000 }, "waiting requests per model group; default 1024"),
        optional("timeout_ms", Kind::Integer { min: 1, max: DAY_MS }, "longest wait for a place; default 30000"),
    ],
};
static LIMITS: Object = Object {
    name: "limits",
    fields: &[
        optional("request_body_bytes", Kind::Integer { min: 1024, max: 1 << 30 }, "largest request body; default 33554432"),
        optional("connections", Kind::Integer { min: 1, max: 1_000_000 }, "client connections in total; default 4096"),
        optional("connections_per_address", Kind::Integer { min: 1, max: 1_000_000 }, "client connections per address; default 256"),
    ],
};
static OBSERVABILITY: Object = Object {
    name: "observability",
    fields: &[
        optional("log", Kind::Choice(&["pretty", "json"]), "form of log lines; default pretty"),
        optional("filter", Kind::Text, "log filter, like `info,iop_node=debug`; default info"),
    ],
};

/// The table of `edge.yaml`.
pub static EDGE: Object = Object {
    name: "the config",
    fields: &[
        optional("edge_id", Kind::Text, "name of this Edge, for people; default edge"),
        optional("listen", Kind::Object(&LISTEN), "addresses"),
        optional("tls", Kind::Object(&TLS), "certificates; each may be left out on loopback only"),
        optional("auth", Kind::Object(&AUTH), "who may use it"),
        optional("nodes", Kind::List(&Kind::Object(&NODE)), "Nodes and what they run"),
        optional("models", Kind::AutoOr(&Kind::List(&Kind::Object(&MODEL))), "auto: publish what providers list; or model groups; default auto"),
        optional("queue", Kind::Object(&QUEUE), "waiting requests"),
        optional("request_deadline_ms", Kind::Integer { min: 0, max: DAY_MS }, "hard limit for a whole request; 0 = none; default 0"),
        optional("response_model", Kind::Choice(&["requested", "target"]), "name of the model in answers; default requested"),
        optional("limits", Kind::Object(&LIMITS), "limits of the OpenAI listener"),
        optional("observability", Kind::Object(&OBSERVABILITY), "logs"),
    ],
};

/// `edge.yaml`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EdgeConfig {
    /// Name of this Edge, for people.
    pub edge_id: Option<String>,
    /// Addresses.
    pub listen: ListenConfig,
    /// Certificates.
    pub tls: TlsConfig,
    /// Who may use it.
    pub auth: AuthConfig,
    /// Nodes.
    pub nodes: Vec<NodeRecord>,
    /// Models.
    pub models: ModelsConfig,
    /// Waiting requests.
    pub queue: QueueConfig,
    /// Hard limit for a whole request in milliseconds; 0 = none.
    pub request_deadline_ms: u64,
    /// Name of the model in answers.
    pub response_model: ResponseModelConfig,
    /// Limits of the OpenAI listener.
    pub limits: LimitsConfig,
    /// Logs.
    pub observability: ObservabilityConfig,
}

/// Addresses of an Edge.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenConfig {
    /// Where clients connect.
    pub openai: Listener,
    /// Where Nodes connect.
    pub nodes: Listener,
    /// Metrics and health.
    pub admin: Listener,
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self { openai: Listener::loopback(OPENAI_PORT), nodes: Listener::loopback(NODES_PORT), admin: Listener::loopback(ADMIN_PORT) }
    }
}

/// One listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(from = "ListenerForm")]
pub struct Listener {
    /// IP address and port.
    pub address: SocketAddr,
    /// Everybody may use it although it is reachable from outside.
    pub insecure_no_auth: bool,
    /// No TLS although it is reachable from outside.
    pub insecure_plaintext: bool,
}

impl Listener {
    /// On 127.0.0.1.
    #[must_use]
    pub const fn loopback(port: u16) -> Self {
        Self::at(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
    }

    /// At an address, with every protection on.
    #[must_use]
    pub const fn at(address: SocketAddr) -> Self {
        Self { address, insecure_no_auth: false, insecure_plaintext: false }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ListenerForm {
    Short(SocketAddr),
    Long(LongListener),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LongListener {
    address: SocketAddr,
    #[serde(default)]
    insecure_no_auth: bool,
    #[serde(default)]
    insecure_plaintext: bool,
}

impl From<ListenerForm> for Listener {
    fn from(form: ListenerForm) -> Self {
        match form {
            ListenerForm::Short(address) => Self::at(address),
            ListenerForm::Long(LongListener { address, insecure_no_auth, insecure_plaintext }) => {
                Self { address, insecure_no_auth, insecure_plaintext }
            }
        }
    }
}

/// Certificates.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    /// Of the OpenAI listener.
    pub openai: Option<TlsPair>,
    /// Of the listener of Nodes.
    pub nodes: Option<TlsPair>,
}

/// A certificate chain and its key.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsPair {
    /// PEM file with the chain.
    pub cert: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}

/// Who may use an Edge.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthConfig {
    /// Keys of clients; none = open.
    pub api_keys: Vec<ApiKeyRecord>,
}

/// One API key.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKeyRecord {
    /// Public id.
    pub id: String,
    /// `sha256:…` or `file:…`.
    pub hash: String,
    /// Who uses it.
    pub principal: Option<String>,
    /// Models it may use; `*` = all.
    #[serde(default = "every_model")]
    pub models: Vec<String>,
}

fn every_model() -> Vec<String> {
    vec!["*".to_owned()]
}

/// One Node.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    /// Its id.
    pub id: String,
    /// Public id of its token.
    pub token_id: String,
    /// `sha256:…` or `file:…`.
    pub token_hash: String,
    /// What it runs.
    #[serde(default)]
    pub providers: Vec<ProviderRecord>,
}

/// One provider of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderRecord {
    /// Its id.
    pub id: String,
    /// Name of the adapter instance; default the id.
    pub adapter: Option<String>,
    /// Code that talks to the backend.
    pub kind: String,
    /// Origin of the backend.
    pub base_url: Option<String>,
    /// How it is used.
    #[serde(default)]
    pub wire: WireConfig,
    /// Requests at once.
    pub capacity: Option<u32>,
    /// Of which for long requests.
    pub long_capacity: Option<u32>,
    /// Models it may serve.
    #[serde(default)]
    pub targets: Vec<String>,
    /// Stall timeout in milliseconds; 0 = default.
    #[serde(default)]
    pub response_stall_timeout_ms: u64,
    /// Close grace in milliseconds; 0 = default.
    #[serde(default)]
    pub close_grace_ms: u64,
    /// Wait for usage in milliseconds; 0 = default.
    #[serde(default)]
    pub terminal_linger_ms: u64,
    /// Its key.
    pub auth: Option<ProviderAuth>,
    /// False: configured, and not used.
    #[serde(default = "yes")]
    pub enabled: bool,
}

const fn one() -> u32 {
    1
}

const fn yes() -> bool {
    true
}

/// Which wire a provider is used by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireConfig {
    /// Tunnels where possible.
    #[default]
    Auto,
    /// Normalised runs only.
    Run,
}

/// Where a provider's key is.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderAuth {
    /// `env:NAME` or `file:PATH`, resolved on the Node.
    pub bearer: String,
}

/// Models: `auto`, or groups.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "ModelsForm")]
pub enum ModelsConfig {
    /// What connected providers list.
    #[default]
    Auto,
    /// These groups only.
    Groups(Vec<ModelRecord>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ModelsForm {
    Word(AutoWord),
    Groups(Vec<ModelRecord>),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum AutoWord {
    Auto,
}

impl From<ModelsForm> for ModelsConfig {
    fn from(form: ModelsForm) -> Self {
        match form {
            ModelsForm::Word(AutoWord::Auto) => Self::Auto,
            ModelsForm::Groups(groups) => Self::Groups(groups),
        }
    }
}

/// One model group.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecord {
    /// Public name.
    pub name: String,
    /// More public names.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Who can serve it.
    pub candidates: Vec<CandidateRecord>,
}

/// One provider that can serve a model.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CandidateRecord {
    /// Its id.
    pub provider: String,
    /// The model as it knows it; default the public name.
    pub target: Option<String>,
    /// Share of the load.
    #[serde(default = "one")]
    pub weight: u32,
}

/// Waiting requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueueConfig {
    /// How many may wait per model group.
    pub max_waiting: u32,
    /// Longest wait in milliseconds.
    pub timeout_ms: u64,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self { max_waiting: 1024, timeout_ms: 30_000 }
    }
}

/// Name of the model in answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseModelConfig {
    /// What the client asked for.
    #[default]
    Requested,
    /// What the provider calls it.
    Target,
}

/// Limits of the OpenAI listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// Largest request body, in bytes.
    pub request_body_bytes: u64,
    /// Connections in total.
    pub connections: usize,
    /// Connections per address.
    pub connections_per_address: usize,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self { request_body_bytes: 32 << 20, connections: 4096, connections_per_address: 256 }
    }
}

/// Logs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ObservabilityConfig {
    /// Form of log lines.
    pub log: Option<crate::telemetry::LogForm>,
    /// Log filter.
    pub filter: Option<String>,
}

/// A config that passed its check, with the directory that its relative paths start from.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedEdge {
    /// The config.
    pub config: EdgeConfig,
    /// Where relative paths start.
    pub base: PathBuf,
}

impl EdgeConfig {
    /// Reads and checks a file. The config is there exactly when the problems hold no error.
    #[must_use]
    pub fn load(path: &Path) -> (Option<LoadedEdge>, Problems) {
        let mut problems = Problems::of(path.display().to_string());
        let text = match read(path) {
            Ok(text) => text,
            Err(message) => {
                problems.error(super::problem::Position::default(), message, Some("`iop init` writes one to start from".to_owned()));
                return (None, problems);
            }
        };
        let base = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let config = Self::parse(&text, &base, &mut problems);
        (config.map(|config| LoadedEdge { config, base }), problems)
    }

    /// Checks a text whose relative paths start at `base`.
    pub fn parse(text: &str, base: &Path, problems: &mut Problems) -> Option<Self> {
        let mut tree = Tree::parse(text, problems)?;
        schema::check(&mut tree, &EDGE, problems);
        check::cross(&tree, base, problems);
        if problems.has_errors() {
            return None;
        }
        match serde_json::from_value::<Self>(tree.to_json()) {
            Ok(config) => Some(config),
            Err(error) => {
                problems.error(tree.at, format!("the config can't be used: {error}"), None);
                None
            }
        }
    }
}

/// Reads a config file with its size limit.
pub(crate) fn read(path: &Path) -> Result<String, String> {
    let size = std::fs::metadata(path).map_err(|error| format!("can't read it: {error}"))?.len();
    if size > MAX_CONFIG_BYTES {
        return Err(format!("it has {size} bytes; at most {MAX_CONFIG_BYTES} are read"));
    }
    std::fs::read_to_string(path).map_err(|error| format!("can't read it: {error}"))
}

/// The JSON Schema of `edge.yaml`.
#[must_use]
pub fn edge_schema() -> serde_json::Value {
    schema::json_schema("IOP edge.yaml", &EDGE)
}
