//! Decides how a seed is played: window by window, everybody in a fixed order, then messages, checks, requests and
//! troubles; at the end everything is put right, and must come to rest and serve again.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::Stream;
use iop_edge_core::api::{CancelRun, WireKind};
use iop_edge_core::events::{Notice, RunNotice, Subscription};
use iop_edge_core::token::{Token, TokenKind};
use iop_edge_core::{Edge, EdgeNodeEvent};
use iop_execution::{Entropy, Health, NodeId, ProviderId, Redacted, RunId};
use iop_node_core::{Node, NodeError, ReconnectPolicy};
use iop_wire::CloseCode;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::sim::check;
use crate::sim::client::{self, ClientPlan, Desk, Home};
use crate::sim::history::Who;
use crate::sim::host::Host;
use crate::sim::ills;
use crate::sim::net::{Damage, Dialler, Net};
use crate::sim::openai::HttpPlan;
use crate::sim::plan::{ModelPlan, Plan, ProviderPlan, Trouble};
use crate::sim::provider::{Ending, Form, SimProvider, Work};
use crate::sim::rng::Rng;
use crate::sim::seeds;
use crate::sim::world::{self, Answer, Condition, World};

/// Longest window while nothing happens, in milliseconds.
const LONGEST_WINDOW: u64 = 500;
/// Windows without anything before they grow.
const PATIENCE: u32 = 4;
/// Time in which everything must be at rest after the last trouble, in milliseconds.
const REST: u64 = 400_000;
/// Time in which a provider must be asked and raised once its backend is well again: the longest wait between questions, an
/// older question that is given up first, and some for the way (HLT-6).
const RAISE: u64 = 90_000;
/// What is drawn for illness and OpenAI clients comes from numbers of its own, so that all else stays as it was.
const MORE: u64 = 0x5eed_0000_1111;
/// Time that closed connections may linger.
const LINGER: u64 = 5_000;
/// Numbers of the clients that ask at the end.
const FIRST_PROBE: u32 = 10_000;

/// One Edge process.
#[derive(Debug)]
pub(super) struct EdgeProcess {
    pub(super) host: Host,
    pub(super) edge: Edge,
    desk: Desk,
    nodes: Subscription<EdgeNodeEvent>,
    runs: Subscription<Arc<RunNotice>>,
    /// Runs on the bus: the last number, and whether the terminal was seen.
    heard: BTreeMap<[u8; 16], (u64, bool)>,
}

/// One process of a Node.
#[derive(Debug)]
pub(super) struct NodeProcess {
    pub(super) host: Host,
    pub(super) node: usize,
    pub(super) process: u64,
    shutdown: CancellationToken,
}

impl NodeProcess {
    /// It was asked to end.
    pub(super) fn is_ending(&self) -> bool {
        self.shutdown.is_cancelled()
    }
}

/// How a seed ended.
#[derive(Debug)]
pub struct Played {
    /// Hash of its history.
    pub hash: u64,
    /// Lines of its history.
    pub lines: u64,
    /// How often each thing happened.
    pub counts: BTreeMap<(&'static str, &'static str), u64>,
    /// The rule that was broken, with the end of the history.
    pub failure: Option<String>,
}

/// Plays one seed.
#[must_use]
pub fn play(seed: u64, print: bool) -> Played {
    let mut stage = Stage::new(seed, print);
    let failure = stage.run().err();
    let facts = stage.world.facts();
    let failure = failure.map(|rule| format!("{rule}\n{}", facts.history.tail()));
    let history = &facts.history;
    Played { hash: history.hash(), lines: history.lines(), counts: history.counts().clone(), failure }
}

/// Everything of one seed.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) plan: Plan,
    rng: Rng,
    tokens: Vec<Token>,
    pub(super) world: Arc<World>,
    pub(super) net: Arc<Net>,
    pub(super) edge: Option<EdgeProcess>,
    pub(super) nodes: Vec<NodeProcess>,
    last_process: u64,
    pub(super) now: u64,
    idle: u32,
    next_client: usize,
    next_trouble: usize,
}

