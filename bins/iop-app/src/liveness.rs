//! Decides what the dedicated logs of an Edge say of health evidence and of recovery: closed values, and nothing that names
//! anybody (OBS-4). No other log repeats them.

use iop_edge_core::observe::{Observation, Observer};
use iop_edge_core::openai::LivenessObservation;

use crate::metrics::EdgeMetrics;
use crate::telemetry::{HEALTH_TARGET, RECOVERY_TARGET};

#[cfg(test)]
mod tests;

/// Counts what the engine observes, and logs what it made of evidence.
#[derive(Debug, Clone)]
pub struct HealthLog {
    metrics: EdgeMetrics,
}

impl HealthLog {
    /// Counts in these metrics.
    #[must_use]
    pub const fn new(metrics: EdgeMetrics) -> Self {
        Self { metrics }
    }
}

impl Observer for HealthLog {
    fn observe(&self, observation: &Observation) {
        self.metrics.observe(observation);
        match observation {
            Observation::HealthEvidence { source, result } => tracing::info!(
                target: HEALTH_TARGET,
                source = source.as_str(),
                result = result.as_str(),
                "edge_provider_health_observation"
            ),
            Observation::HealthTransition { to } => {
                tracing::info!(target: HEALTH_TARGET, to = to.as_str(), "edge_provider_health_observation");
            }
            // The list may grow, and the other logs have their own observers.
            _ => {}
        }
    }
}

/// Logs what became of a failure that another attempt could help with.
pub(crate) fn log_recovery(observation: &LivenessObservation) {
    match observation {
        LivenessObservation::Considered { decision, reason } => tracing::info!(
            target: RECOVERY_TARGET,
            decision = decision.as_str(),
            reason = reason.as_str(),
            "edge_liveness_recovery_observation"
        ),
        LivenessObservation::Ended { outcome } => {
            tracing::info!(target: RECOVERY_TARGET, outcome = outcome.as_str(), "edge_liveness_recovery_observation");
        }
    }
}
