//! Decides which message of the Edge may come when: from Hello to Ready, then work (REG-1, W2).
//!
//! ```text
//!              HelloAck              accepted           started()          ready=true
//! AwaitingHelloAck ──► AwaitingRegistration ──► Starting ──► AwaitingReady ──────────► Ready
//!                                  │                               │                      │ drain()
//!                                  └► refused: ends                └► ready=false: ends   ▼
//!                                                                                      Draining
//! ```
//!
//! Ping, Pong, Drain and Goodbye may come at any time: liveness and closing don't depend on the handshake. Work (runs,
//! tunnels and what belongs to them, commands, config pushes) may come only in Ready and Draining. Anything else is a
//! [`Violation`], and the connection must end.
//!
//! It does not decide what a run is answered, nor when a connection that says nothing is dead.

use std::time::{Duration, Instant};

use iop_execution::NodeId;
use iop_wire::limits::{FEATURES, PROTO_MAX, PROTO_MIN, READY_TIMEOUT, REGISTER_TIMEOUT};
use iop_wire::{CloseCode, HelloAck, LeaseSigner, NodeConfigPayload, RegisterRefusal, ToNode};

/// Where the handshake stands: named for what it awaits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "the closed list of REG-1")]
pub enum State {
    /// Hello is sent.
    AwaitingHelloAck,
    /// RegisterRequest is sent.
    AwaitingRegistration,
    /// The place is claimed; adapters are starting.
    Starting,
    /// NodeReadyRequest is sent.
    AwaitingReady,
    /// Work may come.
    Ready,
    /// Work may still come, and is refused.
    Draining,
}

impl State {
    /// Every state.
    pub const ALL: &'static [Self] = &[
        Self::AwaitingHelloAck,
        Self::AwaitingRegistration,
        Self::Starting,
        Self::AwaitingReady,
        Self::Ready,
        Self::Draining,
    ];

    /// The name used in logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AwaitingHelloAck => "awaiting_hello_ack",
            Self::AwaitingRegistration => "awaiting_registration",
            Self::Starting => "starting",
            Self::AwaitingReady => "awaiting_ready",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

/// The Edge broke the handshake; the connection must end as [`Violation::close_code`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(clippy::exhaustive_enums, reason = "the driver reacts to each")]
pub enum Violation {
    /// A message that may not come now.
    #[error("{message} is illegal while {state}", state = state.as_str())]
    Illegal {
        /// Where the handshake stood.
        state: State,
        /// Name of the message.
        message: &'static str,
    },
    /// A protocol version outside the range of Hello.
    #[error("the Edge chose protocol {0}, which was not offered")]
    Protocol(
        /// The version.
        u32,
    ),
    /// A feature that Hello did not offer.
    #[error("the Edge chose a feature that was not offered")]
    Feature,
}

impl Violation {
    /// How the connection must end.
    #[must_use]
    pub const fn close_code(self) -> CloseCode {
        match self {
            Self::Illegal { .. } | Self::Feature => CloseCode::ProtocolViolation,
            Self::Protocol(_) => CloseCode::UnsupportedProtocol,
        }
    }
}

/// What a legal message means for the handshake.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::exhaustive_enums, reason = "the driver reacts to each")]
#[allow(clippy::large_enum_variant, reason = "made and taken apart at once, one per message")]
pub enum Step {
    /// Nothing: the message is for others. It is given back.
    Pass(ToNode),
    /// Send RegisterRequest. Envelopes may be this large, in bytes.
    Register {
        /// Largest envelope the Edge takes.
        max_envelope: u32,
    },
    /// Apply this config, start its adapters, then call [`Handshake::started`].
    Start {
        /// The config.
        config: NodeConfigPayload,
        /// The Edge's time, Unix milliseconds.
        edge_time_ms: u64,
        /// Whose credential leases the Edge says to take.
        lease_signers: Vec<LeaseSigner>,
    },
    /// The registration was refused: the connection ends.
    Refused(RegisterRefusal),
    /// Work may come.
    Ready {
        /// Stand-in of the generation for credential leases.
        lease_generation: u64,
    },
    /// This connection will never be ready: it ends.
    NeverReady,
}

/// The Node's half of the handshake of one connection.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    deadline: Option<Instant>,
    node_id: Option<NodeId>,
    features: Vec<String>,
}

