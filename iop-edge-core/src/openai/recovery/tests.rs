use iop_execution::failure::{LivenessClassification, OwnershipClose, StallDetail, TimeoutSetting};
use iop_execution::{AdapterKey, FailureStage, ProviderContacted, Target};

use super::*;

fn provider() -> ProviderId {
    ProviderId::new("p").unwrap()
}

fn confirmed() -> EndNote {
    EndNote::ConfirmedStall { provider: provider() }
}

const STALL: Cause = Cause::Stall { retryable: true, health: Health::Available };

/// The one failure of a fresh request, with everything in its favour but what is named.
fn first(cause: Cause, note: Option<&EndNote>, given: Given) -> Decision {
    Liveness::new(2, 100, true, false).failed(cause, RetryOn::default(), note, given, false)
}

#[test]
fn s05_each_reason_against_another_attempt_is_told_by_its_own_name() {
    // REC-3, REC-4, REC-7
    use LivenessReason as R;
    let busy = Cause::Retry(RetryCause::Busy);
    let again = |avoid, fallback| Decision::Again(Hint { avoid, fallback });
    assert_eq!(first(busy, None, Given::Nothing), again(None, false), "only a confirmed stall sets avoidance");
    assert_eq!(first(STALL, Some(&confirmed()), Given::Nothing), again(Some(provider()), true));
    for health in [Health::Unavailable, Health::Unknown] {
        let stall = Cause::Stall { retryable: true, health };
        assert_eq!(first(stall, Some(&confirmed()), Given::Nothing), again(Some(provider()), false), "{health}");
    }
    let unconfirmed = Cause::Stall { retryable: false, health: Health::Available };
    for (cause, note, given, reason) in [
        (busy, None, Given::Content, R::Committed),
        (STALL, Some(confirmed()), Given::Content, R::Committed),
        (busy, None, Given::ToolCall, R::ToolCall),
        (STALL, Some(confirmed()), Given::ToolCall, R::ToolCall),
        (STALL, None, Given::Nothing, R::HandoffMissing),
        (unconfirmed, Some(confirmed()), Given::Nothing, R::OwnershipUnconfirmed),
        (Cause::Retry(RetryCause::Http503), None, Given::Nothing, R::PolicyOff),
        (
            Cause::Retry(RetryCause::DispatchUnacknowledged),
            Some(EndNote::NotStopped),
            Given::Nothing,
            R::OwnershipUnconfirmed,
        ),
    ] {
        assert_eq!(first(cause, note.as_ref(), given), Decision::Tell(reason), "{cause:?} {note:?} {given:?}");
    }
    let with = |kept, side_effect, late| {
        Liveness::new(2, 100, kept, side_effect).failed(busy, RetryOn::default(), None, Given::Nothing, late)
    };
    assert_eq!(with(false, false, false), Decision::Tell(R::Snapshot));
    assert_eq!(with(true, true, false), Decision::Tell(R::SideEffect));
    assert_eq!(with(true, false, true), Decision::Tell(R::Deadline));
}

#[test]
fn a_provider_that_stalled_stays_avoided_whatever_fails_next() {
    // REC-3; field report 8
    let mut liveness = Liveness::new(9, 100, true, false);
    let mut fails = |cause, stalled: Option<&str>| {
        let note = stalled.map(|id| EndNote::ConfirmedStall { provider: ProviderId::new(id).unwrap() });
        match liveness.failed(cause, RetryOn::default(), note.as_ref(), Given::Nothing, false) {
            Decision::Again(hint) => (hint.avoid.map(|id| id.to_string()), hint.fallback),
            Decision::Tell(reason) => panic!("{reason}"),
        }
    };
    let unknown = Cause::Stall { retryable: true, health: Health::Unknown };
    let busy = Cause::Retry(RetryCause::Busy);
    assert_eq!(fails(busy, None), (None, false));
    assert_eq!(fails(unknown, Some("a")), (Some("a".into()), false));
    assert_eq!(fails(busy, None), (Some("a".into()), false), "busy says nothing about it");
    assert_eq!(fails(Cause::Retry(RetryCause::Disconnected), None), (Some("a".into()), false));
    assert_eq!(fails(STALL, Some("b")), (Some("b".into()), true), "a newer stall does");
    assert_eq!(fails(busy, None), (Some("b".into()), true));
}

#[test]
fn s05_one_budget_covers_all_causes() {
    // REC-4, REC-5; field reports 11, 54
    let causes = [STALL, Cause::Retry(RetryCause::Disconnected), Cause::Retry(RetryCause::Busy)];
    for (extra, tokens, allowed) in [(2, 100, 2), (5, 100, 5), (0, 100, 0), (2, LONG_REPLAY_TOKENS, 1), (0, 200_000, 0)]
    {
        let mut liveness = Liveness::new(extra, tokens, true, false);
        let mut sent = 0;
        for at in 0..10 {
            let note = confirmed();
            let cause = causes[at % 3];
            match liveness.failed(
                cause,
                RetryOn::default(),
                Some(&note).filter(|_| cause == STALL),
                Given::Nothing,
                false,
            ) {
                Decision::Again(_) => sent += 1,
                Decision::Tell(reason) => {
                    let off = if allowed == 0 { LivenessReason::PolicyOff } else { LivenessReason::Budget };
                    assert_eq!(reason, off);
                }
            }
        }
        assert_eq!(sent, allowed, "{extra} {tokens}");
    }
}

