//! Decides whether a request whose attempt failed is sent again: once for each request, whatever the wire, one budget for all
//! causes (REC-1 to REC-5).
//!
//! ```text
//!             failure before commit, covered, budget left
//!  Attempting ─────────────────────────────────────────────▶ Attempting (one more, avoiding a provider that stalled)
//!      │ content                     │ anything else
//!      ▼                             ▼
//!  Committed ── failure ──▶ told in the stream      told as a status
//! ```
//!
//! [`Liveness`] knows no stream and no clock: its owner feeds it failures and asks what to do.

use iop_execution::failure::ProviderReason;
use iop_execution::{ExecutionFailure, FailureCode, Health, ProviderId};

use super::record::Outcome;
use crate::api::{EndNote, SubmitError};
use crate::catalog::{RetryCause, RetryOn};
use iop_execution::closed_list as closed;

/// Attempts after the first, by default.
pub const DEFAULT_EXTRA_ATTEMPTS: u32 = 2;
/// Estimated prompt tokens from which a request gets at most one more attempt: each costs another prefill.
pub const LONG_REPLAY_TOKENS: u32 = 32_768;
/// Largest request body that is kept for another attempt, in bytes.
pub const MAX_SNAPSHOT_BYTES: usize = 1 << 20;

closed! {
    /// What was decided about a failure that another attempt could help with (OBS-3).
    LivenessDecision {
        /// The request is sent again.
        Eligible = "eligible",
        /// It is not.
        Ineligible = "ineligible",
    }
}

closed! {
    /// Why, or why not (REC-7).
    LivenessReason {
        /// It may be sent again.
        None = "none",
        /// The client has content.
        Committed = "committed",
        /// The client is gone, or an operator cancelled it.
        Cancelled = "cancelled",
        /// No attempts are left.
        Budget = "budget",
        /// The deadline has passed.
        Deadline = "deadline",
        /// The request was too large to keep.
        Snapshot = "snapshot",
        /// It has an effect beside its answer.
        SideEffect = "side_effect",
        /// The client has a part of a tool call.
        ToolCall = "tool_call",
        /// No provider could take it.
        NoCandidate = "no_candidate",
        /// The stalled call was not seen to end.
        OwnershipUnconfirmed = "ownership_unconfirmed",
        /// The engine did not confirm the stall as one of this attempt.
        HandoffMissing = "handoff_missing",
        /// The config does not cover it.
        PolicyOff = "policy_off",
    }
}

/// What kind of failure of an attempt it was, as far as another one could help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A stall, as the Node saw it.
    Stall {
        /// The call was seen to end, and may be repeated.
        retryable: bool,
        /// What its probe found.
        health: Health,
    },
    /// One of the list.
    Retry(RetryCause),
}

impl LivenessReason {
    /// Why the next attempt did not begin.
    pub(crate) const fn of_refusal(error: &SubmitError) -> Self {
        match error {
            SubmitError::DeadlineExceeded => Self::Deadline,
            SubmitError::Cancelled => Self::Cancelled,
            SubmitError::InvalidRequest(_)
            | SubmitError::UnknownModel
            | SubmitError::Unavailable
            | SubmitError::QueueFull { .. }
            | SubmitError::QueueTimeout
            | SubmitError::NodeRequired
            | SubmitError::ShuttingDown => Self::NoCandidate,
        }
    }
}

impl Cause {
    /// `None` = another attempt would not help.
    pub(crate) fn of(failure: &ExecutionFailure) -> Option<Self> {
        let retry = |cause| Some(Self::Retry(cause));
        match failure.code {
            FailureCode::ResponseStalled => Some(match failure.stall.as_deref() {
                Some(stall) => Self::Stall { retryable: stall.retryable(), health: stall.provider_health() },
                None => Self::Stall { retryable: false, health: Health::Unknown },
            }),
            FailureCode::Busy => retry(RetryCause::Busy),
            FailureCode::Draining => retry(RetryCause::Draining),
            FailureCode::Disconnected => retry(RetryCause::Disconnected),
            FailureCode::ProviderUnreachable => retry(RetryCause::ProviderUnreachable),
            FailureCode::NodeSuspect => retry(RetryCause::NodeSuspect),
            FailureCode::DispatchUnacknowledged => retry(RetryCause::DispatchUnacknowledged),
            FailureCode::ProviderRejected => match (failure.upstream_status, failure.provider_reason) {
                // The request's own fault, whatever status the provider gave it.
                (_, Some(ProviderReason::ContextLengthExceeded)) => None,
                (Some(429), _) => retry(RetryCause::Http429),
                (Some(502), _) => retry(RetryCause::Http502),
                (Some(503), _) => retry(RetryCause::Http503),
                (Some(504), _) => retry(RetryCause::Http504),
                (Some(_) | None, _) => None,
            },
            FailureCode::InvalidRequest
            | FailureCode::Unsupported
            | FailureCode::UnknownAdapter
            | FailureCode::UnknownTarget
            | FailureCode::ProviderProtocol
            | FailureCode::ProviderEndedWithoutTerminal
            | FailureCode::DeadlineExceeded
            | FailureCode::CredentialRejected
            | FailureCode::Internal => None,
        }
    }
}

