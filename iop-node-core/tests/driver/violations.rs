use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{FailureCode, Redacted, RunEventKind, async_trait};
use iop_node_core::{Node, ReconnectPolicy};
use iop_wire::link::Outgoing;
use iop_wire::*;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::support::*;

type Item = Result<Sequenced<ToNode>, LinkError>;

/// A link on which whatever can go wrong while decoding can be played.
#[derive(Debug)]
struct RawLink {
    incoming: mpsc::UnboundedReceiver<Item>,
    outgoing: mpsc::UnboundedSender<ToEdge>,
}

impl Link for RawLink {
    type In = ToNode;
    type Out = ToEdge;

    fn peer(&self) -> PeerIdentity {
        PeerIdentity::default()
    }

    fn start(self: Box<Self>, mut outgoing: Outgoing<ToEdge>) -> Incoming<ToNode> {
        let Self { mut incoming, outgoing: sender } = *self;
        let writer = tokio::spawn(async move {
            while let Some(Sequenced { message, .. }) = outgoing.next().await {
                let _ = sender.send(message);
            }
        });
        let guard = AbortOnDrop(writer);
        Box::pin(futures_util::stream::poll_fn(move |cx| {
            let _writer = &guard;
            incoming.poll_recv(cx)
        }))
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Debug)]
struct Once(Mutex<Option<RawLink>>);

#[async_trait]
impl Connector for Once {
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        let link = self.0.lock().unwrap().take().ok_or(ConnectError::Fatal("only once".into()))?;
        Ok(Box::new(link))
    }
}

struct Raw {
    send: mpsc::UnboundedSender<Item>,
    receive: mpsc::UnboundedReceiver<ToEdge>,
    seq: u64,
}

impl Raw {
    fn send(&mut self, message: ToNode) {
        self.seq += 1;
        self.send.send(Ok(Sequenced { seq: self.seq, message })).unwrap();
    }

    fn break_run(&mut self, run: u64) {
        self.seq += 1;
        let error =
            LinkError::MalformedRun { seq: self.seq, run: RunNumber(run), problem: "a required part is missing" };
        self.send.send(Err(error)).unwrap();
    }

    async fn next(&mut self) -> ToEdge {
        loop {
            match self.receive.recv().await.unwrap() {
                ToEdge::Ping(ping) => self.send(ToNode::Pong(Pong { nonce: ping.nonce, edge_time_ms: 1 })),
                message => return message,
            }
        }
    }

    async fn goodbye(&mut self) -> CloseCode {
        loop {
            if let ToEdge::Goodbye(goodbye) = self.next().await {
                return goodbye.code;
            }
        }
    }
}

/// A ready connection with a run that hangs, number 1.
async fn ready() -> Raw {
    let (send, incoming) = mpsc::unbounded_channel();
    let (outgoing, receive) = mpsc::unbounded_channel();
    let connector = Arc::new(Once(Mutex::new(Some(RawLink { incoming, outgoing }))));
    let (provider, _) = ScriptedProvider::new(Script::new().hang()).into_parts();
    let node = Node::builder(Redacted::new(TOKEN.into()), connector)
        .provider("a", provider)
        .reconnect(ReconnectPolicy::new(Some(1), Some(Duration::from_secs(1))).unwrap())
        .build()
        .unwrap();
    tokio::spawn(node.serve(CancellationToken::new()));
    let mut raw = Raw { send, receive, seq: 0 };
    assert!(matches!(raw.next().await, ToEdge::Hello(_)));
    raw.send(ToNode::HelloAck(HelloAck { proto: 1, features: vec![], max_envelope: 65_536, edge_id: "e".into() }));
    assert!(matches!(raw.next().await, ToEdge::Register(_)));
    let config = NodeConfigPayload { revision: 1, providers: vec![config()] };
    let outcome =
        Ok(Registered { node_id: iop_execution::NodeId::new("n").unwrap(), config, trusted_lease_signers: Vec::new() });
    raw.send(ToNode::RegisterResponse(RegisterResponse { edge_time_ms: 1, outcome }));
    assert!(matches!(raw.next().await, ToEdge::Ready(_)));
    raw.send(ToNode::ReadyResponse(NodeReadyResponse { ready: true, lease_generation: 1 }));
    let body = chat();
    raw.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: body.len() as u64, ..head(1) } }));
    raw.send(chunk(1, body, true));
    assert!(matches!(raw.next().await, ToEdge::Accepted(_)));
    assert!(matches!(raw.next().await, ToEdge::Event(_, event) if event.kind == RunEventKind::Start));
    raw
}

#[tokio::test(start_paused = true)]
async fn a_message_of_one_run_that_can_not_be_decoded_ends_that_run_alone() {
    // W17, WIR-15
    let mut raw = ready().await;
    raw.break_run(1);
    let ToEdge::Event(RunNumber(1), event) = raw.next().await else { panic!() };
    assert!(matches!(event.kind, RunEventKind::Error(failure) if failure.code == FailureCode::Internal));
    // The envelope counts in the order of messages, and one of an ended run is late.
    raw.break_run(1);
    raw.send(ToNode::Ping(Ping { nonce: 5 }));
    assert_eq!(raw.next().await, ToEdge::Pong(Pong { nonce: 5, edge_time_ms: 0 }));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_can_not_be_decoded_ends_the_connection() {
    // W17, W4
    let mut raw = ready().await;
    raw.break_run(2);
    assert_eq!(raw.goodbye().await, CloseCode::ProtocolViolation);
}

#[tokio::test(start_paused = true)]
async fn what_can_not_be_decoded_at_all_ends_the_connection() {
    // W3, W17, WIR-3
    for error in [LinkError::Malformed("an unknown body"), LinkError::TooLarge] {
        let mut raw = ready().await;
        raw.send.send(Err(error)).unwrap();
        assert_eq!(raw.goodbye().await, CloseCode::ProtocolViolation);
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_transport_is_a_disconnect_without_a_goodbye() {
    // WIR-13
    let mut raw = ready().await;
    raw.send.send(Err(LinkError::Transport("reset".into()))).unwrap();
    assert_eq!(raw.receive.recv().await, None);
}

#[tokio::test(start_paused = true)]
async fn nothing_follows_a_goodbye_not_even_output_that_waited() {
    // WIR-13
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    conn.send_run(head(1));
    calls.wait_for(|counts| counts.returned == 1).await;
    settle().await;
    conn.send_run(head(1));
    settle().await;
    conn.expect_goodbye(CloseCode::ProtocolViolation).await;
}
