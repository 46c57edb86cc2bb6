//! Decides what the state of an Edge looks like from outside: plain values, taken at one instant (EDG-4).

use std::time::Duration;

use iop_execution::closed_list as closed;
use iop_execution::{ModelName, NodeId, Principal, ProviderId, RunId};

use crate::catalog::{Candidate, Strategy};
use crate::state::{PlaceCounters, PlaceLimits};

closed! {
    /// Where a Node or a provider stands.
    Status {
        /// Takes new work.
        Ready = "ready",
        /// Finishes what runs, takes no new work.
        Draining = "draining",
        /// Not connected, not reported by its Node, or lowered by evidence.
        Unavailable = "unavailable",
        /// Configured not to be used.
        Disabled = "disabled",
    }
}

closed! {
    /// What is known of a provider's health.
    ProviderHealth {
        /// Nothing speaks against it.
        Available = "available",
        /// Evidence lowered it.
        Unavailable = "unavailable",
        /// Its Node is not ready, or does not report it.
        Offline = "offline",
    }
}

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
    /// Where it stands.
    pub status: Status,
    /// It has left a question unanswered and sent nothing since: new work prefers other Nodes (FEN-7).
    pub suspect: bool,
    /// Revision of the config it has in force; 0 = it has none.
    pub config_revision: u64,
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
    /// Where it stands.
    pub status: Status,
    /// What is known of its health.
    pub health: ProviderHealth,
    /// It said that it is busy: nothing new for it for this long (SEL-4).
    pub cooling: Option<Duration>,
    /// Recent failures, as load in thousandths of its capacity (SEL-4).
    pub penalty: u32,
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
    /// How it can be served.
    pub candidates: Vec<Candidate>,
    /// How a candidate is chosen; none = by the engine's own policy.
    pub strategy: Option<Strategy>,
    /// Requests that wait.
    pub waiting: usize,
    /// How long the one that came first has waited.
    pub oldest_wait: Duration,
}

closed! {
    /// How far a request is.
    RunStage {
        /// It waits for a place.
        Waiting = "waiting",
        /// It has a place, and is about to be sent.
        Reserved = "reserved",
        /// It was sent.
        Dispatched = "dispatched",
        /// It ended for its client; its place waits for the Node (LEA-6).
        Cancelling = "cancelling",
        /// As cancelling, and the Node has not answered in time.
        Quarantined = "quarantined",
    }
}

/// One request that waits or holds a place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunSnapshot {
    /// The run.
    pub run_id: RunId,
    /// The model that was asked for; none = a direct address.
    pub model: Option<ModelName>,
    /// Who asked.
    pub principal: Option<Principal>,
    /// How far it is.
    pub stage: RunStage,
    /// Where it is, once it has a place.
    pub place: Option<(NodeId, ProviderId)>,
    /// Since it came.
    pub age: Duration,
}
