use iop_credential_lease::{IssuerKey, RecipientKey, SlotName, SlotStatus};
use iop_execution::failure::{BindingField, CredentialReason};
use iop_wire::{
    ConfigAck, CredentialState, CredentialUse, LeaseSigner, RefusalReason, RegisterResponse, ToNode, VerifiedIdentity,
    WorkloadIdentity,
};

use super::*;
use crate::catalog::{
    CatalogBuilder, CredentialForm, CredentialProfile, CredentialRoute, CredentialSlot, Credentials, ProfileName,
    RouteName, Scope, SlotSecret,
};
use crate::observe::Violation;
use crate::state::credential::NoOrder;

fn slot(name: &str, revision: u64) -> CredentialSlot {
    CredentialSlot::new(SlotName::new(name).unwrap(), revision, Arc::new(SlotSecret::new(b"sk-SENTINEL".to_vec())))
}

fn route(name: &str, principal: &str, slots: &[&str]) -> CredentialRoute {
    let principals = Scope::Only(vec![iop_credential_lease::PrincipalName::new(principal).unwrap()]);
    let slots = slots.iter().map(|slot| SlotName::new(slot).unwrap()).collect();
    CredentialRoute::new(RouteName::new(name).unwrap(), principals, Scope::All, slots)
}

fn credentials(issuer: &Arc<IssuerKey>, slots: Vec<CredentialSlot>) -> Credentials {
    Credentials {
        issuer: Some(Arc::<IssuerKey>::clone(issuer)),
        slots,
        profiles: vec![CredentialProfile::new(ProfileName::new("bearer").unwrap(), CredentialForm::Bearer)],
        routes: vec![route("a", "team-a", &["s1", "s2"])],
        ..Credentials::default()
    }
}

fn issuer() -> Arc<IssuerKey> {
    Arc::new(IssuerKey::generate().unwrap())
}

/// Node n1 has provider a, whose calls need slot s1; node n2 has c, which needs nothing. Model `paid` is served by a alone,
/// `mixed` by a first, then by c.
fn managed(revision: u64, slot: &str, credentials: Credentials) -> CatalogBuilder {
    let mut node = node_entry("n1", &[("a", 1, 0)]).with_identities(vec![identity()]);
    node.providers[0].config.base_url = "https://api.acme.example".into();
    node.providers[0].config.credential = Some(CredentialUse { slot: slot.into(), profile: "bearer".into() });
    let mut mixed = group("mixed", &["a", "c"]);
    mixed.strategy = Some(crate::catalog::Strategy::Ordered);
    Catalog::builder()
        .revision(revision)
        .suspicion_withdraw(None)
        .node(node)
        .node(node_entry("n2", &[("c", 1, 0)]))
        .model(group("paid", &["a"]))
        .model(mixed)
        .credentials(credentials)
}

fn catalog(revision: u64, issuer: &Arc<IssuerKey>, slots: Vec<CredentialSlot>) -> Catalog {
    managed(revision, "s1", credentials(issuer, slots)).build().unwrap()
}

fn identity() -> WorkloadIdentity {
    WorkloadIdentity::parse("spiffe://iop.local/iop/node/n1").unwrap()
}

/// A peer that has proved that it is n1.
fn proven() -> PeerIdentity {
    PeerIdentity::new(None, Some(VerifiedIdentity::vouched(identity(), [])))
}

fn connect_with_key(state: &mut EdgeState, key: &RecipientKey, now: Instant) -> ConnectionId {
    connect_with(state, bytes::Bytes::copy_from_slice(key.public_bytes()), now)
}

fn connect_with(state: &mut EdgeState, recipient_key: bytes::Bytes, now: Instant) -> ConnectionId {
    let id = state.handle_opened(proven(), 99, now).unwrap();
    state.handle_hello(id, &hello(), now);
    state.handle_register(id, &RegisterRequest { recipient_key, ..register("n1") }, 5, 5, now);
    state.handle_ready(id, ready("n1", 7, &["a"]), now);
    id
}

/// What a connection was told of credentials: issuers and slots, and whether a config came with it.
fn news(effects: &[Effect], id: ConnectionId) -> Vec<(Vec<LeaseSigner>, Vec<CredentialState>, bool)> {
    let updates = effects.iter().filter_map(|effect| match effect {
        Effect::Send { connection, message } if *connection == id => match &**message {
            ToNode::ConfigUpdate(update) => {
                let config = update.config.is_some();
                Some((update.trusted_lease_signers.clone(), update.credential_states.clone(), config))
            }
            _ => None,
        },
        _ => None,
    });
    updates.collect()
}

