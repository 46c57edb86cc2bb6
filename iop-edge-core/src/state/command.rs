//! Decides which commands are on their way to Nodes, and what their answers do to the overlay (HLT-5, HLT-6).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use iop_execution::{AdapterKey, ExecutionFailure, FailureCode, NodeId, SessionId, Target};
use iop_wire::{CapabilitiesResult, CommandRequest, CommandResponse, CommandResult, NodeCommand, ToNode};

use crate::api::CommandError;
use crate::observe::{EvidenceResult, EvidenceSource, Observation, ProviderLevel, Violation};
use crate::state::EdgeState;
use crate::state::effect::Effect;
use crate::state::id::{CommandId, ConnectionId, Generation, ProviderKey};
use crate::state::timers::Timer;

/// Most commands that are on their way to one Node.
pub(crate) const MAX_COMMANDS: usize = 64;
/// Time a Node has for a question about a lowered provider: its probe may take 5 s.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);
/// Longest time a command can be given: a caller's larger number means this.
const LONGEST_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);
/// Time beyond its deadline that an answer may take to arrive.
const COMMAND_SLACK: Duration = Duration::from_secs(2);

/// Who waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asker {
    Caller,
    Overlay(ProviderKey),
}

impl Asker {
    /// The lowered provider that it is asked for.
    const fn provider(self) -> Option<ProviderKey> {
        match self {
            Self::Caller => None,
            Self::Overlay(key) => Some(key),
        }
    }
}

/// A command as it was sent.
#[derive(Debug)]
struct Pending {
    connection: ConnectionId,
    generation: Generation,
    /// What a CAPABILITIES command asked about.
    subject: Option<(AdapterKey, Target)>,
    asker: Asker,
}

/// Commands without an answer.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    last: u64,
    pending: BTreeMap<CommandId, Pending>,
}

impl EdgeState {
    /// Sends a command to a ready Node (EDG-1). Its answer comes as an effect.
    pub(crate) fn command(
        &mut self,
        node: &NodeId,
        command: NodeCommand,
        session_id: Option<SessionId>,
        deadline: Duration,
        now: Instant,
    ) -> Result<CommandId, CommandError> {
        self.handle_timeout(now);
        if self.catalog.node(node).is_none() {
            return Err(CommandError::UnknownNode);
        }
        let connection = self.registry.owner(node).filter(|id| self.registry.claim_of(*id).is_some());
        let connection = connection.ok_or(CommandError::NotReady)?;
        self.send_command(connection, command, session_id, deadline, Asker::Caller, now)
    }

    /// The pre-send fence of a command is that the connection is ready, in the same critical section (FEN-8).
    fn send_command(
        &mut self,
        connection: ConnectionId,
        command: NodeCommand,
        session_id: Option<SessionId>,
        deadline: Duration,
        asker: Asker,
        now: Instant,
    ) -> Result<CommandId, CommandError> {
        let generation = self.registry.generation(connection).ok_or(CommandError::NotReady)?;
        let on_way = self.commands.pending.values().filter(|pending| pending.connection == connection).count();
        if on_way >= MAX_COMMANDS {
            return Err(CommandError::TooMany);
        }
        let subject = match &command {
            NodeCommand::Capabilities { adapter, target } => target.clone().map(|target| (adapter.clone(), target)),
            _ => None,
        };
        let deadline = deadline.min(LONGEST_DEADLINE);
        self.commands.last += 1;
        let id = CommandId(self.commands.last);
        self.commands.pending.insert(id, Pending { connection, generation, subject, asker });
        self.timers.arm(Timer::Command(id), now + deadline + COMMAND_SLACK);
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let message = ToNode::Command(CommandRequest { command_id: id.0, session_id, deadline_ms, command });
        self.effects.push_back(Effect::Send { connection, message: Box::new(message) });
        Ok(id)
    }

    /// A Node answered. An answer nobody waits for any more is late; one to a command that was never sent is a violation.
    pub(crate) fn handle_command_response(
        &mut self,
        connection: ConnectionId,
        response: CommandResponse,
        now: Instant,
    ) {
        self.handle_timeout(now);
        let id = CommandId(response.command_id);
        if id.0 == 0 || id.0 > self.commands.last || self.registry.claim_of(connection).is_none() {
            return self.violation(connection, Violation::State, now);
        }
        let of_connection = |pending: &Pending| pending.connection == connection;
        if !self.commands.pending.get(&id).is_some_and(of_connection) {
            return self.effects.push_back(Effect::Observe(Observation::LateMessage));
        }
        let Some(pending) = self.commands.pending.remove(&id) else { return };
        self.timers.disarm(Timer::Command(id));
        if let Some((adapter, target)) = &pending.subject {
            let result = self.capabilities(&pending, adapter, target, &response.outcome, now);
            let source = EvidenceSource::Capabilities;
            self.effects.push_back(Effect::Observe(Observation::HealthEvidence { source, result }));
        }
        self.answered(id, &pending, response.outcome.map_err(CommandError::Failed), now);
    }

