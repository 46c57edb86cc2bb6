use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use tokio::time::timeout;

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
    let cases: [(String, Found, &str); 12] = [
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
        (list("{\"id\":\"a\",\"owned_by\":\"sglang\"}"), Found::Backend(vec!["a".to_owned()]), "sglang"),
        (format!("{head}\r\n{{\"object\":\"list\",\"data\":null}}"), Found::Backend(Vec::new()), "openai_compat"),
        (
            "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n\r\n{\"error\":{\"code\":503,\"message\":\"Loading model\",\"type\":\"unavailable_error\"}}"
                .to_owned(),
            Found::Loading,
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
    let found: Vec<_> = probed.into_iter().map(|probed| probed.found).collect();
    assert_eq!(found, [Found::Silent, Found::Silent, Found::Nothing]);
}

#[tokio::test]
async fn ollama_and_lm_studio_are_known_by_a_path_only_they_have() {
    // BIN-1, ADP-1
    use iop_execution::testkit::{Answer, ScriptedBackend};
    let list = |owner: &str| Answer::json(200, format!(r#"{{"data":[{{"id":"m","owned_by":"{owner}"}}]}}"#));
    let version = Answer::json(200, r#"{"version":"0.12.0"}"#);
    let own = Answer::json(200, r#"{"object":"list","data":[]}"#);
    for (owner, path, answer, kind) in [
        ("library", "/api/version", version.clone(), "ollama"),
        ("library", "/api/version", Answer::json(200, "<html>"), "openai_compat"),
        ("library", "/elsewhere", version.clone(), "openai_compat"),
        ("somebody", "/api/version", version, "openai_compat"),
        ("organization_owner", "/api/v0/models", own.clone(), "lm_studio"),
        ("organization_owner", "/elsewhere", own, "openai_compat"),
        ("library", "/api/version", Answer::new(200).late_head().hang(), "openai_compat"),
    ] {
        let backend = ScriptedBackend::builder()
            .route("GET", "/v1/models", list(owner))
            .route("GET", path, answer)
            .otherwise(Answer::json(404, "{}"))
            .start()
            .await
            .unwrap();
        let probed = probe_all(vec![("x".to_owned(), backend.base_url())]).await;
        assert_eq!((&probed[0].found, probed[0].kind), (&Found::Backend(vec!["m".to_owned()]), kind), "{owner} {path}");
    }
    // The ports hint too: whoever hints is asked for what only that kind has.
    for (kind, port) in USUAL {
        let asked = TELLTALES.iter().any(|telltale| telltale.kind == kind && telltale.port == port);
        assert_eq!(asked, matches!(kind, "ollama" | "lm_studio" | "sglang"), "{kind}");
    }
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
