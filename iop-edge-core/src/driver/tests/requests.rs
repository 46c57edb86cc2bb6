use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _};
use http::{HeaderMap, StatusCode};
use iop_execution::{
    CancelReason, FailureCode, FinishReason, FrameFlags, NodeId, ProviderContacted, RunEventKind, RunId, TunnelFrame,
    TunnelHead,
};
use iop_wire::link::memory::{MemoryMode, memory_link_with};
use iop_wire::{CloseCode, ToEdge, ToNode};

use super::script::*;
use crate::api::{ApplyError, CancelRun, Destination, Engine, Payload, Submit, SubmitError, UnknownNode, WireKind};
use crate::catalog::Catalog;
use crate::events::Notice;
use crate::observe::{Observation, ReleaseCause};
use crate::state::EdgeNodeEvent;
use crate::state::tests::{catalog, group, hello, node_entry, ready, register};

#[tokio::test(start_paused = true)]
async fn a_run_goes_out_and_its_events_come_back_in_order() {
    // EDG-1, LEA-4, WIR-14
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    let (admitted, mut stream) = edge.submit_run(to("only-a"), Bytes::from_static(INPUT)).await.unwrap();
    assert_eq!((admitted.node.as_str(), admitted.provider.as_str(), admitted.wire), ("n1", "a", WireKind::Run));
    let (head, body) = node.request_with_body().await;
    assert_eq!((head.run_id, head.run.0, head.body_len), (admitted.run_id, 1, INPUT.len() as u64));
    assert_eq!((body.as_slice(), head.window, head.stream), (INPUT, 128 * 1024, true));
    assert_eq!((head.response_stall_timeout_ms, head.deadline_ms), (0, 0));

    node.send(ToEdge::Accepted(head.run));
    node.event(head.run, 1, RunEventKind::Start);
    node.event(head.run, 2, delta("hello"));
    assert_eq!(stream.next().await.unwrap().kind, RunEventKind::Start);
    assert_eq!(stream.next().await.unwrap().kind, delta("hello"));
    assert_eq!(in_use(&edge, "a").normal, 1);
    // A task of its own sees the end as early as anyone can.
    let client = tokio::spawn({
        let edge = edge.clone();
        async move {
            let last = stream.next().await.unwrap();
            assert!(edge.snapshot().is_at_rest(), "the place is free before the client sees the end");
            assert_eq!((last.seq, last.kind), (3, RunEventKind::Complete(FinishReason::Stop)));
            assert!(stream.next().await.is_none());
            stream
        }
    });
    settle().await;
    node.event(head.run, 3, RunEventKind::Complete(FinishReason::Stop));
    let stream = client.await.unwrap();
    drop(stream);
    assert!(node.pending().await.is_empty(), "a finished run is not cancelled");
    assert_eq!(recorder.count(|seen| matches!(seen, Observation::Receipt { .. })), 1);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn a_large_tunnel_body_follows_its_request_in_chunks_within_the_credit() {
    // WIR-7, WIR-8, WIR-14
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let body: Bytes = (0..400 * 1024_u32).map(|i| i.to_le_bytes()[1]).collect::<Vec<_>>().into();
    let (_, mut stream) = edge.submit_tunnel(to("only-a"), call(body.clone())).await.unwrap();
    let head = node.request().await;
    let reader = tokio::spawn(async move { stream.next().await });
    let (mut got, mut last) = (Vec::new(), false);
    while !last {
        let before = got.len();
        for message in node.pending().await {
            let ToNode::Chunk(chunk) = message else { panic!("{message:?}") };
            assert!(chunk.data.len() <= 16 * 1024 && chunk.run == head.run && !last);
            got.extend_from_slice(&chunk.data);
            last = chunk.last;
        }
        assert!(got.len() - before <= 128 * 1024, "more than the credit");
        assert!(got.len() > before);
        node.send(ToEdge::Credit(head.run, u32::try_from(got.len() - before).unwrap()));
    }
    assert_eq!(got, body);
    let head_frame = TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers: HeaderMap::new() });
    node.frame(head.run, 1, head_frame.clone());
    assert_eq!(reader.await.unwrap(), Some(head_frame));
}

