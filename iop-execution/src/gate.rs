//! Decides how many calls one adapter instance takes at once: a gate shared by runs and tunnels (NOD-4).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::Notify;

/// Counts the places of one adapter instance. Cheap to clone; clones share the places.
#[derive(Clone)]
pub struct CapacityGate(Arc<Inner>);

struct Inner {
    capacity: AtomicU32,
    /// Places taken through this gate.
    own: AtomicU32,
    /// Places taken on the backend: through this gate and through those it succeeds.
    in_use: Arc<AtomicU32>,
    idle: Notify,
}

impl CapacityGate {
    /// A gate with this many places.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self::over(capacity, Arc::default())
    }

    fn over(capacity: u32, in_use: Arc<AtomicU32>) -> Self {
        let (capacity, own) = (AtomicU32::new(capacity), AtomicU32::new(0));
        Self(Arc::new(Inner { capacity, own, in_use, idle: Notify::new() }))
    }

    /// A gate for an instance that takes this one's backend over: what still runs through this gate takes places of the new
    /// one too, so that the backend never sees more calls than the new gate allows.
    #[must_use]
    pub fn successor(&self, capacity: u32) -> Self {
        Self::over(capacity, Arc::clone(&self.0.in_use))
    }

    /// Takes a place, or `None` at once when all are taken: the Edge queues, not the Node.
    #[must_use]
    pub fn try_enter(&self) -> Option<GatePermit> {
        let inner = &self.0;
        inner
            .in_use
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                (used < inner.capacity.load(Ordering::Acquire)).then_some(used + 1)
            })
            .ok()
            .map(|_| {
                inner.own.fetch_add(1, Ordering::AcqRel);
                GatePermit(Arc::clone(&self.0))
            })
    }

    /// Changes the number of places; what is in use stays in use.
    pub fn set_capacity(&self, capacity: u32) {
        self.0.capacity.store(capacity, Ordering::Release);
    }

    /// Places that are taken, those of a gate that this one succeeds included.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        self.0.in_use.load(Ordering::Acquire)
    }

    /// True if no place is taken through this very gate.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.own.load(Ordering::Acquire) == 0
    }

    /// Ready when no place is taken through this very gate: what its instance ran is over.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn idle(&self) {
        loop {
            let mut freed = std::pin::pin!(self.0.idle.notified());
            // Registered before the look, so that no last permit is missed.
            freed.as_mut().enable();
            if self.is_idle() {
                return;
            }
            freed.await;
        }
    }

    /// Places there are.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.0.capacity.load(Ordering::Acquire)
    }
}

impl fmt::Debug for CapacityGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CapacityGate({}/{})", self.in_use(), self.capacity())
    }
}

/// One place of a gate; dropping it frees the place.
#[must_use = "dropping a permit frees its place"]
pub struct GatePermit(Arc<Inner>);

impl Drop for GatePermit {
    fn drop(&mut self) {
        self.0.in_use.fetch_sub(1, Ordering::AcqRel);
        if self.0.own.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

impl fmt::Debug for GatePermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GatePermit")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_full_gate_refuses_at_once_and_a_drop_frees_one_place() {
        // NOD-4
        let gate = CapacityGate::new(2);
        let first = gate.try_enter();
        let second = gate.try_enter();
        assert!(first.is_some() && second.is_some() && gate.try_enter().is_none());
        gate.set_capacity(1);
        drop(first);
        assert!(gate.try_enter().is_none(), "shrinking never frees a busy place");
        drop(second);
        assert_eq!(gate.in_use(), 0);
        assert!(gate.try_enter().is_some());
    }

    #[test]
    fn a_successor_counts_what_still_runs_through_the_old_gate() {
        // REG-7, LEA-5
        let old = CapacityGate::new(2);
        let running = old.try_enter();
        let new = old.successor(2);
        let first = new.try_enter();
        assert!(first.is_some() && new.try_enter().is_none(), "one place is the old instance's");
        assert_eq!((new.in_use(), new.is_idle(), old.is_idle()), (2, false, false));
        drop(running);
        assert!(old.is_idle() && new.try_enter().is_some());
        drop(first);
        assert!(new.is_idle());
        assert_eq!((old.in_use(), new.in_use()), (0, 0));
    }

    #[tokio::test]
    async fn idle_waits_for_the_last_place_of_this_gate_only() {
        // REG-7
        let gate = CapacityGate::new(2);
        gate.idle().await;
        let (first, second) = (gate.try_enter(), gate.try_enter());
        let mut idle = Box::pin(gate.idle());
        assert!(idle.as_mut().now_or_never().is_none());
        drop(first);
        assert!(idle.as_mut().now_or_never().is_none());
        let _other = gate.successor(2).try_enter();
        drop(second);
        assert!(idle.as_mut().now_or_never().is_some());
    }

    #[test]
    fn threads_never_exceed_the_capacity() {
        // LEA-5
        let gate = CapacityGate::new(3);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        if let Some(permit) = gate.try_enter() {
                            assert!(gate.in_use() <= 3);
                            drop(permit);
                        }
                    }
                });
            }
        });
        assert_eq!(gate.in_use(), 0);
    }
}
