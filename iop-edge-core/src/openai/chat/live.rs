//! Decides how one request lives over its attempts: it is admitted, its output awaited, and where that fails before the client
//! has content, perhaps admitted again; a client that waits long is shown that somebody is there (REC-1 to REC-8).
//!
//! ```text
//!  Admitting ──▶ Running ──▶ its gate is open or complete: told
//!      ▲            │ failed before content
//!      └── again ───┤
//!                   └──▶ Over: told by the failure
//! ```

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};
use tokio::time::{Sleep, sleep};

use super::commit::Verdict;
use super::idle::ClientIdle;
use super::{Asked, EVENT_STREAM, Exchange, JSON, payload, refuse};
use crate::api::{CommitMark, EndNote, EndNotes, Engine, Submit, SubmitError, Submitted};
use crate::catalog::RetryOn;
use crate::openai::body::{AnswerCut, OpenAiBody};
use crate::openai::config::{KEEPALIVE_EVERY, MAX_SNAPSHOT_BYTES, OpenAiConfig};
use crate::openai::errors::ApiError;
use crate::openai::kind::Kind;
use crate::openai::record::{Recorder, now};
use crate::openai::recovery::{Decision, Given, Hint, Liveness, LivenessDecision, LivenessReason};
use crate::openai::request::ChatRequest;

/// A comment: keeps connections open, means nothing to a client.
const KEEPALIVE: Bytes = Bytes::from_static(b": waiting\n\n");

type Admission = Pin<Box<dyn Future<Output = Result<Submitted, SubmitError>> + Send>>;

enum Stage {
    Admitting(Admission),
    Running(Box<Attempt>),
    /// It ended without an exchange to tell it.
    Over(Box<ApiError>),
}

/// One attempt that was dispatched.
struct Attempt {
    exchange: Exchange,
    commit: CommitMark,
    notes: EndNotes,
    retry_on: RetryOn,
    /// Its failure was considered.
    judged: bool,
}

/// A request under way.
pub(crate) struct Live {
    engine: Arc<dyn Engine>,
    config: Arc<OpenAiConfig>,
    asked: Asked,
    submit: Submit,
    /// Kept while it may be sent again.
    request: Option<Arc<ChatRequest>>,
    stage: Stage,
    /// The failure that the next attempt is to mend.
    mending: Option<ApiError>,
    keepalive: Keepalive,
    recorder: Recorder,
    idle: ClientIdle,
}

/// When a streaming client is shown that somebody is there.
struct Keepalive {
    timer: Option<Pin<Box<Sleep>>>,
    /// It has its `200`.
    begun: bool,
    /// One comment is due.
    due: bool,
}

impl Keepalive {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timer) = &mut self.timer else { return Poll::Pending };
        ready!(timer.as_mut().poll(cx));
        timer.as_mut().reset(tokio::time::Instant::now() + KEEPALIVE_EVERY);
        self.due = true;
        Poll::Ready(())
    }
}

impl Live {
    pub(super) fn new(
        engine: Arc<dyn Engine>,
        config: Arc<OpenAiConfig>,
        asked: Asked,
        submit: Submit,
        request: ChatRequest,
        mut recorder: Recorder,
        idle: ClientIdle,
    ) -> Self {
        let kept = request.body().len() <= MAX_SNAPSHOT_BYTES;
        let (tokens, stores) = (submit.prompt_tokens_estimate, request.stores());
        let extra = if asked.kind.replays() { config.max_extra_attempts } else { 0 };
        *recorder.liveness() = Liveness::new(extra, tokens, kept, stores || submit.background);
        let after = (asked.stream && !config.keepalive_after.is_zero()).then_some(config.keepalive_after);
        let keepalive = Keepalive { timer: after.map(|after| Box::pin(sleep(after))), begun: false, due: false };
        let request = Arc::new(request);
        let stage = Stage::Admitting(admit(&engine, asked.kind, submit.clone(), Arc::clone(&request)));
        let request = Some(request).filter(|_| kept);
        Self { engine, config, asked, submit, request, stage, mending: None, keepalive, recorder, idle }
    }

