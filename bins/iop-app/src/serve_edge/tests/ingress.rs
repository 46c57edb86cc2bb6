//! What strangers may cost: the real listener before the real surface, and peers that mean no good.

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::*;
use crate::testfleet::Fleet;
use crate::testhttp::{get, h2_frame as frame, send};

/// Long enough for anything that is not broken.
const SOON: Duration = Duration::from_secs(30);

/// The surface of an Edge without Nodes or keys, behind a listener with these limits.
async fn start(limits: Limits) -> (SocketAddr, Shutdown) {
    let fleet = Fleet::new();
    let listener = HttpListener::bind("127.0.0.1:0".parse().unwrap(), None, limits).await.unwrap();
    let (address, stop) = (listener.local_addr().unwrap(), Shutdown::default());
    let service = iop_edge_core::openai::OpenAiService::new(
        std::sync::Arc::new(fleet.runtime.edge().clone()),
        iop_edge_core::openai::OpenAiConfig::default(),
    );
    tokio::spawn(listener.serve(service, stop.clone()));
    (address, stop)
}

/// Everything the server sends until it closes, at most 64 KiB.
async fn rest(socket: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _reset_is_an_end_too = timeout(SOON, socket.take(64 << 10).read_to_end(&mut bytes)).await.expect("it closes");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends these bytes and reads to the end.
async fn raw(address: SocketAddr, bytes: &[u8]) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let _may_be_cut = socket.write_all(bytes).await;
    rest(&mut socket).await
}

async fn serves(address: SocketAddr) {
    let answer = timeout(SOON, send(address, get("/healthz"))).await.expect("others are served");
    assert_eq!(answer.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_thousand_idle_connections_hold_nobody_up_and_are_closed() {
    // SEC-3
    let header_time = Duration::from_secs(2);
    let limits = Limits { connections_per_address: 2000, header_time, ..Limits::default() };
    let (address, _stop) = start(limits).await;
    let mut idle = Vec::new();
    for at in 0..1000 {
        let mut socket = TcpStream::connect(address).await.unwrap();
        // Some have begun a request.
        if at % 2 == 0 {
            socket.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost:").await.unwrap();
        }
        idle.push(socket);
        if at % 100 == 0 {
            serves(address).await;
        }
    }
    for mut socket in idle {
        assert!(!rest(&mut socket).await.contains(" 200 "));
    }
    serves(address).await;
}

#[tokio::test]
async fn huge_bodies_are_refused_without_being_read_and_compressed_ones_at_all() {
    // SEC-3
    let (address, _stop) = start(Limits::default()).await;
    let head = |more: &str| {
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}\r\n")
    };
    for (case, request, status) in [
        ("claimed", head("content-length: 99999999999\r\n"), "413"),
        ("gzip", head("content-encoding: gzip\r\ncontent-length: 2\r\nconnection: close\r\n") + "{}", "415"),
        (
            "identity, then gzip",
            head("content-encoding: identity\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\nconnection: close\r\n")
                + "{}",
            "415",
        ),
        ("too large to count", head("content-length: 99999999999999999999999\r\n"), "400"),
    ] {
        let answer = raw(address, request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{case}: {answer}");
    }
    // Without a length, it is counted: 33 MiB are sent, 32 are allowed.
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(head("transfer-encoding: chunked\r\n").as_bytes()).await.unwrap();
    let (mut reader, mut writer) = socket.split();
    let piece = format!("{:x}\r\n{}\r\n", 64 << 10, " ".repeat(64 << 10));
    let upload = async {
        for _ in 0..(33 * 16) {
            if writer.write_all(piece.as_bytes()).await.is_err() {
                break;
            }
        }
        std::future::pending::<()>().await;
    };
    let mut answer = vec![0; 12];
    tokio::select! {
        read = timeout(SOON, reader.read_exact(&mut answer)) => { read.unwrap().unwrap(); }
        () = upload => {}
    }
    assert_eq!(String::from_utf8_lossy(&answer), "HTTP/1.1 413");
    serves(address).await;
}

#[tokio::test]
async fn deep_json_is_refused_at_once() {
    // SEC-3
    let (address, _stop) = start(Limits::default()).await;
    for (depth, status) in [(61, "404"), (64, "400"), (100_000, "400"), (4_000_000, "400")] {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let (open, close) = (open.repeat(depth), close.repeat(depth));
            let body = format!("{{\"model\":\"nobody\",\"messages\":[{open}1{close}]}}");
            let request = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            let answer = raw(address, request.as_bytes()).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{depth}: {answer}");
        }
    }
}

#[tokio::test]
async fn requests_that_two_readers_would_take_for_different_ones_are_refused() {
    // SEC-1, SEC-3: smuggling. Behind each is a second request, which must never be answered as one.
    let (address, _stop) = start(Limits::default()).await;
    let behind = "GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let body = |headers: &str, body: &str| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}\r\n{body}{behind}"
        )
    };
    for (case, request) in [
        ("two lengths", body("content-length: 2\r\ncontent-length: 3\r\n", "{}")),
        ("a list of lengths", body("content-length: 2, 3\r\n", "{}")),
        ("a signed length", body("content-length: +2\r\n", "{}")),
        ("a length in hex", body("content-length: 0x2\r\n", "{}")),
        ("an unknown coding", body("transfer-encoding: xchunked\r\n", "0\r\n\r\n")),
        ("chunked is not last", body("transfer-encoding: chunked, identity\r\n", "0\r\n\r\n")),
        ("a space before the colon", body("content-length : 2\r\n", "{}")),
        ("a folded header", body("x: a\r\n content-length: 2\r\n", "{}")),
        ("a control byte in a name", body("x\u{1}: 1\r\ncontent-length: 2\r\n", "{}")),
        ("a null in a value", body("x: \0\r\ncontent-length: 2\r\n", "{}")),
        ("a chunk of no size", body("transfer-encoding: chunked\r\n", "x\r\n{}\r\n0\r\n\r\n")),
        ("a chunk of a negative size", body("transfer-encoding: chunked\r\n", "-2\r\n{}\r\n0\r\n\r\n")),
        ("a chunk that is too long", body("transfer-encoding: chunked\r\n", "fffffffffffffffff\r\n{}\r\n0\r\n\r\n")),
        ("no version", format!("GET /healthz\r\n\r\n{behind}")),
        ("another version", format!("GET /healthz HTTP/3.0\r\nhost: x\r\n\r\n{behind}")),
        ("a space in the path", format!("GET /heal thz HTTP/1.1\r\nhost: x\r\n\r\n{behind}")),
    ] {
        let answer = raw(address, request.as_bytes()).await;
        assert!(!answer.contains(" 200 "), "{case}: {answer}");
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{case}: {answer}");
    }
    // A length beside chunks: the chunks count, and the connection ends.
    let both = body("content-length: 3\r\ntransfer-encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n");
    let answer = raw(address, both.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 4") && answer.matches("HTTP/1.1").count() <= 2, "{answer}");
}

