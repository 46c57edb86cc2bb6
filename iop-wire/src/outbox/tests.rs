use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use iop_execution::{
    AdapterKey, ExecutionFailure, FailureCode, FinishReason, FrameFlags, ProviderId, Redacted, RunEvent, RunEventKind,
    RunId, Target, TunnelFrame, TunnelHead, Usage,
};

use super::*;
use crate::limits::{INITIAL_WINDOW, MAX_CHUNK, MAX_DELTA, RUN_CONTROL, RUN_QUEUE_BYTES, RUN_QUEUE_FRAMES};
use crate::message::{DispatchHead, Ping, RequestChunk, RunDispatch, ToEdge, ToNode};

mod credit;
mod model;

pub(super) fn request(tag: u8) -> ToNode {
    ToNode::Run(RunDispatch {
        head: DispatchHead {
            run_id: RunId::from_bytes([tag; 16]),
            run: RunNumber(0),
            provider_id: ProviderId::new("p").unwrap(),
            adapter: AdapterKey::new("a").unwrap(),
            target: Target::new("t").unwrap(),
            session_id: None,
            background: false,
            stream: true,
            response_stall_timeout_ms: 0,
            deadline_ms: 0,
            body_len: 0,
            window: INITIAL_WINDOW,
            prompt_tokens_estimate: 0,
            credential_lease: Redacted::default(),
            credential_scope: None,
        },
    })
}

pub(super) fn chunk(len: usize) -> ToNode {
    ToNode::Chunk(RequestChunk { run: RunNumber(0), data: Bytes::from(vec![0; len]), last: false })
}

pub(super) fn ping(nonce: u64) -> ToNode {
    ToNode::Ping(Ping { nonce })
}

fn event(kind: RunEventKind) -> ToEdge {
    ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind, usage: None })
}

pub(super) fn delta(text: &str) -> ToEdge {
    event(RunEventKind::Delta(text.into()))
}

pub(super) fn complete() -> ToEdge {
    event(RunEventKind::Complete(FinishReason::Stop))
}

pub(super) fn failed() -> ToEdge {
    event(RunEventKind::Error(ExecutionFailure::refused(FailureCode::Internal, "no")))
}

pub(super) fn cancelled() -> ToEdge {
    event(RunEventKind::Cancelled(CancelReason::Client))
}

fn usage(output: u64) -> ToEdge {
    let usage = Usage { output_tokens: Some(output), ..Usage::default() };
    ToEdge::Event(RunNumber(0), RunEvent { seq: 0, kind: RunEventKind::Usage, usage: Some(usage) })
}

fn body(len: usize, flags: FrameFlags) -> ToEdge {
    ToEdge::Frame(RunNumber(0), 0, TunnelFrame::Body { bytes: Bytes::from(vec![b'x'; len]), flags })
}

fn head() -> ToEdge {
    ToEdge::Frame(RunNumber(0), 0, TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers: HeaderMap::new() }))
}

fn drain<M: Outgoing>(outbox: &mut Outbox<M>) -> Vec<M> {
    std::iter::from_fn(|| outbox.pop()).collect()
}

fn runs(messages: &[ToEdge]) -> Vec<u64> {
    messages.iter().filter_map(|message| message.run().map(|run| run.0)).collect()
}

fn opened(windows: &[u32]) -> (Outbox<ToEdge>, Vec<RunKey>) {
    let mut outbox = Outbox::new();
    let keys = windows.iter().zip(1..).map(|(window, number)| outbox.open(RunNumber(number), *window)).collect();
    (outbox, keys)
}

#[test]
fn control_goes_first_and_after_a_burst_one_frame_passes() {
    // WIR-9
    let (mut outbox, keys) = opened(&[INITIAL_WINDOW]);
    for text in ["a", "b"] {
        outbox.push(keys[0], delta(text));
        outbox.push(keys[0], usage(1));
    }
    for nonce in 0..40 {
        outbox.push_control(ToEdge::Ping(Ping { nonce })).unwrap();
    }
    let order: String =
        drain(&mut outbox).iter().map(|message| if matches!(message, ToEdge::Ping(_)) { 'c' } else { 'f' }).collect();
    assert_eq!(order, format!("{0}f{0}f{1}ff", "c".repeat(16), "c".repeat(8)));
}

