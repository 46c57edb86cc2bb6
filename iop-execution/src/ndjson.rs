//! Decides where a line of newline-delimited JSON begins and ends.
//!
//! Incremental and without IO, beside [`crate::sse`] (EXE-17); the Ollama adapter reads its streams with it.
//! A line is what LF ends; one CR before the LF is no part of it. Lines of white space only are skipped.
//! The last object of a body may lack its LF: [`NdjsonDecoder::finish`] delivers it. Whether a line is JSON,
//! or UTF-8 at all, is the JSON parser's to say.

use std::collections::VecDeque;
use std::fmt;

use bytes::{Bytes, BytesMut};
use memchr::memchr;

/// Upper bound on what one stream may make the decoder hold, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "plain settings; callers and tests build them by literal")]
pub struct NdjsonLimits {
    /// Longest line in bytes, everything before its LF counted.
    pub max_line: usize,
}

impl Default for NdjsonLimits {
    /// A line of 4 MiB.
    fn default() -> Self {
        Self { max_line: MAX_LINE }
    }
}

/// Incremental decoder for one body of newline-delimited JSON.
///
/// After each [`feed`](Self::feed), call [`next_line`](Self::next_line) until it answers `None`; at the end of
/// the body call [`finish`](Self::finish). Used that way it holds one unfinished line at most.
pub struct NdjsonDecoder {
    limits: NdjsonLimits,
    /// Bytes already searched: the unfinished line.
    carry: BytesMut,
    /// Chunks not searched yet, none of them empty.
    input: VecDeque<Bytes>,
    closed: bool,
}

impl NdjsonDecoder {
    /// A decoder at the beginning of a body.
    #[must_use]
    pub fn new(limits: NdjsonLimits) -> Self {
        Self { limits, carry: BytesMut::new(), input: VecDeque::new(), closed: false }
    }

    /// Gives the next bytes of the body. O(1); the search happens in [`next_line`](Self::next_line).
    ///
    /// Bytes that arrive after an error or after [`finish`](Self::finish) are discarded.
    pub fn feed(&mut self, chunk: Bytes) {
        if !self.closed && !chunk.is_empty() {
            self.input.push_back(chunk);
        }
    }

    /// The next line that is not blank, without its terminator: a slice of the chunk when it lay in one.
    /// `None` when more bytes are needed.
    ///
    /// # Errors
    ///
    /// A line over its limit. The bytes still held are dropped with the error, every later call answers
    /// `None`.
    pub fn next_line(&mut self) -> Option<Result<Bytes, NdjsonError>> {
        loop {
            let chunk = self.input.front_mut()?;
            let end = memchr(b'\n', chunk);
            #[cfg(test)]
            tests::scanned(end.map_or(chunk.len(), |at| at + 1));
            let grown = self.carry.len().saturating_add(end.unwrap_or(chunk.len()));
            if grown > self.limits.max_line {
                self.close();
                return Some(Err(NdjsonError::LineTooLong { limit: self.limits.max_line }));
            }
            let Some(end) = end else {
                self.carry.extend_from_slice(chunk);
                self.input.pop_front();
                continue;
            };
            let head = chunk.split_to(end.saturating_add(1).min(chunk.len()));
            if chunk.is_empty() {
                self.input.pop_front();
            }
            let line = if self.carry.is_empty() {
                head
            } else {
                self.carry.extend_from_slice(&head);
                std::mem::take(&mut self.carry).freeze()
            };
            if let Some(line) = content(&line) {
                return Some(Ok(line));
            }
        }
    }

    /// Ends the body and delivers the last line if no LF ended it and it is not blank.
    ///
    /// Call it when [`next_line`](Self::next_line) has answered `None`: lines not taken by then are part of
    /// the answer. `None` after an error.
    pub fn finish(&mut self) -> Option<Bytes> {
        for chunk in std::mem::take(&mut self.input) {
            self.carry.extend_from_slice(&chunk);
        }
        let line = std::mem::take(&mut self.carry).freeze();
        self.close();
        content(&line)
    }

    /// Bytes fed that have not come out in a line yet.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.input.iter().fold(self.carry.len(), |sum, chunk| sum.saturating_add(chunk.len()))
    }

    fn close(&mut self) {
        self.closed = true;
        self.carry = BytesMut::new();
        self.input = VecDeque::new();
    }
}

impl fmt::Debug for NdjsonDecoder {
    /// Counts only: a payload never reaches a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NdjsonDecoder")
            .field("limits", &self.limits)
            .field("pending_bytes", &self.pending_bytes())
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

/// Why a body is no acceptable newline-delimited JSON. Always the sender's fault; never holds any of its
/// bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NdjsonError {
    /// A line is longer than [`NdjsonLimits::max_line`].
    #[error("json line exceeds {limit} bytes")]
    LineTooLong {
        /// The limit in force, in bytes.
        limit: usize,
    },
}

/// `line` without its terminator, `None` when it is blank.
fn content(line: &Bytes) -> Option<Bytes> {
    if line.trim_ascii().is_empty() {
        return None;
    }
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    let text = text.strip_suffix(b"\r").unwrap_or(text);
    Some(line.slice_ref(text))
}

