//! Decides what a seed draws: one stream of numbers, taken in a fixed order.

use std::ops::RangeInclusive;

use iop_execution::Entropy;

/// The random numbers of one seed.
#[derive(Debug)]
pub struct Rng(Entropy);

impl Rng {
    /// The numbers of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(Entropy::seeded(seed))
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0.number()
    }

    /// A number of a range.
    pub fn range(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (low, high) = range.into_inner();
        low + self.number() % (high - low + 1)
    }

    /// As [`Self::range`], for counts.
    pub fn count(&mut self, range: RangeInclusive<usize>) -> usize {
        let (low, high) = range.into_inner();
        low + usize::try_from(self.number() % (high - low + 1) as u64).unwrap()
    }

    /// True in so many of 1 000 cases.
    pub fn permille(&mut self, chance: u64) -> bool {
        self.number() % 1000 < chance
    }

    /// One of these.
    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.count(0..=from.len() - 1)].clone()
    }

    /// Nothing in most cases.
    pub fn maybe<T>(&mut self, chance: u64, draw: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.permille(chance) { Some(draw(self)) } else { None }
    }
}
