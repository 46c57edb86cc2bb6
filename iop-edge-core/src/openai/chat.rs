//! Decides how one chat request goes: read, admit, dispatch, hold until content, pass on, end once.
//!
//! [`serve`] owns the request until the head of its answer is decided; [`Live`] owns it afterwards, inside the body. Dropping
//! either drops the run's output, which cancels the run.

pub(crate) mod commit;
mod idle;
pub(crate) mod render;
pub(crate) mod run;
pub(crate) mod tunnel;

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, request};
use http_body::Body;
use tokio::time::{Sleep, sleep};

use self::commit::{Form, Gate, Verdict};
use self::idle::ClientIdle;
use self::render::Renderer;
use self::run::RunAnswer;
use self::tunnel::{TunnelAnswer, Wish};
use super::auth::Caller;
use super::body::{AnswerCut, OpenAiBody};
use super::config::{DONE_LINGER, ERROR_LINGER, OpenAiConfig, ResponseModel};
use super::errors::ApiError;
use super::record::{Edits, Recorder};
use super::request::ChatRequest;
use super::upload;
use crate::api::{Admitted, CommitMark, Engine, Output, Payload, Submit, SubmitError, Submitted, WireKind};

/// Client's own hard deadline in milliseconds from arrival (API-14).
const DEADLINE_HEADER: &str = "x-iop-deadline-ms";
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

/// Answers one chat request.
///
/// Cancel safety: dropping the future withdraws the request or cancels its run.
pub(crate) async fn serve<B>(
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
    let deadline = match deadline(&head.headers, config.request_deadline) {
        Ok(deadline) => deadline,
        Err(error) => return refuse(&error, recorder),
    };
    let request = match upload::read(&head.headers, body, &config).await.and_then(ChatRequest::parse) {
        Ok(request) => request,
        Err(error) => return refuse(&error, recorder),
    };
    recorder.stream(request.stream());

    let model = request.model_name().filter(|model| caller.models.allows(model.as_str()));
    let Some(model) = model else { return refuse(&ApiError::model_not_found(request.model()), recorder) };
    let mut submit = Submit::to_model(model.clone());
    submit.principal = caller.principal;
    submit.priority = caller.priority;
    submit.stream = request.stream();
    submit.prompt_tokens_estimate = request.prompt_tokens();
    submit.prompt_prefix = request.prompt_prefix();
    submit.explicit_commit = true;
    submit.deadline = deadline.and_then(|deadline| recorder.arrived().checked_add(deadline));
    recorder.submitting(model, Arc::clone(&engine));

    // Shared with `prepare`, and gone once the request is dispatched.
    let asked = Asked { stream: request.stream(), usage: request.wants_usage(), model: request.model().to_owned() };
    let mut idle = ClientIdle::told_by(&head.headers);
    let submitted = engine.submit(submit, Box::new(move |admitted| payload(&request, admitted)));
    let submitted = match idle.bound(submitted).await {
        Some(Ok(submitted)) => submitted,
        None => return refuse(&ApiError::client_idle(), recorder),
        Some(Err(error)) => {
            let known = !matches!(error, SubmitError::UnknownModel | SubmitError::InvalidRequest(_));
            recorder.submitted(known, None);
            return refuse(&ApiError::from_submit(&error, &asked.model), recorder);
        }
    };
    recorder.submitted(true, Some(&submitted.admitted));

    let commit = submitted.commit.clone();
    let mut live = Live { exchange: Exchange::new(submitted, &asked, &config), commit, recorder, idle };
    poll_fn(|cx| live.poll_verdict(cx)).await;
    live.into_response(asked.stream)
}

/// What the client asked for that matters to its answer.
struct Asked {
    stream: bool,
    usage: bool,
    model: String,
}

