//! Decides what the engine gets of a config: its catalog, its keys, its settings of the OpenAI surface.

use std::sync::Arc;
use std::time::Duration;

use iop_edge_core::catalog::{Candidate, Catalog, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults, Strategy};
use iop_edge_core::openai::{AllowedModels, AllowedOrigins, ApiKeyRecord, ApiKeys, OpenAiConfig, ResponseModel};
use iop_edge_core::rate_limit::KeyLimits;
use iop_edge_core::token::{TokenHash, TokenId, TokenSecrets};
use iop_execution::{AdapterKey, ModelName, NodeId, Principal, ProviderId, Target};
use iop_wire::{CancelPolicy, ProviderConfig, WireMode, WorkloadIdentity, WorkloadRole};

use super::{
    CancelPolicyConfig, KeyLimitsConfig, LoadedEdge, ModelRecord, NodeRecord, PreviousSecret, ProviderCredentialRecord,
    ProviderRecord, QueueConfig, ResponseModelConfig, StrategyConfig, WireConfig,
};
use crate::config::edge::credentials::Secrets;
use crate::config::secret::resolve_hash;
use crate::config::time::Timestamp;
use crate::exit::Failure;

/// A config that passed its check fails here only when a file changed since, or a name is too long.
fn unusable(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("{what}: {error}")).hint("iop-edge check --config edge.yaml")
}

impl QueueConfig {
    /// For the engine.
    #[must_use]
    pub fn defaults(&self) -> QueueDefaults {
        QueueDefaults { max_waiting: self.max_waiting as usize, timeout: Duration::from_millis(self.timeout_ms) }
    }
}

impl ModelRecord {
    /// What of the queue's settings this model has of its own.
    fn queue(&self, queue: &QueueConfig) -> QueueConfig {
        QueueConfig {
            max_waiting: self.max_waiting.unwrap_or(queue.max_waiting),
            timeout_ms: self.queue_timeout_ms.unwrap_or(queue.timeout_ms),
            ..*queue
        }
    }
}

impl From<StrategyConfig> for Strategy {
    fn from(config: StrategyConfig) -> Self {
        match config {
            StrategyConfig::LeastLoaded => Self::LeastLoaded,
            StrategyConfig::RoundRobin => Self::RoundRobin,
            StrategyConfig::Ordered => Self::Ordered,
            StrategyConfig::PrefixAffinity => Self::PrefixAffinity,
        }
    }
}

impl ProviderRecord {
    /// What the Node gets of this provider.
    ///
    /// # Errors
    /// [`Failure`] when a name is invalid.
    pub fn provider_config(&self) -> Result<ProviderConfig, Failure> {
        let bad = |error| unusable("provider", error);
        let targets: Result<_, _> = self.targets.iter().map(Target::new).collect();
        Ok(ProviderConfig {
            provider_id: ProviderId::new(&self.id).map_err(bad)?,
            adapter: AdapterKey::new(self.adapter.as_ref().unwrap_or(&self.id)).map_err(bad)?,
            kind: self.kind.clone(),
            base_url: self.base_url.clone().unwrap_or_default(),
            wire: match self.wire {
                WireConfig::Auto => WireMode::Auto,
                WireConfig::Run => WireMode::Run,
            },
            capacity: self.capacity.unwrap_or(0),
            long_capacity: self.long_capacity.unwrap_or(0),
            targets: targets.map_err(bad)?,
            response_stall_timeout_ms: self.response_stall_timeout_ms,
            first_response_timeout_ms: self.first_response_timeout_ms,
            stall_per_1k_prompt_ms: self.first_response_per_1k_prompt_ms,
            close_grace_ms: self.close_grace_ms,
            probe_timeout_ms: self.probe_timeout_ms,
            terminal_linger_ms: self.terminal_linger_ms,
            cancel_policy: match self.cancel_policy {
                CancelPolicyConfig::Abort => CancelPolicy::Abort,
                CancelPolicyConfig::Drain => CancelPolicy::Drain,
            },
            auth: self.auth.as_ref().map(|auth| auth.bearer.clone()).unwrap_or_default(),
            credential: self.credential.as_ref().map(ProviderCredentialRecord::wire),
        })
    }
}

