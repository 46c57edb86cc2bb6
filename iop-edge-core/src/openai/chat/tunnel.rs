//! Decides what the frames of a tunnelled answer mean for the client.
//!
//! ```text
//! Head ─ 2xx, stream ─► Events ─ [DONE] ─► Done
//!   │                      └ error event ─► Failing ─ terminal, or long enough ─► refused or broken
//!   ├─ 2xx, no stream ─► Document
//!   └─ else ───────────► Failing
//! ```
//!
//! Inputs: [`TunnelAnswer::frame`], [`TunnelAnswer::lost`], [`TunnelAnswer::lingered`]. Output: what it puts into the
//! [`Gate`]. Exactly one end reaches the gate, whatever the frames are.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use iop_execution::complaint;
use iop_execution::{
    ExecutionFailure, FailureCode, FailureStage, FrameFlags, ProviderContacted, TunnelFrame, TunnelHead, Usage,
};

use super::commit::Gate;
use crate::openai::config::{DONE_LINGER, ERROR_LINGER, MAX_ANSWER_BYTES, MAX_EVENT_BYTES, MAX_PROVIDER_ERROR_BYTES};
use crate::openai::errors::ApiError;
use crate::openai::mend::Form;
use crate::openai::provider_error::ProviderSaid;
use crate::openai::record::Edit;
use crate::openai::rewrite::top_level::{Key, Met, Scan};
use crate::openai::rewrite::{Rewrite, first_event};

const NO_ANSWER: &str = "the provider's answer is not one to this request";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// What a client asked for, as far as it matters here.
#[derive(Debug)]
pub(crate) struct Wish {
    pub(crate) stream: bool,
    /// The public name as a JSON string, if answers must say it.
    pub(crate) model: Option<String>,
    pub(crate) usage: bool,
    /// The array without which a whole answer is none.
    pub(crate) answer: Key,
    /// What of it is looked into.
    pub(crate) mended: Form,
}

#[derive(Debug)]
enum Stage {
    Head,
    Events,
    Document(Document),
    Failing(Failing),
    Done,
}

/// The answer is an error; more of it may come.
#[derive(Debug)]
struct Failing {
    failure: ExecutionFailure,
    said: ProviderSaid,
    body: BytesMut,
    /// What stands in `body` is still to be read.
    in_body: bool,
}

/// One tunnelled answer.
#[derive(Debug)]
pub(crate) struct TunnelAnswer {
    stream: bool,
    stage: Stage,
    /// Parts of an event whose end has not come.
    parts: BytesMut,
    rewrite: Rewrite,
    model: Option<String>,
    answer: Key,
    mended: Form,
    usage: Option<Usage>,
    tool_call: bool,
}

impl TunnelAnswer {
    pub(crate) fn new(wish: Wish) -> Self {
        Self {
            stream: wish.stream,
            stage: Stage::Head,
            parts: BytesMut::new(),
            rewrite: Rewrite::new(wish.model.clone(), wish.usage, wish.mended),
            model: wish.model,
            answer: wish.answer,
            mended: wish.mended,
            usage: None,
            tool_call: false,
        }
    }

    pub(crate) const fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// A part of a tool call was given out, as far as a look at the bytes tells: names of fields inside of text may look the
    /// same, and nothing but the name of a reason depends on it.
    pub(crate) const fn has_tool_call(&self) -> bool {
        self.tool_call
    }

    pub(crate) const fn rewrite(&self) -> &Rewrite {
        &self.rewrite
    }

    /// The client has its whole stream; only the run's own terminal is missing.
    pub(crate) const fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    /// It is known to be an error; the rest of it should come soon.
    pub(crate) const fn is_failing(&self) -> bool {
        matches!(self.stage, Stage::Failing(_))
    }

    /// How long the rest of it is awaited, once it can't matter any more.
    pub(crate) fn linger(&self) -> Option<Duration> {
        match self.stage {
            Stage::Done => Some(DONE_LINGER),
            Stage::Failing(_) => Some(ERROR_LINGER),
            Stage::Head | Stage::Events | Stage::Document(_) => None,
        }
    }

