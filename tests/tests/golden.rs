//! Decides that streams of real servers pass: by tunnel byte for byte but for what API-10 lists, by run with the same meaning.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::sync::Arc;

use bytes::Bytes;
use iop_adapters::{Ollama, OllamaConfig, OpenAiCompat, OpenAiCompatConfig};
use iop_edge_core::openai::{OpenAiConfig, ResponseModel};
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, event_data, read};
use iop_tests::pair::{Pair, PairPlan, PairProvider, one_attempt};
use iop_tests::wire_client::Request;
use serde_json::{Value, json};

const GOLDEN: [(&str, &str); 7] = [
    ("llama_cpp_chat", include_str!("../golden/llama_cpp_chat.sse")),
    ("llama_cpp_n2", include_str!("../golden/llama_cpp_n2.sse")),
    ("llama_cpp_progress", include_str!("../golden/llama_cpp_progress.sse")),
    ("vllm_reasoning", include_str!("../golden/vllm_reasoning.sse")),
    ("vllm_continuous_usage", include_str!("../golden/vllm_continuous_usage.sse")),
    ("vllm_tool", include_str!("../golden/vllm_tool.sse")),
    ("sglang_reasoning", include_str!("../golden/sglang_reasoning.sse")),
];

/// Answers in lines of Ollama's own API.
const LINES: [(&str, &str); 2] = [
    ("ollama_thinking", include_str!("../golden/ollama_thinking.ndjson")),
    ("ollama_tool", include_str!("../golden/ollama_tool.ndjson")),
];

async fn pair(backend: &ScriptedBackend, run: bool) -> Pair {
    let adapter = Arc::new(OpenAiCompat::new(OpenAiCompatConfig::new(backend.base_url())).unwrap());
    let names: Vec<_> = GOLDEN.iter().map(|(name, _)| *name).collect();
    let provider = PairProvider::new("p", adapter, 16, &names);
    let config: OpenAiConfig = one_attempt().with_response_model(ResponseModel::Target);
    Pair::start(PairPlan::new(vec![if run { provider.by_run() } else { provider }]).openai(config)).await
}

async fn backend() -> ScriptedBackend {
    let mut backend = ScriptedBackend::builder();
    for (name, stream) in GOLDEN {
        backend = backend.model(name, Answer::events().write(stream));
    }
    backend.start().await.unwrap()
}

fn ask(name: &str) -> Request {
    Request::chat_with(
        name,
        true,
        &json!({"n": if name.ends_with("n2") { 2 } else { 1 }, "stream_options": {"include_usage": true}}),
    )
}

/// What a stream says of choice 0: text, reasoning, names and arguments of calls, finish, and the last counts.
fn said(stream: &str) -> [String; 5] {
    let mut said = <[String; 5]>::default();
    for data in event_data(&Bytes::copy_from_slice(stream.as_bytes())).iter().filter(|data| *data != "[DONE]") {
        let chunk: Value = serde_json::from_str(data).unwrap();
        if let [Some(input), Some(output)] =
            ["prompt_tokens", "completion_tokens"].map(|key| chunk["usage"][key].as_u64())
        {
            said[4] = format!("{input}+{output}");
        }
        for choice in chunk["choices"].as_array().unwrap().iter().filter(|choice| choice["index"] == 0) {
            let delta = &choice["delta"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            said[0] += &text(&delta["content"]);
            let names = [text(&delta["reasoning"]), text(&delta["reasoning_content"])];
            said[1] += names.iter().find(|name| !name.is_empty()).map_or("", String::as_str);
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                said[2] += &text(&call["function"]["name"]);
                said[2] += &text(&call["function"]["arguments"]);
            }
            said[3] += &text(&choice["finish_reason"]);
        }
    }
    said
}

#[tokio::test]
async fn by_tunnel_nothing_changes_but_the_second_name_of_reasoning() {
    // API-10, ADP-3
    let backend = backend().await;
    let pair = pair(&backend, false).await;
    for (name, stream) in GOLDEN {
        let answer = pair.ask(&ask(name)).await;
        assert!(matches!(read(&answer), Outcome::Whole { .. }), "{name}: {}", answer.text());
        let text = answer.text();
        if said(stream)[1].is_empty() {
            assert_eq!(text, stream, "{name}");
        } else {
            assert_eq!(said(&text), said(stream), "{name}");
            let names = ["\"reasoning\":\"", "\"reasoning_content\":\""].map(|name| text.matches(name).count());
            assert!(names[0] > 0 && names[0] == names[1], "{name}: {names:?}");
        }
    }
}

