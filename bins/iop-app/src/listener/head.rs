//! Decides when a peer that began the head of an HTTP/1.1 request and does not finish it is cut.
//!
//! hyper has one timer for the wait between two requests and for the head of the next one. It bounds the wait here; the
//! head gets its own, much shorter time, from the first byte that is read while no request is answered.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};

/// Whose turn it is on one connection: odd while a request is answered, and another number for every request.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns(Arc<AtomicU64>);

/// A request that is answered, until dropped.
#[derive(Debug)]
pub(super) struct Turn(Turns);

impl Turns {
    /// A head is whole.
    pub(super) fn begin(&self) -> Turn {
        self.step();
        Turn(self.clone())
    }

    // One task reads the connection and answers on it, so no order between threads is needed.
    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn step(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.step();
    }
}

/// A stream whose reads fail when a head takes longer than allowed.
#[derive(Debug)]
pub(super) struct Heads<IO> {
    io: IO,
    turns: Turns,
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    /// The turn in which the head began that is being read.
    begun: Option<u64>,
}

impl<IO> Heads<IO> {
    pub(super) fn new(io: IO, turns: Turns, limit: Duration) -> Self {
        Self { io, turns, limit, timer: Box::pin(sleep(limit)), begun: None }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Heads<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.io).poll_read(cx, buf);
        let turn = self.turns.now();
        if turn % 2 == 1 {
            return outcome;
        }
        if outcome.is_ready() {
            if buf.filled().len() > before && self.begun != Some(turn) {
                self.begun = Some(turn);
                let end = Instant::now() + self.limit;
                self.timer.as_mut().reset(end);
            }
            return outcome;
        }
        if self.begun == Some(turn) && self.timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the head of a request takes too long")));
        }
        Poll::Pending
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Heads<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// How many requests of one HTTP/2 connection are answered.
#[derive(Debug, Clone)]
pub(super) struct Busy(Arc<watch::Sender<usize>>);

/// A request that is answered, until dropped.
#[derive(Debug)]
pub(super) struct Stream(Busy);

impl Busy {
    /// None yet, and who is told of a change.
    pub(super) fn new() -> (Self, watch::Receiver<usize>) {
        let (sender, receiver) = watch::channel(0);
        (Self(Arc::new(sender)), receiver)
    }

    pub(super) fn begin(&self) -> Stream {
        self.0.send_modify(|count| *count += 1);
        Stream(self.clone())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// A body whose request is answered once it is dropped: `G` is told then.
#[derive(Debug)]
pub(super) struct Answering<B, G> {
    body: Pin<Box<B>>,
    _answered: G,
}

impl<B, G> Answering<B, G> {
    pub(super) fn new(body: B, answered: G) -> Self {
        Self { body: Box::pin(body), _answered: answered }
    }
}

impl<B: Body, G: Unpin> Body for Answering<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.body.as_mut().poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
