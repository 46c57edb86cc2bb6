//! Decides what of a provider's answer SDKs can't read, and what stands there instead: (e) and (f) of API-10.
//!
//! An event is only looked into where a key in it says that something may be wrong; all others keep their bytes unread. A whole
//! answer is no event stream, so that API-10's list does not bind it: it is looked into once, and also gets the members that
//! OpenAI's clients take for granted (`Edit::Members`).

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use iop_execution::FinishReason;
use iop_execution::sse::{Block, BlockContent, split_blocks};
use memchr::memmem;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::edit::{Splice, quoted, splice};
use super::record::{Edit, Edits};

/// Most choices whose calls are remembered. Pieces of others keep their bytes.
const MAX_CHOICES: u64 = 128;
/// Most calls of one choice that are told apart. Pieces of later ones keep their bytes.
const MAX_CALLS: usize = 128;

/// Which API an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Chat,
    Completions,
    /// Anthropic's: only the model's name stands elsewhere.
    Messages,
    /// Nothing of it is looked into.
    Other,
}

/// Looks through one answer.
#[derive(Debug)]
pub(crate) struct Mender {
    form: Form,
    calls: Vec<(u64, Calls)>,
    /// Parts of the ids of calls that have none; unique in the answer.
    made: u32,
}

impl Mender {
    pub(crate) const fn new(form: Form) -> Self {
        Self { form, calls: Vec::new(), made: 0 }
    }

    /// Whole events as SDKs can read them.
    pub(crate) fn events(&mut self, bytes: Bytes, edits: &mut Edits) -> Bytes {
        if matches!(self.form, Form::Messages | Form::Other) || !self.is_suspicious(&bytes) {
            return bytes;
        }
        let (mut out, mut copied, mut at) = (Vec::new(), 0, 0);
        for block in split_blocks(&bytes) {
            let Ok(block) = block else { break };
            let span = at..at + block.raw.len();
            at = span.end;
            if let Some(mended) = self.event(&block, edits) {
                out.extend_from_slice(bytes.get(copied..span.start).unwrap_or_default());
                out.extend_from_slice(&mended);
                copied = span.end;
            }
        }
        if copied == 0 {
            return bytes;
        }
        out.extend_from_slice(bytes.get(copied..).unwrap_or_default());
        out.into()
    }

    /// A whole answer as SDKs can read it.
    pub(crate) fn document(&mut self, bytes: Bytes, edits: &mut Edits) -> Bytes {
        if matches!(self.form, Form::Messages | Form::Other) {
            return bytes;
        }
        let Ok(text) = std::str::from_utf8(&bytes) else { return bytes };
        let mut patch = Patch::new(text);
        self.answer(text, true, &mut patch);
        patch.apply(&bytes, edits)
    }

    /// Whether something in these events may need a mend: the one look that every event gets.
    fn is_suspicious(&self, events: &[u8]) -> bool {
        let odd_finish = values(events, b"\"finish_reason\"").any(|value| match value.first() {
            Some(b'n') | None => false,
            Some(b'"') => !self.is_fine(value),
            Some(_) => true,
        });
        if odd_finish || self.form != Form::Chat {
            return odd_finish;
        }
        let answers = values(events, b"\"choices\"").filter(|value| !is_empty_array(value)).count();
        values(events, b"\"delta\"").filter(|value| value.first() != Some(&b'n')).count() < answers
            || values(events, b"\"tool_calls\"").any(|value| value.first() == Some(&b'['))
            || values(events, b"\"reasoning_content\"").chain(values(events, b"\"reasoning\"")).any(is_text)
    }

    /// A finish reason that needs no second look.
    fn is_fine(&self, value: &[u8]) -> bool {
        let calls = !self.calls.is_empty();
        FinishReason::ALL.iter().any(|known| {
            let rest = value.get(1..).and_then(|text| text.strip_prefix(known.as_str().as_bytes()));
            rest.is_some_and(|rest| rest.first() == Some(&b'"')) && !(calls && *known == FinishReason::Stop)
        })
    }

