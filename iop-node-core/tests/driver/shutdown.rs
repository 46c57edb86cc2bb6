use std::sync::Arc;
use std::time::Duration;

use iop_execution::testkit::{Logged, Script, ScriptedProvider, alone};
use iop_execution::{CancelReason, FailureCode, RunEventKind};
use iop_node_core::ServeEnd;
use iop_wire::*;
use tokio::time::Instant;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_shutdown_finishes_what_runs_refuses_what_is_new_then_says_goodbye() {
    // NOD-8, BIN-5
    let script = Script::text("a").wait(Duration::from_secs(20)).delta("b");
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(script));
    let mut conn = node.ready().await;
    conn.run(1).await;
    assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
    node.shutdown.cancel();
    let mut drained = None;
    while drained.is_none() {
        if let ToEdge::Drain(drain) = conn.next().await {
            drained = Some(drain);
        }
    }
    assert_eq!(drained, Some(Drain { deadline_ms: 30_000, returning: false }));
    conn.run(2).await;
    assert_eq!(conn.failure(2).await.code, FailureCode::Draining);
    assert!(matches!(conn.rest(1).await.pop(), Some(RunEventKind::Complete(_))), "what ran finished");
    conn.expect_goodbye(CloseCode::Drained).await;
    drop(conn);
    assert_eq!(node.end().await, Ok(ServeEnd::Drained));
    assert_eq!((calls.counts().stops, calls.counts().calls), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_drain_takes_as_long_as_the_work_and_no_longer_than_the_grace() {
    // NOD-8; field report 81: min(grace, what runs)
    for (grace, work, takes, end) in [
        (620, 90, 90, ServeEnd::Drained),
        (620, 0, 0, ServeEnd::Drained),
        (60, 90, 60, ServeEnd::Cancelled),
        (0, 90, 0, ServeEnd::Cancelled),
    ] {
        let (provider, _) = ScriptedProvider::new(Script::text("a").wait(Duration::from_secs(work))).into_parts();
        let mut node = Harness::with(|node| node.provider("a", provider).drain_grace(Duration::from_secs(grace)));
        let mut conn = node.ready().await;
        conn.run(1).await;
        assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
        settle().await;
        let began = Instant::now();
        node.shutdown.cancel();
        let last = conn.rest(1).await.pop();
        assert_eq!(matches!(last, Some(RunEventKind::Complete(_))), end == ServeEnd::Drained, "{last:?}");
        assert_eq!(began.elapsed(), Duration::from_secs(takes));
        let code = if end == ServeEnd::Drained { CloseCode::Drained } else { CloseCode::Shutdown };
        conn.expect_goodbye(code).await;
        drop(conn);
        assert_eq!(node.end().await, Ok(end));
        assert!(began.elapsed() <= Duration::from_secs(takes) + Duration::from_millis(500), "{:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn what_still_runs_after_the_grace_is_cancelled_and_told_so() {
    // NOD-8
    let (mut node, calls) =
        Harness::scripted(ScriptedProvider::new(Script::text("a").hang()).then(Script::new().ignore_cancel()));
    let mut conn = node.ready().await;
    conn.run(1).await;
    assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
    assert!(matches!(conn.event(1).await.kind, RunEventKind::Delta(_)));
    conn.run(2).await;
    assert_eq!(conn.event(2).await.kind, RunEventKind::Start);
    let began = Instant::now();
    node.shutdown.cancel();
    assert!(matches!(conn.next().await, ToEdge::Drain(_)));
    assert_eq!(conn.rest(1).await, [RunEventKind::Cancelled(CancelReason::Drain)]);
    assert_eq!(began.elapsed(), Duration::from_secs(30));
    assert_eq!(conn.rest(2).await, [RunEventKind::Cancelled(CancelReason::Drain)]);
    assert_eq!(began.elapsed(), Duration::from_secs(35), "and its close grace");
    conn.expect_goodbye(CloseCode::Shutdown).await;
    drop(conn);
    assert_eq!(node.end().await, Ok(ServeEnd::Cancelled));
    assert_eq!(calls.counts().active, 0);
}

#[tokio::test(start_paused = true)]
async fn an_edge_that_reads_nothing_can_not_hold_up_a_shutdown() {
    // BIN-5
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x".repeat(200_000))));
    let mut conn = node.ready().await;
    conn.run(1).await;
    settle().await;
    let began = Instant::now();
    node.shutdown.cancel();
    let record = Arc::clone(&node.record);
    let end = node.end().await;
    assert_eq!(end, Ok(ServeEnd::Cancelled));
    assert!(began.elapsed() <= Duration::from_secs(37), "{:?}", began.elapsed());
    assert!(record.lines().iter().any(|line| line.starts_with("closed")));
    drop(conn);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_before_ready_ends_at_once() {
    // NOD-8
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.accept().await;
    conn.hello().await;
    node.shutdown.cancel();
    conn.expect_goodbye(CloseCode::Drained).await;
    drop(conn);
    assert_eq!(node.end().await, Ok(ServeEnd::Drained));
}

#[tokio::test(start_paused = true)]
async fn no_token_prompt_output_or_query_is_ever_logged() {
    // CRD-9
    if !alone("shutdown::no_token_prompt_output_or_query_is_ever_logged").unwrap() {
        return;
    }
    let (log, _guard) = Logged::begin();
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("SENTINEL-OUTPUT")).with_tunnels());
    let mut conn = node.accept().await;
    let refused = ProviderConfig {
        base_url: "http://127.0.0.1/?key=SENTINEL-URL".into(),
        auth: "env:SENTINEL-AUTH".into(),
        provider_id: iop_execution::ProviderId::new("q").unwrap(),
        adapter: iop_execution::AdapterKey::new("b").unwrap(),
        ..config()
    };
    conn.register(vec![config(), refused]).await;
    conn.get_ready().await;
    conn.run(1).await;
    conn.rest(1).await;
    conn.send(tunnel(2, 15));
    conn.send(chunk(2, "SENTINEL-PROMPT", true));
    conn.expect_accepted(2).await;
    while !conn.frame(2).await.is_terminal() {}
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 2, ..head(3) } }));
    conn.send(chunk(3, "SENTINEL", true));
    conn.expect_accepted(3).await;
    conn.failure(3).await;
    node.shutdown.cancel();
    conn.expect_goodbye(CloseCode::Drained).await;
    drop(conn);
    node.end().await.unwrap();
    let text = log.text();
    assert!(text.contains("provider left out") && text.contains("node_id=node"), "{text}");
    assert!(!text.contains("SENTINEL"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_goodbye_waits_for_the_last_output_and_goes_as_soon_as_that_is_read() {
    // NOD-8, WIR-9
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    conn.send_run(head(1));
    calls.wait_for(|counts| counts.returned == 1).await;
    settle().await;
    let began = Instant::now();
    node.shutdown.cancel();
    tokio::time::sleep(Duration::from_millis(300)).await;
    conn.expect_accepted(1).await;
    assert!(matches!(conn.rest(1).await.pop(), Some(RunEventKind::Complete(_))));
    conn.expect_goodbye(CloseCode::Drained).await;
    assert_eq!(began.elapsed(), Duration::from_millis(300));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_on_its_way_when_the_drain_began_is_refused_before_the_goodbye() {
    // NOD-8: `draining`, not a disconnect of which nobody knows whether it ran
    let (mut node, _calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    settle().await;
    node.shutdown.cancel();
    while !matches!(conn.next().await, ToEdge::Drain(_)) {}
    tokio::time::sleep(Duration::from_millis(100)).await;
    conn.run(1).await;
    assert_eq!(conn.failure(1).await.code, FailureCode::Draining);
    conn.expect_goodbye(CloseCode::Drained).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_is_made_anew_in_a_quiet_moment_and_else_in_time() {
    // CRD-10, NOD-1
    let script = Script::text("a").wait(Duration::from_secs(200)).delta("b");
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(script));
    let check = node.check.clone();
    let mut conn = node.ready().await;
    let began = Instant::now();
    assert!(check.renew(Duration::from_secs(600)));
    assert_eq!(conn.next().await, ToEdge::Drain(Drain { deadline_ms: 300_000, returning: true }));
    conn.expect_goodbye(CloseCode::Restart).await;
    drop(conn);
    let mut conn = node.ready().await;
    assert!(
        began.elapsed() < Duration::from_millis(500),
        "{:?}: nothing ran, and nothing is waited for",
        began.elapsed()
    );

    // What runs may finish first, in the time there is.
    conn.run(1).await;
    let began = Instant::now();
    assert!(check.renew(Duration::MAX));
    assert!(matches!(conn.rest(1).await.pop(), Some(RunEventKind::Complete(_))));
    assert_eq!(began.elapsed(), Duration::from_secs(200));
    assert!(matches!(conn.next().await, ToEdge::Drain(Drain { returning: true, .. })));
    conn.expect_goodbye(CloseCode::Restart).await;
    drop(conn);

    // There is too little: nothing new, and what runs has its grace.
    let mut conn = node.ready().await;
    conn.run(2).await;
    assert_eq!(conn.event(2).await.kind, RunEventKind::Start);
    let began = Instant::now();
    assert!(check.renew(Duration::from_secs(40)));
    while !matches!(conn.next().await, ToEdge::Drain(_)) {}
    assert!((20..=40).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    conn.run(3).await;
    assert_eq!(conn.failure(3).await.code, FailureCode::Draining);
    // A shutdown meanwhile is one.
    node.shutdown.cancel();
    assert_eq!(conn.rest(2).await.pop(), Some(RunEventKind::Cancelled(CancelReason::Drain)));
    conn.expect_goodbye(CloseCode::Shutdown).await;
    drop(conn);
    assert_eq!(node.end().await, Ok(ServeEnd::Cancelled));
}
