//! Decides into which frames an event-stream body is cut, and with which flags (API-10).
//!
//! Bytes go in as they were read, frames come out: the same bytes in the same order, cut at event boundaries. Parsed once,
//! here; everybody else goes by the flags. Small events that arrived together and carry nothing but content share a frame,
//! because what costs on the way is frames, not bytes.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use iop_execution::sse::{SseDecoder, SseLimits};
use iop_execution::{FrameFlags, ProviderError, Usage};

use crate::tracker::{Tracker, not_an_event_stream};

/// Largest frame. A larger event goes out in pieces flagged [`FrameFlags::MORE`].
pub const FRAME_BYTES: usize = 16 * 1024;
/// With counts on every chunk, they are passed on after this many more output tokens.
const USAGE_STEP: u64 = 8;

/// What the observer saw next.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "what a tunnel's body sink takes")]
pub enum Seen {
    /// Bytes to pass on.
    Frame {
        /// The bytes.
        bytes: Bytes,
        /// What they are.
        flags: FrameFlags,
    },
    /// Counts that the answer reported.
    Usage(Usage),
}

/// Reads one event-stream body.
///
/// After each [`feed`](Self::feed) call [`next`](Self::next) until it answers `None`; stop reading once
/// [`is_done`](Self::is_done); at the end of the body ask [`finish`](Self::finish).
pub struct Observer {
    decoder: SseDecoder,
    tracker: Tracker,
    /// The bytes fed last, of which blocks are slices.
    fed: Bytes,
    /// Events in `fed` that wait to share a frame.
    run: Option<Range<usize>>,
    ready: VecDeque<Result<Seen, ProviderError>>,
    passed_on: Option<Usage>,
    failed: bool,
}

impl Observer {
    /// For an answer with this many choices, at least one.
    #[must_use]
    pub fn new(choices: u32) -> Self {
        Self {
            decoder: SseDecoder::new(SseLimits::default()),
            tracker: Tracker::new(choices),
            fed: Bytes::new(),
            run: None,
            ready: VecDeque::new(),
            passed_on: None,
            failed: false,
        }
    }

    /// The answer is one of chats or completions: events of the Responses API or of Anthropic's messages are an error.
    #[must_use]
    pub fn only_chat(mut self) -> Self {
        self.tracker = self.tracker.only_chat();
        self
    }

    /// Gives the next bytes of the body, as they were read.
    pub fn feed(&mut self, bytes: Bytes) {
        self.fed = bytes.clone();
        self.decoder.feed(bytes);
    }

    /// What comes next, or `None` when more bytes are needed or `[DONE]` was passed on.
    ///
    /// # Errors
    /// The answer is an error, or no event stream. It is the last item.
    #[allow(clippy::should_implement_trait, reason = "`None` is no end: more may come after the next feed")]
    pub fn next(&mut self) -> Option<Result<Seen, ProviderError>> {
        loop {
            if let Some(seen) = self.ready.pop_front() {
                return Some(seen);
            }
            if self.failed || self.tracker.is_done() {
                return None;
            }
            match self.decoder.next_block() {
                Some(Ok(block)) => match self.tracker.look(&block) {
                    Ok(looked) => {
                        let (flags, reported) = (looked.flags, looked.usage.is_some());
                        self.pass(&block.raw, flags);
                        self.pass_usage(reported, flags);
                    }
                    Err(error) => self.fail(error),
                },
                Some(Err(error)) => self.fail(not_an_event_stream().with_source(error)),
                None => {
                    self.close_run();
                    if self.ready.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    fn fail(&mut self, error: ProviderError) {
        self.close_run();
        self.failed = true;
        self.ready.push_back(Err(error));
    }

    fn pass(&mut self, raw: &Bytes, flags: FrameFlags) {
        if flags == FrameFlags::CONTENT
            && let Some(range) = place_in(&self.fed, raw)
        {
            match &mut self.run {
                Some(run) if run.end == range.start && range.end - run.start <= FRAME_BYTES => run.end = range.end,
                _ => {
                    self.close_run();
                    self.run = Some(range);
                }
            }
        } else {
            self.close_run();
            self.frames(raw.clone(), flags);
        }
    }

    fn close_run(&mut self) {
        if let Some(run) = self.run.take() {
            let bytes = self.fed.slice(run);
            self.frames(bytes, FrameFlags::CONTENT);
        }
    }

    fn frames(&mut self, mut bytes: Bytes, flags: FrameFlags) {
        while bytes.len() > FRAME_BYTES {
            let piece = bytes.split_to(FRAME_BYTES);
            self.ready.push_back(Ok(Seen::Frame { bytes: piece, flags: FrameFlags::MORE }));
        }
        self.ready.push_back(Ok(Seen::Frame { bytes, flags }));
    }

    /// Counts come after the frame that reported them. Between tokens only now and then: they cost a frame each.
    fn pass_usage(&mut self, reported: bool, flags: FrameFlags) {
        let usage = self.tracker.usage();
        let output = |usage: &Usage| usage.output_tokens.unwrap_or(0);
        let due = self.passed_on.is_none_or(|before| output(&usage) >= output(&before).saturating_add(USAGE_STEP));
        if reported && (due || !flags.contains(FrameFlags::CONTENT)) && self.passed_on != Some(usage) {
            self.close_run();
            self.passed_on = Some(usage);
            self.ready.push_back(Ok(Seen::Usage(usage)));
        }
    }

    /// Counts that were reported and not passed on yet: the last word at the end of the answer.
    #[must_use]
    pub fn last_usage(&self) -> Option<Usage> {
        let usage = self.tracker.usage();
        (!usage.is_empty() && self.passed_on != Some(usage)).then_some(usage)
    }

    /// True once `[DONE]` was seen: nothing after it means anything.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.tracker.is_done()
    }

    /// True once every choice has its finish reason: only counts and `[DONE]` can still come.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.tracker.is_complete()
    }

    /// Says whether the body may end here. Bytes that no blank line ended are dropped: no client would read them.
    ///
    /// # Errors
    /// The answer is not complete, or its rest is an error.
    pub fn finish(&mut self) -> Result<(), ProviderError> {
        let end = self.decoder.finish();
        self.tracker.end(&end)
    }
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

/// Where `part` lies in `whole`, if it is a slice of it.
fn place_in(whole: &Bytes, part: &Bytes) -> Option<Range<usize>> {
    let start = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    let end = start.checked_add(part.len())?;
    (end <= whole.len()).then_some(start..end)
}

#[cfg(test)]
mod tests;