#[tokio::test(start_paused = true)]
async fn tunnel_frames_pass_and_never_become_events() {
    // EDG-2, WIR-6
    let edge = edge();
    let mut events = edge.subscribe_runs();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = tunnel(&edge, &mut node, "only-a").await;
    let body = TunnelFrame::Body { bytes: Bytes::from_static(b"x"), flags: FrameFlags::CONTENT };
    node.frame(run, 1, TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers: HeaderMap::new() }));
    node.frame(run, 2, body.clone());
    node.frame(run, 3, TunnelFrame::End);
    assert!(matches!(stream.next().await, Some(TunnelFrame::Head(_))));
    assert_eq!(stream.next().await, Some(body));
    assert_eq!(stream.next().await, Some(TunnelFrame::End));
    assert!(stream.next().await.is_none());
    assert_eq!(events.next().now_or_never(), None);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn the_answer_to_ready_goes_ahead_of_the_dispatches_it_caused() {
    // REG-3
    let edge = edge();
    let mut second = Node::connect(&edge, "n2").await;
    let holder = run(&edge, "any").await.unwrap();
    let waiting = tokio::spawn({
        let edge = edge.clone();
        async move { run(&edge, "any").await }
    });
    settle().await;
    let mut first = Node::register(&edge, "n1").await;
    first.send(ToEdge::Ready(ready("n1", 7, &["a", "b"])));
    assert!(matches!(first.recv().await, ToNode::ReadyResponse(_)));
    assert_eq!(first.request().await.provider_id.as_str(), "a");
    drop((holder, waiting.await.unwrap()));
    second.pending().await;
}

#[tokio::test(start_paused = true)]
async fn node_events_and_run_events_have_a_bus_each() {
    // EDG-2, REG-3
    let edge = edge();
    let (mut nodes, mut runs) = (edge.subscribe_nodes(), edge.subscribe_runs());
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    node.event(run, 1, delta("x"));
    stream.next().await;
    node.cut().await;
    assert!(matches!(nodes.next().await, Some(Notice::Event(EdgeNodeEvent::Connected { .. }))));
    let Some(Notice::Event(EdgeNodeEvent::Disconnected { code, .. })) = nodes.next().await else { panic!() };
    assert_eq!(code, CloseCode::Closed);
    let mut seen = Vec::new();
    while let Some(Some(Notice::Event(notice))) = runs.next().now_or_never() {
        assert_eq!(notice.run_id, stream.run_id());
        seen.push(notice.event.seq);
    }
    assert_eq!(seen, [1, 2], "the end that the Edge made is an event, too");
}

