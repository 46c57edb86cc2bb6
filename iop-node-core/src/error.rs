//! Decides how serving ends when it does not end well.

use iop_wire::{CloseCode, RefusalReason};

/// Why a Node stopped serving without being asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The Edge can't be dialled as configured: a bad name or certificate file.
    #[error("the Edge can't be dialled: {0}")]
    Connect(String),
    /// The Edge refused the registration for a reason that trying again can't change.
    #[error("the Edge refused this Node: {0}")]
    Refused(RefusalReason),
    /// The Edge closed the connection for a reason that trying again can't change.
    #[error("the Edge closed the connection: {0}")]
    Closed(CloseCode),
    /// Every attempt of `reconnect.max_attempts` was used up.
    #[error("gave up: no lasting connection to the Edge after {attempts} attempts")]
    Exhausted {
        /// How many attempts there were.
        attempts: u32,
    },
    /// The operating system gives no randomness.
    #[error("the operating system gives no randomness")]
    Randomness,
}

/// Exit code of a process whose Node met a fatal configuration or credential error.
pub const EXIT_FATAL: u8 = 1;
/// Exit code of a process whose Node used up its attempts.
pub const EXIT_EXHAUSTED: u8 = 3;

impl NodeError {
    /// The exit code a process should end with: [`EXIT_EXHAUSTED`] when a restart may help, else [`EXIT_FATAL`].
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Exhausted { .. } => EXIT_EXHAUSTED,
            Self::Connect(_) | Self::Refused(_) | Self::Closed(_) | Self::Randomness => EXIT_FATAL,
        }
    }
}

/// How serving ended after a local shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "work finished or it did not")]
pub enum ServeEnd {
    /// Everything that ran had finished.
    Drained,
    /// The drain grace passed and what still ran was cancelled.
    Cancelled,
}
