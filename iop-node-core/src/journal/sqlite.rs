//! Decides how the run journal gets into an SQLite file: on a thread of its own, in order, bounded in every direction.
//!
//! A note that is made on a run's path is put into a bounded queue and nothing else; when the queue is full it is dropped and
//! counted. The thread writes what waits in one transaction. A file that can't be opened, written or read is told in the log,
//! once for each kind of trouble, and counted; notes made meanwhile are lost; the file is tried again after [`REOPEN_AFTER`].
//!
//! ```text
//! opened() ── running ── closed() ──► completed | failed | cancelled | abandoned
//!                └── the process died; the same Node starts again ──► interrupted
//! ```
//!
//! Several Nodes may share a file: SQLite's locks keep it whole, each row names its Node and the process that wrote it, and a
//! start marks only rows that earlier processes of the same Node left open. Two processes with the same node name are not meant
//! to run at once (an Edge refuses the second); should they, a row that was marked too early is put right when its run ends.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use iop_execution::Entropy;
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior, params};

use super::{Closed, EntryKey, JournalTrouble, Opened, RunJournal};
use crate::observe::NodeObserver;

/// Where the journal is by default: in the working directory.
pub const DEFAULT_DSN: &str = "file:iop.db?cache=shared&mode=rwc";
/// Most rows by default.
pub const DEFAULT_MAX_ROWS: u64 = 100_000;
/// Oldest row by default.
pub const DEFAULT_MAX_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Most notes that wait to be written.
pub const QUEUE: usize = 4096;
/// Most notes in one transaction.
const BATCH: usize = 256;
/// Most new rows between two looks at the bounds; fewer where few rows are allowed.
const PRUNE_AFTER_ROWS: u64 = 1_000;
/// Longest time between two looks at the bounds.
const PRUNE_EVERY: Duration = Duration::from_secs(10 * 60);
/// How long a file that could not be opened is left alone.
pub const REOPEN_AFTER: Duration = Duration::from_secs(30);
/// How long another one's lock is waited for: in one try within SQLite, and in all tries together. SQLite itself does not wait
/// for locks within a shared cache, nor while a file changes to its write-ahead log.
const BUSY_TRY: Duration = Duration::from_millis(100);
/// See [`BUSY_TRY`].
const BUSY_LIMIT: Duration = Duration::from_secs(1);
/// Pause between two tries.
const BUSY_PAUSE: Duration = Duration::from_millis(5);
/// How long the end of the journal waits for what is still to be written.
pub const CLOSE_WAIT: Duration = Duration::from_secs(2);
/// Version of the table.
const SCHEMA: i64 = 1;

const CREATE: &str = "
CREATE TABLE IF NOT EXISTS iop_runs (
    id INTEGER PRIMARY KEY,
    node TEXT NOT NULL,
    process TEXT NOT NULL,
    entry INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    path TEXT NOT NULL,
    adapter TEXT NOT NULL,
    target TEXT NOT NULL,
    session_id TEXT,
    background INTEGER NOT NULL,
    status TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    started_ms INTEGER,
    ended_ms INTEGER,
    input_tokens INTEGER,
    output_tokens INTEGER,
    reasoning_tokens INTEGER,
    cached_input_tokens INTEGER,
    error_code TEXT,
    UNIQUE (process, entry)
);
CREATE INDEX IF NOT EXISTS iop_runs_created ON iop_runs (created_ms);
CREATE INDEX IF NOT EXISTS iop_runs_running ON iop_runs (node) WHERE status = 'running';
";

/// True for a database that holds something, but no journal: it is somebody else's, and is not touched.
const IS_FOREIGN: &str = "SELECT count(*) > 0 AND count(CASE name WHEN 'iop_runs' THEN 1 END) = 0 FROM sqlite_master";

/// Tells the time of day, in Unix milliseconds.
pub type WallClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Where and how much is written down.
#[derive(Clone)]
#[non_exhaustive]
pub struct SqliteOptions {
    /// SQLite URI or path; relative ones count from the working directory.
    pub dsn: String,
    /// Which Node this is: the same after a restart, another one for another Node. Not a secret.
    pub node: String,
    /// Most rows, of all Nodes in the file. There may be a tenth more, at most 1 000, and what was written at once.
    pub max_rows: u64,
    /// Rows older than this are removed.
    pub max_age: Duration,
    /// The time of day.
    pub clock: WallClock,
}

