//! Decides what a connection writes next: control first, then requests, then runs by deficit round robin within their credit.
//!
//! | goes | what | bound |
//! | --- | --- | --- |
//! | 1 | control messages, in order | [`CONTROL_QUEUE`]; run controls [`RUN_CONTROL`] per run |
//! | 2 | requests, in order, numbered as they are written | the caller's admission |
//! | 3 | the first frame of each run, once | one per run |
//! | 4 | frames of runs, [`DRR_QUANTUM`] bytes per turn | [`RUN_QUEUE_FRAMES`], [`RUN_QUEUE_BYTES`] |
//!
//! After [`CONTROL_BURST`] control messages in a row one frame of 3 or 4 passes, never a request. So a request never
//! overtakes a control message that was pushed before it (REG-3), and nothing of a run overtakes its own request.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use iop_execution::CancelReason;

use crate::limits::{CONTROL_BURST, CONTROL_QUEUE, DRR_QUANTUM, MAX_WINDOW, MIN_CHARGE};
#[cfg(doc)]
use crate::limits::{RUN_CONTROL, RUN_QUEUE_BYTES, RUN_QUEUE_FRAMES};
use crate::message::RunNumber;

mod outgoing;
mod run;
#[cfg(test)]
mod tests;

use run::{Lane, Run};

/// Local handle of a run in one outbox, never on the wire. On a Node it equals the run's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunKey(pub u64);

/// How a frame ends its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It does not.
    No,
    /// After every frame before it: success, whose output must not be lost.
    InOrder,
    /// After the frames that still have credit; the others are dropped: a run without credit must be able to fail (WIR-7).
    Affordable,
    /// Before every charged frame, which are dropped: nobody wants them.
    AtOnce,
}

/// A message that an outbox can schedule (implemented for `ToEdge` and `ToNode`).
pub trait Outgoing: Sized + Send + 'static {
    /// Fills in the number of the run, when the message is written.
    fn set_run(&mut self, number: RunNumber);
    /// Fills in the message's number within its run (`n`), when it is written: events and frames only.
    fn set_number(&mut self, n: u64);
    /// What it costs of its run's credit: `max(payload, MIN_CHARGE)`; 0 for messages that are exempt.
    fn charge(&self) -> u32;
    /// Whether it ends its run, and past what.
    fn ending(&self) -> Ending;
    /// `CancelRequest` for a run.
    fn cancel(number: RunNumber, reason: CancelReason) -> Option<Self>;
    /// Joins `next` to this message where both are adjacent deltas of one kind and the result stays under `MAX_DELTA`;
    /// gives `next` back otherwise.
    ///
    /// # Errors
    /// `next`, unchanged, when the two can't be joined.
    fn try_merge(&mut self, next: Self) -> Result<(), Self>;
}

/// The control queue is full: the connection must close as `control_overflow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the control queue is full")]
pub struct ControlOverflow;

/// The peer granted more than the wire allows: the connection must close as `flow_control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer granted more credit than a run may have")]
pub struct CreditOverflow;

/// What a cancel did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The request had not been written: it was taken out, nothing is sent.
    Withdrawn,
    /// A CancelRequest is queued behind the request.
    Queued,
    /// No such run is open.
    Unknown,
}

/// Room in a run's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// More can be pushed.
    Open,
    /// Wait (see `OutboxHandle::poll_room`): no credit, or enough waits already.
    Full,
}

enum Control<M> {
    Message(M),
    /// What the run has in its own control queue.
    OfRun(RunKey),
}

/// Sans-IO scheduler of one direction of one connection.
pub struct Outbox<M> {
    control: VecDeque<Control<M>>,
    /// `Control::Message`s among them: the others are bounded by the number of runs.
    control_messages: usize,
    /// Control messages since the last frame.
    burst: usize,
    /// Runs whose request is not written.
    requests: VecDeque<RunKey>,
    /// Runs whose first frame can go.
    firsts: VecDeque<RunKey>,
    /// Runs with a frame that can go, in the order of their turns.
    turns: VecDeque<RunKey>,
    /// The run in front has had the quantum of its turn.
    turn_open: bool,
    runs: HashMap<RunKey, Run<M>>,
    numbers: HashMap<RunNumber, RunKey>,
    highest: u64,
    last_key: u64,
}

