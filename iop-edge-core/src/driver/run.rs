//! Decides what of a run reaches its client: order and credit are checked where messages come in, the buffer between
//! connection and client is bounded by the run's window, and after one terminal nothing follows.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use iop_execution::failure::{CredentialReason, StallDetail};
use iop_execution::{
    CancelReason, ExecutionFailure, FailureCode, FailureStage, FrameFlags, ProviderContacted, RunEvent, RunEventKind,
    RunId, TunnelFrame, complaint,
};
use iop_wire::{ReceiveWindow, RunKey, RunNumber, SequenceCheck, ToNode};

use crate::api::{CommitMark, EndNote, EndNotes, WireKind};
use crate::driver::connection::Connection;
use crate::driver::shared::Shared;
use crate::events::RunNotice;
use crate::observe::Violation;
use crate::state::{AttemptId, Verdict};
use crate::wake::Wakers;

/// One message of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    Event(RunEvent),
    Frame(TunnelFrame),
}

impl Piece {
    pub(crate) fn is_terminal(&self) -> bool {
        match self {
            Self::Event(event) => event.kind.is_terminal(),
            Self::Frame(frame) => frame.is_terminal(),
        }
    }

    fn failure(&self) -> Option<&ExecutionFailure> {
        match self {
            Self::Event(RunEvent { kind: RunEventKind::Error(failure), .. })
            | Self::Frame(TunnelFrame::Failed(failure)) => Some(failure),
            Self::Event(_) | Self::Frame(_) => None,
        }
    }

    /// Why the Node refused a credential lease, if that is how the run ended (CRD-13).
    pub(crate) fn credential(&self) -> Option<CredentialReason> {
        let failure = self.failure().filter(|failure| failure.code == FailureCode::CredentialRejected)?;
        failure.credential
    }

    /// What the Node knew of a stall, if that is how the run ended.
    pub(crate) fn stall(&self) -> Option<&StallDetail> {
        let failure = self.failure()?;
        failure.stall.as_deref().filter(|_| failure.code == FailureCode::ResponseStalled)
    }

    /// Takes over a usage report that follows this one: the last report of each count is all a client needs (EXE-7). False
    /// for anything else.
    fn absorb(&mut self, next: &Self) -> bool {
        match (self, next) {
            (
                Self::Event(RunEvent { kind: RunEventKind::Usage, usage: last, .. }),
                Self::Event(RunEvent { kind: RunEventKind::Usage, usage: newer, .. }),
            ) => {
                if let Some(newer) = newer {
                    last.get_or_insert_default().update(*newer);
                }
                true
            }
            (Self::Frame(TunnelFrame::Usage(last)), Self::Frame(TunnelFrame::Usage(newer))) => {
                last.update(*newer);
                true
            }
            (Self::Event(_) | Self::Frame(_), Self::Event(_) | Self::Frame(_)) => false,
        }
    }
}

/// What a message that arrived is.
#[derive(Debug)]
pub(crate) enum Received {
    /// It waits for the client now.
    Queued {
        /// The receive pool is exhausted.
        full: bool,
        /// It says something about its provider.
        verdict: Option<Verdict>,
    },
    /// It is the terminal: release the place, then hand it to [`Run::push_terminal`].
    Terminal(Piece),
    /// The run ended at this Edge before: dropped.
    Late,
}

/// Who ended a run at this Edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LocalEnd {
    Cancelled(CancelReason),
    /// Its Node broke the order of its messages.
    Violated,
    /// Its Node has not answered for too long (FEN-7).
    Suspect,
    /// Its Node never confirmed that it has the request; `contacted` = it may have it (WIR-14).
    Unacknowledged {
        contacted: ProviderContacted,
    },
    /// Its Node is gone; `written` = the request had left this Edge.
    Disconnected {
        written: bool,
    },
}

/// How far a run got, for the failure of a disconnect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    Dispatched,
    Started,
    Output,
}

#[derive(Debug)]
struct Inbox {
    /// What waits for the client, with its charge. Bounded by the window: each piece costs credit, but for the terminal and
    /// for usage reports, and two reports are never neighbours.
    queue: VecDeque<(Piece, u32)>,
    window: ReceiveWindow,
    order: SequenceCheck,
    /// Number of the last message that arrived in order and ended nothing.
    received: u64,
    /// How many messages the client took: its numbers have no gap, whatever was merged or dropped before it (EXE-5).
    taken: u64,
    progress: Progress,
    accepted: bool,
    /// The Edge gave up on a receipt and waits for the terminal alone: anything else is dropped.
    unacknowledged: bool,
    /// What the head of the answer said of its provider, if that says anything.
    verdict: Option<Verdict>,
    /// The terminal is queued, or was taken: nothing is queued any more.
    ended: bool,
    reader: Option<Waker>,
    /// Since when the client has left something waiting.
    waiting_since: Option<Instant>,
}

