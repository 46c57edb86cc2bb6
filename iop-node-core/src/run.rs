//! Decides how a normalised run is executed: its body is collected and read once, then the provider is called.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::{Bytes, BytesMut};
use futures_core::Stream;
use iop_execution::{
    ChatInput, ExecutionFailure, FailureCode, Provider, RunEvent, RunExecution, RunRequest, StallTimeout,
};
use iop_wire::DispatchHead;

use crate::body::BodyStream;
use crate::drive::{Control, Stop, Work};
use crate::observe::RunOutcome;

/// First allocation for a body in several chunks, in bytes; it grows with what really comes.
const FIRST_BUFFER: usize = 64 * 1024;

/// Collects the body, then runs it on the provider.
pub(crate) async fn execute(
    mut work: Work<RunEvent>,
    provider: Arc<dyn Provider>,
    head: DispatchHead,
    stall_timeout: StallTimeout,
    mut body: BodyStream,
) -> RunOutcome {
    let raw = match collect(&mut work.control, &mut body).await {
        Ok(raw) => raw,
        Err(stop) => return work.refuse(stop),
    };
    let input = match ChatInput::parse(raw) {
        Ok(input) => input,
        Err(error) => {
            let failure = ExecutionFailure::refused(FailureCode::InvalidRequest, error.to_string());
            return work.refuse(Stop::Fail(Box::new(failure)));
        }
    };
    let mut request = RunRequest::new(head.run_id, head.adapter, head.target, input);
    request.session_id = head.session_id;
    request.background = head.background;
    request.stream = head.stream;
    request.stall_timeout = stall_timeout;
    request.deadline = (head.deadline_ms > 0).then(|| std::time::Duration::from_millis(head.deadline_ms));
    request.credential = match work.open_lease() {
        Ok(credential) => credential,
        Err(stop) => return work.refuse(stop),
    };
    work.execute(RunExecution::run(provider, request)).await
}

async fn collect(control: &mut Control, body: &mut BodyStream) -> Result<Bytes, Stop> {
    let mut first: Option<Bytes> = None;
    let mut all: Option<BytesMut> = None;
    loop {
        let chunk = poll_fn(|cx| match control.poll(cx) {
            Poll::Ready(stop) => Poll::Ready(Err(stop)),
            Poll::Pending => match Pin::new(&mut *body).poll_next(cx) {
                // A body breaks off only because its run is stopped: the reason is on its way.
                Poll::Ready(Some(Err(_))) | Poll::Pending => Poll::Pending,
                Poll::Ready(Some(Ok(chunk))) => Poll::Ready(Ok(Some(chunk))),
                Poll::Ready(None) => Poll::Ready(Ok(None)),
            },
        })
        .await?;
        match chunk {
            Some(chunk) => match (&mut all, first.take()) {
                (Some(all), _) => all.extend_from_slice(&chunk),
                (None, None) => first = Some(chunk),
                (None, Some(first)) => {
                    let mut joined = BytesMut::with_capacity(FIRST_BUFFER);
                    joined.extend_from_slice(&first);
                    joined.extend_from_slice(&chunk);
                    all = Some(joined);
                }
            },
            None => return Ok(all.map(BytesMut::freeze).or(first).unwrap_or_default()),
        }
    }
}
