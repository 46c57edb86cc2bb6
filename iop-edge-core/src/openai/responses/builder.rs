//! Decides which events of a response each piece of an answer makes (API-8).
//!
//! ```text
//! created, in_progress, then for each item: output_item.added, (content_part.added, …delta*, …done, content_part.done)*,
//! output_item.done; then completed, incomplete or failed, with the whole response in it
//! ```
//!
//! Inputs: pieces of text, thought and calls, in the order of the answer, and one end. Output: bytes of events, or nothing but
//! the object at the end for a client that wants no stream. Sequence numbers have no gap. No clock and no randomness of its
//! own.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use iop_execution::{FinishReason, ToolCallDelta, Usage};
use serde::Serialize;

use super::echo::{Echo, Resource, Status};
use super::items::{Body, Item, ItemStatus, Part, PartKind};
use crate::openai::config::MAX_ANSWER_BYTES;
use crate::openai::errors::ApiError;

/// Most items of one response.
const MAX_ITEMS: usize = 1_024;
const DONE: &[u8] = b"data: [DONE]\n\n";

/// A response that is being built.
pub(crate) struct Builder {
    echo: Arc<Echo>,
    model: String,
    created_at: u64,
    clock: fn() -> u64,
    pen: Pen,
    begun: bool,
    items: Vec<Item>,
    length: usize,
    finish: FinishReason,
}

impl Builder {
    pub(crate) fn new(echo: Arc<Echo>, model: &str, clock: fn() -> u64, stream: bool) -> Self {
        Self {
            echo,
            model: model.to_owned(),
            created_at: clock(),
            clock,
            pen: Pen { stream, next: 0 },
            begun: false,
            items: Vec::new(),
            length: 0,
            finish: FinishReason::Stop,
        }
    }

    /// A call has begun.
    pub(crate) fn has_call(&self) -> bool {
        self.items.iter().any(Item::is_call)
    }

    /// More of a text of this kind.
    pub(crate) fn piece(&mut self, kind: PartKind, text: &str, out: &mut Vec<u8>) -> Result<(), ApiError> {
        if text.is_empty() {
            return Ok(());
        }
        self.grow(text.len())?;
        self.begin(out);
        let at = self.item_for(kind, out)?;
        let Some(item) = self.items.get_mut(at) else { return Ok(()) };
        let Some((content_index, part)) = item.part() else { return Ok(()) };
        part.text.push_str(text);
        let fields = Fields { output_index: Some(at), content_index: Some(content_index), ..Fields::default() };
        let logprobs = (kind == PartKind::Text).then_some([]);
        self.pen.put(kind.events().0, &Fields { item_id: Some(&item.id), delta: Some(text), logprobs, ..fields }, out);
        Ok(())
    }

    /// More of a call.
    pub(crate) fn call(&mut self, call: &ToolCallDelta, out: &mut Vec<u8>) -> Result<(), ApiError> {
        let (id, name) = (call.id.as_deref().unwrap_or_default(), call.name.as_deref().unwrap_or_default());
        self.grow(id.len() + name.len() + call.arguments.len())?;
        self.begin(out);
        let known = |item: &Item| matches!(item.body, Body::Call { index, .. } if index == call.index);
        let at = match self.items.iter().position(known) {
            Some(at) => at,
            None => {
                self.close_text(out);
                let call_id = if id.is_empty() { self.id("call") } else { id.to_owned() };
                let name = name.to_owned();
                self.add("fc", Body::Call { index: call.index, call_id, name, arguments: String::new() }, out)?
            }
        };
        let Some(Item { id, body: Body::Call { arguments, .. }, .. }) = self.items.get_mut(at) else { return Ok(()) };
        if !call.arguments.is_empty() {
            arguments.push_str(&call.arguments);
            let delta = Some(call.arguments.as_str());
            let fields = Fields { item_id: Some(id), output_index: Some(at), delta, ..Fields::default() };
            self.pen.put("response.function_call_arguments.delta", &fields, out);
        }
        Ok(())
    }

    /// Why the model stopped; the last word counts.
    pub(crate) const fn finish(&mut self, finish: FinishReason) {
        self.finish = finish;
    }

