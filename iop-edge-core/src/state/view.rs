//! Decides what of the engine is shown: models to clients, everything to operators.

use std::collections::HashMap;
use std::time::Instant;

use iop_execution::NodeId;

use crate::api::ModelListing;
use crate::snapshot::{
    EdgeSnapshot, GroupSnapshot, NodeSnapshot, ProviderHealth, ProviderSnapshot, RunSnapshot, RunStage, Status,
};
use crate::state::fleet::ProviderState;
use crate::state::groups::Group;
use crate::state::{EdgeState, Stage};

impl EdgeState {
    /// Models clients may see, in config order (API-12).
    pub(crate) fn models(&self) -> Vec<ModelListing> {
        let listing = |group: &Group| {
            let candidates = group.model.candidates.iter();
            let states: Vec<_> = candidates.filter_map(|c| Some((c, self.fleet.provider(&c.provider)?))).collect();
            let context = states.iter().filter_map(|(candidate, state)| {
                let listed = state.listed.iter().find(|listed| listed.target == candidate.target)?;
                (listed.context_length != 0).then_some(listed.context_length)
            });
            ModelListing {
                name: group.model.name.clone(),
                created: self.catalog.created(),
                owned_by: "iop".to_owned(),
                context_length: context.min(),
                available: !self.shutting_down && states.iter().any(|(_, state)| state.wire(None).is_some()),
                tools: states.iter().any(|(_, state)| state.tools),
                reasoning: states.iter().any(|(_, state)| state.reasoning),
            }
        };
        self.groups.iter().map(listing).collect()
    }

    /// What is configured and what is in use (EDG-4).
    pub(crate) fn snapshot(&self, now: Instant) -> EdgeSnapshot {
        // One pass over all providers: a search of them for each Node would be felt with a thousand Nodes.
        let mut by_node: HashMap<&NodeId, Vec<&ProviderState>> = HashMap::new();
        self.fleet.providers().iter().for_each(|state| by_node.entry(&state.node).or_default().push(state));
        let nodes = self.catalog.nodes().iter().map(|node| {
            let (connected, draining) = self.registry.node_phase(&node.id);
            let draining = draining || self.held.contains(&node.id);
            let status = match (node.enabled, connected, draining) {
                (false, ..) => Status::Disabled,
                (true, false, _) => Status::Unavailable,
                (true, true, true) => Status::Draining,
                (true, true, false) => Status::Ready,
            };
            let of_node = by_node.get(&node.id).map(Vec::as_slice).unwrap_or_default();
            NodeSnapshot {
                node: node.id.clone(),
                enabled: node.enabled,
                status,
                suspect: of_node.iter().any(|state| state.online.as_ref().is_some_and(|online| online.suspect)),
                config_revision: self.registry.revision_of(&node.id).unwrap_or(0),
                connected,
                draining,
                providers: of_node.iter().map(|state| self.provider_snapshot(state, now)).collect(),
            }
        });
        let groups = self.groups.iter().map(|group| GroupSnapshot {
            model: group.model.name.clone(),
            candidates: group.model.candidates.clone(),
            strategy: group.model.strategy,
            waiting: group.queue.len(),
            oldest_wait: group.queue.oldest().map(|since| now.saturating_duration_since(since)).unwrap_or_default(),
        });
        EdgeSnapshot { nodes: nodes.collect(), models: groups.collect(), late_releases: self.ledger.late_releases() }
    }

    fn provider_snapshot(&self, state: &ProviderState, now: Instant) -> ProviderSnapshot {
        let lowered = state.overlay.is_lowered();
        let status = match (state.enabled, &state.online, state.wire(None)) {
            (false, ..) => Status::Disabled,
            (true, None, _) => Status::Unavailable,
            (true, Some(_), _) if lowered => Status::Unavailable,
            (true, Some(_), None) => Status::Draining,
            (true, Some(_), Some(_)) => Status::Ready,
        };
        ProviderSnapshot {
            provider: state.config.provider_id.clone(),
            enabled: state.enabled,
            status,
            health: match &state.online {
                None => ProviderHealth::Offline,
                Some(_) if lowered => ProviderHealth::Unavailable,
                Some(_) => ProviderHealth::Available,
            },
            cooling: state.wear.cooling(now),
            penalty: state.wear.penalty(now),
            connected: state.online.is_some(),
            configured_capacity: state.config.capacity,
            effective: state.online.as_ref().filter(|_| !lowered).map(|online| online.limits).unwrap_or_default(),
            in_use: self.ledger.counters(&state.node, &state.config.provider_id),
        }
    }

    /// Requests that wait or hold a place, oldest first.
    pub(crate) fn runs(&self, limit: usize, now: Instant) -> Vec<RunSnapshot> {
        let mut attempts: Vec<_> = self.attempts.iter().collect();
        attempts.sort_unstable_by_key(|(attempt, _)| **attempt);
        let shown = attempts.into_iter().filter_map(|(attempt, entry)| {
            let lease = self.ledger.lease(*attempt);
            let stage = match &entry.stage {
                Stage::Waiting(..) => RunStage::Waiting,
                Stage::Reserved => RunStage::Reserved,
                Stage::Dispatched => RunStage::Dispatched,
                Stage::Cancelling if self.ledger.is_quarantined(*attempt) => RunStage::Quarantined,
                Stage::Cancelling => RunStage::Cancelling,
                Stage::Over(_) => return None,
            };
            Some(RunSnapshot {
                run_id: entry.run_id,
                model: entry.wants.model.clone(),
                principal: entry.wants.caller.clone(),
                stage,
                place: lease.map(|lease| (lease.node.clone(), lease.provider.clone())),
                age: now.saturating_duration_since(entry.since),
            })
        });
        shown.take(limit).collect()
    }
}
