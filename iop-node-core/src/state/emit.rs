//! Decides what a run sends: pieces of bounded size in the provider's order, then exactly one terminal (WIR-6, WIR-8,
//! NOD-6).
//!
//! A provider may push as much at once as it likes; the wire takes at most 4 KiB of text or 16 KiB of body in one message.
//! The emitter cuts: text at a character, counts on the last piece; a body that is an event stream carries MORE on every
//! piece but the last, which carries the flags of the whole. It also takes off what never crosses the wire (the PROGRESS
//! flag).
//!
//! Use: [`Emitter::accept`] an item, then [`Emitter::pop`] until it gives `None`; [`Emitter::finish`] once. After that it
//! gives nothing any more.
//!
//! It does not decide when there is room (the driver asks the outbox before each piece), nor the numbers of the messages
//! (the outbox gives them as it writes, since it may join what waits).

use bytes::Bytes;
use iop_execution::execution::Emit;
use iop_execution::{
    Activity, CancelReason, ExecutionFailure, FrameFlags, RunEvent, RunEventKind, ToolCallDelta, TunnelFrame,
    TunnelHead, Usage, classify_event, classify_frame,
};
use iop_wire::limits::{MAX_CHUNK, MAX_DELTA, MAX_HEADER_BYTES, MAX_HEADERS};
use iop_wire::{RunNumber, ToEdge};

use crate::observe::{RunOutcome, RunPath};

/// What can't be cut is larger than a message may be: the run must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the provider sent a piece that is larger than the wire allows")]
pub struct Oversize;

/// What a run of one kind emits, as the emitter sees it.
pub trait Output: Emit + Sized {
    /// Which wire it goes by.
    const PATH: RunPath;
    /// What it says about the life of its run (EXE-11).
    fn activity(&self, event_stream: bool) -> Activity;
    /// How the run ended, if this is its terminal.
    fn outcome(&self) -> Option<RunOutcome>;
    /// Counts in it, as the provider reported them.
    fn usage(&self) -> Option<Usage>;
    /// Whether it can be cut into pieces that the wire takes.
    ///
    /// # Errors
    /// [`Oversize`] when it can't.
    fn check(&self) -> Result<(), Oversize>;
    /// The next piece. `rest` is emptied with the last one; `at` is how much of it was taken already.
    fn cut(rest: &mut Option<Self>, at: &mut usize, event_stream: bool) -> Option<Self>;
    /// True if this begins an answer that is an event stream.
    fn begins_event_stream(&self) -> bool;
    /// The message, without its number in the run.
    fn into_message(self, number: RunNumber) -> ToEdge;
}

/// The one place where messages of one run are made.
#[derive(Debug)]
pub struct Emitter<T> {
    number: RunNumber,
    sent: u64,
    rest: Option<T>,
    at: usize,
    event_stream: bool,
    ended: bool,
}

impl<T: Output> Emitter<T> {
    /// A run that has sent nothing yet.
    #[must_use]
    pub const fn new(number: RunNumber) -> Self {
        Self { number, sent: 0, rest: None, at: 0, event_stream: false, ended: false }
    }

    /// What the next item says about the life of the run.
    #[must_use]
    pub fn activity(&self, item: &T) -> Activity {
        item.activity(self.event_stream)
    }

    /// Takes an item that is no terminal. Pop everything before the next one; what waits is replaced.
    ///
    /// # Errors
    /// [`Oversize`] when the wire can't take it; nothing of it is sent.
    pub fn accept(&mut self, item: T) -> Result<(), Oversize> {
        item.check()?;
        self.event_stream |= item.begins_event_stream();
        if !self.ended {
            self.rest = Some(item);
            self.at = 0;
        }
        Ok(())
    }

    /// The next message to send, or `None` when another item is needed.
    #[must_use]
    pub fn pop(&mut self) -> Option<ToEdge> {
        let piece = T::cut(&mut self.rest, &mut self.at, self.event_stream)?;
        Some(self.message(piece))
    }

    /// The terminal's message; `None` if there was one already. What still waits is dropped.
    #[must_use]
    pub fn finish(&mut self, terminal: T) -> Option<ToEdge> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        self.rest = None;
        Some(self.message(terminal))
    }

    /// A terminal that says how the run failed.
    #[must_use]
    pub fn failed(&mut self, failure: ExecutionFailure) -> Option<ToEdge> {
        self.finish(T::failed(0, failure))
    }

    /// A terminal that says who cancelled the run.
    #[must_use]
    pub fn cancelled(&mut self, reason: CancelReason) -> Option<ToEdge> {
        self.finish(T::cancelled(0, reason))
    }

    /// Messages given so far.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    fn message(&mut self, item: T) -> ToEdge {
        self.sent += 1;
        item.into_message(self.number)
    }
}

impl Output for RunEvent {
    const PATH: RunPath = RunPath::Run;

    fn activity(&self, _: bool) -> Activity {
        classify_event(self)
    }

    fn usage(&self) -> Option<Usage> {
        self.usage
    }

