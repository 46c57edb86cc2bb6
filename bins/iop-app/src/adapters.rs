//! Decides which adapter runs which kind of backend.

use std::sync::Arc;
use std::time::Duration;

use iop_adapters::auth::AuthReference;
use iop_adapters::{Demo, DemoPace, OpenAiCompat, OpenAiCompatConfig, Server};
use iop_execution::Provider;
use iop_node_core::{AdapterBuildError, AdapterFactory};
use iop_wire::{AdapterInventory, ProviderConfig};

#[cfg(test)]
mod tests;

/// Kinds without an adapter of their own yet: each speaks OpenAI's API under `/v1`, and `openai_compat` runs it.
const THROUGH_OPENAI_COMPAT: [&str; 3] = ["sglang", "lm_studio", "ollama"];

/// The port that a backend of that kind usually listens on.
#[must_use]
pub fn usual_port(kind: &str) -> u16 {
    match kind {
        "ollama" => 11434,
        "llama_cpp" => 8080,
        "lm_studio" => 1234,
        "sglang" => 30000,
        _ => 8000,
    }
}

/// Makes the adapters that are built in.
#[derive(Debug, Clone, Copy, Default)]
pub struct BuiltIn {
    /// Pace of the demo model.
    pub demo_pace: DemoPace,
}

#[iop_execution::async_trait]
impl AdapterFactory for BuiltIn {
    async fn build(&self, config: &ProviderConfig) -> Result<Arc<dyn Provider>, AdapterBuildError> {
        match config.kind.as_str() {
            "demo" => Ok(Arc::new(Demo::new(self.demo_pace))),
            "openai_compat" => openai_compat(config, Server::Any),
            "llama_cpp" => openai_compat(config, Server::LlamaCpp),
            "vllm" => openai_compat(config, Server::Vllm),
            kind if THROUGH_OPENAI_COMPAT.contains(&kind) => {
                tracing::info!(provider = %config.provider_id, kind, "no adapter of its own yet: served through openai_compat");
                openai_compat(config, Server::Any)
            }
            kind => Err(AdapterBuildError::UnknownKind(kind.to_owned())),
        }
    }

    fn inventory(&self) -> Vec<AdapterInventory> {
        let kinds = iop_adapters::kinds().iter().chain(&THROUGH_OPENAI_COMPAT);
        kinds
            .map(|kind| AdapterInventory { kind: (*kind).to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
            .collect()
    }
}

fn openai_compat(config: &ProviderConfig, server: Server) -> Result<Arc<dyn Provider>, AdapterBuildError> {
    let auth = match config.auth.as_str() {
        "" => None,
        text => Some(AuthReference::parse(text).map_err(|error| AdapterBuildError::auth(error.to_string()))?),
    };
    let mut settings = OpenAiCompatConfig::new(&config.base_url).with_auth(auth).with_server(server);
    if config.terminal_linger_ms > 0 {
        settings.terminal_linger = Duration::from_millis(config.terminal_linger_ms);
    }
    let adapter = OpenAiCompat::new(settings).map_err(|error| {
        let cause =
            std::error::Error::source(&error).map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"));
        AdapterBuildError::config(cause)
    })?;
    Ok(Arc::new(adapter))
}
