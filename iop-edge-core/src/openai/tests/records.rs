use iop_execution::Usage;

use super::*;

#[tokio::test(start_paused = true)]
async fn a_completed_request_leaves_one_full_record() {
    // OPS-2
    let usage = Usage { output_tokens: Some(7), ..Usage::default() };
    let (frames, reply) = stepped();
    let rig = Rig::new([reply]);
    frames.send(sse()).unwrap();
    let later = async {
        tokio::time::sleep(Duration::from_millis(40)).await;
        frames.send(content("data: {\"model\":\"org/target\"}\n\n")).unwrap();
        tokio::time::sleep(Duration::from_millis(60)).await;
        for frame in [TunnelFrame::Usage(usage), done(), TunnelFrame::End] {
            frames.send(frame).unwrap();
        }
    };
    let ((status, _), ()) = tokio::join!(rig.answer(STREAM), later);
    let record = rig.record();
    assert_eq!((status, record.status, record.attempts), (200, 200, 1));
    assert_eq!(
        (record.outcome, record.ended_by, record.endpoint),
        (Outcome::Completed, EndedBy::Completed, Endpoint::Chat)
    );
    assert_eq!(record.model_label(), "m");
    assert_eq!(record.provider.unwrap().as_str(), "provider-1");
    assert_eq!(record.node.unwrap().as_str(), "node-1");
    assert_eq!(record.queue, Some(Duration::from_millis(3)));
    let ms = |time: Duration| time.as_millis();
    assert_eq!((record.ttft.map(ms), ms(record.duration)), (Some(40), 100));
    assert_eq!(record.usage, Some(usage));
    assert!(record.stream);
    assert_eq!(record.edits.iter().collect::<Vec<_>>(), [(Edit::Model, 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_cancels_its_run_whenever_it_leaves() {
    // EDG-3, OPS-2
    // In the queue.
    let rig = Rig::new([Reply::Wait]);
    assert!(tokio::time::timeout(Duration::from_secs(1), rig.chat(STREAM)).await.is_err());
    let record = rig.record();
    assert_eq!((record.ended_by, record.status, record.attempts), (EndedBy::Client, 499, 0));
    assert_eq!(record.model_label(), "m", "the name exists");
    // Before the head, streaming or not.
    for body in [CHAT, STREAM] {
        let rig = Rig::new([hanging([sse()])]);
        assert!(tokio::time::timeout(Duration::from_secs(1), rig.chat(body)).await.is_err());
        assert!(rig.dropped());
        let record = rig.record();
        assert_eq!((record.ended_by, record.outcome, record.status), (EndedBy::Client, Outcome::Cancelled, 499));
    }
    // In the middle.
    let usage = Usage { output_tokens: Some(1), ..Usage::default() };
    let rig = Rig::new([hanging([sse(), TunnelFrame::Usage(usage), content("data: {}\n\n")])]);
    let mut response = rig.chat(STREAM).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert!(!rig.dropped());
    drop(response);
    assert!(rig.dropped());
    let record = rig.record();
    assert_eq!((record.ended_by, record.status, record.usage), (EndedBy::Client, 499, Some(usage)));
}

#[tokio::test(start_paused = true)]
async fn who_ended_a_request_is_told_apart() {
    // OPS-2
    for (code, ended_by) in [
        (FailureCode::DeadlineExceeded, EndedBy::Deadline),
        (FailureCode::ResponseStalled, EndedBy::Stall),
        (FailureCode::Disconnected, EndedBy::Disconnect),
        (FailureCode::Busy, EndedBy::ProviderLimit),
        (FailureCode::ProviderProtocol, EndedBy::ProviderError),
    ] {
        for frames in [vec![sse(), failed(code)], vec![sse(), content("data: {}\n\n"), failed(code)]] {
            let committed = frames.len() == 3;
            let rig = Rig::new([tunnel(frames)]);
            rig.answer(STREAM).await;
            let record = rig.record();
            // What another attempt could have helped with is told apart (REC-7).
            let outcome = if ended_by == EndedBy::Deadline || ended_by == EndedBy::ProviderError {
                Outcome::Failed
            } else {
                Outcome::Ineligible
            };
            assert_eq!((record.ended_by, record.outcome), (ended_by, outcome), "{code}");
            assert_eq!(record.status == 200, committed, "the record says what the client saw");
        }
    }
    let rig = Rig::new([]);
    rig.answer("{").await;
    assert_eq!(rig.record().ended_by, EndedBy::Request);
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_made_up_names_leave_one_label() {
    // API-15
    let rig = Rig::new([]);
    for number in 0..10_000 {
        let (status, _) = rig.answer(&CHAT.replace("\"m\"", &format!("\"made-up-{number}\""))).await;
        assert_eq!(status, 404);
    }
    let records = rig.records.0.lock().unwrap();
    assert_eq!(records.len(), 10_000);
    assert!(records.iter().all(|record| record.model_label() == "other" && record.model.is_none()));
    assert!(records.iter().all(|record| !format!("{record:?}").contains("made-up")));
    assert_eq!(Arc::strong_count(&rig.script), 2, "nothing holds on to a request");
}

#[tokio::test(start_paused = true)]
async fn no_text_of_a_client_or_a_key_is_recorded_or_told_in_an_error() {
    // OPS-2, SEC-2
    let body = r#"{"model":"m","messages":[{"role":"user","content":"SENTINEL"}],"user":"SENTINEL","stream":true}"#;
    let replies = [
        Reply::Refuse(SubmitError::QueueTimeout),
        tunnel([sse(), failed(FailureCode::Internal)]),
        tunnel([
            head(401, "application/json"),
            content(r#"{"error":{"message":"bad key SENTINEL"}}"#),
            TunnelFrame::End,
        ]),
        tunnel([head(500, "text/html"), content("<html>SENTINEL</html>"), TunnelFrame::End]),
        tunnel([
            sse(),
            content("data: {\"choices\":[{\"delta\":{\"content\":\"SENTINEL\"}}]}\n\n"),
            failed(FailureCode::Internal),
        ]),
    ];
    let count = replies.len();
    let rig = Rig::new(replies);
    for number in 0..count {
        let mut request = post(body);
        for name in ["authorization", "cookie", "x-stainless-lang", "openai-organization", "x-request-id"] {
            request.headers_mut().insert(name, "Bearer SENTINEL".parse().unwrap());
        }
        let response = rig.send(request).await;
        assert!(!format!("{:?} {response:?}", rig.service).contains("SENTINEL"));
        let (_, text) = whole(response).await;
        // The client's own answer is its own.
        assert_eq!(text.contains("SENTINEL"), number == count - 1, "{text}");
    }
    let (headers, _) = rig.sent();
    let mut names: Vec<_> = headers.keys().map(|name| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["accept", "content-type"], "no header of the client goes to a provider");
    assert!(!format!("{:?}", rig.records).contains("SENTINEL"));
}

#[test]
fn labels_are_unique() {
    // API-15
    for mut names in [
        EndedBy::ALL.iter().map(|l| l.as_str()).collect::<Vec<_>>(),
        Outcome::ALL.iter().map(|l| l.as_str()).collect(),
        Edit::ALL.iter().map(|l| l.as_str()).collect(),
    ] {
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
