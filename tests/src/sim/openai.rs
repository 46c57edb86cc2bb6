//! Decides what a simulated OpenAI client asks and what it may see over all attempts of its request: one outcome, the whole
//! content of one attempt, no replay after content, no end that looks whole and is not.
//!
//! `Watched` stands between the surface and the Edge and sees each attempt asked for and admitted, so the rules of replay
//! are checked against what the world knows of the attempts before, not against what the surface says of them.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use iop_edge_core::api::{Admitted, Engine, ModelListing, Payload, Submit, SubmitError, Submitted};
use iop_edge_core::openai::{
    LivenessObservation, OpenAiBody, OpenAiConfig, OpenAiService, RequestObserver, RequestRecord,
};
use iop_execution::{Health, async_trait};
use serde_json::Value;
use tokio::time::sleep;

use crate::sim::client::{ClientPlan, Desk, Reader, SLOW_CLIENT, TICK};
use crate::sim::history::Who;
use crate::sim::provider::{Ending, Form};
use crate::sim::world::{Asking, Attempt, Facts, Record, Stage, World};

/// How long a failure that is known may wait for the rest of what the provider says of it, in milliseconds.
const LINGER: u64 = 2_100;
/// An answer that is longer takes seconds on a slow link, in bytes.
const LARGE: u64 = 64 << 10;
/// What a Node says whose gate is full: the Edge counts, so that never happens.
const FULL: &str = "every place of the adapter is taken";

/// How a client uses the OpenAI API.
#[derive(Debug, Clone, Copy)]
pub struct HttpPlan {
    /// It wants a stream.
    pub stream: bool,
    /// How often its request may be sent again.
    pub extra: u32,
    /// When it is shown that somebody is there, in milliseconds; 0 = never.
    pub keepalive: u64,
}

impl HttpPlan {
    /// What its answer looks like.
    #[must_use]
    pub const fn form(self) -> Form {
        if self.stream { Form::Stream } else { Form::Document }
    }
}

/// The Edge as the surface of one client sees it.
#[derive(Debug)]
struct Watched {
    desk: Desk,
    plan: ClientPlan,
}

/// A provider that the next attempt must not get, and whether it may where there is no other.
type Avoided = Option<(String, bool)>;

impl Watched {
    /// The surface asks for an attempt. Answers what it has to avoid.
    fn asks(&self) -> Avoided {
        let Self { desk, plan } = self;
        let clock = desk.clock();
        let mut facts = desk.world.facts();
        let mut problems = Vec::new();
        let (avoid, unsure) = {
            let asking = facts.askings.get(&plan.id).cloned().unwrap_or_default();
            if asking.submits > asking.budget {
                problems.push(format!("I8: more attempts than {} and the first", asking.budget));
            }
            if asking.given {
                problems.push("I8: a replay after content".to_owned());
            }
            let stalled = asking.attempts.last().and_then(|last| Some((last, *facts.stalls.get(&last.run)?)));
            match stalled {
                None => (asking.avoid, asking.unsure),
                Some((last, _)) if !is_certain(&facts, last) || !desk.is_connected(last.node) => (None, true),
                Some((_, stall)) if !stall.confirmed => {
                    problems.push("REC-4: a replay of a call that was not seen to end".to_owned());
                    (None, true)
                }
                Some((last, stall)) => (Some((last.provider.clone(), stall.health == Health::Available)), false),
            }
        };
        facts.broken.extend(problems.into_iter().map(|problem| format!("{problem} (client {})", plan.id)));
        let left =
            plan.deadline.map_or(u64::MAX, |deadline| (start_of(&facts, plan.id) + deadline).saturating_sub(clock));
        // The config may be another one than when the client came.
        let queue_timeout = facts.queue_timeouts.get(&plan.model).copied().unwrap_or_default();
        if let Some(asking) = facts.askings.get_mut(&plan.id) {
            asking.submits += 1;
            asking.queue_timeout = queue_timeout;
            (asking.avoid, asking.unsure) = (avoid.clone(), unsure);
        }
        if unsure {
            facts.wants.remove(&plan.id);
        } else if let Some(wants) = facts.wants.get_mut(&plan.id) {
            wants.avoid.clone_from(&avoid);
        }
        if let Some(client) = facts.clients.get_mut(&plan.id) {
            client.stage = Stage::Submitted;
            client.since = clock;
            client.wait_until = clock + left.min(queue_timeout) + TICK;
            client.deadline = None;
        }
        avoid
    }