#[test]
fn a_request_never_overtakes_control_that_was_pushed_before_it() {
    // REG-3, WIR-9: not even after a burst of control messages
    let mut outbox = Outbox::new();
    for nonce in 0..40 {
        outbox.push_control(ping(nonce)).unwrap();
    }
    outbox.open_request(request(1), INITIAL_WINDOW);
    let popped = drain(&mut outbox);
    assert!(popped[..40].iter().all(|message| matches!(message, ToNode::Ping(_))));
    assert!(matches!(popped[40], ToNode::Run(_)));
}

#[test]
fn the_control_queue_is_bounded_and_never_drops() {
    // WIR-9
    let mut outbox = Outbox::new();
    for nonce in 0..CONTROL_QUEUE as u64 {
        outbox.push_control(ping(nonce)).unwrap();
    }
    assert_eq!(outbox.push_control(ping(0)), Err(ControlOverflow));
    assert!(outbox.pop().is_some());
    assert_eq!(outbox.push_control(ping(0)), Ok(()));
    assert_eq!(drain(&mut outbox).len(), CONTROL_QUEUE);
}

#[test]
fn control_of_one_run_is_bounded_and_its_credits_join() {
    // WIR-9: a thousand runs that return credit at once don't overflow the connection's queue
    let (mut outbox, keys) = opened(&vec![INITIAL_WINDOW; 1000]);
    for _ in 0..3 {
        for key in &keys {
            outbox.push_run_control(*key, ToEdge::Credit(RunNumber(0), 100)).unwrap();
        }
    }
    let popped = drain(&mut outbox);
    assert_eq!(popped.len(), 1000);
    assert_eq!(popped[7], ToEdge::Credit(RunNumber(8), 300));

    let accepted = || ToEdge::Accepted(RunNumber(0));
    for _ in 0..RUN_CONTROL {
        outbox.push_run_control(keys[0], accepted()).unwrap();
    }
    assert_eq!(outbox.push_run_control(keys[0], accepted()), Err(ControlOverflow));
}

#[test]
fn a_receipt_precedes_every_frame_of_its_run() {
    // WIR-14, WIR-9: even when a burst of control lets frames pass
    let (mut outbox, keys) = opened(&[INITIAL_WINDOW]);
    for nonce in 0..CONTROL_BURST as u64 {
        outbox.push_control(ToEdge::Ping(Ping { nonce })).unwrap();
    }
    outbox.push_run_control(keys[0], ToEdge::Accepted(RunNumber(0))).unwrap();
    outbox.push(keys[0], failed());
    let popped = drain(&mut outbox);
    assert_eq!(popped[16], ToEdge::Accepted(RunNumber(1)));
    assert_eq!(popped.len(), 18);
}

#[test]
fn numbers_are_assigned_when_requests_are_written() {
    // WIR-11, WIR-9
    let mut outbox = Outbox::new();
    let first = outbox.open_request(request(1), INITIAL_WINDOW);
    let second = outbox.open_request(request(2), INITIAL_WINDOW);
    let third = outbox.open_request(request(3), INITIAL_WINDOW);
    outbox.push(third, chunk(10));
    outbox.push_run_control(third, ToNode::Credit(RunNumber(0), 5)).unwrap();
    assert_eq!(outbox.cancel(second, CancelReason::Client), CancelOutcome::Withdrawn);
    assert_eq!(outbox.cancel(second, CancelReason::Client), CancelOutcome::Unknown);
    assert!(!outbox.is_written(first));
    let popped = drain(&mut outbox);
    assert_eq!(popped.iter().map(ToNode::run).collect::<Vec<_>>(), [1, 2, 2, 2].map(|run| Some(RunNumber(run))));
    assert!(matches!(&popped[0], ToNode::Run(run) if run.head.run_id == RunId::from_bytes([1; 16])));
    assert!(matches!(&popped[1], ToNode::Run(run) if run.head.run_id == RunId::from_bytes([3; 16])));
    assert!(
        matches!(popped[2], ToNode::Credit(..)),
        "its own credit waits behind the request and goes ahead of the body"
    );
    assert!(matches!(popped[3], ToNode::Chunk(_)));
    assert_eq!(outbox.key_of(RunNumber(2)), Some(third));
    assert_eq!(outbox.highest(), RunNumber(2));
    assert!(outbox.is_written(first) && outbox.is_written(third));
}

