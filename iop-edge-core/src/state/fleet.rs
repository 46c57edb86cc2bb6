//! Decides what the configured providers can do right now. Configured ones never vanish: offline ones offer nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_credential_lease::BindingField;
use iop_execution::{AdapterKey, ModelName, NodeId, ProviderId, Target};
use iop_wire::{NodeConfigPayload, ProviderConfig, ProviderReady, ReadyTarget, WireMode};

use crate::api::{Wanted, WireKind};
use crate::catalog::credentials::Bound;
use crate::catalog::{Candidate, Catalog, DEFAULT_CAPACITY, ModelGroup};
use crate::state::id::{Generation, ProviderKey};
use crate::state::ledger::PlaceLimits;
use crate::state::overlay::Overlay;
use crate::state::wear::Wear;

/// What a provider is while its Node is ready.
#[derive(Debug, Clone)]
pub(crate) struct Online {
    pub(crate) generation: Generation,
    /// Places under both that config and the present one.
    pub(crate) limits: PlaceLimits,
    /// The key under which its Node has it, which a config that is not in force there yet may name differently.
    pub(crate) adapter: AdapterKey,
    /// What a lease for it is bound to, as its Node has it; an error names what can't be bound.
    pub(crate) bound: Result<Option<Bound>, BindingField>,
    /// False: its Node may have it with another credential, or at another place, than is configured. Requests wait until that
    /// is settled: a lease would be of one and the Node expect the other.
    pub(crate) settled: bool,
    /// The Node left a question unanswered (FEN-7).
    pub(crate) suspect: bool,
    draining: bool,
    runs: bool,
    tunnels: bool,
    messages: bool,
}

/// One configured provider.
#[derive(Debug)]
pub(crate) struct ProviderState {
    /// Names it in timers: given once, never again.
    pub(crate) key: ProviderKey,
    pub(crate) node: NodeId,
    pub(crate) config: ProviderConfig,
    pub(crate) enabled: bool,
    /// False: an operator took its Node out of service.
    pub(crate) in_service: bool,
    pub(crate) online: Option<Online>,
    /// What it listed when it said so last. Kept while it is offline, so that public names do not come and go.
    pub(crate) listed: Vec<ReadyTarget>,
    pub(crate) tools: bool,
    pub(crate) reasoning: bool,
    pub(crate) last_admission: u64,
    pub(crate) wear: Wear,
    /// What evidence says of it in this generation.
    pub(crate) overlay: Overlay,
    /// Its Node makes its connection anew, and should be back by then.
    returns_by: Option<Instant>,
}

impl ProviderState {
    /// How it would serve a request that insists on `wanted`; `None` = not now (SEL-3).
    pub(crate) fn wire(&self, wanted: Option<Wanted>) -> Option<WireKind> {
        let usable = self.enabled && self.in_service && !self.overlay.is_lowered();
        let online = self.online.as_ref().filter(|online| usable && !online.draining)?;
        let tunnels = match self.config.wire {
            WireMode::Auto => online.tunnels,
            WireMode::Run => false,
        };
        let tunnel = tunnels.then_some(WireKind::Tunnel);
        let run = online.runs.then_some(WireKind::Run);
        match wanted {
            None => tunnel.or(run),
            Some(Wanted::Wire(WireKind::Run)) => run,
            Some(Wanted::Wire(WireKind::Tunnel)) => tunnel,
            Some(Wanted::Messages) => tunnel.filter(|_| online.messages),
        }
    }

    /// Known context length of a target; 0 = not known.
    pub(crate) fn context(&self, target: &Target) -> u64 {
        let listed = self.listed.iter().find(|listed| listed.target == *target);
        listed.map_or(0, |listed| listed.context_length)
    }

    /// Places under the present config, and never more than its Node has under the one in force there.
    fn limits(&self, in_force: PlaceLimits) -> PlaceLimits {
        let PlaceLimits { capacity, long } = limits(&self.config, in_force.capacity);
        PlaceLimits { capacity, long: long.min(in_force.long) }
    }