    /// Until the head can be decided.
    pub(super) fn poll_verdict(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.verdict().is_none() {
            if self.poll_step(cx).is_pending() {
                if self.keepalive.poll(cx).is_ready() {
                    self.keepalive.begun = true;
                    return Poll::Ready(());
                }
                ready!(self.idle.poll_over(cx));
                self.give_up(ApiError::client_idle());
            }
        }
        self.note();
        Poll::Ready(())
    }

    /// What the head says: only a failure that is not mended, or content, is one.
    fn verdict(&self) -> Option<Verdict<'_>> {
        match &self.stage {
            Stage::Admitting(_) => None,
            Stage::Running(attempt) => attempt.exchange.gate.verdict(),
            Stage::Over(error) => Some(Verdict::Refused(error)),
        }
    }

    pub(super) fn into_response(mut self, stream: bool) -> Response<OpenAiBody> {
        let whole = match self.verdict() {
            Some(Verdict::Refused(error)) => {
                let error = error.clone();
                return refuse(&error, self.recorder);
            }
            Some(Verdict::Whole) => !stream,
            Some(Verdict::Begun) | None => false,
        };
        let body = match &mut self.stage {
            Stage::Running(attempt) if whole => {
                let whole = attempt.exchange.gate.take_all();
                self.recorder.gave(&whole);
                self.recorder.completed(StatusCode::OK);
                OpenAiBody::full(whole)
            }
            Stage::Running(_) | Stage::Admitting(_) | Stage::Over(_) => OpenAiBody::live(self),
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

    /// One step of the attempt under way. Ready whenever something changed.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.stage {
            Stage::Admitting(admission) => {
                let admitted = ready!(admission.as_mut().poll(cx));
                self.admitted(admitted);
            }
            Stage::Running(attempt) => {
                ready!(attempt.exchange.poll_step(cx));
                // Kept up to date, for the client may leave at any moment, and the attempt may be replaced by the next line.
                self.recorder.progress(attempt.exchange.answer.usage(), attempt.exchange.answer.edits());
                self.judge();
            }
            Stage::Over(_) => {}
        }
        Poll::Ready(())
    }

    fn admitted(&mut self, admitted: Result<Submitted, SubmitError>) {
        let submitted = match admitted {
            Ok(submitted) => submitted,
            Err(error) => {
                let known = !matches!(error, SubmitError::UnknownModel | SubmitError::InvalidRequest(_));
                self.recorder.submitted(known, None);
                let error = match self.mending.take() {
                    None => self.asked.refused(&error, &*self.engine),
                    Some(failure) => {
                        self.recorder.did_not_begin(LivenessReason::of_refusal(&error));
                        unmended(failure, &error, &self.asked.model)
                    }
                };
                self.stage = Stage::Over(Box::new(error));
                return;
            }
        };
        if self.mending.take().is_some() {
            self.recorder.considered(LivenessDecision::Eligible, LivenessReason::None);
        }
        self.recorder.submitted(true, Some(&submitted.admitted));
        let (commit, notes) = (submitted.commit.clone(), submitted.notes.clone());
        if notes.get() != Some(&EndNote::NotSent) {
            self.recorder.sent();
        }
        let retry_on = submitted.admitted.retry_on;
        let exchange = Exchange::new(submitted, &self.asked, &self.config);
        self.stage = Stage::Running(Box::new(Attempt { exchange, commit, notes, retry_on, judged: false }));
    }

    /// Looks at what became of the attempt: a failure is judged once, and may lead to another one.
    fn judge(&mut self) {
        let Stage::Running(attempt) = &mut self.stage else { return };
        let gate = &attempt.exchange.gate;
        if gate.is_committed() {
            // From here on nothing is repeated.
            self.request = None;
        }
        let Some(error) = gate.failure().filter(|_| !attempt.judged) else { return };
        attempt.judged = true;
        let unsent = attempt.notes.get() == Some(&EndNote::NotSent);
        let unasked = error.is_uncontacted() && !gate.is_committed() && attempt.exchange.answer.usage().is_none();
        if unasked && !unsent {
            self.recorder.refused_unasked();
        }
        let Some(cause) = error.cause() else {
            if self.recorder.liveness().has_retried() {
                self.over(|error| error.spent());
            }
            return;
        };
        let given = match (gate.is_committed(), attempt.exchange.answer.has_tool_call()) {
            (false, _) => Given::Nothing,
            (true, false) => Given::Content,
            (true, true) => Given::ToolCall,
        };
        let late = self.submit.deadline.is_some_and(|deadline| deadline <= now());
        let decision = self.recorder.liveness().failed(cause, attempt.retry_on, attempt.notes.get(), given, late);
        match decision {
            Decision::Again(Hint { avoid, fallback }) => {
                let Some(request) = self.request.as_ref().map(Arc::clone) else { return };
                self.mending = Some(error.clone());
                self.recorder.considering();
                self.submit.avoid_provider_id = avoid;
                self.submit.allow_avoided_provider_fallback = fallback;
                // The old output goes first: it is over, or is cancelled by this, before the next one is asked for.
                let admission = admit(&self.engine, self.asked.kind, self.submit.clone(), request);
                drop(mem::replace(&mut self.stage, Stage::Admitting(admission)));
            }
            Decision::Tell(reason) => {
                self.recorder.considered(LivenessDecision::Ineligible, reason);
                if self.recorder.liveness().has_retried() {
                    self.over(|error| error.spent());
                }
            }
        }
    }

    /// Ends it by the failure of its attempt, if the client has nothing yet.
    fn over(&mut self, change: impl FnOnce(ApiError) -> ApiError) {
        let Stage::Running(attempt) = &self.stage else { return };
        if let Some(Verdict::Refused(error)) = attempt.exchange.gate.verdict() {
            self.stage = Stage::Over(Box::new(change(error.clone())));
        }
    }

    /// Ends it from this side, which cancels its run.
    fn give_up(&mut self, error: ApiError) {
        match &mut self.stage {
            Stage::Running(attempt) => {
                attempt.judged = true;
                attempt.exchange.give_up(error);
            }
            Stage::Admitting(_) => self.stage = Stage::Over(Box::new(error)),
            Stage::Over(_) => {}
        }
    }

    /// The next bytes: as much as is ready, joined; never waits for a later event once one is there.
    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, AnswerCut>>> {
        if mem::take(&mut self.keepalive.due) {
            // A comment is a byte too: the client's own timer starts again with it.
            self.idle.gave();
            return Poll::Ready(Some(Ok(KEEPALIVE)));
        }
        loop {
            while !self.is_full() && !self.is_ended() {
                if self.poll_step(cx).is_pending() {
                    break;
                }
            }
            self.note();
            match &mut self.stage {
                Stage::Running(attempt) => {
                    let gate = &mut attempt.exchange.gate;
                    if let Some(bytes) = gate.take() {
                        self.idle.gave();
                        self.recorder.gave(&bytes);
                        if gate.is_ended() && gate.is_empty() && !gate.is_cut() {
                            self.end();
                        }
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                    if let Some(Verdict::Refused(error)) = gate.verdict() {
                        // The head is gone already: it is told in the stream.
                        let error = error.clone();
                        self.stage = Stage::Over(Box::new(error));
                        continue;
                    }
                    if gate.is_ended() {
                        let cut = gate.is_cut();
                        let told = cut && attempt.exchange.cut_once();
                        self.end();
                        return Poll::Ready(if told { Some(Err(AnswerCut)) } else { None });
                    }
                    // After `[DONE]` the client waits for nothing.
                    if attempt.exchange.answer.is_done() {
                        return Poll::Pending;
                    }
                }
                Stage::Over(error) => {
                    if !mem::take(&mut self.keepalive.begun) {
                        return Poll::Ready(None);
                    }
                    let bytes = self.asked.failed(error, &self.config);
                    self.end();
                    return Poll::Ready(Some(Ok(bytes)));
                }
                Stage::Admitting(_) => {}
            }
            if self.keepalive.begun && !self.is_committed() && self.keepalive.poll(cx).is_ready() {
                self.keepalive.due = false;
                self.idle.gave();
                return Poll::Ready(Some(Ok(KEEPALIVE)));
            }
            ready!(self.idle.poll_over(cx));
            self.give_up(ApiError::client_idle());
        }
    }

    /// There is enough to give. What is held can't be given, however much it is: only what comes next releases it.
    fn is_full(&self) -> bool {
        let Stage::Running(attempt) = &self.stage else { return false };
        attempt.exchange.gate.is_committed() && attempt.exchange.gate.is_full()
    }

    fn is_ended(&self) -> bool {
        match &self.stage {
            Stage::Admitting(_) => false,
            Stage::Running(attempt) => attempt.exchange.gate.is_ended(),
            Stage::Over(_) => true,
        }
    }

    fn is_committed(&self) -> bool {
        matches!(&self.stage, Stage::Running(attempt) if attempt.exchange.gate.is_committed())
    }

    /// Everything was given out.
    pub(crate) fn is_finished(&self) -> bool {
        match &self.stage {
            Stage::Admitting(_) => false,
            Stage::Running(attempt) => {
                let gate = &attempt.exchange.gate;
                gate.is_ended() && gate.is_committed() && gate.is_empty() && !gate.is_cut()
            }
            Stage::Over(_) => !self.keepalive.begun,
        }
    }

    /// Tells of the commit.
    fn note(&mut self) {
        let Stage::Running(attempt) = &self.stage else { return };
        if attempt.exchange.gate.is_committed() {
            attempt.commit.set();
            self.recorder.first_content();
        }
    }

    fn end(&mut self) {
        let failure = match &self.stage {
            Stage::Admitting(_) => return,
            Stage::Running(attempt) => attempt.exchange.gate.failure(),
            Stage::Over(error) => Some(&**error),
        };
        match failure {
            Some(error) => self.recorder.failed(error, StatusCode::OK),
            None => self.recorder.completed(StatusCode::OK),
        }
    }
}

