//! Decides what one seed does: which Nodes, providers and models there are, who asks when for what, and what goes wrong
//! when. Each seed leaves out some kinds of trouble and of requests, so that the others are seen alone (swarm testing).

use std::time::Duration;

use iop_edge_core::api::WireKind;
use iop_edge_core::catalog::{
    Candidate, Catalog, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults, RetryOn, Strategy,
};
use iop_edge_core::token::Token;
use iop_execution::{AdapterKey, Health, ModelName, NodeId, ProviderId, Target};
use iop_node_core::CUSTOM_KIND;
use iop_wire::{ProviderConfig, WireMode};

use crate::sim::client::ClientPlan;
use crate::sim::net::{Damage, Path};
use crate::sim::provider::{Ending, Form, Work};
use crate::sim::rng::Rng;
use crate::sim::world::Answer;

/// When clients come where nothing goes wrong, in milliseconds.
const CALM_START: u64 = 5_000;

/// One provider.
#[derive(Debug, Clone)]
pub struct ProviderPlan {
    /// Its id, adapter key too.
    pub id: String,
    /// On which Node.
    pub node: usize,
    /// Its places.
    pub capacity: u32,
    /// Of which for long requests.
    pub long_capacity: u32,
    /// It takes tunnels.
    pub tunnels: bool,
    /// The Edge uses runs only.
    pub run_only: bool,
    /// How long a cancelled call may go on.
    pub close_grace: u64,
    /// How long it may make no progress; 0 = for longer than a seed lasts.
    pub stall: u64,
    /// The same before its first progress; 0 = no longer.
    pub first_response: u64,
    /// How long a probe may take; 0 = the default.
    pub probe_timeout: u64,
    /// What its backend says of itself.
    pub answer: Answer,
    /// It may be used.
    pub enabled: bool,
}

/// One model.
#[derive(Debug, Clone)]
pub struct ModelPlan {
    /// Its name.
    pub name: String,
    /// Its candidates by provider, with their weights.
    pub candidates: Vec<(usize, u32)>,
    /// Most that wait.
    pub max_waiting: usize,
    /// How long they wait, in milliseconds.
    pub queue_timeout: u64,
    /// From where on a request is long.
    pub threshold: Option<u32>,
    /// How a candidate is chosen.
    pub strategy: Option<Strategy>,
    /// How long a request waits for a provider that is away.
    pub absence: u64,
    /// Which failures an OpenAI request is sent again for.
    pub retry_on: Option<RetryOn>,
}

/// One Node.
#[derive(Debug, Clone)]
pub struct NodePlan {
    /// How its network is.
    pub path: Path,
    /// How its clock runs, in parts of a million.
    pub drift: i64,
    /// Longest wait between dials, in milliseconds.
    pub interval: u64,
    /// It may register.
    pub enabled: bool,
}

/// Something that goes wrong, or right again.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "each says what happens")]
pub enum Trouble {
    /// A Node's process is gone; `mute`: and its machine too, so nobody tells the Edge.
    Crash { node: usize, mute: bool },
    /// It comes back, as a new process.
    Restart { node: usize },
    /// A Node stands still.
    Pause { node: usize },
    /// It goes on.
    Resume { node: usize },
    /// Messages no longer arrive.
    Block { node: usize, up: bool, down: bool },
    /// They arrive again, or the connections turn out to be dead.
    Heal { node: usize, reset: bool },
    /// The transport breaks.
    Cut { node: usize },
    /// Its connections are half-open for good: nothing arrives, nobody is told. New ones are not.
    Stick { node: usize, up: bool, down: bool },
    /// A Node is asked to finish and end.
    Shutdown { node: usize },
    /// The Edge's process is gone.
    CrashEdge { mute: bool },
    /// It comes back, knowing nothing.
    RestartEdge,
    /// The Edge stands still.
    PauseEdge,
    /// It goes on.
    ResumeEdge,
    /// It is asked to end, and has so many milliseconds.
    StopEdge { grace: u64 },
    /// A second process proves itself with the token of a Node.
    Duplicate { node: usize },
    /// A Node is taken out of service.
    Hold { node: usize },
    /// And put back.
    Release { node: usize },
    /// Somebody cancels a request by id.
    Cancel,
    /// The config changes.
    Configure,
    /// A provider's backend stands still, and says so or not.
    Ill { provider: usize, answer: Answer },
    /// It says something else of itself.
    Says { provider: usize, answer: Answer },
    /// It goes on.
    Well { provider: usize },
}

