//! Decides how messages cross the simulated network: what a reliable, ordered transport may do (wait, arrive late, stand
//! still without a word, end), and, rarely, what it must never do (lose, repeat, damage), to see that it is noticed.
//!
//! The world moves messages between windows: it pulls what each side wants to write, and hands over what has arrived. So a
//! message never arrives in the window in which it was sent, whatever the order in which processes run.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use iop_execution::{RunId, async_trait};
use iop_wire::convert::WireMessage;
use iop_wire::link::fault::OfRun;
use iop_wire::link::{ConnectError, Connector, EdgeLink, Incoming, Link, LinkError, NodeLink, Outgoing, PeerIdentity};
use iop_wire::{RunNumber, Sequenced, ToEdge, ToNode};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::sim::health::Told as Evidence;
use crate::sim::history::Who;
use crate::sim::rng::Rng;
use crate::sim::world::World;

/// Messages that a direction holds, at most: after that its sender is not asked.
const FLIGHT_MESSAGES: usize = 128;
/// The same in bytes.
const FLIGHT_BYTES: usize = 128 * 1024;

/// How the path to one Node is.
#[derive(Debug, Clone, Copy)]
pub struct Path {
    /// Least time of a message, in milliseconds.
    pub latency: u64,
    /// Most that is added to it.
    pub jitter: u64,
    /// Bytes per millisecond.
    pub speed: u64,
    /// Nothing reaches the Edge.
    pub up_blocked: bool,
    /// Nothing reaches the Node.
    pub down_blocked: bool,
    /// In a million messages so many are lost, and so on.
    pub damage: Damage,
}

/// What happens to messages, in so many of a million.
#[derive(Debug, Clone, Copy, Default)]
pub struct Damage {
    /// Lost; the numbers show it.
    pub lose: u64,
    /// Comes twice.
    pub repeat: u64,
    /// Can't be decoded.
    pub corrupt: u64,
    /// Changes places with one of another run, numbers in order: legal.
    pub reorder: u64,
}

enum Parcel<M> {
    Message(Sequenced<M>),
    Encoded(Bytes),
    Malformed,
    End,
}

struct Flying<M> {
    due: u64,
    size: usize,
    parcel: Parcel<M>,
}

/// One direction of a connection.
pub struct Pipe<M>(Mutex<Inside<M>>);

struct Inside<M> {
    outgoing: Option<Outgoing<M>>,
    flight: VecDeque<Flying<M>>,
    bytes: usize,
    last_due: u64,
    /// Its end is on its way, or was lost with its sender.
    closed: bool,
    /// Its sender died without a word.
    mute: bool,
    arrived: VecDeque<Result<Sequenced<M>, LinkError>>,
    ended: bool,
    reader: Option<Waker>,
    reader_gone: bool,
    /// Something was not pulled for lack of room.
    backlog: bool,
    /// Something was lost: a message that changes places over that gap could break the order of its own run.
    gap: bool,
}

impl<M> fmt::Debug for Pipe<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipe").finish_non_exhaustive()
    }
}

impl<M> Pipe<M> {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Inside {
            outgoing: None,
            flight: VecDeque::new(),
            bytes: 0,
            last_due: 0,
            closed: false,
            mute: false,
            arrived: VecDeque::new(),
            ended: false,
            reader: None,
            reader_gone: false,
            backlog: false,
            gap: false,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inside<M>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, outgoing: Outgoing<M>) {
        let mut inside = self.lock();
        if !inside.closed {
            inside.outgoing = Some(outgoing);
        }
    }

    /// The sender is gone.
    fn hang_up(&self) {
        let mut inside = self.lock();
        let outgoing = inside.outgoing.take();
        inside.close();
        drop(inside);
        drop(outgoing);
    }

    /// The receiver is gone.
    fn abandon(&self) {
        let mut inside = self.lock();
        inside.reader_gone = true;
        inside.arrived.clear();
    }

