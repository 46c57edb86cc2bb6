//! Decides what Edge and Node can say to each other: every message in domain types. Protobuf stays behind [`crate::convert`].

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use iop_execution::closed_list as closed;
use iop_execution::{
    AdapterKey, CancelReason, InvalidName, NodeId, ProviderId, Redacted, RunEvent, RunId, SessionId, Target,
    TunnelFrame,
};

mod command;
mod credential;
mod scope;

pub use command::{CapabilitiesResult, CommandRequest, CommandResponse, CommandResult, NodeCommand, TargetHealth};
pub use credential::{CredentialScope, CredentialState, CredentialUse, LeaseSigner};

/// Session-local number of a run: given by the Edge, from 1, rising, never reused (WIR-11).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunNumber(pub u64);

impl fmt::Display for RunNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One message with its place in the order of its direction (WIR-6): from 1, without gaps.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequenced<M> {
    /// Its place.
    pub seq: u64,
    /// The message.
    pub message: M,
}

/// What a Node says.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ToEdge {
    /// First message of a connection.
    Hello(Hello),
    /// Asks for ownership of a Node's place.
    Register(RegisterRequest),
    /// Adapters are started, handlers installed.
    Ready(NodeReadyRequest),
    /// Receipt of a run or tunnel (WIR-14).
    Accepted(RunNumber),
    /// Event of a run; `RunEvent::seq` is its `n`.
    Event(RunNumber, RunEvent),
    /// Frame of a tunnel with its `n`, from 1.
    Frame(RunNumber, u64, TunnelFrame),
    /// More credit for the request body of a run.
    Credit(RunNumber, u32),
    /// Answer to a command.
    CommandResponse(CommandResponse),
    /// Answer to a config push.
    ConfigAck(ConfigAck),
    /// Liveness question.
    Ping(Ping),
    /// Liveness answer.
    Pong(Pong),
    /// No new work, please.
    Drain(Drain),
    /// The only graceful end.
    Goodbye(Goodbye),
}

/// What an Edge says.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ToNode {
    /// Answer to Hello.
    HelloAck(HelloAck),
    /// Answer to Register.
    RegisterResponse(RegisterResponse),
    /// Answer to Ready.
    ReadyResponse(NodeReadyResponse),
    /// Start a normalised run.
    Run(RunDispatch),
    /// Start a tunnel.
    Tunnel(TunnelDispatch),
    /// More of a request body.
    Chunk(RequestChunk),
    /// More credit for the output of a run.
    Credit(RunNumber, u32),
    /// Stop a run.
    Cancel(RunNumber, CancelReason),
    /// A command of the closed set.
    Command(CommandRequest),
    /// A new node config.
    ConfigUpdate(ConfigUpdate),
    /// Liveness question.
    Ping(Ping),
    /// Liveness answer.
    Pong(Pong),
    /// The Edge is going down: dial again elsewhere or later.
    Drain(Drain),
    /// The only graceful end.
    Goodbye(Goodbye),
}

/// Protocol range, features and limits of a Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Lowest protocol it speaks.
    pub proto_min: u32,
    /// Highest protocol it speaks.
    pub proto_max: u32,
    /// What a peer must understand beyond the protocol.
    pub features: Vec<String>,
    /// Version of the Node software, for people.
    pub node_version: String,
    /// Random, new with each process.
    pub instance_id: [u8; 16],
    /// Which connection of that process this is, from 1.
    pub connection_ordinal: u64,
    /// Largest envelope it takes, in bytes.
    pub max_envelope: u32,
}

/// What the Edge chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloAck {
    /// The protocol.
    pub proto: u32,
    /// Features of both.
    pub features: Vec<String>,
    /// Largest envelope it takes, in bytes.
    pub max_envelope: u32,
    /// Name of this Edge, for people.
    pub edge_id: String,
}

/// Proves which Node this is.
#[derive(Debug, Clone, PartialEq)]
pub struct RegisterRequest {
    /// The whole node token.
    pub token: Redacted<String>,
    /// X25519 key for credential leases, fresh for this connection; empty while none is used.
    pub recipient_key: Bytes,
    /// Adapter kinds this Node can run.
    pub inventory: Vec<AdapterInventory>,
    /// Checked against the token's record when given.
    pub claimed_node_id: Option<NodeId>,
}

/// One adapter kind a Node can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterInventory {
    /// The kind.
    pub kind: String,
    /// Version of the adapter, for people.
    pub version: String,
}

/// Accepted with config, or refused with a reason.
#[derive(Debug, Clone, PartialEq)]
pub struct RegisterResponse {
    /// Edge wall clock, Unix milliseconds.
    pub edge_time_ms: u64,
    /// The outcome.
    pub outcome: Result<Registered, RegisterRefusal>,
}

