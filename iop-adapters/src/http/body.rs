//! Decides what of the bytes behind a head is the answer's body, when it is complete, and when it is cut.

use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use futures_core::Stream;
use tokio::io::{AsyncRead, ReadBuf};

use super::UpstreamError;
use super::chunked::Chunked;
use super::head::Framing;
use super::pool::Pool;
use super::socket::Socket;
use super::upload::{Upload, UploadError};

/// Most bytes of one read, and with it of one item of a body.
///
/// A read goes to the stack and its payload is copied out once: a stream that waits holds no buffer, and a small piece that
/// waits somewhere keeps no large one alive.
pub(super) const READ_BYTES: usize = 16 * 1024;

/// The connection closed before the answer was complete.
#[derive(Debug, thiserror::Error)]
#[error("the answer is cut")]
struct Cut;

/// One read from a connection, given to `take`. No byte is the end.
pub(super) fn poll_read<T>(
    socket: &mut Socket,
    cx: &mut Context<'_>,
    take: impl FnOnce(&[u8]) -> T,
) -> Poll<Result<T, UpstreamError>> {
    let mut space = [MaybeUninit::uninit(); READ_BYTES];
    let mut read = ReadBuf::uninit(&mut space);
    match ready!(Pin::new(socket).poll_read(cx, &mut read)) {
        Ok(()) => Poll::Ready(Ok(take(read.filled()))),
        Err(error) => Poll::Ready(Err(UpstreamError::Broken(error.into()))),
    }
}

/// The place in a body.
#[derive(Debug)]
enum Place {
    Length(u64),
    Chunked(Chunked),
    UntilClose,
}

/// What one read gave.
struct Piece {
    payload: Bytes,
    end: Option<End>,
}

/// How a body ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Nothing came behind it.
    Clean,
    /// The connection is closed, or holds something nobody asked for.
    Spent,
}

impl Place {
    fn is_end(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunked) => chunked.is_done(),
            Self::UntilClose => false,
        }
    }

    /// Takes what was read: all payload in it, joined. No byte is the end of the connection.
    fn take(&mut self, input: &[u8]) -> Result<Piece, UpstreamError> {
        let (payload, used) = match self {
            Self::UntilClose if input.is_empty() => return Ok(Piece { payload: Bytes::new(), end: Some(End::Spent) }),
            Self::UntilClose => (Bytes::copy_from_slice(input), input.len()),
            Self::Length(_) | Self::Chunked(_) if input.is_empty() => return Err(UpstreamError::Broken(Cut.into())),
            Self::Length(left) => {
                let here = usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                *left -= here as u64;
                (Bytes::copy_from_slice(input.get(..here).unwrap_or_default()), here)
            }
            Self::Chunked(chunked) => {
                let mut payload = Vec::with_capacity(input.len());
                let used = chunked.decode(input, &mut payload).map_err(|error| UpstreamError::Broken(error.into()))?;
                (payload.into(), used)
            }
        };
        let end = self.is_end().then_some(if used == input.len() { End::Clean } else { End::Spent });
        Ok(Piece { payload, end })
    }
}

/// The body of an answer. It owns the connection: dropped before its end, it closes it at once; at its end the connection
/// goes back to the pool, if another request may follow on it.
pub(super) struct Body {
    /// Gone after the end, or an error.
    socket: Option<Socket>,
    pool: Arc<Pool>,
    place: Place,
    /// What came together with the head.
    early: BytesMut,
    /// The rest of the request, where the answer began before its end.
    upload: Option<Upload>,
    keep_alive: bool,
}

impl Body {
    /// The body behind a head, beginning with the bytes that came with the head. `upload` is written on meanwhile.
    pub(super) fn new(
        socket: Socket,
        pool: Arc<Pool>,
        framing: Framing,
        early: BytesMut,
        upload: Option<Upload>,
        keep_alive: bool,
    ) -> Self {
        let place = match framing {
            Framing::Length(length) => Place::Length(length),
            Framing::Chunked => Place::Chunked(Chunked::new()),
            Framing::UntilClose => Place::UntilClose,
        };
        let mut body = Self { socket: Some(socket), pool, place, early, upload, keep_alive };
        if body.place.is_end() {
            let end = if body.early.is_empty() { End::Clean } else { End::Spent };
            body.take_leave(end);
        }
        body
    }

    /// Gives the connection back, or closes it.
    fn take_leave(&mut self, end: End) {
        if let Some(socket) = self.socket.take()
            && end == End::Clean
            && self.keep_alive
            && self.upload.is_none()
        {
            self.pool.put(socket);
        }
    }

    /// The next piece, which is not empty; `None` at the end.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, UpstreamError>> {
        loop {
            let Some(socket) = &mut self.socket else { return Poll::Ready(Ok(None)) };
            if let Some(upload) = &mut self.upload {
                match upload.poll(socket, cx) {
                    Poll::Ready(Ok(())) => self.upload = None,
                    Poll::Ready(Err(UploadError::Write(_))) => {
                        self.upload = None;
                        self.keep_alive = false;
                    }
                    Poll::Ready(Err(UploadError::Body)) => return Poll::Ready(Err(UpstreamError::RequestBody)),
                    Poll::Pending => {}
                }
            }
            let piece = if self.early.is_empty() {
                ready!(poll_read(socket, cx, |input| self.place.take(input)))??
            } else {
                self.place.take(&std::mem::take(&mut self.early))?
            };
            if let Some(end) = piece.end {
                self.take_leave(end);
            }
            if !piece.payload.is_empty() {
                return Poll::Ready(Ok(Some(piece.payload)));
            }
        }
    }
}

impl Stream for Body {
    type Item = Result<Bytes, UpstreamError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let body = self.get_mut();
        let piece = ready!(body.poll_piece(cx));
        if piece.is_err() {
            body.socket = None;
        }
        Poll::Ready(piece.transpose())
    }
}

impl Drop for Body {
    /// Who reads an event stream stops at its last event. The end of the body is often here by then, unread: without waiting
    /// for it, it is taken, so that the connection serves again.
    fn drop(&mut self) {
        let Place::Chunked(chunked) = &self.place else { return };
        let Some(socket) = self.socket.as_mut().filter(|_| chunked.is_between_chunks() && self.early.is_empty()) else {
            return;
        };
        let mut cx = Context::from_waker(Waker::noop());
        if let Poll::Ready(Ok(Ok(piece))) = poll_read(socket, &mut cx, |input| self.place.take(input))
            && let Some(end) = piece.end.filter(|_| piece.payload.is_empty())
        {
            self.take_leave(end);
        }
    }
}
