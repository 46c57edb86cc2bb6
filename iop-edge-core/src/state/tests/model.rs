use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Op {
    Connect(bool),
    Close(bool),
    Drain(bool),
    Submit { model: u8, priority: i8, long: bool, deadline: bool },
    Dispatch(usize),
    Terminal(usize, bool),
    Withdraw(usize),
    Cancel(usize),
    Abandon(usize),
    Advance(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let pick = 0..64usize;
    prop_oneof![
        3 => any::<bool>().prop_map(Op::Connect),
        1 => any::<bool>().prop_map(Op::Close),
        1 => any::<bool>().prop_map(Op::Drain),
        8 => (0..3u8, -1..2i8, any::<bool>(), any::<bool>())
            .prop_map(|(model, priority, long, deadline)| Op::Submit { model, priority, long, deadline }),
        6 => pick.clone().prop_map(Op::Dispatch),
        4 => (pick.clone(), any::<bool>()).prop_map(|(at, late)| Op::Terminal(at, late)),
        1 => pick.clone().prop_map(Op::Withdraw),
        2 => pick.clone().prop_map(Op::Cancel),
        2 => pick.prop_map(Op::Abandon),
        3 => (0..20_000u64).prop_map(Op::Advance),
    ]
}

const MODELS: [&str; 3] = ["any", "only-a", "long"];
const NODES: [&str; 2] = ["n1", "n2"];

/// What the outside has seen of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Waiting,
    HasPlace,
    Refused,
}

struct World {
    state: EdgeState,
    now: Instant,
    connections: [Option<ConnectionId>; 2],
    attempts: Vec<AttemptId>,
    seen: BTreeMap<AttemptId, (Seen, Instant)>,
    disconnected: Vec<AttemptId>,
    placed: usize,
    released: usize,
}

impl World {
    fn new() -> Self {
        Self {
            state: new_state(catalog()),
            now: Instant::now(),
            connections: [None; 2],
            attempts: Vec::new(),
            seen: BTreeMap::new(),
            disconnected: Vec::new(),
            placed: 0,
            released: 0,
        }
    }

    fn apply(&mut self, op: Op) {
        let now = self.now;
        let pick = |at: usize, attempts: &[AttemptId]| attempts.get(at % attempts.len().max(1)).copied();
        match op {
            Op::Connect(second) => {
                let at = usize::from(second);
                if self.connections[at].is_none() {
                    self.connections[at] = Some(connect(&mut self.state, NODES[at], now));
                }
            }
            Op::Close(second) => {
                if let Some(id) = self.connections[usize::from(second)].take() {
                    let generation = self.state.generation(id).unwrap();
                    self.state.handle_closed(id, CloseCode::Closed, now);
                    assert!(self.state.ledger.held_by(generation).is_empty(), "I6: a fenced generation holds nothing");
                }
            }
            Op::Drain(second) => {
                if let Some(id) = self.connections[usize::from(second)] {
                    self.state.handle_drain(id, None, now);
                }
            }
            Op::Submit { model, priority, long, deadline } => {
                let mut run = [0; 16];
                run[..8].copy_from_slice(&(self.attempts.len() as u64).to_be_bytes());
                let ask = Ask {
                    run_id: RunId::from_bytes(run),
                    priority,
                    deadline: deadline.then(|| now + Duration::from_secs(8)),
                    prompt_tokens_estimate: if long { 100 } else { 0 },
                    ..ask(MODELS[usize::from(model)], 0)
                };
                match self.state.submit(ask, now) {
                    Ok(Admission::Granted(grant)) => {
                        self.placed += 1;
                        self.attempts.push(grant.attempt);
                        self.seen.insert(grant.attempt, (Seen::HasPlace, now));
                    }
                    Ok(Admission::Queued(attempt, _)) => {
                        self.attempts.push(attempt);
                        self.seen.insert(attempt, (Seen::Waiting, now));
                    }
                    Err(SubmitError::Unavailable | SubmitError::QueueFull { .. }) => {}
                    Ok(Admission::Denied(denial)) => panic!("{denial:?}"),
                    Err(other) => panic!("{other}"),
                }
            }
            Op::Dispatch(at) => {
                if let Some(attempt) = pick(at, &self.attempts)
                    && matches!(self.state.attempts.get(&attempt).map(|e| &e.stage), Some(Stage::Reserved))
                {
                    let _ = self.state.dispatch(attempt, now);
                }
            }
            Op::Terminal(at, late) => {
                if let Some(attempt) = pick(at, &self.attempts) {
                    let lease = self.state.ledger.lease(attempt).map(|lease| lease.generation);
                    let generation = lease.unwrap_or(Generation(1));
                    let judged = if late { Generation(generation.0 + 1) } else { generation };
                    let freed = self.state.handle_terminal(attempt, judged, Verdict::Good, now);
                    assert!(!freed || !late, "FEN-4");
                }
            }
            Op::Withdraw(at) => {
                if let Some(attempt) = pick(at, &self.attempts) {
                    self.state.handle_withdrawn(attempt, now);
                }
            }
            Op::Cancel(at) => {
                if let Some(attempt) = pick(at, &self.attempts) {
                    self.state.cancel(attempt, now);
                }
            }
            Op::Abandon(at) => {
                if let Some(attempt) = pick(at, &self.attempts) {
                    if self.seen.get(&attempt).is_some_and(|(seen, _)| *seen == Seen::Waiting)
                        && self.state.attempts.contains_key(&attempt)
                    {
                        self.seen.remove(&attempt);
                    }
                    self.state.abandon(attempt, now);
                }
            }
            Op::Advance(ms) => {
                self.now += Duration::from_millis(ms);
                self.state.handle_timeout(self.now);
            }
        }
        self.observe();
        self.check();
    }