/// One seed, whole.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Nothing goes wrong.
    pub calm: bool,
    /// Time between looks, in milliseconds.
    pub window: u64,
    /// Messages are encoded and decoded.
    pub encode: bool,
    /// Nodes.
    pub nodes: Vec<NodePlan>,
    /// Providers, by Node.
    pub providers: Vec<ProviderPlan>,
    /// Models.
    pub models: Vec<ModelPlan>,
    /// Who asks when.
    pub clients: Vec<(u64, ClientPlan)>,
    /// What happens when.
    pub troubles: Vec<(u64, Trouble)>,
    /// When everything is put right again.
    pub horizon: u64,
    /// How the Edge's clock runs.
    pub drift: i64,
    /// The Edge's receive pool, in bytes.
    pub pool: u64,
    /// Revision of the config.
    pub revision: u64,
    /// When suspects lose their requests.
    pub withdraw: Option<Duration>,
}

/// Which kinds of trouble a seed has.
#[derive(Debug, Clone, Copy)]
struct Swarm {
    calm: bool,
    crash: bool,
    pause: bool,
    block: bool,
    cut: bool,
    stick: bool,
    shutdown: bool,
    edge_crash: bool,
    edge_pause: bool,
    damage: bool,
    reorder: bool,
    stop_edge: bool,
    duplicate: bool,
    hold: bool,
    cancel_any: bool,
    configure: bool,
    avoid: bool,
    direct: bool,
    leave: bool,
    cancel: bool,
    deadline: bool,
    slow: bool,
    bad_ends: bool,
    hang: bool,
    deaf: bool,
    large: bool,
    small_pool: bool,
}

impl Swarm {
    fn draw(rng: &mut Rng, calm: bool) -> Self {
        let mut trouble = |chance| rng.permille(chance) && !calm;
        let this = Self {
            calm,
            crash: trouble(400),
            pause: trouble(400),
            block: trouble(500),
            cut: trouble(400),
            stick: trouble(300),
            shutdown: trouble(250),
            edge_crash: trouble(150),
            edge_pause: trouble(150),
            damage: trouble(250),
            reorder: trouble(400),
            stop_edge: trouble(60),
            duplicate: trouble(200),
            hold: trouble(250),
            cancel_any: trouble(200),
            configure: trouble(300),
            avoid: rng.permille(300),
            direct: rng.permille(200),
            leave: rng.permille(500),
            cancel: rng.permille(500),
            deadline: rng.permille(500),
            slow: rng.permille(300),
            bad_ends: rng.permille(500),
            hang: rng.permille(300),
            deaf: rng.permille(400),
            large: rng.permille(300),
            small_pool: rng.permille(150) && !calm,
        };
        // A small pool is full only where clients are slow and output is large.
        Self { slow: this.slow || this.small_pool, large: this.large || this.small_pool, ..this }
    }
}

