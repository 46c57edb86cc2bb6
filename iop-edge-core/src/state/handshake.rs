//! Decides what a connection's handshake does to the engine: who is refused, and the fixed order of becoming ready.

use std::time::{Duration, Instant};

use iop_credential_lease::RecipientPublicKey;
use iop_execution::NodeId;
use iop_wire::limits::{FEATURES, MAX_ENVELOPE, PROTO_MAX, PROTO_MIN};
use iop_wire::{
    CloseCode, Hello, HelloAck, NodeReadyRequest, NodeReadyResponse, PeerIdentity, RefusalReason, RegisterRefusal,
    RegisterRequest, RegisterResponse, Registered, ToNode,
};

use crate::catalog::{Catalog, NodeEntry};
use crate::observe::{Observation, Refusal, Violation};
use crate::state::EdgeState;
use crate::state::effect::{EdgeNodeEvent, Effect};
use crate::state::id::ConnectionId;
use crate::state::identity::{self, MAX_RETURN, RETURN_GRACE};
use crate::state::registry::{Challenge, Claim, Crowded, Instance, ReadyOutcome};
use crate::state::suspicion::was_suspended;
use crate::state::throttle::Source;
use crate::state::timers::Timer;
use crate::token::{Token, TokenKind, TokenProof, TokenSecrets};

/// Wait before a Node dials again that found its place taken (REG-4).
const RETRY_DUPLICATE: Duration = Duration::from_secs(10);
/// Wait before a Node dials again that can't be served for now (REG-4).
pub(super) const RETRY_UNAVAILABLE: Duration = Duration::from_secs(30);
/// Wait before a Node dials again while this Edge goes down (REG-4).
const RETRY_DRAINING: Duration = Duration::from_secs(5);
/// Wait before a link that found no free slot is tried again (REG-8).
pub(crate) const RETRY_CROWDED: Duration = Duration::from_secs(5);

impl EdgeState {
    /// A link came up. `lease_generation` is random (CRD-2).
    pub(crate) fn handle_opened(
        &mut self,
        peer: PeerIdentity,
        lease_generation: u64,
        now: Instant,
    ) -> Result<ConnectionId, Crowded> {
        self.handle_timeout(now);
        let (id, register_by) = self.registry.open(peer, lease_generation, now)?;
        self.timers.arm(Timer::Handshake(id), register_by);
        self.effects.push_back(Effect::Observe(Observation::ConnectionOpened));
        Ok(id)
    }

    pub(crate) fn handle_hello(&mut self, connection: ConnectionId, hello: &Hello, now: Instant) {
        self.handle_timeout(now);
        let instance = Instance { id: hello.instance_id, ordinal: hello.connection_ordinal };
        if self.registry.hello(connection, instance).is_err() {
            return self.violation(connection, Violation::State, now);
        }
        let proto = hello.proto_max.min(PROTO_MAX);
        if proto < hello.proto_min.max(PROTO_MIN) {
            let answer = RegisterRefusal { reason: RefusalReason::UnsupportedProtocol, retry_after: Duration::ZERO };
            self.refused(None, answer, answer.reason.into());
            return self.close(connection, CloseCode::UnsupportedProtocol, Duration::ZERO, now);
        }
        let both = FEATURES.iter().filter(|feature| hello.features.iter().any(|theirs| theirs == *feature));
        let message = ToNode::HelloAck(HelloAck {
            proto,
            features: both.map(|feature| (*feature).to_owned()).collect(),
            max_envelope: u32::try_from(MAX_ENVELOPE).unwrap_or(u32::MAX),
            edge_id: self.edge_id.clone(),
        });
        self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
    }

    /// A registration; `edge_time_ms` is what Nodes measure leases by, `unix_time` the wall clock in seconds, which may have
    /// been set since the Edge started.
    pub(crate) fn handle_register(
        &mut self,
        connection: ConnectionId,
        request: &RegisterRequest,
        edge_time_ms: u64,
        unix_time: u64,
        now: Instant,
    ) {
        self.handle_timeout(now);
        let Ok(peer) = self.registry.registering(connection).cloned() else {
            return self.violation(connection, Violation::State, now);
        };
        // Its length was checked when it was read. One that anybody could open leases of is no key (CRD-3).
        let recipient = <[u8; 32]>::try_from(request.recipient_key.as_ref()).ok().map(RecipientPublicKey::new);
        let Ok(recipient) = recipient.transpose() else {
            return self.violation(connection, Violation::Malformed, now);
        };
        self.registry.set_recipient(connection, recipient);
        match self.admit_node(connection, &peer, request, edge_time_ms, unix_time, now) {
            Ok(None) => {}
            Ok(Some(registered)) => self.registered(connection, edge_time_ms, registered),
            Err((node, refusal, cause)) => self.turn_away(connection, edge_time_ms, node, refusal, cause, now),
        }
    }

