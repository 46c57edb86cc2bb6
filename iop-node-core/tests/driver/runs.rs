use bytes::Bytes;
use http::{StatusCode, header::CONTENT_TYPE};
use iop_execution::testkit::{Script, ScriptedCall, ScriptedProvider};
use iop_execution::{
    FailureCode, FinishReason, FrameFlags, ProviderContacted, ProviderError, Redacted, RunEventKind, Target,
    TunnelFrame,
};
use iop_wire::*;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_run_is_receipted_then_told_in_order_then_ended_once() {
    // WIR-14, WIR-6, NOD-6
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("hello").delta(" there")));
    let mut conn = node.ready().await;
    conn.run(1).await;
    let mut numbers = Vec::new();
    let mut text = String::new();
    loop {
        let event = conn.event(1).await;
        numbers.push(event.seq);
        match event.kind {
            RunEventKind::Delta(more) => text.push_str(&more),
            RunEventKind::Complete(reason) => {
                assert_eq!(reason, FinishReason::Stop);
                break;
            }
            RunEventKind::Start => assert_eq!(event.seq, 1),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(text, "hello there");
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    assert!(conn.is_silent(std::time::Duration::from_secs(3600)).await, "nothing follows the terminal");
    let ScriptedCall::Run(request) = &calls.calls()[0] else { panic!() };
    assert_eq!(request.input.raw(), &chat());
    assert_eq!((request.target.as_str(), request.stall_timeout.get().as_secs()), ("t", 300));
    assert_eq!(node.record.lines()[2..], ["started run", "ended run Completed"]);
}

#[tokio::test(start_paused = true)]
async fn the_receipt_comes_before_body_capacity_and_provider() {
    // WIR-14
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::new().hang()));
    let mut conn = node.ready().await;
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 100, ..head(1) } }));
    conn.expect_accepted(1).await;
    assert_eq!(calls.counts().calls, 0, "the body is not here");
    conn.run(2).await;
    conn.run(3).await;
    assert_eq!(conn.event(2).await.kind, RunEventKind::Start);
    assert_eq!(conn.failure(3).await.code, FailureCode::Busy);
}

#[tokio::test(start_paused = true)]
async fn a_body_in_pieces_arrives_whole() {
    // WIR-8, EXE-16
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    let body = chat();
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: body.len() as u64, ..head(1) } }));
    for at in (0..body.len()).step_by(7) {
        conn.send(chunk(1, body.slice(at..body.len().min(at + 7)), false));
    }
    conn.send(chunk(1, Bytes::new(), true));
    conn.expect_accepted(1).await;
    assert_eq!(conn.rest(1).await.len(), 3);
    assert_eq!(calls.calls()[0].body(), &body);
}