    /// The bytes that stand for a block, if they differ.
    fn event(&mut self, block: &Block, edits: &mut Edits) -> Option<Vec<u8>> {
        let BlockContent::Event(event) = &block.content else { return None };
        let text = std::str::from_utf8(&event.data).ok()?;
        let mut patch = Patch::new(text);
        self.answer(text, false, &mut patch);
        if patch.splices.is_empty() {
            return None;
        }
        let data = patch.apply(&event.data, edits);
        let Some(place) = place_in(&block.raw, &event.data) else {
            // Its data lay on several lines: they can't be told apart from here, so that it becomes an event of one field.
            let mut out = Vec::with_capacity(data.len() + 16);
            for line in data.split(|byte| *byte == b'\n') {
                out.extend_from_slice(b"data: ");
                out.extend_from_slice(line);
                out.push(b'\n');
            }
            out.push(b'\n');
            return Some(out);
        };
        let (before, after) = (block.raw.get(..place.start)?, block.raw.get(place.end..)?);
        Some([before, &data, after].concat())
    }

    fn answer<'a>(&mut self, text: &'a str, whole: bool, patch: &mut Patch<'a>) {
        let Some(answer) = object::<Answer<'a>>(text) else { return };
        if let Some(usage) = answer.usage.filter(|_| whole).and_then(|usage| object::<UsageDetails<'a>>(usage.get())) {
            patch.remove_null(usage.prompt_tokens_details, "prompt_tokens_details");
            patch.remove_null(usage.completion_tokens_details, "completion_tokens_details");
        }
        let Some(choices) = answer.choices else { return };
        for raw in read::<Vec<&RawValue>>(choices.get()).unwrap_or_default() {
            let Some(choice) = object::<Choice<'a>>(raw.get()) else { continue };
            self.choice(raw, &choice, whole, patch);
        }
    }

    fn choice<'a>(&mut self, raw: &'a RawValue, choice: &Choice<'a>, whole: bool, patch: &mut Patch<'a>) {
        let index = choice.index.and_then(|index| read::<u64>(index.get())).unwrap_or(0);
        let mut called = self.calls.iter().any(|(known, _)| *known == index);
        if self.form == Form::Chat {
            let said = match (whole, choice.delta, choice.message) {
                (true, _, message) => message,
                (false, Some(delta), _) if delta.get() != "null" => Some(delta),
                (false, delta, message) => {
                    // Some servers send a last chunk in the form of a whole answer.
                    let with = message.map_or_else(|| "{}".to_owned(), |message| self.message(index, message, patch));
                    match delta {
                        Some(delta) => patch.replace(delta, with, Edit::Delta),
                        None => patch.open(raw, &format!("\"delta\":{with}"), Edit::Delta),
                    }
                    None
                }
            };
            if let Some((raw, said)) = said.and_then(|raw| Some((raw, object::<Said<'a>>(raw.get())?))) {
                self.said(index, raw, &said, whole, patch);
            }
            called |= self.calls.iter().any(|(known, _)| *known == index);
        }
        if let Some(finish) = choice.finish_reason {
            mend_finish(finish, called, patch);
        }
        if !whole {
            return;
        }
        if let Some(message) = choice.message.and_then(|message| object::<Message<'a>>(message.get())) {
            if let Some(nothing) = message.annotations.filter(|value| value.get() == "null") {
                patch.replace(nothing, "[]".to_owned(), Edit::Members);
            }
            patch.remove_null(message.function_call, "function_call");
        }
        match choice.logprobs {
            None => patch.open(raw, "\"logprobs\":null", Edit::Members),
            Some(raw) if self.form == Form::Chat => {
                if object::<Said<'a>>(raw.get()).is_some_and(|logprobs| logprobs.refusal.is_none()) {
                    patch.open(raw, "\"refusal\":null", Edit::Members);
                }
            }
            Some(_) => {}
        }
    }

    /// What of a whole message becomes a delta.
    fn message<'a>(&mut self, index: u64, message: &'a RawValue, patch: &mut Patch<'a>) -> String {
        let mut own = Patch::new(message.get());
        if let Some(said) = object::<Said<'a>>(message.get()) {
            self.said(index, message, &said, false, &mut own);
        }
        patch.made.append(&mut own.made);
        let mended = splice(&Bytes::copy_from_slice(message.get().as_bytes()), &own.splices);
        String::from_utf8_lossy(&mended).into_owned()
    }

    fn said<'a>(&mut self, index: u64, raw: &'a RawValue, said: &Said<'a>, whole: bool, patch: &mut Patch<'a>) {
        let text = |value: Option<&'a RawValue>| value.filter(|value| is_text(value.get().as_bytes()));
        let names = [(said.reasoning_content, "reasoning_content"), (said.reasoning, "reasoning")];
        for ((one, _), (other, name)) in [(names[0], names[1]), (names[1], names[0])] {
            let (Some(reasoning), None) = (text(one), text(other)) else { continue };
            match other {
                Some(nothing) => patch.replace(nothing, reasoning.get().to_owned(), Edit::Reasoning),
                None => patch.after(reasoning, format!(",\"{name}\":{}", reasoning.get()), Edit::Reasoning),
            }
        }
        for (there, member) in [(said.content, "\"content\":null"), (said.refusal, "\"refusal\":null")] {
            if whole && there.is_none() {
                patch.open(raw, member, Edit::Members);
            }
        }
        let Some(pieces) = said.tool_calls.and_then(|calls| read::<Vec<&RawValue>>(calls.get())) else { return };
        if pieces.is_empty() || index >= MAX_CHOICES {
            return;
        }
        let at = self.calls.iter().position(|(known, _)| *known == index).unwrap_or_else(|| {
            self.calls.push((index, Calls::default()));
            self.calls.len() - 1
        });
        let Some((_, calls)) = self.calls.get_mut(at) else { return };
        for raw in pieces {
            if let Some(piece) = object::<Piece<'a>>(raw.get()) {
                calls.piece(raw, &piece, whole, &mut self.made, patch);
            }
        }
    }
}

