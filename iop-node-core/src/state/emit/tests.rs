use http::{HeaderMap, HeaderValue, StatusCode, header};
use iop_execution::{FailureCode, FinishReason, Usage};
use proptest::prelude::*;

use super::*;

const RUN: RunNumber = RunNumber(7);

fn event(kind: RunEventKind) -> RunEvent {
    RunEvent { seq: 0, kind, usage: None }
}

fn drain<T: Output>(emitter: &mut Emitter<T>, item: T) -> Vec<ToEdge> {
    emitter.accept(item).unwrap();
    std::iter::from_fn(|| emitter.pop()).collect()
}

fn events(messages: Vec<ToEdge>) -> Vec<RunEvent> {
    messages
        .into_iter()
        .map(|message| match message {
            ToEdge::Event(RUN, event) => event,
            other => panic!("{other:?}"),
        })
        .collect()
}

fn frames(messages: Vec<ToEdge>) -> Vec<TunnelFrame> {
    messages
        .into_iter()
        .map(|message| match message {
            ToEdge::Frame(RUN, _, frame) => frame,
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn what_fits_is_passed_on_whole() {
    // EXE-5
    let mut emitter = Emitter::new(RUN);
    let usage = Some(Usage { output_tokens: Some(1), ..Usage::default() });
    for kind in [
        RunEventKind::Start,
        RunEventKind::Delta("a".repeat(4096)),
        RunEventKind::Delta(String::new()),
        RunEventKind::ReasoningDelta("b".into()),
        RunEventKind::Usage,
    ] {
        let item = RunEvent { seq: 0, kind, usage };
        assert_eq!(events(drain(&mut emitter, item.clone())), [item]);
    }
    assert_eq!(emitter.sent(), 5);
}

proptest! {
    #[test]
    fn long_text_is_cut_at_characters_and_nothing_is_lost(text in "[aé€😀]{0,9000}", reasoning: bool) {
        // WIR-8
        let kind = if reasoning { RunEventKind::ReasoningDelta(text.clone()) } else { RunEventKind::Delta(text.clone()) };
        let usage = Some(Usage { input_tokens: Some(3), ..Usage::default() });
        let pieces = events(drain(&mut Emitter::new(RUN), RunEvent { seq: 0, kind, usage }));
        let mut joined = String::new();
        for (at, piece) in pieces.iter().enumerate() {
            let part = match &piece.kind {
                RunEventKind::Delta(part) if !reasoning => part,
                RunEventKind::ReasoningDelta(part) if reasoning => part,
                other => panic!("{other:?}"),
            };
            prop_assert!(part.len() <= MAX_DELTA && (!part.is_empty() || text.is_empty()));
            prop_assert_eq!(piece.usage.is_some(), at + 1 == pieces.len(), "counts stand on the last piece");
            joined.push_str(part);
        }
        prop_assert_eq!(joined, text);
    }

    #[test]
    fn bodies_are_cut_into_chunks_with_more_on_all_but_the_last(len in 0..70_000_usize, event_stream: bool) {
        // WIR-8, API-10
        let mut emitter = Emitter::new(RUN);
        let mut headers = HeaderMap::new();
        if event_stream {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        }
        drain(&mut emitter, TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers }));
        let body: Bytes = (0..len).map(|at| at as u8).collect::<Vec<_>>().into();
        let set = FrameFlags::CONTENT.with(FrameFlags::PROGRESS);
        let pieces = frames(drain(&mut emitter, TunnelFrame::Body { bytes: body.clone(), flags: set }));
        prop_assert_eq!(pieces.len(), len.div_ceil(MAX_CHUNK).max(1));
        let mut joined = Vec::new();
        for (at, piece) in pieces.iter().enumerate() {
            let TunnelFrame::Body { bytes, flags } = piece else { panic!("{piece:?}") };
            let want = match (at + 1 == pieces.len(), event_stream) {
                (true, _) => FrameFlags::CONTENT,
                (false, true) => FrameFlags::MORE,
                (false, false) => FrameFlags::NONE,
            };
            prop_assert_eq!(*flags, want, "and PROGRESS never leaves the Node");
            joined.extend_from_slice(bytes);
        }
        prop_assert_eq!(joined, body);
    }
}

#[test]
fn a_long_tool_call_names_itself_once() {
    // EXE-8
    let call = ToolCallDelta { index: 2, id: Some("id".into()), name: Some("f".into()), arguments: "x".repeat(9000) };
    let pieces = events(drain(&mut Emitter::new(RUN), event(RunEventKind::ToolCallDelta(call))));
    let calls: Vec<_> = pieces
        .iter()
        .map(|piece| match &piece.kind {
            RunEventKind::ToolCallDelta(call) => {
                (call.index, call.id.is_some(), call.name.is_some(), call.arguments.len())
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(calls, [(2, true, true, 4096), (2, false, false, 4096), (2, false, false, 808)]);
}

#[test]
fn what_can_not_be_cut_is_refused() {
    // WIR-8, W3
    let call = ToolCallDelta { id: Some("x".repeat(5000)), ..Default::default() };
    assert_eq!(Emitter::new(RUN).accept(event(RunEventKind::ToolCallDelta(call))), Err(Oversize));
    let mut headers = HeaderMap::new();
    headers.insert("x-a", HeaderValue::from_str(&"v".repeat(MAX_HEADER_BYTES)).unwrap());
    let mut emitter = Emitter::new(RUN);
    assert_eq!(emitter.accept(TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers })), Err(Oversize));
    assert_eq!(emitter.pop(), None);
    let mut headers = HeaderMap::new();
    for _ in 0..=MAX_HEADERS {
        headers.append("x-a", HeaderValue::from_static("v"));
    }
    assert_eq!(emitter.accept(TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers })), Err(Oversize));
}

#[test]
fn there_is_one_terminal_and_nothing_after_it() {
    // NOD-6, WIR-6, W6
    let mut emitter = Emitter::new(RUN);
    emitter.accept(event(RunEventKind::Delta("a".repeat(9000)))).unwrap();
    assert!(emitter.pop().is_some());
    let end = event(RunEventKind::Complete(FinishReason::Stop));
    assert_eq!(emitter.finish(end.clone()), Some(ToEdge::Event(RUN, end.clone())));
    assert_eq!(emitter.pop(), None, "what waited is dropped");
    assert_eq!(emitter.finish(end), None);
    assert_eq!(emitter.failed(ExecutionFailure::refused(FailureCode::Internal, "x")), None);
    assert_eq!(emitter.cancelled(CancelReason::Client), None);
    emitter.accept(event(RunEventKind::Delta("late".into()))).unwrap();
    assert_eq!((emitter.pop(), emitter.sent()), (None, 2));
}

#[test]
fn outcomes_follow_the_terminal() {
    // EXE-5
    let failure = || ExecutionFailure::refused(FailureCode::Busy, "x");
    assert_eq!(event(RunEventKind::Start).outcome(), None);
    assert_eq!(event(RunEventKind::Error(failure())).outcome(), Some(RunOutcome::Failed(FailureCode::Busy)));
    assert_eq!(TunnelFrame::End.outcome(), Some(RunOutcome::Completed));
    assert_eq!(TunnelFrame::Failed(failure()).outcome(), Some(RunOutcome::Failed(FailureCode::Busy)));
    assert_eq!(TunnelFrame::Cancelled(CancelReason::Drain).outcome(), Some(RunOutcome::Cancelled(CancelReason::Drain)));
}
