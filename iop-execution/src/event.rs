//! Decides what a normalised run emits: numbered events and exactly one terminal.

use std::fmt;

use crate::closed_list as closed;
use crate::failure::ExecutionFailure;
use crate::redact::Len;
use crate::usage::Usage;

closed! {
    /// Who ended a run that was cancelled.
    CancelReason {
        /// The client left or asked for it.
        Client = "client",
        /// The Edge's hard deadline.
        EdgeDeadline = "edge_deadline",
        /// The Edge withdrew the attempt.
        Withdrawn = "withdrawn",
        /// The Edge's receive pool was exhausted.
        ReceivePool = "receive_pool",
        /// The client read nothing for too long.
        SlowClient = "slow_client",
        /// The Node's drain deadline.
        Drain = "drain",
    }
}

closed! {
    /// Why generation stopped: OpenAI's closed set.
    FinishReason {
        /// A natural stop or a stop sequence.
        Stop = "stop",
        /// The token limit.
        Length = "length",
        /// The model calls tools.
        ToolCalls = "tool_calls",
        /// The provider's filter.
        ContentFilter = "content_filter",
        /// The deprecated single function call.
        FunctionCall = "function_call",
    }
}

/// A successful end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "constructed by every adapter")]
pub struct Completion {
    /// Why generation stopped.
    pub finish: FinishReason,
    /// Final counts, if the provider reported them with the end.
    pub usage: Option<Usage>,
}

impl Completion {
    /// An end without counts.
    #[must_use]
    pub const fn new(finish: FinishReason) -> Self {
        Self { finish, usage: None }
    }

    /// With the final counts.
    #[must_use]
    pub const fn with_usage(mut self, usage: Option<Usage>) -> Self {
        self.usage = usage;
        self
    }
}

/// A piece of a tool call.
#[derive(Clone, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "constructed by every adapter")]
pub struct ToolCallDelta {
    /// Which call of the answer, from 0.
    pub index: u32,
    /// Its id, on the first piece.
    pub id: Option<String>,
    /// The function's name, on the first piece.
    pub name: Option<String>,
    /// More of the arguments' JSON text; may be empty.
    pub arguments: String,
}

impl fmt::Debug for ToolCallDelta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolCallDelta")
            .field("index", &self.index)
            .field("arguments", &Len(self.arguments.len()))
            .finish_non_exhaustive()
    }
}

/// One event of a run. Numbers start at 1 and have no gaps (EXE-5).
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the shape is the contract of EXE-5")]
pub struct RunEvent {
    /// Its number.
    pub seq: u64,
    /// What happened.
    pub kind: RunEventKind,
    /// Counts that came with it.
    pub usage: Option<Usage>,
}

/// What happened in a run.
#[derive(Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the closed list of EXE-5")]
pub enum RunEventKind {
    /// The run began.
    Start,
    /// More text.
    Delta(String),
    /// More reasoning text.
    ReasoningDelta(String),
    /// A piece of a tool call.
    ToolCallDelta(ToolCallDelta),
    /// Counts alone; they are in [`RunEvent::usage`].
    Usage,
    /// Terminal: success.
    Complete(FinishReason),
    /// Terminal: failure.
    Error(ExecutionFailure),
    /// Terminal: cancelled.
    Cancelled(CancelReason),
}

impl RunEventKind {
    /// True for the three terminals.
    #[must_use]
    pub const fn is_terminal(&self) -> bool {
        matches!(self, Self::Complete(_) | Self::Error(_) | Self::Cancelled(_))
    }

    /// Bytes of payload, for credit and buffers.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        match self {
            Self::Delta(text) | Self::ReasoningDelta(text) => text.len(),
            Self::ToolCallDelta(call) => {
                call.arguments.len()
                    + call.id.as_ref().map_or(0, String::len)
                    + call.name.as_ref().map_or(0, String::len)
            }
            Self::Start | Self::Usage | Self::Complete(_) | Self::Error(_) | Self::Cancelled(_) => 0,
        }
    }
}

impl fmt::Debug for RunEventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("Start"),
            Self::Delta(text) => f.debug_tuple("Delta").field(&Len(text.len())).finish(),
            Self::ReasoningDelta(text) => f.debug_tuple("ReasoningDelta").field(&Len(text.len())).finish(),
            Self::ToolCallDelta(call) => call.fmt(f),
            Self::Usage => f.write_str("Usage"),
            Self::Complete(finish) => f.debug_tuple("Complete").field(finish).finish(),
            Self::Error(failure) => f.debug_tuple("Error").field(failure).finish(),
            Self::Cancelled(reason) => f.debug_tuple("Cancelled").field(reason).finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_prints_lengths_and_never_text() {
        let event = RunEvent { seq: 1, kind: RunEventKind::Delta("SENTINEL".into()), usage: None };
        let text = format!("{event:?}");
        assert!(text.contains("[8 bytes]") && !text.contains("SENTINEL"), "{text}");
        let call = ToolCallDelta { name: Some("SENTINEL".into()), arguments: "SENTINEL".into(), ..Default::default() };
        assert!(!format!("{call:?}").contains("SENTINEL"));
    }
}
