//! Decides where a server-sent event begins, where it ends and what it holds.
//!
//! The one incremental SSE parser (EXE-17, API-11): bytes in, blocks out, no IO, no clock. The Node's
//! observer, the adapters and the tests all use it.
//!
//! * **Input**: the body in chunks of any size ([`SseDecoder::feed`]), cut anywhere: inside a UTF-8
//!   character, between CR and LF, inside the BOM.
//! * **Output**: one [`Block`] per blank line. A block carries the provider's exact bytes beside what they
//!   mean, so that a tunnel passes bytes on unchanged while it observes them.
//! * **Invariants**: the `raw` of all blocks, followed by the bytes of [`SseEnd`], is the input. The contents
//!   do not depend on how the input was cut into chunks. Each input byte is searched for a line end at most
//!   twice (once to find the end of its block, once to read its fields) and copied at most once, and only
//!   when its block lies in more than one chunk.
//! * **Not decided here**: what the data means (JSON, errors, usage, progress), which blocks a client may
//!   see, whether a stream that ended without `[DONE]` is complete.
//!
//! LF, CRLF and a lone CR end a line. A block whose blank line ends in CR at the end of a chunk is given out
//! at once; if the next chunk begins with the LF of that CRLF, the LF becomes the first byte of the next
//! block's `raw` and means nothing.

mod fields;
mod framer;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod naive;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;

use bytes::{Bytes, BytesMut};

use self::framer::{BOM, Framer};

/// Upper bounds on what one stream may make the decoder hold. Both bounds are inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "plain settings; callers and tests build them by literal")]
pub struct SseLimits {
    /// Longest line in bytes, without its terminator.
    pub max_line: usize,
    /// Largest block in bytes, up to and without the terminator of its blank line.
    pub max_event: usize,
}

impl Default for SseLimits {
    /// A line of 1 MiB, an event of 4 MiB.
    fn default() -> Self {
        Self { max_line: MAX_LINE, max_event: MAX_EVENT }
    }
}

/// Incremental SSE decoder for one body.
///
/// After each [`feed`](Self::feed), call [`next_block`](Self::next_block) until it answers `None`; at the end
/// of the body call [`finish`](Self::finish). Used that way it holds one unfinished block at most, bounded by
/// [`SseLimits`].
pub struct SseDecoder {
    framer: Framer,
    /// Bytes already searched that belong to the unfinished block.
    carry: BytesMut,
    /// Chunks not searched yet, none of them empty.
    input: VecDeque<Bytes>,
    state: State,
}

#[derive(Clone, Copy)]
enum State {
    Open,
    Failed(SseError),
    Finished,
}

impl SseDecoder {
    /// A decoder at the beginning of a body.
    #[must_use]
    pub fn new(limits: SseLimits) -> Self {
        Self { framer: Framer::new(limits), carry: BytesMut::new(), input: VecDeque::new(), state: State::Open }
    }

    /// Gives the next bytes of the body. O(1); the search happens in [`next_block`](Self::next_block).
    ///
    /// Bytes that arrive after an error or after [`finish`](Self::finish) are discarded.
    pub fn feed(&mut self, chunk: Bytes) {
        if matches!(self.state, State::Open) && !chunk.is_empty() {
            self.input.push_back(chunk);
        }
    }

    /// The next complete block: everything up to and including the blank line that ends it. `None` when more
    /// bytes are needed.
    ///
    /// # Errors
    ///
    /// A line or block over its limit, or data that is no UTF-8. The bytes still held are dropped with the
    /// error, every later call answers `None`.
    pub fn next_block(&mut self) -> Option<Result<Block, SseError>> {
        loop {
            let chunk = self.input.front_mut()?;
            match self.framer.scan(chunk) {
                Err(error) => return Some(Err(self.fail(error))),
                Ok(None) => {
                    extend(&mut self.carry, chunk);
                    self.input.pop_front();
                }
                Ok(Some(cut)) => {
                    let head = chunk.split_to(cut.len.min(chunk.len()));
                    if chunk.is_empty() {
                        self.input.pop_front();
                    }
                    let raw = self.join(head);
                    return Some(match fields::parse(&raw, cut.skip) {
                        Ok(content) => Ok(Block { raw, content, bom: cut.bom }),
                        Err(error) => Err(self.fail(error)),
                    });
                }
            }
        }
    }

