use iop_execution::{CancelReason, Usage};
use proptest::prelude::*;
use serde_json::json;

use super::*;

const ROLE: &str = "data: {\"model\":\"org/target\",\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n";
const TOKEN: &str = "data: {\"model\":\"org/target\",\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const FINISH: &str = "data: {\"model\":\"org/target\",\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str = "data: {\"model\":\"org/target\",\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

fn public(text: &str) -> String {
    text.replace("\"org/target\"", "\"m\"")
}

fn usage_event() -> TunnelFrame {
    body(USAGE, FrameFlags::USAGE)
}

#[tokio::test(start_paused = true)]
async fn a_stream_passes_with_the_public_name_and_ends_after_done() {
    // API-6, API-10 a
    let rig = Rig::new([tunnel([sse(), lifecycle(ROLE), content(TOKEN), lifecycle(FINISH), done(), TunnelFrame::End])]);
    let response = rig.chat(STREAM).await;
    let headers = response.headers().clone();
    assert_eq!(headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(
        (&headers["cache-control"], &headers["x-accel-buffering"]),
        (&"no-cache".parse().unwrap(), &"no".parse().unwrap())
    );
    assert!(!headers.contains_key("content-length") && !headers.contains_key("content-encoding"));
    let (status, text) = whole(response).await;
    assert_eq!(status, 200);
    assert_eq!(text, public(&[ROLE, TOKEN, FINISH, DONE].concat()));
    let (headers, sent) = rig.sent();
    assert_eq!(headers["accept"], "text/event-stream");
    assert_eq!(
        sent,
        r#"{"model":"org/target","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}"#
    );
}

#[tokio::test(start_paused = true)]
async fn usage_is_asked_of_the_provider_and_shown_only_to_who_asked() {
    // API-4: streaming or not, asked for or not
    let stream = || tunnel([sse(), content(TOKEN), lifecycle(FINISH), usage_event(), done(), TunnelFrame::End]);
    let document = r#"{"model":"org/target","choices":[{}],"usage":{"prompt_tokens":1}}"#;
    let plain = || tunnel([head(200, "application/json"), content(document), TunnelFrame::End]);
    let ask = r#","stream_options":{"include_usage":true}"#;
    for (request, reply, injected, shown) in
        [(CHAT, plain(), false, true), (STREAM, stream(), true, false), (STREAM_USAGE, stream(), true, true)]
    {
        let rig = Rig::new([reply]);
        let (status, text) = rig.answer(request).await;
        assert_eq!(status, 200);
        assert_eq!(text.contains("prompt_tokens"), shown, "{request}");
        assert_eq!(rig.sent().1.contains(ask), injected, "{request}");
    }
    let rig = Rig::new([]);
    let (status, text) = rig.answer(&CHAT.replace("]}", &format!("]{ask}}}"))).await;
    assert_eq!((status, &error_of(&text)["param"]), (400, &json!("stream_options")), "the fourth cell");
}

#[tokio::test(start_paused = true)]
async fn untouched_streams_keep_every_byte() {
    // API-10: usage asked for, model left alone
    let one = |text: &str| text.to_owned();
    let utf8 = "data: {\"choices\":[{\"delta\":{\"content\":\"日本\"}}]}\n\n".as_bytes();
    let part = |bytes: &[u8], flags| TunnelFrame::Body { bytes: Bytes::copy_from_slice(bytes), flags };
    let utf8_split = vec![
        part(&utf8[..38], FrameFlags::MORE),
        part(&utf8[38..40], FrameFlags::MORE),
        part(&utf8[40..], FrameFlags::CONTENT),
    ];
    for (name, frames) in [
        ("ok", vec![lifecycle(ROLE), content(TOKEN), content(TOKEN), lifecycle(FINISH), usage_event(), done()]),
        (
            "crlf",
            [ROLE, TOKEN]
                .map(|t| content(&t.replace('\n', "\r\n")))
                .into_iter()
                .chain([body("data: [DONE]\r\n\r\n", FrameFlags::TERMINAL)])
                .collect(),
        ),
        (
            "comments",
            vec![
                body(": hello\n\n:\n\n", FrameFlags::NONE),
                lifecycle(ROLE),
                body(": ping\n\n", FrameFlags::NONE),
                content(TOKEN),
                done(),
            ],
        ),
        ("multiline", vec![content("data: {\ndata: \"model\":\"org/target\",\ndata: \"choices\":[]}\n\n"), done()]),
        ("utf8_split", utf8_split.into_iter().chain([done()]).collect::<Vec<_>>()),
    ] {
        let want: Vec<u8> = frames
            .iter()
            .flat_map(|frame| match frame {
                TunnelFrame::Body { bytes, .. } => bytes.to_vec(),
                _ => Vec::new(),
            })
            .collect();
        let frames = [sse()].into_iter().chain(frames).chain([TunnelFrame::End]);
        let rig = Rig::with([tunnel(frames)], |config| config.with_response_model(ResponseModel::Target));
        let (status, text) = rig.answer(STREAM_USAGE).await;
        assert_eq!((status, text), (200, one(std::str::from_utf8(&want).unwrap())), "{name}");
        assert_eq!(rig.record().edits, Edits::default(), "{name}");
    }
}

/// One row: the frames, the status, and what the body is.
enum Want {
    Bytes(String),
    Refused(&'static str),
    Broken(String, &'static str),
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_before_content_and_nothing_looks_complete_that_is_not() {
    // REC-2, REC-6, API-6, API-7
    let error = "data: {\"error\":{\"message\":\"boom\",\"type\":\"InternalServerError\",\"code\":500}}\n\n";
    let erring = || body(error, FrameFlags::ERROR);
    let rejected = |status| {
        TunnelFrame::Failed(
            ExecutionFailure::refused(FailureCode::ProviderRejected, "the provider refused").with_status(status),
        )
    };
    let ok = |text: &str| Want::Bytes(public(text));
    let broken = |text: &str, code| Want::Broken(public(text), code);
    let token = || content(TOKEN);
    for (name, frames, status, want) in [
        (
            "empty but finished",
            vec![sse(), lifecycle(ROLE), lifecycle(FINISH), done(), TunnelFrame::End],
            200,
            ok(&[ROLE, FINISH, DONE].concat()),
        ),
        (
            "finished without done",
            vec![sse(), token(), lifecycle(FINISH), TunnelFrame::End],
            200,
            ok(&[TOKEN, FINISH, DONE].concat()),
        ),
        (
            "failed before content",
            vec![sse(), lifecycle(ROLE), failed(FailureCode::Disconnected)],
            503,
            Want::Refused("provider_unavailable"),
        ),
        (
            "stalled before content",
            vec![sse(), failed(FailureCode::ResponseStalled)],
            504,
            Want::Refused("response_stalled"),
        ),
        (
            "cut before content",
            vec![sse(), lifecycle(ROLE), failed(FailureCode::ProviderEndedWithoutTerminal)],
            502,
            Want::Refused("bad_gateway"),
        ),
        (
            "cut after content",
            vec![sse(), token(), failed(FailureCode::ProviderEndedWithoutTerminal)],
            200,
            broken(TOKEN, "bad_gateway"),
        ),
        ("node lost before content", vec![sse()], 503, Want::Refused("provider_unavailable")),
        ("node lost after content", vec![sse(), token()], 200, broken(TOKEN, "provider_unavailable")),
        (
            "error first",
            vec![sse(), erring(), failed(FailureCode::ProviderRejected)],
            502,
            Want::Refused("bad_gateway"),
        ),
        (
            "error in the middle",
            vec![sse(), token(), erring(), failed(FailureCode::ProviderRejected)],
            200,
            broken(TOKEN, "bad_gateway"),
        ),
        (
            "error, done, end",
            vec![sse(), token(), erring(), done(), TunnelFrame::End],
            200,
            broken(TOKEN, "bad_gateway"),
        ),
        (
            "withdrawn",
            vec![sse(), TunnelFrame::Cancelled(CancelReason::Withdrawn)],
            503,
            Want::Refused("provider_unavailable"),
        ),
        (
            "withdrawn late",
            vec![sse(), token(), TunnelFrame::Cancelled(CancelReason::Withdrawn)],
            200,
            broken(TOKEN, "provider_unavailable"),
        ),
        ("no head", vec![token(), TunnelFrame::End], 502, Want::Refused("bad_gateway")),
        ("no head at all", vec![TunnelFrame::End], 502, Want::Refused("bad_gateway")),
        ("two heads", vec![sse(), sse()], 502, Want::Refused("bad_gateway")),
        (
            "json instead of events",
            vec![head(200, "application/json"), content("{\"choices\":[]}"), TunnelFrame::End],
            502,
            Want::Refused("bad_gateway"),
        ),
        ("html", vec![head(200, "text/html"), content("<html>"), TunnelFrame::End], 502, Want::Refused("bad_gateway")),
        (
            "a part and no end",
            vec![sse(), body("data: {", FrameFlags::MORE), TunnelFrame::End],
            502,
            Want::Refused("bad_gateway"),
        ),
        (
            "400",
            vec![head(400, "application/json"), content("{\"error\":{\"message\":\"bad top_p\"}}"), TunnelFrame::End],
            400,
            Want::Refused(""),
        ),
        ("401", vec![head(401, "application/json"), TunnelFrame::End], 502, Want::Refused("provider_auth_failed")),
        ("404", vec![head(404, "application/json"), rejected(404)], 502, Want::Refused("bad_gateway")),
        ("429", vec![rejected(429)], 429, Want::Refused("rate_limit_exceeded")),
        ("500", vec![head(500, "application/json"), TunnelFrame::End], 502, Want::Refused("bad_gateway")),
        (
            "500 and the node is gone",
            vec![head(500, "application/json"), failed(FailureCode::Disconnected)],
            503,
            Want::Refused("provider_unavailable"),
        ),
        (
            "after done nothing counts",
            vec![sse(), token(), done(), token(), failed(FailureCode::Disconnected)],
            200,
            ok(&[TOKEN, DONE].concat()),
        ),
        (
            "a deadline after done",
            vec![sse(), token(), done(), TunnelFrame::Cancelled(CancelReason::EdgeDeadline)],
            200,
            ok(&[TOKEN, DONE].concat()),
        ),
        (
            "two dones in one frame",
            vec![sse(), token(), body(&DONE.repeat(2), FrameFlags::TERMINAL), TunnelFrame::End],
            200,
            ok(&[TOKEN, DONE].concat()),
        ),
    ] {
        let rig = Rig::new([tunnel(frames)]);
        let (found, text) = rig.answer(STREAM).await;
        assert_eq!(found, status, "{name}: {text}");
        let outcome = match want {
            Want::Bytes(bytes) => {
                assert_eq!(text, bytes, "{name}");
                Outcome::Completed
            }
            Want::Refused(code) => {
                assert_eq!(error_of(&text)["code"].as_str().unwrap_or_default(), code, "{name}");
                Outcome::Failed
            }
            Want::Broken(before, code) => {
                let event = text.strip_prefix(&before).unwrap_or_else(|| panic!("{name}: {text}"));
                assert_eq!(error_of(event)["code"], code, "{name}");
                Outcome::Failed
            }
        };
        // What another attempt could have helped with is told apart (REC-7).
        let found = rig.record().outcome;
        assert_eq!(if found == Outcome::Ineligible { Outcome::Failed } else { found }, outcome, "{name}");
        assert!(rig.dropped(), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_provider_says_is_kept_where_it_helps_and_is_safe() {
    // API-5, SEC-2: an error answer to a streaming request is read whole, too
    let long = r#"{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error","n_ctx":512}}"#;
    let (first, rest) = long.split_at(30);
    for body in [CHAT, STREAM] {
        let rig = Rig::new([tunnel([head(400, "application/json"), content(first), content(rest), TunnelFrame::End])]);
        let (status, text) = rig.answer(body).await;
        assert_eq!(status, 400);
        assert_eq!(
            error_of(&text),
            json!({"message":"the request exceeds the available context size","type":"invalid_request_error","param":null,"code":"context_length_exceeded"})
        );
    }
    let limited = || {
        let TunnelFrame::Head(mut head) = head(429, "application/json") else { unreachable!() };
        head.headers.insert("retry-after", "7".parse().unwrap());
        tunnel([TunnelFrame::Head(head), TunnelFrame::End])
    };
    let response = Rig::new([limited()]).chat(STREAM).await;
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"7".parse().unwrap()));
    let event = "error: {\"error\":{\"message\":\"too long for n_ctx\",\"code\":400}}\n\n";
    let rig = Rig::new([hanging([sse(), body(event, FrameFlags::ERROR)])]);
    let (status, text) = rig.answer(STREAM).await;
    assert_eq!((status, &error_of(&text)["code"]), (400, &json!("context_length_exceeded")), "even if it hangs then");
    assert!(rig.dropped());
}

#[tokio::test(start_paused = true)]
async fn an_event_waits_for_no_later_one() {
    // API-6
    let (frames, reply) = stepped();
    let rig = Rig::new([reply]);
    frames.send(sse()).unwrap();
    frames.send(lifecycle(ROLE)).unwrap();
    frames.send(content(TOKEN)).unwrap();
    let mut response = rig.chat(STREAM).await;
    let next = |body: &mut OpenAiBody| {
        let frame = futures_util::FutureExt::now_or_never(body.frame());
        frame.map(|frame| frame.map(|frame| String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap()))
    };
    assert_eq!(next(response.body_mut()), Some(Some(public(&[ROLE, TOKEN].concat()))), "what is ready is one write");
    assert_eq!(next(response.body_mut()), None);
    frames.send(content(TOKEN)).unwrap();
    assert_eq!(next(response.body_mut()), Some(Some(public(TOKEN))));
    frames.send(done()).unwrap();
    assert_eq!(next(response.body_mut()), Some(Some(DONE.to_owned())));
    // The run's own end is still missing: the body ends anyway, soon.
    let began = tokio::time::Instant::now();
    assert!(response.body_mut().frame().await.is_none());
    assert!(began.elapsed() <= Duration::from_millis(101));
    assert!(rig.dropped());
    assert_eq!(rig.record().outcome, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_finished_stream_waits_for_nobody_and_counts_as_finished_when_the_server_stops_reading() {
    // API-6, OPS-2
    let rig = Rig::new([hanging([sse(), lifecycle(ROLE), lifecycle(FINISH), done()])]);
    let began = tokio::time::Instant::now();
    let mut response = rig.chat(STREAM).await;
    let bytes = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(bytes, public(&[ROLE, FINISH, DONE].concat()));
    assert_eq!(began.elapsed(), Duration::ZERO, "`[DONE]` itself is the commit of an answer without content");
    // A server may drop a body that says it is at its end, without asking once more.
    let rig = Rig::new([tunnel([sse(), content(TOKEN), done(), TunnelFrame::End])]);
    let mut response = rig.chat(STREAM).await;
    while !http_body::Body::is_end_stream(response.body()) {
        response.body_mut().frame().await.unwrap().unwrap();
    }
    drop(response);
    assert_eq!(rig.record().outcome, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn an_event_in_parts_is_one_event_and_bounded() {
    // API-10
    let (a, b) = TOKEN.split_at(20);
    let rig = Rig::new([tunnel([sse(), body(a, FrameFlags::MORE), content(b), done(), TunnelFrame::End])]);
    assert_eq!(rig.answer(STREAM).await, (200, public(&[TOKEN, DONE].concat())));
    let part = "x".repeat(1 << 20);
    let rig = Rig::new([tunnel([sse()].into_iter().chain((0..6).map(|_| body(&part, FrameFlags::MORE))))]);
    assert_eq!(rig.answer(STREAM).await.0, 502);
}

#[tokio::test(start_paused = true)]
async fn a_buffered_answer_is_checked_renamed_and_of_known_length() {
    // API-7, API-10 a
    let json = || head(200, "application/json");
    let answer = "\n\n{\"choices\":[{\"logprobs\":null,\"model\":\"org/target\"}],\"model\":\"org/target\",\"usage\":{\"n\":1.50}}\n";
    let want = answer.replace("\"model\":\"org/target\",\"usage\"", "\"model\":\"m\",\"usage\"");
    for cut in 0..answer.len() {
        let (a, b) = answer.split_at(cut);
        let rig = Rig::new([tunnel([
            json(),
            content(a),
            content(b),
            TunnelFrame::Usage(Usage::default()),
            TunnelFrame::End,
        ])]);
        let response = rig.chat(CHAT).await;
        assert_eq!(http_body::Body::size_hint(response.body()).exact(), Some(want.len() as u64));
        assert_eq!(whole(response).await, (200, want.clone()));
        assert_eq!(rig.record().edits.count(Edit::Model), 1);
    }
    for (text, status, code) in [
        ("<html>oops</html>", 502, "bad_gateway"),
        ("{\"choices\":[", 502, "bad_gateway"),
        ("{\"choices\":[]}x", 502, "bad_gateway"),
        ("{}", 502, "bad_gateway"),
        ("", 502, "bad_gateway"),
        ("{\"error\":{\"message\":\"prompt exceeds the context window\"}}", 400, "context_length_exceeded"),
        ("{\"object\":\"error\",\"error\":\"no\"}", 502, "bad_gateway"),
    ] {
        let rig = Rig::new([tunnel([json(), content(text), TunnelFrame::End])]);
        let (found, answer) = rig.answer(CHAT).await;
        assert_eq!((found, error_of(&answer)["code"].as_str()), (status, Some(code)), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_buffered_answer_is_released_and_cut_if_it_fails() {
    // REC-2, REC-6
    let json = || head(200, "application/json");
    let filler = " ".repeat(700 << 10);
    let long = || vec![json(), content("{\"choices\":["), content(&filler), content(&filler)];
    let tail = "],\"model\":\"org/target\"}";
    let rig = Rig::new([tunnel(long().into_iter().chain([content(tail), TunnelFrame::End]))]);
    let (status, text) = rig.answer(CHAT).await;
    assert_eq!(status, 200);
    assert_eq!(text, format!("{{\"choices\":[{filler}{filler}{}", public(tail)));
    let rig = Rig::new([tunnel(long().into_iter().chain([failed(FailureCode::Disconnected)]))]);
    let response = rig.chat(CHAT).await;
    assert_eq!(response.status(), 200);
    assert!(response.into_body().collect().await.is_err(), "it never looks complete");
    assert_eq!(rig.record().ended_by, EndedBy::Disconnect);
    let rig = Rig::new([tunnel([json()].into_iter().chain((0..100).map(|_| content("<html>"))))]);
    assert_eq!(rig.answer(CHAT).await.0, 502, "what is no JSON is refused at once");
    let big = [json(), content("{\"choices\":[")].into_iter().chain((0..100).map(|_| content(&filler)));
    let rig = Rig::new([tunnel(big)]);
    let response = rig.chat(CHAT).await;
    assert!(response.into_body().collect().await.is_err(), "and there is a cap");
    assert_eq!(rig.record().ended_by, EndedBy::ProviderError);
}

#[tokio::test(start_paused = true)]
async fn what_is_held_before_content_is_bounded() {
    // REC-2
    let ping = format!(": {}\n\n", "p".repeat(60 << 10));
    let frames = [sse()].into_iter().chain((0..5).map(|_| body(&ping, FrameFlags::NONE)));
    let rig = Rig::new([hanging(frames)]);
    let response = rig.chat(STREAM).await;
    assert_eq!(response.status(), 200);
}

proptest! {
    #[test]
    fn whatever_the_frames_a_stream_ends_once_and_is_complete_only_if_the_run_is(choices in prop::collection::vec(0usize..10, 0..8)) {
        // REC-6, API-6, API-7
        let frames: Vec<_> = choices
            .iter()
            .map(|choice| match choice {
                0 => sse(),
                1 => lifecycle(ROLE),
                2 => content(TOKEN),
                3 => done(),
                4 => TunnelFrame::End,
                5 => failed(FailureCode::ProviderUnreachable),
                6 => body("data: {\"error\":\"x\"}\n\n", FrameFlags::ERROR),
                7 => body(&TOKEN[..9], FrameFlags::MORE),
                8 => usage_event(),
                _ => head(500, "text/plain"),
            })
            .collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let rig = Rig::new([tunnel(frames.clone())]);
            let (status, text) = rig.answer(STREAM).await;
            let record = rig.record();
            let complete = text.ends_with(DONE);
            assert_eq!(complete, record.outcome == Outcome::Completed, "{choices:?} {text}");
            assert_eq!(text.matches(DONE).count(), usize::from(complete));
            assert_eq!(text.matches("\"error\"").count(), usize::from(!complete));
            assert_eq!(status == 200, complete || text.contains("\"content\""), "{choices:?} {text}");
        });
    }
}
