//! Decides how tests read the log: every field of every event that this thread writes, whatever its level.

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Metadata, Subscriber};

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogLine {
    /// `INFO` and the like.
    pub level: &'static str,
    /// Which part of the program wrote it.
    pub target: String,
    /// `name=value`, in order, with a blank between two; the message is one of them.
    pub fields: String,
}

/// What was logged since it was made. Log lines of one test can't be collected beside other tests: see
/// [`alone`](super::alone()).
#[derive(Debug, Clone, Default)]
pub struct Logged(Arc<Mutex<Vec<LogLine>>>);

impl Logged {
    /// Takes everything that this thread logs, until the guard is dropped.
    #[must_use]
    pub fn begin() -> (Self, DefaultGuard) {
        let logged = Self::default();
        let guard = tracing::subscriber::set_default(logged.clone());
        (logged, guard)
    }

    /// All of it, in order.
    #[must_use]
    pub fn lines(&self) -> Vec<LogLine> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All of it as text: what a secret must not be in.
    #[must_use]
    pub fn text(&self) -> String {
        let lines = self.lines();
        lines.iter().map(|line| format!("{} {} {}\n", line.level, line.target, line.fields)).collect()
    }
}

struct Fields(String);

impl Fields {
    fn add(&mut self, field: &Field, value: std::fmt::Arguments<'_>) {
        let blank = if self.0.is_empty() { "" } else { " " };
        let _never = write!(self.0, "{blank}{field}={value}");
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, format_args!("{value:?}"));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }
}

impl Subscriber for Logged {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        let line = LogLine {
            level: event.metadata().level().as_str(),
            target: event.metadata().target().to_owned(),
            fields: fields.0,
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
