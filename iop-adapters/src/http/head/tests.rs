use bytes::Bytes;
use proptest::prelude::*;

use super::*;

fn read(bytes: &[u8]) -> Result<Option<(AnswerHead, Bytes)>, HeadError> {
    read_for(&Method::POST, [bytes])
}

fn read_for<'a>(
    method: &Method,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Result<Option<(AnswerHead, Bytes)>, HeadError> {
    let (mut reader, mut buffer, mut found) = (HeadReader::new(method), BytesMut::new(), None);
    for piece in pieces {
        buffer.extend_from_slice(piece);
        if found.is_none() {
            found = reader.next(&mut buffer)?;
        }
    }
    Ok(found.map(|head| (head, buffer.freeze())))
}

fn framing_of(fields: &str) -> Result<(Framing, bool), HeadError> {
    let head = read(format!("HTTP/1.1 200 OK\r\n{fields}\r\n").as_bytes())?;
    Ok(head.map(|(head, _)| (head.framing, head.keep_alive)).unwrap())
}

#[test]
fn a_request_says_what_it_is_and_nothing_more() {
    // ADP-1
    let origin = Origin::parse("http://Host:8080/api/v1").unwrap();
    let mut headers = HeaderMap::new();
    headers.insert("x-request-id", HeaderValue::from_static("7"));
    for ours in ["host", "content-length", "transfer-encoding"] {
        headers.insert(ours, HeaderValue::from_static("smuggled"));
    }
    let text = |method, headers: &HeaderMap, body| {
        String::from_utf8(request(&origin, &method, "/v1/completions", headers, body)).unwrap()
    };
    assert_eq!(
        text(Method::POST, &headers, 12),
        "POST /api/v1/completions HTTP/1.1\r\nhost: host:8080\r\nx-request-id: 7\r\naccept: */*\r\ncontent-length: 12\r\n\r\n"
    );
    headers.clear();
    headers.insert("accept", HeaderValue::from_static("text/event-stream"));
    assert_eq!(
        text(Method::GET, &headers, 0),
        "GET /api/v1/completions HTTP/1.1\r\nhost: host:8080\r\naccept: text/event-stream\r\n\r\n"
    );
    // Without a length a server could wait for a body.
    assert!(text(Method::POST, &headers, 0).ends_with("\r\ncontent-length: 0\r\n\r\n"));
}

