//! Decides whether a key may send another request now: requests per minute, tokens per minute, requests at once (CRD-12).
//!
//! A state machine without clock and task: every call that needs the time takes `now`. It knows the configured keys and
//! nothing else, so that invented keys create no state. One without limits is counted too, for who operates the Edge.
//!
//! ```text
//!  admit ──▶ Permit ──▶ reserve (the LEA-2 estimate) ──▶ settle (what was reported)
//!    │                      │
//!    └─ RateRefusal         └─ RateRefusal                dropped = settled with what was reserved
//! ```
//!
//! Requests are counted when they are admitted. Tokens are held back from the reservation to the end of the request, however
//! long it runs, and counted in the minute of that end. So what is counted in any 60 seconds never exceeds the limit, unless
//! a request reports more than was reserved for it; that excess delays what comes after it.

use std::collections::HashMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::window::Window;
use crate::token::TokenId;
use iop_execution::closed_list as closed;

#[cfg(test)]
mod tests;
mod window;

/// Wait that is suggested when nobody can know when a place is free.
const UNKNOWN_WAIT: Duration = Duration::from_secs(1);

/// What one key may do; an absent limit is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyLimits {
    /// Requests in any 60 seconds.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens, input and output, in any 60 seconds.
    pub tokens_per_minute: Option<NonZeroU64>,
    /// Requests at once, waiting ones among them.
    pub concurrent: Option<NonZeroU32>,
}

/// What a key uses now, and used in the last minute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyUsage {
    /// Its limits.
    pub limits: KeyLimits,
    /// Requests that run, waiting ones among them.
    pub running: u32,
    /// Requests that were let in within the last 60 to 61 seconds.
    pub requests: u64,
    /// Until none of them counts any more, if nothing is asked meanwhile.
    pub requests_reset: Duration,
    /// Tokens that were counted within the last 60 to 61 seconds. Exact for keys with a limit of tokens only: for others what
    /// nobody reported is not estimated from the answer.
    pub tokens: u64,
    /// Tokens that are held back for requests that run.
    pub held: u64,
    /// Until none of the counted tokens counts any more.
    pub tokens_reset: Duration,
}

impl KeyLimits {
    /// These limits; 0 is none.
    #[must_use]
    pub const fn new(requests_per_minute: u32, tokens_per_minute: u64, concurrent: u32) -> Self {
        Self {
            requests_per_minute: NonZeroU32::new(requests_per_minute),
            tokens_per_minute: NonZeroU64::new(tokens_per_minute),
            concurrent: NonZeroU32::new(concurrent),
        }
    }
}

closed! {
    /// Which limit refused a request.
    RateKind {
        /// Requests per minute.
        Requests = "requests",
        /// Tokens per minute.
        Tokens = "tokens",
        /// Requests at once.
        Concurrent = "concurrent",
    }
}

/// Where a key stands at one of its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Standing {
    /// The limit.
    pub limit: u64,
    /// What is left of it now.
    pub remaining: u64,
    /// Until all of it is there again, if nothing is asked meanwhile.
    pub reset: Duration,
}

/// Where a key stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Standings {
    /// At its requests per minute, if it has that limit.
    pub requests: Option<Standing>,
    /// At its tokens per minute, if it has that limit.
    pub tokens: Option<Standing>,
}

/// Why a key may not send this request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the limit of the key is reached")]
#[non_exhaustive]
pub struct RateRefusal {
    /// Which limit.
    pub kind: RateKind,
    /// Its value.
    pub limit: u64,
    /// What is used of it.
    pub used: u64,
    /// What was asked of it.
    pub requested: u64,
    /// When to ask again; `None` = never: the request alone is more than the limit.
    pub retry_after: Option<Duration>,
}

/// Counts for all configured keys.
#[derive(Debug, Default)]
pub struct RateLimiter(Mutex<HashMap<TokenId, Meter>>);

impl RateLimiter {
    /// The keys there are from now on. A key that stays keeps its counts, under its new limits.
    pub fn configure(&self, keys: impl IntoIterator<Item = (TokenId, KeyLimits)>) {
        let mut meters = lock(&self.0);
        let mut old = std::mem::take(&mut *meters);
        for (id, limits) in keys {
            let meter = old.remove(&id).unwrap_or_default();
            meter.counts().limits = limits;
            meters.insert(id, meter);
        }
    }

    /// The counts of a key; `None` for one that nobody configured.
    #[must_use]
    pub fn meter(&self, key: &TokenId) -> Option<Meter> {
        lock(&self.0).get(key).cloned()
    }

    /// Keys that have counts.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// True if there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What each key uses, by id.
    #[must_use]
    pub fn usage(&self, now: Instant) -> Vec<(TokenId, KeyUsage)> {
        let mut meters: Vec<_> = lock(&self.0).iter().map(|(id, meter)| (id.clone(), meter.clone())).collect();
        meters.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        meters.into_iter().map(|(id, meter)| (id, meter.usage(now))).collect()
    }
}

/// The counts of one key. Clones are one; they outlive the key's removal from the config for as long as requests run.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    limits: KeyLimits,
    requests: Window,
    tokens: Window,
    /// Held back for requests that run.
    reserved: u64,
    running: u32,
    /// The last `now` that was told.
    latest: Option<Instant>,
}

