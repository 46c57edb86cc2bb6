use iop_execution::ProviderId;

use super::*;
use crate::api::WireKind;

/// Everything that can end a place, once the attempt has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Fence,
    Terminal,
    Cancel,
    Drop,
    Withdraw,
    Grace,
}

const ENDS: [End; 6] = [End::Fence, End::Terminal, End::Cancel, End::Drop, End::Withdraw, End::Grace];

fn permutations(rest: &[End]) -> Vec<Vec<End>> {
    if rest.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (at, first) in rest.iter().enumerate() {
        let others: Vec<_> = rest.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, end)| *end).collect();
        all.extend(permutations(&others).into_iter().map(|mut tail| {
            tail.insert(0, *first);
            tail
        }));
    }
    all
}

#[test]
fn in_every_order_of_ends_a_place_is_released_exactly_once() {
    // LEA-4, LEA-6, LEA-7, FEN-2
    for order in permutations(&ENDS) {
        for dispatched in [false, true] {
            let mut now = Instant::now();
            let mut state = new_state(catalog());
            let id = connect(&mut state, "n1", now);
            let generation = state.generation(id).unwrap();
            let attempt = grant(state.submit(ask("only-a", 1), now)).attempt;
            if dispatched {
                assert_eq!(state.dispatch(attempt, now), Ok(id));
            }
            effects(&mut state);
            let mut all = Vec::new();
            for end in &order {
                let held_before = in_use(&state, "a").in_use();
                match end {
                    End::Fence => state.handle_closed(id, CloseCode::Closed, now),
                    End::Terminal => {
                        state.handle_terminal(attempt, generation, Verdict::Good, now);
                    }
                    End::Cancel => {
                        let reached = state.cancel(attempt, now);
                        let holds = reached == CancelReached::Dispatched;
                        assert!(!holds || in_use(&state, "a").in_use() == 1, "a cancel keeps the place: {order:?}");
                    }
                    End::Drop => state.abandon(attempt, now),
                    End::Withdraw => {
                        state.handle_withdrawn(attempt, now);
                    }
                    End::Grace => {
                        now += CANCEL_GRACE;
                        state.handle_timeout(now);
                        assert_eq!(in_use(&state, "a").in_use(), held_before, "time frees nothing");
                    }
                }
                all.extend(effects(&mut state));
            }
            assert_eq!(releases(&all).len(), 1, "{order:?} dispatched={dispatched}");
            assert_eq!(in_use(&state, "a"), PlaceCounters::default());
            assert!(state.attempts.is_empty() && state.runs.is_empty(), "{order:?}");
            assert_eq!(state.timers.len(), 0, "{order:?}");
        }
    }
}

#[test]
fn two_models_on_one_provider_draw_on_one_pool() {
    // LEA-1
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let generation = state.generation(id).unwrap();
    let first = grant(state.submit(ask("any", 1), now));
    let second = queued(state.submit(ask("only-a", 2), now));
    assert_eq!(in_use(&state, "a"), PlaceCounters { normal: 1, long: 0, quarantined: 0 });
    state.dispatch(first.attempt, now).unwrap();
    effects(&mut state);
    assert!(state.handle_terminal(first.attempt, generation, Verdict::Good, now));
    assert_eq!(granted(&effects(&mut state)), [second]);
    state.dispatch(second, now).unwrap();
    assert!(state.handle_terminal(second, generation, Verdict::Good, now));
    assert_eq!(in_use(&state, "a"), PlaceCounters::default());
    assert!(state.snapshot(now).is_at_rest());
}

#[test]
fn a_cancelled_run_keeps_its_place_and_is_quarantined_until_the_late_terminal() {
    // LEA-6
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(run, now).unwrap();
    let waiter = queued(state.submit(ask("only-a", 2), now));
    assert_eq!(state.cancel(run, now), CancelReached::Dispatched);
    assert_eq!(state.cancel(run, now), CancelReached::Nothing);
    state.handle_timeout(now + Duration::from_millis(14_999));
    assert_eq!(in_use(&state, "a"), PlaceCounters { normal: 1, long: 0, quarantined: 0 });
    effects(&mut state);
    let later = now + CANCEL_GRACE;
    state.handle_timeout(later);
    assert_eq!(in_use(&state, "a"), PlaceCounters { normal: 1, long: 0, quarantined: 1 });
    let provider = ProviderId::new("a").unwrap();
    let told = [Effect::Observe(Observation::Quarantined { provider }), Effect::Quarantined { attempt: run }];
    assert_eq!(effects(&mut state), told);
    assert!(state.handle_terminal(run, generation, Verdict::Good, later));
    assert_eq!(granted(&effects(&mut state)), [waiter]);
    assert_eq!(in_use(&state, "a").quarantined, 0);
}

