//! Decides how one run or tunnel proceeds: it reads the provider only while there is room to send, stops on a cancel, a
//! deadline or the end of the connection, and gives its place back before it says how it ended.
//!
//! ```text
//!            room? ─► poll the provider ─► cut ─► push
//! Running ──────────────────────────────────────────────────► provider ended: free the place ─► terminal
//!    │ cancel, deadline, violation, disconnect
//!    ├─ policy abort ─► Fenced ── provider returns, or close grace passes and it is dropped ─► free the place ─► terminal, or none
//!    └─ policy drain ─► terminal, or none; a reader of the Node takes the call and the place over (NOD-9)
//! Running ── the watchdog claims a stall ─► [`join`]: fenced; the call closes beside a probe ─► terminal, or none
//! ```
//!
//! Under `drain` the run is over at once and for everybody; the call is not told. The reader throws away what still comes, up
//! to the end of the answer or [`READ_OUT_LIMIT`], and only then the place is free. So the Edge may learn of the end before the
//! place is free, and its next run on a full adapter is told `busy`: that is the price for engines that crash on aborts.
//! A call that has not begun, or has returned, is not read: there is nothing to spare.
//!
//! The provider's end, too, is read only while there is room, that is when everything before it has credit: a success
//! never waits in the outbox behind output that is blocked, so until it is sent a run can be cancelled.
//!
//! Priority when several are ready at once: disconnect, deadline, cancel, the provider's own end, a stall (WDG-2).
//!
//! The stall watchdog (`state/watchdog.rs`) sits in [`Work::drive`]: it is told every item before it is sent, and when the
//! run is held back by missing credit. An item costs it one look at the clock per wake-up; its timer is armed once per stall
//! timeout, not per item.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_core::Stream;
use futures_util::StreamExt;
use iop_execution::execution::Execution;
use iop_execution::{
    AdapterKey, CallCredential, CancelReason, ExecutionFailure, FailureCode, FailureStage, ProviderContacted, Usage,
};
use iop_wire::{CancelPolicy, OutboxHandle, RunKey, ToEdge};
use tokio::sync::oneshot;
use tokio::time::{Sleep, sleep, sleep_until, timeout};

use crate::background::Background;
use crate::journal::{Closed, EntryKey, RunJournal};
use crate::observe::{NodeObserver, RunOutcome};
use crate::probe::Probe;
use crate::session::now;
use crate::state::admit::CapacityPermit;
use crate::state::emit::{Emitter, Output};
use crate::state::leases::PendingLease;
use crate::state::watchdog::{Ended, Watchdog};

mod join;

/// Items that one run may pass on before other tasks get their turn.
const BURST: usize = 64;
/// Longest time that the answer to a run that is over is read under the policy `drain` (NOD-9). Then the call is dropped.
pub(crate) const READ_OUT_LIMIT: Duration = Duration::from_secs(60);

/// Why a run must stop.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The connection ended: nothing is sent any more.
    Disconnected,
    /// Its hard deadline passed.
    Deadline,
    /// The Edge, or the Node's drain deadline.
    Cancel(CancelReason),
    /// A violation that concerns this run alone.
    Fail(Box<ExecutionFailure>),
}

impl Stop {
    const fn ended(&self) -> Ended {
        match self {
            Self::Disconnected => Ended::Disconnected,
            Self::Deadline => Ended::Deadline,
            Self::Cancel(_) | Self::Fail(_) => Ended::Cancelled,
        }
    }
}

/// What can stop a run: the session, or its deadline.
#[derive(Debug)]
pub(crate) struct Control {
    stop: oneshot::Receiver<Stop>,
    /// Ends with the connection, whatever stopped the run before.
    gone: oneshot::Receiver<()>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Control {
    /// The deadline counts from now: call it on receipt.
    pub(crate) fn new(stop: oneshot::Receiver<Stop>, gone: oneshot::Receiver<()>, deadline: Option<Duration>) -> Self {
        Self { stop, gone, deadline: deadline.map(|deadline| Box::pin(sleep(deadline))) }
    }

    /// Gives one reason; not to be polled afterwards.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Stop> {
        let stop = match Pin::new(&mut self.stop).poll(cx) {
            // A session that is gone without a word is a connection that ended.
            Poll::Ready(stop) => Some(stop.unwrap_or(Stop::Disconnected)),
            Poll::Pending => None,
        };
        if let Some(Stop::Disconnected) = stop {
            return Poll::Ready(Stop::Disconnected);
        }
        let late = self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready());
        if late {
            return Poll::Ready(Stop::Deadline);
        }
        stop.map_or(Poll::Pending, Poll::Ready)
    }

    /// True if the deadline has passed, also where its timer has not fired yet.
    fn is_late(&self, now: Instant) -> bool {
        self.deadline.as_ref().is_some_and(|deadline| deadline.deadline().into_std() <= now)
    }

    /// Ready when the connection is gone; not to be polled afterwards.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.gone).poll(cx).map(|_| ())
    }
}

