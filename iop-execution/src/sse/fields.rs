//! Decides what the lines of one block mean.

use bytes::{Bytes, BytesMut};

use super::framer::{find_line_end, terminator_len};
use super::{BlockContent, SseError, SseEvent};

/// Reads the fields of one block, whose first `skip` bytes mean nothing. Ending blank line or not, `raw` is
/// read to its end.
pub(super) fn parse(raw: &Bytes, skip: usize) -> Result<BlockContent, SseError> {
    let mut data = Joined::default();
    let mut error = Joined::default();
    let mut event = None;
    let (mut comments, mut fields) = (false, false);
    for line in Lines::new(raw, skip) {
        if line.bytes.is_empty() {
            continue;
        }
        if line.bytes.starts_with(b":") {
            comments = true;
            continue;
        }
        fields = true;
        if let Some(value) = line.value_of(b"data") {
            data.push(raw, value);
        } else if let Some(value) = line.value_of(b"event") {
            event = Some(value.bytes);
        } else if let Some(value) = line.value_of(b"error") {
            error.push(raw, value);
        }
    }
    if !error.is_empty() {
        return Ok(BlockContent::ErrorField(error.into_text()?));
    }
    if !data.is_empty() {
        return Ok(BlockContent::Event(SseEvent {
            data_lines: data.lines,
            data_offset: data.offset.filter(|_| data.lines == 1),
            data: data.into_text()?,
            event: event.filter(|name| !name.is_empty()).map(|name| raw.slice_ref(name)),
        }));
    }
    Ok(match (fields, comments) {
        (true, _) => BlockContent::NoData,
        (false, true) => BlockContent::Comment,
        (false, false) => BlockContent::Blank,
    })
}

/// A part of a block's `raw`.
#[derive(Clone, Copy)]
struct Span<'a> {
    /// INVARIANT: a subslice of `raw`, which `Bytes::slice_ref` relies on.
    bytes: &'a [u8],
    /// Where `bytes` begins in `raw`.
    offset: usize,
}

impl<'a> Span<'a> {
    /// Value of a line of the field `name`: what follows the colon and one optional space. A line without a
    /// colon has the empty value.
    fn value_of(self, name: &[u8]) -> Option<Self> {
        let bytes: &'a [u8] = match self.bytes.strip_prefix(name)? {
            [] => &[],
            [b':', b' ', value @ ..] | [b':', value @ ..] => value,
            _ => return None,
        };
        let before = self.bytes.len().saturating_sub(bytes.len());
        Some(Self { bytes, offset: self.offset.saturating_add(before) })
    }
}

/// Values of one field joined by LF: a slice for one line, a copy from the second on.
#[derive(Default)]
struct Joined {
    lines: usize,
    first: Bytes,
    /// Where `first` begins in `raw`.
    offset: Option<usize>,
    copy: BytesMut,
}

impl Joined {
    fn push(&mut self, raw: &Bytes, value: Span<'_>) {
        if self.lines == 0 {
            self.first = raw.slice_ref(value.bytes);
            self.offset = Some(value.offset);
        } else {
            if self.lines == 1 {
                self.copy.extend_from_slice(&self.first);
            }
            self.copy.extend_from_slice(b"\n");
            self.copy.extend_from_slice(value.bytes);
        }
        self.lines = self.lines.saturating_add(1);
    }

    fn is_empty(&self) -> bool {
        self.first.is_empty() && self.copy.is_empty()
    }

    /// Checked as a whole and once: a character may not be split over lines, but over chunks.
    fn into_text(self) -> Result<Bytes, SseError> {
        let joined = if self.lines > 1 { self.copy.freeze() } else { self.first };
        match std::str::from_utf8(&joined) {
            Ok(_) => Ok(joined),
            Err(_) => Err(SseError::InvalidUtf8),
        }
    }
}

/// Lines of a block without their terminators, blank ones included.
struct Lines<'a> {
    rest: &'a [u8],
    offset: usize,
}

impl<'a> Lines<'a> {
    fn new(raw: &'a [u8], skip: usize) -> Self {
        Self { rest: raw.get(skip..).unwrap_or_default(), offset: skip }
    }
}

impl<'a> Iterator for Lines<'a> {
    type Item = Span<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let end = find_line_end(self.rest).unwrap_or(self.rest.len());
        let (bytes, tail) = self.rest.split_at_checked(end)?;
        let terminator = terminator_len(tail);
        let line = Span { bytes, offset: self.offset };
        self.offset = self.offset.saturating_add(end).saturating_add(terminator);
        self.rest = tail.get(terminator..).unwrap_or_default();
        Some(line)
    }
}
