use iop_wire::{NodeReadyResponse, RefusalReason, RegisterResponse};

use super::*;
use crate::observe::Violation;
use crate::state::registry::MAX_UNREGISTERED;

fn response(effects: &[Effect]) -> Result<u64, RefusalReason> {
    effects
        .iter()
        .find_map(|effect| match effect {
            Effect::Send { message, .. } => match &**message {
                ToNode::RegisterResponse(RegisterResponse { outcome, .. }) => {
                    Some(outcome.as_ref().map(|ok| ok.config.revision).map_err(|refusal| refusal.reason))
                }
                _ => None,
            },
            _ => None,
        })
        .expect("a response")
}

fn ready_answers(effects: &[Effect]) -> Vec<bool> {
    let answers = effects.iter().filter_map(|effect| match effect {
        Effect::Send { message, .. } => match **message {
            ToNode::ReadyResponse(NodeReadyResponse { ready, .. }) => Some(ready),
            _ => None,
        },
        _ => None,
    });
    answers.collect()
}

fn closes(effects: &[Effect]) -> Vec<CloseCode> {
    let closes = effects.iter().filter_map(|effect| match effect {
        Effect::Close { code, .. } => Some(*code),
        _ => None,
    });
    closes.collect()
}

#[test]
fn the_first_ready_pumps_publishes_and_answers_in_this_order() {
    // REG-3
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n2", now);
    grant(state.submit(ask("any", 1), now));
    let waiter = queued(state.submit(ask("any", 2), now));
    let id = registered(&mut state, "n1", now);
    effects(&mut state);

    state.handle_ready(id, ready("n1", 7, &["a", "b"]), now);
    let effects = effects(&mut state);
    let kinds: Vec<_> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Granted(grant) if grant.attempt == waiter && grant.provider.as_str() == "a" => Some("granted"),
            Effect::Publish(EdgeNodeEvent::Connected { .. }) => Some("connected"),
            Effect::Send { message, .. } => match &**message {
                ToNode::ReadyResponse(answer) if answer.lease_generation == 99 => Some("answer"),
                _ => Some("other"),
            },
            Effect::Observe(_) => None,
            _ => Some("other"),
        })
        .collect();
    assert_eq!(kinds, ["granted", "connected", "answer"]);
}

#[test]
fn until_ready_a_node_gets_no_work_and_shows_nowhere() {
    // REG-2
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = registered(&mut state, "n1", now);
    let before = effects(&mut state);
    assert!(!before.iter().any(|effect| matches!(effect, Effect::Publish(_))));
    assert_eq!(response(&before), Ok(7));
    assert_eq!(state.submit(ask("any", 1), now), Err(SubmitError::Unavailable));
    assert!(!state.is_ready() && !state.snapshot(now).nodes.iter().any(|node| node.connected));
    state.handle_closed(id, CloseCode::Closed, now);
    assert!(matches!(
        effects(&mut state).as_slice(),
        [Effect::Publish(EdgeNodeEvent::NotReady { .. }), Effect::Observe(_)]
    ));
    connect(&mut state, "n1", now);
    assert!(state.is_ready(), "the claim was given back");
}

#[test]
fn a_second_ready_changes_nothing_and_a_wrong_one_is_refused() {
    // REG-3, W10
    let now = Instant::now();
    for (request, again, answer) in [
        (ready("n1", 7, &["a", "b"]), true, true),
        (ready("n2", 7, &["a"]), false, false),
        (ready("n1", 8, &["a"]), true, false),
        (ready("n1", 7, &["c"]), true, false),
        (ready("n1", 7, &["a", "a"]), true, false),
    ] {
        let mut state = new_state(catalog());
        let id = connect(&mut state, "n1", now);
        effects(&mut state);
        state.handle_ready(id, request.clone(), now);
        let second = effects(&mut state);
        assert_eq!(ready_answers(&second), [again]);
        assert!(!second.iter().any(|effect| matches!(effect, Effect::Publish(EdgeNodeEvent::Connected { .. }))));

        let mut state = new_state(catalog());
        let id = registered(&mut state, "n1", now);
        effects(&mut state);
        state.handle_ready(id, request, now);
        let first = effects(&mut state);
        assert_eq!(ready_answers(&first), [answer]);
        assert_eq!(closes(&first), if answer { vec![] } else { vec![CloseCode::ProtocolViolation] });
        assert_eq!(state.is_ready(), answer);
    }
}

