//! Decides what a certificate says that a person wants to know: whose it is, whom it names, how long it is good.

use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::Report;
use crate::config::time::Timestamp;

/// Days before its end from which a certificate is a warning.
const SOON_DAYS: u64 = 14;
const DAY: u64 = 86_400;

/// What a certificate says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    /// DNS names and addresses.
    pub(crate) names: Vec<String>,
    /// URI names.
    pub(crate) uris: Vec<String>,
    /// Who signed it, as it says.
    pub(crate) issuer: String,
    pub(crate) from: Timestamp,
    pub(crate) until: Timestamp,
}

/// Reads a certificate in DER.
pub(crate) fn facts(der: &[u8]) -> Option<Facts> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let time = |unix: i64| Timestamp(u64::try_from(unix).unwrap_or(0));
    let validity = certificate.validity();
    let (from, until) = (time(validity.not_before.timestamp()), time(validity.not_after.timestamp()));
    let issuer = certificate.issuer().to_string();
    let mut facts = Facts { names: Vec::new(), uris: Vec::new(), issuer, from, until };
    for extension in certificate.extensions() {
        let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else { continue };
        for name in &names.general_names {
            match name {
                GeneralName::DNSName(name) => facts.names.push((*name).to_owned()),
                GeneralName::IPAddress(bytes) => facts.names.extend(address(bytes)),
                GeneralName::URI(uri) => facts.uris.push((*uri).to_owned()),
                _ => {}
            }
        }
    }
    Some(facts)
}

fn address(bytes: &[u8]) -> Option<String> {
    if let Ok(four) = <[u8; 4]>::try_from(bytes) {
        return Some(std::net::Ipv4Addr::from(four).to_string());
    }
    <[u8; 16]>::try_from(bytes).ok().map(|sixteen| std::net::Ipv6Addr::from(sixteen).to_string())
}

/// Tells how long it is good, seen at `now`.
pub(super) fn tell(facts: &Facts, check: &str, now: Timestamp, report: &mut Report) {
    let Facts { names, uris, from, until, .. } = facts;
    let mut whom = names.join(", ");
    if !uris.is_empty() {
        whom = if whom.is_empty() { uris.join(", ") } else { format!("{whom}; {}", uris.join(", ")) };
    }
    let renew = "renew it (`iop node renew` in a fleet of `iop init --managed`); a running process takes it by itself";
    if until.0 <= now.0 {
        report.fail(check, format!("{whom}: expired at {until}"), renew);
    } else if from.0 > now.0 {
        report.fail(check, format!("{whom}: not valid before {from}"), "set the clock of this machine");
    } else {
        let days = (until.0 - now.0) / DAY;
        let plural = if days == 1 { "" } else { "s" };
        let detail = format!("{whom}: {days} day{plural} left, until {until}");
        if days < SOON_DAYS { report.warn(check, detail, renew) } else { report.ok(check, detail) }
    }
}
