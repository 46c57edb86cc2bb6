//! Decides which models an Ollama server has, with what context length, and what each can do.
//!
//! `/api/tags` is the list; `/api/ps` says with which context a loaded model really runs; `/api/show` says what a model was
//! made for, and is asked once for each version of a model. What is no chat model is left out.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use iop_execution::failure::FailureStage;
use iop_execution::provider::TargetInfo;
use iop_execution::{ProviderError, Target};
use tokio::time::{Instant, timeout, timeout_at};

use super::Ollama;
use crate::call::{Answer, NoAnswer, in_prefill};
use crate::complaint;
use crate::json::{Kind, NotJson, Scanned, Scanner};

/// How long the list of models may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long everything that is asked beside it may take together: a bonus.
const DETAILS_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest answer that is read.
pub(super) const MAX_ANSWER: usize = 4 * 1024 * 1024;
/// Most models that are taken over from one server.
pub const MAX_TARGETS: usize = 1_024;

/// What a server has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Models {
    models: Vec<Model>,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Model {
    target: Target,
    /// Which version of it: another one is asked about again.
    digest: String,
    details: Option<Details>,
    /// Context length of the loaded model.
    running: Option<u64>,
}

/// What `/api/show` told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Details {
    /// Context length it would be loaded with, else the longest it was made for.
    context: Option<u64>,
    /// Older versions name no capabilities.
    abilities: Option<Abilities>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Abilities {
    completion: bool,
    tools: bool,
    thinking: bool,
}

impl Models {
    /// Its chat models, in the order it lists them.
    #[must_use]
    pub fn targets(&self) -> Vec<TargetInfo> {
        let chats = self.models.iter().filter(|model| model.abilities().is_none_or(|can| can.completion));
        chats
            .map(|model| {
                let context = model.running.or_else(|| model.details?.context);
                TargetInfo::new(model.target.clone()).with_context_length(context)
            })
            .collect()
    }

    /// Whether this model thinks, where that is known.
    pub(super) fn thinks(&self, target: &Target) -> Option<bool> {
        self.models
            .iter()
            .find(|model| is_same(model.target.as_str(), target.as_str()))?
            .abilities()
            .map(|can| can.thinking)
    }

    pub(super) fn any_has_tools(&self) -> bool {
        self.any(|can| can.tools)
    }

    pub(super) fn any_thinks(&self) -> bool {
        self.any(|can| can.thinking)
    }

    /// True where nothing is known, too: it is the model that refuses then.
    fn any(&self, can: impl Fn(Abilities) -> bool) -> bool {
        self.models.is_empty() || self.models.iter().any(|model| model.abilities().is_none_or(&can))
    }
}

impl Model {
    fn abilities(&self) -> Option<Abilities> {
        self.details?.abilities
    }
}

/// True if both names stand for the same model: no tag is the tag `latest`.
pub(super) fn is_same(one: &str, other: &str) -> bool {
    let full = |name: &str| {
        let tagged = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
        if tagged { name.to_owned() } else { format!("{name}:latest") }
    };
    full(one) == full(other)
}

pub(super) async fn discover(adapter: &Ollama) -> Result<Models, ProviderError> {
    let late = |_| ProviderError::broken(FailureStage::Prefill);
    let asked = adapter.ask(Method::GET, "/api/tags", Bytes::new(), MAX_ANSWER);
    let Answer { status, body } = match timeout(LIST_TIMEOUT, asked).await.map_err(late)? {
        Ok(answer) => answer,
        Err(NoAnswer::Refused) => return Err(ProviderError::unreachable()),
        Err(NoAnswer::Broken) => return Err(ProviderError::broken(FailureStage::Prefill)),
    };
    if !status.is_success() {
        return Err(complaint::rejected(status.as_u16(), &body, None));
    }
    let not_a_list = |_| in_prefill(ProviderError::protocol("the provider's list of models is not Ollama's"));
    let mut found = Models { models: tags(&body).map_err(not_a_list)? };
    let before = adapter.found();
    for model in &mut found.models {
        let known = before.models.iter().find(|known| known.target == model.target && known.digest == model.digest);
        if let Some(known) = known {
            (model.details, model.running) = (known.details, known.running);
        }
    }
    // What is not told in time stays as it was, and is asked again with the next refresh.
    let until = Instant::now() + DETAILS_TIMEOUT;
    if let Ok(Ok(answer)) = timeout_at(until, adapter.ask(Method::GET, "/api/ps", Bytes::new(), MAX_ANSWER)).await
        && let Some(loaded) = loaded(&answer)
    {
        for model in &mut found.models {
            let running = loaded.iter().find(|loaded| is_same(&loaded.name, model.target.as_str()));
            model.running = running.and_then(|running| running.context);
        }
    }
    for model in found.models.iter_mut().filter(|model| model.details.is_none()) {
        let body = serde_json::json!({ "model": model.target.as_str() }).to_string();
        match timeout_at(until, adapter.ask(Method::POST, "/api/show", body.into(), MAX_ANSWER)).await {
            Ok(Ok(answer)) if answer.status.is_success() => {
                // One that can't be read now can't be read later either.
                model.details = Some(details(&answer.body).unwrap_or_default());
            }
            Ok(Ok(_)) => {}
            Ok(Err(_)) | Err(_) => break,
        }
    }
    Ok(found)
}

