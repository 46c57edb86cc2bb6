//! Decides in which order requests wait for a place: bounded, higher priority first, then whose turn it is among the
//! callers, first come first served within one caller.
//!
//! Requests of one model that need the same kind of place form one line; lines of different kinds do not block each
//! other (a long request at the head must not hold back a short one that has a place).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use iop_execution::{Principal, ProviderId};

use crate::api::Wanted;
use crate::state::fair::{FairClock, Turn};
use crate::state::id::AttemptId;
use crate::state::ledger::WorkClass;

/// What kind of place a request needs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Need {
    /// The class of its place.
    pub(crate) class: WorkClass,
    /// The wire it insists on; none = whatever the provider is used by (SEL-3).
    pub(crate) wanted: Option<Wanted>,
    /// The largest known context among the model's candidates that is too small for it; 0 = none is. Requests between the
    /// same two context lengths need the same.
    pub(crate) too_small: u64,
    /// A provider it would rather not have again (SEL-2).
    pub(crate) avoid: Option<Avoid>,
    /// Candidates whose credential its caller may not use, sorted (CRD-15).
    pub(crate) barred: Vec<ProviderId>,
}

/// A provider that any other eligible one is preferred to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Avoid {
    pub(crate) provider: ProviderId,
    /// It may be chosen when there is no other.
    pub(crate) fallback: bool,
}

/// A request that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) attempt: AttemptId,
    pub(crate) priority: i8,
    pub(crate) caller: Option<Principal>,
    pub(crate) since: Instant,
    /// Places it could have had that went to others while it was the one in its line who came first.
    pub(crate) passed: u32,
}

/// The first of a line.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head<'a> {
    pub(crate) need: &'a Need,
    pub(crate) rank: Rank,
    /// Who came first.
    pub(crate) oldest: AttemptId,
    /// Places that went to others meanwhile.
    pub(crate) passed: u32,
}

/// How the first of a line compares with the first of another: smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    priority: Reverse<i8>,
    turn: Turn,
    /// The request. The one that came first goes first among equals.
    pub(crate) attempt: AttemptId,
}

#[derive(Debug, Default)]
struct Line {
    tickets: BTreeMap<AttemptId, Ticket>,
    turns: BTreeMap<Reverse<i8>, BTreeMap<Option<Principal>, BTreeSet<AttemptId>>>,
}

impl Line {
    fn push(&mut self, ticket: Ticket) -> bool {
        let callers = self.turns.entry(Reverse(ticket.priority)).or_default();
        callers.entry(ticket.caller.clone()).or_default().insert(ticket.attempt);
        self.tickets.insert(ticket.attempt, ticket).is_none()
    }

    fn remove(&mut self, attempt: AttemptId) -> Option<Ticket> {
        let ticket = self.tickets.remove(&attempt)?;
        let priority = Reverse(ticket.priority);
        if let Some(callers) = self.turns.get_mut(&priority) {
            if let Some(own) = callers.get_mut(&ticket.caller) {
                own.remove(&attempt);
                if own.is_empty() {
                    callers.remove(&ticket.caller);
                }
            }
            if callers.is_empty() {
                self.turns.remove(&priority);
            }
        }
        Some(ticket)
    }

    fn head(&self, clock: &FairClock) -> Option<Rank> {
        let (priority, callers) = self.turns.first_key_value()?;
        let heads = callers.iter().filter_map(|(caller, own)| {
            Some(Rank { priority: *priority, turn: clock.turn(caller), attempt: *own.first()? })
        });
        heads.min()
    }
}

/// The queue of one model.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    lines: BTreeMap<Need, Line>,
    waiting: usize,
}

impl WaitQueue {
    /// Lets a request wait unless `bound` wait already. True if it waits.
    pub(crate) fn push(&mut self, need: Need, ticket: Ticket, bound: usize) -> bool {
        if self.waiting >= bound {
            return false;
        }
        if self.lines.entry(need).or_default().push(ticket) {
            self.waiting += 1;
        }
        true
    }

    /// Takes a request out. `None` = it does not wait here.
    pub(crate) fn remove(&mut self, need: &Need, attempt: AttemptId) -> Option<Ticket> {
        let line = self.lines.get_mut(need)?;
        let ticket = line.remove(attempt)?;
        self.waiting -= 1;
        if line.tickets.is_empty() {
            self.lines.remove(need);
        }
        Some(ticket)
    }

    /// First of each line, and who came first there.
    pub(crate) fn heads(&self, clock: &FairClock) -> impl Iterator<Item = Head<'_>> {
        self.lines.iter().filter_map(move |(need, line)| {
            let (oldest, ticket) = line.tickets.first_key_value()?;
            Some(Head { need, rank: line.head(clock)?, oldest: *oldest, passed: ticket.passed })
        })
    }

    /// A place that somebody here could have had went to this attempt.
    pub(crate) fn passed_over(&mut self, by: AttemptId) {
        for line in self.lines.values_mut() {
            if let Some(mut oldest) = line.tickets.first_entry().filter(|oldest| *oldest.key() != by) {
                let ticket = oldest.get_mut();
                ticket.passed = ticket.passed.saturating_add(1);
            }
        }
    }

    /// The kinds of places that are waited for.
    pub(crate) fn needs(&self) -> impl Iterator<Item = &Need> {
        self.lines.keys()
    }

    /// Everyone who needs such a place, in order of arrival.
    pub(crate) fn line(&self, need: &Need) -> impl Iterator<Item = AttemptId> {
        self.lines.get(need).into_iter().flat_map(|line| line.tickets.keys().copied())
    }

    /// Everyone, in order of arrival within each line.
    pub(crate) fn all(&self) -> impl Iterator<Item = AttemptId> {
        self.lines.values().flat_map(|line| line.tickets.keys().copied())
    }

    /// Empties the queue.
    pub(crate) fn take_all(&mut self) -> Vec<Ticket> {
        self.waiting = 0;
        let lines = std::mem::take(&mut self.lines);
        lines.into_values().flat_map(|line| line.tickets.into_values()).collect()
    }

    pub(crate) const fn len(&self) -> usize {
        self.waiting
    }

    /// Since when the one who came first has waited.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.lines.values().flat_map(|line| line.tickets.values()).map(|ticket| ticket.since).min()
    }
}

#[cfg(test)]
mod tests;
