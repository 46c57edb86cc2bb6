//! Decides what is measured on a Node.

use std::fmt;
use std::sync::Arc;

use iop_node_core::journal::JournalTrouble;
use iop_node_core::{LeaseOutcome, NodeObserver, RunOutcome, RunPath, StallObservation};
use iop_wire::CloseCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RunLabels {
    path: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TroubleLabel {
    trouble: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FilesLabels {
    what: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PathLabel {
    path: &'static str,
}

/// Labels of the stall metrics: closed values only (OBS-4).
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StallLabels {
    path: &'static str,
    provider_health: &'static str,
    liveness_classification: &'static str,
    ownership_close: &'static str,
}

/// Bounds of the stall durations, in seconds: legal timeouts go from 1 s to 1 h, and closing takes some seconds more.
const STALL_BUCKETS: [f64; 12] = [1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 310.0, 600.0, 1_800.0, 3_600.0];

fn stall_histogram() -> Histogram {
    Histogram::new(STALL_BUCKETS)
}

iop_execution::closed_list! {
    /// What a Node reads from files that may change.
    FilesOf {
        /// How it dials: its own certificate, and roots.
        Certificates = "certificates",
        /// Whose credential leases it takes.
        LeaseIssuers = "lease_issuers",
    }
}

/// Every metric of a Node. Clones share their values.
#[derive(Clone)]
pub struct NodeMetrics {
    registry: Arc<Registry>,
    ready: Gauge,
    connections: Counter,
    closed: Family<CodeLabel, Counter>,
    running: Family<PathLabel, Gauge>,
    runs: Family<RunLabels, Counter>,
    failures: Family<CodeLabel, Counter>,
    late_messages: Counter,
    late_pushes: Counter,
    reading_out: Gauge,
    read_outs: Family<OutcomeLabel, Counter>,
    configs: Family<OutcomeLabel, Counter>,
    journal_dropped: Counter,
    journal_troubles: Family<TroubleLabel, Counter>,
    leases: Family<OutcomeLabel, Counter>,
    lease_refusals: Family<ReasonLabel, Counter>,
    files: Family<FilesLabels, Counter>,
    stalls: Family<StallLabels, Counter>,
    stall_durations: Family<StallLabels, Histogram, fn() -> Histogram>,
}

impl Default for NodeMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl NodeMetrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        let mut all = Self {
            registry: Arc::default(),
            ready: Gauge::default(),
            connections: Counter::default(),
            closed: Family::default(),
            running: Family::default(),
            runs: Family::default(),
            failures: Family::default(),
            late_messages: Counter::default(),
            late_pushes: Counter::default(),
            reading_out: Gauge::default(),
            read_outs: Family::default(),
            configs: Family::default(),
            journal_dropped: Counter::default(),
            journal_troubles: Family::default(),
            leases: Family::default(),
            lease_refusals: Family::default(),
            files: Family::default(),
            stalls: Family::default(),
            stall_durations: Family::new_with_constructor(stall_histogram),
        };
        let mut registry = Registry::with_prefix("iop");
        registry.register("build", "Version of this program", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        registry.register("node_edge_ready", "1 = connected to the Edge and ready", all.ready.clone());
        registry.register("node_edge_connections", "Connections to the Edge that came up", all.connections.clone());
        registry.register("node_edge_connections_closed", "Connections to the Edge that ended", all.closed.clone());
        registry.register("node_runs_running", "Runs and tunnels at work", all.running.clone());
        registry.register("node_runs", "Runs and tunnels that ended", all.runs.clone());
        registry.register("node_run_failures", "Runs and tunnels that failed or were refused", all.failures.clone());
        registry.register(
            "node_late_messages",
            "Messages of the Edge for runs that were over",
            all.late_messages.clone(),
        );
        registry.register("node_late_pushes", "Output of providers for runs that were over", all.late_pushes.clone());
        registry.register(
            "node_read_outs_running",
            "Answers that are read to their end although their runs are over: each holds a place",
            all.reading_out.clone(),
        );
        registry.register("node_read_outs", "Answers of runs that were over, read or cut", all.read_outs.clone());
        registry.register("node_config_pushes", "Pushed configs", all.configs.clone());
        registry.register("node_journal_dropped", "Notes that the run journal lost", all.journal_dropped.clone());
        registry.register("node_journal_troubles", "Failed writes of the run journal", all.journal_troubles.clone());
        registry.register("node_credential_leases", "Credential leases by what became of them", all.leases.clone());
        registry.register(
            "node_credential_refusals",
            "Credential leases that were refused, by reason",
            all.lease_refusals.clone(),
        );
        registry.register(
            "node_file_reloads",
            "Changes of certificate and lease issuer files, by whether what they hold could be taken",
            all.files.clone(),
        );
        registry.register("node_response_stalls", "Responses that stalled and were ended", all.stalls.clone());
        registry.register(
            "node_response_stall_duration_seconds",
            "From the last progress of a stalled response to its end",
            all.stall_durations.clone(),
        );
        all.registry = Arc::new(registry);
        all
    }

    /// Files changed, and what they hold now was taken or not.
    pub fn files_changed(&self, what: FilesOf, applied: bool) {
        let result = if applied { "applied" } else { "refused" };
        self.files.get_or_create(&FilesLabels { what: what.as_str(), result }).inc();
    }

    /// Everything as Prometheus text.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String can't fail.
        let _infallible = encode(&mut text, &self.registry);
        text
    }
}

impl fmt::Debug for NodeMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeMetrics").finish_non_exhaustive()
    }
}

