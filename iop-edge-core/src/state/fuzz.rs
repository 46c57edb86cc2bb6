//! Decides what must hold in every history of the engine, whatever Nodes, clients and operators do, in whatever order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_execution::fuzz::Choices;
use iop_execution::{AdapterKey, ModelName, NodeId, Principal, ProviderId, Redacted, RunId, Target};
use iop_wire::{
    CloseCode, CommandResponse, CommandResult, ConfigAck, Hello, NodeCommand, NodeReadyRequest, PeerIdentity,
    ProviderConfig, ProviderReady, ReadyTarget, RegisterRequest, ToNode, VerifiedIdentity, WorkloadIdentity,
};

use super::admission::{Admission, Ask};
use super::effect::Effect;
use super::id::{AttemptId, ConnectionId, Generation};
use super::ledger::Ledger;
use super::queue::Avoid;
use super::selection::LeastLoaded;
use super::wear::Verdict;
use super::{CancelReached, EdgeState};
use crate::api::{Destination, Wanted, WireKind};
use crate::catalog::{Candidate, Catalog, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults};
use crate::observe::Observation;
use crate::token::{Token, TokenKind};

const NODES: [&str; 3] = ["n1", "n2", "n3"];
const PROVIDERS: [(&str, &str); 4] = [("a", "n1"), ("b", "n1"), ("c", "n2"), ("d", "n3")];
const MODELS: [&str; 4] = ["any", "only-a", "long", "nobody"];
/// Most places that a provider has under any config below.
const MOST: u32 = 3;
const CONNECTIONS: usize = 12;

fn secret(node: &str) -> String {
    format!("iopn_{node}xxxxxx_{}", "s".repeat(43))
}

fn identity(node: &str) -> WorkloadIdentity {
    WorkloadIdentity::parse(&format!("spiffe://iop.local/iop/node/{node}")).unwrap()
}

/// A config: which Nodes there are, how many places, what is needed of them.
fn catalog(revision: u64, choices: &mut Choices<'_>) -> Catalog {
    let mut catalog = Catalog::builder()
        .revision(revision)
        .models_auto(choices.flag())
        .suspicion_withdraw(choices.flag().then(|| Duration::from_secs(3)))
        .require_identity(choices.below(4) == 1);
    let all = revision == 1 || choices.flag();
    let mut configured = Vec::new();
    for node in NODES.into_iter().take(if all { 3 } else { 2 }) {
        let token = Token::parse(TokenKind::Node, &secret(node)).unwrap();
        let mut providers = Vec::new();
        for (id, _) in PROVIDERS.iter().filter(|(_, of)| *of == node) {
            let mut config = ProviderConfig::new(ProviderId::new(id).unwrap(), "demo").unwrap();
            config.capacity = 1 + u32::from(choices.byte() % 3).min(MOST - 1);
            config.long_capacity = u32::from(choices.flag());
            let mut entry = ProviderEntry::new(config);
            entry.enabled = choices.below(8) != 1;
            providers.push(entry);
            configured.push(*id);
        }
        let mut entry = NodeEntry::new(NodeId::new(node).unwrap(), token.id().clone(), token.hash(), providers)
            .with_identities(vec![identity(node)]);
        entry.enabled = choices.below(8) != 1;
        catalog = catalog.node(entry);
    }
    for (name, providers) in [("any", &["a", "c", "d"][..]), ("only-a", &["a"]), ("long", &["b"])] {
        let candidates = providers.iter().filter(|id| configured.contains(id));
        let candidates = candidates.map(|id| Candidate::new(ProviderId::new(id).unwrap(), Target::new("t").unwrap()));
        let queue = QueueDefaults { max_waiting: 3, timeout: Duration::from_secs(30) };
        let mut model = ModelGroup::new(ModelName::new(name).unwrap(), candidates.collect(), queue);
        model.long_context_threshold = (name == "long").then_some(100);
        model.absence_grace = Duration::from_secs(if choices.flag() { 5 } else { 0 });
        catalog = catalog.model(model);
    }
    catalog.build().unwrap()
}

