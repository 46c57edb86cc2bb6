//! Decides which base URLs name a backend.

use std::fmt;
use std::net::IpAddr;

use http::Uri;
use http::uri::Scheme;

const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// A backend's origin, and the path prefix below which its API lives.
#[derive(Clone, PartialEq, Eq)]
pub struct Origin {
    https: bool,
    authority: String,
    /// Without the brackets of an IPv6 address.
    host: String,
    port: u16,
    prefix: String,
}

/// Why a base URL was refused. Holds no part of it: it may carry a key by mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidOrigin {
    /// No URL.
    #[error("the base URL is not a URL like http://127.0.0.1:8080")]
    NotAUrl,
    /// Neither `http` nor `https`.
    #[error("the base URL must begin with http:// or https://")]
    Scheme,
    /// A user name or password in front of the host.
    #[error("the base URL must hold no user name or password; use auth")]
    UserInfo,
    /// A query or fragment.
    #[error("the base URL must have no query and no fragment")]
    Query,
    /// A path that could mean something else to somebody.
    #[error("the path of the base URL is not acceptable")]
    Path,
}

impl Origin {
    /// Parses a base URL, with or without `/v1` at its end.
    ///
    /// # Errors
    /// [`InvalidOrigin`].
    pub fn parse(text: &str) -> Result<Self, InvalidOrigin> {
        if text.contains(['?', '#']) {
            return Err(InvalidOrigin::Query);
        }
        let uri: Uri = text.parse().map_err(|_| InvalidOrigin::NotAUrl)?;
        let https = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(scheme) if *scheme == Scheme::HTTP => false,
            Some(_) => return Err(InvalidOrigin::Scheme),
            None => return Err(InvalidOrigin::NotAUrl),
        };
        let authority = uri.authority().ok_or(InvalidOrigin::NotAUrl)?;
        if authority.as_str().contains('@') {
            return Err(InvalidOrigin::UserInfo);
        }
        if authority.host().is_empty() {
            return Err(InvalidOrigin::NotAUrl);
        }
        let default = if https { HTTPS_PORT } else { HTTP_PORT };
        let port = match authority.as_str().get(authority.host().len()..).unwrap_or_default() {
            "" | ":" => default,
            port => port.strip_prefix(':').and_then(|port| port.parse().ok()).ok_or(InvalidOrigin::NotAUrl)?,
        };
        // A default port is not repeated to the server: some compare.
        let name = authority.host().to_ascii_lowercase();
        let authority = if port == default { name.clone() } else { format!("{name}:{port}") };
        let host = name.trim_start_matches('[').trim_end_matches(']').to_owned();
        let path = uri.path().trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'_' | b'.' | b'~' | b':');
        if !prefix.bytes().all(plain) || prefix.contains("..") || prefix.contains("//") {
            return Err(InvalidOrigin::Path);
        }
        Ok(Self { https, authority, host, port, prefix: prefix.to_owned() })
    }

    /// True for `https`.
    #[must_use]
    pub const fn is_https(&self) -> bool {
        self.https
    }

    /// True if the host is `localhost`, or an address of this machine or of a private network.
    #[must_use]
    pub fn is_private(&self) -> bool {
        match self.host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
            Ok(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_private(),
            Ok(IpAddr::V6(ip)) => ip.is_loopback() || ip.is_unique_local(),
            Err(_) => self.host.eq_ignore_ascii_case("localhost"),
        }
    }

    /// The host to connect to, an IPv6 address without brackets.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// The port to connect to.
    pub(super) const fn port(&self) -> u16 {
        self.port
    }

    /// What goes before every path.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The value of the `host` header.
    pub(super) fn host_header(&self) -> &str {
        &self.authority
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.https { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority, self.prefix)
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls_with_and_without_v1_name_the_same_backend() {
        // ADP-1
        for (text, want) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
            ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080"),
            ("http://[::1]:8080/v1/", "http://[::1]:8080"),
            ("https://host/api/v1", "https://host/api"),
            ("HTTP://host", "http://host"),
            ("http://HOST:80", "http://host"),
            ("https://host:443/", "https://host"),
            ("https://host:80", "https://host:80"),
        ] {
            assert_eq!(Origin::parse(text).map(|origin| origin.to_string()), Ok(want.to_owned()), "{text}");
        }
        let parts = |text| Origin::parse(text).map(|origin| (origin.host().to_owned(), origin.port()));
        assert_eq!(parts("https://host/api/v1"), Ok(("host".to_owned(), 443)));
        assert_eq!(parts("http://[::1]"), Ok(("::1".to_owned(), 80)));
        assert_eq!(parts("http://[::1]:8080"), Ok(("::1".to_owned(), 8080)));
    }

    #[test]
    fn private_hosts_are_told_by_their_address() {
        // ADP-2: where a token costs nothing
        for (url, private) in [
            ("http://127.0.0.1:8000", true),
            ("http://[::1]:8000/v1", true),
            ("http://LocalHost", true),
            ("http://192.168.1.7", true),
            ("http://[::ffff:10.0.0.1]", true),
            ("http://[fd00::1]", true),
            ("http://8.8.8.8", false),
            ("https://api.example.com/v1", false),
            ("http://gpu-box:8000", false),
            ("http://localhost.example.com", false),
        ] {
            assert_eq!(Origin::parse(url).unwrap().is_private(), private, "{url}");
        }
    }

    #[test]
    fn other_urls_are_refused_without_repeating_them() {
        // SEC-1
        for (text, want) in [
            ("", InvalidOrigin::NotAUrl),
            ("127.0.0.1:8080", InvalidOrigin::NotAUrl),
            ("/v1", InvalidOrigin::NotAUrl),
            ("ftp://host", InvalidOrigin::Scheme),
            ("http://user:SENTINEL@host", InvalidOrigin::UserInfo),
            ("http://host?key=SENTINEL", InvalidOrigin::Query),
            ("http://host/#SENTINEL", InvalidOrigin::Query),
            ("http://host/a/../b", InvalidOrigin::Path),
            ("http://host//a", InvalidOrigin::Path),
            ("http://host/%2e", InvalidOrigin::Path),
            ("http://host/a@b", InvalidOrigin::Path),
            ("http://host:99999", InvalidOrigin::NotAUrl),
        ] {
            let error = Origin::parse(text).unwrap_err();
            assert_eq!(error, want, "{text}");
            assert!(!format!("{error} {error:?}").contains("SENTINEL"));
        }
    }
}
