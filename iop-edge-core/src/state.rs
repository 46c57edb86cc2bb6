//! Decides everything that concerns more than one connection: who is ready, who gets a place, who waits, what a fence
//! takes with it.
//!
//! [`EdgeState`] is a plain value: inputs are `handle_*`, `submit`, `dispatch`, `cancel`, …, each with the time; what
//! has to be done comes out of `poll_effect`, and `poll_timeout` says when to come back. It knows no clock, no task, no
//! socket. A deadline that has passed is applied before the input that comes with a later time. The caller carries out
//! all effects of an input before the next one, under the same lock: that is what makes the order of REG-3 hold.
//!
//! Invariants, checked by `tests/model.rs` after every step of random histories: places in use = leases in the ledger,
//! within the limits at admission, released once; an attempt that has a place does not wait; whoever waits could not be
//! placed; queues are within their bound and nobody waits longer than allowed; a generation that ended owns nothing.

mod admission;
mod command;
mod config;
mod credential;
mod effect;
mod fair;
mod fleet;
#[cfg(feature = "fuzzing")]
#[allow(clippy::panic, clippy::unwrap_used, reason = "a panic is how a target reports")]
pub(crate) mod fuzz;
mod groups;
mod handshake;
mod id;
mod identity;
pub(crate) mod ledger;
mod overlay;
mod place;
mod push;
mod queue;
mod receipt;
mod registry;
mod selection;
mod suspicion;
mod throttle;
mod timers;
mod view;
mod wear;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_execution::{ModelName, NodeId, Principal, RunId};
use iop_wire::{CloseCode, Drain, ToNode};

use crate::api::{SubmitError, Wanted};
use crate::catalog::Catalog;
use crate::observe::{Observation, WaitOutcome};
pub(crate) use admission::{Admission, Ask};
use command::Commands;
pub use credential::REVISION_OVERLAP;
use credential::Revisions;
pub(crate) use credential::{Denial, LeaseOrder, NoOrder};
pub use effect::EdgeNodeEvent;
pub(crate) use effect::Effect;
pub(crate) use effect::Grant;
use fair::FairClock;
use fleet::Fleet;
use groups::Groups;
pub(crate) use handshake::RETRY_CROWDED;
pub(crate) use id::CommandId;
pub use id::{AttemptId, ConnectionId, Generation};
pub use identity::IDENTITY_DRAIN;
use identity::RETURN_GRACE;
pub use ledger::{
    AtCapacity, CapacityLease, CapacityLedger, Ledger, PlaceCounters, PlaceLimits, ReleaseCause, WorkClass,
};
pub(crate) use queue::Avoid;
use queue::Need;
pub(crate) use receipt::PROBE;
use receipt::Probes;
use registry::{Ended, Registry};
pub use selection::{
    FreeCandidate, LeastLoaded, Ordered, PrefixAffinity, RoundRobin, SelectionPolicy, SelectionRequest,
};
pub(crate) use suspicion::{Suspicion, SuspicionAction};
use throttle::Throttle;
use timers::{Timer, Timers};
pub(crate) use wear::Verdict;

/// How long a cancelled run may go without a terminal before its place is quarantined (LEA-6).
pub const CANCEL_GRACE: Duration = Duration::from_secs(15);

/// Where an attempt stands.
///
/// ```text
///  Waiting ──▶ Reserved ──▶ Dispatched ──▶ Cancelling
///     │           │  └─▶ Over      │            │
///     └───────────┴────────┴───────┴────────────┴──▶ gone (no entry)
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    /// In the queue of its model.
    Waiting(Need),
    /// Holds a place; nothing is sent.
    Reserved,
    /// Holds a place; the request was handed to the connection.
    Dispatched,
    /// As dispatched, but ended for its client: the place waits for the Node's terminal (LEA-6).
    Cancelling,
    /// Lost its place before anything was sent; its owner does not know yet.
    Over(PreSendEnd),
}

/// Why an admitted attempt can't be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PreSendEnd {
    Cancelled,
    Deadline,
    /// The generation it was admitted to is gone (FEN-8).
    Disconnected,
}