    fn registered(&mut self, connection: ConnectionId, edge_time_ms: u64, registered: Registered) {
        let message = ToNode::RegisterResponse(RegisterResponse { edge_time_ms, outcome: Ok(registered) });
        self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
    }

    fn turn_away(
        &mut self,
        connection: ConnectionId,
        edge_time_ms: u64,
        node: Option<NodeId>,
        refusal: RegisterRefusal,
        cause: Refusal,
        now: Instant,
    ) {
        self.refused(node, refusal, cause);
        let message = ToNode::RegisterResponse(RegisterResponse { edge_time_ms, outcome: Err(refusal) });
        self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
        self.close(connection, CloseCode::Closed, refusal.retry_after, now);
    }

    /// Checks in the order that tells a stranger least, and claims last (REG-2). `None` = it waits for the answer of the
    /// Node's present connection.
    fn admit_node(
        &mut self,
        connection: ConnectionId,
        peer: &PeerIdentity,
        request: &RegisterRequest,
        edge_time_ms: u64,
        unix_time: u64,
        now: Instant,
    ) -> Result<Option<Registered>, (Option<NodeId>, RegisterRefusal, Refusal)> {
        let refuse = |node, reason: RefusalReason, retry_after| {
            Err((node, RegisterRefusal { reason, retry_after }, Refusal::from(reason)))
        };
        if self.shutting_down {
            return refuse(None, RefusalReason::Draining, RETRY_DRAINING);
        }
        let address = peer.address.map(|address| Source::Address(address.ip()));
        let token = Token::parse(TokenKind::Node, request.token.expose());
        let id = token.as_ref().map(Token::id);
        let nodes = self.catalog.nodes();
        let named: Option<&NodeEntry> =
            nodes.iter().find(|node| node.token_id.is_some() && node.token_id.as_ref() == id);
        let proof = |entry: Option<&NodeEntry>, token: &Token| {
            entry.and_then(|node| node.token).unwrap_or(TokenSecrets::NOBODY).check(token, unix_time)
        };
        let sources: Vec<Source> =
            address.clone().into_iter().chain(named.and(id).map(|id| Source::Token(id.clone()))).collect();
        if let Some(wait) = sources.iter().filter_map(|source| self.throttle.blocked(source, now)).max() {
            // The wire has no word for it; this one makes the peer wait and come back.
            let answer = RegisterRefusal { reason: RefusalReason::Draining, retry_after: wait };
            return Err((None, answer, Refusal::RateLimited));
        }
        // Before any secret is compared (REG-6).
        let entry = match identity::record_of(&self.catalog, peer.identity.as_ref(), named) {
            // A record without an id is found by its secret: each comparison takes the same time, and all are made, but for
            // those of records that need an identity first.
            Ok(None) => named.or_else(|| {
                let unnamed = nodes.iter().filter(|node| node.token_id.is_none() && !Catalog::is_managed(node));
                let knows = |node: &NodeEntry, token: &Token| proof(Some(node), token) != TokenProof::Unknown;
                let matching = unnamed.filter(|node| token.as_ref().is_some_and(|token| knows(node, token)));
                matching.fold(None, |_, node| Some(node))
            }),
            // A record that a token names by its id is found by that id only.
            Ok(Some(record)) => Some(record).filter(|record| record.token_id.is_none() || named.is_some()),
            Err(reason) => {
                let node = named.map(|node| node.id.clone());
                // Not the token: whoever stole it must not lock out its owner.
                address.into_iter().for_each(|address| self.throttle.failed(address, now));
                return refuse(node, reason, Duration::ZERO);
            }
        };
        let proof = token.map_or(TokenProof::Unknown, |token| proof(entry, &token));
        let Some(entry) = entry.filter(|_| proof != TokenProof::Unknown).cloned() else {
            for source in sources {
                self.throttle.failed(source, now);
            }
            let barred = |node: &NodeEntry| node.token_id.is_none() && Catalog::is_managed(node);
            let unproven = peer.identity.is_none() && named.is_none() && nodes.iter().any(barred);
            let reason = if unproven { RefusalReason::IdentityRequired } else { RefusalReason::UnknownToken };
            return refuse(None, reason, Duration::ZERO);
        };
        let node = entry.id.clone();
        if proof == TokenProof::Expired {
            // The wire has one word for both; who looks here sees which it is.
            let answer = RegisterRefusal { reason: RefusalReason::UnknownToken, retry_after: Duration::ZERO };
            return Err((Some(node), answer, Refusal::ExpiredToken));
        }
        if request.claimed_node_id.as_ref().is_some_and(|claimed| *claimed != node) {
            return refuse(Some(node), RefusalReason::IdentityMismatch, Duration::ZERO);
        }
        if !entry.enabled {
            return refuse(Some(node), RefusalReason::ConfigUnavailable, RETRY_UNAVAILABLE);
        }
        if let Some(incumbent) = self.registry.owner(&node) {
            if !self.registry.is_redial(incumbent, connection) {
                let challenge = Challenge { node: node.clone(), edge_time_ms, since: now };
                return if self.challenge(incumbent, connection, challenge, now) {
                    Ok(None)
                } else {
                    refuse(Some(node), RefusalReason::DuplicateConnection, RETRY_DUPLICATE)
                };
            }
            // The same process has dialled again, so it knows that the old connection is dead (REG-5).
            self.close(incumbent, CloseCode::Superseded, Duration::ZERO, now);
        }
        match self.claim(connection, &entry, now) {
            Some(registered) => Ok(Some(registered)),
            None => refuse(Some(node), RefusalReason::DuplicateConnection, RETRY_DUPLICATE),
        }
    }

