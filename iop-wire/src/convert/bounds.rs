//! Decides how long texts and lists may be, and how names, numbers and headers are parsed.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use iop_execution::{AdapterKey, InvalidName, NodeId, Principal, ProviderId, SessionId, Target};

use super::ConvertError;
use crate::limits::{MAX_HEADER_BYTES, MAX_HEADERS, MAX_TEXT};
use crate::message::RunNumber;
use crate::proto;

pub(super) type Checked<T> = Result<T, ConvertError>;

/// A part that must be present.
pub(super) fn required<T>(part: Option<T>, problem: &'static str) -> Checked<T> {
    part.ok_or(ConvertError::new(problem))
}

/// Passes `value` if `holds`.
pub(super) fn ensure<T>(value: T, holds: bool, problem: &'static str) -> Checked<T> {
    if holds { Ok(value) } else { Err(ConvertError::new(problem)) }
}

/// Whether `value` is one line of at most `limit` bytes.
pub(super) fn is_text(value: &str, limit: usize) -> bool {
    value.len() <= limit && !value.contains(char::is_control)
}

pub(super) fn text(value: String, limit: usize, problem: &'static str) -> Checked<String> {
    let holds = is_text(&value, limit);
    ensure(value, holds, problem)
}

/// A text that names something, so not an empty one.
pub(super) fn named(value: String, problem: &'static str) -> Checked<String> {
    let holds = is_named(&value);
    ensure(value, holds, problem)
}

pub(super) fn is_named(value: &str) -> bool {
    !value.is_empty() && is_text(value, MAX_TEXT)
}

pub(super) fn bytes(value: Bytes, limit: usize, problem: &'static str) -> Checked<Bytes> {
    let holds = value.len() <= limit;
    ensure(value, holds, problem)
}

/// A list whose entries convert one by one.
pub(super) fn list<W, D>(
    values: Vec<W>,
    limit: usize,
    problem: &'static str,
    convert: impl FnMut(W) -> Checked<D>,
) -> Checked<Vec<D>> {
    let holds = values.len() <= limit;
    ensure(values, holds, problem)?.into_iter().map(convert).collect()
}

/// Run numbers start at 1; 0 names no run, so nothing can be held against one.
pub(super) fn run(number: u64) -> Checked<RunNumber> {
    ensure(RunNumber(number), number != 0, "run is 0")
}

/// Runs a conversion whose failure is the fault of one run.
pub(super) fn within<T>(run: RunNumber, convert: impl FnOnce() -> Checked<T>) -> Checked<T> {
    convert().map_err(|error| error.in_run(run))
}

pub(super) fn n(number: u64) -> Checked<u64> {
    ensure(number, number != 0, "n is 0")
}

fn name<T>(parsed: Result<T, InvalidName>, problem: &'static str) -> Checked<T> {
    parsed.map_err(|_| ConvertError::new(problem))
}

pub(super) fn adapter(value: &str) -> Checked<AdapterKey> {
    name(AdapterKey::new(value), "adapter is no valid name")
}

pub(super) fn provider_id(value: &str) -> Checked<ProviderId> {
    name(ProviderId::new(value), "provider_id is no valid name")
}

pub(super) fn node_id(value: &str) -> Checked<NodeId> {
    name(NodeId::new(value), "node_id is no valid name")
}

pub(super) fn principal(value: &str) -> Checked<Principal> {
    name(Principal::new(value), "principal is no valid name")
}

pub(super) fn target(value: &str) -> Checked<Target> {
    name(Target::new(value), "target is no valid name")
}

pub(super) fn session_id(value: Option<String>) -> Checked<Option<SessionId>> {
    value.map(|value| name(SessionId::new(value), "session_id is no valid name")).transpose()
}

pub(super) fn method(value: &str) -> Checked<Method> {
    Method::from_bytes(value.as_bytes()).map_err(|_| ConvertError::new("method is no HTTP method"))
}

/// Checks how many headers there are, and their bytes: names and values.
pub(super) fn header_bounds(count: usize, bytes: usize) -> Checked<()> {
    ensure((), count <= MAX_HEADERS, "more headers than allowed")?;
    ensure((), bytes <= MAX_HEADER_BYTES, "larger headers than allowed")
}

pub(super) fn headers(values: Vec<proto::Header>) -> Checked<HeaderMap> {
    header_bounds(values.len(), values.iter().map(|header| header.name.len() + header.value.len()).sum())?;
    let mut headers = HeaderMap::with_capacity(values.len());
    for header in values {
        let name =
            HeaderName::from_bytes(header.name.as_bytes()).map_err(|_| ConvertError::new("no valid header name"))?;
        let value =
            HeaderValue::from_maybe_shared(header.value).map_err(|_| ConvertError::new("no valid header value"))?;
        headers.append(name, value);
    }
    Ok(headers)
}

pub(super) fn headers_to_wire(headers: &HeaderMap) -> Vec<proto::Header> {
    headers
        .iter()
        .map(|(name, value)| proto::Header {
            name: name.as_str().to_owned(),
            value: Bytes::copy_from_slice(value.as_bytes()),
        })
        .collect()
}
