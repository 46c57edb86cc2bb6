//! Decides what a transport must give: one reliable, ordered stream of messages in each direction (WIR-2).

use std::fmt;
use std::pin::Pin;

use futures_core::Stream;

use crate::identity::VerifiedIdentity;
use crate::message::{RunNumber, Sequenced};

pub mod failure;
pub mod fault;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod memory;

pub use failure::{HandshakeError, HandshakeFailure};

/// How a link broke. The text is for logs and holds no payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The peer sent what can't be decoded: the connection must close as `protocol_violation`.
    #[error("undecodable message: {0}")]
    Malformed(&'static str),
    /// A message of one run can't be decoded: that run must end, the connection goes on (W17). Not the last item; the
    /// envelope counts in the order of its direction.
    #[error("undecodable message of run {run}: {problem}")]
    MalformedRun {
        /// Place of the envelope.
        seq: u64,
        /// The run.
        run: RunNumber,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// An envelope is larger than allowed.
    #[error("an envelope is larger than allowed")]
    TooLarge,
    /// The transport broke.
    #[error("the transport broke: {0}")]
    Transport(String),
    /// The peer ended the connection while it was being made: a client of TLS 1.3 learns only afterwards that its certificate
    /// was refused.
    #[error("{0}")]
    Handshake(HandshakeError),
}

/// Who is at the other end, as far as the transport knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerIdentity {
    /// Address of the peer, for logs and rate limits.
    pub address: Option<std::net::SocketAddr>,
    /// Workload identity that a verified certificate proved (CRD-10). None = it showed none, or the transport checks none.
    pub identity: Option<VerifiedIdentity>,
}

impl PeerIdentity {
    /// A peer at an address, with the identity its certificate proved.
    #[must_use]
    pub const fn new(address: Option<std::net::SocketAddr>, identity: Option<VerifiedIdentity>) -> Self {
        Self { address, identity }
    }
}

/// Messages that arrive. `None` = the peer's direction ended; without a Goodbye before it that is a disconnect.
pub type Incoming<M> = Pin<Box<dyn Stream<Item = Result<Sequenced<M>, LinkError>> + Send>>;
/// Messages to write: pulled by the transport whenever it can take one. `None` ends the direction.
pub type Outgoing<M> = Pin<Box<dyn Stream<Item = Sequenced<M>> + Send>>;

/// One connection between an Edge and a Node, not started yet.
///
/// A link must be reliable, ordered and bidirectional. It pulls the outgoing stream only when it can really write, and
/// keeps nothing back once a message was pulled.
pub trait Link: fmt::Debug + Send + 'static {
    /// What arrives.
    type In: Send + 'static;
    /// What is written.
    type Out: Send + 'static;

    /// Who is at the other end.
    fn peer(&self) -> PeerIdentity;

    /// Starts both directions. Dropping the incoming stream closes the link both ways, at once (abort).
    fn start(self: Box<Self>, outgoing: Outgoing<Self::Out>) -> Incoming<Self::In>;
}

/// The Edge's end of a link.
pub type EdgeLink = Box<dyn Link<In = crate::ToEdge, Out = crate::ToNode>>;
/// The Node's end of a link.
pub type NodeLink = Box<dyn Link<In = crate::ToNode, Out = crate::ToEdge>>;

/// Dials an Edge.
#[iop_execution::async_trait]
pub trait Connector: fmt::Debug + Send + Sync + 'static {
    /// One try. Cancel safe: a dropped try leaves nothing behind.
    ///
    /// # Errors
    /// [`ConnectError`], which says whether another try can help.
    async fn connect(&self) -> Result<NodeLink, ConnectError>;
}

/// Why a dial failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Trying again can't help (a bad certificate file, a bad name).
    #[error("{0}")]
    Fatal(String),
    /// It may work later.
    #[error("{0}")]
    Retryable(String),
    /// The connection could not be made; it may work later.
    #[error("{0}")]
    Handshake(HandshakeError),
}
