use std::time::Duration;

use futures_util::StreamExt as _;
use iop_execution::{CancelReason, FailureCode, FailureStage, FinishReason, ProviderContacted, RunEventKind};
use iop_wire::{CloseCode, Drain, Goodbye, HeartbeatProfile, ToEdge, ToNode};

use super::script::*;
use crate::api::SubmitError;
use crate::events::Notice;
use crate::observe::Observation;
use crate::state::tests::catalog;
use crate::state::{CANCEL_GRACE, EdgeNodeEvent};

#[tokio::test(start_paused = true)]
async fn a_lost_connection_ends_its_runs_once_and_its_waiters_at_once() {
    // FEN-2, FEN-3
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut streaming, number) = started(&edge, &mut node, "only-a").await;
    node.event(number, 1, delta("x"));
    assert_eq!(streaming.next().await.unwrap().kind, delta("x"));
    node.event(number, 2, delta("unread"));
    let (mut silent, _) = started(&edge, &mut node, "long").await;
    let mut unwritten = run(&edge, "long").await.unwrap();
    let waiting = tokio::spawn({
        let edge = edge.clone();
        async move { run(&edge, "only-a").await.map(|_| ()) }
    });
    settle().await;
    node.cut().await;
    assert_eq!(waiting.await.unwrap(), Err(SubmitError::Unavailable));

    assert_eq!(streaming.next().await.unwrap().kind, delta("unread"), "what had arrived is delivered");
    let mut terminals = Vec::new();
    for stream in [&mut streaming, &mut silent, &mut unwritten] {
        let event = stream.next().await.unwrap();
        let RunEventKind::Error(failure) = event.kind else { panic!() };
        assert_eq!(failure.code, FailureCode::Disconnected);
        terminals.push((event.seq, failure.stage, failure.provider_contacted));
        assert!(stream.next().await.is_none());
    }
    assert_eq!(
        terminals,
        [
            (3, FailureStage::Stream, ProviderContacted::Yes),
            (1, FailureStage::Connect, ProviderContacted::Unknown),
            (1, FailureStage::Admission, ProviderContacted::No),
        ]
    );
    drop((streaming, silent, unwritten));
    assert_eq!(recorder.count(|seen| matches!(seen, Observation::LeaseReleased { .. })), 3);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_dispatched_once_to_the_node_that_came_back() {
    // FEN-5
    let edge = edge();
    let other = Node::connect(&edge, "n2").await;
    let holder = run(&edge, "any").await.unwrap();
    let first = Node::connect(&edge, "n1").await;
    let lost = run(&edge, "any").await.unwrap();
    let waiting = tokio::spawn({
        let edge = edge.clone();
        async move { run(&edge, "any").await }
    });
    settle().await;
    first.cut().await;
    settle().await;
    assert!(!waiting.is_finished(), "the other node is still a candidate");
    let mut again = Node::connect(&edge, "n1").await;
    let mut stream = waiting.await.unwrap().unwrap();
    let (head, _) = again.request_with_body().await;
    again.event(head.run, 1, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
    assert!(stream.next().await.is_none());
    assert!(again.pending().await.is_empty(), "once");
    drop((holder, lost, stream));
    other.cut().await;
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn dropping_the_connection_task_fences_too() {
    // FEN-2
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, _) = started(&edge, &mut node, "only-a").await;
    node.task.abort();
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Error(_)));
    drop(stream);
    assert_at_rest(&edge);
    Node::connect(&edge, "n1").await;
}

