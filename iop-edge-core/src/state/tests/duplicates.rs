//! A second connection for a Node that is connected.

use iop_wire::limits::CHALLENGE_TIMEOUT;
use iop_wire::{RefusalReason, RegisterResponse};

use super::*;

fn dial(state: &mut EdgeState, instance: u8, ordinal: u64, now: Instant) -> ConnectionId {
    let id = state.handle_opened(PeerIdentity::default(), 99, now).unwrap();
    state.handle_hello(id, &Hello { instance_id: [instance; 16], connection_ordinal: ordinal, ..hello() }, now);
    state.handle_register(id, &register("n1"), 1000, 1, now);
    id
}

fn dial_ready(state: &mut EdgeState, instance: u8, ordinal: u64, now: Instant) -> ConnectionId {
    let id = dial(state, instance, ordinal, now);
    state.handle_ready(id, ready("n1", 7, &["a", "b"]), now);
    effects(state);
    id
}

/// What a connection was told, and what became of it.
fn told(effects: &[Effect], id: ConnectionId) -> Vec<String> {
    let said = |message: &ToNode| match message {
        ToNode::HelloAck(_) => None,
        ToNode::RegisterResponse(RegisterResponse { outcome: Ok(_), edge_time_ms }) => {
            Some(format!("accepted at {edge_time_ms}"))
        }
        ToNode::RegisterResponse(RegisterResponse { outcome: Err(refusal), .. }) => Some(refusal.reason.to_string()),
        ToNode::Ping(ping) => {
            assert_ne!(ping.nonce & PROBE, 0);
            Some("ping".to_owned())
        }
        other => panic!("{other:?}"),
    };
    let told = effects.iter().filter_map(|effect| match effect {
        Effect::Send { connection, message } if *connection == id => said(message),
        Effect::Close { connection, code, .. } if *connection == id => Some(format!("closed {code}")),
        _ => None,
    });
    told.collect()
}

fn nonce(effects: &[Effect]) -> u64 {
    let pings = effects.iter().find_map(|effect| match effect {
        Effect::Send { message, .. } => match **message {
            ToNode::Ping(ping) => Some(ping.nonce),
            _ => None,
        },
        _ => None,
    });
    pings.expect("a ping")
}

#[test]
fn a_later_connection_of_the_same_process_takes_over_at_once() {
    // REG-5, FEN-2; field report T7
    let now = Instant::now();
    let mut state = new_state(catalog());
    let old = dial_ready(&mut state, 1, 4, now);
    let generation = state.generation(old).unwrap();
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(run, now).unwrap();
    let new = dial(&mut state, 1, 5, now);
    let after = effects(&mut state);
    assert_eq!(told(&after, old), ["closed superseded"]);
    assert_eq!(told(&after, new), ["accepted at 1000"]);
    assert_eq!(releases(&after), [ReleaseCause::Fenced], "the whole fence");
    assert!(after.contains(&Effect::Disconnected { attempt: run }));
    state.handle_ready(new, ready("n1", 7, &["a", "b"]), now);
    assert!(state.is_ready());
    let waiting = grant(state.submit(ask("only-a", 2), now)).attempt;
    state.dispatch(waiting, now).unwrap();
    effects(&mut state);

    // The clean-up of the old one comes late and finds nothing of its own (field report 75).
    state.handle_closed(old, CloseCode::Closed, now);
    assert!(!state.handle_terminal(run, generation, Verdict::Good, now));
    assert!(effects(&mut state).is_empty());
    assert!(state.is_ready() && in_use(&state, "a").normal == 1);
}

#[test]
fn an_earlier_or_equal_ordinal_is_no_redial() {
    // REG-5
    let now = Instant::now();
    for ordinal in [3, 4] {
        let mut state = new_state(catalog());
        let old = dial_ready(&mut state, 1, 4, now);
        let new = dial(&mut state, 1, ordinal, now);
        let after = effects(&mut state);
        assert_eq!((told(&after, old), told(&after, new)), (vec!["ping".to_owned()], vec![]));
    }
}

