//! Decides what a new config does to what runs.

use std::sync::Arc;
use std::time::Instant;

use iop_execution::NodeId;

use crate::api::{ApplyError, ConfigChange, UnknownNode};
use crate::catalog::Catalog;
use crate::state::EdgeState;

impl EdgeState {
    pub(crate) fn apply_config(&mut self, catalog: Arc<Catalog>, now: Instant) -> Result<ConfigChange, ApplyError> {
        self.handle_timeout(now);
        drop(catalog);
        Err(ApplyError::NotNewer { current: self.catalog.revision() })
    }

    pub(crate) fn set_in_service(&mut self, node: &NodeId, _on: bool, now: Instant) -> Result<(), UnknownNode> {
        self.handle_timeout(now);
        let known = self.catalog.nodes().iter().any(|entry| entry.id == *node);
        if known { Ok(()) } else { Err(UnknownNode(node.clone())) }
    }
}
