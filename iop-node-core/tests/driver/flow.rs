use std::time::Duration;

use bytes::Bytes;
use iop_execution::testkit::{Script, ScriptHandle, ScriptedCall, ScriptedProvider};
use iop_execution::{CancelReason, RunEventKind};
use iop_wire::*;

use crate::support::*;

/// A run that says 400 × 1 KiB under a window of 16 KiB, stopped by it.
async fn blocked() -> (Harness, Conn, ScriptHandle) {
    let script = (0..400).fold(Script::new(), |script, _| script.delta("x".repeat(1024)));
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(script).then(Script::text("short")));
    let mut conn = node.ready_with(ProviderConfig { capacity: 2, ..config() }).await;
    conn.send_run(DispatchHead { window: limits::MIN_WINDOW, ..head(1) });
    conn.expect_accepted(1).await;
    (node, conn, calls)
}

/// Text bytes of run 1 that come before it is silent.
async fn take_until_silent(conn: &mut Conn) -> (usize, bool) {
    let mut bytes = 0;
    loop {
        let next = tokio::time::timeout(Duration::from_secs(1), conn.try_next()).await;
        match next {
            Err(_) => return (bytes, false),
            Ok(Some(ToEdge::Event(RunNumber(1), event))) => {
                bytes += event.kind.payload_bytes();
                if event.kind.is_terminal() {
                    return (bytes, true);
                }
            }
            Ok(other) => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn without_credit_the_provider_is_not_read_and_with_credit_it_goes_on() {
    // WIR-16, WIR-7
    let (_node, mut conn, calls) = blocked().await;
    let (mut total, ended) = take_until_silent(&mut conn).await;
    assert!(!ended && total <= limits::MIN_WINDOW as usize, "{total}");
    assert!(total > limits::MIN_WINDOW as usize / 2);
    assert_eq!(calls.counts().active, 1);
    // A day without credit ends nothing: the Edge bounds its slow client itself.
    assert!(conn.is_silent(Duration::from_secs(86_400)).await);
    assert_eq!(calls.counts().active, 1);
    let mut granted = limits::MIN_WINDOW as usize;
    loop {
        conn.send(credit(1, 8 * 1024));
        granted += 8 * 1024;
        let (bytes, ended) = take_until_silent(&mut conn).await;
        total += bytes;
        assert!(total <= granted, "{total} of {granted}");
        if ended {
            break;
        }
    }
    assert_eq!(total, 400 * 1024);
}

#[tokio::test(start_paused = true)]
async fn a_blocked_run_can_be_cancelled_and_costs_nobody_else() {
    // WIR-16, WIR-7
    let (_node, mut conn, calls) = blocked().await;
    take_until_silent(&mut conn).await;
    conn.run(2).await;
    assert_eq!(conn.rest(2).await.len(), 3, "another run is not affected");
    conn.send(ToNode::Cancel(RunNumber(1), CancelReason::SlowClient));
    assert_eq!(conn.rest(1).await.pop(), Some(RunEventKind::Cancelled(CancelReason::SlowClient)));
    assert_eq!(calls.counts().active, 0);
}

#[tokio::test(start_paused = true)]
async fn a_run_with_no_credit_at_all_can_be_cancelled_and_reach_its_deadline() {
    // WIR-16, EXE-10
    for deadline_ms in [0, 2_000] {
        let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x").hang()));
        let mut conn = node.ready().await;
        conn.send_run(DispatchHead { window: 0, deadline_ms, ..head(1) });
        conn.expect_accepted(1).await;
        assert!(conn.is_silent(Duration::from_secs(1)).await);
        if deadline_ms == 0 {
            conn.send(cancel(1));
            assert_eq!(conn.rest(1).await, [RunEventKind::Cancelled(CancelReason::Client)]);
        } else {
            assert_eq!(conn.failure(1).await.code, iop_execution::FailureCode::DeadlineExceeded);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn output_that_waits_for_credit_after_the_provider_is_done_can_still_be_cancelled() {
    // WIR-16, LEA-6
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x".repeat(16 * 1024))));
    let mut conn = node.ready().await;
    conn.send_run(DispatchHead { window: limits::MIN_WINDOW, ..head(1) });
    conn.expect_accepted(1).await;
    let (_, ended) = take_until_silent(&mut conn).await;
    assert!(!ended && calls.counts().returned == 1, "a success never overtakes output");
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await.pop(), Some(RunEventKind::Cancelled(CancelReason::Client)));
}

#[tokio::test(start_paused = true)]
async fn more_credit_than_a_run_may_have_ends_the_connection() {
    // W8
    let messages: [fn(&mut Conn); 2] = [
        |conn| conn.send(credit(1, limits::MAX_WINDOW)),
        |conn| conn.send(ToNode::Run(RunDispatch { head: DispatchHead { window: limits::MAX_WINDOW + 1, ..head(2) } })),
    ];
    for send in messages {
        let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::new().hang()));
        let mut conn = node.ready().await;
        conn.run(1).await;
        send(&mut conn);
        conn.expect_goodbye(CloseCode::FlowControl).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_beyond_its_credit_ends_the_connection() {
    // W8, WIR-7
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::new().hang()).with_tunnels());
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    // Sent at once, before anything could be consumed: 9 × 16 KiB against a window of 128 KiB.
    conn.send(tunnel(1, 1 << 20));
    for _ in 0..9 {
        conn.send(chunk(1, vec![b'x'; limits::MAX_CHUNK], false));
    }
    conn.expect_goodbye(CloseCode::FlowControl).await;
}

#[tokio::test(start_paused = true)]
async fn credit_for_a_body_returns_as_it_is_consumed_and_not_after_its_end() {
    // WIR-7
    for as_tunnel in [true, false] {
        let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")).with_tunnels());
        let mut conn = node.ready().await;
        let pad = "x".repeat(600 * 1024);
        let body = Bytes::from(format!("{{\"messages\":[],\"pad\":\"{pad}\"}}"));
        let len = body.len() as u64;
        conn.send(if as_tunnel {
            tunnel(1, len)
        } else {
            ToNode::Run(RunDispatch { head: DispatchHead { body_len: len, ..head(1) } })
        });
        conn.expect_accepted(1).await;
        let (mut sent, mut may) = (0, limits::INITIAL_WINDOW as usize);
        let mut granted = 0_usize;
        while sent < body.len() {
            let size = limits::MAX_CHUNK.min(body.len() - sent);
            if may < size {
                match conn.next().await {
                    ToEdge::Credit(RunNumber(1), bytes) => {
                        may += bytes as usize;
                        granted += bytes as usize;
                    }
                    other => panic!("{other:?}"),
                }
                continue;
            }
            may -= size;
            sent += size;
            conn.send(chunk(1, body.slice(sent - size..sent), sent == body.len()));
        }
        let mut messages = Vec::new();
        while !matches!(messages.last(), Some(ToEdge::Frame(_, _, iop_execution::TunnelFrame::End)))
            && !matches!(messages.last(), Some(ToEdge::Event(_, event)) if event.kind.is_terminal())
        {
            let message = conn.next().await;
            if let ToEdge::Credit(_, bytes) = message {
                granted += bytes as usize;
            }
            messages.push(message);
        }
        assert!(granted < body.len() && granted + limits::INITIAL_WINDOW as usize >= body.len());
        match &calls.calls()[0] {
            ScriptedCall::Tunnel { body: got, .. } => assert_eq!(got, &body),
            call => assert_eq!(call.body(), &body),
        }
    }
}
