//! Decides how both engines run in one process: an Edge with its OpenAI surface, Nodes over memory links, and clients
//! that call the surface without sockets. All of it stands still and moves with tokio's clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Full};
use iop_edge_core::catalog::{
    Candidate, Catalog, CatalogBuilder, Credentials, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults, Strategy,
};
use iop_edge_core::events::Notice;
use iop_edge_core::observe::Observer;
use iop_edge_core::openai::{OpenAiBody, OpenAiConfig, OpenAiService};
use iop_edge_core::snapshot::{EdgeSnapshot, ProviderSnapshot};
use iop_edge_core::token::{Token, TokenKind};
use iop_edge_core::{Edge, EdgeNodeEvent};
use iop_execution::{AdapterKey, ModelName, NodeId, Provider, ProviderId, Redacted, Target};
use iop_node_core::{CUSTOM_KIND, EdgeCheck, LeaseIssuers, Node, NodeError, NodeObserver, ReconnectPolicy, ServeEnd};
use iop_wire::link::memory::{MemoryConnector, MemoryListener, MemoryMode, memory_listener};
use iop_wire::link::{EdgeLink, Incoming, Link, LinkError, Outgoing, PeerIdentity};
use iop_wire::{
    CancelPolicy, ConnectError, Connector, CredentialUse, NodeLink, ProviderConfig, Sequenced, ToEdge, ToNode,
    TrustDomain, VerifiedIdentity, WireMode, WorkloadIdentity, WorkloadRole,
};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::wire_client::{Answer, End, Head, Piece, Request};

/// Longest wait for anything that happens at once, on whatever clock the test has.
const PATIENCE: Duration = Duration::from_secs(600);

/// One provider of a Node.
#[derive(Debug)]
pub struct PairProvider {
    node: usize,
    config: ProviderConfig,
    provider: Arc<dyn Provider>,
    models: Vec<String>,
}

impl PairProvider {
    /// A provider with this id, so many places, and these models (their targets have the same names).
    #[must_use]
    pub fn new(id: &str, provider: Arc<dyn Provider>, capacity: u32, models: &[&str]) -> Self {
        let config = ProviderConfig {
            provider_id: ProviderId::new(id).unwrap(),
            adapter: AdapterKey::new(id).unwrap(),
            kind: CUSTOM_KIND.to_owned(),
            base_url: String::new(),
            wire: WireMode::Auto,
            capacity,
            long_capacity: 0,
            targets: Vec::new(),
            response_stall_timeout_ms: 0,
            first_response_timeout_ms: 0,
            stall_per_1k_prompt_ms: 0,
            close_grace_ms: 0,
            probe_timeout_ms: 0,
            terminal_linger_ms: 0,
            cancel_policy: CancelPolicy::Abort,
            auth: String::new(),
            credential: None,
        };
        let models = models.iter().map(|&model| model.to_owned()).collect();
        Self { node: 0, config, provider, models }
    }

    /// On this Node instead of the first.
    #[must_use]
    pub const fn on_node(mut self, node: usize) -> Self {
        self.node = node;
        self
    }

    /// At this origin, with calls that each need a lease of this slot, applied by this profile.
    #[must_use]
    pub fn needing(mut self, slot: &str, profile: &str, base_url: &str) -> Self {
        self.config.base_url = base_url.to_owned();
        self.config.credential = Some(CredentialUse { slot: slot.to_owned(), profile: profile.to_owned() });
        self
    }

    /// Ended by its Node after so long without progress, and asked about for as long.
    #[must_use]
    pub fn stalling_after(mut self, limit: Duration) -> Self {
        let limit = u64::try_from(limit.as_millis()).unwrap();
        (self.config.response_stall_timeout_ms, self.config.probe_timeout_ms) = (limit, limit);
        self
    }

    /// By normalised runs only.
    #[must_use]
    pub const fn by_run(mut self) -> Self {
        self.config.wire = WireMode::Run;
        self
    }
}

/// The surface as these tests want it, unless they are about recovery: what happens to one attempt is what the client sees.
#[must_use]
pub fn one_attempt() -> OpenAiConfig {
    OpenAiConfig::default().with_recovery(0, Duration::ZERO)
}

/// What a pair shall be.
#[derive(Debug)]
pub struct PairPlan {
    /// Providers of all Nodes.
    pub providers: Vec<PairProvider>,
    /// How messages cross the link.
    pub mode: MemoryMode,
    /// Bounds of every model's queue.
    pub queue: QueueDefaults,
    /// How candidates are chosen; none = the default.
    pub strategy: Option<Strategy>,
    /// The surface.
    pub openai: OpenAiConfig,
    /// What leases are issued of; none = no link proves anything, and no Node takes any.
    pub managed: Option<Managed>,
}

