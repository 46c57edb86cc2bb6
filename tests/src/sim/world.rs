//! Decides what the processes of a simulation share beside their links: the log, and what really happened at providers and
//! clients, against which the engines' own books are checked.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use iop_execution::{Health, RunId};

use crate::sim::history::{History, Who};

/// What everybody writes to.
#[derive(Debug)]
pub struct World(Mutex<Facts>);

/// The truth.
#[derive(Debug)]
pub struct Facts {
    /// Virtual time in milliseconds, at the start of the window that runs.
    pub now: u64,
    /// The log.
    pub history: History,
    /// Broken rules. The first one fails the seed.
    pub broken: Vec<String>,
    /// A process is being torn down: what its tasks do in that is not logged, its order means nothing.
    pub silent: bool,
    /// Provider calls that run.
    pub calls: BTreeMap<u64, Call>,
    /// Calls so far.
    pub last_call: u64,
    /// The clients that asked.
    pub clients: BTreeMap<u32, Client>,
    /// What each client wants: a model, a wire, a provider to avoid and whether it may be taken all the same. Direct addresses
    /// are not here.
    pub wants: BTreeMap<u32, Wants>,
    /// Processes of Nodes that ended by themselves: true = asked to.
    pub ended: BTreeMap<u64, bool>,
    /// Times at which a Node's generation ended, by Node.
    pub fenced: BTreeMap<usize, Vec<u64>>,
    /// Ends as `disconnected` that need a reason: which client, which Node, since when.
    pub disconnects: Vec<(u32, usize, u64)>,
    /// Places that are quarantined, at the last look.
    pub quarantined: u32,
    /// Nodes that were asked to drain, ever.
    pub drained: bool,
    /// The config changed, ever.
    pub reconfigured: bool,
    /// When it did so last.
    pub configured_at: Option<u64>,
    /// Runs were cancelled by id from elsewhere, ever.
    pub cancelled: bool,
    /// The Edge was asked to end.
    pub edge_stopping: bool,
    /// Since when each Node has been ready, while it is, and since when suspected.
    pub nodes: BTreeMap<usize, NodeFacts>,
    /// When each Node was a suspect last, up to now.
    pub suspected: BTreeMap<usize, u64>,
    /// How each provider's backend is.
    pub conditions: BTreeMap<usize, Condition>,
    /// Stalls that the Edge has read, by run.
    pub stalls: BTreeMap<[u8; 16], Stall>,
    /// When the Edge last read evidence about a provider.
    pub moved: BTreeMap<String, u64>,
    /// Providers that evidence has lowered, at the last look.
    pub lowered: BTreeMap<String, u64>,
    /// What OpenAI clients' requests have gone through.
    pub askings: BTreeMap<u32, Asking>,
    /// When each client came, on the Edge's clock.
    pub starts: BTreeMap<u32, u64>,
    /// How long requests for each model wait, by the present config.
    pub queue_timeouts: BTreeMap<String, u64>,
}

/// What a provider's backend says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// This, after so many milliseconds.
    Is(Health, u64),
    /// Nothing.
    Never,
    /// The adapter panics.
    Panics,
}

/// How a provider's backend is.
#[derive(Debug, Clone, Copy)]
pub struct Condition {
    /// It makes no progress, and refuses nobody.
    pub ill: bool,
    /// What it says of itself.
    pub answer: Answer,
}

/// A stall, as its terminal told the Edge.
#[derive(Debug, Clone, Copy)]
pub struct Stall {
    /// The call was seen to end.
    pub confirmed: bool,
    /// What was found.
    pub health: Health,
}

/// What one request of an OpenAI client has gone through.
#[derive(Debug, Clone, Default)]
pub struct Asking {
    /// Attempts that it may have after the first one.
    pub budget: u32,
    /// How often the engine was asked to admit it.
    pub submits: u32,
    /// How long the last of these could wait.
    pub queue_timeout: u64,
    /// Attempts that were admitted.
    pub attempts: Vec<Attempt>,
    /// The provider that stalled last, by the Node's own word, and whether it may be taken where there is no other.
    pub avoid: Option<(String, bool)>,
    /// Nobody can say whether the Edge took that word before something else ended the attempt.
    pub unsure: bool,
    /// Calls of providers, in order.
    pub calls: Vec<u64>,
    /// Hashes of the body that providers were sent, by run and by tunnel.
    pub bodies: [Option<u64>; 2],
    /// Its client has content.
    pub given: bool,
    /// How it ended, as its records say; one is right.
    pub records: Vec<Record>,
}