#[test]
fn a_fence_takes_leases_waiters_and_providers_of_exactly_one_generation() {
    // FEN-2, FEN-3
    let now = Instant::now();
    let mut state = new_state(catalog());
    let first = connect(&mut state, "n1", now);
    let second = connect(&mut state, "n2", now);
    let sent = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(sent, now).unwrap();
    let other = grant(state.submit(ask("any", 2), now)).attempt;
    let stays = queued(state.submit(ask("any", 3), now));
    let hopeless = queued(state.submit(ask("only-a", 4), now));
    let reserved = grant(state.submit(ask("long", 5), now)).attempt;
    effects(&mut state);

    state.handle_closed(first, CloseCode::HeartbeatTimeout, now);
    let after = effects(&mut state);
    assert_eq!(releases(&after), [ReleaseCause::Fenced; 2]);
    assert!(after.contains(&Effect::Disconnected { attempt: sent }));
    assert_eq!(refusals(&after), [(hopeless, SubmitError::Unavailable)]);
    assert_eq!(state.dispatch(reserved, now), Err(PreSendEnd::Disconnected));
    assert_eq!(state.submit(ask("only-a", 6), now), Err(SubmitError::Unavailable));
    assert_eq!(in_use(&state, "c").normal, 1, "the other node is untouched");
    state.handle_closed(first, CloseCode::Closed, now);
    assert!(effects(&mut state).is_empty(), "a second end finds nothing");

    state.dispatch(other, now).unwrap();
    assert!(state.handle_terminal(other, state.generation(second).unwrap(), Verdict::Good, now));
    assert_eq!(granted(&effects(&mut state)), [stays]);
}

#[test]
fn reconnecting_restores_all_capacity_and_wakes_waiters() {
    // FEN-5; field report 76: the connection is all it takes, there is no store that could hiccup
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n2", now);
    grant(state.submit(ask("any", 1), now));
    let waiter = queued(state.submit(ask("any", 2), now));
    for _ in 0..3 {
        let id = connect(&mut state, "n1", now);
        let after = effects(&mut state);
        let mine = granted(&after);
        if !mine.is_empty() {
            assert_eq!(mine, [waiter]);
            state.abandon(waiter, now);
        }
        let run = grant(state.submit(ask("only-a", 3), now)).attempt;
        state.dispatch(run, now).unwrap();
        state.handle_closed(id, CloseCode::Closed, now);
        assert_eq!(in_use(&state, "a"), PlaceCounters::default());
        effects(&mut state);
    }
    let id = ProviderId::new("a").unwrap();
    assert_eq!(state.snapshot(now).provider(&id).unwrap().effective, PlaceLimits::default());
    connect(&mut state, "n1", now);
    assert_eq!(state.snapshot(now).provider(&id).unwrap().effective.capacity, 1);
}

#[test]
fn a_late_terminal_of_an_old_generation_changes_nothing() {
    // FEN-1, FEN-4
    let now = Instant::now();
    let mut state = new_state(catalog());
    let old = connect(&mut state, "n1", now);
    let old_generation = state.generation(old).unwrap();
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(run, now).unwrap();
    state.handle_closed(old, CloseCode::Closed, now);
    connect(&mut state, "n1", now);
    let newer = grant(state.submit(ask("only-a", 2), now)).attempt;
    state.dispatch(newer, now).unwrap();
    effects(&mut state);
    for attempt in [run, newer] {
        assert!(!state.handle_terminal(attempt, old_generation, Verdict::Good, now));
    }
    assert!(effects(&mut state).is_empty());
    assert_eq!(in_use(&state, "a").normal, 1);
}

#[test]
fn the_pre_send_fence_sends_nothing_to_a_generation_that_is_gone_or_draining() {
    // FEN-8
    let now = Instant::now();
    for reconnect in [false, true] {
        let mut state = new_state(catalog());
        let id = connect(&mut state, "n1", now);
        let run = grant(state.submit(ask("only-a", 1), now)).attempt;
        state.handle_closed(id, CloseCode::Closed, now);
        if reconnect {
            connect(&mut state, "n1", now);
        }
        assert_eq!(state.dispatch(run, now), Err(PreSendEnd::Disconnected));
        assert_eq!(in_use(&state, "a").normal, 0);
    }
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.handle_drain(id, None, now);
    effects(&mut state);
    assert_eq!(state.dispatch(run, now), Err(PreSendEnd::Disconnected));
    assert_eq!(releases(&effects(&mut state)), [ReleaseCause::SendFailed]);
    assert!(state.attempts.is_empty());
}

