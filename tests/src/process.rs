//! Decides how a binary is started, watched, signalled, and put away.

use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::wire_client::PATIENCE;

/// The programs under test, built by cargo beside the tests. Made by [`programs!`](crate::programs).
#[derive(Debug, Clone, Copy)]
pub struct Programs {
    /// `iop`.
    pub iop: &'static str,
    /// `iop-edge`.
    pub edge: &'static str,
    /// `iop-node`.
    pub node: &'static str,
}

/// The [`Programs`](crate::process::Programs): cargo names their paths to integration tests only.
#[macro_export]
macro_rules! programs {
    () => {
        $crate::process::Programs {
            iop: env!("CARGO_BIN_EXE_iop-under-test"),
            edge: env!("CARGO_BIN_EXE_iop-edge-under-test"),
            node: env!("CARGO_BIN_EXE_iop-node-under-test"),
        }
    };
}

/// Most lines of output that are kept.
pub const MAX_LINES: usize = 20_000;

#[derive(Debug, Default)]
struct Log {
    lines: Mutex<Vec<String>>,
    changed: watch::Sender<u64>,
}

impl Log {
    fn push(&self, line: String) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < MAX_LINES {
            lines.push(line);
        }
        drop(lines);
        self.changed.send_modify(|count| *count += 1);
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A running program. Dropping it kills it; if the test panics, its output is printed.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: Arc<Log>,
    collectors: JoinSet<()>,
}

impl Process {
    /// Starts a program in a folder, with these variables and none of ours.
    pub fn start(program: &str, arguments: &[&str], folder: &Path, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(program)
            .args(arguments)
            .current_dir(folder)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("{program} does not start: {error}"));
        let log = Arc::new(Log::default());
        let mut collectors = JoinSet::new();
        collectors.spawn(collect(child.stdout.take().expect("piped"), Arc::clone(&log)));
        collectors.spawn(collect(child.stderr.take().expect("piped"), Arc::clone(&log)));
        let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { name, child, log, collectors }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id().expect("it runs")
    }

    /// What it wrote so far, both streams.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.log.lines()
    }

    /// Waits for a line that `pick` takes, among those written and those to come.
    ///
    /// # Panics
    /// When there is none in time.
    pub async fn find<T>(&self, what: &str, mut pick: impl FnMut(&str) -> Option<T>) -> T {
        let mut changed = self.log.changed.subscribe();
        let search = async {
            let mut seen = 0;
            loop {
                changed.borrow_and_update();
                let lines = self.log.lines();
                if let Some(found) = lines.iter().skip(seen).find_map(|line| pick(line)) {
                    return Some(found);
                }
                seen = lines.len();
                changed.changed().await.ok()?;
            }
        };
        match timeout(PATIENCE, search).await {
            Ok(Some(found)) => found,
            _ => panic!("{}: no line with {what}", self.name),
        }
    }

    /// Sends a signal by name, like `TERM`.
    pub fn signal(&self, signal: &str) {
        let command = format!("kill -{signal} {}", self.pid());
        let status = std::process::Command::new("sh").args(["-c", &command]).status().expect("a shell");
        assert!(status.success(), "{command}");
    }

    /// Kills it without warning and waits until it is gone.
    pub async fn kill(&mut self) {
        self.child.kill().await.expect("it can be killed");
    }

    /// Waits for its end, collects the rest of its output, and answers the exit code.
    ///
    /// # Panics
    /// When it does not end in time, or by a signal.
    pub async fn exit_code(&mut self) -> i32 {
        let status = timeout(PATIENCE, self.child.wait()).await;
        let status = status.unwrap_or_else(|_| panic!("{} does not end", self.name)).expect("it can be waited for");
        let rest = async { while self.collectors.join_next().await.is_some() {} };
        timeout(PATIENCE, rest).await.expect("its output ends with it");
        status.code().unwrap_or_else(|| panic!("{} ended by a signal: {status}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- output of {} ---", self.name);
            self.log.lines().iter().for_each(|line| eprintln!("{line}"));
        }
    }
}

async fn collect(from: impl AsyncRead + Unpin, log: Arc<Log>) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        log.push(line);
    }
}
