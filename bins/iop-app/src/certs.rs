//! Decides what certificates `iop init` and `iop node` make: a CA of the fleet, one certificate of the Edge, and one of each Node
//! of a managed fleet, valid for 90 days, and never longer than the CA.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use iop_execution::Redacted;
use iop_wire::WorkloadIdentity;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData as _, SanType,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// How long certificates are valid, in days. So is a CA whose key is thrown away: it can't make the next ones.
pub const VALID_DAYS: u64 = 90;
/// How long a CA is valid whose key is kept, in days: ten years.
pub const CA_VALID_DAYS: u64 = 3650;
/// Names that every Edge certificate holds.
pub const LOCAL_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// A certificate with its private key, as PEM.
#[derive(Debug)]
pub struct PemPair {
    /// The certificate.
    pub cert: String,
    /// The private key.
    pub key: Redacted<String>,
    /// How long it is valid from now on.
    valid: Duration,
}

impl PemPair {
    /// For how many whole days it is valid from when it was made: [`VALID_DAYS`], or less where the CA ends before.
    #[must_use]
    pub const fn valid_days(&self) -> u64 {
        self.valid.as_secs() / 86_400
    }
}

/// What `iop init` made.
#[derive(Debug)]
pub struct DevCertificates {
    /// PEM of the CA.
    pub ca: String,
    /// PEM of the CA's private key, where it is kept: that of a managed fleet.
    pub ca_key: Option<Redacted<String>>,
    /// PEM of the Edge's certificate.
    pub edge: String,
    /// PEM of the Edge's private key.
    pub edge_key: Redacted<String>,
    /// The Nodes', in the order of their identities.
    pub nodes: Vec<PemPair>,
}

/// Who the workloads of a managed fleet are (CRD-10).
#[derive(Debug, Clone)]
pub struct Identities {
    /// The Edge.
    pub edge: WorkloadIdentity,
    /// The Nodes.
    pub nodes: Vec<WorkloadIdentity>,
}

/// Why a CA can't sign.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CaError {
    /// Its certificate.
    #[error("it holds no certificate that can be read")]
    Certificate,
    /// It is the certificate of something else.
    #[error("it is no CA's certificate")]
    NoCa,
    /// Its time is over, or has not begun.
    #[error("it is not valid now")]
    Time,
    /// Its key.
    #[error("its key can't be read: PKCS#8 in PEM form is wanted")]
    Key,
    /// The key is another one's.
    #[error("its key is that of another certificate")]
    OtherKey,
}

/// A CA that can sign. Its `Debug` shows nothing of the key.
pub struct Ca {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
    /// When it ends.
    until: SystemTime,
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").finish_non_exhaustive()
    }
}

