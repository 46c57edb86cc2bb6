//! Decides what is measured and under which names: `iop_…`, base units, label values from closed lists or the config.

use std::fmt;
use std::sync::Arc;

use iop_edge_core::observe::{Observation, Observer};
use iop_edge_core::openai::{RequestObserver, RequestRecord};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

#[cfg(test)]
mod tests;

/// Seconds: from 5 ms, each bucket about twice the one before, to 10 minutes.
const SECONDS: [f64; 17] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    outcome: &'static str,
    ended_by: &'static str,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabel {
    model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeLabel {
    node: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProviderLabel {
    provider: String,
}

/// State of one Node for its gauge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGauge {
    /// Its configured id.
    pub id: String,
    /// It is connected and ready.
    pub ready: bool,
}

/// State of one provider for its gauges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderGauge {
    /// Its configured id.
    pub id: String,
    /// Places.
    pub capacity: u32,
    /// Places in use.
    pub in_use: u32,
}

/// What gauges show, read at each scrape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Every configured Node.
    pub nodes: Vec<NodeGauge>,
    /// Every configured provider.
    pub providers: Vec<ProviderGauge>,
    /// Requests that wait for a place.
    pub waiting: u64,
}

/// Every metric of an Edge. Clones share their values.
#[derive(Clone)]
pub struct EdgeMetrics {
    registry: Arc<Registry>,
    requests: Family<RequestLabels, Counter>,
    duration: Histogram,
    ttft: Histogram,
    queue: Histogram,
    input_tokens: Family<ModelLabel, Counter>,
    output_tokens: Family<ModelLabel, Counter>,
    edits: Family<Kind, Counter>,
    inflight: Gauge,
    waiting: Gauge,
    node_ready: Family<NodeLabel, Gauge>,
    capacity: Family<ProviderLabel, Gauge>,
    in_use: Family<ProviderLabel, Gauge>,
    connections: Counter,
    closed: Family<Kind, Counter>,
    refused: Family<Kind, Counter>,
    released: Family<Kind, Counter>,
    quarantined: Family<ProviderLabel, Counter>,
    waits: Family<Kind, Counter>,
    late: Counter,
    violations: Family<Kind, Counter>,
    receipt: Histogram,
    pool_exhausted: Counter,
}

impl Default for EdgeMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl EdgeMetrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        let mut all = Self {
            registry: Arc::default(),
            requests: Family::default(),
            duration: Histogram::new(SECONDS),
            ttft: Histogram::new(SECONDS),
            queue: Histogram::new(SECONDS),
            input_tokens: Family::default(),
            output_tokens: Family::default(),
            edits: Family::default(),
            inflight: Gauge::default(),
            waiting: Gauge::default(),
            node_ready: Family::default(),
            capacity: Family::default(),
            in_use: Family::default(),
            connections: Counter::default(),
            closed: Family::default(),
            refused: Family::default(),
            released: Family::default(),
            quarantined: Family::default(),
            waits: Family::default(),
            late: Counter::default(),
            violations: Family::default(),
            receipt: Histogram::new(SECONDS),
            pool_exhausted: Counter::default(),
        };
        let mut registry = Registry::with_prefix("iop");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of this program", build);
        registry.register("requests", "Client requests that ended", all.requests.clone());
        registry.register_with_unit("request_duration", "From arrival to end", Unit::Seconds, all.duration.clone());
        registry.register_with_unit(
            "request_ttft",
            "From arrival to the first content",
            Unit::Seconds,
            all.ttft.clone(),
        );
        registry.register_with_unit("request_queue", "Wait for a place", Unit::Seconds, all.queue.clone());
        registry.register("input_tokens", "Prompt tokens as providers report them", all.input_tokens.clone());
        registry.register("output_tokens", "Generated tokens as providers report them", all.output_tokens.clone());
        registry.register("answer_edits", "Edits of provider answers", all.edits.clone());
        registry.register("requests_inflight", "Client requests being answered", all.inflight.clone());
        registry.register("requests_waiting", "Requests that wait for a place", all.waiting.clone());
        registry.register("node_ready", "1 = connected and ready", all.node_ready.clone());
        registry.register("provider_capacity", "Places of a provider", all.capacity.clone());
        registry.register("provider_in_use", "Places of a provider in use", all.in_use.clone());
        registry.register("node_connections", "Connections of Nodes that came up", all.connections.clone());
        registry.register("node_connections_closed", "Connections of Nodes that ended", all.closed.clone());
        registry.register("node_registrations_refused", "Registrations refused", all.refused.clone());
        registry.register("leases_released", "Places given back", all.released.clone());
        registry.register("leases_quarantined", "Places kept because no terminal came", all.quarantined.clone());
        registry.register("queue_waits", "Waits for a place that ended", all.waits.clone());
        registry.register("late_messages", "Messages of runs that had ended", all.late.clone());
        registry.register("violations", "Breaches of the protocol by Nodes", all.violations.clone());
        registry.register_with_unit("dispatch_receipt", "From dispatch to receipt", Unit::Seconds, all.receipt.clone());
        registry.register("receive_pool_exhausted", "Runs cancelled for lack of buffer", all.pool_exhausted.clone());
        all.registry = Arc::new(registry);
        all
    }

    /// The gauge of requests being answered.
    #[must_use]
    pub const fn inflight(&self) -> &Gauge {
        &self.inflight
    }

    /// Everything as Prometheus text, with gauges as they are now.
    #[must_use]
    pub fn render(&self, now: &Gauges) -> String {
        self.waiting.set(i64::try_from(now.waiting).unwrap_or(i64::MAX));
        for node in &now.nodes {
            self.node_ready.get_or_create(&NodeLabel { node: node.id.clone() }).set(i64::from(node.ready));
        }
        for provider in &now.providers {
            let label = ProviderLabel { provider: provider.id.clone() };
            self.capacity.get_or_create(&label).set(provider.capacity.into());
            self.in_use.get_or_create(&label).set(provider.in_use.into());
        }
        let mut text = String::new();
        // Writing to a String can't fail.
        let _infallible = encode(&mut text, &self.registry);
        text
    }
}

