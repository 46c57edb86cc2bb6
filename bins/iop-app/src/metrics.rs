//! Decides what is measured and under which names: `iop_…`, base units, label values from closed lists or the config.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use iop_edge_core::observe::{CredentialRefuser, Observation, Observer};
use iop_edge_core::openai::{LivenessObservation, RequestObserver, RequestRecord};
use iop_execution::failure::{BindingField, CredentialReason};
use iop_wire::HandshakeFailure;
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
struct ResultLabel {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EvidenceLabels {
    source: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransitionLabel {
    to: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EligibilityLabels {
    decision: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CredentialLabels {
    by: &'static str,
    reason: &'static str,
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
    /// It takes no new work.
    pub draining: bool,
    /// It does not answer.
    pub suspect: bool,
}

/// State of one provider for its gauges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderGauge {
    /// Its configured id.
    pub id: String,
    /// Places.
    pub capacity: u32,
    /// Places in use, the quarantined ones among them.
    pub in_use: u32,
    /// Places that wait for the end of cancelled work.
    pub quarantined: u32,
    /// It takes new work.
    pub ready: bool,
    /// It said that it is busy.
    pub cooling: bool,
    /// Evidence of a stall says that it is down.
    pub unhealthy: bool,
}

/// State of one model for its gauges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelGauge {
    /// Its public name, as a config or a provider's list has it.
    pub name: String,
    /// Requests that wait for it.
    pub waiting: u64,
    /// How long the oldest of them has waited.
    pub oldest_wait: Duration,
}

/// What gauges show, read at each scrape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Every configured Node.
    pub nodes: Vec<NodeGauge>,
    /// Every configured provider.
    pub providers: Vec<ProviderGauge>,
    /// Every model.
    pub models: Vec<ModelGauge>,
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
    node_draining: Family<NodeLabel, Gauge>,
    node_suspect: Family<NodeLabel, Gauge>,
    capacity: Family<ProviderLabel, Gauge>,
    in_use: Family<ProviderLabel, Gauge>,
    places_quarantined: Family<ProviderLabel, Gauge>,
    provider_ready: Family<ProviderLabel, Gauge>,
    cooling: Family<ProviderLabel, Gauge>,
    unhealthy: Family<ProviderLabel, Gauge>,
    model_waiting: Family<ModelLabel, Gauge>,
    model_oldest_wait: Family<ModelLabel, Gauge<f64, AtomicU64>>,
    config_revision: Gauge,
    reloads: Family<ResultLabel, Counter>,
    certificates: Family<ResultLabel, Counter>,
    handshakes_failed: Family<ReasonLabel, Counter>,
    pushes: Family<ResultLabel, Counter>,
    penalties: Family<ProviderLabel, Counter>,
    coolings: Family<ProviderLabel, Counter>,
    suspicions: Family<NodeLabel, Counter>,
    withdrawals: Family<NodeLabel, Counter>,
    receipts_missing: Counter,
    /// One scrape at a time fills the gauges.
    rendering: Arc<Mutex<()>>,
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
    credential_leases: Family<OutcomeLabel, Counter>,
    credential_refusals: Family<CredentialLabels, Counter>,
    evidence: Family<EvidenceLabels, Counter>,
    transitions: Family<TransitionLabel, Counter>,
    eligibility: Family<EligibilityLabels, Counter>,
    recoveries: Family<OutcomeLabel, Counter>,
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
            node_draining: Family::default(),
            node_suspect: Family::default(),
            capacity: Family::default(),
            in_use: Family::default(),
            places_quarantined: Family::default(),
            provider_ready: Family::default(),
            cooling: Family::default(),
            unhealthy: Family::default(),
            model_waiting: Family::default(),
            model_oldest_wait: Family::default(),
            config_revision: Gauge::default(),
            reloads: Family::default(),
            certificates: Family::default(),
            handshakes_failed: Family::default(),
            pushes: Family::default(),
            penalties: Family::default(),
            coolings: Family::default(),
            suspicions: Family::default(),
            withdrawals: Family::default(),
            receipts_missing: Counter::default(),
            rendering: Arc::default(),
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
            credential_leases: Family::default(),
            credential_refusals: Family::default(),
            evidence: Family::default(),
            transitions: Family::default(),
            eligibility: Family::default(),
            recoveries: Family::default(),
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
        registry.register("node_draining", "1 = takes no new work", all.node_draining.clone());
        registry.register("node_suspect", "1 = does not answer", all.node_suspect.clone());
        registry.register("provider_ready", "1 = takes new work", all.provider_ready.clone());
        registry.register("provider_cooling", "1 = said that it is busy", all.cooling.clone());
        registry.register(
            "provider_unhealthy",
            "1 = out of admission: evidence of a stall says that it is down",
            all.unhealthy.clone(),
        );
        registry.register(
            "provider_quarantined",
            "Places that wait for the end of cancelled work",
            all.places_quarantined.clone(),
        );
        registry.register("model_waiting", "Requests that wait for a place, per model", all.model_waiting.clone());
        registry.register_with_unit(
            "model_oldest_wait",
            "Wait of the request that has waited longest",
            Unit::Seconds,
            all.model_oldest_wait.clone(),
        );
        registry.register("config_revision", "Revision of the config in force", all.config_revision.clone());
        registry.register("config_reloads", "Attempts to take a new config", all.reloads.clone());
        registry.register("certificate_reloads", "Changes of certificate files", all.certificates.clone());
        registry.register(
            "node_handshakes_failed",
            "Connections to the listener of Nodes that ended before a session",
            all.handshakes_failed.clone(),
        );
        registry.register("config_pushes", "New configs sent to ready Nodes that ended", all.pushes.clone());
        registry.register("provider_penalties", "Failures that count as load for a while", all.penalties.clone());
        registry.register("provider_coolings", "Times that a provider said it is busy", all.coolings.clone());
        registry.register("node_suspicions", "Questions that a Node left unanswered", all.suspicions.clone());
        registry.register("runs_withdrawn", "Runs taken from a suspect before content", all.withdrawals.clone());
        registry.register(
            "receipts_missing",
            "Dispatches that no Node confirmed in time",
            all.receipts_missing.clone(),
        );
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
        registry.register(
            "credential_leases",
            "Credential leases that were issued, and those of them that never reached their Node",
            all.credential_leases.clone(),
        );
        registry.register(
            "credential_refusals",
            "Credentials that were not used: no lease was issued, or the Node refused it",
            all.credential_refusals.clone(),
        );
        all.register_liveness(&mut registry);
        all.registry = Arc::new(registry);
        all
    }

