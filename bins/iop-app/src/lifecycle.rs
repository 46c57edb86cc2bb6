//! Decides what the log says of Nodes: who came with which capacity, who went, who was refused.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use iop_edge_core::events::Notice;
use iop_edge_core::{Edge, EdgeNodeEvent};
use iop_execution::NodeId;
use iop_wire::{CloseCode, HandshakeError, HandshakeFailure, PeerIdentity, RefusalReason};
use tokio::time::Instant;

use crate::metrics::EdgeMetrics;

/// One line for each reason of refusal in this time: strangers must not fill the log.
const REFUSAL_LINE_EVERY: Duration = Duration::from_secs(60);

/// When a line about each reason was last written, and how many were not since. As many entries as there are reasons.
#[derive(Debug)]
struct Lines<K>(HashMap<K, Written>);

#[derive(Debug)]
struct Written {
    at: Instant,
    silent: u64,
}

impl<K> Default for Lines<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> Lines<K> {
    /// A line is due: it says how many more there were since the last one. None = this one is not written, only counted.
    fn due(&mut self, reason: K, now: Instant) -> Option<u64> {
        match self.0.entry(reason) {
            Entry::Vacant(place) => {
                place.insert(Written { at: now, silent: 0 });
                Some(0)
            }
            Entry::Occupied(mut place) => {
                let written = place.get_mut();
                if now.saturating_duration_since(written.at) < REFUSAL_LINE_EVERY {
                    written.silent += 1;
                    return None;
                }
                written.at = now;
                Some(std::mem::take(&mut written.silent))
            }
        }
    }
}

/// Tells of connections of Nodes that failed before they had a session: one line for each reason in a while, all counted.
#[derive(Debug)]
pub struct HandshakeLog {
    metrics: EdgeMetrics,
    lines: Mutex<Lines<HandshakeFailure>>,
}

impl HandshakeLog {
    /// Counts in these metrics.
    #[must_use]
    pub fn new(metrics: EdgeMetrics) -> Self {
        Self { metrics, lines: Mutex::default() }
    }

    /// One connection failed.
    pub fn failed(&self, peer: &PeerIdentity, error: &HandshakeError) {
        let (reason, now) = (error.failure, Instant::now());
        self.metrics.handshake_failed(reason);
        let address = peer.address.map(|address| address.ip());
        // Scanners and health checks of load balancers do this all day.
        let is_news = reason.is_about_certificates() || matches!(reason, HandshakeFailure::TlsVersion);
        if !is_news {
            tracing::debug!(address = address.map(tracing::field::display), %reason, "a connection ended early: {error}");
            return;
        }
        let due = self.lines.lock().unwrap_or_else(PoisonError::into_inner).due(reason, now);
        let Some(more) = due else { return };
        tracing::warn!(address = address.map(tracing::field::display), %reason, more, "a node could not connect: {error}");
    }
}

/// Logs the life of Nodes for as long as the Edge lives.
///
/// # Cancel safety
/// May be dropped at any time.
pub async fn log(edge: Edge) {
    let mut events = edge.subscribe_nodes();
    let mut refusals: Lines<RefusalReason> = Lines::default();
    while let Some(notice) = events.next().await {
        match notice {
            Notice::Lost(count) => tracing::warn!(count, "events of nodes were lost"),
            Notice::Event(EdgeNodeEvent::Refused { node, reason }) => {
                let Some(more) = refusals.due(reason, Instant::now()) else { continue };
                let node = node.as_ref().map(tracing::field::display);
                tracing::warn!(node, %reason, more, "a node was refused");
            }
            Notice::Event(event) => say(&edge, &event),
        }
    }
}

fn say(edge: &Edge, event: &EdgeNodeEvent) {
    match event {
        EdgeNodeEvent::Connected { node, .. } => {
            tracing::info!(%node, "node ready");
            capacities(edge, node);
        }
        EdgeNodeEvent::Draining { node, .. } => tracing::info!(%node, "node drains: it gets no new work"),
        EdgeNodeEvent::Disconnected { node, code, .. } => match code {
            CloseCode::Drained | CloseCode::Restart | CloseCode::Shutdown => tracing::info!(%node, %code, "node left"),
            _ => tracing::warn!(%node, %code, "node disconnected"),
        },
        EdgeNodeEvent::NotReady { node, code } => tracing::warn!(%node, %code, "node left before it was ready"),
        EdgeNodeEvent::Suspected { node, .. } => {
            tracing::warn!(%node, "node does not answer: new work prefers others");
        }
        EdgeNodeEvent::Trusted { node, .. } => tracing::info!(%node, "node answers again"),
        EdgeNodeEvent::InService { node, on: false } => {
            tracing::info!(%node, "node taken out of service: it gets no new work");
        }
        EdgeNodeEvent::InService { node, on: true } => tracing::info!(%node, "node put back into service"),
        EdgeNodeEvent::ConfigApplied { node, revision } => {
            tracing::info!(%node, revision, "node has its new config in force");
            capacities(edge, node);
        }
        EdgeNodeEvent::ConfigRefused { node, revision, error } => {
            tracing::warn!(%node, revision, %error, "node keeps its old config: it can't use the new one");
        }
        EdgeNodeEvent::RateLimited { retry_after } => {
            tracing::warn!(
                retry_after_ms = retry_after.as_millis(),
                "a registration was put off: too many have failed"
            );
        }
        EdgeNodeEvent::Refused { .. } => {}
        #[allow(unreachable_patterns, reason = "the list may grow")]
        _ => {}
    }
}

/// Capacity is printed because nobody may have configured it (LEA-8).
fn capacities(edge: &Edge, id: &NodeId) {
    let snapshot = edge.snapshot();
    for provider in snapshot.nodes.iter().filter(|node| node.node == *id).flat_map(|node| &node.providers) {
        if provider.connected {
            let configured = (provider.configured_capacity > 0).then_some(provider.configured_capacity);
            tracing::info!(provider = %provider.provider, capacity = provider.effective.capacity, configured, "provider ready");
        } else {
            tracing::warn!(provider = %provider.provider, "the node did not start this provider; its own log says why");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn strangers_cannot_fill_the_log() {
        // REG-4, CRD-10: a clock that began this moment is no problem either
        let mut lines = Lines::default();
        let now = Instant::now();
        assert_eq!(lines.due(RefusalReason::UnknownToken, now), Some(0));
        assert_eq!(lines.due(RefusalReason::UnknownToken, now), None);
        assert_eq!(lines.due(RefusalReason::IdentityRequired, now), Some(0));
        assert_eq!(lines.due(RefusalReason::UnknownToken, now + REFUSAL_LINE_EVERY / 2), None);
        assert_eq!(lines.due(RefusalReason::UnknownToken, now + REFUSAL_LINE_EVERY), Some(2));
        assert_eq!(lines.due(RefusalReason::UnknownToken, now + REFUSAL_LINE_EVERY), None);
        assert_eq!(lines.due(RefusalReason::UnknownToken, now + 2 * REFUSAL_LINE_EVERY), Some(1));
    }
}
