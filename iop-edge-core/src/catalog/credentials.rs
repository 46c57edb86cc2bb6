//! Decides which keys of providers an Edge may lend out: who signs, which credentials there are, how each is applied, and
//! who may use which of them for what (CRD-11).
//!
//! Nothing here prints a secret: a credential is behind [`CredentialSource`], the signing key behind [`Issuer`].

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use iop_credential_lease::lease::{DEFAULT_TTL_MS, MAX_TTL_MS};
use iop_credential_lease::slots::MAX_SLOTS;
use iop_credential_lease::{
    BindingField, Grant, InvalidCredential, IssueError, IssuedLease, IssuerKey, PrincipalName, ProfileName,
    ProviderCredential, RouteName, SlotName, SlotStatus, TrustedIssuers, UntrustedIssuer, UpstreamOrigin,
};
use iop_execution::failure::CredentialReason;
use iop_execution::{ModelName, Principal, ProviderId};
use iop_wire::{CredentialUse, LeaseSigner, ProviderConfig};
use zeroize::Zeroizing;

/// Signs leases. The key may be somewhere else than in this process; what is asked of it must answer at once.
pub trait Issuer: fmt::Debug + Send + Sync + 'static {
    /// The public key, for the Nodes.
    fn public_key(&self) -> LeaseSigner;

    /// Seals a credential to a connection and signs the result. `now_ms` is the Edge's time.
    ///
    /// # Errors
    /// [`IssueError`].
    fn issue(&self, grant: &Grant<'_>, credential: &ProviderCredential, now_ms: u64)
    -> Result<IssuedLease, IssueError>;
}

impl Issuer for IssuerKey {
    fn public_key(&self) -> LeaseSigner {
        self.public_bytes()
    }

    fn issue(
        &self,
        grant: &Grant<'_>,
        credential: &ProviderCredential,
        now_ms: u64,
    ) -> Result<IssuedLease, IssueError> {
        Self::issue(self, grant, credential, now_ms)
    }
}

/// How a credential is put on a request: into a header, never into a query.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the closed list of forms a lease can carry")]
pub enum CredentialForm {
    /// `authorization: Bearer <secret>`.
    Bearer,
    /// The secret as the value of this header, whose name is in lower case.
    Header(String),
}

/// Holds one credential and gives it out in one form only: sealed into a lease.
pub trait CredentialSource: fmt::Debug + Send + Sync + 'static {
    /// The credential, on its way into a lease. What it makes of a form must not change while it is configured.
    ///
    /// # Errors
    /// [`InvalidCredential`] when it can't stand in that form.
    fn credential(&self, form: &CredentialForm) -> Result<ProviderCredential, InvalidCredential>;
}

/// A secret in memory. Zeroed when dropped; can't be copied, compared, printed or serialized.
///
/// ```compile_fail
/// fn copied<T: Clone>() {}
/// copied::<iop_edge_core::catalog::SlotSecret>();
/// ```
pub struct SlotSecret(Zeroizing<Vec<u8>>);

impl SlotSecret {
    /// Takes the secret over.
    #[must_use]
    pub fn new(secret: Vec<u8>) -> Self {
        Self(Zeroizing::new(secret))
    }
}

impl fmt::Debug for SlotSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SlotSecret[redacted]")
    }
}

impl CredentialSource for SlotSecret {
    fn credential(&self, form: &CredentialForm) -> Result<ProviderCredential, InvalidCredential> {
        match form {
            CredentialForm::Bearer => ProviderCredential::bearer(&self.0),
            CredentialForm::Header(name) => ProviderCredential::header(name, &self.0),
        }
    }
}

/// One stored credential.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CredentialSlot {
    /// Its name.
    pub name: SlotName,
    /// Counts versions of its secret, from 1. A higher one replaces the secret; it never goes back.
    pub revision: u64,
    /// Whether it is used.
    pub status: SlotStatus,
    /// The secret.
    pub source: Arc<dyn CredentialSource>,
}

impl CredentialSlot {
    /// An enabled slot.
    #[must_use]
    pub fn new(name: SlotName, revision: u64, source: Arc<dyn CredentialSource>) -> Self {
        Self { name, revision, status: SlotStatus::Enabled, source }
    }

