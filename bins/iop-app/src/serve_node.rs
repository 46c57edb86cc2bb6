//! Decides what `iop-node serve` does: dials the Edge with the settings it was given, and says how that goes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use iop_node_core::journal::JournalTrouble;
use iop_node_core::journal::sqlite::{SqliteJournal, SqliteOptions};
use iop_node_core::{
    AllowUpstream, LeaseOutcome, Node, NodeBuilder, NodeError, NodeObserver, NodeStatus, ReconnectPolicy, RunOutcome,
    RunPath, ServeEnd, StallObservation,
};
use iop_wire::link::grpc::GrpcConnector;
use iop_wire::{CloseCode, Connector, RefusalReason};

use crate::adapters::BuiltIn;
use crate::admin::{Admin, router};
use crate::config::NodeSettings;
use crate::config::node::JournalSettings;
use crate::exit::{Exit, Failure};
use crate::listener::{HttpListener, Limits};
use crate::node_files::NodeFiles;
use crate::node_metrics::NodeMetrics;
use crate::shutdown::{Hangup, Shutdown};
use crate::term::say;

/// How the Edge is dialled.
///
/// # Errors
/// [`Failure`] when a certificate or name can't be used.
pub fn connector(settings: &NodeSettings, files: &NodeFiles) -> Result<Arc<dyn Connector>, Failure> {
    let edge = &settings.edge;
    let connector = match files.tls() {
        Some(next) => GrpcConnector::tls_from(edge.dial.as_str(), next, Some(&edge.tls_name)),
        None => GrpcConnector::plaintext(edge.dial.as_str()),
    };
    let connector = connector.map_err(|error| Failure::usage(error.to_string()))?;
    Ok(Arc::new(connector.with_congestion(settings.congestion.into())))
}

/// The Node of these settings; it writes no journal.
///
/// # Errors
/// [`Failure`] when a setting can't be used.
pub fn node(settings: &NodeSettings, observer: Arc<dyn NodeObserver>) -> Result<Node, Failure> {
    node_with(settings, &NodeFiles::read(settings, NodeMetrics::new())?, observer)
}

/// The same with files that somebody keeps an eye on.
///
/// # Errors
/// As [`node`].
pub fn node_with(settings: &NodeSettings, files: &NodeFiles, observer: Arc<dyn NodeObserver>) -> Result<Node, Failure> {
    built(builder(settings, files, observer)?)
}

fn built(builder: NodeBuilder) -> Result<Node, Failure> {
    builder.build().map_err(|error| Failure::fatal(error.to_string()))
}

fn builder(
    settings: &NodeSettings,
    files: &NodeFiles,
    observer: Arc<dyn NodeObserver>,
) -> Result<NodeBuilder, Failure> {
    let policy = ReconnectPolicy::new(settings.max_attempts, settings.interval)
        .map_err(|error| Failure::usage(error.to_string()))?;
    let upstream = match &settings.allow_upstream {
        Some(rules) => AllowUpstream::parse(rules).map_err(|error| Failure::usage(error.to_string()))?,
        None => AllowUpstream::default(),
    };
    Ok(Node::builder(settings.token.clone(), connector(settings, files)?)
        .factory(Arc::new(BuiltIn::default()))
        .observer(observer)
        .reconnect(policy)
        .allow_upstream(upstream)
        .lease_issuers(files.issuers())
        .version(env!("CARGO_PKG_VERSION")))
}

fn journal_options(journal: &JournalSettings) -> SqliteOptions {
    let mut options = SqliteOptions::new(journal.node.clone(), Arc::new(unix_ms));
    options.dsn.clone_from(&journal.dsn);
    options.max_rows = journal.max_rows;
    options.max_age = journal.max_age;
    options
}

