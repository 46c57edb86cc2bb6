//! Decides whether a token is the one that was issued: public id for the look-up, hashed secret for the proof.
//!
//! `iopn_<id>_<secret>` (`iopk_` for clients, `iopa_` for operators): 8 characters of id, 43 of secret (base64url of 32 random bytes). Only the SHA-256 of the
//! secret is ever stored, and it is compared in constant time (REG-6).

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use iop_execution::Redacted;

mod secrets;

pub use secrets::{TokenProof, TokenSecrets};

/// Characters of a token's public id.
const ID_CHARS: usize = 8;
/// Characters of a token's secret.
const SECRET_CHARS: usize = 43;

/// What a token opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the kinds of callers an Edge has")]
pub enum TokenKind {
    /// A client's API key: `iopk_…`.
    ApiKey,
    /// A Node's token: `iopn_…`.
    Node,
    /// An operator's key: `iopa_…`.
    Admin,
}

impl TokenKind {
    const fn prefix(self) -> &'static str {
        match self {
            Self::ApiKey => "iopk_",
            Self::Node => "iopn_",
            Self::Admin => "iopa_",
        }
    }
}

/// Public part of a token.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId([u8; ID_CHARS]);

impl TokenId {
    /// Parses an id: 8 letters or digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes: [u8; ID_CHARS] = text.as_bytes().try_into().ok()?;
        bytes.iter().all(u8::is_ascii_alphanumeric).then_some(Self(bytes))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// SHA-256 of a token's secret.
#[derive(Clone, Copy)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Parses the form config files use: `sha256:` and 64 hexadecimal digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sha256:")?.as_bytes();
        let (pairs, rest) = digits.as_chunks::<2>();
        let mut bytes = [0; 32];
        if pairs.len() != bytes.len() || !rest.is_empty() {
            return None;
        }
        for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
            let (high, low) = (char::from(*high).to_digit(16)?, char::from(*low).to_digit(16)?);
            *byte = u8::try_from(high * 16 + low).ok()?;
        }
        Some(Self(bytes))
    }

    /// True if this is the hash of `token`'s secret. Takes the same time whatever differs.
    #[must_use]
    pub fn matches(&self, token: &Token) -> bool {
        self.equals(token.hash())
    }

    /// The hash of a secret, or of any other text.
    pub(crate) fn of(secret: &str) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, secret.as_bytes());
        let mut bytes = [0; 32];
        bytes.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
        Self(bytes)
    }

    /// Takes the same time whatever differs.
    pub(crate) fn equals(&self, other: Self) -> bool {
        let difference = self.0.iter().zip(other.0).fold(0, |sum, (a, b)| sum | std::hint::black_box(a ^ b));
        std::hint::black_box(difference) == 0
    }

    /// Compared with when no record has a token's id, so that unknown ids take as long as known ones.
    pub(crate) const DUMMY: Self = Self([0; 32]);
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:[redacted]")
    }
}

/// A whole token, as its holder presents it.
#[derive(Clone)]
pub struct Token {
    kind: TokenKind,
    id: TokenId,
    secret: Redacted<String>,
}

impl Token {
    /// Parses a token of one kind; `None` for anything else.
    #[must_use]
    pub fn parse(kind: TokenKind, text: &str) -> Option<Self> {
        let (id, secret) = text.strip_prefix(kind.prefix())?.split_at_checked(ID_CHARS)?;
        let secret = secret.strip_prefix('_')?;
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if secret.len() != SECRET_CHARS || !secret.bytes().all(legal) {
            return None;
        }
        Some(Self { kind, id: TokenId::parse(id)?, secret: Redacted::new(secret.to_owned()) })
    }

