//! A new config while everything runs.

use iop_wire::ConfigAck;

use super::*;
use crate::api::{ApplyError, ConfigChange, UnknownNode};

fn node(id: &str) -> NodeId {
    NodeId::new(id).unwrap()
}

fn names(names: &[&str]) -> Vec<ModelName> {
    names.iter().map(|name| ModelName::new(name).unwrap()).collect()
}

/// As [`catalog`], with provider a of n1 at `places`, d beside it, model `new`, and n2 only if asked.
fn changed(revision: u64, places: u32, second: bool) -> Catalog {
    let mut builder = Catalog::builder()
        .revision(revision)
        .node(node_entry("n1", &[("a", places, 0), ("b", 2, 1), ("d", 1, 0)]))
        .model(group("only-a", &["a"]))
        .model(group("new", &["d"]));
    if second {
        builder = builder.node(node_entry("n2", &[("c", 1, 0)])).model(group("any", &["a", "c"]));
    }
    builder.build().unwrap()
}

fn apply(state: &mut EdgeState, catalog: Catalog, now: Instant) -> ConfigChange {
    state.apply_config(Arc::new(catalog), now).unwrap()
}

/// Revisions pushed to a connection.
fn pushed(effects: &[Effect], id: ConnectionId) -> Vec<u64> {
    let pushed = effects.iter().filter_map(|effect| match effect {
        Effect::Send { connection, message } if *connection == id => match &**message {
            ToNode::ConfigUpdate(update) => update.config.as_ref().map(|config| config.revision),
            _ => None,
        },
        _ => None,
    });
    pushed.collect()
}

fn ack(seen: u64, applied: u64, providers: &[&str]) -> ConfigAck {
    let providers = providers.iter().map(|id| provider_ready(id, &[])).collect();
    let error = if seen == applied { String::new() } else { "provider d: no such kind".to_owned() };
    ConfigAck { seen_revision: seen, applied_revision: applied, error, providers }
}

#[test]
fn a_new_config_swaps_as_a_whole_and_says_what_changed() {
    // CFG-2
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let change = apply(&mut state, changed(8, 1, false), now);
    assert_eq!(change.revision, 8);
    assert_eq!((change.nodes_added, change.nodes_removed), (vec![], vec![node("n2")]));
    assert_eq!((change.nodes_changed, change.models_changed), (vec![node("n1")], names(&["any", "long", "new"])));
    assert_eq!(state.submit(ask("any", 1), now), Err(SubmitError::UnknownModel));
    assert_eq!(state.submit(ask("new", 1), now), Err(SubmitError::Unavailable), "its Node does not have it yet");
    assert_eq!(pushed(&effects(&mut state), id), [8]);
    state.handle_config_ack(id, ack(8, 8, &["a", "b", "d"]), now);
    assert!(
        effects(&mut state).contains(&Effect::Publish(EdgeNodeEvent::ConfigApplied { node: node("n1"), revision: 8 }))
    );
    grant(state.submit(ask("new", 1), now));
    assert_eq!(state.snapshot(now).nodes[0].config_revision, 8);

    for revision in [7, 8] {
        let refused = state.apply_config(Arc::new(catalog()), now);
        assert_eq!(refused, Err(ApplyError::NotNewer { current: 8 }), "{revision}");
    }
    state.begin_shutdown(Duration::ZERO, now);
    assert_eq!(state.apply_config(Arc::new(changed(9, 1, true)), now), Err(ApplyError::ShuttingDown));
}

#[test]
fn what_runs_goes_on_under_the_config_it_began_with() {
    // CFG-2, REG-7, LEA-3
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    let reserved = grant(state.submit(ask("long", 2), now)).attempt;
    state.dispatch(run, now).unwrap();
    // The provider goes: nothing new for it, and what runs ends as it would have.
    let without = Catalog::builder()
        .revision(8)
        .node(node_entry("n1", &[("b", 2, 0)]))
        .model(group("long", &["b"]))
        .build()
        .unwrap();
    apply(&mut state, without, now);
    assert_eq!(state.ledger.lease(run).unwrap().config_revision, 7);
    assert_eq!(state.dispatch(reserved, now), Ok(id));
    effects(&mut state);
    assert!(state.handle_terminal(run, generation, Verdict::Good, now));
    assert_eq!(releases(&effects(&mut state)), [ReleaseCause::Terminal]);
    assert!(state.handle_terminal(reserved, generation, Verdict::Good, now));
    assert!(state.attempts.is_empty() && state.snapshot(now).is_at_rest());
}