#[test]
fn a_request_goes_ahead_of_the_bodies_of_others() {
    // WIR-9
    let mut outbox = Outbox::new();
    let first = outbox.open_request(request(1), INITIAL_WINDOW);
    outbox.push(first, chunk(100));
    outbox.push(first, chunk(100));
    assert!(outbox.pop().is_some());
    let second = outbox.open_request(request(2), INITIAL_WINDOW);
    outbox.push(second, chunk(100));
    let order: Vec<_> = drain(&mut outbox).iter().filter_map(|message| message.run().map(|run| run.0)).collect();
    assert_eq!(order, [2, 1, 2, 1]);
}

#[test]
fn a_cancel_of_a_written_request_drops_its_body_and_is_sent_once() {
    // WIR-9
    let mut outbox = Outbox::new();
    let key = outbox.open_request(request(1), 600);
    assert!(outbox.pop().is_some());
    outbox.push(key, chunk(500));
    outbox.push(key, chunk(500));
    assert_eq!(outbox.cancel(key, CancelReason::SlowClient), CancelOutcome::Queued);
    assert_eq!(outbox.cancel(key, CancelReason::Client), CancelOutcome::Queued);
    assert_eq!(outbox.push(key, chunk(1)), Room::Open, "nobody waits to send to a cancelled run");
    assert_eq!(drain(&mut outbox), [ToNode::Cancel(RunNumber(1), CancelReason::SlowClient)]);
    outbox.close(key);
    assert_eq!((outbox.key_of(RunNumber(1)), outbox.open_runs()), (None, 0));
}

#[test]
fn closing_a_run_sends_its_cancel_and_drops_its_body() {
    let mut outbox = Outbox::new();
    let key = outbox.open_request(request(1), 0);
    assert!(outbox.pop().is_some());
    outbox.push(key, chunk(500));
    let _ = outbox.cancel(key, CancelReason::Client);
    outbox.close(key);
    assert_eq!(outbox.key_of(RunNumber(1)), None);
    assert_eq!(outbox.open_runs(), 1);
    assert_eq!(drain(&mut outbox).len(), 1);
    assert_eq!(outbox.open_runs(), 0);

    let unwritten = outbox.open_request(request(2), 0);
    outbox.close(unwritten);
    assert_eq!(drain(&mut outbox), []);
}

#[test]
fn a_run_without_credit_waits_and_nobody_else_notices() {
    // WIR-7
    let (mut outbox, keys) = opened(&[1024, INITIAL_WINDOW]);
    for _ in 0..8 {
        outbox.push(keys[0], body(1000, FrameFlags::NONE));
        outbox.push(keys[1], body(1000, FrameFlags::NONE));
    }
    assert_eq!(runs(&drain(&mut outbox)), [1, 2, 2, 2, 2, 2, 2, 2, 2]);
    assert!(outbox.is_blocked(keys[0]) && !outbox.is_blocked(keys[1]));
    outbox.grant(keys[0], 976).unwrap();
    assert_eq!(runs(&drain(&mut outbox)), [1], "24 + 976 bytes of credit are one frame");
    assert_eq!(outbox.grant(RunKey(99), u32::MAX), Ok(()), "credit of an ended run is ignored");
}

#[test]
fn a_run_without_credit_can_fail_and_be_cancelled_but_not_complete() {
    // WIR-7, WIR-6
    for (terminal, sent) in [(failed(), 3), (cancelled(), 2), (complete(), 2)] {
        let done = terminal.ending() == Ending::InOrder;
        let (mut outbox, keys) = opened(&[600]);
        for _ in 0..4 {
            outbox.push(keys[0], body(250, FrameFlags::NONE));
        }
        assert!(outbox.pop().is_some());
        outbox.push(keys[0], usage(7));
        outbox.push(keys[0], terminal);
        outbox.push(keys[0], delta("after the end"));
        outbox.close(keys[0]);
        let numbers: Vec<_> = drain(&mut outbox)
            .iter()
            .map(|message| match message {
                ToEdge::Event(_, event) => event.seq,
                ToEdge::Frame(_, n, _) => *n,
                other => panic!("{other:?}"),
            })
            .collect();
        if done {
            assert_eq!(numbers, [2], "success waits: its output must not be lost");
            assert_eq!(outbox.open_runs(), 1);
            outbox.grant(keys[0], 512).unwrap();
            assert_eq!(drain(&mut outbox).len(), 4);
        } else {
            assert_eq!(numbers, (2..2 + sent).collect::<Vec<_>>(), "numbers have no gap where frames were dropped");
        }
        assert_eq!(outbox.open_runs(), 0, "the entry goes with the terminal");
        assert_eq!(outbox.key_of(RunNumber(1)), None);
    }
}

