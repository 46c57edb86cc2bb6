//! Decides how keys, tokens, certificates and credential slots are made, listed, rotated and taken back (BIN-3, CRD-11, CRD-12).
//!
//! Config is files, so these commands change files: those that `edge.yaml` names for it, and nothing that a person
//! wrote. Every change is checked with the whole config before it is written, and a running Edge is told to read it.

use std::path::{Path, PathBuf};

use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::admin::view::ReloadView;
use crate::config::edge::records::{Form, Reading};
use crate::config::tree::Tree;
use crate::config::{EdgeConfig, LoadedEdge, Problems};
use crate::exit::{Exit, Failure};
use crate::files::{self, Readers};
use crate::operate::client::{AdminClient, AdminOptions, CallError, DEFAULT_ADMIN, KEY_FILE, KEY_VARIABLE};
use crate::term::{note, say};

pub mod key;
pub mod lease;
pub mod node;
pub mod record;
pub mod slot;
#[cfg(test)]
mod tests;
pub mod token;
#[cfg(test)]
pub(crate) mod typed;

/// Which config is changed, and how a running Edge is told.
#[derive(Debug, Clone, clap::Args)]
pub struct Target {
    /// The Edge's config file
    #[arg(long, short, env = "IOP_EDGE_CONFIG", default_value = "edge.yaml", value_name = "FILE", display_order = 799)]
    pub config: PathBuf,
    /// Leave a running Edge alone: it takes a change with its next reload, and is not asked for live counts
    #[arg(long, display_order = 803)]
    pub no_reload: bool,
    /// Where the Edge is
    #[command(flatten)]
    pub edge: AdminOptions,
}

/// What a running Edge made of a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// It is in force.
    InForce {
        /// Revision of the config.
        revision: u64,
    },
    /// It is written, and nobody was told.
    Written {
        /// Why, and what to do.
        next: String,
    },
    /// It is written, and the Edge that was told did not take it, or did not say so.
    NotTaken {
        /// Why.
        error: String,
        /// What to do.
        #[serde(skip_serializing_if = "Option::is_none")]
        next: Option<String>,
        /// How the command ends.
        #[serde(skip)]
        exit: Exit,
    },
    /// It is not written: `edge.yaml` names no file for it.
    Shown,
}

impl Effect {
    /// The end of the command, once everything else was told: what was written is never lost with an error.
    fn settled(self) -> Result<(), Failure> {
        match self {
            Self::InForce { .. } | Self::Written { .. } | Self::Shown => Ok(()),
            Self::NotTaken { error, next, exit } => Err(Failure { exit, message: error, hint: next }),
        }
    }
}

impl Target {
    /// The config as it is. Warnings are not told: this is not what was asked.
    fn load(&self) -> Result<LoadedEdge, Failure> {
        self.load_with(None)
    }

    fn load_with(&self, draft: Option<(&Path, &str)>) -> Result<LoadedEdge, Failure> {
        let (loaded, problems) = EdgeConfig::load_with(&self.config, Reading { draft, missing_is_empty: true });
        loaded.ok_or_else(|| unusable(&problems))
    }

    /// The file that `edge.yaml` names for these records.
    fn file(&self, form: &'static Form) -> Result<Option<PathBuf>, Failure> {
        let failed = |message: String| {
            Failure::usage(format!("{}: {message}", self.config.display()))
                .hint("name it with --config FILE; `iop init` writes one to start from")
        };
        let text = crate::config::edge::read(&self.config).map_err(failed)?;
        let mut problems = Problems::of(self.config.display().to_string());
        let tree = Tree::parse(&text, &mut problems).ok_or_else(|| unusable(&problems))?;
        let base = self.config.parent().unwrap_or(Path::new(""));
        Ok(form.path(&tree, base).map(|(path, _)| path))
    }

    /// The admin API of the Edge of this config; `None` without a key for it.
    fn client(&self, loaded: &LoadedEdge) -> Result<Option<AdminClient>, Failure> {
        let mut options = self.edge.clone();
        if options.admin == DEFAULT_ADMIN {
            options.admin = loaded.config.listen.admin.address.to_string();
        }
        if options.key_file.is_none() && std::env::var_os(KEY_VARIABLE).is_none() {
            let beside = loaded.base().join(KEY_FILE);
            if !beside.exists() {
                return Ok(None);
            }
            options.key_file = Some(beside);
        }
        AdminClient::new(&options).map(Some)
    }

