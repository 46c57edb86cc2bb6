//! Decides the bytes of a lease, version 1: one encoding for each content, no optional field, big-endian.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 4 | `IOPL` |
//! | 4 | 1 | version, 1 |
//! | 5 | 1 | suite, 1 |
//! | 6 | 16 | issuer's key id |
//! | 22 | 16 | recipient's key id |
//! | 38 | 16 | lease id |
//! | 54 | 8 | issued at, Unix milliseconds |
//! | 62 | 8 | expires at, Unix milliseconds |
//! | 70 | 8 | credential revision |
//! | 78 | 8 | generation |
//! | 86 | 8 × (1 + n) | principal, route, slot, profile, target, node, upstream, run: length, then bytes |
//! | … | 32 | encapsulated key |
//! | … | 2 | length of the ciphertext |
//! | … | 16 + 256 k | ciphertext, k = 1 to 32 |
//! | -64 | 64 | signature |

use std::ops::Range;

use crate::binding::{
    Binding, NodeName, PrincipalName, ProfileName, RouteName, RunName, SlotName, TargetName, UpstreamOrigin,
};
use crate::error::LeaseError;
use crate::key_id::{KeyId, LeaseId};
use crate::sealed::SealedLease;
use crate::suite::{KEY_BYTES, TAG_BYTES};

/// The plaintext is filled up to a multiple of this, so that its length does not tell whose key it is.
pub(crate) const BLOCK_BYTES: usize = 256;
/// Most blocks of a plaintext.
pub(crate) const MAX_BLOCKS: usize = 32;
/// Length of a signature.
pub(crate) const SIGNATURE_BYTES: usize = 64;

const MAGIC: &[u8; 4] = b"IOPL";
const VERSION: u8 = 1;
const SUITE: u8 = 1;
/// Eight names of one byte and one block.
const MIN_BYTES: usize = 86 + 8 * 2 + KEY_BYTES + 2 + TAG_BYTES + BLOCK_BYTES + SIGNATURE_BYTES;

const SEAL_CONTEXT: &[u8] = b"iop/credential-lease/v1/seal\0";
const AAD_CONTEXT: &[u8] = b"iop/credential-lease/v1/aad\0";
const SIGNATURE_CONTEXT: &[u8] = b"iop/credential-lease/v1/sig\0";

/// What a lease says, all of it public.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// Who signed it.
    pub issuer: KeyId,
    /// Whose key it is sealed to.
    pub recipient: KeyId,
    /// Its own name.
    pub id: LeaseId,
    /// When it was issued, in the Edge's Unix milliseconds.
    pub issued_at_ms: u64,
    /// From when on it is refused.
    pub expires_at_ms: u64,
    /// Version of the credential in its slot.
    pub revision: u64,
    /// Random stand-in of the connection's generation.
    pub generation: u64,
    /// What it is bound to by name.
    pub binding: Binding,
}

/// Bytes that are a lease by their form, and what they say.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) claims: Claims,
    pub(crate) claims_end: usize,
    pub(crate) enc: [u8; KEY_BYTES],
    pub(crate) sealed: Range<usize>,
}

impl Claims {
    /// The bytes up to the end of the names.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SealedLease::MAX_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[VERSION, SUITE]);
        for id in [self.issuer.as_bytes(), self.recipient.as_bytes(), self.id.as_bytes()] {
            out.extend_from_slice(id);
        }
        for number in [self.issued_at_ms, self.expires_at_ms, self.revision, self.generation] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        for (_, name) in self.binding.names() {
            // A name has at most 255 bytes.
            out.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
            out.extend_from_slice(name.as_bytes());
        }
        out
    }
}

/// `info` of HPKE: which suite, from whom, to whom.
pub(crate) fn seal_info(issuer: KeyId, recipient: KeyId) -> Vec<u8> {
    [SEAL_CONTEXT, &[VERSION, SUITE], issuer.as_bytes(), recipient.as_bytes()].concat()
}

/// What the ciphertext is bound to: everything before it but the encapsulated key, which HPKE binds itself.
pub(crate) fn seal_aad(claims: &[u8]) -> Vec<u8> {
    [AAD_CONTEXT, claims].concat()
}

