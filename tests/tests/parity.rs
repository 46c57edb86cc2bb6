//! Decides that a client can't tell by which wire it was answered: the same scripted answer of a provider, in whatever spelling,
//! through a tunnel and through a normalised run, as a chat and as a response, streamed and whole, says the same.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::sync::Arc;
use std::time::Duration;

use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::event_data;
use iop_tests::pair::{Pair, PairPlan, PairProvider};
use iop_tests::wire_client::{PATIENCE, Request};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::time::timeout;

/// A piece of an answer.
#[derive(Debug, Clone)]
enum Bit {
    Text(String),
    Thought(String),
    /// A whole call: how many pieces its arguments come in.
    Call(usize),
}

/// How a server writes what it says.
#[derive(Debug, Clone)]
struct Spelling {
    reasoning: &'static str,
    /// Right, left out, or 0 for every call.
    index: u8,
    /// Arguments are an object.
    object: bool,
    /// Beside the finish reason, in a chunk of its own, or nowhere.
    usage: u8,
    finish: &'static str,
    /// Deltas that say nothing are null or left out.
    bare: bool,
}

const ARGUMENTS: &str = r#"{"city":"Zürich","n":[1,2.50]}"#;

fn usage() -> Value {
    json!({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2}})
}

fn chunk(delta: Value, finish: Value) -> Value {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})
}

fn name(call: usize) -> String {
    format!("f{call}")
}

/// The answer as a stream.
fn streamed(bits: &[Bit], spelling: &Spelling) -> Answer {
    let mut chunks = vec![chunk(json!({"role": "assistant", "content": ""}), Value::Null)];
    let mut calls = 0;
    for bit in bits {
        match bit {
            Bit::Text(text) => chunks.push(chunk(json!({ "content": text }), Value::Null)),
            Bit::Thought(text) => chunks.push(chunk(json!({ spelling.reasoning: text }), Value::Null)),
            Bit::Call(pieces) => {
                let mut piece = |id: Option<String>, function: Value| {
                    let mut piece = json!({ "function": function });
                    if let Some(id) = id {
                        (piece["id"], piece["type"]) = (json!(id), json!("function"));
                    }
                    match spelling.index {
                        0 => piece["index"] = json!(calls),
                        1 => piece["index"] = json!(0),
                        _ => {}
                    }
                    chunks.push(chunk(json!({ "tool_calls": [piece] }), Value::Null));
                };
                let id = Some(format!("id{calls}"));
                if spelling.object {
                    let arguments: Value = serde_json::from_str(ARGUMENTS).unwrap();
                    piece(id, json!({"name": name(calls), "arguments": arguments}));
                } else {
                    piece(id, json!({"name": name(calls), "arguments": ""}));
                    let chars: Vec<char> = ARGUMENTS.chars().collect();
                    for part in chars.chunks(chars.len().div_ceil(*pieces)) {
                        piece(None, json!({"arguments": part.iter().collect::<String>()}));
                    }
                }
                calls += 1;
            }
        }
    }
    let mut last = chunk(json!({}), json!(spelling.finish));
    if spelling.bare {
        last["choices"][0]["delta"] = Value::Null;
    }
    if spelling.usage == 0 {
        last["usage"] = usage();
    }
    chunks.push(last);
    if spelling.usage == 1 {
        chunks.push(json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage()}));
    }
    chunks
        .iter()
        .fold(Answer::events(), |answer, chunk| answer.write(format!("data: {chunk}\n\n")))
        .write("data: [DONE]\n\n")
}

