//! Stalls as a Node tells them: when, with what evidence, and what else it holds meanwhile.

pub(crate) mod fixtures;
mod observed;
mod priorities;

use std::num::NonZeroU64;
use std::time::Duration;

use iop_execution::failure::{LivenessClassification, OwnershipClose, StallDetail, TimeoutSetting};
use iop_execution::testkit::Script;
use iop_execution::{
    FailureCode, FailureStage, FrameFlags, Health, ProviderContacted, RunEventKind, TunnelFrame, Usage,
};
use iop_wire::*;
use tokio::time::Instant;

use self::fixtures::*;
use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_mute_provider_is_a_stall_at_the_limit_on_both_wires_with_the_same_detail() {
    // WDG-1, WDG-3, WDG-4, EXE-13, S01, S02
    let (mut node, _) = scripted(Script::new().hang(), Answer::now(Health::Available));
    let mut conn = node.ready().await;
    for (number, wire) in [(1, Wire::Run), (2, Wire::Tunnel)] {
        let began = Instant::now();
        let failure = stall(&mut conn, number, wire).await;
        assert_eq!(began.elapsed(), STALL);
        let mut want = StallDetail::new(head(1).adapter, head(1).target, TimeoutSetting::ResponseStall);
        want.liveness_classification = LivenessClassification::RequestStalled;
        want.health_observation_seq = NonZeroU64::new(number);
        want.ownership_close = OwnershipClose::Confirmed { retryable: true };
        want.idle_ms = 2_000;
        want.timeout_ms = 2_000;
        assert_eq!(failure.stall.as_deref(), Some(&want));
        assert_eq!((failure.code, failure.stage), (FailureCode::ResponseStalled, FailureStage::Prefill));
        assert_eq!(failure.provider_contacted, ProviderContacted::Unknown);
        assert_eq!(failure.message, "no progress for 2000 ms (response_stall_timeout_ms)");
    }
}

#[tokio::test(start_paused = true)]
async fn the_default_limit_is_three_hundred_seconds() {
    // EXE-13
    let (mut node, _) = scripted(Script::new().hang(), Answer::now(Health::Unknown));
    let mut conn = node.ready().await;
    let began = Instant::now();
    conn.run(1).await;
    assert_eq!(detail(&conn.failure(1).await).timeout_ms, 300_000);
    assert_eq!(began.elapsed(), Duration::from_secs(300));
}

