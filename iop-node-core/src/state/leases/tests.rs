use std::sync::Mutex as StdMutex;
use std::time::Duration;

use iop_credential_lease::{Grant, IssuerKey, ProviderCredential, RecipientPublicKey};
use iop_execution::{AdapterKey, Principal, ProviderId, Redacted, Target};
use iop_wire::{CredentialScope, RunNumber};

use super::*;
use crate::observe::NoObserver;

const EDGE_MS: u64 = 1_800_000_000_000;
const GENERATION: u64 = 77;
const TTL_MS: u64 = 60_000;

struct Place;
impl AdmissionProof for Place {}

#[derive(Debug, Default)]
struct Counts(StdMutex<Vec<LeaseOutcome>>);

impl Counts {
    fn seen(&self) -> Vec<LeaseOutcome> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl NodeObserver for Counts {
    fn credential_lease(&self, outcome: LeaseOutcome) {
        self.0.lock().unwrap().push(outcome);
    }
}

/// A Node's desk, ready, and the Edge that issues for it.
struct Pair {
    desk: Arc<LeaseDesk>,
    counts: Arc<Counts>,
    issuer: IssuerKey,
    start: Instant,
}

fn pair() -> Pair {
    pair_with(&LeaseIssuers::OfEdge)
}

fn pair_with(issuers: &LeaseIssuers) -> Pair {
    let (counts, issuer, start) = (Arc::new(Counts::default()), IssuerKey::generate().unwrap(), Instant::now());
    let observer: Arc<dyn NodeObserver> = Arc::<Counts>::clone(&counts);
    let desk = LeaseDesk::open(issuers, true, observer).unwrap().unwrap();
    desk.registered(&NodeId::new("gpu-1").unwrap(), &[issuer.public_bytes()], EDGE_MS, start, start);
    desk.ready(GENERATION);
    desk.update(&[issuer.public_bytes()], &[state("acme", 3, false)]);
    Pair { desk, counts, issuer, start }
}

fn state(slot: &str, revision: u64, disabled: bool) -> CredentialState {
    CredentialState { slot: slot.into(), revision, disabled }
}

fn config() -> ProviderConfig {
    let mut config = ProviderConfig::new(ProviderId::new("p").unwrap(), "openai_compat").unwrap();
    config.base_url = "https://api.acme.example/v1".into();
    config.credential = Some(CredentialUse { slot: "acme".into(), profile: "bearer".into() });
    config
}

fn binding() -> Binding {
    Binding {
        principal: PrincipalName::new("team-a").unwrap(),
        route: RouteName::new("default").unwrap(),
        slot: SlotName::new("acme").unwrap(),
        profile: ProfileName::new("bearer").unwrap(),
        target: TargetName::new("large").unwrap(),
        node: NodeName::new("gpu-1").unwrap(),
        upstream: UpstreamOrigin::of("https", "api.acme.example", 443).unwrap(),
        run: RunName::new(RunId::from_bytes([1; 16]).to_string()).unwrap(),
    }
}

fn scope() -> CredentialScope {
    CredentialScope {
        principal: Principal::new("team-a").unwrap(),
        route: "default".into(),
        slot: "acme".into(),
        profile: "bearer".into(),
    }
}

fn head(lease: Bytes) -> DispatchHead {
    DispatchHead {
        run_id: RunId::from_bytes([1; 16]),
        run: RunNumber(1),
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new("p").unwrap(),
        target: Target::new("large").unwrap(),
        session_id: None,
        background: false,
        stream: true,
        response_stall_timeout_ms: 0,
        deadline_ms: 0,
        body_len: 2,
        window: 1,
        prompt_tokens_estimate: 0,
        credential_lease: Redacted::new(lease),
        credential_scope: Some(Box::new(scope())),
    }
}

/// What an Edge grants, to be changed.
struct Wish {
    binding: Binding,
    revision: u64,
    generation: u64,
    ttl_ms: u64,
    at_ms: u64,
}

impl Default for Wish {
    fn default() -> Self {
        Self { binding: binding(), revision: 3, generation: GENERATION, ttl_ms: TTL_MS, at_ms: EDGE_MS }
    }
}

impl Pair {
    fn issue(&self, wish: Wish) -> Bytes {
        self.issue_by(&self.issuer, self.desk.recipient_key(), wish)
    }

    fn issue_by(&self, issuer: &IssuerKey, to: Bytes, wish: Wish) -> Bytes {
        let recipient = RecipientPublicKey::new(to.as_ref().try_into().unwrap()).unwrap();
        let Wish { binding, revision, generation, ttl_ms, at_ms } = wish;
        let grant = Grant { recipient: &recipient, generation, revision, binding, ttl_ms };
        let credential = ProviderCredential::bearer(b"sk-SENTINEL").unwrap();
        issuer.issue(&grant, &credential, at_ms).unwrap().lease.as_bytes().clone()
    }

