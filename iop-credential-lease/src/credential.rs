//! Decides what a credential is: a bearer token or one named header, and how it lies in a lease.
//!
//! Plaintext: kind (1 bearer, 2 header), length as `u16`, secret, zeros up to a multiple of 256. The secret of kind 2 is
//! the length of the name as one byte, the name in lower case, and the value.

use std::fmt;

use zeroize::Zeroizing;

use crate::binding::UpstreamOrigin;
use crate::format::{BLOCK_BYTES, MAX_BLOCKS};
use crate::key_id::LeaseId;

/// Longest secret, in bytes; for a header that is its name, one byte and its value.
pub const MAX_SECRET_BYTES: usize = BLOCK_BYTES * MAX_BLOCKS - HEAD_BYTES;

/// Longest name of a header, in bytes.
pub const MAX_HEADER_NAME_BYTES: usize = 64;

const HEAD_BYTES: usize = 3;
const KIND_BEARER: u8 = 1;
const KIND_HEADER: u8 = 2;
const BEARER_PREFIX: &[u8] = b"Bearer ";

/// Headers that frame a message or name its receiver: a credential in one of these would be another request.
const FRAMING: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A text that can't be a credential. Holds no part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "every rule a credential must keep")]
pub enum InvalidCredential {
    /// Empty, or longer than fits.
    #[error("a credential has 1 to {MAX_SECRET_BYTES} bytes")]
    Length,
    /// A byte that can't stand in a header.
    #[error("a credential holds visible ASCII characters only; look for a line end or a space in the file or variable")]
    Bytes,
    /// A name that can't be a header's, or must not carry a credential.
    #[error(
        "the header of a credential has 1 to 64 lower-case letters, digits, '-' or '_', and is not one that frames a message"
    )]
    HeaderName,
}

/// A provider's key on its way into a lease. Zeroed when dropped; can't be copied, compared, printed or serialized.
///
/// ```compile_fail
/// fn copied<T: Clone>() {}
/// copied::<iop_credential_lease::ProviderCredential>();
/// ```
pub struct ProviderCredential {
    plaintext: Zeroizing<Vec<u8>>,
}

impl ProviderCredential {
    /// A token for `Authorization: Bearer`.
    ///
    /// # Errors
    /// [`InvalidCredential`] when it is empty, too long, or holds anything but visible ASCII.
    pub fn bearer(token: &[u8]) -> Result<Self, InvalidCredential> {
        check_length(token.len())?;
        if !is_token(token) {
            return Err(InvalidCredential::Bytes);
        }
        Ok(Self { plaintext: padded(KIND_BEARER, &[token]) })
    }

    /// The value of a header of that name, which is in lower case.
    ///
    /// # Errors
    /// [`InvalidCredential`] when the name can't carry a credential, or the value is empty, too long, has a byte that is
    /// not ASCII text, or begins or ends with a space.
    pub fn header(name: &str, value: &[u8]) -> Result<Self, InvalidCredential> {
        if !is_header_name(name.as_bytes()) {
            return Err(InvalidCredential::HeaderName);
        }
        if value.is_empty() {
            return Err(InvalidCredential::Length);
        }
        check_length(1 + name.len() + value.len())?;
        if !is_header_value(value) {
            return Err(InvalidCredential::Bytes);
        }
        // At most 64.
        let length = [u8::try_from(name.len()).unwrap_or(u8::MAX)];
        Ok(Self { plaintext: padded(KIND_HEADER, &[&length, name.as_bytes(), value]) })
    }

    pub(crate) fn plaintext(&self) -> &[u8] {
        &self.plaintext
    }
}

impl fmt::Debug for ProviderCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProviderCredential[redacted]")
    }
}

