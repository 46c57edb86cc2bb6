//! Decides what was sent and received over HTTP/1.1, byte for byte, with times.
//!
//! A client of a few lines on purpose: an HTTP library would hide how a body ended, join chunks, and reconnect by itself.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

/// How long a test waits for anything that should come at once.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A request, as it goes over the wire.
#[derive(Debug, Clone)]
pub struct Request {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Bytes,
}

impl Request {
    /// A request without a body.
    #[must_use]
    pub fn get(path: &str) -> Self {
        Self { method: "GET".to_owned(), path: path.to_owned(), headers: Vec::new(), body: Bytes::new() }
    }

    /// A JSON body, whatever it holds.
    #[must_use]
    pub fn post(path: &str, body: impl Into<Bytes>) -> Self {
        Self {
            method: "POST".to_owned(),
            path: path.to_owned(),
            headers: vec![("content-type".to_owned(), "application/json".to_owned())],
            body: body.into(),
        }
    }

    /// A chat completion with one user message.
    #[must_use]
    pub fn chat(model: &str, stream: bool) -> Self {
        Self::chat_with(model, stream, &serde_json::json!({}))
    }

    /// A chat completion with these members beside the usual ones.
    #[must_use]
    pub fn chat_with(model: &str, stream: bool, more: &Value) -> Self {
        Self::post("/v1/chat/completions", chat_body(model, stream, more).to_string())
    }

    /// With another method.
    #[must_use]
    pub fn method(mut self, method: &str) -> Self {
        method.clone_into(&mut self.method);
        self
    }

