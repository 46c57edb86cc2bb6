//! Decides how tests ask: one request on one connection.

use std::net::SocketAddr;
use std::path::Path;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

pub(crate) async fn send(address: SocketAddr, request: Request<Full<Bytes>>) -> Response<Incoming> {
    over(TcpStream::connect(address).await.unwrap(), request).await
}

/// The same over TLS, with the certificate of that CA for `localhost`.
pub(crate) async fn send_tls(address: SocketAddr, ca: &Path, request: Request<Full<Bytes>>) -> Response<Incoming> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in crate::tls::load_certificates(ca).unwrap() {
        roots.add(certificate).unwrap();
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = rustls_pki_types::ServerName::try_from("localhost").unwrap();
    let socket = TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    over(connector.connect(name, socket).await.unwrap(), request).await
}

async fn over<IO: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    io: IO,
    request: Request<Full<Bytes>>,
) -> Response<Incoming> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await.unwrap();
    tokio::spawn(connection);
    sender.send_request(request).await.unwrap()
}

pub(crate) fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(path).header("host", "x").body(Full::default()).unwrap()
}

pub(crate) fn chat(model: &str, stream: bool) -> Request<Full<Bytes>> {
    let body = format!(r#"{{"model":"{model}","stream":{stream},"messages":[{{"role":"user","content":"Hello!"}}]}}"#);
    let request = Request::post("/v1/chat/completions").header("host", "x").header("content-type", "application/json");
    request.body(Full::from(body)).unwrap()
}

pub(crate) fn with_key(mut request: Request<Full<Bytes>>, key: &str) -> Request<Full<Bytes>> {
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

pub(crate) async fn text(response: Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// A frame of HTTP/2.
pub(crate) fn h2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}
