//! Decides how many calls a wrapped provider takes at once.

use std::num::NonZeroU32;
use std::sync::Arc;

use async_trait::async_trait;
use iop_execution::failure::FailureCode;
use iop_execution::{
    Capabilities, CapacityGate, CommandOutput, Completion, EventSink, ExecutionFailure, GatePermit, HeadSink, Health,
    Provider, ProviderCommand, ProviderError, Refreshed, RunRequest, Target, TunnelEnd, TunnelRequest,
};

/// At most this many runs and tunnels of a provider at once; one more is refused as `busy`, at once.
#[derive(Debug)]
pub struct Limit {
    inner: Arc<dyn Provider>,
    limit: NonZeroU32,
    gate: CapacityGate,
}

impl Limit {
    /// Wraps a provider.
    #[must_use]
    pub fn new(inner: Arc<dyn Provider>, limit: NonZeroU32) -> Self {
        Self { inner, limit, gate: CapacityGate::new(limit.get()) }
    }

    /// Calls that run now.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        self.gate.in_use()
    }

    fn enter(&self) -> Result<GatePermit, ProviderError> {
        let busy = || ExecutionFailure::refused(FailureCode::Busy, "the provider has no free place");
        self.gate.try_enter().ok_or_else(|| ProviderError::new(busy()))
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Provider for Limit {
    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        let limit = inner.max_concurrency.map_or(self.limit, |own| own.min(self.limit));
        inner.with_max_concurrency(Some(limit))
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let _permit = self.enter()?;
        self.inner.execute(run, sink).await
    }

    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        let _permit = self.enter()?;
        self.inner.tunnel(request, head).await
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
