//! What is ready in the same instant as the stall timer, and what comes after the claim (WDG-2).

use std::time::Duration;

use iop_execution::failure::OwnershipClose;
use iop_execution::testkit::Script;
use iop_execution::{FailureCode, FrameFlags, Health, RunEventKind};
use iop_wire::*;
use tokio::time::Instant;

use super::fixtures::*;
use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_deadline_in_the_same_instant_wins() {
    // WDG-2, S01
    let (mut node, _) = scripted(Script::new().hang(), Answer::now(Health::Available));
    let mut conn = node.ready().await;
    for (number, wire) in [(1, Wire::Run), (2, Wire::Tunnel)] {
        let began = Instant::now();
        conn.send_on(DispatchHead { deadline_ms: 2_000, ..stalling(number) }, wire);
        conn.expect_accepted(number).await;
        let failure = conn.end_of(number, wire).await.unwrap();
        assert_eq!((failure.code, began.elapsed()), (FailureCode::DeadlineExceeded, STALL));
    }
}

#[tokio::test(start_paused = true)]
async fn an_end_of_the_provider_in_the_same_instant_wins_and_so_does_progress() {
    // WDG-2, WDG-3, S01
    for (script, want) in
        [(Script::new().wait(STALL), Ok(STALL)), (Script::new().wait(STALL).delta("a").hang(), Err(STALL * 2))]
    {
        let (mut node, _) = scripted(script, Answer::now(Health::Available));
        let mut conn = node.ready().await;
        for (number, wire) in [(1, Wire::Run), (2, Wire::Tunnel)] {
            let began = Instant::now();
            conn.send_stalling(number, wire);
            conn.expect_accepted(number).await;
            let outcome = conn.end_of(number, wire).await;
            let got = if outcome.is_none() { Ok(began.elapsed()) } else { Err(began.elapsed()) };
            assert_eq!(got, want, "{wire:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn after_the_claim_a_cancel_a_deadline_and_a_late_end_change_neither_terminal_nor_its_time() {
    // WDG-2, S02
    let (mut node, _) =
        scripted(Script::new().hang_then_linger(Duration::from_secs(1)), Answer::After(SLOW, Health::Available));
    let mut conn = node.ready().await;
    for (number, wire) in [(1, Wire::Run), (2, Wire::Tunnel)] {
        let began = Instant::now();
        conn.send_on(DispatchHead { deadline_ms: 2_500, ..stalling(number) }, wire);
        conn.expect_accepted(number).await;
        tokio::time::sleep(STALL + Duration::from_millis(100)).await;
        conn.send(cancel(number));
        let failure = conn.end_of(number, wire).await.unwrap();
        assert_eq!(began.elapsed(), STALL + SLOW, "{wire:?}");
        assert_eq!(failure.code, FailureCode::ResponseStalled);
        assert_eq!(detail(&failure).ownership_close, OwnershipClose::Confirmed { retryable: true });
    }
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_ends_the_join_and_nothing_is_told() {
    // WDG-2, NOD-5; also where a cancel came before it
    for cancelled in [false, true] {
        let (mut node, calls) = scripted_then(Script::new().hang(), Script::text("x"), Answer::Hang);
        let mut conn = node.ready_with(ProviderConfig { probe_timeout_ms: 60_000, ..config() }).await;
        conn.send_stalling(1, Wire::Run);
        conn.expect_accepted(1).await;
        calls.wait_for(|counts| counts.probes == 1).await;
        if cancelled {
            conn.send(cancel(1));
            settle().await;
        }
        let began = Instant::now();
        drop(conn);
        let mut conn = node.ready().await;
        assert!(began.elapsed() < Duration::from_secs(2), "the probe is not waited for: {:?}", began.elapsed());
        assert!(conn.is_silent(Duration::from_secs(100)).await, "FEN-4: nothing of the old run");
        let lines = node.record.lines();
        assert!(lines.contains(&"ended run Abandoned".to_owned()), "{lines:?}");
        assert!(!lines.iter().any(|line| line.starts_with("stalled")), "{lines:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_leaves_a_cancelled_call_the_rest_of_its_grace() {
    // WDG-2, NOD-5
    let (mut node, calls) = scripted(Script::new().ignore_cancel(), Answer::Hang);
    let mut conn = node.ready_with(ProviderConfig { close_grace_ms: 4_000, ..config() }).await;
    conn.send_stalling(1, Wire::Tunnel);
    conn.expect_accepted(1).await;
    calls.wait_for(|counts| counts.probes == 1).await;
    let began = Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(conn);
    calls.wait_for(|counts| counts.dropped == 1).await;
    assert_eq!(began.elapsed(), Duration::from_secs(4));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_before_the_limit_is_a_cancel() {
    // WDG-2
    let (mut node, _) = scripted(Script::new().hang(), Answer::now(Health::Available));
    let mut conn = node.ready().await;
    conn.send_stalling(1, Wire::Run);
    conn.expect_accepted(1).await;
    tokio::time::sleep(STALL - Duration::from_millis(1)).await;
    conn.send(cancel(1));
    assert!(matches!(conn.rest(1).await.last(), Some(RunEventKind::Cancelled(_))));
}

#[tokio::test(start_paused = true)]
async fn progress_behind_many_comments_of_the_same_instant_wins_and_comments_alone_do_not() {
    // WDG-2, WDG-1
    let comments = |script: Script, count| {
        (0..count).fold(script, |script: Script, _| script.frame(&b":\n\n"[..], FrameFlags::NONE))
    };
    let (mut node, _) = scripted(comments(Script::new().wait(STALL), 70).delta("a"), Answer::now(Health::Available));
    let mut conn = node.ready().await;
    conn.send_stalling(1, Wire::Tunnel);
    conn.expect_accepted(1).await;
    assert_eq!(conn.end_of(1, Wire::Tunnel).await, None);

    let script = comments(Script::new().wait(STALL), 200).hang();
    let (mut node, _) = scripted(script, Answer::now(Health::Available));
    let mut conn = node.ready().await;
    let began = Instant::now();
    conn.send_stalling(1, Wire::Tunnel);
    conn.expect_accepted(1).await;
    assert_eq!(conn.end_of(1, Wire::Tunnel).await.unwrap().code, FailureCode::ResponseStalled);
    assert_eq!(began.elapsed(), STALL);
}
