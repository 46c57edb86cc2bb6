//! Decides whose credential leases a Node takes (CRD-8).

use std::sync::{Arc, Mutex, PoisonError};

use iop_credential_lease::TrustedIssuers;

/// Whose credential leases a Node takes.
#[derive(Debug, Clone, Default)]
#[allow(clippy::exhaustive_enums, reason = "nobody's, or by one of two sources of trust")]
pub enum LeaseIssuers {
    /// Nobody's: providers that need leases can't be called.
    #[default]
    Nobody,
    /// Those that the Edge names when the Node registers, over a link on which the Edge has proved who it is. On any other
    /// link nobody's.
    OfEdge,
    /// Of these, whatever the Edge says.
    Only(OwnIssuers),
}

/// Issuers that a Node trusts by its own choice. They can be replaced while it serves; clones are one.
#[derive(Debug, Clone, Default)]
pub struct OwnIssuers(Arc<Mutex<Arc<TrustedIssuers>>>);

impl OwnIssuers {
    /// From now on these, on live connections too: a lease that is verified or opened later counts by them.
    pub fn replace(&self, issuers: TrustedIssuers) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(issuers);
    }

    /// Those in force.
    #[must_use]
    pub fn get(&self) -> Arc<TrustedIssuers> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl From<TrustedIssuers> for OwnIssuers {
    fn from(issuers: TrustedIssuers) -> Self {
        let own = Self::default();
        own.replace(issuers);
        own
    }
}
