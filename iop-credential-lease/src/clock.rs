//! Decides what time it is at the Edge: its own time at some moment of an exchange, plus what passed here since.
//!
//! The Node's wall clock has no say, so a wrong or corrected one neither extends nor kills a lease. Readings of the
//! monotonic clock are passed in.

use std::time::{Duration, Instant};

/// How far two clocks may run apart, in parts per million; it decides when a newer sample is better than a quicker one.
const DRIFT_PPM: u32 = 100;

#[derive(Debug, Clone, Copy)]
struct Sample {
    edge_ms: u64,
    /// When the question left. Between this moment and the answer the Edge read its clock, so the estimate is never behind
    /// the Edge's clock and at most one round trip ahead: a lease may end early here, never late.
    sent: Instant,
    round_trip: Duration,
}

impl Sample {
    fn edge_ms_at(&self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.sent).as_millis();
        self.edge_ms.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }

    fn uncertainty_at(&self, now: Instant) -> Duration {
        self.round_trip + now.saturating_duration_since(self.sent) * DRIFT_PPM / 1_000_000
    }
}

/// The Edge's time as a Node knows it, for one connection. Never goes back.
#[derive(Debug, Clone, Copy, Default)]
pub struct EdgeClock {
    best: Option<Sample>,
    floor_ms: u64,
}

impl EdgeClock {
    /// A clock that does not know the time yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { best: None, floor_ms: 0 }
    }

    /// Takes the Edge's time out of an answer: at the handshake first, then with each heartbeat. Of two samples the one
    /// with the shorter round trip counts, until drift may have made it worse than the other. A time of 0 says nothing.
    pub fn observe(&mut self, edge_ms: u64, sent: Instant, received: Instant) {
        let Some(round_trip) = received.checked_duration_since(sent) else { return };
        if edge_ms == 0 || self.best.is_some_and(|best| round_trip > best.uncertainty_at(received)) {
            return;
        }
        self.floor_ms = self.now_ms(received).unwrap_or(0);
        self.best = Some(Sample { edge_ms, sent, round_trip });
    }

    /// The Edge's time, in Unix milliseconds; `None` before the first sample.
    #[must_use]
    pub fn now_ms(&self, now: Instant) -> Option<u64> {
        self.best.map(|best| best.edge_ms_at(now).max(self.floor_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const EDGE: u64 = 1_700_000_000_000;

    #[test]
    fn unknown_before_the_handshake_and_then_the_edges_time_plus_what_passed() {
        // CRD-7
        let start = Instant::now();
        let mut clock = EdgeClock::new();
        assert_eq!(clock.now_ms(start), None);
        clock.observe(0, start, start);
        clock.observe(EDGE, start + MS, start);
        assert_eq!(clock.now_ms(start), None, "no time in it, or an answer before its question");
        clock.observe(EDGE, start, start + 40 * MS);
        assert_eq!(clock.now_ms(start + 1_000 * MS), Some(EDGE + 1_000));
    }

    #[test]
    fn a_slow_answer_does_not_replace_a_quick_one_until_drift_may_have() {
        // CRD-7
        let start = Instant::now();
        let mut clock = EdgeClock::new();
        clock.observe(EDGE, start, start + 10 * MS);
        // The same clock, answered late on the way back: taken at its word it would be 900 ms ahead.
        clock.observe(EDGE + 1_900, start + 1_000 * MS, start + 2_000 * MS);
        assert_eq!(clock.now_ms(start + 2_000 * MS), Some(EDGE + 2_000));
        // 100 parts in a million of two hours are 720 ms.
        let later = start + Duration::from_secs(7_200);
        clock.observe(EDGE + 7_200_300, later, later + 500 * MS);
        assert_eq!(clock.now_ms(later + 500 * MS), Some(EDGE + 7_200_800));
    }

    #[test]
    fn it_never_goes_back() {
        // CRD-7
        let start = Instant::now();
        let mut clock = EdgeClock::new();
        clock.observe(EDGE, start, start + 10 * MS);
        clock.observe(EDGE - 3_600_000, start + 20 * MS, start + 21 * MS);
        assert_eq!(clock.now_ms(start + 21 * MS), Some(EDGE + 21));
        assert_eq!(clock.now_ms(start + 5_000 * MS), Some(EDGE + 21), "it waits for the Edge to catch up");
    }

    #[test]
    fn a_week_of_drift_stays_within_a_round_trip() {
        // CRD-7: 50 parts in a million, a heartbeat each 30 s, round trips of 1 to 200 ms.
        let start = Instant::now();
        let mut clock = EdgeClock::new();
        let edge_at = |node: Duration| EDGE + u64::try_from((node + node * 50 / 1_000_000).as_millis()).unwrap();
        for beat in 0..7 * 24 * 120_u32 {
            let sent = Duration::from_secs(30) * beat;
            let round_trip = MS * (1 + beat * 7919 % 200);
            clock.observe(edge_at(sent + round_trip / 2), start + sent, start + sent + round_trip);
            let known = clock.now_ms(start + sent + round_trip).unwrap();
            assert!(known.abs_diff(edge_at(sent + round_trip)) <= 200, "beat {beat}");
        }
    }
}
