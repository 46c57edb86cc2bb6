use iop_wire::{CloseCode, RefusalReason, RegisterResponse, ToNode, VerifiedIdentity, WorkloadIdentity};

use super::*;

fn identity(node: &str) -> WorkloadIdentity {
    WorkloadIdentity::parse(&format!("spiffe://iop.local/iop/node/{node}")).unwrap()
}

fn peer(node: Option<&str>) -> PeerIdentity {
    let verified = node.map(|node| VerifiedIdentity::vouched(identity(node), [b"certificate".to_vec()]));
    PeerIdentity::new(None, verified)
}

fn managed(required: bool, revision: u64, identity_of_n1: &str) -> Catalog {
    let plain = catalog();
    let [n1, n2] = [0, 1].map(|index| plain.nodes()[index].clone());
    Catalog::builder()
        .revision(revision)
        .require_identity(required)
        .node(n1.with_identities(vec![identity(identity_of_n1)]))
        .node(n2.with_identities(vec![identity("n2"), identity("n2-next")]))
        .model(group("any", &["a", "c"]))
        .build()
        .unwrap()
}

fn state() -> EdgeState {
    new_state(managed(true, 7, "n1"))
}

fn request(token: &str) -> RegisterRequest {
    let mut request = register("n1");
    request.token = Redacted::new(token.to_owned());
    request
}

/// Registers with this token on a connection of this identity. The Node it became, or why not.
fn outcome(state: &mut EdgeState, shown: Option<&str>, token: &str, now: Instant) -> Result<String, RefusalReason> {
    let id = state.handle_opened(peer(shown), 1, now).unwrap();
    state.handle_hello(id, &hello(), now);
    effects(state);
    state.handle_register(id, &request(token), 5, 5, now);
    let effects = effects(state);
    let answer = effects.iter().find_map(|effect| match effect {
        Effect::Send { message, .. } => match &**message {
            ToNode::RegisterResponse(RegisterResponse { outcome, .. }) => Some(outcome.clone()),
            _ => None,
        },
        _ => None,
    });
    match answer.unwrap() {
        Ok(registered) => Ok(registered.node_id.to_string()),
        Err(refusal) => {
            let told = |effect: &&Effect| matches!(effect, Effect::Publish(EdgeNodeEvent::Refused { reason, .. }) if *reason == refusal.reason);
            assert_eq!(effects.iter().filter(told).count(), 1, "published");
            let observed = Observation::RegistrationRefused { reason: refusal.reason.into() };
            assert!(effects.contains(&Effect::Observe(observed)));
            let closed = Effect::Close { connection: id, code: CloseCode::Closed, retry_after: Duration::ZERO };
            assert!(effects.contains(&closed));
            Err(refusal.reason)
        }
    }
}

#[test]
fn identity_and_token_must_be_of_one_record() {
    // REG-4, REG-6, CRD-10: token {own, of the other node, unknown, none} × identity {own, of the other node, unknown, none}
    use RefusalReason::{IdentityMismatch, IdentityRequired, UnknownToken};
    let now = Instant::now();
    let (own, other, unknown) = (secret("n1"), secret("n2"), secret("who"));
    let tokens = [own.as_str(), other.as_str(), unknown.as_str(), ""];
    let table = [
        (Some("n1"), [Ok("n1"), Err(IdentityMismatch), Err(UnknownToken), Err(UnknownToken)]),
        // With both the identity and the token of the other node one is the other node.
        (Some("n2"), [Err(IdentityMismatch), Ok("n2"), Err(UnknownToken), Err(UnknownToken)]),
        (Some("who"), [Err(IdentityMismatch); 4]),
        (None, [Err(IdentityRequired); 4]),
    ];
    for (shown, row) in table {
        for (token, expected) in tokens.iter().zip(row) {
            let got = outcome(&mut state(), shown, token, now);
            assert_eq!(got.as_deref().map_err(|reason| *reason), expected, "{shown:?} {token:?}");
        }
    }
    for reason in [IdentityRequired, IdentityMismatch] {
        assert!(reason.is_fatal());
    }
}

#[test]
fn the_identity_is_matched_before_the_secret_of_the_token_is_compared() {
    // REG-6: whoever stole a token learns nothing of it, and neither does a wrong one look different
    let now = Instant::now();
    let wrong = secret("n1").replace('s', "t");
    for token in [secret("n1"), wrong.clone()] {
        assert_eq!(outcome(&mut state(), Some("n2"), &token, now), Err(RefusalReason::IdentityMismatch));
        assert_eq!(outcome(&mut state(), None, &token, now), Err(RefusalReason::IdentityRequired));
    }
    assert_eq!(outcome(&mut state(), Some("n1"), &wrong, now), Err(RefusalReason::UnknownToken));
    // A thief locks out nobody but himself.
    let mut state = state();
    for _ in 0..64 {
        outcome(&mut state, Some("n2"), &wrong, now).unwrap_err();
    }
    assert_eq!(outcome(&mut state, Some("n1"), &secret("n1"), now), Ok("n1".into()));
}

#[test]
fn a_record_may_have_several_identities_and_no_two_records_the_same() {
    // REG-6
    let now = Instant::now();
    assert_eq!(outcome(&mut state(), Some("n2-next"), &secret("n2"), now), Ok("n2".into()));
    let plain = catalog();
    let build = |identities: [&[&str]; 2], required| {
        let [n1, n2] = [0, 1].map(|index| {
            let identities = identities[index].iter().map(|id| identity(id)).collect();
            plain.nodes()[index].clone().with_identities(identities)
        });
        Catalog::builder().node(n1).node(n2).require_identity(required).build()
    };
    use crate::catalog::CatalogError;
    assert!(matches!(build([&["x"], &["x"]], false), Err(CatalogError::DuplicateIdentity { .. })));
    assert!(matches!(build([&["x"], &[]], true), Err(CatalogError::NoIdentity(node)) if node.as_str() == "n2"));
    assert!(build([&["x"], &[]], false).is_ok());
}

