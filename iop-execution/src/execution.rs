//! Decides how the outcome of a provider call becomes one terminal.
//!
//! ```text
//!            next()             provider returns / panics / is abandoned
//! Running ───────────► events ────────────────────────────────► terminal ─► None for ever
//!    │ cancel(reason)
//!    ▼
//! Fenced ── nothing is emitted ── provider returns or is abandoned ─► Cancelled(reason)
//! ```
//!
//! An execution polls the provider inside its own `poll_next`: no task, no clock. Whoever drives it owns the close grace:
//! after [`Execution::cancel`] it waits that long for the end, then calls [`Execution::abandon`].
//!
//! Invariant: exactly one terminal, the last item, and never before the provider has returned or was dropped.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use futures_util::FutureExt;

use crate::event::{CancelReason, Completion, RunEvent, RunEventKind};
use crate::failure::{ExecutionFailure, FailureCode, FailureStage, ProviderContacted};
use crate::frame::TunnelFrame;
use crate::pipe::Pipe;
use crate::provider::{Provider, ProviderError};
use crate::request::{RunRequest, TunnelRequest};
use crate::sink::{Emission, EventSink, HeadSink, TunnelEnd};
use crate::usage::Usage;

/// What an execution emits: how a push, an outcome and a failure look in its own item type.
pub trait Emit: Send + 'static {
    /// What the provider pushes.
    type Push: Send + 'static;
    /// What the provider returns on success.
    type Outcome: Send + 'static;
    /// What comes before the provider is polled, if anything.
    fn opening() -> Option<Self::Push>;
    /// The item for a push.
    fn item(seq: u64, push: Self::Push) -> Self;
    /// The terminal for a success.
    fn complete(seq: u64, outcome: Self::Outcome) -> Self;
    /// The terminal for a failure.
    fn failed(seq: u64, failure: ExecutionFailure) -> Self;
    /// The terminal for a cancellation.
    fn cancelled(seq: u64, reason: CancelReason) -> Self;
}

impl Emit for RunEvent {
    type Push = (RunEventKind, Option<Usage>);
    type Outcome = Completion;

    fn opening() -> Option<Self::Push> {
        Some((RunEventKind::Start, None))
    }
    fn item(seq: u64, (kind, usage): Self::Push) -> Self {
        Self { seq, kind, usage }
    }
    fn complete(seq: u64, outcome: Completion) -> Self {
        Self { seq, kind: RunEventKind::Complete(outcome.finish), usage: outcome.usage }
    }
    fn failed(seq: u64, failure: ExecutionFailure) -> Self {
        Self { seq, kind: RunEventKind::Error(failure), usage: None }
    }
    fn cancelled(seq: u64, reason: CancelReason) -> Self {
        Self { seq, kind: RunEventKind::Cancelled(reason), usage: None }
    }
}

impl Emit for TunnelFrame {
    type Push = Self;
    type Outcome = TunnelEnd;

    fn opening() -> Option<Self> {
        None
    }
    fn item(_: u64, push: Self) -> Self {
        push
    }
    fn complete(_: u64, _: TunnelEnd) -> Self {
        Self::End
    }
    fn failed(_: u64, failure: ExecutionFailure) -> Self {
        Self::Failed(failure)
    }
    fn cancelled(_: u64, reason: CancelReason) -> Self {
        Self::Cancelled(reason)
    }
}

type Call<E> = Pin<Box<dyn Future<Output = std::thread::Result<Result<<E as Emit>::Outcome, ProviderError>>> + Send>>;

/// One provider call as a stream of its emissions, fused after the terminal. Dropping it drops the call.
#[must_use = "an execution does nothing unless polled"]
pub struct Execution<E: Emit> {
    pipe: Arc<Pipe<E::Push>>,
    call: Option<Call<E>>,
    outcome: Option<E>,
    opening: Option<E::Push>,
    cancelled: Option<CancelReason>,
    seq: u64,
    begun: bool,
    ended: bool,
}

/// A normalised run as a stream of [`RunEvent`]s.
pub type RunExecution = Execution<RunEvent>;
/// A tunnel as a stream of [`TunnelFrame`]s.
pub type TunnelExecution = Execution<TunnelFrame>;

impl RunExecution {
    /// Calls [`Provider::execute`].
    pub fn run(provider: Arc<dyn Provider>, request: RunRequest) -> Self {
        let pipe: Arc<Pipe<Emission>> = Pipe::new();
        let mut sink = EventSink::new(Arc::clone(&pipe));
        Self::new(pipe, async move { provider.execute(request, &mut sink).await })
    }
}