impl Ca {
    /// Makes one of path length 0, valid for so many days.
    fn generate(days: u64, now: SystemTime) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut ca = CertificateParams::new(Vec::new())?;
        // A name of its own for each: two that share one are told apart by their signatures only, and a certificate of the one
        // that was replaced fails as forged and not as unknown.
        let id: String = ca.key_identifier(&key).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        ca.distinguished_name = name(&format!("IOP development CA {id}"));
        ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        (ca.not_before, ca.not_after) = validity(days, now);
        let pem = ca.self_signed(&key)?.pem();
        Ok(Self { pem, until: ca.not_after.into(), issuer: Issuer::new(ca, key) })
    }

    /// Reads certificate and key of one that was made before, here or elsewhere.
    ///
    /// # Errors
    /// [`CaError`].
    pub fn read(certificate: &str, key: &Redacted<String>, now: SystemTime) -> Result<Self, CaError> {
        let der = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(|_| CaError::Certificate)?;
        let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| CaError::Certificate)?;
        if !parsed.is_ca() {
            return Err(CaError::NoCa);
        }
        let unix = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let unix = i64::try_from(unix).unwrap_or(i64::MAX);
        let validity = parsed.validity();
        if validity.not_before.timestamp() > unix || validity.not_after.timestamp() <= unix {
            return Err(CaError::Time);
        }
        let key = KeyPair::from_pem(key.expose()).map_err(|_| CaError::Key)?;
        if key.subject_public_key_info() != parsed.public_key().raw {
            return Err(CaError::OtherKey);
        }
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(|_| CaError::Certificate)?;
        let until = u64::try_from(validity.not_after.timestamp()).unwrap_or(0);
        Ok(Self { pem: certificate.to_owned(), issuer, until: SystemTime::UNIX_EPOCH + Duration::from_secs(until) })
    }

    /// Its certificate, as PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate of a Node with this identity, and its key.
    ///
    /// # Errors
    /// When the operating system gives no randomness.
    pub fn node(&self, identity: &WorkloadIdentity, now: SystemTime) -> Result<PemPair, rcgen::Error> {
        self.sign(Vec::new(), "IOP node", ExtendedKeyUsagePurpose::ClientAuth, Some(identity), now)
    }

    /// A certificate of the Edge with these names, and with an identity where it has one.
    ///
    /// # Errors
    /// When a name is neither a valid DNS name nor an address, or the operating system gives no randomness.
    pub fn edge(
        &self,
        names: Vec<String>,
        identity: Option<&WorkloadIdentity>,
        now: SystemTime,
    ) -> Result<PemPair, rcgen::Error> {
        self.sign(names, "IOP edge", ExtendedKeyUsagePurpose::ServerAuth, identity, now)
    }

    fn sign(
        &self,
        names: Vec<String>,
        common: &str,
        usage: ExtendedKeyUsagePurpose,
        identity: Option<&WorkloadIdentity>,
        now: SystemTime,
    ) -> Result<PemPair, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut leaf = CertificateParams::new(names)?;
        if let Some(identity) = identity {
            leaf.subject_alt_names.push(SanType::URI(identity.to_string().try_into()?));
        }
        leaf.distinguished_name = name(common);
        leaf.is_ca = IsCa::ExplicitNoCa;
        leaf.use_authority_key_identifier_extension = true;
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![usage];
        (leaf.not_before, leaf.not_after) = validity(VALID_DAYS, now);
        // Nobody takes it once the CA has ended.
        leaf.not_after = leaf.not_after.min(self.until.into());
        let valid = SystemTime::from(leaf.not_after).duration_since(now).unwrap_or_default();
        let cert = leaf.signed_by(&key, &self.issuer)?.pem();
        Ok(PemPair { cert, key: Redacted::new(key.serialize_pem()), valid })
    }
}

/// From an hour back, because clocks of two machines differ.
fn validity(days: u64, now: SystemTime) -> (time::OffsetDateTime, time::OffsetDateTime) {
    ((now - Duration::from_secs(3600)).into(), (now + Duration::from_secs(days * 86_400)).into())
}

/// Makes a CA whose key is thrown away, and one certificate for the Edge with [`LOCAL_NAMES`] and `hosts`.
///
/// # Errors
/// When a host is no valid DNS name, or the operating system gives no randomness.
pub fn generate(hosts: &[String], now: SystemTime) -> Result<DevCertificates, rcgen::Error> {
    let ca = Ca::generate(VALID_DAYS, now)?;
    let edge = ca.edge(names(hosts), None, now)?;
    Ok(DevCertificates { ca: ca.pem, ca_key: None, edge: edge.cert, edge_key: edge.key, nodes: Vec::new() })
}

/// The same for a managed fleet: one more certificate for each Node, and in each one its identity as the only URI name. The
/// CA's key is kept, for Nodes that come later and for the next certificates.
///
/// # Errors
/// As [`generate`].
pub fn generate_managed(
    hosts: &[String],
    identities: &Identities,
    now: SystemTime,
) -> Result<DevCertificates, rcgen::Error> {
    let ca = Ca::generate(CA_VALID_DAYS, now)?;
    let edge = ca.edge(names(hosts), Some(&identities.edge), now)?;
    let nodes: Result<_, _> = identities.nodes.iter().map(|identity| ca.node(identity, now)).collect();
    let ca_key = Some(Redacted::new(ca.issuer.key().serialize_pem()));
    Ok(DevCertificates { ca: ca.pem, ca_key, edge: edge.cert, edge_key: edge.key, nodes: nodes? })
}

