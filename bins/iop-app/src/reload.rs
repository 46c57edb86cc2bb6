//! Decides how a running Edge takes a new config: the whole of it, or nothing (CFG-2).
//!
//! What was bound or built once at the start (addresses, certificates, the log) can't change under a running process. A
//! file that changes one of these is refused as a whole, so that what runs is always one file and never half of two.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use iop_edge_core::api::{ApplyError, ConfigChange};
use iop_edge_core::catalog::Catalog;
use tokio::time::Instant;

use crate::admin::AdminKey;
use crate::certificates::EdgeCertificates;
use crate::config::edge::credentials::Secrets;
use crate::config::edge::{AuthConfig, LimitsConfig, ListenConfig, NodeRecord, ObservabilityConfig};
use crate::config::link::LinkConfig;
use crate::config::problem::Position;
use crate::config::{EdgeConfig, LoadedEdge, Problems, Severity};
use crate::edge_runtime::EdgeRuntime;
use crate::exit::Failure;
use crate::timers;

#[cfg(test)]
mod tests;

/// Revision of the config a process starts with.
pub const FIRST_REVISION: u64 = 1;
/// Names that a summary lists before it counts the rest.
const MAX_NAMES: usize = 5;

/// Takes new configs for one Edge. Clones are one.
#[derive(Debug, Clone)]
pub struct Reloader(Arc<Inner>);

/// What puts a catalog in force.
pub(crate) type Apply = Box<dyn Fn(Catalog) -> Result<ConfigChange, ApplyError> + Send + Sync>;

struct Inner {
    apply: Apply,
    runtime: EdgeRuntime,
    key: AdminKey,
    /// `created` of every model: what `/v1/models` says stays what it was.
    created: u64,
    certificates: OnceLock<EdgeCertificates>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    loaded: LoadedEdge,
    secrets: Secrets,
    revision: u64,
    last: Option<Attempt>,
}

/// The last attempt to take a new config.
#[derive(Debug, Clone)]
struct Attempt {
    at: Instant,
    applied: bool,
    summary: String,
}

/// What is in force, and how the last attempt to change it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    /// Revision of the config.
    pub revision: u64,
    /// The last attempt.
    pub last: Option<LastReload>,
}

/// How the last attempt to take a new config ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastReload {
    /// It was taken.
    pub applied: bool,
    /// How long ago.
    pub ago: Duration,
    /// What changed, or why nothing did.
    pub summary: String,
}

/// A config that is in force now.
#[derive(Debug)]
pub struct Reloaded {
    /// What the engine made of it.
    pub change: ConfigChange,
    /// What else changed: sections of the file, by their keys.
    pub settings: Vec<&'static str>,
    /// What somebody should know about it.
    pub warnings: Problems,
}

/// Why a config was not taken. Nothing changed.
#[derive(Debug)]
pub enum ReloadError {
    /// The file can't be used.
    Invalid(Problems),
    /// It changes what a running process can't.
    NeedsRestart {
        /// The file.
        file: String,
        /// The keys.
        keys: Vec<&'static str>,
    },
    /// A part of it can't be used.
    Unusable(Failure),
    /// The engine refused it.
    Refused(ApplyError),
    /// A defect ended the attempt.
    Broken,
}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(problems) => write!(f, "{}: {}; nothing was changed", problems.file(), problems.summary()),
            Self::NeedsRestart { file, keys } => {
                let (is, them) = if keys.len() == 1 { ("needs", "it") } else { ("need", "them") };
                write!(
                    f,
                    "{file}: {} {is} a restart; nothing was changed. Restart iop-edge, or set {them} back to reload the rest",
                    keys.join(", ")
                )
            }
            Self::Unusable(failure) => write!(f, "{}; nothing was changed", failure.message),
            Self::Refused(error) => write!(f, "{error}; nothing was changed"),
            Self::Broken => f.write_str("a defect ended the reload; the log says more"),
        }
    }
}

impl std::error::Error for ReloadError {}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Reloader {
    /// For an Edge that was started with `loaded`, whose models are `created` then.
    #[must_use]
    pub fn new(loaded: LoadedEdge, created: u64, runtime: EdgeRuntime, key: AdminKey) -> Self {
        let edge = runtime.edge().clone();
        Self::with_apply(loaded, created, runtime, key, Box::new(move |catalog| edge.apply_config(catalog)))
    }

    /// The same with another engine.
    pub(crate) fn with_apply(
        loaded: LoadedEdge,
        created: u64,
        runtime: EdgeRuntime,
        key: AdminKey,
        apply: Apply,
    ) -> Self {
        let state = Mutex::new(State { loaded, secrets: Secrets::default(), revision: FIRST_REVISION, last: None });
        runtime.metrics().config_revision(FIRST_REVISION);
        let certificates = OnceLock::new();
        Self(Arc::new(Inner { apply, runtime, key, created, certificates, state }))
    }