/// What is signed: every byte before the signature.
pub(crate) fn signed_text(unsigned: &[u8]) -> Vec<u8> {
    [SIGNATURE_CONTEXT, unsigned].concat()
}

/// Joins the parts before the signature.
pub(crate) fn join(mut claims: Vec<u8>, enc: &[u8; KEY_BYTES], sealed: &[u8]) -> Vec<u8> {
    claims.extend_from_slice(enc);
    // At most 32 blocks and a tag.
    claims.extend_from_slice(&u16::try_from(sealed.len()).unwrap_or(u16::MAX).to_be_bytes());
    claims.extend_from_slice(sealed);
    claims
}

/// Length, magic, version and suite; then who says to have signed it.
pub(crate) fn read_issuer(bytes: &[u8]) -> Result<KeyId, LeaseError> {
    if !(MIN_BYTES..=SealedLease::MAX_BYTES).contains(&bytes.len()) {
        return Err(LeaseError::Malformed);
    }
    let mut from = Reader { rest: bytes };
    if from.array()? != *MAGIC {
        return Err(LeaseError::Malformed);
    }
    if from.array()? != [VERSION, SUITE] {
        return Err(LeaseError::UnsupportedVersion);
    }
    Ok(KeyId(from.array()?))
}

/// The bytes before the signature, and the signature.
pub(crate) fn split_signature(bytes: &[u8]) -> Result<(&[u8], [u8; SIGNATURE_BYTES]), LeaseError> {
    let (unsigned, signature) = bytes.split_last_chunk().ok_or(LeaseError::Malformed)?;
    Ok((unsigned, *signature))
}

/// Takes a lease apart. Says nothing about its signature; whoever calls this has checked it over the same bytes.
pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed, LeaseError> {
    let issuer = read_issuer(bytes)?;
    let mut from = Reader { rest: bytes };
    from.take(MAGIC.len() + 2 + issuer.as_bytes().len())?;
    let recipient = KeyId(from.array()?);
    let id = LeaseId(from.array()?);
    let mut number = || from.array().map(u64::from_be_bytes);
    let (issued_at_ms, expires_at_ms, revision, generation) = (number()?, number()?, number()?, number()?);
    let mut name = || -> Result<&str, LeaseError> {
        let [length] = from.array()?;
        std::str::from_utf8(from.take(usize::from(length))?).map_err(|_| LeaseError::Malformed)
    };
    let malformed = |_| LeaseError::Malformed;
    let binding = Binding {
        principal: PrincipalName::new(name()?).map_err(malformed)?,
        route: RouteName::new(name()?).map_err(malformed)?,
        slot: SlotName::new(name()?).map_err(malformed)?,
        profile: ProfileName::new(name()?).map_err(malformed)?,
        target: TargetName::new(name()?).map_err(malformed)?,
        node: NodeName::new(name()?).map_err(malformed)?,
        upstream: UpstreamOrigin::new(name()?).map_err(malformed)?,
        run: RunName::new(name()?).map_err(malformed)?,
    };
    let claims_end = bytes.len() - from.rest.len();
    let enc = from.array()?;
    let length = usize::from(u16::from_be_bytes(from.array()?));
    let blocks = length.checked_sub(TAG_BYTES).ok_or(LeaseError::Malformed)?;
    if blocks % BLOCK_BYTES != 0 || !(1..=MAX_BLOCKS).contains(&(blocks / BLOCK_BYTES)) {
        return Err(LeaseError::Malformed);
    }
    let start = bytes.len() - from.rest.len();
    from.take(length)?;
    if from.rest.len() != SIGNATURE_BYTES {
        return Err(LeaseError::Malformed);
    }
    let claims = Claims { issuer, recipient, id, issued_at_ms, expires_at_ms, revision, generation, binding };
    Ok(Parsed { claims, claims_end, enc, sealed: start..start + length })
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], LeaseError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(LeaseError::Malformed)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LeaseError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(LeaseError::Malformed)?;
        self.rest = rest;
        Ok(*taken)
    }
}