struct World {
    state: EdgeState,
    now: Instant,
    revision: u64,
    connections: Vec<ConnectionId>,
    attempts: Vec<AttemptId>,
    /// True: it waits. False: it has, or had, a place.
    waiting: BTreeMap<AttemptId, bool>,
    commands: u64,
    commanded: u64,
    placed: usize,
    released: usize,
}

/// Histories of the engine: places are never more than there are, each is released once, whoever waits is answered, and at
/// rest nothing is left (I1, I4, I5, I6, I10, I11).
pub(crate) fn engine_edge(data: &[u8], now: Instant) {
    let mut choices = Choices::new(data);
    let catalog = catalog(1, &mut choices);
    let mut world = World {
        state: EdgeState::new(Arc::new(catalog), "edge".into(), Box::new(Ledger::default()), Box::new(LeastLoaded)),
        now,
        revision: 1,
        connections: Vec::new(),
        attempts: Vec::new(),
        waiting: BTreeMap::new(),
        commands: 0,
        commanded: 0,
        placed: 0,
        released: 0,
    };
    for _ in 0..400 {
        if choices.is_empty() {
            break;
        }
        world.step(&mut choices);
        world.observe();
        world.check();
    }
    world.finish();
}

impl World {
    fn connection(&self, choices: &mut Choices<'_>) -> Option<ConnectionId> {
        let at = choices.below(self.connections.len().max(1));
        self.connections.get(at).copied()
    }

    fn attempt(&self, choices: &mut Choices<'_>) -> Option<AttemptId> {
        let at = choices.below(self.attempts.len().max(1));
        self.attempts.iter().rev().nth(at).copied()
    }

