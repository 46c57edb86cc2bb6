//! Decides how an execution fails: one closed list of codes, safe to show to anyone.

use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroU64;

use crate::closed_list as closed;
use crate::id::{AdapterKey, Target};
use crate::provider::Health;

closed! {
    /// Why an execution failed. This list is the only one (EXE-9).
    FailureCode {
        /// The Node has no free place on that adapter.
        Busy = "busy",
        /// A credential lease was refused.
        CredentialRejected = "credential_rejected",
        /// The hard deadline of the request passed.
        DeadlineExceeded = "deadline_exceeded",
        /// The connection to the Node ended.
        Disconnected = "disconnected",
        /// The Node never acknowledged the dispatch.
        DispatchUnacknowledged = "dispatch_unacknowledged",
        /// The Node takes no new work.
        Draining = "draining",
        /// A defect of IOP.
        Internal = "internal",
        /// The request is not one the provider can serve.
        InvalidRequest = "invalid_request",
        /// The Node stopped answering while it held the run.
        NodeSuspect = "node_suspect",
        /// The provider's answer ended without saying that it was finished.
        ProviderEndedWithoutTerminal = "provider_ended_without_terminal",
        /// The provider's answer was not understood.
        ProviderProtocol = "provider_protocol",
        /// The provider answered with an error.
        ProviderRejected = "provider_rejected",
        /// The provider could not be reached.
        ProviderUnreachable = "provider_unreachable",
        /// No progress for the stall timeout.
        ResponseStalled = "response_stalled",
        /// The Node has no adapter with that key.
        UnknownAdapter = "unknown_adapter",
        /// The adapter has no such target.
        UnknownTarget = "unknown_target",
        /// The adapter can't do that.
        Unsupported = "unsupported",
    }
}

closed! {
    /// How far an execution got.
    FailureStage {
        /// Before a place was taken.
        Admission = "admission",
        /// While the credential was checked.
        Credential = "credential",
        /// While the provider was called.
        Connect = "connect",
        /// After the call, before the first output.
        Prefill = "prefill",
        /// While output was coming.
        Stream = "stream",
        /// While the call was being closed.
        Close = "close",
    }
}

closed! {
    /// Whether the provider may have seen the request.
    ProviderContacted {
        /// It did not.
        No = "no",
        /// Nobody knows.
        Unknown = "unknown",
        /// It did.
        Yes = "yes",
    }
}

/// Longest message of a failure, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 256;

/// How an execution failed. Holds no secret, prompt or provider text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
#[non_exhaustive]
pub struct ExecutionFailure {
    /// Why.
    pub code: FailureCode,
    /// How far it got.
    pub stage: FailureStage,
    /// Whether the provider may have seen the request.
    pub provider_contacted: ProviderContacted,
    /// HTTP status of the provider's answer, if there was one.
    pub upstream_status: Option<u16>,
    /// The provider asked to wait this long, in milliseconds (its Retry-After).
    pub retry_after_ms: Option<u32>,
    /// One sentence that is safe to show.
    pub message: Cow<'static, str>,
    /// Closed name of what the provider complained about, where it could be told (`context_length_exceeded`, …).
    pub provider_reason: Option<ProviderReason>,
    /// What the Node knew when the call stalled.
    pub stall: Option<Box<StallDetail>>,
    /// Why a credential lease was refused.
    pub credential: Option<CredentialReason>,
}

closed! {
    /// What a provider complained about, where that can be told from its answer.
    ProviderReason {
        /// Its credential was refused: the operator's problem, never the client's.
        AuthFailed = "provider_auth_failed",
        /// The prompt is longer than the model's context.
        ContextLengthExceeded = "context_length_exceeded",
        /// It is saturated for now.
        Overloaded = "overloaded",
    }
}

closed! {
    /// What a stall means, from one probe of exactly the stalled target (WDG-5). One value stands for both names that
    /// travel: no other pair of them exists.
    LivenessClassification {
        /// The target produces tokens for others: this request stalled. `available`.
        RequestStalled = "request_stalled",
        /// The target is refused or gone. `unavailable`.
        ProviderUnhealthy = "provider_unhealthy",
        /// Nobody knows. `unknown`.
        HealthUnknown = "health_unknown",
    }
}

