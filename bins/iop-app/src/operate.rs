//! Decides which questions and orders `iop` has for a running Edge (BIN-3).

use std::time::Duration;

use clap::{Args, Subcommand};
use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};

use crate::admin::view::{CancelledView, ModelsView, NodeView, NodesView, ReloadView, RunsView, StatusView};
use crate::admin::{DEFAULT_RUNS, MAX_RUNS};
use crate::exit::Failure;
use crate::term::{has_colours, human, note, say};

pub mod client;
pub mod show;
#[cfg(test)]
mod tests;

use client::{AdminClient, AdminOptions, CallError};

/// Between two looks at a Node that drains.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Fewest digits of a run id that name a run.
const MIN_RUN_PREFIX: usize = 4;

/// Commands that talk to a running Edge.
#[derive(Debug, Subcommand)]
pub enum Operate {
    /// Show how a running Edge is: nodes, places, requests, config
    Status(Plain),
    /// List the Nodes of a running Edge and what their providers have in use
    Nodes(Plain),
    /// List the models of a running Edge, who serves them, and how many requests wait
    Models(Plain),
    /// List the requests that wait or run, oldest first
    Runs {
        /// How many
        #[arg(long, default_value_t = DEFAULT_RUNS as u64, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_RUNS as u64))]
        limit: u64,
        /// Where the Edge is
        #[command(flatten)]
        edge: AdminOptions,
    },
    /// Cancel one request
    Cancel {
        /// Its run id, or as much of it as names no other
        run: String,
        /// Where the Edge is
        #[command(flatten)]
        edge: AdminOptions,
    },
    /// Take a Node out of service: what runs there goes on, nothing new is sent
    Drain {
        /// Its id
        node: String,
        /// Wait until nothing runs there
        #[arg(long)]
        wait: bool,
        /// Where the Edge is
        #[command(flatten)]
        edge: AdminOptions,
    },
    /// Put a drained Node back into service
    Resume {
        /// Its id
        node: String,
        /// Where the Edge is
        #[command(flatten)]
        edge: AdminOptions,
    },
    /// Let a running Edge read its edge.yaml again; a bad one changes nothing
    Reload(Plain),
}

/// A command without flags of its own.
#[derive(Debug, Args)]
pub struct Plain {
    #[command(flatten)]
    edge: AdminOptions,
}

/// Does it.
///
/// # Errors
/// [`Failure`] with the next step.
pub async fn operate(command: Operate) -> Result<(), Failure> {
    match command {
        Operate::Status(Plain { edge }) => shown::<StatusView>(&edge, "status", show::status).await,
        Operate::Nodes(Plain { edge }) => shown::<NodesView>(&edge, "nodes", show::nodes).await,
        Operate::Models(Plain { edge }) => shown::<ModelsView>(&edge, "models", show::models).await,
        Operate::Runs { limit, edge } => shown::<RunsView>(&edge, &format!("runs?limit={limit}"), show::runs).await,
        Operate::Cancel { run, edge } => cancel(&run, &edge).await,
        Operate::Drain { node, wait, edge } => drain(&node, wait, &edge).await,
        Operate::Resume { node, edge } => resume(&node, &edge).await,
        Operate::Reload(Plain { edge }) => reload(&edge).await,
    }
}

/// Asks, and prints the answer: as JSON, or as `show` has it.
async fn shown<T: DeserializeOwned>(
    edge: &AdminOptions,
    path: &str,
    show: fn(&T, bool) -> String,
) -> Result<(), Failure> {
    let client = AdminClient::new(edge)?;
    let text = client.text(Method::GET, path).await.map_err(|error| client.failure(error))?;
    if edge.json {
        say(String::from_utf8_lossy(&text));
    } else {
        say(show(&client.read(&text)?, has_colours()).trim_end());
    }
    Ok(())
}

fn say_json(value: &impl Serialize) {
    // Texts and numbers always serialise.
    say(serde_json::to_string(value).unwrap_or_default());
}

/// A path segment: what has a meaning in a URL is escaped.
fn segment(id: &str) -> String {
    use std::fmt::Write as _;
    id.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _infallible = write!(out, "%{byte:02X}");
        }
        out
    })
}

