//! Decides what a response says of its request, and how the whole object looks at any time.

use std::fmt;

use iop_execution::Usage;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::items::Item;
use crate::openai::errors::ApiError;

/// What the answer repeats of the request.
pub(crate) struct Echo {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) instructions: Option<String>,
    pub(super) tools: Vec<Box<RawValue>>,
    pub(super) tool_choice: Option<Box<RawValue>>,
    pub(super) parallel_tool_calls: bool,
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    pub(super) presence_penalty: f64,
    pub(super) frequency_penalty: f64,
    pub(super) max_output_tokens: Option<u64>,
    pub(super) max_tool_calls: Option<u64>,
    pub(super) text: Option<Box<RawValue>>,
    pub(super) reasoning: Option<Reasoning>,
    pub(super) metadata: Option<Box<RawValue>>,
    pub(super) safety_identifier: Option<String>,
    pub(super) prompt_cache_key: Option<String>,
}

impl Echo {
    /// The name that the client asked for.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }
}

impl fmt::Debug for Echo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Echo").field("id", &self.id).finish_non_exhaustive()
    }
}

/// How much the model is to think, and what is told of it.
#[derive(Deserialize, Serialize)]
pub(super) struct Reasoning {
    #[serde(default)]
    pub(super) effort: Option<String>,
    #[serde(default)]
    pub(super) summary: Option<String>,
}

/// How far a response has got.
#[derive(Clone, Copy)]
pub(super) enum Status<'a> {
    InProgress,
    Completed,
    /// Why it is not whole.
    Incomplete(&'static str),
    Failed(&'a ApiError),
}

impl Status<'_> {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete(_) => "incomplete",
            Self::Failed(_) => "failed",
        }
    }
}

/// The response object.
pub(super) struct Resource<'a> {
    pub(super) echo: &'a Echo,
    pub(super) model: &'a str,
    pub(super) created_at: u64,
    pub(super) completed_at: Option<u64>,
    pub(super) status: Status<'a>,
    pub(super) output: &'a [Item],
    pub(super) usage: Option<&'a Usage>,
}

impl Serialize for Resource<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { echo, status, .. } = self;
        let (incomplete, error) = match status {
            Status::InProgress | Status::Completed => (None, None),
            Status::Incomplete(reason) => (Some(json!({ "reason": reason })), None),
            Status::Failed(error) => (None, Some(failure(error))),
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &echo.id)?;
        map.serialize_entry("object", "response")?;
        map.serialize_entry("created_at", &self.created_at)?;
        map.serialize_entry("completed_at", &self.completed_at)?;
        map.serialize_entry("status", status.as_str())?;
        map.serialize_entry("incomplete_details", &incomplete)?;
        map.serialize_entry("error", &error)?;
        map.serialize_entry("model", self.model)?;
        map.serialize_entry("instructions", &echo.instructions)?;
        map.serialize_entry("output", self.output)?;
        map.serialize_entry("tools", &echo.tools)?;
        match &echo.tool_choice {
            Some(choice) => map.serialize_entry("tool_choice", choice)?,
            None => map.serialize_entry("tool_choice", "auto")?,
        }
        map.serialize_entry("parallel_tool_calls", &echo.parallel_tool_calls)?;
        map.serialize_entry("max_output_tokens", &echo.max_output_tokens)?;
        map.serialize_entry("max_tool_calls", &echo.max_tool_calls)?;
        map.serialize_entry("temperature", &echo.temperature)?;
        map.serialize_entry("top_p", &echo.top_p)?;
        map.serialize_entry("presence_penalty", &echo.presence_penalty)?;
        map.serialize_entry("frequency_penalty", &echo.frequency_penalty)?;
        map.serialize_entry("top_logprobs", &0)?;
        map.serialize_entry("reasoning", &echo.reasoning)?;
        match &echo.text {
            Some(format) => map.serialize_entry("text", &Format { format })?,
            None => map.serialize_entry("text", &json!({ "format": { "type": "text" } }))?,
        }
        // Nothing is cut to fit, and nothing is kept.
        map.serialize_entry("truncation", "disabled")?;
        map.serialize_entry("store", &false)?;
        map.serialize_entry("background", &false)?;
        map.serialize_entry("previous_response_id", &None::<&str>)?;
        map.serialize_entry("service_tier", "default")?;
        match &echo.metadata {
            Some(metadata) => map.serialize_entry("metadata", metadata)?,
            None => map.serialize_entry("metadata", &json!({}))?,
        }
        map.serialize_entry("safety_identifier", &echo.safety_identifier)?;
        map.serialize_entry("prompt_cache_key", &echo.prompt_cache_key)?;
        // OpenAI's document wants an object wherever the member stands, and Open Responses wants the member everywhere: until
        // the end nothing has been counted. At the end absent is not zero.
        const NOTHING: Usage =
            Usage { input_tokens: Some(0), output_tokens: Some(0), reasoning_tokens: None, cached_input_tokens: None };
        let counted = if matches!(status, Status::InProgress) { Some(&NOTHING) } else { self.usage };
        map.serialize_entry("usage", &counted.and_then(usage))?;
        map.end()
    }
}

#[derive(Serialize)]
struct Format<'a> {
    format: &'a RawValue,
}

/// The API has a closed list of codes; ours stands beside it.
fn failure(error: &ApiError) -> Value {
    let code = match error.status().as_u16() {
        429 => "rate_limit_exceeded",
        400..500 => "invalid_prompt",
        _ => "server_error",
    };
    json!({ "code": code, "message": error.message(), "iop_code": error.code() })
}

/// Counts in this API's form; `None` unless both that matter were reported. Its details have no form for "unknown".
fn usage(usage: &Usage) -> Option<Value> {
    let (input, output) = (usage.input_tokens?, usage.output_tokens?);
    Some(json!({
        "input_tokens": input,
        "input_tokens_details": { "cached_tokens": usage.cached_input_tokens.unwrap_or(0), "cache_write_tokens": 0 },
        "output_tokens": output,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens.unwrap_or(0) },
        "total_tokens": input.saturating_add(output),
    }))
}