#[test]
fn a_draining_node_finishes_and_gets_nothing_new() {
    // WIR-13, FEN-3
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(run, now).unwrap();
    let waiter = queued(state.submit(ask("only-a", 2), now));
    effects(&mut state);
    state.handle_drain(id, None, now);
    let after = effects(&mut state);
    assert_eq!(refusals(&after), [(waiter, SubmitError::Unavailable)]);
    assert!(after.iter().any(|effect| matches!(effect, Effect::Publish(EdgeNodeEvent::Draining { .. }))));
    assert_eq!(state.submit(ask("only-a", 3), now), Err(SubmitError::Unavailable));
    assert!(state.handle_terminal(run, generation, Verdict::Good, now));
}

#[test]
fn the_queue_is_bounded_timed_and_ordered() {
    // QUE-1, QUE-2
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut state = new_state(catalog());
    connect(&mut state, "n1", start);
    let holder = grant(state.submit(ask("only-a", 1), start)).attempt;
    let first = queued(state.submit(ask("only-a", 2), start));
    let second = queued(state.submit(ask("only-a", 3), at(1)));
    let urgent = queued(state.submit(Ask { priority: 1, ..ask("only-a", 4) }, at(2)));
    let full = state.submit(ask("only-a", 5), at(7));
    assert_eq!(full, Err(SubmitError::QueueFull { retry_after: Duration::from_secs(4) }));
    assert!(state.attempt(RunId::from_bytes([5; 16])).is_none(), "a refused one leaves nothing");
    let other = queued(state.submit(ask("any", 6), at(7)));
    effects(&mut state);

    state.abandon(holder, at(8));
    assert_eq!(granted(&effects(&mut state)), [urgent]);
    state.abandon(urgent, at(9));
    assert_eq!(granted(&effects(&mut state)), [first]);
    state.handle_timeout(at(31));
    assert_eq!(refusals(&effects(&mut state)), [(second, SubmitError::QueueTimeout)]);
    state.abandon(first, at(32));
    assert_eq!(granted(&effects(&mut state)), [other], "the line of another model moves, too");
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    // API-14, EDG-1
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut state = new_state(catalog());
    connect(&mut state, "n1", start);
    assert_eq!(state.submit(Ask { deadline: Some(start), ..ask("any", 9) }, start), Err(SubmitError::DeadlineExceeded));
    let timed = |model, run, seconds| Ask { deadline: Some(at(seconds)), ..ask(model, run) };
    let sent = grant(state.submit(timed("only-a", 1, 5), start)).attempt;
    state.dispatch(sent, start).unwrap();
    let waiter = queued(state.submit(timed("only-a", 2, 6), start));
    let reserved = grant(state.submit(timed("long", 3, 7), start)).attempt;
    effects(&mut state);
    state.handle_timeout(at(5));
    let receipt = Effect::CheckReceipt { attempt: sent, answered: false };
    assert_eq!(effects(&mut state), [receipt, Effect::Overdue { attempt: sent }]);
    state.handle_timeout(at(6));
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::DeadlineExceeded)]);
    state.handle_timeout(at(7));
    assert_eq!(releases(&effects(&mut state)), [ReleaseCause::Abandoned]);
    assert_eq!(state.dispatch(reserved, at(7)), Err(PreSendEnd::Deadline));
    assert_eq!(in_use(&state, "a").normal, 1, "the sent one keeps its place");
}

#[test]
fn a_cancel_reaches_one_request_in_every_stage() {
    // EDG-3
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n1", now);
    let sent = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(sent, now).unwrap();
    let waiter = queued(state.submit(ask("only-a", 2), now));
    let bystander = queued(state.submit(ask("only-a", 3), now));
    let reserved = grant(state.submit(ask("long", 4), now)).attempt;
    effects(&mut state);
    assert_eq!(state.attempt(RunId::from_bytes([2; 16])), Some(waiter));
    assert_eq!(state.cancel(waiter, now), CancelReached::Unsent);
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Cancelled)]);
    assert_eq!(state.cancel(reserved, now), CancelReached::Unsent);
    assert_eq!(state.dispatch(reserved, now), Err(PreSendEnd::Cancelled));
    assert_eq!(state.cancel(sent, now), CancelReached::Dispatched);
    assert!(granted(&effects(&mut state)).is_empty());
    assert_eq!(state.attempt(RunId::from_bytes([9; 16])), None);
    assert_eq!(state.waiting(), [bystander]);
}

