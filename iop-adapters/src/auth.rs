//! Decides where a provider's own key comes from: a reference that the Node resolves in its own environment.
//!
//! Only the reference travels and is stored; the value lives here, is marked sensitive, and is printed by nothing.

use std::ffi::OsString;
use std::fmt;
use std::io::Read;
use std::path::Path;

use http::HeaderValue;

/// Longest key that is read, in bytes.
const MAX_KEY_BYTES: u64 = 8 * 1024;

/// Where a provider's key is to be found: `env:NAME` or `file:PATH` (CRD-16).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AuthReference {
    /// An environment variable of the Node.
    Env(String),
    /// A file on the Node. White space around its content is not part of the key.
    File(String),
}

/// Why a key reference can't be used. Names the reference, never a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// The reference is neither `env:NAME` nor `file:PATH`. It may hold a key by mistake, so it is not repeated.
    #[error("the key reference is neither env:NAME nor file:PATH")]
    BadReference,
    /// There is nothing at the reference.
    #[error("{reference} is missing or can't be read")]
    Missing {
        /// Which reference.
        reference: AuthReference,
    },
    /// What is there is no key: empty, longer than 8 KiB, or not visible ASCII.
    #[error("{reference} holds no usable key")]
    Unusable {
        /// Which reference.
        reference: AuthReference,
    },
}

impl fmt::Display for AuthReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{path}"),
        }
    }
}

impl AuthReference {
    /// Parses a reference.
    ///
    /// # Errors
    /// [`AuthError::BadReference`].
    pub fn parse(text: &str) -> Result<Self, AuthError> {
        match text.split_once(':') {
            Some(("env", name)) if is_variable_name(name) => Ok(Self::Env(name.to_owned())),
            Some(("file", path)) if !path.is_empty() && !path.contains(char::is_control) => {
                Ok(Self::File(path.to_owned()))
            }
            _ => Err(AuthError::BadReference),
        }
    }

    /// Reads the key from this process's environment, once.
    ///
    /// # Errors
    /// [`AuthError`] when there is none, or nothing that can be a key.
    pub fn resolve(&self) -> Result<Bearer, AuthError> {
        self.resolve_with(|name| std::env::var_os(name))
    }

    fn resolve_with(&self, variable: impl FnOnce(&str) -> Option<OsString>) -> Result<Bearer, AuthError> {
        let missing = || AuthError::Missing { reference: self.clone() };
        let unusable = || AuthError::Unusable { reference: self.clone() };
        let key = match self {
            Self::Env(name) => variable(name).ok_or_else(missing)?.into_string().map_err(|_| unusable())?,
            Self::File(path) => read_key(Path::new(path)).map_err(|_| missing())?,
        };
        let key = key.trim();
        if key.is_empty() || key.len() as u64 > MAX_KEY_BYTES || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(unusable());
        }
        let mut header = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| unusable())?;
        header.set_sensitive(true);
        Ok(Bearer(header))
    }
}

fn is_variable_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn read_key(path: &Path) -> std::io::Result<String> {
    let mut key = String::new();
    std::fs::File::open(path)?.take(MAX_KEY_BYTES + 1).read_to_string(&mut key)?;
    Ok(key)
}

/// A resolved key, as the header that carries it.
#[derive(Clone)]
pub struct Bearer(HeaderValue);

impl Bearer {
    /// The value of the `authorization` header, marked sensitive.
    pub(crate) const fn header(&self) -> &HeaderValue {
        &self.0
    }
}

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_parsed_strictly_and_never_repeated_when_wrong() {
        // CRD-16: someone pastes the key itself
        for text in ["", "sk-SENTINEL", "env:", "env:A B", "file:", "ENV:A", "http:SENTINEL", "env:A=B", "file:a\nb"] {
            let error = AuthReference::parse(text).unwrap_err();
            assert_eq!(error, AuthError::BadReference, "{text}");
            assert!(!format!("{error} {error:?}").contains("SENTINEL"));
        }
        assert_eq!(AuthReference::parse("env:KEY_1"), Ok(AuthReference::Env("KEY_1".into())));
        assert_eq!(AuthReference::parse("file:/run/key"), Ok(AuthReference::File("/run/key".into())));
    }

    #[test]
    fn keys_are_read_from_the_environment_and_printed_nowhere() {
        // CRD-16
        let reference = AuthReference::parse("env:KEY").unwrap();
        let resolve = |value: Option<&str>| reference.resolve_with(|_| value.map(Into::into));
        let bearer = resolve(Some(" SENTINEL\n")).unwrap();
        assert_eq!(bearer.header(), "Bearer SENTINEL");
        assert!(bearer.header().is_sensitive());
        assert!(!format!("{bearer:?} {:?}", bearer.header()).contains("SENTINEL"));
        assert_eq!(resolve(None).unwrap_err().to_string(), "env:KEY is missing or can't be read");
        for value in ["", "  ", "SENT INEL", "SENTINÉL", &"x".repeat(9000)] {
            let error = resolve(Some(value)).unwrap_err();
            assert_eq!(error.to_string(), "env:KEY holds no usable key");
            assert!(!format!("{error:?}").contains("SENT"));
        }
    }

    #[test]
    fn keys_are_read_from_a_file() {
        // CRD-16
        let path = std::env::temp_dir().join(format!("iop-auth-{}", std::process::id()));
        std::fs::write(&path, "SENTINEL\n").unwrap();
        let reference = AuthReference::parse(&format!("file:{}", path.display())).unwrap();
        assert_eq!(reference.resolve().unwrap().header(), "Bearer SENTINEL");
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(reference.resolve(), Err(AuthError::Missing { .. })));
    }
}
