use iop_execution::FailureCode;
use iop_execution::sse::split_blocks;
use iop_execution::testkit::cases::{CaseEnd, chat_case, chat_cases};
use proptest::prelude::*;

use super::*;

/// What one body comes to: its frames, its counts, and how it ended.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    frames: Vec<(Bytes, FrameFlags)>,
    usage: Option<Usage>,
    end: Option<FailureCode>,
}

impl Outcome {
    fn bytes(&self) -> Vec<u8> {
        self.frames.iter().flat_map(|(bytes, _)| bytes.to_vec()).collect()
    }

    /// The frames one event each, so that it does not matter which of them shared one.
    fn events(&self) -> Vec<(Bytes, FrameFlags)> {
        let events = |(bytes, flags): &(Bytes, FrameFlags)| {
            let flags = *flags;
            split_blocks(bytes).map(move |block| (block.unwrap().raw, flags)).collect::<Vec<_>>()
        };
        self.frames.iter().flat_map(events).collect()
    }
}

fn observe(chunks: impl IntoIterator<Item = Bytes>) -> Outcome {
    let mut observer = Observer::new(1);
    let mut outcome = Outcome { frames: Vec::new(), usage: None, end: None };
    for chunk in chunks {
        observer.feed(chunk);
        while let Some(seen) = observer.next() {
            match seen {
                Ok(Seen::Frame { bytes, flags }) => outcome.frames.push((bytes, flags)),
                Ok(Seen::Usage(usage)) => outcome.usage = Some(usage),
                Err(error) => {
                    outcome.end = Some(error.failure().code);
                    assert!(observer.next().is_none(), "an error is the last item");
                    return outcome;
                }
            }
        }
        if observer.is_done() {
            return outcome;
        }
    }
    outcome.end = observer.finish().err().map(|error| error.failure().code);
    outcome
}

fn pieces(body: &Bytes, cuts: &[usize]) -> Vec<Bytes> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (body.len() + 1)).collect();
    cuts.extend([0, body.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| body.slice(pair[0]..pair[1])).collect()
}

fn content(text: &str) -> String {
    format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
}

#[test]
fn a_stream_cut_at_any_byte_is_never_taken_for_complete() {
    // API-7; scorecard: cut at every offset
    let body = chat_case("ok").unwrap().answer.body();
    let finish = b"\"finish_reason\":\"stop\"";
    let finish_at = body.windows(finish.len()).position(|window| window == finish).unwrap();
    let event_end = finish_at + body[finish_at..].windows(2).position(|window| window == b"\n\n").unwrap() + 2;
    for cut in 0..=body.len() {
        let outcome = observe([body.slice(..cut)]);
        assert_eq!(outcome.end.is_none(), cut >= event_end, "cut at {cut}");
        assert!(body.starts_with(&outcome.bytes()), "cut at {cut}");
    }
}

#[test]
fn events_that_came_together_share_a_frame_without_a_copy() {
    // API-10
    let events: Vec<String> = (0..5).map(|at| content(&at.to_string())).collect();
    let body = Bytes::from(events.concat());
    let outcome = observe([body.clone()]);
    assert_eq!(outcome.frames, [(body.clone(), FrameFlags::CONTENT)]);
    assert_eq!(outcome.frames[0].0.as_ptr(), body.as_ptr());

    let apart = observe(events.iter().map(|event| Bytes::copy_from_slice(event.as_bytes())));
    assert_eq!(apart.frames.len(), 5);
}

#[test]
fn frames_are_bounded_and_large_events_go_on_in_the_next_one() {
    // API-10, WIR-8
    let small = content(&"x".repeat(3_000));
    let large = content(&"y".repeat(40_000));
    let body = Bytes::from([small.repeat(7), large.clone(), small.clone()].concat());
    let outcome = observe([body.clone()]);
    assert_eq!(outcome.bytes(), body);
    assert!(outcome.frames.iter().all(|(bytes, _)| !bytes.is_empty() && bytes.len() <= FRAME_BYTES));
    let flags: Vec<_> = outcome.frames.iter().map(|(_, flags)| *flags).collect();
    let (more, content) = (FrameFlags::MORE, FrameFlags::CONTENT);
    assert_eq!(flags, [content, content, more, more, content, content]);
    let piece: usize = outcome.frames[2..5].iter().map(|(bytes, _)| bytes.len()).sum();
    assert_eq!(piece, large.len(), "a piece holds one event only");
}

