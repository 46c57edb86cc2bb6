//! Decides whether chat works through two processes: both wires, streamed and not, each event as soon as it is there.

use std::time::{Duration, Instant};

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, event_json, read};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::wire_client::{Request, chat_body};
use serde_json::json;

use crate::{PROGRAMS, finish, fleet, hello, provider, quiet, says, soon};

#[tokio::test]
async fn chat_works_by_tunnel_and_by_run_streamed_and_whole() {
    // API-1, API-6, API-9, WIR-17; field report T16
    let backend = ScriptedBackend::builder().model("tunnel", hello()).model("run", hello()).start().await.unwrap();
    let url = backend.base_url();
    let providers =
        vec![ProviderPlan::new("t", &url, 4, &["tunnel"]), ProviderPlan::new("r", &url, 4, &["run"]).by_run()];
    let fleet = Fleet::start(PROGRAMS, Plan::new(providers).keyed()).await;
    let mut client = fleet.client().await;
    let mut ids = Vec::new();
    for model in ["tunnel", "run"] {
        for stream in [true, false] {
            let request = Request::chat(model, stream).key(&fleet.api_key()).header("x-request-id", "mine");
            let answer = client.ask(&request).await;
            assert_eq!(read(&answer), Outcome::Whole { text: "Hello".to_owned() }, "{model} {stream}");
            let header = |name| answer.head.header(name);
            assert_eq!(header("x-iop-edge"), Some("1"));
            let id = header("x-request-id").expect("a request id");
            assert!(id.starts_with("req_"), "our own id, not the client's: {id}");
            ids.push(id.to_owned());
            let chunks = if stream { event_json(&answer.body()) } else { vec![answer.json()] };
            assert!(chunks.iter().all(|chunk| chunk["model"] == model), "{chunks:?}");
            assert!(
                chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["created"] == chunks[0]["created"])
            );
            if stream {
                assert_eq!(header("content-type"), Some("text/event-stream; charset=utf-8"));
                assert_eq!(header("cache-control"), Some("no-cache"));
                assert_eq!(header("x-accel-buffering"), Some("no"));
                assert_eq!((header("content-encoding"), header("content-length")), (None, None));
            }
        }
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4, "each request has an id of its own");
    for received in backend.received() {
        if received.method != "POST" {
            continue;
        }
        for secret in ["authorization", "x-request-id", "cookie"] {
            let value = received.header(secret).unwrap_or_default();
            assert!(!value.contains(&fleet.api_key()) && value != "mine", "{secret} reached the provider");
        }
    }
    fleet.at_rest().await;
}

#[tokio::test]
async fn an_event_is_with_the_client_before_the_next_one_exists() {
    // API-6, WIR-9; field report 85: it is causal, each event is let out only after the one before was read
    let texts: Vec<String> = (0..40).map(|number| format!("part {number}; ")).collect();
    let answer = texts.iter().fold(Answer::events(), |answer, text| answer.pause().write(says(text)));
    let answer = answer.pause().write(finish());
    let backend =
        ScriptedBackend::builder().model("tunnel", answer.clone()).model("run", answer).start().await.unwrap();
    let url = backend.base_url();
    let providers =
        vec![ProviderPlan::new("t", &url, 4, &["tunnel"]), ProviderPlan::new("r", &url, 4, &["run"]).by_run()];
    let fleet = Fleet::start(PROGRAMS, Plan::new(providers)).await;
    let _quiet = quiet().await;
    for model in ["tunnel", "run"] {
        let mut client = fleet.client().await;
        client.send(&Request::chat(model, true)).await;
        let (mut head, mut delays) = (None, Vec::new());
        for text in &texts {
            soon("the backend pauses", backend.wait_for(|traffic| traffic.waiting == 1)).await;
            let released = Instant::now();
            backend.release();
            if head.is_none() {
                head = Some(client.head().await);
            }
            client.read_until(text).await;
            delays.push(released.elapsed());
        }
        backend.release();
        client.read_until("[DONE]").await;
        delays.sort();
        let median = delays[delays.len() / 2];
        assert!(median < Duration::from_millis(10), "{model}: an event takes {median:?}");
    }
}

#[tokio::test]
async fn a_second_request_on_a_kept_connection_is_not_late() {
    // WIR-11; field report T2: Nagle and a delayed ACK would make it 40 ms
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let fleet = fleet(provider(&backend, 4, &["m"])).await;
    let _quiet = quiet().await;
    for stream in [true, false] {
        // A delayed ACK comes in every round, a busy machine does not: one good round in five is enough.
        let mut rounds = Vec::new();
        while rounds.last().is_none_or(|p99| *p99 >= Duration::from_millis(20)) {
            assert!(rounds.len() < 5, "stream {stream}: p99 of each round is {rounds:?}");
            let mut client = fleet.client().await;
            let mut times = Vec::new();
            for _ in 0..=50 {
                let start = Instant::now();
                let answer = client.ask(&Request::chat("m", stream)).await;
                times.push(start.elapsed());
                assert!(matches!(read(&answer), Outcome::Whole { .. }));
            }
            let mut times = times.split_off(1);
            times.sort();
            rounds.push(times[times.len() * 99 / 100 - 1]);
        }
    }
}

#[tokio::test]
async fn a_body_of_many_chunks_arrives_at_the_provider_unchanged() {
    // WIR-8, WIR-14, API-3: larger than the initial credit, so it needs credit on its way
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let fleet = fleet(provider(&backend, 4, &["m"])).await;
    let filler: String = (0..3_000_000_u32).map(|n| char::from(b'a' + u8::try_from(n % 26).unwrap())).collect();
    let body = chat_body("m", false, &json!({ "x_filler": filler, "number": 1.10, "stop": null }));
    let answer = fleet.ask(&Request::post("/v1/chat/completions", body.to_string())).await;
    assert_eq!(read(&answer), Outcome::Whole { text: "Hello".to_owned() });
    let received = backend.received().pop().unwrap();
    let received: serde_json::Value = serde_json::from_slice(&received.body).unwrap();
    assert_eq!(received, body);
}
