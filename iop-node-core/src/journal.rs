//! Decides what a Node writes down about the runs and tunnels it had: when, on what, how it ended (NOD-7).
//!
//! No prompt, output or secret is in it, and nothing reads it back while the Node works: it is for whoever looks into the file
//! afterwards, no query API and no audit trail. Whatever goes wrong with it, no run and no start of a Node notices.

use std::fmt;

use iop_execution::{AdapterKey, FailureCode, RunId, SessionId, Target, Usage};

use crate::observe::{RunOutcome, RunPath};

#[cfg(feature = "journal")]
pub mod sqlite;

/// What is known when work is admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the columns of NOD-7")]
pub struct Opened {
    /// The run.
    pub run_id: RunId,
    /// Run or tunnel.
    pub path: RunPath,
    /// The adapter instance.
    pub adapter: AdapterKey,
    /// The model.
    pub target: Target,
    /// The caller's correlation value.
    pub session_id: Option<SessionId>,
    /// It was said to be background work.
    pub background: bool,
}

/// How a run ended, as the journal says it. `running` and `interrupted` are states of an entry that nobody has closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the columns of NOD-7")]
pub struct Closed {
    /// The outcome.
    pub outcome: RunOutcome,
    /// What the provider reported; empty = nothing.
    pub usage: Usage,
}

impl Closed {
    /// The error code, where there is one.
    #[must_use]
    pub const fn error_code(&self) -> Option<FailureCode> {
        match self.outcome {
            RunOutcome::Failed(code) | RunOutcome::Refused(code) => Some(code),
            RunOutcome::Abandoned | RunOutcome::Cancelled(_) | RunOutcome::Completed => None,
        }
    }
}

/// Names an entry to the journal that gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryKey(pub u64);

/// Writes down what runs. Called on the path of runs: no method may block or fail.
pub trait RunJournal: fmt::Debug + Send + Sync + 'static {
    /// Work was admitted.
    fn opened(&self, entry: Opened) -> EntryKey;
    /// Its provider is called now.
    fn started(&self, entry: EntryKey);
    /// It ended.
    fn closed(&self, entry: EntryKey, closed: Closed);
}

iop_execution::closed_list! {
    /// What keeps a journal from being written.
    JournalTrouble {
        /// The file can't be opened or created.
        CantOpen = "cant_open",
        /// It, or its directory, can't be written.
        ReadOnly = "read_only",
        /// The disk is full.
        Full = "full",
        /// It is no SQLite file, or a broken one.
        Corrupt = "corrupt",
        /// Somebody else keeps it locked.
        Busy = "busy",
        /// It is a database with other things in it.
        Foreign = "foreign",
        /// A newer version of this program made it.
        Newer = "newer",
        /// Anything else.
        Other = "other",
    }
}

/// Writes nothing down.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoJournal;

impl RunJournal for NoJournal {
    fn opened(&self, _: Opened) -> EntryKey {
        EntryKey(0)
    }
    fn started(&self, _: EntryKey) {}
    fn closed(&self, _: EntryKey, _: Closed) {}
}
