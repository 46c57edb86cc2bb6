//! Decides what a sealed grant of a provider key looks like from outside: its bytes, the names it is bound to, and who
//! may open it.
//!
//! This crate depends on no other crate of the workspace, so that it can be audited alone. It holds the shape only: the
//! sealed bytes ([`SealedLease`]), the names a lease is bound to ([`binding`]) and the proof that opening will ask for
//! ([`AdmissionProof`]). Nothing here checks or opens a lease, and nothing pretends to.

pub mod admission;
pub mod binding;
pub mod sealed;

pub use admission::AdmissionProof;
pub use binding::{
    BindingField, InvalidBinding, NodeName, PrincipalName, ProfileName, RouteName, RunName, SlotName, TargetName,
    UpstreamOrigin,
};
pub use sealed::{LeaseLength, SealedLease};