#[test]
fn who_waits_is_resolved_again_under_the_new_config() {
    // CFG-2, QUE-3, FEN-3
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    connect(&mut state, "n2", now);
    grant(state.submit(ask("only-a", 1), now));
    grant(state.submit(ask("any", 2), now));
    let gone = queued(state.submit(ask("any", 3), now));
    let kept = queued(state.submit(ask("only-a", 4), now));
    effects(&mut state);
    apply(&mut state, changed(8, 2, false), now);
    let after = effects(&mut state);
    assert_eq!(refusals(&after), [(gone, SubmitError::Unavailable)], "its model is gone");
    assert!(granted(&after).is_empty(), "the Node has one place until it says otherwise");
    state.handle_config_ack(id, ack(8, 8, &["a", "b", "d"]), now);
    assert_eq!(granted(&effects(&mut state)), [kept]);
}

#[test]
fn fewer_places_hold_at_once_and_more_only_when_the_node_has_them() {
    // REG-7, LEA-8
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let places =
        |state: &EdgeState| state.snapshot(now).provider(&ProviderId::new("b").unwrap()).unwrap().effective.capacity;
    let with = |revision, places| {
        Catalog::builder().revision(revision).node(node_entry("n1", &[("b", places, 0)])).build().unwrap()
    };
    apply(&mut state, with(8, 1), now);
    assert_eq!(places(&state), 1);
    state.handle_config_ack(id, ack(8, 8, &["b"]), now);
    apply(&mut state, with(9, 5), now);
    assert_eq!(places(&state), 1);
    state.handle_config_ack(id, ack(9, 9, &["b"]), now);
    assert_eq!(places(&state), 5);
}

#[test]
fn a_node_that_became_ready_under_an_older_config_has_no_more_places_than_that_allows() {
    // REG-7, LEA-8: its own gate still has the old number
    let now = Instant::now();
    let mut state = new_state(catalog());
    let limits = |state: &EdgeState, id| state.snapshot(now).provider(&ProviderId::new(id).unwrap()).unwrap().effective;
    let id = registered(&mut state, "n1", now);
    let providers = [("a", 5, 0), ("b", 5, 5), ("d", 1, 0)];
    let newer = Catalog::builder().revision(8).node(node_entry("n1", &providers)).build().unwrap();
    apply(&mut state, newer, now);
    state.handle_ready(id, ready("n1", 7, &["a", "b"]), now);
    assert_eq!(limits(&state, "a"), PlaceLimits { capacity: 1, long: 1 });
    assert_eq!(limits(&state, "b"), PlaceLimits { capacity: 2, long: 1 });
    state.handle_config_ack(id, ack(7, 7, &["a", "b"]), now);
    assert_eq!(limits(&state, "b"), PlaceLimits { capacity: 2, long: 1 }, "its offers change nothing in that");
    state.handle_config_ack(id, ack(8, 7, &[]), now);
    assert_eq!(limits(&state, "b"), PlaceLimits { capacity: 2, long: 1 }, "it refuses the new one");
}

#[test]
fn a_removed_or_disabled_node_is_closed_and_fenced() {
    // CFG-2, WIR-13
    let now = Instant::now();
    for disabled in [false, true] {
        let mut state = new_state(catalog());
        connect(&mut state, "n1", now);
        let id = connect(&mut state, "n2", now);
        grant(state.submit(ask("only-a", 1), now));
        let run = grant(state.submit(ask("any", 2), now));
        assert_eq!(run.provider.as_str(), "c");
        state.dispatch(run.attempt, now).unwrap();
        effects(&mut state);
        let mut next = changed(8, 1, disabled);
        if disabled {
            let mut off = node_entry("n2", &[("c", 1, 0)]);
            off.enabled = false;
            next = Catalog::builder().revision(8).node(next.nodes()[0].clone()).node(off).build().unwrap();
        }
        apply(&mut state, next, now);
        let after = effects(&mut state);
        let (code, retry_after) = if disabled {
            (CloseCode::Closed, Duration::from_secs(30)) // it may come back
        } else {
            (CloseCode::RemovedFromConfig, Duration::ZERO)
        };
        assert!(after.contains(&Effect::Close { connection: id, code, retry_after }));
        assert!(after.contains(&Effect::Disconnected { attempt: run.attempt }));
        let again = registered(&mut state, "n2", now);
        let refused = effects(&mut state)
            .iter()
            .any(|effect| matches!(effect, Effect::Close { connection, .. } if *connection == again));
        assert!(refused, "it can't register again");
    }
}

