//! Decides where random numbers come from: the operating system, or a seed, so that a simulation can be repeated.
//!
//! Nothing secret is made here: keys, tokens and credential leases ask the operating system themselves.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::id::RunId;

/// A source of random numbers. Each engine has one.
pub struct Entropy(Source);

enum Source {
    System,
    Seeded(AtomicU64),
}

impl Entropy {
    /// The operating system's.
    #[must_use]
    pub const fn system() -> Self {
        Self(Source::System)
    }

    /// The same numbers for the same seed: for tests and simulations only.
    #[must_use]
    pub const fn seeded(seed: u64) -> Self {
        Self(Source::Seeded(AtomicU64::new(seed)))
    }

    /// Fills a buffer.
    ///
    /// # Errors
    /// When the operating system gives no randomness.
    pub fn fill(&self, bytes: &mut [u8]) -> Result<(), getrandom::Error> {
        match &self.0 {
            Source::System => getrandom::fill(bytes),
            Source::Seeded(state) => {
                for chunk in bytes.chunks_mut(8) {
                    chunk.copy_from_slice(next(state).to_be_bytes().get(..chunk.len()).unwrap_or_default());
                }
                Ok(())
            }
        }
    }

    /// A number that spreads load and guards nothing: without randomness it is a constant.
    #[must_use]
    pub fn number(&self) -> u64 {
        let mut bytes = [0; 8];
        match self.fill(&mut bytes) {
            Ok(()) => u64::from_be_bytes(bytes),
            Err(_) => u64::MAX / 2,
        }
    }

    /// As [`Self::number`], from 0 to 1.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        f64::from(u32::try_from(self.number() >> 32).unwrap_or(0)) / f64::from(u32::MAX)
    }

    /// A run id.
    ///
    /// # Errors
    /// When the operating system gives no randomness.
    pub fn run_id(&self) -> Result<RunId, getrandom::Error> {
        let mut bytes = [0; 16];
        self.fill(&mut bytes)?;
        Ok(RunId::from_bytes(bytes))
    }
}

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
fn next(state: &AtomicU64) -> u64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut z = state.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl fmt::Debug for Entropy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Source::System => "Entropy(system)",
            Source::Seeded(_) => "Entropy(seeded)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_numbers_and_the_system_does_not() {
        let (one, two, other) = (Entropy::seeded(7), Entropy::seeded(7), Entropy::seeded(8));
        let numbers = |from: &Entropy| (0..4).map(|_| from.number()).collect::<Vec<_>>();
        let first = numbers(&one);
        assert_eq!(first, numbers(&two));
        assert_ne!(first, numbers(&other));
        let system = Entropy::system();
        assert_ne!(system.run_id().unwrap(), system.run_id().unwrap());
        assert!((0.0..=1.0).contains(&one.fraction()));
    }
}
