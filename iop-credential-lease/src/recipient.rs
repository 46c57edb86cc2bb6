//! Decides whose key a lease is sealed to: a fresh one for each connection, which dies with it.

use std::fmt;

use hpke::{Deserializable, Kem as _, Serializable};
use zeroize::Zeroizing;

use crate::key_id::{KeyId, Purpose};
use crate::suite::{self, KEY_BYTES, Kem, PrivateKey, PublicKey, SEED_BYTES};

/// The system has no random bytes to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system gave no random bytes")]
pub struct NoRandomness;

/// A key nobody may seal to: anybody could open the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the recipient key is of low order: anybody could open what is sealed to it")]
pub struct WeakRecipientKey;

/// The private key of one connection. There is no way to store or load one: make it when a connection is made, and drop
/// it when the connection ends. Zeroed when dropped; can't be copied, printed or serialized.
///
/// ```compile_fail
/// fn copied<T: Clone>() {}
/// copied::<iop_credential_lease::RecipientKey>();
/// ```
pub struct RecipientKey {
    private: PrivateKey,
    public: [u8; KEY_BYTES],
    id: KeyId,
}

impl RecipientKey {
    /// A new key.
    ///
    /// # Errors
    /// [`NoRandomness`].
    pub fn generate() -> Result<Self, NoRandomness> {
        let mut seed = Zeroizing::new([0; SEED_BYTES]);
        getrandom::fill(seed.as_mut_slice()).map_err(|_| NoRandomness)?;
        Ok(Self::from_seed(&seed))
    }

    pub(crate) fn from_seed(seed: &[u8; SEED_BYTES]) -> Self {
        let (private, key) = Kem::derive_keypair(seed);
        let mut public = [0; KEY_BYTES];
        key.write_exact(&mut public);
        Self { private, public, id: KeyId::of(Purpose::Recipient, &public) }
    }

    /// The public key, for the Edge.
    #[must_use]
    pub const fn public_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.public
    }

    /// Its name.
    #[must_use]
    pub const fn id(&self) -> KeyId {
        self.id
    }

    pub(crate) const fn private(&self) -> &PrivateKey {
        &self.private
    }
}

impl fmt::Debug for RecipientKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecipientKey({})[redacted]", self.id)
    }
}

/// The public key of one connection, as the Edge keeps it.
#[derive(Clone)]
pub struct RecipientPublicKey {
    key: PublicKey,
    id: KeyId,
}

impl RecipientPublicKey {
    /// Takes the key a Node registered with.
    ///
    /// # Errors
    /// [`WeakRecipientKey`] when it is of low order.
    pub fn new(public: [u8; KEY_BYTES]) -> Result<Self, WeakRecipientKey> {
        let key = PublicKey::from_bytes(&public).map_err(|_| WeakRecipientKey)?;
        // With a point of low order every private key gives the same all-zero secret, so any one tells.
        suite::seal(&key, &[], &[], &[], &[0; SEED_BYTES]).ok_or(WeakRecipientKey)?;
        Ok(Self { key, id: KeyId::of(Purpose::Recipient, &public) })
    }

    /// Its name.
    #[must_use]
    pub const fn id(&self) -> KeyId {
        self.id
    }

    pub(crate) const fn key(&self) -> &PublicKey {
        &self.key
    }
}

impl fmt::Debug for RecipientPublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecipientPublicKey({})", self.id)
    }
}
