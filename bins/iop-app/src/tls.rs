//! Decides how certificates are read and which TLS is spoken: rustls on ring, never a process-wide default.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use iop_wire::link::grpc::{EdgeVerifier, IdentityProblem, NodeTls, NodeVerifier, WantedEdge, certificate_identity};
use iop_wire::{TrustDomain, WorkloadIdentity, WorkloadRole};
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

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
    /// A certificate without the workload identity that its owner must show (CRD-10).
    #[error("certificate {}: {}", path.display(), identity_problem(*role, *problem))]
    Identity {
        /// The certificate's file.
        path: PathBuf,
        /// Whose it is.
        role: WorkloadRole,
        /// What is wrong.
        problem: IdentityProblem,
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

fn identity_problem(role: WorkloadRole, problem: IdentityProblem) -> String {
    let what = match problem {
        IdentityProblem::Unreadable => "it can't be read",
        IdentityProblem::Ca => "it is a CA's, which can't be shown to a peer",
        IdentityProblem::Missing => "it has no URI name",
        IdentityProblem::Ambiguous => "it has more than one URI name",
        IdentityProblem::Malformed => "its URI name is no workload identity",
        IdentityProblem::Foreign => "its URI name is of another trust domain",
        IdentityProblem::Role => "its URI name is of the wrong kind",
        IdentityProblem::Unexpected => "its URI name is another one",
    };
    format!("{what}; it needs exactly one, spiffe://<trust domain>/iop/{role}/<id>")
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

/// The certificates of a PEM file as roots of trust.
///
/// # Errors
/// [`TlsError::Certificate`].
pub fn load_roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in load_certificates(path)? {
        let problem =
            |error: rustls::Error| TlsError::Certificate { path: path.to_path_buf(), problem: error.to_string() };
        roots.add(certificate).map_err(problem)?;
    }
    Ok(roots)
}

/// The workload identity in a certificate of our own, so that a wrong one is found before a peer refuses it.
///
/// # Errors
/// [`TlsError::Identity`].
pub fn own_identity(pair: &Pair, role: WorkloadRole) -> Result<WorkloadIdentity, TlsError> {
    let wrong = |problem: IdentityProblem| TlsError::Identity { path: pair.path.clone(), role, problem };
    let leaf = pair.chain.first().ok_or_else(|| wrong(IdentityProblem::Unreadable))?;
    let identity = certificate_identity(leaf).map_err(wrong)?;
    if identity.role() == role { Ok(identity) } else { Err(wrong(IdentityProblem::Role)) }
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
    server_for(pair, alpn, only_13, None)
}

fn server_for(
    pair: &Pair,
    alpn: &[&[u8]],
    only_13: bool,
    clients: Option<Arc<NodeVerifier>>,
) -> Result<ServerConfig, TlsError> {
    let problem = |error: rustls::Error| TlsError::Pair { path: pair.path.clone(), problem: error.to_string() };
    let versions: &[&rustls::SupportedProtocolVersion] =
        if only_13 { &[&rustls::version::TLS13] } else { &[&rustls::version::TLS13, &rustls::version::TLS12] };
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(versions).map_err(problem)?;
    let builder = match clients {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(pair.chain.clone(), pair.key.clone_key()).map_err(problem)?;
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

/// For Nodes that show who they are: as [`nodes_server`], and each certificate of a Node must be of a CA in `client_ca` and hold
/// one workload identity of `domain` (CRD-10). The verifier looks at certificates again later.
///
/// # Errors
/// [`TlsError::Certificate`], [`TlsError::Pair`], and [`TlsError::Identity`] when the Edge's own certificate has none.
pub fn identified_nodes_server(
    pair: &Pair,
    client_ca: &Path,
    domain: TrustDomain,
) -> Result<(Arc<ServerConfig>, Arc<NodeVerifier>), TlsError> {
    let own = own_identity(pair, WorkloadRole::Edge)?;
    if *own.trust_domain() != domain {
        let (path, role, problem) = (pair.path.clone(), WorkloadRole::Edge, IdentityProblem::Foreign);
        return Err(TlsError::Identity { path, role, problem });
    }
    let verifier = NodeVerifier::new(Arc::new(load_roots(client_ca)?), domain, provider())
        .map_err(|error| TlsError::Certificate { path: client_ca.to_path_buf(), problem: error.to_string() })?;
    let verifier = Arc::new(verifier);
    let config = server_for(pair, &[b"h2"], true, Some(Arc::clone(&verifier)))?;
    Ok((Arc::new(config), verifier))
}

/// For a Node that dials its Edge: TLS 1.3 only, HTTP/2 only; trusts the CA of that file, or what the system trusts.
///
/// # Errors
/// [`TlsError::Certificate`] and [`TlsError::NoRoots`].
pub fn node_client(ca: Option<&Path>) -> Result<Arc<ClientConfig>, TlsError> {
    Ok(Arc::clone(identified_node_client(ca, None, None)?.config()))
}

/// The same for a Node that shows who it is by `own`, and wants the Edge to be `wanted` beyond its DNS name (CRD-10).
///
/// # Errors
/// Any [`TlsError`] but [`TlsError::Key`].
pub fn identified_node_client(
    ca: Option<&Path>,
    own: Option<&Pair>,
    wanted: Option<WantedEdge>,
) -> Result<NodeTls, TlsError> {
    let roots = match ca {
        Some(path) => load_roots(path)?,
        None => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots
        }
    };
    if roots.is_empty() {
        return Err(TlsError::NoRoots);
    }
    let path = || ca.map(Path::to_path_buf).unwrap_or_default();
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| TlsError::Pair { path: PathBuf::new(), problem: error.to_string() })?;
    let (builder, edge) = match wanted {
        Some(wanted) => {
            let verifier = EdgeVerifier::new(Arc::new(roots), wanted, provider())
                .map_err(|error| TlsError::Certificate { path: path(), problem: error.to_string() })?;
            let edge = Arc::new(verifier);
            (builder.dangerous().with_custom_certificate_verifier(Arc::<EdgeVerifier>::clone(&edge)), Some(edge))
        }
        None => (builder.with_root_certificates(roots), None),
    };
    let mut config = match own {
        Some(pair) => builder
            .with_client_auth_cert(pair.chain.clone(), pair.key.clone_key())
            .map_err(|error| TlsError::Pair { path: pair.path.clone(), problem: error.to_string() })?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    let config = Arc::new(config);
    Ok(match edge {
        Some(edge) => NodeTls::identified(config, edge),
        None => config.into(),
    })
}

/// Whether a Node that trusts `roots` and wants `wanted` takes this chain for the Edge at `host` (CRD-10).
///
/// # Errors
/// Why it does not.
pub fn edge_for_nodes(
    chain: &[CertificateDer<'_>],
    roots: RootCertStore,
    wanted: WantedEdge,
    host: &str,
) -> Result<(), rustls::Error> {
    let general = |error: &dyn std::fmt::Display| rustls::Error::General(error.to_string());
    let verifier = EdgeVerifier::new(Arc::new(roots), wanted, provider()).map_err(|error| general(&error))?;
    let name = ServerName::try_from(host).map_err(|error| general(&error))?;
    let (leaf, rest) = chain.split_first().ok_or(rustls::Error::NoCertificatesPresented)?;
    verifier.verify_server_cert(leaf, rest, &name, &[], UnixTime::now()).map(|_| ())
}

/// Whether a server's certificate is of this CA, or of one that is below it in its chain. `then`, a time at which it was good: one
/// that has ended since is of that CA all the same.
///
/// # Errors
/// Why it is not.
pub(crate) fn is_of_ca(
    chain: &[CertificateDer<'_>],
    ca: CertificateDer<'static>,
    then: UnixTime,
) -> Result<(), rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(ca)?;
    let (leaf, rest) = chain.split_first().ok_or(rustls::Error::NoCertificatesPresented)?;
    let leaf = rustls::server::ParsedCertificate::try_from(leaf)?;
    let algorithms = provider().signature_verification_algorithms.all;
    rustls::client::verify_server_cert_signed_by_trust_anchor(&leaf, &roots, rest, then, algorithms)
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
