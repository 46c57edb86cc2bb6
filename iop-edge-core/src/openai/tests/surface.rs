use serde_json::json;

use super::*;
use crate::token::{Token, TokenKind};

#[tokio::test(start_paused = true)]
async fn models_are_listed_as_the_key_may_use_them_and_as_they_can_be_served() {
    // API-1, API-12
    let rig = Rig::new([]);
    let (status, text) = whole(rig.send(get("/v1/models")).await).await;
    let list: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, 200);
    assert_eq!(list["data"].as_array().unwrap().len(), 2);
    assert_eq!(
        list["data"][0],
        json!({"id":"m","object":"model","created":1_700_000_000,"owned_by":"iop","context_length":8192,
            "capabilities":{"tools":true,"reasoning":false},"available":true})
    );
    for path in ["/v1/models/org/name:tag", "/models/org%2Fname:tag/"] {
        let (status, text) = whole(rig.send(get(path)).await).await;
        assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()["id"].clone()), (200, json!("org/name:tag")));
    }
    for path in ["/v1/models/absent", "/v1/models/nope", "/v1/models/%ff"] {
        let (status, text) = whole(rig.send(get(path)).await).await;
        assert_eq!(
            (status, &error_of(&text)["code"], &error_of(&text)["param"]),
            (404, &json!("model_not_found"), &json!("model"))
        );
    }
    let rig = Rig::with([], |mut config| {
        config.list_unavailable = true;
        config
    });
    let (_, text) = whole(rig.send(get("/models")).await).await;
    assert!(text.contains("absent"));
}

#[tokio::test(start_paused = true)]
async fn what_is_not_here_is_typed() {
    // API-1, API-5: never a bare status
    let rig = Rig::new([]);
    for (method, path, status, code) in [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/m", 405, "method_not_allowed"),
        ("GET", "/v1/responses/resp_1", 501, "unsupported_endpoint"),
        ("POST", "/v1/messages/count_tokens", 501, "unsupported_endpoint"),
        ("GET", "/embeddings", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
    ] {
        let request = Request::builder().method(method).uri(path).body(Full::<Bytes>::default()).unwrap();
        let response = rig.send(request).await;
        assert_eq!(response.headers().contains_key("allow"), status == 405);
        let (found, text) = whole(response).await;
        assert_eq!((found, &error_of(&text)["code"]), (status, &json!(code)), "{method} {path}");
    }
    let request = Request::builder().method("OPTIONS").uri("/v1/models").body(Full::<Bytes>::default()).unwrap();
    let response = rig.send(request).await;
    assert_eq!((response.status().as_u16(), &response.headers()["allow"]), (204, &"GET, HEAD".parse().unwrap()));
    assert!(!response.headers().keys().any(|name| name.as_str().starts_with("access-control")), "CORS is closed");
}

#[tokio::test(start_paused = true)]
async fn health_is_the_process_and_readiness_a_provider() {
    // OPS-3
    for (ready, status) in [(true, 200), (false, 503)] {
        let rig = Rig::full([], ready, |config| config.with_keys(Arc::new(ApiKeys::fixed("k"))));
        assert_eq!(rig.send(get("/healthz")).await.status(), 200, "no key needed");
        let response = rig.send(get("/readyz")).await;
        assert_eq!(response.status(), status);
        assert_eq!(response.headers().contains_key("retry-after"), !ready);
        assert!(rig.records.0.lock().unwrap().is_empty(), "health checks fill no log");
    }
}

#[tokio::test(start_paused = true)]
async fn every_answer_carries_our_marks_and_ids_of_our_own() {
    // API-5; a client's x-request-id names nothing here
    let rig = Rig::with([tunnel([sse(), content("data: {}\n\n"), done(), TunnelFrame::End])], |config| config);
    let mut ids = Vec::new();
    for request in [get("/v1/models"), get("/nope"), get("/healthz"), post("{"), post(CHAT), post(STREAM)] {
        let (mut head, body) = request.into_parts();
        head.headers.insert("x-request-id", "same".parse().unwrap());
        if ids.len() == 4 {
            rig.script.replies.lock().unwrap().push_front(Reply::Refuse(SubmitError::Unavailable));
        }
        let response = rig.send(Request::from_parts(head, body)).await;
        assert_eq!(response.headers()["x-iop-edge"], "1");
        assert!(response.headers().contains_key("openai-processing-ms"));
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(id.starts_with("req_") && id.len() == 36, "{id}");
        ids.push(id);
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 6);
}

#[tokio::test(start_paused = true)]
async fn without_a_key_no_more_than_a_small_part_is_taken_in_and_nothing_is_understood() {
    // API-13
    let rig = Rig::with([], |config| config.with_keys(Arc::new(ApiKeys::fixed("secret"))));
    let taken = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = Arc::clone(&taken);
    let endless = stream::repeat_with(move || {
        count.fetch_add(1 << 10, Ordering::SeqCst);
        Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(&[b' '; 1 << 10])))
    });
    let post = || Request::post("/v1/chat/completions").header("authorization", "Bearer wrong");
    let response = rig.send(post().body(Box::pin(http_body_util::StreamBody::new(endless))).unwrap()).await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["www-authenticate"]),
        (401, &"Bearer".parse().unwrap())
    );
    assert_eq!(error_of(&whole(response).await.1)["code"], "invalid_api_key");
    let taken = taken.load(Ordering::SeqCst);
    assert!((config::DISCARD_BYTES..=config::DISCARD_BYTES + (2 << 10)).contains(&taken), "{taken}");
    // One that never sends its body is not waited for.
    let began = tokio::time::Instant::now();
    let never = stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>();
    let response = rig.send(post().body(Box::pin(http_body_util::StreamBody::new(never))).unwrap()).await;
    assert_eq!((response.status().as_u16(), began.elapsed()), (401, config::DISCARD_TIME));
    assert_eq!(rig.send(get("/v1/models")).await.status(), 401);
}

