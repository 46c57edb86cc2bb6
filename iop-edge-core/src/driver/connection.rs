//! Decides what a Node's messages do: order and state first, then each to the run or the engine it belongs to.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use iop_execution::CancelReason;
use iop_wire::limits::CLOSE_LINGER;
use iop_wire::{
    CloseCode, EdgeLink, Goodbye, Heartbeat, HeartbeatAction, HeartbeatProfile, Incoming, LinkError, OutboxHandle,
    Ping, Pong, RunKey, RunNumber, SequenceCheck, Sequenced, ToEdge, ToNode,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::api::EndNote;
use crate::driver::run::{LocalEnd, Piece, Received, Run};
use crate::driver::shared::{Shared, now, unix_time};
use crate::observe::{CredentialRefuser, Observation, Violation};
use crate::state::{ConnectionId, PROBE, RETRY_CROWDED, Suspicion, SuspicionAction, Verdict};
use crate::wake::Wakers;

/// What others need of a connection while its task runs.
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) outbox: OutboxHandle<ToNode>,
    runs: Mutex<Runs>,
    /// Work began: there may be a silence to measure.
    busy: Notify,
    /// The engine ended the connection.
    ended: CancellationToken,
}

/// Runs the Node has, and since when it has had any.
#[derive(Default)]
struct Runs {
    open: HashMap<RunKey, Arc<Run>>,
    since: Option<Instant>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Connection {
    fn new(id: ConnectionId, outbox: OutboxHandle<ToNode>) -> Self {
        Self { id, outbox, runs: Mutex::default(), busy: Notify::new(), ended: CancellationToken::new() }
    }

    fn runs(&self) -> std::sync::MutexGuard<'_, Runs> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Since when there has been work in flight (FEN-7).
    fn busy_since(&self) -> Option<Instant> {
        self.runs().since
    }

    /// Hands a request to the session and makes its run known, before the Node's first answer can be looked up.
    pub(crate) fn open(&self, request: ToNode, body_window: u32, run: impl FnOnce(RunKey) -> Arc<Run>) -> Arc<Run> {
        let mut runs = self.runs();
        let key = self.outbox.open_request(request, body_window);
        let run = run(key);
        runs.open.insert(key, Arc::clone(&run));
        if runs.since.is_none() {
            runs.since = Some(now());
            self.busy.notify_one();
        }
        run
    }

    /// Nothing more is expected for this run: later messages are late, and what waits for the Node is not sent.
    pub(crate) fn forget(&self, key: RunKey) {
        self.outbox.discard(key);
        let mut runs = self.runs();
        runs.open.remove(&key);
        if runs.open.is_empty() {
            runs.since = None;
        }
    }

    pub(crate) fn say_goodbye(&self, code: CloseCode, retry_after: Duration) {
        let retry_after_ms = u32::try_from(retry_after.as_millis()).unwrap_or(u32::MAX);
        // A full control queue has no room for a Goodbye either; the end of the stream says enough then.
        let _full = self.outbox.push_control(ToNode::Goodbye(Goodbye { code, retry_after_ms }));
        self.outbox.finish();
        self.ended.cancel();
    }
}

/// Ends the connection in the engine when its task ends, however it ends.
struct Attached {
    shared: Arc<Shared>,
    connection: Option<Arc<Connection>>,
}

impl Attached {
    fn closed(&mut self, code: CloseCode) {
        if let Some(connection) = self.connection.take() {
            self.shared.with(|core, now| {
                core.connections.remove(&connection.id);
                core.state.handle_closed(connection.id, code, now);
            });
            connection.outbox.abort();
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.closed(CloseCode::Closed);
        self.shared.attached.fetch_sub(1, Ordering::Relaxed);
        self.shared.settled.notify_waiters();
    }
}

/// Serves one connection until it ends.
///
/// Cancel safety: dropping the future ends the connection as `closed`.
pub(crate) async fn serve(shared: Arc<Shared>, link: EdgeLink) {
    shared.attached.fetch_add(1, Ordering::Relaxed);
    let mut attached = Attached { shared: Arc::clone(&shared), connection: None };
    let (peer, outbox) = (link.peer(), OutboxHandle::new());
    let opened = shared.with(|core, now| {
        let id = core.state.handle_opened(peer, shared.entropy.number(), now).ok()?;
        let connection = Arc::new(Connection::new(id, outbox.clone()));
        core.connections.insert(id, Arc::clone(&connection));
        Some(connection)
    });
    attached.connection.clone_from(&opened);
    let mut incoming = link.start(outbox.outgoing());
    let Some(connection) = opened else {
        let retry_after_ms = u32::try_from(RETRY_CROWDED.as_millis()).unwrap_or(u32::MAX);
        let goodbye = Goodbye { code: CloseCode::Closed, retry_after_ms };
        let _full = outbox.push_control(ToNode::Goodbye(goodbye));
        outbox.finish();
        return linger(incoming).await;
    };
    let first_shift = shared.heartbeat.interval.mul_f64(shared.entropy.fraction());
    let profile = HeartbeatProfile { first_shift, ..shared.heartbeat };
    let mut session = Session {
        shared,
        connection,
        heartbeat: Heartbeat::new(now(), profile),
        suspicion: Suspicion::new(now()),
        order: SequenceCheck::default(),
        known: HashMap::new(),
    };
    match session.run(&mut incoming).await {
        // The peer is gone, or said so: nothing more to write.
        Some(code) => attached.closed(code),
        // The engine ended it and said Goodbye: give that a moment to be written.
        None => {
            attached.connection = None;
            linger(incoming).await;
        }
    }
}

/// Reads until the peer ends the link, but not for long, and drops what comes.
async fn linger(mut incoming: Incoming<ToEdge>) {
    let drained = async { while incoming.next().await.is_some_and(|item| item.is_ok()) {} };
    let _late = tokio::time::timeout(CLOSE_LINGER, drained).await;
}

fn violated(shared: &Shared, id: ConnectionId, violation: Violation) {
    tracing::warn!(connection = id.0, violation = violation.as_str(), "a node broke the protocol");
    shared.with(|core, now| core.state.violation(id, violation, now));
}

/// What only the connection's task uses.
struct Session {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    heartbeat: Heartbeat,
    suspicion: Suspicion,
    order: SequenceCheck,
    /// Runs that have sent something: found without another lock.
    known: HashMap<RunNumber, Arc<Run>>,
}

impl Session {
    /// Reads until the connection ends. `None` = the engine ended it.
    async fn run(&mut self, incoming: &mut Incoming<ToEdge>) -> Option<CloseCode> {
        let connection = Arc::clone(&self.connection);
        let mut ended = std::pin::pin!(connection.ended.cancelled());
        let mut timer = std::pin::pin!(tokio::time::sleep_until(self.poll_timeout().into()));
        loop {
            tokio::select! {
                biased;
                () = &mut ended => return None,
                item = incoming.next() => match item {
                    None => return Some(CloseCode::Closed),
                    Some(Ok(message)) => {
                        if let Some(code) = self.handle(message) {
                            return Some(code);
                        }
                    }
                    Some(Err(error)) => {
                        if let Some(code) = self.handle_error(&error) {
                            return Some(code);
                        }
                    }
                },
                () = connection.busy.notified() => timer.as_mut().reset(self.poll_timeout().into()),
                () = &mut timer => {
                    self.beat();
                    self.suspect();
                    timer.as_mut().reset(self.poll_timeout().into());
                }
            }
        }
    }

