//! Decides how files beside `edge.yaml` add to it: API keys and node tokens that commands write (BIN-3).
//!
//! `edge.yaml` is written by people and read by programs; these files are written by `iop key`, `iop token` and `iop slot`, so that no
//! program ever edits what a person wrote. All are read as one config, at the start and on every reload.

use std::path::{Path, PathBuf};

use super::credentials::{SLOTS_FILE, SlotRecord};
use super::table::{API_KEYS_FILE, NODE_TOKENS_FILE};
use super::{ApiKeyRecord, EdgeConfig, NodeTokenRecord};
use crate::config::problem::{Position, Problems};
use crate::config::schema::{self, Object};
use crate::config::secret::resolve_path;
use crate::config::tree::Tree;

#[cfg(test)]
mod tests;

/// One file beside `edge.yaml`.
#[derive(Debug)]
pub(super) struct RecordFile {
    /// Where `edge.yaml` names it.
    pub(super) at: Position,
    pub(super) path: PathBuf,
    pub(super) tree: Tree,
}

/// How the files are read.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reading<'a> {
    /// What one of them would hold: so a change is checked before anything is written.
    pub draft: Option<(&'a Path, &'a str)>,
    /// One that is not there yet holds nothing, for the commands that are about to write it. An Edge never reads like this.
    pub missing_is_empty: bool,
}

/// What the files hold.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) api_keys: Option<RecordFile>,
    pub(super) node_tokens: Option<RecordFile>,
    pub(super) slots: Option<RecordFile>,
}

/// A file of records: where `edge.yaml` names it, and what it holds.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// The section of `edge.yaml` that names it.
    pub section: &'static str,
    /// The key there.
    pub key: &'static str,
    /// The only key of the file.
    pub list: &'static str,
    /// The command that writes it.
    pub command: &'static str,
    /// What stands in it instead of secrets.
    pub holds: &'static str,
    table: &'static Object,
}

/// API keys.
pub static API_KEYS: Form = Form {
    section: "auth",
    key: "api_keys_file",
    list: "api_keys",
    command: "iop key",
    holds: "hashes",
    table: &API_KEYS_FILE,
};
/// Tokens of Nodes.
pub static NODE_TOKENS: Form = Form {
    section: "auth",
    key: "node_tokens_file",
    list: "node_tokens",
    command: "iop token",
    holds: "hashes",
    table: &NODE_TOKENS_FILE,
};

/// Keys of providers.
pub static SLOTS: Form = Form {
    section: "credentials",
    key: "slots_file",
    list: "slots",
    command: "iop slot",
    holds: "places of secrets",
    table: &SLOTS_FILE,
};

impl Form {
    /// The file that `edge.yaml` names, wherever it stands.
    #[must_use]
    pub fn path(&self, tree: &Tree, base: &Path) -> Option<(PathBuf, Position)> {
        let (name, at) = tree.get(self.section).and_then(|section| section.text(self.key))?;
        Some((resolve_path(base, name), at))
    }

    fn read(
        &'static self,
        tree: &Tree,
        base: &Path,
        reading: Reading<'_>,
        problems: &mut Problems,
    ) -> Option<RecordFile> {
        let (path, at) = self.path(tree, base)?;
        let text = match reading.draft.filter(|(draft, _)| *draft == path) {
            Some((_, text)) => Ok(text.to_owned()),
            None if reading.missing_is_empty && !path.exists() => Ok(format!("{}: []", self.list)),
            None => super::read(&path),
        };
        let text = match text {
            Ok(text) => text,
            Err(message) => {
                let hint = format!("`{} new` makes it, or take `{}` out", self.command, self.key);
                problems.error(at, format!("{}: {message}", path.display()), Some(hint));
                return None;
            }
        };
        let mut own = Problems::of(path.display().to_string());
        let tree = Tree::parse(&text, &mut own).map(|mut tree| {
            schema::check(&mut tree, self.table, &mut own);
            tree
        });
        problems.absorb(&own, at);
        tree.map(|tree| RecordFile { at, path, tree })
    }
}

/// The records of one of these files.
///
/// # Errors
/// Problems of that file alone.
pub fn parse<T: serde::de::DeserializeOwned>(form: &'static Form, file: &Path, text: &str) -> Result<Vec<T>, Problems> {
    let mut problems = Problems::of(file.display().to_string());
    let Some(mut tree) = Tree::parse(text, &mut problems) else { return Err(problems) };
    schema::check(&mut tree, form.table, &mut problems);
    if problems.has_errors() {
        return Err(problems);
    }
    let records: Result<Vec<T>, _> =
        tree.list(form.list).iter().map(|record| serde_json::from_value(record.to_json())).collect();
    records.map_err(|error| {
        problems.error(tree.at, error.to_string(), None);
        problems
    })
}

impl Files {
    pub(super) fn read(tree: &Tree, base: &Path, reading: Reading<'_>, problems: &mut Problems) -> Self {
        Self {
            api_keys: API_KEYS.read(tree, base, reading, problems),
            node_tokens: NODE_TOKENS.read(tree, base, reading, problems),
            slots: SLOTS.read(tree, base, reading, problems),
        }
    }

    /// The config as if keys and slots of the files stood in it, each at the place that names its file.
    pub(super) fn grafted(&self, tree: &Tree) -> Tree {
        let mut tree = tree.clone();
        for (file, form) in [(&self.api_keys, &API_KEYS), (&self.slots, &SLOTS)] {
            let Some(file) = file else { continue };
            let mut records = file.tree.list(form.list).to_vec();
            records.iter_mut().for_each(|record| record.stand_at(file.at));
            tree.append(form.section, form.list, file.at, records);
        }
        tree
    }

    /// The config with what the files hold.
    pub(super) fn merge(&self, mut config: EdgeConfig) -> Result<EdgeConfig, serde_json::Error> {
        if let Some(file) = &self.api_keys {
            for record in file.tree.list(API_KEYS.list) {
                config.auth.api_keys.push(serde_json::from_value::<ApiKeyRecord>(record.to_json())?);
            }
        }
        if let Some(file) = &self.slots {
            for record in file.tree.list(SLOTS.list) {
                config.credentials.slots.push(serde_json::from_value::<SlotRecord>(record.to_json())?);
            }
        }
        if let Some(file) = &self.node_tokens {
            for record in file.tree.list(NODE_TOKENS.list) {
                let record: NodeTokenRecord = serde_json::from_value(record.to_json())?;
                let Some(node) = config.nodes.iter_mut().find(|node| node.id == record.node) else { continue };
                node.token_id = Some(record.token_id);
                node.token_hash = Some(record.token_hash);
                node.token_expires_at = record.expires_at;
                node.previous_token = record.previous;
            }
        }
        Ok(config)
    }
}
