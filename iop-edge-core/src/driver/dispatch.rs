//! Decides how a request becomes a run: a place or a wait for one, then the pre-send fence and the request in one step.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use iop_execution::failure::CredentialReason;
use iop_execution::{CancelReason, ExecutionFailure, FailureCode, Redacted, RunId};
use iop_wire::convert::WireMessage as _;
use iop_wire::limits::INITIAL_WINDOW;
use iop_wire::{DispatchHead, RunDispatch, RunNumber, ToNode, TunnelDispatch};
use tokio::sync::oneshot;

use crate::api::{
    Admitted, CommitMark, EndNote, EndNotes, Output, Payload, Submit, SubmitError, Submitted, Wanted, WireKind,
};
use crate::catalog::RetryOn;
use crate::driver::lease::{self, ISSUE_TRIES, NoLease, issue};
use crate::driver::run::{Commit, Piece, Run, RunIdentity, cancelled, failed};
use crate::driver::shared::{Shared, now};
use crate::driver::stream::{Source, ended};
use crate::observe::{CredentialRefuser, Observation};
use crate::state::{Admission, Ask, AttemptId, Avoid, Denial, Grant, NoOrder, PreSendEnd};

/// Longest HTTP method of a tunnel: none that is registered is longer, and no other part of a request is unbounded.
const MAX_METHOD: usize = 32;

/// What the owner of an attempt holds until it is dispatched. Dropping it takes the waiter out of its queue, or gives the
/// place back (LEA-7).
struct Claim {
    shared: Arc<Shared>,
    attempt: Option<AttemptId>,
}

impl Claim {
    /// The attempt is dispatched, or over: the ledger's record owns the place now.
    fn settle(mut self) {
        self.attempt = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(attempt) = self.attempt {
            self.shared.with(|core, now| {
                core.waiters.remove(&attempt);
                core.state.abandon(attempt, now);
            });
        }
    }
}

/// Admits, asks `prepare` what to send, and dispatches. See [`crate::api::Engine::submit`].
pub(crate) async fn submit(
    shared: &Arc<Shared>,
    request: Submit,
    wanted: Option<Wanted>,
    prepare: impl FnOnce(&Admitted) -> Payload + Send,
) -> Result<Submitted, SubmitError> {
    // Without randomness there is no run id, so nothing can be admitted.
    let run_id = shared.entropy.run_id().map_err(|_| SubmitError::Unavailable)?;
    let ask = Ask {
        run_id,
        destination: request.destination.clone(),
        wanted,
        caller: request.principal.clone(),
        priority: request.priority,
        deadline: request.deadline,
        prompt_tokens_estimate: request.prompt_tokens_estimate,
        prompt_prefix: request.prompt_prefix,
        avoid: request
            .avoid_provider_id
            .clone()
            .map(|provider| Avoid { provider, fallback: request.allow_avoided_provider_fallback }),
    };
    let (grant, claim) = match admit(shared, ask).await? {
        Placed::Granted(grant, claim) => (grant, claim),
        Placed::Denied(denial) => return Ok(turned_away(shared, *denial)),
    };
    let admitted = Admitted {
        run_id,
        node: grant.node.clone(),
        provider: grant.provider.clone(),
        adapter: grant.adapter.clone(),
        target: grant.target.clone(),
        wire: grant.wire,
        queued: grant.queued,
        retry_on: grant.retry_on,
    };
    let payload = prepare(&admitted);
    let (commit, notes) = (CommitMark::default(), EndNotes::default());
    let owner = Commit { mark: commit.clone(), explicit: request.explicit_commit, notes: notes.clone() };
    let output = dispatch(shared, &request, &grant, payload, owner)?;
    claim.settle();
    Ok(Submitted { admitted, commit, notes, output })
}

/// What became of a request that asked for a place.
enum Placed {
    Granted(Box<Grant>, Claim),
    /// Its caller may use none of what could serve it.
    Denied(Box<Denial>),
}

async fn admit(shared: &Arc<Shared>, ask: Ask) -> Result<Placed, SubmitError> {
    let claim = |attempt| Claim { shared: Arc::clone(shared), attempt: Some(attempt) };
    let (sender, mut receiver) = oneshot::channel();
    let admission = shared.with(|core, now| {
        let admission = core.state.submit(ask, now)?;
        if let Admission::Queued(attempt, _) = &admission {
            core.waiters.insert(*attempt, sender);
        }
        Ok(admission)
    })?;
    let (attempt, until) = match admission {
        Admission::Granted(grant) => {
            let claim = claim(grant.attempt);
            return Ok(Placed::Granted(grant, claim));
        }
        Admission::Denied(denial) => return Ok(Placed::Denied(denial)),
        Admission::Queued(attempt, until) => (attempt, until),
    };
    let claim = claim(attempt);
    let answer = tokio::select! {
        biased;
        answer = &mut receiver => answer,
        () = tokio::time::sleep_until(until.into()) => {
            // The engine decides how the wait ends; this only makes sure that somebody asks in time.
            shared.tick();
            receiver.await
        }
    };
    // The engine answers every waiter; a lost answer could only mean that the waiter is gone.
    let grant = answer.unwrap_or(Err(SubmitError::Cancelled))?;
    Ok(Placed::Granted(grant, claim))
}

