//! Decides whether leases of a slot are still taken, from what the Edge last said about all slots.

use std::collections::BTreeMap;

use crate::binding::SlotName;
use crate::error::LeaseError;

/// Most slots a Node keeps the state of.
pub const MAX_SLOTS: usize = 4_096;

/// Where one slot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotState {
    /// Leases of an older version of the credential are refused.
    pub revision: u64,
    /// What the slot's owner decided.
    pub status: SlotStatus,
}

/// What the owner of a slot decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the closed list of what an owner can decide")]
pub enum SlotStatus {
    /// Leases are taken.
    Enabled,
    /// For now all leases are refused.
    Disabled,
    /// For good all leases are refused.
    Revoked,
}

/// More than [`MAX_SLOTS`] slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a Node keeps the state of at most {MAX_SLOTS} credential slots")]
pub struct TooManySlots;

/// Where every slot stands that the Node may get leases of. A slot that is not listed is a revoked one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotTable(BTreeMap<SlotName, SlotState>);

impl SlotTable {
    /// Takes the whole new list. A revision never goes back while its slot is listed.
    ///
    /// # Errors
    /// [`TooManySlots`]; the list in force stays.
    pub fn replace(&mut self, states: impl IntoIterator<Item = (SlotName, SlotState)>) -> Result<(), TooManySlots> {
        let mut next = BTreeMap::new();
        for (slot, mut state) in states {
            let floor = self.0.get(&slot).map_or(0, |known| known.revision);
            state.revision = state.revision.max(floor);
            next.insert(slot, state);
            if next.len() > MAX_SLOTS {
                return Err(TooManySlots);
            }
        }
        self.0 = next;
        Ok(())
    }

    pub(crate) fn check(&self, slot: &SlotName, revision: u64) -> Result<(), LeaseError> {
        let state = self.0.get(slot).ok_or(LeaseError::Revoked)?;
        match state.status {
            SlotStatus::Revoked => Err(LeaseError::Revoked),
            SlotStatus::Disabled => Err(LeaseError::Disabled),
            SlotStatus::Enabled if revision < state.revision => Err(LeaseError::StaleRevision),
            SlotStatus::Enabled => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> SlotName {
        SlotName::new(text).unwrap()
    }

    fn one(revision: u64, status: SlotStatus) -> [(SlotName, SlotState); 1] {
        [(named("s"), SlotState { revision, status })]
    }

    #[test]
    fn only_an_enabled_slot_of_that_revision_or_an_older_one_passes() {
        // CRD-5, CRD-8
        let mut table = SlotTable::default();
        assert_eq!(table.check(&named("s"), 9), Err(LeaseError::Revoked), "not listed");
        for (status, older, same) in [
            (SlotStatus::Enabled, Err(LeaseError::StaleRevision), Ok(())),
            (SlotStatus::Disabled, Err(LeaseError::Disabled), Err(LeaseError::Disabled)),
            (SlotStatus::Revoked, Err(LeaseError::Revoked), Err(LeaseError::Revoked)),
        ] {
            table.replace(one(3, status)).unwrap();
            assert_eq!(table.check(&named("s"), 2), older);
            assert_eq!(table.check(&named("s"), 3), same);
            assert_eq!(table.check(&named("s"), 4), same, "the lease may be ahead of the list");
        }
        table.replace([]).unwrap();
        assert_eq!(table.check(&named("s"), 9), Err(LeaseError::Revoked), "no longer listed");
    }

    #[test]
    fn a_revision_never_goes_back_and_the_list_is_bounded() {
        // CRD-8
        let mut table = SlotTable::default();
        table.replace(one(3, SlotStatus::Enabled)).unwrap();
        table.replace(one(1, SlotStatus::Enabled)).unwrap();
        assert_eq!(table.check(&named("s"), 2), Err(LeaseError::StaleRevision));
        let many = |count: usize| {
            (0..count).map(|n| (named(&n.to_string()), SlotState { revision: 1, status: SlotStatus::Enabled }))
        };
        assert_eq!(table.replace(many(MAX_SLOTS + 1)), Err(TooManySlots));
        assert_eq!(table.check(&named("s"), 3), Ok(()), "the list in force stays");
        assert_eq!(table.replace(many(MAX_SLOTS)), Ok(()));
    }
}
