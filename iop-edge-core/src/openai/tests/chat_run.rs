use iop_execution::{CancelReason, FinishReason, ToolCallDelta, Usage};
use serde_json::json;

use super::*;

fn chunks(text: &str) -> Vec<Value> {
    let events: Vec<_> =
        text.strip_suffix("\n\n").unwrap().split("\n\n").map(|e| e.strip_prefix("data: ").unwrap()).collect();
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(*last, "[DONE]");
    chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
}

fn call(index: u32, id: Option<&str>, name: Option<&str>, arguments: &str) -> RunEventKind {
    RunEventKind::ToolCallDelta(ToolCallDelta {
        index,
        id: id.map(Into::into),
        name: name.map(Into::into),
        arguments: arguments.into(),
    })
}

fn with_usage(kinds: Vec<RunEventKind>, usage: Usage) -> Reply {
    let last = kinds.len();
    let events: Vec<_> = (1..)
        .zip(kinds)
        .map(|(seq, kind)| RunEvent { seq, kind, usage: (seq == last as u64).then_some(usage) })
        .collect();
    Reply::Run(Box::pin(stream::iter(events)))
}

const USAGE: Usage =
    Usage { input_tokens: Some(3), output_tokens: Some(2), reasoning_tokens: Some(1), cached_input_tokens: None };