impl Meter {
    /// Counts one more request, or says why not. Nothing is counted then.
    ///
    /// # Errors
    /// [`RateRefusal`] of the requests per minute or the requests at once.
    pub fn admit(&self, now: Instant) -> Result<Permit, RateRefusal> {
        let mut counts = self.counts();
        let now = counts.tell(now);
        let limits = counts.limits;
        if let Some(limit) = limits.concurrent.map(NonZeroU32::get).filter(|limit| counts.running >= *limit) {
            return Err(RateRefusal {
                kind: RateKind::Concurrent,
                limit: limit.into(),
                used: counts.running.into(),
                requested: 1,
                retry_after: Some(UNKNOWN_WAIT),
            });
        }
        if let Some(limit) = limits.requests_per_minute.map(|limit| u64::from(limit.get())) {
            let used = counts.requests.sum(now);
            if used >= limit {
                let wait = counts.requests.until_freed(used - limit + 1, now);
                let (kind, requested) = (RateKind::Requests, 1);
                return Err(RateRefusal { kind, limit, used, requested, retry_after: wait.or(Some(UNKNOWN_WAIT)) });
            }
        }
        counts.requests.add(1, now);
        counts.running = counts.running.saturating_add(1);
        Ok(Permit { meter: self.clone(), reserved: 0, settled: false })
    }

    /// Where the key stands.
    #[must_use]
    pub fn standings(&self, now: Instant) -> Standings {
        let mut counts = self.counts();
        let now = counts.tell(now);
        let KeyLimits { requests_per_minute, tokens_per_minute, .. } = counts.limits;
        let reserved = counts.reserved;
        let standing = |limit: u64, held: u64, window: &mut Window| Standing {
            limit,
            remaining: limit.saturating_sub(window.sum(now).saturating_add(held)),
            reset: window.until_empty(now),
        };
        Standings {
            requests: requests_per_minute.map(|limit| standing(limit.get().into(), 0, &mut counts.requests)),
            tokens: tokens_per_minute.map(|limit| standing(limit.get(), reserved, &mut counts.tokens)),
        }
    }

    /// Requests that run.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.counts().running
    }

    /// What the key uses.
    #[must_use]
    pub fn usage(&self, now: Instant) -> KeyUsage {
        let mut counts = self.counts();
        let now = counts.tell(now);
        KeyUsage {
            limits: counts.limits,
            running: counts.running,
            requests: counts.requests.sum(now),
            requests_reset: counts.requests.until_empty(now),
            tokens: counts.tokens.sum(now),
            held: counts.reserved,
            tokens_reset: counts.tokens.until_empty(now),
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        lock(&self.0)
    }
}

impl Counts {
    /// Time never goes back.
    fn tell(&mut self, now: Instant) -> Instant {
        let now = self.latest.map_or(now, |latest| latest.max(now));
        self.latest = Some(now);
        now
    }
}

/// One request that was admitted. It ends once: settled, or dropped.
#[derive(Debug)]
#[must_use = "dropping it ends the request"]
pub struct Permit {
    meter: Meter,
    reserved: u64,
    settled: bool,
}

impl Permit {
    /// Holds back what the request is expected to use, on top of what it holds already.
    ///
    /// # Errors
    /// [`RateRefusal`] of the tokens per minute; nothing more is held back then.
    pub fn reserve(&mut self, tokens: u64, now: Instant) -> Result<(), RateRefusal> {
        let mut counts = self.meter.counts();
        let now = counts.tell(now);
        if let Some(limit) = counts.limits.tokens_per_minute.map(NonZeroU64::get) {
            let (counted, requested) = (counts.tokens.sum(now), tokens);
            let used = counted.saturating_add(counts.reserved);
            // No request is free: one that is estimated at nothing does not get past a limit that is used up.
            let wanted = used.saturating_add(requested.max(1));
            let refusal = |retry_after| RateRefusal { kind: RateKind::Tokens, limit, used, requested, retry_after };
            if requested > limit {
                return Err(refusal(None));
            }
            if wanted > limit {
                // What runs may end at any time and give back what it holds.
                let wait = counts.tokens.until_freed(wanted - limit, now).unwrap_or(UNKNOWN_WAIT);
                return Err(refusal(Some(wait)));
            }
        }
        counts.reserved = counts.reserved.saturating_add(tokens);
        drop(counts);
        self.reserved = self.reserved.saturating_add(tokens);
        Ok(())
    }

    /// True if the key has a limit of tokens now.
    pub(crate) fn counts_tokens(&self) -> bool {
        self.meter.counts().limits.tokens_per_minute.is_some()
    }

    /// What is held back.
    #[must_use]
    pub const fn reserved(&self) -> u64 {
        self.reserved
    }

    /// The request is over, and used so many tokens.
    pub fn settle(mut self, tokens: u64, now: Instant) {
        let now = self.meter.counts().tell(now);
        self.end(tokens, now);
    }

    fn end(&mut self, tokens: u64, now: Instant) {
        if std::mem::replace(&mut self.settled, true) {
            return;
        }
        let mut counts = self.meter.counts();
        counts.running = counts.running.saturating_sub(1);
        counts.reserved = counts.reserved.saturating_sub(self.reserved);
        counts.tokens.add(tokens, now);
    }
}

impl Drop for Permit {
    /// Nobody said what was used: what was reserved counts.
    fn drop(&mut self) {
        let latest = self.meter.counts().latest;
        if let Some(latest) = latest {
            self.end(self.reserved, latest);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
