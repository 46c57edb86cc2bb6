//! Decides whether a lease may be used: once before the request waits, and again when its provider is called.
//!
//! Phase one, [`verify`], touches no secret and changes nothing. Phase two, [`VerifiedLease::open`], needs proof of a
//! place on the provider, asks again for all that time can change, marks the lease as used, and only then decrypts. Each
//! lease that was marked stays so, whatever follows.

use crate::admission::AdmissionProof;
use crate::binding::Binding;
use crate::credential::{OpenedCredential, ProviderCredential};
use crate::error::LeaseError;
use crate::format::{self, Claims};
use crate::issuer::{IssuerKey, TrustedIssuers};
use crate::key_id::{KeyId, LeaseId};
use crate::recipient::{NoRandomness, RecipientKey, RecipientPublicKey};
use crate::replay::{ReplayError, ReplayStore};
use crate::sealed::SealedLease;
use crate::slots::SlotTable;
use crate::suite::{self, KEY_BYTES, SEED_BYTES};

/// How long a lease is valid unless told otherwise.
pub const DEFAULT_TTL_MS: u64 = 60_000;
/// Longest a lease may be valid.
pub const MAX_TTL_MS: u64 = 300_000;
/// How far in the future a lease may have been issued unless told otherwise.
pub const DEFAULT_FUTURE_SKEW_MS: u64 = 5_000;
/// Most of it that can be allowed.
pub const MAX_FUTURE_SKEW_MS: u64 = 60_000;

/// What an Edge grants: to which connection, for what, for how long.
#[derive(Debug)]
pub struct Grant<'a> {
    /// The key of the connection.
    pub recipient: &'a RecipientPublicKey,
    /// The random stand-in of the connection's generation.
    pub generation: u64,
    /// Version of the credential in its slot.
    pub revision: u64,
    /// What the lease is bound to.
    pub binding: Binding,
    /// How long it is valid: 1 to [`MAX_TTL_MS`].
    pub ttl_ms: u64,
}

/// A new lease and what a record of it needs.
#[derive(Debug)]
pub struct IssuedLease {
    /// The bytes for the Node.
    pub lease: SealedLease,
    /// Its name.
    pub id: LeaseId,
    /// When it ends, in Unix milliseconds.
    pub expires_at_ms: u64,
}

/// Why no lease is issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "every way issuing can fail")]
pub enum IssueError {
    /// Not a time a lease may be valid.
    #[error("a lease is valid for 1 ms to {MAX_TTL_MS} ms")]
    Ttl,
    /// Nothing can be sealed.
    #[error("the credential can't be sealed to the recipient's key")]
    Seal,
    /// No random bytes.
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
}

/// The random bytes of one lease.
pub(crate) struct Entropy {
    pub(crate) id: [u8; 16],
    pub(crate) seed: zeroize::Zeroizing<[u8; SEED_BYTES]>,
}

impl IssuerKey {
    /// Seals a credential to a connection and signs the result. `now_ms` is the Edge's time.
    ///
    /// # Errors
    /// [`IssueError`].
    pub fn issue(
        &self,
        grant: &Grant<'_>,
        credential: &ProviderCredential,
        now_ms: u64,
    ) -> Result<IssuedLease, IssueError> {
        let mut entropy = Entropy { id: [0; 16], seed: zeroize::Zeroizing::new([0; SEED_BYTES]) };
        getrandom::fill(&mut entropy.id).map_err(|_| NoRandomness)?;
        getrandom::fill(entropy.seed.as_mut_slice()).map_err(|_| NoRandomness)?;
        self.issue_with(grant, credential, now_ms, &entropy)
    }

    pub(crate) fn issue_with(
        &self,
        grant: &Grant<'_>,
        credential: &ProviderCredential,
        now_ms: u64,
        entropy: &Entropy,
    ) -> Result<IssuedLease, IssueError> {
        if !(1..=MAX_TTL_MS).contains(&grant.ttl_ms) {
            return Err(IssueError::Ttl);
        }
        let claims = Claims {
            issuer: self.id(),
            recipient: grant.recipient.id(),
            id: LeaseId(entropy.id),
            issued_at_ms: now_ms,
            expires_at_ms: now_ms.checked_add(grant.ttl_ms).ok_or(IssueError::Ttl)?,
            revision: grant.revision,
            generation: grant.generation,
            binding: grant.binding.clone(),
        };
        let bytes = self.seal_and_sign(&claims, grant.recipient, credential.plaintext(), &entropy.seed)?;
        let lease = SealedLease::new(bytes).map_err(|_| IssueError::Seal)?;
        Ok(IssuedLease { lease, id: claims.id, expires_at_ms: claims.expires_at_ms })
    }

