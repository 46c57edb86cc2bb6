//! Decides, without a copy or an encoding, whether a peer would take a message.
//!
//! What a type holds already is not looked at again: names, methods, headers, statuses, closed lists. A message whose parts
//! are in range is below its size limit, except for those that are lists: they are rare, and are encoded to be measured.

use http::HeaderMap;
use iop_execution::{RunEvent, RunEventKind, TunnelFrame};
use prost::Message as _;

use super::WireMessage;
use super::bounds::{Checked, ensure, header_bounds, is_named, is_text};
use super::dispatch::{NO_PATH as NO_TUNNEL_PATH, NO_PROFILE, NO_ROUTE, NO_SLOT, lease_bounds, window};
use super::output::{call_bounds, chunk_bounds, delta_bounds, usage_bounds};
use super::session::{BODY_TOO_LARGE, NO_PATH};
use crate::limits::{MAX_COMMAND_BODY, MAX_PATH};
use crate::message::{CommandRequest, CommandResult, DispatchHead, NodeCommand, Sequenced, ToEdge, ToNode};

pub(super) fn to_edge(message: &ToEdge) -> Checked<()> {
    match message {
        ToEdge::Event(_, item) => event(item),
        ToEdge::Frame(_, _, item) => frame(item),
        ToEdge::CommandResponse(response) => match &response.outcome {
            Ok(CommandResult::OllamaApi { body, .. }) => command_body(body.expose()),
            Ok(CommandResult::Capabilities(_) | CommandResult::TransportStatus { .. }) | Err(_) => Ok(()),
        },
        ToEdge::Hello(_) | ToEdge::Register(_) | ToEdge::Ready(_) | ToEdge::ConfigAck(_) => by_encoding(message),
        ToEdge::Accepted(_)
        | ToEdge::Credit(..)
        | ToEdge::Ping(_)
        | ToEdge::Pong(_)
        | ToEdge::Drain(_)
        | ToEdge::Goodbye(_) => Ok(()),
    }
}

pub(super) fn to_node(message: &ToNode) -> Checked<()> {
    match message {
        ToNode::Chunk(chunk) => chunk_bounds(&chunk.data),
        ToNode::Run(request) => head(&request.head),
        ToNode::Tunnel(request) => {
            head(&request.head)?;
            ensure((), is_text(request.path.expose(), MAX_PATH), NO_TUNNEL_PATH)?;
            headers(request.headers.expose())
        }
        ToNode::Command(request) => command(request),
        ToNode::HelloAck(_) | ToNode::RegisterResponse(_) | ToNode::ConfigUpdate(_) => by_encoding(message),
        ToNode::ReadyResponse(_)
        | ToNode::Credit(..)
        | ToNode::Cancel(..)
        | ToNode::Ping(_)
        | ToNode::Pong(_)
        | ToNode::Drain(_)
        | ToNode::Goodbye(_) => Ok(()),
    }
}

/// As the peer would do it. Needs the numbers that an outbox gives.
pub(super) fn by_encoding<M: WireMessage>(message: &M) -> Checked<()> {
    let envelope = M::into_envelope(Sequenced { seq: u64::MAX, message: message.clone() });
    ensure((), envelope.encoded_len() <= message.limit(), "the message is larger than allowed")?;
    M::from_envelope(envelope).map(|_| ())
}

fn event(event: &RunEvent) -> Checked<()> {
    usage_bounds(&event.kind, event.usage.is_some())?;
    match &event.kind {
        RunEventKind::Delta(text) | RunEventKind::ReasoningDelta(text) => delta_bounds(text),
        RunEventKind::ToolCallDelta(call) => call_bounds(call),
        // What is wrong with a failure is mended on its way.
        RunEventKind::Start
        | RunEventKind::Usage
        | RunEventKind::Complete(_)
        | RunEventKind::Error(_)
        | RunEventKind::Cancelled(_) => Ok(()),
    }
}

fn frame(frame: &TunnelFrame) -> Checked<()> {
    match frame {
        TunnelFrame::Body { bytes, .. } => chunk_bounds(bytes),
        TunnelFrame::Head(head) => headers(&head.headers),
        TunnelFrame::Usage(_) | TunnelFrame::End | TunnelFrame::Failed(_) | TunnelFrame::Cancelled(_) => Ok(()),
    }
}

fn head(head: &DispatchHead) -> Checked<()> {
    window(head.window)?;
    lease_bounds(head.credential_lease.expose(), head.credential_scope.is_some())?;
    let Some(scope) = &head.credential_scope else { return Ok(()) };
    ensure((), is_named(&scope.route), NO_ROUTE)?;
    ensure((), is_named(&scope.slot), NO_SLOT)?;
    ensure((), is_named(&scope.profile), NO_PROFILE)
}

fn headers(headers: &HeaderMap) -> Checked<()> {
    header_bounds(headers.len(), headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum())
}

fn command(request: &CommandRequest) -> Checked<()> {
    match &request.command {
        NodeCommand::Capabilities { .. } | NodeCommand::TransportStatus => Ok(()),
        NodeCommand::OllamaApi { path, body, .. } => {
            ensure((), is_text(path, MAX_PATH), NO_PATH)?;
            command_body(body.expose())
        }
    }
}

fn command_body(body: &[u8]) -> Checked<()> {
    ensure((), body.len() <= MAX_COMMAND_BODY, BODY_TOO_LARGE)
}