impl<M> fmt::Debug for Outbox<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("control", &self.control.len())
            .field("requests", &self.requests.len())
            .field("runs", &self.runs.len())
            .field("highest", &self.highest)
            .finish_non_exhaustive()
    }
}

impl<M: Outgoing> Default for Outbox<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Outgoing> Outbox<M> {
    /// An empty outbox.
    #[must_use]
    pub fn new() -> Self {
        Self {
            control: VecDeque::new(),
            control_messages: 0,
            burst: 0,
            requests: VecDeque::new(),
            firsts: VecDeque::new(),
            turns: VecDeque::new(),
            turn_open: false,
            runs: HashMap::new(),
            numbers: HashMap::new(),
            highest: 0,
            last_key: 0,
        }
    }

    /// Control message: ahead of everything else, never dropped.
    ///
    /// # Errors
    /// [`ControlOverflow`] when [`CONTROL_QUEUE`] of them wait; the message is not queued.
    pub fn push_control(&mut self, message: M) -> Result<(), ControlOverflow> {
        if self.control_messages >= CONTROL_QUEUE {
            return Err(ControlOverflow);
        }
        self.control_messages += 1;
        self.control.push_back(Control::Message(message));
        Ok(())
    }

    /// Edge: opens a run with its request. The number is assigned when the request is popped. `body_window` is the credit
    /// for its request body, in bytes.
    pub fn open_request(&mut self, request: M, body_window: u32) -> RunKey {
        self.last_key += 1;
        let key = RunKey(self.last_key);
        self.runs.insert(key, Run::unwritten(request, body_window));
        self.requests.push_back(key);
        key
    }

    /// Node: opens a run whose request arrived, with the credit that came with it, in bytes.
    pub fn open(&mut self, number: RunNumber, window: u32) -> RunKey {
        let key = RunKey(number.0);
        self.discard(key);
        self.highest = self.highest.max(number.0);
        self.runs.insert(key, Run::written(number, window));
        self.numbers.insert(number, key);
        key
    }

    /// Queues a frame of a run, in order. Never refuses (the caller looks at `room` first); exempt frames pass without credit.
    ///
    /// A failure lets pass what has credit and drops the frames that wait for more; a cancellation drops every charged
    /// frame. Anything after a terminal, for a cancelled run, or for an unknown key is dropped.
    pub fn push(&mut self, key: RunKey, message: M) -> Room {
        let Some(run) = self.runs.get_mut(&key) else { return Room::Open };
        run.push(message);
        self.schedule(key);
        self.room(key)
    }

    /// Whether more can be pushed for a run. [`Room::Open`] for an unknown key.
    #[must_use]
    pub fn room(&self, key: RunKey) -> Room {
        self.runs.get(&key).map_or(Room::Open, Run::room)
    }

    /// True while the run's producer is held back: frames wait for credit, or there is none for a next one, or enough
    /// waits for the connection (WIR-16).
    #[must_use]
    pub fn is_blocked(&self, key: RunKey) -> bool {
        self.room(key) == Room::Full
    }

    /// A control-like message of one run (RunAccepted, WindowCredit): goes with control priority, but never ahead of the
    /// run's request. Credits of one run that wait are joined. Dropped for an unknown key.
    ///
    /// # Errors
    /// [`ControlOverflow`] when [`RUN_CONTROL`] of this run wait.
    pub fn push_run_control(&mut self, key: RunKey, message: M) -> Result<(), ControlOverflow> {
        let Some(run) = self.runs.get_mut(&key) else { return Ok(()) };
        run.push_control(message)?;
        self.schedule_control(key);
        Ok(())
    }

