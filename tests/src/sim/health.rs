//! Decides what evidence the Edge was told of the providers behind one connection, and what their health must look like
//! after that: the rules of HLT-3 and HLT-5 without the engine (I7).
//!
//! [`Told`] sees each message in the moment in which the Edge takes it, so it knows the same, in the same order.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use iop_execution::failure::StallDetail;
use iop_execution::{FailureCode, Health, RunEventKind, RunId, TunnelFrame};
use iop_wire::{CommandRequest, CommandResponse, CommandResult, DispatchHead, NodeCommand, RunNumber, ToEdge};

use crate::sim::history::Who;
use crate::sim::world::{Facts, Stall};

/// An answer that comes so long after its question, in milliseconds, may be too late for the Edge: nobody knows.
const MAYBE_LATE: u64 = 11_000;

/// What was told of one provider.
#[derive(Debug, Clone, Copy, Default)]
struct Evidence {
    last: u64,
    lowered: bool,
    /// The Edge may have seen it in another way.
    unsure: bool,
    /// There was evidence that could lower it, or an answer that could raise it, which was not made use of yet.
    against: bool,
    answered: bool,
}

impl Evidence {
    fn fresh(&mut self, seq: Option<NonZeroU64>) -> bool {
        let fresh = seq.is_some_and(|seq| seq.get() > self.last);
        if let Some(seq) = seq.filter(|_| fresh) {
            self.last = seq.get();
        }
        fresh
    }
}

/// What the Edge was told on one connection, which is one generation.
#[derive(Debug, Default)]
pub struct Told {
    /// Runs without a terminal that the Edge has taken.
    runs: BTreeMap<RunNumber, (RunId, String)>,
    /// Questions by number: when they went out, and about which provider.
    asked: BTreeMap<u64, (u64, String)>,
    providers: BTreeMap<String, Evidence>,
}

impl Told {
    /// A request goes out.
    pub fn dispatched(&mut self, head: &DispatchHead) {
        self.runs.insert(head.run, (head.run_id, head.provider_id.to_string()));
    }

    /// A question goes out.
    pub fn asked(&mut self, request: &CommandRequest, now: u64) {
        if let NodeCommand::Capabilities { adapter, target: Some(_) } = &request.command {
            self.asked.insert(request.command_id, (now, adapter.to_string()));
        }
    }

    /// The Edge takes a message.
    pub fn read(&mut self, message: &ToEdge, facts: &mut Facts) {
        match message {
            ToEdge::Event(run, event) if event.kind.is_terminal() => {
                let failure = match &event.kind {
                    RunEventKind::Error(failure) => failure.stall.as_deref(),
                    _ => None,
                };
                self.ended(*run, failure, facts);
            }
            ToEdge::Frame(run, _, frame) if frame.is_terminal() => {
                let failure = match frame {
                    TunnelFrame::Failed(failure) => failure.stall.as_deref(),
                    _ => None,
                };
                self.ended(*run, failure, facts);
            }
            ToEdge::CommandResponse(response) => self.answered(response, facts),
            _ => {}
        }
    }

    fn ended(&mut self, run: RunNumber, stall: Option<&StallDetail>, facts: &mut Facts) {
        let Some((run_id, provider)) = self.runs.remove(&run) else { return };
        let Some(stall) = stall else { return };
        let (confirmed, health) = (stall.ownership_close.retryable(), stall.provider_health());
        facts.note(Who::Edge, "stall", stall.ownership_close.as_str(), [stall.idle_ms, 0]);
        facts.note(Who::Edge, "stall", stall.liveness_classification.as_str(), [0, 0]);
        if stall.idle_ms < stall.timeout_ms || *provider != *stall.adapter.as_str() {
            facts.broken.push(format!("WDG-1, WDG-4: a stall at {provider} says {stall:?}"));
        }
        facts.stalls.insert(*run_id.as_bytes(), Stall { confirmed, health });
        facts.moved.insert(provider.clone(), facts.now);
        let evidence = self.providers.entry(provider).or_default();
        evidence.against |= health == Health::Unavailable;
        if evidence.fresh(stall.health_observation_seq) && health == Health::Unavailable {
            evidence.lowered = true;
        }
    }

    fn answered(&mut self, response: &CommandResponse, facts: &mut Facts) {
        let Some((asked, provider)) = self.asked.remove(&response.command_id) else { return };
        if let Err(failure) = &response.outcome
            && matches!(failure.code, FailureCode::UnknownAdapter | FailureCode::UnknownTarget)
        {
            // What was lowered is not there any more.
            let evidence = self.providers.entry(provider).or_default();
            (evidence.lowered, evidence.answered) = (false, true);
            return;
        }
        let Ok(CommandResult::Capabilities(found)) = &response.outcome else { return };
        let Some(health) = &found.health else { return };
        facts.note(Who::Edge, "answer", health.status.as_str(), [health.health_observation_seq.get(), 0]);
        facts.moved.insert(found.adapter.to_string(), facts.now);
        let evidence = self.providers.entry(found.adapter.to_string()).or_default();
        evidence.unsure |= facts.now - asked >= MAYBE_LATE;
        evidence.answered |= health.status == Health::Available;
        if evidence.fresh(Some(health.health_observation_seq)) && health.status == Health::Available {
            evidence.lowered = false;
        }
    }

    /// Whether the Edge must have lowered a provider. What nobody can know is as the Edge has it.
    pub fn must_be_lowered(&mut self, provider: &str, is: bool) -> bool {
        let Some(evidence) = self.providers.get_mut(provider) else { return false };
        if std::mem::take(&mut evidence.unsure) {
            evidence.lowered = is;
        }
        evidence.lowered
    }

    /// The Edge has moved a provider. True if it was told something that allows it.
    pub fn may_have_moved(&mut self, provider: &str, lowered: bool) -> bool {
        let Some(evidence) = self.providers.get_mut(provider) else { return false };
        std::mem::take(if lowered { &mut evidence.against } else { &mut evidence.answered })
    }
}
