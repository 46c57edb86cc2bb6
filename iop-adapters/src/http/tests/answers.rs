use super::*;
use crate::http::body::READ_BYTES;

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nanswer";

#[tokio::test]
async fn a_connection_serves_one_request_after_another() {
    // ADP-1
    let stage = Stage::new().await;
    let (response, mut stream) = stage.call(OK).await;
    let response = response.unwrap();
    assert_eq!((response.status, response.headers.len()), (StatusCode::OK, 1));
    assert_eq!(collect(response.body).await.0.concat(), b"answer");
    let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nanswer\r\n0\r\nx: y\r\n\r\n";
    let answers: [&[u8]; 4] =
        [chunked, b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", OK];
    for answer in answers {
        assert_eq!(stage.client.idle(), 1);
        let response = stage.call_again(&mut stream, answer).await.unwrap();
        let (_, error) = collect(response.body).await;
        assert!(error.is_none());
    }
}

#[tokio::test]
async fn a_connection_is_free_again_before_its_end_is_asked_for() {
    let stage = Stage::new().await;
    let (response, _stream) =
        stage.call(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n").await;
    let mut body = response.unwrap().body;
    assert!(next(&mut body).await.is_some());
    assert_eq!(stage.client.idle(), 1);
}

#[tokio::test]
async fn a_connection_that_may_not_be_used_again_is_closed() {
    for answer in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nanswer"[..],
        b"HTTP/1.0 200 OK\r\ncontent-length: 6\r\nconnection: keep-alive\r\n\r\nanswer",
        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nanswer and more",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nanswer\r\n0\r\n\r\nHTTP/1.1",
        b"HTTP/1.1 204 No Content\r\n\r\nanswer",
    ] {
        let stage = Stage::new().await;
        let (response, mut stream) = stage.call(answer).await;
        let (items, error) = collect(response.unwrap().body).await;
        assert!(error.is_none() && (items.is_empty() || items.concat() == b"answer"));
        assert_eq!(stage.client.idle(), 0);
        assert_eq!(read_to_close(&mut stream).await, 0);
    }
}

#[tokio::test]
async fn a_connection_the_server_closed_is_not_used_again() {
    // NOD-10
    let stage = Stage::new().await;
    let (response, stream) = stage.call(OK).await;
    collect(response.unwrap().body).await;
    drop(stream);
    settle().await;
    let (response, _stream) = stage.call(OK).await;
    assert!(response.is_ok(), "over a second connection");
}

#[tokio::test]
async fn a_request_is_never_sent_twice() {
    // NOD-10
    let stage = Stage::new().await;
    let reset = |mut stream: TcpStream| async move {
        read_request(&mut stream).await;
        stream.set_zero_linger().unwrap();
    };
    let fresh = async { reset(stage.accept().await).await };
    let (response, ()) = tokio::join!(soon(stage.client.send(post("question"))), fresh);
    assert!(matches!(response, Err(UpstreamError::Broken(_))), "{response:?}");

    let (response, stream) = stage.call(OK).await;
    collect(response.unwrap().body).await;
    assert_eq!(stage.client.idle(), 1);
    let (response, ()) = tokio::join!(soon(stage.client.send(post("question"))), reset(stream));
    assert!(matches!(response, Err(UpstreamError::Broken(_))), "{response:?}");
    tokio::select! {
        biased;
        _ = stage.listener.accept() => panic!("it was tried again"),
        () = settle() => {}
    }
}

#[tokio::test]
async fn what_one_read_brings_is_one_item() {
    // ADP-1: one frame, wake and write for a burst of tokens
    let stage = Stage::new().await;
    let chunks: String = (0..200).map(|at| format!("5\r\n{at:05}\r\n")).collect();
    let want: String = (0..200).map(|at| format!("{at:05}")).collect();
    let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let (response, mut stream) = stage.call(format!("{head}{chunks}").as_bytes()).await;
    let mut body = response.unwrap().body;
    assert_eq!(next(&mut body).await.unwrap().unwrap(), want, "together with the head");
    for _ in 0..3 {
        stream.write_all(chunks.as_bytes()).await.unwrap();
        assert_eq!(next(&mut body).await.unwrap().unwrap(), want, "behind it");
    }
    stream.write_all(b"1").await.unwrap();
    settle().await;
    assert!(futures_util::FutureExt::now_or_never(body.next()).is_none(), "framing alone is no item");
    stream.write_all(b"\r\nx\r\n0\r\n\r\n").await.unwrap();
    assert_eq!(collect(body).await.0, ["x"]);
    assert_eq!(stage.client.idle(), 1);
}

#[tokio::test]
async fn large_bodies_come_whole_in_items_of_bounded_size() {
    let data: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for chunk in data.chunks(70_000) {
        chunked.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        chunked.extend_from_slice(chunk);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", data.len());
    for answer in [[head.as_bytes(), &data].concat(), chunked] {
        let stage = Stage::new().await;
        let server = async {
            let mut stream = stage.accept().await;
            read_request(&mut stream).await;
            stream.write_all(&answer).await.unwrap();
            stream
        };
        let client = async { collect(stage.client.send(post("x")).await.unwrap().body).await };
        let ((items, error), _stream) = soon(async { tokio::join!(client, server) }).await;
        assert!(error.is_none());
        assert!(items.iter().all(|item| !item.is_empty() && item.len() <= READ_BYTES));
        assert!(items.concat() == data);
        assert_eq!(stage.client.idle(), 1);
    }
}

#[tokio::test]
async fn a_cut_body_never_looks_complete() {
    for (answer, want) in [
        (&b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"[..], ""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nanswe", "answe"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nans", "ans"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nanswer\r\n", "answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nanswer\r\n0\r\n", "answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nanswer\r\n0\r\n\r", "answer"),
    ] {
        let stage = Stage::new().await;
        let (response, stream) = stage.call(answer).await;
        drop(stream);
        let (items, error) = collect(response.unwrap().body).await;
        assert_eq!(items.concat(), want.as_bytes());
        assert!(matches!(error, Some(UpstreamError::Broken(_))), "{error:?}");
        assert_eq!(stage.client.idle(), 0);
    }
}

#[tokio::test]
async fn a_body_without_length_ends_with_the_connection_but_not_with_its_reset() {
    for version in ["1.0", "1.1"] {
        let answer = format!("HTTP/{version} 200 OK\r\n\r\nanswer");
        let stage = Stage::new().await;
        let (response, stream) = stage.call(answer.as_bytes()).await;
        drop(stream);
        let (items, error) = collect(response.unwrap().body).await;
        assert_eq!((items.concat(), error.is_none()), (b"answer".to_vec(), true));
        assert_eq!(stage.client.idle(), 0);

        let (response, stream) = stage.call(answer.as_bytes()).await;
        let mut body = response.unwrap().body;
        assert!(next(&mut body).await.unwrap().is_ok());
        stream.set_zero_linger().unwrap();
        drop(stream);
        assert!(matches!(next(&mut body).await, Some(Err(UpstreamError::Broken(_)))));
    }
}

#[tokio::test]
async fn garbage_breaks_the_call_and_is_not_repeated() {
    // SEC-1
    for answer in [
        &b"SENTINEL"[..],
        b"HTTP/1.1 200 OK\r\ncontent-length: SENTINEL\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 SENTINEL\r\n\r\n",
        &[&b"HTTP/1.1 200 OK\r\na: "[..], &b"SENTINEL".repeat(8 * 1024)].concat(),
    ] {
        let stage = Stage::new().await;
        let (response, mut stream) = stage.call(answer).await;
        let error = response.unwrap_err();
        assert!(matches!(error, UpstreamError::Broken(_)));
        assert!(!whole_text(&error).contains("SENTINEL"), "{error:?}");
        read_to_close(&mut stream).await;
    }
    let stage = Stage::new().await;
    let (response, _stream) = stage.call(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nSENTINEL\r\n").await;
    let (items, error) = collect(response.unwrap().body).await;
    let error = error.unwrap();
    assert!(items.is_empty() && !whole_text(&error).contains("SENTINEL"), "{error:?}");
}

#[tokio::test]
async fn interim_answers_are_skipped() {
    let stage = Stage::new().await;
    let (response, _stream) =
        stage.call(&[b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", OK].concat()).await;
    let response = response.unwrap();
    assert_eq!((response.status, response.headers.len()), (StatusCode::OK, 1));
    assert_eq!(collect(response.body).await.0.concat(), b"answer");
}

#[tokio::test]
async fn a_redirect_is_an_answer_like_any_other() {
    // NOD-10
    let stage = Stage::new().await;
    let (response, _stream) =
        stage.call(b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(response.unwrap().status, StatusCode::TEMPORARY_REDIRECT);
}

#[tokio::test]
async fn dropping_a_call_closes_its_connection() {
    // ADP-4
    let stage = Stage::new().await;
    let mut call = stage.client.send(post("question"));
    let server = async {
        let mut stream = stage.accept().await;
        read_request(&mut stream).await;
        stream
    };
    let mut stream = tokio::select! {
        _ = &mut call => panic!("nothing was answered"),
        stream = server => stream,
    };
    drop(call);
    assert_eq!(read_to_close(&mut stream).await, 0);

    for (answer, read) in [
        (&b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"[..], false),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nans", true),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", false),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nanswer\r\n", true),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nanswer\r\n0\r\n\r\n", false),
        (b"HTTP/1.1 200 OK\r\n\r\nanswer", true),
    ] {
        let (response, mut stream) = stage.call(answer).await;
        let mut body = response.unwrap().body;
        if read {
            assert!(next(&mut body).await.unwrap().is_ok());
        }
        drop(body);
        assert_eq!(stage.client.idle(), 0);
        assert_eq!(read_to_close(&mut stream).await, 0);
    }
}

#[tokio::test]
async fn a_reader_that_stops_at_the_last_event_gives_the_connection_back_if_the_end_is_here() {
    for (more, idle) in
        [(&b"0\r\n\r\n"[..], 1), (b"0\r\n", 0), (b"1\r\nx\r\n0\r\n\r\n", 0), (b"0\r\n\r\nmore", 0), (b"!", 0)]
    {
        let stage = Stage::new().await;
        let (response, mut stream) =
            stage.call(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n[DONE]\r\n").await;
        let mut body = response.unwrap().body;
        assert_eq!(next(&mut body).await.unwrap().unwrap(), "[DONE]");
        stream.write_all(more).await.unwrap();
        settle().await;
        drop(body);
        assert_eq!(stage.client.idle(), idle, "{more:?}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_was_not_reached() {
    // SEC-1: the name is not repeated
    let stage = Stage::new().await;
    let Stage { listener, client } = stage;
    drop(listener);
    let error = soon(client.send(post("question"))).await.unwrap_err();
    assert!(matches!(error, UpstreamError::Connect(_)), "{error:?}");
    let unknown = HttpClient::new(Origin::parse("http://sentinel.invalid").unwrap()).unwrap();
    let error = soon(unknown.send(post("question"))).await.unwrap_err();
    assert!(matches!(error, UpstreamError::Connect(_)), "{error:?}");
    assert!(!whole_text(&error).contains("sentinel"), "{error:?}");
}