    /// Their labels are closed: they name nobody (OBS-4).
    fn register_liveness(&self, registry: &mut Registry) {
        registry.register(
            "edge_provider_health_evidence",
            "Evidence about the health of providers",
            self.evidence.clone(),
        );
        registry.register(
            "edge_provider_health_transitions",
            "Providers that evidence took out of admission or put back",
            self.transitions.clone(),
        );
        registry.register(
            "edge_liveness_recovery_eligibility",
            "Failures that another attempt could help with",
            self.eligibility.clone(),
        );
        registry.register(
            "edge_liveness_recovery_results",
            "Requests with such a failure that ended",
            self.recoveries.clone(),
        );
    }

    /// The gauge of requests being answered.
    #[must_use]
    pub const fn inflight(&self) -> &Gauge {
        &self.inflight
    }

    /// A config is in force.
    pub fn config_revision(&self, revision: u64) {
        self.config_revision.set(i64::try_from(revision).unwrap_or(i64::MAX));
    }

    /// Somebody asked for a new config, and it was taken or not.
    pub fn reloaded(&self, applied: bool) {
        let result = if applied { "applied" } else { "refused" };
        self.reloads.get_or_create(&ResultLabel { result }).inc();
    }

    /// Certificate files changed, and what they hold now was taken or not.
    pub fn certificates_changed(&self, applied: bool) {
        let result = if applied { "applied" } else { "refused" };
        self.certificates.get_or_create(&ResultLabel { result }).inc();
    }

    /// A connection to the listener of Nodes ended before it had a session.
    pub fn handshake_failed(&self, reason: HandshakeFailure) {
        self.handshakes_failed.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }

    /// What became of credential leases.
    #[must_use]
    pub fn credentials(&self) -> CredentialCounts {
        let reasons = || CredentialReason::PLAIN.iter().chain([&CredentialReason::BindingMismatch(BindingField::Slot)]);
        let mut refusals = Vec::new();
        for by in CredentialRefuser::ALL {
            for reason in reasons() {
                let labels = CredentialLabels { by: by.as_str(), reason: reason.as_str() };
                // Without making a series of it.
                let count = self.credential_refusals.get(&labels).map_or(0, |count| count.get());
                if count > 0 {
                    refusals.push((*by, labels.reason, count));
                }
            }
        }
        let leases = |outcome| self.credential_leases.get(&OutcomeLabel { outcome }).map_or(0, |count| count.get());
        // Last, so that it is never less than what became of them.
        let (unused, issued) = (leases("unused"), leases("issued"));
        CredentialCounts { issued, unused, refusals }
    }

