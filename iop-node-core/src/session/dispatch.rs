//! Decides what each message of a ready connection does.

use std::sync::Arc;

use iop_execution::execution::Emit;
use iop_execution::{ExecutionFailure, FailureCode, FailureStage, ProviderContacted, RunEvent, TunnelFrame, Usage};
use iop_wire::{
    CloseCode, DispatchHead, Pong, RequestChunk, RunDispatch, RunKey, RunNumber, ToEdge, ToNode, TunnelDispatch,
};
use tokio::sync::oneshot;

use super::{End, Finished, RunHandle, Session, now, window_is_legal};
use crate::body::{BodyStream, Inbox};
use crate::drive::{Control, Entry, Stop, Work};
use crate::journal::Opened;
use crate::observe::{RunOutcome, RunPath};
use crate::probe::Probe;
use crate::state::admit::{Admitted, admit};
use crate::state::emit::{Emitter, Output};
use crate::state::runs::{ChunkStep, RunViolation};
use crate::state::watchdog::{Limits, Watchdog};
use crate::{run, tunnel};

enum Request {
    Run(RunDispatch),
    Tunnel(TunnelDispatch),
}

impl Request {
    const fn head(&self) -> &DispatchHead {
        match self {
            Self::Run(request) => &request.head,
            Self::Tunnel(request) => &request.head,
        }
    }

    const fn path(&self) -> RunPath {
        match self {
            Self::Run(_) => RunPath::Run,
            Self::Tunnel(_) => RunPath::Tunnel,
        }
    }

    fn failed(&self, number: RunNumber, failure: ExecutionFailure) -> ToEdge {
        match self {
            Self::Run(_) => RunEvent::failed(0, failure).into_message(number),
            Self::Tunnel(_) => TunnelFrame::failed(0, failure).into_message(number),
        }
    }
}

impl From<RunViolation> for End {
    fn from(violation: RunViolation) -> Self {
        tracing::warn!(%violation, "the Edge broke the protocol");
        Self::Close(CloseCode::ProtocolViolation)
    }
}

