//! Decides which chat a response is, and what of its request the answer repeats.
//!
//! What both APIs have goes over under its name in a chat; what is a matter of this API's stored state is refused (no state
//! is kept here); members that neither knows pass untouched.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::echo::{Echo, Reasoning};
use super::input::{each, messages};
use crate::openai::errors::ApiError;
use crate::openai::json::{Visitor, decode, scan};
use crate::openai::kind::Kind;
use crate::openai::request::ChatRequest;

/// Most members of a request.
const MAX_MEMBERS: usize = 256;

/// Members that mean something here, or would mean something else in a chat. All others pass.
const OWN: [&str; 36] = [
    "audio",
    "background",
    "context_management",
    "conversation",
    "function_call",
    "functions",
    "include",
    "input",
    "instructions",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "max_tool_calls",
    "messages",
    "metadata",
    "modalities",
    "model",
    "n",
    "parallel_tool_calls",
    "prediction",
    "previous_response_id",
    "prompt",
    "reasoning",
    "reasoning_effort",
    "response_format",
    "store",
    "stream",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "verbosity",
    "web_search_options",
];

/// Reads the body of a `/v1/responses` request.
///
/// # Errors
/// What the client is told: 400, with the member that is wrong.
pub(crate) fn read(body: Bytes, id: String) -> Result<(ChatRequest, Arc<Echo>), ApiError> {
    let routing = ChatRequest::parse(body, Kind::Responses)?;
    let text = std::str::from_utf8(routing.body()).unwrap_or_default();
    let asked = Asked::find(text)?;
    asked.refuse_state()?;
    let (chat, echo) = asked.chat(&routing, id)?;
    // Checked as every chat is, whatever the members that passed are called.
    Ok((ChatRequest::parse(chat.into(), Kind::Chat)?, Arc::new(echo)))
}