    /// With another status.
    #[must_use]
    pub const fn with_status(mut self, status: SlotStatus) -> Self {
        self.status = status;
        self
    }
}

/// How credentials are applied, under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CredentialProfile {
    /// Its name.
    pub name: ProfileName,
    /// What it does.
    pub form: CredentialForm,
}

impl CredentialProfile {
    /// A profile.
    #[must_use]
    pub const fn new(name: ProfileName, form: CredentialForm) -> Self {
        Self { name, form }
    }
}

/// All of a kind, or these of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "all or some")]
pub enum Scope<T> {
    /// Every one.
    All,
    /// These.
    Only(Vec<T>),
}

impl<T> Scope<T> {
    fn holds(&self, mut is: impl FnMut(&T) -> bool) -> bool {
        match self {
            Self::All => true,
            Self::Only(list) => list.iter().any(&mut is),
        }
    }
}

/// Lets principals use slots for models. What no route allows is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CredentialRoute {
    /// Its name.
    pub name: RouteName,
    /// Who. A request without a principal matches none, not even all.
    pub principals: Scope<PrincipalName>,
    /// Which models, by their own names.
    pub models: Scope<ModelName>,
    /// Which slots.
    pub slots: Vec<SlotName>,
}

impl CredentialRoute {
    /// A route.
    #[must_use]
    pub const fn new(
        name: RouteName,
        principals: Scope<PrincipalName>,
        models: Scope<ModelName>,
        slots: Vec<SlotName>,
    ) -> Self {
        Self { name, principals, models, slots }
    }
}

/// What is wrong with the credentials of a catalog.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// Something needs leases and nobody signs them.
    #[error("provider {0} needs a credential lease, and there is no issuer key")]
    NoIssuer(ProviderId),
    /// The issuers' keys.
    #[error("issuers: {0}")]
    Issuers(UntrustedIssuer),
    /// The same name twice.
    #[error("{0} is configured twice")]
    Duplicate(String),
    /// More slots than a Node keeps the state of.
    #[error("there are more than {MAX_SLOTS} credential slots")]
    TooManySlots,
    /// A revision of 0.
    #[error("slot {0}: the revision is 0; it counts from 1")]
    ZeroRevision(SlotName),
    /// A time that a lease can't be valid.
    #[error("a lease is valid for 1 to {MAX_TTL_MS} ms")]
    Ttl,
    /// A provider names a slot that is not configured.
    #[error("provider {provider} names the unknown credential slot {slot}")]
    UnknownSlot {
        /// The provider.
        provider: ProviderId,
        /// The slot.
        slot: String,
    },
    /// A provider names a profile that is not configured.
    #[error("provider {provider} names the unknown credential profile {profile}")]
    UnknownProfile {
        /// The provider.
        provider: ProviderId,
        /// The profile.
        profile: String,
    },
    /// A slot and a key of the Node's own (CRD-16).
    #[error("provider {0} has both `auth` and a credential slot; it can have one of them")]
    SlotAndAuth(ProviderId),
    /// A Node that could not prove that the lease is for it (CRD-10).
    #[error("provider {0} has a credential slot, and its node has no workload identity")]
    NoIdentity(ProviderId),
    /// Nothing that a lease could be bound to.
    #[error("provider {0} has a credential slot, and no base URL that its lease could be bound to")]
    NoOrigin(ProviderId),
    /// A name that a lease can't hold.
    #[error("provider {provider} has a credential slot: {field} must be 1 to 255 visible ASCII characters")]
    Unbindable {
        /// The provider.
        provider: ProviderId,
        /// Whose name.
        field: BindingField,
    },
    /// A secret that can't stand where its profile puts it.
    #[error("slot {slot} with profile {profile}: {source}")]
    Unusable {
        /// The slot.
        slot: SlotName,
        /// The profile.
        profile: ProfileName,
        /// Why.
        source: InvalidCredential,
    },
    /// A route names a slot that is not configured.
    #[error("route {route} names the unknown credential slot {slot}")]
    UnknownRouteSlot {
        /// The route.
        route: RouteName,
        /// The slot.
        slot: SlotName,
    },
}

