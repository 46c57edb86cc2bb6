//! Decides how an input reaches the engine: one short critical section that also carries out what follows from it.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use iop_execution::{CancelReason, Entropy, ProviderContacted, RunId};
use iop_wire::{CancelOutcome, CloseCode, CommandResult, HeartbeatProfile};
use tokio::sync::{Notify, oneshot};

use crate::api::{CommandError, EndNote, SubmitError};
use crate::driver::connection::Connection;
use crate::driver::pool::Pool;
use crate::driver::run::{LocalEnd, Run};
use crate::events::{Bus, RunNotice};
use crate::observe::{Observation, Observer};
use crate::state::{AttemptId, CancelReached, CommandId, ConnectionId, EdgeNodeEvent, EdgeState, Effect, Grant};
use crate::wake::Wakers;

/// How long a client may leave output waiting before its run is cancelled (WIR-16).
pub(crate) const SLOW_CLIENT: Duration = Duration::from_secs(60);
/// Time between looks at slow clients.
pub(crate) const SLOW_CLIENT_TICK: Duration = Duration::from_secs(1);

/// The time, as tokio has it: tests can stop it.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The wall clock in seconds, as it is set now: end times of tokens are judged by it.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The Edge's time: its wall clock when it started, and what the monotonic clock counted since. A wall clock that is set
/// while it runs changes nothing: Nodes measure leases by this time, and a jump would make good ones look expired (CRD-7).
#[derive(Debug, Clone, Copy)]
struct EdgeTime {
    at_start_ms: u64,
    start: Instant,
}

impl EdgeTime {
    fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { at_start_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX), start: now() }
    }

    fn ms_at(self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.start).as_millis();
        self.at_start_ms.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }
}

type Answer = Result<Box<Grant>, SubmitError>;
type Waiter = oneshot::Sender<Answer>;
type Asker = oneshot::Sender<Result<CommandResult, CommandError>>;

/// What a critical section leaves to do once its lock is released, because it runs code of others: wakers, the observer.
///
/// What must keep its order towards a Node is not here: it goes into the connection's outbox under the lock. A Goodbye can
/// wait: nothing follows it, and the engine knows the connection no more.
#[derive(Debug, Default)]
struct After {
    wakers: Wakers,
    answers: Vec<(Waiter, Answer)>,
    commanded: Vec<(Asker, Result<CommandResult, CommandError>)>,
    goodbyes: Vec<(Arc<Connection>, CloseCode, Duration)>,
    observations: Vec<Observation>,
    /// The timer task has to look sooner.
    rearm: bool,
    /// A run ended for its client, though its place is still taken.
    ended: bool,
}

impl After {
    fn carry_out(self, shared: &Shared) {
        for (connection, code, retry_after) in self.goodbyes {
            connection.say_goodbye(code, retry_after);
        }
        // A waiter that is gone gives its place back itself.
        for (waiter, answer) in self.answers {
            let _gone = waiter.send(answer);
        }
        for (asker, outcome) in self.commanded {
            let _gone = asker.send(outcome);
        }
        self.wakers.wake();
        if self.rearm {
            shared.rearm.notify_one();
        }
        if self.ended || !self.observations.is_empty() {
            shared.settled.notify_waiters();
        }
        for observation in self.observations {
            shared.observer.observe(&observation);
        }
    }
}

/// What the lock protects.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) state: EdgeState,
    pub(crate) waiters: HashMap<AttemptId, Waiter>,
    /// Callers that wait for the answer to a command.
    pub(crate) askers: HashMap<CommandId, Asker>,
    /// Dispatched runs that hold a place.
    pub(crate) runs: HashMap<AttemptId, Arc<Run>>,
    pub(crate) connections: HashMap<ConnectionId, Arc<Connection>>,
    /// When the timer task will look by itself.
    armed: Option<Instant>,
    after: After,
}

