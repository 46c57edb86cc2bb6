//! Decides which web pages of other origins may read answers: those of a list, which is empty by default (SEC-4).
//!
//! A page must show its key as everybody does: answers never allow credentials that a browser adds by itself.

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ALLOW, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Uri};

/// Most origins of a list.
pub const MAX_ORIGINS: usize = 64;
/// Longest list of headers that a page asks for, in bytes.
const MAX_ASKED: usize = 1024;
/// What a page may read beside the body.
const EXPOSED: HeaderValue =
    HeaderValue::from_static("x-request-id, openai-processing-ms, retry-after, retry-after-ms");
/// For how long a browser may remember what a page may ask, in seconds.
const REMEMBERED: HeaderValue = HeaderValue::from_static("600");

/// A text that is no origin of a web page.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it is no origin like https://app.example or http://localhost:3000, and not `*`")]
pub struct InvalidOrigin;

/// Origins whose pages may read answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedOrigins {
    any: bool,
    origins: Vec<HeaderValue>,
}

impl AllowedOrigins {
    /// These, exactly; `*` = all.
    ///
    /// # Errors
    /// [`InvalidOrigin`], also for more than [`MAX_ORIGINS`].
    pub fn new<T: AsRef<str>>(origins: impl IntoIterator<Item = T>) -> Result<Self, InvalidOrigin> {
        let mut allowed = Self::default();
        for origin in origins {
            match origin.as_ref() {
                "*" => allowed.any = true,
                origin => allowed.origins.push(checked(origin)?),
            }
        }
        if allowed.origins.len() > MAX_ORIGINS { Err(InvalidOrigin) } else { Ok(allowed) }
    }

    /// No page of another origin may read anything.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        !self.any && self.origins.is_empty()
    }

    /// What a request's page is told: `None` for pages that may read nothing, and for everybody who is no page.
    fn of(&self, asked: &HeaderMap) -> Option<HeaderValue> {
        let origin = asked.get(ORIGIN)?;
        if self.any {
            Some(HeaderValue::from_static("*"))
        } else {
            Some(origin.clone()).filter(|o| self.origins.contains(o))
        }
    }

    /// Adds what a browser needs to an answer.
    pub(crate) fn mark(&self, asked: &HeaderMap, answer: &mut HeaderMap) {
        if self.is_closed() {
            return;
        }
        // Also for pages that may not: a cache must not give them the answer of another one.
        answer.append(VARY, HeaderValue::from_static("origin"));
        let Some(origin) = self.of(asked) else { return };
        answer.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        answer.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        // The question before a request, to which `Allow` is the answer.
        let Some(methods) = answer.get(ALLOW).filter(|_| asked.contains_key(ACCESS_CONTROL_REQUEST_METHOD)).cloned()
        else {
            return;
        };
        answer.insert(ACCESS_CONTROL_ALLOW_METHODS, methods);
        answer.insert(ACCESS_CONTROL_MAX_AGE, REMEMBERED);
        if let Some(headers) = asked.get(ACCESS_CONTROL_REQUEST_HEADERS).filter(|value| is_list_of_names(value)) {
            answer.insert(ACCESS_CONTROL_ALLOW_HEADERS, headers.clone());
        }
    }
}

fn checked(origin: &str) -> Result<HeaderValue, InvalidOrigin> {
    let uri: Uri = origin.parse().map_err(|_| InvalidOrigin)?;
    let is_origin = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        && matches!(uri.path_and_query().map(http::uri::PathAndQuery::as_str), None | Some("/"))
        && !origin.ends_with('/')
        && origin.bytes().all(|byte| !byte.is_ascii_uppercase());
    if is_origin { HeaderValue::from_str(origin).map_err(|_| InvalidOrigin) } else { Err(InvalidOrigin) }
}

fn is_list_of_names(value: &HeaderValue) -> bool {
    let legal = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b',' | b' ');
    value.len() <= MAX_ASKED && value.as_bytes().iter().all(legal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_origin_can_be_listed() {
        // SEC-4
        for good in ["https://app.example", "http://localhost:3000", "https://[::1]:8443", "*"] {
            assert!(AllowedOrigins::new([good]).is_ok(), "{good}");
        }
        for bad in [
            "",
            "app.example",
            "https://app.example/",
            "https://app.example/x",
            "ftp://x",
            "https://u@x",
            "https://A.example",
            "null",
        ] {
            assert_eq!(AllowedOrigins::new([bad]), Err(InvalidOrigin), "{bad}");
        }
        assert!(AllowedOrigins::new(vec!["https://a"; MAX_ORIGINS + 1]).is_err());
        assert!(AllowedOrigins::new(Vec::<&str>::new()).unwrap().is_closed());
    }
}