/// [`LOCAL_NAMES`] and these hosts, each once.
fn names(hosts: &[String]) -> Vec<String> {
    let mut names: Vec<String> = LOCAL_NAMES.iter().map(ToString::to_string).collect();
    for host in hosts {
        let host = host.trim_matches(['[', ']']);
        let host = host.parse::<IpAddr>().map_or_else(|_| host.to_owned(), |ip| ip.to_string());
        if !names.contains(&host) {
            names.push(host);
        }
    }
    names
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use iop_wire::link::grpc::NodeVerifier;
    use iop_wire::{TrustDomain, WorkloadRole};
    use rustls::RootCertStore;
    use rustls::server::danger::ClientCertVerifier as _;
    use rustls_pki_types::UnixTime;

    use super::*;

    #[test]
    fn two_cas_have_two_names() {
        // CRD-10
        let subject = || {
            let made = generate(&[], SystemTime::now()).unwrap();
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(made.ca.as_bytes()).unwrap()).unwrap();
            roots.roots[0].subject.to_vec()
        };
        assert_ne!(subject(), subject(), "a stale certificate is of an unknown CA, not a forgery");
    }

    #[test]
    fn a_ca_that_was_kept_is_read_again_and_another_ones_key_is_not_its_own() {
        // CRD-10, BIN-3
        let now = SystemTime::now();
        let identity = |role, id: &str| WorkloadIdentity::new(TrustDomain::default(), role, id).unwrap();
        let identities =
            Identities { edge: identity(WorkloadRole::Edge, "edge"), nodes: vec![identity(WorkloadRole::Node, "n1")] };
        let made = || generate_managed(&[], &identities, now).unwrap();
        let (one, other) = (made(), made());
        let (key, others) = (one.ca_key.unwrap(), other.ca_key.unwrap());
        let ca = Ca::read(&one.ca, &key, now).unwrap();
        assert_eq!(ca.pem(), one.ca);
        assert!(!format!("{ca:?}").contains("PRIVATE"), "{ca:?}");
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(one.ca.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = NodeVerifier::new(Arc::new(roots), TrustDomain::default(), provider).unwrap();
        let third = ca.node(&identity(WorkloadRole::Node, "n3"), now).unwrap();
        let leaf = CertificateDer::from_pem_slice(third.cert.as_bytes()).unwrap();
        verifier.verify_client_cert(&leaf, &[], UnixTime::now()).unwrap();
        let days = |days: u64| now + Duration::from_secs(days * 86_400);
        for (certificate, key, at, error) in [
            (&one.ca, &others, now, CaError::OtherKey),
            (&one.edge, &key, now, CaError::NoCa),
            (&one.ca, &key, days(CA_VALID_DAYS + 1), CaError::Time),
            (&one.ca, &key, SystemTime::UNIX_EPOCH, CaError::Time),
            (&one.ca, &Redacted::new(one.ca.clone()), now, CaError::Key),
            (&"no PEM".to_owned(), &key, now, CaError::Certificate),
        ] {
            assert_eq!(Ca::read(certificate, key, at).unwrap_err(), error);
        }
        assert!(generate(&[], now).unwrap().ca_key.is_none());
    }

    #[test]
    fn a_certificate_ends_with_its_ca_at_the_latest() {
        // CRD-10
        let now = SystemTime::now();
        let identity = |role, id: &str| WorkloadIdentity::new(TrustDomain::default(), role, id).unwrap();
        let identities = Identities { edge: identity(WorkloadRole::Edge, "edge"), nodes: Vec::new() };
        let made = generate_managed(&[], &identities, now).unwrap();
        let key = made.ca_key.unwrap();
        let end = |pem: &str| {
            let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
            X509Certificate::from_der(&der).unwrap().1.validity().not_after.timestamp()
        };
        // The hour is for what the CA's own end is cut by: it is in whole seconds.
        for (left, valid) in [(CA_VALID_DAYS, VALID_DAYS), (VALID_DAYS + 1, VALID_DAYS), (6, 5), (1, 0)] {
            let later = now + Duration::from_secs((CA_VALID_DAYS - left) * 86_400 + 3600);
            let ca = Ca::read(&made.ca, &key, later).unwrap();
            for pair in [ca.node(&identity(WorkloadRole::Node, "n1"), later), ca.edge(names(&[]), None, later)] {
                let pair = pair.unwrap();
                assert_eq!(pair.valid_days(), valid, "{left}");
                assert_eq!(end(&pair.cert) == end(&made.ca), valid < VALID_DAYS, "{left}");
            }
        }
    }
}
