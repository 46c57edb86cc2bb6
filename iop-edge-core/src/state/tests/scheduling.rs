//! Who is chosen, who waits for whom, and whose turn it is.

use iop_execution::Principal;

use super::*;
use crate::catalog::Strategy;
use crate::state::admission::STARVATION_GRANTS;
use crate::state::identity::RETURN_GRACE;

const SECOND: Duration = Duration::from_secs(1);

/// Nodes n1 with provider a and n2 with provider b, these places each; model `m` on both.
fn pair(places: u32, change: impl FnOnce(&mut ModelGroup)) -> EdgeState {
    let mut model = group("m", &["a", "b"]);
    model.max_waiting = 1000;
    change(&mut model);
    let nodes = [node_entry("n1", &[("a", places, 0)]), node_entry("n2", &[("b", places, 0)])];
    let [n1, n2] = nodes;
    new_state(Catalog::builder().revision(7).node(n1).node(n2).model(model).build().unwrap())
}

fn join(state: &mut EdgeState, node: &str, provider: &str, context: u64, now: Instant) -> ConnectionId {
    let id = registered(state, node, now);
    let mut request = ready(node, 7, &[]);
    let mut report = provider_ready(provider, &["t"]);
    report.targets[0].context_length = context;
    request.providers = vec![report];
    state.handle_ready(id, request, now);
    effects(state);
    id
}

fn chosen(state: &mut EdgeState, ask: Ask, now: Instant) -> Result<String, SubmitError> {
    match state.submit(ask, now)? {
        Admission::Granted(grant) => Ok(grant.provider.to_string()),
        Admission::Queued(..) => Ok("queued".to_owned()),
        Admission::Denied(denial) => Ok(format!("{denial:?}")),
    }
}

fn avoiding(provider: &str, fallback: bool, run: u8) -> Ask {
    Ask { avoid: Some(Avoid { provider: ProviderId::new(provider).unwrap(), fallback }), ..ask("m", run) }
}

fn by(caller: &str, run: u8) -> Ask {
    Ask { caller: Some(Principal::new(caller).unwrap()), ..ask("m", run) }
}

#[test]
fn the_avoided_provider_is_taken_only_when_there_is_no_other_and_the_request_allows_it() {
    // SEL-2, I12; field report 8
    let now = Instant::now();
    for fallback in [false, true] {
        let mut state = pair(1, |_| {});
        join(&mut state, "n1", "a", 0, now);
        let alone = chosen(&mut state, avoiding("a", fallback, 1), now);
        assert_eq!(alone, if fallback { Ok("a".into()) } else { Err(SubmitError::Unavailable) });

        let mut state = pair(1, |_| {});
        join(&mut state, "n1", "a", 0, now);
        let other = join(&mut state, "n2", "b", 0, now);
        assert_eq!(chosen(&mut state, avoiding("a", fallback, 1), now).unwrap(), "b");
        // A full alternate is still an alternate: the request waits for it, though the avoided one is idle.
        let waiter = queued(state.submit(avoiding("a", fallback, 2), now));
        assert_eq!(in_use(&state, "a").in_use(), 0);
        assert_eq!(chosen(&mut state, ask("m", 3), now).unwrap(), "a", "it is stored nowhere");
        effects(&mut state);
        // The alternate goes: it is resolved again.
        state.handle_closed(other, CloseCode::Closed, now);
        if fallback {
            assert!(refusals(&effects(&mut state)).is_empty());
            assert_eq!(state.waiting(), [waiter]);
        } else {
            assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Unavailable)]);
        }
    }
}

#[test]
fn avoidance_beats_prefix_affinity() {
    // SEL-1, SEL-2; field report 8
    let now = Instant::now();
    let mut state = pair(50, |model| model.strategy = Some(Strategy::PrefixAffinity));
    join(&mut state, "n1", "a", 0, now);
    join(&mut state, "n2", "b", 0, now);
    for prefix in 1..20 {
        let home = chosen(&mut state, Ask { prompt_prefix: prefix, ..ask("m", 1) }, now).unwrap();
        let other = if home == "a" { "b" } else { "a" };
        assert_eq!(chosen(&mut state, Ask { prompt_prefix: prefix, ..avoiding(&home, true, 2) }, now).unwrap(), other);
    }
}

