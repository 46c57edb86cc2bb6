//! Leases between the two ends of the fixture, good and odd.

use zeroize::Zeroizing;

pub(crate) use crate::fixture::*;
use crate::lease::Entropy;
use crate::{Binding, Claims, Grant, IssuerKey, KeyId, LeaseError, ProviderCredential, SealedLease};

impl Fixture {
    pub(crate) fn lease(&self) -> SealedLease {
        self.lease_of(&ProviderCredential::bearer(b"sk-example").unwrap(), binding())
    }

    pub(crate) fn lease_of(&self, credential: &ProviderCredential, binding: Binding) -> SealedLease {
        let recipient = self.recipient();
        let grant = Grant { recipient: &recipient, generation: GENERATION, revision: REVISION, binding, ttl_ms: TTL };
        let entropy = Entropy { id: [3; 16], seed: Zeroizing::new([4; 32]) };
        self.issuer.issue_with(&grant, credential, NOW, &entropy).unwrap().lease
    }

    /// A lease that says these things, sealed and signed as if the Edge had meant them.
    pub(crate) fn lease_with(&self, change: impl FnOnce(&mut Claims)) -> SealedLease {
        let mut claims = self.claims();
        change(&mut claims);
        let credential = ProviderCredential::bearer(b"sk-example").unwrap();
        let bytes = self.issuer.seal_and_sign(&claims, &self.recipient(), credential.plaintext(), &[4; 32]).unwrap();
        SealedLease::new(bytes).unwrap()
    }

    /// A lease of these bytes, correctly signed, whatever they are.
    pub(crate) fn signed(&self, unsigned: &[u8]) -> SealedLease {
        signed_by(&self.issuer, unsigned)
    }

    pub(crate) fn refusal(&self, lease: &SealedLease) -> Option<LeaseError> {
        self.use_up(lease).err()
    }
}

pub(crate) fn signed_by(issuer: &IssuerKey, unsigned: &[u8]) -> SealedLease {
    let signature = issuer.sign(&crate::format::signed_text(unsigned));
    SealedLease::new([unsigned, &signature].concat()).unwrap()
}

pub(crate) fn unsigned(lease: &SealedLease) -> Vec<u8> {
    lease.as_bytes()[..lease.as_bytes().len() - 64].to_vec()
}

pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first issuer's id with another last byte: a stranger.
pub(crate) fn stranger(id: KeyId) -> KeyId {
    let mut bytes = *id.as_bytes();
    bytes[15] ^= 1;
    KeyId(bytes)
}