/// One dispatched run or tunnel at this Edge.
pub(crate) struct Run {
    pub(crate) attempt: AttemptId,
    pub(crate) run_id: RunId,
    pub(crate) key: RunKey,
    pub(crate) connection: Arc<Connection>,
    wire: WireKind,
    leased: bool,
    dispatched: Instant,
    commit: Commit,
    shared: Arc<Shared>,
    inbox: Mutex<Inbox>,
}

/// When content counts as seen by a client.
#[derive(Debug)]
pub(crate) struct Commit {
    pub(crate) mark: CommitMark,
    /// The caller says so; otherwise it is when content is taken.
    pub(crate) explicit: bool,
    /// Where the caller reads what is known of the end beside the terminal.
    pub(crate) notes: EndNotes,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("run_id", &self.run_id).field("key", &self.key).finish_non_exhaustive()
    }
}

/// What identifies a run when it is opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunIdentity {
    pub(crate) attempt: AttemptId,
    pub(crate) run_id: RunId,
    pub(crate) key: RunKey,
    pub(crate) wire: WireKind,
    /// It carries a credential lease.
    pub(crate) leased: bool,
}

impl Run {
    pub(crate) fn new(
        identity: RunIdentity,
        commit: Commit,
        window: u32,
        connection: Arc<Connection>,
        shared: Arc<Shared>,
        now: Instant,
    ) -> Self {
        let RunIdentity { attempt, run_id, key, wire, leased } = identity;
        let inbox = Inbox {
            queue: VecDeque::new(),
            window: ReceiveWindow::new(window),
            order: SequenceCheck::default(),
            received: 0,
            taken: 0,
            progress: Progress::Dispatched,
            accepted: false,
            unacknowledged: false,
            verdict: None,
            ended: false,
            reader: None,
            waiting_since: None,
        };
        let inbox = Mutex::new(inbox);
        Self { attempt, run_id, key, connection, wire, leased, dispatched: now, commit, shared, inbox }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // Every method leaves the inbox consistent before anything of ours could panic.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Node has the request (WIR-14). Answers when it was dispatched, the first time.
    pub(crate) fn accept(&self) -> Option<Instant> {
        let mut inbox = self.lock();
        (!std::mem::replace(&mut inbox.accepted, true)).then_some(self.dispatched)
    }

    /// The Node has shown that it has the request, or the run is over.
    pub(crate) fn is_acknowledged(&self) -> bool {
        let inbox = self.lock();
        inbox.accepted || inbox.received > 0 || inbox.ended
    }

    /// It carries a lease that its Node never showed to have: nobody but this Edge can count it as unused (CRD-13).
    pub(crate) fn lease_is_lost(&self) -> bool {
        let inbox = self.lock();
        self.leased && !inbox.accepted && inbox.received == 0
    }

    /// No client has seen content of it.
    pub(crate) fn is_uncommitted(&self) -> bool {
        !self.commit.mark.is_set()
    }

    /// Leaves a note for the caller, before the terminal.
    pub(crate) fn note(&self, note: EndNote) {
        self.commit.notes.set(note);
    }

    /// From now on only the Node's terminal counts, and it says that there was no receipt (WIR-14).
    pub(crate) fn give_up_receipt(&self) {
        self.lock().unacknowledged = true;
    }

    /// How a run ends whose receipt was given up on; `None` = it was not.
    pub(crate) fn unacknowledged(&self) -> Option<LocalEnd> {
        let inbox = self.lock();
        let silent = inbox.received == 0 && !inbox.accepted;
        let contacted = if silent { ProviderContacted::No } else { ProviderContacted::Unknown };
        inbox.unacknowledged.then_some(LocalEnd::Unacknowledged { contacted })
    }

    /// What its answer says of its provider, once the terminal is here.
    pub(crate) fn verdict(&self, terminal: &Piece) -> Verdict {
        // What the head said was told when it came.
        let judged = self.lock().verdict.is_some();
        let failure = match terminal {
            Piece::Event(RunEvent { kind, .. }) => match kind {
                RunEventKind::Error(failure) => Some(failure),
                RunEventKind::Cancelled(_) => return Verdict::Neutral,
                RunEventKind::Start
                | RunEventKind::Delta(_)
                | RunEventKind::ReasoningDelta(_)
                | RunEventKind::ToolCallDelta(_)
                | RunEventKind::Usage
                | RunEventKind::Complete(_) => None,
            },
            Piece::Frame(frame) => match frame {
                TunnelFrame::Failed(failure) => Some(failure),
                TunnelFrame::Cancelled(_) => return Verdict::Neutral,
                TunnelFrame::Head(_) | TunnelFrame::Body { .. } | TunnelFrame::Usage(_) | TunnelFrame::End => None,
            },
        };
        match failure {
            Some(_) | None if judged => Verdict::Neutral,
            Some(failure) => Verdict::of_failure(failure),
            None => Verdict::Good,
        }
    }

    /// A message arrived with its number and its charge. Checks credit, kind and order in this order; an error of credit
    /// ends the connection, any other one the run.
    pub(crate) fn receive(&self, piece: Piece, n: u64, charge: u32, now: Instant) -> Result<Received, Violation> {
        let mut wakers = Wakers::default();
        let mut inbox = self.lock();
        inbox.window.receive(charge).map_err(|_| Violation::Credit)?;
        let terminal = piece.is_terminal();
        if inbox.ended {
            // The Node did not know yet. Its terminal still says that the work stopped (LEA-6).
            return Ok(if terminal { Received::Terminal(piece) } else { Received::Late });
        }
        let fits = match (&piece, self.wire) {
            (Piece::Event(_), WireKind::Run) | (Piece::Frame(_), WireKind::Tunnel) => true,
            (Piece::Event(_), WireKind::Tunnel) | (Piece::Frame(_), WireKind::Run) => false,
        };
        if !fits {
            return Err(Violation::WrongWire);
        }
        inbox.order.accept(n).map_err(|_| Violation::RunOrder)?;
        let progress = next_progress(inbox.progress, &piece).ok_or(Violation::FrameOrder)?;
        inbox.progress = progress;
        if terminal {
            return Ok(Received::Terminal(piece));
        }
        inbox.received = n;
        if inbox.unacknowledged {
            return Ok(Received::Late);
        }
        let verdict = head_verdict(&piece);
        inbox.verdict = inbox.verdict.or(verdict);
        self.publish(&piece, &mut wakers);
        let full = self.shared.pool.add(charge);
        inbox.push(piece, charge, now, &mut wakers);
        drop(inbox);
        wakers.wake();
        Ok(Received::Queued { full, verdict })
    }

    /// Queues the Node's terminal, unless the run ended here first.
    pub(crate) fn push_terminal(&self, piece: Piece, now: Instant) {
        let mut wakers = Wakers::default();
        let mut inbox = self.lock();
        if !std::mem::replace(&mut inbox.ended, true) {
            self.publish(&piece, &mut wakers);
            inbox.push(piece, 0, now, &mut wakers);
        }
        drop(inbox);
        wakers.wake();
    }

    /// Ends the run for its client now. False if it was over already. Whoever must learn it is woken by the caller, once it
    /// holds no lock.
    pub(crate) fn end(&self, end: LocalEnd, now: Instant, wakers: &mut Wakers) -> bool {
        let mut inbox = self.lock();
        if std::mem::replace(&mut inbox.ended, true) {
            return false;
        }
        match end {
            // What arrived is the client's; the end comes after it.
            LocalEnd::Violated | LocalEnd::Disconnected { .. } => {}
            // "At once": what waits is not waited for.
            LocalEnd::Cancelled(_) | LocalEnd::Suspect | LocalEnd::Unacknowledged { .. } => self.discard(&mut inbox),
        }
        let piece = self.terminal(end, inbox.received + 1, inbox.progress);
        self.publish(&piece, wakers);
        inbox.push(piece, 0, now, wakers);
        true
    }

    fn terminal(&self, end: LocalEnd, seq: u64, progress: Progress) -> Piece {
        let failure = match end {
            LocalEnd::Cancelled(reason) => {
                return match self.wire {
                    WireKind::Run => Piece::Event(RunEvent { seq, kind: RunEventKind::Cancelled(reason), usage: None }),
                    WireKind::Tunnel => Piece::Frame(TunnelFrame::Cancelled(reason)),
                };
            }
            LocalEnd::Violated => {
                let (stage, contacted) = reached(progress);
                let message = "the node's messages for this run were out of order";
                ExecutionFailure::new(FailureCode::ProviderProtocol, stage, contacted, message)
            }
            LocalEnd::Suspect => {
                let (stage, contacted) = reached(progress);
                ExecutionFailure::new(FailureCode::NodeSuspect, stage, contacted, "the node has stopped answering")
            }
            LocalEnd::Unacknowledged { contacted } => {
                let message = "the node did not confirm that it has the request";
                ExecutionFailure::new(FailureCode::DispatchUnacknowledged, FailureStage::Admission, contacted, message)
            }
            LocalEnd::Disconnected { written } => {
                let (stage, contacted) =
                    if written { reached(progress) } else { (FailureStage::Admission, ProviderContacted::No) };
                ExecutionFailure::new(FailureCode::Disconnected, stage, contacted, "the connection to the node ended")
            }
        };
        failed(self.wire, seq, failure)
    }

    /// Called with the inbox locked: subscribers see a run's events in their order.
    fn publish(&self, piece: &Piece, wakers: &mut Wakers) {
        if let Piece::Event(event) = piece
            && self.shared.runs.is_heard()
        {
            self.shared.runs.publish(&Arc::new(RunNotice { run_id: self.run_id, event: event.clone() }), wakers);
        }
    }

    fn discard(&self, inbox: &mut Inbox) {
        let charged: u64 = inbox.queue.drain(..).map(|(_, charge)| u64::from(charge)).sum();
        self.shared.pool.remove(charged);
        inbox.waiting_since = None;
    }

    /// The client takes the oldest message; credit goes back to the Node in time (WIR-7).
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>, now: impl FnOnce() -> Instant) -> Poll<Piece> {
        let mut inbox = self.lock();
        let Some((mut piece, charge)) = inbox.queue.pop_front() else {
            match &mut inbox.reader {
                Some(reader) => reader.clone_from(cx.waker()),
                empty => *empty = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        };
        inbox.taken += 1;
        if let Piece::Event(event) = &mut piece {
            event.seq = inbox.taken;
        }
        inbox.waiting_since = if inbox.queue.is_empty() { None } else { Some(now()) };
        if !self.commit.explicit && is_content(&piece) {
            self.commit.mark.set();
        }
        let grant = if charge == 0 { None } else { inbox.window.consume(charge).filter(|_| !inbox.ended) };
        drop(inbox);
        self.shared.pool.remove(u64::from(charge));
        if let Some(bytes) = grant {
            // The number is filled in when the message is written.
            let credit = ToNode::Credit(RunNumber(0), bytes);
            if self.connection.outbox.push_run_control(self.key, credit).is_err() {
                self.shared.overflow(self.connection.id);
            }
        }
        Poll::Ready(piece)
    }

    /// The client is gone: what waits is dropped. True if the run has to be cancelled.
    pub(crate) fn leave(&self) -> bool {
        let mut inbox = self.lock();
        self.discard(&mut inbox);
        !inbox.ended
    }

    /// Since when the client has left something waiting, while it still holds the run up.
    pub(crate) fn waiting_since(&self) -> Option<Instant> {
        self.lock().waiting_since
    }

    /// Whatever waits for the client waits since now.
    pub(crate) fn excuse(&self, now: Instant) {
        if let Some(since) = &mut self.lock().waiting_since {
            *since = now;
        }
    }

    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.lock().queue.len()
    }

