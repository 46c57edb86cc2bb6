//! Decides what may pass between a caller and a backend: methods, paths and headers, by allow-list (SEC-1).
//!
//! The Edge checks too; the Node checks again because it is the last one. Nothing suspicious is repaired: what is refused
//! here is refused whole.

use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, USER_AGENT};
use http::{HeaderMap, Method};
use iop_execution::{ProviderError, RunId};

/// What a caller may ask of one kind of backend.
#[derive(Debug, Clone, Copy)]
pub struct Profile {
    routes: &'static [(Method, &'static str)],
}

/// Servers that speak OpenAI's API.
pub const OPENAI: Profile = Profile {
    routes: &[
        (Method::POST, "/v1/chat/completions"),
        (Method::POST, "/v1/completions"),
        (Method::POST, "/v1/embeddings"),
        (Method::POST, "/v1/messages"),
        (Method::POST, "/v1/responses"),
        (Method::GET, "/v1/models"),
    ],
};

/// Commands to an Ollama server (CMD-1): those that only look.
pub const OLLAMA: Profile = Profile {
    routes: &[
        (Method::GET, "/api/ps"),
        (Method::GET, "/api/tags"),
        (Method::GET, "/api/version"),
        (Method::POST, "/api/show"),
    ],
};

/// Longest path that is looked at.
const MAX_PATH_BYTES: usize = 256;
/// Longest request id of a backend that is passed on.
const MAX_REQUEST_ID_BYTES: usize = 128;
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const OPENAI_BETA: HeaderName = HeaderName::from_static("openai-beta");

impl Profile {
    /// The path as the backend is to see it, if this profile allows the call. No query is allowed.
    ///
    /// # Errors
    /// `invalid_request` for a suspicious path, `unsupported` for one that is merely not on the list.
    pub fn check(&self, method: &Method, path: &str) -> Result<&'static str, ProviderError> {
        if is_suspicious(path) {
            return Err(ProviderError::invalid_request("the path is not acceptable"));
        }
        self.routes
            .iter()
            .find(|(allowed, route)| allowed == method && *route == path)
            .map(|(_, route)| *route)
            .ok_or_else(|| ProviderError::unsupported("this method and path are not allowed for this provider"))
    }
}

/// Anything that could mean another path, host or resource to somebody on the way.
fn is_suspicious(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    path.len() > MAX_PATH_BYTES
        || !path.starts_with('/')
        || path.bytes().any(|byte| !byte.is_ascii_graphic())
        || ["..", "//", "\\", "@", "%2e", "%2f", "%5c"].iter().any(|part| lower.contains(part))
}

/// The headers a backend gets: the allowed ones of the caller, and ours.
#[must_use]
pub fn request_headers(from: &HeaderMap, run_id: RunId) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(6);
    for name in [CONTENT_TYPE, ACCEPT, USER_AGENT, OPENAI_BETA] {
        if let Some(value) = from.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    if let Ok(id) = HeaderValue::from_str(&run_id.to_string()) {
        headers.insert(X_REQUEST_ID, id);
    }
    headers
}

/// The headers of a backend that a caller gets.
#[must_use]
pub fn response_headers(from: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(2);
    if let Some(value) = from.get(CONTENT_TYPE) {
        headers.insert(CONTENT_TYPE, value.clone());
    }
    let is_id =
        |value: &&HeaderValue| value.len() <= MAX_REQUEST_ID_BYTES && value.as_bytes().iter().all(u8::is_ascii_graphic);
    if let Some(value) = from.get(X_REQUEST_ID).filter(is_id) {
        headers.insert(X_REQUEST_ID, value.clone());
    }
    headers
}

/// True if the backend compressed its answer although it was told not to.
#[must_use]
pub fn is_encoded(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"))
}

#[cfg(test)]
mod tests;
