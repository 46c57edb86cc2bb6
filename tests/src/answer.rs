//! Decides what an answer means to a client that reads it correctly: text, a typed error, or a defect of the gateway.

use bytes::Bytes;
use iop_execution::sse::{BlockContent, split_blocks};
use serde_json::Value;

use crate::wire_client::{Answer, End};

/// What a chat answer came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// It is complete.
    Whole {
        /// Text of choice 0.
        text: String,
    },
    /// It failed, and says so in the one form that clients understand.
    Failed {
        /// Text of choice 0 before the failure.
        text: String,
        /// HTTP status.
        status: u16,
        /// Its `code`.
        code: Option<String>,
        /// Its `type`.
        kind: String,
    },
    /// The body broke off, which every HTTP client reports.
    Broken {
        /// Text of choice 0 before the break.
        text: String,
    },
    /// The client can't know that something is missing, or can't read what it got: never allowed.
    Defect(String),
}

impl Outcome {
    /// The text, however it ended.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Whole { text } | Self::Failed { text, .. } | Self::Broken { text } => text,
            Self::Defect(_) => "",
        }
    }

    /// True for a typed error.
    #[must_use]
    pub const fn is_error(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}

/// Reads a chat answer, streamed or not.
#[must_use]
pub fn read(answer: &Answer) -> Outcome {
    let kind = answer.head.header("content-type").unwrap_or_default();
    read_parts(answer.status(), kind, &answer.body(), answer.end)
}

/// Reads a chat answer from its parts.
#[must_use]
pub fn read_parts(status: u16, content_type: &str, body: &Bytes, end: End) -> Outcome {
    if content_type.starts_with("text/event-stream") {
        return if status == 200 {
            read_stream(body, end)
        } else {
            Outcome::Defect(format!("a stream with status {status}"))
        };
    }
    if end == End::Broken {
        return Outcome::Broken { text: String::new() };
    }
    let Ok(json) = serde_json::from_slice::<Value>(body) else {
        return Outcome::Defect(format!("no JSON: {}", String::from_utf8_lossy(body)));
    };
    if status != 200 {
        return failed(String::new(), status, &json);
    }
    let taken_for_granted = ["/choices/0/logprobs", "/choices/0/message/content", "/choices/0/message/refusal"];
    if let Some(missing) = taken_for_granted.iter().find(|member| json.pointer(member).is_none()) {
        return Outcome::Defect(format!("a whole answer without {missing}: {json}"));
    }
    match json.pointer("/choices/0/message") {
        Some(message) if json.pointer("/choices/0/finish_reason").is_some_and(Value::is_string) => {
            Outcome::Whole { text: message["content"].as_str().unwrap_or_default().to_owned() }
        }
        _ => Outcome::Defect(format!("a whole answer without a finished choice: {json}")),
    }
}

fn read_stream(body: &Bytes, end: End) -> Outcome {
    let (mut text, mut error, mut done) = (String::new(), None, false);
    for block in split_blocks(body) {
        let event = match block {
            Ok(block) if block.bom => return Outcome::Defect("a byte order mark".to_owned()),
            Ok(block) => match block.content {
                BlockContent::Event(event) => event,
                BlockContent::Comment | BlockContent::Blank => continue,
                other => return Outcome::Defect(format!("a block clients can't read: {other:?}")),
            },
            Err(_) if end == End::Broken => break,
            Err(error) => return Outcome::Defect(format!("no event stream: {error}")),
        };
        if error.is_some() {
            return Outcome::Defect("something follows an error".to_owned());
        }
        if done {
            return Outcome::Defect("an event follows [DONE]".to_owned());
        }
        if event.is_done() {
            done = true;
            continue;
        }
        let Ok(json) = serde_json::from_slice::<Value>(&event.data) else {
            return Outcome::Defect(format!("an event without JSON: {}", String::from_utf8_lossy(&event.data)));
        };
        if json.get("error").is_some() {
            error = Some(json);
            continue;
        }
        if let Some(problem) = unreadable(&json) {
            return Outcome::Defect(format!("{problem}: {json}"));
        }
        let choices = json["choices"].as_array().map(Vec::as_slice).unwrap_or_default();
        for choice in choices.iter().filter(|choice| choice["index"] == 0) {
            text.push_str(choice.pointer("/delta/content").and_then(Value::as_str).unwrap_or_default());
        }
    }
    match (error, done, end) {
        (_, _, End::Broken) => Outcome::Broken { text },
        (Some(error), ..) => failed(text, 200, &error),
        (None, true, End::Whole) => Outcome::Whole { text },
        (None, false, End::Whole) => Outcome::Defect(format!("a clean end without [DONE] or error after {text:?}")),
    }
}

/// Why SDKs can't read a chunk, if they can't (API-10 d, e).
fn unreadable(chunk: &Value) -> Option<&'static str> {
    const FINISHES: [&str; 5] = ["stop", "length", "tool_calls", "content_filter", "function_call"];
    let Some(choices) = chunk["choices"].as_array() else { return Some("no choices") };
    choices.iter().find_map(|choice| {
        let finish = &choice["finish_reason"];
        if !finish.is_null() && !finish.as_str().is_some_and(|finish| FINISHES.contains(&finish)) {
            return Some("a finish reason of its own");
        }
        if !choice["delta"].is_object() {
            return Some("no delta");
        }
        let calls = choice["delta"]["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
        calls.iter().find_map(|call| {
            let arguments = &call["function"]["arguments"];
            match (call["index"].is_u64(), arguments.is_null() || arguments.is_string()) {
                (false, _) => Some("a piece of a call without its index"),
                (_, false) => Some("arguments that are no text"),
                (true, true) => None,
            }
        })
    })
}

/// Checks the one shape an error may have (API-5).
fn failed(text: String, status: u16, json: &Value) -> Outcome {
    let broken = || Outcome::Defect(format!("an error of another shape: {json}"));
    let Some(error) =
        json.get("error").and_then(Value::as_object).filter(|_| json.as_object().is_some_and(|o| o.len() == 1))
    else {
        return broken();
    };
    let text_of = |name: &str| error.get(name).and_then(Value::as_str).map(str::to_owned);
    let is_text_or_null = |name: &str| error.get(name).is_some_and(|value| value.is_string() || value.is_null());
    let (Some(_), Some(kind)) = (text_of("message"), text_of("type")) else { return broken() };
    if error.len() != 4 || !is_text_or_null("code") || !is_text_or_null("param") {
        return broken();
    }
    Outcome::Failed { text, status, code: text_of("code"), kind }
}

/// The data of every event of a stream.
#[must_use]
pub fn event_data(body: &Bytes) -> Vec<String> {
    split_blocks(body)
        .filter_map(|block| match block.ok()?.content {
            BlockContent::Event(event) => Some(String::from_utf8_lossy(&event.data).into_owned()),
            BlockContent::Blank | BlockContent::Comment | BlockContent::ErrorField(_) | BlockContent::NoData => None,
        })
        .collect()
}

/// The JSON of every event of a stream but `[DONE]`.
#[must_use]
pub fn event_json(body: &Bytes) -> Vec<Value> {
    event_data(body).iter().filter_map(|data| serde_json::from_str(data).ok()).collect()
}