impl Plan {
    /// What this seed does.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        let calm = rng.permille(80);
        let swarm = Swarm::draw(rng, calm);
        let horizon = rng.pick(&[4_000, 10_000, 20_000, 40_000, 90_000]);
        let count = rng.pick(&[1, 2, 2, 3, 3, 4]);
        let nodes: Vec<_> = (0..count).map(|_| node(rng, &swarm)).collect();
        let mut providers = Vec::new();
        for node in 0..count {
            for _ in 0..rng.count(1..=2) {
                providers.push(provider(rng, node, providers.len(), &swarm));
            }
        }
        let names = ["m0", "m1", "m2"];
        let models = names.iter().take(rng.count(1..=3)).map(|name| model(rng, name, providers.len())).collect();
        let mut this = Self {
            calm,
            window: rng.pick(&[5, 10, 20, 50]),
            encode: rng.permille(250),
            nodes,
            providers,
            models,
            clients: Vec::new(),
            troubles: Vec::new(),
            horizon,
            drift: drift(rng),
            pool: if swarm.small_pool { rng.pick(&[60_000, 200_000]) } else { 64 << 20 },
            revision: 1,
            withdraw: rng.pick(&[None, Some(3), Some(10)]).map(Duration::from_secs),
        };
        this.draw_clients(rng, &swarm);
        this.draw_troubles(rng, &swarm);
        this
    }

    fn draw_clients(&mut self, rng: &mut Rng, swarm: &Swarm) {
        let count = rng.pick(&[3, 8, 15, 30, 45]);
        let bursts = rng.permille(500);
        let mut at = 100;
        for id in 1..=count {
            // A first connection takes a moment; some clients come before it.
            at = if bursts && !rng.permille(150) { at } else { rng.range(50..=self.horizon * 9 / 10) };
            let client = self.client(rng, swarm, id);
            self.clients.push((at, client));
        }
        if self.calm {
            // Then everybody finds every Node ready.
            self.horizon += CALM_START;
            self.clients.iter_mut().for_each(|(at, _)| *at += CALM_START);
        }
        self.clients.sort_by_key(|(at, client)| (*at, client.id));
    }

    fn client(&self, rng: &mut Rng, swarm: &Swarm, id: u32) -> ClientPlan {
        let model = rng.pick(&self.models);
        let hang = swarm.hang && rng.permille(150);
        let ending = if hang {
            Ending::Hang
        } else if swarm.bad_ends && rng.permille(300) {
            rng.pick(&[Ending::Broken, Ending::Busy, Ending::Refused, Ending::Panic])
        } else {
            Ending::Whole
        };
        let size = if swarm.large { rng.pick(&[40, 600, 5_000, 18_000]) } else { rng.pick(&[20, 100, 600]) };
        let work = Work {
            client: id,
            pieces: rng.pick(&[0, 1, 3, 10, 30]) * if swarm.large { 3 } else { 1 },
            size,
            first: rng.pick(&[0, 5, 100, 1_000, 4_000]),
            pace: rng.pick(&[0, 0, 20, 100, 400]),
            ending,
            deaf: if swarm.deaf { rng.pick(&[0, 10, 800, 3_000, 20_000]) } else { 0 },
            bad: usize::MAX,
            form: Form::Raw,
        };
        let wires = [None, None, Some(WireKind::Run), Some(WireKind::Tunnel)];
        let deadline = if swarm.deadline { rng.maybe(400, |rng| rng.range(1..=12_000)) } else { None };
        let mut leave = if swarm.leave { rng.maybe(300, |rng| rng.range(0..=8_000)) } else { None };
        let cancel = if swarm.cancel { rng.maybe(300, |rng| rng.range(0..=8_000)) } else { None };
        if hang && deadline.is_none() && leave.is_none() && cancel.is_none() {
            leave = Some(rng.range(1_000..=30_000));
        }
        // A cancel by id needs an admitted run: one that hangs and waits for longer than that must still end.
        if hang && deadline.is_none() && leave.is_none() {
            leave = Some(45_000);
        }
        ClientPlan {
            id,
            model: model.name.clone(),
            http: None,
            wire: rng.pick(&wires),
            priority: rng.pick(&[0, 0, 0, 1, -1, 5]),
            principal: rng.maybe(700, |rng| rng.pick(&["a", "b", "c"]).to_owned()),
            deadline,
            tokens: rng.pick(&[0, 100, 5_000]),
            prefix: rng.pick(&[0, 1, 2]),
            direct: if swarm.direct { rng.maybe(300, |rng| self.address(rng)) } else { None },
            avoid: if swarm.avoid {
                rng.maybe(400, |rng| (rng.pick(&self.providers).id, rng.permille(500)))
            } else {
                None
            },
            leave,
            leave_after: if swarm.leave { rng.maybe(150, |rng| rng.range(1..=12)) } else { None },
            cancel,
            pace: if swarm.slow { rng.pick(&[0, 5, 200]) } else { 0 },
            stall: if swarm.slow {
                rng.maybe(300, |rng| (rng.range(1..=8), rng.pick(&[2_000, 20_000, 70_000])))
            } else {
                None
            },
            work,
            padding: rng.pick(&[0, 0, 500, 40_000]),
            queue_timeout: model.queue_timeout,
            calm: self.calm,
        }
    }

    fn address(&self, rng: &mut Rng) -> (Option<usize>, String) {
        let provider = rng.pick(&self.providers);
        (rng.maybe(600, |_| provider.node), provider.id)
    }

    /// Another config, drawn anew in parts.
    pub fn reconfigure(&mut self, rng: &mut Rng) {
        self.revision += 1;
        for number in 0..self.models.len() {
            if rng.permille(500) {
                let (name, retry_on) = (self.models[number].name.clone(), self.models[number].retry_on);
                self.models[number] = ModelPlan { retry_on, ..model(rng, &name, self.providers.len()) };
            }
        }
        for provider in &mut self.providers {
            if rng.permille(250) {
                provider.capacity = u32::try_from(rng.range(1..=4)).unwrap();
                provider.run_only = rng.permille(300);
            }
            provider.enabled = !rng.permille(150);
        }
        for node in &mut self.nodes {
            node.enabled = !rng.permille(100);
        }
    }

    /// The last config: everything may be used.
    pub fn enable_all(&mut self) {
        self.revision += 1;
        self.providers.iter_mut().for_each(|provider| provider.enabled = true);
        self.nodes.iter_mut().for_each(|node| node.enabled = true);
    }

    fn draw_troubles(&mut self, rng: &mut Rng, swarm: &Swarm) {
        let last = self.horizon;
        let mut troubles = Vec::new();
        let episodes = |rng: &mut Rng, wanted: bool, draw: &mut dyn FnMut(&mut Rng, u64, u64)| {
            if wanted {
                for _ in 0..rng.count(1..=4) {
                    let (from, longest) = (rng.range(200..=last), rng.pick(&[20, 300, 3_000, 15_000, 70_000]));
                    let length = rng.range(1..=longest);
                    draw(rng, from, from + length);
                }
            }
        };
        let count = self.nodes.len();
        let some_node = |rng: &mut Rng| rng.count(0..=count - 1);
        episodes(rng, swarm.crash, &mut |rng, from, to| {
            let (node, mute) = (some_node(rng), rng.permille(400));
            troubles.push((from, Trouble::Crash { node, mute }));
            troubles.push((to, Trouble::Restart { node }));
        });
        episodes(rng, swarm.pause, &mut |rng, from, to| {
            let node = some_node(rng);
            troubles.extend([(from, Trouble::Pause { node }), (to, Trouble::Resume { node })]);
        });
        episodes(rng, swarm.block, &mut |rng, from, to| {
            let (node, reset) = (some_node(rng), rng.permille(400));
            let (up, down) = rng.pick(&[(true, true), (true, true), (true, false), (false, true)]);
            troubles.extend([(from, Trouble::Block { node, up, down }), (to, Trouble::Heal { node, reset })]);
        });
        episodes(rng, swarm.cut, &mut |rng, from, _| {
            let node = some_node(rng);
            troubles.push((from, Trouble::Cut { node }));
        });
        episodes(rng, swarm.stick, &mut |rng, from, _| {
            let (node, (up, down)) = (some_node(rng), rng.pick(&[(true, true), (true, false), (false, true)]));
            troubles.push((from, Trouble::Stick { node, up, down }));
        });
        episodes(rng, swarm.shutdown, &mut |rng, from, to| {
            let node = some_node(rng);
            troubles.extend([(from, Trouble::Shutdown { node }), (to, Trouble::Restart { node })]);
        });
        episodes(rng, swarm.duplicate, &mut |rng, from, _| {
            let node = some_node(rng);
            troubles.push((from, Trouble::Duplicate { node }));
        });
        episodes(rng, swarm.hold, &mut |rng, from, to| {
            let node = some_node(rng);
            troubles.extend([(from, Trouble::Hold { node }), (to, Trouble::Release { node })]);
        });
        for (wanted, trouble) in [(swarm.cancel_any, Trouble::Cancel), (swarm.configure, Trouble::Configure)] {
            episodes(rng, wanted, &mut |rng, from, to| {
                let times = [from, to, rng.range(200..=last)];
                troubles.extend(times.map(|at| (at, trouble)));
            });
        }
        // A Node that registers while the config changes gets the older one.
        episodes(rng, swarm.configure, &mut |rng, from, _| {
            let node = some_node(rng);
            troubles.push((from, Trouble::Cut { node }));
            for _ in 0..4 {
                troubles.push((from + rng.range(300..=2_500), Trouble::Configure));
            }
        });
        if swarm.stop_edge {
            let (from, grace) = (rng.range(500..=last), rng.pick(&[0, 500, 5_000]));
            troubles.push((from, Trouble::StopEdge { grace }));
            troubles.push((from + grace + 1_500, Trouble::CrashEdge { mute: false }));
            troubles.push((from + grace + 1_600, Trouble::RestartEdge));
        }
        if swarm.edge_crash {
            let (from, mute) = (rng.range(500..=last), rng.permille(400));
            troubles.push((from, Trouble::CrashEdge { mute }));
            troubles.push((from + rng.range(1..=5_000), Trouble::RestartEdge));
        }
        if swarm.edge_pause {
            let from = rng.range(500..=last);
            let length = rng.pick(&[100, 3_000, 20_000, 100_000]);
            troubles.extend([(from, Trouble::PauseEdge), (from + length, Trouble::ResumeEdge)]);
        }
        troubles.retain(|(at, _)| *at < last);
        troubles.sort_by_key(|(at, _)| *at);
        self.troubles = troubles;
    }

    /// The config of the Edge.
    #[must_use]
    pub fn catalog(&self, tokens: &[Token]) -> Catalog {
        let queue = QueueDefaults::default();
        let mut catalog = Catalog::builder().queue(queue).revision(self.revision).suspicion_withdraw(self.withdraw);
        for (number, token) in tokens.iter().enumerate().take(self.nodes.len()) {
            let own = self.providers.iter().filter(|provider| provider.node == number);
            let entries = own.map(ProviderPlan::entry).collect();
            let id = NodeId::new(format!("n{number}")).unwrap();
            let mut entry = NodeEntry::new(id, token.id().clone(), token.hash(), entries);
            entry.enabled = self.nodes[number].enabled;
            catalog = catalog.node(entry);
        }
        for model in &self.models {
            let candidate = |(at, weight): &(usize, u32)| {
                let id = ProviderId::new(&self.providers[*at].id).unwrap();
                Candidate::new(id, Target::new("t").unwrap()).with_weight(*weight)
            };
            let queue =
                QueueDefaults { max_waiting: model.max_waiting, timeout: Duration::from_millis(model.queue_timeout) };
            let candidates = model.candidates.iter().map(candidate).collect();
            let mut group = ModelGroup::new(ModelName::new(&model.name).unwrap(), candidates, queue);
            group.long_context_threshold = model.threshold;
            group.strategy = model.strategy;
            group.absence_grace = Duration::from_millis(model.absence);
            group.retry_on = model.retry_on;
            catalog = catalog.model(group);
        }
        catalog.build().unwrap()
    }
}

