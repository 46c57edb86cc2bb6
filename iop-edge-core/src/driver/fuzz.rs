//! Decides what must hold when a Node says anything of a run, in any order: one terminal for the client, nothing after it, and
//! nothing left behind (I1, I2, I3, I4).

use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use http::{HeaderMap, Method, StatusCode};
use iop_execution::failure::{FailureStage, ProviderContacted};
use iop_execution::fuzz::Choices;
use iop_execution::{
    CancelReason, Entropy, ExecutionFailure, FailureCode, FinishReason, FrameFlags, ModelName, NodeId, ProviderId,
    Redacted, RunEvent, RunEventKind, Target, ToolCallDelta, TunnelFrame, TunnelHead, Usage,
};
use iop_wire::convert::WireMessage as _;
use iop_wire::{
    CloseCode, Goodbye, Hello, LinkError, NodeReadyRequest, Pong, ProviderConfig, ProviderReady, RegisterRequest,
    RunNumber, Sequenced, ToEdge, ToNode,
};
use tokio::sync::mpsc;

use crate::api::Submit;
use crate::catalog::{Candidate, Catalog, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults};
use crate::driver::raw_link::{Item, RawEnd, RawLink};
use crate::edge::{Edge, TunnelCall};
use crate::token::{Token, TokenKind};

const TOKEN: &str = "iopn_abcdefgh_sssssssssssssssssssssssssssssssssssssssssss";
/// Longer than any timer of the engine.
const AFTERWARDS: Duration = Duration::from_secs(600);

/// The Node's end: what it sends crosses the wire's own checks.
struct Node {
    to_edge: mpsc::UnboundedSender<Item>,
    seq: u64,
}

impl Node {
    fn send(&mut self, message: ToEdge) {
        self.seq += 1;
        self.send_as(self.seq, message);
    }

    fn send_as(&mut self, seq: u64, message: ToEdge) {
        // What can't be said is not said.
        let Ok(bytes) = ToEdge::encode(Sequenced { seq, message }) else { return };
        let _gone = self.to_edge.send(ToEdge::decode(bytes));
    }
}

fn catalog() -> Catalog {
    let token = Token::parse(TokenKind::Node, TOKEN).unwrap();
    let provider = ProviderId::new("p").unwrap();
    let config = ProviderConfig::new(provider.clone(), "demo").unwrap();
    let node =
        NodeEntry::new(NodeId::new("n").unwrap(), token.id().clone(), token.hash(), vec![ProviderEntry::new(config)]);
    let candidate = Candidate::new(provider, Target::new("t").unwrap());
    let model = ModelGroup::new(ModelName::new("m").unwrap(), vec![candidate], QueueDefaults::default());
    Catalog::builder().node(node).model(model).build().unwrap()
}

/// A tunnel whose Node says anything.
pub fn tunnel_frame_sequence(data: &[u8]) {
    history(data, true);
}

/// A run whose Node says anything.
pub fn run_event_sequence(data: &[u8]) {
    history(data, false);
}

fn history(data: &[u8], tunnel: bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(told(Choices::new(data), tunnel));
}

