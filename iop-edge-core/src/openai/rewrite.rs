//! Decides which bytes of a provider's events change on their way to the client: (a), (b) and (d) of API-10's closed list; (e)
//! and (f) are [`Mender`]'s.
//!
//! Frames hold whole events of one kind, told by their flags, so nothing is classified again here. Bytes that need no edit
//! are passed on as they are, without a copy. An edit replaces a span; the rest of its event keeps its bytes.

pub(crate) mod top_level;

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use iop_execution::FrameFlags;
use iop_execution::sse::{BlockContent, split_blocks};
use memchr::memchr2;

use self::top_level::{Key, Met, Scan};
use super::edit::{Splice, splice};
use super::mend::{Form, Mender, renamed_message};
use super::record::{Edit, Edits};

/// After this many useless memos none is made any more: the provider writes `model` behind the text.
const MAX_MISSES: u8 = 4;
/// Room for a longer name, in bytes.
const ROOM: usize = 64;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Edits events of one stream.
pub(crate) struct Rewrite {
    /// The public name as a JSON string, if `model` must say it.
    model: Option<String>,
    /// The client asked for usage.
    keep_usage: bool,
    at_start: bool,
    /// The beginning of the last event up to and with its model, and what it became, if it changed: events of one stream
    /// begin alike.
    memo: Option<(Bytes, Option<Vec<u8>>)>,
    /// How often the memo was of no use.
    misses: u8,
    form: Form,
    mender: Mender,
    edits: Edits,
}

impl Rewrite {
    pub(crate) const fn new(model: Option<String>, keep_usage: bool, form: Form) -> Self {
        let mender = Mender::new(form);
        Self { model, keep_usage, at_start: true, memo: None, misses: 0, form, mender, edits: Edits::new() }
    }

    /// Edits made so far.
    pub(crate) const fn edits(&self) -> Edits {
        self.edits
    }

    /// Counts an edit that is made elsewhere.
    pub(crate) fn count(&mut self, edit: Edit) {
        self.edits.add(edit, 1);
    }

    /// Whole events of one kind as the client may see them; `None` if it may see nothing of them.
    pub(crate) fn events(&mut self, bytes: Bytes, flags: FrameFlags) -> Option<Bytes> {
        let bytes = self.without_bom(bytes);
        if flags.contains(FrameFlags::USAGE) {
            return self.usage(bytes);
        }
        if flags.intersects(FrameFlags::CONTENT.with(FrameFlags::LIFECYCLE)) {
            let bytes = self.rename(bytes);
            return Some(self.mender.events(bytes, &mut self.edits));
        }
        if flags.contains(FrameFlags::TERMINAL) {
            return Some(bytes);
        }
        self.comments(bytes)
    }

    /// A whole answer as the client may see it.
    pub(crate) fn document(&mut self, bytes: Bytes) -> Bytes {
        self.mender.document(bytes, &mut self.edits)
    }

    fn without_bom(&mut self, bytes: Bytes) -> Bytes {
        if std::mem::replace(&mut self.at_start, false) && bytes.starts_with(BOM) {
            self.count(Edit::Bom);
            return bytes.slice(BOM.len()..);
        }
        bytes
    }

    /// (b): comments pass, blocks without data don't.
    fn comments(&mut self, bytes: Bytes) -> Option<Bytes> {
        // Nothing but comments without text: what most providers send to say that they are there.
        if bytes.iter().all(|byte| matches!(byte, b':' | b'\n' | b'\r')) {
            return Some(bytes).filter(|bytes| !bytes.is_empty());
        }
        let mut kept = Vec::new();
        let mut dropped = 0;
        // A mark that is not at the start of the stream is none: it begins a field with an odd name. Behind a blank line it is
        // not taken for one.
        let marked = bytes.starts_with(BOM);
        let read = if marked { Bytes::from([b"\n", &bytes[..]].concat()) } else { bytes.clone() };
        for block in split_blocks(&read).skip(usize::from(marked)) {
            match block {
                Ok(block) if block.content == BlockContent::NoData => dropped += 1,
                Ok(block) => kept.push(block.raw),
                Err(_) => dropped += 1,
            }
        }
        if dropped == 0 {
            return Some(bytes);
        }
        self.edits.add(Edit::NoData, dropped);
        Some(Bytes::from(kept.concat())).filter(|bytes| !bytes.is_empty())
    }

    /// (a)
    fn rename(&mut self, bytes: Bytes) -> Bytes {
        let Some(name) = self.model.take() else { return bytes };
        let renamed = match self.form {
            Form::Chat | Form::Completions | Form::Other => self.rename_to(bytes, &name),
            Form::Messages => match renamed_message(&bytes, &name) {
                Some(renamed) => {
                    self.count(Edit::Model);
                    renamed
                }
                None => bytes,
            },
        };
        self.model = Some(name);
        renamed
    }

