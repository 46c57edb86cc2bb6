//! Decides who gets a place: admission, waiting, the pre-send fence, cancelling, and every way a place comes back.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use iop_execution::{ModelName, RunId};

use crate::api::{SubmitError, WireKind};
use crate::catalog::Candidate;
use crate::observe::{Observation, WaitOutcome};
use crate::state::effect::{Effect, Grant};
use crate::state::fleet::ProviderState;
use crate::state::id::{AttemptId, ConnectionId, Generation};
use crate::state::ledger::{CapacityLease, ReleaseCause, WorkClass};
use crate::state::queue::{Need, Position};
use crate::state::selection::FreeCandidate;
use crate::state::timers::Timer;
use crate::state::{Attempt, CANCEL_GRACE, CancelReached, EdgeState, PreSendEnd, Stage};

/// Least and most a client is asked to wait before it tries a full queue again.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// One request for a place.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) run_id: RunId,
    pub(crate) model: ModelName,
    /// The wire the caller insists on.
    pub(crate) wire: Option<WireKind>,
    pub(crate) priority: i8,
    pub(crate) deadline: Option<Instant>,
    pub(crate) prompt_tokens_estimate: u32,
}

/// What became of a request for a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Admission {
    Granted(Box<Grant>),
    /// It waits, at most until then.
    Queued(AttemptId, Instant),
}

impl EdgeState {
    /// Asks for a place. Candidates are resolved afresh here and whenever a waiter is looked at (QUE-3).
    pub(crate) fn submit(&mut self, ask: Ask, now: Instant) -> Result<Admission, SubmitError> {
        self.handle_timeout(now);
        // First of all: any other answer says that the name is known (API-15).
        let at = self.groups.find(&ask.model).ok_or(SubmitError::UnknownModel)?;
        let model = &self.groups.get(at).ok_or(SubmitError::UnknownModel)?.model;
        if self.shutting_down {
            return Err(SubmitError::ShuttingDown);
        }
        if ask.deadline.is_some_and(|deadline| deadline <= now) {
            return Err(SubmitError::DeadlineExceeded);
        }
        let long = model.long_context_threshold.is_some_and(|from| ask.prompt_tokens_estimate >= from);
        let class = if long { WorkClass::Long } else { WorkClass::Normal };
        let need = Need { class, wire: ask.wire };
        let (name, bound, queue_timeout) = (model.name.clone(), model.max_waiting, model.queue_timeout);
        if !self.is_eligible(at, need) {
            return Err(SubmitError::Unavailable);
        }

        self.last_attempt += 1;
        let attempt = AttemptId(self.last_attempt);
        let (run_id, deadline) = (ask.run_id, ask.deadline);
        let entry = Attempt { run_id, model: name, since: now, stage: Stage::Reserved };
        self.attempts.insert(attempt, entry);
        self.runs.insert(run_id, attempt);
        if let Some(deadline) = deadline {
            self.timers.arm(Timer::Deadline(attempt), deadline);
        }
        // Nobody who waits is overtaken: whoever could be placed was placed when the place became free.
        if let Some(grant) = self.place(at, need, attempt, now) {
            return Ok(Admission::Granted(Box::new(grant)));
        }
        let position = Position::new(ask.priority, attempt);
        let queued = self.groups.get_mut(at).is_some_and(|group| group.queue.push(need, position, now, bound));
        if !queued {
            self.forget(attempt);
            return Err(SubmitError::QueueFull { retry_after: self.retry_after(at, now) });
        }
        if let Some(entry) = self.attempts.get_mut(&attempt) {
            entry.stage = Stage::Waiting(need, position);
        }
        let until = now + queue_timeout;
        self.timers.arm(Timer::Queue(attempt), until);
        Ok(Admission::Queued(attempt, deadline.map_or(until, |deadline| deadline.min(until))))
    }

    /// How long the first in line has waited: as long will the next one have to.
    fn retry_after(&self, at: usize, now: Instant) -> Duration {
        let oldest = self.groups.get(at).and_then(|group| group.queue.oldest());
        let waited = oldest.map(|since| now.saturating_duration_since(since)).unwrap_or_default();
        waited.clamp(RETRY_AFTER.0, RETRY_AFTER.1)
    }

    /// Providers that could serve this need of a model, busy or not.
    fn eligible(&self, at: usize, need: Need) -> impl Iterator<Item = (&Candidate, &ProviderState, WireKind)> {
        let candidates = self.groups.get(at).into_iter().flat_map(|group| &group.model.candidates);
        candidates.filter_map(move |candidate| {
            let provider = self.fleet.provider(&candidate.provider)?;
            let wire = provider.wire(need.wire)?;
            let limits = provider.online?.limits;
            let ever_fits = match need.class {
                WorkClass::Normal => limits.capacity > 0,
                WorkClass::Long => limits.long > 0,
            };
            ever_fits.then_some((candidate, provider, wire))
        })
    }

    fn is_eligible(&self, at: usize, need: Need) -> bool {
        self.eligible(at, need).next().is_some()
    }

