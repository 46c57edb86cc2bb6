//! Decides when each backend is asked again what it serves (ADP-5).
//!
//! ```text
//!              poll(): due                 done(lists something): ~30 s
//! waiting ───────────────────► being asked ────────────────────────────► waiting
//!                                          done(silent or lists nothing): 1 s, 2 s, 4 s … 30 s
//! ```
//!
//! A backend is never asked twice at once. All waits are jittered, so that the backends of a Node, and the Nodes of one
//! backend, do not ask in step. It does not decide what is asked, nor who is told.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use iop_execution::AdapterKey;

/// Time from one question to the next while a backend answers and lists something, before jitter.
pub const REFRESH_INTERVAL: Duration = Duration::from_secs(30);
/// First wait after a question without a useful answer, before jitter; it doubles up to [`REFRESH_INTERVAL`].
pub const FIRST_REFRESH_WAIT: Duration = Duration::from_secs(1);
/// Longest time one question may take.
pub const REFRESH_TIMEOUT: Duration = Duration::from_secs(10);

/// One question that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Whom to ask.
    pub adapter: AdapterKey,
    ticket: u64,
}

#[derive(Debug)]
struct Entry {
    /// When to ask; `None` while it is being asked.
    due: Option<Instant>,
    /// Wait after the next useless answer.
    wait: Duration,
    ticket: u64,
}

/// The questions of one connection.
#[derive(Debug, Default)]
pub struct RefreshPlan {
    entries: BTreeMap<AdapterKey, Entry>,
    tickets: u64,
}

impl RefreshPlan {
    /// An instance that was started or asked just now. `useful`: it lists something.
    pub fn add(&mut self, adapter: AdapterKey, useful: bool, now: Instant, random: u32) {
        self.tickets += 1;
        let mut entry = Entry { due: None, wait: FIRST_REFRESH_WAIT, ticket: self.tickets };
        entry.wait_after(useful, now, random);
        self.entries.insert(adapter, entry);
    }

    /// Instances that this does not accept are asked no more.
    pub fn retain(&mut self, mut stays: impl FnMut(&AdapterKey) -> bool) {
        self.entries.retain(|adapter, _| stays(adapter));
    }

    /// True if this instance is asked from time to time.
    #[must_use]
    pub fn contains(&self, adapter: &AdapterKey) -> bool {
        self.entries.contains_key(adapter)
    }

    /// A question that is due. Whoever takes it must give it back with [`Self::done`].
    pub fn poll(&mut self, now: Instant) -> Option<Question> {
        let due = |entry: &Entry| entry.due.is_some_and(|due| due <= now);
        let (adapter, entry) = self.entries.iter_mut().find(|(_, entry)| due(entry))?;
        entry.due = None;
        Some(Question { adapter: adapter.clone(), ticket: entry.ticket })
    }

    /// A question was answered, or was not. One about an instance that was replaced meanwhile changes nothing.
    pub fn done(&mut self, question: &Question, useful: bool, now: Instant, random: u32) {
        let asked = |entry: &&mut Entry| entry.ticket == question.ticket && entry.due.is_none();
        if let Some(entry) = self.entries.get_mut(&question.adapter).filter(asked) {
            entry.wait_after(useful, now, random);
        }
    }

    /// When to call [`Self::poll`] next.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.entries.values().filter_map(|entry| entry.due).min()
    }
}

impl Entry {
    fn wait_after(&mut self, useful: bool, now: Instant, random: u32) {
        let wait = if useful {
            self.wait = FIRST_REFRESH_WAIT;
            REFRESH_INTERVAL
        } else {
            let wait = self.wait;
            self.wait = wait.saturating_mul(2).min(REFRESH_INTERVAL);
            wait
        };
        // Between three quarters and the whole of it.
        self.due = Some(now + wait - super::reconnect::fraction(wait / 4, random));
    }
}

#[cfg(test)]
mod tests;
