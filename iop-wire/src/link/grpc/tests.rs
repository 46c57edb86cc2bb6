use std::collections::HashMap;
use std::net::SocketAddr;

use futures_util::{FutureExt, StreamExt};
use iop_execution::{CancelReason, FinishReason, FrameFlags, RunEvent, RunEventKind, TunnelFrame};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;
use crate::inbox::ReceiveWindow;
use crate::limits::{INITIAL_WINDOW, MAX_CHUNK, MIN_WINDOW};
use crate::link::{ConnectError, Connector, EdgeLink, Incoming, NodeLink};
use crate::message::{CloseCode, Drain, Goodbye, Hello, Ping, Pong, RunNumber, ToEdge, ToNode};
use crate::outbox::RunKey;
use crate::sequence::SequenceCheck;
use crate::shared::OutboxHandle;

mod tls;

/// Long enough for anything that is not broken.
const SOON: std::time::Duration = std::time::Duration::from_secs(20);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("it happens soon")
}

struct Server {
    address: SocketAddr,
    links: mpsc::UnboundedReceiver<EdgeLink>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(prepare: impl FnOnce(GrpcListener) -> GrpcListener) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let (sender, links) = mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        let listener = prepare(GrpcListener::new(socket));
        let task = tokio::spawn(listener.serve(move |link| drop(sender.send(link)), shutdown.clone()));
        Self { address, links, shutdown, task }
    }

    async fn plaintext() -> Self {
        Self::start(|listener| listener).await
    }

    async fn stop(self) {
        self.shutdown.cancel();
        soon(self.task).await.unwrap();
    }
}

fn plain(address: SocketAddr) -> GrpcConnector {
    GrpcConnector::plaintext(address.to_string()).unwrap()
}

fn hello() -> ToEdge {
    ToEdge::Hello(Hello {
        proto_min: 1,
        proto_max: 1,
        features: vec![],
        node_version: "test".into(),
        instance_id: [1; 16],
        connection_ordinal: 1,
        max_envelope: 65536,
    })
}

/// Both ends of a started link. A side is dropped to abort it.
struct Pair {
    edge: OutboxHandle<ToNode>,
    node: OutboxHandle<ToEdge>,
    at_edge: Incoming<ToEdge>,
    at_node: Incoming<ToNode>,
}

async fn pair(connector: &GrpcConnector, server: &mut Server) -> Pair {
    let link: NodeLink = connector.connect().await.unwrap();
    let (edge, node) = (OutboxHandle::new(), OutboxHandle::new());
    node.push_control(hello()).unwrap();
    let mut at_node = link.start(node.outgoing());
    // The call goes out when the incoming stream is polled first.
    let accepted = async {
        tokio::select! {
            link = server.links.recv() => link.unwrap(),
            item = at_node.next() => panic!("{item:?}"),
        }
    };
    let mut at_edge = soon(accepted).await.start(edge.outgoing());
    let first = soon(at_edge.next()).await.unwrap().unwrap();
    assert_eq!((first.seq, first.message), (1, hello()));
    Pair { edge, node, at_edge, at_node }
}

#[tokio::test]
async fn messages_cross_in_both_directions_before_and_after_the_answer_s_headers() {
    // WIR-1, WIR-2
    let mut server = Server::plaintext().await;
    let mut pair = pair(&plain(server.address), &mut server).await;
    for nonce in 1..=100 {
        pair.edge.push_control(ToNode::Ping(Ping { nonce })).unwrap();
        let ping = soon(pair.at_node.next()).await.unwrap().unwrap();
        assert_eq!((ping.seq, ping.message), (nonce, ToNode::Ping(Ping { nonce })));
        let pong = ToEdge::Pong(Pong { nonce, edge_time_ms: 0 });
        pair.node.push_control(pong.clone()).unwrap();
        let answer = soon(pair.at_edge.next()).await.unwrap().unwrap();
        assert_eq!((answer.seq, answer.message), (nonce + 1, pong));
    }
    drop(pair);
    server.stop().await;
}

#[tokio::test]
async fn dropping_the_incoming_stream_ends_the_other_side_and_the_connection() {
    // WIR-13
    for edge_drops in [true, false] {
        let mut server = Server::plaintext().await;
        let Pair { edge, node, mut at_edge, mut at_node } = pair(&plain(server.address), &mut server).await;
        if edge_drops {
            drop(at_edge);
            soon(async { while let Some(Ok(_)) = at_node.next().await {} }).await;
            drop(at_node);
        } else {
            drop(at_node);
            soon(async { while let Some(Ok(_)) = at_edge.next().await {} }).await;
            drop(at_edge);
        }
        // The connection's task is gone, though both outboxes are still open.
        server.stop().await;
        drop((edge, node));
    }
}

