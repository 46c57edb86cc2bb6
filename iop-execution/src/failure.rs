//! Decides how an execution fails: one closed list of codes, safe to show to anyone.

use std::borrow::Cow;
use std::fmt;

macro_rules! closed {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(clippy::exhaustive_enums, reason = "a closed list of the specification")]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used on the wire's documentation, in logs and in metric labels.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
pub(crate) use closed;

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

impl ExecutionFailure {
    /// A failure with a safe message of at most [`MAX_MESSAGE_BYTES`] (longer ones are cut at a character border).
    #[must_use]
    pub fn new(
        code: FailureCode,
        stage: FailureStage,
        contacted: ProviderContacted,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        let mut message = message.into();
        if message.len() > MAX_MESSAGE_BYTES {
            let mut end = MAX_MESSAGE_BYTES;
            while !message.is_char_boundary(end) {
                end -= 1;
            }
            message.to_mut().truncate(end);
        }
        Self {
            code,
            stage,
            provider_contacted: contacted,
            upstream_status: None,
            retry_after_ms: None,
            message,
            provider_reason: None,
        }
    }

    /// A refusal before the provider was contacted.
    #[must_use]
    pub fn refused(code: FailureCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(code, FailureStage::Admission, ProviderContacted::No, message)
    }

    /// With the HTTP status of the provider's answer.
    #[must_use]
    pub const fn with_status(mut self, status: u16) -> Self {
        self.upstream_status = Some(status);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_closed_and_their_names_unique() {
        // EXE-9
        let mut names: Vec<_> = FailureCode::ALL.iter().map(|c| c.as_str()).collect();
        assert_eq!(names.len(), 17);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 17);
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let failure = ExecutionFailure::refused(FailureCode::Internal, "é".repeat(200));
        assert_eq!(failure.message.len(), 256);
        let failure = ExecutionFailure::refused(FailureCode::Internal, format!("a{}", "é".repeat(200)));
        assert_eq!(failure.message.len(), 255);
    }
}
