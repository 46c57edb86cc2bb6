//! Decides whether a client that leaves is noticed everywhere, at once, whatever its request is doing.

use std::time::{Duration, Instant};

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::machine::eventually;
use iop_tests::wire_client::Request;

use crate::{PROGRAMS, chats, finish, provider, quiet, says, soon, whole};

/// How long the upstream call may outlive the client (ADP-4).
const AT_ONCE: Duration = Duration::from_millis(100);

#[tokio::test]
async fn a_client_that_leaves_closes_the_upstream_call_in_every_stage() {
    // ADP-4, EDG-3, EXE-4, LEA-6; field reports 23, 24, 25, 26, 28, 29, T3
    let prefill = || Answer::events().late_head().hang();
    let json = || Answer::new(200).header("content-type", "application/json");
    let backend = ScriptedBackend::builder()
        .model("prefill", prefill())
        .model("head", Answer::events().hang().without_stream(json().hang()))
        .model("decode", Answer::events().write(says("one")).hang().without_stream(json().write("{\"id\":").hang()))
        .model("run-prefill", prefill())
        .model("run-decode", Answer::events().write(says("one")).hang())
        .start()
        .await
        .unwrap();
    let url = backend.base_url();
    let providers = vec![
        ProviderPlan::new("t", &url, 4, &["prefill", "head", "decode"]),
        ProviderPlan::new("r", &url, 4, &["run-prefill", "run-decode"]).by_run(),
    ];
    let fleet = Fleet::start(PROGRAMS, Plan::new(providers)).await;
    let _quiet = quiet().await;
    let stages = [
        ("prefill", true),
        ("prefill", false),
        ("head", true),
        ("head", false),
        ("decode", true),
        ("decode", false),
        ("run-prefill", true),
        ("run-prefill", false),
        ("run-decode", true),
        ("run-decode", false),
    ];
    for ((model, stream), closed) in stages.into_iter().zip(1..) {
        let mut client = fleet.client().await;
        client.send(&Request::chat(model, stream)).await;
        soon("the provider works on it", backend.wait_for(|traffic| traffic.waiting == 1)).await;
        if stream && model.ends_with("decode") {
            client.head().await;
            client.read_until("one").await;
        }
        let left = Instant::now();
        drop(client);
        let traffic = soon("the upstream call ends", backend.wait_for(|traffic| traffic.client_closed == closed)).await;
        let after = traffic.last_client_close.unwrap().saturating_duration_since(left);
        assert!(after < AT_ONCE, "{model}, stream {stream}: closed after {after:?}");
        fleet.at_rest().await;
    }
    // The cause: the clients left. Nothing timed out, failed, or lost its connection.
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.sum("iop_requests_total", &["ended_by=\"client\""]), 10.0, "{metrics:?}");
    assert_eq!(metrics.sum("iop_requests_total", &[]), 10.0, "{metrics:?}");
    assert_eq!(chats(&backend), 10, "and nothing was asked twice");
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_never_reaches_the_provider() {
    // QUE-2, EDG-3, ADP-4; field reports 30, 35. The queue's own bound is far away: only their leaving can end the wait.
    let backend = ScriptedBackend::builder()
        .model("busy", Answer::events().write(says("one")).pause().write(finish()))
        .model("never", whole("never"))
        .start()
        .await
        .unwrap();
    let plan = Plan::new(vec![provider(&backend, 1, &["busy", "never"])]).with("queue: { timeout_ms: 600000 }");
    let fleet = Fleet::start(PROGRAMS, plan).await;
    let mut busy = fleet.client().await;
    busy.send(&Request::chat("busy", true)).await;
    busy.head().await;
    busy.read_until("one").await;
    let mut waiting = Vec::new();
    for stream in [true, false] {
        let mut client = fleet.client().await;
        client.send(&Request::chat("never", stream)).await;
        waiting.push(client);
    }
    let waiters = async |count: f64| {
        eventually("the queue has as many", || async {
            (fleet.metrics().await.sum("iop_requests_waiting", &[]) == count).then_some(())
        })
        .await;
    };
    waiters(2.0).await;
    waiting.clear();
    waiters(0.0).await;
    backend.release();
    busy.read_until("[DONE]").await;
    fleet.at_rest().await;
    assert_eq!(chats(&backend), 1);
}