async fn told(mut choices: Choices<'_>, tunnel: bool) {
    let edge = Edge::builder(catalog()).entropy(Entropy::seeded(7)).build();
    let timers = tokio::spawn(edge.drive());
    let (link, RawEnd { to_edge, outgoing }) = RawLink::pair();
    let session = tokio::spawn(edge.attach(link));
    let mut from_edge = outgoing.await.unwrap();
    let mut node = Node { to_edge, seq: 0 };
    register(&mut node);

    let submit = Submit::to_model(ModelName::new("m").unwrap());
    while edge.snapshot().nodes.iter().any(|node| !node.connected) {
        let _message = from_edge.next().await.unwrap();
    }
    let (output, run_id) = if tunnel {
        let (method, path, body) = (Method::POST, "/v1/chat/completions".into(), Bytes::from_static(b"{}"));
        let call = TunnelCall { method, path, headers: HeaderMap::new(), body };
        let (admitted, stream) = edge.submit_tunnel(submit, call).await.unwrap();
        let stream = stream.map(|frame| frame.is_terminal()).boxed();
        (stream, admitted.run_id)
    } else {
        let (admitted, stream) = edge.submit_run(submit, Bytes::from_static(b"{\"messages\":[]}")).await.unwrap();
        let stream = stream.map(|event| event.kind.is_terminal()).boxed();
        (stream, admitted.run_id)
    };
    let reads = choices.below(8) != 1;
    let client = tokio::spawn(client(output, reads));
    let run = loop {
        match from_edge.next().await.unwrap().message {
            ToNode::Run(request) => break request.head.run,
            ToNode::Tunnel(request) => break request.head.run,
            _ => {}
        }
    };
    // What the Edge says from here on says nothing wrong.
    let written = tokio::spawn(async move {
        let mut seq = 0;
        while let Some(item) = from_edge.next().await {
            assert!(item.seq > seq);
            seq = item.seq;
            item.message.check().unwrap();
        }
    });
    let mut n = 0;
    for _ in 0..128 {
        if choices.is_empty() {
            break;
        }
        step(&mut node, run, &mut n, tunnel, &mut choices);
        match choices.below(48) {
            1 => drop(edge.cancel(run_id)),
            2 => client.abort(),
            3 => tokio::time::sleep(Duration::from_millis(choices.number().min(100_000))).await,
            _ => {
                for _ in 0..3 {
                    tokio::task::yield_now().await;
                }
            }
        }
    }
    drop(node);
    tokio::time::timeout(AFTERWARDS, session).await.expect("the session ends with its link").unwrap();
    written.await.unwrap();
    match tokio::time::timeout(AFTERWARDS, client).await.expect("every run has an end") {
        Ok(terminals) => assert_eq!(terminals, 1, "I1: one terminal"),
        Err(gone) => assert!(gone.is_cancelled(), "{gone}"),
    }
    tokio::time::sleep(AFTERWARDS).await;
    assert!(edge.snapshot().is_at_rest(), "I4");
    timers.abort();
}

/// Reads to the end, or nothing for a long time and then to the end. Answers how many terminals there were.
async fn client(mut output: impl Stream<Item = bool> + Unpin, reads: bool) -> usize {
    if !reads {
        tokio::time::sleep(Duration::from_secs(90)).await;
    }
    let mut terminals = 0;
    while let Some(terminal) = output.next().await {
        assert_eq!(terminals, 0, "I2: nothing follows the terminal");
        terminals += usize::from(terminal);
    }
    terminals
}

fn register(node: &mut Node) {
    node.send(ToEdge::Hello(Hello {
        proto_min: 1,
        proto_max: 1,
        features: Vec::new(),
        node_version: "fuzz".into(),
        instance_id: [7; 16],
        connection_ordinal: 1,
        max_envelope: 65_536,
    }));
    node.send(ToEdge::Register(RegisterRequest {
        token: Redacted::new(TOKEN.into()),
        recipient_key: Bytes::new(),
        inventory: Vec::new(),
        claimed_node_id: None,
    }));
    node.send(ToEdge::Ready(NodeReadyRequest {
        node_id: NodeId::new("n").unwrap(),
        config_revision: 1,
        providers: vec![ProviderReady {
            provider_id: ProviderId::new("p").unwrap(),
            max_concurrency: 0,
            tunnels: true,
            runs: true,
            tools: true,
            reasoning: true,
            messages: true,
            targets: Vec::new(),
        }],
    }));
}

