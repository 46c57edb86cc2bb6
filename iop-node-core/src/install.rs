//! Decides how a config is put into force. At a registration what left it is stopped, what is new is made and started, the
//! rest stays, and a provider that can't be used is left out. A pushed config is all or nothing: what is new is made beside
//! what serves, and only when all of it is there the two change places (REG-7).

use std::borrow::Cow;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use iop_execution::{AdapterKey, Provider, ProviderId, Refreshed};
use iop_wire::{NodeConfigPayload, ProviderConfig, ProviderReady};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::adapters::Adapter;
use crate::factory::{AdapterBuildError, CUSTOM_KIND};
use crate::node::Inner;
use crate::state::handshake::ADAPTER_START_TIMEOUT;
use crate::state::refresh::REFRESH_TIMEOUT;

/// Longest time one adapter may take to stop.
const ADAPTER_STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// An instance that was made and is not installed yet.
struct Made {
    config: ProviderConfig,
    provider: Arc<dyn Provider>,
}

/// Everything that a pushed config needs beyond what serves already.
#[derive(Default)]
pub(crate) struct Prepared(Vec<Made>);

impl Prepared {
    /// The adapter keys of what was made.
    pub(crate) fn keys(&self) -> HashSet<AdapterKey> {
        self.0.iter().map(|made| made.config.adapter.clone()).collect()
    }
}

/// Why a pushed config can't be put into force, in words that are safe to tell.
pub(crate) type Refused = Cow<'static, str>;

/// Puts the config of a registration into force and gives what NodeReadyRequest says. A provider that can't be used is left
/// out, and the log says why.
///
/// Cancel safety: dropped, it may leave new instances out; the next call puts that right.
pub(crate) async fn apply(node: &Arc<Inner>, config: &NodeConfigPayload) -> Vec<ProviderReady> {
    let (plan, gone) = {
        let mut adapters = node.adapters();
        (adapters.plan(config), adapters.leave(config))
    };
    for provider in &plan.duplicates {
        tracing::error!(
            provider = %provider.provider_id, adapter = %provider.adapter,
            "provider left out: its adapter key is taken by another one"
        );
    }
    // No run of an older connection is left; what is still read to its end goes on.
    let (idle, busy): (Vec<_>, Vec<_>) = gone.into_iter().partition(|adapter| adapter.gate().is_idle());
    retire(node, busy);
    stop_all(node, idle).await;
    let kept = node.adapters().all();
    let makes = join_all(plan.build.into_iter().map(|config| make_or_tell(node, config)));
    let (made, _) = join(makes, join_all(kept.iter().map(|adapter| refresh(adapter, ADAPTER_START_TIMEOUT)))).await;
    let mut adapters = node.adapters();
    for Made { config, provider } in made.into_iter().flatten() {
        adapters.install(config, provider);
    }
    adapters.ready(config)
}

/// Makes what a pushed config needs, beside what serves. The answer never comes if the receiver is dropped first; then what
/// was made is stopped again.
///
/// A provider that could not be used already, and of which the push changes nothing, is tried again but refuses nothing: one
/// bad provider must not keep every later change away from a Node.
pub(crate) fn prepare(
    node: &Arc<Inner>,
    config: &NodeConfigPayload,
    in_force: &NodeConfigPayload,
) -> oneshot::Receiver<Result<Prepared, Refused>> {
    let (mut answer, receiver) = oneshot::channel();
    let plan = node.adapters().plan(config);
    if let Some(provider) = plan.duplicates.first() {
        let refused = unusable(&provider.provider_id, "its adapter key is taken by another provider");
        // Nobody is there to be told if this fails.
        let _ = answer.send(Err(refused));
        return receiver;
    }
    let known: Vec<_> = in_force.providers.iter().filter(|provider| plan.build.contains(provider)).cloned().collect();
    let owner = Arc::clone(node);
    node.background.spawn(async move {
        let node = &owner;
        let mut makes: FuturesUnordered<_> = plan.build.into_iter().map(|config| make(node, config)).collect();
        let mut made = Vec::new();
        let mut refused = None;
        while refused.is_none() {
            let next = tokio::select! {
                () = answer.closed() => break,
                next = makes.next() => next,
            };
            match next {
                None => break,
                Some(Ok(instance)) => made.push(instance),
                Some(Err((config, problem))) if known.contains(&config) => left_out(&config, &problem),
                Some(Err((config, problem))) => refused = Some(unusable(&config.provider_id, &problem)),
            }
        }
        drop(makes);
        let outcome = match refused {
            None if answer.is_closed() => Err(Prepared(made)),
            None => answer.send(Ok(Prepared(made))).map_err(Result::unwrap_or_default),
            Some(refused) => {
                let _ = answer.send(Err(refused));
                Err(Prepared(made))
            }
        };
        if let Err(unused) = outcome {
            discard(node, unused).await;
        }
    });
    receiver
}

/// Changes places in one step: unchanged instances stay with all they run, new ones serve, and what leaves takes no new work.
/// Gives what the providers offer now.
pub(crate) fn swap(node: &Arc<Inner>, config: &NodeConfigPayload, prepared: Prepared) -> Vec<ProviderReady> {
    let mut adapters = node.adapters();
    let gone = adapters.leave(config);
    for Made { config, provider } in prepared.0 {
        adapters.install(config, provider);
    }
    let offers = adapters.ready(config);
    drop(adapters);
    retire(node, gone);
    offers
}

