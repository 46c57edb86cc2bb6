use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use iop_execution::event::{CancelReason, RunEventKind};
use iop_execution::failure::FailureCode;
use iop_execution::testkit::{Script, ScriptedProvider, chat_json, run_request, tunnel_request};
use iop_execution::{
    ChatInput, ExecutionFailure, Health, Provider, ProviderError, RunExecution, Target, TunnelExecution, TunnelFrame,
    Usage,
};

use super::*;

/// Polls once.
fn is_ready<S: futures_util::Stream + Unpin>(stream: &mut S) -> bool {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    stream.poll_next_unpin(&mut cx).is_ready()
}

fn target() -> Target {
    Target::new("m").unwrap()
}

fn run(provider: &Arc<impl Provider>) -> RunExecution {
    let input = ChatInput::parse(chat_json("m", "hello", true)).unwrap();
    RunExecution::run(Arc::clone(provider) as Arc<dyn Provider>, run_request(&target(), input))
}

fn tunnel(provider: &Arc<impl Provider>) -> TunnelExecution {
    let request = tunnel_request(&target(), chat_json("m", "hello", true), true);
    TunnelExecution::tunnel(Arc::clone(provider) as Arc<dyn Provider>, request)
}

fn scripted() -> ScriptedProvider {
    let usage = Usage { output_tokens: Some(2), ..Usage::default() };
    ScriptedProvider::new(Script::text("a").reasoning("bb").usage(usage)).with_tunnels()
}

fn code(kind: &RunEventKind) -> Option<FailureCode> {
    match kind {
        RunEventKind::Error(failure) => Some(failure.code),
        _ => None,
    }
}

#[tokio::test]
async fn wrappers_change_nothing_they_are_not_there_for() {
    // ADP-6
    let plain = Arc::new(scripted());
    let limit = NonZeroU32::new(9).unwrap();
    let inner: Arc<dyn Provider> = Arc::new(Record::new(Arc::new(Fault::new(Arc::new(scripted()), Vec::new()))));
    let wrapped = Arc::new(Limit::new(inner, limit));
    let events: Vec<_> = run(&plain).collect().await;
    assert_eq!(run(&wrapped).collect::<Vec<_>>().await, events);
    let frames: Vec<_> = tunnel(&plain).collect().await;
    assert_eq!(tunnel(&wrapped).collect::<Vec<_>>().await, frames);
    assert_eq!(wrapped.capabilities(), plain.capabilities().with_max_concurrency(Some(limit)));
}

#[tokio::test]
async fn no_method_is_lost_in_a_wrapper() {
    // ADP-6
    let (inner, handle) = scripted().with_health(Health::Unavailable).into_parts();
    let wrappers: [Arc<dyn Provider>; 3] = [
        Arc::new(Limit::new(Arc::clone(&inner), NonZeroU32::MIN)),
        Arc::new(Fault::new(Arc::clone(&inner), Vec::new())),
        Arc::new(Record::new(inner)),
    ];
    for wrapper in wrappers {
        wrapper.start().await.unwrap();
        assert_eq!(wrapper.probe_health(&target()).await, Health::Unavailable);
        wrapper.stop().await;
    }
    let counts = handle.counts();
    assert_eq!((counts.starts, counts.probes, counts.stops), (3, 3, 3));
}

