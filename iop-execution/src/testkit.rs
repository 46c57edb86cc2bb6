//! Decides whether an adapter keeps the contract: checks for adapter authors, and the scripted parts of our tests.
//!
//! | part | what it stands for |
//! | --- | --- |
//! | [`check_provider`] | an adapter author's checks of their own provider, in one call |
//! | [`ScriptedProvider`] | a provider that does what a [`Script`] says and records what happened to it |
//! | [`ScriptedBackend`] | an HTTP model server that answers by script, byte for byte |
//! | [`cases`] | the answers, good and odd, that OpenAI-compatible servers are known to give |
//! | [`ManualClock`] | time that moves when told |
//! | [`Logged`] | what a test's thread writes to the log |
//!
//! The kit is for tests: it spawns tasks, sleeps, and opens sockets on 127.0.0.1.

pub mod alone;
mod backend;
pub mod cases;
pub mod check;

mod chunk;
mod clock;
mod log;
mod provider;
mod script;

pub use alone::alone;
pub use backend::{Answer, ScriptedBackend};
pub use check::{CheckOptions, CheckReport, check_provider};
pub use clock::ManualClock;
pub use log::{LogLine, Logged};
pub use provider::{Counts, ScriptHandle, ScriptedCall, ScriptedProvider};
pub use script::Script;

use crate::chat::ChatInput;
use crate::id::{AdapterKey, RunId, Target};
use crate::request::{RequestBody, RunRequest, TunnelRequest};

/// A small chat-completions object with one user message.
#[must_use]
pub fn chat_json(model: &str, message: &str, stream: bool) -> String {
    serde_json::json!({ "model": model, "messages": [{ "role": "user", "content": message }], "stream": stream })
        .to_string()
}

/// A streaming run for `target` on the adapter `test`, with a fresh run id.
#[must_use]
pub fn run_request(target: &Target, input: ChatInput) -> RunRequest {
    RunRequest::new(fresh_run_id(), adapter_key(), target.clone(), input)
}

/// A tunnel to `/v1/chat/completions` for `target` on the adapter `test`, with a fresh run id.
#[must_use]
pub fn tunnel_request(target: &Target, body: impl Into<bytes::Bytes>, stream: bool) -> TunnelRequest {
    let body = RequestBody::full(body);
    let mut request = TunnelRequest::post(fresh_run_id(), adapter_key(), target.clone(), "/v1/chat/completions", body);
    request.headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    request.stream = stream;
    request
}

fn fresh_run_id() -> RunId {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    RunId::generate().unwrap_or_else(|_| {
        let mut bytes = [0; 16];
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_be_bytes();
        bytes.iter_mut().rev().zip(number.iter().rev()).for_each(|(to, from)| *to = *from);
        RunId::from_bytes(bytes)
    })
}

#[allow(clippy::expect_used, reason = "the name is a literal that is valid")]
fn adapter_key() -> AdapterKey {
    AdapterKey::new("test").expect("a valid name")
}

#[cfg(test)]
mod tests;