/// One admitted run or tunnel, with all it needs to proceed.
#[derive(Debug)]
pub(crate) struct Work<E> {
    pub(crate) outbox: OutboxHandle<ToEdge>,
    pub(crate) key: RunKey,
    pub(crate) control: Control,
    pub(crate) emitter: Emitter<E>,
    /// Its place; none once the call is over, or its reader has it.
    pub(crate) permit: Option<CapacityPermit>,
    /// The credential lease its call is made with.
    pub(crate) lease: Option<PendingLease>,
    pub(crate) watchdog: Watchdog,
    pub(crate) adapter: AdapterKey,
    pub(crate) probe: Probe,
    pub(crate) close_grace: Duration,
    pub(crate) cancel_policy: CancelPolicy,
    pub(crate) background: Background,
    pub(crate) observer: Arc<dyn NodeObserver>,
    pub(crate) entry: Entry,
}

/// The journal's entry of one run.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) journal: Arc<dyn RunJournal>,
    pub(crate) key: EntryKey,
    pub(crate) usage: Usage,
}

impl Entry {
    fn note<E: Output>(&mut self, item: &E) {
        if let Some(usage) = item.usage() {
            self.usage.update(usage);
        }
    }

    fn close(self, outcome: RunOutcome) -> RunOutcome {
        self.journal.closed(self.key, Closed { outcome, usage: self.usage });
        outcome
    }
}

/// How the driving of a call ended.
enum Driven<E: Output> {
    /// The provider has returned or was dropped.
    Returned(E, Option<Stop>),
    /// The run is over, the call goes on.
    Detached(Stop, Execution<E>),
    /// It stalled, and nothing of it may be sent any more.
    Claimed(Execution<E>),
}

/// How one look at a run ended.
enum Looked<E> {
    Terminal(Option<E>),
    Detached,
    Claimed,
    /// There may be more: others have their turn first, and this task is woken.
    Cut,
}

impl<E: Output> Work<E> {
    /// Runs the provider call to its end and sends the terminal.
    pub(crate) async fn execute(mut self, execution: Execution<E>) -> RunOutcome {
        self.entry.journal.started(self.entry.key);
        // Idle time begins with the call: what it took to collect a body is not the provider's.
        self.watchdog.start(now());
        let terminal = match self.drive(execution).await {
            Driven::Returned(terminal, stop) => {
                // The provider has returned or was dropped: whoever learns of the end finds the place free.
                self.permit = None;
                match stop {
                    None => Some(terminal),
                    Some(stop) => terminal_of(stop, self.emitter.sent(), ProviderContacted::Unknown),
                }
            }
            Driven::Detached(stop, execution) => {
                if let Some(permit) = self.permit.take() {
                    self.background.spawn(read_out(execution, permit, Arc::clone(&self.observer)));
                }
                terminal_of(stop, self.emitter.sent(), ProviderContacted::Unknown)
            }
            Driven::Claimed(execution) => self.join(execution).await.map(|verdict| self.stalled(&verdict)),
        };
        let Self { outbox, key, mut emitter, entry, .. } = self;
        entry.close(finish(&outbox, key, &mut emitter, terminal))
    }

    /// Opens the lease of the call that is made next, if it needs one: not before there is nothing left to wait for, and not
    /// for a run that is over already (CRD-4).
    pub(crate) fn open_lease(&mut self) -> Result<Option<Arc<CallCredential>>, Stop> {
        let Some(lease) = self.lease.take() else { return Ok(None) };
        let mut cx = Context::from_waker(std::task::Waker::noop());
        if let Poll::Ready(stop) = self.control.poll(&mut cx) {
            return Err(stop);
        }
        let Some(place) = &self.permit else {
            // Only a call that is over has none.
            return Err(Stop::Disconnected);
        };
        lease.open(place, now()).map(|credential| Some(Arc::new(credential))).map_err(Stop::Fail)
    }