#[test]
fn callers_have_prefixes_of_their_own() {
    // SEL-1: a caller can't steer, or learn of, another one's cache
    let now = Instant::now();
    let mut state = pair(400, |model| model.strategy = Some(Strategy::PrefixAffinity));
    join(&mut state, "n1", "a", 0, now);
    join(&mut state, "n2", "b", 0, now);
    let mut homes = BTreeSet::new();
    for caller in 0..16 {
        let first = Ask { prompt_prefix: 7, ..by(&format!("c{caller}"), 1) };
        let home = chosen(&mut state, first.clone(), now).unwrap();
        assert_eq!(chosen(&mut state, first, now).unwrap(), home, "and each keeps its own");
        homes.insert(home);
    }
    assert_eq!(homes.len(), 2);
}

#[test]
fn a_long_prompt_goes_only_where_it_fits_and_an_estimate_is_never_an_error() {
    // LEA-2, API-15; field report 67
    let now = Instant::now();
    let mut state = pair(2, |_| {});
    join(&mut state, "n1", "a", 64_000, now);
    let long = |run| Ask { prompt_tokens_estimate: 90_000, ..ask("m", run) };
    let big = join(&mut state, "n2", "b", 128_000, now);
    assert_eq!([1, 2].map(|run| chosen(&mut state, long(run), now).unwrap()), ["b", "b"]);
    let waiter = queued(state.submit(long(3), now));
    let short = chosen(&mut state, Ask { prompt_tokens_estimate: 50_000, ..ask("m", 4) }, now).unwrap();
    assert_eq!((short.as_str(), in_use(&state, "a").in_use()), ("a", 1), "it waits, and holds up nobody who fits");
    effects(&mut state);
    state.handle_closed(big, CloseCode::Closed, now);
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Unavailable)], "never to the small one");

    // Where it exceeds every context there is, the provider decides: the estimate may be wrong.
    let mut state = pair(2, |_| {});
    join(&mut state, "n1", "a", 64_000, now);
    join(&mut state, "n2", "b", 80_000, now);
    assert_eq!([1, 2].map(|run| chosen(&mut state, long(run), now).unwrap()), ["b", "b"], "the largest one");
    // And one whose context is not known may always be tried.
    let mut state = pair(2, |_| {});
    join(&mut state, "n1", "a", 0, now);
    join(&mut state, "n2", "b", 64_000, now);
    assert_eq!([1, 2].map(|run| chosen(&mut state, long(run), now).unwrap()), ["a", "a"]);
}

#[test]
fn waiters_follow_what_providers_offer() {
    // QUE-3, LEA-2
    let now = Instant::now();
    let mut state = pair(1, |_| {});
    let small = join(&mut state, "n1", "a", 4096, now);
    join(&mut state, "n2", "b", 128_000, now);
    grant(state.submit(avoiding("a", true, 1), now));
    let long = queued(state.submit(Ask { prompt_tokens_estimate: 10_000, ..ask("m", 2) }, now));
    effects(&mut state);
    // The same Node now serves it with more context: the waiter fits and goes.
    let mut report = provider_ready("a", &["t"]);
    report.targets[0].context_length = 32_000;
    let ack =
        iop_wire::ConfigAck { seen_revision: 7, applied_revision: 7, providers: vec![report], ..Default::default() };
    state.handle_config_ack(small, ack, now);
    assert_eq!(granted(&effects(&mut state)), [long]);
}

