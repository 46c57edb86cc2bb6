//! Decides how commands, liveness and the end of a connection cross the wire.

use std::num::NonZeroU32;

use iop_execution::Redacted;

use super::bounds::{Checked, adapter, bytes, method, required, session_id, target, text};
use super::{ConvertError, enums, failure};
use crate::limits::{MAX_COMMAND_BODY, MAX_PATH};
use crate::message::{
    CapabilitiesResult, CommandRequest, CommandResponse, CommandResult, Drain, Goodbye, NodeCommand, Ping, Pong,
    TargetHealth,
};
use crate::proto;
use proto::node_command_request::{Capabilities, Command, OllamaApi, TransportStatus};
use proto::node_command_response::{self, OllamaApiResult, Outcome, TransportStatusResult};

pub(super) const BODY_TOO_LARGE: &str = "the body of a command is too large";
pub(super) const NO_PATH: &str = "path is no valid text";

impl From<CommandRequest> for proto::NodeCommandRequest {
    fn from(request: CommandRequest) -> Self {
        let command = match request.command {
            NodeCommand::Capabilities { adapter, target } => Command::Capabilities(Capabilities {
                adapter: adapter.as_str().to_owned(),
                target: target.map(|target| target.as_str().to_owned()),
            }),
            NodeCommand::TransportStatus => Command::TransportStatus(TransportStatus {}),
            NodeCommand::OllamaApi { adapter, method, path, body } => Command::OllamaApi(OllamaApi {
                adapter: adapter.as_str().to_owned(),
                method: method.as_str().to_owned(),
                path,
                body: body.into_inner(),
            }),
        };
        Self {
            command_id: request.command_id,
            session_id: request.session_id.map(|id| id.as_str().to_owned()),
            deadline_ms: request.deadline_ms,
            command: Some(command),
        }
    }
}

impl TryFrom<proto::NodeCommandRequest> for CommandRequest {
    type Error = ConvertError;

    fn try_from(request: proto::NodeCommandRequest) -> Checked<Self> {
        let command = match required(request.command, "no known command")? {
            Command::Capabilities(command) => NodeCommand::Capabilities {
                adapter: adapter(&command.adapter)?,
                target: command.target.map(|name| target(&name)).transpose()?,
            },
            Command::TransportStatus(TransportStatus {}) => NodeCommand::TransportStatus,
            Command::OllamaApi(command) => NodeCommand::OllamaApi {
                adapter: adapter(&command.adapter)?,
                method: method(&command.method)?,
                path: text(command.path, MAX_PATH, NO_PATH)?,
                body: Redacted::new(bytes(command.body, MAX_COMMAND_BODY, BODY_TOO_LARGE)?),
            },
        };
        Ok(Self {
            command_id: request.command_id,
            session_id: session_id(request.session_id)?,
            deadline_ms: request.deadline_ms,
            command,
        })
    }
}

impl From<CommandResponse> for proto::NodeCommandResponse {
    fn from(response: CommandResponse) -> Self {
        let outcome = match response.outcome {
            Ok(CommandResult::TransportStatus { active_runs }) => {
                Outcome::TransportStatus(TransportStatusResult { active_runs })
            }
            Ok(CommandResult::Capabilities(result)) => Outcome::Capabilities(result.into()),
            Ok(CommandResult::OllamaApi { status, body }) => {
                Outcome::OllamaApi(OllamaApiResult { status: status.as_u16().into(), body: body.into_inner() })
            }
            Err(failure) => Outcome::Failed(failure.into()),
        };
        Self {
            command_id: response.command_id,
            session_id: response.session_id.map(|id| id.as_str().to_owned()),
            outcome: Some(outcome),
        }
    }
}

impl TryFrom<proto::NodeCommandResponse> for CommandResponse {
    type Error = ConvertError;