    fn claim(&mut self, connection: ConnectionId, entry: &NodeEntry, now: Instant) -> Option<Registered> {
        let config = self.catalog.node_config(entry);
        let ready_by = self.registry.claim(connection, entry.id.clone(), config.clone(), now).ok()?;
        self.timers.arm(Timer::Handshake(connection), ready_by);
        let takes_leases = self.registry.recipient(connection).is_some_and(|(recipient, _)| recipient.is_some());
        let trusted_lease_signers = if takes_leases { self.catalog.credentials().signers() } else { Vec::new() };
        Some(Registered { node_id: entry.id.clone(), config, trusted_lease_signers })
    }

    /// The Node's present connection has not answered: it is dead (REG-5).
    pub(super) fn challenge_over(&mut self, newcomer: ConnectionId, due: Instant, now: Instant) {
        let Some(node) = self.registry.challenging(newcomer).map(|challenge| challenge.node.clone()) else { return };
        match self.registry.owner(&node) {
            // The answer may wait to be read: it was this process that stood still.
            Some(incumbent) if was_suspended(due, now) => self.ask_incumbent(incumbent, newcomer, now),
            // Its end admits who waits for it.
            Some(incumbent) => self.close(incumbent, CloseCode::Superseded, Duration::ZERO, now),
            None => self.admit_challenger(&node, now),
        }
    }

    /// The Node's present connection is alive: whoever wanted its place can't have it now (REG-5).
    pub(super) fn refuse_challenger(&mut self, newcomer: ConnectionId, now: Instant) {
        let Some(challenge) = self.registry.challenging(newcomer).cloned() else { return };
        let reason = RefusalReason::DuplicateConnection;
        let refusal = RegisterRefusal { reason, retry_after: RETRY_DUPLICATE };
        let edge_time_ms = challenge.edge_time_ms(now);
        self.turn_away(newcomer, edge_time_ms, Some(challenge.node), refusal, reason.into(), now);
    }

    /// A Node's place became free: whoever waits for it may have it.
    pub(super) fn admit_challenger(&mut self, node: &NodeId, now: Instant) {
        let Some((newcomer, challenge)) = self.registry.challenger(node) else { return };
        let edge_time_ms = challenge.edge_time_ms(now);
        self.timers.disarm(Timer::Challenge(newcomer));
        let entry = self.catalog.nodes().iter().find(|entry| entry.id == *node && entry.enabled).cloned();
        // The config may have changed since it was admitted to wait.
        let entry = entry.filter(|entry| self.has_identity_of(newcomer, entry));
        let reason = if self.shutting_down { RefusalReason::Draining } else { RefusalReason::ConfigUnavailable };
        let registered = entry.filter(|_| !self.shutting_down).and_then(|entry| self.claim(newcomer, &entry, now));
        match registered {
            Some(registered) => self.registered(newcomer, edge_time_ms, registered),
            None => {
                let refusal = RegisterRefusal { reason, retry_after: RETRY_UNAVAILABLE };
                self.turn_away(newcomer, edge_time_ms, Some(node.clone()), refusal, reason.into(), now);
            }
        }
    }

