//! Decides nothing: a link whose Node's end is in the hands of a test or a fuzz target, message by message.

use iop_wire::link::Outgoing;
use iop_wire::{Incoming, Link, LinkError, PeerIdentity, Sequenced, ToEdge, ToNode};
use tokio::sync::{mpsc, oneshot};

/// What comes from the Node.
pub(crate) type Item = Result<Sequenced<ToEdge>, LinkError>;

pub(crate) struct RawLink {
    items: mpsc::UnboundedReceiver<Item>,
    outgoing: oneshot::Sender<Outgoing<ToNode>>,
}

/// The Node's end.
pub(crate) struct RawEnd {
    pub(crate) to_edge: mpsc::UnboundedSender<Item>,
    /// What comes from the Edge, once the link is attached.
    pub(crate) outgoing: oneshot::Receiver<Outgoing<ToNode>>,
}

impl RawLink {
    pub(crate) fn pair() -> (Box<Self>, RawEnd) {
        let (to_edge, items) = mpsc::unbounded_channel();
        let (hand_over, outgoing) = oneshot::channel();
        (Box::new(Self { items, outgoing: hand_over }), RawEnd { to_edge, outgoing })
    }
}

impl std::fmt::Debug for RawLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RawLink")
    }
}

impl Link for RawLink {
    type In = ToEdge;
    type Out = ToNode;

    fn peer(&self) -> PeerIdentity {
        PeerIdentity::default()
    }

    fn start(self: Box<Self>, outgoing: Outgoing<ToNode>) -> Incoming<ToEdge> {
        let Self { mut items, outgoing: hand_over } = *self;
        let _gone = hand_over.send(outgoing);
        Box::pin(futures_util::stream::poll_fn(move |cx| items.poll_recv(cx)))
    }
}