#[tokio::test(start_paused = true)]
async fn each_refusal_is_typed_and_leaves_no_trace() {
    // NOD-3, EXE-13, W15
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn =
        node.ready_with(ProviderConfig { targets: vec![Target::new("t").unwrap()], capacity: 1, ..config() }).await;
    fn lease(head: &mut DispatchHead) {
        head.credential_lease = Redacted::new(Bytes::from_static(b"lease"));
        head.credential_scope = Some(Box::new(CredentialScope {
            principal: iop_execution::Principal::new("p").unwrap(),
            route: "r".into(),
            slot: "s".into(),
            profile: "b".into(),
        }));
    }
    type Fault = (fn(&mut DispatchHead), FailureCode);
    let faults: [Fault; 6] = [
        (|head| head.response_stall_timeout_ms = 3_600_001, FailureCode::InvalidRequest),
        (|head| head.deadline_ms = u64::MAX, FailureCode::InvalidRequest),
        (|head| head.body_len = 33 << 20, FailureCode::InvalidRequest),
        (|head| head.adapter = iop_execution::AdapterKey::new("custom").unwrap(), FailureCode::UnknownAdapter),
        (|head| head.target = Target::new("u").unwrap(), FailureCode::UnknownTarget),
        (lease, FailureCode::CredentialRejected),
    ];
    let mut number = 0;
    for (break_it, code) in faults {
        for tunnel in [false, true] {
            number += 1;
            let mut head = head(number);
            break_it(&mut head);
            conn.send(match tunnel {
                false => ToNode::Run(RunDispatch { head }),
                true => ToNode::Tunnel(TunnelDispatch {
                    head,
                    method: http::Method::POST,
                    path: Redacted::new("/".into()),
                    headers: Redacted::default(),
                }),
            });
            conn.send(chunk(number, "late", false));
            conn.expect_accepted(number).await;
            let failure = match conn.next().await {
                ToEdge::Event(_, event) if !tunnel => match event.kind {
                    RunEventKind::Error(failure) => failure,
                    other => panic!("{other:?}"),
                },
                ToEdge::Frame(_, 1, TunnelFrame::Failed(failure)) if tunnel => failure,
                other => panic!("{other:?}"),
            };
            assert_eq!((failure.code, failure.provider_contacted), (code, ProviderContacted::No));
        }
    }
    assert_eq!(calls.counts().calls, 0);
    conn.run(number + 1).await;
    assert_eq!(conn.rest(number + 1).await.len(), 3, "the one place is free");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_no_chat_object_is_an_invalid_request_and_frees_the_place() {
    // NOD-3, EXE-16
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    for (number, body) in [(1, "{\"messages\":\"SENTINEL\"}"), (2, "SENTINEL"), (3, "")] {
        conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: body.len() as u64, ..head(number) } }));
        conn.send(chunk(number, body, true));
        conn.expect_accepted(number).await;
        let failure = conn.failure(number).await;
        assert_eq!((failure.code, failure.provider_contacted), (FailureCode::InvalidRequest, ProviderContacted::No));
        assert!(!failure.to_string().contains("SENTINEL"), "{failure}");
    }
    assert_eq!(calls.counts().calls, 0);
}

#[tokio::test(start_paused = true)]
async fn a_failing_and_a_panicking_provider_end_as_failures_and_free_their_place() {
    // EXE-6, NOD-4
    let provider = ScriptedProvider::new(Script::text("x").fail(ProviderError::rejected(503, None)))
        .then(Script::text("x").panic())
        .then(Script::text("x"));
    let (mut node, _) = Harness::scripted(provider);
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    conn.run(1).await;
    let failure = conn.failure(1).await;
    assert_eq!((failure.code, failure.upstream_status), (FailureCode::ProviderRejected, Some(503)));
    conn.run(2).await;
    assert_eq!(conn.failure(2).await.code, FailureCode::Internal);
    conn.run(3).await;
    assert_eq!(conn.rest(3).await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_carries_head_body_and_end_and_the_request_as_it_came() {
    // WIR-6, EXE-12
    let script = Script::new()
        .head(StatusCode::OK, "text/event-stream")
        .frame("data: a\n\n", FrameFlags::CONTENT.with(FrameFlags::PROGRESS))
        .frame("data: [DONE]\n\n", FrameFlags::TERMINAL);
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(script).with_tunnels());
    let mut conn = node.ready().await;
    conn.send(tunnel(1, 6));
    conn.send(chunk(1, "abc", false));
    conn.send(chunk(1, "def", true));
    conn.expect_accepted(1).await;
    let TunnelFrame::Head(answer) = conn.frame(1).await else { panic!() };
    assert_eq!((answer.status, &answer.headers[CONTENT_TYPE]), (StatusCode::OK, &"text/event-stream".parse().unwrap()));
    let want = TunnelFrame::Body { bytes: "data: a\n\n".into(), flags: FrameFlags::CONTENT };
    assert_eq!(conn.frame(1).await, want);
    let want = TunnelFrame::Body { bytes: "data: [DONE]\n\n".into(), flags: FrameFlags::TERMINAL };
    assert_eq!(conn.frame(1).await, want);
    assert_eq!(conn.frame(1).await, TunnelFrame::End);
    let ScriptedCall::Tunnel { line, body, .. } = &calls.calls()[0] else { panic!() };
    assert_eq!((line.as_str(), &body[..]), ("POST /v1/chat/completions", &b"abcdef"[..]));
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_on_an_adapter_without_tunnels_is_unsupported() {
    // EXE-1
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    conn.send(tunnel(1, 0));
    conn.expect_accepted(1).await;
    let TunnelFrame::Failed(failure) = conn.frame(1).await else { panic!() };
    assert_eq!(failure.code, FailureCode::Unsupported);
}

#[tokio::test(start_paused = true)]
async fn a_body_of_another_length_than_announced_fails_its_run_alone() {
    // W17, WIR-15
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::new().hang()).with_tunnels());
    let mut conn = node.ready().await;
    conn.run(1).await;
    assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
    conn.send(tunnel(2, 10));
    conn.send(chunk(2, "four", true));
    conn.send(chunk(2, "more", true));
    conn.expect_accepted(2).await;
    let TunnelFrame::Failed(failure) = conn.frame(2).await else { panic!() };
    assert_eq!(failure.code, FailureCode::Internal);
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 3, ..head(3) } }));
    conn.send(chunk(3, "toolong", false));
    conn.expect_accepted(3).await;
    assert_eq!(conn.failure(3).await.code, FailureCode::Internal);
    assert_eq!(calls.counts().active, 1, "the first run goes on");
}

