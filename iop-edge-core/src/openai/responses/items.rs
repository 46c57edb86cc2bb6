//! Decides how an item of a response looks: a message, what the model thought, a call of a function.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::json;

/// One item of the output.
pub(super) struct Item {
    pub(super) id: String,
    pub(super) status: ItemStatus,
    pub(super) body: Body,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ItemStatus {
    InProgress,
    Completed,
    Incomplete,
}

pub(super) enum Body {
    Message(Vec<Part>),
    Reasoning(Option<Part>),
    Call {
        /// Which call of the answer it is.
        index: u32,
        call_id: String,
        name: String,
        arguments: String,
    },
}

/// A piece of content.
#[derive(Clone)]
pub(super) struct Part {
    pub(super) kind: PartKind,
    pub(super) text: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PartKind {
    Text,
    Refusal,
    Reasoning,
}

impl PartKind {
    /// Names of the events that give more of it, and all of it.
    pub(super) const fn events(self) -> (&'static str, &'static str) {
        match self {
            Self::Text => ("response.output_text.delta", "response.output_text.done"),
            Self::Refusal => ("response.refusal.delta", "response.refusal.done"),
            Self::Reasoning => ("response.reasoning_text.delta", "response.reasoning_text.done"),
        }
    }
}

impl Item {
    pub(super) fn is_open(&self) -> bool {
        self.status == ItemStatus::InProgress
    }

    pub(super) const fn is_call(&self) -> bool {
        matches!(self.body, Body::Call { .. })
    }

    /// The part that is being written, and its place.
    pub(super) fn part(&mut self) -> Option<(usize, &mut Part)> {
        match &mut self.body {
            Body::Message(parts) => parts.len().checked_sub(1).zip(parts.last_mut()),
            Body::Reasoning(part) => Some(0).zip(part.as_mut()),
            Body::Call { .. } => None,
        }
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let status = match self.status {
            ItemStatus::InProgress => "in_progress",
            ItemStatus::Completed => "completed",
            ItemStatus::Incomplete => "incomplete",
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &self.id)?;
        match &self.body {
            Body::Message(parts) => {
                map.serialize_entry("type", "message")?;
                map.serialize_entry("role", "assistant")?;
                map.serialize_entry("content", parts)?;
            }
            Body::Reasoning(part) => {
                map.serialize_entry("type", "reasoning")?;
                map.serialize_entry("summary", &json!([]))?;
                map.serialize_entry("content", part.as_slice())?;
            }
            Body::Call { index: _, call_id, name, arguments } => {
                map.serialize_entry("type", "function_call")?;
                map.serialize_entry("call_id", call_id)?;
                map.serialize_entry("name", name)?;
                map.serialize_entry("arguments", arguments)?;
            }
        }
        map.serialize_entry("status", status)?;
        map.end()
    }
}

impl Serialize for Part {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self.kind {
            PartKind::Text => {
                map.serialize_entry("type", "output_text")?;
                map.serialize_entry("text", &self.text)?;
                map.serialize_entry("annotations", &json!([]))?;
                map.serialize_entry("logprobs", &json!([]))?;
            }
            PartKind::Refusal => {
                map.serialize_entry("type", "refusal")?;
                map.serialize_entry("refusal", &self.text)?;
            }
            PartKind::Reasoning => {
                map.serialize_entry("type", "reasoning_text")?;
                map.serialize_entry("text", &self.text)?;
            }
        }
        map.end()
    }
}
