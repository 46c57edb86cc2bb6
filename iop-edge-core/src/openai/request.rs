//! Decides whether a body is a request for a provider, and which of its bytes the Edge may touch (API-3).
//!
//! Only what routing needs is read: `model`, `stream`, `stream_options`, and that there is something to work on. All else is
//! the provider's business and stays byte by byte.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use iop_execution::ModelName;

use super::edit::{Splice, quoted, splice};
use super::errors::ApiError;
use super::json::{JsonError, Visitor, decode, same_key, scan};
use super::kind::Kind;

/// Leading bytes of the messages that make a prefix: most system prompts begin to differ within it.
const PREFIX_BYTES: usize = 1024;

/// FNV-1a; never 0, which means that there is none.
fn prefix_hash(subject: &str) -> u64 {
    let leading = subject.bytes().take(PREFIX_BYTES);
    leading.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)).max(1)
}

/// The one estimate of a prompt's tokens (LEA-2): a quarter of the UTF-8 bytes of its messages' text, that is of every
/// string that is the value of `content` or `text` inside `messages`. Never reported as usage.
#[must_use]
pub const fn estimate_prompt_tokens(text_bytes: usize) -> u32 {
    let tokens = text_bytes / 4;
    if tokens > u32::MAX as usize { u32::MAX } else { tokens as u32 }
}

/// A request whose routing fields were read.
pub(crate) struct ChatRequest {
    body: Bytes,
    model: String,
    model_span: Range<usize>,
    stream: bool,
    wants_usage: bool,
    usage: Option<Splice>,
    prompt_tokens: u32,
    prompt_prefix: u64,
    stores: bool,
}

impl ChatRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// What the client is told: 400, with the member that is wrong.
    pub(crate) fn parse(body: Bytes, kind: Kind) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(&body)
            .map_err(|error| bad_json(JsonError { at: error.valid_up_to(), problem: "invalid UTF-8" }, &body))?;
        if !text.trim_ascii_start().is_empty() && !text.trim_ascii_start().starts_with('{') {
            scan(text, &mut Members::of(kind)).map_err(|error| bad_json(error, &body))?;
            return Err(ApiError::bad_request(None, "The request body must be a JSON object."));
        }
        let mut members = Members::of(kind);
        scan(text, &mut members).map_err(|error| bad_json(error, &body))?;
        if let Some(param) = members.duplicate {
            return Err(ApiError::bad_request(Some(param), format!("'{param}' is given twice.")));
        }
        let value = |span: &Range<usize>| text.get(span.clone()).unwrap_or_default();

        let Some(model_span) = members.model.take() else {
            return Err(ApiError::bad_request(Some("model"), "'model' is missing."));
        };
        let model = unquoted(value(&model_span))
            .and_then(decode)
            .ok_or_else(|| ApiError::bad_request(Some("model"), "'model' must be a string."))?;
        if model.is_empty() {
            return Err(ApiError::bad_request(Some("model"), "'model' must not be empty."));
        }

        let subject = members.subject.as_ref().map(value);
        check_subject(kind, subject)?;

        let stream = match members.stream.as_ref().map(value) {
            Some("true") => true,
            None | Some("false" | "null") => false,
            Some(_) => return Err(ApiError::bad_request(Some("stream"), "'stream' must be a boolean.")),
        };
        if stream && !kind.streams() {
            return Err(ApiError::bad_request(Some("stream"), "This endpoint does not stream."));
        }
        let options = members.stream_options.take().map(|span| (value(&span), span.start));
        let object_end = text.trim_ascii_end().len().saturating_sub(1);
        let (wants_usage, usage) =
            if kind.asks_for_usage() { plan_usage(stream, options, object_end)? } else { (true, None) };

        let prompt_tokens = estimate_prompt_tokens(match kind {
            Kind::Chat | Kind::Messages => members.text_bytes,
            // Text, or numbers of tokens: both are about that long.
            Kind::Completions | Kind::Embeddings | Kind::Responses => subject.map_or(0, str::len),
        });
        let stores = members.store.as_ref().map(value) == Some("true");
        let prompt_prefix = subject.map_or(0, prefix_hash);
        Ok(Self { model, model_span, stream, wants_usage, usage, prompt_tokens, prompt_prefix, stores, body })
    }

    /// The name asked for, as decoded.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// The name asked for, if it can be one.
    pub(crate) fn model_name(&self) -> Option<ModelName> {
        ModelName::new(&self.model).ok()
    }

    /// The client wants a stream.
    pub(crate) const fn stream(&self) -> bool {
        self.stream
    }

    /// The client of a stream asked for usage.
    pub(crate) const fn wants_usage(&self) -> bool {
        self.wants_usage
    }

    /// It asks for an effect beside its answer: a provider may store it (REC-4).
    pub(crate) const fn stores(&self) -> bool {
        self.stores
    }

    /// Hash of the leading bytes of what the model works on: requests with the same one share what a provider has cached (SEL-1).
    pub(crate) const fn prompt_prefix(&self) -> u64 {
        self.prompt_prefix
    }

    /// See [`estimate_prompt_tokens`].
    pub(crate) const fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// The client's bytes.
    pub(crate) const fn body(&self) -> &Bytes {
        &self.body
    }

    /// The body for a provider: its own name of the model, and usage asked for (API-4).
    pub(crate) fn for_target(&self, target: &str) -> Bytes {
        let mut splices = Vec::with_capacity(2);
        if target != self.model {
            splices.push(Splice { span: self.model_span.clone(), with: Cow::Owned(quoted(target)) });
        }
        splices.extend(self.usage.clone());
        splices.sort_by_key(|splice| splice.span.start);
        splice(&self.body, &splices)
    }
}

