//! Decides whether Nodes may die and come back all the time while clients ask: one outcome each, and nothing is left.

use iop_execution::testkit::ScriptedBackend;
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::machine::{eventually, open_files};
use iop_tests::storm::Storm;

use crate::{PROGRAMS, brisk, brisk_shots, quiet, soon};

/// How often the Node is killed, unless `IOP_TEST_KILLS` says otherwise.
const KILLS: usize = 50;
/// Clients that ask all the time.
const CLIENTS: usize = 12;
/// What a client may be told when a Node died under its request, or none was there.
const DIED: &[&str] = &["provider_unavailable", "no_provider_available"];

/// Two Nodes with a backend each, both for the models of [`brisk_shots`].
async fn pair_of_nodes() -> ([ScriptedBackend; 2], Fleet) {
    let backends = [brisk().await, brisk().await];
    let mut providers = Vec::new();
    for (node, backend) in backends.iter().enumerate() {
        let url = backend.base_url();
        providers.push(ProviderPlan::new(&format!("t{node}"), &url, 16, &["tunnel"]).on_node(node));
        providers.push(ProviderPlan::new(&format!("r{node}"), &url, 16, &["run"]).on_node(node).by_run());
    }
    let fleet = Fleet::start(PROGRAMS, Plan::new(providers)).await;
    fleet.all_ready(2).await;
    (backends, fleet)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_again_and_again_under_load_costs_each_request_one_outcome_and_no_place() {
    // FEN-2, FEN-4, FEN-5, LEA-4, NOD-1, REC-6, API-6; field reports 7, 37, 39, 51, 75
    let kills = std::env::var("IOP_TEST_KILLS").map_or(KILLS, |kills| kills.parse().expect("a number"));
    let _quiet = quiet().await;
    let (backends, mut fleet) = pair_of_nodes().await;
    let storm = Storm::start(fleet.openai(), CLIENTS, brisk_shots());
    for kill in 1..=kills {
        soon("the Node works", backends[0].wait_for(|traffic| traffic.answering > 0)).await;
        fleet.kill_node(0).await;
        fleet.start_node(0);
        fleet.node_ready(0, 2 + kill).await;
    }
    let tally = storm.end().await;
    tally.assert_only(DIED);
    assert!(tally.errors() >= kills as u64 / 2, "kills that hit nothing prove nothing: {tally:?}");
    assert!(tally.whole >= kills as u64, "the other Node serves: {tally:?}");
    fleet.at_rest().await;
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.sum("iop_requests_total", &[]), tally.total() as f64, "the Edge counts what clients saw");
    assert_eq!(metrics.sum("iop_requests_total", &["outcome=\"completed\""]), tally.whole as f64, "{metrics:?}");
    assert_eq!(metrics.sum("iop_node_connections_total", &[]), (2 + kills) as f64, "one connection for each life");
    assert_eq!(metrics.sum("iop_violations_total", &[]), 0.0);
    for backend in &backends {
        soon("no call is left", backend.wait_for(|traffic| traffic.answering == 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(target_os = "linux"), ignore = "it reads /proc")]
async fn nodes_that_join_and_leave_150_times_leave_no_socket_behind() {
    // NOD-1, BIN-5, FEN-2, FEN-6; field reports 73, 75, 78: every second one leaves in good order, the others die
    const CYCLES: usize = 150;
    const REQUESTS: usize = 1_500;
    let _quiet = quiet().await;
    let (_backends, mut fleet) = pair_of_nodes().await;
    let storm = Storm::paced(fleet.openai(), CLIENTS, brisk_shots());
    let (mut files, mut left_well) = (0, 0.0);
    for cycle in 1..=CYCLES {
        storm.allow(REQUESTS / CYCLES);
        if cycle % 2 == 0 {
            fleet.kill_node(0).await;
        } else {
            fleet.node(0).signal("TERM");
            assert_eq!(fleet.node(0).exit_code().await, 0, "it finishes what runs");
            left_well += 1.0;
        }
        fleet.start_node(0);
        fleet.node_ready(0, 2 + cycle).await;
        if cycle == 10 {
            files = open_files(fleet.edge().pid());
        }
    }
    let tally = storm.end().await;
    assert_eq!(tally.total(), REQUESTS as u64, "{tally:?}");
    tally.assert_only(DIED);
    fleet.at_rest().await;
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.sum("iop_requests_total", &[]), REQUESTS as f64);
    assert_eq!(metrics.sum("iop_node_connections_closed_total", &["kind=\"drained\""]), left_well, "{metrics:?}");
    let pid = fleet.edge().pid();
    eventually("no more files are open than at the beginning", || async {
        (open_files(pid) <= files + 4).then_some(())
    })
    .await;
}
