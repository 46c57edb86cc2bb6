//! Decides how a chat-completions object is said in Ollama's own words.
//!
//! | asked for | said |
//! | --- | --- |
//! | `max_completion_tokens`, `temperature`, `top_p`, `seed`, `stop`, penalties, `top_k`, `min_p` | `options` |
//! | `reasoning_effort` | `think`, where the model is not known to be unable |
//! | `response_format` | `format` |
//! | `tool_choice` `none`, or one function | no tools, or only that one: Ollama can't be made to call |
//! | images as `data:` URLs | `images`; any other part is refused |
//! | `n` above 1 | refused |
//!
//! `truncate` and `shift` are off: a prompt that does not fit is an error that says so, not a shorter prompt. What would change
//! the server for others (`keep_alive`, `num_ctx`) never passes.

use iop_execution::chat::ChatMessage;
use iop_execution::{ChatInput, ProviderError, Target};
use serde_json::{Map, Value, json};

/// Numbers that pass into `options` under their own name.
const OPTIONS: [&str; 6] = ["frequency_penalty", "min_p", "presence_penalty", "repeat_penalty", "top_k", "typical_p"];

/// The body of `POST /api/chat`. `thinks` is whether the model can, as far as is known.
pub(super) fn chat(input: &ChatInput, target: &Target, thinks: Option<bool>) -> Result<Vec<u8>, ProviderError> {
    let body = input.body();
    if body.n.is_some_and(|choices| choices > 1) {
        return Err(refused("this provider gives one choice per request: n must be 1"));
    }
    // Without a message Ollama only loads the model.
    if input.messages().is_empty() {
        return Err(refused("messages must hold a message"));
    }
    let mut said = Map::new();
    said.insert("model".to_owned(), target.as_str().into());
    said.insert("messages".to_owned(), messages(input.messages())?.into());
    said.insert("stream".to_owned(), true.into());
    said.insert("truncate".to_owned(), false.into());
    said.insert("shift".to_owned(), false.into());
    let tools = tools(&body.tools, body.tool_choice.as_ref())?;
    if !tools.is_empty() {
        said.insert("tools".to_owned(), tools.into());
    }
    if let Some(format) = body.response_format.as_ref().map(format).transpose()?.flatten() {
        said.insert("format".to_owned(), format);
    }
    if let Some(think) = think(input)?.filter(|_| thinks != Some(false)) {
        said.insert("think".to_owned(), think);
    }
    let options = options(input);
    if !options.is_empty() {
        said.insert("options".to_owned(), options.into());
    }
    serde_json::to_vec(&said).map_err(|_| refused("the request can't be written as JSON"))
}

fn refused(message: &'static str) -> ProviderError {
    ProviderError::invalid_request(message)
}

fn options(input: &ChatInput) -> Map<String, Value> {
    let body = input.body();
    let mut options = Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            options.insert(name.to_owned(), value);
        }
    };
    set("num_predict", input.max_tokens().map(Value::from));
    set("temperature", body.temperature.map(Value::from));
    set("top_p", body.top_p.map(Value::from));
    set("seed", body.seed.map(Value::from));
    let stop = input.stop();
    set("stop", (!stop.is_empty()).then(|| json!(stop)));
    // vLLM's and SGLang's name of it.
    set("repeat_penalty", body.other.get("repetition_penalty").filter(|value| value.is_number()).cloned());
    for name in OPTIONS {
        set(name, body.other.get(name).filter(|value| value.is_number()).cloned());
    }
    options
}

fn think(input: &ChatInput) -> Result<Option<Value>, ProviderError> {
    let body = input.body();
    let of_responses = || body.other.get("reasoning").and_then(|reasoning| reasoning.get("effort")?.as_str());
    let Some(effort) = body.reasoning_effort.as_deref().or_else(of_responses) else {
        // Ollama's own word, as a bool.
        return Ok(body.other.get("think").filter(|think| think.is_boolean()).cloned());
    };
    match effort {
        "none" => Ok(Some(false.into())),
        "minimal" | "low" => Ok(Some("low".into())),
        "medium" => Ok(Some("medium".into())),
        "high" | "xhigh" | "max" => Ok(Some("high".into())),
        _ => Err(refused("reasoning_effort must be none, minimal, low, medium, high or xhigh")),
    }
}

fn format(response_format: &Value) -> Result<Option<Value>, ProviderError> {
    match response_format.get("type").and_then(Value::as_str) {
        None if response_format.is_null() => Ok(None),
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some("json".into())),
        Some("json_schema") => match response_format.pointer("/json_schema/schema") {
            Some(schema) if schema.is_object() => Ok(Some(schema.clone())),
            Some(_) | None => Err(refused("response_format of type json_schema must hold json_schema.schema")),
        },
        Some(_) | None => Err(refused("response_format must be of type text, json_object or json_schema")),
    }
}