#[test]
fn long_requests_wait_beside_short_ones_that_have_a_place() {
    // LEA-2, QUE-1
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n1", now);
    let long = |run| Ask { prompt_tokens_estimate: 100, ..ask("long", run) };
    let first = grant(state.submit(long(1), now));
    assert_eq!(first.class, WorkClass::Long);
    let second = queued(state.submit(long(2), now));
    let short = grant(state.submit(Ask { prompt_tokens_estimate: 99, ..ask("long", 3) }, now));
    assert_eq!(short.class, WorkClass::Normal);
    assert_eq!(in_use(&state, "b"), PlaceCounters { normal: 1, long: 1, quarantined: 0 });
    state.abandon(first.attempt, now);
    assert_eq!(granted(&effects(&mut state)), [second]);
}

#[test]
fn the_provider_decides_the_wire() {
    // SEL-3, EXE-2
    let now = Instant::now();
    for (mode, tunnels, runs, wanted, expected) in [
        (WireMode::Auto, true, true, None, Some(WireKind::Tunnel)),
        (WireMode::Auto, false, true, None, Some(WireKind::Run)),
        (WireMode::Run, true, true, None, Some(WireKind::Run)),
        (WireMode::Run, true, false, None, None),
        (WireMode::Auto, true, true, Some(WireKind::Run), Some(WireKind::Run)),
        (WireMode::Run, true, true, Some(WireKind::Tunnel), None),
        (WireMode::Auto, true, false, Some(WireKind::Run), None),
    ] {
        let mut node = node_entry("n1", &[("a", 1, 0)]);
        node.providers[0].config.wire = mode;
        let mut state = new_state(Catalog::builder().node(node).model(group("m", &["a"])).build().unwrap());
        let id = registered(&mut state, "n1", now);
        let mut request = ready("n1", 1, &["a"]);
        (request.providers[0].tunnels, request.providers[0].runs) = (tunnels, runs);
        state.handle_ready(id, request, now);
        let admission = state.submit(Ask { wanted: wanted.map(Wanted::Wire), ..ask("m", 1) }, now);
        match expected {
            Some(wire) => assert_eq!(grant(admission).wire, wire),
            None => assert_eq!(admission, Err(SubmitError::Unavailable)),
        }
    }
}

#[test]
fn messages_go_only_to_who_speaks_them() {
    // API-1, SEL-3
    let now = Instant::now();
    let mut state = new_state(
        Catalog::builder()
            .node(node_entry("n1", &[("a", 1, 0), ("b", 1, 0)]))
            .model(group("m", &["a", "b"]))
            .build()
            .unwrap(),
    );
    let id = registered(&mut state, "n1", now);
    let mut request = ready("n1", 1, &["a", "b"]);
    for (provider, messages) in request.providers.iter_mut().zip([false, true]) {
        (provider.tunnels, provider.messages) = (true, messages);
    }
    state.handle_ready(id, request, now);
    let ask = || Ask { wanted: Some(Wanted::Messages), ..ask("m", 1) };
    let granted = grant(state.submit(ask(), now));
    assert_eq!((granted.provider.as_str(), granted.wire), ("b", WireKind::Tunnel));
    assert!(matches!(state.submit(ask(), now), Ok(Admission::Queued(..))), "it waits for the one that does");
}

#[test]
fn capacity_is_the_smaller_of_config_and_report_and_16_without_both() {
    // LEA-8
    let now = Instant::now();
    for (config, long, reported, capacity, expected_long) in
        [(4, 0, 0, 4, 4), (4, 3, 2, 2, 2), (0, 0, 9, 9, 9), (0, 0, 0, 16, 16), (2, 1, 9, 2, 1)]
    {
        let catalog = Catalog::builder().node(node_entry("n1", &[("a", config, long)])).build().unwrap();
        let mut state = new_state(catalog);
        let id = registered(&mut state, "n1", now);
        let mut request = ready("n1", 1, &["a"]);
        request.providers[0].max_concurrency = reported;
        state.handle_ready(id, request, now);
        let snapshot = state.snapshot(now);
        let effective = snapshot.provider(&ProviderId::new("a").unwrap()).unwrap().effective;
        assert_eq!(effective, PlaceLimits { capacity, long: expected_long });
    }
}