    fn rename_to(&mut self, bytes: Bytes, name: &str) -> Bytes {
        let mut out: Vec<u8> = Vec::new();
        let mut copied = 0;
        let mut renamed = 0;
        let mut event = Event::new();
        for line in Lines::new(&bytes) {
            let text = bytes.get(line.start..line.end).unwrap_or_default();
            if text.is_empty() {
                event = Event::new();
                continue;
            }
            let Some(data) = data_of(text) else { continue };
            if event.found {
                continue;
            }
            let first = !std::mem::replace(&mut event.begun, true);
            if first && let Some((before, after)) = self.memo.as_ref().filter(|(before, _)| text.starts_with(before)) {
                event.found = true;
                if let Some(after) = after {
                    out.reserve(bytes.len() - copied + ROOM);
                    out.extend_from_slice(bytes.get(copied..line.start).unwrap_or_default());
                    out.extend_from_slice(after);
                    copied = line.start + before.len();
                    renamed += 1;
                }
                continue;
            }
            let (mut start, mut end) = (None, None);
            event.scan.feed(data, line.end - data.len(), |met| match met {
                Met::Value(Key::Model, at, b'"') => start = start.or(Some(at)),
                Met::End(Key::Model, at) => end = end.or(Some(at)),
                Met::Open(_) | Met::Value(..) | Met::End(..) => {}
            });
            // A string never goes over the end of a line.
            let (Some(start), Some(end)) = (start, end.filter(|_| start.is_some())) else { continue };
            event.found = true;
            let same = bytes.get(start..end) == Some(name.as_bytes());
            if first && self.misses < MAX_MISSES {
                self.misses += 1;
                // A copy: a slice would keep the whole frame alive for as long as the stream lasts.
                let before = Bytes::copy_from_slice(bytes.get(line.start..end).unwrap_or_default());
                let after = (!same).then(|| {
                    let mut after = bytes.get(line.start..start).unwrap_or_default().to_vec();
                    after.extend_from_slice(name.as_bytes());
                    after
                });
                self.memo = Some((before, after));
            }
            if same {
                continue;
            }
            out.reserve(bytes.len() - copied + ROOM);
            out.extend_from_slice(bytes.get(copied..start).unwrap_or_default());
            out.extend_from_slice(name.as_bytes());
            copied = end;
            renamed += 1;
        }
        if renamed == 0 {
            return bytes;
        }
        self.edits.add(Edit::Model, renamed);
        out.extend_from_slice(bytes.get(copied..).unwrap_or_default());
        out.into()
    }

    /// (d)
    fn usage(&mut self, bytes: Bytes) -> Option<Bytes> {
        if !self.keep_usage {
            self.count(Edit::UsageDropped);
            return None;
        }
        let bytes = self.rename(bytes);
        let splices = choices_missing(&bytes);
        self.edits.add(Edit::UsageChoices, u32::try_from(splices.len()).unwrap_or(u32::MAX));
        Some(splice(&bytes, &splices))
    }
}

impl fmt::Debug for Rewrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rewrite").field("edits", &self.edits).finish_non_exhaustive()
    }
}

/// What gives each event of a usage report its `choices: []`.
fn choices_missing(bytes: &[u8]) -> Vec<Splice> {
    const EMPTY: &str = "[]";
    let mut splices = Vec::new();
    let mut event = Event::new();
    let (mut open, mut choices): (Option<usize>, Option<Splice>) = (None, None);
    let mut present = false;
    let mut members = false;
    let lines = Lines::new(bytes);
    // A last event without its blank line can't be: frames hold whole events.
    for line in lines {
        let text = bytes.get(line.start..line.end).unwrap_or_default();
        if text.is_empty() {
            if let Some(splice) = choices.take() {
                splices.push(splice);
            } else if let Some(at) = open.filter(|_| !present && event.scan.is_done()) {
                let with = if members { r#""choices":[],"# } else { r#""choices":[]"# };
                splices.push(Splice { span: at..at, with: Cow::Borrowed(with) });
            }
            event = Event::new();
            (open, present, members) = (None, false, false);
            continue;
        }
        let Some(data) = data_of(text) else { continue };
        event.scan.feed(data, line.end - data.len(), |met| match met {
            Met::Open(at) => open = Some(at),
            Met::Value(Key::Choices, at, first) => {
                present = true;
                // `null`, also the only value that may be replaced.
                if first == b'n' {
                    choices = Some(Splice { span: at..at, with: Cow::Borrowed(EMPTY) });
                }
            }
            Met::End(Key::Choices, at) => {
                if let Some(splice) = &mut choices {
                    splice.span.end = at;
                }
            }
            Met::Value(..) => members = true,
            Met::End(..) => {}
        });
    }
    splices
}

/// What is known of the event that is being read.
struct Event {
    scan: Scan,
    begun: bool,
    found: bool,
}

impl Event {
    const fn new() -> Self {
        Self { scan: Scan::new(), begun: false, found: false }
    }
}

/// The value of a `data` line.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    let value = line.strip_prefix(b"data:")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

/// One line, without its end.
struct Line {
    start: usize,
    end: usize,
}

/// Lines ended by LF, CRLF or CR.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Lines<'a> {
    const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }
}

impl Iterator for Lines<'_> {
    type Item = Line;

    fn next(&mut self) -> Option<Line> {
        let start = self.at;
        let rest = self.bytes.get(start..).filter(|rest| !rest.is_empty())?;
        let length = memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
        let ending = match rest.get(length..) {
            Some([b'\r', b'\n', ..]) => 2,
            Some([_, ..]) => 1,
            _ => 0,
        };
        self.at = start + length + ending;
        Some(Line { start, end: start + length })
    }
}

/// The bytes of the first event of a frame, its blank line included.
pub(crate) fn first_event(bytes: &Bytes) -> Bytes {
    let mut begun = false;
    let mut lines = Lines::new(bytes);
    while let Some(line) = lines.next() {
        if line.start == line.end && begun {
            return bytes.slice(..lines.at);
        }
        begun |= line.start != line.end;
    }
    bytes.clone()
}

#[cfg(test)]
mod tests;