/// One Edge.
#[derive(Debug)]
pub(crate) struct Shared {
    core: Mutex<Core>,
    pub(crate) pool: Pool,
    pub(crate) nodes: Bus<EdgeNodeEvent>,
    pub(crate) runs: Bus<Arc<RunNotice>>,
    pub(crate) heartbeat: HeartbeatProfile,
    pub(crate) entropy: Entropy,
    time: EdgeTime,
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
    pub(crate) fn new(
        state: EdgeState,
        pool: Pool,
        heartbeat: HeartbeatProfile,
        entropy: Entropy,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let core = Core {
            state,
            waiters: HashMap::new(),
            askers: HashMap::new(),
            runs: HashMap::new(),
            connections: HashMap::new(),
            armed: None,
            after: After::default(),
        };
        Self {
            core: Mutex::new(core),
            pool,
            nodes: Bus::default(),
            runs: Bus::default(),
            heartbeat,
            entropy,
            time: EdgeTime::new(),
            observer,
            streams: Mutex::new(HashMap::new()),
            rearm: Notify::new(),
            settled: Notify::new(),
            attached: AtomicUsize::new(0),
        }
    }

    /// Runs an input and everything that follows from it in one critical section; wakes tasks and tells the observer
    /// afterwards.
    pub(crate) fn with<R>(&self, input: impl FnOnce(&mut Core, Instant) -> R) -> R {
        let (result, after) = {
            // The state is consistent after every input; a panic of a policy of the embedder poisons nothing more.
            let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
            let now = now();
            let result = input(&mut core, now);
            core.carry_out(self, now);
            let next = core.state.poll_timeout();
            if next.is_some_and(|next| core.armed.is_none_or(|armed| next < armed)) {
                core.armed = next;
                core.after.rearm = true;
            }
            (result, std::mem::take(&mut core.after))
        };
        after.carry_out(self);
        result
    }