impl Stage {
    fn new(seed: u64, print: bool) -> Self {
        let mut rng = Rng::new(seed);
        let mut plan = Plan::draw(&mut rng);
        ills::extend(&mut plan, &mut Rng::new(seed ^ MORE));
        let tokens = plan.nodes.iter().map(|_| Token::generate(TokenKind::Node).unwrap()).collect();
        let net = Net::new(plan.nodes.iter().map(|node| node.path).collect());
        let mut stage = Self {
            plan,
            rng,
            tokens,
            world: Arc::new(World::new(print)),
            net: Arc::new(net),
            edge: None,
            nodes: Vec::new(),
            last_process: 0,
            now: 0,
            idle: 0,
            next_client: 0,
            next_trouble: 0,
        };
        for (index, provider) in stage.plan.providers.iter().enumerate() {
            let condition = Condition { ill: false, answer: provider.answer };
            stage.world.facts().conditions.insert(index, condition);
        }
        stage.start_edge();
        for node in 0..stage.plan.nodes.len() {
            stage.start_node(node);
        }
        stage
    }

    fn run(&mut self) -> Result<(), String> {
        while self.now < self.plan.horizon {
            self.step()?;
        }
        self.put_right();
        self.rest("after the last trouble")?;
        self.probe()?;
        let until = self.now + LINGER;
        while self.now < until {
            self.step()?;
        }
        check::at_rest(self)
    }

    fn start_edge(&mut self) {
        self.note_config();
        let host = Host::new(self.plan.drift);
        let mut accept = self.net.listen();
        let builder = Edge::builder(self.plan.catalog(&self.tokens));
        let edge = builder.entropy(Entropy::seeded(self.rng.number())).receive_pool(self.plan.pool).build();
        host.spawn(edge.drive());
        let listening = edge.clone();
        host.spawn(async move {
            let mut links = JoinSet::new();
            loop {
                tokio::select! {
                    biased;
                    link = accept.recv() => match link {
                        Some(link) => { links.spawn(listening.attach(link)); }
                        None => return,
                    },
                    Some(_) = links.join_next() => {}
                }
            }
        });
        let models_of = |at: usize| {
            let takes_long = self.plan.providers.get(at).is_some_and(|provider| provider.long_capacity > 0);
            let with = |model: &&ModelPlan| {
                let is_candidate = model.candidates.iter().any(|(provider, _)| *provider == at);
                is_candidate && (takes_long || model.threshold.is_none())
            };
            self.plan.models.iter().filter(with).map(|model| model.name.clone()).collect()
        };
        let home = |(at, provider): (usize, &ProviderPlan)| Home {
            provider: provider.id.clone(),
            node: provider.node,
            tunnels: provider.tunnels && !provider.run_only,
            models: models_of(at),
        };
        let homes = self.plan.providers.iter().enumerate().map(home).collect();
        let start = host.inside(Instant::now);
        let desk = Desk { edge: edge.clone(), world: Arc::clone(&self.world), start, homes: Arc::new(homes) };
        let (nodes, runs) = (edge.subscribe_nodes(), edge.subscribe_runs());
        self.world.note(Who::Edge, "starts", "", [0, 0]);
        self.edge = Some(EdgeProcess { host, edge, desk, nodes, runs, heard: BTreeMap::new() });
    }

    fn start_node(&mut self, node: usize) {
        self.last_process += 1;
        let (process, plan) = (self.last_process, &self.plan.nodes[node]);
        let host = Host::new(plan.drift);
        let from = (node, process);
        let dialler = Dialler { net: Arc::clone(&self.net), world: Arc::clone(&self.world), from };
        let interval = Duration::from_millis(plan.interval);
        let policy = ReconnectPolicy::new(Some(0), Some(interval)).unwrap();
        let token = Redacted::new(self.tokens[node].reveal());
        let mut builder =
            Node::builder(token, Arc::new(dialler)).entropy(Entropy::seeded(self.rng.number())).reconnect(policy);
        for (index, provider) in self.plan.providers.iter().enumerate().filter(|(_, own)| own.node == node) {
            let sim = SimProvider {
                world: Arc::clone(&self.world),
                process: from,
                index,
                capacity: provider.capacity,
                tunnels: provider.tunnels,
            };
            builder = builder.provider(provider.id.clone(), Arc::new(sim));
        }
        let shutdown = CancellationToken::new();
        let serving = builder.build().unwrap().serve(shutdown.clone());
        let world = Arc::clone(&self.world);
        let asked = shutdown.clone();
        host.spawn(async move {
            let end = serving.await;
            let mut facts = world.facts();
            facts.note(Who::Node(node, process), "serving ended", if end.is_ok() { "well" } else { "badly" }, [0, 0]);
            let removed = facts.reconfigured && end == Err(NodeError::Closed(CloseCode::RemovedFromConfig));
            if !asked.is_cancelled() && !removed {
                facts.broken.push(format!("NOD-1: a process of n{node} gave up: {end:?}"));
            }
            facts.ended.insert(process, asked.is_cancelled());
        });
        self.world.note(Who::Node(node, process), "starts", "", [0, 0]);
        self.nodes.push(NodeProcess { host, node, process, shutdown });
    }

