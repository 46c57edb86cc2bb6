//! Decides when a connection that says nothing is asked, suspected, and given up for requests that nobody has seen an answer
//! of (FEN-7). A suspicion is no fence: only the heartbeat ends a connection.
//!
//! ```text
//!         2 s of silence with work: ping         3 s without a word          withdraw time since the ping
//!  Calm ────────────────────────────────▶ Asked ─────────────────▶ Suspect ───────────────────────────────▶ withdraw, again
//!   ▲                                       │                         │                                      and again
//!   └──────────────── any message ──────────┴─────────────────────────┘
//! ```

use std::time::{Duration, Instant};

/// How long a Node with work in flight may say nothing before it is asked.
pub(crate) const SILENCE: Duration = Duration::from_secs(2);
/// How long it may leave that unanswered before new work prefers other Nodes.
pub(crate) const SUSPECT_AFTER: Duration = Duration::from_secs(3);
/// How much later than asked a timer about a peer's silence may run before it was this process that stood still: what the
/// peer said meanwhile may wait to be read.
const SUSPENDED: Duration = Duration::from_secs(1);

/// Whether a timer about a peer's silence ran so late that it says nothing about the peer.
pub(crate) fn was_suspended(due: Instant, now: Instant) -> bool {
    now.saturating_duration_since(due) > SUSPENDED
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SuspicionAction {
    /// Send a ping.
    Ping,
    /// New work prefers other Nodes from now on.
    Suspect,
    /// End what is uncommitted.
    Withdraw,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Calm,
    Asked { at: Instant },
    Suspect { at: Instant, withdraw: Option<Instant> },
}

/// Suspicion of one connection. Its driver tells when work began, for an idle Node owes nobody a word.
#[derive(Debug)]
pub(crate) struct Suspicion {
    heard: Instant,
    phase: Phase,
}

impl Suspicion {
    pub(crate) const fn new(now: Instant) -> Self {
        Self { heard: now, phase: Phase::Calm }
    }

    /// A message came. True if that ends a suspicion.
    pub(crate) fn heard(&mut self, now: Instant) -> bool {
        self.heard = now;
        matches!(std::mem::replace(&mut self.phase, Phase::Calm), Phase::Suspect { .. })
    }

    /// What is due, one action at a time. `busy` = since when there has been work in flight; `withdraw` = how long a ping may
    /// go unanswered before uncommitted requests are ended.
    pub(crate) fn handle_timeout(
        &mut self,
        busy: Option<Instant>,
        withdraw: Option<Duration>,
        now: Instant,
    ) -> Option<SuspicionAction> {
        let due = self.poll_timeout(busy).filter(|due| *due <= now)?;
        match self.phase {
            Phase::Asked { .. } if was_suspended(due, now) => {
                self.phase = Phase::Asked { at: now };
                Some(SuspicionAction::Ping)
            }
            Phase::Suspect { .. } if was_suspended(due, now) => {
                self.phase = Phase::Suspect { at: now, withdraw: withdraw.map(|after| now + after) };
                Some(SuspicionAction::Ping)
            }
            Phase::Calm => {
                self.phase = Phase::Asked { at: now };
                Some(SuspicionAction::Ping)
            }
            Phase::Asked { at } => {
                self.phase = Phase::Suspect { at, withdraw: withdraw.map(|after| at + after) };
                Some(SuspicionAction::Suspect)
            }
            Phase::Suspect { at, .. } => {
                // Again for what is sent there meanwhile, where there is no other Node.
                self.phase = Phase::Suspect { at, withdraw: Some(now + SUSPECT_AFTER) };
                Some(SuspicionAction::Withdraw)
            }
        }
    }

    /// When to call [`Self::handle_timeout`], as far as is known now: a message that comes only makes it later.
    pub(crate) fn poll_timeout(&self, busy: Option<Instant>) -> Option<Instant> {
        match self.phase {
            Phase::Calm => busy.map(|since| since.max(self.heard) + SILENCE),
            Phase::Asked { at } => Some(at + SUSPECT_AFTER),
            Phase::Suspect { withdraw, .. } => withdraw,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs the machine for `until` ms against messages at the given times; gives each action with its time.
    fn history(busy_at: u32, heard: &[u32], withdraw: Option<u32>, until: u32) -> Vec<(u32, SuspicionAction)> {
        let start = Instant::now();
        let mut machine = Suspicion::new(start);
        let mut seen = Vec::new();
        for ms in 0..=until {
            let now = start + ms * MS;
            if heard.contains(&ms) {
                machine.heard(now);
            }
            let busy = (ms >= busy_at).then_some(start + busy_at * MS);
            while let Some(action) = machine.handle_timeout(busy, withdraw.map(|ms| ms * MS), now) {
                seen.push((ms, action));
            }
        }
        seen
    }

    #[test]
    fn a_silent_node_with_work_is_asked_suspected_and_given_up() {
        // FEN-7
        use SuspicionAction::{Ping, Suspect, Withdraw};
        assert_eq!(
            history(0, &[], Some(10_000), 16_000),
            [(2000, Ping), (5000, Suspect), (12_000, Withdraw), (15_000, Withdraw)]
        );
        assert_eq!(history(0, &[], Some(3000), 6000), [(2000, Ping), (5000, Suspect), (5000, Withdraw)]);
        assert_eq!(history(0, &[], None, 60_000), [(2000, Ping), (5000, Suspect)]);
        assert_eq!(history(1000, &[500], None, 4000), [(3000, Ping)], "silence counts from when there is work");
    }

    #[test]
    fn an_idle_node_owes_nobody_a_word_and_one_that_answers_is_no_suspect() {
        // FEN-7: a long prefill never triggers it, for the Node answers pings
        assert_eq!(history(100_000, &[], Some(3000), 90_000), []);
        let pongs: Vec<_> = (0..60).map(|n| n * 2000 + 2100).collect();
        let asked = history(0, &pongs, Some(3000), 60_000);
        assert!(!asked.is_empty() && asked.iter().all(|(_, action)| *action == SuspicionAction::Ping), "{asked:?}");
    }

    #[test]
    fn any_message_ends_a_suspicion() {
        // FEN-7
        let start = Instant::now();
        let mut machine = Suspicion::new(start);
        let at = |ms: u32| start + ms * MS;
        assert!(!machine.heard(at(0)));
        for ms in [2000, 5000] {
            assert!(machine.handle_timeout(Some(start), Some(10_000 * MS), at(ms)).is_some());
        }
        assert!(machine.heard(at(6000)) && !machine.heard(at(6001)));
        assert_eq!(machine.poll_timeout(Some(start)), Some(at(8001)));
        assert_eq!(machine.poll_timeout(None), None);
    }

    #[test]
    fn a_process_that_stood_still_asks_again_before_it_blames_a_node() {
        // FEN-7, WIR-12
        use SuspicionAction::{Ping, Suspect, Withdraw};
        let start = Instant::now();
        let at = |ms: u32| start + ms * MS;
        for suspect in [false, true] {
            let mut machine = Suspicion::new(start);
            let mut act = |ms| machine.handle_timeout(Some(start), Some(4_000 * MS), at(ms));
            assert_eq!(act(2_000), Some(Ping));
            if suspect {
                assert_eq!(act(5_000), Some(Suspect));
            }
            assert_eq!((act(60_000), act(60_000)), (Some(Ping), None), "suspect: {suspect}");
            let blamed: Vec<_> = (60_000..=65_000).filter_map(|ms| Some((ms, act(ms)?))).collect();
            let withdraw = (64_000, Withdraw);
            assert_eq!(blamed, if suspect { vec![withdraw] } else { vec![(63_000, Suspect), withdraw] });
        }
    }
}
