//! Decides how much a provider's recent answers speak against choosing it (SEL-4): failures count as load that decays, busy
//! answers keep new work away for a while, and how long requests take tells a full queue when to try again.

use std::time::{Duration, Instant};

use http::StatusCode;
use iop_execution::failure::ProviderReason;
use iop_execution::{ExecutionFailure, FailureCode};

/// What one failure adds, in thousandths of the provider's capacity: it looks as if all its places were taken.
const FAULT: u32 = 1000;
/// Most that failures add up to: three half-lives after the last one little is left.
const MAX_PENALTY: u32 = 8 * FAULT;
/// Time in which a penalty halves.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// How long a busy provider is left alone when it does not say.
pub(crate) const DEFAULT_COOLING: Duration = Duration::from_secs(1);
/// Longest time a provider can ask to be left alone for.
pub(crate) const MAX_COOLING: Duration = Duration::from_secs(300);
/// Share of a new measurement in the average service time, as a divisor.
const SMOOTHING: u32 = 8;

/// What an answer says about the provider it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It did the work.
    Good,
    /// It says nothing: the request was wrong, or was ended from elsewhere.
    Neutral,
    /// It failed.
    Fault,
    /// It is busy, for this long if it said so.
    Busy { retry_after: Option<Duration> },
}

impl Verdict {
    /// Of an HTTP status. A 409 is busy only if it says when to come back: by itself it is a conflict of the request's own.
    pub(crate) fn of_status(status: StatusCode, retry_after: Option<Duration>) -> Self {
        match status.as_u16() {
            429 | 503 => Self::Busy { retry_after },
            409 if retry_after.is_some() => Self::Busy { retry_after },
            500.. => Self::Fault,
            // A key that the provider does not take is its config's, never the client's.
            401 | 403 => Self::Fault,
            400..500 => Self::Neutral,
            _ => Self::Good,
        }
    }

    /// Of a failure.
    pub(crate) fn of_failure(failure: &ExecutionFailure) -> Self {
        let retry_after = failure.retry_after_ms.map(|ms| Duration::from_millis(u64::from(ms)));
        // Some servers call a prompt that is too long an error of their own.
        if failure.provider_reason == Some(ProviderReason::ContextLengthExceeded) {
            return Self::Neutral;
        }
        match failure.code {
            FailureCode::ProviderRejected => {
                let status = failure.upstream_status.and_then(|status| StatusCode::from_u16(status).ok());
                // An error inside a 200 answer has no status: the provider failed.
                status.map_or(Self::Fault, |status| match Self::of_status(status, retry_after) {
                    Self::Good => Self::Fault,
                    verdict @ (Self::Neutral | Self::Fault | Self::Busy { .. }) => verdict,
                })
            }
            FailureCode::Busy => Self::Busy { retry_after },
            FailureCode::ProviderUnreachable
            | FailureCode::ProviderProtocol
            | FailureCode::ProviderEndedWithoutTerminal
            | FailureCode::ResponseStalled
            // Nothing of these is the request's: whoever sends another gets the same, and at once.
            | FailureCode::UnknownAdapter
            | FailureCode::UnknownTarget
            | FailureCode::CredentialRejected
            | FailureCode::Internal => Self::Fault,
            FailureCode::InvalidRequest
            | FailureCode::Unsupported
            | FailureCode::Draining
            | FailureCode::DeadlineExceeded
            | FailureCode::Disconnected
            | FailureCode::DispatchUnacknowledged
            | FailureCode::NodeSuspect => Self::Neutral,
        }
    }
}

/// What one provider's recent answers add up to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wear {
    /// Penalty at that time.
    penalty: Option<(u32, Instant)>,
    cooling_until: Option<Instant>,
    /// Average time from dispatch to terminal.
    service: Option<Duration>,
}

impl Wear {
    /// One more failure.
    pub(crate) fn fault(&mut self, now: Instant) {
        self.penalty = Some((self.penalty(now).saturating_add(FAULT).min(MAX_PENALTY), now));
    }

    /// Recent failures, as load in thousandths of the capacity.
    pub(crate) fn penalty(&self, now: Instant) -> u32 {
        let Some((penalty, since)) = self.penalty else { return 0 };
        let passed = now.saturating_duration_since(since).as_millis();
        let half = HALF_LIFE.as_millis();
        let halved = u32::try_from(passed / half).ok().and_then(|times| penalty.checked_shr(times)).unwrap_or(0);
        // Straight between two halvings.
        let rest = u32::try_from(passed % half * u128::from(halved) / (2 * half)).unwrap_or(0);
        halved - rest
    }

    /// A busy answer. Gives until when the provider is left alone: the later end of overlapping ones.
    pub(crate) fn busy(&mut self, retry_after: Option<Duration>, now: Instant) -> Instant {
        let until = now + retry_after.unwrap_or(DEFAULT_COOLING).min(MAX_COOLING);
        let until = self.cooling_until.map_or(until, |later| later.max(until));
        self.cooling_until = Some(until);
        until
    }

