//! Decides what an adapter is: the contract between IOP and whoever runs models.

use std::error::Error as StdError;
use std::fmt;
use std::num::NonZeroU32;

use async_trait::async_trait;
use bytes::Bytes;

use crate::closed_list as closed;
use crate::event::Completion;
use crate::failure::{ExecutionFailure, FailureCode, FailureStage, ProviderContacted, ProviderReason};
use crate::id::Target;
use crate::request::{RunRequest, TunnelRequest};
use crate::sink::{EventSink, Fenced, HeadSink, TunnelEnd};

/// One configured adapter instance: code that runs requests on one backend.
///
/// The provider *pushes* output into the sink it is given and *returns* how it ended. A sink has no terminal method, so a
/// run has exactly one terminal whatever an implementation does.
///
/// Rules for implementations:
/// - Awaiting a push is backpressure: don't buffer around it.
/// - A push that answers [`Fenced`] means the run is over; return at once (`?` does it) and drop the upstream call.
/// - Select on [`EventSink::cancelled`] wherever you wait for the backend, so that a cancel closes the upstream call even
///   while nothing arrives. After the close grace the future is dropped, which must release everything.
/// - No detached tasks, no blocking in `poll`.
/// - One call makes at most one request that carries the caller's work: no retry, no redirect, no other target (NOD-10).
///
/// Wrappers should carry `#[deny(clippy::missing_trait_methods)]`, so that a method with a default is not lost.
#[async_trait]
pub trait Provider: fmt::Debug + Send + Sync + 'static {
    /// What it can do. Cheap; may be asked often.
    fn capabilities(&self) -> Capabilities;

    /// Runs one normalised request.
    ///
    /// # Errors
    /// Any [`ProviderError`]; it becomes the run's terminal.
    ///
    /// # Cancel safety
    /// Dropping the future must drop the upstream call.
    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError>;

    /// Relays one raw HTTP exchange. Unsupported by default.
    ///
    /// # Errors
    /// Any [`ProviderError`]; it becomes the tunnel's terminal.
    ///
    /// # Cancel safety
    /// Dropping the future must drop the upstream call.
    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        drop((request, head));
        Err(ProviderError::unsupported("this adapter has no tunnel"))
    }

    /// Whether exactly this target can produce tokens now. Unknown by default: answer [`Health::Unavailable`] only when
    /// the backend is refused or gone.
    async fn probe_health(&self, target: &Target) -> Health {
        let _ = target;
        Health::Unknown
    }

    /// Runs a command of the closed set. Unsupported by default.
    ///
    /// # Errors
    /// Any [`ProviderError`].
    async fn command(&self, command: ProviderCommand) -> Result<CommandOutput, ProviderError> {
        drop(command);
        Err(ProviderError::unsupported("this adapter has no such command"))
    }

    /// Called once before the first request, at the Node's start or when config adds the provider.
    ///
    /// # Errors
    /// When the adapter can't ever work as configured. A backend that is merely down is no error.
    async fn start(&self) -> Result<(), ProviderError> {
        Ok(())
    }

    /// The place to ask the backend again what it serves and how many calls it takes. What [`Self::capabilities`] answers
    /// afterwards is reported (ADP-5). Called every half minute, sooner while the backend is silent or lists nothing, and
    /// before each later ready of a Node that keeps this instance; never twice at once. Must be bounded in time.
    ///
    /// A backend that does not answer keeps the list it gave last. What an answer does not name any more is gone.
    ///
    /// # Cancel safety
    /// May be dropped at any await; then nothing has changed.
    async fn refresh(&self) -> Refreshed {
        Refreshed::Answered
    }

    /// Called once after the last request.
    async fn stop(&self) {}
}

/// What a provider can do (EXE-2).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// How many calls it takes at once, where it knows.
    pub max_concurrency: Option<NonZeroU32>,
    /// Normalised runs.
    pub runs: bool,
    /// Raw tunnels. A provider that supports them gets tunnels, any other gets runs.
    pub tunnels: bool,
    /// Commands.
    pub commands: bool,
    /// Tool calling.
    pub tools: bool,
    /// Reasoning output.
    pub reasoning: bool,
    /// Embeddings.
    pub embeddings: bool,
    /// It makes each call with the credential that comes with it ([`RunRequest::credential`]).
    pub credentials: bool,
    /// Anthropic's messages (`POST /v1/messages`), by tunnel.
    pub messages: bool,
    /// Targets it lists, possibly none.
    pub targets: Vec<TargetInfo>,
}

/// One target of a provider.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TargetInfo {
    /// The name.
    pub target: Target,
    /// Context length in tokens, where known.
    pub context_length: Option<u64>,
}

impl TargetInfo {
    /// A target whose context length is not known.
    #[must_use]
    pub const fn new(target: Target) -> Self {
        Self { target, context_length: None }
    }

    /// With its context length.
    #[must_use]
    pub const fn with_context_length(mut self, tokens: Option<u64>) -> Self {
        self.context_length = tokens;
        self
    }
}

impl Capabilities {
    /// Runs only, nothing else known.
    #[must_use]
    pub const fn runs_only() -> Self {
        Self {
            max_concurrency: None,
            runs: true,
            tunnels: false,
            commands: false,
            tools: false,
            reasoning: false,
            embeddings: false,
            credentials: false,
            messages: false,
            targets: Vec::new(),
        }
    }

    /// With tunnels too.
    #[must_use]
    pub const fn with_tunnels(mut self) -> Self {
        self.tunnels = true;
        self
    }