impl Handshake {
    /// A connection on which Hello was just queued.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            state: State::AwaitingHelloAck,
            deadline: Some(now + REGISTER_TIMEOUT),
            node_id: None,
            features: Vec::new(),
        }
    }

    /// Where it stands.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Which Node this is, once the Edge has said so.
    #[must_use]
    pub const fn node_id(&self) -> Option<&NodeId> {
        self.node_id.as_ref()
    }

    /// True if both sides know this feature.
    #[must_use]
    pub fn shares(&self, feature: &str) -> bool {
        self.features.iter().any(|shared| shared == feature)
    }

    /// True if work may come.
    #[must_use]
    pub const fn takes_messages_of_runs(&self) -> bool {
        matches!(self.state, State::Ready | State::Draining)
    }

    /// A message of the Edge.
    ///
    /// # Errors
    /// [`Violation`] when it may not come now; the state does not change.
    pub fn handle(&mut self, message: ToNode, now: Instant) -> Result<Step, Violation> {
        match (self.state, message) {
            (State::AwaitingHelloAck, ToNode::HelloAck(ack)) => {
                Self::check(&ack)?;
                self.features = ack.features;
                self.move_to(State::AwaitingRegistration, Some(now + REGISTER_TIMEOUT));
                Ok(Step::Register { max_envelope: ack.max_envelope })
            }
            (State::AwaitingRegistration, ToNode::RegisterResponse(response)) => match response.outcome {
                Ok(registered) => {
                    self.node_id = Some(registered.node_id);
                    self.move_to(State::Starting, Some(now + READY_TIMEOUT));
                    Ok(Step::Start {
                        config: registered.config,
                        edge_time_ms: response.edge_time_ms,
                        lease_signers: registered.trusted_lease_signers,
                    })
                }
                Err(refusal) => Ok(Step::Refused(refusal)),
            },
            (State::AwaitingReady, ToNode::ReadyResponse(response)) => {
                if !response.ready {
                    return Ok(Step::NeverReady);
                }
                self.move_to(State::Ready, None);
                Ok(Step::Ready { lease_generation: response.lease_generation })
            }
            (_, message @ (ToNode::Ping(_) | ToNode::Pong(_) | ToNode::Drain(_) | ToNode::Goodbye(_))) => {
                Ok(Step::Pass(message))
            }
            (
                State::Ready | State::Draining,
                message @ (ToNode::Run(_)
                | ToNode::Tunnel(_)
                | ToNode::Chunk(_)
                | ToNode::Credit(..)
                | ToNode::Cancel(..)
                | ToNode::Command(_)
                | ToNode::ConfigUpdate(_)),
            ) => Ok(Step::Pass(message)),
            (state, message) => Err(Violation::Illegal { state, message: name(&message) }),
        }
    }

    fn check(ack: &HelloAck) -> Result<(), Violation> {
        if !(PROTO_MIN..=PROTO_MAX).contains(&ack.proto) {
            return Err(Violation::Protocol(ack.proto));
        }
        if ack.features.iter().any(|feature| !FEATURES.contains(&feature.as_str())) {
            return Err(Violation::Feature);
        }
        Ok(())
    }

    /// The adapters are started: NodeReadyRequest is sent now. Without effect in any other state than Starting.
    pub fn started(&mut self, now: Instant) {
        if self.state == State::Starting {
            // The whole of READY_TIMEOUT is the Edge's bound from acceptance; its answer alone needs less.
            let answer_by = now + REGISTER_TIMEOUT;
            self.move_to(State::AwaitingReady, Some(answer_by));
        }
    }

    /// The Node takes no new work. True if the connection was ready and so has something to finish; else it can end now.
    pub fn drain(&mut self) -> bool {
        match self.state {
            State::Ready | State::Draining => {
                self.state = State::Draining;
                true
            }
            State::AwaitingHelloAck | State::AwaitingRegistration | State::Starting | State::AwaitingReady => false,
        }
    }

    /// When to call [`Self::handle_timeout`].
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    /// How the connection must end if the Edge's answer is overdue.
    #[must_use]
    pub fn handle_timeout(&self, now: Instant) -> Option<CloseCode> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return None;
        }
        match self.state {
            State::AwaitingHelloAck | State::AwaitingRegistration => Some(CloseCode::RegisterTimeout),
            State::Starting | State::AwaitingReady => Some(CloseCode::ReadyTimeout),
            State::Ready | State::Draining => None,
        }
    }

    const fn move_to(&mut self, state: State, deadline: Option<Instant>) {
        self.state = state;
        self.deadline = deadline;
    }
}

/// Longest time one adapter may take to start, so that the others become ready in time.
pub const ADAPTER_START_TIMEOUT: Duration = Duration::from_secs(30);

fn name(message: &ToNode) -> &'static str {
    match message {
        ToNode::HelloAck(_) => "HelloAck",
        ToNode::RegisterResponse(_) => "RegisterResponse",
        ToNode::ReadyResponse(_) => "NodeReadyResponse",
        ToNode::Run(_) => "RunRequest",
        ToNode::Tunnel(_) => "ProviderTunnelRequest",
        ToNode::Chunk(_) => "RequestChunk",
        ToNode::Credit(..) => "WindowCredit",
        ToNode::Cancel(..) => "CancelRequest",
        ToNode::Command(_) => "NodeCommandRequest",
        ToNode::ConfigUpdate(_) => "ConfigUpdate",
        ToNode::Ping(_) => "Ping",
        ToNode::Pong(_) => "Pong",
        ToNode::Drain(_) => "Drain",
        ToNode::Goodbye(_) => "Goodbye",
        // The list is open to other crates; what this build does not know is never legal.
        _ => "a message this build does not know",
    }
}

#[cfg(test)]
mod tests;
