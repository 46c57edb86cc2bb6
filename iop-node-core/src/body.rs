//! Decides how much of a request body waits on the Node, and when its credit goes back: when the consumer takes a chunk.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_core::Stream;
use iop_execution::request::BodyAborted;
use iop_wire::limits::INITIAL_WINDOW;
use iop_wire::{
    CloseCode, CreditExceeded, OutboxHandle, ReceiveWindow, RequestChunk, RunKey, RunNumber, ToEdge, ToNode,
};

use crate::session::Fault;

/// Chunks of one body between the session, which receives them, and the run, which takes them. Bounded by its window.
pub(crate) struct Inbox(Mutex<State>);

struct State {
    queue: VecDeque<(u32, Bytes)>,
    window: ReceiveWindow,
    complete: bool,
    aborted: bool,
    consumer: Option<Waker>,
}

impl Inbox {
    /// A body of which nothing has come. `empty`: nothing will.
    pub(crate) fn new(empty: bool) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            queue: VecDeque::new(),
            window: ReceiveWindow::new(INITIAL_WINDOW),
            complete: empty,
            aborted: false,
            consumer: None,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A chunk came; `complete`: it was the last with bytes in it. `Some(grant)`: credit to give back at once.
    pub(crate) fn receive(&self, chunk: RequestChunk, complete: bool) -> Result<Option<u32>, CreditExceeded> {
        let empty = chunk.data.is_empty();
        let data = chunk.data.clone();
        let charge = ToNode::Chunk(chunk).charge();
        let mut state = self.lock();
        state.window.receive(charge)?;
        state.complete |= complete;
        let grant = if empty {
            // There is nothing in it for a consumer to take.
            state.window.consume(charge).filter(|_| !state.complete)
        } else {
            state.queue.push_back((charge, data));
            None
        };
        Self::wake(state);
        Ok(grant)
    }

    /// No more comes, though the body is not complete.
    pub(crate) fn abort(&self) {
        let mut state = self.lock();
        state.aborted |= !state.complete;
        Self::wake(state);
    }

    fn wake(mut state: MutexGuard<'_, State>) {
        let consumer = state.consumer.take();
        drop(state);
        if let Some(consumer) = consumer {
            consumer.wake();
        }
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Inbox")
            .field("held", &state.window.held())
            .field("complete", &state.complete)
            .finish_non_exhaustive()
    }
}

/// The chunks of one body for the run that consumes them. Ends when the announced length is reached.
#[derive(Debug)]
pub(crate) struct BodyStream {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) number: RunNumber,
    pub(crate) key: RunKey,
    pub(crate) outbox: OutboxHandle<ToEdge>,
    pub(crate) fault: Fault,
}

impl Stream for BodyStream {
    type Item = Result<Bytes, BodyAborted>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.inbox.lock();
        let Some((charge, data)) = state.queue.pop_front() else {
            if state.complete {
                return Poll::Ready(None);
            }
            if state.aborted {
                return Poll::Ready(Some(Err(BodyAborted)));
            }
            match &mut state.consumer {
                Some(waker) => waker.clone_from(cx.waker()),
                empty => *empty = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        };
        let grant = state.window.consume(charge).filter(|_| !state.complete);
        drop(state);
        if let Some(grant) = grant
            && self.outbox.push_run_control(self.key, ToEdge::Credit(self.number, grant)).is_err()
        {
            self.fault.raise(CloseCode::ControlOverflow);
        }
        Poll::Ready(Some(Ok(data)))
    }
}
