//! Decides what clients see of a Node that dies, a Node that freezes and a provider that stalls while no content was sent and
//! another one can serve: the whole answer, once.

use std::time::{Duration, Instant};

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::wire_client::Request;
use tokio::task::JoinSet;

use crate::{PROGRAMS, chats, finish, says, soon, whole_body};

/// Requests of each test: half of them at either Node.
const REQUESTS: usize = 8;

/// A provider on each of two Nodes, with these keys: the first one's backend is mute, the other one's answers when it is let.
async fn two_nodes(keys: &'static str, more: &str) -> ([ScriptedBackend; 2], Fleet) {
    let second = || Answer::events().late_head().pause().write(says("whole")).write(finish());
    let json = || Answer::new(200).header("content-type", "application/json").late_head();
    let second = second().without_stream(json().pause().write(whole_body("whole")));
    let mute = Answer::events().late_head().hang();
    let backends = [
        ScriptedBackend::builder().model("m", mute).start().await.unwrap(),
        ScriptedBackend::builder().model("m", second).start().await.unwrap(),
    ];
    let providers = backends.iter().enumerate().map(|(node, backend)| {
        ProviderPlan::new(&format!("p{node}"), &backend.base_url(), 16, &["m"]).on_node(node).with(keys)
    });
    let fleet = Fleet::start(PROGRAMS, Plan::new(providers.collect()).with(more).recovering()).await;
    fleet.all_ready(2).await;
    (backends, fleet)
}

/// Asks by stream and whole, waits until half of the requests are at either backend, does `harm`, and lets the second backend
/// answer whatever it is asked. Gives the time from the harm to the last answer.
async fn mended(backends: &[ScriptedBackend; 2], fleet: &mut Fleet, harm: impl FnOnce(&mut Fleet)) -> Duration {
    let mut clients = JoinSet::new();
    for number in 0..REQUESTS {
        let mut client = fleet.client().await;
        clients.spawn(async move { client.ask(&Request::chat("m", number % 2 == 0)).await });
    }
    for backend in backends {
        soon("half of them run", backend.wait_for(|traffic| traffic.waiting >= REQUESTS as u64 / 2)).await;
    }
    harm(fleet);
    let begin = Instant::now();
    (0..REQUESTS).for_each(|_| backends[1].release());
    while let Some(answer) = soon("every answer", clients.join_next()).await {
        let answer = answer.unwrap();
        assert_eq!(answer.head.status, 200);
        assert_eq!(read(&answer), Outcome::Whole { text: "whole".to_owned() });
    }
    let took = begin.elapsed();
    // The silent call of a stall is asked about with a request of one token, too.
    let (first, second) = (chats(&backends[0]), chats(&backends[1]));
    assert_eq!(second, REQUESTS, "each was sent again once");
    assert!(first == REQUESTS / 2 || first == REQUESTS, "{first}");
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_killed_before_content_costs_nobody_an_answer() {
    // REC-5, REC-8, FEN-2; field reports 51, 64
    let (backends, mut fleet) = two_nodes("", "").await;
    let took = mended(&backends, &mut fleet, |fleet| fleet.node(0).signal("KILL")).await;
    assert!(took < Duration::from_secs(5), "at once, and not after {took:?}");
    fleet.at_rest().await;
}

/// Freezes a Node; its requests are answered by the other one within `bound`.
async fn frozen(more: &str, bound: Duration) {
    let (backends, mut fleet) = two_nodes("", more).await;
    let took = mended(&backends, &mut fleet, |fleet| fleet.node(0).signal("STOP")).await;
    assert!(took < bound, "it took {took:?}");
    fleet.node(0).signal("CONT");
    let withdrawn = REQUESTS as u64 / 2;
    soon("withdrawn calls end", backends[0].wait_for(|traffic| traffic.client_closed == withdrawn)).await;
    fleet.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_freezes_before_content_costs_15_s() {
    // FEN-7, REC-5; field reports 9, T6
    frozen("", Duration::from_secs(15)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_freezes_before_content_costs_8_s_where_config_says_so() {
    // FEN-7, REC-5, CFG-1
    frozen("health: { suspicion_withdraw_ms: 3000 }", Duration::from_secs(8)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_stalls_before_content_is_left_for_the_other_one() {
    // REC-1, REC-5, WDG-3, WDG-4; field reports 8, 10: one 200, no error, the silent call is closed
    let (backends, mut fleet) = two_nodes(", response_stall_timeout_ms: 1500", "").await;
    let took = mended(&backends, &mut fleet, |_| {}).await;
    assert!(took < Duration::from_secs(12), "a stall, a probe and another attempt took {took:?}");
    soon("silent calls end", backends[0].wait_for(|traffic| traffic.waiting == 0)).await;
    fleet.at_rest().await;
}
