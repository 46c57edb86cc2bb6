//! Decides how the HTTP client is set up: only what an adapter asked for happens on the wire.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use http::HeaderValue;
use http::header::CONTENT_LENGTH;
use iop_execution::RequestBody;
use rustls::{ClientConfig, RootCertStore};

use super::{Origin, Upstream, UpstreamError, UpstreamRequest, UpstreamResponse};

/// How long a connection may take to open. The only timer of the client: how long an answer may take is the run's matter.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an idle connection is kept. Below the 5 s after which common model servers close theirs, so that a request is
/// not sent into a connection that is just being closed.
const POOL_IDLE: Duration = Duration::from_secs(4);

/// The HTTP client of one adapter instance, with its own connections.
#[derive(Debug)]
pub struct HttpClient {
    client: reqwest::Client,
    origin: Origin,
}

/// The client could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpClientError {
    /// TLS.
    #[error("TLS could not be set up")]
    Tls(#[source] rustls::Error),
    /// Anything else.
    #[error("the HTTP client could not be set up")]
    Client(#[source] reqwest::Error),
}

impl HttpClient {
    /// A client for one backend. It opens no connection yet.
    ///
    /// # Errors
    /// [`HttpClientError`].
    pub fn new(origin: Origin) -> Result<Self, HttpClientError> {
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls(&origin)?)
            .http1_only()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .referer(false)
            .tcp_nodelay(true)
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE)
            .build()
            .map_err(HttpClientError::Client)?;
        Ok(Self { client, origin })
    }
}

/// The system's root certificates, or Mozilla's where the system has none; loaded once, and only for `https`.
fn tls(origin: &Origin) -> Result<ClientConfig, HttpClientError> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let roots = if origin.is_https() {
        Arc::clone(ROOTS.get_or_init(|| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
            }
            Arc::new(roots)
        }))
    } else {
        Arc::new(RootCertStore::empty())
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(HttpClientError::Tls)?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

#[async_trait]
impl Upstream for HttpClient {
    async fn send(&self, request: UpstreamRequest) -> Result<UpstreamResponse, UpstreamError> {
        let UpstreamRequest { method, path, headers, body } = request;
        let aborted = Arc::new(AtomicBool::new(false));
        let has_body = !body.is_empty();
        let mut call = self.client.request(method, self.origin.url(path)).headers(headers);
        if has_body {
            call = call.header(CONTENT_LENGTH, HeaderValue::from(body.len())).body(sent_body(body, &aborted));
        }
        let response = call.send().await.map_err(|error| {
            if aborted.load(Ordering::Acquire) {
                UpstreamError::RequestBody
            } else if error.is_connect() || error.is_builder() {
                UpstreamError::Connect(error.without_url().into())
            } else {
                UpstreamError::Broken(error.without_url().into())
            }
        })?;
        Ok(UpstreamResponse {
            status: response.status(),
            headers: response.headers().clone(),
            body: Box::pin(
                response
                    .bytes_stream()
                    .map(|read| read.map_err(|error| UpstreamError::Broken(error.without_url().into()))),
            ),
        })
    }
}

fn sent_body(body: RequestBody, aborted: &Arc<AtomicBool>) -> reqwest::Body {
    if let Some(bytes) = body.as_full() {
        return reqwest::Body::from(bytes.clone());
    }
    let aborted = Arc::clone(aborted);
    reqwest::Body::wrap_stream(body.inspect(move |chunk| {
        if chunk.is_err() {
            aborted.store(true, Ordering::Release);
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_can_be_set_up_for_either_scheme_without_a_process_wide_provider() {
        // ADP-1: TLS brings its own crypto, so nothing needs to be installed first
        for (url, https) in [("http://127.0.0.1:1", false), ("https://127.0.0.1:1", true)] {
            let origin = Origin::parse(url).unwrap();
            assert!(tls(&origin).is_ok());
            assert_eq!(origin.is_https(), https);
            assert!(!format!("{:?}", HttpClient::new(origin).unwrap()).is_empty());
        }
    }
}
