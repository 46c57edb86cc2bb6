//! Decides how a request is written: its head and what is here of its body together, never more than was announced.

use std::collections::VecDeque;
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

/// Most pieces of a body that one write takes.
const PIECES_PER_WRITE: usize = 16;

/// What is still to be written of a request. Without `Debug`: it holds the key and the prompt.
pub(super) struct Upload {
    head: Bytes,
    /// Pieces of the body that are here, none of them empty.
    pieces: VecDeque<Bytes>,
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
        Self { head: head.into(), pieces: VecDeque::new(), left: body.len(), body }
    }

    /// Writes on. Ready when everything is written.
    pub(super) fn poll(&mut self, socket: &mut Socket, cx: &mut Context<'_>) -> Poll<Result<(), UploadError>> {
        let mut socket = Pin::new(socket);
        for _ in 0..WRITES_PER_POLL {
            let waits = self.poll_pieces(cx)?.is_pending();
            if self.head.is_empty() && self.pieces.is_empty() {
                // TLS keeps bytes back until it is flushed.
                ready!(socket.as_mut().poll_flush(cx)).map_err(UploadError::Write)?;
                return if waits { Poll::Pending } else { Poll::Ready(Ok(())) };
            }
            let mut parts = [IoSlice::new(&[]); PIECES_PER_WRITE + 1];
            let here = std::iter::once(&self.head).chain(&self.pieces).filter(|part| !part.is_empty());
            let count = parts.iter_mut().zip(here).map(|(slot, part)| *slot = IoSlice::new(part)).count();
            let parts = parts.get(..count).unwrap_or_default();
            let mut written = ready!(socket.as_mut().poll_write_vectored(cx, parts)).map_err(UploadError::Write)?;
            if written == 0 {
                return Poll::Ready(Err(UploadError::Write(io::ErrorKind::WriteZero.into())));
            }
            let of_head = written.min(self.head.len());
            self.head.advance(of_head);
            written -= of_head;
            while let Some(piece) = self.pieces.front_mut() {
                if written < piece.len() {
                    piece.advance(written);
                    break;
                }
                written -= piece.len();
                self.pieces.pop_front();
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Has what is here of the body at hand, up to what one write takes. Pending while more must come.
    fn poll_pieces(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UploadError>> {
        while self.pieces.len() < PIECES_PER_WRITE && self.left > 0 {
            let Some(Ok(piece)) = ready!(Pin::new(&mut self.body).poll_next(cx)) else {
                return Poll::Ready(Err(UploadError::Body));
            };
            self.left = self.left.checked_sub(piece.len() as u64).ok_or(UploadError::Body)?;
            if !piece.is_empty() {
                self.pieces.push_back(piece);
            }
        }
        Poll::Ready(Ok(()))
    }
}