impl fmt::Debug for ChatRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatRequest")
            .field("bytes", &self.body.len())
            .field("stream", &self.stream)
            .field("wants_usage", &self.wants_usage)
            .finish_non_exhaustive()
    }
}

fn bad_json(error: JsonError, body: &[u8]) -> ApiError {
    let (line, column) = error.place(body);
    let message = format!("The request body is not valid JSON: {} at line {line} column {column}.", error.problem);
    ApiError::bad_request(None, message)
}

fn unquoted(value: &str) -> Option<&str> {
    value.strip_prefix('"')?.strip_suffix('"')
}

/// Whether there is something to work on. What is inside of it is the provider's business.
fn check_subject(kind: Kind, subject: Option<&str>) -> Result<(), ApiError> {
    let empty = |text: &str, open: char, close: char| {
        let inner = text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close));
        inner.is_none_or(|inner| inner.trim_ascii().is_empty())
    };
    let param = kind.subject();
    let refuse = |problem: &str| Err(ApiError::bad_request(Some(param), format!("'{param}' {problem}.")));
    match (kind, subject) {
        // It has a default.
        (Kind::Completions, _) => Ok(()),
        (Kind::Chat | Kind::Embeddings | Kind::Responses | Kind::Messages, None) => refuse("is missing"),
        (Kind::Chat | Kind::Messages, Some(text)) if empty(text, '[', ']') => refuse("must be a non-empty array"),
        (Kind::Embeddings | Kind::Responses, Some(text)) if empty(text, '[', ']') && empty(text, '"', '"') => {
            refuse("must be a non-empty string or array")
        }
        (Kind::Chat | Kind::Embeddings | Kind::Responses | Kind::Messages, Some(_)) => Ok(()),
    }
}

const ASK: &str = r#"{"include_usage":true}"#;
const MEMBER: &str = r#""include_usage":true"#;

