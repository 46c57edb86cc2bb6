use proptest::prelude::*;

use super::*;

fn unique(mut names: Vec<&'static str>) -> usize {
    names.sort_unstable();
    names.dedup();
    names.len()
}

#[test]
fn the_lists_are_closed_and_their_names_unique() {
    // EXE-9, CRD-5, WDG-5
    assert_eq!((FailureCode::ALL.len(), unique(FailureCode::ALL.iter().map(|c| c.as_str()).collect())), (17, 17));
    let mut reasons: Vec<_> = CredentialReason::PLAIN.iter().map(|reason| reason.as_str()).collect();
    reasons.push(CredentialReason::BindingMismatch(BindingField::Slot).as_str());
    assert_eq!((reasons.len(), unique(reasons)), (17, 17));
    assert_eq!(unique(BindingField::ALL.iter().map(|field| field.as_str()).collect()), 8);
    assert_eq!(CredentialReason::BindingMismatch(BindingField::RunId).to_string(), "binding_mismatch (run_id)");
    assert_eq!(CredentialReason::StaleRevision.to_string(), "stale_revision");
}

#[test]
fn long_messages_are_cut_at_a_character() {
    let failure = ExecutionFailure::refused(FailureCode::Internal, "é".repeat(200));
    assert_eq!(failure.message.len(), 256);
    let failure = ExecutionFailure::refused(FailureCode::Internal, format!("a{}", "é".repeat(200)));
    assert_eq!(failure.message.len(), 255);
}

#[test]
fn a_message_that_is_fit_already_is_not_copied() {
    assert!(matches!(safe_message("no place is free"), Cow::Borrowed("no place is free")));
    assert_eq!(safe_message("two\nlines\u{85}\0"), "two lines  ");
}

#[test]
fn a_status_that_no_answer_can_have_is_none() {
    let failure = || ExecutionFailure::refused(FailureCode::Internal, "no");
    let kept: Vec<_> = [99, 100, 999, 1000].map(|status| failure().with_status(status).upstream_status).into();
    assert_eq!(kept, [None, Some(100), Some(999), None]);
}

#[test]
fn evidence_is_one_of_three_pairs() {
    // WDG-5
    let pairs = LivenessClassification::ALL.iter().map(|class| (class.provider_health().as_str(), class.as_str()));
    assert_eq!(
        pairs.collect::<Vec<_>>(),
        [("available", "request_stalled"), ("unavailable", "provider_unhealthy"), ("unknown", "health_unknown")]
    );
    for class in LivenessClassification::ALL {
        assert_eq!(LivenessClassification::from(class.provider_health()), *class);
    }
}

#[test]
fn a_stall_is_retryable_only_when_its_close_is_confirmed() {
    // WDG-4
    let (adapter, target) = (AdapterKey::new("a").unwrap(), Target::new("t").unwrap());
    let mut stall = StallDetail::new(adapter, target, TimeoutSetting::ResponseStall);
    assert!(!stall.retryable() && stall.provider_health() == Health::Unknown);
    stall.ownership_close = OwnershipClose::Confirmed { retryable: true };
    assert!(stall.retryable());
    stall.ownership_close = OwnershipClose::Confirmed { retryable: false };
    assert!(!stall.retryable());
    assert_eq!((stall.ownership_close.as_str(), OwnershipClose::Unconfirmed.as_str()), ("confirmed", "unconfirmed"));
}

proptest! {
    // EXE-9: whatever a provider says.
    #[test]
    fn every_message_is_short_and_one_line(text in any::<String>(), times in 1..40_usize) {
        let text = text.repeat(times);
        let message = safe_message(text.clone());
        prop_assert!(message.len() <= MAX_MESSAGE_BYTES && !message.contains(char::is_control));
        if text.len() <= MAX_MESSAGE_BYTES && !text.contains(char::is_control) {
            prop_assert_eq!(message, text);
        }
    }
}