/// The members of a request.
struct Asked<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Asked<'a> {
    fn find(text: &'a str) -> Result<Self, ApiError> {
        let mut spans = Spans(Vec::new());
        // It was scanned before.
        scan(text, &mut spans).map_err(|_| ApiError::bad_request(None, "The request body is not valid JSON."))?;
        if spans.0.len() > MAX_MEMBERS {
            return Err(ApiError::bad_request(None, "The request has too many members."));
        }
        let members = spans.0.into_iter().filter_map(|(key, span)| {
            let value = serde_json::from_str::<&RawValue>(text.get(span)?).ok()?;
            Some((decode(&key)?, value))
        });
        let mut members: Vec<_> = members.collect();
        members.sort_by(|(a, _), (b, _)| a.cmp(b));
        if members.windows(2).any(|pair| matches!(pair, [(a, _), (b, _)] if a == b)) {
            return Err(ApiError::bad_request(None, "A member of the request is given twice."));
        }
        Ok(Self(members))
    }

    /// A member that is there and not null.
    fn get(&self, name: &str) -> Option<&'a RawValue> {
        let value = self.0.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
        value.filter(|value| value.get() != "null")
    }

    fn typed<T: Deserialize<'a>>(&self, name: &'static str, what: &str) -> Result<Option<T>, ApiError> {
        let read = self.get(name).map(|value| serde_json::from_str(value.get())).transpose();
        read.map_err(|_| ApiError::bad_request(Some(name), format!("'{name}' must be {what}.")))
    }

    fn number(&self, name: &'static str) -> Result<Option<f64>, ApiError> {
        self.typed(name, "a number")
    }

    /// No state is kept: nothing can be gone on with, stored, or fetched later.
    fn refuse_state(&self) -> Result<(), ApiError> {
        for name in ["previous_response_id", "conversation"] {
            if self.get(name).is_some() {
                return Err(ApiError::no_state(name));
            }
        }
        for name in ["prompt", "context_management"] {
            if self.get(name).is_some() {
                return Err(ApiError::bad_request(Some(name), format!("'{name}' is not supported here.")));
            }
        }
        self.typed::<bool>("store", "a boolean")?;
        if self.typed::<bool>("background", "a boolean")? == Some(true) {
            let message = "Background responses are not supported here: no state is kept.";
            return Err(ApiError::bad_request(Some("background"), message));
        }
        if self.typed::<u64>("top_logprobs", "a number")?.is_some_and(|count| count > 0) {
            return Err(ApiError::bad_request(Some("top_logprobs"), "'top_logprobs' is not supported here."));
        }
        Ok(())
    }

    fn chat(&self, routing: &ChatRequest, id: String) -> Result<(Vec<u8>, Echo), ApiError> {
        let mut chat = Chat(b"{".to_vec());
        chat.member("model", &routing.model());
        let instructions: Option<String> = self.typed("instructions", "a string")?;
        let input = self.get("input").ok_or_else(|| ApiError::bad_request(Some("input"), "'input' is missing."))?;
        chat.raw("messages", &messages(instructions.as_deref(), input)?);
        if routing.stream() {
            chat.member("stream", &true);
        }
        let max_output_tokens: Option<u64> = self.typed("max_output_tokens", "a positive number")?;
        if max_output_tokens == Some(0) {
            return Err(ApiError::bad_request(Some("max_output_tokens"), "'max_output_tokens' must be positive."));
        }
        if let Some(most) = max_output_tokens {
            // The name that every server knows.
            chat.member("max_tokens", &most);
        }
        let tools = self.tools(&mut chat)?;
        let format = self.text(&mut chat)?;
        let reasoning: Option<Reasoning> = self.typed("reasoning", "an object")?;
        if let Some(effort) = reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref()) {
            chat.member("reasoning_effort", effort);
        }
        for (key, value) in self.0.iter().filter(|(key, _)| OWN.binary_search(&key.as_str()).is_err()) {
            chat.member(key, value);
        }
        chat.0.push(b'}');
        let echo = Echo {
            id,
            model: routing.model().to_owned(),
            instructions,
            tools: tools.shown,
            tool_choice: self.get("tool_choice").map(ToOwned::to_owned),
            parallel_tool_calls: tools.parallel.unwrap_or(true),
            temperature: self.number("temperature")?.unwrap_or(1.0),
            top_p: self.number("top_p")?.unwrap_or(1.0),
            presence_penalty: self.number("presence_penalty")?.unwrap_or(0.0),
            frequency_penalty: self.number("frequency_penalty")?.unwrap_or(0.0),
            max_output_tokens,
            max_tool_calls: self.typed("max_tool_calls", "a number")?,
            text: format,
            reasoning,
            metadata: self.metadata()?,
            safety_identifier: self.typed("safety_identifier", "a string")?,
            prompt_cache_key: self.typed("prompt_cache_key", "a string")?,
        };
        Ok((chat.0, echo))
    }

    fn metadata(&self) -> Result<Option<Box<RawValue>>, ApiError> {
        match self.get("metadata") {
            Some(value) if !value.get().starts_with('{') => {
                Err(ApiError::bad_request(Some("metadata"), "'metadata' must be an object."))
            }
            value => Ok(value.map(ToOwned::to_owned)),
        }
    }

    fn tools(&self, chat: &mut Chat) -> Result<Tools, ApiError> {
        const TOOLS: Option<&str> = Some("tools");
        let choice = self.get("tool_choice").map(Choice::read).transpose()?;
        let parallel = self.typed("parallel_tool_calls", "a boolean")?;
        let (mut shown, mut sent) = (Vec::new(), Vec::new());
        if let Some(tools) = self.get("tools") {
            each(tools, "tools", |tool| {
                let tool: Tool<'a> = serde_json::from_str(tool.get())
                    .map_err(|_| ApiError::bad_request(TOOLS, "A tool in 'tools' is malformed."))?;
                let Some(name) = tool.name.as_deref().filter(|_| tool.kind == "function") else {
                    let message = "Only tools of the type function, with a name, are supported here.";
                    return Err(ApiError::bad_request(TOOLS, message));
                };
                if choice.as_ref().is_none_or(|choice| choice.allows(name)) {
                    sent.push(to_raw(&Sent { kind: "function", function: &tool }));
                }
                shown.push(to_raw(&tool.shown()));
                Ok(())
            })?;
        }
        // Servers refuse a choice where there is nothing to choose.
        if !sent.is_empty() {
            chat.member("tools", &sent);
            if let Some(choice) = &choice {
                chat.member("tool_choice", &choice.sent());
            }
            if let Some(parallel) = parallel {
                chat.member("parallel_tool_calls", &parallel);
            }
        }
        Ok(Tools { shown, parallel })
    }

    /// Format and length of the text. Answers what is repeated of it.
    fn text(&self, chat: &mut Chat) -> Result<Option<Box<RawValue>>, ApiError> {
        const TEXT: Option<&str> = Some("text");
        let Some(text) = self.typed::<Text<'a>>("text", "an object")? else { return Ok(None) };
        if let Some(verbosity) = &text.verbosity {
            chat.member("verbosity", verbosity);
        }
        let Some(raw) = text.format else { return Ok(None) };
        let format: Format<'a> =
            serde_json::from_str(raw.get()).map_err(|_| ApiError::bad_request(TEXT, "'text.format' is malformed."))?;
        match format.kind.as_str() {
            "text" => {}
            "json_object" => chat.raw("response_format", br#"{"type":"json_object"}"#),
            "json_schema" => {
                chat.member("response_format", &ResponseFormat { kind: "json_schema", json_schema: &format })
            }
            _ => return Err(ApiError::bad_request(TEXT, "'text.format' must be text, json_object or json_schema.")),
        }
        Ok(Some(raw.to_owned()))
    }
}