#[test]
fn a_busy_provider_is_left_alone_for_its_time_and_then_pumped() {
    // SEL-4; field reports 60, 61
    let now = Instant::now();
    let mut state = pair(4, |_| {});
    let id = join(&mut state, "n1", "a", 0, now);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("m", 1), now));
    state.dispatch(run.attempt, now).unwrap();
    state.handle_answer(run.attempt, generation, Verdict::Busy { retry_after: Some(5 * SECOND) }, now);
    assert_eq!(state.snapshot(now).provider(&run.provider).unwrap().cooling, Some(5 * SECOND));
    let waiter = queued(state.submit(ask("m", 2), now));
    assert_eq!(in_use(&state, "a").in_use(), 1, "three places are free, and it waits");
    effects(&mut state);
    state.handle_timeout(now + 4 * SECOND);
    assert!(granted(&effects(&mut state)).is_empty());
    state.handle_timeout(now + 5 * SECOND);
    assert_eq!(granted(&effects(&mut state)), [waiter]);

    // For longer than a request may wait there is no point in waiting for the only one.
    let mut state = pair(4, |_| {});
    let id = join(&mut state, "n1", "a", 0, now);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("m", 1), now));
    state.dispatch(run.attempt, now).unwrap();
    state.handle_answer(run.attempt, generation, Verdict::Busy { retry_after: Some(20 * SECOND) }, now);
    let waiter = queued(state.submit(ask("m", 2), now));
    effects(&mut state);
    state.handle_answer(run.attempt, generation, Verdict::Busy { retry_after: Some(31 * SECOND) }, now);
    assert_eq!(granted(&effects(&mut state)), [waiter], "whoever waits already goes, too");
    assert_eq!(chosen(&mut state, ask("m", 3), now).unwrap(), "a");
    queued(state.submit(ask("m", 4), now + SECOND));
    join(&mut state, "n2", "b", 0, now);
    assert_eq!(chosen(&mut state, ask("m", 5), now).unwrap(), "b", "with another one it is left alone");

    // With another provider nobody waits at all.
    let mut state = pair(4, |_| {});
    let id = join(&mut state, "n1", "a", 0, now);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("m", 1), now));
    state.dispatch(run.attempt, now).unwrap();
    join(&mut state, "n2", "b", 0, now);
    state.handle_terminal(run.attempt, generation, Verdict::Busy { retry_after: None }, now);
    assert_eq!([2, 3, 4].map(|run| chosen(&mut state, ask("m", run), now).unwrap()), ["b", "b", "b"]);
}

#[test]
fn a_provider_that_fails_fast_is_no_magnet() {
    // SEL-4; field report 59: less than 5 % after 10 tries
    let now = Instant::now();
    let mut state = pair(8, |_| {});
    let ids = [join(&mut state, "n1", "a", 0, now), join(&mut state, "n2", "b", 0, now)];
    let (mut failed, mut time) = (0, now);
    for run in 0..200 {
        time += Duration::from_millis(20);
        let grant = grant(state.submit(ask("m", run), time));
        state.dispatch(grant.attempt, time).unwrap();
        let ill = grant.provider.as_str() == "a";
        failed += u32::from(ill && run >= 10);
        let generation = state.generation(ids[usize::from(!ill)]).unwrap();
        let verdict = if ill { Verdict::Fault } else { Verdict::Good };
        state.handle_terminal(grant.attempt, generation, verdict, time);
        effects(&mut state);
    }
    assert!(failed <= 9, "{failed} of 190");
}

#[test]
fn the_requests_own_fault_changes_nothing_of_its_provider() {
    // SEL-4; field report 58
    let now = Instant::now();
    let mut state = pair(8, |_| {});
    let id = join(&mut state, "n1", "a", 0, now);
    let generation = state.generation(id).unwrap();
    for run in 0..5 {
        let grant = grant(state.submit(ask("m", run), now));
        state.dispatch(grant.attempt, now).unwrap();
        state.handle_answer(grant.attempt, generation, Verdict::Neutral, now);
        state.handle_terminal(grant.attempt, generation, Verdict::Neutral, now);
    }
    let provider = state.snapshot(now).provider(&ProviderId::new("a").unwrap()).unwrap().clone();
    assert_eq!((provider.penalty, provider.cooling), (0, None));
}

