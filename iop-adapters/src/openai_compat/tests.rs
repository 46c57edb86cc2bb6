mod cancel;
mod cases;
mod discovery;
mod probe;
mod rules;

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use http::StatusCode;
use iop_execution::event::RunEventKind;
use iop_execution::testkit::{ScriptedBackend, chat_json, run_request, tunnel_request};
use iop_execution::{ChatInput, FrameFlags, RunEvent, RunExecution, TunnelExecution, TunnelFrame};

use super::*;
use crate::http::UpstreamError;

/// Longest any single wait of a test may take: a bound, never a measure.
const PATIENCE: Duration = Duration::from_secs(20);

fn adapter(backend: &ScriptedBackend) -> Arc<OpenAiCompat> {
    adapter_at(&backend.base_url())
}

fn adapter_at(base_url: &str) -> Arc<OpenAiCompat> {
    let mut config = OpenAiCompatConfig::new(base_url);
    config.terminal_linger = Duration::from_millis(50);
    Arc::new(OpenAiCompat::new(config).unwrap())
}

fn target(name: &str) -> Target {
    Target::new(name).unwrap()
}

fn tunnel(adapter: &Arc<OpenAiCompat>, name: &str, stream: bool) -> TunnelExecution {
    let request = tunnel_request(&target(name), chat_json(name, "hello", stream), stream);
    TunnelExecution::tunnel(Arc::clone(adapter) as Arc<dyn Provider>, request)
}

fn run(adapter: &Arc<OpenAiCompat>, name: &str) -> RunExecution {
    let input = ChatInput::parse(chat_json("public-name", "hello", false)).unwrap();
    RunExecution::run(Arc::clone(adapter) as Arc<dyn Provider>, run_request(&target(name), input))
}

async fn next<S: futures_util::Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    tokio::time::timeout(PATIENCE, stream.next()).await.expect("the stream hangs")
}

async fn collect<S: futures_util::Stream + Unpin>(stream: &mut S) -> Vec<S::Item> {
    let mut items = Vec::new();
    while let Some(item) = next(stream).await {
        items.push(item);
    }
    items
}

/// The bytes of all body frames.
fn body_of(frames: &[TunnelFrame]) -> Vec<u8> {
    frames
        .iter()
        .filter_map(|frame| match frame {
            TunnelFrame::Body { bytes, .. } => Some(bytes.to_vec()),
            _ => None,
        })
        .collect::<Vec<_>>()
        .concat()
}

/// The text of choice 0, read the slow and simple way.
fn text_of(body: &[u8]) -> String {
    let from = |value: &serde_json::Value| {
        let choices = value["choices"].as_array().cloned().unwrap_or_default();
        choices
            .iter()
            .filter(|choice| choice["index"] == 0)
            .map(|choice| {
                let part = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
                part["content"].as_str().unwrap_or_default().to_owned()
            })
            .collect::<String>()
    };
    if let Ok(whole) = serde_json::from_slice(body) {
        return from(&whole);
    }
    let blocks = iop_execution::sse::split_blocks(&Bytes::copy_from_slice(body));
    blocks
        .filter_map(Result::ok)
        .filter_map(|block| match block.content {
            iop_execution::sse::BlockContent::Event(event) => serde_json::from_slice(&event.data).ok(),
            _ => None,
        })
        .map(|value| from(&value))
        .collect()
}

fn run_text(events: &[RunEvent]) -> String {
    events
        .iter()
        .filter_map(|event| match &event.kind {
            RunEventKind::Delta(text) => Some(text.as_str()),
            _ => None,
        })
        .collect()
}

fn flags_of(frames: &[TunnelFrame]) -> Vec<FrameFlags> {
    frames
        .iter()
        .filter_map(|frame| match frame {
            TunnelFrame::Body { flags, .. } => Some(*flags),
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn it_keeps_the_contract_of_providers() {
    // EXE-15, EXE-1, SEC-1
    use iop_execution::testkit::{Answer, CheckOptions, check_provider};
    let chunk = |text: &str| {
        let text = format!("{text} {}", "x".repeat(4096));
        format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
    };
    let talk = (0..200).fold(Answer::events(), |answer, at| answer.write(chunk(&at.to_string())));
    let end = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":200}}\n\ndata: [DONE]\n\n";
    let backend = ScriptedBackend::builder().model("m", talk.write(end)).start().await.unwrap();
    let mut options = CheckOptions::new(target("m"));
    options.close_within = Duration::from_millis(300);
    let report = check_provider(adapter(&backend), options).await;
    assert!(report.is_ok(), "{report}");
    assert_eq!(report.to_string().matches("waited, then").count(), 2, "{report}");
}