    fn check(&self, head: &DispatchHead) -> Result<PendingLease, CredentialReason> {
        self.check_for(head, &config())
    }

    fn check_for(&self, head: &DispatchHead, config: &ProviderConfig) -> Result<PendingLease, CredentialReason> {
        match check(Some(&self.desk), head, config, self.desk.observer.as_ref(), self.start) {
            Ok(pending) => Ok(pending.expect("a lease was brought")),
            Err(failure) => Err(reason(&failure)),
        }
    }
}

fn reason(failure: &ExecutionFailure) -> CredentialReason {
    assert_eq!((failure.code, failure.stage), (FailureCode::CredentialRejected, FailureStage::Credential));
    assert_eq!(failure.provider_contacted, ProviderContacted::No);
    assert!(!format!("{failure:?}").contains("SENTINEL"));
    failure.credential.unwrap()
}

#[test]
fn a_good_lease_becomes_one_header_once() {
    // CRD-4, CRD-9
    let pair = pair();
    let lease = pair.issue(Wish::default());
    let pending = pair.check(&head(lease.clone())).unwrap();
    assert!(!format!("{pending:?} {:?}", pair.desk).contains("SENTINEL"));
    let credential = pending.open(&Place, pair.start).unwrap();
    assert_eq!(credential.name(), "authorization");
    assert_eq!(credential.expose().as_bytes(), b"Bearer sk-SENTINEL");
    assert!(credential.expose().is_sensitive());
    // The same bytes again: they verify, and never open.
    let again = pair.check(&head(lease)).unwrap();
    assert_eq!(reason(&again.open(&Place, pair.start).unwrap_err()), CredentialReason::Replayed);
    assert_eq!(pair.counts.seen(), [LeaseOutcome::Opened, LeaseOutcome::Refused(CredentialReason::Replayed)]);
}

#[test]
fn each_bound_name_is_compared_with_what_this_node_has() {
    // CRD-2, CRD-5, CRD-6
    type Change = fn(&mut Binding);
    let changes: [(Told, Change); 8] = [
        (Told::Principal, |binding| binding.principal = PrincipalName::new("team-b").unwrap()),
        (Told::Route, |binding| binding.route = RouteName::new("other").unwrap()),
        (Told::Slot, |binding| binding.slot = SlotName::new("other").unwrap()),
        (Told::Profile, |binding| binding.profile = ProfileName::new("other").unwrap()),
        (Told::Target, |binding| binding.target = TargetName::new("small").unwrap()),
        (Told::Node, |binding| binding.node = NodeName::new("gpu-2").unwrap()),
        (Told::Upstream, |binding| binding.upstream = UpstreamOrigin::of("https", "evil.example", 443).unwrap()),
        (Told::RunId, |binding| binding.run = RunName::new("run_2").unwrap()),
    ];
    let pair = pair();
    for (field, change) in changes {
        let mut wish = Wish::default();
        change(&mut wish.binding);
        let refused = pair.check(&head(pair.issue(wish))).unwrap_err();
        assert_eq!(refused, CredentialReason::BindingMismatch(field));
    }
    // What stands in the request counts no more than the lease: it must be this Node's own.
    let mut other = head(pair.issue(Wish::default()));
    other.credential_scope = Some(Box::new(CredentialScope { slot: "other".into(), ..scope() }));
    assert_eq!(pair.check(&other).unwrap_err(), CredentialReason::BindingMismatch(Told::Slot));
    let mut moved = config();
    moved.base_url = "https://api.acme.example:8443".into();
    let head = head(pair.issue(Wish::default()));
    assert_eq!(pair.check_for(&head, &moved).unwrap_err(), CredentialReason::BindingMismatch(Told::Upstream));
    assert_eq!(pair.counts.seen().len(), 10);
}

#[test]
fn everything_else_that_is_wrong_has_its_own_reason() {
    // CRD-5, CRD-7, CRD-8
    let pair = pair();
    let check = |lease: Bytes| pair.check(&head(lease)).unwrap_err();
    let stranger = IssuerKey::generate().unwrap();
    assert_eq!(
        check(pair.issue_by(&stranger, pair.desk.recipient_key(), Wish::default())),
        CredentialReason::UnknownIssuer
    );
    let another = RecipientKey::generate().unwrap();
    let other = Bytes::copy_from_slice(another.public_bytes());
    assert_eq!(check(pair.issue_by(&pair.issuer, other, Wish::default())), CredentialReason::WrongRecipient);
    let late = Wish { at_ms: EDGE_MS - TTL_MS, ..Wish::default() };
    assert_eq!(check(pair.issue(late)), CredentialReason::Expired);
    let early = Wish { at_ms: EDGE_MS + 60_001, ..Wish::default() };
    assert_eq!(check(pair.issue(early)), CredentialReason::NotYetValid);
    assert_eq!(check(pair.issue(Wish { revision: 2, ..Wish::default() })), CredentialReason::StaleRevision);
    assert_eq!(check(pair.issue(Wish { generation: 78, ..Wish::default() })), CredentialReason::StaleGeneration);
    let mut broken = pair.issue(Wish::default()).to_vec();
    *broken.last_mut().unwrap() ^= 1;
    assert_eq!(check(broken.into()), CredentialReason::BadSignature);
    assert_eq!(check(Bytes::from_static(b"IOPL")), CredentialReason::Malformed);
    let lease = pair.issue(Wish::default());
    pair.desk.update(&[pair.issuer.public_bytes()], &[state("acme", 3, true)]);
    assert_eq!(check(lease.clone()), CredentialReason::Disabled);
    pair.desk.update(&[pair.issuer.public_bytes()], &[]);
    assert_eq!(check(lease.clone()), CredentialReason::Revoked);
    pair.desk.update(&[[0; 32]], &[state("acme", 3, false)]);
    assert_eq!(check(lease), CredentialReason::UnknownIssuer, "one that can't be trusted takes all away");
}

#[test]
fn what_changes_between_check_and_call_still_refuses() {
    // CRD-4: time, slot, issuer and generation are asked again
    type Change = fn(&Pair);
    let changes: [(CredentialReason, Duration, Change); 5] = [
        (CredentialReason::Expired, Duration::from_millis(TTL_MS), |_| {}),
        (CredentialReason::Disabled, Duration::ZERO, |pair| {
            pair.desk.update(&[pair.issuer.public_bytes()], &[state("acme", 3, true)]);
        }),
        (CredentialReason::StaleRevision, Duration::ZERO, |pair| {
            pair.desk.update(&[pair.issuer.public_bytes()], &[state("acme", 4, false)]);
        }),
        (CredentialReason::UnknownIssuer, Duration::ZERO, |pair| {
            pair.desk.update(&[], &[state("acme", 3, false)]);
        }),
        (CredentialReason::StaleGeneration, Duration::ZERO, |pair| pair.desk.ready(1)),
    ];
    for (wanted, later, change) in changes {
        let pair = pair();
        let pending = pair.check(&head(pair.issue(Wish::default()))).unwrap();
        change(&pair);
        assert_eq!(reason(&pending.open(&Place, pair.start + later).unwrap_err()), wanted);
        assert_eq!(pair.counts.seen(), [LeaseOutcome::Refused(wanted)]);
    }
}

#[test]
fn a_provider_that_needs_a_lease_is_never_called_without_and_another_never_with_one() {
    // CRD-5, CRD-16
    let pair = pair();
    let mut none = head(Bytes::new());
    none.credential_scope = None;
    assert_eq!(
        reason(&check(Some(&pair.desk), &none, &config(), &NoObserver, pair.start).unwrap_err()),
        CredentialReason::Malformed
    );
    assert_eq!(
        reason(&check(None, &none, &config(), &NoObserver, pair.start).unwrap_err()),
        CredentialReason::Malformed
    );
    let leased = head(pair.issue(Wish::default()));
    assert_eq!(
        reason(&check(None, &leased, &config(), &NoObserver, pair.start).unwrap_err()),
        CredentialReason::UnknownIssuer
    );
    let mut plain = config();
    plain.credential = None;
    assert_eq!(pair.check_for(&leased, &plain).unwrap_err(), CredentialReason::BindingMismatch(Told::Slot));
    assert!(check(None, &none, &plain, &NoObserver, pair.start).unwrap().is_none());
}

#[test]
fn nothing_is_taken_before_the_edge_has_said_who_when_and_which() {
    // CRD-5, CRD-7
    let counts: Arc<dyn NodeObserver> = Arc::new(Counts::default());
    let issuer = IssuerKey::generate().unwrap();
    let own = LeaseIssuers::Only(TrustedIssuers::new([issuer.public_bytes()]).unwrap().into());
    let desk = LeaseDesk::open(&own, true, counts).unwrap().unwrap();
    let pair = Pair { desk, counts: Arc::default(), issuer, start: Instant::now() };
    let head = head(pair.issue(Wish::default()));
    let check = || pair.check(&head).unwrap_err();
    assert_eq!(check(), CredentialReason::BindingMismatch(Told::Node));
    pair.desk.registered(&NodeId::new("gpu-1").unwrap(), &[], 0, pair.start, pair.start);
    assert_eq!(check(), CredentialReason::StaleGeneration);
    pair.desk.ready(GENERATION);
    assert_eq!(check(), CredentialReason::ClockUnavailable);
    pair.desk.observe(EDGE_MS, pair.start, pair.start);
    assert_eq!(check(), CredentialReason::Revoked);
    pair.desk.update(&[], &[state("acme", 3, false)]);
    assert!(pair.check(&head).is_ok(), "issuers of its own, whatever the Edge names");
}

#[test]
fn who_has_not_proved_itself_gets_no_key_to_seal_to() {
    // CRD-10
    let observer: Arc<dyn NodeObserver> = Arc::new(Counts::default());
    for (issuers, authenticated, takes) in [
        (LeaseIssuers::Nobody, true, false),
        (LeaseIssuers::OfEdge, false, false),
        (LeaseIssuers::Only(OwnIssuers::default()), false, false),
        (LeaseIssuers::OfEdge, true, true),
        (LeaseIssuers::Only(OwnIssuers::default()), true, true),
    ] {
        let desk = LeaseDesk::open(&issuers, authenticated, Arc::clone(&observer)).unwrap();
        assert_eq!(desk.is_some(), takes, "{issuers:?} {authenticated}");
    }
    let keys: std::collections::BTreeSet<_> = (0..3).map(|_| pair().desk.recipient_key()).collect();
    assert_eq!(keys.len(), 3, "CRD-3: a fresh key for each connection");
}

#[test]
fn a_lease_that_is_not_opened_is_counted_as_unused() {
    // CRD-13
    let pair = pair();
    let lease = pair.issue(Wish::default());
    drop(pair.check(&head(lease.clone())).unwrap());
    assert_eq!(pair.counts.seen(), [LeaseOutcome::Unused]);
    // It was never marked as used, and its run may still come; the Edge sends none twice.
    pair.check(&head(lease)).unwrap().open(&Place, pair.start).unwrap();
    assert_eq!(pair.counts.seen(), [LeaseOutcome::Opened]);
}

#[test]
fn two_issuers_are_good_while_one_takes_over_from_the_other() {
    // CRD-8
    let pair = pair();
    let next = IssuerKey::generate().unwrap();
    let by = |issuer: &IssuerKey| pair.issue_by(issuer, pair.desk.recipient_key(), Wish::default());
    let (old, new) = (by(&pair.issuer), by(&next));
    let good = |lease: &Bytes| pair.check(&head(lease.clone())).is_ok();
    assert!(good(&old) && !good(&new));
    pair.desk.update(&[next.public_bytes(), pair.issuer.public_bytes()], &[state("acme", 3, false)]);
    assert!(good(&old) && good(&new));
    pair.desk.update(&[next.public_bytes()], &[state("acme", 3, false)]);
    assert!(!good(&old) && good(&new));
}

#[test]
fn whatever_happens_in_whatever_order_a_lease_opens_at_most_once_and_never_after_it_ended() {
    // I9: every order of arrival, opening, revocation and expiry over one lease that is brought twice
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Arrive(usize),
        Open(usize),
        Revoke,
        Restore,
        Expire,
    }
    use Step::{Arrive, Expire, Open, Restore, Revoke};
    const STEPS: [Step; 7] = [Arrive(0), Arrive(1), Open(0), Open(1), Revoke, Restore, Expire];
    const LENGTH: u32 = 4;
    let pair = pair();
    for mut order in 0..STEPS.len().pow(LENGTH) {
        // A lease and a run of its own for each order.
        let lease = head(pair.issue(Wish::default()));
        pair.desk.update(&[pair.issuer.public_bytes()], &[state("acme", 3, false)]);
        let (mut pending, mut opened, mut at, mut good) = ([None, None], 0, pair.start, true);
        for _ in 0..LENGTH {
            let step = STEPS[order % STEPS.len()];
            order /= STEPS.len();
            match step {
                Arrive(which) => {
                    pending[which] = check(Some(&pair.desk), &lease, &config(), &NoObserver, at).ok().flatten()
                }
                Open(which) => {
                    if let Some(lease) = pending[which].take() {
                        let open = lease.open(&Place, at).is_ok();
                        assert!(!open || good, "{order}: it opened after it had ended");
                        opened += u32::from(open);
                    }
                }
                Revoke => {
                    pair.desk.update(&[pair.issuer.public_bytes()], &[]);
                    good = false;
                }
                Restore => {
                    pair.desk.update(&[pair.issuer.public_bytes()], &[state("acme", 3, false)]);
                    good = at == pair.start;
                }
                Expire => {
                    at = pair.start + Duration::from_millis(TTL_MS);
                    good = false;
                }
            }
        }
        assert!(opened <= 1, "{opened}");
    }
}
