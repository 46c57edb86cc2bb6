//! Decides which adapter runs which kind of backend.

use std::sync::Arc;
use std::time::Duration;

use iop_adapters::auth::AuthReference;
use iop_adapters::{Demo, DemoPace, Ollama, OllamaConfig, OpenAiCompat, OpenAiCompatConfig, Server};
use iop_execution::Provider;
use iop_node_core::{AdapterBuildError, AdapterFactory};
use iop_wire::{AdapterInventory, ProviderConfig};

#[cfg(test)]
mod tests;

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
            "lm_studio" => openai_compat(config, Server::LmStudio),
            "ollama" => ollama(config),
            "sglang" => openai_compat(config, Server::Sglang),
            "vllm" => openai_compat(config, Server::Vllm),
            kind => Err(AdapterBuildError::UnknownKind(kind.to_owned())),
        }
    }

    fn inventory(&self) -> Vec<AdapterInventory> {
        iop_adapters::kinds()
            .iter()
            .map(|kind| AdapterInventory { kind: (*kind).to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
            .collect()
    }
}

fn auth(config: &ProviderConfig) -> Result<Option<AuthReference>, AdapterBuildError> {
    match config.auth.as_str() {
        "" => Ok(None),
        text => AuthReference::parse(text).map(Some).map_err(|error| AdapterBuildError::auth(error.to_string())),
    }
}

fn unusable(error: &(dyn std::error::Error + 'static)) -> AdapterBuildError {
    AdapterBuildError::config(error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}")))
}

fn ollama(config: &ProviderConfig) -> Result<Arc<dyn Provider>, AdapterBuildError> {
    let settings = OllamaConfig::new(&config.base_url).with_auth(auth(config)?);
    Ok(Arc::new(Ollama::new(settings).map_err(|error| unusable(&error))?))
}

fn openai_compat(config: &ProviderConfig, server: Server) -> Result<Arc<dyn Provider>, AdapterBuildError> {
    let mut settings = OpenAiCompatConfig::new(&config.base_url).with_auth(auth(config)?).with_server(server);
    settings = settings.with_lent_key(config.credential.is_some());
    if config.terminal_linger_ms > 0 {
        settings.terminal_linger = Duration::from_millis(config.terminal_linger_ms);
    }
    Ok(Arc::new(OpenAiCompat::new(settings).map_err(|error| unusable(&error))?))
}
