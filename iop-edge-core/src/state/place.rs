//! Decides what happens to a place once it is taken: the pre-send fence, cancelling, and every way it comes back.

use std::time::Instant;

use iop_execution::failure::StallDetail;
use iop_execution::{ProviderId, RunId};

use crate::api::SubmitError;
use crate::observe::{EvidenceResult, EvidenceSource, Observation, ProviderLevel, WaitOutcome};
use crate::state::effect::Effect;
use crate::state::id::{AttemptId, ConnectionId, Generation};
use crate::state::ledger::{CapacityLease, ReleaseCause};
use crate::state::timers::Timer;
use crate::state::wear::Verdict;
use crate::state::{CANCEL_GRACE, CancelReached, EdgeState, PreSendEnd, Stage};

impl EdgeState {
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
        match self.attempts.get(&attempt).map(|entry| &entry.stage) {
            Some(Stage::Reserved) => {}
            Some(Stage::Over(end)) => {
                let end = *end;
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
            entry.sent = Some(now);
        }
        self.timers.arm(Timer::Receipt(attempt), now + self.catalog.dispatch_ack_timeout());
        Ok(connection)
    }

    /// The generation a connection's messages are judged by (FEN-1).
    pub(crate) fn generation(&self, connection: ConnectionId) -> Option<Generation> {
        self.registry.generation(connection)
    }

    /// A terminal came from the Node, on a connection of this generation. True if it freed a place; anything else is late
    /// and changes nothing (FEN-4, W11).
    pub(crate) fn handle_terminal(
        &mut self,
        attempt: AttemptId,
        generation: Generation,
        verdict: Verdict,
        now: Instant,
    ) -> bool {
        self.handle_timeout(now);
        if self.ledger.lease(attempt).is_none_or(|lease| lease.generation != generation) {
            return false;
        }
        self.judge(attempt, verdict, now);
        self.finish(attempt, ReleaseCause::Terminal, now)
    }

    /// The answer of a running attempt has begun, and says something about its provider already.
    pub(crate) fn handle_answer(&mut self, attempt: AttemptId, generation: Generation, verdict: Verdict, now: Instant) {
        self.handle_timeout(now);
        if self.ledger.lease(attempt).is_some_and(|lease| lease.generation == generation) {
            self.judge(attempt, verdict, now);
        }
    }

    /// A stall terminal: evidence about its provider, and whether it is one of the place it came for. Called before the place
    /// is released (HLT-1, HLT-2).
    pub(crate) fn handle_stall(
        &mut self,
        attempt: AttemptId,
        generation: Generation,
        stall: &StallDetail,
        now: Instant,
    ) -> Option<ProviderId> {
        self.handle_timeout(now);
        let (source, lease) = (EvidenceSource::Stall, self.ledger.lease(attempt));
        let of_lease = |lease: &&CapacityLease| {
            lease.generation == generation && lease.adapter == stall.adapter && lease.target == stall.target
        };
        let provider = lease.filter(of_lease).map(|lease| lease.provider.clone());
        let serving = self.fleet.serving_mut(generation, &stall.adapter);
        let serving = serving.filter(|state| provider.as_ref() == Some(&state.config.provider_id));
        // A config may have taken the provider away since: the place was its own all the same, and nobody is to be lowered.
        let (Some(provider), Some(state)) = (&provider, serving) else {
            let result = EvidenceResult::Mismatch;
            self.effects.push_back(Effect::Observe(Observation::HealthEvidence { source, result }));
            return provider;
        };
        let provider = provider.clone();
        let health = stall.provider_health();
        let result = state.overlay.stalled(health, stall.health_observation_seq, &stall.adapter, &stall.target);
        let key = state.key;
        self.effects.push_back(Effect::Observe(Observation::HealthEvidence { source, result }));
        if result == EvidenceResult::Applied {
            let to = ProviderLevel::Unavailable;
            self.effects.push_back(Effect::Observe(Observation::HealthTransition { to }));
            self.plan_question(key, now);
            self.resolve_waiters(now);
        }
        Some(provider)
    }

    /// What an answer means for later choices of its provider (SEL-4).
    fn judge(&mut self, attempt: AttemptId, verdict: Verdict, now: Instant) {
        let Some(lease) = self.ledger.lease(attempt) else { return };
        let id = lease.provider.clone();
        let sent = self.attempts.get(&attempt).and_then(|entry| entry.sent);
        let Some(provider) = self.fleet.provider_mut(&id).filter(|provider| provider.node == lease.node) else {
            return;
        };
        match verdict {
            Verdict::Neutral => {}
            Verdict::Good => {
                if let Some(sent) = sent {
                    provider.wear.took(now.saturating_duration_since(sent));
                }
            }
            Verdict::Fault => {
                provider.wear.fault(now);
                self.effects.push_back(Effect::Observe(Observation::Penalised { provider: id }));
            }
            Verdict::Busy { retry_after } => {
                let until = provider.wear.busy(retry_after, now);
                self.timers.arm(Timer::Cooling(provider.key), until);
                self.effects.push_back(Effect::Observe(Observation::Cooling { provider: id }));
                // Who would wait in vain goes now.
                self.pump(now);
            }
        }
    }

    /// The request of a dispatched attempt was taken back before it was written (WIR-9).
    pub(crate) fn handle_withdrawn(&mut self, attempt: AttemptId, now: Instant) -> bool {
        self.finish(attempt, ReleaseCause::SendFailed, now)
    }

    fn finish(&mut self, attempt: AttemptId, cause: ReleaseCause, now: Instant) -> bool {
        match self.attempts.get(&attempt).map(|entry| &entry.stage) {
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
        match self.attempts.get(&attempt).map(|entry| &entry.stage) {
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
