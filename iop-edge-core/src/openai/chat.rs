//! Decides how one request to a provider goes: read, admit, dispatch, hold until content, pass on, end once.
//!
//! [`serve`] reads and checks it; [`Live`] owns it from then on, over all its attempts, first until the head of its answer is
//! decided, then inside the body. Dropping either drops the run's output, which cancels the run.

pub(crate) mod commit;
mod idle;
mod live;
pub(crate) mod render;
pub(crate) mod run;
pub(crate) mod tunnel;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Response, request};
use http_body::Body;
use tokio::time::{Sleep, sleep};

use self::commit::{Form, Gate};
use self::idle::ClientIdle;
pub(crate) use self::live::Live;
use self::render::Renderer;
use self::run::RunAnswer;
use self::tunnel::{TunnelAnswer, Wish};
use super::auth::Caller;
use super::body::OpenAiBody;
use super::config::{OpenAiConfig, ResponseModel};
use super::errors::{ApiError, Dialect};
use super::kind::Kind;
use super::record::{Edits, Recorder, RequestId};
use super::request::ChatRequest;
use super::responses::{self, Echo, ResponseAnswer};
use super::upload;
use crate::api::{Admitted, Engine, Output, Payload, Submit, SubmitError, Submitted, WireKind};

/// Client's own hard deadline in milliseconds from arrival (API-14).
const DEADLINE_HEADER: &str = "x-iop-deadline-ms";
/// The priority a client asks for; its key says how high it may be.
const PRIORITY_HEADER: &str = "x-iop-priority";
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

/// Answers one request.
///
/// Cancel safety: dropping the future withdraws the request or cancels its run.
pub(crate) async fn serve<B>(
    kind: Kind,
    engine: Arc<dyn Engine>,
    config: Arc<OpenAiConfig>,
    caller: Caller,
    head: request::Parts,
    body: B,
    mut recorder: Recorder,
) -> Response<OpenAiBody>
where
    B: Body<Data = Bytes>,
{
    let asked = deadline(&head.headers, config.request_deadline)
        .and_then(|deadline| Ok((deadline, caller.priority.of(priority(&head.headers)?))));
    let (deadline, priority) = match asked {
        Ok(asked) => asked,
        Err(error) => {
            upload::discard(&head.headers, body).await;
            return refuse(&error, recorder);
        }
    };
    let id = recorder.request_id();
    let (request, echo) = match upload::read(&head.headers, body, &config).await.and_then(|body| parse(kind, body, id))
    {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error, recorder),
    };
    recorder.stream(request.stream());

    let model = request.model_name().filter(|model| caller.models.allows(model.as_str()));
    let Some(model) = model else { return refuse(&ApiError::model_not_found(request.model()), recorder) };
    if let Err(refusal) = recorder.reserve(request.prompt_tokens()) {
        return refuse(&ApiError::rate_limited(&refusal), recorder);
    }
    let mut submit = Submit::to_model(model.clone());
    submit.principal = caller.principal;
    submit.priority = priority;
    submit.stream = request.stream();
    submit.wire = kind.wire();
    submit.messages = kind == Kind::Messages;
    submit.prompt_tokens_estimate = request.prompt_tokens();
    submit.prompt_prefix = request.prompt_prefix();
    submit.explicit_commit = true;
    submit.deadline = deadline.and_then(|deadline| recorder.arrived().checked_add(deadline));
    recorder.submitting(model, Arc::clone(&engine));

    let (usage, model) = (request.wants_usage(), request.model().to_owned());
    let asked = Asked { kind, stream: request.stream(), usage, model, echo };
    let stream = asked.stream;
    let idle = ClientIdle::told_by(&head.headers);
    let mut live = Live::new(engine, config, asked, submit, request, recorder, idle);
    poll_fn(|cx| live.poll_verdict(cx)).await;
    live.into_response(stream)
}

/// What the client asked for that matters to its answer.
struct Asked {
    kind: Kind,
    stream: bool,
    usage: bool,
    model: String,
    /// What a response repeats of its request.
    echo: Option<Arc<Echo>>,
}

impl Asked {
    /// Why no provider takes it. A model that is there, but not by the only wire that this kind can go, is another matter
    /// than one that is away.
    fn refused(&self, error: &SubmitError, engine: &dyn Engine) -> ApiError {
        let by_other_wire = || engine.models().iter().any(|m| m.name.as_str() == self.model && m.available);
        if *error == SubmitError::Unavailable && self.kind.wire().is_some() && by_other_wire() {
            return ApiError::not_served();
        }
        ApiError::from_submit(error, &self.model)
    }

