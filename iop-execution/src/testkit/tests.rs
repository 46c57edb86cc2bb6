use std::time::Duration;

use futures_util::StreamExt;

use super::check::Verdict;
use super::*;
use crate::event::{CancelReason, FinishReason, RunEvent, RunEventKind, ToolCallDelta};
use crate::execution::{RunExecution, TunnelExecution};
use crate::failure::FailureCode;
use crate::frame::{FrameFlags, TunnelFrame};
use crate::provider::{Capabilities, Health, ProviderError};
use crate::usage::Usage;

mod backend;
mod cases;

fn target() -> Target {
    Target::new("m").unwrap()
}

fn run(provider: ScriptedProvider) -> (RunExecution, ScriptHandle) {
    let (provider, handle) = provider.into_parts();
    let input = ChatInput::parse(chat_json("m", "hello", true)).unwrap();
    (RunExecution::run(provider, run_request(&target(), input)), handle)
}

fn tunnel(provider: ScriptedProvider) -> (TunnelExecution, ScriptHandle) {
    let (provider, handle) = provider.with_tunnels().into_parts();
    (TunnelExecution::tunnel(provider, tunnel_request(&target(), chat_json("m", "hello", true), true)), handle)
}

fn usage() -> Usage {
    Usage { input_tokens: Some(3), output_tokens: Some(2), ..Usage::default() }
}

#[tokio::test]
async fn a_script_is_followed_step_by_step_in_runs_and_tunnels() {
    // EXE-15
    let call =
        ToolCallDelta { id: Some("c".into()), name: Some("f".into()), arguments: "{}".into(), ..Default::default() };
    let script = Script::text("a").reasoning("b").tool_call(call).usage(usage()).finish(FinishReason::ToolCalls);
    let (execution, handle) = run(ScriptedProvider::new(script.clone()));
    let events: Vec<RunEvent> = execution.collect().await;
    assert_eq!(events.len(), 6);
    assert_eq!(events[5].kind, RunEventKind::Complete(FinishReason::ToolCalls));
    assert_eq!((handle.counts().calls, handle.counts().returned, handle.counts().active), (1, 1, 0));
    assert!(handle.calls()[0].body().starts_with(b"{"));

    let (execution, _) = tunnel(ScriptedProvider::new(script));
    let frames: Vec<TunnelFrame> = execution.collect().await;
    let flags: Vec<_> = frames
        .iter()
        .filter_map(|frame| match frame {
            TunnelFrame::Body { flags, .. } => Some(*flags),
            _ => None,
        })
        .collect();
    let (c, l) = (FrameFlags::CONTENT, FrameFlags::LIFECYCLE);
    assert_eq!(flags, [l, c, c, c, FrameFlags::USAGE, l, FrameFlags::TERMINAL]);
    assert!(matches!(frames.last(), Some(TunnelFrame::End)));
}

#[tokio::test]
async fn pauses_wait_for_the_test_and_scripts_follow_each_other() {
    // EXE-15
    let provider =
        ScriptedProvider::new(Script::text("a").pause()).then(Script::new().fail(ProviderError::unreachable()));
    let (provider, handle) = provider.into_parts();
    let input = ChatInput::parse("{}").unwrap();
    let mut first = RunExecution::run(std::sync::Arc::clone(&provider), run_request(&target(), input.clone()));
    tokio::select! {
        biased;
        () = async { while first.next().await.is_some() {} } => panic!("it did not pause"),
        counts = handle.wait_for(|counts| counts.paused == 1) => assert_eq!(counts.active, 1),
    }
    handle.release();
    assert!(matches!(first.next().await.unwrap().kind, RunEventKind::Complete(_)));
    for _ in 0..2 {
        let run = RunExecution::run(std::sync::Arc::clone(&provider), run_request(&target(), input.clone()));
        let events: Vec<_> = run.collect().await;
        let RunEventKind::Error(failure) = &events.last().unwrap().kind else { panic!("{events:?}") };
        assert_eq!(failure.code, FailureCode::ProviderUnreachable);
    }
}

#[tokio::test(start_paused = true)]
async fn every_way_to_meet_a_cancel_is_recorded() {
    // EXE-15, EXE-4
    let slow = Duration::from_secs(20);
    for (script, returns_after, cancels) in [
        (Script::new().hang(), Some(Duration::ZERO), 1),
        (Script::new().pause(), Some(Duration::ZERO), 1),
        (Script::new().wait(slow), Some(Duration::ZERO), 1),
        (Script::new().hang_then_linger(slow), Some(slow), 1),
        (Script::new().ignore_cancel(), None, 0),
    ] {
        let (mut execution, handle) = run(ScriptedProvider::new(script.clone()));
        tokio::select! {
            biased;
            () = async { while execution.next().await.is_some() {} } => panic!("it ended"),
            () = tokio::task::yield_now() => {}
        }
        execution.cancel(CancelReason::Client);
        let began = tokio::time::Instant::now();
        let end = tokio::time::timeout(Duration::from_secs(60), execution.next()).await;
        assert_eq!(end.ok().map(|_| began.elapsed()), returns_after, "{script:?}");
        drop(execution);
        let counts = handle.counts();
        assert_eq!(counts.cancels_seen, cancels, "{script:?}");
        assert_eq!((counts.returned, counts.dropped), if returns_after.is_some() { (1, 0) } else { (0, 1) });
    }
}

