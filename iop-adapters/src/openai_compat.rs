//! Decides how a server that speaks OpenAI chat completions becomes a provider: by tunnel, and by normalised run.
//!
//! One call makes one request. The bytes of a tunnel pass unchanged, an error answer's too (the Edge shows only safe text of
//! it); the failure itself is typed and holds no word of the provider's own text.

mod choices;
mod discovery;
mod edit;
mod probe;
mod run;
mod tool_calls;
mod tunnel;

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Method};
use iop_execution::{
    CallCredential, Capabilities, Completion, EventSink, HeadSink, Health, Provider, ProviderError, Refreshed,
    RequestBody, RunRequest, Target, TunnelEnd, TunnelRequest,
};

pub use self::discovery::{DISCOVERY_TIMEOUT, Discovery, MAX_TARGETS};
use crate::auth::{AuthReference, Bearer};
use crate::call::{Key, Media, Refusal, call, failed, in_prefill, media, not_lent, read_up_to, unless_cancelled};
use crate::heard::{Heard, LastHeard};
use crate::http::{HttpClient, Origin, Upstream, UpstreamRequest, UpstreamResponse};
use crate::setup::SetupError;

/// Default of [`OpenAiCompatConfig::terminal_linger`].
pub const TERMINAL_LINGER: Duration = Duration::from_millis(2_000);

/// How to reach one server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenAiCompatConfig {
    /// Its base URL, `http` or `https`, with or without `/v1`.
    pub base_url: String,
    /// Where its key is to be found; none by default.
    pub auth: Option<AuthReference>,
    /// How long usage and `[DONE]` are waited for after the last finish reason; 2 s by default.
    pub terminal_linger: Duration,
    /// How many calls it takes at once; by default what the server says.
    pub max_concurrency: Option<NonZeroU32>,
    /// Which server it is; [`Server::Any`] by default.
    pub server: Server,
    /// Whether a probe of a server of unknown kind may generate a token. By default only on this machine and in a private
    /// network (the host is an address of one, or `localhost`): elsewhere it may cost money.
    pub free_tokens: Option<bool>,
    /// Its key comes with each call: no call is made without, so that it is neither asked for its models nor probed. Off by
    /// default: then the adapter takes no lent key, and refuses a call that brings one.
    pub lent_key: bool,
}

/// Which server speaks OpenAI's API. They are all called alike; the kind says how one is probed (ADP-2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_enums, reason = "each kind needs its own probe")]
pub enum Server {
    /// Nothing is known of it.
    #[default]
    Any,
    /// llama.cpp's `llama-server`.
    LlamaCpp,
    /// LM Studio.
    LmStudio,
    /// SGLang.
    Sglang,
    /// vLLM.
    Vllm,
}

impl OpenAiCompatConfig {
    /// Defaults for a server at this base URL.
    #[must_use]
    pub fn new(base_url: impl Into<String>) -> Self {
        Self {
            base_url: base_url.into(),
            auth: None,
            terminal_linger: TERMINAL_LINGER,
            max_concurrency: None,
            server: Server::Any,
            free_tokens: None,
            lent_key: false,
        }
    }

    /// For this kind of server.
    #[must_use]
    pub const fn with_server(mut self, server: Server) -> Self {
        self.server = server;
        self
    }

    /// With a key that comes with each call.
    #[must_use]
    pub const fn with_lent_key(mut self, lent: bool) -> Self {
        self.lent_key = lent;
        self
    }

    /// With this key reference.
    #[must_use]
    pub fn with_auth(mut self, auth: Option<AuthReference>) -> Self {
        self.auth = auth;
        self
    }
}

/// A server that speaks OpenAI chat completions.
#[derive(Debug)]
pub struct OpenAiCompat {
    upstream: Arc<dyn Upstream>,
    bearer: Option<Bearer>,
    terminal_linger: Duration,
    max_concurrency: Option<NonZeroU32>,
    server: Server,
    free_tokens: bool,
    lent_key: bool,
    found: Mutex<Arc<Discovery>>,
    last: LastHeard,
}

