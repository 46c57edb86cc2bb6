//! One lease between a fixed Edge and a fixed Node, and each way it is refused.

use super::*;
use crate::binding::{BindingField, NodeName, PrincipalName, ProfileName, RouteName, RunName, SlotName, TargetName};
use crate::replay::MemoryReplayStore;
use crate::slots::SlotStatus;
use crate::tests::support::*;
use crate::{TrustedIssuers, UpstreamOrigin};

fn refused(lease: &SealedLease, view: &NodeView<'_>) -> LeaseError {
    verify(lease, &binding(), view).unwrap_err()
}

#[test]
fn a_lease_opens_to_the_credential_it_was_issued_for() {
    // CRD-1, CRD-2
    let all = Fixture::new();
    let recipient = all.recipient();
    let grant = |ttl_ms| Grant {
        recipient: &recipient,
        generation: GENERATION,
        revision: REVISION,
        binding: binding(),
        ttl_ms,
    };
    let credential = ProviderCredential::header("x-api-key", b"k-1").unwrap();
    let issued = all.issuer.issue(&grant(DEFAULT_TTL_MS), &credential, NOW).unwrap();
    let again = all.issuer.issue(&grant(DEFAULT_TTL_MS), &credential, NOW).unwrap();
    assert_ne!(issued.lease.as_bytes(), again.lease.as_bytes());
    assert_ne!(issued.id, again.id);
    let verified = verify(&issued.lease, &binding(), &all.view()).unwrap();
    assert_eq!((verified.claims().id, verified.claims().expires_at_ms), (issued.id, NOW + 60_000));
    assert_eq!(verified.claims().binding, binding());
    let opened = verified.open(&all.key, &all.view(), &all.replay, &Place).unwrap();
    assert_eq!((opened.header_name(), opened.expose()), ("x-api-key", &b"k-1"[..]));
    assert_eq!((opened.upstream().as_str(), opened.lease()), ("https://api.example.com:443", issued.id));
}

#[test]
fn the_smallest_and_the_largest_lease_are_as_large_as_documented() {
    // CRD-1
    let all = Fixture::new();
    for (name, secret, size) in [(1, 1, 472), (255, 8_189, SealedLease::MAX_BYTES)] {
        let text = "n".repeat(name);
        let named = Binding {
            principal: PrincipalName::new(&text).unwrap(),
            route: RouteName::new(&text).unwrap(),
            slot: SlotName::new(&text).unwrap(),
            profile: ProfileName::new(&text).unwrap(),
            target: TargetName::new(&text).unwrap(),
            node: NodeName::new(&text).unwrap(),
            upstream: UpstreamOrigin::new(&text).unwrap(),
            run: RunName::new(&text).unwrap(),
        };
        let state = crate::SlotState { revision: REVISION, status: SlotStatus::Enabled };
        let mut slots = SlotTable::default();
        slots.replace([(named.slot.clone(), state)]).unwrap();
        let lease = all.lease_of(&ProviderCredential::bearer(&vec![b'k'; secret]).unwrap(), named.clone());
        assert_eq!(lease.as_bytes().len(), size);
        let view = NodeView { slots: &slots, ..all.view() };
        let opened = verify(&lease, &named, &view).unwrap().open(&all.key, &view, &MemoryReplayStore::new(1), &Place);
        assert_eq!(opened.map(|opened| opened.expose().len()).ok(), Some(7 + secret));
    }
}

#[test]
fn each_bound_name_must_be_the_expected_one_byte_by_byte() {
    // CRD-2
    let all = Fixture::new();
    let lease = all.lease();
    let mut fields = std::collections::BTreeSet::new();
    for (field, name) in binding().names() {
        for other in [format!("{name}x"), name[..name.len() - 1].to_owned(), name.to_ascii_uppercase(), "z".to_owned()]
        {
            let mut expected = binding();
            match field {
                BindingField::Principal => expected.principal = PrincipalName::new(other).unwrap(),
                BindingField::Route => expected.route = RouteName::new(other).unwrap(),
                BindingField::Slot => expected.slot = SlotName::new(other).unwrap(),
                BindingField::Profile => expected.profile = ProfileName::new(other).unwrap(),
                BindingField::Target => expected.target = TargetName::new(other).unwrap(),
                BindingField::Node => expected.node = NodeName::new(other).unwrap(),
                BindingField::Upstream => expected.upstream = UpstreamOrigin::new(other).unwrap(),
                BindingField::RunId => expected.run = RunName::new(other).unwrap(),
            }
            let error = verify(&lease, &expected, &all.view()).unwrap_err();
            assert_eq!(error, LeaseError::BindingMismatch(field));
        }
        fields.insert(field);
    }
    assert_eq!(fields.len(), 8);
}

