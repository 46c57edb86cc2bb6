//! Decides what certificates `iop init` makes: a CA for tests and one certificate of the Edge, valid for 90 days.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use iop_execution::Redacted;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// How long certificates are valid, in days.
pub const VALID_DAYS: u64 = 90;
/// Names that every Edge certificate holds.
pub const LOCAL_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// What `iop init` made. The CA's own key is thrown away: a new certificate needs a new `iop init`.
#[derive(Debug)]
pub struct DevCertificates {
    /// PEM of the CA.
    pub ca: String,
    /// PEM of the Edge's certificate.
    pub edge: String,
    /// PEM of the Edge's private key.
    pub edge_key: Redacted<String>,
}

/// Makes a CA of path length 0 and one certificate for the Edge with [`LOCAL_NAMES`] and `hosts`.
///
/// # Errors
/// When a host is no valid DNS name, or the operating system gives no randomness.
pub fn generate(hosts: &[String], now: SystemTime) -> Result<DevCertificates, rcgen::Error> {
    // An hour back: clocks of two machines differ.
    let (from, until) = (now - Duration::from_secs(3600), now + Duration::from_secs(VALID_DAYS * 86_400));
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::new(Vec::new())?;
    ca.distinguished_name = name("IOP development CA");
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    (ca.not_before, ca.not_after) = (from.into(), until.into());
    let ca_pem = ca.self_signed(&ca_key)?.pem();

    let edge_key = KeyPair::generate()?;
    let mut names: Vec<String> = LOCAL_NAMES.iter().map(ToString::to_string).collect();
    for host in hosts {
        let host = host.trim_matches(['[', ']']);
        let host = host.parse::<IpAddr>().map_or_else(|_| host.to_owned(), |ip| ip.to_string());
        if !names.contains(&host) {
            names.push(host);
        }
    }
    let mut edge = CertificateParams::new(names)?;
    edge.distinguished_name = name("IOP edge");
    edge.is_ca = IsCa::ExplicitNoCa;
    edge.use_authority_key_identifier_extension = true;
    edge.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    edge.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    (edge.not_before, edge.not_after) = (from.into(), until.into());
    let edge_pem = edge.signed_by(&edge_key, &Issuer::new(ca, ca_key))?.pem();
    Ok(DevCertificates { ca: ca_pem, edge: edge_pem, edge_key: Redacted::new(edge_key.serialize_pem()) })
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}
