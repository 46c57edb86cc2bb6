mod answers;
mod commands;
mod discovery;
mod probe;
mod request;

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use iop_execution::event::{CancelReason, RunEventKind};
use iop_execution::testkit::{Answer, CheckOptions, ScriptedBackend, chat_json, check_provider, run_request};
use iop_execution::{ChatInput, RunEvent, RunExecution};
use serde_json::{Value, json};

use super::*;

/// Longest any single wait of a test may take: a bound, never a measure.
const PATIENCE: Duration = Duration::from_secs(20);

fn adapter(backend: &ScriptedBackend) -> Arc<Ollama> {
    Arc::new(Ollama::new(OllamaConfig::new(backend.base_url())).unwrap())
}

fn target(name: &str) -> Target {
    Target::new(name).unwrap()
}

/// The head of an answer in lines.
fn lines() -> Answer {
    Answer::new(200).header("content-type", "application/x-ndjson")
}

/// One line, as Ollama writes it: the message, and what else belongs to it.
fn line(message: &Value, rest: &Value) -> String {
    let mut line =
        json!({ "model": "m", "created_at": "2026-08-21T10:00:00.123456Z", "message": message, "done": false });
    for (key, value) in rest.as_object().unwrap() {
        line[key] = value.clone();
    }
    format!("{line}\n")
}

fn say(text: &str) -> String {
    line(&json!({ "role": "assistant", "content": text }), &json!({}))
}

/// The last line with these counts.
fn done(reason: &str) -> String {
    line(
        &json!({ "role": "assistant", "content": "" }),
        &json!({
            "done": true, "done_reason": reason, "total_duration": 5, "load_duration": 1,
            "prompt_eval_count": 3, "prompt_eval_duration": 1, "eval_count": 2, "eval_duration": 1,
        }),
    )
}

fn input(body: &Value) -> ChatInput {
    ChatInput::parse(body.to_string()).unwrap()
}

fn run(adapter: &Arc<Ollama>, input: ChatInput) -> RunExecution {
    RunExecution::run(Arc::clone(adapter) as Arc<dyn Provider>, run_request(&target("m"), input))
}

fn hello() -> ChatInput {
    ChatInput::parse(chat_json("public-name", "hello", false)).unwrap()
}

async fn collect(mut run: RunExecution) -> Vec<RunEventKind> {
    let mut events = Vec::new();
    while let Some(event) = tokio::time::timeout(PATIENCE, run.next()).await.expect("the run hangs") {
        events.push(event);
    }
    assert!(matches!(events.first(), Some(RunEvent { kind: RunEventKind::Start, .. })));
    events.into_iter().skip(1).map(|event| event.kind).collect()
}

/// What a backend that answers a chat like this comes to, and the counts.
async fn answered(answer: Answer) -> (Vec<RunEventKind>, Option<iop_execution::Usage>) {
    let backend = ScriptedBackend::builder().route("POST", "/api/chat", answer).start().await.unwrap();
    let mut run = run(&adapter(&backend), hello());
    let (mut kinds, mut usage) = (Vec::new(), None);
    while let Some(event) = tokio::time::timeout(PATIENCE, run.next()).await.expect("the run hangs") {
        usage = event.usage.or(usage);
        if event.kind != RunEventKind::Start {
            kinds.push(event.kind);
        }
    }
    (kinds, usage)
}

#[tokio::test]
async fn it_keeps_the_contract_of_providers() {
    // EXE-15, EXE-1, ADP-6
    let talk = (0..200).fold(lines(), |answer, at| answer.write(say(&format!("{at} {}", "x".repeat(4096)))));
    let backend = ScriptedBackend::builder()
        .route("POST", "/api/chat", talk.write(done("stop")))
        .route("GET", "/api/tags", Answer::json(200, r#"{"models":[{"name":"m:latest","model":"m:latest"}]}"#))
        .route("GET", "/api/ps", Answer::json(200, r#"{"models":[{"name":"m:latest","model":"m:latest"}]}"#))
        .route(
            "POST",
            "/api/generate",
            Answer::json(200, r#"{"model":"m","response":"b","done":true,"done_reason":"length"}"#),
        )
        .start()
        .await
        .unwrap();
    let mut options = CheckOptions::new(target("m"));
    options.close_within = Duration::from_millis(300);
    let report = check_provider(adapter(&backend), options).await;
    assert!(report.is_ok(), "{report}");
    assert!(report.to_string().contains("available for the target"), "{report}");
}

#[tokio::test]
async fn in_every_wrapper_it_keeps_the_contract_its_commands_and_its_list() {
    // ADP-6
    use crate::decorators::{Fault, Limit, Record};
    let tags = Answer::json(200, r#"{"models":[{"name":"m:latest"}]}"#);
    let backend = ScriptedBackend::builder()
        .route("POST", "/api/chat", lines().write(say("a")).write(done("stop")))
        .route("GET", "/api/tags", tags)
        .route("GET", "/api/version", Answer::json(200, "{}"))
        .start()
        .await
        .unwrap();
    let inner: Arc<dyn Provider> = Arc::new(Record::new(Arc::new(Fault::new(adapter(&backend), Vec::new()))));
    let wrapped: Arc<dyn Provider> = Arc::new(Limit::new(inner, NonZeroU32::MIN));
    assert_eq!(wrapped.refresh().await, Refreshed::Answered);
    let capabilities = wrapped.capabilities();
    assert!(capabilities.commands && capabilities.targets.len() == 1);
    let command = ProviderCommand::OllamaApi {
        method: Method::GET,
        path: "/api/version".to_owned(),
        body: iop_execution::Redacted::default(),
    };
    assert!(matches!(wrapped.command(command).await, Ok(CommandOutput::Http { .. })));
    drop(backend);
    assert_eq!(wrapped.refresh().await, Refreshed::Silent);
    assert_eq!(wrapped.probe_health(&target("m")).await, Health::Unavailable);
}

#[tokio::test]
async fn a_cancel_closes_the_call_before_the_first_line_and_after_it() {
    // ADP-4, EXE-4
    for (answer, waits_for) in [(lines().late_head().hang(), 0), (lines().write(say("a")).hang(), 1)] {
        let backend = ScriptedBackend::builder().route("POST", "/api/chat", answer).start().await.unwrap();
        let mut run = run(&adapter(&backend), hello());
        // The start, and what was written.
        for _ in 0..=waits_for {
            tokio::time::timeout(PATIENCE, run.next()).await.unwrap().unwrap();
        }
        // Polled until the call is made.
        let waiting = tokio::time::timeout(PATIENCE, async {
            tokio::select! {
                _ = backend.wait_for(|traffic| traffic.waiting == 1) => {}
                event = run.next() => panic!("{event:?}"),
            }
        });
        waiting.await.unwrap();
        let since = std::time::Instant::now();
        run.cancel(CancelReason::Client);
        let last = tokio::time::timeout(PATIENCE, run.next()).await.expect("the run hangs").unwrap();
        assert_eq!(last.kind, RunEventKind::Cancelled(CancelReason::Client));
        let closed = backend.wait_for(|traffic| traffic.client_closed == 1);
        let closed = tokio::time::timeout(PATIENCE, closed).await.expect("the call is open").last_client_close.unwrap();
        assert!(closed.saturating_duration_since(since) < Duration::from_millis(100));
    }
}