fn state_of(slot: &str, revision: u64, disabled: bool) -> CredentialState {
    CredentialState { slot: slot.into(), revision, disabled }
}

fn by(caller: &str, model: &str, run: u8) -> Ask {
    Ask { caller: Some(Principal::new(caller).unwrap()), ..ask(model, run) }
}

fn denied(admission: Result<Admission, SubmitError>) -> CredentialReason {
    match admission {
        Ok(Admission::Denied(denial)) => denial.reason,
        other => panic!("not denied: {other:?}"),
    }
}

#[test]
fn a_node_that_takes_leases_is_told_issuers_and_its_own_slots_before_it_gets_work() {
    // CRD-8, REG-1, REG-2
    let (now, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 3), slot("s2", 1)]));
    let id = connect_with_key(&mut state, &key, now);
    let all = effects(&mut state);
    let registered = all.iter().find_map(|effect| match effect {
        Effect::Send { message, .. } => match &**message {
            ToNode::RegisterResponse(RegisterResponse { outcome: Ok(registered), .. }) => Some(registered.clone()),
            _ => None,
        },
        _ => None,
    });
    assert_eq!(registered.unwrap().trusted_lease_signers, [issuer.public_bytes()]);
    assert_eq!(news(&all, id), [(vec![issuer.public_bytes()], vec![state_of("s1", 3, false)], false)]);
    let plain = connect(&mut state, "n2", now);
    assert_eq!(news(&effects(&mut state), plain), [], "it has no key that anything could be sealed to");
}

#[test]
fn a_key_that_anybody_could_open_leases_of_ends_the_connection() {
    // CRD-3
    let (now, issuer) = (Instant::now(), issuer());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 3), slot("s2", 1)]));
    let id = state.handle_opened(proven(), 99, now).unwrap();
    state.handle_hello(id, &hello(), now);
    let recipient_key = bytes::Bytes::from_static(&[0; 32]);
    state.handle_register(id, &RegisterRequest { recipient_key, ..register("n1") }, 5, 5, now);
    let violated = Effect::Observe(Observation::Violated { violation: Violation::Malformed });
    assert!(effects(&mut state).contains(&violated));
}

#[test]
fn what_takes_a_slot_away_is_told_at_once_and_a_new_revision_after_the_overlap() {
    // CRD-8: revocation reaches Nodes at once, a rotation spoils no lease that is on its way
    let (now, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 3), slot("s2", 1)]));
    let id = connect_with_key(&mut state, &key, now);
    effects(&mut state);
    let next = |state: &mut EdgeState, revision, slots, now| {
        state.apply_config(Arc::new(catalog(revision, &issuer, slots)), now).unwrap();
        news(&effects(state), id)
    };
    assert_eq!(next(&mut state, 8, vec![slot("s1", 4), slot("s2", 9)], now), [], "the old revision is still good");
    let later = now + REVISION_OVERLAP;
    assert_eq!(state.poll_timeout(), Some(later));
    state.handle_timeout(later);
    let signers = vec![issuer.public_bytes()];
    assert_eq!(news(&effects(&mut state), id), [(signers.clone(), vec![state_of("s1", 4, false)], false)]);
    let disabled = slot("s1", 4).with_status(SlotStatus::Disabled);
    assert_eq!(
        next(&mut state, 9, vec![disabled, slot("s2", 9)], later),
        [(signers.clone(), vec![state_of("s1", 4, true)], false)]
    );
    let revoked = slot("s1", 4).with_status(SlotStatus::Revoked);
    assert_eq!(next(&mut state, 10, vec![revoked, slot("s2", 9)], later), [(signers, vec![], false)]);
    assert!(REVISION_OVERLAP < iop_wire::limits::HEARTBEAT_INTERVAL, "told within one heartbeat");
}

