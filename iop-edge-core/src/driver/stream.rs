//! Decides what a client polls: the run's buffer, its request body on the way out, its deadline. Dropping it cancels.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use futures_core::Stream;
use iop_execution::{RunEvent, RunId, RunStream, TunnelFrame, TunnelStream};
use iop_wire::limits::MAX_CHUNK;
use iop_wire::{RequestChunk, RunNumber, ToNode};
use tokio::time::Sleep;

use crate::api::{Output, WireKind};
use crate::driver::run::{Piece, Run};
use crate::driver::shared::{Shared, now};

/// The client's end of a dispatched run.
pub(crate) struct Source {
    shared: Arc<Shared>,
    run: Arc<Run>,
    /// What of the request body is not handed to the session yet.
    body: Bytes,
    /// The deadline does not depend on the Edge's timer task alone.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Source {
    pub(crate) fn new(shared: Arc<Shared>, run: Arc<Run>, body: Bytes, deadline: Option<Instant>) -> Self {
        shared.hold(&run);
        let deadline = deadline.map(|at| Box::pin(tokio::time::sleep_until(at.into())));
        Self { shared, run, body, deadline }
    }

    /// Hands on as much of the body as there is room for. Ready once all of it is.
    pub(crate) fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.body.is_empty() {
            ready!(self.run.connection.outbox.poll_room(self.run.key, cx));
            let data = self.body.split_to(self.body.len().min(MAX_CHUNK));
            let last = self.body.is_empty();
            // The number is filled in when the chunk is written.
            let chunk = ToNode::Chunk(RequestChunk { run: RunNumber(0), data, last });
            self.run.connection.outbox.push(self.run.key, chunk);
        }
        Poll::Ready(())
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Piece> {
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            self.deadline = None;
            self.shared.tick();
        }
        let _more = self.poll_body(cx);
        self.run.poll_take(cx, now)
    }

    pub(crate) fn into_output(self, run_id: RunId, wire: WireKind) -> Output {
        match wire {
            WireKind::Run => Output::Run(RunStream::new(run_id, Events(self))),
            WireKind::Tunnel => Output::Tunnel(TunnelStream::new(run_id, Frames(self))),
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.shared.leave(&self.run);
    }
}

struct Events(Source);

impl Stream for Events {
    type Item = RunEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<RunEvent>> {
        // A run's buffer holds events only: anything else was refused when it came.
        Poll::Ready(match ready!(self.0.poll_piece(cx)) {
            Piece::Event(event) => Some(event),
            Piece::Frame(_) => None,
        })
    }
}

struct Frames(Source);

impl Stream for Frames {
    type Item = TunnelFrame;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<TunnelFrame>> {
        Poll::Ready(match ready!(self.0.poll_piece(cx)) {
            Piece::Frame(frame) => Some(frame),
            Piece::Event(_) => None,
        })
    }
}

/// The output of an attempt that ended before anything was sent: its terminal alone.
pub(crate) fn ended(run_id: RunId, piece: Piece) -> Output {
    match piece {
        Piece::Event(event) => Output::Run(RunStream::new(run_id, futures_util::stream::iter([event]))),
        Piece::Frame(frame) => Output::Tunnel(TunnelStream::new(run_id, futures_util::stream::iter([frame]))),
    }
}
