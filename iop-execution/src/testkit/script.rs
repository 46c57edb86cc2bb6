//! Decides what a scripted provider does in one call, step by step.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use crate::event::{FinishReason, ToolCallDelta};
use crate::failure::ExecutionFailure;
use crate::frame::FrameFlags;
use crate::provider::ProviderError;
use crate::usage::Usage;

/// What a scripted provider does in one call: steps in order, then a successful end.
///
/// The same script serves runs and tunnels: in a tunnel, text, reasoning, tool calls and usage become OpenAI chat chunks
/// with the flags an observer would set, after a head of status 200 with `text/event-stream`.
#[derive(Debug, Clone, Default)]
pub struct Script {
    pub(super) steps: Vec<Step>,
    pub(super) finish: Option<FinishReason>,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Delta(String),
    Reasoning(String),
    ToolCall(ToolCallDelta),
    Usage(Usage),
    Head { status: StatusCode, content_type: &'static str },
    Frame { bytes: Bytes, flags: FrameFlags },
    Pause,
    Wait(Duration),
    Hang,
    Linger(Duration),
    IgnoreCancel,
    Fail(Box<ExecutionFailure>),
    Panic,
}

impl Script {
    /// Ends at once with `stop`.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Says this text and ends with `stop`.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self::new().delta(text)
    }

    fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    /// Pushes text.
    #[must_use]
    pub fn delta(self, text: impl Into<String>) -> Self {
        self.step(Step::Delta(text.into()))
    }

    /// Pushes reasoning text.
    #[must_use]
    pub fn reasoning(self, text: impl Into<String>) -> Self {
        self.step(Step::Reasoning(text.into()))
    }

    /// Pushes a piece of a tool call.
    #[must_use]
    pub fn tool_call(self, call: ToolCallDelta) -> Self {
        self.step(Step::ToolCall(call))
    }

    /// Reports counts.
    #[must_use]
    pub fn usage(self, usage: Usage) -> Self {
        self.step(Step::Usage(usage))
    }

    /// Tunnels only: sends this head instead of the usual one. A run skips it.
    #[must_use]
    pub fn head(self, status: StatusCode, content_type: &'static str) -> Self {
        self.step(Step::Head { status, content_type })
    }

    /// Tunnels only: sends these bytes with these flags. A run skips it.
    #[must_use]
    pub fn frame(self, bytes: impl Into<Bytes>, flags: FrameFlags) -> Self {
        self.step(Step::Frame { bytes: bytes.into(), flags })
    }

    /// Waits for one [`ScriptHandle::release`](super::ScriptHandle::release), or for the cancel, which ends the call.
    #[must_use]
    pub fn pause(self) -> Self {
        self.step(Step::Pause)
    }

    /// Waits this long on tokio's clock, or for the cancel, which ends the call.
    #[must_use]
    pub fn wait(self, time: Duration) -> Self {
        self.step(Step::Wait(time))
    }

    /// Emits nothing more and waits for the cancel, which ends the call at once.
    #[must_use]
    pub fn hang(self) -> Self {
        self.step(Step::Hang)
    }

    /// Emits nothing more, waits for the cancel, and returns only this much later: a backend that is slow to stop.
    #[must_use]
    pub fn hang_then_linger(self, time: Duration) -> Self {
        self.step(Step::Linger(time))
    }

    /// Emits nothing more and never returns, whatever happens: only dropping the call ends it.
    #[must_use]
    pub fn ignore_cancel(self) -> Self {
        self.step(Step::IgnoreCancel)
    }

    /// Ends with this error.
    #[must_use]
    pub fn fail(self, error: ProviderError) -> Self {
        self.step(Step::Fail(Box::new(error.into_failure())))
    }

    /// Panics.
    #[must_use]
    pub fn panic(self) -> Self {
        self.step(Step::Panic)
    }

    /// Ends with this finish reason instead of `stop`.
    #[must_use]
    pub const fn finish(mut self, reason: FinishReason) -> Self {
        self.finish = Some(reason);
        self
    }

    pub(super) fn finish_reason(&self) -> FinishReason {
        self.finish.unwrap_or(FinishReason::Stop)
    }
}