#[test]
fn every_refusal_is_typed_sent_and_published() {
    // REG-4
    let now = Instant::now();
    let mut catalog = catalog();
    let mut off = node_entry("off", &[]);
    off.enabled = false;
    catalog = Catalog::builder()
        .revision(7)
        .node(catalog.nodes()[0].clone())
        .node(catalog.nodes()[1].clone())
        .node(off)
        .build()
        .unwrap();
    let mut state = new_state(catalog);
    connect(&mut state, "n2", now);
    effects(&mut state);
    let mut wrong_secret = register("n1");
    wrong_secret.token = Redacted::new(secret("n1").replace('s', "t"));
    let mut unknown_id = register("n1");
    unknown_id.token = Redacted::new(secret("who"));
    let mut garbage = register("n1");
    garbage.token = Redacted::new("garbage".into());
    let mut other_node = register("n1");
    other_node.claimed_node_id = Some(NodeId::new("n2").unwrap());
    for (request, reason, node) in [
        (wrong_secret, RefusalReason::UnknownToken, None),
        (unknown_id, RefusalReason::UnknownToken, None),
        (garbage, RefusalReason::UnknownToken, None),
        (other_node, RefusalReason::IdentityMismatch, Some("n1")),
        (register("off"), RefusalReason::ConfigUnavailable, Some("off")),
    ] {
        let id = state.handle_opened(PeerIdentity::default(), 1, now).unwrap();
        state.handle_hello(id, &hello(), now);
        state.handle_register(id, &request, 5, 5, now);
        let effects = effects(&mut state);
        assert_eq!(response(&effects), Err(reason));
        assert_eq!(closes(&effects), [CloseCode::Closed]);
        let node = node.map(|node| NodeId::new(node).unwrap());
        assert!(effects.contains(&Effect::Publish(EdgeNodeEvent::Refused { node, reason })), "{reason}");
        let seen = Observation::RegistrationRefused { reason: reason.into() };
        assert!(effects.contains(&Effect::Observe(seen)), "{reason}");
    }
    assert!(state.snapshot(now).nodes[1].connected, "the incumbent stays");

    state.begin_shutdown(Duration::ZERO, now);
    registered(&mut state, "n1", now);
    assert_eq!(response(&effects(&mut state)), Err(RefusalReason::Draining));

    let id = state.handle_opened(PeerIdentity::default(), 1, now).unwrap();
    state.handle_hello(id, &Hello { proto_min: 2, proto_max: 3, ..hello() }, now);
    let effects = effects(&mut state);
    assert_eq!(closes(&effects), [CloseCode::UnsupportedProtocol]);
    let reason = RefusalReason::UnsupportedProtocol;
    assert!(effects.contains(&Effect::Publish(EdgeNodeEvent::Refused { node: None, reason })));
}

#[test]
fn hello_register_and_ready_have_their_time() {
    // REG-1
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut state = new_state(catalog());
    let silent = state.handle_opened(PeerIdentity::default(), 1, start).unwrap();
    let half = state.handle_opened(PeerIdentity::default(), 1, start).unwrap();
    state.handle_hello(half, &hello(), at(9));
    state.handle_timeout(at(9));
    effects(&mut state);
    assert_eq!(state.poll_timeout(), Some(at(10)));
    state.handle_timeout(at(10));
    assert_eq!(closes(&effects(&mut state)), [CloseCode::RegisterTimeout; 2]);
    state.handle_hello(silent, &hello(), at(10));
    assert!(!effects(&mut state).iter().any(|effect| matches!(effect, Effect::Send { .. })), "a closed one is closed");

    registered(&mut state, "n1", at(20));
    effects(&mut state);
    state.handle_timeout(at(79));
    assert!(effects(&mut state).is_empty());
    state.handle_timeout(at(80));
    assert_eq!(closes(&effects(&mut state)), [CloseCode::ReadyTimeout]);
    connect(&mut state, "n1", at(81));
    state.handle_timeout(at(9999));
    assert!(state.is_ready(), "a ready connection has no handshake timer");
    assert_eq!(state.poll_timeout(), None);
}

#[test]
fn a_token_that_failed_often_is_blocked_for_a_while_and_the_others_are_not() {
    // REG-8
    let start = Instant::now();
    let mut state = new_state(catalog());
    let mut wrong = register("n1");
    wrong.token = Redacted::new(secret("n1").replace('s', "t"));
    let mut seen = Vec::new();
    for _ in 0..10 {
        let id = state.handle_opened(PeerIdentity::default(), 1, start).unwrap();
        state.handle_hello(id, &hello(), start);
        state.handle_register(id, &wrong, 5, 5, start);
        seen = effects(&mut state);
    }
    assert_eq!(response(&seen), Err(RefusalReason::Draining));
    // REG-4: the wire has no better word, but whoever watches is not told that the Edge drains.
    let reasons = seen.iter().filter_map(|effect| match effect {
        Effect::Observe(Observation::RegistrationRefused { reason }) => Some(reason.as_str()),
        _ => None,
    });
    assert_eq!(reasons.collect::<Vec<_>>(), ["rate_limited"]);
    let events = seen.iter().filter_map(|effect| match effect {
        Effect::Publish(event) => Some(event.clone()),
        _ => None,
    });
    let retry_after = Duration::from_secs(5);
    assert_eq!(events.collect::<Vec<_>>(), [EdgeNodeEvent::RateLimited { retry_after }]);
    registered(&mut state, "n1", start);
    assert_eq!(response(&effects(&mut state)), Err(RefusalReason::Draining), "even with the right secret");
    registered(&mut state, "n2", start);
    assert_eq!(response(&effects(&mut state)), Ok(7));
    registered(&mut state, "n1", start + Duration::from_secs(60));
    assert_eq!(response(&effects(&mut state)), Ok(7));
}

