//! Decides for which request a credential lease is issued, bound to what, and what Nodes are told of slots and issuers.
//!
//! A route decides which providers a caller has at all: one whose slot no route of the caller allows is none of the model's
//! candidates for it, like one that does not fit the prompt (SEL-2). Everything after that choice refuses the request: a
//! slot that is disabled or revoked, a Node that takes no leases. No other candidate is tried then, whatever there is: what
//! stands in for a refused credential would be a fallback (CRD-5).
//!
//! A slot's new revision is used at once and told to the Nodes a little later ([`REVISION_OVERLAP`]): leases of the one
//! before that are on their way stay good. Whatever takes a slot away is told at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_credential_lease::{
    Binding, NodeName, RecipientPublicKey, RunName, ScopeHash, SlotName, SlotStatus, TargetName,
};
use iop_execution::failure::{BindingField, CredentialReason};
use iop_execution::{AdapterKey, NodeId, Principal, ProviderId, RunId, Target};
use iop_wire::{ConfigUpdate, CredentialState, LeaseSigner, NodeConfigPayload, ToNode};

use crate::api::{Wanted, WireKind};
use crate::catalog::credentials::{Allowed, Denied, field_of};
use crate::catalog::{Catalog, CredentialForm, CredentialSource, Credentials, Issuer, ModelGroup};
use crate::state::EdgeState;
use crate::state::effect::Effect;
use crate::state::fleet::ProviderState;
use crate::state::id::{AttemptId, ConnectionId};
use crate::state::timers::Timer;

/// How long Nodes still take leases of the revision before a slot's present one. Less than the interval of the heartbeat, so
/// that they are told within one (CRD-8).
pub const REVISION_OVERLAP: Duration = Duration::from_secs(20);

/// How many older revisions of a slot Nodes take at once: one that is rotated more often than that loses its oldest early.
const MAX_HELD_REVISIONS: usize = 8;

/// What is known of a request that no credential was issued for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Denial {
    pub(crate) run_id: RunId,
    pub(crate) node: NodeId,
    pub(crate) provider: ProviderId,
    pub(crate) adapter: AdapterKey,
    pub(crate) target: Target,
    pub(crate) wire: WireKind,
    pub(crate) reason: CredentialReason,
}

/// Everything a lease is made of. Holds no secret; its source does.
#[derive(Debug)]
pub(crate) struct LeaseOrder {
    pub(crate) issuer: Arc<dyn Issuer>,
    pub(crate) source: Arc<dyn CredentialSource>,
    pub(crate) form: CredentialForm,
    pub(crate) recipient: RecipientPublicKey,
    /// Random stand-in of the connection's generation.
    pub(crate) generation: u64,
    pub(crate) revision: u64,
    pub(crate) binding: Binding,
    pub(crate) ttl_ms: u64,
}

impl LeaseOrder {
    /// A lease of one would be a lease of the other.
    fn is_like(&self, other: &Self) -> bool {
        self.binding == other.binding
            && self.revision == other.revision
            && self.generation == other.generation
            && self.recipient.id() == other.recipient.id()
            && self.form == other.form
            && self.issuer.public_key() == other.issuer.public_key()
    }

    pub(crate) fn scope_hash(&self) -> ScopeHash {
        self.binding.scope_hash()
    }
}

/// Why a reserved attempt can have no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoOrder {
    /// None may be issued for it.
    Denied(CredentialReason),
    /// It is over, or what it was to be sent to is away or about to change: it must not be sent, with a lease or without.
    Gone,
}

impl From<CredentialReason> for NoOrder {
    fn from(reason: CredentialReason) -> Self {
        Self::Denied(reason)
    }
}

/// What a Node was told of credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Told {
    signers: Vec<LeaseSigner>,
    states: Vec<CredentialState>,
}