    /// The next frame.
    pub(crate) fn frame(&mut self, frame: TunnelFrame, gate: &mut Gate) {
        match frame {
            TunnelFrame::Head(head) => self.head(&head, gate),
            TunnelFrame::Usage(usage) => self.usage.get_or_insert_default().update(usage),
            TunnelFrame::Body { bytes, flags } => self.body(bytes, flags, gate),
            TunnelFrame::End => self.end(gate),
            TunnelFrame::Failed(failure) => self.fail(Some(failure), gate),
            // The client has everything: what ended the rest is not its business.
            TunnelFrame::Cancelled(_) if self.is_done() => gate.complete(),
            TunnelFrame::Cancelled(reason) => gate.fail(ApiError::from_cancel(reason)),
        }
    }

    /// The frames ended without a terminal.
    pub(crate) fn lost(&mut self, gate: &mut Gate) {
        self.fail(Some(lost()), gate);
    }

    /// Whatever the answer waited for did not come soon enough.
    pub(crate) fn lingered(&mut self, gate: &mut Gate) {
        if self.is_failing() {
            self.fail(None, gate);
        } else {
            gate.complete();
        }
    }

    fn head(&mut self, head: &TunnelHead, gate: &mut Gate) {
        if !matches!(self.stage, Stage::Head) {
            return self.fail(Some(protocol("the provider's answer has two heads")), gate);
        }
        let typed = head.headers.contains_key(http::header::CONTENT_TYPE);
        self.stage = if !head.status.is_success() || head.status == StatusCode::NO_CONTENT {
            let failure = rejected("the provider answered with an error", Some(head.status.as_u16()))
                .with_retry_after_ms(complaint::retry_after_ms(&head.headers));
            Stage::Failing(Failing::new(failure, ProviderSaid::default(), true))
        } else if self.stream && typed && !head.is_event_stream() {
            let failure = protocol("the provider's answer is no event stream");
            Stage::Failing(Failing::new(failure, ProviderSaid::default(), true))
        } else if self.stream {
            Stage::Events
        } else {
            Stage::Document(Document::new(self.model.take(), self.answer))
        };
    }

    fn body(&mut self, bytes: Bytes, flags: FrameFlags, gate: &mut Gate) {
        match &mut self.stage {
            Stage::Head => self.fail(Some(protocol("the provider's answer has no head")), gate),
            Stage::Events => self.part(bytes, flags, gate),
            Stage::Document(document) => {
                if let Err(problem) = document.push(bytes, gate) {
                    self.fail(Some(protocol(problem)), gate);
                }
            }
            Stage::Failing(failing) => {
                if failing.push(&bytes) {
                    self.fail(None, gate);
                }
            }
            // Whatever comes after `[DONE]` is nobody's.
            Stage::Done => {}
        }
    }

    /// Puts events together; what they are is only known with their last part.
    fn part(&mut self, bytes: Bytes, flags: FrameFlags, gate: &mut Gate) {
        if self.parts.len() + bytes.len() > MAX_EVENT_BYTES
            && (flags.contains(FrameFlags::MORE) || !self.parts.is_empty())
        {
            return self.fail(Some(protocol("an event of the provider is too large")), gate);
        }
        if flags.contains(FrameFlags::MORE) {
            self.parts.extend_from_slice(&bytes);
            return;
        }
        let whole = if self.parts.is_empty() {
            bytes
        } else {
            self.parts.extend_from_slice(&bytes);
            std::mem::take(&mut self.parts).freeze()
        };
        self.events(whole, flags, gate);
    }

