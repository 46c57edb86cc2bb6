//! Decides how a tunnel is executed: the provider is called at once, and takes the body as it comes.

use std::sync::Arc;

use iop_execution::{Provider, RequestBody, StallTimeout, TunnelExecution, TunnelFrame, TunnelRequest};
use iop_wire::TunnelDispatch;

use crate::body::BodyStream;
use crate::drive::Work;
use crate::observe::RunOutcome;

/// Relays the exchange on the provider.
pub(crate) async fn execute(
    mut work: Work<TunnelFrame>,
    provider: Arc<dyn Provider>,
    dispatch: TunnelDispatch,
    stall_timeout: StallTimeout,
    body: BodyStream,
) -> RunOutcome {
    let TunnelDispatch { head, method, path, headers } = dispatch;
    let body = match head.body_len {
        0 => RequestBody::full(bytes::Bytes::new()),
        len => RequestBody::chunks(len, body),
    };
    let mut request = TunnelRequest::post(head.run_id, head.adapter, head.target, path.into_inner(), body);
    request.session_id = head.session_id;
    request.method = method;
    request.headers = headers.into_inner();
    request.stream = head.stream;
    request.stall_timeout = stall_timeout;
    request.deadline = (head.deadline_ms > 0).then(|| std::time::Duration::from_millis(head.deadline_ms));
    request.credential = match work.open_lease() {
        Ok(credential) => credential,
        Err(stop) => return work.refuse(stop),
    };
    work.execute(TunnelExecution::tunnel(provider, request)).await
}
