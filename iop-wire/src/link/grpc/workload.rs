//! Decides whose certificate is good: the chain by webpki, then exactly one workload identity of the right kind (CRD-10).
//!
//! The common name is never read, and neither is any other name of a Node. What fails here fails the handshake, before the peer
//! can send a byte of a message; only a Node that shows no certificate at all gets further, to be told so in words.

use std::fmt;
use std::sync::Arc;

use iop_execution::closed_list as closed;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::reason;
use crate::identity::{TrustDomain, VerifiedIdentity, WorkloadIdentity, WorkloadRole};
use crate::link::{HandshakeError, HandshakeFailure};

/// Largest certificate that is looked at, in bytes.
const MAX_CERTIFICATE: usize = 64 * 1024;

closed! {
    /// Why a certificate holds no usable workload identity.
    IdentityProblem {
        /// It can't be read.
        Unreadable = "unreadable",
        /// It is a CA's.
        Ca = "ca",
        /// It has no URI name.
        Missing = "missing",
        /// It has more than one URI name.
        Ambiguous = "ambiguous",
        /// Its URI name is no workload identity.
        Malformed = "malformed",
        /// It is of another trust domain.
        Foreign = "foreign",
        /// It is an Edge's where a Node's is wanted, or the other way round.
        Role = "role",
        /// It is another one than the one that is wanted.
        Unexpected = "unexpected",
    }
}

impl std::error::Error for IdentityProblem {}

impl From<IdentityProblem> for HandshakeFailure {
    fn from(problem: IdentityProblem) -> Self {
        match problem {
            IdentityProblem::Unreadable => Self::PeerMalformed,
            IdentityProblem::Ca => Self::PeerWrongPurpose,
            IdentityProblem::Missing => Self::PeerIdentityMissing,
            IdentityProblem::Ambiguous => Self::PeerIdentityAmbiguous,
            IdentityProblem::Malformed => Self::PeerIdentityMalformed,
            IdentityProblem::Foreign => Self::PeerIdentityForeign,
            IdentityProblem::Role => Self::PeerIdentityRole,
            IdentityProblem::Unexpected => Self::PeerIdentityUnexpected,
        }
    }
}

/// The one workload identity of a certificate in DER. It proves nothing: whose signature is on it is another question.
///
/// # Errors
/// [`IdentityProblem`].
pub fn certificate_identity(der: &[u8]) -> Result<WorkloadIdentity, IdentityProblem> {
    if der.len() > MAX_CERTIFICATE {
        return Err(IdentityProblem::Unreadable);
    }
    let Ok((rest, certificate)) = X509Certificate::from_der(der) else { return Err(IdentityProblem::Unreadable) };
    // One name in two extensions, or two constraints, could mean one thing here and another to somebody else.
    let basic = certificate.basic_constraints().map_err(|_| IdentityProblem::Unreadable)?;
    certificate.subject_alternative_name().map_err(|_| IdentityProblem::Unreadable)?;
    if !rest.is_empty() {
        return Err(IdentityProblem::Unreadable);
    }
    if basic.is_some_and(|basic| basic.value.ca) {
        return Err(IdentityProblem::Ca);
    }
    let mut uri = None;
    for extension in certificate.extensions() {
        let names = match extension.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(names) => names,
            ParsedExtension::ParseError { .. } => return Err(IdentityProblem::Unreadable),
            _ => continue,
        };
        for name in &names.general_names {
            match name {
                GeneralName::URI(_) if uri.is_some() => return Err(IdentityProblem::Ambiguous),
                GeneralName::URI(text) => uri = Some(*text),
                GeneralName::Invalid(..) => return Err(IdentityProblem::Unreadable),
                _ => {}
            }
        }
    }
    WorkloadIdentity::parse(uri.ok_or(IdentityProblem::Missing)?).map_err(|_| IdentityProblem::Malformed)
}

fn of_role(der: &[u8], domain: &TrustDomain, role: WorkloadRole) -> Result<WorkloadIdentity, IdentityProblem> {
    let identity = certificate_identity(der)?;
    if identity.trust_domain() != domain {
        return Err(IdentityProblem::Foreign);
    }
    if identity.role() != role {
        return Err(IdentityProblem::Role);
    }
    Ok(identity)
}

fn refused(problem: IdentityProblem) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(problem))))
}

/// What a Node proved by the certificates that TLS has verified.
pub(super) fn verified_node(chain: Option<&[CertificateDer<'_>]>) -> Option<VerifiedIdentity> {
    let chain = chain?;
    let identity = certificate_identity(chain.first()?).ok().filter(|shown| shown.role() == WorkloadRole::Node)?;
    Some(VerifiedIdentity::vouched(identity, chain.iter().map(|certificate| certificate.to_vec())))
}

/// Which Nodes an Edge takes: for `ServerConfig::with_client_cert_verifier`. A Node without a certificate passes, and has no
/// identity then: its registration is refused as `identity_required` (REG-4).
pub struct NodeVerifier {
    inner: Arc<dyn ClientCertVerifier>,
    domain: TrustDomain,
}

impl fmt::Debug for NodeVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeVerifier").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl NodeVerifier {
    /// Takes certificates of these roots with an identity `spiffe://<domain>/iop/node/…`.
    ///
    /// # Errors
    /// When there is no root.
    pub fn new(
        roots: Arc<RootCertStore>,
        domain: TrustDomain,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let inner = WebPkiClientVerifier::builder_with_provider(roots, provider).allow_unauthenticated().build()?;
        Ok(Self { inner, domain })
    }

    /// Looks at a Node's certificates again, with the roots of this verifier.
    ///
    /// # Errors
    /// Why they would be refused now.
    pub fn check_again(&self, peer: &VerifiedIdentity, now: UnixTime) -> Result<(), HandshakeError> {
        let chain: Vec<_> = peer.chain().iter().map(|der| CertificateDer::from(der.as_slice())).collect();
        let Some((leaf, rest)) = chain.split_first() else { return Err(HandshakeFailure::PeerNoCertificate.into()) };
        self.verify_client_cert(leaf, rest, now).map(|_| ()).map_err(|error| reason::of(&error))
    }
}