    fn try_from(response: proto::NodeCommandResponse) -> Checked<Self> {
        let outcome = match required(response.outcome, "a command's answer without outcome")? {
            Outcome::TransportStatus(TransportStatusResult { active_runs }) => {
                Ok(CommandResult::TransportStatus { active_runs })
            }
            Outcome::Capabilities(result) => Ok(CommandResult::Capabilities(result.try_into()?)),
            Outcome::OllamaApi(OllamaApiResult { status, body }) => Ok(CommandResult::OllamaApi {
                status: failure::http_status(status)?,
                body: Redacted::new(bytes(body, MAX_COMMAND_BODY, BODY_TOO_LARGE)?),
            }),
            Outcome::Failed(failure) => Err(failure.try_into()?),
        };
        Ok(Self { command_id: response.command_id, session_id: session_id(response.session_id)?, outcome })
    }
}

impl From<CapabilitiesResult> for node_command_response::CapabilitiesResult {
    fn from(result: CapabilitiesResult) -> Self {
        let CapabilitiesResult { adapter, capabilities, health } = result;
        Self {
            adapter: adapter.as_str().to_owned(),
            max_concurrency: capabilities.max_concurrency.map_or(0, NonZeroU32::get),
            runs: capabilities.runs,
            tunnels: capabilities.tunnels,
            commands: capabilities.commands,
            tools: capabilities.tools,
            reasoning: capabilities.reasoning,
            embeddings: capabilities.embeddings,
            messages: capabilities.messages,
            health: health.map(|health| node_command_response::TargetHealth {
                target: health.target.as_str().to_owned(),
                status: proto::ProviderHealth::from(health.status).into(),
                health_observation_seq: health.health_observation_seq.get(),
            }),
        }
    }
}

impl TryFrom<node_command_response::CapabilitiesResult> for CapabilitiesResult {
    type Error = ConvertError;

    fn try_from(result: node_command_response::CapabilitiesResult) -> Checked<Self> {
        let mut capabilities = iop_execution::Capabilities::runs_only();
        capabilities.max_concurrency = NonZeroU32::new(result.max_concurrency);
        capabilities.runs = result.runs;
        capabilities.tunnels = result.tunnels;
        capabilities.commands = result.commands;
        capabilities.tools = result.tools;
        capabilities.reasoning = result.reasoning;
        capabilities.embeddings = result.embeddings;
        capabilities.messages = result.messages;
        let health = result.health.map(|health| {
            Ok(TargetHealth {
                target: target(&health.target)?,
                status: enums::value::<proto::ProviderHealth, _>(health.status, "no known status of a target")?,
                health_observation_seq: failure::observation(health.health_observation_seq)?,
            })
        });
        Ok(Self { adapter: adapter(&result.adapter)?, capabilities, health: health.transpose()? })
    }
}

impl From<Ping> for proto::Ping {
    fn from(ping: Ping) -> Self {
        Self { nonce: ping.nonce }
    }
}

impl From<proto::Ping> for Ping {
    fn from(ping: proto::Ping) -> Self {
        Self { nonce: ping.nonce }
    }
}

impl From<Pong> for proto::Pong {
    fn from(pong: Pong) -> Self {
        let Pong { nonce, edge_time_ms } = pong;
        Self { nonce, edge_time_ms }
    }
}

impl From<proto::Pong> for Pong {
    fn from(pong: proto::Pong) -> Self {
        let proto::Pong { nonce, edge_time_ms } = pong;
        Self { nonce, edge_time_ms }
    }
}

impl From<Drain> for proto::Drain {
    fn from(drain: Drain) -> Self {
        Self { deadline_ms: drain.deadline_ms, returning: drain.returning }
    }
}

impl From<proto::Drain> for Drain {
    fn from(drain: proto::Drain) -> Self {
        Self { deadline_ms: drain.deadline_ms, returning: drain.returning }
    }
}

impl From<Goodbye> for proto::Goodbye {
    fn from(goodbye: Goodbye) -> Self {
        Self { code: proto::CloseCode::from(goodbye.code).into(), retry_after_ms: goodbye.retry_after_ms }
    }
}

impl TryFrom<proto::Goodbye> for Goodbye {
    type Error = ConvertError;

    fn try_from(goodbye: proto::Goodbye) -> Checked<Self> {
        Ok(Self {
            code: enums::value::<proto::CloseCode, _>(goodbye.code, "no known close code")?,
            retry_after_ms: goodbye.retry_after_ms,
        })
    }
}
