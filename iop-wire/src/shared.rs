//! Decides how tasks share one outbox: a short lock, a waker for the writer, wakers for blocked runs.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use iop_execution::CancelReason;

use crate::link;
use crate::message::{RunNumber, Sequenced};
use crate::outbox::{CancelOutcome, ControlOverflow, CreditOverflow, Outbox, Outgoing, Room, RunKey};

/// A shared outbox. Cheap to clone. Every method takes a short lock, and wakes the writer when there is something new.
pub struct OutboxHandle<M>(Arc<Mutex<Shared<M>>>);

struct Shared<M> {
    outbox: Outbox<M>,
    writer: Option<Waker>,
    rooms: BTreeMap<RunKey, Waker>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Nothing new is taken.
    Finished,
    /// Nothing more is written.
    Aborted,
}

impl<M> Clone for OutboxHandle<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M> fmt::Debug for OutboxHandle<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = self.lock();
        f.debug_struct("OutboxHandle")
            .field("outbox", &shared.outbox)
            .field("state", &shared.state)
            .finish_non_exhaustive()
    }
}

impl<M> OutboxHandle<M> {
    fn lock(&self) -> MutexGuard<'_, Shared<M>> {
        // Every method leaves the outbox consistent before anything of ours could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Outgoing> Default for OutboxHandle<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Outgoing> OutboxHandle<M> {
    /// An empty outbox.
    #[must_use]
    pub fn new() -> Self {
        let shared = Shared { outbox: Outbox::new(), writer: None, rooms: BTreeMap::new(), state: State::Open };
        Self(Arc::new(Mutex::new(shared)))
    }

    /// The stream a link pulls; numbers envelopes from 1 (WIR-6). Take it once.
    ///
    /// Ends after `finish` once everything that can be written is, at once after `abort`.
    #[must_use]
    pub fn outgoing(&self) -> link::Outgoing<M> {
        Box::pin(Writer { handle: self.clone(), seq: 0 })
    }

    /// See [`Outbox::push_control`]. Dropped after `finish` or `abort`.
    ///
    /// # Errors
    /// [`ControlOverflow`] when too many wait.
    pub fn push_control(&self, message: M) -> Result<(), ControlOverflow> {
        self.write(Ok(()), |outbox| outbox.push_control(message))
    }

    /// See [`Outbox::open_request`]. After `finish` or `abort` the request is not written; the key is valid all the same.
    #[must_use]
    pub fn open_request(&self, request: M, body_window: u32) -> RunKey {
        let mut shared = self.lock();
        let key = shared.outbox.open_request(request, body_window);
        if shared.state != State::Open {
            shared.outbox.discard(key);
        }
        shared.wake_writer_and_unlock();
        key
    }

    /// See [`Outbox::open`].
    #[must_use]
    pub fn open(&self, number: RunNumber, window: u32) -> RunKey {
        self.lock().outbox.open(number, window)
    }

    /// See [`Outbox::push`]. Dropped after `finish` or `abort`.
    pub fn push(&self, key: RunKey, message: M) -> Room {
        self.write(Room::Open, |outbox| outbox.push(key, message))
    }

    /// See [`Outbox::push_run_control`]. Dropped after `finish` or `abort`.
    ///
    /// # Errors
    /// [`ControlOverflow`] when too many of this run wait.
    pub fn push_run_control(&self, key: RunKey, message: M) -> Result<(), ControlOverflow> {
        self.write(Ok(()), |outbox| outbox.push_run_control(key, message))
    }

    /// Ready when the run's queue has room (WIR-16: Pending = no credit, stop reading the provider). Ready also when the run
    /// is gone, or the outbox is finished or aborted. One task per run may wait.
    pub fn poll_room(&self, key: RunKey, cx: &mut Context<'_>) -> Poll<()> {
        let mut shared = self.lock();
        if shared.state != State::Open || shared.outbox.room(key) == Room::Open {
            shared.rooms.remove(&key);
            return Poll::Ready(());
        }
        match shared.rooms.get_mut(&key) {
            Some(waker) => waker.clone_from(cx.waker()),
            None => {
                shared.rooms.insert(key, cx.waker().clone());
            }
        }
        Poll::Pending
    }

    /// See [`Outbox::is_blocked`].
    #[must_use]
    pub fn is_blocked(&self, key: RunKey) -> bool {
        self.lock().outbox.is_blocked(key)
    }

    /// See [`Outbox::cancel`].
    #[must_use]
    pub fn cancel(&self, key: RunKey, reason: CancelReason) -> CancelOutcome {
        self.change(key, |outbox| outbox.cancel(key, reason))
    }

