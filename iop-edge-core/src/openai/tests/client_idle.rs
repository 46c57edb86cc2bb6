//! `x-stainless-read-timeout`: only what a client is given resets it.

use tokio::time::{Instant as Now, sleep, timeout};

use super::*;

const LIMIT: Duration = Duration::from_secs(5);
const HOUR: Duration = Duration::from_secs(3_600);

fn waiting(body: &str, told: &str) -> Request<Full<Bytes>> {
    let mut request = post(body);
    request.headers_mut().insert("x-stainless-read-timeout", told.parse().unwrap());
    request
}

fn check_left(rig: &Rig) {
    let record = rig.record();
    assert_eq!((record.ended_by, record.outcome, record.status), (EndedBy::Client, Outcome::Cancelled, 499));
    assert_eq!((record.code, record.model_label()), (Some("client_idle_timeout"), "m"));
}

fn event(text: &str) -> TunnelFrame {
    content(&format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n"))
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_the_first_byte_is_bounded_wherever_the_request_is() {
    // API-14, EXE-10
    let silent_run = || Reply::Run(Box::pin(stream::pending()));
    for body in [CHAT, STREAM] {
        for (place, reply) in [
            ("queue", Reply::Wait),
            ("head", hanging([])),
            ("content", hanging([sse(), lifecycle("data: {\"choices\":[]}\n\n")])),
            ("run", silent_run()),
        ] {
            if body == CHAT && place == "content" {
                continue;
            }
            let rig = Rig::new([reply]);
            let began = Now::now();
            let (status, text) = whole(rig.send(waiting(body, "5")).await).await;
            assert_eq!((status, began.elapsed()), (504, LIMIT), "{place}");
            let error = error_of(&text);
            assert_eq!((&error["type"], &error["code"]), (&"server_error".into(), &"client_idle_timeout".into()));
            assert_eq!(rig.dropped(), place != "queue", "{place}: its run is cancelled");
            check_left(&rig);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_held_back_from_the_client_does_not_reset_its_wait() {
    // API-14: the client has no byte of it
    let (frames, reply) = stepped();
    let rig = Rig::new([reply]);
    frames.send(sse()).unwrap();
    let began = Now::now();
    let feed = async {
        for _ in 0..4 {
            sleep(LIMIT / 3).await;
            let _after_its_end = frames.send(lifecycle("data: {\"choices\":[]}\n\n"));
        }
    };
    let answer = async {
        let answer = whole(rig.send(waiting(STREAM, "5")).await).await;
        (answer.0, began.elapsed())
    };
    assert_eq!(tokio::join!(answer, feed).0, (504, LIMIT));
}

#[tokio::test(start_paused = true)]
async fn a_gap_after_the_commit_ends_the_stream_with_one_error_and_bytes_reset_the_wait() {
    // API-14, API-6
    let (frames, reply) = stepped();
    let rig = Rig::new([reply]);
    frames.send(sse()).unwrap();
    let began = Now::now();
    let feed = async {
        for _ in 0..5 {
            sleep(LIMIT - Duration::from_secs(1)).await;
            frames.send(event("x")).unwrap();
        }
        began.elapsed()
    };
    let answer = async {
        let mut response = rig.send(waiting(STREAM, "5.0")).await;
        let mut text = String::new();
        while let Some(frame) = response.body_mut().frame().await {
            text.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap());
        }
        assert!(rig.dropped(), "the run is cancelled while the response is still held");
        (response.status().as_u16(), text, began.elapsed())
    };
    let ((status, text, ended), fed) = tokio::join!(answer, feed);
    assert_eq!((status, ended), (200, fed + LIMIT));
    let blocks: Vec<_> = text.split_inclusive("\n\n").collect();
    assert_eq!(blocks.len(), 6, "{text}");
    assert_eq!(error_of(blocks[5])["code"], "client_idle_timeout");
    check_left(&rig);
}

#[tokio::test(start_paused = true)]
async fn a_whole_answer_that_was_begun_is_cut() {
    // API-14
    let long = format!("{{\"x\":\"{}\"", "y".repeat(config::MAX_HELD_ANSWER_BYTES));
    let rig = Rig::new([hanging([head(200, "application/json"), content(&long)])]);
    let response = rig.send(waiting(CHAT, "5")).await;
    let began = Now::now();
    assert!(response.into_body().collect().await.is_err());
    assert_eq!(began.elapsed(), LIMIT);
    check_left(&rig);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_slowly_is_not_one_that_waits() {
    // EXE-10: that is another timer's business
    let (frames, reply) = stepped();
    let rig = Rig::new([reply]);
    for frame in [sse(), event("1")] {
        frames.send(frame).unwrap();
    }
    let mut response = rig.send(waiting(STREAM, "5")).await;
    response.body_mut().frame().await.unwrap().unwrap();
    sleep(2 * LIMIT).await;
    let feed = async {
        sleep(LIMIT / 2).await;
        for frame in [event("2"), done(), TunnelFrame::End] {
            frames.send(frame).unwrap();
        }
    };
    let (rest, ()) = tokio::join!(response.into_body().collect(), feed);
    let rest = String::from_utf8(rest.unwrap().to_bytes().to_vec()).unwrap();
    assert!(rest.contains("\"2\"") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(rig.record().ended_by, EndedBy::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_has_its_whole_stream_waits_for_nothing() {
    // API-6: the end may take longer than such a client waits
    let rig = Rig::new([hanging([sse(), event("x"), done()])]);
    let (_, text) = whole(rig.send(waiting(STREAM, "0.001")).await).await;
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(rig.record().ended_by, EndedBy::Completed);
}

#[tokio::test(start_paused = true)]
async fn the_time_of_the_upload_does_not_count() {
    // API-14: a client that still sends does not wait
    let rig = Rig::new([Reply::Wait]);
    let (mut head, _) = waiting(CHAT, "5").into_parts();
    head.headers.remove("content-length");
    let pieces = stream::once(async {
        sleep(2 * LIMIT).await;
        Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(CHAT.as_bytes())))
    });
    let began = Now::now();
    let response = rig.send(Request::from_parts(head, Box::pin(http_body_util::StreamBody::new(pieces)))).await;
    assert_eq!((response.status().as_u16(), began.elapsed()), (504, 3 * LIMIT));
}

#[tokio::test(start_paused = true)]
async fn only_positive_numbers_count_and_a_day_is_the_most() {
    // API-14
    for (told, want) in [
        ("600", Some(600_000)),
        ("2.5", Some(2_500)),
        ("86400", Some(86_400_000)),
        ("86401", Some(86_400_000)),
        ("1e300", Some(86_400_000)),
        ("", None),
        ("0", None),
        ("0.0", None),
        ("1e-12", None),
        ("-5", None),
        ("-1e300", None),
        ("inf", None),
        ("NaN", None),
        ("1e400", None),
        ("5s", None),
        ("None", None),
    ] {
        let rig = Rig::new([Reply::Wait]);
        let began = Now::now();
        let answer = timeout(48 * HOUR, rig.send(waiting(CHAT, told))).await;
        let found = answer.ok().map(|answer| (answer.status().as_u16(), began.elapsed().as_millis()));
        assert_eq!(found, want.map(|ms| (504, ms)), "{told:?}");
    }
    let rig = Rig::new([Reply::Wait]);
    assert!(timeout(48 * HOUR, rig.chat(CHAT)).await.is_err(), "without the header nothing runs out");
}
