use std::time::Duration;

use iop_execution::provider::TargetInfo;
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{
    AdapterKey, Capabilities, CommandOutput, Completion, EventSink, FailureCode, FinishReason, Health, Provider,
    ProviderCommand, ProviderError, Redacted, RunRequest, SessionId, Target,
};
use iop_wire::*;
use tokio::time::Instant;

use crate::stalls::fixtures::*;
use crate::support::*;

fn code(response: &CommandResponse) -> FailureCode {
    match &response.outcome {
        Err(failure) => failure.code,
        Ok(result) => panic!("a failure expected, not {result:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn capabilities_are_the_adapters_own_and_touch_no_backend() {
    // CMD-2, EXE-2, EXE-3
    let (mut node, calls) = scripted(Script::text("x"), Answer::Panic);
    let mut conn = node.ready_with(ProviderConfig { wire: WireMode::Run, ..config() }).await;
    conn.send(capabilities(7, "a", None, 0));
    let response = conn.response().await;
    assert_eq!((response.command_id, response.session_id), (7, Some(SessionId::new("s").unwrap())));
    let Ok(CommandResult::Capabilities(result)) = response.outcome else { panic!() };
    assert_eq!((result.adapter.as_str(), result.health), ("a", None));
    assert!(result.capabilities.runs && !result.capabilities.tunnels, "the config forces runs");
    assert_eq!((calls.counts().calls, calls.counts().probes), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn with_a_target_exactly_that_target_is_probed_beside_everything_else() {
    // CMD-2, WDG-3, WDG-5: no place is taken, and the session goes on meanwhile
    let (mut node, calls) = scripted_then(
        Script::new().pause(),
        Script::text("x"),
        Answer::After(Duration::from_secs(2), Health::Available),
    );
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    conn.run(1).await;
    let began = Instant::now();
    conn.send(capabilities(1, "a", Some("t"), 0));
    settle().await;
    conn.send(ToNode::Command(CommandRequest {
        command_id: 2,
        session_id: None,
        deadline_ms: 0,
        command: NodeCommand::TransportStatus,
    }));
    let status = conn.response().await;
    assert_eq!((status.command_id, status.outcome), (2, Ok(CommandResult::TransportStatus { active_runs: 1 })));
    let response = conn.response().await;
    assert_eq!(began.elapsed(), Duration::from_secs(2));
    let health = observed(&response);
    assert_eq!((health.target.as_str(), health.status), ("t", Health::Available));
    assert_eq!(health.health_observation_seq.get(), 1);
    calls.release();
}

#[tokio::test(start_paused = true)]
async fn an_unknown_adapter_or_target_and_a_deadline_that_passes_use_no_number() {
    // CMD-2, WDG-6, S04
    let inner = ScriptedProvider::new(Script::text("x"))
        .with_capabilities(Capabilities::runs_only().with_targets(vec![TargetInfo::new(Target::new("t").unwrap())]));
    let (mut node, ()) = with_provider(inner, Answer::After(Duration::from_secs(2), Health::Unavailable));
    let mut conn = node.ready().await;
    for (id, adapter, target, deadline, want) in [
        (1, "nobody", Some("t"), 0, FailureCode::UnknownAdapter),
        (2, "nobody", None, 0, FailureCode::UnknownAdapter),
        (3, "a", Some("other"), 0, FailureCode::UnknownTarget),
        (4, "a", Some("t"), 1_999, FailureCode::DeadlineExceeded),
    ] {
        let began = Instant::now();
        conn.send(capabilities(id, adapter, target, deadline));
        let response = conn.response().await;
        assert_eq!((response.command_id, code(&response)), (id, want));
        assert_eq!(began.elapsed(), Duration::from_millis(deadline));
    }
    conn.send(capabilities(5, "a", Some("t"), 2_500));
    let response = conn.response().await;
    assert_eq!(
        (observed(&response).status, observed(&response).health_observation_seq.get()),
        (Health::Unavailable, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn a_probe_for_a_command_is_bounded_and_a_hung_one_is_unknown() {
    // CMD-2, WDG-5
    let (mut node, _) = scripted(Script::text("x"), Answer::Hang);
    let mut conn = node.ready().await;
    let began = Instant::now();
    conn.send(capabilities(1, "a", Some("t"), 0));
    let response = conn.response().await;
    assert_eq!((observed(&response).status, began.elapsed()), (Health::Unknown, Duration::from_secs(5)));
}

#[tokio::test(start_paused = true)]
async fn so_many_probes_at_once_and_no_more() {
    // CMD-1, WIR-9
    let (mut node, calls) = scripted(Script::text("x"), Answer::Hang);
    let mut conn = node.ready().await;
    for id in 0..20 {
        conn.send(capabilities(id, "a", Some("t"), 0));
    }
    for _ in 0..4 {
        let response = conn.response().await;
        assert_eq!(code(&response), FailureCode::Busy);
    }
    assert_eq!(calls.counts().probes, 16);
    for _ in 0..16 {
        assert_eq!(observed(&conn.response().await).status, Health::Unknown);
    }
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_ends_the_probes_of_commands() {
    // WDG-6, NOD-5
    let (mut node, _) = scripted(Script::text("x"), Answer::Hang);
    let mut conn = node.ready_with(ProviderConfig { probe_timeout_ms: 60_000, ..config() }).await;
    conn.send(capabilities(1, "a", Some("t"), 0));
    settle().await;
    let began = Instant::now();
    drop(conn);
    let mut conn = node.ready_with(ProviderConfig { probe_timeout_ms: 60_000, ..config() }).await;
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(conn.is_silent(Duration::from_secs(100)).await);
}

fn ollama_api(command_id: u64, adapter: &str, path: &str, deadline_ms: u64) -> ToNode {
    ToNode::Command(CommandRequest {
        command_id,
        session_id: Some(SessionId::new("s").unwrap()),
        deadline_ms,
        command: NodeCommand::OllamaApi {
            adapter: AdapterKey::new(adapter).unwrap(),
            method: http::Method::POST,
            path: path.into(),
            body: Redacted::new("{}".into()),
        },
    })
}

#[tokio::test(start_paused = true)]
async fn a_call_of_ollamas_own_api_is_unsupported_by_other_adapters_and_the_session_lives() {
    // CMD-1, W14
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    conn.send(ollama_api(3, "a", "/api/show", 1));
    let response = conn.response().await;
    assert_eq!((response.command_id, code(&response)), (3, FailureCode::Unsupported));
    assert_eq!(calls.counts().calls, 0);
    conn.run(1).await;
    assert_eq!(conn.rest(1).await.len(), 3);
}

/// A provider whose commands do what their path says.
#[derive(Debug)]
struct Commanded;

#[iop_execution::async_trait]
impl Provider for Commanded {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::runs_only();
        capabilities.commands = true;
        capabilities
    }

    async fn execute(&self, _: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        sink.cancelled().await;
        Ok(Completion::new(FinishReason::Stop))
    }

    async fn command(&self, command: ProviderCommand) -> Result<CommandOutput, ProviderError> {
        let ProviderCommand::OllamaApi { method, path, body } = command else { panic!() };
        assert_eq!((method, body.expose().as_ref()), (http::Method::POST, &b"{}"[..]));
        let answer = |len: usize| CommandOutput::Http {
            status: http::StatusCode::IM_A_TEAPOT,
            body: Redacted::new(vec![b'a'; len].into()),
        };
        match path.as_str() {
            "/small" => Ok(answer(32 * 1024)),
            "/large" => Ok(answer(32 * 1024 + 1)),
            "/refused" => Err(ProviderError::unsupported("not on the list")),
            "/panics" => panic!("in a command"),
            _ => std::future::pending().await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_for_the_backend_runs_beside_everything_else_and_its_answer_is_bounded() {
    // CMD-1, WIR-9
    let mut node = Harness::new(std::sync::Arc::new(Commanded));
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, wire: WireMode::Run, ..config() }).await;
    conn.run(1).await;
    // The only place is taken: a command takes none.
    conn.send(ollama_api(1, "a", "/small", 0));
    let response = conn.response().await;
    assert_eq!((response.command_id, response.session_id.clone()), (1, Some(SessionId::new("s").unwrap())));
    let Ok(CommandResult::OllamaApi { status, body }) = response.outcome else { panic!() };
    assert_eq!((status.as_u16(), body.expose().len()), (418, 32 * 1024));
    for (id, adapter, path, want) in [
        (2, "a", "/large", FailureCode::Internal),
        (3, "a", "/refused", FailureCode::Unsupported),
        (4, "a", "/panics", FailureCode::Internal),
        (5, "nobody", "/small", FailureCode::UnknownAdapter),
    ] {
        conn.send(ollama_api(id, adapter, path, 0));
        let response = conn.response().await;
        assert_eq!((response.command_id, code(&response)), (id, want), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_that_a_backend_does_not_answer_ends_at_its_deadline_and_so_many_run_at_once() {
    // CMD-1
    let mut node = Harness::new(std::sync::Arc::new(Commanded));
    let mut conn = node.ready_with(ProviderConfig { wire: WireMode::Run, ..config() }).await;
    let began = Instant::now();
    for id in 0..17 {
        conn.send(ollama_api(id, "a", "/hangs", if id == 0 { 0 } else { 2_000 }));
    }
    assert_eq!(code(&conn.response().await), FailureCode::Busy);
    for _ in 0..15 {
        assert_eq!(code(&conn.response().await), FailureCode::DeadlineExceeded);
    }
    assert_eq!(began.elapsed(), Duration::from_secs(2));
    let last = conn.response().await;
    assert_eq!((last.command_id, code(&last)), (0, FailureCode::DeadlineExceeded));
    assert_eq!(began.elapsed(), Duration::from_secs(60), "without a deadline it is bounded all the same");
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
