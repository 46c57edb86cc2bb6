//! Requests whose attempts fail, and what clients see of that.

use iop_execution::failure::{LivenessClassification, OwnershipClose, StallDetail, TimeoutSetting};
use iop_execution::{FailureStage, ProviderContacted, Usage};

use super::*;
use crate::openai::recovery::MAX_SNAPSHOT_BYTES;

fn rig(replies: impl IntoIterator<Item = Reply>) -> Rig {
    Rig::with(replies, |mut config| {
        config.max_extra_attempts = 2;
        config
    })
}

fn stall(classification: LivenessClassification, close: OwnershipClose) -> ExecutionFailure {
    let (adapter, target) = (AdapterKey::new("adapter").unwrap(), Target::new("org/target").unwrap());
    let mut detail = StallDetail::new(adapter, target, TimeoutSetting::ResponseStall);
    detail.liveness_classification = classification;
    detail.ownership_close = close;
    let contacted = ProviderContacted::Yes;
    ExecutionFailure::new(FailureCode::ResponseStalled, FailureStage::Prefill, contacted, "stalled").with_stall(detail)
}

const CLOSED: OwnershipClose = OwnershipClose::Confirmed { retryable: true };

fn stalled(before: Vec<TunnelFrame>, health: LivenessClassification, close: OwnershipClose) -> Reply {
    let provider = ProviderId::new("provider-1").unwrap();
    let frames = before.into_iter().chain([TunnelFrame::Failed(stall(health, close))]);
    Reply::Noted(EndNote::ConfirmedStall { provider }, Box::new(tunnel(frames)))
}

fn good() -> Reply {
    tunnel([sse(), lifecycle("data: {\"role\":1}\n\n"), content("data: {\"x\":1}\n\n"), done(), TunnelFrame::End])
}

fn good_run() -> Reply {
    run([
        RunEventKind::Start,
        RunEventKind::Delta("hello".into()),
        RunEventKind::Complete(iop_execution::FinishReason::Stop),
    ])
}

impl Rig {
    /// Bodies that were sent, in order.
    fn bodies(&self) -> Vec<Bytes> {
        let seen = self.script.seen.lock().unwrap();
        let bodies = seen.iter().filter_map(|seen| match &seen.payload {
            Some(Payload::Tunnel { body, .. }) => Some(body.clone()),
            Some(Payload::Run { input }) => Some(input.clone()),
            None => None,
        });
        bodies.collect()
    }

    /// Avoidance of each admission.
    fn avoided(&self) -> Vec<(Option<String>, bool)> {
        let seen = self.script.seen.lock().unwrap();
        let hints = seen.iter().map(|seen| {
            let avoid = seen.request.avoid_provider_id.as_ref().map(ToString::to_string);
            (avoid, seen.request.allow_avoided_provider_fallback)
        });
        hints.collect()
    }

    fn liveness(&self) -> Vec<String> {
        let seen = self.records.1.lock().unwrap();
        let names = seen.iter().map(|seen| match seen {
            LivenessObservation::Considered { decision, reason } => format!("{decision}/{reason}"),
            LivenessObservation::Ended { outcome } => outcome.to_string(),
        });
        names.collect()
    }
}

#[tokio::test(start_paused = true)]
async fn s05_a_stall_before_content_is_mended_and_the_client_sees_one_answer() {
    // REC-1, REC-2, REC-3, REC-4; field reports 8, 48, 49, 53
    for (health, fallback) in [
        (LivenessClassification::RequestStalled, true),
        (LivenessClassification::ProviderUnhealthy, false),
        (LivenessClassification::HealthUnknown, false),
    ] {
        let before = vec![sse(), lifecycle("data: {\"role\":1}\n\n")];
        let rig = rig([stalled(before, health, CLOSED), good()]);
        let (status, text) = rig.answer(STREAM).await;
        assert_eq!(status, 200);
        assert_eq!(text.matches("role").count(), 1, "lifecycle frames of the first attempt are gone: {text}");
        assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("error"));
        assert_eq!(rig.avoided(), [(None, false), (Some("provider-1".into()), fallback)]);
        let bodies = rig.bodies();
        assert!(bodies.len() == 2 && bodies[0] == bodies[1], "byte for byte");
        let record = rig.record();
        assert_eq!((record.outcome, record.attempts, record.status), (Outcome::RecoveredCompleted, 2, 200));
        assert_eq!(rig.liveness(), ["eligible/none", "recovered_completed"], "OBS-3");
    }
}

