//! Decides which adapter instances a Node has, what each may do, and which of them outlive a change of config.
//!
//! An instance belongs to its config, not to a connection: a reconnect with an equal config keeps the instance and its
//! gate; any difference replaces it. What is replaced finishes what it runs, and is stopped after that (REG-7):
//!
//! ```text
//! install() ──► serving ── leave() ──► leaving: no new work ── its gate is idle ── left() ──► stopped
//! ```

use std::collections::{BTreeMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use iop_execution::registry::RegisteredProvider;
use iop_execution::{AdapterKey, Capabilities, CapacityGate, Provider, ProviderId, ProviderRegistry, Target};
use iop_wire::{NodeConfigPayload, ProviderConfig, ProviderReady, ReadyTarget, WireMode};

pub use iop_wire::limits::DEFAULT_CAPACITY;
/// How long a cancelled provider may take to return, when the config does not say.
pub const DEFAULT_CLOSE_GRACE: Duration = Duration::from_secs(5);
/// Longest close grace that a config can ask for.
pub const MAX_CLOSE_GRACE: Duration = Duration::from_secs(60);
/// Most bytes of names in one NodeReadyRequest, over all providers: it must fit into one envelope.
pub const MAX_READY_TARGET_BYTES: usize = 40 * 1024;
/// What a listed target costs beside its name.
const READY_TARGET_OVERHEAD: usize = 16;

/// One adapter instance with its config.
#[derive(Debug)]
pub struct Adapter {
    registered: Arc<RegisteredProvider>,
    config: ProviderConfig,
}

impl Adapter {
    /// The provider.
    #[must_use]
    pub fn provider(&self) -> &Arc<dyn Provider> {
        self.registered.provider()
    }

    /// The provider's id.
    #[must_use]
    pub fn provider_id(&self) -> &ProviderId {
        self.registered.provider_id()
    }

    /// Its places.
    #[must_use]
    pub fn gate(&self) -> &CapacityGate {
        self.registered.gate()
    }

    /// True if it takes no new work.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.registered.is_draining()
    }

    /// Its config.
    #[must_use]
    pub const fn config(&self) -> &ProviderConfig {
        &self.config
    }

    /// False if the config restricts its targets and this is none of them.
    #[must_use]
    pub fn serves(&self, target: &Target) -> bool {
        self.config.targets.is_empty() || self.config.targets.contains(target)
    }

    /// What it can do, as it is used here: without tunnels where the config forces runs. `None` if it panicked.
    #[must_use]
    pub fn capabilities(&self) -> Option<Capabilities> {
        let mut capabilities = capabilities(self.provider_id(), self.provider())?;
        capabilities.tunnels &= self.config.wire == WireMode::Auto;
        capabilities.messages &= capabilities.tunnels;
        Some(capabilities)
    }

    /// True if it may serve this target, and has it as far as is known: the config names it, or the backend lists it, or
    /// neither says anything about targets.
    #[must_use]
    pub fn knows(&self, target: &Target, capabilities: &Capabilities) -> bool {
        let mut listed = capabilities.targets.iter().map(|info| &info.target);
        self.config.targets.contains(target)
            || (self.config.targets.is_empty()
                && (capabilities.targets.is_empty() || listed.any(|known| known == target)))
    }

    /// True if its backend lists a target that the config lets it serve.
    #[must_use]
    pub fn lists_something(&self) -> bool {
        capabilities(self.provider_id(), self.provider())
            .is_some_and(|capabilities| capabilities.targets.iter().any(|info| self.serves(&info.target)))
    }

    /// How long its provider may take to return after a cancel.
    #[must_use]
    pub fn close_grace(&self) -> Duration {
        match self.config.close_grace_ms {
            0 => DEFAULT_CLOSE_GRACE,
            ms => Duration::from_millis(ms).min(MAX_CLOSE_GRACE),
        }
    }

    /// `None` if the adapter panicked: nothing of it can be relied on.
    fn ready(&self, budget: &mut usize) -> Option<ProviderReady> {
        let capabilities = capabilities(self.provider_id(), self.provider())?;
        self.gate().set_capacity(effective_capacity(self.config.capacity, capabilities.max_concurrency));
        *budget = budget.saturating_sub(self.provider_id().as_str().len() + READY_TARGET_OVERHEAD);
        let mut targets = Vec::new();
        for info in capabilities.targets {
            let cost = info.target.as_str().len() + READY_TARGET_OVERHEAD;
            if !self.serves(&info.target) || cost > *budget {
                continue;
            }
            *budget -= cost;
            targets.push(ReadyTarget { target: info.target, context_length: info.context_length.unwrap_or(0) });
        }
        Some(ProviderReady {
            provider_id: self.provider_id().clone(),
            max_concurrency: capabilities.max_concurrency.map_or(0, std::num::NonZeroU32::get),
            tunnels: capabilities.tunnels && self.config.wire == WireMode::Auto,
            runs: capabilities.runs,
            tools: capabilities.tools,
            reasoning: capabilities.reasoning,
            messages: capabilities.messages && capabilities.tunnels,
            targets,
        })
    }
}