fn tools(tools: &[Value], choice: Option<&Value>) -> Result<Vec<Value>, ProviderError> {
    match choice {
        Some(Value::String(choice)) if choice == "none" => Ok(Vec::new()),
        Some(Value::Object(choice)) => {
            let named = choice.get("function").and_then(|function| function.get("name"));
            let only: Vec<_> = tools
                .iter()
                .filter(|tool| named.is_some() && tool.pointer("/function/name") == named)
                .cloned()
                .collect();
            if only.is_empty() { Err(refused("tool_choice names none of the tools")) } else { Ok(only) }
        }
        Some(_) | None => Ok(tools.to_vec()),
    }
}

fn messages(messages: &[ChatMessage]) -> Result<Vec<Value>, ProviderError> {
    // Which tool an id stands for: Ollama wants the name with the result.
    let mut called: Vec<(&str, &str)> = Vec::new();
    messages
        .iter()
        .map(|message| {
            let mut said = Map::new();
            let role = match message.role.as_str() {
                "developer" => "system",
                "function" => "tool",
                role => role,
            };
            said.insert("role".to_owned(), role.into());
            let (text, images) = content(&message.content)?;
            said.insert("content".to_owned(), text.into());
            if !images.is_empty() {
                said.insert("images".to_owned(), images.into());
            }
            let field = |name: &str| message.other.get(name).and_then(Value::as_str);
            if let Some(thinking) = field("reasoning_content").or_else(|| field("reasoning")) {
                said.insert("thinking".to_owned(), thinking.into());
            }
            if !message.tool_calls.is_empty() {
                let calls: Result<Vec<_>, _> = message.tool_calls.iter().map(tool_call).collect();
                said.insert("tool_calls".to_owned(), calls?.into());
                called.extend(
                    message.tool_calls.iter().filter_map(|call| {
                        Some((call.get("id")?.as_str()?, call.pointer("/function/name")?.as_str()?))
                    }),
                );
            }
            if role == "tool" {
                let id = message.tool_call_id.as_deref();
                let by_id = || called.iter().rev().find(|(known, _)| Some(*known) == id).map(|(_, name)| *name);
                if let Some(name) = by_id().or_else(|| field("name")) {
                    said.insert("tool_name".to_owned(), name.into());
                }
                if let Some(id) = id {
                    said.insert("tool_call_id".to_owned(), id.into());
                }
            }
            Ok(said.into())
        })
        .collect()
}

/// A call of an earlier turn: its arguments are text at OpenAI and an object at Ollama.
fn tool_call(call: &Value) -> Result<Value, ProviderError> {
    let name = call.pointer("/function/name").cloned().unwrap_or_default();
    let arguments = match call.pointer("/function/arguments") {
        None | Some(Value::Null) => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => serde_json::from_str(text)
            .ok()
            .filter(Value::is_object)
            .ok_or_else(|| refused("the arguments of a tool call in messages are not a JSON object"))?,
        Some(other) => other.clone(),
    };
    let mut said = json!({ "function": { "name": name, "arguments": arguments } });
    if let (Some(id), Some(said)) = (call.get("id").filter(|id| id.is_string()), said.as_object_mut()) {
        said.insert("id".to_owned(), id.clone());
    }
    Ok(said)
}

/// Text, parts joined, and images as base64.
fn content(content: &Value) -> Result<(String, Vec<Value>), ProviderError> {
    let parts = match content {
        Value::String(text) => return Ok((text.clone(), Vec::new())),
        Value::Null => return Ok(Default::default()),
        Value::Array(parts) => parts,
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            return Err(refused("the content of a message must be text or a list of parts"));
        }
    };
    let (mut text, mut images) = (String::new(), Vec::new());
    for part in parts {
        match part.get("type").and_then(Value::as_str) {
            Some("text" | "refusal") => {
                let said = part.get("text").or_else(|| part.get("refusal"));
                text.push_str(said.and_then(Value::as_str).unwrap_or_default());
            }
            Some("image_url") => {
                let url = part.pointer("/image_url/url").or_else(|| part.get("image_url")).and_then(Value::as_str);
                let image = url
                    .and_then(inline_image)
                    .ok_or_else(|| refused("this provider fetches no images: give each as a data: URL in base64"))?;
                images.push(image.into());
            }
            Some(_) | None => return Err(refused("this provider takes text and images only")),
        }
    }
    Ok((text, images))
}

/// The base64 text of `data:image/…;base64,…`.
fn inline_image(url: &str) -> Option<&str> {
    let (media, data) = url.strip_prefix("data:")?.split_once(',')?;
    media.ends_with(";base64").then_some(data)
}
