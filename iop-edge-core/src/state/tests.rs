mod configs;
mod credentials;
mod duplicates;
mod handshake;
mod health;
mod identities;
mod model;
mod places;
mod scheduling;
mod tokens;

use iop_execution::{AdapterKey, NodeId, ProviderId, Redacted, Target};
use iop_wire::{
    CancelPolicy, Hello, NodeReadyRequest, PeerIdentity, ProviderConfig, ProviderReady, ReadyTarget, RegisterRequest,
    WireMode,
};

use super::*;
use crate::api::Destination;
use crate::catalog::{Candidate, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults};
use crate::token::{Token, TokenKind};

pub(crate) fn secret(node: &str) -> String {
    let id: String = node.chars().chain("xxxxxxxx".chars()).take(8).collect();
    format!("iopn_{id}_{}", "s".repeat(43))
}

pub(crate) fn provider_config(id: &str, capacity: u32, long_capacity: u32) -> ProviderConfig {
    ProviderConfig {
        provider_id: ProviderId::new(id).unwrap(),
        adapter: AdapterKey::new(id).unwrap(),
        kind: "demo".into(),
        base_url: String::new(),
        wire: WireMode::Auto,
        capacity,
        long_capacity,
        targets: Vec::new(),
        response_stall_timeout_ms: 0,
        first_response_timeout_ms: 0,
        stall_per_1k_prompt_ms: 0,
        close_grace_ms: 0,
        probe_timeout_ms: 0,
        terminal_linger_ms: 0,
        cancel_policy: CancelPolicy::Abort,
        auth: String::new(),
        credential: None,
    }
}

pub(crate) fn node_entry(id: &str, providers: &[(&str, u32, u32)]) -> NodeEntry {
    let token = Token::parse(TokenKind::Node, &secret(id)).unwrap();
    let providers = providers.iter().map(|(id, places, long)| ProviderEntry::new(provider_config(id, *places, *long)));
    NodeEntry::new(NodeId::new(id).unwrap(), token.id().clone(), token.hash(), providers.collect())
}

pub(crate) fn group(name: &str, providers: &[&str]) -> ModelGroup {
    let candidate = |id: &&str| Candidate::new(ProviderId::new(id).unwrap(), Target::new("t").unwrap());
    let queue = QueueDefaults { max_waiting: 3, timeout: Duration::from_secs(30) };
    ModelGroup::new(ModelName::new(name).unwrap(), providers.iter().map(candidate).collect(), queue)
}

/// Node n1 has provider a with 1 place and b with 2 (1 for long ones); node n2 has c with 1. Model `any` can use a and c,
/// `only-a` shares a's pool, `long` uses b with a threshold of 100 tokens.
pub(crate) fn catalog() -> Catalog {
    let mut long = group("long", &["b"]);
    long.long_context_threshold = Some(100);
    Catalog::builder()
        .revision(7)
        .suspicion_withdraw(None)
        .node(node_entry("n1", &[("a", 1, 0), ("b", 2, 1)]))
        .node(node_entry("n2", &[("c", 1, 0)]))
        .model(group("any", &["a", "c"]))
        .model(group("only-a", &["a"]))
        .model(long)
        .build()
        .unwrap()
}

pub(crate) fn new_state(catalog: Catalog) -> EdgeState {
    EdgeState::new(Arc::new(catalog), "edge".into(), Box::new(Ledger::default()), Box::new(LeastLoaded))
}

pub(crate) fn hello() -> Hello {
    Hello {
        proto_min: 1,
        proto_max: 1,
        features: Vec::new(),
        node_version: "test".into(),
        instance_id: [7; 16],
        connection_ordinal: 1,
        max_envelope: 65_536,
    }
}

pub(crate) fn register(node: &str) -> RegisterRequest {
    RegisterRequest {
        token: Redacted::new(secret(node)),
        recipient_key: bytes::Bytes::new(),
        inventory: Vec::new(),
        claimed_node_id: None,
    }
}

pub(crate) fn provider_ready(id: &str, targets: &[&str]) -> ProviderReady {
    let targets =
        targets.iter().map(|target| ReadyTarget { target: Target::new(target).unwrap(), context_length: 4096 });
    ProviderReady {
        provider_id: ProviderId::new(id).unwrap(),
        max_concurrency: 0,
        tunnels: true,
        runs: true,
        tools: false,
        reasoning: false,
        messages: false,
        targets: targets.collect(),
    }
}

pub(crate) fn ready(node: &str, revision: u64, providers: &[&str]) -> NodeReadyRequest {
    NodeReadyRequest {
        node_id: NodeId::new(node).unwrap(),
        config_revision: revision,
        providers: providers.iter().map(|id| provider_ready(id, &[])).collect(),
    }
}

pub(crate) fn providers_of(node: &str) -> &'static [&'static str] {
    if node == "n1" { &["a", "b"] } else { &["c"] }
}

/// Opens a connection and brings it up to its registration.
fn registered(state: &mut EdgeState, node: &str, now: Instant) -> ConnectionId {
    let id = state.handle_opened(PeerIdentity::default(), 99, now).unwrap();
    state.handle_hello(id, &hello(), now);
    state.handle_register(id, &register(node), 5, 5, now);
    id
}

fn connect(state: &mut EdgeState, node: &str, now: Instant) -> ConnectionId {
    let id = registered(state, node, now);
    state.handle_ready(id, ready(node, 7, providers_of(node)), now);
    id
}

fn effects(state: &mut EdgeState) -> Vec<Effect> {
    std::iter::from_fn(|| state.poll_effect()).collect()
}

fn ask(model: &str, run: u8) -> Ask {
    Ask {
        run_id: RunId::from_bytes([run; 16]),
        destination: Destination::Model(ModelName::new(model).unwrap()),
        wanted: None,
        caller: None,
        priority: 0,
        deadline: None,
        prompt_tokens_estimate: 0,
        prompt_prefix: 0,
        avoid: None,
    }
}

fn grant(admission: Result<Admission, SubmitError>) -> Grant {
    match admission {
        Ok(Admission::Granted(grant)) => *grant,
        other => panic!("not granted: {other:?}"),
    }
}

fn queued(admission: Result<Admission, SubmitError>) -> AttemptId {
    match admission {
        Ok(Admission::Queued(attempt, _)) => attempt,
        other => panic!("not queued: {other:?}"),
    }
}

fn granted(effects: &[Effect]) -> Vec<AttemptId> {
    let grants = effects.iter().filter_map(|effect| match effect {
        Effect::Granted(grant) => Some(grant.attempt),
        _ => None,
    });
    grants.collect()
}

fn refusals(effects: &[Effect]) -> Vec<(AttemptId, SubmitError)> {
    let refusals = effects.iter().filter_map(|effect| match effect {
        Effect::Refused { attempt, error } => Some((*attempt, error.clone())),
        _ => None,
    });
    refusals.collect()
}

fn releases(effects: &[Effect]) -> Vec<ReleaseCause> {
    let releases = effects.iter().filter_map(|effect| match effect {
        Effect::Observe(Observation::LeaseReleased { cause, .. }) => Some(*cause),
        _ => None,
    });
    releases.collect()
}

fn in_use(state: &EdgeState, provider: &str) -> PlaceCounters {
    let id = ProviderId::new(provider).unwrap();
    let node = &state.fleet.provider(&id).unwrap().node;
    state.ledger.counters(node, &id)
}
