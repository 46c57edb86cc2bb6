use std::path::PathBuf;
use std::sync::atomic::AtomicU32;

use iop_execution::{AdapterKey, CancelReason, FailureCode, RunId, SessionId, Target, Usage};

use super::*;
use crate::observe::{RunOutcome, RunPath};

/// A directory of one test, removed with it.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("iop-journal-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("iop.db")
    }

    fn dsn(&self) -> String {
        format!("file:{}?cache=shared&mode=rwc", self.file().display())
    }

    fn read<T>(&self, sql: &str, row: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>) -> Vec<T> {
        let connection = Connection::open(self.file()).unwrap();
        let mut statement = connection.prepare(sql).unwrap();
        statement.query_map([], row).unwrap().map(Result::unwrap).collect()
    }

    fn statuses(&self) -> Vec<String> {
        self.read("SELECT status FROM iop_runs ORDER BY id", |row| row.get(0))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Debug, Default)]
struct Told(Mutex<(u64, Vec<JournalTrouble>)>);

impl Told {
    fn dropped(&self) -> u64 {
        self.0.lock().unwrap().0
    }

    fn troubles(&self) -> Vec<JournalTrouble> {
        self.0.lock().unwrap().1.clone()
    }
}

impl NodeObserver for Told {
    fn journal_dropped(&self, count: u64) {
        self.0.lock().unwrap().0 += count;
    }

    fn journal_trouble(&self, trouble: JournalTrouble) {
        self.0.lock().unwrap().1.push(trouble);
    }
}

/// Counts up by a second each time it is looked at.
fn clock() -> WallClock {
    let now = AtomicU64::new(1_000_000);
    Arc::new(move || now.fetch_add(1_000, Ordering::Relaxed))
}

fn options(dir: &Dir) -> SqliteOptions {
    SqliteOptions { dsn: dir.dsn(), ..SqliteOptions::new("node-1", clock()) }
}

fn open(options: SqliteOptions) -> (SqliteJournal, Arc<Told>) {
    let told = Arc::new(Told::default());
    let observer = Arc::clone(&told) as Arc<dyn NodeObserver>;
    (SqliteJournal::open(options, observer), told)
}

/// As a drop, but however long the machine takes.
fn close(mut journal: SqliteJournal) {
    journal.queue = None;
    let _ended = journal.done.get_mut().unwrap().recv();
}

fn run(path: RunPath) -> Opened {
    Opened {
        run_id: RunId::from_bytes([7; 16]),
        path,
        adapter: AdapterKey::new("a").unwrap(),
        target: Target::new("org/model:7b").unwrap(),
        session_id: Some(SessionId::new("session'); DROP TABLE iop_runs; --").unwrap()),
        background: true,
    }
}

const fn ended(outcome: RunOutcome) -> Closed {
    let usage = Usage { input_tokens: None, output_tokens: None, reasoning_tokens: None, cached_input_tokens: None };
    Closed { outcome, usage }
}

#[test]
fn a_run_and_a_tunnel_are_written_down_with_times_usage_and_code() {
    // NOD-7
    let dir = Dir::new();
    let (journal, told) = open(options(&dir));
    let first = journal.opened(run(RunPath::Run));
    journal.started(first);
    let second = journal.opened(Opened { session_id: None, background: false, ..run(RunPath::Tunnel) });
    let usage = Usage { input_tokens: Some(3), output_tokens: Some(0), ..Usage::default() };
    journal.closed(first, Closed { outcome: RunOutcome::Completed, usage });
    journal.closed(second, ended(RunOutcome::Failed(FailureCode::DeadlineExceeded)));
    for outcome in [RunOutcome::Cancelled(CancelReason::Client), RunOutcome::Abandoned] {
        let entry = journal.opened(run(RunPath::Run));
        journal.closed(entry, ended(outcome));
    }
    drop(journal);
    let rows = dir.read(
        "SELECT node, path, adapter || ' ' || target, session_id, background, status, created_ms, started_ms, ended_ms,
         input_tokens, output_tokens, error_code FROM iop_runs ORDER BY id LIMIT 2",
        |row| {
            let text = |at| row.get::<_, Option<String>>(at);
            let number = |at| row.get::<_, Option<i64>>(at);
            Ok((
                [text(0)?, text(1)?, text(2)?, text(3)?, text(5)?, text(11)?].map(Option::unwrap_or_default),
                [number(4)?, number(6)?, number(7)?, number(8)?, number(9)?, number(10)?],
            ))
        },
    );
    let session = "session'); DROP TABLE iop_runs; --";
    assert_eq!(rows[0].0, ["node-1", "run", "a org/model:7b", session, "completed", ""]);
    assert_eq!(rows[0].1[0], Some(1));
    assert_eq!(rows[0].1[4..], [Some(3), Some(0)], "absent is not zero, zero is not absent");
    let [created, started, ended] = [rows[0].1[1], rows[0].1[2], rows[0].1[3]].map(Option::unwrap);
    assert!(created < started && started < ended);
    assert_eq!(rows[1].0, ["node-1", "tunnel", "a org/model:7b", "", "failed", "deadline_exceeded"]);
    assert_eq!((rows[1].1[0], rows[1].1[2], rows[1].1[4]), (Some(0), None, None));
    assert_eq!(dir.statuses(), ["completed", "failed", "cancelled", "abandoned"]);
    assert_eq!((told.dropped(), told.troubles()), (0, vec![]));
}

