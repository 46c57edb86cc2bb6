//! Decides who a caller is and which models it may use.
//!
//! Keys are [`Token`]s: a public id to look up by, and a secret of which only the hash is kept. An unknown id is compared
//! with a dummy, so that it takes as long as a known one.

use std::collections::HashMap;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use iop_execution::{ModelName, Principal};

use super::config::MAX_KEY_BYTES;
use crate::token::{Token, TokenHash, TokenId, TokenKind};

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
    hash: TokenHash,
    principal: Principal,
    models: AllowedModels,
    priority: i8,
}

impl ApiKeyRecord {
    /// A record of the key with this id and hash; [`Token::generate`] makes one, [`TokenKind::ApiKey`] is its kind.
    #[must_use]
    pub const fn new(id: TokenId, hash: TokenHash, principal: Principal, models: AllowedModels) -> Self {
        Self { id, hash, principal, models, priority: 0 }
    }

    /// With another priority than 0: who waits for a place with a higher one goes first.
    #[must_use]
    pub const fn with_priority(mut self, priority: i8) -> Self {
        self.priority = priority;
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
    pub(crate) principal: Option<Principal>,
    pub(crate) models: AllowedModels,
    pub(crate) priority: i8,
}

impl Caller {
    const ANYBODY: Self = Self { principal: None, models: AllowedModels::All, priority: 0 };
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

    /// Who calls; `None` when nobody we know.
    pub(crate) fn authenticate(&self, headers: &HeaderMap) -> Option<Caller> {
        let by_id = match &self.0 {
            Mode::Open => return Some(Caller::ANYBODY),
            Mode::Fixed(hash) => {
                return hash.equals(TokenHash::of(presented(headers)?)).then_some(Caller::ANYBODY);
            }
            Mode::Records(by_id) => by_id,
        };
        let key = Token::parse(TokenKind::ApiKey, presented(headers)?)?;
        let record = by_id.get(key.id());
        let matches = record.map_or(TokenHash::DUMMY, |record| record.hash).matches(&key);
        record.filter(|_| matches).map(|record| Caller {
            principal: Some(record.principal.clone()),
            models: record.models.clone(),
            priority: record.priority,
        })
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
        let name = |headers: &HeaderMap| keys.authenticate(headers).and_then(|c| c.principal).map(|p| p.to_string());
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
        let caller = keys.authenticate(&bearer(&two.reveal())).unwrap();
        assert!(caller.models.allows("a") && !caller.models.allows("b"));
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
    fn two_keys_with_one_id_are_refused() {
        let id = TokenId::parse("abcdefgh").unwrap();
        let record = |secret| {
            let (hash, principal) = (TokenHash::of(secret), Principal::new("p").unwrap());
            ApiKeyRecord::new(id.clone(), hash, principal, AllowedModels::All)
        };
        assert_eq!(ApiKeys::records([record("a"), record("b")]).err(), Some(InvalidApiKey::DuplicateId));
    }
}