#[test]
fn heads_and_starts_cost_the_least_charge_and_usage_and_terminals_nothing() {
    // WIR-7
    assert_eq!([head(), event(RunEventKind::Start), delta("x")].map(|message| message.charge()), [256; 3]);
    assert_eq!([usage(1), complete(), failed(), cancelled()].map(|message| message.charge()), [0; 4]);
    assert_eq!(body(MAX_CHUNK, FrameFlags::NONE).charge(), 16 * 1024);
    assert_eq!(chunk(300).charge(), 300);
    assert_eq!(request(1).charge(), 0);
}

#[test]
fn more_credit_than_allowed_is_a_violation() {
    // WIR-7, W8
    let (mut outbox, keys) = opened(&[MAX_WINDOW]);
    assert_eq!(outbox.grant(keys[0], 1), Err(CreditOverflow));
    outbox.push(keys[0], delta("x"));
    assert!(outbox.pop().is_some());
    assert_eq!(outbox.grant(keys[0], 256), Ok(()));
    assert_eq!(outbox.grant(keys[0], u32::MAX), Err(CreditOverflow));
}

#[test]
fn the_first_frame_of_a_run_jumps_ahead_once() {
    // WIR-9
    let (mut outbox, keys) = opened(&[INITIAL_WINDOW; 3]);
    outbox.push(keys[0], head());
    assert!(outbox.pop().is_some());
    for _ in 0..4 {
        outbox.push(keys[0], body(MAX_CHUNK, FrameFlags::NONE));
    }
    assert!(outbox.pop().is_some());
    for key in &keys[1..] {
        outbox.push(*key, head());
        outbox.push(*key, body(MAX_CHUNK, FrameFlags::NONE));
    }
    assert_eq!(runs(&drain(&mut outbox)), [2, 3, 2, 3, 1, 1, 1], "the rest goes by turns of bytes");
}

#[test]
fn runs_share_the_connection_by_bytes_and_not_by_frames() {
    // WIR-9: while both have work, a bulk run gets as much as a run of tiny frames
    let (mut outbox, keys) = opened(&[MAX_WINDOW, MAX_WINDOW]);
    let (mut bulk, mut tiny) = (0_u32, 0_u32);
    for _ in 0..600 {
        while outbox.runs[&keys[0]].waiting.len() < 2 {
            outbox.push(keys[0], body(MAX_CHUNK, FrameFlags::NONE));
        }
        while outbox.runs[&keys[1]].waiting.len() < 20 {
            outbox.push(keys[1], body(200, FrameFlags::LIFECYCLE));
        }
        match outbox.pop() {
            Some(ToEdge::Frame(run, _, frame)) if run.0 == 1 => bulk += frame.payload_bytes() as u32,
            Some(_) => tiny += MIN_CHARGE,
            None => panic!("both have credit"),
        }
        let limit = MAX_CHUNK as u32 + 2 * DRR_QUANTUM;
        assert!(bulk.abs_diff(tiny) <= 2 * limit, "{bulk} against {tiny}");
    }
    assert!(bulk > 100_000 && tiny > 100_000);
}

#[test]
fn room_follows_credit_and_queue() {
    // WIR-16
    let (mut outbox, keys) = opened(&[512, MAX_WINDOW, MAX_WINDOW]);
    assert_eq!(outbox.push(keys[0], body(256, FrameFlags::NONE)), Room::Open);
    assert_eq!(outbox.push(keys[0], body(256, FrameFlags::NONE)), Room::Full, "no credit is left for a next frame");
    drain(&mut outbox);
    assert!(outbox.is_blocked(keys[0]), "nothing waits, but there is no credit");
    outbox.grant(keys[0], MIN_CHARGE).unwrap();
    assert_eq!(outbox.room(keys[0]), Room::Open);

    for _ in 1..RUN_QUEUE_FRAMES {
        assert_eq!(outbox.push(keys[1], body(1, FrameFlags::NONE)), Room::Open);
    }
    assert_eq!(outbox.push(keys[1], body(1, FrameFlags::NONE)), Room::Full);
    for _ in 1..RUN_QUEUE_BYTES / MAX_CHUNK {
        assert_eq!(outbox.push(keys[2], body(MAX_CHUNK, FrameFlags::NONE)), Room::Open);
    }
    assert_eq!(outbox.push(keys[2], body(MAX_CHUNK, FrameFlags::NONE)), Room::Full);
    assert_eq!(outbox.room(RunKey(77)), Room::Open, "an unknown run holds nobody back");
}