/// Stops instances once nothing of what they ran is at work any more.
fn retire(node: &Arc<Inner>, adapters: Vec<Arc<Adapter>>) {
    for adapter in adapters {
        let owner = Arc::clone(node);
        node.background.spawn(async move {
            adapter.gate().idle().await;
            tracing::info!(provider = %adapter.provider_id(), "adapter that left the config has finished");
            stop_all(&owner, vec![adapter]).await;
        });
    }
}

/// Stops instances that have nothing at work, side by side, each within its time.
pub(crate) async fn stop_all(node: &Inner, adapters: Vec<Arc<Adapter>>) {
    let last: Vec<_> = adapters.into_iter().filter(|adapter| node.adapters().left(adapter)).collect();
    join_all(last.iter().map(|adapter| stop(adapter.provider_id(), adapter.provider()))).await;
}

async fn stop(id: &ProviderId, provider: &Arc<dyn Provider>) {
    let stopped = AssertUnwindSafe(timeout(ADAPTER_STOP_TIMEOUT, provider.stop())).catch_unwind().await;
    if !matches!(stopped, Ok(Ok(()))) {
        tracing::warn!(provider = %id, "the adapter did not stop in time, or panicked");
    }
}

/// Stops what was made and will not be used.
pub(crate) async fn discard(node: &Inner, unused: Prepared) {
    let unused: Vec<_> = unused.0.into_iter().filter(|made| !node.adapters().uses(&made.provider)).collect();
    join_all(unused.iter().map(|made| stop(&made.config.provider_id, &made.provider))).await;
}

/// Lets an instance ask its backend again.
async fn refresh(adapter: &Arc<Adapter>, within: Duration) -> Refreshed {
    let asked = AssertUnwindSafe(timeout(within, adapter.provider().refresh())).catch_unwind().await;
    match asked {
        Ok(Ok(refreshed)) => refreshed,
        Ok(Err(_)) => {
            tracing::warn!(provider = %adapter.provider_id(), "the adapter did not refresh in time");
            Refreshed::Silent
        }
        Err(_) => {
            tracing::error!(provider = %adapter.provider_id(), "the adapter panicked when it was to ask its backend");
            Refreshed::Silent
        }
    }
}

/// Asks a backend again; true if it answered and lists something.
pub(crate) async fn ask(adapter: Arc<Adapter>) -> bool {
    refresh(&adapter, REFRESH_TIMEOUT).await == Refreshed::Answered && adapter.lists_something()
}

async fn make_or_tell(node: &Inner, config: ProviderConfig) -> Option<Made> {
    make(node, config).await.map_err(|(config, problem)| left_out(&config, &problem)).ok()
}

fn left_out(config: &ProviderConfig, problem: &str) {
    tracing::error!(
        provider = %config.provider_id, adapter = %config.adapter, kind = config.kind, problem, "provider left out"
    );
}

fn unusable(id: &ProviderId, problem: &str) -> Refused {
    format!("provider `{id}` can't be used: {problem}").into()
}

async fn make(node: &Inner, config: ProviderConfig) -> Result<Made, (ProviderConfig, String)> {
    let made = AssertUnwindSafe(timeout(ADAPTER_START_TIMEOUT, build_and_start(node, &config))).catch_unwind().await;
    let problem = match made {
        Ok(Ok(Ok(provider))) => {
            tracing::info!(provider = %config.provider_id, adapter = %config.adapter, kind = config.kind, "adapter started");
            return Ok(Made { config, provider });
        }
        Ok(Ok(Err(error))) => error.to_string(),
        Ok(Err(_)) => "it did not start in time".to_owned(),
        Err(_) => "it panicked while it started".to_owned(),
    };
    Err((config, problem))
}

async fn build_and_start(node: &Inner, config: &ProviderConfig) -> Result<Arc<dyn Provider>, AdapterBuildError> {
    if !config.base_url.is_empty() {
        node.upstream.check(&config.base_url).map_err(|refused| AdapterBuildError::config(refused.to_string()))?;
    }
    let custom = if config.kind == CUSTOM_KIND { config.adapter.as_str() } else { &config.kind };
    let provider = match node.custom.get(custom) {
        Some(provider) => Arc::clone(provider),
        None if config.kind == CUSTOM_KIND => {
            return Err(AdapterBuildError::config("the program registered no provider under this adapter key"));
        }
        None => node.factory.build(config).await?,
    };
    if config.credential.is_some() {
        if !config.auth.is_empty() {
            return Err(AdapterBuildError::auth("a provider has a key of its own or a credential slot, not both"));
        }
        let capabilities = crate::adapters::capabilities(&config.provider_id, &provider);
        if !capabilities.is_some_and(|capabilities| capabilities.credentials) {
            let problem = "an adapter of this kind can't be called with a credential slot: use openai_compat";
            return Err(AdapterBuildError::config(problem));
        }
    }
    // A provider of the program that serves already, under another config, is started once.
    if !node.adapters().uses(&provider) {
        provider.start().await.map_err(|error| AdapterBuildError::config(error.to_string()))?;
    }
    Ok(provider)
}