/// A Node's place is claimed for this connection.
#[derive(Debug, Clone, PartialEq)]
pub struct Registered {
    /// Which Node it is.
    pub node_id: NodeId,
    /// What it shall run.
    pub config: NodeConfigPayload,
    /// Whose credential leases it takes, at most 8 (CRD-8).
    pub trusted_lease_signers: Vec<LeaseSigner>,
}

/// Why a registration was refused, and when to come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisterRefusal {
    /// Why.
    pub reason: RefusalReason,
    /// Minimum wait before the next try; zero = none given.
    pub retry_after: Duration,
}

closed! {
    /// Why a registration was refused (REG-4).
    RefusalReason {
        /// No record has this token. Fatal.
        UnknownToken = "unknown_token",
        /// Another connection owns this Node's place. Retryable.
        DuplicateConnection = "duplicate_connection",
        /// The Node's config could not be built. Retryable.
        ConfigUnavailable = "config_unavailable",
        /// No common protocol version. Fatal.
        UnsupportedProtocol = "unsupported_protocol",
        /// Managed mode wants a workload identity. Fatal.
        IdentityRequired = "identity_required",
        /// Identity and token belong to different records. Fatal.
        IdentityMismatch = "identity_mismatch",
        /// The Edge takes no new Nodes. Retryable.
        Draining = "draining",
    }
}

impl RefusalReason {
    /// True if trying again can't help.
    #[must_use]
    pub const fn is_fatal(self) -> bool {
        match self {
            Self::UnknownToken | Self::UnsupportedProtocol | Self::IdentityRequired | Self::IdentityMismatch => true,
            Self::DuplicateConnection | Self::ConfigUnavailable | Self::Draining => false,
        }
    }
}

closed! {
    /// Why a connection ended (WIR-13).
    CloseCode {
        /// The stream ended or was reset without a Goodbye.
        Closed = "closed",
        /// A ping had no pong.
        HeartbeatTimeout = "heartbeat_timeout",
        /// The peer broke the protocol.
        ProtocolViolation = "protocol_violation",
        /// The peer sent more than its credit.
        FlowControl = "flow_control",
        /// The control queue overflowed.
        ControlOverflow = "control_overflow",
        /// A newer connection of the same process took over.
        Superseded = "superseded",
        /// Drained.
        Drained = "drained",
        /// The peer restarts.
        Restart = "restart",
        /// The peer shuts down.
        Shutdown = "shutdown",
        /// Hello and Register did not come in time.
        RegisterTimeout = "register_timeout",
        /// Ready did not come in time.
        ReadyTimeout = "ready_timeout",
        /// No common protocol version.
        UnsupportedProtocol = "unsupported_protocol",
        /// The workload identity is no longer valid.
        IdentityRevoked = "identity_revoked",
        /// The Node is no longer configured.
        RemovedFromConfig = "removed_from_config",
    }
}

closed! {
    /// Which wire a provider is used by (EXE-2).
    WireMode {
        /// Tunnels where the provider supports them, else runs.
        Auto = "auto",
        /// Runs only.
        Run = "run",
    }
}

closed! {
    /// What a cancel does to the upstream call (NOD-9).
    CancelPolicy {
        /// Drops it.
        Abort = "abort",
        /// Reads it to its end.
        Drain = "drain",
    }
}

/// What a Node shall run (REG-1).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeConfigPayload {
    /// Counts versions of this config.
    pub revision: u64,
    /// Its providers.
    pub providers: Vec<ProviderConfig>,
}

/// One configured provider of a Node. Times are in milliseconds; 0 = the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderConfig {
    /// Its id.
    pub provider_id: ProviderId,
    /// Name of the adapter instance on the Node.
    pub adapter: AdapterKey,
    /// Code that runs it.
    pub kind: String,
    /// Origin of the backend; empty for kinds without one.
    pub base_url: String,
    /// Which wire it is used by.
    pub wire: WireMode,
    /// Places; 0 = what the backend says, else 16.
    pub capacity: u32,
    /// Of which for long requests; 0 = all.
    pub long_capacity: u32,
    /// Targets it may serve; empty = whatever it lists.
    pub targets: Vec<Target>,
    /// Raw stall timeout (EXE-13).
    pub response_stall_timeout_ms: u64,
    /// Longer wait for the first progress.
    pub first_response_timeout_ms: u64,
    /// Allowance per 1 000 prompt tokens.
    pub stall_per_1k_prompt_ms: u64,
    /// How long a cancelled provider may take to return; 0 = 5 000.
    pub close_grace_ms: u64,
    /// Longest probe; 0 = 5 000.
    pub probe_timeout_ms: u64,
    /// Wait for usage and `[DONE]` after a finish reason; 0 = 2 000.
    pub terminal_linger_ms: u64,
    /// What a cancel does.
    pub cancel_policy: CancelPolicy,
    /// Reference to a credential on the Node (`env:NAME`, `file:PATH`); empty = none (CRD-16).
    pub auth: String,
    /// Each call needs a credential lease of this; none = no call does. Never together with `auth` (CRD-16).
    pub credential: Option<CredentialUse>,
}

