//! The ledger beside the simplest thing that could be one: a list of what is held.

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::*;

/// What is held: attempt, generation, provider (second or first), long, quarantined.
type Held = (u64, u64, bool, bool, bool);

#[derive(Debug, Clone, Default)]
struct Model {
    held: Vec<Held>,
    late: u64,
}

impl Model {
    fn counters(&self, second: bool) -> PlaceCounters {
        let own = || self.held.iter().filter(|(_, _, provider, ..)| *provider == second);
        let count = |wanted: fn(&&Held) -> bool| u32::try_from(own().filter(wanted).count()).unwrap();
        PlaceCounters {
            normal: count(|(.., long, _)| !long),
            long: count(|(.., long, _)| *long),
            quarantined: count(|(.., quarantined)| *quarantined),
        }
    }

    fn fits(&self, attempt: u64, second: bool, long: bool) -> bool {
        let counters = self.counters(second);
        let class = if long { counters.long < LIMITS.long } else { true };
        class && counters.in_use() < LIMITS.capacity && !self.held.iter().any(|(held, ..)| *held == attempt)
    }
}

#[derive(Debug, Clone)]
enum Op {
    Acquire { attempt: u64, generation: u64, second: bool, long: bool },
    Take(u64),
    Quarantine(u64),
    Fence(u64),
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Self> {
        Just(Self::default()).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Op> {
        let acquire = (0..8_u64, 0..3_u64, any::<bool>(), any::<bool>())
            .prop_map(|(attempt, generation, second, long)| Op::Acquire { attempt, generation, second, long });
        prop_oneof![
            4 => acquire,
            3 => (0..8_u64).prop_map(Op::Take),
            1 => (0..8_u64).prop_map(Op::Quarantine),
            1 => (0..3_u64).prop_map(Op::Fence),
        ]
        .boxed()
    }

    fn apply(mut model: Self, op: &Op) -> Self {
        match *op {
            Op::Acquire { attempt, generation, second, long } => {
                if model.fits(attempt, second, long) {
                    model.held.push((attempt, generation, second, long, false));
                }
            }
            Op::Take(attempt) => {
                let before = model.held.len();
                model.held.retain(|(held, ..)| *held != attempt);
                model.late += u64::from(model.held.len() == before);
            }
            Op::Quarantine(attempt) => {
                if let Some((.., quarantined)) = model.held.iter_mut().find(|(held, ..)| *held == attempt) {
                    *quarantined = true;
                }
            }
            Op::Fence(generation) => model.held.retain(|(_, held, ..)| *held != generation),
        }
        model
    }
}

struct Real;

impl StateMachineTest for Real {
    type SystemUnderTest = Ledger;
    type Reference = Model;

    fn init_test(_: &Model) -> Ledger {
        Ledger::default()
    }

    /// `after` is the model after the step: what must be true of the real one, too.
    fn apply(mut ledger: Ledger, after: &Model, op: Op) -> Ledger {
        match op {
            Op::Acquire { attempt, generation, second, long } => {
                let class = if long { WorkClass::Long } else { WorkClass::Normal };
                let claimed = lease(attempt, generation, provider(second), class);
                if ledger.acquire(claimed.clone(), LIMITS).is_ok() {
                    assert_eq!(ledger.lease(AttemptId(attempt)), Some(&claimed), "LEA-3");
                }
            }
            Op::Take(attempt) => {
                let held = ledger.lease(AttemptId(attempt)).cloned();
                assert_eq!(ledger.take(AttemptId(attempt)), held);
            }
            Op::Quarantine(attempt) => {
                let newly = ledger.quarantine(AttemptId(attempt));
                assert!(!newly || after.held.iter().any(|(held, ..)| *held == attempt));
                assert!(!ledger.quarantine(AttemptId(attempt)), "once");
            }
            Op::Fence(generation) => {
                for attempt in ledger.held_by(Generation(generation)) {
                    assert_eq!(ledger.take(attempt).unwrap().generation, Generation(generation));
                }
            }
        }
        ledger
    }

    fn check_invariants(ledger: &Ledger, model: &Model) {
        for second in [false, true] {
            let counters = counters(ledger, provider(second));
            assert_eq!(counters, model.counters(second), "I4");
            assert!(counters.in_use() <= LIMITS.capacity && counters.long <= LIMITS.long, "LEA-2");
        }
        let mut held: Vec<_> = ledger.records.keys().map(|attempt| attempt.0).collect();
        held.sort_unstable();
        let mut expected: Vec<_> = model.held.iter().map(|(attempt, ..)| *attempt).collect();
        expected.sort_unstable();
        assert_eq!(held, expected, "I5");
        assert_eq!(ledger.late_releases(), model.late, "LEA-4");
        assert_eq!(ledger.counters.is_empty(), held.is_empty(), "nothing is kept at rest");
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    // LEA-1, LEA-2, LEA-3, LEA-4, LEA-7
    #[test]
    fn the_ledger_is_what_its_model_says(sequential 1..120 => Real);
}