#[test]
fn one_push_is_outstanding_the_latest_wins_and_a_refusal_keeps_the_last_good_one() {
    // REG-7
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    effects(&mut state);
    for (revision, places) in [(8, 2), (9, 3), (10, 4)] {
        apply(&mut state, changed(revision, places, true), now);
    }
    assert_eq!(pushed(&effects(&mut state), id), [8]);
    state.handle_config_ack(id, ack(8, 7, &[]), now);
    let after = effects(&mut state);
    assert_eq!(pushed(&after, id), [10], "9 is never sent");
    let refused =
        EdgeNodeEvent::ConfigRefused { node: node("n1"), revision: 8, error: "provider d: no such kind".into() };
    assert!(after.contains(&Effect::Publish(refused)));
    assert_eq!(state.snapshot(now).nodes[0].config_revision, 7);
    grant(state.submit(ask("only-a", 1), now));
    state.handle_config_ack(id, ack(10, 7, &[]), now);
    assert!(pushed(&effects(&mut state), id).is_empty(), "a refused one is not sent again");
    apply(&mut state, changed(11, 4, true), now);
    assert_eq!(pushed(&effects(&mut state), id), [11], "a new revision is");
}

#[test]
fn a_node_that_registered_under_an_older_config_is_pushed_the_present_one_when_ready() {
    // REG-2, REG-7
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = registered(&mut state, "n1", now);
    apply(&mut state, changed(8, 1, true), now);
    assert!(pushed(&effects(&mut state), id).is_empty(), "until ready nothing is pushed");
    state.handle_ready(id, ready("n1", 7, &["a", "b"]), now);
    assert_eq!(pushed(&effects(&mut state), id), [8]);
    assert!(state.is_ready());
}

#[test]
fn a_node_whose_providers_stay_is_left_alone() {
    // REG-7
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n1", now);
    let id = connect(&mut state, "n2", now);
    effects(&mut state);
    apply(&mut state, changed(8, 2, true), now);
    assert!(pushed(&effects(&mut state), id).is_empty());
}

#[test]
fn an_ack_that_fits_nothing_is_a_violation() {
    // W2, W10, W13
    let now = Instant::now();
    for ack in [ack(9, 9, &["a"]), ack(7, 7, &["c"]), ack(7, 7, &["a", "a"])] {
        let mut state = new_state(catalog());
        let id = connect(&mut state, "n1", now);
        effects(&mut state);
        state.handle_config_ack(id, ack, now);
        let closed = effects(&mut state)
            .iter()
            .any(|effect| matches!(effect, Effect::Close { code: CloseCode::ProtocolViolation, .. }));
        assert!(closed && !state.is_ready());
    }
    let mut state = new_state(catalog());
    let id = registered(&mut state, "n1", now);
    state.handle_config_ack(id, ack(7, 7, &["a"]), now);
    assert!(state.registry.ids().is_empty(), "before ready none is legal");
}

#[test]
fn offers_change_while_a_node_is_connected() {
    // CFG-3, ADP-5
    let now = Instant::now();
    let catalog = Catalog::builder().node(node_entry("n1", &[("a", 1, 0)])).models_auto(true).build().unwrap();
    let mut state = new_state(catalog);
    let id = registered(&mut state, "n1", now);
    state.handle_ready(id, ready("n1", 1, &["a"]), now);
    let listed =
        |state: &EdgeState| -> Vec<String> { state.models().iter().map(|model| model.name.to_string()).collect() };
    assert!(listed(&state).is_empty());
    let offers = |targets: &[&str]| ConfigAck {
        seen_revision: 1,
        applied_revision: 1,
        error: String::new(),
        providers: vec![provider_ready("a", targets)],
    };
    state.handle_config_ack(id, offers(&["x", "y"]), now);
    assert_eq!(listed(&state), ["x", "y"]);
    grant(state.submit(ask("x", 1), now));
    let waiter = queued(state.submit(ask("x", 2), now));
    effects(&mut state);
    state.handle_config_ack(id, offers(&["y"]), now);
    assert_eq!(listed(&state), ["y"]);
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Unavailable)]);
}

#[test]
fn a_node_out_of_service_finishes_and_stays_out_over_reconnects_until_it_is_put_back() {
    // EDG-1
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(run, now).unwrap();
    let waiter = queued(state.submit(ask("only-a", 2), now));
    effects(&mut state);
    assert_eq!(state.set_in_service(&node("n1"), false, now), Ok(()));
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Unavailable)], "who waits is resolved again");
    assert!(state.snapshot(now).nodes[0].draining && state.snapshot(now).nodes[0].connected);
    assert!(state.handle_terminal(run, state.generation(id).unwrap(), Verdict::Good, now));
    state.handle_closed(id, CloseCode::Closed, now);
    connect(&mut state, "n1", now);
    apply(&mut state, changed(8, 1, true), now);
    assert_eq!(state.submit(ask("only-a", 3), now), Err(SubmitError::Unavailable));
    assert_eq!(state.set_in_service(&node("n1"), true, now), Ok(()));
    grant(state.submit(ask("only-a", 4), now));
    assert_eq!(state.set_in_service(&node("n9"), true, now), Err(UnknownNode(node("n9"))));
}

