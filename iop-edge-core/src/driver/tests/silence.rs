//! A Node that does not answer, and requests it never confirmed.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use iop_execution::{CancelReason, FailureCode, FinishReason, ProviderContacted, RunEventKind, RunStream};
use iop_wire::{Ping, ToEdge, ToNode};
use tokio::time::{Instant, sleep};

use super::script::*;
use crate::api::Submit;
use crate::catalog::Catalog;
use crate::edge::Edge;
use crate::observe::Observation;
use crate::state::PROBE;
use crate::state::tests::{group, node_entry};

const SECOND: Duration = Duration::from_secs(1);

/// n1 with provider a and n2 with c, model `any` on both and `only-a`.
fn edge_with(withdraw: Option<Duration>) -> (Edge, std::sync::Arc<Recorder>) {
    let catalog = Catalog::builder()
        .revision(7)
        .suspicion_withdraw(withdraw)
        .node(node_entry("n1", &[("a", 2, 0), ("b", 1, 0)]))
        .node(node_entry("n2", &[("c", 2, 0)]))
        .model(group("any", &["a", "c"]))
        .model(group("only-a", &["a"]))
        .build()
        .unwrap();
    let recorder = std::sync::Arc::new(Recorder::default());
    let observer: std::sync::Arc<dyn crate::observe::Observer> = std::sync::Arc::<Recorder>::clone(&recorder);
    (start(builder(catalog).observer(observer)), recorder)
}

