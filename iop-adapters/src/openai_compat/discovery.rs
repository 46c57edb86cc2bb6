//! Decides which models a server has, with what context length, and how many calls it takes at once.

use std::num::NonZeroU32;
use std::time::Duration;

use http::{HeaderMap, Method};
use iop_execution::failure::FailureStage;
use iop_execution::provider::TargetInfo;
use iop_execution::{ProviderError, RequestBody, RunId, Target};

use super::{OpenAiCompat, Server, read_up_to};
use crate::json::{Kind, Scanned, Scanner};
use crate::rules;

/// How long the list of models may take.
pub const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Where LM Studio says which models are loaded, and with what context.
pub(super) const LM_STUDIO_MODELS: &str = "/api/v0/models";
/// How long a server's own properties may take: they are a bonus.
const PROPS_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest list that is read.
const MAX_LIST_BYTES: usize = 1024 * 1024;
/// Most models that are taken over from one server.
pub const MAX_TARGETS: usize = 1_024;

/// What a server has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Discovery {
    /// Its models, in the order it lists them.
    pub targets: Vec<TargetInfo>,
    /// How many calls it takes at once, where it says so (llama.cpp, SGLang).
    pub slots: Option<NonZeroU32>,
    /// The server is an IOP edge: using it as a backend would be a loop.
    pub is_iop: bool,
    /// Which server it says it is.
    pub server: Server,
    /// It serves Anthropic's messages; `None` before it could be asked.
    pub messages: Option<bool>,
}

pub(super) async fn discover(adapter: &OpenAiCompat) -> Result<Discovery, ProviderError> {
    let late = |_| ProviderError::broken(FailureStage::Prefill);
    let (headers, list) = tokio::time::timeout(DISCOVERY_TIMEOUT, get(adapter, "/v1/models")).await.map_err(late)??;
    let is_iop = headers.contains_key("x-iop-edge");
    let listed = models(&list).map_err(|_| ProviderError::protocol("the provider's list of models is not JSON"))?;
    let server = headers.get(http::header::SERVER).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let server = if server.eq_ignore_ascii_case("llama.cpp") { Server::LlamaCpp } else { listed.server };
    let mut found = Discovery { targets: listed.targets, slots: None, is_iop, server, messages: None };
    let before = adapter.found();
    // What the config says counts more than what a list looks like.
    let server = if adapter.server == Server::Any { server } else { adapter.server };
    found.messages = match server {
        // It does not tell a path that it lacks from a method that a path lacks. It has had this one since late 2025.
        Server::LlamaCpp => Some(true),
        // A server does not learn it while it runs.
        _ if before.messages.is_some() && before.targets == found.targets => before.messages,
        Server::Any | Server::LmStudio | Server::Sglang | Server::Vllm => serves_messages(adapter).await,
    };
    match server {
        Server::LlamaCpp => match told(adapter, &["/props"]).await {
            Some(props) => found.take_props(&props),
            // A server that is too busy to tell has as many slots as before.
            None => found.keep_props(&before),
        },
        Server::LmStudio => match told(adapter, &[LM_STUDIO_MODELS]).await.and_then(|list| lm_studio(&list)) {
            Some(models) => found.take_contexts(&models),
            None => found.keep_contexts(&before),
        },
        // The second is its older name.
        Server::Sglang => match told(adapter, &["/server_info", "/get_server_info"]).await {
            Some(info) => found.slots = sglang_slots(&info),
            None => found.slots = before.slots,
        },
        Server::Any | Server::Vllm => {}
    }
    Ok(found)
}

