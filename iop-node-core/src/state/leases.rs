//! Decides whether the credential lease of a request becomes the key of one call: verified when the request arrives, opened
//! when it has its place and its provider is called next, once (CRD-3 to CRD-7).
//!
//! ```text
//! key made ─► registered: issuers, time ─► ready: generation, slots ─► verify ─► place ─► open ─► the call
//!     └────────────────── dropped with the connection ──────────────────┘
//! ```
//!
//! What a lease is compared with comes from this Node's own side wherever it has it: its id, and slot, profile and origin from
//! the config of the adapter instance that will make the call; recipient and generation from the connection. Only principal,
//! route and run come with the request. What can't be known yet refuses: no issuer, no slot, no time, no generation.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use iop_credential_lease::{
    AdmissionProof, Binding, BindingField, EdgeClock, LeaseError, MemoryReplayStore, NoRandomness, NodeName, NodeView,
    PrincipalName, ProfileName, RecipientKey, RouteName, RunName, SealedLease, SlotName, SlotState, SlotStatus,
    SlotTable, TargetName, TimePolicy, TrustedIssuers, UpstreamOrigin, VerifiedLease, verify,
};
use iop_execution::failure::{BindingField as Told, CredentialReason, FailureStage};
use iop_execution::{CallCredential, ExecutionFailure, FailureCode, NodeId, ProviderContacted, RunId};
use iop_wire::{CredentialState, CredentialUse, DispatchHead, LeaseSigner, ProviderConfig};

use self::issuers::{LeaseIssuers, OwnIssuers};
use crate::observe::{LeaseOutcome, NodeObserver};

pub mod issuers;

#[derive(Debug, Default)]
struct Known {
    clock: EdgeClock,
    node: Option<NodeName>,
    /// Whom the Edge has named.
    issuers: Arc<TrustedIssuers>,
    slots: SlotTable,
    generation: Option<u64>,
}

/// What one connection needs to take leases. Its key is dropped with it.
pub struct LeaseDesk {
    key: RecipientKey,
    /// The Edge's word on issuers does not count.
    own: Option<OwnIssuers>,
    replay: MemoryReplayStore,
    known: Mutex<Known>,
    observer: Arc<dyn NodeObserver>,
}

impl fmt::Debug for LeaseDesk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseDesk").field("key", &self.key).finish_non_exhaustive()
    }
}

/// Why a request is not called with a credential: the typed failure that becomes its terminal.
pub type Refusal = Box<ExecutionFailure>;

fn refused(reason: CredentialReason) -> Refusal {
    let message = "the credential lease was refused";
    let (code, stage) = (FailureCode::CredentialRejected, FailureStage::Credential);
    Box::new(ExecutionFailure::new(code, stage, ProviderContacted::No, message).with_credential(reason))
}

impl LeaseDesk {
    /// For a new connection. `authenticated`: the Edge has proved who it is. `None`: this connection takes no leases.
    ///
    /// # Errors
    /// [`NoRandomness`].
    pub fn open(
        issuers: &LeaseIssuers,
        authenticated: bool,
        observer: Arc<dyn NodeObserver>,
    ) -> Result<Option<Arc<Self>>, NoRandomness> {
        let own = match issuers {
            LeaseIssuers::Nobody => return Ok(None),
            LeaseIssuers::OfEdge => None,
            LeaseIssuers::Only(issuers) => Some(issuers.clone()),
        };
        if !authenticated {
            let problem = "the Edge has not proved who it is on this link: no credential leases are taken";
            // Who names issuers wants leases; who takes whatever the Edge names may need none.
            if own.is_none() {
                tracing::debug!(problem);
            } else {
                tracing::warn!(problem);
            }
            return Ok(None);
        }
        Ok(Some(Arc::new(Self {
            key: RecipientKey::generate()?,
            own,
            replay: MemoryReplayStore::default(),
            known: Mutex::default(),
            observer,
        })))
    }

