//! A Node that does what a test says, message by message, and the Edge it talks to.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use iop_execution::{ModelName, ProviderId, RunEvent, RunEventKind, RunStream, TunnelFrame, TunnelStream};
use iop_wire::link::Outgoing;
use iop_wire::{CloseCode, DispatchHead, HeartbeatProfile, LinkError, Pong, RunNumber, Sequenced, ToEdge, ToNode};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::api::{Admitted, Output, Payload, Submit, SubmitError, Submitted};
use crate::catalog::Catalog;
use crate::driver::dispatch;
use crate::driver::raw_link::{Item, RawEnd, RawLink};
use crate::edge::{Edge, EdgeBuilder};
use crate::observe::{Observation, Observer};
use crate::snapshot::ProviderSnapshot;
use crate::state::PlaceCounters;
use crate::state::tests::{catalog, hello, providers_of, ready, register};

/// The Node's end of a link whose messages a test writes itself.
pub(super) struct Node {
    to_edge: Option<mpsc::UnboundedSender<Item>>,
    from_edge: Outgoing<ToNode>,
    seq: u64,
    pub(super) task: JoinHandle<()>,
}

impl Node {
    /// A link that has said nothing yet.
    pub(super) async fn dial(edge: &Edge) -> Self {
        let (link, RawEnd { to_edge, outgoing }) = RawLink::pair();
        let task = tokio::spawn(edge.attach(link));
        Self { to_edge: Some(to_edge), from_edge: outgoing.await.unwrap(), seq: 0, task }
    }

    /// A Node that waits to say that it is ready.
    pub(super) async fn register(edge: &Edge, name: &str) -> Self {
        let mut node = Self::dial(edge).await;
        node.send(ToEdge::Hello(hello()));
        assert!(matches!(node.recv().await, ToNode::HelloAck(_)));
        node.send(ToEdge::Register(register(name)));
        let ToNode::RegisterResponse(response) = node.recv().await else { panic!("no response") };
        response.outcome.unwrap();
        node
    }

    /// A ready Node.
    pub(super) async fn connect(edge: &Edge, name: &str) -> Self {
        let mut node = Self::register(edge, name).await;
        node.send(ToEdge::Ready(ready(name, 7, providers_of(name))));
        let ToNode::ReadyResponse(response) = node.recv().await else { panic!("no answer to ready") };
        assert!(response.ready);
        node
    }

    pub(super) fn send(&mut self, message: ToEdge) {
        self.seq += 1;
        self.send_as(self.seq, message);
    }

    /// Sends with another envelope number than the right one.
    pub(super) fn send_as(&mut self, seq: u64, message: ToEdge) {
        self.send_item(Ok(Sequenced { seq, message }));
    }

    pub(super) fn send_item(&mut self, item: Item) {
        let _gone = self.to_edge.as_ref().unwrap().send(item);
    }

    /// A message of a run that can't be decoded.
    pub(super) fn malformed(&mut self, run: RunNumber) {
        self.seq += 1;
        self.send_item(Err(LinkError::MalformedRun { seq: self.seq, run, problem: "no body" }));
    }

    /// An event with its number.
    pub(super) fn event(&mut self, run: RunNumber, seq: u64, kind: RunEventKind) {
        self.send(ToEdge::Event(run, RunEvent { seq, kind, usage: None }));
    }

    pub(super) fn frame(&mut self, run: RunNumber, n: u64, frame: TunnelFrame) {
        self.send(ToEdge::Frame(run, n, frame));
    }

    /// The next message that is no ping; pings are answered.
    pub(super) async fn recv(&mut self) -> ToNode {
        self.try_recv().await.expect("the edge ended the link")
    }

    pub(super) async fn try_recv(&mut self) -> Option<ToNode> {
        loop {
            match self.recv_any().await {
                Some(ToNode::Ping(ping)) => self.pong(ping.nonce),
                other => return other,
            }
        }
    }

    /// The next message, pings too.
    pub(super) async fn recv_any(&mut self) -> Option<ToNode> {
        let next = tokio::time::timeout(Duration::from_secs(3600), self.from_edge.next()).await;
        next.expect("nothing came for an hour").map(|item| item.message)
    }

    pub(super) fn pong(&mut self, nonce: u64) {
        self.send(ToEdge::Pong(Pong { nonce, edge_time_ms: 0 }));
    }

    /// What waits to be written now but for pings, which are answered, without letting time pass.
    pub(super) async fn pending(&mut self) -> Vec<ToNode> {
        settle().await;
        let mut all = Vec::new();
        while let Some(Some(item)) = futures_util::FutureExt::now_or_never(self.from_edge.next()) {
            match item.message {
                ToNode::Ping(ping) => self.pong(ping.nonce),
                other => all.push(other),
            }
        }
        all
    }

    /// The next request, without its body; its receipt is confirmed.
    pub(super) async fn request(&mut self) -> DispatchHead {
        let head = self.request_unconfirmed().await;
        self.send(ToEdge::Accepted(head.run));
        head
    }

    /// The next request, without its body and without a receipt.
    pub(super) async fn request_unconfirmed(&mut self) -> DispatchHead {
        match self.recv().await {
            ToNode::Run(request) => request.head,
            ToNode::Tunnel(request) => request.head,
            other => panic!("no request: {other:?}"),
        }
    }