    /// When there is something to look at. A message that arrives makes it later at most: the armed timer finds that out.
    fn poll_timeout(&self) -> Instant {
        let silence = self.suspicion.poll_timeout(self.connection.busy_since());
        silence.map_or(self.heartbeat.poll_timeout(), |silence| silence.min(self.heartbeat.poll_timeout()))
    }

    fn suspect(&mut self) {
        let id = self.connection.id;
        let withdraw = self.shared.with(|core, _| core.state.suspicion_withdraw());
        while let Some(action) = self.suspicion.handle_timeout(self.connection.busy_since(), withdraw, now()) {
            match action {
                SuspicionAction::Ping => {
                    let nonce = self.heartbeat.ping_now(now());
                    self.control(ToNode::Ping(Ping { nonce }));
                }
                SuspicionAction::Suspect => self.shared.with(|core, now| core.state.set_suspect(id, true, now)),
                SuspicionAction::Withdraw => self.shared.with(|core, now| core.withdraw(id, now)),
            }
        }
    }

    fn beat(&mut self) {
        while let Some(action) = self.heartbeat.handle_timeout(now()) {
            match action {
                HeartbeatAction::Ping(nonce) => self.control(ToNode::Ping(Ping { nonce })),
                HeartbeatAction::Dead => {
                    let (id, code) = (self.connection.id, CloseCode::HeartbeatTimeout);
                    return self.shared.with(|core, now| core.state.close(id, code, Duration::ZERO, now));
                }
            }
        }
    }