impl SqliteOptions {
    /// Defaults for this Node.
    #[must_use]
    pub fn new(node: impl Into<String>, clock: WallClock) -> Self {
        Self {
            dsn: DEFAULT_DSN.to_owned(),
            node: node.into(),
            max_rows: DEFAULT_MAX_ROWS,
            max_age: DEFAULT_MAX_AGE,
            clock,
        }
    }
}

impl fmt::Debug for SqliteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteOptions")
            .field("dsn", &self.dsn)
            .field("node", &self.node)
            .field("max_rows", &self.max_rows)
            .field("max_age", &self.max_age)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Note {
    Opened(Box<Opened>),
    Started,
    Closed(Closed),
}

#[derive(Debug)]
struct Stamped {
    entry: u64,
    at_ms: i64,
    note: Note,
}

/// The run journal in an SQLite file. Dropping it writes what waits, for [`CLOSE_WAIT`] at most.
pub struct SqliteJournal {
    clock: WallClock,
    entries: AtomicU64,
    observer: Arc<dyn NodeObserver>,
    /// `None` when it is closing, or never had a thread.
    queue: Option<SyncSender<Stamped>>,
    /// Ends when the thread has.
    done: Mutex<Receiver<()>>,
}

impl SqliteJournal {
    /// Starts writing. Whatever is wrong with the file is told to the observer and the log, by the thread that writes: this
    /// neither waits nor fails.
    #[must_use]
    pub fn open(options: SqliteOptions, observer: Arc<dyn NodeObserver>) -> Self {
        let (queue, notes) = sync_channel(QUEUE);
        let (ended, done) = sync_channel::<()>(1);
        let clock = Arc::clone(&options.clock);
        let process = format!("{:016x}-{}", Entropy::system().number(), std::process::id());
        let mut writer = Writer::new(options, process, Arc::clone(&observer));
        let thread = std::thread::Builder::new().name("iop-journal".to_owned()).spawn(move || {
            writer.run(&notes);
            drop(ended);
        });
        let queue = match thread {
            Ok(_) => Some(queue),
            Err(error) => {
                tracing::warn!(%error, "no run journal: its thread can't be started");
                observer.journal_trouble(JournalTrouble::Other);
                None
            }
        };
        Self { clock, entries: AtomicU64::new(0), observer, queue, done: Mutex::new(done) }
    }

    fn note(&self, entry: u64, note: Note) {
        let stamped = Stamped { entry, at_ms: integer((self.clock)()), note };
        let lost = match &self.queue {
            Some(queue) => match queue.try_send(stamped) {
                Ok(()) => false,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => true,
            },
            None => true,
        };
        if lost {
            self.observer.journal_dropped(1);
        }
    }
}

impl RunJournal for SqliteJournal {
    fn opened(&self, entry: Opened) -> EntryKey {
        let key = self.entries.fetch_add(1, Ordering::Relaxed);
        self.note(key, Note::Opened(Box::new(entry)));
        EntryKey(key)
    }

    fn started(&self, entry: EntryKey) {
        self.note(entry.0, Note::Started);
    }

    fn closed(&self, entry: EntryKey, closed: Closed) {
        self.note(entry.0, Note::Closed(closed));
    }
}

impl fmt::Debug for SqliteJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteJournal").field("entries", &self.entries).finish_non_exhaustive()
    }
}

impl Drop for SqliteJournal {
    fn drop(&mut self) {
        if self.queue.take().is_some() {
            let done = self.done.get_mut().unwrap_or_else(PoisonError::into_inner);
            // A disk that hangs must not hold up the end of the process: what it has not taken is lost.
            if matches!(done.recv_timeout(CLOSE_WAIT), Err(RecvTimeoutError::Timeout)) {
                tracing::warn!("the run journal could not be written to its end");
            }
        }
    }
}