    /// The end of a good answer, whole or cut by a limit: closes what is open and gives the whole response.
    pub(crate) fn end(&mut self, usage: Option<&Usage>, out: &mut Vec<u8>) -> Result<(), ApiError> {
        self.begin(out);
        if self.items.is_empty() {
            // An answer without a word is an empty text.
            self.item_for(PartKind::Text, out)?;
        }
        let status = match self.finish {
            FinishReason::Stop | FinishReason::ToolCalls | FinishReason::FunctionCall => Status::Completed,
            FinishReason::Length => Status::Incomplete("max_output_tokens"),
            FinishReason::ContentFilter => Status::Incomplete("content_filter"),
        };
        let whole = matches!(status, Status::Completed);
        let last = self.items.len().saturating_sub(1);
        for at in 0..self.items.len() {
            let cut = !whole && at == last;
            self.close(at, if cut { ItemStatus::Incomplete } else { ItemStatus::Completed }, out);
        }
        let completed_at = whole.then(self.clock);
        let resource = Resource { completed_at, usage, ..self.resource(status) };
        if self.pen.stream {
            let name = if whole { "response.completed" } else { "response.incomplete" };
            let (mut pen, fields) = (self.pen, Fields { response: Some(resource), ..Fields::default() });
            pen.put(name, &fields, out);
            out.extend_from_slice(DONE);
            self.pen = pen;
        } else {
            put(&resource, out);
        }
        Ok(())
    }

    /// The end of an answer that failed after its commit. Nothing follows it.
    pub(crate) fn fail(&mut self, error: &ApiError, usage: Option<&Usage>) -> Bytes {
        let mut out = Vec::new();
        self.begin(&mut out);
        for item in self.items.iter_mut().filter(|item| item.is_open()) {
            item.status = ItemStatus::Incomplete;
        }
        let mut pen = self.pen;
        let response = Resource { usage, ..self.resource(Status::Failed(error)) };
        pen.put("response.failed", &Fields { response: Some(response), ..Fields::default() }, &mut out);
        self.pen = pen;
        out.into()
    }

    fn resource<'a>(&'a self, status: Status<'a>) -> Resource<'a> {
        Resource {
            echo: &self.echo,
            model: &self.model,
            created_at: self.created_at,
            completed_at: None,
            status,
            output: &self.items,
            usage: None,
        }
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let mut pen = self.pen;
        for name in ["response.created", "response.in_progress"] {
            let response = Some(self.resource(Status::InProgress));
            pen.put(name, &Fields { response, ..Fields::default() }, out);
        }
        self.pen = pen;
    }

    fn grow(&mut self, by: usize) -> Result<(), ApiError> {
        self.length = self.length.saturating_add(by);
        if self.length > MAX_ANSWER_BYTES {
            return Err(ApiError::bad_gateway("the provider's answer is too large"));
        }
        Ok(())
    }

    /// An id that is the same whenever it is asked for, and no other's in this response.
    fn id(&self, prefix: &str) -> String {
        let own = self.echo.id.strip_prefix("resp_").unwrap_or(&self.echo.id);
        format!("{prefix}_{own}{:04x}", self.items.len())
    }

    /// The place of the item that takes more of this text, opened if need be.
    fn item_for(&mut self, kind: PartKind, out: &mut Vec<u8>) -> Result<usize, ApiError> {
        let fits = |item: &Item| match &item.body {
            Body::Message(_) => kind != PartKind::Reasoning,
            Body::Reasoning(_) => kind == PartKind::Reasoning,
            Body::Call { .. } => false,
        };
        let open = self.items.iter().rposition(|item| item.is_open() && fits(item));
        let at = match open {
            Some(at) => at,
            None => {
                self.close_text(out);
                let (prefix, body) = match kind {
                    PartKind::Text | PartKind::Refusal => ("msg", Body::Message(Vec::new())),
                    PartKind::Reasoning => ("rs", Body::Reasoning(None)),
                };
                self.add(prefix, body, out)?
            }
        };
        let Some(item) = self.items.get_mut(at) else { return Ok(at) };
        if item.part().is_some_and(|(_, part)| part.kind == kind) {
            return Ok(at);
        }
        self.pen.close_part(at, item, out);
        let part = Part { kind, text: String::new() };
        match &mut item.body {
            Body::Message(parts) => parts.push(part.clone()),
            Body::Reasoning(thought) => *thought = Some(part.clone()),
            Body::Call { .. } => {}
        }
        let content_index = item.part().map(|(index, _)| index);
        let fields = Fields { item_id: Some(&item.id), output_index: Some(at), content_index, ..Fields::default() };
        self.pen.put("response.content_part.added", &Fields { part: Some(&part), ..fields }, out);
        Ok(at)
    }

