//! Decides what one chunk of a chat answer says: text, reasoning, tool calls, counts, ends, errors, in every spelling.
//!
//! One reader for the tunnel's observer and for runs, for stream chunks and whole answers. It is lenient about shapes
//! (a field of an unexpected type counts as absent) and strict about JSON.

use iop_execution::Usage;

use crate::json::{Kind, NotJson, Scanned, Scanner, Text};

/// Most choices of one chunk that are read; more than any server allows.
const MAX_CHOICES: usize = 128;
/// Most tool-call pieces of one choice that are read.
const MAX_PIECES: usize = 128;

/// What one chunk says.
#[derive(Default)]
pub(crate) struct Chunk<'a> {
    pub(crate) choices: Vec<Choice<'a>>,
    pub(crate) usage: Option<Usage>,
    /// An error object, in any of its shapes.
    pub(crate) error: bool,
    /// Prompt tokens done so far, where the server tells.
    pub(crate) processed: Option<u64>,
    /// Set when the chunk is an event of another API: Responses, or Anthropic's messages.
    pub(crate) other: Option<OtherEvent>,
}

/// What an event of an API without choices says, as far as a tunnel needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherEvent {
    Content,
    Lifecycle,
    Finished,
    /// Nothing follows it, not even `[DONE]`.
    Last,
}

/// One choice of a chunk.
#[derive(Default)]
pub(crate) struct Choice<'a> {
    pub(crate) index: u64,
    pub(crate) content: Option<Text<'a>>,
    pub(crate) reasoning: Option<Text<'a>>,
    pub(crate) refusal: Option<Text<'a>>,
    pub(crate) calls: Vec<CallPiece<'a>>,
    /// The deprecated single call.
    pub(crate) function_call: Option<CallPiece<'a>>,
    /// Content that is no plain text: parts, audio.
    pub(crate) other_content: bool,
    /// Why it ended; never empty.
    pub(crate) finish: Option<Text<'a>>,
}

impl Choice<'_> {
    /// True if it carries a part of the answer.
    pub(crate) const fn has_content(&self) -> bool {
        self.content.is_some()
            || self.reasoning.is_some()
            || self.refusal.is_some()
            || self.function_call.is_some()
            || self.other_content
            || !self.calls.is_empty()
    }
}

/// A piece of a tool call.
#[derive(Default)]
pub(crate) struct CallPiece<'a> {
    pub(crate) index: Option<u64>,
    pub(crate) id: Option<Text<'a>>,
    pub(crate) name: Option<Text<'a>>,
    pub(crate) arguments: Arguments<'a>,
}