/// What lives on the thread.
struct Writer {
    options: SqliteOptions,
    process: String,
    observer: Arc<dyn NodeObserver>,
    connection: Option<Connection>,
    /// Not before: when a file that could not be opened is tried again.
    retry: Option<Instant>,
    told: HashSet<JournalTrouble>,
    new_rows: u64,
    pruned: Instant,
}

impl Writer {
    fn new(options: SqliteOptions, process: String, observer: Arc<dyn NodeObserver>) -> Self {
        Self {
            options,
            process,
            observer,
            connection: None,
            retry: None,
            told: HashSet::new(),
            new_rows: 0,
            pruned: Instant::now(),
        }
    }

    fn run(&mut self, notes: &Receiver<Stamped>) {
        self.connect();
        loop {
            match notes.recv_timeout(PRUNE_EVERY) {
                Ok(first) => {
                    let mut batch = vec![first];
                    batch.extend(notes.try_iter().take(BATCH - 1));
                    self.write(&batch);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let enough = PRUNE_AFTER_ROWS.min(self.options.max_rows / 10).max(1);
            if self.new_rows >= enough || self.pruned.elapsed() >= PRUNE_EVERY {
                self.prune();
            }
        }
    }

    fn connect(&mut self) {
        match patiently(|| self.prepare(), |trouble| *trouble == JournalTrouble::Busy) {
            Ok(connection) => {
                self.connection = Some(connection);
                self.retry = None;
                self.prune();
            }
            Err(trouble) => {
                self.retry = Some(Instant::now() + REOPEN_AFTER);
                self.tell(trouble);
            }
        }
    }

    fn prepare(&self) -> Result<Connection, JournalTrouble> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_URI;
        let connection = Connection::open_with_flags(&self.options.dsn, flags).map_err(|error| trouble_of(&error))?;
        let set_up = || -> rusqlite::Result<Option<JournalTrouble>> {
            connection.busy_timeout(BUSY_TRY)?;
            let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
            if connection.query_row(IS_FOREIGN, [], |row| row.get(0))? {
                return Ok(Some(JournalTrouble::Foreign));
            }
            if version > SCHEMA {
                return Ok(Some(JournalTrouble::Newer));
            }
            // Where the file system has no shared memory SQLite stays with its old journal, and says so in the answer.
            connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
            connection.execute_batch("PRAGMA synchronous = NORMAL;")?;
            connection.execute_batch(CREATE)?;
            connection.pragma_update(None, "user_version", SCHEMA)?;
            connection.execute(
                "UPDATE iop_runs SET status = 'interrupted' WHERE status = 'running' AND node = ?1 AND process <> ?2",
                params![self.options.node, self.process],
            )?;
            Ok(None)
        };
        match set_up() {
            Ok(None) => Ok(connection),
            Ok(Some(trouble)) => Err(trouble),
            Err(error) => Err(trouble_of(&error)),
        }
    }

    fn write(&mut self, batch: &[Stamped]) {
        if self.connection.is_none() && self.retry.is_none_or(|retry| retry <= Instant::now()) {
            self.connect();
        }
        let Some(connection) = &mut self.connection else {
            self.observer.journal_dropped(batch.len() as u64);
            return;
        };
        let written = patiently(
            || write(connection, &self.options.node, &self.process, batch),
            |error| trouble_of(error) == JournalTrouble::Busy,
        );
        match written {
            Ok(rows) => self.new_rows += rows,
            Err(error) => {
                self.observer.journal_dropped(batch.len() as u64);
                self.failed(&error);
            }
        }
    }

    fn prune(&mut self) {
        self.pruned = Instant::now();
        self.new_rows = 0;
        let Some(connection) = &mut self.connection else { return };
        let age = u64::try_from(self.options.max_age.as_millis()).unwrap_or(u64::MAX);
        let oldest = (self.options.clock)().saturating_sub(age);
        let most = integer(self.options.max_rows);
        let too_many = "DELETE FROM iop_runs WHERE id <= (SELECT id FROM iop_runs ORDER BY id DESC LIMIT 1 OFFSET ?1)";
        let pruned = patiently(
            || {
                connection.execute("DELETE FROM iop_runs WHERE created_ms < ?1", [integer(oldest)])?;
                connection.execute(too_many, [most])
            },
            |error| trouble_of(error) == JournalTrouble::Busy,
        );
        if let Err(error) = pruned {
            self.failed(&error);
        }
    }

    fn failed(&mut self, error: &rusqlite::Error) {
        let trouble = trouble_of(error);
        match trouble {
            JournalTrouble::CantOpen | JournalTrouble::Corrupt | JournalTrouble::Foreign | JournalTrouble::Newer => {
                self.connection = None;
                self.retry = Some(Instant::now() + REOPEN_AFTER);
            }
            JournalTrouble::ReadOnly | JournalTrouble::Full | JournalTrouble::Busy | JournalTrouble::Other => {}
        }
        self.tell(trouble);
    }

    fn tell(&mut self, trouble: JournalTrouble) {
        self.observer.journal_trouble(trouble);
        if self.told.insert(trouble) {
            tracing::warn!(
                dsn = self.options.dsn, %trouble,
                "the run journal can't be written; runs go on without it (this kind of trouble is told once)"
            );
        }
    }
}

/// Tries again while somebody else has the file, within [`BUSY_LIMIT`]. The thread has nothing else to do.
fn patiently<T, E>(mut work: impl FnMut() -> Result<T, E>, is_busy: impl Fn(&E) -> bool) -> Result<T, E> {
    let until = Instant::now() + BUSY_LIMIT;
    loop {
        match work() {
            Err(error) if is_busy(&error) && Instant::now() < until => std::thread::sleep(BUSY_PAUSE),
            outcome => return outcome,
        }
    }
}

/// Writes a batch as a whole. Gives how many rows are new.
fn write(connection: &mut Connection, node: &str, process: &str, batch: &[Stamped]) -> rusqlite::Result<u64> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let rows = write_notes(&transaction, node, process, batch)?;
    transaction.commit()?;
    Ok(rows)
}