    /// What a running Edge says of itself; an error is one line that says why there is nothing. What stands in the files is
    /// shown without it, too.
    async fn live<T: DeserializeOwned>(&self, loaded: &LoadedEdge, path: &str) -> Result<T, String> {
        if self.no_reload {
            return Err("only what stands in the files: --no-reload leaves a running Edge alone".to_owned());
        }
        let client = match self.client(loaded) {
            Ok(Some(client)) => client,
            Ok(None) => {
                let message = "only what stands in the files: there is no admin key here to ask a running Edge with";
                return Err(format!("{message} (--key-file FILE)"));
            }
            Err(failure) => return Err(format!("only what stands in the files: {}", failure.message)),
        };
        let answer = client.ask(Method::GET, path).await;
        answer.map_err(|error| format!("only what stands in the files: {}", client.failure(error).message))
    }

    /// Tells a running Edge to read its config again. No error: what it is told of is written, whatever it says.
    async fn reload(&self, loaded: &LoadedEdge) -> Effect {
        let later = |next: &str| Effect::Written { next: next.to_owned() };
        let not_taken = |what: &str, failure: Failure| Effect::NotTaken {
            error: format!("it is written, {what}: {}", failure.message),
            next: failure.hint,
            exit: failure.exit,
        };
        if self.no_reload {
            return later("a running Edge takes it with `iop reload` or SIGHUP");
        }
        let client = match self.client(loaded) {
            Ok(Some(client)) => client,
            Ok(None) => {
                return later(
                    "there is no admin key here to tell a running Edge: `iop reload --key-file FILE`, or SIGHUP",
                );
            }
            Err(failure) => return not_taken("but no running Edge could be told", failure),
        };
        match client.ask::<ReloadView>(Method::POST, "reload").await {
            Ok(view) => {
                // What the check here has not told: what the Edge alone can know, such as a secret that it can't load.
                for warning in view.warnings.iter().filter(|warning| warning.line == 0) {
                    note(format!("the Edge says: {}", warning.message));
                }
                Effect::InForce { revision: view.revision }
            }
            Err(CallError::NoEdge(_)) => later("no Edge answers: it is in force when iop-edge starts"),
            Err(CallError::Failed(failure)) => {
                let hint = "`iop status` shows the config's revision; `iop reload` asks again".to_owned();
                let failure = Failure { hint: Some(hint), ..failure };
                not_taken("and the running Edge may have taken it or not", failure)
            }
            Err(refused @ CallError::Refused { .. }) => {
                not_taken("but the running Edge did not take it", client.failure(refused))
            }
        }
    }
}

fn unusable(problems: &Problems) -> Failure {
    note(problems.to_string().trim_end());
    Failure::usage(format!("{}: {}", problems.file(), problems.summary()))
}

/// Writes records, once the whole config is known to be usable with them, and tells a running Edge. An error means that
/// nothing was written.
async fn put(target: &Target, form: &'static Form, file: &Path, lines: &[String]) -> Result<Effect, Failure> {
    let loaded = write(target, form, file, lines)?;
    Ok(target.reload(&loaded).await)
}

/// The first half of [`put`].
fn write(target: &Target, form: &'static Form, file: &Path, lines: &[String]) -> Result<LoadedEdge, Failure> {
    let text = record::file_text(form, lines);
    let loaded = target.load_with(Some((file, &text)))?;
    files::replace(file, &text, Readers::Owner)
        .map_err(|error| Failure::fatal(format!("can't write {}: {error}; nothing was changed", file.display())))?;
    Ok(loaded)
}

/// What is written, for people.
fn told(effect: &Effect, file: Option<&Path>) -> String {
    let written = file.map(|file| format!("written to {}", file.display())).unwrap_or_default();
    match effect {
        Effect::InForce { revision } => format!("{written}; in force (config revision {revision})"),
        Effect::Written { next } => format!("{written}; {next}"),
        Effect::NotTaken { .. } => format!("{written}; not known to be in force"),
        Effect::Shown => String::new(),
    }
}

/// One thing as JSON.
fn say_json(value: &impl Serialize) {
    // Texts, numbers and lists always serialise.
    say(serde_json::to_string(value).unwrap_or_default());
}

/// What to do with a record that stands in `edge.yaml` itself.
fn by_hand(what: &str, form: &'static Form, config: &Path) -> Failure {
    Failure::usage(format!("{what} stands in {} itself, which no command edits", config.display()))
        .hint(format!("change it there, or move it to a file that `auth.{}` names; then `iop reload`", form.key))
}
