use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::stream;
use iop_execution::request::BodyAborted;

use super::*;

const CHUNK: usize = 64 * 1024;

/// A body whose chunks are always ready, and how many of its bytes were taken.
fn ready_body(len: u64) -> (RequestBody, Arc<AtomicU64>) {
    ready_chunks(len, CHUNK)
}

fn ready_chunks(len: u64, size: usize) -> (RequestBody, Arc<AtomicU64>) {
    let taken = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&taken);
    let chunk = Bytes::from(vec![7; size]);
    let chunks = stream::repeat_with(move || {
        counted.fetch_add(size as u64, Ordering::Relaxed);
        Ok(chunk.clone())
    });
    (RequestBody::chunks(len, chunks.take((len / size as u64) as usize)), taken)
}

#[tokio::test]
async fn bodies_arrive_whole_however_they_come() {
    let stage = Stage::new().await;
    let piece = |text: &'static str| Ok(Bytes::from_static(text.as_bytes()));
    let large = vec![7; 8 * 1024 * 1024];
    let bodies = [
        (RequestBody::full("question"), b"question".to_vec()),
        (RequestBody::full(""), Vec::new()),
        (RequestBody::chunks(0, stream::pending()), Vec::new()),
        (RequestBody::chunks(8, stream::iter([piece("que"), piece(""), piece("stion")])), b"question".to_vec()),
        (RequestBody::full(large.clone()), large.clone()),
        (ready_body(large.len() as u64).0, large),
    ];
    for (body, want) in bodies {
        let server = async {
            let mut stream = stage.accept().await;
            let (head, body) = read_request(&mut stream).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await.unwrap();
            (head, body)
        };
        let (response, (head, got)) = soon(async { tokio::join!(stage.client.send(post_body(body)), server) }).await;
        assert_eq!(response.unwrap().status, StatusCode::OK);
        assert!(got == want);
        assert!(head.contains(&format!("content-length: {}\r\n", want.len())) && !head.contains("transfer-encoding"));
    }
}

#[tokio::test]
async fn head_and_body_leave_together() {
    let stage = Stage::new().await;
    let mut call = stage.client.send(post("question"));
    let server = async {
        let mut stream = stage.accept().await;
        let mut first = vec![0; 1024];
        let count = stream.read(&mut first).await.unwrap();
        (String::from_utf8(first[..count].to_vec()).unwrap(), stream)
    };
    let (first, _stream) = tokio::select! {
        _ = &mut call => panic!("nothing was answered"),
        read = server => read,
    };
    assert!(first.starts_with("POST ") && first.ends_with("\r\n\r\nquestion"), "{first}");
}

const REFUSED: &[u8] = b"HTTP/1.1 413 Too Large\r\ncontent-length: 7\r\n\r\nrefused";

/// Sends a body and hears the server refuse it after its head; `reads` if it goes on reading.
async fn refused(body: RequestBody, reads: bool) -> usize {
    let stage = Stage::new().await;
    let client = async {
        let response = stage.client.send(post_body(body)).await.unwrap();
        assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(collect(response.body).await.0.concat(), b"refused");
        assert_eq!(stage.client.idle(), 0, "the rest of the request can't be told from the next");
    };
    let server = async {
        let mut stream = stage.accept().await;
        read_head(&mut stream).await;
        stream.write_all(REFUSED).await.unwrap();
        if reads { Ok(read_to_close(&mut stream).await) } else { Err(stream) }
    };
    let ((), read) = soon(async { tokio::join!(client, server) }).await;
    match read {
        Ok(read) => read,
        Err(mut stream) => read_to_close(&mut stream).await,
    }
}

#[tokio::test]
async fn a_refusal_is_heard_while_the_body_is_sent() {
    const LEN: u64 = 1024 * 1024 * 1024;
    // The server reads nothing: the socket is full.
    let (body, taken) = ready_body(LEN);
    refused(body, false).await;
    assert!(taken.load(Ordering::Relaxed) < LEN / 4);
    // It reads everything: the socket is never full.
    let (body, taken) = ready_body(LEN);
    assert!((refused(body, true).await as u64) < LEN / 4);
    assert!(taken.load(Ordering::Relaxed) < LEN / 4);
    // Chunks are so small that the socket is not even full for a moment.
    let (body, taken) = ready_chunks(LEN / 1024, 1);
    refused(body, true).await;
    assert!(taken.load(Ordering::Relaxed) < LEN / 1024 / 4, "{taken:?}");
    // The caller sends nothing more.
    assert_eq!(refused(RequestBody::chunks(8, stream::pending()), true).await, 0);
    let first = stream::iter([Ok(Bytes::from_static(b"que"))]);
    assert_eq!(refused(RequestBody::chunks(8, first.chain(stream::pending())), true).await, 3);
    // The body is whole but larger than the socket takes.
    refused(RequestBody::full(vec![7; 64 * 1024 * 1024]), false).await;
}

