//! Decides what a workload identity is worth: which record it belongs to, and what becomes of a connection whose identity is
//! worth nothing any more (REG-6, CRD-10).
//!
//! ```text
//!  good ── its certificate or record is refused now ──▶ Draining: nothing new ── idle, or 30 s ──▶ fenced: identity_revoked
//! ```

use std::time::{Duration, Instant};

use iop_wire::{CloseCode, RefusalReason, VerifiedIdentity, WorkloadIdentity};

use crate::catalog::{Catalog, NodeEntry};
use crate::state::EdgeState;
use crate::state::effect::{EdgeNodeEvent, Effect};
use crate::state::id::ConnectionId;
use crate::state::timers::Timer;

/// How long a connection whose identity is worth nothing any more may finish what runs on it.
pub const IDENTITY_DRAIN: Duration = Duration::from_secs(30);
/// How long requests wait for a Node that makes its connection anew, once the old one has ended (FEN-3).
pub(super) const RETURN_GRACE: Duration = Duration::from_secs(10);
/// Longest time that a Node may say it needs until it is back.
pub(super) const MAX_RETURN: Duration = Duration::from_secs(600);
/// How often it is looked whether it has finished.
const IDENTITY_DRAIN_TICK: Duration = Duration::from_millis(500);

impl NodeEntry {
    fn is(&self, identity: &WorkloadIdentity) -> bool {
        self.identities.contains(identity)
    }
}

/// The record that a peer may prove itself to be by its token: that of its identity. `None` = it shows no identity and needs
/// none, so that its token alone says which record it is.
///
/// No secret has been compared before: a stolen token tells nobody whether it is a good one.
pub(super) fn record_of<'a>(
    catalog: &'a Catalog,
    shown: Option<&VerifiedIdentity>,
    named: Option<&NodeEntry>,
) -> Result<Option<&'a NodeEntry>, RefusalReason> {
    let Some(shown) = shown else {
        let required = catalog.identity_required() || named.is_some_and(Catalog::is_managed);
        return if required { Err(RefusalReason::IdentityRequired) } else { Ok(None) };
    };
    let record = catalog.nodes().iter().find(|node| node.is(shown.identity()));
    let record = record.ok_or(RefusalReason::IdentityMismatch)?;
    if named.is_some_and(|named| named.id != record.id) {
        return Err(RefusalReason::IdentityMismatch);
    }
    Ok(Some(record))
}

impl EdgeState {
    /// The identity that the certificate of a connection's Node proved.
    pub(crate) fn verified_identity(&self, connection: ConnectionId) -> Option<&VerifiedIdentity> {
        self.registry.peer(connection)?.identity.as_ref()
    }

    /// A connection has shown the identity of a record, or none where the record needs none.
    pub(super) fn has_identity_of(&self, connection: ConnectionId, entry: &NodeEntry) -> bool {
        match self.verified_identity(connection) {
            Some(shown) => entry.is(shown.identity()),
            None => !(self.catalog.identity_required() || Catalog::is_managed(entry)),
        }
    }

    /// Every connection that has shown an identity.
    pub(crate) fn identities(&self) -> Vec<(ConnectionId, VerifiedIdentity)> {
        let ids = self.registry.ids().into_iter();
        ids.filter_map(|id| Some((id, self.verified_identity(id)?.clone()))).collect()
    }

    /// After a new config: connections whose identity is no longer that of their Node, or that have none and need one now.
    pub(super) fn recheck_records(&mut self, now: Instant) {
        for connection in self.registry.ids() {
            let Some(node) = self.registry.node_of(connection).cloned() else { continue };
            // One that is in no config any more is closed for that.
            if self.catalog.node(&node).is_some_and(|entry| !self.has_identity_of(connection, entry)) {
                self.handle_identity_lost(connection, now);
            }
        }
    }

    /// The identity of a connection is worth nothing any more: it finishes what runs, then it ends.
    pub(crate) fn handle_identity_lost(&mut self, connection: ConnectionId, now: Instant) {
        self.handle_timeout(now);
        if self.identity_over.contains_key(&connection) {
            return;
        }
        if self.registry.generation(connection).is_none() {
            return self.close(connection, CloseCode::IdentityRevoked, Duration::ZERO, now);
        }
        self.identity_over.insert(connection, now + IDENTITY_DRAIN);
        if let Ok(Some(claim)) = self.registry.drain(connection) {
            self.fleet.drain(claim.generation);
            // A renewed certificate may be there already.
            self.fleet.expect_back(&claim.node, Some(now + IDENTITY_DRAIN + RETURN_GRACE));
            let (node, generation) = (claim.node, claim.generation);
            self.effects.push_back(Effect::Publish(EdgeNodeEvent::Draining { node, generation }));
            self.resolve_waiters(now);
        }
        self.identity_drained(connection, now);
    }

    /// Looks whether a connection without a good identity has finished.
    pub(super) fn identity_drained(&mut self, connection: ConnectionId, now: Instant) {
        let Some(over) = self.identity_over.get(&connection).copied() else { return };
        let generation = self.registry.generation(connection);
        let idle = generation.is_none_or(|generation| self.ledger.held_by(generation).is_empty());
        if idle || now >= over {
            return self.close(connection, CloseCode::IdentityRevoked, Duration::ZERO, now);
        }
        self.timers.arm(Timer::Identity(connection), over.min(now + IDENTITY_DRAIN_TICK));
    }
}
