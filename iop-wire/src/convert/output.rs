//! Decides how events and tunnel frames cross the wire.

use bytes::Bytes;
use iop_execution::{
    CancelReason, FinishReason, FrameFlags, RunEvent, RunEventKind, ToolCallDelta, TunnelFrame, TunnelHead,
};

use super::bounds::{Checked, ensure, headers, headers_to_wire, n, required, run, within};
use super::{ConvertError, enums, failure};
use crate::limits::{MAX_CHUNK, MAX_DELTA};
use crate::message::RunNumber;
use crate::proto;
use proto::provider_tunnel_frame::{Body, End, Head, Part};
use proto::run_event::Kind;

impl From<(RunNumber, RunEvent)> for proto::RunEvent {
    fn from((run, event): (RunNumber, RunEvent)) -> Self {
        let kind = match event.kind {
            RunEventKind::Start => Kind::Start(proto::Start {}),
            RunEventKind::Delta(text) => Kind::Delta(text),
            RunEventKind::ReasoningDelta(text) => Kind::ReasoningDelta(text),
            RunEventKind::ToolCallDelta(call) => Kind::ToolCallDelta(call.into()),
            RunEventKind::Usage => Kind::UsageReport(proto::UsageReport {}),
            RunEventKind::Complete(finish) => Kind::Complete(proto::FinishReason::from(finish).into()),
            RunEventKind::Error(failure) => Kind::Error(failure.into()),
            RunEventKind::Cancelled(reason) => Kind::Cancelled(proto::CancelReason::from(reason).into()),
        };
        Self { run: run.0, n: event.seq, kind: Some(kind), usage: event.usage.map(Into::into) }
    }
}

impl TryFrom<proto::RunEvent> for (RunNumber, RunEvent) {
    type Error = ConvertError;

    fn try_from(event: proto::RunEvent) -> Checked<Self> {
        let number = run(event.run)?;
        within(number, || {
            let kind = event_kind(required(event.kind, "an event of no known kind")?)?;
            usage_bounds(&kind, event.usage.is_some())?;
            Ok((number, RunEvent { seq: n(event.n)?, kind, usage: event.usage.map(Into::into) }))
        })
    }
}

fn event_kind(kind: Kind) -> Checked<RunEventKind> {
    Ok(match kind {
        Kind::Delta(text) => RunEventKind::Delta(delta(text)?),
        Kind::ReasoningDelta(text) => RunEventKind::ReasoningDelta(delta(text)?),
        Kind::ToolCallDelta(call) => RunEventKind::ToolCallDelta(call.try_into()?),
        Kind::Start(proto::Start {}) => RunEventKind::Start,
        Kind::UsageReport(proto::UsageReport {}) => RunEventKind::Usage,
        Kind::Complete(finish) => RunEventKind::Complete(finish_reason(finish)?),
        Kind::Error(failure) => RunEventKind::Error(failure.try_into()?),
        Kind::Cancelled(reason) => RunEventKind::Cancelled(cancel_reason(reason)?),
    })
}

fn delta(text: String) -> Checked<String> {
    delta_bounds(&text)?;
    Ok(text)
}

pub(super) fn delta_bounds(text: &str) -> Checked<()> {
    ensure((), text.len() <= MAX_DELTA, "a delta is longer than allowed")
}

pub(super) fn call_bounds(call: &ToolCallDelta) -> Checked<()> {
    let fixed = call.id.as_ref().map_or(0, String::len) + call.name.as_ref().map_or(0, String::len);
    let holds = fixed <= MAX_DELTA && call.arguments.len() <= MAX_DELTA;
    ensure((), holds, "a piece of a tool call is longer than allowed")
}

pub(super) fn usage_bounds(kind: &RunEventKind, usage: bool) -> Checked<()> {
    ensure((), usage || !matches!(kind, RunEventKind::Usage), "a usage report without usage")
}

fn finish_reason(number: i32) -> Checked<FinishReason> {
    enums::value::<proto::FinishReason, _>(number, "no known finish reason")
}

pub(super) fn cancel_reason(number: i32) -> Checked<CancelReason> {
    enums::value::<proto::CancelReason, _>(number, "no known cancel reason")
}

impl From<ToolCallDelta> for proto::ToolCallDelta {
    fn from(call: ToolCallDelta) -> Self {
        let ToolCallDelta { index, id, name, arguments } = call;
        Self { index, id, name, arguments }
    }
}

impl TryFrom<proto::ToolCallDelta> for ToolCallDelta {
    type Error = ConvertError;

    fn try_from(call: proto::ToolCallDelta) -> Checked<Self> {
        let proto::ToolCallDelta { index, id, name, arguments } = call;
        let call = Self { index, id, name, arguments };
        call_bounds(&call)?;
        Ok(call)
    }
}

impl From<(RunNumber, u64, TunnelFrame)> for proto::ProviderTunnelFrame {
    fn from((run, n, frame): (RunNumber, u64, TunnelFrame)) -> Self {
        let part = match frame {
            TunnelFrame::Head(head) => {
                Part::Head(Head { status: head.status.as_u16().into(), headers: headers_to_wire(&head.headers) })
            }
            TunnelFrame::Body { bytes, flags } => {
                // Progress is a matter of the Node alone.
                Part::Body(Body { bytes, flags: flags.without(FrameFlags::PROGRESS).bits().into() })
            }
            TunnelFrame::Usage(usage) => Part::Usage(usage.into()),
            TunnelFrame::End => Part::End(End {}),
            TunnelFrame::Failed(failure) => Part::Failed(failure.into()),
            TunnelFrame::Cancelled(reason) => Part::Cancelled(proto::CancelReason::from(reason).into()),
        };
        Self { run: run.0, n, part: Some(part) }
    }
}

impl TryFrom<proto::ProviderTunnelFrame> for (RunNumber, u64, TunnelFrame) {
    type Error = ConvertError;

    fn try_from(frame: proto::ProviderTunnelFrame) -> Checked<Self> {
        let number = run(frame.run)?;
        within(number, || {
            let part = tunnel_part(required(frame.part, "a tunnel frame of no known kind")?)?;
            Ok((number, n(frame.n)?, part))
        })
    }
}

fn tunnel_part(part: Part) -> Checked<TunnelFrame> {
    Ok(match part {
        Part::Body(Body { bytes, flags }) => {
            let flags = required(FrameFlags::from_wire(flags), "an unknown flag")?;
            TunnelFrame::Body { bytes: chunk(bytes)?, flags }
        }
        Part::Head(head) => TunnelFrame::Head(TunnelHead {
            status: failure::http_status(head.status)?,
            headers: headers(head.headers)?,
        }),
        Part::Usage(usage) => TunnelFrame::Usage(usage.into()),
        Part::End(End {}) => TunnelFrame::End,
        Part::Failed(failure) => TunnelFrame::Failed(failure.try_into()?),
        Part::Cancelled(reason) => TunnelFrame::Cancelled(cancel_reason(reason)?),
    })
}

/// Below this a payload is copied out of the transport's buffer, which it would keep alive as a whole: what waits for a slow
/// reader must cost what it is charged (WIR-7).
const COPY_BELOW: usize = 4 * 1024;

/// A piece of a body.
pub(super) fn chunk(bytes: Bytes) -> Checked<Bytes> {
    chunk_bounds(&bytes)?;
    Ok(if bytes.len() < COPY_BELOW { Bytes::copy_from_slice(&bytes) } else { bytes })
}

pub(super) fn chunk_bounds(bytes: &[u8]) -> Checked<()> {
    ensure((), bytes.len() <= MAX_CHUNK, "a piece of a body is larger than allowed")
}
