//! Decides which backends are there: asks the usual loopback ports, or the URLs it is given, for their models.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::header::{AUTHORIZATION, HOST, SERVER};
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use iop_execution::Redacted;
use rustls_pki_types::ServerName;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

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

/// Kinds that are known by a path only they have. Asked where the owner of the models or the port hints at one.
const TELLTALES: [Telltale; 4] = [
    Telltale { kind: "ollama", owners: &["library"], port: 11434, path: "/api/version", key: "version" },
    Telltale {
        kind: "lm_studio",
        owners: &["organization_owner", "organization-owner"],
        port: 1234,
        path: "/api/v0/models",
        key: "data",
    },
    Telltale { kind: "sglang", owners: &[], port: 30000, path: "/server_info", key: "internal_states" },
    Telltale { kind: "sglang", owners: &[], port: 30000, path: "/get_server_info", key: "internal_states" },
];

struct Telltale {
    kind: &'static str,
    owners: &'static [&'static str],
    port: u16,
    path: &'static str,
    /// What its answer holds.
    key: &'static str,
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A backend with these models.
    Backend(Vec<String>),
    /// IOP itself.
    Iop,
    /// It wants a key.
    Unauthorized,
    /// It is loading its model: its list comes later.
    Loading,
    /// Something that does not list models.
    Other(String),
    /// It takes connections and says nothing.
    Silent,
    /// Nobody listens.
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
        let (found, kind) = probe(&url).await;
        Probed { name, url, kind, found }
    }))
    .await
}

/// One backend to look at closely.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Its origin.
    pub(crate) url: String,
    /// Its key, if it wants one.
    pub(crate) key: Option<Redacted<String>>,
    /// How long it may take.
    pub(crate) patience: Duration,
}

/// Paths at which servers tell their version, and the key of the answer that holds it.
const VERSIONS: [(&str, &str, &str); 5] = [
    ("vllm", "/version", "version"),
    ("ollama", "/api/version", "version"),
    ("llama_cpp", "/props", "build_info"),
    ("sglang", "/server_info", "version"),
    ("sglang", "/get_server_info", "version"),
];

/// Looks at one backend: what it is, and in which version where it tells.
///
/// # Cancel safety
/// May be dropped at any time; open connections close.
pub(crate) async fn ask(name: &str, asked: &Asked) -> (Probed, Option<String>) {
    let (name, url) = (name.to_owned(), asked.url.clone());
    let Some(mut place) = Place::of(&asked.url) else {
        let found = Found::Other("is no URL".to_owned());
        return (Probed { name, url, kind: ANY, found }, None);
    };
    place.key = asked.key.as_ref().and_then(|key| HeaderValue::try_from(format!("Bearer {}", key.expose())).ok());
    if let Some(key) = &mut place.key {
        key.set_sensitive(true);
    }
    let (found, kind) = probe_place(&place, asked.patience).await;
    let version = match found {
        Found::Backend(_) => timeout_at(Instant::now() + asked.patience, version(&place, kind)).await.ok().flatten(),
        _ => None,
    };
    (Probed { name, url, kind, found }, version)
}

async fn version(place: &Place, kind: &str) -> Option<String> {
    for (_, path, key) in VERSIONS.iter().filter(|(of, ..)| *of == kind) {
        let socket = place.connect().await.ok()?;
        if let Ok(Some(answer)) = place.get(socket, path).await
            && answer.status == StatusCode::OK
        {
            let told = serde_json::from_slice::<serde_json::Value>(&answer.body?).ok()?;
            return told.get(key)?.as_str().map(|text| text.chars().take(64).collect());
        }
    }
    None
}

async fn probe(url: &str) -> (Found, &'static str) {
    match Place::of(url) {
        Some(place) => probe_place(&place, PROBE_TIME).await,
        None => (Found::Nothing, ANY),
    }
}

async fn probe_place(place: &Place, patience: Duration) -> (Found, &'static str) {
    let until = Instant::now() + patience;
    let Ok(Ok(socket)) = timeout_at(until, place.connect()).await else { return (Found::Nothing, ANY) };
    // Somebody listens: whatever comes now, or does not come, is theirs.
    let listed = async {
        match place.get(socket, "/v1/models").await {
            Ok(Some(answer)) => read(&answer),
            Ok(None) => (Found::Nothing, None),
            Err(problem) => (Found::Other(problem), None),
        }
    };
    let Ok((found, list)) = timeout_at(until, listed).await else { return (Found::Silent, ANY) };
    match (&found, list) {
        (Found::Backend(_), Some((ANY, owners))) => {
            // Who it is only chooses the adapter: what is not told in time costs no backend.
            let kind = timeout_at(Instant::now() + PROBE_TIME, told_apart(place, &owners)).await;
            (found, kind.ok().flatten().unwrap_or(ANY))
        }
        (Found::Backend(_), Some((kind, _))) => (found, kind),
        (Found::Loading, _) => (found, "llama_cpp"),
        _ => (found, ANY),
    }
}

