use futures_util::{FutureExt, StreamExt, stream};
use iop_execution::{RunEvent, RunEventKind};

use super::*;
use crate::inbox::ReceiveWindow;
use crate::limits::MIN_WINDOW;
use crate::message::{Ping, RunNumber, ToEdge, ToNode};
use crate::shared::OutboxHandle;

const MODES: [MemoryMode; 2] = [MemoryMode::Direct, MemoryMode::Encoded];

fn next<S: Stream + Unpin>(stream: &mut S) -> Option<Option<S::Item>> {
    stream.next().now_or_never()
}

fn delta(text: &str) -> ToEdge {
    ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind: RunEventKind::Delta(text.into()), usage: None })
}

#[test]
fn both_directions_carry_messages_in_order() {
    // WIR-2
    for mode in MODES {
        let (edge, node) = memory_link_with(mode);
        let (to_node, to_edge) = (OutboxHandle::new(), OutboxHandle::new());
        let mut at_edge = edge.start(to_node.outgoing());
        let mut at_node = node.start(to_edge.outgoing());
        assert!(next(&mut at_edge).is_none());
        for nonce in 1..=3 {
            to_node.push_control(ToNode::Ping(Ping { nonce })).unwrap();
            to_edge.push_control(ToEdge::Ping(Ping { nonce })).unwrap();
        }
        for nonce in 1..=3 {
            let message = ToNode::Ping(Ping { nonce });
            assert_eq!(next(&mut at_node), Some(Some(Ok(Sequenced { seq: nonce, message }))), "{mode:?}");
            let message = ToEdge::Ping(Ping { nonce });
            assert_eq!(next(&mut at_edge), Some(Some(Ok(Sequenced { seq: nonce, message }))), "{mode:?}");
        }
        assert!(next(&mut at_node).is_none());
    }
}

#[test]
fn a_message_is_pulled_only_when_its_receiver_reads() {
    // WIR-9: what is pushed later still goes ahead
    let (edge, node) = memory_link();
    let outbox = OutboxHandle::new();
    let mut at_edge = edge.start(Box::pin(stream::pending()));
    let _at_node = node.start(outbox.outgoing());
    let key = outbox.open(RunNumber(1), MIN_WINDOW);
    outbox.push(key, delta("x"));
    outbox.push_control(ToEdge::Ping(Ping { nonce: 1 })).unwrap();
    let first = next(&mut at_edge).flatten().unwrap().unwrap();
    assert_eq!(first.message, ToEdge::Ping(Ping { nonce: 1 }));
}

#[test]
fn dropping_either_side_ends_the_other_at_once() {
    // WIR-13
    for mode in MODES {
        let (edge, node) = memory_link_with(mode);
        let outbox = OutboxHandle::new();
        outbox.push_control(ToEdge::Ping(Ping { nonce: 1 })).unwrap();
        let at_edge = edge.start(Box::pin(stream::pending()));
        let mut at_node = node.start(outbox.outgoing());
        assert!(next(&mut at_node).is_none());
        drop(at_edge);
        assert_eq!(next(&mut at_node), Some(None));

        let (edge, node) = memory_link_with(mode);
        drop(node);
        assert_eq!(next(&mut edge.start(Box::pin(stream::pending()))), Some(None), "never started");
    }
}

#[tokio::test]
async fn a_waiting_side_is_woken_by_messages_and_by_the_end() {
    let (edge, node) = memory_link();
    let outbox = OutboxHandle::new();
    let mut at_edge = edge.start(Box::pin(stream::pending()));
    let reader = tokio::spawn(async move { (at_edge.next().await, at_edge.next().await) });
    tokio::task::yield_now().await;
    let at_node = node.start(outbox.outgoing());
    tokio::task::yield_now().await;
    outbox.push_control(ToEdge::Ping(Ping { nonce: 1 })).unwrap();
    tokio::task::yield_now().await;
    drop(at_node);
    let (first, second) = reader.await.unwrap();
    assert!(first.is_some() && second.is_none());
}

