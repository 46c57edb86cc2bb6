use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use futures_util::{FutureExt, StreamExt};

use super::*;
use crate::limits::{INITIAL_WINDOW, MIN_CHARGE};
use crate::message::{Ping, ToEdge};
use iop_execution::{RunEvent, RunEventKind};

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn counting() -> (Arc<Count>, Waker) {
    let count = Arc::new(Count::default());
    (Arc::clone(&count), Waker::from(count))
}

fn ping(nonce: u64) -> ToEdge {
    ToEdge::Ping(Ping { nonce })
}

fn delta() -> ToEdge {
    ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind: RunEventKind::Delta("x".into()), usage: None })
}

fn seqs(outgoing: &mut link::Outgoing<ToEdge>) -> Vec<u64> {
    std::iter::from_fn(|| outgoing.next().now_or_never().flatten()).map(|envelope| envelope.seq).collect()
}

#[test]
fn envelopes_are_numbered_from_one_without_gaps() {
    // WIR-6, W1
    let handle = OutboxHandle::new();
    let mut outgoing = handle.outgoing();
    handle.push_control(ping(1)).unwrap();
    handle.push_control(ping(2)).unwrap();
    assert_eq!(seqs(&mut outgoing), [1, 2]);
    handle.push_control(ping(3)).unwrap();
    assert_eq!(seqs(&mut outgoing), [3]);
}

#[test]
fn a_parked_writer_is_woken_by_whatever_can_be_written() {
    // WIR-9
    let (count, waker) = counting();
    let mut cx = Context::from_waker(&waker);
    let handle = OutboxHandle::new();
    let mut outgoing = handle.outgoing();
    let key = handle.open(RunNumber(1), MIN_CHARGE);
    let mut expect = |handle: &OutboxHandle<ToEdge>, act: &dyn Fn(&OutboxHandle<ToEdge>)| {
        while outgoing.poll_next_unpin(&mut cx).is_ready() {}
        let before = count.0.load(Ordering::SeqCst);
        act(handle);
        assert_eq!(count.0.load(Ordering::SeqCst), before + 1);
        assert!(outgoing.poll_next_unpin(&mut cx).is_ready());
    };
    expect(&handle, &|handle| handle.push_control(ping(1)).unwrap());
    expect(&handle, &|handle| assert_eq!(handle.push(key, delta()), Room::Full));
    handle.push(key, delta());
    expect(&handle, &|handle| handle.grant(key, MIN_CHARGE).unwrap());
    expect(&handle, &|handle| handle.push_run_control(key, ToEdge::Credit(RunNumber(0), 1)).unwrap());
    expect(&handle, &OutboxHandle::finish);
}

#[test]
fn a_producer_waits_without_credit_and_is_woken_by_it() {
    // WIR-16
    let (count, waker) = counting();
    let mut cx = Context::from_waker(&waker);
    let handle = OutboxHandle::new();
    let mut outgoing = handle.outgoing();
    let key = handle.open(RunNumber(1), MIN_CHARGE);
    assert!(handle.poll_room(key, &mut cx).is_ready());
    handle.push(key, delta());
    assert!(handle.poll_room(key, &mut cx).is_pending());
    assert_eq!(seqs(&mut outgoing).len(), 1);
    assert_eq!(count.0.load(Ordering::SeqCst), 0, "writing it gave no credit");
    handle.grant(key, MIN_CHARGE).unwrap();
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert!(handle.poll_room(key, &mut cx).is_ready());
}

#[test]
fn a_producer_is_woken_when_the_writer_makes_room() {
    let (count, waker) = counting();
    let mut cx = Context::from_waker(&waker);
    let handle = OutboxHandle::new();
    let mut outgoing = handle.outgoing();
    let key = handle.open(RunNumber(1), INITIAL_WINDOW);
    let start = || ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind: RunEventKind::Start, usage: None });
    while handle.push(key, start()) == Room::Open {}
    assert!(handle.poll_room(key, &mut cx).is_pending());
    assert!(outgoing.next().now_or_never().is_some());
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert!(handle.poll_room(key, &mut cx).is_ready());
}

#[test]
fn nobody_waits_for_a_run_that_is_gone_or_an_outbox_that_ended() {
    let ends: [fn(&OutboxHandle<ToEdge>, RunKey); 4] =
        [OutboxHandle::discard, OutboxHandle::close, |handle, _| handle.finish(), |handle, _| handle.abort()];
    for end in ends {
        let (count, waker) = counting();
        let mut cx = Context::from_waker(&waker);
        let handle = OutboxHandle::new();
        let key = handle.open(RunNumber(1), 0);
        assert!(handle.poll_room(key, &mut cx).is_pending());
        end(&handle, key);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(handle.poll_room(key, &mut cx).is_ready());
    }
}

#[test]
fn finish_writes_what_can_go_and_abort_nothing() {
    // WIR-13
    let handle = OutboxHandle::new();
    let mut outgoing = handle.outgoing();
    let blocked = handle.open(RunNumber(1), 0);
    handle.push(blocked, delta());
    handle.push_control(ping(1)).unwrap();
    handle.finish();
    handle.push_control(ping(2)).unwrap();
    assert!(matches!(outgoing.next().now_or_never(), Some(Some(_))));
    assert!(matches!(outgoing.next().now_or_never(), Some(None)), "what waits for credit is not waited for");

    let handle = OutboxHandle::new();
    let mut outgoing = handle.outgoing();
    handle.push_control(ping(1)).unwrap();
    handle.abort();
    assert!(matches!(outgoing.next().now_or_never(), Some(None)));
    handle.finish();
    assert!(matches!(outgoing.next().now_or_never(), Some(None)), "an aborted outbox stays so");
}

#[test]
fn debug_shows_no_message() {
    // OBS-4
    let handle = OutboxHandle::new();
    let key = handle.open(RunNumber(1), INITIAL_WINDOW);
    let text = RunEventKind::Delta("SENTINEL".into());
    handle.push(key, ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind: text, usage: None }));
    assert!(!format!("{handle:?}").contains("SENTINEL"));
}
