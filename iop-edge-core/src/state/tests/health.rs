//! Evidence about providers, and what it does to who waits.

use std::num::NonZeroU64;

use iop_execution::failure::{LivenessClassification, OwnershipClose, StallDetail, TimeoutSetting};
use iop_execution::{Capabilities, ExecutionFailure, FailureCode, Health};
use iop_wire::{CapabilitiesResult, CommandResponse, CommandResult, ConfigAck, NodeCommand, TargetHealth};

use super::*;
use crate::api::CommandError;
use crate::observe::{EvidenceResult, EvidenceSource, ProviderLevel};
use crate::snapshot::{ProviderHealth, Status};

const SECOND: Duration = Duration::from_secs(1);

fn stall(adapter: &str, target: &str, health: Health, seq: u64) -> StallDetail {
    let (adapter, target) = (AdapterKey::new(adapter).unwrap(), Target::new(target).unwrap());
    let mut detail = StallDetail::new(adapter, target, TimeoutSetting::ResponseStall);
    detail.liveness_classification = LivenessClassification::from(health);
    detail.health_observation_seq = NonZeroU64::new(seq);
    detail.ownership_close = OwnershipClose::Confirmed { retryable: true };
    detail
}

fn evidence(effects: &[Effect]) -> Vec<EvidenceResult> {
    let seen = effects.iter().filter_map(|effect| match effect {
        Effect::Observe(Observation::HealthEvidence { result, .. }) => Some(*result),
        _ => None,
    });
    seen.collect()
}

