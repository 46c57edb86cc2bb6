//! Decides what is remembered of a request: one record, delivered once, that holds no text of the client.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use iop_execution::{ModelName, NodeId, Principal, ProviderId, RunId, Usage};

use super::errors::{ApiError, Dialect};
use super::recovery::{Liveness, LivenessDecision, LivenessReason};
use super::request::estimate_prompt_tokens;
use crate::api::{Admitted, Engine};
use crate::rate_limit::{Permit, RateRefusal};
use iop_execution::closed_list as closed;

closed! {
    /// Who ended a request (OPS-2).
    EndedBy {
        /// It was answered.
        Completed = "completed",
        /// The client left, or took nothing for too long.
        Client = "client",
        /// The client asked for something that can't be had: bad request, key, path, model.
        Request = "request",
        /// The hard deadline.
        Deadline = "deadline",
        /// A limit of the caller's key.
        KeyLimit = "key_limit",
        /// The queue: full, or the wait was too long.
        Queue = "queue",
        /// No provider could take it.
        NoProvider = "no_provider",
        /// A stall.
        Stall = "stall",
        /// The connection to a Node or a provider broke.
        Disconnect = "disconnect",
        /// The provider takes no more for now.
        ProviderLimit = "provider_limit",
        /// The provider failed.
        ProviderError = "provider_error",
        /// An operator cancelled it.
        Cancelled = "cancelled",
        /// The Edge shuts down.
        Shutdown = "shutdown",
        /// A defect or a lack of memory of the Edge.
        Edge = "edge",
    }
}

closed! {
    /// How a request ended (REC-7).
    Outcome {
        /// The client has a whole answer.
        Completed = "completed",
        /// It has an error.
        Failed = "failed",
        /// It left, or an operator cancelled the run.
        Cancelled = "cancelled",
        /// The client has a whole answer, after another attempt.
        RecoveredCompleted = "recovered_completed",
        /// It has an error, after another attempt.
        RecoveryExhausted = "recovery_exhausted",
        /// It has an error, and another attempt was not allowed.
        Ineligible = "ineligible",
    }
}

closed! {
    /// What was asked.
    Endpoint {
        /// A chat completion.
        Chat = "chat",
        /// A completion of the older API.
        Completions = "completions",
        /// Embeddings.
        Embeddings = "embeddings",
        /// A response.
        Responses = "responses",
        /// A message of Anthropic's API.
        Messages = "messages",
        /// The list of models, or one of them.
        Models = "models",
        /// Anything else.
        Other = "other",
    }
}

closed! {
    /// Why an event of a provider was replaced, dropped or added: the closed list of API-10.
    Edit {
        /// (a) `model` says the public name.
        Model = "model",
        /// (b) A byte order mark was dropped.
        Bom = "bom",
        /// (b) A block without data was dropped.
        NoData = "no_data",
        /// (c) An error became one normalised error.
        Error = "error",
        /// (d) A usage report nobody asked for was dropped.
        UsageDropped = "usage_dropped",
        /// (d) A usage report got its `choices: []`.
        UsageChoices = "usage_choices",
        /// (e) A finish reason is one of OpenAI's.
        Finish = "finish_reason",
        /// (e) A piece of a tool call says which call it belongs to.
        ToolCall = "tool_call",
        /// (e) Arguments of a tool call became text.
        ToolArguments = "tool_arguments",
        /// (e) A choice got its delta.
        Delta = "delta",
        /// (f) Reasoning got its other name.
        Reasoning = "reasoning",
        /// A whole answer got members that OpenAI's clients take for granted.
        Members = "members",
        /// The provider was finished but did not say `[DONE]`.
        Done = "done",
    }
}

impl Endpoint {
    /// Whose error object its clients read.
    pub(crate) const fn dialect(self) -> Dialect {
        match self {
            Self::Messages => Dialect::Anthropic,
            Self::Chat | Self::Completions | Self::Embeddings | Self::Responses | Self::Models | Self::Other => {
                Dialect::OpenAi
            }
        }
    }
}

/// How often each [`Edit`] was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Edits([u32; Edit::ALL.len()]);

impl Edits {
    pub(crate) const fn new() -> Self {
        Self([0; Edit::ALL.len()])
    }

    /// How often an edit was made.
    #[must_use]
    pub fn count(&self, edit: Edit) -> u32 {
        self.0.get(edit as usize).copied().unwrap_or(0)
    }

    /// The edits that were made.
    pub fn iter(&self) -> impl Iterator<Item = (Edit, u32)> + '_ {
        Edit::ALL.iter().zip(self.0).filter(|(_, count)| *count > 0).map(|(edit, count)| (*edit, count))
    }

    pub(crate) fn add(&mut self, edit: Edit, times: u32) {
        if let Some(count) = self.0.get_mut(edit as usize) {
            *count = count.saturating_add(times);
        }
    }
}