#[test]
fn every_short_history_never_repeats_after_content_and_the_budget_only_shrinks() {
    // REC-4, I8
    let notes = [None, Some(confirmed()), Some(EndNote::NotStopped)];
    let causes = [
        STALL,
        Cause::Stall { retryable: false, health: Health::Unknown },
        Cause::Retry(RetryCause::Busy),
        Cause::Retry(RetryCause::Http429),
    ];
    let mut inputs = Vec::new();
    for cause in causes {
        for note in &notes {
            for given in [Given::Nothing, Given::Content, Given::ToolCall] {
                for late in [false, true] {
                    inputs.push((cause, note, given, late));
                }
            }
        }
    }
    for one in &inputs {
        for two in &inputs {
            for three in [inputs[0], inputs[24]] {
                let mut liveness = Liveness::new(2, 100, true, false);
                let (mut again, mut stalled) = (0, false);
                for (cause, note, given, late) in [*one, *two, three] {
                    let decision = liveness.failed(cause, RetryOn::default(), note.as_ref(), given, late);
                    if let Decision::Again(hint) = decision {
                        again += 1;
                        assert!(given == Given::Nothing && !late && again <= 2);
                        assert!(!matches!(note, Some(EndNote::NotStopped)), "at most one at a time");
                        stalled |= matches!(cause, Cause::Stall { .. });
                        assert_eq!(
                            hint.avoid.is_some(),
                            stalled,
                            "only a confirmed stall sets it, and nothing forgets it"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn outcomes_tell_what_was_tried() {
    // REC-7
    let mut fresh = Liveness::new(2, 0, true, false);
    for ended in [Outcome::Completed, Outcome::Failed, Outcome::Cancelled] {
        assert_eq!(fresh.outcome(ended), ended);
    }
    assert!(!fresh.was_in_doubt());
    fresh.failed(Cause::Retry(RetryCause::Http429), RetryOn::default(), None, Given::Nothing, false);
    assert_eq!(fresh.outcome(Outcome::Failed), Outcome::Ineligible);
    let mut tried = Liveness::new(2, 0, true, false);
    tried.failed(Cause::Retry(RetryCause::Busy), RetryOn::default(), None, Given::Nothing, false);
    assert_eq!(tried.outcome(Outcome::Completed), Outcome::RecoveredCompleted);
    assert_eq!(tried.outcome(Outcome::Failed), Outcome::RecoveryExhausted);
    assert_eq!(tried.outcome(Outcome::Cancelled), Outcome::Cancelled);
}

#[test]
fn causes_are_read_from_failures_and_a_request_s_own_fault_is_none() {
    // REC-5; field reports 64, 66
    let failure = |code| ExecutionFailure::new(code, FailureStage::Prefill, ProviderContacted::Unknown, "x");
    let rejected = |status| failure(FailureCode::ProviderRejected).with_status(status);
    let causes: Vec<_> =
        FailureCode::ALL.iter().filter_map(|code| Some((*code, Cause::of(&failure(*code))?))).collect();
    let named = causes.iter().filter_map(|(code, cause)| match cause {
        Cause::Retry(cause) => Some((code.as_str(), cause.as_str())),
        Cause::Stall { .. } => None,
    });
    let named: Vec<_> = named.collect();
    assert!(named.iter().all(|(code, cause)| code == cause), "the same names: {named:?}");
    assert_eq!(named.len(), 6);
    for (status, cause) in [
        (429, Some(RetryCause::Http429)),
        (502, Some(RetryCause::Http502)),
        (503, Some(RetryCause::Http503)),
        (504, Some(RetryCause::Http504)),
        (500, None),
        (400, None),
        (401, None),
    ] {
        assert_eq!(Cause::of(&rejected(status)), cause.map(Cause::Retry), "{status}");
    }
    let too_long = rejected(503).with_reason(Some(ProviderReason::ContextLengthExceeded));
    assert_eq!(Cause::of(&too_long), None);
    let mut stall =
        StallDetail::new(AdapterKey::new("a").unwrap(), Target::new("t").unwrap(), TimeoutSetting::ResponseStall);
    stall.liveness_classification = LivenessClassification::RequestStalled;
    stall.ownership_close = OwnershipClose::Confirmed { retryable: true };
    assert_eq!(Cause::of(&failure(FailureCode::ResponseStalled).with_stall(stall)), Some(STALL));
}
