//! Decides what the admin API's JSON looks like: the same types write it in the Edge and read it in `iop`.
//!
//! Fields may be added. Times are in milliseconds. There is no prompt, output, key, hash or URL in any of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Problems;

/// Milliseconds of a time.
pub(crate) fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `GET /admin/v1/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusView {
    /// Name of the Edge.
    pub edge: String,
    /// Version of the program.
    pub version: String,
    /// Since the start of the process.
    pub uptime_ms: u64,
    /// At least one provider can take work.
    pub ready: bool,
    /// The config in force.
    pub config: ConfigView,
    /// Nodes.
    pub nodes: NodeCounts,
    /// Providers.
    pub providers: ProviderCounts,
    /// Requests.
    pub requests: RequestCounts,
}

/// The config in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigView {
    /// Its revision; 1 is what the process started with.
    pub revision: u64,
    /// The last attempt to take a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_reload: Option<LastReloadView>,
}

/// The last attempt to take a new config.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastReloadView {
    /// It was taken.
    pub applied: bool,
    /// How long ago.
    pub age_ms: u64,
    /// What changed, or why nothing did.
    pub summary: String,
}

/// Nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCounts {
    /// In the config.
    pub configured: usize,
    /// Of these, ready for new work.
    pub ready: usize,
    /// Connected, finishing what runs.
    pub draining: usize,
    /// Not answering.
    pub suspect: usize,
}

/// Providers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProviderCounts {
    /// In the config.
    pub configured: usize,
    /// Of these, ready for new work.
    pub ready: usize,
    /// Said that they are busy.
    pub cooling: usize,
    /// Out of admission because evidence of a stall says that they are down.
    #[serde(default)]
    pub unhealthy: usize,
    /// Places of all.
    pub places: u64,
    /// Places in use, the quarantined ones among them.
    pub in_use: u64,
    /// Places that wait for the end of cancelled work.
    pub quarantined: u64,
}

/// Requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCounts {
    /// Being answered, the waiting ones among them.
    pub in_flight: usize,
    /// Waiting for a place.
    pub waiting: usize,
}

/// `GET /admin/v1/nodes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodesView {
    /// Every configured Node, in config order.
    pub nodes: Vec<NodeView>,
}

/// One Node; also the answer to `drain` and `resume`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// Its id.
    pub id: String,
    /// `ready`, `draining`, `unavailable` or `disabled`.
    pub status: String,
    /// It may connect.
    pub enabled: bool,
    /// It is connected and ready.
    pub connected: bool,
    /// It takes no new work.
    pub draining: bool,
    /// It does not answer.
    pub suspect: bool,
    /// Revision of the config it has; 0 = none.
    pub config_revision: u64,
    /// Requests that hold a place there.
    pub running: u32,
    /// Its providers, in config order.
    pub providers: Vec<ProviderView>,
}

/// One provider.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProviderView {
    /// Its id.
    pub id: String,
    /// `ready`, `draining`, `unavailable` or `disabled`.
    pub status: String,
    /// `available`, `unavailable` (evidence of a stall says that it is down) or `offline`.
    pub health: String,
    /// It may be used.
    pub enabled: bool,
    /// It said that it is busy: nothing new for it for this long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cooling_ms: Option<u64>,
    /// Recent failures, as load in thousandths of its capacity.
    pub penalty: u32,
    /// Configured places; 0 = what the backend says.
    pub configured_capacity: u32,
    /// Places now; 0 while offline.
    pub capacity: u32,
    /// Of which for long requests.
    pub long_capacity: u32,
    /// Places in use, the quarantined ones among them.
    pub in_use: u32,
    /// Of which by long requests.
    pub long_in_use: u32,
    /// Of which wait for the end of cancelled work.
    pub quarantined: u32,
}

/// `GET /admin/v1/models`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelsView {
    /// Every model: configured ones in config order, then those that providers list.
    pub models: Vec<ModelView>,
}

/// One model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelView {
    /// Its public name.
    pub name: String,
    /// At least one candidate can serve it now.
    pub available: bool,
    /// How a free candidate is chosen.
    pub strategy: String,
    /// Who can serve it.
    pub candidates: Vec<CandidateView>,
    /// Requests that wait for it.
    pub waiting: usize,
    /// How long the oldest of them has waited.
    pub oldest_wait_ms: u64,
}

/// One way to serve a model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CandidateView {
    /// The provider.
    pub provider: String,
    /// Its Node.
    pub node: String,
    /// The model as the provider knows it.
    pub target: String,
    /// Share of the load.
    pub weight: u32,
    /// Status of the provider.
    pub status: String,
}

/// `GET /admin/v1/runs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunsView {
    /// Requests that wait or hold a place, oldest first.
    pub runs: Vec<RunView>,
    /// There are more than were asked for.
    pub more: bool,
}

/// One request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunView {
    /// Its run id: 32 hex digits.
    pub id: String,
    /// The model that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Who asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    /// `waiting`, `reserved`, `dispatched`, `cancelling` or `quarantined`.
    pub stage: String,
    /// Where it is, once it has a place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The provider there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Since it came.
    pub age_ms: u64,
}

/// Answer to `DELETE /admin/v1/runs/{id}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelledView {
    /// The run.
    pub id: String,
    /// It ends as cancelled.
    pub cancelled: bool,
}

/// Answer to `POST /admin/v1/reload`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadView {
    /// Revision of the config that is in force now.
    pub revision: u64,
    /// What changed, in one line.
    pub summary: String,
    /// Nodes that are new.
    pub nodes_added: Vec<String>,
    /// Nodes that are gone.
    pub nodes_removed: Vec<String>,
    /// Nodes whose providers changed.
    pub nodes_changed: Vec<String>,
    /// Models that are new, gone, or served in another way.
    pub models_changed: Vec<String>,
    /// Other keys of the file that changed.
    pub settings_changed: Vec<String>,
    /// The file.
    pub file: String,
    /// What somebody should know.
    pub warnings: Vec<ProblemView>,
}

/// One mistake in a config file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemView {
    /// `error` or `warning`.
    pub severity: String,
    /// The line, from 1; 0 = none in particular.
    pub line: u64,
    /// The column, from 1; 0 = none in particular.
    pub column: u64,
    /// What is wrong.
    pub message: String,
    /// What to write or do instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<String>,
}

impl ProblemView {
    /// The problems of a file, in its order.
    #[must_use]
    pub fn all(problems: &Problems) -> Vec<Self> {
        let view = |problem: &crate::config::Problem| Self {
            severity: problem.severity.as_str().to_owned(),
            line: problem.at.line,
            column: problem.at.column,
            message: problem.message.clone(),
            suggestion: problem.suggestion.clone(),
        };
        problems.sorted().into_iter().map(view).collect()
    }
}

/// What every refusal looks like: `{"error": …}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalView {
    /// Why.
    pub error: ErrorView,
}

/// Why a request was refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorView {
    /// For programs.
    pub code: String,
    /// For people.
    pub message: String,
    /// The config file, with `problems`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// The mistakes of a config, with code `invalid_config`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<ProblemView>,
    /// The keys that need a restart, with code `needs_restart`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
}

impl ErrorView {
    /// Without details.
    #[must_use]
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), ..Self::default() }
    }
}
