//! Decides the bytes of an answer that the Edge builds from the events of a normalised run (API-9).
//!
//! The same bytes a tunnelled provider would send: a role chunk, deltas, a finish chunk, usage if asked for, `[DONE]`; or
//! one `chat.completion` object. No clock, no ids of its own: everything comes in.

use iop_execution::{FinishReason, RunId, ToolCallDelta, Usage};
use serde::Serialize;
use serde_json::{Value, json};

use crate::openai::edit::quoted;

/// What every chunk of one answer says.
#[derive(Debug)]
pub(crate) struct Renderer {
    run_id: RunId,
    created: u64,
    /// As a JSON string.
    model: String,
    /// `data: {"id":…,"choices":[{"index":0,"delta":`
    opening: Vec<u8>,
}

const CLOSING: &[u8] = b",\"logprobs\":null,\"finish_reason\":null}]}\n\n";

impl Renderer {
    pub(crate) fn new(run_id: RunId, created: u64, model: &str) -> Self {
        let model = quoted(model);
        let opening = [head(run_id, created, &model).as_bytes(), b",\"choices\":[{\"index\":0,\"delta\":"].concat();
        Self { run_id, created, model, opening }
    }

    /// The first chunk.
    pub(crate) fn role(&self, out: &mut Vec<u8>) {
        self.chunk(out, |out| out.extend_from_slice(br#"{"role":"assistant","content":""}"#));
    }

    pub(crate) fn text(&self, text: &str, out: &mut Vec<u8>) {
        self.chunk(out, |out| {
            out.extend_from_slice(b"{\"content\":");
            put_text(text, out);
            out.push(b'}');
        });
    }

    /// Reasoning, under both of its names.
    pub(crate) fn reasoning(&self, text: &str, out: &mut Vec<u8>) {
        self.chunk(out, |out| {
            out.extend_from_slice(b"{\"reasoning_content\":");
            put_text(text, out);
            out.extend_from_slice(b",\"reasoning\":");
            put_text(text, out);
            out.push(b'}');
        });
    }

    /// A piece of a tool call; the first one of each call carries `id`.
    pub(crate) fn tool_call(&self, call: &ToolCallDelta, id: Option<&str>, out: &mut Vec<u8>) {
        let function = Function { name: call.name.as_deref(), arguments: &call.arguments };
        let piece = Piece { index: call.index, id, kind: id.map(|_| "function"), function };
        self.chunk(out, |out| {
            out.extend_from_slice(b"{\"tool_calls\":[");
            put(&piece, out);
            out.extend_from_slice(b"]}");
        });
    }

    /// The last chunk with a choice.
    pub(crate) fn finish(&self, finish: FinishReason, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.opening);
        out.extend_from_slice(b"{},\"logprobs\":null,\"finish_reason\":\"");
        out.extend_from_slice(finish.as_str().as_bytes());
        out.extend_from_slice(b"\"}]}\n\n");
    }

    /// The usage chunk.
    pub(crate) fn usage(&self, usage: &Value, out: &mut Vec<u8>) {
        out.extend_from_slice(head(self.run_id, self.created, &self.model).as_bytes());
        out.extend_from_slice(b",\"choices\":[],\"usage\":");
        put(usage, out);
        out.extend_from_slice(b"}\n\n");
    }

    /// The end of a stream.
    pub(crate) fn done(out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// The answer of a request that is not streamed.
    pub(crate) fn document(&self, answer: &Answer, finish: FinishReason, usage: Option<&Value>) -> Vec<u8> {
        let calls: Vec<_> = answer
            .calls
            .iter()
            .map(|call| {
                json!({
                    "id": call.id,
                    "type": "function",
                    "function": { "name": call.name, "arguments": call.arguments },
                })
            })
            .collect();
        let message = Message {
            role: "assistant",
            content: (!answer.text.is_empty() || calls.is_empty()).then_some(&answer.text),
            refusal: None,
            reasoning_content: Some(&answer.reasoning).filter(|text| !text.is_empty()),
            reasoning: Some(&answer.reasoning).filter(|text| !text.is_empty()),
            tool_calls: Some(calls).filter(|calls| !calls.is_empty()),
        };
        let choice = Choice { index: 0, message, logprobs: None, finish_reason: finish.as_str() };
        let mut out = format!(
            r#"{{"id":"chatcmpl-{}","object":"chat.completion","created":{},"model":{},"choices":["#,
            self.run_id, self.created, self.model
        )
        .into_bytes();
        put(&choice, &mut out);
        out.push(b']');
        if let Some(usage) = usage {
            out.extend_from_slice(b",\"usage\":");
            put(usage, &mut out);
        }
        out.push(b'}');
        out
    }

    fn chunk(&self, out: &mut Vec<u8>, delta: impl FnOnce(&mut Vec<u8>)) {
        out.extend_from_slice(&self.opening);
        delta(out);
        out.extend_from_slice(CLOSING);
    }
}

/// An answer put together from its pieces.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<Call>,
}

/// One tool call.
pub(crate) struct Call {
    pub(crate) index: u32,
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: String,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer")
            .field("text", &self.text.len())
            .field("calls", &self.calls.len())
            .finish_non_exhaustive()
    }
}

#[derive(Serialize)]
struct Piece<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'a str>,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Option<()>,
    finish_reason: &'a str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: Option<&'a String>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<Value>>,
}

/// Counts in the API's form; `None` unless both that the API requires were reported: absent is not zero.
pub(crate) fn usage_object(usage: &Usage) -> Option<Value> {
    let (input, output) = (usage.input_tokens?, usage.output_tokens?);
    let mut object = json!({
        "prompt_tokens": input,
        "completion_tokens": output,
        "total_tokens": input.saturating_add(output),
    });
    if let Some(cached) = usage.cached_input_tokens {
        object["prompt_tokens_details"] = json!({ "cached_tokens": cached });
    }
    if let Some(reasoning) = usage.reasoning_tokens {
        object["completion_tokens_details"] = json!({ "reasoning_tokens": reasoning });
    }
    Some(object)
}

fn head(run_id: RunId, created: u64, model: &str) -> String {
    format!(r#"data: {{"id":"chatcmpl-{run_id}","object":"chat.completion.chunk","created":{created},"model":{model}"#)
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    put(text, out);
}

fn put<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) {
    // A vector takes every write, and these types always serialise.
    let written = serde_json::to_writer(out, value);
    debug_assert!(written.is_ok());
}