#[test]
fn only_a_trusted_issuer_and_this_connection_are_taken() {
    // CRD-2, CRD-3
    let all = Fixture::new();
    let lease = all.lease();
    let none = TrustedIssuers::default();
    assert_eq!(refused(&lease, &NodeView { issuers: &none, ..all.view() }), LeaseError::UnknownIssuer);
    let next_connection = RecipientKey::from_seed(&[9; 32]);
    let view = NodeView { recipient: next_connection.id(), ..all.view() };
    assert_eq!(refused(&lease, &view), LeaseError::WrongRecipient);
    assert_eq!(refused(&lease, &NodeView { generation: 1, ..all.view() }), LeaseError::StaleGeneration);
    // The key of another connection, though the view is of the first.
    let verified = verify(&lease, &binding(), &all.view()).unwrap();
    let error = verified.open(&next_connection, &all.view(), &all.replay, &Place).unwrap_err();
    assert_eq!((error, all.replay.len()), (LeaseError::WrongRecipient, 0));
}

#[test]
fn two_connections_never_have_one_key() {
    // CRD-3
    let (one, other) = (RecipientKey::generate().unwrap(), RecipientKey::generate().unwrap());
    assert_ne!(one.public_bytes(), other.public_bytes());
    assert_ne!(one.id(), other.id());
    assert_eq!(RecipientPublicKey::new(*one.public_bytes()).unwrap().id(), one.id());
}

#[test]
fn time_has_no_leeway_at_its_end_and_little_at_its_begin() {
    // CRD-7
    let all = Fixture::new();
    let lease = all.lease();
    let at = |now_ms| verify(&lease, &binding(), &NodeView { now_ms, ..all.view() }).err();
    assert_eq!(at(None), Some(LeaseError::ClockUnavailable));
    assert_eq!(at(Some(NOW - 5_001)), Some(LeaseError::NotYetValid));
    assert_eq!(at(Some(NOW - 5_000)), None);
    assert_eq!(at(Some(NOW + TTL - 1)), None);
    assert_eq!(at(Some(NOW + TTL)), Some(LeaseError::Expired));
    assert_eq!(at(Some(u64::MAX)), Some(LeaseError::Expired));
}

#[test]
fn no_lease_is_issued_or_taken_for_longer_than_300_seconds() {
    // CRD-7
    let all = Fixture::new();
    let recipient = all.recipient();
    let credential = ProviderCredential::bearer(b"k").unwrap();
    let issue = |ttl_ms, now_ms| {
        let grant =
            Grant { recipient: &recipient, generation: GENERATION, revision: REVISION, binding: binding(), ttl_ms };
        all.issuer.issue(&grant, &credential, now_ms).map(|issued| issued.lease)
    };
    assert_eq!(issue(0, NOW).unwrap_err(), IssueError::Ttl);
    assert_eq!(issue(MAX_TTL_MS + 1, NOW).unwrap_err(), IssueError::Ttl);
    assert_eq!(issue(1, u64::MAX).unwrap_err(), IssueError::Ttl);
    let longest = issue(MAX_TTL_MS, NOW).unwrap();
    assert!(verify(&longest, &binding(), &all.view()).is_ok());
    let strict = NodeView { policy: TimePolicy::new(DEFAULT_TTL_MS, 0), ..all.view() };
    assert_eq!(refused(&longest, &strict), LeaseError::TtlTooLong);
    let longer = all.lease_with(|claims| claims.expires_at_ms = NOW + MAX_TTL_MS + 1);
    let lax = NodeView { policy: TimePolicy::new(u64::MAX, u64::MAX), ..all.view() };
    assert_eq!(refused(&longer, &lax), LeaseError::TtlTooLong);
    let future = all.lease_with(|claims| claims.issued_at_ms = NOW + MAX_FUTURE_SKEW_MS + 1);
    assert_eq!(refused(&future, &lax), LeaseError::Malformed, "it ends before it begins");
    let future = all.lease_with(|claims| {
        claims.issued_at_ms = NOW + MAX_FUTURE_SKEW_MS + 1;
        claims.expires_at_ms = NOW + MAX_TTL_MS;
    });
    assert_eq!(refused(&future, &lax), LeaseError::NotYetValid);
    for expires in [NOW, NOW - 1] {
        assert_eq!(
            refused(&all.lease_with(|claims| claims.expires_at_ms = expires), &all.view()),
            LeaseError::Malformed
        );
    }
}

#[test]
fn a_revoked_disabled_or_older_credential_is_refused() {
    // CRD-5, CRD-8
    let all = Fixture::new();
    let lease = all.lease();
    for (revision, status, error) in [
        (REVISION + 1, SlotStatus::Enabled, LeaseError::StaleRevision),
        (REVISION, SlotStatus::Disabled, LeaseError::Disabled),
        (REVISION, SlotStatus::Revoked, LeaseError::Revoked),
    ] {
        let slots = slots(revision, status);
        assert_eq!(refused(&lease, &NodeView { slots: &slots, ..all.view() }), error);
    }
    let none = SlotTable::default();
    assert_eq!(refused(&lease, &NodeView { slots: &none, ..all.view() }), LeaseError::Revoked);
}