impl LivenessClassification {
    /// What the probe found.
    #[must_use]
    pub const fn provider_health(self) -> Health {
        match self {
            Self::RequestStalled => Health::Available,
            Self::ProviderUnhealthy => Health::Unavailable,
            Self::HealthUnknown => Health::Unknown,
        }
    }
}

impl From<Health> for LivenessClassification {
    fn from(health: Health) -> Self {
        match health {
            Health::Available => Self::RequestStalled,
            Health::Unavailable => Self::ProviderUnhealthy,
            Health::Unknown => Self::HealthUnknown,
        }
    }
}

/// Whether a stalled provider call was seen to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "a closed list of the specification")]
pub enum OwnershipClose {
    /// It returned within its grace.
    Confirmed {
        /// Another try can't run beside this one.
        retryable: bool,
    },
    /// It did not: it may still be running at the provider, so it is never retryable.
    Unconfirmed,
}

impl OwnershipClose {
    /// The name used on the wire's documentation, in logs and in metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Confirmed { .. } => "confirmed",
            Self::Unconfirmed => "unconfirmed",
        }
    }

    /// True only when confirmed.
    #[must_use]
    pub const fn retryable(self) -> bool {
        match self {
            Self::Confirmed { retryable } => retryable,
            Self::Unconfirmed => false,
        }
    }
}

closed! {
    /// Which timeout fired (WDG-7).
    TimeoutSetting {
        /// The request's own.
        ResponseStall = "response_stall_timeout_ms",
        /// The provider's longer wait for its first progress, with its allowance per 1 000 prompt tokens.
        FirstResponse = "first_response_timeout_ms",
    }
}

/// What a Node knew when it ended a stalled call (WDG-4). Holds no provider text.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StallDetail {
    /// What the probe says of the stall; stands for `provider_health` too.
    pub liveness_classification: LivenessClassification,
    /// Place among the finished observations of the connection, from 1; none for work bound to no connection.
    pub health_observation_seq: Option<NonZeroU64>,
    /// Whether the call was seen to end, and with it `retryable`.
    pub ownership_close: OwnershipClose,
    /// How long there was no progress, in milliseconds.
    pub idle_ms: u64,
    /// The timeout that fired, in milliseconds.
    pub timeout_ms: u64,
    /// Which one that was.
    pub timeout_setting: TimeoutSetting,
    /// The adapter instance.
    pub adapter: AdapterKey,
    /// The model.
    pub target: Target,
}

impl StallDetail {
    /// A stall of a call to `target` by `adapter` of which nothing is known: no evidence, no observation, not confirmed, all
    /// times 0. The fields say the rest.
    #[must_use]
    pub const fn new(adapter: AdapterKey, target: Target, timeout_setting: TimeoutSetting) -> Self {
        Self {
            liveness_classification: LivenessClassification::HealthUnknown,
            health_observation_seq: None,
            ownership_close: OwnershipClose::Unconfirmed,
            idle_ms: 0,
            timeout_ms: 0,
            timeout_setting,
            adapter,
            target,
        }
    }

    /// What the probe found.
    #[must_use]
    pub const fn provider_health(&self) -> Health {
        self.liveness_classification.provider_health()
    }

    /// True only when the close is confirmed.
    #[must_use]
    pub const fn retryable(&self) -> bool {
        self.ownership_close.retryable()
    }
}

closed! {
    /// Which bound name of a lease differs from what was expected. Values never appear anywhere.
    BindingField {
        /// The Node that may use the secret.
        Node = "node",
        /// Who calls.
        Principal = "principal",
        /// How the secret is applied to a request.
        Profile = "profile",
        /// Which rule let the request in.
        Route = "route",
        /// The run it is for.
        RunId = "run_id",
        /// The stored credential.
        Slot = "slot",
        /// The model.
        Target = "target",
        /// Where the secret may be sent.
        Upstream = "upstream",
    }
}

macro_rules! credential_reasons {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// Why a credential lease was refused (CRD-5).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(clippy::exhaustive_enums, reason = "a closed list of the specification")]
        pub enum CredentialReason {
            $($(#[$doc])* $variant,)*
            /// It is bound to another name than the one expected.
            BindingMismatch(BindingField),
        }

        impl CredentialReason {
            /// Every value without [`CredentialReason::BindingMismatch`], which there is one of for each [`BindingField`].
            pub const PLAIN: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used on the wire's documentation, in logs and in metric labels; the field is not a part of it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                    Self::BindingMismatch(_) => "binding_mismatch",
                }
            }
        }
    };
}

