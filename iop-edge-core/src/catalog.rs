//! Decides what is configured: Nodes, their providers, and the models clients may ask for.
//!
//! A [`Catalog`] is checked once, when it is built, and never changes afterwards.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use iop_credential_lease::{BindingField, NodeName, TargetName};
use iop_execution::closed_list as closed;
use iop_execution::{AdapterKey, ModelName, NodeId, ProviderId, StallTimeout, Target};
use iop_wire::convert::WireMessage as _;
use iop_wire::limits::{DISPATCH_ACK_TIMEOUT, MAX_LIST, MAX_TARGETS, MIN_DISPATCH_ACK_TIMEOUT};
use iop_wire::{NodeConfigPayload, ProviderConfig, RegisterResponse, Registered, ToNode, WorkloadIdentity};

use crate::token::{TokenId, TokenSecrets};

pub(crate) mod credentials;

pub use iop_credential_lease::{
    InvalidCredential, IssuerKey, KeyFileError, PrincipalName, ProfileName, ProviderCredential, RouteName, SlotName,
    SlotStatus,
};

pub use credentials::{
    CredentialError, CredentialForm, CredentialProfile, CredentialRoute, CredentialSlot, CredentialSource, Credentials,
    Issuer, Scope, SlotSecret,
};

pub use iop_wire::limits::DEFAULT_CAPACITY;
/// Most requests that wait for one model, by default.
pub const DEFAULT_MAX_WAITING: usize = 1024;
/// How long a request waits for a place, by default.
pub const DEFAULT_QUEUE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a suspect may leave a ping unanswered before its uncommitted requests are withdrawn, by default (FEN-7).
pub const DEFAULT_SUSPICION_WITHDRAW: Duration = Duration::from_secs(10);
/// The least it may be.
pub const MIN_SUSPICION_WITHDRAW: Duration = Duration::from_secs(3);

/// One configured Node.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeEntry {
    /// Its id.
    pub id: NodeId,
    /// Public part of its token; with it the record is found without comparing hashes.
    pub token_id: Option<TokenId>,
    /// Which secrets of its token are accepted; `None` = none is, so that it can't register.
    pub token: Option<TokenSecrets>,
    /// Workload identities that are this Node: a peer that shows one of them proves itself by this record's token, and by no
    /// other (REG-6). Empty: whoever shows an identity is not this Node.
    pub identities: Vec<WorkloadIdentity>,
    /// False: known, but it may not register.
    pub enabled: bool,
    /// Its providers.
    pub providers: Vec<ProviderEntry>,
}

impl NodeEntry {
    /// An enabled Node.
    #[must_use]
    pub fn new(
        id: NodeId,
        token_id: impl Into<Option<TokenId>>,
        token: impl Into<TokenSecrets>,
        providers: Vec<ProviderEntry>,
    ) -> Self {
        let (token_id, token) = (token_id.into(), Some(token.into()));
        Self { id, token_id, token, identities: Vec::new(), enabled: true, providers }
    }

    /// A Node that can't register, because it has no token (any more).
    #[must_use]
    pub const fn without_token(id: NodeId, providers: Vec<ProviderEntry>) -> Self {
        Self { id, token_id: None, token: None, identities: Vec::new(), enabled: true, providers }
    }

    /// With these workload identities; none without this.
    #[must_use]
    pub fn with_identities(mut self, identities: Vec<WorkloadIdentity>) -> Self {
        self.identities = identities;
        self
    }
}

/// One configured provider.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProviderEntry {
    /// What its Node runs.
    pub config: ProviderConfig,
    /// False: known and shown, but never started or chosen.
    pub enabled: bool,
}

impl ProviderEntry {
    /// An enabled provider.
    #[must_use]
    pub const fn new(config: ProviderConfig) -> Self {
        Self { config, enabled: true }
    }
}

/// One way to serve a model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// The provider.
    pub provider: ProviderId,
    /// The model as that provider knows it.
    pub target: Target,
    /// Share of the load, relative to the other candidates; at least 1.
    pub weight: u32,
}

