//! What a key with limits may do, through the whole surface.

use iop_execution::{FinishReason, Usage};
use serde_json::json;

use super::*;
use crate::rate_limit::KeyLimits;
use crate::token::{Token, TokenKind};

fn usage(input: u64, output: u64) -> TunnelFrame {
    TunnelFrame::Usage(Usage { input_tokens: Some(input), output_tokens: Some(output), ..Usage::default() })
}

fn answered() -> Reply {
    tunnel([head(200, "application/json"), content(r#"{"choices":[]}"#), usage(7, 5), TunnelFrame::End])
}

fn record(key: &Token, limits: KeyLimits) -> ApiKeyRecord {
    let principal = iop_execution::Principal::new("team").unwrap();
    ApiKeyRecord::new(key.id().clone(), key.hash(), principal, AllowedModels::All).with_limits(limits)
}

fn keys(key: &Token, limits: KeyLimits) -> Arc<ApiKeys> {
    Arc::new(ApiKeys::records([record(key, limits)]).unwrap())
}

fn asked_by(key: &Token, body: &str) -> Request<Full<Bytes>> {
    let mut request = post(body);
    request.headers_mut().insert("authorization", format!("Bearer {}", key.reveal()).parse().unwrap());
    request
}

fn rig(replies: impl IntoIterator<Item = Reply>, limits: KeyLimits) -> (Rig, Token) {
    let key = Token::generate(TokenKind::ApiKey).unwrap();
    let rig = Rig::with(replies, |config| config.with_keys(keys(&key, limits)));
    (rig, key)
}

fn header<'a>(response: &'a Response<OpenAiBody>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

/// Tokens that are left, and requests that run.
fn left(rig: &Rig, key: &Token) -> (u64, u32) {
    let meter = rig.service.limiter().meter(key.id()).unwrap();
    (meter.standings(record::now()).tokens.unwrap().remaining, meter.running())
}

#[tokio::test(start_paused = true)]
async fn requests_per_minute_end_in_openais_own_429_and_start_again() {
    // CRD-12, API-5
    let (rig, key) = rig([answered(), answered(), answered()], KeyLimits::new(2, 0, 0));
    let first = rig.send(asked_by(&key, CHAT)).await;
    let named = ["limit", "remaining", "reset"].map(|what| format!("x-ratelimit-{what}-requests"));
    let told = |response: &Response<OpenAiBody>| named.clone().map(|name| header(response, &name).to_owned());
    assert_eq!((first.status().as_u16(), told(&first)), (200, ["2", "1", "1m1s"].map(str::to_owned)));
    assert_eq!(header(&first, "x-ratelimit-limit-tokens"), "", "a limit that the key has not is not told");
    tokio::time::advance(Duration::from_secs(20)).await;
    assert_eq!(rig.send(asked_by(&key, CHAT)).await.status(), 200);

    let refused = rig.send(asked_by(&key, CHAT)).await;
    assert_eq!((refused.status().as_u16(), told(&refused)), (429, ["2", "0", "1m1s"].map(str::to_owned)));
    assert_eq!((header(&refused, "retry-after"), header(&refused, "retry-after-ms")), ("41", "41000"));
    let error = error_of(&whole(refused).await.1);
    assert_eq!((&error["code"], &error["type"]), (&json!("rate_limit_exceeded"), &json!("requests")));
    assert!(error["message"].as_str().unwrap().contains("Limit 2, Used 2, Requested 1. Please try again in 41s."));
    let record = rig.records.0.lock().unwrap().pop().unwrap();
    assert_eq!((record.ended_by, record.attempts, record.status), (EndedBy::KeyLimit, 0, 429));

    // Lists cost nothing, and are always there.
    let mut list = get("/v1/models");
    list.headers_mut().insert("api-key", key.reveal().parse().unwrap());
    assert_eq!(rig.send(list).await.status(), 200);
    tokio::time::advance(Duration::from_secs(41)).await;
    assert_eq!(rig.send(asked_by(&key, CHAT)).await.status(), 200);
}

/// Path, what is asked, what the provider answers.
type Way = (&'static str, &'static str, fn() -> Reply);

/// Every endpoint that a provider answers, by each wire it can go by.
fn every_way() -> [Way; 7] {
    fn by_tunnel(answer: &'static str) -> Reply {
        tunnel([head(200, "application/json"), content(answer), usage(7, 5), TunnelFrame::End])
    }
    fn by_run() -> Reply {
        let kinds = [RunEventKind::Start, RunEventKind::Delta("x".into()), RunEventKind::Complete(FinishReason::Stop)];
        let reported = Usage { input_tokens: Some(7), output_tokens: Some(5), ..Usage::default() };
        let events: Vec<_> =
            (1..).zip(kinds).map(|(seq, kind)| RunEvent { seq, kind, usage: (seq == 3).then_some(reported) }).collect();
        Reply::Run(Box::pin(stream::iter(events)))
    }
    let choices = || by_tunnel(r#"{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}"#);
    // Long enough that some tokens are expected of each.
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"hi there"}]}"#;
    let input = r#"{"model":"m","input":"hi there"}"#;
    let message = r#"{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi there"}]}"#;
    [
        ("/v1/chat/completions", chat, choices),
        ("/v1/chat/completions", chat, by_run),
        ("/v1/responses", input, choices),
        ("/v1/responses", input, by_run),
        ("/v1/completions", r#"{"model":"m","prompt":"hi there"}"#, || by_tunnel(r#"{"choices":[{"text":"x"}]}"#)),
        ("/v1/embeddings", input, || by_tunnel(r#"{"data":[]}"#)),
        ("/v1/messages", message, || by_tunnel(r#"{"type":"message","content":[]}"#)),
    ]
}

/// The beginning of an answer, and nothing more.
fn begun(reply: Reply) -> Reply {
    match reply {
        Reply::Tunnel(frames) => Reply::Tunnel(Box::pin(frames.take(1).chain(stream::pending()))),
        Reply::Run(events) => Reply::Run(Box::pin(events.take(1).chain(stream::pending()))),
        Reply::Noted(..) | Reply::Refuse(_) | Reply::Wait => unreachable!("no answer"),
    }
}

/// Asks once more, with the key's limit used up: told so in the endpoint's own shape, and nobody is asked.
async fn refused_at_the_door(rig: &Rig, request: Request<Full<Bytes>>, of: &str, retry_after: &str, what: &str) {
    let messages = request.uri().path() == "/v1/messages";
    let refused = rig.send(request).await;
    assert_eq!((refused.status().as_u16(), header(&refused, "retry-after")), (429, retry_after), "{what}");
    let answer: Value = serde_json::from_str(&whole(refused).await.1).unwrap();
    let error = &answer["error"];
    if messages {
        assert_eq!((&answer["type"], &error["type"]), (&json!("error"), &json!("rate_limit_error")), "{what}");
    } else {
        assert_eq!((&error["code"], &error["type"]), (&json!("rate_limit_exceeded"), &json!(of)), "{what}");
    }
    assert_eq!(rig.script.seen.lock().unwrap().len(), 1, "{what}: the second one reached the engine");
    let ended = rig.records.0.lock().unwrap().pop().unwrap();
    assert_eq!((ended.ended_by, ended.attempts, ended.status), (EndedBy::KeyLimit, 0, 429), "{what}");
}

#[tokio::test(start_paused = true)]
async fn no_endpoint_and_no_wire_is_a_way_around_a_limit() {
    // CRD-12, API-5; field report 90
    for (path, body, reply) in every_way() {
        let asking = |key: &Token| {
            let mut request = post_to(path, body);
            request.headers_mut().insert("authorization", format!("Bearer {}", key.reveal()).parse().unwrap());
            request
        };
        // Of tokens, all that there are is what the first one reports.
        for (limits, of) in [(KeyLimits::new(1, 0, 0), "requests"), (KeyLimits::new(0, 12, 0), "tokens")] {
            let (rig, key) = rig([reply(), reply()], limits);
            let wire = if matches!(reply(), Reply::Run(_)) { "run" } else { "tunnel" };
            let what = format!("{path} by {wire}, {of} per minute");
            assert_eq!(whole(rig.send(asking(&key)).await).await.0, 200, "{what}");
            refused_at_the_door(&rig, asking(&key), of, "60", &what).await;
        }
        let (rig, key) = rig([begun(reply()), reply()], KeyLimits::new(0, 0, 1));
        let running = rig.send(asking(&key));
        tokio::pin!(running);
        assert!(tokio::time::timeout(Duration::from_millis(1), &mut running).await.is_err(), "{path}");
        refused_at_the_door(&rig, asking(&key), "requests", "1", &format!("{path}, at once")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_over_its_limit_is_refused_without_its_body() {
    // CRD-12
    let (rig, key) = rig([answered()], KeyLimits::new(1, 0, 0));
    rig.send(asked_by(&key, CHAT)).await;
    let upload = http_body_util::StreamBody::new(stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>());
    let request = Request::post("/v1/chat/completions")
        .header("authorization", format!("Bearer {}", key.reveal()))
        .body(Box::pin(upload))
        .unwrap();
    assert_eq!(rig.send(request).await.status(), 429);
}

#[tokio::test(start_paused = true)]
async fn tokens_are_charged_as_reported_and_held_back_before() {
    // CRD-12, LEA-2
    let (rig, key) = rig([hanging([]), answered()], KeyLimits::new(0, 100, 0));
    let long = CHAT.replace("hi", &"x".repeat(240));
    let estimate = u64::from(estimate_prompt_tokens(240));
    assert!((55..=100).contains(&estimate), "{estimate}");
    {
        let request = asked_by(&key, &long);
        let running = rig.send(request);
        tokio::pin!(running);
        assert!(tokio::time::timeout(Duration::from_millis(1), &mut running).await.is_err());
        assert_eq!(left(&rig, &key), (100 - estimate, 1), "held back while it runs");
        let refused = rig.send(asked_by(&key, &long)).await;
        assert_eq!(header(&refused, "x-ratelimit-remaining-tokens"), (100 - estimate).to_string());
        assert_eq!((refused.status().as_u16(), header(&refused, "retry-after")), (429, "1"));
        let error = error_of(&whole(refused).await.1);
        assert_eq!((&error["code"], &error["type"]), (&json!("rate_limit_exceeded"), &json!("tokens")));
    }
    // The client left before a report: what was expected counts, once.
    assert_eq!(left(&rig, &key), (100 - estimate, 0));
    tokio::time::advance(Duration::from_secs(61)).await;
    let response = rig.send(asked_by(&key, CHAT)).await;
    assert_eq!(header(&response, "x-ratelimit-remaining-tokens"), "88", "what was reported, not what was expected");
    assert_eq!(left(&rig, &key), (88, 0));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_larger_than_the_limit_is_never_tried_again() {
    // CRD-12
    let (rig, key) = rig([], KeyLimits::new(0, 10, 0));
    let refused = rig.send(asked_by(&key, &CHAT.replace("hi", &"x".repeat(400)))).await;
    assert_eq!((refused.status().as_u16(), header(&refused, "x-should-retry")), (429, "false"));
    assert!(!refused.headers().contains_key("retry-after"));
    assert!(error_of(&whole(refused).await.1)["message"].as_str().unwrap().starts_with("Request too large"));
    assert_eq!(left(&rig, &key), (10, 0));
}

#[tokio::test(start_paused = true)]
async fn each_way_a_request_ends_settles_it_once() {
    // CRD-12
    let limits = KeyLimits::new(0, 1000, 1);
    let (estimate, text) = (u64::from(estimate_prompt_tokens(80)), "x".repeat(80));
    let (chat, streamed) = (&*CHAT.replace("hi", &text), &*STREAM.replace("hi", &text));
    let partial = TunnelFrame::Usage(Usage { output_tokens: Some(3), ..Usage::default() });
    let chunk = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n";
    let broken = TunnelFrame::Failed(ExecutionFailure::new(
        FailureCode::ProviderProtocol,
        iop_execution::FailureStage::Stream,
        iop_execution::ProviderContacted::Yes,
        "it failed",
    ));
    let deadline = iop_execution::CancelReason::EdgeDeadline;
    let long = chunk.replace("\"x\"", &format!("\"{}\"", "y".repeat(400)));
    let document = format!(r#"{{"choices":[{{"message":{{"content":"{}"}}}}]}}"#, "y".repeat(400));
    for (what, replies, body, charged) in [
        ("refused by the queue", vec![Reply::Refuse(SubmitError::QueueTimeout)], chat, 0),
        ("no such model", vec![], r#"{"model":"x","messages":[{"role":"user","content":"hi"}]}"#, 0),
        ("bad body", vec![], "{}", 0),
        ("failed at the provider", vec![tunnel([broken])], chat, estimate),
        ("refused by its node", vec![tunnel([failed(FailureCode::CredentialRejected)])], chat, 0),
        (
            "not sent",
            vec![Reply::Noted(EndNote::NotSent, Box::new(tunnel([TunnelFrame::Cancelled(deadline)])))],
            chat,
            0,
        ),
        ("streamed text, no usage", vec![tunnel([sse(), content(&long), done()])], streamed, estimate + 100),
        (
            "text, no usage",
            vec![tunnel([head(200, "application/json"), content(&document), TunnelFrame::End])],
            chat,
            estimate + 100,
        ),
        ("streamed, no usage", vec![tunnel([sse(), content(chunk), done()])], streamed, estimate),
        ("streamed, usage", vec![tunnel([sse(), content(chunk), usage(15, 3), done()])], streamed, 18),
        ("a part of usage", vec![tunnel([sse(), content(chunk), partial, done()])], streamed, estimate + 3),
        (
            "cut after content",
            vec![tunnel([sse(), content(chunk), failed(FailureCode::Disconnected)])],
            streamed,
            estimate,
        ),
    ] {
        let (rig, key) = rig(replies, limits);
        let response = rig.send(asked_by(&key, body)).await;
        let _ended = response.into_body().collect().await;
        assert_eq!(left(&rig, &key), (1000 - charged, 0), "{what}");
    }
    // A client that leaves in the middle of its stream.
    let (rig, key) = rig([hanging([sse(), content(&long)])], limits);
    let mut response = rig.send(asked_by(&key, streamed)).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(left(&rig, &key).1, 1, "it runs");
    let second = rig.send(asked_by(&key, STREAM)).await;
    assert_eq!((second.status().as_u16(), header(&second, "retry-after")), (429, "1"));
    assert_eq!(error_of(&whole(second).await.1)["type"], "requests");
    drop(response);
    assert_eq!(left(&rig, &key), (1000 - estimate - 100, 0), "what it has counts, though nobody reported it");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_sent_twice_settles_once_with_what_both_reported() {
    // CRD-12, REC-4
    let key = Token::generate(TokenKind::ApiKey).unwrap();
    let rig = Rig::with([tunnel([failed(FailureCode::ProviderUnreachable)]), answered()], |mut config| {
        config.max_extra_attempts = 1;
        config.with_keys(keys(&key, KeyLimits::new(5, 1000, 1)))
    });
    assert_eq!(whole(rig.send(asked_by(&key, CHAT)).await).await.0, 200);
    assert_eq!(rig.record().attempts, 2);
    assert_eq!(left(&rig, &key), (988, 0));
    let meter = rig.service.limiter().meter(key.id()).unwrap();
    assert_eq!(meter.standings(record::now()).requests.unwrap().remaining, 4, "one request of the client's");
}

#[tokio::test(start_paused = true)]
async fn a_reload_keeps_counts_and_an_expired_key_says_so() {
    // CRD-12, CFG-2
    let (rig, key) = rig([answered(), answered()], KeyLimits::new(1, 0, 0));
    assert_eq!(rig.send(asked_by(&key, CHAT)).await.status(), 200);
    rig.service.replace_config(OpenAiConfig::default().with_keys(keys(&key, KeyLimits::new(1, 50, 0))));
    assert_eq!(rig.send(asked_by(&key, CHAT)).await.status(), 429, "a reload is no way around a limit");
    rig.service.replace_config(OpenAiConfig::default().with_keys(keys(&key, KeyLimits::new(2, 50, 0))));
    let response = rig.send(asked_by(&key, CHAT)).await;
    assert_eq!((response.status().as_u16(), header(&response, "x-ratelimit-remaining-requests")), (200, "0"));

    let secrets = crate::token::TokenSecrets::new(key.hash()).expiring(Some(1_000));
    let principal = iop_execution::Principal::new("team").unwrap();
    let ended = ApiKeyRecord::new(key.id().clone(), secrets, principal, AllowedModels::All);
    let mut config = OpenAiConfig::default().with_keys(Arc::new(ApiKeys::records([ended]).unwrap()));
    config.unix_time = || 1_000;
    rig.service.replace_config(config);
    let refused = rig.send(asked_by(&key, CHAT)).await;
    assert_eq!(refused.status(), 401);
    let error = error_of(&whole(refused).await.1);
    assert!(error["code"] == "invalid_api_key" && error["message"].as_str().unwrap().contains("expired"), "{error}");
    let (id, usage) = rig.service.limiter().usage(record::now()).pop().unwrap();
    assert_eq!((id, usage.requests, usage.limits), (key.id().clone(), 2, KeyLimits::default()), "without limits, too");
}

#[tokio::test(start_paused = true)]
async fn a_key_without_limits_is_counted_and_told_nothing() {
    // CRD-12, BIN-3
    let (rig, key) = rig([hanging([sse()]), answered()], KeyLimits::default());
    let running = rig.send(asked_by(&key, STREAM));
    tokio::pin!(running);
    assert!(tokio::time::timeout(Duration::from_millis(1), &mut running).await.is_err());
    let response = rig.send(asked_by(&key, CHAT)).await;
    assert!(response.headers().keys().all(|name| !name.as_str().starts_with("x-ratelimit")), "{response:?}");
    drop(response);
    let meter = rig.service.limiter().meter(key.id()).unwrap();
    let usage = meter.usage(record::now());
    assert_eq!((usage.running, usage.requests), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_client_may_ask_for_a_priority_up_to_that_of_its_key() {
    // CRD-12, QUE-1
    let key = Token::generate(TokenKind::ApiKey).unwrap();
    let record = record(&key, KeyLimits::default()).with_priority(1).with_max_priority(5);
    let keys = Arc::new(ApiKeys::records([record]).unwrap());
    for (asked, want) in
        [(None, Some(1)), (Some("-3"), Some(-3)), (Some("5"), Some(5)), (Some("6"), Some(5)), (Some("x"), None)]
    {
        let rig = Rig::with([Reply::Refuse(SubmitError::Unavailable)], |config| config.with_keys(Arc::clone(&keys)));
        let mut request = asked_by(&key, CHAT);
        if let Some(asked) = asked {
            request.headers_mut().insert("x-iop-priority", asked.parse().unwrap());
        }
        let status = rig.send(request).await.status();
        let sent = rig.script.seen.lock().unwrap().pop().map(|seen| seen.request.priority);
        assert_eq!((status.as_u16(), sent), (if want.is_some() { 503 } else { 400 }, want), "{asked:?}");
    }
}
