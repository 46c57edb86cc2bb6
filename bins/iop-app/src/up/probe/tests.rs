use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

/// A server that answers one request with these bytes, and gives back what it was asked.
async fn server(answer: &'static str) -> (String, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            if socket.read(&mut byte).await.unwrap() == 0 {
                break;
            }
            request.extend(byte);
        }
        socket.write_all(answer.as_bytes()).await.unwrap();
        if answer.is_empty() {
            std::future::pending::<()>().await;
        }
        String::from_utf8(request).unwrap()
    });
    (url, asked)
}

#[tokio::test]
async fn what_answers_is_told_apart() {
    // BIN-1
    let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n";
    let list = |models: &str| format!("{head}\r\n{{\"object\":\"list\",\"data\":[{models}]}}");
    let cases: [(String, Found, &str); 9] = [
        (
            list("{\"id\":\"a\",\"x\":1},{\"id\":\"b/c:1\"}"),
            Found::Backend(vec!["a".to_owned(), "b/c:1".to_owned()]),
            "openai_compat",
        ),
        (list("{\"id\":\"a\",\"owned_by\":\"vllm\"}"), Found::Backend(vec!["a".to_owned()]), "vllm"),
        (list("{\"id\":\"a\",\"owned_by\":\"llamacpp\"}"), Found::Backend(vec!["a".to_owned()]), "llama_cpp"),
        (
            format!("{head}server: llama.cpp\r\n\r\n{{\"data\":[{{\"id\":\"a\",\"owned_by\":7}}]}}"),
            Found::Backend(vec!["a".to_owned()]),
            "llama_cpp",
        ),
        (format!("{head}x-iop-edge: 1\r\n\r\n{{\"data\":[]}}"), Found::Iop, "openai_compat"),
        (format!("{head}\r\n<html>"), Found::Other("lists no models".to_owned()), "openai_compat"),
        (
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned(),
            Found::Other("answered 404".to_owned()),
            "openai_compat",
        ),
        ("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n".to_owned(), Found::Unauthorized, "openai_compat"),
        ("SSH-2.0-OpenSSH\r\n".to_owned(), Found::Nothing, "openai_compat"),
    ];
    for (answer, expected, kind) in cases {
        let (url, _server) = server(Box::leak(answer.into_boxed_str())).await;
        let probed = probe_all(vec![("x".to_owned(), url)]).await;
        assert_eq!((&probed[0].found, probed[0].kind), (&expected, kind));
    }
}

#[tokio::test]
async fn silent_and_absent_backends_cost_one_probe_time_together() {
    // BIN-1
    let (silent, _one) = server("").await;
    let (also_silent, _two) = server("").await;
    let gone = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let places = [silent, also_silent, gone].map(|url| ("x".to_owned(), url)).to_vec();
    let probed = timeout(PROBE_TIME * 2, probe_all(places)).await.unwrap();
    assert!(probed.iter().all(|probed| probed.found == Found::Nothing), "{probed:?}");
}

#[tokio::test]
async fn a_base_url_is_asked_below_its_path_with_and_without_v1() {
    // BIN-1
    for (suffix, path) in [
        ("", "/v1/models"),
        ("/", "/v1/models"),
        ("/v1", "/v1/models"),
        ("/v1/", "/v1/models"),
        ("/api/v1", "/api/v1/models"),
    ] {
        let (url, asked) = server("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n").await;
        probe_all(vec![("x".to_owned(), format!("{url}{suffix}"))]).await;
        let asked = asked.await.unwrap();
        assert!(asked.starts_with(&format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1:")), "{asked}");
    }
}