#[tokio::test]
async fn a_refusal_by_a_server_that_then_resets_the_connection_is_heard() {
    let stage = Stage::new().await;
    let (body, _) = ready_body(1024 * 1024 * 1024);
    let server = async {
        let mut stream = stage.accept().await;
        read_head(&mut stream).await;
        // Unread bytes are in the socket: closing it resets the connection.
        stream.readable().await.unwrap();
        stream.write_all(REFUSED).await.unwrap();
    };
    let (response, ()) = soon(async { tokio::join!(stage.client.send(post_body(body)), server) }).await;
    let response = response.unwrap();
    assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(collect(response.body).await.0.concat(), b"refused");
    assert_eq!(stage.client.idle(), 0);
}

#[tokio::test]
async fn an_answer_that_begins_early_does_not_end_the_upload() {
    let stage = Stage::new().await;
    let want = 16 * 1024 * 1024;
    let (body, _) = ready_body(want as u64);
    let server = async {
        let mut stream = stage.accept().await;
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n").await.unwrap();
        let mut body = vec![0; want];
        stream.read_exact(&mut body).await.unwrap();
        stream.write_all(b"1\r\nb\r\n0\r\n\r\n").await.unwrap();
        stream
    };
    let client = async { collect(stage.client.send(post_body(body)).await.unwrap().body).await };
    let ((items, error), _stream) = soon(async { tokio::join!(client, server) }).await;
    assert_eq!((items.concat(), error.is_none()), (b"ab".to_vec(), true));
    assert_eq!(stage.client.idle(), 1, "all of it was sent");
}

#[tokio::test]
async fn an_upload_that_breaks_off_is_the_callers() {
    let piece = || Ok(Bytes::from_static(b"quest"));
    for (name, chunks, sent) in [
        ("aborted", vec![piece(), Err(BodyAborted)], 5),
        ("aborted at once", vec![Err(BodyAborted)], 0),
        ("short", vec![piece()], 5),
        ("long", vec![piece(), piece()], 5),
    ] {
        let stage = Stage::new().await;
        let body = RequestBody::chunks(8, stream::iter(chunks));
        let server = async {
            let mut stream = stage.accept().await;
            let mut got = Vec::new();
            let _ = soon(stream.read_to_end(&mut got)).await;
            got
        };
        let (response, got) = soon(async { tokio::join!(stage.client.send(post_body(body)), server) }).await;
        assert!(matches!(response, Err(UpstreamError::RequestBody)), "{name}: {response:?}");
        let head = got.windows(4).position(|four| four == b"\r\n\r\n").map_or(got.len(), |at| at + 4);
        assert!(got.len() - head <= sent, "{name}");
        assert_eq!(stage.client.idle(), 0);
    }
}

#[tokio::test]
async fn an_upload_that_breaks_off_during_the_answer_breaks_the_answer_off() {
    let stage = Stage::new().await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let first = stream::iter([Ok(Bytes::from_static(b"quest"))]);
    let chunks = first.chain(stream::once(async {
        let _ = stopped.await;
        Err(BodyAborted)
    }));
    let server = async {
        let mut stream = stage.accept().await;
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nans").await.unwrap();
        stream
    };
    let call = stage.client.send(post_body(RequestBody::chunks(8, chunks)));
    let (response, mut stream) = soon(async { tokio::join!(call, server) }).await;
    let mut body = response.unwrap().body;
    assert_eq!(next(&mut body).await.unwrap().unwrap(), "ans");
    stop.send(()).unwrap();
    assert!(matches!(next(&mut body).await, Some(Err(UpstreamError::RequestBody))));
    assert_eq!(read_to_close(&mut stream).await, 5);
}