    /// Edge: cancels a run. Waiting body chunks are dropped. Only the first cancel of a run is sent.
    pub fn cancel(&mut self, key: RunKey, reason: CancelReason) -> CancelOutcome {
        let Some(run) = self.runs.get_mut(&key) else { return CancelOutcome::Unknown };
        let Some(number) = run.number else {
            self.discard(key);
            return CancelOutcome::Withdrawn;
        };
        if !run.cancelled {
            run.cancel(M::cancel(number, reason));
            self.unschedule(key);
            self.schedule_control(key);
        }
        CancelOutcome::Queued
    }

    /// Credit from the peer, in bytes. Ignored for an unknown key: the run ended.
    ///
    /// # Errors
    /// [`CreditOverflow`] when the run would have more than [`MAX_WINDOW`].
    pub fn grant(&mut self, key: RunKey, bytes: u32) -> Result<(), CreditOverflow> {
        let Some(run) = self.runs.get_mut(&key) else { return Ok(()) };
        let credit = run.credit.saturating_add(bytes);
        if credit > MAX_WINDOW {
            return Err(CreditOverflow);
        }
        run.credit = credit;
        self.schedule(key);
        Ok(())
    }

    /// Forgets a run; what it still has queued up to its terminal is sent first, then its entry goes. Without a terminal
    /// in the queue its frames have no reader any more and are dropped; a queued cancel is still sent.
    pub fn close(&mut self, key: RunKey) {
        let Some(run) = self.runs.get_mut(&key) else { return };
        if run.number.is_none() {
            self.discard(key);
            return;
        }
        run.closing = true;
        if !run.ended {
            run.drop_frames();
            if let Some(number) = run.number {
                self.numbers.remove(&number);
            }
            self.unschedule(key);
        }
        self.remove_if_done(key);
    }

    /// Forgets a run at once with all it has queued.
    pub fn discard(&mut self, key: RunKey) {
        self.unschedule(key);
        let Some(run) = self.runs.remove(&key) else { return };
        match run.number {
            Some(number) => {
                self.numbers.remove(&number);
            }
            None => self.requests.retain(|waiting| *waiting != key),
        }
        if run.control_listed {
            self.control.retain(|entry| !matches!(entry, Control::OfRun(waiting) if *waiting == key));
        }
    }

    /// Next message to write, or None.
    pub fn pop(&mut self) -> Option<M> {
        self.pop_keyed().map(|(message, _)| message)
    }

    /// Next message to write, with the run it belongs to.
    pub(crate) fn pop_keyed(&mut self) -> Option<(M, Option<RunKey>)> {
        if self.burst >= CONTROL_BURST
            && let Some(frame) = self.pop_frame()
        {
            return Some(frame);
        }
        if let Some(control) = self.pop_control() {
            self.burst = self.burst.saturating_add(1);
            return Some(control);
        }
        self.burst = 0;
        self.pop_request().or_else(|| self.pop_frame())
    }

    /// Edge: which run has this number; None when it ended.
    #[must_use]
    pub fn key_of(&self, number: RunNumber) -> Option<RunKey> {
        self.numbers.get(&number).copied()
    }

    /// Highest number given (Edge) or received (Node): above it is a violation, at or below it without an entry is late.
    #[must_use]
    pub const fn highest(&self) -> RunNumber {
        RunNumber(self.highest)
    }

    /// True once the run's request was written. False for an unknown key.
    #[must_use]
    pub fn is_written(&self, key: RunKey) -> bool {
        self.runs.get(&key).is_some_and(|run| run.number.is_some())
    }

    /// Runs with an entry.
    #[must_use]
    pub fn open_runs(&self) -> usize {
        self.runs.len()
    }

    /// Forgets every run and message; numbers and keys go on.
    pub(crate) fn clear(&mut self) {
        *self = Self { highest: self.highest, last_key: self.last_key, ..Self::new() };
    }

    fn pop_control(&mut self) -> Option<(M, Option<RunKey>)> {
        loop {
            let key = match self.control.pop_front()? {
                Control::Message(message) => {
                    self.control_messages -= 1;
                    return Some((message, None));
                }
                Control::OfRun(key) => key,
            };
            let Some(run) = self.runs.get_mut(&key) else { continue };
            let message = run.pop_control();
            run.control_listed = !run.control.is_empty();
            if run.control_listed {
                self.control.push_front(Control::OfRun(key));
            }
            self.remove_if_done(key);
            if let Some(message) = message {
                return Some((message, Some(key)));
            }
        }
    }

