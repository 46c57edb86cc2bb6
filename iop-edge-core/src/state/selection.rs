//! Decides which of several free providers takes a request.

use std::cmp::Ordering;
use std::fmt;

use iop_execution::ProviderId;

use crate::catalog::Strategy;

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
    /// Recent failures, as load in thousandths of its capacity (SEL-4).
    pub penalty: u32,
    /// When its turn is in a weighted round of this model: the smallest goes next.
    pub turn: u64,
    /// Number of its last admission, rising over all providers; 0 = none yet.
    pub last_admission: u64,
}

impl FreeCandidate<'_> {
    /// Load relative to weighted places, in a form that compares without division: what is this one's, times what is the
    /// other's.
    fn load_against(&self, other: &Self) -> u128 {
        let load = 1000 * u128::from(self.in_use) + u128::from(self.penalty) * u128::from(self.capacity);
        load * u128::from(other.capacity) * u128::from(other.weight)
    }

    fn compare_load(&self, other: &Self) -> Ordering {
        self.load_against(other).cmp(&other.load_against(self)).then(self.last_admission.cmp(&other.last_admission))
    }
}

/// What a policy may know of a request.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct SelectionRequest {
    /// Hash of the caller and the leading prompt text; 0 = not known.
    pub prefix: u64,
}

/// Ranks candidates (SEL-1). Never sees one without a place; decides nothing but the order, and remembers nothing.
pub trait SelectionPolicy: fmt::Debug + Send {
    /// Position of the best of `candidates`, which come in config order. `None` or a position out of range admits
    /// nothing: the request waits.
    fn choose(&self, request: SelectionRequest, candidates: &[FreeCandidate<'_>]) -> Option<usize>;
}

/// The default: the provider with the lowest load relative to its places and weight, where recent failures count as load;
/// among equals the one that was chosen longest ago.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeastLoaded;

impl SelectionPolicy for LeastLoaded {
    fn choose(&self, _: SelectionRequest, candidates: &[FreeCandidate<'_>]) -> Option<usize> {
        best(candidates, FreeCandidate::compare_load)
    }
}

/// Each in turn, by weight. One without a place loses its turn and does not catch up; one that failed lately waits until
/// the failures have half decayed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoundRobin;

impl SelectionPolicy for RoundRobin {
    fn choose(&self, _: SelectionRequest, candidates: &[FreeCandidate<'_>]) -> Option<usize> {
        best(candidates, |a, b| failing(a).cmp(&failing(b)).then(a.turn.cmp(&b.turn)))
    }
}

/// The first of the list that has a place: later ones are spares, for when the earlier ones are full, gone, or failing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ordered;

impl SelectionPolicy for Ordered {
    fn choose(&self, _: SelectionRequest, candidates: &[FreeCandidate<'_>]) -> Option<usize> {
        best(candidates, |a, b| failing(a).cmp(&failing(b)))
    }
}

/// Requests with the same prefix go to the same provider, whose cache knows it: rendezvous hashing, so that a provider that
/// comes or goes moves only its own share. Gives way to [`LeastLoaded`] when that provider is much busier than the least
/// busy one, or failed lately.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixAffinity;

/// How much busier than the least busy one a provider may be and still keep its prefixes, in thousandths of its places.
const IMBALANCE: u128 = 250;

impl SelectionPolicy for PrefixAffinity {
    fn choose(&self, request: SelectionRequest, candidates: &[FreeCandidate<'_>]) -> Option<usize> {
        let least = LeastLoaded.choose(request, candidates)?;
        if request.prefix == 0 {
            return Some(least);
        }
        let score = |candidate: &FreeCandidate<'_>| {
            weighted(hash(request.prefix, candidate.provider.as_str()), candidate.weight)
        };
        let home = best(candidates, |a, b| score(b).total_cmp(&score(a)))?;
        let (at_home, idle) = (candidates.get(home)?, candidates.get(least)?);
        let share =
            |candidate: &FreeCandidate<'_>| 1000 * u128::from(candidate.in_use) / u128::from(candidate.capacity.max(1));
        let balanced = share(at_home) <= share(idle) + IMBALANCE;
        Some(if balanced && !failing(at_home) { home } else { least })
    }
}

/// Half of what one failure adds: above it a provider is used only when all others are no better.
const FAILING: u32 = 500;

const fn failing(candidate: &FreeCandidate<'_>) -> bool {
    candidate.penalty > FAILING
}

/// The first of the best.
fn best<'a, 'b>(
    candidates: &'a [FreeCandidate<'b>],
    compare: impl Fn(&FreeCandidate<'b>, &FreeCandidate<'b>) -> Ordering,
) -> Option<usize> {
    candidates.iter().enumerate().min_by(|(_, a), (_, b)| compare(a, b)).map(|(position, _)| position)
}

/// FNV-1a over a prefix and a name, mixed: stable over restarts, so that caches stay warm.
pub(crate) fn hash(prefix: u64, name: &str) -> u64 {
    let bytes = prefix.to_be_bytes().into_iter().chain(name.bytes());
    let mut hash =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

/// Rendezvous score with a weight: -w / ln(u), the largest wins (Thaler and Ravishankar; weights after Mosko).
fn weighted(hash: u64, weight: u32) -> f64 {
    let bits = u32::try_from(hash >> 32).unwrap_or(u32::MAX);
    let unit = (f64::from(bits) + 0.5) / (f64::from(u32::MAX) + 1.0);
    -f64::from(weight) / unit.ln()
}

/// The policy of a strategy.
pub(crate) fn policy(strategy: Strategy) -> &'static (dyn SelectionPolicy + Sync) {
    match strategy {
        Strategy::LeastLoaded => &LeastLoaded,
        Strategy::RoundRobin => &RoundRobin,
        Strategy::Ordered => &Ordered,
        Strategy::PrefixAffinity => &PrefixAffinity,
    }
}

#[cfg(test)]
mod tests;