    /// One window.
    fn step(&mut self) -> Result<(), String> {
        let window = self.window();
        let before = self.world.facts().history.lines();
        if let Some(edge) = &mut self.edge {
            edge.host.run(window);
        }
        for node in &mut self.nodes {
            node.host.run(window);
        }
        self.now += window;
        self.world.facts().now = self.now;
        self.hear();
        let conns = self.net.conns();
        let mut moved = 0;
        let edge_runs = self.edge.as_ref().is_some_and(|edge| !edge.host.is_paused());
        for conn in &conns {
            let path = self.net.path(conn.node);
            let dialler = self.nodes.iter().find(|node| node.process == conn.process);
            let runs = (edge_runs, dialler.is_some_and(|node| !node.host.is_paused()));
            moved += conn.pull(&self.world, &path, self.plan.encode, runs, &mut self.rng);
        }
        check::after_window(self);
        for conn in &conns {
            moved += conn.deliver(self.now, &self.net.path(conn.node));
        }
        self.net.sweep();
        let ended: Vec<u64> = self.world.facts().ended.keys().copied().collect();
        self.nodes.retain(|node| !ended.contains(&node.process));
        self.troubles();
        self.clients();
        self.idle = if moved > 0 || self.world.facts().history.lines() > before { 0 } else { self.idle + 1 };
        if let Some(panic) = seeds::panicked() {
            return Err(format!("a panic: {panic}"));
        }
        let broken = std::mem::take(&mut self.world.facts().broken);
        broken.into_iter().next().map_or(Ok(()), Err)
    }

    /// How long the next window is: short while something happens, and never past what is known to come.
    fn window(&self) -> u64 {
        let grown = self.plan.window << (self.idle / PATIENCE).min(8);
        let trouble = self.plan.troubles.get(self.next_trouble).map(|(at, _)| *at);
        let client = self.plan.clients.get(self.next_client).map(|(at, _)| *at);
        let arrival = self.net.conns().iter().filter_map(|conn| conn.next_due(&self.net.path(conn.node))).min();
        let next = trouble.into_iter().chain(client).chain(arrival).min().unwrap_or(u64::MAX);
        let until_next = next.saturating_sub(self.now).max(self.plan.window);
        grown.min(LONGEST_WINDOW).max(self.plan.window).min(until_next)
    }

