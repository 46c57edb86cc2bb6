use iop_execution::failure::{FailureCode, FailureStage, ProviderContacted};
use iop_execution::testkit::Answer;
use iop_execution::testkit::cases::chat_case;

use super::*;

#[tokio::test]
async fn a_backend_that_resets_every_connection_counts_one_request_per_dispatch() {
    // NOD-10
    let backend = ScriptedBackend::builder().otherwise(Answer::reset_at_once()).start().await.unwrap();
    let adapter = adapter(&backend);
    for at in 1..=3 {
        let frames = collect(&mut tunnel(&adapter, "m", true)).await;
        let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!(failure.code, FailureCode::ProviderUnreachable);
        assert_eq!(failure.provider_contacted, ProviderContacted::Yes);
        assert_eq!(failure.stage, FailureStage::Prefill);
        assert_eq!(backend.traffic().requests, at);
    }
    collect(&mut run(&adapter, "m")).await;
    assert_eq!(backend.traffic().requests, 4);
}

#[tokio::test]
async fn a_used_connection_that_breaks_counts_one_request_too() {
    // NOD-10: HTTP clients like to repeat what failed on a connection from their pool
    let backend = ScriptedBackend::builder()
        .model("good", Answer::json(200, "{}"))
        .model("reset", Answer::reset_at_once())
        .model("cut", Answer::new(200).late_head().close())
        .start()
        .await
        .unwrap();
    let adapter = adapter(&backend);
    for name in ["reset", "cut"] {
        let before = backend.traffic().requests;
        collect(&mut tunnel(&adapter, "good", false)).await;
        let frames = collect(&mut tunnel(&adapter, name, false)).await;
        let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!(failure.provider_contacted, ProviderContacted::Yes, "{name}");
        assert_eq!(backend.traffic().requests, before + 2, "{name}");
        let [.., first, second] = &backend.received()[..] else { panic!("two requests") };
        assert_eq!(first.connection, second.connection, "the connection was used again");
    }
}

#[tokio::test]
async fn a_redirect_is_an_error_and_not_followed() {
    // SEC-1, NOD-10
    let elsewhere = ScriptedBackend::with_all_cases().await.unwrap();
    let location = format!("{}/v1/chat/completions", elsewhere.base_url());
    for status in [301, 302, 307, 308] {
        let answer = Answer::json(status, "{}").header("location", &location);
        let backend = ScriptedBackend::builder().otherwise(answer).start().await.unwrap();
        let frames = collect(&mut tunnel(&adapter(&backend), "ok", true)).await;
        let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!((failure.code, failure.upstream_status), (FailureCode::ProviderRejected, Some(status)));
    }
    assert_eq!(elsewhere.traffic().connections, 0);
}

#[tokio::test]
async fn a_backend_that_is_not_there_was_not_contacted() {
    // EXE-9
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let adapter = adapter_at(&format!("http://{gone}"));
    let frames = collect(&mut tunnel(&adapter, "m", true)).await;
    let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!(failure.code, FailureCode::ProviderUnreachable);
    assert_eq!(failure.provider_contacted, ProviderContacted::No);
    assert!(!failure.to_string().contains("127.0.0.1"));
    assert_eq!(adapter.probe_health(&target("m")).await, Health::Unavailable);
    adapter.start().await.expect("a backend that is down is no error");
}

#[tokio::test]
async fn the_backend_gets_our_headers_and_none_of_the_callers_secrets() {
    // SEC-1, SEC-2, CRD-16
    let key = std::env::temp_dir().join(format!("iop-key-{}", std::process::id()));
    std::fs::write(&key, "KEY-SENTINEL").unwrap();
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let reference = AuthReference::parse(&format!("file:{}", key.display())).unwrap();
    let config = OpenAiCompatConfig::new(backend.base_url()).with_auth(Some(reference));
    let adapter = Arc::new(OpenAiCompat::new(config).unwrap());
    std::fs::remove_file(&key).unwrap();

    let body = chat_json("http_401", "hello", true);
    let mut request = tunnel_request(&target("http_401"), body.clone(), true);
    for name in ["authorization", "cookie", "x-api-key", "host", "x-forwarded-for", "accept-encoding", "connection"] {
        request.headers.insert(name, "CALLER-SENTINEL".parse().unwrap());
    }
    let run_id = request.run_id.to_string();
    let mut execution = TunnelExecution::tunnel(Arc::clone(&adapter) as Arc<dyn Provider>, request);
    let frames = collect(&mut execution).await;

    let received = &backend.received()[0];
    assert_eq!(received.header("authorization"), Some("Bearer KEY-SENTINEL"));
    assert_eq!(received.header("accept-encoding"), Some("identity"));
    assert_eq!(received.header("content-length"), Some(body.len().to_string().as_str()));
    assert_eq!(received.header("transfer-encoding"), None);
    assert_eq!(received.header("x-request-id"), Some(run_id.as_str()));
    assert_eq!(received.header("host"), Some(backend.addr().to_string().as_str()));
    assert!(received.headers.iter().all(|(_, value)| !value.contains("CALLER-SENTINEL")));
    assert_eq!(received.body, body);
    for text in [format!("{adapter:?}"), format!("{frames:?}"), format!("{execution:?}")] {
        assert!(!text.contains("SENTINEL"), "{text}");
    }
}

