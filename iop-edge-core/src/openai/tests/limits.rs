use serde_json::json;

use super::*;

#[tokio::test(start_paused = true)]
async fn only_plain_json_bodies_are_taken() {
    // API-3, SEC-3
    let rig = Rig::new([]);
    for (name, value, status) in [
        ("content-type", "text/plain", 415),
        ("content-type", "", 415),
        ("content-type", "application/jsonx", 415),
        ("content-encoding", "gzip", 415),
        ("content-encoding", "identity", 404),
        ("content-type", "Application/JSON; charset=utf-8", 404),
    ] {
        let mut request = post(&CHAT.replace("\"m\"", "\"x\""));
        request.headers_mut().insert(name, value.parse().unwrap());
        assert_eq!(rig.send(request).await.status(), status, "{name}: {value}");
    }
    let mut request = post(CHAT);
    request.headers_mut().remove("content-type");
    assert_eq!(rig.send(request).await.status(), 415);
    // A second one behind a good first one is not overlooked.
    for (name, values) in
        [("content-encoding", ["identity", "gzip"]), ("content-type", ["application/json", "text/plain"])]
    {
        let mut request = post(CHAT);
        request.headers_mut().remove(name);
        for value in values {
            request.headers_mut().append(name, value.parse().unwrap());
        }
        assert_eq!(rig.send(request).await.status(), 415, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_is_refused_by_its_claimed_length_and_by_its_real_one() {
    // SEC-3
    let rig = Rig::with([], |mut config| {
        config.max_body_bytes = 100;
        config
    });
    let mut request = post("");
    request.headers_mut().insert("content-length", "101".parse().unwrap());
    let response = rig.send(request).await;
    assert_eq!((response.status().as_u16(), &response.headers()["connection"]), (413, &"close".parse().unwrap()));
    let pieces = (0..20).map(|_| Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(b"          "))));
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .body(http_body_util::StreamBody::new(stream::iter(pieces)))
        .unwrap();
    assert_eq!(rig.send(request).await.status(), 413);
    assert_eq!(rig.send(post(&" ".repeat(100))).await.status(), 400, "the limit itself is fine");
}

#[tokio::test(start_paused = true)]
async fn a_body_in_pieces_is_put_together() {
    // API-3
    let rig = Rig::new([tunnel([head(200, "application/json"), content(r#"{"choices":[]}"#), TunnelFrame::End])]);
    let pieces: Vec<_> =
        CHAT.bytes().map(|byte| Ok::<_, Infallible>(http_body::Frame::data(Bytes::copy_from_slice(&[byte])))).collect();
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .body(http_body_util::StreamBody::new(stream::iter(pieces)))
        .unwrap();
    assert_eq!(rig.send(request).await.status(), 200);
    assert_eq!(rig.sent().1, CHAT.replace("\"m\"", "\"org/target\""));
}

#[tokio::test(start_paused = true)]
async fn a_slow_upload_is_cut_when_idle_and_in_total() {
    // SEC-3
    for (gap, want) in [(Duration::from_secs(31), 30), (Duration::from_secs(20), 120)] {
        let rig = Rig::new([]);
        let pieces = stream::unfold((), move |()| async move {
            tokio::time::sleep(gap).await;
            Some((Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(b" "))), ()))
        });
        let request = Request::post("/v1/chat/completions")
            .header("content-type", "application/json")
            .body(Box::pin(http_body_util::StreamBody::new(pieces)))
            .unwrap();
        let began = tokio::time::Instant::now();
        let (status, text) = whole(rig.send(request).await).await;
        assert_eq!((status, &error_of(&text)["code"]), (408, &json!("request_timeout")));
        assert_eq!(began.elapsed().as_secs(), want);
    }
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_breaks_off_is_the_clients_end() {
    // OPS-2
    let rig = Rig::new([]);
    let pieces = stream::iter([Err::<http_body::Frame<Bytes>, _>("gone")]);
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .body(http_body_util::StreamBody::new(pieces))
        .unwrap();
    let _ = rig.send(request).await;
    let record = rig.record();
    assert_eq!((record.ended_by, record.status), (EndedBy::Client, 499));
}

#[tokio::test(start_paused = true)]
async fn a_bad_body_never_reaches_the_engine() {
    // API-3
    let rig = Rig::new([]);
    for (text, param) in [
        ("", Value::Null),
        ("{\"model\":", Value::Null),
        (r#"{"model":"m","messages":[]}"#, json!("messages")),
        (r#"{"model":"m","model":"x","messages":[1]}"#, json!("model")),
        (r#"{"model":"m","messages":[1],"stream":"yes"}"#, json!("stream")),
        (r#"{"model":"m","messages":[1],"stream_options":{}}"#, json!("stream_options")),
    ] {
        let (status, answer) = rig.answer(text).await;
        assert_eq!((status, &error_of(&answer)["param"]), (400, &param), "{text}");
        assert_eq!(error_of(&answer)["type"], "invalid_request_error");
    }
    assert!(rig.script.seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_deadline_bounds_a_request_and_a_client_can_only_shorten_it() {
    // API-14
    let second = Duration::from_secs(1);
    for (configured, header, want) in [
        (None, None, None),
        (Some(10 * second), None, Some(10_000)),
        (Some(10 * second), Some("3000"), Some(3_000)),
        (Some(10 * second), Some("30000"), Some(10_000)),
        (None, Some("30000"), Some(30_000)),
        (Some(Duration::ZERO), None, None),
    ] {
        let rig =
            Rig::with([Reply::Refuse(SubmitError::Unavailable)], |config| config.with_request_deadline(configured));
        let mut request = post(CHAT);
        if let Some(ms) = header {
            request.headers_mut().insert("x-iop-deadline-ms", ms.parse().unwrap());
        }
        let arrived = tokio::time::Instant::now().into_std();
        rig.send(request).await;
        let deadline: Option<Instant> = rig.script.seen.lock().unwrap().pop().unwrap().request.deadline;
        assert_eq!(deadline.map(|at| (at - arrived).as_millis()), want, "{configured:?} {header:?}");
    }
    for junk in ["0", "-1", "x", ""] {
        let rig = Rig::new([]);
        let mut request = post(CHAT);
        request.headers_mut().insert("x-iop-deadline-ms", junk.parse().unwrap());
        assert_eq!(rig.send(request).await.status(), 400);
    }
}
