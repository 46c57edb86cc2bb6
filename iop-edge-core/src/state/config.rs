//! Decides what a new config does to what runs (CFG-2), and what a Node is told of it (REG-7).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_execution::NodeId;
use iop_wire::{CloseCode, ConfigAck, NodeConfigPayload, ToNode};

use crate::api::{ApplyError, ConfigChange, UnknownNode};
use crate::catalog::{Catalog, ModelGroup, NodeEntry};
use crate::observe::{Observation, Violation};
use crate::state::EdgeState;
use crate::state::effect::{EdgeNodeEvent, Effect};
use crate::state::fleet;
use crate::state::handshake::RETRY_UNAVAILABLE;
use crate::state::id::ConnectionId;
use crate::state::push::Acked;

impl EdgeState {
    /// Replaces the config. Places that are taken stay taken under the config they were admitted with; who waits is resolved
    /// again under the new one.
    pub(crate) fn apply_config(&mut self, catalog: Arc<Catalog>, now: Instant) -> Result<ConfigChange, ApplyError> {
        self.handle_timeout(now);
        if self.shutting_down {
            return Err(ApplyError::ShuttingDown);
        }
        if catalog.revision() <= self.catalog.revision() {
            return Err(ApplyError::NotNewer { current: self.catalog.revision() });
        }
        let change = difference(&self.catalog, &catalog);
        self.catalog = Arc::clone(&catalog);
        self.credentials_applied(&catalog, now);
        self.fleet.apply(&catalog);
        self.held.retain(|node| catalog.node(node).is_some());
        for node in &self.held {
            self.fleet.set_in_service(node, false);
        }
        // Before any connection is closed: who waits finds what there is now, not what there was.
        self.regroup(now);
        for connection in self.registry.ids() {
            let Some(node) = self.registry.node_of(connection).cloned() else { continue };
            // Its leases are released by this. A disabled one may come back, and one whose token was revoked.
            match self.catalog.node(&node).map(|entry| entry.enabled && entry.token.is_some()) {
                None => self.close(connection, CloseCode::RemovedFromConfig, Duration::ZERO, now),
                Some(false) => self.close(connection, CloseCode::Closed, RETRY_UNAVAILABLE, now),
                Some(true) => {}
            }
        }
        self.recheck_records(now);
        for connection in self.registry.ids() {
            self.push_config(connection);
            self.push_credentials(connection);
        }
        Ok(change)
    }

    /// Sends a ready Node its config, unless that is what it has or will have.
    pub(super) fn push_config(&mut self, connection: ConnectionId) {
        let catalog = Arc::clone(&self.catalog);
        let Some((push, claim)) = self.registry.push(connection) else { return };
        let Some(entry) = catalog.node(&claim.node) else { return };
        let config = catalog.node_config(entry);
        if config.providers == push.latest().unwrap_or(&claim.in_force).providers {
            return;
        }
        let next = push.want(Arc::new(config));
        let node = claim.node.clone();
        self.send_config(connection, &node, next);
    }

    fn send_config(&mut self, connection: ConnectionId, node: &NodeId, config: Option<Arc<NodeConfigPayload>>) {
        if let Some(config) = config {
            let update = self.config_update(connection, NodeConfigPayload::clone(&config));
            let message = Box::new(ToNode::ConfigUpdate(update));
            self.fleet.pushed(node, Some(config));
            self.effects.push_back(Effect::Send { connection, message });
        }
    }

