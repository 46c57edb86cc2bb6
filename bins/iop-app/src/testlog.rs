//! Decides how tests read the log: every line of every level that this thread writes, as JSON.

use std::io;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tracing::level_filters::LevelFilter;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

/// What was logged since it was made.
#[derive(Clone, Default)]
pub(crate) struct Logged(Arc<Mutex<Vec<u8>>>);

impl Logged {
    /// Takes everything that this thread logs, until the guard is dropped.
    pub(crate) fn begin() -> (Self, DefaultGuard) {
        let logged = Self::default();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .without_time()
            .with_max_level(LevelFilter::TRACE)
            .with_writer(logged.clone())
            .finish();
        let guard = tracing::subscriber::set_default(subscriber);
        (logged, guard)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Lines with that message, in order, without what says where they come from.
    pub(crate) fn of(&self, message: &str) -> Vec<Value> {
        let lines = self.text();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["message"] == message).collect()
    }
}

impl io::Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Logged {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
