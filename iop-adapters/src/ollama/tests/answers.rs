//! ADP-3 for Ollama: each documented form of an answer, and what a run makes of it.

use iop_execution::event::ToolCallDelta;
use iop_execution::failure::{FailureCode, FailureStage, ProviderReason};
use iop_execution::{FinishReason, Usage};

use super::*;

fn text(kinds: &[RunEventKind]) -> String {
    kinds
        .iter()
        .filter_map(|kind| match kind {
            RunEventKind::Delta(text) => Some(text.as_str()),
            _ => None,
        })
        .collect()
}

fn failure(kinds: &[RunEventKind]) -> (FailureCode, FailureStage, Option<ProviderReason>, Option<u16>) {
    match kinds.last() {
        Some(RunEventKind::Error(failure)) => {
            assert!(!failure.message.contains("SENTINEL"), "{failure}");
            (failure.code, failure.stage, failure.provider_reason, failure.upstream_status)
        }
        other => panic!("{other:?}"),
    }
}

const COUNTS: Usage =
    Usage { input_tokens: Some(3), output_tokens: Some(2), reasoning_tokens: None, cached_input_tokens: None };

#[tokio::test]
async fn lines_become_text_and_the_last_one_the_end_with_its_counts() {
    // ADP-3, EXE-7
    let no_counts = line(&json!({ "content": "" }), &json!({ "done": true, "done_reason": "stop", "eval_count": 2 }));
    let no_reason = line(&json!({ "content": "" }), &json!({ "done": true, "prompt_eval_count": 3, "eval_count": 2 }));
    let (whole, last) = (say("Hé"), done("stop"));
    // In the middle of the two bytes of é.
    let cut = whole.find('é').unwrap() + 1;
    let halves = (whole.as_bytes()[..cut].to_vec(), whole.as_bytes()[cut..].to_vec());
    for (what, answer, finish, counts) in [
        ("usual", lines().write(say("H")).write(say("é")).write(done("stop")), FinishReason::Stop, COUNTS),
        ("length", lines().write(say("Hé")).write(done("length")), FinishReason::Length, COUNTS),
        ("no reason", lines().write(say("Hé")).write(no_reason), FinishReason::Stop, COUNTS),
        (
            "absent is not zero",
            lines().write(say("Hé")).write(no_counts),
            FinishReason::Stop,
            Usage { input_tokens: None, ..COUNTS },
        ),
        (
            "split in a character",
            lines().write(halves.0).write(halves.1).write(last.clone()),
            FinishReason::Stop,
            COUNTS,
        ),
        ("all at once", lines().write(format!("{whole}{last}")), FinishReason::Stop, COUNTS),
        (
            "no last line end",
            lines().write(whole.clone()).write(last.trim_end().to_owned()),
            FinishReason::Stop,
            COUNTS,
        ),
        (
            "one whole answer",
            Answer::json(200, done("stop").replace("\"content\":\"\"", "\"content\":\"Hé\"")),
            FinishReason::Stop,
            COUNTS,
        ),
        ("open after its end", lines().write(whole.clone()).write(last.clone()).hang(), FinishReason::Stop, COUNTS),
        ("reset after its end", lines().write(format!("{whole}{last}")).reset(), FinishReason::Stop, COUNTS),
    ] {
        let (kinds, usage) = answered(answer).await;
        assert_eq!(text(&kinds), "Hé", "{what}");
        assert_eq!(kinds.last(), Some(&RunEventKind::Complete(finish)), "{what}");
        assert_eq!(usage, Some(counts), "{what}");
        assert!(!kinds.contains(&RunEventKind::Delta(String::new())), "{what}: an empty piece is no output");
    }
}

#[tokio::test]
async fn thinking_is_reasoning() {
    // ADP-3
    let think = line(&json!({ "role": "assistant", "content": "", "thinking": "hm" }), &json!({}));
    let (kinds, _) = answered(lines().write(think).write(say("Hé")).write(done("stop"))).await;
    let want = [
        RunEventKind::ReasoningDelta("hm".into()),
        RunEventKind::Delta("Hé".into()),
        RunEventKind::Complete(FinishReason::Stop),
    ];
    assert_eq!(kinds, want);
}

#[tokio::test]
async fn tool_calls_get_own_numbers_one_id_each_and_arguments_as_text() {
    // ADP-3, API-9; field report 22 of the surfaces' bug log
    let calls = json!({ "role": "assistant", "content": "", "tool_calls": [
        { "function": { "index": 0, "name": "f", "arguments": { "a": 1.50 } } },
        { "id": "call_x", "function": { "index": 1, "name": "g", "arguments": {} } },
    ] });
    // Older versions begin every line with index 0, and a server that looks like Ollama sends text.
    let more = json!({ "content": "", "tool_calls": [
        { "id": "call_x", "function": { "index": 0, "name": "f", "arguments": "{\"b\":2}" } },
        { "function": { "name": "h" } },
    ] });
    let (kinds, usage) =
        answered(lines().write(line(&calls, &json!({}))).write(line(&more, &json!({}))).write(done("stop"))).await;
    let got: Vec<&ToolCallDelta> = kinds
        .iter()
        .filter_map(|kind| match kind {
            RunEventKind::ToolCallDelta(call) => Some(call),
            _ => None,
        })
        .collect();
    let parts: Vec<_> = got.iter().map(|call| (call.index, call.name.as_deref(), call.arguments.as_str())).collect();
    let want = [(0, Some("f"), "{\"a\":1.5}"), (1, Some("g"), "{}"), (2, Some("f"), "{\"b\":2}"), (3, Some("h"), "{}")];
    assert_eq!(parts, want);
    let ids: std::collections::BTreeSet<_> = got.iter().map(|call| call.id.clone().unwrap()).collect();
    assert!(ids.len() == 4 && ids.contains("call_x"), "{ids:?}");
    assert_eq!(kinds.last(), Some(&RunEventKind::Complete(FinishReason::ToolCalls)), "Ollama says stop");
    assert_eq!(usage, Some(COUNTS));
}

