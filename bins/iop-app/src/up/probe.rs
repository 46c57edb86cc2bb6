//! Decides which backends are there: asks the usual loopback ports, or the URLs it is given, for their models.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::header::{HOST, SERVER};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

#[cfg(test)]
mod tests;

/// Where backends usually listen on this machine, and what it is called.
pub const USUAL: [(&str, u16); 5] =
    [("ollama", 11434), ("vllm", 8000), ("llama_cpp", 8080), ("lm_studio", 1234), ("sglang", 30000)];
/// How long one backend may take to list its models.
pub const PROBE_TIME: Duration = Duration::from_millis(700);
const MAX_LIST_BYTES: usize = 4 << 20;

/// The adapter kind of a server that does not say what it is.
const ANY: &str = "openai_compat";

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A backend with these models.
    Backend(Vec<String>),
    /// IOP itself.
    Iop,
    /// It wants a key.
    Unauthorized,
    /// Something that does not list models.
    Other(String),
    /// Nothing answers.
    Nothing,
}

/// One place that was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probed {
    /// Name for people, and the id of the provider.
    pub name: String,
    /// Its origin.
    pub url: String,
    /// The adapter kind that fits it best.
    pub kind: &'static str,
    /// What is there.
    pub found: Found,
}

/// Asks all places at the same time.
///
/// # Cancel safety
/// May be dropped at any time; open connections close.
pub async fn probe_all(places: Vec<(String, String)>) -> Vec<Probed> {
    join_all(places.into_iter().map(|(name, url)| async move {
        let (found, kind) = timeout(PROBE_TIME, probe(&url)).await.unwrap_or((Found::Nothing, ANY));
        Probed { name, url, kind, found }
    }))
    .await
}

async fn probe(url: &str) -> (Found, &'static str) {
    let Ok(uri) = url.parse::<Uri>() else { return (Found::Nothing, ANY) };
    let (Some(host), tls) = (uri.host(), uri.scheme_str() == Some("https")) else { return (Found::Nothing, ANY) };
    let host = host.trim_matches(['[', ']']);
    let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
    let Ok(socket) = TcpStream::connect((host, port)).await else { return (Found::Nothing, ANY) };
    if !tls {
        return ask(socket, &uri).await;
    }
    let (Ok(config), Ok(name)) = (crate::tls::backend_client(), ServerName::try_from(host.to_owned())) else {
        return (Found::Other("TLS is not possible".to_owned()), ANY);
    };
    match tokio_rustls::TlsConnector::from(Arc::clone(&config)).connect(name, socket).await {
        Ok(stream) => ask(stream, &uri).await,
        Err(error) => (Found::Other(format!("TLS: {error}")), ANY),
    }
}

async fn ask<IO>(io: IO, uri: &Uri) -> (Found, &'static str)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Ok((mut sender, connection)) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await else {
        return (Found::Nothing, ANY);
    };
    let exchange = async move {
        let authority = uri.authority().map_or("", http::uri::Authority::as_str);
        let path = format!("{}/v1/models", uri.path().trim_end_matches('/').trim_end_matches("/v1"));
        let Ok(request) = Request::get(path).header(HOST, authority).body(Empty::<Bytes>::new()) else {
            return (Found::Nothing, ANY);
        };
        let Ok(answer) = sender.send_request(request).await else { return (Found::Nothing, ANY) };
        if answer.headers().contains_key("x-iop-edge") {
            return (Found::Iop, ANY);
        }
        let server = answer.headers().get(SERVER).map(|server| server.as_bytes().to_vec()).unwrap_or_default();
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return (Found::Unauthorized, ANY),
            status => return (Found::Other(format!("answered {}", status.as_u16())), ANY),
        }
        match Limited::new(answer.into_body(), MAX_LIST_BYTES).collect().await {
            Ok(body) => match serde_json::from_slice::<ModelList>(&body.to_bytes()) {
                Ok(list) => {
                    let kind = list.kind(&server);
                    (Found::Backend(list.data.into_iter().map(|model| model.id).collect()), kind)
                }
                Err(_) => (Found::Other("lists no models".to_owned()), ANY),
            },
            Err(_) => (Found::Other("broke off its list of models".to_owned()), ANY),
        }
    };
    // The connection is driven beside the exchange and dropped with it: no task is left behind.
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        found = exchange.as_mut() => found,
        // The answer may lie in buffers when its connection has ended.
        _ = connection => exchange.await,
    }
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    #[serde(default)]
    owned_by: Option<serde_json::Value>,
}

impl ModelList {
    /// Servers with a probe of their own say who they are.
    fn kind(&self, server: &[u8]) -> &'static str {
        let owned_by = |owner| self.data.iter().any(|model| model.owned_by.as_ref().is_some_and(|by| by == owner));
        if server.eq_ignore_ascii_case(b"llama.cpp") || owned_by("llamacpp") {
            "llama_cpp"
        } else if owned_by("vllm") {
            "vllm"
        } else {
            ANY
        }
    }
}
