//! A Node under test and the Edge that plays with it.

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, Method};
use iop_execution::testkit::{ScriptHandle, ScriptedProvider, chat_json};
use iop_execution::{
    AdapterKey, ExecutionFailure, NodeId, Provider, ProviderId, Redacted, RunEvent, RunEventKind, RunId, Target,
    TunnelFrame,
};
use iop_node_core::{
    EdgeCheck, Node, NodeBuilder, NodeError, NodeObserver, ReconnectPolicy, RunOutcome, RunPath, ServeEnd,
    StallObservation,
};
use iop_wire::link::memory::{MemoryConnector, MemoryListener, MemoryMode, memory_listener};
use iop_wire::*;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

pub(crate) const TOKEN: &str = "SENTINEL-TOKEN";
/// Longer than anything a test waits for; virtual.
const FOREVER: Duration = Duration::from_secs(100_000);

/// Writes down what the Node tells its observer.
#[derive(Debug, Default)]
pub(crate) struct Record(Mutex<Vec<String>>);

impl Record {
    fn add(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

impl NodeObserver for Record {
    fn connected(&self) {
        self.add("connected".into());
    }
    fn ready(&self) {
        self.add("ready".into());
    }
    fn closed(&self, code: CloseCode) {
        self.add(format!("closed {code}"));
    }
    fn run_started(&self, path: RunPath) {
        self.add(format!("started {}", path.as_str()));
    }
    fn run_ended(&self, path: RunPath, outcome: RunOutcome) {
        self.add(format!("ended {} {outcome:?}", path.as_str()));
    }
    fn read_out_began(&self) {
        self.add("read out".into());
    }
    fn read_out_ended(&self, cut: bool) {
        self.add(format!("read out ended cut={cut}"));
    }
    fn response_stalled(&self, stall: &StallObservation) {
        self.add(format!(
            "stalled {} {} {} {} {:?}",
            stall.path.as_str(),
            stall.provider_health,
            stall.liveness_classification,
            stall.ownership_close.as_str(),
            stall.duration
        ));
    }
    fn late_messages(&self, count: u64) {
        self.add(format!("late {count}"));
    }
    fn late_pushes(&self, count: u64) {
        self.add(format!("late pushes {count}"));
    }
}

/// A Node that serves, and where its connections arrive.
pub(crate) struct Harness {
    pub(crate) edge: MemoryListener,
    pub(crate) shutdown: CancellationToken,
    pub(crate) node: JoinHandle<Result<ServeEnd, NodeError>>,
    pub(crate) record: Arc<Record>,
    pub(crate) check: EdgeCheck,
}

impl Harness {
    /// A Node with one provider under the adapter key `a`.
    pub(crate) fn new(provider: Arc<dyn Provider>) -> Self {
        Self::with(|node| node.provider("a", provider))
    }

    pub(crate) fn scripted(provider: ScriptedProvider) -> (Self, ScriptHandle) {
        let (provider, handle) = provider.into_parts();
        (Self::new(provider), handle)
    }

    pub(crate) fn with(set: impl FnOnce(NodeBuilder) -> NodeBuilder) -> Self {
        let (connector, edge) = memory_listener(MemoryMode::Direct);
        Self::on(connector, edge, set)
    }

    /// Every message is encoded and decoded on its way.
    pub(crate) fn encoded(provider: ScriptedProvider) -> (Self, ScriptHandle) {
        let (connector, edge) = memory_listener(MemoryMode::Encoded);
        let (provider, handle) = provider.into_parts();
        (Self::on(connector, edge, |node| node.provider("a", provider)), handle)
    }

    fn on(connector: MemoryConnector, edge: MemoryListener, set: impl FnOnce(NodeBuilder) -> NodeBuilder) -> Self {
        let record = Arc::new(Record::default());
        let builder = Node::builder(Redacted::new(TOKEN.into()), Arc::new(connector))
            .observer(Arc::clone(&record) as Arc<dyn NodeObserver>)
            .reconnect(ReconnectPolicy::new(Some(3), Some(Duration::from_secs(2))).unwrap());
        let node = set(builder).build().unwrap();
        let (shutdown, check) = (CancellationToken::new(), node.edge_check());
        let node = tokio::spawn(node.serve(shutdown.clone()));
        Self { edge, shutdown, node, record, check }
    }

    /// The next connection, nothing said yet.
    pub(crate) async fn accept(&mut self) -> Conn {
        Conn::new(timeout(FOREVER, self.edge.accept()).await.unwrap().unwrap())
    }

    /// The next connection, ready, with the provider config of [`config`].
    pub(crate) async fn ready(&mut self) -> Conn {
        self.ready_with(config()).await
    }

    pub(crate) async fn ready_with(&mut self, provider: ProviderConfig) -> Conn {
        let mut conn = self.accept().await;
        conn.register(vec![provider]).await;
        conn.get_ready().await;
        conn
    }

    /// How serving ended.
    pub(crate) async fn end(self) -> Result<ServeEnd, NodeError> {
        timeout(FOREVER, self.node).await.unwrap().unwrap()
    }
}

/// The Edge's end of one connection.
pub(crate) struct Conn {
    incoming: Incoming<ToEdge>,
    out: mpsc::UnboundedSender<Sequenced<ToNode>>,
    seq: u64,
    received: u64,
    /// What came while the test waited for something else.
    pub(crate) stash: Vec<ToEdge>,
    /// Answers pings and swallows pongs.
    pub(crate) answers_pings: bool,
    /// What HelloAck says.
    pub(crate) features: Vec<String>,
}

impl Conn {
    pub(crate) fn new(link: EdgeLink) -> Self {
        let (out, mut messages) = mpsc::unbounded_channel();
        let outgoing = futures_util::stream::poll_fn(move |cx| messages.poll_recv(cx));
        Self {
            incoming: link.start(Box::pin(outgoing)),
            out,
            seq: 0,
            received: 0,
            stash: Vec::new(),
            answers_pings: true,
            features: Vec::new(),
        }
    }

    pub(crate) fn send(&mut self, message: ToNode) {
        self.seq += 1;
        // A Node that is gone takes nothing; the test sees that where it reads.
        let _ = self.out.send(Sequenced { seq: self.seq, message });
    }

    /// Breaks the order of messages.
    pub(crate) fn skip_a_number(&mut self) {
        self.seq += 1;
    }

    /// The next message, pings answered; `None` when the Node's direction ended.
    pub(crate) async fn try_next(&mut self) -> Option<ToEdge> {
        if !self.stash.is_empty() {
            return Some(self.stash.remove(0));
        }
        self.receive().await
    }

    pub(crate) async fn receive(&mut self) -> Option<ToEdge> {
        let patience = Instant::now() + FOREVER;
        loop {
            let item = timeout_at(patience, self.incoming.next()).await.expect("the Node says nothing any more")?;
            let Sequenced { seq, message } = item.unwrap();
            self.received += 1;
            assert_eq!(seq, self.received, "WIR-6");
            match message {
                ToEdge::Ping(ping) if self.answers_pings => {
                    self.send(ToNode::Pong(Pong { nonce: ping.nonce, edge_time_ms: 1 }));
                }
                ToEdge::Pong(_) if self.answers_pings => {}
                message => return Some(message),
            }
        }
    }

    pub(crate) async fn next(&mut self) -> ToEdge {
        self.try_next().await.expect("the connection ended")
    }

    /// True if nothing comes for this long (virtual).
    pub(crate) async fn is_silent(&mut self, time: Duration) -> bool {
        self.stash.is_empty() && timeout(time, self.receive()).await.is_err()
    }

    pub(crate) async fn hello(&mut self) -> Hello {
        let ToEdge::Hello(hello) = self.next().await else { panic!("Hello comes first") };
        self.send(ToNode::HelloAck(HelloAck {
            proto: 1,
            features: self.features.clone(),
            max_envelope: 65_536,
            edge_id: "edge".into(),
        }));
        hello
    }

    pub(crate) async fn registration(&mut self) -> RegisterRequest {
        let ToEdge::Register(request) = self.next().await else { panic!("then RegisterRequest") };
        request
    }

    pub(crate) fn accept_registration(&mut self, providers: Vec<ProviderConfig>) {
        let config = NodeConfigPayload { revision: 5, providers };
        let outcome =
            Ok(Registered { node_id: NodeId::new("node").unwrap(), config, trusted_lease_signers: Vec::new() });
        self.send(ToNode::RegisterResponse(RegisterResponse { edge_time_ms: 1, outcome }));
    }

    pub(crate) fn refuse_registration(&mut self, reason: RefusalReason, retry_after: Duration) {
        let outcome = Err(RegisterRefusal { reason, retry_after });
        self.send(ToNode::RegisterResponse(RegisterResponse { edge_time_ms: 1, outcome }));
    }

    pub(crate) async fn register(&mut self, providers: Vec<ProviderConfig>) -> Hello {
        let hello = self.hello().await;
        self.registration().await;
        self.accept_registration(providers);
        hello
    }

    pub(crate) async fn get_ready(&mut self) -> NodeReadyRequest {
        let ToEdge::Ready(request) = self.next().await else { panic!("then NodeReadyRequest") };
        self.send(ToNode::ReadyResponse(NodeReadyResponse { ready: true, lease_generation: 1 }));
        request
    }

    /// Pushes a config.
    pub(crate) fn push(&mut self, revision: u64, providers: Vec<ProviderConfig>) {
        self.send(ToNode::ConfigUpdate(ConfigUpdate::new(NodeConfigPayload { revision, providers })));
    }

    /// The next ConfigAck; what belongs to runs waits for its turn.
    pub(crate) async fn ack(&mut self) -> ConfigAck {
        loop {
            match self.receive().await.expect("the connection ended") {
                ToEdge::ConfigAck(ack) => return ack,
                other => self.stash.push(other),
            }
        }
    }

    /// The Node says Goodbye with this code, and nothing after it.
    pub(crate) async fn expect_goodbye(&mut self, code: CloseCode) {
        loop {
            match self.try_next().await {
                Some(ToEdge::Goodbye(goodbye)) => {
                    assert_eq!(goodbye.code, code);
                    assert_eq!(self.try_next().await, None);
                    return;
                }
                Some(_) => {}
                None => panic!("the connection ended without a Goodbye"),
            }
        }
    }

    /// The next message of this run; others wait for their turn. Nothing is promised about order across runs.
    pub(crate) async fn next_of(&mut self, number: u64) -> ToEdge {
        if let Some(at) = self.stash.iter().position(|message| message.run() == Some(RunNumber(number))) {
            return self.stash.remove(at);
        }
        loop {
            let message = self.receive().await.expect("the connection ended");
            if message.run() == Some(RunNumber(number)) {
                return message;
            }
            self.stash.push(message);
        }
    }

    pub(crate) async fn expect_accepted(&mut self, number: u64) {
        assert_eq!(self.next_of(number).await, ToEdge::Accepted(RunNumber(number)));
    }

    /// The next event of this run.
    pub(crate) async fn event(&mut self, number: u64) -> RunEvent {
        match self.next_of(number).await {
            ToEdge::Event(_, event) => event,
            other => panic!("an event of run {number} expected, not {other:?}"),
        }
    }

    /// The next frame of this tunnel.
    pub(crate) async fn frame(&mut self, number: u64) -> TunnelFrame {
        match self.next_of(number).await {
            ToEdge::Frame(_, _, frame) => frame,
            other => panic!("a frame of tunnel {number} expected, not {other:?}"),
        }
    }

    /// Starts run `number` with a whole small body, and takes the receipt.
    pub(crate) async fn run(&mut self, number: u64) {
        self.send_run(head(number));
        self.expect_accepted(number).await;
    }

    /// Sends a request and its whole body.
    pub(crate) fn send_run(&mut self, mut head: DispatchHead) {
        let body = chat();
        let number = head.run.0;
        head.body_len = body.len() as u64;
        self.send(ToNode::Run(RunDispatch { head }));
        self.send(chunk(number, body, true));
    }

    /// Everything of this run up to its terminal.
    pub(crate) async fn rest(&mut self, number: u64) -> Vec<RunEventKind> {
        let mut kinds = Vec::new();
        loop {
            let event = self.event(number).await;
            let terminal = event.kind.is_terminal();
            kinds.push(event.kind);
            if terminal {
                return kinds;
            }
        }
    }

    /// The failure that this run ends with.
    pub(crate) async fn failure(&mut self, number: u64) -> ExecutionFailure {
        match self.rest(number).await.pop() {
            Some(RunEventKind::Error(failure)) => failure,
            other => panic!("a failure expected, not {other:?}"),
        }
    }
}

pub(crate) fn config() -> ProviderConfig {
    ProviderConfig {
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new("a").unwrap(),
        kind: "custom".into(),
        base_url: String::new(),
        wire: WireMode::Auto,
        capacity: 2,
        long_capacity: 0,
        targets: vec![],
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

pub(crate) fn head(number: u64) -> DispatchHead {
    DispatchHead {
        run_id: RunId::from_bytes([1; 16]),
        run: RunNumber(number),
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new("a").unwrap(),
        target: Target::new("t").unwrap(),
        session_id: None,
        background: false,
        stream: true,
        response_stall_timeout_ms: 0,
        deadline_ms: 0,
        body_len: 0,
        window: limits::INITIAL_WINDOW,
        prompt_tokens_estimate: 0,
        credential_lease: Redacted::new(Bytes::new()),
        credential_scope: None,
    }
}

pub(crate) fn tunnel(number: u64, body_len: u64) -> ToNode {
    let mut head = head(number);
    head.body_len = body_len;
    ToNode::Tunnel(TunnelDispatch {
        head,
        method: Method::POST,
        path: Redacted::new("/v1/chat/completions".into()),
        headers: Redacted::new(HeaderMap::new()),
    })
}

pub(crate) fn chat() -> Bytes {
    Bytes::from(chat_json("m", "SENTINEL-PROMPT", true))
}

pub(crate) fn chunk(number: u64, data: impl Into<Bytes>, last: bool) -> ToNode {
    ToNode::Chunk(RequestChunk { run: RunNumber(number), data: data.into(), last })
}

pub(crate) fn credit(number: u64, bytes: u32) -> ToNode {
    ToNode::Credit(RunNumber(number), bytes)
}

pub(crate) fn cancel(number: u64) -> ToNode {
    ToNode::Cancel(RunNumber(number), iop_execution::CancelReason::Client)
}

/// Lets every task run until all of them wait.
pub(crate) async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
    let mut once = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut once, true) {
            return std::task::Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

impl Conn {
    /// Like [`Conn::run`] where the test answers pings itself.
    pub(crate) async fn run_without_pings(&mut self, number: u64) {
        self.send_run(head(number));
        loop {
            match self.next().await {
                ToEdge::Accepted(RunNumber(got)) => {
                    assert_eq!(got, number);
                    return;
                }
                ToEdge::Ping(ping) => self.send(ToNode::Pong(Pong { nonce: ping.nonce, edge_time_ms: 1 })),
                ToEdge::Pong(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}
