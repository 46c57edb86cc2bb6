use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{HeaderMap, StatusCode};
use iop_execution::{
    CancelReason, FailureCode, FinishReason, FrameFlags, RunEventKind, TunnelFrame, TunnelHead, Usage,
};
use iop_wire::limits::{MAX_WINDOW, MIN_CHARGE};
use iop_wire::{CloseCode, CommandResponse, ConfigAck, LinkError, Pong, RunNumber, ToEdge, ToNode};

use super::script::*;
use crate::edge::Edge;
use crate::observe::{Observation, Violation};
use crate::state::tests::{hello, ready, register};

/// The session must end with this code, one run of it must end as disconnected, and nothing may stay behind.
async fn session_ends(code: CloseCode, violation: Violation, broken: impl AsyncFnOnce(&mut Node, RunNumber)) {
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    broken(&mut node, run).await;
    assert_eq!(node.goodbye().await, code);
    let mut last = None;
    while let Some(event) = stream.next().await {
        last = Some(event.kind);
    }
    let Some(RunEventKind::Error(failure)) = last else { panic!("{last:?}") };
    assert_eq!(failure.code, FailureCode::Disconnected);
    assert_eq!(recorder.count(|seen| *seen == Observation::Violated { violation }), 1);
    drop(stream);
    assert_at_rest(&edge);
    node.cut().await;
    // The Node may come back, and the next request works.
    let mut node = Node::connect(&edge, "n1").await;
    works(&edge, &mut node).await;
}

/// One run must end as a protocol failure and be cancelled; the session goes on.
async fn run_ends(violation: Violation, tunnelled: bool, broken: impl FnOnce(&mut Node, RunNumber)) {
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    let (failure, run) = if tunnelled {
        let (mut stream, run) = tunnel(&edge, &mut node, "only-a").await;
        broken(&mut node, run);
        loop {
            match stream.next().await {
                Some(TunnelFrame::Failed(failure)) => break (failure, run),
                Some(_) => {}
                None => panic!("no terminal"),
            }
        }
    } else {
        let (mut stream, run) = started(&edge, &mut node, "only-a").await;
        broken(&mut node, run);
        let mut expected = 1;
        loop {
            let event = stream.next().await.expect("a terminal");
            assert_eq!(event.seq, expected, "numbers have no gap");
            expected += 1;
            if let RunEventKind::Error(failure) = event.kind {
                break (failure, run);
            }
        }
    };
    assert_eq!(failure.code, FailureCode::ProviderProtocol);
    assert_eq!(recorder.count(|seen| *seen == Observation::Violated { violation }), 1);
    assert_eq!(node.recv().await, ToNode::Cancel(run, CancelReason::Withdrawn));
    assert_eq!(in_use(&edge, "a").normal, 1, "the place waits for the terminal");
    if tunnelled {
        node.frame(run, 9, TunnelFrame::Cancelled(CancelReason::Withdrawn));
    } else {
        node.event(run, 9, RunEventKind::Cancelled(CancelReason::Withdrawn));
    }
    settle().await;
    assert_at_rest(&edge);
    works(&edge, &mut node).await;
}

async fn works(edge: &Edge, node: &mut Node) {
    let (mut stream, run) = started(edge, node, "only-a").await;
    node.event(run, 1, RunEventKind::Complete(FinishReason::Stop));
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
    drop(stream);
    assert_at_rest(edge);
}

fn body(len: usize) -> TunnelFrame {
    TunnelFrame::Body { bytes: Bytes::from(vec![b'x'; len]), flags: FrameFlags::NONE }
}

fn head() -> TunnelFrame {
    TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers: HeaderMap::new() })
}

