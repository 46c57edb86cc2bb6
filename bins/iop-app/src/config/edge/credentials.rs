//! Decides what `credentials:` of `edge.yaml` can say, and what the engine gets of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use iop_edge_core::catalog::{
    CredentialForm, CredentialProfile, CredentialRoute, CredentialSlot, Credentials, InvalidCredential, IssuerKey,
    PrincipalName, ProfileName, RouteName, Scope, SlotName, SlotStatus,
};
use iop_execution::ModelName;
use iop_wire::{CredentialUse, LeaseSigner};
use serde::Deserialize;

use crate::config::schema::{Closed, Kind, Object, optional, required};
use crate::config::secret::resolve_path;

mod check;
pub(crate) mod sources;
#[cfg(test)]
pub(crate) mod tests;

pub(super) use check::check;
pub use sources::Secrets;

/// What a lease is valid for, in milliseconds, when the config does not say.
const DEFAULT_TTL_MS: u64 = 60_000;
/// What stands before the hex digits of a public issuer key.
const PUBLIC_KEY: &str = "ed25519:";

static PROFILE_KIND: Closed = Closed {
    words: &["bearer", "header"],
    never: &[("query", "a key in a URL ends up in logs"), ("basic", "a lease carries one header: use kind header")],
};
static SLOT: Object = Object {
    name: "a credential slot",
    fields: &[
        required("name", Kind::Text, "unique; visible ASCII"),
        required(
            "secret",
            Kind::Secret,
            "where the Edge finds it, at the start and when `secret` or `revision` changes: `file:PATH`, `env:NAME`, or `command:PROGRAM ARGS` \
             whose first line of output it is",
        ),
        optional(
            "revision",
            Kind::Integer { min: 1, max: 1 << 53 },
            "counts versions of the secret: raise it when the secret changes; default 1",
        ),
        optional(
            "status",
            Kind::Choice(&["enabled", "disabled", "revoked"]),
            "disabled: nobody may use it for now; revoked: nor ever again; default enabled",
        ),
    ],
};
static PROFILE: Object = Object {
    name: "a credential profile",
    fields: &[
        required("name", Kind::Text, "unique; visible ASCII"),
        required("kind", Kind::Closed(&PROFILE_KIND), "bearer: `authorization: Bearer …`; header: a header of its own"),
        optional("header", Kind::Text, "name of the header in lower case, with kind header and only there"),
    ],
};
static ROUTE: Object = Object {
    name: "a credential route",
    fields: &[
        required("name", Kind::Text, "unique; visible ASCII"),
        required("principals", Kind::List(&Kind::Text), "who; [\"*\"] = every API key"),
        optional("models", Kind::List(&Kind::Text), "for which models, by their own names; default [\"*\"] = all"),
        required("slots", Kind::List(&Kind::Text), "which slots they may use"),
    ],
};
/// The table of `credentials`.
pub(super) static CREDENTIALS: Object = Object {
    name: "credentials",
    fields: &[
        optional("issuer_key", Kind::Text, "file with the Ed25519 key that signs leases, PKCS#8 PEM, mode 0600"),
        optional(
            "previous_issuers",
            Kind::List(&Kind::Text),
            "public keys that Nodes still trust while the issuer key changes: `ed25519:` and 64 hex digits, or \
             `file:PATH` of the old key or of such a line; default none",
        ),
        optional("lease_ttl_ms", Kind::Integer { min: 1000, max: 300_000 }, "how long a lease is valid; default 60000"),
        optional("slots", Kind::List(&Kind::Object(&SLOT)), "keys of providers"),
        optional("slots_file", Kind::Text, "YAML file with more slots, which `iop slot` writes"),
        optional("profiles", Kind::List(&Kind::Object(&PROFILE)), "how a key is put on a request"),
        optional(
            "routes",
            Kind::List(&Kind::Object(&ROUTE)),
            "who may use which slot for which model; the first that fits",
        ),
    ],
};
/// The table of `credentials.slots_file`.
pub(super) static SLOTS_FILE: Object = Object {
    name: "a file of credential slots",
    fields: &[required("slots", Kind::List(&Kind::Object(&SLOT)), "keys of providers")],
};
/// The table of `credential` of a provider.
pub(super) static PROVIDER_CREDENTIAL: Object = Object {
    name: "credential of a provider",
    fields: &[
        required("slot", Kind::Text, "name of a slot under `credentials`"),
        required("profile", Kind::Text, "name of a profile under `credentials`"),
    ],
};