    /// Encrypt, then sign. Both layers name both parties: the sealed one by `info` and the claims, the signed one by its
    /// bytes; so neither can be moved under another of its kind.
    pub(crate) fn seal_and_sign(
        &self,
        claims: &Claims,
        to: &RecipientPublicKey,
        plaintext: &[u8],
        seed: &[u8; SEED_BYTES],
    ) -> Result<Vec<u8>, IssueError> {
        let encoded = claims.encode();
        let info = format::seal_info(claims.issuer, claims.recipient);
        let (enc, sealed) =
            suite::seal(to.key(), &info, &format::seal_aad(&encoded), plaintext, seed).ok_or(IssueError::Seal)?;
        let mut bytes = format::join(encoded, &enc, &sealed);
        let signature = self.sign(&format::signed_text(&bytes));
        bytes.extend_from_slice(&signature);
        Ok(bytes)
    }
}

/// How much time a Node allows a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimePolicy {
    max_ttl_ms: u64,
    future_skew_ms: u64,
}

impl TimePolicy {
    /// At most these, and never more than [`MAX_TTL_MS`] and [`MAX_FUTURE_SKEW_MS`].
    #[must_use]
    pub fn new(max_ttl_ms: u64, future_skew_ms: u64) -> Self {
        Self { max_ttl_ms: max_ttl_ms.min(MAX_TTL_MS), future_skew_ms: future_skew_ms.min(MAX_FUTURE_SKEW_MS) }
    }
}

impl Default for TimePolicy {
    fn default() -> Self {
        Self { max_ttl_ms: MAX_TTL_MS, future_skew_ms: DEFAULT_FUTURE_SKEW_MS }
    }
}

/// What a Node knows at the moment it decides, each from its own state.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    /// The Edge's time, if known: [`EdgeClock::now_ms`](crate::clock::EdgeClock::now_ms).
    pub now_ms: Option<u64>,
    /// How much time a lease is allowed.
    pub policy: TimePolicy,
    /// Whose leases are taken.
    pub issuers: &'a TrustedIssuers,
    /// The key of this connection.
    pub recipient: KeyId,
    /// The random stand-in of this connection's generation.
    pub generation: u64,
    /// Where the slots stand.
    pub slots: &'a SlotTable,
}

impl NodeView<'_> {
    /// The time, if the lease is within its own.
    fn check_time(&self, claims: &Claims) -> Result<u64, LeaseError> {
        let ttl = claims.expires_at_ms.checked_sub(claims.issued_at_ms).filter(|ttl| *ttl > 0);
        if ttl.ok_or(LeaseError::Malformed)? > self.policy.max_ttl_ms {
            return Err(LeaseError::TtlTooLong);
        }
        let now_ms = self.now_ms.ok_or(LeaseError::ClockUnavailable)?;
        if claims.issued_at_ms > now_ms.saturating_add(self.policy.future_skew_ms) {
            return Err(LeaseError::NotYetValid);
        }
        // No leeway: the moment it expires is already too late.
        if claims.expires_at_ms <= now_ms {
            return Err(LeaseError::Expired);
        }
        Ok(now_ms)
    }

    fn check_revision_and_generation(&self, claims: &Claims) -> Result<(), LeaseError> {
        self.slots.check(&claims.binding.slot, claims.revision)?;
        if claims.generation == self.generation { Ok(()) } else { Err(LeaseError::StaleGeneration) }
    }
}

