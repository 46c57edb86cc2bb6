//! Decides how large the window of a new run is, by how much waits in all runs together (WIR-7).

use std::sync::atomic::{AtomicU64, Ordering};

use iop_wire::limits::{INITIAL_WINDOW, MIN_WINDOW};

/// Bytes, as charged, that wait for clients in all buffers.
#[derive(Debug)]
pub(crate) struct Pool {
    limit: u64,
    held: AtomicU64,
}

impl Pool {
    pub(crate) const fn new(limit: u64) -> Self {
        Self { limit, held: AtomicU64::new(0) }
    }

    /// True if there is too much now.
    #[must_use]
    pub(crate) fn add(&self, charge: u32) -> bool {
        let charge = u64::from(charge);
        self.held.fetch_add(charge, Ordering::Relaxed) + charge > self.limit
    }

    pub(crate) fn remove(&self, charge: u64) {
        if charge > 0 {
            self.held.fetch_sub(charge, Ordering::Relaxed);
        }
    }

    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    pub(crate) fn is_exhausted(&self) -> bool {
        self.held() > self.limit
    }

    /// Window of a new run: 128 KiB while half of the pool is free, then half of it each time the free part halves, 16 KiB
    /// at least.
    pub(crate) fn window(&self) -> u32 {
        let free = self.limit.saturating_sub(self.held());
        let mut window = INITIAL_WINDOW;
        let mut enough = self.limit / 2;
        while window > MIN_WINDOW && free < enough {
            window /= 2;
            enough /= 2;
        }
        window.max(MIN_WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_shrink_as_the_pool_fills() {
        // WIR-7
        let pool = Pool::new(1000);
        let kib = |pool: &Pool| pool.window() / 1024;
        assert_eq!(kib(&pool), 128);
        for (held, window) in [(500, 128), (501, 64), (750, 64), (751, 32), (876, 16), (1000, 16)] {
            let add = u32::try_from(held - pool.held()).unwrap();
            assert!(!pool.add(add));
            assert_eq!(kib(&pool), window, "{held}");
        }
        assert!(pool.add(1) && pool.is_exhausted());
        assert_eq!(kib(&pool), 16);
        pool.remove(1001);
        assert_eq!((pool.held(), pool.is_exhausted()), (0, false));
    }
}