/// What the Edge may issue leases of.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CredentialsConfig {
    /// File with the key that signs.
    pub issuer_key: Option<PathBuf>,
    /// Public keys that are still trusted.
    pub previous_issuers: Vec<String>,
    /// How long a lease is valid, in milliseconds.
    pub lease_ttl_ms: u64,
    /// Keys of providers, those of the file among them.
    pub slots: Vec<SlotRecord>,
    /// File with slots that `iop slot` writes.
    pub slots_file: Option<String>,
    /// How they are put on a request.
    pub profiles: Vec<ProfileRecord>,
    /// Who may use them.
    pub routes: Vec<RouteRecord>,
}

impl Default for CredentialsConfig {
    fn default() -> Self {
        Self {
            issuer_key: None,
            previous_issuers: Vec::new(),
            lease_ttl_ms: DEFAULT_TTL_MS,
            slots: Vec::new(),
            slots_file: None,
            profiles: Vec::new(),
            routes: Vec::new(),
        }
    }
}

/// One key of a provider.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotRecord {
    /// Its name.
    pub name: String,
    /// Where the secret is; never the secret.
    pub secret: String,
    /// Counts versions of the secret.
    #[serde(default = "first")]
    pub revision: u64,
    /// Whether it is used.
    #[serde(default)]
    pub status: SlotStatusConfig,
}

/// Whether a slot is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotStatusConfig {
    /// Yes.
    #[default]
    Enabled,
    /// Not for now.
    Disabled,
    /// Never again.
    Revoked,
}

impl From<SlotStatusConfig> for SlotStatus {
    fn from(status: SlotStatusConfig) -> Self {
        match status {
            SlotStatusConfig::Enabled => Self::Enabled,
            SlotStatusConfig::Disabled => Self::Disabled,
            SlotStatusConfig::Revoked => Self::Revoked,
        }
    }
}

/// How a key is put on a request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileRecord {
    /// Its name.
    pub name: String,
    /// What it does.
    pub kind: ProfileKind,
    /// Name of the header.
    pub header: Option<String>,
}

impl ProfileRecord {
    /// How it puts a key on a request; none when it has no header to put it in.
    #[must_use]
    pub fn form(&self) -> Option<CredentialForm> {
        match (self.kind, &self.header) {
            (ProfileKind::Bearer, _) => Some(CredentialForm::Bearer),
            (ProfileKind::Header, Some(header)) => Some(CredentialForm::Header(header.clone())),
            (ProfileKind::Header, None) => None,
        }
    }
}

/// What a profile does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProfileKind {
    /// `authorization: Bearer …`.
    Bearer,
    /// A header of its own.
    Header,
}

/// Who may use which slots for which models.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteRecord {
    /// Its name.
    pub name: String,
    /// Who; `*` = every API key.
    pub principals: Vec<String>,
    /// For which models; `*` = all.
    #[serde(default = "every")]
    pub models: Vec<String>,
    /// Which slots.
    pub slots: Vec<String>,
}

/// What a provider's calls are made with.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderCredentialRecord {
    /// Name of a slot.
    pub slot: String,
    /// Name of a profile.
    pub profile: String,
}

impl ProviderCredentialRecord {
    pub(super) fn wire(&self) -> CredentialUse {
        CredentialUse { slot: self.slot.clone(), profile: self.profile.clone() }
    }
}

const fn first() -> u64 {
    1
}

fn every() -> Vec<String> {
    vec!["*".to_owned()]
}

