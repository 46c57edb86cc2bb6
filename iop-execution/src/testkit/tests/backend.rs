use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

/// Longest any single wait may take: a bound, never a measure.
const PATIENCE: Duration = Duration::from_secs(20);

async fn post(stream: &mut TcpStream, model: &str, stream_it: bool) {
    let body = chat_json(model, "hello", stream_it);
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
}

async fn connect(backend: &ScriptedBackend) -> TcpStream {
    TcpStream::connect(backend.addr()).await.unwrap()
}

async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = Vec::new();
    let read = async {
        while !text.ends_with(end.as_bytes()) {
            let byte = stream.read_u8().await.expect("the connection is open");
            text.push(byte);
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("the answer is complete");
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn answers_are_picked_by_model_and_stream_and_connections_live_on() {
    // EXE-15
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let mut stream = connect(&backend).await;
    post(&mut stream, "no_role", true).await;
    let answer = read_until(&mut stream, "\r\n0\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("transfer-encoding: chunked"), "{answer}");
    post(&mut stream, "no_role", false).await;
    assert!(read_until(&mut stream, "\"total_tokens\":5}}").await.contains("chat.completion\""));
    post(&mut stream, "nobody", true).await;
    assert!(read_until(&mut stream, "\"}}").await.starts_with("HTTP/1.1 404"));
    stream.write_all(b"GET /v1/models HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(read_until(&mut stream, "\"list\"}").await.contains("\"id\":\"utf8_split\""));
    let traffic = backend.traffic();
    assert_eq!((traffic.connections, traffic.requests, traffic.answered), (1, 4, 4));
    let received = backend.received();
    assert_eq!(received[0].header("host"), Some("x"));
    assert_eq!(received[3].method, "GET");
}

#[tokio::test]
async fn pauses_go_on_when_told_and_a_client_that_leaves_is_noticed() {
    // EXE-15, ADP-4
    let answer = || Answer::events().write("a").pause().write("b").hang();
    let backend = ScriptedBackend::builder().otherwise(answer()).start().await.unwrap();
    let mut stream = connect(&backend).await;
    post(&mut stream, "m", true).await;
    read_until(&mut stream, "\r\na\r\n").await;
    backend.wait_for(|traffic| traffic.waiting == 1).await;
    backend.release();
    read_until(&mut stream, "1\r\nb\r\n").await;
    assert_eq!(backend.traffic().client_closed, 0);
    let left = std::time::Instant::now();
    drop(stream);
    let traffic = tokio::time::timeout(PATIENCE, backend.wait_for(|traffic| traffic.client_closed == 1)).await.unwrap();
    assert!(traffic.last_client_close.unwrap() >= left);
    assert_eq!((traffic.answering, traffic.waiting), (0, 0));
}

#[tokio::test]
async fn resets_and_cuts_look_like_resets_and_cuts() {
    // EXE-15
    let backend = ScriptedBackend::builder()
        .model("reset", Answer::reset_at_once())
        .model("cut", Answer::events().write("a").close())
        .start()
        .await
        .unwrap();
    let mut stream = connect(&backend).await;
    post(&mut stream, "reset", true).await;
    let error = stream.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let mut stream = connect(&backend).await;
    post(&mut stream, "cut", true).await;
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    assert!(rest.ends_with(b"1\r\na\r\n"), "no end of the body");
}

#[tokio::test]
async fn a_late_head_comes_with_the_first_byte_and_chunked_requests_are_read() {
    let answer = Answer::json(200, "{}").late_head();
    let late = Answer { steps: [vec![crate::testkit::backend::Step::Pause], answer.steps.clone()].concat(), ..answer };
    let backend = ScriptedBackend::builder().otherwise(late).start().await.unwrap();
    let mut stream = connect(&backend).await;
    stream
        .write_all(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
        .await
        .unwrap();
    backend.wait_for(|traffic| traffic.waiting == 1).await;
    assert_eq!(backend.received()[0].body, "abc");
    assert_eq!(stream.try_read(&mut [0; 1]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    backend.release();
    read_until(&mut stream, "{}").await;
}

#[tokio::test]
async fn nonsense_ends_its_connection_and_nothing_else() {
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let mut stream = connect(&backend).await;
    stream.write_all(b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n").await.unwrap();
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    assert_eq!(backend.traffic().requests, 0);
}
