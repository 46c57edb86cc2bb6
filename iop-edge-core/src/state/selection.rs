//! Decides which of several free providers takes a request.

use std::cmp::Ordering;
use std::fmt;

use iop_execution::ProviderId;

/// A provider that could take the request now: ready, fitting, and with a free place.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct FreeCandidate<'a> {
    /// The provider.
    pub provider: &'a ProviderId,
    /// Places taken.
    pub in_use: u32,
    /// Places it has; more than `in_use`.
    pub capacity: u32,
    /// Configured share, at least 1.
    pub weight: u32,
    /// Number of its last admission, rising over all providers; 0 = none yet.
    pub last_admission: u64,
}

/// Ranks candidates (SEL-1). Never sees one without a place; decides nothing but the order, and remembers nothing.
pub trait SelectionPolicy: fmt::Debug + Send {
    /// Position of the best of `candidates`, which come in config order. `None` or a position out of range admits
    /// nothing: the request waits.
    fn choose(&self, candidates: &[FreeCandidate<'_>]) -> Option<usize>;
}

/// The default: the provider with the lowest load relative to its places and weight; among equals the one that was
/// chosen longest ago.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeastLoaded;

impl SelectionPolicy for LeastLoaded {
    fn choose(&self, candidates: &[FreeCandidate<'_>]) -> Option<usize> {
        let best = candidates.iter().enumerate().min_by(|(_, a), (_, b)| compare(a, b));
        best.map(|(position, _)| position)
    }
}

/// Load after taking the request, as a fraction of weighted places, compared without division.
fn compare(a: &FreeCandidate<'_>, b: &FreeCandidate<'_>) -> Ordering {
    let load = |x: &FreeCandidate<'_>, other: &FreeCandidate<'_>| {
        u128::from(x.in_use) * u128::from(other.capacity) * u128::from(other.weight)
    };
    load(a, b).cmp(&load(b, a)).then(a.last_admission.cmp(&b.last_admission))
}

#[cfg(test)]
mod tests;
