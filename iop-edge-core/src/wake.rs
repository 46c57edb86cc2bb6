//! Decides when tasks are woken: after the lock is released under which the reason came up. A waker is code of whoever
//! polls, and may come back at once.

use std::task::Waker;

/// Tasks that have a reason to look again.
#[derive(Debug, Default)]
#[must_use = "a task that is not woken waits for ever"]
pub(crate) struct Wakers(Vec<Waker>);

impl Extend<Waker> for Wakers {
    fn extend<T: IntoIterator<Item = Waker>>(&mut self, wakers: T) {
        self.0.extend(wakers);
    }
}

impl Wakers {
    /// Wakes them. Hold no lock.
    pub(crate) fn wake(self) {
        self.0.into_iter().for_each(Waker::wake);
    }
}
