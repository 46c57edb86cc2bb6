//! The queue beside a list that is searched from one end to the other.

use std::time::Duration;

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::*;

const BOUND: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waiter {
    arrival: u64,
    long: bool,
    priority: i8,
    caller: u8,
}

#[derive(Debug, Clone, Default)]
struct Model {
    waiting: Vec<Waiter>,
    arrivals: u64,
    /// Virtual time, and each caller's finish: in units of one request, for all cost the same here.
    now: u64,
    finish: [u64; 3],
}

impl Model {
    fn turn(&self, caller: u8) -> u64 {
        self.finish[usize::from(caller)].max(self.now)
    }

    /// Highest priority, then whose turn it is, then who came first among the first of each caller and kind.
    fn next(&self) -> Option<Waiter> {
        self.waiting.iter().copied().min_by_key(|w| (Reverse(w.priority), self.turn(w.caller), w.arrival))
    }

    fn serve(&mut self, caller: u8) {
        self.now = self.turn(caller);
        self.finish[usize::from(caller)] = self.now + 1;
    }
}

#[derive(Debug, Clone)]
enum Op {
    Push { long: bool, priority: i8, caller: u8 },
    Serve,
    Remove(usize),
    Requeue,
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Self> {
        Just(Self::default()).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Op> {
        prop_oneof![
            6 => (any::<bool>(), -1..2_i8, 0..3_u8).prop_map(|(long, priority, caller)| Op::Push { long, priority, caller }),
            4 => Just(Op::Serve),
            1 => (0..BOUND).prop_map(Op::Remove),
            1 => Just(Op::Requeue),
        ]
        .boxed()
    }

    fn apply(mut model: Self, op: &Op) -> Self {
        match *op {
            Op::Push { long, priority, caller } => {
                model.arrivals += 1;
                if model.waiting.len() < BOUND {
                    model.waiting.push(Waiter { arrival: model.arrivals, long, priority, caller });
                }
            }
            Op::Serve => {
                if let Some(next) = model.next() {
                    model.waiting.retain(|waiter| *waiter != next);
                    model.serve(next.caller);
                }
            }
            Op::Remove(at) => {
                if at < model.waiting.len() {
                    model.waiting.remove(at);
                }
            }
            Op::Requeue => {}
        }
        model
    }
}

struct Real {
    queue: WaitQueue,
    clock: FairClock,
    start: Instant,
    arrivals: u64,
    served: Vec<u64>,
    /// Who was next before the step, by the model.
    expected: Option<Waiter>,
    waiting: Vec<Waiter>,
}

fn kind(long: bool) -> Need {
    need(if long { WorkClass::Long } else { WorkClass::Normal })
}

impl StateMachineTest for Real {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(_: &Model) -> Self {
        Self {
            queue: WaitQueue::default(),
            clock: FairClock::default(),
            start: Instant::now(),
            arrivals: 0,
            served: Vec::new(),
            expected: None,
            waiting: Vec::new(),
        }
    }

    fn apply(mut real: Self, after: &Model, op: Op) -> Self {
        match op {
            Op::Push { long, priority, caller } => {
                real.arrivals += 1;
                let since = real.start + Duration::from_secs(real.arrivals);
                let ticket = ticket(real.arrivals, priority, &format!("c{caller}"), since);
                let waits = real.queue.push(kind(long), ticket, BOUND);
                assert_eq!(waits, after.waiting.iter().any(|waiter| waiter.arrival == real.arrivals), "QUE-2");
            }
            Op::Serve => {
                let heads = real.queue.heads(&real.clock).min_by_key(|head| head.rank);
                let next = heads.map(|head| (head.need.clone(), head.rank.attempt));
                assert_eq!(
                    next.as_ref().map(|(_, attempt)| attempt.0),
                    real.expected.map(|next| next.arrival),
                    "QUE-1"
                );
                if let Some((need, attempt)) = next {
                    let ticket = real.queue.remove(&need, attempt).unwrap();
                    real.clock.served(&ticket.caller, 1);
                    real.served.push(attempt.0);
                }
            }
            Op::Remove(at) => {
                if let Some(waiter) = real.waiting.get(at) {
                    let attempt = AttemptId(waiter.arrival);
                    assert!(real.queue.remove(&kind(waiter.long), attempt).is_some());
                    assert!(real.queue.remove(&kind(waiter.long), attempt).is_none());
                }
            }
            Op::Requeue => {
                for ticket in real.queue.take_all() {
                    let long = real.waiting.iter().find(|waiter| waiter.arrival == ticket.attempt.0).unwrap().long;
                    assert!(real.queue.push(kind(long), ticket, BOUND));
                }
            }
        }
        real.expected = after.next();
        real.waiting.clone_from(&after.waiting);
        real
    }

    fn check_invariants(real: &Self, model: &Model) {
        assert_eq!(real.queue.len(), model.waiting.len());
        assert!(real.queue.len() <= BOUND, "I10");
        let oldest = model.waiting.iter().map(|waiter| waiter.arrival).min();
        assert_eq!(real.queue.oldest(), oldest.map(|arrival| real.start + Duration::from_secs(arrival)));
        for long in [false, true] {
            let expected: Vec<_> = model.waiting.iter().filter(|w| w.long == long).map(|w| w.arrival).collect();
            let found: Vec<_> = real.queue.line(&kind(long)).map(|attempt| attempt.0).collect();
            assert_eq!(found, expected);
        }
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    // QUE-1, QUE-2
    #[test]
    fn the_queue_is_what_its_model_says(sequential 1..150 => Real);
}