    fn step(&mut self, choices: &mut Choices<'_>) {
        let now = self.now;
        match choices.below(28) {
            0 => self.open(choices),
            1 => {
                if let Some(id) = self.connection(choices) {
                    self.state.handle_hello(id, &hello(choices), now);
                }
            }
            2 => {
                if let Some(id) = self.connection(choices) {
                    let request = register(choices);
                    self.state.handle_register(id, &request, choices.number(), choices.number(), now);
                }
            }
            3 => {
                if let Some(id) = self.connection(choices) {
                    let request = self.ready(choices);
                    self.state.handle_ready(id, request, now);
                }
            }
            // A Node that does everything right: otherwise hardly any history would get to the work.
            4 | 5 => {
                self.open(choices);
                let (Some(id), node) = (self.connections.last().copied(), *choices.pick(&NODES)) else { return };
                let mut right =
                    RegisterRequest { token: Redacted::new(secret(node)), ..register(&mut Choices::new(&[])) };
                right.claimed_node_id = None;
                self.state.handle_hello(id, &hello(&mut Choices::new(&[])), now);
                self.state.handle_register(id, &right, 5, 5, now);
                self.observe();
                let revision = self.state.catalog.revision();
                let providers = PROVIDERS.iter().filter(|(_, of)| *of == node);
                let configured = |id: &str| {
                    let nodes = self.state.catalog.nodes().iter().flat_map(|node| &node.providers);
                    nodes.into_iter().any(|entry| entry.enabled && entry.config.provider_id.as_str() == id)
                };
                let providers =
                    providers.filter(|(id, _)| configured(id)).map(|(id, _)| offered(id, &mut Choices::new(&[])));
                let providers = providers.collect();
                let node_id = NodeId::new(node).unwrap();
                self.state.handle_ready(id, NodeReadyRequest { node_id, config_revision: revision, providers }, now);
            }
            6 => {
                if let Some(id) = self.connection(choices) {
                    let returns_in = choices.flag().then(|| Duration::from_millis(choices.number()));
                    self.state.handle_drain(id, returns_in, now);
                }
            }
            7 => {
                let code = *choices.pick(CloseCode::ALL);
                if let Some(id) = self.connection(choices) {
                    let generation = self.state.generation(id);
                    self.state.handle_closed(id, code, now);
                    if let Some(generation) = generation {
                        assert!(self.state.ledger.held_by(generation).is_empty(), "I6");
                    }
                }
            }
            8 => {
                if let Some(id) = self.connection(choices) {
                    self.state.handle_pong(id, choices.number(), now);
                }
            }
            9 => {
                if let Some(id) = self.connection(choices) {
                    let ack = ConfigAck {
                        seen_revision: choices.number(),
                        applied_revision: choices.number(),
                        error: if choices.flag() { "no".into() } else { String::new() },
                        providers: self.ready(choices).providers,
                    };
                    self.state.handle_config_ack(id, ack, now);
                }
            }
            10 => {
                if let Some(id) = self.connection(choices) {
                    self.state.set_suspect(id, choices.flag(), now);
                }
            }
            11 => {
                if let Some(id) = self.connection(choices) {
                    self.state.handle_identity_lost(id, now);
                }
            }
            12 => {
                let node = NodeId::new(choices.pick(&NODES)).unwrap();
                let command = if choices.flag() {
                    NodeCommand::TransportStatus
                } else {
                    let adapter = AdapterKey::new(choices.pick(&PROVIDERS).0).unwrap();
                    NodeCommand::Capabilities { adapter, target: choices.flag().then(|| Target::new("t").unwrap()) }
                };
                let deadline = Duration::from_millis(choices.number().min(1 << 40));
                if self.state.command(&node, command, None, deadline, now).is_ok() {
                    self.commands += 1;
                }
            }
            13 => {
                if let Some(id) = self.connection(choices) {
                    let outcome = Ok(CommandResult::TransportStatus { active_runs: 1 });
                    let response = CommandResponse { command_id: choices.number(), session_id: None, outcome };
                    self.state.handle_command_response(id, response, now);
                }
            }
            14..=18 => self.submit(choices),
            19 => {
                if let Some(attempt) = self.attempt(choices) {
                    let _ = self.state.dispatch(attempt, now);
                }
            }
            20 | 21 => {
                if let Some(attempt) = self.attempt(choices) {
                    let generation = self.state.ledger.lease(attempt).map(|lease| lease.generation);
                    let late = choices.below(4) == 1;
                    let generation = generation.unwrap_or(Generation(1));
                    let judged = if late { Generation(generation.0 + 1) } else { generation };
                    let verdict = verdict(choices);
                    if choices.flag() {
                        self.state.handle_answer(attempt, judged, verdict, now);
                    } else {
                        let freed = self.state.handle_terminal(attempt, judged, verdict, now);
                        assert!(!freed || !late, "FEN-4");
                    }
                }
            }
            22 => {
                if let Some(attempt) = self.attempt(choices) {
                    self.state.handle_withdrawn(attempt, now);
                }
            }
            23 => {
                if let Some(attempt) = self.attempt(choices) {
                    self.state.cancel(attempt, now);
                }
            }
            24 => {
                if let Some(attempt) = self.attempt(choices) {
                    self.abandon(attempt);
                }
            }
            25 => {
                self.now += Duration::from_millis(choices.number().min(600_000));
                self.state.handle_timeout(self.now);
            }
            26 => {
                self.revision += 1;
                let new = catalog(self.revision, choices);
                self.state.apply_config(Arc::new(new), now).unwrap();
            }
            _ => {
                let node = NodeId::new(choices.pick(&NODES)).unwrap();
                let _known = self.state.set_in_service(&node, choices.flag(), now);
            }
        }
    }

