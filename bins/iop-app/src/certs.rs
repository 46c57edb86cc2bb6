//! Decides what certificates `iop init` makes: a CA for tests, one certificate of the Edge, and one of each Node of a managed
//! fleet, valid for 90 days.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use iop_execution::Redacted;
use iop_wire::WorkloadIdentity;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

/// How long certificates are valid, in days.
pub const VALID_DAYS: u64 = 90;
/// Names that every Edge certificate holds.
pub const LOCAL_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// A certificate with its private key, as PEM.
#[derive(Debug)]
pub struct PemPair {
    /// The certificate.
    pub cert: String,
    /// The private key.
    pub key: Redacted<String>,
}

/// What `iop init` made. The CA's own key is thrown away: a new certificate needs a new `iop init`.
#[derive(Debug)]
pub struct DevCertificates {
    /// PEM of the CA.
    pub ca: String,
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

/// Makes a CA of path length 0 and one certificate for the Edge with [`LOCAL_NAMES`] and `hosts`.
///
/// # Errors
/// When a host is no valid DNS name, or the operating system gives no randomness.
pub fn generate(hosts: &[String], now: SystemTime) -> Result<DevCertificates, rcgen::Error> {
    generate_all(hosts, None, now)
}

/// The same for a managed fleet: one more certificate for each Node, and in each one its identity as the only URI name.
///
/// # Errors
/// As [`generate`].
pub fn generate_managed(
    hosts: &[String],
    identities: &Identities,
    now: SystemTime,
) -> Result<DevCertificates, rcgen::Error> {
    generate_all(hosts, Some(identities), now)
}

fn generate_all(
    hosts: &[String],
    identities: Option<&Identities>,
    now: SystemTime,
) -> Result<DevCertificates, rcgen::Error> {
    // An hour back: clocks of two machines differ.
    let (from, until) = (now - Duration::from_secs(3600), now + Duration::from_secs(VALID_DAYS * 86_400));
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::new(Vec::new())?;
    // A name of its own for each: two that share one are told apart by their signatures only, and a certificate of the one
    // that was replaced fails as forged and not as unknown.
    let id: String = ca.key_identifier(&ca_key).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    ca.distinguished_name = name(&format!("IOP development CA {id}"));
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    (ca.not_before, ca.not_after) = (from.into(), until.into());
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let issuer = Issuer::new(ca, ca_key);
    let signed = |names: Vec<String>, common: &str, usage, identity: Option<&WorkloadIdentity>| {
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
        (leaf.not_before, leaf.not_after) = (from.into(), until.into());
        let cert = leaf.signed_by(&key, &issuer)?.pem();
        Ok::<_, rcgen::Error>(PemPair { cert, key: Redacted::new(key.serialize_pem()) })
    };

    let mut names: Vec<String> = LOCAL_NAMES.iter().map(ToString::to_string).collect();
    for host in hosts {
        let host = host.trim_matches(['[', ']']);
        let host = host.parse::<IpAddr>().map_or_else(|_| host.to_owned(), |ip| ip.to_string());
        if !names.contains(&host) {
            names.push(host);
        }
    }
    let edge = signed(names, "IOP edge", ExtendedKeyUsagePurpose::ServerAuth, identities.map(|all| &all.edge))?;
    let nodes = identities.map(|all| all.nodes.as_slice()).unwrap_or_default();
    let node = |id| signed(Vec::new(), "IOP node", ExtendedKeyUsagePurpose::ClientAuth, Some(id));
    let nodes: Result<_, _> = nodes.iter().map(node).collect();
    Ok(DevCertificates { ca: ca_pem, edge: edge.cert, edge_key: edge.key, nodes: nodes? })
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

#[cfg(test)]
mod tests {
    use rustls::RootCertStore;
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

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
}