#[tokio::test]
async fn a_scripted_panic_is_counted_as_dropped() {
    let (execution, handle) = run(ScriptedProvider::new(Script::new().panic()));
    assert_eq!(execution.collect::<Vec<_>>().await.len(), 2);
    assert_eq!((handle.counts().dropped, handle.counts().active), (1, 0));
}

#[test]
fn a_manual_clock_moves_when_told_and_for_all_who_hold_it() {
    // EXE-15
    let clock = ManualClock::new();
    let (before, other) = (clock.now(), clock.clone());
    assert_eq!(other.advance(Duration::from_secs(3)), before + Duration::from_secs(3));
    assert_eq!(clock.now(), other.now());
}

fn long() -> Script {
    (0..200).fold(Script::new(), |script, at| script.delta(format!("{at} "))).usage(usage())
}

async fn verdicts(provider: ScriptedProvider) -> CheckReport {
    let provider = provider.into_parts().0;
    check_provider(provider, CheckOptions::new(target())).await
}

/// Names of the checks that failed.
fn failed(report: &CheckReport) -> Vec<&'static str> {
    report.failures().map(|check| check.name).collect()
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_keeps_the_contract_passes_every_check() {
    // EXE-15
    let both = Capabilities::runs_only().with_tunnels();
    let report = verdicts(ScriptedProvider::new(long()).on_target(target(), long()).with_capabilities(both)).await;
    // The scripted provider has no rules of its own for paths: that is all it fails.
    assert_eq!(failed(&report), ["tunnel: paths"], "{report}");
    let report = verdicts(ScriptedProvider::new(long())).await;
    assert!(report.is_ok(), "{report}");
    assert!(report.checks().iter().any(|check| check.verdict == Verdict::Skipped));
    assert!(report.checks().iter().any(|check| check.detail.contains("waited")), "{report}");
    assert!(report.to_string().lines().count() == report.checks().len());
}

#[tokio::test(start_paused = true)]
async fn every_breach_of_the_contract_is_found() {
    // EXE-15: each provider breaks one rule
    let dishonest = Capabilities::runs_only().with_tunnels();
    let wrong = |input, output| Usage {
        input_tokens: Some(1),
        cached_input_tokens: Some(input),
        output_tokens: Some(output),
        ..Usage::default()
    };
    let piece = |index, id: Option<&str>| ToolCallDelta {
        index,
        id: id.map(Into::into),
        name: id.map(Into::into),
        arguments: String::new(),
    };
    let hour = Duration::from_secs(3600);
    for (what, provider, want) in [
        (
            "silent",
            ScriptedProvider::new(Script::new().hang()),
            vec![
                "capabilities",
                "run: order, one terminal",
                "run: usage",
                "run: cancel in output",
                "run: backpressure",
            ],
        ),
        ("no output", ScriptedProvider::new(Script::new()), vec!["run: order, one terminal"]),
        (
            "ignores the cancel",
            ScriptedProvider::new(Script::text("a").ignore_cancel()),
            vec![
                "capabilities",
                "run: order, one terminal",
                "run: usage",
                "run: cancel where it waits first",
                "run: cancel in output",
                "run: backpressure",
            ],
        ),
        (
            "slow to stop",
            ScriptedProvider::new(Script::text("a").hang_then_linger(hour)),
            vec![
                "capabilities",
                "run: order, one terminal",
                "run: usage",
                "run: cancel where it waits first",
                "run: cancel in output",
                "run: backpressure",
            ],
        ),
        (
            "fails",
            ScriptedProvider::new(Script::text("a").fail(ProviderError::unreachable())),
            vec!["run: order, one terminal", "run: backpressure"],
        ),
        (
            "panics",
            ScriptedProvider::new(Script::text("a").panic()),
            vec!["run: order, one terminal", "run: backpressure"],
        ),
        ("more cached than input", ScriptedProvider::new(long().usage(wrong(2, 2))), vec!["run: usage"]),
        ("counts shrink", ScriptedProvider::new(long().usage(wrong(0, 1))), vec!["run: usage"]),
        (
            "index gap",
            ScriptedProvider::new(Script::new().tool_call(piece(1, Some("a")))),
            vec!["run: order, one terminal"],
        ),
        ("no id", ScriptedProvider::new(Script::new().tool_call(piece(0, None))), vec!["run: order, one terminal"]),
        ("any target is available", ScriptedProvider::new(long()).with_health(Health::Available), vec!["probe"]),
        (
            "no runs after all",
            ScriptedProvider::new(Script::new().fail(ProviderError::unsupported("x"))),
            vec!["capabilities", "run: order, one terminal", "run: backpressure"],
        ),
        (
            "frames cut anywhere",
            ScriptedProvider::new(Script::new().frame("data: x", FrameFlags::CONTENT)).with_capabilities({
                let mut tunnels = dishonest.clone();
                tunnels.runs = false;
                tunnels
            }),
            vec!["tunnel: order, one terminal", "tunnel: paths"],
        ),
    ] {
        let report = verdicts(provider).await;
        assert_eq!(failed(&report), want, "{what}\n{report}");
    }
}