#[deny(clippy::missing_trait_methods)]
impl NodeObserver for NodeMetrics {
    fn connected(&self) {
        self.connections.inc();
    }

    fn ready(&self) {
        self.ready.set(1);
    }

    fn closed(&self, code: CloseCode) {
        self.ready.set(0);
        self.closed.get_or_create(&CodeLabel { code: code.as_str() }).inc();
    }

    fn run_started(&self, path: RunPath) {
        self.running.get_or_create(&PathLabel { path: path.as_str() }).inc();
    }

    fn run_ended(&self, path: RunPath, outcome: RunOutcome) {
        let (path, outcome_name) = (path.as_str(), outcome.as_str());
        self.runs.get_or_create(&RunLabels { path, outcome: outcome_name }).inc();
        let failure = match outcome {
            // A refused one was never started.
            RunOutcome::Refused(code) => Some(code),
            RunOutcome::Failed(code) => {
                self.running.get_or_create(&PathLabel { path }).dec();
                Some(code)
            }
            RunOutcome::Abandoned | RunOutcome::Cancelled(_) | RunOutcome::Completed => {
                self.running.get_or_create(&PathLabel { path }).dec();
                None
            }
        };
        if let Some(code) = failure {
            self.failures.get_or_create(&CodeLabel { code: code.as_str() }).inc();
        }
    }

    fn read_out_began(&self) {
        self.reading_out.inc();
    }

