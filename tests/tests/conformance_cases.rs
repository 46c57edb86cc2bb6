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
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
use iop_edge_core::openai::{OpenAiConfig, RequestObserver, RequestRecord, ResponseModel};
use iop_execution::testkit::cases::{CaseEnd, ChatCase, Expected, USAGE_CASES, chat_case, chat_cases};
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, event_json, read};
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

/// True where a reader may be stricter than the table: a body in an encoding nobody asked for, and, by tunnel, whose bytes
/// pass, a whole answer instead of a stream.
fn may_be_stricter(name: &str, run: bool, stream: bool) -> bool {
    match name {
        "gzip_json" => true,
        "json_not_sse" | "deepseek_blank_prefix_json" => stream && !run,
        _ => false,
    }
}

/// What is wrong with it, if anything. An error before any text is a status of its own, with text before it it is one event.
fn verdict(name: &str, stricter: bool, expected: Expected, came: &Came) -> Option<String> {
    let right = match (expected.end, came) {
        (CaseEnd::Ok, Came::To(Outcome::Whole { text })) => text == expected.text,
        (CaseEnd::Ok, Came::To(outcome)) => stricter && outcome.is_error(),
        (CaseEnd::Error, Came::To(Outcome::Failed { text, status, .. })) => {
            text == expected.text && (*status == 200) != text.is_empty()
        }
        (CaseEnd::Error, Came::To(_)) => false,
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
        let stricter = may_be_stricter(case.name, run, stream);
        verdict(case.name, stricter, expected, &came).map(|problem| format!("stream {stream}, {problem}"))
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

/// An Edge and a Node for each wire, tunnel first: a provider for each model, ended after `stall`.
async fn both_wires(backend: &ScriptedBackend, names: &[&str], stall: Duration, config: OpenAiConfig) -> [Pair; 2] {
    let start = async |run: bool| {
        let adapter = Arc::new(OpenAiCompat::new(OpenAiCompatConfig::new(backend.base_url())).unwrap());
        let providers = names.iter().map(|name| {
            let shared = Arc::<OpenAiCompat>::clone(&adapter);
            let provider = PairProvider::new(name, shared, 16, &[*name]).stalling_after(stall);
            if run { provider.by_run() } else { provider }
        });
        Pair::start(PairPlan::new(providers.collect()).openai(config.clone())).await
    };
    [start(false).await, start(true).await]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_goes_silent_is_ended_with_one_typed_error_whether_it_pings_or_not() {
    // WDG-1, WDG-2, API-6; surfaces 4: rows 8, 27, 28. Pings are no progress, and neither are a head and a role.
    const LIMIT: Duration = Duration::from_secs(1);
    let begun = |name| match name {
        "role" => chat_case("role_only_then_stall").unwrap().answer.body(),
        _ => chat_case("silent_stall").unwrap().answer.body(),
    };
    let pings = (0..3_000).fold(Answer::events().write(begun("pings")), |answer, _| {
        answer.wait(Duration::from_millis(20)).write(&b":\n\n"[..])
    });
    let backend = ScriptedBackend::builder()
        .model("silent", Answer::events().write(begun("silent")).hang())
        .model("pings", pings.hang())
        .model("role", Answer::events().write(begun("role")).hang())
        .start()
        .await
        .unwrap();
    let pairs = both_wires(&backend, &["silent", "pings", "role"], LIMIT, one_attempt()).await;
    let cells = ["tunnel", "run"].into_iter().zip(&pairs).flat_map(|(wire, pair)| {
        [("silent", "Hé", 200), ("pings", "Hé", 200), ("role", "", 504)]
            .map(|(name, text, status)| (wire, pair, name, text, status))
    });
    let asked = cells.map(async |(wire, pair, name, text, status): (&str, &Pair, &str, &str, u16)| {
        let began = std::time::Instant::now();
        let answer = timeout(PATIENCE, pair.ask(&Request::chat(name, true))).await.expect("it hangs");
        let Outcome::Failed { text: seen, status: found, code, .. } = read(&answer) else {
            panic!("{wire} {name}: {:?}", read(&answer))
        };
        assert_eq!((seen.as_str(), found, code.as_deref()), (text, status, Some("response_stalled")), "{wire} {name}");
        assert!(began.elapsed() >= LIMIT, "{wire} {name}: not before its time");
    });
    futures_util::future::join_all(asked).await;
    for pair in &pairs {
        pair.at_rest().await;
    }
    // Each silent call was closed, and none went on to its end.
    let closed = timeout(PATIENCE, backend.wait_for(|traffic| traffic.client_closed >= 6 && traffic.answering == 0));
    closed.await.expect("a call is open");
}

/// Keeps the counts of every request.
#[derive(Debug, Default)]
struct Counted(Mutex<Vec<Option<[Option<u64>; 2]>>>);

impl RequestObserver for Counted {
    fn request_ended(&self, record: &RequestRecord) {
        let counts = record.usage.map(|usage| [usage.input_tokens, usage.output_tokens]);
        self.0.lock().unwrap().push(counts);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_of_every_form_is_counted_once_and_shown_to_who_asked_in_one_form() {
    // API-4, API-10 d; surfaces 4: rows 10, 12, 25, 39
    let late = Answer::events().write(chat_case("no_done").unwrap().answer.body()).wait(Duration::from_millis(50));
    let report = r#"{"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}"#;
    let late = late.write(format!("data: {report}\n\n")).write("data: [DONE]\n\n");
    let backend = ScriptedBackend::builder().all_cases().model("after_finish", late).start().await.unwrap();
    let names: Vec<_> = USAGE_CASES.into_iter().chain(["llama_n2_two_usages", "after_finish"]).collect();
    let counted = Arc::new(Counted::default());
    let config = one_attempt().with_observer(Arc::<Counted>::clone(&counted));
    let [tunnel, run] = both_wires(&backend, &names, Duration::from_secs(30), config).await;
    for (wire, pair) in [("tunnel", &tunnel), ("run", &run)] {
        for name in names.iter().copied() {
            for asked in [true, false] {
                let more = if asked { json!({ "stream_options": { "include_usage": true } }) } else { json!({}) };
                let answer =
                    timeout(PATIENCE, pair.ask(&Request::chat_with(name, true, &more))).await.expect("it hangs");
                // A chunk without `choices` would be a defect.
                assert!(matches!(read(&answer), Outcome::Whole { .. }), "{wire} {name}: {:?}", read(&answer));
                let chunks = event_json(&answer.body());
                let shown: Vec<_> =
                    chunks.iter().map(|chunk| &chunk["usage"]).filter(|usage| usage.is_object()).collect();
                let last =
                    shown.last().map(|usage| [usage["prompt_tokens"].as_u64(), usage["completion_tokens"].as_u64()]);
                if asked {
                    assert_eq!(last, Some([Some(3), Some(2)]), "{wire} {name}");
                } else {
                    // What stands beside a finish reason can't be dropped alone.
                    assert!(last.is_none() || name == "usage_in_finish", "{wire} {name}: {}", answer.text());
                }
                pair.at_rest().await;
                assert_eq!(counted.0.lock().unwrap().pop(), Some(Some([Some(3), Some(2)])), "{wire} {name} {asked}");
            }
        }
    }
    assert_eq!(counted.0.lock().unwrap().len(), 0, "one record a request");
}

#[tokio::test]
async fn a_provider_that_says_it_is_full_is_a_429_whatever_its_status() {
    // API-5, ADP-3; surfaces 4: row 38
    let error = |text: &str| json!({ "error": { "message": text, "type": "x", "code": null } }).to_string();
    let backend = ScriptedBackend::builder()
        .model("queue", Answer::json(503, error("Request exceeds maximum queue size.")))
        .model(
            "busy",
            Answer::json(503, r#"{"error":"server busy, please try again.  maximum pending requests exceeded"}"#),
        )
        .model("later", Answer::json(503, error("wait")).header("retry-after-ms", "100"))
        .model("broken", Answer::json(503, error("wait")))
        .start()
        .await
        .unwrap();
    let names = ["queue", "busy", "later", "broken"];
    let pairs = both_wires(&backend, &names, Duration::from_secs(30), one_attempt()).await;
    let cells =
        pairs.iter().flat_map(|pair| names.iter().flat_map(move |name| [(pair, *name, true), (pair, *name, false)]));
    // All at once: a full provider is left alone for a second, and the one that waits for it would wait for that.
    let asked = cells.map(async |(pair, name, stream): (&Pair, &str, bool)| {
        let answer = pair.ask(&Request::chat(name, stream)).await;
        let full = name != "broken";
        let want = if full { (429, Some("rate_limit_exceeded")) } else { (502, Some("bad_gateway")) };
        let Outcome::Failed { status, code, .. } = read(&answer) else { panic!("{name}: {:?}", read(&answer)) };
        assert_eq!((status, code.as_deref()), want, "{name} {stream}");
        assert_eq!(answer.head.header("retry-after").is_some(), full, "{name} {stream}");
    });
    futures_util::future::join_all(asked).await;
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
