//! CMD-1: the calls of Ollama's own API that pass, and those that don't.

use iop_execution::Redacted;
use iop_execution::failure::FailureCode;

use super::*;

async fn commanded(
    backend: &ScriptedBackend,
    method: Method,
    path: &str,
    body: &str,
) -> Result<(u16, String), FailureCode> {
    let body = Redacted::new(Bytes::copy_from_slice(body.as_bytes()));
    let command = ProviderCommand::OllamaApi { method, path: path.to_owned(), body };
    match adapter(backend).command(command).await {
        Ok(CommandOutput::Http { status, body }) => {
            Ok((status.as_u16(), String::from_utf8(body.expose().to_vec()).unwrap()))
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.failure().code),
    }
}

#[tokio::test]
async fn what_only_looks_passes_with_its_status_and_nothing_else_reaches_the_server() {
    // CMD-1, SEC-1
    let backend = ScriptedBackend::builder()
        .route("GET", "/api/version", Answer::json(200, r#"{"version":"0.12.0"}"#))
        .route("POST", "/api/show", Answer::json(404, r#"{"error":"model 'x' not found"}"#))
        .route("GET", "/api/ps", Answer::json(401, "SENTINEL"))
        .route("GET", "/api/tags", Answer::json(200, vec![b' '; 32 * 1024 + 1]))
        .otherwise(Answer::json(200, "{}"))
        .start()
        .await
        .unwrap();
    assert_eq!(
        commanded(&backend, Method::GET, "/api/version", "").await,
        Ok((200, r#"{"version":"0.12.0"}"#.to_owned()))
    );
    let shown = commanded(&backend, Method::POST, "/api/show", r#"{"model":"x"}"#).await;
    assert_eq!(shown, Ok((404, r#"{"error":"model 'x' not found"}"#.to_owned())));
    assert_eq!(commanded(&backend, Method::GET, "/api/ps", "").await, Ok((401, String::new())));
    assert_eq!(commanded(&backend, Method::GET, "/api/tags", "").await, Err(FailureCode::ProviderProtocol));
    let before = backend.received().len();
    for (method, path, body, want) in [
        (Method::POST, "/api/generate", "{}", FailureCode::Unsupported),
        (Method::POST, "/api/chat", "{}", FailureCode::Unsupported),
        (Method::POST, "/api/pull", "{}", FailureCode::Unsupported),
        (Method::DELETE, "/api/delete", "{}", FailureCode::Unsupported),
        (Method::POST, "/api/tags", "{}", FailureCode::Unsupported),
        (Method::GET, "/", "", FailureCode::Unsupported),
        (Method::GET, "/api/tags?x=1", "", FailureCode::Unsupported),
        (Method::GET, "/api/../tags", "", FailureCode::InvalidRequest),
        (Method::GET, "//host/api/tags", "", FailureCode::InvalidRequest),
        (Method::GET, "/api/tags", "{}", FailureCode::InvalidRequest),
        (Method::POST, "/api/show", "[]", FailureCode::InvalidRequest),
        (Method::POST, "/api/show", "{} {}", FailureCode::InvalidRequest),
        (Method::POST, "/api/show", &format!("{{\"a\":\"{}\"}}", "x".repeat(32 * 1024)), FailureCode::InvalidRequest),
    ] {
        assert_eq!(commanded(&backend, method.clone(), path, body).await, Err(want), "{method} {path}");
    }
    assert_eq!(backend.received().len(), before);
}

#[tokio::test]
async fn a_server_that_is_gone_is_unreachable() {
    // CMD-1
    let free_port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let adapter = Ollama::new(OllamaConfig::new(format!("http://{free_port}"))).unwrap();
    let command =
        ProviderCommand::OllamaApi { method: Method::GET, path: "/api/ps".to_owned(), body: Redacted::default() };
    assert_eq!(adapter.command(command).await.unwrap_err().failure().code, FailureCode::ProviderUnreachable);
}