    /// What the Edge seals to.
    #[must_use]
    pub fn recipient_key(&self) -> Bytes {
        Bytes::copy_from_slice(self.key.public_bytes())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Every method leaves it consistent before anything could panic.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The registration was accepted: who this Node is, whom the Edge names as issuers, and what time it is there.
    pub fn registered(&self, node: &NodeId, signers: &[LeaseSigner], edge_ms: u64, sent: Instant, received: Instant) {
        let mut known = self.known();
        known.node = NodeName::new(node.as_str()).ok();
        known.clock.observe(edge_ms, sent, received);
        self.trust(&mut known, signers);
    }

    /// The connection is ready: the stand-in of its generation.
    pub fn ready(&self, generation: u64) {
        self.known().generation = Some(generation);
    }

    /// A heartbeat told the Edge's time.
    pub fn observe(&self, edge_ms: u64, sent: Instant, received: Instant) {
        self.known().clock.observe(edge_ms, sent, received);
    }

    /// The Edge named issuers and slots anew: the whole of both.
    pub fn update(&self, signers: &[LeaseSigner], states: &[CredentialState]) {
        let mut known = self.known();
        self.trust(&mut known, signers);
        let states = states.iter().filter_map(|state| {
            // A slot that no lease can name is as good as one that is not listed.
            let slot = SlotName::new(&state.slot).ok()?;
            let status = if state.disabled { SlotStatus::Disabled } else { SlotStatus::Enabled };
            Some((slot, SlotState { revision: state.revision, status }))
        });
        if known.slots.replace(states).is_err() {
            // More than the wire lets pass; none is better than old ones.
            known.slots = SlotTable::default();
        }
    }

    fn trust(&self, known: &mut Known, signers: &[LeaseSigner]) {
        if self.own.is_some() {
            return;
        }
        known.issuers = Arc::new(TrustedIssuers::new(signers.iter().copied()).unwrap_or_else(|error| {
            tracing::error!(%error, "the Edge named an issuer that can't be trusted: no credential leases are taken");
            TrustedIssuers::default()
        }));
    }

    /// Whose leases are taken now.
    fn issuers(&self, known: &Known) -> Arc<TrustedIssuers> {
        self.own.as_ref().map_or_else(|| Arc::clone(&known.issuers), OwnIssuers::get)
    }

    fn view<'a>(
        &self,
        known: &'a Known,
        issuers: &'a TrustedIssuers,
        now: Instant,
    ) -> Result<NodeView<'a>, LeaseError> {
        Ok(NodeView {
            now_ms: known.clock.now_ms(now),
            policy: TimePolicy::default(),
            issuers,
            recipient: self.key.id(),
            generation: known.generation.ok_or(LeaseError::StaleGeneration)?,
            slots: &known.slots,
        })
    }

    fn verify(&self, head: &DispatchHead, config: &ProviderConfig, now: Instant) -> Result<VerifiedLease, LeaseError> {
        let lease = SealedLease::new(head.credential_lease.expose().clone()).map_err(|_| LeaseError::Malformed)?;
        let known = self.known();
        let expected = expected(head, config, known.node.as_ref()).map_err(LeaseError::BindingMismatch)?;
        verify(&lease, &expected, &self.view(&known, &self.issuers(&known), now)?)
    }
}

/// What a request must be bound to.
fn expected(head: &DispatchHead, config: &ProviderConfig, node: Option<&NodeName>) -> Result<Binding, BindingField> {
    let CredentialUse { slot, profile } = config.credential.as_ref().ok_or(BindingField::Slot)?;
    let scope = head.credential_scope.as_deref().ok_or(BindingField::Principal)?;
    if scope.slot != *slot {
        return Err(BindingField::Slot);
    }
    if scope.profile != *profile {
        return Err(BindingField::Profile);
    }
    let origin = config.origin().ok_or(BindingField::Upstream)?;
    let field = |error: iop_credential_lease::InvalidBinding| error.field;
    Ok(Binding {
        principal: PrincipalName::new(scope.principal.as_str()).map_err(field)?,
        route: RouteName::new(&scope.route).map_err(field)?,
        slot: SlotName::new(slot).map_err(field)?,
        profile: ProfileName::new(profile).map_err(field)?,
        target: TargetName::new(head.target.as_str()).map_err(field)?,
        node: node.cloned().ok_or(BindingField::Node)?,
        upstream: UpstreamOrigin::of(&origin.scheme, &origin.host, origin.port).map_err(field)?,
        run: RunName::new(head.run_id.to_string()).map_err(field)?,
    })
}

/// Checks the lease of a request against the adapter instance that would make its call (NOD-3). `None`: the call needs none,
/// and the request brought none.
///
/// # Errors
/// The typed refusal. A provider that needs a lease is never called without, and one that needs none never with one.
pub fn check(
    desk: Option<&Arc<LeaseDesk>>,
    head: &DispatchHead,
    config: &ProviderConfig,
    observer: &dyn NodeObserver,
    now: Instant,
) -> Result<Option<PendingLease>, Refusal> {
    let brought = brings_lease(head);
    let outcome = match (desk, config.credential.is_some(), brought) {
        (_, false, false) => return Ok(None),
        (None, _, true) => Err(LeaseError::UnknownIssuer),
        // There is no lease that could be of the format.
        (_, true, false) => Err(LeaseError::Malformed),
        (Some(desk), _, true) => desk.verify(head, config, now).map(|lease| (Arc::clone(desk), lease)),
    };
    match outcome {
        Ok((desk, lease)) => Ok(Some(PendingLease { desk, lease: Some(lease), run_id: head.run_id })),
        Err(error) => {
            let reason = reason_of(error);
            tracing::warn!(target: "iop_audit", run_id = %head.run_id, %reason, "credential lease refused");
            if brought {
                observer.credential_lease(LeaseOutcome::Refused(reason));
            }
            Err(refused(reason))
        }
    }
}

