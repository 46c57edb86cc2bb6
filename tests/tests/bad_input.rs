//! Decides what wrong input of clients and of backends comes to: a typed error, one terminal, counters at 0, no panic.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::time::Duration;

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read, read_parts};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::process::Programs;
use iop_tests::wire_client::{Connection, End, Request, chat_body};
use serde_json::json;
use tokio::time::timeout;

const PROGRAMS: Programs = iop_tests::programs!();

/// The Edge and the Node are alive, at rest, and never panicked.
async fn unharmed(fleet: &mut Fleet) {
    fleet.at_rest().await;
    assert_eq!(fleet.ask(&Request::get("/readyz")).await.status(), 200);
    let lines = [fleet.edge().lines(), fleet.node(0).lines()].concat();
    assert!(!lines.iter().any(|line| line.contains("panicked")), "{lines:?}");
}

fn failure(answer: &iop_tests::wire_client::Answer) -> (u16, String) {
    match read(answer) {
        Outcome::Failed { status, code, .. } => (status, code.unwrap_or_default()),
        other => panic!("{other:?}: {}", answer.text()),
    }
}

#[tokio::test]
async fn wrong_requests_get_typed_errors() {
    // API-1, API-3, API-5, API-13, SEC-1, SEC-3; field reports T13, T14
    let whole = Answer::json(200, json!({ "choices": [] }).to_string());
    let backend = ScriptedBackend::builder().model("m", whole).start().await.unwrap();
    let plan = Plan::new(vec![ProviderPlan::new("p", &backend.base_url(), 4, &["m"])])
        .keyed()
        .with("limits: { request_body_bytes: 65536 }");
    let mut fleet = Fleet::start(PROGRAMS, plan).await;
    let key = fleet.api_key();
    let post = |body: &str| Request::post("/v1/chat/completions", body.to_owned()).key(&key);
    let chat = |more| Request::post("/v1/chat/completions", chat_body("m", false, &more).to_string()).key(&key);
    let deep = format!("{{\"model\":\"m\",\"messages\":{}{}}}", "[".repeat(5_000), "]".repeat(5_000));
    let table = [
        ("no JSON", post("{"), 400, ""),
        ("empty", post(""), 400, ""),
        ("no object", post("[]"), 400, ""),
        ("not UTF-8", Request::post("/v1/chat/completions", &b"{\"model\":\"\xff\"}"[..]).key(&key), 400, ""),
        ("no model", post("{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}"), 400, ""),
        ("model is no string", chat(json!({ "model": 1 })), 400, ""),
        ("two models", post("{\"model\":\"m\",\"messages\":[{}],\"model\":\"other\"}"), 400, ""),
        ("no messages", post("{\"model\":\"m\"}"), 400, ""),
        ("messages are empty", chat(json!({ "messages": [] })), 400, ""),
        ("messages are no list", chat(json!({ "messages": "x" })), 400, ""),
        ("stream is no boolean", chat(json!({ "stream": "yes" })), 400, ""),
        ("too deep", post(&deep), 400, ""),
        ("unknown model", chat(json!({ "model": "nobody" })), 404, "model_not_found"),
        ("no key", chat(json!({})).without("authorization"), 401, "invalid_api_key"),
        ("wrong key", chat(json!({})).key("iopk_aaaaaaaa_bbbb"), 401, "invalid_api_key"),
        ("a node's kind of key", chat(json!({})).key(&key.replace("iopk_", "iopn_")), 401, "invalid_api_key"),
        ("models without a key", Request::get("/v1/models"), 401, "invalid_api_key"),
        ("too large", chat(json!({ "x": "y".repeat(70_000) })), 413, "request_too_large"),
        ("no JSON by its type", chat(json!({})).header("content-type", "text/plain"), 415, "unsupported_media_type"),
        ("wrong method", Request::get("/v1/chat/completions").key(&key), 405, "method_not_allowed"),
        ("wrong method of models", Request::post("/v1/models", "{}").key(&key), 405, "method_not_allowed"),
        ("unknown path", Request::get("/v1/nothing").key(&key), 404, "unknown_url"),
        ("unknown root", Request::get("/").key(&key), 404, "unknown_url"),
        ("not here", Request::post("/v1/images/generations", "{}").key(&key), 501, "unsupported_endpoint"),
        ("bad deadline", chat(json!({})).header("x-iop-deadline-ms", "soon"), 400, ""),
    ];
    for (name, request, status, code) in table {
        let answer = fleet.ask(&request).await;
        assert_eq!(failure(&answer), (status, code.to_owned()), "{name}");
        assert_eq!(answer.head.header("x-iop-edge"), Some("1"), "{name}");
        assert!(answer.head.header("x-request-id").is_some(), "{name}");
        assert_eq!(answer.head.header("allow").is_some(), status == 405, "{name}");
        assert_eq!(answer.head.header("www-authenticate"), (status == 401).then_some("Bearer"), "{name}");
        assert!(!answer.text().contains(&key), "{name}");
    }
    assert!(backend.received().iter().all(|request| request.method != "POST"), "nothing of it reached the provider");
    unharmed(&mut fleet).await;
}

