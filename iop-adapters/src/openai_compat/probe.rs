//! Decides whether exactly one target can produce tokens now (ADP-2), in a way that a front without an engine can't fool.
//!
//! Evidence that does not queue comes first: two readings of what the engine itself counts. Where that does not move and
//! something is free, one token is generated beside it. A `/health` that says 200 is never evidence, and neither is a list of
//! models. What this answers:
//!
//! - available: a counter of the target moved, or a token came;
//! - unavailable: the connection was refused, the engine says that it is loading or dead, or a server whose list is exact
//!   (vLLM, SGLang, LM Studio) does not have the model;
//! - unknown: everything else, so each doubt. A saturated engine whose counters rest for a while is one.
//!
//! A server of unknown kind has no counters that could be relied on, and its tokens may cost money. One is generated only
//! where they are free: on this machine, in a private network, or where the config says so. Elsewhere every answer is
//! unknown, a refused connection too, because a probe that can lower a provider must be able to raise it again.

mod llama_cpp;
mod lm_studio;
mod metrics;
mod sglang;
mod vllm;

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use http::Method;
use iop_execution::{Health, Target};

use self::lm_studio::State;
use super::{OpenAiCompat, Server, discovery};
use crate::call::{self, Answer, NoAnswer};
use crate::json::{Kind, Scanned, Scanner};

/// Longest probe. Whoever asks usually waits less.
const PROBE_LIMIT: Duration = Duration::from_secs(60);
/// Time between two readings of an engine's counters.
const READ_EVERY: Duration = Duration::from_millis(250);
/// Most bytes of an answer that are read: vLLM's metrics are some 100 KiB.
const MAX_ANSWER: usize = 4 * 1024 * 1024;

pub(super) async fn probe(adapter: &OpenAiCompat, target: &Target) -> Health {
    let asked = async {
        match adapter.server {
            Server::Any if !adapter.free_tokens || is_unlisted(adapter, target) => Health::Unknown,
            Server::Any => token_alone(adapter, target).await,
            Server::LlamaCpp => watch(adapter, target).await,
            Server::LmStudio => match lm_studio::state(adapter, target).await {
                State::Loaded | State::Untold => token_alone(adapter, target).await,
                // A token would load it, and perhaps throw another one out.
                State::NotLoaded => Health::Unknown,
                State::Missing | State::Refused => Health::Unavailable,
                State::Nothing => Health::Unknown,
            },
            Server::Sglang | Server::Vllm => match exact_list_has(adapter, target).await {
                Some(false) => Health::Unavailable,
                Some(true) | None => watch(adapter, target).await,
            },
        }
    };
    tokio::time::timeout(PROBE_LIMIT, asked).await.unwrap_or(Health::Unknown)
}

/// A server that lists models, and not this one, may answer with another one whatever it is asked for.
fn is_unlisted(adapter: &OpenAiCompat, target: &Target) -> bool {
    let found = adapter.found();
    !found.targets.is_empty() && !found.targets.iter().any(|info| info.target == *target)
}

/// A token where there is nothing else to look at.
async fn token_alone(adapter: &OpenAiCompat, target: &Target) -> Health {
    of_token(&one_token(adapter, target, Api::Chat).await).unwrap_or(Health::Unknown)
}

/// Whether a server has this model whose list is exact, adapters included. None if it does not say.
async fn exact_list_has(adapter: &OpenAiCompat, target: &Target) -> Option<bool> {
    match ask(adapter, Method::GET, "/v1/models", "").await {
        Ok(answer) if answer.status.is_success() => {
            let targets = discovery::targets(&answer.body)?;
            // One with too many models, or none, says nothing of this one.
            let exact = !targets.is_empty() && targets.len() < discovery::MAX_TARGETS;
            exact.then(|| targets.iter().any(|info| info.target == *target))
        }
        Ok(_) | Err(_) => None,
    }
}

/// What an engine counts at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reading {
    /// Who counts, for which task, and how far: a greater task or a greater count is progress.
    marks: Vec<Mark>,
    /// Something is being worked on.
    busy: bool,
    /// A new request would not have to wait, as far as is known.
    free: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    who: u64,
    task: u64,
    count: u64,
}

impl Reading {
    fn moved_since(&self, before: &Self) -> bool {
        self.marks.iter().any(|mark| {
            before.marks.iter().any(|old| old.who == mark.who && (mark.task, mark.count) > (old.task, old.count))
        })
    }
}

/// What one look at an engine gave.
enum Look {
    Seen(Reading),
    /// It tells nothing of this target.
    Nothing,
    Refused,
    Loading,
}

