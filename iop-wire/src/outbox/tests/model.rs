//! Every short sequence of operations against what must hold whatever happens.

use std::collections::{HashMap, VecDeque};

use super::*;

/// Visits every sequence of `length` operations out of `operations`.
fn every_sequence(operations: usize, length: u32, mut visit: impl FnMut(&[usize])) {
    let mut sequence = vec![0; length as usize];
    for mut index in 0..operations.pow(length) {
        for step in &mut sequence {
            *step = index % operations;
            index /= operations;
        }
        visit(&sequence);
    }
}

/// What an Edge's outbox may do, tracked from outside.
#[derive(Default)]
struct EdgeModel {
    outbox: Outbox<ToNode>,
    keys: Vec<RunKey>,
    /// By position in `keys`.
    granted: Vec<u32>,
    charged: Vec<u32>,
    pushed: Vec<VecDeque<usize>>,
    withdrawn: Vec<bool>,
    cancelled: Vec<bool>,
    numbers: HashMap<u64, usize>,
    control: usize,
    cancels_sent: Vec<usize>,
}

const WINDOW: u32 = 700;

impl EdgeModel {
    fn step(&mut self, step: usize) {
        match step {
            0 => self.open(),
            1 | 2 => self.push(step - 1),
            3 => self.control(),
            4 | 5 => self.cancel(step - 4),
            6 => self.grant(0),
            _ => self.pop(),
        }
    }

    fn open(&mut self) {
        let tag = self.keys.len();
        self.keys.push(self.outbox.open_request(request(tag as u8), WINDOW));
        self.granted.push(WINDOW);
        self.charged.push(0);
        self.pushed.push(VecDeque::new());
        self.withdrawn.push(false);
        self.cancelled.push(false);
        self.cancels_sent.push(0);
    }

    fn push(&mut self, run: usize) {
        let Some(key) = self.keys.get(run) else { return };
        // The length names the chunk.
        let id = 300 + self.pushed[run].len();
        self.outbox.push(*key, chunk(id));
        if !self.withdrawn[run] && !self.cancelled[run] {
            self.pushed[run].push_back(id);
        }
    }

    fn control(&mut self) {
        self.outbox.push_control(ping(0)).unwrap();
        self.control += 1;
    }

    fn cancel(&mut self, run: usize) {
        let Some(key) = self.keys.get(run) else { return };
        let written = self.numbers.values().any(|known| *known == run);
        match self.outbox.cancel(*key, CancelReason::Client) {
            CancelOutcome::Withdrawn => {
                assert!(!written);
                self.withdrawn[run] = true;
            }
            CancelOutcome::Queued => {
                assert!(written);
                self.cancelled[run] = true;
            }
            CancelOutcome::Unknown => assert!(self.withdrawn[run]),
        }
    }

    fn grant(&mut self, run: usize) {
        let Some(key) = self.keys.get(run) else { return };
        self.outbox.grant(*key, 300).unwrap();
        if !self.withdrawn[run] {
            self.granted[run] += 300;
        }
    }

    fn pop(&mut self) {
        let Some(message) = self.outbox.pop() else {
            assert_eq!(self.control, 0);
            for run in 0..self.keys.len() {
                assert!(self.withdrawn[run] || self.numbers.values().any(|known| *known == run), "a request waits");
                let next = self.pushed[run].front().copied().filter(|_| !self.cancelled[run] && !self.withdrawn[run]);
                let left = self.granted[run] - self.charged[run];
                assert!(next.is_none_or(|next| next as u32 > left), "a frame with credit waits");
            }
            return;
        };
        if matches!(message, ToNode::Ping(_)) {
            self.control -= 1;
            return;
        }
        let number = message.run().unwrap().0;
        if let ToNode::Run(request) = &message {
            assert_eq!(self.control, 0, "control goes first");
            assert_eq!(number, self.numbers.len() as u64 + 1, "numbers rise by one");
            let run = usize::from(request.head.run_id.as_bytes()[0]);
            assert!(!self.withdrawn[run], "a withdrawn request is never sent");
            let earlier =
                (0..run).all(|other| self.withdrawn[other] || self.numbers.values().any(|known| *known == other));
            assert!(earlier, "requests keep their order");
            assert!(self.numbers.values().all(|known| *known != run), "a run has one number");
            self.numbers.insert(number, run);
            return;
        }
        let run = *self.numbers.get(&number).expect("nothing of a run precedes its request");
        if matches!(message, ToNode::Cancel(..)) {
            assert!(self.cancelled[run]);
            self.cancels_sent[run] += 1;
            assert_eq!(self.cancels_sent[run], 1);
            return;
        }
        assert_eq!(self.control, 0, "control goes first");
        assert!(!self.cancelled[run], "a cancelled run sends no more body");
        let ToNode::Chunk(chunk) = message else { panic!("{message:?}") };
        assert_eq!(self.pushed[run].pop_front(), Some(chunk.data.len()), "a run keeps its order");
        self.charged[run] += chunk.data.len() as u32;
        assert!(self.charged[run] <= self.granted[run], "credit is never exceeded");
    }
}