    /// What the Edge said about Nodes and runs.
    fn hear(&mut self) {
        let Some(edge) = &mut self.edge else { return };
        let mut facts = self.world.facts();
        let cx = &mut Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(notice)) = Pin::new(&mut edge.nodes).poll_next(cx) {
            let Notice::Event(event) = notice else {
                facts.broken.push("the simulation reads too slowly".to_owned());
                continue;
            };
            match event {
                EdgeNodeEvent::Connected { node, .. } => {
                    let node = index(node.as_str());
                    facts.note(Who::Edge, "connected", "", [node as u64, 0]);
                    let known = facts.nodes.entry(node).or_default();
                    (known.ready, known.suspect) = (Some(self.now), None);
                }
                EdgeNodeEvent::Suspected { node, .. } => {
                    let node = index(node.as_str());
                    facts.note(Who::Edge, "suspected", "", [node as u64, 0]);
                    facts.nodes.entry(node).or_default().suspect = Some(self.now);
                }
                EdgeNodeEvent::Trusted { node, .. } => {
                    let node = index(node.as_str());
                    facts.note(Who::Edge, "trusted", "", [node as u64, 0]);
                    facts.nodes.entry(node).or_default().suspect = None;
                    facts.suspected.insert(node, self.now);
                }
                EdgeNodeEvent::InService { node, on } => {
                    let node = index(node.as_str());
                    facts.note(Who::Edge, "in service", if on { "on" } else { "off" }, [node as u64, 0]);
                    facts.nodes.entry(node).or_default().held = !on;
                }
                EdgeNodeEvent::ConfigApplied { node, revision } => {
                    facts.note(Who::Edge, "config applied", "", [index(node.as_str()) as u64, revision]);
                }
                EdgeNodeEvent::ConfigRefused { node, revision, .. } => {
                    facts.note(Who::Edge, "config refused", "", [index(node.as_str()) as u64, revision]);
                }
                EdgeNodeEvent::Disconnected { node, code, .. } => {
                    let node = index(node.as_str());
                    facts.note(Who::Edge, "disconnected", code.as_str(), [node as u64, 0]);
                    facts.fenced.entry(node).or_default().push(self.now);
                    let known = facts.nodes.entry(node).or_default();
                    let suspect = known.suspect.is_some();
                    (known.ready, known.suspect) = (None, None);
                    if suspect {
                        facts.suspected.insert(node, self.now);
                    }
                    for conn in self.net.conns().iter().filter(|conn| conn.node == node) {
                        conn.fence();
                    }
                }
                EdgeNodeEvent::Draining { node, .. } => {
                    let node = index(node.as_str());
                    facts.note(Who::Edge, "draining", "", [node as u64, 0]);
                    // Who has a place there and is not sent yet learns it as if the connection had ended (FEN-8).
                    facts.fenced.entry(node).or_default().push(self.now);
                    facts.nodes.entry(node).or_default().ready = None;
                }
                EdgeNodeEvent::NotReady { node, code } => {
                    facts.note(Who::Edge, "not ready", code.as_str(), [index(node.as_str()) as u64, 0]);
                }
                EdgeNodeEvent::Refused { reason, .. } => facts.note(Who::Edge, "refused", reason.as_str(), [0, 0]),
                _ => facts.note(Who::Edge, "something else", "", [0, 0]),
            }
        }
        while let Poll::Ready(Some(notice)) = Pin::new(&mut edge.runs).poll_next(cx) {
            let Notice::Event(notice) = notice else {
                edge.heard.clear();
                continue;
            };
            let Some((last, over)) = heard(&mut edge.heard, notice.run_id, notice.event.seq) else { continue };
            if *over {
                facts.broken.push(format!("I2: an event of run {} after its terminal", notice.run_id));
            }
            if notice.event.seq != *last + 1 {
                facts.broken.push(format!("I3: events of run {} have a gap", notice.run_id));
            }
            (*last, *over) = (notice.event.seq, notice.event.kind.is_terminal());
        }
    }

    fn clients(&mut self) {
        while let Some((at, client)) = self.plan.clients.get(self.next_client)
            && *at <= self.now
        {
            let mut client = client.clone();
            self.next_client += 1;
            if let Some(model) = self.plan.models.iter().find(|model| model.name == client.model) {
                client.queue_timeout = model.queue_timeout;
            }
            self.ask(client);
        }
    }

    fn ask(&self, client: ClientPlan) {
        match &self.edge {
            Some(edge) => edge.host.spawn(client::live(client, edge.desk.clone())),
            None => self.world.note(Who::Client(client.id), "finds no edge", "", [0, 0]),
        }
    }

    fn troubles(&mut self) {
        while let Some((at, trouble)) = self.plan.troubles.get(self.next_trouble)
            && *at <= self.now
        {
            let trouble = *trouble;
            self.next_trouble += 1;
            self.trouble(trouble);
        }
    }

    fn trouble(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Crash { node, mute } => self.crash_node(node, mute),
            Trouble::Restart { node } => {
                if !self.nodes.iter().any(|process| process.node == node) {
                    self.answer_for_the_dead(Some(node));
                    self.start_node(node);
                }
            }
            Trouble::Pause { node } => {
                self.world.note(Who::World, "pause", "", [node as u64, 0]);
                self.nodes.iter_mut().filter(|process| process.node == node).for_each(|process| process.host.pause());
            }
            Trouble::Resume { node } => {
                self.world.note(Who::World, "resume", "", [node as u64, 0]);
                self.nodes.iter_mut().filter(|process| process.node == node).for_each(|process| process.host.resume());
            }
            Trouble::Block { node, up, down } => {
                let way = match (up, down) {
                    (true, true) => "both ways",
                    (true, false) => "to the edge",
                    (false, _) => "to the node",
                };
                self.world.note(Who::World, "block", way, [node as u64, 0]);
                self.net.change(node, |path| (path.up_blocked, path.down_blocked) = (up, down));
            }
            Trouble::Heal { node, reset } => self.heal(node, reset),
            Trouble::Cut { node } => {
                self.world.note(Who::World, "cut", "", [node as u64, 0]);
                self.net.conns().iter().filter(|conn| conn.node == node).for_each(|conn| conn.cut());
            }
            Trouble::Stick { node, up, down } => {
                self.world.note(Who::World, "stick", "", [node as u64, 0]);
                self.net.conns().iter().filter(|conn| conn.node == node).for_each(|conn| conn.stick(up, down));
            }
            Trouble::Shutdown { node } => {
                self.world.facts().drained = true;
                self.world.note(Who::World, "shutdown", "", [node as u64, 0]);
                let of_node = self.nodes.iter().filter(|process| process.node == node);
                of_node.for_each(|process| process.shutdown.cancel());
            }
            Trouble::CrashEdge { mute } => self.crash_edge(mute),
            Trouble::RestartEdge => {
                if self.edge.is_none() {
                    self.answer_for_the_dead(None);
                    self.start_edge();
                }
            }
            Trouble::Duplicate { node } => self.start_node(node),
            Trouble::Ill { provider, answer } => self.condition(provider, Condition { ill: true, answer }),
            Trouble::Says { provider, answer } => {
                let ill = self.world.facts().condition(provider).ill;
                self.condition(provider, Condition { ill, answer });
            }
            Trouble::Well { provider } => {
                let answer = self.plan.providers[provider].answer;
                self.condition(provider, Condition { ill: false, answer });
            }
            Trouble::StopEdge { .. }
            | Trouble::Hold { .. }
            | Trouble::Release { .. }
            | Trouble::Cancel
            | Trouble::Configure => self.operate(trouble),
            Trouble::PauseEdge => {
                self.world.note(Who::World, "pause edge", "", [0, 0]);
                self.edge.iter_mut().for_each(|edge| edge.host.pause());
            }
            Trouble::ResumeEdge => {
                self.world.note(Who::World, "resume edge", "", [0, 0]);
                self.edge.iter_mut().for_each(|edge| edge.host.resume());
            }
        }
    }

    /// A provider's backend gets ill, well, or another opinion of itself.
    fn condition(&self, provider: usize, condition: Condition) {
        let mut facts = self.world.facts();
        facts.note(Who::World, if condition.ill { "ill" } else { "well" }, "", [provider as u64, 0]);
        facts.conditions.insert(provider, condition);
    }

    /// Every change of the engine that an operator can make.
    fn operate(&mut self, trouble: Trouble) {
        if self.edge.as_ref().is_some_and(|edge| edge.host.is_paused()) {
            return;
        }
        if trouble_is_config(trouble) {
            self.plan.reconfigure(&mut self.rng);
            self.world.facts().reconfigured = true;
        }
        let pick = self.rng.number();
        let Some(edge) = &self.edge else { return };
        let id = |node: usize| NodeId::new(format!("n{node}")).unwrap();
        match trouble {
            Trouble::StopEdge { grace } => {
                self.world.note(Who::World, "stop edge", "", [grace, 0]);
                self.world.facts().edge_stopping = true;
                let edge_to_stop = edge.edge.clone();
                edge.host.spawn(async move { edge_to_stop.shutdown(Duration::from_millis(grace)).await });
            }
            Trouble::Hold { node } => {
                self.world.facts().nodes.entry(node).or_default().held_at = self.now;
                edge.host.inside(|| edge.edge.drain(&id(node))).unwrap();
            }
            Trouble::Release { node } => {
                self.world.facts().nodes.entry(node).or_default().held_at = self.now;
                edge.host.inside(|| edge.edge.resume(&id(node))).unwrap();
            }
            Trouble::Cancel => {
                let runs = edge.host.inside(|| edge.edge.runs(usize::MAX));
                if let Some(run) = runs.get(usize::try_from(pick).unwrap_or(0) % runs.len().max(1)) {
                    self.world.facts().cancelled = true;
                    let reached = edge.host.inside(|| edge.edge.cancel(run.run_id));
                    let how = if reached == CancelRun::Cancelled { "reached" } else { "too late" };
                    self.world.note(Who::World, "cancel", how, [0, 0]);
                }
            }
            _ => self.operate_config(),
        }
    }

    fn operate_config(&self) {
        let Some(edge) = &self.edge else { return };
        {
            let mut facts = self.world.facts();
            (facts.reconfigured, facts.configured_at) = (true, Some(self.now));
        }
        let catalog = self.plan.catalog(&self.tokens);
        let applied = edge.host.inside(|| edge.edge.apply_config(catalog));
        self.note_config();
        let how = if applied.is_ok() { "applied" } else { "refused" };
        self.world.note(Who::World, "config", how, [self.plan.revision, 0]);
    }

    /// What is in force at the Edge from now on.
    fn note_config(&self) {
        let timeouts = self.plan.models.iter().map(|model| (model.name.clone(), model.queue_timeout)).collect();
        self.world.facts().queue_timeouts = timeouts;
    }

    fn crash_node(&mut self, node: usize, mute: bool) {
        self.world.note(Who::World, "crash", if mute { "mute" } else { "" }, [node as u64, 0]);
        let (gone, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.nodes).into_iter().partition(|process| process.node == node);
        self.nodes = left;
        if mute {
            self.net.conns().iter().filter(|conn| conn.node == node).for_each(|conn| conn.mute(true));
        }
        self.world.facts().silent = true;
        drop(gone);
        self.world.facts().silent = false;
    }

    fn crash_edge(&mut self, mute: bool) {
        self.world.note(Who::World, "crash edge", if mute { "mute" } else { "" }, [0, 0]);
        if mute {
            self.net.conns().iter().for_each(|conn| conn.mute(false));
        }
        self.net.stop_listening();
        self.world.facts().silent = true;
        self.edge = None;
        let mut facts = self.world.facts();
        facts.silent = false;
        for client in facts.clients.values_mut().filter(|client| !matches!(client.stage, world::Stage::Done(_))) {
            client.stage = world::Stage::Done("edge gone");
        }
        facts.disconnects.clear();
        facts.nodes.clear();
        facts.lowered.clear();
        for conn in self.net.conns() {
            conn.fence();
        }
    }

    fn answer_for_the_dead(&self, node: Option<usize>) {
        let conns = self.net.conns();
        conns.iter().filter(|conn| node.is_none_or(|node| conn.node == node)).for_each(|conn| {
            conn.answer_for_the_dead();
        });
    }

    fn heal(&self, node: usize, reset: bool) {
        self.world.note(Who::World, "heal", if reset { "reset" } else { "" }, [node as u64, 0]);
        self.net.change(node, |path| (path.up_blocked, path.down_blocked) = (false, false));
        if reset {
            self.net.conns().iter().filter(|conn| conn.node == node).for_each(|conn| conn.cut());
        }
    }

    /// Of several processes of a Node the first one stays.
    fn keep_one(&mut self, node: usize) {
        let mut first = true;
        let stays = |process: &NodeProcess| process.node != node || std::mem::take(&mut first);
        let (stay, go): (Vec<_>, Vec<_>) = std::mem::take(&mut self.nodes).into_iter().partition(stays);
        self.nodes = stay;
        self.world.facts().silent = true;
        drop(go);
        self.world.facts().silent = false;
    }

    fn put_right(&mut self) {
        self.world.note(Who::World, "puts right", "", [0, 0]);
        self.next_trouble = self.plan.troubles.len();
        for provider in 0..self.plan.providers.len() {
            self.condition(provider, Condition { ill: false, answer: Answer::Is(Health::Available, 0) });
        }
        if self.edge.is_none() {
            self.trouble(Trouble::RestartEdge);
        }
        self.trouble(Trouble::ResumeEdge);
        if self.world.facts().edge_stopping {
            self.crash_edge(false);
            self.start_edge();
        }
        if self.world.facts().reconfigured {
            self.plan.enable_all();
            self.operate_config();
        }
        // What was damaged would show whenever the next message comes.
        self.net.conns().iter().filter(|conn| conn.is_damaged()).for_each(|conn| conn.cut());
        for node in 0..self.plan.nodes.len() {
            self.operate(Trouble::Release { node });
            self.keep_one(node);
            self.net.change(node, |path| path.damage = Damage::default());
            self.heal(node, false);
            self.trouble(Trouble::Resume { node });
            self.trouble(Trouble::Restart { node });
        }
    }

    /// Waits until nothing is left to do.
    fn rest(&mut self, when: &str) -> Result<(), String> {
        let limit = self.now + REST;
        loop {
            // A Node that was asked to end does so in its own time.
            for node in 0..self.plan.nodes.len() {
                self.trouble(Trouble::Restart { node });
            }
            self.step()?;
            let Err(what) = check::is_at_rest(self) else { return Ok(()) };
            let lowered = self.now > limit - REST + RAISE && self.is_any_lowered();
            if self.now > limit || lowered {
                return Err(format!("not at rest {when}: {what}"));
            }
        }
    }

    fn is_any_lowered(&self) -> bool {
        self.edge.as_ref().is_some_and(|edge| {
            let snapshot = edge.host.inside(|| edge.edge.snapshot());
            snapshot.nodes.iter().flat_map(|node| &node.providers).any(check::is_lowered)
        })
    }

    /// Every place of every model's providers serves again (FEN-5).
    fn probe(&mut self) -> Result<(), String> {
        let mut id = FIRST_PROBE;
        for model in self.plan.models.clone() {
            let Some(edge) = &self.edge else { return Err("no edge".to_owned()) };
            let snapshot = edge.host.inside(|| edge.edge.snapshot());
            let own = |(at, _): &(usize, u32)| ProviderId::new(&self.plan.providers[*at].id).unwrap();
            let shown = model.candidates.iter().filter_map(|candidate| snapshot.provider(&own(candidate)));
            let places: u32 = shown.map(|provider| provider.effective.capacity).sum();
            let first = id;
            for _ in 0..places {
                self.ask(probe(id, &model.name));
                id += 1;
            }
            self.rest("after the last requests")?;
            let facts = self.world.facts();
            let whole =
                |id: &u32| facts.clients.get(id).map(|client| client.stage) == Some(world::Stage::Done("whole"));
            let missing = (first..id).find(|id| !whole(id)).map(|id| facts.clients.get(&id).copied());
            if let Some(missing) = missing {
                return Err(format!("FEN-5: a place of {} does not serve any more: {missing:?}", model.name));
            }
        }
        Ok(())
    }
}