#[test]
fn runs_left_open_by_a_crash_are_interrupted_at_the_next_start_and_those_of_others_are_not() {
    // NOD-7
    let dir = Dir::new();
    let (crashed, _) = open(options(&dir));
    let open_run = crashed.opened(run(RunPath::Run));
    let done = crashed.opened(run(RunPath::Run));
    crashed.closed(done, ended(RunOutcome::Completed));
    // To the file a process that is gone looks like one that says nothing more.
    close(crashed);
    let (neighbour, _) = open(SqliteOptions { node: "node-2".into(), ..options(&dir) });
    let _still_open = neighbour.opened(run(RunPath::Run));
    close(neighbour);
    assert_eq!(dir.statuses(), ["running", "completed", "running"]);
    let (again, told) = open(options(&dir));
    let mine = again.opened(run(RunPath::Run));
    close(again);
    assert_eq!(dir.statuses(), ["interrupted", "completed", "running", "running"]);
    assert_eq!((open_run, mine), (EntryKey(0), EntryKey(0)), "keys are a process's own: rows do not mix");
    assert_eq!(told.troubles(), []);
}

#[test]
fn two_nodes_write_one_file_at_once() {
    // NOD-7
    let dir = Dir::new();
    std::thread::scope(|scope| {
        for node in ["one", "two", "three"] {
            let dir = &dir;
            scope.spawn(move || {
                let (journal, told) = open(SqliteOptions { node: node.into(), ..options(dir) });
                for _ in 0..500 {
                    let entry = journal.opened(run(RunPath::Run));
                    journal.closed(entry, ended(RunOutcome::Completed));
                }
                close(journal);
                assert_eq!((told.dropped(), told.troubles()), (0, vec![]), "{node}");
            });
        }
    });
    assert_eq!(dir.statuses(), vec!["completed"; 1500]);
    assert_eq!(dir.read("PRAGMA integrity_check", |row| row.get::<_, String>(0)), ["ok"]);
}

#[test]
fn a_file_that_is_no_database_or_can_not_be_made_or_written_fails_nothing() {
    // NOD-7
    let dir = Dir::new();
    std::fs::write(dir.file(), "certainly no SQLite file, but long enough to be taken for a header of one").unwrap();
    let (_, missing) = (Dir::new(), "file:/nowhere/at/all/iop.db?mode=rwc".to_owned());
    let written = Dir::new();
    close(open(options(&written)).0);
    let read_only = format!("file:{}?mode=ro", written.file().display());
    for (dsn, trouble) in [
        (dir.dsn(), JournalTrouble::Corrupt),
        (missing, JournalTrouble::CantOpen),
        (read_only, JournalTrouble::ReadOnly),
        (dir.0.display().to_string(), JournalTrouble::CantOpen),
    ] {
        let (journal, told) = open(SqliteOptions { dsn: dsn.clone(), ..options(&dir) });
        let entry = journal.opened(run(RunPath::Run));
        journal.closed(entry, ended(RunOutcome::Completed));
        close(journal);
        assert_eq!((told.dropped(), told.troubles()), (2, vec![trouble]), "{dsn}");
    }
    let bytes = std::fs::read(dir.file()).unwrap();
    assert!(bytes.starts_with(b"certainly no SQLite file"), "somebody's file is left as it is");
}

#[test]
fn a_table_of_a_newer_version_is_left_alone() {
    // NOD-7
    let dir = Dir::new();
    Connection::open(dir.file()).unwrap().pragma_update(None, "user_version", SCHEMA + 1).unwrap();
    let (journal, told) = open(options(&dir));
    close(journal);
    assert_eq!(told.troubles(), [JournalTrouble::Newer]);
    assert_eq!(dir.read("SELECT name FROM sqlite_master", |row| row.get::<_, String>(0)), [""; 0]);
}

