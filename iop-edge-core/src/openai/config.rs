//! Decides what an embedder may set on the OpenAI surface, and every limit of it.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::auth::ApiKeys;
use super::cors::AllowedOrigins;
use super::record::{IgnoreRequests, RequestObserver};
pub use super::recovery::{DEFAULT_EXTRA_ATTEMPTS, LONG_REPLAY_TOKENS, MAX_SNAPSHOT_BYTES};

/// Largest request body, in bytes (image inputs are long).
pub const MAX_BODY_BYTES: usize = 32 << 20;
/// Deepest nesting of a request's JSON.
pub const MAX_JSON_DEPTH: u32 = 64;
/// A buffered answer is held up to here, in bytes; a longer one is released, which is its commit.
pub const MAX_HELD_ANSWER_BYTES: usize = 1 << 20;
/// Largest answer that is not streamed, in bytes.
pub const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Lifecycle frames held before commit, in bytes; more than that is released, which is the commit.
pub const MAX_HELD_LIFECYCLE_BYTES: usize = 256 << 10;
/// Largest event that is put together from parts, in bytes.
pub const MAX_EVENT_BYTES: usize = 4 << 20;
/// Most bytes of a provider's error body that are read.
pub const MAX_PROVIDER_ERROR_BYTES: usize = 64 << 10;
/// Ready events are joined into one write up to this size, in bytes.
pub const JOIN_BYTES: usize = 16 << 10;
/// Longest API key that is looked at, in bytes.
pub const MAX_KEY_BYTES: usize = 256;
/// Longest `Retry-After`, in milliseconds: above 120 s some SDKs don't retry at all.
pub const MAX_RETRY_AFTER_MS: u64 = 60_000;
/// Longest wait between two pieces of a request body.
pub const BODY_IDLE: Duration = Duration::from_secs(30);
/// Longest wait for the next byte that a client can tell by `x-stainless-read-timeout`; a longer one is cut to it.
pub const MAX_CLIENT_IDLE: Duration = Duration::from_secs(24 * 60 * 60);
/// Longest time for a whole request body.
pub const BODY_TOTAL: Duration = Duration::from_secs(120);
/// Most bytes of a refused request's body that are taken in, so that its client can read the refusal.
pub const DISCARD_BYTES: usize = 1 << 20;
/// Longest time for that.
pub const DISCARD_TIME: Duration = Duration::from_secs(1);
/// How long a stream's end waits for the run's own terminal after `[DONE]` was passed on, so that an end is not taken
/// for a cancel.
pub(crate) const DONE_LINGER: Duration = Duration::from_millis(100);
/// How long the rest of a provider's error is awaited once it is known to be one.
pub(crate) const ERROR_LINGER: Duration = Duration::from_secs(2);

/// When a streaming client without content is shown that the Edge is there, by default (REC-8).
pub const KEEPALIVE_AFTER: Duration = Duration::from_secs(20);
/// How often it is shown again: below the idle limit of common load balancers.
pub const KEEPALIVE_EVERY: Duration = Duration::from_secs(15);

/// What `model` says in answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the two settings of API-10")]
pub enum ResponseModel {
    /// The public name the client asked for.
    #[default]
    Requested,
    /// What the provider wrote, untouched.
    Target,
}

/// Settings of the surface.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OpenAiConfig {
    /// Who may call. Default: open.
    pub keys: Arc<ApiKeys>,
    /// Who is told how each request ended. Default: nobody.
    pub observer: Arc<dyn RequestObserver>,
    /// Web pages of other origins that may read answers. Default: none.
    pub cors: AllowedOrigins,
    /// What `model` says in answers. Default: the public name.
    pub response_model: ResponseModel,
    /// Hard deadline of every request (API-14); `x-iop-deadline-ms` of a client can only shorten it. Default: none.
    pub request_deadline: Option<Duration>,
    /// `/v1/models` also lists models that no provider can serve now. Default: false.
    pub list_unavailable: bool,
    /// Largest request body. Default: [`MAX_BODY_BYTES`].
    pub max_body_bytes: usize,
    /// Longest wait between two pieces of a request body. Default: [`BODY_IDLE`].
    pub body_idle: Duration,
    /// Longest time for a whole request body. Default: [`BODY_TOTAL`].
    pub body_total: Duration,
    /// Attempts after the first one of a request, for all causes together. Default: [`DEFAULT_EXTRA_ATTEMPTS`].
    pub max_extra_attempts: u32,
    /// A streaming client without content for this long gets `200` and comments while its request may still be sent again;
    /// zero = never. Default: [`KEEPALIVE_AFTER`].
    pub keepalive_after: Duration,
    /// Unix time in seconds, for `created` of answers that the Edge builds itself. Default: the system's clock.
    pub unix_time: fn() -> u64,
}

impl Default for OpenAiConfig {
    fn default() -> Self {
        Self {
            keys: Arc::new(ApiKeys::open()),
            observer: Arc::new(IgnoreRequests),
            cors: AllowedOrigins::default(),
            response_model: ResponseModel::default(),
            request_deadline: None,
            list_unavailable: false,
            max_body_bytes: MAX_BODY_BYTES,
            body_idle: BODY_IDLE,
            body_total: BODY_TOTAL,
            max_extra_attempts: DEFAULT_EXTRA_ATTEMPTS,
            keepalive_after: KEEPALIVE_AFTER,
            unix_time: system_unix_time,
        }
    }
}

impl OpenAiConfig {
    /// With these keys.
    #[must_use]
    pub fn with_keys(mut self, keys: Arc<ApiKeys>) -> Self {
        self.keys = keys;
        self
    }

    /// With this observer.
    #[must_use]
    pub fn with_observer(mut self, observer: Arc<dyn RequestObserver>) -> Self {
        self.observer = observer;
        self
    }

    /// With `model` in answers as told.
    #[must_use]
    pub const fn with_response_model(mut self, response_model: ResponseModel) -> Self {
        self.response_model = response_model;
        self
    }

    /// With this many attempts after the first, and comments for clients that wait after this time (zero = never).
    #[must_use]
    pub const fn with_recovery(mut self, max_extra_attempts: u32, keepalive_after: Duration) -> Self {
        self.max_extra_attempts = max_extra_attempts;
        self.keepalive_after = keepalive_after;
        self
    }

    /// With this hard deadline; zero is none.
    #[must_use]
    pub fn with_request_deadline(mut self, deadline: Option<Duration>) -> Self {
        self.request_deadline = deadline.filter(|deadline| !deadline.is_zero());
        self
    }
}

fn system_unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