#[tokio::test]
async fn by_run_the_meaning_is_the_same() {
    // API-9, EXE-7, ADP-3
    let backend = backend().await;
    let pair = pair(&backend, true).await;
    for (name, stream) in GOLDEN.iter().filter(|(name, _)| !name.ends_with("n2")) {
        let answer = pair.ask(&ask(name)).await;
        let (run, provider) = (said(&answer.text()), said(stream));
        assert_eq!((&run[..3], &run[4]), (&provider[..3], &provider[4]), "{name}");
        let called = !provider[2].is_empty() && provider[3] == "stop";
        assert_eq!(run[3], if called { "tool_calls" } else { provider[3].as_str() }, "{name}");
    }
}

/// What lines say: text, reasoning, names and arguments of calls, finish, and the counts of the last one.
fn said_in_lines(lines: &str) -> [String; 5] {
    let mut said = <[String; 5]>::default();
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let message = &line["message"];
        said[0] += message["content"].as_str().unwrap();
        said[1] += message["thinking"].as_str().unwrap_or_default();
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            said[2] += call["function"]["name"].as_str().unwrap();
            said[2] += &call["function"]["arguments"].to_string();
        }
        if line["done"] == true {
            // Ollama says "stop" after calls too.
            said[3] += if said[2].is_empty() { line["done_reason"].as_str().unwrap() } else { "tool_calls" };
            said[4] = format!("{}+{}", line["prompt_eval_count"], line["eval_count"]);
        }
    }
    said
}

#[tokio::test]
async fn lines_of_ollama_s_own_api_become_a_chat_and_a_response_streamed_and_whole() {
    // API-8, API-9, EXE-7, ADP-1, ADP-3
    let mut backend = ScriptedBackend::builder();
    for (name, lines) in LINES {
        backend = backend.model(name, Answer::new(200).header("content-type", "application/x-ndjson").write(lines));
    }
    let backend = backend.start().await.unwrap();
    let adapter = Arc::new(Ollama::new(OllamaConfig::new(backend.base_url())).unwrap());
    let provider = PairProvider::new("p", adapter, 16, &LINES.map(|(name, _)| name));
    let pair = Pair::start(PairPlan::new(vec![provider])).await;
    for (name, lines) in LINES {
        let want = said_in_lines(lines);
        let answer = pair.ask(&ask(name)).await;
        assert!(matches!(read(&answer), Outcome::Whole { .. }), "{name}: {}", answer.text());
        assert_eq!(said(&answer.text()), want, "{name}");

        // The whole answer as the one event of a stream.
        let mut whole = pair.ask(&Request::chat(name, false)).await.json();
        assert_eq!(whole["choices"][0]["message"]["reasoning"], whole["choices"][0]["message"]["reasoning_content"]);
        whole["choices"][0]["delta"] = whole["choices"][0]["message"].take();
        assert_eq!(said(&format!("data: {whole}\n\n")), want, "{name}");

        let input = |stream| json!({ "model": name, "input": "x", "stream": stream }).to_string();
        let response = pair.ask(&Request::post("/v1/responses", input(false))).await.json();
        let streamed = event_data(&pair.ask(&Request::post("/v1/responses", input(true))).await.body());
        let [.., last, done] = &streamed[..] else { panic!("{streamed:?}") };
        assert_eq!(done, "[DONE]");
        let last: Value = serde_json::from_str(last).unwrap();
        for response in [&response, &last["response"]] {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let mut found = <[String; 3]>::default();
            for item in response["output"].as_array().unwrap() {
                let part = |at: usize| text(&item["content"][at]["text"]);
                match item["type"].as_str().unwrap() {
                    "message" => found[0] += &part(0),
                    "reasoning" => found[1] += &part(0),
                    _ => found[2] += &(text(&item["name"]) + &text(&item["arguments"])),
                }
            }
            assert_eq!(found, want[..3], "{name}: {response}");
            let counts = ["input_tokens", "output_tokens"].map(|key| response["usage"][key].to_string());
            assert_eq!(counts.join("+"), want[4], "{name}");
        }
    }
    // And its calls have an id each, its own where Ollama gave one.
    let answer = pair.ask(&Request::chat("ollama_tool", false)).await.json();
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array().unwrap();
    let ids: Vec<_> = calls.iter().map(|call| call["id"].as_str().unwrap()).collect();
    assert!(ids.len() == 2 && ids[0].len() > 4 && ids[1] == "call_8x1k2j3h", "{ids:?}");
    let paths: Vec<_> =
        backend.received().into_iter().filter(|request| request.method == "POST").map(|r| r.path).collect();
    assert!(paths.iter().all(|path| path == "/api/chat"), "{paths:?}");
}