#[tokio::test(start_paused = true)]
async fn a_goodbye_ends_the_connection_with_its_code() {
    // WIR-13
    let edge = edge();
    let mut events = edge.subscribe_nodes();
    let mut node = Node::connect(&edge, "n1").await;
    node.send(ToEdge::Goodbye(Goodbye { code: CloseCode::Shutdown, retry_after_ms: 0 }));
    (&mut node.task).await.unwrap();
    events.next().await;
    let Some(Notice::Event(EdgeNodeEvent::Disconnected { code, .. })) = events.next().await else { panic!() };
    assert_eq!(code, CloseCode::Shutdown);
    assert_eq!(node.try_recv().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_draining_node_gets_nothing_new_and_finishes() {
    // WIR-13
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, number) = started(&edge, &mut node, "only-a").await;
    node.send(ToEdge::Drain(Drain { deadline_ms: 1000, returning: false }));
    settle().await;
    assert_eq!(run(&edge, "long").await.unwrap_err(), SubmitError::Unavailable);
    assert!(edge.snapshot().nodes[0].draining);
    node.event(number, 1, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
    node.send(ToEdge::Goodbye(Goodbye { code: CloseCode::Drained, retry_after_ms: 0 }));
    (&mut node.task).await.unwrap();
    assert!(!edge.snapshot().nodes[0].connected);
}

#[tokio::test(start_paused = true)]
async fn a_node_without_pongs_is_closed_and_one_with_pongs_lives() {
    // WIR-12
    let edge = start(builder(catalog()).heartbeat(HeartbeatProfile::default()));
    let mut dead = Node::connect(&edge, "n1").await;
    let mut alive = Node::connect(&edge, "n2").await;
    let start = tokio::time::Instant::now();
    let keep = tokio::spawn(async move {
        loop {
            alive.recv().await;
        }
    });
    let number = 1;
    for seq in 0..3 {
        // Other messages prove nothing.
        dead.send(ToEdge::Ping(iop_wire::Ping { nonce: number + seq }));
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert_eq!(dead.goodbye().await, CloseCode::HeartbeatTimeout);
    let elapsed = start.elapsed().as_secs();
    assert!((45..=76).contains(&elapsed), "{elapsed}");
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(edge.snapshot().nodes[1].connected);
    keep.abort();
}

#[tokio::test(start_paused = true)]
async fn strangers_are_closed_after_their_time() {
    // REG-1, REG-8
    let edge = edge();
    let start = tokio::time::Instant::now();
    let mut silent = Node::dial(&edge).await;
    assert_eq!(silent.goodbye().await, CloseCode::RegisterTimeout);
    assert_eq!(start.elapsed().as_secs(), 10);
    let mut lazy = Node::register(&edge, "n1").await;
    assert_eq!(lazy.goodbye().await, CloseCode::ReadyTimeout);
    assert_eq!(start.elapsed().as_secs(), 70);
    silent.cut().await;
    lazy.cut().await;
    Node::connect(&edge, "n1").await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_run_without_terminal_is_quarantined() {
    // LEA-6
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (stream, number) = started(&edge, &mut node, "only-a").await;
    drop(stream);
    assert_eq!(node.recv().await, ToNode::Cancel(number, CancelReason::Client));
    tokio::time::sleep(CANCEL_GRACE - Duration::from_millis(1)).await;
    assert_eq!(in_use(&edge, "a").quarantined, 0);
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert_eq!((in_use(&edge, "a").quarantined, in_use(&edge, "a").normal), (1, 1));
    let waiting = tokio::spawn({
        let edge = edge.clone();
        async move { run(&edge, "only-a").await }
    });
    settle().await;
    assert!(!waiting.is_finished());
    node.event(number, 1, RunEventKind::Cancelled(CancelReason::Client));
    let stream = waiting.await.unwrap().unwrap();
    assert_eq!(in_use(&edge, "a").quarantined, 0);
    drop(stream);
    node.cut().await;
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn a_second_connection_of_a_node_is_refused_while_the_first_answers() {
    // REG-4, REG-5
    let edge = edge();
    let mut first = Node::connect(&edge, "n1").await;
    let mut second = Node::dial(&edge).await;
    second.send(ToEdge::Hello(crate::state::tests::hello()));
    second.recv().await;
    second.send(ToEdge::Register(crate::state::tests::register("n1")));
    assert!(first.pending().await.is_empty(), "only a ping, which it answers");
    let ToNode::RegisterResponse(response) = second.recv().await else { panic!() };
    let refusal = response.outcome.unwrap_err();
    assert_eq!(refusal.reason, iop_wire::RefusalReason::DuplicateConnection);
    assert!(!refusal.reason.is_fatal() && refusal.retry_after > Duration::ZERO);
    assert_eq!(second.goodbye().await, CloseCode::Closed);
    second.cut().await;
    let (stream, _) = started(&edge, &mut first, "only-a").await;
    drop(stream);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_was_cancelled_and_then_fenced_ends_once() {
    // EXE-6, FEN-2
    let edge = edge();
    let mut events = edge.subscribe_runs();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, number) = started(&edge, &mut node, "only-a").await;
    edge.cancel(stream.run_id());
    assert_eq!(node.recv().await, ToNode::Cancel(number, CancelReason::Client));
    node.cut().await;
    assert_eq!(stream.next().await.unwrap().kind, RunEventKind::Cancelled(CancelReason::Client));
    assert!(stream.next().await.is_none());
    drop((stream, edge));
    let mut terminals = 0;
    while let Some(Notice::Event(notice)) = futures_util::FutureExt::now_or_never(events.next()).flatten() {
        terminals += u32::from(notice.event.kind.is_terminal());
    }
    assert_eq!(terminals, 1);
}
