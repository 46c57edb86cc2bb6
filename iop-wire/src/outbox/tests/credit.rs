//! Credit between one sender and its receivers, beside a count of what each run was given and has consumed.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::*;
use crate::inbox::ReceiveWindow;
use crate::limits::{MAX_CHUNK, MIN_CHARGE, MIN_WINDOW};

const RUNS: usize = 3;

/// What must be true of each run whatever the order of steps: its frames in order, and how many were consumed.
#[derive(Debug, Clone)]
struct Model {
    windows: [u32; RUNS],
    pushed: [Vec<usize>; RUNS],
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Push(usize, usize),
    Write,
    Consume(usize),
    /// Every receiver reads until nothing moves any more.
    Drain,
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Self> {
        let windows = proptest::array::uniform3(MIN_WINDOW..300_000_u32);
        windows.prop_map(|windows| Self { windows, pushed: Default::default() }).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Step> {
        let size = prop_oneof![1..300_usize, 300..5_000_usize, Just(MAX_CHUNK)];
        prop_oneof![
            30 => (0..RUNS, size).prop_map(|(run, size)| Step::Push(run, size)),
            40 => Just(Step::Write),
            30 => (0..RUNS).prop_map(Step::Consume),
            1 => Just(Step::Drain),
        ]
        .boxed()
    }

    fn apply(mut model: Self, step: &Step) -> Self {
        if let Step::Push(run, size) = *step {
            model.pushed[run].push(size);
        }
        model
    }
}

struct Real {
    outbox: Outbox<ToEdge>,
    keys: Vec<RunKey>,
    windows: [u32; RUNS],
    receivers: [ReceiveWindow; RUNS],
    held: [VecDeque<u32>; RUNS],
    /// Charges that arrived, in order.
    arrived: [Vec<u32>; RUNS],
    consumed: [usize; RUNS],
}

impl Real {
    fn write(&mut self) -> bool {
        let Some(message) = self.outbox.pop() else { return false };
        let run = usize::try_from(message.run().unwrap().0).unwrap() - 1;
        let charge = message.charge();
        self.receivers[run].receive(charge).expect("the sender keeps to its credit");
        self.held[run].push_back(charge);
        self.arrived[run].push(charge);
        true
    }

    fn consume(&mut self, run: usize) -> bool {
        let Some(charge) = self.held[run].pop_front() else { return false };
        self.consumed[run] += 1;
        if let Some(grant) = self.receivers[run].consume(charge) {
            assert!(grant > 0 && grant <= self.windows[run]);
            self.outbox.grant(self.keys[run], grant).expect("no more than the window is outstanding");
        }
        true
    }

    fn drain(&mut self) {
        loop {
            let wrote = self.write();
            let read = (0..RUNS).filter(|run| self.consume(*run)).count();
            if !wrote && read == 0 {
                return;
            }
        }
    }
}

impl StateMachineTest for Real {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(model: &Model) -> Self {
        let (outbox, keys) = opened(&model.windows);
        Self {
            outbox,
            keys,
            windows: model.windows,
            receivers: model.windows.map(ReceiveWindow::new),
            held: Default::default(),
            arrived: Default::default(),
            consumed: [0; RUNS],
        }
    }

    fn apply(mut real: Self, model: &Model, step: Step) -> Self {
        match step {
            Step::Push(run, size) => {
                real.outbox.push(real.keys[run], body(size, FrameFlags::NONE));
            }
            Step::Write => {
                real.write();
            }
            Step::Consume(run) => {
                real.consume(run);
            }
            Step::Drain => {
                real.drain();
                let pushed = model.pushed.each_ref().map(Vec::len);
                assert_eq!(real.consumed, pushed, "everything arrives once receivers read: no sender waits for ever");
            }
        }
        real
    }

    fn check_invariants(real: &Self, model: &Model) {
        for run in 0..RUNS {
            assert!(real.receivers[run].held() <= real.windows[run], "I10");
            assert_eq!(real.receivers[run].held(), real.held[run].iter().sum::<u32>());
            let charge = |size: &usize| u32::try_from(*size).unwrap().max(MIN_CHARGE);
            let expected = model.pushed[run].iter().map(charge).take(real.arrived[run].len());
            assert!(expected.eq(real.arrived[run].iter().copied()), "a run keeps its order, and each frame its charge");
        }
    }

    fn teardown(mut real: Self, model: Model) {
        real = <Self as StateMachineTest>::apply(real, &model, Step::Drain);
        assert!(real.receivers.iter().all(|receiver| receiver.held() == 0));
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // WIR-7
    #[test]
    fn credit_is_conserved_between_a_sender_and_its_receivers(sequential 1..300 => Real);
}
