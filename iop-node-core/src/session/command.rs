//! Decides how commands are answered (CMD-1, CMD-2): what needs no backend at once, what asks one beside everything else.
//!
//! A command takes no place and changes nothing. At most [`MAX_COMMANDS`] of those that ask a backend run at once; a further
//! one is told `busy`.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use iop_execution::failure::FailureStage;
use iop_execution::{
    AdapterKey, Capabilities, CommandOutput, ExecutionFailure, FailureCode, ProviderCommand, ProviderContacted, Target,
};
use iop_wire::{CapabilitiesResult, CommandRequest, CommandResponse, CommandResult, NodeCommand, TargetHealth, ToEdge};
use tokio::task::JoinError;
use tokio::time::timeout;

use super::{End, Session};
use crate::adapters::Adapter;
use crate::probe::Probe;
use crate::state::watchdog::probe_timeout;

/// Most commands that ask a backend at once.
const MAX_COMMANDS: usize = 16;
/// How long a backend may take to answer a command that names no deadline.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest answer of a backend that travels.
const MAX_ANSWER: usize = 32 * 1024;

type Outcome = Result<CommandResult, ExecutionFailure>;

impl Session<'_> {
    pub(super) fn command(&mut self, request: CommandRequest) -> Result<(), End> {
        let CommandRequest { command_id, session_id, deadline_ms, command } = request;
        let outcome = match command {
            NodeCommand::Capabilities { adapter, target: None } => {
                self.capabilities(&adapter).map(|(_, capabilities)| result(adapter, capabilities, None))
            }
            NodeCommand::Capabilities { adapter, target: Some(target) } => {
                match self.probe(adapter, target, deadline_ms) {
                    Ok(probing) => {
                        self.commands.spawn(async move {
                            let outcome = probing.await;
                            CommandResponse { command_id, session_id, outcome }
                        });
                        return Ok(());
                    }
                    Err(failure) => Err(failure),
                }
            }
            NodeCommand::OllamaApi { adapter, method, path, body } => {
                match self.command_backend(&adapter, ProviderCommand::OllamaApi { method, path, body }, deadline_ms) {
                    Ok(asking) => {
                        self.commands.spawn(async move {
                            let outcome = asking.await;
                            CommandResponse { command_id, session_id, outcome }
                        });
                        return Ok(());
                    }
                    Err(failure) => Err(failure),
                }
            }
            NodeCommand::TransportStatus => {
                Ok(CommandResult::TransportStatus { active_runs: u32::try_from(self.runs.len()).unwrap_or(u32::MAX) })
            }
            // Commands of later versions.
            _ => Err(refused(FailureCode::Unsupported, "this Node does not know that command")),
        };
        self.control(ToEdge::CommandResponse(CommandResponse { command_id, session_id, outcome }))
    }

    pub(super) fn commanded(&mut self, answer: Result<CommandResponse, JoinError>) -> Result<(), End> {
        match answer {
            Ok(response) => self.control(ToEdge::CommandResponse(response)),
            Err(error) => {
                // A panicking adapter is caught inside; the Edge gives the command up by its own time.
                tracing::error!(panic = error.is_panic(), "a command ended without an answer");
                Ok(())
            }
        }
    }

    /// An adapter with what it says it can do.
    fn capabilities(&self, adapter: &AdapterKey) -> Result<(Arc<Adapter>, Capabilities), ExecutionFailure> {
        let found = self.node.adapters().by_key(adapter).map(Arc::clone);
        let adapter = found.ok_or_else(|| refused(FailureCode::UnknownAdapter, "the Node has no such adapter"))?;
        let capabilities = adapter
            .capabilities()
            .ok_or_else(|| refused(FailureCode::Internal, "the adapter did not say what it can do"))?;
        Ok((adapter, capabilities))
    }

    fn has_room(&self) -> Result<(), ExecutionFailure> {
        if self.commands.len() < MAX_COMMANDS {
            Ok(())
        } else {
            Err(refused(FailureCode::Busy, "too many commands at once"))
        }
    }

    /// Hands a command to an adapter that has some. What it may ask its backend is the adapter's to say.
    fn command_backend(
        &self,
        key: &AdapterKey,
        command: ProviderCommand,
        deadline_ms: u64,
    ) -> Result<impl Future<Output = Outcome> + Send + 'static, ExecutionFailure> {
        let (adapter, capabilities) = self.capabilities(key)?;
        if !capabilities.commands {
            return Err(refused(FailureCode::Unsupported, "this adapter has no commands"));
        }
        self.has_room()?;
        let provider = Arc::clone(adapter.provider());
        let limit = if deadline_ms == 0 { COMMAND_TIMEOUT } else { Duration::from_millis(deadline_ms) };
        let asked = AssertUnwindSafe(async move { provider.command(command).await }).catch_unwind();
        Ok(async move {
            match timeout(limit, asked).await.map_err(|_| late())? {
                Ok(Ok(CommandOutput::Http { status, body })) if body.expose().len() <= MAX_ANSWER => {
                    Ok(CommandResult::OllamaApi { status, body })
                }
                Ok(Ok(_)) => Err(refused(FailureCode::Internal, "the adapter's answer can't travel")),
                Ok(Err(error)) => Err(error.into_failure()),
                Err(_) => {
                    tracing::error!("an adapter panicked in a command");
                    Err(refused(FailureCode::Internal, "the adapter failed"))
                }
            }
        })
    }

    /// Probes exactly this target. Nothing is observed, and no number is used, before the probe has ended in time.
    fn probe(
        &self,
        key: AdapterKey,
        target: Target,
        deadline_ms: u64,
    ) -> Result<impl Future<Output = Outcome> + Send + 'static, ExecutionFailure> {
        let (adapter, capabilities) = self.capabilities(&key)?;
        if !adapter.knows(&target, &capabilities) {
            return Err(refused(FailureCode::UnknownTarget, "the adapter has no such target"));
        }
        self.has_room()?;
        let limit = probe_timeout(adapter.config());
        let probe = Probe {
            provider: Arc::clone(adapter.provider()),
            target: target.clone(),
            observations: self.observations.clone(),
        };
        Ok(async move {
            let observed = match deadline_ms {
                0 => probe.observe(limit).await,
                ms => timeout(Duration::from_millis(ms), probe.observe(limit)).await.map_err(|_| late())?,
            };
            let (status, Some(health_observation_seq)) = observed else {
                return Err(refused(FailureCode::Internal, "the observation has no number"));
            };
            Ok(result(key, capabilities, Some(TargetHealth { target, status, health_observation_seq })))
        })
    }
}

/// The targets of an adapter are those of its Ready: they don't travel again.
fn result(adapter: AdapterKey, mut capabilities: Capabilities, health: Option<TargetHealth>) -> CommandResult {
    capabilities.targets.clear();
    CommandResult::Capabilities(CapabilitiesResult { adapter, capabilities, health })
}

fn refused(code: FailureCode, message: &'static str) -> ExecutionFailure {
    ExecutionFailure::refused(code, message)
}

fn late() -> ExecutionFailure {
    let (code, stage) = (FailureCode::DeadlineExceeded, FailureStage::Connect);
    ExecutionFailure::new(code, stage, ProviderContacted::Unknown, "the deadline of the command passed")
}