    /// With credentials per call.
    #[must_use]
    pub const fn with_credentials(mut self) -> Self {
        self.credentials = true;
        self
    }

    /// With a concurrency limit.
    #[must_use]
    pub const fn with_max_concurrency(mut self, limit: Option<NonZeroU32>) -> Self {
        self.max_concurrency = limit;
        self
    }

    /// With tool calling and reasoning as told.
    #[must_use]
    pub const fn with_features(mut self, tools: bool, reasoning: bool) -> Self {
        self.tools = tools;
        self.reasoning = reasoning;
        self
    }

    /// With these targets.
    #[must_use]
    pub fn with_targets(mut self, targets: Vec<TargetInfo>) -> Self {
        self.targets = targets;
        self
    }
}

closed! {
    /// What a probe found.
    Health {
        /// The target produces tokens.
        Available = "available",
        /// Refused or gone.
        Unavailable = "unavailable",
        /// Anything else.
        Unknown = "unknown",
    }
}

closed! {
    /// What came of asking a backend again.
    Refreshed {
        /// It answered, or there is nothing to ask.
        Answered = "answered",
        /// It gave no answer, or none that could be used.
        Silent = "silent",
    }
}

/// A command for a provider: the part of the closed set that adapters answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProviderCommand {
    /// An allow-listed call of Ollama's own API.
    OllamaApi {
        /// HTTP method.
        method: http::Method,
        /// Path.
        path: String,
        /// Body.
        body: crate::redact::Redacted<Bytes>,
    },
}

/// What a command answered.
#[derive(Debug)]
#[non_exhaustive]
pub enum CommandOutput {
    /// A raw HTTP answer.
    Http {
        /// Status.
        status: http::StatusCode,
        /// Body.
        body: crate::redact::Redacted<Bytes>,
    },
}

/// How a provider call failed. `Display` is safe to show: it holds no URL, key, prompt or provider text.
pub struct ProviderError {
    failure: Box<ExecutionFailure>,
    fenced: bool,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl ProviderError {
    /// An error with an explicit failure.
    #[must_use]
    pub fn new(failure: ExecutionFailure) -> Self {
        Self { failure: Box::new(failure), fenced: false, source: None }
    }

    /// The backend could not be reached: nothing was executed.
    #[must_use]
    pub fn unreachable() -> Self {
        Self::new(ExecutionFailure::new(
            FailureCode::ProviderUnreachable,
            FailureStage::Connect,
            ProviderContacted::No,
            "the provider could not be reached",
        ))
    }

    /// The connection broke after the request was sent: it may have been executed.
    #[must_use]
    pub fn broken(stage: FailureStage) -> Self {
        Self::new(ExecutionFailure::new(
            FailureCode::ProviderUnreachable,
            stage,
            ProviderContacted::Yes,
            "the connection to the provider broke",
        ))
    }

    /// The backend answered with an error status.
    #[must_use]
    pub fn rejected(status: u16, reason: Option<ProviderReason>) -> Self {
        Self::new(
            ExecutionFailure::new(
                FailureCode::ProviderRejected,
                FailureStage::Prefill,
                ProviderContacted::Yes,
                format!("the provider answered with status {status}"),
            )
            .with_status(status)
            .with_reason(reason),
        )
    }

    /// The backend reported an error inside its answer.
    #[must_use]
    pub fn reported(message: &'static str) -> Self {
        Self::new(ExecutionFailure::new(
            FailureCode::ProviderRejected,
            FailureStage::Stream,
            ProviderContacted::Yes,
            message,
        ))
    }

    /// The backend's answer was not understood.
    #[must_use]
    pub fn protocol(message: &'static str) -> Self {
        Self::new(ExecutionFailure::new(
            FailureCode::ProviderProtocol,
            FailureStage::Stream,
            ProviderContacted::Yes,
            message,
        ))
    }

    /// The backend's answer ended without saying that it was finished.
    #[must_use]
    pub fn ended_without_terminal() -> Self {
        Self::new(ExecutionFailure::new(
            FailureCode::ProviderEndedWithoutTerminal,
            FailureStage::Stream,
            ProviderContacted::Yes,
            "the provider's answer ended before it was complete",
        ))
    }

    /// The request can't be served by this provider.
    #[must_use]
    pub fn invalid_request(message: &'static str) -> Self {
        Self::new(ExecutionFailure::refused(FailureCode::InvalidRequest, message))
    }

    /// The adapter can't do that.
    #[must_use]
    pub fn unsupported(message: &'static str) -> Self {
        Self::new(ExecutionFailure::refused(FailureCode::Unsupported, message))
    }

    /// With the cause, for `source()` only. It must hold no URL with query, key, prompt or provider text.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The failure.
    #[must_use]
    pub const fn failure(&self) -> &ExecutionFailure {
        &self.failure
    }

    /// True if this only says that the run was fenced.
    #[must_use]
    pub const fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Takes the failure out.
    #[must_use]
    pub fn into_failure(self) -> ExecutionFailure {
        *self.failure
    }
}

impl From<Fenced> for ProviderError {
    fn from(_: Fenced) -> Self {
        Self {
            failure: Box::new(ExecutionFailure::new(
                FailureCode::Internal,
                FailureStage::Close,
                ProviderContacted::Unknown,
                "the run was fenced",
            )),
            fenced: true,
            source: None,
        }
    }
}

impl fmt::Display for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.failure.message)
    }
}

impl fmt::Debug for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderError").field("failure", &self.failure).finish_non_exhaustive()
    }
}

impl StdError for ProviderError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
