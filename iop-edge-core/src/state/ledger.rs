//! Decides who holds a place of a provider, and when it is free again.
//!
//! A lease is a record in the ledger. Taking the record out *is* the release: it changes the counters in the same step,
//! so a second release finds nothing (LEA-4, LEA-7). The resource is the provider, whatever model names point at it
//! (LEA-1). The ledger knows no time and no connection: who may release, and when, is decided by its owner.

use std::collections::BTreeMap;
use std::fmt;

use iop_execution::{AdapterKey, NodeId, ProviderId, Target};

use crate::state::id::{AttemptId, Generation};
use iop_execution::closed_list as closed;

closed! {
    /// Class of a request: long ones draw on a part of the places only (LEA-2).
    WorkClass {
        /// Below the model's threshold, or without one.
        Normal = "normal",
        /// At or above the threshold.
        Long = "long",
    }
}

closed! {
    /// Why a place became free (LEA-4).
    ReleaseCause {
        /// The request was given up before it was dispatched.
        Abandoned = "abandoned",
        /// The generation it belonged to ended.
        Fenced = "fenced",
        /// Nothing was sent.
        SendFailed = "send_failed",
        /// The Node said that the work stopped.
        Terminal = "terminal",
    }
}

/// One place of one provider, claimed for one attempt. Never changes (LEA-3).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CapacityLease {
    /// The attempt.
    pub attempt: AttemptId,
    /// The Node.
    pub node: NodeId,
    /// Its generation at admission.
    pub generation: Generation,
    /// The provider.
    pub provider: ProviderId,
    /// The adapter instance.
    pub adapter: AdapterKey,
    /// The model as the provider knows it.
    pub target: Target,
    /// Which places it draws on.
    pub class: WorkClass,
    /// Config the admission was made under.
    pub config_revision: u64,
}

/// Places a provider has now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the two numbers of LEA-2")]
pub struct PlaceLimits {
    /// In all.
    pub capacity: u32,
    /// Of which for long requests.
    pub long: u32,
}

/// Places of a provider that are taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the counters of EDG-4")]
pub struct PlaceCounters {
    /// By normal requests.
    pub normal: u32,
    /// By long requests.
    pub long: u32,
    /// Of both: by cancelled work whose Node has not said that it stopped (LEA-6).
    pub quarantined: u32,
}

impl PlaceCounters {
    /// Places taken by both classes.
    #[must_use]
    pub const fn in_use(&self) -> u32 {
        self.normal + self.long
    }

    /// True if one more request of this class fits.
    #[must_use]
    pub const fn has_place(&self, class: WorkClass, limits: PlaceLimits) -> bool {
        let class_has = match class {
            WorkClass::Normal => true,
            WorkClass::Long => self.long < limits.long,
        };
        class_has && self.in_use() < limits.capacity
    }
}

/// No place of that class is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no place is free")]
pub struct AtCapacity;

/// Where leases live. The local [`Ledger`] is the only one shipped; several Edges on one capacity would bring another.
pub trait CapacityLedger: fmt::Debug + Send {
    /// Claims a place.
    ///
    /// # Errors
    /// [`AtCapacity`] when the provider has none for this class; the attempt then holds nothing.
    fn acquire(&mut self, lease: CapacityLease, limits: PlaceLimits) -> Result<(), AtCapacity>;

    /// Takes a record out: the only release. `None` = the attempt holds nothing, which is counted.
    fn take(&mut self, attempt: AttemptId) -> Option<CapacityLease>;

    /// Attempts that hold a place of a generation, oldest first.
    fn held_by(&self, generation: Generation) -> Vec<AttemptId>;

    /// Marks a place as taken by work nobody hears of any more. False if the attempt holds nothing or is marked already.
    fn quarantine(&mut self, attempt: AttemptId) -> bool;

    /// True if the attempt's place is marked that way.
    fn is_quarantined(&self, attempt: AttemptId) -> bool;

    /// The lease of an attempt.
    fn lease(&self, attempt: AttemptId) -> Option<&CapacityLease>;

    /// Places of a provider on a Node that are taken.
    fn counters(&self, node: &NodeId, provider: &ProviderId) -> PlaceCounters;

    /// Releases that found nothing.
    fn late_releases(&self) -> u64;
}

#[derive(Debug)]
struct Record {
    lease: CapacityLease,
    quarantined: bool,
}

/// The ledger of one Edge.
#[derive(Debug, Default)]
pub struct Ledger {
    records: BTreeMap<AttemptId, Record>,
    /// Per provider and Node: one that moved to another Node has places of both until the old work is over (LEA-1). Without
    /// an entry all are 0.
    counters: BTreeMap<(ProviderId, NodeId), PlaceCounters>,
    late: u64,
}

impl CapacityLedger for Ledger {
    fn acquire(&mut self, lease: CapacityLease, limits: PlaceLimits) -> Result<(), AtCapacity> {
        let fits = self.counters(&lease.node, &lease.provider).has_place(lease.class, limits);
        if !fits || self.records.contains_key(&lease.attempt) {
            return Err(AtCapacity);
        }
        let counters = self.counters.entry((lease.provider.clone(), lease.node.clone())).or_default();
        *class_counter(counters, lease.class) += 1;
        self.records.insert(lease.attempt, Record { lease, quarantined: false });
        Ok(())
    }

    fn take(&mut self, attempt: AttemptId) -> Option<CapacityLease> {
        let Some(record) = self.records.remove(&attempt) else {
            self.late += 1;
            return None;
        };
        let resource = (record.lease.provider.clone(), record.lease.node.clone());
        if let Some(counters) = self.counters.get_mut(&resource) {
            let counter = class_counter(counters, record.lease.class);
            debug_assert!(*counter > 0, "a counter went below zero");
            *counter = counter.saturating_sub(1);
            counters.quarantined = counters.quarantined.saturating_sub(u32::from(record.quarantined));
            if *counters == PlaceCounters::default() {
                self.counters.remove(&resource);
            }
        }
        Some(record.lease)
    }

    fn held_by(&self, generation: Generation) -> Vec<AttemptId> {
        let of_generation = self.records.iter().filter(|(_, record)| record.lease.generation == generation);
        of_generation.map(|(attempt, _)| *attempt).collect()
    }

    fn quarantine(&mut self, attempt: AttemptId) -> bool {
        let Some(record) = self.records.get_mut(&attempt) else {
            return false;
        };
        let newly = !std::mem::replace(&mut record.quarantined, true);
        let resource = (record.lease.provider.clone(), record.lease.node.clone());
        if newly && let Some(counters) = self.counters.get_mut(&resource) {
            counters.quarantined += 1;
        }
        newly
    }

    fn is_quarantined(&self, attempt: AttemptId) -> bool {
        self.records.get(&attempt).is_some_and(|record| record.quarantined)
    }

    fn lease(&self, attempt: AttemptId) -> Option<&CapacityLease> {
        self.records.get(&attempt).map(|record| &record.lease)
    }

    fn counters(&self, node: &NodeId, provider: &ProviderId) -> PlaceCounters {
        self.counters.get(&(provider.clone(), node.clone())).copied().unwrap_or_default()
    }

    fn late_releases(&self) -> u64 {
        self.late
    }
}

const fn class_counter(counters: &mut PlaceCounters, class: WorkClass) -> &mut u32 {
    match class {
        WorkClass::Normal => &mut counters.normal,
        WorkClass::Long => &mut counters.long,
    }
}

#[cfg(test)]
mod tests;
