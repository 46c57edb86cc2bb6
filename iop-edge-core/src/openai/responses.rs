//! Decides how a response is served: its request becomes a chat, the provider's chat becomes its events (API-8).
//!
//! | module | decides |
//! | --- | --- |
//! | `request`, `input` | which chat a request is, item by item |
//! | `echo`, `items` | how the response object and its items look |
//! | `builder` | which events a piece of an answer makes |
//! | `chunk` | what a chunk of a tunnelled chat says |
//!
//! Here the two wires meet: events of a run and chunks of a tunnel become the same calls of the builder. A provider's own
//! responses are never passed. What a tunnel means (its head, errors, ends) is decided by [`TunnelAnswer`] as for a chat; it
//! writes into a gate of its own, and only what leaves that gate is read.

mod builder;
mod chunk;
mod echo;
mod input;
mod items;
mod request;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use iop_execution::sse::{BlockContent, split_blocks};
use iop_execution::{
    ExecutionFailure, FailureCode, FailureStage, ProviderContacted, RunEvent, RunEventKind, TunnelFrame, Usage,
};
use serde_json::Value;

use self::builder::Builder;
use self::chunk::Calls;
pub(crate) use self::echo::Echo;
use self::items::PartKind;
pub(crate) use self::request::read;
use super::chat::commit::{Form, Gate};
use super::chat::tunnel::{TunnelAnswer, Wish};
use super::config::OpenAiConfig;
use super::errors::ApiError;
use super::kind::Kind;

const NO_CHAT: &str = "the provider's answer is no chat completion";

/// One answer that becomes a response.
#[derive(Debug)]
pub(crate) struct ResponseAnswer {
    stream: bool,
    source: Source,
    builder: Builder,
}

#[derive(Debug)]
enum Source {
    Run(Option<Usage>),
    Tunnel(Box<Tunnel>),
}

/// A chat that comes by tunnel.
#[derive(Debug)]
struct Tunnel {
    answer: TunnelAnswer,
    /// What the chat's client would be given.
    gate: Gate,
    /// An answer that is not streamed, so far.
    whole: BytesMut,
    calls: Calls,
}

impl ResponseAnswer {
    /// `model` is what the response says; `tunnel` = by that wire.
    pub(crate) fn new(echo: &Arc<Echo>, model: &str, config: &OpenAiConfig, stream: bool, tunnel: bool) -> Self {
        let source = if tunnel {
            let wish = Wish {
                stream,
                model: None,
                usage: true,
                answer: Kind::Chat.answer(),
                mended: Kind::Responses.mended(),
            };
            let gate = Gate::new(if stream { Form::Events } else { Form::Document });
            let (whole, calls) = (BytesMut::new(), Calls::default());
            Source::Tunnel(Box::new(Tunnel { answer: TunnelAnswer::new(wish), gate, whole, calls }))
        } else {
            Source::Run(None)
        };
        Self { stream, source, builder: Builder::new(Arc::clone(echo), model, config.unix_time, stream) }
    }

    pub(crate) fn usage(&self) -> Option<Usage> {
        match &self.source {
            Source::Run(usage) => *usage,
            Source::Tunnel(tunnel) => tunnel.answer.usage(),
        }
    }

    /// A call has begun.
    pub(crate) fn has_tool_call(&self) -> bool {
        self.builder.has_call()
    }

    /// How long the rest of a tunnel is awaited, once it can't matter any more.
    pub(crate) fn linger(&self) -> Option<Duration> {
        match &self.source {
            Source::Run(_) => None,
            Source::Tunnel(tunnel) => tunnel.answer.linger(),
        }
    }

    /// The next event of a run.
    pub(crate) fn event(&mut self, event: RunEvent, gate: &mut Gate) {
        let Source::Run(usage) = &mut self.source else { return self.fail(lost(), gate) };
        if let Some(reported) = event.usage {
            usage.get_or_insert_default().update(reported);
        }
        let (builder, mut out) = (&mut self.builder, Vec::new());
        let built = match event.kind {
            RunEventKind::Start | RunEventKind::Usage => Ok(()),
            RunEventKind::Delta(text) => builder.piece(PartKind::Text, &text, &mut out),
            RunEventKind::ReasoningDelta(text) => builder.piece(PartKind::Reasoning, &text, &mut out),
            RunEventKind::ToolCallDelta(call) => builder.call(&call, &mut out),
            RunEventKind::Complete(finish) => {
                builder.finish(finish);
                return self.complete(gate);
            }
            RunEventKind::Error(failure) => Err(ApiError::from_failure(&failure, None)),
            RunEventKind::Cancelled(reason) => Err(ApiError::from_cancel(reason)),
        };
        self.give(built, out, gate);
    }

