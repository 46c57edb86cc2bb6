//! Decides what each item of a response's input is as a message of a chat.
//!
//! Items are written as they are read: nothing is kept of them but the assistant's turn under way, because its text and its
//! calls are one message of a chat and several items here.

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::openai::errors::ApiError;

const INPUT: Option<&str> = Some("input");

/// One item, as far as any kind of it has these.
#[derive(Deserialize)]
struct Item<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    #[serde(borrow)]
    output: Option<&'a RawValue>,
}

/// One part of a content.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
    image_url: Option<String>,
    detail: Option<String>,
    file_data: Option<String>,
    filename: Option<String>,
    #[serde(borrow)]
    input_audio: Option<&'a RawValue>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ChatPart<'a> {
    Text { text: String },
    ImageUrl { image_url: Image },
    File { file: File },
    InputAudio { input_audio: &'a RawValue },
}

#[derive(Serialize)]
struct Image {
    url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

#[derive(Serialize)]
struct File {
    file_data: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    filename: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    Text(String),
    Parts(Vec<ChatPart<'a>>),
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
    content: Option<Content<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

#[derive(Serialize)]
struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Serialize)]
struct Function {
    name: String,
    arguments: String,
}

/// The `messages` of a chat, as JSON.
pub(super) fn messages(instructions: Option<&str>, input: &RawValue) -> Result<Vec<u8>, ApiError> {
    let mut messages = Messages { out: b"[".to_vec(), turn: None };
    if let Some(text) = instructions {
        messages.push(&Message::of("system", Content::Text(text.to_owned())));
    }
    if input.get().starts_with('"') {
        messages.push(&Message::of("user", Content::Text(text(input)?)));
    } else {
        each(input, "input", |item| messages.item(item))?;
    }
    messages.flush();
    messages.out.push(b']');
    Ok(messages.out)
}

impl<'a> Message<'a> {
    const fn of(role: &'a str, content: Content<'a>) -> Self {
        Self { role, tool_call_id: None, content: Some(content), tool_calls: Vec::new() }
    }
}

struct Messages<'a> {
    out: Vec<u8>,
    /// The assistant's turn under way.
    turn: Option<Message<'a>>,
}

impl<'a> Messages<'a> {
    fn push(&mut self, message: &Message<'_>) {
        if self.out.len() > 1 {
            self.out.push(b',');
        }
        // Strings and raw JSON always serialise.
        let written = serde_json::to_writer(&mut self.out, message);
        debug_assert!(written.is_ok());
    }

    fn flush(&mut self) {
        if let Some(turn) = self.turn.take() {
            self.push(&turn);
        }
    }

    fn item(&mut self, item: &'a RawValue) -> Result<(), ApiError> {
        let item: Item<'a> = read(item, "An item of 'input' is malformed.")?;
        match item.kind.as_deref() {
            None | Some("message") => self.message(item),
            Some("function_call") => {
                let (Some(id), Some(name), Some(arguments)) = (item.call_id, item.name, item.arguments) else {
                    return bad("A function_call in 'input' needs 'call_id', 'name' and 'arguments'.");
                };
                let empty = Message { role: "assistant", tool_call_id: None, content: None, tool_calls: Vec::new() };
                let call = Call { id, kind: "function", function: Function { name, arguments } };
                self.turn.get_or_insert(empty).tool_calls.push(call);
                Ok(())
            }
            Some("function_call_output") => {
                let (Some(id), Some(output)) = (item.call_id, item.output) else {
                    return bad("A function_call_output in 'input' needs 'call_id' and 'output'.");
                };
                self.flush();
                let message = Message { tool_call_id: Some(id), ..Message::of("tool", content(output, true)?) };
                self.push(&message);
                Ok(())
            }
            // What a model thought in an earlier turn is not sent again: many servers refuse it.
            Some("reasoning") => Ok(()),
            Some("item_reference") => bad("'input' refers to a stored item, but nothing is stored here."),
            Some(_) => {
                bad("An item of 'input' has a type that is not supported here. Supported are message, function_call, \
                 function_call_output and reasoning.")
            }
        }
    }

    fn message(&mut self, item: Item<'a>) -> Result<(), ApiError> {
        let Some(given) = item.content else { return bad("A message in 'input' needs 'content'.") };
        let role = match item.role.as_deref() {
            Some("assistant") => "assistant",
            Some("user") => "user",
            // Many chat templates know no other name for it.
            Some("system" | "developer") => "system",
            Some(_) | None => return bad("A message in 'input' needs the role user, assistant, system or developer."),
        };
        self.flush();
        let message = Message::of(role, content(given, role != "user")?);
        if role == "assistant" {
            self.turn = Some(message)
        } else {
            self.push(&message)
        }
        Ok(())
    }
}

/// `joined` = texts alone become one text, because many servers take nothing else there.
fn content(given: &RawValue, joined: bool) -> Result<Content<'_>, ApiError> {
    if given.get().starts_with('"') {
        return Ok(Content::Text(text(given)?));
    }
    let mut parts = Vec::new();
    each(given, "input", |part| {
        parts.push(chat_part(read(part, "A part of a content in 'input' is malformed.")?)?);
        Ok(())
    })?;
    let texts = parts.iter().filter(|part| matches!(part, ChatPart::Text { .. })).count();
    if texts != parts.len() || !(joined || texts == 1) {
        return Ok(Content::Parts(parts));
    }
    let texts = parts.into_iter().filter_map(|part| match part {
        ChatPart::Text { text } => Some(text),
        ChatPart::ImageUrl { .. } | ChatPart::File { .. } | ChatPart::InputAudio { .. } => None,
    });
    Ok(Content::Text(texts.collect()))
}