#[tokio::test(start_paused = true)]
async fn the_four_cells_of_fault_and_commit_have_one_outcome_each() {
    // REC-4, REC-5, REC-6; field reports 50, 51, 52: fault, before content: again? , after content
    let fault = |code| ExecutionFailure::new(code, FailureStage::Stream, ProviderContacted::Yes, "it broke");
    let faults: [(&str, ExecutionFailure, Option<EndNote>, bool); 7] = [
        ("clean cut", fault(FailureCode::ProviderEndedWithoutTerminal), None, false),
        ("reset", fault(FailureCode::ProviderUnreachable), None, true),
        ("stall", stall(LivenessClassification::HealthUnknown, CLOSED), Some(confirmed()), true),
        (
            "stall that was not seen to end",
            stall(LivenessClassification::RequestStalled, OwnershipClose::Unconfirmed),
            Some(confirmed()),
            false,
        ),
        ("malformed", fault(FailureCode::ProviderProtocol), None, false),
        ("5xx", fault(FailureCode::ProviderRejected).with_status(500), None, false),
        ("node gone", fault(FailureCode::Disconnected), None, true),
    ];
    for (name, failure, note, mended) in faults {
        for by_run in [false, true] {
            for committed in [false, true] {
                for stream in [true, false] {
                    let failed: Reply = if by_run {
                        let mut kinds = vec![RunEventKind::Start];
                        kinds.extend(committed.then(|| RunEventKind::Delta("half".into())));
                        kinds.push(RunEventKind::Error(failure.clone()));
                        run(kinds)
                    } else {
                        let mut frames = vec![if stream { sse() } else { head(200, "application/json") }];
                        let half = if stream {
                            content("data: {\"half\":1}\n\n")
                        } else {
                            body("{\"half\":1,", FrameFlags::NONE)
                        };
                        frames.extend(committed.then_some(half));
                        frames.push(TunnelFrame::Failed(failure.clone()));
                        tunnel(frames)
                    };
                    let failed = match &note {
                        Some(note) => Reply::Noted(note.clone(), Box::new(failed)),
                        None => failed,
                    };
                    let whole = tunnel([
                        head(200, "application/json"),
                        body("{\"choices\":[]}", FrameFlags::NONE),
                        TunnelFrame::End,
                    ]);
                    let second = match (by_run, stream) {
                        (true, _) => good_run(),
                        (false, true) => good(),
                        (false, false) => whole,
                    };
                    let rig = rig([failed, second]);
                    let (status, text) = rig.answer(if stream { STREAM } else { CHAT }).await;
                    let cell = format!("{name}, run {by_run}, committed {committed}, stream {stream}: {status} {text}");
                    // A buffered answer is committed when it is whole, so a half of it is not.
                    let told = committed && stream;
                    let sent = rig.bodies().len();
                    if told {
                        assert_eq!((status, sent), (200, 1), "{cell}");
                        assert!(text.contains("half") && !text.contains("[DONE]"), "{cell}");
                        let (_, last) = text.trim_end().rsplit_once("\n\n").unwrap();
                        error_of(&format!("{last}\n\n"));
                    } else if mended {
                        assert_eq!((status, sent), (200, 2), "{cell}");
                        assert!(!text.contains("half") && !text.contains("error"), "{cell}");
                    } else {
                        assert_eq!(sent, 1, "{cell}");
                        assert!(status >= 500, "{cell}");
                        error_of(&text);
                    }
                }
            }
        }
    }
}

fn confirmed() -> EndNote {
    EndNote::ConfirmedStall { provider: ProviderId::new("provider-1").unwrap() }
}

