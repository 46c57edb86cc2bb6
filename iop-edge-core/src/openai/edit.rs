//! Decides which bytes of a client's request change: `model` and `stream_options`, nothing else.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;

/// One replacement of a span of bytes; an empty span inserts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Splice {
    pub(crate) span: Range<usize>,
    pub(crate) with: Cow<'static, str>,
}

/// Applies splices that do not overlap, in order of their spans. Without any the bytes are shared, not copied.
pub(crate) fn splice(bytes: &Bytes, splices: &[Splice]) -> Bytes {
    if splices.is_empty() {
        return bytes.clone();
    }
    let grown: usize = splices.iter().map(|splice| splice.with.len()).sum();
    let mut out = Vec::with_capacity(bytes.len() + grown);
    let mut done = 0;
    for splice in splices {
        out.extend_from_slice(bytes.get(done..splice.span.start).unwrap_or_default());
        out.extend_from_slice(splice.with.as_bytes());
        done = splice.span.end;
    }
    out.extend_from_slice(bytes.get(done..).unwrap_or_default());
    out.into()
}

/// Text as a JSON string.
pub(crate) fn quoted(text: &str) -> String {
    // A string always serialises.
    serde_json::to_string(text).unwrap_or_default()
}