    fn reset_if_mute(&self) {
        let mut inside = self.lock();
        if inside.closed && std::mem::replace(&mut inside.mute, false) {
            let due = inside.last_due;
            inside.flight.push_back(Flying { due, size: 0, parcel: Parcel::End });
        }
    }

    /// Both ends learn that it is over, though neither said so.
    fn cut(&self) {
        let mut inside = self.lock();
        inside.flight.clear();
        inside.bytes = 0;
        inside.mute = false;
        inside.closed = true;
        let outgoing = inside.outgoing.take();
        inside.flight.push_back(Flying { due: 0, size: 0, parcel: Parcel::End });
        drop(inside);
        drop(outgoing);
    }
}

impl<M> Inside<M> {
    fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true) && !self.mute {
            let due = self.last_due;
            self.flight.push_back(Flying { due, size: 0, parcel: Parcel::End });
        }
    }
}

/// What the world must know of a message.
pub trait Told: WireMessage + OfRun {
    /// What it costs to send.
    fn size(&self) -> usize;
    /// It may change places with a message of another run.
    fn may_swap(&self) -> bool;
}

impl Told for ToEdge {
    fn size(&self) -> usize {
        self.charge() as usize
    }
    fn may_swap(&self) -> bool {
        self.of_run().is_some()
    }
}

impl Told for ToNode {
    fn size(&self) -> usize {
        match self {
            Self::Chunk(chunk) => chunk.data.len(),
            _ => 256,
        }
    }
    fn may_swap(&self) -> bool {
        // Requests must come in the order of their numbers.
        !matches!(self, Self::Run(_) | Self::Tunnel(_)) && self.of_run().is_some()
    }
}

impl<M: Told> Pipe<M> {
    /// Takes what the sender wants to write, while there is room; `told` sees each message once. Answers how many.
    fn pull(&self, now: u64, path: &Path, encode: bool, rng: &mut Rng, mut told: impl FnMut(&M, &'static str)) -> u64 {
        let mut inside = self.lock();
        let mut pulled = 0;
        inside.backlog = false;
        loop {
            if inside.flight.len() + inside.arrived.len() >= FLIGHT_MESSAGES || inside.bytes >= FLIGHT_BYTES {
                inside.backlog = true;
                return pulled;
            }
            let Some(outgoing) = &mut inside.outgoing else { return pulled };
            match outgoing.as_mut().poll_next(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => return pulled,
                Poll::Ready(None) => {
                    inside.outgoing = None;
                    inside.close();
                    return pulled + 1;
                }
                Poll::Ready(Some(message)) => {
                    pulled += 1;
                    let fault = Self::fault(&path.damage, rng);
                    told(&message.message, fault);
                    let size = message.message.size().max(64);
                    let spread = if path.jitter == 0 { 0 } else { rng.range(0..=path.jitter) };
                    let busy = inside.bytes as u64 / path.speed.max(1);
                    inside.last_due = inside.last_due.max(now + path.latency + spread + busy);
                    inside.send(message, size, fault, encode);
                }
            }
        }
    }

    fn fault(damage: &Damage, rng: &mut Rng) -> &'static str {
        let drawn = rng.number() % 1_000_000;
        let Damage { lose, repeat, corrupt, reorder } = *damage;
        if drawn < lose {
            "lose"
        } else if drawn < lose + repeat {
            "repeat"
        } else if drawn < lose + repeat + corrupt {
            "corrupt"
        } else if drawn < lose + repeat + corrupt + reorder {
            "reorder"
        } else {
            ""
        }
    }

