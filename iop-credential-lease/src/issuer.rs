//! Decides who may sign a lease: the key in a file that only its owner reads, and the keys a Node trusts.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, EncodePrivateKey};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use zeroize::Zeroizing;

use crate::format::SIGNATURE_BYTES;
use crate::key_id::{KeyId, Purpose};
use crate::recipient::NoRandomness;

/// Most issuers a Node trusts at once: one, the next one while keys rotate, and room.
pub const MAX_TRUSTED_ISSUERS: usize = 8;

/// Largest key file, in bytes.
const MAX_FILE_BYTES: u64 = 4_096;

/// Why an issuer key can't be had from a file, or put into one. Never holds what is in the file.
#[derive(Debug, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "every way a key file can be wrong")]
pub enum KeyFileError {
    /// The system refused.
    #[error("the issuer key file can't be read or written")]
    Io(#[from] std::io::Error),
    /// Others may read or change it.
    #[error("the issuer key file has mode {0:o}; only its owner may have access: chmod 600")]
    Mode(
        /// The permission bits.
        u32,
    ),
    /// A folder, a device, or more than a key.
    #[error("the issuer key file is not a regular file of at most 4 KiB")]
    NotAKeyFile,
    /// Not the expected form.
    #[error("the issuer key file is not an Ed25519 key in PKCS#8 PEM")]
    NotPem,
    /// No new key can be made.
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
}

/// The key an Edge signs leases with; it signs nothing else. Zeroed when dropped; can't be copied, printed or serialized.
///
/// ```compile_fail
/// fn copied<T: Clone>() {}
/// copied::<iop_credential_lease::IssuerKey>();
/// ```
pub struct IssuerKey {
    key: SigningKey,
    id: KeyId,
}

impl IssuerKey {
    /// Reads the key from a PKCS#8 PEM file, as `openssl genpkey -algorithm ed25519` writes it. On Unix the file's mode
    /// must give nothing to group and others.
    ///
    /// # Errors
    /// [`KeyFileError`].
    pub fn load(path: &Path) -> Result<Self, KeyFileError> {
        let file = File::open(path)?;
        // Of the open file, so that it is the one that is read.
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
            return Err(KeyFileError::NotAKeyFile);
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = metadata.permissions().mode() & 0o7777;
            if mode & 0o077 != 0 {
                return Err(KeyFileError::Mode(mode));
            }
        }
        let mut pem = Zeroizing::new([0; MAX_FILE_BYTES as usize]);
        let mut length = 0;
        let mut file = file.take(MAX_FILE_BYTES);
        loop {
            match file.read(pem.get_mut(length..).unwrap_or_default())? {
                0 => break,
                read => length += read,
            }
        }
        let text = pem.get(..length).and_then(|text| std::str::from_utf8(text).ok()).ok_or(KeyFileError::NotPem)?;
        SigningKey::from_pkcs8_pem(text).map(Self::new).map_err(|_| KeyFileError::NotPem)
    }

    /// Makes a key and writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// [`KeyFileError`], also when there is such a file already. Nothing else is left at `path`.
    pub fn create(path: &Path) -> Result<Self, KeyFileError> {
        let key = Self::generate()?;
        let pem = key.key.to_pkcs8_pem(LineEnding::LF).map_err(|_| KeyFileError::NotPem)?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        {
            use std::os::unix::fs::OpenOptionsExt;
            options.mode(0o600);
        }
        let mut file = options.open(path)?;
        if let Err(error) = file.write_all(pem.as_bytes()).and_then(|()| file.sync_all()) {
            // Half a key would stand in the way of the next try.
            let _best_effort = std::fs::remove_file(path);
            return Err(error.into());
        }
        Ok(key)
    }

    /// A new key that is in no file: for tests and for an Edge whose Nodes learn it at registration.
    ///
    /// # Errors
    /// [`NoRandomness`].
    pub fn generate() -> Result<Self, NoRandomness> {
        let mut seed = Zeroizing::new([0; 32]);
        getrandom::fill(seed.as_mut_slice()).map_err(|_| NoRandomness)?;
        Ok(Self::from_seed(&seed))
    }

