//! Decides the algorithms of version 1: HPKE Base with X25519, HKDF-SHA256 and ChaCha20-Poly1305. Nothing chooses.

use std::convert::Infallible;

use hpke::rand_core::{TryCryptoRng, TryRng};
use hpke::{Deserializable, OpModeR, OpModeS, Serializable};
use zeroize::{Zeroize, Zeroizing};

pub(crate) type Kem = hpke::kem::X25519HkdfSha256;
type Kdf = hpke::kdf::HkdfSha256;
type Aead = hpke::aead::ChaCha20Poly1305;

pub(crate) type PrivateKey = <Kem as hpke::Kem>::PrivateKey;
pub(crate) type PublicKey = <Kem as hpke::Kem>::PublicKey;
type EncappedKey = <Kem as hpke::Kem>::EncappedKey;

/// Length of a public key and of an encapsulated one.
pub(crate) const KEY_BYTES: usize = 32;
/// Length of the random input of one encapsulation.
pub(crate) const SEED_BYTES: usize = 32;
/// Length of the authentication tag.
pub(crate) const TAG_BYTES: usize = 16;

/// The random bytes of one encapsulation, drawn beforehand: the system's generator may fail, and what the library takes
/// may not. Asked for more than there is, it says so afterwards and the result is thrown away.
struct Drawn {
    bytes: [u8; SEED_BYTES],
    used: usize,
    exhausted: bool,
}

impl TryRng for Drawn {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        let mut word = [0; 4];
        self.try_fill_bytes(&mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        let mut word = [0; 8];
        self.try_fill_bytes(&mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    fn try_fill_bytes(&mut self, into: &mut [u8]) -> Result<(), Infallible> {
        match self.bytes.get(self.used..self.used + into.len()) {
            Some(bytes) => into.copy_from_slice(bytes),
            None => {
                self.exhausted = true;
                into.fill(0);
            }
        }
        self.used = self.used.saturating_add(into.len()).min(SEED_BYTES);
        Ok(())
    }
}

impl TryCryptoRng for Drawn {}

impl Drop for Drawn {
    fn drop(&mut self) {
        self.bytes.zeroize();
    }
}

/// Seals to a public key. `None` when the key is of low order, so that anybody could open the result.
pub(crate) fn seal(
    to: &PublicKey,
    info: &[u8],
    aad: &[u8],
    plaintext: &[u8],
    seed: &[u8; SEED_BYTES],
) -> Option<([u8; KEY_BYTES], Vec<u8>)> {
    let mut drawn = Drawn { bytes: *seed, used: 0, exhausted: false };
    let mode = OpModeS::Base;
    let (encapped, sealed) =
        hpke::single_shot_seal_with_rng::<Aead, Kdf, Kem>(&mode, to, info, plaintext, aad, &mut drawn).ok()?;
    if drawn.exhausted {
        return None;
    }
    let mut enc = [0; KEY_BYTES];
    encapped.write_exact(&mut enc);
    Some((enc, sealed))
}

/// Opens what was sealed to the key. `None` for every reason there may be.
pub(crate) fn open(
    key: &PrivateKey,
    enc: &[u8; KEY_BYTES],
    info: &[u8],
    aad: &[u8],
    sealed: &[u8],
) -> Option<Zeroizing<Vec<u8>>> {
    let enc = EncappedKey::from_bytes(enc).ok()?;
    hpke::single_shot_open::<Aead, Kdf, Kem>(&OpModeR::Base, key, &enc, info, sealed, aad).ok().map(Zeroizing::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_beyond_the_seed_is_noticed() {
        // CRD-1
        let mut drawn = Drawn { bytes: [7; SEED_BYTES], used: 0, exhausted: false };
        let mut whole = [0; SEED_BYTES];
        drawn.try_fill_bytes(&mut whole).unwrap();
        assert_eq!((whole, drawn.exhausted), ([7; SEED_BYTES], false));
        assert_eq!(drawn.try_next_u32(), Ok(0));
        assert!(drawn.exhausted);
    }
}