/// What an Edge may issue leases of. Empty: it issues none.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Credentials {
    /// Who signs; none = no lease is issued.
    pub issuer: Option<Arc<dyn Issuer>>,
    /// Other issuers whose leases are still, or already, to be taken: while the key changes (CRD-8).
    pub also_trusted: Vec<LeaseSigner>,
    /// The stored credentials.
    pub slots: Vec<CredentialSlot>,
    /// How they are applied.
    pub profiles: Vec<CredentialProfile>,
    /// Who may use them.
    pub routes: Vec<CredentialRoute>,
    /// How long a lease is valid, in milliseconds; 60 000 by default, 300 000 at most (CRD-7).
    pub ttl_ms: u64,
}

impl Default for Credentials {
    fn default() -> Self {
        Self {
            issuer: None,
            also_trusted: Vec::new(),
            slots: Vec::new(),
            profiles: Vec::new(),
            routes: Vec::new(),
            ttl_ms: DEFAULT_TTL_MS,
        }
    }
}

/// What a lease for a provider is bound to by the provider's own config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bound {
    pub(crate) slot: SlotName,
    pub(crate) profile: ProfileName,
    pub(crate) upstream: UpstreamOrigin,
}

impl Bound {
    /// `None` if the provider needs no lease; an error names what of it can't be bound.
    pub(crate) fn of(config: &ProviderConfig) -> Result<Option<Self>, BindingField> {
        let Some(CredentialUse { slot, profile }) = &config.credential else { return Ok(None) };
        let origin = config.origin().ok_or(BindingField::Upstream)?;
        let upstream = UpstreamOrigin::of(&origin.scheme, &origin.host, origin.port);
        Ok(Some(Self {
            slot: SlotName::new(slot).map_err(|error| error.field)?,
            profile: ProfileName::new(profile).map_err(|error| error.field)?,
            upstream: upstream.map_err(|error| error.field)?,
        }))
    }
}

/// Why a caller may not use a slot for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// No route allows it: to this caller the provider is none of the model's candidates.
    Barred(BindingField),
    /// The slot can't be used by anybody: what was chosen is refused, and nothing stands in for it (CRD-5).
    Refused(CredentialReason),
}

impl Denied {
    pub(crate) fn reason(self) -> CredentialReason {
        match self {
            Self::Barred(field) => CredentialReason::BindingMismatch(field_of(field)),
            Self::Refused(reason) => reason,
        }
    }
}

/// The field's name in a failure.
pub(crate) const fn field_of(field: BindingField) -> iop_execution::failure::BindingField {
    use iop_execution::failure::BindingField as Told;
    match field {
        BindingField::Node => Told::Node,
        BindingField::Principal => Told::Principal,
        BindingField::Profile => Told::Profile,
        BindingField::Route => Told::Route,
        BindingField::RunId => Told::RunId,
        BindingField::Slot => Told::Slot,
        BindingField::Target => Told::Target,
        BindingField::Upstream => Told::Upstream,
    }
}

/// Who uses what, by which route.
pub(crate) struct Allowed<'a> {
    pub(crate) principal: PrincipalName,
    pub(crate) route: &'a CredentialRoute,
    pub(crate) slot: &'a CredentialSlot,
    pub(crate) form: &'a CredentialForm,
}

impl Credentials {
    /// A slot by name.
    #[must_use]
    pub fn slot(&self, name: &str) -> Option<&CredentialSlot> {
        self.slots.iter().find(|slot| slot.name.as_str() == name)
    }

    /// A profile by name.
    #[must_use]
    pub fn profile(&self, name: &str) -> Option<&CredentialProfile> {
        self.profiles.iter().find(|profile| profile.name.as_str() == name)
    }

    /// Whose leases the Nodes take: the issuer's first.
    #[must_use]
    pub fn signers(&self) -> Vec<LeaseSigner> {
        let mut signers: Vec<_> = self.issuer.iter().map(|issuer| issuer.public_key()).collect();
        for other in &self.also_trusted {
            if !signers.contains(other) {
                signers.push(*other);
            }
        }
        signers
    }