    /// A failure that is told in a stream which has nothing but comments.
    fn failed(&self, error: &ApiError, config: &OpenAiConfig) -> Bytes {
        self.echo.as_ref().map_or_else(
            || error.to_event(self.kind.endpoint().dialect()),
            |echo| responses::failed(echo, config, error),
        )
    }
}

/// The request for the provider, and what a response repeats of it.
fn parse(kind: Kind, body: Bytes, id: RequestId) -> Result<(ChatRequest, Option<Arc<Echo>>), ApiError> {
    match kind {
        Kind::Chat | Kind::Completions | Kind::Embeddings | Kind::Messages => {
            Ok((ChatRequest::parse(body, kind)?, None))
        }
        Kind::Responses => responses::read(body, format!("resp_{}", id.0)).map(|(request, echo)| (request, Some(echo))),
    }
}

pub(crate) fn refuse(error: &ApiError, mut recorder: Recorder) -> Response<OpenAiBody> {
    recorder.failed(error, error.status());
    error.to_response(recorder.endpoint().dialect())
}

/// The shorter of the client's and the configured deadline.
fn deadline(headers: &HeaderMap, configured: Option<Duration>) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(DEADLINE_HEADER) else { return Ok(configured) };
    let asked = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()).filter(|ms| *ms > 0);
    let Some(asked) = asked.map(Duration::from_millis) else {
        return Err(ApiError::bad_request(None, "'x-iop-deadline-ms' must be a positive number of milliseconds."));
    };
    Ok(Some(configured.map_or(asked, |configured| configured.min(asked))))
}

/// How urgent the client says it is.
fn priority(headers: &HeaderMap) -> Result<Option<i8>, ApiError> {
    let Some(value) = headers.get(PRIORITY_HEADER) else { return Ok(None) };
    let asked =
        value.to_str().ok().and_then(|text| text.trim().parse().ok()).filter(|asked| (-100..=100).contains(asked));
    let wrong = || ApiError::bad_request(None, "'x-iop-priority' must be a whole number from -100 to 100.");
    asked.map(Some).ok_or_else(wrong)
}

/// What the chosen provider is sent. No header of the client goes with it (SEC-2).
fn payload(kind: Kind, request: &ChatRequest, admitted: &Admitted) -> Payload {
    match admitted.wire {
        WireKind::Run => Payload::Run { input: request.body().clone() },
        WireKind::Tunnel => {
            let mut headers = HeaderMap::with_capacity(2);
            headers.insert(CONTENT_TYPE, JSON);
            let accept = if request.stream() { HeaderValue::from_static("text/event-stream") } else { JSON };
            headers.insert(ACCEPT, accept);
            let body = request.for_target(admitted.target.as_str());
            Payload::Tunnel { method: Method::POST, path: kind.path().to_owned(), headers, body }
        }
    }
}

#[derive(Debug)]
enum Answer {
    Run(Box<RunAnswer>),
    Tunnel(Box<TunnelAnswer>),
    Response(Box<ResponseAnswer>),
}

impl Answer {
    fn usage(&self) -> Option<iop_execution::Usage> {
        match self {
            Self::Run(answer) => answer.usage(),
            Self::Tunnel(answer) => answer.usage(),
            Self::Response(answer) => answer.usage(),
        }
    }

    /// The client has all of it; only the run's own terminal is missing.
    const fn is_done(&self) -> bool {
        match self {
            Self::Run(_) | Self::Response(_) => false,
            Self::Tunnel(answer) => answer.is_done(),
        }
    }

    /// A part of a tool call was given out.
    fn has_tool_call(&self) -> bool {
        match self {
            Self::Run(answer) => answer.has_tool_call(),
            Self::Tunnel(answer) => answer.has_tool_call(),
            Self::Response(answer) => answer.has_tool_call(),
        }
    }

    fn edits(&self) -> Edits {
        match self {
            // Nothing of the provider's bytes is passed.
            Self::Run(_) | Self::Response(_) => Edits::default(),
            Self::Tunnel(answer) => answer.rewrite().edits(),
        }
    }
}

/// The output of a run, what it means, and what the client is given of it.
struct Exchange {
    /// Gone once the answer ended.
    output: Option<Output>,
    answer: Answer,
    gate: Gate,
    linger: Option<Pin<Box<Sleep>>>,
    cut_told: bool,
}

