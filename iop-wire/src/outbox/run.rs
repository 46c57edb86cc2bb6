//! Decides what waits for one run, and whether its front frame has the credit to go.

use std::collections::VecDeque;

use super::{ControlOverflow, Ending, Outgoing, Room};
use crate::limits::{MIN_CHARGE, RUN_CONTROL, RUN_QUEUE_BYTES, RUN_QUEUE_FRAMES};
use crate::message::RunNumber;

/// Where a run waits for its next frame to be written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Nowhere: no frame, or no credit for it.
    Idle,
    /// Among the first frames.
    First,
    /// Among the turns.
    Turn,
}

pub(super) struct Run<M> {
    /// None until the request is written.
    pub(super) number: Option<RunNumber>,
    pub(super) request: Option<M>,
    pub(super) waiting: VecDeque<M>,
    pub(super) control: VecDeque<M>,
    /// The outbox's control queue has an entry for `control`.
    pub(super) control_listed: bool,
    pub(super) credit: u32,
    pub(super) deficit: u32,
    /// Frames written: the next one is `sent + 1`.
    pub(super) sent: u64,
    pub(super) lane: Lane,
    pub(super) cancelled: bool,
    /// A terminal was pushed.
    pub(super) ended: bool,
    pub(super) closing: bool,
    /// Sum of the charges in `waiting`.
    charged: usize,
}

impl<M: Outgoing> Run<M> {
    pub(super) const fn unwritten(request: M, window: u32) -> Self {
        Self::new(None, Some(request), window)
    }

    pub(super) const fn written(number: RunNumber, window: u32) -> Self {
        Self::new(Some(number), None, window)
    }

    const fn new(number: Option<RunNumber>, request: Option<M>, credit: u32) -> Self {
        Self {
            number,
            request,
            waiting: VecDeque::new(),
            control: VecDeque::new(),
            control_listed: false,
            credit,
            deficit: 0,
            sent: 0,
            lane: Lane::Idle,
            cancelled: false,
            ended: false,
            closing: false,
            charged: 0,
        }
    }

    pub(super) fn push(&mut self, message: M) {
        if self.ended || self.cancelled || self.closing {
            return;
        }
        match message.ending() {
            Ending::No => {}
            Ending::InOrder => self.ended = true,
            Ending::Affordable => {
                self.ended = true;
                self.keep_charged(self.credit as usize);
            }
            Ending::AtOnce => {
                self.ended = true;
                self.keep_charged(0);
            }
        }
        let Some(message) = self.merge(message) else { return };
        self.charged += message.charge() as usize;
        self.waiting.push_back(message);
    }

    /// Joins a message to the last one that waits; gives it back where that is not possible.
    fn merge(&mut self, message: M) -> Option<M> {
        let only = self.waiting.len() == 1;
        let Some(last) = self.waiting.back_mut() else { return Some(message) };
        let before = last.charge();
        // The front frame keeps the credit it has: joining must not turn it into one that waits.
        if only && before <= self.credit && before.saturating_add(message.charge()) > self.credit {
            return Some(message);
        }
        let rest = last.try_merge(message).err();
        self.charged = self.charged - before as usize + last.charge() as usize;
        rest
    }

    /// Keeps the charged frames that fit into `credit`, in order, and every exempt one.
    fn keep_charged(&mut self, credit: usize) {
        let mut left = Some(credit);
        let mut charged = 0;
        self.waiting.retain(|message| {
            let charge = message.charge() as usize;
            if charge == 0 {
                return true;
            }
            left = left.and_then(|left| left.checked_sub(charge));
            charged += if left.is_some() { charge } else { 0 };
            left.is_some()
        });
        self.charged = charged;
    }

    pub(super) fn drop_frames(&mut self) {
        self.waiting.clear();
        self.charged = 0;
    }

    pub(super) fn push_control(&mut self, message: M) -> Result<(), ControlOverflow> {
        let rest = match self.control.back_mut() {
            Some(last) => last.try_merge(message).err(),
            None => Some(message),
        };
        let Some(message) = rest else { return Ok(()) };
        if self.control.len() >= RUN_CONTROL {
            return Err(ControlOverflow);
        }
        self.control.push_back(message);
        Ok(())
    }

    /// Marks the run cancelled: its frames have no reader any more. The message is outside the bound: there is only one.
    pub(super) fn cancel(&mut self, message: Option<M>) {
        self.cancelled = true;
        self.drop_frames();
        self.control.extend(message);
    }

    pub(super) fn pop_control(&mut self) -> Option<M> {
        let mut message = self.control.pop_front()?;
        if let Some(number) = self.number {
            message.set_run(number);
        }
        Some(message)
    }

    pub(super) fn pop_frame(&mut self) -> Option<M> {
        let mut frame = self.waiting.pop_front()?;
        let charge = frame.charge();
        self.charged -= charge as usize;
        self.credit = self.credit.saturating_sub(charge);
        self.sent += 1;
        if let Some(number) = self.number {
            frame.set_run(number);
        }
        frame.set_number(self.sent);
        Some(frame)
    }

    /// The front frame can be written now.
    pub(super) fn is_ready(&self) -> bool {
        self.number.is_some() && self.waiting.front().is_some_and(|front| front.charge() <= self.credit)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.control.is_empty()
    }

    pub(super) fn room(&self) -> Room {
        if self.cancelled || self.ended || self.closing {
            // Whatever comes is dropped: nobody need wait.
            return Room::Open;
        }
        let left = (self.credit as usize).saturating_sub(self.charged);
        let full =
            self.waiting.len() >= RUN_QUEUE_FRAMES || self.charged >= RUN_QUEUE_BYTES || left < MIN_CHARGE as usize;
        if full { Room::Full } else { Room::Open }
    }
}
