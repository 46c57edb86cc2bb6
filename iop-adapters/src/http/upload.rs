//! Decides how a request is written: its head and what is here of its body together, never more than was announced.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures_core::Stream;
use iop_execution::RequestBody;
use tokio::io::AsyncWrite;

use super::socket::Socket;

/// Most writes at one go, so that an answer is heard while an upload never has to wait.
const WRITES_PER_POLL: usize = 16;

/// What is still to be written of a request. Without `Debug`: it holds the key and the prompt.
pub(super) struct Upload {
    head: Bytes,
    chunk: Bytes,
    body: RequestBody,
    /// Bytes of the body that have not been taken out of it.
    left: u64,
}

/// Why an upload stopped before its end.
#[derive(Debug)]
pub(super) enum UploadError {
    /// The caller's body broke off, or is not as long as it said.
    Body,
    /// The connection takes no more bytes; an answer may still be in it.
    Write(io::Error),
}

impl Upload {
    pub(super) fn new(head: Vec<u8>, body: RequestBody) -> Self {
        Self { head: head.into(), chunk: Bytes::new(), left: body.len(), body }
    }

    /// Writes on. Ready when everything is written.
    pub(super) fn poll(&mut self, socket: &mut Socket, cx: &mut Context<'_>) -> Poll<Result<(), UploadError>> {
        let mut socket = Pin::new(socket);
        for _ in 0..WRITES_PER_POLL {
            let waits = self.poll_chunk(cx)?.is_pending();
            if self.head.is_empty() && self.chunk.is_empty() {
                // TLS keeps bytes back until it is flushed.
                ready!(socket.as_mut().poll_flush(cx)).map_err(UploadError::Write)?;
                return if waits { Poll::Pending } else { Poll::Ready(Ok(())) };
            }
            let parts = [IoSlice::new(&self.head), IoSlice::new(&self.chunk)];
            let first = usize::from(self.head.is_empty());
            let parts = parts.get(first..).unwrap_or_default();
            let mut written = ready!(socket.as_mut().poll_write_vectored(cx, parts)).map_err(UploadError::Write)?;
            if written == 0 {
                return Poll::Ready(Err(UploadError::Write(io::ErrorKind::WriteZero.into())));
            }
            for part in [&mut self.head, &mut self.chunk] {
                let here = written.min(part.len());
                part.advance(here);
                written -= here;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Has the next piece of the body at hand, unless there is none.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UploadError>> {
        while self.chunk.is_empty() && self.left > 0 {
            let Some(Ok(chunk)) = ready!(Pin::new(&mut self.body).poll_next(cx)) else {
                return Poll::Ready(Err(UploadError::Body));
            };
            self.left = self.left.checked_sub(chunk.len() as u64).ok_or(UploadError::Body)?;
            self.chunk = chunk;
        }
        Poll::Ready(Ok(()))
    }
}
