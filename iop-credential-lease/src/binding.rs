//! Decides what a name may be that a lease is bound to: 1 to 255 bytes, each a visible ASCII character.
//!
//! The bound is that of the lease's byte format (one length byte per field), and the alphabet leaves no room for two
//! spellings of one name: no spaces, no control characters, no Unicode.

use std::fmt;
use std::sync::Arc;

/// Longest name, in bytes.
pub const MAX_BINDING_BYTES: usize = 255;

/// Which of the bound names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(clippy::exhaustive_enums, reason = "the closed list of what a lease binds by name")]
pub enum BindingField {
    /// The Node that may use the secret.
    Node,
    /// Who calls.
    Principal,
    /// How the secret is applied to a request.
    Profile,
    /// Which ingress rule matched.
    Route,
    /// The run it is for.
    RunId,
    /// The stored credential.
    Slot,
    /// The model.
    Target,
    /// Where the secret may be sent.
    Upstream,
}

impl BindingField {
    /// The name used in errors and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Principal => "principal",
            Self::Profile => "profile",
            Self::Route => "route",
            Self::RunId => "run id",
            Self::Slot => "slot",
            Self::Target => "target",
            Self::Upstream => "upstream",
        }
    }
}

impl fmt::Display for BindingField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A text that can't be bound. Holds no part of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the {field} of a lease must be 1 to 255 visible ASCII characters")]
pub struct InvalidBinding {
    /// Which name it was meant to be.
    pub field: BindingField,
}

const fn is_bindable(text: &[u8]) -> bool {
    if text.is_empty() || text.len() > MAX_BINDING_BYTES {
        return false;
    }
    let mut at = 0;
    while at < text.len() {
        if !matches!(text[at], 0x21..=0x7e) {
            return false;
        }
        at += 1;
    }
    true
}

macro_rules! bindings {
    ($($(#[$doc:meta])* $name:ident = $field:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// 1 to 255 bytes, each `0x21..=0x7e`; cheap to clone.
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Which field of a lease this is.
            pub const FIELD: BindingField = BindingField::$field;

            /// Takes a name that can be bound.
            ///
            /// # Errors
            /// [`InvalidBinding`] when it is empty, longer than 255 bytes, or holds a byte outside `0x21..=0x7e`.
            pub fn new(text: impl AsRef<str>) -> Result<Self, InvalidBinding> {
                let text = text.as_ref();
                if is_bindable(text.as_bytes()) { Ok(Self(Arc::from(text))) } else { Err(InvalidBinding { field: Self::FIELD }) }
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

bindings! {
    /// The Node that may use the secret.
    NodeName = Node;
    /// Who calls.
    PrincipalName = Principal;
    /// How the secret is applied to a request.
    ProfileName = Profile;
    /// Which ingress rule matched.
    RouteName = Route;
    /// The run a lease is for, as text.
    RunName = RunId;
    /// The stored credential.
    SlotName = Slot;
    /// The model, as the provider knows it.
    TargetName = Target;
    /// Where the secret may be sent: scheme, host and port.
    UpstreamOrigin = Upstream;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_single_byte_is_judged_by_the_alphabet() {
        // CRD-2
        for byte in 0..=0x7f_u8 {
            let text = char::from(byte).to_string();
            assert_eq!(SlotName::new(&text).is_ok(), (0x21..=0x7e).contains(&byte), "{byte:#x}");
            assert_eq!(SlotName::new(format!("a{text}b")).is_ok(), (0x21..=0x7e).contains(&byte), "{byte:#x}");
        }
        assert!(TargetName::new("modèle").is_err());
    }

    #[test]
    fn the_length_fits_one_length_byte() {
        // CRD-1
        assert!(NodeName::new("").is_err());
        assert!(NodeName::new("n".repeat(255)).is_ok());
        assert!(NodeName::new("n".repeat(256)).is_err());
    }

    #[test]
    fn a_refusal_names_the_field_and_never_the_text() {
        // CRD-9
        let error = PrincipalName::new("SENT INEL").unwrap_err();
        assert_eq!(error, InvalidBinding { field: BindingField::Principal });
        assert_eq!(error.to_string(), "the principal of a lease must be 1 to 255 visible ASCII characters");
        let fields = [
            PrincipalName::FIELD,
            RouteName::FIELD,
            SlotName::FIELD,
            ProfileName::FIELD,
            TargetName::FIELD,
            NodeName::FIELD,
            UpstreamOrigin::FIELD,
            RunName::FIELD,
        ];
        let mut names: Vec<_> = fields.iter().map(|field| field.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 8);
    }
}
