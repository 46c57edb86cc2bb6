//! Decides how a failure looks to a client: status, type, code, headers, and one exact error object.

use std::borrow::Cow;

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Response, StatusCode};
use iop_execution::failure::ProviderReason;
use iop_execution::{CancelReason, ExecutionFailure, FailureCode, ProviderContacted};
use serde::Serialize;

use super::body::OpenAiBody;
use super::config::MAX_RETRY_AFTER_MS;
use super::record::EndedBy;
use super::recovery::Cause;
use crate::api::SubmitError;
use crate::catalog::RetryCause;
use crate::rate_limit::{RateKind, RateRefusal};

const INVALID_REQUEST: &str = "invalid_request_error";
const RATE_LIMIT: &str = "rate_limit_error";
const SERVER: &str = "server_error";

/// Wait suggested when nobody knows better, in milliseconds.
const DEFAULT_RETRY_MS: u64 = 1_000;
/// Wait suggested while no provider is there: a Node needs about that long to come back.
const ABSENT_RETRY_MS: u64 = 5_000;

/// An error as a client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<&'static str>,
    message: Cow<'static, str>,
    retry_after_ms: Option<u64>,
    allow: Option<&'static str>,
    close: bool,
    ended_by: EndedBy,
    /// What kind of failure of an attempt it is, if another attempt could help (REC-5).
    cause: Option<Cause>,
    /// Clients should not try again: the Edge has, or it would end the same way.
    spent: bool,
    /// No provider was asked anything.
    uncontacted: bool,
}

impl ApiError {
    fn new(
        status: StatusCode,
        kind: &'static str,
        code: Option<&'static str>,
        ended_by: EndedBy,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        let message = message.into();
        Self {
            status,
            kind,
            code,
            param: None,
            message,
            retry_after_ms: None,
            allow: None,
            close: false,
            ended_by,
            cause: None,
            spent: false,
            uncontacted: false,
        }
    }

    fn request(status: StatusCode, code: Option<&'static str>, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(status, INVALID_REQUEST, code, EndedBy::Request, message)
    }

    /// 400; `param` names the member that is wrong.
    pub(crate) fn bad_request(param: Option<&'static str>, message: impl Into<Cow<'static, str>>) -> Self {
        Self { param, ..Self::request(StatusCode::BAD_REQUEST, None, message) }
    }

    pub(crate) fn unauthorized() -> Self {
        Self::request(
            StatusCode::UNAUTHORIZED,
            Some("invalid_api_key"),
            "No valid API key was given. Send it as a Bearer token in the Authorization header.",
        )
    }

    pub(crate) fn key_expired() -> Self {
        let message = "This API key has expired. Ask whoever runs this server for a new one.";
        Self::request(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message)
    }

