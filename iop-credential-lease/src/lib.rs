//! Decides whether a provider's key may be used for one call: sealed, signed, bound, single-use leases of it.
//!
//! The Edge holds the key and grants it for one attempt: [`IssuerKey::issue`] seals it to the connection's key
//! ([`RecipientKey`]) and signs the result. The Node checks the lease with [`verify`] when the request arrives, and opens
//! it with [`VerifiedLease::open`] when the request has its place and the provider is called next. Everything fails closed
//! with one of [`LeaseError`]; nothing stands in for a lease that was refused.
//!
//! The crate depends on no other crate of the workspace, so that it can be audited alone. It reads no clock: time is
//! passed in. The format, the order of the checks and the threat model are in `docs/credential-lease.md`.
//!
//! ```
//! use std::time::Instant;
//!
//! use iop_credential_lease::*;
//!
//! // The Node's place on a provider; dropping it frees the place.
//! struct Permit;
//! impl AdmissionProof for Permit {}
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let binding = Binding {
//!     principal: PrincipalName::new("team-a")?,
//!     route: RouteName::new("default")?,
//!     slot: SlotName::new("acme-main")?,
//!     profile: ProfileName::new("bearer")?,
//!     target: TargetName::new("large-1")?,
//!     node: NodeName::new("gpu-7")?,
//!     upstream: UpstreamOrigin::of("https", "api.example.com", 443)?,
//!     run: RunName::new("run_1")?,
//! };
//!
//! // A Node connects: a fresh key, the Edge's time, issuers and slots.
//! let key = RecipientKey::generate()?;
//! let issuer = IssuerKey::generate()?;
//! let issuers = TrustedIssuers::new([issuer.public_bytes()])?;
//! let mut slots = SlotTable::default();
//! slots.replace([(binding.slot.clone(), SlotState { revision: 1, status: SlotStatus::Enabled })])?;
//! let (mut clock, now) = (EdgeClock::new(), Instant::now());
//! clock.observe(1_800_000_000_000, now, now);
//! let replay = MemoryReplayStore::default();
//!
//! // The Edge issues.
//! let recipient = RecipientPublicKey::new(*key.public_bytes())?;
//! let grant = Grant {
//!     recipient: &recipient,
//!     generation: 17,
//!     revision: 1,
//!     binding: binding.clone(),
//!     ttl_ms: lease::DEFAULT_TTL_MS,
//! };
//! let issued = issuer.issue(&grant, &ProviderCredential::bearer(b"sk-example")?, 1_800_000_000_000)?;
//!
//! // The Node verifies when the request arrives, and opens when it has its place.
//! let view = NodeView {
//!     now_ms: clock.now_ms(now),
//!     policy: TimePolicy::default(),
//!     issuers: &issuers,
//!     recipient: key.id(),
//!     generation: 17,
//!     slots: &slots,
//! };
//! let verified = verify(&issued.lease, &binding, &view)?;
//! let opened = verified.open(&key, &view, &replay, &Permit)?;
//! assert_eq!((opened.header_name(), opened.expose()), ("authorization", &b"Bearer sk-example"[..]));
//! # Ok(())
//! # }
//! ```

pub mod admission;
pub mod binding;
pub mod clock;
pub mod credential;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[allow(clippy::unwrap_used, reason = "what it holds is fixed, and known to be good")]
mod fixture;
pub mod format;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzz;
pub mod issuer;
pub mod key_id;
pub mod lease;
pub mod recipient;
pub mod replay;
pub mod sealed;
pub mod slots;
mod suite;

#[cfg(test)]
mod tests;

pub use admission::AdmissionProof;
pub use binding::{
    Binding, BindingField, InvalidBinding, NodeName, PrincipalName, ProfileName, RouteName, RunName, ScopeHash,
    SlotName, TargetName, UpstreamOrigin,
};
pub use clock::EdgeClock;
pub use credential::{InvalidCredential, OpenedCredential, ProviderCredential};
pub use error::LeaseError;
pub use format::Claims;
pub use issuer::{IssuerKey, KeyFileError, TrustedIssuers, UntrustedIssuer};
pub use key_id::{KeyId, LeaseId};
pub use lease::{Grant, IssueError, IssuedLease, NodeView, TimePolicy, VerifiedLease, verify};
pub use recipient::{NoRandomness, RecipientKey, RecipientPublicKey, WeakRecipientKey};
pub use replay::{MemoryReplayStore, ReplayError, ReplayStore};
pub use sealed::{LeaseLength, SealedLease};
pub use slots::{SlotState, SlotStatus, SlotTable, TooManySlots};
