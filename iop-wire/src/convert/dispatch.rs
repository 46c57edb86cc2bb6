//! Decides how requests and their bodies cross the wire.

use iop_execution::{Redacted, RunId};

use super::bounds::{
    Checked, adapter, ensure, headers, headers_to_wire, method, named, principal, provider_id, required, run,
    session_id, target, text, within,
};
use super::{ConvertError, output};
use crate::limits::{MAX_LEASE, MAX_PATH, MAX_WINDOW, MIN_WINDOW};
use crate::message::{CredentialScope, DispatchHead, RequestChunk, RunDispatch, RunNumber, TunnelDispatch};
use crate::proto;

impl From<DispatchHead> for proto::DispatchHead {
    fn from(head: DispatchHead) -> Self {
        Self {
            run_id: head.run_id.as_bytes().to_vec().into(),
            run: head.run.0,
            provider_id: head.provider_id.as_str().to_owned(),
            adapter: head.adapter.as_str().to_owned(),
            target: head.target.as_str().to_owned(),
            session_id: head.session_id.map(|id| id.as_str().to_owned()),
            background: head.background,
            stream: head.stream,
            response_stall_timeout_ms: head.response_stall_timeout_ms,
            deadline_ms: head.deadline_ms,
            body_len: head.body_len,
            window: head.window,
            prompt_tokens_estimate: head.prompt_tokens_estimate,
            credential_lease: head.credential_lease.into_inner(),
            credential_scope: head.credential_scope.map(|scope| (*scope).into()),
        }
    }
}

fn number(head: &Option<proto::DispatchHead>) -> Checked<RunNumber> {
    run(head.as_ref().map_or(0, |head| head.run))
}

impl TryFrom<proto::DispatchHead> for DispatchHead {
    type Error = ConvertError;

    fn try_from(head: proto::DispatchHead) -> Checked<Self> {
        let run_id: [u8; 16] =
            head.run_id.as_ref().try_into().map_err(|_| ConvertError::new("run_id is not 16 bytes long"))?;
        lease_bounds(&head.credential_lease, head.credential_scope.is_some())?;
        Ok(Self {
            run_id: RunId::from_bytes(run_id),
            run: run(head.run)?,
            provider_id: provider_id(&head.provider_id)?,
            adapter: adapter(&head.adapter)?,
            target: target(&head.target)?,
            session_id: session_id(head.session_id)?,
            background: head.background,
            stream: head.stream,
            response_stall_timeout_ms: head.response_stall_timeout_ms,
            deadline_ms: head.deadline_ms,
            body_len: head.body_len,
            window: window(head.window)?,
            prompt_tokens_estimate: head.prompt_tokens_estimate,
            credential_lease: Redacted::new(head.credential_lease),
            credential_scope: head.credential_scope.map(|scope| scope.try_into().map(Box::new)).transpose()?,
        })
    }
}

/// The initial credit of a request.
pub(super) fn window(bytes: u32) -> Checked<u32> {
    ensure(bytes, (MIN_WINDOW..=MAX_WINDOW).contains(&bytes), "window is out of range")
}

/// Checks a sealed lease, and that a scope comes with it and only with it.
pub(super) fn lease_bounds(lease: &[u8], scoped: bool) -> Checked<()> {
    ensure((), lease.len() <= MAX_LEASE, "credential_lease is too large")?;
    ensure((), lease.is_empty() != scoped, "credential_lease and credential_scope come together or not at all")
}

impl From<CredentialScope> for proto::CredentialScope {
    fn from(scope: CredentialScope) -> Self {
        let CredentialScope { principal, route, slot, profile } = scope;
        Self { principal: principal.as_str().to_owned(), route, slot, profile }
    }
}

impl TryFrom<proto::CredentialScope> for CredentialScope {
    type Error = ConvertError;

    fn try_from(scope: proto::CredentialScope) -> Checked<Self> {
        Ok(Self {
            principal: principal(&scope.principal)?,
            route: named(scope.route, NO_ROUTE)?,
            slot: named(scope.slot, NO_SLOT)?,
            profile: named(scope.profile, NO_PROFILE)?,
        })
    }
}

pub(super) const NO_PATH: &str = "path is too long or holds control characters";
pub(super) const NO_ROUTE: &str = "route is no valid name";
pub(super) const NO_SLOT: &str = "slot is no valid name";
pub(super) const NO_PROFILE: &str = "profile is no valid name";

impl From<RunDispatch> for proto::RunRequest {
    fn from(request: RunDispatch) -> Self {
        Self { head: Some(request.head.into()) }
    }
}

impl TryFrom<proto::RunRequest> for RunDispatch {
    type Error = ConvertError;

    fn try_from(request: proto::RunRequest) -> Checked<Self> {
        let number = number(&request.head)?;
        within(number, || Ok(Self { head: required(request.head, "a request without head")?.try_into()? }))
    }
}

impl From<TunnelDispatch> for proto::ProviderTunnelRequest {
    fn from(request: TunnelDispatch) -> Self {
        Self {
            head: Some(request.head.into()),
            method: request.method.as_str().to_owned(),
            path: request.path.into_inner(),
            headers: headers_to_wire(request.headers.expose()),
        }
    }
}

impl TryFrom<proto::ProviderTunnelRequest> for TunnelDispatch {
    type Error = ConvertError;

    fn try_from(request: proto::ProviderTunnelRequest) -> Checked<Self> {
        let number = number(&request.head)?;
        within(number, || {
            Ok(Self {
                head: required(request.head, "a request without head")?.try_into()?,
                method: method(&request.method)?,
                path: Redacted::new(text(request.path, MAX_PATH, NO_PATH)?),
                headers: Redacted::new(headers(request.headers)?),
            })
        })
    }
}

impl From<RequestChunk> for proto::RequestChunk {
    fn from(chunk: RequestChunk) -> Self {
        Self { run: chunk.run.0, data: chunk.data, last: chunk.last }
    }
}

impl TryFrom<proto::RequestChunk> for RequestChunk {
    type Error = ConvertError;

    fn try_from(chunk: proto::RequestChunk) -> Checked<Self> {
        let number = run(chunk.run)?;
        within(number, || Ok(Self { run: number, data: output::chunk(chunk.data)?, last: chunk.last }))
    }
}
