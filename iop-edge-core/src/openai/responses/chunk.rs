//! Decides what a chunk of a provider's chat, or its whole answer, adds to a response.
//!
//! Lenient about shapes: a field of another type counts as absent. Only the first choice is looked at: one was asked for.

use iop_execution::{FinishReason, ToolCallDelta};
use serde_json::Value;

use super::builder::Builder;
use super::items::PartKind;
use crate::openai::errors::ApiError;

/// Which calls of an answer have begun: some servers give no index, or one for all.
#[derive(Debug, Default)]
pub(super) struct Calls(Vec<Known>);

#[derive(Debug)]
struct Known {
    index: Option<u64>,
    id: String,
}

/// Adds what a chunk or answer says.
pub(super) fn feed(value: &Value, calls: &mut Calls, builder: &mut Builder, out: &mut Vec<u8>) -> Result<(), ApiError> {
    let choices = value["choices"].as_array().map(Vec::as_slice).unwrap_or_default();
    let first = |choice: &&Value| choice["index"].as_u64().unwrap_or(0) == 0;
    let Some(choice) = choices.iter().find(first) else { return Ok(()) };
    let said = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
    let text = |name: &str| said[name].as_str().filter(|text| !text.is_empty());
    if let Some(thought) = text("reasoning_content").or_else(|| text("reasoning")) {
        builder.piece(PartKind::Reasoning, thought, out)?;
    }
    if let Some(text) = text("content") {
        builder.piece(PartKind::Text, text, out)?;
    }
    if let Some(refusal) = text("refusal") {
        builder.piece(PartKind::Refusal, refusal, out)?;
    }
    for piece in said["tool_calls"].as_array().into_iter().flatten() {
        builder.call(&calls.piece(piece), out)?;
    }
    if let Some(finish) = choice["finish_reason"].as_str().filter(|finish| !finish.is_empty()) {
        let known = FinishReason::ALL.iter().find(|known| known.as_str() == finish);
        builder.finish(known.copied().unwrap_or(FinishReason::Stop));
    }
    Ok(())
}

impl Calls {
    fn piece(&mut self, piece: &Value) -> ToolCallDelta {
        let function = &piece["function"];
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let (id, name) = (text(&piece["id"]), text(&function["name"]));
        let arguments = match &function["arguments"] {
            Value::String(text) => text.clone(),
            // A whole object, as some servers send it.
            object @ Value::Object(_) => object.to_string(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => String::new(),
        };
        let index = piece["index"].as_u64().or_else(|| function["index"].as_u64());
        let at = self.known(index, id.as_deref(), name.is_some()).unwrap_or_else(|| {
            self.0.push(Known { index, id: id.clone().unwrap_or_default() });
            self.0.len() - 1
        });
        ToolCallDelta { index: u32::try_from(at).unwrap_or(u32::MAX), id, name, arguments }
    }

    /// The call this piece goes on with; `None` when it begins a new one.
    fn known(&self, index: Option<u64>, id: Option<&str>, named: bool) -> Option<usize> {
        let by_id = id.and_then(|id| self.0.iter().position(|call| call.id == id));
        let by_index = || self.0.iter().rposition(|call| call.index == index);
        by_id.or_else(|| match (index, id, named) {
            // A name begins a call, and another id with a name another call, whatever its index says.
            (None, _, true) | (Some(_), Some(_), true) => None,
            (Some(_), _, _) => by_index(),
            (None, _, false) => self.0.len().checked_sub(1),
        })
    }
}
