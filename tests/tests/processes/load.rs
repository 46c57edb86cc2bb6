//! Decides whether many runs, and many names, cost no more than they should.

use std::time::Duration;

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::machine::{peak_bytes, resident_bytes};
use iop_tests::wire_client::Request;
use serde_json::json;
use tokio::task::JoinSet;

use crate::{PROGRAMS, chats, finish, fleet, hello, provider, quiet, says};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_tiny_frame_runs_on_one_connection_survive() {
    // WIR-10, WIR-9, WIR-11; field report T1
    const RUNS: usize = 1_000;
    const FRAMES: usize = 20;
    let answer = (0..FRAMES).fold(Answer::events().pause(), |answer, _| answer.write(says("x"))).write(finish());
    let backend =
        ScriptedBackend::builder().model("tunnel", answer.clone()).model("run", answer).start().await.unwrap();
    let url = backend.base_url();
    let providers =
        vec![ProviderPlan::new("t", &url, 1_000, &["tunnel"]), ProviderPlan::new("r", &url, 1_000, &["run"]).by_run()];
    let plan = Plan::new(providers).with("limits: { connections_per_address: 4096 }");
    let fleet = Fleet::start(PROGRAMS, plan).await;
    let _quiet = quiet().await;
    let mut clients = JoinSet::new();
    for number in 0..RUNS {
        let model = if number % 2 == 0 { "tunnel" } else { "run" };
        let mut client = fleet.client().await;
        clients.spawn(async move { client.ask(&Request::chat(model, true)).await });
    }
    let all = backend.wait_for(|traffic| traffic.waiting == RUNS as u64);
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("all run at once");
    (0..RUNS).for_each(|_| backend.release());
    while let Some(answer) = clients.join_next().await {
        assert_eq!(read(&answer.unwrap()), Outcome::Whole { text: "x".repeat(FRAMES) });
    }
    fleet.at_rest().await;
    assert_eq!(fleet.metrics().await.sum("iop_node_connections_total", &[]), 1.0, "one connection carried them all");
    assert_eq!(chats(&backend), RUNS);
}

#[tokio::test]
#[cfg_attr(not(target_os = "linux"), ignore = "it reads /proc")]
async fn five_thousand_names_that_do_not_exist_leave_no_trace() {
    // API-15, API-13, OPS-4; field reports 89, T9
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["m"])).await;
    let _quiet = quiet().await;
    let mut client = fleet.client().await;
    let (mut series, mut memory) = (0, 0);
    for number in 0..5_500_u32 {
        if number == 500 {
            series = fleet.metrics().await.series();
            memory = resident_bytes(fleet.edge().pid());
        }
        // Spread by a multiplier without pattern: every name is new.
        let name = format!("no-such-{:08x}", number.wrapping_mul(2_654_435_761));
        let request = match number % 3 {
            0 => Request::chat(&name, true),
            1 => Request::chat(&name, false).header("x-request-id", &name).header("x-model", &name),
            _ => Request::get(&format!("/v1/models/{name}")),
        };
        let answer = client.ask(&request).await;
        let Outcome::Failed { status: 404, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
        assert_eq!(code.as_deref(), Some("model_not_found"));
    }
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.series(), series, "no series came");
    let grown = resident_bytes(fleet.edge().pid()).saturating_sub(memory);
    assert!(grown < 8 << 20, "the Edge grew by {grown} bytes");
    assert!(backend.received().iter().all(|request| request.method != "POST"), "no name reached the provider");
}

#[tokio::test]
#[cfg_attr(not(target_os = "linux"), ignore = "it reads /proc")]
async fn a_large_body_is_held_about_once() {
    // API-3, WIR-7, WIR-8; field report 44: no more than 1.3 times the body, at the Edge and at the Node
    const BODY: usize = 30 << 20;
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["m"])).await;
    let _quiet = quiet().await;
    let mut client = fleet.client().await;
    client.ask(&Request::chat("m", false)).await;
    let before = [peak_bytes(fleet.edge().pid()), peak_bytes(fleet.node(0).pid())];
    let request = Request::chat_with("m", false, &json!({ "x": "y".repeat(BODY) }));
    assert_eq!(read(&client.ask(&request).await), Outcome::Whole { text: "Hello".to_owned() });
    let after = [peak_bytes(fleet.edge().pid()), peak_bytes(fleet.node(0).pid())];
    assert_eq!(backend.received().pop().unwrap().body.len(), request.parts().3.len(), "it arrived");
    for (name, before, after) in [("Edge", before[0], after[0]), ("Node", before[1], after[1])] {
        let grown = after - before;
        assert!(grown < BODY as u64 * 13 / 10, "the {name} grew by {grown} bytes for a body of {BODY}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_requests_on_four_places_are_never_more_than_four_at_the_provider() {
    // LEA-1, LEA-5, QUE-1; field report 47
    let answer = Answer::events().write(says("x")).pause().write(finish());
    let backend = ScriptedBackend::builder().model("m", answer).start().await.unwrap();
    let fleet = fleet(provider(&backend, 4, &["m"])).await;
    let mut clients = JoinSet::new();
    for _ in 0..8 {
        let mut client = fleet.client().await;
        clients.spawn(async move { client.ask(&Request::chat("m", true)).await });
    }
    for round in 0..8_u64 {
        let waiting = (8 - round).min(4);
        crate::soon("as many run", backend.wait_for(|traffic| traffic.waiting == waiting)).await;
        backend.release();
    }
    while let Some(answer) = clients.join_next().await {
        assert!(matches!(read(&answer.unwrap()), Outcome::Whole { .. }));
    }
    assert_eq!(backend.traffic().max_answering, 4);
    fleet.at_rest().await;
}