#[tokio::test]
async fn wrong_http_costs_only_its_own_connection() {
    // SEC-3, REG-8; field report T13
    let backend = ScriptedBackend::builder().model("m", Answer::events()).start().await.unwrap();
    let mut fleet =
        Fleet::start(PROGRAMS, Plan::new(vec![ProviderPlan::new("p", &backend.base_url(), 4, &["m"])])).await;
    let huge = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(200_000));
    let lines: String = (0..500).map(|n| format!("x-{n}: y\r\n")).collect();
    let many = format!("GET /readyz HTTP/1.1\r\nhost: x\r\n{lines}\r\n");
    let smuggled = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n        transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";
    for (name, bytes) in [
        ("garbage", "\x16\x03\x01\x02\x00 this is no HTTP\r\n\r\n"),
        ("a huge header", huge.as_str()),
        ("many headers", many.as_str()),
        ("two lengths", smuggled),
    ] {
        let mut client = Connection::open(fleet.openai()).await;
        // It may be cut while it still sends.
        let _cut = timeout(Duration::from_secs(5), client.try_send_raw(bytes.as_bytes())).await;
        let mut answers = Vec::new();
        while let Ok(Some(head)) = timeout(Duration::from_secs(5), client.try_head()).await {
            answers.push(head.status);
            while client.piece().await.is_ok() {}
        }
        assert!(answers.len() <= 1, "{name}: {answers:?}");
        assert!(answers.iter().all(|status| (400..500).contains(status)), "{name}: {answers:?}");
        unharmed(&mut fleet).await;
    }
    // A body that breaks off, and a client that is gone before its answer.
    let mut client = Connection::open(fleet.openai()).await;
    client
        .send_raw(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{\"model\"")
        .await;
    drop(client);
    unharmed(&mut fleet).await;
}

