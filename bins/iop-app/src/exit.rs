//! Decides how a process ends: the closed list of exit codes and the text that goes with a failure.

use std::fmt;
use std::process::ExitCode;

/// Exit codes of every binary (BIN-5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Asked to stop, and stopped.
    Shutdown,
    /// Something broke that a restart may not mend.
    Fatal,
    /// Wrong use or wrong config.
    Usage,
    /// The Edge could not be reached within the attempts allowed.
    Exhausted,
}

impl Exit {
    /// The number.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Shutdown => 0,
            Self::Fatal => 1,
            Self::Usage => 2,
            Self::Exhausted => 3,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Why a command failed, and what to do next. It holds no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// How the process ends.
    pub exit: Exit,
    /// What went wrong.
    pub message: String,
    /// The next step.
    pub hint: Option<String>,
}

impl Failure {
    /// Wrong use or wrong config.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into(), hint: None }
    }

    /// Something broke.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self { exit: Exit::Fatal, message: message.into(), hint: None }
    }

    /// With the next step.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message.trim_end())?;
        match &self.hint {
            Some(hint) => write!(f, "\n    {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}
