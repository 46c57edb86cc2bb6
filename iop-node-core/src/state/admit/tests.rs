use bytes::Bytes;
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{AdapterKey, FailureStage, ProviderContacted, ProviderId, Redacted, RunId, Target};
use iop_wire::{CancelPolicy, ProviderConfig, RunNumber, WireMode};

use super::*;
use crate::observe::{LeaseOutcome, NoObserver};

fn config() -> ProviderConfig {
    ProviderConfig {
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new("a").unwrap(),
        kind: "demo".into(),
        base_url: String::new(),
        wire: WireMode::Auto,
        capacity: 1,
        long_capacity: 0,
        targets: vec![Target::new("t").unwrap()],
        response_stall_timeout_ms: 0,
        first_response_timeout_ms: 0,
        stall_per_1k_prompt_ms: 0,
        close_grace_ms: 0,
        probe_timeout_ms: 0,
        terminal_linger_ms: 0,
        cancel_policy: CancelPolicy::Abort,
        auth: String::new(),
        credential: None,
    }
}

fn head() -> DispatchHead {
    DispatchHead {
        run_id: RunId::from_bytes([1; 16]),
        run: RunNumber(1),
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new("a").unwrap(),
        target: Target::new("t").unwrap(),
        session_id: None,
        background: false,
        stream: true,
        response_stall_timeout_ms: 0,
        deadline_ms: 0,
        body_len: 0,
        window: 0,
        prompt_tokens_estimate: 0,
        credential_lease: Redacted::new(Bytes::new()),
        credential_scope: None,
    }
}

type Fault = (fn(&mut DispatchHead), FailureCode);

/// Each fault, in the order in which they must be found.
const FAULTS: [Fault; 7] = [
    (|head| head.response_stall_timeout_ms = 999, FailureCode::InvalidRequest),
    (|head| head.deadline_ms = u64::MAX, FailureCode::InvalidRequest),
    (|head| head.body_len = MAX_BODY_BYTES + 1, FailureCode::InvalidRequest),
    (|head| head.adapter = AdapterKey::new("other").unwrap(), FailureCode::UnknownAdapter),
    (|head| head.provider_id = ProviderId::new("other").unwrap(), FailureCode::UnknownAdapter),
    (|head| head.target = Target::new("other").unwrap(), FailureCode::UnknownTarget),
    (|head| head.credential_lease = Redacted::new(Bytes::from_static(b"x")), FailureCode::CredentialRejected),
];

#[test]
fn of_several_faults_the_first_in_order_is_told_and_no_place_is_taken() {
    // NOD-3, EXE-13
    let mut adapters = Adapters::new();
    let (provider, calls) = ScriptedProvider::new(Script::text("x")).into_parts();
    adapters.install(config(), provider);
    for faults in 1_u32..1 << FAULTS.len() {
        let mut head = head();
        let present = |at: usize| faults >> at & 1 == 1;
        FAULTS.iter().enumerate().filter(|(at, _)| present(*at)).for_each(|(_, (break_it, _))| break_it(&mut head));
        let first = (0..FAULTS.len()).find(|at| present(*at)).unwrap();
        let failure = admit(&head, &adapters, false, None, &NoObserver, Instant::now()).unwrap_err();
        assert_eq!(failure.code, FAULTS[first].1, "faults {faults:b}");
        assert_eq!(failure.provider_contacted, ProviderContacted::No);
        // Draining comes after the raw values and before everything else.
        let draining = admit(&head, &adapters, true, None, &NoObserver, Instant::now()).unwrap_err();
        let want = if first < 2 { FailureCode::InvalidRequest } else { FailureCode::Draining };
        assert_eq!(draining.code, want, "faults {faults:b}");
    }
    let gate = adapters.by_key(&AdapterKey::new("a").unwrap()).unwrap().gate().clone();
    assert_eq!((gate.in_use(), calls.counts().calls), (0, 0));
    assert!(admit(&head(), &adapters, false, None, &NoObserver, Instant::now()).is_ok());
}

#[test]
fn a_full_gate_is_busy_at_once_and_comes_last() {
    // NOD-3, NOD-4
    let mut adapters = Adapters::new();
    adapters.install(config(), ScriptedProvider::new(Script::text("x")).into_parts().0);
    let first = admit(&head(), &adapters, false, None, &NoObserver, Instant::now()).unwrap();
    let failure = admit(&head(), &adapters, false, None, &NoObserver, Instant::now()).unwrap_err();
    assert_eq!((failure.code, failure.stage), (FailureCode::Busy, FailureStage::Admission));
    let mut leased = head();
    leased.credential_lease = Redacted::new(Bytes::from_static(b"x"));
    let refused = admit(&leased, &adapters, false, None, &NoObserver, Instant::now()).unwrap_err();
    assert_eq!((refused.code, refused.stage), (FailureCode::CredentialRejected, FailureStage::Credential));
    drop(first);
    assert!(admit(&head(), &adapters, false, None, &NoObserver, Instant::now()).is_ok());
}

#[test]
fn timeouts_become_effective_values() {
    // EXE-13
    let mut adapters = Adapters::new();
    adapters.install(config(), ScriptedProvider::new(Script::text("x")).into_parts().0);
    let admitted = admit(&head(), &adapters, false, None, &NoObserver, Instant::now()).unwrap();
    assert_eq!((admitted.stall_timeout.get(), admitted.deadline), (Duration::from_secs(300), None));
    drop(admitted);
    let mut limited = head();
    (limited.response_stall_timeout_ms, limited.deadline_ms) = (1000, MAX_DEADLINE_MS);
    let admitted = admit(&limited, &adapters, false, None, &NoObserver, Instant::now()).unwrap();
    assert_eq!(admitted.stall_timeout.get(), Duration::from_secs(1));
    assert_eq!(admitted.deadline, Some(Duration::from_secs(7 * 86_400)));
}

#[derive(Debug, Default)]
struct Counts(std::sync::Mutex<Vec<LeaseOutcome>>);

impl NodeObserver for Counts {
    fn credential_lease(&self, outcome: LeaseOutcome) {
        self.0.lock().unwrap().push(outcome);
    }
}

#[test]
fn a_lease_that_nobody_looked_at_is_counted_as_unused_and_one_that_was_as_refused() {
    // CRD-13
    let mut adapters = Adapters::new();
    adapters.install(config(), ScriptedProvider::new(Script::text("x")).into_parts().0);
    let lease = FAULTS.len() - 1;
    let cases = (0..lease).map(|at| (at, false)).chain([(lease, true)]);
    for (at, draining) in cases {
        let mut head = head();
        FAULTS[at].0(&mut head);
        let counts = Counts::default();
        admit(&head, &adapters, draining, None, &counts, Instant::now()).unwrap_err();
        let unused = if at == lease { vec![LeaseOutcome::Unused] } else { Vec::new() };
        assert_eq!(*counts.0.lock().unwrap(), unused, "{at}: it brought none unless that is its fault");
        FAULTS[lease].0(&mut head);
        admit(&head, &adapters, draining, None, &counts, Instant::now()).unwrap_err();
        assert_eq!(counts.0.lock().unwrap().last(), Some(&LeaseOutcome::Unused), "{at}");
    }
    let (mut head, counts) = (head(), Counts::default());
    FAULTS[lease].0(&mut head);
    admit(&head, &adapters, false, None, &counts, Instant::now()).unwrap_err();
    let refused = LeaseOutcome::Refused(iop_execution::failure::CredentialReason::UnknownIssuer);
    assert_eq!(*counts.0.lock().unwrap(), [refused], "by a Node that takes none");
}
