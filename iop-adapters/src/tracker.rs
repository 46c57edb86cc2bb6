//! Decides how far an event-stream answer has got: what its last event was, and whether it is complete.
//!
//! Complete means: `[DONE]` came, or every choice has a finish reason. Anything else that ends is no end.

use bytes::Bytes;
use iop_execution::sse::{Block, BlockContent, SseEnd, SseEvent};
use iop_execution::{FrameFlags, ProviderError, Usage};

use crate::chunk::{self, Choice, Chunk, OtherEvent};
use crate::complaint;

/// Finish reasons that report a failure, not an end.
const FAILED_FINISHES: [&str; 3] = ["abort", "error", "insufficient_system_resource"];

/// What has been seen of one answer so far.
pub(crate) struct Tracker {
    expected: u32,
    /// Choices seen and choices finished, one bit each; indexes beyond the last bit share it.
    seen: u128,
    finished: u128,
    usage: Usage,
    processed: Option<u64>,
    done: bool,
    /// Events of other APIs are no answer.
    only_chat: bool,
}

/// What one block was.
pub(crate) struct Looked<'a> {
    pub(crate) flags: FrameFlags,
    /// Counts it reported.
    pub(crate) usage: Option<Usage>,
    pub(crate) chunk: Option<Chunk<'a>>,
}

impl Looked<'_> {
    const fn bare(flags: FrameFlags) -> Self {
        Self { flags, usage: None, chunk: None }
    }
}

impl Tracker {
    /// For an answer with this many choices, at least one.
    pub(crate) fn new(choices: u32) -> Self {
        Self {
            expected: choices.clamp(1, 128),
            seen: 0,
            finished: 0,
            usage: Usage::default(),
            processed: None,
            done: false,
            only_chat: false,
        }
    }

    /// The answer is one of chats or completions: what another API would send is none.
    pub(crate) const fn only_chat(mut self) -> Self {
        self.only_chat = true;
        self
    }

    /// `[DONE]` came: what follows means nothing.
    pub(crate) const fn is_done(&self) -> bool {
        self.done
    }

    /// The answer is complete.
    pub(crate) const fn is_complete(&self) -> bool {
        self.done || (self.finished.count_ones() >= self.expected && self.seen & !self.finished == 0)
    }

    /// The counts reported so far.
    pub(crate) const fn usage(&self) -> Usage {
        self.usage
    }

    /// Looks at the next block.
    pub(crate) fn look<'a>(&mut self, block: &'a Block) -> Result<Looked<'a>, ProviderError> {
        match &block.content {
            BlockContent::Blank | BlockContent::Comment => Ok(Looked::bare(FrameFlags::NONE)),
            BlockContent::NoData => match raw_error(&block.raw) {
                Some(error) => Err(error),
                None => Ok(Looked::bare(FrameFlags::NONE)),
            },
            BlockContent::ErrorField(value) => Err(complaint::reported(value)),
            // An end without anything before it is no answer: clients fail on it, or take it for an empty one.
            BlockContent::Event(event) if event.is_done() && self.seen == 0 && self.usage.is_empty() => {
                Err(ProviderError::ended_without_terminal())
            }
            BlockContent::Event(event) if event.is_done() => {
                self.done = true;
                Ok(Looked::bare(FrameFlags::TERMINAL))
            }
            BlockContent::Event(event) => self.look_at_event(event),
        }
    }

    fn look_at_event<'a>(&mut self, event: &'a SseEvent) -> Result<Looked<'a>, ProviderError> {
        let chunk = match chunk::read(&event.data) {
            Ok(chunk) => chunk,
            // mistral.rs reports errors as plain text.
            Err(_) if !event.data.trim_ascii_start().starts_with(b"{") => return Err(complaint::reported(&event.data)),
            Err(_) => return Err(ProviderError::protocol("the provider sent an event that is not valid JSON")),
        };
        let named_error = event.event.as_deref() == Some(b"error");
        if chunk.error || named_error || !event.data.trim_ascii_start().starts_with(b"{") {
            return Err(complaint::reported(&event.data));
        }
        self.take(chunk)
    }

    /// Takes over what a chunk says.
    pub(crate) fn take<'a>(&mut self, chunk: Chunk<'a>) -> Result<Looked<'a>, ProviderError> {
        if chunk.choices.iter().any(is_failed) {
            return Err(ProviderError::reported("the provider gave up in the middle of its answer"));
        }
        if self.only_chat && matches!(chunk.other, Some(OtherEvent::Content | OtherEvent::Finished | OtherEvent::Last))
        {
            return Err(ProviderError::protocol("the provider answered with events of another API"));
        }
        let mut content = chunk.other == Some(OtherEvent::Content);
        for choice in &chunk.choices {
            let bit = 1_u128 << choice.index.min(127);
            self.seen |= bit;
            content |= choice.has_content();
            if choice.finish.is_some() {
                self.finished |= bit;
            }
        }
        self.done |= chunk.other == Some(OtherEvent::Last);
        if matches!(chunk.other, Some(OtherEvent::Finished | OtherEvent::Last)) {
            self.seen |= 1;
            self.finished |= 1;
            self.expected = 1;
        }
        let report_only = chunk.usage.is_some() && chunk.choices.is_empty() && chunk.other.is_none();
        let mut flags = match (content, report_only) {
            (true, _) => FrameFlags::CONTENT,
            (false, true) => FrameFlags::USAGE,
            (false, false) => FrameFlags::LIFECYCLE,
        };
        if self.done {
            flags = FrameFlags::TERMINAL;
        } else if !content && self.advances(&chunk) {
            flags = flags.with(FrameFlags::PROGRESS);
        }
        if let Some(usage) = chunk.usage {
            self.usage.update(usage);
        }
        self.processed = self.processed.max(chunk.processed);
        Ok(Looked { flags, usage: chunk.usage, chunk: Some(chunk) })
    }

    fn advances(&self, chunk: &Chunk<'_>) -> bool {
        chunk.usage.is_some_and(|usage| self.usage.grew(&usage)) || chunk.processed > self.processed
    }

    /// Says whether the body may end here, given what the decoder had left.
    pub(crate) fn end(&self, end: &SseEnd) -> Result<(), ProviderError> {
        match end {
            _ if self.is_complete() => Ok(()),
            SseEnd::Clean { .. } => Err(ProviderError::ended_without_terminal()),
            SseEnd::Failed(error) => Err(not_an_event_stream().with_source(*error)),
            SseEnd::Truncated { raw, content } => Err(match content {
                Ok(BlockContent::ErrorField(value)) => complaint::reported(value),
                Ok(BlockContent::Event(event)) if chunk::read(&event.data).is_ok_and(|chunk| chunk.error) => {
                    complaint::reported(&event.data)
                }
                _ => raw_error(raw).unwrap_or_else(ProviderError::ended_without_terminal),
            }),
        }
    }
}

/// The error for bytes that are no event stream within the limits.
pub(crate) fn not_an_event_stream() -> ProviderError {
    ProviderError::protocol("the provider's event stream could not be read")
}

/// It ended by a failure.
pub(crate) fn is_failed(choice: &Choice<'_>) -> bool {
    choice.finish.is_some_and(|finish| FAILED_FINISHES.iter().any(|failed| finish.is(failed)))
}

/// A JSON error object without `data:` before it, as some servers append to a stream.
fn raw_error(raw: &Bytes) -> Option<ProviderError> {
    let text = raw.trim_ascii();
    let is_error = text.starts_with(b"{") && chunk::read(text).is_ok_and(|chunk| chunk.error);
    is_error.then(|| complaint::reported(text))
}
