//! Decides which faults a wrapped provider shows, where in its answer, by plan: for tests and drills.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use iop_execution::failure::FailureStage;
use iop_execution::{
    Capabilities, CommandOutput, Completion, EventSink, ExecutionFailure, HeadSink, Health, Provider, ProviderCommand,
    ProviderError, Refreshed, RunRequest, Target, TunnelEnd, TunnelRequest,
};

use super::relay::{self, Emitted, Hook};

/// Where in a call a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the three places there are")]
pub enum FaultPoint {
    /// Before the provider is called.
    BeforeCall,
    /// After this many events or frames were passed on.
    AfterEvents(u64),
    /// In the place of the end.
    AtEnd,
}

/// What happens there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultAction {
    /// The call goes on this much later.
    Delay(Duration),
    /// The call goes silent for ever; only a cancel or drop ends it.
    Stall,
    /// The connection to the backend breaks.
    Cut,
    /// The call ends with this failure.
    Error(ExecutionFailure),
}

/// One fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "a place, an action, and how often")]
pub struct FaultPlan {
    /// Where.
    pub at: FaultPoint,
    /// What.
    pub action: FaultAction,
    /// In how many calls, from the first one on; `None` for all.
    pub calls: Option<u64>,
}

/// A provider with faults by plan.
#[derive(Debug)]
pub struct Fault {
    inner: Arc<dyn Provider>,
    plan: Vec<FaultPlan>,
    calls: AtomicU64,
}

impl Fault {
    /// Wraps a provider. Faults at the same place happen in order.
    #[must_use]
    pub const fn new(inner: Arc<dyn Provider>, plan: Vec<FaultPlan>) -> Self {
        Self { inner, plan, calls: AtomicU64::new(0) }
    }

    fn strike(&self) -> Strike<'_> {
        Strike { plan: &self.plan, call: self.calls.fetch_add(1, Ordering::Relaxed), passed: 0 }
    }
}

/// The faults of one call.
struct Strike<'a> {
    plan: &'a [FaultPlan],
    call: u64,
    passed: u64,
}

impl Strike<'_> {
    async fn at(&self, point: FaultPoint) -> Result<(), ProviderError> {
        let due = |fault: &&FaultPlan| fault.at == point && fault.calls.is_none_or(|calls| self.call < calls);
        for fault in self.plan.iter().filter(due) {
            match &fault.action {
                FaultAction::Delay(time) => tokio::time::sleep(*time).await,
                FaultAction::Stall => std::future::pending().await,
                FaultAction::Cut if point == FaultPoint::BeforeCall => return Err(ProviderError::unreachable()),
                FaultAction::Cut => return Err(ProviderError::broken(FailureStage::Stream)),
                FaultAction::Error(failure) => return Err(ProviderError::new(failure.clone())),
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Hook for Strike<'_> {
    async fn before(&mut self, emitted: Emitted) -> Result<(), ProviderError> {
        self.at(FaultPoint::AfterEvents(self.passed)).await?;
        self.passed += 1;
        if emitted.terminal { self.at(FaultPoint::AtEnd).await } else { Ok(()) }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Provider for Fault {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let mut strike = self.strike();
        relay::unless_cancelled(sink.cancelled(), strike.at(FaultPoint::BeforeCall)).await?;
        relay::run(&self.inner, run, sink, &mut strike).await
    }

    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        let mut strike = self.strike();
        relay::unless_cancelled(head.cancelled(), strike.at(FaultPoint::BeforeCall)).await?;
        relay::tunnel(&self.inner, request, head, &mut strike).await
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
