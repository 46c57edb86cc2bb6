use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use futures_util::StreamExt;

use super::*;
use crate::chat::ChatInput;
use crate::event::FinishReason;
use crate::id::{AdapterKey, RunId, Target};
use crate::provider::Capabilities;
use crate::sink::Fenced;

/// What the scripted provider does, step by step.
#[derive(Debug, Clone, Copy)]
enum Step {
    Push,
    Yield,
    Return,
    Fail,
    Panic,
    /// Waits for the cancel, then tries one more push and returns success.
    AwaitCancel,
    /// Never returns.
    Hang,
}

#[derive(Debug)]
struct Script(Vec<Step>, Arc<AtomicBool>);

struct OnDrop(Arc<AtomicBool>);
impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[async_trait::async_trait]
impl Provider for Script {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only()
    }

    async fn execute(&self, _: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let _guard = OnDrop(Arc::clone(&self.1));
        for step in &self.0 {
            match step {
                Step::Push => sink.delta("x").await?,
                Step::Yield => {
                    let mut yielded = false;
                    std::future::poll_fn(|cx| {
                        if yielded {
                            return Poll::Ready(());
                        }
                        yielded = true;
                        cx.waker().wake_by_ref();
                        Poll::Pending
                    })
                    .await;
                }
                Step::Return => break,
                Step::Fail => return Err(ProviderError::unreachable()),
                Step::Panic => panic!("scripted"),
                Step::AwaitCancel => {
                    sink.cancelled().await;
                    assert_eq!(sink.delta("late").await, Err(Fenced));
                }
                Step::Hang => std::future::pending().await,
            }
        }
        Ok(Completion::new(FinishReason::Stop))
    }
}

fn request() -> RunRequest {
    RunRequest::new(
        RunId::from_bytes([1; 16]),
        AdapterKey::new("a").unwrap(),
        Target::new("t").unwrap(),
        ChatInput::parse("{}").unwrap(),
    )
}

fn start(steps: &[Step]) -> (RunExecution, Arc<AtomicBool>) {
    let dropped = Arc::new(AtomicBool::new(false));
    (RunExecution::run(Arc::new(Script(steps.to_vec(), Arc::clone(&dropped))), request()), dropped)
}

fn poll(run: &mut RunExecution) -> Poll<Option<RunEvent>> {
    run.poll_next_unpin(&mut Context::from_waker(Waker::noop()))
}

fn collect(run: &mut RunExecution) -> Vec<RunEvent> {
    let mut events = Vec::new();
    for _ in 0..1000 {
        match poll(run) {
            Poll::Ready(Some(event)) => events.push(event),
            Poll::Ready(None) => break,
            Poll::Pending => {}
        }
    }
    events
}

fn check_shape(events: &[RunEvent]) {
    // EXE-5, NOD-6
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event.seq, at as u64 + 1, "numbers have no gap");
        assert_eq!(event.kind.is_terminal(), at + 1 == events.len(), "one terminal, at the end");
    }
    assert!(!events.is_empty());
}

#[test]
fn the_terminal_is_the_return_value() {
    // EXE-6
    for (steps, pushes) in [
        (&[Step::Return][..], 0),
        (&[Step::Push, Step::Push, Step::Return], 2),
        (&[Step::Push, Step::Yield, Step::Push, Step::Return], 2),
        (&[Step::Push, Step::Fail], 1),
        (&[Step::Push, Step::Yield, Step::Panic], 1),
        (&[Step::Panic], 0),
    ] {
        let (mut run, dropped) = start(steps);
        let events = collect(&mut run);
        check_shape(&events);
        assert_eq!(events.len(), pushes + 2, "{steps:?}");
        assert_eq!(events[0].kind, RunEventKind::Start);
        let code = match &events.last().unwrap().kind {
            RunEventKind::Complete(FinishReason::Stop) => None,
            RunEventKind::Error(failure) => Some(failure.code),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            code,
            match steps.last() {
                Some(Step::Fail) => Some(FailureCode::ProviderUnreachable),
                Some(Step::Panic) => Some(FailureCode::Internal),
                _ => None,
            }
        );
        assert!(run.is_returned() && dropped.load(Ordering::SeqCst));
        assert_eq!(poll(&mut run), Poll::Ready(None), "fused");
    }
}

#[test]
fn a_cancel_fences_at_once_and_its_terminal_waits_for_the_provider() {
    // EXE-4, EXE-6, LEA-6
    let (mut run, dropped) = start(&[Step::Push, Step::AwaitCancel]);
    assert!(matches!(poll(&mut run), Poll::Ready(Some(_))));
    assert!(matches!(poll(&mut run), Poll::Ready(Some(_))));
    assert!(poll(&mut run).is_pending());
    run.cancel(CancelReason::Client);
    run.cancel(CancelReason::Drain);
    assert!(!run.is_returned());
    let events = collect(&mut run);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].kind, RunEventKind::Cancelled(CancelReason::Client), "the first reason stands");
    assert_eq!(events[0].seq, 3);
    assert_eq!(run.late_pushes(), 1);
    assert!(dropped.load(Ordering::SeqCst));
}

#[test]
fn a_provider_that_hangs_is_dropped_by_abandon() {
    // EXE-6, NOD-4
    let (mut run, dropped) = start(&[Step::Push, Step::Hang]);
    while poll(&mut run).is_ready() {}
    run.cancel(CancelReason::Client);
    assert!(poll(&mut run).is_pending(), "no terminal while the provider runs");
    run.abandon();
    assert!(dropped.load(Ordering::SeqCst));
    assert_eq!(collect(&mut run)[0].kind, RunEventKind::Cancelled(CancelReason::Client));

    let (mut run, _) = start(&[Step::Hang]);
    while poll(&mut run).is_ready() {}
    run.abandon();
    let events = collect(&mut run);
    let RunEventKind::Error(failure) = &events[0].kind else { panic!("{events:?}") };
    assert_eq!(failure.code, FailureCode::ProviderEndedWithoutTerminal);
}

#[test]
fn every_cancel_point_gives_one_terminal() {
    // EXE-6, NOD-6: cancel before every poll of every script
    let alphabet = [Step::Push, Step::Yield, Step::Return, Step::Fail, Step::Panic, Step::AwaitCancel];
    let mut scripts: Vec<Vec<Step>> = vec![vec![]];
    for _ in 0..4 {
        scripts = scripts.iter().flat_map(|s| alphabet.map(|step| [&s[..], &[step]].concat())).collect();
    }
    for steps in scripts {
        for at in 0..6 {
            let (mut run, _) = start(&steps);
            let mut events = Vec::new();
            for _ in 0..at {
                if let Poll::Ready(Some(event)) = poll(&mut run) {
                    events.push(event);
                }
            }
            run.cancel(CancelReason::Client);
            events.extend(collect(&mut run));
            check_shape(&events);
        }
    }
}

#[test]
fn dropping_an_execution_drops_the_call() {
    // EXE-4
    let (mut run, dropped) = start(&[Step::Push, Step::Hang]);
    while poll(&mut run).is_ready() {}
    drop(run);
    assert!(dropped.load(Ordering::SeqCst));
}
