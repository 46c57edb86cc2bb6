//! Decides how an input reaches the engine: one short critical section that also carries out what follows from it.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use iop_execution::{CancelReason, RunId};
use iop_wire::{CancelOutcome, CloseCode, HeartbeatProfile};
use tokio::sync::{Notify, oneshot};

use crate::api::SubmitError;
use crate::driver::connection::Connection;
use crate::driver::pool::Pool;
use crate::driver::run::{LocalEnd, Run};
use crate::events::{Bus, RunNotice};
use crate::observe::{Observation, Observer};
use crate::state::{AttemptId, CancelReached, ConnectionId, EdgeNodeEvent, EdgeState, Effect, Grant};

/// How long a client may leave output waiting before its run is cancelled (WIR-16).
pub(crate) const SLOW_CLIENT: Duration = Duration::from_secs(60);
/// Time between looks at slow clients.
pub(crate) const SLOW_CLIENT_TICK: Duration = Duration::from_secs(1);

/// The time, as tokio has it: tests can stop it.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

type Waiter = oneshot::Sender<Result<Box<Grant>, SubmitError>>;

/// What the lock protects.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) state: EdgeState,
    pub(crate) waiters: HashMap<AttemptId, Waiter>,
    /// Dispatched runs that hold a place.
    pub(crate) runs: HashMap<AttemptId, Arc<Run>>,
    pub(crate) connections: HashMap<ConnectionId, Arc<Connection>>,
    /// When the timer task will look by itself.
    armed: Option<Instant>,
}

/// One Edge.
#[derive(Debug)]
pub(crate) struct Shared {
    core: Mutex<Core>,
    pub(crate) pool: Pool,
    pub(crate) nodes: Bus<EdgeNodeEvent>,
    pub(crate) runs: Bus<Arc<RunNotice>>,
    pub(crate) heartbeat: HeartbeatProfile,
    observer: Arc<dyn Observer>,
    /// Runs that a client holds.
    streams: Mutex<HashMap<AttemptId, Arc<Run>>>,
    /// Wakes the timer task.
    pub(crate) rearm: Notify,
    /// Something ended: a shutdown looks again.
    pub(crate) settled: Notify,
    /// Connection tasks that have not returned.
    pub(crate) attached: AtomicUsize,
}

impl Shared {
    pub(crate) fn new(state: EdgeState, pool: Pool, heartbeat: HeartbeatProfile, observer: Arc<dyn Observer>) -> Self {
        let core =
            Core { state, waiters: HashMap::new(), runs: HashMap::new(), connections: HashMap::new(), armed: None };
        Self {
            core: Mutex::new(core),
            pool,
            nodes: Bus::default(),
            runs: Bus::default(),
            heartbeat,
            observer,
            streams: Mutex::new(HashMap::new()),
            rearm: Notify::new(),
            settled: Notify::new(),
            attached: AtomicUsize::new(0),
        }
    }

    /// Runs an input and everything that follows from it in one critical section; tells the observer afterwards.
    pub(crate) fn with<R>(&self, input: impl FnOnce(&mut Core, Instant) -> R) -> R {
        let mut observations = Vec::new();
        let result = {
            // The state is consistent after every input; a panic of a policy of the embedder poisons nothing more.
            let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
            let now = now();
            let result = input(&mut core, now);
            core.carry_out(self, now, &mut observations);
            let next = core.state.poll_timeout();
            if next.is_some_and(|next| core.armed.is_none_or(|armed| next < armed)) {
                core.armed = next;
                self.rearm.notify_one();
            }
            result
        };
        if !observations.is_empty() {
            self.settled.notify_waiters();
        }
        for observation in observations {
            self.observer.observe(&observation);
        }
        result
    }

    pub(crate) fn observe(&self, observation: &Observation) {
        self.observer.observe(observation);
    }