#[test]
fn a_finished_direction_ends_after_its_last_message_and_the_other_goes_on() {
    // WIR-13
    let (edge, node) = memory_link();
    let (to_node, to_edge) = (OutboxHandle::new(), OutboxHandle::new());
    let mut at_edge = edge.start(to_node.outgoing());
    let mut at_node = node.start(to_edge.outgoing());
    to_edge.push_control(ToEdge::Ping(Ping { nonce: 1 })).unwrap();
    to_edge.finish();
    assert!(matches!(next(&mut at_edge), Some(Some(Ok(_)))));
    assert_eq!(next(&mut at_edge), Some(None));
    to_node.push_control(ToNode::Ping(Ping { nonce: 1 })).unwrap();
    assert!(matches!(next(&mut at_node), Some(Some(Ok(_)))));
}

#[test]
fn an_encoded_link_refuses_what_a_transport_would() {
    // W17, WIR-8
    let (edge, node) = memory_link_with(MemoryMode::Encoded);
    let outbox = OutboxHandle::new();
    let mut at_edge = edge.start(Box::pin(stream::pending()));
    let _at_node = node.start(outbox.outgoing());
    let key = outbox.open(RunNumber(4), 1024 * 1024);
    outbox.push(key, delta(&"x".repeat(5000)));
    outbox.push(key, delta("y"));
    outbox.push(key, delta(&"x".repeat(70_000)));
    let malformed = next(&mut at_edge).flatten().unwrap();
    assert!(matches!(malformed, Err(LinkError::MalformedRun { seq: 1, run: RunNumber(4), .. })), "{malformed:?}");
    assert!(matches!(next(&mut at_edge), Some(Some(Ok(_)))), "the link goes on");
    assert_eq!(next(&mut at_edge), Some(Some(Err(LinkError::TooLarge))));
    assert_eq!(next(&mut at_edge), Some(None), "and ends when it is beyond doubt");
}

#[test]
fn one_stopped_reader_costs_its_window_and_nobody_else_notices() {
    // WIR-7, WIR-9: run 1's consumer reads nothing, 31 others do
    let (edge, node) = memory_link_with(MemoryMode::Encoded);
    let outbox = OutboxHandle::new();
    let mut at_edge = edge.start(Box::pin(stream::pending()));
    let _at_node = node.start(outbox.outgoing());
    let keys: Vec<_> = (1..=32).map(|number| outbox.open(RunNumber(number), MIN_WINDOW)).collect();
    let mut windows = vec![ReceiveWindow::new(MIN_WINDOW); keys.len()];
    let mut arrived = vec![0_usize; keys.len()];
    let text = "t".repeat(1000);
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..5_000 {
        for key in &keys {
            if outbox.poll_room(*key, &mut cx).is_ready() {
                outbox.push(*key, delta(&text));
            }
        }
        while let Some(Some(item)) = next(&mut at_edge) {
            let message = item.unwrap().message;
            let run = message.run().unwrap().0 as usize - 1;
            windows[run].receive(message.charge()).unwrap();
            arrived[run] += message.charge() as usize;
            if run > 0
                && let Some(grant) = windows[run].consume(message.charge())
            {
                outbox.grant(keys[run], grant).unwrap();
            }
        }
    }
    assert!(windows[0].held() <= MIN_WINDOW && arrived[0] <= MIN_WINDOW as usize);
    assert!(outbox.is_blocked(keys[0]));
    assert!(arrived[1..].iter().all(|bytes| *bytes > 4_000_000), "{arrived:?}");
}

#[tokio::test]
async fn a_listener_takes_what_a_connector_dials() {
    let (connector, mut listener) = memory_listener(MemoryMode::Direct);
    let node = connector.connect().await.unwrap();
    let edge = listener.accept().await.unwrap();
    let outbox = OutboxHandle::new();
    outbox.push_control(ToEdge::Ping(Ping { nonce: 1 })).unwrap();
    let _at_node = node.start(outbox.outgoing());
    let mut at_edge = edge.start(Box::pin(stream::pending()));
    assert!(at_edge.next().await.is_some());

    for _ in 0..ACCEPT_QUEUE {
        connector.connect().await.unwrap();
    }
    assert!(matches!(connector.connect().await, Err(ConnectError::Retryable(_))));
    drop(listener);
    assert!(matches!(connector.connect().await, Err(ConnectError::Retryable(_))));
}
