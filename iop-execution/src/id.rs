//! Decides what a valid name is: newtypes for every id that crosses a boundary, parsed once.

use std::fmt;
use std::sync::Arc;

/// Longest name of any kind, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// A name that was refused, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid {kind}: {problem}")]
pub struct InvalidName {
    /// What the name was meant to be, for people.
    pub kind: &'static str,
    /// What is wrong with it.
    pub problem: NameProblem,
}

/// What is wrong with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameProblem {
    /// Holds a control character.
    #[error("it holds a control character")]
    Control,
    /// Empty.
    #[error("it is empty")]
    Empty,
    /// Longer than [`MAX_NAME_BYTES`].
    #[error("it is longer than 256 bytes")]
    TooLong,
}

fn check(kind: &'static str, text: &str) -> Result<(), InvalidName> {
    let problem = if text.is_empty() {
        NameProblem::Empty
    } else if text.len() > MAX_NAME_BYTES {
        NameProblem::TooLong
    } else if text.chars().any(char::is_control) {
        NameProblem::Control
    } else {
        return Ok(());
    };
    Err(InvalidName { kind, problem })
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident = $kind:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// 1 to 256 bytes of UTF-8 without control characters; cheap to clone.
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses a name.
            ///
            /// # Errors
            /// [`InvalidName`] when it is empty, too long, or holds a control character.
            pub fn new(text: impl AsRef<str>) -> Result<Self, InvalidName> {
                let text = text.as_ref();
                check($kind, text)?;
                Ok(Self(Arc::from(text)))
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    )*};
}

names! {
    /// Name of one configured adapter instance, unique on its Node. Requests and evidence carry the key, never the kind.
    AdapterKey = "adapter key";
    /// Public name that clients ask for.
    ModelName = "model name";
    /// A Node, as the Edge's configuration names it.
    NodeId = "node id";
    /// Who calls: the owner of an API key.
    Principal = "principal";
    /// One configured adapter instance on one Node; capacity belongs to it.
    ProviderId = "provider id";
    /// Opaque correlation value of a caller. Equal values share nothing and never influence selection (EXE-3).
    SessionId = "session id";
    /// The exact model name as a provider knows it.
    Target = "target";
}

/// 128 random bits that name one run or tunnel for its whole life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId([u8; 16]);

impl RunId {
    /// The id with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// A fresh random id.
    ///
    /// # Errors
    /// When the operating system gives no randomness.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The id's bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_once_at_the_border() {
        // WIR-4
        assert!(Target::new("meta-llama/Llama-3.1:8b").is_ok());
        for (text, problem) in [("", NameProblem::Empty), ("a\nb", NameProblem::Control)] {
            assert_eq!(NodeId::new(text).map_err(|e| e.problem), Err(problem));
        }
        assert_eq!(NodeId::new("x".repeat(257)).map_err(|e| e.problem), Err(NameProblem::TooLong));
        assert!(NodeId::new("x".repeat(256)).is_ok());
    }

    #[test]
    fn run_ids_print_as_hex() {
        assert_eq!(RunId::from_bytes([0xab; 16]).to_string(), "ab".repeat(16));
    }
}
