//! Decides in which order requests wait for a place: bounded, higher priority first, first come first served within one.
//!
//! Requests of one model that need the same kind of place form one line; lines of different kinds do not block each
//! other (a long request at the head must not hold back a short one that has a place).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

use crate::api::WireKind;
use crate::state::id::AttemptId;
use crate::state::ledger::WorkClass;

/// What kind of place a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Need {
    /// The class of its place.
    pub(crate) class: WorkClass,
    /// The wire it insists on; none = whatever the provider is used by (SEL-3).
    pub(crate) wire: Option<WireKind>,
}

/// Where a request stands in its line: smaller is earlier. Ordered over all models of an Edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    priority: Reverse<i8>,
    arrival: AttemptId,
}

impl Position {
    pub(crate) const fn new(priority: i8, arrival: AttemptId) -> Self {
        Self { priority: Reverse(priority), arrival }
    }

    /// The request that stands there.
    pub(crate) const fn attempt(self) -> AttemptId {
        self.arrival
    }
}

/// The queue of one model.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    lines: BTreeMap<Need, BTreeMap<Position, Instant>>,
    waiting: usize,
}

impl WaitQueue {
    /// Lets a request wait unless `bound` wait already. True if it waits.
    pub(crate) fn push(&mut self, need: Need, position: Position, since: Instant, bound: usize) -> bool {
        if self.waiting >= bound {
            return false;
        }
        if self.lines.entry(need).or_default().insert(position, since).is_none() {
            self.waiting += 1;
        }
        true
    }

    /// Takes a request out. False if it does not wait here.
    pub(crate) fn remove(&mut self, need: Need, position: Position) -> bool {
        let Some(line) = self.lines.get_mut(&need) else {
            return false;
        };
        if line.remove(&position).is_none() {
            return false;
        }
        self.waiting -= 1;
        if line.is_empty() {
            self.lines.remove(&need);
        }
        true
    }

    /// First of each line.
    pub(crate) fn heads(&self) -> impl Iterator<Item = (Need, Position)> {
        self.lines.iter().filter_map(|(need, line)| Some((*need, *line.first_key_value()?.0)))
    }

    /// Everyone who needs such a place, first to last.
    pub(crate) fn line(&self, need: Need) -> impl Iterator<Item = Position> {
        self.lines.get(&need).into_iter().flat_map(|line| line.keys().copied())
    }

    pub(crate) const fn len(&self) -> usize {
        self.waiting
    }

    /// Since when the one who came first has waited.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.lines.values().flat_map(BTreeMap::values).min().copied()
    }
}

#[cfg(test)]
mod tests;