#[tokio::test]
async fn a_link_that_is_never_started_ends_the_other_side() {
    let mut server = Server::plaintext().await;
    let link = plain(server.address).connect().await.unwrap();
    let node = OutboxHandle::new();
    node.push_control(hello()).unwrap();
    let mut at_node = link.start(node.outgoing());
    let dropping = async { drop(server.links.recv().await) };
    let ((), ended) = soon(futures_util::future::join(dropping, async { at_node.next().await })).await;
    assert!(!matches!(ended, Some(Ok(_))));
    drop(at_node);
    server.stop().await;
}

#[tokio::test]
async fn a_goodbye_arrives_before_the_end() {
    // WIR-13: both ways, and the end of a direction is no error
    let mut server = Server::plaintext().await;
    let Pair { edge, node, mut at_edge, mut at_node } = pair(&plain(server.address), &mut server).await;
    let goodbye = Goodbye { code: CloseCode::Restart, retry_after_ms: 5 };
    edge.push_control(ToNode::Goodbye(goodbye)).unwrap();
    edge.finish();
    let last = soon(at_node.next()).await.unwrap().unwrap();
    assert_eq!(last.message, ToNode::Goodbye(goodbye));
    assert_eq!(soon(at_node.next()).await, None);
    drop((node, at_node));
    soon(async { while let Some(Ok(_)) = at_edge.next().await {} }).await;
    drop(at_edge);

    let Pair { edge, node, mut at_edge, at_node } = pair(&plain(server.address), &mut server).await;
    node.push_control(ToEdge::Drain(Drain { deadline_ms: 1, returning: false })).unwrap();
    node.push_control(ToEdge::Goodbye(goodbye)).unwrap();
    node.finish();
    let drain = soon(at_edge.next()).await.unwrap().unwrap();
    let last = soon(at_edge.next()).await.unwrap().unwrap();
    assert_eq!((drain.seq, last.seq, last.message), (2, 3, ToEdge::Goodbye(goodbye)));
    assert_eq!(soon(at_edge.next()).await, None);
    drop((edge, at_edge, at_node));
    server.stop().await;
}

#[tokio::test]
async fn each_node_has_a_connection_of_its_own() {
    // WIR-17, WIR-2
    let mut server = Server::plaintext().await;
    let mut peers = Vec::new();
    for _ in 0..3 {
        let link = plain(server.address).connect().await.unwrap();
        assert_eq!(link.peer().address, Some(server.address));
        let outbox = OutboxHandle::<ToEdge>::new();
        let mut at_node = link.start(outbox.outgoing());
        let edge = tokio::select! {
            edge = server.links.recv() => edge.unwrap(),
            item = at_node.next() => panic!("{item:?}"),
        };
        peers.push(edge.peer().address.unwrap());
        assert_eq!(edge.peer().identity, None);
    }
    peers.dedup();
    assert_eq!(peers.len(), 3);
    server.stop().await;
}

#[tokio::test]
async fn a_message_that_is_too_large_ends_the_sender_s_link_with_a_reason() {
    // WIR-8, W3
    let mut server = Server::plaintext().await;
    let Pair { edge, node, mut at_edge, mut at_node } = pair(&plain(server.address), &mut server).await;
    let text = "x".repeat(100_000);
    let key = node.open(RunNumber(1), 1024 * 1024);
    node.push(key, ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind: RunEventKind::Delta(text), usage: None }));
    assert_eq!(soon(at_node.next()).await, Some(Err(LinkError::TooLarge)));
    assert_eq!(soon(at_node.next()).await, None);
    assert!(!matches!(soon(at_edge.next()).await, Some(Ok(_))));
    drop((edge, at_edge, at_node));
    server.stop().await;
}

#[tokio::test]
async fn an_undecodable_message_of_one_run_does_not_end_the_link() {
    // W17
    let mut server = Server::plaintext().await;
    let Pair { edge, node, mut at_edge, mut at_node } = pair(&plain(server.address), &mut server).await;
    let text = "x".repeat(5_000);
    let key = node.open(RunNumber(1), 1024 * 1024);
    node.push(key, ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind: RunEventKind::Delta(text), usage: None }));
    let mut read = async || {
        tokio::select! {
            item = at_edge.next() => item.unwrap(),
            item = at_node.next() => panic!("{item:?}"),
        }
    };
    let malformed = soon(read()).await;
    assert!(matches!(malformed, Err(LinkError::MalformedRun { seq: 2, run: RunNumber(1), .. })), "{malformed:?}");
    node.push_control(ToEdge::Ping(Ping { nonce: 1 })).unwrap();
    assert_eq!(soon(read()).await.unwrap().seq, 3);
    drop((edge, at_edge, at_node));
    server.stop().await;
}

