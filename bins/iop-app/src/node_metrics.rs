//! Decides what is measured on a Node.

use std::fmt;
use std::sync::Arc;

use iop_node_core::journal::JournalTrouble;
use iop_node_core::{NodeObserver, RunOutcome, RunPath};
use iop_wire::CloseCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
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
struct PathLabel {
    path: &'static str,
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
        all.registry = Arc::new(registry);
        all
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

    fn late_messages(&self, count: u64) {
        self.late_messages.inc_by(count);
    }

    fn late_pushes(&self, count: u64) {
        self.late_pushes.inc_by(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_on_a_node_can_be_read_off_its_metrics() {
        // OPS-1, NOD-7, NOD-9
        let metrics = NodeMetrics::new();
        metrics.read_out_began();
        metrics.read_out_began();
        metrics.read_out_ended(true);
        metrics.config_pushed(true);
        metrics.config_pushed(false);
        metrics.journal_dropped(3);
        metrics.journal_trouble(JournalTrouble::Full);
        let text = metrics.render();
        for line in [
            "iop_node_read_outs_running 1",
            "iop_node_read_outs_total{outcome=\"cut\"} 1",
            "iop_node_config_pushes_total{outcome=\"applied\"} 1",
            "iop_node_config_pushes_total{outcome=\"refused\"} 1",
            "iop_node_journal_dropped_total 3",
            "iop_node_journal_troubles_total{trouble=\"full\"} 1",
        ] {
            assert!(text.lines().any(|had| had == line), "{line}: {text}");
        }
    }
}
