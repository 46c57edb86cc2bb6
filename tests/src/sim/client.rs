//! Decides what a simulated client asks, how it reads, and what it may see: one outcome, its own output, in order.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use http::{HeaderMap, Method};
use iop_edge_core::api::{Admitted, CancelRun, Destination, Engine, Output, Payload, Submit, SubmitError, WireKind};
use iop_edge_core::snapshot::{EdgeSnapshot, ProviderHealth};
use iop_edge_core::{Edge, TunnelCall};
use iop_execution::{
    AdapterKey, CancelReason, FailureCode, ModelName, NodeId, Principal, ProviderId, RunEventKind, RunStream, Target,
    TunnelFrame, TunnelStream,
};
use tokio::time::{Instant, sleep, sleep_until};

use crate::sim::history::Who;
use crate::sim::openai::{self, HttpPlan};
use crate::sim::provider::{Ending, Work};
use crate::sim::world::{Client, Facts, Stage, Wants, World};

/// Timers are exact to a millisecond.
pub(super) const TICK: u64 = 2;
/// As the Edge has it (WIR-16).
pub(super) const SLOW_CLIENT: u64 = 60_000;

/// One client, whole.
#[derive(Debug, Clone)]
pub struct ClientPlan {
    /// Its number.
    pub id: u32,
    /// Which model it asks for.
    pub model: String,
    /// It speaks the OpenAI API.
    pub http: Option<HttpPlan>,
    /// Or which adapter, of which Node.
    pub direct: Option<(Option<usize>, String)>,
    /// Which wire it insists on.
    pub wire: Option<WireKind>,
    /// Higher goes first.
    pub priority: i8,
    /// Who it is.
    pub principal: Option<String>,
    /// Its deadline, in milliseconds from its start.
    pub deadline: Option<u64>,
    /// Estimate of the prompt.
    pub tokens: u32,
    /// Hash of the prompt's start.
    pub prefix: u64,
    /// A provider to avoid, and whether it may be taken all the same.
    pub avoid: Option<(String, bool)>,
    /// It leaves at this time after its start, whatever it has.
    pub leave: Option<u64>,
    /// It leaves after so many items.
    pub leave_after: Option<u64>,
    /// Somebody cancels its run by id at this time after its start.
    pub cancel: Option<u64>,
    /// Wait after each item.
    pub pace: u64,
    /// It stops reading at this item for so long.
    pub stall: Option<(u64, u64)>,
    /// What it asks the provider.
    pub work: Work,
    /// Size of its request beyond what is needed.
    pub padding: usize,
    /// How long it may wait for a place.
    pub queue_timeout: u64,
    /// Whether the end of the stream is known to be all right: nothing in this seed disturbs it.
    pub calm: bool,
}

/// What a client works with.
#[derive(Debug, Clone)]
pub struct Desk {
    /// The Edge.
    pub edge: Edge,
    /// The truth.
    pub world: Arc<World>,
    /// Time of the Edge's clock, in milliseconds, when the Edge's clock started.
    pub start: Instant,
    /// The providers.
    pub homes: Arc<Vec<Home>>,
}

/// What a client knows of a provider.
#[derive(Debug)]
pub struct Home {
    /// Its id.
    pub provider: String,
    /// Its Node.
    pub node: usize,
    /// It is used by tunnels.
    pub tunnels: bool,
    /// Models that it serves, whatever the length of a prompt.
    pub models: Vec<String>,
}

impl Desk {
    pub(super) fn clock(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap()
    }

    pub(super) fn node_of(&self, provider: &str) -> usize {
        self.homes.iter().find(|home| home.provider == provider).map_or(usize::MAX, |home| home.node)
    }

    /// What is in the facts of a fence may be a window behind this.
    pub(super) fn is_connected(&self, node: usize) -> bool {
        let id = format!("n{node}");
        self.edge.snapshot().nodes.iter().any(|shown| *shown.node.as_str() == *id && shown.connected)
    }