    /// What became of a config push, or news of what the Node's providers offer.
    pub(crate) fn handle_config_ack(&mut self, connection: ConnectionId, ack: ConfigAck, now: Instant) {
        self.handle_timeout(now);
        let Some((push, claim)) = self.registry.push(connection) else {
            return self.violation(connection, Violation::State, now);
        };
        let Ok(acked) = push.acked(&ack, claim.in_force.revision) else {
            return self.violation(connection, Violation::State, now);
        };
        let (news, applied) = match &acked {
            Acked::Applied(config) => {
                claim.in_force = Arc::clone(config);
                (true, Some(true))
            }
            Acked::Refused => (false, Some(false)),
            Acked::Offers => (!ack.providers.is_empty(), None),
        };
        let next = push.next();
        let claim = claim.clone();
        if news && fleet::check(&claim.in_force.providers, &ack.providers).is_err() {
            return self.violation(connection, Violation::Ready, now);
        }
        if let Some(applied) = applied {
            let (node, revision) = (claim.node.clone(), ack.seen_revision);
            self.effects.push_back(Effect::Publish(if applied {
                EdgeNodeEvent::ConfigApplied { node, revision }
            } else {
                EdgeNodeEvent::ConfigRefused { node, revision, error: ack.error }
            }));
            let node = claim.node.clone();
            self.effects.push_back(Effect::Observe(Observation::ConfigPushed { node, applied }));
        }
        if applied.is_some() {
            self.fleet.pushed(&claim.node, None);
        }
        if news {
            self.fleet.offers(&claim.node, claim.generation, &claim.in_force, ack.providers);
        }
        // Before anybody is given a place: what is sent next may have fewer.
        self.send_config(connection, &claim.node, next);
        self.push_credentials(connection);
        if news || applied.is_some() {
            self.offers_changed(now);
        }
    }

    /// Takes a Node out of service, or puts it back (EDG-1).
    pub(crate) fn set_in_service(&mut self, node: &NodeId, on: bool, now: Instant) -> Result<(), UnknownNode> {
        self.handle_timeout(now);
        if self.catalog.node(node).is_none() {
            return Err(UnknownNode(node.clone()));
        }
        let changed = if on { self.held.remove(node) } else { self.held.insert(node.clone()) };
        if changed {
            self.fleet.set_in_service(node, on);
            self.effects.push_back(Effect::Publish(EdgeNodeEvent::InService { node: node.clone(), on }));
            self.resolve_waiters(now);
        }
        Ok(())
    }

    /// A ready Node left a question unanswered, or was heard of again (FEN-7).
    pub(crate) fn set_suspect(&mut self, connection: ConnectionId, suspect: bool, now: Instant) {
        self.handle_timeout(now);
        let Some(claim) = self.registry.claim_of(connection) else { return };
        let (node, generation) = (claim.node.clone(), claim.generation);
        self.fleet.suspect(generation, suspect);
        if suspect {
            self.effects.push_back(Effect::Observe(Observation::Suspected { node: node.clone() }));
            self.effects.push_back(Effect::Publish(EdgeNodeEvent::Suspected { node, generation }));
        } else {
            self.effects.push_back(Effect::Publish(EdgeNodeEvent::Trusted { node, generation }));
        }
        // Whoever waited for another Node may have this one now, and the other way round.
        self.pump(now);
    }
}

/// What differs between two configs, for people.
fn difference(old: &Catalog, new: &Catalog) -> ConfigChange {
    let enabled = |node: &NodeEntry| node.enabled;
    let nodes = |catalog: &Catalog| -> Vec<NodeId> {
        catalog.nodes().iter().filter(|node| enabled(node)).map(|node| node.id.clone()).collect()
    };
    let (before, after) = (nodes(old), nodes(new));
    let providers = |catalog: &Catalog, id: &NodeId| catalog.node(id).map(|entry| catalog.node_config(entry).providers);
    let models = |catalog: &Catalog| -> HashMap<_, ModelGroup> {
        catalog.models().iter().map(|model| (model.name.clone(), model.clone())).collect()
    };
    let (old_models, new_models) = (models(old), models(new));
    let names = new.models().iter().chain(old.models()).map(|model| &model.name);
    let mut models_changed: Vec<_> =
        names.filter(|name| old_models.get(*name) != new_models.get(*name)).cloned().collect();
    models_changed.sort_unstable();
    models_changed.dedup();
    ConfigChange {
        revision: new.revision(),
        nodes_added: after.iter().filter(|id| !before.contains(id)).cloned().collect(),
        nodes_removed: before.iter().filter(|id| !after.contains(id)).cloned().collect(),
        nodes_changed: {
            let both = after.iter().filter(|id| before.contains(id));
            both.filter(|id| providers(old, id) != providers(new, id)).cloned().collect()
        },
        models_changed,
    }
}