/// What a request asked for: enough to resolve it again at any time (QUE-3).
#[derive(Debug, Clone)]
struct Wants {
    /// The model, by its own name; none = a direct address.
    model: Option<ModelName>,
    wanted: Option<Wanted>,
    caller: Option<Principal>,
    prompt_tokens: u32,
    /// Hash of caller and leading prompt text; 0 = none.
    prefix: u64,
    avoid: Option<Avoid>,
}

impl Wants {
    /// A direct address: no model, no queue.
    const fn direct(wanted: Option<Wanted>, prompt_tokens: u32) -> Self {
        Self { model: None, wanted, caller: None, prompt_tokens, prefix: 0, avoid: None }
    }
}

#[derive(Debug)]
struct Attempt {
    run_id: RunId,
    wants: Wants,
    since: Instant,
    /// When it was handed to its connection.
    sent: Option<Instant>,
    /// Its Node answered a ping that was sent after it.
    receipt_asked: bool,
    stage: Stage,
}

/// What a cancel reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CancelReached {
    /// A dispatched run: the Node must be told.
    Dispatched,
    /// A request that was not sent yet. It is over.
    Unsent,
    /// Nothing.
    Nothing,
}

/// The whole decision state of one Edge.
#[derive(Debug)]
pub(crate) struct EdgeState {
    catalog: Arc<Catalog>,
    edge_id: String,
    registry: Registry,
    throttle: Throttle,
    fleet: Fleet,
    groups: Groups,
    ledger: Box<dyn CapacityLedger>,
    policy: Box<dyn SelectionPolicy>,
    /// Whose turn it is, over all models.
    clock: FairClock,
    /// Nodes that an operator took out of service.
    held: BTreeSet<NodeId>,
    /// Connections whose identity is worth nothing any more, and when they end at the latest.
    identity_over: BTreeMap<ConnectionId, Instant>,
    probes: Probes,
    commands: Commands,
    revisions: Revisions,
    attempts: HashMap<AttemptId, Attempt>,
    runs: HashMap<RunId, AttemptId>,
    last_attempt: u64,
    timers: Timers,
    effects: VecDeque<Effect>,
    shutting_down: bool,
}

impl EdgeState {
    pub(crate) fn new(
        catalog: Arc<Catalog>,
        edge_id: String,
        ledger: Box<dyn CapacityLedger>,
        policy: Box<dyn SelectionPolicy>,
    ) -> Self {
        let fleet = Fleet::new(&catalog);
        let groups = Groups::new(&catalog, &fleet);
        let revisions = Revisions::new(catalog.credentials());
        Self {
            catalog,
            edge_id,
            registry: Registry::default(),
            throttle: Throttle::default(),
            fleet,
            groups,
            ledger,
            policy,
            clock: FairClock::default(),
            held: BTreeSet::new(),
            identity_over: BTreeMap::new(),
            probes: Probes::default(),
            commands: Commands::default(),
            revisions,
            attempts: HashMap::new(),
            runs: HashMap::new(),
            last_attempt: 0,
            timers: Timers::default(),
            effects: VecDeque::new(),
            shutting_down: false,
        }
    }

