//! Decides what a workload identity is: `spiffe://<trust domain>/iop/{edge|node}/<id>`, exactly (CRD-10).
//!
//! Nothing is repaired: an upper-case letter, an escape or an empty segment makes it another text, and no identity.

use std::fmt;
use std::sync::Arc;

use iop_execution::closed_list as closed;

#[cfg(test)]
mod tests;

/// Trust domain of Edges and Nodes that name none.
pub const DEFAULT_TRUST_DOMAIN: &str = "iop.local";
/// Longest trust domain, in bytes (SPIFFE).
const MAX_TRUST_DOMAIN: usize = 255;
/// Longest id of an Edge or a Node in an identity, in bytes.
const MAX_ID: usize = 255;
const SCHEME: &str = "spiffe://";

closed! {
    /// What a workload is.
    WorkloadRole {
        /// It takes requests and has Nodes.
        Edge = "edge",
        /// It runs models.
        Node = "node",
    }
}

/// Why a text is no workload identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is not of the form spiffe://<trust domain>/iop/<edge or node>/<id>, in which a domain has a-z 0-9 . - _ and an id A-Z a-z 0-9 . - _"
)]
pub struct InvalidIdentity;

/// Whose certificates are to be believed about names: `iop.local`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrustDomain(String);

impl TrustDomain {
    /// Checks a name.
    ///
    /// # Errors
    /// [`InvalidIdentity`].
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidIdentity> {
        let name = name.into();
        let legal = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_');
        let is_legal = !name.is_empty() && name.len() <= MAX_TRUST_DOMAIN && name.bytes().all(legal);
        if is_legal { Ok(Self(name)) } else { Err(InvalidIdentity) }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for TrustDomain {
    fn default() -> Self {
        Self(DEFAULT_TRUST_DOMAIN.to_owned())
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who a workload is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkloadIdentity {
    trust_domain: TrustDomain,
    role: WorkloadRole,
    id: String,
}

impl WorkloadIdentity {
    /// Of its parts.
    ///
    /// # Errors
    /// [`InvalidIdentity`] when the id has a character that an identity can't have.
    pub fn new(trust_domain: TrustDomain, role: WorkloadRole, id: &str) -> Result<Self, InvalidIdentity> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        let is_legal = !matches!(id, "" | "." | "..") && id.len() <= MAX_ID && id.bytes().all(legal);
        if is_legal { Ok(Self { trust_domain, role, id: id.to_owned() }) } else { Err(InvalidIdentity) }
    }

    /// Reads a URI.
    ///
    /// # Errors
    /// [`InvalidIdentity`].
    pub fn parse(uri: &str) -> Result<Self, InvalidIdentity> {
        let rest = uri.strip_prefix(SCHEME).ok_or(InvalidIdentity)?;
        let mut parts = rest.split('/');
        let (domain, iop, role, id) = (parts.next(), parts.next(), parts.next(), parts.next());
        let (Some(domain), Some("iop"), Some(role), Some(id), None) = (domain, iop, role, id, parts.next()) else {
            return Err(InvalidIdentity);
        };
        let role = WorkloadRole::ALL.iter().copied().find(|known| known.as_str() == role).ok_or(InvalidIdentity)?;
        Self::new(TrustDomain::new(domain)?, role, id)
    }

    /// Where it is known.
    #[must_use]
    pub const fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    /// What it is.
    #[must_use]
    pub const fn role(&self) -> WorkloadRole {
        self.role
    }

    /// Which one it is.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }
}

impl fmt::Display for WorkloadIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/iop/{}/{}", self.trust_domain, self.role, self.id)
    }
}

/// A workload identity that a certificate proved on this connection, with the certificates that proved it: they are looked at
/// again when roots change.
///
/// Only a transport makes one, after it has checked chain, time, purpose and name.
#[derive(Clone, PartialEq, Eq)]
pub struct VerifiedIdentity {
    identity: WorkloadIdentity,
    chain: Arc<[Vec<u8>]>,
}

impl VerifiedIdentity {
    /// An identity, and the DER of the certificates that proved it, leaf first. The caller vouches for it.
    #[must_use]
    pub fn vouched(identity: WorkloadIdentity, chain: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Self { identity, chain: chain.into_iter().collect() }
    }

    /// Who it is.
    #[must_use]
    pub const fn identity(&self) -> &WorkloadIdentity {
        &self.identity
    }

    /// DER of the certificates, leaf first.
    #[must_use]
    pub fn chain(&self) -> &[Vec<u8>] {
        &self.chain
    }
}

impl fmt::Debug for VerifiedIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerifiedIdentity")
            .field("identity", &self.identity)
            .field("certificates", &self.chain.len())
            .finish()
    }
}