/// A frame of a tunnel whose envelope is just above what may come before registration.
fn large(n: u64) -> ToEdge {
    let body = TunnelFrame::Body { bytes: vec![b'x'; MAX_CHUNK].into(), flags: FrameFlags::NONE };
    ToEdge::Frame(RunNumber(1), n, body)
}

#[tokio::test]
async fn a_node_that_has_not_registered_can_t_send_large_envelopes() {
    // REG-8, WIR-8: even if they are of a kind that may be large later
    for small in 0..=2 {
        let mut server = Server::plaintext().await;
        let link = plain(server.address).connect().await.unwrap();
        let messages = (1..=small).map(|nonce| ToEdge::Ping(Ping { nonce })).chain([large(1), large(2)]);
        let sequenced = (1..).zip(messages).map(|(seq, message)| Sequenced { seq, message });
        let mut at_node = link.start(Box::pin(futures_util::stream::iter(sequenced.collect::<Vec<_>>())));
        let accepted = async {
            tokio::select! {
                link = server.links.recv() => link.unwrap(),
                item = at_node.next() => panic!("{item:?}"),
            }
        };
        let edge = OutboxHandle::<ToNode>::new();
        let mut at_edge = soon(accepted).await.start(edge.outgoing());
        // The Node's end must be polled for its connection to be driven.
        let node = tokio::spawn(async move { while let Some(Ok(_)) = at_node.next().await {} });
        for nonce in 1..=small {
            assert_eq!(soon(at_edge.next()).await.unwrap().unwrap().message, ToEdge::Ping(Ping { nonce }));
        }
        if small < 2 {
            assert_eq!(soon(at_edge.next()).await, Some(Err(LinkError::TooLarge)), "message {}", small + 1);
            assert_eq!(soon(at_edge.next()).await, None);
        } else {
            for n in 1..=2 {
                assert_eq!(soon(at_edge.next()).await.unwrap().unwrap().message, large(n));
            }
        }
        drop(at_edge);
        soon(node).await.unwrap();
        server.stop().await;
    }
}

#[tokio::test]
async fn a_congestion_control_that_may_be_refused_never_stops_a_link() {
    // WIR-11
    for congestion in Congestion::ALL {
        let mut server = Server::start(|listener| listener.with_congestion(*congestion)).await;
        let pair = pair(&plain(server.address).with_congestion(*congestion), &mut server).await;
        drop(pair);
        server.stop().await;
    }
}

#[tokio::test]
async fn sockets_send_at_once_on_both_sides() {
    // WIR-11
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (client, server) =
        tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async { listener.accept().await.unwrap().0 });
    for socket in [client.unwrap(), server] {
        prepare(&socket, Congestion::System).unwrap();
        assert!(socket.nodelay().unwrap());
    }
}

#[tokio::test]
async fn peers_that_say_nothing_do_not_keep_others_out() {
    // REG-8
    let mut server = Server::plaintext().await;
    let mut silent = Vec::new();
    for _ in 0..crate::limits::HANDSHAKES_PER_ADDRESS - 2 {
        silent.push(TcpStream::connect(server.address).await.unwrap());
    }
    let mut noise = TcpStream::connect(server.address).await.unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let pair = pair(&plain(server.address), &mut server).await;
    drop(pair);
    server.stop().await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn one_address_does_not_keep_all_others_out() {
    // REG-8, SEC-3
    let mut server = Server::plaintext().await;
    let mut silent = Vec::new();
    for _ in 0..crate::limits::ACCEPT_QUEUE + 8 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        silent.push(socket.connect(server.address).await.unwrap());
    }
    // Sooner than the silent ones are given up.
    let node = plain(server.address);
    let pair = tokio::time::timeout(crate::limits::HANDSHAKE_TIMEOUT / 2, pair(&node, &mut server)).await;
    drop(pair.unwrap());
    server.stop().await;
}

#[tokio::test]
async fn a_shutdown_waits_for_sessions_and_takes_no_new_connection() {
    let mut server = Server::plaintext().await;
    let address = server.address;
    let mut pair = pair(&plain(address), &mut server).await;
    server.shutdown.cancel();
    pair.edge.push_control(ToNode::Ping(Ping { nonce: 1 })).unwrap();
    assert!(soon(pair.at_node.next()).await.unwrap().is_ok());
    assert!((&mut server.task).now_or_never().is_none());
    soon(async { while TcpStream::connect(address).await.is_ok() {} }).await;
    drop(pair);
    server.stop().await;
}