#[test]
fn new_work_prefers_nodes_that_are_no_suspects() {
    // FEN-7
    let now = Instant::now();
    let mut state = pair(1, |_| {});
    let frozen = join(&mut state, "n1", "a", 0, now);
    let fine = join(&mut state, "n2", "b", 0, now);
    state.set_suspect(frozen, true, now);
    assert!(state.snapshot(now).nodes[0].suspect && state.snapshot(now).nodes[0].connected, "no fence");
    let first = grant(state.submit(ask("m", 1), now));
    assert_eq!(first.provider.as_str(), "b");
    let waiter = queued(state.submit(ask("m", 2), now));
    effects(&mut state);
    // Heard of again: it takes work at once.
    state.set_suspect(frozen, false, now);
    assert_eq!(granted(&effects(&mut state)), [waiter]);
    state.abandon(waiter, now);
    // When it is the only one left, it is better than none.
    state.set_suspect(frozen, true, now);
    state.handle_closed(fine, CloseCode::Closed, now);
    assert_eq!(chosen(&mut state, ask("m", 3), now).unwrap(), "a");
}

#[test]
fn a_greedy_caller_does_not_hold_up_another_one() {
    // QUE-1
    let now = Instant::now();
    let mut state = pair(1, |_| {});
    let id = join(&mut state, "n1", "a", 0, now);
    let generation = state.generation(id).unwrap();
    let mut running = grant(state.submit(by("greedy", 0), now)).attempt;
    let greedy: Vec<_> = (1..=50).map(|run| queued(state.submit(by("greedy", run), now))).collect();
    let modest: Vec<_> = (51..=55).map(|run| queued(state.submit(by("modest", run), now))).collect();
    let mut order = Vec::new();
    while !state.waiting().is_empty() {
        state.dispatch(running, now).unwrap();
        state.handle_terminal(running, generation, Verdict::Good, now);
        running = granted(&effects(&mut state))[0];
        order.push(running);
    }
    let place = |attempt: &AttemptId| order.iter().position(|served| served == attempt).unwrap();
    let last = modest.iter().map(place).max().unwrap();
    assert!(last <= 11, "five requests among fifty older ones are served within twelve: {last}");
    assert!(greedy.iter().map(place).is_sorted(), "each caller's own in order");
    assert!(modest.iter().map(place).is_sorted());
}

#[test]
fn nobody_starves_under_a_flood_of_higher_priority() {
    // QUE-1: the bound is STARVATION_GRANTS per request that came before
    let now = Instant::now();
    let mut state = pair(1, |model| model.queue_timeout = Duration::from_secs(3600));
    let id = join(&mut state, "n1", "a", 0, now);
    let generation = state.generation(id).unwrap();
    let mut running = grant(state.submit(ask("m", 0), now)).attempt;
    let low: Vec<_> = (1..=3).map(|run| queued(state.submit(Ask { priority: -5, ..ask("m", run) }, now))).collect();
    let mut served = Vec::new();
    for _ in 0..60 {
        while state.waiting().len() < 10 {
            queued(state.submit(Ask { priority: 5, ..ask("m", 9) }, now));
        }
        state.dispatch(running, now).unwrap();
        state.handle_terminal(running, generation, Verdict::Good, now);
        running = granted(&effects(&mut state))[0];
        served.push(running);
    }
    let bound = usize::try_from(STARVATION_GRANTS).unwrap() + 1;
    for (before, low) in low.iter().enumerate() {
        let at = served.iter().position(|attempt| attempt == low).expect("it is served");
        assert!(at < bound * (before + 1), "{at}");
    }
    assert!(served.iter().filter(|attempt| !low.contains(attempt)).count() >= 50, "and priority still counts");
}