    /// Applies the deadlines that passed. Answers when to come back.
    pub(crate) fn tick(&self) -> Option<Instant> {
        self.with(|core, now| core.state.handle_timeout(now));
        self.with(|core, _| {
            core.armed = core.state.poll_timeout();
            core.armed
        })
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<AttemptId, Arc<Run>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client holds this run from now on.
    pub(crate) fn hold(&self, run: &Arc<Run>) {
        let mut streams = self.streams();
        let first = streams.is_empty();
        streams.insert(run.attempt, Arc::clone(run));
        drop(streams);
        if first {
            self.rearm.notify_one();
        }
    }

    /// The client is gone.
    pub(crate) fn leave(&self, run: &Run) {
        self.streams().remove(&run.attempt);
        if run.leave() {
            self.with(|core, now| core.end(run.attempt, CancelReason::Client, now));
        }
    }

    pub(crate) fn has_streams(&self) -> bool {
        !self.streams().is_empty()
    }

    /// Ends the runs whose client has left something waiting for too long (`slow_client`).
    pub(crate) fn end_slow_clients(&self) {
        let now = now();
        let slow = |run: &&Arc<Run>| run.waiting_since().is_some_and(|since| since + SLOW_CLIENT <= now);
        let runs: Vec<_> = self.streams().values().filter(slow).map(Arc::clone).collect();
        for run in runs {
            self.cancel_held(&run, CancelReason::SlowClient);
        }
    }

    /// Ends the run that has been blocked longest, and the next one, until the pool has room again (WIR-7).
    pub(crate) fn relieve_pool(&self) {
        let mut tried = Vec::new();
        while self.pool.is_exhausted() {
            let blocked = self
                .streams()
                .values()
                .filter(|run| !tried.contains(&run.attempt))
                .filter_map(|run| Some((run.waiting_since()?, Arc::clone(run))))
                .min_by_key(|(since, run)| (*since, run.attempt));
            let Some((_, run)) = blocked else { return };
            tried.push(run.attempt);
            self.cancel_held(&run, CancelReason::ReceivePool);
            self.observe(&Observation::PoolExhausted);
        }
    }

    fn cancel_held(&self, run: &Run, reason: CancelReason) {
        self.with(|core, now| core.end(run.attempt, reason, now));
        run.truncate(reason, now());
    }

    /// Cancels by run id; false if there is no such run (EDG-3).
    pub(crate) fn cancel(&self, run_id: RunId) -> bool {
        self.with(|core, now| {
            let Some(attempt) = core.state.attempt(run_id) else { return false };
            core.end(attempt, CancelReason::Client, now)
        })
    }

    /// A connection's control queue is full.
    pub(crate) fn overflow(&self, connection: ConnectionId) {
        self.with(|core, now| core.state.close(connection, CloseCode::ControlOverflow, Duration::ZERO, now));
    }
}

impl Core {
    /// Ends an attempt at this Edge: its client sees it at once, its place follows LEA-6. False if there was nothing to end.
    pub(crate) fn end(&mut self, attempt: AttemptId, reason: CancelReason, now: Instant) -> bool {
        self.end_as(attempt, reason, LocalEnd::Cancelled(reason), now)
    }

    pub(crate) fn end_as(&mut self, attempt: AttemptId, reason: CancelReason, end: LocalEnd, now: Instant) -> bool {
        match self.state.cancel(attempt, now) {
            CancelReached::Nothing => false,
            CancelReached::Unsent => true,
            CancelReached::Dispatched => {
                let Some(run) = self.runs.get(&attempt).map(Arc::clone) else { return false };
                match run.connection.outbox.cancel(run.key, reason) {
                    CancelOutcome::Withdrawn => {
                        self.state.handle_withdrawn(attempt, now);
                        self.forget(attempt);
                    }
                    CancelOutcome::Queued | CancelOutcome::Unknown => {}
                }
                run.end(end, now)
            }
        }
    }

    /// Nothing of this run is expected from its Node any more.
    pub(crate) fn forget(&mut self, attempt: AttemptId) -> Option<Arc<Run>> {
        let run = self.runs.remove(&attempt)?;
        run.connection.forget(run.key);
        Some(run)
    }

    fn carry_out(&mut self, shared: &Shared, now: Instant, observations: &mut Vec<Observation>) {
        while let Some(effect) = self.state.poll_effect() {
            match effect {
                Effect::Send { connection: id, message } => {
                    let connection = self.connections.get(&id);
                    if connection.is_some_and(|connection| connection.outbox.push_control(*message).is_err()) {
                        self.state.close(id, CloseCode::ControlOverflow, Duration::ZERO, now);
                    }
                }
                Effect::Close { connection, code, retry_after } => {
                    if let Some(connection) = self.connections.remove(&connection) {
                        connection.say_goodbye(code, retry_after);
                    }
                }
                // A waiter that is gone gives its place back itself.
                Effect::Granted(grant) => {
                    if let Some(waiter) = self.waiters.remove(&grant.attempt) {
                        let _gone = waiter.send(Ok(grant));
                    }
                }
                Effect::Refused { attempt, error } => {
                    if let Some(waiter) = self.waiters.remove(&attempt) {
                        let _gone = waiter.send(Err(error));
                    }
                }
                Effect::Disconnected { attempt } => {
                    if let Some(run) = self.runs.get(&attempt).map(Arc::clone) {
                        let written = run.connection.outbox.is_written(run.key);
                        self.forget(attempt);
                        run.end(LocalEnd::Disconnected { written }, now);
                    }
                }
                Effect::Overdue { attempt } => {
                    self.end(attempt, CancelReason::EdgeDeadline, now);
                }
                Effect::Publish(event) => shared.nodes.publish(&event),
                Effect::Observe(observation) => observations.push(observation),
            }
        }
    }
}