    /// Takes a place for an attempt, if the policy finds one.
    fn place(&mut self, at: usize, need: Need, attempt: AttemptId, now: Instant) -> Option<Grant> {
        let entry = self.attempts.get(&attempt)?;
        let (run_id, queued) = (entry.run_id, now.saturating_duration_since(entry.since));
        let mut free = Vec::new();
        for (candidate, provider, wire) in self.eligible(at, need) {
            let counters = self.ledger.counters(&candidate.provider);
            let Some(online) = provider.online.filter(|online| counters.has_place(need.class, online.limits)) else {
                continue;
            };
            free.push((candidate, provider, wire, online, counters.in_use()));
        }
        let views: Vec<_> = free
            .iter()
            .map(|(candidate, provider, _, online, in_use)| FreeCandidate {
                provider: &candidate.provider,
                in_use: *in_use,
                capacity: online.limits.capacity,
                weight: candidate.weight,
                last_admission: provider.last_admission,
            })
            .collect();
        let chosen = if views.is_empty() { None } else { self.policy.choose(&views) }?;
        let (candidate, provider, wire, online, _) = free.get(chosen)?;
        let lease = CapacityLease {
            attempt,
            node: provider.node.clone(),
            generation: online.generation,
            provider: candidate.provider.clone(),
            adapter: provider.config.adapter.clone(),
            target: candidate.target.clone(),
            class: need.class,
            config_revision: self.catalog.revision(),
        };
        let grant = Grant {
            attempt,
            run_id,
            node: lease.node.clone(),
            provider: lease.provider.clone(),
            adapter: lease.adapter.clone(),
            target: lease.target.clone(),
            wire: *wire,
            class: need.class,
            stall_timeout_ms: provider.config.response_stall_timeout_ms,
            queued,
        };
        let limits = online.limits;
        self.ledger.acquire(lease, limits).ok()?;
        self.fleet.admitted(&grant.provider);
        if let Some(entry) = self.attempts.get_mut(&attempt) {
            entry.stage = Stage::Reserved;
        }
        Some(grant)
    }

    /// Gives free places to whoever may have them: highest priority first, then whoever came first, over all models.
    pub(super) fn pump(&mut self, now: Instant) {
        let mut stuck: Vec<(usize, Need)> = Vec::new();
        loop {
            let heads = (0..self.groups.len()).flat_map(|at| {
                let heads = self.groups.get(at).into_iter().flat_map(|group| group.queue.heads());
                heads.map(move |(need, position)| (position, at, need))
            });
            let Some((position, at, need)) = heads.filter(|(_, at, need)| !stuck.contains(&(*at, *need))).min() else {
                return;
            };
            let attempt = position.attempt();
            match self.place(at, need, attempt, now) {
                None => stuck.push((at, need)),
                Some(grant) => {
                    if let Some(group) = self.groups.get_mut(at) {
                        group.queue.remove(need, position);
                    }
                    self.timers.disarm(Timer::Queue(attempt));
                    self.waited(attempt, WaitOutcome::Admitted, now);
                    self.effects.push_back(Effect::Granted(Box::new(grant)));
                }
            }
        }
    }

    /// Resolves every waiter again after providers went away: who has no candidate left ends now (FEN-2, FEN-3).
    pub(super) fn resolve_waiters(&mut self, now: Instant) {
        let mut hopeless = Vec::new();
        for at in 0..self.groups.len() {
            let Some(group) = self.groups.get(at) else { continue };
            for (need, _) in group.queue.heads() {
                if !self.is_eligible(at, need) {
                    hopeless.extend(group.queue.line(need).map(Position::attempt));
                }
            }
        }
        hopeless.sort_unstable_by_key(|attempt| Reverse(*attempt));
        while let Some(attempt) = hopeless.pop() {
            self.refuse(attempt, SubmitError::Unavailable, WaitOutcome::Unavailable, now);
        }
        self.pump(now);
    }

    fn waited(&mut self, attempt: AttemptId, outcome: WaitOutcome, now: Instant) {
        if let Some(entry) = self.attempts.get(&attempt) {
            let (model, wait) = (entry.model.clone(), now.saturating_duration_since(entry.since));
            self.effects.push_back(Effect::Observe(Observation::Waited { model, wait, outcome }));
        }
    }

    /// Takes a waiter out of its queue. False if the attempt does not wait.
    fn unqueue(&mut self, attempt: AttemptId, outcome: WaitOutcome, now: Instant) -> bool {
        let Some((Stage::Waiting(need, position), model)) =
            self.attempts.get(&attempt).map(|entry| (entry.stage, entry.model.clone()))
        else {
            return false;
        };
        // A model that is no longer listed took its queue with it.
        if let Some(group) = self.groups.find(&model).and_then(|at| self.groups.get_mut(at)) {
            group.queue.remove(need, position);
        }
        self.waited(attempt, outcome, now);
        self.forget(attempt);
        true
    }

    /// Ends a waiter with an error.
    pub(super) fn refuse(&mut self, attempt: AttemptId, error: SubmitError, outcome: WaitOutcome, now: Instant) {
        if self.unqueue(attempt, outcome, now) {
            self.effects.push_back(Effect::Refused { attempt, error });
        }
    }