#[tokio::test(start_paused = true)]
async fn a_number_that_does_not_rise_ends_the_connection_and_every_run() {
    // W9
    for reused in [1, 0] {
        let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::new().hang()));
        let mut conn = node.ready().await;
        conn.run(1).await;
        assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
        conn.send(ToNode::Run(RunDispatch { head: head(reused) }));
        conn.expect_goodbye(CloseCode::ProtocolViolation).await;
        drop(conn);
        node.accept().await;
        assert_eq!(calls.counts().active, 0);
        assert!(node.record.lines().contains(&"ended run Abandoned".to_owned()));
    }
}

#[tokio::test(start_paused = true)]
async fn messages_for_ended_runs_are_dropped_and_counted_and_for_unknown_ones_end_the_connection() {
    // W4, WIR-11
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    conn.run(2).await;
    assert_eq!(conn.rest(2).await.len(), 3);
    settle().await;
    for number in [1, 2] {
        conn.send(cancel(number));
        conn.send(credit(number, 1));
        conn.send(chunk(number, "x", true));
    }
    conn.run(3).await;
    assert_eq!(conn.rest(3).await.len(), 3, "the session lives");
    conn.send(cancel(4));
    conn.expect_goodbye(CloseCode::ProtocolViolation).await;
    drop(conn);
    for message in [credit(1, 1), chunk(1, "x", true), cancel(0)] {
        let mut conn = node.ready().await;
        conn.send(message);
        conn.expect_goodbye(CloseCode::ProtocolViolation).await;
    }
    let lines = node.record.lines();
    assert_eq!(lines.iter().filter(|line| line.starts_with("late")).collect::<Vec<_>>(), ["late 6"]);
}

#[tokio::test(start_paused = true)]
async fn what_a_provider_sends_at_once_is_cut_to_what_the_wire_takes() {
    // WIR-8
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("é".repeat(30_000))));
    let mut conn = node.ready().await;
    conn.run(1).await;
    let events = conn.rest(1).await;
    let mut text = String::new();
    for event in &events {
        if let RunEventKind::Delta(more) = event {
            assert!(more.len() <= limits::MAX_DELTA);
            text.push_str(more);
        }
    }
    assert_eq!(text, "é".repeat(30_000));
}

#[tokio::test(start_paused = true)]
async fn one_dispatch_is_one_provider_call() {
    // NOD-10
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::new().fail(ProviderError::unreachable())));
    let mut conn = node.ready().await;
    for number in 1..=5 {
        conn.run(number).await;
        assert_eq!(conn.failure(number).await.code, FailureCode::ProviderUnreachable);
        assert_eq!(calls.counts().calls, number);
    }
}

