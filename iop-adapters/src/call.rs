//! Decides what every adapter of an HTTP backend makes of a call that gives no answer, and of one whose caller has left.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode};
use iop_execution::complaint::retry_after_ms;
use iop_execution::failure::{FailureCode, FailureStage, ProviderContacted};
use iop_execution::{CallCredential, ExecutionFailure, Fenced, ProviderError, RequestBody};

use crate::auth::Bearer;
use crate::complaint;
use crate::echo;
use crate::http::{Upstream, UpstreamBody, UpstreamError, UpstreamRequest, UpstreamResponse};
use crate::rules;

/// How long the body of an error answer is waited for.
const ERROR_BODY_WAIT: Duration = Duration::from_secs(2);

/// Why a call gave no answer; with the server's own error answer, where that may be shown.
pub(crate) struct Refusal {
    pub(crate) error: ProviderError,
    pub(crate) answer: Option<(StatusCode, Bytes)>,
}

impl From<ProviderError> for Refusal {
    fn from(error: ProviderError) -> Self {
        Self { error, answer: None }
    }
}

impl From<Refusal> for ProviderError {
    fn from(refusal: Refusal) -> Self {
        refusal.error
    }
}

/// What a call is made with.
#[derive(Clone, Copy)]
pub(crate) enum Key<'a> {
    /// What the adapter has itself, if anything.
    Own(Option<&'a Bearer>),
    /// What was lent for this call; without it there is no call.
    Lent(Option<&'a CallCredential>),
}

impl<'a> Key<'a> {
    /// The header to set; an error when what should have been lent is not there.
    fn header(self) -> Result<Option<(&'a HeaderName, &'a HeaderValue)>, ProviderError> {
        match self {
            Self::Own(bearer) => Ok(bearer.map(|bearer| (&AUTHORIZATION, bearer.header()))),
            Self::Lent(Some(lent)) => Ok(Some((lent.name(), lent.expose()))),
            Self::Lent(None) => Err(no_call("the call came without the credential it needs")),
        }
    }
}

/// A call brought a key to an adapter that takes none.
pub(crate) fn not_lent() -> ProviderError {
    no_call("the call came with a credential, and the adapter takes none")
}

fn no_call(message: &'static str) -> ProviderError {
    let (code, stage) = (FailureCode::CredentialRejected, FailureStage::Credential);
    ProviderError::new(ExecutionFailure::new(code, stage, ProviderContacted::No, message))
}

/// Sends one request and answers what is no HTTP error.
pub(crate) async fn call(
    upstream: &dyn Upstream,
    key: Key<'_>,
    mut request: UpstreamRequest,
) -> Result<UpstreamResponse, Refusal> {
    let key = key.header()?;
    if let Some((name, value)) = key {
        request.headers.insert(name, value.clone());
    }
    let response = upstream.send(request).await.map_err(|error| failed(error, FailureStage::Prefill))?;
    let status = response.status;
    let encoded = rules::is_encoded(&response.headers);
    if status.is_success() {
        return if encoded {
            let message = "the provider compressed its answer although it was told not to";
            Err(in_prefill(ProviderError::protocol(message)).into())
        } else {
            Ok(response)
        };
    }
    let retry_after = retry_after_ms(&response.headers);
    let wait = read_up_to(response.body, complaint::MAX_ERROR_BODY);
    // A compressed error text says nothing, but its status does.
    let body = if encoded { Vec::new() } else { tokio::time::timeout(ERROR_BODY_WAIT, wait).await.unwrap_or_default() };
    let error = complaint::rejected(status.as_u16(), &body, retry_after);
    // What a server says about its own credential may hold a piece of it.
    let about_key = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
        || key.is_some_and(|(_, value)| echo::repeats(&body, value));
    let body = if about_key { Bytes::new() } else { Bytes::from(body) };
    Err(Refusal { error, answer: Some((status, body)) })
}

/// How a question to a backend got no status.
pub(crate) enum NoAnswer {
    /// Nobody listens there.
    Refused,
    /// Anything else.
    Broken,
}

/// What a backend answered to a question.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Vec<u8>,
}

/// Asks a backend about itself and reads up to `limit` bytes of its answer, whatever its status.
pub(crate) async fn ask(
    upstream: &dyn Upstream,
    bearer: Option<&Bearer>,
    method: Method,
    path: &'static str,
    body: Bytes,
    limit: usize,
) -> Result<Answer, NoAnswer> {
    let mut headers = HeaderMap::new();
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    if method == Method::POST {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    if let Some(bearer) = bearer {
        headers.insert(AUTHORIZATION, bearer.header().clone());
    }
    let request = UpstreamRequest { method, path, headers, body: RequestBody::full(body) };
    match upstream.send(request).await {
        Ok(response) => {
            let status = response.status;
            Ok(Answer { status, body: read_up_to(response.body, limit).await })
        }
        Err(error) if error.is_refused() => Err(NoAnswer::Refused),
        Err(_) => Err(NoAnswer::Broken),
    }
}

/// The beginning of a body; a body that breaks off counts as far as it came.
pub(crate) async fn read_up_to(mut body: UpstreamBody, limit: usize) -> Vec<u8> {
    let mut read = Vec::new();
    while let Some(Ok(bytes)) = body.next().await {
        read.extend_from_slice(bytes.get(..limit - read.len()).unwrap_or(&bytes));
        if read.len() == limit {
            break;
        }
    }
    read
}

pub(crate) fn failed(error: UpstreamError, stage: FailureStage) -> ProviderError {
    match error {
        UpstreamError::Connect(source) => ProviderError::unreachable().with_source(source),
        UpstreamError::Broken(source) => ProviderError::broken(stage).with_source(source),
        UpstreamError::RequestBody => ProviderError::new(ExecutionFailure::new(
            FailureCode::InvalidRequest,
            FailureStage::Connect,
            ProviderContacted::Unknown,
            "the request body broke off",
        )),
    }
}

/// The same error, but before the first output.
pub(crate) fn in_prefill(error: ProviderError) -> ProviderError {
    let mut failure = error.into_failure();
    failure.stage = FailureStage::Prefill;
    ProviderError::new(failure)
}

/// What kind of body an answer says it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Media {
    Events,
    Html,
    Json,
    Other,
}

pub(crate) fn media(headers: &HeaderMap) -> Media {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match kind.as_str() {
        "text/event-stream" => Media::Events,
        "text/html" | "application/xhtml+xml" => Media::Html,
        "application/json" => Media::Json,
        other if other.ends_with("+json") => Media::Json,
        _ => Media::Other,
    }
}

/// Runs a call until it ends or the run is cancelled, which drops the call and with it the connection.
pub(crate) async fn unless_cancelled<T>(
    cancelled: impl Future<Output = ()> + Send,
    call: impl Future<Output = Result<T, ProviderError>> + Send,
) -> Result<T, ProviderError> {
    match select(std::pin::pin!(cancelled), std::pin::pin!(call)).await {
        Either::Left(((), _)) => Err(Fenced.into()),
        Either::Right((outcome, _)) => outcome,
    }
}