    /// A provider of a model that is eligible, beside one that is avoided. Only what has stood for a while counts.
    pub(super) fn other_than(&self, facts: &Facts, model: &String, tunnel: bool, avoided: &str) -> Option<String> {
        if facts.reconfigured {
            return None;
        }
        let snapshot = self.edge.snapshot();
        let stands = |home: &&Home| {
            let known = facts.nodes.get(&home.node).copied().unwrap_or_default();
            let id = format!("n{}", home.node);
            let shown = snapshot.nodes.iter().find(|shown| *shown.node.as_str() == *id);
            known.ready.is_some_and(|since| since < facts.now)
                && shown.is_some_and(|shown| shown.connected && !shown.draining)
                && is_usable(&snapshot, facts, home)
        };
        let others = self.homes.iter().filter(|home| home.provider != avoided && home.models.contains(model));
        let mut fitting = others.filter(|home| !tunnel || home.tunnels);
        fitting.find(stands).map(|home| home.provider.clone())
    }

    /// A Node that the Edge should have preferred to the suspect that it took. Only what has stood for a while counts.
    pub(super) fn better_than(&self, facts: &Facts, model: &String, tunnel: bool, node: usize) -> Option<usize> {
        if facts.reconfigured {
            return None;
        }
        let of_long_standing = |since: Option<u64>| since.is_some_and(|since| since < facts.now);
        if !of_long_standing(facts.nodes.get(&node)?.suspect) {
            return None;
        }
        let snapshot = self.edge.snapshot();
        let others = self.homes.iter().filter(|home| home.models.contains(model));
        let mut fitting = others.filter(|home| !tunnel || home.tunnels);
        let better = fitting.find(|home| {
            let known = facts.nodes.get(&home.node).copied().unwrap_or_default();
            let usable = is_usable(&snapshot, facts, home);
            let trusted = of_long_standing(known.ready) && known.suspect.is_none();
            usable && trusted && !known.held && known.held_at < facts.now
        })?;
        // Neither has changed in this window.
        let is = |node: usize, suspect: bool| {
            let id = format!("n{node}");
            let shown = snapshot.nodes.iter().find(|shown| *shown.node.as_str() == *id);
            shown.is_some_and(|shown| shown.connected && !shown.draining && shown.suspect == suspect)
        };
        (is(node, true) && is(better.node, false)).then_some(better.node)
    }
}

/// Evidence says nothing against a provider, and none has come in this window.
fn is_usable(snapshot: &EdgeSnapshot, facts: &Facts, home: &Home) -> bool {
    let mut all = snapshot.nodes.iter().flat_map(|node| &node.providers);
    let shown = all.find(|shown| *shown.provider.as_str() == *home.provider);
    shown.is_some_and(|shown| shown.health == ProviderHealth::Available)
        && facts.moved.get(&home.provider).is_none_or(|at| *at < facts.now)
}

/// How a client's own part of it ended.
enum Over {
    Left,
    Outcome(&'static str),
}

/// What a client has read of its output.
pub(super) struct Reader<'a> {
    plan: &'a ClientPlan,
    text: Vec<u8>,
    pub(super) pieces: u64,
    pub(super) call: Option<u64>,
}

/// A client of the engine itself.
struct Raw<'a> {
    plan: &'a ClientPlan,
    desk: &'a Desk,
    output: Reader<'a>,
    items: u64,
    run: [u8; 16],
    /// Its cancel was taken: the next thing that it reads is the end.
    cancelled: bool,
    asked_at: u64,
    world_since: u64,
    admitted_at: u64,
    node: usize,
}