/// A provider's key out of a lease: one header for one call to one origin. Zeroed when dropped; can't be copied,
/// compared, printed or serialized. Buffers of an HTTP library that take its bytes are not zeroed.
///
/// ```compile_fail
/// fn copied<T: Clone>() {}
/// copied::<iop_credential_lease::OpenedCredential>();
/// ```
///
/// ```compile_fail
/// fn compared<T: PartialEq>() {}
/// compared::<iop_credential_lease::OpenedCredential>();
/// ```
///
/// ```compile_fail
/// fn shown<T: std::fmt::Display>() {}
/// shown::<iop_credential_lease::OpenedCredential>();
/// ```
pub struct OpenedCredential {
    name: String,
    value: Zeroizing<Vec<u8>>,
    upstream: UpstreamOrigin,
    lease: LeaseId,
}

impl OpenedCredential {
    /// `None` when the plaintext is not exactly what [`ProviderCredential`] makes.
    pub(crate) fn from_plaintext(plaintext: &[u8], upstream: UpstreamOrigin, lease: LeaseId) -> Option<Self> {
        let (&[kind, high, low], rest) = plaintext.split_first_chunk()?;
        let (secret, padding) = rest.split_at_checked(usize::from(u16::from_be_bytes([high, low])))?;
        if padding.len() >= BLOCK_BYTES || padding.iter().any(|byte| *byte != 0) {
            return None;
        }
        let (name, prefix, value): (&[u8], &[u8], &[u8]) = match kind {
            KIND_BEARER if is_token(secret) => (b"authorization", BEARER_PREFIX, secret),
            KIND_HEADER => {
                let (length, rest) = secret.split_first()?;
                let (name, value) = rest.split_at_checked(usize::from(*length))?;
                (is_header_name(name) && is_header_value(value)).then_some((name, &[][..], value))?
            }
            _ => return None,
        };
        // Room for all of it from the start: a vector that grows leaves its old bytes behind.
        let mut whole = Zeroizing::new(Vec::with_capacity(prefix.len() + value.len()));
        whole.extend_from_slice(prefix);
        whole.extend_from_slice(value);
        Some(Self { name: std::str::from_utf8(name).ok()?.to_owned(), value: whole, upstream, lease })
    }

    /// Name of the header, in lower case.
    #[must_use]
    pub fn header_name(&self) -> &str {
        &self.name
    }

    /// The only origin it may be sent to.
    #[must_use]
    pub const fn upstream(&self) -> &UpstreamOrigin {
        &self.upstream
    }

    /// The lease it came in, for records.
    #[must_use]
    pub const fn lease(&self) -> LeaseId {
        self.lease
    }

    /// The whole value of the header: the secret. Mark the header value as sensitive.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.value
    }
}

impl fmt::Debug for OpenedCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenedCredential({})[redacted]", self.name)
    }
}

const fn check_length(length: usize) -> Result<(), InvalidCredential> {
    if length == 0 || length > MAX_SECRET_BYTES { Err(InvalidCredential::Length) } else { Ok(()) }
}

fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_graphic)
}

fn is_header_value(text: &[u8]) -> bool {
    let at_the_ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_graphic);
    text.iter().all(|byte| matches!(byte, 0x20..=0x7e)) && at_the_ends(text.first()) && at_the_ends(text.last())
}

fn is_header_name(name: &[u8]) -> bool {
    (1..=MAX_HEADER_NAME_BYTES).contains(&name.len())
        && name.iter().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
        && FRAMING.iter().all(|framing| framing.as_bytes() != name)
}