#[test]
fn a_shutdown_answers_who_waits_refuses_new_and_lets_the_rest_finish() {
    // EDG-1
    let now = Instant::now();
    let mut state = new_state(catalog());
    let id = connect(&mut state, "n1", now);
    let run = grant(state.submit(ask("only-a", 1), now)).attempt;
    state.dispatch(run, now).unwrap();
    let waiter = queued(state.submit(ask("only-a", 2), now));
    effects(&mut state);
    state.begin_shutdown(Duration::from_secs(3), now);
    let after = effects(&mut state);
    assert_eq!(refusals(&after), [(waiter, SubmitError::ShuttingDown)]);
    let drain = ToNode::Drain(Drain { deadline_ms: 3000, returning: false });
    assert!(after.contains(&Effect::Send { connection: id, message: Box::new(drain) }));
    assert_eq!(state.submit(ask("only-a", 3), now), Err(SubmitError::ShuttingDown));
    assert_eq!((state.open_runs(), state.is_ready()), (1, false));
    assert!(state.handle_terminal(run, state.generation(id).unwrap(), Verdict::Good, now));
    assert_eq!(state.open_runs(), 0);
    state.close_all(CloseCode::Restart, || Duration::from_secs(2), now);
    let (code, retry_after) = (CloseCode::Restart, Duration::from_secs(2));
    assert!(effects(&mut state).contains(&Effect::Close { connection: id, code, retry_after }));
    assert!(state.registry.ids().is_empty());
}

#[test]
fn the_least_loaded_candidate_is_chosen_and_aliases_work() {
    // SEL-1, QUE-3
    let now = Instant::now();
    let mut any = group("any", &["b", "c"]);
    any.aliases = vec![ModelName::new("other-name").unwrap()];
    any.candidates[1].weight = 4;
    let nodes = [node_entry("n1", &[("a", 1, 0), ("b", 2, 0)]), node_entry("n2", &[("c", 4, 0)])];
    let [n1, n2] = nodes;
    let mut state = new_state(Catalog::builder().revision(7).node(n1).node(n2).model(any).build().unwrap());
    connect(&mut state, "n1", now);
    connect(&mut state, "n2", now);
    let chosen: Vec<_> =
        (0..6).map(|run| grant(state.submit(ask("other-name", run), now)).provider.as_str().to_owned()).collect();
    assert_eq!(chosen, ["b", "c", "c", "c", "c", "b"]);
    assert_eq!(state.submit(ask("nobody", 1), now), Err(SubmitError::UnknownModel));
}

#[test]
fn the_snapshot_shows_nodes_places_and_who_waits() {
    // EDG-4
    let now = Instant::now();
    let mut state = new_state(catalog());
    let before = state.snapshot(now);
    assert!(!before.nodes.is_empty() && before.nodes.iter().all(|node| !node.connected), "configured ones are shown");

    connect(&mut state, "n1", now);
    let id = ProviderId::new("a").unwrap();
    let capacity = state.snapshot(now).provider(&id).unwrap().effective.capacity;
    let mut run = 0;
    while let Ok(Admission::Granted(grant)) = state.submit(ask("only-a", run), now) {
        state.dispatch(grant.attempt, now).unwrap();
        run += 1;
    }
    let later = now + Duration::from_secs(3);
    let snapshot = state.snapshot(later);
    let provider = snapshot.provider(&id).unwrap();
    assert!(provider.connected && provider.enabled);
    assert_eq!((u32::from(run), provider.in_use.normal, provider.in_use.quarantined), (capacity, capacity, 0));
    let group = snapshot.models.iter().find(|group| group.model.as_str() == "only-a").unwrap();
    assert_eq!((group.waiting, group.oldest_wait), (1, Duration::from_secs(3)));
    assert!(!snapshot.is_at_rest());
}

#[test]
fn an_unknown_model_is_unknown_whatever_else_is_wrong() {
    // API-15
    let now = Instant::now();
    let mut state = new_state(catalog());
    connect(&mut state, "n1", now);
    let late = |model| Ask { deadline: Some(now), ..ask(model, 1) };
    assert_eq!(state.submit(late("only-a"), now), Err(SubmitError::DeadlineExceeded));
    assert_eq!(state.submit(late("invented"), now), Err(SubmitError::UnknownModel));
    state.begin_shutdown(Duration::ZERO, now);
    assert_eq!(state.submit(late("only-a"), now), Err(SubmitError::ShuttingDown));
    assert_eq!(state.submit(ask("invented", 1), now), Err(SubmitError::UnknownModel));
}
