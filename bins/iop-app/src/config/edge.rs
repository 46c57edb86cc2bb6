//! Decides what `edge.yaml` can say, and what it means when it says nothing.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use iop_edge_core::catalog::{RetryCause, RetryOn};
use iop_wire::TrustDomain;
use serde::Deserialize;

use super::problem::Problems;
use super::schema;
use super::time::Timestamp;
use super::tree::{MAX_CONFIG_BYTES, Tree};

mod catalog;
mod check;
pub mod credentials;
pub mod records;
mod table;
#[cfg(test)]
mod tests;

pub use credentials::CredentialsConfig;
use credentials::ProviderCredentialRecord;
pub use table::{EDGE, KINDS, RETRY_CAUSES, STRATEGIES};

/// Port of the OpenAI listener.
pub const OPENAI_PORT: u16 = 8180;
/// Port that Nodes dial.
pub const NODES_PORT: u16 = 8443;
/// Port of metrics, health and the admin API.
pub const ADMIN_PORT: u16 = 9190;

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
    /// Trust domain of the workload identities of Edge and Nodes; none = `iop.local`.
    pub trust_domain: Option<String>,
    /// Who may use it.
    pub auth: AuthConfig,
    /// Who may operate it; none = nobody.
    pub admin: Option<AdminConfig>,
    /// Keys of providers that it lends to Nodes.
    pub credentials: CredentialsConfig,
    /// Nodes.
    pub nodes: Vec<NodeRecord>,
    /// Models.
    pub models: ModelsConfig,
    /// Waiting requests.
    pub queue: QueueConfig,
    /// When Nodes count as failing.
    pub health: HealthConfig,
    /// Further attempts of requests that failed before content.
    pub recovery: RecoveryConfig,
    /// Hard limit for a whole request in milliseconds; 0 = none.
    pub request_deadline_ms: u64,
    /// Name of the model in answers.
    pub response_model: ResponseModelConfig,
    /// Web pages of other origins.
    pub cors: CorsConfig,
    /// `/v1/models` lists models too that no provider can serve now.
    pub list_unavailable: bool,
    /// Limits of the OpenAI listener.
    pub limits: LimitsConfig,
    /// Connections of Nodes.
    pub link: super::link::LinkConfig,
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
    /// Metrics, health and the admin API.
    pub admin: Listener,
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self {
            openai: Listener::loopback(OPENAI_PORT),
            nodes: Listener::loopback(NODES_PORT),
            admin: Listener::loopback(ADMIN_PORT),
        }
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
    pub nodes: Option<NodesTls>,
}

/// Certificates of the listener of Nodes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodesTls {
    /// PEM file with the chain.
    pub cert: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
    /// PEM file with the CAs of the Nodes' certificates; with one, every Node must show its workload identity.
    pub client_ca: Option<PathBuf>,
}

impl NodesTls {
    /// The certificate and its key.
    #[must_use]
    pub fn pair(&self) -> TlsPair {
        TlsPair { cert: self.cert.clone(), key: self.key.clone() }
    }
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
    /// Keys of clients, those of the file among them; none and no file = open.
    pub api_keys: Vec<ApiKeyRecord>,
    /// File with keys that `iop key` writes.
    pub api_keys_file: Option<String>,
    /// File with tokens that `iop token` writes.
    pub node_tokens_file: Option<String>,
}

impl AuthConfig {
    /// Everybody may call.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.api_keys.is_empty() && self.api_keys_file.is_none()
    }
}

/// A secret from before a rotation.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreviousSecret {
    /// `sha256:…` or `file:…`.
    pub hash: String,
    /// Until when it is accepted.
    pub expires_at: Timestamp,
}

/// How much a key may use; 0 = no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyLimitsConfig {
    /// Requests in any 60 seconds.
    pub requests_per_minute: u32,
    /// Tokens in any 60 seconds.
    pub tokens_per_minute: u64,
    /// Requests at once.
    pub concurrent: u32,
}

/// The token of one Node, as `auth.node_tokens_file` has it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeTokenRecord {
    /// The Node.
    pub node: String,
    /// Public id of its token.
    pub token_id: String,
    /// `sha256:…` or `file:…`.
    pub token_hash: String,
    /// From when it is refused.
    pub expires_at: Option<Timestamp>,
    /// The secret before the last rotation.
    pub previous: Option<PreviousSecret>,
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
    /// Who waits with a higher one goes first.
    #[serde(default)]
    pub priority: i8,
    /// The highest that a request may ask for; default the priority.
    pub max_priority: Option<i8>,
    /// How much it may use.
    #[serde(default)]
    pub limits: KeyLimitsConfig,
    /// From when it is refused.
    pub expires_at: Option<Timestamp>,
    /// The secret before the last rotation.
    pub previous: Option<PreviousSecret>,
}

