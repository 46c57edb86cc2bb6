//! Decides how many calls one adapter instance takes at once: a gate shared by runs and tunnels (NOD-4).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Counts the places of one adapter instance. Cheap to clone; clones share the places.
#[derive(Clone)]
pub struct CapacityGate(Arc<Inner>);

struct Inner {
    capacity: AtomicU32,
    in_use: AtomicU32,
}

impl CapacityGate {
    /// A gate with this many places.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self(Arc::new(Inner { capacity: AtomicU32::new(capacity), in_use: AtomicU32::new(0) }))
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
            .map(|_| GatePermit(Arc::clone(&self.0)))
    }

    /// Changes the number of places; what is in use stays in use.
    pub fn set_capacity(&self, capacity: u32) {
        self.0.capacity.store(capacity, Ordering::Release);
    }

    /// Places that are taken.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        self.0.in_use.load(Ordering::Acquire)
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
    }
}

impl fmt::Debug for GatePermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GatePermit")
    }
}

#[cfg(test)]
mod tests {
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
