//! Decides what `iop doctor` looks at, and how it tells what it found (BIN-4).
//!
//! From a Node's place it goes the way of a Node, one step after the other: name, connection, TLS, identity, token, clock,
//! backends. From the Edge's place it reads the config with everything it names, and asks the Edge that runs.
//! It changes nothing: a Node that it plays leaves before it would be given work.

use std::path::PathBuf;

use serde::Serialize;

use crate::config::node::{DialOptions, NodeOptions};
use crate::exit::Failure;
use crate::operate::client::AdminOptions;
use crate::term::{Cell, Paint, columns, has_colours, say};

mod backend;
pub(crate) mod certificate;
mod edge;
mod node;
#[cfg(test)]
mod tests;

/// Flags of `iop doctor`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DoctorOptions {
    /// edge.yaml or node.yaml: whose place to look from [default: the one that is here]
    #[arg(long, short, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Look as a Node of this Edge
    #[command(flatten)]
    pub dial: DialOptions,
    /// Look at this backend, too; repeatable
    #[arg(long = "backend", value_name = "URL")]
    pub backends: Vec<String>,
    /// How to ask a running Edge
    #[command(flatten)]
    pub admin: AdminOptions,
}

/// How one thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, and somebody should look at it.
    Warn,
    /// It does not work.
    Fail,
    /// It was not looked at.
    Skip,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What.
    pub check: String,
    /// How it is.
    pub verdict: Verdict,
    /// What was seen.
    pub detail: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Everything that was found, in the order it was looked at.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Report {
    fn add(&mut self, check: impl Into<String>, verdict: Verdict, detail: impl Into<String>, next: Option<String>) {
        self.findings.push(Finding { check: check.into(), verdict, detail: detail.into(), next });
    }

    fn ok(&mut self, check: impl Into<String>, detail: impl Into<String>) {
        self.add(check, Verdict::Ok, detail, None);
    }

    fn warn(&mut self, check: impl Into<String>, detail: impl Into<String>, next: impl Into<String>) {
        self.add(check, Verdict::Warn, detail, Some(next.into()));
    }

    fn fail(&mut self, check: impl Into<String>, detail: impl Into<String>, next: impl Into<String>) {
        self.add(check, Verdict::Fail, detail, Some(next.into()));
    }

    fn skip(&mut self, check: impl Into<String>, detail: impl Into<String>) {
        self.add(check, Verdict::Skip, detail, None);
    }

    /// Findings of one verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.findings.iter().filter(|finding| finding.verdict == verdict).count()
    }

    /// A row each, with the next step below what needs one.
    #[must_use]
    pub fn table(&self, colours: bool) -> String {
        let mut rows = Vec::new();
        for finding in &self.findings {
            let (word, paint) = match finding.verdict {
                Verdict::Ok => ("ok", Paint::Good),
                Verdict::Warn => ("warn", Paint::Warn),
                Verdict::Fail => ("fail", Paint::Bad),
                Verdict::Skip => ("skip", Paint::Dim),
            };
            rows.push(vec![Cell::painted(word, paint), Cell::plain(&finding.check), Cell::plain(&finding.detail)]);
            if let Some(next) = &finding.next {
                rows.push(vec![Cell::plain(""), Cell::plain(""), Cell::painted(format!("→ {next}"), Paint::Dim)]);
            }
        }
        columns(&["", "CHECK", "FOUND"], &rows, colours)
    }

    /// How much of what there is.
    #[must_use]
    pub fn summary(&self) -> String {
        let (ok, warn, fail) = (self.count(Verdict::Ok), self.count(Verdict::Warn), self.count(Verdict::Fail));
        let plural = if warn == 1 { "" } else { "s" };
        format!("{ok} ok, {warn} warning{plural}, {fail} failed")
    }
}

/// Whose place it is.
enum Place {
    Edge(PathBuf),
    Node(Box<NodeOptions>),
}

impl DoctorOptions {
    fn place(&self) -> Result<Place, Failure> {
        let node = |config: Option<PathBuf>| {
            Place::Node(Box::new(NodeOptions {
                config,
                dial: self.dial.clone(),
                journal_enabled: Some(false),
                ..NodeOptions::default()
            }))
        };
        match &self.config {
            Some(file) if crate::cli::is_node_file(file) => Ok(node(Some(file.clone()))),
            Some(file) => Ok(Place::Edge(file.clone())),
            None if self.dial.edge.is_some() => Ok(node(None)),
            None => {
                let here = ["edge.yaml", "node.yaml"].map(PathBuf::from).into_iter().find(|file| file.exists());
                match here {
                    Some(file) if file.ends_with("node.yaml") => Ok(node(Some(file))),
                    Some(file) => Ok(Place::Edge(file)),
                    None => Err(Failure::usage("there is neither edge.yaml nor node.yaml here").hint(
                        "--config edge.yaml looks from the Edge's place, \
                         --edge https://HOST:8443 --token-file node.token from a Node's",
                    )),
                }
            }
        }
    }

    /// Looks at everything.
    ///
    /// # Errors
    /// [`Failure`] when it is not clear where to look.
    pub async fn examine(&self) -> Result<Report, Failure> {
        let mut report = Report::default();
        match self.place()? {
            Place::Edge(file) => edge::examine(&file, &self.admin, &mut report).await,
            Place::Node(options) => node::examine(crate::cli::with_token(*options), &mut report).await,
        }
        backend::examine_urls(&self.backends, &mut report).await;
        Ok(report)
    }
}

/// `iop doctor`.
///
/// # Errors
/// [`Failure`] with exit code 1 when something failed, 2 when it is not clear where to look.
pub async fn doctor(options: DoctorOptions) -> Result<(), Failure> {
    let report = options.examine().await?;
    if options.admin.json {
        // Texts always serialise.
        say(serde_json::to_string(&report).unwrap_or_default());
    } else {
        say(report.table(has_colours()).trim_end());
        say(format!("\n{}", report.summary()));
    }
    match report.count(Verdict::Fail) {
        0 => Ok(()),
        1 => Err(Failure::fatal("1 check failed")),
        failed => Err(Failure::fatal(format!("{failed} checks failed"))),
    }
}
