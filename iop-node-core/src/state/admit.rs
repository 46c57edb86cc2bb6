//! Decides in which order a dispatch is checked, and what each refusal says (NOD-3).
//!
//! 1. the stall timeout and the deadline are legal, before any lookup (EXE-13);
//! 2. the Node takes new work, the request body is not too large, the adapter key is known and takes this target;
//! 3. its credential lease is good for the adapter that would make the call, and is there exactly where one is needed;
//! 4. a place is free: the permit it gives is the proof that opening the lease will ask for (CRD-4).
//!
//! Nothing before (4) has a side effect, and whoever drops the permit frees the place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_credential_lease::AdmissionProof;
use iop_execution::{ExecutionFailure, FailureCode, GatePermit, StallTimeout};
use iop_wire::DispatchHead;

use crate::adapters::{Adapter, Adapters};
use crate::observe::NodeObserver;
use crate::state::leases::{self, LeaseDesk, PendingLease};
use crate::state::runs::MAX_BODY_BYTES;

/// Longest hard deadline a request may ask for: 7 days.
pub const MAX_DEADLINE_MS: u64 = 7 * 24 * 60 * 60 * 1000;

/// One place on an adapter instance, held until its provider call has returned or was dropped (NOD-4).
#[derive(Debug)]
#[must_use = "dropping a permit frees its place"]
pub struct CapacityPermit {
    _place: GatePermit,
}

impl AdmissionProof for CapacityPermit {}

/// A dispatch that passed every check.
#[derive(Debug)]
pub struct Admitted {
    /// Who runs it.
    pub adapter: Arc<Adapter>,
    /// Its place.
    pub permit: CapacityPermit,
    /// The effective stall timeout, never 0.
    pub stall_timeout: StallTimeout,
    /// Hard deadline from receipt.
    pub deadline: Option<Duration>,
    /// The lease its call is made with.
    pub lease: Option<PendingLease>,
}

/// Checks a dispatch in the order of NOD-3.
///
/// # Errors
/// The typed failure that becomes the run's terminal. It always says that the provider was not contacted.
pub fn admit(
    head: &DispatchHead,
    adapters: &Adapters,
    draining: bool,
    desk: Option<&Arc<LeaseDesk>>,
    observer: &dyn NodeObserver,
    now: Instant,
) -> Result<Admitted, ExecutionFailure> {
    let Placeable { adapter, stall_timeout, deadline } = placeable(head, adapters, draining).inspect_err(|_| {
        leases::left_unused(head, observer);
    })?;
    let lease = leases::check(desk, head, adapter.config(), observer, now).map_err(|refused| *refused)?;
    let Some(place) = adapter.gate().try_enter() else {
        return Err(ExecutionFailure::refused(FailureCode::Busy, "every place of the adapter is taken"));
    };
    let permit = CapacityPermit { _place: place };
    Ok(Admitted { adapter: Arc::clone(adapter), permit, stall_timeout, deadline, lease })
}

/// A dispatch that passed every check but that of its lease, and has no place yet.
struct Placeable<'a> {
    adapter: &'a Arc<Adapter>,
    stall_timeout: StallTimeout,
    deadline: Option<Duration>,
}

/// The checks before that of the lease.
fn placeable<'a>(
    head: &DispatchHead,
    adapters: &'a Adapters,
    draining: bool,
) -> Result<Placeable<'a>, ExecutionFailure> {
    let stall_timeout = StallTimeout::from_ms(head.response_stall_timeout_ms)
        .map_err(|error| ExecutionFailure::refused(FailureCode::InvalidRequest, error.to_string()))?;
    let deadline = match head.deadline_ms {
        0 => None,
        ms if ms <= MAX_DEADLINE_MS => Some(Duration::from_millis(ms)),
        ms => {
            let message = format!("deadline_ms is {ms}; it must be 0 (none) or 1 to {MAX_DEADLINE_MS}");
            return Err(ExecutionFailure::refused(FailureCode::InvalidRequest, message));
        }
    };
    if draining {
        return Err(ExecutionFailure::refused(FailureCode::Draining, "the Node takes no new work"));
    }
    if head.body_len > MAX_BODY_BYTES {
        return Err(ExecutionFailure::refused(FailureCode::InvalidRequest, "the request body is larger than 32 MiB"));
    }
    let adapter = adapters
        .by_key(&head.adapter)
        .filter(|adapter| adapter.provider_id() == &head.provider_id && !adapter.is_draining())
        .ok_or_else(|| ExecutionFailure::refused(FailureCode::UnknownAdapter, "the Node has no such adapter"))?;
    if !adapter.serves(&head.target) {
        return Err(ExecutionFailure::refused(FailureCode::UnknownTarget, "the adapter has no such target"));
    }
    Ok(Placeable { adapter, stall_timeout, deadline })
}

#[cfg(test)]
mod tests;