    /// The first part of CRD-15: principal, route, slot, profile. The first that fails is the answer.
    pub(crate) fn allow(
        &self,
        caller: Option<&Principal>,
        model: &str,
        slot: &str,
        profile: &str,
    ) -> Result<Allowed<'_>, Denied> {
        let principal = caller.and_then(|caller| PrincipalName::new(caller.as_str()).ok());
        let principal = principal.ok_or(Denied::Barred(BindingField::Principal))?;
        let mut matching = self
            .routes
            .iter()
            .filter(|route| route.principals.holds(|allowed| *allowed == principal))
            .filter(|route| route.models.holds(|allowed| allowed.as_str() == model))
            .peekable();
        if matching.peek().is_none() {
            return Err(Denied::Barred(BindingField::Route));
        }
        let route = matching.find(|route| route.slots.iter().any(|allowed| allowed.as_str() == slot));
        let route = route.ok_or(Denied::Barred(BindingField::Slot))?;
        let slot = self.slot(slot).ok_or(Denied::Refused(CredentialReason::Revoked))?;
        match slot.status {
            SlotStatus::Enabled => {}
            SlotStatus::Disabled => return Err(Denied::Refused(CredentialReason::Disabled)),
            SlotStatus::Revoked => return Err(Denied::Refused(CredentialReason::Revoked)),
        }
        let mismatch = Denied::Refused(CredentialReason::BindingMismatch(field_of(BindingField::Profile)));
        let form = &self.profile(profile).ok_or(mismatch)?.form;
        Ok(Allowed { principal, route, slot, form })
    }

    /// Checks what is said here by itself.
    pub(super) fn check(&self) -> Result<(), CredentialError> {
        TrustedIssuers::new(self.signers()).map_err(CredentialError::Issuers)?;
        if self.slots.len() > MAX_SLOTS {
            return Err(CredentialError::TooManySlots);
        }
        if !(1..=MAX_TTL_MS).contains(&self.ttl_ms) {
            return Err(CredentialError::Ttl);
        }
        unique("slot", self.slots.iter().map(|slot| slot.name.as_str()))?;
        unique("profile", self.profiles.iter().map(|profile| profile.name.as_str()))?;
        unique("route", self.routes.iter().map(|route| route.name.as_str()))?;
        if let Some(slot) = self.slots.iter().find(|slot| slot.revision == 0) {
            return Err(CredentialError::ZeroRevision(slot.name.clone()));
        }
        for route in &self.routes {
            if let Some(slot) = route.slots.iter().find(|slot| self.slot(slot.as_str()).is_none()) {
                return Err(CredentialError::UnknownRouteSlot { route: route.name.clone(), slot: slot.clone() });
            }
        }
        Ok(())
    }

    /// Checks that a provider's leases can be made. Models bring the targets.
    pub(super) fn check_provider(&self, config: &ProviderConfig) -> Result<(), CredentialError> {
        let provider = || config.provider_id.clone();
        let Some(CredentialUse { slot, profile }) = &config.credential else { return Ok(()) };
        if !config.auth.is_empty() {
            return Err(CredentialError::SlotAndAuth(provider()));
        }
        if self.issuer.is_none() {
            return Err(CredentialError::NoIssuer(provider()));
        }
        let known = self.slot(slot);
        let known = known.ok_or_else(|| CredentialError::UnknownSlot { provider: provider(), slot: slot.clone() })?;
        let applied = self.profile(profile);
        let applied = applied
            .ok_or_else(|| CredentialError::UnknownProfile { provider: provider(), profile: profile.clone() })?;
        Bound::of(config).map_err(|field| match field {
            BindingField::Upstream => CredentialError::NoOrigin(provider()),
            field => CredentialError::Unbindable { provider: provider(), field },
        })?;
        // A secret that nobody may use is not looked at.
        if known.status == SlotStatus::Enabled
            && let Err(source) = known.source.credential(&applied.form)
        {
            let (slot, profile) = (known.name.clone(), applied.name.clone());
            return Err(CredentialError::Unusable { slot, profile, source });
        }
        Ok(())
    }
}

fn unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<(), CredentialError> {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(CredentialError::Duplicate(format!("credential {what} {name}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