/// What managed credentials need beside a plain pair.
#[derive(Debug, Clone)]
pub struct Managed {
    /// What leases may be issued of.
    pub credentials: Credentials,
    /// Who is told what happens at the Edge.
    pub edge: Arc<dyn Observer>,
    /// Who is told what happens at the Nodes.
    pub node: Arc<dyn NodeObserver>,
    /// Who sees and changes what crosses the links.
    pub tap: Arc<dyn Tap>,
}

/// Sees what crosses the links of a Node, on the Node's side, and may change it.
pub trait Tap: std::fmt::Debug + Send + Sync + 'static {
    /// A message of a Node.
    fn to_edge(&self, node: usize, message: &ToEdge) {
        let _ = (node, message);
    }
    /// A message of the Edge to a Node.
    fn to_node(&self, node: usize, message: &mut ToNode) {
        let _ = (node, message);
    }
}

impl Tap for () {}

impl PairPlan {
    /// These providers, over links that encode and decode every message.
    #[must_use]
    pub fn new(providers: Vec<PairProvider>) -> Self {
        Self {
            providers,
            mode: MemoryMode::Encoded,
            queue: QueueDefaults::default(),
            strategy: None,
            openai: one_attempt(),
            managed: None,
        }
    }

    /// With candidates chosen like this.
    #[must_use]
    pub const fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = Some(strategy);
        self
    }

    /// With managed credentials: every link proves who is at its ends.
    #[must_use]
    pub fn managed(mut self, managed: Managed) -> Self {
        self.managed = Some(managed);
        self
    }

    /// With values passed as they are.
    #[must_use]
    pub const fn direct(mut self) -> Self {
        self.mode = MemoryMode::Direct;
        self
    }

    /// With these queue bounds.
    #[must_use]
    pub const fn queue(mut self, max_waiting: usize, timeout: Duration) -> Self {
        self.queue = QueueDefaults { max_waiting, timeout };
        self
    }

    /// With these settings of the surface.
    #[must_use]
    pub fn openai(mut self, config: OpenAiConfig) -> Self {
        self.openai = config;
        self
    }
}

/// An Edge and its Nodes. Dropping it stops everything.
#[derive(Debug)]
pub struct Pair {
    edge: Edge,
    service: OpenAiService,
    nodes: Vec<PairNode>,
    managed: Option<Managed>,
    catalog: Catalog,
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct PairNode {
    id: NodeId,
    token: Redacted<String>,
    providers: Vec<(String, Arc<dyn Provider>)>,
    connector: Arc<MemoryConnector>,
    wires: Arc<Wires>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    shutdown: CancellationToken,
    edge_check: EdgeCheck,
    task: JoinHandle<Result<ServeEnd, NodeError>>,
}

/// The next revision of a config.
#[must_use]
pub fn changed(catalog: &Catalog, change: impl FnOnce(&mut [NodeEntry], &mut Credentials)) -> Catalog {
    let (mut nodes, mut credentials) = (catalog.nodes().to_vec(), Credentials::clone(catalog.credentials()));
    change(&mut nodes, &mut credentials);
    let mut next = Catalog::builder().revision(catalog.revision() + 1).queue(catalog.queue());
    next = nodes.into_iter().fold(next, CatalogBuilder::node);
    next = catalog.models().iter().cloned().fold(next, CatalogBuilder::model);
    next.credentials(credentials).build().unwrap()
}

impl Pair {
    /// Starts everything and waits until every Node is ready.
    pub async fn start(plan: PairPlan) -> Self {
        let mut pair = Self::prepare(plan);
        for node in 0..pair.nodes.len() {
            pair.start_node(node);
            pair.node_ready(node).await;
        }
        pair
    }

