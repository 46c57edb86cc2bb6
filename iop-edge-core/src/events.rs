//! Decides how events reach subscribers: bounded, oldest lost first and counted, never slowing anyone down (EDG-2).

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use iop_execution::{RunEvent, RunId};

use crate::wake::Wakers;

/// Events that wait for one subscriber; older ones are lost.
pub const SUBSCRIPTION_EVENTS: usize = 1024;

/// An event of a normalised run, as subscribers see it: each one as it came, also where a slow client gets several usage
/// reports as one. Frames of tunnels never become one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunNotice {
    /// The run.
    pub run_id: RunId,
    /// What happened.
    pub event: RunEvent,
}

/// What a subscriber receives.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "an event, or the number of those that were lost")]
pub enum Notice<T> {
    /// The next event.
    Event(T),
    /// So many events were lost here, because the subscriber was slow.
    Lost(u64),
}

struct Ring<T> {
    waiting: VecDeque<T>,
    lost: u64,
    closed: bool,
    reader: Option<Waker>,
}

fn lock<T>(ring: &Mutex<Ring<T>>) -> MutexGuard<'_, Ring<T>> {
    ring.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One bus: any number of subscribers.
pub(crate) struct Bus<T> {
    subscribers: Mutex<Vec<Weak<Mutex<Ring<T>>>>>,
    count: AtomicUsize,
}

impl<T> fmt::Debug for Bus<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bus").field("subscribers", &self.count).finish()
    }
}

impl<T> Default for Bus<T> {
    fn default() -> Self {
        Self { subscribers: Mutex::new(Vec::new()), count: AtomicUsize::new(0) }
    }
}

impl<T: Clone> Bus<T> {
    fn subscribers(&self) -> MutexGuard<'_, Vec<Weak<Mutex<Ring<T>>>>> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn subscribe(&self) -> Subscription<T> {
        let ring = Ring { waiting: VecDeque::new(), lost: 0, closed: false, reader: None };
        let ring = Arc::new(Mutex::new(ring));
        let mut subscribers = self.subscribers();
        subscribers.push(Arc::downgrade(&ring));
        self.count.store(subscribers.len(), Ordering::Relaxed);
        Subscription { ring }
    }

    /// False if publishing would reach nobody: then the event need not be made.
    pub(crate) fn is_heard(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// The caller wakes whoever reads, once it holds no lock.
    pub(crate) fn publish(&self, event: &T, wakers: &mut Wakers) {
        if !self.is_heard() {
            return;
        }
        let mut subscribers = self.subscribers();
        subscribers.retain(|subscriber| {
            let Some(ring) = subscriber.upgrade() else { return false };
            let mut ring = lock(&ring);
            if ring.waiting.len() >= SUBSCRIPTION_EVENTS {
                ring.waiting.pop_front();
                ring.lost += 1;
            }
            ring.waiting.push_back(event.clone());
            wakers.extend(ring.reader.take());
            true
        });
        self.count.store(subscribers.len(), Ordering::Relaxed);
    }
}

impl<T> Drop for Bus<T> {
    fn drop(&mut self) {
        let subscribers = self.subscribers.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut wakers = Wakers::default();
        for ring in subscribers.iter().filter_map(Weak::upgrade) {
            let mut ring = lock(&ring);
            ring.closed = true;
            wakers.extend(ring.reader.take());
        }
        wakers.wake();
    }
}

/// A stream of events. Ends when the Edge is gone; dropping it unsubscribes. At most [`SUBSCRIPTION_EVENTS`] wait.
#[must_use = "events are kept for a subscriber that reads them"]
pub struct Subscription<T> {
    ring: Arc<Mutex<Ring<T>>>,
}

impl<T> fmt::Debug for Subscription<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("waiting", &lock(&self.ring).waiting.len()).finish()
    }
}

impl<T> Stream for Subscription<T> {
    type Item = Notice<T>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Notice<T>>> {
        let mut ring = lock(&self.ring);
        if ring.lost > 0 {
            return Poll::Ready(Some(Notice::Lost(std::mem::take(&mut ring.lost))));
        }
        if let Some(event) = ring.waiting.pop_front() {
            return Poll::Ready(Some(Notice::Event(event)));
        }
        if ring.closed {
            return Poll::Ready(None);
        }
        ring.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, StreamExt as _};

    use super::*;

    /// A waker that looks whether its bus could be used from here.
    struct Probe {
        bus: Weak<Bus<usize>>,
        free: std::sync::atomic::AtomicBool,
    }

    impl std::task::Wake for Probe {
        fn wake(self: Arc<Self>) {
            let bus = self.bus.upgrade();
            let free = bus.is_some_and(|bus| bus.subscribers.try_lock().is_ok());
            self.free.store(free, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_subscriber_is_woken_by_the_publisher_and_not_under_a_lock_of_the_bus() {
        // EDG-2
        let bus = Arc::new(Bus::default());
        let probe = Arc::new(Probe { bus: Arc::downgrade(&bus), free: false.into() });
        let mut reader = bus.subscribe();
        let waker = Waker::from(Arc::clone(&probe));
        assert!(reader.poll_next_unpin(&mut Context::from_waker(&waker)).is_pending());
        publish(&bus, 1);
        assert!(probe.free.load(Ordering::Relaxed));
    }

    fn publish(bus: &Bus<usize>, event: usize) {
        let mut wakers = Wakers::default();
        bus.publish(&event, &mut wakers);
        wakers.wake();
    }

    #[test]
    fn a_slow_subscriber_loses_the_oldest_and_is_told_how_many() {
        // EDG-2
        let bus = Bus::default();
        assert!(!bus.is_heard());
        let (mut slow, mut quick) = (bus.subscribe(), bus.subscribe());
        for event in 0..SUBSCRIPTION_EVENTS + 3 {
            publish(&bus, event);
            assert_eq!(quick.next().now_or_never(), Some(Some(Notice::Event(event))));
        }
        assert_eq!(slow.next().now_or_never(), Some(Some(Notice::Lost(3))));
        for event in 3..SUBSCRIPTION_EVENTS + 3 {
            assert_eq!(slow.next().now_or_never(), Some(Some(Notice::Event(event))));
        }
        assert_eq!(slow.next().now_or_never(), None);
        drop(slow);
        publish(&bus, 0);
        assert_eq!(bus.subscribers().len(), 1, "a dropped subscription is forgotten");
        drop(bus);
        assert_eq!(quick.next().now_or_never(), Some(Some(Notice::Event(0))));
        assert_eq!(quick.next().now_or_never(), Some(None));
    }
}
