//! Decides which role may say what: a body from the wrong role is a violation (WIR-1).

use super::bounds::{Checked, required, run, within};
use super::{ConvertError, output};
use crate::message::{Sequenced, ToEdge, ToNode};
use crate::proto;
use proto::envelope::Body;

const UNKNOWN: &str = "an envelope without a known body";
const WRONG_ROLE: &str = "a message that the other role sends";

impl From<Sequenced<ToEdge>> for proto::Envelope {
    fn from(envelope: Sequenced<ToEdge>) -> Self {
        let body = match envelope.message {
            ToEdge::Event(run, event) => Body::RunEvent((run, event).into()),
            ToEdge::Frame(run, n, frame) => Body::TunnelFrame((run, n, frame).into()),
            ToEdge::Accepted(run) => Body::RunAccepted(proto::RunAccepted { run: run.0 }),
            ToEdge::Credit(run, bytes) => Body::WindowCredit(proto::WindowCredit { run: run.0, bytes }),
            ToEdge::Hello(hello) => Body::Hello(hello.into()),
            ToEdge::Register(request) => Body::RegisterRequest(request.into()),
            ToEdge::Ready(request) => Body::NodeReadyRequest(request.into()),
            ToEdge::CommandResponse(response) => Body::NodeCommandResponse(response.into()),
            ToEdge::ConfigAck(ack) => Body::ConfigAck(ack.into()),
            ToEdge::Ping(ping) => Body::Ping(ping.into()),
            ToEdge::Pong(pong) => Body::Pong(pong.into()),
            ToEdge::Drain(drain) => Body::Drain(drain.into()),
            ToEdge::Goodbye(goodbye) => Body::Goodbye(goodbye.into()),
        };
        Self { seq: envelope.seq, body: Some(body) }
    }
}

impl TryFrom<proto::Envelope> for Sequenced<ToEdge> {
    type Error = ConvertError;

    fn try_from(envelope: proto::Envelope) -> Checked<Self> {
        let message = match required(envelope.body, UNKNOWN)? {
            Body::RunEvent(event) => {
                let (run, event) = event.try_into()?;
                ToEdge::Event(run, event)
            }
            Body::TunnelFrame(frame) => {
                let (run, n, frame) = frame.try_into()?;
                ToEdge::Frame(run, n, frame)
            }
            Body::RunAccepted(accepted) => ToEdge::Accepted(run(accepted.run)?),
            Body::WindowCredit(credit) => ToEdge::Credit(run(credit.run)?, credit.bytes),
            Body::Hello(hello) => ToEdge::Hello(hello.try_into()?),
            Body::RegisterRequest(request) => ToEdge::Register(request.try_into()?),
            Body::NodeReadyRequest(request) => ToEdge::Ready(request.try_into()?),
            Body::NodeCommandResponse(response) => ToEdge::CommandResponse(response.try_into()?),
            Body::ConfigAck(ack) => ToEdge::ConfigAck(ack.try_into()?),
            Body::Ping(ping) => ToEdge::Ping(ping.into()),
            Body::Pong(pong) => ToEdge::Pong(pong.into()),
            Body::Drain(drain) => ToEdge::Drain(drain.into()),
            Body::Goodbye(goodbye) => ToEdge::Goodbye(goodbye.try_into()?),
            Body::RequestChunk(_)
            | Body::RunRequest(_)
            | Body::TunnelRequest(_)
            | Body::CancelRequest(_)
            | Body::HelloAck(_)
            | Body::RegisterResponse(_)
            | Body::NodeReadyResponse(_)
            | Body::NodeCommandRequest(_)
            | Body::ConfigUpdate(_) => return Err(ConvertError::new(WRONG_ROLE)),
        };
        Ok(Self { seq: envelope.seq, message })
    }
}

impl From<Sequenced<ToNode>> for proto::Envelope {
    fn from(envelope: Sequenced<ToNode>) -> Self {
        let body = match envelope.message {
            ToNode::Chunk(chunk) => Body::RequestChunk(chunk.into()),
            ToNode::Credit(run, bytes) => Body::WindowCredit(proto::WindowCredit { run: run.0, bytes }),
            ToNode::Run(request) => Body::RunRequest(Box::new(request.into())),
            ToNode::Tunnel(request) => Body::TunnelRequest(Box::new(request.into())),
            ToNode::Cancel(run, reason) => Body::CancelRequest(proto::CancelRequest {
                run: run.0,
                reason: proto::CancelReason::from(reason).into(),
            }),
            ToNode::HelloAck(ack) => Body::HelloAck(ack.into()),
            ToNode::RegisterResponse(response) => Body::RegisterResponse(response.into()),
            ToNode::ReadyResponse(response) => Body::NodeReadyResponse(response.into()),
            ToNode::Command(request) => Body::NodeCommandRequest(request.into()),
            ToNode::ConfigUpdate(update) => Body::ConfigUpdate(update.into()),
            ToNode::Ping(ping) => Body::Ping(ping.into()),
            ToNode::Pong(pong) => Body::Pong(pong.into()),
            ToNode::Drain(drain) => Body::Drain(drain.into()),
            ToNode::Goodbye(goodbye) => Body::Goodbye(goodbye.into()),
        };
        Self { seq: envelope.seq, body: Some(body) }
    }
}

impl TryFrom<proto::Envelope> for Sequenced<ToNode> {
    type Error = ConvertError;

    fn try_from(envelope: proto::Envelope) -> Checked<Self> {
        let message = match required(envelope.body, UNKNOWN)? {
            Body::RequestChunk(chunk) => ToNode::Chunk(chunk.try_into()?),
            Body::WindowCredit(credit) => ToNode::Credit(run(credit.run)?, credit.bytes),
            Body::RunRequest(request) => ToNode::Run((*request).try_into()?),
            Body::TunnelRequest(request) => ToNode::Tunnel((*request).try_into()?),
            Body::CancelRequest(cancel) => {
                let number = run(cancel.run)?;
                ToNode::Cancel(number, within(number, || output::cancel_reason(cancel.reason))?)
            }
            Body::HelloAck(ack) => ToNode::HelloAck(ack.try_into()?),
            Body::RegisterResponse(response) => ToNode::RegisterResponse(response.try_into()?),
            Body::NodeReadyResponse(response) => ToNode::ReadyResponse(response.into()),
            Body::NodeCommandRequest(request) => ToNode::Command(request.try_into()?),
            Body::ConfigUpdate(update) => ToNode::ConfigUpdate(update.try_into()?),
            Body::Ping(ping) => ToNode::Ping(ping.into()),
            Body::Pong(pong) => ToNode::Pong(pong.into()),
            Body::Drain(drain) => ToNode::Drain(drain.into()),
            Body::Goodbye(goodbye) => ToNode::Goodbye(goodbye.try_into()?),
            Body::RunEvent(_)
            | Body::TunnelFrame(_)
            | Body::RunAccepted(_)
            | Body::Hello(_)
            | Body::RegisterRequest(_)
            | Body::NodeReadyRequest(_)
            | Body::NodeCommandResponse(_)
            | Body::ConfigAck(_) => return Err(ConvertError::new(WRONG_ROLE)),
        };
        Ok(Self { seq: envelope.seq, message })
    }
}
