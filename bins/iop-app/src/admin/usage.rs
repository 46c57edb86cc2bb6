//! Decides what the admin API says of keys and leases in use: counts of this process, by ids that are public.

use std::time::Duration;

use iop_edge_core::observe::CredentialRefuser;
use iop_edge_core::rate_limit::{KeyUsage, RateLimiter};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::view::ms;
use crate::metrics::CredentialCounts;

/// `GET /admin/v1/keys`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeysView {
    /// Every API key of the config in force, by id.
    pub keys: Vec<KeyUseView>,
}

/// What one API key uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyUseView {
    /// Its public id.
    pub id: String,
    /// Requests that run, waiting ones among them.
    pub running: u32,
    /// Most of these at once, if there is a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrent: Option<u32>,
    /// Requests that were let in within the last minute.
    pub requests: WindowView,
    /// Tokens that were counted within the last minute; only of a key that has a limit of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<WindowView>,
}

/// What was counted in the last 60 to 61 seconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowView {
    /// So much.
    pub used: u64,
    /// Held back for requests that run, beside it.
    #[serde(default)]
    pub held: u64,
    /// Of so much, if there is a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Until all that is used is there again, if nothing is asked meanwhile.
    pub reset_ms: u64,
}

/// `GET /admin/v1/leases`: counts since this Edge started.
///
/// Issued are opened, refused and unused ones (CRD-13). The Edge hears of refusals, and knows which leases no Node has shown
/// to have; what is left it takes for opened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasesView {
    /// For so long it counts.
    pub uptime_ms: u64,
    /// Leases that were issued.
    pub issued: u64,
    /// Of these, neither refused nor unused: opened, or still on their way.
    pub opened: u64,
    /// Refused by Nodes.
    pub refused: u64,
    /// Never shown to have arrived.
    pub unused: u64,
    /// Requests that this Edge issued none for.
    pub denied: u64,
    /// Why.
    pub reasons: Vec<LeaseReasonView>,
}

/// How often a credential was not used for one reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseReasonView {
    /// `edge`: none was issued. `node`: it was refused there.
    pub by: String,
    /// The reason, as metrics have it.
    pub reason: String,
    /// How often.
    pub count: u64,
}

pub(super) fn keys(limiter: &RateLimiter) -> KeysView {
    let usage = limiter.usage(Instant::now().into_std());
    KeysView { keys: usage.iter().map(|(id, usage)| key_view(id.as_str(), usage)).collect() }
}

fn key_view(id: &str, usage: &KeyUsage) -> KeyUseView {
    let limits = usage.limits;
    KeyUseView {
        id: id.to_owned(),
        running: usage.running,
        concurrent: limits.concurrent.map(Into::into),
        requests: WindowView {
            used: usage.requests,
            held: 0,
            limit: limits.requests_per_minute.map(|limit| limit.get().into()),
            reset_ms: ms(usage.requests_reset),
        },
        tokens: limits.tokens_per_minute.map(|limit| WindowView {
            used: usage.tokens,
            held: usage.held,
            limit: Some(limit.into()),
            reset_ms: ms(usage.tokens_reset),
        }),
    }
}

pub(super) fn leases(counts: &CredentialCounts, uptime: Duration) -> LeasesView {
    let CredentialCounts { issued, unused, refusals } = counts;
    let by = |who| refusals.iter().filter(|(by, ..)| *by == who).map(|(.., count)| count).sum::<u64>();
    let (denied, refused) = (by(CredentialRefuser::Edge), by(CredentialRefuser::Node));
    let reason = |(by, reason, count): &(CredentialRefuser, &str, u64)| LeaseReasonView {
        by: by.as_str().to_owned(),
        reason: (*reason).to_owned(),
        count: *count,
    };
    LeasesView {
        uptime_ms: ms(uptime),
        issued: *issued,
        // A Node also refuses a request that came without a lease.
        opened: issued.saturating_sub(refused.saturating_add(*unused)),
        refused,
        unused: *unused,
        denied,
        reasons: refusals.iter().map(reason).collect(),
    }
}

#[cfg(test)]
mod tests {
    use CredentialRefuser::{Edge, Node};

    use super::*;

    #[test]
    fn what_was_issued_is_opened_refused_or_unused() {
        // CRD-13
        let refusals = vec![(Edge, "disabled", 5), (Edge, "revoked", 1), (Node, "expired", 2)];
        let counts = CredentialCounts { issued: 12, unused: 1, refusals };
        let view = leases(&counts, Duration::from_secs(3));
        assert_eq!((view.issued, view.opened, view.refused, view.unused, view.denied), (12, 9, 2, 1, 6));
        assert_eq!((view.uptime_ms, view.reasons.len()), (3_000, 3));
        assert_eq!(view.reasons[2], LeaseReasonView { by: "node".to_owned(), reason: "expired".to_owned(), count: 2 });
        let none = CredentialCounts { issued: 0, unused: 0, refusals: vec![(Node, "malformed", 1)] };
        assert_eq!(leases(&none, Duration::ZERO).opened, 0, "a refusal of a request that came without a lease");
    }
}