/// Runs one client to its end.
pub async fn live(plan: ClientPlan, desk: Desk) {
    let start = Instant::now();
    let since = desk.clock();
    let who = Who::Client(plan.id);
    let wait = plan.deadline.unwrap_or(u64::MAX).min(plan.queue_timeout);
    {
        let mut facts = desk.world.facts();
        facts.note(who, "asks", "", [0, 0]);
        let wait_until = since + wait + TICK;
        let client = Client { stage: Stage::Submitted, since, wait_until, deadline: None, run_id: None };
        facts.clients.insert(plan.id, client);
        if plan.direct.is_none() {
            let tunnel = plan.wire == Some(WireKind::Tunnel);
            let wants = Wants { model: plan.model.clone(), tunnel, avoid: plan.avoid.clone() };
            facts.wants.insert(plan.id, wants);
        }
    }
    desk.world.facts().starts.insert(plan.id, since);
    let outcome = match plan.http {
        None => raw(&plan, &desk, start, since).await,
        Some(http) => {
            let outcome = tokio::select! {
                biased;
                () = left(&plan, start) => "left",
                outcome = openai::ask(&plan, http, &desk) => outcome,
            };
            openai::settled(&mut desk.world.facts(), plan.id, outcome);
            outcome
        }
    };
    let mut facts = desk.world.facts();
    facts.note(who, "outcome", outcome, [0, 0]);
    if let Some(client) = facts.clients.get_mut(&plan.id) {
        client.stage = Stage::Done(outcome);
    }
}

async fn left(plan: &ClientPlan, start: Instant) {
    match plan.leave {
        Some(after) => sleep_until(start + Duration::from_millis(after)).await,
        None => std::future::pending().await,
    }
}

/// A client of the engine itself.
async fn raw(plan: &ClientPlan, desk: &Desk, start: Instant, since: u64) -> &'static str {
    let deadline = plan.deadline.map(|after| start + Duration::from_millis(after));
    let mut leave = Box::pin(left(plan, start));
    let world_since = desk.world.facts().now;
    let submitted = tokio::select! {
        biased;
        () = &mut leave => None,
        answer = submit(plan, desk, deadline) => Some(answer),
    };
    match submitted {
        None => "left waiting",
        Some(Err(error)) => refused(plan, desk, &error),
        Some(Ok((admitted, output))) => {
            let mut reader = Raw {
                plan,
                desk,
                output: Reader::new(plan),
                items: 0,
                run: *admitted.run_id.as_bytes(),
                cancelled: false,
                asked_at: since,
                world_since,
                admitted_at: desk.world.facts().now,
                node: desk.node_of(admitted.provider.as_str()),
            };
            reader.admitted(&admitted);
            let over = tokio::select! {
                biased;
                () = &mut leave => Over::Left,
                over = reader.read(output, start) => over,
            };
            match over {
                Over::Left => "left",
                Over::Outcome(outcome) => outcome,
            }
        }
    }
}

async fn submit(plan: &ClientPlan, desk: &Desk, deadline: Option<Instant>) -> Result<(Admitted, Output), SubmitError> {
    let mut request = match &plan.direct {
        None => Submit::to_model(ModelName::new(&plan.model).unwrap()),
        Some((node, adapter)) => Submit::to(Destination::Direct {
            node: node.map(|node| NodeId::new(format!("n{node}")).unwrap()),
            adapter: AdapterKey::new(adapter).unwrap(),
            target: Target::new("t").unwrap(),
        }),
    };
    request.priority = plan.priority;
    request.principal = plan.principal.as_ref().map(|name| Principal::new(name).unwrap());
    request.deadline = deadline.map(Instant::into_std);
    request.prompt_tokens_estimate = plan.tokens;
    request.prompt_prefix = plan.prefix;
    if let Some((provider, fallback)) = &plan.avoid {
        request.avoid_provider_id = Some(ProviderId::new(provider).unwrap());
        request.allow_avoided_provider_fallback = *fallback;
    }
    let body = plan.work.body("t", plan.padding);
    let call = |body| TunnelCall {
        method: Method::POST,
        path: "/v1/chat/completions".to_owned(),
        headers: HeaderMap::new(),
        body,
    };
    match plan.wire {
        Some(WireKind::Run) => {
            let (admitted, stream) = desk.edge.submit_run(request, body).await?;
            Ok((admitted, Output::Run(stream)))
        }
        Some(WireKind::Tunnel) => {
            let (admitted, stream) = desk.edge.submit_tunnel(request, call(body)).await?;
            Ok((admitted, Output::Tunnel(stream)))
        }
        None => {
            let prepare = move |admitted: &Admitted| match admitted.wire {
                WireKind::Run => Payload::Run { input: body },
                WireKind::Tunnel => {
                    let TunnelCall { method, path, headers, body } = call(body);
                    Payload::Tunnel { method, path, headers, body }
                }
            };
            let submitted = desk.edge.submit(request, Box::new(prepare)).await?;
            Ok((submitted.admitted, submitted.output))
        }
    }
}