    /// Looks at these certificates with every reload: whoever asks for one has renewed something.
    pub fn with_certificates(&self, certificates: EdgeCertificates) {
        let _once = self.0.certificates.set(certificates);
    }

    /// With the secrets it was started with: those of slots that stay as they are are not read again.
    pub fn with_secrets(&self, secrets: Secrets) {
        log_missing(&secrets);
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).secrets = secrets;
    }

    /// What is in force.
    #[must_use]
    pub fn in_force(&self) -> InForce {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let last = state.last.as_ref().map(|last| LastReload {
            applied: last.applied,
            ago: last.at.elapsed(),
            summary: last.summary.clone(),
        });
        InForce { revision: state.revision, last }
    }

    /// Reads the file again and takes it, or says why not. The outcome is logged, too.
    ///
    /// # Errors
    /// [`ReloadError`]; nothing changed then.
    ///
    /// # Cancel safety
    /// Dropping the future does not stop a reload that has begun.
    pub async fn reload(&self) -> Result<Reloaded, ReloadError> {
        let this = self.clone();
        // Files are read.
        let done = tokio::task::spawn_blocking(move || this.reload_now()).await;
        done.unwrap_or(Err(ReloadError::Broken))
    }

    fn reload_now(&self) -> Result<Reloaded, ReloadError> {
        // One at a time: the second of two reads what the first one put in force.
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(certificates) = self.0.certificates.get() {
            certificates.look(true);
        }
        let outcome = self.take(&mut state);
        let summary = match &outcome {
            Ok(reloaded) => {
                log_problems(&reloaded.warnings);
                let summary = reloaded.to_string();
                tracing::info!(revision = reloaded.change.revision, "config reloaded: {summary}");
                summary
            }
            Err(error) => {
                if let ReloadError::Invalid(problems) = error {
                    log_problems(problems);
                }
                tracing::error!("config not reloaded: {error}");
                error.to_string()
            }
        };
        self.0.runtime.metrics().reloaded(outcome.is_ok());
        state.last = Some(Attempt { at: Instant::now(), applied: outcome.is_ok(), summary });
        outcome
    }

    fn take(&self, state: &mut State) -> Result<Reloaded, ReloadError> {
        let (loaded, mut problems) = EdgeConfig::load(&state.loaded.path);
        let Some(loaded) = loaded else { return Err(ReloadError::Invalid(problems)) };
        let Differences { restart, settings } = compare(&state.loaded.config, &loaded.config);
        if !restart.is_empty() {
            return Err(ReloadError::NeedsRestart { file: problems.file().to_owned(), keys: restart });
        }
        let revision = state.revision.saturating_add(1);
        // Everything is built before anything changes.
        let secrets = loaded.slot_secrets(&state.secrets);
        let catalog = loaded.catalog_with(self.0.created, revision, &secrets).map_err(ReloadError::Unusable)?;
        let openai = loaded.openai().map_err(ReloadError::Unusable)?;
        let key = loaded.admin_key().map_err(ReloadError::Unusable)?;
        let change = (self.0.apply)(catalog).map_err(ReloadError::Refused)?;
        self.0.runtime.replace_openai(openai);
        self.0.key.replace(key);
        self.0.runtime.metrics().config_revision(revision);
        timers::log(Some(&state.loaded.config), &loaded.config);
        // Those in files are told by the check, with their lines.
        for missing in secrets.missing().iter().filter(|missing| !missing.is_file) {
            problems.warning(Position::default(), missing.to_string(), None);
        }
        state.secrets = secrets;
        state.loaded = loaded;
        state.revision = revision;
        Ok(Reloaded { change, settings, warnings: problems })
    }
}

fn log_missing(secrets: &Secrets) {
    for missing in secrets.missing() {
        tracing::error!("{missing}");
    }
}

/// A line of the log for each problem: a log line must not have several.
fn log_problems(problems: &Problems) {
    for problem in problems.sorted() {
        let (line, suggestion) = (problem.at.line, problem.suggestion.as_deref());
        let file = problems.file();
        match problem.severity {
            Severity::Error => tracing::error!(file, line, suggestion, "{}", problem.message),
            Severity::Warning => tracing::warn!(file, line, suggestion, "{}", problem.message),
        }
    }
}

/// Tokens of the Nodes, which the engine does not tell of; a new Node's is no change.
fn changed_tokens(old: &[NodeRecord], new: &[NodeRecord]) -> bool {
    new.iter().any(|node| {
        let before = old.iter().find(|old| old.id == node.id);
        let token = |node: &NodeRecord| {
            let NodeRecord { token_id, token_hash, token_expires_at, previous_token, .. } = node.clone();
            (token_id, token_hash, token_expires_at, previous_token)
        };
        before.is_some_and(|old| token(old) != token(node))
    })
}

