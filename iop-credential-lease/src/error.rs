//! Decides why a lease is refused: one closed list, and no refusal holds a byte of the lease.

use std::fmt;

use crate::binding::BindingField;

macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $label:literal, $text:literal;)*) => {
        /// Why a lease is refused. Every one of these is final: the lease is not tried again, and nothing stands in for it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(clippy::exhaustive_enums, reason = "the closed list of the specification")]
        pub enum LeaseError {
            $($(#[$doc])* $variant,)*
            /// It is bound to another name than the one expected.
            BindingMismatch(BindingField),
        }

        impl LeaseError {
            /// Every refusal but [`Self::BindingMismatch`], which there is one of for each [`BindingField`].
            pub const PLAIN: &'static [Self] = &[$(Self::$variant,)*];

            /// The name for logs and metric labels; the field is not a part of it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)*
                    Self::BindingMismatch(_) => "binding_mismatch",
                }
            }
        }

        impl fmt::Display for LeaseError {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    Self::BindingMismatch(field) => write!(f, "the lease is bound to another {field}"),
                }
            }
        }
    };
}

refusals! {
    /// It is not of the binary format.
    Malformed = "malformed", "the bytes are not a credential lease";
    /// Its version or suite is not known.
    UnsupportedVersion = "unsupported_version", "the lease is of a version this build does not know";
    /// No trusted issuer has that key.
    UnknownIssuer = "unknown_issuer", "the lease's issuer is not among the trusted ones";
    /// The signature is not the issuer's.
    BadSignature = "bad_signature", "the lease's signature is not its issuer's";
    /// It is sealed to another key.
    WrongRecipient = "wrong_recipient", "the lease is sealed to another connection's key";
    /// Its time has not begun.
    NotYetValid = "not_yet_valid", "the lease was issued in the future: check the clocks of Edge and Node";
    /// Its time is over.
    Expired = "expired", "the lease's time is over";
    /// It claims to be valid for longer than allowed.
    TtlTooLong = "ttl_too_long", "the lease is valid for longer than this Node allows";
    /// The slot has a newer credential.
    StaleRevision = "stale_revision", "the slot has a newer credential than the lease";
    /// It is of another connection.
    StaleGeneration = "stale_generation", "the lease is of an earlier connection";
    /// The credential was revoked.
    Revoked = "revoked", "the slot of the lease was revoked";
    /// The slot is disabled.
    Disabled = "disabled", "the slot of the lease is disabled";
    /// It was used before.
    Replayed = "replayed", "the lease was used before";
    /// No more leases can be remembered.
    ReplayStoreFull = "replay_store_full", "no more used leases can be remembered; retry when some have expired";
    /// It could not be decrypted, or what is in it is not a credential. One code, so that it tells nothing.
    OpenFailed = "open_failed", "the lease could not be opened";
    /// The Node does not know the Edge's time.
    ClockUnavailable = "clock_unavailable", "the Edge's time is not known before registration";
}

impl std::error::Error for LeaseError {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_list_is_closed_and_each_label_is_one_word_in_snake_case() {
        // CRD-5
        let labels: BTreeSet<_> = LeaseError::PLAIN.iter().map(|error| error.as_str()).collect();
        assert_eq!(labels.len(), 16, "sixteen, and binding mismatch");
        assert!(labels.iter().all(|label| label.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'_'))));
        let mismatch = LeaseError::BindingMismatch(BindingField::RunId);
        assert_eq!(
            (mismatch.as_str(), mismatch.to_string().as_str()),
            ("binding_mismatch", "the lease is bound to another run_id")
        );
    }
}
