//! Anthropic's messages: passed by tunnel to providers that speak them, with errors in their own shape.

use iop_execution::Usage;
use serde_json::json;

use super::*;

const ASK: &str = r#"{"model":"m","max_tokens":1e1,"messages":[{"role":"user","content":"hi"}]}"#;
const ASK_STREAM: &str = r#"{"model":"m","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"hi"}]}"#;

fn event(kind: &str, rest: &str) -> String {
    format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{rest}}}\n\n")
}

fn start(model: &str) -> String {
    event("message_start", &format!(r#","message":{{"id":"1","model":"{model}","usage":{{"input_tokens":3}}}}"#))
}

fn text() -> String {
    event("content_block_delta", r#","index":0,"delta":{"type":"text_delta","text":"x"}"#)
}

fn stop() -> String {
    event("message_stop", "")
}

/// The object of an error in Anthropic's shape, and nothing beside it.
fn anthropic(text: &str) -> (String, String) {
    let json = text.strip_prefix("event: error\ndata: ").unwrap_or(text);
    let value: Value = serde_json::from_str(json.trim_end()).unwrap_or_else(|_| panic!("no error: {text}"));
    let error = &value["error"];
    let (kind, message) = (error["type"].as_str().unwrap(), error["message"].as_str().unwrap());
    assert_eq!(value, json!({ "type": "error", "error": { "type": kind, "message": message } }));
    (kind.to_owned(), message.to_owned())
}

impl Rig {
    async fn message(&self, body: &str) -> (u16, String) {
        whole(self.send(post_to("/v1/messages", body)).await).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_passes_with_the_public_name_and_ends_with_its_own_last_event() {
    // API-1, API-6, API-10 a: every other byte is the provider's, no `[DONE]`
    let usage = Usage { input_tokens: Some(3), output_tokens: Some(1), ..Usage::default() };
    let tail = [event("message_delta", r#","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}"#), stop()];
    let rig = Rig::new([hanging([
        sse(),
        lifecycle(&start("org/target")),
        content(&text()),
        lifecycle(&tail[0]),
        TunnelFrame::Usage(usage),
        body(&tail[1], FrameFlags::TERMINAL),
    ])]);
    let (status, answer) = rig.message(ASK_STREAM).await;
    assert_eq!((status, answer), (200, [start("m"), text(), tail.concat()].concat()));
    let record = rig.record();
    assert_eq!((record.endpoint, record.usage, record.attempts), (Endpoint::Messages, Some(usage), 1));
    assert_eq!((record.edits.count(Edit::Model), record.outcome), (1, Outcome::Completed));
    let asked = rig.script.seen.lock().unwrap()[0].request.messages;
    assert!(asked, "only a provider that speaks it");
    assert_eq!(
        rig.sent_to("/v1/messages").1,
        ASK_STREAM.replace("\"m\"", "\"org/target\""),
        "API-3: no stream_options"
    );
}

#[tokio::test(start_paused = true)]
async fn a_whole_message_is_renamed_and_nothing_else() {
    // API-1, API-10 a
    let answer =
        |model: &str| format!(r#"{{"type":"message","content":[{{"model":"org/target"}}],"model":"{model}","n":1.0}}"#);
    let rig = Rig::new([tunnel([head(200, "application/json"), content(&answer("org/target")), TunnelFrame::End])]);
    assert_eq!(rig.message(ASK).await, (200, answer("m")));
    for text in ["{}", r#"{"choices":[]}"#, "<html>"] {
        let rig = Rig::new([tunnel([head(200, "application/json"), content(text), TunnelFrame::End])]);
        let (status, answer) = rig.message(ASK).await;
        assert_eq!((status, anthropic(&answer).0.as_str()), (502, "api_error"), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn errors_have_anthropic_s_shape() {
    // API-1, API-5
    for (request, status, kind) in [
        ("{", 400, "invalid_request_error"),
        (r#"{"model":"m"}"#, 400, "invalid_request_error"),
        (r#"{"model":"m","messages":[]}"#, 400, "invalid_request_error"),
        (&ASK.replace("\"m\"", "\"nope\""), 404, "not_found_error"),
    ] {
        let (found, answer) = Rig::new([]).message(request).await;
        assert_eq!((found, anthropic(&answer).0.as_str()), (status, kind), "{request}");
    }
    let refused = r#"{"type":"error","error":{"type":"invalid_request_error","message":"too many tools"}}"#;
    for (reply, status, kind) in [
        (Reply::Refuse(SubmitError::QueueTimeout), 503, "overloaded_error"),
        (Reply::Refuse(SubmitError::Unavailable), 404, "not_found_error"),
        (
            tunnel([head(400, "application/json"), content(refused), failed(FailureCode::ProviderRejected)]),
            400,
            "invalid_request_error",
        ),
        (tunnel([sse(), failed(FailureCode::Disconnected)]), 503, "overloaded_error"),
        (
            tunnel([
                sse(),
                body(&event("error", r#","error":{"type":"overloaded_error","message":"x"}"#), FrameFlags::ERROR),
                failed(FailureCode::ProviderRejected),
            ]),
            429,
            "rate_limit_error",
        ),
        (tunnel([sse(), TunnelFrame::End]), 502, "api_error"),
    ] {
        let rig = Rig::new([reply]);
        let (found, answer) = rig.message(ASK_STREAM).await;
        assert_eq!((found, anthropic(&answer).0.as_str()), (status, kind), "{answer}");
    }
    let keys = Arc::new(ApiKeys::fixed("k"));
    for (name, value, status) in
        [("x-api-key", "k", 404), ("authorization", "Bearer k", 404), ("x-api-key", "no", 401), ("x-other", "k", 401)]
    {
        // API-13
        let rig = Rig::with([], |config| config.with_keys(Arc::clone(&keys)));
        let mut request = post_to("/v1/messages", &ASK.replace("\"m\"", "\"nope\""));
        request.headers_mut().insert(name, value.parse().unwrap());
        let (found, answer) = whole(rig.send(request).await).await;
        assert_eq!(found, status, "{name}: {value}");
        anthropic(&answer);
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_that_breaks_says_so_once_and_is_never_sent_again() {
    // REC-1, API-6, API-7: cut, lost, ended without its last event
    for end in [
        Some(failed(FailureCode::Disconnected)),
        None,
        Some(TunnelFrame::End),
        Some(body(&event("error", r#","error":{"type":"api_error","message":"x"}"#), FrameFlags::ERROR)),
    ] {
        let frames = [sse(), lifecycle(&start("org/target")), content(&text())].into_iter().chain(end);
        let rig = Rig::with([tunnel(frames)], |mut config| {
            config.max_extra_attempts = 2;
            config
        });
        let (status, answer) = rig.message(ASK_STREAM).await;
        let (before, error) = answer.split_at(answer.find("event: error").expect("an error event"));
        assert_eq!((status, before.to_owned()), (200, [start("m"), text()].concat()));
        anthropic(error);
    }
    // Before content too: only chats and responses are.
    let rig = Rig::with([tunnel([sse(), failed(FailureCode::Disconnected)])], |mut config| {
        config.max_extra_attempts = 2;
        config
    });
    assert_eq!(rig.message(ASK_STREAM).await.0, 503);
    assert_eq!(rig.record().attempts, 1);
}
