//! Decides how messages cross the connection between Edge and Node: one ordered stream of envelopes each way.

pub mod convert;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzz;
pub mod heartbeat;
pub mod identity;
pub mod inbox;
pub mod limits;
pub mod link;
pub mod message;
pub mod outbox;
#[doc(hidden)]
pub mod proto;
pub mod sequence;
pub mod shared;

pub use heartbeat::{Heartbeat, HeartbeatAction, HeartbeatProfile};
pub use identity::{InvalidIdentity, TrustDomain, VerifiedIdentity, WorkloadIdentity, WorkloadRole};
pub use inbox::{CreditExceeded, ReceiveWindow};
pub use link::{
    ConnectError, Connector, EdgeLink, HandshakeError, HandshakeFailure, Incoming, Link, LinkError, NodeLink,
    PeerIdentity,
};
pub use message::*;
pub use outbox::{CancelOutcome, ControlOverflow, CreditOverflow, Ending, Outbox, Outgoing, Room, RunKey};
pub use sequence::{OutOfOrder, SequenceCheck};
pub use shared::OutboxHandle;