/// A public issuer key as config has it.
#[must_use]
pub fn public_key_text(key: &LeaseSigner) -> String {
    use std::fmt::Write as _;
    key.iter().fold(PUBLIC_KEY.to_owned(), |mut text, byte| {
        // Writing to a String never fails.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A public issuer key out of `ed25519:` and 64 hex digits.
#[must_use]
pub fn parse_public_key(text: &str) -> Option<LeaseSigner> {
    let hex = text.strip_prefix(PUBLIC_KEY)?.as_bytes();
    if hex.len() != 64 {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut key = LeaseSigner::default();
    for (byte, pair) in key.iter_mut().zip(hex.chunks_exact(2)) {
        let [high, low] = pair else { return None };
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(key)
}

/// A public issuer key as text, or out of a file that holds that or the whole key.
///
/// # Errors
/// A text for people, without anything of a file.
pub fn resolve_public_key(base: &Path, text: &str) -> Result<LeaseSigner, String> {
    let Some(path) = text.strip_prefix("file:") else {
        return parse_public_key(text).ok_or_else(|| format!("a public key is `{PUBLIC_KEY}` and 64 hex digits"));
    };
    let path = resolve_path(base, path);
    if let Some(key) = crate::config::secret::read_secret(&path)?.lines().next().and_then(parse_public_key) {
        return Ok(key);
    }
    IssuerKey::load(&path).map(|key| key.public_bytes()).map_err(|error| format!("{}: {error}", path.display()))
}

/// Stands for a secret that nobody may use, so that its file may be gone.
#[derive(Debug)]
struct Unused;

impl iop_edge_core::catalog::CredentialSource for Unused {
    fn credential(&self, _: &CredentialForm) -> Result<iop_edge_core::catalog::ProviderCredential, InvalidCredential> {
        Err(InvalidCredential::Length)
    }
}

fn scope<T, E>(names: &[String], make: impl Fn(&String) -> Result<T, E>) -> Result<Scope<T>, E> {
    if names.iter().any(|name| name == "*") {
        return Ok(Scope::All);
    }
    names.iter().map(make).collect::<Result<_, _>>().map(Scope::Only)
}

impl CredentialsConfig {
    /// The secrets of all slots that are enabled, as far as they can be used. Reads those that are not loaded as they are
    /// configured now. `used` is what providers name.
    pub(super) fn secrets<'a>(
        &'a self,
        base: &Path,
        before: &Secrets,
        used: impl Iterator<Item = &'a ProviderCredentialRecord>,
    ) -> Secrets {
        let form = |name: &str| self.profiles.iter().find(|profile| profile.name == name)?.form();
        let uses: Vec<_> =
            used.filter_map(|used| Some((used.slot.as_str(), used.profile.as_str(), form(&used.profile)?))).collect();
        Secrets::load(&self.slots, base, before).fit(&uses)
    }

    /// What the engine gets. Reads the issuer key. A slot whose secret is not loaded is as good as disabled.
    ///
    /// # Errors
    /// A text for people that names a place and holds nothing of what is there.
    pub(super) fn credentials(&self, base: &Path, secrets: &Secrets) -> Result<Credentials, String> {
        let mut credentials = Credentials::default();
        credentials.ttl_ms = self.lease_ttl_ms;
        if let Some(path) = &self.issuer_key {
            let path = base.join(path);
            let key = IssuerKey::load(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            credentials.issuer = Some(Arc::new(key));
        }
        for key in &self.previous_issuers {
            credentials.also_trusted.push(resolve_public_key(base, key)?);
        }
        for record in &self.slots {
            let bad =
                |error: &dyn std::fmt::Display| format!("credential slot {}: {error}", record.name.escape_debug());
            let name = SlotName::new(&record.name).map_err(|error| bad(&error))?;
            let (source, status) = match (record.status, secrets.of(&record.name)) {
                (SlotStatusConfig::Enabled, Some(source)) => (source, SlotStatus::Enabled),
                (SlotStatusConfig::Enabled, None) => (Arc::new(Unused) as _, SlotStatus::Disabled),
                (SlotStatusConfig::Disabled | SlotStatusConfig::Revoked, _) => {
                    (Arc::new(Unused) as _, record.status.into())
                }
            };
            credentials.slots.push(CredentialSlot::new(name, record.revision, source).with_status(status));
        }
        for record in &self.profiles {
            let bad = |error: &dyn std::fmt::Display| format!("profile {}: {error}", record.name.escape_debug());
            let form = record.form().ok_or_else(|| bad(&"kind header needs `header`"))?;
            let name = ProfileName::new(&record.name).map_err(|error| bad(&error))?;
            credentials.profiles.push(CredentialProfile::new(name, form));
        }
        for record in &self.routes {
            let bad = |error: &dyn std::fmt::Display| format!("route {}: {error}", record.name.escape_debug());
            credentials.routes.push(CredentialRoute::new(
                RouteName::new(&record.name).map_err(|error| bad(&error))?,
                scope(&record.principals, |name| PrincipalName::new(name)).map_err(|error| bad(&error))?,
                scope(&record.models, |name| ModelName::new(name)).map_err(|error| bad(&error))?,
                record.slots.iter().map(SlotName::new).collect::<Result<_, _>>().map_err(|error| bad(&error))?,
            ));
        }
        Ok(credentials)
    }
}
