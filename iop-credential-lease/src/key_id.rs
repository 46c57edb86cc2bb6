//! Decides how a key is named: by a hash of what it is for and of its public bytes.

use std::fmt;

use sha2::{Digest, Sha256};

const CONTEXT: &[u8] = b"iop/kid/v1\0";

/// What a key is for; the same bytes have another id for each purpose.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Issuer = 0x01,
    Recipient = 0x02,
}

/// Name of a public key: public, comparable, never enough to trust it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(pub(crate) [u8; 16]);

impl KeyId {
    pub(crate) fn of(purpose: Purpose, public: &[u8; 32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(CONTEXT);
        hash.update([purpose as u8]);
        hash.update(public);
        Self(first_16(&hash.finalize()))
    }

    /// The bytes that stand in a lease.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// Name of one lease: 16 random bytes, for records of who used what.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub(crate) [u8; 16]);

impl LeaseId {
    /// The bytes that stand in a lease.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

pub(crate) fn first_16(bytes: &[u8]) -> [u8; 16] {
    let mut first = [0; 16];
    for (to, from) in first.iter_mut().zip(bytes) {
        *to = *from;
    }
    first
}

macro_rules! hex_text {
    ($($name:ident)*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
    )*};
}

hex_text! { KeyId LeaseId }
