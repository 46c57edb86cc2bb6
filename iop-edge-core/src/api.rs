//! Decides what a caller of the engine may ask and what it gets: surface-neutral submissions.
//!
//! CONTRACT between the engine (which implements `Edge`) and the OpenAI surface (one caller).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::catalog::RetryOn;
use bytes::Bytes;
use http::{HeaderMap, Method};
use iop_execution::{
    AdapterKey, ModelName, NodeId, Principal, ProviderId, RunId, RunStream, SessionId, Target, TunnelStream,
};

/// Where a request may go.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Destination {
    /// Any candidate of a model group: queue and selection rules apply.
    Model(ModelName),
    /// One adapter instance. Without a node: the only ready Node that has it. Never from a client's field or header.
    Direct {
        /// The Node.
        node: Option<NodeId>,
        /// The adapter instance.
        adapter: AdapterKey,
        /// The model.
        target: Target,
    },
}

/// One request to the engine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Submit {
    /// Where it may go.
    pub destination: Destination,
    /// Who calls.
    pub principal: Option<Principal>,
    /// Opaque correlation value.
    pub session_id: Option<SessionId>,
    /// Recorded only.
    pub background: bool,
    /// The caller wants output as it comes.
    pub stream: bool,
    /// Only providers that take this wire are candidates; none = any wire.
    pub wire: Option<WireKind>,
    /// Only providers that serve Anthropic's messages are candidates, by tunnel; `wire` says nothing then.
    pub messages: bool,
    /// Hard deadline: bounds queue and attempt together.
    pub deadline: Option<Instant>,
    /// Higher goes first; 0 is normal.
    pub priority: i8,
    /// Estimate of the prompt's tokens (LEA-2): class and filters, never usage.
    pub prompt_tokens_estimate: u32,
    /// Hash of the leading prompt text, for [`Strategy::PrefixAffinity`](crate::catalog::Strategy); 0 = none. The caller's
    /// principal is mixed in by the engine.
    pub prompt_prefix: u64,
    /// A provider that any other runtime-eligible one is preferred to (SEL-2).
    pub avoid_provider_id: Option<ProviderId>,
    /// The avoided provider may be chosen when no other is runtime-eligible.
    pub allow_avoided_provider_fallback: bool,
    /// The caller says itself when its client has seen content, by [`Submitted::commit`]. Otherwise content counts as seen once
    /// it is taken out of the output. Until then a suspect Node loses the run (FEN-7).
    pub explicit_commit: bool,
}

impl Submit {
    /// A streaming request for a model, defaults everywhere else.
    #[must_use]
    pub const fn to_model(model: ModelName) -> Self {
        Self::to(Destination::Model(model))
    }

    /// A streaming request, defaults everywhere else.
    #[must_use]
    pub const fn to(destination: Destination) -> Self {
        Self {
            destination,
            principal: None,
            session_id: None,
            background: false,
            stream: true,
            wire: None,
            messages: false,
            deadline: None,
            priority: 0,
            prompt_tokens_estimate: 0,
            prompt_prefix: 0,
            avoid_provider_id: None,
            allow_avoided_provider_fallback: false,
            explicit_commit: false,
        }
    }
}

/// Which wire the selected provider is used by (SEL-3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WireKind {
    /// Normalised run.
    Run,
    /// Raw tunnel.
    Tunnel,
}

/// What a request insists on in a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Wanted {
    Wire(WireKind),
    /// A tunnel to a provider that serves Anthropic's messages.
    Messages,
}

impl Wanted {
    /// By which wire that goes.
    pub(crate) const fn wire(self) -> WireKind {
        match self {
            Self::Wire(wire) => wire,
            Self::Messages => WireKind::Tunnel,
        }
    }
}

/// What admission decided: known before anything is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Admitted {
    /// The run.
    pub run_id: RunId,
    /// The Node.
    pub node: NodeId,
    /// The provider.
    pub provider: ProviderId,
    /// The adapter instance.
    pub adapter: AdapterKey,
    /// The model as the provider knows it.
    pub target: Target,
    /// How it is used.
    pub wire: WireKind,
    /// How long the request waited for a place.
    pub queued: Duration,
    /// Failures before commit that the config of the admission lets its caller send it again for (REC-5).
    pub retry_on: RetryOn,
}

/// What is sent once a provider is known.
#[derive(Debug)]
#[non_exhaustive]
pub enum Payload {
    /// The chat-completions object of a normalised run.
    Run {
        /// The object.
        input: Bytes,
    },
    /// A raw HTTP request.
    Tunnel {
        /// Method.
        method: Method,
        /// Path and query.
        path: String,
        /// Headers that passed the Edge's allow-list.
        headers: HeaderMap,
        /// Body.
        body: Bytes,
    },
}

/// Output of a dispatched request. Dropping it before the terminal cancels the run; its place follows LEA-6.
#[derive(Debug)]
#[non_exhaustive]
pub enum Output {
    /// Events.
    Run(RunStream),
    /// Frames.
    Tunnel(TunnelStream),
}

/// Says that the client of a run has seen content: from then on the run is not taken from a suspect Node (FEN-7).
#[derive(Debug, Clone, Default)]
pub struct CommitMark(Arc<AtomicBool>);

