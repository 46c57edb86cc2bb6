//! Decides how the caller's chat-completions object is read: bytes kept, fields parsed once, unknown ones kept too.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::redact::Len;

/// A chat-completions object: the caller's bytes and typed access to them (EXE-16). Cheap to clone.
#[derive(Clone)]
pub struct ChatInput {
    raw: Bytes,
    body: Arc<ChatBody>,
}

/// Why bytes are no chat-completions object.
#[derive(Debug, thiserror::Error)]
#[error("not a chat-completions object (line {line}, column {column})")]
#[non_exhaustive]
pub struct InvalidChat {
    /// Line of the problem, from 1.
    pub line: usize,
    /// Column of the problem, from 1.
    pub column: usize,
}

/// The fields of a chat-completions object that adapters use.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ChatBody {
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Tools the model may call, as given.
    pub tools: Vec<Value>,
    /// Which tool to call, as given.
    pub tool_choice: Option<Value>,
    /// Form of the answer, as given.
    pub response_format: Option<Value>,
    /// How much to reason.
    pub reasoning_effort: Option<String>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Nucleus sampling.
    pub top_p: Option<f64>,
    /// Old name of the token limit.
    pub max_tokens: Option<u64>,
    /// New name of the token limit.
    pub max_completion_tokens: Option<u64>,
    /// Sampling seed.
    pub seed: Option<i64>,
    /// Number of choices.
    pub n: Option<u32>,
    /// Stop sequences: a string or a list.
    pub stop: Option<Stop>,
    /// Every other field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Stop sequences, in either form.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
#[allow(clippy::exhaustive_enums, reason = "the two forms of the API")]
pub enum Stop {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// One message.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`, …
    pub role: String,
    /// Text or parts, as given.
    pub content: Value,
    /// Calls the assistant made, as given.
    pub tool_calls: Vec<Value>,
    /// Which call a tool message answers.
    pub tool_call_id: Option<String>,
    /// Every other field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl ChatMessage {
    /// All text of the message, parts joined.
    #[must_use]
    pub fn text(&self) -> String {
        match &self.content {
            Value::String(text) => text.clone(),
            Value::Array(parts) => parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)).collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
        }
    }
}

impl ChatInput {
    /// Parses the caller's bytes.
    ///
    /// # Errors
    /// [`InvalidChat`] when they are no JSON object or a known field has the wrong type.
    pub fn parse(raw: impl Into<Bytes>) -> Result<Self, InvalidChat> {
        let raw = raw.into();
        let body = serde_json::from_slice(&raw).map_err(|e| InvalidChat { line: e.line(), column: e.column() })?;
        Ok(Self { raw, body: Arc::new(body) })
    }

    /// The caller's bytes, unchanged.
    #[must_use]
    pub const fn raw(&self) -> &Bytes {
        &self.raw
    }

    /// The conversation.
    #[must_use]
    pub fn messages(&self) -> &[ChatMessage] {
        &self.body.messages
    }

    /// Every parsed field.
    #[must_use]
    pub fn body(&self) -> &ChatBody {
        &self.body
    }

    /// The token limit, by either name.
    #[must_use]
    pub fn max_tokens(&self) -> Option<u64> {
        self.body.max_completion_tokens.or(self.body.max_tokens)
    }

    /// Stop sequences, possibly none.
    #[must_use]
    pub fn stop(&self) -> Vec<&str> {
        match &self.body.stop {
            None => Vec::new(),
            Some(Stop::One(text)) => vec![text],
            Some(Stop::Many(texts)) => texts.iter().map(String::as_str).collect(),
        }
    }
}

impl fmt::Debug for ChatInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Len(self.raw.len()).fmt(f)
    }
}

macro_rules! redacted_debug {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "[redacted]"))
            }
        }
    )*};
}
redacted_debug!(ChatBody, ChatMessage, Stop);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_typed_bytes_are_kept_unknown_fields_stay() {
        // EXE-16, EXE-8
        let raw = r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],
            "max_tokens":3,"max_completion_tokens":4,"stop":["x","y"],"top_k":20,"temperature":0.70,
            "tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required","parallel_tool_calls":true}"#;
        let input = ChatInput::parse(raw).unwrap();
        assert_eq!(input.raw(), raw.as_bytes());
        assert_eq!(input.messages()[0].text(), "ab");
        assert_eq!(input.max_tokens(), Some(4));
        assert_eq!(input.stop(), ["x", "y"]);
        assert_eq!(input.body().tools.len(), 1);
        assert_eq!(input.body().other["top_k"], 20);
        assert_eq!(input.body().other["parallel_tool_calls"], true);
        assert!(!format!("{input:?} {:?} {:?}", input.body(), input.messages()).contains("ab"));
    }

    #[test]
    fn wrong_types_are_told_by_place() {
        let error = ChatInput::parse(r#"{"messages":3}"#).unwrap_err();
        assert_eq!((error.line, error.column), (1, 13));
        assert!(ChatInput::parse("[]").is_err());
    }
}
