//! Decides that nothing follows a Goodbye, and tells a draining session when the end of a run was written.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use iop_wire::link::Outgoing;
use iop_wire::{Sequenced, ToEdge};
use tokio::sync::Notify;

use crate::state::emit::Output;

/// The outbox's messages up to a Goodbye.
pub(super) fn until_goodbye(messages: Outgoing<ToEdge>, written: Arc<Notify>) -> Outgoing<ToEdge> {
    Box::pin(UntilGoodbye { messages: Some(messages), written })
}

struct UntilGoodbye {
    messages: Option<Outgoing<ToEdge>>,
    written: Arc<Notify>,
}

impl Stream for UntilGoodbye {
    type Item = Sequenced<ToEdge>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(messages) = &mut self.messages else { return Poll::Ready(None) };
        let polled = messages.as_mut().poll_next(cx);
        if let Poll::Ready(Some(Sequenced { message, .. })) = &polled {
            let terminal = match message {
                ToEdge::Goodbye(_) => {
                    self.messages = None;
                    false
                }
                ToEdge::Event(_, event) => event.outcome().is_some(),
                ToEdge::Frame(_, _, frame) => frame.outcome().is_some(),
                _ => false,
            };
            if terminal {
                self.written.notify_one();
            }
        }
        polled
    }
}