/// What a client is told whose failed attempt is not followed by another one.
fn unmended(failure: ApiError, refusal: &SubmitError, model: &str) -> ApiError {
    match refusal {
        // Nobody could take it: the failure is all there is to tell.
        SubmitError::InvalidRequest(_)
        | SubmitError::UnknownModel
        | SubmitError::Unavailable
        | SubmitError::QueueFull { .. }
        | SubmitError::NodeRequired => failure.spent(),
        // It waited for somebody: how that ended is the newer truth.
        SubmitError::QueueTimeout | SubmitError::DeadlineExceeded | SubmitError::Cancelled => {
            ApiError::from_submit(refusal, model).spent()
        }
        // Another Edge may well take it, so the client may try again.
        SubmitError::ShuttingDown => ApiError::from_submit(refusal, model),
    }
}

/// Asks the engine for a place, and for what to send there: the same bytes for each attempt (REC-4).
fn admit(engine: &Arc<dyn Engine>, kind: Kind, submit: Submit, request: Arc<ChatRequest>) -> Admission {
    let engine = Arc::clone(engine);
    Box::pin(async move { engine.submit(submit, Box::new(move |admitted| payload(kind, &request, admitted))).await })
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match &self.stage {
            Stage::Admitting(_) => "admitting",
            Stage::Running(_) => "running",
            Stage::Over(_) => "over",
        };
        f.debug_struct("Live").field("stage", &stage).finish_non_exhaustive()
    }
}
