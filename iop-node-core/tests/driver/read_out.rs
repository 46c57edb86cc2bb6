use std::time::Duration;

use iop_execution::testkit::{Script, ScriptHandle, ScriptedProvider};
use iop_execution::{CancelReason, FailureCode, RunEventKind, TunnelFrame};
use iop_node_core::ServeEnd;
use iop_wire::*;
use tokio::time::Instant;

use crate::support::*;

const CANCELLED: RunEventKind = RunEventKind::Cancelled(CancelReason::Client);

fn drain() -> ProviderConfig {
    ProviderConfig { capacity: 1, cancel_policy: CancelPolicy::Drain, ..config() }
}

/// A Node with one place and the policy `drain`, on which run 1 has said one word.
async fn running(script: Script) -> (Harness, Conn, ScriptHandle) {
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(script).then(Script::text("next")).with_tunnels());
    let mut conn = node.ready_with(drain()).await;
    conn.run(1).await;
    assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
    assert!(matches!(conn.event(1).await.kind, RunEventKind::Delta(_)));
    (node, conn, calls)
}

async fn is_busy(conn: &mut Conn, number: u64) {
    conn.run(number).await;
    assert_eq!(conn.failure(number).await.code, FailureCode::Busy);
}

async fn serves(conn: &mut Conn, number: u64) {
    conn.run(number).await;
    assert_eq!(conn.rest(number).await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_run_ends_at_once_and_its_call_is_read_to_its_end() {
    // NOD-9; field reports 26, 27, 30, 31: no close at the backend, and the place is taken as long as it works
    let (node, mut conn, calls) =
        running(Script::text("a").pause().delta("b".repeat(500_000)).pause().delta("c")).await;
    let began = Instant::now();
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
    assert_eq!(began.elapsed(), Duration::ZERO);
    is_busy(&mut conn, 2).await;
    calls.release();
    calls.wait_for(|counts| counts.paused == 1).await;
    settle().await;
    is_busy(&mut conn, 3).await;
    calls.release();
    calls.wait_for(|counts| counts.active == 0).await;
    settle().await;
    let counts = calls.counts();
    assert_eq!((counts.returned, counts.dropped, counts.cancels_seen), (1, 0, 0), "it never learned of the cancel");
    serves(&mut conn, 4).await;
    assert!(conn.is_silent(Duration::from_secs(100)).await, "nothing of it is sent");
    let lines = node.record.lines();
    let at = |line: &str| lines.iter().position(|had| had == line).unwrap_or_else(|| panic!("{lines:?}"));
    assert!(at("read out") < at("read out ended cut=false"));
    assert!(lines.contains(&"late pushes 2".to_owned()), "{lines:?}");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_does_not_end_is_dropped_after_sixty_seconds() {
    // NOD-9
    let (node, mut conn, calls) = running(Script::text("a").ignore_cancel()).await;
    let began = Instant::now();
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
    assert!(conn.is_silent(Duration::from_millis(59_999)).await);
    is_busy(&mut conn, 2).await;
    calls.wait_for(|counts| counts.dropped == 1).await;
    assert_eq!(began.elapsed(), Duration::from_secs(60));
    settle().await;
    serves(&mut conn, 3).await;
    assert!(node.record.lines().contains(&"read out ended cut=true".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_deadline_is_told_when_it_passes() {
    // NOD-9, EXE-10
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("a").pause()));
    let mut conn = node.ready_with(drain()).await;
    let began = Instant::now();
    conn.send_run(DispatchHead { deadline_ms: 2_000, ..head(1) });
    conn.expect_accepted(1).await;
    assert_eq!(conn.failure(1).await.code, FailureCode::DeadlineExceeded);
    assert_eq!(began.elapsed(), Duration::from_secs(2));
    is_busy(&mut conn, 2).await;
    calls.release();
    calls.wait_for(|counts| counts.returned == 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_call_outlives_its_connection_keeps_its_place_and_says_nothing_on_the_next_one() {
    // NOD-9, NOD-5, FEN-4
    let (mut node, conn, calls) = running(Script::text("a").pause().delta("old")).await;
    let began = Instant::now();
    drop(conn);
    let mut conn = node.ready_with(drain()).await;
    assert!(began.elapsed() <= Duration::from_secs(1), "the run is over: the next connection waits for nothing");
    assert_eq!(calls.counts().active, 1);
    is_busy(&mut conn, 1).await;
    calls.release();
    assert!(conn.is_silent(Duration::from_secs(50)).await);
    assert_eq!((calls.counts().returned, calls.counts().cancels_seen), (1, 0));
    serves(&mut conn, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_is_read_to_its_end_too() {
    // NOD-9
    let (mut node, calls) =
        Harness::scripted(ScriptedProvider::new(Script::text("a").pause()).then(Script::text("next")).with_tunnels());
    let mut conn = node.ready_with(drain()).await;
    conn.send(tunnel(1, 4));
    conn.send(chunk(1, "body", true));
    conn.expect_accepted(1).await;
    calls.wait_for(|counts| counts.paused == 1).await;
    conn.send(cancel(1));
    let mut last = conn.frame(1).await;
    while !last.is_terminal() {
        last = conn.frame(1).await;
    }
    assert_eq!(last, TunnelFrame::Cancelled(CancelReason::Client));
    is_busy(&mut conn, 2).await;
    calls.release();
    calls.wait_for(|counts| counts.returned == 1).await;
    assert_eq!(calls.counts().cancels_seen, 0);
    settle().await;
    serves(&mut conn, 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_run_that_has_asked_nothing_of_its_backend_ends_as_ever() {
    // NOD-9: no call is begun only to be read out
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")).with_tunnels());
    let mut conn = node.ready_with(drain()).await;
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 9, ..head(1) } }));
    conn.expect_accepted(1).await;
    settle().await;
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
    conn.send(tunnel(2, 4));
    conn.send(chunk(2, "body", true));
    conn.send(cancel(2));
    conn.expect_accepted(2).await;
    assert_eq!(conn.frame(2).await, TunnelFrame::Cancelled(CancelReason::Client));
    assert_eq!(calls.counts().calls, 0);
    assert!(!node.record.lines().contains(&"read out".to_owned()));
    serves(&mut conn, 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_what_is_read_and_a_dropped_node_for_nothing() {
    // NOD-9, NOD-8
    let (node, mut conn, calls) = running(Script::text("a").pause()).await;
    let began = Instant::now();
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
    node.shutdown.cancel();
    conn.expect_goodbye(CloseCode::Drained).await;
    drop(conn);
    settle().await;
    assert!(!node.node.is_finished());
    tokio::time::sleep(Duration::from_secs(20)).await;
    calls.release();
    assert_eq!(node.end().await, Ok(ServeEnd::Drained));
    assert!(began.elapsed() <= Duration::from_secs(22), "no longer than needed: {:?}", began.elapsed());
    assert_eq!((calls.counts().returned, calls.counts().stops), (1, 1), "stopped after the last call");

    let (node, mut conn, calls) = running(Script::text("a").pause()).await;
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
    // An instance that waits for its last call to end must not keep that call alive.
    conn.push(6, vec![]);
    assert_eq!(conn.ack().await.applied_revision, 6);
    node.node.abort();
    let began = Instant::now();
    calls.wait_for(|counts| counts.dropped == 1).await;
    assert_eq!((calls.counts().active, began.elapsed()), (0, Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn what_a_shutdown_cancels_is_read_for_sixty_seconds_at_most() {
    // NOD-9, NOD-8
    let (node, mut conn, calls) = running(Script::text("a").ignore_cancel()).await;
    let began = Instant::now();
    node.shutdown.cancel();
    assert_eq!(conn.rest(1).await, [RunEventKind::Cancelled(CancelReason::Drain)]);
    assert_eq!(began.elapsed(), Duration::from_secs(30));
    conn.expect_goodbye(CloseCode::Shutdown).await;
    drop(conn);
    assert_eq!(node.end().await, Ok(ServeEnd::Cancelled));
    assert_eq!(began.elapsed(), Duration::from_secs(90));
    assert_eq!(calls.counts().dropped, 1);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_leaves_is_stopped_after_its_last_call_was_read() {
    // NOD-9, REG-7
    let (_node, mut conn, calls) = running(Script::text("a").pause()).await;
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
    conn.push(6, vec![]);
    assert_eq!(conn.ack().await.applied_revision, 6);
    settle().await;
    assert_eq!(calls.counts().stops, 0);
    calls.release();
    calls.wait_for(|counts| counts.stops == 1).await;
    assert_eq!(calls.counts().returned, 1);
}