    /// Everything as Prometheus text, with gauges as they are now.
    #[must_use]
    pub fn render(&self, now: &Gauges) -> String {
        let _one = self.rendering.lock().unwrap_or_else(PoisonError::into_inner);
        // What was taken out of the config has no series any more.
        for family in [&self.node_ready, &self.node_draining, &self.node_suspect] {
            family.clear();
        }
        for family in [&self.capacity, &self.in_use, &self.places_quarantined] {
            family.clear();
        }
        for family in [&self.provider_ready, &self.cooling, &self.unhealthy] {
            family.clear();
        }
        self.model_waiting.clear();
        self.model_oldest_wait.clear();
        for node in &now.nodes {
            let label = NodeLabel { node: node.id.clone() };
            self.node_ready.get_or_create(&label).set(node.ready.into());
            self.node_draining.get_or_create(&label).set(node.draining.into());
            self.node_suspect.get_or_create(&label).set(node.suspect.into());
        }
        for provider in &now.providers {
            let label = ProviderLabel { provider: provider.id.clone() };
            self.capacity.get_or_create(&label).set(provider.capacity.into());
            self.in_use.get_or_create(&label).set(provider.in_use.into());
            self.places_quarantined.get_or_create(&label).set(provider.quarantined.into());
            self.provider_ready.get_or_create(&label).set(provider.ready.into());
            self.cooling.get_or_create(&label).set(provider.cooling.into());
            self.unhealthy.get_or_create(&label).set(provider.unhealthy.into());
        }
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        for model in &now.models {
            let label = ModelLabel { model: model.name.clone() };
            self.model_waiting.get_or_create(&label).set(count(model.waiting));
            self.model_oldest_wait.get_or_create(&label).set(model.oldest_wait.as_secs_f64());
        }
        self.waiting.set(count(now.models.iter().map(|model| model.waiting).sum()));
        let mut text = String::new();
        // Writing to a String can't fail.
        let _infallible = encode(&mut text, &self.registry);
        text
    }
}

/// What became of credential leases, as far as this Edge knows (CRD-13).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CredentialCounts {
    /// Leases that were issued.
    pub issued: u64,
    /// Those that never reached their Node.
    pub unused: u64,
    /// Who refused, why, and how often; only what happened.
    pub refusals: Vec<(CredentialRefuser, &'static str, u64)>,
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

    fn liveness(&self, observation: &LivenessObservation) {
        match observation {
            LivenessObservation::Considered { decision, reason } => {
                let labels = EligibilityLabels { decision: decision.as_str(), reason: reason.as_str() };
                self.eligibility.get_or_create(&labels).inc();
            }
            LivenessObservation::Ended { outcome } => {
                self.recoveries.get_or_create(&OutcomeLabel { outcome: outcome.as_str() }).inc();
            }
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
            Observation::Penalised { provider } => {
                self.penalties.get_or_create(&ProviderLabel { provider: provider.to_string() }).inc();
            }
            Observation::Cooling { provider } => {
                self.coolings.get_or_create(&ProviderLabel { provider: provider.to_string() }).inc();
            }
            Observation::Suspected { node } => {
                self.suspicions.get_or_create(&NodeLabel { node: node.to_string() }).inc();
            }
            Observation::Withdrawn { node } => {
                self.withdrawals.get_or_create(&NodeLabel { node: node.to_string() }).inc();
            }
            Observation::ReceiptMissing => {
                self.receipts_missing.inc();
            }
            Observation::ConfigPushed { applied, .. } => {
                let result = if *applied { "applied" } else { "refused" };
                self.pushes.get_or_create(&ResultLabel { result }).inc();
            }
            Observation::Waited { outcome, .. } => count(&self.waits, outcome.as_str()),
            Observation::HealthEvidence { source, result } => {
                let labels = EvidenceLabels { source: source.as_str(), result: result.as_str() };
                self.evidence.get_or_create(&labels).inc();
            }
            Observation::HealthTransition { to } => {
                self.transitions.get_or_create(&TransitionLabel { to: to.as_str() }).inc();
            }
            Observation::LateMessage => {
                self.late.inc();
            }
            Observation::Violated { violation } => count(&self.violations, violation.as_str()),
            Observation::Receipt { after } => self.receipt.observe(after.as_secs_f64()),
            Observation::PoolExhausted => {
                self.pool_exhausted.inc();
            }
            Observation::CredentialIssued => {
                self.credential_leases.get_or_create(&OutcomeLabel { outcome: "issued" }).inc();
            }
            Observation::CredentialUnused => {
                self.credential_leases.get_or_create(&OutcomeLabel { outcome: "unused" }).inc();
            }
            Observation::CredentialRefused { by, reason } => {
                let labels = CredentialLabels { by: by.as_str(), reason: reason.as_str() };
                self.credential_refusals.get_or_create(&labels).inc();
            }
            _ => tracing::debug!("an observation without a metric"),
        }
    }
}
