//! Decides how a config is put into force: what left it is stopped, what is new is made and started, the rest stays.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use iop_execution::Provider;
use iop_wire::{CancelPolicy, NodeConfigPayload, ProviderConfig, ProviderReady};
use tokio::time::timeout;

use crate::adapters::Adapter;
use crate::factory::{AdapterBuildError, CUSTOM_KIND};
use crate::node::Inner;
use crate::state::handshake::ADAPTER_START_TIMEOUT;

/// Longest time one adapter may take to stop.
const ADAPTER_STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Puts a config into force and gives what NodeReadyRequest says. A provider that can't be used is left out, and the log
/// says why.
///
/// Cancel safety: dropped, it may leave new instances out; the next call puts that right.
pub(crate) async fn apply(node: &Inner, config: &NodeConfigPayload) -> Vec<ProviderReady> {
    let change = node.adapters().change_to(config);
    for provider in &change.duplicates {
        tracing::error!(
            provider = %provider.provider_id, adapter = %provider.adapter,
            "provider left out: its adapter key is taken by another one"
        );
    }
    // No run of an older connection is left, so nothing that is stopped here is in use.
    stop_all(change.stop).await;
    let kept = node.adapters().all();
    let (made, _) =
        join(join_all(change.build.into_iter().map(|config| make(node, config))), join_all(kept.iter().map(refresh)))
            .await;
    let mut adapters = node.adapters();
    for (config, provider) in made.into_iter().flatten() {
        adapters.install(config, provider);
    }
    adapters.ready(config)
}

/// Stops instances side by side, each within its time.
pub(crate) async fn stop_all(adapters: Vec<Arc<Adapter>>) {
    join_all(adapters.iter().map(|adapter| async move {
        let stopped = AssertUnwindSafe(timeout(ADAPTER_STOP_TIMEOUT, adapter.provider().stop())).catch_unwind().await;
        if !matches!(stopped, Ok(Ok(()))) {
            tracing::warn!(provider = %adapter.provider_id(), "the adapter did not stop in time, or panicked");
        }
    }))
    .await;
}

/// Lets an instance that stays ask its backend again.
async fn refresh(adapter: &Arc<Adapter>) {
    let asked = AssertUnwindSafe(timeout(ADAPTER_START_TIMEOUT, adapter.provider().refresh())).catch_unwind().await;
    if !matches!(asked, Ok(Ok(()))) {
        tracing::warn!(provider = %adapter.provider_id(), "the adapter did not refresh in time, or panicked");
    }
}

async fn make(node: &Inner, config: ProviderConfig) -> Option<(ProviderConfig, Arc<dyn Provider>)> {
    let made = AssertUnwindSafe(timeout(ADAPTER_START_TIMEOUT, build_and_start(node, &config))).catch_unwind().await;
    let problem = match made {
        Ok(Ok(Ok(provider))) => {
            tracing::info!(provider = %config.provider_id, adapter = %config.adapter, kind = config.kind, "adapter started");
            return Some((config, provider));
        }
        Ok(Ok(Err(error))) => error.to_string(),
        Ok(Err(_)) => "it did not start in time".to_owned(),
        Err(_) => "it panicked while it started".to_owned(),
    };
    tracing::error!(
        provider = %config.provider_id, adapter = %config.adapter, kind = config.kind, problem, "provider left out"
    );
    None
}

async fn build_and_start(node: &Inner, config: &ProviderConfig) -> Result<Arc<dyn Provider>, AdapterBuildError> {
    if config.cancel_policy == CancelPolicy::Drain {
        // Refused, not taken for `abort`: whoever asks for it has an engine that crashes on aborts.
        return Err(AdapterBuildError::config("the cancel policy `drain` is not supported yet"));
    }
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
    provider.start().await.map_err(|error| AdapterBuildError::config(error.to_string()))?;
    Ok(provider)
}
