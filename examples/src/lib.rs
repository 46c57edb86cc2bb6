//! What the programs beside this file share: certificates with workload identities, made on the spot (in production they come
//! from your CA or from SPIRE), and a backend that prints the key it is shown. See the README for the rest.

use std::error::Error;
use std::sync::Arc;

use axum::http::HeaderMap;
use axum::{Router, routing::post};
use iop_wire::WorkloadIdentity;
use iop_wire::link::grpc::{EdgeVerifier, NodeTls, NodeVerifier, WantedEdge};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpListener;

/// What can go wrong in an example.
pub type Failure = Box<dyn Error + Send + Sync>;

/// A CA that lives as long as the program.
#[derive(Debug)]
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    roots: Arc<RootCertStore>,
}

/// A certificate and its key.
#[derive(Debug)]
pub struct Identified {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Ca {
    /// A fresh one of this name.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn new(name: &str) -> Result<Self, Failure> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let mut roots = RootCertStore::empty();
        roots.add(params.self_signed(&key)?.der().clone())?;
        Ok(Self { issuer: Issuer::new(params, key), roots: Arc::new(roots) })
    }

    /// A certificate for `127.0.0.1` whose only URI name is this identity.
    ///
    /// # Errors
    /// When the identity can't stand in a certificate.
    pub fn issue(&self, identity: &str, usage: ExtendedKeyUsagePurpose) -> Result<Identified, Failure> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
        params.subject_alt_names.push(SanType::URI(identity.try_into()?));
        params.extended_key_usages = vec![usage];
        let chain = vec![params.signed_by(&key, &self.issuer)?.der().clone()];
        let key = PrivateKeyDer::try_from(key.serialize_der())?;
        Ok(Identified { chain, key })
    }

    /// What an Edge listens with: TLS 1.3, and each Node shows who it is (CRD-10).
    ///
    /// # Errors
    /// When rustls refuses the certificate.
    pub fn edge(&self, edge_id: &str) -> Result<Arc<ServerConfig>, Failure> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let own = self.issue(&format!("spiffe://iop.local/iop/edge/{edge_id}"), ExtendedKeyUsagePurpose::ServerAuth)?;
        let verifier = NodeVerifier::new(Arc::clone(&self.roots), Default::default(), Arc::clone(&provider))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_single_cert(own.chain, own.key)?;
        config.send_tls13_tickets = 0;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }

    /// What a Node dials with: its own certificate, and the one Edge it talks to.
    ///
    /// # Errors
    /// When rustls refuses the certificate.
    pub fn node(&self, own: Identified, edge_id: &str) -> Result<NodeTls, Failure> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let wanted = WorkloadIdentity::parse(&format!("spiffe://iop.local/iop/edge/{edge_id}"))?;
        let verifier = EdgeVerifier::new(Arc::clone(&self.roots), WantedEdge::Exactly(wanted), Arc::clone(&provider))?;
        let verifier = Arc::new(verifier);
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::<EdgeVerifier>::clone(&verifier))
            .with_client_auth_cert(own.chain, own.key)?;
        config.resumption = rustls::client::Resumption::disabled();
        Ok(NodeTls::identified(Arc::new(config), verifier))
    }
}

/// The identity of a Node.
#[must_use]
pub fn node_uri(id: &str) -> String {
    format!("spiffe://iop.local/iop/node/{id}")
}

/// A model server that wants a key. It prints which one it was shown. Gives its base URL.
///
/// # Errors
/// When no port is free.
pub async fn backend_with_key() -> Result<String, Failure> {
    let answer = async |headers: HeaderMap| {
        let shown = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or("nothing");
        println!("  the backend sees: {shown}");
        let chunk = r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"large","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}"#;
        ([("content-type", "text/event-stream")], format!("data: {chunk}\n\ndata: [DONE]\n\n"))
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let app = Router::new().route("/v1/chat/completions", post(answer));
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(url)
}
