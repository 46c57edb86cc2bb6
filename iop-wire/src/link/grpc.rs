//! Decides how a link crosses a network: one bidirectional gRPC stream on one TCP connection of its own, TLS by rustls.
//!
//! Envelopes are encoded straight into the frame buffer of the stream. HTTP/2 windows are fixed and small, its keepalive is
//! off (the heartbeat decides), and what it may hold back per stream is bounded: order is decided in the outbox as late as
//! possible (WIR-9, WIR-10). `TCP_NODELAY` is set on every socket, and its
//! congestion control is a setting (WIR-11).

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_core::Stream;
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::{Status, Streaming};

use super::{LinkError, Outgoing};
use crate::message::Sequenced;

mod client;
mod codec;
mod congestion;
mod reason;
mod server;
#[cfg(test)]
mod tests;
mod workload;

pub use client::GrpcConnector;
pub use congestion::{Congestion, congestion};
pub use server::{GrpcListener, serve_edge, serve_stream};
pub use workload::{EdgeVerifier, IdentityProblem, NodeTls, NodeVerifier, WantedEdge, certificate_identity};

/// Path of the one call of the schema's one service.
const SESSION: &str = "/iop.wire.v1.Session/Session";
/// What TLS must have agreed on.
const ALPN: &[u8] = b"h2";

/// What both directions of one link know of each other.
#[derive(Debug, Default)]
struct Shared {
    /// The incoming stream was dropped: everything ends.
    closed: CancellationToken,
    /// A message of ours was too large to be sent.
    oversize: AtomicBool,
}

/// Ends a link when it is dropped.
#[derive(Debug)]
struct Guard(Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.closed.cancel();
    }
}

/// The outgoing stream until the link is closed.
struct Written<M> {
    outgoing: Outgoing<M>,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<M> Written<M> {
    fn new(outgoing: Outgoing<M>, shared: &Shared) -> Self {
        Self { outgoing, closed: Box::pin(shared.closed.clone().cancelled_owned()) }
    }
}

impl<M> Stream for Written<M> {
    type Item = Sequenced<M>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        self.outgoing.as_mut().poll_next(cx)
    }
}

/// What a codec's decoder gives: an undecodable envelope is an item, since that of one run does not end the stream.
type Decoded<M> = Result<Sequenced<M>, LinkError>;

/// Gives the next message of a gRPC stream, and says whether it was the last one.
fn poll_received<M>(
    stream: &mut Streaming<Decoded<M>>,
    shared: &Shared,
    cx: &mut Context<'_>,
) -> Poll<(Option<Decoded<M>>, bool)> {
    let Poll::Ready(item) = Pin::new(stream).poll_next(cx) else { return Poll::Pending };
    Poll::Ready(match item {
        None => (None, true),
        Some(Ok(decoded)) => {
            let last = decoded.as_ref().is_err_and(|error| !matches!(error, LinkError::MalformedRun { .. }));
            (Some(decoded), last)
        }
        Some(Err(status)) => (Some(Err(link_error(&status, shared))), true),
    })
}

fn link_error(status: &Status, shared: &Shared) -> LinkError {
    // tonic's own size check of what arrives.
    if shared.oversize.load(Ordering::Relaxed) || status.code() == tonic::Code::OutOfRange {
        return LinkError::TooLarge;
    }
    let error = reason::of_status(status);
    if error.failure.is_about_certificates() {
        return LinkError::Handshake(error);
    }
    LinkError::Transport(error.to_string())
}

fn prepare(socket: &TcpStream, wanted: Congestion) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    congestion::apply(socket, wanted);
    Ok(())
}
