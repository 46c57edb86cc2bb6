//! Decides which idle connections are kept, and which of them is good for another request.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::socket::Socket;

/// How long an idle connection is kept. Below the 5 s after which common model servers close theirs, so that a request is
/// not sent into a connection that is just being closed.
pub(super) const POOL_IDLE: Duration = Duration::from_secs(4);
/// Most idle connections that are kept to one backend; the oldest is closed for a newer one.
pub(super) const MAX_IDLE: usize = 128;

/// The idle connections to one backend, oldest first.
///
/// No task watches them: what became too old is closed when a connection is next taken or put back.
#[derive(Default)]
pub(super) struct Pool {
    idle: Mutex<VecDeque<(Instant, Socket)>>,
}

impl Pool {
    /// The connection that was used last, if there is a live one.
    pub(super) fn take(&self) -> Option<Socket> {
        let _too_old = self.too_old();
        loop {
            let (_, socket) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop_back()?;
            if socket.is_quiet() {
                return Some(socket);
            }
        }
    }

    /// Keeps a connection on which nothing is under way.
    pub(super) fn put(&self, socket: Socket) {
        let _too_old = self.too_old();
        let _too_many = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.push_back((Instant::now(), socket));
            if idle.len() > MAX_IDLE { idle.pop_front() } else { None }
        };
    }

    /// Takes out what is too old, for the caller to close without the lock.
    fn too_old(&self) -> VecDeque<(Instant, Socket)> {
        let now = Instant::now();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = idle.partition_point(|(since, _)| now.saturating_duration_since(*since) >= POOL_IDLE);
        if fresh == 0 {
            return VecDeque::new();
        }
        let kept = idle.split_off(fresh);
        std::mem::replace(&mut idle, kept)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests;