    fn pop_request(&mut self) -> Option<(M, Option<RunKey>)> {
        loop {
            let key = self.requests.pop_front()?;
            let Some(run) = self.runs.get_mut(&key) else { continue };
            let Some(mut request) = run.request.take() else { continue };
            self.highest += 1;
            let number = RunNumber(self.highest);
            run.number = Some(number);
            request.set_run(number);
            self.numbers.insert(number, key);
            self.schedule_control(key);
            self.schedule(key);
            return Some((request, Some(key)));
        }
    }

    fn pop_frame(&mut self) -> Option<(M, Option<RunKey>)> {
        self.burst = 0;
        if let Some(key) = self.firsts.pop_front() {
            return self.take(key);
        }
        loop {
            let key = *self.turns.front()?;
            let Some(run) = self.runs.get_mut(&key) else {
                self.turns.pop_front();
                self.turn_open = false;
                continue;
            };
            if !run.control.is_empty() {
                return self.take(key);
            }
            if !self.turn_open {
                run.deficit = run.deficit.saturating_add(DRR_QUANTUM);
                self.turn_open = true;
            }
            let cost = run.waiting.front().map_or(0, M::charge).max(MIN_CHARGE);
            if let Some(left) = run.deficit.checked_sub(cost) {
                run.deficit = left;
                return self.take(key);
            }
            self.turns.rotate_left(1);
            self.turn_open = false;
        }
    }

    /// Takes the front frame of a run that is in `firsts` (taken off already) or at the front of `turns`.
    fn take(&mut self, key: RunKey) -> Option<(M, Option<RunKey>)> {
        let run = self.runs.get_mut(&key)?;
        if let Some(control) = run.pop_control() {
            // A frame never overtakes a control message of its own run.
            if run.lane == Lane::First {
                self.firsts.push_front(key);
            }
            return Some((control, Some(key)));
        }
        let frame = run.pop_frame();
        match run.lane {
            Lane::First => {
                run.lane = Lane::Idle;
                self.schedule(key);
            }
            Lane::Turn if !run.is_ready() => {
                run.lane = Lane::Idle;
                run.deficit = 0;
                self.turns.pop_front();
                self.turn_open = false;
            }
            Lane::Turn | Lane::Idle => {}
        }
        self.remove_if_done(key);
        frame.map(|frame| (frame, Some(key)))
    }

    /// Puts a run into the lane its front frame belongs to.
    fn schedule(&mut self, key: RunKey) {
        let Some(run) = self.runs.get_mut(&key) else { return };
        if run.lane != Lane::Idle || !run.is_ready() {
            return;
        }
        if run.sent == 0 {
            run.lane = Lane::First;
            self.firsts.push_back(key);
        } else {
            run.lane = Lane::Turn;
            self.turns.push_back(key);
        }
    }

    /// Takes a run out of its lane, if its front frame can't go any more.
    fn unschedule(&mut self, key: RunKey) {
        let Some(run) = self.runs.get_mut(&key) else { return };
        match run.lane {
            Lane::Idle => return,
            Lane::First => self.firsts.retain(|waiting| *waiting != key),
            Lane::Turn => {
                if self.turns.front() == Some(&key) {
                    self.turn_open = false;
                }
                self.turns.retain(|waiting| *waiting != key);
            }
        }
        run.lane = Lane::Idle;
        run.deficit = 0;
    }

    fn schedule_control(&mut self, key: RunKey) {
        let Some(run) = self.runs.get_mut(&key) else { return };
        if run.number.is_some() && !run.control_listed && !run.control.is_empty() {
            run.control_listed = true;
            self.control.push_back(Control::OfRun(key));
        }
    }

    fn remove_if_done(&mut self, key: RunKey) {
        if self.runs.get(&key).is_some_and(|run| run.closing && run.is_empty()) {
            self.discard(key);
        }
    }
}
