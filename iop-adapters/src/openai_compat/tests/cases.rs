use iop_execution::event::FinishReason;
use iop_execution::failure::{FailureCode, ProviderReason};
use iop_execution::testkit::Answer;
use iop_execution::testkit::cases::{CaseEnd, ChatCase, USAGE_CASES, chat_case, chat_cases};
use iop_execution::{AdapterKey, RunId};

use super::*;

/// Where this adapter is stricter than the standards: an error by SEC-1 or API-7 where a reader could make sense of it.
const STRICT_TUNNEL: [&str; 3] = ["json_not_sse", "gzip_json", "deepseek_blank_prefix_json"];

/// The failure each broken answer must come to.
fn code(name: &str) -> FailureCode {
    match name {
        "eof_after_delta" | "rst_after_delta" | "llama_killed" | "cut_mid_json_eof" | "reset_before_head" => {
            FailureCode::ProviderUnreachable
        }
        "no_done_no_finish"
        | "no_final_newline"
        | "cut_mid_json_clean"
        | "empty_stream"
        | "only_done"
        | "ollama_compat_error_mid" => FailureCode::ProviderEndedWithoutTerminal,
        name if STRICT_TUNNEL.contains(&name) => FailureCode::ProviderProtocol,
        name if name.starts_with("http_") || name.starts_with("error_") => FailureCode::ProviderRejected,
        "vllm_engine_dead" | "sglang_abort" | "deepseek_insufficient_resource" => FailureCode::ProviderRejected,
        other => panic!("no expectation for {other}"),
    }
}

fn check_tunnel(case: &ChatCase, stream: bool, frames: &[TunnelFrame]) {
    let (name, expected) = (case.name, if stream { case.stream } else { case.plain });
    let (last, before) = frames.split_last().unwrap();
    assert!(before.iter().all(|frame| !frame.is_terminal()), "{name}");
    let strict = if stream { STRICT_TUNNEL.contains(&name) } else { name == "gzip_json" };
    match (last, expected.end) {
        (TunnelFrame::End, CaseEnd::Ok) if !strict => {
            assert_eq!(text_of(&body_of(frames)), expected.text, "{name}");
            assert!(matches!(frames[0], TunnelFrame::Head(_)), "{name}");
        }
        (TunnelFrame::Failed(failure), end) if strict || end == CaseEnd::Error => {
            assert_eq!(failure.code, code(name), "{name}");
            let text = if strict { "" } else { expected.text };
            assert_eq!(text_of(&body_of(frames)), text, "{name}: what came before the error passes");
            assert!(!format!("{failure:?} {failure}").contains("boom"), "SEC-2: {name}");
        }
        (TunnelFrame::Cancelled(_), CaseEnd::Stall) => assert_eq!(text_of(&body_of(frames)), expected.text, "{name}"),
        (last, end) => panic!("{name}: {last:?} instead of {end:?}"),
    }
}

#[tokio::test]
async fn every_case_ends_in_its_text_or_a_typed_error_through_a_tunnel() {
    // API-6, API-7, API-11, ADP-3
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    let cases = chat_cases();
    assert_eq!(cases.len(), 87);
    for case in &cases {
        for stream in [true, false] {
            let mut execution = tunnel(&adapter, case.name, stream);
            let mut frames = Vec::new();
            let stalls = stream && case.stream.end == CaseEnd::Stall;
            while let Some(frame) = next(&mut execution).await {
                frames.push(frame);
                if stalls && body_of(&frames) == case.answer.body() {
                    execution.cancel(iop_execution::CancelReason::Client);
                }
            }
            check_tunnel(case, stream, &frames);
        }
    }
    assert_eq!(backend.traffic().requests, 2 * 87, "NOD-10: one request per dispatch");
}