#[test]
fn a_changed_issuer_is_told_at_once_beside_an_outstanding_config() {
    // CRD-8, REG-7
    let (now, old, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
    let mut state = new_state(catalog(7, &old, vec![slot("s1", 1), slot("s2", 1)]));
    let id = connect_with_key(&mut state, &key, now);
    effects(&mut state);
    let mut resized = managed(8, "s1", credentials(&old, vec![slot("s1", 1), slot("s2", 1)])).build().unwrap();
    resized = {
        let mut node = resized.nodes()[0].clone();
        node.providers[0].config.capacity = 2;
        let credentials = credentials(&old, vec![slot("s1", 1), slot("s2", 1)]);
        Catalog::builder().revision(8).suspicion_withdraw(None).node(node).credentials(credentials).build().unwrap()
    };
    state.apply_config(Arc::new(resized), now).unwrap();
    assert!(matches!(news(&effects(&mut state), id)[..], [(_, _, true)]), "a config is on its way");
    let new = issuer();
    let mut both = credentials(&new, vec![slot("s1", 1), slot("s2", 1)]);
    both.also_trusted = vec![old.public_bytes()];
    state.apply_config(Arc::new(managed(9, "s1", both).build().unwrap()), now).unwrap();
    let told = news(&effects(&mut state), id);
    let signers = vec![new.public_bytes(), old.public_bytes()];
    assert_eq!(told, [(signers, vec![state_of("s1", 1, false)], false)], "the news do not wait for the ack");
}

#[test]
fn a_provider_that_no_route_lets_a_caller_use_is_none_of_its_candidates() {
    // CRD-15, SEL-2
    let (now, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 1), slot("s2", 1)]));
    connect_with_key(&mut state, &key, now);
    connect(&mut state, "n2", now);
    let mismatch = CredentialReason::BindingMismatch;
    assert_eq!(denied(state.submit(by("team-b", "paid", 1), now)), mismatch(BindingField::Route));
    assert_eq!(denied(state.submit(ask("paid", 2), now)), mismatch(BindingField::Principal));
    assert_eq!(grant(state.submit(by("team-b", "mixed", 3), now)).provider.as_str(), "c");
    // With c full, whoever may use a gets it, and whoever may not waits for c.
    assert_eq!(grant(state.submit(by("team-a", "mixed", 4), now)).provider.as_str(), "a");
    let waiting = queued(state.submit(by("team-b", "mixed", 5), now));
    effects(&mut state);
    let of_a = state.attempt(RunId::from_bytes([4; 16])).unwrap();
    state.abandon(of_a, now);
    assert_eq!(granted(&effects(&mut state)), [], "a is free, and not for it");
    let of_c = state.attempt(RunId::from_bytes([3; 16])).unwrap();
    state.abandon(of_c, now);
    assert_eq!(granted(&effects(&mut state)), [waiting]);
}

#[test]
fn a_slot_that_nobody_may_use_refuses_what_was_chosen_and_nothing_stands_in_for_it() {
    // CRD-5, CRD-15
    for (status, reason) in
        [(SlotStatus::Disabled, CredentialReason::Disabled), (SlotStatus::Revoked, CredentialReason::Revoked)]
    {
        let (now, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
        let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 1).with_status(status), slot("s2", 1)]));
        connect_with_key(&mut state, &key, now);
        connect(&mut state, "n2", now);
        assert_eq!(denied(state.submit(by("team-a", "paid", 1), now)), reason, "known before it waits");
        let chosen = grant(state.submit(by("team-a", "mixed", 2), now));
        assert_eq!(chosen.provider.as_str(), "a", "the choice does not look at the slot");
        assert_eq!(state.lease_order(chosen.attempt).unwrap_err(), reason.into());
    }
}

