//! Decides which names clients may ask for, and keeps the queue of each model.

use std::collections::HashMap;

use iop_execution::ModelName;

use crate::catalog::{Catalog, ModelGroup};
use crate::state::fleet::Fleet;
use crate::state::id::AttemptId;
use crate::state::queue::WaitQueue;

/// A model and who waits for it.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) model: ModelGroup,
    pub(crate) queue: WaitQueue,
}

/// The explicit models in config order, then the listed ones in the order of their providers.
#[derive(Debug)]
pub(crate) struct Groups {
    groups: Vec<Group>,
    explicit: usize,
    names: HashMap<ModelName, usize>,
}

impl Groups {
    pub(crate) fn new(catalog: &Catalog) -> Self {
        let groups: Vec<_> =
            catalog.models().iter().map(|model| Group { model: model.clone(), queue: WaitQueue::default() }).collect();
        let mut this = Self { explicit: groups.len(), groups, names: HashMap::new() };
        this.index();
        this
    }

    fn index(&mut self) {
        let names = self.groups.iter().enumerate().flat_map(|(at, group)| {
            std::iter::once(&group.model.name).chain(&group.model.aliases).map(move |name| (name.clone(), at))
        });
        self.names = names.collect();
    }

    /// Takes over what providers list now. Requests that waited for a name that is gone are answered: nobody serves
    /// them any more.
    pub(crate) fn relist(&mut self, catalog: &Catalog, fleet: &Fleet) -> Vec<AttemptId> {
        let mut old: HashMap<ModelName, WaitQueue> =
            self.groups.drain(self.explicit..).map(|group| (group.model.name, group.queue)).collect();
        self.index();
        for model in fleet.listed_models(catalog, |name| self.names.contains_key(name)) {
            let queue = old.remove(&model.name).unwrap_or_default();
            self.groups.push(Group { model, queue });
        }
        self.index();
        let mut orphans: Vec<_> = old
            .values()
            .flat_map(|queue| queue.heads().flat_map(|(need, _)| queue.line(need)))
            .map(|position| position.attempt())
            .collect();
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

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter()
    }

    pub(crate) const fn len(&self) -> usize {
        self.groups.len()
    }
}
