//! Decides what must hold for any bytes that a provider sends as a stream. Fuzz targets: plain functions (SEC-5).
//!
//! Each panics exactly when something is wrong. They are run by `fuzz/`, and on their corpora by the tests.
#![allow(
    clippy::panic,
    clippy::single_range_in_vec_init,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a panic is how a target reports; a list of one piece is a list of pieces"
)]

use std::ops::Range;

use bytes::Bytes;

use crate::ndjson::{NdjsonDecoder, NdjsonLimits};
use crate::sse::naive::{self, Meaning};
use crate::sse::{BlockContent, SseDecoder, SseEnd, SseError, SseLimits};

/// Bytes read as choices. When there are none left, every choice is the first one.
#[derive(Debug, Clone)]
pub struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    /// All of these.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// None left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        self.slice(1).first().copied().unwrap_or(0)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()).checked_rem(end).unwrap_or(0)
    }

    /// Yes or no.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// A number of 64 bits: small ones, and those at an end, are as likely as all others.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=223 => u64::from(small),
            224..=231 => u64::MAX - u64::from(self.byte()),
            232..=239 => 1 << (self.byte() & 63),
            _ => self.slice(8).iter().fold(0, |number, byte| number << 8 | u64::from(*byte)),
        }
    }

    /// One of these.
    pub fn pick<'b, T>(&mut self, of: &'b [T]) -> &'b T {
        let at = self.below(of.len());
        &of[at]
    }

    /// Up to that many bytes.
    pub fn slice(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// What is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Pieces of what is left, cut as chosen: at most 16 cuts.
    pub fn pieces(&mut self) -> (&'a [u8], Vec<Range<usize>>) {
        let cuts = self.below(17);
        let mut at: Vec<usize> = (0..cuts).map(|_| usize::from(self.byte()) << 8 | usize::from(self.byte())).collect();
        let body = self.rest();
        at.iter_mut().for_each(|at| *at %= body.len() + 1);
        at.push(body.len());
        at.sort_unstable();
        let starts = std::iter::once(0).chain(at.clone());
        (body, starts.zip(at.clone()).map(|(start, end)| start..end).collect())
    }
}

/// What was found, the bytes of it, and how it ended.
type Decoded = (Vec<Meaning>, Vec<u8>, Result<(), SseError>);

/// What a body of events means, in whichever pieces it comes.
fn decode(body: &Bytes, pieces: &[Range<usize>], limits: SseLimits) -> Decoded {
    let mut decoder = SseDecoder::new(limits);
    let (mut found, mut raw) = (Vec::new(), Vec::new());
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    for piece in pieces {
        decoder.feed(body.slice(piece.clone()));
        while let Some(block) = decoder.next_block() {
            let Ok(block) = block else { return (found, raw, block.map(|_| ())) };
            raw.extend_from_slice(&block.raw);
            found.push(match &block.content {
                BlockContent::Blank => Meaning::Blank,
                BlockContent::Comment => Meaning::Comment,
                BlockContent::ErrorField(value) => Meaning::Error(text(value)),
                BlockContent::Event(event) => {
                    assert!(!event.data.is_empty() && event.data_lines > 0);
                    if let Some(at) = event.data_offset {
                        assert_eq!(block.raw.slice(at..at + event.data.len()), event.data);
                    }
                    Meaning::Event {
                        data: text(&event.data),
                        name: event.event.as_deref().unwrap_or_default().to_vec(),
                        lines: event.data_lines,
                    }
                }
                BlockContent::NoData => Meaning::NoData,
            });
        }
    }
    match decoder.finish() {
        SseEnd::Clean { tail } => raw.extend_from_slice(&tail),
        SseEnd::Truncated { raw: rest, .. } => raw.extend_from_slice(&rest),
        SseEnd::Failed(error) => return (found, raw, Err(error)),
    }
    (found, raw, Ok(()))
}

/// Cuts don't matter. Of a stream that failed, the LF of a CRLF may have been cut off at its end: it means nothing.
fn same(body: &Bytes, one: &Decoded, other: &Decoded) {
    assert_eq!((&one.0, one.2), (&other.0, other.2), "cuts don't matter");
    match one.2 {
        Ok(()) => assert_eq!(one.1, other.1),
        Err(_) => assert!(body.starts_with(&one.1) && body.starts_with(&other.1)),
    }
}

/// Server-sent events: cuts don't matter, no byte is lost, and the reference agrees (API-11, EXE-17).
pub fn sse(data: &[u8]) {
    let (body, pieces) = Choices::new(data).pieces();
    let body = Bytes::copy_from_slice(body);
    let whole = decode(&body, &[0..body.len()], SseLimits::default());
    let cut = decode(&body, &pieces, SseLimits::default());
    same(&body, &whole, &cut);
    let (found, error) = naive::parse(&body);
    assert_eq!((&whole.0, whole.2.err()), (&found, error), "the reference agrees");
    match whole.2 {
        Ok(()) => assert_eq!(whole.1, body, "no byte is lost"),
        Err(_) => assert!(body.starts_with(&whole.1)),
    }
    // Limits that are met: still no difference, and what comes out is a beginning of the whole.
    let small = SseLimits { max_line: 16, max_event: 40 };
    let bounded = decode(&body, &pieces, small);
    same(&body, &bounded, &decode(&body, &[0..body.len()], small));
    assert!(whole.0.starts_with(&bounded.0) && body.starts_with(&bounded.1));
}

/// Lines of JSON: cuts don't matter, nothing but blank lines and line ends is lost.
pub fn ndjson(data: &[u8]) {
    let (body, pieces) = Choices::new(data).pieces();
    let body = Bytes::copy_from_slice(body);
    let decode = |pieces: &[Range<usize>], limits| {
        let (mut decoder, mut lines) = (NdjsonDecoder::new(limits), Vec::new());
        for piece in pieces {
            decoder.feed(body.slice(piece.clone()));
            while let Some(line) = decoder.next_line() {
                match line {
                    Ok(line) => lines.push(line),
                    Err(error) => return (lines, Some(error)),
                }
            }
            assert!(decoder.pending_bytes() <= limits.max_line);
        }
        lines.extend(decoder.finish());
        (lines, None)
    };
    let whole = decode(&[0..body.len()], NdjsonLimits::default());
    assert_eq!(whole, decode(&pieces, NdjsonLimits::default()), "cuts don't matter");
    let naive: Vec<_> = body
        .split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .filter(|line| !line.trim_ascii().is_empty())
        .collect();
    // The last line has no end: its CR, if any, may be a part of it.
    let found: Vec<_> = whole.0.iter().map(|line| line.trim_ascii_end()).collect();
    assert_eq!(found, naive.iter().map(|line| line.trim_ascii_end()).collect::<Vec<_>>());
    let small = NdjsonLimits { max_line: 24 };
    assert_eq!(decode(&pieces, small), decode(&[0..body.len()], small));
}