    /// Hands over what has arrived. `told` sees each message once. Answers how many.
    fn deliver(&self, now: u64, blocked: bool, mut told: impl FnMut(&M)) -> u64 {
        let mut inside = self.lock();
        let mut delivered = 0;
        while !blocked
            && inside.arrived.len() < FLIGHT_MESSAGES
            && inside.flight.front().is_some_and(|flying| flying.due <= now)
        {
            let Some(Flying { size, parcel, .. }) = inside.flight.pop_front() else { break };
            inside.bytes -= size;
            delivered += 1;
            let item = match parcel {
                Parcel::Message(message) => Ok(message),
                Parcel::Encoded(bytes) => M::decode(bytes),
                Parcel::Malformed => Err(LinkError::Malformed("damaged by the simulation")),
                Parcel::End => {
                    inside.ended = true;
                    continue;
                }
            };
            if inside.reader_gone || inside.ended {
                continue;
            }
            match &item {
                Ok(message) => told(&message.message),
                Err(LinkError::MalformedRun { .. }) => {}
                Err(_) => inside.ended = true,
            }
            inside.arrived.push_back(item);
        }
        let reader = if delivered > 0 { inside.reader.take() } else { None };
        drop(inside);
        if let Some(reader) = reader {
            reader.wake();
        }
        delivered
    }

    fn next_due(&self) -> Option<u64> {
        self.lock().flight.front().map(|flying| flying.due)
    }
}

impl<M: Told> Inside<M> {
    fn send(&mut self, mut message: Sequenced<M>, size: usize, fault: &'static str, encode: bool) {
        let due = self.last_due;
        self.gap |= fault == "lose";
        if fault == "reorder"
            && !self.gap
            && let Some(Flying { parcel: Parcel::Message(last), .. }) = self.flight.back_mut()
            && last.message.may_swap()
            && message.message.may_swap()
            && last.message.of_run() != message.message.of_run()
        {
            std::mem::swap(&mut last.message, &mut message.message);
        }
        let mut push = |parcel| {
            self.bytes += size;
            self.flight.push_back(Flying { due, size, parcel });
        };
        let parcel = |message| if encode { encoded(message) } else { Parcel::Message(message) };
        match fault {
            "lose" => {}
            "repeat" => {
                push(parcel(message.clone()));
                push(parcel(message));
            }
            "corrupt" => push(Parcel::Malformed),
            _ => push(parcel(message)),
        }
    }
}

fn encoded<M: WireMessage>(message: Sequenced<M>) -> Parcel<M> {
    // A message that can't be sent is a defect of the engine: the receiver sees it as damage, and the history shows it.
    M::encode(message).map_or(Parcel::Malformed, Parcel::Encoded)
}

/// One connection, as the network sees it.
pub struct Conn {
    /// Its number, from 1.
    pub id: u64,
    /// Which Node dialled, and from which process.
    pub node: usize,
    /// The process.
    pub process: u64,
    /// To the Edge.
    pub up: Arc<Pipe<ToEdge>>,
    /// To the Node.
    pub down: Arc<Pipe<ToNode>>,
    state: Mutex<ConnState>,
}

#[derive(Debug, Default)]
struct ConnState {
    /// Nothing arrives any more, at the Edge and at the Node.
    stuck: (bool, bool),
    ready: bool,
    stale: bool,
    /// A message was lost, repeated or damaged: somebody will notice.
    damaged: bool,
    open: BTreeMap<RunNumber, (RunId, String)>,
    evidence: Evidence,
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn").field("id", &self.id).field("node", &self.node).finish_non_exhaustive()
    }
}

impl Conn {
    fn state(&self) -> MutexGuard<'_, ConnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what both sides want to write. A process that does not run is not asked.
    pub fn pull(&self, world: &World, path: &Path, encode: bool, runs: (bool, bool), rng: &mut Rng) -> u64 {
        let now = world.facts().now;
        let who = Who::Link(self.id, self.node);
        let mut moved = 0;
        if runs.0 {
            moved += self.down.pull(now, path, encode, rng, |message, fault| {
                let number = message.run().map_or(0, |run| run.0);
                world.note(who, down_name(message), fault, [number, 0]);
                match message {
                    ToNode::Run(request) => self.dispatched(&request.head),
                    ToNode::Tunnel(request) => self.dispatched(&request.head),
                    ToNode::ReadyResponse(response) if response.ready => self.state().ready = true,
                    ToNode::Command(request) => self.state().evidence.asked(request, now),
                    _ => {}
                }
                self.note_damage(fault);
            });
        }
        if runs.1 {
            moved += self.up.pull(now, path, encode, rng, |message, fault| {
                let number = message.run().map_or(0, |run| run.0);
                world.note(who, up_name(message), fault, [number, 0]);
                self.note_damage(fault);
            });
        }
        moved
    }

