//! Decides what a simulated process is: a runtime of its own, with a clock of its own that the world moves.
//!
//! A process runs until a point of its clock and then stands still: its timers go off at their exact times. Its clock may
//! run a little fast or slow. A process that is paused does nothing; when it goes on, its clock has moved by all that time,
//! as a monotonic clock does over SIGSTOP and SIGCONT.

use std::fmt;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::{Instant, advance, sleep_until};

/// Turns that everybody gets at the end of a window: what is due at its last moment happens in it.
const TURNS: usize = 3;
/// Parts of a clock's drift.
const MILLION: u64 = 1_000_000;

/// One process.
pub struct Host {
    runtime: Runtime,
    start: Instant,
    /// Where its clock shall be, in millionths of a millisecond.
    target: u64,
    rate: u64,
    paused: bool,
    /// Where its clock is, in milliseconds.
    reached: u64,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("reached", &self.reached).field("paused", &self.paused).finish_non_exhaustive()
    }
}

impl Host {
    /// A process whose clock gains or loses so many parts of a million.
    #[must_use]
    pub fn new(drift_ppm: i64) -> Self {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let start = runtime.block_on(async { Instant::now() });
        Self { runtime, start, target: 0, rate: MILLION.saturating_add_signed(drift_ppm), paused: false, reached: 0 }
    }

    /// Starts a task in it.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.runtime.spawn(task));
    }

    /// Does something in it, on its clock.
    pub fn inside<T>(&self, act: impl FnOnce() -> T) -> T {
        let _context = self.runtime.enter();
        act()
    }

    /// Its clock, in milliseconds since it started.
    #[must_use]
    pub const fn clock(&self) -> u64 {
        self.reached
    }

    /// True while it is paused.
    #[must_use]
    pub const fn is_paused(&self) -> bool {
        self.paused
    }

    /// Tasks that have not ended.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.runtime.metrics().num_alive_tasks()
    }

    /// Stops it where it is.
    pub const fn pause(&mut self) {
        self.paused = true;
    }

    /// Lets it go on: all the time that it missed passes at once.
    pub fn resume(&mut self) {
        if std::mem::replace(&mut self.paused, false) {
            let missed = self.target / MILLION - self.reached;
            if missed > 0 {
                self.runtime.block_on(advance(Duration::from_millis(missed)));
            }
            self.reached += missed;
        }
    }

    /// So many milliseconds of the world's time pass.
    pub fn run(&mut self, window: u64) {
        self.target += window * self.rate;
        if self.paused {
            return;
        }
        self.reached = self.target / MILLION;
        let until = self.start + Duration::from_millis(self.reached);
        self.runtime.block_on(async {
            sleep_until(until).await;
            for _ in 0..TURNS {
                yield_now().await;
            }
        });
    }
}