/// Id of one client request, made by the Edge: 128 random bits. Written `req_<32 hex digits>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub(crate) RunId);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "req_{}", self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One client request, as the access log and metrics see it (OPS-2). Holds no text of the client but the name of a model
/// that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestRecord {
    /// The request.
    pub request_id: RequestId,
    /// What was asked.
    pub endpoint: Endpoint,
    /// Who called, where keys say so.
    pub principal: Option<Principal>,
    /// The model, if it exists; see [`Self::model_label`].
    pub model: Option<ModelName>,
    /// The run of the last attempt.
    pub run_id: Option<RunId>,
    /// The provider of the last attempt.
    pub provider: Option<ProviderId>,
    /// The Node of the last attempt.
    pub node: Option<NodeId>,
    /// How often it was dispatched.
    pub attempts: u32,
    /// The client asked for a stream.
    pub stream: bool,
    /// How it ended.
    pub outcome: Outcome,
    /// Who ended it.
    pub ended_by: EndedBy,
    /// HTTP status; 499 when the client left.
    pub status: u16,
    /// Stable code of the error, if it has one.
    pub code: Option<&'static str>,
    /// How long it waited for a place.
    pub queue: Option<Duration>,
    /// From its arrival to the first content for the client.
    pub ttft: Option<Duration>,
    /// From its arrival to its end.
    pub duration: Duration,
    /// Counts the providers reported, partial ones too: the last report of each attempt, all attempts added up. The client
    /// sees those of the attempt that answered.
    pub usage: Option<Usage>,
    /// Edits of the last attempt's answer.
    pub edits: Edits,
}

impl RequestRecord {
    /// The model as a metric label: one bucket for all names that don't exist (API-15).
    #[must_use]
    pub fn model_label(&self) -> &str {
        self.model.as_ref().map_or("other", ModelName::as_str)
    }
}

/// Who is told how each request ended.
pub trait RequestObserver: fmt::Debug + Send + Sync + 'static {
    /// A request ended; called exactly once for each, health checks excepted. Must not block.
    fn request_ended(&self, record: &RequestRecord);

    /// A failure was considered for another attempt, or a request with such a failure ended (OBS-3). Must not block.
    fn liveness(&self, observation: &LivenessObservation) {
        let _ = observation;
    }
}

/// What became of a failure that another attempt could help with. Closed values only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the two metrics of OBS-3")]
pub enum LivenessObservation {
    /// One failure was considered.
    Considered {
        /// What was decided.
        decision: LivenessDecision,
        /// Why.
        reason: LivenessReason,
    },
    /// A request that had one ended.
    Ended {
        /// How.
        outcome: Outcome,
    },
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs, reason = "a unit")]
pub struct IgnoreRequests;

impl RequestObserver for IgnoreRequests {
    fn request_ended(&self, _: &RequestRecord) {}
}

const CLIENT_GONE: u16 = 499;

/// Fills one record and delivers it once: when told how the request ended, or when dropped because the client left.
#[derive(Debug)]
pub(crate) struct Recorder {
    record: RequestRecord,
    observer: Arc<dyn RequestObserver>,
    arrived: Instant,
    delivered: bool,
    liveness: Liveness,
    /// A failure was considered that another attempt may mend, which is known once that one is admitted.
    undecided: bool,
    /// What the attempts before this one reported.
    earlier: Option<Usage>,
    /// What the caller's key is charged at the end.
    permit: Option<Permit>,
    /// It has a limit of tokens.
    charged: bool,
    /// Attempts that a provider may have been asked for.
    sent: u32,
    /// Bytes of text that the client was given, as far as a key is charged for them.
    text: usize,
    /// A name that may turn out to exist: decided only if the request ends while it waits.
    suspect: Option<(ModelName, Arc<dyn Engine>)>,
}