impl CommitMark {
    /// The client has seen content, or will now. More than once changes nothing.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// True once the client has seen content.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A dispatched request.
#[derive(Debug)]
#[non_exhaustive]
pub struct Submitted {
    /// What admission decided.
    pub admitted: Admitted,
    /// For callers that asked for `explicit_commit`.
    pub commit: CommitMark,
    /// What the engine knows of the end beside the terminal.
    pub notes: EndNotes,
    /// The output.
    pub output: Output,
}

/// Why a request was not admitted. Closed (EDG-1).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The request itself is wrong.
    #[error("invalid request: {0}")]
    InvalidRequest(&'static str),
    /// No model group has that name.
    #[error("no such model")]
    UnknownModel,
    /// The model is known, but no provider can take it.
    #[error("no provider is available")]
    Unavailable,
    /// Too many requests wait already.
    #[error("the queue is full")]
    QueueFull {
        /// When to try again.
        retry_after: Duration,
    },
    /// The request waited too long.
    #[error("the request waited too long for a place")]
    QueueTimeout,
    /// Several Nodes have that adapter: name one.
    #[error("several nodes are ready: name one")]
    NodeRequired,
    /// The deadline passed before admission.
    #[error("the deadline passed before admission")]
    DeadlineExceeded,
    /// Cancelled before admission.
    #[error("cancelled before admission")]
    Cancelled,
    /// The Edge takes no new requests.
    #[error("the edge is shutting down")]
    ShuttingDown,
}

/// A model as clients may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelListing {
    /// Public name.
    pub name: ModelName,
    /// Stable per config: Unix seconds.
    pub created: u64,
    /// Shown as `owned_by`.
    pub owned_by: String,
    /// Context length in tokens, where a provider told it.
    pub context_length: Option<u64>,
    /// At least one provider can serve it now.
    pub available: bool,
    /// It calls tools.
    pub tools: bool,
    /// It reasons.
    pub reasoning: bool,
}

/// What the OpenAI surface needs of the engine. `Edge` implements it; tests script it.
///
/// (The engine's own inherent methods `submit_run`, `submit_tunnel`, `cancel`, … are built on the same path.)
#[iop_execution::async_trait]
pub trait Engine: std::fmt::Debug + Send + Sync + 'static {
    /// Admits (or queues) a request, then asks `prepare` for what to send to the chosen provider, and dispatches it.
    ///
    /// Cancel safety: dropping the future removes a waiter from its queue or releases its place.
    async fn submit(
        &self,
        request: Submit,
        prepare: Box<dyn for<'a> FnOnce(&'a Admitted) -> Payload + Send>,
    ) -> Result<Submitted, SubmitError>;

    /// Models clients may see, in config order.
    fn models(&self) -> Vec<ModelListing>;

    /// At least one provider is ready.
    fn is_ready(&self) -> bool;
}

/// What a cancel reached (EDG-3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "it reached the run, or there is none")]
pub enum CancelRun {
    /// The run ends as cancelled.
    Cancelled,
    /// There is no such run, or it is over: nothing happened.
    UnknownRun,
}

/// What a new config changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigChange {
    /// Its revision.
    pub revision: u64,
    /// Nodes that are new.
    pub nodes_added: Vec<NodeId>,
    /// Nodes that are gone: their connections end as `removed_from_config`.
    pub nodes_removed: Vec<NodeId>,
    /// Nodes whose providers changed; the ready ones are sent their new config.
    pub nodes_changed: Vec<NodeId>,
    /// Models that are new, gone, or served in another way.
    pub models_changed: Vec<ModelName>,
}

/// Why a config was not taken. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// A config replaces one of a lower revision only.
    #[error("the config's revision must be higher than {current}")]
    NotNewer {
        /// The revision in force.
        current: u64,
    },
    /// The Edge is going down.
    #[error("the edge is shutting down")]
    ShuttingDown,
}

/// There is no such Node in the config.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {0} is not in the config")]
pub struct UnknownNode(
    /// Its id.
    pub NodeId,
);

/// Why a command has no answer. Closed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "a closed list")]
pub enum CommandError {
    /// There is no such Node in the config.
    #[error("the node is not in the config")]
    UnknownNode,
    /// The Node is not ready.
    #[error("the node is not ready")]
    NotReady,
    /// Too many commands are on their way to it.
    #[error("too many commands are on their way to the node")]
    TooMany,
    /// Its connection ended first.
    #[error("the connection to the node ended")]
    Disconnected,
    /// It did not answer in time.
    #[error("the node did not answer in time")]
    TimedOut,
    /// It answered that it can't.
    #[error("{}", .0.message)]
    Failed(iop_execution::ExecutionFailure),
}

/// What the engine knows of the end of a run beside its terminal; set before the terminal can be taken (HLT-2). In memory
/// only: it is on no wire.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndNote {
    /// The stall of the terminal is confirmed as one of this provider: `recovery_handoff=confirmed`. It grants no replay.
    ConfirmedStall {
        /// The provider.
        provider: ProviderId,
    },
    /// The Node has not said that the run stopped: it may still be at work (WIR-14).
    NotStopped,
    /// The request was not sent: nobody was asked anything.
    NotSent,
}

/// Where the engine leaves an [`EndNote`].
#[derive(Debug, Clone, Default)]
pub struct EndNotes(Arc<std::sync::OnceLock<EndNote>>);

impl EndNotes {
    /// What is known of the end; `None` = nothing beside the terminal.
    #[must_use]
    pub fn get(&self) -> Option<&EndNote> {
        self.0.get()
    }

    /// The first note stands.
    pub(crate) fn set(&self, note: EndNote) {
        let _second = self.0.set(note);
    }
}