#[tokio::test(start_paused = true)]
async fn only_progress_resets_the_clock() {
    // WDG-1, EXE-11, EXE-12; field report 18: five minutes of reasoning alone are no stall
    let half = Duration::from_millis(1_500);
    let reasoning = (0..200).fold(Script::new(), |script, _| script.wait(half).reasoning("hm"));
    let empty = (0..3).fold(Script::text("a"), |script, _| script.wait(half).delta("").usage(Usage::default()));
    let comments = (0..3).fold(Script::text("a"), |script, _| script.wait(half).frame(&b":\n\n"[..], FrameFlags::NONE));
    for (script, wire, ends_well, at) in [
        (reasoning.clone(), Wire::Run, true, half * 200),
        (reasoning, Wire::Tunnel, true, half * 200),
        (empty, Wire::Run, false, STALL),
        (comments, Wire::Tunnel, false, STALL),
    ] {
        let (mut node, _) = scripted(script, Answer::now(Health::Unknown));
        let mut conn = node.ready().await;
        let began = Instant::now();
        conn.send_stalling(1, wire);
        conn.expect_accepted(1).await;
        let outcome = conn.end_of(1, wire).await;
        assert_eq!((outcome.is_none(), began.elapsed()), (ends_well, at), "{wire:?}");
        if let Some(failure) = outcome {
            assert_eq!((failure.stage, failure.provider_contacted), (FailureStage::Stream, ProviderContacted::Yes));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn without_credit_no_idle_time_passes_and_what_had_passed_is_kept() {
    // WDG-1, WIR-16
    let comment = vec![b':'; 4096];
    let script = Script::text("a").wait(Duration::from_millis(500));
    let script = (0..5).fold(script, |script, _| script.frame(comment.clone(), FrameFlags::NONE)).hang();
    let (mut node, calls) = scripted(script, Answer::now(Health::Unknown));
    let mut conn = node.ready().await;
    conn.send_on(DispatchHead { window: limits::MIN_WINDOW, ..stalling(1) }, Wire::Tunnel);
    conn.expect_accepted(1).await;
    while conn.stash_one(Duration::from_secs(10_000)).await {}
    assert_eq!(calls.counts().active, 1, "the client is slow, the provider is not stuck");
    let began = Instant::now();
    conn.send(credit(1, limits::MIN_WINDOW));
    let failure = conn.end_of(1, Wire::Tunnel).await.unwrap();
    assert_eq!(began.elapsed(), STALL - Duration::from_millis(500), "{failure:?}");
    assert_eq!(detail(&failure).idle_ms, 2_000);
}

#[tokio::test(start_paused = true)]
async fn the_first_progress_may_take_longer_by_config_and_by_the_length_of_the_prompt() {
    // WDG-7; field reports 16, 17
    let (mut node, _) = scripted(Script::new().hang(), Answer::now(Health::Unknown));
    let provider = ProviderConfig { first_response_timeout_ms: 30_000, stall_per_1k_prompt_ms: 1_000, ..config() };
    let mut conn = node.ready_with(provider).await;
    let began = Instant::now();
    conn.send_run(DispatchHead { prompt_tokens_estimate: 100_000, ..stalling(1) });
    conn.expect_accepted(1).await;
    let failure = conn.failure(1).await;
    assert_eq!(began.elapsed(), Duration::from_secs(130));
    assert_eq!(detail(&failure).timeout_setting, TimeoutSetting::FirstResponse);
    assert_eq!(failure.message, "no progress for 130000 ms (first_response_timeout_ms)");
}

#[tokio::test(start_paused = true)]
async fn closing_and_probing_go_side_by_side() {
    // WDG-3: never one after the other, and the terminal comes when both have ended
    let (slow, fast) = (Duration::from_secs(3), Duration::from_secs(1));
    for (linger, probe, want) in [(slow, fast, slow), (fast, slow, slow)] {
        let (mut node, _) = scripted(Script::new().hang_then_linger(linger), Answer::After(probe, Health::Available));
        let mut conn = node.ready().await;
        let began = Instant::now();
        let failure = stall(&mut conn, 1, Wire::Run).await;
        assert_eq!(began.elapsed(), STALL + want);
        assert_eq!(detail(&failure).ownership_close, OwnershipClose::Confirmed { retryable: true });
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_ignores_its_cancel_is_dropped_and_unconfirmed_and_its_place_is_free_then() {
    // WDG-3, WDG-4, NOD-4; field report 27
    let (mut node, calls) = scripted(Script::text("a").ignore_cancel(), Answer::now(Health::Available));
    let provider = ProviderConfig { capacity: 1, close_grace_ms: 4_000, ..config() };
    let mut conn = node.ready_with(provider).await;
    let began = Instant::now();
    conn.send_stalling(1, Wire::Run);
    conn.expect_accepted(1).await;
    tokio::time::sleep(STALL + Duration::from_millis(3_999)).await;
    conn.run(2).await;
    assert_eq!(conn.failure(2).await.code, FailureCode::Busy);
    let failure = conn.failure(1).await;
    assert_eq!(began.elapsed(), STALL + Duration::from_secs(4));
    assert_eq!(detail(&failure).ownership_close, OwnershipClose::Unconfirmed);
    assert!(!detail(&failure).retryable());
    assert_eq!(calls.counts().dropped, 1);
    conn.run(3).await;
    assert_eq!(conn.event(3).await.kind, RunEventKind::Start);
}

#[tokio::test(start_paused = true)]
async fn a_probe_takes_no_place_and_a_returned_call_gives_its_own_back_before_the_terminal() {
    // WDG-3: independent of the gate; NOD-4
    let (mut node, calls) =
        scripted_then(Script::new().hang(), Script::text("x"), Answer::After(SLOW, Health::Available));
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    conn.send_stalling(1, Wire::Run);
    conn.expect_accepted(1).await;
    calls.wait_for(|counts| counts.returned == 1).await;
    settle().await;
    conn.run(2).await;
    assert_eq!(conn.rest(2).await.len(), 3, "the place is free while the probe still runs");
    assert_eq!(detail(&conn.failure(1).await).health_observation_seq, NonZeroU64::new(1));
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_hangs_panics_or_knows_nothing_is_unknown() {
    // WDG-5, WDG-3
    for (answer, wait) in [
        (Answer::Hang, Duration::from_millis(700)),
        (Answer::Panic, Duration::ZERO),
        (Answer::now(Health::Unknown), Duration::ZERO),
    ] {
        let (mut node, _) = scripted(Script::new().hang(), answer);
        let mut conn = node.ready_with(ProviderConfig { probe_timeout_ms: 700, ..config() }).await;
        let began = Instant::now();
        let failure = stall(&mut conn, 1, Wire::Tunnel).await;
        assert_eq!(began.elapsed(), STALL + wait, "{answer:?}");
        let detail = detail(&failure);
        assert_eq!(detail.liveness_classification, LivenessClassification::HealthUnknown, "{answer:?}");
        assert_eq!(detail.health_observation_seq, NonZeroU64::new(1), "an observation without a result is one");
    }
}

#[tokio::test(start_paused = true)]
async fn under_the_policy_drain_a_stall_is_never_confirmed_and_the_call_is_read_out() {
    // NOD-9, WDG-4
    let script = Script::text("a").pause().delta("late");
    let (mut node, calls) = scripted(script, Answer::now(Health::Available));
    let provider = ProviderConfig { capacity: 1, cancel_policy: CancelPolicy::Drain, ..config() };
    let mut conn = node.ready_with(provider).await;
    let began = Instant::now();
    let failure = stall(&mut conn, 1, Wire::Run).await;
    assert_eq!(began.elapsed(), STALL, "nothing is gained by waiting for the grace");
    assert_eq!(detail(&failure).ownership_close, OwnershipClose::Unconfirmed);
    assert_eq!(detail(&failure).liveness_classification, LivenessClassification::RequestStalled);
    conn.run(2).await;
    assert_eq!(conn.failure(2).await.code, FailureCode::Busy, "the reader keeps the place");
    assert_eq!(calls.counts().cancels_seen, 0);
    calls.release();
    calls.wait_for(|counts| counts.returned == 1).await;
    settle().await;
    conn.run(3).await;
    assert_eq!(conn.event(3).await.kind, RunEventKind::Start);
}

#[tokio::test(start_paused = true)]
async fn late_output_is_dropped_and_counted() {
    // WDG-3, S02
    let (mut node, _) = scripted(Script::text("a").ignore_cancel(), Answer::now(Health::Unknown));
    let mut conn = node.ready_with(ProviderConfig { close_grace_ms: 1_000, ..config() }).await;
    stall(&mut conn, 1, Wire::Run).await;
    assert!(conn.is_silent(Duration::from_secs(60)).await);

    let (mut node, _) = with_provider(Stubborn, Answer::now(Health::Unknown));
    let mut conn = node.ready().await;
    let failure = stall(&mut conn, 1, Wire::Run).await;
    assert_eq!(detail(&failure).ownership_close, OwnershipClose::Confirmed { retryable: true });
    assert!(conn.is_silent(Duration::from_secs(60)).await, "nothing after the terminal");
    assert!(node.record.lines().contains(&"late pushes 1".to_owned()), "{:?}", node.record.lines());
}

#[tokio::test(start_paused = true)]
async fn observations_are_numbered_per_connection_across_runs_tunnels_and_commands() {
    // WDG-6, CMD-2, S04
    let (mut node, _) = scripted(Script::new().hang(), Answer::now(Health::Available));
    for _connection in 0..2 {
        let mut conn = node.ready_with(ProviderConfig { capacity: 8, ..config() }).await;
        let mut seen = Vec::new();
        // Three at once.
        conn.send_stalling(1, Wire::Run);
        conn.send_stalling(2, Wire::Tunnel);
        conn.expect_accepted(1).await;
        conn.expect_accepted(2).await;
        conn.send(capabilities(1, "a", Some("t"), 0));
        seen.push(observed(&conn.response().await).health_observation_seq);
        for (number, wire) in [(1, Wire::Run), (2, Wire::Tunnel)] {
            let failure = conn.end_of(number, wire).await.unwrap();
            seen.push(detail(&failure).health_observation_seq.unwrap());
        }
        conn.send(capabilities(2, "a", Some("t"), 0));
        seen.push(observed(&conn.response().await).health_observation_seq);
        assert_eq!(seen[0].get(), 1, "the first finished observation");
        seen.sort();
        assert_eq!(seen.iter().map(|seq| seq.get()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_whose_head_came_is_a_stall_all_the_same() {
    // WDG-1, EXE-12: a head is no progress
    let script = Script::new().head(http::StatusCode::OK, "text/event-stream").hang();
    let (mut node, _) = scripted(script, Answer::now(Health::Unknown));
    let mut conn = node.ready().await;
    conn.send_stalling(1, Wire::Tunnel);
    conn.expect_accepted(1).await;
    assert!(matches!(conn.frame(1).await, TunnelFrame::Head(_)));
    assert_eq!(conn.end_of(1, Wire::Tunnel).await.unwrap().code, FailureCode::ResponseStalled);
}

#[tokio::test(start_paused = true)]
async fn the_time_in_which_the_request_was_still_coming_is_not_the_providers() {
    // WDG-1
    let (mut node, _) = scripted(Script::new().hang(), Answer::now(Health::Unknown));
    let mut conn = node.ready().await;
    let (body, late) = (chat(), Duration::from_millis(1_500));
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: body.len() as u64, ..stalling(1) } }));
    conn.expect_accepted(1).await;
    let began = Instant::now();
    tokio::time::sleep(late).await;
    conn.send(chunk(1, body, true));
    assert_eq!(detail(&conn.failure(1).await).idle_ms, 2_000);
    assert_eq!(began.elapsed(), late + STALL);
}