    /// How long it is still left alone.
    pub(crate) fn cooling(&self, now: Instant) -> Option<Duration> {
        let left = self.cooling_until?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// A request took that long.
    pub(crate) fn took(&mut self, service: Duration) {
        self.service = Some(match self.service {
            None => service,
            Some(average) => average - average / SMOOTHING + service / SMOOTHING,
        });
    }

    /// How long requests take on average; none = not known yet.
    pub(crate) const fn service(&self) -> Option<Duration> {
        self.service
    }
}

#[cfg(test)]
mod tests {
    use iop_execution::{FailureStage, ProviderContacted};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_penalty_adds_up_is_bounded_and_halves() {
        // SEL-4
        let start = Instant::now();
        let mut wear = Wear::default();
        assert_eq!(wear.penalty(start), 0);
        wear.fault(start);
        let at = |wear: &Wear, seconds| wear.penalty(start + seconds * SECOND);
        assert_eq!([0, 5, 10, 20, 30].map(|seconds| at(&wear, seconds)), [1000, 750, 500, 250, 125]);
        assert_eq!((at(&wear, 150), at(&wear, 1_000_000)), (0, 0));
        wear.fault(start + 10 * SECOND);
        assert_eq!(at(&wear, 10), 1500);
        for _ in 0..100 {
            wear.fault(start + 10 * SECOND);
        }
        assert_eq!((at(&wear, 10), at(&wear, 20)), (MAX_PENALTY, MAX_PENALTY / 2));
        let decaying: Vec<_> = (10..100).map(|seconds| at(&wear, seconds)).collect();
        assert!(decaying.is_sorted_by(|a, b| a > b || *b < 40), "it only falls: {decaying:?}");
    }

    #[test]
    fn overlapping_busy_answers_keep_the_later_end_and_all_are_bounded() {
        // SEL-4; field report 61: a bare 429 cools too
        let now = Instant::now();
        let mut wear = Wear::default();
        wear.busy(None, now);
        assert_eq!(wear.cooling(now), Some(DEFAULT_COOLING));
        wear.busy(Some(20 * SECOND), now);
        wear.busy(Some(3 * SECOND), now);
        assert_eq!(wear.cooling(now + SECOND), Some(19 * SECOND));
        assert_eq!(wear.cooling(now + 20 * SECOND), None);
        wear.busy(Some(86_400 * SECOND), now);
        assert_eq!(wear.cooling(now), Some(MAX_COOLING));
    }

    #[test]
    fn a_requests_own_fault_says_nothing_about_its_provider() {
        // SEL-4; field report 58
        let of = |status: u16, retry: Option<u64>| {
            Verdict::of_status(StatusCode::from_u16(status).unwrap(), retry.map(Duration::from_secs))
        };
        for status in [400, 404, 408, 409, 413, 422, 499] {
            assert_eq!(of(status, None), Verdict::Neutral, "{status}");
        }
        // SEL-4; field report 59: a wrong key fails fast too
        for status in [401, 403, 500, 501, 502, 504, 529] {
            assert_eq!(of(status, None), Verdict::Fault, "{status}");
        }
        assert_eq!((of(200, None), of(429, None)), (Verdict::Good, Verdict::Busy { retry_after: None }));
        for status in [409, 429, 503] {
            assert_eq!(of(status, Some(2)), Verdict::Busy { retry_after: Some(2 * SECOND) }, "{status}");
        }
        let failure = |code, status: Option<u16>| {
            let failure = ExecutionFailure::new(code, FailureStage::Prefill, ProviderContacted::Yes, "x");
            Verdict::of_failure(&status.map_or(failure.clone(), |status| failure.with_status(status)))
        };
        assert_eq!(failure(FailureCode::ProviderRejected, Some(400)), Verdict::Neutral);
        assert_eq!(failure(FailureCode::ProviderRejected, Some(503)), Verdict::Busy { retry_after: None });
        assert_eq!(failure(FailureCode::ProviderRejected, None), Verdict::Fault);
        for code in [FailureCode::Internal, FailureCode::UnknownTarget, FailureCode::CredentialRejected] {
            assert_eq!(failure(code, None), Verdict::Fault);
        }
        // Field report 66: too long a prompt as a 500
        let long =
            ExecutionFailure::new(FailureCode::ProviderRejected, FailureStage::Prefill, ProviderContacted::Yes, "x");
        let long = long.with_status(500).with_reason(Some(ProviderReason::ContextLengthExceeded));
        assert_eq!(Verdict::of_failure(&long), Verdict::Neutral);
        assert_eq!(failure(FailureCode::Draining, None), Verdict::Neutral);
        assert_eq!(failure(FailureCode::ProviderUnreachable, None), Verdict::Fault);
    }

    #[test]
    fn the_average_follows_what_requests_take() {
        // QUE-2
        let mut wear = Wear::default();
        assert_eq!(wear.service(), None);
        wear.took(8 * SECOND);
        assert_eq!(wear.service(), Some(8 * SECOND));
        wear.took(16 * SECOND);
        assert_eq!(wear.service(), Some(9 * SECOND));
    }
}