    /// A client that left its terminal waiting, too: frees what waits and leaves a shorter end (`slow_client`).
    pub(crate) fn truncate(&self, reason: CancelReason, now: Instant) {
        let mut wakers = Wakers::default();
        let mut inbox = self.lock();
        if inbox.ended && inbox.queue.len() > 1 {
            self.discard(&mut inbox);
            let piece = self.terminal(LocalEnd::Cancelled(reason), inbox.received + 1, inbox.progress);
            inbox.push(piece, 0, now, &mut wakers);
        }
        drop(inbox);
        wakers.wake();
    }
}

impl Inbox {
    fn push(&mut self, piece: Piece, charge: u32, now: Instant, wakers: &mut Wakers) {
        self.waiting_since.get_or_insert(now);
        let merged = self.queue.back_mut().is_some_and(|(last, _)| last.absorb(&piece));
        if !merged {
            self.queue.push_back((piece, charge));
            wakers.extend(self.reader.take());
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let inbox = self.inbox.get_mut().unwrap_or_else(PoisonError::into_inner);
        let charged: u64 = inbox.queue.iter().map(|(_, charge)| u64::from(*charge)).sum();
        self.shared.pool.remove(charged);
    }
}

/// The failure terminal of a wire.
pub(crate) fn failed(wire: WireKind, seq: u64, failure: ExecutionFailure) -> Piece {
    match wire {
        WireKind::Run => Piece::Event(RunEvent { seq, kind: RunEventKind::Error(failure), usage: None }),
        WireKind::Tunnel => Piece::Frame(TunnelFrame::Failed(failure)),
    }
}

/// The cancelled terminal of a wire.
pub(crate) fn cancelled(wire: WireKind, reason: CancelReason) -> Piece {
    match wire {
        WireKind::Run => Piece::Event(RunEvent { seq: 1, kind: RunEventKind::Cancelled(reason), usage: None }),
        WireKind::Tunnel => Piece::Frame(TunnelFrame::Cancelled(reason)),
    }
}

/// What the head of a tunnel's answer says of its provider; nothing where it is no error.
fn head_verdict(piece: &Piece) -> Option<Verdict> {
    let Piece::Frame(TunnelFrame::Head(head)) = piece else { return None };
    let retry_after = complaint::retry_after_ms(&head.headers).map(|ms| Duration::from_millis(u64::from(ms)));
    match Verdict::of_status(head.status, retry_after) {
        Verdict::Good => None,
        verdict @ (Verdict::Neutral | Verdict::Fault | Verdict::Busy { .. }) => Some(verdict),
    }
}

/// Something that a client may show to people.
const fn is_content(piece: &Piece) -> bool {
    match piece {
        Piece::Event(event) => match event.kind {
            RunEventKind::Delta(_) | RunEventKind::ReasoningDelta(_) | RunEventKind::ToolCallDelta(_) => true,
            RunEventKind::Start
            | RunEventKind::Usage
            | RunEventKind::Complete(_)
            | RunEventKind::Error(_)
            | RunEventKind::Cancelled(_) => false,
        },
        Piece::Frame(frame) => match frame {
            // Without flags it is a document, or comments: the first can't be taken back.
            TunnelFrame::Body { flags, .. } => flags.contains(FrameFlags::CONTENT) || flags.bits() == 0,
            TunnelFrame::Head(_)
            | TunnelFrame::Usage(_)
            | TunnelFrame::End
            | TunnelFrame::Failed(_)
            | TunnelFrame::Cancelled(_) => false,
        },
    }
}

const fn reached(progress: Progress) -> (FailureStage, ProviderContacted) {
    match progress {
        Progress::Dispatched => (FailureStage::Connect, ProviderContacted::Unknown),
        Progress::Started => (FailureStage::Prefill, ProviderContacted::Unknown),
        Progress::Output => (FailureStage::Stream, ProviderContacted::Yes),
    }
}

/// Where a message takes a run; `None` = it may not come now (WIR-6, W7): a head
/// comes first and once, a body after it; a terminal may come at any time.
const fn next_progress(progress: Progress, piece: &Piece) -> Option<Progress> {
    match piece {
        Piece::Event(event) => match event.kind {
            RunEventKind::Start => match progress {
                Progress::Dispatched => Some(Progress::Started),
                Progress::Started | Progress::Output => None,
            },
            RunEventKind::Delta(_) | RunEventKind::ReasoningDelta(_) | RunEventKind::ToolCallDelta(_) => {
                Some(Progress::Output)
            }
            RunEventKind::Usage | RunEventKind::Complete(_) | RunEventKind::Error(_) | RunEventKind::Cancelled(_) => {
                Some(progress)
            }
        },
        Piece::Frame(frame) => match frame {
            TunnelFrame::Head(_) => match progress {
                Progress::Dispatched => Some(Progress::Output),
                Progress::Started | Progress::Output => None,
            },
            TunnelFrame::Body { .. } | TunnelFrame::Usage(_) => match progress {
                Progress::Output => Some(Progress::Output),
                Progress::Dispatched | Progress::Started => None,
            },
            TunnelFrame::End | TunnelFrame::Failed(_) | TunnelFrame::Cancelled(_) => Some(progress),
        },
    }
}
