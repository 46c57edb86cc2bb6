//! Decides how an Ollama server becomes a provider: by normalised run, over Ollama's own API.
//!
//! Its own API and not its `/v1` paths, because those swallow an error in the middle of an answer: the stream just ends.
//! Here an error is a line of its own, a model that is being loaded says so, and the thinking has a field.

mod command;
mod discovery;
mod line;
mod probe;
mod request;
mod run;

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use http::Method;
use iop_execution::{
    Capabilities, CommandOutput, Completion, EventSink, HeadSink, Health, Provider, ProviderCommand, ProviderError,
    Refreshed, RunRequest, Target, TunnelEnd, TunnelRequest,
};

pub use self::discovery::{MAX_TARGETS, Models};
use crate::auth::{AuthReference, Bearer};
use crate::call::{self, Answer, NoAnswer, unless_cancelled};
use crate::heard::{Heard, LastHeard};
use crate::http::{HttpClient, Origin, Upstream};
use crate::setup::SetupError;

/// How to reach one Ollama server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OllamaConfig {
    /// Its base URL, `http` or `https`.
    pub base_url: String,
    /// Where the key of a proxy before it is to be found; none by default: Ollama itself has none.
    pub auth: Option<AuthReference>,
    /// How many calls it takes at once (its `OLLAMA_NUM_PARALLEL`); by default not known, because it does not say.
    pub max_concurrency: Option<NonZeroU32>,
}

impl OllamaConfig {
    /// Defaults for a server at this base URL.
    #[must_use]
    pub fn new(base_url: impl Into<String>) -> Self {
        Self { base_url: base_url.into(), auth: None, max_concurrency: None }
    }

    /// With this key reference.
    #[must_use]
    pub fn with_auth(mut self, auth: Option<AuthReference>) -> Self {
        self.auth = auth;
        self
    }
}

/// An Ollama server.
#[derive(Debug)]
pub struct Ollama {
    upstream: Arc<dyn Upstream>,
    bearer: Option<Bearer>,
    max_concurrency: Option<NonZeroU32>,
    found: Mutex<Arc<Models>>,
    last: LastHeard,
}

impl Ollama {
    /// Sets the adapter up and reads its key; connects to nothing yet.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(config: OllamaConfig) -> Result<Self, SetupError> {
        let upstream = Arc::new(HttpClient::new(Origin::parse(&config.base_url)?)?);
        Self::with_upstream(config, upstream)
    }

    /// The same over another way to reach the server.
    ///
    /// # Errors
    /// [`SetupError::Auth`].
    pub fn with_upstream(config: OllamaConfig, upstream: Arc<dyn Upstream>) -> Result<Self, SetupError> {
        let bearer = config.auth.as_ref().map(AuthReference::resolve).transpose()?;
        Ok(Self {
            upstream,
            bearer,
            max_concurrency: config.max_concurrency,
            found: Mutex::new(Arc::default()),
            last: LastHeard::default(),
        })
    }

    /// What the last discovery found; nothing before the first.
    #[must_use]
    pub fn found(&self) -> Arc<Models> {
        Arc::clone(&self.found.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks the server which models it has, and remembers the answer. An unsuccessful call leaves the last answer in force:
    /// a server that is down or restarting has not lost its models (ADP-5).
    ///
    /// Takes at most a few seconds.
    ///
    /// # Errors
    /// The server can't be reached, refuses, or answers with something else.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn discover(&self) -> Result<Arc<Models>, ProviderError> {
        let found = Arc::new(discovery::discover(self).await?);
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&found);
        Ok(found)
    }

    async fn ask(&self, method: Method, path: &'static str, body: Bytes, limit: usize) -> Result<Answer, NoAnswer> {
        call::ask(self.upstream.as_ref(), self.bearer.as_ref(), method, path, body, limit).await
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Provider for Ollama {
    fn capabilities(&self) -> Capabilities {
        let found = self.found();
        let mut capabilities = Capabilities::runs_only()
            .with_features(found.any_has_tools(), found.any_thinks())
            .with_max_concurrency(self.max_concurrency)
            .with_targets(found.targets());
        capabilities.commands = true;
        capabilities
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        unless_cancelled(sink.cancelled(), run::execute(self, run, sink)).await
    }

    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        drop((request, head));
        Err(ProviderError::unsupported("Ollama's own API is not OpenAI's: this adapter has runs only"))
    }

    async fn probe_health(&self, target: &Target) -> Health {
        probe::probe(self, target).await
    }

    async fn command(&self, command: ProviderCommand) -> Result<CommandOutput, ProviderError> {
        command::command(self, command).await
    }

    async fn start(&self) -> Result<(), ProviderError> {
        // A server that is down is no error: it is asked again soon.
        let _ = self.refresh().await;
        Ok(())
    }

    async fn refresh(&self) -> Refreshed {
        let heard = match self.discover().await {
            Ok(_) => Heard::Models,
            Err(error) => Heard::from(&error),
        };
        self.last.tell(heard, self.found().targets().len())
    }

    async fn stop(&self) {}
}

/// A line is read, or it is none; whatever is read lies in it.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_line(bytes: &[u8]) {
    if let Ok(line) = line::read(bytes) {
        for call in &line.calls {
            // As it is passed on.
            let text = call.arguments.map(String::from_utf8_lossy);
            assert!(text.is_none_or(|text| serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok()));
        }
    }
}

#[cfg(test)]
mod tests;
