//! Decides which Edge a Node dials and when: one supervisor per Edge covers the first connection and every later one
//! (NOD-1).

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use iop_execution::{Entropy, NodeId, Provider, Redacted};
use iop_wire::{AdapterInventory, ConnectError, Connector, HeartbeatProfile};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::adapters::Adapters;
use crate::background::Background;
use crate::error::{NodeError, ServeEnd};
use crate::factory::{AdapterFactory, CUSTOM_KIND, NoFactory};
use crate::install::stop_all;
use crate::journal::{NoJournal, RunJournal};
use crate::observe::{NoObserver, NodeObserver};
use crate::recheck::EdgeCheck;
use crate::session::{self, End, now};
use crate::state::leases::issuers::LeaseIssuers;
use crate::state::reconnect::{Next, Reconnect, ReconnectPolicy, is_fatal_close};
use crate::upstream::AllowUpstream;

/// How long what runs may take to finish after a shutdown, by default.
pub const DEFAULT_DRAIN_GRACE: Duration = Duration::from_secs(30);
/// Longest time one dial may take, whatever the connector allows itself.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(30);

/// What every connection of a Node shares.
pub(crate) struct Inner {
    pub(crate) token: Redacted<String>,
    pub(crate) claimed_node_id: Option<NodeId>,
    pub(crate) version: String,
    pub(crate) instance_id: [u8; 16],
    pub(crate) heartbeat: HeartbeatProfile,
    pub(crate) drain_grace: Duration,
    pub(crate) upstream: AllowUpstream,
    pub(crate) lease_issuers: LeaseIssuers,
    pub(crate) factory: Arc<dyn AdapterFactory>,
    pub(crate) custom: HashMap<String, Arc<dyn Provider>>,
    pub(crate) observer: Arc<dyn NodeObserver>,
    pub(crate) journal: Arc<dyn RunJournal>,
    pub(crate) background: Background,
    pub(crate) edge_check: EdgeCheck,
    entropy: Entropy,
    policy: ReconnectPolicy,
    adapters: Mutex<Adapters>,
    ordinal: AtomicU64,
    status: watch::Sender<NodeStatus>,
}

impl Inner {
    /// A short lock, never held over an await.
    pub(crate) fn adapters(&self) -> MutexGuard<'_, Adapters> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn inventory(&self) -> Vec<AdapterInventory> {
        let mut inventory = self.factory.inventory();
        if !self.custom.is_empty() {
            inventory.push(AdapterInventory { kind: CUSTOM_KIND.to_owned(), version: self.version.clone() });
        }
        inventory
    }

    /// A random number that spreads load.
    pub(crate) fn jitter(&self) -> u32 {
        u32::try_from(self.entropy.number() >> 32).unwrap_or(u32::MAX)
    }

    pub(crate) fn set_status(&self, status: NodeStatus) {
        self.status.send_replace(status);
    }
}

/// Where a Node stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "a closed list for readiness endpoints")]
pub enum NodeStatus {
    /// No connection: dialling, or waiting to dial.
    Connecting,
    /// A connection that is not registered yet.
    Registering,
    /// Registered; adapters are starting.
    Starting,
    /// Work may come.
    Ready,
    /// Finishing what runs.
    Draining,
    /// Serving is over.
    Stopped,
}

/// Watches where a Node stands. Cheap to clone.
#[derive(Debug, Clone)]
pub struct StatusHandle(watch::Receiver<NodeStatus>);

impl StatusHandle {
    /// The status now.
    #[must_use]
    pub fn get(&self) -> NodeStatus {
        *self.0.borrow()
    }

    /// Waits until the Node is ready. False if it stopped instead.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn wait_ready(&mut self) -> bool {
        let reached = self.0.wait_for(|status| matches!(status, NodeStatus::Ready | NodeStatus::Stopped)).await;
        reached.is_ok_and(|status| *status == NodeStatus::Ready)
    }
}

/// Puts a [`Node`] together.
#[must_use]
pub struct NodeBuilder {
    token: Redacted<String>,
    edges: Vec<Arc<dyn Connector>>,
    claimed_node_id: Option<NodeId>,
    version: String,
    heartbeat: HeartbeatProfile,
    drain_grace: Duration,
    upstream: AllowUpstream,
    lease_issuers: LeaseIssuers,
    factory: Arc<dyn AdapterFactory>,
    custom: HashMap<String, Arc<dyn Provider>>,
    observer: Arc<dyn NodeObserver>,
    journal: Arc<dyn RunJournal>,
    entropy: Entropy,
    policy: ReconnectPolicy,
}

