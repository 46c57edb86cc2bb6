//! Embeddings and completions of the older API: passed by tunnel, as the provider takes and gives them.

use iop_execution::Usage;
use serde_json::json;

use super::*;

const EMBED: &str = r#"{"model":"m","input":["a","b"],"encoding_format":"base64","dimensions":1e2}"#;
const COMPLETE: &str = r#"{"prompt":"once","model":"m","stream":true}"#;

impl Rig {
    async fn ask(&self, path: &str, body: &str) -> (u16, String) {
        whole(self.send(post_to(path, body)).await).await
    }
}

#[tokio::test(start_paused = true)]
async fn embeddings_pass_as_they_are_in_either_encoding() {
    // API-1, API-3, API-10 a
    for value in ["[0.10,-1e-7]", "\"AAAAPw==\""] {
        let answer = |model: &str| {
            let data = format!(r#"{{"object":"embedding","index":0,"embedding":{value}}}"#);
            format!(r#"{{"object":"list","data":[{data}],"model":"{model}","usage":{{"prompt_tokens":2}}}}"#)
        };
        let usage = Usage { input_tokens: Some(2), ..Usage::default() };
        let frames = [
            head(200, "application/json"),
            content(&answer("org/target")),
            TunnelFrame::Usage(usage),
            TunnelFrame::End,
        ];
        let rig = Rig::new([tunnel(frames)]);
        assert_eq!(rig.ask("/v1/embeddings", EMBED).await, (200, answer("m")));
        let record = rig.record();
        assert_eq!((record.endpoint, record.usage, record.attempts), (Endpoint::Embeddings, Some(usage), 1));
        let (_, sent) = rig.sent_to("/v1/embeddings");
        assert_eq!(sent, EMBED.replace("\"m\"", "\"org/target\""));
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_embeddings_is_none() {
    // API-7
    for text in ["{}", r#"{"choices":[]}"#, r#"{"data":{}}"#, "<html>"] {
        let rig = Rig::new([tunnel([head(200, "application/json"), content(text), TunnelFrame::End])]);
        let (status, answer) = rig.ask("/embeddings", EMBED).await;
        assert_eq!((status, &error_of(&answer)["code"]), (502, &json!("bad_gateway")), "{text}");
    }
    let rig = Rig::new([tunnel([
        head(400, "application/json"),
        content(r#"{"object":"error","message":"no pooling","code":400}"#),
        failed(FailureCode::ProviderRejected),
    ])]);
    let (status, answer) = rig.ask("/v1/embeddings", EMBED).await;
    assert_eq!((status, &error_of(&answer)["message"]), (400, &json!("no pooling")));
}

#[tokio::test(start_paused = true)]
async fn completions_stream_with_usage_asked_for_and_taken_out_again() {
    // API-1, API-4, API-6
    let token = r#"data: {"object":"text_completion","model":"org/target","choices":[{"text":"x","index":0}]}"#;
    let token = format!("{token}\n\n");
    let frames = || {
        let usage = body("data: {\"choices\":[],\"usage\":{}}\n\n", FrameFlags::USAGE);
        tunnel([sse(), content(&token), usage, done(), TunnelFrame::End])
    };
    let rig = Rig::new([frames()]);
    let want = format!("{}data: [DONE]\n\n", token.replace("org/target", "m"));
    assert_eq!(rig.ask("/v1/completions", COMPLETE).await, (200, want));
    let (headers, sent) = rig.sent_to("/v1/completions");
    assert_eq!(headers["accept"], "text/event-stream");
    assert_eq!(sent, r#"{"prompt":"once","model":"org/target","stream":true,"stream_options":{"include_usage":true}}"#);
    assert_eq!(rig.record().endpoint, Endpoint::Completions);

    let broken = Rig::new([tunnel([sse(), content(&token), failed(FailureCode::Disconnected)])]);
    let (status, text) = broken.ask("/v1/completions", COMPLETE).await;
    assert_eq!(status, 200);
    assert!(text.contains("provider_unavailable") && !text.contains("[DONE]"));
}

#[tokio::test(start_paused = true)]
async fn they_are_never_sent_again() {
    // REC-1
    for (path, ask) in [("/v1/embeddings", EMBED), ("/v1/completions", COMPLETE)] {
        let replies = [tunnel([failed(FailureCode::Disconnected)]), tunnel([])];
        let rig = Rig::with(replies, |mut config| {
            config.max_extra_attempts = 2;
            config
        });
        assert_eq!(rig.ask(path, ask).await.0, 503);
        let record = rig.record();
        assert_eq!((record.attempts, record.outcome), (1, Outcome::Ineligible), "{path}");
        assert_eq!(
            *rig.records.1.lock().unwrap().first().unwrap(),
            LivenessObservation::Considered {
                decision: LivenessDecision::Ineligible,
                reason: LivenessReason::PolicyOff
            }
        );
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_provider_that_takes_tunnels_it_is_typed() {
    // API-1, SEL-3
    let run = || run([RunEventKind::Start]);
    for (path, ask) in [("/v1/embeddings", EMBED), ("/v1/completions", COMPLETE)] {
        let rig = Rig::new([run()]);
        let (status, text) = rig.ask(path, ask).await;
        assert_eq!((status, &error_of(&text)["code"]), (404, &json!("unsupported_endpoint")), "{path}");
        let rig = Rig::new([run()]);
        let (status, text) = rig.ask(path, &ask.replace("\"m\"", "\"absent\"")).await;
        assert_eq!((status, &error_of(&text)["code"]), (503, &json!("no_provider_available")), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_no_request_is_refused_before_admission() {
    // API-3
    let rig = Rig::new([]);
    for (path, body, param) in [
        ("/v1/embeddings", r#"{"model":"m"}"#, json!("input")),
        ("/v1/embeddings", r#"{"model":"m","input":""}"#, json!("input")),
        ("/v1/embeddings", r#"{"model":"m","input":[ ]}"#, json!("input")),
        ("/v1/embeddings", r#"{"model":"m","input":1}"#, json!("input")),
        ("/v1/embeddings", r#"{"model":"m","input":"a","stream":true}"#, json!("stream")),
        ("/v1/embeddings", r#"{"model":"m","input":"a","Model":"x"}"#, json!("model")),
        ("/v1/completions", r#"{"prompt":"x"}"#, json!("model")),
        ("/v1/completions", r#"{"model":"m","prompt":"x","stream":1}"#, json!("stream")),
        ("/v1/completions", r#"{"model":"m","prompt":"x","prompt":"y"}"#, json!("prompt")),
        ("/v1/completions", r#"[]"#, json!(null)),
    ] {
        let (status, text) = rig.ask(path, body).await;
        assert_eq!((status, &error_of(&text)["param"]), (400, &param), "{path} {body}");
    }
    assert!(rig.script.seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_engine_is_told_wire_and_size() {
    // LEA-2, SEL-3: text or tokens, a quarter of what is written
    let rig = Rig::new([Reply::Refuse(SubmitError::QueueTimeout)]);
    let long = format!(r#"{{"model":"m","input":"{}"}}"#, "x".repeat(398));
    assert_eq!(rig.ask("/v1/embeddings", &long).await.0, 503);
    let seen = rig.script.seen.lock().unwrap().pop().unwrap().request;
    assert_eq!((seen.wire, seen.prompt_tokens_estimate, seen.stream), (Some(WireKind::Tunnel), 100, false));
}