/// What a server tells of itself under the first of these paths that it has.
async fn told(adapter: &OpenAiCompat, paths: &[&'static str]) -> Option<Vec<u8>> {
    for path in paths {
        match tokio::time::timeout(PROPS_TIMEOUT, get(adapter, path)).await {
            Ok(Ok((_, told))) => return Some(told),
            Ok(Err(error)) if error.failure().upstream_status == Some(404) => {}
            Ok(Err(_)) | Err(_) => return None,
        }
    }
    None
}

/// Whether a server has the path of Anthropic's messages: one that has it says that it takes another method.
async fn serves_messages(adapter: &OpenAiCompat) -> Option<bool> {
    match tokio::time::timeout(PROPS_TIMEOUT, get(adapter, "/v1/messages")).await {
        Ok(Ok(_)) => Some(false),
        Ok(Err(error)) => error.failure().upstream_status.map(|status| status == 405),
        Err(_) => None,
    }
}

async fn get(adapter: &OpenAiCompat, path: &'static str) -> Result<(HeaderMap, Vec<u8>), ProviderError> {
    let mut headers = rules::request_headers(&HeaderMap::new(), RunId::from_bytes([0; 16]));
    headers.remove(http::header::CONTENT_TYPE);
    headers.remove("x-request-id");
    let response = adapter.call(Method::GET, path, headers, RequestBody::full(""), None).await?;
    Ok((response.headers, read_up_to(response.body, MAX_LIST_BYTES).await))
}

impl Discovery {
    /// llama.cpp tells how many slots it runs, and the context it really has, which is smaller than the model's.
    fn take_props(&mut self, props: &[u8]) {
        let (mut slots, mut context) = (None, None);
        let read = Scanner::new(props).object(|scan, key| {
            match key {
                b"total_slots" => slots = scan.count()?,
                b"default_generation_settings" => context = context_field(scan)?,
                _ => scan.skip()?,
            }
            Ok(())
        });
        if read.is_err() {
            return;
        }
        self.slots = slots.and_then(|slots| u32::try_from(slots).ok()).and_then(NonZeroU32::new);
        if let ([target], Some(context)) = (self.targets.as_mut_slice(), context) {
            target.context_length = Some(context);
        }
    }
}

impl Discovery {
    /// What an earlier answer told beyond the list of models.
    fn keep_props(&mut self, before: &Self) {
        self.slots = before.slots;
        if let ([target], [known]) = (self.targets.as_mut_slice(), before.targets.as_slice())
            && target.target == known.target
        {
            target.context_length = known.context_length;
        }
    }
}

impl Discovery {
    /// What a loaded model runs with is less than what it was made for.
    fn take_contexts(&mut self, models: &[LmStudioModel]) {
        for info in &mut self.targets {
            let told = models.iter().find(|model| model.target == info.target).and_then(|model| model.context);
            info.context_length = told.or(info.context_length);
        }
    }

    fn keep_contexts(&mut self, before: &Self) {
        for info in &mut self.targets {
            let known = before.targets.iter().find(|known| known.target == info.target);
            info.context_length = info.context_length.or(known.and_then(|known| known.context_length));
        }
    }
}

/// One model of LM Studio's own list.
pub(super) struct LmStudioModel {
    pub(super) target: Target,
    pub(super) loaded: bool,
    /// With what it is loaded, else what it was made for.
    context: Option<u64>,
}

/// LM Studio's own list; none if it is none.
pub(super) fn lm_studio(list: &[u8]) -> Option<Vec<LmStudioModel>> {
    let (mut models, mut listed) = (Vec::new(), false);
    let mut scan = Scanner::new(list);
    if scan.peek().ok()? != Kind::Object {
        return None;
    }
    let read = scan.object(|scan, key| {
        if key != b"data" {
            return scan.skip();
        }
        listed = scan.peek()? == Kind::Array;
        scan.array(|scan| {
            let (mut id, mut loaded, mut running, mut made_for) = (None, false, None, None);
            scan.object(|scan, key| {
                match key {
                    b"id" => id = scan.text()?.and_then(|id| id.get()),
                    b"state" => loaded = scan.text()?.is_some_and(|state| state.is("loaded")),
                    b"loaded_context_length" => running = scan.count()?,
                    b"max_context_length" => made_for = scan.count()?,
                    _ => scan.skip()?,
                }
                Ok(())
            })?;
            let target = id.and_then(|id| Target::new(id).ok()).filter(|_| models.len() < MAX_TARGETS);
            models.extend(target.map(|target| LmStudioModel { target, loaded, context: running.or(made_for) }));
            Ok(())
        })
    });
    read.and_then(|()| scan.end()).ok().filter(|()| listed).map(|()| models)
}

/// How many requests SGLang's schedulers run at once: each of its `dp_size` as many as it says itself.
fn sglang_slots(info: &[u8]) -> Option<NonZeroU32> {
    let (mut ranks, mut each) = (None, None);
    let read = Scanner::new(info).object(|scan, key| match key {
        b"dp_size" => {
            ranks = scan.count()?;
            Ok(())
        }
        b"internal_states" => scan.array(|scan| {
            scan.object(|scan, key| {
                if key == b"effective_max_running_requests_per_dp" {
                    each = each.or(scan.count()?);
                    Ok(())
                } else {
                    scan.skip()
                }
            })
        }),
        _ => scan.skip(),
    });
    read.ok()?;
    let slots = each?.checked_mul(ranks.unwrap_or(1).max(1))?;
    u32::try_from(slots).ok().and_then(NonZeroU32::new)
}

/// The models of a list; none if it is no list.
pub(super) fn targets(list: &[u8]) -> Option<Vec<TargetInfo>> {
    models(list).ok().map(|listed| listed.targets)
}

struct Listed {
    targets: Vec<TargetInfo>,
    server: Server,
}

fn models(list: &[u8]) -> Scanned<Listed> {
    let mut listed = Listed { targets: Vec::new(), server: Server::Any };
    let mut scan = Scanner::new(list);
    if scan.peek()? != Kind::Object {
        return Err(crate::json::NotJson);
    }
    scan.object(|scan, key| match key {
        b"data" => scan.array(|scan| {
            let (target, server) = model(scan)?;
            if server != Server::Any {
                listed.server = server;
            }
            listed.targets.extend(target.filter(|_| listed.targets.len() < MAX_TARGETS));
            Ok(())
        }),
        _ => scan.skip(),
    })?;
    scan.end()?;
    Ok(listed)
}

fn model(scan: &mut Scanner<'_>) -> Scanned<(Option<TargetInfo>, Server)> {
    let (mut id, mut context, mut server) = (None, None, Server::Any);
    scan.object(|scan, key| {
        match key {
            b"id" => id = scan.text()?.and_then(|id| id.get()),
            b"owned_by" => {
                server = match scan.text()? {
                    Some(owner) if owner.is("llamacpp") => Server::LlamaCpp,
                    Some(owner) if owner.is("sglang") => Server::Sglang,
                    Some(owner) if owner.is("vllm") => Server::Vllm,
                    Some(_) | None => Server::Any,
                }
            }
            // vLLM and SGLang; OpenRouter and others; LM Studio.
            b"max_model_len" | b"context_length" | b"max_context_length" => {
                let tokens = scan.count()?;
                context = context.or(tokens);
            }
            b"meta" => context = context_field(scan)?.or(context),
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    // A name that IOP can't carry is left out, not changed.
    let target = id.and_then(|id| Target::new(id).ok());
    Ok((target.map(|target| TargetInfo::new(target).with_context_length(context)), server))
}

/// llama.cpp's context length: what it runs with, else what the model was trained for.
fn context_field(scan: &mut Scanner<'_>) -> Scanned<Option<u64>> {
    let (mut running, mut trained) = (None, None);
    scan.object(|scan, key| {
        match key {
            b"n_ctx" => running = scan.count()?,
            b"n_ctx_train" => trained = scan.count()?,
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    Ok(running.or(trained))
}