struct Tools {
    shown: Vec<Box<RawValue>>,
    parallel: Option<bool>,
}

/// A tool, flat as here; without its type it is the function of a chat's tool.
#[derive(Deserialize, Serialize)]
struct Tool<'a> {
    #[serde(rename = "type", skip_serializing)]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    parameters: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

impl Tool<'_> {
    /// As a response repeats it: every member is there.
    const fn shown(&self) -> ShownTool<'_> {
        let Self { name, description, parameters, strict, kind: _ } = self;
        ShownTool { kind: "function", name, description, parameters, strict }
    }
}

#[derive(Serialize)]
struct ShownTool<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    name: &'a Option<String>,
    description: &'a Option<String>,
    parameters: &'a Option<&'a RawValue>,
    strict: &'a Option<bool>,
}

#[derive(Serialize)]
struct Sent<'a, T> {
    #[serde(rename = "type")]
    kind: &'static str,
    function: &'a T,
}

/// Which tools the model may or must use.
enum Choice {
    Mode(String),
    Function(Name),
    /// Some of the tools, in this mode.
    Allowed(String, Vec<String>),
}

#[derive(Deserialize, Serialize)]
struct Name {
    name: String,
}

#[derive(Deserialize)]
struct ChoiceObject {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    mode: Option<String>,
    #[serde(default)]
    tools: Vec<Name>,
}

impl Choice {
    fn read(value: &RawValue) -> Result<Self, ApiError> {
        let text = value.get();
        if text.starts_with('"') {
            if let Some(mode) = ["auto", "none", "required"].into_iter().find(|mode| text.trim_matches('"') == *mode) {
                return Ok(Self::Mode(mode.to_owned()));
            }
        } else if let Ok(object) = serde_json::from_str::<ChoiceObject>(text) {
            match (object.kind.as_str(), object.name) {
                ("function", Some(name)) => return Ok(Self::Function(Name { name })),
                ("allowed_tools", _) => {
                    let names = object.tools.into_iter().map(|tool| tool.name).collect();
                    return Ok(Self::Allowed(object.mode.unwrap_or_else(|| "auto".to_owned()), names));
                }
                _ => {}
            }
        }
        let message = "'tool_choice' must be auto, none, required, a function, or allowed_tools of functions.";
        Err(ApiError::bad_request(Some("tool_choice"), message))
    }

    fn allows(&self, name: &str) -> bool {
        match self {
            Self::Mode(_) | Self::Function(_) => true,
            Self::Allowed(_, names) => names.iter().any(|allowed| allowed == name),
        }
    }

    fn sent(&self) -> Box<RawValue> {
        match self {
            Self::Mode(mode) | Self::Allowed(mode, _) => to_raw(mode),
            Self::Function(name) => to_raw(&Sent { kind: "function", function: name }),
        }
    }
}

#[derive(Deserialize)]
struct Text<'a> {
    #[serde(borrow)]
    format: Option<&'a RawValue>,
    verbosity: Option<String>,
}

/// A format, flat as here; without its type it is the `json_schema` of a chat.
#[derive(Deserialize, Serialize)]
struct Format<'a> {
    #[serde(rename = "type", skip_serializing)]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    schema: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

#[derive(Serialize)]
struct ResponseFormat<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    json_schema: &'a Format<'a>,
}

/// A chat request that is being written.
struct Chat(Vec<u8>);

impl Chat {
    fn member(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        self.raw(name, to_raw(value).get().as_bytes());
    }

    fn raw(&mut self, name: &str, value: &[u8]) {
        if self.0.len() > 1 {
            self.0.push(b',');
        }
        self.0.extend_from_slice(to_raw(name).get().as_bytes());
        self.0.push(b':');
        self.0.extend_from_slice(value);
    }
}

/// Strings, numbers and raw JSON always serialise.
fn to_raw(value: &(impl Serialize + ?Sized)) -> Box<RawValue> {
    to_raw_value(value).unwrap_or_default()
}

struct Spans(Vec<(String, Range<usize>)>);

impl Visitor for Spans {
    fn member(&mut self, _: &str) -> bool {
        false
    }

    fn string(&mut self, _: &str, _: usize) {}

    fn value(&mut self, key: &str, span: Range<usize>) {
        if self.0.len() <= MAX_MEMBERS {
            self.0.push((key.to_owned(), span));
        }
    }
}