#[test]
fn a_full_queue_says_when_to_come_back_by_what_requests_take() {
    // QUE-2
    let start = Instant::now();
    let mut state = pair(2, |model| model.max_waiting = 3);
    let id = join(&mut state, "n1", "a", 0, start);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("m", 0), start)).attempt;
    state.dispatch(run, start).unwrap();
    let now = start + 10 * SECOND;
    state.handle_terminal(run, generation, Verdict::Good, now);
    for run in 1..=5 {
        state.submit(ask("m", run), now).unwrap();
    }
    // Three wait before it and two places serve them, each request taking 10 s: 4 * 10 / 2.
    assert_eq!(state.submit(ask("m", 6), now), Err(SubmitError::QueueFull { retry_after: 20 * SECOND }));
}

#[test]
fn after_a_pause_of_the_edge_a_wait_that_is_over_gets_no_place() {
    // QUE-2, I11: the cooling ended first, but nobody looked until both were over (found by the simulator)
    let now = Instant::now();
    let mut state = pair(4, |_| {});
    let id = join(&mut state, "n1", "a", 0, now);
    let generation = state.generation(id).unwrap();
    let run = grant(state.submit(ask("m", 1), now));
    state.dispatch(run.attempt, now).unwrap();
    state.handle_answer(run.attempt, generation, Verdict::Busy { retry_after: Some(5 * SECOND) }, now);
    let waiter = queued(state.submit(ask("m", 2), now));
    effects(&mut state);
    state.handle_timeout(now + 31 * SECOND);
    let after = effects(&mut state);
    assert_eq!((refusals(&after), granted(&after)), (vec![(waiter, SubmitError::QueueTimeout)], vec![]));
}

#[test]
fn a_waiter_may_outlast_an_absence_if_its_model_allows_it() {
    // FEN-3; field reports 65, 74
    let start = Instant::now();
    let at = |seconds| start + seconds * SECOND;
    let mut state = pair(1, |model| model.absence_grace = 20 * SECOND);
    let early = queued(state.submit(ask("m", 1), start));
    join(&mut state, "n1", "a", 0, at(19));
    state.handle_timeout(at(20));
    assert!(refusals(&effects(&mut state)).is_empty(), "it came in time");
    assert!(!state.waiting().contains(&early));

    let mut state = pair(1, |model| model.absence_grace = 20 * SECOND);
    let id = join(&mut state, "n1", "a", 0, start);
    grant(state.submit(ask("m", 1), start));
    let waiter = queued(state.submit(ask("m", 2), start));
    state.handle_closed(id, CloseCode::Closed, at(1));
    assert!(refusals(&effects(&mut state)).is_empty());
    // Back, though full, and gone again: the grace counts from then.
    let id = join(&mut state, "n1", "a", 0, at(5));
    assert!(!state.waiting().contains(&waiter), "served at once after the return");
    let waiter = queued(state.submit(ask("m", 3), at(6)));
    state.handle_closed(id, CloseCode::Closed, at(8));
    effects(&mut state);
    state.handle_timeout(at(27));
    assert!(refusals(&effects(&mut state)).is_empty());
    state.handle_timeout(at(28));
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Unavailable)]);
    assert_eq!(state.timers.len(), 0);
}

