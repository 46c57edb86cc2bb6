//! Decides how a request's head is written, and what the head of an answer says about the bytes behind it.

use bytes::{Buf, BytesMut};
use http::header::{ACCEPT, CONNECTION, CONTENT_LENGTH, HOST, HeaderName, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use memchr::memmem;

use super::Origin;

/// Most headers of an answer.
pub(super) const MAX_HEADERS: usize = 64;
/// Largest head of an answer, the interim ones before it included.
pub(super) const MAX_HEAD: usize = 32 * 1024;

/// Why bytes are not the head of an answer to our request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeadError {
    #[error("the answer is not HTTP/1.1")]
    Malformed,
    #[error("the head of the answer is too large")]
    TooLarge,
    #[error("the answer does not say clearly where its body ends")]
    Framing,
    #[error("the answer switches protocols, which was not asked for")]
    Upgrade,
}

/// How the body of an answer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    Length(u64),
    Chunked,
    UntilClose,
}

/// The head of an answer.
#[derive(Debug)]
pub(super) struct AnswerHead {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) framing: Framing,
    /// Another request may follow on the connection.
    pub(super) keep_alive: bool,
}

/// The head of a request. Names of host and framing among `headers` are left out: both are ours to say.
pub(super) fn request(origin: &Origin, method: &Method, path: &str, headers: &HeaderMap, body: u64) -> Vec<u8> {
    let mut head = Vec::with_capacity(512);
    let mut put = |parts: &[&[u8]]| parts.iter().for_each(|part| head.extend_from_slice(part));
    put(&[method.as_str().as_bytes(), b" ", origin.prefix().as_bytes(), path.as_bytes(), b" HTTP/1.1\r\n"]);
    put(&[b"host: ", origin.host_header().as_bytes(), b"\r\n"]);
    let ours = |name: &HeaderName| *name == HOST || *name == CONTENT_LENGTH || *name == TRANSFER_ENCODING;
    for (name, value) in headers.iter().filter(|(name, _)| !ours(name)) {
        put(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
    }
    if !headers.contains_key(ACCEPT) {
        put(&[b"accept: */*\r\n"]);
    }
    if body > 0 || matches!(*method, Method::POST | Method::PUT | Method::PATCH) {
        put(&[b"content-length: ", body.to_string().as_bytes(), b"\r\n"]);
    }
    put(&[b"\r\n"]);
    head
}

/// Finds the final head among the bytes of an answer.
#[derive(Debug)]
pub(super) struct HeadReader {
    for_head: bool,
    /// Bytes of interim heads so far.
    interim: usize,
    /// How far the bytes were searched for the end of the head.
    seen: usize,
}

impl HeadReader {
    pub(super) fn new(method: &Method) -> Self {
        Self { for_head: *method == Method::HEAD, interim: 0, seen: 0 }
    }

    /// The final head, taken out of `buffer`; `None` when more bytes are needed.
    pub(super) fn next(&mut self, buffer: &mut BytesMut) -> Result<Option<AnswerHead>, HeadError> {
        while !buffer.is_empty() && self.is_worth_parsing(buffer) {
            let mut fields = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut parsed = httparse::Response::new(&mut fields);
            let length = match parsed.parse(buffer) {
                Ok(httparse::Status::Complete(length)) if self.interim + length <= MAX_HEAD => length,
                Ok(httparse::Status::Complete(_)) | Err(httparse::Error::TooManyHeaders) => {
                    return Err(HeadError::TooLarge);
                }
                Ok(httparse::Status::Partial) => break,
                Err(_) => return Err(HeadError::Malformed),
            };
            let (code, version) = (parsed.code.unwrap_or_default(), parsed.version.unwrap_or_default());
            let status = StatusCode::from_u16(code).map_err(|_| HeadError::Malformed)?;
            if status == StatusCode::SWITCHING_PROTOCOLS {
                return Err(HeadError::Upgrade);
            }
            if !status.is_informational() {
                let headers = headers(parsed.headers)?;
                buffer.advance(length);
                return self.finish(status, headers, version == 1).map(Some);
            }
            buffer.advance(length);
            self.interim += length;
            self.seen = 0;
        }
        if self.interim + buffer.len() > MAX_HEAD { Err(HeadError::TooLarge) } else { Ok(None) }
    }

    /// True for the first bytes, so that garbage is noticed at once, and then only when the end is here: a head that comes
    /// byte by byte is not parsed at every byte.
    fn is_worth_parsing(&mut self, buffer: &[u8]) -> bool {
        let from = self.seen.saturating_sub(3);
        let first = self.seen == 0;
        self.seen = buffer.len();
        let new = buffer.get(from..).unwrap_or_default();
        first || memmem::find(new, b"\n\r\n").is_some() || memmem::find(new, b"\n\n").is_some()
    }

    fn finish(&self, status: StatusCode, headers: HeaderMap, http11: bool) -> Result<AnswerHead, HeadError> {
        let framing = framing(&headers, http11)?;
        let bodyless = self.for_head || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let framing = if bodyless { Framing::Length(0) } else { framing };
        let keep_alive = http11 && framing != Framing::UntilClose && !closes(&headers);
        Ok(AnswerHead { status, headers, framing, keep_alive })
    }
}

fn headers(fields: &[httparse::Header<'_>]) -> Result<HeaderMap, HeadError> {
    let mut headers = HeaderMap::with_capacity(fields.len());
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| HeadError::Malformed)?;
        let value = HeaderValue::from_bytes(field.value).map_err(|_| HeadError::Malformed)?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// Where the body ends. Whatever two readers could understand differently is refused.
fn framing(headers: &HeaderMap, http11: bool) -> Result<Framing, HeadError> {
    let mut encodings = headers.get_all(TRANSFER_ENCODING).iter();
    if let Some(encoding) = encodings.next() {
        let plain = encoding.as_bytes().eq_ignore_ascii_case(b"chunked") && encodings.next().is_none();
        let clear = http11 && plain && !headers.contains_key(CONTENT_LENGTH);
        return if clear { Ok(Framing::Chunked) } else { Err(HeadError::Framing) };
    }
    let mut length = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        let text = value.to_str().map_err(|_| HeadError::Framing)?;
        for text in text.split(',').map(str::trim) {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let this: u64 = text.parse().ok().filter(|_| digits).ok_or(HeadError::Framing)?;
            if length.is_some_and(|length| length != this) {
                return Err(HeadError::Framing);
            }
            length = Some(this);
        }
    }
    Ok(length.map_or(Framing::UntilClose, Framing::Length))
}

fn closes(headers: &HeaderMap) -> bool {
    headers.get_all(CONNECTION).iter().any(|value| {
        value.as_bytes().split(|byte| *byte == b',').any(|token| token.trim_ascii().eq_ignore_ascii_case(b"close"))
    })
}

#[cfg(test)]
mod tests;