/// The driver's clock.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Recorder {
    pub(crate) const fn endpoint(&self) -> Endpoint {
        self.record.endpoint
    }

    pub(crate) fn new(observer: Arc<dyn RequestObserver>, request_id: RequestId, endpoint: Endpoint) -> Self {
        let record = RequestRecord {
            request_id,
            endpoint,
            principal: None,
            model: None,
            run_id: None,
            provider: None,
            node: None,
            attempts: 0,
            stream: false,
            outcome: Outcome::Cancelled,
            ended_by: EndedBy::Client,
            status: CLIENT_GONE,
            code: None,
            queue: None,
            ttft: None,
            duration: Duration::ZERO,
            usage: None,
            edits: Edits::default(),
        };
        Self {
            record,
            observer,
            arrived: now(),
            delivered: false,
            liveness: Liveness::default(),
            undecided: false,
            earlier: None,
            permit: None,
            charged: false,
            sent: 0,
            text: 0,
            suspect: None,
        }
    }

    pub(crate) const fn request_id(&self) -> RequestId {
        self.record.request_id
    }

    pub(crate) const fn arrived(&self) -> Instant {
        self.arrived
    }

    pub(crate) fn elapsed(&self) -> Duration {
        now().saturating_duration_since(self.arrived)
    }

    pub(crate) fn caller(&mut self, principal: Option<Principal>) {
        self.record.principal = principal;
    }

    /// The caller's key let this request in.
    pub(crate) fn limited(&mut self, permit: Permit) {
        self.charged = permit.counts_tokens();
        self.permit = Some(permit);
    }

    /// Holds back what the request is expected to use of the key's tokens.
    pub(crate) fn reserve(&mut self, tokens: u32) -> Result<(), RateRefusal> {
        self.permit.as_mut().map_or(Ok(()), |permit| permit.reserve(tokens.into(), now()))
    }

    pub(crate) const fn stream(&mut self, stream: bool) {
        self.record.stream = stream;
    }

    pub(crate) fn submitting(&mut self, model: ModelName, engine: Arc<dyn Engine>) {
        self.suspect = Some((model, engine));
    }

    /// The engine's answer tells whether the model exists.
    pub(crate) fn submitted(&mut self, known: bool, admitted: Option<&Admitted>) {
        if let Some((name, _)) = self.suspect.take() {
            self.record.model = known.then_some(name);
        }
        if let Some(admitted) = admitted {
            self.record.run_id = Some(admitted.run_id);
            self.record.provider = Some(admitted.provider.clone());
            self.record.node = Some(admitted.node.clone());
            self.record.queue = Some(self.record.queue.unwrap_or_default() + admitted.queued);
            self.record.attempts += 1;
            self.earlier = self.record.usage;
        }
    }

    pub(crate) fn first_content(&mut self) {
        if self.record.ttft.is_none() {
            self.record.ttft = Some(self.elapsed());
        }
    }

    /// The attempt was handed to a Node.
    pub(crate) const fn sent(&mut self) {
        self.sent += 1;
    }

    /// It was refused there, before its provider was asked anything.
    pub(crate) const fn refused_unasked(&mut self) {
        self.sent = self.sent.saturating_sub(1);
    }

    /// The client was given a part of its answer. Looked into only where a key is charged for it.
    pub(crate) fn gave(&mut self, bytes: &[u8]) {
        if self.charged {
            let deltas = self.record.endpoint == Endpoint::Responses && self.record.stream;
            self.text = self.text.saturating_add(text_bytes(bytes, deltas));
        }
    }

    /// A failed attempt is to be mended by another one, if that one is admitted.
    pub(crate) const fn considering(&mut self) {
        self.undecided = true;
    }

    /// What came of a failed attempt: told once for each (OBS-3).
    pub(crate) fn considered(&mut self, decision: LivenessDecision, reason: LivenessReason) {
        self.undecided = false;
        self.observer.liveness(&LivenessObservation::Considered { decision, reason });
    }

    /// The attempt that was to mend a failure did not begin.
    pub(crate) fn did_not_begin(&mut self, reason: LivenessReason) {
        self.liveness.did_not_begin(reason);
        self.considered(LivenessDecision::Ineligible, reason);
    }

    /// What has been tried for this request.
    pub(crate) const fn liveness(&mut self) -> &mut Liveness {
        &mut self.liveness
    }

    /// What the attempt under way has reported so far.
    pub(crate) fn progress(&mut self, usage: Option<Usage>, edits: Edits) {
        self.record.usage = added(self.earlier, usage);
        self.record.edits = edits;
    }

    pub(crate) fn completed(&mut self, status: StatusCode) {
        self.record.outcome = Outcome::Completed;
        self.record.ended_by = EndedBy::Completed;
        self.record.status = status.as_u16();
        self.deliver();
    }

    /// `status` is what the client saw: 200 if the error came after the commit.
    pub(crate) fn failed(&mut self, error: &ApiError, status: StatusCode) {
        self.record.ended_by = error.ended_by();
        self.record.outcome = match self.record.ended_by {
            EndedBy::Client | EndedBy::Cancelled => Outcome::Cancelled,
            EndedBy::Completed
            | EndedBy::Request
            | EndedBy::KeyLimit
            | EndedBy::Deadline
            | EndedBy::Queue
            | EndedBy::NoProvider
            | EndedBy::Stall
            | EndedBy::Disconnect
            | EndedBy::ProviderLimit
            | EndedBy::ProviderError
            | EndedBy::Shutdown
            | EndedBy::Edge => Outcome::Failed,
        };
        self.record.status = if self.record.ended_by == EndedBy::Client { CLIENT_GONE } else { status.as_u16() };
        self.record.code = error.code();
        self.deliver();
    }

    fn deliver(&mut self) {
        if std::mem::replace(&mut self.delivered, true) {
            return;
        }
        if let Some((model, engine)) = self.suspect.take()
            && engine.models().iter().any(|known| known.name == model)
        {
            self.record.model = Some(model);
        }
        if let Some(permit) = self.permit.take() {
            let output = u64::from(estimate_prompt_tokens(self.text));
            let used = if self.sent == 0 { 0 } else { used(self.record.usage, permit.reserved(), output) };
            permit.settle(used, now());
        }
        self.record.duration = self.elapsed();
        if self.undecided {
            // Nobody waits any more for the attempt that waits for its place.
            self.did_not_begin(LivenessReason::Cancelled);
        }
        self.record.outcome = self.liveness.outcome(self.record.outcome);
        if self.liveness.was_in_doubt() {
            self.observer.liveness(&LivenessObservation::Ended { outcome: self.record.outcome });
        }
        self.observer.request_ended(&self.record);
    }
}