/// The time of day in Unix milliseconds; 0 on a machine that thinks it is before 1970.
fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// `iop-node serve`.
///
/// # Errors
/// [`Failure`] with the exit code of how it ended.
pub async fn serve(settings: NodeSettings) -> Result<(), Failure> {
    let shutdown =
        Shutdown::on_signals().map_err(|error| Failure::fatal(format!("can't listen for signals: {error}")))?;
    let hangup = Hangup::new().map_err(|error| Failure::fatal(format!("can't listen for signals: {error}")))?;
    let metrics = NodeMetrics::new();
    let teller =
        Teller { metrics: metrics.clone(), dial: settings.edge.dial.clone(), was_ready: AtomicBool::new(false) };
    let teller: Arc<dyn NodeObserver> = Arc::new(teller);
    let files = NodeFiles::read(&settings, metrics.clone())?;
    let mut builder = builder(&settings, &files, Arc::clone(&teller))?;
    if let Some(journal) = &settings.journal {
        builder = builder.journal(Arc::new(SqliteJournal::open(journal_options(journal), teller)));
    }
    let node = built(builder)?;
    let status = node.status();
    let keeping = tokio::spawn(files.keep(node.edge_check(), hangup));
    let stop = Shutdown::default();
    if let Some(address) = settings.metrics {
        let failed = |error| Failure::fatal(format!("can't listen at {address} (metrics.listen): {error}"));
        let listener = HttpListener::bind(address, None, Limits::default()).await.map_err(failed)?;
        say(format!("listening metrics=http://{}", listener.local_addr().map_err(failed)?));
        let ready = status.clone();
        let admin = Admin {
            ready: Arc::new(move || ready.get() == NodeStatus::Ready),
            metrics: Arc::new(move || metrics.render()),
        };
        tokio::spawn(listener.serve(router(admin), stop.clone()));
    }
    say(format!("connecting edge={}", settings.edge.dial));
    let telling = tokio::spawn({
        let drain = shutdown.gracefully.clone();
        async move {
            drain.cancelled().await;
            say("shutting down: finishing what runs, up to 30 s; a second signal ends at once");
        }
    });
    let drain = shutdown.gracefully.clone();
    let outcome = tokio::select! {
        outcome = node.serve(drain) => Some(outcome),
        () = shutdown.now.cancelled() => None,
    };
    telling.abort();
    keeping.abort();
    stop.force();
    match outcome {
        None => {
            say("stopped at once: what ran was cut");
            Ok(())
        }
        Some(Ok(end)) => {
            say(match end {
                ServeEnd::Drained => "stopped",
                ServeEnd::Cancelled => "stopped: what still ran after 30 s was cancelled",
            });
            Ok(())
        }
        Some(Err(error)) => Err(failure(&error, &settings)),
    }
}

/// Counts, and writes one line for each change that a person wants to know.
#[derive(Debug)]
struct Teller {
    metrics: NodeMetrics,
    dial: String,
    was_ready: AtomicBool,
}

#[deny(clippy::missing_trait_methods)]
impl NodeObserver for Teller {
    fn connected(&self) {
        self.metrics.connected();
    }

    fn ready(&self) {
        self.metrics.ready();
        self.was_ready.store(true, Ordering::Relaxed);
        say(format!("ready edge={}", self.dial));
    }

    fn closed(&self, code: CloseCode) {
        self.metrics.closed(code);
        if self.was_ready.swap(false, Ordering::Relaxed) {
            say(format!("disconnected edge={} reason={code}", self.dial));
        }
    }

    fn run_started(&self, path: RunPath) {
        self.metrics.run_started(path);
    }

    fn run_ended(&self, path: RunPath, outcome: RunOutcome) {
        self.metrics.run_ended(path, outcome);
    }

    fn read_out_began(&self) {
        self.metrics.read_out_began();
    }

    fn read_out_ended(&self, cut: bool) {
        self.metrics.read_out_ended(cut);
    }

    fn config_pushed(&self, applied: bool) {
        self.metrics.config_pushed(applied);
    }

    fn credential_lease(&self, outcome: LeaseOutcome) {
        self.metrics.credential_lease(outcome);
    }

    fn response_stalled(&self, stall: &StallObservation) {
        self.metrics.response_stalled(stall);
    }

    fn journal_dropped(&self, count: u64) {
        self.metrics.journal_dropped(count);
    }

    fn journal_trouble(&self, trouble: JournalTrouble) {
        self.metrics.journal_trouble(trouble);
    }

    fn late_messages(&self, count: u64) {
        self.metrics.late_messages(count);
    }

    fn late_pushes(&self, count: u64) {
        self.metrics.late_pushes(count);
    }
}

pub(crate) fn failure(error: &NodeError, settings: &NodeSettings) -> Failure {
    let failure = Failure { exit: Exit::Fatal, message: error.to_string(), hint: None };
    match error {
        NodeError::Exhausted { .. } => Failure { exit: Exit::Exhausted, ..failure }.hint(format!(
            "is the Edge at {} up, and is its certificate from the CA of --ca? the log says why each try failed; --reconnect-max-attempts 0 tries for ever",
            settings.edge.dial
        )),
        NodeError::Refused(RefusalReason::UnknownToken) => {
            failure.hint("no `nodes:` entry of edge.yaml has this token: compare its token_id and token_hash with `iop-edge hash < node.token`")
        }
        NodeError::Refused(RefusalReason::IdentityRequired) => {
            failure.hint("the Edge wants this Node's certificate: name it with --cert and --cert-key (tls: { cert, key } in node.yaml)")
        }
        NodeError::Refused(RefusalReason::IdentityMismatch) => {
            failure.hint("token and certificate belong to different `nodes:` entries of edge.yaml: its `identities` must hold the URI name of the certificate (openssl x509 -in node.pem -noout -ext subjectAltName)")
        }
        NodeError::Refused(RefusalReason::UnsupportedProtocol) => failure.hint("Edge and Node are of versions too far apart: update the older one"),
        _ => failure,
    }
}