#[tokio::test(start_paused = true)]
async fn a_run_streams_the_bytes_a_tunnel_would() {
    // API-9
    let kinds = vec![
        RunEventKind::Start,
        RunEventKind::ReasoningDelta("hm".into()),
        RunEventKind::Delta("a \"b\"\n".into()),
        RunEventKind::Delta(String::new()),
        RunEventKind::Complete(FinishReason::Stop),
    ];
    let rig = Rig::new([with_usage(kinds, USAGE)]);
    let response = rig.chat(STREAM_USAGE).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let (_, text) = whole(response).await;
    let chunks = chunks(&text);
    let id = format!("chatcmpl-{}", "ab".repeat(16));
    for chunk in &chunks {
        assert_eq!((&chunk["id"], &chunk["created"], &chunk["model"]), (&json!(id), &json!(1_234), &json!("m")));
        assert_eq!(chunk["object"], "chat.completion.chunk");
    }
    let deltas: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    assert_eq!(
        deltas,
        [
            json!({"role":"assistant","content":""}),
            json!({"reasoning_content":"hm","reasoning":"hm"}),
            json!({"content":"a \"b\"\n"}),
            json!({}),
            Value::Null,
        ]
    );
    let finishes: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["finish_reason"].clone()).collect();
    assert_eq!(finishes, [json!(null), json!(null), json!(null), json!("stop"), json!(null)]);
    assert_eq!(
        chunks[4],
        json!({"id":id,"object":"chat.completion.chunk","created":1234,"model":"m","choices":[],
            "usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"completion_tokens_details":{"reasoning_tokens":1}}})
    );
    assert_eq!(rig.record().usage, Some(USAGE));
    assert_eq!(rig.sent().1, STREAM_USAGE, "a run gets the client's bytes");
}

#[tokio::test(start_paused = true)]
async fn usage_of_a_run_is_told_only_if_asked_for_and_known() {
    // API-4
    let kinds = || vec![RunEventKind::Delta("a".into()), RunEventKind::Complete(FinishReason::Length)];
    let partial = Usage { output_tokens: Some(2), ..Usage::default() };
    for (body, usage, want) in [(STREAM, USAGE, 3), (STREAM_USAGE, USAGE, 4), (STREAM_USAGE, partial, 3)] {
        let rig = Rig::new([with_usage(kinds(), usage)]);
        assert_eq!(chunks(&rig.answer(body).await.1).len(), want);
        assert_eq!(rig.record().usage, Some(usage));
    }
}

#[tokio::test(start_paused = true)]
async fn tool_calls_of_a_run_have_ids_once_and_the_right_finish() {
    // API-9
    let kinds = || {
        [
            call(0, Some("c0"), Some("f"), ""),
            call(0, None, None, "{\"a\":"),
            call(1, None, Some("g"), "{}"),
            call(0, None, None, "1}"),
            RunEventKind::Complete(FinishReason::Stop),
        ]
    };
    let made_up = format!("call_{}1", "ab".repeat(16));
    let rig = Rig::new([run(kinds())]);
    let chunks = chunks(&rig.answer(STREAM).await.1);
    let pieces: Vec<_> =
        chunks[1..5].iter().map(|chunk| chunk["choices"][0]["delta"]["tool_calls"][0].clone()).collect();
    assert_eq!(
        pieces,
        [
            json!({"index":0,"id":"c0","type":"function","function":{"name":"f","arguments":""}}),
            json!({"index":0,"function":{"arguments":"{\"a\":"}}),
            json!({"index":1,"id":made_up,"type":"function","function":{"name":"g","arguments":"{}"}}),
            json!({"index":0,"function":{"arguments":"1}"}}),
        ]
    );
    assert_eq!(chunks[5]["choices"][0]["finish_reason"], "tool_calls");

    let rig = Rig::new([run(kinds())]);
    let answer: Value = serde_json::from_str(&rig.answer(CHAT).await.1).unwrap();
    assert_eq!(
        answer["choices"][0],
        json!({"index":0,"logprobs":null,"finish_reason":"tool_calls","message":{"role":"assistant","content":null,
            "refusal":null,"tool_calls":[
                {"id":"c0","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},
                {"id":made_up,"type":"function","function":{"name":"g","arguments":"{}"}}]}})
    );
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_not_streamed_is_one_object() {
    // API-9
    let kinds = vec![
        RunEventKind::Start,
        RunEventKind::ReasoningDelta("hm".into()),
        RunEventKind::Delta("a".into()),
        RunEventKind::Delta("b".into()),
        RunEventKind::Complete(FinishReason::Stop),
    ];
    let rig = Rig::with([with_usage(kinds, USAGE)], |config| config.with_response_model(ResponseModel::Target));
    let response = rig.chat(CHAT).await;
    assert_eq!(response.headers()["content-type"], "application/json");
    assert!(http_body::Body::size_hint(response.body()).exact().is_some(), "its length is known");
    let (status, text) = whole(response).await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, 200);
    assert_eq!(
        answer,
        json!({"id":format!("chatcmpl-{}", "ab".repeat(16)),"object":"chat.completion","created":1234,"model":"org/target",
            "choices":[{"index":0,"message":{"role":"assistant","content":"ab","refusal":null,"reasoning_content":"hm",
                "reasoning":"hm"},"logprobs":null,"finish_reason":"stop"}],
            "usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"completion_tokens_details":{"reasoning_tokens":1}}})
    );
    assert_eq!(rig.record().outcome, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn an_empty_answer_is_an_answer() {
    // REC-2
    let rig = Rig::new([run([RunEventKind::Start, RunEventKind::Complete(FinishReason::Stop)])]);
    let (status, text) = rig.answer(STREAM).await;
    assert_eq!((status, chunks(&text).len()), (200, 2));
    let rig = Rig::new([run([RunEventKind::Complete(FinishReason::Stop)])]);
    let answer: Value = serde_json::from_str(&rig.answer(CHAT).await.1).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "");
    assert!(answer.get("usage").is_none(), "absent is not zero");
}

#[tokio::test(start_paused = true)]
async fn a_run_that_fails_is_a_status_before_content_and_an_event_after_it() {
    // REC-2, REC-6, API-6
    let error = || RunEventKind::Error(ExecutionFailure::refused(FailureCode::ResponseStalled, "it stalled"));
    for (kinds, status) in [
        (vec![RunEventKind::Start, error()], 504),
        (vec![RunEventKind::Start, RunEventKind::Cancelled(CancelReason::Drain)], 503),
        (vec![RunEventKind::Start], 503),
        (vec![RunEventKind::Delta("a".into()), error()], 200),
    ] {
        for body in [CHAT, STREAM] {
            let rig = Rig::new([run(kinds.clone())]);
            let (found, text) = rig.answer(body).await;
            let status = if body == CHAT && status == 200 { 504 } else { status };
            assert_eq!(found, status);
            assert!(!text.contains("[DONE]"));
            if status == 200 {
                let (before, last) = text.trim_end().rsplit_once("\n\n").unwrap();
                assert!(before.contains("\"a\""));
                assert_eq!(error_of(&format!("{last}\n\n"))["code"], "response_stalled");
            } else {
                error_of(&text);
            }
            // A stall is considered for another attempt; this one was not seen to end.
            assert!(matches!(rig.record().outcome, Outcome::Failed | Outcome::Ineligible));
        }
    }
}