#[tokio::test]
async fn every_case_ends_in_its_text_or_a_typed_error_as_a_run() {
    // API-7, API-9, ADP-3
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for (before, case) in (0..).zip(chat_cases()) {
        let name = case.name;
        let mut execution = run(&adapter, name);
        let mut events = Vec::new();
        loop {
            let silent =
                case.stream.end == CaseEnd::Stall && run_text(&events) == case.stream.text && !execution.is_cancelled();
            tokio::select! {
                event = next(&mut execution) => match event {
                    Some(event) => events.push(event),
                    None => break,
                },
                _ = backend.wait_for(|traffic| traffic.requests > before && traffic.waiting > 0), if silent => {
                    execution.cancel(iop_execution::CancelReason::Client);
                }
            }
        }
        let (last, before) = events.split_last().unwrap();
        assert!(before.iter().all(|event| !event.kind.is_terminal()), "{name}");
        let strict = name == "gzip_json";
        match (&last.kind, case.stream.end) {
            (RunEventKind::Complete(finish), CaseEnd::Ok) if !strict => {
                assert_eq!(run_text(&events), case.stream.text, "{name}");
                let tools = name.starts_with("tool_");
                assert_eq!(*finish == FinishReason::ToolCalls, tools, "{name}");
            }
            (RunEventKind::Error(failure), end) if strict || end == CaseEnd::Error => {
                assert_eq!(failure.code, code(name), "{name}");
                assert!(!format!("{failure:?} {failure}").contains("boom"), "SEC-2: {name}");
            }
            (RunEventKind::Cancelled(_), CaseEnd::Stall) => {}
            (last, end) => panic!("{name}: {last:?} instead of {end:?}"),
        }
    }
    assert_eq!(backend.traffic().requests, 87, "NOD-10: one request per dispatch");
}

#[tokio::test]
async fn tunnel_bytes_are_the_providers_bytes() {
    // API-10
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for name in [
        "ok",
        "ok_one_write",
        "crlf",
        "crlf_split",
        "cr",
        "bom",
        "comments",
        "multiline_data",
        "utf8_split",
        "byte_by_byte",
        "retry_only",
        "blank_lines",
        "event_id_retry",
        "usage_twice",
        "llama_n2_two_usages",
    ] {
        let frames = collect(&mut tunnel(&adapter, name, true)).await;
        let sent = chat_case(name).unwrap().answer.body();
        assert_eq!(Bytes::from(body_of(&frames)), sent, "{name}");
    }
}

#[tokio::test]
async fn statuses_reasons_and_waits_are_kept_and_texts_are_not() {
    // ADP-3, API-5, EXE-9
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for (name, status, reason, wait) in [
        ("http_429_ra1", 429, Some(ProviderReason::Overloaded), Some(1_000)),
        ("http_429_ms", 429, Some(ProviderReason::Overloaded), Some(300)),
        ("http_429_ra300", 429, Some(ProviderReason::Overloaded), Some(300_000)),
        ("http_429_noretry", 429, Some(ProviderReason::Overloaded), None),
        ("http_503", 503, None, None),
        ("http_401", 401, Some(ProviderReason::AuthFailed), None),
        ("http_400", 400, None, None),
        ("http_404", 404, None, None),
        ("http_502_html", 502, None, None),
        ("http_500_empty", 500, None, None),
        ("vllm_engine_dead", 500, None, None),
        ("error_flat_mid", 400, None, None),
    ] {
        let frames = collect(&mut tunnel(&adapter, name, true)).await;
        let Some(TunnelFrame::Failed(failure)) = frames.last() else { panic!("{name}: {frames:?}") };
        assert_eq!(failure.upstream_status, Some(status), "{name}");
        assert_eq!(failure.provider_reason, reason, "{name}");
        assert_eq!(failure.retry_after_ms, wait, "{name}");
        // A JSON answer passes, but not what a server says about a key, and no HTML.
        let bare = ["http_401", "http_502_html", "http_500_empty"].contains(&name);
        assert_eq!(frames.len() == 1, bare, "{name}");
        assert!(!format!("{failure}").contains("boom"), "{name}: the failure itself has no provider text");
    }
}