fn refused(plan: &ClientPlan, desk: &Desk, error: &SubmitError) -> &'static str {
    let mut facts = desk.world.facts();
    let waited = desk.clock() - facts.clients.get(&plan.id).map_or(0, |client| client.since);
    let of_one_node = matches!(plan.direct, Some((None, _)));
    let (name, may) = match error {
        SubmitError::InvalidRequest(_) => ("invalid request", of_one_node),
        SubmitError::UnknownModel => ("unknown model", facts.reconfigured),
        SubmitError::Unavailable => ("unavailable", !plan.calm || plan.wire.is_some() || plan.avoid.is_some()),
        SubmitError::QueueFull { .. } => ("queue full", true),
        SubmitError::QueueTimeout => ("queue timeout", waited >= plan.queue_timeout),
        SubmitError::NodeRequired => ("node required", of_one_node),
        SubmitError::DeadlineExceeded => ("deadline", plan.deadline.is_some_and(|deadline| waited >= deadline)),
        SubmitError::Cancelled => ("cancelled", facts.cancelled),
        SubmitError::ShuttingDown => ("shutting down", facts.edge_stopping),
    };
    if !may {
        facts.broken.push(format!("client {} was refused after {waited} ms as {name}, without a reason", plan.id));
    }
    name
}

/// What a stream gave.
enum Item {
    Text(Vec<u8>),
    Other,
    End(Terminal),
}

enum Terminal {
    Whole,
    Failed(FailureCode),
    Cancelled(CancelReason),
}

enum Source {
    Run(RunStream, u64),
    Tunnel(TunnelStream, bool),
}

impl Source {
    async fn next(&mut self) -> Result<Option<Item>, &'static str> {
        match self {
            Self::Run(stream, last) => {
                let Some(event) = stream.next().await else { return Ok(None) };
                *last += 1;
                if event.seq != *last {
                    return Err("I3, EXE-5: the numbers of events have a gap");
                }
                Ok(Some(match event.kind {
                    RunEventKind::Delta(text) => Item::Text(text.into_bytes()),
                    RunEventKind::Complete(_) => Item::End(Terminal::Whole),
                    RunEventKind::Error(failure) => Item::End(Terminal::Failed(failure.code)),
                    RunEventKind::Cancelled(reason) => Item::End(Terminal::Cancelled(reason)),
                    RunEventKind::Start
                    | RunEventKind::Usage
                    | RunEventKind::ReasoningDelta(_)
                    | RunEventKind::ToolCallDelta(_) => Item::Other,
                }))
            }
            Self::Tunnel(stream, headed) => {
                let Some(frame) = stream.next().await else { return Ok(None) };
                Ok(Some(match frame {
                    TunnelFrame::Head(_) => {
                        if std::mem::replace(headed, true) {
                            return Err("WIR-6: a second head");
                        }
                        Item::Other
                    }
                    TunnelFrame::Body { bytes, .. } => {
                        if !*headed {
                            return Err("WIR-6: a body before its head");
                        }
                        Item::Text(bytes.to_vec())
                    }
                    TunnelFrame::Usage(_) => Item::Other,
                    TunnelFrame::End => Item::End(Terminal::Whole),
                    TunnelFrame::Failed(failure) => Item::End(Terminal::Failed(failure.code)),
                    TunnelFrame::Cancelled(reason) => Item::End(Terminal::Cancelled(reason)),
                }))
            }
        }
    }
}

