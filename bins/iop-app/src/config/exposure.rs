//! Decides what may be reachable from outside this machine: nothing without auth and TLS, unless somebody said so.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// What protects a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protection {
    /// Callers must show a key or token.
    pub auth: bool,
    /// Connections are encrypted.
    pub tls: bool,
    /// Somebody said that it may be without auth.
    pub insecure_no_auth: bool,
    /// Somebody said that it may be without TLS.
    pub insecure_plaintext: bool,
}

/// Something that would be reachable from outside and is not protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposed {
    /// Everybody could use it.
    NoAuth,
    /// Everybody on the path could read it.
    NoTls,
}

impl fmt::Display for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoAuth => "is reachable from other machines and asks for no key",
            Self::NoTls => "is reachable from other machines and has no TLS",
        })
    }
}

/// True if only this machine can reach the address.
#[must_use]
pub fn is_loopback(address: SocketAddr) -> bool {
    match address.ip() {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback()),
    }
}

/// What is exposed at an address with that protection (BIN-6).
#[must_use]
pub fn exposed(address: SocketAddr, protection: Protection) -> Vec<Exposed> {
    let mut list = Vec::new();
    if is_loopback(address) {
        return list;
    }
    if !protection.auth && !protection.insecure_no_auth {
        list.push(Exposed::NoAuth);
    }
    if !protection.tls && !protection.insecure_plaintext {
        list.push(Exposed::NoTls);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_of_address_and_protection_is_decided() {
        // BIN-6
        let inside = ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"];
        let outside = ["0.0.0.0:1", "[::]:1", "192.168.1.5:1", "[fe80::1]:1", "[::ffff:10.0.0.1]:1", "8.8.8.8:1"];
        for bits in 0..16_u8 {
            let on = |bit: u8| bits & (1 << bit) != 0;
            let protection = Protection { auth: on(0), tls: on(1), insecure_no_auth: on(2), insecure_plaintext: on(3) };
            for address in inside {
                assert_eq!(exposed(address.parse().unwrap(), protection), [], "{address}");
            }
            for address in outside {
                let list = exposed(address.parse().unwrap(), protection);
                assert_eq!(list.contains(&Exposed::NoAuth), !(on(0) || on(2)), "{address} {protection:?}");
                assert_eq!(list.contains(&Exposed::NoTls), !(on(1) || on(3)), "{address} {protection:?}");
            }
        }
    }
}