#[tokio::test]
async fn a_backend_that_misbehaves_is_a_typed_error_on_both_wires() {
    // API-5, API-7, ADP-4, NOD-4, NOD-10, SEC-2, EXE-9; field reports 50, 51, 52, 64, T14
    let chunk = json!({ "id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{ "index": 0, "delta": { "content": "some" }, "finish_reason": null }] });
    let some = || Answer::events().write(format!("data: {chunk}\n\n"));
    let half = || Answer::new(200).header("content-type", "application/json").write("{\"id\":");
    let gzip = Answer::json(200, &b"\x1f\x8b\x08\x00garbage"[..]).header("content-encoding", "gzip");
    let backend = ScriptedBackend::builder()
        .model("reset", Answer::reset_at_once())
        .model("cut", some().close().without_stream(half().close()))
        .model("torn", some().reset().without_stream(half().reset()))
        .model("garbage", Answer::new(200).header("content-type", "application/json").write("\x00\x01 no JSON"))
        .model("html", Answer::new(200).header("content-type", "text/html").write("<h1>It works</h1>"))
        .model("gzip", gzip)
        .model("redirect", Answer::new(302).header("location", "http://127.0.0.1:1/").header("content-length", "0"))
        .model("empty", Answer::events().without_stream(Answer::json(200, "")))
        .model(
            "secret",
            Answer::json(500, "{\"error\":{\"message\":\"key sk-SENTINEL of http://10.0.0.1/?k=SENTINEL\"}}"),
        )
        .start()
        .await
        .unwrap();
    let models = ["reset", "cut", "torn", "garbage", "html", "gzip", "redirect", "empty", "secret"];
    // A port that refuses: bound once, closed again.
    let refused = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let refused = format!("http://{refused}");
    let url = backend.base_url();
    let plan = Plan::new(vec![
        ProviderPlan::new("t", &url, 4, &models),
        ProviderPlan::new("dead", &refused, 4, &["refuse"]),
        ProviderPlan::new("dead-run", &refused, 4, &["run-refuse"]).by_run(),
        ProviderPlan::new("r", &url, 4, &models).by_run().prefixed("run-"),
    ]);
    let mut fleet = Fleet::start(PROGRAMS, plan).await;
    let mut asked = 0;
    for model in models.iter().chain(&["refuse"]) {
        for prefix in ["", "run-"] {
            for stream in [true, false] {
                let name = format!("{prefix}{model}");
                let answer = fleet.ask(&Request::chat(&name, stream)).await;
                let (status, code) = failure(&answer);
                let committed = stream && matches!(*model, "cut" | "torn");
                assert_eq!(read(&answer).text(), if committed { "some" } else { "" }, "{name} {stream}");
                let wanted: &[u16] = if committed { &[200] } else { &[502, 503] };
                assert!(wanted.contains(&status), "{name} {stream}: {status} {code}");
                assert!(
                    !answer.text().contains("SENTINEL") && !answer.text().contains("127.0.0.1"),
                    "{name}: {}",
                    answer.text()
                );
                assert_eq!(answer.end, End::Whole, "{name} {stream}");
                asked += usize::from(*model != "refuse");
            }
        }
    }
    let posts = backend.received().iter().filter(|request| request.method == "POST").count();
    assert_eq!(posts, asked, "one dispatch, one call");
    unharmed(&mut fleet).await;
    let lines = [fleet.edge().lines(), fleet.node(0).lines()].concat();
    assert!(!lines.iter().any(|line| line.contains("SENTINEL")), "a provider's text is in no log");
}

#[tokio::test]
async fn a_backend_that_hangs_is_ended_by_the_client_s_own_timer() {
    // ADP-4, EDG-3, API-14; field reports 2, 20
    let backend = ScriptedBackend::builder().model("hang", Answer::events().late_head().hang()).start().await.unwrap();
    let mut fleet =
        Fleet::start(PROGRAMS, Plan::new(vec![ProviderPlan::new("p", &backend.base_url(), 4, &["hang"])])).await;
    for stream in [true, false] {
        let mut client = fleet.client().await;
        client.send(&Request::chat("hang", stream)).await;
        let head = timeout(Duration::from_millis(500), client.try_head()).await;
        assert!(head.is_err(), "no head before there is something to say: {head:?}");
        drop(client);
    }
    timeout(Duration::from_secs(5), backend.wait_for(|traffic| traffic.client_closed == 2)).await.unwrap();
    let answer = fleet.ask(&Request::chat("hang", true).header("x-iop-deadline-ms", "300")).await;
    assert_eq!(failure(&answer), (504, "deadline_exceeded".to_owned()));
    unharmed(&mut fleet).await;
}

#[test]
fn the_reader_of_these_tests_itself_takes_no_defect_for_an_answer() {
    // API-5, API-6: what would hide a failure must be seen
    let stream = |body: &'static str, end| read_parts(200, "text/event-stream", &body.into(), end);
    let some = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
    assert!(matches!(stream(some, End::Whole), Outcome::Defect(_)), "a clean end without [DONE]");
    assert_eq!(stream(some, End::Broken), Outcome::Broken { text: "a".to_owned() });
    let error = "data: {\"error\":{\"message\":\"m\",\"type\":\"t\",\"param\":null,\"code\":null}}\n\n";
    assert!(stream(error, End::Whole).is_error());
    for bad in [
        "data: {\"error\":{\"message\":\"m\",\"type\":\"t\",\"param\":null,\"code\":null}}\n\ndata: [DONE]\n\n",
        "data: {\"error\":{\"message\":\"m\",\"type\":\"t\",\"param\":null,\"code\":500}}\n\n",
        "data: {\"error\":\"m\"}\n\n",
        "data: {\n\n",
        "retry: 3000\n\ndata: [DONE]\n\n",
        "data: [DONE]\n\ndata: {\"choices\":[]}\n\n",
    ] {
        assert!(matches!(stream(bad, End::Whole), Outcome::Defect(_)), "{bad}");
    }
    let json = |status, body: &'static str| read_parts(status, "application/json", &body.into(), End::Whole);
    assert!(matches!(json(200, "{\"choices\":[]}"), Outcome::Defect(_)));
    assert!(matches!(json(500, "{\"detail\":\"x\"}"), Outcome::Defect(_)));
}