impl LoadedEdge {
    /// What opens a token, as config says it.
    fn secrets(
        &self,
        hash: &str,
        expires_at: Option<Timestamp>,
        previous: Option<&PreviousSecret>,
    ) -> Result<TokenSecrets, String> {
        let secrets = TokenSecrets::new(resolve_hash(self.base(), hash)?).expiring(expires_at.map(|at| at.0));
        Ok(match previous {
            Some(previous) => secrets.with_previous(resolve_hash(self.base(), &previous.hash)?, previous.expires_at.0),
            None => secrets,
        })
    }

    fn node(&self, node: &NodeRecord) -> Result<NodeEntry, Failure> {
        let bad = |error: &dyn std::fmt::Display| unusable(&format!("node {}", node.id), error);
        let mut providers = Vec::new();
        for provider in &node.providers {
            let mut entry = ProviderEntry::new(provider.provider_config()?);
            entry.enabled = provider.enabled;
            providers.push(entry);
        }
        let token = node.token_hash.as_ref().map(|hash| {
            let (end, previous) = (node.token_expires_at, node.previous_token.as_ref());
            self.secrets(hash, end, previous).map_err(|error| bad(&error))
        });
        let token = token.transpose()?;
        let id = NodeId::new(&node.id).map_err(|error| bad(&error))?;
        let token_id =
            node.token_id.as_ref().map(|id| TokenId::parse(id).ok_or_else(|| bad(&"no token id"))).transpose()?;
        let mut entry = match token {
            Some(token) => NodeEntry::new(id, token_id, token, providers),
            None => NodeEntry::without_token(id, providers),
        };
        entry.enabled = node.enabled;
        let given: Result<Vec<_>, _> = node.identities.iter().map(|text| WorkloadIdentity::parse(text)).collect();
        entry.identities = given.map_err(|error| bad(&error))?;
        if entry.identities.is_empty() {
            // An id that can't stand in an identity has none; where one is required, the check has said so.
            let own = WorkloadIdentity::new(self.config.trust_domain(), WorkloadRole::Node, &node.id);
            entry.identities.extend(own.ok());
        }
        Ok(entry)
    }

    fn group(&self, group: &ModelRecord) -> Result<ModelGroup, Failure> {
        let bad = |error| unusable(&format!("model {}", group.name), error);
        let mut candidates = Vec::new();
        for candidate in &group.candidates {
            let target = Target::new(candidate.target.as_ref().unwrap_or(&group.name)).map_err(bad)?;
            let provider = ProviderId::new(&candidate.provider).map_err(bad)?;
            candidates.push(Candidate::new(provider, target).with_weight(candidate.weight));
        }
        let queue = &self.config.queue;
        let mut model =
            ModelGroup::new(ModelName::new(&group.name).map_err(bad)?, candidates, group.queue(queue).defaults());
        model.aliases = group.aliases.iter().map(ModelName::new).collect::<Result<_, _>>().map_err(bad)?;
        model.long_context_threshold = group.long_context_threshold;
        model.strategy = group.strategy.or(queue.strategy).map(Into::into);
        model.absence_grace = Duration::from_millis(group.absence_grace_ms);
        model.retry_on = group.retry_on.map(|list| list.0);
        Ok(model)
    }

    /// The secrets of its credential slots. What `before` has is not read again unless its slot changed.
    #[must_use]
    pub fn slot_secrets(&self, before: &Secrets) -> Secrets {
        let providers = self.config.nodes.iter().flat_map(|node| &node.providers);
        let used = providers.filter_map(|provider| provider.credential.as_ref());
        self.config.credentials.secrets(self.base(), before, used)
    }