#[test]
fn every_short_sequence_of_an_edge_keeps_the_rules() {
    // WIR-7, WIR-9, WIR-11
    every_sequence(8, 6, |sequence| {
        let mut model = EdgeModel::default();
        model.open();
        sequence.iter().for_each(|step| model.step(*step));
        (0..12).for_each(|_| model.pop());
    });
}

/// One run of a Node's outbox, tracked from outside.
#[derive(Default)]
struct NodeModel {
    outbox: Outbox<ToEdge>,
    granted: u32,
    charged: u32,
    pushed: usize,
    sent: u64,
    frames: usize,
    terminal: Option<Ending>,
    terminal_sent: bool,
    closed: bool,
}

const RUN: RunKey = RunKey(1);

impl NodeModel {
    fn new() -> Self {
        let mut model = Self { granted: 600, ..Self::default() };
        model.outbox.open(RunNumber(1), 600);
        model
    }

    fn step(&mut self, step: usize) {
        match step {
            0 => self.push(body(400, FrameFlags::NONE)),
            1 => self.push(usage(1)),
            2 => self.push(complete()),
            3 => self.push(failed()),
            4 => self.push(cancelled()),
            5 => {
                self.outbox.grant(RUN, 400).unwrap();
                self.granted += 400;
            }
            6 => self.pop(),
            _ => {
                self.outbox.close(RUN);
                self.closed = true;
            }
        }
    }

    fn push(&mut self, message: ToEdge) {
        if self.terminal.is_none() && !self.closed {
            self.pushed += usize::from(message.charge() > 0);
            self.terminal = Some(message.ending()).filter(|ending| *ending != Ending::No);
        }
        self.outbox.push(RUN, message);
    }

    fn pop(&mut self) {
        let Some(message) = self.outbox.pop() else {
            let abrupt = matches!(self.terminal, Some(Ending::Affordable | Ending::AtOnce));
            assert!(!abrupt || self.terminal_sent, "a failure never waits for credit");
            assert!(
                !self.terminal_sent || !self.closed || self.outbox.open_runs() == 0,
                "an ended run leaves no entry"
            );
            return;
        };
        assert!(!self.terminal_sent, "nothing follows a terminal");
        let n = match &message {
            ToEdge::Event(_, event) => event.seq,
            ToEdge::Frame(_, n, _) => *n,
            other => panic!("{other:?}"),
        };
        self.sent += 1;
        assert_eq!(n, self.sent, "numbers have no gap");
        self.charged += message.charge();
        assert!(self.charged <= self.granted, "credit is never exceeded");
        self.frames += usize::from(message.charge() > 0);
        if message.ending() != Ending::No {
            assert_eq!(Some(message.ending()), self.terminal, "the first terminal counts");
            self.terminal_sent = true;
            assert!(self.terminal != Some(Ending::InOrder) || self.frames == self.pushed, "success loses nothing");
        }
    }
}

#[test]
fn every_short_sequence_of_a_node_keeps_the_rules() {
    // WIR-6, WIR-7
    every_sequence(8, 6, |sequence| {
        let mut model = NodeModel::new();
        sequence.iter().for_each(|step| model.step(*step));
        (0..12).for_each(|_| model.pop());
    });
}