const MAX_LINE: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    thread_local! {
        static SCANNED: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn scanned(bytes: usize) {
        SCANNED.set(SCANNED.get() + bytes);
    }

    type Decoded = (Vec<Result<Bytes, NdjsonError>>, Option<Bytes>);

    fn decode(limits: NdjsonLimits, chunks: &[&[u8]]) -> Decoded {
        let mut decoder = NdjsonDecoder::new(limits);
        let mut lines = Vec::new();
        for chunk in chunks {
            decoder.feed(Bytes::copy_from_slice(chunk));
            lines.extend(std::iter::from_fn(|| decoder.next_line()));
        }
        let last = decoder.finish();
        assert_eq!(decoder.pending_bytes(), 0);
        (lines, last)
    }

    fn lines(chunks: &[&[u8]]) -> Vec<Bytes> {
        let (lines, last) = decode(NdjsonLimits::default(), chunks);
        lines.into_iter().map(Result::unwrap).chain(last).collect()
    }

    // EXE-17: LF and CRLF end a line, blank lines are skipped, inner white space is kept.
    #[test]
    fn lines_are_cut_at_lf_and_stripped_of_cr() {
        let body = b"{\"a\":1}\n\r\n  \n\n {\"b\":2}\r\n{\"c\":\r3}\n";
        assert_eq!(lines(&[body]), ["{\"a\":1}", " {\"b\":2}", "{\"c\":\r3}"]);
    }

    // EXE-17: Ollama may send its last object without a newline.
    #[test]
    fn the_last_line_is_delivered_without_its_newline() {
        let body: &[u8] = b"{\"done\":false}\n{\"done\":true}";
        let (ended, last) = decode(NdjsonLimits::default(), &[body]);
        assert_eq!(ended, [Ok(Bytes::from("{\"done\":false}"))]);
        assert_eq!(last, Some(Bytes::from("{\"done\":true}")));
        assert_eq!(decode(NdjsonLimits::default(), &[b"{}\n \r"]).1, None);
    }

    #[test]
    fn a_line_within_one_chunk_is_not_copied() {
        let chunk = Bytes::from("{\"a\":1}\n{\"b\":2}\n");
        let mut decoder = NdjsonDecoder::new(NdjsonLimits::default());
        decoder.feed(chunk.clone());
        let range = chunk.as_ptr_range();
        for _ in 0..2 {
            let line = decoder.next_line().unwrap().unwrap();
            assert!(range.contains(&line.as_ptr()));
        }
        assert_eq!(decoder.next_line(), None);
    }

    // EXE-17: every single and every pair of split points gives the same lines.
    #[test]
    fn split_points_do_not_matter() {
        let body = "{\"t\":\"né\"}\r\n\n{\"e\":\"日本\"}\n{\"done\":true}".as_bytes();
        let whole = decode(NdjsonLimits::default(), &[body]);
        assert_eq!(whole.0.len(), 2);
        for first in 0..=body.len() {
            for second in first..=body.len() {
                let chunks = [&body[..first], &body[first..second], &body[second..]];
                assert_eq!(decode(NdjsonLimits::default(), &chunks), whole, "{first} {second}");
            }
        }
    }

    // EXE-17: the limit is inclusive, typed, and the decoder is fused behind it.
    #[test]
    fn a_line_over_the_limit_is_a_typed_error() {
        let limits = NdjsonLimits { max_line: 4 };
        let error = NdjsonError::LineTooLong { limit: 4 };
        assert_eq!(decode(limits, &[b"1234\n1\n"]).0.len(), 2);
        assert_eq!(decode(limits, &[b"1\n12345\n2\n"]), (vec![Ok(Bytes::from("1")), Err(error)], None));
        assert_eq!(decode(limits, &[b"123", b"4", b"5"]), (vec![Err(error)], None));
        assert_eq!(NdjsonLimits::default().max_line, 4 * 1024 * 1024);
    }

    // EXE-17: nothing comes out of bytes that arrive after an error or after the end.
    #[test]
    fn bytes_after_an_error_or_the_end_are_discarded() {
        let mut failed = NdjsonDecoder::new(NdjsonLimits { max_line: 2 });
        failed.feed(Bytes::from("123\n1\n"));
        assert!(failed.next_line().is_some_and(|line| line.is_err()));
        let mut ended = NdjsonDecoder::new(NdjsonLimits::default());
        assert_eq!(ended.finish(), None);
        for mut decoder in [failed, ended] {
            decoder.feed(Bytes::from("1\n"));
            assert_eq!((decoder.next_line(), decoder.pending_bytes()), (None, 0));
            assert_eq!(decoder.finish(), None);
        }
    }

    // Field report T10: a large line in small chunks costs one look at each byte.
    #[test]
    fn work_is_linear_in_the_input() {
        let mut body = vec![b'x'; 950_000];
        body.push(b'\n');
        SCANNED.set(0);
        let chunks: Vec<&[u8]> = body.chunks(1024).collect();
        assert_eq!(lines(&chunks).len(), 1);
        assert_eq!(SCANNED.get(), body.len());
    }

    #[test]
    fn debug_prints_no_payload() {
        let mut decoder = NdjsonDecoder::new(NdjsonLimits::default());
        decoder.feed(Bytes::from("SENTINEL"));
        assert!(!format!("{decoder:?}").contains("SENTINEL"));
    }

    proptest! {
        // EXE-17: any bytes in any chunks equal a split of the whole buffer.
        #[test]
        fn agrees_with_a_split_of_the_whole_buffer(
            body in prop::collection::vec(prop::sample::select(b"\n\r {}\xE9".to_vec()), 0..64),
            size in 1_usize..9,
        ) {
            let expected: Vec<Vec<u8>> = body
                .split(|&byte| byte == b'\n')
                .filter(|line| !line.trim_ascii().is_empty())
                .map(|line| line.strip_suffix(b"\r").unwrap_or(line).to_vec())
                .collect();
            let chunks: Vec<&[u8]> = body.chunks(size).collect();
            prop_assert_eq!(lines(&chunks), expected);
        }
    }
}