    /// [`catalog_with`](Self::catalog_with) all secrets as they are now.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn catalog(&self, created: u64, revision: u64) -> Result<Catalog, Failure> {
        self.catalog_with(created, revision, &self.slot_secrets(&Secrets::default()))
    }

    /// The engine's catalog. `created` is what `/v1/models` says, in Unix seconds; `revision` counts configs.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn catalog_with(&self, created: u64, revision: u64, secrets: &Secrets) -> Result<Catalog, Failure> {
        let (queue, health, recovery) = (&self.config.queue, &self.config.health, &self.config.recovery);
        let withdraw = health.suspicion_withdraw_ms;
        let mut catalog = Catalog::builder()
            .created(created)
            .revision(revision)
            .queue(queue.defaults())
            .auto_strategy(queue.strategy.map(Into::into))
            .models_auto(self.config.models.is_auto())
            .suspicion_withdraw((withdraw > 0).then(|| Duration::from_millis(withdraw)))
            .dispatch_ack_timeout(Duration::from_millis(health.dispatch_ack_timeout_ms))
            .require_identity(self.config.requires_identity())
            .retry_on(recovery.retry_on.map(|list| list.0).unwrap_or_default());
        let credentials = self.config.credentials.credentials(self.base(), secrets);
        catalog = catalog.credentials(credentials.map_err(|error| unusable("credentials", error))?);
        for node in &self.config.nodes {
            catalog = catalog.node(self.node(node)?);
        }
        for group in self.config.models.groups() {
            catalog = catalog.model(self.group(group)?);
        }
        catalog.build().map_err(|error| unusable("config", error))
    }

    /// What opens the admin API; nothing does without a key in the config.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn admin_key(&self) -> Result<Option<TokenHash>, Failure> {
        let Some(admin) = &self.config.admin else { return Ok(None) };
        resolve_hash(self.base(), &admin.key_hash).map(Some).map_err(|error| unusable("admin key", error))
    }

    /// Who may call.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn api_keys(&self) -> Result<ApiKeys, Failure> {
        let records = &self.config.auth.api_keys;
        if self.config.auth.is_open() {
            return Ok(ApiKeys::open());
        }
        let mut keys = Vec::new();
        for record in records {
            let bad = |error: &dyn std::fmt::Display| unusable(&format!("API key {}", record.id), error);
            let models = if record.models.iter().any(|model| model == "*") {
                AllowedModels::All
            } else {
                let models: Result<_, _> = record.models.iter().map(ModelName::new).collect();
                AllowedModels::Only(models.map_err(|error| bad(&error))?)
            };
            let principal =
                Principal::new(record.principal.as_ref().unwrap_or(&record.id)).map_err(|error| bad(&error))?;
            let secrets = self.secrets(&record.hash, record.expires_at, record.previous.as_ref());
            let secrets = secrets.map_err(|error| bad(&error))?;
            let id = TokenId::parse(&record.id).ok_or_else(|| bad(&"no key id"))?;
            let KeyLimitsConfig { requests_per_minute, tokens_per_minute, concurrent } = record.limits;
            keys.push(
                ApiKeyRecord::new(id, secrets, principal, models)
                    .with_priority(record.priority)
                    .with_max_priority(record.max_priority.unwrap_or(record.priority))
                    .with_limits(KeyLimits::new(requests_per_minute, tokens_per_minute, concurrent)),
            );
        }
        ApiKeys::records(keys).map_err(|error| unusable("API keys", error))
    }

    /// Settings of the OpenAI surface.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn openai(&self) -> Result<OpenAiConfig, Failure> {
        let deadline = Duration::from_millis(self.config.request_deadline_ms);
        let mut openai = OpenAiConfig::default()
            .with_keys(Arc::new(self.api_keys()?))
            .with_response_model(match self.config.response_model {
                ResponseModelConfig::Requested => ResponseModel::Requested,
                ResponseModelConfig::Target => ResponseModel::Target,
            })
            .with_request_deadline(Some(deadline));
        let origins = AllowedOrigins::new(&self.config.cors.allowed_origins);
        openai.cors = origins.map_err(|error| unusable("cors", error))?;
        openai.list_unavailable = self.config.list_unavailable;
        openai.max_extra_attempts = self.config.recovery.max_extra_attempts;
        openai.keepalive_after = Duration::from_millis(self.config.recovery.keepalive_after_ms);
        openai.max_body_bytes = usize::try_from(self.config.limits.request_body_bytes).unwrap_or(usize::MAX);
        Ok(openai)
    }
}
