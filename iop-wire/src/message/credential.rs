//! Decides what travels beside a sealed credential lease: names and public keys, never a secret.

use iop_execution::Principal;

/// Ed25519 key of an issuer of credential leases.
pub type LeaseSigner = [u8; 32];

/// What a credential lease was issued for (CRD-2): the Node compares it with what is sealed and with its own
/// configuration. Texts are 1 to 256 bytes without control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialScope {
    /// Who calls.
    pub principal: Principal,
    /// Which rule let the request in.
    pub route: String,
    /// The stored credential.
    pub slot: String,
    /// How the secret is applied to a request.
    pub profile: String,
}

/// Which credential slot a provider's calls are made with, and how the credential is applied (CRD-11). Texts are as in
/// [`CredentialScope`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialUse {
    /// The stored credential.
    pub slot: String,
    /// How it is applied to a request.
    pub profile: String,
}

/// Where a credential slot stands (CRD-8).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialState {
    /// The slot: 1 to 256 bytes without control characters.
    pub slot: String,
    /// Counts versions of its credential: leases of an older one are refused.
    pub revision: u64,
    /// All its leases are refused.
    pub disabled: bool,
}