async fn failure(stream: &mut RunStream) -> iop_execution::ExecutionFailure {
    match stream.next().await.unwrap().kind {
        RunEventKind::Error(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_frozen_node_loses_what_nobody_has_seen_within_the_time_and_keeps_its_places() {
    // FEN-7, LEA-6; field reports 9, T6: within 15 s by default, within 8 s with 3 000 ms
    for (withdraw, limit) in [(10 * SECOND, 15), (3 * SECOND, 8)] {
        let (edge, recorder) = edge_with(Some(withdraw));
        let mut frozen = Node::connect(&edge, "n1").await;
        let (mut stream, run) = started(&edge, &mut frozen, "only-a").await;
        let frozen_at = Instant::now();
        let failure = failure(&mut stream).await;
        assert!(frozen_at.elapsed() < limit * SECOND, "{:?}", frozen_at.elapsed());
        assert_eq!((failure.code, failure.provider_contacted), (FailureCode::NodeSuspect, ProviderContacted::Unknown));
        assert!(stream.next().await.is_none(), "one terminal");
        assert_eq!(in_use(&edge, "a").normal, 1, "it may still work there");
        assert!(edge.snapshot().nodes[0].suspect && edge.snapshot().nodes[0].connected);
        assert_eq!(recorder.count(|seen| matches!(seen, Observation::Withdrawn { .. })), 1);

        // It wakes up: answers what waits, the place is freed by its terminal, and it is trusted again.
        let written = frozen.pending().await;
        assert!(written.contains(&ToNode::Cancel(run, CancelReason::Withdrawn)), "{written:?}");
        frozen.event(run, 1, RunEventKind::Cancelled(CancelReason::Withdrawn));
        settle().await;
        assert!(!edge.snapshot().nodes[0].suspect);
        drop(stream);
        assert_at_rest(&edge);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_client_has_seen_is_left_to_the_heartbeat() {
    // FEN-7
    let (edge, _) = edge_with(Some(3 * SECOND));
    let mut node = Node::connect(&edge, "n1").await;
    let (mut seen, first) = started(&edge, &mut node, "only-a").await;
    let (mut unseen, second) = started(&edge, &mut node, "only-a").await;
    node.event(first, 1, RunEventKind::Start);
    node.event(first, 2, delta("a"));
    node.event(second, 1, RunEventKind::Start);
    assert_eq!(seen.next().await.unwrap().kind, RunEventKind::Start);
    assert_eq!(seen.next().await.unwrap().kind, delta("a"));
    assert_eq!(unseen.next().await.unwrap().kind, RunEventKind::Start, "a start is no content");
    assert_eq!(failure(&mut unseen).await.code, FailureCode::NodeSuspect);
    sleep(30 * SECOND).await;
    node.event(first, 3, RunEventKind::Complete(FinishReason::Stop));
    assert_eq!(seen.next().await.unwrap().kind, RunEventKind::Complete(FinishReason::Stop));
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_commits_itself_keeps_its_run_only_once_it_has() {
    // FEN-7, REC-2: a buffered answer is not seen before it is released
    for commits in [false, true] {
        let (edge, _) = edge_with(Some(3 * SECOND));
        let mut node = Node::connect(&edge, "n1").await;
        let request = Submit { explicit_commit: true, ..to("only-a") };
        let submitted = submit_with(&edge, request, |_| {}).await;
        let commit = submitted.commit.clone();
        let mut stream = run_output(submitted);
        let run = node.request_with_body().await.0.run;
        node.event(run, 1, delta("held"));
        assert_eq!(stream.next().await.unwrap().kind, delta("held"));
        if commits {
            commit.set();
        }
        sleep(20 * SECOND).await;
        node.event(run, 2, RunEventKind::Complete(FinishReason::Stop));
        let end = stream.next().await.unwrap().kind;
        assert_eq!(matches!(end, RunEventKind::Complete(_)), commits, "{end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn new_work_goes_elsewhere_as_soon_as_a_node_is_suspect() {
    // FEN-7; field report T6: no request waits 2-30 s for a frozen node
    let (edge, _) = edge_with(Some(10 * SECOND));
    let mut frozen = Node::connect(&edge, "n1").await;
    let mut fine = Node::connect(&edge, "n2").await;
    let (held, _) = started(&edge, &mut frozen, "only-a").await;
    sleep(6 * SECOND).await;
    for _ in 0..2 {
        let (admitted, stream) = edge.submit_run(to("any"), Bytes::from_static(INPUT)).await.unwrap();
        assert_eq!(admitted.provider.as_str(), "c");
        let run = fine.request_with_body().await.0.run;
        fine.event(run, 1, RunEventKind::Complete(FinishReason::Stop));
        drop(stream);
        settle().await;
    }
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn a_long_prefill_is_no_silence_and_an_idle_node_is_not_asked() {
    // FEN-7; field report 14: the session task answers pings. T17: an idle Node costs its heartbeat and nothing else
    let (edge, recorder) = edge_with(Some(3 * SECOND));
    let mut idle = Node::connect(&edge, "n2").await;
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    for _ in 0..1200 {
        sleep(Duration::from_millis(100)).await;
        assert!(node.pending().await.is_empty(), "only pings, which it answers");
    }
    node.event(run, 1, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
    assert_eq!(recorder.count(|seen| matches!(seen, Observation::Suspected { .. })), 0);
    assert!(tokio::time::timeout(SECOND, idle.recv_any()).await.is_err(), "nothing was asked of the idle one");
}

#[tokio::test(start_paused = true)]
async fn a_dispatch_that_its_node_never_confirmed_ends_as_unacknowledged() {
    // WIR-14; field report 5
    let (edge, recorder) = edge_with(None);
    let mut node = Node::connect(&edge, "n1").await;
    let mut stream = run(&edge, "only-a").await.unwrap();
    let start = Instant::now();
    let head = node.request_unconfirmed().await;
    // The Node answers pings, and nothing else: its request was lost on the way.
    let ToNode::Chunk(_) = node.recv().await else { panic!() };
    let ToNode::Cancel(cancelled, reason) = node.recv().await else { panic!() };
    assert_eq!((cancelled, reason), (head.run, CancelReason::Withdrawn));
    assert!(start.elapsed() >= 2 * SECOND && start.elapsed() < 4 * SECOND);
    assert_eq!(recorder.count(|seen| *seen == Observation::ReceiptMissing), 1);
    // Its terminal comes before anything else of the run: nothing was executed.
    node.event(head.run, 1, RunEventKind::Cancelled(CancelReason::Withdrawn));
    let failure = failure(&mut stream).await;
    assert_eq!(
        (failure.code, failure.provider_contacted),
        (FailureCode::DispatchUnacknowledged, ProviderContacted::No)
    );
    drop(stream);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn without_a_terminal_an_unacknowledged_run_ends_after_the_grace_and_its_place_is_quarantined() {
    // WIR-14, LEA-6
    let (edge, _) = edge_with(None);
    let mut node = Node::connect(&edge, "n1").await;
    let mut stream = run(&edge, "only-a").await.unwrap();
    let head = node.request_unconfirmed().await;
    let ToNode::Chunk(_) = node.recv().await else { panic!() };
    let ToNode::Cancel(..) = node.recv().await else { panic!() };
    let start = Instant::now();
    let failure = failure(&mut stream).await;
    assert_eq!(start.elapsed().as_secs(), 15);
    assert_eq!(
        (failure.code, failure.provider_contacted),
        (FailureCode::DispatchUnacknowledged, ProviderContacted::Unknown)
    );
    assert!(stream.next().await.is_none());
    assert_eq!(in_use(&edge, "a").quarantined, 1);
    node.event(head.run, 1, RunEventKind::Cancelled(CancelReason::Withdrawn));
    settle().await;
    drop(stream);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn a_late_receipt_is_a_receipt_and_output_after_the_withdrawal_reaches_nobody() {
    // WIR-14
    let (edge, _) = edge_with(None);
    let mut node = Node::connect(&edge, "n1").await;
    let mut stream = run(&edge, "only-a").await.unwrap();
    let head = node.request_unconfirmed().await;
    let ToNode::Chunk(_) = node.recv().await else { panic!() };
    let nonce = loop {
        match node.recv_any().await.unwrap() {
            ToNode::Ping(Ping { nonce }) if nonce & PROBE != 0 => break nonce,
            ToNode::Ping(Ping { nonce }) => node.pong(nonce),
            other => panic!("{other:?}"),
        }
    };
    // The pong overtakes the receipt.
    node.pong(nonce);
    settle().await;
    node.send(ToEdge::Accepted(head.run));
    sleep(60 * SECOND).await;
    assert!(node.pending().await.is_empty(), "nothing was withdrawn");
    node.event(head.run, 1, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));

    let mut stream = run(&edge, "only-a").await.unwrap();
    let head = node.request_unconfirmed().await;
    let ToNode::Chunk(_) = node.recv().await else { panic!() };
    let ToNode::Cancel(..) = node.recv().await else { panic!() };
    node.event(head.run, 1, delta("too late"));
    node.event(head.run, 2, RunEventKind::Complete(FinishReason::Stop));
    let failure = failure(&mut stream).await;
    assert_eq!(
        (failure.code, failure.provider_contacted),
        (FailureCode::DispatchUnacknowledged, ProviderContacted::Unknown)
    );
    drop(stream);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_never_written_is_taken_back_when_its_node_answers() {
    // WIR-9, WIR-14: the writer is stuck, so neither the request nor a ping gets out; the fence ends it
    let (edge, _) = edge_with(Some(10 * SECOND));
    let mut node = Node::connect(&edge, "n1").await;
    let mut stream = run(&edge, "only-a").await.unwrap();
    let start = Instant::now();
    let failure = failure(&mut stream).await;
    assert_eq!(failure.code, FailureCode::NodeSuspect);
    assert!(start.elapsed() < 15 * SECOND);
    drop(stream);
    assert_at_rest(&edge);
    let written = node.pending().await;
    assert!(!written.iter().any(|message| matches!(message, ToNode::Run(_) | ToNode::Cancel(..))), "{written:?}");
}

#[tokio::test(start_paused = true)]
async fn many_missing_receipts_cost_one_ping_at_a_time() {
    // WIR-14, I10
    let catalog = Catalog::builder()
        .revision(7)
        .suspicion_withdraw(None)
        .node(node_entry("n1", &[("a", 2000, 0), ("b", 1, 0)]))
        .model(group("only-a", &["a"]))
        .build()
        .unwrap();
    let edge = start(builder(catalog));
    let mut node = Node::connect(&edge, "n1").await;
    let mut streams = Vec::new();
    for _ in 0..1000 {
        streams.push(run(&edge, "only-a").await.unwrap());
    }
    assert!(node.pending().await.len() >= 1000, "they are written");
    sleep(3 * SECOND).await;
    let mut probes = 0;
    while let Ok(Some(message)) = tokio::time::timeout(Duration::from_millis(1), node.recv_any()).await {
        probes += usize::from(matches!(message, ToNode::Ping(Ping { nonce }) if nonce & PROBE != 0));
    }
    assert_eq!(probes, 1);
    assert!(edge.snapshot().nodes[0].connected);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_its_link_is_not_taken_for_lost() {
    // WIR-14: a receipt has its time from when the request is written
    let (edge, recorder) = edge_with(None);
    let mut node = Node::connect(&edge, "n1").await;
    let mut stream = run(&edge, "only-a").await.unwrap();
    sleep(30 * SECOND).await;
    let written = node.pending().await;
    assert!(!written.iter().any(|message| matches!(message, ToNode::Cancel(..))), "{written:?}");
    let probes = written.iter().filter(|message| matches!(message, ToNode::Ping(Ping { nonce }) if nonce & PROBE != 0));
    assert_eq!((probes.count(), recorder.count(|seen| *seen == Observation::ReceiptMissing)), (0, 0));
    let head = written.iter().find_map(|message| match message {
        ToNode::Run(dispatch) => Some(dispatch.head.run),
        _ => None,
    });
    let head = head.unwrap();
    node.send(ToEdge::Accepted(head));
    node.event(head, 1, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
    drop(stream);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_freezes_after_a_receipt_was_given_up_is_a_suspect_like_any_other() {
    // FEN-7, WIR-14
    let (edge, _) = edge_with(Some(3 * SECOND));
    let mut node = Node::connect(&edge, "n1").await;
    let mut stream = run(&edge, "only-a").await.unwrap();
    node.request_unconfirmed().await;
    let ToNode::Chunk(_) = node.recv().await else { panic!() };
    let ToNode::Cancel(..) = node.recv().await else { panic!() };
    let start = Instant::now();
    assert_eq!(failure(&mut stream).await.code, FailureCode::NodeSuspect);
    assert!(start.elapsed() <= 8 * SECOND, "{:?}", start.elapsed());
    assert!(stream.next().await.is_none());
    drop(stream);
    drop(node);
    settle().await;
    assert_at_rest(&edge);
}
