//! Decides where a block ends: a resumable search that keeps counters, never bytes.

use memchr::memchr2;

use super::{SseError, SseLimits};

/// UTF-8 byte order mark, skipped once at the beginning of a body.
pub(super) const BOM: &[u8] = b"\xEF\xBB\xBF";

/// Position of the search within the stream. Every byte is given to [`Framer::scan`] exactly once.
pub(super) struct Framer {
    limits: SseLimits,
    /// Bytes of the open line so far.
    line: usize,
    /// Bytes of the open block so far, without a swallowed LF.
    size: usize,
    /// The open block began with the LF of a CRLF whose CR ended the block before.
    swallowed_lf: bool,
    /// The last byte was a CR that ended a line: an LF that follows belongs to it.
    after_cr: bool,
    mark: Mark,
}

/// Byte order mark at the beginning of the first line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// In the first line, whose first bytes are the first `usize` bytes of the mark.
    Matched(usize),
    /// In the first block, which began with the whole mark; its first line has ended.
    InBlock,
    Absent,
}

/// End of a block.
pub(super) struct Cut {
    /// Bytes of the scanned input that still belong to the block.
    pub(super) len: usize,
    /// Bytes at the beginning of the block that mean nothing: a byte order mark or a swallowed LF.
    pub(super) skip: usize,
    /// The block begins with a byte order mark.
    pub(super) bom: bool,
}

impl Framer {
    pub(super) fn new(limits: SseLimits) -> Self {
        Self { limits, line: 0, size: 0, swallowed_lf: false, after_cr: false, mark: Mark::Matched(0) }
    }

    /// Goes on with `input` and stops behind the first blank line. `None`: all of it belongs to the open
    /// block. After a cut the caller goes on with the bytes behind it.
    pub(super) fn scan(&mut self, input: &[u8]) -> Result<Option<Cut>, SseError> {
        let mut rest = input;
        if self.after_cr && !rest.is_empty() {
            self.after_cr = false;
            if let Some(tail) = rest.strip_prefix(b"\n") {
                rest = tail;
                if self.size == 0 {
                    self.swallowed_lf = true;
                } else {
                    self.end_line(1)?;
                }
            }
        }
        loop {
            let line_end = find_line_end(rest);
            let Some((line, tail)) = line_end.and_then(|end| rest.split_at_checked(end)) else {
                self.grow_line(rest)?;
                return Ok(None);
            };
            self.grow_line(line)?;
            let terminator = terminator_len(tail);
            self.after_cr = tail == b"\r";
            rest = tail.get(terminator..).unwrap_or_default();
            if self.is_blank() {
                let (skip, bom) = self.open_block();
                self.begin_block();
                let len = input.len().saturating_sub(rest.len());
                return Ok(Some(Cut { len, skip, bom }));
            }
            self.end_line(terminator)?;
        }
    }

    /// `skip` and `bom` of the open block, as in [`Cut`].
    pub(super) fn open_block(&self) -> (usize, bool) {
        let bom = self.has_mark();
        let mark_len = if bom { BOM.len() } else { 0 };
        (mark_len.saturating_add(usize::from(self.swallowed_lf)), bom)
    }

    fn begin_block(&mut self) {
        self.line = 0;
        self.size = 0;
        self.swallowed_lf = false;
        self.mark = Mark::Absent;
    }

    fn grow_line(&mut self, bytes: &[u8]) -> Result<(), SseError> {
        for &byte in bytes {
            let Mark::Matched(matched) = self.mark else {
                break;
            };
            let Some(&expected) = BOM.get(matched) else {
                break;
            };
            self.mark = if byte == expected { Mark::Matched(matched.saturating_add(1)) } else { Mark::Absent };
        }
        self.line = self.line.saturating_add(bytes.len());
        self.size = self.size.saturating_add(bytes.len());
        self.check()
    }

    /// Counts `terminator` bytes that end a line which was not blank, or the LF that completes its CRLF.
    fn end_line(&mut self, terminator: usize) -> Result<(), SseError> {
        self.mark = if self.has_mark() { Mark::InBlock } else { Mark::Absent };
        self.line = 0;
        self.size = self.size.saturating_add(terminator);
        self.check()
    }

    /// Answers the limit that was crossed first in the stream, however far the scan has got beyond it, so
    /// that the error does not depend on the chunks.
    fn check(&self) -> Result<(), SseError> {
        let SseLimits { max_line, max_event } = self.limits;
        let line_crossed = self.size.saturating_sub(self.line).saturating_add(max_line);
        if self.line > max_line && line_crossed <= max_event {
            Err(SseError::LineTooLong { limit: max_line })
        } else if self.size > max_event {
            Err(SseError::EventTooLarge { limit: max_event })
        } else {
            Ok(())
        }
    }

    fn is_blank(&self) -> bool {
        self.line == 0 || (self.line == BOM.len() && self.mark == Mark::Matched(BOM.len()))
    }

    fn has_mark(&self) -> bool {
        matches!(self.mark, Mark::InBlock) || self.mark == Mark::Matched(BOM.len())
    }
}

/// Offset of the first CR or LF. The only search over input, counted in tests (field report T10).
pub(super) fn find_line_end(bytes: &[u8]) -> Option<usize> {
    let end = memchr2(b'\n', b'\r', bytes);
    #[cfg(test)]
    super::tests::work::scanned(end.map_or(bytes.len(), |at| at + 1));
    end
}

/// Length of the line terminator that `bytes` begins with, 0 when there is none.
pub(super) fn terminator_len(bytes: &[u8]) -> usize {
    match bytes {
        [b'\r', b'\n', ..] => 2,
        [b'\r' | b'\n', ..] => 1,
        _ => 0,
    }
}
