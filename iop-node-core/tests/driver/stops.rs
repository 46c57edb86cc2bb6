use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use iop_execution::testkit::{Script, ScriptHandle, ScriptedProvider};
use iop_execution::{
    CancelReason, Capabilities, Completion, EventSink, FailureCode, FailureStage, HeadSink, Provider,
    ProviderContacted, ProviderError, RunEventKind, RunRequest, TunnelEnd, TunnelFrame, TunnelRequest,
};
use iop_wire::*;
use tokio::time::Instant;

use crate::support::*;

const CANCELLED: RunEventKind = RunEventKind::Cancelled(CancelReason::Client);

async fn one_place(script: Script) -> (Harness, Conn, ScriptHandle) {
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(script).then(Script::text("next")).with_tunnels());
    let conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    (node, conn, calls)
}

/// The place is free and the Node as good as new.
async fn place_is_free(conn: &mut Conn, number: u64) {
    conn.run(number).await;
    assert_eq!(conn.rest(number).await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn cancel_while_the_body_is_still_coming() {
    // EXE-4
    let (_node, mut conn, calls) = one_place(Script::text("x")).await;
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 100, ..head(1) } }));
    conn.expect_accepted(1).await;
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
    assert_eq!(calls.counts().calls, 0);
    place_is_free(&mut conn, 2).await;
}

#[tokio::test(start_paused = true)]
async fn cancel_in_prefill_and_while_streaming() {
    // EXE-4, WIR-6
    for script in [Script::new().hang(), Script::text("some").hang()] {
        let (_node, mut conn, calls) = one_place(script).await;
        conn.run(1).await;
        assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
        settle().await;
        conn.send(cancel(1));
        conn.send(cancel(1));
        let began = Instant::now();
        assert_eq!(conn.rest(1).await.pop(), Some(CANCELLED));
        assert_eq!(began.elapsed(), Duration::ZERO, "a provider that listens ends at once");
        assert_eq!((calls.counts().returned, calls.counts().dropped), (1, 0));
        place_is_free(&mut conn, 2).await;
    }
}

#[tokio::test(start_paused = true)]
async fn cancel_of_a_tunnel_before_and_after_its_head() {
    // EXE-4, WIR-6
    for script in [Script::new().hang(), Script::text("some").hang()] {
        let (_node, mut conn, calls) = one_place(script).await;
        conn.send(tunnel(1, 4));
        conn.send(chunk(1, "body", true));
        conn.expect_accepted(1).await;
        calls.wait_for(|counts| counts.active == 1).await;
        conn.send(ToNode::Cancel(RunNumber(1), CancelReason::SlowClient));
        let mut last = conn.frame(1).await;
        while !last.is_terminal() {
            last = conn.frame(1).await;
        }
        assert_eq!(last, TunnelFrame::Cancelled(CancelReason::SlowClient));
        place_is_free(&mut conn, 2).await;
    }
}

/// Waits for the request body and for nothing else.
#[derive(Debug)]
struct Uploads;