    fn outcome(&self) -> Option<RunOutcome> {
        match &self.kind {
            RunEventKind::Complete(_) => Some(RunOutcome::Completed),
            RunEventKind::Error(failure) => Some(RunOutcome::Failed(failure.code)),
            RunEventKind::Cancelled(reason) => Some(RunOutcome::Cancelled(*reason)),
            RunEventKind::Start
            | RunEventKind::Delta(_)
            | RunEventKind::ReasoningDelta(_)
            | RunEventKind::ToolCallDelta(_)
            | RunEventKind::Usage => None,
        }
    }

    fn check(&self) -> Result<(), Oversize> {
        match &self.kind {
            RunEventKind::ToolCallDelta(call) => {
                let fixed = call.id.as_ref().map_or(0, String::len) + call.name.as_ref().map_or(0, String::len);
                if fixed > MAX_DELTA { Err(Oversize) } else { Ok(()) }
            }
            RunEventKind::Start
            | RunEventKind::Delta(_)
            | RunEventKind::ReasoningDelta(_)
            | RunEventKind::Usage
            | RunEventKind::Complete(_)
            | RunEventKind::Error(_)
            | RunEventKind::Cancelled(_) => Ok(()),
        }
    }

    fn cut(rest: &mut Option<Self>, at: &mut usize, _: bool) -> Option<Self> {
        let text = match &rest.as_ref()?.kind {
            RunEventKind::Delta(text) | RunEventKind::ReasoningDelta(text) => text,
            RunEventKind::ToolCallDelta(call) => &call.arguments,
            RunEventKind::Start
            | RunEventKind::Usage
            | RunEventKind::Complete(_)
            | RunEventKind::Error(_)
            | RunEventKind::Cancelled(_) => return rest.take(),
        };
        if *at == 0 && text.len() <= MAX_DELTA {
            return rest.take();
        }
        let mut end = text.len().min(*at + MAX_DELTA);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let piece = text.get(*at..end).unwrap_or_default().to_owned();
        let last = end == text.len();
        let first = *at == 0;
        *at = end;
        let kind = match &rest.as_ref()?.kind {
            RunEventKind::ReasoningDelta(_) => RunEventKind::ReasoningDelta(piece),
            RunEventKind::ToolCallDelta(call) => RunEventKind::ToolCallDelta(ToolCallDelta {
                index: call.index,
                id: call.id.clone().filter(|_| first),
                name: call.name.clone().filter(|_| first),
                arguments: piece,
            }),
            RunEventKind::Delta(_)
            | RunEventKind::Start
            | RunEventKind::Usage
            | RunEventKind::Complete(_)
            | RunEventKind::Error(_)
            | RunEventKind::Cancelled(_) => RunEventKind::Delta(piece),
        };
        let usage = if last { rest.take()?.usage } else { None };
        Some(Self { seq: 0, kind, usage })
    }

    fn begins_event_stream(&self) -> bool {
        false
    }

    fn into_message(self, number: RunNumber) -> ToEdge {
        ToEdge::Event(number, self)
    }
}

impl Output for TunnelFrame {
    const PATH: RunPath = RunPath::Tunnel;

    fn activity(&self, event_stream: bool) -> Activity {
        classify_frame(self, event_stream)
    }

    fn usage(&self) -> Option<Usage> {
        match self {
            Self::Usage(usage) => Some(*usage),
            Self::Head(_) | Self::Body { .. } | Self::End | Self::Failed(_) | Self::Cancelled(_) => None,
        }
    }

    fn outcome(&self) -> Option<RunOutcome> {
        match self {
            Self::End => Some(RunOutcome::Completed),
            Self::Failed(failure) => Some(RunOutcome::Failed(failure.code)),
            Self::Cancelled(reason) => Some(RunOutcome::Cancelled(*reason)),
            Self::Head(_) | Self::Body { .. } | Self::Usage(_) => None,
        }
    }

    fn check(&self) -> Result<(), Oversize> {
        match self {
            Self::Head(TunnelHead { headers, .. }) => {
                let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
                if headers.len() > MAX_HEADERS || bytes > MAX_HEADER_BYTES { Err(Oversize) } else { Ok(()) }
            }
            Self::Body { .. } | Self::Usage(_) | Self::End | Self::Failed(_) | Self::Cancelled(_) => Ok(()),
        }
    }

    fn cut(rest: &mut Option<Self>, _: &mut usize, event_stream: bool) -> Option<Self> {
        if let Some(Self::Body { bytes, flags }) = rest {
            *flags = flags.without(FrameFlags::PROGRESS);
            if bytes.len() > MAX_CHUNK {
                let bytes: Bytes = bytes.split_to(MAX_CHUNK);
                let flags = if event_stream { FrameFlags::MORE } else { FrameFlags::NONE };
                return Some(Self::Body { bytes, flags });
            }
        }
        rest.take()
    }

    fn begins_event_stream(&self) -> bool {
        match self {
            Self::Head(head) => head.is_event_stream(),
            Self::Body { .. } | Self::Usage(_) | Self::End | Self::Failed(_) | Self::Cancelled(_) => false,
        }
    }

    fn into_message(self, number: RunNumber) -> ToEdge {
        ToEdge::Frame(number, 0, self)
    }
}

#[cfg(test)]
mod tests;