fn padded(kind: u8, secret: &[&[u8]]) -> Zeroizing<Vec<u8>> {
    let length: usize = secret.iter().map(|part| part.len()).sum();
    let whole = (HEAD_BYTES + length).next_multiple_of(BLOCK_BYTES);
    let mut out = Zeroizing::new(Vec::with_capacity(whole));
    out.push(kind);
    // Checked: at most MAX_SECRET_BYTES.
    out.extend_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
    for part in secret {
        out.extend_from_slice(part);
    }
    out.resize(whole, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(plaintext: &[u8]) -> Option<(String, Vec<u8>)> {
        let upstream = UpstreamOrigin::of("https", "api.example.com", 443).unwrap();
        let opened = OpenedCredential::from_plaintext(plaintext, upstream, LeaseId([0; 16]))?;
        Some((opened.header_name().to_owned(), opened.expose().to_vec()))
    }

    #[test]
    fn each_kind_comes_out_as_the_header_it_is() {
        // CRD-1
        let bearer = ProviderCredential::bearer(b"sk-1").unwrap();
        assert_eq!(bearer.plaintext().len(), 256);
        assert_eq!(opened(bearer.plaintext()), Some(("authorization".to_owned(), b"Bearer sk-1".to_vec())));
        let header = ProviderCredential::header("x-api-key", b"Key one").unwrap();
        assert_eq!(opened(header.plaintext()), Some(("x-api-key".to_owned(), b"Key one".to_vec())));
        for (length, blocks) in [(1, 1), (253, 1), (254, 2), (MAX_SECRET_BYTES, MAX_BLOCKS)] {
            let token = vec![b'k'; length];
            let bearer = ProviderCredential::bearer(&token).unwrap();
            assert_eq!(bearer.plaintext().len(), blocks * BLOCK_BYTES);
            assert_eq!(opened(bearer.plaintext()).unwrap().1.len(), BEARER_PREFIX.len() + length);
        }
    }

    #[test]
    fn what_can_not_be_a_header_is_refused_before_it_is_sealed() {
        // CRD-9
        let long = vec![b'k'; MAX_SECRET_BYTES + 1];
        for (token, error) in [
            (&b""[..], InvalidCredential::Length),
            (&long, InvalidCredential::Length),
            (b"sk 1", InvalidCredential::Bytes),
            (b"sk\n", InvalidCredential::Bytes),
            ("ß".as_bytes(), InvalidCredential::Bytes),
        ] {
            assert_eq!(ProviderCredential::bearer(token).unwrap_err(), error);
        }
        for name in ["", "X-Key", "x key", "host", "transfer-encoding", "content-length", &"n".repeat(65)] {
            assert_eq!(ProviderCredential::header(name, b"v").unwrap_err(), InvalidCredential::HeaderName, "{name}");
        }
        for value in [&b" v"[..], b"v ", b"a\r\nb"] {
            assert_eq!(ProviderCredential::header("x-key", value).unwrap_err(), InvalidCredential::Bytes);
        }
        assert_eq!(ProviderCredential::header("x-key", b"").unwrap_err(), InvalidCredential::Length);
        assert_eq!(ProviderCredential::header("x-key", &long[6..]).unwrap_err(), InvalidCredential::Length);
    }

    #[test]
    fn a_plaintext_has_one_encoding() {
        // CRD-1
        let good = ProviderCredential::bearer(b"sk-1").unwrap();
        let changed = |change: fn(&mut Vec<u8>)| {
            let mut plaintext = good.plaintext().to_vec();
            change(&mut plaintext);
            opened(&plaintext)
        };
        assert!(changed(|_| {}).is_some());
        let changes: [fn(&mut Vec<u8>); 9] = [
            |text| text[0] = 0,
            |text| text[0] = 3,
            |text| text[0] = 2,
            |text| text[2] = 0,
            |text| text[2] = 5,
            |text| text[1] = 1,
            |text| text[255] = 1,
            |text| text.resize(512, 0),
            |text| text.truncate(2),
        ];
        for (n, change) in changes.into_iter().enumerate() {
            assert_eq!(changed(change), None, "change {n}");
        }
    }

    #[test]
    fn nothing_of_a_secret_prints() {
        // CRD-9
        let credential = ProviderCredential::header("x-key", b"SENTINEL").unwrap();
        let upstream = UpstreamOrigin::of("https", "api.example.com", 443).unwrap();
        let opened = OpenedCredential::from_plaintext(credential.plaintext(), upstream, LeaseId([0; 16])).unwrap();
        assert_eq!(opened.expose(), b"SENTINEL");
        assert_eq!(
            format!("{credential:?} {opened:?}"),
            "ProviderCredential[redacted] OpenedCredential(x-key)[redacted]"
        );
        for error in [InvalidCredential::Length, InvalidCredential::Bytes, InvalidCredential::HeaderName] {
            assert!(!format!("{error:?}{error}").contains("SENTINEL"));
        }
    }
}