#[test]
fn a_lease_is_made_of_what_the_node_has_and_for_this_run_alone() {
    // CRD-2, CRD-15
    let (now, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 3), slot("s2", 1)]));
    connect_with_key(&mut state, &key, now);
    let attempt = grant(state.submit(by("team-a", "paid", 1), now)).attempt;
    let order = state.lease_order(attempt).unwrap().unwrap();
    let binding = &order.binding;
    let names = [
        binding.principal.as_str(),
        binding.route.as_str(),
        binding.slot.as_str(),
        binding.profile.as_str(),
        binding.target.as_str(),
        binding.node.as_str(),
        binding.upstream.as_str(),
    ];
    assert_eq!(names, ["team-a", "a", "s1", "bearer", "t", "n1", "https://api.acme.example:443"]);
    assert_eq!(binding.run.as_str(), RunId::from_bytes([1; 16]).to_string());
    assert_eq!((order.revision, order.generation), (3, 99));
    assert_eq!(order.recipient.id(), key.id());
    assert_eq!([Some(&order), None].map(|issued| state.lease_fits(attempt, issued)), [Ok(true), Ok(false)]);
    // A rotation in between: another lease is needed.
    state.apply_config(Arc::new(catalog(8, &issuer, vec![slot("s1", 4), slot("s2", 1)])), now).unwrap();
    assert_eq!(state.lease_fits(attempt, Some(&order)), Ok(false));
    assert_eq!(state.lease_order(attempt).unwrap().unwrap().revision, 4);
    // A revision that goes back is one that the Nodes refuse: it is not sent.
    state.apply_config(Arc::new(catalog(9, &issuer, vec![slot("s1", 2), slot("s2", 1)])), now).unwrap();
    assert_eq!(state.lease_order(attempt).unwrap_err(), CredentialReason::StaleRevision.into());
}

#[test]
fn a_node_without_a_key_gets_no_lease_and_no_call_without_one() {
    // CRD-3, CRD-5
    let (now, issuer) = (Instant::now(), issuer());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 1), slot("s2", 1)]));
    connect_with(&mut state, bytes::Bytes::new(), now);
    let attempt = grant(state.submit(by("team-a", "paid", 1), now)).attempt;
    assert_eq!(state.lease_order(attempt).unwrap_err(), CredentialReason::WrongRecipient.into());
}

#[test]
fn a_managed_node_that_has_not_proved_itself_is_refused() {
    // CRD-10, REG-4
    let (now, issuer) = (Instant::now(), issuer());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 1), slot("s2", 1)]));
    registered(&mut state, "n1", now);
    let refused = effects(&mut state).into_iter().find_map(|effect| match effect {
        Effect::Publish(EdgeNodeEvent::Refused { reason, .. }) => Some(reason),
        _ => None,
    });
    assert_eq!(refused, Some(RefusalReason::IdentityRequired));
    connect(&mut state, "n2", now);
    assert!(granted(&effects(&mut state)).is_empty() && state.is_ready(), "one that needs no leases needs no identity");
}