#[test]
fn every_split_of_a_head_gives_the_same_head() {
    let bytes = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-type: a\r\nset-cookie: b\r\nSet-Cookie: c\r\ncontent-length: 4\r\n\r\nbody";
    let check = |found: Result<Option<(AnswerHead, Bytes)>, HeadError>| {
        let (head, rest) = found.unwrap().unwrap();
        assert_eq!((head.status, head.framing, head.keep_alive), (StatusCode::OK, Framing::Length(4), true));
        assert_eq!(head.headers.len(), 4);
        assert_eq!(head.headers.get_all("set-cookie").iter().collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(rest, "body");
    };
    check(read_for(&Method::POST, bytes.chunks(1)));
    for at in 0..=bytes.len() {
        check(read_for(&Method::POST, [&bytes[..at], &bytes[at..]]));
    }
    for end in 0..bytes.len() - 4 {
        assert!(read(&bytes[..end]).unwrap().is_none(), "{end}");
    }
}

#[test]
fn the_framing_is_what_the_head_says() {
    let cases = [
        ("", (Framing::UntilClose, false)),
        ("content-length: 0\r\n", (Framing::Length(0), true)),
        ("content-length: 18446744073709551615\r\n", (Framing::Length(u64::MAX), true)),
        ("content-length: 5\r\ncontent-length: 5\r\n", (Framing::Length(5), true)),
        ("content-length: 5, 5\r\n", (Framing::Length(5), true)),
        ("content-length: 5\r\nconnection: close\r\n", (Framing::Length(5), false)),
        ("content-length: 5\r\nconnection: x\r\nConnection: y , Close\r\n", (Framing::Length(5), false)),
        ("content-length: 5\r\nconnection: keep-alive\r\n", (Framing::Length(5), true)),
        ("transfer-encoding: Chunked\r\n", (Framing::Chunked, true)),
    ];
    for (fields, want) in cases {
        assert_eq!(framing_of(fields), Ok(want), "{fields}");
    }
    let (old, _) = read(b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\n").unwrap().unwrap();
    assert_eq!((old.framing, old.keep_alive), (Framing::Length(5), false));
}

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    for fields in [
        "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: 5, 6\r\n",
        "content-length: \r\n",
        "content-length: +5\r\n",
        "content-length: -5\r\n",
        "content-length: 0x5\r\n",
        "content-length: 5,\r\n",
        "content-length: 18446744073709551616\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: identity\r\n",
        "transfer-encoding: xchunked\r\n",
    ] {
        assert_eq!(framing_of(fields), Err(HeadError::Framing), "{fields}");
    }
    let old = read(b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
    assert_eq!(old.unwrap_err(), HeadError::Framing);
}

#[test]
fn some_answers_have_no_body() {
    for (method, status) in [(Method::HEAD, 200), (Method::GET, 204), (Method::GET, 304)] {
        for fields in ["", "content-length: 5\r\n", "transfer-encoding: chunked\r\n"] {
            let bytes = format!("HTTP/1.1 {status} X\r\n{fields}\r\n");
            let (head, _) = read_for(&method, [bytes.as_bytes()]).unwrap().unwrap();
            assert_eq!((head.framing, head.keep_alive), (Framing::Length(0), true), "{method} {status} {fields}");
        }
    }
}

#[test]
fn what_is_no_answer_is_refused_at_once() {
    for bytes in [
        &b"SSH-2.0-x"[..],
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: no name\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: \0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\r\n folded\r\n\r\n",
        b"\x16\x03\x01",
    ] {
        assert_eq!(read(bytes).unwrap_err(), HeadError::Malformed, "{:?}", String::from_utf8_lossy(bytes));
    }
    assert_eq!(read(b"HTTP/1.1 101 Switching Protocols\r\n\r\n").unwrap_err(), HeadError::Upgrade);
}

#[test]
fn heads_are_bounded_in_bytes_and_in_headers() {
    let head = |size: usize| {
        let start = "HTTP/1.1 200 OK\r\na: ";
        format!("{start}{}\r\n\r\n", "x".repeat(size - start.len() - 4))
    };
    for step in [1024, MAX_HEAD + 1] {
        let pieces = |size: usize| head(size).into_bytes();
        assert!(read_for(&Method::GET, pieces(MAX_HEAD).chunks(step)).unwrap().is_some());
        assert_eq!(read_for(&Method::GET, pieces(MAX_HEAD + 1).chunks(step)).unwrap_err(), HeadError::TooLarge);
    }
    let endless =
        b"HTTP/1.1 200 OK\r\na: ".iter().copied().chain(std::iter::repeat_n(b'x', MAX_HEAD)).collect::<Vec<_>>();
    assert_eq!(read_for(&Method::GET, endless.chunks(100)).unwrap_err(), HeadError::TooLarge);
    let interim = b"HTTP/1.1 100 Continue\r\n\r\n".repeat(MAX_HEAD / 25 + 1);
    assert_eq!(read(&interim).unwrap_err(), HeadError::TooLarge);
    let many = |count| format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(count)).into_bytes();
    assert_eq!(read(&many(MAX_HEADERS)).unwrap().unwrap().0.headers.len(), MAX_HEADERS);
    assert_eq!(read(&many(MAX_HEADERS + 1)).unwrap_err(), HeadError::TooLarge);
}

proptest! {
    #[test]
    fn no_bytes_panic(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            "HTTP/1.1 [1-5][0-9]{2} [a-z]{0,3}\r\n([a-z-]{1,9}: [ -~]{0,9}\r\n){0,4}\r\n.{0,9}".prop_map(String::into_bytes),
            "HTTP/1.1 200 OK\r\n((content-length|transfer-encoding|connection): [0-9a-z, ]{0,9}\r\n){0,3}\r\n"
                .prop_map(String::into_bytes),
        ],
        step in 1..20usize,
    ) {
        let whole = read(&bytes).map(|found| found.map(|(head, rest)| (head.status, head.framing, rest)));
        let split = read_for(&Method::POST, bytes.chunks(step))
            .map(|found| found.map(|(head, rest)| (head.status, head.framing, rest)));
        // A malformed head that is not complete may be noticed later, or not before the connection ends.
        if whole.is_ok() {
            prop_assert_eq!(whole, split);
        }
    }
}