    /// A fresh random token.
    ///
    /// # Errors
    /// When the operating system gives no randomness.
    pub fn generate(kind: TokenKind) -> Result<Self, getrandom::Error> {
        const DIGITS: &[u8; 32] = b"abcdefghijkmnopqrstuvwxyz2345678";
        let (mut id, mut secret) = ([0; ID_CHARS], [0; 32]);
        getrandom::fill(&mut id)?;
        getrandom::fill(&mut secret)?;
        let id = id.map(|byte| DIGITS.get(usize::from(byte % 32)).copied().unwrap_or(b'a'));
        Ok(Self { kind, id: TokenId(id), secret: Redacted::new(URL_SAFE_NO_PAD.encode(secret)) })
    }

    /// Its public id.
    #[must_use]
    pub const fn id(&self) -> &TokenId {
        &self.id
    }

    /// What a config stores of it.
    #[must_use]
    pub fn hash(&self) -> TokenHash {
        TokenHash::of(self.secret.expose())
    }

    /// The whole token, to show it once to whoever asked for it.
    #[must_use]
    pub fn reveal(&self) -> String {
        format!("{}{}_{}", self.kind.prefix(), self.id.as_str(), self.secret.expose())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}_[redacted]", self.kind.prefix(), self.id.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_token_parses_and_matches_only_its_own_hash() {
        // REG-6
        let token = Token::generate(TokenKind::Node).unwrap();
        let parsed = Token::parse(TokenKind::Node, &token.reveal()).unwrap();
        assert!(token.hash().matches(&parsed));
        let stored = TokenHash::parse(&token.hash().to_string()).unwrap();
        assert!(stored.matches(&token));
        assert!(!stored.matches(&Token::generate(TokenKind::Node).unwrap()));
        assert!(!TokenHash::DUMMY.matches(&token));
        assert!(Token::parse(TokenKind::ApiKey, &token.reveal()).is_none());
        // SEC-4: no client's key and no Node's token opens what is for operators
        assert!(Token::parse(TokenKind::Admin, &token.reveal()).is_none());
        assert!(Token::generate(TokenKind::Admin).unwrap().reveal().starts_with("iopa_"));
    }

    #[test]
    fn the_hash_is_sha_256_of_the_secret_part() {
        // REG-6: the value was computed with sha256sum
        let token = Token::parse(TokenKind::Node, &format!("iopn_abcdefgh_{}", "A".repeat(43))).unwrap();
        assert_eq!(token.id().as_str(), "abcdefgh");
        assert_eq!(token.hash().to_string(), EXPECTED);
    }

    #[test]
    fn every_single_changed_bit_of_a_hash_is_seen() {
        // REG-6
        let token = Token::generate(TokenKind::Node).unwrap();
        for bit in 0..256 {
            let mut hash = token.hash();
            hash.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!hash.matches(&token), "bit {bit}");
        }
    }

    #[test]
    fn malformed_tokens_and_hashes_are_refused() {
        // REG-6
        let secret = "b".repeat(43);
        for bad in ["", "iopn_", "iopn_abcdefgh", "iopn_abcdefgh_", "iopn_abcdefé_x"] {
            assert!(Token::parse(TokenKind::Node, bad).is_none(), "{bad}");
        }
        assert!(Token::parse(TokenKind::Node, &format!("iopn_abcdefgh_{secret}c")).is_none());
        assert!(Token::parse(TokenKind::Node, &format!("iopn_abcd_fgh_{secret}")).is_none());
        assert!(Token::parse(TokenKind::Node, &format!("iopn_abcdefgh_{}=", &secret[1..])).is_none());
        for bad in ["", "sha256:", "sha256:zz", "md5:00", &format!("sha256:{}", "0".repeat(63))] {
            assert!(TokenHash::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn secrets_never_print() {
        let token = Token::parse(TokenKind::Node, &format!("iopn_abcdefgh_{}", "S".repeat(43))).unwrap();
        assert_eq!(format!("{token:?} {:?}", token.hash()), "iopn_abcdefgh_[redacted] sha256:[redacted]");
    }

    const EXPECTED: &str = "sha256:0f007385b6f9d4b7eeb2748605afe1a984a0a3bfa3f014d09e2a784ce9e5cd1a";
}