    fn observe(&mut self) {
        for effect in effects(&mut self.state) {
            match effect {
                Effect::Granted(grant) => {
                    self.placed += 1;
                    let before = self.seen.insert(grant.attempt, (Seen::HasPlace, self.now));
                    assert!(matches!(before, Some((Seen::Waiting, _))), "I1: granted once, and only a waiter");
                }
                Effect::Refused { attempt, .. } => {
                    let before = self.seen.insert(attempt, (Seen::Refused, self.now));
                    assert!(matches!(before, Some((Seen::Waiting, _))), "I1: refused once, and only a waiter");
                }
                Effect::Disconnected { attempt } => {
                    assert!(!self.disconnected.contains(&attempt), "I1: one end per fence");
                    self.disconnected.push(attempt);
                }
                Effect::CheckReceipt { .. } | Effect::Quarantined { .. } | Effect::Commanded { .. } => {}
                Effect::Overdue { attempt } => {
                    assert_eq!(self.state.cancel(attempt, self.now), CancelReached::Dispatched);
                }
                Effect::Observe(Observation::LeaseReleased { .. }) => self.released += 1,
                Effect::Send { .. } | Effect::Close { .. } | Effect::Publish(_) | Effect::Observe(_) => {}
            }
        }
    }

    fn check(&self) {
        let state = &self.state;
        let mut held = 0;
        for (id, places) in [("a", 1), ("b", 2), ("c", 1)] {
            let counters = in_use(state, id);
            assert!(counters.in_use() <= places && counters.quarantined <= counters.in_use(), "I4: {counters:?}");
            held += counters.in_use() as usize;
        }
        assert!(in_use(state, "b").long <= 1, "I4, LEA-2");
        assert_eq!(self.placed - self.released, held, "I5: each place is released exactly once");
        let with_place = state
            .attempts
            .values()
            .filter(|entry| matches!(entry.stage, Stage::Reserved | Stage::Dispatched | Stage::Cancelling));
        assert_eq!(with_place.count(), held, "I4: places in use are those of open attempts");
        let mut waiting = 0;
        for (at, group) in state.groups.iter().enumerate() {
            assert!(group.queue.len() <= group.model.max_waiting, "I10");
            waiting += group.queue.len();
            for need in group.queue.needs() {
                let mut candidates = 0;
                for candidate in &group.model.candidates {
                    let Some(online) = state.fleet.provider(&candidate.provider).and_then(|p| {
                        p.wire(need.wanted)?;
                        p.online.clone()
                    }) else {
                        continue;
                    };
                    candidates += 1;
                    let counters = in_use(state, candidate.provider.as_str());
                    assert!(!counters.has_place(need.class, online.limits), "whoever could be placed is placed ({at})");
                }
                assert!(candidates > 0, "FEN-3: nobody waits for nothing");
            }
        }
        assert_eq!(state.waiting().len(), waiting);
        for attempt in state.waiting() {
            let (seen, since) = self.seen[&attempt];
            assert_eq!(seen, Seen::Waiting);
            assert!(self.now < since + Duration::from_secs(30), "I11: nobody waits longer than allowed");
        }
        assert!(state.timers.len() <= 2 + 4 * state.attempts.len(), "I10");
        assert_eq!(state.runs.len(), state.attempts.len());
    }

    fn finish(mut self) {
        for second in [false, true] {
            self.apply(Op::Close(second));
        }
        for attempt in self.attempts.clone() {
            self.state.abandon(attempt, self.now);
        }
        self.observe();
        self.check();
        assert!(self.state.attempts.is_empty() && self.state.timers.len() == 0, "I4: at rest");
        assert_eq!(self.placed, self.released, "I4: at rest all counters are 0");
        assert!(self.state.snapshot(self.now).is_at_rest());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_invariants_hold_in_every_history(ops in proptest::collection::vec(op(), 1..120)) {
        // LEA-1, LEA-2, LEA-4, LEA-6, LEA-7, FEN-2, FEN-3, FEN-4, QUE-1, QUE-2
        let mut world = World::new();
        for op in ops {
            world.apply(op);
        }
        world.finish();
    }
}
