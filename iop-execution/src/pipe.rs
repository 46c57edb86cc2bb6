//! Decides how emissions pass from a provider to whoever polls it: bounded, in order, closed by one fence.
//!
//! Producer and consumer usually live in one task (the execution polls the provider itself), so a push wakes nobody
//! unless the consumer is parked.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio_util::sync::CancellationToken;

/// Most emissions that wait in a pipe.
pub(crate) const PIPE_ITEMS: usize = 64;
/// Most payload bytes that wait in a pipe, one emission excepted.
pub(crate) const PIPE_BYTES: usize = 64 * 1024;

struct State<T> {
    queue: VecDeque<(usize, T)>,
    bytes: usize,
    fenced: bool,
    dropped: u64,
    producer: Option<Waker>,
    consumer: Option<Waker>,
}

pub(crate) struct Pipe<T> {
    state: Mutex<State<T>>,
    cancelled: CancellationToken,
}

impl<T> Pipe<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                queue: VecDeque::new(),
                bytes: 0,
                fenced: false,
                dropped: 0,
                producer: None,
                consumer: None,
            }),
            cancelled: CancellationToken::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pushes when there is room. `slot` is emptied on success.
    pub(crate) fn poll_push(&self, cx: &mut Context<'_>, slot: &mut Option<T>, bytes: usize) -> Poll<Result<(), ()>> {
        let waker = {
            let mut state = self.lock();
            if state.fenced {
                state.dropped += 1;
                return Poll::Ready(Err(()));
            }
            if state.queue.len() >= PIPE_ITEMS || (state.bytes > 0 && state.bytes + bytes > PIPE_BYTES) {
                state.producer = Some(cx.waker().clone());
                return Poll::Pending;
            }
            if let Some(item) = slot.take() {
                state.bytes += bytes;
                state.queue.push_back((bytes, item));
            }
            state.consumer.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Poll::Ready(Ok(()))
    }

    /// The oldest emission, if there is one.
    pub(crate) fn pop(&self) -> Option<T> {
        let (item, waker) = {
            let mut state = self.lock();
            let (bytes, item) = state.queue.pop_front()?;
            state.bytes -= bytes;
            (item, state.producer.take())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Some(item)
    }

    /// Parks the consumer unless something arrived meanwhile.
    pub(crate) fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if state.queue.is_empty() {
            state.consumer = Some(cx.waker().clone());
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    /// Refuses every push from now on, drops what waits, and tells the provider. Says whether it was open.
    pub(crate) fn fence(&self) -> bool {
        let (open, waker) = {
            let mut state = self.lock();
            let open = !state.fenced;
            state.fenced = true;
            state.dropped += state.queue.len() as u64;
            state.queue.clear();
            state.bytes = 0;
            (open, state.producer.take())
        };
        self.cancelled.cancel();
        if let Some(waker) = waker {
            waker.wake();
        }
        open
    }

    /// Emissions that came after the fence or were dropped by it.
    pub(crate) fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    pub(crate) fn cancelled(&self) -> &CancellationToken {
        &self.cancelled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(pipe: &Pipe<u8>, item: u8, bytes: usize) -> Poll<Result<(), ()>> {
        pipe.poll_push(&mut Context::from_waker(Waker::noop()), &mut Some(item), bytes)
    }

    #[test]
    fn items_and_bytes_are_bounded_and_one_big_item_passes() {
        // EXE-4: awaiting the sink is backpressure
        let pipe = Pipe::new();
        assert_eq!(push(&pipe, 1, PIPE_BYTES * 2), Poll::Ready(Ok(())));
        assert_eq!(push(&pipe, 2, 1), Poll::Pending);
        assert_eq!(pipe.pop(), Some(1));
        for item in 0..PIPE_ITEMS {
            assert_eq!(push(&pipe, item as u8, 0), Poll::Ready(Ok(())));
        }
        assert_eq!(push(&pipe, 0, 0), Poll::Pending);
    }

    #[test]
    fn a_fence_drops_what_waits_and_counts_what_comes_later() {
        // EXE-6
        let pipe = Pipe::new();
        assert_eq!(push(&pipe, 1, 1), Poll::Ready(Ok(())));
        assert!(pipe.fence() && !pipe.fence());
        assert_eq!(pipe.pop(), None);
        assert_eq!(push(&pipe, 2, 1), Poll::Ready(Err(())));
        assert_eq!(pipe.dropped(), 2);
        assert!(pipe.cancelled().is_cancelled());
    }
}
