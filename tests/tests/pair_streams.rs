//! Decides whether an answer is the same whichever way it took: run or tunnel, streamed or whole, both links, in virtual
//! time.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::sync::Arc;

use iop_edge_core::openai::{OpenAiConfig, ResponseModel};
use iop_execution::failure::ProviderReason;
use iop_execution::testkit::cases::full_answer;
use iop_execution::testkit::{Script, ScriptHandle, ScriptedProvider};
use iop_execution::{FailureStage, FinishReason, FrameFlags, Provider, ProviderError, Target, ToolCallDelta, Usage};
use iop_tests::answer::{Outcome, event_json, read};
use iop_tests::pair::{Pair, PairPlan, PairProvider, one_attempt};
use iop_tests::wire_client::{Answer, Request};
use serde_json::{Value, json};

const COUNTS: Usage =
    Usage { input_tokens: Some(3), output_tokens: Some(2), reasoning_tokens: None, cached_input_tokens: None };

fn target(name: &str) -> Target {
    Target::new(name).unwrap()
}

/// One provider by tunnel (`tunnel…`) and one by run (`run…`), which follow the same script.
async fn pair(script: Script, direct: bool) -> (Pair, ScriptHandle, ScriptHandle) {
    pair_with(script.clone(), script, one_attempt(), direct).await
}

async fn pair_with(
    tunnel: Script,
    run: Script,
    config: OpenAiConfig,
    direct: bool,
) -> (Pair, ScriptHandle, ScriptHandle) {
    let whole = Script::new()
        .head(http::StatusCode::OK, "application/json")
        .frame(full_answer().to_string(), FrameFlags::CONTENT);
    let (tunnels, tunnel_calls) =
        ScriptedProvider::new(tunnel).with_tunnels().on_target(target("tunnel-whole"), whole).into_parts();
    let (runs, run_calls) = ScriptedProvider::new(run).into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", tunnels, 8, &["tunnel", "tunnel-whole"]),
        PairProvider::new("r", runs, 8, &["run"]).by_run(),
    ])
    .openai(config);
    let plan = if direct { plan.direct() } else { plan };
    (Pair::start(plan).await, tunnel_calls, run_calls)
}

fn whole(text: &str) -> Outcome {
    Outcome::Whole { text: text.to_owned() }
}

