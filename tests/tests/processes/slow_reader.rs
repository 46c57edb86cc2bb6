//! Decides whether a client that stops reading costs only itself, and how much memory it may hold.

use std::net::SocketAddr;
use std::time::Duration;

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::machine::{eventually, resident_bytes};
use iop_tests::wire_client::{Connection, Request, ask};
use tokio::task::JoinSet;

use crate::{finish, fleet, provider, quiet, says};

/// The stopped client's answer: far more than anything on its way may hold.
const ENDLESS: usize = 100 << 20;
/// What a stopped reader may take out of the provider: windows, queues and the socket buffers of three hops.
const HELD: u64 = 16 << 20;
/// What it may cost the Edge.
const COST: u64 = 8 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(target_os = "linux"), ignore = "it reads /proc")]
async fn one_stopped_reader_among_32_streams_holds_its_window_and_disturbs_nobody() {
    // WIR-7, WIR-16; field reports 40, 43, 44
    let part = says(&"x".repeat(16 * 1024));
    let endless = (0..ENDLESS / part.len()).fold(Answer::events(), |answer, _| answer.write(part.clone()));
    let lively = (0..64).fold(Answer::events(), |answer, _| answer.write(part.clone())).write(finish());
    let backend = ScriptedBackend::builder().model("endless", endless).model("lively", lively).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 64, &["endless", "lively"])).await;
    let _quiet = quiet().await;
    // What a first round of 31 readers costs is not what the stopped one costs.
    everyone(fleet.openai()).await;
    let pid = fleet.edge().pid();
    let (memory, written) = (resident_bytes(pid), backend.traffic().written);

    let mut stopped = Connection::open_small(fleet.openai(), 16 * 1024).await;
    stopped.send(&Request::chat("endless", true)).await;
    stopped.head().await;
    let mut last = 0;
    eventually("the provider is held back", || {
        let now = backend.traffic().written;
        let still = now == last && now > written;
        last = now;
        async move {
            tokio::time::sleep(Duration::from_millis(200)).await;
            still.then_some(())
        }
    })
    .await;
    let held = backend.traffic().written - written;
    assert!(held < HELD, "a stopped reader took {held} bytes from the provider");

    everyone(fleet.openai()).await;
    let grown = resident_bytes(pid).saturating_sub(memory);
    assert!(grown < COST, "the Edge grew by {grown} bytes");
    drop(stopped);
    crate::soon("its call ends", backend.wait_for(|traffic| traffic.client_closed == 1)).await;
    fleet.at_rest().await;
}

/// 31 clients that read 1 MiB each, all at once.
async fn everyone(edge: SocketAddr) {
    let mut clients = JoinSet::new();
    for _ in 0..31 {
        clients.spawn(async move { ask(edge, &Request::chat("lively", true)).await });
    }
    while let Some(answer) = clients.join_next().await {
        match read(&answer.unwrap()) {
            Outcome::Whole { text } => assert_eq!(text.len(), 64 * 16 * 1024),
            other => panic!("{other:?}"),
        }
    }
}