    /// Ends the body and says what it left over.
    ///
    /// Call it when [`next_block`](Self::next_block) has answered `None`: blocks not taken by then are
    /// reported as leftover bytes. A second call has nothing left to report, except the same error.
    pub fn finish(&mut self) -> SseEnd {
        match self.state {
            State::Open => self.state = State::Finished,
            State::Failed(error) => return SseEnd::Failed(error),
            State::Finished => return SseEnd::Clean { tail: Bytes::new() },
        }
        for chunk in std::mem::take(&mut self.input) {
            extend(&mut self.carry, &chunk);
        }
        let raw = std::mem::take(&mut self.carry).freeze();
        let (skip, bom) = self.framer.open_block();
        // A BOM alone is a blank line that did not end; a swallowed LF alone is no line at all.
        if raw.len() <= skip && !bom {
            return SseEnd::Clean { tail: raw };
        }
        let content = fields::parse(&raw, skip);
        SseEnd::Truncated { raw, content }
    }

    /// Bytes fed that have not come out in a block yet.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.input.iter().fold(self.carry.len(), |sum, chunk| sum.saturating_add(chunk.len()))
    }

    /// The block's bytes: a slice of the chunk where it lies in one.
    fn join(&mut self, head: Bytes) -> Bytes {
        if self.carry.is_empty() {
            return head;
        }
        extend(&mut self.carry, &head);
        // Taken, not split: a small block must not keep the buffer of its neighbours alive.
        std::mem::take(&mut self.carry).freeze()
    }

    fn fail(&mut self, error: SseError) -> SseError {
        self.state = State::Failed(error);
        self.carry = BytesMut::new();
        self.input = VecDeque::new();
        error
    }
}

impl fmt::Debug for SseDecoder {
    /// Counts only: a payload never reaches a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SseDecoder")
            .field("pending_bytes", &self.pending_bytes())
            .field("failed", &matches!(self.state, State::Failed(_)))
            .finish_non_exhaustive()
    }
}

/// What one blank line ended.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Block {
    /// Exactly the provider's bytes, terminators included. A slice of the chunk when the block lay in one.
    /// It may begin with one LF that belongs to the CRLF of the block before (module docs).
    pub raw: Bytes,
    /// What the block holds.
    pub content: BlockContent,
    /// `raw` begins with a UTF-8 byte order mark. Only the first block of a body can have one.
    pub bom: bool,
}

impl Block {
    /// `raw` without the byte order mark, which must not reach a client (API-10 b).
    #[must_use]
    pub fn without_bom(&self) -> Bytes {
        self.raw
            .strip_prefix(BOM)
            .filter(|_| self.bom)
            .map_or_else(|| self.raw.clone(), |rest| self.raw.slice_ref(rest))
    }
}

impl fmt::Debug for Block {
    /// Lengths only: a payload never reaches a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("raw_len", &self.raw.len())
            .field("content", &self.content)
            .field("bom", &self.bom)
            .finish()
    }
}

/// What a block holds, as far as SSE itself goes.
#[derive(Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "closed: a new kind of block must break every match over it")]
pub enum BlockContent {
    /// A blank line that ended nothing: every blank line but the first of a run, or one at the start.
    Blank,
    /// Comment lines and nothing else.
    Comment,
    /// A non-empty `error` field (old llama.cpp: `error: {…}`), values of several such lines joined by LF.
    /// SDKs ignore it, so it takes precedence over data in the same block. Valid UTF-8.
    ErrorField(Bytes),
    /// Non-empty data.
    Event(SseEvent),
    /// Fields, but no data or empty data: SDKs must never see it (API-10 b).
    NoData,
}

impl fmt::Debug for BlockContent {
    /// Lengths only: a payload never reaches a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blank => f.write_str("Blank"),
            Self::Comment => f.write_str("Comment"),
            Self::ErrorField(value) => write!(f, "ErrorField({} bytes)", value.len()),
            Self::Event(event) => fmt::Debug::fmt(event, f),
            Self::NoData => f.write_str("NoData"),
        }
    }
}

