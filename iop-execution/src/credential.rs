//! Decides how the credential of one call reaches its provider: as one header, which nothing prints.

use std::fmt;

use http::{HeaderName, HeaderValue};

/// A provider's key for one call and no other, as the header that carries it. Can't be cloned, compared or serialized; the
/// value is marked sensitive, so that no HTTP library prints or indexes it.
///
/// Whoever calls with it puts it on that one request, in place of any key of its own, and keeps nothing of it.
///
/// ```compile_fail
/// fn copied<T: Clone>() {}
/// copied::<iop_execution::CallCredential>();
/// ```
pub struct CallCredential {
    name: HeaderName,
    value: HeaderValue,
}

impl CallCredential {
    /// `None` if the two can't be a header.
    #[must_use]
    pub fn new(name: &str, value: &[u8]) -> Option<Self> {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        let mut value = HeaderValue::from_bytes(value).ok()?;
        value.set_sensitive(true);
        Some(Self { name, value })
    }

    /// The header's name.
    #[must_use]
    pub const fn name(&self) -> &HeaderName {
        &self.name
    }

    /// The header's whole value: the secret.
    #[must_use]
    pub const fn expose(&self) -> &HeaderValue {
        &self.value
    }
}

impl fmt::Debug for CallCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallCredential({})[redacted]", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_sensitive_and_never_prints() {
        // CRD-9
        let credential = CallCredential::new("x-api-key", b"SENTINEL").unwrap();
        assert_eq!((credential.name().as_str(), credential.expose().as_bytes()), ("x-api-key", &b"SENTINEL"[..]));
        assert!(credential.expose().is_sensitive());
        assert_eq!(format!("{credential:?}"), "CallCredential(x-api-key)[redacted]");
        assert!(!format!("{:?}", credential.expose()).contains("SENTINEL"));
        assert!(CallCredential::new("x y", b"v").is_none() && CallCredential::new("x", b"a\nb").is_none());
    }
}