impl fmt::Debug for EdgeMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EdgeMetrics").finish_non_exhaustive()
    }
}

const fn status_class(status: u16) -> &'static str {
    match status {
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        500..=599 => "5xx",
        _ => "other",
    }
}

impl RequestObserver for EdgeMetrics {
    fn request_ended(&self, record: &RequestRecord) {
        let labels = RequestLabels {
            endpoint: record.endpoint.as_str(),
            outcome: record.outcome.as_str(),
            ended_by: record.ended_by.as_str(),
            status: status_class(record.status),
        };
        self.requests.get_or_create(&labels).inc();
        self.duration.observe(record.duration.as_secs_f64());
        if let Some(ttft) = record.ttft {
            self.ttft.observe(ttft.as_secs_f64());
        }
        if let Some(queue) = record.queue {
            self.queue.observe(queue.as_secs_f64());
        }
        if let Some(usage) = &record.usage {
            let label = ModelLabel { model: record.model_label().to_owned() };
            self.input_tokens.get_or_create(&label).inc_by(usage.input_tokens.unwrap_or(0));
            self.output_tokens.get_or_create(&label).inc_by(usage.output_tokens.unwrap_or(0));
        }
        for (edit, count) in record.edits.iter() {
            self.edits.get_or_create(&Kind { kind: edit.as_str() }).inc_by(count.into());
        }
    }
}

impl Observer for EdgeMetrics {
    fn observe(&self, observation: &Observation) {
        let count = |family: &Family<Kind, Counter>, kind: &'static str| {
            family.get_or_create(&Kind { kind }).inc();
        };
        match observation {
            Observation::ConnectionOpened => {
                self.connections.inc();
            }
            Observation::ConnectionClosed { code, .. } => count(&self.closed, code.as_str()),
            Observation::RegistrationRefused { reason } => count(&self.refused, reason.as_str()),
            Observation::LeaseReleased { cause, .. } => count(&self.released, cause.as_str()),
            Observation::Quarantined { provider } => {
                self.quarantined.get_or_create(&ProviderLabel { provider: provider.to_string() }).inc();
            }
            Observation::Waited { outcome, .. } => count(&self.waits, outcome.as_str()),
            Observation::LateMessage => {
                self.late.inc();
            }
            Observation::Violated { violation } => count(&self.violations, violation.as_str()),
            Observation::Receipt { after } => self.receipt.observe(after.as_secs_f64()),
            Observation::PoolExhausted => {
                self.pool_exhausted.inc();
            }
            _ => tracing::debug!("an observation without a metric"),
        }
    }
}