#[test]
fn strangers_are_bounded() {
    // REG-8
    let now = Instant::now();
    let mut state = new_state(catalog());
    for _ in 0..MAX_UNREGISTERED {
        state.handle_opened(PeerIdentity::default(), 1, now).unwrap();
    }
    assert!(state.handle_opened(PeerIdentity::default(), 1, now).is_err());
    state.handle_timeout(now + Duration::from_secs(10));
    assert!(state.handle_opened(PeerIdentity::default(), 1, now).is_ok());
}

#[test]
fn messages_out_of_state_close_the_connection() {
    // W2
    let now = Instant::now();
    type Step = fn(&mut EdgeState, ConnectionId, Instant);
    let say_hello: Step = |state, id, now| state.handle_hello(id, &hello(), now);
    let say_register: Step = |state, id, now| state.handle_register(id, &register("n1"), 5, 5, now);
    let say_ready: Step = |state, id, now| state.handle_ready(id, ready("n1", 7, &["a"]), now);
    let say_drain: Step = |state, id, now| state.handle_drain(id, None, now);
    let sequences: [&[Step]; 6] = [
        &[say_register],
        &[say_ready],
        &[say_drain],
        &[say_hello, say_hello],
        &[say_hello, say_register, say_register],
        &[say_hello, say_register, say_drain],
    ];
    for (at, steps) in sequences.iter().enumerate() {
        let mut state = new_state(catalog());
        let id = state.handle_opened(PeerIdentity::default(), 1, now).unwrap();
        for step in *steps {
            step(&mut state, id, now);
        }
        let effects = effects(&mut state);
        assert_eq!(closes(&effects), [CloseCode::ProtocolViolation], "sequence {at}");
        assert!(effects.contains(&Effect::Observe(Observation::Violated { violation: Violation::State })));
        assert_eq!(state.registry.ids(), []);
    }
}

#[test]
fn listed_targets_become_models_that_all_their_providers_serve() {
    // CFG-3
    let now = Instant::now();
    let catalog = Catalog::builder()
        .node(node_entry("n1", &[("a", 1, 0), ("b", 1, 0)]))
        .node(node_entry("n2", &[("c", 1, 0)]))
        .model(group("taken", &["a"]))
        .models_auto(true)
        .created(123)
        .build()
        .unwrap();
    let mut state = new_state(catalog);
    let names = |state: &EdgeState| -> Vec<String> {
        state.models().iter().map(|m| format!("{}{}", m.name, if m.available { "" } else { " (off)" })).collect()
    };
    assert_eq!(names(&state), ["taken (off)"]);
    let id = registered(&mut state, "n1", now);
    let mut request = ready("n1", 1, &[]);
    request.providers = vec![provider_ready("a", &["x", "taken"]), provider_ready("b", &["y"])];
    state.handle_ready(id, request, now);
    assert_eq!(names(&state), ["taken", "x", "y"]);
    assert_eq!((state.models()[1].created, state.models()[1].context_length), (123, Some(4096)));

    let held = grant(state.submit(ask("x", 1), now));
    let waiter = queued(state.submit(ask("x", 2), now));
    let kept = queued(state.submit(ask("taken", 3), now));
    effects(&mut state);
    let id = registered(&mut state, "n2", now);
    let mut request = ready("n2", 1, &[]);
    request.providers = vec![provider_ready("c", &["z", "x"])];
    state.handle_ready(id, request, now);
    assert_eq!(names(&state), ["taken", "x", "y", "z"]);
    assert_eq!(granted(&effects(&mut state)), [waiter], "the new provider of its model takes it");
    assert_eq!(in_use(&state, "c").normal, 1);

    state.handle_closed(id, CloseCode::Closed, now);
    assert_eq!(names(&state), ["taken", "x", "y", "z (off)"], "names do not come and go with connections");
    state.abandon(held.attempt, now);
    assert_eq!(granted(&effects(&mut state)), [kept]);
}

#[test]
fn a_record_without_a_token_id_is_found_by_its_secret_alone() {
    // REG-6
    let now = Instant::now();
    let mut entries = ["n1", "n2"].map(|id| node_entry(id, &[(id, 1, 0)]));
    for entry in &mut entries {
        entry.token_id = None;
    }
    let [first, second] = entries;
    let mut state = new_state(Catalog::builder().revision(7).node(first).node(second).build().unwrap());
    let id = registered(&mut state, "n2", now);
    state.handle_ready(id, ready("n2", 7, &["n2"]), now);
    assert!(state.snapshot(now).nodes[1].connected && !state.snapshot(now).nodes[0].connected);
}