/// Identities of the Nodes, which the engine does not tell of either.
fn changed_identities(old: &[NodeRecord], new: &[NodeRecord]) -> bool {
    new.iter().any(|node| old.iter().any(|old| old.id == node.id && old.identities != node.identities))
}

/// What two configs differ in, apart from Nodes and models, which the engine compares.
#[derive(Debug, Default, PartialEq, Eq)]
struct Differences {
    /// Keys whose change a running process can't take.
    restart: Vec<&'static str>,
    /// Keys whose change it takes.
    settings: Vec<&'static str>,
}

fn compare(old: &EdgeConfig, new: &EdgeConfig) -> Differences {
    // Every field is named, so that nobody can add one and forget to decide here.
    let EdgeConfig {
        edge_id: _,
        listen: ListenConfig { openai, nodes: node_listener, admin: admin_listener },
        tls,
        auth: AuthConfig { api_keys, api_keys_file: _, node_tokens_file: _ },
        admin,
        credentials,
        trust_domain: _,
        nodes,
        models,
        queue,
        health,
        recovery,
        request_deadline_ms,
        response_model,
        cors,
        list_unavailable,
        limits: LimitsConfig { request_body_bytes, connections, connections_per_address },
        link: LinkConfig { congestion },
        observability: ObservabilityConfig { log, filter },
    } = new;
    let changed = |pairs: &[(&'static str, bool)]| {
        pairs.iter().filter_map(|(key, changed)| changed.then_some(*key)).collect::<Vec<_>>()
    };
    // The words that allow an insecure listener are read by the check only, so that they may come and go.
    let restart = changed(&[
        ("edge_id", old.edge_id() != new.edge_id()),
        ("listen.openai", old.listen.openai.address != openai.address),
        ("listen.nodes", old.listen.nodes.address != node_listener.address),
        ("listen.admin", old.listen.admin.address != admin_listener.address),
        ("tls.openai", old.tls.openai != tls.openai),
        ("tls.nodes", old.tls.nodes != tls.nodes),
        ("trust_domain", old.trust_domain() != new.trust_domain()),
        ("limits.connections", old.limits.connections != *connections),
        ("limits.connections_per_address", old.limits.connections_per_address != *connections_per_address),
        ("link.congestion", old.link.congestion != *congestion),
        ("observability.log", old.observability.log != *log),
        ("observability.filter", old.observability.filter != *filter),
    ]);
    let settings = changed(&[
        ("models: auto", old.models.is_auto() != models.is_auto()),
        ("nodes[].token_hash", changed_tokens(&old.nodes, nodes)),
        ("auth.api_keys", old.auth.api_keys != *api_keys || old.auth.is_open() != new.auth.is_open()),
        ("nodes[].identities", changed_identities(&old.nodes, nodes)),
        ("admin", old.admin != *admin),
        ("credentials", old.credentials != *credentials),
        ("queue", old.queue != *queue),
        ("health", old.health != *health),
        ("recovery", old.recovery != *recovery),
        ("request_deadline_ms", old.request_deadline_ms != *request_deadline_ms),
        ("response_model", old.response_model != *response_model),
        ("cors", old.cors != *cors),
        ("list_unavailable", old.list_unavailable != *list_unavailable),
        ("limits.request_body_bytes", old.limits.request_body_bytes != *request_body_bytes),
    ]);
    Differences { restart, settings }
}

impl fmt::Display for Reloaded {
    /// One line: what changed, by name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let change = &self.change;
        let mut parts = Vec::new();
        part(&mut parts, "node", "added", &change.nodes_added);
        part(&mut parts, "node", "removed", &change.nodes_removed);
        part(&mut parts, "node", "changed", &change.nodes_changed);
        part(&mut parts, "model", "changed", &change.models_changed);
        part(&mut parts, "setting", "changed", &self.settings);
        if parts.is_empty() {
            return write!(f, "no change in {}", self.warnings.file());
        }
        f.write_str(&parts.join("; "))
    }
}

fn part<N: fmt::Display>(parts: &mut Vec<String>, what: &str, how: &str, names: &[N]) {
    if names.is_empty() {
        return;
    }
    let shown: Vec<_> = names.iter().take(MAX_NAMES).map(ToString::to_string).collect();
    let more = names.len() - shown.len();
    let plural = if names.len() == 1 { "" } else { "s" };
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    parts.push(format!("{what}{plural} {how}: {}{more}", shown.join(", ")));
}