#[async_trait]
impl Provider for Uploads {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only().with_tunnels()
    }
    async fn execute(&self, _: RunRequest, _: &mut EventSink) -> Result<Completion, ProviderError> {
        Err(ProviderError::unsupported("tunnels only"))
    }
    async fn tunnel(&self, mut request: TunnelRequest, _: HeadSink) -> Result<TunnelEnd, ProviderError> {
        while let Some(chunk) = request.body.next().await {
            chunk.map_err(|_| ProviderError::invalid_request("the body broke off"))?;
        }
        Err(ProviderError::unsupported("enough"))
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_breaks_off_the_body_so_that_a_provider_that_waits_for_it_returns_at_once() {
    // EXE-4, NOD-4
    let mut node = Harness::new(std::sync::Arc::new(Uploads));
    let mut conn = node.ready().await;
    let began = Instant::now();
    for (number, stop) in [(1, cancel(1)), (2, chunk(2, "too short", true))] {
        conn.send(tunnel(number, 100));
        conn.expect_accepted(number).await;
        settle().await;
        conn.send(stop);
        assert!(conn.frame(number).await.is_terminal());
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn cancel_of_a_tunnel_whose_body_never_comes() {
    // EXE-4
    let (_node, mut conn, _) = one_place(Script::text("x")).await;
    conn.send(tunnel(1, 4));
    conn.expect_accepted(1).await;
    settle().await;
    conn.send(cancel(1));
    let began = Instant::now();
    assert_eq!(conn.frame(1).await, TunnelFrame::Cancelled(CancelReason::Client));
    assert!(began.elapsed() <= Duration::from_secs(5));
    place_is_free(&mut conn, 2).await;
}

#[tokio::test(start_paused = true)]
async fn the_place_is_free_when_the_provider_has_returned_and_not_before() {
    // NOD-4, LEA-6
    let (_node, mut conn, calls) = one_place(Script::text("x").hang_then_linger(Duration::from_secs(3))).await;
    conn.run(1).await;
    assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
    settle().await;
    let began = Instant::now();
    conn.send(cancel(1));
    conn.run(2).await;
    assert_eq!(conn.failure(2).await.code, FailureCode::Busy, "the provider has not returned");
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert_eq!(conn.rest(1).await.pop(), Some(CANCELLED));
    assert_eq!(began.elapsed(), Duration::from_secs(3));
    assert_eq!(calls.counts().active, 0);
    place_is_free(&mut conn, 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_does_not_return_is_dropped_after_the_close_grace() {
    // NOD-4, EXE-4, WDG-3
    for (configured, grace) in [(0, 5_000), (700, 700)] {
        let (mut node, calls) =
            Harness::scripted(ScriptedProvider::new(Script::new().ignore_cancel()).then(Script::text("next")));
        let mut conn = node.ready_with(ProviderConfig { capacity: 1, close_grace_ms: configured, ..config() }).await;
        conn.run(1).await;
        assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
        let began = Instant::now();
        conn.send(cancel(1));
        assert_eq!(conn.rest(1).await, [CANCELLED]);
        assert_eq!(began.elapsed(), Duration::from_millis(grace));
        assert_eq!((calls.counts().dropped, calls.counts().active), (1, 0));
        place_is_free(&mut conn, 2).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_hard_deadline_counts_from_receipt_and_is_a_failure() {
    // EXE-10, NOD-3
    for (script, linger) in
        [(Script::text("x").hang(), 0), (Script::text("x").hang_then_linger(Duration::from_secs(2)), 2)]
    {
        let (_node, mut conn, calls) = one_place(script).await;
        let began = Instant::now();
        conn.send_run(DispatchHead { deadline_ms: 4_000, ..head(1) });
        conn.expect_accepted(1).await;
        let failure = conn.failure(1).await;
        assert_eq!((failure.code, failure.stage), (FailureCode::DeadlineExceeded, FailureStage::Stream));
        assert_eq!(failure.provider_contacted, ProviderContacted::Unknown);
        assert_eq!(began.elapsed(), Duration::from_secs(4 + linger), "told once the provider has returned");
        assert_eq!(calls.counts().active, 0);
        place_is_free(&mut conn, 2).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_hard_deadline_also_ends_a_run_whose_body_never_comes() {
    // EXE-10
    let (_node, mut conn, calls) = one_place(Script::text("x")).await;
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 9, deadline_ms: 1_500, ..head(1) } }));
    conn.expect_accepted(1).await;
    let failure = conn.failure(1).await;
    assert_eq!((failure.code, failure.provider_contacted), (FailureCode::DeadlineExceeded, ProviderContacted::No));
    assert_eq!(calls.counts().calls, 0);
    place_is_free(&mut conn, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_cancel_before_the_deadline_stays_a_cancel() {
    // WDG-2
    let (_node, mut conn, _) = one_place(Script::new().hang_then_linger(Duration::from_secs(3))).await;
    conn.send_run(DispatchHead { deadline_ms: 1_000, ..head(1) });
    conn.expect_accepted(1).await;
    assert_eq!(conn.event(1).await.kind, RunEventKind::Start);
    conn.send(cancel(1));
    assert_eq!(conn.rest(1).await, [CANCELLED]);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_ends_well_before_a_cancel_keeps_its_end() {
    // WIR-6
    let (_node, mut conn, _) = one_place(Script::text("x")).await;
    conn.run(1).await;
    settle().await;
    conn.send(cancel(1));
    assert!(matches!(conn.rest(1).await.pop(), Some(RunEventKind::Complete(_))));
}