    /// Ends a run whose provider was never called.
    pub(crate) fn refuse(self, stop: Stop) -> RunOutcome {
        let Self { outbox, key, mut emitter, permit, entry, .. } = self;
        drop(permit);
        entry.close(finish(&outbox, key, &mut emitter, terminal_of(stop, 0, ProviderContacted::No)))
    }

    /// Passes on what the provider emits until it has ended, or is stuck.
    async fn drive(&mut self, mut execution: Execution<E>) -> Driven<E> {
        let mut stop: Option<Stop> = None;
        let mut grace: Option<Pin<Box<Sleep>>> = None;
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        let looked = poll_fn(|cx| {
            loop {
                if stop.is_none()
                    && let Poll::Ready(reason) = self.control.poll(cx)
                {
                    self.watchdog.end(reason.ended(), now());
                    stop = Some(reason);
                }
                match self.look(&mut execution, &mut stop, &mut grace, cx) {
                    // There may be more that is ready: it is told before the timer looks.
                    Poll::Ready(Looked::Cut) => return Poll::Pending,
                    Poll::Ready(looked) => return Poll::Ready(looked),
                    Poll::Pending => {}
                }
                if stop.is_some() {
                    return Poll::Pending;
                }
                // Everything that was ready is told: now the timer may look.
                ready!(self.poll_watchdog(&mut timer, cx));
                if self.watchdog.is_claimed() {
                    return Poll::Ready(Looked::Claimed);
                }
            }
        })
        .await;
        let terminal = match (looked, stop.take()) {
            (Looked::Claimed, _) => return Driven::Claimed(execution),
            (Looked::Detached, Some(stop)) => return Driven::Detached(stop, execution),
            (Looked::Detached | Looked::Cut, _) => None,
            (Looked::Terminal(terminal), reason) => {
                stop = reason;
                terminal
            }
        };
        let late = execution.late_pushes();
        if late > 0 {
            self.observer.late_pushes(late);
        }
        drop(execution);
        // An execution ends with a terminal; a missing one is a defect of ours, not a reason to say nothing.
        let terminal = terminal.unwrap_or_else(|| {
            let message = "the execution ended without a terminal";
            let (code, stage) = (FailureCode::Internal, FailureStage::Close);
            E::failed(0, ExecutionFailure::new(code, stage, ProviderContacted::Unknown, message))
        });
        Driven::Returned(terminal, stop)
    }