    /// The caller's key has used up one of its limits. Type and text are OpenAI's own: clients read them.
    pub(crate) fn rate_limited(refusal: &RateRefusal) -> Self {
        let RateRefusal { kind, limit, used, requested, retry_after } = *refusal;
        let (kind, what) = match kind {
            RateKind::Requests => ("requests", "requests per min (RPM)"),
            RateKind::Tokens => ("tokens", "tokens per min (TPM)"),
            RateKind::Concurrent => ("requests", "requests at once"),
        };
        let (status, code) = (StatusCode::TOO_MANY_REQUESTS, Some("rate_limit_exceeded"));
        let error = |message| Self::new(status, kind, code, EndedBy::KeyLimit, message);
        match retry_after {
            Some(wait) => {
                let wait = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).min(MAX_RETRY_AFTER_MS);
                let seconds = wait.div_ceil(1000).max(1);
                error(format!(
                    "Rate limit reached for this key on {what}: Limit {limit}, Used {used}, Requested {requested}. \
                     Please try again in {seconds}s."
                ))
                .retry(wait)
            }
            None => error(format!(
                "Request too large for this key on {what}: Limit {limit}, Requested {requested}. Send a shorter prompt."
            ))
            .spent(),
        }
    }

    /// The same answer for a model that does not exist and one the caller may not use (API-13).
    pub(crate) fn model_not_found(model: &str) -> Self {
        let message = format!("The model '{}' does not exist or you may not use it.", shortened(model));
        let error = Self::request(StatusCode::NOT_FOUND, Some("model_not_found"), message);
        Self { param: Some("model"), ..error }
    }

    pub(crate) fn unknown_url() -> Self {
        Self::request(StatusCode::NOT_FOUND, Some("unknown_url"), "There is no such path here.")
    }

    pub(crate) fn method_not_allowed(allow: &'static str) -> Self {
        let message = format!("This path takes {allow}.");
        let error = Self::request(StatusCode::METHOD_NOT_ALLOWED, Some("method_not_allowed"), message);
        Self { allow: Some(allow), ..error }
    }

    pub(crate) fn not_supported() -> Self {
        Self::request(StatusCode::NOT_IMPLEMENTED, Some("unsupported_endpoint"), "This endpoint is not supported here.")
    }

    /// No state is kept: a client that has all of its conversation sends it then.
    pub(crate) fn no_state(param: &'static str) -> Self {
        let message = "No responses are stored here. Send the whole conversation as 'input'.";
        let error = Self::request(StatusCode::BAD_REQUEST, Some("previous_response_not_found"), message);
        Self { param: Some(param), ..error }
    }

    /// The model is there, but no provider of it takes this kind of request.
    pub(crate) fn not_served() -> Self {
        // No 5xx: clients would ask again.
        let message = "No provider of this model serves this endpoint now.";
        let error = Self::request(StatusCode::NOT_FOUND, Some("unsupported_endpoint"), message);
        Self { param: Some("model"), ..error }
    }

    pub(crate) fn body_too_large(limit: usize) -> Self {
        let message = format!("The request body is larger than {limit} bytes.");
        Self { close: true, ..Self::request(StatusCode::PAYLOAD_TOO_LARGE, Some("request_too_large"), message) }
    }

    pub(crate) fn unsupported_media(message: &'static str) -> Self {
        Self::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_media_type"), message)
    }

    pub(crate) fn body_timeout() -> Self {
        let message = "The request body did not arrive in time.";
        Self { close: true, ..Self::request(StatusCode::REQUEST_TIMEOUT, Some("request_timeout"), message) }
    }

    /// The client's upload broke off: nobody will read this.
    pub(crate) fn client_gone() -> Self {
        let message = "The request body broke off.";
        Self { close: true, ..Self::new(StatusCode::BAD_REQUEST, INVALID_REQUEST, None, EndedBy::Client, message) }
    }

    pub(crate) fn not_ready() -> Self {
        let code = Some("no_provider_available");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, code, EndedBy::NoProvider, "No provider is ready.")
            .retry(DEFAULT_RETRY_MS)
    }

    pub(crate) fn deadline() -> Self {
        Self::new(
            StatusCode::GATEWAY_TIMEOUT,
            SERVER,
            Some("deadline_exceeded"),
            EndedBy::Deadline,
            "The request's deadline passed.",
        )
    }

    /// The client was given nothing for as long as it waits: it has left, or is about to.
    pub(crate) fn client_idle() -> Self {
        let (code, message) = (Some("client_idle_timeout"), "No byte came for as long as the client waits.");
        Self::new(StatusCode::GATEWAY_TIMEOUT, SERVER, code, EndedBy::Client, message)
    }

    pub(crate) fn internal(message: &'static str) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("internal_error"), EndedBy::Edge, message)
    }

    /// The provider's answer makes no sense.
    pub(crate) fn bad_gateway(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, SERVER, Some("bad_gateway"), EndedBy::ProviderError, message)
    }

    fn unavailable(ended_by: EndedBy, message: impl Into<Cow<'static, str>>) -> Self {
        let code = Some("provider_unavailable");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, code, ended_by, message).retry(DEFAULT_RETRY_MS)
    }

    fn auth_failed() -> Self {
        Self::new(
            StatusCode::BAD_GATEWAY,
            SERVER,
            Some("provider_auth_failed"),
            EndedBy::ProviderError,
            "The provider refused the credential it was called with.",
        )
    }

    fn provider_limit(wait_ms: Option<u32>) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            RATE_LIMIT,
            Some("rate_limit_exceeded"),
            EndedBy::ProviderLimit,
            "The provider takes no more requests for now.",
        )
        .retry(wait_ms.map_or(DEFAULT_RETRY_MS, u64::from))
    }

    fn operator_cancelled() -> Self {
        let message = "The request was cancelled.";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("cancelled"), EndedBy::Cancelled, message)
            .retry(DEFAULT_RETRY_MS)
    }

    const fn retry(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(if ms > MAX_RETRY_AFTER_MS { MAX_RETRY_AFTER_MS } else { ms });
        self
    }

    /// Why the engine did not admit a request for `model`.
    pub(crate) fn from_submit(error: &SubmitError, model: &str) -> Self {
        match error {
            SubmitError::InvalidRequest(message) => Self::bad_request(None, *message),
            SubmitError::UnknownModel => Self::model_not_found(model),
            SubmitError::Unavailable => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                Some("no_provider_available"),
                EndedBy::NoProvider,
                "No provider of this model is available now.",
            )
            .retry(ABSENT_RETRY_MS),
            SubmitError::QueueFull { retry_after } => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                RATE_LIMIT,
                Some("queue_full"),
                EndedBy::Queue,
                "Too many requests wait for this model.",
            )
            .retry(u64::try_from(retry_after.as_millis()).unwrap_or(u64::MAX)),
            SubmitError::QueueTimeout => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                Some("queue_timeout"),
                EndedBy::Queue,
                "The request waited too long for a place.",
            )
            .retry(DEFAULT_RETRY_MS),
            // A model is asked for, never a direct address.
            SubmitError::NodeRequired => Self::internal("The Edge could not choose a node."),
            SubmitError::DeadlineExceeded => Self::deadline(),
            SubmitError::Cancelled => Self::operator_cancelled(),
            SubmitError::ShuttingDown => {
                let message = "The Edge is shutting down.";
                let code = Some("shutting_down");
                let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, code, EndedBy::Shutdown, message);
                Self { close: true, ..error.retry(DEFAULT_RETRY_MS) }
            }
        }
    }

    /// What kind of failure of an attempt it is.
    pub(crate) const fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// No provider was asked anything.
    pub(crate) const fn is_uncontacted(&self) -> bool {
        self.uncontacted
    }

    /// After this the client should not try again: the Edge has.
    pub(crate) const fn spent(mut self) -> Self {
        self.spent = true;
        self
    }

    /// How an admitted request failed. `said` is what the provider said, where that is safe to show.
    pub(crate) fn from_failure(failure: &ExecutionFailure, said: Option<String>) -> Self {
        let uncontacted = failure.provider_contacted == ProviderContacted::No;
        Self { cause: Cause::of(failure), uncontacted, ..Self::told(failure, said) }
    }

    fn told(failure: &ExecutionFailure, said: Option<String>) -> Self {
        let own = || failure.message.clone();
        match failure.code {
            FailureCode::Busy | FailureCode::Draining => {
                let wait = failure.retry_after_ms.map_or(DEFAULT_RETRY_MS, u64::from);
                Self::unavailable(EndedBy::ProviderLimit, own()).retry(wait)
            }
            // Of who refused and why, a client is told nothing; the log says it (CRD-5).
            FailureCode::CredentialRejected => {
                Self { message: "No credential may be used for this request.".into(), ..Self::auth_failed() }.spent()
            }
            FailureCode::DeadlineExceeded => Self::deadline(),
            FailureCode::Disconnected
            | FailureCode::DispatchUnacknowledged
            | FailureCode::NodeSuspect
            | FailureCode::ProviderUnreachable => Self::unavailable(EndedBy::Disconnect, own()),
            FailureCode::Internal => Self::internal("Something went wrong inside the Edge or a node."),
            FailureCode::InvalidRequest => match failure.provider_reason {
                Some(reason) => Self::from_reason(reason, failure, said),
                None => Self::bad_request(None, said.map_or_else(own, Cow::Owned)),
            },
            FailureCode::ProviderEndedWithoutTerminal
            | FailureCode::ProviderProtocol
            | FailureCode::UnknownAdapter
            | FailureCode::UnknownTarget
            | FailureCode::Unsupported => Self::bad_gateway(own()),
            FailureCode::ProviderRejected => Self::rejected(failure, said),
            FailureCode::ResponseStalled => Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                SERVER,
                Some("response_stalled"),
                EndedBy::Stall,
                stalled(failure),
            ),
        }
    }

    fn from_reason(reason: ProviderReason, failure: &ExecutionFailure, said: Option<String>) -> Self {
        match reason {
            ProviderReason::AuthFailed => Self::auth_failed(),
            ProviderReason::ContextLengthExceeded => {
                let message = said.map_or("The prompt is longer than the model's context.".into(), Cow::Owned);
                Self::request(StatusCode::BAD_REQUEST, Some("context_length_exceeded"), message)
            }
            ProviderReason::Overloaded => Self::provider_limit(failure.retry_after_ms),
        }
    }

    fn rejected(failure: &ExecutionFailure, said: Option<String>) -> Self {
        if let Some(reason) = failure.provider_reason {
            return Self::from_reason(reason, failure, said);
        }
        match failure.upstream_status {
            Some(401 | 403) => Self::auth_failed(),
            Some(429) => Self::provider_limit(failure.retry_after_ms),
            Some(400 | 413 | 415 | 422) => {
                Self::bad_request(None, said.map_or("The provider refused the request.".into(), Cow::Owned))
            }
            _ => Self::bad_gateway(said.map_or_else(|| failure.message.clone(), Cow::Owned)),
        }
    }

    /// A run that was cancelled, though the client is still there.
    pub(crate) fn from_cancel(reason: CancelReason) -> Self {
        match reason {
            CancelReason::Client => Self::operator_cancelled(),
            CancelReason::EdgeDeadline => Self::deadline(),
            CancelReason::Withdrawn => Self::unavailable(EndedBy::Disconnect, "The node stopped answering."),
            CancelReason::ReceivePool => Self::unavailable(EndedBy::Edge, "The Edge is out of memory for answers."),
            CancelReason::SlowClient => {
                let message = "The answer was not read for too long.";
                Self::new(StatusCode::REQUEST_TIMEOUT, INVALID_REQUEST, Some("slow_client"), EndedBy::Client, message)
            }
            CancelReason::Drain => {
                let error = Self::unavailable(EndedBy::Disconnect, "The node is draining.");
                Self { cause: Some(Cause::Retry(RetryCause::Draining)), ..error }
            }
        }
    }

    pub(crate) const fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) const fn code(&self) -> Option<&'static str> {
        self.code
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) const fn ended_by(&self) -> EndedBy {
        self.ended_by
    }

    /// The error object.
    pub(crate) fn to_json(&self, dialect: Dialect) -> Vec<u8> {
        if dialect == Dialect::Anthropic {
            let error = AnthropicObject { kind: self.anthropic_type(), message: &self.message };
            return serde_json::to_vec(&AnthropicEnvelope { kind: "error", error }).unwrap_or_default();
        }
        let object =
            Envelope { error: Object { message: &self.message, kind: self.kind, param: self.param, code: self.code } };
        // Four strings always serialise.
        serde_json::to_vec(&object).unwrap_or_default()
    }

    /// Anthropic's name of what its status says.
    fn anthropic_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            _ => "api_error",
        }
    }

    /// The last event of a stream that failed after its commit.
    pub(crate) fn to_event(&self, dialect: Dialect) -> Bytes {
        let mut event = match dialect {
            Dialect::OpenAi => b"data: ".to_vec(),
            Dialect::Anthropic => b"event: error\ndata: ".to_vec(),
        };
        event.extend_from_slice(&self.to_json(dialect));
        event.extend_from_slice(b"\n\n");
        event.into()
    }

    /// The answer of a request that failed before its commit.
    pub(crate) fn to_response(&self, dialect: Dialect) -> Response<OpenAiBody> {
        let mut response = Response::new(OpenAiBody::full(self.to_json(dialect)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(ms) = self.retry_after_ms {
            headers.insert(RETRY_AFTER, HeaderValue::from(ms.div_ceil(1_000).max(1)));
            headers.insert("retry-after-ms", HeaderValue::from(ms.max(1)));
        }
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if self.spent {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if self.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Whose error object a client reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
}

#[derive(Serialize)]
struct AnthropicEnvelope<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    error: AnthropicObject<'a>,
}

#[derive(Serialize)]
struct AnthropicObject<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Object<'a>,
}

#[derive(Serialize)]
struct Object<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

/// Names the setting that fired, so that whoever runs the provider knows which one to raise.
fn stalled(failure: &ExecutionFailure) -> Cow<'static, str> {
    match failure.stall.as_deref() {
        Some(stall) => {
            let (ms, setting) = (stall.timeout_ms, stall.timeout_setting);
            format!("The provider made no progress for {ms} ms ({setting}).").into()
        }
        None => "The provider stopped making progress.".into(),
    }
}

/// Most characters of a model's name that an error repeats.
const SHOWN_CHARS: usize = 80;

fn shortened(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests;