    /// With this header; an older one of the name is replaced.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Without this header.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self
    }

    /// With this API key.
    #[must_use]
    pub fn key(self, key: &str) -> Self {
        self.header("authorization", &format!("Bearer {key}"))
    }

    /// Method, path, headers, body.
    #[must_use]
    pub fn parts(&self) -> (&str, &str, &[(String, String)], &Bytes) {
        (&self.method, &self.path, &self.headers, &self.body)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        if !self.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.push_str("host: edge.test\r\n");
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !self.body.is_empty() || self.method == "POST" {
            head.push_str(&format!("content-length: {}\r\n", self.body.len()));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// A chat-completions object with one user message and these members more.
#[must_use]
pub fn chat_body(model: &str, stream: bool, more: &Value) -> Value {
    let mut body = serde_json::json!({
        "model": model, "messages": [{ "role": "user", "content": "Say something." }], "stream": stream,
    });
    if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
        body.extend(more.clone());
    }
    body
}

/// Status line and headers of an answer.
#[derive(Debug, Clone)]
pub struct Head {
    /// The status.
    pub status: u16,
    /// The headers, names in lower case, in order.
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The first header of this name (in lower case).
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Some bytes of a body and when they were there.
#[derive(Debug, Clone)]
pub struct Piece {
    /// The bytes: one chunk of a chunked body.
    pub bytes: Bytes,
    /// When they were read.
    pub at: Instant,
}

/// How a body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// As HTTP says it must: the last chunk, or all of its length.
    Whole,
    /// The connection ended first.
    Broken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    Length(usize),
    Chunked,
    Ended(End),
}

/// What carries a connection.
trait Carrier: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin> Carrier for T {}

/// One connection to a server.
#[derive(Debug)]
pub struct Connection {
    stream: Box<dyn Carrier>,
    buffer: BytesMut,
    framing: Framing,
}

impl Connection {
    fn over(stream: impl Carrier + 'static) -> Self {
        Self { stream: Box::new(stream), buffer: BytesMut::new(), framing: Framing::Ended(End::Whole) }
    }

    /// Connects.
    pub async fn open(addr: SocketAddr) -> Self {
        Self::over(connect(TcpSocket::new_v4().unwrap(), addr).await)
    }

    /// Connects, if somebody listens.
    pub async fn try_open(addr: SocketAddr) -> Option<Self> {
        let connecting = timeout(PATIENCE, TcpSocket::new_v4().unwrap().connect(addr));
        let stream = connecting.await.expect("connecting takes no time").ok()?;
        stream.set_nodelay(true).unwrap();
        Some(Self::over(stream))
    }

    /// Connects with TLS. The certificate must be of this CA and for 127.0.0.1.
    pub async fn open_tls(addr: SocketAddr, ca: &Path) -> Self {
        let mut config = (*iop_app::tls::node_client(Some(ca)).expect("a CA")).clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let stream = connect(TcpSocket::new_v4().unwrap(), addr).await;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let handshake = TlsConnector::from(Arc::new(config)).connect(name, stream);
        Self::over(timeout(PATIENCE, handshake).await.expect("a handshake takes no time").expect("a good certificate"))
    }

    /// Connects with a receive buffer of about this many bytes, for readers that stop.
    pub async fn open_small(addr: SocketAddr, receive_buffer: u32) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(receive_buffer).unwrap();
        Self::over(connect(socket, addr).await)
    }

    /// Sends a request whole.
    pub async fn send(&mut self, request: &Request) {
        self.stream.write_all(&request.to_bytes()).await.expect("the server reads");
    }

    /// Sends these bytes.
    pub async fn send_raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("the server reads");
    }

    /// Sends these bytes as far as the server takes them; false if it cut the connection.
    pub async fn try_send_raw(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).await.is_ok()
    }

    async fn fill(&mut self) -> bool {
        matches!(self.stream.read_buf(&mut self.buffer).await, Ok(1..))
    }

    /// The head of the answer; `None` when the connection ends first.
    pub async fn try_head(&mut self) -> Option<Head> {
        let at = loop {
            if let Some(at) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break at;
            }
            if !self.fill().await {
                return None;
            }
        };
        let text = self.buffer.split_to(at + 4);
        let text = std::str::from_utf8(&text).expect("a head is text");
        let mut lines = text.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status line");
        let headers = lines.filter_map(|line| line.split_once(':'));
        let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned())).collect();
        let head = Head { status: status.parse().expect("a status"), headers };
        self.framing = match (head.header("transfer-encoding"), head.header("content-length")) {
            (Some("chunked"), None) => Framing::Chunked,
            (None, Some("0")) => Framing::Ended(End::Whole),
            (None, Some(length)) => Framing::Length(length.parse().expect("a length")),
            (None, None) if matches!(head.status, 204 | 304) => Framing::Ended(End::Whole),
            other => panic!("a body of no known end: {other:?}"),
        };
        Some(head)
    }

    /// The head of the answer, which must come.
    pub async fn head(&mut self) -> Head {
        timeout(PATIENCE, self.try_head()).await.expect("a head in time").expect("a head before the connection ends")
    }

    /// The next piece of the body, however long it takes; `Err` once the body has ended.
    pub async fn piece(&mut self) -> Result<Piece, End> {
        loop {
            match self.framing {
                Framing::Ended(end) => return Err(end),
                Framing::Length(left) if !self.buffer.is_empty() => {
                    let bytes = self.buffer.split_to(left.min(self.buffer.len())).freeze();
                    let left = left - bytes.len();
                    self.framing = if left == 0 { Framing::Ended(End::Whole) } else { Framing::Length(left) };
                    return Ok(Piece { bytes, at: Instant::now() });
                }
                Framing::Chunked => {
                    if let Some(bytes) = self.take_chunk() {
                        if bytes.is_empty() {
                            self.framing = Framing::Ended(End::Whole);
                            continue;
                        }
                        return Ok(Piece { bytes, at: Instant::now() });
                    }
                }
                Framing::Length(_) => {}
            }
            if !self.fill().await {
                self.framing = Framing::Ended(End::Broken);
            }
        }
    }

    /// A whole chunk, the last one empty.
    fn take_chunk(&mut self) -> Option<Bytes> {
        let line = self.buffer.windows(2).position(|window| window == b"\r\n")?;
        let size = std::str::from_utf8(&self.buffer[..line]).expect("a chunk size is text");
        let size = usize::from_str_radix(size.split(';').next().unwrap_or(size).trim(), 16).expect("a chunk size");
        if self.buffer.len() < line + 2 + size + 2 {
            return None;
        }
        self.buffer.advance(line + 2);
        let chunk = self.buffer.split_to(size).freeze();
        assert_eq!(&self.buffer[..2], b"\r\n", "a chunk ends with CRLF; trailers are not expected");
        self.buffer.advance(2);
        Some(chunk)
    }

    /// Everything up to the end of the body. Each piece must come within [`PATIENCE`].
    pub async fn rest(&mut self, head: Head) -> Answer {
        let mut pieces = Vec::new();
        let end = loop {
            match timeout(PATIENCE, self.piece()).await.expect("the body goes on or ends") {
                Ok(piece) => pieces.push(piece),
                Err(end) => break end,
            }
        };
        Answer { head, pieces, end }
    }

    /// Sends a request and reads all of its answer.
    pub async fn ask(&mut self, request: &Request) -> Answer {
        self.send(request).await;
        let head = self.head().await;
        self.rest(head).await
    }

    /// The same; `None` when the connection ends before the head of an answer.
    pub async fn try_ask(&mut self, request: &Request) -> Option<Answer> {
        // Whoever refuses a request may close before it has read all of it, and its answer is there all the same.
        self.try_send_raw(&request.to_bytes()).await;
        let head = timeout(PATIENCE, self.try_head()).await.expect("a head in time, or the end")?;
        Some(self.rest(head).await)
    }

    /// Reads until the body holds this text; answers what came so far.
    pub async fn read_until(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut body = Vec::new();
        while !body.windows(text.len()).any(|window| window == text.as_bytes()) {
            let piece = timeout(PATIENCE, self.piece()).await.expect("the text comes in time");
            let piece = piece.unwrap_or_else(|end| panic!("the body ended ({end:?}) before it held {text:?}"));
            body.extend_from_slice(&piece.bytes);
            pieces.push(piece);
        }
        pieces
    }
}

async fn connect(socket: TcpSocket, addr: SocketAddr) -> TcpStream {
    let stream = timeout(PATIENCE, socket.connect(addr)).await.expect("connecting takes no time").expect("it listens");
    stream.set_nodelay(true).unwrap();
    stream
}

/// Asks over a connection of its own.
pub async fn ask(addr: SocketAddr, request: &Request) -> Answer {
    Connection::open(addr).await.ask(request).await
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its head.
    pub head: Head,
    /// Its body, as it came.
    pub pieces: Vec<Piece>,
    /// How the body ended.
    pub end: End,
}

impl Answer {
    /// The status.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.head.status
    }

    /// The body.
    #[must_use]
    pub fn body(&self) -> Bytes {
        self.pieces.iter().map(|piece| piece.bytes.as_ref()).collect::<Vec<_>>().concat().into()
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body()).into_owned()
    }

    /// The body as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body()).unwrap_or_else(|error| panic!("no JSON ({error}): {}", self.text()))
    }
}