/// Who may operate an Edge.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdminConfig {
    /// Of the admin key: `sha256:…` or `file:…`.
    pub key_hash: String,
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
    pub token_id: Option<String>,
    /// `sha256:…` or `file:…`; none = it can't connect.
    pub token_hash: Option<String>,
    /// From when the token is refused.
    pub token_expires_at: Option<Timestamp>,
    /// The token's secret before the last rotation.
    pub previous_token: Option<PreviousSecret>,
    /// Workload identities that are this Node; empty = `spiffe://<trust_domain>/iop/node/<id>`.
    #[serde(default)]
    pub identities: Vec<String>,
    /// What it runs.
    #[serde(default)]
    pub providers: Vec<ProviderRecord>,
    /// False: known, and may not connect.
    #[serde(default = "yes")]
    pub enabled: bool,
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
    /// Longer time up to the first progress, in milliseconds; 0 = the stall timeout.
    #[serde(default)]
    pub first_response_timeout_ms: u64,
    /// What each 1 000 estimated prompt tokens add to it, in milliseconds.
    #[serde(default)]
    pub first_response_per_1k_prompt_ms: u64,
    /// Time for the probe after a stall, in milliseconds; 0 = default.
    #[serde(default)]
    pub probe_timeout_ms: u64,
    /// Close grace in milliseconds; 0 = default.
    #[serde(default)]
    pub close_grace_ms: u64,
    /// Wait for usage in milliseconds; 0 = default.
    #[serde(default)]
    pub terminal_linger_ms: u64,
    /// What happens to a cancelled call.
    #[serde(default)]
    pub cancel_policy: CancelPolicyConfig,
    /// Its key, which the Node has.
    pub auth: Option<ProviderAuth>,
    /// Its key, which the Edge has.
    pub credential: Option<ProviderCredentialRecord>,
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

/// What happens to a cancelled call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelPolicyConfig {
    /// Its connection is closed.
    #[default]
    Abort,
    /// Its answer is read to the end first.
    Drain,
}

/// Where a provider's key is.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderAuth {
    /// `env:NAME` or `file:PATH`, resolved on the Node.
    pub bearer: String,
}

/// Models: `auto`, groups, or both (CFG-3).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "ModelsForm")]
pub enum ModelsConfig {
    /// What connected providers list.
    #[default]
    Auto,
    /// These groups only.
    Groups(Vec<ModelRecord>),
    /// These groups, and what connected providers list beside them.
    GroupsAndAuto(Vec<ModelRecord>),
}

impl ModelsConfig {
    /// What connected providers list is published.
    #[must_use]
    pub const fn is_auto(&self) -> bool {
        matches!(self, Self::Auto | Self::GroupsAndAuto(_))
    }

    /// The explicit groups.
    #[must_use]
    pub fn groups(&self) -> &[ModelRecord] {
        match self {
            Self::Auto => &[],
            Self::Groups(groups) | Self::GroupsAndAuto(groups) => groups,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ModelsForm {
    Word(AutoWord),
    List(Vec<ModelsItem>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ModelsItem {
    Word(AutoWord),
    Group(Box<ModelRecord>),
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
            ModelsForm::List(items) => {
                let (mut groups, mut auto) = (Vec::new(), false);
                for item in items {
                    match item {
                        ModelsItem::Word(AutoWord::Auto) => auto = true,
                        ModelsItem::Group(group) => groups.push(*group),
                    }
                }
                if auto { Self::GroupsAndAuto(groups) } else { Self::Groups(groups) }
            }
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
    /// Estimated prompt tokens from which a request is long.
    pub long_context_threshold: Option<u32>,
    /// How a candidate is chosen; none = `queue.strategy`.
    pub strategy: Option<StrategyConfig>,
    /// How long requests wait when no candidate is connected.
    #[serde(default)]
    pub absence_grace_ms: u64,
    /// How many may wait; none = `queue.max_waiting`.
    pub max_waiting: Option<u32>,
    /// Longest wait in milliseconds; none = `queue.timeout_ms`.
    pub queue_timeout_ms: Option<u64>,
    /// Failures that another attempt may follow; none = `recovery.retry_on`.
    pub retry_on: Option<RetryList>,
}

/// How a candidate is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StrategyConfig {
    /// The one with the least load.
    LeastLoaded,
    /// In turn.
    RoundRobin,
    /// The first of the list that is free.
    Ordered,
    /// The one that had the same leading text before.
    PrefixAffinity,
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
    /// How a candidate is chosen; none = least loaded.
    pub strategy: Option<StrategyConfig>,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self { max_waiting: 1024, timeout_ms: 30_000, strategy: None }
    }
}

/// When Nodes count as failing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HealthConfig {
    /// How long a suspect may stay silent before its uncommitted requests are withdrawn, in milliseconds; 0 = for ever.
    pub suspicion_withdraw_ms: u64,
    /// Time for the receipt of a dispatch, in milliseconds.
    pub dispatch_ack_timeout_ms: u64,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self { suspicion_withdraw_ms: 10_000, dispatch_ack_timeout_ms: 2_000 }
    }
}

/// Further attempts of requests that failed before content.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecoveryConfig {
    /// Attempts after the first one.
    pub max_extra_attempts: u32,
    /// Failures that another attempt may follow; none = the engine's default.
    pub retry_on: Option<RetryList>,
    /// When a streaming client that waits is shown that somebody is there, in milliseconds; 0 = never.
    pub keepalive_after_ms: u64,
}

