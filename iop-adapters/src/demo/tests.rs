use std::sync::Arc;

use futures_util::StreamExt;
use iop_execution::event::{CancelReason, RunEventKind};
use iop_execution::testkit::run_request;
use iop_execution::{RunEvent, RunExecution};
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn start(demo: Demo, request: &Value) -> RunExecution {
    let input = ChatInput::parse(request.to_string()).unwrap();
    RunExecution::run(Arc::new(demo), run_request(&Target::new(DEMO_TARGET).unwrap(), input))
}

async fn ask(request: &Value) -> Vec<RunEvent> {
    start(Demo::new(DemoPace::INSTANT), request).collect().await
}

fn user(text: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": text }] })
}

fn with(mut request: Value, key: &str, value: Value) -> Value {
    request[key] = value;
    request
}

fn weather() -> Value {
    json!([{ "type": "function", "function": { "name": "get_weather", "parameters": {
        "type": "object", "required": ["city", "days", "unit"],
        "properties": {
            "city": { "type": "string" }, "days": { "type": "integer" }, "unit": { "enum": ["c", "f"] },
            "optional": { "type": "string" },
        },
    }}}, { "type": "function", "function": { "name": "other" } }])
}

fn text(events: &[RunEvent]) -> String {
    let text = |event: &RunEvent| match &event.kind {
        RunEventKind::Delta(text) => Some(text.clone()),
        _ => None,
    };
    events.iter().filter_map(text).collect()
}

fn finish(events: &[RunEvent]) -> FinishReason {
    match &events.last().unwrap().kind {
        RunEventKind::Complete(finish) => *finish,
        other => panic!("{other:?}"),
    }
}

fn call(events: &[RunEvent]) -> (String, String) {
    let (mut name, mut arguments) = (String::new(), String::new());
    for event in events {
        if let RunEventKind::ToolCallDelta(piece) = &event.kind {
            assert_eq!(piece.id.is_some(), piece.name.is_some());
            name.push_str(piece.name.as_deref().unwrap_or_default());
            arguments.push_str(&piece.arguments);
        }
    }
    (name, arguments)
}

fn usage(events: &[RunEvent]) -> Usage {
    events.last().unwrap().usage.unwrap()
}

#[tokio::test]
async fn the_answer_is_a_function_of_the_last_user_message() {
    // BIN-1
    let once = text(&ask(&user("hello there")).await);
    assert!(once.contains("hello there") && once.contains("iop-demo"), "{once}");
    assert_eq!(once, text(&ask(&user("hello there")).await));
    let with_history = json!({ "messages": [
        { "role": "system", "content": "x" }, { "role": "user", "content": "before" },
        { "role": "assistant", "content": "y" }, { "role": "user", "content": "hello there" },
    ]});
    assert_eq!(once, text(&ask(&with_history).await));
    let others: std::collections::HashSet<_> = futures_util::stream::iter(0..20)
        .then(|at| async move { text(&ask(&user(&at.to_string())).await) })
        .collect()
        .await;
    assert_eq!(others.len(), 20);
    assert!(!text(&ask(&json!({ "messages": [] })).await).is_empty());
}

#[tokio::test]
async fn max_tokens_and_stop_are_honoured_and_words_are_counted() {
    // BIN-1, EXE-7
    let events = ask(&user("one two three")).await;
    assert_eq!(finish(&events), FinishReason::Stop);
    let deltas = events.iter().filter(|event| matches!(event.kind, RunEventKind::Delta(_))).count() as u64;
    assert_eq!(usage(&events).output_tokens, Some(deltas));
    assert_eq!(usage(&events).input_tokens, Some(3));
    assert_eq!(usage(&events).reasoning_tokens, None);

    for key in ["max_tokens", "max_completion_tokens"] {
        for max in [0, 1, 5] {
            let events = ask(&with(user("one two three"), key, json!(max))).await;
            assert_eq!(finish(&events), FinishReason::Length);
            assert_eq!(usage(&events).output_tokens, Some(max));
        }
    }
    let full = text(&events);
    for stop in [json!("said"), json!(["nowhere", "said", "You"]), json!("")] {
        let events = ask(&with(user("one two three"), "stop", stop.clone())).await;
        assert_eq!(finish(&events), FinishReason::Stop);
        let end = match &stop {
            Value::String(stop) if stop.is_empty() => full.len(),
            Value::String(stop) => full.find(stop.as_str()).unwrap(),
            _ => full.find("You").unwrap(),
        };
        assert_eq!(text(&events), full[..end]);
    }
}

#[tokio::test]
async fn it_reasons_when_asked_to() {
    // BIN-1
    let reasoned = |events: &[RunEvent]| {
        events.iter().filter(|event| matches!(event.kind, RunEventKind::ReasoningDelta(_))).count() as u64
    };
    let mut before = 0;
    for effort in ["low", "medium", "high"] {
        let events = ask(&with(user("hello"), "reasoning_effort", json!(effort))).await;
        assert!(reasoned(&events) > before, "{effort}");
        before = reasoned(&events);
        assert_eq!(usage(&events).reasoning_tokens, Some(before));
        assert!(usage(&events).output_tokens > Some(before));
        assert_eq!(text(&events), text(&ask(&user("hello")).await));
    }
    assert_eq!(reasoned(&ask(&with(user("hello"), "reasoning_effort", json!("none"))).await), 0);
}

