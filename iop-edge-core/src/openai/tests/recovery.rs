//! Requests whose attempts fail, and what clients see of that.

use iop_execution::failure::{LivenessClassification, OwnershipClose, StallDetail, TimeoutSetting};
use iop_execution::{FailureStage, ProviderContacted};

use super::*;
use crate::openai::recovery::MAX_SNAPSHOT_BYTES;

pub(super) fn rig(replies: impl IntoIterator<Item = Reply>) -> Rig {
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
    pub(super) fn bodies(&self) -> Vec<Bytes> {
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

    pub(super) fn liveness(&self) -> Vec<String> {
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
        assert_eq!(rig.liveness(), ["eligible/none", "recovered_completed"]);
    }
}

/// Its name, the failure, what the engine noted of it, and whether another attempt before content mends it.
pub(super) type Fault = (&'static str, ExecutionFailure, Option<EndNote>, bool);

pub(super) fn faults() -> [Fault; 7] {
    let fault = |code| ExecutionFailure::new(code, FailureStage::Stream, ProviderContacted::Yes, "it broke");
    [
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
    ]
}

#[tokio::test(start_paused = true)]
async fn the_four_cells_of_fault_and_commit_have_one_outcome_each() {
    // REC-4, REC-5, REC-6; field reports 50, 51, 52: fault, before content: again? , after content
    for (name, failure, note, mended) in faults() {
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
    assert_eq!(rig.liveness(), ["eligible/none", "ineligible/no_candidate", "recovery_exhausted"]);
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
    assert_eq!(rig.liveness(), ["eligible/none", "cancelled"]);
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
