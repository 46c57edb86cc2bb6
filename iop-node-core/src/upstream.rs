//! Decides which backends a Node may call (CRD-6): its own list, whatever the Edge's config says.
//!
//! By default loopback and private addresses. Link-local and metadata addresses are never allowed, listed or not. A host
//! name is allowed only if it is listed, or is `localhost` where loopback is allowed: what a name resolves to is not
//! known here, so an adapter that resolves one refuses the addresses of [`is_never_allowed`] again.

pub use iop_execution::address::is_never_allowed;
use std::net::IpAddr;
use std::str::FromStr;

use http::Uri;

/// What a Node may call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowUpstream {
    rules: Vec<Rule>,
}

/// One entry of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    Loopback,
    Private,
    Host(String),
    Net(IpAddr, u8),
}

/// An entry that is no rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no upstream rule: use `loopback`, `private`, a host name, an address, or a network like 10.0.0.0/8")]
pub struct InvalidRule(
    /// The entry.
    pub String,
);

/// Why a base URL is refused. Holds the host at most.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UpstreamRefused {
    /// It is no `http` or `https` origin with an optional path.
    #[error("base_url is no http or https URL without user, query and fragment")]
    Malformed,
    /// A link-local or metadata address, which no list can allow.
    #[error("base_url names {0}, a link-local or metadata address, which is never allowed")]
    Never(String),
    /// Not on the list.
    #[error("base_url names {0}, which is not in allow_upstream")]
    NotListed(String),
}

/// Hosts that hand out the credentials of a machine.
const METADATA_NAMES: &[&str] = &["metadata", "metadata.google.internal", "metadata.goog", "instance-data"];

impl Default for AllowUpstream {
    fn default() -> Self {
        Self { rules: vec![Rule::Loopback, Rule::Private] }
    }
}

impl AllowUpstream {
    /// A list from its entries, which replaces the default: `loopback`, `private`, host names, addresses, networks.
    ///
    /// # Errors
    /// [`InvalidRule`] with the first entry that is none of these.
    pub fn parse<S: AsRef<str>>(entries: impl IntoIterator<Item = S>) -> Result<Self, InvalidRule> {
        let rules = entries.into_iter().map(|entry| entry.as_ref().parse()).collect::<Result<_, _>>()?;
        Ok(Self { rules })
    }

    /// Checks the origin of a backend.
    ///
    /// # Errors
    /// [`UpstreamRefused`], safe to log.
    pub fn check(&self, base_url: &str) -> Result<(), UpstreamRefused> {
        let host = host_of(base_url).ok_or(UpstreamRefused::Malformed)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host);
        if let Ok(ip) = IpAddr::from_str(bare) {
            return if is_never_allowed(ip) {
                Err(UpstreamRefused::Never(host))
            } else if self.allows_ip(ip) {
                Ok(())
            } else {
                Err(UpstreamRefused::NotListed(host))
            };
        }
        let name = host.trim_end_matches('.');
        if METADATA_NAMES.contains(&name) {
            return Err(UpstreamRefused::Never(host));
        }
        let listed = self.rules.iter().any(|rule| match rule {
            Rule::Loopback => name == "localhost",
            Rule::Host(listed) => name == listed,
            Rule::Private | Rule::Net(..) => false,
        });
        if listed { Ok(()) } else { Err(UpstreamRefused::NotListed(host)) }
    }

    /// True if a URL with this address as its host may be called.
    #[must_use]
    pub fn allows_ip(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        !is_never_allowed(ip)
            && self.rules.iter().any(|rule| match rule {
                Rule::Loopback => ip.is_loopback(),
                Rule::Private => match ip {
                    IpAddr::V4(ip) => ip.is_private(),
                    IpAddr::V6(ip) => ip.is_unique_local(),
                },
                Rule::Net(net, bits) => contains(*net, *bits, ip),
                Rule::Host(_) => false,
            })
    }
}

impl FromStr for Rule {
    type Err = InvalidRule;

    fn from_str(entry: &str) -> Result<Self, InvalidRule> {
        let invalid = || InvalidRule(entry.chars().take(64).collect());
        match entry {
            "loopback" => return Ok(Self::Loopback),
            "private" => return Ok(Self::Private),
            _ => {}
        }
        if let Some((net, bits)) = entry.split_once('/') {
            let net: IpAddr = net.parse().map_err(|_| invalid())?;
            let bits: u8 = bits.parse().map_err(|_| invalid())?;
            return if bits <= width(net) { Ok(Self::Net(net, bits)) } else { Err(invalid()) };
        }
        if let Ok(ip) = entry.parse::<IpAddr>() {
            return Ok(Self::Net(ip, width(ip)));
        }
        let name = entry.to_ascii_lowercase();
        let legal = !name.is_empty()
            && name.len() <= 253
            && name.split('.').all(|label| {
                !label.is_empty()
                    && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            });
        if legal { Ok(Self::Host(name)) } else { Err(invalid()) }
    }
}

/// The host of an http(s) URL, in lower case; none if the URL carries anything that has no place in a base URL.
fn host_of(base_url: &str) -> Option<String> {
    if base_url.contains(['?', '#', '@', '\\']) {
        return None;
    }
    let uri: Uri = base_url.parse().ok()?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return None;
    }
    uri.host().filter(|host| !host.is_empty()).map(str::to_ascii_lowercase)
}

const fn width(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

fn contains(net: IpAddr, bits: u8, ip: IpAddr) -> bool {
    let (net, ip, width) = match (net, ip) {
        (IpAddr::V4(net), IpAddr::V4(ip)) => (u128::from(net.to_bits()), u128::from(ip.to_bits()), 32_u32),
        (IpAddr::V6(net), IpAddr::V6(ip)) => (net.to_bits(), ip.to_bits(), 128),
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return false,
    };
    let shift = width - u32::from(bits);
    net.checked_shr(shift).unwrap_or(0) == ip.checked_shr(shift).unwrap_or(0)
}

#[cfg(test)]
mod tests;
