use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{AdapterKey, FailureCode, Redacted, SessionId};
use iop_wire::*;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn every_command_is_answered_unsupported_and_the_session_lives() {
    // CMD-1, W14, EXE-3
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    let adapter = AdapterKey::new("a").unwrap();
    let session_id = Some(SessionId::new("s").unwrap());
    for (at, command) in [
        NodeCommand::TransportStatus,
        NodeCommand::Capabilities { adapter: adapter.clone(), target: None },
        NodeCommand::OllamaApi {
            adapter,
            method: http::Method::DELETE,
            path: "/api/delete".into(),
            body: Redacted::default(),
        },
    ]
    .into_iter()
    .enumerate()
    {
        let command_id = at as u64;
        conn.send(ToNode::Command(CommandRequest {
            command_id,
            session_id: session_id.clone(),
            deadline_ms: 1,
            command,
        }));
        let ToEdge::CommandResponse(response) = conn.next().await else { panic!() };
        assert_eq!((response.command_id, &response.session_id), (command_id, &session_id));
        assert_eq!(response.outcome.unwrap_err().code, FailureCode::Unsupported);
    }
    assert_eq!(calls.counts().calls, 0);
    conn.run(1).await;
    assert_eq!(conn.rest(1).await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_commands_that_nobody_reads_the_answers_of_ends_the_connection() {
    // WIR-9, WIR-13
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    for command_id in 0..2000 {
        let command = NodeCommand::TransportStatus;
        conn.send(ToNode::Command(CommandRequest { command_id, session_id: None, deadline_ms: 1, command }));
    }
    settle().await;
    // The Edge has read nothing meanwhile: the Node's control queue is full and takes no Goodbye either.
    while conn.try_next().await.is_some() {}
    drop(conn);
    node.accept().await;
    assert!(node.record.lines().contains(&"closed control_overflow".to_owned()), "{:?}", node.record.lines());
}
