//! Decides which addresses no backend may have, whatever a configuration says: link-local and metadata services (SEC-1).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const METADATA_V4: &[Ipv4Addr] = &[Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(192, 0, 0, 192)];
const METADATA_V6: &[Ipv6Addr] =
    &[Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x0254), Ipv6Addr::new(0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254)];

/// True for link-local, metadata, unspecified, multicast and broadcast addresses: no list can allow them.
#[must_use]
pub fn is_never_allowed(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            ip.is_link_local()
                || ip.is_unspecified()
                || ip.is_multicast()
                || ip.is_broadcast()
                || METADATA_V4.contains(&ip)
        }
        IpAddr::V6(ip) => {
            ip.is_unicast_link_local() || ip.is_unspecified() || ip.is_multicast() || METADATA_V6.contains(&ip)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_and_link_local_addresses_are_never_allowed_in_any_notation() {
        // SEC-1
        for address in
            ["169.254.169.254", "169.254.0.1", "::ffff:169.254.169.254", "fe80::1", "0.0.0.0", "::", "224.0.0.1"]
        {
            assert!(is_never_allowed(address.parse().unwrap()), "{address}");
        }
        for address in ["127.0.0.1", "10.1.2.3", "192.168.1.1", "8.8.8.8", "::1", "fd12::1"] {
            assert!(!is_never_allowed(address.parse().unwrap()), "{address}");
        }
    }
}