impl ProviderPlan {
    fn entry(&self) -> ProviderEntry {
        let mut config = ProviderConfig::new(ProviderId::new(&self.id).unwrap(), CUSTOM_KIND).unwrap();
        config.adapter = AdapterKey::new(&self.id).unwrap();
        config.capacity = self.capacity;
        config.long_capacity = self.long_capacity;
        config.close_grace_ms = self.close_grace;
        config.response_stall_timeout_ms = self.stall;
        config.first_response_timeout_ms = self.first_response;
        config.probe_timeout_ms = self.probe_timeout;
        config.wire = if self.run_only { WireMode::Run } else { WireMode::Auto };
        let mut entry = ProviderEntry::new(config);
        entry.enabled = self.enabled;
        entry
    }
}

fn drift(rng: &mut Rng) -> i64 {
    rng.pick(&[0, 0, 200, -200, 5_000])
}

fn node(rng: &mut Rng, swarm: &Swarm) -> NodePlan {
    let rate = |rng: &mut Rng, wanted: bool, of: u64| if wanted && rng.permille(500) { of } else { 0 };
    let damage = Damage {
        lose: rate(rng, swarm.damage, 5_000),
        repeat: rate(rng, swarm.damage, 5_000),
        corrupt: rate(rng, swarm.damage, 5_000),
        reorder: rate(rng, swarm.reorder, 200_000),
    };
    NodePlan {
        path: Path {
            latency: rng.pick(&[1, 5, 30, 150]),
            jitter: rng.pick(&[0, 0, 10, 200]),
            // On the slowest a ping waits behind a large body until its Node is a suspect: calm is what has no suspects.
            speed: if swarm.calm { rng.pick(&[200, 200, 10_000]) } else { rng.pick(&[20, 200, 10_000]) },
            up_blocked: false,
            down_blocked: false,
            damage,
        },
        drift: drift(rng),
        interval: rng.pick(&[500, 1_000, 4_000]),
        enabled: true,
    }
}