    fn open(&mut self, choices: &mut Choices<'_>) {
        if self.connections.len() >= CONNECTIONS {
            self.state.handle_closed(self.connections.remove(0), CloseCode::Closed, self.now);
        }
        let shown = choices.flag().then(|| VerifiedIdentity::vouched(identity(choices.pick::<&str>(&NODES)), []));
        let peer = PeerIdentity::new(choices.flag().then(|| ([10, 0, 0, choices.byte() & 3], 1).into()), shown);
        if let Ok(id) = self.state.handle_opened(peer, choices.number(), self.now) {
            self.connections.push(id);
        }
    }

    fn ready(&self, choices: &mut Choices<'_>) -> NodeReadyRequest {
        let providers = (0..choices.below(4)).map(|_| offered(choices.pick(&PROVIDERS).0, choices)).collect();
        let config_revision = if choices.flag() { choices.number() } else { self.revision };
        NodeReadyRequest { node_id: NodeId::new(choices.pick(&NODES)).unwrap(), config_revision, providers }
    }

    fn submit(&mut self, choices: &mut Choices<'_>) {
        let mut run = [0; 16];
        run[..8].copy_from_slice(&(self.attempts.len() as u64).to_be_bytes());
        let destination = if choices.below(4) == 1 {
            Destination::Direct {
                node: choices.flag().then(|| NodeId::new(choices.pick(&NODES)).unwrap()),
                adapter: AdapterKey::new(choices.pick(&PROVIDERS).0).unwrap(),
                target: Target::new("t").unwrap(),
            }
        } else {
            Destination::Model(ModelName::new(choices.pick(&MODELS)).unwrap())
        };
        let avoid = Avoid { provider: ProviderId::new(choices.pick(&PROVIDERS).0).unwrap(), fallback: choices.flag() };
        let ask = Ask {
            run_id: RunId::from_bytes(run),
            destination,
            wanted: [
                None,
                Some(Wanted::Messages),
                Some(Wanted::Wire(WireKind::Run)),
                Some(Wanted::Wire(WireKind::Tunnel)),
            ][choices.below(4)],
            caller: choices.flag().then(|| Principal::new(choices.pick(&["p", "q"])).unwrap()),
            priority: i8::from_ne_bytes([choices.byte()]),
            deadline: choices.flag().then(|| self.now + Duration::from_millis(choices.number().min(60_000))),
            prompt_tokens_estimate: u32::try_from(choices.number()).unwrap_or(u32::MAX),
            prompt_prefix: choices.number(),
            avoid: choices.flag().then_some(avoid),
        };
        match self.state.submit(ask, self.now) {
            Ok(Admission::Granted(grant)) => {
                self.placed += 1;
                self.attempts.push(grant.attempt);
                self.waiting.insert(grant.attempt, false);
            }
            Ok(Admission::Queued(attempt, _)) => {
                self.attempts.push(attempt);
                self.waiting.insert(attempt, true);
            }
            Ok(Admission::Denied(denial)) => panic!("no provider here needs a credential: {denial:?}"),
            Err(_) => {}
        }
    }

    fn abandon(&mut self, attempt: AttemptId) {
        self.observe();
        self.waiting.remove(&attempt);
        self.state.abandon(attempt, self.now);
    }

    fn observe(&mut self) {
        while let Some(effect) = self.state.poll_effect() {
            match effect {
                Effect::Granted(grant) => {
                    self.placed += 1;
                    assert_eq!(self.waiting.insert(grant.attempt, false), Some(true), "I1: once, and only a waiter");
                }
                Effect::Refused { attempt, .. } => {
                    assert_eq!(self.waiting.remove(&attempt), Some(true), "I1: once, and only a waiter");
                }
                Effect::Overdue { attempt } => {
                    // What was due at the same time may have ended its connection since.
                    let reached = self.state.cancel(attempt, self.now);
                    assert!(reached == CancelReached::Dispatched || !self.state.attempts.contains_key(&attempt));
                }
                Effect::Observe(Observation::LeaseReleased { .. }) => self.released += 1,
                Effect::Commanded { .. } => self.commanded += 1,
                Effect::Close { connection, .. } => self.connections.retain(|id| *id != connection),
                Effect::Send { message, .. } => {
                    assert!(!matches!(*message, ToNode::Run(_) | ToNode::Tunnel(_)), "requests are the driver's");
                    iop_wire::convert::WireMessage::check(&*message).unwrap();
                }
                Effect::Disconnected { .. }
                | Effect::CheckReceipt { .. }
                | Effect::Quarantined { .. }
                | Effect::Publish(_)
                | Effect::Observe(_) => {}
            }
        }
    }