fn write_notes(transaction: &Transaction<'_>, node: &str, process: &str, batch: &[Stamped]) -> rusqlite::Result<u64> {
    let mut open = transaction.prepare(
        "INSERT INTO iop_runs (node, process, entry, run_id, path, adapter, target, session_id, background, status, created_ms)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 'running', ?10)",
    )?;
    let mut start = transaction.prepare("UPDATE iop_runs SET started_ms = ?3 WHERE process = ?1 AND entry = ?2")?;
    let mut close = transaction.prepare(
        "UPDATE iop_runs SET ended_ms = ?3, status = ?4, error_code = ?5, input_tokens = ?6, output_tokens = ?7,
         reasoning_tokens = ?8, cached_input_tokens = ?9 WHERE process = ?1 AND entry = ?2",
    )?;
    let mut rows = 0;
    for Stamped { entry, at_ms, note } in batch {
        let entry = integer(*entry);
        match note {
            Note::Opened(opened) => {
                rows += 1;
                open.execute(params![
                    node,
                    process,
                    entry,
                    opened.run_id.to_string(),
                    opened.path.as_str(),
                    opened.adapter.as_str(),
                    opened.target.as_str(),
                    opened.session_id.as_ref().map(iop_execution::SessionId::as_str),
                    opened.background,
                    at_ms,
                ])?;
            }
            Note::Started => {
                start.execute(params![process, entry, at_ms])?;
            }
            Note::Closed(closed) => {
                let usage = closed.usage;
                close.execute(params![
                    process,
                    entry,
                    at_ms,
                    closed.outcome.as_str(),
                    closed.error_code().map(iop_execution::FailureCode::as_str),
                    usage.input_tokens.map(integer),
                    usage.output_tokens.map(integer),
                    usage.reasoning_tokens.map(integer),
                    usage.cached_input_tokens.map(integer),
                ])?;
            }
        }
    }
    Ok(rows)
}

fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn trouble_of(error: &rusqlite::Error) -> JournalTrouble {
    match error.sqlite_error_code() {
        Some(ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => JournalTrouble::CantOpen,
        Some(ErrorCode::ReadOnly) => JournalTrouble::ReadOnly,
        Some(ErrorCode::DiskFull) => JournalTrouble::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => JournalTrouble::Corrupt,
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => JournalTrouble::Busy,
        Some(_) | None => JournalTrouble::Other,
    }
}

#[cfg(test)]
mod tests;
