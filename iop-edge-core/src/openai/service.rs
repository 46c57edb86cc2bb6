//! Decides who answers a request: authentication first, then the route; and what every answer carries.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use iop_execution::RunId;
use tower_service::Service;

use super::auth::Denied;
use super::body::OpenAiBody;
use super::chat::{self, refuse};
use super::config::OpenAiConfig;
use super::errors::{ApiError, Dialect};
use super::kind::Kind;
use super::limits;
use super::models;
use super::record::{Endpoint, Recorder, RequestId};
use super::routes::{Route, resolve};
use super::upload;
use crate::api::Engine;
use crate::rate_limit::RateLimiter;

/// The OpenAI API of an engine as a [`Service`]. Cheap to clone; one for all connections.
///
/// It opens no socket and spawns no task. It must be called inside a tokio runtime with time enabled. Client connections,
/// TLS, header limits, and cutting a client that reads nothing are the server's business.
///
/// Dropping a response future or a response body cancels the run behind it.
#[derive(Debug, Clone)]
pub struct OpenAiService {
    engine: Arc<dyn Engine>,
    // Locked for as long as a pointer is copied, once per request.
    config: Arc<RwLock<Arc<OpenAiConfig>>>,
    limiter: Arc<RateLimiter>,
}

impl OpenAiService {
    /// The API of `engine`.
    #[must_use]
    pub fn new(engine: Arc<dyn Engine>, config: OpenAiConfig) -> Self {
        let limiter = Arc::<RateLimiter>::default();
        limiter.configure(config.keys.limits());
        Self { engine, config: Arc::new(RwLock::new(Arc::new(config))), limiter }
    }

    /// Replaces the settings of this service and its clones. A request keeps those it began with (CFG-2); a key that stays
    /// keeps what it has used of its limits.
    pub fn replace_config(&self, config: OpenAiConfig) {
        let config = Arc::new(config);
        let mut in_force = self.config.write().unwrap_or_else(PoisonError::into_inner);
        // Under the lock, so that of two replacements the keys and the counts are those of one.
        self.limiter.configure(config.keys.limits());
        *in_force = config;
    }

    /// What keys use, and have used of their limits.
    #[must_use]
    pub fn limiter(&self) -> &RateLimiter {
        &self.limiter
    }

    /// The settings that a request which comes now begins with.
    #[must_use]
    pub fn config(&self) -> Arc<OpenAiConfig> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Answers one request.
    ///
    /// Cancel safety: dropping the future withdraws the request or cancels its run.
    pub async fn answer<B>(&self, request: Request<B>) -> Response<OpenAiBody>
    where
        B: Body<Data = Bytes>,
    {
        let config = self.config();
        if config.cors.is_closed() {
            return self.answer_with(config, request).await;
        }
        let asked = request.headers().clone();
        let mut response = self.answer_with(Arc::clone(&config), request).await;
        config.cors.mark(&asked, response.headers_mut());
        response
    }

