//! Decides what must hold of a Node when its Edge says anything, in any order: one terminal for each run, nothing after it,
//! every provider call ended, and an end of its own. A fuzz target: a plain function (SEC-5).
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a panic is how a target reports"
)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{HeaderMap, Method, StatusCode};
use iop_execution::fuzz::Choices;
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{AdapterKey, CancelReason, Entropy, FrameFlags, NodeId, ProviderId, Redacted, RunId, Target};
use iop_wire::convert::WireMessage as _;
use iop_wire::link::Outgoing;
use iop_wire::*;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::node::Node;
use crate::state::reconnect::ReconnectPolicy;

/// Longer than any timer of the engine.
const AFTERWARDS: Duration = Duration::from_secs(3600);

type Item = Result<Sequenced<ToNode>, LinkError>;

#[derive(Debug)]
struct RawLink {
    items: mpsc::UnboundedReceiver<Item>,
    outgoing: oneshot::Sender<Handed>,
}

struct Handed(Outgoing<ToEdge>);

impl std::fmt::Debug for Handed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handed")
    }
}

impl Link for RawLink {
    type In = ToNode;
    type Out = ToEdge;

    fn peer(&self) -> PeerIdentity {
        PeerIdentity::default()
    }

    fn start(self: Box<Self>, outgoing: Outgoing<ToEdge>) -> Incoming<ToNode> {
        let Self { mut items, outgoing: hand_over } = *self;
        let _gone = hand_over.send(Handed(outgoing));
        Box::pin(futures_util::stream::poll_fn(move |cx| items.poll_recv(cx)))
    }
}

/// Gives one link, and then none.
#[derive(Debug)]
struct Once(Mutex<Option<RawLink>>);

#[iop_execution::async_trait]
impl Connector for Once {
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        let link = self.0.lock().unwrap().take();
        link.map(|link| Box::new(link) as NodeLink).ok_or_else(|| ConnectError::Retryable("no more".into()))
    }
}

/// The Edge's end: what it sends crosses the wire's own checks.
struct Edge {
    to_node: mpsc::UnboundedSender<Item>,
    seq: u64,
}

impl Edge {
    fn send(&mut self, message: ToNode) {
        self.seq += 1;
        self.send_as(self.seq, message);
    }

    fn send_as(&mut self, seq: u64, message: ToNode) {
        // What can't be said is not said.
        let Ok(bytes) = ToNode::encode(Sequenced { seq, message }) else { return };
        let _gone = self.to_node.send(ToNode::decode(bytes));
    }
}

/// A Node whose Edge says anything.
pub fn engine_node(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(told(Choices::new(data)));
}

fn script(choices: &mut Choices<'_>) -> Script {
    let mut script = Script::new();
    for _ in 0..choices.below(6) {
        script = match choices.below(8) {
            0 | 1 => script.delta("some text"),
            2 => script.delta("x".repeat(usize::from(choices.byte()) << 6)),
            3 => script.wait(Duration::from_millis(choices.number().min(40_000))),
            4 => script.head(StatusCode::OK, "text/event-stream"),
            5 => script.frame(Bytes::from_static(b"data: {}\n\n"), FrameFlags::CONTENT),
            6 => script.hang(),
            _ => script.reasoning("why"),
        };
    }
    script
}

