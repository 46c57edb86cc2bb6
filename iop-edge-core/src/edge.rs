//! Decides what an embedder holds: one cheap handle for connections, requests, state and shutdown.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use iop_execution::{Entropy, NodeId, RunId, RunStream, SessionId, TunnelStream};
use iop_wire::limits::{CLOSE_LINGER, HEARTBEAT_SLACK, RECEIVE_POOL};
use iop_wire::{CloseCode, CommandResult, EdgeLink, HeartbeatProfile, NodeCommand, VerifiedIdentity};
use tokio::sync::oneshot;

use crate::api::{
    Admitted, ApplyError, CancelRun, CommandError, ConfigChange, Engine, ModelListing, Output, Payload, Submit,
    SubmitError, Submitted, UnknownNode, Wanted, WireKind,
};
use crate::catalog::Catalog;
use crate::driver::pool::Pool;
use crate::driver::shared::{SLOW_CLIENT_TICK, Shared, now};
use crate::driver::{connection, dispatch};
use crate::events::{RunNotice, Subscription};
use crate::observe::Observer;
use crate::snapshot::{EdgeSnapshot, RunSnapshot};
use crate::state::{CapacityLedger, EdgeNodeEvent, EdgeState, LeastLoaded, Ledger, SelectionPolicy};

/// Nodes come back within this time after a shutdown, spread at random.
const RETURN_SPREAD: Duration = Duration::from_secs(5);

/// The Edge engine. Cheap to clone; all clones are one Edge.
///
/// It owns no task and no socket. The embedder runs [`drive`](Self::drive) once and [`attach`](Self::attach) for each
/// link, both on a tokio runtime with time enabled.
#[derive(Debug, Clone)]
pub struct Edge {
    shared: Arc<Shared>,
}

/// Settings of an [`Edge`]. Each has a default.
#[derive(Debug)]
#[must_use]
pub struct EdgeBuilder {
    catalog: Arc<Catalog>,
    edge_id: String,
    observer: Arc<dyn Observer>,
    heartbeat: HeartbeatProfile,
    entropy: Entropy,
    receive_pool: u64,
    ledger: Box<dyn CapacityLedger>,
    policy: Box<dyn SelectionPolicy>,
}

impl EdgeBuilder {
    /// Name of this Edge, told to Nodes for people; `edge` by default.
    pub fn edge_id(mut self, edge_id: impl Into<String>) -> Self {
        self.edge_id = edge_id.into();
        self
    }

    /// Who is told what happens; nobody by default.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Other heartbeat times than the transport profile's 30 s and 45 s: for tests (WIR-12). The shift of the first ping is
    /// drawn for each connection.
    pub const fn heartbeat(mut self, profile: HeartbeatProfile) -> Self {
        self.heartbeat = profile;
        self
    }

    /// Where run ids and jitter come from: the operating system by default. A seed makes a simulation repeatable.
    pub fn entropy(mut self, entropy: Entropy) -> Self {
        self.entropy = entropy;
        self
    }

    /// Bytes, as charged, that may wait for all clients together; 256 MiB by default (WIR-7).
    pub const fn receive_pool(mut self, bytes: u64) -> Self {
        self.receive_pool = bytes;
        self
    }

    /// Another ledger than the local one.
    pub fn ledger(mut self, ledger: Box<dyn CapacityLedger>) -> Self {
        self.ledger = ledger;
        self
    }

    /// Another selection than [`LeastLoaded`].
    pub fn selection(mut self, policy: Box<dyn SelectionPolicy>) -> Self {
        self.policy = policy;
        self
    }

    /// The Edge.
    #[must_use]
    pub fn build(self) -> Edge {
        let state = EdgeState::new(self.catalog, self.edge_id, self.ledger, self.policy);
        let shared = Shared::new(state, Pool::new(self.receive_pool), self.heartbeat, self.entropy, self.observer);
        Edge { shared: Arc::new(shared) }
    }
}

/// A raw HTTP request for [`Edge::submit_tunnel`].
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs, reason = "the four parts of a request")]
pub struct TunnelCall {
    /// Method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Headers; the caller vouches for them.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Edge {
    /// An Edge for this catalog.
    pub fn builder(catalog: Catalog) -> EdgeBuilder {
        EdgeBuilder {
            catalog: Arc::new(catalog),
            edge_id: "edge".to_owned(),
            observer: Arc::new(()),
            heartbeat: HeartbeatProfile::default(),
            entropy: Entropy::system(),
            receive_pool: RECEIVE_POOL,
            ledger: Box::new(Ledger::default()),
            policy: Box::new(LeastLoaded),
        }
    }