#[tokio::test(start_paused = true)]
async fn everything_a_node_says_and_hears_survives_encoding() {
    // WIR-4, WIR-1
    let script = Script::text("é".repeat(5000))
        .reasoning("why")
        .usage(iop_execution::Usage { output_tokens: Some(3), ..Default::default() });
    let provider = ScriptedProvider::new(script.clone())
        .then(script.clone())
        .then(Script::text("x").fail(ProviderError::rejected(429, None)))
        .then(Script::new().hang());
    let (mut node, calls) = Harness::encoded(provider.with_tunnels());
    let mut conn = node.ready().await;
    conn.run(1).await;
    assert!(matches!(conn.rest(1).await.pop(), Some(RunEventKind::Complete(_))));
    conn.send(tunnel(2, 4));
    conn.send(chunk(2, "body", true));
    conn.expect_accepted(2).await;
    let mut frames = vec![conn.frame(2).await];
    while !frames.last().is_some_and(TunnelFrame::is_terminal) {
        frames.push(conn.frame(2).await);
    }
    assert!(matches!((&frames[0], frames.last()), (TunnelFrame::Head(_), Some(TunnelFrame::End))));
    conn.run(3).await;
    assert_eq!(conn.failure(3).await.upstream_status, Some(429));
    conn.run(4).await;
    calls.wait_for(|counts| counts.active == 1).await;
    conn.send(cancel(4));
    assert_eq!(conn.rest(4).await.pop(), Some(RunEventKind::Cancelled(iop_execution::CancelReason::Client)));
    node.shutdown.cancel();
    conn.expect_goodbye(CloseCode::Drained).await;
    drop(conn);
    assert_eq!(node.end().await, Ok(iop_node_core::ServeEnd::Drained));
}

#[tokio::test(start_paused = true)]
async fn a_flood_never_shows_the_engine_more_calls_than_it_has_places() {
    // NOD-4, LEA-5; field report 47: 8 requests on 4 slots
    let script = Script::text("x").pause();
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(script).with_tunnels());
    let mut conn = node.ready_with(ProviderConfig { capacity: 4, ..config() }).await;
    let mut number = 0;
    for round in 0..50 {
        let (mut running, mut busy) = (Vec::new(), 0);
        for at in 0..8 {
            number += 1;
            if at % 2 == 0 {
                conn.send_run(head(number));
            } else {
                conn.send(tunnel(number, 4));
                conn.send(chunk(number, "body", true));
            }
            conn.expect_accepted(number).await;
            settle().await;
            if at < 4 { running.push(number) } else { busy += 1 }
        }
        assert_eq!((running.len(), busy), (4, 4));
        assert_eq!(calls.counts().active, 4, "round {round}");
        // Half of them are cancelled, half end well: each gives its place back.
        for number in running {
            if number % 2 == 0 { conn.send(cancel(number)) } else { calls.release() }
        }
        calls.wait_for(|counts| counts.active == 0).await;
    }
    assert_eq!((calls.counts().max_active, calls.counts().calls), (4, 200));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_fails_or_panics_on_its_cancel_gives_its_place_back() {
    // NOD-4; field report 39: a place does not depend on how the close went
    let failing = [Script::text("x").pause().fail(ProviderError::unreachable()), Script::text("x").pause().panic()];
    for script in failing {
        let (mut node, calls) = Harness::scripted(ScriptedProvider::new(script).then(Script::text("next")));
        let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
        conn.run(1).await;
        assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
        settle().await;
        // The pause ends and the cancel comes in the same moment.
        calls.release();
        conn.send(cancel(1));
        while !conn.event(1).await.kind.is_terminal() {}
        conn.run(2).await;
        assert_eq!(conn.rest(2).await.len(), 3);
        assert_eq!(calls.counts().active, 0);
    }
}