impl OpenAiCompat {
    /// Sets the adapter up and reads its key; connects to nothing yet.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(config: OpenAiCompatConfig) -> Result<Self, SetupError> {
        let upstream = Arc::new(HttpClient::new(Origin::parse(&config.base_url)?)?);
        Self::with_upstream(config, upstream)
    }

    /// The same over another way to reach the server; the base URL only says whether its tokens are free.
    ///
    /// # Errors
    /// [`SetupError::Auth`].
    pub fn with_upstream(config: OpenAiCompatConfig, upstream: Arc<dyn Upstream>) -> Result<Self, SetupError> {
        let bearer = config.auth.as_ref().map(AuthReference::resolve).transpose()?;
        let own = || Origin::parse(&config.base_url).is_ok_and(|origin| origin.is_private());
        Ok(Self {
            upstream,
            bearer,
            terminal_linger: config.terminal_linger,
            max_concurrency: config.max_concurrency,
            server: config.server,
            free_tokens: config.free_tokens.unwrap_or_else(own),
            lent_key: config.lent_key,
            found: Mutex::new(Arc::default()),
            last: LastHeard::default(),
        })
    }

    /// What the last discovery found; nothing before the first.
    #[must_use]
    pub fn found(&self) -> Arc<Discovery> {
        Arc::clone(&self.found.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks the server which models it has, and remembers the answer. An unsuccessful call leaves the last answer in force:
    /// a server that is down, restarting or too busy to answer has not lost its models (ADP-5).
    ///
    /// Takes at most a few seconds.
    ///
    /// # Errors
    /// The server can't be reached, refuses, or answers with something else.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn discover(&self) -> Result<Arc<Discovery>, ProviderError> {
        let found = Arc::new(discovery::discover(self).await?);
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&found);
        Ok(found)
    }

    /// Sends one request and answers what is no HTTP error.
    async fn call(
        &self,
        method: Method,
        path: &'static str,
        headers: HeaderMap,
        body: RequestBody,
        lent: Option<&CallCredential>,
    ) -> Result<UpstreamResponse, Refusal> {
        let request = UpstreamRequest { method, path, headers, body };
        // A key that came all the same is not what this adapter was set up for: no other takes its place (CRD-5).
        let key = match lent {
            Some(_) if !self.lent_key => return Err(not_lent().into()),
            lent if self.lent_key => Key::Lent(lent),
            _ => Key::Own(self.bearer.as_ref()),
        };
        call(self.upstream.as_ref(), key, request).await
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Provider for OpenAiCompat {
    fn capabilities(&self) -> Capabilities {
        let found = self.found();
        let mut capabilities = Capabilities::runs_only()
            .with_tunnels()
            .with_features(true, true)
            .with_max_concurrency(self.max_concurrency.or(found.slots))
            .with_targets(found.targets.clone());
        capabilities.credentials = self.lent_key;
        capabilities.embeddings = true;
        capabilities.messages = found.messages == Some(true);
        capabilities
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        unless_cancelled(sink.cancelled(), run::execute(self, run, sink)).await
    }

    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        unless_cancelled(head.cancelled(), tunnel::relay(self, request, head)).await
    }

    async fn probe_health(&self, target: &Target) -> Health {
        if self.lent_key {
            return Health::Unknown;
        }
        probe::probe(self, target).await
    }

    async fn command(
        &self,
        command: iop_execution::ProviderCommand,
    ) -> Result<iop_execution::CommandOutput, ProviderError> {
        drop(command);
        Err(ProviderError::unsupported("this adapter has no commands"))
    }

    async fn start(&self) -> Result<(), ProviderError> {
        // A server that is down, or still loading, is no error: it is asked again soon.
        let _ = self.refresh().await;
        Ok(())
    }

    async fn refresh(&self) -> Refreshed {
        if self.lent_key {
            return Refreshed::Answered;
        }
        let heard = match self.discover().await {
            Ok(found) if found.is_iop => Heard::Itself,
            Ok(_) => Heard::Models,
            Err(error) => Heard::from(&error),
        };
        self.last.tell(heard, self.found().targets.len())
    }

    async fn stop(&self) {}
}

/// How many choices a request asks for, as far as its bytes are here; 1 when it does not say.
fn asked_choices(body: Option<&Bytes>) -> u32 {
    let Some(body) = body.filter(|body| memchr::memmem::find(body, b"\"n\"").is_some()) else {
        return 1;
    };
    let mut choices = None;
    let read = crate::json::Scanner::new(body).object(|scan, key| {
        if key == b"n" {
            choices = scan.count()?;
            Ok(())
        } else {
            scan.skip()
        }
    });
    read.ok().and(choices).and_then(|choices| u32::try_from(choices).ok()).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests;