impl NodeBuilder {
    /// Makes adapter instances from the Edge's config. Default: none, see [`Self::provider`].
    pub fn factory(mut self, factory: Arc<dyn AdapterFactory>) -> Self {
        self.factory = factory;
        self
    }

    /// A provider of this program, used where the config says kind `custom` and this adapter key, or this name as kind.
    pub fn provider(mut self, name: impl Into<String>, provider: Arc<dyn Provider>) -> Self {
        self.custom.insert(name.into(), provider);
        self
    }

    /// Is told what happens. Default: nobody.
    pub fn observer(mut self, observer: Arc<dyn NodeObserver>) -> Self {
        self.observer = observer;
        self
    }

    /// Where runs are written down. Default: nowhere.
    pub fn journal(mut self, journal: Arc<dyn RunJournal>) -> Self {
        self.journal = journal;
        self
    }

    /// Where the instance id and jitter come from: the operating system by default. A seed makes a simulation repeatable.
    pub fn entropy(mut self, entropy: Entropy) -> Self {
        self.entropy = entropy;
        self
    }

    /// How often and how fast to dial. Default: 10 attempts, 10 s.
    pub const fn reconnect(mut self, policy: ReconnectPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Which backends may be called. Default: loopback and private addresses.
    pub fn allow_upstream(mut self, upstream: AllowUpstream) -> Self {
        self.upstream = upstream;
        self
    }

    /// Whose credential leases are taken. Default: nobody's.
    pub fn lease_issuers(mut self, issuers: LeaseIssuers) -> Self {
        self.lease_issuers = issuers;
        self
    }

    /// How long what runs may take to finish after a shutdown. Default: [`DEFAULT_DRAIN_GRACE`].
    pub const fn drain_grace(mut self, grace: Duration) -> Self {
        self.drain_grace = grace;
        self
    }

    /// Which Node this believes to be; the Edge checks it against the token's record. Default: not said.
    pub fn claimed_node_id(mut self, node_id: NodeId) -> Self {
        self.claimed_node_id = Some(node_id);
        self
    }

    /// Version of the program, for people. Default: that of this crate.
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = version.into();
        self
    }

    /// Times of the heartbeat, for tests: in production they are constants of the wire.
    #[doc(hidden)]
    pub const fn heartbeat(mut self, profile: HeartbeatProfile) -> Self {
        self.heartbeat = profile;
        self
    }

    /// The Node.
    ///
    /// # Errors
    /// [`NodeError::Randomness`] when the operating system gives none.
    pub fn build(self) -> Result<Node, NodeError> {
        let mut instance_id = [0; 16];
        self.entropy.fill(&mut instance_id).map_err(|_| NodeError::Randomness)?;
        let inner = Inner {
            token: self.token,
            claimed_node_id: self.claimed_node_id,
            version: self.version,
            instance_id,
            heartbeat: self.heartbeat,
            drain_grace: self.drain_grace,
            upstream: self.upstream,
            lease_issuers: self.lease_issuers,
            factory: self.factory,
            custom: self.custom,
            observer: self.observer,
            journal: self.journal,
            background: Background::default(),
            edge_check: EdgeCheck::default(),
            entropy: self.entropy,
            policy: self.policy,
            adapters: Mutex::new(Adapters::new()),
            ordinal: AtomicU64::new(0),
            status: watch::Sender::new(NodeStatus::Connecting),
        };
        Ok(Node { inner: Arc::new(inner), edges: self.edges })
    }
}

impl fmt::Debug for NodeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeBuilder")
            .field("edges", &self.edges)
            .field("reconnect", &self.policy)
            .finish_non_exhaustive()
    }
}

/// A Node that is ready to serve.
#[must_use = "a Node does nothing unless served"]
pub struct Node {
    inner: Arc<Inner>,
    /// A set of one: the supervisor is written for more.
    edges: Vec<Arc<dyn Connector>>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("edges", &self.edges)
            .field("status", &*self.inner.status.borrow())
            .finish_non_exhaustive()
    }
}

impl Node {
    /// A Node that proves itself with this token to the Edge that the connector dials.
    pub fn builder(token: Redacted<String>, connector: Arc<dyn Connector>) -> NodeBuilder {
        NodeBuilder {
            token,
            edges: vec![connector],
            claimed_node_id: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            heartbeat: HeartbeatProfile::default(),
            drain_grace: DEFAULT_DRAIN_GRACE,
            upstream: AllowUpstream::default(),
            lease_issuers: LeaseIssuers::default(),
            factory: Arc::new(NoFactory),
            custom: HashMap::new(),
            observer: Arc::new(NoObserver),
            journal: Arc::new(NoJournal),
            entropy: Entropy::system(),
            policy: ReconnectPolicy::default(),
        }
    }