/// One event that a client would be given.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SseEvent {
    /// Values of all `data` lines joined by LF: valid UTF-8, never empty. A slice of the block's `raw` when
    /// there is one line only.
    pub data: Bytes,
    /// Value of the last `event` line, `None` when absent or empty. Not checked for UTF-8.
    pub event: Option<Bytes>,
    /// Number of `data` lines, at least 1.
    pub data_lines: usize,
    /// Where `data` begins in the block's `raw`, in bytes, so that an edit can replace a span of it. `None`
    /// when several lines were joined: then `data` is contiguous nowhere in `raw`.
    pub data_offset: Option<usize>,
}

impl SseEvent {
    /// Whether the data is `[DONE]`, white space around it ignored.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.data.trim_ascii() == b"[DONE]"
    }
}

impl fmt::Debug for SseEvent {
    /// Lengths only: a payload never reaches a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SseEvent")
            .field("data_len", &self.data.len())
            .field("event_len", &self.event.as_ref().map(Bytes::len))
            .field("data_lines", &self.data_lines)
            .field("data_offset", &self.data_offset)
            .finish()
    }
}

/// How a body ended, as far as SSE itself goes.
#[derive(Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "closed: a new kind of end must break every match over it")]
pub enum SseEnd {
    /// A blank line ended the last block, or the body was empty.
    Clean {
        /// Empty, or the LF of the CRLF whose CR ended the last block. Pass it on or drop it.
        tail: Bytes,
    },
    /// The decoder had answered this error before.
    Failed(SseError),
    /// Bytes were left over that no blank line ended.
    Truncated {
        /// The leftover bytes.
        raw: Bytes,
        /// What they would have meant had a blank line followed. Not an event: clients do not dispatch it.
        /// The data may be cut short, also in the middle of a character, which makes it an error.
        content: Result<BlockContent, SseError>,
    },
}

impl fmt::Debug for SseEnd {
    /// Lengths only: a payload never reaches a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clean { tail } => f.debug_struct("Clean").field("tail_len", &tail.len()).finish(),
            Self::Failed(error) => f.debug_tuple("Failed").field(error).finish(),
            Self::Truncated { raw, content } => {
                f.debug_struct("Truncated").field("raw_len", &raw.len()).field("content", content).finish()
            }
        }
    }
}

/// Why a body is no acceptable event stream. Always the sender's fault; never holds any of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SseError {
    /// A block is larger than [`SseLimits::max_event`].
    #[error("event stream block exceeds {limit} bytes")]
    EventTooLarge {
        /// The limit in force, in bytes.
        limit: usize,
    },
    /// The joined data, or the `error` field, is no UTF-8.
    #[error("event stream data is not valid utf-8")]
    InvalidUtf8,
    /// A line is longer than [`SseLimits::max_line`].
    #[error("event stream line exceeds {limit} bytes")]
    LineTooLong {
        /// The limit in force, in bytes.
        limit: usize,
    },
    /// Bytes said to be whole blocks did not end with a blank line. Only [`split_blocks`] answers it.
    #[error("event stream frame does not end with a blank line")]
    Unterminated,
}

/// The blocks of bytes that are known to hold whole blocks, under the default limits.
///
/// The bytes are read like the beginning of a body: one byte order mark is accepted, and a leading LF is a
/// [`BlockContent::Blank`]. The first error is the last item.
pub fn split_blocks(bytes: &Bytes) -> impl Iterator<Item = Result<Block, SseError>> + use<> {
    let mut decoder = SseDecoder::new(SseLimits::default());
    decoder.feed(bytes.clone());
    std::iter::from_fn(move || {
        decoder.next_block().or_else(|| match decoder.finish() {
            SseEnd::Truncated { .. } => Some(Err(SseError::Unterminated)),
            SseEnd::Clean { .. } | SseEnd::Failed(_) => None,
        })
    })
    .fuse()
}

/// The only place where input is copied.
fn extend(carry: &mut BytesMut, bytes: &[u8]) {
    #[cfg(test)]
    tests::work::copied(bytes.len());
    carry.extend_from_slice(bytes);
}

const MAX_LINE: usize = 1 << 20;
const MAX_EVENT: usize = 4 << 20;