/// The kind of a server by a path only it has.
async fn told_apart(place: &Place, owners: &[String]) -> Option<&'static str> {
    for telltale in &TELLTALES {
        let hinted =
            place.port == telltale.port || owners.iter().any(|owner| telltale.owners.contains(&owner.as_str()));
        if !hinted {
            continue;
        }
        let socket = place.connect().await.ok()?;
        if let Ok(Some(answer)) = place.get(socket, telltale.path).await
            && answer.status == StatusCode::OK
            && answer
                .body
                .as_deref()
                .and_then(|body| serde_json::from_slice::<serde_json::Value>(body).ok())
                .is_some_and(|told| told.get(telltale.key).is_some())
        {
            return Some(telltale.kind);
        }
    }
    None
}

/// Where to ask.
struct Place {
    uri: Uri,
    host: String,
    port: u16,
    tls: bool,
    key: Option<HeaderValue>,
}

/// What was answered.
struct Answer {
    status: StatusCode,
    is_iop: bool,
    server: Vec<u8>,
    /// None if it broke off.
    body: Option<Bytes>,
}

impl Place {
    fn of(url: &str) -> Option<Self> {
        let uri = url.parse::<Uri>().ok()?;
        let tls = uri.scheme_str() == Some("https");
        let host = uri.host()?.trim_matches(['[', ']']).to_owned();
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Some(Self { uri, host, port, tls, key: None })
    }

    async fn connect(&self) -> std::io::Result<TcpStream> {
        TcpStream::connect((self.host.as_str(), self.port)).await
    }

    /// None if it speaks no HTTP.
    async fn get(&self, socket: TcpStream, path: &str) -> Result<Option<Answer>, String> {
        if !self.tls {
            return Ok(self.ask(socket, path).await);
        }
        let (Ok(config), Ok(name)) = (crate::tls::backend_client(), ServerName::try_from(self.host.clone())) else {
            return Err("TLS is not possible".to_owned());
        };
        match tokio_rustls::TlsConnector::from(Arc::clone(&config)).connect(name, socket).await {
            Ok(stream) => Ok(self.ask(stream, path).await),
            Err(error) => Err(format!("TLS: {error}")),
        }
    }

    async fn ask<IO>(&self, io: IO, path: &str) -> Option<Answer>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await.ok()?;
        let exchange = async move {
            let authority = self.uri.authority().map_or("", http::uri::Authority::as_str);
            let path = format!("{}{path}", self.uri.path().trim_end_matches('/').trim_end_matches("/v1"));
            let mut request = Request::get(path).header(HOST, authority).body(Empty::<Bytes>::new()).ok()?;
            if let Some(key) = &self.key {
                request.headers_mut().insert(AUTHORIZATION, key.clone());
            }
            let answer = sender.send_request(request).await.ok()?;
            let (head, body) = answer.into_parts();
            let is_iop = head.headers.contains_key("x-iop-edge");
            let server = head.headers.get(SERVER).map(|server| server.as_bytes().to_vec()).unwrap_or_default();
            let body = Limited::new(body, MAX_LIST_BYTES).collect().await.ok().map(http_body_util::Collected::to_bytes);
            Some(Answer { status: head.status, is_iop, server, body })
        };
        // The connection is driven beside the exchange and dropped with it: no task is left behind.
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            found = exchange.as_mut() => found,
            // The answer may lie in buffers when its connection has ended.
            _ = connection => exchange.await,
        }
    }
}

/// What an answer to the list of models says; of a list, the kind and the owners of its models too.
fn read(answer: &Answer) -> (Found, Option<(&'static str, Vec<String>)>) {
    if answer.is_iop {
        return (Found::Iop, None);
    }
    let body = answer.body.as_deref();
    match answer.status {
        StatusCode::OK => {}
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return (Found::Unauthorized, None),
        // llama.cpp's words while it loads its model.
        StatusCode::SERVICE_UNAVAILABLE if body.is_some_and(|body| contains(body, b"unavailable_error")) => {
            return (Found::Loading, None);
        }
        status => return (Found::Other(format!("answered {}", status.as_u16())), None),
    }
    let Some(body) = body else { return (Found::Other("broke off its list of models".to_owned()), None) };
    match serde_json::from_slice::<ModelList>(body) {
        Ok(list) => {
            let (kind, owners) = (list.kind(&answer.server), list.owners());
            // Ollama without a model says null.
            let models = list.data.unwrap_or_default().into_iter().map(|model| model.id).collect();
            (Found::Backend(models), Some((kind, owners)))
        }
        Err(_) => (Found::Other("lists no models".to_owned()), None),
    }
}

fn contains(text: &[u8], words: &[u8]) -> bool {
    text.windows(words.len()).any(|window| window == words)
}

#[derive(Deserialize)]
struct ModelList {
    /// Required, but may be null.
    #[serde(deserialize_with = "Option::deserialize")]
    data: Option<Vec<Model>>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    #[serde(default)]
    owned_by: Option<serde_json::Value>,
}

impl ModelList {
    fn owners(&self) -> Vec<String> {
        let models = self.data.iter().flatten();
        models.filter_map(|model| model.owned_by.as_ref()?.as_str().map(ToOwned::to_owned)).collect()
    }

    /// Servers that say in their list who they are.
    fn kind(&self, server: &[u8]) -> &'static str {
        let owners = self.owners();
        let owned_by = |owner: &str| owners.iter().any(|by| by == owner);
        if server.eq_ignore_ascii_case(b"llama.cpp") || owned_by("llamacpp") {
            "llama_cpp"
        } else if owned_by("vllm") {
            "vllm"
        } else if owned_by("sglang") {
            "sglang"
        } else {
            ANY
        }
    }
}
