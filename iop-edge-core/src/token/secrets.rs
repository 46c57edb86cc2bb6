//! Decides which secrets of one token id are accepted at a moment: the present one, and for a while the one before it
//! (CRD-12).

use super::{Token, TokenHash};

/// What opens one token id. Times are Unix seconds; a secret is good before its time and not at it.
#[derive(Debug, Clone, Copy)]
pub struct TokenSecrets {
    present: TokenHash,
    expires_at: Option<u64>,
    previous: Option<(TokenHash, u64)>,
}

/// What a presented token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "an answer to one question")]
pub enum TokenProof {
    /// It opens.
    Accepted,
    /// It did once: its holder needs a new one.
    Expired,
    /// It never did.
    Unknown,
}

impl TokenSecrets {
    /// One secret that does not expire.
    #[must_use]
    pub const fn new(present: TokenHash) -> Self {
        Self { present, expires_at: None, previous: None }
    }

    /// What an id is compared with that nobody has, so that it takes as long as one that somebody has.
    pub(crate) const NOBODY: Self = Self::new(TokenHash::DUMMY);

    /// With an end of the id as a whole.
    #[must_use]
    pub const fn expiring(mut self, at: Option<u64>) -> Self {
        self.expires_at = at;
        self
    }

    /// With a secret from before a rotation, accepted until its own time.
    #[must_use]
    pub const fn with_previous(mut self, hash: TokenHash, until: u64) -> Self {
        self.previous = Some((hash, until));
        self
    }

    /// What `token` is at `now`. Takes the same time whatever differs: both comparisons are always made.
    #[must_use]
    pub fn check(&self, token: &Token, now: u64) -> TokenProof {
        let (previous, until) = self.previous.unwrap_or((TokenHash::DUMMY, 0));
        let (is_present, is_previous) = (self.present.matches(token), previous.matches(token));
        let ended = self.expires_at.is_some_and(|at| at <= now);
        match (is_present, is_previous) {
            (true, _) if !ended => TokenProof::Accepted,
            (false, true) if !ended && now < until => TokenProof::Accepted,
            (false, false) => TokenProof::Unknown,
            (true, _) | (_, true) => TokenProof::Expired,
        }
    }
}

impl From<TokenHash> for TokenSecrets {
    fn from(hash: TokenHash) -> Self {
        Self::new(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::TokenKind;

    #[test]
    fn after_a_rotation_both_secrets_open_until_the_old_ones_time() {
        // CRD-12
        let fresh = || Token::generate(TokenKind::ApiKey).unwrap();
        let (old, new, other) = (fresh(), fresh(), fresh());
        let secrets = TokenSecrets::new(new.hash()).with_previous(old.hash(), 100).expiring(Some(200));
        for (token, now, want) in [
            (&old, 99, TokenProof::Accepted),
            (&old, 100, TokenProof::Expired),
            (&new, 99, TokenProof::Accepted),
            (&new, 199, TokenProof::Accepted),
            (&new, 200, TokenProof::Expired),
            (&other, 1, TokenProof::Unknown),
        ] {
            assert_eq!(secrets.check(token, now), want, "{now}");
        }
        // The end of the id ends its old secret, too.
        let ended = TokenSecrets::new(new.hash()).with_previous(old.hash(), 100).expiring(Some(50));
        assert_eq!(ended.check(&old, 60), TokenProof::Expired);
        assert_eq!(TokenSecrets::NOBODY.check(&new, 1), TokenProof::Unknown);
    }
}