    async fn answer_with<B>(&self, config: Arc<OpenAiConfig>, request: Request<B>) -> Response<OpenAiBody>
    where
        B: Body<Data = Bytes>,
    {
        let (head, body) = request.into_parts();
        let route = resolve(&head.method, head.uri.path());
        let id = fresh_id();
        let (endpoint, asked) = match route {
            Route::Health => return marked(alive(), id, 0),
            Route::Ready => return marked(self.readiness(), id, 0),
            Route::Options(allow) => {
                recorder(&config, id, Endpoint::Other).completed(StatusCode::NO_CONTENT);
                return marked(options(allow), id, 0);
            }
            Route::WrongMethod(allow) => (Endpoint::Other, Err(ApiError::method_not_allowed(allow))),
            Route::Unsupported => (Endpoint::Other, Err(ApiError::not_supported())),
            Route::Unknown => (Endpoint::Other, Err(ApiError::unknown_url())),
            Route::Ask(kind) => (kind.endpoint(), Ok(Asked::Provider(kind))),
            Route::Models => (Endpoint::Models, Ok(Asked::Models)),
            Route::Model(name) => (Endpoint::Models, Ok(Asked::Model(name))),
        };
        let mut recorder = recorder(&config, id, endpoint);
        let arrived = recorder.arrived();
        // Before the body is read.
        let caller = || {
            config.keys.authenticate(&head.headers, (config.unix_time)()).map_err(|denied| match denied {
                Denied::Unknown => ApiError::unauthorized(),
                Denied::Expired => ApiError::key_expired(),
            })
        };
        let response = match asked.and_then(|asked| Ok((asked, caller()?))) {
            Err(error) => {
                upload::discard(&head.headers, body).await;
                refuse(&error, recorder)
            }
            Ok((asked, caller)) => {
                recorder.caller(caller.principal.clone());
                let engine = Arc::clone(&self.engine);
                match asked {
                    Asked::Provider(kind) => {
                        let meter = caller.key.as_ref().and_then(|key| self.limiter.meter(key));
                        let mut response = match meter.as_ref().map(|meter| meter.admit(arrived)).transpose() {
                            Err(refusal) => {
                                upload::discard(&head.headers, body).await;
                                refuse(&ApiError::rate_limited(&refusal), recorder)
                            }
                            Ok(permit) => {
                                permit.into_iter().for_each(|permit| recorder.limited(permit));
                                Box::pin(chat::serve(kind, engine, config, caller, head, body, recorder)).await
                            }
                        };
                        if let Some(meter) = meter {
                            limits::tell(response.headers_mut(), &meter.standings(super::record::now()));
                        }
                        response
                    }
                    Asked::Models => found(Ok(models::list(&*engine, &config, &caller)), recorder),
                    Asked::Model(Some(name)) => found(models::one(&*engine, &config, &caller, &name), recorder),
                    Asked::Model(None) => refuse(&ApiError::model_not_found(""), recorder),
                }
            }
        };
        let spent = super::record::now().saturating_duration_since(arrived);
        marked(response, id, u64::try_from(spent.as_millis()).unwrap_or(u64::MAX))
    }

    fn readiness(&self) -> Response<OpenAiBody> {
        if self.engine.is_ready() { alive() } else { ApiError::not_ready().to_response(Dialect::OpenAi) }
    }
}

fn recorder(config: &OpenAiConfig, id: RequestId, endpoint: Endpoint) -> Recorder {
    Recorder::new(Arc::clone(&config.observer), id, endpoint)
}

/// What needs a caller.
enum Asked {
    Provider(Kind),
    Models,
    Model(Option<String>),
}

fn found(answer: Result<Response<OpenAiBody>, ApiError>, mut recorder: Recorder) -> Response<OpenAiBody> {
    match answer {
        Ok(response) => {
            recorder.completed(StatusCode::OK);
            response
        }
        Err(error) => refuse(&error, recorder),
    }
}

fn alive() -> Response<OpenAiBody> {
    let mut response = Response::new(OpenAiBody::full(&br#"{"status":"ok"}"#[..]));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl<B> Service<Request<B>> for OpenAiService
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    type Response = Response<OpenAiBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<OpenAiBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(service.answer(request).await) })
    }
}

/// What every answer carries (API-5).
fn marked(mut response: Response<OpenAiBody>, id: RequestId, spent_ms: u64) -> Response<OpenAiBody> {
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::try_from(id.to_string()) {
        headers.insert("x-request-id", id);
    }
    headers.insert("x-iop-edge", HeaderValue::from_static("1"));
    headers.insert("openai-processing-ms", HeaderValue::from(spent_ms));
    response
}

fn options(allow: &'static str) -> Response<OpenAiBody> {
    let mut response = Response::new(OpenAiBody::full(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
    response
}

/// An id of our own, whatever the client calls its request.
fn fresh_id() -> RequestId {
    static SPARE: AtomicU64 = AtomicU64::new(0);
    RequestId(RunId::generate().unwrap_or_else(|_| {
        // Without randomness ids are at least unique in this process.
        RunId::from_bytes(u128::from(SPARE.fetch_add(1, Ordering::Relaxed)).to_be_bytes())
    }))
}
