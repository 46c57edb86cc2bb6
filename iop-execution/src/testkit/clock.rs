//! Decides what time it is in a test: what the test said.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A monotonic clock that moves only when told. Clones share the time.
#[derive(Debug, Clone)]
pub struct ManualClock(Arc<Mutex<Instant>>);

impl ManualClock {
    /// A clock that stands at the present.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    /// The time it shows.
    #[must_use]
    pub fn now(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves it on and answers the new time. It never goes back.
    #[allow(clippy::must_use_candidate, reason = "moving the clock is the point, the answer a convenience")]
    pub fn advance(&self, by: Duration) -> Instant {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *now += by;
        *now
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}
