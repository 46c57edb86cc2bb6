//! Decides what an ended connection takes with it, and what it does not, in virtual time.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::time::Duration;

use iop_execution::testkit::{Script, ScriptHandle, ScriptedProvider};
use iop_tests::answer::{Outcome, read};
use iop_tests::pair::{Pair, PairPlan, PairProvider};
use iop_tests::wire_client::{Answer, Request};
use tokio::time::{Instant, sleep, timeout};

const MODELS: [&str; 2] = ["tunnel", "run"];

async fn pair(first: Script, later: Script) -> (Pair, [ScriptHandle; 2]) {
    let script = || ScriptedProvider::new(first.clone()).then(later.clone());
    let (tunnels, tunnel_calls) = script().with_tunnels().into_parts();
    let (runs, run_calls) = script().into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", tunnels, 1, &["tunnel"]),
        PairProvider::new("r", runs, 1, &["run"]).by_run(),
    ]);
    (Pair::start(plan).await, [tunnel_calls, run_calls])
}

fn code(answer: &Answer) -> String {
    match read(answer) {
        Outcome::Failed { code, .. } => code.unwrap_or_default(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_dies_in_mid_stream_ends_each_run_once_and_the_waiters_at_once() {
    // FEN-2, FEN-3, LEA-4, WIR-13, NOD-5; field reports 64, 72, 84
    let (pair, handles) = pair(Script::new().delta("some").hang(), Script::text("after")).await;
    let (mut running, mut waiting) = (Vec::new(), Vec::new());
    for model in MODELS {
        let mut exchange = pair.begin(&Request::chat(model, true)).await;
        let first = exchange.piece().await.unwrap();
        running.push((exchange, first));
        waiting.extend((0..3).map(|_| tokio::spawn(pair.ask(&Request::chat(model, true)))));
    }
    pair.until("all wait", |snapshot| snapshot.models.iter().all(|model| model.waiting == 3)).await;
    let cut = Instant::now();
    pair.cut(0);
    for (exchange, first) in running {
        let mut answer = exchange.rest().await;
        answer.pieces.insert(0, first);
        let Outcome::Failed { text, status: 200, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
        assert_eq!((text.as_str(), code.as_deref()), ("some", Some("provider_unavailable")));
        assert_eq!(answer.text().matches("\"error\"").count(), 1);
    }
    for waiter in waiting {
        let answer = waiter.await.unwrap();
        assert_eq!((answer.status(), code(&answer).as_str()), (503, "no_provider_available"));
    }
    assert!(cut.elapsed() < Duration::from_millis(10), "at once, not after the queue timeout: {:?}", cut.elapsed());
    pair.at_rest().await;
    assert_eq!(pair.provider("t").effective.capacity, 0, "FEN-6: known, and offline");
    for handle in &handles {
        timeout(Duration::from_secs(60), handle.wait_for(|counts| counts.active == 0)).await.unwrap();
        assert_eq!(handle.counts().calls, 1, "no waiter was dispatched");
    }

    pair.node_ready(0).await;
    assert_eq!(pair.connections(0), 2);
    for model in MODELS {
        assert_eq!(read(&pair.ask(&Request::chat(model, true)).await), Outcome::Whole { text: "after".to_owned() });
    }
    assert_eq!(pair.provider("t").effective.capacity, 1, "FEN-5: full capacity again");
    pair.at_rest().await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_with_another_candidate_is_dispatched_once_to_whoever_comes_first() {
    // FEN-5, QUE-3, FEN-2, SEL-1; field report 72
    let script = || ScriptedProvider::new(Script::new().delta("some").hang()).then(Script::text("waiter"));
    let (first, first_calls) = script().into_parts();
    let (second, second_calls) = script().with_tunnels().into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("a", first, 1, &["m"]),
        PairProvider::new("b", second, 1, &["m"]).on_node(1),
    ])
    .queue(8, Duration::from_secs(600));
    let mut pair = Pair::start(plan).await;
    let mut running = Vec::new();
    for _ in 0..2 {
        let mut exchange = pair.begin(&Request::chat("m", true)).await;
        exchange.piece().await.unwrap();
        running.push(exchange);
    }
    let waiter = tokio::spawn(pair.ask(&Request::chat("m", true)));
    pair.until("one waits", |snapshot| snapshot.models[0].waiting == 1).await;
    pair.kill_node(0).await;
    pair.node_gone(0).await;
    sleep(Duration::from_secs(100)).await;
    assert_eq!(pair.waiting(), 1, "the other Node may still serve it");
    pair.start_node(0);
    let answer = waiter.await.unwrap();
    assert_eq!(read(&answer), Outcome::Whole { text: "waiter".to_owned() });
    assert_eq!((first_calls.counts().calls, second_calls.counts().calls), (2, 1));
    drop(running);
    pair.at_rest().await;
}

#[tokio::test(start_paused = true)]
async fn what_an_old_connection_still_runs_is_over_before_the_next_one_is_used() {
    // NOD-5, FEN-4, NOD-4: the provider does not hear the cancel, so the Node drops it after the close grace
    let (pair, handles) = pair(Script::new().delta("old").ignore_cancel(), Script::text("new")).await;
    for (model, handle) in MODELS.into_iter().zip(&handles) {
        let mut exchange = pair.begin(&Request::chat(model, true)).await;
        exchange.piece().await.unwrap();
        pair.cut(0);
        let answer = exchange.rest().await;
        assert_eq!(code(&answer), "provider_unavailable");
        pair.node_ready(0).await;
        assert_eq!(handle.counts().active, 0, "{model}: its handler is gone");
        let answer = pair.ask(&Request::chat(model, true)).await;
        assert_eq!(read(&answer), Outcome::Whole { text: "new".to_owned() });
    }
    pair.at_rest().await;
    assert_eq!(pair.snapshot().late_releases, 0);
}

#[tokio::test(start_paused = true)]
async fn frames_of_a_run_that_ended_at_the_edge_are_dropped() {
    // WIR-11, LEA-4, LEA-6, EXE-6: the deadline ends it while the provider goes on talking
    let chatter = (0..200).fold(Script::new(), |script, _| script.delta("x").wait(Duration::from_millis(10)));
    let (pair, handles) = pair(chatter, Script::text("after")).await;
    for (model, handle) in MODELS.into_iter().zip(&handles) {
        let answer = pair.ask(&Request::chat(model, true).header("x-iop-deadline-ms", "505")).await;
        let Outcome::Failed { text, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
        assert!((1..=52).contains(&text.len()), "{}", text.len());
        assert_eq!(code(&answer), "deadline_exceeded");
        let answer = pair.ask(&Request::chat(model, true)).await;
        assert_eq!(read(&answer), Outcome::Whole { text: "after".to_owned() });
        assert_eq!(handle.counts().active, 0);
    }
    pair.at_rest().await;
    assert_eq!(pair.connections(0), 1, "and the connection goes on");
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_flaps_loses_no_place_and_answers_everybody_once() {
    // FEN-1, FEN-2, FEN-5, LEA-4, NOD-1; field reports 7, 73
    let script = Script::new().wait(Duration::from_millis(300)).delta("a").wait(Duration::from_millis(300)).delta("b");
    let (tunnels, tunnel_calls) = ScriptedProvider::new(script.clone()).with_tunnels().into_parts();
    let (runs, run_calls) = ScriptedProvider::new(script).into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", tunnels, 4, &["tunnel"]),
        PairProvider::new("r", runs, 4, &["run"]).by_run(),
    ]);
    let pair = Pair::start(plan).await;
    let (mut whole, mut failed) = (0, 0);
    for round in 0..50_u64 {
        let asked: Vec<_> =
            (0..12).map(|n| tokio::spawn(pair.ask(&Request::chat(MODELS[n % 2], n % 3 == 0)))).collect();
        sleep(Duration::from_millis(round * 37 % 900)).await;
        pair.cut(0);
        for answer in asked {
            let answer = timeout(Duration::from_secs(60), answer).await.expect("everybody has an answer").unwrap();
            match read(&answer) {
                Outcome::Whole { text } => {
                    assert_eq!(text, "ab");
                    whole += 1;
                }
                Outcome::Failed { .. } => failed += 1,
                other => panic!("round {round}: {other:?}"),
            }
        }
        pair.at_rest().await;
        pair.node_ready(0).await;
    }
    assert!(whole > 50 && failed > 50, "{whole} whole, {failed} failed");
    assert_eq!((tunnel_calls.counts().active, run_calls.counts().active), (0, 0));
    assert_eq!((pair.provider("t").effective.capacity, pair.provider("r").effective.capacity), (4, 4));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_asked_to_stop_finishes_what_runs_and_takes_nothing_new() {
    // NOD-8, WIR-13, NOD-1; field report 81
    let (provider, handle) = ScriptedProvider::new(Script::new().delta("a").pause().delta("b")).into_parts();
    let mut pair = Pair::start(PairPlan::new(vec![PairProvider::new("p", provider, 4, &["m"])])).await;
    let running = tokio::spawn(pair.ask(&Request::chat("m", true)));
    timeout(Duration::from_secs(60), handle.wait_for(|counts| counts.paused == 1)).await.unwrap();
    let release = handle.clone();
    let later = tokio::spawn(async move {
        sleep(Duration::from_secs(20)).await;
        release.release();
    });
    assert_eq!(pair.stop_node(0).await, Ok(iop_node_core::ServeEnd::Drained));
    later.await.unwrap();
    assert_eq!(read(&running.await.unwrap()), Outcome::Whole { text: "ab".to_owned() });
    let answer = pair.ask(&Request::chat("m", true)).await;
    assert_eq!((answer.status(), code(&answer).as_str()), (503, "no_provider_available"));
    pair.at_rest().await;
}