impl TunnelExecution {
    /// Calls [`Provider::tunnel`].
    pub fn tunnel(provider: Arc<dyn Provider>, request: TunnelRequest) -> Self {
        let pipe = Pipe::new();
        let head = HeadSink::new(Arc::clone(&pipe));
        Self::new(pipe, async move { provider.tunnel(request, head).await })
    }
}

impl<E: Emit> Execution<E> {
    fn new(
        pipe: Arc<Pipe<E::Push>>,
        call: impl Future<Output = Result<E::Outcome, ProviderError>> + Send + 'static,
    ) -> Self {
        Self {
            pipe,
            call: Some(Box::pin(AssertUnwindSafe(call).catch_unwind())),
            outcome: None,
            opening: E::opening(),
            cancelled: None,
            seq: 0,
            begun: false,
            ended: false,
        }
    }

    /// Ends the run for its caller: what waits is dropped, pushes answer `Fenced`, and the terminal will be
    /// `Cancelled(reason)` once the provider has returned or was abandoned. The first reason stands; after the provider's
    /// own end it changes nothing.
    pub fn cancel(&mut self, reason: CancelReason) {
        if !self.ended && self.outcome.is_none() && self.cancelled.is_none() {
            self.cancelled = Some(reason);
            self.opening = None;
            self.pipe.fence();
        }
    }

    /// Drops the provider's future; the terminal follows.
    pub fn abandon(&mut self) {
        if self.call.take().is_some() {
            self.pipe.fence();
            let failure = ProviderError::ended_without_terminal().into_failure();
            self.finish(Ok(Err(ProviderError::new(failure))));
        }
    }

    /// True once the provider has returned or was dropped: its place is free.
    #[must_use]
    pub const fn is_returned(&self) -> bool {
        self.call.is_none()
    }

    /// True once the provider's code has run at all: before that, nothing was asked of a backend.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        self.begun
    }

    /// True once [`Self::cancel`] took effect.
    #[must_use]
    pub const fn is_cancelled(&self) -> bool {
        self.cancelled.is_some()
    }

    /// Pushes that were dropped because they came too late.
    #[must_use]
    pub fn late_pushes(&self) -> u64 {
        self.pipe.dropped()
    }

    fn finish(&mut self, outcome: std::thread::Result<Result<E::Outcome, ProviderError>>) {
        self.seq += 1;
        let seq = self.seq;
        self.outcome = Some(match (self.cancelled, outcome) {
            (Some(reason), _) => E::cancelled(seq, reason),
            (None, Ok(Ok(outcome))) => E::complete(seq, outcome),
            (None, Ok(Err(error))) => E::failed(seq, error.into_failure()),
            (None, Err(_panic)) => E::failed(
                seq,
                ExecutionFailure::new(
                    FailureCode::Internal,
                    FailureStage::Stream,
                    ProviderContacted::Unknown,
                    "the adapter panicked",
                ),
            ),
        });
    }

    fn number(&mut self, push: E::Push) -> E {
        self.seq += 1;
        E::item(self.seq, push)
    }
}

impl<E: Emit> Unpin for Execution<E> {}

impl<E: Emit> Stream for Execution<E> {
    type Item = E;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<E>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        if let Some(push) = this.opening.take() {
            return Poll::Ready(Some(this.number(push)));
        }
        loop {
            if this.outcome.is_none()
                && let Some(push) = this.pipe.pop()
            {
                return Poll::Ready(Some(this.number(push)));
            }
            if let Some(terminal) = this.outcome.take() {
                this.ended = true;
                this.pipe.fence();
                return Poll::Ready(Some(terminal));
            }
            let Some(call) = &mut this.call else {
                this.ended = true;
                return Poll::Ready(None);
            };
            this.begun = true;
            match call.as_mut().poll(cx) {
                Poll::Ready(outcome) => {
                    this.call = None;
                    // What the provider pushed before it returned comes before the terminal.
                    if let Some(push) = this.pipe.pop() {
                        let item = this.number(push);
                        this.call = Some(Box::pin(std::future::ready(outcome)));
                        return Poll::Ready(Some(item));
                    }
                    this.finish(outcome);
                }
                Poll::Pending => {
                    if this.pipe.poll_ready(cx).is_pending() {
                        return Poll::Pending;
                    }
                }
            }
        }
    }
}

impl<E: Emit> fmt::Debug for Execution<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution")
            .field("emitted", &self.seq)
            .field("returned", &self.is_returned())
            .field("cancelled", &self.cancelled)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
