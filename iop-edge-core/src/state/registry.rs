//! Decides which connection speaks for which Node: handshake, ownership, generations (REG-1 to REG-4, FEN-1).
//!
//! ```text
//!                hello            claim                ready             drain
//!  AwaitingHello ─────▶ AwaitingRegister ─────▶ AwaitingReady ─────▶ Ready ─────▶ Draining
//!        │                    │      └▶ Challenging ─▲ │                │              │
//!        └────────────────────┴──────── close ─────────┴────────────────┴──────────────┘
//!                                      ▼
//!                              gone (no entry)
//! ```
//!
//! A claim gives the connection a [`Generation`] and the Node's place; only `close` gives the place back, and only the
//! connection that holds it can. What a message may do is decided by the phase of the connection it came on: an
//! illegal one is a typed error (W2), never a panic. The registry checks no token and activates no provider.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use iop_credential_lease::RecipientPublicKey;
use iop_execution::NodeId;
use iop_wire::limits::{READY_TIMEOUT, REGISTER_TIMEOUT};
use iop_wire::{NodeConfigPayload, NodeReadyRequest, PeerIdentity};

use crate::state::credential::Told;
use crate::state::fleet;
use crate::state::id::{ConnectionId, Generation};
use crate::state::push::Push;

/// Most connections that have not registered yet (REG-8).
pub(crate) const MAX_UNREGISTERED: usize = 256;

/// A message that its connection's phase does not allow (W2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the message is not allowed now")]
pub(crate) struct Illegal;

/// Another connection holds the Node's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("another connection is this node")]
pub(crate) struct Duplicate;

/// Too many connections have not registered yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many connections have not registered yet")]
pub(crate) struct Crowded;

/// A claimed place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) node: NodeId,
    pub(crate) generation: Generation,
    /// The config the Node has in force: that of the acceptance, then the last one it took.
    pub(crate) in_force: Arc<NodeConfigPayload>,
}

/// A process, and which of its connections this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instance {
    pub(crate) id: [u8; 16],
    pub(crate) ordinal: u64,
}

/// A connection that waits for the answer of the one whose place it wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Challenge {
    pub(crate) node: NodeId,
    /// What the Edge's wall clock said when it registered, in Unix milliseconds, and when that was.
    pub(crate) edge_time_ms: u64,
    pub(crate) since: Instant,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    AwaitingHello,
    AwaitingRegister,
    Challenging(Challenge),
    AwaitingReady(Claim),
    Ready(Claim),
    Draining(Claim),
}

impl Phase {
    const fn claim(&self) -> Option<&Claim> {
        match self {
            Self::AwaitingHello | Self::AwaitingRegister | Self::Challenging(_) => None,
            Self::AwaitingReady(claim) | Self::Ready(claim) | Self::Draining(claim) => Some(claim),
        }
    }
}

#[derive(Debug)]
struct Connection {
    phase: Phase,
    peer: PeerIdentity,
    instance: Option<Instance>,
    lease_generation: u64,
    /// What leases for it are sealed to; none = it takes none (CRD-3).
    recipient: Option<RecipientPublicKey>,
    push: Push,
    /// What it knows of credentials.
    told: Told,
}

impl Challenge {
    /// What the Edge's wall clock says now.
    pub(crate) fn edge_time_ms(&self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.since).as_millis();
        self.edge_time_ms.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }
}

/// What a Ready did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReadyOutcome {
    /// The first one: the Node is ready from now on.
    First(Claim),
    /// Ready already: acknowledged, changes nothing.
    Again,
    /// Wrong node id or revision: this connection will never be ready (W10).
    Mismatch,
}

/// What a connection held when it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ended {
    /// There was no such connection (any more).
    Unknown,
    /// It had claimed nothing.
    Unclaimed,
    /// It gave its claim back; it never was ready.
    NotReady(Claim),
    /// It was ready: its generation must be fenced.
    WasReady(Claim),
}

/// All connections of an Edge.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    connections: BTreeMap<ConnectionId, Connection>,
    owners: BTreeMap<NodeId, ConnectionId>,
    last_connection: u64,
    last_generation: u64,
}

