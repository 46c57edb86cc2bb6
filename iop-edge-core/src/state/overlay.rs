//! Decides what evidence says of a provider's health, beside what is configured (HLT-3): only fresh `unavailable` evidence
//! lowers it, only a later CAPABILITIES result or a new generation raises it.
//!
//! ```text
//!           fresh unavailable evidence of a stall
//!  raised ───────────────────────────────────────▶ lowered ── asks again after 5 s, 10 s, 20 s … 60 s ──┐
//!    ▲                                               │  ▲                                               │
//!    └── available, newer, for exactly what lowered it ──┘  └──────── anything else ────────────────────────┘
//! ```

use std::num::NonZeroU64;
use std::time::Duration;

use iop_execution::{AdapterKey, Health, Target};

use crate::observe::EvidenceResult;
use crate::state::id::Generation;

/// First wait before a lowered provider is asked about; it doubles.
const FIRST_WAIT: Duration = Duration::from_secs(5);
/// Longest such wait.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Why a provider is lowered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lowered {
    pub(crate) adapter: AdapterKey,
    pub(crate) target: Target,
    /// Wait before the next question.
    wait: Duration,
    /// A question is on its way.
    asked: bool,
}

/// What evidence says of one provider in one generation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Overlay {
    /// Last sequence that was accepted.
    last: u64,
    lowered: Option<Lowered>,
    /// What it speaks of.
    subject: Option<(Generation, AdapterKey)>,
}

impl Overlay {
    /// Its Node has the provider in this generation, under this key. Another generation starts clean (HLT-3), and so does
    /// another instance: what is said of one that is gone says nothing of it.
    /// Answers whether that raises it.
    pub(crate) fn begin(&mut self, generation: Generation, adapter: &AdapterKey) -> bool {
        let was_lowered = self.is_lowered();
        match &mut self.subject {
            Some((of, key)) if *of == generation => {
                if key != adapter {
                    // The numbers go on: they are the connection's.
                    (self.lowered, *key) = (None, adapter.clone());
                }
            }
            Some(_) | None => *self = Self { subject: Some((generation, adapter.clone())), ..Self::default() },
        }
        was_lowered && !self.is_lowered()
    }

    /// Its Node says that it does not have what lowered it any more.
    pub(crate) fn gone(&mut self, adapter: &AdapterKey, target: &Target) -> EvidenceResult {
        let matches = |lowered: &mut Lowered| lowered.adapter == *adapter && lowered.target == *target;
        self.lowered.take_if(matches).map_or(EvidenceResult::NoOp, |_| EvidenceResult::Applied)
    }

    pub(crate) const fn is_lowered(&self) -> bool {
        self.lowered.is_some()
    }

    /// A sequence that is newer than all before becomes the last, whatever was observed with it.
    fn fresh(&mut self, seq: Option<NonZeroU64>) -> bool {
        let fresh = seq.is_some_and(|seq| seq.get() > self.last);
        if let Some(seq) = seq.filter(|_| fresh) {
            self.last = seq.get();
        }
        fresh
    }

    /// A stall was probed.
    pub(crate) fn stalled(
        &mut self,
        health: Health,
        seq: Option<NonZeroU64>,
        adapter: &AdapterKey,
        target: &Target,
    ) -> EvidenceResult {
        if !self.fresh(seq) {
            return EvidenceResult::Stale;
        }
        match health {
            Health::Unknown => EvidenceResult::Unknown,
            Health::Available => EvidenceResult::NoOp,
            Health::Unavailable if self.is_lowered() => EvidenceResult::NoOp,
            Health::Unavailable => {
                let (adapter, target) = (adapter.clone(), target.clone());
                self.lowered = Some(Lowered { adapter, target, wait: FIRST_WAIT, asked: false });
                EvidenceResult::Applied
            }
        }
    }

    /// A CAPABILITIES command for this adapter and target was answered.
    pub(crate) fn probed(
        &mut self,
        health: Health,
        seq: Option<NonZeroU64>,
        adapter: &AdapterKey,
        target: &Target,
    ) -> EvidenceResult {
        if !self.fresh(seq) {
            return EvidenceResult::Stale;
        }
        match health {
            Health::Unknown => EvidenceResult::Unknown,
            Health::Unavailable => EvidenceResult::NoOp,
            Health::Available => {
                let matches = |lowered: &mut Lowered| lowered.adapter == *adapter && lowered.target == *target;
                self.lowered.take_if(matches).map_or(EvidenceResult::NoOp, |_| EvidenceResult::Applied)
            }
        }
    }

