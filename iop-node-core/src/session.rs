//! Decides what happens on one connection: it feeds the state machines, starts and stops runs, and ends everything that
//! belongs to the connection before it returns (NOD-5).
//!
//! One task reads messages, one timer serves handshake, heartbeat and drain, each run is a task of its own. Nothing of a
//! run's output passes through here: a run pushes into the outbox that the transport pulls from.

use std::collections::HashSet;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use iop_execution::failure::FailureStage;
use iop_execution::{CancelReason, ExecutionFailure, FailureCode, ProviderContacted, Redacted};
use iop_wire::limits::{FEATURES, MAX_ENVELOPE, MAX_WINDOW, PROTO_MAX, PROTO_MIN};
use iop_wire::{
    CloseCode, CommandResponse, Drain, Goodbye, Heartbeat, HeartbeatAction, Hello, Incoming, LinkError,
    NodeConfigPayload, NodeLink, NodeReadyRequest, OutboxHandle, Ping, ProviderReady, RegisterRefusal, RegisterRequest,
    RunNumber, SequenceCheck, Sequenced, ToEdge, ToNode,
};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::body::Inbox;
use crate::drive::Stop;
use crate::install::{Prepared, Refused, apply};
use crate::node::{Inner, NodeStatus};
use crate::observe::{RunOutcome, RunPath};
use crate::probe::Observations;
use crate::recheck::{Renewals, Told, Watch};
use crate::state::config::ConfigSync;
use crate::state::handshake::{Handshake, State, Step};
use crate::state::leases::LeaseDesk;
use crate::state::reconnect::{Reconnect, fraction};
use crate::state::refresh::{Question, RefreshPlan};
use crate::state::runs::RunTable;

mod command;
mod config;
mod dispatch;
mod outgoing;

/// How long a closed connection is kept so that its Goodbye gets out.
const GOODBYE_LINGER: Duration = Duration::from_secs(1);
/// Time for the last terminals to be written once the drain grace has passed and everything was cancelled.
const DRAIN_FLUSH: Duration = Duration::from_secs(1);
/// Longest time in which a connection is made anew, whoever asks for more.
const MAX_RENEW_WITHIN: Duration = Duration::from_secs(86_400);
/// How long what runs may take at least before a connection is made anew: nothing is wrong with it.
const RENEW_GRACE: Duration = Duration::from_secs(300);
/// How long a drain waits at least for requests that were on their way when it began.
const DRAIN_SETTLE: Duration = Duration::from_millis(250);

/// How a connection ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The peer said Goodbye.
    Peer { code: CloseCode, retry_after: Duration },
    /// The link ended without a Goodbye.
    Lost,
    /// This side closes it and says why.
    Close(CloseCode),
    /// The registration was refused.
    Refused(RegisterRefusal),
    /// Local shutdown. `cancelled`: something still ran when the grace was over.
    Shutdown { cancelled: bool },
    /// The connection is made anew at once.
    Renewed,
}

impl End {
    /// The close code that logs and observers see.
    pub(crate) const fn code(&self) -> CloseCode {
        match self {
            Self::Peer { code, .. } | Self::Close(code) => *code,
            Self::Lost | Self::Refused(_) => CloseCode::Closed,
            Self::Shutdown { cancelled: false } => CloseCode::Drained,
            Self::Shutdown { cancelled: true } => CloseCode::Shutdown,
            Self::Renewed => CloseCode::Restart,
        }
    }

    /// What this side still says.
    const fn goodbye(&self) -> Option<CloseCode> {
        match self {
            Self::Peer { .. } | Self::Lost | Self::Refused(_) => None,
            Self::Close(_) | Self::Shutdown { .. } | Self::Renewed => Some(self.code()),
        }
    }
}

/// How a run's task tells the session that the whole connection must close.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fault(Arc<(OnceLock<CloseCode>, CancellationToken)>);

impl Fault {
    pub(crate) fn raise(&self, code: CloseCode) {
        // The first one says why.
        let _ = self.0.0.set(code);
        self.0.1.cancel();
    }

