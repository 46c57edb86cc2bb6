//! Decides how a connection opens: names resolved, addresses tried side by side, TLS as configured here and nowhere else.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;
use iop_execution::address::is_never_allowed;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, RootCertStore};
use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::TlsConnector;

use super::Origin;
use super::client::HttpClientError;
use super::socket::Socket;

/// How long a connection may take to open, TLS included. The only timer of the client: how long an answer may take is the
/// run's matter.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long one address is waited for before the next is tried beside it.
const STAGGER: Duration = Duration::from_millis(250);
/// Most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 16;

/// Why no connection opened. Holds no word of the other side, no host name and no address.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("connecting took too long")]
    Timeout,
    #[error("the host has only addresses that no backend may have")]
    Forbidden,
    #[error("the host has no address")]
    NoAddress,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("TLS: {0}")]
    Tls(&'static str),
}

/// How to open a connection to one backend.
pub(super) struct Dialer {
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Dialer {
    /// With the system's root certificates, or Mozilla's where the system has none.
    pub(super) fn new(origin: &Origin) -> Result<Self, HttpClientError> {
        if origin.is_https() { Self::with_roots(origin, system_roots()) } else { Ok(Self::plain(origin)) }
    }

    fn plain(origin: &Origin) -> Self {
        Self { host: origin.host().to_owned(), port: origin.port(), tls: None }
    }

    pub(super) fn with_roots(origin: &Origin, roots: Arc<RootCertStore>) -> Result<Self, HttpClientError> {
        let name = ServerName::try_from(origin.host().to_owned()).map_err(|_| HttpClientError::HostName)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(HttpClientError::Tls)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { tls: Some((TlsConnector::from(Arc::new(config)), name)), ..Self::plain(origin) })
    }

    /// Opens a connection, within [`CONNECT_TIMEOUT`].
    pub(super) async fn connect(&self) -> Result<Socket, ConnectError> {
        tokio::time::timeout(CONNECT_TIMEOUT, self.open()).await.map_err(|_| ConnectError::Timeout)?
    }

    async fn open(&self) -> Result<Socket, ConnectError> {
        let addresses = lookup_host((self.host.as_str(), self.port)).await?;
        let tcp = first_open(allowed(addresses)?).await?;
        tcp.set_nodelay(true)?;
        let Some((connector, name)) = &self.tls else { return Ok(Socket::Plain(tcp)) };
        let tls = Box::pin(connector.connect(name.clone(), tcp)).await.map_err(|error| tls_failure(&error))?;
        Ok(Socket::Tls(Box::new(tls)))
    }
}

/// What a name may resolve to: a name must not lead where its address could not be configured.
fn allowed(addresses: impl Iterator<Item = SocketAddr>) -> Result<VecDeque<SocketAddr>, ConnectError> {
    let mut known = false;
    let allowed: VecDeque<_> = addresses
        .inspect(|_| known = true)
        .filter(|address| !is_never_allowed(address.ip()))
        .take(MAX_ADDRESSES)
        .collect();
    if known && allowed.is_empty() { Err(ConnectError::Forbidden) } else { Ok(allowed) }
}

/// The first address that answers; the others are not waited for.
async fn first_open(mut addresses: VecDeque<SocketAddr>) -> Result<TcpStream, ConnectError> {
    let mut attempts = FuturesUnordered::new();
    let mut failure = ConnectError::NoAddress;
    loop {
        attempts.extend(addresses.pop_front().map(TcpStream::connect));
        let attempt = if addresses.is_empty() {
            attempts.next().await
        } else {
            match select(attempts.next(), pin!(tokio::time::sleep(STAGGER))).await {
                Either::Left((attempt, _)) => attempt,
                Either::Right(((), _)) => continue,
            }
        };
        match attempt {
            Some(Ok(tcp)) => return Ok(tcp),
            Some(Err(error)) => failure = error.into(),
            None => return Err(failure),
        }
    }
}

/// Loaded once per process.
fn system_roots() -> Arc<RootCertStore> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    Arc::clone(ROOTS.get_or_init(|| {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        }
        Arc::new(roots)
    }))
}

/// The failure of a handshake without the names that certificates hold.
fn tls_failure(error: &io::Error) -> ConnectError {
    use CertificateError as Bad;
    let Some(error) = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>()) else {
        return ConnectError::Io(error.kind().into());
    };
    ConnectError::Tls(match error {
        rustls::Error::InvalidCertificate(bad) => match bad {
            Bad::UnknownIssuer | Bad::BadSignature => "the certificate is not signed by a known issuer",
            Bad::Expired | Bad::ExpiredContext { .. } => "the certificate is expired",
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => "the certificate is not valid yet",
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => "the certificate is for another name",
            _ => "the certificate is not acceptable",
        },
        rustls::Error::InvalidMessage(_) => "the server does not speak TLS",
        rustls::Error::AlertReceived(_) => "the server refused the handshake",
        _ => "the handshake failed",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_does_not_lead_to_an_address_that_no_backend_may_have() {
        // SEC-1
        let parse =
            |list: &[&str]| allowed(list.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>().into_iter());
        assert!(matches!(parse(&["169.254.169.254:80", "[fe80::1]:80"]), Err(ConnectError::Forbidden)));
        assert_eq!(parse(&["169.254.169.254:80", "10.0.0.1:80"]).unwrap(), ["10.0.0.1:80".parse().unwrap()]);
        assert!(parse(&[]).unwrap().is_empty());
    }
}
