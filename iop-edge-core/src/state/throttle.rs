//! Decides who has failed to register too often lately: by address and by token id (REG-8).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::token::TokenId;

/// Failures that are forgiven at once.
const BURST: u32 = 8;
/// Time in which one failure is forgotten.
const FORGET: Duration = Duration::from_secs(5);
/// Most addresses and ids that are remembered.
const MAX_KEYS: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Address(IpAddr),
    /// Only ids that are configured: an invented one creates no state.
    Token(TokenId),
}

/// Failures per source, each kept as the instant when the last of them is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    clear_at: BTreeMap<Source, Instant>,
}

impl Throttle {
    /// How long this source must wait before it may try again; `None` = not at all.
    pub(crate) fn blocked(&self, source: &Source, now: Instant) -> Option<Duration> {
        let left = self.clear_at.get(source)?.saturating_duration_since(now);
        left.checked_sub(FORGET * BURST).filter(|wait| !wait.is_zero())
    }

    /// A try of this source failed.
    pub(crate) fn failed(&mut self, source: Source, now: Instant) {
        if self.clear_at.len() >= MAX_KEYS && !self.clear_at.contains_key(&source) {
            self.clear_at.retain(|_, clear_at| *clear_at > now);
            if self.clear_at.len() >= MAX_KEYS {
                return;
            }
        }
        let entry = self.clear_at.entry(source).or_insert(now);
        // Bounded, so that a long attack does not lock an address out for longer than it lasts.
        *entry = ((*entry).max(now) + FORGET).min(now + FORGET * (2 * BURST));
    }
}

#[cfg(test)]
mod tests;
