//! Decides who a caller is and which models it may use.
//!
//! A key reads `iopk_<8 characters>_<43 characters>`: a public id to look up by, and a secret of 256 random bits. Only the
//! secret's SHA-256 is kept, and it is compared in constant time, against a dummy when the id is unknown.

use std::collections::HashMap;
use std::fmt;
use std::hint::black_box;
use std::str::FromStr;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use iop_execution::{ModelName, Principal};
use ring::digest::{SHA256, digest};

use super::config::MAX_KEY_BYTES;

const PREFIX: &str = "iopk_";
const ID_CHARS: usize = 8;
const SECRET_CHARS: usize = 43;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// SHA-256 of the secret part of a key. Written `sha256:<64 hex digits>`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// The hash of a secret.
    #[must_use]
    pub fn of(secret: &str) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, secret.as_bytes()).as_ref());
        Self(bytes)
    }

    /// Takes the same time whatever the bytes are.
    fn equals(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(&other.0).fold(0, |sum, (a, b)| black_box(sum | (a ^ b)));
        black_box(difference) == 0
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash[redacted]")
    }
}

impl FromStr for KeyHash {
    type Err = InvalidApiKey;

    fn from_str(text: &str) -> Result<Self, InvalidApiKey> {
        let hex = text.strip_prefix("sha256:").filter(|hex| hex.len() == 64).ok_or(InvalidApiKey::Hash)?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(pair).ok().filter(|d| d.bytes().all(|d| d.is_ascii_hexdigit()));
            *byte = digits.and_then(|d| u8::from_str_radix(d, 16).ok()).ok_or(InvalidApiKey::Hash)?;
        }
        Ok(Self(bytes))
    }
}

/// Why a key's record was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidApiKey {
    /// Two records have the same id.
    #[error("two api keys have the same id")]
    DuplicateId,
    /// The hash is no `sha256:` and 64 hex digits.
    #[error("the hash of an api key must be sha256: and 64 hex digits")]
    Hash,
    /// The id is not 8 letters or digits.
    #[error("the id of an api key must be 8 letters or digits")]
    Id,
}

/// Models a key may use.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "everything or a list")]
pub enum AllowedModels {
    /// Every model.
    All,
    /// These only.
    Only(Vec<ModelName>),
}

impl AllowedModels {
    /// True if the model may be used.
    #[must_use]
    pub fn allows(&self, model: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(models) => models.iter().any(|allowed| allowed.as_str() == model),
        }
    }
}

/// One key, as config knows it.
#[derive(Debug, Clone)]
pub struct ApiKeyRecord {
    id: String,
    hash: KeyHash,
    principal: Principal,
    models: AllowedModels,
}

impl ApiKeyRecord {
    /// A record.
    ///
    /// # Errors
    /// [`InvalidApiKey::Id`] unless `id` is 8 letters or digits.
    pub fn new(
        id: impl Into<String>,
        hash: KeyHash,
        principal: Principal,
        models: AllowedModels,
    ) -> Result<Self, InvalidApiKey> {
        let id = id.into();
        if id.len() != ID_CHARS || !id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(InvalidApiKey::Id);
        }
        Ok(Self { id, hash, principal, models })
    }

    /// The public id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }
}

/// A fresh key: shown once, only [`Self::id`] and [`Self::hash`] are kept.
pub struct NewApiKey {
    key: String,
    id: String,
    hash: KeyHash,
}

impl NewApiKey {
    /// Makes a key.
    ///
    /// # Errors
    /// When the operating system gives no randomness.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut random = [0; ID_CHARS + SECRET_CHARS];
        getrandom::fill(&mut random)?;
        let (id, secret) = random.split_at(ID_CHARS);
        // Six bits of each byte: 258 for the secret. `-` and `_` don't belong into an id, so ids use 32 lower-case signs.
        let id: String =
            id.iter().map(|byte| char::from(b"abcdefghijkmnpqrstuvwxyz23456789"[usize::from(byte & 31)])).collect();
        let secret: String = secret.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 63)])).collect();
        Ok(Self { key: format!("{PREFIX}{id}_{secret}"), hash: KeyHash::of(&secret), id })
    }

    /// The key itself.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Its public id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The hash of its secret.
    #[must_use]
    pub const fn hash(&self) -> KeyHash {
        self.hash
    }
}

impl fmt::Debug for NewApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewApiKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Who may call.
#[derive(Debug, Clone)]
pub struct ApiKeys(Mode);

#[derive(Debug, Clone)]
enum Mode {
    Open,
    Fixed(KeyHash),
    Records(HashMap<String, ApiKeyRecord>),
}

/// Who called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) principal: Option<Principal>,
    pub(crate) models: AllowedModels,
}

impl Caller {
    const ANYBODY: Self = Self { principal: None, models: AllowedModels::All };
}

impl ApiKeys {
    /// Everybody may call, with any key or none.
    #[must_use]
    pub const fn open() -> Self {
        Self(Mode::Open)
    }

    /// Whoever has this one key may call. Any text will do.
    #[must_use]
    pub fn fixed(key: &str) -> Self {
        Self(Mode::Fixed(KeyHash::of(key)))
    }

