//! Decides what a Node that stops without a word costs: nothing where it is short, and a bounded wait where it is not.
//!
//! SIGSTOP is a machine that hangs or lost its power: its connection stays open, and nobody says that it is gone.

use std::time::{Duration, Instant};

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::machine::eventually;
use iop_tests::storm::{Shot, Storm, Tally};
use iop_tests::wire_client::{Connection, Head, Piece, Request};
use tokio::task::JoinSet;

use crate::{PROGRAMS, brisk, brisk_shots, chats, finish, hello, quiet, says, soon, whole_body};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_pauses_of_a_node_lose_nothing() {
    // FEN-7, WIR-12, WIR-14; field reports 9, 13
    let backends = [brisk().await, brisk().await];
    let mut providers = Vec::new();
    for (node, backend) in backends.iter().enumerate() {
        let url = backend.base_url();
        providers.push(ProviderPlan::new(&format!("t{node}"), &url, 16, &["tunnel"]).on_node(node));
        providers.push(ProviderPlan::new(&format!("r{node}"), &url, 16, &["run"]).on_node(node).by_run());
    }
    let mut fleet = Fleet::start(PROGRAMS, Plan::new(providers)).await;
    fleet.all_ready(2).await;
    let _quiet = quiet().await;
    let storm = Storm::start(fleet.openai(), 12, brisk_shots());
    // The last one is longer than the silence after which a Node is suspected, and shorter than what withdraws its work.
    for pause_ms in [500, 500, 500, 500, 500, 500, 6_500] {
        soon("the Node works", backends[0].wait_for(|traffic| traffic.answering > 0)).await;
        fleet.node(0).signal("STOP");
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        fleet.node(0).signal("CONT");
    }
    let tally = storm.end().await;
    tally.assert_only(&[]);
    fleet.at_rest().await;
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.sum("iop_node_connections_total", &[]), 2.0, "no connection was lost: {metrics:?}");
    assert_eq!(chats(&backends[0]) + chats(&backends[1]), tally.total() as usize, "and nothing was asked twice");
}

/// Two Nodes with a backend each, and so many places for the models of [`freeze`].
async fn two_nodes(places: u32, more: &str) -> ([ScriptedBackend; 2], Fleet) {
    let mut backends = Vec::new();
    for _ in 0..2 {
        // The head comes with the first token, as from servers that prefill first.
        let late = Answer::events().late_head().pause().write(says("late")).write(finish());
        let json = Answer::new(200).header("content-type", "application/json").late_head();
        let late = late.without_stream(json.pause().write(whole_body("late")));
        let begun = Answer::events().write(says("begun")).pause().write(says(", done")).write(finish());
        let backend = ScriptedBackend::builder().model("late", late).model("begun", begun).model("m", hello());
        backends.push(backend.start().await.unwrap());
    }
    let providers = backends.iter().enumerate().map(|(node, backend)| {
        ProviderPlan::new(&format!("p{node}"), &backend.base_url(), places, &["late", "begun", "m"]).on_node(node)
    });
    let fleet = Fleet::start(PROGRAMS, Plan::new(providers.collect()).with(more)).await;
    fleet.all_ready(2).await;
    (backends.try_into().unwrap(), fleet)
}

/// A stream of which the first word was read.
async fn begun(fleet: &Fleet) -> (Connection, Head, Vec<Piece>) {
    let mut client = fleet.client().await;
    client.send(&Request::chat("begun", true)).await;
    let head = client.head().await;
    let pieces = client.read_until("begun").await;
    (client, head, pieces)
}

async fn rest((mut client, head, mut pieces): (Connection, Head, Vec<Piece>)) -> Outcome {
    let mut answer = client.rest(head).await;
    pieces.append(&mut answer.pieces);
    answer.pieces = pieces;
    read(&answer)
}