/// What both verifiers leave to webpki: whether the peer has the key of the certificate it shows.
macro_rules! signatures_by_webpki {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.inner.verify_tls12_signature(message, cert, dss)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.inner.verify_tls13_signature(message, cert, dss)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.inner.supported_verify_schemes()
        }
    };
}

impl ClientCertVerifier for NodeVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(leaf, rest, now)?;
        of_role(leaf, &self.domain, WorkloadRole::Node).map_err(refused)?;
        Ok(verified)
    }

    signatures_by_webpki!();
}

/// Which Edge a Node wants, beyond a valid chain and the DNS name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "there is nothing in between")]
pub enum WantedEdge {
    /// Any Edge of this trust domain.
    OfDomain(TrustDomain),
    /// This one.
    Exactly(WorkloadIdentity),
}

/// Which Edge a Node takes: for `ClientConfig::dangerous().with_custom_certificate_verifier`; it only adds to what webpki
/// checks.
#[derive(Debug)]
pub struct EdgeVerifier {
    inner: Arc<WebPkiServerVerifier>,
    wanted: WantedEdge,
}

impl EdgeVerifier {
    /// Takes certificates of these roots, for the name that is dialled, with the wanted identity.
    ///
    /// # Errors
    /// When there is no root.
    pub fn new(
        roots: Arc<RootCertStore>,
        wanted: WantedEdge,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let inner = WebPkiServerVerifier::builder_with_provider(roots, provider).build()?;
        Ok(Self { inner, wanted })
    }

    /// Looks at an Edge's certificates again, with the roots of this verifier. `name` is the one that was dialled.
    ///
    /// # Errors
    /// Why they would be refused now.
    pub fn check_again(
        &self,
        peer: &VerifiedIdentity,
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), HandshakeError> {
        let chain: Vec<_> = peer.chain().iter().map(|der| CertificateDer::from(der.as_slice())).collect();
        self.prove(&chain, name, now).map(|_| ())
    }

    /// What an Edge proves by these certificates.
    pub(super) fn prove(
        &self,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<VerifiedIdentity, HandshakeError> {
        let Some((leaf, rest)) = chain.split_first() else { return Err(HandshakeFailure::PeerNoCertificate.into()) };
        self.inner.verify_server_cert(leaf, rest, name, &[], now).map_err(|error| reason::of(&error))?;
        let identity = self.check(leaf).map_err(|problem| reason::of(&refused(problem)))?;
        Ok(VerifiedIdentity::vouched(identity, chain.iter().map(|certificate| certificate.to_vec())))
    }

    fn check(&self, leaf: &[u8]) -> Result<WorkloadIdentity, IdentityProblem> {
        match &self.wanted {
            WantedEdge::OfDomain(domain) => of_role(leaf, domain, WorkloadRole::Edge),
            WantedEdge::Exactly(wanted) => match of_role(leaf, wanted.trust_domain(), WorkloadRole::Edge)? {
                shown if shown == *wanted => Ok(shown),
                _ => Err(IdentityProblem::Unexpected),
            },
        }
    }
}

/// TLS of a Node's dial, and whether the Edge proves who it is by it. Made of a configuration alone, it proves nothing: a link
/// has an identity only because an [`EdgeVerifier`] has said so, however the configuration checks certificates.
#[derive(Debug, Clone)]
pub struct NodeTls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) edge: Option<Arc<EdgeVerifier>>,
}

impl NodeTls {
    /// The Edge must have the identity that `edge` wants. `config` verifies certificates by it or by other means; they must be
    /// good for both.
    #[must_use]
    pub const fn identified(config: Arc<ClientConfig>, edge: Arc<EdgeVerifier>) -> Self {
        Self { config, edge: Some(edge) }
    }

    /// What the Edge is known by, if it has to prove that.
    #[must_use]
    pub const fn edge(&self) -> Option<&Arc<EdgeVerifier>> {
        self.edge.as_ref()
    }

    /// The configuration.
    #[must_use]
    pub const fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }
}

/// The Edge's DNS name and chain are checked as the configuration says, and it has no identity.
impl From<Arc<ClientConfig>> for NodeTls {
    fn from(config: Arc<ClientConfig>) -> Self {
        Self { config, edge: None }
    }
}

impl ServerCertVerifier for EdgeVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.inner.verify_server_cert(leaf, rest, name, ocsp, now)?;
        self.check(leaf).map_err(refused)?;
        Ok(verified)
    }

    signatures_by_webpki!();
}
