//! Decides what is left of crowds: of clients that leave at any moment, and of more requests than anybody can serve.

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan};
use iop_tests::machine::{eventually, open_files, resident_bytes};
use iop_tests::wire_client::{Connection, Request};
use tokio::task::JoinSet;

use crate::{PROGRAMS, finish, provider, quiet, says, soon, whole_body};

/// Numbers without a pattern, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(target_os = "linux"), ignore = "it reads /proc")]
async fn a_thousand_clients_that_leave_at_random_leave_nothing_behind() {
    // LEA-4, LEA-6, LEA-7, EDG-3, ADP-4; field reports 35, 37, 38, 40
    const CLIENTS: u64 = 1_000;
    const AT_ONCE: usize = 40;
    const PLACES: u32 = 24;
    let beat = std::time::Duration::from_millis(2);
    let words = (0..8).fold(Answer::events(), |answer, _| answer.wait(beat).write(says("x"))).write(finish());
    let json = Answer::new(200).header("content-type", "application/json").wait(beat * 8).write(whole_body("x"));
    // Far more than the windows on its way: who does not read stops its provider.
    let part = says(&"y".repeat(16 * 1024));
    let flood = (0..256).fold(Answer::events(), |answer, _| answer.write(part.clone())).write(finish());
    let backend = ScriptedBackend::builder().model("words", words.without_stream(json)).model("flood", flood);
    let backend =
        backend.model("held", Answer::events().write(says("x")).pause().write(finish())).start().await.unwrap();
    let plan = Plan::new(vec![provider(&backend, PLACES, &["words", "flood", "held"])]);
    let mut fleet = Fleet::start(PROGRAMS, plan).await;
    let _quiet = quiet().await;
    let (edge, pid) = (fleet.openai(), fleet.edge().pid());
    let files = open_files(pid);
    let mut numbers = Numbers(1);
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        if clients.len() == AT_ONCE {
            clients.join_next().await.unwrap().unwrap();
        }
        let (model, stream) = [("words", true), ("words", false), ("flood", true)][numbers.below(3) as usize];
        let (stage, reads) = (numbers.below(4), numbers.below(8));
        clients.spawn(async move {
            let mut client = Connection::open_small(edge, 16 * 1024).await;
            client.send(&Request::chat(model, stream)).await;
            match stage {
                0 => {}
                1 => drop(client.head().await),
                _ => {
                    client.head().await;
                    for _ in 0..reads {
                        if soon("more, or the end", client.piece()).await.is_err() {
                            break;
                        }
                    }
                }
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    fleet.at_rest().await;
    soon("no call is left", backend.wait_for(|traffic| traffic.answering == 0)).await;
    assert!(backend.traffic().client_closed > 100, "they left in the middle: {:?}", backend.traffic());
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.sum("iop_leases_quarantined_total", &[]), 0.0, "{metrics:?}");
    eventually("their sockets are closed", || async { (open_files(pid) <= files + 4).then_some(()) }).await;
    // Every place is there.
    let mut clients = JoinSet::new();
    for _ in 0..PLACES {
        clients.spawn(async move { Connection::open(edge).await.ask(&Request::chat("held", true)).await });
    }
    soon("all places at once", backend.wait_for(|traffic| traffic.waiting == u64::from(PLACES))).await;
    (0..PLACES).for_each(|_| backend.release());
    while let Some(answer) = clients.join_next().await {
        assert_eq!(read(&answer.unwrap()), Outcome::Whole { text: "x".to_owned() });
    }
    fleet.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(target_os = "linux"), ignore = "it reads /proc")]
async fn of_two_thousand_at_once_those_beyond_the_queue_are_refused_and_the_others_served() {
    // QUE-1, QUE-2, LEA-5, API-5; field reports 46, 47, T8, T12
    const CROWD: usize = 2_000;
    const PLACES: usize = 8;
    const QUEUE: usize = 64;
    let held = Answer::events().pause().write(says("x")).write(finish());
    let backend = ScriptedBackend::builder().model("held", held).start().await.unwrap();
    let plan = Plan::new(vec![provider(&backend, PLACES as u32, &["held"])])
        .with(&format!("queue: {{ max_waiting: {QUEUE} }}"))
        .with("limits: { connections_per_address: 4096 }");
    let mut fleet = Fleet::start(PROGRAMS, plan).await;
    let _quiet = quiet().await;
    let (edge, pid) = (fleet.openai(), fleet.edge().pid());
    let memory = resident_bytes(pid);
    let mut clients = JoinSet::new();
    for _ in 0..CROWD {
        clients.spawn(async move { Connection::open(edge).await.ask(&Request::chat("held", true)).await });
    }
    for _ in 0..CROWD - PLACES - QUEUE {
        let answer = soon("a refusal", clients.join_next()).await.unwrap().unwrap();
        let Outcome::Failed { status: 429, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
        assert_eq!(code.as_deref(), Some("queue_full"));
        let wait: u64 = answer.head.header("retry-after").expect("API-5").parse().unwrap();
        assert!((1..=60).contains(&wait), "{wait}");
    }
    assert_eq!(fleet.metrics().await.sum("iop_requests_waiting", &[]), QUEUE as f64);
    assert_eq!(backend.traffic().waiting, PLACES as u64);
    let grown = resident_bytes(pid).saturating_sub(memory);
    assert!(grown < 96 << 20, "the Edge grew by {grown} bytes");
    (0..PLACES + QUEUE).for_each(|_| backend.release());
    while let Some(answer) = soon("the others are served", clients.join_next()).await {
        assert_eq!(read(&answer.unwrap()), Outcome::Whole { text: "x".to_owned() });
    }
    assert_eq!(backend.traffic().max_answering, PLACES as u64);
    fleet.at_rest().await;
}
