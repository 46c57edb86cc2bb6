//! Decides whether two real processes over TLS keep the promises of the whole: real sockets, real time.
//!
//! Each scenario has its own Edge, Nodes and scripted backend. What measures time or memory takes [`quiet`] first, so that
//! only what waits runs beside it.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]
// Scenarios stop and freeze processes by signals.
#![cfg(unix)]

mod a_prefill;
mod chat;
mod crowds;
mod deaths;
mod edge_restarts;
mod frozen;
mod kills;
mod leaving;
mod load;
mod node_alone;
mod recovering;
mod reload;
mod sentinel;
mod shutdown;
mod slow_reader;

use std::time::Duration;

use bytes::Bytes;
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::fleet::{Fleet, Plan, ProviderPlan};
use iop_tests::process::Programs;
use iop_tests::storm::Shot;
use iop_tests::wire_client::Request;
use serde_json::json;
use tokio::sync::{Mutex, MutexGuard};

const PROGRAMS: Programs = iop_tests::programs!();
/// Bound of things that must happen, but take what the machine takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// One scenario at a time may measure.
async fn quiet() -> MutexGuard<'static, ()> {
    static QUIET: Mutex<()> = Mutex::const_new(());
    QUIET.lock().await
}

/// One event with a chat chunk that says this.
fn says(text: &str) -> Bytes {
    let chunk = json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{ "index": 0, "delta": { "content": text }, "finish_reason": null }],
    });
    format!("data: {chunk}\n\n").into()
}

/// The events that end a chat stream.
fn finish() -> Bytes {
    let chunk = json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }],
    });
    format!("data: {chunk}\n\ndata: [DONE]\n\n").into()
}

/// A whole chat answer that says this.
fn whole(text: &str) -> Answer {
    Answer::json(200, whole_body(text))
}

/// The body of a whole chat answer that says this.
fn whole_body(text: &str) -> String {
    let body = json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": "stop" }],
        "usage": { "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5 },
    });
    body.to_string()
}

/// A streamed "Hello", and the same whole.
fn hello() -> Answer {
    Answer::events().write(says("Hel")).write(says("lo")).write(finish()).without_stream(whole("Hello"))
}

/// Time between two words of [`brisk`].
const BEAT: Duration = Duration::from_millis(15);
/// Words of an answer of [`brisk`].
const WORDS: [&str; 5] = ["It ", "goes ", "on ", "and ", "on."];

/// A backend that takes about a tenth of a second for an answer, with the models `tunnel` and `run`.
async fn brisk() -> ScriptedBackend {
    let whole = Answer::new(200).header("content-type", "application/json").wait(BEAT * 5);
    let whole = whole.write(whole_body(&WORDS.concat()));
    let words = WORDS.iter().fold(Answer::events(), |answer, word| answer.wait(BEAT).write(says(word)));
    let answer = words.write(finish()).without_stream(whole);
    ScriptedBackend::builder().model("tunnel", answer.clone()).model("run", answer).start().await.unwrap()
}

/// Everything [`brisk`] can be asked.
fn brisk_shots() -> Vec<Shot> {
    let all = [("tunnel", true), ("run", true), ("tunnel", false), ("run", false)];
    all.map(|(model, stream)| Shot::new(Request::chat(model, stream), &WORDS.concat())).into()
}

/// A provider `p` that serves these models by tunnel.
fn provider(backend: &ScriptedBackend, capacity: u32, models: &[&str]) -> ProviderPlan {
    ProviderPlan::new("p", &backend.base_url(), capacity, models)
}

/// A fleet with one Node and this provider.
async fn fleet(provider: ProviderPlan) -> Fleet {
    Fleet::start(PROGRAMS, Plan::new(vec![provider])).await
}

/// Chat requests that a backend got. Nodes also ask it for its models when they connect.
fn chats(backend: &ScriptedBackend) -> usize {
    backend.received().iter().filter(|request| request.method == "POST").count()
}

/// Waits for something that must happen.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"))
}
