//! On a real socket and in real time: what a model server sees of a Node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_execution::{CancelReason, FailureCode, TunnelFrame};
use iop_wire::*;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::support::*;

/// Longest wait of a test: a bound, never a measure.
const PATIENCE: Duration = Duration::from_secs(20);

async fn connected(backend: &ScriptedBackend, cancel_policy: CancelPolicy) -> (Harness, Conn) {
    let adapter = Arc::new(OpenAiCompat::new(OpenAiCompatConfig::new(backend.base_url())).unwrap());
    let mut node = Harness::new(adapter);
    let conn = node.ready_with(ProviderConfig { capacity: 1, cancel_policy, ..config() }).await;
    (node, conn)
}

/// Sends a tunnel with a chat request, and gives its frames up to the one wanted.
async fn until(conn: &mut Conn, number: u64, wanted: impl Fn(&TunnelFrame) -> bool) -> TunnelFrame {
    loop {
        let frame = timeout(PATIENCE, conn.frame(number)).await.unwrap();
        if wanted(&frame) {
            return frame;
        }
        assert!(!frame.is_terminal(), "{frame:?}");
    }
}

async fn ask(conn: &mut Conn, number: u64) {
    let body = chat();
    conn.send(tunnel(number, body.len() as u64));
    conn.send(chunk(number, body, true));
    conn.expect_accepted(number).await;
}

#[tokio::test]
async fn under_drain_the_backend_sees_no_close_and_the_place_is_taken_until_its_answer_ended() {
    // NOD-9, NOD-4; field reports 26, 27, 30, 31
    let word = |text: &str| format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n");
    let end = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let answer = Answer::events().write(word("a")).pause().write(word("b")).pause().write(end);
    for (policy, closes) in [(CancelPolicy::Drain, 0), (CancelPolicy::Abort, 1)] {
        // What the Node asks before a request comes is no part of this.
        let script = ScriptedBackend::builder().route("POST", "/v1/chat/completions", answer.clone());
        let backend = script.start().await.unwrap();
        let (node, mut conn) = connected(&backend, policy).await;
        ask(&mut conn, 1).await;
        until(&mut conn, 1, |frame| matches!(frame, TunnelFrame::Body { .. })).await;
        conn.send(cancel(1));
        let last = until(&mut conn, 1, TunnelFrame::is_terminal).await;
        assert_eq!(last, TunnelFrame::Cancelled(CancelReason::Client));
        if policy == CancelPolicy::Abort {
            timeout(PATIENCE, backend.wait_for(|traffic| traffic.client_closed == 1)).await.unwrap();
        } else {
            ask(&mut conn, 2).await;
            let busy = until(&mut conn, 2, TunnelFrame::is_terminal).await;
            assert!(matches!(busy, TunnelFrame::Failed(failure) if failure.code == FailureCode::Busy));
            assert_eq!((backend.traffic().waiting, backend.traffic().answering), (1, 1), "it is still at work");
            // Not even the end of the connection to the Edge reaches it.
            drop(conn);
            backend.release();
            backend.release();
            timeout(PATIENCE, backend.wait_for(|traffic| traffic.answering == 0)).await.unwrap();
            while !node.record.lines().contains(&"read out ended cut=false".to_owned()) {
                tokio::task::yield_now().await;
            }
        }
        let traffic = backend.traffic();
        assert_eq!((traffic.client_closed, traffic.max_answering), (closes, 1), "{policy}");
    }
}

/// Stands before a backend and lets nobody through until it is told to.
struct Door {
    addr: std::net::SocketAddr,
    open: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl Door {
    async fn before(backend: &ScriptedBackend) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, behind) = (listener.local_addr().unwrap(), backend.addr());
        let open = Arc::new(AtomicBool::new(false));
        let may_pass = Arc::clone(&open);
        let task = tokio::spawn(async move {
            let mut passing = tokio::task::JoinSet::new();
            while let Ok((mut from, _)) = listener.accept().await {
                if may_pass.load(Ordering::Relaxed) {
                    passing.spawn(async move {
                        let mut to = TcpStream::connect(behind).await.unwrap();
                        let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                    });
                }
            }
        });
        Self { addr, open, task }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn a_server_that_comes_up_after_its_node_is_listed_and_usable_without_a_reconnect() {
    // ADP-5
    let end = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let backend = ScriptedBackend::builder().model("m", Answer::events().write(end)).start().await.unwrap();
    let door = Door::before(&backend).await;
    let adapter = OpenAiCompat::new(OpenAiCompatConfig::new(format!("http://{}", door.addr))).unwrap();
    let mut node = Harness::new(Arc::new(adapter));
    let mut conn = node.accept().await;
    conn.features = vec![limits::FEATURE_PROVIDER_OFFERS.into()];
    conn.register(vec![config()]).await;
    assert!(conn.get_ready().await.providers[0].targets.is_empty());
    door.open.store(true, Ordering::Relaxed);
    let ack = timeout(PATIENCE, conn.ack()).await.unwrap();
    assert_eq!(ack.providers[0].targets[0].target.as_str(), "m");
    ask(&mut conn, 1).await;
    assert_eq!(until(&mut conn, 1, TunnelFrame::is_terminal).await, TunnelFrame::End);
}
