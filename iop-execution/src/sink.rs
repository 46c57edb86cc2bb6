//! Decides what an adapter may emit, and in which order: events of a run; head, then body of a tunnel.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::event::{RunEventKind, ToolCallDelta};
use crate::frame::{FrameFlags, TunnelFrame, TunnelHead};
use crate::pipe::Pipe;
use crate::usage::Usage;

/// The run is over for its caller: nothing that is pushed now will be seen. Return at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the run was fenced")]
pub struct Fenced;

pub(crate) type Emission = (RunEventKind, Option<Usage>);

async fn push<T>(pipe: &Pipe<T>, item: T, bytes: usize) -> Result<(), Fenced> {
    let mut slot = Some(item);
    poll_fn(|cx| pipe.poll_push(cx, &mut slot, bytes)).await.map_err(|()| Fenced)
}

/// Where a provider pushes the events of one run. It has no terminal method: the end is the return value.
///
/// Cancel safety: a push that is dropped before it is ready has pushed nothing.
pub struct EventSink {
    pipe: Arc<Pipe<Emission>>,
}

impl EventSink {
    pub(crate) const fn new(pipe: Arc<Pipe<Emission>>) -> Self {
        Self { pipe }
    }

    async fn emit(&mut self, kind: RunEventKind, usage: Option<Usage>) -> Result<(), Fenced> {
        let bytes = kind.payload_bytes();
        push(&self.pipe, (kind, usage), bytes).await
    }

    /// More text.
    ///
    /// # Errors
    /// [`Fenced`] when the run is over.
    pub async fn delta(&mut self, text: impl Into<String> + Send) -> Result<(), Fenced> {
        self.emit(RunEventKind::Delta(text.into()), None).await
    }

    /// More reasoning text.
    ///
    /// # Errors
    /// [`Fenced`] when the run is over.
    pub async fn reasoning_delta(&mut self, text: impl Into<String> + Send) -> Result<(), Fenced> {
        self.emit(RunEventKind::ReasoningDelta(text.into()), None).await
    }

    /// A piece of a tool call.
    ///
    /// # Errors
    /// [`Fenced`] when the run is over.
    pub async fn tool_call(&mut self, call: ToolCallDelta) -> Result<(), Fenced> {
        self.emit(RunEventKind::ToolCallDelta(call), None).await
    }

    /// Counts as the provider reported them.
    ///
    /// # Errors
    /// [`Fenced`] when the run is over.
    pub async fn usage(&mut self, usage: Usage) -> Result<(), Fenced> {
        self.emit(RunEventKind::Usage, Some(usage)).await
    }

    /// Ready once the run is over for its caller. Owned: hold it beside a push.
    pub fn cancelled(&self) -> WaitForCancellationFutureOwned {
        self.pipe.cancelled().clone().cancelled_owned()
    }

    /// True once the run is over for its caller.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.pipe.cancelled().is_cancelled()
    }
}

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventSink").field("cancelled", &self.is_cancelled()).finish()
    }
}

/// Where a provider pushes the head of a tunnel's answer; that gives the [`BodySink`].
pub struct HeadSink {
    pipe: Arc<Pipe<TunnelFrame>>,
}

impl HeadSink {
    pub(crate) const fn new(pipe: Arc<Pipe<TunnelFrame>>) -> Self {
        Self { pipe }
    }

    /// Sends status and headers.
    ///
    /// # Errors
    /// [`Fenced`] when the run is over.
    pub async fn head(self, status: StatusCode, headers: HeaderMap) -> Result<BodySink, Fenced> {
        push(&self.pipe, TunnelFrame::Head(TunnelHead { status, headers }), 0).await?;
        Ok(BodySink { pipe: self.pipe })
    }

    /// Ready once the run is over for its caller.
    pub fn cancelled(&self) -> WaitForCancellationFutureOwned {
        self.pipe.cancelled().clone().cancelled_owned()
    }
}

impl fmt::Debug for HeadSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeadSink").field("cancelled", &self.pipe.cancelled().is_cancelled()).finish()
    }
}

/// Where a provider pushes the body of a tunnel's answer.
///
/// Cancel safety: a push that is dropped before it is ready has pushed nothing.
pub struct BodySink {
    pipe: Arc<Pipe<TunnelFrame>>,
}

impl BodySink {
    /// More bytes, with what the observer saw in them.
    ///
    /// # Errors
    /// [`Fenced`] when the run is over.
    pub async fn data(&mut self, bytes: Bytes, flags: FrameFlags) -> Result<(), Fenced> {
        let len = bytes.len();
        push(&self.pipe, TunnelFrame::Body { bytes, flags }, len).await
    }

    /// Counts that the observer read.
    ///
    /// # Errors
    /// [`Fenced`] when the run is over.
    pub async fn usage(&mut self, usage: Usage) -> Result<(), Fenced> {
        push(&self.pipe, TunnelFrame::Usage(usage), 0).await
    }

    /// The answer is complete. Only this makes a [`TunnelEnd`], so a tunnel can't end well before its head.
    pub fn finish(self) -> TunnelEnd {
        TunnelEnd(())
    }

    /// Ready once the run is over for its caller.
    pub fn cancelled(&self) -> WaitForCancellationFutureOwned {
        self.pipe.cancelled().clone().cancelled_owned()
    }
}

impl fmt::Debug for BodySink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodySink").field("cancelled", &self.pipe.cancelled().is_cancelled()).finish()
    }
}

/// Proof that a tunnel's head was sent and its body is complete.
#[derive(Debug)]
#[must_use]
pub struct TunnelEnd(());