impl Candidate {
    /// A candidate of weight 1.
    #[must_use]
    pub const fn new(provider: ProviderId, target: Target) -> Self {
        Self { provider, target, weight: 1 }
    }

    /// With another weight.
    #[must_use]
    pub const fn with_weight(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }
}

closed! {
    /// How a model's free candidates are ranked (SEL-1). Avoidance, suspicion and cooling come first, whatever this says.
    Strategy {
        /// Lowest load relative to places and weight; recent failures count as load.
        LeastLoaded = "least_loaded",
        /// In turn, by weight.
        RoundRobin = "round_robin",
        /// The first of the list that has a place: later ones are spares.
        Ordered = "ordered",
        /// The candidate that had the same leading prompt text of the same caller before, while it is not much busier than
        /// the others.
        PrefixAffinity = "prefix_affinity",
    }
}

closed! {
    /// A failure before commit that a model's requests may be sent again for (REC-5). A confirmed stall always is one and is
    /// not named here; `credential_rejected` and `invalid_request` never are.
    RetryCause {
        /// The Node's gate was full.
        Busy = "busy",
        /// The Node takes no new work.
        Draining = "draining",
        /// The connection to the Node ended.
        Disconnected = "disconnected",
        /// The Node could not reach its provider, or the connection broke.
        ProviderUnreachable = "provider_unreachable",
        /// The Node stopped answering.
        NodeSuspect = "node_suspect",
        /// The Node never confirmed that it has the request.
        DispatchUnacknowledged = "dispatch_unacknowledged",
        /// The provider answered 429.
        Http429 = "http_429",
        /// The provider answered 502.
        Http502 = "http_502",
        /// The provider answered 503.
        Http503 = "http_503",
        /// The provider answered 504.
        Http504 = "http_504",
    }
}

/// A set of [`RetryCause`]s. The default is the first six.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryOn(u16);

impl RetryOn {
    /// None: only confirmed stalls are covered.
    pub const NONE: Self = Self(0);

    /// These.
    #[must_use]
    pub fn of(causes: &[RetryCause]) -> Self {
        Self(causes.iter().fold(0, |set, cause| set | 1 << *cause as u16))
    }

    /// True if this cause is among them.
    #[must_use]
    pub const fn contains(self, cause: RetryCause) -> bool {
        self.0 & (1 << cause as u16) != 0
    }
}

impl Default for RetryOn {
    fn default() -> Self {
        use RetryCause::{Busy, Disconnected, DispatchUnacknowledged, Draining, NodeSuspect, ProviderUnreachable};
        Self::of(&[Busy, Draining, Disconnected, ProviderUnreachable, NodeSuspect, DispatchUnacknowledged])
    }
}

/// One public model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelGroup {
    /// Its name.
    pub name: ModelName,
    /// Other names of it.
    pub aliases: Vec<ModelName>,
    /// How it can be served.
    pub candidates: Vec<Candidate>,
    /// Most requests that wait for it.
    pub max_waiting: usize,
    /// How long a request waits for a place.
    pub queue_timeout: Duration,
    /// Estimated prompt tokens from which a request is `long` (LEA-2); none = never.
    pub long_context_threshold: Option<u32>,
    /// How a candidate is chosen; none = by the engine's own policy, [`Strategy::LeastLoaded`] unless the embedder brings
    /// another.
    pub strategy: Option<Strategy>,
    /// How long a request waits for a configured provider that is absent (FEN-3); zero = not at all.
    pub absence_grace: Duration,
    /// Failures before commit that its requests are sent again for; none = those of the catalog (REC-5).
    pub retry_on: Option<RetryOn>,
}

impl ModelGroup {
    /// A model with the given queue bounds, no aliases and no threshold.
    #[must_use]
    pub const fn new(name: ModelName, candidates: Vec<Candidate>, queue: QueueDefaults) -> Self {
        Self {
            name,
            aliases: Vec::new(),
            candidates,
            max_waiting: queue.max_waiting,
            queue_timeout: queue.timeout,
            long_context_threshold: None,
            strategy: None,
            absence_grace: Duration::ZERO,
            retry_on: None,
        }
    }
}