    fn note_damage(&self, fault: &'static str) {
        self.state().damaged |= matches!(fault, "lose" | "repeat" | "corrupt");
    }

    /// True if what crossed it is not what was sent.
    pub fn is_damaged(&self) -> bool {
        self.state().damaged
    }

    fn dispatched(&self, head: &iop_wire::DispatchHead) {
        let provider = head.provider_id.to_string();
        let mut state = self.state();
        state.open.insert(head.run, (head.run_id, provider));
        state.evidence.dispatched(head);
    }

    /// The Edge takes a message.
    fn edge_takes(&self, message: &ToEdge, world: &World) {
        self.state().evidence.read(message, &mut world.facts());
    }

    /// Whether the Edge must have lowered a provider behind it, by what it was told; `is` = what it says.
    pub fn must_be_lowered(&self, provider: &str, is: bool) -> bool {
        self.state().evidence.must_be_lowered(provider, is)
    }

    /// Hands over what has arrived on both sides.
    pub fn deliver(&self, now: u64, path: &Path) -> u64 {
        let stuck = self.state().stuck;
        let up = self.up.deliver(now, path.up_blocked || stuck.0, |message| {
            if is_terminal(message)
                && let Some(run) = message.run()
            {
                self.state().open.remove(&run);
            }
        });
        up + self.down.deliver(now, path.down_blocked || stuck.1, |_| {})
    }

    /// When the next message arrives.
    pub fn next_due(&self, path: &Path) -> Option<u64> {
        let stuck = self.state().stuck;
        let up = self.up.next_due().filter(|_| !path.up_blocked && !stuck.0);
        up.into_iter().chain(self.down.next_due().filter(|_| !path.down_blocked && !stuck.1)).min()
    }

    /// Whether the Edge was told something that lets it move a provider behind it.
    pub fn may_have_moved(&self, provider: &str, lowered: bool) -> bool {
        self.state().evidence.may_have_moved(provider, lowered)
    }

    /// Nothing arrives on it any more, and nobody is told: somebody on the way has forgotten it.
    pub fn stick(&self, up: bool, down: bool) {
        let mut state = self.state();
        state.stuck = (state.stuck.0 || up, state.stuck.1 || down);
    }

    /// It is current, and will be as long as nothing happens to it.
    pub fn is_sound(&self) -> bool {
        let closed = self.up.lock().closed || self.down.lock().closed;
        self.is_current() && !closed && self.state().stuck == (false, false)
    }

    /// The transport breaks.
    pub fn cut(&self) {
        self.state().stuck = (false, false);
        self.up.cut();
        self.down.cut();
    }

    /// The process on the Node's side (else on the Edge's) is about to vanish without a word.
    pub fn mute(&self, node_side: bool) {
        if node_side { self.up.lock().mute = true } else { self.down.lock().mute = true }
    }

    /// The machine of a process that vanished is back: it answers what still comes for the old connection with an end.
    pub fn answer_for_the_dead(&self) {
        self.up.reset_if_mute();
        self.down.reset_if_mute();
    }

    /// The generation that this connection was is over.
    pub fn fence(&self) -> bool {
        let mut state = self.state();
        state.ready && !std::mem::replace(&mut state.stale, true)
    }

    /// It was ready, and its generation is not over.
    pub fn is_current(&self) -> bool {
        let state = self.state();
        state.ready && !state.stale
    }

    /// Requests that went to a provider and have no terminal that reached the Edge.
    pub fn open_at(&self, provider: &str) -> usize {
        self.state().open.values().filter(|(_, at)| at == provider).count()
    }

