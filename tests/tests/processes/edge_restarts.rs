//! Decides what a restart of the Edge costs: in good order nothing that was begun, and after a crash no more than that.

use std::time::{Duration, Instant};

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan, token_file};
use iop_tests::machine::eventually;
use iop_tests::storm::Storm;
use iop_tests::swarm::Swarm;
use iop_tests::wire_client::{Connection, Request};
use tokio::task::JoinSet;

use crate::{PROGRAMS, WORDS, brisk, brisk_shots, finish, quiet, says, soon};

/// How soon a Node ends its provider calls after its Edge is gone.
const CANCELLED: Duration = Duration::from_secs(2);

/// Two Nodes on a backend, over a relay, for the models of [`brisk_shots`], and for more models of other backends.
async fn relayed_pair(backend: &ScriptedBackend, more: &[(&str, &ScriptedBackend)]) -> Fleet {
    let url = backend.base_url();
    let mut providers = Vec::new();
    for node in 0..2 {
        for (model, backend) in more {
            let id = format!("{model}-{node}");
            providers.push(ProviderPlan::new(&id, &backend.base_url(), 16, &[model]).on_node(node));
        }
        providers.push(ProviderPlan::new(&format!("t{node}"), &url, 16, &["tunnel"]).on_node(node));
        providers.push(ProviderPlan::new(&format!("r{node}"), &url, 16, &["run"]).on_node(node).by_run());
    }
    let fleet = Fleet::start(PROGRAMS, Plan::new(providers).relayed()).await;
    fleet.all_ready(2).await;
    fleet
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edge_restarted_in_good_order_under_load_fails_nothing_that_it_had_accepted() {
    // BIN-5, WIR-13, NOD-1; field reports 65, 79, 81
    const HELD: usize = 8;
    let held = Answer::events().late_head().pause().write(says("held")).write(finish());
    let slow = ScriptedBackend::builder().model("held", held).start().await.unwrap();
    let backend = brisk().await;
    let mut fleet = relayed_pair(&backend, &[("held", &slow)]).await;
    let _quiet = quiet().await;
    for _ in 0..3 {
        let storm = Storm::start(fleet.openai(), 12, brisk_shots());
        soon("most of them run", backend.wait_for(|traffic| traffic.answering >= 8)).await;
        let mut held = JoinSet::new();
        for _ in 0..HELD {
            let mut client = fleet.client().await;
            held.spawn(async move { client.ask(&Request::chat("held", true)).await });
        }
        soon("they run", slow.wait_for(|traffic| traffic.waiting == HELD as u64)).await;
        fleet.edge().signal("TERM");
        fleet.edge().find("word of its end", |line| line.contains("shutting down").then_some(())).await;
        (0..HELD).for_each(|_| slow.release());
        while let Some(answer) = soon("they end", held.join_next()).await {
            assert_eq!(read(&answer.unwrap()), Outcome::Whole { text: "held".to_owned() });
        }
        assert_eq!(fleet.edge().exit_code().await, 0);
        fleet.start_edge().await;
        storm.aim(fleet.openai());
        fleet.all_ready(2).await;
        let tally = storm.end().await;
        // Those that came during the end were told so, in words or by a closed port. None that ran was cut, and none failed
        // in another way.
        assert_eq!(tally.broken, 0, "{tally:?}");
        let told = |code: &String| ["shutting_down", "no_provider_available"].contains(&code.as_str());
        assert!(tally.failed.keys().all(told), "{tally:?}");
        assert!(tally.whole >= 12, "{tally:?}");
        fleet.at_rest().await;
        soon("no call is left", backend.wait_for(|traffic| traffic.answering == 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edge_killed_under_load_frees_the_providers_and_finds_its_nodes_again() {
    // NOD-1, NOD-5, WIR-13, API-6; field reports 51, 79
    let late = Answer::events().late_head().hang();
    let json = Answer::new(200).header("content-type", "application/json").write("{\"id\":").hang();
    let begun = Answer::events().write(says("begun")).hang().without_stream(json);
    let backend = ScriptedBackend::builder().model("begun", begun).model("late", late).start().await.unwrap();
    let steady = brisk().await;
    let mut fleet = relayed_pair(&steady, &[("begun", &backend), ("late", &backend)]).await;
    let _quiet = quiet().await;
    for round in 1..=3_u64 {
        let mut hanging = JoinSet::new();
        for number in 0..8 {
            let mut client = fleet.client().await;
            let request = Request::chat(if number % 2 == 0 { "begun" } else { "late" }, number % 4 < 2);
            hanging.spawn(async move { client.try_ask(&request).await });
        }
        soon("they run", backend.wait_for(|traffic| traffic.waiting == 8)).await;
        let storm = Storm::start(fleet.openai(), 8, brisk_shots());
        soon("the others run, too", steady.wait_for(|traffic| traffic.answering >= 4)).await;
        fleet.kill_edge().await;
        let killed = Instant::now();
        let calls_end = async {
            backend.wait_for(|traffic| traffic.answering == 0).await;
            steady.wait_for(|traffic| traffic.answering == 0).await;
        };
        soon("the Nodes end their calls", calls_end).await;
        assert!(killed.elapsed() < CANCELLED, "it took {:?}", killed.elapsed());
        assert_eq!(backend.traffic().client_closed, 8 * round);
        while let Some(answer) = hanging.join_next().await {
            match answer.unwrap().as_ref().map(read) {
                None | Some(Outcome::Broken { .. }) => {}
                other => panic!("never a clean end: {other:?}"),
            }
        }
        fleet.start_edge().await;
        storm.aim(fleet.openai());
        fleet.all_ready(2).await;
        let tally = storm.end().await;
        assert!(tally.failed.keys().all(|code| code == "no_provider_available"), "{tally:?}");
        assert!(
            tally.broken + tally.unanswered + tally.refused > 0,
            "a kill that hits nothing proves nothing: {tally:?}"
        );
        fleet.at_rest().await;
        let answer = fleet.ask(&Request::chat("tunnel", true)).await;
        assert_eq!(read(&answer), Outcome::Whole { text: WORDS.concat() });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_nodes_come_back_soon_and_not_in_step() {
    // NOD-1, WIR-13; field report 77
    const NODES: usize = 50;
    /// Most that may come within [`STEP`].
    const IN_STEP: usize = NODES / 2;
    const STEP: Duration = Duration::from_millis(100);
    let backend = brisk().await;
    let providers = (0..NODES)
        .map(|node| ProviderPlan::new(&format!("p{node}"), &backend.base_url(), 1, &["tunnel"]).on_node(node));
    let mut fleet = Fleet::prepare(PROGRAMS, Plan::new(providers.collect()).relayed()).await;
    fleet.start_edge().await;
    let folder = fleet.folder().path();
    let tokens = (0..NODES).map(|node| std::fs::read_to_string(folder.join(token_file(node))).unwrap()).collect();
    let swarm = Swarm::start(fleet.nodes_addr(), Some(&folder.join("ca.pem")), tokens);
    fleet.all_ready(NODES).await;
    let _quiet = quiet().await;
    for orderly in [false, true] {
        let before = fleet.relay().arrivals().len();
        if orderly {
            fleet.edge().signal("TERM");
            assert_eq!(fleet.edge().exit_code().await, 0);
        } else {
            fleet.kill_edge().await;
        }
        fleet.relay().lead_to(None);
        fleet.start_edge().await;
        let started = Instant::now();
        fleet.all_ready(NODES).await;
        assert!(started.elapsed() < Duration::from_secs(60), "it took {:?}", started.elapsed());
        let arrivals = fleet.relay().arrivals().split_off(before);
        assert!(arrivals.len() >= NODES);
        let in_step = |at: Instant| arrivals.iter().filter(|other| at <= **other && **other < at + STEP).count();
        let crowd = arrivals.iter().map(|at| in_step(*at)).max().unwrap();
        assert!(crowd <= IN_STEP, "{crowd} of {NODES} came within {STEP:?} (orderly: {orderly})");
        let answer = Connection::open(fleet.openai()).await.ask(&Request::chat("tunnel", false)).await;
        assert_eq!(read(&answer), Outcome::Whole { text: WORDS.concat() });
    }
    eventually("nothing is left", || async { fleet.metrics().await.is_at_rest().then_some(()) }).await;
    drop(swarm);
}
