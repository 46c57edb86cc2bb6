//! Decides that a lease is used once: it remembers used ones until they expire, and refuses when it can't.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::key_id::{KeyId, LeaseId};

/// Used leases a Node remembers unless told otherwise: 1 092 a second at 60 s each.
pub const DEFAULT_REPLAY_ENTRIES: usize = 65_536;

/// Most used leases a store can be made to remember.
pub const MAX_REPLAY_ENTRIES: usize = 1 << 20;

/// Why a lease can't be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "both reasons there are")]
pub enum ReplayError {
    /// It was claimed before, or that can't be told any more.
    #[error("the lease was used before")]
    Replayed,
    /// The store is full. It never forgets an entry to make room: a forgotten one could be used again.
    #[error("no more used leases can be remembered")]
    Full,
}

/// Remembers which leases were used.
///
/// It may live in memory: a Node's key is fresh for each connection, so what was sealed before a restart can't be opened
/// after it.
pub trait ReplayStore {
    /// Marks a lease as used, atomically: of two callers with one lease, one gets `Ok`.
    ///
    /// # Errors
    /// [`ReplayError`] when it was used, or can't be remembered until `expires_at_ms`.
    fn claim(&self, issuer: KeyId, lease: LeaseId, expires_at_ms: u64, now_ms: u64) -> Result<(), ReplayError>;
}

#[derive(Default)]
struct Used {
    leases: HashSet<(KeyId, LeaseId)>,
    by_expiry: BTreeSet<(u64, KeyId, LeaseId)>,
    /// Latest time seen. Entries up to it are gone, so whatever expired by then is refused even if the clock goes back.
    forgotten_until_ms: u64,
}

/// A [`ReplayStore`] in memory, of fixed size.
pub struct MemoryReplayStore {
    capacity: usize,
    used: Mutex<Used>,
}

impl MemoryReplayStore {
    /// A store for so many leases, at least 1 and at most [`MAX_REPLAY_ENTRIES`].
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.clamp(1, MAX_REPLAY_ENTRIES), used: Mutex::default() }
    }

    /// How many are remembered now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).leases.len()
    }

    /// Whether none is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for MemoryReplayStore {
    fn default() -> Self {
        Self::new(DEFAULT_REPLAY_ENTRIES)
    }
}

impl ReplayStore for MemoryReplayStore {
    fn claim(&self, issuer: KeyId, lease: LeaseId, expires_at_ms: u64, now_ms: u64) -> Result<(), ReplayError> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.forgotten_until_ms = used.forgotten_until_ms.max(now_ms);
        while let Some((expired, issuer, lease)) = used.by_expiry.first().copied() {
            if expired > used.forgotten_until_ms {
                break;
            }
            used.by_expiry.pop_first();
            used.leases.remove(&(issuer, lease));
        }
        if expires_at_ms <= used.forgotten_until_ms || used.leases.contains(&(issuer, lease)) {
            return Err(ReplayError::Replayed);
        }
        if used.leases.len() >= self.capacity {
            return Err(ReplayError::Full);
        }
        used.leases.insert((issuer, lease));
        used.by_expiry.insert((expires_at_ms, issuer, lease));
        Ok(())
    }
}

impl fmt::Debug for MemoryReplayStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryReplayStore").field("capacity", &self.capacity).field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: KeyId = KeyId([1; 16]);
    const B: KeyId = KeyId([2; 16]);

    fn lease(n: u8) -> LeaseId {
        LeaseId([n; 16])
    }

    #[test]
    fn a_lease_is_claimed_once_for_each_issuer() {
        // CRD-4
        let store = MemoryReplayStore::default();
        assert_eq!(store.claim(A, lease(1), 100, 0), Ok(()));
        assert_eq!(store.claim(A, lease(1), 100, 99), Err(ReplayError::Replayed));
        assert_eq!(store.claim(A, lease(1), 900, 0), Err(ReplayError::Replayed), "another expiry makes no other lease");
        assert_eq!(store.claim(B, lease(1), 100, 0), Ok(()));
    }

    #[test]
    fn a_full_store_refuses_and_forgets_nothing_that_is_valid() {
        // CRD-7
        let store = MemoryReplayStore::new(2);
        assert_eq!(store.claim(A, lease(1), 100, 0), Ok(()));
        assert_eq!(store.claim(A, lease(2), 200, 0), Ok(()));
        assert_eq!(store.claim(A, lease(3), 300, 99), Err(ReplayError::Full));
        assert_eq!(store.claim(A, lease(1), 100, 99), Err(ReplayError::Replayed), "still remembered");
        assert_eq!(store.claim(A, lease(3), 300, 100), Ok(()), "the first has expired");
        assert_eq!(store.len(), 2);
    }

    #[test]
    fn a_clock_that_goes_back_brings_no_expired_lease_back() {
        // CRD-7
        let store = MemoryReplayStore::new(2);
        assert_eq!(store.claim(A, lease(1), 100, 0), Ok(()));
        assert_eq!(store.claim(A, lease(2), 500, 101), Ok(()));
        assert_eq!(store.claim(A, lease(1), 100, 50), Err(ReplayError::Replayed));
    }

    #[test]
    fn of_many_threads_with_one_lease_one_wins() {
        // CRD-4
        let store = MemoryReplayStore::default();
        let won = std::thread::scope(|scope| {
            let claims: Vec<_> = (0..8).map(|_| scope.spawn(|| store.claim(A, lease(9), 100, 0).is_ok())).collect();
            claims.into_iter().map(|claim| claim.join().unwrap()).filter(|won| *won).count()
        });
        assert_eq!(won, 1);
    }
}
