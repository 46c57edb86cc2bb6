//! Decides what an HTTP body of this surface is: a whole answer, or an exchange that still runs.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::chat::Live;

/// Body of a response. Dropping it before its end cancels the run behind it.
pub struct OpenAiBody(Kind);

enum Kind {
    Whole(Option<Bytes>),
    Live(Box<Live>),
}

/// The answer broke off after a part of it was sent and can't say so itself. The server must cut the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the answer broke off")]
pub struct AnswerCut;

impl OpenAiBody {
    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        Self(Kind::Whole(Some(bytes.into()).filter(|bytes| !bytes.is_empty())))
    }

    pub(crate) fn live(live: Live) -> Self {
        Self(Kind::Live(Box::new(live)))
    }
}

impl Body for OpenAiBody {
    type Data = Bytes;
    type Error = AnswerCut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AnswerCut>>> {
        match &mut self.0 {
            Kind::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Kind::Live(live) => live.poll_data(cx).map(|data| data.map(|data| data.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole(bytes) => bytes.is_none(),
            Kind::Live(live) => live.is_finished(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Kind::Live(_) => SizeHint::default(),
        }
    }
}

impl fmt::Debug for OpenAiBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Whole(bytes) => f.debug_tuple("Whole").field(&bytes.as_ref().map(Bytes::len)).finish(),
            Kind::Live(live) => live.fmt(f),
        }
    }
}