    /// Pieces that wait for clients.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.streams().values().map(|run| run.waiting()).sum()
    }

    /// Nobody is in the critical section.
    #[cfg(test)]
    pub(crate) fn is_free(&self) -> bool {
        self.core.try_lock().is_ok()
    }

    pub(crate) fn observe(&self, observation: &Observation) {
        self.observer.observe(observation);
    }

    /// The Edge's time, in Unix milliseconds: what Nodes are told, and what leases are issued at.
    pub(crate) fn edge_time_ms(&self) -> u64 {
        self.time.ms_at(now())
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
        let mut runs: Vec<_> = self.streams().values().filter(slow).map(Arc::clone).collect();
        runs.sort_unstable_by_key(|run| run.attempt);
        for run in runs {
            self.cancel_held(&run, CancelReason::SlowClient);
        }
    }

    /// Lets every client's time to read begin again.
    pub(crate) fn excuse_clients(&self) {
        let now = now();
        self.streams().values().for_each(|run| run.excuse(now));
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
                self.after.ended = true;
                run.end(end, now, &mut self.after.wakers)
            }
        }
    }

    /// Ends what a suspect runs and no client has seen anything of; the places follow LEA-6 (FEN-7).
    pub(crate) fn withdraw(&mut self, connection: ConnectionId, now: Instant) {
        let of_connection = |run: &&Arc<Run>| run.connection.id == connection && run.is_uncommitted();
        let mut attempts: Vec<_> = self.runs.values().filter(of_connection).map(|run| run.attempt).collect();
        attempts.sort_unstable();
        for attempt in attempts {
            let ended =
                self.end_as(attempt, CancelReason::Withdrawn, LocalEnd::Suspect, now) || self.end_silent(attempt, now);
            if ended && let Some(node) = self.state.node_of(connection) {
                self.after.observations.push(Observation::Withdrawn { node });
            }
        }
    }

    /// A request whose receipt was given up, and whose Node says nothing at all any more: nothing is waited for (FEN-7).
    fn end_silent(&mut self, attempt: AttemptId, now: Instant) -> bool {
        let Some(run) = self.runs.get(&attempt).filter(|run| run.unacknowledged().is_some()).map(Arc::clone) else {
            return false;
        };
        self.after.ended = true;
        run.end(LocalEnd::Suspect, now, &mut self.after.wakers)
    }

    /// The Node answers, but has never confirmed a request: takes it back (WIR-14). Its client learns it once the Node says
    /// that it does not run, or has not said so in time.
    fn give_up_receipt(&mut self, attempt: AttemptId, now: Instant) {
        let Some(run) = self.runs.get(&attempt).map(Arc::clone) else { return };
        if self.state.cancel(attempt, now) != CancelReached::Dispatched {
            return;
        }
        run.give_up_receipt();
        match run.connection.outbox.cancel(run.key, CancelReason::Withdrawn) {
            CancelOutcome::Withdrawn => {
                self.state.handle_withdrawn(attempt, now);
                self.forget(attempt);
                if let Some(end) = run.unacknowledged() {
                    run.end(end, now, &mut self.after.wakers);
                }
            }
            CancelOutcome::Queued | CancelOutcome::Unknown => {}
        }
    }

    /// Nothing of this run is expected from its Node any more.
    pub(crate) fn forget(&mut self, attempt: AttemptId) -> Option<Arc<Run>> {
        let run = self.runs.remove(&attempt)?;
        if run.lease_is_lost() {
            self.after.observations.push(Observation::CredentialUnused);
        }
        run.connection.forget(run.key);
        Some(run)
    }

    fn carry_out(&mut self, shared: &Shared, now: Instant) {
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
                        self.after.goodbyes.push((connection, code, retry_after));
                    }
                }
                Effect::Granted(grant) => {
                    if let Some(waiter) = self.waiters.remove(&grant.attempt) {
                        self.after.answers.push((waiter, Ok(grant)));
                    }
                }
                Effect::Refused { attempt, error } => {
                    if let Some(waiter) = self.waiters.remove(&attempt) {
                        self.after.answers.push((waiter, Err(error)));
                    }
                }
                Effect::Disconnected { attempt } => {
                    if let Some(run) = self.runs.get(&attempt).map(Arc::clone) {
                        let written = run.connection.outbox.is_written(run.key);
                        self.forget(attempt);
                        run.end(LocalEnd::Disconnected { written }, now, &mut self.after.wakers);
                    }
                }
                Effect::CheckReceipt { attempt, answered } => {
                    let run = self.runs.get(&attempt).filter(|run| !run.is_acknowledged());
                    let written = run.map(|run| run.connection.outbox.is_written(run.key));
                    match (written, answered) {
                        (None, _) => {}
                        (Some(false), _) => self.state.receipt_unwritten(attempt, now),
                        (Some(true), false) => self.state.receipt_missing(attempt, now),
                        (Some(true), true) => self.give_up_receipt(attempt, now),
                    }
                }
                Effect::Quarantined { attempt } => {
                    let run = self.runs.get(&attempt).map(Arc::clone);
                    if let Some((run, _)) = run.and_then(|run| run.unacknowledged().map(|end| (run, end))) {
                        // Nothing came that says that it does not run.
                        run.note(EndNote::NotStopped);
                        let end = LocalEnd::Unacknowledged { contacted: ProviderContacted::Unknown };
                        run.end(end, now, &mut self.after.wakers);
                    }
                }
                Effect::Commanded { id, outcome } => {
                    if let Some(asker) = self.askers.remove(&id) {
                        self.after.commanded.push((asker, *outcome));
                    }
                }
                Effect::Overdue { attempt } => {
                    self.end(attempt, CancelReason::EdgeDeadline, now);
                }
                Effect::Publish(event) => shared.nodes.publish(&event, &mut self.after.wakers),
                Effect::Observe(observation) => self.after.observations.push(observation),
            }
        }
    }
}