async fn look(adapter: &OpenAiCompat, target: &Target) -> Look {
    match adapter.server {
        Server::LlamaCpp => llama_cpp::look(adapter).await,
        Server::Sglang => sglang::look(adapter, target).await,
        Server::Vllm => vllm::look(adapter, target).await,
        Server::Any | Server::LmStudio => Look::Nothing,
    }
}

/// Reads until something moves or a token comes. Does not end by itself while an engine is busy and does not move.
async fn watch(adapter: &OpenAiCompat, target: &Target) -> Health {
    let first = match look(adapter, target).await {
        Look::Seen(reading) => Some(reading),
        Look::Nothing => None,
        Look::Refused | Look::Loading => return Health::Unavailable,
    };
    let mut token = pin!(one_token(adapter, target, Api::Completions));
    let Some(first) = first else { return of_token(&token.await).unwrap_or(Health::Unknown) };
    let mut asked = Asked::No;
    let mut free = first.free;
    loop {
        if free && asked == Asked::No {
            asked = Asked::Open;
        }
        let next = pin!(async {
            tokio::time::sleep(READ_EVERY).await;
            look(adapter, target).await
        });
        let looked = if asked == Asked::Open {
            match select(token.as_mut(), next).await {
                Either::Left((came, next)) => {
                    if let Some(health) = of_token(&came) {
                        return health;
                    }
                    asked = Asked::Done;
                    next.await
                }
                Either::Right((looked, _)) => looked,
            }
        } else {
            next.await
        };
        match looked {
            Look::Seen(reading) if reading.moved_since(&first) => return Health::Available,
            // Nothing that could move, and no token: nobody knows.
            Look::Seen(reading) if asked == Asked::Done && !reading.busy => return Health::Unknown,
            Look::Seen(reading) => free = reading.free,
            Look::Nothing => {}
            Look::Refused | Look::Loading => return Health::Unavailable,
        }
    }
}

/// Whether the one token was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    No,
    Open,
    Done,
}

const fn of_token(token: &Token) -> Option<Health> {
    match token {
        Token::Made => Some(Health::Available),
        Token::Refused | Token::Loading => Some(Health::Unavailable),
        Token::None => None,
    }
}

async fn ask(
    adapter: &OpenAiCompat,
    method: Method,
    path: &'static str,
    body: impl Into<bytes::Bytes>,
) -> Result<Answer, NoAnswer> {
    call::ask(adapter.upstream.as_ref(), adapter.bearer.as_ref(), method, path, body.into(), MAX_ANSWER).await
}

#[derive(Debug, Clone, Copy)]
enum Api {
    Chat,
    Completions,
}

/// What came of asking for one token.
enum Token {
    Made,
    Refused,
    /// llama.cpp is loading its model.
    Loading,
    None,
}

async fn one_token(adapter: &OpenAiCompat, target: &Target, api: Api) -> Token {
    let (path, body) = match api {
        Api::Chat => (
            "/v1/chat/completions",
            serde_json::json!({
                "model": target.as_str(), "messages": [{ "role": "user", "content": "a" }], "max_tokens": 1, "stream": false,
            }),
        ),
        Api::Completions => (
            "/v1/completions",
            serde_json::json!({ "model": target.as_str(), "prompt": "a", "max_tokens": 1, "stream": false }),
        ),
    };
    match ask(adapter, Method::POST, path, body.to_string()).await {
        Ok(answer) if answer.status.is_success() && has_token(&answer.body) => Token::Made,
        Ok(answer) if adapter.server == Server::LlamaCpp && llama_cpp::is_loading(&answer) => Token::Loading,
        Ok(_) | Err(NoAnswer::Broken) => Token::None,
        Err(NoAnswer::Refused) => Token::Refused,
    }
}

/// True if the answer holds a choice that is finished. Its text may be empty: one token can be half a character, or the end.
fn has_token(body: &[u8]) -> bool {
    let mut finished = false;
    let mut read = || -> Scanned<()> {
        let mut scan = Scanner::new(body);
        if scan.peek()? != Kind::Object {
            return Ok(());
        }
        scan.object(|scan, key| match key {
            b"choices" => scan.array(|scan| {
                scan.object(|scan, key| match key {
                    b"finish_reason" => {
                        finished |= scan.text()?.is_some_and(|reason| !reason.is_empty());
                        Ok(())
                    }
                    _ => scan.skip(),
                })
            }),
            _ => scan.skip(),
        })?;
        scan.end()
    };
    read().is_ok() && finished
}
