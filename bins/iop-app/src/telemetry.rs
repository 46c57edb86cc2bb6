//! Decides how logs are written: pretty or JSON, on stderr, coloured on a terminal only.

use std::io::{IsTerminal as _, stderr};

use serde::Deserialize;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Target of the access log (OPS-2).
pub const ACCESS_TARGET: &str = "iop::access";
/// Target of the log of health evidence (OBS-2).
pub const HEALTH_TARGET: &str = "iop::health";
/// Target of the log of recovery (OBS-3).
pub const RECOVERY_TARGET: &str = "iop::recovery";
/// Filter when nobody names one.
pub const DEFAULT_FILTER: &str = "info";
/// Variable that names a filter.
pub const FILTER_VARIABLE: &str = "IOP_LOG";

/// Form of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogForm {
    /// One JSON object per line.
    Json,
    /// For people.
    #[default]
    Pretty,
}

/// How logs are written: flags of every binary.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Log")]
pub struct LogOptions {
    /// Form of log lines on stderr [default: pretty]
    #[arg(long, env = "IOP_LOG_FORM", value_name = "FORM", global = true, display_order = 900)]
    pub log: Option<LogForm>,
    /// What is logged, like `info` or `warn,iop_node_core=debug` [default: info]
    #[arg(long, env = FILTER_VARIABLE, value_name = "FILTER", global = true, display_order = 901)]
    pub log_filter: Option<String>,
}

impl LogOptions {
    /// What flags and variables left open comes from `form` and `filter`.
    #[must_use]
    pub fn or(self, form: Option<LogForm>, filter: Option<String>) -> Self {
        Self { log: self.log.or(form), log_filter: self.log_filter.or(filter) }
    }

    /// Starts logging in this process. A second call changes nothing.
    ///
    /// # Errors
    /// A text for people when the filter can't be read.
    pub fn start(&self) -> Result<(), String> {
        let text = self.log_filter.as_deref().unwrap_or(DEFAULT_FILTER);
        let filter = EnvFilter::try_new(text).map_err(|error| format!("--log-filter `{text}`: {error}"))?;
        let registry = tracing_subscriber::registry().with(filter);
        // Failing to install means that a host program or a test has its own subscriber, which then gets everything.
        let _already = match self.log.unwrap_or_default() {
            LogForm::Json => registry.with(fmt::layer().json().flatten_event(true).with_writer(stderr)).try_init(),
            LogForm::Pretty => {
                registry.with(fmt::layer().with_ansi(stderr().is_terminal()).with_writer(stderr)).try_init()
            }
        };
        Ok(())
    }
}
