//! Decides what the state of an Edge looks like from outside: plain values, taken at one instant (EDG-4).

use std::time::Duration;

use iop_execution::{ModelName, NodeId, ProviderId};

use crate::state::{PlaceCounters, PlaceLimits};

/// The whole Edge.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EdgeSnapshot {
    /// Every configured Node, in config order; offline ones too.
    pub nodes: Vec<NodeSnapshot>,
    /// Every model, in config order.
    pub models: Vec<GroupSnapshot>,
    /// Releases of places that found nothing to release (LEA-4).
    pub late_releases: u64,
}

impl EdgeSnapshot {
    /// A provider by id.
    #[must_use]
    pub fn provider(&self, id: &ProviderId) -> Option<&ProviderSnapshot> {
        self.nodes.iter().flat_map(|node| &node.providers).find(|provider| provider.provider == *id)
    }

    /// True if nobody holds a place and nobody waits.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let mut providers = self.nodes.iter().flat_map(|node| &node.providers);
        providers.all(|provider| provider.in_use == PlaceCounters::default())
            && self.models.iter().all(|model| model.waiting == 0)
    }
}

/// One Node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeSnapshot {
    /// Its id.
    pub node: NodeId,
    /// It may register.
    pub enabled: bool,
    /// It is ready; a connection that is not ready does not show (REG-2).
    pub connected: bool,
    /// It takes no new work.
    pub draining: bool,
    /// Its providers, in config order.
    pub providers: Vec<ProviderSnapshot>,
}

/// One provider.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProviderSnapshot {
    /// Its id.
    pub provider: ProviderId,
    /// It may be used.
    pub enabled: bool,
    /// Its Node is ready and reported it.
    pub connected: bool,
    /// Configured places; 0 = what the backend says.
    pub configured_capacity: u32,
    /// Places it has now; 0 while offline (LEA-8).
    pub effective: PlaceLimits,
    /// Places taken.
    pub in_use: PlaceCounters,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupSnapshot {
    /// Its public name.
    pub model: ModelName,
    /// Requests that wait.
    pub waiting: usize,
    /// How long the one that came first has waited.
    pub oldest_wait: Duration,
}
