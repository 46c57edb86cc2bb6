//! Decides who a caller is and which models it may use.
//!
//! Keys are [`Token`]s: a public id to look up by, and a secret of which only the hash is kept. An unknown id is compared
//! with a dummy, so that it takes as long as a known one.

use std::collections::HashMap;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use iop_execution::{ModelName, Principal};

use super::config::MAX_KEY_BYTES;
use crate::rate_limit::KeyLimits;
use crate::token::{Token, TokenHash, TokenId, TokenKind, TokenProof, TokenSecrets};

/// Why a list of keys was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidApiKey {
    /// Two records have the same id.
    #[error("two api keys have the same id")]
    DuplicateId,
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
    id: TokenId,
    secrets: TokenSecrets,
    principal: Principal,
    models: AllowedModels,
    priority: Priority,
    limits: KeyLimits,
}

/// How urgent the requests of a key are, and may be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Priority {
    usual: i8,
    max: i8,
}

impl Priority {
    /// That of a request which asks for `asked`: no higher than the key allows.
    pub(crate) fn of(self, asked: Option<i8>) -> i8 {
        asked.map_or(self.usual, |asked| asked.min(self.max))
    }
}

impl ApiKeyRecord {
    /// A record of the key with this id and hash; [`Token::generate`] makes one, [`TokenKind::ApiKey`] is its kind. A
    /// [`TokenHash`] is enough, [`TokenSecrets`] can say more.
    #[must_use]
    pub fn new(id: TokenId, secrets: impl Into<TokenSecrets>, principal: Principal, models: AllowedModels) -> Self {
        let (secrets, priority, limits) = (secrets.into(), Priority::default(), KeyLimits::default());
        Self { id, secrets, principal, models, priority, limits }
    }

    /// With another priority than 0: who waits for a place with a higher one goes first. It is also the highest that a
    /// request may ask for.
    #[must_use]
    pub const fn with_priority(mut self, priority: i8) -> Self {
        self.priority = Priority { usual: priority, max: priority };
        self
    }

    /// Requests may ask for a priority up to this one.
    #[must_use]
    pub const fn with_max_priority(mut self, max: i8) -> Self {
        self.priority.max = max;
        self
    }

    /// With limits; by default there are none.
    #[must_use]
    pub const fn with_limits(mut self, limits: KeyLimits) -> Self {
        self.limits = limits;
        self
    }

    /// The public id.
    #[must_use]
    pub const fn id(&self) -> &TokenId {
        &self.id
    }
}

/// Who may call.
#[derive(Debug, Clone)]
pub struct ApiKeys(Mode);

#[derive(Debug, Clone)]
enum Mode {
    Open,
    Fixed(TokenHash),
    Records(HashMap<TokenId, ApiKeyRecord>),
}

/// Who called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Which key, where there are several.
    pub(crate) key: Option<TokenId>,
    pub(crate) principal: Option<Principal>,
    pub(crate) models: AllowedModels,
    pub(crate) priority: Priority,
}

impl Caller {
    const ANYBODY: Self =
        Self { key: None, principal: None, models: AllowedModels::All, priority: Priority { usual: 0, max: 0 } };
}

/// Why nobody is let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// No key, or one that we don't know.
    Unknown,
    /// A key that was good once.
    Expired,
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
        Self(Mode::Fixed(TokenHash::of(key)))
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

    /// All keys and their limits.
    pub(crate) fn limits(&self) -> Vec<(TokenId, KeyLimits)> {
        match &self.0 {
            Mode::Open | Mode::Fixed(_) => Vec::new(),
            Mode::Records(by_id) => by_id.values().map(|record| (record.id.clone(), record.limits)).collect(),
        }
    }

    /// Who calls; `unix_time` is in seconds.
    pub(crate) fn authenticate(&self, headers: &HeaderMap, unix_time: u64) -> Result<Caller, Denied> {
        let by_id = match &self.0 {
            Mode::Open => return Ok(Caller::ANYBODY),
            Mode::Fixed(hash) => {
                let known = presented(headers).is_some_and(|key| hash.equals(TokenHash::of(key)));
                return known.then_some(Caller::ANYBODY).ok_or(Denied::Unknown);
            }
            Mode::Records(by_id) => by_id,
        };
        let key = presented(headers).and_then(|key| Token::parse(TokenKind::ApiKey, key)).ok_or(Denied::Unknown)?;
        let record = by_id.get(key.id());
        let proof = record.map_or(TokenSecrets::NOBODY, |record| record.secrets).check(&key, unix_time);
        match (record, proof) {
            (Some(record), TokenProof::Accepted) => Ok(Caller {
                key: Some(record.id.clone()),
                principal: Some(record.principal.clone()),
                models: record.models.clone(),
                priority: record.priority,
            }),
            (Some(_), TokenProof::Expired) => Err(Denied::Expired),
            (Some(_), TokenProof::Unknown) | (None, _) => Err(Denied::Unknown),
        }
    }
}

fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let key = bearer.or_else(|| ["api-key", "x-api-key"].iter().find_map(|name| headers.get(*name)?.to_str().ok()))?;
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
        let fresh = || Token::generate(TokenKind::ApiKey).unwrap();
        let (one, two) = (fresh(), fresh());
        let record = |key: &Token, name: &str, models| {
            ApiKeyRecord::new(key.id().clone(), key.hash(), Principal::new(name).unwrap(), models)
        };
        let only = AllowedModels::Only(vec![ModelName::new("a").unwrap()]);
        let keys = ApiKeys::records([record(&one, "one", AllowedModels::All), record(&two, "two", only)]).unwrap();
        let name =
            |headers: &HeaderMap| keys.authenticate(headers, 0).ok().and_then(|c| c.principal).map(|p| p.to_string());
        assert_eq!(name(&bearer(&one.reveal())).as_deref(), Some("one"));
        assert_eq!(name(&with("api-key", &two.reveal())).as_deref(), Some("two"));
        assert_eq!(name(&with("authorization", &format!("bearer {}", one.reveal()))).as_deref(), Some("one"));
        let swapped = |from: &str, to: &str| two.reveal().replace(from, to);
        let crossed = swapped(two.id().as_str(), one.id().as_str());
        let unknown = swapped(two.id().as_str(), "AAAAAAAA");
        let node = swapped("iopk_", "iopn_");
        let hash = one.hash().to_string();
        for wrong in [&crossed, &unknown, &node, &hash, "iopk_aaaaaaaa_x", "sk-x", "iopk_", "", one.id().as_str()] {
            assert_eq!(name(&bearer(wrong)), None, "{wrong}");
        }
        assert_eq!(name(&HeaderMap::new()), None);
        let caller = keys.authenticate(&bearer(&two.reveal()), 0).unwrap();
        assert!(caller.models.allows("a") && !caller.models.allows("b"));
    }

    #[test]
    fn a_fixed_key_is_any_text_and_open_needs_none() {
        let keys = ApiKeys::fixed("iop");
        assert!(keys.authenticate(&bearer("iop"), 0).is_ok());
        assert!(keys.authenticate(&bearer("iopx"), 0).is_err());
        assert!(keys.authenticate(&HeaderMap::new(), 0).is_err());
        assert!(ApiKeys::open().authenticate(&HeaderMap::new(), 0).is_ok());
        assert!(ApiKeys::open().authenticate(&bearer("anything"), 0).is_ok());
    }

    #[test]
    fn a_key_ends_and_its_old_secret_ends_earlier() {
        // CRD-12
        let fresh = || Token::generate(TokenKind::ApiKey).unwrap();
        let (new, old) = (fresh(), fresh());
        let old_text = old.reveal().replace(old.id().as_str(), new.id().as_str());
        let secrets = TokenSecrets::new(new.hash()).with_previous(old.hash(), 50).expiring(Some(100));
        let principal = Principal::new("p").unwrap();
        let keys = ApiKeys::records([ApiKeyRecord::new(new.id().clone(), secrets, principal, AllowedModels::All)]);
        let keys = keys.unwrap();
        let who = |key: &str, at| keys.authenticate(&bearer(key), at).map(|caller| caller.key);
        assert_eq!(who(&new.reveal(), 99), Ok(Some(new.id().clone())));
        assert_eq!(who(&old_text, 49), Ok(Some(new.id().clone())), "one key, whichever secret");
        assert_eq!(who(&old_text, 50), Err(Denied::Expired));
        assert_eq!(who(&new.reveal(), 100), Err(Denied::Expired));
        assert_eq!(who(&fresh().reveal(), 1), Err(Denied::Unknown));
    }

    #[test]
    fn a_request_may_be_less_urgent_but_not_more_than_its_key_allows() {
        // CRD-12, QUE-1
        let id = TokenId::parse("abcdefgh").unwrap();
        let record = ApiKeyRecord::new(id, TokenHash::of("x"), Principal::new("p").unwrap(), AllowedModels::All);
        let (plain, wide) = (record.clone().with_priority(2), record.with_priority(2).with_max_priority(5));
        for (asked, narrow, up_to_five) in [(None, 2, 2), (Some(-7), -7, -7), (Some(3), 2, 3), (Some(100), 2, 5)] {
            assert_eq!((plain.priority.of(asked), wide.priority.of(asked)), (narrow, up_to_five), "{asked:?}");
        }
    }

    #[test]
    fn two_keys_with_one_id_are_refused() {
        let id = TokenId::parse("abcdefgh").unwrap();
        let record = |secret| {
            let (hash, principal) = (TokenHash::of(secret), Principal::new("p").unwrap());
            ApiKeyRecord::new(id.clone(), hash, principal, AllowedModels::All)
        };
        assert_eq!(ApiKeys::records([record("a"), record("b")]).err(), Some(InvalidApiKey::DuplicateId));
    }
}