#[tokio::test(start_paused = true)]
async fn a_tool_call_that_a_client_has_a_part_of_is_never_repeated() {
    // REC-4; field report 56
    let call = content("data: {\"choices\":[{\"delta\":{\"tool_calls\": [{\"index\":0}]}}]}\n\n");
    let rig = rig([stalled(vec![sse(), call], LivenessClassification::RequestStalled, CLOSED), good()]);
    let (status, text) = rig.answer(STREAM).await;
    assert!(status == 200 && text.contains("tool_calls") && text.contains("response_stalled"));
    assert!(text.contains("for 0 ms (response_stall_timeout_ms)"), "field report 17: the setting that fired is named");
    assert_eq!(rig.bodies().len(), 1);
    assert_eq!(rig.liveness(), ["ineligible/tool_call", "ineligible"]);
}

#[tokio::test(start_paused = true)]
async fn a_spent_budget_says_so_to_clients_that_would_try_again() {
    // REC-4, API-5; field report 11
    let busy = || tunnel([failed(FailureCode::Busy)]);
    let rig = rig([busy(), busy(), busy(), good()]);
    let response = rig.chat(CHAT).await;
    assert_eq!(response.status().as_u16(), 503);
    assert_eq!(response.headers()["x-should-retry"], "false");
    assert!(response.headers().contains_key("retry-after"));
    assert_eq!(rig.bodies().len(), 3);
    assert_eq!(rig.record().outcome, Outcome::RecoveryExhausted);
    assert_eq!(rig.liveness(), ["eligible/none", "eligible/none", "ineligible/budget", "recovery_exhausted"]);
}