#[tokio::test]
async fn usage_reaches_the_caller_whatever_form_it_has() {
    // EXE-7, API-4
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for name in USAGE_CASES.into_iter().chain(["json_not_sse"]) {
        let stream = name != "json_not_sse";
        let frames = collect(&mut tunnel(&adapter, name, stream)).await;
        let usages: Vec<_> = frames
            .iter()
            .filter_map(|frame| match frame {
                TunnelFrame::Usage(usage) => Some((usage.input_tokens, usage.output_tokens)),
                _ => None,
            })
            .collect();
        assert_eq!(usages, [(Some(3), Some(2))], "{name}: once, never summed");

        let events = collect(&mut run(&adapter, name)).await;
        let usage = events.last().unwrap().usage.unwrap();
        assert_eq!((usage.input_tokens, usage.output_tokens), (Some(3), Some(2)), "{name}");
    }
    let events = collect(&mut run(&adapter, "no_done")).await;
    assert_eq!(events.last().unwrap().usage, None, "absent is not zero");
}

#[tokio::test]
async fn a_context_overflow_is_recognised_under_any_status() {
    // ADP-3; field report 66
    let overflow = r#"{"error":{"message":"the request exceeds the available context size","n_ctx":4096}}"#;
    for status in [400, 500] {
        let answer = Answer::json(status, overflow);
        let backend = ScriptedBackend::builder().model("m", answer).start().await.unwrap();
        let frames = collect(&mut tunnel(&adapter(&backend), "m", true)).await;
        let Some(TunnelFrame::Failed(failure)) = frames.last() else { panic!("{frames:?}") };
        assert_eq!(failure.provider_reason, Some(ProviderReason::ContextLengthExceeded));
    }
}

#[tokio::test]
async fn a_compressed_or_endless_error_text_does_not_hide_its_status() {
    // ADP-3, SEC-1
    use iop_execution::testkit::Answer;
    let backend = ScriptedBackend::builder()
        .model("gzip", Answer::json(429, "\u{1f}x").header("content-encoding", "gzip"))
        .model("long", Answer::new(429).write("x".repeat(70_000)).hang())
        .start()
        .await
        .unwrap();
    for name in ["gzip", "long"] {
        let frames = collect(&mut tunnel(&adapter(&backend), name, true)).await;
        let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!((failure.code, failure.upstream_status), (FailureCode::ProviderRejected, Some(429)), "{name}");
    }
}

#[tokio::test]
async fn a_finished_stream_that_stays_open_ends_by_itself() {
    // API-6: terminal_linger
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for name in ["stall_after_finish", "done_then_hang"] {
        let frames = collect(&mut tunnel(&adapter, name, true)).await;
        assert!(matches!(frames.last(), Some(TunnelFrame::End)), "{name}");
        let closed = backend.wait_for(|traffic| traffic.waiting == 0 && traffic.answering == 0);
        let traffic = tokio::time::timeout(PATIENCE, closed).await.unwrap();
        assert!(traffic.client_closed > 0, "{name}");
    }
}

#[tokio::test]
async fn a_run_asks_for_a_stream_with_usage_under_the_targets_name() {
    // EXE-16; field report 83
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    collect(&mut run(&adapter(&backend), "ok")).await;
    let sent: serde_json::Value = serde_json::from_slice(&backend.received()[0].body).unwrap();
    assert_eq!(sent["model"], "ok");
    assert_eq!(sent["stream"], true);
    assert_eq!(sent["stream_options"]["include_usage"], true);
}

#[tokio::test]
async fn tool_calls_come_with_own_indexes_and_text_arguments() {
    // EXE-8, API-9
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for (name, want) in [
        ("tool_split", vec![(0, "f", "{\"a\":1}")]),
        ("tool_no_index", vec![(0, "f", "{\"a\":1}")]),
        ("tool_same_index", vec![(0, "f", "{\"a\":1}"), (1, "g", "{\"b\":2}")]),
        ("tool_args_object", vec![(0, "f", "{\"a\":1}")]),
    ] {
        let mut calls: Vec<(u32, String, String)> = Vec::new();
        for event in collect(&mut run(&adapter, name)).await {
            let RunEventKind::ToolCallDelta(piece) = event.kind else { continue };
            if let Some(call) = piece.name {
                assert!(piece.id.is_some(), "{name}");
                calls.push((piece.index, call, String::new()));
            }
            calls[piece.index as usize].2.push_str(&piece.arguments);
        }
        let calls: Vec<_> = calls.iter().map(|(at, name, args)| (*at, name.as_str(), args.as_str())).collect();
        assert_eq!(calls, want, "{name}");
    }
}