#[tokio::test(start_paused = true)]
async fn both_wires_give_the_same_text_over_both_links() {
    // API-1, API-9, WIR-2, WIR-6, SEL-3
    for direct in [true, false] {
        let script = Script::new().delta("Hel").delta("lo").usage(COUNTS);
        let (pair, tunnel_calls, run_calls) = pair(script, direct).await;
        for model in ["tunnel", "run"] {
            assert_eq!(read(&pair.ask(&Request::chat(model, true)).await), whole("Hello"), "{model} {direct}");
        }
        assert_eq!(read(&pair.ask(&Request::chat("run", false)).await), whole("Hello"));
        assert_eq!(read(&pair.ask(&Request::chat("tunnel-whole", false)).await), whole("Hé"));
        pair.at_rest().await;
        assert_eq!((tunnel_calls.counts().returned, run_calls.counts().returned), (2, 2));
        assert!(matches!(&tunnel_calls.calls()[0], iop_execution::testkit::ScriptedCall::Tunnel { .. }));
        assert!(matches!(&run_calls.calls()[0], iop_execution::testkit::ScriptedCall::Run(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn every_chunk_of_a_stream_has_one_id_one_time_and_the_public_model() {
    // API-5, API-9, API-10; field report T16
    let (pair, ..) = pair(Script::new().delta("a").delta("b").usage(COUNTS), false).await;
    let mut ids = Vec::new();
    for model in ["tunnel", "run"] {
        for _ in 0..2 {
            let request = Request::chat_with(model, true, &json!({ "stream_options": { "include_usage": true } }));
            let answer = pair.ask(&request.header("x-request-id", "the-same")).await;
            let chunks = event_json(&answer.body());
            assert!(chunks.len() >= 4, "{chunks:?}");
            for chunk in &chunks {
                assert_eq!(chunk["model"], model);
                assert_eq!((&chunk["id"], &chunk["created"]), (&chunks[0]["id"], &chunks[0]["created"]));
                assert_eq!(chunk["object"], "chat.completion.chunk");
            }
            assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
            ids.push(answer.head.header("x-request-id").unwrap().to_owned());
        }
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn the_target_s_own_name_stays_if_the_config_says_so() {
    // API-10
    let config = one_attempt().with_response_model(ResponseModel::Target);
    let (pair, ..) = pair_with(Script::text("a"), Script::text("a"), config, false).await;
    let chunks = event_json(&pair.ask(&Request::chat("tunnel", true)).await.body());
    assert!(!chunks.is_empty() && chunks.iter().all(|chunk| chunk["model"] == "m"), "{chunks:?}");
}

/// Usage objects that a client sees.
fn usages(answer: &Answer, stream: bool) -> Vec<Value> {
    let chunks = if stream { event_json(&answer.body()) } else { vec![answer.json()] };
    chunks.iter().map(|chunk| chunk["usage"].clone()).filter(|usage| !usage.is_null()).collect()
}

#[tokio::test(start_paused = true)]
async fn usage_is_always_asked_of_a_stream_and_shown_only_to_who_asked() {
    // API-4, EXE-7; field report 83: the table of stream × include_usage
    let (pair, tunnel_calls, _) = pair(Script::new().delta("a").usage(COUNTS), false).await;
    for (model, stream, include, shown) in [
        ("tunnel", true, true, 1),
        ("tunnel", true, false, 0),
        ("tunnel-whole", false, false, 1),
        ("run", true, true, 1),
        ("run", true, false, 0),
        ("run", false, false, 1),
    ] {
        let more = if include { json!({ "stream_options": { "include_usage": true } }) } else { json!({}) };
        let answer = pair.ask(&Request::chat_with(model, stream, &more)).await;
        assert!(matches!(read(&answer), Outcome::Whole { .. }), "{}", answer.text());
        let seen = usages(&answer, stream);
        assert_eq!(seen.len(), shown, "{model} {stream} {include}: {}", answer.text());
        for usage in seen {
            assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(3), &json!(2)), "{model}");
        }
    }
    let asked: Vec<Value> =
        tunnel_calls.calls().iter().map(|call| serde_json::from_slice(call.body()).unwrap()).collect();
    assert_eq!(asked[0]["stream_options"], json!({ "include_usage": true }));
    assert_eq!(asked[1]["stream_options"]["include_usage"], true, "asked although the client did not");
    assert!(asked[2].get("stream_options").is_none(), "a whole answer has it anyway; some servers refuse the option");
    // The fourth cell: stream_options without a stream is the client's error, as at OpenAI.
    let request = Request::chat_with("tunnel", false, &json!({ "stream_options": { "include_usage": true } }));
    assert_eq!(pair.ask(&request).await.status(), 400);
    assert_eq!(tunnel_calls.counts().calls, 3);
}

#[tokio::test(start_paused = true)]
async fn usage_that_no_provider_reported_is_absent_and_not_zero() {
    // API-4, EXE-7; field report 84
    let (pair, ..) = pair(Script::text("a"), false).await;
    for model in ["tunnel", "run"] {
        let request = Request::chat_with(model, true, &json!({ "stream_options": { "include_usage": true } }));
        let answer = pair.ask(&request).await;
        assert_eq!(usages(&answer, true), Vec::<Value>::new(), "{model}: {}", answer.text());
    }
}

#[tokio::test(start_paused = true)]
async fn tool_calls_and_reasoning_pass_both_wires_alike() {
    // EXE-8, API-9, API-10
    let call = |index, id: &str, arguments: &str| ToolCallDelta {
        index,
        id: (!id.is_empty()).then(|| id.to_owned()),
        name: (!id.is_empty()).then(|| "f".to_owned()),
        arguments: arguments.to_owned(),
    };
    let script = Script::new()
        .reasoning("hm")
        .tool_call(call(0, "call_1", "{\"a\""))
        .tool_call(call(0, "", ":1}"))
        .tool_call(call(1, "call_2", "{}"))
        .finish(FinishReason::ToolCalls);
    let (pair, ..) = pair(script, false).await;
    for model in ["tunnel", "run"] {
        let answer = pair.ask(&Request::chat(model, true)).await;
        assert_eq!(read(&answer), whole(""), "{model}: {}", answer.text());
        let (mut reasoning, mut calls, mut finish) = (String::new(), [String::new(), String::new()], String::new());
        for chunk in event_json(&answer.body()) {
            let choice = &chunk["choices"][0];
            let thought = choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
            if model == "run" {
                let other = choice["delta"]["reasoning"].as_str().unwrap_or_default();
                assert_eq!(other, thought, "both names, one text");
            }
            reasoning.push_str(thought);
            for piece in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                let index = usize::try_from(piece["index"].as_u64().unwrap()).unwrap();
                calls[index].push_str(piece["function"]["arguments"].as_str().unwrap_or_default());
            }
            finish.push_str(choice["finish_reason"].as_str().unwrap_or_default());
        }
        assert_eq!((reasoning.as_str(), finish.as_str()), ("hm", "tool_calls"), "{model}");
        assert_eq!(calls, ["{\"a\":1}", "{}"], "{model}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_before_content_is_a_status_and_after_it_one_event() {
    // API-5, API-6, REC-2, REC-6, EXE-9; field reports 48, 51, 52, 64
    type Make = fn() -> ProviderError;
    let table: [(&str, Make, u16, Option<&str>, &str); 7] = [
        ("unreachable", ProviderError::unreachable, 503, Some("provider_unavailable"), "server_error"),
        ("broken", || ProviderError::broken(FailureStage::Stream), 503, Some("provider_unavailable"), "server_error"),
        ("500", || ProviderError::rejected(500, None), 502, Some("bad_gateway"), "server_error"),
        ("401", || ProviderError::rejected(401, None), 502, Some("provider_auth_failed"), "server_error"),
        (
            "429",
            || ProviderError::rejected(429, Some(ProviderReason::Overloaded)),
            429,
            Some("rate_limit_exceeded"),
            "rate_limit_error",
        ),
        ("protocol", || ProviderError::protocol("garbage"), 502, Some("bad_gateway"), "server_error"),
        ("no end", ProviderError::ended_without_terminal, 502, Some("bad_gateway"), "server_error"),
    ];
    for (name, make, status, code, kind) in table {
        let (pair, ..) = pair(Script::new().fail(make()), false).await;
        for model in ["tunnel", "run"] {
            for stream in [true, false] {
                let answer = pair.ask(&Request::chat(model, stream)).await;
                let Outcome::Failed { text, status: seen, code: c, kind: k } = read(&answer) else {
                    panic!("{name} {model} {stream}: {:?}", read(&answer));
                };
                assert_eq!(
                    (text.as_str(), seen, c.as_deref(), k.as_str()),
                    ("", status, code, kind),
                    "{name} {model} {stream}"
                );
                let retry = answer.head.header("retry-after").is_some();
                assert_eq!(
                    retry,
                    matches!(status, 429 | 503),
                    "{name}: Retry-After on every 429 and 503, else nowhere"
                );
            }
        }
        pair.at_rest().await;

        let (pair, ..) = pair_after_content(make()).await;
        for model in ["tunnel", "run"] {
            let answer = pair.ask(&Request::chat(model, true)).await;
            let Outcome::Failed { text, status: 200, code: c, kind: k } = read(&answer) else {
                panic!("{name} {model}: {:?}", read(&answer));
            };
            assert_eq!((text.as_str(), c.as_deref(), k.as_str()), ("some", code, kind), "{name} {model}");
            assert!(!answer.text().contains("[DONE]"), "{name} {model}");
        }
        pair.at_rest().await;
    }
}

async fn pair_after_content(error: ProviderError) -> (Pair, ScriptHandle, ScriptHandle) {
    pair(Script::new().delta("some").fail(error), false).await
}

#[tokio::test(start_paused = true)]
async fn a_panicking_provider_is_one_failed_request() {
    // EXE-6, NOD-4
    let (pair, tunnel_calls, run_calls) = pair(Script::new().delta("some").panic(), false).await;
    for model in ["tunnel", "run"] {
        let answer = pair.ask(&Request::chat(model, true)).await;
        let Outcome::Failed { text, .. } = read(&answer) else { panic!("{model}: {:?}", read(&answer)) };
        assert_eq!(text, "some");
        let answer = pair.ask(&Request::chat(model, true)).await;
        assert!(read(&answer).is_error());
    }
    pair.at_rest().await;
    assert_eq!((tunnel_calls.counts().dropped, run_calls.counts().dropped), (2, 2));
    assert!(pair.is_connected(0));
}

#[tokio::test(start_paused = true)]
async fn the_models_are_those_that_can_be_served_now() {
    // API-12, FEN-6; field report 91
    let (provider, _) = ScriptedProvider::new(Script::text("a")).into_parts();
    let provider: Arc<dyn Provider> = provider;
    let plan = PairPlan::new(vec![
        PairProvider::new("a", Arc::clone(&provider), 1, &["one"]),
        PairProvider::new("b", provider, 1, &["two"]).on_node(1),
    ]);
    let mut pair = Pair::start(plan).await;
    let names = async |pair: &Pair| -> Vec<String> {
        let list = pair.ask(&Request::get("/v1/models")).await.json();
        let data = list["data"].as_array().unwrap();
        data.iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&pair).await, ["one", "two"]);
    pair.kill_node(1).await;
    pair.node_gone(1).await;
    assert_eq!(names(&pair).await, ["one"]);
    let answer = pair.ask(&Request::chat("two", false)).await;
    let Outcome::Failed { status: 503, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
    assert_eq!(code.as_deref(), Some("no_provider_available"));
}

#[tokio::test(start_paused = true)]
async fn a_submission_of_the_engine_itself_meets_the_same_node() {
    // EDG-1, EDG-2
    use futures_util::StreamExt;
    use iop_edge_core::api::{Destination, Submit, SubmitError};
    use iop_execution::{AdapterKey, ModelName, RunEventKind};
    let (pair, ..) = pair(Script::new().delta("Hel").delta("lo"), false).await;
    let body = iop_tests::wire_client::chat_body("run", true, &json!({})).to_string();
    let direct = Destination::Direct { node: None, adapter: AdapterKey::new("r").unwrap(), target: target("run") };
    let (admitted, stream) = pair.edge().submit_run(Submit::to(direct), body.clone().into()).await.unwrap();
    assert_eq!((admitted.adapter.as_str(), admitted.target.as_str()), ("r", "run"));
    let last = stream.collect::<Vec<_>>().await.pop().unwrap();
    assert!(matches!(last.kind, RunEventKind::Complete { .. }), "{last:?}");
    for name in ["run", "tunnel"] {
        let (provider, model) = (&name[..1], Submit::to_model(ModelName::new(name).unwrap()));
        let (admitted, stream) = pair.edge().submit_run(model, body.clone().into()).await.unwrap();
        assert_eq!(admitted.provider.as_str(), provider);
        let events: Vec<_> = stream.collect().await;
        let numbers: Vec<u64> = events.iter().map(|event| event.seq).collect();
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "from 1, without gaps");
        assert_eq!(events.iter().filter(|event| event.kind.is_terminal()).count(), 1);
        assert!(matches!(events.last().unwrap().kind, RunEventKind::Complete { .. }), "{:?}", events.last());
    }
    let unknown = Submit::to_model(ModelName::new("nobody").unwrap());
    assert_eq!(pair.edge().submit_run(unknown, body.into()).await.unwrap_err(), SubmitError::UnknownModel);
    pair.at_rest().await;
}
