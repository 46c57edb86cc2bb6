//! Decides how a backend is called over HTTP: one request, HTTP/1.1, nothing retried, followed, decoded or timed by itself.
//!
//! [`Upstream`] is the seam between adapters and the HTTP client below. The client is our own because of one property: what
//! one read of the socket brings is one item of the body, however many HTTP chunks it is. A burst of tokens then is one frame
//! on its whole way. It also has no task per connection, and closes a dropped call's connection at once.

mod body;
mod chunked;
mod client;
mod connect;
mod head;
mod origin;
mod pool;
mod socket;
mod upload;

use std::fmt;
use std::io::{Error as IoError, ErrorKind};
use std::pin::Pin;

use async_trait::async_trait;
use bytes::Bytes;
use futures_core::Stream;
use http::{HeaderMap, Method, StatusCode};
use iop_execution::RequestBody;

pub use client::{HttpClient, HttpClientError};
pub use connect::CONNECT_TIMEOUT;
pub use origin::{InvalidOrigin, Origin};

/// One way to reach one backend.
#[async_trait]
pub trait Upstream: fmt::Debug + Send + Sync + 'static {
    /// Sends one request, once, and answers when the head of the response is here.
    ///
    /// # Errors
    /// [`UpstreamError`].
    ///
    /// # Cancel safety
    /// Dropping the future, or later the response's body, closes the connection.
    async fn send(&self, request: UpstreamRequest) -> Result<UpstreamResponse, UpstreamError>;
}

/// One request to a backend. It names no host: the upstream has its own origin.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs, reason = "an HTTP request has these four parts")]
pub struct UpstreamRequest {
    /// The method.
    pub method: Method,
    /// The path, from an allow-list.
    pub path: &'static str,
    /// The headers, `content-length` and `host` excepted.
    pub headers: HeaderMap,
    /// The body, of known length.
    pub body: RequestBody,
}

/// Bytes of a response as they were read.
pub type UpstreamBody = Pin<Box<dyn Stream<Item = Result<Bytes, UpstreamError>> + Send>>;

/// A response whose body is still coming.
#[allow(clippy::exhaustive_structs, reason = "an HTTP response has these three parts")]
pub struct UpstreamResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: UpstreamBody,
}

impl fmt::Debug for UpstreamResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamResponse").field("status", &self.status).finish_non_exhaustive()
    }
}

/// Why a call failed. `Display` and the source hold no URL and no payload.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpstreamError {
    /// The connection broke after the request, or a part of it, was sent.
    #[error("the connection to the backend broke")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No connection: nothing was sent.
    #[error("the backend could not be reached")]
    Connect(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The caller's upload broke off.
    #[error("the request body broke off")]
    RequestBody,
}

impl UpstreamError {
    /// True if the backend's machine answered that nobody listens: refused, or reset before the connection stood. A name that
    /// does not resolve, a connection that takes too long and TLS trouble say nothing of the backend.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        let Self::Connect(source) = self else { return false };
        let kind = match source.downcast_ref::<connect::ConnectError>() {
            Some(connect::ConnectError::Io(error)) => Some(error.kind()),
            Some(_) => None,
            None => source.downcast_ref::<IoError>().map(IoError::kind),
        };
        matches!(kind, Some(ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset))
    }
}

#[cfg(test)]
mod tests;
