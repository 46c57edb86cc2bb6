//! Decides what a Node tells its observer: closed values and counts, never an id or a text.

use std::fmt;
use std::time::Duration;

use iop_execution::failure::{CredentialReason, LivenessClassification, OwnershipClose};
use iop_execution::{CancelReason, FailureCode, Health};
use iop_wire::CloseCode;

use crate::journal::JournalTrouble;
#[cfg(feature = "driver")]
use crate::state::watchdog::Verdict;

/// Which wire a piece of work uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "there are two wires")]
pub enum RunPath {
    /// A normalised run.
    Run,
    /// A tunnel.
    Tunnel,
}

impl RunPath {
    /// The name used in metric labels and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Tunnel => "tunnel",
        }
    }
}

/// How a piece of work ended at the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "the closed list of terminals, and the end without one")]
pub enum RunOutcome {
    /// The connection ended: nothing was sent.
    Abandoned,
    /// Cancelled.
    Cancelled(CancelReason),
    /// Well.
    Completed,
    /// Failed after it was admitted.
    Failed(FailureCode),
    /// Refused before it was admitted.
    Refused(FailureCode),
}

impl RunOutcome {
    /// The name used in metric labels and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Abandoned => "abandoned",
            Self::Cancelled(_) => "cancelled",
            Self::Completed => "completed",
            Self::Failed(_) => "failed",
            Self::Refused(_) => "refused",
        }
    }
}

/// What became of a credential lease that reached this Node (CRD-13).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "it was used, refused, or neither")]
pub enum LeaseOutcome {
    /// It became the key of a call.
    Opened,
    /// It was refused.
    Refused(CredentialReason),
    /// It was good, and its call was never made: no place, or cancelled before.
    Unused,
}

impl LeaseOutcome {
    /// The name used in metric labels and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Opened => "opened",
            Self::Refused(_) => "refused",
            Self::Unused => "unused",
        }
    }
}

/// A stall that was told to the Edge (OBS-1): closed values and a time, nothing else (OBS-4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StallObservation {
    /// Which wire.
    pub path: RunPath,
    /// What the probe found.
    pub provider_health: Health,
    /// What that means.
    pub liveness_classification: LivenessClassification,
    /// Whether the call was seen to end.
    pub ownership_close: OwnershipClose,
    /// From the last progress, or the start, to the terminal.
    pub duration: Duration,
}

impl StallObservation {
    /// A stall on this wire of which this is known.
    #[must_use]
    pub fn new(path: RunPath, health: Health, ownership_close: OwnershipClose, duration: Duration) -> Self {
        let liveness_classification = LivenessClassification::from(health);
        Self { path, provider_health: health, liveness_classification, ownership_close, duration }
    }

    /// Writes the log `node_response_stall_observation`.
    #[cfg(feature = "driver")]
    pub(crate) fn log(&self, verdict: &Verdict) {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        tracing::info!(
            path = self.path.as_str(),
            provider_health = self.provider_health.as_str(),
            liveness_classification = self.liveness_classification.as_str(),
            ownership_close = self.ownership_close.as_str(),
            retryable = self.ownership_close.retryable(),
            timeout_setting = verdict.setting.as_str(),
            timeout_ms = millis(verdict.limit),
            idle_ms = millis(verdict.idle),
            duration_ms = millis(self.duration),
            "node_response_stall_observation"
        );
    }
}

/// Is told what happens in a Node. Every method does nothing by default; none may block.
pub trait NodeObserver: fmt::Debug + Send + Sync + 'static {
    /// A link to an Edge is up; nothing is registered yet.
    fn connected(&self) {}
    /// Work may come.
    fn ready(&self) {}
    /// A link ended.
    fn closed(&self, code: CloseCode) {
        let _ = code;
    }
    /// Work was admitted.
    fn run_started(&self, path: RunPath) {
        let _ = path;
    }
    /// Work ended, or was refused without having started. Its place is free, unless its answer is still read to the end
    /// ([`Self::read_out_began`]).
    fn run_ended(&self, path: RunPath, outcome: RunOutcome) {
        let _ = (path, outcome);
    }
    /// The upstream call of work that has ended is read to its end (NOD-9).
    fn read_out_began(&self) {}
    /// Such a call ended by itself, or was closed after its time (`cut`). Its place is free.
    fn read_out_ended(&self, cut: bool) {
        let _ = cut;
    }
    /// A pushed config was put into force, or refused.
    fn config_pushed(&self, applied: bool) {
        let _ = applied;
    }
    /// Messages of the Edge for runs that were over, told when a connection ends.
    fn late_messages(&self, count: u64) {
        let _ = count;
    }
    /// Notes that the run journal lost: its queue was full, or its file could not be written.
    fn journal_dropped(&self, count: u64) {
        let _ = count;
    }
    /// The journal could not be written. Told every time; the log has each kind once.
    fn journal_trouble(&self, trouble: JournalTrouble) {
        let _ = trouble;
    }
    /// A credential lease was used, refused, or left unused.
    fn credential_lease(&self, outcome: LeaseOutcome) {
        let _ = outcome;
    }
    /// A stall was told.
    fn response_stalled(&self, stall: &StallObservation) {
        let _ = stall;
    }
    /// Pushes of a provider that came after its run was fenced.
    fn late_pushes(&self, count: u64) {
        let _ = count;
    }
}

/// Observes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl NodeObserver for NoObserver {}