    fn read_out_ended(&self, cut: bool) {
        self.reading_out.dec();
        let outcome = if cut { "cut" } else { "ended" };
        self.read_outs.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    fn config_pushed(&self, applied: bool) {
        let outcome = if applied { "applied" } else { "refused" };
        self.configs.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    fn journal_dropped(&self, count: u64) {
        self.journal_dropped.inc_by(count);
    }

    fn journal_trouble(&self, trouble: JournalTrouble) {
        self.journal_troubles.get_or_create(&TroubleLabel { trouble: trouble.as_str() }).inc();
    }

    fn credential_lease(&self, outcome: LeaseOutcome) {
        self.leases.get_or_create(&OutcomeLabel { outcome: outcome.as_str() }).inc();
        if let LeaseOutcome::Refused(reason) = outcome {
            self.lease_refusals.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
        }
    }

    fn response_stalled(&self, stall: &StallObservation) {
        let labels = StallLabels {
            path: stall.path.as_str(),
            provider_health: stall.provider_health.as_str(),
            liveness_classification: stall.liveness_classification.as_str(),
            ownership_close: stall.ownership_close.as_str(),
        };
        self.stalls.get_or_create(&labels).inc();
        self.stall_durations.get_or_create(&labels).observe(stall.duration.as_secs_f64());
    }

    fn late_messages(&self, count: u64) {
        self.late_messages.inc_by(count);
    }

    fn late_pushes(&self, count: u64) {
        self.late_pushes.inc_by(count);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use iop_execution::Health;
    use iop_execution::failure::{CredentialReason, OwnershipClose};

    use super::*;

    #[test]
    fn what_happens_on_a_node_can_be_read_off_its_metrics() {
        // OPS-1, NOD-7, NOD-9, CRD-13
        let metrics = NodeMetrics::new();
        metrics.read_out_began();
        metrics.read_out_began();
        metrics.read_out_ended(true);
        metrics.config_pushed(true);
        metrics.config_pushed(false);
        metrics.journal_dropped(3);
        metrics.journal_trouble(JournalTrouble::Full);
        metrics.credential_lease(LeaseOutcome::Opened);
        metrics.credential_lease(LeaseOutcome::Refused(CredentialReason::Expired));
        metrics.credential_lease(LeaseOutcome::Unused);
        let text = metrics.render();
        for line in [
            "iop_node_read_outs_running 1",
            "iop_node_read_outs_total{outcome=\"cut\"} 1",
            "iop_node_config_pushes_total{outcome=\"applied\"} 1",
            "iop_node_config_pushes_total{outcome=\"refused\"} 1",
            "iop_node_journal_dropped_total 3",
            "iop_node_credential_leases_total{outcome=\"opened\"} 1",
            "iop_node_credential_leases_total{outcome=\"refused\"} 1",
            "iop_node_credential_leases_total{outcome=\"unused\"} 1",
            "iop_node_credential_refusals_total{reason=\"expired\"} 1",
            "iop_node_journal_troubles_total{trouble=\"full\"} 1",
        ] {
            assert!(text.lines().any(|had| had == line), "{line}: {text}");
        }
    }

    #[test]
    fn a_stall_is_one_count_and_one_duration_with_four_closed_labels() {
        // OBS-1, OBS-4, OBS-6, S06
        let metrics = NodeMetrics::new();
        assert!(!metrics.render().contains("path="), "no series before the first stall");
        let stall = |path, health, close, ms| {
            metrics.response_stalled(&StallObservation::new(path, health, close, Duration::from_millis(ms)));
        };
        let confirmed = OwnershipClose::Confirmed { retryable: true };
        stall(RunPath::Run, Health::Available, confirmed, 2_250);
        stall(RunPath::Run, Health::Available, confirmed, 304_000);
        stall(RunPath::Tunnel, Health::Unknown, OwnershipClose::Unconfirmed, 5_000);
        let text = metrics.render();
        let run = "path=\"run\",provider_health=\"available\",liveness_classification=\"request_stalled\",ownership_close=\"confirmed\"";
        let tunnel = "path=\"tunnel\",provider_health=\"unknown\",liveness_classification=\"health_unknown\",ownership_close=\"unconfirmed\"";
        let mut want = vec![
            format!("iop_node_response_stalls_total{{{run}}} 2"),
            format!("iop_node_response_stalls_total{{{tunnel}}} 1"),
        ];
        let bounds = [
            "1.0", "2.5", "5.0", "10.0", "30.0", "60.0", "120.0", "300.0", "310.0", "600.0", "1800.0", "3600.0", "+Inf",
        ];
        let name = "iop_node_response_stall_duration_seconds";
        for (labels, sum, count, first, second) in [(run, "306.25", 2, 1, 8), (tunnel, "5.0", 1, 2, usize::MAX)] {
            want.push(format!("{name}_sum{{{labels}}} {sum}"));
            want.push(format!("{name}_count{{{labels}}} {count}"));
            for (at, bound) in bounds.iter().enumerate() {
                let below = u32::from(at >= first) + u32::from(at >= second);
                want.push(format!("{name}_bucket{{le=\"{bound}\",{labels}}} {below}"));
            }
        }
        let mut got: Vec<_> =
            text.lines().filter(|line| line.starts_with("iop_node_response")).map(String::from).collect();
        got.sort();
        want.sort();
        assert_eq!(got, want);
    }
}