#[tokio::test]
async fn what_is_no_end_is_a_typed_error_at_the_stage_it_came() {
    // ADP-3, API-7; field reports 17, 38 of the surfaces' bug log
    use FailureCode::{ProviderEndedWithoutTerminal, ProviderProtocol, ProviderRejected, ProviderUnreachable};
    use FailureStage::{Prefill, Stream};
    let error = |text: &str| format!("{}\n", json!({ "error": text }));
    let cut = say("more")[..30].to_owned();
    let too_long = "the input length exceeds the context length SENTINEL";
    for (what, answer, want) in [
        (
            "an error line",
            lines().write(say("Hé")).write(error("an error was encountered while running the model SENTINEL")),
            (ProviderRejected, Stream, None, None),
        ),
        ("an error line first", lines().write(error("SENTINEL")), (ProviderRejected, Prefill, None, None)),
        (
            "an error and done",
            lines().write("{\"error\":\"SENTINEL\",\"done\":true}\n"),
            (ProviderRejected, Prefill, None, None),
        ),
        ("a clean end", lines().write(say("Hé")), (ProviderEndedWithoutTerminal, Stream, None, None)),
        ("nothing", lines(), (ProviderEndedWithoutTerminal, Prefill, None, None)),
        ("a cut line", lines().write(say("Hé")).write(cut), (ProviderEndedWithoutTerminal, Stream, None, None)),
        ("a reset", lines().write(say("Hé")).reset(), (ProviderUnreachable, Stream, None, None)),
        ("only loaded", lines().write(done("load")), (ProviderEndedWithoutTerminal, Prefill, None, None)),
        ("unloaded", lines().write(done("unload")), (ProviderEndedWithoutTerminal, Prefill, None, None)),
        ("no JSON", lines().write(say("Hé")).write("SENTINEL\n"), (ProviderProtocol, Stream, None, None)),
        ("an array", lines().write("[1]\n"), (ProviderProtocol, Prefill, None, None)),
        (
            "HTML",
            Answer::new(200).header("content-type", "text/html").write("<html>SENTINEL"),
            (ProviderProtocol, Prefill, None, None),
        ),
        (
            "no such model",
            Answer::json(404, error("model 'SENTINEL' not found, try pulling it first")),
            (ProviderRejected, Prefill, None, Some(404)),
        ),
        ("cancelled", Answer::json(499, error("SENTINEL")), (ProviderRejected, Prefill, None, Some(499))),
        (
            "busy",
            Answer::json(503, error("server busy, please try again.  maximum pending requests exceeded")),
            (ProviderRejected, Prefill, Some(ProviderReason::Overloaded), Some(503)),
        ),
        (
            "too long",
            Answer::json(400, error(too_long)),
            (ProviderRejected, Prefill, Some(ProviderReason::ContextLengthExceeded), Some(400)),
        ),
        (
            "too long, in the answer",
            lines().write(error(too_long)),
            (ProviderRejected, Prefill, Some(ProviderReason::ContextLengthExceeded), None),
        ),
    ] {
        let (kinds, _) = answered(answer).await;
        assert_eq!(failure(&kinds), want, "{what}");
    }
}

#[tokio::test]
async fn a_line_without_end_and_calls_without_number_are_bounded() {
    // ADP-1: limits
    let endless = (0..5).fold(lines().write("{\"message\":\""), |answer, _| answer.write(vec![b'x'; 1024 * 1024]));
    assert_eq!(failure(&answered(endless.hang()).await.0).0, FailureCode::ProviderProtocol);
    let call = json!({ "function": { "name": "f", "arguments": {} } });
    let many = line(&json!({ "tool_calls": vec![call; 129] }), &json!({}));
    assert_eq!(failure(&answered(lines().write(many).write(done("stop"))).await.0).0, FailureCode::ProviderProtocol);
    let nameless = line(&json!({ "tool_calls": [{ "function": { "arguments": {} } }] }), &json!({}));
    assert_eq!(failure(&answered(lines().write(nameless)).await.0).0, FailureCode::ProviderProtocol);
}

#[tokio::test]
async fn nobody_listening_is_unreachable() {
    // EXE-9
    let free_port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let adapter = Arc::new(Ollama::new(OllamaConfig::new(format!("http://{free_port}"))).unwrap());
    let kinds = collect(run(&adapter, hello())).await;
    assert_eq!(failure(&kinds).0, FailureCode::ProviderUnreachable);
}