    /// An Edge that waits for its Nodes.
    #[must_use]
    pub fn prepare(plan: PairPlan) -> Self {
        let PairPlan { providers, mode, queue, strategy, openai, managed } = plan;
        let count = providers.iter().map(|provider| provider.node + 1).max().unwrap_or(0);
        let mut catalog = Catalog::builder().queue(queue);
        let mut models: Vec<(String, Vec<Candidate>)> = Vec::new();
        for provider in &providers {
            for model in &provider.models {
                let candidate = Candidate::new(provider.config.provider_id.clone(), Target::new(model).unwrap());
                match models.iter_mut().find(|(name, _)| name == model) {
                    Some((_, candidates)) => candidates.push(candidate),
                    None => models.push((model.clone(), vec![candidate])),
                }
            }
        }
        for (model, candidates) in models {
            let mut group = ModelGroup::new(ModelName::new(&model).unwrap(), candidates, queue);
            group.strategy = strategy;
            catalog = catalog.model(group);
        }
        let (mut nodes, mut listeners) = (Vec::new(), Vec::new());
        for number in 0..count {
            let id = NodeId::new(format!("node-{number}")).unwrap();
            let token = Token::generate(TokenKind::Node).unwrap();
            let own = || providers.iter().filter(|provider| provider.node == number);
            let entries = own().map(|provider| ProviderEntry::new(provider.config.clone())).collect();
            let mut entry = NodeEntry::new(id.clone(), token.id().clone(), token.hash(), entries);
            if managed.is_some() {
                entry = entry.with_identities(vec![identity(WorkloadRole::Node, id.as_str())]);
            }
            catalog = catalog.node(entry);
            let (connector, listener) = memory_listener(mode);
            let proven = managed.as_ref().map(|_| identity(WorkloadRole::Node, id.as_str()));
            let wires = Arc::new(Wires { proven, ..Wires::default() });
            listeners.push((listener, Arc::clone(&wires)));
            let providers =
                own().map(|provider| (provider.config.adapter.to_string(), Arc::clone(&provider.provider))).collect();
            let token = Redacted::new(token.reveal());
            nodes.push(PairNode { id, token, providers, connector: Arc::new(connector), wires, running: None });
        }
        if let Some(managed) = &managed {
            catalog = catalog.credentials(managed.credentials.clone());
        }
        let catalog = catalog.build().unwrap();
        let mut edge = Edge::builder(catalog.clone());
        if let Some(managed) = &managed {
            edge = edge.observer(Arc::clone(&managed.edge));
        }
        let edge = edge.build();
        let mut tasks = JoinSet::new();
        tasks.spawn(edge.drive());
        for (listener, wires) in listeners {
            tasks.spawn(accept(edge.clone(), listener, wires));
        }
        let service = OpenAiService::new(Arc::new(edge.clone()), openai);
        Self { edge, service, nodes, managed, catalog, _tasks: tasks }
    }

    /// Starts a Node; its first wait between dials is a virtual second at most.
    pub fn start_node(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        let policy = ReconnectPolicy::new(Some(0), Some(Duration::from_secs(1))).unwrap();
        let mut connector: Arc<dyn Connector> = Arc::<MemoryConnector>::clone(&node.connector);
        if let Some(managed) = &self.managed {
            connector = Arc::new(ProvenConnector { connector, number, tap: Arc::clone(&managed.tap) });
        }
        let mut builder = Node::builder(node.token.clone(), connector).reconnect(policy);
        if let Some(managed) = &self.managed {
            builder = builder.lease_issuers(LeaseIssuers::OfEdge).observer(Arc::clone(&managed.node));
        }
        for (name, provider) in &node.providers {
            builder = builder.provider(name.clone(), Arc::clone(provider));
        }
        let shutdown = CancellationToken::new();
        let built = builder.build().unwrap();
        let edge_check = built.edge_check();
        node.running =
            Some(Running { shutdown: shutdown.clone(), edge_check, task: tokio::spawn(built.serve(shutdown)) });
    }

    /// Waits until the Edge shows a Node as connected.
    pub async fn node_ready(&self, number: usize) {
        self.node_is(number, true).await;
    }

    /// Waits until the Edge shows a Node as gone.
    pub async fn node_gone(&self, number: usize) {
        self.node_is(number, false).await;
    }

    async fn node_is(&self, number: usize, connected: bool) {
        let mut events = self.edge.subscribe_nodes();
        let reached = async {
            while self.is_connected(number) != connected {
                let _event: Option<Notice<EdgeNodeEvent>> = events.next().await;
            }
        };
        let what = if connected { "ready" } else { "gone" };
        tokio::time::timeout(PATIENCE, reached).await.unwrap_or_else(|_| panic!("node {number} is not {what}"));
    }

    /// True if the Edge shows a Node as connected.
    #[must_use]
    pub fn is_connected(&self, number: usize) -> bool {
        let id = &self.nodes[number].id;
        self.snapshot().nodes.iter().any(|node| node.node == *id && node.connected)
    }

    /// Ends a Node as a crash would: its connection and every provider call are gone at once.
    pub async fn kill_node(&mut self, number: usize) {
        let running = self.nodes[number].running.take().expect("the Node runs");
        running.task.abort();
        let _aborted = running.task.await;
    }

