//! Decides when to ping and when a connection is dead (WIR-12).
//!
//! A ping goes out every interval, whatever else is written; a connection is dead when one has had no pong for the
//! timeout. Only pongs count. A timer that runs far too late means that this process was suspended: what was missed then
//! proves nothing, so a fresh ping gets its own full timeout first.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::limits::{HEARTBEAT_INTERVAL, HEARTBEAT_OUTSTANDING, HEARTBEAT_SLACK, HEARTBEAT_TIMEOUT};

/// Times of the heartbeat: constants of the transport profile, injected by tests only.
#[derive(Debug, Clone, Copy)]
pub struct HeartbeatProfile {
    /// Time between pings.
    pub interval: Duration,
    /// Time a ping may go without a pong.
    pub timeout: Duration,
    /// When the first ping goes, up to `interval`, to spread load (random, drawn by the driver).
    pub first_shift: Duration,
}

impl Default for HeartbeatProfile {
    /// 30 s and 45 s, the first ping at once.
    fn default() -> Self {
        Self { interval: HEARTBEAT_INTERVAL, timeout: HEARTBEAT_TIMEOUT, first_shift: Duration::ZERO }
    }
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeartbeatAction {
    /// Send a ping with this nonce.
    Ping(u64),
    /// The connection is dead: close it as `heartbeat_timeout`.
    Dead,
}

#[derive(Debug, Clone, Copy)]
struct Outstanding {
    nonce: u64,
    sent: Instant,
}

/// Sans-IO heartbeat of one connection.
///
/// Call [`Heartbeat::handle_timeout`] at [`Heartbeat::poll_timeout`], and again until it returns `None`.
#[derive(Debug)]
pub struct Heartbeat {
    profile: HeartbeatProfile,
    next_ping: Instant,
    last_nonce: u64,
    /// Pings without a pong, oldest first.
    outstanding: VecDeque<Outstanding>,
}

impl Heartbeat {
    /// Starts with a connection.
    #[must_use]
    pub fn new(now: Instant, profile: HeartbeatProfile) -> Self {
        let next_ping = now + profile.first_shift.min(profile.interval);
        Self { profile, next_ping, last_nonce: 0, outstanding: VecDeque::new() }
    }

    /// Its own pong or a later one's answers a ping; others are ignored (W16).
    pub fn handle_pong(&mut self, _now: Instant, nonce: u64) {
        if nonce <= self.last_nonce {
            while self.outstanding.front().is_some_and(|ping| ping.nonce <= nonce) {
                self.outstanding.pop_front();
            }
        }
    }

    /// What is due at `now`, one action at a time.
    pub fn handle_timeout(&mut self, now: Instant) -> Option<HeartbeatAction> {
        if now > self.poll_timeout() + HEARTBEAT_SLACK {
            self.outstanding.clear();
            return Some(HeartbeatAction::Ping(self.ping_now(now)));
        }
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            return Some(HeartbeatAction::Dead);
        }
        (self.next_ping <= now).then(|| HeartbeatAction::Ping(self.ping_now(now)))
    }

    /// Asks for a ping now (suspicion, missing receipt): the nonce to send. The next one follows an interval later.
    pub fn ping_now(&mut self, now: Instant) -> u64 {
        self.last_nonce += 1;
        if self.outstanding.len() >= HEARTBEAT_OUTSTANDING {
            // The oldest one decides; the latest one can answer it.
            self.outstanding.pop_back();
        }
        self.outstanding.push_back(Outstanding { nonce: self.last_nonce, sent: now });
        self.next_ping = now + self.profile.interval;
        self.last_nonce
    }

    /// When to call [`Heartbeat::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Instant {
        self.deadline().map_or(self.next_ping, |deadline| deadline.min(self.next_ping))
    }

    fn deadline(&self) -> Option<Instant> {
        self.outstanding.front().map(|ping| ping.sent + self.profile.timeout)
    }
}

#[cfg(test)]
mod tests;