    /// True if this run was sent here and has no terminal that reached the Edge.
    pub fn has_open(&self, run_id: RunId) -> bool {
        self.state().open.values().any(|(id, _)| *id == run_id)
    }

    /// Something waits for room on the way to the Node, or can't be sent though the Edge does not know yet, or was not read
    /// by the Edge.
    pub fn is_behind(&self) -> bool {
        let (backlog, closed) = {
            let down = self.down.lock();
            (down.backlog, down.closed)
        };
        let up = self.up.lock();
        (backlog || closed || !up.arrived.is_empty()) && !up.reader_gone && !self.state().stale
    }

    /// Neither end uses it any more.
    pub fn is_over(&self) -> bool {
        self.up.lock().reader_gone && self.down.lock().reader_gone
    }
}

fn is_terminal(message: &ToEdge) -> bool {
    match message {
        ToEdge::Event(_, event) => event.kind.is_terminal(),
        ToEdge::Frame(_, _, frame) => frame.is_terminal(),
        _ => false,
    }
}

fn down_name(message: &ToNode) -> &'static str {
    match message {
        ToNode::HelloAck(_) => "> hello ack",
        ToNode::RegisterResponse(_) => "> register response",
        ToNode::ReadyResponse(_) => "> ready response",
        ToNode::Run(_) => "> run",
        ToNode::Tunnel(_) => "> tunnel",
        ToNode::Chunk(_) => "> chunk",
        ToNode::Credit(..) => "> credit",
        ToNode::Cancel(..) => "> cancel",
        ToNode::Command(_) => "> command",
        ToNode::ConfigUpdate(_) => "> config",
        ToNode::Ping(_) => "> ping",
        ToNode::Pong(_) => "> pong",
        ToNode::Drain(_) => "> drain",
        ToNode::Goodbye(goodbye) => goodbye.code.as_str(),
        _ => "> other",
    }
}

fn up_name(message: &ToEdge) -> &'static str {
    match message {
        ToEdge::Hello(_) => "< hello",
        ToEdge::Register(_) => "< register",
        ToEdge::Ready(_) => "< ready",
        ToEdge::Accepted(_) => "< accepted",
        ToEdge::Event(..) | ToEdge::Frame(..) if is_terminal(message) => "< terminal",
        ToEdge::Event(..) => "< event",
        ToEdge::Frame(..) => "< frame",
        ToEdge::Credit(..) => "< credit",
        ToEdge::CommandResponse(_) => "< command",
        ToEdge::ConfigAck(_) => "< config ack",
        ToEdge::Ping(_) => "< ping",
        ToEdge::Pong(_) => "< pong",
        ToEdge::Drain(_) => "< drain",
        ToEdge::Goodbye(goodbye) => goodbye.code.as_str(),
        _ => "< other",
    }
}

/// Who is told of a message when it is taken.
type Teller<I> = Box<dyn Fn(&I) + Send>;

/// One side of a connection. Dropping it closes both directions.
struct Ends<I, O> {
    receive: Arc<Pipe<I>>,
    send: Arc<Pipe<O>>,
    teller: Option<Teller<I>>,
}

impl<I, O> Drop for Ends<I, O> {
    fn drop(&mut self) {
        self.receive.abandon();
        self.send.hang_up();
    }
}

struct SimLink<I, O>(Ends<I, O>);

impl<I, O> fmt::Debug for SimLink<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimLink")
    }
}

impl<I: Send + 'static, O: Send + 'static> Link for SimLink<I, O> {
    type In = I;
    type Out = O;

    fn peer(&self) -> PeerIdentity {
        PeerIdentity::default()
    }

    fn start(self: Box<Self>, outgoing: Outgoing<O>) -> Incoming<I> {
        self.0.send.open(outgoing);
        Box::pin(Received(self.0))
    }
}

struct Received<I, O>(Ends<I, O>);

