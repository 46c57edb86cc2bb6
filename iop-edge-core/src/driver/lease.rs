//! Decides how a dispatch gets its credential lease: what it is to be made of is asked in one critical section, it is made
//! outside of the lock, and sending it asks again whether it is still the one that is needed (CRD-15).

use iop_credential_lease::{Grant as LeaseGrant, IssuedLease};
use iop_execution::failure::{CredentialReason, FailureStage};
use iop_execution::{ExecutionFailure, FailureCode, Principal, ProviderContacted, Redacted};
use iop_wire::{CredentialScope, DispatchHead};

use crate::driver::shared::Shared;
use crate::state::{Grant, LeaseOrder, NoOrder};

/// How often a lease is made for one dispatch while the config changes under it.
pub(crate) const ISSUE_TRIES: usize = 4;

/// A lease, and what it was made of.
#[derive(Debug)]
pub(crate) struct Issued {
    pub(crate) order: LeaseOrder,
    lease: IssuedLease,
}

/// Why there is no lease.
#[derive(Debug)]
pub(crate) enum NoLease {
    /// None is to be made.
    NoOrder(NoOrder),
    /// None could be made.
    Failed,
}

/// Makes the lease of a reserved attempt; `None` if it needs none.
pub(crate) fn issue(shared: &Shared, grant: &Grant) -> Result<Option<Issued>, NoLease> {
    let order = shared.with(|core, _| core.state.lease_order(grant.attempt)).map_err(NoLease::NoOrder)?;
    let Some(order) = order else { return Ok(None) };
    // Both were tried with this very slot when the config was checked.
    let credential = order.source.credential(&order.form).map_err(|error| not_made(grant, &order, &error))?;
    let wanted = LeaseGrant {
        recipient: &order.recipient,
        generation: order.generation,
        revision: order.revision,
        binding: order.binding.clone(),
        ttl_ms: order.ttl_ms,
    };
    let lease = order.issuer.issue(&wanted, &credential, shared.edge_time_ms());
    let lease = lease.map_err(|error| not_made(grant, &order, &error))?;
    Ok(Some(Issued { order, lease }))
}

/// Says why, here only: to a client it is an error inside the Edge.
fn not_made(grant: &Grant, order: &LeaseOrder, error: &dyn std::error::Error) -> NoLease {
    let slot = &order.binding.slot;
    tracing::error!(run_id = %grant.run_id, provider = %grant.provider, %slot, %error, "no credential lease can be made");
    NoLease::Failed
}

impl Issued {
    /// Puts it on a request.
    pub(crate) fn attach(&self, head: &mut DispatchHead) -> Result<(), NoLease> {
        let binding = &self.order.binding;
        let text = |name: &str| name.to_owned();
        head.credential_lease = Redacted::new(self.lease.lease.as_bytes().clone());
        head.credential_scope = Some(Box::new(CredentialScope {
            principal: Principal::new(binding.principal.as_str()).map_err(|_| NoLease::Failed)?,
            route: text(binding.route.as_str()),
            slot: text(binding.slot.as_str()),
            profile: text(binding.profile.as_str()),
        }));
        Ok(())
    }

    /// The one record of it (CRD-13). It holds no secret, and of who asked for what only a hash.
    pub(crate) fn record(&self, grant: &Grant) {
        tracing::info!(
            target: "iop_audit",
            lease = %self.lease.id,
            scope = %self.order.scope_hash(),
            run_id = %grant.run_id,
            node = %grant.node,
            provider = %grant.provider,
            slot = %self.order.binding.slot,
            revision = self.order.revision,
            expires_at_ms = self.lease.expires_at_ms,
            "credential lease issued"
        );
    }
}

/// The terminal of a request that no lease is issued for: nothing was sent.
pub(crate) fn denied(reason: CredentialReason) -> ExecutionFailure {
    let message = "no credential may be used for this request";
    ExecutionFailure::new(FailureCode::CredentialRejected, FailureStage::Credential, ProviderContacted::No, message)
        .with_credential(reason)
}