#[test]
fn a_config_that_is_taken_back_brings_back_what_it_took_away() {
    // REG-7, CFG-2: nothing is pushed, for the node has it in force
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    connect(&mut state, "n2", now);
    effects(&mut state);
    let make = |revision, off: bool, bad: bool| {
        let mut n1 = node_entry(
            "n1",
            if bad { &[("a", 1, 0), ("b", 2, 1), ("bad", 1, 0)] } else { &[("a", 1, 0), ("b", 2, 1)] },
        );
        n1.providers[0].enabled = !off;
        Catalog::builder()
            .revision(revision)
            .node(n1)
            .node(node_entry("n2", &[("c", 1, 0)]))
            .model(group("only-a", &["a"]))
            .build()
            .unwrap()
    };
    apply(&mut state, make(8, true, true), now);
    state.handle_config_ack(id, ack(8, 7, &[]), now);
    effects(&mut state);
    apply(&mut state, make(9, false, false), now);
    let again = pushed(&effects(&mut state), id);
    let got = state.submit(ask("only-a", 1), now);
    assert!(got.is_ok() || !again.is_empty(), "{got:?}, pushed {again:?}");
}

#[test]
fn a_config_that_is_taken_back_brings_back_its_places() {
    // REG-7, LEA-8
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    effects(&mut state);
    let make = |revision, places| {
        Catalog::builder()
            .revision(revision)
            .node(node_entry("n1", &[("a", 1, 0), ("b", places, 1)]))
            .model(group("b", &["b"]))
            .build()
            .unwrap()
    };
    apply(&mut state, make(8, 1), now);
    state.handle_config_ack(id, ack(8, 7, &[]), now);
    effects(&mut state);
    apply(&mut state, make(9, 2), now);
    let pushed = pushed(&effects(&mut state), id);
    let capacity = state.snapshot(now).provider(&ProviderId::new("b").unwrap()).unwrap().effective.capacity;
    assert!(capacity == 2 || !pushed.is_empty(), "{capacity} {pushed:?}");
}

#[test]
fn who_waits_moves_with_its_model() {
    // CFG-2, QUE-3
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n1", now);
    connect(&mut state, "n2", now);
    grant(state.submit(ask("only-a", 1), now));
    let waits = queued(state.submit(ask("only-a", 4), now));
    effects(&mut state);
    // n1 goes, its model moves to c of n2, which is ready and free.
    let next = Catalog::builder()
        .revision(8)
        .node(node_entry("n2", &[("c", 1, 0)]))
        .model(group("only-a", &["c"]))
        .build()
        .unwrap();
    apply(&mut state, next, now);
    let after = effects(&mut state);
    assert_eq!((refusals(&after), granted(&after)), (vec![], vec![waits]));
}

#[test]
fn while_a_config_is_on_its_way_its_node_may_have_it_already() {
    // REG-7, I3; found by the simulator (seed 459775524961213796)
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    effects(&mut state);
    let make = |revision, places: Option<u32>| {
        let b = places.map(|places| ("b", places, 1));
        let providers: Vec<_> = [("a", 1, 0)].into_iter().chain(b).collect();
        let mut builder = Catalog::builder().revision(revision).node(node_entry("n1", &providers));
        if places.is_some() {
            builder = builder.model(group("b", &["b"]));
        }
        builder.build().unwrap()
    };
    let places = |state: &EdgeState| {
        let snapshot = state.snapshot(now);
        snapshot.provider(&ProviderId::new("b").unwrap()).unwrap().effective.capacity
    };
    apply(&mut state, make(8, Some(1)), now);
    apply(&mut state, make(9, Some(2)), now);
    assert_eq!(places(&state), 1, "it may have 8 by now");
    state.handle_config_ack(id, ack(8, 7, &[]), now);
    assert_eq!(places(&state), 2, "it has not");
    state.handle_config_ack(id, ack(9, 9, &["a", "b"]), now);

    apply(&mut state, make(10, None), now);
    apply(&mut state, make(11, Some(2)), now);
    assert_eq!(places(&state), 0, "it may have lost it");
    state.handle_config_ack(id, ack(10, 9, &[]), now);
    assert_eq!(places(&state), 2);
}