/// Freezes one of two Nodes under load and checks what its requests come to, within `bound`.
async fn freeze(more: &str, bound: Duration) {
    const LATE: usize = 3;
    let (backends, mut fleet) = two_nodes(4, more).await;
    // One begun stream and three without content on each Node: all places are taken.
    let streams = [begun(&fleet).await, begun(&fleet).await];
    let mut late = JoinSet::new();
    for number in 0..2 * LATE {
        let mut client = fleet.client().await;
        late.spawn(async move { (client.ask(&Request::chat("late", number % 2 == 0)).await, Instant::now()) });
    }
    for backend in &backends {
        soon("all places are taken", backend.wait_for(|traffic| traffic.waiting == 4)).await;
    }
    let mut waiters = JoinSet::new();
    for _ in 0..2 {
        let mut client = fleet.client().await;
        waiters.spawn(async move { client.ask(&Request::chat("m", true)).await });
    }
    eventually("two wait", || async { (fleet.metrics().await.sum("iop_requests_waiting", &[]) == 2.0).then_some(()) })
        .await;

    fleet.node(0).signal("STOP");
    let frozen = Instant::now();
    eventually("the Node is a suspect", || async {
        (fleet.metrics().await.sum("iop_node_suspect", &["node=\"node-0\""]) == 1.0).then_some(())
    })
    .await;
    // Its places are nobody's, so who waits gets those of the other Node as they become free. Field report 72.
    (0..4).for_each(|_| backends[1].release());
    while let Some(answer) = waiters.join_next().await {
        assert_eq!(read(&answer.unwrap()), Outcome::Whole { text: "Hello".to_owned() });
    }
    assert!(chats(&backends[0]) == 4, "they went to the other one");
    let mut failed = 0;
    for _ in 0..2 * LATE {
        let (answer, at) = soon("an end of it", late.join_next()).await.unwrap().unwrap();
        match read(&answer) {
            Outcome::Whole { text } => assert_eq!(text, "late"),
            Outcome::Failed { text, status: 503, code, .. } => {
                assert_eq!((text.as_str(), code.as_deref()), ("", Some("provider_unavailable")));
                assert!(answer.head.header("retry-after").is_some(), "API-5");
                assert!(at - frozen < bound, "ended {:?} after the Node froze", at - frozen);
                failed += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(failed, LATE, "those on the frozen Node, and no other");
    // New ones go to the other Node at once.
    for _ in 0..6 {
        let begin = Instant::now();
        let mut client = fleet.client().await;
        client.send(&Request::chat("m", true)).await;
        let head = client.head().await;
        client.read_until("Hel").await;
        assert!(begin.elapsed() < Duration::from_secs(1), "the first word came after {:?}", begin.elapsed());
        drop((client, head));
    }
    assert_eq!(chats(&backends[0]), 4);
    let in_use = fleet.metrics().await.sum("iop_provider_in_use", &["provider=\"p0\""]);
    assert_eq!(in_use, 4.0, "LEA-6: its places stay taken until it says that the work has stopped");

    fleet.node(0).signal("CONT");
    soon("withdrawn calls end", backends[0].wait_for(|traffic| traffic.client_closed == LATE as u64)).await;
    // What the client had begun to read goes on as if nothing had happened.
    backends[0].release();
    for stream in streams {
        assert_eq!(rest(stream).await, Outcome::Whole { text: "begun, done".to_owned() });
    }
    fleet.at_rest().await;
    eventually("the Node is used again", || async {
        assert_eq!(read(&fleet.ask(&Request::chat("m", true)).await), Outcome::Whole { text: "Hello".to_owned() });
        (chats(&backends[0]) > 4).then_some(())
    })
    .await;
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.sum("iop_node_connections_total", &[]), 2.0, "a suspicion is no fence: {metrics:?}");
}

#[tokio::test]
async fn a_frozen_node_gives_up_its_requests_within_15_s() {
    // FEN-7, LEA-6, SEL-2, QUE-3; field reports 9, 72, T6
    freeze("", Duration::from_secs(15)).await;
}

#[tokio::test]
async fn a_frozen_node_gives_up_its_requests_within_8_s_where_config_says_so() {
    // FEN-7, CFG-1
    freeze("health: { suspicion_withdraw_ms: 3000 }", Duration::from_secs(8)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_four_requests_over_two_nodes_of_which_one_froze_are_done_in_bounded_time() {
    // FEN-7; field reports 9, T6: clients that try again once get all of their answers, and the frozen Node costs no more
    // than the wait for it
    const REQUESTS: usize = 24;
    let (backends, mut fleet) = two_nodes(16, "").await;
    let mut clients = JoinSet::new();
    for _ in 0..REQUESTS {
        let (edge, shot) = (fleet.openai(), Shot::new(Request::chat("late", true), "late"));
        clients.spawn(async move {
            let mut tally = Tally::default();
            for _ in 0..2 {
                let answer = Connection::open(edge).await.ask(&shot.request).await;
                tally.count(&shot, Some(&read(&answer)));
                if tally.whole == 1 {
                    break;
                }
            }
            tally
        });
    }
    for backend in &backends {
        soon("half of them run", backend.wait_for(|traffic| traffic.waiting == REQUESTS as u64 / 2)).await;
    }
    fleet.node(0).signal("STOP");
    let frozen = Instant::now();
    (0..REQUESTS).for_each(|_| backends[1].release());
    let mut tally = Tally::default();
    while let Some(one) = soon("all end", clients.join_next()).await {
        tally = tally.and(one.unwrap());
    }
    let wall = frozen.elapsed();
    assert!(wall < Duration::from_secs(16), "it took {wall:?}: {tally:?}");
    assert_eq!((tally.whole, tally.errors()), (24, 12), "{tally:?}");
    tally.assert_only(&["provider_unavailable"]);
    fleet.node(0).signal("CONT");
    fleet.at_rest().await;
}