#[test]
fn another_process_is_refused_if_the_present_one_answers() {
    // REG-5, REG-4
    let now = Instant::now();
    let mut state = new_state(catalog());
    let old = dial_ready(&mut state, 1, 1, now);
    let new = dial(&mut state, 2, 9, now);
    let asked = effects(&mut state);
    assert_eq!(told(&asked, old), ["ping"]);
    // A third one meanwhile is refused without a question.
    let third = dial(&mut state, 3, 1, now);
    assert_eq!(told(&effects(&mut state), third), ["duplicate_connection", "closed closed"]);
    let later = now + Duration::from_secs(4);
    state.handle_pong(old, nonce(&asked) + 1, later);
    state.handle_pong(third, nonce(&asked), later);
    assert!(effects(&mut state).is_empty(), "not the answer to this question");
    state.handle_pong(old, nonce(&asked), later);
    let after = effects(&mut state);
    assert_eq!(told(&after, new), ["duplicate_connection", "closed closed"]);
    let node = Some(NodeId::new("n1").unwrap());
    let reason = RefusalReason::DuplicateConnection;
    assert!(after.contains(&Effect::Publish(EdgeNodeEvent::Refused { node, reason })));
    state.handle_timeout(now + Duration::from_secs(60));
    assert!(state.is_ready() && effects(&mut state).is_empty());
    assert_eq!(state.timers.len(), 0);
}

#[test]
fn another_process_takes_over_if_the_present_one_is_silent() {
    // REG-5; field reports 73, T7: otherwise within 5 s
    let now = Instant::now();
    let mut state = new_state(catalog());
    let old = dial_ready(&mut state, 1, 1, now);
    let new = dial(&mut state, 2, 1, now);
    effects(&mut state);
    state.handle_timeout(now + CHALLENGE_TIMEOUT - Duration::from_millis(1));
    assert!(effects(&mut state).is_empty());
    state.handle_timeout(now + CHALLENGE_TIMEOUT);
    let after = effects(&mut state);
    assert_eq!(told(&after, old), ["closed superseded"]);
    assert_eq!(told(&after, new), ["accepted at 6000"]);
    let place = |effect: &Effect, of| matches!(effect, Effect::Close { connection, .. } | Effect::Send { connection, .. } if *connection == of);
    let fence = after.iter().position(|effect| matches!(effect, Effect::Publish(EdgeNodeEvent::Disconnected { .. })));
    assert!(fence < after.iter().position(|effect| place(effect, new)), "fenced first, then accepted");
    state.handle_ready(new, ready("n1", 7, &["a", "b"]), now + CHALLENGE_TIMEOUT);
    assert!(state.is_ready());
}

#[test]
fn the_end_of_the_present_one_admits_whoever_waits_and_the_end_of_that_changes_nothing() {
    // REG-5
    let now = Instant::now();
    let mut state = new_state(catalog());
    let old = dial_ready(&mut state, 1, 1, now);
    let gone = dial(&mut state, 2, 1, now);
    state.handle_closed(gone, CloseCode::Closed, now);
    effects(&mut state);
    assert!(state.is_ready());
    let new = dial(&mut state, 3, 1, now);
    effects(&mut state);
    state.handle_closed(old, CloseCode::Closed, now);
    assert_eq!(told(&effects(&mut state), new), ["accepted at 1000"]);
    state.handle_timeout(now + CHALLENGE_TIMEOUT);
    state.handle_ready(new, ready("n1", 7, &["a", "b"]), now + CHALLENGE_TIMEOUT);
    assert!(state.is_ready());
}

#[test]
fn one_that_has_not_become_ready_can_be_replaced_too() {
    // REG-5
    let now = Instant::now();
    let mut state = new_state(catalog());
    let pending = dial(&mut state, 1, 1, now);
    effects(&mut state);
    let redialled = dial(&mut state, 1, 2, now);
    let after = effects(&mut state);
    assert_eq!(
        (told(&after, pending), told(&after, redialled)),
        (vec!["closed superseded".to_owned()], vec!["accepted at 1000".to_owned()])
    );
    let other = dial(&mut state, 2, 1, now);
    assert_eq!(told(&effects(&mut state), redialled), ["ping"]);
    state.handle_timeout(now + CHALLENGE_TIMEOUT);
    assert_eq!(told(&effects(&mut state), other), ["accepted at 6000"]);
}