/// The end of a request for which nobody was asked anything: no credential, and nothing in its place (CRD-15).
fn turned_away(shared: &Shared, denial: Denial) -> Submitted {
    let Denial { run_id, node, provider, adapter, target, wire, reason } = denial;
    let output = ended(run_id, refused(shared, run_id, reason, wire));
    let retry_on = RetryOn::NONE;
    let admitted = Admitted { run_id, node, provider, adapter, target, wire, queued: Duration::ZERO, retry_on };
    let notes = EndNotes::default();
    notes.set(EndNote::NotSent);
    Submitted { admitted, commit: CommitMark::default(), notes, output }
}

/// Counts and logs a request that no lease is issued for. The log names the reason, the client is told none.
fn refused(shared: &Shared, run_id: RunId, reason: CredentialReason, wire: WireKind) -> Piece {
    tracing::warn!(target: "iop_audit", %run_id, %reason, "no credential lease is issued");
    shared.observe(&Observation::CredentialRefused { by: CredentialRefuser::Edge, reason });
    failed(wire, 1, lease::denied(reason))
}

fn dispatch(
    shared: &Arc<Shared>,
    request: &Submit,
    grant: &Grant,
    payload: Payload,
    commit: Commit,
) -> Result<Output, SubmitError> {
    let (payload, body) = split(payload, grant.wire)?;
    let window = shared.pool.window();
    let head = head(request, grant, body.len(), window, now());
    let notes = commit.notes.clone();
    let opened = open(shared, grant, payload, head, commit, window);
    Ok(match opened {
        Ok(run) => {
            let mut source = Source::new(Arc::clone(shared), run, body, request.deadline);
            // What fits goes now; the rest when the stream is polled.
            let _more = source.poll_body(&mut Context::from_waker(Waker::noop()));
            source.into_output(grant.run_id, grant.wire)
        }
        Err(unsent) => {
            notes.set(EndNote::NotSent);
            // Where it still holds its place, that is free before its end is seen.
            shared.with(|core, now| core.state.abandon(grant.attempt, now));
            ended(grant.run_id, pre_send(shared, unsent, grant))
        }
    })
}

/// Issues the lease that the provider needs, and hands the request to the session: the place is still held, the lease is
/// still the right one, and the connection still current in that one step.
fn open(
    shared: &Arc<Shared>,
    grant: &Grant,
    payload: Request,
    mut head: DispatchHead,
    commit: Commit,
    window: u32,
) -> Result<Arc<Run>, Unsent> {
    let mut lease = None;
    // Most requests need none, and pay nothing for it.
    let tries = if grant.needs_lease { ISSUE_TRIES } else { 0 };
    for _ in 0..tries {
        lease = match issue(shared, grant) {
            // `dispatch` says what became of it.
            Err(NoLease::NoOrder(NoOrder::Gone)) => break,
            made => made?,
        };
        let order = lease.as_ref().map(|lease| &lease.order);
        if shared.with(|core, _| core.state.lease_fits(grant.attempt, order)) != Ok(false) {
            break;
        }
    }
    if let Some(lease) = &lease {
        lease.attach(&mut head)?;
    }
    let message = payload.into_message(head);
    let legal = check(&message);
    shared
        .with(|core, now| {
            let id = core.state.dispatch(grant.attempt, now)?;
            let order = lease.as_ref().map(|lease| &lease.order);
            let fits = match core.state.lease_fits(grant.attempt, order) {
                Ok(true) => Ok(()),
                // It needed none when it was granted, and what runs keeps the config it began with (CFG-2). Should its Node
                // want one by now, that refuses it.
                Err(NoOrder::Gone) if !grant.needs_lease => Ok(()),
                // The Node wants one already: another attempt gets it.
                Ok(false) if !grant.needs_lease => Err(Unsent::Ended(PreSendEnd::Disconnected)),
                Ok(false) => Err(Unsent::Refused("its credentials change faster than leases are made")),
                Err(none) => Err(none.into()),
            };
            if let Err(unsent) = fits {
                core.state.handle_withdrawn(grant.attempt, now);
                return Err(unsent);
            }
            if let Err(problem) = legal {
                core.state.handle_withdrawn(grant.attempt, now);
                return Err(Unsent::Refused(problem));
            }
            let Some(connection) = core.connections.get(&id).map(Arc::clone) else {
                core.state.handle_withdrawn(grant.attempt, now);
                return Err(Unsent::Ended(PreSendEnd::Disconnected));
            };
            let run = connection.open(message, INITIAL_WINDOW, |key| {
                let (attempt, run_id, wire) = (grant.attempt, grant.run_id, grant.wire);
                let identity = RunIdentity { attempt, run_id, key, wire, leased: order.is_some() };
                Arc::new(Run::new(identity, commit, window, Arc::clone(&connection), Arc::clone(shared), now))
            });
            core.runs.insert(grant.attempt, Arc::clone(&run));
            Ok(run)
        })
        .inspect(|_| {
            if let Some(lease) = &lease {
                lease.record(grant);
                shared.observe(&Observation::CredentialIssued);
            }
        })
}