credential_reasons! {
    /// It is not of the binary format.
    Malformed = "malformed",
    /// Its version is not known.
    UnsupportedVersion = "unsupported_version",
    /// No trusted signer has that key.
    UnknownIssuer = "unknown_issuer",
    /// The signature is not the issuer's.
    BadSignature = "bad_signature",
    /// It is sealed to another key.
    WrongRecipient = "wrong_recipient",
    /// Its time has not begun.
    NotYetValid = "not_yet_valid",
    /// Its time is over.
    Expired = "expired",
    /// It claims to be valid for longer than allowed.
    TtlTooLong = "ttl_too_long",
    /// The slot has a newer credential.
    StaleRevision = "stale_revision",
    /// It is of another connection.
    StaleGeneration = "stale_generation",
    /// The credential was revoked.
    Revoked = "revoked",
    /// The slot is disabled.
    Disabled = "disabled",
    /// It was used before.
    Replayed = "replayed",
    /// No more leases can be remembered.
    ReplayStoreFull = "replay_store_full",
    /// It could not be decrypted.
    OpenFailed = "open_failed",
    /// The Node does not know the time.
    ClockUnavailable = "clock_unavailable",
}

impl fmt::Display for CredentialReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BindingMismatch(field) => write!(f, "{} ({field})", self.as_str()),
            plain => f.write_str(plain.as_str()),
        }
    }
}

/// Makes a text fit to be the message of a failure: at most [`MAX_MESSAGE_BYTES`], cut at a character border, and spaces in
/// place of control characters.
#[must_use]
pub fn safe_message(text: impl Into<Cow<'static, str>>) -> Cow<'static, str> {
    let mut text = text.into();
    if text.len() > MAX_MESSAGE_BYTES {
        let mut end = MAX_MESSAGE_BYTES;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text = match text {
            Cow::Borrowed(text) => Cow::Borrowed(&text[..end]),
            Cow::Owned(mut text) => {
                text.truncate(end);
                Cow::Owned(text)
            }
        };
    }
    if text.contains(char::is_control) { text.replace(char::is_control, " ").into() } else { text }
}

/// Which statuses an HTTP answer can have.
const fn is_status(status: u16) -> bool {
    100 <= status && status <= 999
}

impl ExecutionFailure {
    /// A failure whose message is made fit to be shown: see [`safe_message`].
    #[must_use]
    pub fn new(
        code: FailureCode,
        stage: FailureStage,
        contacted: ProviderContacted,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            code,
            stage,
            provider_contacted: contacted,
            upstream_status: None,
            retry_after_ms: None,
            message: safe_message(message),
            provider_reason: None,
            stall: None,
            credential: None,
        }
    }

    /// A refusal before the provider was contacted.
    #[must_use]
    pub fn refused(code: FailureCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, FailureStage::Admission, ProviderContacted::No, message)
    }

    /// With the HTTP status of the provider's answer; none if it is no such status (100 to 999).
    #[must_use]
    pub const fn with_status(mut self, status: u16) -> Self {
        self.upstream_status = if is_status(status) { Some(status) } else { None };
        self
    }

    /// With the provider's own wish to wait.
    #[must_use]
    pub const fn with_retry_after_ms(mut self, wait: Option<u32>) -> Self {
        self.retry_after_ms = wait;
        self
    }

    /// With what the provider complained about.
    #[must_use]
    pub const fn with_reason(mut self, reason: Option<ProviderReason>) -> Self {
        self.provider_reason = reason;
        self
    }

    /// With what was known of a stall.
    #[must_use]
    pub fn with_stall(mut self, stall: StallDetail) -> Self {
        self.stall = Some(Box::new(stall));
        self
    }

    /// With why a credential lease was refused.
    #[must_use]
    pub const fn with_credential(mut self, reason: CredentialReason) -> Self {
        self.credential = Some(reason);
        self
    }
}

#[cfg(test)]
mod tests;
