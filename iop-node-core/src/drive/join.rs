//! Decides nothing: does what the watchdog says once a stall is claimed (WDG-3), and makes its terminal (WDG-4).

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use iop_execution::execution::Execution;
use iop_execution::failure::StallDetail;
use iop_execution::{AdapterKey, CancelReason, ExecutionFailure, FailureCode, FailureStage, Health, ProviderContacted};
use tokio::time::{Sleep, sleep_until};

use super::{Work, read_out};
use crate::observe::StallObservation;
use crate::probe::Probing;
use crate::session::now;
use crate::state::emit::Output;
use crate::state::watchdog::{Action, Ended, Verdict};

/// What is left of a claimed run.
struct Join<E: Output> {
    call: Option<Execution<E>>,
    probe: Option<Probing>,
    timer: Option<Pin<Box<Sleep>>>,
    connected: bool,
}

impl<E: Output> Work<E> {
    /// Waits for the cancelled call and for the probe, side by side. `None` if the connection ended meanwhile.
    pub(super) async fn join(&mut self, call: Execution<E>) -> Option<Verdict> {
        let mut join = Join { call: Some(call), probe: None, timer: None, connected: true };
        poll_fn(|cx| {
            loop {
                if let Some(verdict) = self.act(&mut join) {
                    return Poll::Ready(Some(verdict));
                }
                if self.watchdog.is_over() {
                    return Poll::Ready(None);
                }
                // Everything that is ready comes before the timer: what ends in its last instant ended in time.
                if self.poll_join(&mut join, cx) {
                    continue;
                }
                let Some(due) = self.watchdog.poll_timeout() else { return Poll::Pending };
                let timer = join.timer.get_or_insert_with(|| Box::pin(sleep_until(due.into())));
                if timer.deadline().into_std() != due {
                    timer.as_mut().reset(due.into());
                }
                if timer.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                join.timer = None;
                self.watchdog.handle_timeout(now());
            }
        })
        .await
    }

    fn act(&mut self, join: &mut Join<E>) -> Option<Verdict> {
        while let Some(action) = self.watchdog.poll_action() {
            match action {
                Action::Cancel => {
                    if let Some(call) = &mut join.call {
                        call.cancel(CancelReason::Withdrawn);
                    }
                }
                Action::ReadOut => {
                    if let (Some(call), Some(permit)) = (join.call.take(), self.permit.take()) {
                        self.background.spawn(read_out(call, permit, std::sync::Arc::clone(&self.observer)));
                    }
                }
                Action::Probe => join.probe = Some(self.probe.begin()),
                Action::Abandon => self.let_go(join),
                Action::EndProbe => {
                    join.probe = None;
                    self.watchdog.probed(Health::Unknown, self.probe.observations.finished(), now());
                }
                Action::ForgetProbe => join.probe = None,
                Action::Finish(verdict) => return Some(verdict),
            }
        }
        None
    }

    /// The call has returned or is dropped now; then its place is free (NOD-4), whatever the probe does.
    fn let_go(&mut self, join: &mut Join<E>) {
        if let Some(call) = join.call.take() {
            let late = call.late_pushes();
            if late > 0 {
                self.observer.late_pushes(late);
            }
        }
        self.permit = None;
    }

    /// True if something happened.
    fn poll_join(&mut self, join: &mut Join<E>, cx: &mut Context<'_>) -> bool {
        let mut happened = false;
        if join.connected && self.control.poll_gone(cx).is_ready() {
            join.connected = false;
            self.watchdog.end(Ended::Disconnected, now());
            happened = true;
        }
        if let Some(call) = &mut join.call
            && let Poll::Ready(_terminal) = Pin::new(&mut *call).poll_next(cx)
        {
            // A fenced call gives nothing but its end.
            self.let_go(join);
            self.watchdog.returned(now());
            happened = true;
        }
        if let Some(probe) = &mut join.probe
            && let Poll::Ready(health) = probe.as_mut().poll(cx)
        {
            join.probe = None;
            self.watchdog.probed(health, self.probe.observations.finished(), now());
            happened = true;
        }
        happened
    }

    /// Tells a stall: to the observer, and by a terminal that the Node alone has made.
    pub(super) fn stalled(&self, verdict: &Verdict) -> E {
        let observation =
            StallObservation::new(E::PATH, verdict.liveness.provider_health(), verdict.close, verdict.duration);
        observation.log(verdict);
        self.observer.response_stalled(&observation);
        E::failed(0, failure(verdict, &self.adapter, &self.probe.target))
    }
}

fn failure(verdict: &Verdict, adapter: &AdapterKey, target: &iop_execution::Target) -> ExecutionFailure {
    let millis = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mut detail = StallDetail::new(adapter.clone(), target.clone(), verdict.setting);
    detail.liveness_classification = verdict.liveness;
    detail.health_observation_seq = verdict.observation;
    detail.ownership_close = verdict.close;
    detail.idle_ms = millis(verdict.idle);
    detail.timeout_ms = millis(verdict.limit);
    let (stage, contacted) = if verdict.progressed {
        (FailureStage::Stream, ProviderContacted::Yes)
    } else {
        (FailureStage::Prefill, ProviderContacted::Unknown)
    };
    let message = format!("no progress for {} ms ({})", detail.timeout_ms, verdict.setting);
    ExecutionFailure::new(FailureCode::ResponseStalled, stage, contacted, message).with_stall(detail)
}