/// Queue bounds of models that name none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "two settings of one section of the config")]
pub struct QueueDefaults {
    /// Most requests that wait for one model.
    pub max_waiting: usize,
    /// How long a request waits for a place.
    pub timeout: Duration,
}

impl Default for QueueDefaults {
    fn default() -> Self {
        Self { max_waiting: DEFAULT_MAX_WAITING, timeout: DEFAULT_QUEUE_TIMEOUT }
    }
}

/// What is wrong with a catalog.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// Two Nodes have one id.
    #[error("node {0} is configured twice")]
    DuplicateNode(NodeId),
    /// Two Nodes have one workload identity.
    #[error("node {node} has the workload identity {identity} of another node")]
    DuplicateIdentity {
        /// The Node.
        node: NodeId,
        /// The identity.
        identity: Box<WorkloadIdentity>,
    },
    /// Nodes must show a workload identity, and one can't.
    #[error("node {0} needs a workload identity, because every node must show one")]
    NoIdentity(NodeId),
    /// Two Nodes have one token.
    #[error("node {0} has the token id of another node")]
    DuplicateToken(NodeId),
    /// Two providers have one id. Provider ids are unique over all Nodes.
    #[error("provider {0} is configured twice")]
    DuplicateProvider(ProviderId),
    /// Two providers of one Node have one adapter key.
    #[error("node {node} has the adapter key {adapter} twice")]
    DuplicateAdapter {
        /// The Node.
        node: NodeId,
        /// The key.
        adapter: AdapterKey,
    },
    /// More enabled providers than a Node can be told.
    #[error("node {0} has more than {MAX_LIST} enabled providers")]
    TooManyProviders(NodeId),
    /// More targets than a Node can be told.
    #[error("provider {0} has more than {MAX_TARGETS} targets")]
    TooManyTargets(ProviderId),
    /// The Node would refuse its config for another reason: a text is too long, or all of it together is.
    #[error("node {node} would refuse its config: {problem}")]
    NodeConfig {
        /// The Node.
        node: NodeId,
        /// What is wrong; it names a part of the config.
        problem: &'static str,
    },
    /// Two models have one name or alias.
    #[error("the model name {0} is used twice")]
    DuplicateModel(ModelName),
    /// A model has no candidate.
    #[error("model {0} has no candidate")]
    NoCandidates(ModelName),
    /// A candidate names a provider that is not configured.
    #[error("model {model} names the unknown provider {provider}")]
    UnknownProvider {
        /// The model.
        model: ModelName,
        /// The provider.
        provider: ProviderId,
    },
    /// A candidate is listed twice.
    #[error("model {model} lists provider {provider} twice with one target")]
    DuplicateCandidate {
        /// The model.
        model: ModelName,
        /// The provider.
        provider: ProviderId,
    },
    /// A weight is 0.
    #[error("model {model}: the weight of provider {provider} is 0")]
    ZeroWeight {
        /// The model.
        model: ModelName,
        /// The provider.
        provider: ProviderId,
    },
    /// A queue timeout is 0.
    #[error("model {0}: the queue timeout is 0")]
    ZeroQueueTimeout(ModelName),
    /// More places for long requests than places.
    #[error("provider {0}: long_capacity is larger than capacity")]
    LongCapacity(ProviderId),
    /// A time of silence after which suspects lose their requests that is too short to tell (FEN-7).
    #[error("suspicion_withdraw must be off or at least {} ms", MIN_SUSPICION_WITHDRAW.as_millis())]
    SuspicionWithdraw,
    /// A time for receipts that is too short to tell (WIR-14).
    #[error("dispatch_ack_timeout must be at least {} ms", MIN_DISPATCH_ACK_TIMEOUT.as_millis())]
    DispatchAckTimeout,
    /// The credentials, or a provider that is to use them.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// A stall timeout out of range.
    #[error("provider {provider}: {source}")]
    StallTimeout {
        /// The provider.
        provider: ProviderId,
        /// What is wrong.
        source: iop_execution::request::IllegalStallTimeout,
    },
}