    /// The next thing to do.
    pub(crate) fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When `handle_timeout` has something to do, if nothing else happens.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Applies every deadline that has passed. Waits that are over end first: after a pause of this process nothing else that
    /// is due may still give them a place.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        while self.timers.next().is_some_and(|due| due <= now) {
            let mut due: Vec<_> = std::iter::from_fn(|| self.timers.pop_due(now)).collect();
            due.sort_by_key(|(_, timer)| !self.ends_a_wait(*timer));
            due.into_iter().for_each(|(at, timer)| self.timed_out(timer, at, now));
        }
    }

    /// It ends a request that waits.
    fn ends_a_wait(&self, timer: Timer) -> bool {
        match timer {
            Timer::Queue(_) => true,
            Timer::Deadline(attempt) => {
                self.attempts.get(&attempt).is_some_and(|entry| matches!(entry.stage, Stage::Waiting(_)))
            }
            Timer::Handshake(_)
            | Timer::CancelGrace(_)
            | Timer::Absence(_)
            | Timer::Receipt(_)
            | Timer::Cooling(_)
            | Timer::Command(_)
            | Timer::Question(_)
            | Timer::Revisions
            | Timer::Challenge(_)
            | Timer::Identity(_) => false,
        }
    }

    fn timed_out(&mut self, timer: Timer, at: Instant, now: Instant) {
        match timer {
            Timer::Handshake(connection) => {
                if let Some(code) = self.registry.handshake_timeout(connection) {
                    self.close(connection, code, Duration::ZERO, now);
                }
            }
            Timer::Queue(attempt) => self.refuse(attempt, SubmitError::QueueTimeout, WaitOutcome::TimedOut, now),
            Timer::Deadline(attempt) => self.overdue(attempt, now),
            Timer::CancelGrace(attempt) => {
                if self.ledger.quarantine(attempt)
                    && let Some(lease) = self.ledger.lease(attempt)
                {
                    let provider = lease.provider.clone();
                    self.effects.push_back(Effect::Observe(Observation::Quarantined { provider }));
                    self.effects.push_back(Effect::Quarantined { attempt });
                }
            }
            Timer::Absence(attempt) => self.absence_over(attempt, now),
            Timer::Receipt(attempt) => self.receipt_due(attempt),
            Timer::Cooling(_) => self.pump(now),
            Timer::Command(id) => self.command_over(id, now),
            Timer::Question(provider) => self.ask_about(provider, now),
            Timer::Revisions => self.revisions_due(now),
            Timer::Challenge(newcomer) => self.challenge_over(newcomer, at, now),
            Timer::Identity(connection) => self.identity_drained(connection, now),
        }
    }

    fn overdue(&mut self, attempt: AttemptId, now: Instant) {
        match self.attempts.get(&attempt).map(|entry| &entry.stage) {
            Some(Stage::Waiting(..)) => {
                self.refuse(attempt, SubmitError::DeadlineExceeded, WaitOutcome::Deadline, now);
            }
            Some(Stage::Reserved) => self.give_up(attempt, PreSendEnd::Deadline, now),
            Some(Stage::Dispatched) => self.effects.push_back(Effect::Overdue { attempt }),
            Some(Stage::Cancelling | Stage::Over(_)) | None => {}
        }
    }

    /// The connection ended, or must end (its Goodbye is the driver's). Fences what it owned, once (FEN-2).
    pub(crate) fn handle_closed(&mut self, connection: ConnectionId, code: CloseCode, now: Instant) {
        self.handle_timeout(now);
        self.end_connection(connection, code, now);
    }

    /// Ends a connection from this side.
    pub(crate) fn close(&mut self, connection: ConnectionId, code: CloseCode, retry_after: Duration, now: Instant) {
        // The fence first: it takes back requests that are not written, so that none follows the Goodbye.
        self.end_connection(connection, code, now);
        self.effects.push_back(Effect::Close { connection, code, retry_after });
    }

    fn end_connection(&mut self, connection: ConnectionId, code: CloseCode, now: Instant) {
        self.timers.disarm(Timer::Handshake(connection));
        self.timers.disarm(Timer::Challenge(connection));
        self.timers.disarm(Timer::Identity(connection));
        self.identity_over.remove(&connection);
        self.probes.forget(connection);
        self.forget_commands(connection, now);
        let node = match self.registry.close(connection) {
            Ended::Unknown => return,
            Ended::Unclaimed => None,
            Ended::NotReady(claim) => {
                let node = claim.node.clone();
                self.effects.push_back(Effect::Publish(EdgeNodeEvent::NotReady { node: node.clone(), code }));
                self.admit_challenger(&node, now);
                None
            }
            Ended::WasReady(claim) => {
                match code {
                    CloseCode::Restart | CloseCode::IdentityRevoked => {
                        self.fleet.expect_back(&claim.node, Some(now + RETURN_GRACE));
                    }
                    CloseCode::Drained | CloseCode::Shutdown | CloseCode::RemovedFromConfig => {
                        self.fleet.expect_back(&claim.node, None);
                    }
                    CloseCode::Closed
                    | CloseCode::HeartbeatTimeout
                    | CloseCode::ProtocolViolation
                    | CloseCode::FlowControl
                    | CloseCode::ControlOverflow
                    | CloseCode::Superseded
                    | CloseCode::UnsupportedProtocol
                    | CloseCode::RegisterTimeout
                    | CloseCode::ReadyTimeout => self.fleet.expect_back_at_most(&claim.node, now + RETURN_GRACE),
                }
                self.fence(claim.generation, now);
                let (node, generation) = (claim.node.clone(), claim.generation);
                self.effects.push_back(Effect::Publish(EdgeNodeEvent::Disconnected { node, generation, code }));
                self.admit_challenger(&claim.node, now);
                Some(claim.node)
            }
        };
        self.effects.push_back(Effect::Observe(Observation::ConnectionClosed { node, code }));
    }

    /// Takes everything from a generation that ended: leases first, then runs, providers, waiters.
    fn fence(&mut self, generation: Generation, now: Instant) {
        self.fleet.fence(generation);
        for attempt in self.ledger.held_by(generation) {
            self.release(attempt, ReleaseCause::Fenced);
            match self.attempts.get_mut(&attempt).map(|entry| &mut entry.stage) {
                Some(stage @ Stage::Reserved) => *stage = Stage::Over(PreSendEnd::Disconnected),
                Some(Stage::Dispatched | Stage::Cancelling) => {
                    self.forget(attempt);
                    self.effects.push_back(Effect::Disconnected { attempt });
                }
                Some(Stage::Waiting(..) | Stage::Over(_)) | None => {}
            }
        }
        self.resolve_waiters(now);
    }

    /// No new work from now on. Who waits is answered; ready Nodes are told.
    pub(crate) fn begin_shutdown(&mut self, grace: Duration, now: Instant) {
        self.handle_timeout(now);
        self.shutting_down = true;
        for attempt in self.waiting() {
            self.refuse(attempt, SubmitError::ShuttingDown, WaitOutcome::ShuttingDown, now);
        }
        let deadline_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        for connection in self.registry.ids() {
            if self.registry.generation(connection).is_some() {
                let message = ToNode::Drain(Drain { deadline_ms, returning: false });
                self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
            }
        }
    }

    /// Ends every connection. `retry_after` spreads the Nodes' return.
    pub(crate) fn close_all(&mut self, code: CloseCode, mut retry_after: impl FnMut() -> Duration, now: Instant) {
        self.handle_timeout(now);
        for connection in self.registry.ids() {
            self.close(connection, code, retry_after(), now);
        }
    }

    /// Requests in flight for a client: neither waiting nor ended at the Edge already.
    pub(crate) fn open_runs(&self) -> usize {
        let open = |attempt: &&Attempt| matches!(attempt.stage, Stage::Reserved | Stage::Dispatched);
        self.attempts.values().filter(open).count()
    }

    pub(crate) fn is_ready(&self) -> bool {
        !self.shutting_down && self.fleet.providers().iter().any(|provider| provider.wire(None).is_some())
    }

    /// Attempts that wait, oldest first.
    fn waiting(&self) -> Vec<AttemptId> {
        let waiting = self.attempts.iter().filter(|(_, entry)| matches!(entry.stage, Stage::Waiting(..)));
        let mut ids: Vec<_> = waiting.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// Removes every trace of an attempt but its lease.
    fn forget(&mut self, attempt: AttemptId) -> Option<Attempt> {
        self.timers.disarm_attempt(attempt);
        let entry = self.attempts.remove(&attempt)?;
        self.runs.remove(&entry.run_id);
        Some(entry)
    }

    fn release(&mut self, attempt: AttemptId, cause: ReleaseCause) -> bool {
        let Some(lease) = self.ledger.take(attempt) else {
            return false;
        };
        let provider = lease.provider;
        self.effects.push_back(Effect::Observe(Observation::LeaseReleased { provider, cause }));
        true
    }
}

#[cfg(test)]
pub(crate) mod tests;