    fn events(&mut self, bytes: Bytes, flags: FrameFlags, gate: &mut Gate) {
        if flags.contains(FrameFlags::ERROR) {
            let said = ProviderSaid::in_events(&bytes);
            let failure = rejected("the provider reported an error", said.status);
            self.stage = Stage::Failing(Failing::new(failure, said, false));
            return;
        }
        let terminal = flags.contains(FrameFlags::TERMINAL);
        let bytes = if terminal { first_event(&bytes) } else { bytes };
        if let Some(bytes) = self.rewrite.events(bytes, flags) {
            if flags.contains(FrameFlags::CONTENT) {
                self.tool_call = self.tool_call || calls_a_tool(&bytes);
                gate.content(bytes);
            } else {
                gate.hold(bytes);
            }
        }
        if terminal {
            self.stage = Stage::Done;
            // The end itself waits for the run's terminal, the bytes do not.
            gate.release();
        }
    }

    fn end(&mut self, gate: &mut Gate) {
        match &mut self.stage {
            Stage::Head => self.fail(Some(protocol("the provider's answer has no head")), gate),
            Stage::Events => {
                if !self.parts.is_empty() {
                    return self.fail(Some(protocol("the provider's last event is incomplete")), gate);
                }
                if self.mended == Form::Messages {
                    // Its last event is one of its own, which nobody else can make.
                    return self.fail(Some(protocol("the provider's answer has no end")), gate);
                }
                self.rewrite.count(Edit::Done);
                gate.hold(Bytes::from_static(DONE));
                gate.complete();
            }
            Stage::Document(document) => match document.end(gate) {
                Ok(renamed) => {
                    if renamed {
                        self.rewrite.count(Edit::Model);
                    }
                    // One that is too large to be held passes as it is.
                    if !gate.is_committed() {
                        let whole = self.rewrite.document(gate.take_all());
                        gate.hold(whole);
                    }
                    gate.complete();
                }
                Err(error) => {
                    self.rewrite.count(Edit::Error);
                    gate.fail(error);
                }
            },
            Stage::Failing(_) => self.fail(None, gate),
            Stage::Done => gate.complete(),
        }
    }

    /// Ends it as failed. Without a terminal of the run, by what is known already.
    fn fail(&mut self, terminal: Option<ExecutionFailure>, gate: &mut Gate) {
        let (failure, said) = match &mut self.stage {
            // The client has everything: a failure afterwards is not its business.
            Stage::Done => return gate.complete(),
            Stage::Failing(failing) => {
                self.rewrite.count(Edit::Error);
                failing.merged(terminal)
            }
            Stage::Head | Stage::Events | Stage::Document(_) => {
                (terminal.unwrap_or_else(lost), ProviderSaid::default())
            }
        };
        gate.fail(ApiError::from_failure(&failure, said.message));
    }
}

impl Failing {
    fn new(failure: ExecutionFailure, said: ProviderSaid, in_body: bool) -> Self {
        Self { failure, said, body: BytesMut::new(), in_body }
    }

    /// True once enough was read.
    fn push(&mut self, bytes: &[u8]) -> bool {
        if self.in_body {
            let room = MAX_PROVIDER_ERROR_BYTES.saturating_sub(self.body.len());
            self.body.extend_from_slice(bytes.get(..room.min(bytes.len())).unwrap_or_default());
        }
        self.in_body && self.body.len() >= MAX_PROVIDER_ERROR_BYTES
    }

    /// What the run's terminal and the provider's own words say together. A terminal that knows the reason or is about
    /// something else than the provider's refusal stands above the words.
    fn merged(&mut self, terminal: Option<ExecutionFailure>) -> (ExecutionFailure, ProviderSaid) {
        let mut said = std::mem::take(&mut self.said);
        if self.in_body {
            said = ProviderSaid::in_body(&self.body);
        }
        let mut failure = self.failure.clone();
        if failure.code == FailureCode::ProviderProtocol && said != ProviderSaid::default() {
            // A JSON error where a stream was due.
            failure = rejected("the provider reported an error", said.status);
        }
        if let Some(terminal) = terminal {
            if terminal.code != FailureCode::ProviderRejected && terminal.code != FailureCode::ProviderProtocol {
                return (terminal, ProviderSaid::default());
            }
            failure.upstream_status = terminal.upstream_status.or(failure.upstream_status);
            failure.retry_after_ms = terminal.retry_after_ms.or(failure.retry_after_ms);
            failure.provider_reason = terminal.provider_reason;
        }
        // A refused credential is told by the status alone.
        if !matches!(failure.upstream_status, Some(401 | 403)) {
            failure.provider_reason = failure.provider_reason.or(said.reason);
        }
        (failure, said)
    }
}

