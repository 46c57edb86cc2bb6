//! Decides how a target is probed, and which number an observation gets (WDG-3, WDG-5, WDG-6).
//!
//! A probe asks the adapter alone: it takes no place of the gate and knows nothing of the call that stalled. An adapter that
//! errs, hangs or panics has said nothing: unknown.

use std::fmt;
use std::future::Future;
use std::num::NonZeroU64;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use iop_execution::{Health, Provider, Target};
use tokio::time::timeout;

/// Numbers the finished observations of one connection, from 1. Cheap to clone; clones share the numbers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observations(Arc<AtomicU64>);

impl Observations {
    /// The number of the observation that has finished just now.
    pub(crate) fn finished(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
    }
}

/// A probe that runs.
pub(crate) type Probing = Pin<Box<dyn Future<Output = Health> + Send>>;

/// Whom to probe.
#[derive(Clone)]
pub(crate) struct Probe {
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) target: Target,
    pub(crate) observations: Observations,
}

impl Probe {
    /// Begins a probe. Whoever polls it bounds its time.
    pub(crate) fn begin(&self) -> Probing {
        let (provider, target) = (Arc::clone(&self.provider), self.target.clone());
        let asked = AssertUnwindSafe(async move { provider.probe_health(&target).await }).catch_unwind();
        Box::pin(asked.map(|answer| {
            answer.unwrap_or_else(|_| {
                tracing::error!("an adapter panicked in a probe");
                Health::Unknown
            })
        }))
    }

    /// A whole probe that takes at most this long, with its number.
    pub(crate) async fn observe(&self, limit: Duration) -> (Health, Option<NonZeroU64>) {
        let health = timeout(limit, self.begin()).await.unwrap_or(Health::Unknown);
        (health, self.observations.finished())
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probe").field("target", &self.target).finish_non_exhaustive()
    }
}
