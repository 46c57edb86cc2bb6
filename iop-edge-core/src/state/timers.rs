//! Decides what can wake the engine, and when: every deadline of it, in one table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::state::id::{AttemptId, CommandId, ConnectionId, ProviderKey};

/// Everything that can wake the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A connection must have registered, or become ready, by now (REG-1).
    Handshake(ConnectionId),
    /// A request has waited long enough for a place (QUE-2).
    Queue(AttemptId),
    /// The hard deadline of a request (API-14).
    Deadline(AttemptId),
    /// A cancelled attempt should have had its terminal by now (LEA-6).
    CancelGrace(AttemptId),
    /// A request has waited long enough for an absent provider (FEN-3).
    Absence(AttemptId),
    /// A dispatched request should have had its receipt by now (WIR-14).
    Receipt(AttemptId),
    /// A busy provider may be asked again (SEL-4).
    Cooling(ProviderKey),
    /// A command should have been answered by now (EDG-1).
    Command(CommandId),
    /// A lowered provider may be asked about again (HLT-6).
    Question(ProviderKey),
    /// Nodes take no lease of an older revision from now on (CRD-8).
    Revisions,
    /// A Node that another connection claims to be should have answered by now (REG-5).
    Challenge(ConnectionId),
    /// A connection whose identity is worth nothing any more may have finished by now (CRD-10).
    Identity(ConnectionId),
}

/// The armed timers.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    due: BTreeSet<(Instant, Timer)>,
    armed: BTreeMap<Timer, Instant>,
}

impl Timers {
    /// Arms a timer, or moves it.
    pub(crate) fn arm(&mut self, timer: Timer, at: Instant) {
        self.disarm(timer);
        self.armed.insert(timer, at);
        self.due.insert((at, timer));
    }

    /// Arms a timer unless it is armed for an earlier time.
    pub(crate) fn arm_earlier(&mut self, timer: Timer, at: Instant) {
        if self.armed.get(&timer).is_none_or(|armed| *armed > at) {
            self.arm(timer, at);
        }
    }

    pub(crate) fn disarm(&mut self, timer: Timer) {
        if let Some(at) = self.armed.remove(&timer) {
            self.due.remove(&(at, timer));
        }
    }

    pub(crate) fn disarm_attempt(&mut self, attempt: AttemptId) {
        self.disarm(Timer::Queue(attempt));
        self.disarm(Timer::Deadline(attempt));
        self.disarm(Timer::CancelGrace(attempt));
        self.disarm(Timer::Absence(attempt));
        self.disarm(Timer::Receipt(attempt));
    }

    /// Takes out the earliest timer that is due, with when it was due.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<(Instant, Timer)> {
        let (at, timer) = *self.due.first()?;
        if at > now {
            return None;
        }
        self.disarm(timer);
        Some((at, timer))
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// No more timers than there are things to wait for.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn bound_holds(&self, attempts: usize, connections: usize, providers: usize, commands: u64) -> bool {
        let commands = usize::try_from(commands).unwrap_or(usize::MAX);
        self.due.len() == self.armed.len()
            && self.due.len() <= 5 * attempts + 3 * connections + 2 * providers + commands
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        debug_assert_eq!(self.due.len(), self.armed.len());
        self.due.len()
    }
}

#[cfg(test)]
mod tests;