#[tokio::test]
async fn a_body_in_chunks_keeps_its_length_and_one_that_breaks_off_is_said_so() {
    // SEC-1: length recomputed
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    let body = Bytes::from(chat_json("ok", &"x".repeat(100_000), true));
    let request = |chunks: Vec<Result<Bytes, iop_execution::request::BodyAborted>>| {
        let mut request = tunnel_request(&target("ok"), "", true);
        request.body = RequestBody::chunks(body.len() as u64, futures_util::stream::iter(chunks));
        TunnelExecution::tunnel(Arc::clone(&adapter) as Arc<dyn Provider>, request)
    };
    let frames = collect(&mut request(vec![Ok(body.slice(..1000)), Ok(body.slice(1000..))])).await;
    assert!(matches!(frames.last(), Some(TunnelFrame::End)), "{frames:?}");
    let received = &backend.received()[0];
    assert_eq!(received.header("content-length"), Some(body.len().to_string().as_str()));
    assert_eq!(received.body, body);

    let frames = collect(&mut request(vec![Ok(body.slice(..1000)), Err(iop_execution::request::BodyAborted)])).await;
    let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!(failure.code, FailureCode::InvalidRequest);
    assert_eq!(backend.traffic().requests, 1);
}

#[tokio::test]
async fn paths_outside_the_profile_never_reach_the_backend() {
    // SEC-1
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for (path, code) in [
        ("/v1/../admin", FailureCode::InvalidRequest),
        ("/v1/chat/completions?x=1", FailureCode::Unsupported),
        ("/api/pull", FailureCode::Unsupported),
        ("http://elsewhere/v1/models", FailureCode::InvalidRequest),
    ] {
        let mut request = tunnel_request(&target("ok"), "{}", true);
        path.clone_into(&mut request.path);
        let frames = collect(&mut TunnelExecution::tunnel(Arc::clone(&adapter) as Arc<dyn Provider>, request)).await;
        let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!((failure.code, failure.provider_contacted), (code, ProviderContacted::No), "{path}");
    }
    assert_eq!(backend.traffic().connections, 0);
}

