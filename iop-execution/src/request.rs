//! Decides what a run and a tunnel ask of a provider, and which stall timeouts are legal.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use http::{HeaderMap, Method};

use crate::chat::ChatInput;
use crate::credential::CallCredential;
use crate::id::{AdapterKey, RunId, SessionId, Target};
use crate::redact::Len;

/// How long a run may go without progress: 1 s to 1 h, 300 s by default (EXE-13).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StallTimeout(Duration);

/// A stall timeout outside 1 000 ..= 3 600 000 ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("response_stall_timeout_ms is {0}; it must be 0 (the default, 300000) or 1000 to 3600000")]
pub struct IllegalStallTimeout(
    /// The refused value, in milliseconds.
    pub u64,
);

impl StallTimeout {
    /// What 0 means: 300 000 ms.
    pub const DEFAULT_MS: u64 = 300_000;
    /// Smallest legal value, in milliseconds.
    pub const MIN_MS: u64 = 1_000;
    /// Largest legal value, in milliseconds.
    pub const MAX_MS: u64 = 3_600_000;

    /// Parses a raw value from the wire or from config; 0 is the default.
    ///
    /// # Errors
    /// [`IllegalStallTimeout`] when the value is out of range.
    pub const fn from_ms(ms: u64) -> Result<Self, IllegalStallTimeout> {
        match ms {
            0 => Ok(Self(Duration::from_millis(Self::DEFAULT_MS))),
            Self::MIN_MS..=Self::MAX_MS => Ok(Self(Duration::from_millis(ms))),
            _ => Err(IllegalStallTimeout(ms)),
        }
    }

    /// The effective time, never 0.
    #[must_use]
    pub const fn get(self) -> Duration {
        self.0
    }
}

impl Default for StallTimeout {
    fn default() -> Self {
        Self(Duration::from_millis(Self::DEFAULT_MS))
    }
}

/// One normalised execution (EXE-16). Providers see no HTTP header of the client.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RunRequest {
    /// The run.
    pub run_id: RunId,
    /// Which adapter instance.
    pub adapter: AdapterKey,
    /// Which of its models.
    pub target: Target,
    /// Opaque correlation value.
    pub session_id: Option<SessionId>,
    /// Recorded only.
    pub background: bool,
    /// Whether the caller wants events as they come. A provider may ignore it.
    pub stream: bool,
    /// Effective stall timeout.
    pub stall_timeout: StallTimeout,
    /// Hard deadline, from receipt; `None` = none.
    pub deadline: Option<Duration>,
    /// The caller's chat-completions object.
    pub input: ChatInput,
    /// The provider's key for this call; none = the provider has its own, or needs none. Shared, so that it is not copied.
    pub credential: Option<Arc<CallCredential>>,
}

impl RunRequest {
    /// A streaming request with defaults everywhere else.
    #[must_use]
    pub fn new(run_id: RunId, adapter: AdapterKey, target: Target, input: ChatInput) -> Self {
        Self {
            run_id,
            adapter,
            target,
            session_id: None,
            background: false,
            stream: true,
            stall_timeout: StallTimeout::default(),
            deadline: None,
            input,
            credential: None,
        }
    }
}

/// One raw HTTP exchange. There is no URL or host: the origin is the adapter's own (SEC-1).
#[derive(Debug)]
#[non_exhaustive]
pub struct TunnelRequest {
    /// The run.
    pub run_id: RunId,
    /// Which adapter instance.
    pub adapter: AdapterKey,
    /// Which of its models.
    pub target: Target,
    /// Opaque correlation value.
    pub session_id: Option<SessionId>,
    /// HTTP method.
    pub method: Method,
    /// Path and query, checked by the adapter's allow-list.
    pub path: String,
    /// Headers of the caller that passed the Edge's allow-list; the adapter filters again.
    pub headers: HeaderMap,
    /// The body.
    pub body: RequestBody,
    /// Whether the caller asked for an event stream.
    pub stream: bool,
    /// Effective stall timeout.
    pub stall_timeout: StallTimeout,
    /// Hard deadline, from receipt; `None` = none.
    pub deadline: Option<Duration>,
    /// The provider's key for this call, as in [`RunRequest`]. It is set by the Node and never by a header of the caller.
    pub credential: Option<Arc<CallCredential>>,
}

impl TunnelRequest {
    /// A `POST` with defaults everywhere else.
    #[must_use]
    pub fn post(
        run_id: RunId,
        adapter: AdapterKey,
        target: Target,
        path: impl Into<String>,
        body: RequestBody,
    ) -> Self {
        Self {
            run_id,
            adapter,
            target,
            session_id: None,
            method: Method::POST,
            path: path.into(),
            headers: HeaderMap::new(),
            body,
            stream: true,
            stall_timeout: StallTimeout::default(),
            deadline: None,
            credential: None,
        }
    }
}

/// The caller's upload broke off: the body will never be complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request body broke off")]
pub struct BodyAborted;

type Chunks = Pin<Box<dyn Stream<Item = Result<Bytes, BodyAborted>> + Send>>;

/// A request body of known length, whole or in chunks.
///
/// As a [`Stream`] it gives its chunks; taking a chunk is what returns credit to the sender.
pub struct RequestBody {
    len: u64,
    source: Source,
}

enum Source {
    Full(Option<Bytes>),
    Chunks(Chunks),
}

impl RequestBody {
    /// A body that is here already.
    #[must_use]
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self { len: bytes.len() as u64, source: Source::Full((!bytes.is_empty()).then_some(bytes)) }
    }

    /// A body of `len` bytes that comes in chunks.
    pub fn chunks(len: u64, chunks: impl Stream<Item = Result<Bytes, BodyAborted>> + Send + 'static) -> Self {
        Self { len, source: Source::Chunks(Box::pin(chunks)) }
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// True if it has no byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The whole body if it is here already, without waiting.
    #[must_use]
    pub const fn as_full(&self) -> Option<&Bytes> {
        match &self.source {
            Source::Full(Some(bytes)) => Some(bytes),
            Source::Full(None) | Source::Chunks(_) => None,
        }
    }
}

impl fmt::Debug for RequestBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Len(usize::try_from(self.len).unwrap_or(usize::MAX)).fmt(f)
    }
}

impl Stream for RequestBody {
    type Item = Result<Bytes, BodyAborted>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match &mut self.source {
            Source::Full(bytes) => Poll::Ready(bytes.take().map(Ok)),
            Source::Chunks(chunks) => chunks.as_mut().poll_next(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_means_the_default_and_the_range_is_exact() {
        // EXE-13
        assert_eq!(StallTimeout::from_ms(0), Ok(StallTimeout::default()));
        assert_eq!(StallTimeout::default().get(), Duration::from_secs(300));
        for ms in [1_000, 3_600_000] {
            assert_eq!(StallTimeout::from_ms(ms).map(|t| t.get().as_millis() as u64), Ok(ms));
        }
        for ms in [1, 999, 3_600_001, u64::MAX] {
            assert_eq!(StallTimeout::from_ms(ms), Err(IllegalStallTimeout(ms)));
        }
    }

    #[test]
    fn debug_of_a_body_is_its_length() {
        assert_eq!(format!("{:?}", RequestBody::full("SENTINEL")), "[8 bytes]");
    }
}