fn brings_lease(head: &DispatchHead) -> bool {
    !head.credential_lease.expose().is_empty()
}

/// A request was refused before its lease was looked at: whatever it is worth, it stays unused (CRD-13).
pub fn left_unused(head: &DispatchHead, observer: &dyn NodeObserver) {
    if brings_lease(head) {
        // Which one it is stands in what nobody has checked.
        tracing::info!(target: "iop_audit", run_id = %head.run_id, "credential lease not looked at");
        observer.credential_lease(LeaseOutcome::Unused);
    }
}

/// A lease that passed its check and waits for its call. Dropped, it stays unused, and is counted as such (CRD-13).
#[derive(Debug)]
pub struct PendingLease {
    desk: Arc<LeaseDesk>,
    lease: Option<VerifiedLease>,
    run_id: RunId,
}

impl PendingLease {
    /// Opens it: the last step before the provider is called. It needs a place on the provider as proof, and is used up
    /// whatever comes of it.
    ///
    /// # Errors
    /// The typed refusal.
    pub fn open(mut self, place: &impl AdmissionProof, now: Instant) -> Result<CallCredential, Refusal> {
        let Some(lease) = self.lease.take() else { return Err(refused(CredentialReason::Replayed)) };
        let (id, scope) = (lease.claims().id, lease.claims().binding.scope_hash());
        let desk = &self.desk;
        let opened = {
            let known = desk.known();
            let issuers = desk.issuers(&known);
            desk.view(&known, &issuers, now).and_then(|view| lease.open(&desk.key, &view, &desk.replay, place))
        };
        // What a lease holds was checked to be a header when it was sealed and again when it was opened.
        let credential = opened.and_then(|opened| {
            CallCredential::new(opened.header_name(), opened.expose()).ok_or(LeaseError::OpenFailed)
        });
        let run_id = self.run_id;
        match credential {
            Ok(credential) => {
                tracing::info!(target: "iop_audit", lease = %id, %scope, %run_id, "credential lease opened");
                desk.observer.credential_lease(LeaseOutcome::Opened);
                Ok(credential)
            }
            Err(error) => {
                let reason = reason_of(error);
                tracing::warn!(target: "iop_audit", lease = %id, %scope, %run_id, %reason, "credential lease refused");
                desk.observer.credential_lease(LeaseOutcome::Refused(reason));
                Err(refused(reason))
            }
        }
    }
}

impl Drop for PendingLease {
    fn drop(&mut self) {
        if let Some(lease) = &self.lease {
            let claims = lease.claims();
            tracing::info!(
                target: "iop_audit", lease = %claims.id, scope = %claims.binding.scope_hash(), run_id = %self.run_id,
                "credential lease not used"
            );
            self.desk.observer.credential_lease(LeaseOutcome::Unused);
        }
    }
}

/// The refusal as failures name it.
const fn reason_of(error: LeaseError) -> CredentialReason {
    match error {
        LeaseError::Malformed => CredentialReason::Malformed,
        LeaseError::UnsupportedVersion => CredentialReason::UnsupportedVersion,
        LeaseError::UnknownIssuer => CredentialReason::UnknownIssuer,
        LeaseError::BadSignature => CredentialReason::BadSignature,
        LeaseError::WrongRecipient => CredentialReason::WrongRecipient,
        LeaseError::NotYetValid => CredentialReason::NotYetValid,
        LeaseError::Expired => CredentialReason::Expired,
        LeaseError::TtlTooLong => CredentialReason::TtlTooLong,
        LeaseError::StaleRevision => CredentialReason::StaleRevision,
        LeaseError::StaleGeneration => CredentialReason::StaleGeneration,
        LeaseError::Revoked => CredentialReason::Revoked,
        LeaseError::Disabled => CredentialReason::Disabled,
        LeaseError::Replayed => CredentialReason::Replayed,
        LeaseError::ReplayStoreFull => CredentialReason::ReplayStoreFull,
        LeaseError::OpenFailed => CredentialReason::OpenFailed,
        LeaseError::ClockUnavailable => CredentialReason::ClockUnavailable,
        LeaseError::BindingMismatch(field) => CredentialReason::BindingMismatch(match field {
            BindingField::Node => Told::Node,
            BindingField::Principal => Told::Principal,
            BindingField::Profile => Told::Profile,
            BindingField::Route => Told::Route,
            BindingField::RunId => Told::RunId,
            BindingField::Slot => Told::Slot,
            BindingField::Target => Told::Target,
            BindingField::Upstream => Told::Upstream,
        }),
    }
}

#[cfg(test)]
mod tests;
