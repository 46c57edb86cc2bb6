//! Decides how a wrapper stands between a provider and its sink: every emission passes through its hands.
//!
//! The wrapped call is an execution of its own. A cancel from outside reaches it as a cancel; dropping the wrapper's future
//! drops it.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use iop_execution::event::RunEventKind;
use iop_execution::{
    CancelReason, Completion, EventSink, Fenced, HeadSink, Provider, ProviderError, RunExecution, RunRequest,
    TunnelEnd, TunnelExecution, TunnelFrame, TunnelRequest,
};

/// What an emission was, without its payload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Emitted {
    pub(super) what: &'static str,
    pub(super) bytes: usize,
    pub(super) terminal: bool,
}

/// A wrapper's say about every emission, before it is passed on.
#[async_trait]
pub(super) trait Hook: Send {
    /// An error ends the call with it; the emission is not passed on.
    async fn before(&mut self, emitted: Emitted) -> Result<(), ProviderError>;
}

/// Runs a step of the wrapper until it ends or the run is cancelled.
pub(super) async fn unless_cancelled(
    cancelled: impl Future<Output = ()> + Send,
    step: impl Future<Output = Result<(), ProviderError>> + Send,
) -> Result<(), ProviderError> {
    match select(std::pin::pin!(cancelled), std::pin::pin!(step)).await {
        Either::Left(((), _)) => Err(Fenced.into()),
        Either::Right((verdict, _)) => verdict,
    }
}

/// The next item, or the end of the wrapped call after a cancel from outside.
macro_rules! next_or_cancel {
    ($execution:ident, $cancelled:ident) => {
        match select($cancelled.as_mut(), $execution.next()).await {
            Either::Right((item, _)) => item,
            Either::Left(_) => {
                $execution.cancel(CancelReason::Client);
                while $execution.next().await.is_some() {}
                return Err(Fenced.into());
            }
        }
    };
}

pub(super) async fn run(
    inner: &Arc<dyn Provider>,
    request: RunRequest,
    sink: &mut EventSink,
    hook: &mut dyn Hook,
) -> Result<Completion, ProviderError> {
    let mut cancelled = std::pin::pin!(sink.cancelled());
    let mut execution = RunExecution::run(Arc::clone(inner), request);
    while let Some(event) = next_or_cancel!(execution, cancelled) {
        let (what, terminal) = name_of(&event.kind);
        if !matches!(event.kind, RunEventKind::Start) {
            let emitted = Emitted { what, bytes: event.kind.payload_bytes(), terminal };
            unless_cancelled(cancelled.as_mut(), hook.before(emitted)).await?;
        }
        match event.kind {
            RunEventKind::Start => {}
            RunEventKind::Delta(text) => sink.delta(text).await?,
            RunEventKind::ReasoningDelta(text) => sink.reasoning_delta(text).await?,
            RunEventKind::ToolCallDelta(call) => sink.tool_call(call).await?,
            RunEventKind::Usage => sink.usage(event.usage.unwrap_or_default()).await?,
            RunEventKind::Complete(finish) => return Ok(Completion::new(finish).with_usage(event.usage)),
            RunEventKind::Error(failure) => return Err(ProviderError::new(failure)),
            RunEventKind::Cancelled(_) => return Err(Fenced.into()),
        }
    }
    Err(ProviderError::ended_without_terminal())
}

pub(super) async fn tunnel(
    inner: &Arc<dyn Provider>,
    request: TunnelRequest,
    head: HeadSink,
    hook: &mut dyn Hook,
) -> Result<TunnelEnd, ProviderError> {
    let mut cancelled = std::pin::pin!(head.cancelled());
    let mut execution = TunnelExecution::tunnel(Arc::clone(inner), request);
    let (mut head, mut body) = (Some(head), None);
    while let Some(frame) = next_or_cancel!(execution, cancelled) {
        let emitted = Emitted { what: frame_name(&frame), bytes: frame.payload_bytes(), terminal: frame.is_terminal() };
        unless_cancelled(cancelled.as_mut(), hook.before(emitted)).await?;
        match (frame, &mut body) {
            (TunnelFrame::Head(sent), _) => {
                if let Some(head) = head.take() {
                    body = Some(head.head(sent.status, sent.headers).await?);
                }
            }
            (TunnelFrame::Body { bytes, flags }, Some(body)) => body.data(bytes, flags).await?,
            (TunnelFrame::Usage(usage), Some(body)) => body.usage(usage).await?,
            (TunnelFrame::End, _) => {
                return body.map(iop_execution::BodySink::finish).ok_or_else(ProviderError::ended_without_terminal);
            }
            (TunnelFrame::Failed(failure), _) => return Err(ProviderError::new(failure)),
            (TunnelFrame::Cancelled(_), _) => return Err(Fenced.into()),
            // The sink's types make a body before a head impossible.
            (TunnelFrame::Body { .. } | TunnelFrame::Usage(_), None) => {}
        }
    }
    Err(ProviderError::ended_without_terminal())
}

const fn name_of(kind: &RunEventKind) -> (&'static str, bool) {
    match kind {
        RunEventKind::Start => ("start", false),
        RunEventKind::Delta(_) => ("delta", false),
        RunEventKind::ReasoningDelta(_) => ("reasoning_delta", false),
        RunEventKind::ToolCallDelta(_) => ("tool_call_delta", false),
        RunEventKind::Usage => ("usage", false),
        RunEventKind::Complete(_) => ("complete", true),
        RunEventKind::Error(_) => ("error", true),
        RunEventKind::Cancelled(_) => ("cancelled", true),
    }
}

const fn frame_name(frame: &TunnelFrame) -> &'static str {
    match frame {
        TunnelFrame::Head(_) => "head",
        TunnelFrame::Body { .. } => "body",
        TunnelFrame::Usage(_) => "usage",
        TunnelFrame::End => "end",
        TunnelFrame::Failed(_) => "failed",
        TunnelFrame::Cancelled(_) => "cancelled",
    }
}
