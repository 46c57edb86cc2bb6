//! Decides which run a message belongs to, and what it costs of that run's credit.

use super::{RunNumber, ToEdge, ToNode};
use crate::limits::MIN_CHARGE;
use iop_execution::{RunEventKind, TunnelFrame};

/// `max(payload, MIN_CHARGE)`.
fn charge_of(payload: usize) -> u32 {
    u32::try_from(payload).unwrap_or(u32::MAX).max(MIN_CHARGE)
}

impl ToEdge {
    /// The run it belongs to.
    #[must_use]
    pub const fn run(&self) -> Option<RunNumber> {
        match self {
            Self::Accepted(run) | Self::Event(run, _) | Self::Frame(run, _, _) | Self::Credit(run, _) => Some(*run),
            Self::Hello(_)
            | Self::Register(_)
            | Self::Ready(_)
            | Self::CommandResponse(_)
            | Self::ConfigAck(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => None,
        }
    }

    /// What it costs of its run's credit, in bytes (WIR-7): terminals, failures, usage and all that is no output cost 0.
    #[must_use]
    pub fn charge(&self) -> u32 {
        match self {
            Self::Event(_, event) => match &event.kind {
                RunEventKind::Start
                | RunEventKind::Delta(_)
                | RunEventKind::ReasoningDelta(_)
                | RunEventKind::ToolCallDelta(_) => charge_of(event.kind.payload_bytes()),
                RunEventKind::Usage
                | RunEventKind::Complete(_)
                | RunEventKind::Error(_)
                | RunEventKind::Cancelled(_) => 0,
            },
            Self::Frame(_, _, frame) => match frame {
                TunnelFrame::Head(_) | TunnelFrame::Body { .. } => charge_of(frame.payload_bytes()),
                TunnelFrame::Usage(_) | TunnelFrame::End | TunnelFrame::Failed(_) | TunnelFrame::Cancelled(_) => 0,
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
            | Self::Goodbye(_) => 0,
        }
    }
}

impl ToNode {
    /// The run it belongs to.
    #[must_use]
    pub const fn run(&self) -> Option<RunNumber> {
        match self {
            Self::Run(request) => Some(request.head.run),
            Self::Tunnel(request) => Some(request.head.run),
            Self::Chunk(chunk) => Some(chunk.run),
            Self::Credit(run, _) | Self::Cancel(run, _) => Some(*run),
            Self::HelloAck(_)
            | Self::RegisterResponse(_)
            | Self::ReadyResponse(_)
            | Self::Command(_)
            | Self::ConfigUpdate(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => None,
        }
    }

    /// What it costs of its run's credit, in bytes (WIR-7): only pieces of a request body cost anything.
    #[must_use]
    pub fn charge(&self) -> u32 {
        match self {
            Self::Chunk(chunk) => charge_of(chunk.data.len()),
            Self::Run(_)
            | Self::Tunnel(_)
            | Self::Credit(..)
            | Self::Cancel(..)
            | Self::HelloAck(_)
            | Self::RegisterResponse(_)
            | Self::ReadyResponse(_)
            | Self::Command(_)
            | Self::ConfigUpdate(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => 0,
        }
    }
}