    fn control(&self, message: ToNode) {
        if self.connection.outbox.push_control(message).is_err() {
            self.shared.overflow(self.connection.id);
        }
    }

    /// Ends the connection for a broken rule.
    fn violation(&self, violation: Violation) {
        violated(&self.shared, self.connection.id, violation);
    }

    /// One message. `Some` = the peer ended the connection.
    fn handle(&mut self, item: Sequenced<ToEdge>) -> Option<CloseCode> {
        let Sequenced { seq, message } = item;
        if self.order.accept(seq).is_err() {
            self.violation(Violation::EnvelopeOrder);
            return None;
        }
        let (id, charge) = (self.connection.id, message.charge());
        if self.suspicion.heard(now()) {
            self.shared.with(|core, now| core.state.set_suspect(id, false, now));
        }
        match message {
            ToEdge::Event(run, event) => {
                let n = event.seq;
                self.piece(run, Piece::Event(event), n, charge);
            }
            ToEdge::Frame(run, n, frame) => self.piece(run, Piece::Frame(frame), n, charge),
            ToEdge::Accepted(run) => {
                if let Some(dispatched) = self.find(run).and_then(|run| run.accept()) {
                    let after = now().saturating_duration_since(dispatched);
                    self.shared.observe(&Observation::Receipt { after });
                }
            }
            ToEdge::Credit(run, bytes) => {
                let key = self.find(run).map(|run| run.key);
                if key.is_some_and(|key| self.connection.outbox.grant(key, bytes).is_err()) {
                    self.violation(Violation::Credit);
                }
            }
            ToEdge::Ping(Ping { nonce }) => {
                self.control(ToNode::Pong(Pong { nonce, edge_time_ms: self.shared.edge_time_ms() }));
            }
            ToEdge::Pong(pong) if pong.nonce & PROBE != 0 => {
                self.shared.with(|core, now| core.state.handle_pong(id, pong.nonce, now));
            }
            ToEdge::Pong(pong) => self.heartbeat.handle_pong(now(), pong.nonce),
            ToEdge::Hello(hello) => self.shared.with(|core, now| core.state.handle_hello(id, &hello, now)),
            ToEdge::Register(request) => {
                let (edge_time_ms, unix_time) = (self.shared.edge_time_ms(), unix_time());
                self.shared.with(|core, now| core.state.handle_register(id, &request, edge_time_ms, unix_time, now));
            }
            ToEdge::Ready(request) => self.shared.with(|core, now| core.state.handle_ready(id, request, now)),
            ToEdge::Drain(drain) => {
                let returns_in = drain.returning.then(|| Duration::from_millis(drain.deadline_ms));
                self.shared.with(|core, now| core.state.handle_drain(id, returns_in, now));
            }
            ToEdge::ConfigAck(ack) => self.shared.with(|core, now| core.state.handle_config_ack(id, ack, now)),
            ToEdge::CommandResponse(response) => {
                self.shared.with(|core, now| core.state.handle_command_response(id, response, now));
            }
            ToEdge::Goodbye(goodbye) => return Some(goodbye.code),
            // A kind of message that this build does not know (W2).
            _ => self.violation(Violation::State),
        }
        None
    }

    /// What could not be read. `Some` = the transport is gone.
    fn handle_error(&mut self, error: &LinkError) -> Option<CloseCode> {
        match error {
            LinkError::MalformedRun { seq, run, .. } => {
                if self.order.accept(*seq).is_err() {
                    self.violation(Violation::EnvelopeOrder);
                } else if let Some(run) = self.find(*run).map(Arc::clone) {
                    self.fail(&run, Violation::Malformed, false);
                }
                None
            }
            LinkError::Malformed(_) => {
                self.violation(Violation::Malformed);
                None
            }
            LinkError::TooLarge => {
                self.violation(Violation::Size);
                None
            }
            LinkError::Transport(_) | LinkError::Handshake(_) => Some(CloseCode::Closed),
            // A way to break that this build does not know is an end without Goodbye (WIR-13).
            _ => Some(CloseCode::Closed),
        }
    }