/// What of earlier configs still counts.
#[derive(Debug, Default)]
pub(crate) struct Revisions {
    /// Older revisions of slots that their Nodes still take, and until when each; oldest first.
    held: BTreeMap<SlotName, VecDeque<(u64, Instant)>>,
    /// The highest revision there was of each slot: Nodes refuse leases of a lower one, and never forget.
    highest: BTreeMap<SlotName, u64>,
}

impl Revisions {
    pub(crate) fn new(credentials: &Credentials) -> Self {
        let highest = credentials.slots.iter().map(|slot| (slot.name.clone(), slot.revision)).collect();
        Self { held: BTreeMap::new(), highest }
    }

    fn apply(&mut self, credentials: &Credentials, now: Instant) {
        let mut highest = BTreeMap::new();
        for slot in &credentials.slots {
            let before = self.highest.get(&slot.name).copied();
            let enabled = slot.status == SlotStatus::Enabled;
            if let Some(before) = before.filter(|before| enabled && *before < slot.revision) {
                // Each has its own time, so that no row of rotations keeps an old one good (CRD-8).
                let held = self.held.entry(slot.name.clone()).or_default();
                held.push_back((before, now + REVISION_OVERLAP));
                if held.len() > MAX_HELD_REVISIONS {
                    held.pop_front();
                }
            } else if !enabled {
                self.held.remove(&slot.name);
            }
            highest.insert(slot.name.clone(), before.unwrap_or(0).max(slot.revision));
        }
        self.held.retain(|slot, _| highest.contains_key(slot));
        self.highest = highest;
    }

    fn due(&self) -> Option<Instant> {
        self.held.values().filter_map(|held| Some(held.front()?.1)).min()
    }

    fn settle(&mut self, now: Instant) {
        self.held.retain(|_, held| {
            held.retain(|(_, until)| *until > now);
            !held.is_empty()
        });
    }

    /// The oldest revision that Nodes take.
    fn least(&self, slot: &SlotName, revision: u64) -> u64 {
        self.held.get(slot).and_then(VecDeque::front).map_or(revision, |(oldest, _)| *oldest)
    }

    fn is_stale(&self, slot: &SlotName, revision: u64) -> bool {
        self.highest.get(slot).is_some_and(|highest| *highest > revision)
    }
}

const fn mismatch(field: BindingField) -> CredentialReason {
    CredentialReason::BindingMismatch(field)
}

