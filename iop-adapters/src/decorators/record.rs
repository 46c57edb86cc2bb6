//! Decides what is remembered of a wrapped provider's calls: kinds, sizes and times of what it emitted, never a payload.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use iop_execution::{
    Capabilities, CommandOutput, Completion, EventSink, FailureCode, HeadSink, Health, Provider, ProviderCommand,
    ProviderError, Refreshed, RunId, RunRequest, Target, TunnelEnd, TunnelRequest,
};
use tokio::time::Instant;

use super::relay::{self, Emitted, Hook};

/// Most calls that are remembered, and most events of each; the oldest calls and the latest events are left out.
pub const MAX_RECORDED: usize = 1_024;

/// Which kind of call it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the two kinds of calls")]
pub enum CallKind {
    /// `execute`.
    Run,
    /// `tunnel`.
    Tunnel,
}

/// One call.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// The run.
    pub run_id: RunId,
    /// Which kind of call.
    pub kind: CallKind,
    /// What it emitted, up to [`MAX_RECORDED`].
    pub events: Vec<RecordedEvent>,
    /// When it ended, since its beginning; `None` when it was dropped.
    pub ended: Option<Duration>,
    /// How it failed, if it did.
    pub failure: Option<FailureCode>,
}

/// One emission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedEvent {
    /// Since the beginning of the call.
    pub at: Duration,
    /// Its kind: `delta`, `head`, `body`, …
    pub what: &'static str,
    /// Bytes of its payload.
    pub bytes: usize,
}

/// A provider whose calls are remembered.
#[derive(Debug)]
pub struct Record {
    inner: Arc<dyn Provider>,
    calls: Mutex<VecDeque<Recorded>>,
}

impl Record {
    /// Wraps a provider.
    #[must_use]
    pub const fn new(inner: Arc<dyn Provider>) -> Self {
        Self { inner, calls: Mutex::new(VecDeque::new()) }
    }

    /// The calls that are over, oldest first.
    #[must_use]
    pub fn calls(&self) -> Vec<Recorded> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn begin(&self, run_id: RunId, kind: CallKind) -> Recording<'_> {
        let call = Recorded { run_id, kind, events: Vec::new(), ended: None, failure: None };
        Recording { calls: &self.calls, began: Instant::now(), call: Some(call) }
    }
}

/// A call that runs. It is remembered when it ends, also by being dropped.
struct Recording<'a> {
    calls: &'a Mutex<VecDeque<Recorded>>,
    began: Instant,
    call: Option<Recorded>,
}

impl Recording<'_> {
    fn end<T>(mut self, outcome: &Result<T, ProviderError>) {
        let ended = self.began.elapsed();
        if let Some(call) = &mut self.call {
            call.ended = Some(ended);
            call.failure = outcome.as_ref().err().filter(|error| !error.is_fenced()).map(|error| error.failure().code);
        }
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        if calls.len() == MAX_RECORDED {
            calls.pop_front();
        }
        calls.push_back(call);
    }
}

#[async_trait]
impl Hook for Recording<'_> {
    async fn before(&mut self, emitted: Emitted) -> Result<(), ProviderError> {
        let at = self.began.elapsed();
        if let Some(call) = self.call.as_mut().filter(|call| call.events.len() < MAX_RECORDED) {
            call.events.push(RecordedEvent { at, what: emitted.what, bytes: emitted.bytes });
        }
        Ok(())
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Provider for Record {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let mut recording = self.begin(run.run_id, CallKind::Run);
        let outcome = relay::run(&self.inner, run, sink, &mut recording).await;
        recording.end(&outcome);
        outcome
    }

    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        let mut recording = self.begin(request.run_id, CallKind::Tunnel);
        let outcome = relay::tunnel(&self.inner, request, head, &mut recording).await;
        recording.end(&outcome);
        outcome
    }

    async fn probe_health(&self, target: &Target) -> Health {
        self.inner.probe_health(target).await
    }

    async fn command(&self, command: ProviderCommand) -> Result<CommandOutput, ProviderError> {
        self.inner.command(command).await
    }

    async fn start(&self) -> Result<(), ProviderError> {
        self.inner.start().await
    }

    async fn refresh(&self) -> Refreshed {
        self.inner.refresh().await
    }

    async fn stop(&self) {
        self.inner.stop().await;
    }
}