impl<I, O> Stream for Received<I, O> {
    type Item = Result<Sequenced<I>, LinkError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut inside = self.0.receive.lock();
        if let Some(item) = inside.arrived.pop_front() {
            drop(inside);
            if let (Some(teller), Ok(message)) = (&self.0.teller, &item) {
                teller(&message.message);
            }
            return Poll::Ready(Some(item));
        }
        if inside.ended {
            return Poll::Ready(None);
        }
        inside.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// The network: every connection, and how to make one.
#[derive(Debug)]
pub struct Net(Mutex<NetState>);

#[derive(Debug)]
struct NetState {
    conns: Vec<Arc<Conn>>,
    last: u64,
    paths: Vec<Path>,
    /// Where the Edge takes connections, while there is one.
    edge: Option<mpsc::UnboundedSender<EdgeLink>>,
}

impl Net {
    /// A network with these paths, by Node.
    #[must_use]
    pub const fn new(paths: Vec<Path>) -> Self {
        Self(Mutex::new(NetState { conns: Vec::new(), last: 0, paths, edge: None }))
    }

    fn lock(&self) -> MutexGuard<'_, NetState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An Edge listens from now on.
    pub fn listen(&self) -> mpsc::UnboundedReceiver<EdgeLink> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.lock().edge = Some(sender);
        receiver
    }

    /// Nobody listens.
    pub fn stop_listening(&self) {
        self.lock().edge = None;
    }

    /// Every connection that is used, oldest first.
    #[must_use]
    pub fn conns(&self) -> Vec<Arc<Conn>> {
        self.lock().conns.clone()
    }

    /// Forgets connections that are over.
    pub fn sweep(&self) {
        self.lock().conns.retain(|conn| !conn.is_over());
    }

    /// The path to a Node.
    #[must_use]
    pub fn path(&self, node: usize) -> Path {
        self.lock().paths[node]
    }

    /// Changes the path to a Node.
    pub fn change(&self, node: usize, change: impl FnOnce(&mut Path)) {
        change(&mut self.lock().paths[node]);
    }

    fn dial(&self, node: usize, process: u64, world: &Arc<World>) -> Result<NodeLink, ConnectError> {
        let mut state = self.lock();
        let refused = || ConnectError::Retryable("nobody listens".into());
        let edge = state.edge.clone().ok_or_else(refused)?;
        state.last += 1;
        let (up, down) = (Pipe::new(), Pipe::new());
        let link = SimLink(Ends { receive: Arc::clone(&down), send: Arc::clone(&up), teller: None });
        let ends = (Arc::clone(&up), Arc::clone(&down));
        let conn = Arc::new(Conn { id: state.last, node, process, up, down, state: Mutex::default() });
        let (of_edge, world) = (Arc::clone(&conn), Arc::clone(world));
        let teller: Teller<ToEdge> = Box::new(move |message| of_edge.edge_takes(message, &world));
        let ends = Ends { receive: ends.0, send: ends.1, teller: Some(teller) };
        edge.send(Box::new(SimLink(ends))).map_err(|_| refused())?;
        state.conns.push(conn);
        Ok(Box::new(link))
    }
}

/// Dials the Edge from one process.
#[derive(Debug)]
pub struct Dialler {
    /// The network.
    pub net: Arc<Net>,
    /// The log.
    pub world: Arc<World>,
    /// Which Node, and which process.
    pub from: (usize, u64),
}

#[async_trait]
impl Connector for Dialler {
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        let (node, process) = self.from;
        let path = self.net.path(node);
        sleep(Duration::from_millis(1 + 2 * path.latency)).await;
        let path = self.net.path(node);
        if path.up_blocked || path.down_blocked {
            std::future::pending::<()>().await;
        }
        let link = self.net.dial(node, process, &self.world);
        let what = if link.is_ok() { "dialled" } else { "dial refused" };
        self.world.note(Who::Node(node, process), what, "", [0, 0]);
        link
    }
}
