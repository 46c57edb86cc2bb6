//! Decides what each message costs, how it ends its run, and which messages may be joined while they wait.

use bytes::{Bytes, BytesMut};
use iop_execution::{CancelReason, FrameFlags, RunEvent, RunEventKind, TunnelFrame};

use super::{Ending, Outgoing};
use crate::limits::{MAX_CHUNK, MAX_DELTA};
use crate::message::{RunNumber, ToEdge, ToNode};

impl Outgoing for ToEdge {
    fn set_run(&mut self, number: RunNumber) {
        match self {
            Self::Accepted(run) | Self::Event(run, _) | Self::Frame(run, _, _) | Self::Credit(run, _) => *run = number,
            Self::Hello(_)
            | Self::Register(_)
            | Self::Ready(_)
            | Self::CommandResponse(_)
            | Self::ConfigAck(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => {}
        }
    }

    fn set_number(&mut self, n: u64) {
        match self {
            Self::Event(_, event) => event.seq = n,
            Self::Frame(_, number, _) => *number = n,
            Self::Hello(_)
            | Self::Register(_)
            | Self::Ready(_)
            | Self::Accepted(_)
            | Self::Credit(..)
            | Self::CommandResponse(_)
            | Self::ConfigAck(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => {}
        }
    }

    fn charge(&self) -> u32 {
        Self::charge(self)
    }

    fn ending(&self) -> Ending {
        match self {
            Self::Event(_, event) => match event.kind {
                RunEventKind::Start
                | RunEventKind::Delta(_)
                | RunEventKind::ReasoningDelta(_)
                | RunEventKind::ToolCallDelta(_)
                | RunEventKind::Usage => Ending::No,
                RunEventKind::Complete(_) => Ending::InOrder,
                RunEventKind::Error(_) => Ending::Affordable,
                RunEventKind::Cancelled(_) => Ending::AtOnce,
            },
            Self::Frame(_, _, frame) => match frame {
                TunnelFrame::Head(_) | TunnelFrame::Body { .. } | TunnelFrame::Usage(_) => Ending::No,
                TunnelFrame::End => Ending::InOrder,
                TunnelFrame::Failed(_) => Ending::Affordable,
                TunnelFrame::Cancelled(_) => Ending::AtOnce,
            },
            Self::Hello(_)
            | Self::Register(_)
            | Self::Ready(_)
            | Self::Accepted(_)
            | Self::Credit(..)
            | Self::CommandResponse(_)
            | Self::ConfigAck(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => Ending::No,
        }
    }

    fn cancel(_: RunNumber, _: CancelReason) -> Option<Self> {
        None
    }

    fn try_merge(&mut self, next: Self) -> Result<(), Self> {
        match (self, next) {
            (Self::Event(_, last), Self::Event(run, next)) => match merge_events(last, next) {
                Some(next) => Err(Self::Event(run, next)),
                None => Ok(()),
            },
            (Self::Frame(_, _, last), Self::Frame(run, n, next)) => match merge_frames(last, next) {
                Some(next) => Err(Self::Frame(run, n, next)),
                None => Ok(()),
            },
            (Self::Credit(_, last), Self::Credit(run, next)) => {
                merge_credit(last, next).map_err(|next| Self::Credit(run, next))
            }
            (_, next) => Err(next),
        }
    }
}

impl Outgoing for ToNode {
    fn set_run(&mut self, number: RunNumber) {
        match self {
            Self::Run(request) => request.head.run = number,
            Self::Tunnel(request) => request.head.run = number,
            Self::Chunk(chunk) => chunk.run = number,
            Self::Credit(run, _) | Self::Cancel(run, _) => *run = number,
            Self::HelloAck(_)
            | Self::RegisterResponse(_)
            | Self::ReadyResponse(_)
            | Self::Command(_)
            | Self::ConfigUpdate(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => {}
        }
    }

    fn set_number(&mut self, _: u64) {}

    fn charge(&self) -> u32 {
        Self::charge(self)
    }

    fn ending(&self) -> Ending {
        Ending::No
    }

    fn cancel(number: RunNumber, reason: CancelReason) -> Option<Self> {
        Some(Self::Cancel(number, reason))
    }

    fn try_merge(&mut self, next: Self) -> Result<(), Self> {
        match (self, next) {
            (Self::Credit(_, last), Self::Credit(run, next)) => {
                merge_credit(last, next).map_err(|next| Self::Credit(run, next))
            }
            (_, next) => Err(next),
        }
    }
}

fn merge_credit(last: &mut u32, next: u32) -> Result<(), u32> {
    *last = last.checked_add(next).ok_or(next)?;
    Ok(())
}

/// Joins `next` to `last`, or gives it back.
fn merge_events(last: &mut RunEvent, next: RunEvent) -> Option<RunEvent> {
    if let (RunEventKind::Usage, RunEventKind::Usage, Some(old), Some(new)) =
        (&last.kind, &next.kind, &mut last.usage, next.usage)
    {
        old.update(new);
        return None;
    }
    if last.usage.is_some() || next.usage.is_some() {
        return Some(next);
    }
    match (&mut last.kind, &next.kind) {
        (RunEventKind::Delta(text), RunEventKind::Delta(more))
        | (RunEventKind::ReasoningDelta(text), RunEventKind::ReasoningDelta(more))
            if text.len() + more.len() <= MAX_DELTA =>
        {
            text.push_str(more);
            None
        }
        _ => Some(next),
    }
}

fn merge_frames(last: &mut TunnelFrame, next: TunnelFrame) -> Option<TunnelFrame> {
    match (last, next) {
        (TunnelFrame::Usage(last), TunnelFrame::Usage(next)) => {
            last.update(next);
            None
        }
        (TunnelFrame::Body { bytes, flags }, TunnelFrame::Body { bytes: more, flags: more_flags })
            if is_content(*flags) && is_content(more_flags) && bytes.len() + more.len() <= MAX_CHUNK =>
        {
            *flags = flags.with(more_flags);
            append(bytes, &more);
            None
        }
        (_, next) => Some(next),
    }
}

/// Whole events with output and nothing else. Progress is a matter of the Node alone.
fn is_content(flags: FrameFlags) -> bool {
    flags.without(FrameFlags::PROGRESS) == FrameFlags::CONTENT
}

fn append(bytes: &mut Bytes, more: &[u8]) {
    let mut joined = std::mem::take(bytes).try_into_mut().unwrap_or_else(|shared| {
        // A part of a socket buffer: copied once, with room for what follows.
        let mut own = BytesMut::with_capacity((2 * (shared.len() + more.len())).min(MAX_CHUNK));
        own.extend_from_slice(&shared);
        own
    });
    joined.extend_from_slice(more);
    *bytes = joined.freeze();
}