    /// Passes on what is here. Pending: nothing more is, or there is no room for it.
    fn look(
        &mut self,
        execution: &mut Execution<E>,
        stop: &mut Option<Stop>,
        grace: &mut Option<Pin<Box<Sleep>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Looked<E>> {
        let mut clock: Option<Instant> = None;
        for _ in 0..BURST {
            if stop.is_some() && !execution.is_cancelled() {
                if self.cancel_policy == CancelPolicy::Drain && execution.has_begun() && !execution.is_returned() {
                    return Poll::Ready(Looked::Detached);
                }
                execution.cancel(CancelReason::Withdrawn);
                if !execution.has_begun() {
                    // Nothing was asked of the backend, and nothing will be.
                    execution.abandon();
                }
                *grace = Some(Box::pin(sleep(self.close_grace)));
            }
            if grace.as_mut().is_some_and(|grace| grace.as_mut().poll(cx).is_ready()) {
                *grace = None;
                execution.abandon();
            }
            if stop.is_none() {
                // No credit, no reading (WIR-16), and no idle time. A stop wakes this task too.
                if self.outbox.poll_room(self.key, cx).is_pending() {
                    if !self.watchdog.is_suspended() {
                        self.watchdog.suspend(now());
                    }
                    return Poll::Pending;
                }
                if self.watchdog.is_suspended() {
                    self.watchdog.resume(now());
                }
                if let Some(message) = self.emitter.pop() {
                    self.outbox.push(self.key, message);
                    continue;
                }
                self.watchdog.emitted();
            }
            let Some(item) = ready!(Pin::new(&mut *execution).poll_next(cx)) else {
                return Poll::Ready(Looked::Terminal(None));
            };
            self.entry.note(&item);
            if item.outcome().is_some() {
                self.watchdog.end(Ended::Provider, now());
                return Poll::Ready(Looked::Terminal(Some(item)));
            }
            if stop.is_some() || !self.watchdog.begin(self.emitter.activity(&item), *clock.get_or_insert_with(now)) {
                continue;
            }
            match self.emitter.accept(item) {
                Ok(()) => {
                    if let Some(message) = self.emitter.pop() {
                        self.outbox.push(self.key, message);
                    }
                }
                Err(oversize) => {
                    self.watchdog.end(Ended::Cancelled, now());
                    *stop = Some(Stop::Fail(Box::new(ExecutionFailure::new(
                        FailureCode::ProviderProtocol,
                        FailureStage::Stream,
                        ProviderContacted::Yes,
                        oversize.to_string(),
                    ))));
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Ready(Looked::Cut)
    }

    /// Ready when the watchdog has looked: the caller looks too. Pending: it wakes this task when it is time.
    fn poll_watchdog(&mut self, timer: &mut Option<Pin<Box<Sleep>>>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some(due) = self.watchdog.poll_timeout() else { return Poll::Pending };
            let armed = timer.get_or_insert_with(|| Box::pin(sleep_until(due.into())));
            // One that comes too early looks again; one that would come too late is moved.
            if armed.deadline().into_std() > due {
                armed.as_mut().reset(due.into());
            }
            ready!(armed.as_mut().poll(cx));
            *timer = None;
            let now = now();
            if due > now {
                continue;
            }
            if self.control.is_late(now) {
                // The deadline is due in the same instant and wins, although its timer is yet to fire (WDG-2).
                return Poll::Pending;
            }
            self.watchdog.handle_timeout(now);
            return Poll::Ready(());
        }
    }
}

/// Reads what still comes of a run that is over, then frees its place. Bound to no connection.
async fn read_out<E: Output>(mut execution: Execution<E>, permit: CapacityPermit, observer: Arc<dyn NodeObserver>) {
    observer.read_out_began();
    let mut late = 0;
    let reading = async {
        while let Some(item) = execution.next().await {
            late += u64::from(item.outcome().is_none());
            if late.is_multiple_of(BURST as u64) {
                tokio::task::yield_now().await;
            }
        }
    };
    let cut = timeout(READ_OUT_LIMIT, reading).await.is_err();
    if cut {
        tracing::warn!(limit_s = READ_OUT_LIMIT.as_secs(), "the answer to a run that is over did not end: closed");
    }
    // First the call, then its place: the backend never has one more than there are.
    drop(execution);
    drop(permit);
    if late > 0 {
        observer.late_pushes(late);
    }
    observer.read_out_ended(cut);
}

/// The terminal of a stopped run; none after a disconnect.
fn terminal_of<E: Output>(stop: Stop, sent: u64, contacted: ProviderContacted) -> Option<E> {
    match stop {
        Stop::Disconnected => None,
        Stop::Cancel(reason) => Some(E::cancelled(0, reason)),
        Stop::Fail(failure) => Some(E::failed(0, *failure)),
        Stop::Deadline => {
            let stage = match (contacted, sent) {
                (ProviderContacted::No, _) => FailureStage::Admission,
                // The first message is the start of a run or the head of a tunnel: no output yet.
                (ProviderContacted::Unknown | ProviderContacted::Yes, 0 | 1) => FailureStage::Prefill,
                (ProviderContacted::Unknown | ProviderContacted::Yes, _) => FailureStage::Stream,
            };
            let message = "the deadline of the request passed";
            Some(E::failed(0, ExecutionFailure::new(FailureCode::DeadlineExceeded, stage, contacted, message)))
        }
    }
}

fn finish<E: Output>(
    outbox: &OutboxHandle<ToEdge>,
    key: RunKey,
    emitter: &mut Emitter<E>,
    terminal: Option<E>,
) -> RunOutcome {
    let outcome = terminal.as_ref().and_then(Output::outcome);
    match terminal.and_then(|terminal| emitter.finish(terminal)) {
        Some(message) => {
            outbox.push(key, message);
            outbox.close(key);
        }
        None => outbox.discard(key),
    }
    outcome.unwrap_or(RunOutcome::Abandoned)
}