impl Registry {
    /// A link came up. `lease_generation` is the random stand-in of its generation (CRD-2). Answers its id and when
    /// it must have registered.
    pub(crate) fn open(
        &mut self,
        peer: PeerIdentity,
        lease_generation: u64,
        now: Instant,
    ) -> Result<(ConnectionId, Instant), Crowded> {
        let unregistered = self.connections.values().filter(|connection| connection.phase.claim().is_none()).count();
        if unregistered >= MAX_UNREGISTERED {
            return Err(Crowded);
        }
        self.last_connection += 1;
        let id = ConnectionId(self.last_connection);
        self.connections.insert(
            id,
            Connection {
                phase: Phase::AwaitingHello,
                peer,
                instance: None,
                lease_generation,
                recipient: None,
                push: Push::default(),
                told: Told::default(),
            },
        );
        Ok((id, now + REGISTER_TIMEOUT))
    }

    pub(crate) fn hello(&mut self, id: ConnectionId, instance: Instance) -> Result<(), Illegal> {
        let connection = self.connections.get_mut(&id).ok_or(Illegal)?;
        match connection.phase {
            Phase::AwaitingHello => {
                connection.phase = Phase::AwaitingRegister;
                connection.instance = Some(instance);
                Ok(())
            }
            Phase::AwaitingRegister
            | Phase::Challenging(_)
            | Phase::AwaitingReady(_)
            | Phase::Ready(_)
            | Phase::Draining(_) => Err(Illegal),
        }
    }