/// Why an admitted request was not sent.
enum Unsent {
    /// Its attempt was over.
    Ended(PreSendEnd),
    /// Its Node would close the connection over it; the text names a part of the request (W3).
    Refused(&'static str),
    /// No lease may be issued for it (CRD-15).
    Denied(CredentialReason),
}

impl From<PreSendEnd> for Unsent {
    fn from(end: PreSendEnd) -> Self {
        Self::Ended(end)
    }
}

impl From<NoOrder> for Unsent {
    fn from(none: NoOrder) -> Self {
        match none {
            NoOrder::Denied(reason) => Self::Denied(reason),
            NoOrder::Gone => Self::Ended(PreSendEnd::Disconnected),
        }
    }
}

impl From<NoLease> for Unsent {
    fn from(none: NoLease) -> Self {
        match none {
            NoLease::NoOrder(none) => none.into(),
            NoLease::Failed => Self::Refused("no credential lease can be made for it"),
        }
    }
}

/// How an attempt ends that could not be sent: after admission everything is a terminal (EDG-1).
fn pre_send(shared: &Shared, unsent: Unsent, grant: &Grant) -> Piece {
    let wire = grant.wire;
    match unsent {
        Unsent::Denied(reason) => refused(shared, grant.run_id, reason, wire),
        Unsent::Ended(PreSendEnd::Cancelled) => cancelled(wire, CancelReason::Client),
        Unsent::Ended(PreSendEnd::Deadline) => cancelled(wire, CancelReason::EdgeDeadline),
        Unsent::Ended(PreSendEnd::Disconnected) => {
            let message = "the node or its provider went away before the request was sent";
            failed(wire, 1, ExecutionFailure::refused(FailureCode::Disconnected, message))
        }
        Unsent::Refused(problem) => {
            let message = format!("the request can't be sent: {problem}");
            failed(wire, 1, ExecutionFailure::refused(FailureCode::Internal, message))
        }
    }
}

/// A payload without its body and without its head.
enum Request {
    Run,
    Tunnel { method: http::Method, path: String, headers: http::HeaderMap },
}

impl Request {
    fn into_message(self, head: DispatchHead) -> ToNode {
        match self {
            Self::Run => ToNode::Run(RunDispatch { head }),
            Self::Tunnel { method, path, headers } => ToNode::Tunnel(TunnelDispatch {
                head,
                method,
                path: Redacted::new(path),
                headers: Redacted::new(headers),
            }),
        }
    }
}

/// Whether the Node would take this. A message that it would not costs the whole connection once it is pushed (W3).
fn check(message: &ToNode) -> Result<(), &'static str> {
    if let ToNode::Tunnel(request) = message
        && request.method.as_str().len() > MAX_METHOD
    {
        return Err("method is too long");
    }
    message.check().map_err(|error| error.problem)
}

fn split(payload: Payload, wire: WireKind) -> Result<(Request, Bytes), SubmitError> {
    match (payload, wire) {
        (Payload::Run { input }, WireKind::Run) => Ok((Request::Run, input)),
        (Payload::Tunnel { method, path, headers, body }, WireKind::Tunnel) => {
            Ok((Request::Tunnel { method, path, headers }, body))
        }
        (Payload::Run { .. }, WireKind::Tunnel) | (Payload::Tunnel { .. }, WireKind::Run) => {
            Err(SubmitError::InvalidRequest("the payload does not fit the provider's wire"))
        }
    }
}

fn head(request: &Submit, grant: &Grant, body_len: usize, window: u32, now: Instant) -> DispatchHead {
    let left = request.deadline.map(|deadline| deadline.saturating_duration_since(now).as_millis().max(1));
    DispatchHead {
        run_id: grant.run_id,
        run: RunNumber(0),
        provider_id: grant.provider.clone(),
        adapter: grant.adapter.clone(),
        target: grant.target.clone(),
        session_id: request.session_id.clone(),
        background: request.background,
        stream: request.stream,
        response_stall_timeout_ms: grant.stall_timeout_ms,
        deadline_ms: left.map_or(0, |left| u64::try_from(left).unwrap_or(u64::MAX)),
        body_len: u64::try_from(body_len).unwrap_or(u64::MAX),
        window,
        prompt_tokens_estimate: request.prompt_tokens_estimate,
        credential_lease: Redacted::new(Bytes::new()),
        credential_scope: None,
    }
}
