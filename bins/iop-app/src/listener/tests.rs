use std::convert::Infallible;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::testhttp::h2_frame;

/// Answers everything with "ok"; with a semaphore it adds a permit for each request instead, and never answers.
#[derive(Clone)]
struct Answer(Option<Arc<tokio::sync::Semaphore>>);

impl Service<Request<Incoming>> for Answer {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let arrived = self.0.clone();
        Box::pin(async move {
            let _body = request.into_body().collect().await;
            if let Some(arrived) = arrived {
                arrived.add_permits(1);
                std::future::pending::<()>().await;
            }
            Ok(Response::new(Full::from("ok")))
        })
    }
}

async fn start(limits: Limits, service: Answer) -> (SocketAddr, Shutdown, tokio::task::JoinHandle<()>) {
    let listener = HttpListener::bind("127.0.0.1:0".parse().unwrap(), None, limits).await.unwrap();
    let (address, stop) = (listener.local_addr().unwrap(), Shutdown::default());
    let served = tokio::spawn(listener.serve(service, stop.clone()));
    (address, stop, served)
}

const H2_PREFACE_BYTES: usize = 24;

const fn short() -> Duration {
    Duration::from_millis(50)
}

/// Everything the server sends until it closes.
async fn rest(socket: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _reset_is_an_end_too = socket.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn a_request_is_answered_and_the_connection_kept() {
    // SEC-3
    let (address, _stop, _served) = start(Limits::default(), Answer(None)).await;
    let mut socket = TcpStream::connect(address).await.unwrap();
    for _ in 0..2 {
        socket.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut buffer = [0; 512];
        let read = socket.read(&mut buffer).await.unwrap();
        assert!(buffer[..read].starts_with(b"HTTP/1.1 200"), "{:?}", String::from_utf8_lossy(&buffer[..read]));
    }
}

#[tokio::test]
async fn http_2_is_known_by_its_first_bytes_even_one_at_a_time() {
    // API-1
    let (address, _stop, _served) = start(Limits::default(), Answer(None)).await;
    for slow in [false, true] {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let mut socket = TcpStream::connect(address).await.unwrap();
        tokio::spawn(async move {
            let mut theirs = theirs;
            if slow {
                for _ in 0..H2_PREFACE_BYTES {
                    let byte = theirs.read_u8().await.unwrap();
                    socket.write_all(&[byte]).await.unwrap();
                }
            }
            tokio::io::copy_bidirectional(&mut theirs, &mut socket).await
        });
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(ours)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get("http://x/").body(Full::<Bytes>::default()).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!((answer.version(), answer.status()), (http::Version::HTTP_2, http::StatusCode::OK));
    }
}

#[tokio::test]
async fn slow_headers_and_silence_are_cut_at_every_stage() {
    // SEC-3: slowloris. What stops is, in turn: everything, the HTTP/2 preface, the request line, the headers.
    let limits = Limits { header_time: short(), ..Limits::default() };
    let (address, _stop, _served) = start(limits, Answer(None)).await;
    for sent in ["", "P", "PRI * HTTP/2.0\r\n", "GET / HT", "GET / HTTP/1.1\r\nhost: x\r\nx: "] {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(sent.as_bytes()).await.unwrap();
        let answer = timeout(Duration::from_secs(10), rest(&mut socket)).await;
        assert!(answer.is_ok_and(|text| !text.contains(" 200 ")), "{sent:?}");
    }
}

#[tokio::test]
async fn too_many_or_too_large_headers_are_refused() {
    // SEC-3
    let (address, _stop, _served) = start(Limits::default(), Answer(None)).await;
    let many = |count: usize| (0..count).map(|n| format!("x-{n}: 1\r\n")).collect::<String>();
    for (headers, status) in [
        (many(60), "200"),
        (many(65), "431"),
        (format!("x: {}\r\n", "y".repeat(15 << 10)), "200"),
        (format!("x: {}\r\n", "y".repeat(17 << 10)), "431"),
    ] {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let head = format!("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
        let _may_be_cut = socket.write_all(head.as_bytes()).await;
        let answer = rest(&mut socket).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{} bytes of headers: {answer}", headers.len());
    }
}

#[tokio::test]
async fn connections_beyond_the_caps_are_closed_and_places_come_back() {
    // SEC-3
    for limits in
        [Limits { connections: 2, ..Limits::default() }, Limits { connections_per_address: 2, ..Limits::default() }]
    {
        let (address, _stop, _served) = start(limits, Answer(None)).await;
        let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        let mut open = Vec::new();
        for _ in 0..2 {
            let mut socket = TcpStream::connect(address).await.unwrap();
            socket.write_all(request).await.unwrap();
            assert_ne!(socket.read(&mut [0; 512]).await.unwrap(), 0);
            open.push(socket);
        }
        let mut third = TcpStream::connect(address).await.unwrap();
        let refused = timeout(Duration::from_secs(10), rest(&mut third)).await;
        assert_eq!(refused.as_deref(), Ok(""), "{limits:?}");
        drop(open);
        // The places come back when the server has seen the ends.
        loop {
            let mut socket = TcpStream::connect(address).await.unwrap();
            let _refused = socket.write_all(request).await;
            if socket.read(&mut [0; 512]).await.is_ok_and(|read| read > 0) {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_graceful_stop_closes_idle_connections_and_ends() {
    // BIN-5
    let (address, stop, served) = start(Limits::default(), Answer(None)).await;
    let mut idle = TcpStream::connect(address).await.unwrap();
    idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert_ne!(idle.read(&mut [0; 512]).await.unwrap(), 0);
    let mut silent = TcpStream::connect(address).await.unwrap();
    stop.gracefully.cancel();
    timeout(Duration::from_secs(10), served).await.unwrap().unwrap();
    assert_eq!((rest(&mut idle).await.as_str(), rest(&mut silent).await.as_str()), ("", ""));
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_forced_stop_cuts_what_still_runs() {
    // BIN-5
    let arrived = Arc::new(tokio::sync::Semaphore::new(0));
    let (address, stop, mut served) = start(Limits::default(), Answer(Some(Arc::clone(&arrived)))).await;
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let _one = arrived.acquire().await.unwrap();
    stop.gracefully.cancel();
    assert!(timeout(short(), &mut served).await.is_err(), "a running request holds the graceful stop");
    stop.now.cancel();
    timeout(Duration::from_secs(10), served).await.unwrap().unwrap();
    assert_eq!(rest(&mut socket).await, "");
}

#[tokio::test(start_paused = true)]
async fn a_write_that_waits_too_long_fails_and_a_short_wait_does_not() {
    // SEC-3: client that reads nothing
    let limit = Duration::from_secs(60);
    let (client, server) = tokio::io::duplex(16);
    let (mut client, mut server) = (client, Guarded::new(server, limit));
    let slow = tokio::spawn(async move {
        let mut buffer = [0; 16];
        for _ in 0..3 {
            sleep(limit - Duration::from_secs(1)).await;
            client.read_exact(&mut buffer).await.unwrap();
        }
        client
    });
    server.write_all(&[0; 48]).await.unwrap();
    let client = slow.await.unwrap();
    let error = server.write_all(&[0; 17]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    drop(client);
}

/// One connection of a peer that writes and reads by hand, in paused time.
fn by_hand() -> tokio::io::DuplexStream {
    let (client, server) = tokio::io::duplex(1 << 16);
    tokio::spawn(plain(server, None, Answer(None), Limits::default(), CancellationToken::new()));
    client
}

/// Reads one answer of [`Answer`].
async fn answered(client: &mut tokio::io::DuplexStream) {
    let mut seen = Vec::new();
    while !seen.ends_with(b"\r\n\r\nok") {
        assert_ne!(client.read_buf(&mut seen).await.unwrap(), 0, "{}", String::from_utf8_lossy(&seen));
    }
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
const SECOND: Duration = Duration::from_secs(1);

/// How long until the server closes.
async fn closed_after(client: &mut tokio::io::DuplexStream) -> Duration {
    let began = Instant::now();
    let mut rest = Vec::new();
    let _reset_is_an_end_too = client.read_to_end(&mut rest).await;
    assert_eq!(rest, b"", "nothing is said");
    began.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_kept_connection_may_be_idle_for_75_seconds_between_any_two_requests() {
    // SEC-3: pools of clients keep connections for 90 s
    let mut client = by_hand();
    for _ in 0..3 {
        client.write_all(GET).await.unwrap();
        answered(&mut client).await;
        sleep(74 * SECOND).await;
    }
    client.write_all(GET).await.unwrap();
    answered(&mut client).await;
    assert_eq!(closed_after(&mut client).await.as_secs(), 75);
}

#[tokio::test(start_paused = true)]
async fn the_head_of_every_request_has_10_seconds_from_its_first_byte() {
    // SEC-3: slowloris, on a kept connection too
    for requests in 0..3 {
        let mut client = by_hand();
        for _ in 0..requests {
            client.write_all(GET).await.unwrap();
            answered(&mut client).await;
            sleep(60 * SECOND).await;
        }
        let began = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n").await.unwrap();
        // A byte now and then is no head.
        for _ in 0..4 {
            sleep(2 * SECOND).await;
            client.write_all(b"x").await.unwrap();
        }
        closed_after(&mut client).await;
        assert_eq!(began.elapsed().as_secs(), 10, "after {requests} requests");
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_that_takes_9_seconds_is_answered_each_time() {
    // SEC-3
    let mut client = by_hand();
    let (first, last) = GET.split_at(7);
    for _ in 0..3 {
        client.write_all(first).await.unwrap();
        sleep(9 * SECOND).await;
        client.write_all(last).await.unwrap();
        answered(&mut client).await;
        sleep(20 * SECOND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_may_take_longer_than_a_head_and_the_wait_after_it_is_whole() {
    // SEC-3: the service has its own timers for bodies
    let mut client = by_hand();
    client.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n").await.unwrap();
    for _ in 0..100 {
        sleep(SECOND).await;
        client.write_all(b"x").await.unwrap();
    }
    answered(&mut client).await;
    assert_eq!(closed_after(&mut client).await.as_secs(), 75);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_says_nothing_at_first_has_10_seconds() {
    // SEC-3
    assert_eq!(closed_after(&mut by_hand()).await.as_secs(), 10);
}

/// Types of HTTP/2 frames.
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// A whole head; and the whole request.
const END_HEADERS: u8 = 4;
const ALL: u8 = 5;
/// `GET /` of `http://x`.
const H2_GET: &[u8] = b"\x82\x84\x86\x41\x01x";
/// The same with a header that HTTP/2 does not have, so that its stream is reset.
const H2_BAD: &[u8] = b"\x82\x84\x86\x41\x01x\x00\x0aconnection\x01x";

/// Frames of the stream with this number.
type MakeStream<'a> = &'a dyn Fn(u32) -> Vec<u8>;

/// Sends these frames and then a good request, all at once, so that the server looks at nothing in between. `Err` = how the
/// connection was ended; `Ok` = the request was answered.
async fn flooded(client: &mut tokio::io::DuplexStream, mut frames: Vec<u8>, last: u32) -> Result<(), String> {
    frames.extend(h2_frame(HEADERS, ALL, last, H2_GET));
    client.write_all(&frames).await.unwrap();
    loop {
        let mut head = [0; 9];
        client.read_exact(&mut head).await.unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        client.read_exact(&mut payload).await.unwrap();
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        match head[3] {
            GOAWAY => return Err(String::from_utf8_lossy(&payload[8..]).into_owned()),
            HEADERS if stream == last => return Ok(()),
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_http_2_peer_may_reset_as_many_streams_as_this_listener_says_and_no_more() {
    // SEC-3: rapid reset, and errors that make us reset. Both limits are below those of the libraries.
    let cancelled = |stream| {
        let open = h2_frame(HEADERS, END_HEADERS, stream, H2_GET);
        [open, h2_frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())].concat()
    };
    let malformed = |stream| h2_frame(HEADERS, ALL, stream, H2_BAD);
    let cases: [(usize, MakeStream<'_>, &str); 2] = [
        (MAX_PENDING_RESETS, &cancelled, "too_many_resets"),
        (MAX_ERROR_RESETS, &malformed, "too_many_internal_resets"),
    ];
    for (limit, reset, reason) in cases {
        for (count, ended) in [(limit, Ok(())), (limit + 1, Err(reason.to_owned()))] {
            let mut client = by_hand();
            let mut frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), h2_frame(SETTINGS, 0, 0, &[])].concat();
            let streams = (1..).step_by(2).take(count);
            frames.extend(streams.flat_map(reset));
            let last = u32::try_from(2 * count + 1).unwrap();
            assert_eq!(flooded(&mut client, frames, last).await, ended, "{count} {reason}");
            if reason == "too_many_resets" && ended.is_ok() {
                // What was looked at is forgotten: the same again is fine.
                let streams = (last + 2..).step_by(2).take(count);
                let again = streams.flat_map(reset).collect();
                assert_eq!(flooded(&mut client, again, 2 * last + 1).await, Ok(()));
            }
        }
    }
}
