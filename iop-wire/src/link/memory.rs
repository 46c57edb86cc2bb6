//! Decides how an Edge and a Node in one process are connected: each side polls the other's outgoing stream itself.
//!
//! There is no queue and no task in between, so a message is pulled only when its receiver is ready for it.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use tokio::sync::mpsc;

use super::{ConnectError, Connector, EdgeLink, Incoming, Link, LinkError, NodeLink, Outgoing, PeerIdentity};
use crate::convert::{WireMessage, decode_nth};
use crate::limits::ACCEPT_QUEUE;
use crate::message::Sequenced;

/// How values cross a memory link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MemoryMode {
    /// As they are.
    #[default]
    Direct,
    /// Encoded and decoded, with every check of a real transport.
    Encoded,
}

/// Two ends of one link, values passed as they are.
#[must_use]
pub fn memory_link() -> (EdgeLink, NodeLink) {
    memory_link_with(MemoryMode::Direct)
}

/// Two ends of one link.
#[must_use]
pub fn memory_link_with(mode: MemoryMode) -> (EdgeLink, NodeLink) {
    let to_edge = Direction::new();
    let to_node = Direction::new();
    let edge = MemoryLink { ends: Ends { receive: to_edge.clone(), send: to_node.clone() }, mode };
    let node = MemoryLink { ends: Ends { receive: to_node, send: to_edge }, mode };
    (Box::new(edge), Box::new(node))
}

/// A listener in this process, and the connector that dials it.
#[must_use]
pub fn memory_listener(mode: MemoryMode) -> (MemoryConnector, MemoryListener) {
    let (sender, receiver) = mpsc::channel(ACCEPT_QUEUE);
    (MemoryConnector { sender, mode }, MemoryListener { receiver })
}

/// Dials a [`MemoryListener`]. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MemoryConnector {
    sender: mpsc::Sender<EdgeLink>,
    mode: MemoryMode,
}

#[iop_execution::async_trait]
impl Connector for MemoryConnector {
    /// Fails at once, and retryably, when the listener is gone or too many dials wait for it.
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        let (edge, node) = memory_link_with(self.mode);
        match self.sender.try_send(edge) {
            Ok(()) => Ok(node),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(ConnectError::Retryable("nobody listens".into())),
            Err(mpsc::error::TrySendError::Full(_)) => Err(ConnectError::Retryable("too many connections wait".into())),
        }
    }
}

/// Takes the links that a [`MemoryConnector`] dials.
#[derive(Debug)]
pub struct MemoryListener {
    receiver: mpsc::Receiver<EdgeLink>,
}

impl MemoryListener {
    /// The next link; `None` when every connector is gone. Cancel safe.
    pub async fn accept(&mut self) -> Option<EdgeLink> {
        self.receiver.recv().await
    }
}

/// One direction: the sender's outgoing stream, polled by the receiver.
struct Direction<M>(Arc<Mutex<Slot<M>>>);

struct Slot<M> {
    outgoing: Option<Outgoing<M>>,
    receiver: Option<Waker>,
    closed: bool,
}

impl<M> Clone for Direction<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M> Direction<M> {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Slot { outgoing: None, receiver: None, closed: false })))
    }

    fn lock(&self) -> MutexGuard<'_, Slot<M>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, outgoing: Outgoing<M>) {
        let mut slot = self.lock();
        if slot.closed {
            return;
        }
        slot.outgoing = Some(outgoing);
        let receiver = slot.receiver.take();
        drop(slot);
        if let Some(receiver) = receiver {
            receiver.wake();
        }
    }

    fn close(&self) {
        let mut slot = self.lock();
        slot.closed = true;
        let outgoing = slot.outgoing.take();
        let receiver = slot.receiver.take();
        drop(slot);
        // The stream belongs to the sender: it is dropped, and its receiver woken, outside the lock.
        drop(outgoing);
        if let Some(receiver) = receiver {
            receiver.wake();
        }
    }

    fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Sequenced<M>>> {
        let mut slot = self.lock();
        if slot.closed {
            return Poll::Ready(None);
        }
        let polled = slot.outgoing.as_mut().map_or(Poll::Pending, |outgoing| outgoing.as_mut().poll_next(cx));
        match &polled {
            Poll::Pending => match &mut slot.receiver {
                Some(waker) => waker.clone_from(cx.waker()),
                empty => *empty = Some(cx.waker().clone()),
            },
            Poll::Ready(None) => slot.closed = true,
            Poll::Ready(Some(_)) => {}
        }
        polled
    }
}

/// Both directions as one side sees them. Dropping them closes the link.
struct Ends<I, O> {
    receive: Direction<I>,
    send: Direction<O>,
}

impl<I, O> Drop for Ends<I, O> {
    fn drop(&mut self) {
        self.send.close();
        self.receive.close();
    }
}

struct MemoryLink<I, O> {
    ends: Ends<I, O>,
    mode: MemoryMode,
}

impl<I, O> fmt::Debug for MemoryLink<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLink").field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl<I: WireMessage, O: Send + 'static> Link for MemoryLink<I, O> {
    type In = I;
    type Out = O;

    fn peer(&self) -> PeerIdentity {
        PeerIdentity::default()
    }

    fn start(self: Box<Self>, outgoing: Outgoing<O>) -> Incoming<I> {
        self.ends.send.open(outgoing);
        Box::pin(Received { ends: self.ends, mode: self.mode, received: 0, broken: false })
    }
}

struct Received<I, O> {
    ends: Ends<I, O>,
    mode: MemoryMode,
    /// Messages so far; stops counting at the largest number.
    received: u32,
    broken: bool,
}

impl<I: WireMessage, O> Stream for Received<I, O> {
    type Item = Result<Sequenced<I>, LinkError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.broken {
            return Poll::Ready(None);
        }
        let Poll::Ready(message) = self.ends.receive.poll_next(cx) else { return Poll::Pending };
        let Some(message) = message else { return Poll::Ready(None) };
        self.received = self.received.saturating_add(1);
        let item = match self.mode {
            MemoryMode::Direct => Ok(message),
            MemoryMode::Encoded => I::encode(message).and_then(|bytes| decode_nth(self.received, bytes)),
        };
        self.broken = item.as_ref().is_err_and(|error| !matches!(error, LinkError::MalformedRun { .. }));
        Poll::Ready(Some(item))
    }
}

#[cfg(test)]
mod tests;