    /// Whoever has a key of these may call.
    ///
    /// # Errors
    /// [`InvalidApiKey::DuplicateId`].
    pub fn records(records: impl IntoIterator<Item = ApiKeyRecord>) -> Result<Self, InvalidApiKey> {
        let mut by_id = HashMap::new();
        for record in records {
            if by_id.insert(record.id.clone(), record).is_some() {
                return Err(InvalidApiKey::DuplicateId);
            }
        }
        Ok(Self(Mode::Records(by_id)))
    }

    /// True if anybody may call.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        matches!(self.0, Mode::Open)
    }

    /// Who calls; `None` when nobody we know.
    pub(crate) fn authenticate(&self, headers: &HeaderMap) -> Option<Caller> {
        let by_id = match &self.0 {
            Mode::Open => return Some(Caller::ANYBODY),
            Mode::Fixed(hash) => {
                return hash.equals(&KeyHash::of(presented(headers)?)).then_some(Caller::ANYBODY);
            }
            Mode::Records(by_id) => by_id,
        };
        let key = presented(headers)?;
        // A key of another shape takes the same path: empty id, whole text as the secret.
        let (id, secret) = key.strip_prefix(PREFIX).and_then(|rest| rest.split_once('_')).unwrap_or(("", key));
        let record = by_id.get(id);
        let dummy = KeyHash([0; 32]);
        let matches = record.map_or(&dummy, |record| &record.hash).equals(&KeyHash::of(secret));
        record
            .filter(|_| matches)
            .map(|record| Caller { principal: Some(record.principal.clone()), models: record.models.clone() })
    }
}

fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let key = bearer.or_else(|| headers.get("api-key").and_then(|value| value.to_str().ok()))?;
    (!key.is_empty() && key.len() <= MAX_KEY_BYTES).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())])
    }

    fn bearer(key: &str) -> HeaderMap {
        with("authorization", &format!("Bearer {key}"))
    }

    #[test]
    fn a_key_opens_by_id_and_secret_only() {
        // API-13
        let (one, two) = (NewApiKey::generate().unwrap(), NewApiKey::generate().unwrap());
        let record = |key: &NewApiKey, name: &str, models| {
            ApiKeyRecord::new(key.id(), key.hash(), Principal::new(name).unwrap(), models).unwrap()
        };
        let only = AllowedModels::Only(vec![ModelName::new("a").unwrap()]);
        let keys = ApiKeys::records([record(&one, "one", AllowedModels::All), record(&two, "two", only)]).unwrap();
        let name = |headers: &HeaderMap| keys.authenticate(headers).and_then(|c| c.principal).map(|p| p.to_string());
        assert_eq!(name(&bearer(one.key())).as_deref(), Some("one"));
        assert_eq!(name(&with("api-key", two.key())).as_deref(), Some("two"));
        assert_eq!(name(&with("authorization", &format!("bearer {}", one.key()))).as_deref(), Some("one"));
        let crossed = format!("iopk_{}_{}", one.id(), &two.key()[PREFIX.len() + ID_CHARS + 1..]);
        for wrong in [&crossed, "iopk_aaaaaaaa_x", "sk-x", "iopk_", "", one.id()] {
            assert_eq!(name(&bearer(wrong)), None, "{wrong}");
        }
        assert_eq!(name(&HeaderMap::new()), None);
        let caller = keys.authenticate(&bearer(two.key())).unwrap();
        assert!(caller.models.allows("a") && !caller.models.allows("b"));
    }

    #[test]
    fn keys_have_the_documented_form_and_print_no_secret() {
        let key = NewApiKey::generate().unwrap();
        let (id, secret) = key.key().strip_prefix("iopk_").unwrap().split_once('_').unwrap();
        assert_eq!((id.len(), secret.len(), id), (8, 43, key.id()));
        assert!(!format!("{key:?}").contains(secret));
        assert_eq!(key.hash().to_string().parse::<KeyHash>().unwrap(), key.hash());
        assert!("sha256:00".parse::<KeyHash>().is_err() && "00".repeat(32).parse::<KeyHash>().is_err());
        assert!(format!("sha256:{}", "+1".repeat(32)).parse::<KeyHash>().is_err());
    }

    #[test]
    fn a_fixed_key_is_any_text_and_open_needs_none() {
        let keys = ApiKeys::fixed("iop");
        assert!(keys.authenticate(&bearer("iop")).is_some());
        assert!(keys.authenticate(&bearer("iopx")).is_none());
        assert!(keys.authenticate(&HeaderMap::new()).is_none());
        assert!(ApiKeys::open().authenticate(&HeaderMap::new()).is_some());
        assert!(ApiKeys::open().authenticate(&bearer("anything")).is_some());
    }

    #[test]
    fn bad_records_are_refused() {
        let principal = || Principal::new("p").unwrap();
        let record = |id: &str| ApiKeyRecord::new(id, KeyHash::of("s"), principal(), AllowedModels::All);
        assert_eq!(record("short").err(), Some(InvalidApiKey::Id));
        assert_eq!(record("abc_efgh").err(), Some(InvalidApiKey::Id));
        let twice = [record("abcdefgh").unwrap(), record("abcdefgh").unwrap()];
        assert_eq!(ApiKeys::records(twice).err(), Some(InvalidApiKey::DuplicateId));
    }
}