pub(crate) fn refuse(error: &ApiError, mut recorder: Recorder) -> Response<OpenAiBody> {
    recorder.failed(error, error.status());
    error.to_response()
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

/// What the chosen provider is sent. No header of the client goes with it (SEC-2).
fn payload(request: &ChatRequest, admitted: &Admitted) -> Payload {
    match admitted.wire {
        WireKind::Run => Payload::Run { input: request.body().clone() },
        WireKind::Tunnel => {
            let mut headers = HeaderMap::with_capacity(2);
            headers.insert(CONTENT_TYPE, JSON);
            let accept = if request.stream() { HeaderValue::from_static("text/event-stream") } else { JSON };
            headers.insert(ACCEPT, accept);
            let body = request.for_target(admitted.target.as_str());
            Payload::Tunnel { method: Method::POST, path: "/v1/chat/completions".to_owned(), headers, body }
        }
    }
}

/// An answer under way.
pub(crate) struct Live {
    exchange: Exchange,
    commit: CommitMark,
    recorder: Recorder,
    idle: ClientIdle,
}

impl Live {
    /// Until the head can be decided.
    fn poll_verdict(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.exchange.gate.verdict().is_none() {
            if self.exchange.poll_step(cx).is_pending() {
                ready!(self.idle.poll_over(cx));
                self.exchange.give_up(ApiError::client_idle());
            }
        }
        self.note();
        Poll::Ready(())
    }

    fn into_response(mut self, stream: bool) -> Response<OpenAiBody> {
        let body = match self.exchange.gate.verdict() {
            Some(Verdict::Refused(error)) => {
                let error = error.clone();
                return refuse(&error, self.recorder);
            }
            Some(Verdict::Whole) if !stream => {
                self.recorder.completed(StatusCode::OK);
                OpenAiBody::full(self.exchange.gate.take_all())
            }
            Some(Verdict::Whole | Verdict::Begun) | None => OpenAiBody::live(self),
        };
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        if stream {
            headers.insert(CONTENT_TYPE, EVENT_STREAM);
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        } else {
            headers.insert(CONTENT_TYPE, JSON);
        }
        response
    }

    /// The next bytes: as much as is ready, joined; never waits for a later event once one is there.
    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, AnswerCut>>> {
        loop {
            while !self.exchange.gate.is_full() && !self.exchange.gate.is_ended() {
                if self.exchange.poll_step(cx).is_pending() {
                    break;
                }
            }
            self.note();
            let gate = &mut self.exchange.gate;
            if let Some(bytes) = gate.take() {
                self.idle.gave();
                if gate.is_ended() && gate.is_empty() && !gate.is_cut() {
                    self.end();
                }
                return Poll::Ready(Some(Ok(bytes)));
            }
            if gate.is_ended() {
                let cut = gate.is_cut();
                self.end();
                return Poll::Ready(if cut && self.exchange.cut_once() { Some(Err(AnswerCut)) } else { None });
            }
            // After `[DONE]` the client waits for nothing.
            if self.exchange.answer.is_done() {
                return Poll::Pending;
            }
            ready!(self.idle.poll_over(cx));
            self.exchange.give_up(ApiError::client_idle());
        }
    }

    /// Everything was given out.
    pub(crate) fn is_finished(&self) -> bool {
        let gate = &self.exchange.gate;
        gate.is_ended() && gate.is_empty() && !gate.is_cut()
    }

    /// Keeps the record up to date, for the client may leave at any moment.
    fn note(&mut self) {
        if self.exchange.gate.is_committed() {
            self.commit.set();
            self.recorder.first_content();
        }
        self.recorder.progress(self.exchange.answer.usage(), self.exchange.answer.edits());
    }

    fn end(&mut self) {
        match self.exchange.gate.failure() {
            Some(error) => self.recorder.failed(error, StatusCode::OK),
            None => self.recorder.completed(StatusCode::OK),
        }
    }
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live").field("answer", &self.exchange.answer).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Answer {
    Run(Box<RunAnswer>),
    Tunnel(Box<TunnelAnswer>),
}

impl Answer {
    fn usage(&self) -> Option<iop_execution::Usage> {
        match self {
            Self::Run(answer) => answer.usage(),
            Self::Tunnel(answer) => answer.usage(),
        }
    }

    /// The client has all of it; only the run's own terminal is missing.
    const fn is_done(&self) -> bool {
        match self {
            Self::Run(_) => false,
            Self::Tunnel(answer) => answer.is_done(),
        }
    }

    fn edits(&self) -> Edits {
        match self {
            Self::Run(_) => Edits::default(),
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
        let answer = match &output {
            Output::Run(_) => {
                let model = match config.response_model {
                    ResponseModel::Requested => &asked.model,
                    ResponseModel::Target => admitted.target.as_str(),
                };
                let renderer = Renderer::new(admitted.run_id, (config.unix_time)(), model);
                Answer::Run(Box::new(RunAnswer::new(admitted.run_id, renderer, asked.stream, asked.usage)))
            }
            Output::Tunnel(_) => {
                let model = match config.response_model {
                    ResponseModel::Requested => Some(super::edit::quoted(&asked.model)),
                    ResponseModel::Target => None,
                };
                Answer::Tunnel(Box::new(TunnelAnswer::new(Wish { stream: asked.stream, model, usage: asked.usage })))
            }
        };
        let form = if asked.stream { Form::Events } else { Form::Document };
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
                    let wait = if answer.is_done() {
                        DONE_LINGER
                    } else if answer.is_failing() {
                        ERROR_LINGER
                    } else {
                        return Poll::Pending;
                    };
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
        self.gate.fail(error);
        self.output = None;
    }

    /// True the first time only.
    fn cut_once(&mut self) -> bool {
        !std::mem::replace(&mut self.cut_told, true)
    }
}
