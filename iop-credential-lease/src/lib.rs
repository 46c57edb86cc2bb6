//! Decides whether a provider's key may be used for one call: sealed, signed, bound, single-use leases of it.
//!
//! The Edge holds the key and grants it for one attempt: [`IssuerKey::issue`] seals it to the connection's key
//! ([`RecipientKey`]) and signs the result. The Node checks the lease with [`verify`] when the request arrives, and opens
//! it with [`VerifiedLease::open`] when the request has its place and the provider is called next. Everything fails closed
//! with one of [`LeaseError`]; nothing stands in for a lease that was refused.
//!
//! The crate depends on no other crate of the workspace, so that it can be audited alone. It reads no clock: time is
//! passed in. The format, the order of the checks and the threat model are in `docs/credential-lease.md`.

pub mod admission;
pub mod binding;
pub mod clock;
pub mod credential;
pub mod error;
pub mod format;
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