    /// Asks a Node to finish what runs and end.
    pub async fn stop_node(&mut self, number: usize) -> Result<ServeEnd, NodeError> {
        let running = self.nodes[number].running.take().expect("the Node runs");
        running.shutdown.cancel();
        tokio::time::timeout(PATIENCE, running.task).await.expect("the Node ends").expect("without a panic")
    }

    /// What a running Node asks of its Edge.
    #[must_use]
    pub fn edge_check(&self, number: usize) -> EdgeCheck {
        self.nodes[number].running.as_ref().expect("the Node runs").edge_check.clone()
    }

    /// Ends a Node's connection; the Node lives and dials again.
    pub fn cut(&self, number: usize) {
        self.nodes[number].wires.cut();
    }

    /// Connections that a Node made so far.
    #[must_use]
    pub fn connections(&self, number: usize) -> u64 {
        self.nodes[number].wires.count.load(Ordering::Relaxed)
    }

    /// Puts the same config in force with other credentials.
    pub fn apply(&mut self, change: impl FnOnce(&mut Credentials)) {
        self.catalog = changed(&self.catalog, |_, credentials| change(credentials));
        self.edge.apply_config(self.catalog.clone()).unwrap();
    }

    /// The config in force.
    #[must_use]
    pub const fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The engine.
    #[must_use]
    pub const fn edge(&self) -> &Edge {
        &self.edge
    }

    /// What the Edge has and uses.
    #[must_use]
    pub fn snapshot(&self) -> EdgeSnapshot {
        self.edge.snapshot()
    }

    /// One provider of the snapshot.
    #[must_use]
    pub fn provider(&self, id: &str) -> ProviderSnapshot {
        self.snapshot().provider(&ProviderId::new(id).unwrap()).expect("a configured provider").clone()
    }

    /// Requests that wait, over all models.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.snapshot().models.iter().map(|model| model.waiting).sum()
    }

    /// Waits, by letting everything else run, until this holds.
    ///
    /// # Panics
    /// When it still does not after a long time.
    pub async fn until(&self, what: &str, mut holds: impl FnMut(&EdgeSnapshot) -> bool) {
        for _ in 0..100_000_u32 {
            if holds(&self.snapshot()) {
                return;
            }
            // On a paused clock this is no time at all, and it lets every other task go first.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("{what}: {:?}", self.snapshot());
    }

    /// Waits until nobody holds a place and nobody waits.
    pub async fn at_rest(&self) {
        self.until("all counters are 0", EdgeSnapshot::is_at_rest).await;
    }

    /// Sends a request; answers when the surface has a head. Dropping the future or the exchange is leaving.
    pub fn begin(&self, request: &Request) -> impl Future<Output = Exchange> + Send + use<> {
        let (service, request) = (self.service.clone(), to_http(request));
        async move {
            let (head, body) = within_a_day(service.answer(request)).await.into_parts();
            let name = |name: &http::HeaderName| name.as_str().to_owned();
            let text = |value: &http::HeaderValue| value.to_str().unwrap().to_owned();
            let headers = head.headers.iter().map(|(key, value)| (name(key), text(value))).collect();
            Exchange { head: Head { status: head.status.as_u16(), headers }, body }
        }
    }

    /// Sends a request and reads all of its answer.
    pub fn ask(&self, request: &Request) -> impl Future<Output = Answer> + Send + use<> {
        let begun = self.begin(request);
        async move { begun.await.rest().await }
    }
}

/// No test waits longer for one step; on a paused clock a day is over as soon as nothing else is left to do.
async fn within_a_day<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(86_400), future).await.expect("it does not happen within a day")
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.nodes.iter().filter_map(|node| node.running.as_ref()).for_each(|running| running.task.abort());
    }
}

fn to_http(request: &Request) -> http::Request<Full<Bytes>> {
    let (method, path, headers, body) = request.parts();
    let mut builder = http::Request::builder().method(method).uri(path);
    for (name, value) in headers {
        builder = builder.header(name, value);
    }
    builder.body(Full::new(body.clone())).unwrap()
}

/// A request that has its head.
#[derive(Debug)]
pub struct Exchange {
    /// The head.
    pub head: Head,
    body: OpenAiBody,
}