fn object(bytes: &[u8]) -> Scanned<Scanner<'_>> {
    let mut scan = Scanner::new(bytes);
    if scan.peek()? == Kind::Object { Ok(scan) } else { Err(NotJson) }
}

fn tags(list: &[u8]) -> Scanned<Vec<Model>> {
    let (mut models, mut listed) = (Vec::new(), false);
    let mut scan = object(list)?;
    scan.object(|scan, key| {
        if key != b"models" {
            return scan.skip();
        }
        // An empty list may be null.
        listed = true;
        scan.array(|scan| {
            let (mut name, mut digest) = (None, String::new());
            scan.object(|scan, key| {
                match key {
                    b"model" => name = scan.text()?.and_then(|name| name.get()).or(name.take()),
                    b"name" => name = name.take().or(scan.text()?.and_then(|name| name.get())),
                    b"digest" => digest = scan.text()?.and_then(|text| text.get()).unwrap_or_default().into_owned(),
                    _ => scan.skip()?,
                }
                Ok(())
            })?;
            // A name that IOP can't carry is left out, not changed.
            let target = name.and_then(|name| Target::new(name).ok()).filter(|_| models.len() < MAX_TARGETS);
            models.extend(target.map(|target| Model { target, digest, details: None, running: None }));
            Ok(())
        })
    })?;
    scan.end()?;
    if listed { Ok(models) } else { Err(NotJson) }
}

/// A model that is in memory now.
pub(super) struct Loaded {
    pub(super) name: String,
    /// The context it was loaded with.
    pub(super) context: Option<u64>,
}

/// The models of `/api/ps`; none if that is no such list.
pub(super) fn loaded(answer: &Answer) -> Option<Vec<Loaded>> {
    if answer.status != StatusCode::OK {
        return None;
    }
    let (mut models, mut listed) = (Vec::new(), false);
    let mut scan = object(&answer.body).ok()?;
    let read = scan.object(|scan, key| {
        if key != b"models" {
            return scan.skip();
        }
        listed = true;
        scan.array(|scan| {
            let (mut name, mut context) = (None, None);
            scan.object(|scan, key| {
                match key {
                    b"model" | b"name" => name = scan.text()?.and_then(|name| name.get()).or(name.take()),
                    b"context_length" => context = scan.count()?.filter(|tokens| *tokens > 0),
                    _ => scan.skip()?,
                }
                Ok(())
            })?;
            models.extend(name.map(|name| Loaded { name: name.into_owned(), context }));
            Ok(())
        })
    });
    read.and_then(|()| scan.end()).ok().filter(|()| listed).map(|()| models)
}

/// Whether the list of models has this one; none if it is no list.
pub(super) fn lists(answer: &Answer, target: &Target) -> Option<bool> {
    let models = tags(&answer.body).ok().filter(|_| answer.status == StatusCode::OK)?;
    // One with too many says nothing of the rest.
    (models.len() < MAX_TARGETS).then(|| models.iter().any(|model| is_same(model.target.as_str(), target.as_str())))
}

fn details(shown: &[u8]) -> Scanned<Details> {
    let (mut trained, mut configured, mut abilities) = (None, None, None);
    let mut scan = object(shown)?;
    scan.object(|scan, key| match key {
        b"model_info" => scan.object(|scan, key| {
            if key.ends_with(b".context_length") {
                trained = scan.count()?.or(trained);
                Ok(())
            } else {
                scan.skip()
            }
        }),
        // One parameter a line: its name, spaces, its value.
        b"parameters" => {
            let text = scan.text()?.and_then(|text| text.get());
            configured = text.and_then(|text| {
                text.lines().find_map(|line| line.trim().strip_prefix("num_ctx")?.trim().parse().ok())
            });
            Ok(())
        }
        b"capabilities" => {
            let mut can = Abilities::default();
            if scan.peek()? != Kind::Array {
                return scan.skip();
            }
            scan.array(|scan| {
                match scan.text()? {
                    Some(name) if name.is("completion") => can.completion = true,
                    Some(name) if name.is("tools") => can.tools = true,
                    Some(name) if name.is("thinking") => can.thinking = true,
                    Some(_) | None => {}
                }
                Ok(())
            })?;
            abilities = Some(can);
            Ok(())
        }
        _ => scan.skip(),
    })?;
    scan.end()?;
    Ok(Details { context: configured.or(trained), abilities })
}