/// The same answer as one object.
fn whole(bits: &[Bit], spelling: &Spelling) -> Answer {
    let (mut text, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for bit in bits {
        match bit {
            Bit::Text(more) => text.push_str(more),
            Bit::Thought(more) => thought.push_str(more),
            Bit::Call(_) => {
                let arguments: Value =
                    if spelling.object { serde_json::from_str(ARGUMENTS).unwrap() } else { json!(ARGUMENTS) };
                let function = json!({"name": name(calls.len()), "arguments": arguments});
                calls.push(json!({"id": format!("id{}", calls.len()), "type": "function", "function": function}));
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": text});
    if !thought.is_empty() {
        message[spelling.reasoning] = json!(thought);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    let choice = json!({"index": 0, "message": message, "finish_reason": spelling.finish});
    let mut answer = json!({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]});
    if spelling.usage < 2 {
        answer["usage"] = usage();
    }
    Answer::json(200, answer.to_string())
}

/// What an answer says, however it is written.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    text: String,
    thought: String,
    /// Id, name, arguments.
    calls: Vec<(String, String, String)>,
    finish: String,
    /// Input, cached, output, reasoning.
    usage: Option<[u64; 4]>,
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

impl Said {
    fn chat(&mut self, part: &Value) {
        if let Some(usage) = part.get("usage").filter(|usage| usage.is_object()) {
            let count = |pointer: &str| usage.pointer(pointer).and_then(Value::as_u64).unwrap();
            self.usage = Some([
                count("/prompt_tokens"),
                count("/prompt_tokens_details/cached_tokens"),
                count("/completion_tokens"),
                count("/completion_tokens_details/reasoning_tokens"),
            ]);
        }
        for choice in part["choices"].as_array().unwrap() {
            let said = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
            assert_eq!(text(&said["reasoning"]), text(&said["reasoning_content"]), "API-10 f: {part}");
            self.text.push_str(text(&said["content"]));
            self.thought.push_str(text(&said["reasoning"]));
            for (at, call) in said["tool_calls"].as_array().into_iter().flatten().enumerate() {
                let at = call["index"].as_u64().map_or(at, |index| usize::try_from(index).unwrap());
                if at == self.calls.len() {
                    self.calls.push(<(String, String, String)>::default());
                }
                let known = self.calls.get_mut(at).expect("indexes have no gap");
                known.0.push_str(text(&call["id"]));
                known.1.push_str(text(&call["function"]["name"]));
                known.2.push_str(text(&call["function"]["arguments"]));
            }
            self.finish.push_str(text(&choice["finish_reason"]));
        }
    }

    fn response(response: &Value) -> Self {
        let mut said = Self::default();
        for item in response["output"].as_array().unwrap() {
            let parts: String =
                item["content"].as_array().into_iter().flatten().map(|part| text(&part["text"])).collect();
            match text(&item["type"]) {
                "message" => said.text.push_str(&parts),
                "reasoning" => said.thought.push_str(&parts),
                _ => {
                    let [id, name, arguments] = ["call_id", "name", "arguments"].map(|key| text(&item[key]).to_owned());
                    said.calls.push((id, name, arguments));
                }
            }
        }
        text(&response["status"]).clone_into(&mut said.finish);
        said.finish.push_str(text(&response["incomplete_details"]["reason"]));
        said.usage = response["usage"].as_object().map(|usage| {
            let usage = Value::Object(usage.clone());
            let count = |pointer: &str| usage.pointer(pointer).and_then(Value::as_u64).unwrap();
            [
                count("/input_tokens"),
                count("/input_tokens_details/cached_tokens"),
                count("/output_tokens"),
                count("/output_tokens_details/reasoning_tokens"),
            ]
        });
        said
    }
}

async fn pair(backend: &ScriptedBackend, run: bool) -> Pair {
    let mut config = OpenAiCompatConfig::new(backend.base_url());
    config.terminal_linger = Duration::from_millis(200);
    let provider = PairProvider::new("p", Arc::new(OpenAiCompat::new(config).unwrap()), 8, &["m"]);
    Pair::start(PairPlan::new(vec![if run { provider.by_run() } else { provider }])).await
}

/// What a client is told: as a chat and as a response, streamed and whole.
async fn told(backend: &ScriptedBackend, run: bool) -> [Said; 4] {
    let pair = pair(backend, run).await;
    let ask = async |request: Request| {
        let answer = timeout(PATIENCE, pair.ask(&request)).await.expect("it hangs");
        assert_eq!(answer.status(), 200, "{}", answer.text());
        answer
    };
    let respond = |stream: bool| {
        Request::post("/v1/responses", json!({"model": "m", "input": "x", "stream": stream}).to_string())
    };
    let mut streamed = Said::default();
    let with_usage = json!({ "stream_options": { "include_usage": true } });
    for data in event_data(&ask(Request::chat_with("m", true, &with_usage)).await.body()) {
        if data != "[DONE]" {
            streamed.chat(&serde_json::from_str(&data).unwrap());
        }
    }
    let mut whole = Said::default();
    whole.chat(&ask(Request::chat("m", false)).await.json());
    let events = event_data(&ask(respond(true)).await.body());
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    let last: Value = serde_json::from_str(last).unwrap();
    let response = Said::response(&last["response"]);
    [streamed, whole, response, Said::response(&ask(respond(false)).await.json())]
}

fn bit() -> impl Strategy<Value = Bit> {
    prop_oneof![
        3 => "[a-zé日\\\\\"\n{:]{1,6}".prop_map(Bit::Text),
        1 => "[a-zé ]{1,6}".prop_map(Bit::Thought),
        1 => (1usize..4).prop_map(Bit::Call),
    ]
}

fn spelling() -> impl Strategy<Value = Spelling> {
    let finishes = ["stop", "length", "content_filter", "tool_calls", "eos", "end_turn"];
    let names = ["reasoning", "reasoning_content"];
    let finish = prop::sample::select(finishes.to_vec());
    (prop::sample::select(names.to_vec()), 0u8..3, any::<bool>(), 0u8..3, finish, any::<bool>()).prop_map(
        |(reasoning, index, object, usage, finish, bare)| Spelling { reasoning, index, object, usage, finish, bare },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_wires_say_the_same(bits in prop::collection::vec(bit(), 0..7), spelling in spelling()) {
        // API-8, API-9, API-10 e and f, ADP-3; surfaces 4: rows 20-22, 25, 26
        let calls = bits.iter().filter(|bit| matches!(bit, Bit::Call(_))).count();
        // A server that says it called something has called something.
        prop_assume!(calls > 0 || spelling.finish != "tool_calls");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (tunnel, run) = runtime.block_on(async {
            let answer = streamed(&bits, &spelling).without_stream(whole(&bits, &spelling));
            let backend = ScriptedBackend::builder().model("m", answer).start().await.unwrap();
            (told(&backend, false).await, told(&backend, true).await)
        });
        prop_assert_eq!(&tunnel, &run);

        // And it is what the provider said.
        let [stream, whole, _, _] = &tunnel;
        let all = |kind: fn(&Bit) -> Option<&String>| bits.iter().filter_map(kind).cloned().collect::<String>();
        prop_assert_eq!(&stream.text, &all(|bit| if let Bit::Text(text) = bit { Some(text) } else { None }));
        prop_assert_eq!(&stream.thought, &all(|bit| if let Bit::Thought(text) = bit { Some(text) } else { None }));
        let arguments: Value = serde_json::from_str(ARGUMENTS).unwrap();
        prop_assert_eq!(stream.calls.len(), calls);
        for (at, (id, named, said)) in stream.calls.iter().enumerate() {
            prop_assert_eq!((id, named), (&format!("id{at}"), &name(at)));
            prop_assert_eq!(&serde_json::from_str::<Value>(said).unwrap(), &arguments);
        }
        let finish = match (spelling.finish, calls) {
            (cut @ ("length" | "content_filter"), _) => cut,
            (_, 0) => "stop",
            (_, _) => "tool_calls",
        };
        prop_assert_eq!(&stream.finish, finish);
        prop_assert_eq!(stream.usage, (spelling.usage < 2).then_some([7, 3, 5, 2]));
        prop_assert_eq!((&whole.finish, whole.usage), (&stream.finish, stream.usage));
    }
}