    async fn raised(&self) -> CloseCode {
        self.0.1.cancelled().await;
        self.0.0.get().copied().unwrap_or(CloseCode::Closed)
    }
}

/// What the session keeps of a run.
#[derive(Debug)]
struct RunHandle {
    stop: Option<oneshot::Sender<Stop>>,
    /// Dropped with the connection: a run that was stopped before learns of that too.
    connected: Option<oneshot::Sender<()>>,
    inbox: Arc<Inbox>,
    close_grace: Duration,
}

impl RunHandle {
    /// The first reason stands. No more of the body is waited for.
    fn stop(&mut self, reason: Stop) {
        self.inbox.abort();
        if matches!(reason, Stop::Disconnected) {
            self.connected = None;
        }
        if let Some(stop) = self.stop.take() {
            // A run that has ended meanwhile needs no stop.
            let _ = stop.send(reason);
        }
    }
}

#[derive(Debug)]
struct Finished {
    number: RunNumber,
    path: RunPath,
    outcome: RunOutcome,
}

/// Why work is being finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Because {
    /// A local shutdown.
    Shutdown,
    /// The Edge is no longer who it was.
    EdgeIdentity,
    /// Certificates were renewed: the next connection is made with the new ones.
    Renewed,
}

/// Work that is being finished before the connection ends.
#[derive(Debug)]
struct Draining {
    because: Because,
    deadline: Instant,
    /// Not before: what the Edge sent before it heard of the drain is still answered.
    settled: Instant,
    cancelled: bool,
}

impl Draining {
    const fn end(&self) -> End {
        match self.because {
            Because::Shutdown => End::Shutdown { cancelled: self.cancelled },
            Because::EdgeIdentity => End::Close(CloseCode::IdentityRevoked),
            Because::Renewed => End::Renewed,
        }
    }
}

type Starting = Pin<Box<dyn Future<Output = Vec<ProviderReady>> + Send>>;
type Update = oneshot::Receiver<Result<Prepared, Refused>>;

struct Session<'a> {
    node: &'a Arc<Inner>,
    outbox: OutboxHandle<ToEdge>,
    written: Arc<Notify>,
    handshake: Handshake,
    heartbeat: Heartbeat,
    sequence: SequenceCheck,
    runs: RunTable<RunHandle>,
    tasks: JoinSet<Finished>,
    fault: Fault,
    configs: ConfigSync,
    /// What the providers offer, as the Edge was told last.
    offers: Vec<ProviderReady>,
    starting: Option<Starting>,
    /// The pushed config that is being built.
    update: Option<Update>,
    refreshes: RefreshPlan,
    asking: JoinSet<(Question, bool)>,
    /// Numbers of what was observed of providers on this connection.
    observations: Observations,
    /// Who the Edge is.
    edge: Watch,
    /// The connection is made anew by then.
    renew_by: Option<Instant>,
    /// What credential leases need; none = this connection takes none.
    leases: Option<Arc<LeaseDesk>>,
    /// When the registration left, and the last ping: what answers say of the Edge's time is measured from there.
    registered_at: Instant,
    pinged: Option<(u64, Instant)>,
    commands: JoinSet<CommandResponse>,
    draining: Option<Draining>,
    reconnect: &'a mut Reconnect,
}

