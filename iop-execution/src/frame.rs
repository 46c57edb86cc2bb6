//! Decides what a tunnel emits: head, then body and usage, then exactly one end, failure or cancellation.

use std::fmt;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::event::CancelReason;
use crate::failure::ExecutionFailure;
use crate::redact::Len;
use crate::usage::Usage;

/// What the Node's observer saw in a body frame (API-10). Set where the bytes are parsed, used everywhere else.
///
/// A frame with no flag holds comments, or blocks without data; one of a body that is no event stream has none either.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct FrameFlags(u8);

impl FrameFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// Text, reasoning, a refusal or a tool-call fragment.
    pub const CONTENT: Self = Self(1);
    /// An event that carries none of that: role only, empty delta, `choices: []`.
    pub const LIFECYCLE: Self = Self(1 << 1);
    /// A usage report and no choices.
    pub const USAGE: Self = Self(1 << 2);
    /// An error of any shape.
    pub const ERROR: Self = Self(1 << 3);
    /// `[DONE]`.
    pub const TERMINAL: Self = Self(1 << 4);
    /// The event goes on in the next frame; the other flags stand on the last one.
    pub const MORE: Self = Self(1 << 5);
    /// Only on the Node, never on the wire: a usage report that grew, or prompt progress that advanced.
    pub const PROGRESS: Self = Self(1 << 6);
    /// Everything that may cross the wire.
    pub const WIRE: Self = Self(0b0011_1111);

    /// The flags as bits.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The flags with these wire bits; `None` if another bit is set.
    #[must_use]
    pub const fn from_wire(bits: u32) -> Option<Self> {
        if bits & !(Self::WIRE.0 as u32) != 0 { None } else { Some(Self((bits & 0xff) as u8)) }
    }

    /// True if all of `other` are set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// True if any of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Without `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl fmt::Debug for FrameFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::CONTENT, "CONTENT"),
            (Self::LIFECYCLE, "LIFECYCLE"),
            (Self::USAGE, "USAGE"),
            (Self::ERROR, "ERROR"),
            (Self::TERMINAL, "TERMINAL"),
            (Self::MORE, "MORE"),
            (Self::PROGRESS, "PROGRESS"),
        ];
        f.debug_list().entries(names.iter().filter(|(flag, _)| self.contains(*flag)).map(|(_, name)| name)).finish()
    }
}

/// Status and headers of a provider's answer, as far as the allow-list lets them pass.
#[derive(Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "an HTTP head has these two parts")]
pub struct TunnelHead {
    /// The status.
    pub status: StatusCode,
    /// The headers that passed.
    pub headers: HeaderMap,
}

impl TunnelHead {
    /// True if the body is an event stream.
    #[must_use]
    pub fn is_event_stream(&self) -> bool {
        self.headers
            .get(http::header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split(';').next())
            .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream"))
    }
}

impl fmt::Debug for TunnelHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelHead").field("status", &self.status).field("headers", &self.headers.len()).finish()
    }
}

/// One frame of a tunnel.
///
/// A body frame of an event stream holds one or more whole events with the same flags, or a part of one event
/// ([`FrameFlags::MORE`]); of any other body, bytes.
#[derive(Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the closed list of the wire")]
pub enum TunnelFrame {
    /// Status and headers; at most once, first.
    Head(TunnelHead),
    /// Bytes of the body, as the provider sent them.
    Body {
        /// The bytes.
        bytes: Bytes,
        /// What they are.
        flags: FrameFlags,
    },
    /// Counts that the observer read.
    Usage(Usage),
    /// Terminal: the answer is complete.
    End,
    /// Terminal: failure.
    Failed(ExecutionFailure),
    /// Terminal: cancelled.
    Cancelled(CancelReason),
}

impl TunnelFrame {
    /// True for the three terminals.
    #[must_use]
    pub const fn is_terminal(&self) -> bool {
        matches!(self, Self::End | Self::Failed(_) | Self::Cancelled(_))
    }

    /// Bytes of payload, for credit and buffers.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        match self {
            Self::Body { bytes, .. } => bytes.len(),
            Self::Head(_) | Self::Usage(_) | Self::End | Self::Failed(_) | Self::Cancelled(_) => 0,
        }
    }
}

impl fmt::Debug for TunnelFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Head(head) => head.fmt(f),
            Self::Body { bytes, flags } => {
                f.debug_struct("Body").field("bytes", &Len(bytes.len())).field("flags", flags).finish()
            }
            Self::Usage(usage) => usage.fmt(f),
            Self::End => f.write_str("End"),
            Self::Failed(failure) => f.debug_tuple("Failed").field(failure).finish(),
            Self::Cancelled(reason) => f.debug_tuple("Cancelled").field(reason).finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_never_crosses_the_wire() {
        // API-10
        assert!(FrameFlags::from_wire(u32::from(FrameFlags::PROGRESS.bits())).is_none());
        assert!(FrameFlags::from_wire(1 << 9).is_none());
        let flags = FrameFlags::CONTENT.with(FrameFlags::MORE);
        assert_eq!(FrameFlags::from_wire(u32::from(flags.bits())), Some(flags));
        assert!(!FrameFlags::WIRE.contains(FrameFlags::PROGRESS));
    }

    #[test]
    fn debug_prints_no_payload() {
        let frame = TunnelFrame::Body { bytes: Bytes::from_static(b"SENTINEL"), flags: FrameFlags::CONTENT };
        assert_eq!(format!("{frame:?}"), r#"Body { bytes: [8 bytes], flags: ["CONTENT"] }"#);
    }
}