#[test]
fn what_changed_while_the_request_waited_is_asked_again_and_burns_nothing() {
    // CRD-4
    let all = Fixture::new();
    let lease = all.lease();
    let (none, gone) = (TrustedIssuers::default(), SlotTable::default());
    let (newer, off) = (slots(REVISION + 1, SlotStatus::Enabled), slots(REVISION, SlotStatus::Disabled));
    let later: [(NodeView<'_>, LeaseError); 8] = [
        (NodeView { now_ms: Some(NOW + TTL), ..all.view() }, LeaseError::Expired),
        (NodeView { now_ms: None, ..all.view() }, LeaseError::ClockUnavailable),
        (NodeView { issuers: &none, ..all.view() }, LeaseError::UnknownIssuer),
        (NodeView { slots: &newer, ..all.view() }, LeaseError::StaleRevision),
        (NodeView { slots: &off, ..all.view() }, LeaseError::Disabled),
        (NodeView { slots: &gone, ..all.view() }, LeaseError::Revoked),
        (NodeView { generation: 1, ..all.view() }, LeaseError::StaleGeneration),
        (NodeView { recipient: stranger(all.key.id()), ..all.view() }, LeaseError::WrongRecipient),
    ];
    for (view, error) in later {
        let verified = verify(&lease, &binding(), &all.view()).unwrap();
        assert_eq!(verified.open(&all.key, &view, &all.replay, &Place).unwrap_err(), error);
        assert!(all.replay.is_empty(), "{error}");
    }
    assert!(all.use_up(&lease).is_ok());
}

#[test]
fn a_lease_opens_once_and_a_full_store_opens_none() {
    // CRD-4, CRD-7
    let mut all = Fixture::new();
    all.replay = MemoryReplayStore::new(1);
    let lease = all.lease();
    // Both pass phase one, which changes nothing; one opens.
    let twice = [(); 2].map(|()| verify(&lease, &binding(), &all.view()).unwrap());
    let opened = twice.map(|verified| verified.open(&all.key, &all.view(), &all.replay, &Place).err());
    assert_eq!(opened, [None, Some(LeaseError::Replayed)]);
    assert_eq!(all.refusal(&lease), Some(LeaseError::Replayed));
    let other = all.lease_with(|claims| claims.id = LeaseId([8; 16]));
    assert_eq!(all.refusal(&other), Some(LeaseError::ReplayStoreFull));
}

#[test]
fn a_lease_that_does_not_open_is_used_up_all_the_same() {
    // CRD-4: the store is asked before anything is decrypted.
    let all = Fixture::new();
    let mut unsigned = unsigned(&all.lease());
    *unsigned.last_mut().unwrap() ^= 1;
    let broken = all.signed(&unsigned);
    assert_eq!(all.refusal(&broken), Some(LeaseError::OpenFailed));
    assert_eq!(all.replay.len(), 1);
    assert_eq!(all.refusal(&broken), Some(LeaseError::Replayed));
    assert_eq!(all.refusal(&all.lease()), Some(LeaseError::Replayed), "one name, one use");
}

#[test]
fn nothing_that_prints_holds_a_secret() {
    // CRD-9
    let all = Fixture::new();
    let lease = all.lease_of(&ProviderCredential::bearer(b"SENTINEL").unwrap(), binding());
    let verified = verify(&lease, &binding(), &all.view()).unwrap();
    let before = format!("{lease:?} {verified:?} {:?} {:?} {:?}", all.issuer, all.key, all.view());
    let opened = verified.open(&all.key, &all.view(), &all.replay, &Place).unwrap();
    assert_eq!(opened.expose(), b"Bearer SENTINEL");
    let printed = format!("{before} {opened:?} {:?}", all.replay);
    assert!(!printed.contains("SENTINEL"), "{printed}");
    for seed in [1_u8, 2] {
        assert!(!printed.contains(&format!("{seed}, {seed}, {seed}, {seed}")), "{printed}");
        assert!(!printed.contains(&format!("{seed:02x}").repeat(8)), "{printed}");
    }
    for error in LeaseError::PLAIN {
        assert!(!error.to_string().contains("SENTINEL"));
    }
}

#[test]
fn keys_are_zeroed_when_dropped() {
    // CRD-9: a feature of each library, and one that a change of features would lose without a word.
    fn zeroed<T: zeroize::ZeroizeOnDrop>() {}
    zeroed::<ed25519_dalek::SigningKey>();
    zeroed::<x25519_dalek::StaticSecret>();
    zeroed::<chacha20poly1305::ChaCha20Poly1305>();
    zeroed::<zeroize::Zeroizing<Vec<u8>>>();
}