async fn told(mut choices: Choices<'_>) {
    let provider = ScriptedProvider::new(script(&mut choices)).then(script(&mut choices)).with_tunnels();
    let (provider, handle) = provider.into_parts();
    let (to_node, items) = mpsc::unbounded_channel();
    let (hand_over, outgoing) = oneshot::channel();
    let connector = Once(Mutex::new(Some(RawLink { items, outgoing: hand_over })));
    let node = Node::builder(Redacted::new("token".into()), Arc::new(connector))
        .provider("a", provider)
        .entropy(Entropy::seeded(7))
        .reconnect(ReconnectPolicy::new(Some(1), Some(Duration::from_secs(1))).unwrap())
        .build()
        .unwrap();
    let shutdown = CancellationToken::new();
    let serving = tokio::spawn(node.serve(shutdown.clone()));
    let mut edge = Edge { to_node, seq: 0 };
    let Ok(Handed(mut outgoing)) = outgoing.await else { return };

    let polite = choices.below(8) != 1;
    if polite {
        edge.send(ack());
        edge.send(registered(&[config(&mut Choices::new(&[]))]));
        loop {
            match outgoing.next().await {
                Some(Sequenced { message: ToEdge::Ready(_), .. }) => break,
                Some(_) => {}
                None => panic!("it ended by itself"),
            }
        }
        edge.send(ToNode::ReadyResponse(NodeReadyResponse { ready: true, lease_generation: 1 }));
    }
    let seen = tokio::spawn(listen(outgoing, if polite { 3 } else { 0 }));
    let mut runs = 0;
    for _ in 0..96 {
        if choices.is_empty() {
            break;
        }
        step(&mut edge, &mut runs, &mut choices);
        match choices.below(32) {
            1 => tokio::time::sleep(Duration::from_millis(choices.number().min(400_000))).await,
            3 if choices.below(8) == 1 => shutdown.cancel(),
            _ => {
                for _ in 0..3 {
                    tokio::task::yield_now().await;
                }
            }
        }
    }
    drop(edge);
    let _end = tokio::time::timeout(AFTERWARDS, serving).await.expect("it gives up").unwrap();
    tokio::time::timeout(AFTERWARDS, seen).await.expect("its link ends").unwrap();
    tokio::time::sleep(AFTERWARDS).await;
    let counts = handle.counts();
    assert_eq!(counts.active, 0, "every call has ended: {counts:?}");
    assert_eq!(counts.calls, counts.returned + counts.dropped, "{counts:?}");
}

/// Reads what the Node says, and that it says nothing wrong.
async fn listen(mut outgoing: Outgoing<ToEdge>, mut seq: u64) {
    let mut runs: BTreeMap<RunNumber, (u64, bool)> = BTreeMap::new();
    while let Some(item) = outgoing.next().await {
        assert_eq!(item.seq, seq + 1, "WIR-6");
        seq = item.seq;
        item.message.check().unwrap();
        let (run, n, terminal) = match &item.message {
            ToEdge::Event(run, event) => (*run, event.seq, event.kind.is_terminal()),
            ToEdge::Frame(run, n, frame) => (*run, *n, frame.is_terminal()),
            ToEdge::Goodbye(_) => {
                assert!(outgoing.next().await.is_none(), "nothing follows a Goodbye");
                return;
            }
            _ => continue,
        };
        let (last, ended) = runs.entry(run).or_default();
        assert!(!*ended, "I2: nothing follows the terminal of {run}");
        assert_eq!(n, *last + 1, "I3");
        (*last, *ended) = (n, terminal);
    }
}

fn ack() -> ToNode {
    ToNode::HelloAck(HelloAck { proto: 1, features: Vec::new(), max_envelope: 65_536, edge_id: "edge".into() })
}

fn registered(providers: &[ProviderConfig]) -> ToNode {
    let config = NodeConfigPayload { revision: 5, providers: providers.to_vec() };
    let outcome = Ok(Registered { node_id: NodeId::new("node").unwrap(), config, trusted_lease_signers: Vec::new() });
    ToNode::RegisterResponse(RegisterResponse { edge_time_ms: 1, outcome })
}

fn config(choices: &mut Choices<'_>) -> ProviderConfig {
    let mut config = ProviderConfig::new(ProviderId::new("p").unwrap(), "custom").unwrap();
    config.adapter = AdapterKey::new(*choices.pick(&["a", "a", "a", "b"])).unwrap();
    config.capacity = u32::from(choices.byte() & 3);
    config.response_stall_timeout_ms = choices.number().min(1 << 40);
    config.close_grace_ms = choices.number().min(20_000);
    config.probe_timeout_ms = choices.number().min(20_000);
    config.cancel_policy = *choices.pick(&[CancelPolicy::Abort, CancelPolicy::Drain]);
    config
}