/// Phase one: whether the lease is genuine, for this connection, in time, and bound to what the Node is about to do.
/// Needs no secret and changes nothing, so it may come before the request waits for a place.
///
/// # Errors
/// [`LeaseError`].
pub fn verify(lease: &SealedLease, expected: &Binding, view: &NodeView<'_>) -> Result<VerifiedLease, LeaseError> {
    let bytes = lease.as_bytes();
    let issuer = format::read_issuer(bytes)?;
    let (unsigned, signature) = format::split_signature(bytes)?;
    match view.issuers.signed(issuer, &format::signed_text(unsigned), &signature) {
        None => return Err(LeaseError::UnknownIssuer),
        Some(false) => return Err(LeaseError::BadSignature),
        Some(true) => {}
    }
    let format::Parsed { claims, claims_end, enc, sealed } = format::parse(bytes)?;
    if claims.recipient != view.recipient {
        return Err(LeaseError::WrongRecipient);
    }
    view.check_time(&claims)?;
    if let Some(field) = claims.binding.first_difference(expected) {
        return Err(LeaseError::BindingMismatch(field));
    }
    view.check_revision_and_generation(&claims)?;
    Ok(VerifiedLease { lease: lease.clone(), claims, claims_end, enc, sealed })
}

/// A lease that passed phase one. Holds nothing secret; opens at most once.
///
/// ```compile_fail
/// // CRD-4: without a place on a provider there is no opening.
/// use iop_credential_lease::{MemoryReplayStore, NodeView, RecipientKey, VerifiedLease};
/// fn open(lease: VerifiedLease, key: &RecipientKey, view: &NodeView<'_>, replay: &MemoryReplayStore) {
///     let _ = lease.open(key, view, replay, &());
/// }
/// ```
///
/// ```compile_fail
/// // CRD-4: it opens once.
/// use iop_credential_lease::{AdmissionProof, MemoryReplayStore, NodeView, RecipientKey, VerifiedLease};
/// fn open(lease: VerifiedLease, key: &RecipientKey, view: &NodeView<'_>, replay: &MemoryReplayStore, place: &impl AdmissionProof) {
///     let _ = lease.open(key, view, replay, place);
///     let _ = lease.open(key, view, replay, place);
/// }
/// ```
///
/// ```
/// use iop_credential_lease::{AdmissionProof, MemoryReplayStore, NodeView, RecipientKey, VerifiedLease};
/// fn open(lease: VerifiedLease, key: &RecipientKey, view: &NodeView<'_>, replay: &MemoryReplayStore, place: &impl AdmissionProof) {
///     let _ = lease.open(key, view, replay, place);
/// }
/// ```
#[derive(Debug)]
pub struct VerifiedLease {
    lease: SealedLease,
    claims: Claims,
    claims_end: usize,
    enc: [u8; KEY_BYTES],
    sealed: std::ops::Range<usize>,
}

impl VerifiedLease {
    /// What it says, for records.
    #[must_use]
    pub const fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Phase two, the last step before the provider is called. Asks again for what may have changed while the request
    /// waited, marks the lease as used, and decrypts. A lease once marked stays so, also when it then does not open.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn open(
        self,
        key: &RecipientKey,
        view: &NodeView<'_>,
        replay: &dyn ReplayStore,
        _admitted: &impl AdmissionProof,
    ) -> Result<OpenedCredential, LeaseError> {
        let claims = self.claims;
        if !view.issuers.trusts(claims.issuer) {
            return Err(LeaseError::UnknownIssuer);
        }
        if claims.recipient != view.recipient || claims.recipient != key.id() {
            return Err(LeaseError::WrongRecipient);
        }
        let now_ms = view.check_time(&claims)?;
        view.check_revision_and_generation(&claims)?;
        replay.claim(claims.issuer, claims.id, claims.expires_at_ms, now_ms).map_err(|error| match error {
            ReplayError::Replayed => LeaseError::Replayed,
            ReplayError::Full => LeaseError::ReplayStoreFull,
        })?;
        let bytes = self.lease.as_bytes();
        let parts = bytes.get(..self.claims_end).zip(bytes.get(self.sealed));
        let (encoded, sealed) = parts.ok_or(LeaseError::OpenFailed)?;
        let info = format::seal_info(claims.issuer, claims.recipient);
        suite::open(key.private(), &self.enc, &info, &format::seal_aad(encoded), sealed)
            .and_then(|plaintext| OpenedCredential::from_plaintext(&plaintext, claims.binding.upstream, claims.id))
            .ok_or(LeaseError::OpenFailed)
    }
}

#[cfg(test)]
mod tests;