#[test]
fn a_database_of_somebody_else_is_left_alone() {
    // NOD-7
    let dir = Dir::new();
    Connection::open(dir.file()).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
    let (journal, told) = open(options(&dir));
    let _ = journal.opened(run(RunPath::Run));
    close(journal);
    assert_eq!((told.dropped(), told.troubles()), (1, vec![JournalTrouble::Foreign]));
    assert_eq!(dir.read("SELECT name FROM sqlite_master", |row| row.get::<_, String>(0)), ["theirs"]);
    assert_eq!(dir.read("PRAGMA user_version", |row| row.get::<_, i64>(0)), [0]);
}

#[test]
fn a_full_queue_drops_and_counts_and_nobody_waits() {
    // NOD-7
    let dir = Dir::new();
    close(open(options(&dir)).0);
    let other = Connection::open(dir.file()).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let (journal, told) = open(options(&dir));
    let notes = 3 * QUEUE as u64;
    let began = Instant::now();
    for _ in 0..notes {
        let _ = journal.opened(run(RunPath::Run));
    }
    assert!(began.elapsed() < BUSY_LIMIT, "a note never waits for the file: {:?}", began.elapsed());
    assert!(told.dropped() >= notes - QUEUE as u64 - 2 * BATCH as u64, "{}", told.dropped());
    other.execute_batch("COMMIT").unwrap();
    close(journal);
    let written = dir.statuses().len() as u64;
    assert_eq!(written + told.dropped(), notes, "every note is either written or counted");
}

#[test]
fn rows_are_bounded_by_number_and_by_age() {
    // NOD-7
    let dir = Dir::new();
    let (journal, _) = open(SqliteOptions { max_rows: 20, ..options(&dir) });
    for _ in 0..2_000 {
        let _ = journal.opened(run(RunPath::Run));
        std::thread::yield_now();
    }
    close(journal);
    let rows = dir.statuses().len();
    assert!(rows <= 20 + BATCH, "{rows}: at most one batch too many");
    close(open(SqliteOptions { max_rows: 20, ..options(&dir) }).0);
    assert_eq!(dir.statuses().len(), 20, "a start brings the file to its bounds");
    let created = || dir.read("SELECT created_ms FROM iop_runs ORDER BY id", |row| row.get::<_, i64>(0));
    let mut young = created();
    let newest = *young.last().unwrap();
    let later: WallClock = Arc::new(move || u64::try_from(newest).unwrap() + 5_000);
    close(open(SqliteOptions { max_age: Duration::from_secs(10), clock: later, ..options(&dir) }).0);
    young.retain(|created| *created >= newest - 5_000);
    assert!(!young.is_empty() && young.len() < 20);
    assert_eq!(created(), young);
}

#[test]
fn a_file_that_comes_back_is_written_again() {
    // NOD-7
    let dir = Dir::new();
    let nowhere = dir.0.join("later");
    let dsn = format!("file:{}/iop.db?mode=rwc", nowhere.display());
    let told = Arc::new(Told::default());
    let observer = Arc::clone(&told) as Arc<dyn NodeObserver>;
    let mut writer = Writer::new(SqliteOptions { dsn, ..options(&dir) }, "p".into(), observer);
    let note = |entry| [Stamped { entry, at_ms: 1, note: Note::Opened(Box::new(run(RunPath::Run))) }];
    writer.write(&note(1));
    assert!(writer.connection.is_none() && writer.retry.is_some());
    std::fs::create_dir(&nowhere).unwrap();
    writer.write(&note(2));
    assert_eq!((told.dropped(), told.troubles().len()), (2, 1), "it is left alone for a while");
    writer.retry = Some(Instant::now());
    writer.options.clock = Arc::new(|| 1);
    writer.write(&note(3));
    assert_eq!(told.dropped(), 2);
    let connection = writer.connection.as_ref().unwrap();
    assert_eq!(connection.query_row("SELECT count(*) FROM iop_runs", [], |row| row.get::<_, i64>(0)), Ok(1));
}

#[test]
fn the_table_has_no_place_for_prompts_or_outputs() {
    // NOD-7, CRD-9
    let dir = Dir::new();
    close(open(options(&dir)).0);
    let columns = dir.read("SELECT name FROM pragma_table_info('iop_runs')", |row| row.get::<_, String>(0));
    assert_eq!(
        columns,
        [
            "id",
            "node",
            "process",
            "entry",
            "run_id",
            "path",
            "adapter",
            "target",
            "session_id",
            "background",
            "status",
            "created_ms",
            "started_ms",
            "ended_ms",
            "input_tokens",
            "output_tokens",
            "reasoning_tokens",
            "cached_input_tokens",
            "error_code",
        ]
    );
    let debug = format!("{:?}", options(&dir));
    assert!(debug.contains("node-1"), "{debug}");
}