#[tokio::test(start_paused = true)]
async fn who_asks_before_the_upload_is_refused_at_once_and_who_uploads_gets_the_answer() {
    // API-13, SEC-3
    let rig = Rig::with([], |config| config.with_keys(Arc::new(ApiKeys::fixed("secret"))));
    let never = || {
        let never = stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>();
        Box::pin(http_body_util::StreamBody::new(never))
    };
    let post = |key: &str| Request::post("/v1/chat/completions").header("authorization", format!("Bearer {key}"));
    let took = async |request| {
        let began = tokio::time::Instant::now();
        (rig.send(request).await.status().as_u16(), began.elapsed())
    };
    let asking = post("wrong").header("expect", "100-continue").body(never()).unwrap();
    assert_eq!(took(asking).await, (401, Duration::ZERO), "its body is not invited");
    for (name, value) in [("x-iop-deadline-ms", "soon"), ("x-iop-priority", "high")] {
        let uploading = post("secret").header(name, value).body(never()).unwrap();
        assert_eq!(took(uploading).await, (400, config::DISCARD_TIME), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_model_that_may_not_be_used_looks_like_one_that_does_not_exist() {
    // API-13
    let key = Token::generate(TokenKind::ApiKey).unwrap();
    let principal = iop_execution::Principal::new("team").unwrap();
    let models = AllowedModels::Only(vec![ModelName::new("org/name:tag").unwrap()]);
    let record = ApiKeyRecord::new(key.id().clone(), key.hash(), principal, models);
    let keys = ApiKeys::records([record]).unwrap();
    let rig = Rig::with([], |config| config.with_keys(Arc::new(keys)));
    let ask = |model: &str| {
        let mut request = post(&CHAT.replace("\"m\"", &format!("\"{model}\"")));
        request.headers_mut().insert("authorization", format!("Bearer {}", key.reveal()).parse().unwrap());
        request
    };
    let (forbidden, unknown) = (whole(rig.send(ask("m")).await).await, whole(rig.send(ask("x")).await).await);
    assert_eq!(forbidden.0, 404);
    assert_eq!(forbidden.1.replace("'m'", "'x'"), unknown.1);
    let mut listed = get("/v1/models");
    listed.headers_mut().insert("api-key", key.reveal().parse().unwrap());
    let (_, text) = whole(rig.send(listed).await).await;
    assert!(text.contains("org/name:tag") && !text.contains("\"m\""));
    rig.script.replies.lock().unwrap().push_back(Reply::Refuse(SubmitError::Unavailable));
    assert_eq!(whole(rig.send(ask("org/name:tag")).await).await.0, 503);
    let seen = rig.script.seen.lock().unwrap().pop().unwrap();
    assert_eq!(seen.request.principal.map(|p| p.to_string()).as_deref(), Some("team"));
}

#[tokio::test(start_paused = true)]
async fn refusals_of_the_engine_reach_the_client_as_statuses() {
    // API-5, API-15: overload is a queue's answer
    for (error, status) in [
        (SubmitError::QueueFull { retry_after: Duration::from_secs(2) }, 429),
        (SubmitError::QueueTimeout, 503),
        (SubmitError::ShuttingDown, 503),
        (SubmitError::DeadlineExceeded, 504),
    ] {
        let rig = Rig::new([Reply::Refuse(error.clone())]);
        let response = rig.chat(STREAM).await;
        assert_eq!(response.status(), status, "{error}");
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(rig.record().model_label(), "m");
    }
}