/// Serves one connection until it ends. Every run of it is over when this returns.
pub(crate) async fn serve(
    node: &Arc<Inner>,
    link: NodeLink,
    ordinal: u64,
    renewals: Renewals,
    reconnect: &mut Reconnect,
    shutdown: &CancellationToken,
) -> End {
    let now = now();
    let edge = node.edge_check.watch(link.peer().identity, renewals);
    let observer = Arc::clone(&node.observer);
    let Ok(leases) = LeaseDesk::open(&node.lease_issuers, edge.is_authenticated(), observer) else {
        tracing::error!("the operating system gives no randomness: there is no key for this connection");
        return End::Lost;
    };
    let mut profile = node.heartbeat;
    let shift = (profile.interval.as_nanos() * u128::from(node.jitter())) >> 32;
    profile.first_shift = Duration::from_nanos(u64::try_from(shift).unwrap_or(0));
    let mut session = Session {
        node,
        outbox: OutboxHandle::new(),
        written: Arc::new(Notify::new()),
        handshake: Handshake::new(now),
        heartbeat: Heartbeat::new(now, profile),
        sequence: SequenceCheck::default(),
        runs: RunTable::new(),
        tasks: JoinSet::new(),
        fault: Fault::default(),
        configs: ConfigSync::new(Arc::default()),
        offers: Vec::new(),
        starting: None,
        update: None,
        refreshes: RefreshPlan::default(),
        asking: JoinSet::new(),
        observations: Observations::default(),
        edge,
        renew_by: None,
        leases,
        registered_at: now,
        pinged: None,
        commands: JoinSet::new(),
        draining: None,
        reconnect,
    };
    node.observer.connected();
    node.set_status(NodeStatus::Registering);
    let peer = link.peer().address;
    tracing::info!(peer = peer.map(tracing::field::display), ordinal, "connected to the Edge");
    let outgoing = outgoing::until_goodbye(session.outbox.outgoing(), Arc::clone(&session.written));
    let mut incoming = link.start(outgoing);
    let end = match session.hello(ordinal) {
        Ok(()) => session.run(&mut incoming, shutdown).await,
        Err(end) => end,
    };
    session.close(end, incoming).await
}

