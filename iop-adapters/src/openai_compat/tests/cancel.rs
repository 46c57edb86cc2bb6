use std::time::Instant;

use iop_execution::CancelReason;
use iop_execution::testkit::Answer;
use iop_execution::testkit::cases::chat_case;

use super::*;

/// ADP-4.
const BOUND: Duration = Duration::from_millis(100);

async fn backend() -> ScriptedBackend {
    ScriptedBackend::builder()
        .model("prefill", Answer::events().late_head().hang())
        .model("decode", chat_case("silent_stall").unwrap().answer)
        .model("head", Answer::events().hang())
        .model("body", Answer::new(200).header("content-type", "application/json").write("{").hang())
        .start()
        .await
        .unwrap()
}

async fn waiting(backend: &ScriptedBackend) {
    tokio::time::timeout(PATIENCE, backend.wait_for(|traffic| traffic.waiting == 1)).await.unwrap();
}

async fn closed_since(backend: &ScriptedBackend, closed: u64, since: Instant) {
    let traffic = backend.wait_for(|traffic| traffic.client_closed == closed);
    let traffic = tokio::time::timeout(PATIENCE, traffic).await.expect("the upstream call was not closed");
    let took = traffic.last_client_close.unwrap().saturating_duration_since(since);
    assert!(took < BOUND, "closing took {took:?}");
}

/// Polls until nothing is ready, so that the call waits for the backend.
async fn settle<S: futures_util::Stream + Unpin>(backend: &ScriptedBackend, stream: &mut S) {
    tokio::select! {
        () = async { while stream.next().await.is_some() {} } => panic!("it ended"),
        () = waiting(backend) => {}
    }
}

#[tokio::test]
async fn a_cancel_closes_the_upstream_call_of_a_tunnel_wherever_it_waits() {
    // ADP-4, EXE-4; field reports 23, 24 kind
    let backend = backend().await;
    let adapter = adapter(&backend);
    for (at, (name, stream)) in
        [("prefill", true), ("prefill", false), ("head", true), ("decode", true), ("body", false)]
            .into_iter()
            .enumerate()
    {
        let mut execution = tunnel(&adapter, name, stream);
        settle(&backend, &mut execution).await;
        let since = Instant::now();
        execution.cancel(CancelReason::Client);
        let frames = collect(&mut execution).await;
        assert!(matches!(frames[..], [TunnelFrame::Cancelled(CancelReason::Client)]), "{name}: {frames:?}");
        closed_since(&backend, at as u64 + 1, since).await;
    }
}

#[tokio::test]
async fn a_cancel_closes_the_upstream_call_of_a_run_wherever_it_waits() {
    // ADP-4, EXE-4
    let backend = backend().await;
    let adapter = adapter(&backend);
    for (at, name) in ["prefill", "head", "decode", "body"].into_iter().enumerate() {
        let mut execution = run(&adapter, name);
        settle(&backend, &mut execution).await;
        let since = Instant::now();
        execution.cancel(CancelReason::Client);
        assert_eq!(collect(&mut execution).await.len(), 1, "{name}");
        closed_since(&backend, at as u64 + 1, since).await;
    }
}

#[tokio::test]
async fn dropping_the_call_closes_the_upstream_call() {
    // EXE-4: what happens after the close grace
    let backend = backend().await;
    let adapter = adapter(&backend);
    for (at, name) in ["prefill", "decode"].into_iter().enumerate() {
        let mut execution = tunnel(&adapter, name, true);
        settle(&backend, &mut execution).await;
        let since = Instant::now();
        drop(execution);
        closed_since(&backend, at as u64 + 1, since).await;
    }
}

#[tokio::test]
async fn a_reader_that_stops_stops_the_backend() {
    // EXE-4; field report 43: 64 MiB must not be read into memory
    let chunk =
        format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "x".repeat(64 * 1024));
    let flood = (0..1024).fold(Answer::events(), |answer, _| answer.write(chunk.clone()));
    let backend = ScriptedBackend::builder().model("flood", flood).start().await.unwrap();
    let mut execution = tunnel(&adapter(&backend), "flood", true);
    assert!(matches!(next(&mut execution).await, Some(TunnelFrame::Head(_))));
    // Nobody polls the call now. The backend goes on until socket and client are full; then its count stands still.
    let mut written = 0;
    let quiet = Duration::from_millis(200);
    while let Ok(traffic) = tokio::time::timeout(quiet, backend.wait_for(|traffic| traffic.written > written)).await {
        written = traffic.written;
    }
    assert!(written > 0);
    assert!(written < 24 * 1024 * 1024, "{written} bytes were read ahead");
    execution.cancel(CancelReason::SlowClient);
    assert!(matches!(next(&mut execution).await, Some(TunnelFrame::Cancelled(_))));
}
