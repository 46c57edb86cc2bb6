//! Decides whose turn it is: virtual time per caller, charged by what its requests are expected to cost (QUE-1).
//!
//! Start-time fair queueing: a caller's next request starts at its own last finish, or at the virtual time if that is later,
//! and whoever starts first goes first. So callers that want more than there is get equal shares, one that asks for little
//! is served at once, and nobody saves up claims while it asks for nothing.

use std::collections::BTreeMap;

use iop_execution::Principal;

/// Least a request is charged, in estimated prompt tokens: the cost of an answer to a short prompt is not short.
const MIN_CHARGE: u64 = 256;
/// Most callers whose finish is remembered. Beyond it new ones start at the virtual time, as if they had asked for nothing.
const MAX_CALLERS: usize = 4096;

/// Where a caller's next request would start: smaller is sooner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn(u64);

/// The virtual clock of one Edge. Requests without a principal are one caller.
#[derive(Debug, Default)]
pub(crate) struct FairClock {
    now: u64,
    /// Only those beyond `now`: the others start at `now` anyway.
    finish: BTreeMap<Option<Principal>, u64>,
}

impl FairClock {
    /// When the next request of this caller would start.
    pub(crate) fn turn(&self, caller: &Option<Principal>) -> Turn {
        Turn(self.finish.get(caller).copied().unwrap_or(0).max(self.now))
    }

    /// A request of this caller got its place.
    pub(crate) fn served(&mut self, caller: &Option<Principal>, prompt_tokens: u32) {
        let Turn(start) = self.turn(caller);
        self.now = start;
        let finish = start.saturating_add(u64::from(prompt_tokens).max(MIN_CHARGE));
        match self.finish.get_mut(caller) {
            Some(last) => *last = finish,
            None => {
                if self.finish.len() >= MAX_CALLERS {
                    let now = self.now;
                    self.finish.retain(|_, finish| *finish > now);
                }
                if self.finish.len() < MAX_CALLERS {
                    self.finish.insert(caller.clone(), finish);
                }
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn callers(&self) -> usize {
        self.finish.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(name: &str) -> Option<Principal> {
        Some(Principal::new(name).unwrap())
    }

    /// Serves `places` one by one to whoever is first among callers that always want more; counts tokens per caller.
    fn serve(clock: &mut FairClock, wants: &[(&str, u32)], places: usize) -> Vec<u64> {
        let mut tokens = vec![0; wants.len()];
        for _ in 0..places {
            let next = (0..wants.len()).min_by_key(|at| clock.turn(&caller(wants[*at].0))).unwrap();
            clock.served(&caller(wants[next].0), wants[next].1);
            tokens[next] += u64::from(wants[next].1);
        }
        tokens
    }

    #[test]
    fn callers_that_want_more_than_there_is_share_by_tokens() {
        // QUE-1
        let tokens = serve(&mut FairClock::default(), &[("big", 4000), ("small", 1000)], 1000);
        assert!(tokens[0].abs_diff(tokens[1]) <= 4000, "{tokens:?}");
        let tokens = serve(&mut FairClock::default(), &[("a", 1), ("b", 1)], 100);
        assert_eq!(tokens, [50, 50], "short prompts cost the same");
    }

    #[test]
    fn silence_saves_nothing_and_costs_nothing() {
        // QUE-1
        let mut clock = FairClock::default();
        serve(&mut clock, &[("greedy", 1000)], 100);
        assert!(clock.turn(&caller("new")) < clock.turn(&caller("greedy")), "the new one goes first");
        let shares = serve(&mut clock, &[("greedy", 1000), ("new", 1000)], 100);
        assert!(shares[0].abs_diff(shares[1]) <= 1000, "and then takes turns: {shares:?}");
    }

    #[test]
    fn memory_is_bounded() {
        // QUE-1, I10
        let mut clock = FairClock::default();
        for n in 0..2 * MAX_CALLERS {
            clock.served(&caller(&format!("c{n}")), 1);
            assert!(clock.callers() <= MAX_CALLERS);
        }
    }
}