#[tokio::test(start_paused = true)]
async fn dropping_a_submission_leaves_nothing_at_any_stage() {
    // EDG-3, LEA-7, QUE-2
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    let (stream, run_number) = started(&edge, &mut node, "only-a").await;
    // queued
    let mut queued = Box::pin(run(&edge, "only-a"));
    assert!(queued.as_mut().now_or_never().is_none());
    assert_eq!(edge.snapshot().models[1].waiting, 1);
    drop(queued);
    assert_eq!(edge.snapshot().models[1].waiting, 0);
    // granted, but never polled again
    let mut granted = Box::pin(run(&edge, "only-a"));
    assert!(granted.as_mut().now_or_never().is_none());
    node.event(run_number, 1, RunEventKind::Complete(FinishReason::Stop));
    settle().await;
    assert_eq!(in_use(&edge, "a").normal, 1);
    drop(granted);
    assert_eq!(in_use(&edge, "a").normal, 0);
    drop(stream);
    let abandoned =
        |seen: &Observation| matches!(seen, Observation::LeaseReleased { cause: ReleaseCause::Abandoned, .. });
    assert_eq!(recorder.count(abandoned), 1);
    // a panic in what the caller does
    let panics = tokio::spawn({
        let edge = edge.clone();
        async move { submit_with(&edge, to("only-a"), |_| panic!("caller")).await }
    });
    assert!(panics.await.is_err());
    assert_at_rest(&edge);
    assert!(node.pending().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropping_a_stream_cancels_and_the_place_waits_for_the_node() {
    // EDG-3, LEA-6, LEA-7
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    for started_first in [false, true] {
        let (mut stream, run) = started(&edge, &mut node, "only-a").await;
        if started_first {
            node.event(run, 1, delta("x"));
            stream.next().await;
        }
        drop(stream);
        assert_eq!(node.recv().await, ToNode::Cancel(run, CancelReason::Client));
        assert_eq!(in_use(&edge, "a").normal, 1, "the backend may still be busy");
        let n = if started_first { 2 } else { 1 };
        node.event(run, n, RunEventKind::Cancelled(CancelReason::Client));
        settle().await;
        assert_at_rest(&edge);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_not_written_is_taken_back() {
    // WIR-9, LEA-4
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    drop(run(&edge, "only-a").await.unwrap());
    assert_at_rest(&edge);
    assert!(node.pending().await.is_empty(), "nothing is sent");
    let failed =
        |seen: &Observation| matches!(seen, Observation::LeaseReleased { cause: ReleaseCause::SendFailed, .. });
    assert_eq!(recorder.count(failed), 1);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_by_id_reaches_only_that_run() {
    // EDG-3
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut first, run) = started(&edge, &mut node, "only-a").await;
    let (other, _) = started(&edge, &mut node, "long").await;
    assert_eq!(edge.cancel(RunId::from_bytes([0; 16])), CancelRun::UnknownRun);
    assert_eq!(edge.cancel(first.run_id()), CancelRun::Cancelled);
    assert_eq!(edge.cancel(first.run_id()), CancelRun::UnknownRun, "once");
    let end = first.next().await.unwrap();
    assert_eq!((end.seq, end.kind), (1, RunEventKind::Cancelled(CancelReason::Client)));
    assert_eq!(node.pending().await, [ToNode::Cancel(run, CancelReason::Client)]);
    assert_eq!((in_use(&edge, "a").normal, in_use(&edge, "b").normal), (1, 1));
    drop(other);

    let submitted = submit_with(&edge, to("long"), |admitted| {
        assert_eq!(edge.cancel(admitted.run_id), CancelRun::Cancelled);
    });
    let end = run_output(submitted.await).next().await.unwrap();
    assert_eq!(end.kind, RunEventKind::Cancelled(CancelReason::Client), "between admission and dispatch");
    assert_eq!(in_use(&edge, "b").normal, 1);
}

#[tokio::test(start_paused = true)]
async fn what_needs_no_credential_is_sent_although_a_config_takes_its_provider_meanwhile() {
    // CFG-2, CRD-15
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let submitted = submit_with(&edge, to("only-a"), |_| {
        let mut entry = node_entry("n1", &[("a", 1, 0), ("b", 2, 1)]);
        entry.providers[0].enabled = false;
        let taken = Catalog::builder().revision(8).node(entry).model(group("only-a", &["a"]));
        edge.apply_config(taken.build().unwrap()).unwrap();
    });
    let mut stream = run_output(submitted.await);
    assert!(matches!(node.recv().await, ToNode::ConfigUpdate(_)), "control goes first");
    let (head, _) = node.request_with_body().await;
    node.event(head.run, 1, RunEventKind::Complete(FinishReason::Stop));
    assert_eq!(stream.next().await.unwrap().kind, RunEventKind::Complete(FinishReason::Stop));
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_the_run_at_once_and_the_place_later() {
    // API-14, LEA-6
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let soon = |seconds| {
        let deadline = Some((tokio::time::Instant::now() + Duration::from_secs(seconds)).into_std());
        Submit { deadline, ..to("only-a") }
    };
    let (_, mut stream) = edge.submit_run(soon(5), Bytes::from_static(INPUT)).await.unwrap();
    let (head, _) = node.request_with_body().await;
    assert_eq!(head.deadline_ms, 5000);
    node.event(head.run, 1, delta("unread"));
    node.event(head.run, 2, delta("unread"));
    let waiting = edge.submit_run(soon(3), Bytes::from_static(INPUT)).await;
    assert_eq!(waiting.map(|_| ()).unwrap_err(), SubmitError::DeadlineExceeded);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let end = stream.next().await.unwrap();
    assert_eq!((end.seq, end.kind), (1, RunEventKind::Cancelled(CancelReason::EdgeDeadline)));
    assert_eq!(node.recv().await, ToNode::Cancel(head.run, CancelReason::EdgeDeadline));
    assert_eq!(in_use(&edge, "a").normal, 1);
    node.event(head.run, 3, RunEventKind::Cancelled(CancelReason::EdgeDeadline));
    settle().await;
    drop(stream);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn deadlines_and_queue_timeouts_need_no_timer_task() {
    // QUE-2, API-14
    let edge = builder(catalog()).build();
    let mut node = Node::connect(&edge, "n1").await;
    let deadline = Some((tokio::time::Instant::now() + Duration::from_secs(50)).into_std());
    let request = Submit { deadline, ..to("only-a") };
    let (_, mut stream) = edge.submit_run(request, Bytes::from_static(INPUT)).await.unwrap();
    node.request_with_body().await;
    let start = tokio::time::Instant::now();
    assert_eq!(run(&edge, "only-a").await.unwrap_err(), SubmitError::QueueTimeout);
    assert_eq!(start.elapsed().as_secs(), 30);
    assert_eq!(stream.next().await.unwrap().kind, RunEventKind::Cancelled(CancelReason::EdgeDeadline));
    assert_eq!(start.elapsed().as_secs(), 50);
}

#[tokio::test(start_paused = true)]
async fn refusals_before_admission_are_typed() {
    // EDG-1, SEL-3
    let edge = edge();
    assert_eq!(run(&edge, "nobody").await.unwrap_err(), SubmitError::UnknownModel);
    assert_eq!(run(&edge, "any").await.unwrap_err(), SubmitError::Unavailable);
    let direct = Destination::Direct {
        node: None,
        adapter: iop_execution::AdapterKey::new("a").unwrap(),
        target: iop_execution::Target::new("t").unwrap(),
    };
    let refused = edge.submit_run(Submit::to(direct), Bytes::new()).await.map(|_| ()).unwrap_err();
    assert_eq!(refused, SubmitError::Unavailable);
    let mut node = Node::connect(&edge, "n1").await;
    let engine: Arc<dyn Engine> = Arc::new(edge.clone());
    assert!(engine.is_ready());
    assert_eq!(engine.models().len(), 3);
    // A provider that takes tunnels gets tunnels: a run does not fit it.
    let prepare = Box::new(|_: &crate::api::Admitted| Payload::Run { input: Bytes::new() });
    let refused = engine.submit(to("only-a"), prepare).await.map(|_| ()).unwrap_err();
    assert!(matches!(refused, SubmitError::InvalidRequest(_)));
    assert_at_rest(&edge);
    assert!(node.pending().await.is_empty());
    let unknown = NodeId::new("nobody").unwrap();
    assert_eq!(edge.drain(&unknown), Err(UnknownNode(unknown)));
    assert_eq!(edge.apply_config(catalog()), Err(ApplyError::NotNewer { current: 7 }));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_what_runs_and_says_goodbye() {
    // EDG-1, WIR-13
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run_number) = started(&edge, &mut node, "only-a").await;
    let down = tokio::spawn({
        let edge = edge.clone();
        async move { edge.shutdown(Duration::from_secs(30)).await }
    });
    assert!(matches!(node.recv().await, ToNode::Drain(_)));
    assert_eq!(run(&edge, "only-a").await.unwrap_err(), SubmitError::ShuttingDown);
    let start = tokio::time::Instant::now();
    node.event(run_number, 1, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
    assert_eq!(node.goodbye().await, CloseCode::Restart);
    assert!(start.elapsed() < Duration::from_secs(1), "it does not wait longer than needed");
    node.cut().await;
    down.await.unwrap();

    let edge = self::edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, _) = started(&edge, &mut node, "only-a").await;
    let start = tokio::time::Instant::now();
    let ((), code) = tokio::join!(edge.shutdown(Duration::from_secs(30)), node.goodbye());
    assert_eq!(code, CloseCode::Restart);
    assert!(start.elapsed() >= Duration::from_secs(30) && start.elapsed() <= Duration::from_secs(32));
    let RunEventKind::Error(failure) = stream.next().await.unwrap().kind else { panic!() };
    assert_eq!(failure.code, FailureCode::Disconnected);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_a_hung_node_whose_last_client_left() {
    // EDG-1, LEA-6
    for by_id in [false, true] {
        let edge = edge();
        let mut node = Node::connect(&edge, "n1").await;
        let (stream, _) = started(&edge, &mut node, "only-a").await;
        let down = tokio::spawn({
            let edge = edge.clone();
            async move { edge.shutdown(Duration::from_secs(30)).await }
        });
        assert!(matches!(node.recv().await, ToNode::Drain(_)));
        let start = tokio::time::Instant::now();
        if by_id {
            assert_eq!(edge.cancel(stream.run_id()), CancelRun::Cancelled);
        } else {
            drop(stream);
        }
        assert_eq!(node.goodbye().await, CloseCode::Restart);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        node.cut().await;
        down.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_same_works_over_an_encoding_link() {
    // WIR-2, REG-1
    let edge = edge();
    let (edge_end, node_end) = memory_link_with(MemoryMode::Encoded);
    let attached = tokio::spawn(edge.attach(edge_end));
    let outbox = iop_wire::OutboxHandle::<ToEdge>::new();
    let mut incoming = node_end.start(outbox.outgoing());
    outbox.push_control(ToEdge::Hello(hello())).unwrap();
    assert!(matches!(incoming.next().await.unwrap().unwrap().message, ToNode::HelloAck(_)));
    outbox.push_control(ToEdge::Register(register("n1"))).unwrap();
    assert!(matches!(incoming.next().await.unwrap().unwrap().message, ToNode::RegisterResponse(_)));
    outbox.push_control(ToEdge::Ready(ready("n1", 7, &["a", "b"]))).unwrap();
    assert!(matches!(incoming.next().await.unwrap().unwrap().message, ToNode::ReadyResponse(_)));
    let mut stream = run(&edge, "only-a").await.unwrap();
    let ToNode::Run(request) = incoming.next().await.unwrap().unwrap().message else { panic!() };
    let key = outbox.open(request.head.run, request.head.window);
    assert!(matches!(incoming.next().await.unwrap().unwrap().message, ToNode::Chunk(_)));
    let event = |kind| ToEdge::Event(request.head.run, iop_execution::RunEvent { seq: 0, kind, usage: None });
    outbox.push(key, event(delta("hi")));
    outbox.push(key, event(RunEventKind::Complete(FinishReason::Length)));
    assert_eq!(stream.next().await.unwrap().kind, delta("hi"));
    assert_eq!(stream.next().await.unwrap().kind, RunEventKind::Complete(FinishReason::Length));
    drop(incoming);
    attached.await.unwrap();
    assert!(!provider(&edge, "a").connected);
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn the_pre_send_fence_surfaces_as_disconnected_and_sends_nothing() {
    // FEN-8, EDG-1
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let close = |_: &crate::api::Admitted| {
        edge.shared().with(|core, now| {
            core.state.close_all(CloseCode::Superseded, || Duration::ZERO, now);
        });
    };
    let mut stream = run_output(submit_with(&edge, to("only-a"), close).await);
    let RunEventKind::Error(failure) = stream.next().await.unwrap().kind else { panic!() };
    assert_eq!((failure.code, failure.provider_contacted), (FailureCode::Disconnected, ProviderContacted::No));
    let messages = node.pending().await;
    assert!(matches!(messages.as_slice(), [ToNode::Goodbye(_)]), "{messages:?}");
    assert_at_rest(&edge);
}
