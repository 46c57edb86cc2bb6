//! Decides how large a sealed lease may be, and that its bytes never print.

use std::fmt;

use bytes::Bytes;

/// A sealed lease as it travels: opaque bytes, bounded, never empty. Cheap to clone; cloning copies no secret, the bytes
/// are sealed.
#[derive(Clone, PartialEq, Eq)]
pub struct SealedLease(Bytes);

/// Bytes that can't be a lease: none at all, or more than [`SealedLease::MAX_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a sealed lease has 1 to {max} bytes, not {0}", max = SealedLease::MAX_BYTES)]
pub struct LeaseLength(
    /// The refused length, in bytes.
    pub usize,
);

impl SealedLease {
    /// Largest lease, in bytes: eight binding fields of 255 bytes and a padded secret of 8 KiB.
    pub const MAX_BYTES: usize = 10_440;

    /// Takes the bytes of a lease. Says nothing about whether they are a valid one.
    ///
    /// # Errors
    /// [`LeaseLength`] when there are none, or more than [`Self::MAX_BYTES`].
    pub fn new(bytes: impl Into<Bytes>) -> Result<Self, LeaseLength> {
        let bytes = bytes.into();
        if bytes.is_empty() || bytes.len() > Self::MAX_BYTES {
            return Err(LeaseLength(bytes.len()));
        }
        Ok(Self(bytes))
    }

    /// The sealed bytes, for the wire.
    #[must_use]
    pub const fn as_bytes(&self) -> &Bytes {
        &self.0
    }
}

impl fmt::Debug for SealedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealedLease[redacted]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_bounded_at_both_ends() {
        // CRD-1
        assert_eq!(SealedLease::new(Bytes::new()), Err(LeaseLength(0)));
        for len in [1, SealedLease::MAX_BYTES] {
            assert_eq!(SealedLease::new(vec![7; len]).map(|lease| lease.as_bytes().len()), Ok(len));
        }
        let over = SealedLease::MAX_BYTES + 1;
        assert_eq!(SealedLease::new(vec![7; over]), Err(LeaseLength(over)));
        assert_eq!(LeaseLength(over).to_string(), "a sealed lease has 1 to 10440 bytes, not 10441");
    }

    #[test]
    fn the_bytes_never_print() {
        // CRD-9
        let lease = SealedLease::new("SENTINEL").unwrap();
        assert_eq!(format!("{lease:?}"), "SealedLease[redacted]");
    }
}
