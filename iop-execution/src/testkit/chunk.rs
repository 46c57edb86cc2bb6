//! Decides how the kit writes OpenAI chat chunks: one spelling for scripts and cases.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::event::{FinishReason, ToolCallDelta};
use crate::usage::Usage;

pub(super) fn with_finish(delta: Value, finish: &Value) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{ "index": 0, "delta": delta, "finish_reason": finish }],
    })
}

pub(super) fn delta(delta: Value) -> Value {
    with_finish(delta, &Value::Null)
}

pub(super) fn role() -> Value {
    delta(json!({ "role": "assistant", "content": "" }))
}

pub(super) fn finish(reason: FinishReason) -> Value {
    with_finish(json!({}), &json!(reason.as_str()))
}

pub(super) fn tool_call(call: &ToolCallDelta) -> Value {
    let mut piece = json!({ "index": call.index, "function": { "arguments": call.arguments } });
    if let Some(id) = &call.id {
        piece["id"] = json!(id);
        piece["type"] = json!("function");
    }
    if let Some(name) = &call.name {
        piece["function"]["name"] = json!(name);
    }
    delta(json!({ "tool_calls": [piece] }))
}

pub(super) fn usage_object(usage: &Usage) -> Value {
    let mut object = json!({});
    if let Some(count) = usage.input_tokens {
        object["prompt_tokens"] = json!(count);
    }
    if let Some(count) = usage.output_tokens {
        object["completion_tokens"] = json!(count);
    }
    if let Some(count) = usage.reasoning_tokens {
        object["completion_tokens_details"] = json!({ "reasoning_tokens": count });
    }
    if let Some(count) = usage.cached_input_tokens {
        object["prompt_tokens_details"] = json!({ "cached_tokens": count });
    }
    object
}

pub(super) fn usage(usage: &Usage) -> Value {
    let mut chunk = delta(json!({}));
    chunk["choices"] = json!([]);
    chunk["usage"] = usage_object(usage);
    chunk
}

/// One event with this JSON as its data.
pub(super) fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";
