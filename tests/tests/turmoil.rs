//! The real gRPC link over a simulated TCP, partitioned: the heartbeat finds it, once, and the Node comes back.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a broken assumption fails the test")]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use iop_edge_core::api::Submit;
use iop_edge_core::catalog::{Candidate, Catalog, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults};
use iop_edge_core::events::{Notice, Subscription};
use iop_edge_core::token::{Token, TokenKind};
use iop_edge_core::{Edge, EdgeNodeEvent};
use iop_execution::testkit::{Script, ScriptedProvider, chat_json};
use iop_execution::{
    Entropy, FailureCode, ModelName, NodeId, Provider, ProviderId, Redacted, RunEventKind, Target, async_trait,
};
use iop_node_core::{CUSTOM_KIND, Node, ReconnectPolicy};
use iop_wire::link::grpc::{GrpcConnector, serve_stream};
use iop_wire::{CloseCode, ConnectError, Connector, NodeLink, PeerIdentity, ProviderConfig};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

const PORT: u16 = 50_051;
const SEEDS: u64 = 50;
/// Longer than anything that is waited for; virtual.
const PATIENCE: Duration = Duration::from_secs(300);

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Dials by turmoil's TCP.
#[derive(Debug)]
struct Dialler(GrpcConnector);

#[async_trait]
impl Connector for Dialler {
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        let stream = turmoil::net::TcpStream::connect(("edge", PORT)).await;
        let stream = stream.map_err(|error| ConnectError::Retryable(error.to_string()))?;
        self.0.over(stream, PeerIdentity::default()).await
    }
}

fn edge(token: &Token, seed: u64) -> Edge {
    let provider = ProviderConfig::new(ProviderId::new("p").unwrap(), CUSTOM_KIND).unwrap();
    let providers = vec![ProviderEntry::new(provider)];
    let candidate = Candidate::new(ProviderId::new("p").unwrap(), Target::new("t").unwrap());
    let model = ModelGroup::new(ModelName::new("m").unwrap(), vec![candidate], QueueDefaults::default());
    let catalog = Catalog::builder()
        .node(NodeEntry::new(NodeId::new("n").unwrap(), token.id().clone(), token.hash(), providers))
        .model(model)
        .build();
    Edge::builder(catalog.unwrap()).entropy(Entropy::seeded(seed)).build()
}

async fn listen(edge: Edge) {
    let listener = turmoil::net::TcpListener::bind((IpAddr::V4(Ipv4Addr::UNSPECIFIED), PORT)).await.unwrap();
    loop {
        let (stream, address) = listener.accept().await.unwrap();
        let edge = edge.clone();
        let on_link = move |link| drop(tokio::spawn(edge.attach(link)));
        let peer = PeerIdentity::new(Some(address), None);
        tokio::spawn(serve_stream(stream, peer, on_link, CancellationToken::new()));
    }
}

async fn next(events: &mut Subscription<EdgeNodeEvent>) -> EdgeNodeEvent {
    loop {
        match timeout(PATIENCE, events.next()).await.expect("something happens in time").expect("the Edge lives") {
            Notice::Event(EdgeNodeEvent::Connected { node, generation }) => {
                return EdgeNodeEvent::Connected { node, generation };
            }
            Notice::Event(EdgeNodeEvent::Disconnected { node, generation, code }) => {
                return EdgeNodeEvent::Disconnected { node, generation, code };
            }
            Notice::Event(_) => {}
            Notice::Lost(lost) => panic!("{lost} events are lost"),
        }
    }
}

async fn ask(edge: &Edge) -> Vec<RunEventKind> {
    let request = Submit::to_model(ModelName::new("m").unwrap());
    let body = Bytes::from(chat_json("m", "hello", true));
    let (_, stream) = edge.submit_run(request, body).await.unwrap();
    let events = timeout(PATIENCE, stream.map(|event| event.kind).collect::<Vec<_>>());
    events.await.expect("a run ends")
}