    /// Watches where the Node stands, also while it serves.
    #[must_use]
    pub fn status(&self) -> StatusHandle {
        StatusHandle(self.inner.status.subscribe())
    }

    /// Looks at the Edge of a live connection again, or has the connection made anew, also while the Node serves.
    #[must_use]
    pub fn edge_check(&self) -> EdgeCheck {
        self.inner.edge_check.clone()
    }

    /// Connects, registers, and runs what the Edge sends, until `shutdown` is cancelled or there is no point in going on.
    ///
    /// A shutdown refuses new work, lets what runs finish up to the drain grace, cancels the rest, and says Goodbye. Answers
    /// that are read to their end under the cancel policy `drain` are waited for, each up to its 60 s (NOD-9). For an
    /// immediate end drop the future instead. Needs a tokio runtime with time enabled.
    ///
    /// # Errors
    /// [`NodeError`]: a fatal configuration or credential error, or the attempts are used up.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connection and every provider call at once; adapters are not stopped.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<ServeEnd, NodeError> {
        let Self { inner, edges } = self;
        let _background = inner.background.guard();
        // One supervisor that gives up ends them all.
        let stop = shutdown.child_token();
        let mut supervisors: FuturesUnordered<_> =
            edges.into_iter().map(|edge| Box::pin(supervise(&inner, edge, &stop))).collect();
        let mut result = Ok(ServeEnd::Drained);
        while let Some(end) = supervisors.next().await {
            match end {
                Ok(ServeEnd::Drained) => {}
                Ok(ServeEnd::Cancelled) => result = result.and(Ok(ServeEnd::Cancelled)),
                Err(error) => {
                    stop.cancel();
                    result = result.and(Err(error));
                }
            }
        }
        inner.background.wait().await;
        let adapters = inner.adapters().take_all();
        stop_all(&inner, adapters).await;
        inner.set_status(NodeStatus::Stopped);
        result
    }
}

async fn supervise(
    inner: &Arc<Inner>,
    edge: Arc<dyn Connector>,
    shutdown: &CancellationToken,
) -> Result<ServeEnd, NodeError> {
    let mut reconnect = Reconnect::new(inner.policy);
    loop {
        inner.set_status(NodeStatus::Connecting);
        // From here on: what is renewed while it is dialled may be missing in the connection.
        let renewals = inner.edge_check.renewals();
        let dialled = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(ServeEnd::Drained),
            dialled = timeout(DIAL_TIMEOUT, edge.connect()) => dialled,
        };
        let retry_after = match dialled {
            Ok(Ok(link)) => {
                let ordinal = inner.ordinal.fetch_add(1, Ordering::Relaxed) + 1;
                match session::serve(inner, link, ordinal, renewals, &mut reconnect, shutdown).await {
                    End::Shutdown { cancelled: false } => return Ok(ServeEnd::Drained),
                    End::Shutdown { cancelled: true } => return Ok(ServeEnd::Cancelled),
                    // Asked for, and not by the peer: there is nothing to wait for.
                    End::Renewed => continue,
                    End::Refused(refusal) if refusal.reason.is_fatal() => {
                        return Err(NodeError::Refused(refusal.reason));
                    }
                    End::Refused(refusal) => {
                        tracing::warn!(reason = %refusal.reason, "the Edge refused this Node for now");
                        refusal.retry_after
                    }
                    End::Peer { code, .. } | End::Close(code) if is_fatal_close(code) => {
                        return Err(NodeError::Closed(code));
                    }
                    End::Peer { retry_after, .. } => retry_after,
                    End::Close(_) | End::Lost => Duration::ZERO,
                }
            }
            Ok(Err(ConnectError::Fatal(problem))) => return Err(NodeError::Connect(problem)),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the Edge can't be reached");
                Duration::ZERO
            }
            Err(_) => {
                tracing::warn!("the dial took too long");
                Duration::ZERO
            }
        };
        inner.set_status(NodeStatus::Connecting);
        let wait = match reconnect.ended(now(), retry_after, inner.jitter()) {
            Next::Dial(wait) => wait,
            Next::Exhausted => return Err(NodeError::Exhausted { attempts: reconnect.attempts() }),
        };
        tracing::debug!(wait_ms = wait.as_millis(), attempts = reconnect.attempts(), "waiting before the next dial");
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(ServeEnd::Drained),
            () = sleep(wait) => {}
        }
    }
}