fn chat_part(part: Part<'_>) -> Result<ChatPart<'_>, ApiError> {
    let missing = || ApiError::bad_request(INPUT, "A part of a content in 'input' lacks its content.");
    match part.kind.as_str() {
        "input_text" | "output_text" | "text" => Ok(ChatPart::Text { text: part.text.ok_or_else(missing)? }),
        "refusal" => Ok(ChatPart::Text { text: part.refusal.ok_or_else(missing)? }),
        "input_image" => match part.image_url {
            Some(url) => Ok(ChatPart::ImageUrl { image_url: Image { url, detail: part.detail } }),
            None => bad("An input_image needs 'image_url': no files are stored here."),
        },
        "input_file" => match part.file_data {
            Some(file_data) => Ok(ChatPart::File { file: File { file_data, filename: part.filename } }),
            None => bad("An input_file needs 'file_data': no files are stored or fetched here."),
        },
        "input_audio" => Ok(ChatPart::InputAudio { input_audio: part.input_audio.ok_or_else(missing)? }),
        _ => bad("A part of a content in 'input' has a type that is not supported here."),
    }
}

fn bad<T>(message: &'static str) -> Result<T, ApiError> {
    Err(ApiError::bad_request(INPUT, message))
}

fn read<'a, T: Deserialize<'a>>(value: &'a RawValue, problem: &'static str) -> Result<T, ApiError> {
    // The message of the parser may repeat the input.
    serde_json::from_str(value.get()).map_err(|_| ApiError::bad_request(INPUT, problem))
}

fn text(value: &RawValue) -> Result<String, ApiError> {
    read(value, "A string of 'input' is not valid.")
}

/// Calls for each element of an array, without a list of them: small elements would make it many times their size.
pub(super) fn each<'a>(
    array: &'a RawValue,
    param: &'static str,
    found: impl FnMut(&'a RawValue) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    struct Elements<F>(F, Result<(), ApiError>);

    impl<'de, F: FnMut(&'de RawValue) -> Result<(), ApiError>> Visitor<'de> for &mut Elements<F> {
        type Value = ();

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an array")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
            while let Some(element) = seq.next_element::<&'de RawValue>()? {
                if self.1.is_ok() {
                    self.1 = (self.0)(element);
                }
            }
            Ok(())
        }
    }

    let mut elements = Elements(found, Ok(()));
    let mut reader = serde_json::Deserializer::from_str(array.get());
    if reader.deserialize_seq(&mut elements).is_err() {
        return Err(ApiError::bad_request(Some(param), format!("'{param}' and its lists must be arrays.")));
    }
    elements.1
}