    pub(crate) fn from_seed(seed: &[u8; 32]) -> Self {
        Self::new(SigningKey::from_bytes(seed))
    }

    fn new(key: SigningKey) -> Self {
        let id = KeyId::of(Purpose::Issuer, key.verifying_key().as_bytes());
        Self { key, id }
    }

    /// The public key, for the Nodes.
    #[must_use]
    pub fn public_bytes(&self) -> [u8; 32] {
        self.key.verifying_key().to_bytes()
    }

    /// Its name.
    #[must_use]
    pub const fn id(&self) -> KeyId {
        self.id
    }

    pub(crate) fn sign(&self, text: &[u8]) -> [u8; SIGNATURE_BYTES] {
        self.key.sign(text).to_bytes()
    }
}

impl fmt::Debug for IssuerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IssuerKey({})[redacted]", self.id)
    }
}

/// Why a list of issuers is refused as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "every way a list of issuers can be wrong")]
pub enum UntrustedIssuer {
    /// More than [`MAX_TRUSTED_ISSUERS`].
    #[error("a Node trusts at most {MAX_TRUSTED_ISSUERS} issuers; take out those that no longer sign")]
    TooMany,
    /// Not an Ed25519 public key, or not in its one spelling.
    #[error("an issuer key is not an Ed25519 public key")]
    NotAKey,
    /// A point of low order, under which a signature says nothing.
    #[error("an issuer key is of low order: signatures under it prove nothing")]
    Weak,
}

/// The issuers whose leases a Node takes. To rotate, replace it by one that has the old key and the new, let the Edge
/// switch, and after the longest lease by one without the old key.
#[derive(Clone, Default)]
pub struct TrustedIssuers(Vec<(KeyId, VerifyingKey)>);

impl TrustedIssuers {
    /// Takes the public keys; one that is given twice counts once.
    ///
    /// # Errors
    /// [`UntrustedIssuer`] when one of them is not to be trusted; then none is.
    pub fn new(keys: impl IntoIterator<Item = [u8; 32]>) -> Result<Self, UntrustedIssuer> {
        let mut trusted: Vec<(KeyId, VerifyingKey)> = Vec::new();
        for bytes in keys {
            let key = VerifyingKey::from_bytes(&bytes).map_err(|_| UntrustedIssuer::NotAKey)?;
            if key.is_weak() {
                return Err(UntrustedIssuer::Weak);
            }
            if key.to_edwards().compress().to_bytes() != bytes {
                return Err(UntrustedIssuer::NotAKey);
            }
            let id = KeyId::of(Purpose::Issuer, &bytes);
            if trusted.iter().any(|(known, _)| *known == id) {
                continue;
            }
            if trusted.len() == MAX_TRUSTED_ISSUERS {
                return Err(UntrustedIssuer::TooMany);
            }
            trusted.push((id, key));
        }
        Ok(Self(trusted))
    }

    /// Their names, for the Edge to see which are in force.
    pub fn ids(&self) -> impl Iterator<Item = KeyId> + '_ {
        self.0.iter().map(|(id, _)| *id)
    }

    pub(crate) fn trusts(&self, issuer: KeyId) -> bool {
        self.0.iter().any(|(id, _)| *id == issuer)
    }

    /// Whether the issuer signed the text; `None` when it is not trusted at all.
    pub(crate) fn signed(&self, issuer: KeyId, text: &[u8], signature: &[u8; SIGNATURE_BYTES]) -> Option<bool> {
        let (_, key) = self.0.iter().find(|(id, _)| *id == issuer)?;
        Some(key.verify_strict(text, &Signature::from_bytes(signature)).is_ok())
    }
}

impl fmt::Debug for TrustedIssuers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.ids()).finish()
    }
}

#[cfg(test)]
mod tests;