#[test]
fn who_makes_its_connection_anew_is_waited_for() {
    // FEN-3, CRD-10: whatever the model says of absences
    let start = Instant::now();
    let at = |seconds| start + seconds * SECOND;
    let until = 60 + RETURN_GRACE.as_secs() as u32;
    let begin = |returns_in| {
        let mut state = pair(1, |model| model.queue_timeout = 500 * SECOND);
        let id = join(&mut state, "n1", "a", 0, start);
        let generation = state.generation(id).unwrap();
        let run = grant(state.submit(ask("m", 1), start)).attempt;
        state.dispatch(run, start).unwrap();
        let waiter = queued(state.submit(ask("m", 2), start));
        state.handle_drain(id, returns_in, at(1));
        (state, id, generation, run, waiter)
    };
    let (mut state, ..) = begin(None);
    assert_eq!(state.submit(ask("m", 3), at(2)), Err(SubmitError::Unavailable), "nobody said that it comes back");

    let (mut state, id, generation, run, waiter) = begin(Some(59 * SECOND));
    let later = queued(state.submit(ask("m", 3), at(2)));
    state.handle_terminal(run, generation, Verdict::Good, at(30));
    state.handle_closed(id, CloseCode::Restart, at(30));
    assert!(refusals(&effects(&mut state)).is_empty());
    join(&mut state, "n1", "a", 0, at(31));
    assert!(!state.waiting().contains(&waiter), "served after the return");
    state.handle_timeout(at(until));
    assert!(refusals(&effects(&mut state)).is_empty() && state.waiting().contains(&later), "it is there: it is full");

    let (mut state, _, generation, run, waiter) = begin(Some(59 * SECOND));
    state.handle_terminal(run, generation, Verdict::Good, at(30));
    state.handle_timeout(at(until - 1));
    assert!(refusals(&effects(&mut state)).is_empty());
    state.handle_timeout(at(until));
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Unavailable)], "it did not come");

    // It changes its mind: a shutdown is one. An end of another kind is none, and nobody waits for long.
    for (code, last) in
        [(None, 2), (Some(CloseCode::Drained), 2), (Some(CloseCode::Closed), 2 + RETURN_GRACE.as_secs() as u32)]
    {
        let (mut state, id, _, _, waiter) = begin(Some(59 * SECOND));
        match code {
            None => state.handle_drain(id, None, at(2)),
            Some(code) => state.handle_closed(id, code, at(2)),
        }
        state.handle_timeout(at(last) - Duration::from_millis(1));
        let early = refusals(&effects(&mut state));
        state.handle_timeout(at(last));
        let refused = [early, refusals(&effects(&mut state))].concat();
        assert_eq!(refused, [(waiter, SubmitError::Unavailable)], "{code:?}");
        assert_eq!(state.submit(ask("m", 4), at(last)), Err(SubmitError::Unavailable));
    }
    // It ends later than it said.
    let (mut state, id, generation, run, waiter) = begin(Some(10 * SECOND));
    state.handle_terminal(run, generation, Verdict::Good, at(20));
    state.handle_closed(id, CloseCode::Restart, at(20));
    state.handle_timeout(at(29));
    assert!(refusals(&effects(&mut state)).is_empty(), "10 s from its end");
    state.handle_timeout(at(30));
    assert_eq!(refusals(&effects(&mut state)), [(waiter, SubmitError::Unavailable)]);
    // A config that comes meanwhile changes nothing of that.
    let (mut state, ..) = begin(Some(59 * SECOND));
    let mut model = group("m", &["a", "b"]);
    model.queue_timeout = 500 * SECOND;
    let nodes = [node_entry("n1", &[("a", 1, 0)]), node_entry("n2", &[("b", 2, 0)])];
    let [n1, n2] = nodes;
    let catalog = Catalog::builder().revision(8).node(n1).node(n2).model(model).build().unwrap();
    state.apply_config(Arc::new(catalog), at(2)).unwrap();
    assert!(refusals(&effects(&mut state)).is_empty());
    queued(state.submit(ask("m", 4), at(3)));
    // An operator took it out of service: that it comes back is no help.
    let (mut state, ..) = begin(Some(59 * SECOND));
    state.set_in_service(&NodeId::new("n1").unwrap(), false, at(2)).unwrap();
    assert_eq!(state.submit(ask("m", 4), at(3)), Err(SubmitError::Unavailable));

    // By the code of its end alone.
    for (code, waits) in [
        (CloseCode::Restart, true),
        (CloseCode::IdentityRevoked, true),
        (CloseCode::Drained, false),
        (CloseCode::Closed, false),
    ] {
        let mut state = pair(1, |_| {});
        let id = join(&mut state, "n1", "a", 0, start);
        state.handle_closed(id, code, at(1));
        assert_eq!(state.submit(ask("m", 1), at(1)).is_ok(), waits, "{code}");
        state.handle_timeout(at(1) + RETURN_GRACE);
        assert_eq!(state.submit(ask("m", 2), at(1) + RETURN_GRACE), Err(SubmitError::Unavailable));
        assert_eq!(state.timers.len(), 0);
    }
}