async fn cancel(run: &str, edge: &AdminOptions) -> Result<(), Failure> {
    let client = AdminClient::new(edge)?;
    let id = if run.len() == 32 {
        run.to_owned()
    } else {
        let all: RunsView =
            client.ask(Method::GET, &format!("runs?limit={MAX_RUNS}")).await.map_err(|error| client.failure(error))?;
        one_run(run, &all)?
    };
    let done: Result<CancelledView, _> = client.ask(Method::DELETE, &format!("runs/{}", segment(&id))).await;
    let done = done.map_err(|error| client.failure(error))?;
    if edge.json {
        say_json(&done);
    } else {
        say(format!("cancelled {}", done.id));
    }
    Ok(())
}

/// The only run whose id begins so.
fn one_run(prefix: &str, all: &RunsView) -> Result<String, Failure> {
    if prefix.len() < MIN_RUN_PREFIX || !prefix.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Failure::usage(format!("a run id has 32 hex digits, of which the first {MIN_RUN_PREFIX} may do"))
            .hint("`iop runs` lists them"));
    }
    let prefix = prefix.to_ascii_lowercase();
    let mut found = all.runs.iter().filter(|run| run.id.starts_with(&prefix));
    match (found.next(), found.next()) {
        (Some(run), None) => Ok(run.id.clone()),
        (None, _) => Err(Failure::fatal(format!("no run begins with {prefix}")).hint("`iop runs` lists them")),
        (Some(_), Some(_)) => Err(Failure::usage(format!("several runs begin with {prefix}"))
            .hint("give more digits; `iop runs --json` has all of them")),
    }
}

async fn drain(node: &str, wait: bool, edge: &AdminOptions) -> Result<(), Failure> {
    let client = AdminClient::new(edge)?;
    let path = format!("nodes/{}/drain", segment(node));
    let mut view: NodeView = client.ask(Method::POST, &path).await.map_err(|error| client.failure(error))?;
    if wait {
        note(show::in_service(&view));
        let began = Instant::now();
        view = idle(
            view,
            || async {
                let all: NodesView = client.ask(Method::GET, "nodes").await?;
                Ok(all.nodes.into_iter().find(|view| view.id == node))
            },
            note,
        )
        .await
        .map_err(|error| client.failure(error))?;
        if !edge.json {
            let took = human(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
            say(format!("{node} is idle after {took}: it can be stopped. `iop resume {node}` puts it back"));
            return Ok(());
        }
    }
    if edge.json {
        say_json(&view);
    } else {
        say(show::in_service(&view));
    }
    Ok(())
}

/// Looks until nothing runs on the Node, and tells each time that number changes.
async fn idle<F>(mut view: NodeView, mut look: impl FnMut() -> F, tell: impl Fn(String)) -> Result<NodeView, CallError>
where
    F: Future<Output = Result<Option<NodeView>, CallError>>,
{
    let mut running = view.running;
    while view.running > 0 {
        sleep(LOOK_EVERY).await;
        view = match look().await? {
            Some(view) if view.draining => view,
            Some(_) => return Err(Failure::fatal("the Node was put back into service meanwhile").into()),
            None => return Err(Failure::fatal("the Node was taken out of the config meanwhile").into()),
        };
        if view.running != running && view.running > 0 {
            running = view.running;
            tell(format!("{}: {running} running", view.id));
        }
    }
    Ok(view)
}

async fn resume(node: &str, edge: &AdminOptions) -> Result<(), Failure> {
    let client = AdminClient::new(edge)?;
    let path = format!("nodes/{}/resume", segment(node));
    let view: NodeView = client.ask(Method::POST, &path).await.map_err(|error| client.failure(error))?;
    if edge.json {
        say_json(&view);
    } else {
        say(show::in_service(&view));
    }
    Ok(())
}

async fn reload(edge: &AdminOptions) -> Result<(), Failure> {
    let client = AdminClient::new(edge)?;
    match client.ask::<ReloadView>(Method::POST, "reload").await {
        Ok(view) if edge.json => say_json(&view),
        Ok(view) => {
            let warnings = show::problems(&view.file, &view.warnings);
            if !warnings.is_empty() {
                note(warnings.trim_end());
            }
            say(format!("config revision {} is in force: {}", view.revision, view.summary));
        }
        Err(error) => {
            if let CallError::Refused { error, .. } = &error {
                if edge.json {
                    say_json(&crate::admin::view::RefusalView { error: (**error).clone() });
                } else if !error.problems.is_empty() {
                    note(show::problems(&error.file, &error.problems).trim_end());
                }
            }
            return Err(client.failure(error));
        }
    }
    Ok(())
}
