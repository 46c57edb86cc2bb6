//! Decides what a connection's handshake does to the engine: who is refused, and the fixed order of becoming ready.

use std::time::{Duration, Instant};

use iop_execution::NodeId;
use iop_wire::limits::{FEATURES, MAX_ENVELOPE, PROTO_MAX, PROTO_MIN};
use iop_wire::{
    CloseCode, Hello, HelloAck, NodeReadyRequest, NodeReadyResponse, PeerIdentity, RefusalReason, RegisterRefusal,
    RegisterRequest, RegisterResponse, Registered, ToNode,
};

use crate::api::SubmitError;
use crate::catalog::NodeEntry;
use crate::observe::{Observation, Refusal, Violation};
use crate::state::effect::{EdgeNodeEvent, Effect};
use crate::state::id::ConnectionId;
use crate::state::registry::{Crowded, ReadyOutcome};
use crate::state::throttle::Source;
use crate::state::timers::Timer;
use crate::state::{EdgeState, WaitOutcome};
use crate::token::{Token, TokenHash, TokenKind};

/// Wait before a Node dials again that found its place taken (REG-4).
const RETRY_DUPLICATE: Duration = Duration::from_secs(10);
/// Wait before a Node dials again that can't be served for now (REG-4).
const RETRY_UNAVAILABLE: Duration = Duration::from_secs(30);
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
        if self.registry.hello(connection).is_err() {
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

    /// A registration; `edge_time_ms` is the Edge's wall clock, Unix milliseconds.
    pub(crate) fn handle_register(
        &mut self,
        connection: ConnectionId,
        request: &RegisterRequest,
        edge_time_ms: u64,
        now: Instant,
    ) {
        self.handle_timeout(now);
        let Ok(peer) = self.registry.registering(connection) else {
            return self.violation(connection, Violation::State, now);
        };
        let address = peer.address.map(|address| Source::Address(address.ip()));
        let outcome = self.admit_node(connection, address, request, now);
        if let Err((node, refusal, cause)) = outcome {
            self.refused(node, refusal, cause);
            let message = ToNode::RegisterResponse(RegisterResponse { edge_time_ms, outcome: Err(refusal) });
            self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
            return self.close(connection, CloseCode::Closed, refusal.retry_after, now);
        }
        if let Ok(registered) = outcome {
            let message = ToNode::RegisterResponse(RegisterResponse { edge_time_ms, outcome: Ok(registered) });
            self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
        }
    }

    /// Checks in the order that tells a stranger least, and claims last (REG-2).
    fn admit_node(
        &mut self,
        connection: ConnectionId,
        address: Option<Source>,
        request: &RegisterRequest,
        now: Instant,
    ) -> Result<Registered, (Option<NodeId>, RegisterRefusal, Refusal)> {
        let refuse = |node, reason: RefusalReason, retry_after| {
            Err((node, RegisterRefusal { reason, retry_after }, Refusal::from(reason)))
        };
        if self.shutting_down {
            return refuse(None, RefusalReason::Draining, RETRY_DRAINING);
        }
        let token = Token::parse(TokenKind::Node, request.token.expose());
        let id = token.as_ref().map(Token::id);
        let nodes = self.catalog.nodes();
        let named: Option<&NodeEntry> =
            nodes.iter().find(|node| node.token_id.is_some() && node.token_id.as_ref() == id);
        // A record without an id is found by its secret: each comparison takes the same time, and all are made.
        let unnamed = nodes.iter().filter(|node| node.token_id.is_none());
        let matching = unnamed.filter(|node| token.as_ref().is_some_and(|token| node.token_hash.matches(token)));
        let entry = named.or(matching.fold(None, |_, node| Some(node)));
        let sources: Vec<Source> =
            address.into_iter().chain(named.and(id).map(|id| Source::Token(id.clone()))).collect();
        if let Some(wait) = sources.iter().filter_map(|source| self.throttle.blocked(source, now)).max() {
            // The wire has no word for it; this one makes the peer wait and come back.
            let answer = RegisterRefusal { reason: RefusalReason::Draining, retry_after: wait };
            return Err((None, answer, Refusal::RateLimited));
        }
        let expected = entry.map_or(TokenHash::DUMMY, |node| node.token_hash);
        let proven = token.is_some_and(|token| expected.matches(&token));
        let Some(entry) = entry.filter(|_| proven).cloned() else {
            for source in sources {
                self.throttle.failed(source, now);
            }
            return refuse(None, RefusalReason::UnknownToken, Duration::ZERO);
        };
        let node = entry.id.clone();
        if request.claimed_node_id.as_ref().is_some_and(|claimed| *claimed != node) {
            return refuse(Some(node), RefusalReason::IdentityMismatch, Duration::ZERO);
        }
        if !entry.enabled {
            return refuse(Some(node), RefusalReason::ConfigUnavailable, RETRY_UNAVAILABLE);
        }
        let config = self.catalog.node_config(&entry);
        match self.registry.claim(connection, node.clone(), config.revision, now) {
            Err(_) => refuse(Some(node), RefusalReason::DuplicateConnection, RETRY_DUPLICATE),
            Ok(ready_by) => {
                self.timers.arm(Timer::Handshake(connection), ready_by);
                Ok(Registered { node_id: node, config, trusted_lease_signers: Vec::new() })
            }
        }
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
        let foreign = self.fleet.check(&request.node_id, &request.providers).is_err();
        let revision = if foreign { u64::MAX } else { request.config_revision };
        let Ok((outcome, lease_generation)) = self.registry.ready(connection, &request.node_id, revision) else {
            return self.violation(connection, Violation::State, now);
        };
        let ready = match outcome {
            ReadyOutcome::Mismatch => false,
            ReadyOutcome::Again => true,
            ReadyOutcome::First(claim) => {
                self.timers.disarm(Timer::Handshake(connection));
                self.fleet.activate(&claim.node, claim.generation, request.providers);
                if self.catalog.models_auto() {
                    for orphan in self.groups.relist(&self.catalog, &self.fleet) {
                        self.refuse(orphan, SubmitError::Unavailable, WaitOutcome::Unavailable, now);
                    }
                }
                self.pump(now);
                let (node, generation) = (claim.node, claim.generation);
                self.effects.push_back(Effect::Publish(EdgeNodeEvent::Connected { node, generation }));
                true
            }
        };
        let lease_generation = if ready { lease_generation } else { 0 };
        let message = ToNode::ReadyResponse(NodeReadyResponse { ready, lease_generation });
        self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
        if !ready {
            self.violation(connection, Violation::Ready, now);
        }
    }

    /// The Node takes no new work: what runs goes on, who waits looks for another place.
    pub(crate) fn handle_drain(&mut self, connection: ConnectionId, now: Instant) {
        self.handle_timeout(now);
        match self.registry.drain(connection) {
            Err(_) => self.violation(connection, Violation::State, now),
            Ok(None) => {}
            Ok(Some(claim)) => {
                self.fleet.drain(claim.generation);
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
