//! Decides how certificates are read and which TLS is spoken: rustls on ring, never a process-wide default.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::edge::TlsPair;
use crate::config::secret::resolve_path;

/// A certificate or key that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A certificate file.
    #[error("certificate {}: {problem}", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A key file.
    #[error("private key {}: {problem}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The pair does not fit, or rustls refused it.
    #[error("certificate {} and its key: {problem}", path.display())]
    Pair {
        /// The certificate's file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// No root certificate was found on this system.
    #[error("no trusted certificates were found on this system: name a CA with --ca")]
    NoRoots,
}

impl TlsError {
    /// True if the key's file is the one to look at.
    #[must_use]
    pub const fn is_about_key(&self) -> bool {
        matches!(self, Self::Key { .. })
    }
}

/// A certificate chain with its key.
#[derive(Debug)]
pub struct Pair {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    path: PathBuf,
}

impl Clone for Pair {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key(), path: self.path.clone() }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The certificates of a PEM file.
///
/// # Errors
/// [`TlsError::Certificate`].
pub fn load_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let problem = |problem: String| TlsError::Certificate { path: path.to_path_buf(), problem };
    let bytes = std::fs::read(path).map_err(|error| problem(error.to_string()))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let chain = chain.map_err(|_| problem("it is not PEM".to_owned()))?;
    if chain.is_empty() {
        return Err(problem("it holds no certificate".to_owned()));
    }
    Ok(chain)
}

/// Reads a certificate chain and its key, and makes sure that they fit.
///
/// # Errors
/// Any [`TlsError`] but [`TlsError::NoRoots`].
pub fn load_pair(cert: &Path, key: &Path) -> Result<Pair, TlsError> {
    let chain = load_certificates(cert)?;
    let problem = |problem: String| TlsError::Key { path: key.to_path_buf(), problem };
    let bytes = std::fs::read(key).map_err(|error| problem(error.to_string()))?;
    let key =
        PrivateKeyDer::from_pem_slice(&bytes).map_err(|_| problem("it holds no private key in PEM form".to_owned()))?;
    let pair = Pair { chain, key, path: cert.to_path_buf() };
    server(&pair, &[], false)?;
    Ok(pair)
}

impl TlsPair {
    /// Reads the pair; relative paths start at `base`.
    ///
    /// # Errors
    /// Any [`TlsError`] but [`TlsError::NoRoots`].
    pub fn load(&self, base: &Path) -> Result<Pair, TlsError> {
        let path = |path: &Path| resolve_path(base, &path.to_string_lossy());
        load_pair(&path(&self.cert), &path(&self.key))
    }
}

fn server(pair: &Pair, alpn: &[&[u8]], only_13: bool) -> Result<ServerConfig, TlsError> {
    let problem = |error: rustls::Error| TlsError::Pair { path: pair.path.clone(), problem: error.to_string() };
    let versions: &[&rustls::SupportedProtocolVersion] =
        if only_13 { &[&rustls::version::TLS13] } else { &[&rustls::version::TLS13, &rustls::version::TLS12] };
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)
        .map_err(problem)?
        .with_no_client_auth()
        .with_single_cert(pair.chain.clone(), pair.key.clone_key())
        .map_err(problem)?;
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    if only_13 {
        // A resumed session would skip the check of a certificate that was revoked meanwhile.
        config.send_tls13_tickets = 0;
    }
    Ok(config)
}

/// For clients: TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1.
///
/// # Errors
/// [`TlsError::Pair`].
pub fn openai_server(pair: &Pair) -> Result<Arc<ServerConfig>, TlsError> {
    server(pair, &[b"h2", b"http/1.1"], false).map(Arc::new)
}

/// For Nodes: TLS 1.3 only, HTTP/2 only, no session tickets.
///
/// # Errors
/// [`TlsError::Pair`].
pub fn nodes_server(pair: &Pair) -> Result<Arc<ServerConfig>, TlsError> {
    server(pair, &[b"h2"], true).map(Arc::new)
}

/// For a Node that dials its Edge: TLS 1.3 only, HTTP/2 only; trusts the CA of that file, or what the system trusts.
///
/// # Errors
/// [`TlsError::Certificate`] and [`TlsError::NoRoots`].
pub fn node_client(ca: Option<&Path>) -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = ca {
        for certificate in load_certificates(path)? {
            let problem =
                |error: rustls::Error| TlsError::Certificate { path: path.to_path_buf(), problem: error.to_string() };
            roots.add(certificate).map_err(problem)?;
        }
    } else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TlsError::NoRoots);
        }
    }
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| TlsError::Pair { path: PathBuf::new(), problem: error.to_string() })?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// For backends with https, with what the system trusts: only to see whether one is there.
///
/// # Errors
/// [`TlsError::NoRoots`] and [`TlsError::Pair`].
pub fn backend_client() -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(TlsError::NoRoots);
    }
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::Pair { path: PathBuf::new(), problem: error.to_string() })?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}
