//! Decides who may use the admin API: whoever has its key, and no page that a browser shows (SEC-4).
//!
//! The listener is on loopback, where every page of every browser can reach it too. A page's requests have an `Origin`; one
//! whose name was made to point here (DNS rebinding) has that name as `Host`. Both are refused before the key is looked at.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};

use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, StatusCode, Uri};
use iop_edge_core::token::{Token, TokenHash, TokenKind};

use super::view::ErrorView;

/// The key of the admin API, as the config in force has it. Clones are one.
#[derive(Debug, Clone, Default)]
pub struct AdminKey(Arc<RwLock<Option<TokenHash>>>);

impl AdminKey {
    /// This key; none = nobody may.
    #[must_use]
    pub fn new(key: Option<TokenHash>) -> Self {
        Self(Arc::new(RwLock::new(key)))
    }

    /// Another one from now on.
    pub fn replace(&self, key: Option<TokenHash>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = key;
    }

    #[cfg(test)]
    pub(crate) fn opens(&self, token: &Token) -> bool {
        self.now().is_some_and(|hash| hash.matches(token))
    }

    fn now(&self) -> Option<TokenHash> {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a request is turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Denied {
    /// A page sent it.
    Browser,
    /// It was meant for another host.
    Host,
    /// There is no key that could open it.
    Closed,
    /// It shows no key.
    NoKey,
    /// It shows another key.
    WrongKey,
}

impl Denied {
    pub(super) const fn status(self) -> StatusCode {
        match self {
            Self::Browser | Self::Host | Self::Closed => StatusCode::FORBIDDEN,
            Self::NoKey | Self::WrongKey => StatusCode::UNAUTHORIZED,
        }
    }

    pub(super) fn view(self) -> ErrorView {
        let (code, message) = match self {
            Self::Browser => ("browser_refused", "Requests of web pages (with an Origin header) are refused."),
            Self::Host => (
                "host_refused",
                "Use the address of the admin listener itself, like 127.0.0.1:9190 or localhost:9190, not another name.",
            ),
            Self::Closed => (
                "admin_key_not_configured",
                "The admin API is closed: the config has no admin key. Run `iop-edge hash --new admin`, put what it prints \
                 into edge.yaml, and restart or send SIGHUP.",
            ),
            Self::NoKey => ("missing_key", "Show the admin key: `Authorization: Bearer iopa_…`."),
            Self::WrongKey => ("invalid_key", "That is not the admin key of this Edge."),
        };
        ErrorView::new(code, message)
    }
}

/// True if the request may use the API.
pub(super) fn admit(uri: &Uri, headers: &HeaderMap, listen: SocketAddr, key: &AdminKey) -> Result<(), Denied> {
    if headers.contains_key(ORIGIN) {
        return Err(Denied::Browser);
    }
    if !is_meant_for_us(uri, headers, listen.ip()) {
        return Err(Denied::Host);
    }
    let Some(hash) = key.now() else { return Err(Denied::Closed) };
    let mut shown = headers.get_all(AUTHORIZATION).iter();
    let (Some(shown), None) = (shown.next(), shown.next()) else { return Err(Denied::NoKey) };
    let bearer = shown.to_str().ok().and_then(|text| text.split_once(' '));
    let Some((_, shown)) = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) else {
        return Err(Denied::NoKey);
    };
    match Token::parse(TokenKind::Admin, shown.trim()) {
        Some(shown) if hash.matches(&shown) => Ok(()),
        Some(_) | None => Err(Denied::WrongKey),
    }
}

/// Every name that the request has for us is an address of ours.
fn is_meant_for_us(uri: &Uri, headers: &HeaderMap, listen: IpAddr) -> bool {
    let hosts = headers.get_all(HOST).iter().map(|host| host.to_str().ok()?.parse::<Authority>().ok());
    // HTTP/2 has it in the URI.
    let named: Vec<_> = uri.authority().cloned().map(Some).into_iter().chain(hosts).collect();
    let ours = |authority: &Option<Authority>| authority.as_ref().is_some_and(|name| is_ours(name.host(), listen));
    !named.is_empty() && named.iter().all(ours)
}

fn is_ours(host: &str, listen: IpAddr) -> bool {
    let host = host.trim_matches(['[', ']']);
    match host.parse::<IpAddr>() {
        // Who listens to all addresses can't list them; a page's own name is never an address of ours.
        Ok(address) => address.is_loopback() || address == listen || listen.is_unspecified(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}