    #[cfg(test)]
    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Serves one Node's link until it ends. Run it as a task of its own.
    ///
    /// Cancel safety: dropping the future closes the connection and fences its generation.
    pub fn attach(&self, link: EdgeLink) -> impl Future<Output = ()> + Send + 'static {
        connection::serve(Arc::clone(&self.shared), link)
    }

    /// Runs the Edge's timers: queue and handshake timeouts, deadlines, quarantine, slow clients. Never ends; spawn it once.
    /// A request whose own wait or deadline ends looks at the timers itself, so a late poll here delays no client.
    ///
    /// Cancel safety: dropping the future loses nothing; another one goes on.
    pub fn drive(&self) -> impl Future<Output = ()> + Send + 'static {
        let shared = Arc::clone(&self.shared);
        async move {
            let mut sweep = None;
            loop {
                let timers = shared.tick();
                if let Some(due) = sweep.filter(|due| *due <= now()) {
                    // A look that comes far too late means that this process was suspended: no client could read.
                    if now() > due + HEARTBEAT_SLACK {
                        shared.excuse_clients();
                    } else {
                        shared.end_slow_clients();
                    }
                    sweep = None;
                }
                if sweep.is_none() && shared.has_streams() {
                    sweep = Some(now() + SLOW_CLIENT_TICK);
                }
                let next = timers.into_iter().chain(sweep).min();
                let timer = async {
                    match next {
                        Some(next) => tokio::time::sleep_until(next.into()).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = timer => {}
                    () = shared.rearm.notified() => {}
                }
            }
        }
    }

    /// Submits a normalised run: `input` is a chat-completions object. Only providers that take runs are candidates.
    ///
    /// Cancel safety: as [`Engine::submit`].
    ///
    /// # Errors
    /// [`SubmitError`], before admission only; afterwards failures are the stream's terminal.
    pub async fn submit_run(&self, request: Submit, input: Bytes) -> Result<(Admitted, RunStream), SubmitError> {
        let prepare = |_: &Admitted| Payload::Run { input };
        let submitted = dispatch::submit(&self.shared, request, Some(Wanted::Wire(WireKind::Run)), prepare).await?;
        match submitted.output {
            Output::Run(stream) => Ok((submitted.admitted, stream)),
            Output::Tunnel(_) => Err(SubmitError::Unavailable),
        }
    }

    /// Submits a raw tunnel. Only providers that take tunnels are candidates.
    ///
    /// Cancel safety: as [`Engine::submit`].
    ///
    /// # Errors
    /// [`SubmitError`], before admission only; afterwards failures are the stream's terminal.
    pub async fn submit_tunnel(
        &self,
        request: Submit,
        call: TunnelCall,
    ) -> Result<(Admitted, TunnelStream), SubmitError> {
        let TunnelCall { method, path, headers, body } = call;
        let prepare = |_: &Admitted| Payload::Tunnel { method, path, headers, body };
        let submitted = dispatch::submit(&self.shared, request, Some(Wanted::Wire(WireKind::Tunnel)), prepare).await?;
        match submitted.output {
            Output::Tunnel(stream) => Ok((submitted.admitted, stream)),
            Output::Run(_) => Err(SubmitError::Unavailable),
        }
    }

    /// Cancels one run, wherever it is. Its stream ends as cancelled; a waiting request answers [`SubmitError::Cancelled`].
    pub fn cancel(&self, run_id: RunId) -> CancelRun {
        if self.shared.cancel(run_id) { CancelRun::Cancelled } else { CancelRun::UnknownRun }
    }

    /// What is configured and in use, at one instant.
    #[must_use]
    pub fn snapshot(&self) -> EdgeSnapshot {
        self.shared.with(|core, now| core.state.snapshot(now))
    }

    /// Life of the Nodes from now on.
    pub fn subscribe_nodes(&self) -> Subscription<EdgeNodeEvent> {
        self.shared.nodes.subscribe()
    }

    /// Events of every normalised run from now on.
    pub fn subscribe_runs(&self) -> Subscription<Arc<RunNotice>> {
        self.shared.runs.subscribe()
    }

    /// Goes down: refuses new requests and Nodes at once, answers who waits, tells the Nodes, lets what runs finish for up
    /// to `grace`, then says Goodbye. What still runs then ends as `disconnected`.
    ///
    /// Cancel safety: new requests stay refused; the rest does not happen.
    pub async fn shutdown(&self, grace: Duration) {
        self.shared.with(|core, now| core.state.begin_shutdown(grace, now));
        let running = || self.shared.with(|core, _| core.state.open_runs()) > 0;
        self.settle(grace, running).await;
        let spread = || RETURN_SPREAD.mul_f64(self.shared.entropy.fraction());
        self.shared.with(|core, now| core.state.close_all(CloseCode::Restart, spread, now));
        let attached = || self.shared.attached.load(Ordering::Relaxed) > 0;
        self.settle(CLOSE_LINGER, attached).await;
    }

    /// Waits while `busy`, up to a limit.
    async fn settle(&self, limit: Duration, busy: impl Fn() -> bool) {
        let settled = async {
            loop {
                let mut change = std::pin::pin!(self.shared.settled.notified());
                change.as_mut().enable();
                if !busy() {
                    return;
                }
                change.await;
            }
        };
        let _late = tokio::time::timeout(limit, settled).await;
    }

    /// Asks a Node something of the closed command set, within `deadline` (EDG-1). A CAPABILITIES answer about a target is
    /// evidence, too: it may raise a lowered provider (HLT-5).
    ///
    /// Cancel safety: dropping the future forgets the answer.
    ///
    /// # Errors
    /// [`CommandError`].
    pub async fn command(
        &self,
        node: &NodeId,
        command: NodeCommand,
        session_id: Option<SessionId>,
        deadline: Duration,
    ) -> Result<CommandResult, CommandError> {
        let (sender, answer) = oneshot::channel();
        self.shared.with(|core, now| {
            let id = core.state.command(node, command, session_id, deadline, now)?;
            core.askers.insert(id, sender);
            Ok(())
        })?;
        // The engine answers every command; a lost answer could only mean that the Edge is gone.
        answer.await.unwrap_or(Err(CommandError::Disconnected))
    }

    /// Replaces the config as a whole (CFG-2). Requests that have a place go on as they were admitted; who waits is resolved
    /// again. Nodes that are gone from it are closed, ready ones whose providers changed are sent their new config.
    ///
    /// # Errors
    /// [`ApplyError`]; nothing changed then.
    pub fn apply_config(&self, catalog: Catalog) -> Result<ConfigChange, ApplyError> {
        self.shared.with(|core, now| core.state.apply_config(Arc::new(catalog), now))
    }

    /// Looks at the workload identity of every connection again, for example because roots changed or time has passed: `good`
    /// gets each one with the certificates that proved it. A connection whose identity is no longer good gets no new work, may
    /// finish what runs for up to [`IDENTITY_DRAIN`](crate::IDENTITY_DRAIN), and is ended as `identity_revoked`. Answers how
    /// many those are.
    ///
    /// `good` is called outside the engine's lock, on the caller's thread.
    pub fn recheck_identities(&self, good: impl Fn(&VerifiedIdentity) -> bool) -> usize {
        let shown = self.shared.with(|core, _| core.state.identities());
        let lost: Vec<_> = shown.into_iter().filter(|(_, identity)| !good(identity)).map(|(id, _)| id).collect();
        for connection in &lost {
            // One that has ended meanwhile is none of this.
            self.shared.with(|core, now| core.state.handle_identity_lost(*connection, now));
        }
        lost.len()
    }

    /// Takes a Node out of service: what runs there goes on, nothing new is sent. It stays connected, and out of service
    /// over reconnects, until [`resume`](Self::resume).
    ///
    /// # Errors
    /// [`UnknownNode`].
    pub fn drain(&self, node: &NodeId) -> Result<(), UnknownNode> {
        self.shared.with(|core, now| core.state.set_in_service(node, false, now))
    }

    /// Puts a drained Node back into service.
    ///
    /// # Errors
    /// [`UnknownNode`].
    pub fn resume(&self, node: &NodeId) -> Result<(), UnknownNode> {
        self.shared.with(|core, now| core.state.set_in_service(node, true, now))
    }

    /// Requests that wait or hold a place, oldest first, at most `limit`.
    #[must_use]
    pub fn runs(&self, limit: usize) -> Vec<RunSnapshot> {
        self.shared.with(|core, now| core.state.runs(limit, now))
    }
}

#[iop_execution::async_trait]
impl Engine for Edge {
    async fn submit(
        &self,
        request: Submit,
        prepare: Box<dyn for<'a> FnOnce(&'a Admitted) -> Payload + Send>,
    ) -> Result<Submitted, SubmitError> {
        let wanted = if request.messages { Some(Wanted::Messages) } else { request.wire.map(Wanted::Wire) };
        dispatch::submit(&self.shared, request, wanted, prepare).await
    }

    fn models(&self) -> Vec<ModelListing> {
        self.shared.with(|core, _| core.state.models())
    }

    fn is_ready(&self) -> bool {
        self.shared.with(|core, _| core.state.is_ready())
    }
}