    fn add(&mut self, prefix: &str, body: Body, out: &mut Vec<u8>) -> Result<usize, ApiError> {
        let at = self.items.len();
        if at == MAX_ITEMS {
            return Err(ApiError::bad_gateway("the provider's answer has too many parts"));
        }
        let item = Item { id: self.id(prefix), status: ItemStatus::InProgress, body };
        let fields = Fields { output_index: Some(at), item: Some(&item), ..Fields::default() };
        self.pen.put("response.output_item.added", &fields, out);
        self.items.push(item);
        Ok(at)
    }

    /// Calls stay open to the end: their pieces may come in turns.
    fn close_text(&mut self, out: &mut Vec<u8>) {
        for at in 0..self.items.len() {
            if self.items.get(at).is_some_and(|item| !item.is_call()) {
                self.close(at, ItemStatus::Completed, out);
            }
        }
    }

    fn close(&mut self, at: usize, status: ItemStatus, out: &mut Vec<u8>) {
        let Some(item) = self.items.get_mut(at).filter(|item| item.is_open()) else { return };
        self.pen.close_part(at, item, out);
        item.status = status;
        if let Body::Call { name, arguments, .. } = &item.body {
            let (name, arguments) = (Some(name.as_str()), Some(arguments.as_str()));
            let fields =
                Fields { item_id: Some(&item.id), output_index: Some(at), name, arguments, ..Fields::default() };
            self.pen.put("response.function_call_arguments.done", &fields, out);
        }
        let fields = Fields { output_index: Some(at), item: Some(item), ..Fields::default() };
        self.pen.put("response.output_item.done", &fields, out);
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("items", &self.items.len()).field("bytes", &self.length).finish_non_exhaustive()
    }
}

/// What an event may say beside its type and number.
#[derive(Default, Serialize)]
struct Fields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<Resource<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item: Option<&'a Item>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<&'a Part>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

/// Writes events, numbered without a gap; nothing for a client that wants no stream.
#[derive(Clone, Copy)]
struct Pen {
    stream: bool,
    next: u64,
}

impl Pen {
    fn put(&mut self, name: &str, fields: &Fields<'_>, out: &mut Vec<u8>) {
        if !self.stream {
            return;
        }
        let head = format!("event: {name}\ndata: {{\"type\":\"{name}\",\"sequence_number\":{}", self.next);
        self.next += 1;
        out.extend_from_slice(head.as_bytes());
        let start = out.len();
        put(fields, out);
        // The object goes on: every event has at least one field.
        if let Some(open) = out.get_mut(start) {
            *open = b',';
        }
        out.extend_from_slice(b"\n\n");
    }

    fn close_part(&mut self, at: usize, item: &mut Item, out: &mut Vec<u8>) {
        let id = item.id.clone();
        let Some((content_index, part)) = item.part() else { return };
        let places = || Fields {
            item_id: Some(&id),
            output_index: Some(at),
            content_index: Some(content_index),
            ..Fields::default()
        };
        let text = Some(part.text.as_str());
        let fields = match part.kind {
            PartKind::Text => Fields { text, logprobs: Some([]), ..places() },
            PartKind::Refusal => Fields { refusal: text, ..places() },
            PartKind::Reasoning => Fields { text, ..places() },
        };
        self.put(part.kind.events().1, &fields, out);
        self.put("response.content_part.done", &Fields { part: Some(part), ..places() }, out);
    }
}

fn put(value: &impl Serialize, out: &mut Vec<u8>) {
    // A vector takes every write, and these types always serialise.
    let written = serde_json::to_writer(out, value);
    debug_assert!(written.is_ok());
}