#[test]
fn requests_wait_while_a_node_may_have_another_credential_than_is_configured() {
    // CRD-15, CFG-2
    let (now, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
    let slots = || vec![slot("s1", 1), slot("s2", 1)];
    let mut state = new_state(catalog(7, &issuer, slots()));
    let id = connect_with_key(&mut state, &key, now);
    effects(&mut state);
    let changed = managed(8, "s2", credentials(&issuer, slots())).build().unwrap();
    state.apply_config(Arc::new(changed), now).unwrap();
    let told = news(&effects(&mut state), id);
    let states = vec![state_of("s1", 1, false), state_of("s2", 1, false)];
    assert_eq!(told, [(vec![issuer.public_bytes()], states, true)], "the config, and both slots meanwhile");
    let waiting = queued(state.submit(by("team-a", "paid", 1), now));
    let providers = vec![provider_ready("a", &[])];
    let ack = ConfigAck { seen_revision: 8, applied_revision: 8, error: String::new(), providers };
    state.handle_config_ack(id, ack, now);
    let all = effects(&mut state);
    assert_eq!(granted(&all), [waiting]);
    assert_eq!(news(&all, id), [(vec![issuer.public_bytes()], vec![state_of("s2", 1, false)], false)]);
    assert_eq!(state.lease_order(waiting).unwrap().unwrap().binding.slot.as_str(), "s2");
}

#[test]
fn what_needs_a_lease_is_not_sent_without_one_when_its_provider_goes_or_changes() {
    // CRD-5, CRD-15, CFG-2: granted, and the config changes before the request is sent
    let slots = || vec![slot("s1", 1), slot("s2", 1)];
    for gone in [true, false] {
        let (now, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
        let mut state = new_state(catalog(7, &issuer, slots()));
        connect_with_key(&mut state, &key, now);
        let attempt = grant(state.submit(by("team-a", "paid", 1), now)).attempt;
        let order = state.lease_order(attempt).unwrap().unwrap();
        let new = if gone {
            let mut node = catalog(8, &issuer, slots()).nodes()[0].clone();
            node.providers[0].enabled = false;
            Catalog::builder()
                .revision(8)
                .suspicion_withdraw(None)
                .node(node)
                .credentials(credentials(&issuer, slots()))
        } else {
            managed(8, "s2", credentials(&issuer, slots()))
        };
        state.apply_config(Arc::new(new.build().unwrap()), now).unwrap();
        assert_eq!(state.lease_order(attempt).unwrap_err(), NoOrder::Gone, "gone {gone}");
        assert_eq!([Some(&order), None].map(|issued| state.lease_fits(attempt, issued)), [Err(NoOrder::Gone); 2]);
    }
}

#[test]
fn no_row_of_rotations_keeps_an_old_revision_good() {
    // CRD-8: each is taken for one overlap after it was replaced
    let (start, issuer, key) = (Instant::now(), issuer(), RecipientKey::generate().unwrap());
    let mut state = new_state(catalog(7, &issuer, vec![slot("s1", 1), slot("s2", 1)]));
    let id = connect_with_key(&mut state, &key, start);
    effects(&mut state);
    let half = REVISION_OVERLAP / 2;
    for round in 0..6_u32 {
        let (now, revision) = (start + half * round, u64::from(round) + 2);
        state.handle_timeout(now);
        // Replaced one and two rounds ago: the one before last ends now.
        let oldest = revision.saturating_sub(2).max(1);
        let told = news(&effects(&mut state), id);
        let expected = (round > 1).then(|| (vec![issuer.public_bytes()], vec![state_of("s1", oldest, false)], false));
        assert_eq!(told, expected.into_iter().collect::<Vec<_>>(), "round {round}");
        state
            .apply_config(Arc::new(catalog(revision + 7, &issuer, vec![slot("s1", revision), slot("s2", 1)])), now)
            .unwrap();
        assert_eq!(news(&effects(&mut state), id), []);
    }
    // However many there are, what is remembered of them is bounded.
    for revision in 10..40 {
        let now = start + half * 6;
        state
            .apply_config(Arc::new(catalog(revision + 7, &issuer, vec![slot("s1", revision), slot("s2", 1)])), now)
            .unwrap();
    }
    let last = news(&effects(&mut state), id).pop().unwrap();
    assert_eq!(last.1, [state_of("s1", 31, false)]);
}

#[test]
fn a_record_that_becomes_managed_needs_an_identity_before_any_secret_is_compared() {
    // REG-6, CRD-10
    let (now, issuer) = (Instant::now(), issuer());
    let slots = || vec![slot("s1", 1), slot("s2", 1)];
    let plain = |revision| {
        let mut node = managed(revision, "s1", credentials(&issuer, slots())).build().unwrap().nodes()[0].clone();
        node.providers[0].config.credential = None;
        Catalog::builder().revision(revision).suspicion_withdraw(None).node(node).build().unwrap()
    };
    let mut state = new_state(plain(7));
    let id = registered(&mut state, "n1", now);
    state.handle_ready(id, ready("n1", 7, &["a"]), now);
    effects(&mut state);
    state.apply_config(Arc::new(catalog(8, &issuer, slots())), now).unwrap();
    let closed = |effect: &Effect| {
        matches!(effect, Effect::Close { connection, code, .. }
        if *connection == id && *code == CloseCode::IdentityRevoked)
    };
    assert!(effects(&mut state).iter().any(closed), "it ends at once: nothing runs");
    // Without an id in the record, too: a good secret and a bad one look the same.
    for token in [secret("n1"), secret("n1").replace('s', "t")] {
        let mut node = catalog(9, &issuer, slots()).nodes()[0].clone();
        node.token_id = None;
        let unnamed = Catalog::builder().revision(9).suspicion_withdraw(None).node(node);
        let mut state = new_state(unnamed.credentials(credentials(&issuer, slots())).build().unwrap());
        let id = state.handle_opened(PeerIdentity::default(), 1, now).unwrap();
        state.handle_hello(id, &hello(), now);
        let request = RegisterRequest { token: Redacted::new(token), ..register("n1") };
        state.handle_register(id, &request, 5, 5, now);
        let refused = effects(&mut state).into_iter().find_map(|effect| match effect {
            Effect::Publish(EdgeNodeEvent::Refused { reason, .. }) => Some(reason),
            _ => None,
        });
        assert_eq!(refused, Some(RefusalReason::IdentityRequired));
    }
}
