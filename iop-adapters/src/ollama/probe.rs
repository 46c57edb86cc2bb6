//! Decides whether exactly one model of an Ollama server can produce tokens now (ADP-2).
//!
//! A request for a model that is not in memory loads it, which may throw another one out and takes minutes. So a token is
//! asked for only where `/api/ps` says that the model is loaded, and with the context it was loaded with, because another one
//! would load it again. Available: a token came. Unavailable: the connection was refused, or the server's list does not have
//! the model. Unknown: everything else, so a model that would first have to be loaded, and a token that does not come.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use iop_execution::{Health, Target};
use serde_json::json;

use super::Ollama;
use super::discovery::{self, is_same};
use crate::call::NoAnswer;

/// Longest probe. Whoever asks usually waits less.
const PROBE_LIMIT: Duration = Duration::from_secs(60);

pub(super) async fn probe(adapter: &Ollama, target: &Target) -> Health {
    tokio::time::timeout(PROBE_LIMIT, look(adapter, target)).await.unwrap_or(Health::Unknown)
}

async fn look(adapter: &Ollama, target: &Target) -> Health {
    let get = |path| adapter.ask(Method::GET, path, Bytes::new(), discovery::MAX_ANSWER);
    let answer = match get("/api/ps").await {
        Ok(answer) => answer,
        Err(NoAnswer::Refused) => return Health::Unavailable,
        Err(NoAnswer::Broken) => return Health::Unknown,
    };
    let Some(loaded) = discovery::loaded(&answer) else { return Health::Unknown };
    if let Some(loaded) = loaded.iter().find(|loaded| is_same(&loaded.name, target.as_str())) {
        return one_token(adapter, target, loaded.context).await;
    }
    match get("/api/tags").await {
        Ok(answer) if discovery::lists(&answer, target) == Some(false) => Health::Unavailable,
        Ok(_) | Err(NoAnswer::Broken) => Health::Unknown,
        Err(NoAnswer::Refused) => Health::Unavailable,
    }
}

async fn one_token(adapter: &Ollama, target: &Target, context: Option<u64>) -> Health {
    let mut options = json!({ "num_predict": 1 });
    if let (Some(context), Some(options)) = (context, options.as_object_mut()) {
        options.insert("num_ctx".to_owned(), context.into());
    }
    let body = json!({ "model": target.as_str(), "prompt": "a", "stream": false, "options": options });
    let asked = adapter.ask(Method::POST, "/api/generate", body.to_string().into(), discovery::MAX_ANSWER);
    match asked.await {
        Ok(answer) if answer.status.is_success() && made_a_token(&answer.body) => Health::Available,
        Ok(_) | Err(NoAnswer::Broken) => Health::Unknown,
        Err(NoAnswer::Refused) => Health::Unavailable,
    }
}

/// True if the answer is done and was no mere loading. Its text may be empty: one token can be half a character, or the end.
fn made_a_token(body: &[u8]) -> bool {
    super::line::read(body).is_ok_and(|line| {
        let only_loaded = line.reason.as_ref().is_some_and(|reason| reason.is("load") || reason.is("unload"));
        line.done && !line.error && !only_loaded
    })
}