    /// Which Node a ready connection is.
    pub(crate) fn node_of(&self, connection: ConnectionId) -> Option<NodeId> {
        self.registry.claim_of(connection).map(|claim| claim.node.clone())
    }

    /// How long a suspect may leave a ping unanswered before it loses its uncommitted requests (FEN-7).
    pub(crate) fn suspicion_withdraw(&self) -> Option<Duration> {
        self.catalog.suspicion_withdraw()
    }

    fn refused(&mut self, node: Option<NodeId>, answer: RegisterRefusal, reason: Refusal) {
        let RegisterRefusal { reason: told, retry_after } = answer;
        let limited = reason == Refusal::RateLimited;
        self.effects.push_back(Effect::Publish(if limited {
            EdgeNodeEvent::RateLimited { retry_after }
        } else {
            EdgeNodeEvent::Refused { node, reason: told }
        }));
        self.effects.push_back(Effect::Observe(Observation::RegistrationRefused { reason }));
    }

    /// A Ready. The order of the first one is REG-3's: mark ready, activate, pump, publish, answer; the answer still goes
    /// out before the dispatches, because it is a control message and the effects are carried out in one step.
    pub(crate) fn handle_ready(&mut self, connection: ConnectionId, request: NodeReadyRequest, now: Instant) {
        self.handle_timeout(now);
        let Ok((outcome, lease_generation)) = self.registry.ready(connection, &request) else {
            return self.violation(connection, Violation::State, now);
        };
        let ready = match outcome {
            ReadyOutcome::Mismatch => false,
            ReadyOutcome::Again => true,
            ReadyOutcome::First(claim) => {
                self.timers.disarm(Timer::Handshake(connection));
                let Claim { node, generation, in_force } = claim;
                self.fleet.offers(&node, generation, &in_force, request.providers);
                self.offers_changed(now);
                self.effects.push_back(Effect::Publish(EdgeNodeEvent::Connected { node, generation }));
                true
            }
        };
        let lease_generation = if ready { lease_generation } else { 0 };
        let message = ToNode::ReadyResponse(NodeReadyResponse { ready, lease_generation });
        self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
        if ready {
            // The config may have changed since it registered.
            self.push_config(connection);
            self.push_credentials(connection);
        } else {
            self.violation(connection, Violation::Ready, now);
        }
    }

    /// The Node takes no new work: what runs goes on, who waits looks for another place. `returns_in`: its connection ends only to
    /// be made anew, at the latest after that time, so that who finds no other place waits for it (FEN-3).
    pub(crate) fn handle_drain(&mut self, connection: ConnectionId, returns_in: Option<Duration>, now: Instant) {
        self.handle_timeout(now);
        match self.registry.drain(connection) {
            Err(_) => self.violation(connection, Violation::State, now),
            Ok(None) => {
                // It drains already: only whether it comes back may be news.
                if let (None, Some(node)) = (returns_in, self.registry.node_of(connection).cloned()) {
                    self.fleet.expect_back(&node, None);
                    self.resolve_waiters(now);
                }
            }
            Ok(Some(claim)) => {
                self.fleet.drain(claim.generation);
                let back = returns_in.map(|longest| now + longest.min(MAX_RETURN) + RETURN_GRACE);
                self.fleet.expect_back(&claim.node, back);
                let (node, generation) = (claim.node, claim.generation);
                self.effects.push_back(Effect::Publish(EdgeNodeEvent::Draining { node, generation }));
                self.resolve_waiters(now);
            }
        }
    }

    /// The peer broke the protocol: ends the connection with the code that fits.
    pub(crate) fn violation(&mut self, connection: ConnectionId, violation: Violation, now: Instant) {
        self.effects.push_back(Effect::Observe(Observation::Violated { violation }));
        let code = match violation {
            Violation::Credit => CloseCode::FlowControl,
            Violation::EnvelopeOrder
            | Violation::State
            | Violation::Size
            | Violation::UnknownRun
            | Violation::Ready
            | Violation::Malformed
            | Violation::RunOrder
            | Violation::FrameOrder
            | Violation::WrongWire => CloseCode::ProtocolViolation,
        };
        self.close(connection, code, Duration::ZERO, now);
    }
}