fn step(edge: &mut Edge, runs: &mut u64, choices: &mut Choices<'_>) {
    let odd = choices.byte();
    let old = RunNumber(if odd > 250 { choices.number() } else { *runs - u64::from(choices.byte() & 3).min(*runs) });
    let message = match choices.below(24) {
        0..=7 => {
            *runs += 1;
            let number = RunNumber(if odd == 250 { choices.number() } else { *runs });
            let body = usize::from(choices.byte());
            let head = head(number, body as u64, choices);
            let request = if choices.flag() {
                ToNode::Run(RunDispatch { head })
            } else {
                let path = (*choices.pick(&["/v1/chat/completions", "/v1/embeddings", "/../x"])).to_owned();
                let (path, headers) = (Redacted::new(path), Redacted::new(HeaderMap::new()));
                ToNode::Tunnel(TunnelDispatch { head, method: Method::POST, path, headers })
            };
            edge.send(request);
            // The body, mostly right.
            let mut data = br#"{"messages":[{"role":"user","content":"hi"}]}"#.to_vec();
            data.resize(body, b' ');
            if choices.below(8) == 1 {
                data.truncate(choices.below(64));
            }
            ToNode::Chunk(RequestChunk { run: number, data: data.into(), last: choices.below(8) != 1 })
        }
        8 | 9 => ToNode::Cancel(old, *choices.pick(CancelReason::ALL)),
        10 | 11 => ToNode::Credit(old, u32::try_from(choices.number()).unwrap_or(u32::MAX)),
        12 => {
            let len = usize::from(choices.byte());
            ToNode::Chunk(RequestChunk { run: old, data: choices.slice(len).to_vec().into(), last: choices.flag() })
        }
        13 => ToNode::Command(CommandRequest {
            command_id: choices.number(),
            session_id: None,
            deadline_ms: choices.number(),
            command: match choices.below(3) {
                0 => NodeCommand::TransportStatus,
                1 => NodeCommand::Capabilities {
                    adapter: AdapterKey::new(*choices.pick(&["a", "b"])).unwrap(),
                    target: choices.flag().then(|| Target::new("t").unwrap()),
                },
                _ => NodeCommand::OllamaApi {
                    adapter: AdapterKey::new("a").unwrap(),
                    method: Method::GET,
                    path: (*choices.pick(&["/api/tags", "/api/../x"])).to_owned(),
                    body: Redacted::new(Bytes::new()),
                },
            },
        }),
        14 => {
            let config = NodeConfigPayload { revision: choices.number(), providers: vec![config(choices)] };
            ToNode::ConfigUpdate(ConfigUpdate::new(config))
        }
        15 => ToNode::Ping(Ping { nonce: choices.number() }),
        16 => ToNode::Pong(Pong { nonce: choices.number(), edge_time_ms: choices.number() }),
        17 => ToNode::Drain(Drain { deadline_ms: choices.number(), returning: choices.flag() }),
        18 if choices.below(8) == 1 => {
            ToNode::Goodbye(Goodbye { code: *choices.pick(CloseCode::ALL), retry_after_ms: 1000 })
        }
        19 => ack(),
        20 => registered(&[config(choices)]),
        21 => ToNode::ReadyResponse(NodeReadyResponse { ready: choices.flag(), lease_generation: choices.number() }),
        22 => {
            edge.seq += 1;
            let _gone = edge.to_node.send(Err(LinkError::MalformedRun { seq: edge.seq, run: old, problem: "fuzz" }));
            return;
        }
        _ => ToNode::Credit(old, 65_536),
    };
    if odd == 249 {
        edge.send_as(choices.number(), message);
    } else {
        edge.send(message);
    }
}

fn head(run: RunNumber, body_len: u64, choices: &mut Choices<'_>) -> DispatchHead {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&run.0.to_be_bytes());
    DispatchHead {
        run_id: RunId::from_bytes(id),
        run,
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new(*choices.pick(&["a", "a", "a", "b"])).unwrap(),
        target: Target::new("t").unwrap(),
        session_id: None,
        background: false,
        stream: choices.flag(),
        response_stall_timeout_ms: choices.number().min(1 << 40),
        deadline_ms: choices.number(),
        body_len,
        window: u32::from(choices.byte()) << 10,
        prompt_tokens_estimate: u32::from(choices.byte()),
        credential_lease: Redacted::default(),
        credential_scope: None,
    }
}