    /// What its Node says of it. Answers whether its health begins anew with that, after evidence had lowered it.
    fn report(
        &mut self,
        of: &Offer,
        in_force: &ProviderConfig,
        pushed: Option<&ProviderConfig>,
        report: &ProviderReady,
    ) -> bool {
        let Offer { generation, suspect, draining, .. } = *of;
        let mut limits = self.limits(limits(in_force, report.max_concurrency));
        if let Some(pushed) = pushed {
            let PlaceLimits { capacity, long } = self::limits(pushed, limits.capacity);
            limits = PlaceLimits { capacity, long: long.min(limits.long) };
        }
        if !draining {
            self.returns_by = None;
        }
        let adapter = in_force.adapter.clone();
        let (runs, tunnels, messages) = (report.runs, report.tunnels, report.messages);
        let raised = self.overlay.begin(generation, &adapter);
        let bound = Bound::of(in_force);
        let settled =
            is_bound_alike(in_force, &self.config) && pushed.is_none_or(|new| is_bound_alike(new, &self.config));
        self.online =
            Some(Online { generation, limits, adapter, bound, settled, suspect, draining, runs, tunnels, messages });
        (self.tools, self.reasoning) = (report.tools, report.reasoning);
        self.listed.clone_from(&report.targets);
        raised
    }

    /// How long an absent one is expected to be away, if its Node said that it comes back (FEN-3).
    pub(crate) fn returns_in(&self, now: Instant) -> Duration {
        self.returns_by
            .filter(|_| self.is_absent() && self.in_service)
            .map_or(Duration::ZERO, |by| by.saturating_duration_since(now))
    }

    /// Its Node is away, or goes away: it may come back (FEN-3).
    pub(crate) fn is_absent(&self) -> bool {
        self.enabled && self.online.as_ref().is_none_or(|online| online.draining)
    }
}

/// What a ready Node said last of its providers, and under which config. Kept so that a config that is taken back brings
/// back what it took away: the Node is asked nothing then (REG-7).
#[derive(Debug)]
struct Offer {
    generation: Generation,
    in_force: Arc<NodeConfigPayload>,
    /// A config that is on its way: the Node has one or the other.
    pushed: Option<Arc<NodeConfigPayload>>,
    reports: Vec<ProviderReady>,
    suspect: bool,
    draining: bool,
}

/// Leases for the one fit the other.
fn is_bound_alike(one: &ProviderConfig, other: &ProviderConfig) -> bool {
    one.credential == other.credential && (one.credential.is_none() || one.origin() == other.origin())
}

/// Places under a config of a backend that reported so many; 0 = not known.
fn limits(config: &ProviderConfig, reported: u32) -> PlaceLimits {
    let known = [config.capacity, reported].into_iter().filter(|places| *places != 0).min();
    let capacity = known.unwrap_or(DEFAULT_CAPACITY);
    let long = if config.long_capacity == 0 { capacity } else { config.long_capacity.min(capacity) };
    PlaceLimits { capacity, long }
}

/// A report that names a provider its Node does not have, or one twice (W10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the node reported a provider it does not have")]
pub(crate) struct ForeignProvider;

/// Checks what a Node reports against the config it has in force.
pub(crate) fn check(in_force: &[ProviderConfig], reports: &[ProviderReady]) -> Result<(), ForeignProvider> {
    for (at, report) in reports.iter().enumerate() {
        let known = in_force.iter().any(|config| config.provider_id == report.provider_id);
        let earlier = reports.iter().take(at).any(|other| other.provider_id == report.provider_id);
        if !known || earlier {
            return Err(ForeignProvider);
        }
    }
    Ok(())
}

/// All configured providers, in config order.
#[derive(Debug)]
pub(crate) struct Fleet {
    providers: Vec<ProviderState>,
    index: HashMap<ProviderId, usize>,
    offers: HashMap<NodeId, Offer>,
    admissions: u64,
    last_key: u64,
    /// Providers raised by a new generation or instance, which nobody was told of yet.
    raised: usize,
}

impl Fleet {
    pub(crate) fn new(catalog: &Catalog) -> Self {
        let mut this = Self {
            providers: Vec::new(),
            index: HashMap::new(),
            offers: HashMap::new(),
            admissions: 0,
            last_key: 0,
            raised: 0,
        };
        this.apply(catalog);
        this
    }

