//! Decides what an Edge can ask of a Node outside of runs, and what it gets for an answer.

use std::num::NonZeroU64;

use bytes::Bytes;
use http::{Method, StatusCode};
use iop_execution::{AdapterKey, Capabilities, ExecutionFailure, Health, Redacted, SessionId, Target};

/// A command of the closed set (CMD-1).
#[derive(Debug, Clone, PartialEq)]
pub struct CommandRequest {
    /// Number of the command on this connection.
    pub command_id: u64,
    /// Opaque correlation value.
    pub session_id: Option<SessionId>,
    /// How long it may take, from receipt, in milliseconds.
    pub deadline_ms: u64,
    /// What to do.
    pub command: NodeCommand,
}

/// What a command asks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum NodeCommand {
    /// Capabilities of an adapter; with a target, its health too.
    Capabilities {
        /// The adapter.
        adapter: AdapterKey,
        /// The target.
        target: Option<Target>,
    },
    /// State of the Node's connection.
    TransportStatus,
    /// An allow-listed call of Ollama's API.
    OllamaApi {
        /// The adapter.
        adapter: AdapterKey,
        /// HTTP method.
        method: Method,
        /// Path.
        path: String,
        /// Body, at most 32 KiB.
        body: Redacted<Bytes>,
    },
}

/// Answer to a command.
#[derive(Debug, Clone, PartialEq)]
pub struct CommandResponse {
    /// Number of the command.
    pub command_id: u64,
    /// Opaque correlation value, unchanged.
    pub session_id: Option<SessionId>,
    /// The outcome.
    pub outcome: Result<CommandResult, ExecutionFailure>,
}

/// What a command found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandResult {
    /// What an adapter can do.
    Capabilities(CapabilitiesResult),
    /// What Ollama answered.
    OllamaApi {
        /// HTTP status.
        status: StatusCode,
        /// Body, at most 32 KiB.
        body: Redacted<Bytes>,
    },
    /// State of the Node's connection.
    TransportStatus {
        /// Runs and tunnels in flight.
        active_runs: u32,
    },
}

/// What an adapter can do, and how its target is (CMD-2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilitiesResult {
    /// The adapter.
    pub adapter: AdapterKey,
    /// What it can do. Its targets don't travel: they are those of Ready.
    pub capabilities: Capabilities,
    /// How the target is that was asked for; none if none was.
    pub health: Option<TargetHealth>,
}

/// What a probe of exactly one target found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetHealth {
    /// The target.
    pub target: Target,
    /// What was found.
    pub status: Health,
    /// Place among the finished observations of the connection, from 1 (WDG-6).
    pub health_observation_seq: NonZeroU64,
}
