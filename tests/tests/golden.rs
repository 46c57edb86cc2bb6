//! Decides that streams of real servers pass: by tunnel byte for byte but for what API-10 lists, by run with the same meaning.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::sync::Arc;

use bytes::Bytes;
use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
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