/// Arguments as they came.
#[derive(Default)]
pub(crate) enum Arguments<'a> {
    #[default]
    None,
    /// A piece of JSON text, as it should be.
    Text(Text<'a>),
    /// A whole JSON object, as some servers send it.
    Object(&'a [u8]),
}

/// Reads one chunk. A text that is JSON but no object says nothing.
pub(crate) fn read(text: &[u8]) -> Scanned<Chunk<'_>> {
    let mut chunk = Chunk::default();
    let mut timings = None;
    let mut delta_empty = None;
    let mut scan = Scanner::new(text);
    scan.object(|scan, key| {
        match key {
            b"choices" => choices(scan, &mut chunk.choices)?,
            b"usage" => chunk.usage = usage(scan)?.or(chunk.usage),
            b"error" => chunk.error |= says_something(scan)?,
            b"object" => chunk.error |= scan.text()?.is_some_and(|object| object.is("error")),
            b"type" => {
                if let Some(kind) = scan.text()?.and_then(|kind| kind.get()) {
                    chunk.error |= matches!(kind.as_ref(), "error" | "response.failed");
                    chunk.other = response_event(&kind).or_else(|| message_event(&kind));
                }
            }
            b"delta" => match scan.peek()? {
                Kind::Object => delta_empty = Some(!block_delta(scan)?),
                _ => delta_empty = scan.text()?.map(|delta| delta.is_empty()),
            },
            b"response" | b"message" => scan.object(|scan, key| {
                if key == b"usage" {
                    chunk.usage = usage(scan)?.or(chunk.usage);
                    Ok(())
                } else {
                    scan.skip()
                }
            })?,
            b"prompt_progress" => scan.object(|scan, key| {
                if key == b"processed" {
                    chunk.processed = scan.count()?;
                    Ok(())
                } else {
                    scan.skip()
                }
            })?,
            b"timings" => timings = llama_timings(scan)?,
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    scan.end()?;
    chunk.usage = chunk.usage.or(timings);
    if chunk.other == Some(OtherEvent::Content) && delta_empty == Some(true) {
        chunk.other = Some(OtherEvent::Lifecycle);
    }
    Ok(chunk)
}

/// An event of Anthropic's messages.
fn message_event(kind: &str) -> Option<OtherEvent> {
    Some(match kind {
        "content_block_delta" => OtherEvent::Content,
        "message_start" | "content_block_start" | "content_block_stop" | "message_delta" | "ping" => {
            OtherEvent::Lifecycle
        }
        "message_stop" => OtherEvent::Last,
        _ => return None,
    })
}

/// Whether the delta of a block of a message holds some of the answer.
fn block_delta(scan: &mut Scanner<'_>) -> Scanned<bool> {
    let mut some = false;
    scan.object(|scan, key| {
        match key {
            b"text" | b"thinking" | b"partial_json" => some |= non_empty(scan)?.is_some(),
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    Ok(some)
}

fn response_event(kind: &str) -> Option<OtherEvent> {
    let name = kind.strip_prefix("response.")?;
    Some(match name {
        "completed" | "incomplete" => OtherEvent::Finished,
        _ if name.ends_with(".delta") => OtherEvent::Content,
        _ => OtherEvent::Lifecycle,
    })
}

/// False for what stands for nothing: null, false, 0, and empty strings, arrays and objects.
fn says_something(scan: &mut Scanner<'_>) -> Scanned<bool> {
    let mut some = false;
    match scan.peek()? {
        Kind::Null => scan.skip()?,
        Kind::Bool => some = scan.raw()? == b"true",
        Kind::Number => some = scan.raw()? != b"0",
        Kind::String => some = scan.text()?.is_some_and(|text| !text.is_empty()),
        Kind::Array => scan.array(|scan| {
            some = true;
            scan.skip()
        })?,
        Kind::Object => scan.object(|scan, _| {
            some = true;
            scan.skip()
        })?,
    }
    Ok(some)
}

fn choices<'a>(scan: &mut Scanner<'a>, into: &mut Vec<Choice<'a>>) -> Scanned<()> {
    scan.array(|scan| {
        let choice = choice(scan)?;
        if into.len() == MAX_CHOICES {
            return Err(NotJson);
        }
        into.push(choice);
        Ok(())
    })
}

fn choice<'a>(scan: &mut Scanner<'a>) -> Scanned<Choice<'a>> {
    let mut choice = Choice::default();
    scan.object(|scan, key| {
        match key {
            b"index" => choice.index = scan.count()?.unwrap_or(0),
            b"delta" | b"message" => delta(scan, &mut choice)?,
            b"finish_reason" => choice.finish = non_empty(scan)?,
            // The older completions API has its text here.
            b"text" => choice.content = non_empty(scan)?.or(choice.content),
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    Ok(choice)
}

fn delta<'a>(scan: &mut Scanner<'a>, choice: &mut Choice<'a>) -> Scanned<()> {
    scan.object(|scan, key| {
        match key {
            b"content" if scan.peek()? == Kind::Array => choice.other_content |= says_something(scan)?,
            b"content" => choice.content = non_empty(scan)?,
            b"reasoning_content" | b"reasoning" => choice.reasoning = non_empty(scan)?.or(choice.reasoning),
            b"refusal" => choice.refusal = non_empty(scan)?,
            b"audio" => choice.other_content |= says_something(scan)?,
            b"tool_calls" => scan.array(|scan| {
                let piece = call(scan)?;
                if choice.calls.len() == MAX_PIECES {
                    return Err(NotJson);
                }
                choice.calls.push(piece);
                Ok(())
            })?,
            b"function_call" if scan.peek()? == Kind::Object => {
                let mut piece = CallPiece::default();
                function(scan, &mut piece)?;
                choice.function_call = Some(piece);
            }
            _ => scan.skip()?,
        }
        Ok(())
    })
}

fn call<'a>(scan: &mut Scanner<'a>) -> Scanned<CallPiece<'a>> {
    let mut piece = CallPiece::default();
    scan.object(|scan, key| {
        match key {
            b"index" => piece.index = scan.count()?,
            b"id" => piece.id = non_empty(scan)?,
            b"function" => function(scan, &mut piece)?,
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    Ok(piece)
}

fn function<'a>(scan: &mut Scanner<'a>, piece: &mut CallPiece<'a>) -> Scanned<()> {
    scan.object(|scan, key| {
        match key {
            b"name" => piece.name = non_empty(scan)?,
            b"arguments" if scan.peek()? == Kind::Object => piece.arguments = Arguments::Object(scan.raw()?),
            b"arguments" => piece.arguments = non_empty(scan)?.map_or(Arguments::None, Arguments::Text),
            // Ollama keeps the index here.
            b"index" => piece.index = scan.count()?.or(piece.index),
            _ => scan.skip()?,
        }
        Ok(())
    })
}

fn non_empty<'a>(scan: &mut Scanner<'a>) -> Scanned<Option<Text<'a>>> {
    Ok(scan.text()?.filter(|text| !text.is_empty()))
}

fn usage(scan: &mut Scanner<'_>) -> Scanned<Option<Usage>> {
    let mut usage = Usage::default();
    let mut hit = None;
    // Anthropic counts what a cache held beside the input, not in it.
    let (mut read, mut written) = (None, None);
    scan.object(|scan, key| {
        match key {
            b"prompt_tokens" | b"input_tokens" => usage.input_tokens = scan.count()?.or(usage.input_tokens),
            b"completion_tokens" | b"output_tokens" => usage.output_tokens = scan.count()?.or(usage.output_tokens),
            // SGLang, beside the details.
            b"reasoning_tokens" => {
                let count = scan.count()?;
                usage.reasoning_tokens = usage.reasoning_tokens.or(count);
            }
            b"cache_read_input_tokens" => read = scan.count()?,
            b"cache_creation_input_tokens" => written = scan.count()?,
            // DeepSeek.
            b"prompt_cache_hit_tokens" => hit = scan.count()?,
            b"prompt_tokens_details" | b"input_tokens_details" => {
                usage.cached_input_tokens = detail(scan, "cached_tokens")?.or(usage.cached_input_tokens);
            }
            b"completion_tokens_details" | b"output_tokens_details" => {
                usage.reasoning_tokens = detail(scan, "reasoning_tokens")?.or(usage.reasoning_tokens);
            }
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    usage.cached_input_tokens = usage.cached_input_tokens.or(hit).or(read);
    let beside = read.unwrap_or(0).saturating_add(written.unwrap_or(0));
    usage.input_tokens = usage.input_tokens.map(|input| input.saturating_add(beside));
    Ok((!usage.is_empty()).then_some(usage))
}

fn detail(scan: &mut Scanner<'_>, name: &str) -> Scanned<Option<u64>> {
    let mut count = None;
    scan.object(|scan, key| {
        if key == name.as_bytes() {
            count = scan.count()?;
            Ok(())
        } else {
            scan.skip()
        }
    })?;
    Ok(count)
}

/// What llama.cpp says at the end even when nobody asked for usage.
fn llama_timings(scan: &mut Scanner<'_>) -> Scanned<Option<Usage>> {
    let (mut cached, mut prompt, mut predicted) = (None, None, None);
    scan.object(|scan, key| {
        match key {
            b"cache_n" => cached = scan.count()?,
            b"prompt_n" => prompt = scan.count()?,
            b"predicted_n" => predicted = scan.count()?,
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    let usage = Usage {
        input_tokens: prompt.map(|prompt: u64| prompt.saturating_add(cached.unwrap_or(0))),
        output_tokens: predicted,
        reasoning_tokens: None,
        cached_input_tokens: cached,
    };
    Ok((!usage.is_empty()).then_some(usage))
}

#[cfg(test)]
mod tests;