#[tokio::test]
async fn a_limit_refuses_one_too_many_at_once_and_frees_on_return_and_drop() {
    // ADP-6; field report 47
    let (inner, handle) = ScriptedProvider::new(Script::new().pause()).into_parts();
    let limit = Arc::new(Limit::new(inner, NonZeroU32::new(2).unwrap()));
    let spawn = |limit: &Arc<Limit>| tokio::spawn(run(limit).collect::<Vec<_>>());
    let (first, second) = (spawn(&limit), spawn(&limit));
    handle.wait_for(|counts| counts.paused == 2).await;
    let refused =
        tokio::time::timeout(Duration::from_secs(20), run(&limit).collect::<Vec<_>>()).await.expect("a refusal");
    assert_eq!(code(&refused.last().unwrap().kind), Some(FailureCode::Busy));
    first.abort();
    handle.wait_for(|counts| counts.dropped == 1).await;
    handle.release_all();
    second.await.unwrap();
    assert_eq!(limit.in_use(), 0);
    assert_eq!(handle.counts().max_active, 2);
    assert_eq!(run(&limit).collect::<Vec<_>>().await.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn faults_strike_where_they_are_planned_in_runs_and_tunnels() {
    // ADP-6
    let own = ExecutionFailure::refused(FailureCode::ProviderRejected, "planned");
    for (at, action, events, want) in [
        (FaultPoint::BeforeCall, FaultAction::Cut, 0, Some(FailureCode::ProviderUnreachable)),
        (FaultPoint::AfterEvents(0), FaultAction::Error(own.clone()), 0, Some(FailureCode::ProviderRejected)),
        (FaultPoint::AfterEvents(1), FaultAction::Cut, 1, Some(FailureCode::ProviderUnreachable)),
        (FaultPoint::AtEnd, FaultAction::Error(own.clone()), 3, Some(FailureCode::ProviderRejected)),
        (FaultPoint::AfterEvents(1), FaultAction::Delay(Duration::from_secs(9)), 3, None),
    ] {
        let delayed = matches!(action, FaultAction::Delay(_));
        let plan = vec![FaultPlan { at, action, calls: None }];
        let fault = Arc::new(Fault::new(Arc::new(scripted()), plan));
        let began = tokio::time::Instant::now();
        let got: Vec<_> = run(&fault).collect().await;
        assert_eq!(got.len(), events + 2, "{at:?}");
        assert_eq!(code(&got.last().unwrap().kind), want, "{at:?}");
        assert_eq!(began.elapsed() >= Duration::from_secs(9), delayed);
        let frames: Vec<_> = tunnel(&fault).collect().await;
        let failed = match frames.last().unwrap() {
            TunnelFrame::Failed(failure) => Some(failure.code),
            _ => None,
        };
        assert_eq!(failed, want, "{at:?}");
    }
}

#[tokio::test]
async fn a_fault_may_strike_the_first_calls_only() {
    // ADP-6
    let plan = vec![FaultPlan { at: FaultPoint::BeforeCall, action: FaultAction::Cut, calls: Some(2) }];
    let fault = Arc::new(Fault::new(Arc::new(scripted()), plan));
    for at in 0..4 {
        let events: Vec<_> = run(&fault).collect().await;
        assert_eq!(code(&events.last().unwrap().kind).is_some(), at < 2);
    }
}

#[tokio::test]
async fn a_stall_ends_with_the_cancel() {
    // ADP-6, EXE-4; field report 1: the place is free afterwards
    for at in [FaultPoint::BeforeCall, FaultPoint::AfterEvents(1)] {
        let (inner, handle) = scripted().into_parts();
        let plan = vec![FaultPlan { at, action: FaultAction::Stall, calls: None }];
        let fault = Arc::new(Fault::new(inner, plan));
        let mut execution = run(&fault);
        while is_ready(&mut execution) {}
        execution.cancel(CancelReason::Client);
        assert_eq!(execution.next().await.unwrap().kind, RunEventKind::Cancelled(CancelReason::Client));
        assert_eq!(handle.counts().active, 0);
    }
}

#[tokio::test]
async fn a_cancel_reaches_the_wrapped_provider_as_a_cancel() {
    // EXE-4
    let (inner, handle) = ScriptedProvider::new(Script::text("a").hang()).with_tunnels().into_parts();
    let record = Arc::new(Record::new(inner));
    let mut execution = run(&record);
    while is_ready(&mut execution) {}
    execution.cancel(CancelReason::Client);
    assert!(execution.next().await.is_some());
    let mut execution = tunnel(&record);
    while is_ready(&mut execution) {}
    execution.cancel(CancelReason::Client);
    assert!(execution.next().await.is_some());
    assert_eq!((handle.counts().cancels_seen, handle.counts().returned), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_record_holds_kinds_and_times_and_no_payload() {
    // ADP-6
    let script =
        Script::text("SENTINEL").wait(Duration::from_secs(1)).delta("SENTINEL").fail(ProviderError::unreachable());
    let record = Arc::new(Record::new(Arc::new(ScriptedProvider::new(script).with_tunnels())));
    run(&record).collect::<Vec<_>>().await;
    tunnel(&record).collect::<Vec<_>>().await;
    let mut dropped = run(&record);
    assert!(is_ready(&mut dropped) && is_ready(&mut dropped));
    drop(dropped);
    let calls = record.calls();
    let kinds: Vec<_> = calls.iter().map(|call| call.kind).collect();
    assert_eq!(kinds, [CallKind::Run, CallKind::Tunnel, CallKind::Run]);
    let events: Vec<_> = calls[0].events.iter().map(|event| (event.what, event.bytes, event.at.as_secs())).collect();
    assert_eq!(events, [("delta", 8, 0), ("delta", 8, 1), ("error", 0, 1)]);
    assert_eq!(calls[0].failure, Some(FailureCode::ProviderUnreachable));
    assert_eq!(calls[1].events[0].what, "head");
    assert_eq!(calls[2].ended, None);
    assert!(!format!("{calls:?} {record:?}").contains("SENTINEL"));
}
