//! A provider whose probes are scripted, and runs with a short limit.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use iop_execution::failure::StallDetail;
use iop_execution::provider::Refreshed;
use iop_execution::testkit::{Script, ScriptHandle, ScriptedProvider};
use iop_execution::{
    AdapterKey, Capabilities, CommandOutput, Completion, EventSink, ExecutionFailure, HeadSink, Health, Provider,
    ProviderCommand, ProviderError, RunEventKind, RunRequest, SessionId, Target, TunnelEnd, TunnelFrame, TunnelRequest,
};
use iop_wire::*;

use crate::support::*;

pub(crate) const STALL: Duration = Duration::from_secs(2);
pub(crate) const SLOW: Duration = Duration::from_secs(3);

/// What every probe does.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer {
    After(Duration, Health),
    Hang,
    Panic,
}

impl Answer {
    pub(crate) const fn now(health: Health) -> Self {
        Self::After(Duration::ZERO, health)
    }
}

/// A provider with scripted probes.
#[derive(Debug)]
struct Probed<P> {
    inner: P,
    answer: Answer,
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<P: Provider> Provider for Probed<P> {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        self.inner.execute(run, sink).await
    }
    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        self.inner.tunnel(request, head).await
    }
    async fn probe_health(&self, target: &Target) -> Health {
        assert_eq!(target.as_str(), "t", "exactly the stalled target");
        self.inner.probe_health(target).await;
        match self.answer {
            Answer::After(time, health) => {
                if !time.is_zero() {
                    tokio::time::sleep(time).await;
                }
                health
            }
            Answer::Hang => std::future::pending().await,
            Answer::Panic => panic!("in a probe"),
        }
    }
    async fn command(&self, command: ProviderCommand) -> Result<CommandOutput, ProviderError> {
        self.inner.command(command).await
    }
    async fn start(&self) -> Result<(), ProviderError> {
        self.inner.start().await
    }
    async fn refresh(&self) -> Refreshed {
        self.inner.refresh().await
    }
    async fn stop(&self) {
        self.inner.stop().await;
    }
}

/// Says one word, hears of its cancel, tries to say one more, and returns as if nothing had been.
#[derive(Debug)]
pub(crate) struct Stubborn;

#[async_trait]
impl Provider for Stubborn {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only()
    }
    async fn execute(&self, _: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        sink.delta("a").await?;
        sink.cancelled().await;
        assert!(sink.delta("late").await.is_err());
        Ok(Completion::new(iop_execution::FinishReason::Stop))
    }
}

pub(crate) fn scripted(script: Script, answer: Answer) -> (Harness, ScriptHandle) {
    let inner = ScriptedProvider::new(script).with_tunnels();
    let handle = inner.handle();
    (Harness::new(Arc::new(Probed { inner, answer })), handle)
}

pub(crate) fn scripted_then(first: Script, then: Script, answer: Answer) -> (Harness, ScriptHandle) {
    let inner = ScriptedProvider::new(first).then(then).with_tunnels();
    let handle = inner.handle();
    (Harness::new(Arc::new(Probed { inner, answer })), handle)
}

pub(crate) fn with_provider(inner: impl Provider, answer: Answer) -> (Harness, ()) {
    (Harness::new(Arc::new(Probed { inner, answer })), ())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    Run,
    Tunnel,
}

/// A request that stalls after [`STALL`].
pub(crate) fn stalling(number: u64) -> DispatchHead {
    DispatchHead { response_stall_timeout_ms: 2_000, ..head(number) }
}

pub(crate) fn detail(failure: &ExecutionFailure) -> &StallDetail {
    failure.stall.as_deref().unwrap_or_else(|| panic!("a stall expected, not {failure:?}"))
}

/// Runs a request to its stall.
pub(crate) async fn stall(conn: &mut Conn, number: u64, wire: Wire) -> ExecutionFailure {
    conn.send_stalling(number, wire);
    conn.expect_accepted(number).await;
    let failure = conn.end_of(number, wire).await.expect("it ended well");
    detail(&failure);
    failure
}

pub(crate) fn capabilities(command_id: u64, adapter: &str, target: Option<&str>, deadline_ms: u64) -> ToNode {
    ToNode::Command(CommandRequest {
        command_id,
        session_id: Some(SessionId::new("s").unwrap()),
        deadline_ms,
        command: NodeCommand::Capabilities {
            adapter: AdapterKey::new(adapter).unwrap(),
            target: target.map(|target| Target::new(target).unwrap()),
        },
    })
}

pub(crate) fn observed(response: &CommandResponse) -> &TargetHealth {
    match &response.outcome {
        Ok(CommandResult::Capabilities(CapabilitiesResult { health: Some(health), .. })) => health,
        other => panic!("an observation expected, not {other:?}"),
    }
}

impl Conn {
    pub(crate) fn send_stalling(&mut self, number: u64, wire: Wire) {
        let head = stalling(number);
        self.send_on(head, wire);
    }

    pub(crate) fn send_on(&mut self, head: DispatchHead, wire: Wire) {
        match wire {
            Wire::Run => self.send_run(head),
            Wire::Tunnel => {
                let number = head.run.0;
                let ToNode::Tunnel(mut dispatch) = tunnel(number, 4) else { unreachable!() };
                dispatch.head = DispatchHead { body_len: 4, ..head };
                self.send(ToNode::Tunnel(dispatch));
                self.send(chunk(number, "body", true));
            }
        }
    }

    /// How this request fails; `None` if it ends well.
    pub(crate) async fn end_of(&mut self, number: u64, wire: Wire) -> Option<ExecutionFailure> {
        match wire {
            Wire::Run => match self.rest(number).await.pop() {
                Some(RunEventKind::Error(failure)) => Some(failure),
                Some(RunEventKind::Complete(_)) => None,
                other => panic!("{other:?}"),
            },
            Wire::Tunnel => loop {
                match self.frame(number).await {
                    TunnelFrame::Failed(failure) => return Some(failure),
                    TunnelFrame::End => return None,
                    TunnelFrame::Cancelled(reason) => panic!("cancelled: {reason}"),
                    TunnelFrame::Head(_) | TunnelFrame::Body { .. } | TunnelFrame::Usage(_) => {}
                }
            },
        }
    }

    /// Takes one message and keeps it for later; false if none comes for this long (virtual).
    pub(crate) async fn stash_one(&mut self, time: Duration) -> bool {
        match tokio::time::timeout(time, self.receive()).await {
            Ok(message) => {
                self.stash.push(message.expect("the connection ended"));
                true
            }
            Err(_) => false,
        }
    }

    /// The next answer to a command; what belongs to runs waits for its turn.
    pub(crate) async fn response(&mut self) -> CommandResponse {
        loop {
            match self.receive().await.expect("the connection ended") {
                ToEdge::CommandResponse(response) => return response,
                other => self.stash.push(other),
            }
        }
    }
}