#[test]
fn counts_on_every_token_do_not_cost_a_frame_each() {
    // Field report T11: no report per token beside the token
    // EXE-7; field report 84: what was reported before a cancel is not lost
    let counted = |count: u64| {
        Bytes::from(format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"x\"}}}}],\"usage\":{{\"completion_tokens\":{count}}}}}\n\n"
        ))
    };
    let mut observer = Observer::new(1);
    let mut usages = Vec::new();
    for count in 1..=20 {
        observer.feed(counted(count));
        while let Some(seen) = observer.next() {
            match seen.unwrap() {
                Seen::Usage(usage) => usages.push(usage.output_tokens.unwrap()),
                Seen::Frame { flags, .. } => assert_eq!(flags, FrameFlags::CONTENT),
            }
        }
    }
    assert_eq!(usages, [1, 9, 17]);
    assert_eq!(observer.last_usage().unwrap().output_tokens, Some(20));
}

#[test]
fn every_choice_must_finish() {
    // API-7
    let finish = |index: u32| {
        Bytes::from(format!(
            "data: {{\"choices\":[{{\"index\":{index},\"delta\":{{}},\"finish_reason\":\"stop\"}}]}}\n\n"
        ))
    };
    for (choices, finishes, complete) in [(1, &[0][..], true), (2, &[0], false), (2, &[1], false), (2, &[1, 0], true)] {
        let mut observer = Observer::new(choices);
        for index in finishes {
            observer.feed(finish(*index));
            while observer.next().is_some_and(|seen| seen.is_ok()) {}
        }
        assert_eq!(observer.is_complete(), complete, "{choices} {finishes:?}");
    }
    let other = Bytes::from("data: {\"choices\":[{\"index\":1,\"delta\":{\"content\":\"x\"}}]}\n\n");
    let mut observer = Observer::new(1);
    observer.feed(other);
    while observer.next().is_some() {}
    observer.feed(finish(0));
    while observer.next().is_some() {}
    assert!(!observer.is_complete(), "a choice nobody announced has begun and must end");
}

#[test]
fn a_json_tail_without_data_is_an_error_and_not_silence() {
    // API-7; field report 68
    for tail in [
        "{\"error\":{\"message\":\"x\"}}",
        "{\"error\":\"x\"}\n",
        "\n{\"object\":\"error\"}\n\n",
        "data: {\"error\":\"x\"}\n",
    ] {
        let outcome = observe([Bytes::from(content("a")), Bytes::from(tail)]);
        assert_eq!(outcome.end, Some(FailureCode::ProviderRejected), "{tail:?}");
    }
}

#[test]
fn responses_streams_are_told_apart_too() {
    // API-10
    let event = |kind: &str, rest: &str| Bytes::from(format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{rest}}}\n\n"));
    let usage = ",\"response\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":2}}";
    let start = || vec![event("response.created", ""), event("response.output_text.delta", ",\"delta\":\"x\"")];
    for (last, end) in [
        (event("response.completed", usage), None),
        (event("response.incomplete", usage), None),
        (event("response.failed", ""), Some(FailureCode::ProviderRejected)),
        (event("error", ",\"message\":\"x\""), Some(FailureCode::ProviderRejected)),
        (event("response.output_item.done", ""), Some(FailureCode::ProviderEndedWithoutTerminal)),
    ] {
        let outcome = observe([start(), vec![last.clone()]].concat());
        assert_eq!(outcome.end, end, "{last:?}");
        assert_eq!(outcome.frames[1].1, FrameFlags::CONTENT);
        assert_eq!(outcome.usage.is_some(), end.is_none());
    }
    // API-7, API-8: to a question for a chat they are no answer, and not an empty one.
    let mut observer = Observer::new(1).only_chat();
    observer.feed(start().concat().into());
    let seen: Vec<_> = std::iter::from_fn(|| observer.next()).collect();
    let [Ok(_), Err(error)] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!(error.failure().code, FailureCode::ProviderProtocol);
}