    /// See [`Outbox::grant`].
    ///
    /// # Errors
    /// [`CreditOverflow`] when the peer grants too much.
    pub fn grant(&self, key: RunKey, bytes: u32) -> Result<(), CreditOverflow> {
        self.change(key, |outbox| outbox.grant(key, bytes))
    }

    /// See [`Outbox::close`].
    pub fn close(&self, key: RunKey) {
        self.change(key, |outbox| outbox.close(key));
    }

    /// See [`Outbox::discard`].
    pub fn discard(&self, key: RunKey) {
        self.change(key, |outbox| outbox.discard(key));
    }

    /// See [`Outbox::key_of`].
    #[must_use]
    pub fn key_of(&self, number: RunNumber) -> Option<RunKey> {
        self.lock().outbox.key_of(number)
    }

    /// See [`Outbox::highest`].
    #[must_use]
    pub fn highest(&self) -> RunNumber {
        self.lock().outbox.highest()
    }

    /// See [`Outbox::is_written`].
    #[must_use]
    pub fn is_written(&self, key: RunKey) -> bool {
        self.lock().outbox.is_written(key)
    }

    /// See [`Outbox::open_runs`].
    #[must_use]
    pub fn open_runs(&self) -> usize {
        self.lock().outbox.open_runs()
    }

    /// No more messages are taken; the outgoing stream ends once everything that can be written is. Frames that wait for
    /// credit are not waited for.
    pub fn finish(&self) {
        let mut shared = self.lock();
        if shared.state == State::Open {
            shared.state = State::Finished;
        }
        shared.wake_all_and_unlock();
    }

    /// The outgoing stream ends at once; whatever waits is dropped.
    pub fn abort(&self) {
        let mut shared = self.lock();
        shared.state = State::Aborted;
        shared.outbox.clear();
        shared.wake_all_and_unlock();
    }

    /// Queues something, then wakes the writer.
    fn write<R>(&self, refused: R, operation: impl FnOnce(&mut Outbox<M>) -> R) -> R {
        let mut shared = self.lock();
        if shared.state != State::Open {
            return refused;
        }
        let result = operation(&mut shared.outbox);
        shared.wake_writer_and_unlock();
        result
    }

    /// Changes what a run may do, then wakes the writer, and the run's producer if it has room now.
    fn change<R>(&self, key: RunKey, operation: impl FnOnce(&mut Outbox<M>) -> R) -> R {
        let mut shared = self.lock();
        let result = operation(&mut shared.outbox);
        let producer = shared.take_producer(key);
        shared.wake_writer_and_unlock();
        if let Some(producer) = producer {
            producer.wake();
        }
        result
    }
}

impl<M: Outgoing> Shared<M> {
    fn take_producer(&mut self, key: RunKey) -> Option<Waker> {
        if self.rooms.is_empty() || self.outbox.room(key) == Room::Full {
            return None;
        }
        self.rooms.remove(&key)
    }
}

/// Wakers run after the lock is released: a woken task may run at once, on another thread, and want it.
trait WakeAndUnlock {
    fn wake_writer_and_unlock(self);
    fn wake_all_and_unlock(self);
}

impl<M> WakeAndUnlock for MutexGuard<'_, Shared<M>> {
    fn wake_writer_and_unlock(mut self) {
        let writer = self.writer.take();
        drop(self);
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    fn wake_all_and_unlock(mut self) {
        let rooms = std::mem::take(&mut self.rooms);
        self.wake_writer_and_unlock();
        rooms.into_values().for_each(Waker::wake);
    }
}

/// The pulled side of a shared outbox.
struct Writer<M> {
    handle: OutboxHandle<M>,
    seq: u64,
}

impl<M: Outgoing> Stream for Writer<M> {
    type Item = Sequenced<M>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut shared = self.handle.lock();
        if shared.state == State::Aborted {
            return Poll::Ready(None);
        }
        let Some((message, key)) = shared.outbox.pop_keyed() else {
            if shared.state == State::Finished {
                return Poll::Ready(None);
            }
            match &mut shared.writer {
                Some(waker) => waker.clone_from(cx.waker()),
                empty => *empty = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        };
        let producer = key.and_then(|key| shared.take_producer(key));
        drop(shared);
        if let Some(producer) = producer {
            producer.wake();
        }
        self.seq += 1;
        Poll::Ready(Some(Sequenced { seq: self.seq, message }))
    }
}

#[cfg(test)]
mod tests;