impl Exchange {
    fn new(submitted: Submitted, asked: &Asked, config: &OpenAiConfig) -> Self {
        let Submitted { admitted, output, .. } = submitted;
        let answer = match (&output, &asked.echo) {
            (output, Some(echo)) => {
                let model = match config.response_model {
                    ResponseModel::Requested => &asked.model,
                    ResponseModel::Target => admitted.target.as_str(),
                };
                let tunnel = matches!(output, Output::Tunnel(_));
                Answer::Response(Box::new(ResponseAnswer::new(echo, model, config, asked.stream, tunnel)))
            }
            (Output::Run(_), None) => {
                let model = match config.response_model {
                    ResponseModel::Requested => &asked.model,
                    ResponseModel::Target => admitted.target.as_str(),
                };
                let renderer = Renderer::new(admitted.run_id, (config.unix_time)(), model);
                Answer::Run(Box::new(RunAnswer::new(admitted.run_id, renderer, asked.stream, asked.usage)))
            }
            (Output::Tunnel(_), None) => {
                let model = match config.response_model {
                    ResponseModel::Requested => Some(super::edit::quoted(&asked.model)),
                    ResponseModel::Target => None,
                };
                Answer::Tunnel(Box::new(TunnelAnswer::new(Wish {
                    stream: asked.stream,
                    model,
                    usage: asked.usage,
                    answer: asked.kind.answer(),
                    mended: asked.kind.mended(),
                })))
            }
        };
        let form = match (asked.stream, asked.kind.endpoint().dialect()) {
            (true, Dialect::OpenAi) => Form::Events,
            (true, Dialect::Anthropic) => Form::Messages,
            (false, _) => Form::Document,
        };
        Self { output: Some(output), answer, gate: Gate::new(form), linger: None, cut_told: false }
    }

    /// Takes one item of the output, or waits. Ready whenever something changed.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let gate = &mut self.gate;
        match (&mut self.output, &mut self.answer) {
            (Some(Output::Run(events)), Answer::Run(answer)) => match Pin::new(events).poll_next(cx) {
                Poll::Ready(Some(event)) => answer.event(event, gate),
                Poll::Ready(None) => RunAnswer::lost(gate),
                Poll::Pending => return Poll::Pending,
            },
            (Some(Output::Tunnel(frames)), Answer::Tunnel(answer)) => match Pin::new(frames).poll_next(cx) {
                Poll::Ready(Some(frame)) => answer.frame(frame, gate),
                Poll::Ready(None) => answer.lost(gate),
                Poll::Pending => {
                    let Some(wait) = answer.linger() else { return Poll::Pending };
                    ready!(self.linger.get_or_insert_with(|| Box::pin(sleep(wait))).as_mut().poll(cx));
                    answer.lingered(gate);
                }
            },
            (Some(Output::Run(events)), Answer::Response(answer)) => match ready!(Pin::new(events).poll_next(cx)) {
                Some(event) => answer.event(event, gate),
                None => answer.lost(gate),
            },
            (Some(Output::Tunnel(frames)), Answer::Response(answer)) => match Pin::new(frames).poll_next(cx) {
                Poll::Ready(Some(frame)) => answer.frame(frame, gate),
                Poll::Ready(None) => answer.lost(gate),
                Poll::Pending => {
                    let Some(wait) = answer.linger() else { return Poll::Pending };
                    ready!(self.linger.get_or_insert_with(|| Box::pin(sleep(wait))).as_mut().poll(cx));
                    answer.lingered(gate);
                }
            },
            // One of a kind was made for the other.
            (Some(_), _) | (None, _) => gate.fail(ApiError::internal("The Edge lost the answer.")),
        }
        if gate.is_ended() {
            self.output = None;
        }
        Poll::Ready(())
    }

    /// Ends the answer from this side, which cancels its run.
    fn give_up(&mut self, error: ApiError) {
        match &mut self.answer {
            Answer::Tunnel(answer) if answer.is_done() => self.gate.complete(),
            Answer::Run(_) | Answer::Tunnel(_) => self.gate.fail(error),
            Answer::Response(answer) => answer.fail(error, &mut self.gate),
        }
        self.output = None;
    }

    /// True the first time only.
    fn cut_once(&mut self) -> bool {
        !std::mem::replace(&mut self.cut_told, true)
    }
}