    /// Takes a reserved attempt's place away; its owner learns it at `dispatch`.
    pub(super) fn give_up(&mut self, attempt: AttemptId, end: PreSendEnd, now: Instant) {
        if let Some(entry) = self.attempts.get_mut(&attempt) {
            entry.stage = Stage::Over(end);
            self.timers.disarm_attempt(attempt);
            self.release(attempt, ReleaseCause::Abandoned);
            self.pump(now);
        }
    }

    /// The pre-send fence (FEN-8): the connection to hand the request to, in the same critical section, or why nothing may
    /// be sent. After an error the attempt is gone.
    pub(crate) fn dispatch(&mut self, attempt: AttemptId, now: Instant) -> Result<ConnectionId, PreSendEnd> {
        self.handle_timeout(now);
        match self.attempts.get(&attempt).map(|entry| entry.stage) {
            Some(Stage::Reserved) => {}
            Some(Stage::Over(end)) => {
                self.forget(attempt);
                return Err(end);
            }
            Some(Stage::Waiting(..) | Stage::Dispatched | Stage::Cancelling) | None => {
                return Err(PreSendEnd::Cancelled);
            }
        }
        let lease = self.ledger.lease(attempt);
        let connection = lease.and_then(|lease| self.registry.dispatchable(&lease.node, lease.generation));
        let Some(connection) = connection else {
            self.forget(attempt);
            self.release(attempt, ReleaseCause::SendFailed);
            self.pump(now);
            return Err(PreSendEnd::Disconnected);
        };
        if let Some(entry) = self.attempts.get_mut(&attempt) {
            entry.stage = Stage::Dispatched;
        }
        Ok(connection)
    }

    /// The generation a connection's messages are judged by (FEN-1).
    pub(crate) fn generation(&self, connection: ConnectionId) -> Option<Generation> {
        self.registry.generation(connection)
    }

    /// A terminal came from the Node, on a connection of this generation. True if it freed a place; anything else is late
    /// and changes nothing (FEN-4, W11).
    pub(crate) fn handle_terminal(&mut self, attempt: AttemptId, generation: Generation, now: Instant) -> bool {
        self.handle_timeout(now);
        if self.ledger.lease(attempt).is_none_or(|lease| lease.generation != generation) {
            return false;
        }
        self.finish(attempt, ReleaseCause::Terminal, now)
    }

    /// The request of a dispatched attempt was taken back before it was written (WIR-9).
    pub(crate) fn handle_withdrawn(&mut self, attempt: AttemptId, now: Instant) -> bool {
        self.finish(attempt, ReleaseCause::SendFailed, now)
    }

    fn finish(&mut self, attempt: AttemptId, cause: ReleaseCause, now: Instant) -> bool {
        match self.attempts.get(&attempt).map(|entry| entry.stage) {
            Some(Stage::Dispatched | Stage::Cancelling) => {}
            Some(Stage::Waiting(..) | Stage::Reserved | Stage::Over(_)) | None => return false,
        }
        self.forget(attempt);
        let released = self.release(attempt, cause);
        self.pump(now);
        released
    }

    /// The attempt of a run.
    pub(crate) fn attempt(&self, run_id: RunId) -> Option<AttemptId> {
        self.runs.get(&run_id).copied()
    }

    /// Ends an attempt for its client. The place of a dispatched one stays taken until the Node's terminal (LEA-6).
    pub(crate) fn cancel(&mut self, attempt: AttemptId, now: Instant) -> CancelReached {
        self.handle_timeout(now);
        match self.attempts.get_mut(&attempt).map(|entry| &mut entry.stage) {
            Some(Stage::Waiting(..)) => {
                self.refuse(attempt, SubmitError::Cancelled, WaitOutcome::Cancelled, now);
                CancelReached::Unsent
            }
            Some(Stage::Reserved) => {
                self.give_up(attempt, PreSendEnd::Cancelled, now);
                CancelReached::Unsent
            }
            Some(stage @ Stage::Dispatched) => {
                *stage = Stage::Cancelling;
                self.timers.disarm_attempt(attempt);
                self.timers.arm(Timer::CancelGrace(attempt), now + CANCEL_GRACE);
                CancelReached::Dispatched
            }
            Some(Stage::Cancelling | Stage::Over(_)) | None => CancelReached::Nothing,
        }
    }

    /// The owner of an attempt that was not dispatched is gone: removes the waiter, or gives the place back (LEA-7).
    pub(crate) fn abandon(&mut self, attempt: AttemptId, now: Instant) {
        self.handle_timeout(now);
        match self.attempts.get(&attempt).map(|entry| entry.stage) {
            Some(Stage::Waiting(..)) => {
                self.unqueue(attempt, WaitOutcome::Cancelled, now);
            }
            Some(Stage::Reserved) => {
                self.forget(attempt);
                self.release(attempt, ReleaseCause::Abandoned);
                self.pump(now);
            }
            Some(Stage::Over(_)) => {
                self.forget(attempt);
            }
            Some(Stage::Dispatched | Stage::Cancelling) | None => {}
        }
    }
}
