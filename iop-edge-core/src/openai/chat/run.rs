//! Decides what the events of a normalised run mean for the client.
//!
//! Inputs: [`RunAnswer::event`], [`RunAnswer::lost`]. Output: what it puts into the [`Gate`]; exactly one end.

use std::collections::HashSet;

use iop_execution::{
    ExecutionFailure, FailureCode, FailureStage, FinishReason, ProviderContacted, RunEvent, RunEventKind, RunId,
    ToolCallDelta, Usage,
};

use super::commit::Gate;
use super::render::{Answer, Call, Renderer, usage_object};
use crate::openai::config::MAX_ANSWER_BYTES;
use crate::openai::errors::ApiError;

/// Most tool calls of one answer.
const MAX_CALLS: usize = 1_024;

/// One answer built from events.
#[derive(Debug)]
pub(crate) struct RunAnswer {
    run_id: RunId,
    renderer: Renderer,
    wants_usage: bool,
    usage: Option<Usage>,
    /// The whole answer, for a client that wants no stream.
    answer: Option<Answer>,
    length: usize,
    begun: bool,
    /// Indexes of the tool calls that have begun.
    calls: HashSet<u32>,
}

impl RunAnswer {
    pub(crate) fn new(run_id: RunId, renderer: Renderer, stream: bool, wants_usage: bool) -> Self {
        Self {
            run_id,
            renderer,
            wants_usage,
            usage: None,
            answer: (!stream).then(Answer::default),
            length: 0,
            begun: false,
            calls: HashSet::new(),
        }
    }

    pub(crate) const fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// A tool call has begun.
    pub(crate) fn has_tool_call(&self) -> bool {
        !self.calls.is_empty()
    }

    /// The next event.
    pub(crate) fn event(&mut self, event: RunEvent, gate: &mut Gate) {
        if let Some(usage) = event.usage {
            self.usage.get_or_insert_default().update(usage);
        }
        match event.kind {
            RunEventKind::Start | RunEventKind::Usage => {}
            RunEventKind::Delta(text) => self.text(&text, gate),
            RunEventKind::ReasoningDelta(text) => self.reasoning(&text, gate),
            RunEventKind::ToolCallDelta(call) => self.tool_call(&call, gate),
            RunEventKind::Complete(finish) => self.complete(finish, gate),
            RunEventKind::Error(failure) => gate.fail(ApiError::from_failure(&failure, None)),
            RunEventKind::Cancelled(reason) => gate.fail(ApiError::from_cancel(reason)),
        }
    }

    /// The events ended without a terminal.
    pub(crate) fn lost(gate: &mut Gate) {
        let message = "the connection to the node ended";
        let contacted = ProviderContacted::Unknown;
        let failure = ExecutionFailure::new(FailureCode::Disconnected, FailureStage::Stream, contacted, message);
        gate.fail(ApiError::from_failure(&failure, None));
    }

    fn text(&mut self, text: &str, gate: &mut Gate) {
        if !self.grows(text.len(), gate) {
            return;
        }
        match &mut self.answer {
            Some(answer) => answer.text.push_str(text),
            None => self.send(gate, |renderer, out| renderer.text(text, out)),
        }
    }

    fn reasoning(&mut self, text: &str, gate: &mut Gate) {
        if !self.grows(text.len(), gate) {
            return;
        }
        match &mut self.answer {
            Some(answer) => answer.reasoning.push_str(text),
            None => self.send(gate, |renderer, out| renderer.reasoning(text, out)),
        }
    }

    fn tool_call(&mut self, call: &ToolCallDelta, gate: &mut Gate) {
        let size =
            call.arguments.len() + call.id.as_ref().map_or(0, String::len) + call.name.as_ref().map_or(0, String::len);
        if !self.grows(size, gate) {
            return;
        }
        if !self.calls.contains(&call.index) && self.calls.len() == MAX_CALLS {
            return gate.fail(ApiError::bad_gateway("the provider's answer has too many tool calls"));
        }
        let first = self.calls.insert(call.index);
        // One stable id for each call, whether the provider gave one or not.
        let id = first.then(|| call.id.clone().unwrap_or_else(|| format!("call_{}{}", self.run_id, call.index)));
        let Some(answer) = &mut self.answer else {
            return self.send(gate, |renderer, out| renderer.tool_call(call, id.as_deref(), out));
        };
        if let Some(id) = id {
            let (name, arguments) = (String::new(), String::new());
            answer.calls.push(Call { index: call.index, id, name, arguments });
        }
        if let Some(known) = answer.calls.iter_mut().find(|known| known.index == call.index) {
            known.name.push_str(call.name.as_deref().unwrap_or_default());
            known.arguments.push_str(&call.arguments);
        }
    }

    fn complete(&mut self, finish: FinishReason, gate: &mut Gate) {
        // Some servers say `stop` after a tool call; clients act on the reason.
        let finish =
            if finish == FinishReason::Stop && !self.calls.is_empty() { FinishReason::ToolCalls } else { finish };
        let usage = self.usage.as_ref().and_then(usage_object);
        let mut out = Vec::new();
        if let Some(mut answer) = self.answer.take() {
            answer.calls.sort_by_key(|call| call.index);
            out = self.renderer.document(&answer, finish, usage.as_ref());
        } else {
            if !self.begun {
                self.renderer.role(&mut out);
            }
            self.renderer.finish(finish, &mut out);
            if let Some(usage) = usage.filter(|_| self.wants_usage) {
                self.renderer.usage(&usage, &mut out);
            }
            Renderer::done(&mut out);
        }
        gate.hold(out.into());
        gate.complete();
    }

    fn send(&mut self, gate: &mut Gate, render: impl FnOnce(&Renderer, &mut Vec<u8>)) {
        let mut out = Vec::with_capacity(256);
        if !std::mem::replace(&mut self.begun, true) {
            self.renderer.role(&mut out);
        }
        render(&self.renderer, &mut out);
        gate.content(out.into());
    }

    /// False for an empty piece, which is no content, and for one too many.
    fn grows(&mut self, by: usize, gate: &mut Gate) -> bool {
        if self.answer.is_some() {
            self.length = self.length.saturating_add(by);
            if self.length > MAX_ANSWER_BYTES {
                gate.fail(ApiError::bad_gateway("the provider's answer is too large"));
                return false;
            }
        }
        by > 0
    }
}