/// One attempt.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// Its run.
    pub run: [u8; 16],
    /// At which provider.
    pub provider: String,
    /// On which Node.
    pub node: usize,
    /// When it was asked for.
    pub at: u64,
    /// When it had its place.
    pub admitted: u64,
}

/// What a request's record says.
#[derive(Debug, Clone, Copy)]
pub struct Record {
    /// The outcome.
    pub outcome: &'static str,
    /// The error.
    pub code: Option<&'static str>,
    /// Dispatched attempts.
    pub attempts: u32,
}

/// What the Edge said of a Node.
#[derive(Debug, Clone, Copy, Default)]
pub struct NodeFacts {
    /// Ready, and takes new work, since then.
    pub ready: Option<u64>,
    /// Suspected since then.
    pub suspect: Option<u64>,
    /// Taken out of service.
    pub held: bool,
    /// When an operator changed that last.
    pub held_at: u64,
}

/// One provider call.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// In which process.
    pub process: u64,
    /// Which provider.
    pub provider: usize,
    /// For which run.
    pub run_id: RunId,
    /// For which client.
    pub client: u32,
    /// Since when.
    pub since: u64,
}

/// What a client wants of the Edge.
#[derive(Debug, Clone)]
pub struct Wants {
    /// The model.
    pub model: String,
    /// It insists on tunnels.
    pub tunnel: bool,
    /// The provider it avoids, and whether it may be taken all the same.
    pub avoid: Option<(String, bool)>,
}

/// Where a client stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It asked and has no answer.
    Submitted,
    /// It has a stream.
    Open,
    /// It has its one outcome.
    Done(&'static str),
}

/// One client.
#[derive(Debug, Clone, Copy)]
pub struct Client {
    /// Where it stands.
    pub stage: Stage,
    /// When it asked, on the Edge's clock.
    pub since: u64,
    /// When its wait must be over, on the Edge's clock.
    pub wait_until: u64,
    /// Its deadline, on the Edge's clock, while it reads all the time.
    pub deadline: Option<u64>,
    /// Its run.
    pub run_id: Option<RunId>,
}

impl World {
    /// Nothing happened yet.
    #[must_use]
    pub fn new(print: bool) -> Self {
        Self(Mutex::new(Facts {
            now: 0,
            history: History::new(print),
            broken: Vec::new(),
            silent: false,
            calls: BTreeMap::new(),
            last_call: 0,
            clients: BTreeMap::new(),
            wants: BTreeMap::new(),
            ended: BTreeMap::new(),
            fenced: BTreeMap::new(),
            disconnects: Vec::new(),
            quarantined: 0,
            drained: false,
            reconfigured: false,
            configured_at: None,
            cancelled: false,
            edge_stopping: false,
            nodes: BTreeMap::new(),
            suspected: BTreeMap::new(),
            conditions: BTreeMap::new(),
            stalls: BTreeMap::new(),
            moved: BTreeMap::new(),
            lowered: BTreeMap::new(),
            askings: BTreeMap::new(),
            starts: BTreeMap::new(),
            queue_timeouts: BTreeMap::new(),
        }))
    }

    /// The truth, for a moment.
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a line.
    pub fn note(&self, who: Who, what: &'static str, detail: &'static str, numbers: [u64; 2]) {
        self.facts().note(who, what, detail, numbers);
    }

    /// A rule is broken.
    pub fn broken(&self, rule: impl Into<String>) {
        self.facts().broken.push(rule.into());
    }
}

impl Facts {
    /// Writes a line.
    pub fn note(&mut self, who: Who, what: &'static str, detail: &'static str, numbers: [u64; 2]) {
        if !self.silent {
            self.history.add(self.now, who, what, detail, numbers);
        }
    }

    /// True if a generation of this Node ended since then.
    #[must_use]
    pub fn fenced_since(&self, node: usize, at: u64) -> bool {
        self.fenced.get(&node).is_some_and(|times| times.iter().any(|time| *time >= at))
    }

    /// True if this Node was a suspect at some time since then.
    #[must_use]
    pub fn suspect_since(&self, node: usize, at: u64) -> bool {
        let is = self.nodes.get(&node).is_some_and(|node| node.suspect.is_some());
        is || self.suspected.get(&node).is_some_and(|last| *last >= at)
    }

    /// How a provider's backend is.
    #[must_use]
    pub fn condition(&self, provider: usize) -> Condition {
        let well = Condition { ill: false, answer: Answer::Is(Health::Available, 0) };
        self.conditions.get(&provider).copied().unwrap_or(well)
    }

    /// A config that came when a request had its place already reaches the Node first, and may leave it no place there.
    #[must_use]
    pub fn configured_since(&self, at: u64) -> bool {
        self.configured_at.is_some_and(|last| last >= at)
    }
}