fn heard(runs: &mut BTreeMap<[u8; 16], (u64, bool)>, run_id: RunId, seq: u64) -> Option<&mut (u64, bool)> {
    // After a gap on the bus nothing is known of the runs before it.
    let entry = runs.entry(*run_id.as_bytes());
    match entry {
        std::collections::btree_map::Entry::Vacant(_) if seq != 1 => None,
        entry => Some(entry.or_default()),
    }
}

fn probe(id: u32, model: &str) -> ClientPlan {
    let http = match id % 3 {
        0 => None,
        kind => Some(HttpPlan { stream: kind == 1, extra: 0, keepalive: 0 }),
    };
    let work = Work {
        client: id,
        pieces: 2,
        size: 20,
        first: 500,
        pace: 10,
        ending: Ending::Whole,
        deaf: 0,
        bad: 0,
        form: http.map_or(Form::Raw, HttpPlan::form),
    };
    ClientPlan {
        id,
        model: model.to_owned(),
        http,
        direct: None,
        wire: None::<WireKind>,
        priority: 0,
        principal: None,
        deadline: None,
        tokens: 0,
        prefix: 0,
        avoid: None,
        leave: None,
        leave_after: None,
        cancel: None,
        pace: 0,
        stall: None,
        work,
        padding: 0,
        queue_timeout: 30_000,
        calm: true,
    }
}

const fn trouble_is_config(trouble: Trouble) -> bool {
    matches!(trouble, Trouble::Configure)
}

/// The number in a Node's id.
pub(super) fn index(id: &str) -> usize {
    id.trim_start_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap()
}