/// The event that begins a message, with another name of the model; none if it is no such event.
pub(crate) fn renamed_message(event: &Bytes, name: &str) -> Option<Bytes> {
    #[derive(Deserialize)]
    struct Start<'a> {
        #[serde(borrow)]
        message: Named<'a>,
    }
    #[derive(Deserialize)]
    struct Named<'a> {
        #[serde(borrow)]
        model: &'a RawValue,
    }
    memmem::find(event, b"message_start")?;
    for block in split_blocks(event) {
        let Ok(Block { raw, content: BlockContent::Event(said), .. }) = block else { continue };
        let Some(start) = std::str::from_utf8(&said.data).ok().and_then(object::<Start<'_>>) else { continue };
        let span = place_in(event, start.message.model.get().as_bytes());
        debug_assert!(span.is_some() || place_in(&raw, &said.data).is_none());
        return span.map(|span| splice(event, &[Splice { span, with: name.to_owned().into() }]));
    }
    None
}

/// Outside of OpenAI's set it is a stop, or the calls that were made; an empty one is none.
fn mend_finish<'a>(finish: &'a RawValue, called: bool, patch: &mut Patch<'a>) {
    let end = if called { FinishReason::ToolCalls } else { FinishReason::Stop };
    let with = match read::<Option<Cow<'a, str>>>(finish.get()) {
        Some(None) => return,
        Some(Some(reason)) => match FinishReason::ALL.iter().find(|known| known.as_str() == reason) {
            Some(FinishReason::Stop) if called => Some(end),
            Some(_) => return,
            None if reason.is_empty() => None,
            None => Some(end),
        },
        // No text at all.
        None => None,
    };
    let with = with.map_or_else(|| "null".to_owned(), |end| quoted(end.as_str()));
    patch.replace(finish, with, Edit::Finish);
}

/// The calls of one choice so far.
#[derive(Debug, Default)]
struct Calls(Vec<Call>);

#[derive(Debug)]
struct Call {
    /// What the provider says.
    index: Option<u64>,
    id: String,
    made_up: bool,
}