impl Session<'_> {
    pub(super) fn dispatch(&mut self, message: ToNode) -> Result<(), End> {
        match message {
            ToNode::Run(request) => self.begin(Request::Run(request)),
            ToNode::Tunnel(request) => self.begin(Request::Tunnel(request)),
            ToNode::Chunk(chunk) => self.chunk(chunk),
            ToNode::Credit(number, bytes) => {
                // A run that has ended here may still have output that waits for this credit.
                if self.outbox.key_of(number).is_none() {
                    self.runs.find(number)?;
                }
                self.outbox.grant(RunKey(number.0), bytes).map_err(|error| {
                    tracing::warn!(%error, run = %number, "the Edge broke the protocol");
                    End::Close(CloseCode::FlowControl)
                })
            }
            ToNode::Cancel(number, reason) => {
                if let Some(handle) = self.runs.find(number)? {
                    handle.stop(Stop::Cancel(reason));
                }
                Ok(())
            }
            ToNode::Command(request) => self.command(request),
            ToNode::ConfigUpdate(update) => self.config_pushed(update),
            ToNode::Ping(ping) => self.control(ToEdge::Pong(Pong { nonce: ping.nonce, edge_time_ms: 0 })),
            ToNode::Pong(pong) => {
                if let (Some(leases), Some((nonce, sent))) = (&self.leases, self.pinged)
                    && nonce == pong.nonce
                {
                    leases.observe(pong.edge_time_ms, sent, now());
                }
                self.heartbeat.handle_pong(now(), pong.nonce);
                Ok(())
            }
            ToNode::Drain(drain) => {
                tracing::info!(deadline_ms = drain.deadline_ms, "the Edge is going down");
                Ok(())
            }
            ToNode::Goodbye(goodbye) => {
                let retry_after = std::time::Duration::from_millis(u64::from(goodbye.retry_after_ms));
                Err(End::Peer { code: goodbye.code, retry_after })
            }
            // The handshake lets nothing else pass.
            _ => Err(End::Close(CloseCode::ProtocolViolation)),
        }
    }

    /// A request arrived: receipt first (WIR-14), then the checks, then a task of its own.
    fn begin(&mut self, request: Request) -> Result<(), End> {
        let head = request.head();
        let (number, path, run_id) = (head.run, request.path(), head.run_id);
        self.runs.begin(number)?;
        if !window_is_legal(head.window) {
            tracing::warn!(run = %number, "the Edge granted more credit than a run may have");
            return Err(End::Close(CloseCode::FlowControl));
        }
        let key = self.outbox.open(number, head.window);
        self.outbox
            .push_run_control(key, ToEdge::Accepted(number))
            .map_err(|_| End::Close(CloseCode::ControlOverflow))?;
        let draining = !self.takes_new_work();
        let (leases, observer) = (self.leases.as_ref(), self.node.observer.as_ref());
        let admitted = match admit(head, &self.node.adapters(), draining, leases, observer, now()) {
            Ok(admitted) => admitted,
            Err(failure) => {
                tracing::debug!(run = %number, %run_id, path = path.as_str(), code = %failure.code, "refused");
                let code = failure.code;
                self.outbox.push(key, request.failed(number, failure));
                self.outbox.close(key);
                self.node.observer.run_ended(path, RunOutcome::Refused(code));
                return Ok(());
            }
        };
        tracing::debug!(run = %number, %run_id, path = path.as_str(), provider = %head.provider_id, "run started");
        self.node.observer.run_started(path);
        self.spawn(request, number, key, admitted);
        Ok(())
    }

    fn spawn(&mut self, request: Request, number: RunNumber, key: RunKey, admitted: Admitted) {
        let body_len = request.head().body_len;
        let inbox = Inbox::new(body_len == 0);
        let (stop, stopped) = oneshot::channel();
        let (connected, gone) = oneshot::channel();
        let body = BodyStream {
            inbox: Arc::clone(&inbox),
            number,
            key,
            outbox: self.outbox.clone(),
            fault: self.fault.clone(),
        };
        let close_grace = admitted.adapter.close_grace();
        self.runs.open(
            number,
            body_len,
            RunHandle { stop: Some(stop), connected: Some(connected), inbox, close_grace },
        );
        let path = request.path();
        match request {
            Request::Run(RunDispatch { head }) => {
                let provider = Arc::clone(admitted.adapter.provider());
                let stall_timeout = admitted.stall_timeout;
                let entry = self.entry(&head, path);
                let control = Control::new(stopped, gone, admitted.deadline);
                let work = self.work(&head, key, control, admitted, entry);
                self.tasks.spawn(async move {
                    let outcome = run::execute(work, provider, head, stall_timeout, body).await;
                    Finished { number, path, outcome }
                });
            }
            Request::Tunnel(dispatch) => {
                let provider = Arc::clone(admitted.adapter.provider());
                let stall_timeout = admitted.stall_timeout;
                let entry = self.entry(&dispatch.head, path);
                let control = Control::new(stopped, gone, admitted.deadline);
                let work = self.work(&dispatch.head, key, control, admitted, entry);
                self.tasks.spawn(async move {
                    let outcome = tunnel::execute(work, provider, dispatch, stall_timeout, body).await;
                    Finished { number, path, outcome }
                });
            }
        }
    }

    fn work<E: Output>(
        &self,
        head: &DispatchHead,
        key: RunKey,
        control: Control,
        admitted: Admitted,
        entry: Entry,
    ) -> Work<E> {
        let Admitted { adapter, permit, stall_timeout, deadline: _, lease } = admitted;
        let (config, close_grace) = (adapter.config(), adapter.close_grace());
        let limits = Limits::new(stall_timeout, config, close_grace, head.prompt_tokens_estimate);
        Work {
            outbox: self.outbox.clone(),
            key,
            control,
            emitter: Emitter::new(head.run),
            permit: Some(permit),
            lease,
            watchdog: Watchdog::new(limits, config.cancel_policy, now()),
            adapter: head.adapter.clone(),
            probe: Probe {
                provider: Arc::clone(adapter.provider()),
                target: head.target.clone(),
                observations: self.observations.clone(),
            },
            close_grace,
            cancel_policy: config.cancel_policy,
            background: self.node.background.clone(),
            observer: Arc::clone(&self.node.observer),
            entry,
        }
    }

    fn entry(&self, head: &DispatchHead, path: RunPath) -> Entry {
        let journal = Arc::clone(&self.node.journal);
        let key = journal.opened(Opened {
            run_id: head.run_id,
            path,
            adapter: head.adapter.clone(),
            target: head.target.clone(),
            session_id: head.session_id.clone(),
            background: head.background,
        });
        Entry { journal, key, usage: Usage::default() }
    }

    fn chunk(&mut self, chunk: RequestChunk) -> Result<(), End> {
        let number = chunk.run;
        match self.runs.chunk(number, chunk.data.len() as u64, chunk.last)? {
            ChunkStep::Late => Ok(()),
            ChunkStep::Broken => {
                tracing::warn!(run = %number, "the request body has not the announced length");
                if let Some(handle) = self.runs.get_mut(number) {
                    handle.stop(Stop::Fail(Box::new(ExecutionFailure::new(
                        FailureCode::Internal,
                        FailureStage::Admission,
                        ProviderContacted::Unknown,
                        "the request body has not the announced length",
                    ))));
                }
                Ok(())
            }
            ChunkStep::Deliver { complete } => {
                let Some(handle) = self.runs.get_mut(number) else { return Ok(()) };
                let grant = handle.inbox.receive(chunk, complete).map_err(|error| {
                    tracing::warn!(%error, run = %number, "the Edge broke the protocol");
                    End::Close(CloseCode::FlowControl)
                })?;
                let Some(grant) = grant else { return Ok(()) };
                self.outbox
                    .push_run_control(RunKey(number.0), ToEdge::Credit(number, grant))
                    .map_err(|_| End::Close(CloseCode::ControlOverflow))
            }
        }
    }
}