/// Tokens that a key is charged for what was sent: what was reported, else what was expected of the prompt, and what the text
/// that the client has makes. Else whoever leaves before the report would have the answer for nothing.
fn used(reported: Option<Usage>, prompt: u64, output: u64) -> u64 {
    let reported = reported.unwrap_or_default();
    reported.input_tokens.unwrap_or(prompt).saturating_add(reported.output_tokens.unwrap_or(output))
}

/// Members of answers that hold text a model made. The whole of it comes once more at the end of a stream of responses, so
/// that only `delta` counts there.
const TEXT_MEMBERS: [&[u8]; 7] =
    [b"content", b"text", b"reasoning_content", b"reasoning", b"arguments", b"thinking", b"partial_json"];

/// Where the quote is that ends a JSON string.
fn string_end(string: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        at += memchr::memchr2(b'"', b'\\', string.get(at..)?)?;
        if string.get(at) == Some(&b'"') {
            return Some(at);
        }
        at += 2;
    }
}

/// Bytes of text in JSON that may stand in events; cut JSON counts as far as it is there.
fn text_bytes(json: &[u8], deltas: bool) -> usize {
    let (mut bytes, mut member, mut at) = (0, false, 0);
    while let Some(rest) = json.get(at..)
        && let Some(quote) = memchr::memchr(b'"', rest)
    {
        let start = at + quote + 1;
        let string = json.get(start..).unwrap_or_default();
        // Without its end, all that is there.
        let end = string_end(string).unwrap_or(string.len());
        let (text, after) = (string.get(..end).unwrap_or_default(), string.get(end + 1..).unwrap_or_default());
        let is_name = after.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b':');
        if !is_name && member {
            bytes += text.len();
        }
        let counts = if deltas { text == b"delta" } else { TEXT_MEMBERS.contains(&text) };
        let value = after.iter().skip_while(|byte| byte.is_ascii_whitespace()).skip(1);
        let first = value.copied().find(|byte| !byte.is_ascii_whitespace());
        member = is_name && counts && first == Some(b'"');
        at = start + end + 1;
    }
    bytes
}

/// Counts of two attempts. What neither reported stays absent (EXE-7).
fn added(one: Option<Usage>, other: Option<Usage>) -> Option<Usage> {
    let (Some(one), Some(other)) = (one, other) else { return one.or(other) };
    let count = |one: Option<u64>, other: Option<u64>| match (one, other) {
        (Some(one), Some(other)) => Some(one.saturating_add(other)),
        (one, other) => one.or(other),
    };
    Some(Usage {
        input_tokens: count(one.input_tokens, other.input_tokens),
        output_tokens: count(one.output_tokens, other.output_tokens),
        reasoning_tokens: count(one.reasoning_tokens, other.reasoning_tokens),
        cached_input_tokens: count(one.cached_input_tokens, other.cached_input_tokens),
    })
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.deliver();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_an_answer_is_what_a_model_made_of_it() {
        // CRD-12, LEA-2
        let chat = r#"data: {"id":"abcdefgh","choices":[{"delta":{"role":"assistant", "content" : "four","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":1}"}}]}}]}"#;
        assert_eq!(text_bytes(chat.as_bytes(), false), 4 + 9);
        let message =
            r#"data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"say \"text\": \"x\""}}"#;
        assert_eq!(text_bytes(message.as_bytes(), false), 19);
        let delta = r#"data: {"type":"response.output_text.delta","delta":"abc"}"#;
        let done = r#"data: {"type":"response.output_text.done","text":"abc","part":{"text":"abc"}}"#;
        assert_eq!(text_bytes(format!("{delta}\n\n{done}\n\n").as_bytes(), true), 3);
        assert_eq!(text_bytes(br#"{"content":null,"x":"long text here"}"#, false), 0);
        for cut in 0..chat.len() {
            assert!(text_bytes(&chat.as_bytes()[..cut], false) <= 14, "{cut}");
        }
    }
}