/// True if the two are one object.
fn is_same(one: &Arc<dyn Provider>, other: &Arc<dyn Provider>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

/// What a provider says it can do; `None` if it panicked.
pub(crate) fn capabilities(id: &ProviderId, provider: &Arc<dyn Provider>) -> Option<Capabilities> {
    let asked = std::panic::catch_unwind(AssertUnwindSafe(|| provider.capabilities()));
    asked.inspect_err(|_| tracing::error!(provider = %id, "it panicked when asked for its capabilities")).ok()
}

/// Places of an instance: the smaller of config and backend, where each says something (LEA-8).
#[must_use]
pub fn effective_capacity(configured: u32, backend: Option<std::num::NonZeroU32>) -> u32 {
    match (configured, backend) {
        (0, None) => DEFAULT_CAPACITY,
        (0, Some(backend)) => backend.get(),
        (configured, None) => configured,
        (configured, Some(backend)) => configured.min(backend.get()),
    }
}

/// What a new config needs that is not there.
#[derive(Debug, Default)]
pub struct Plan {
    /// Instances to make.
    pub build: Vec<ProviderConfig>,
    /// Configs that are no use: their adapter key is taken by an earlier one.
    pub duplicates: Vec<ProviderConfig>,
}

/// The adapter instances of one Node, by key.
#[derive(Debug, Default)]
pub struct Adapters {
    registry: ProviderRegistry,
    by_key: BTreeMap<AdapterKey, Arc<Adapter>>,
    /// Out of the table, not stopped yet: something they ran may still be at work.
    leaving: Vec<Arc<Adapter>>,
}

impl Adapters {
    /// No instance yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The instance with this key.
    #[must_use]
    pub fn by_key(&self, key: &AdapterKey) -> Option<&Arc<Adapter>> {
        self.by_key.get(key)
    }

    /// What is to be made before this config can serve. Changes nothing.
    #[must_use]
    pub fn plan(&self, config: &NodeConfigPayload) -> Plan {
        let mut plan = Plan::default();
        let mut seen = HashSet::new();
        for provider in &config.providers {
            if !seen.insert(&provider.adapter) {
                plan.duplicates.push(provider.clone());
            } else if self.by_key.get(&provider.adapter).is_none_or(|adapter| adapter.config != *provider) {
                plan.build.push(provider.clone());
            }
        }
        plan
    }

    /// Takes out what the config does not keep: it takes no new work from now on. Whoever gets it lets its work finish, stops
    /// it, and says so to [`Self::left`].
    #[must_use]
    pub fn leave(&mut self, config: &NodeConfigPayload) -> Vec<Arc<Adapter>> {
        let mut wanted: BTreeMap<&AdapterKey, &ProviderConfig> = BTreeMap::new();
        for provider in &config.providers {
            wanted.entry(&provider.adapter).or_insert(provider);
        }
        let gone: Vec<_> = self
            .by_key
            .iter()
            .filter(|(key, adapter)| wanted.get(key).is_none_or(|wanted| **wanted != adapter.config))
            .map(|(key, _)| key.clone())
            .collect();
        let gone: Vec<_> = gone.iter().filter_map(|key| self.remove(key)).collect();
        self.leaving.extend(gone.iter().cloned());
        gone
    }

    /// An instance that left has nothing at work any more. True if it is to be stopped: no other instance uses its provider.
    pub fn left(&mut self, adapter: &Arc<Adapter>) -> bool {
        self.leaving.retain(|leaving| !Arc::ptr_eq(leaving, adapter));
        !self.uses(adapter.provider())
    }

    /// True if an instance, serving or leaving, is this very provider: it is started already, and must not be stopped. That
    /// happens with providers of the embedding program.
    #[must_use]
    pub fn uses(&self, provider: &Arc<dyn Provider>) -> bool {
        self.by_key.values().chain(&self.leaving).any(|adapter| is_same(adapter.provider(), provider))
    }

    /// Takes in an instance that has started. Where it takes the backend of one that is leaving over, the two share their
    /// places: what the old one still runs is not free for the new one (LEA-5).
    pub fn install(&mut self, config: ProviderConfig, provider: Arc<dyn Provider>) {
        let key = config.adapter.clone();
        let backend =
            capabilities(&config.provider_id, &provider).and_then(|capabilities| capabilities.max_concurrency);
        let capacity = effective_capacity(config.capacity, backend);
        let gate = match self.predecessor(&config, &provider) {
            Some(old) => old.gate().successor(capacity),
            None => CapacityGate::new(capacity),
        };
        let _replaced = self.registry.register(key.clone(), config.provider_id.clone(), provider, gate);
        if let Some(registered) = self.registry.by_key(&key) {
            let adapter = Arc::new(Adapter { registered: Arc::clone(registered), config });
            self.by_key.insert(key, adapter);
        }
    }

    /// The newest leaving instance with the same backend, that of the same key first.
    fn predecessor(&self, config: &ProviderConfig, provider: &Arc<dyn Provider>) -> Option<&Arc<Adapter>> {
        let same_backend = |adapter: &&Arc<Adapter>| {
            is_same(adapter.provider(), provider)
                || (!config.base_url.is_empty() && adapter.config.base_url == config.base_url)
        };
        let mut candidates: Vec<_> = self.leaving.iter().rev().filter(same_backend).collect();
        candidates.sort_by_key(|adapter| adapter.config.adapter != config.adapter);
        candidates.into_iter().next()
    }

    fn remove(&mut self, key: &AdapterKey) -> Option<Arc<Adapter>> {
        self.registry.remove(key);
        self.by_key.remove(key)
    }

    /// Every instance, by key.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Adapter>> {
        self.by_key.values().cloned().collect()
    }

    /// Takes every instance out.
    #[must_use]
    pub fn take_all(&mut self) -> Vec<Arc<Adapter>> {
        self.leave(&NodeConfigPayload::default())
    }

    /// What NodeReadyRequest says, in the order of the config. Targets beyond [`MAX_READY_TARGET_BYTES`] are left out.
    #[must_use]
    pub fn ready(&self, config: &NodeConfigPayload) -> Vec<ProviderReady> {
        let mut budget = MAX_READY_TARGET_BYTES;
        let mut seen = HashSet::new();
        config
            .providers
            .iter()
            .filter(|provider| seen.insert(&provider.adapter))
            .filter_map(|provider| self.by_key.get(&provider.adapter))
            .filter_map(|adapter| adapter.ready(&mut budget))
            .collect()
    }
}

#[cfg(test)]
mod tests;