#[test]
fn messages_of_anthropic_s_api_are_told_apart_too() {
    // API-1, API-7, EXE-7: they end with an event of their own, and count a cache beside the input
    let event = |kind: &str, rest: &str| Bytes::from(format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{rest}}}\n\n"));
    let start = event(
        "message_start",
        r#","message":{"usage":{"input_tokens":3,"cache_read_input_tokens":4,"cache_creation_input_tokens":1,"output_tokens":0}}"#,
    );
    let delta = |kind: &str, text: &str| {
        event("content_block_delta", &format!(r#","index":0,"delta":{{"type":"x","{kind}":"{text}"}}"#))
    };
    let end = event("message_delta", r#","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}"#);
    let stop = event("message_stop", "");
    let ping = event("ping", "");
    let body = [start, ping, delta("text", ""), delta("thinking", "a"), delta("partial_json", "{"), end, stop.clone()];
    let outcome = observe(body.iter().cloned().chain([stop]));
    let (content, other) = (FrameFlags::CONTENT, FrameFlags::LIFECYCLE);
    let grew = other.with(FrameFlags::PROGRESS);
    let flags: Vec<_> = outcome.frames.iter().map(|(_, flags)| *flags).collect();
    assert_eq!(flags, [grew, other, other, content, content, grew, FrameFlags::TERMINAL], "nothing after its end");
    assert_eq!(outcome.end, None);
    let usage = outcome.usage.unwrap();
    assert_eq!((usage.input_tokens, usage.cached_input_tokens, usage.output_tokens), (Some(8), Some(4), Some(2)));
    let cut = observe(body[..6].to_vec());
    assert_eq!(cut.end, Some(FailureCode::ProviderEndedWithoutTerminal));
    let failed = event("error", r#","error":{"type":"overloaded_error","message":"x"}"#);
    assert_eq!(observe([body[0].clone(), failed]).end, Some(FailureCode::ProviderRejected));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_a_body_comes_to_does_not_depend_on_how_it_was_read(
        cuts in prop::collection::vec(any::<usize>(), 0..12), at in any::<prop::sample::Index>()
    ) {
        // API-10, API-11: all cases, any cuts
        let cases = chat_cases();
        let case = at.get(&cases);
        let body = case.answer.body();
        let whole = observe([body.clone()]);
        let cut = observe(pieces(&body, &cuts));
        // A CR at the end of a read hands its LF to the next event, so only streams without CR cut the same everywhere.
        if !body.contains(&b'\r') {
            prop_assert_eq!(cut.events(), whole.events(), "{}", case.name);
        }
        // The LF of a CRLF that ends the body may stay unread.
        let trim = |bytes: &[u8]| bytes.strip_suffix(b"\n").unwrap_or(bytes).to_vec();
        prop_assert_eq!(trim(&cut.bytes()), trim(&whole.bytes()));
        prop_assert_eq!((cut.usage, cut.end), (whole.usage, whole.end), "{}", case.name);
        prop_assert!(body.starts_with(&cut.bytes()));
        let ok = whole.end.is_none();
        let whole_body = case.name.starts_with("http_") || case.stream.end == CaseEnd::Stall || !body.starts_with(b"d");
        prop_assert!(whole_body || ok == (case.stream.end == CaseEnd::Ok) || case.name.ends_with("_eof") , "{}", case.name);
    }

    #[test]
    fn no_input_makes_it_panic_or_lose_order(
        parts in prop::collection::vec(prop_oneof![
            Just("data: ".to_owned()), Just("\n\n".to_owned()), Just("\r".to_owned()), Just("{\"choices\":[".to_owned()),
            Just("]}".to_owned()), Just("[DONE]".to_owned()), Just("error: x".to_owned()), Just(content("a")), ".{0,6}",
        ], 0..20),
        cuts in prop::collection::vec(any::<usize>(), 0..6)
    ) {
        let body = Bytes::from(parts.concat());
        let outcome = observe(pieces(&body, &cuts));
        prop_assert!(body.starts_with(&outcome.bytes()));
    }
}
