//! Decides what is left when a process dies in the middle: one error, no false end, and a fleet that goes on.

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, event_data, read};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::machine::eventually;
use iop_tests::wire_client::Request;

use crate::{PROGRAMS, chats, finish, hello, provider, says, soon, whole};

fn stuck() -> Answer {
    let whole = Answer::new(200).header("content-type", "application/json").write("{\"id\":").hang();
    Answer::events().write(says("one")).hang().without_stream(whole)
}

#[tokio::test]
async fn a_node_killed_in_mid_stream_is_one_error_and_its_successor_serves() {
    // FEN-2, REC-6, API-6, WIR-13, NOD-1; field reports 51, 64, 84
    let backend = ScriptedBackend::builder().model("stuck", stuck()).model("m", hello()).start().await.unwrap();
    let mut fleet = Fleet::start(PROGRAMS, Plan::new(vec![provider(&backend, 4, &["stuck", "m"])])).await;
    let mut committed = fleet.client().await;
    committed.send(&Request::chat("stuck", true)).await;
    let head = committed.head().await;
    let mut seen = committed.read_until("one").await;
    let mut whole = fleet.client().await;
    whole.send(&Request::chat("stuck", false)).await;
    soon("both run", backend.wait_for(|traffic| traffic.waiting == 2)).await;

    fleet.kill_node(0).await;
    let mut answer = committed.rest(head).await;
    seen.append(&mut answer.pieces);
    answer.pieces = seen;
    let Outcome::Failed { text, status: 200, code, kind } = read(&answer) else { panic!("{:?}", read(&answer)) };
    assert_eq!((text.as_str(), code.as_deref(), kind.as_str()), ("one", Some("provider_unavailable"), "server_error"));
    let events = event_data(&answer.body());
    assert_eq!(events.iter().filter(|data| data.contains("\"error\"")).count(), 1);
    assert!(!answer.text().contains("[DONE]"));
    let head = whole.head().await;
    let answer = whole.rest(head).await;
    let Outcome::Failed { status: 503, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
    assert_eq!(code.as_deref(), Some("provider_unavailable"));
    assert!(answer.head.header("retry-after").is_some(), "API-5");
    fleet.at_rest().await;
    assert_eq!(fleet.ask(&Request::get("/readyz")).await.status(), 503);
    let answer = fleet.ask(&Request::chat("m", false)).await;
    let Outcome::Failed { status: 503, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
    assert_eq!(code.as_deref(), Some("no_provider_available"));

    fleet.start_node(0);
    fleet.ready().await;
    let answer = fleet.ask(&Request::chat("m", true)).await;
    assert_eq!(read(&answer), Outcome::Whole { text: "Hello".to_owned() });
    fleet.at_rest().await;
}

#[tokio::test]
async fn an_edge_killed_in_mid_stream_breaks_the_body_and_the_node_finds_its_successor() {
    // NOD-1, NOD-5, WIR-13, API-6; field reports 51, 79
    let backend = ScriptedBackend::builder().model("stuck", stuck()).model("m", hello()).start().await.unwrap();
    let plan = Plan::new(vec![provider(&backend, 4, &["stuck", "m"])]).relayed();
    let mut fleet = Fleet::start(PROGRAMS, plan).await;
    let mut client = fleet.client().await;
    client.send(&Request::chat("stuck", true)).await;
    let head = client.head().await;
    let mut seen = client.read_until("one").await;

    fleet.kill_edge().await;
    let mut answer = client.rest(head).await;
    seen.append(&mut answer.pieces);
    answer.pieces = seen;
    assert_eq!(read(&answer), Outcome::Broken { text: "one".to_owned() }, "never a clean end");
    soon("the Node closes the provider call", backend.wait_for(|traffic| traffic.client_closed == 1)).await;

    fleet.start_edge().await;
    fleet.ready().await;
    let answer = fleet.ask(&Request::chat("m", true)).await;
    assert_eq!(read(&answer), Outcome::Whole { text: "Hello".to_owned() });
    fleet.at_rest().await;
}

#[tokio::test]
async fn a_cut_connection_ends_its_runs_once_and_the_same_node_comes_back() {
    // WIR-13, FEN-2, FEN-5, NOD-5; field reports 70, 73
    let backend = ScriptedBackend::builder().model("stuck", stuck()).model("m", hello()).start().await.unwrap();
    let plan = Plan::new(vec![provider(&backend, 4, &["stuck", "m"])]).relayed();
    let fleet = Fleet::start(PROGRAMS, plan).await;
    for round in 1..=3 {
        let mut client = fleet.client().await;
        client.send(&Request::chat("stuck", true)).await;
        let head = client.head().await;
        client.read_until("one").await;
        fleet.relay().cut();
        let answer = client.rest(head).await;
        assert_eq!(answer.text().matches("\"error\"").count(), 1, "round {round}: {}", answer.text());
        soon("the provider call ends", backend.wait_for(|traffic| traffic.client_closed == round)).await;
        fleet.at_rest().await;
        fleet.ready().await;
        let answer = fleet.ask(&Request::chat("m", false)).await;
        assert_eq!(read(&answer), Outcome::Whole { text: "Hello".to_owned() });
    }
}

#[tokio::test]
async fn a_waiter_is_dispatched_once_to_the_node_that_came_back() {
    // FEN-2, FEN-3, FEN-5, QUE-3; field report 72. Two Nodes serve one model with one place each. Both are taken and a
    // third request waits; one Node dies, and the waiter stays because the other one may still serve it.
    let backends = [
        ScriptedBackend::builder().model("m", stuck().without_stream(whole("first"))).start().await.unwrap(),
        ScriptedBackend::builder().model("m", stuck().without_stream(whole("second"))).start().await.unwrap(),
    ];
    let [first, second] = &backends;
    let providers = vec![
        ProviderPlan::new("a", &first.base_url(), 1, &["m"]),
        ProviderPlan::new("b", &second.base_url(), 1, &["m"]).on_node(1),
    ];
    let mut fleet = Fleet::start(PROGRAMS, Plan::new(providers)).await;
    let capacity = async |places: f64| {
        eventually("as many places", || async {
            (fleet.metrics().await.sum("iop_provider_capacity", &[]) == places).then_some(())
        })
        .await;
    };
    capacity(2.0).await;
    let mut running = Vec::new();
    for _ in 0..2 {
        let mut client = fleet.client().await;
        client.send(&Request::chat("m", true)).await;
        let head = client.head().await;
        client.read_until("one").await;
        running.push((client, head));
    }
    let mut waiter = fleet.client().await;
    waiter.send(&Request::chat("m", false)).await;
    eventually("one waits", || async { (fleet.metrics().await.sum("iop_requests_waiting", &[]) == 1.0).then_some(()) })
        .await;

    fleet.kill_node(0).await;
    eventually("the fence", || async {
        (fleet.metrics().await.sum("iop_provider_capacity", &[]) == 1.0).then_some(())
    })
    .await;
    assert_eq!(fleet.metrics().await.sum("iop_requests_waiting", &[]), 1.0, "it still waits");
    fleet.start_node(0);
    let head = waiter.head().await;
    let answer = waiter.rest(head).await;
    assert_eq!(read(&answer), Outcome::Whole { text: "first".to_owned() });
    assert_eq!((chats(first), chats(second)), (2, 1), "dispatched once, to the one that came back");

    // Of the two that ran, one has its error and the other one still runs.
    let [(mut left, left_head), (mut right, right_head)] = <[_; 2]>::try_from(running).unwrap();
    let ended = tokio::select! {
        answer = left.rest(left_head) => answer,
        answer = right.rest(right_head) => answer,
    };
    assert_eq!(ended.text().matches("\"error\"").count(), 1, "{}", ended.text());
    assert_eq!(second.traffic().answering, 1);
    drop((left, right));
    fleet.at_rest().await;
}

#[tokio::test]
async fn a_finished_stream_before_a_death_stays_finished() {
    // WIR-6, LEA-4
    let answer = Answer::events().write(says("all")).write(finish());
    let backend = ScriptedBackend::builder().model("m", answer).start().await.unwrap();
    let mut fleet = Fleet::start(PROGRAMS, Plan::new(vec![provider(&backend, 1, &["m"])])).await;
    let answer = fleet.ask(&Request::chat("m", true)).await;
    fleet.kill_node(0).await;
    assert_eq!(read(&answer), Outcome::Whole { text: "all".to_owned() });
    fleet.at_rest().await;
}