    /// A command has had its time.
    pub(super) fn command_over(&mut self, id: CommandId, now: Instant) {
        if let Some(pending) = self.commands.pending.remove(&id) {
            self.answered(id, &pending, Err(CommandError::TimedOut), now);
        }
    }

    /// The connection ended: nothing of it is answered any more.
    pub(super) fn forget_commands(&mut self, connection: ConnectionId, now: Instant) {
        let of_connection = self.commands.pending.iter().filter(|(_, pending)| pending.connection == connection);
        let ids: Vec<_> = of_connection.map(|(id, _)| *id).collect();
        for id in ids {
            self.timers.disarm(Timer::Command(id));
            if let Some(pending) = self.commands.pending.remove(&id) {
                self.answered(id, &pending, Err(CommandError::Disconnected), now);
            }
        }
    }

    fn answered(
        &mut self,
        id: CommandId,
        pending: &Pending,
        outcome: Result<CommandResult, CommandError>,
        now: Instant,
    ) {
        match pending.asker {
            Asker::Caller => self.effects.push_back(Effect::Commanded { id, outcome: Box::new(outcome) }),
            Asker::Overlay(key) => {
                if let Some(provider) = self.fleet.by_key_mut(key) {
                    provider.overlay.answered();
                }
                self.plan_question(key, now);
            }
        }
    }

    /// What a CAPABILITIES result does: raise exactly the provider it was asked about, in its own generation (HLT-5).
    fn capabilities(
        &mut self,
        pending: &Pending,
        adapter: &AdapterKey,
        target: &Target,
        outcome: &Result<CommandResult, ExecutionFailure>,
        now: Instant,
    ) -> EvidenceResult {
        let (told, health) = match outcome {
            Ok(CommandResult::Capabilities(CapabilitiesResult { adapter, health: Some(health), .. })) => {
                (adapter, health)
            }
            Ok(_) => return EvidenceResult::Malformed,
            Err(failure) => {
                // What lowered the provider is gone, and its Node says so: nothing can be asked about it any more, and nothing
                // is known of what the provider serves now.
                let gone = matches!(failure.code, FailureCode::UnknownAdapter | FailureCode::UnknownTarget);
                let provider = self.fleet.serving_as_mut(pending.generation, pending.asker.provider()).filter(|_| gone);
                let Some(provider) = provider else { return EvidenceResult::Unknown };
                let (key, result) = (provider.key, provider.overlay.gone(adapter, target));
                return self.raised(key, result, now);
            }
        };
        if *told != *adapter || health.target != *target {
            return EvidenceResult::Mismatch;
        }
        let Some(provider) = self.fleet.serving_mut(pending.generation, adapter) else {
            return EvidenceResult::Mismatch;
        };
        let result = provider.overlay.probed(health.status, Some(health.health_observation_seq), adapter, target);
        let key = provider.key;
        self.raised(key, result, now)
    }

    fn raised(&mut self, key: ProviderKey, result: EvidenceResult, now: Instant) -> EvidenceResult {
        if result == EvidenceResult::Applied {
            self.timers.disarm(Timer::Question(key));
            let to = ProviderLevel::Available;
            self.effects.push_back(Effect::Observe(Observation::HealthTransition { to }));
            self.resolve_waiters(now);
        }
        result
    }

    /// Plans the next question about a lowered provider.
    pub(super) fn plan_question(&mut self, key: ProviderKey, now: Instant) {
        match self.fleet.by_key_mut(key).and_then(|provider| provider.overlay.next_question()) {
            Some(wait) => self.timers.arm(Timer::Question(key), now + wait),
            None => self.timers.disarm(Timer::Question(key)),
        }
    }

    /// Asks about a lowered provider: exactly the adapter and target that lowered it, and only a ready generation (HLT-6).
    pub(super) fn ask_about(&mut self, key: ProviderKey, now: Instant) {
        let Some(provider) = self.fleet.by_key_mut(key) else { return };
        let node = provider.node.clone();
        let Some((adapter, target)) = provider.overlay.ask() else { return };
        let command = NodeCommand::Capabilities { adapter, target: Some(target) };
        let connection = self.registry.owner(&node).ok_or(CommandError::NotReady);
        let sent = connection.and_then(|connection| {
            self.send_command(connection, command, None, PROBE_DEADLINE, Asker::Overlay(key), now)
        });
        if sent.is_err() {
            if let Some(provider) = self.fleet.by_key_mut(key) {
                provider.overlay.answered();
            }
            self.plan_question(key, now);
        }
    }

    #[cfg(test)]
    pub(crate) fn commands_on_their_way(&self) -> usize {
        self.commands.pending.len()
    }
}