    /// The next frame of a tunnel.
    pub(crate) fn frame(&mut self, frame: TunnelFrame, gate: &mut Gate) {
        if let Source::Tunnel(tunnel) = &mut self.source {
            tunnel.answer.frame(frame, &mut tunnel.gate);
        }
        self.translate(gate);
    }

    /// Whatever the answer waited for did not come soon enough.
    pub(crate) fn lingered(&mut self, gate: &mut Gate) {
        if let Source::Tunnel(tunnel) = &mut self.source {
            tunnel.answer.lingered(&mut tunnel.gate);
        }
        self.translate(gate);
    }

    /// The output ended without a terminal.
    pub(crate) fn lost(&mut self, gate: &mut Gate) {
        match &mut self.source {
            Source::Run(_) => self.fail(lost(), gate),
            Source::Tunnel(tunnel) => {
                tunnel.answer.lost(&mut tunnel.gate);
                self.translate(gate);
            }
        }
    }

    /// Ends it as failed: by a status, or in the stream.
    pub(crate) fn fail(&mut self, error: ApiError, gate: &mut Gate) {
        let event = self.builder.fail(&error, self.usage().as_ref());
        gate.fail_with(error, event);
    }

    /// Reads what has left the chat's gate.
    fn translate(&mut self, gate: &mut Gate) {
        while let Source::Tunnel(tunnel) = &mut self.source
            && let Some(bytes) = tunnel.gate.take()
        {
            if !self.stream {
                tunnel.whole.extend_from_slice(&bytes);
                continue;
            }
            let mut out = Vec::new();
            let read = events(&bytes, tunnel, &mut self.builder, &mut out);
            self.give(read, out, gate);
        }
        let Source::Tunnel(tunnel) = &mut self.source else { return };
        if let Some(error) = tunnel.gate.failure().cloned() {
            return self.fail(error, gate);
        }
        if !tunnel.gate.is_ended() {
            return;
        }
        if !self.stream {
            let read = match serde_json::from_slice::<Value>(&tunnel.whole) {
                Ok(value) => chunk::feed(&value, &mut tunnel.calls, &mut self.builder, &mut Vec::new()),
                Err(_) => Err(ApiError::bad_gateway(NO_CHAT)),
            };
            if let Err(error) = read {
                return self.fail(error, gate);
            }
        }
        self.complete(gate);
    }

    fn complete(&mut self, gate: &mut Gate) {
        let mut out = Vec::new();
        match self.builder.end(self.usage().as_ref(), &mut out) {
            Ok(()) => {
                gate.hold(out.into());
                gate.complete();
            }
            Err(error) => self.fail(error, gate),
        }
    }

    fn give(&mut self, built: Result<(), ApiError>, out: Vec<u8>, gate: &mut Gate) {
        if !out.is_empty() {
            gate.content(out.into());
        }
        if let Err(error) = built {
            self.fail(error, gate);
        }
    }
}

/// Reads whole events of a chat. Errors and ends among them were seen by the tunnel's own reader.
fn events(bytes: &Bytes, tunnel: &mut Tunnel, builder: &mut Builder, out: &mut Vec<u8>) -> Result<(), ApiError> {
    for block in split_blocks(bytes) {
        let Ok(block) = block else { return Err(ApiError::bad_gateway(NO_CHAT)) };
        let BlockContent::Event(event) = block.content else { continue };
        if event.is_done() {
            continue;
        }
        let Ok(value) = serde_json::from_slice::<Value>(&event.data) else {
            return Err(ApiError::bad_gateway(NO_CHAT));
        };
        chunk::feed(&value, &mut tunnel.calls, builder, out)?;
    }
    Ok(())
}

/// The events of a response that failed before it had any, for a client whose head is gone already.
pub(crate) fn failed(echo: &Arc<Echo>, config: &OpenAiConfig, error: &ApiError) -> Bytes {
    Builder::new(Arc::clone(echo), echo.model(), config.unix_time, true).fail(error, None)
}

fn lost() -> ApiError {
    let message = "the connection to the node ended";
    let contacted = ProviderContacted::Unknown;
    let failure = ExecutionFailure::new(FailureCode::Disconnected, FailureStage::Stream, contacted, message);
    ApiError::from_failure(&failure, None)
}