    /// Takes over a config. A provider that stays on its Node keeps what is known of it; it is offered under what its Node
    /// has in force until that says something else, with no more places than both configs allow (REG-7).
    pub(crate) fn apply(&mut self, catalog: &Catalog) {
        let mut old: HashMap<ProviderId, ProviderState> =
            self.providers.drain(..).map(|state| (state.config.provider_id.clone(), state)).collect();
        for node in catalog.nodes() {
            for entry in &node.providers {
                let enabled = node.enabled && entry.enabled;
                let state = match old.remove(&entry.config.provider_id).filter(|old| old.node == node.id) {
                    Some(mut state) => {
                        state.config = entry.config.clone();
                        state.enabled = enabled;
                        state
                    }
                    None => {
                        self.last_key += 1;
                        ProviderState {
                            key: ProviderKey(self.last_key),
                            node: node.id.clone(),
                            config: entry.config.clone(),
                            enabled,
                            in_service: true,
                            online: None,
                            listed: Vec::new(),
                            tools: false,
                            reasoning: false,
                            last_admission: 0,
                            wear: Wear::default(),
                            overlay: Overlay::default(),
                            returns_by: None,
                        }
                    }
                };
                self.providers.push(state);
            }
        }
        let ids = self.providers.iter().enumerate();
        self.index = ids.map(|(at, state)| (state.config.provider_id.clone(), at)).collect();
        for state in &mut self.providers {
            self.raised += usize::from(Self::offer(state, self.offers.get(&state.node)));
        }
    }

