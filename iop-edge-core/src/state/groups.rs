//! Decides which names clients may ask for, and keeps the queue of each model.

use std::collections::HashMap;

use iop_execution::{ModelName, ProviderId};

use crate::catalog::{Catalog, ModelGroup};
use crate::state::fleet::Fleet;
use crate::state::id::AttemptId;
use crate::state::queue::WaitQueue;

/// Length of a round: how far a candidate of weight 1 moves back when it was chosen.
const ROUND: u64 = 1 << 32;

/// A model and who waits for it.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) model: ModelGroup,
    pub(crate) queue: WaitQueue,
    /// When the turn of each candidate is, and the turn that was taken last: a candidate that had none for a while starts
    /// there and catches up nothing.
    turns: Vec<u64>,
    last_turn: u64,
}

impl Group {
    fn new(model: ModelGroup, queue: WaitQueue) -> Self {
        let turns = vec![0; model.candidates.len()];
        Self { model, queue, turns, last_turn: 0 }
    }

    /// When the turn of a candidate is.
    pub(crate) fn turn(&self, candidate: usize) -> u64 {
        self.turns.get(candidate).copied().unwrap_or(0).max(self.last_turn)
    }

    /// A candidate was chosen.
    pub(crate) fn took_turn(&mut self, candidate: usize) {
        let turn = self.turn(candidate);
        let weight = self.model.candidates.get(candidate).map_or(1, |candidate| candidate.weight.max(1));
        self.last_turn = turn;
        if let Some(next) = self.turns.get_mut(candidate) {
            *next = turn.saturating_add(ROUND / u64::from(weight));
        }
    }
}

/// The explicit models in config order, then the listed ones in the order of their providers.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    groups: Vec<Group>,
    names: HashMap<ModelName, usize>,
}

impl Groups {
    pub(crate) fn new(catalog: &Catalog, fleet: &Fleet) -> Self {
        let mut this = Self::default();
        this.apply(catalog, fleet);
        this
    }

    fn index(&mut self) {
        let names = self.groups.iter().enumerate().flat_map(|(at, group)| {
            std::iter::once(&group.model.name).chain(&group.model.aliases).map(move |name| (name.clone(), at))
        });
        self.names = names.collect();
    }

    /// Takes over what is configured and what providers list now. A model that stays keeps its queue. Requests that waited
    /// for one that is gone are answered: nobody serves them any more.
    pub(crate) fn apply(&mut self, catalog: &Catalog, fleet: &Fleet) -> Vec<AttemptId> {
        let mut old: HashMap<ModelName, Group> =
            self.groups.drain(..).map(|group| (group.model.name.clone(), group)).collect();
        let mut keep = |model: &ModelGroup| match old.remove(&model.name) {
            Some(group) if group.model.candidates == model.candidates => Group { model: model.clone(), ..group },
            Some(group) => Group::new(model.clone(), group.queue),
            None => Group::new(model.clone(), WaitQueue::default()),
        };
        self.groups = catalog.models().iter().map(&mut keep).collect();
        self.index();
        if catalog.models_auto() {
            let listed = fleet.listed_models(catalog, |name| self.names.contains_key(name));
            self.groups.extend(listed.iter().map(keep));
            self.index();
        }
        let mut orphans: Vec<_> = old.values().flat_map(|group| group.queue.all()).collect();
        orphans.sort_unstable();
        orphans
    }

    /// The model with this name or alias.
    pub(crate) fn find(&self, name: &ModelName) -> Option<usize> {
        self.names.get(name).copied()
    }

    pub(crate) fn get(&self, at: usize) -> Option<&Group> {
        self.groups.get(at)
    }

    pub(crate) fn get_mut(&mut self, at: usize) -> Option<&mut Group> {
        self.groups.get_mut(at)
    }

    /// Models that somebody waits for and that this provider serves.
    pub(crate) fn waiting_for(&mut self, provider: &ProviderId) -> impl Iterator<Item = &mut Group> {
        let serves = move |model: &ModelGroup| model.candidates.iter().any(|candidate| candidate.provider == *provider);
        self.groups.iter_mut().filter(move |group| group.queue.len() > 0 && serves(&group.model))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter()
    }

    pub(crate) const fn len(&self) -> usize {
        self.groups.len()
    }
}

#[cfg(test)]
mod tests {
    use iop_execution::{ProviderId, Target};

    use super::*;
    use crate::catalog::{Candidate, QueueDefaults};

    #[test]
    fn turns_follow_weights_and_a_pause_saves_nothing() {
        // SEL-1
        let candidate = |id: &str, weight| {
            Candidate::new(ProviderId::new(id).unwrap(), Target::new("t").unwrap()).with_weight(weight)
        };
        let model = ModelGroup::new(
            ModelName::new("m").unwrap(),
            vec![candidate("a", 3), candidate("b", 1)],
            QueueDefaults::default(),
        );
        let mut group = Group::new(model, WaitQueue::default());
        let round = |group: &mut Group, of: &[usize]| {
            let next = of.iter().copied().min_by_key(|at| group.turn(*at)).unwrap();
            group.took_turn(next);
            next
        };
        let served: Vec<_> = (0..400).map(|_| round(&mut group, &[0, 1])).collect();
        assert_eq!(served.iter().filter(|at| **at == 0).count(), 300);
        assert!(served.chunks(4).all(|round| round.contains(&1)), "smooth, not in blocks");
        for _ in 0..100 {
            round(&mut group, &[0]);
        }
        let after: Vec<_> = (0..8).map(|_| round(&mut group, &[0, 1])).collect();
        assert!(after.iter().filter(|at| **at == 1).count() <= 3, "b catches up nothing: {after:?}");
    }
}