fn provider(rng: &mut Rng, node: usize, number: usize, swarm: &Swarm) -> ProviderPlan {
    let capacity = u32::try_from(rng.range(1..=4)).unwrap();
    ProviderPlan {
        id: format!("p{number}"),
        node,
        capacity,
        long_capacity: if rng.permille(300) { 1 } else { 0 },
        tunnels: rng.permille(600),
        run_only: rng.permille(200),
        close_grace: if swarm.deaf { rng.pick(&[0, 1_000, 20_000]) } else { 0 },
        stall: 0,
        first_response: 0,
        probe_timeout: 0,
        answer: Answer::Is(Health::Available, 0),
        enabled: true,
    }
}

fn model(rng: &mut Rng, name: &str, providers: usize) -> ModelPlan {
    let all: Vec<_> = (0..providers).map(|at| (at, rng.pick(&[1, 1, 3]))).collect();
    let mut candidates = all.clone();
    candidates.retain(|_| rng.permille(600));
    ModelPlan {
        name: name.to_owned(),
        candidates: if candidates.is_empty() { all } else { candidates },
        max_waiting: rng.pick(&[0, 1, 4, 50]),
        queue_timeout: rng.pick(&[200, 2_000, 10_000, 30_000]),
        threshold: rng.maybe(300, |_| 1_000),
        strategy: rng.maybe(600, |rng| rng.pick(Strategy::ALL)),
        absence: rng.pick(&[0, 0, 3_000]),
        retry_on: None,
    }
}