    /// What a provider can do, as its Node said last.
    fn offer<'a>(state: &mut ProviderState, of: Option<&'a Offer>) -> bool {
        let id = &state.config.provider_id;
        let within = |config: &'a NodeConfigPayload| config.providers.iter().find(|config| config.provider_id == *id);
        let offered = of.filter(|_| state.enabled).and_then(|of| {
            let pushed = match &of.pushed {
                None => None,
                // One that the Node may have lost already is not used.
                Some(pushed) => Some(within(pushed)?),
            };
            let report = of.reports.iter().find(|report| report.provider_id == *id)?;
            Some((of, within(&of.in_force)?, pushed, report))
        });
        match offered {
            Some((of, in_force, pushed, report)) => state.report(of, in_force, pushed, report),
            None => {
                state.online = None;
                false
            }
        }
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
        let admissions = self.admissions;
        if let Some(state) = self.provider_mut(id) {
            state.last_admission = admissions;
        }
    }

    /// What the providers of a Node offer under the config it has in force: when it became ready, after a config push, or
    /// because that changed. One it does not report is offline.
    pub(crate) fn offers(
        &mut self,
        node: &NodeId,
        generation: Generation,
        in_force: &Arc<NodeConfigPayload>,
        reports: Vec<ProviderReady>,
    ) {
        let before = self.offers.get(node).filter(|before| before.generation == generation);
        let (suspect, draining) = before.map_or((false, false), |before| (before.suspect, before.draining));
        let pushed = before.and_then(|before| before.pushed.clone());
        let offer = Offer { generation, in_force: Arc::clone(in_force), pushed, reports, suspect, draining };
        self.offers.insert(node.clone(), offer);
        self.offer_again(node);
    }

    /// A config is on its way to a Node; `None` = it has answered.
    pub(crate) fn pushed(&mut self, node: &NodeId, config: Option<Arc<NodeConfigPayload>>) {
        if let Some(offer) = self.offers.get_mut(node) {
            offer.pushed = config;
            self.offer_again(node);
        }
    }

    fn offer_again(&mut self, node: &NodeId) {
        let offer = self.offers.get(node);
        for state in self.providers.iter_mut().filter(|state| state.node == *node) {
            self.raised += usize::from(Self::offer(state, offer));
        }
    }

    /// How many providers a new generation or instance has raised since this was asked last (HLT-3).
    pub(crate) fn take_raised(&mut self) -> usize {
        std::mem::take(&mut self.raised)
    }

    pub(crate) fn drain(&mut self, generation: Generation) {
        self.offer_of(generation).for_each(|offer| offer.draining = true);
        self.online_of(generation).for_each(|online| online.draining = true);
    }

    /// A Node ends its connection only to make a new one, and should be back by then; `None` = it will not be.
    pub(crate) fn expect_back(&mut self, node: &NodeId, by: Option<Instant>) {
        self.of_node(node).for_each(|state| state.returns_by = by);
    }

    /// The connection of a Node that may be expected back has ended otherwise than it said: not longer than until then.
    pub(crate) fn expect_back_at_most(&mut self, node: &NodeId, by: Instant) {
        self.of_node(node).for_each(|state| state.returns_by = state.returns_by.map(|expected| expected.min(by)));
    }

    fn of_node<'a>(&'a mut self, node: &'a NodeId) -> impl Iterator<Item = &'a mut ProviderState> {
        self.providers.iter_mut().filter(move |state| state.node == *node)
    }

    /// Whether new work prefers other Nodes than this one (FEN-7).
    pub(crate) fn suspect(&mut self, generation: Generation, suspect: bool) {
        self.offer_of(generation).for_each(|offer| offer.suspect = suspect);
        self.online_of(generation).for_each(|online| online.suspect = suspect);
    }

    fn offer_of(&mut self, generation: Generation) -> impl Iterator<Item = &mut Offer> {
        self.offers.values_mut().filter(move |offer| offer.generation == generation)
    }

    fn online_of(&mut self, generation: Generation) -> impl Iterator<Item = &mut Online> {
        let online = self.providers.iter_mut().filter_map(|state| state.online.as_mut());
        online.filter(move |online| online.generation == generation)
    }

    /// An operator takes a Node out of service, or puts it back.
    pub(crate) fn set_in_service(&mut self, node: &NodeId, on: bool) {
        self.providers.iter_mut().filter(|state| state.node == *node).for_each(|state| state.in_service = on);
    }

    /// The provider with this key.
    pub(crate) fn by_key_mut(&mut self, key: ProviderKey) -> Option<&mut ProviderState> {
        self.providers.iter_mut().find(|state| state.key == key)
    }

    /// The provider that this generation of a Node has under this adapter key. There is at most one.
    pub(crate) fn serving_mut(&mut self, generation: Generation, adapter: &AdapterKey) -> Option<&mut ProviderState> {
        let serves = |state: &&mut ProviderState| {
            let online = state.online.as_ref();
            online.is_some_and(|online| online.generation == generation && online.adapter == *adapter)
        };
        self.providers.iter_mut().find(serves)
    }

    /// The provider with this key, while this generation of its Node has it.
    pub(crate) fn serving_as_mut(
        &mut self,
        generation: Generation,
        key: Option<ProviderKey>,
    ) -> Option<&mut ProviderState> {
        let provider = self.by_key_mut(key?)?;
        provider.online.as_ref().is_some_and(|online| online.generation == generation).then_some(provider)
    }

    pub(crate) fn provider_mut(&mut self, id: &ProviderId) -> Option<&mut ProviderState> {
        self.providers.get_mut(*self.index.get(id)?)
    }

    /// Takes exactly this generation's providers offline (FEN-2).
    pub(crate) fn fence(&mut self, generation: Generation) {
        self.offers.retain(|_, offer| offer.generation != generation);
        for state in &mut self.providers {
            state.online.take_if(|online| online.generation == generation);
        }
    }

    /// Models that come from what providers list: one per target, served by all that list it (CFG-3). A name that is `taken`
    /// by an explicit model is left to it.
    pub(crate) fn listed_models(&self, catalog: &Catalog, taken: impl Fn(&str) -> bool) -> Vec<ModelGroup> {
        let mut models: Vec<ModelGroup> = Vec::new();
        let mut places: HashMap<&Target, usize> = HashMap::new();
        for state in self.providers.iter().filter(|state| state.enabled) {
            for target in state.listed.iter().map(|listed| &listed.target) {
                let candidate = Candidate::new(state.config.provider_id.clone(), target.clone());
                if let Some(model) = places.get(target).and_then(|at| models.get_mut(*at)) {
                    if !model.candidates.contains(&candidate) {
                        model.candidates.push(candidate);
                    }
                } else if !taken(target.as_str())
                    && let Ok(name) = ModelName::new(target.as_str())
                {
                    places.insert(target, models.len());
                    let mut model = ModelGroup::new(name, vec![candidate], catalog.queue());
                    model.strategy = catalog.auto_strategy();
                    models.push(model);
                }
            }
        }
        models
    }
}