#[test]
fn a_direct_address_takes_the_same_lease_and_no_queue() {
    // EDG-1
    let now = Instant::now();
    let direct = |node: Option<&str>, adapter: &str, run: u8| Ask {
        destination: Destination::Direct {
            node: node.map(|node| NodeId::new(node).unwrap()),
            adapter: AdapterKey::new(adapter).unwrap(),
            target: Target::new("t").unwrap(),
        },
        ..ask("m", run)
    };
    let mut state = pair(1, |_| {});
    assert_eq!(state.submit(direct(None, "a", 1), now), Err(SubmitError::Unavailable));
    let id = join(&mut state, "n1", "a", 0, now);
    let run = grant(state.submit(direct(None, "a", 1), now));
    assert_eq!((run.node.as_str(), run.provider.as_str(), run.target.as_str()), ("n1", "a", "t"));
    assert_eq!(in_use(&state, "a").normal, 1);
    assert!(matches!(state.submit(direct(None, "a", 2), now), Err(SubmitError::QueueFull { .. })));
    let waiter = queued(state.submit(ask("m", 3), now));
    state.dispatch(run.attempt, now).unwrap();
    state.handle_terminal(run.attempt, state.generation(id).unwrap(), Verdict::Good, now);
    assert_eq!(granted(&effects(&mut state)), [waiter], "one pool with the models");
    join(&mut state, "n2", "b", 0, now);
    assert_eq!(state.submit(direct(None, "b", 4), now), Err(SubmitError::NodeRequired));
    assert_eq!(grant(state.submit(direct(Some("n2"), "b", 4), now)).provider.as_str(), "b");
    for (node, adapter) in [("n3", "b"), ("n2", "a")] {
        let refused = state.submit(direct(Some(node), adapter, 5), now);
        assert!(matches!(refused, Err(SubmitError::InvalidRequest(_))), "{refused:?}");
    }
    state.set_in_service(&NodeId::new("n2").unwrap(), false, now).unwrap();
    assert_eq!(state.submit(direct(Some("n2"), "b", 6), now), Err(SubmitError::Unavailable));
}

#[test]
fn traffic_of_another_model_does_not_reset_the_bound() {
    // QUE-1
    let now = Instant::now();
    let nodes = [node_entry("n1", &[("a", 1, 0)]), node_entry("n2", &[("b", 1, 0)])];
    let [n1, n2] = nodes;
    let mut ma = group("ma", &["a"]);
    let mut mb = group("mb", &["b"]);
    for m in [&mut ma, &mut mb] {
        m.max_waiting = 1000;
        m.queue_timeout = Duration::from_secs(36000);
    }
    let mut state = new_state(Catalog::builder().revision(7).node(n1).node(n2).model(ma).model(mb).build().unwrap());
    let a = join(&mut state, "n1", "a", 0, now);
    let b = join(&mut state, "n2", "b", 0, now);
    let (ga, gb) = (state.generation(a).unwrap(), state.generation(b).unwrap());
    let mut ra = grant(state.submit(ask("ma", 0), now)).attempt;
    let mut rb = grant(state.submit(ask("mb", 1), now)).attempt;
    let low = queued(state.submit(Ask { priority: -5, ..ask("ma", 2) }, now));
    queued(state.submit(Ask { priority: 5, ..ask("ma", 9) }, now));
    queued(state.submit(Ask { priority: 5, ..ask("ma", 9) }, now));
    for round in 0..500 {
        queued(state.submit(Ask { priority: 5, ..ask("ma", 9) }, now));
        queued(state.submit(ask("mb", 8), now));
        state.dispatch(ra, now).unwrap();
        state.handle_terminal(ra, ga, Verdict::Good, now);
        ra = granted(&effects(&mut state))[0];
        if ra == low {
            assert!(round < 20);
            return;
        }
        state.dispatch(rb, now).unwrap();
        state.handle_terminal(rb, gb, Verdict::Good, now);
        rb = granted(&effects(&mut state))[0];
    }
    panic!("500 places of its own model went to others");
}