    /// The key it registers with.
    pub(crate) fn set_recipient(&mut self, id: ConnectionId, recipient: Option<RecipientPublicKey>) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.recipient = recipient;
        }
    }

    /// What leases for a connection are sealed to, and the stand-in of its generation.
    pub(crate) fn recipient(&self, id: ConnectionId) -> Option<(Option<&RecipientPublicKey>, u64)> {
        let connection = self.connections.get(&id)?;
        Some((connection.recipient.as_ref(), connection.lease_generation))
    }

    /// It is told this of credentials. False if it knows that already.
    pub(crate) fn told(&mut self, id: ConnectionId, news: &Told) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let new = connection.told != *news;
        if new {
            connection.told.clone_from(news);
        }
        new
    }

    /// The peer, if it may register now.
    pub(crate) fn registering(&self, id: ConnectionId) -> Result<&PeerIdentity, Illegal> {
        let connection = self.connections.get(&id).ok_or(Illegal)?;
        match connection.phase {
            Phase::AwaitingRegister => Ok(&connection.peer),
            Phase::AwaitingHello
            | Phase::Challenging(_)
            | Phase::AwaitingReady(_)
            | Phase::Ready(_)
            | Phase::Draining(_) => Err(Illegal),
        }
    }

    /// Who is at the other end.
    pub(crate) fn peer(&self, id: ConnectionId) -> Option<&PeerIdentity> {
        self.connections.get(&id).map(|connection| &connection.peer)
    }

    /// True if `newcomer` is a later connection of the process that holds `incumbent`: that one is half-open (REG-5).
    pub(crate) fn is_redial(&self, incumbent: ConnectionId, newcomer: ConnectionId) -> bool {
        let instance = |id| self.connections.get(&id).and_then(|connection: &Connection| connection.instance);
        match (instance(incumbent), instance(newcomer)) {
            (Some(old), Some(new)) => old.id == new.id && new.ordinal > old.ordinal,
            (Some(_) | None, Some(_) | None) => false,
        }
    }

    /// Lets a connection wait for the answer of the Node's present one. False if another one does already.
    pub(crate) fn challenge(&mut self, id: ConnectionId, challenge: Challenge) -> bool {
        if self.challenger(&challenge.node).is_some() {
            return false;
        }
        match self.connections.get_mut(&id) {
            Some(connection) if connection.phase == Phase::AwaitingRegister => {
                connection.phase = Phase::Challenging(challenge);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Who waits to become this Node.
    pub(crate) fn challenger(&self, node: &NodeId) -> Option<(ConnectionId, &Challenge)> {
        self.connections.iter().find_map(|(id, connection)| match &connection.phase {
            Phase::Challenging(challenge) if challenge.node == *node => Some((*id, challenge)),
            Phase::Challenging(_)
            | Phase::AwaitingHello
            | Phase::AwaitingRegister
            | Phase::AwaitingReady(_)
            | Phase::Ready(_)
            | Phase::Draining(_) => None,
        })
    }

    /// The challenge that a connection waits in.
    pub(crate) fn challenging(&self, id: ConnectionId) -> Option<&Challenge> {
        match &self.connections.get(&id)?.phase {
            Phase::Challenging(challenge) => Some(challenge),
            Phase::AwaitingHello
            | Phase::AwaitingRegister
            | Phase::AwaitingReady(_)
            | Phase::Ready(_)
            | Phase::Draining(_) => None,
        }
    }

    pub(crate) fn owner(&self, node: &NodeId) -> Option<ConnectionId> {
        self.owners.get(node).copied()
    }

    /// Claims a Node's place. Answers when the connection must be ready.
    pub(crate) fn claim(
        &mut self,
        id: ConnectionId,
        node: NodeId,
        config: NodeConfigPayload,
        now: Instant,
    ) -> Result<Instant, Duplicate> {
        let Some(connection) = self.connections.get_mut(&id) else {
            return Err(Duplicate);
        };
        if self.owners.contains_key(&node) || connection.phase.claim().is_some() {
            return Err(Duplicate);
        }
        self.last_generation += 1;
        self.owners.insert(node.clone(), id);
        let generation = Generation(self.last_generation);
        connection.phase = Phase::AwaitingReady(Claim { node, generation, in_force: Arc::new(config) });
        Ok(now + READY_TIMEOUT)
    }

    /// A Ready. One that names another node, another revision or a provider that was not configured fits nothing (W10).
    pub(crate) fn ready(
        &mut self,
        id: ConnectionId,
        request: &NodeReadyRequest,
    ) -> Result<(ReadyOutcome, u64), Illegal> {
        let connection = self.connections.get_mut(&id).ok_or(Illegal)?;
        let outcome = match &connection.phase {
            Phase::AwaitingHello | Phase::AwaitingRegister | Phase::Challenging(_) => return Err(Illegal),
            Phase::AwaitingReady(claim) | Phase::Ready(claim) | Phase::Draining(claim)
                if claim.node != request.node_id =>
            {
                ReadyOutcome::Mismatch
            }
            Phase::Ready(_) | Phase::Draining(_) => ReadyOutcome::Again,
            Phase::AwaitingReady(claim)
                if claim.in_force.revision != request.config_revision
                    || fleet::check(&claim.in_force.providers, &request.providers).is_err() =>
            {
                ReadyOutcome::Mismatch
            }
            Phase::AwaitingReady(claim) => {
                let claim = claim.clone();
                connection.phase = Phase::Ready(claim.clone());
                ReadyOutcome::First(claim)
            }
        };
        Ok((outcome, connection.lease_generation))
    }

    /// The Node takes no new work. `None` = it said so before.
    pub(crate) fn drain(&mut self, id: ConnectionId) -> Result<Option<Claim>, Illegal> {
        let connection = self.connections.get_mut(&id).ok_or(Illegal)?;
        match &connection.phase {
            Phase::AwaitingHello | Phase::AwaitingRegister | Phase::Challenging(_) | Phase::AwaitingReady(_) => {
                Err(Illegal)
            }
            Phase::Draining(_) => Ok(None),
            Phase::Ready(claim) => {
                let claim = claim.clone();
                connection.phase = Phase::Draining(claim.clone());
                Ok(Some(claim))
            }
        }
    }

    /// The connection ended. Gives its place back; a second end finds nothing.
    pub(crate) fn close(&mut self, id: ConnectionId) -> Ended {
        let Some(connection) = self.connections.remove(&id) else {
            return Ended::Unknown;
        };
        if let Some(claim) = connection.phase.claim()
            && self.owners.get(&claim.node) == Some(&id)
        {
            self.owners.remove(&claim.node);
        }
        match connection.phase {
            Phase::AwaitingHello | Phase::AwaitingRegister | Phase::Challenging(_) => Ended::Unclaimed,
            Phase::AwaitingReady(claim) => Ended::NotReady(claim),
            Phase::Ready(claim) | Phase::Draining(claim) => Ended::WasReady(claim),
        }
    }

    /// True if the handshake of this connection is over its time for `registered` (else for ready).
    pub(crate) fn handshake_timeout(&self, id: ConnectionId) -> Option<iop_wire::CloseCode> {
        match self.connections.get(&id)?.phase {
            Phase::AwaitingHello | Phase::AwaitingRegister => Some(iop_wire::CloseCode::RegisterTimeout),
            Phase::AwaitingReady(_) => Some(iop_wire::CloseCode::ReadyTimeout),
            // A challenge has a time of its own.
            Phase::Challenging(_) | Phase::Ready(_) | Phase::Draining(_) => None,
        }
    }

    /// The connection that may be given work of this generation now: the pre-send fence (FEN-8).
    pub(crate) fn dispatchable(&self, node: &NodeId, generation: Generation) -> Option<ConnectionId> {
        let id = self.owner(node)?;
        match &self.connections.get(&id)?.phase {
            Phase::Ready(claim) if claim.generation == generation => Some(id),
            Phase::AwaitingHello
            | Phase::AwaitingRegister
            | Phase::Challenging(_)
            | Phase::AwaitingReady(_)
            | Phase::Ready(_)
            | Phase::Draining(_) => None,
        }
    }

    /// The generation of a connection that is or was ready.
    pub(crate) fn generation(&self, id: ConnectionId) -> Option<Generation> {
        match &self.connections.get(&id)?.phase {
            Phase::Ready(claim) | Phase::Draining(claim) => Some(claim.generation),
            Phase::AwaitingHello | Phase::AwaitingRegister | Phase::Challenging(_) | Phase::AwaitingReady(_) => None,
        }
    }

    /// Which Node a connection is, or wants to be.
    pub(crate) fn node_of(&self, id: ConnectionId) -> Option<&NodeId> {
        match &self.connections.get(&id)?.phase {
            Phase::Challenging(challenge) => Some(&challenge.node),
            Phase::AwaitingReady(claim) | Phase::Ready(claim) | Phase::Draining(claim) => Some(&claim.node),
            Phase::AwaitingHello | Phase::AwaitingRegister => None,
        }
    }

    /// What a ready connection has claimed.
    pub(crate) fn claim_of(&self, id: ConnectionId) -> Option<&Claim> {
        match &self.connections.get(&id)?.phase {
            Phase::Ready(claim) | Phase::Draining(claim) => Some(claim),
            Phase::AwaitingHello | Phase::AwaitingRegister | Phase::Challenging(_) | Phase::AwaitingReady(_) => None,
        }
    }

    /// The config pushes of a ready connection, and what it has in force.
    pub(crate) fn push(&mut self, id: ConnectionId) -> Option<(&mut Push, &mut Claim)> {
        let connection = self.connections.get_mut(&id)?;
        match &mut connection.phase {
            Phase::Ready(claim) | Phase::Draining(claim) => Some((&mut connection.push, claim)),
            Phase::AwaitingHello | Phase::AwaitingRegister | Phase::Challenging(_) | Phase::AwaitingReady(_) => None,
        }
    }

    /// Whether a Node is ready, and whether it is draining.
    pub(crate) fn node_phase(&self, node: &NodeId) -> (bool, bool) {
        let phase = self.owner(node).and_then(|id| self.connections.get(&id)).map(|connection| &connection.phase);
        match phase {
            Some(Phase::Ready(_)) => (true, false),
            Some(Phase::Draining(_)) => (true, true),
            Some(Phase::AwaitingHello | Phase::AwaitingRegister | Phase::Challenging(_) | Phase::AwaitingReady(_))
            | None => (false, false),
        }
    }

    /// Revision of the config that a ready Node has in force.
    pub(crate) fn revision_of(&self, node: &NodeId) -> Option<u64> {
        self.claim_of(self.owner(node)?).map(|claim| claim.in_force.revision)
    }

    /// Every connection, oldest first.
    pub(crate) fn ids(&self) -> Vec<ConnectionId> {
        self.connections.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests;
