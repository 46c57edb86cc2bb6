//! Decides how long to wait before the next connection, and when to give up (NOD-1).
//!
//! One policy covers the first connection and every later one:
//!
//! - waits grow from 1 s, doubling, jittered downwards to no less than a tenth, while they are below the interval: Nodes that
//!   lost one Edge in the same instant spread over nearly all of the first second, and none of them dials in a hot loop;
//! - from then on each wait is the interval, jittered upwards only (× 1.0 to 1.25), and only those count as attempts, so
//!   a Node survives an outage of at least `max_attempts × interval`;
//! - a retry-after of a refusal or a Goodbye is a minimum, at most 300 s; a wait that it makes longer is jittered upwards, so
//!   that the Nodes an Edge sent away together do not come back together;
//! - 60 s in Ready reset everything; being accepted resets nothing, so an Edge that accepts and drops is given up too.
//!
//! Randomness is handed in. It does not decide whether a failure is worth another try: see [`is_fatal_close`] and
//! `RefusalReason::is_fatal`.

use std::time::{Duration, Instant};

use iop_wire::CloseCode;

/// First wait, before jitter.
pub const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Time in Ready that makes the past forgotten.
pub const RESET_AFTER: Duration = Duration::from_secs(60);
/// Most of a peer's retry-after that is honoured.
pub const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);
/// Attempts when none are configured.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 10;
/// Interval when none is configured.
pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(10);

/// How often and how fast a Node dials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReconnectPolicy {
    max_attempts: Option<u32>,
    interval: Duration,
}

/// A policy that would dial without end and without pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("reconnect.interval_sec must be positive when reconnect.max_attempts is 0 (unlimited)")]
pub struct InvalidPolicy;

impl ReconnectPolicy {
    /// A policy as configured: `max_attempts` omitted = 10, 0 = unlimited; `interval` omitted = 10 s.
    ///
    /// # Errors
    /// [`InvalidPolicy`] when the interval is 0 and the attempts are unlimited.
    pub fn new(max_attempts: Option<u32>, interval: Option<Duration>) -> Result<Self, InvalidPolicy> {
        let interval = interval.unwrap_or(DEFAULT_INTERVAL);
        let max_attempts = match max_attempts.unwrap_or(DEFAULT_MAX_ATTEMPTS) {
            0 if interval.is_zero() => return Err(InvalidPolicy),
            0 => None,
            n => Some(n),
        };
        Ok(Self { max_attempts, interval })
    }

    /// Most waits at the interval; `None` = unlimited.
    #[must_use]
    pub const fn max_attempts(&self) -> Option<u32> {
        self.max_attempts
    }

    /// The longest wait, before jitter.
    #[must_use]
    pub const fn interval(&self) -> Duration {
        self.interval
    }
}

impl Default for ReconnectPolicy {
    fn default() -> Self {
        Self { max_attempts: Some(DEFAULT_MAX_ATTEMPTS), interval: DEFAULT_INTERVAL }
    }
}

/// What to do after a connection failed or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "there is no third way")]
pub enum Next {
    /// Wait this long, then dial.
    Dial(Duration),
    /// Give up.
    Exhausted,
}

/// The waits of one Edge target.
#[derive(Debug)]
pub struct Reconnect {
    policy: ReconnectPolicy,
    wait: Duration,
    attempts: u32,
    ready_since: Option<Instant>,
}

impl Reconnect {
    /// Nothing was tried yet. The first dial needs no wait.
    #[must_use]
    pub const fn new(policy: ReconnectPolicy) -> Self {
        Self { policy, wait: FIRST_WAIT, attempts: 0, ready_since: None }
    }

    /// The connection became ready.
    pub const fn ready(&mut self, now: Instant) {
        self.ready_since = Some(now);
    }

    /// A dial failed or a connection ended, in a way that is worth another try. `retry_after` is the peer's wish,
    /// `random` a uniform value.
    pub fn ended(&mut self, now: Instant, retry_after: Duration, random: u32) -> Next {
        if self.ready_since.take().is_some_and(|since| now.saturating_duration_since(since) >= RESET_AFTER) {
            self.wait = FIRST_WAIT;
            self.attempts = 0;
        }
        let interval = self.policy.interval;
        let wait = if self.wait < interval {
            let wait = self.wait;
            self.wait = wait.saturating_mul(2);
            let least = wait / 10;
            least + fraction(wait - least, random)
        } else {
            if self.policy.max_attempts.is_some_and(|max| self.attempts >= max) {
                return Next::Exhausted;
            }
            self.attempts = self.attempts.saturating_add(1);
            interval.saturating_add(fraction(interval / 4, random))
        };
        let least = retry_after.min(MAX_RETRY_AFTER);
        Next::Dial(if wait < least { least + fraction(least / 4, random) } else { wait })
    }

    /// Waits at the interval since the last reset.
    #[must_use]
    pub const fn attempts(&self) -> u32 {
        self.attempts
    }
}

/// `random / 2^32` of a duration.
pub(crate) fn fraction(of: Duration, random: u32) -> Duration {
    let nanos = (of.as_nanos() * u128::from(random)) >> 32;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// True if a connection that ended like this can't ever work with the Node as it is: its configuration or its credential
/// has to change first.
#[must_use]
pub const fn is_fatal_close(code: CloseCode) -> bool {
    match code {
        CloseCode::UnsupportedProtocol | CloseCode::RemovedFromConfig => true,
        // A renewed certificate may be there already; if not, the next handshake says what is wrong with this one.
        CloseCode::IdentityRevoked
        | CloseCode::Closed
        | CloseCode::HeartbeatTimeout
        | CloseCode::ProtocolViolation
        | CloseCode::FlowControl
        | CloseCode::ControlOverflow
        | CloseCode::Superseded
        | CloseCode::Drained
        | CloseCode::Restart
        | CloseCode::Shutdown
        | CloseCode::RegisterTimeout
        | CloseCode::ReadyTimeout => false,
    }
}

#[cfg(test)]
mod tests;