#[tokio::test(start_paused = true)]
async fn when_nobody_is_left_the_first_failure_is_told() {
    // REC-3, REC-7
    let rig = rig([tunnel([failed(FailureCode::Disconnected)]), Reply::Refuse(SubmitError::Unavailable)]);
    let (status, text) = rig.answer(CHAT).await;
    assert_eq!((status, error_of(&text)["message"].as_str()), (503, Some("it failed")));
    assert_eq!(rig.liveness(), ["ineligible/no_candidate", "recovery_exhausted"], "OBS-3: once a failure");
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_does_not_begin_is_told_by_what_kept_it() {
    // REC-7, OBS-3, API-5: the first failure where nobody could take it, else how the wait ended
    use SubmitError as S;
    let full = S::QueueFull { retry_after: Duration::from_secs(3) };
    for (refusal, status, code, ended_by, again, seen) in [
        (S::Unavailable, 503, "provider_unavailable", EndedBy::Disconnect, false, "no_candidate"),
        (full, 503, "provider_unavailable", EndedBy::Disconnect, false, "no_candidate"),
        (S::QueueTimeout, 503, "queue_timeout", EndedBy::Queue, false, "no_candidate"),
        (S::DeadlineExceeded, 504, "deadline_exceeded", EndedBy::Deadline, false, "deadline"),
        (S::Cancelled, 503, "cancelled", EndedBy::Cancelled, false, "cancelled"),
        (S::ShuttingDown, 503, "shutting_down", EndedBy::Shutdown, true, "no_candidate"),
    ] {
        let rig = rig([tunnel([failed(FailureCode::Disconnected)]), Reply::Refuse(refusal.clone())]);
        let response = rig.chat(CHAT).await;
        assert_eq!(response.headers().contains_key("x-should-retry"), !again, "{refusal:?}");
        let (found, text) = whole(response).await;
        assert_eq!((found, error_of(&text)["code"].as_str()), (status, Some(code)), "{refusal:?}");
        let record = rig.record();
        let outcome = if refusal == S::Cancelled { Outcome::Cancelled } else { Outcome::RecoveryExhausted };
        assert_eq!((record.outcome, record.ended_by, record.attempts), (outcome, ended_by, 1), "{refusal:?}");
        assert_eq!(rig.liveness(), [format!("ineligible/{seen}"), outcome.to_string()], "{refusal:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_stalled_is_avoided_by_every_later_attempt() {
    // REC-3; field report 8: the second attempt fails by something else, the third still knows of the stall
    let stall = stalled(vec![sse()], LivenessClassification::HealthUnknown, CLOSED);
    let rig = rig([stall, tunnel([failed(FailureCode::Busy)]), good()]);
    assert_eq!(rig.answer(STREAM).await.0, 200);
    let avoided = (Some("provider-1".into()), false);
    assert_eq!(rig.avoided(), [(None, false), avoided.clone(), avoided]);
    assert_eq!(rig.liveness(), ["eligible/none", "eligible/none", "recovered_completed"]);
}

#[tokio::test(start_paused = true)]
async fn usage_of_attempts_that_failed_is_in_the_record_and_not_in_the_answer() {
    // EXE-7; field reports 33, 84: what was reported is added up, what was not stays absent
    let reported = |input, output| {
        let usage = Usage { input_tokens: input, output_tokens: output, ..Usage::default() };
        RunEvent { seq: 2, kind: RunEventKind::Usage, usage: Some(usage) }
    };
    let event = |seq, kind| RunEvent { seq, kind, usage: None };
    let events = |events: Vec<RunEvent>| Reply::Run(Box::pin(stream::iter(events)));
    let busy = || ExecutionFailure::refused(FailureCode::Busy, "it failed");
    let fails = |usage| events(vec![event(1, RunEventKind::Start), usage, event(3, RunEventKind::Error(busy()))]);
    let answers = events(vec![
        event(1, RunEventKind::Start),
        event(2, RunEventKind::Delta("hello".into())),
        reported(Some(5), Some(7)),
        event(4, RunEventKind::Complete(iop_execution::FinishReason::Stop)),
    ]);
    let rig = rig([fails(reported(Some(100), None)), fails(event(2, RunEventKind::Usage)), answers]);
    let (status, text) = rig.answer(CHAT).await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &Value::from(5)), "the client's are of the answer");
    let usage = Usage { input_tokens: Some(105), output_tokens: Some(7), ..Usage::default() };
    assert_eq!((rig.record().usage, rig.records.1.lock().unwrap().len()), (Some(usage), 3));

    // The last one is told, and none is lost; a client that leaves before content loses none either.
    for left in [false, true] {
        let usage = Usage { input_tokens: Some(9), ..Usage::default() };
        let frames = [sse(), TunnelFrame::Usage(usage), TunnelFrame::Failed(busy())];
        let (first, second) = if left {
            (tunnel(frames), hanging([sse(), TunnelFrame::Usage(usage)]))
        } else {
            (tunnel(frames), Reply::Refuse(SubmitError::Unavailable))
        };
        let rig = self::rig([first, second]);
        let answer = tokio::time::timeout(Duration::from_secs(1), rig.answer(STREAM)).await;
        assert_eq!(answer.is_err(), left);
        let sum = Usage { input_tokens: Some(if left { 18 } else { 9 }), ..Usage::default() };
        assert_eq!(rig.record().usage, Some(sum));
    }
}

#[tokio::test(start_paused = true)]
async fn what_has_an_effect_or_is_too_large_to_keep_is_sent_once() {
    // REC-2, REC-4
    let stored = CHAT.replace("}]}", "}],\"store\":true}");
    let large = CHAT.replace("hi", &"x".repeat(MAX_SNAPSHOT_BYTES));
    for (body, reason) in [(stored, "ineligible/side_effect"), (large, "ineligible/snapshot")] {
        let rig = rig([tunnel([failed(FailureCode::Busy)]), good()]);
        assert_eq!(rig.answer(&body).await.0, 503);
        assert_eq!(rig.bodies().len(), 1);
        assert_eq!(rig.liveness(), [reason, "ineligible"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_between_attempts_ends_it() {
    // REC-4, EDG-3
    let rig = rig([tunnel([failed(FailureCode::Busy)]), Reply::Wait]);
    assert!(tokio::time::timeout(Duration::from_secs(1), rig.chat(STREAM)).await.is_err());
    assert_eq!(rig.record().outcome, Outcome::Cancelled);
    assert_eq!(rig.liveness(), ["ineligible/cancelled", "cancelled"], "OBS-3");
}

#[tokio::test(start_paused = true)]
async fn a_streaming_client_that_waits_is_shown_that_somebody_is_there() {
    // REC-8; field report 86
    let (frames, reply) = stepped();
    let rig = rig([reply, good()]);
    let start = tokio::time::Instant::now();
    let mut response = rig.chat(STREAM).await;
    assert_eq!((response.status().as_u16(), start.elapsed().as_secs()), (200, 20));
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let mut next = async |at: u64, what: &str| {
        let data = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!((start.elapsed().as_secs(), std::str::from_utf8(&data).unwrap()), (at, what));
    };
    next(20, ": waiting\n\n").await;
    next(35, ": waiting\n\n").await;
    next(50, ": waiting\n\n").await;
    // The replay is still legal: nothing of the answer was given.
    frames.send(failed(FailureCode::Disconnected)).unwrap();
    let rest = response.into_body().collect().await.unwrap().to_bytes();
    assert!(std::str::from_utf8(&rest).unwrap().ends_with("data: [DONE]\n\n"), "{rest:?}");
    assert_eq!(rig.record().outcome, Outcome::RecoveredCompleted);
}

#[tokio::test(start_paused = true)]
async fn a_failure_after_a_comment_is_told_in_the_stream_and_before_it_as_a_status() {
    // REC-8
    for (after, status) in [(10, 502), (30, 200)] {
        let (frames, reply) = stepped();
        let rig = rig([reply]);
        let failing = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(after)).await;
            frames.send(failed(FailureCode::ProviderProtocol)).unwrap();
        });
        let (found, text) = rig.answer(STREAM).await;
        failing.await.unwrap();
        assert_eq!(found, status);
        let told = text.trim_start_matches(": waiting\n\n");
        assert_eq!(error_of(told)["code"], "bad_gateway");
        assert_eq!(text.contains("waiting"), status == 200);
        let record = rig.record();
        assert_eq!((record.outcome, record.status), (Outcome::Failed, status));
    }
    // Off, and for clients that want no stream.
    for body in [CHAT, STREAM] {
        let rig = Rig::with([Reply::Wait], |mut config| {
            if body == STREAM {
                config.keepalive_after = Duration::ZERO;
            }
            config
        });
        assert!(tokio::time::timeout(Duration::from_secs(3600), rig.chat(body)).await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_covered_is_told_at_once() {
    // REC-5; field reports 48, 54: http statuses are covered only where the config says so
    let refused = |status| tunnel([head(status, "application/json"), body("{}", FrameFlags::NONE), TunnelFrame::End]);
    for (status, told) in [(429, 429), (503, 502), (500, 502), (400, 400)] {
        let rig = rig([refused(status), good()]);
        assert_eq!(rig.answer(CHAT).await.0, told, "{status}");
        assert_eq!(rig.bodies().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn more_held_than_one_write_does_not_hang_a_stream_that_has_begun_with_a_comment() {
    // REC-6, REC-8: 20 kB of lifecycle events come after the comment, before the content
    let (frames, reply) = stepped();
    let rig = rig([reply]);
    let mut response = rig.chat(STREAM).await;
    assert_eq!(response.status().as_u16(), 200);
    let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(&first[..], b": waiting\n\n");
    frames.send(sse()).unwrap();
    let event = format!("data: {{\"role\":\"{}\"}}\n\n", "x".repeat(200));
    for _ in 0..100 {
        frames.send(lifecycle(&event)).unwrap();
    }
    for frame in [content("data: {\"x\":1}\n\n"), done(), TunnelFrame::End] {
        frames.send(frame).unwrap();
    }
    let rest = tokio::time::timeout(Duration::from_secs(10), response.into_body().collect()).await;
    let rest = rest.expect("it does not hang").unwrap().to_bytes();
    let rest = std::str::from_utf8(&rest).unwrap();
    assert_eq!(rest.matches("role").count(), 100);
    assert!(rest.ends_with("data: {\"x\":1}\n\ndata: [DONE]\n\n") && !rest.contains("waiting"));
}

#[tokio::test(start_paused = true)]
async fn a_comment_is_a_byte_to_a_client_that_told_how_long_it_waits_for_one() {
    // REC-8, EXE-10; field report 86: openai-python with timeout=60 gets comments at 20, 35, 50 … s
    let (frames, reply) = stepped();
    let rig = rig([reply]);
    let mut request = post(STREAM);
    request.headers_mut().insert("x-stainless-read-timeout", "60".parse().unwrap());
    let response = rig.send(request).await;
    let answering = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(100)).await;
        for frame in [sse(), content("data: {\"x\":1}\n\n"), done(), TunnelFrame::End] {
            frames.send(frame).unwrap();
        }
    });
    let (status, text) = whole(response).await;
    answering.await.unwrap();
    assert!(status == 200 && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(rig.record().outcome, Outcome::Completed);
}