/// Reads everything at the Edge, returns credit as it is due, and counts what came.
async fn read_runs(
    at_edge: &mut Incoming<ToEdge>,
    edge: &OutboxHandle<ToNode>,
    runs: u64,
) -> HashMap<u64, (u64, usize)> {
    let mut order = SequenceCheck::default();
    order.accept(1).unwrap();
    let mut windows: HashMap<_, _> = (1..=runs).map(|run| (run, ReceiveWindow::new(MIN_WINDOW))).collect();
    let mut got: HashMap<u64, (u64, usize)> = HashMap::new();
    let mut ended = 0;
    while ended < runs {
        let envelope = at_edge.next().await.expect("the link lives").expect("every message is understood");
        order.accept(envelope.seq).unwrap();
        let charge = envelope.message.charge();
        let ToEdge::Event(run, event) = envelope.message else { continue };
        let (n, bytes) = got.entry(run.0).or_default();
        *n += 1;
        assert_eq!(event.seq, *n, "numbers of a run have no gap");
        *bytes += event.kind.payload_bytes();
        let window = windows.get_mut(&run.0).unwrap();
        window.receive(charge).expect("the Node keeps to its credit");
        let key = edge.key_of(run).expect("the Edge opened it");
        if let Some(grant) = window.consume(charge) {
            edge.push_run_control(key, ToNode::Credit(run, grant)).expect("the credits of a run join");
        }
        if event.kind.is_terminal() {
            edge.close(key);
            ended += 1;
        }
    }
    got
}

/// A run that emits tiny events of alternating kinds, so that none are joined.
async fn emit(node: OutboxHandle<ToEdge>, key: RunKey, tokens: usize) {
    let event = |kind| ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind, usage: None });
    for _ in 0..tokens {
        for kind in [RunEventKind::Delta("tok ".into()), RunEventKind::ReasoningDelta("hm".into())] {
            std::future::poll_fn(|cx| node.poll_room(key, cx)).await;
            node.push(key, event(kind));
        }
        tokio::task::yield_now().await;
    }
    node.push(key, event(RunEventKind::Complete(FinishReason::Stop)));
    node.close(key);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_runs_of_tiny_frames_share_one_real_connection() {
    // WIR-10, WIR-6, WIR-7, WIR-11: HTTP/2 counts small frames against a budget of the connection
    const RUNS: u64 = 1000;
    const TOKENS: usize = 60;
    let ca = tls::Ca::new();
    let mut server = Server::start(|listener| listener.with_tls(tls::server(&ca, &["localhost"], None))).await;
    let connector = tls::connector(&server, &ca, "localhost");
    let Pair { edge, node, mut at_edge, mut at_node } = pair(&connector, &mut server).await;
    for tag in 0..RUNS {
        let _ = edge.open_request(tls::request((tag % 256) as u8), 0);
    }
    let session = tokio::spawn(async move {
        while let Some(Ok(envelope)) = at_node.next().await {
            match envelope.message {
                ToNode::Run(request) => {
                    let key = node.open(request.head.run, MIN_WINDOW);
                    tokio::spawn(emit(node.clone(), key, TOKENS));
                }
                ToNode::Credit(run, bytes) => {
                    if let Some(key) = node.key_of(run) {
                        node.grant(key, bytes).expect("no more than the window is granted");
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        node
    });
    let got = soon(read_runs(&mut at_edge, &edge, RUNS)).await;
    assert_eq!(got.len() as u64, RUNS);
    assert!(got.values().all(|(_, bytes)| *bytes == TOKENS * 6), "every byte arrived");
    edge.finish();
    let node = soon(session).await.unwrap();
    assert_eq!((edge.open_runs(), node.open_runs()), (0, 0), "ended runs leave nothing behind");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_crosses_a_connection_that_is_full_of_bodies() {
    // WIR-9, WIR-10: what HTTP/2 and the socket may hold back is bounded
    let mut server = Server::plaintext().await;
    let Pair { edge, node, at_edge, mut at_node } = pair(&plain(server.address), &mut server).await;
    let keys: Vec<_> = (0..4).map(|tag| edge.open_request(tls::request(tag), 1024 * 1024)).collect();
    for key in &keys {
        for _ in 0..60 {
            edge.push(*key, tls::chunk(16 * 1024));
        }
    }
    let mut arrived = 0;
    let mut cancelled = None;
    while cancelled.is_none() {
        match soon(at_node.next()).await.unwrap().unwrap().message {
            ToNode::Chunk(_) => arrived += 1,
            ToNode::Cancel(run, reason) => cancelled = Some((run, reason)),
            _ => {}
        }
        if arrived == 1 {
            let _ = edge.cancel(keys[3], CancelReason::Client);
        }
    }
    assert_eq!(cancelled, Some((RunNumber(4), CancelReason::Client)));
    assert!(arrived < 240, "the cancel went ahead of bodies: {arrived}");
    drop((edge, node, at_edge, at_node));
    server.stop().await;
}
