mod answers;
mod tls;
mod uploads;

use std::time::Duration;

use futures_util::StreamExt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// Longest any single wait of a test may take: a bound, never a measure.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it hangs")
}

/// Afterwards the runtime knows what happened to every socket before: it hears of a later event.
pub(super) async fn settle() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut theirs, _) = listener.accept().await.unwrap();
    theirs.write_all(b"x").await.unwrap();
    soon(ours.read_exact(&mut [0])).await.unwrap();
}

/// A server to be played by the test, and a client of it.
struct Stage {
    listener: TcpListener,
    client: HttpClient,
}

impl Stage {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = Origin::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        Self { listener, client: HttpClient::new(origin).unwrap() }
    }

    async fn accept(&self) -> TcpStream {
        soon(self.listener.accept()).await.unwrap().0
    }

    /// Sends a request over a new connection and hears what the server answers once it has read it.
    async fn call(&self, answer: &[u8]) -> (Result<UpstreamResponse, UpstreamError>, TcpStream) {
        let server = async {
            let mut stream = self.accept().await;
            read_request(&mut stream).await;
            stream.write_all(answer).await.unwrap();
            stream
        };
        soon(async { tokio::join!(self.client.send(post("question")), server) }).await
    }

    /// The same over a connection that is open already.
    async fn call_again(&self, stream: &mut TcpStream, answer: &[u8]) -> Result<UpstreamResponse, UpstreamError> {
        let server = async {
            read_request(stream).await;
            stream.write_all(answer).await.unwrap();
        };
        soon(async { tokio::join!(self.client.send(post("question")), server) }).await.0
    }
}

fn post(body: impl Into<Bytes>) -> UpstreamRequest {
    post_body(RequestBody::full(body))
}

fn post_body(body: RequestBody) -> UpstreamRequest {
    UpstreamRequest { method: Method::POST, path: "/v1/chat/completions", headers: HeaderMap::new(), body }
}

/// Reads until the end of a request's head, and no byte further.
async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon(stream.read_u8()).await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> (String, Vec<u8>) {
    let head = read_head(stream).await;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    soon(stream.read_exact(&mut body)).await.unwrap();
    (head, body)
}

/// Reads until the other side closes and answers how many bytes came.
async fn read_to_close(stream: &mut TcpStream) -> usize {
    let (mut total, mut space) = (0, vec![0; 64 * 1024]);
    while let Ok(count @ 1..) = soon(stream.read(&mut space)).await {
        total += count;
    }
    total
}

async fn next(body: &mut UpstreamBody) -> Option<Result<Bytes, UpstreamError>> {
    soon(body.next()).await
}

/// All items, and the error that ended them.
async fn collect(mut body: UpstreamBody) -> (Vec<Bytes>, Option<UpstreamError>) {
    let mut items = Vec::new();
    loop {
        match next(&mut body).await {
            Some(Ok(item)) => items.push(item),
            Some(Err(error)) => {
                assert!(next(&mut body).await.is_none(), "an error is the end");
                return (items, Some(error));
            }
            None => return (items, None),
        }
    }
}

/// The text of an error and all its sources.
fn whole_text(error: &UpstreamError) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text.push_str(&format!(" {error}"));
        source = error.source();
    }
    text
}
