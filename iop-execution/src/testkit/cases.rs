//! Decides what OpenAI-compatible servers answer to a chat request, good and odd, and what that must come to.
//!
//! One table of 87 answers, byte for byte: framings of the event stream, ends of it, errors of every shape, usage,
//! finish reasons, deltas, tool calls, whole-body answers and statuses. Each says what its text is and how it ends, so a
//! test needs to know nothing about a case but its name.

mod streams;
mod whole;

use serde_json::{Value, json};

use super::backend::Answer;

/// How an answer ends for whoever reads it correctly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "an answer is whole, broken or silent")]
pub enum CaseEnd {
    /// The answer is complete.
    Ok,
    /// A typed error.
    Error,
    /// The provider goes silent without an end: only a timer or a cancel ends it.
    Stall,
}

/// What reading an answer must come to: the text of choice 0 up to the end, and the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "a text and an end")]
pub struct Expected {
    /// The text.
    pub text: &'static str,
    /// The end.
    pub end: CaseEnd,
}

/// One answer and what it must come to.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ChatCase {
    /// Its name, which is the `model` that asks for it.
    pub name: &'static str,
    /// The answer.
    pub answer: Answer,
    /// What a request with `"stream": true` must come to, by the rules of the standards. A reader may be stricter where
    /// it says so (a JSON body instead of a stream, a compressed body nobody asked for).
    pub stream: Expected,
    /// What a request without it must come to.
    pub plain: Expected,
}

/// The text of every case that has one.
pub const TEXT: &str = "Hé";

const OK: Expected = Expected { text: TEXT, end: CaseEnd::Ok };
const CUT: Expected = Expected { text: TEXT, end: CaseEnd::Error };
const NOTHING: Expected = Expected { text: "", end: CaseEnd::Error };

/// Streams that report 3 tokens of input and 2 of output, each in another form.
pub const USAGE_CASES: [&str; 6] =
    ["ok", "usage_no_choices", "usage_null_choices", "usage_twice", "usage_in_finish", "usage_null_each"];

/// Every case.
#[must_use]
pub fn chat_cases() -> Vec<ChatCase> {
    let mut cases = streams::cases();
    cases.extend(whole::cases());
    cases
}

/// The case of this name.
#[must_use]
pub fn chat_case(name: &str) -> Option<ChatCase> {
    chat_cases().into_iter().find(|case| case.name == name)
}

/// The whole answer that goes with the stream cases.
#[must_use]
pub fn full_answer() -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": TEXT }, "finish_reason": "stop" }],
        "usage": { "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5 },
    })
}

pub(super) fn model_not_found() -> Answer {
    let body = json!({ "error": {
        "message": "The model `x` does not exist", "type": "invalid_request_error", "param": null,
        "code": "model_not_found",
    }});
    Answer::json(404, body.to_string())
}

fn boom() -> Value {
    json!({ "error": { "message": "boom", "type": "server_error", "param": null, "code": "internal" } })
}