    /// The next request, with its body, which must fit the initial credit.
    pub(super) async fn request_with_body(&mut self) -> (DispatchHead, Vec<u8>) {
        let head = self.request().await;
        let mut body = Vec::new();
        while (body.len() as u64) < head.body_len {
            match self.recv().await {
                ToNode::Chunk(chunk) => body.extend_from_slice(&chunk.data),
                other => panic!("no chunk: {other:?}"),
            }
        }
        (head, body)
    }

    /// The code the Edge closes with; whatever comes before is skipped, pings too.
    pub(super) async fn goodbye(&mut self) -> CloseCode {
        loop {
            match self.recv_any().await.expect("the edge ended the link") {
                ToNode::Goodbye(goodbye) => {
                    assert!(self.try_recv().await.is_none(), "something after the goodbye");
                    return goodbye.code;
                }
                _ => continue,
            }
        }
    }

    /// The link breaks: no Goodbye.
    pub(super) async fn cut(mut self) {
        self.to_edge = None;
        (&mut self.task).await.unwrap();
    }
}

/// Lets every task that can run do so.
pub(super) async fn settle() {
    for _ in 0..32 {
        tokio::task::yield_now().await;
    }
}

/// Keeps what it observes.
#[derive(Debug, Default)]
pub(super) struct Recorder(Mutex<Vec<Observation>>);

impl Recorder {
    pub(super) fn count(&self, wanted: impl Fn(&Observation) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|seen| wanted(seen)).count()
    }
}

impl Observer for Recorder {
    fn observe(&self, observation: &Observation) {
        self.0.lock().unwrap().push(observation.clone());
    }
}

/// An Edge whose timers run and whose heartbeat stays out of the way.
pub(super) fn edge() -> Edge {
    start(builder(catalog()))
}

pub(super) fn recorded() -> (Edge, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let observer: Arc<dyn Observer> = Arc::<Recorder>::clone(&recorder);
    (start(builder(catalog()).observer(observer)), recorder)
}

pub(super) fn builder(catalog: Catalog) -> EdgeBuilder {
    let never = Duration::from_secs(1_000_000);
    Edge::builder(catalog).heartbeat(HeartbeatProfile { interval: never, timeout: never, first_shift: never })
}

pub(super) fn start(builder: EdgeBuilder) -> Edge {
    let edge = builder.build();
    tokio::spawn(edge.drive());
    edge
}

pub(super) fn to(model: &str) -> Submit {
    Submit::to_model(ModelName::new(model).unwrap())
}

pub(super) const INPUT: &[u8] = b"{\"messages\":[]}";

pub(super) async fn run(edge: &Edge, model: &str) -> Result<RunStream, SubmitError> {
    edge.submit_run(to(model), Bytes::from_static(INPUT)).await.map(|(_, stream)| stream)
}

/// A run and its number at the Node.
pub(super) async fn started(edge: &Edge, node: &mut Node, model: &str) -> (RunStream, RunNumber) {
    let stream = run(edge, model).await.unwrap();
    let (head, _) = node.request_with_body().await;
    (stream, head.run)
}

pub(super) fn call(body: impl Into<Bytes>) -> crate::edge::TunnelCall {
    crate::edge::TunnelCall {
        method: http::Method::POST,
        path: "/v1/chat/completions".into(),
        headers: http::HeaderMap::new(),
        body: body.into(),
    }
}

pub(super) async fn tunnel(edge: &Edge, node: &mut Node, model: &str) -> (TunnelStream, RunNumber) {
    let (_, stream) = edge.submit_tunnel(to(model), call(Bytes::new())).await.unwrap();
    let head = node.request().await;
    (stream, head.run)
}

/// Submits, and does something between admission and dispatch.
pub(super) async fn submit_with(edge: &Edge, request: Submit, between: impl FnOnce(&Admitted) + Send) -> Submitted {
    let prepare = |admitted: &Admitted| {
        between(admitted);
        Payload::Run { input: Bytes::from_static(INPUT) }
    };
    dispatch::submit(edge.shared(), request, Some(crate::api::Wanted::Wire(crate::api::WireKind::Run)), prepare)
        .await
        .unwrap()
}

pub(super) fn run_output(submitted: Submitted) -> RunStream {
    match submitted.output {
        Output::Run(stream) => stream,
        Output::Tunnel(_) => panic!("a tunnel"),
    }
}

pub(super) fn delta(text: &str) -> RunEventKind {
    RunEventKind::Delta(text.into())
}

pub(super) fn provider(edge: &Edge, id: &str) -> ProviderSnapshot {
    edge.snapshot().provider(&ProviderId::new(id).unwrap()).unwrap().clone()
}

pub(super) fn in_use(edge: &Edge, id: &str) -> PlaceCounters {
    provider(edge, id).in_use
}

/// Nothing is held, waited for or buffered.
pub(super) fn assert_at_rest(edge: &Edge) {
    assert!(edge.snapshot().is_at_rest(), "{:?}", edge.snapshot());
    assert_eq!(edge.shared().pool.held(), 0, "bytes in the pool");
    assert!(!edge.shared().has_streams());
    edge.shared().with(|core, _| assert!(core.runs.is_empty() && core.waiters.is_empty()));
}