    fn admitted(&self, admitted: &Admitted, avoid: &Avoided, at: u64) {
        let Self { desk, plan } = self;
        let mut facts = desk.world.facts();
        let provider = admitted.provider.as_str();
        let node = desk.node_of(provider);
        facts.note(Who::Client(plan.id), "attempt", if avoid.is_some() { "elsewhere" } else { "" }, [0, 0]);
        self.open(&mut facts);
        let attempt =
            Attempt { run: *admitted.run_id.as_bytes(), provider: provider.to_owned(), node, at, admitted: facts.now };
        if let Some(asking) = facts.askings.get_mut(&plan.id) {
            asking.attempts.push(attempt);
        }
        match avoid {
            Some((avoided, false)) if avoided == provider => {
                let problem = format!("I12: client {} got the provider whose stall was confirmed", plan.id);
                facts.broken.push(problem);
            }
            Some((avoided, true)) if avoided == provider => {
                if let Some(other) = desk.other_than(&facts, &plan.model, false, avoided) {
                    let problem = format!("I12: client {} got the provider that stalled beside {other}", plan.id);
                    facts.broken.push(problem);
                }
            }
            Some(_) => {}
            None if facts.askings.get(&plan.id).is_some_and(|asking| asking.unsure) => {}
            None => {
                if let Some(better) = desk.better_than(&facts, &plan.model, false, node) {
                    let problem = format!("FEN-7: client {} was sent to a suspect, and n{better} was none", plan.id);
                    facts.broken.push(problem);
                }
            }
        }
    }

    /// It waits for no place now.
    fn open(&self, facts: &mut Facts) {
        let Self { plan, .. } = self;
        let prompt = plan.pace == 0 && plan.stall.is_none();
        let start = start_of(facts, plan.id);
        if let Some(client) = facts.clients.get_mut(&plan.id) {
            client.stage = Stage::Open;
            client.deadline = plan.deadline.filter(|_| prompt).map(|after| start + after + LINGER);
        }
    }
}

/// When a client came, on the Edge's clock.
fn start_of(facts: &Facts, client: u32) -> u64 {
    facts.starts.get(&client).copied().unwrap_or_default()
}

/// Nothing else than its Node's own word can have ended an attempt.
fn is_certain(facts: &Facts, attempt: &Attempt) -> bool {
    !facts.fenced_since(attempt.node, attempt.at) && !facts.suspect_since(attempt.node, attempt.at)
}

#[async_trait]
impl Engine for Watched {
    async fn submit(
        &self,
        request: Submit,
        prepare: Box<dyn for<'a> FnOnce(&'a Admitted) -> Payload + Send>,
    ) -> Result<Submitted, SubmitError> {
        let avoid = self.asks();
        let at = self.desk.world.facts().now;
        let submitted = self.desk.edge.submit(request, prepare).await;
        match &submitted {
            Ok(submitted) => self.admitted(&submitted.admitted, &avoid, at),
            Err(_) => self.open(&mut self.desk.world.facts()),
        }
        submitted
    }

    fn models(&self) -> Vec<ModelListing> {
        self.desk.edge.models()
    }

    fn is_ready(&self) -> bool {
        true
    }
}

/// Who is told how a client's request ended.
#[derive(Debug)]
struct Ears {
    world: Arc<World>,
    client: u32,
}

impl RequestObserver for Ears {
    fn request_ended(&self, record: &RequestRecord) {
        let mut facts = self.world.facts();
        facts.note(Who::Client(self.client), "record", record.outcome.as_str(), [u64::from(record.attempts), 0]);
        let record = Record { outcome: record.outcome.as_str(), code: record.code, attempts: record.attempts };
        if let Some(asking) = facts.askings.get_mut(&self.client) {
            asking.records.push(record);
        }
    }

    fn liveness(&self, observation: &LivenessObservation) {
        if let LivenessObservation::Considered { reason, .. } = observation {
            self.world.note(Who::Client(self.client), "considered", reason.as_str(), [0, 0]);
        }
    }
}