#[tokio::test]
async fn frames_carry_what_they_are() {
    // API-10
    const C: FrameFlags = FrameFlags::CONTENT;
    const L: FrameFlags = FrameFlags::LIFECYCLE;
    const T: FrameFlags = FrameFlags::TERMINAL;
    let u = FrameFlags::USAGE.with(FrameFlags::PROGRESS);
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for (name, want) in [
        ("ok", vec![L, C, L, u, T]),
        ("usage_no_choices", vec![L, C, L, u, T]),
        ("usage_twice", vec![L, C, L, u, FrameFlags::USAGE, T]),
        ("usage_in_finish", vec![L, C, L.with(FrameFlags::PROGRESS), T]),
        ("reasoning", vec![L, C, C, L, T]),
        ("first_choices_empty", vec![L, L, C, L, T]),
        ("llama_prompt_progress", vec![L.with(FrameFlags::PROGRESS), C, L, T]),
        ("retry_only", vec![FrameFlags::NONE, L, FrameFlags::NONE, C, L, T]),
    ] {
        let mut flags = flags_of(&collect(&mut tunnel(&adapter, name, true)).await);
        // Reasoning and text may have been read at once; then they share a frame.
        flags.dedup_by(|a, b| name == "reasoning" && a == b);
        let mut want = want;
        want.dedup_by(|a, b| name == "reasoning" && a == b);
        assert_eq!(flags, want, "{name}");
    }
}

#[tokio::test]
async fn a_choice_that_begins_late_is_waited_for_also_when_the_body_came_in_pieces() {
    // API-6, API-7: the wait after a finish reason must not cut a second choice
    let choice = |index: u32, delta: &str, finish: &str| {
        format!(r#"data: {{"choices":[{{"index":{index},"delta":{delta},"finish_reason":{finish}}}]}}"#) + "\n\n"
    };
    let answer = Answer::events()
        .write(choice(0, r#"{"content":"a"}"#, "null") + &choice(0, "{}", r#""stop""#))
        .pause()
        .write(choice(1, r#"{"content":"b"}"#, "null") + &choice(1, "{}", r#""stop""#) + "data: [DONE]\n\n");
    let backend = ScriptedBackend::builder().otherwise(answer).start().await.unwrap();
    let mut config = OpenAiCompatConfig::new(backend.base_url());
    config.terminal_linger = Duration::ZERO;
    let adapter: Arc<dyn Provider> = Arc::new(OpenAiCompat::new(config).unwrap());
    for pieces in [[r#"{"model":"m","n"#, r#"":2,"stream":true}"#], [r#"{"model":"m","n":2"#, r#","stream":true}"#]] {
        let length = pieces.iter().map(|piece| piece.len() as u64).sum();
        let chunks = pieces.map(|piece| Ok(Bytes::from_static(piece.as_bytes())));
        let body = RequestBody::chunks(length, futures_util::stream::iter(chunks));
        let request = TunnelRequest::post(
            RunId::from_bytes([3; 16]),
            AdapterKey::new("a").unwrap(),
            Target::new("m").unwrap(),
            "/v1/chat/completions",
            body,
        );
        let mut frames = TunnelExecution::tunnel(Arc::clone(&adapter), request);
        let mut seen = Vec::new();
        while let Some(frame) = frames.next().await {
            if seen.iter().filter(|frame| matches!(frame, TunnelFrame::Body { .. })).count() == 1 {
                backend.release();
            }
            seen.push(frame);
        }
        assert_eq!(seen.last(), Some(&TunnelFrame::End), "{seen:?}");
        let text: Vec<u8> = seen
            .iter()
            .flat_map(|frame| match frame {
                TunnelFrame::Body { bytes, .. } => bytes.to_vec(),
                _ => Vec::new(),
            })
            .collect();
        assert!(String::from_utf8(text).unwrap().contains(r#""content":"b""#));
    }
}