    /// When to ask next, counted from now; `None` = there is nothing to ask, or a question is on its way.
    pub(crate) fn next_question(&self) -> Option<Duration> {
        self.lowered.as_ref().filter(|lowered| !lowered.asked).map(|lowered| lowered.wait)
    }

    /// A question is due: what to ask about.
    pub(crate) fn ask(&mut self) -> Option<(AdapterKey, Target)> {
        let lowered = self.lowered.as_mut().filter(|lowered| !lowered.asked)?;
        lowered.asked = true;
        lowered.wait = (lowered.wait * 2).min(LONGEST_WAIT);
        Some((lowered.adapter.clone(), lowered.target.clone()))
    }

    /// The question was answered, or can't be any more.
    pub(crate) fn answered(&mut self) {
        if let Some(lowered) = &mut self.lowered {
            lowered.asked = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> (AdapterKey, Target, Target) {
        (AdapterKey::new("a").unwrap(), Target::new("t").unwrap(), Target::new("u").unwrap())
    }

    const fn seq(n: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(n)
    }

    /// What the rules say, without the machine.
    #[derive(Default)]
    struct Model {
        last: u64,
        lowered: bool,
    }

    #[test]
    fn every_short_history_of_evidence_moves_it_as_the_rules_say() {
        // HLT-3, HLT-5, I7
        let (adapter, target, other) = names();
        let healths = [Health::Available, Health::Unavailable, Health::Unknown];
        // source, health, sequence (0 = none), other target
        let inputs: Vec<_> = (0..2)
            .flat_map(|source| healths.iter().flat_map(move |health| (0..4).map(move |n| (source, *health, n))))
            .flat_map(|(source, health, n)| [false, true].map(|elsewhere| (source, health, n, elsewhere)))
            .collect();
        let mut place = [0; 3];
        loop {
            let (mut overlay, mut model) = (Overlay::default(), Model::default());
            for step in place {
                let (source, health, n, elsewhere) = inputs[step];
                let fresh = n > model.last;
                let was = model.lowered;
                if fresh {
                    model.last = n;
                    match (source, health) {
                        (0, Health::Unavailable) if !elsewhere => model.lowered = true,
                        (1, Health::Available) if !elsewhere => model.lowered = false,
                        _ => {}
                    }
                }
                let of = if elsewhere { &other } else { &target };
                let result = match source {
                    // A stall elsewhere never reaches this overlay as evidence of another target: only lower by `target`.
                    0 if elsewhere => {
                        overlay.fresh(seq(n));
                        continue;
                    }
                    0 => overlay.stalled(health, seq(n), &adapter, of),
                    _ => overlay.probed(health, seq(n), &adapter, of),
                };
                assert_eq!(overlay.is_lowered(), model.lowered, "{place:?}");
                assert_eq!(result == EvidenceResult::Applied, was != model.lowered);
                assert_eq!(result == EvidenceResult::Stale, !fresh, "evidence without a sequence is never fresh");
            }
            let Some(at) = place.iter().rposition(|step| step + 1 < inputs.len()) else { break };
            place[at] += 1;
            place[at + 1..].fill(0);
        }
    }

    #[test]
    fn a_lowered_provider_is_asked_about_with_growing_waits_one_question_at_a_time() {
        // HLT-6
        let (adapter, target, _) = names();
        let mut overlay = Overlay::default();
        assert_eq!((overlay.next_question(), overlay.ask()), (None, None));
        overlay.stalled(Health::Unavailable, seq(1), &adapter, &target);
        let mut waits = Vec::new();
        for _ in 0..6 {
            waits.push(overlay.next_question().unwrap().as_secs());
            assert_eq!(overlay.ask(), Some((adapter.clone(), target.clone())));
            assert_eq!((overlay.next_question(), overlay.ask()), (None, None), "one is on its way");
            overlay.answered();
        }
        assert_eq!(waits, [5, 10, 20, 40, 60, 60]);
        overlay.probed(Health::Available, seq(2), &adapter, &target);
        assert_eq!((overlay.next_question(), overlay.ask()), (None, None));
    }
}