/// Scheme, host and port of a base URL; an IPv6 host is in its brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the three parts of an origin")]
pub struct BaseOrigin {
    /// `http` or `https`.
    pub scheme: String,
    /// Name or address, in lower case.
    pub host: String,
    /// The port that stands in the URL, else the scheme's own.
    pub port: u16,
}

impl ProviderConfig {
    /// Where `base_url` leads: both sides read it alike, because a credential lease is bound to it (CRD-2). `None` if it is
    /// no `http` or `https` URL, or holds a user, a query or a fragment.
    #[must_use]
    pub fn origin(&self) -> Option<BaseOrigin> {
        if self.base_url.contains(['?', '#', '@', '\\']) {
            return None;
        }
        let uri: http::Uri = self.base_url.parse().ok()?;
        let (scheme, default) = match uri.scheme_str()? {
            "http" => ("http", 80),
            "https" => ("https", 443),
            _ => return None,
        };
        let authority = uri.authority()?;
        let host = authority.host();
        let port = match authority.as_str().get(host.len()..)? {
            "" | ":" => default,
            port => port.strip_prefix(':')?.parse().ok()?,
        };
        let host = Some(host.to_ascii_lowercase()).filter(|host| !host.is_empty())?;
        Some(BaseOrigin { scheme: scheme.to_owned(), host, port })
    }

    /// A provider of this kind with defaults everywhere else; its adapter instance has the provider's own name.
    ///
    /// # Errors
    /// [`InvalidName`] when the id is no valid adapter key; it always is.
    pub fn new(provider_id: ProviderId, kind: impl Into<String>) -> Result<Self, InvalidName> {
        Ok(Self {
            adapter: AdapterKey::new(provider_id.as_str())?,
            provider_id,
            kind: kind.into(),
            base_url: String::new(),
            wire: WireMode::Auto,
            capacity: 0,
            long_capacity: 0,
            targets: Vec::new(),
            response_stall_timeout_ms: 0,
            first_response_timeout_ms: 0,
            stall_per_1k_prompt_ms: 0,
            close_grace_ms: 0,
            probe_timeout_ms: 0,
            terminal_linger_ms: 0,
            cancel_policy: CancelPolicy::Abort,
            auth: String::new(),
            credential: None,
        })
    }
}

/// The Node is able to run requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeReadyRequest {
    /// Must be the registered one.
    pub node_id: NodeId,
    /// The config it runs.
    pub config_revision: u64,
    /// Its providers.
    pub providers: Vec<ProviderReady>,
}

/// A provider as it started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderReady {
    /// Its id.
    pub provider_id: ProviderId,
    /// Places the backend has; 0 = not known.
    pub max_concurrency: u32,
    /// It takes tunnels.
    pub tunnels: bool,
    /// It takes runs.
    pub runs: bool,
    /// It calls tools.
    pub tools: bool,
    /// It reasons.
    pub reasoning: bool,
    /// It serves Anthropic's messages, by tunnel.
    pub messages: bool,
    /// Targets it lists (`models: auto`).
    pub targets: Vec<ReadyTarget>,
}

/// One target a provider lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyTarget {
    /// The name.
    pub target: Target,
    /// Context length in tokens; 0 = not known.
    pub context_length: u64,
}

/// Answer to Ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeReadyResponse {
    /// False: this connection will never be ready.
    pub ready: bool,
    /// Random stand-in of the generation for credential leases (CRD-2).
    pub lease_generation: u64,
}

/// What a run and a tunnel dispatch have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct DispatchHead {
    /// The run.
    pub run_id: RunId,
    /// Its number on this connection. 0 until the request is written: the outbox assigns it.
    pub run: RunNumber,
    /// The provider.
    pub provider_id: ProviderId,
    /// The adapter instance.
    pub adapter: AdapterKey,
    /// The model.
    pub target: Target,
    /// Opaque correlation value.
    pub session_id: Option<SessionId>,
    /// Recorded only.
    pub background: bool,
    /// The client wants a stream.
    pub stream: bool,
    /// Raw stall timeout: the Node refuses an illegal one before any lookup (EXE-13, NOD-3).
    pub response_stall_timeout_ms: u64,
    /// Hard deadline from receipt, in milliseconds; 0 = none.
    pub deadline_ms: u64,
    /// Length of the request body, which follows as chunks.
    pub body_len: u64,
    /// Initial credit for this run's output, in bytes.
    pub window: u32,
    /// Estimate of the prompt's tokens (LEA-2).
    pub prompt_tokens_estimate: u32,
    /// Sealed credential lease; empty = none.
    pub credential_lease: Redacted<Bytes>,
    /// What the lease was issued for: there with a lease, and only with one.
    pub credential_scope: Option<Box<CredentialScope>>,
}

