//! Decides what the configured providers can do right now. Configured ones never vanish: offline ones offer nothing.

use std::collections::HashMap;

use iop_execution::{ModelName, NodeId, ProviderId};
use iop_wire::{ProviderConfig, ProviderReady, ReadyTarget, WireMode};

use crate::api::WireKind;
use crate::catalog::{Candidate, Catalog, DEFAULT_CAPACITY, ModelGroup};
use crate::state::id::Generation;
use crate::state::ledger::PlaceLimits;

/// What a provider is while its Node is ready.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Online {
    pub(crate) generation: Generation,
    pub(crate) limits: PlaceLimits,
    draining: bool,
    runs: bool,
    tunnels: bool,
}

/// One configured provider.
#[derive(Debug)]
pub(crate) struct ProviderState {
    pub(crate) node: NodeId,
    pub(crate) config: ProviderConfig,
    pub(crate) enabled: bool,
    pub(crate) online: Option<Online>,
    /// What it listed when it was ready last. Kept while it is offline, so that public names do not come and go.
    pub(crate) listed: Vec<ReadyTarget>,
    pub(crate) tools: bool,
    pub(crate) reasoning: bool,
    pub(crate) last_admission: u64,
}

impl ProviderState {
    /// How it would serve a request that insists on `wanted`; `None` = not now (SEL-3).
    pub(crate) fn wire(&self, wanted: Option<WireKind>) -> Option<WireKind> {
        let online = self.online.filter(|online| self.enabled && !online.draining)?;
        let tunnels = match self.config.wire {
            WireMode::Auto => online.tunnels,
            WireMode::Run => false,
        };
        let tunnel = tunnels.then_some(WireKind::Tunnel);
        let run = online.runs.then_some(WireKind::Run);
        match wanted {
            None => tunnel.or(run),
            Some(WireKind::Run) => run,
            Some(WireKind::Tunnel) => tunnel,
        }
    }

    fn limits(&self, reported: u32) -> PlaceLimits {
        let known = [self.config.capacity, reported].into_iter().filter(|places| *places != 0).min();
        let capacity = known.unwrap_or(DEFAULT_CAPACITY);
        let long = if self.config.long_capacity == 0 { capacity } else { self.config.long_capacity.min(capacity) };
        PlaceLimits { capacity, long }
    }
}

/// A Ready that names a provider its Node does not have, or one twice (W10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the node reported a provider it does not have")]
pub(crate) struct ForeignProvider;

/// All configured providers, in config order.
#[derive(Debug)]
pub(crate) struct Fleet {
    providers: Vec<ProviderState>,
    index: HashMap<ProviderId, usize>,
    admissions: u64,
}

impl Fleet {
    pub(crate) fn new(catalog: &Catalog) -> Self {
        let providers: Vec<_> = catalog
            .nodes()
            .iter()
            .flat_map(|node| node.providers.iter().map(move |entry| (node, entry)))
            .map(|(node, entry)| ProviderState {
                node: node.id.clone(),
                config: entry.config.clone(),
                enabled: node.enabled && entry.enabled,
                online: None,
                listed: Vec::new(),
                tools: false,
                reasoning: false,
                last_admission: 0,
            })
            .collect();
        let index = providers.iter().enumerate().map(|(at, state)| (state.config.provider_id.clone(), at)).collect();
        Self { providers, index, admissions: 0 }
    }

    pub(crate) fn provider(&self, id: &ProviderId) -> Option<&ProviderState> {
        self.providers.get(*self.index.get(id)?)
    }

    pub(crate) fn providers(&self) -> &[ProviderState] {
        &self.providers
    }

    /// Counts an admission.
    pub(crate) fn admitted(&mut self, id: &ProviderId) {
        self.admissions += 1;
        if let Some(state) = self.index.get(id).and_then(|at| self.providers.get_mut(*at)) {
            state.last_admission = self.admissions;
        }
    }

    pub(crate) fn check(&self, node: &NodeId, ready: &[ProviderReady]) -> Result<(), ForeignProvider> {
        for (at, report) in ready.iter().enumerate() {
            let known = self.provider(&report.provider_id).is_some_and(|state| state.node == *node && state.enabled);
            let earlier = ready.iter().take(at).any(|other| other.provider_id == report.provider_id);
            if !known || earlier {
                return Err(ForeignProvider);
            }
        }
        Ok(())
    }

    /// The providers of a Node that became ready (REG-3). One it does not report stays offline.
    pub(crate) fn activate(&mut self, node: &NodeId, generation: Generation, ready: Vec<ProviderReady>) {
        for report in ready {
            let Some(state) = self.index.get(&report.provider_id).and_then(|at| self.providers.get_mut(*at)) else {
                continue;
            };
            if state.node != *node {
                continue;
            }
            let limits = state.limits(report.max_concurrency);
            let (runs, tunnels) = (report.runs, report.tunnels);
            state.online = Some(Online { generation, limits, draining: false, runs, tunnels });
            (state.tools, state.reasoning, state.listed) = (report.tools, report.reasoning, report.targets);
        }
    }

    pub(crate) fn drain(&mut self, generation: Generation) {
        for online in self.providers.iter_mut().filter_map(|state| state.online.as_mut()) {
            online.draining |= online.generation == generation;
        }
    }

    /// Takes exactly this generation's providers offline (FEN-2).
    pub(crate) fn fence(&mut self, generation: Generation) {
        for state in &mut self.providers {
            state.online = state.online.filter(|online| online.generation != generation);
        }
    }

    /// Models that come from what providers list: a target's own name, or `target@provider` where several list it. A
    /// name that is `taken` by an explicit model is left to it.
    pub(crate) fn listed_models(&self, catalog: &Catalog, taken: impl Fn(&str) -> bool) -> Vec<ModelGroup> {
        let listings = || {
            let enabled = self.providers.iter().filter(|state| state.enabled);
            enabled.flat_map(|state| state.listed.iter().map(move |listed| (state, &listed.target)))
        };
        let mut count: HashMap<&str, usize> = HashMap::new();
        for (_, target) in listings() {
            *count.entry(target.as_str()).or_default() += 1;
        }
        let mut models: Vec<ModelGroup> = Vec::new();
        for (state, target) in listings() {
            let id = &state.config.provider_id;
            let name = match count.get(target.as_str()) {
                Some(1) => target.as_str().to_owned(),
                Some(_) | None => format!("{target}@{id}"),
            };
            let Ok(public) = ModelName::new(&name) else {
                continue; // too long with its suffix: can't be named, so it can't be asked for
            };
            if !taken(&name) && !models.iter().any(|model| model.name == public) {
                let candidate = Candidate::new(id.clone(), target.clone());
                let mut model = ModelGroup::new(public, vec![candidate], catalog.queue());
                model.strategy = catalog.auto_strategy();
                models.push(model);
            }
        }
        models
    }
}