impl Exchange {
    /// The next piece of the body; `Err` once it has ended.
    pub async fn piece(&mut self) -> Result<Piece, End> {
        loop {
            match within_a_day(self.body.frame()).await {
                Some(Ok(frame)) => {
                    let Ok(bytes) = frame.into_data() else { continue };
                    return Ok(Piece { bytes, at: tokio::time::Instant::now().into_std() });
                }
                Some(Err(_)) => return Err(End::Broken),
                None => return Err(End::Whole),
            }
        }
    }

    /// Everything up to the end.
    pub async fn rest(mut self) -> Answer {
        let mut pieces = Vec::new();
        let end = loop {
            match self.piece().await {
                Ok(piece) => pieces.push(piece),
                Err(end) => break end,
            }
        };
        Answer { head: self.head.clone(), pieces, end }
    }
}

async fn accept(edge: Edge, mut listener: MemoryListener, wires: Arc<Wires>) {
    let mut links = JoinSet::new();
    loop {
        tokio::select! {
            link = listener.accept() => match link {
                Some(link) => { links.spawn(edge.attach(wires.through(link))); }
                None => std::future::pending().await,
            },
            Some(_) = links.join_next() => {}
        }
    }
}

/// The connections of one Node, to cut them.
#[derive(Debug, Default)]
struct Wires {
    current: Mutex<CancellationToken>,
    count: AtomicU64,
    /// Which Node is proved to be at the other end.
    proven: Option<WorkloadIdentity>,
}

impl Wires {
    fn through(&self, link: EdgeLink) -> EdgeLink {
        let token = CancellationToken::new();
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = token.clone();
        self.count.fetch_add(1, Ordering::Relaxed);
        Box::new(CutLink { link, token, proven: self.proven.clone() })
    }

    fn cut(&self) {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).cancel();
    }
}

/// A link that ends without a word when its token is cancelled.
#[derive(Debug)]
struct CutLink {
    link: EdgeLink,
    token: CancellationToken,
    proven: Option<WorkloadIdentity>,
}

impl Link for CutLink {
    type In = ToEdge;
    type Out = ToNode;

    fn peer(&self) -> PeerIdentity {
        proved(self.link.peer(), self.proven.clone())
    }

    fn start(self: Box<Self>, outgoing: Outgoing<ToNode>) -> Incoming<ToEdge> {
        let Self { link, token, proven: _ } = *self;
        let incoming = Some(link.start(outgoing));
        // The inner stream is dropped in the moment of the cut: that is what closes the link both ways.
        Box::pin(futures_util::stream::unfold(incoming, move |incoming| {
            let token = token.clone();
            async move {
                let mut incoming = incoming?;
                let next: Option<Result<Sequenced<ToEdge>, LinkError>> = tokio::select! {
                    biased;
                    () = token.cancelled() => None,
                    next = incoming.next() => next,
                };
                next.map(|item| (item, Some(incoming)))
            }
        }))
    }
}

/// Who somebody is in this process.
fn identity(role: WorkloadRole, id: &str) -> WorkloadIdentity {
    WorkloadIdentity::new(TrustDomain::default(), role, id).unwrap()
}

/// As if a certificate had proved it.
fn proved(peer: PeerIdentity, who: Option<WorkloadIdentity>) -> PeerIdentity {
    PeerIdentity::new(peer.address, who.map(|who| VerifiedIdentity::vouched(who, [])))
}

/// Dials an Edge that proves who it is.
#[derive(Debug)]
struct ProvenConnector {
    connector: Arc<dyn Connector>,
    number: usize,
    tap: Arc<dyn Tap>,
}

#[iop_execution::async_trait]
impl Connector for ProvenConnector {
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        let link = self.connector.connect().await?;
        Ok(Box::new(ProvenLink { link, number: self.number, tap: Arc::clone(&self.tap) }))
    }
}

#[derive(Debug)]
struct ProvenLink {
    link: NodeLink,
    number: usize,
    tap: Arc<dyn Tap>,
}

impl Link for ProvenLink {
    type In = ToNode;
    type Out = ToEdge;

    fn peer(&self) -> PeerIdentity {
        proved(self.link.peer(), Some(identity(WorkloadRole::Edge, "edge")))
    }

    fn start(self: Box<Self>, outgoing: Outgoing<ToEdge>) -> Incoming<ToNode> {
        let Self { link, number, tap } = *self;
        let seen = Arc::clone(&tap);
        let outgoing = outgoing.inspect(move |item| seen.to_edge(number, &item.message));
        let incoming = link.start(Box::pin(outgoing));
        Box::pin(incoming.map(move |item| {
            item.map(|mut item| {
                tap.to_node(number, &mut item.message);
                item
            })
        }))
    }
}