impl Session<'_> {
    fn hello(&self, connection_ordinal: u64) -> Result<(), End> {
        self.control(ToEdge::Hello(Hello {
            proto_min: PROTO_MIN,
            proto_max: PROTO_MAX,
            features: FEATURES.iter().map(|feature| (*feature).to_owned()).collect(),
            node_version: self.node.version.clone(),
            instance_id: self.node.instance_id,
            connection_ordinal,
            max_envelope: u32::try_from(MAX_ENVELOPE).unwrap_or(u32::MAX),
        }))
    }

    fn control(&self, message: ToEdge) -> Result<(), End> {
        self.outbox.push_control(message).map_err(|_| End::Close(CloseCode::ControlOverflow))
    }

    async fn run(&mut self, incoming: &mut Incoming<ToNode>, shutdown: &CancellationToken) -> End {
        let written = Arc::clone(&self.written);
        let fault = self.fault.clone();
        let mut timer = pin!(sleep_until(self.poll_timeout().into()));
        loop {
            // Before the timer is set: a drain has times of its own.
            if self.renew_by.is_some()
                && self.is_idle()
                && let Err(end) = self.drain(Because::Renewed)
            {
                return end;
            }
            let due = self.poll_timeout().into();
            if timer.deadline() != due {
                timer.as_mut().reset(due);
            }
            if let Some(end) = self.drained() {
                return end;
            }
            // In a fixed order, so that a simulation can be repeated. What ends the connection or a run comes first; messages
            // come before the timer, so that a pong that is here counts.
            let result = tokio::select! {
                biased;
                () = shutdown.cancelled(), if !self.is_shutting_down() => self.drain(Because::Shutdown),
                code = fault.raised() => Err(End::Close(code)),
                told = self.edge.told() => match told {
                    Told::Recheck => self.recheck(),
                    Told::Renew(within) => self.renew(within),
                },
                Some(finished) = self.tasks.join_next(), if !self.tasks.is_empty() => self.finished(finished),
                providers = started(&mut self.starting), if self.starting.is_some() => self.started(providers),
                prepared = prepared(&mut self.update), if self.update.is_some() => self.prepared(prepared),
                Some(answer) = self.asking.join_next(), if !self.asking.is_empty() => self.asked(answer),
                Some(answer) = self.commands.join_next(), if !self.commands.is_empty() => self.commanded(answer),
                item = incoming.next() => self.receive(item),
                () = timer.as_mut() => self.timeout(now()),
                () = written.notified(), if self.draining.is_some() => Ok(()),
            };
            if let Err(end) = result {
                return end;
            }
        }
    }

    fn poll_timeout(&self) -> Instant {
        let mut due = self.heartbeat.poll_timeout();
        if let Some(deadline) = self.handshake.poll_timeout() {
            due = due.min(deadline);
        }
        if self.takes_new_work()
            && let Some(refresh) = self.refreshes.poll_timeout()
        {
            due = due.min(refresh);
        }
        if let Some(by) = self.renew_by.filter(|_| self.draining.is_none()) {
            due = due.min(by);
        }
        if let Some(draining) = &self.draining {
            due = due.min(draining.deadline);
            if draining.settled > now() {
                due = due.min(draining.settled);
            }
        }
        due
    }

    fn timeout(&mut self, now: Instant) -> Result<(), End> {
        if let Some(code) = self.handshake.handle_timeout(now) {
            return Err(End::Close(code));
        }
        while let Some(action) = self.heartbeat.handle_timeout(now) {
            match action {
                HeartbeatAction::Ping(nonce) => {
                    self.pinged = Some((nonce, now));
                    self.control(ToEdge::Ping(Ping { nonce }))?;
                }
                HeartbeatAction::Dead => return Err(End::Close(CloseCode::HeartbeatTimeout)),
            }
        }
        if self.takes_new_work() {
            self.ask(now);
        }
        if self.draining.is_none() && self.renew_by.is_some_and(|by| by <= now) {
            return self.drain(Because::Renewed);
        }
        let Some(draining) = self.draining.as_mut().filter(|draining| draining.deadline <= now) else { return Ok(()) };
        if draining.cancelled {
            return Err(draining.end());
        }
        let mut longest = Duration::ZERO;
        for (_, handle) in self.runs.iter_mut() {
            handle.stop(Stop::Cancel(CancelReason::Drain));
            longest = longest.max(handle.close_grace);
        }
        draining.cancelled = true;
        draining.deadline = now + longest + DRAIN_FLUSH;
        Ok(())
    }

    /// Who asks whether the Edge is still good gets an answer.
    fn recheck(&mut self) -> Result<(), End> {
        if self.edge.is_good() || self.is_shutting_down() {
            return Ok(());
        }
        if let Some(draining) = &mut self.draining {
            // It has less time now.
            draining.because = Because::EdgeIdentity;
            draining.deadline = draining.deadline.min(now() + self.node.drain_grace);
            return Ok(());
        }
        tracing::warn!(
            "the Edge's certificate is no longer good: this connection finishes what runs, then the Node dials again"
        );
        self.drain(Because::EdgeIdentity)
    }

    fn is_shutting_down(&self) -> bool {
        self.draining.as_ref().is_some_and(|draining| draining.because == Because::Shutdown)
    }

    /// The connection is to be made anew: when nothing runs, or by a random time in the second half of `within`, so that busy Nodes
    /// which were renewed together do not leave together.
    fn renew(&mut self, within: Duration) -> Result<(), End> {
        let half = within.min(MAX_RENEW_WITHIN) / 2;
        self.renew_by = Some(now() + half + fraction(half, self.node.jitter()));
        Ok(())
    }

    /// Nothing runs here, and everything that was said of what ran is written.
    fn is_idle(&self) -> bool {
        self.takes_new_work() && self.runs.is_empty() && self.tasks.is_empty() && self.outbox.open_runs() == 0
    }

    /// No new work; what runs may finish.
    fn drain(&mut self, because: Because) -> Result<(), End> {
        self.renew_by = None;
        let grace = match because {
            Because::Shutdown | Because::EdgeIdentity => self.node.drain_grace,
            Because::Renewed => self.node.drain_grace.max(RENEW_GRACE),
        };
        let now = now();
        let mut draining = Draining { because, deadline: now + grace, settled: now + DRAIN_SETTLE, cancelled: false };
        if let Some(before) = self.draining.as_ref().filter(|before| before.cancelled) {
            // What ran is being cancelled already.
            (draining.deadline, draining.cancelled) = (before.deadline, true);
        }
        if !self.handshake.drain() {
            return Err(draining.end());
        }
        tracing::info!(runs = self.runs.len(), grace_ms = grace.as_millis(), "draining");
        self.node.set_status(NodeStatus::Draining);
        self.draining = Some(draining);
        let deadline_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.control(ToEdge::Drain(Drain { deadline_ms, returning: because != Because::Shutdown }))
    }

    /// The end, once everything that ran has ended and what it sent is written.
    fn drained(&self) -> Option<End> {
        let draining = self.draining.as_ref()?;
        let settled = draining.cancelled || draining.settled <= now();
        let done = settled && self.runs.is_empty() && self.tasks.is_empty() && self.outbox.open_runs() == 0;
        done.then(|| draining.end())
    }

    fn receive(&mut self, item: Option<Result<Sequenced<ToNode>, LinkError>>) -> Result<(), End> {
        let message = match item {
            None => return Err(End::Lost),
            Some(Ok(received)) => {
                self.in_order(received.seq)?;
                received.message
            }
            Some(Err(LinkError::MalformedRun { seq, run, problem })) => {
                self.in_order(seq)?;
                return self.malformed(run, problem);
            }
            Some(Err(LinkError::Transport(problem))) => {
                tracing::info!(%problem, "the link broke");
                return Err(End::Lost);
            }
            Some(Err(LinkError::Handshake(error))) => {
                tracing::warn!(reason = %error.failure, %error, "the Edge refused the connection");
                return Err(End::Lost);
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "the Edge broke the protocol");
                return Err(End::Close(CloseCode::ProtocolViolation));
            }
        };
        let step = self.handshake.handle(message, now()).map_err(|violation| {
            tracing::warn!(%violation, "the Edge broke the protocol");
            End::Close(violation.close_code())
        })?;
        match step {
            Step::Pass(message) => self.dispatch(message),
            Step::Register { max_envelope: _ } => self.register(),
            Step::Start { config, edge_time_ms, lease_signers } => {
                if let (Some(leases), Some(node)) = (&self.leases, self.handshake.node_id()) {
                    leases.registered(node, &lease_signers, edge_time_ms, self.registered_at, now());
                }
                self.start(config);
                Ok(())
            }
            Step::Refused(refusal) => Err(End::Refused(refusal)),
            Step::Ready { lease_generation } => {
                if let Some(leases) = &self.leases {
                    leases.ready(lease_generation);
                }
                tracing::info!(revision = self.configs.in_force().revision, "ready");
                self.reconnect.ready(now());
                self.node.set_status(NodeStatus::Ready);
                self.node.observer.ready();
                Ok(())
            }
            Step::NeverReady => {
                tracing::warn!("the Edge will not use this connection");
                Err(End::Lost)
            }
        }
    }

    fn in_order(&mut self, seq: u64) -> Result<(), End> {
        self.sequence.accept(seq).map_err(|error| {
            tracing::warn!(%error, "the Edge broke the order of messages");
            End::Close(CloseCode::ProtocolViolation)
        })
    }

    /// W17: a message of one run that can't be understood ends that run. A request that can't be understood leaves open
    /// which answer its sender expects, so it ends the connection.
    fn malformed(&mut self, number: RunNumber, problem: &'static str) -> Result<(), End> {
        tracing::warn!(run = %number, problem, "the Edge sent a message of a run that can't be understood");
        match self.runs.find(number) {
            Ok(Some(handle)) => {
                // The run may be at its provider already.
                let (stage, contacted) = (FailureStage::Stream, ProviderContacted::Unknown);
                handle.stop(Stop::Fail(Box::new(ExecutionFailure::new(
                    FailureCode::Internal,
                    stage,
                    contacted,
                    problem,
                ))));
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(_) => Err(End::Close(CloseCode::ProtocolViolation)),
        }
    }

    fn register(&mut self) -> Result<(), End> {
        self.registered_at = now();
        self.control(ToEdge::Register(RegisterRequest {
            token: Redacted::new(self.node.token.expose().clone()),
            recipient_key: self.leases.as_ref().map(|leases| leases.recipient_key()).unwrap_or_default(),
            inventory: self.node.inventory(),
            claimed_node_id: self.node.claimed_node_id.clone(),
        }))
    }

    fn start(&mut self, config: NodeConfigPayload) {
        if let Some(node_id) = self.handshake.node_id() {
            tracing::info!(%node_id, revision = config.revision, providers = config.providers.len(), "registered");
        }
        let config = Arc::new(config);
        self.configs = ConfigSync::new(Arc::clone(&config));
        self.node.set_status(NodeStatus::Starting);
        let node = Arc::clone(self.node);
        self.starting = Some(Box::pin(async move { apply(&node, &config).await }));
    }

    fn started(&mut self, providers: Vec<ProviderReady>) -> Result<(), End> {
        self.starting = None;
        let Some(node_id) = self.handshake.node_id().cloned() else { return Ok(()) };
        self.handshake.started(now());
        self.offers.clone_from(&providers);
        self.plan_refreshes(&HashSet::new());
        let config_revision = self.configs.in_force().revision;
        self.control(ToEdge::Ready(NodeReadyRequest { node_id, config_revision, providers }))
    }

    fn finished(&mut self, finished: Result<Finished, tokio::task::JoinError>) -> Result<(), End> {
        let Finished { number, path, outcome } = finished.map_err(|error| {
            // Provider panics are caught inside; this is ours, and a run is left without a terminal: only the end of the
            // connection gives it one.
            tracing::error!(panic = error.is_panic(), "a run's task ended without an outcome");
            End::Close(CloseCode::Restart)
        })?;
        self.runs.finish(number);
        tracing::debug!(run = %number, path = path.as_str(), outcome = outcome.as_str(), "run ended");
        self.node.observer.run_ended(path, outcome);
        Ok(())
    }

    /// Ends everything that belongs to the connection, then returns.
    async fn close(mut self, end: End, mut incoming: Incoming<ToNode>) -> End {
        let code = end.code();
        tracing::info!(%code, state = self.handshake.state().as_str(), runs = self.runs.len(), "connection ended");
        self.starting = None;
        self.abandon_update();
        let goodbye = end.goodbye();
        if let Some(code) = goodbye {
            // A full queue belongs to a peer that reads nothing: there is nobody to say it to.
            let _ = self.outbox.push_control(ToEdge::Goodbye(Goodbye { code, retry_after_ms: 0 }));
        }
        for (number, handle) in self.runs.iter_mut() {
            handle.stop(Stop::Disconnected);
            self.outbox.discard(iop_wire::RunKey(number.0));
        }
        if goodbye.is_some() && code != CloseCode::HeartbeatTimeout {
            self.outbox.finish();
            let flushed = async { while let Some(Ok(_)) = incoming.next().await {} };
            // Whether the peer took it in time changes nothing.
            let _ = timeout(GOODBYE_LINGER, flushed).await;
        }
        drop(incoming);
        self.outbox.abort();
        // Dropped questions change nothing; the next connection asks anew, and never beside these.
        self.asking.shutdown().await;
        self.commands.shutdown().await;
        // Each run ends within its close grace (NOD-5).
        while let Some(finished) = self.tasks.join_next().await {
            let _ = self.finished(finished);
        }
        if self.runs.late() > 0 {
            self.node.observer.late_messages(self.runs.late());
        }
        self.node.observer.closed(code);
        end
    }

    fn takes_new_work(&self) -> bool {
        self.handshake.state() == State::Ready && self.draining.is_none()
    }
}

async fn prepared(update: &mut Option<Update>) -> Result<Prepared, Refused> {
    match update {
        // A builder that is gone without an answer panicked.
        Some(update) => update.await.unwrap_or(Err(Refused::Borrowed("the Node failed to build it: see its log"))),
        None => std::future::pending().await,
    }
}

async fn started(starting: &mut Option<Starting>) -> Vec<ProviderReady> {
    match starting {
        Some(starting) => starting.await,
        None => std::future::pending().await,
    }
}

/// The driver's clock; virtual in tests.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Bounds of a dispatch that concern the connection, not the run.
const fn window_is_legal(window: u32) -> bool {
    window <= MAX_WINDOW
}