/// Everything that is configured.
#[derive(Debug, Clone)]
pub struct Catalog {
    revision: u64,
    created: u64,
    nodes: Vec<NodeEntry>,
    models: Vec<ModelGroup>,
    models_auto: bool,
    auto_strategy: Option<Strategy>,
    queue: QueueDefaults,
    suspicion_withdraw: Option<Duration>,
    dispatch_ack_timeout: Duration,
    retry_on: RetryOn,
    credentials: Arc<Credentials>,
    identity_required: bool,
}

impl Catalog {
    /// An empty catalog to fill.
    pub fn builder() -> CatalogBuilder {
        CatalogBuilder {
            catalog: Self {
                revision: 1,
                created: 0,
                nodes: Vec::new(),
                models: Vec::new(),
                models_auto: false,
                auto_strategy: None,
                queue: QueueDefaults::default(),
                suspicion_withdraw: Some(DEFAULT_SUSPICION_WITHDRAW),
                dispatch_ack_timeout: DISPATCH_ACK_TIMEOUT,
                retry_on: RetryOn::default(),
                credentials: Arc::default(),
                identity_required: false,
            },
        }
    }

    /// Counts versions of the config.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        self.revision
    }

    /// When the config was made, in Unix seconds: `created` of its models.
    #[must_use]
    pub const fn created(&self) -> u64 {
        self.created
    }

    /// The Nodes, in config order.
    #[must_use]
    pub fn nodes(&self) -> &[NodeEntry] {
        &self.nodes
    }

    /// A Node by id.
    #[must_use]
    pub fn node(&self, id: &NodeId) -> Option<&NodeEntry> {
        self.nodes.iter().find(|node| node.id == *id)
    }

    /// The explicit models, in config order.
    #[must_use]
    pub fn models(&self) -> &[ModelGroup] {
        &self.models
    }

    /// Every target that a ready provider lists becomes a model (CFG-3).
    #[must_use]
    pub const fn models_auto(&self) -> bool {
        self.models_auto
    }

    /// How a candidate of a model that comes from `models_auto` is chosen; none = by the engine's own policy.
    #[must_use]
    pub const fn auto_strategy(&self) -> Option<Strategy> {
        self.auto_strategy
    }

    /// Queue bounds of models that name none.
    #[must_use]
    pub const fn queue(&self) -> QueueDefaults {
        self.queue
    }

    /// How long a suspect may leave a ping unanswered before its uncommitted requests are withdrawn; none = for ever (FEN-7).
    #[must_use]
    pub const fn suspicion_withdraw(&self) -> Option<Duration> {
        self.suspicion_withdraw
    }

    /// Time the receipt of a dispatch may take before its Node is asked (WIR-14).
    #[must_use]
    pub const fn dispatch_ack_timeout(&self) -> Duration {
        self.dispatch_ack_timeout
    }

    /// Failures before commit that requests are sent again for, where their model says nothing (REC-5).
    #[must_use]
    pub const fn retry_on(&self) -> RetryOn {
        self.retry_on
    }

    /// What leases may be issued of.
    #[must_use]
    pub const fn credentials(&self) -> &Arc<Credentials> {
        &self.credentials
    }

    /// True if a provider of this Node needs credential leases.
    #[must_use]
    pub fn is_managed(node: &NodeEntry) -> bool {
        node.providers.iter().any(|entry| entry.enabled && entry.config.credential.is_some())
    }

    /// A Node without a verified workload identity is refused, and one that loses it gets no more work (CRD-10).
    #[must_use]
    pub const fn identity_required(&self) -> bool {
        self.identity_required
    }

    /// What a Node shall run: its enabled providers.
    #[must_use]
    pub fn node_config(&self, node: &NodeEntry) -> NodeConfigPayload {
        let providers = node.providers.iter().filter(|entry| entry.enabled);
        NodeConfigPayload { revision: self.revision, providers: providers.map(|entry| entry.config.clone()).collect() }
    }
}

/// Collects a catalog; [`build`](Self::build) checks it as a whole.
#[derive(Debug, Clone)]
#[must_use]
pub struct CatalogBuilder {
    catalog: Catalog,
}

impl CatalogBuilder {
    /// Version of the config; 1 by default.
    pub const fn revision(mut self, revision: u64) -> Self {
        self.catalog.revision = revision;
        self
    }

