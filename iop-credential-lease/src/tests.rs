//! The gate of CRD-14: vectors of others, hostile leases, and the golden set that a second implementation opens.

mod golden;
mod hostile;
pub(crate) mod support;
mod vectors;
mod wycheproof;
