//! Decides which calls of Ollama's own API an operator may make through IOP (CMD-1): those that only look.
//!
//! What generates would take a place that nobody counts, and what pulls, copies or deletes models changes the server for
//! everybody.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use iop_execution::failure::FailureStage;
use iop_execution::{CommandOutput, ProviderCommand, ProviderError, Redacted};

use super::Ollama;
use crate::call::{Answer, NoAnswer, in_prefill};
use crate::json::{Kind, Scanner};
use crate::rules;

/// Largest body of a command and of its answer.
const MAX_BODY: usize = 32 * 1024;
/// How long a command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) async fn command(adapter: &Ollama, command: ProviderCommand) -> Result<CommandOutput, ProviderError> {
    match command {
        ProviderCommand::OllamaApi { method, path, body } => ask(adapter, &method, &path, body.into_inner()).await,
        // Commands of later versions.
        _ => Err(ProviderError::unsupported("this adapter has no such command")),
    }
}

async fn ask(adapter: &Ollama, method: &Method, path: &str, body: Bytes) -> Result<CommandOutput, ProviderError> {
    let path = rules::OLLAMA.check(method, path)?;
    if body.len() > MAX_BODY {
        return Err(ProviderError::invalid_request("the body is larger than 32 KiB"));
    }
    match *method {
        Method::POST if !is_object(&body) => {
            return Err(ProviderError::invalid_request("the body must be a JSON object"));
        }
        Method::GET if !body.is_empty() => return Err(ProviderError::invalid_request("a GET has no body")),
        _ => {}
    }
    let asked = adapter.ask(method.clone(), path, body, MAX_BODY + 1);
    let late = |_| ProviderError::broken(FailureStage::Prefill);
    let Answer { status, mut body } = match tokio::time::timeout(COMMAND_TIMEOUT, asked).await.map_err(late)? {
        Ok(answer) => answer,
        Err(NoAnswer::Refused) => return Err(ProviderError::unreachable()),
        Err(NoAnswer::Broken) => return Err(ProviderError::broken(FailureStage::Prefill)),
    };
    if body.len() > MAX_BODY {
        return Err(in_prefill(ProviderError::protocol("the answer is larger than 32 KiB")));
    }
    // What a server says about its own credential may hold a piece of it.
    if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        body.clear();
    }
    Ok(CommandOutput::Http { status, body: Redacted::new(body.into()) })
}

fn is_object(body: &[u8]) -> bool {
    let mut scan = Scanner::new(body);
    scan.peek() == Ok(Kind::Object) && scan.skip().is_ok() && scan.end().is_ok()
}