/// Sends one request and reads the answer to its end. Dropping it is leaving.
pub(super) async fn ask(plan: &ClientPlan, http: HttpPlan, desk: &Desk) -> &'static str {
    {
        let mut facts = desk.world.facts();
        facts.askings.insert(plan.id, Asking { budget: http.extra, ..Asking::default() });
    }
    let engine = Watched { desk: desk.clone(), plan: plan.clone() };
    let ears = Ears { world: Arc::clone(&desk.world), client: plan.id };
    let mut config = OpenAiConfig::default()
        .with_recovery(http.extra, Duration::from_millis(http.keepalive))
        .with_observer(Arc::new(ears));
    config.unix_time = || 1;
    let service = OpenAiService::new(Arc::new(engine), config);
    let mut request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    if let Some(deadline) = plan.deadline {
        request = request.header("x-iop-deadline-ms", deadline);
    }
    let body = plan.work.body(&plan.model, plan.padding);
    let response = service.answer(request.body(Full::new(body)).unwrap()).await;
    let end = match read(plan, http, desk, response).await {
        Ok(end) => end,
        Err(rule) => {
            desk.world.broken(format!("{rule} (client {})", plan.id));
            return "broken";
        }
    };
    over(plan, desk, end)
}

/// How an answer ended.
enum End {
    /// It is whole, and made by this call of a provider, if it has content.
    Whole { call: Option<u64>, pieces: u64 },
    /// By this error: its code and its message.
    Error(Option<String>, String),
    /// It broke off.
    Cut,
    /// The client has enough.
    Left,
}

async fn read(
    plan: &ClientPlan,
    http: HttpPlan,
    desk: &Desk,
    response: Response<OpenAiBody>,
) -> Result<End, &'static str> {
    let ok = response.status() == 200;
    let mut reader = Answer { plan, desk, content: Reader::new(plan), bytes: BytesMut::new(), items: 0, end: None };
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return if http.stream { Err("REC-6: a stream that is cut") } else { Ok(End::Cut) };
        };
        let Ok(data) = frame.into_data() else { return Err("an answer with trailers") };
        reader.bytes.extend_from_slice(&data);
        let content = if ok && http.stream { reader.events()? } else { ok };
        if content {
            reader.given();
            reader.items += 1;
            if plan.leave_after == Some(reader.items) {
                return Ok(End::Left);
            }
            let stall = plan.stall.filter(|(at, _)| *at == reader.items).map_or(0, |(_, time)| time);
            let pause = plan.pace + stall;
            if pause > 0 {
                sleep(Duration::from_millis(pause)).await;
            }
        }
    }
    if ok && http.stream { reader.end() } else { reader.document(ok) }
}

/// An answer that is read.
struct Answer<'a> {
    plan: &'a ClientPlan,
    desk: &'a Desk,
    content: Reader<'a>,
    bytes: BytesMut,
    items: u64,
    end: Option<End>,
}

impl Answer<'_> {
    fn given(&self) {
        if let Some(asking) = self.desk.world.facts().askings.get_mut(&self.plan.id) {
            asking.given = true;
        }
    }

    /// Reads whole events. True if there was content among them.
    fn events(&mut self) -> Result<bool, &'static str> {
        let mut content = false;
        while let Some(at) = self.bytes.windows(2).position(|two| two == b"\n\n") {
            let event: Bytes = self.bytes.split_to(at + 2).freeze();
            if self.end.is_some() {
                return Err("I2: something after the end of a stream");
            }
            if event.starts_with(b":") {
                if self.content.pieces > 0 || content {
                    return Err("REC-8: a comment after content");
                }
                continue;
            }
            let data = event.strip_prefix(b"data: ").ok_or("I6: an event without data")?;
            if data.starts_with(b"[DONE]") {
                self.end = Some(self.whole());
                continue;
            }
            let value: Value = serde_json::from_slice(data).map_err(|_| "I6: an event that is no JSON")?;
            if let Some(error) = value.get("error") {
                self.end = Some(error_of(error));
                continue;
            }
            if let Some(text) = value["choices"][0]["delta"]["content"].as_str() {
                content = true;
                self.content.text(text.as_bytes())?;
            }
        }
        Ok(content)
    }

    fn whole(&self) -> End {
        End::Whole { call: self.content.call, pieces: self.content.pieces }
    }

    fn end(mut self) -> Result<End, &'static str> {
        if !self.bytes.is_empty() {
            return Err("REC-6: a stream ends inside of an event");
        }
        self.end.take().ok_or("I1, REC-6: a stream without an end")
    }

    fn document(mut self, ok: bool) -> Result<End, &'static str> {
        let value: Value =
            serde_json::from_slice(&self.bytes).map_err(|_| "I1, REC-6: a document that is not whole")?;
        if !ok {
            return value.get("error").map(error_of).ok_or("API-5: a status without an error");
        }
        let text = value["choices"][0]["message"]["content"].as_str().ok_or("I6: an answer without content")?;
        self.content.text(text.as_bytes())?;
        Ok(self.whole())
    }
}