#[test]
fn adjacent_deltas_that_wait_are_joined_and_nothing_else_is() {
    // WIR-9
    let reasoning = || event(RunEventKind::ReasoningDelta("r".into()));
    let (mut outbox, keys) = opened(&[INITIAL_WINDOW]);
    for message in
        [delta("a"), delta("b"), reasoning(), reasoning(), delta("c"), usage(1), usage(2), delta("d"), complete()]
    {
        outbox.push(keys[0], message);
    }
    let popped = drain(&mut outbox);
    let kinds: Vec<_> = popped
        .iter()
        .map(|message| match message {
            ToEdge::Event(_, event) => match &event.kind {
                RunEventKind::Delta(text) | RunEventKind::ReasoningDelta(text) => text.clone(),
                RunEventKind::Usage => {
                    event.usage.and_then(|usage| usage.output_tokens).unwrap_or_default().to_string()
                }
                _ => "end".into(),
            },
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(kinds, ["ab", "rr", "c", "2", "d", "end"]);

    let long = "x".repeat(MAX_DELTA);
    outbox.open(RunNumber(2), INITIAL_WINDOW);
    outbox.push(RunKey(2), delta(&long[1..]));
    outbox.push(RunKey(2), delta("y"));
    outbox.push(RunKey(2), delta("z"));
    assert_eq!(drain(&mut outbox).len(), 2);
}

#[test]
fn only_content_frames_of_a_tunnel_are_joined() {
    // WIR-9, API-10
    let more = FrameFlags::CONTENT.with(FrameFlags::MORE);
    for flags in
        [FrameFlags::NONE, FrameFlags::LIFECYCLE, FrameFlags::USAGE, FrameFlags::ERROR, FrameFlags::TERMINAL, more]
    {
        let mut frame = body(10, flags);
        assert!(frame.try_merge(body(10, flags)).is_err(), "{flags:?}");
        assert!(body(10, FrameFlags::CONTENT).try_merge(body(10, flags)).is_err(), "{flags:?}");
    }
    let mut frame = body(10, FrameFlags::CONTENT);
    for n in 2..=100 {
        frame.try_merge(body(10, FrameFlags::CONTENT)).unwrap();
        assert_eq!(frame, body(10 * n, FrameFlags::CONTENT));
    }
    assert!(body(MAX_CHUNK, FrameFlags::CONTENT).try_merge(body(1, FrameFlags::CONTENT)).is_err());
    let mut head = head();
    assert!(head.try_merge(body(1, FrameFlags::CONTENT)).is_err());
}

#[test]
fn joining_never_makes_a_frame_wait_that_could_go() {
    // WIR-7
    let (mut outbox, keys) = opened(&[300]);
    outbox.push(keys[0], delta(&"x".repeat(200)));
    outbox.push(keys[0], delta(&"y".repeat(200)));
    assert_eq!(drain(&mut outbox).len(), 1, "one of them has credit; both together have not");
}

#[test]
fn many_runs_come_and_go_without_a_trace() {
    // WIR-11: no memory of ended runs beyond the highest number
    let mut outbox = Outbox::new();
    for _ in 0..1000 {
        let key = outbox.open_request(request(1), INITIAL_WINDOW);
        outbox.push(key, chunk(100));
        assert_eq!(drain(&mut outbox).len(), 2);
        outbox.push(key, chunk(100));
        outbox.discard(key);
    }
    assert_eq!((outbox.open_runs(), outbox.highest()), (0, RunNumber(1000)));
    assert!(
        outbox.control.is_empty() && outbox.turns.is_empty() && outbox.firsts.is_empty() && outbox.numbers.is_empty()
    );
    assert!(outbox.pop().is_none());
}
