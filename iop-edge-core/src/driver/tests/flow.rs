use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _};
use http::{HeaderMap, StatusCode};
use iop_execution::{CancelReason, FinishReason, FrameFlags, RunEvent, RunEventKind, TunnelFrame, TunnelHead, Usage};
use iop_wire::limits::MIN_CHARGE;
use iop_wire::{ToEdge, ToNode};

use super::script::*;
use crate::events::Notice;
use crate::observe::Observation;
use crate::state::tests::catalog;

const FRAME: usize = 16 * 1024;

fn body() -> TunnelFrame {
    TunnelFrame::Body { bytes: Bytes::from_static(&[b'x'; FRAME]), flags: FrameFlags::NONE }
}

fn head() -> TunnelFrame {
    TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers: HeaderMap::new() })
}

#[tokio::test(start_paused = true)]
async fn credit_goes_back_as_the_client_reads() {
    // WIR-7
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = tunnel(&edge, &mut node, "only-a").await;
    let (mut n, mut credit, mut sent, mut granted) = (1, 128 * 1024_i64, 0_i64, 0_i64);
    node.frame(run, n, head());
    credit -= 256;
    settle().await;
    assert!(matches!(stream.next().await, Some(TunnelFrame::Head(_))));
    for _ in 0..50 {
        while credit >= FRAME as i64 {
            n += 1;
            node.frame(run, n, body());
            credit -= FRAME as i64;
            sent += FRAME as i64;
        }
        settle().await;
        assert!(edge.shared().pool.held() <= 128 * 1024, "never more than the window waits");
        while stream.next().now_or_never().is_some() {}
        for message in node.pending().await {
            let ToNode::Credit(of, bytes) = message else { panic!("{message:?}") };
            assert_eq!(of, run);
            credit += i64::from(bytes);
            granted += i64::from(bytes);
        }
        assert!(credit <= 128 * 1024);
        assert!(credit >= FRAME as i64, "a reading client never stops its run");
    }
    assert!(sent > 1024 * 1024 && granted <= sent + 256);
    assert_eq!(edge.shared().pool.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_nothing_for_a_minute_is_cut_and_nobody_else() {
    // WIR-7, WIR-16
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let mut other = Node::connect(&edge, "n2").await;
    let (stopped, slow_run) = started(&edge, &mut node, "only-a").await;
    let (mut reading, run) = started(&edge, &mut other, "any").await;
    let start = tokio::time::Instant::now();
    node.event(slow_run, 1, delta("a"));
    node.event(slow_run, 2, delta("b"));
    for n in 1..=65 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        other.event(run, n, delta("x"));
        assert_eq!(reading.next().await.unwrap().kind, delta("x"));
        if n == 59 {
            assert!(node.pending().await.is_empty());
        }
    }
    assert_eq!(node.pending().await, [ToNode::Cancel(slow_run, CancelReason::SlowClient)]);
    assert!(start.elapsed().as_secs() == 65 && other.pending().await.is_empty());
    let mut stopped = stopped;
    let end = stopped.next().await.unwrap();
    assert_eq!((end.seq, end.kind), (1, RunEventKind::Cancelled(CancelReason::SlowClient)));
    assert_eq!(edge.shared().pool.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_that_reads_a_little_is_left_alone() {
    // WIR-16
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    for n in 1..=20 {
        node.event(run, n, delta("x"));
    }
    for n in 1..=20 {
        tokio::time::sleep(Duration::from_secs(50)).await;
        assert_eq!(stream.next().await.unwrap().seq, n);
    }
    tokio::time::sleep(Duration::from_secs(1000)).await;
    assert!(node.pending().await.is_empty(), "with nothing to read, waiting is no offence");
    node.event(run, 21, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_could_not_read_because_the_edge_was_suspended_has_its_whole_time_again() {
    // WIR-16
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (stream, run) = started(&edge, &mut node, "only-a").await;
    node.event(run, 1, delta("x"));
    settle().await;
    tokio::time::advance(Duration::from_secs(200)).await;
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert!(!node.pending().await.iter().any(|message| matches!(message, ToNode::Cancel(..))));
    tokio::time::sleep(Duration::from_secs(12)).await;
    assert!(node.pending().await.contains(&ToNode::Cancel(run, CancelReason::SlowClient)));
    drop(stream);
}

#[tokio::test(start_paused = true)]
async fn a_finished_run_that_nobody_reads_does_not_keep_its_bytes() {
    // WIR-16
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    node.event(run, 1, delta("x"));
    node.event(run, 2, RunEventKind::Complete(FinishReason::Stop));
    settle().await;
    assert!(edge.snapshot().is_at_rest() && edge.shared().pool.held() > 0);
    tokio::time::sleep(Duration::from_secs(62)).await;
    assert_eq!(edge.shared().pool.held(), 0);
    assert_eq!(stream.next().await.unwrap().kind, RunEventKind::Cancelled(CancelReason::SlowClient));
    drop(stream);
    assert_at_rest(&edge);
}

fn counts(output: u64) -> Usage {
    Usage { output_tokens: Some(output), ..Usage::default() }
}

#[tokio::test(start_paused = true)]
async fn usage_reports_of_a_run_that_wait_are_merged_and_the_client_sees_no_gap() {
    // WIR-7, EXE-5, EXE-7
    let edge = edge();
    let mut all = edge.subscribe_runs();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    let usage = |seq, usage| ToEdge::Event(run, RunEvent { seq, kind: RunEventKind::Usage, usage });
    node.event(run, 1, RunEventKind::Start);
    let input = Usage { input_tokens: Some(9), ..Usage::default() };
    node.send(usage(2, Some(input)));
    for seq in 3..=10_000 {
        node.send(usage(seq, Some(counts(seq))));
        if seq % 1000 == 0 {
            settle().await;
        }
    }
    node.send(usage(10_001, None));
    node.event(run, 10_002, delta("x"));
    node.send(usage(10_003, None));
    node.send(usage(10_004, Some(counts(7))));
    settle().await;
    assert_eq!(edge.shared().waiting(), 4);
    let mut seen = Vec::new();
    while let Some(Some(event)) = stream.next().now_or_never() {
        seen.push((event.seq, event.kind, event.usage));
    }
    let last = Usage { output_tokens: Some(10_000), ..input };
    let expected = [
        (1, RunEventKind::Start, None),
        (2, RunEventKind::Usage, Some(last)),
        (3, delta("x"), None),
        (4, RunEventKind::Usage, Some(counts(7))),
    ];
    assert_eq!(seen, expected);
    // A gap is still one, and the end that the Edge makes goes on with the client's numbers.
    node.send(usage(10_005, None));
    node.send(usage(10_007, None));
    settle().await;
    assert_eq!(stream.next().await.unwrap().seq, 5);
    let end = stream.next().await.unwrap();
    assert!(end.seq == 6 && matches!(end.kind, RunEventKind::Error(_)), "{end:?}");
    // Whoever watches all runs sees each event, as far as it keeps up.
    let mut last = 0;
    while let Some(Some(notice)) = all.next().now_or_never() {
        match notice {
            Notice::Lost(lost) => last += lost,
            Notice::Event(notice) => {
                assert_eq!(notice.event.seq, last + 1);
                last += 1;
            }
        }
    }
    assert_eq!(last, 10_006);
}

#[tokio::test(start_paused = true)]
async fn usage_reports_of_a_tunnel_that_wait_are_bounded_by_the_credit_of_the_rest() {
    // WIR-7
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = tunnel(&edge, &mut node, "only-a").await;
    let piece = TunnelFrame::Body { bytes: Bytes::from_static(b"x"), flags: FrameFlags::NONE };
    node.frame(run, 1, head());
    let mut n = 1;
    for _ in 1..128 * 1024 / MIN_CHARGE {
        node.frame(run, n + 1, piece.clone());
        for report in 2..=20 {
            node.frame(run, n + report, TunnelFrame::Usage(counts(n + report)));
        }
        n += 20;
        if n % 1000 == 1 {
            settle().await;
        }
    }
    settle().await;
    // All of the credit in pieces that cost least, and one report behind each of them but the head.
    assert_eq!(edge.shared().waiting(), 512 + 511);
    assert!(provider(&edge, "a").connected, "a node that reports often is no offender");
    assert!(matches!(stream.next().await, Some(TunnelFrame::Head(_))));
    assert_eq!(stream.next().await, Some(piece));
    assert_eq!(stream.next().await, Some(TunnelFrame::Usage(counts(21))));
    node.frame(run, n + 1, TunnelFrame::End);
    settle().await;
    drop(stream);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn windows_shrink_and_the_run_blocked_longest_pays_for_an_exhausted_pool() {
    // WIR-7
    let recorder = std::sync::Arc::new(Recorder::default());
    let observer: std::sync::Arc<dyn crate::observe::Observer> = std::sync::Arc::<Recorder>::clone(&recorder);
    let edge = start(builder(catalog()).receive_pool(160 * 1024).observer(observer));
    let mut node = Node::connect(&edge, "n1").await;
    let mut other = Node::connect(&edge, "n2").await;
    let part = |len: usize| TunnelFrame::Body { bytes: Bytes::from(vec![b'x'; len]), flags: FrameFlags::NONE };
    let (mut first, run) = tunnel(&edge, &mut node, "long").await;
    node.frame(run, 1, head());
    for n in 2..=8 {
        node.frame(run, n, body());
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (_, mut second) = edge.submit_tunnel(to("only-a"), call(Bytes::new())).await.unwrap();
    let request = node.request().await;
    assert_eq!(request.window, 64 * 1024, "less than half of the pool is free");
    node.frame(request.run, 1, head());
    node.frame(request.run, 2, body());
    settle().await;
    let (_, mut third) = edge.submit_tunnel(to("any"), call(Bytes::new())).await.unwrap();
    let request = other.request().await;
    assert_eq!(request.window, 32 * 1024, "less than a quarter is");
    other.frame(request.run, 1, head());
    other.frame(request.run, 2, part(15 * 1024));
    other.frame(request.run, 3, part(15 * 1024));
    settle().await;
    let exhausted = || recorder.count(|seen| *seen == Observation::PoolExhausted);
    assert_eq!((exhausted(), edge.shared().pool.held()), (0, 3 * 256 + (7 * 16 + 16 + 30) * 1024));
    other.frame(request.run, 4, part(1536));
    settle().await;
    assert_eq!((exhausted(), edge.shared().pool.held()), (1, 2 * 256 + (16 + 30) * 1024 + 1536));
    assert_eq!(first.next().await, Some(TunnelFrame::Cancelled(CancelReason::ReceivePool)));
    assert_eq!(node.pending().await, [ToNode::Cancel(run, CancelReason::ReceivePool)]);
    for stream in [&mut second, &mut third] {
        assert!(matches!(stream.next().await, Some(TunnelFrame::Head(_))), "the others go on");
    }
}

#[tokio::test(start_paused = true)]
async fn one_stopped_reader_among_many_runs_of_one_connection_holds_up_nobody() {
    // WIR-7, WIR-9
    let mut wide = crate::state::tests::node_entry("n1", &[("a", 32, 0), ("b", 1, 0)]);
    wide.providers.truncate(2);
    let mut group = crate::state::tests::group("m", &["a"]);
    group.max_waiting = 0;
    let catalog = crate::catalog::Catalog::builder().revision(7).node(wide).model(group).build().unwrap();
    let edge = start(builder(catalog));
    let mut node = Node::connect(&edge, "n1").await;
    let mut streams = Vec::new();
    for _ in 0..32 {
        streams.push(started(&edge, &mut node, "m").await);
    }
    let (stopped, stopped_run) = streams.remove(0);
    for n in 1..=512 {
        node.event(stopped_run, n, delta("x"));
    }
    let mut next = vec![1; streams.len()];
    for _ in 0..1000 {
        for (at, (stream, run)) in streams.iter_mut().enumerate() {
            node.event(*run, next[at], delta("x"));
            next[at] += 1;
            assert_eq!(stream.next().await.unwrap().kind, delta("x"));
        }
        for message in node.pending().await {
            let ToNode::Credit(run, _) = message else { panic!("{message:?}") };
            assert_ne!(run, stopped_run);
        }
        assert!(edge.shared().pool.held() <= 128 * 1024);
    }
    drop(stopped);
}
