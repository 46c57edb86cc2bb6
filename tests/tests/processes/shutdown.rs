//! Decides how processes end: drained by SIGTERM, and with the exit code that says why.

use std::time::Duration;

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Fleet, Plan};
use iop_tests::machine::Folder;
use iop_tests::process::Process;
use iop_tests::wire_client::{Answer as Got, Connection, Request};

use crate::{PROGRAMS, finish, fleet, hello, provider, says, soon};

fn held() -> Answer {
    Answer::events().write(says("one ")).pause().write(says("two")).write(finish())
}

/// A stream of [`held`] of which the first event was read.
async fn begin(fleet: &Fleet) -> (Connection, Got) {
    let mut client = fleet.client().await;
    client.send(&Request::chat("held", true)).await;
    let head = client.head().await;
    let pieces = client.read_until("one").await;
    (client, Got { head, pieces, end: iop_tests::wire_client::End::Broken })
}

async fn complete(mut client: Connection, begun: Got) -> Outcome {
    let mut answer = client.rest(begun.head).await;
    answer.pieces = begun.pieces.into_iter().chain(answer.pieces).collect();
    read(&answer)
}

#[tokio::test]
async fn sigterm_lets_an_edge_finish_what_runs_and_end_with_0() {
    // BIN-5, WIR-13; field reports 79, 81
    let backend = ScriptedBackend::builder().model("held", held()).model("m", hello()).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["held", "m"])).await;
    let (client, begun) = begin(&fleet).await;
    let mut kept = fleet.client().await;
    assert_eq!(read(&kept.ask(&Request::chat("m", false)).await), Outcome::Whole { text: "Hello".to_owned() });
    fleet.edge().signal("TERM");
    fleet.edge().find("word of its end", |line| line.contains("shutting down").then_some(())).await;
    // A kept connection is closed or its next request refused; nothing new is begun.
    kept.send(&Request::chat("m", false)).await;
    if let Some(head) = soon("an end of it", kept.try_head()).await {
        let answer = kept.rest(head).await;
        let Outcome::Failed { status: 503, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
        assert_eq!(code.as_deref(), Some("shutting_down"));
    }
    backend.release();
    assert_eq!(complete(client, begun).await, Outcome::Whole { text: "one two".to_owned() });
    assert_eq!(fleet.edge().exit_code().await, 0);
}

#[tokio::test]
async fn sigterm_lets_a_node_finish_what_runs_and_end_with_0() {
    // BIN-5, NOD-1; field report 81
    let backend = ScriptedBackend::builder().model("held", held()).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["held"])).await;
    let (client, begun) = begin(&fleet).await;
    fleet.node(0).signal("TERM");
    fleet.node(0).find("word of its end", |line| line.contains("shutting down").then_some(())).await;
    backend.release();
    assert_eq!(complete(client, begun).await, Outcome::Whole { text: "one two".to_owned() });
    assert_eq!(fleet.node(0).exit_code().await, 0);
    fleet.at_rest().await;
}

#[tokio::test]
async fn a_second_sigterm_ends_an_edge_now_and_never_with_a_clean_end_of_a_stream() {
    // BIN-5, API-6
    let backend = ScriptedBackend::builder().model("held", held()).start().await.unwrap();
    let mut fleet = fleet(provider(&backend, 4, &["held"])).await;
    let (client, begun) = begin(&fleet).await;
    fleet.edge().signal("TERM");
    fleet.edge().find("word of its end", |line| line.contains("shutting down").then_some(())).await;
    fleet.edge().signal("TERM");
    match complete(client, begun).await {
        Outcome::Failed { text, .. } | Outcome::Broken { text } => assert_eq!(text, "one "),
        other => panic!("{other:?}"),
    }
    fleet.edge().exit_code().await;
    soon("the provider call ends", backend.wait_for(|traffic| traffic.client_closed == 1)).await;
}

#[tokio::test]
async fn a_wrong_config_ends_with_2_and_says_where_it_is_wrong() {
    // BIN-4, BIN-5, CFG-1
    let folder = Folder::new();
    folder.write("edge.yaml", "listen: { openai: 127.0.0.1:0 }\nnods: []\n");
    for command in ["serve", "check"] {
        let mut edge = Process::start(PROGRAMS.edge, &[command, "--config", "edge.yaml"], folder.path(), &[]);
        edge.find("line 2 and a suggestion", |line| line.contains("edge.yaml:2").then_some(())).await;
        edge.find("the nearest name", |line| line.contains("nodes").then_some(())).await;
        assert_eq!(edge.exit_code().await, 2, "{command}");
    }
    let mut node = Process::start(PROGRAMS.node, &["serve"], folder.path(), &[]);
    assert_eq!(node.exit_code().await, 2, "a Node without address and token");
    let mut edge = Process::start(PROGRAMS.edge, &["sevre"], folder.path(), &[]);
    assert_eq!(edge.exit_code().await, 2, "no such command");
}

#[tokio::test]
async fn a_token_nobody_knows_ends_a_node_with_1_and_an_edge_nobody_reaches_with_3() {
    // BIN-5, NOD-1, REG-4, REG-6
    let backend = ScriptedBackend::builder().model("m", hello()).start().await.unwrap();
    let mut fleet = Fleet::prepare(PROGRAMS, Plan::new(vec![provider(&backend, 1, &["m"])]).relayed()).await;
    let mut node = fleet.node_process("node-0.token", 1, 1);
    assert_eq!(node.exit_code().await, 3, "nobody listens");
    fleet.start_edge().await;
    let stranger = iop_edge_core::token::Token::generate(iop_edge_core::token::TokenKind::Node).unwrap();
    fleet.folder().write("stranger.token", &stranger.reveal());
    let mut node = fleet.node_process("stranger.token", 0, 1);
    let code = tokio::time::timeout(Duration::from_secs(10), node.exit_code()).await.expect("at once");
    assert_eq!(code, 1, "trying again can't help");
    let secret = stranger.reveal();
    assert!(!node.lines().iter().any(|line| line.contains(&secret)), "a token is in no log");
    node = fleet.node_process("node-0.token", 0, 1);
    fleet.ready().await;
    drop(node);
}
