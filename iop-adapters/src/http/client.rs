//! Decides how a call uses a connection: one request, heard from its first byte on, never sent again.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::BytesMut;

use super::body::{Body, poll_read};
use super::connect::Dialer;
use super::head::{self, AnswerHead, HeadReader};
use super::pool::Pool;
use super::socket::Socket;
use super::upload::{Upload, UploadError};
use super::{Origin, Upstream, UpstreamError, UpstreamRequest, UpstreamResponse};

/// The HTTP client of one adapter instance, with its own connections.
///
/// It has no task: a call, and then the body of its answer, drives its connection.
pub struct HttpClient {
    origin: Origin,
    dialer: Dialer,
    pool: Arc<Pool>,
}

/// The client could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpClientError {
    /// TLS.
    #[error("TLS could not be set up")]
    Tls(#[source] rustls::Error),
    /// The host of an `https` URL.
    #[error("the host can't be in a certificate")]
    HostName,
}

impl HttpClient {
    /// A client for one backend. It opens no connection yet.
    ///
    /// # Errors
    /// [`HttpClientError`].
    pub fn new(origin: Origin) -> Result<Self, HttpClientError> {
        Ok(Self { dialer: Dialer::new(&origin)?, origin, pool: Arc::default() })
    }

    #[cfg(test)]
    pub(super) fn with_roots(origin: Origin, roots: Arc<rustls::RootCertStore>) -> Result<Self, HttpClientError> {
        Ok(Self { dialer: Dialer::with_roots(&origin, roots)?, origin, pool: Arc::default() })
    }

    #[cfg(test)]
    pub(super) fn idle(&self) -> usize {
        self.pool.len()
    }
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").field("origin", &self.origin).finish_non_exhaustive()
    }
}

#[async_trait]
impl Upstream for HttpClient {
    async fn send(&self, request: UpstreamRequest) -> Result<UpstreamResponse, UpstreamError> {
        let UpstreamRequest { method, path, headers, body } = request;
        let head = head::request(&self.origin, &method, path, &headers, body.len());
        let socket = match self.pool.take() {
            Some(socket) => socket,
            None => self.dialer.connect().await.map_err(|error| UpstreamError::Connect(error.into()))?,
        };
        let mut exchange = Exchange {
            socket,
            upload: Some(Upload::new(head, body)),
            write_error: None,
            buffer: BytesMut::new(),
            reader: HeadReader::new(&method),
        };
        let head = poll_fn(|cx| exchange.poll_head(cx)).await?;
        Ok(exchange.respond(head, &self.pool))
    }
}

/// The connection closed before an answer began or its head was complete.
#[derive(Debug, thiserror::Error)]
#[error("the connection closed without an answer")]
struct NoAnswer;

/// A request on its connection, until the head of the answer is here.
struct Exchange {
    socket: Socket,
    upload: Option<Upload>,
    write_error: Option<io::Error>,
    buffer: BytesMut,
    reader: HeadReader,
}

impl Exchange {
    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<AnswerHead, UpstreamError>> {
        if let Some(upload) = &mut self.upload {
            match upload.poll(&mut self.socket, cx) {
                Poll::Ready(Ok(())) => self.upload = None,
                Poll::Ready(Err(UploadError::Body)) => return Poll::Ready(Err(UpstreamError::RequestBody)),
                // A server that has heard enough answers and closes: the answer counts.
                Poll::Ready(Err(UploadError::Write(error))) => {
                    self.upload = None;
                    self.write_error = Some(error);
                }
                Poll::Pending => {}
            }
        }
        loop {
            let buffer = &mut self.buffer;
            let read = ready!(poll_read(&mut self.socket, cx, |input| {
                buffer.extend_from_slice(input);
                input.len()
            }));
            match (read, self.write_error.take()) {
                (Ok(1..), error) => self.write_error = error,
                (Ok(0) | Err(_), Some(error)) => return Poll::Ready(Err(UpstreamError::Broken(error.into()))),
                (Ok(0), None) => return Poll::Ready(Err(UpstreamError::Broken(NoAnswer.into()))),
                (Err(error), None) => return Poll::Ready(Err(error)),
            }
            let head = self.reader.next(buffer).map_err(|error| UpstreamError::Broken(error.into()))?;
            if let Some(head) = head {
                return Poll::Ready(Ok(head));
            }
        }
    }

    fn respond(self, head: AnswerHead, pool: &Arc<Pool>) -> UpstreamResponse {
        let AnswerHead { status, headers, framing, keep_alive } = head;
        let refused = status.is_client_error() || status.is_server_error();
        // Who refuses a request need not hear the rest of it.
        let keep_alive = keep_alive && self.write_error.is_none() && !(refused && self.upload.is_some());
        let upload = self.upload.filter(|_| !refused);
        let body = Body::new(self.socket, Arc::clone(pool), framing, self.buffer, upload, keep_alive);
        UpstreamResponse { status, headers, body: Box::pin(body) }
    }
}