impl<'a> Reader<'a> {
    pub(super) const fn new(plan: &'a ClientPlan) -> Self {
        Self { plan, text: Vec::new(), pieces: 0, call: None }
    }

    /// I6, EXE-5: only this client's output, of one call, in order and whole.
    pub(super) fn text(&mut self, text: &[u8]) -> Result<(), &'static str> {
        self.text.extend_from_slice(text);
        while let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.text.drain(..=end).collect();
            let line = std::str::from_utf8(&line).map_err(|_| "I6: garbled output")?;
            let mut words = line.split(' ').map(str::parse::<u64>);
            let mut number = || words.next().and_then(Result::ok).ok_or("I6: garbled output");
            let (client, call, piece) = (number()?, number()?, number()?);
            if client != u64::from(self.plan.id) {
                return Err("I6: another client's output");
            }
            if *self.call.get_or_insert(call) != call {
                return Err("I6: output of two calls");
            }
            if piece != self.pieces {
                return Err("I3: a piece is missing, or comes twice");
            }
            self.pieces += 1;
        }
        Ok(())
    }
}

impl Raw<'_> {
    fn admitted(&self, admitted: &Admitted) {
        let Self { plan, desk, .. } = self;
        let mut facts = desk.world.facts();
        let queued = u64::try_from(admitted.queued.as_millis()).unwrap();
        facts.note(Who::Client(plan.id), "admitted", wire_name(admitted.wire), [queued, 0]);
        // A client that reads without a pause sees the end when it comes.
        let prompt = plan.pace == 0 && plan.stall.is_none();
        let deadline = plan.deadline.filter(|_| prompt).map(|after| self.asked_at + after + TICK);
        if let Some(client) = facts.clients.get_mut(&plan.id) {
            (client.stage, client.deadline, client.run_id) = (Stage::Open, deadline, Some(admitted.run_id));
        }
        if queued > plan.queue_timeout {
            facts.broken.push(format!("I11: client {} waited {queued} ms", plan.id));
        }
        if let Some((avoided, false)) = &plan.avoid
            && plan.direct.is_none()
            && *avoided == *admitted.provider.as_str()
        {
            facts.broken.push(format!("I12: client {} got the provider that it avoids", plan.id));
        }
        if let Some((avoided, true)) = &plan.avoid
            && plan.direct.is_none()
            && *avoided == *admitted.provider.as_str()
            && let Some(other) = desk.other_than(&facts, &plan.model, plan.wire == Some(WireKind::Tunnel), avoided)
        {
            facts
                .broken
                .push(format!("I12: client {} got the provider that it avoids, and {other} was there", plan.id));
        }
        if plan.direct.is_none()
            && plan.avoid.is_none()
            && let Some(better) = desk.better_than(&facts, &plan.model, plan.wire == Some(WireKind::Tunnel), self.node)
        {
            let problem = format!("FEN-7: client {} was sent to a suspect, and n{better} was none", plan.id);
            facts.broken.push(problem);
        }
    }

    async fn read(&mut self, output: Output, start: Instant) -> Over {
        let (mut source, run_id) = match output {
            Output::Run(stream) => {
                let run_id = stream.run_id();
                (Source::Run(stream, 0), run_id)
            }
            Output::Tunnel(stream) => {
                let run_id = stream.run_id();
                (Source::Tunnel(stream, false), run_id)
            }
            _ => return Over::Outcome("unknown output"),
        };
        let mut cancel = self.plan.cancel.map(|after| Box::pin(sleep_until(start + Duration::from_millis(after))));
        loop {
            let item = tokio::select! {
                biased;
                () = until(&mut cancel) => {
                    cancel = None;
                    self.cancelled = self.desk.edge.cancel(run_id) == CancelRun::Cancelled;
                    continue;
                }
                item = source.next() => item,
            };
            let item = match item {
                Ok(Some(item)) => item,
                Ok(None) => return self.broken("I1: a stream that ends without a terminal"),
                Err(rule) => return self.broken(rule),
            };
            match item {
                Item::End(terminal) => {
                    let over = self.end(&terminal);
                    if !matches!(source.next().await, Ok(None)) {
                        return self.broken("I2: something after the terminal");
                    }
                    return over;
                }
                Item::Text(_) | Item::Other if self.cancelled => {
                    return self.broken("EDG-3: a cancelled run goes on");
                }
                Item::Text(text) => {
                    if let Err(rule) = self.output.text(&text) {
                        return self.broken(rule);
                    }
                }
                Item::Other => {}
            }
            self.items += 1;
            if self.plan.leave_after == Some(self.items) {
                return Over::Left;
            }
            let stall = self.plan.stall.filter(|(at, _)| *at == self.items).map_or(0, |(_, time)| time);
            let pause = self.plan.pace + stall;
            if pause > 0 {
                sleep(Duration::from_millis(pause)).await;
            }
        }
    }

    fn broken(&self, rule: &str) -> Over {
        self.desk.world.broken(format!("{rule} (client {})", self.plan.id));
        Over::Outcome("broken")
    }

    fn end(&self, terminal: &Terminal) -> Over {
        let Self { plan, desk, .. } = self;
        let mut facts = desk.world.facts();
        let age = desk.clock() - self.asked_at;
        let overdue = plan.deadline.is_some_and(|deadline| age >= deadline);
        let ending = plan.work.ending;
        let (name, may) = match terminal {
            Terminal::Whole => {
                let whole = self.output.pieces == plan.work.pieces && self.output.text.is_empty();
                let all = ending == Ending::Whole && whole;
                ("whole", all && !self.cancelled)
            }
            Terminal::Cancelled(reason) => (
                reason.as_str(),
                match reason {
                    CancelReason::Client => self.cancelled || facts.cancelled,
                    CancelReason::EdgeDeadline => overdue,
                    CancelReason::SlowClient => {
                        plan.stall.is_some_and(|(_, time)| time + plan.pace >= SLOW_CLIENT) || plan.pace >= SLOW_CLIENT
                    }
                    CancelReason::ReceivePool => !plan.calm,
                    CancelReason::Withdrawn => !plan.calm,
                    CancelReason::Drain => facts.drained,
                },
            ),
            Terminal::Failed(code) => (
                code.as_str(),
                match code {
                    FailureCode::ProviderUnreachable => matches!(ending, Ending::Broken | Ending::Unreachable),
                    FailureCode::ProviderRejected => matches!(ending, Ending::Busy | Ending::Refused | Ending::Down),
                    FailureCode::ResponseStalled => facts.stalls.contains_key(&self.run),
                    FailureCode::Internal => ending == Ending::Panic,
                    FailureCode::DeadlineExceeded => plan.deadline.is_some(),
                    FailureCode::Disconnected => {
                        facts.disconnects.push((plan.id, self.node, self.world_since));
                        !plan.calm
                    }
                    FailureCode::Draining => facts.drained,
                    FailureCode::NodeSuspect | FailureCode::DispatchUnacknowledged => !plan.calm,
                    FailureCode::UnknownAdapter => facts.reconfigured,
                    FailureCode::Busy => facts.configured_since(self.admitted_at),
                    FailureCode::CredentialRejected
                    | FailureCode::InvalidRequest
                    | FailureCode::ProviderEndedWithoutTerminal
                    | FailureCode::ProviderProtocol
                    | FailureCode::UnknownTarget
                    | FailureCode::Unsupported => false,
                },
            ),
        };
        if !may {
            let pieces = self.output.pieces;
            facts.broken.push(format!(
                "client {} ended as {name} after {age} ms and {pieces} pieces, without a reason: {plan:?}",
                plan.id
            ));
        }
        Over::Outcome(name)
    }
}

async fn until(timer: &mut Option<std::pin::Pin<Box<tokio::time::Sleep>>>) {
    match timer {
        Some(timer) => timer.await,
        None => std::future::pending().await,
    }
}

const fn wire_name(wire: WireKind) -> &'static str {
    match wire {
        WireKind::Run => "run",
        WireKind::Tunnel => "tunnel",
    }
}