impl Calls {
    fn piece<'a>(&mut self, raw: &'a RawValue, piece: &Piece<'a>, whole: bool, made: &mut u32, patch: &mut Patch<'a>) {
        let function = piece.function.and_then(|function| object::<Function<'a>>(function.get())).unwrap_or_default();
        let text = |value: Option<&'a RawValue>| {
            let text = value.and_then(|value| read::<Cow<'a, str>>(value.get()));
            text.filter(|text| !text.is_empty())
        };
        let (id, named) = (text(piece.id), text(function.name).is_some());
        let own = piece.index.and_then(|index| read::<u64>(index.get()));
        let said = own.or_else(|| function.index.and_then(|index| read(index.get())));
        let known = if whole { None } else { self.known(said, id.as_deref(), named) };
        let at = known.unwrap_or(self.0.len());
        if known.is_none() {
            if self.0.len() == MAX_CALLS {
                return;
            }
            let made_up = id.is_none();
            let new = id.clone().map_or_else(|| made_id(made), Cow::into_owned);
            if made_up {
                put(raw, piece.id, "id", quoted(&new), Edit::ToolCall, patch);
            }
            if whole && piece.kind.is_none() {
                patch.open(raw, "\"type\":\"function\"", Edit::Members);
            }
            self.0.push(Call { index: said, id: new, made_up });
        } else if let Some((call, given)) = self.0.get(at).zip(id.as_deref())
            && call.id != given
        {
            // It changes on the way: the first one is the call's.
            put(raw, piece.id, "id", quoted(&call.id), Edit::ToolCall, patch);
        }
        if !whole && own != u64::try_from(at).ok() {
            put(raw, piece.index, "index", at.to_string(), Edit::ToolCall, patch);
        }
        if let Some(arguments) = function.arguments.filter(|value| value.get().starts_with(['{', '['])) {
            patch.replace(arguments, quoted(arguments.get()), Edit::ToolArguments);
        }
    }

    /// The call this piece goes on with; `None` when it begins a new one.
    fn known(&self, index: Option<u64>, id: Option<&str>, named: bool) -> Option<usize> {
        let by_id = id.and_then(|id| self.0.iter().position(|call| !call.made_up && call.id == id));
        by_id.or_else(|| match (index, id, named) {
            // A name begins a call, and another id with a name another call, whatever its index says.
            (None, _, true) | (Some(_), Some(_), true) => None,
            (Some(_), _, _) => self.0.iter().rposition(|call| call.index == index),
            (None, _, false) => self.0.len().checked_sub(1),
        })
    }
}

fn made_id(made: &mut u32) -> String {
    *made = made.saturating_add(1);
    format!("call_iop_{made}")
}

/// A member gets this value, whether it is there or not.
fn put<'a>(
    object: &'a RawValue,
    there: Option<&'a RawValue>,
    name: &str,
    value: String,
    edit: Edit,
    patch: &mut Patch<'a>,
) {
    match there {
        Some(there) => patch.replace(there, value, edit),
        None => patch.open(object, &format!("\"{name}\":{value}"), edit),
    }
}

/// The edits of one JSON text. The raw values that it is given are slices of that text.
struct Patch<'a> {
    text: &'a str,
    splices: Vec<Splice>,
    made: Vec<Edit>,
}

impl<'a> Patch<'a> {
    const fn new(text: &'a str) -> Self {
        Self { text, splices: Vec::new(), made: Vec::new() }
    }

    fn replace(&mut self, value: &'a RawValue, with: String, edit: Edit) {
        if let Some(span) = place_in(self.text.as_bytes(), value.get().as_bytes()) {
            self.push(span, with, edit);
        }
    }

    fn after(&mut self, value: &'a RawValue, with: String, edit: Edit) {
        if let Some(span) = place_in(self.text.as_bytes(), value.get().as_bytes()) {
            self.push(span.end..span.end, with, edit);
        }
    }

