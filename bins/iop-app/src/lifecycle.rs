//! Decides what the log says of Nodes: who came with which capacity, who went, who was refused.

use std::collections::HashMap;
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

/// Tells of connections of Nodes that failed before they had a session: one line for each reason in a while, all counted.
#[derive(Debug)]
pub struct HandshakeLog {
    metrics: EdgeMetrics,
    lines: Mutex<HashMap<HandshakeFailure, (Instant, u64)>>,
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
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, silent) = lines.entry(reason).or_insert((now - REFUSAL_LINE_EVERY, 0));
        if now - *last < REFUSAL_LINE_EVERY {
            *silent += 1;
            return;
        }
        let more = std::mem::take(silent);
        *last = now;
        drop(lines);
        tracing::warn!(address = address.map(tracing::field::display), %reason, more, "a node could not connect: {error}");
    }
}

/// Logs the life of Nodes for as long as the Edge lives.
///
/// # Cancel safety
/// May be dropped at any time.
pub async fn log(edge: Edge) {
    let mut events = edge.subscribe_nodes();
    let mut refusals: HashMap<RefusalReason, (Instant, u64)> = HashMap::new();
    while let Some(notice) = events.next().await {
        match notice {
            Notice::Lost(count) => tracing::warn!(count, "events of nodes were lost"),
            Notice::Event(EdgeNodeEvent::Refused { node, reason }) => {
                let now = Instant::now();
                let (last, silent) = refusals.entry(reason).or_insert((now - REFUSAL_LINE_EVERY, 0));
                if now - *last < REFUSAL_LINE_EVERY {
                    *silent += 1;
                    continue;
                }
                let more = std::mem::take(silent);
                *last = now;
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
