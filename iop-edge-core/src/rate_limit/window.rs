//! Decides how much was counted in the last 60 seconds: a ring of seconds.
//!
//! The running second and the 60 before it count, so that no 60 seconds hold more than a limit, wherever they begin; a count
//! leaves after 60 to 61 seconds. A bucket that refills would let twice its size through within a minute.

use std::time::{Duration, Instant};

/// Width of a slot.
const SLOT: Duration = Duration::from_secs(1);
/// Slots that count: a minute touches as many.
const SLOTS: u64 = 61;

/// Counts of the last minute. Holds [`SLOTS`] numbers, once something was counted.
#[derive(Debug, Default)]
pub(super) struct Window(Option<Box<Ring>>);

#[derive(Debug)]
struct Ring {
    began: Instant,
    slots: [u64; SLOTS as usize],
    /// The newest slot, counted from the beginning.
    head: u64,
    sum: u64,
}

impl Ring {
    fn new(now: Instant) -> Self {
        Self { began: now, slots: [0; SLOTS as usize], head: 0, sum: 0 }
    }

    fn slot(&mut self, index: u64) -> &mut u64 {
        let index = usize::try_from(index % SLOTS).unwrap_or(0);
        // `index` is below the length by the line above.
        self.slots.get_mut(index).unwrap_or(&mut self.sum)
    }

    /// Forgets what is older than a minute.
    fn advance(&mut self, now: Instant) {
        let head = now.saturating_duration_since(self.began).as_secs() / SLOT.as_secs();
        if head <= self.head {
            return;
        }
        for index in 0..(head - self.head).min(SLOTS) {
            let slot = self.slot(head - index);
            let gone = std::mem::take(slot);
            self.sum = self.sum.saturating_sub(gone);
        }
        self.head = head;
    }

    /// From now until the count of a slot is gone.
    fn until_gone(&self, index: u64, now: Instant) -> Duration {
        let gone = Duration::from_secs(index.saturating_add(SLOTS).saturating_mul(SLOT.as_secs()));
        gone.saturating_sub(now.saturating_duration_since(self.began))
    }

    fn oldest(&self) -> u64 {
        (self.head + 1).saturating_sub(SLOTS)
    }
}

impl Window {
    /// What was counted in the last minute.
    pub(super) fn sum(&mut self, now: Instant) -> u64 {
        let Some(ring) = &mut self.0 else { return 0 };
        ring.advance(now);
        ring.sum
    }

    pub(super) fn add(&mut self, count: u64, now: Instant) {
        if count == 0 {
            return;
        }
        let ring = self.0.get_or_insert_with(|| Box::new(Ring::new(now)));
        ring.advance(now);
        // Saturates as one, so that slots and sum agree.
        let count = count.min(u64::MAX - ring.sum);
        ring.sum += count;
        *ring.slot(ring.head) += count;
    }

    /// When so much is gone again; `None` = there is not so much.
    pub(super) fn until_freed(&mut self, count: u64, now: Instant) -> Option<Duration> {
        let ring = self.0.as_mut()?;
        ring.advance(now);
        let mut freed: u64 = 0;
        for index in ring.oldest()..=ring.head {
            freed = freed.saturating_add(*ring.slot(index));
            if freed >= count {
                return Some(ring.until_gone(index, now));
            }
        }
        None
    }

    /// When nothing counts any more.
    pub(super) fn until_empty(&mut self, now: Instant) -> Duration {
        let Some(ring) = self.0.as_mut() else { return Duration::ZERO };
        ring.advance(now);
        let (oldest, head) = (ring.oldest(), ring.head);
        let newest = (oldest..=head).rev().find(|index| *ring.slot(*index) > 0);
        newest.map_or(Duration::ZERO, |index| ring.until_gone(index, now))
    }
}