    /// One more member, before those that are there.
    fn open(&mut self, object: &'a RawValue, member: &str, edit: Edit) {
        let Some(inner) = object.get().strip_prefix('{') else { return };
        let Some(span) = place_in(self.text.as_bytes(), object.get().as_bytes()) else { return };
        let at = span.start + 1;
        // Members that were put in before it are followed by a comma too, if it has members of its own.
        let more = !inner.trim_ascii_start().starts_with('}') || self.splices.iter().any(|s| s.span == (at..at));
        self.push(at..at, if more { format!("{member},") } else { member.to_owned() }, edit);
    }

    /// Takes out a member that is null where an object would have to stand, unless it is the first of its object.
    fn remove_null(&mut self, value: Option<&'a RawValue>, name: &str) {
        let Some(value) = value.filter(|value| value.get() == "null") else { return };
        let Some(span) = place_in(self.text.as_bytes(), value.get().as_bytes()) else { return };
        let before = self.text.get(..span.start).unwrap_or_default().trim_ascii_end();
        let before = before.strip_suffix(':').map(str::trim_ascii_end);
        let before = before.and_then(|text| text.strip_suffix('"')?.strip_suffix(name)?.strip_suffix('"'));
        if let Some(before) = before.and_then(|text| text.trim_ascii_end().strip_suffix(',')) {
            self.push(before.len()..span.end, String::new(), Edit::Members);
        }
    }

    fn push(&mut self, span: Range<usize>, with: String, edit: Edit) {
        // A later member at the same place stands before an earlier one, so that only the last one has no comma.
        let at = self.splices.partition_point(|splice| splice.span.start < span.start);
        self.splices.insert(at, Splice { span, with: with.into() });
        self.made.push(edit);
    }

    fn apply(self, bytes: &Bytes, edits: &mut Edits) -> Bytes {
        for edit in self.made {
            edits.add(edit, 1);
        }
        splice(bytes, &self.splices)
    }
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default, deserialize_with = "raw")]
    choices: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct UsageDetails<'a> {
    #[serde(borrow, default, deserialize_with = "raw")]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    completion_tokens_details: Option<&'a RawValue>,
}

/// What of a message is only looked at in a whole answer.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default, deserialize_with = "raw")]
    annotations: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    function_call: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default, deserialize_with = "raw")]
    index: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    delta: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    message: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    logprobs: Option<&'a RawValue>,
}

/// A delta or a message.
#[derive(Deserialize)]
struct Said<'a> {
    #[serde(borrow, default, deserialize_with = "raw")]
    content: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    refusal: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    tool_calls: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Piece<'a> {
    #[serde(borrow, default, deserialize_with = "raw")]
    index: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw", rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    function: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Function<'a> {
    #[serde(borrow, default, deserialize_with = "raw")]
    name: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    arguments: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    index: Option<&'a RawValue>,
}

/// A member that is there, be it null.
fn raw<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// `None` for another shape: then there is nothing to mend.
fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Option<T> {
    serde_json::from_str(text).ok()
}

/// An array is no object, though serde would take one.
fn object<'a, T: Deserialize<'a>>(text: &'a str) -> Option<T> {
    if text.trim_ascii_start().starts_with('{') { read(text) } else { None }
}

/// What follows each `key:`. A key inside of a text is none, for its quotes are escaped there.
fn values<'a>(bytes: &'a [u8], key: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    memmem::find_iter(bytes, key).filter_map(move |at| {
        let rest = bytes.get(at + key.len()..)?.trim_ascii_start();
        Some(rest.strip_prefix(b":")?.trim_ascii_start())
    })
}

fn is_text(value: &[u8]) -> bool {
    value.first() == Some(&b'"') && value.get(1) != Some(&b'"')
}

fn is_empty_array(value: &[u8]) -> bool {
    value.strip_prefix(b"[").is_some_and(|rest| rest.trim_ascii_start().first() == Some(&b']'))
}

/// Where `part` lies in `whole`, if it is a slice of it.
fn place_in(whole: &[u8], part: &[u8]) -> Option<Range<usize>> {
    let start = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    let end = start.checked_add(part.len())?;
    (end <= whole.len()).then_some(start..end)
}

#[cfg(test)]
mod tests;
