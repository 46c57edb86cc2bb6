//! Decides what a name may be that a lease is bound to: 1 to 255 bytes, each a visible ASCII character.
//!
//! The bound is that of the lease's byte format (one length byte per field), and the alphabet leaves no room for two
//! spellings of one name: no spaces, no control characters, no Unicode.

use std::fmt;
use std::net::Ipv6Addr;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::key_id::first_16;

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
            Self::RunId => "run_id",
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

impl UpstreamOrigin {
    /// The one spelling of an origin: scheme and host in lower case, the port always there, IPv6 in brackets.
    ///
    /// # Errors
    /// [`InvalidBinding`] as for [`Self::new`], and when a part holds what would make the text another origin.
    pub fn of(scheme: &str, host: &str, port: u16) -> Result<Self, InvalidBinding> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        let invalid = InvalidBinding { field: Self::FIELD };
        let ipv6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let host = if let Ok(address) = ipv6.parse::<Ipv6Addr>() {
            format!("[{address}]")
        } else if !host.is_empty() && host.bytes().all(plain) {
            host.to_ascii_lowercase()
        } else {
            return Err(invalid);
        };
        if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
            return Err(invalid);
        }
        Self::new(format!("{}://{host}:{port}", scheme.to_ascii_lowercase()))
    }
}

/// Everything a lease is bound to by name (CRD-2).
///
/// The Node fills what it expects from its own state wherever it has it: node, profile, target, upstream and slot from
/// its applied config. Only principal, route and run come with the request. Were all of them taken from the request, a
/// lease would be compared with itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// Who calls.
    pub principal: PrincipalName,
    /// Which ingress rule matched.
    pub route: RouteName,
    /// The stored credential.
    pub slot: SlotName,
    /// How the secret is applied to a request.
    pub profile: ProfileName,
    /// The model, as the provider knows it.
    pub target: TargetName,
    /// The Node that may use the secret.
    pub node: NodeName,
    /// Where the secret may be sent.
    pub upstream: UpstreamOrigin,
    /// The run it is for.
    pub run: RunName,
}

impl Binding {
    /// The names in the order of the byte format.
    pub(crate) fn names(&self) -> [(BindingField, &str); 8] {
        [
            (PrincipalName::FIELD, self.principal.as_str()),
            (RouteName::FIELD, self.route.as_str()),
            (SlotName::FIELD, self.slot.as_str()),
            (ProfileName::FIELD, self.profile.as_str()),
            (TargetName::FIELD, self.target.as_str()),
            (NodeName::FIELD, self.node.as_str()),
            (UpstreamOrigin::FIELD, self.upstream.as_str()),
            (RunName::FIELD, self.run.as_str()),
        ]
    }

    /// The first name that is another one, byte by byte.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<BindingField> {
        let pairs = self.names().into_iter().zip(other.names());
        pairs.into_iter().find(|((_, ours), (_, theirs))| ours != theirs).map(|((field, _), _)| field)
    }

    /// A short name of the whole binding for audit records, which must not repeat who asked for what.
    #[must_use]
    pub fn scope_hash(&self) -> ScopeHash {
        let mut hash = Sha256::new();
        hash.update(b"iop/scope/v1\0");
        for (_, name) in self.names() {
            // A name has at most 255 bytes.
            hash.update([u8::try_from(name.len()).unwrap_or(u8::MAX)]);
            hash.update(name);
        }
        ScopeHash(first_16(&hash.finalize()))
    }
}

/// Hash of a [`Binding`]; prints as hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScopeHash([u8; 16]);

impl fmt::Display for ScopeHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_one_spelling() {
        // CRD-2
        let origin =
            |scheme: &str, host: &str, port| UpstreamOrigin::of(scheme, host, port).map(|o| o.as_str().to_owned());
        assert_eq!(origin("HTTPS", "Api.Example.COM", 443).unwrap(), "https://api.example.com:443");
        assert_eq!(origin("http", "::1", 8080).unwrap(), origin("http", "[0:0::1]", 8080).unwrap());
        assert_eq!(origin("http", "::1", 8080).unwrap(), "http://[::1]:8080");
        for (scheme, host) in
            [("ftp", "a"), ("", "a"), ("http", ""), ("http", "a/b"), ("http", "u@h"), ("http", "a:1"), ("http", "a b")]
        {
            assert!(origin(scheme, host, 1).is_err(), "{scheme} {host}");
        }
    }

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