/// What a client has been given of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// No content.
    Nothing,
    /// Text or reasoning.
    Content,
    /// A part of a tool call.
    ToolCall,
}

/// What to do about a failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Send it again.
    Again(Hint),
    /// Tell the client, for this reason.
    Tell(LivenessReason),
}

/// What the next admission is asked. It holds for the rest of the request, whatever fails next: only a newer stall replaces it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Hint {
    /// The provider whose confirmed stall this is.
    pub(crate) avoid: Option<ProviderId>,
    /// It may be chosen again when there is no other.
    pub(crate) fallback: bool,
}

/// The liveness owner's memory of one request. The default one is of a request that is never sent again.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    budget: u32,
    /// The request is kept for another attempt.
    kept: bool,
    side_effect: bool,
    retried: u32,
    hint: Hint,
    /// A failure was considered, and what came of the last one.
    considered: Option<LivenessReason>,
}

impl Liveness {
    /// `kept` = the request is small enough to be kept for another attempt.
    pub(crate) fn new(extra_attempts: u32, prompt_tokens: u32, kept: bool, side_effect: bool) -> Self {
        let budget = if prompt_tokens >= LONG_REPLAY_TOKENS { extra_attempts.min(1) } else { extra_attempts };
        Self { budget, kept, side_effect, retried: 0, hint: Hint::default(), considered: None }
    }

    /// An attempt failed in a way that another one could help with.
    pub(crate) fn failed(
        &mut self,
        cause: Cause,
        retry_on: RetryOn,
        note: Option<&EndNote>,
        given: Given,
        late: bool,
    ) -> Decision {
        let decision = match self.objection(cause, retry_on, note, given, late) {
            Some(reason) => Decision::Tell(reason),
            None => {
                self.retried += 1;
                if let Some(newer) = avoidance(cause, note) {
                    self.hint = newer;
                }
                Decision::Again(self.hint.clone())
            }
        };
        self.considered = Some(match &decision {
            Decision::Tell(reason) => *reason,
            Decision::Again(_) => LivenessReason::None,
        });
        decision
    }

    /// The first reason that speaks against another attempt.
    fn objection(
        &self,
        cause: Cause,
        retry_on: RetryOn,
        note: Option<&EndNote>,
        given: Given,
        late: bool,
    ) -> Option<LivenessReason> {
        match given {
            Given::Nothing => {}
            Given::Content => return Some(LivenessReason::Committed),
            Given::ToolCall => return Some(LivenessReason::ToolCall),
        }
        match cause {
            Cause::Retry(cause) if !retry_on.contains(cause) => return Some(LivenessReason::PolicyOff),
            Cause::Retry(_) => {}
            Cause::Stall { retryable: false, .. } => return Some(LivenessReason::OwnershipUnconfirmed),
            Cause::Stall { retryable: true, .. } => match note {
                Some(EndNote::ConfirmedStall { .. }) => {}
                Some(EndNote::NotStopped | EndNote::NotSent) | None => return Some(LivenessReason::HandoffMissing),
            },
        }
        // It may still run there (WIR-14).
        if matches!(note, Some(EndNote::NotStopped)) {
            return Some(LivenessReason::OwnershipUnconfirmed);
        }
        if self.side_effect {
            return Some(LivenessReason::SideEffect);
        }
        if self.budget == 0 && self.retried == 0 {
            return Some(LivenessReason::PolicyOff);
        }
        if self.retried >= self.budget {
            return Some(LivenessReason::Budget);
        }
        if !self.kept {
            return Some(LivenessReason::Snapshot);
        }
        late.then_some(LivenessReason::Deadline)
    }

    /// The next attempt did not begin.
    pub(crate) const fn did_not_begin(&mut self, reason: LivenessReason) {
        self.considered = Some(reason);
    }

    /// The Edge has sent it again, to no avail.
    pub(crate) const fn has_retried(&self) -> bool {
        self.retried > 0
    }

    /// How the request ended, seen with what was tried (REC-7). The same as before for one that never was in doubt.
    pub(crate) const fn outcome(&self, ended: Outcome) -> Outcome {
        match (ended, self.considered, self.retried) {
            (Outcome::Completed, Some(_), 1..) => Outcome::RecoveredCompleted,
            (Outcome::Failed, Some(_), 1..) => Outcome::RecoveryExhausted,
            (Outcome::Failed, Some(_), 0) => Outcome::Ineligible,
            (other, _, _) => other,
        }
    }

    /// A failure was considered.
    pub(crate) const fn was_in_doubt(&self) -> bool {
        self.considered.is_some()
    }
}

/// Only a confirmed stall sets avoidance; and the same provider may have it again only if its probe found it alive (REC-3).
fn avoidance(cause: Cause, note: Option<&EndNote>) -> Option<Hint> {
    match (cause, note) {
        (Cause::Stall { health, .. }, Some(EndNote::ConfirmedStall { provider })) => {
            Some(Hint { avoid: Some(provider.clone()), fallback: health == Health::Available })
        }
        (
            Cause::Stall { .. } | Cause::Retry(_),
            Some(EndNote::ConfirmedStall { .. } | EndNote::NotStopped | EndNote::NotSent) | None,
        ) => None,
    }
}

#[cfg(test)]
mod tests;