/// An answer that is not streamed: passed piece by piece, its model renamed on the way.
#[derive(Debug)]
struct Document {
    scan: Scan,
    model: Option<String>,
    length: usize,
    /// Inside the value that is being replaced.
    replacing: bool,
    renamed: bool,
    answer: Key,
    /// The array is there.
    found: bool,
    error: bool,
}

impl Document {
    const fn new(model: Option<String>, answer: Key) -> Self {
        let scan = Scan::new();
        Self { scan, model, length: 0, replacing: false, renamed: false, answer, found: false, error: false }
    }

    fn push(&mut self, bytes: Bytes, gate: &mut Gate) -> Result<(), &'static str> {
        let base = self.length;
        self.length += bytes.len();
        if self.length > MAX_ANSWER_BYTES {
            return Err("the provider's answer is too large");
        }
        let mut kept_from = 0;
        let (model, replacing, renamed) = (&self.model, &mut self.replacing, &mut self.renamed);
        let (answer, found, error) = (self.answer, &mut self.found, &mut self.error);
        self.scan.feed(&bytes, base, |met| match met {
            Met::Value(Key::Model, at, b'"') => {
                if let Some(name) = model.as_ref().filter(|_| !*renamed) {
                    gate.hold(bytes.slice(kept_from..at - base));
                    gate.hold(Bytes::copy_from_slice(name.as_bytes()));
                    (*replacing, *renamed) = (true, true);
                }
            }
            Met::End(Key::Model, at) => {
                if std::mem::take(replacing) {
                    kept_from = at - base;
                }
            }
            Met::Value(key, _, b'[') if key == answer => *found = true,
            Met::Value(Key::Error, _, first) => *error |= first != b'n',
            Met::Open(_) | Met::Value(..) | Met::End(..) => {}
        });
        if self.scan.is_invalid() {
            return Err(NO_ANSWER);
        }
        if !self.replacing {
            gate.hold(bytes.slice(kept_from..));
        }
        Ok(())
    }

    /// Whether it was a whole answer; true if its model was renamed.
    fn end(&self, gate: &mut Gate) -> Result<bool, ApiError> {
        if self.scan.is_done() && self.found {
            return Ok(self.renamed);
        }
        if self.scan.is_done() && self.error && !gate.is_committed() {
            let said = ProviderSaid::in_body(&gate.take_all());
            let failure = rejected("the provider reported an error", said.status).with_reason(said.reason);
            return Err(ApiError::from_failure(&failure, said.message));
        }
        Err(ApiError::bad_gateway(NO_ANSWER))
    }
}

/// `"tool_calls": [{` somewhere in an event.
fn calls_a_tool(event: &[u8]) -> bool {
    const KEY: &[u8] = b"\"tool_calls\"";
    memchr::memmem::find_iter(event, KEY).any(|at| {
        let rest = event.get(at + KEY.len()..).unwrap_or_default();
        let mut signs = rest.iter().copied().filter(|byte| !byte.is_ascii_whitespace());
        signs.next() == Some(b':') && signs.next() == Some(b'[') && signs.next() == Some(b'{')
    })
}

fn rejected(message: &'static str, status: Option<u16>) -> ExecutionFailure {
    let mut failure =
        ExecutionFailure::new(FailureCode::ProviderRejected, FailureStage::Stream, ProviderContacted::Yes, message);
    failure.upstream_status = status;
    failure
}

fn protocol(message: &'static str) -> ExecutionFailure {
    ExecutionFailure::new(FailureCode::ProviderProtocol, FailureStage::Stream, ProviderContacted::Yes, message)
}

fn lost() -> ExecutionFailure {
    let message = "the connection to the node ended";
    ExecutionFailure::new(FailureCode::Disconnected, FailureStage::Stream, ProviderContacted::Unknown, message)
}