    /// The run of a number. A number above the highest given is a violation, any other without a run is late (WIR-11).
    fn find(&mut self, number: RunNumber) -> Option<&Arc<Run>> {
        let slot = match self.known.entry(number) {
            Entry::Occupied(known) => return Some(known.into_mut()),
            Entry::Vacant(slot) => slot,
        };
        let outbox = &self.connection.outbox;
        if number.0 == 0 || number > outbox.highest() {
            violated(&self.shared, self.connection.id, Violation::UnknownRun);
            return None;
        }
        let run = outbox.key_of(number).and_then(|key| self.connection.runs().open.get(&key).map(Arc::clone));
        if run.is_none() {
            self.shared.observe(&Observation::LateMessage);
        }
        run.map(|run| &*slot.insert(run))
    }

    /// An event or frame of a run.
    fn piece(&mut self, number: RunNumber, piece: Piece, n: u64, charge: u32) {
        let (terminal, id) = (piece.is_terminal(), self.connection.id);
        let Some(run) = self.find(number) else { return };
        match run.receive(piece, n, charge, now()) {
            Ok(Received::Queued { full, verdict }) => {
                if let Some(verdict) = verdict {
                    let attempt = run.attempt;
                    self.shared.with(|core, now| {
                        if let Some(generation) = core.state.generation(id) {
                            core.state.handle_answer(attempt, generation, verdict, now);
                        }
                    });
                }
                if full {
                    self.shared.relieve_pool();
                }
            }
            Ok(Received::Late) => self.shared.observe(&Observation::LateMessage),
            Ok(Received::Terminal(piece)) => {
                if let Some(run) = self.known.remove(&number) {
                    // The place is free before the client sees the end (LEA-4).
                    self.evidence(&run, &piece);
                    if let Some(reason) = piece.credential() {
                        self.shared.observe(&Observation::CredentialRefused { by: CredentialRefuser::Node, reason });
                    }
                    self.release(&run, run.verdict(&piece));
                    match run.unacknowledged() {
                        None => run.push_terminal(piece, now()),
                        Some(end) => {
                            let mut wakers = Wakers::default();
                            run.end(end, now(), &mut wakers);
                            wakers.wake();
                        }
                    }
                }
            }
            Err(Violation::Credit) => self.violation(Violation::Credit),
            Err(violation) => {
                let run = Arc::clone(run);
                self.fail(&run, violation, terminal);
                if terminal {
                    self.known.remove(&number);
                }
            }
        }
    }

    /// What a stall terminal says of its provider, before its place is released.
    fn evidence(&self, run: &Run, terminal: &Piece) {
        let Some(stall) = terminal.stall() else { return };
        let id = self.connection.id;
        let provider = self.shared.with(|core, now| {
            let generation = core.state.generation(id)?;
            core.state.handle_stall(run.attempt, generation, stall, now)
        });
        if let Some(provider) = provider {
            run.note(EndNote::ConfirmedStall { provider });
        }
    }

    fn release(&self, run: &Run, verdict: Verdict) {
        let id = self.connection.id;
        self.shared.with(|core, now| {
            if let Some(generation) = core.state.generation(id) {
                core.state.handle_terminal(run.attempt, generation, verdict, now);
            }
            core.forget(run.attempt);
        });
    }

    /// Ends one run whose messages broke a rule (W5, W7, W17). A terminal among them still says that the work stopped.
    fn fail(&self, run: &Arc<Run>, violation: Violation, terminal: bool) {
        tracing::warn!(run_id = %run.run_id, violation = violation.as_str(), "a node broke the order of a run");
        self.shared.observe(&Observation::Violated { violation });
        if terminal {
            self.release(run, Verdict::Neutral);
            let mut wakers = Wakers::default();
            run.end(LocalEnd::Violated, now(), &mut wakers);
            wakers.wake();
        } else {
            self.shared.with(|core, now| {
                core.end_as(run.attempt, CancelReason::Withdrawn, LocalEnd::Violated, now);
            });
        }
    }
}