/// Questions that went out: connection, command, adapter, target.
fn questions(effects: &[Effect]) -> Vec<(ConnectionId, u64, String, String)> {
    let asked = effects.iter().filter_map(|effect| match effect {
        Effect::Send { connection, message } => match &**message {
            ToNode::Command(request) => match &request.command {
                NodeCommand::Capabilities { adapter, target: Some(target) } => {
                    Some((*connection, request.command_id, adapter.to_string(), target.to_string()))
                }
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    asked.collect()
}

fn answer(id: u64, adapter: &str, target: &str, status: Health, seq: u64) -> CommandResponse {
    let health = TargetHealth {
        target: Target::new(target).unwrap(),
        status,
        health_observation_seq: NonZeroU64::new(seq).unwrap(),
    };
    CommandResponse {
        command_id: id,
        session_id: None,
        outcome: Ok(CommandResult::Capabilities(CapabilitiesResult {
            adapter: AdapterKey::new(adapter).unwrap(),
            capabilities: Capabilities::runs_only(),
            health: Some(health),
        })),
    }
}

struct Lab {
    state: EdgeState,
    id: ConnectionId,
    generation: Generation,
    now: Instant,
}

impl Lab {
    fn new() -> Self {
        let now = Instant::now();
        let mut state = new_state(catalog());
        let id = connect(&mut state, "n1", now);
        let generation = state.generation(id).unwrap();
        effects(&mut state);
        Self { state, id, generation, now }
    }

    /// A run on provider a that stalls with this evidence; gives what was made of it.
    fn stalls(&mut self, health: Health, seq: u64) -> (Option<String>, Vec<Effect>) {
        let run = grant(self.state.submit(ask("only-a", 1), self.now)).attempt;
        self.state.dispatch(run, self.now).unwrap();
        effects(&mut self.state);
        let handoff = self.state.handle_stall(run, self.generation, &stall("a", "t", health, seq), self.now);
        assert!(self.state.handle_terminal(run, self.generation, Verdict::Neutral, self.now), "HLT-7");
        assert_eq!(in_use(&self.state, "a"), PlaceCounters::default(), "HLT-7");
        (handoff.map(|provider| provider.to_string()), effects(&mut self.state))
    }

    fn provider(&self) -> crate::snapshot::ProviderSnapshot {
        self.state.snapshot(self.now).provider(&ProviderId::new("a").unwrap()).unwrap().clone()
    }

    fn lowered(&self) -> bool {
        self.provider().health == ProviderHealth::Unavailable
    }
}

#[test]
fn s04_only_evidence_of_the_lease_s_own_generation_and_target_counts() {
    // HLT-1, HLT-7
    let mut lab = Lab::new();
    let run = grant(lab.state.submit(ask("only-a", 1), lab.now)).attempt;
    lab.state.dispatch(run, lab.now).unwrap();
    let good = || stall("a", "t", Health::Unavailable, 1);
    effects(&mut lab.state);
    for (generation, detail) in [
        (Generation(lab.generation.0 + 1), good()),
        (lab.generation, stall("b", "t", Health::Unavailable, 1)),
        (lab.generation, stall("a", "u", Health::Unavailable, 1)),
    ] {
        assert_eq!(lab.state.handle_stall(run, generation, &detail, lab.now), None);
        assert_eq!(evidence(&effects(&mut lab.state)), [EvidenceResult::Mismatch]);
        assert!(!lab.lowered());
    }
    assert!(lab.state.handle_terminal(run, lab.generation, Verdict::Neutral, lab.now), "released all the same");
    assert_eq!(lab.state.handle_stall(run, lab.generation, &good(), lab.now), None, "without a lease it is nobody's");
}

#[test]
fn s04_a_confirmed_stall_is_handed_over_fresh_or_not() {
    // HLT-2, HLT-3
    let mut lab = Lab::new();
    for (health, seq, result) in [
        (Health::Available, 5, EvidenceResult::NoOp),
        (Health::Unknown, 6, EvidenceResult::Unknown),
        (Health::Unavailable, 6, EvidenceResult::Stale),
        (Health::Unavailable, 0, EvidenceResult::Stale),
    ] {
        let (handoff, effects) = lab.stalls(health, seq);
        assert_eq!((handoff.as_deref(), evidence(&effects)), (Some("a"), vec![result]), "{health} {seq}");
        assert!(!lab.lowered());
    }
}

#[test]
fn s04_a_lowered_provider_is_out_of_admission_and_who_waits_is_resolved_again() {
    // HLT-3, HLT-4, FEN-3
    let mut lab = Lab::new();
    let second = connect(&mut lab.state, "n2", lab.now);
    let _ = second;
    let run = grant(lab.state.submit(ask("only-a", 1), lab.now)).attempt;
    lab.state.dispatch(run, lab.now).unwrap();
    let hopeless = queued(lab.state.submit(ask("only-a", 2), lab.now));
    grant(lab.state.submit(ask("any", 3), lab.now));
    let other = queued(lab.state.submit(ask("any", 4), lab.now));
    effects(&mut lab.state);
    lab.state.handle_stall(run, lab.generation, &stall("a", "t", Health::Unavailable, 1), lab.now);
    let after = effects(&mut lab.state);
    assert_eq!(refusals(&after), [(hopeless, SubmitError::Unavailable)]);
    assert!(after.contains(&Effect::Observe(Observation::HealthTransition { to: ProviderLevel::Unavailable })));
    lab.state.handle_terminal(run, lab.generation, Verdict::Neutral, lab.now);
    assert_eq!(lab.state.waiting(), [other], "it waits for the other provider, though this one is idle");
    assert_eq!(lab.state.submit(ask("only-a", 5), lab.now), Err(SubmitError::Unavailable));
    let seen = lab.provider();
    assert!(seen.connected && seen.enabled);
    assert_eq!((seen.status, seen.health), (Status::Unavailable, ProviderHealth::Unavailable));
    assert_eq!((seen.effective, seen.configured_capacity), (PlaceLimits::default(), 1));
    // Nothing of this raises it: a stall that says available, a good run elsewhere, a pong.
    lab.state.handle_pong(lab.id, 1, lab.now);
    assert!(lab.lowered());
}

#[test]
fn s04_the_edge_asks_by_itself_and_a_newer_available_raises_it() {
    // HLT-5, HLT-6, HLT-4
    let mut lab = Lab::new();
    lab.stalls(Health::Unavailable, 3);
    assert!(lab.lowered());
    let mut at = lab.now;
    for (wait, status, seq) in
        [(5, Health::Unavailable, 4), (10, Health::Unknown, 5), (20, Health::Available, 5), (40, Health::Available, 6)]
    {
        lab.state.handle_timeout(at + wait * SECOND - Duration::from_millis(1));
        assert!(questions(&effects(&mut lab.state)).is_empty());
        at += wait * SECOND;
        lab.state.handle_timeout(at);
        let asked = questions(&effects(&mut lab.state));
        let [(connection, id, adapter, target)] = asked.as_slice() else { panic!("{asked:?}") };
        assert_eq!((*connection, adapter.as_str(), target.as_str()), (lab.id, "a", "t"));
        lab.state.handle_timeout(at + 3 * SECOND);
        assert!(questions(&effects(&mut lab.state)).is_empty(), "one at a time");
        lab.now = at;
        lab.state.handle_command_response(lab.id, answer(*id, "a", "t", status, seq), at);
    }
    assert!(!lab.lowered());
    let after = effects(&mut lab.state);
    assert!(after.contains(&Effect::Observe(Observation::HealthTransition { to: ProviderLevel::Available })));
    grant(lab.state.submit(ask("only-a", 9), lab.now));
    lab.state.handle_timeout(lab.now + 200 * SECOND);
    assert!(questions(&effects(&mut lab.state)).is_empty(), "and is asked about no more");
}

#[test]
fn s04_an_answer_that_differs_from_the_question_raises_nothing() {
    // HLT-5
    type Make = fn(u64) -> CommandResponse;
    let cases: [(Make, EvidenceResult); 5] = [
        (|id| answer(id, "b", "t", Health::Available, 9), EvidenceResult::Mismatch),
        (|id| answer(id, "a", "u", Health::Available, 9), EvidenceResult::Mismatch),
        (|id| answer(id, "a", "t", Health::Available, 3), EvidenceResult::Stale),
        (|id| answer(id, "a", "t", Health::Unknown, 9), EvidenceResult::Unknown),
        (
            |id| CommandResponse {
                command_id: id,
                session_id: None,
                outcome: Ok(CommandResult::TransportStatus { active_runs: 0 }),
            },
            EvidenceResult::Malformed,
        ),
    ];
    for (make, result) in cases {
        let mut lab = Lab::new();
        lab.stalls(Health::Unavailable, 3);
        lab.state.handle_timeout(lab.now + 5 * SECOND);
        let asked = questions(&effects(&mut lab.state));
        lab.state.handle_command_response(lab.id, make(asked[0].1), lab.now + 5 * SECOND);
        assert_eq!(evidence(&effects(&mut lab.state)), [result]);
        assert!(lab.lowered());
        lab.state.handle_timeout(lab.now + 15 * SECOND);
        assert_eq!(questions(&effects(&mut lab.state)).len(), 1, "and is asked again");
    }
}

#[test]
fn s04_a_new_generation_starts_clean_and_an_old_answer_changes_nothing() {
    // HLT-3, HLT-5, HLT-6
    let mut lab = Lab::new();
    lab.stalls(Health::Unavailable, 3);
    lab.state.handle_timeout(lab.now + 5 * SECOND);
    let asked = questions(&effects(&mut lab.state));
    lab.now += 6 * SECOND;
    lab.state.handle_closed(lab.id, CloseCode::Closed, lab.now);
    assert_eq!(lab.state.commands_on_their_way(), 0);
    lab.state.handle_timeout(lab.now + 30 * SECOND);
    assert!(questions(&effects(&mut lab.state)).is_empty(), "nobody is there to ask");
    effects(&mut lab.state);
    lab.id = connect(&mut lab.state, "n1", lab.now + 31 * SECOND);
    let raised = Effect::Observe(Observation::HealthTransition { to: ProviderLevel::Available });
    assert_eq!(effects(&mut lab.state).iter().filter(|effect| **effect == raised).count(), 1, "OBS-2");
    lab.generation = lab.state.generation(lab.id).unwrap();
    assert!(!lab.lowered());
    lab.now += 32 * SECOND;
    let (_, seen) = lab.stalls(Health::Unavailable, 1);
    assert_eq!(evidence(&seen), [EvidenceResult::Applied], "sequences begin anew");
    // The late answer to the old question comes on the new connection.
    lab.state.handle_command_response(lab.id, answer(asked[0].1, "a", "t", Health::Available, 9), lab.now);
    assert!(lab.lowered());
}

#[test]
fn a_provider_that_a_config_takes_away_and_gives_back_is_what_it_was() {
    // HLT-3: the generation is the same
    let mut lab = Lab::new();
    lab.stalls(Health::Unavailable, 3);
    for (revision, enabled) in [(8, false), (9, true)] {
        let mut node = node_entry("n1", &[("a", 1, 0), ("b", 2, 1)]);
        node.providers[0].enabled = enabled;
        let config = Catalog::builder().revision(revision).node(node).model(group("only-a", &["a"])).build().unwrap();
        lab.state.apply_config(Arc::new(config), lab.now).unwrap();
        let reported: &[&str] = if enabled { &["a", "b"] } else { &["b"] };
        let providers = reported.iter().map(|id| provider_ready(id, &[])).collect();
        let error = String::new();
        let ack = ConfigAck { seen_revision: revision, applied_revision: revision, error, providers };
        lab.state.handle_config_ack(lab.id, ack, lab.now);
    }
    assert!(lab.provider().connected && lab.lowered());
    effects(&mut lab.state);
    lab.state.handle_timeout(lab.now + 5 * SECOND);
    let asked = questions(&effects(&mut lab.state));
    lab.state.handle_command_response(lab.id, answer(asked[0].1, "a", "t", Health::Available, 2), lab.now + 5 * SECOND);
    assert!(lab.lowered(), "that is older than what lowered it");
}

#[test]
fn an_answer_to_a_command_that_was_never_sent_is_a_violation_and_a_late_one_is_late() {
    // W2, WIR-11
    for (id, violates) in [(0, true), (1, true)] {
        let mut lab = Lab::new();
        lab.state.handle_command_response(lab.id, answer(id, "a", "t", Health::Available, 1), lab.now);
        assert_eq!(!lab.state.is_ready(), violates);
    }
    let mut lab = Lab::new();
    let node = NodeId::new("n1").unwrap();
    let id = lab.state.command(&node, NodeCommand::TransportStatus, None, SECOND, lab.now).unwrap();
    lab.state.handle_timeout(lab.now + 3 * SECOND);
    let over = effects(&mut lab.state);
    assert!(over.contains(&Effect::Commanded { id, outcome: Box::new(Err(CommandError::TimedOut)) }));
    lab.state.handle_command_response(lab.id, answer(id.0, "a", "t", Health::Available, 1), lab.now + 3 * SECOND);
    assert!(lab.state.is_ready());
}

#[test]
fn a_caller_s_command_reaches_a_ready_node_only_is_bounded_and_ends_with_its_connection() {
    // EDG-1, FEN-8, I10
    let mut lab = Lab::new();
    let send = |lab: &mut Lab, node: &str| {
        let node = NodeId::new(node).unwrap();
        lab.state.command(&node, NodeCommand::TransportStatus, None, SECOND, lab.now)
    };
    assert_eq!(send(&mut lab, "n9"), Err(CommandError::UnknownNode));
    assert_eq!(send(&mut lab, "n2"), Err(CommandError::NotReady));
    let ids: Vec<_> = (0..command::MAX_COMMANDS).map(|_| send(&mut lab, "n1").unwrap()).collect();
    assert_eq!(send(&mut lab, "n1"), Err(CommandError::TooMany));
    effects(&mut lab.state);
    lab.state.handle_closed(lab.id, CloseCode::Closed, lab.now);
    let after = effects(&mut lab.state);
    for id in ids {
        assert!(after.contains(&Effect::Commanded { id, outcome: Box::new(Err(CommandError::Disconnected)) }));
    }
    assert_eq!(lab.state.timers.len(), 0);
}

#[test]
fn a_caller_s_capabilities_command_is_evidence_too() {
    // HLT-5, CMD-2
    let mut lab = Lab::new();
    lab.stalls(Health::Unavailable, 3);
    let (node, adapter) = (NodeId::new("n1").unwrap(), AdapterKey::new("a").unwrap());
    let command = NodeCommand::Capabilities { adapter, target: Some(Target::new("t").unwrap()) };
    let id = lab.state.command(&node, command, None, SECOND, lab.now).unwrap();
    lab.state.handle_command_response(lab.id, answer(id.0, "a", "t", Health::Available, 4), lab.now);
    let after = effects(&mut lab.state);
    assert!(!lab.lowered());
    let source = EvidenceSource::Capabilities;
    assert!(after.contains(&Effect::Observe(Observation::HealthEvidence { source, result: EvidenceResult::Applied })));
    assert!(after.iter().any(|effect| matches!(effect, Effect::Commanded { outcome, .. } if outcome.is_ok())));
}

#[test]
fn taking_a_provider_out_and_back_raises_nothing() {
    // HLT-3
    let mut lab = Lab::new();
    lab.stalls(Health::Unavailable, 9);
    assert!(lab.lowered());
    let make = |revision, on: bool| {
        let mut n1 = node_entry("n1", &[("a", 1, 0), ("b", 2, 1)]);
        n1.providers[0].enabled = on;
        Catalog::builder().revision(revision).node(n1).model(group("only-a", &["a"])).build().unwrap()
    };
    lab.state.apply_config(Arc::new(make(8, false)), lab.now).unwrap();
    let ack = |r: u64, ids: &[&str]| ConfigAck {
        seen_revision: r,
        applied_revision: r,
        error: String::new(),
        providers: ids.iter().map(|id| provider_ready(id, &[])).collect(),
    };
    lab.state.handle_config_ack(lab.id, ack(8, &["b"]), lab.now);
    lab.state.apply_config(Arc::new(make(9, true)), lab.now).unwrap();
    lab.state.handle_config_ack(lab.id, ack(9, &["a", "b"]), lab.now);
    assert!(lab.lowered(), "HLT-3: raised in the same generation without HLT-5");
}

#[test]
fn another_instance_starts_clean() {
    // HLT-3, HLT-6
    let mut lab = Lab::new();
    lab.stalls(Health::Unavailable, 1);
    let mut n1 = node_entry("n1", &[("a", 1, 0), ("b", 2, 1)]);
    n1.providers[0].config.adapter = AdapterKey::new("a2").unwrap();
    let next = Catalog::builder().revision(8).node(n1).model(group("only-a", &["a"])).build().unwrap();
    lab.state.apply_config(Arc::new(next), lab.now).unwrap();
    let ack = ConfigAck {
        seen_revision: 8,
        applied_revision: 8,
        error: String::new(),
        providers: vec![provider_ready("a", &[]), provider_ready("b", &[])],
    };
    lab.state.handle_config_ack(lab.id, ack, lab.now);
    effects(&mut lab.state);
    for _ in 0..50 {
        let Some(at) = lab.state.poll_timeout() else { break };
        lab.now = at;
        lab.state.handle_timeout(at);
        for (_, id, adapter, target) in questions(&effects(&mut lab.state)) {
            if adapter == "a2" {
                return; // it asks about the one that exists
            }
            let failure = ExecutionFailure::refused(FailureCode::UnknownAdapter, "no");
            lab.state.handle_command_response(
                lab.id,
                CommandResponse { command_id: id, session_id: None, outcome: Err(failure) },
                lab.now,
            );
            let _ = &target;
        }
    }
    assert!(!lab.lowered(), "lowered for ever; {:?} later", lab.now);
}

#[test]
fn what_its_node_does_not_have_any_more_keeps_nobody_out() {
    // HLT-3, HLT-6: a server that came back with another model; any other answer changes nothing
    for (code, raised) in [
        (FailureCode::UnknownTarget, true),
        (FailureCode::UnknownAdapter, true),
        (FailureCode::Busy, false),
        (FailureCode::Internal, false),
    ] {
        let mut lab = Lab::new();
        lab.stalls(Health::Unavailable, 1);
        effects(&mut lab.state);
        lab.now = lab.state.poll_timeout().unwrap();
        lab.state.handle_timeout(lab.now);
        let [(_, command_id, ..)] = questions(&effects(&mut lab.state))[..] else { panic!("one question") };
        let failure = ExecutionFailure::refused(code, "no");
        let answer = CommandResponse { command_id, session_id: None, outcome: Err(failure) };
        lab.state.handle_command_response(lab.id, answer, lab.now);
        assert_eq!(!lab.lowered(), raised, "{code:?}");
        let result = if raised { EvidenceResult::Applied } else { EvidenceResult::Unknown };
        let source = EvidenceSource::Capabilities;
        let counted = Effect::Observe(Observation::HealthEvidence { source, result });
        assert!(effects(&mut lab.state).contains(&counted), "{code:?}");
    }
}