#[tokio::test]
async fn tools_are_called_when_required_named_or_asked_for() {
    // BIN-1, EXE-8
    let request = |message: &str, choice: Value| with(with(user(message), "tools", weather()), "tool_choice", choice);
    let named = json!({ "type": "function", "function": { "name": "other" } });
    for (message, choice, want) in [
        ("hello", json!("required"), Some("get_weather")),
        ("hello", named.clone(), Some("other")),
        ("please call other.", Value::Null, Some("other")),
        ("Call `get_weather` now", json!("auto"), Some("get_weather")),
        ("call it: call get_weather", json!("auto"), Some("get_weather")),
        ("call get_weather", json!("none"), None),
        ("recall get_wea", json!("auto"), None),
        ("Weather in Rome?", json!("auto"), Some("get_weather")),
        ("Weather in Rome?", json!("none"), None),
        ("call", json!("auto"), None),
        ("hello", Value::Null, None),
    ] {
        let events = ask(&request(message, choice.clone())).await;
        let (name, arguments) = call(&events);
        assert_eq!(name, want.unwrap_or_default(), "{message} {choice}");
        assert_eq!(finish(&events), if want.is_some() { FinishReason::ToolCalls } else { FinishReason::Stop });
        if want == Some("get_weather") {
            let arguments: Value = serde_json::from_str(&arguments).unwrap();
            assert_eq!(arguments["days"], 1);
            assert_eq!(arguments["unit"], "c");
            assert_eq!(arguments["city"], message);
            assert_eq!(arguments.as_object().unwrap().len(), 3);
        }
    }
    let mut answered = request("call get_weather", Value::Null);
    answered["messages"]
        .as_array_mut()
        .unwrap()
        .push(json!({ "role": "tool", "tool_call_id": "c", "content": "sunny" }));
    assert!(text(&ask(&answered).await).contains("sunny"), "a result ends the call");
}

#[tokio::test]
async fn json_is_given_where_json_is_wanted() {
    let schema = json!({ "type": "json_schema", "json_schema": { "schema": {
        "type": "object", "required": ["list", "of"], "$defs": { "n": { "type": "number", "minimum": 3 } },
        "properties": { "list": { "type": "array", "minItems": 2, "items": { "$ref": "#/$defs/n" } }, "of": { "type": "boolean" } },
    }}});
    let answer: Value = serde_json::from_str(&text(&ask(&with(user("x"), "response_format", schema)).await)).unwrap();
    assert_eq!(answer, json!({ "list": [3, 3], "of": true }));
    let object = with(user("x"), "response_format", json!({ "type": "json_object" }));
    assert!(serde_json::from_str::<Value>(&text(&ask(&object).await)).unwrap().is_object());
}

#[tokio::test]
async fn what_it_cannot_do_is_refused() {
    // EXE-9
    for request in [
        with(user("x"), "n", json!(2)),
        with(user("x"), "tool_choice", json!("required")),
        with(user("x"), "tool_choice", json!({ "type": "function", "function": { "name": "nope" } })),
    ] {
        let events = ask(&request).await;
        let RunEventKind::Error(failure) = &events.last().unwrap().kind else { panic!("{events:?}") };
        assert_eq!(failure.code, FailureCode::InvalidRequest);
    }
    let input = ChatInput::parse("{}").unwrap();
    let other = run_request(&Target::new("other").unwrap(), input);
    let events: Vec<_> = RunExecution::run(Arc::new(Demo::default()), other).collect().await;
    let RunEventKind::Error(failure) = &events.last().unwrap().kind else { panic!("{events:?}") };
    assert_eq!(failure.code, FailureCode::UnknownTarget);
}

#[tokio::test(start_paused = true)]
async fn the_pace_is_200_ms_and_then_40_tokens_a_second() {
    // BIN-1
    let begin = Instant::now();
    let mut run = start(Demo::default(), &with(user("hello"), "max_tokens", json!(11)));
    let mut times = Vec::new();
    while let Some(event) = run.next().await {
        if matches!(event.kind, RunEventKind::Delta(_)) {
            times.push(begin.elapsed().as_millis());
        }
    }
    let want: Vec<u128> = (0..11).map(|at| 200 + 25 * at).collect();
    assert!(times.iter().zip(&want).all(|(got, want)| got.abs_diff(*want) <= 2), "{times:?}");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_ends_it_at_once() {
    // EXE-4
    let begin = Instant::now();
    let mut run = start(Demo::default(), &user("hello"));
    while run.next().await.is_some_and(|event| !matches!(event.kind, RunEventKind::Delta(_))) {}
    let before = begin.elapsed();
    run.cancel(CancelReason::Client);
    assert_eq!(run.next().await.unwrap().kind, RunEventKind::Cancelled(CancelReason::Client));
    assert_eq!(begin.elapsed(), before);
}

proptest! {
    #[test]
    fn tokens_joined_are_the_text(text in "[a-zé \\n…]{0,60}") {
        let tokens: Vec<_> = text::tokens(&text).collect();
        prop_assert_eq!(&tokens.concat(), &text);
        prop_assert!(tokens.iter().all(|token| !token.is_empty() && token.chars().count() <= 12));
    }
}

#[tokio::test(start_paused = true)]
async fn it_keeps_the_contract_of_providers() {
    // EXE-15
    use iop_execution::testkit::{CheckOptions, check_provider};
    for pace in [DemoPace::REALISTIC, DemoPace::INSTANT] {
        let options = CheckOptions::new(Target::new(DEMO_TARGET).unwrap());
        let report = check_provider(Arc::new(Demo::new(pace)), options).await;
        assert!(report.is_ok(), "{report}");
    }
}
