//! Decides how one provider is wrapped by another: limits, scripted faults, recordings (ADP-6).
//!
//! Every wrapper passes every method on and is itself a provider, so wrappers wrap wrappers.

mod fault;
mod limit;
mod record;
mod relay;

pub use fault::{Fault, FaultAction, FaultPlan, FaultPoint};
pub use limit::Limit;
pub use record::{CallKind, MAX_RECORDED, Record, Recorded, RecordedEvent};

#[cfg(test)]
mod tests;