    fn check(&self) {
        let state = &self.state;
        let mut held = 0;
        for (id, node) in PROVIDERS {
            let counters = state.ledger.counters(&NodeId::new(node).unwrap(), &ProviderId::new(id).unwrap());
            assert!(counters.in_use() <= MOST && counters.quarantined <= counters.in_use(), "I4: {counters:?}");
            held += counters.in_use() as usize;
        }
        assert_eq!(self.placed, self.released + held, "I5");
        assert!(state.waiting().len() <= 3 * MODELS.len() + PROVIDERS.len() * 3, "I10");
        assert!(state.timers.bound_holds(state.attempts.len(), CONNECTIONS, PROVIDERS.len(), self.commands), "I10");
        assert_eq!(state.runs.len(), state.attempts.len());
        assert!(self.commanded <= self.commands, "one answer for each command");
    }

    fn finish(mut self) {
        for id in std::mem::take(&mut self.connections) {
            self.state.handle_closed(id, CloseCode::Closed, self.now);
        }
        self.observe();
        for attempt in std::mem::take(&mut self.attempts) {
            self.abandon(attempt);
        }
        self.observe();
        assert!(self.state.attempts.is_empty(), "I4: at rest");
        assert_eq!(self.placed, self.released, "I4: at rest all counters are 0");
        assert_eq!(self.commanded, self.commands, "every command was answered");
        assert!(self.state.snapshot(self.now).is_at_rest());
        assert!(self.state.identities().is_empty() && self.state.identity_over.is_empty());
    }
}

fn hello(choices: &mut Choices<'_>) -> Hello {
    Hello {
        proto_min: 1 + u32::from(choices.below(8) == 1),
        proto_max: 1 + u32::from(choices.byte() & 1),
        features: Vec::new(),
        node_version: "fuzz".into(),
        instance_id: [choices.byte() & 1; 16],
        connection_ordinal: choices.number(),
        max_envelope: 65_536,
    }
}

fn register(choices: &mut Choices<'_>) -> RegisterRequest {
    let token = match choices.below(5) {
        at @ 0..=2 => secret(NODES[at]),
        3 => secret("n1").replace('s', "t"),
        _ => String::new(),
    };
    RegisterRequest {
        token: Redacted::new(token),
        recipient_key: bytes::Bytes::new(),
        inventory: Vec::new(),
        claimed_node_id: choices.flag().then(|| NodeId::new(choices.pick(&NODES)).unwrap()),
    }
}

fn offered(id: &str, choices: &mut Choices<'_>) -> ProviderReady {
    let targets = (0..choices.below(3))
        .map(|at| ReadyTarget { target: Target::new(["t", "u", "v"][at]).unwrap(), context_length: choices.number() });
    let targets = targets.collect();
    ProviderReady {
        provider_id: ProviderId::new(id).unwrap(),
        max_concurrency: u32::try_from(choices.number()).unwrap_or(0),
        tunnels: !choices.flag(),
        runs: !choices.flag(),
        tools: false,
        reasoning: false,
        messages: choices.flag(),
        targets,
    }
}

fn verdict(choices: &mut Choices<'_>) -> Verdict {
    match choices.below(4) {
        0 => Verdict::Good,
        1 => Verdict::Neutral,
        2 => Verdict::Fault,
        _ => Verdict::Busy { retry_after: choices.flag().then(|| Duration::from_millis(choices.number())) },
    }
}