#[test]
fn without_managed_mode_an_identity_is_not_needed_and_still_never_ignored() {
    // REG-6
    let now = Instant::now();
    let state = || new_state(managed(false, 7, "n1"));
    assert_eq!(outcome(&mut state(), None, &secret("n1"), now), Ok("n1".into()));
    assert_eq!(outcome(&mut state(), Some("n1"), &secret("n1"), now), Ok("n1".into()));
    assert_eq!(outcome(&mut state(), Some("n2"), &secret("n1"), now), Err(RefusalReason::IdentityMismatch));
}

#[test]
fn a_record_without_a_token_id_is_found_by_its_identity() {
    // REG-6
    let now = Instant::now();
    let plain = catalog();
    let mut n1 = plain.nodes()[0].clone().with_identities(vec![identity("n1")]);
    n1.token_id = None;
    let n2 = plain.nodes()[1].clone().with_identities(vec![identity("n2")]);
    let catalog = Catalog::builder().require_identity(true).node(n1).node(n2).build().unwrap();
    assert_eq!(outcome(&mut new_state(catalog.clone()), Some("n1"), &secret("n1"), now), Ok("n1".into()));
    let other = outcome(&mut new_state(catalog.clone()), Some("n1"), &secret("n2"), now);
    assert_eq!(other, Err(RefusalReason::IdentityMismatch));
    let unknown = outcome(&mut new_state(catalog), Some("n1"), &secret("who").replace('s', "t"), now);
    assert_eq!(unknown, Err(RefusalReason::UnknownToken));
}

/// Node n1 is ready on a connection with its identity.
fn connected(state: &mut EdgeState, now: Instant) -> ConnectionId {
    let id = state.handle_opened(peer(Some("n1")), 1, now).unwrap();
    state.handle_hello(id, &hello(), now);
    state.handle_register(id, &register("n1"), 5, 5, now);
    state.handle_ready(id, ready("n1", 7, providers_of("n1")), now);
    effects(state);
    id
}

fn ends(effects: &[Effect]) -> Vec<CloseCode> {
    let ends = effects.iter().filter_map(|effect| match effect {
        Effect::Close { code, .. } => Some(*code),
        _ => None,
    });
    ends.collect()
}

#[test]
fn a_session_whose_identity_is_worth_nothing_any_more_finishes_what_runs_and_ends() {
    // CRD-10
    let now = Instant::now();
    // Idle: at once.
    let mut state = state();
    let id = connected(&mut state, now);
    assert_eq!(state.verified_identity(id).unwrap().identity(), &identity("n1"));
    assert_eq!(state.identities().len(), 1);
    state.handle_identity_lost(id, now);
    assert_eq!(ends(&effects(&mut state)), [CloseCode::IdentityRevoked]);
    assert!(state.identities().is_empty());

    for finishes in [true, false] {
        let mut state = new_state(managed(true, 7, "n1"));
        let id = connected(&mut state, now);
        let grant = grant(state.submit(ask("any", 1), now));
        state.dispatch(grant.attempt, now).unwrap();
        let generation = state.generation(id).unwrap();
        effects(&mut state);
        state.handle_identity_lost(id, now);
        state.handle_identity_lost(id, now);
        let drained = effects(&mut state);
        assert_eq!(ends(&drained), []);
        let draining = drained.iter().filter(|e| matches!(e, Effect::Publish(EdgeNodeEvent::Draining { .. }))).count();
        assert_eq!(draining, 1);
        // No new work; it may be back with another certificate.
        queued(state.submit(ask("any", 2), now));
        let end = if finishes {
            state.handle_terminal(grant.attempt, generation, Verdict::Neutral, now);
            now + Duration::from_millis(500)
        } else {
            state.handle_timeout(now + IDENTITY_DRAIN - Duration::from_millis(1));
            assert_eq!(ends(&effects(&mut state)), []);
            now + IDENTITY_DRAIN
        };
        state.handle_timeout(end);
        let ended = effects(&mut state);
        assert_eq!(ends(&ended), [CloseCode::IdentityRevoked]);
        assert_eq!(ended.contains(&Effect::Disconnected { attempt: grant.attempt }), !finishes);
        assert_eq!(in_use(&state, "a").in_use(), 0);
        assert!(state.timers.next().is_none_or(|at| at > end), "nothing of it is armed");
    }
}

#[test]
fn an_identity_that_a_new_config_does_not_have_ends_its_session_and_the_others_go_on() {
    // CRD-10, CFG-2
    let now = Instant::now();
    for (new, expected) in [
        (managed(true, 8, "n1"), vec![]),
        (managed(true, 8, "renamed"), vec![CloseCode::IdentityRevoked]),
        (managed(false, 8, "renamed"), vec![CloseCode::IdentityRevoked]),
    ] {
        let mut state = state();
        connected(&mut state, now);
        state.apply_config(Arc::new(new), now).unwrap();
        assert_eq!(ends(&effects(&mut state)), expected);
    }
    // Managed mode begins: who has no identity gets no work any more.
    let mut state = new_state(managed(false, 7, "n1"));
    connect(&mut state, "n1", now);
    effects(&mut state);
    state.apply_config(Arc::new(managed(true, 8, "n1")), now).unwrap();
    assert_eq!(ends(&effects(&mut state)), [CloseCode::IdentityRevoked]);
}