/// Start a normalised run; its body is the chat-completions object.
#[derive(Debug, Clone, PartialEq)]
pub struct RunDispatch {
    /// The common part.
    pub head: DispatchHead,
}

/// Start a tunnel.
#[derive(Debug, Clone, PartialEq)]
pub struct TunnelDispatch {
    /// The common part.
    pub head: DispatchHead,
    /// HTTP method.
    pub method: Method,
    /// Path and query.
    pub path: Redacted<String>,
    /// Headers that passed the Edge's allow-list.
    pub headers: Redacted<HeaderMap>,
}

/// A piece of a request body, at most 16 KiB.
#[derive(Clone, PartialEq, Eq)]
pub struct RequestChunk {
    /// Of which run.
    pub run: RunNumber,
    /// The bytes.
    pub data: Bytes,
    /// No more comes.
    pub last: bool,
}

impl fmt::Debug for RequestChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestChunk")
            .field("run", &self.run)
            .field("bytes", &self.data.len())
            .field("last", &self.last)
            .finish()
    }
}

/// A new node config, or news of credentials alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigUpdate {
    /// The config, with its revision. None: the one in force stays, and no ack follows. Only a Node that registered with a
    /// recipient key is sent that.
    pub config: Option<NodeConfigPayload>,
    /// Whose credential leases the Node takes from now on, at most 8 (CRD-8).
    pub trusted_lease_signers: Vec<LeaseSigner>,
    /// Where every slot stands that the Node may get leases of (CRD-8).
    pub credential_states: Vec<CredentialState>,
}

impl ConfigUpdate {
    /// A new config of a Node that gets no credential leases.
    #[must_use]
    pub const fn new(config: NodeConfigPayload) -> Self {
        Self { config: Some(config), trusted_lease_signers: Vec::new(), credential_states: Vec::new() }
    }
}

/// What became of a config push: both facts in one message. Between two sides that share the feature
/// [`FEATURE_PROVIDER_OFFERS`](crate::limits::FEATURE_PROVIDER_OFFERS) a Node also sends one by itself, with the revision in
/// force, when what its providers offer has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigAck {
    /// Highest revision received.
    pub seen_revision: u64,
    /// Revision in force.
    pub applied_revision: u64,
    /// Why the seen one is not in force; empty = it is.
    pub error: String,
    /// What the providers of the config in force offer now; empty = as they said before.
    pub providers: Vec<ProviderReady>,
}

/// Liveness question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ping {
    /// Rising number of the asker.
    pub nonce: u64,
}

/// Liveness answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pong {
    /// The ping's number.
    pub nonce: u64,
    /// Edge wall clock, Unix milliseconds; 0 from a Node.
    pub edge_time_ms: u64,
}

/// No new work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drain {
    /// What is in flight may take this long, in milliseconds.
    pub deadline_ms: u64,
    /// The sender ends this connection only to make a new one: work may wait for it.
    pub returning: bool,
}

/// The only graceful end (WIR-13).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goodbye {
    /// Why.
    pub code: CloseCode,
    /// Minimum wait before the next connection, in milliseconds; 0 = none given.
    pub retry_after_ms: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_read_alike_wherever_it_is_asked_for() {
        // CRD-2, CRD-6
        let origin = |base_url: &str| {
            let mut config = ProviderConfig::new(ProviderId::new("p").unwrap(), "openai_compat").unwrap();
            config.base_url = base_url.to_owned();
            config.origin().map(|BaseOrigin { scheme, host, port }| format!("{scheme} {host} {port}"))
        };
        for (url, wanted) in [
            ("https://API.example.com", "https api.example.com 443"),
            ("https://api.example.com:443/v1", "https api.example.com 443"),
            ("http://127.0.0.1:8000/v1/", "http 127.0.0.1 8000"),
            ("http://[::1]/", "http [::1] 80"),
            ("http://[::1]:9", "http [::1] 9"),
        ] {
            assert_eq!(origin(url).as_deref(), Some(wanted), "{url}");
        }
        for url in [
            "",
            "api.example.com",
            "ftp://a",
            "http://",
            "http://a:b",
            "http://a:99999",
            "http://u@a",
            "http://a?b",
            "http://a#b",
        ] {
            assert_eq!(origin(url), None, "{url}");
        }
    }
}