fn error_of(error: &Value) -> End {
    let text = |name: &str| error[name].as_str().map(str::to_owned);
    End::Error(text("code"), text("message").unwrap_or_default())
}

/// Whether it may have ended like that.
fn over(plan: &ClientPlan, desk: &Desk, end: End) -> &'static str {
    let mut facts = desk.world.facts();
    let age = desk.clock() - start_of(&facts, plan.id);
    let asking = facts.askings.get(&plan.id).cloned().unwrap_or_default();
    let record = asking.records.last().copied();
    let (name, may) = match &end {
        End::Left => return "left",
        End::Whole { call, pieces } => {
            let of = call.and_then(|call| asking.calls.iter().position(|known| *known == call));
            let good =
                plan.work.ending == Ending::Whole || of.or(asking.calls.len().checked_sub(1)) >= Some(plan.work.bad);
            ("whole", good && *pieces == plan.work.pieces && (call.is_none() || of.is_some()))
        }
        End::Error(code, message) => {
            let told = record.and_then(|record| record.code);
            let same = told == code.as_deref();
            let configured = asking.attempts.iter().any(|attempt| facts.configured_since(attempt.admitted));
            let full = message == FULL && !configured;
            let code = told.unwrap_or("bad_request");
            (code, same && !full && may_end(plan, &facts, &asking, code, age))
        }
        End::Cut => {
            let code = record.and_then(|record| record.code).unwrap_or("bad_request");
            (code, asking.given && may_end(plan, &facts, &asking, code, age))
        }
    };
    if !may {
        let problem =
            format!("client {} ended as {name} after {age} ms, without a reason: {plan:?} {asking:?}", plan.id);
        facts.broken.push(problem);
    }
    name
}

fn may_end(plan: &ClientPlan, facts: &Facts, asking: &Asking, code: &str, age: u64) -> bool {
    let stalled = asking.attempts.iter().any(|attempt| facts.stalls.contains_key(&attempt.run));
    let ending = plan.work.ending;
    let slow = plan.stall.is_some_and(|(_, time)| time + plan.pace >= SLOW_CLIENT) || plan.pace >= SLOW_CLIENT;
    // On a slow link a large answer keeps a pong waiting, and without content it may be taken from the Node (FEN-7).
    let heavy = plan.work.form == Form::Document && plan.work.pieces * plan.work.size as u64 > LARGE;
    match code {
        "response_stalled" => stalled,
        "no_provider_available" => !plan.calm,
        "provider_unavailable" => !plan.calm || heavy || matches!(ending, Ending::Broken | Ending::Unreachable),
        "queue_full" => true,
        "queue_timeout" => age >= asking.queue_timeout,
        // A Node counts on its own clock.
        "deadline_exceeded" => plan.deadline.is_some_and(|deadline| age + TICK + deadline / 100 >= deadline),
        "cancelled" => facts.cancelled,
        "bad_gateway" => ending == Ending::Down || facts.reconfigured,
        "rate_limit_exceeded" => ending == Ending::Busy,
        "internal_error" => ending == Ending::Panic,
        "model_not_found" => facts.reconfigured,
        "shutting_down" => facts.edge_stopping,
        "slow_client" => slow,
        "bad_request" => ending == Ending::Refused,
        _ => false,
    }
}

/// One record, which says what happened, once nobody can add to it.
pub(super) fn settled(facts: &mut Facts, client: u32, outcome: &str) {
    let Some(asking) = facts.askings.get(&client) else { return };
    let problem = match asking.records.as_slice() {
        [] if asking.submits == 0 => return,
        [record] => {
            let admitted = asking.attempts.len();
            let recovered = record.outcome == "recovered_completed";
            let whole = matches!(record.outcome, "completed" | "recovered_completed");
            if record.attempts as usize != admitted {
                format!("REC-7: {} attempts recorded, {admitted} made", record.attempts)
            } else if recovered && admitted < 2 {
                "REC-7: recovered in one attempt".to_owned()
            } else if outcome != "left" && whole != (outcome == "whole") {
                format!("REC-7: recorded as {}, and the client saw {outcome}", record.outcome)
            } else {
                return;
            }
        }
        records => format!("I1: {} records of one request", records.len()),
    };
    facts.broken.push(format!("{problem} (client {client}): {asking:?}"));
}