/// One message: mostly of this run, mostly with the right numbers.
fn step(node: &mut Node, run: RunNumber, n: &mut u64, tunnel: bool, choices: &mut Choices<'_>) {
    let odd = choices.byte();
    let of = if odd == 255 { RunNumber(choices.number()) } else { run };
    let number = match odd {
        254 => choices.number(),
        _ => *n + 1,
    };
    let message = match choices.below(32) {
        0 => ToEdge::Accepted(of),
        1 => ToEdge::Credit(of, u32::try_from(choices.number()).unwrap_or(u32::MAX)),
        2 => ToEdge::Pong(Pong { nonce: choices.number(), edge_time_ms: 0 }),
        3 if choices.below(8) == 1 => ToEdge::Goodbye(Goodbye { code: CloseCode::Shutdown, retry_after_ms: 0 }),
        4 if choices.below(8) == 1 => {
            node.seq += 1;
            let _gone = node.to_edge.send(Err(LinkError::MalformedRun { seq: node.seq, run: of, problem: "fuzz" }));
            return;
        }
        5 if choices.below(8) == 1 => {
            // The other wire's.
            *n += 1;
            if tunnel { event(of, number, choices) } else { frame(of, number, choices) }
        }
        _ => {
            *n += 1;
            if tunnel { frame(of, number, choices) } else { event(of, number, choices) }
        }
    };
    if odd == 253 {
        node.send_as(choices.number(), message);
    } else {
        node.send(message);
    }
}

fn failure(choices: &mut Choices<'_>) -> ExecutionFailure {
    let stage = *choices.pick(FailureStage::ALL);
    ExecutionFailure::new(*choices.pick(FailureCode::ALL), stage, *choices.pick(ProviderContacted::ALL), "fuzz")
}

fn usage(choices: &mut Choices<'_>) -> Usage {
    let mut one = || choices.flag().then(|| choices.number());
    Usage { input_tokens: one(), output_tokens: one(), reasoning_tokens: one(), cached_input_tokens: one() }
}

fn text(choices: &mut Choices<'_>) -> String {
    let len = usize::from(choices.byte());
    String::from_utf8_lossy(choices.slice(len)).into_owned()
}

fn frame(run: RunNumber, n: u64, choices: &mut Choices<'_>) -> ToEdge {
    let frame = match choices.below(16) {
        0..=2 => {
            let mut headers = HeaderMap::new();
            if choices.flag() {
                headers.insert("content-type", http::HeaderValue::from_static("text/event-stream"));
            }
            let status = 200 + u16::from(choices.byte()) * 2;
            TunnelFrame::Head(TunnelHead { status: StatusCode::from_u16(status).unwrap_or_default(), headers })
        }
        3..=10 => {
            let len = usize::from(choices.byte()) << (choices.byte() & 7);
            let mut bytes = choices.slice(len).to_vec();
            if choices.flag() {
                bytes.resize(len, b'x');
            }
            let flags = FrameFlags::from_wire(u32::from(choices.byte() & 63)).unwrap_or(FrameFlags::CONTENT);
            TunnelFrame::Body { bytes: bytes.into(), flags }
        }
        11 => TunnelFrame::Usage(usage(choices)),
        12 | 13 => TunnelFrame::End,
        14 => TunnelFrame::Failed(failure(choices)),
        _ => TunnelFrame::Cancelled(*choices.pick(CancelReason::ALL)),
    };
    ToEdge::Frame(run, n, frame)
}

fn event(run: RunNumber, seq: u64, choices: &mut Choices<'_>) -> ToEdge {
    let kind = match choices.below(16) {
        0 | 1 => RunEventKind::Start,
        2..=7 => RunEventKind::Delta(text(choices)),
        8 => RunEventKind::ReasoningDelta(text(choices)),
        9 | 10 => RunEventKind::ToolCallDelta(ToolCallDelta {
            index: u32::from(choices.byte()),
            id: choices.flag().then(|| text(choices)),
            name: choices.flag().then(|| text(choices)),
            arguments: text(choices),
        }),
        11 => RunEventKind::Usage,
        12 | 13 => RunEventKind::Complete(*choices.pick(FinishReason::ALL)),
        14 => RunEventKind::Error(failure(choices)),
        _ => RunEventKind::Cancelled(*choices.pick(CancelReason::ALL)),
    };
    let usage = choices.flag().then(|| usage(choices));
    ToEdge::Event(run, RunEvent { seq, kind, usage })
}
