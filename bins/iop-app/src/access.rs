//! Decides what the access log says of a request: one line, ids and numbers, no text of a client or provider.

use std::time::Duration;

use iop_edge_core::openai::{LivenessObservation, RequestObserver, RequestRecord};

use crate::liveness::log_recovery;
use crate::metrics::EdgeMetrics;
use crate::telemetry::ACCESS_TARGET;

/// Counts each request and writes its line.
#[derive(Debug, Clone)]
pub struct AccessLog {
    metrics: EdgeMetrics,
}

impl AccessLog {
    /// Counts in these metrics.
    #[must_use]
    pub const fn new(metrics: EdgeMetrics) -> Self {
        Self { metrics }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl RequestObserver for AccessLog {
    fn request_ended(&self, record: &RequestRecord) {
        self.metrics.request_ended(record);
        let usage = record.usage.as_ref();
        // Fields that are `None` are left out.
        tracing::info!(
            target: ACCESS_TARGET,
            request_id = %record.request_id,
            endpoint = record.endpoint.as_str(),
            status = record.status,
            outcome = record.outcome.as_str(),
            ended_by = record.ended_by.as_str(),
            code = record.code,
            principal = record.principal.as_ref().map(tracing::field::display),
            model = record.model.as_ref().map(tracing::field::display),
            provider = record.provider.as_ref().map(tracing::field::display),
            node = record.node.as_ref().map(tracing::field::display),
            run_id = record.run_id.as_ref().map(tracing::field::display),
            attempts = record.attempts,
            stream = record.stream,
            queue_ms = record.queue.map(ms),
            ttft_ms = record.ttft.map(ms),
            duration_ms = ms(record.duration),
            input_tokens = usage.and_then(|usage| usage.input_tokens),
            output_tokens = usage.and_then(|usage| usage.output_tokens),
        );
    }

    fn liveness(&self, observation: &LivenessObservation) {
        self.metrics.liveness(observation);
        log_recovery(observation);
    }
}