#[tokio::test]
async fn paths_are_taken_as_they_are_and_never_repaired() {
    // SEC-1, API-1
    let (address, _stop) = start(Limits::default()).await;
    for path in [
        "/v1/../healthz",
        "/v1/./models",
        "//healthz",
        "/v1//models",
        "/v1/%6dodels",
        "/%2e%2e/healthz",
        "/v1/models%00",
        "/v1\\models",
        "/healthz;x",
        "/healthz%2f",
        "/admin/v1/status",
        "/metrics",
        "http://evil.example/metrics",
        "/V1/models",
    ] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let answer = raw(address, request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 404") || answer.starts_with("HTTP/1.1 400"), "{path}: {answer}");
    }
    for method in ["CONNECT x:1", "TRACE /healthz", "PUT /v1/models", "PRI /"] {
        let answer =
            raw(address, format!("{method} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await;
        assert!(!answer.contains(" 200 "), "{method}: {answer}");
    }
}

/// A client of HTTP/2 that does what it likes.
async fn h2(address: SocketAddr) -> (h2::client::SendRequest<Bytes>, tokio::task::JoinHandle<Result<(), h2::Error>>) {
    let socket = TcpStream::connect(address).await.unwrap();
    let (sender, connection) = h2::client::handshake(socket).await.unwrap();
    (sender, tokio::spawn(connection))
}

fn h2_get() -> http::Request<()> {
    http::Request::get("http://x/healthz").body(()).unwrap()
}

#[tokio::test]
async fn a_peer_that_opens_and_resets_streams_all_the_time_is_cut() {
    // SEC-3: rapid reset
    let (address, _stop) = start(Limits::default()).await;
    let [headers, rst_stream, settings, goaway] = [1, 3, 4, 7];
    let mut flood = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    flood.extend(frame(settings, 0, 0, &[]));
    for stream in (1..20_000).step_by(2) {
        // GET / of http://x, whole head, body to follow; then CANCEL.
        flood.extend(frame(headers, 4, stream, b"\x82\x84\x86\x41\x01x"));
        flood.extend(frame(rst_stream, 0, stream, &8_u32.to_be_bytes()));
    }
    let mut socket = TcpStream::connect(address).await.unwrap();
    let (mut reader, mut writer) = socket.split();
    let mut answer = Vec::new();
    let _may_be_cut = timeout(SOON, async {
        let write = async {
            let _may_be_cut = writer.write_all(&flood).await;
        };
        tokio::join!(write, async { reader.read_to_end(&mut answer).await })
    })
    .await
    .expect("it is closed");
    // The last frame says why: ENHANCE_YOUR_CALM.
    let calm = |at: &[u8]| at.first_chunk::<17>().is_some_and(|frame| frame[3] == goaway && frame[16] == 11);
    assert!((0..answer.len()).any(|at| calm(&answer[at..])), "{answer:?}");
    serves(address).await;
}

#[tokio::test]
async fn http_2_heads_are_bounded_and_streams_too() {
    // SEC-3
    let (address, _stop) = start(Limits::default()).await;
    let (mut sender, _connection) = h2(address).await;
    let mut large = h2_get();
    large.headers_mut().insert("x", "y".repeat(20 << 10).parse().unwrap());
    let (answer, _) = sender.send_request(large, true).unwrap();
    match timeout(SOON, answer).await.expect("it is answered or cut") {
        Ok(answer) => assert_eq!(answer.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
        Err(error) => assert!(error.is_reset() || error.is_go_away() || error.is_io(), "{error:?}"),
    }
    serves(address).await;
}

#[tokio::test]
async fn an_http_2_connection_without_requests_is_closed() {
    // SEC-3: its pings are answered all the time
    let short = Duration::from_millis(200);
    for asks in [false, true] {
        let limits = Limits { header_time: short, idle_time: short, ..Limits::default() };
        let (address, _stop) = start(limits).await;
        let (mut sender, connection) = h2(address).await;
        if asks {
            let (answer, _) = sender.send_request(h2_get(), true).unwrap();
            assert_eq!(timeout(SOON, answer).await.unwrap().unwrap().status(), StatusCode::OK);
        }
        timeout(SOON, connection).await.expect("it is closed").unwrap().unwrap();
        // A head that never ends asks nothing either.
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00").await.unwrap();
        socket.write_all(b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82").await.unwrap();
        rest(&mut socket).await;
    }
}