/// One seed: the path is cut at a time that the seed decides, with a run in flight or without one. Answers how long it took
/// to find that out.
fn partitioned(seed: u64, busy: bool) -> Duration {
    let found = Arc::new(Mutex::new(Duration::ZERO));
    let result = Arc::clone(&found);
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(Duration::from_millis(50))
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(100))
        .tcp_capacity(4096)
        .simulation_duration(Duration::from_secs(2_000))
        .build();
    let token = Token::generate(TokenKind::Node).unwrap();
    let text = token.reveal();
    let first = if busy { Script::new().delta("some").hang() } else { Script::text("whole") };
    let (provider, calls) = ScriptedProvider::new(first).then(Script::text("whole")).into_parts();
    let provider: Arc<dyn Provider> = provider;
    sim.host("node", move || {
        let (text, provider) = (text.clone(), Arc::clone(&provider));
        async move {
            let connector = Dialler(GrpcConnector::plaintext(format!("edge:{PORT}")).unwrap());
            let policy = ReconnectPolicy::new(Some(0), Some(Duration::from_secs(2))).unwrap();
            let node = Node::builder(Redacted::new(text), Arc::new(connector))
                .entropy(Entropy::seeded(seed))
                .reconnect(policy)
                .provider("p", provider);
            node.build()?.serve(CancellationToken::new()).await?;
            Outcome::Ok(())
        }
    });
    sim.client("edge", async move {
        let edge = edge(&token, seed);
        let mut events = edge.subscribe_nodes();
        tokio::spawn(edge.drive());
        tokio::spawn(listen(edge.clone()));
        assert!(matches!(next(&mut events).await, EdgeNodeEvent::Connected { .. }));

        let hanging = busy.then(|| {
            let edge = edge.clone();
            tokio::spawn(async move { ask(&edge).await })
        });
        // Long enough that the heartbeat is somewhere in its interval.
        sleep(Duration::from_millis(5_000 + seed * 977 % 60_000)).await;
        turmoil::partition("edge", "node");
        let cut = Instant::now();
        let EdgeNodeEvent::Disconnected { code, .. } = next(&mut events).await else { panic!("it is found first") };
        assert_eq!(code, CloseCode::HeartbeatTimeout);
        *result.lock().unwrap() = cut.elapsed();
        if let Some(hanging) = hanging {
            let run = timeout(PATIENCE, hanging).await??;
            match run.last() {
                // A suspicion would have ended it long before, had its client seen no content.
                Some(RunEventKind::Error(failure)) => assert_eq!(failure.code, FailureCode::Disconnected),
                other => panic!("seed {seed}: {other:?}"),
            }
            assert_eq!(run.iter().filter(|kind| kind.is_terminal()).count(), 1);
        }
        assert!(edge.snapshot().is_at_rest(), "seed {seed}");

        // Once: nothing more is heard of it while the path stays cut.
        let quiet = Duration::from_secs(60);
        assert!(timeout(quiet, next(&mut events)).await.is_err(), "seed {seed}: it ends twice");
        turmoil::repair("edge", "node");
        let healed = Instant::now();
        assert!(matches!(next(&mut events).await, EdgeNodeEvent::Connected { .. }));
        assert!(healed.elapsed() < Duration::from_secs(45), "seed {seed}: {:?}", healed.elapsed());
        let run = ask(&edge).await;
        assert!(matches!(run.last(), Some(RunEventKind::Complete(_))), "seed {seed}: {run:?}");
        assert!(edge.snapshot().is_at_rest(), "seed {seed}");
        Ok(())
    });
    sim.run().unwrap();
    let counts = calls.counts();
    assert_eq!((counts.calls, counts.active), (if busy { 2 } else { 1 }, 0), "seed {seed}");
    *found.lock().unwrap()
}

#[test]
fn a_partition_is_found_by_the_heartbeat_once_and_the_node_comes_back() {
    // WIR-12, WIR-13, FEN-2, FEN-5, NOD-1, NOD-5
    let mut times = Vec::new();
    for seed in 1..=SEEDS {
        // With work in flight the Edge asks soon (FEN-7), else when the next ping is due.
        let busy = seed % 2 == 0;
        let found = partitioned(seed, busy).as_secs_f64();
        let latest = if busy { 49.0 } else { 76.0 };
        assert!((44.5..latest).contains(&found), "seed {seed}: {found}");
        times.push(found);
    }
    let (least, most) =
        times.iter().fold((f64::MAX, 0.0_f64), |(least, most), time| (least.min(*time), most.max(*time)));
    assert!(least < 47.5 && most > 65.0, "the seeds cover the interval: {least} to {most}");
}
