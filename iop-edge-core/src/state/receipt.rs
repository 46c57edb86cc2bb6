//! Decides when a missing receipt means that a dispatch was lost, and whether a Node's present connection still answers
//! (WIR-14, REG-5): both by a ping of their own and what comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use iop_wire::limits::CHALLENGE_TIMEOUT;
use iop_wire::{Ping, ToNode};

use crate::observe::Observation;
use crate::state::effect::Effect;
use crate::state::id::{AttemptId, ConnectionId};
use crate::state::registry::Challenge;
use crate::state::timers::Timer;
use crate::state::{EdgeState, Stage};

/// Marks the nonces of these pings, so that they are none of the heartbeat's.
pub(crate) const PROBE: u64 = 1 << 63;
/// How long a receipt may still take once the Node has answered a ping that was sent after the dispatch: the pong is a
/// control message and may have overtaken it.
const RECEIPT_SLACK: Duration = Duration::from_millis(500);

/// Pings without a pong.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    last_nonce: u64,
    receipts: BTreeMap<ConnectionId, Receipts>,
    /// By the connection that was asked. There is one challenger per Node, and one Node per connection.
    challenges: BTreeMap<ConnectionId, (u64, ConnectionId)>,
}

/// Dispatches of one connection whose receipt is missing.
#[derive(Debug)]
struct Receipts {
    nonce: u64,
    /// Sent before the ping: its pong proves that they should have arrived.
    asked: BTreeSet<AttemptId>,
    /// Found missing since: for the next ping.
    next: BTreeSet<AttemptId>,
}

impl Probes {
    fn nonce(&mut self) -> u64 {
        self.last_nonce += 1;
        PROBE | self.last_nonce
    }

    /// The connection is gone.
    pub(crate) fn forget(&mut self, connection: ConnectionId) {
        self.receipts.remove(&connection);
        self.challenges.remove(&connection);
        self.challenges.retain(|_, (_, newcomer)| *newcomer != connection);
    }
}

impl EdgeState {
    fn probe(&mut self, connection: ConnectionId, nonce: u64) {
        let message = Box::new(ToNode::Ping(Ping { nonce }));
        self.effects.push_back(Effect::Send { connection, message });
    }

    /// A dispatched request has had the time its receipt may take.
    pub(super) fn receipt_due(&mut self, attempt: AttemptId) {
        if let Some(entry) = self.attempts.get(&attempt).filter(|entry| entry.stage == Stage::Dispatched) {
            self.effects.push_back(Effect::CheckReceipt { attempt, answered: entry.receipt_asked });
        }
    }

    /// The request waits for its link: its receipt has its time from when it is written.
    pub(crate) fn receipt_unwritten(&mut self, attempt: AttemptId, now: Instant) {
        self.handle_timeout(now);
        if let Some(entry) = self.attempts.get_mut(&attempt).filter(|entry| entry.stage == Stage::Dispatched) {
            entry.receipt_asked = false;
            self.timers.arm(Timer::Receipt(attempt), now + self.catalog.dispatch_ack_timeout());
        }
    }

    /// There is no receipt: asks its Node whether it is there.
    pub(crate) fn receipt_missing(&mut self, attempt: AttemptId, now: Instant) {
        self.handle_timeout(now);
        let lease = self.ledger.lease(attempt);
        let connection = lease.and_then(|lease| self.registry.owner(&lease.node).zip(Some(lease.generation)));
        let current = |(id, generation): &(ConnectionId, _)| self.registry.generation(*id) == Some(*generation);
        let Some((connection, _)) = connection.filter(current) else { return };
        self.effects.push_back(Effect::Observe(Observation::ReceiptMissing));
        if let Some(receipts) = self.probes.receipts.get_mut(&connection) {
            receipts.next.insert(attempt);
            return;
        }
        let nonce = self.probes.nonce();
        let receipts = Receipts { nonce, asked: BTreeSet::from([attempt]), next: BTreeSet::new() };
        self.probes.receipts.insert(connection, receipts);
        self.probe(connection, nonce);
    }

    /// Asks the present connection of a Node whether it is still there, for another one that wants its place.
    pub(super) fn challenge(
        &mut self,
        incumbent: ConnectionId,
        newcomer: ConnectionId,
        challenge: Challenge,
        now: Instant,
    ) -> bool {
        if !self.registry.challenge(newcomer, challenge) {
            return false;
        }
        self.timers.disarm(Timer::Handshake(newcomer));
        self.ask_incumbent(incumbent, newcomer, now);
        true
    }

    /// Asks, or asks again.
    pub(super) fn ask_incumbent(&mut self, incumbent: ConnectionId, newcomer: ConnectionId, now: Instant) {
        self.timers.arm(Timer::Challenge(newcomer), now + CHALLENGE_TIMEOUT);
        let nonce = self.probes.nonce();
        self.probes.challenges.insert(incumbent, (nonce, newcomer));
        self.probe(incumbent, nonce);
    }

    /// A pong with a nonce of these pings.
    pub(crate) fn handle_pong(&mut self, connection: ConnectionId, nonce: u64, now: Instant) {
        self.handle_timeout(now);
        if let Some((_, newcomer)) = self.probes.challenges.get(&connection).filter(|(asked, _)| *asked == nonce) {
            let newcomer = *newcomer;
            self.probes.challenges.remove(&connection);
            self.refuse_challenger(newcomer, now);
        }
        let Some(receipts) = self.probes.receipts.get_mut(&connection).filter(|receipts| receipts.nonce == nonce)
        else {
            return;
        };
        let asked = std::mem::take(&mut receipts.asked);
        if receipts.next.is_empty() {
            self.probes.receipts.remove(&connection);
        } else {
            receipts.asked = std::mem::take(&mut receipts.next);
            let nonce = self.probes.nonce();
            if let Some(receipts) = self.probes.receipts.get_mut(&connection) {
                receipts.nonce = nonce;
            }
            self.probe(connection, nonce);
        }
        for attempt in asked {
            if let Some(entry) = self.attempts.get_mut(&attempt).filter(|entry| entry.stage == Stage::Dispatched) {
                entry.receipt_asked = true;
                self.timers.arm(Timer::Receipt(attempt), now + RECEIPT_SLACK);
            }
        }
    }
}
