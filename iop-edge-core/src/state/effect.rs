//! Decides what the engine asks its driver to do. Effects are carried out in order, in the same critical section as the
//! input that caused them, except for observations.

use std::time::Duration;

use iop_execution::{AdapterKey, NodeId, ProviderId, RunId, Target};
use iop_wire::{CloseCode, CommandResult, RefusalReason, ToNode};

use crate::api::{CommandError, SubmitError, WireKind};
use crate::catalog::RetryOn;
use crate::observe::Observation;
use crate::state::id::{AttemptId, CommandId, ConnectionId, Generation};
use crate::state::ledger::WorkClass;

/// A place was taken for a request: what is known before anything is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    /// The attempt that holds the place.
    pub(crate) attempt: AttemptId,
    /// The run.
    pub(crate) run_id: RunId,
    /// The Node.
    pub(crate) node: NodeId,
    /// The provider.
    pub(crate) provider: ProviderId,
    /// The adapter instance.
    pub(crate) adapter: AdapterKey,
    /// The model as the provider knows it.
    pub(crate) target: Target,
    /// How the provider is used.
    pub(crate) wire: WireKind,
    /// The class of the place.
    pub(crate) class: WorkClass,
    /// The provider's raw stall timeout (EXE-13).
    pub(crate) stall_timeout_ms: u64,
    /// How long the request waited.
    pub(crate) queued: Duration,
    /// What its caller may send it again for (REC-5).
    pub(crate) retry_on: RetryOn,
    /// Its call needs a credential lease.
    pub(crate) needs_lease: bool,
}

/// Life of the Nodes, for subscribers (EDG-2).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EdgeNodeEvent {
    /// A Node is ready (REG-3).
    Connected {
        /// The Node.
        node: NodeId,
        /// Its new generation.
        generation: Generation,
    },
    /// A ready Node takes no new work.
    Draining {
        /// The Node.
        node: NodeId,
        /// Its generation.
        generation: Generation,
    },
    /// A ready Node's connection ended and its generation was fenced (FEN-2).
    Disconnected {
        /// The Node.
        node: NodeId,
        /// The generation that ended.
        generation: Generation,
        /// Why.
        code: CloseCode,
    },
    /// A connection ended after it was accepted and before it was ready.
    NotReady {
        /// The Node.
        node: NodeId,
        /// Why.
        code: CloseCode,
    },
    /// A ready Node left a question unanswered: new work prefers others (FEN-7).
    Suspected {
        /// The Node.
        node: NodeId,
        /// Its generation.
        generation: Generation,
    },
    /// A suspect was heard of again.
    Trusted {
        /// The Node.
        node: NodeId,
        /// Its generation.
        generation: Generation,
    },
    /// An operator took the Node out of service, or put it back.
    InService {
        /// The Node.
        node: NodeId,
        /// False: nothing new is sent to it.
        on: bool,
    },
    /// A ready Node has a new config in force (REG-7).
    ConfigApplied {
        /// The Node.
        node: NodeId,
        /// The config's revision.
        revision: u64,
    },
    /// A ready Node keeps its config: it could not put the new one into force (REG-7).
    ConfigRefused {
        /// The Node.
        node: NodeId,
        /// The refused config's revision.
        revision: u64,
        /// Why, in the Node's words.
        error: String,
    },
    /// A registration was refused (REG-4).
    Refused {
        /// The Node, if the token named one.
        node: Option<NodeId>,
        /// Why.
        reason: RefusalReason,
    },
    /// A registration was refused unread: its address or its token failed too often lately (REG-8). The peer was told
    /// `draining`.
    RateLimited {
        /// When it may try again.
        retry_after: Duration,
    },
}

/// What the driver has to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Effect {
    /// Write a control message.
    Send { connection: ConnectionId, message: Box<ToNode> },
    /// Say Goodbye and end the connection. It is fenced already.
    Close { connection: ConnectionId, code: CloseCode, retry_after: Duration },
    /// A waiting request has its place.
    Granted(Box<Grant>),
    /// A waiting request ends without a place.
    Refused { attempt: AttemptId, error: SubmitError },
    /// The Node of a dispatched run is gone: end the run as `disconnected`. Its place is free already.
    Disconnected { attempt: AttemptId },
    /// A dispatched run should have had its receipt by now: look, and if there is none call `receipt_missing`, or, if its Node
    /// has `answered` a later ping, end it as `dispatch_unacknowledged` (WIR-14).
    CheckReceipt { attempt: AttemptId, answered: bool },
    /// The Node of a cancelled run has not said in time that it stopped: whoever still waits for that waits no longer.
    Quarantined { attempt: AttemptId },
    /// A command of a caller is over.
    Commanded { id: CommandId, outcome: Box<Result<CommandResult, CommandError>> },
    /// The deadline of a dispatched run passed: end it as `edge_deadline` and cancel it.
    Overdue { attempt: AttemptId },
    /// Publish on the bus.
    Publish(EdgeNodeEvent),
    /// Tell the observer, after the critical section.
    Observe(Observation),
}