impl EdgeState {
    /// Whether this caller may use what a provider needs for a model. `None`: it needs nothing.
    fn allowed(
        &self,
        provider: &ProviderState,
        caller: Option<&Principal>,
        model: &str,
    ) -> Option<Result<Allowed<'_>, Denied>> {
        let wanted = provider.config.credential.as_ref()?;
        Some(self.catalog.credentials().allow(caller, model, &wanted.slot, &wanted.profile))
    }

    /// Candidates of a model that no route lets this caller use, sorted.
    pub(super) fn barred(&self, model: &ModelGroup, caller: Option<&Principal>) -> Vec<ProviderId> {
        let mut barred: Vec<_> = model
            .candidates
            .iter()
            .filter_map(|candidate| {
                let provider = self.fleet.provider(&candidate.provider)?;
                let denied = self.allowed(provider, caller, model.name.as_str())?.err()?;
                matches!(denied, Denied::Barred(_)).then(|| candidate.provider.clone())
            })
            .collect();
        barred.sort_unstable();
        barred.dedup();
        barred
    }

    /// Why no candidate of a model can be used by this caller, if none can: known before it waits for one.
    pub(super) fn deny_model(
        &self,
        model: &ModelGroup,
        run_id: RunId,
        caller: Option<&Principal>,
        wanted: Option<Wanted>,
    ) -> Option<Denial> {
        let mut denial: Option<(Denied, Denial)> = None;
        for candidate in &model.candidates {
            let provider = self.fleet.provider(&candidate.provider)?;
            // One that needs nothing, or may be used, is a candidate.
            let denied = self.allowed(provider, caller, model.name.as_str())?.err()?;
            let refused = matches!(denied, Denied::Refused(_));
            if denial.as_ref().is_none_or(|(first, _)| refused && matches!(first, Denied::Barred(_))) {
                denial = Some((denied, denial_of(provider, candidate.target.clone(), run_id, wanted, denied)));
            }
        }
        denial.map(|(_, denial)| denial)
    }

    /// The same for one provider that is addressed directly, whose model is its target.
    pub(super) fn deny_direct(
        &self,
        provider: &ProviderState,
        target: &Target,
        run_id: RunId,
        caller: Option<&Principal>,
        wanted: Option<Wanted>,
    ) -> Option<Denial> {
        let denied = self.allowed(provider, caller, target.as_str())?.err()?;
        Some(denial_of(provider, target.clone(), run_id, wanted, denied))
    }

    /// What the lease of a reserved attempt is to be made of; `None` if its provider needs none. The order of CRD-15; the
    /// first that fails is the answer.
    ///
    /// The provider's part is what its Node has in force: that is what the Node compares with.
    pub(crate) fn lease_order(&self, attempt: AttemptId) -> Result<Option<LeaseOrder>, NoOrder> {
        let entry = self.attempts.get(&attempt).ok_or(NoOrder::Gone)?;
        let lease = self.ledger.lease(attempt).ok_or(NoOrder::Gone)?;
        let online = self.fleet.provider(&lease.provider).and_then(|provider| provider.online.as_ref());
        // While its Node may have another config than it is given, nobody knows which credential it would ask for.
        let online = online.filter(|online| online.generation == lease.generation && online.settled);
        let online = online.ok_or(NoOrder::Gone)?;
        let Some(bound) = online.bound.clone().map_err(|field| mismatch(field_of(field)))? else {
            return Ok(None);
        };
        let credentials = self.catalog.credentials();
        let model = entry.wants.model.as_ref().map_or(lease.target.as_str(), |model| model.as_str());
        let (slot, profile) = (bound.slot.as_str(), bound.profile.as_str());
        let allowed = credentials.allow(entry.wants.caller.as_ref(), model, slot, profile);
        let Allowed { principal, route, slot, form } = allowed.map_err(Denied::reason)?;
        let issuer = credentials.issuer.clone().ok_or(CredentialReason::UnknownIssuer)?;
        let name = |error: iop_credential_lease::InvalidBinding| mismatch(field_of(error.field));
        let target = TargetName::new(lease.target.as_str()).map_err(name)?;
        let node = NodeName::new(lease.node.as_str()).map_err(name)?;
        let run = RunName::new(entry.run_id.to_string()).map_err(name)?;
        if self.revisions.is_stale(&slot.name, slot.revision) {
            return Err(CredentialReason::StaleRevision.into());
        }
        let connection = self.registry.dispatchable(&lease.node, lease.generation);
        let Some((id, (recipient, generation))) = connection.and_then(|id| Some((id, self.registry.recipient(id)?)))
        else {
            return Err(NoOrder::Gone);
        };
        // Who has not proved which Node it is gets no key of it (CRD-10).
        if self.verified_identity(id).is_none() {
            return Err(mismatch(BindingField::Node).into());
        }
        let recipient = recipient.cloned().ok_or(CredentialReason::WrongRecipient)?;
        let binding = Binding {
            principal,
            route: route.name.clone(),
            slot: bound.slot,
            profile: bound.profile,
            target,
            node,
            upstream: bound.upstream,
            run,
        };
        Ok(Some(LeaseOrder {
            issuer,
            source: Arc::clone(&slot.source),
            form: form.clone(),
            recipient,
            generation,
            revision: slot.revision,
            binding,
            ttl_ms: credentials.ttl_ms,
        }))
    }

    /// Whether a lease that was issued meanwhile is still what this attempt needs: asked in one step with sending it.
    pub(crate) fn lease_fits(&self, attempt: AttemptId, issued: Option<&LeaseOrder>) -> Result<bool, NoOrder> {
        Ok(match (self.lease_order(attempt)?, issued) {
            (Some(now), Some(issued)) => now.is_like(issued),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        })
    }

    /// A new config is in force at this Edge.
    pub(super) fn credentials_applied(&mut self, catalog: &Catalog, now: Instant) {
        self.revisions.apply(catalog.credentials(), now);
        match self.revisions.due() {
            Some(due) => self.timers.arm(Timer::Revisions, due),
            None => self.timers.disarm(Timer::Revisions),
        }
    }

    /// Nodes take no lease of an older revision any more.
    pub(super) fn revisions_due(&mut self, now: Instant) {
        self.revisions.settle(now);
        if let Some(due) = self.revisions.due() {
            self.timers.arm(Timer::Revisions, due);
        }
        for connection in self.registry.ids() {
            self.push_credentials(connection);
        }
    }

    /// Whose leases a Node takes, and where the slots stand that it may get leases of. `None`: it takes none.
    pub(super) fn credential_news(&mut self, connection: ConnectionId) -> Option<Told> {
        self.registry.recipient(connection)?.0?;
        let catalog = Arc::clone(&self.catalog);
        let (push, claim) = self.registry.push(connection)?;
        let entry = catalog.node(&claim.node);
        let configured = entry.into_iter().flat_map(|entry| entry.providers.iter().map(|entry| &entry.config));
        let sent = [Some(&claim.in_force), push.latest()].into_iter().flatten();
        let sent = sent.flat_map(|config: &Arc<NodeConfigPayload>| &config.providers);
        let slots: std::collections::BTreeSet<_> =
            configured.chain(sent).filter_map(|config| Some(config.credential.as_ref()?.slot.as_str())).collect();
        let credentials = catalog.credentials();
        let states = slots.into_iter().filter_map(|name| {
            let slot = credentials.slot(name)?;
            let disabled = match slot.status {
                SlotStatus::Enabled => false,
                SlotStatus::Disabled => true,
                // What is not listed is revoked.
                SlotStatus::Revoked => return None,
            };
            let revision = self.revisions.least(&slot.name, slot.revision);
            Some(CredentialState { slot: name.to_owned(), revision, disabled })
        });
        Some(Told { states: states.collect(), signers: credentials.signers() })
    }

    /// Tells a ready Node what is new of credentials, at once and whatever else it is being told (CRD-8).
    pub(super) fn push_credentials(&mut self, connection: ConnectionId) {
        let Some(news) = self.credential_news(connection) else { return };
        if !self.registry.told(connection, &news) {
            return;
        }
        let Told { signers, states } = news;
        let update = ConfigUpdate { config: None, trusted_lease_signers: signers, credential_states: states };
        self.effects.push_back(Effect::Send { connection, message: Box::new(ToNode::ConfigUpdate(update)) });
    }

    /// A config push, with what the Node is to know of credentials.
    pub(super) fn config_update(&mut self, connection: ConnectionId, config: NodeConfigPayload) -> ConfigUpdate {
        let Some(news) = self.credential_news(connection) else { return ConfigUpdate::new(config) };
        let _new = self.registry.told(connection, &news);
        let Told { signers, states } = news;
        ConfigUpdate { config: Some(config), trusted_lease_signers: signers, credential_states: states }
    }
}

fn denial_of(
    provider: &ProviderState,
    target: Target,
    run_id: RunId,
    wanted: Option<Wanted>,
    denied: Denied,
) -> Denial {
    // Whatever it would have been used by: nothing is sent.
    let wire = wanted.map(Wanted::wire).or_else(|| provider.wire(None)).unwrap_or(match provider.config.wire {
        iop_wire::WireMode::Auto => WireKind::Tunnel,
        iop_wire::WireMode::Run => WireKind::Run,
    });
    Denial {
        run_id,
        node: provider.node.clone(),
        provider: provider.config.provider_id.clone(),
        adapter: provider.config.adapter.clone(),
        target,
        wire,
        reason: denied.reason(),
    }
}