#[tokio::test]
async fn wrong_kinds_of_answers_are_named() {
    // API-7
    let html = || Answer::new(200).header("content-type", "text/html").write("<html>SENTINEL</html>");
    let full = iop_execution::testkit::cases::full_answer().to_string();
    for (what, answer, stream) in [
        ("html for events", html(), true),
        ("html for json", html(), false),
        ("html that calls itself json", Answer::json(200, "<html>SENTINEL</html>"), false),
        ("not json", Answer::json(200, "SENTINEL"), false),
        ("cut json", Answer::json(200, full[..40].to_owned()), false),
        ("json that is no object", Answer::json(200, "[1]"), false),
        ("nothing", Answer::json(200, ""), false),
        (
            "events nobody asked for",
            chat_case("ok").unwrap().answer.without_stream(chat_case("ok").unwrap().answer),
            false,
        ),
        ("encoded json", Answer::json(200, full.clone()).header("content-encoding", "gzip"), false),
        ("encoded events", chat_case("ok").unwrap().answer.header("content-encoding", "br"), true),
        ("bad event", Answer::events().write("data: {\"choices\":[SENTINEL\n\n"), true),
        ("no text", Answer::events().write(&b"data: {\"a\":\"\xff\"}\n\n"[..]), true),
    ] {
        let backend = ScriptedBackend::builder().model("m", answer).start().await.unwrap();
        let frames = collect(&mut tunnel(&adapter(&backend), "m", stream)).await;
        let Some(TunnelFrame::Failed(failure)) = frames.last() else { panic!("{what}: {frames:?}") };
        assert_eq!(failure.code, FailureCode::ProviderProtocol, "{what}");
        assert!(!format!("{failure:?}").contains("SENTINEL"), "SEC-2: {what}");
    }
    let gave_up = Answer::json(200, full.replace("\"stop\"", "\"abort\""));
    let backend = ScriptedBackend::builder().model("m", gave_up).start().await.unwrap();
    let frames = collect(&mut tunnel(&adapter(&backend), "m", false)).await;
    let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!(failure.code, FailureCode::ProviderRejected, "ADP-3: an answer that was given up is none");
    let error = Answer::json(200, r#"{"error":{"message":"SENTINEL","code":503}}"#);
    for stream in [true, false] {
        let backend = ScriptedBackend::builder().model("m", error.clone()).start().await.unwrap();
        let frames = collect(&mut tunnel(&adapter(&backend), "m", stream)).await;
        let Some(TunnelFrame::Failed(failure)) = frames.last() else { panic!("{frames:?}") };
        assert_eq!((failure.code, failure.upstream_status), (FailureCode::ProviderRejected, Some(503)));
    }
}

#[tokio::test]
async fn a_whole_answer_passes_byte_for_byte_or_not_at_all() {
    // API-7, API-10
    let full = iop_execution::testkit::cases::full_answer().to_string();
    let long = full.replace("Hé", &"x".repeat(3 * 1024 * 1024));
    let cut =
        Answer::new(200).header("content-type", "application/json").header("content-length", "500").write(full.clone());
    let backend = ScriptedBackend::builder()
        .model("blank", Answer::new(200).header("content-type", "application/json").write("\n\n").write(full.clone()))
        .model("long", Answer::json(200, long.clone()))
        .model("cut", cut.close())
        .start()
        .await
        .unwrap();
    let adapter = adapter(&backend);
    for (name, sent) in [("blank", format!("\n\n{full}")), ("long", long)] {
        let frames = collect(&mut tunnel(&adapter, name, false)).await;
        assert!(matches!(frames.last(), Some(TunnelFrame::End)), "{name}");
        assert!(body_of(&frames) == sent.as_bytes(), "{name}");
        let largest = frames.iter().map(TunnelFrame::payload_bytes).max();
        assert!(largest <= Some(crate::observer::FRAME_BYTES));
    }
    let frames = collect(&mut tunnel(&adapter, "cut", false)).await;
    let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!(failure.code, FailureCode::ProviderUnreachable);
}

#[tokio::test]
async fn connections_are_used_again() {
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    for _ in 0..5 {
        collect(&mut tunnel(&adapter, "ok", false)).await;
    }
    assert_eq!(backend.traffic().requests, 5);
    assert!(backend.traffic().connections < 5, "{:?}", backend.traffic());
}

#[tokio::test]
async fn a_lent_key_is_on_its_call_alone_and_without_one_there_is_no_call() {
    // CRD-4, CRD-5, CRD-9, SEC-2: nor a list of models, nor a probe, and an answer that repeats the key is not shown
    let told = r#"{"error":{"message":"what is LENT-SENTINEL?","code":"bad"}}"#;
    let backend = ScriptedBackend::builder()
        .model("ok", Answer::json(200, "{}"))
        .model("bad", Answer::json(400, told))
        .start()
        .await
        .unwrap();
    let config = OpenAiCompatConfig::new(backend.base_url()).with_lent_key(true);
    let adapter = Arc::new(OpenAiCompat::new(config).unwrap());
    adapter.start().await.unwrap();
    assert_eq!(adapter.refresh().await, Refreshed::Answered);
    assert_eq!(adapter.probe_health(&target("ok")).await, Health::Unknown);
    assert!(adapter.capabilities().credentials);
    {
        let frames = collect(&mut tunnel(&adapter, "ok", false)).await;
        let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!(
            (failure.code, failure.provider_contacted),
            (FailureCode::CredentialRejected, ProviderContacted::No)
        );
    }
    assert_eq!(backend.traffic().requests, 0);

    for (name, header) in [("ok", "authorization"), ("bad", "x-api-key")] {
        let mut request = tunnel_request(&target(name), chat_json(name, "hello", false), false);
        request.headers.insert(header, "CALLER-SENTINEL".parse().unwrap());
        request.credential = CallCredential::new(header, b"LENT-SENTINEL").map(Arc::new);
        let mut execution = TunnelExecution::tunnel(Arc::clone(&adapter) as Arc<dyn Provider>, request);
        let frames = collect(&mut execution).await;
        let received = backend.received();
        let received = received.last().unwrap();
        let sent: Vec<_> = received.headers.iter().filter(|(_, value)| value.contains("SENTINEL")).collect();
        assert_eq!(sent.len(), 1, "{sent:?}");
        assert_eq!(received.header(header), Some("LENT-SENTINEL"));
        assert!(!String::from_utf8_lossy(&body_of(&frames)).contains("SENTINEL"));
        assert!(!format!("{frames:?} {execution:?}").contains("SENTINEL"));
    }
    assert_eq!(backend.traffic().requests, 2);
}

#[tokio::test]
async fn an_adapter_that_was_not_set_up_for_lent_keys_takes_none_and_uses_no_other() {
    // CRD-5, CRD-16: a key of its own must not stand in for one that was lent
    let backend = ScriptedBackend::builder().model("ok", Answer::json(200, "{}")).start().await.unwrap();
    let adapter = adapter(&backend);
    assert!(!adapter.capabilities().credentials);
    let mut request = tunnel_request(&target("ok"), chat_json("ok", "hello", false), false);
    request.credential = CallCredential::new("authorization", b"LENT").map(Arc::new);
    let mut execution = TunnelExecution::tunnel(Arc::clone(&adapter) as Arc<dyn Provider>, request);
    let frames = collect(&mut execution).await;
    let [TunnelFrame::Failed(failure)] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!((failure.code, failure.provider_contacted), (FailureCode::CredentialRejected, ProviderContacted::No));
    assert_eq!(backend.traffic().requests, 0);
}