#[tokio::test(start_paused = true)]
async fn w1_a_gap_or_repeat_in_the_envelopes_ends_the_session() {
    // WIR-6
    for wrong in [0, 4, 6, u64::MAX] {
        session_ends(CloseCode::ProtocolViolation, Violation::EnvelopeOrder, async |node, run| {
            node.send_as(wrong, ToEdge::Accepted(run));
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn w2_messages_that_the_state_forbids_end_the_session() {
    // WIR-3, REG-1
    let response = CommandResponse {
        command_id: 1,
        session_id: None,
        outcome: Ok(iop_wire::CommandResult::TransportStatus { active_runs: 0 }),
    };
    let ack = ConfigAck { seen_revision: 1, applied_revision: 1, ..ConfigAck::default() };
    for message in [
        ToEdge::Hello(hello()),
        ToEdge::Register(register("n1")),
        ToEdge::CommandResponse(response),
        ToEdge::ConfigAck(ack),
    ] {
        session_ends(CloseCode::ProtocolViolation, Violation::State, async |node, _| node.send(message)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn w3_a_too_large_envelope_ends_the_session() {
    // WIR-8
    session_ends(CloseCode::ProtocolViolation, Violation::Size, async |node, _| {
        node.send_item(Err(LinkError::TooLarge));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn w4_a_number_never_given_ends_the_session_and_a_late_one_is_dropped() {
    // WIR-11
    for message in [
        ToEdge::Accepted(RunNumber(2)),
        ToEdge::Credit(RunNumber(2), 1),
        ToEdge::Frame(RunNumber(u64::MAX), 1, TunnelFrame::End),
        ToEdge::Accepted(RunNumber(0)),
    ] {
        session_ends(CloseCode::ProtocolViolation, Violation::UnknownRun, async |node, _| node.send(message)).await;
    }

    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    works(&edge, &mut node).await;
    node.event(RunNumber(1), 2, delta("late"));
    node.event(RunNumber(1), 9, RunEventKind::Complete(FinishReason::Stop));
    node.send(ToEdge::Credit(RunNumber(1), 1));
    node.send(ToEdge::Accepted(RunNumber(1)));
    works(&edge, &mut node).await;
    assert_eq!(recorder.count(|seen| *seen == Observation::LateMessage), 4);
}

#[tokio::test(start_paused = true)]
async fn w5_a_gap_in_a_run_ends_that_run() {
    // WIR-6, WIR-15
    for wrong in [0, 1, 3, u64::MAX] {
        run_ends(Violation::RunOrder, false, |node, run| {
            node.event(run, 1, delta("x"));
            node.event(run, wrong, delta("y"));
        })
        .await;
    }
    run_ends(Violation::RunOrder, true, |node, run| node.frame(run, 2, head())).await;
}

#[tokio::test(start_paused = true)]
async fn w5_a_terminal_out_of_order_still_frees_the_place() {
    // WIR-15, LEA-4
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    node.event(run, 5, RunEventKind::Complete(FinishReason::Stop));
    let RunEventKind::Error(failure) = stream.next().await.unwrap().kind else { panic!() };
    assert_eq!(failure.code, FailureCode::ProviderProtocol);
    assert!(edge.snapshot().is_at_rest());
    assert!(node.pending().await.is_empty(), "an ended run is not cancelled");
}

#[tokio::test(start_paused = true)]
async fn w6_nothing_follows_a_terminal() {
    // WIR-6
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    let (mut stream, run) = started(&edge, &mut node, "only-a").await;
    node.event(run, 1, RunEventKind::Complete(FinishReason::Stop));
    node.event(run, 2, delta("late"));
    node.event(run, 3, RunEventKind::Complete(FinishReason::Stop));
    settle().await;
    assert!(matches!(stream.next().await.unwrap().kind, RunEventKind::Complete(_)));
    assert!(stream.next().await.is_none());
    assert_eq!(recorder.count(|seen| *seen == Observation::LateMessage), 2);
    let released = recorder.count(|seen| matches!(seen, Observation::LeaseReleased { .. }));
    assert_eq!(released, 1);
    works(&edge, &mut node).await;
}

#[tokio::test(start_paused = true)]
async fn w7_tunnel_frames_out_of_order_and_messages_of_the_other_wire_end_the_run() {
    // WIR-6
    run_ends(Violation::FrameOrder, true, |node, run| node.frame(run, 1, body(1))).await;
    run_ends(Violation::FrameOrder, true, |node, run| node.frame(run, 1, TunnelFrame::Usage(Usage::default()))).await;
    run_ends(Violation::FrameOrder, true, |node, run| {
        node.frame(run, 1, head());
        node.frame(run, 2, head());
    })
    .await;
    run_ends(Violation::FrameOrder, false, |node, run| {
        node.event(run, 1, delta("x"));
        node.event(run, 2, RunEventKind::Start);
    })
    .await;
    run_ends(Violation::WrongWire, true, |node, run| node.event(run, 1, delta("x"))).await;
    run_ends(Violation::WrongWire, false, |node, run| node.frame(run, 1, head())).await;
}

#[tokio::test(start_paused = true)]
async fn w8_more_than_the_credit_or_more_credit_than_allowed_ends_the_session() {
    // WIR-7
    session_ends(CloseCode::FlowControl, Violation::Credit, async |node, run| {
        for n in 1..=u64::from(128 * 1024 / MIN_CHARGE) + 1 {
            node.event(run, n, delta("x"));
        }
    })
    .await;
    session_ends(CloseCode::FlowControl, Violation::Credit, async |node, run| {
        node.send(ToEdge::Credit(run, MAX_WINDOW));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn w9_numbers_rise_and_are_never_used_again() {
    // WIR-11
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    for expected in 1..=20 {
        let (mut stream, run) = started(&edge, &mut node, "only-a").await;
        assert_eq!(run, RunNumber(expected));
        node.event(run, 1, RunEventKind::Complete(FinishReason::Stop));
        stream.next().await;
    }
}

#[tokio::test(start_paused = true)]
async fn w10_a_wrong_ready_is_answered_false_and_ends_the_session() {
    // REG-3
    for request in [ready("n2", 7, &["a"]), ready("n1", 6, &["a"]), ready("n1", 7, &["c"])] {
        let (edge, recorder) = recorded();
        let mut node = Node::register(&edge, "n1").await;
        node.send(ToEdge::Ready(request));
        let ToNode::ReadyResponse(answer) = node.recv().await else { panic!("no answer") };
        assert!(!answer.ready && answer.lease_generation == 0);
        assert_eq!(node.goodbye().await, CloseCode::ProtocolViolation);
        let violation = Violation::Ready;
        assert_eq!(recorder.count(|seen| *seen == Observation::Violated { violation }), 1);
        node.cut().await;
        Node::connect(&edge, "n1").await;
    }
}

#[tokio::test(start_paused = true)]
async fn w11_a_terminal_frees_only_the_place_of_its_own_connection() {
    // FEN-1, LEA-4
    let edge = edge();
    let mut first = Node::connect(&edge, "n1").await;
    let mut second = Node::connect(&edge, "n2").await;
    let (mut mine, run) = started(&edge, &mut first, "only-a").await;
    let (other, other_run) = started(&edge, &mut second, "any").await;
    assert_eq!(run, other_run, "numbers belong to their connection");
    second.event(other_run, 1, RunEventKind::Complete(FinishReason::Stop));
    settle().await;
    assert_eq!((in_use(&edge, "a").normal, in_use(&edge, "c").normal), (1, 0));
    drop(other);
    first.event(run, 1, RunEventKind::Complete(FinishReason::Stop));
    mine.next().await;
    assert_at_rest(&edge);
}

#[tokio::test(start_paused = true)]
async fn w16_a_pong_nobody_asked_for_is_ignored() {
    // WIR-12
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    for nonce in [0, 1, u64::MAX] {
        node.send(ToEdge::Pong(Pong { nonce, edge_time_ms: 0 }));
    }
    works(&edge, &mut node).await;
}

#[tokio::test(start_paused = true)]
async fn w17_a_malformed_message_ends_the_session_and_one_of_a_run_only_the_run() {
    // WIR-3, WIR-15
    session_ends(CloseCode::ProtocolViolation, Violation::Malformed, async |node, _| {
        node.send_item(Err(LinkError::Malformed("no body")));
    })
    .await;
    run_ends(Violation::Malformed, false, |node, run| node.malformed(run)).await;
    session_ends(CloseCode::ProtocolViolation, Violation::UnknownRun, async |node, _| {
        node.malformed(RunNumber(9));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn pings_are_answered_and_a_flood_of_them_ends_the_session() {
    // WIR-9, WIR-12
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    node.send(ToEdge::Ping(iop_wire::Ping { nonce: 7 }));
    let ToNode::Pong(pong) = node.recv().await else { panic!("no pong") };
    assert!(pong.nonce == 7 && pong.edge_time_ms > 0);
    for nonce in 8..9 + iop_wire::limits::CONTROL_QUEUE as u64 {
        node.send(ToEdge::Ping(iop_wire::Ping { nonce }));
    }
    settle().await;
    while node.try_recv().await.is_some() {}
    assert!(!provider(&edge, "a").connected);
    node.cut().await;
    assert!(edge.snapshot().is_at_rest());
}