    /// When the config was made, in Unix seconds; 0 by default.
    pub const fn created(mut self, seconds: u64) -> Self {
        self.catalog.created = seconds;
        self
    }

    /// Adds a Node.
    pub fn node(mut self, node: NodeEntry) -> Self {
        self.catalog.nodes.push(node);
        self
    }

    /// Adds a model.
    pub fn model(mut self, model: ModelGroup) -> Self {
        self.catalog.models.push(model);
        self
    }

    /// Publishes what ready providers list; off by default.
    pub const fn models_auto(mut self, on: bool) -> Self {
        self.catalog.models_auto = on;
        self
    }

    /// How a candidate of a model that comes from `models_auto` is chosen; by the engine's own policy by default.
    pub const fn auto_strategy(mut self, strategy: Option<Strategy>) -> Self {
        self.catalog.auto_strategy = strategy;
        self
    }

    /// Queue bounds of models that come from `models_auto`.
    pub const fn queue(mut self, queue: QueueDefaults) -> Self {
        self.catalog.queue = queue;
        self
    }

    /// How long a suspect may leave a ping unanswered before its uncommitted requests are withdrawn; none = for ever. 10 s by
    /// default, 3 s at least (FEN-7).
    pub const fn suspicion_withdraw(mut self, after: Option<Duration>) -> Self {
        self.catalog.suspicion_withdraw = after;
        self
    }

    /// Time the receipt of a dispatch may take before its Node is asked: 2 s by default, 250 ms at least (WIR-14).
    pub const fn dispatch_ack_timeout(mut self, timeout: Duration) -> Self {
        self.catalog.dispatch_ack_timeout = timeout;
        self
    }

    /// Failures before commit that requests are sent again for, where their model says nothing (REC-5).
    pub const fn retry_on(mut self, causes: RetryOn) -> Self {
        self.catalog.retry_on = causes;
        self
    }

    /// What leases may be issued of; nothing by default (CRD-11).
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.catalog.credentials = Arc::new(credentials);
        self
    }

    /// Nodes must show a workload identity that their certificate proves; off by default. Managed credentials need it
    /// (CRD-10).
    pub const fn require_identity(mut self, required: bool) -> Self {
        self.catalog.identity_required = required;
        self
    }

    /// Checks everything.
    ///
    /// # Errors
    /// [`CatalogError`] names the first thing that is wrong.
    pub fn build(self) -> Result<Catalog, CatalogError> {
        if self.catalog.suspicion_withdraw.is_some_and(|after| after < MIN_SUSPICION_WITHDRAW) {
            return Err(CatalogError::SuspicionWithdraw);
        }
        if self.catalog.dispatch_ack_timeout < MIN_DISPATCH_ACK_TIMEOUT {
            return Err(CatalogError::DispatchAckTimeout);
        }
        let providers = check_nodes(&self.catalog.nodes)?;
        check_identities(&self.catalog)?;
        check_models(&self.catalog.models, &providers)?;
        check_credentials(&self.catalog)?;
        self.catalog.nodes.iter().try_for_each(|node| check_config(&self.catalog, node))?;
        Ok(self.catalog)
    }
}

fn check_nodes(nodes: &[NodeEntry]) -> Result<BTreeSet<&ProviderId>, CatalogError> {
    let (mut ids, mut tokens, mut providers) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for node in nodes {
        if !ids.insert(&node.id) {
            return Err(CatalogError::DuplicateNode(node.id.clone()));
        }
        if node.token_id.as_ref().is_some_and(|id| !tokens.insert(id)) {
            return Err(CatalogError::DuplicateToken(node.id.clone()));
        }
        let mut adapters = BTreeSet::new();
        for config in node.providers.iter().map(|entry| &entry.config) {
            if !providers.insert(&config.provider_id) {
                return Err(CatalogError::DuplicateProvider(config.provider_id.clone()));
            }
            if !adapters.insert(&config.adapter) {
                let (node, adapter) = (node.id.clone(), config.adapter.clone());
                return Err(CatalogError::DuplicateAdapter { node, adapter });
            }
            if config.capacity != 0 && config.long_capacity > config.capacity {
                return Err(CatalogError::LongCapacity(config.provider_id.clone()));
            }
            if let Err(source) = StallTimeout::from_ms(config.response_stall_timeout_ms) {
                return Err(CatalogError::StallTimeout { provider: config.provider_id.clone(), source });
            }
        }
    }
    Ok(providers)
}

