//! Decides how much of HTTP/1.1 the scripted server reads: heads, bodies of known length, chunked bodies.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::Received;

/// Longest head of a request.
const MAX_HEAD: usize = 64 * 1024;
/// Largest body of a request.
const MAX_BODY: usize = 128 * 1024 * 1024;

fn bad(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// The next request, or `None` when the client closed the connection between two.
pub(super) async fn read_request(
    from: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
    connection: u64,
) -> io::Result<Option<Received>> {
    let head_end = loop {
        if let Some(at) = memchr::memmem::find(buffer, b"\r\n\r\n") {
            break at;
        }
        if buffer.len() > MAX_HEAD {
            return Err(bad("the head is too long"));
        }
        if from.read_buf(buffer).await? == 0 {
            return if buffer.is_empty() { Ok(None) } else { Err(bad("the head is cut")) };
        }
    };
    let head = buffer.split_to(head_end);
    buffer.advance(4);
    let head = std::str::from_utf8(&head).map_err(|_| bad("the head is no text"))?;
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap_or_default().splitn(3, ' ');
    let (method, path) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let mut request =
        Received { connection, method: method.to_owned(), path: path.to_owned(), headers, body: Bytes::new() };
    let chunked = request.header("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
    request.body = if chunked {
        read_chunks(from, buffer).await?
    } else {
        let len: usize = request.header("content-length").map_or(Ok(0), str::parse).map_err(|_| bad("bad length"))?;
        read_exactly(from, buffer, len).await?
    };
    Ok(Some(request))
}

async fn read_exactly(from: &mut (impl AsyncRead + Unpin), buffer: &mut BytesMut, len: usize) -> io::Result<Bytes> {
    if len > MAX_BODY {
        return Err(bad("the body is too large"));
    }
    while buffer.len() < len {
        if from.read_buf(buffer).await? == 0 {
            return Err(bad("the body is cut"));
        }
    }
    Ok(buffer.split_to(len).freeze())
}

async fn read_chunks(from: &mut (impl AsyncRead + Unpin), buffer: &mut BytesMut) -> io::Result<Bytes> {
    let mut body = BytesMut::new();
    loop {
        let line_end = loop {
            if let Some(at) = memchr::memmem::find(buffer, b"\r\n") {
                break at;
            }
            if buffer.len() > MAX_HEAD || from.read_buf(buffer).await? == 0 {
                return Err(bad("the chunks are cut"));
            }
        };
        let line = buffer.split_to(line_end);
        buffer.advance(2);
        let size = std::str::from_utf8(&line).ok().and_then(|line| usize::from_str_radix(line.trim(), 16).ok());
        let size = size.ok_or_else(|| bad("bad chunk size"))?;
        if body.len() + size > MAX_BODY {
            return Err(bad("the body is too large"));
        }
        body.extend_from_slice(&read_exactly(from, buffer, size).await?);
        read_exactly(from, buffer, 2).await?;
        if size == 0 {
            return Ok(body.freeze());
        }
    }
}
