//! Decides when files are read again that may change while a process runs: what is made of them is made again when they change,
//! and kept when they are bad.
//!
//! A pair is written as two files, and not at once: what does not fit together is looked at again, and the old one stays.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::Hasher as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};

/// How often an Edge or a Node looks at its files.
pub const LOOK_EVERY: Duration = Duration::from_secs(10);
/// With every so manieth look, live sessions are looked at by the clock alone: once a minute.
pub const LOOKS_TO_RECHECK: u32 = 6;

/// When to look.
#[derive(Debug)]
pub struct Looks {
    ticks: Interval,
    next: u32,
}

impl Default for Looks {
    fn default() -> Self {
        let mut ticks = interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, next: 0 }
    }
}

impl Looks {
    /// Waits for the next look; the first comes at once. Answers whether live sessions are looked at as well.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn next(&mut self) -> bool {
        self.ticks.tick().await;
        let recheck = self.next == 0;
        self.next = (self.next + 1) % LOOKS_TO_RECHECK;
        recheck
    }
}

type Make<T> = Box<dyn Fn() -> Result<T, String> + Send + Sync>;

/// Something made of files. Clones are one.
pub struct Renewable<T>(Arc<Inner<T>>);

struct Inner<T> {
    files: Vec<PathBuf>,
    make: Make<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Arc<T>,
    seen: Vec<Option<u64>>,
    /// What was wrong with the last change: it is told once.
    problem: Option<String>,
}

/// What became of a look at the files.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "there is nothing else that a look can find")]
pub enum Look {
    /// They are as they were.
    Same,
    /// They changed, and what is made of them is in force.
    Renewed,
    /// They changed and can't be used: the old ones stay in force. `again`: that was so before.
    Bad {
        /// Why, for people.
        problem: String,
        /// Nothing changed since it was found.
        again: bool,
    },
}

impl<T> Clone for Renewable<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Renewable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewable").field("files", &self.0.files).finish_non_exhaustive()
    }
}

impl<T> Renewable<T> {
    /// Makes it for the first time.
    ///
    /// # Errors
    /// What `make` says.
    pub fn new<E: fmt::Display>(
        files: Vec<PathBuf>,
        make: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        // Before they are read for use: a change in between is seen by the next look.
        let seen = stamps(&files);
        let value = Arc::new(make()?);
        let state = Mutex::new(State { value, seen, problem: None });
        let make: Make<T> = Box::new(move || make().map_err(|error| error.to_string()));
        Ok(Self(Arc::new(Inner { files, make, state })))
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is in force.
    #[must_use]
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.state().value)
    }

    /// The files.
    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        &self.0.files
    }

    /// Looks whether the files have changed. Reads them: not for a task that others wait for.
    pub fn look(&self) -> Look {
        let seen = stamps(&self.0.files);
        {
            let state = self.state();
            if state.seen == seen {
                return match &state.problem {
                    Some(problem) => Look::Bad { problem: problem.clone(), again: true },
                    None => Look::Same,
                };
            }
        }
        let made = (self.0.make)();
        let mut state = self.state();
        state.seen = seen;
        match made {
            Ok(value) => {
                state.value = Arc::new(value);
                state.problem = None;
                Look::Renewed
            }
            Err(problem) => {
                state.problem = Some(problem.clone());
                Look::Bad { problem, again: false }
            }
        }
    }
}

/// What files hold, in short. The hash decides, not the time of change: two writes may have one time.
fn stamps(files: &[PathBuf]) -> Vec<Option<u64>> {
    let stamp = |path: &PathBuf| {
        let mut hasher = DefaultHasher::new();
        hasher.write(&std::fs::read(path).ok()?);
        Some(hasher.finish())
    };
    files.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testdir::TestDir;

    fn bad(path: &std::path::Path) -> String {
        format!("{} is bad", path.display())
    }

    #[test]
    fn a_change_is_taken_and_a_bad_one_is_told_once_and_changes_nothing() {
        // CRD-10
        let dir = TestDir::new();
        let path = dir.path().join("file");
        std::fs::write(&path, "one").unwrap();
        let read = {
            let path = path.clone();
            move || std::fs::read_to_string(&path).ok().filter(|text| text != "bad").ok_or_else(|| bad(&path))
        };
        let renewable = Renewable::new(vec![path.clone()], read).unwrap();
        assert_eq!((renewable.look(), renewable.get().as_str()), (Look::Same, "one"));
        std::fs::write(&path, "two").unwrap();
        assert_eq!((renewable.look(), renewable.get().as_str()), (Look::Renewed, "two"));
        assert_eq!(renewable.look(), Look::Same);
        for again in [false, true] {
            std::fs::write(&path, "bad").unwrap();
            assert_eq!(renewable.look(), Look::Bad { problem: bad(&path), again });
            assert_eq!(renewable.get().as_str(), "two");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(renewable.look(), Look::Bad { again: false, .. }));
        std::fs::write(&path, "two").unwrap();
        assert_eq!(renewable.look(), Look::Renewed);
        std::fs::remove_file(&path).unwrap();
        assert!(Renewable::new(vec![path.clone()], move || Err::<(), _>(bad(&path))).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_are_looked_at_once_a_minute_and_at_first() {
        // CRD-10
        let (mut looks, began) = (Looks::default(), tokio::time::Instant::now());
        for look in 0..13 {
            assert_eq!(looks.next().await, look % 6 == 0, "{look}");
            assert_eq!(began.elapsed(), look * LOOK_EVERY);
        }
    }
}