/// Every provider that needs leases can have them, and every name they are bound to can be bound (CRD-15).
fn check_credentials(catalog: &Catalog) -> Result<(), CredentialError> {
    catalog.credentials.check()?;
    for node in &catalog.nodes {
        for config in node.providers.iter().map(|entry| &entry.config) {
            catalog.credentials.check_provider(config)?;
            if config.credential.is_none() {
                continue;
            }
            let unbindable = |field| Err(CredentialError::Unbindable { provider: config.provider_id.clone(), field });
            if node.enabled && node.identities.is_empty() {
                return Err(CredentialError::NoIdentity(config.provider_id.clone()));
            }
            if NodeName::new(node.id.as_str()).is_err() {
                return unbindable(BindingField::Node);
            }
            let candidates = catalog.models.iter().flat_map(|model| &model.candidates);
            let own = candidates.filter(|candidate| candidate.provider == config.provider_id);
            let mut targets = own.map(|candidate| &candidate.target).chain(&config.targets);
            if targets.any(|target| TargetName::new(target.as_str()).is_err()) {
                return unbindable(BindingField::Target);
            }
        }
    }
    Ok(())
}

/// An identity of two Nodes would let one prove itself by the other's token.
fn check_identities(catalog: &Catalog) -> Result<(), CatalogError> {
    let mut seen = BTreeSet::new();
    for node in &catalog.nodes {
        if catalog.identity_required && node.identities.is_empty() {
            return Err(CatalogError::NoIdentity(node.id.clone()));
        }
        for identity in &node.identities {
            if !seen.insert(identity) {
                let identity = Box::new(identity.clone());
                return Err(CatalogError::DuplicateIdentity { node: node.id.clone(), identity });
            }
        }
    }
    Ok(())
}

/// A config that can't be sent, or that the Node can't take, would end each of its connections (WIR-8).
fn check_config(catalog: &Catalog, node: &NodeEntry) -> Result<(), CatalogError> {
    let config = catalog.node_config(node);
    if config.providers.len() > MAX_LIST {
        return Err(CatalogError::TooManyProviders(node.id.clone()));
    }
    if let Some(provider) = config.providers.iter().find(|provider| provider.targets.len() > MAX_TARGETS) {
        return Err(CatalogError::TooManyTargets(provider.provider_id.clone()));
    }
    let trusted_lease_signers = catalog.credentials.signers();
    let outcome = Ok(Registered { node_id: node.id.clone(), config, trusted_lease_signers });
    let message = ToNode::RegisterResponse(RegisterResponse { edge_time_ms: u64::MAX, outcome });
    message.check().map_err(|error| CatalogError::NodeConfig { node: node.id.clone(), problem: error.problem })
}

fn check_models(models: &[ModelGroup], providers: &BTreeSet<&ProviderId>) -> Result<(), CatalogError> {
    let mut names = BTreeSet::new();
    for model in models {
        for name in std::iter::once(&model.name).chain(&model.aliases) {
            if !names.insert(name) {
                return Err(CatalogError::DuplicateModel(name.clone()));
            }
        }
        if model.candidates.is_empty() {
            return Err(CatalogError::NoCandidates(model.name.clone()));
        }
        if model.queue_timeout.is_zero() {
            return Err(CatalogError::ZeroQueueTimeout(model.name.clone()));
        }
        let mut seen = BTreeSet::new();
        for candidate in &model.candidates {
            let (model, provider) = (model.name.clone(), candidate.provider.clone());
            if !providers.contains(&provider) {
                return Err(CatalogError::UnknownProvider { model, provider });
            }
            if !seen.insert((&candidate.provider, &candidate.target)) {
                return Err(CatalogError::DuplicateCandidate { model, provider });
            }
            if candidate.weight == 0 {
                return Err(CatalogError::ZeroWeight { model, provider });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