/// Whether the client wants usage, and what must change so that the provider reports it.
fn plan_usage(
    stream: bool,
    options: Option<(&str, usize)>,
    object_end: usize,
) -> Result<(bool, Option<Splice>), ApiError> {
    const PARAM: Option<&str> = Some("stream_options");
    let insert = |at: usize, with: Cow<'static, str>| Some(Splice { span: at..at, with });
    match options {
        None if stream => Ok((false, insert(object_end, format!(r#","stream_options":{ASK}"#).into()))),
        None => Ok((false, None)),
        Some(("null", start)) if stream => Ok((false, Some(Splice { span: start..start + 4, with: ASK.into() }))),
        Some(("null", _)) => Ok((false, None)),
        Some((text, _)) if !text.starts_with('{') => {
            Err(ApiError::bad_request(PARAM, "'stream_options' must be an object."))
        }
        Some(_) if !stream => {
            Err(ApiError::bad_request(PARAM, "'stream_options' is only allowed when 'stream' is true."))
        }
        Some((text, start)) => {
            let mut found = Options::default();
            // It was scanned before as a part of the body.
            scan(text, &mut found).map_err(|_| ApiError::bad_request(PARAM, "'stream_options' is invalid."))?;
            if found.twice {
                return Err(ApiError::bad_request(PARAM, "'include_usage' is given twice."));
            }
            let Some(span) = found.include_usage else {
                let with = if found.members == 0 { MEMBER.to_owned() } else { format!("{MEMBER},") };
                return Ok((false, insert(start + 1, with.into())));
            };
            match text.get(span.clone()).unwrap_or_default() {
                "true" => Ok((true, None)),
                "false" | "null" => {
                    let span = start + span.start..start + span.end;
                    Ok((false, Some(Splice { span, with: "true".into() })))
                }
                _ => Err(ApiError::bad_request(PARAM, "'include_usage' must be a boolean.")),
            }
        }
    }
}

/// Where the members that the Edge reads lie.
struct Members {
    /// Name of the member that the model works on.
    subject_name: &'static str,
    model: Option<Range<usize>>,
    subject: Option<Range<usize>>,
    stream: Option<Range<usize>>,
    stream_options: Option<Range<usize>>,
    store: Option<Range<usize>>,
    model_seen: bool,
    duplicate: Option<&'static str>,
    text_bytes: usize,
}

impl Members {
    const fn of(kind: Kind) -> Self {
        Self {
            subject_name: kind.subject(),
            model: None,
            subject: None,
            stream: None,
            stream_options: None,
            store: None,
            model_seen: false,
            duplicate: None,
            text_bytes: 0,
        }
    }
}

impl Visitor for Members {
    fn member(&mut self, key: &str) -> bool {
        // Some servers match keys without regard to case: a second spelling would smuggle another model past the checks.
        if same_key(key, "model", true) && std::mem::replace(&mut self.model_seen, true) {
            self.duplicate = Some("model");
        }
        same_key(key, self.subject_name, false)
    }

    fn string(&mut self, key: &str, len: usize) {
        if same_key(key, "content", false) || same_key(key, "text", false) {
            self.text_bytes = self.text_bytes.saturating_add(len);
        }
    }

    fn value(&mut self, key: &str, span: Range<usize>) {
        let members = [
            ("model", &mut self.model),
            (self.subject_name, &mut self.subject),
            ("stream", &mut self.stream),
            ("stream_options", &mut self.stream_options),
            ("store", &mut self.store),
        ];
        for (name, place) in members {
            if same_key(key, name, false) && place.replace(span.clone()).is_some() {
                self.duplicate = Some(name);
            }
        }
    }
}

#[derive(Default)]
struct Options {
    include_usage: Option<Range<usize>>,
    members: usize,
    twice: bool,
}

impl Visitor for Options {
    fn member(&mut self, _: &str) -> bool {
        self.members += 1;
        false
    }

    fn string(&mut self, _: &str, _: usize) {}

    fn value(&mut self, key: &str, span: Range<usize>) {
        if same_key(key, "include_usage", false) {
            self.twice |= self.include_usage.replace(span).is_some();
        }
    }
}

#[cfg(test)]
mod tests;
