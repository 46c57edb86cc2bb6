//! Decides what every known answer of a provider comes to at a client: the right text, or a typed error; never silence.
//!
//! All cases of the test kit go through Edge and Node over a memory link and the `openai_compat` adapter, streamed and
//! whole, by tunnel and by run.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
use iop_edge_core::openai::{OpenAiConfig, ResponseModel};
use iop_execution::testkit::ScriptedBackend;
use iop_execution::testkit::cases::{CaseEnd, ChatCase, Expected, chat_case, chat_cases};
use iop_tests::answer::{Outcome, read};
use iop_tests::pair::{Pair, PairPlan, PairProvider, one_attempt};
use iop_tests::wire_client::{PATIENCE, Request};
use serde_json::json;
use tokio::time::timeout;

/// How long a client waits in a stall before it leaves: only a client's timer ends one.
const CLIENT_PATIENCE: Duration = Duration::from_millis(700);
/// Requests at once.
const AT_ONCE: usize = 32;

async fn pair(backend: &ScriptedBackend, run: bool, config: OpenAiConfig) -> Pair {
    let mut adapter = OpenAiCompatConfig::new(backend.base_url());
    adapter.terminal_linger = Duration::from_millis(200);
    let adapter = Arc::new(OpenAiCompat::new(adapter).unwrap());
    let names: Vec<_> = chat_cases().iter().map(|case| case.name).collect();
    let provider = PairProvider::new("p", adapter, 256, &names);
    let provider = if run { provider.by_run() } else { provider };
    Pair::start(PairPlan::new(vec![provider]).openai(config)).await
}

/// What a case came to.
#[derive(Debug)]
enum Came {
    To(Outcome),
    /// The client left after this text: the provider had gone silent.
    Silence(String),
}

/// What a case must come to. The adapter of a run streams from its provider whatever the client asked for, so that a
/// whole answer comes from the stream too; if it fails, the client never sees the text before.
fn expected(case: &ChatCase, run: bool, stream: bool) -> Expected {
    match (run, stream) {
        (_, true) => case.stream,
        (false, false) => case.plain,
        (true, false) if case.stream.end == CaseEnd::Ok => case.stream,
        (true, false) => Expected { text: "", ..case.stream },
    }
}

async fn ask(pair: &Pair, case: &ChatCase, stream: bool, expected: Expected) -> Came {
    let request = Request::chat(case.name, stream);
    if expected.end != CaseEnd::Stall {
        let answer = timeout(PATIENCE, pair.ask(&request)).await;
        return Came::To(answer.map_or_else(|_| Outcome::Defect("no end".to_owned()), |answer| read(&answer)));
    }
    let mut text = Vec::new();
    let reading = async {
        let mut exchange = pair.begin(&request).await;
        while let Ok(piece) = exchange.piece().await {
            text.extend_from_slice(&piece.bytes);
        }
        exchange.head.status
    };
    match timeout(CLIENT_PATIENCE, reading).await {
        Ok(status) => Came::To(Outcome::Defect(format!("it ended, with status {status}"))),
        Err(_) => Came::Silence(String::from_utf8_lossy(&text).into_owned()),
    }
}

/// The cases where a reader may be stricter than the table: a body nobody asked for in that form.
const STRICTER: [&str; 3] = ["json_not_sse", "gzip_json", "deepseek_blank_prefix_json"];

/// What is wrong with it, if anything.
fn verdict(name: &str, expected: Expected, came: &Came) -> Option<String> {
    let right = match (expected.end, came) {
        (CaseEnd::Ok, Came::To(Outcome::Whole { text })) => text == expected.text,
        (CaseEnd::Ok, Came::To(outcome)) => STRICTER.contains(&name) && outcome.is_error(),
        (CaseEnd::Error, Came::To(outcome)) => outcome.is_error() && outcome.text() == expected.text,
        (CaseEnd::Stall, Came::Silence(seen)) => {
            let data = json!(expected.text).to_string();
            expected.text.is_empty() || seen.contains(data.trim_matches('"'))
        }
        (CaseEnd::Stall, Came::To(_)) | (CaseEnd::Ok | CaseEnd::Error, Came::Silence(_)) => false,
    };
    (!right).then(|| format!("{name}: expected {expected:?}, came {came:?}"))
}

async fn every_case(run: bool) {
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let pair = pair(&backend, run, one_attempt()).await;
    let cases = chat_cases();
    assert_eq!(cases.len(), 87);
    let asked = cases.iter().flat_map(|case| [(case, true), (case, false)]);
    let asked = asked.map(async |(case, stream): (&ChatCase, bool)| {
        let expected = expected(case, run, stream);
        let came = ask(&pair, case, stream, expected).await;
        verdict(case.name, expected, &came).map(|problem| format!("stream {stream}, {problem}"))
    });
    let problems: Vec<_> =
        futures_util::stream::iter(asked).buffer_unordered(AT_ONCE).filter_map(async |problem| problem).collect().await;
    assert!(problems.is_empty(), "run {run}: {} wrong\n{}", problems.len(), problems.join("\n"));
    pair.at_rest().await;
    assert_eq!(pair.connections(0), 1, "no answer of a provider costs the Node its connection");
    // One dispatch, one call: nothing was asked twice (NOD-10).
    let mut calls: BTreeMap<String, usize> = BTreeMap::new();
    for request in backend.received().iter().filter(|request| request.method == "POST") {
        let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
        *calls.entry(body["model"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    assert!(calls.values().all(|count| *count == 2), "{calls:?}");
    assert_eq!(calls.len(), 87);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_by_tunnel_is_the_right_text_or_a_typed_error() {
    // API-5, API-7, API-10, API-11, ADP-3, NOD-10, SEC-1; field reports 50, 51, 62, 66, 68
    every_case(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_by_run_is_the_right_text_or_a_typed_error() {
    // API-7, API-9, EXE-6, ADP-3, NOD-10; field reports 50, 51, 68
    every_case(true).await;
}

#[tokio::test]
async fn a_tunnel_gives_the_provider_s_own_bytes_when_nothing_needs_an_edit() {
    // API-10: with usage asked for and the target's own name, not a byte differs
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let config = one_attempt().with_response_model(ResponseModel::Target);
    let pair = pair(&backend, false, config).await;
    for name in ["ok", "crlf", "comments", "multiline_data", "utf8_split"] {
        let provider: Bytes = chat_case(name).unwrap().answer.body();
        let more = json!({ "stream_options": { "include_usage": true } });
        let answer = pair.ask(&Request::chat_with(name, true, &more)).await;
        assert_eq!(answer.text(), String::from_utf8_lossy(&provider), "{name}");
        assert_eq!(answer.body(), provider, "{name}");
    }
}
