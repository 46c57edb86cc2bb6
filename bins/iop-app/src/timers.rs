//! Decides what the log says of timers: every one that can end or delay a request, as it is in force, under the name that
//! config has for it. A timer that nobody can see is one that nobody can explain.

use iop_adapters::http::CONNECT_TIMEOUT;
use iop_adapters::openai_compat::TERMINAL_LINGER;
use iop_execution::StallTimeout;
use iop_node_core::adapters::DEFAULT_CLOSE_GRACE;
use iop_node_core::state::watchdog::DEFAULT_PROBE_TIMEOUT;

use crate::admin::view::ms;
use crate::config::EdgeConfig;
use crate::config::edge::ProviderRecord;

#[cfg(test)]
mod tests;

/// Timers of one provider.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ProviderTimers {
    provider: String,
    response_stall_timeout_ms: u64,
    first_response_timeout_ms: u64,
    first_response_per_1k_prompt_ms: u64,
    probe_timeout_ms: u64,
    close_grace_ms: u64,
    terminal_linger_ms: u64,
    /// None for a provider without a backend.
    connect_timeout_ms: Option<u64>,
}

const fn or(set: u64, default: u64) -> u64 {
    if set == 0 { default } else { set }
}

impl ProviderTimers {
    fn of(record: &ProviderRecord) -> Self {
        let stall = or(record.response_stall_timeout_ms, StallTimeout::DEFAULT_MS);
        Self {
            provider: record.id.clone(),
            response_stall_timeout_ms: stall,
            first_response_timeout_ms: record.first_response_timeout_ms.max(stall),
            first_response_per_1k_prompt_ms: record.first_response_per_1k_prompt_ms,
            probe_timeout_ms: or(record.probe_timeout_ms, ms(DEFAULT_PROBE_TIMEOUT)),
            close_grace_ms: or(record.close_grace_ms, ms(DEFAULT_CLOSE_GRACE)),
            terminal_linger_ms: or(record.terminal_linger_ms, ms(TERMINAL_LINGER)),
            connect_timeout_ms: record.base_url.is_some().then(|| ms(CONNECT_TIMEOUT)),
        }
    }

    fn log(&self) {
        tracing::info!(
            provider = self.provider,
            response_stall_timeout_ms = self.response_stall_timeout_ms,
            first_response_timeout_ms = self.first_response_timeout_ms,
            first_response_per_1k_prompt_ms = self.first_response_per_1k_prompt_ms,
            probe_timeout_ms = self.probe_timeout_ms,
            close_grace_ms = self.close_grace_ms,
            terminal_linger_ms = self.terminal_linger_ms,
            connect_timeout_ms = self.connect_timeout_ms,
            "timers of a provider"
        );
    }
}

/// Timers of the Edge itself; 0 = off.
#[derive(Debug, Clone, PartialEq, Eq)]
struct EdgeTimers {
    queue_timeout_ms: u64,
    request_deadline_ms: u64,
    keepalive_after_ms: u64,
    suspicion_withdraw_ms: u64,
    dispatch_ack_timeout_ms: u64,
}

impl EdgeTimers {
    const fn of(config: &EdgeConfig) -> Self {
        Self {
            queue_timeout_ms: config.queue.timeout_ms,
            request_deadline_ms: config.request_deadline_ms,
            keepalive_after_ms: config.recovery.keepalive_after_ms,
            suspicion_withdraw_ms: config.health.suspicion_withdraw_ms,
            dispatch_ack_timeout_ms: config.health.dispatch_ack_timeout_ms,
        }
    }

    fn log(&self) {
        tracing::info!(
            queue_timeout_ms = self.queue_timeout_ms,
            request_deadline_ms = self.request_deadline_ms,
            keepalive_after_ms = self.keepalive_after_ms,
            suspicion_withdraw_ms = self.suspicion_withdraw_ms,
            dispatch_ack_timeout_ms = self.dispatch_ack_timeout_ms,
            "timers of the edge"
        );
    }
}

fn providers(config: &EdgeConfig) -> impl Iterator<Item = ProviderTimers> + '_ {
    let enabled = config.nodes.iter().flat_map(|node| &node.providers).filter(|provider| provider.enabled);
    enabled.map(ProviderTimers::of)
}

/// Logs all timers of a config that is in force now; with the one before it, what differs.
pub(crate) fn log(before: Option<&EdgeConfig>, now: &EdgeConfig) {
    let edge = EdgeTimers::of(now);
    if before.is_none_or(|before| EdgeTimers::of(before) != edge) {
        edge.log();
    }
    let known: Vec<_> = before.into_iter().flat_map(providers).collect();
    providers(now).filter(|timers| !known.contains(timers)).for_each(|timers| timers.log());
}

/// Logs the timers of these providers.
pub(crate) fn log_providers(records: &[ProviderRecord]) {
    records.iter().map(ProviderTimers::of).for_each(|timers| timers.log());
}