impl Default for RecoveryConfig {
    fn default() -> Self {
        Self { max_extra_attempts: 2, retry_on: None, keepalive_after_ms: 20_000 }
    }
}

/// Failures that another attempt may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub struct RetryList(pub RetryOn);

impl TryFrom<Vec<String>> for RetryList {
    type Error = String;

    fn try_from(words: Vec<String>) -> Result<Self, String> {
        let cause = |word: &String| {
            let cause = RetryCause::ALL.iter().copied().find(|cause| cause.as_str() == word);
            cause.ok_or_else(|| format!("`{}` is no cause for another attempt", word.escape_debug()))
        };
        let causes: Vec<_> = words.iter().map(cause).collect::<Result<_, _>>()?;
        Ok(Self(RetryOn::of(&causes)))
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

/// Web pages of other origins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CorsConfig {
    /// Origins whose pages may read answers; `*` = all.
    pub allowed_origins: Vec<String>,
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

/// A config that passed its check, and the file it was in.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedEdge {
    /// The config.
    pub config: EdgeConfig,
    /// The file.
    pub path: PathBuf,
}

impl LoadedEdge {
    /// Where relative paths of the config start.
    #[must_use]
    pub fn base(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }
}

impl EdgeConfig {
    /// Name of this Edge.
    #[must_use]
    pub fn edge_id(&self) -> &str {
        self.edge_id.as_deref().unwrap_or("edge")
    }

    /// Trust domain of workload identities.
    #[must_use]
    pub fn trust_domain(&self) -> TrustDomain {
        self.trust_domain.clone().and_then(|name| TrustDomain::new(name).ok()).unwrap_or_default()
    }

    /// Every Node must show a workload identity.
    #[must_use]
    pub fn requires_identity(&self) -> bool {
        self.tls.nodes.as_ref().is_some_and(|nodes| nodes.client_ca.is_some())
    }

    /// Reads and checks a file. The config is there exactly when the problems hold no error.
    #[must_use]
    pub fn load(path: &Path) -> (Option<LoadedEdge>, Problems) {
        Self::load_with(path, records::Reading::default())
    }

    /// The same, with the files it names read otherwise.
    #[must_use]
    pub fn load_with(path: &Path, reading: records::Reading<'_>) -> (Option<LoadedEdge>, Problems) {
        let mut problems = Problems::of(path.display().to_string());
        let text = match read(path) {
            Ok(text) => text,
            Err(message) => {
                problems.error(
                    super::problem::Position::default(),
                    message,
                    Some("`iop init` writes one to start from".to_owned()),
                );
                return (None, problems);
            }
        };
        let base = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let config = Self::parse_with(&text, &base, reading, &mut problems);
        (config.map(|config| LoadedEdge { config, path: path.to_path_buf() }), problems)
    }

    /// Checks a text whose relative paths start at `base`.
    pub fn parse(text: &str, base: &Path, problems: &mut Problems) -> Option<Self> {
        Self::parse_with(text, base, records::Reading::default(), problems)
    }

    fn parse_with(text: &str, base: &Path, reading: records::Reading<'_>, problems: &mut Problems) -> Option<Self> {
        let mut tree = Tree::parse(text, problems)?;
        schema::check(&mut tree, &EDGE, problems);
        let files = records::Files::read(&tree, base, reading, problems);
        check::cross(&tree, &files, base, problems);
        if problems.has_errors() {
            return None;
        }
        match serde_json::from_value::<Self>(tree.to_json()).and_then(|config| files.merge(config)) {
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
