//! Decides what must hold for any call, header and answer that an adapter meets. Fuzz targets: plain functions (SEC-5).
#![allow(clippy::panic, clippy::unwrap_used, clippy::missing_panics_doc, reason = "a panic is how a target reports")]

use bytes::Bytes;
use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, USER_AGENT};
use http::{HeaderMap, Method};
use iop_execution::fuzz::Choices;
use iop_execution::{FrameFlags, RunId};

use crate::observer::{Observer, Seen};
use crate::rules::{OLLAMA, OPENAI, request_headers, response_headers};

/// A call that a tunnel may ask for: exactly a route of the profile, or nothing; and no URL parser can see anything else in it
/// (SEC-1).
pub fn tunnel_path(data: &[u8]) {
    let (method, path) = data.split_first().unwrap_or((&0, &[]));
    let methods = [Method::POST, Method::GET, Method::PUT, Method::DELETE, Method::CONNECT, Method::HEAD];
    let Ok(path) = std::str::from_utf8(path) else { return };
    let Some(method) = methods.get(usize::from(*method) % methods.len()) else { return };
    for profile in [&OPENAI, &OLLAMA] {
        let Ok(route) = profile.check(method, path) else { continue };
        assert_eq!(route, path);
        assert!(matches!(*method, Method::GET | Method::POST));
        assert!(["/api/pull", "/api/delete", "/api/create", "/api/push"].iter().all(|never| !path.starts_with(never)));
        // What another reader makes of it.
        let uri: http::Uri = format!("http://backend.test{path}").parse().unwrap();
        assert_eq!((uri.path(), uri.query()), (path, None));
        assert_eq!((uri.host(), uri.port()), (Some("backend.test"), None));
    }
}

fn headers(data: &[u8]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for line in data.split(|byte| *byte == b'\n').take(64) {
        let (name, value) = line.iter().position(|byte| *byte == b':').map_or((line, &b""[..]), |at| line.split_at(at));
        let value = value.strip_prefix(b":").unwrap_or(value);
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            map.append(name, value);
        }
    }
    map
}

/// Headers both ways: nothing outside of the list passes, and each at most once (SEC-1, SEC-2).
pub fn header_filter(data: &[u8]) {
    let from = headers(data);
    let to = request_headers(&from, RunId::from_bytes([7; 16]));
    let request_id = HeaderName::from_static("x-request-id");
    let listed =
        [CONTENT_TYPE, ACCEPT, USER_AGENT, ACCEPT_ENCODING, request_id.clone(), HeaderName::from_static("openai-beta")];
    assert!(to.keys().all(|name| listed.contains(name)));
    assert_eq!(to.len(), to.keys_len());
    assert_eq!(to[ACCEPT_ENCODING], "identity");
    assert_eq!(to[&request_id], "07".repeat(16));
    let back = response_headers(&from);
    assert!(back.keys().all(|name| *name == CONTENT_TYPE || *name == request_id));
    assert_eq!(back.len(), back.keys_len());
    if let Some(id) = back.get(&request_id) {
        assert!(id.as_bytes().iter().all(u8::is_ascii_graphic));
    }
}

/// Answers of Ollama and of event streams: read or refused; a frame is whole, bounded, and in order.
pub fn ollama_ndjson(data: &[u8]) {
    iop_execution::fuzz::ndjson(data);
    for line in data.split(|byte| *byte == b'\n') {
        crate::ollama::fuzz_line(line);
    }
}

/// The observer of event streams: frames are the bytes that were fed, in order, cut at events (API-10).
pub fn observer(data: &[u8]) {
    let (body, pieces) = Choices::new(data).pieces();
    let body = Bytes::copy_from_slice(body);
    let mut observer = Observer::new(1);
    let mut out = Vec::new();
    let mut failed = false;
    'body: for piece in pieces {
        observer.feed(body.slice(piece));
        while let Some(seen) = observer.next() {
            match seen {
                Ok(Seen::Frame { bytes, flags }) => {
                    assert!(!bytes.is_empty() && bytes.len() <= 2 * crate::observer::FRAME_BYTES);
                    assert!(!flags.contains(FrameFlags::MORE) || bytes.len() == crate::observer::FRAME_BYTES);
                    out.extend_from_slice(&bytes);
                }
                Ok(Seen::Usage(_)) => {}
                Err(_) => {
                    failed = true;
                    break 'body;
                }
            }
        }
    }
    if !failed {
        let _ended = observer.finish();
    }
    assert!(is_subsequence(&out, &body), "no byte that was not fed, none out of order");
}

fn is_subsequence(part: &[u8], whole: &[u8]) -> bool {
    let mut whole = whole.iter();
    part.iter().all(|byte| whole.any(|other| other == byte))
}
