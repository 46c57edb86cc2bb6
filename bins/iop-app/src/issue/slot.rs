//! Decides what `iop slot` does: keys of providers that the Edge lends to Nodes (CRD-11).
//!
//! A secret is read from standard input and goes to a file of this user's; it is never an argument, and never shown.

use std::io::{IsTerminal as _, Read as _, stdin};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use iop_edge_core::catalog::{CredentialForm, CredentialSource as _, SlotName, SlotSecret};
use serde::Serialize;

use super::{Effect, Target, by_hand, put, record, say_json, told, write};
use crate::config::LoadedEdge;
use crate::config::edge::credentials::sources::read;
use crate::config::edge::credentials::{ProfileRecord, SlotRecord, SlotStatusConfig};
use crate::config::edge::records::{self, SLOTS};
use crate::config::secret::{MAX_SECRET_BYTES, SecretReference, resolve_path};
use crate::exit::Failure;
use crate::files::{self, Readers};
use crate::term::{Cell, Paint, columns, has_colours, note, say};

/// Directory beside the config in which new secrets are kept.
const KEYS: &str = "keys";

/// Commands for credential slots.
#[derive(Debug, Subcommand)]
pub enum SlotCommand {
    /// Store the key of a provider in a new slot: reads it from standard input
    New {
        /// Its name
        name: String,
        /// Don't read it: the Edge finds it there, as `env:NAME`, `file:PATH` or `command:PROGRAM ARGS`
        #[arg(long, value_name = "PLACE")]
        secret: Option<String>,
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// List the slots: their state, where the secret is, and who uses them
    List {
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Let a disabled slot be used again
    Enable {
        /// Its name
        name: String,
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Let nobody use a slot for now: requests that need it are refused
    Disable {
        /// Its name
        name: String,
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Let nobody use a slot ever again; leases that are out are refused by the Nodes
    Revoke {
        /// Its name
        name: String,
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Replace the secret of a slot by the one on standard input, and raise its revision
    Rotate {
        /// Its name
        name: String,
        /// Don't read it: it was changed where it is. `env:` needs a restart of the Edge, too
        #[arg(long)]
        in_place: bool,
        /// The config
        #[command(flatten)]
        target: Target,
    },
}

/// A slot in a list, as JSON.
#[derive(Debug, Serialize)]
struct Listed<'a> {
    name: &'a str,
    status: &'static str,
    revision: u64,
    secret: &'a str,
    providers: Vec<&'a str>,
    routes: Vec<&'a str>,
    file: String,
}

/// Does it.
///
/// # Errors
/// [`Failure`] with the next step.
pub async fn run(command: SlotCommand) -> Result<(), Failure> {
    match command {
        SlotCommand::New { name, secret, target } => make(&name, secret, &target).await,
        SlotCommand::List { target } => list(&target),
        SlotCommand::Enable { name, target } => set(&name, SlotStatusConfig::Enabled, &target).await,
        SlotCommand::Disable { name, target } => set(&name, SlotStatusConfig::Disabled, &target).await,
        SlotCommand::Revoke { name, target } => set(&name, SlotStatusConfig::Revoked, &target).await,
        SlotCommand::Rotate { name, in_place, target } => rotate(&name, in_place, &target).await,
    }
}

const fn word(status: SlotStatusConfig) -> &'static str {
    match status {
        SlotStatusConfig::Enabled => "enabled",
        SlotStatusConfig::Disabled => "disabled",
        SlotStatusConfig::Revoked => "revoked",
    }
}

fn in_file(file: &Path) -> Result<Vec<SlotRecord>, Failure> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let unreadable = |message: String| Failure::usage(format!("{}: {message}", file.display()));
    let text = crate::config::edge::read(file).map_err(unreadable)?;
    records::parse(&SLOTS, file, &text).map_err(|problems| super::unusable(&problems))
}

fn lines(records: &[SlotRecord]) -> Vec<String> {
    records.iter().map(record::slot).collect()
}

/// The secret on standard input: one line, as every key of a provider is. `command` is what was typed, for the next try.
fn read_secret(command: &str) -> Result<String, Failure> {
    if stdin().is_terminal() {
        note("paste the provider's key, then press Enter and Ctrl-D:");
    }
    let mut text = String::new();
    stdin()
        .take(MAX_SECRET_BYTES)
        .read_to_string(&mut text)
        .map_err(|error| Failure::usage(format!("can't read the secret: {error}")))?;
    checked(text, command)
}

/// What is no key is told before it is stored; the text itself never is.
fn checked(text: String, command: &str) -> Result<String, Failure> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let (Some(line), None) = (lines.next(), lines.next()) else {
        return Err(
            Failure::usage("the secret must be one line on standard input").hint(format!("{command} < key.txt"))
        );
    };
    let form = CredentialForm::Header("x".to_owned());
    SlotSecret::new(line.as_bytes().to_vec())
        .credential(&form)
        .map_err(|error| Failure::usage(format!("that is no secret of a provider: {error}")))?;
    Ok(line.to_owned())
}

fn no_file(target: &Target) -> Failure {
    Failure::usage(format!("{} names no file for slots", target.config.display())).hint(
        "write `credentials: { slots_file: slots.yaml }` there, or the slot itself: \
         slots: [ { name: …, secret: \"file:keys/….key\", revision: 1 } ]",
    )
}

async fn make(name: &str, secret: Option<String>, target: &Target) -> Result<(), Failure> {
    if SlotName::new(name).is_err() || name.contains(['/', '\\']) || name.starts_with('.') {
        return Err(Failure::usage(format!("`{}` can't be the name of a slot", name.escape_debug()))
            .hint("1 to 255 visible ASCII characters without space or slash, like acme-main"));
    }
    let file = target.file(&SLOTS)?.ok_or_else(|| no_file(target))?;
    let directory = file.parent().unwrap_or(Path::new("")).to_path_buf();
    let _turn = files::turn(&directory);
    if target.load()?.config.credentials.slots.iter().any(|slot| slot.name == name) {
        return Err(Failure::usage(format!("there is a slot {name} already"))
            .hint(format!("`iop slot rotate {name}` replaces its secret")));
    }
    let (reference, stored) = match secret {
        Some(reference) => {
            SecretReference::parse(&reference).map_err(|error| Failure::usage(format!("--secret: {error}")))?;
            (reference, None)
        }
        None => {
            let path = directory.join(KEYS).join(format!("{name}.key"));
            if path.exists() {
                return Err(Failure::usage(format!("{} is there already; nothing was changed", path.display()))
                    .hint(format!("--secret file:{KEYS}/{name}.key takes what is in it")));
            }
            (
                format!("file:{}", reference_to(&path, target)),
                Some((path, read_secret(&format!("iop slot new {name}"))?)),
            )
        }
    };
    if let Some((path, secret)) = &stored {
        let failed = |error: std::io::Error| Failure::fatal(format!("can't write {}: {error}", path.display()));
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(""))).map_err(failed)?;
        files::create(path, &format!("{secret}\n"), Readers::Owner).map_err(failed)?;
    }
    let mut records = in_file(&file)?;
    let (name_of, revision, status) = (name.to_owned(), 1, SlotStatusConfig::Enabled);
    let made = SlotRecord { name: name_of, secret: reference, revision, status };
    if stored.is_none() {
        loads(&made, &target.config)?;
    }
    records.push(made);
    let effect = match put(target, &SLOTS, &file, &lines(&records)).await {
        Ok(effect) => effect,
        Err(failure) => {
            // A file that nothing names is no secret of anything.
            if let Some((path, _)) = stored {
                let _best_effort = std::fs::remove_file(path);
            }
            return Err(failure);
        }
    };
    if target.edge.json {
        say_json(&serde_json::json!({ "name": name, "revision": 1, "status": "enabled", "effect": effect }));
        return effect.settled();
    }
    say(format!("slot {name} is made"));
    note(told(&effect, Some(&file)));
    let loaded = target.load()?;
    if !loaded.config.credentials.routes.iter().any(|route| route.slots.iter().any(|slot| slot == name)) {
        note(format!(
            "no route names it yet, so nobody may use it: under `credentials: routes:` write\n  \
             - {{ name: default, principals: [\"*\"], slots: [{name}] }}"
        ));
    }
    effect.settled()
}

/// A path as `edge.yaml` can name it: from its own directory where that is possible.
fn reference_to(path: &Path, target: &Target) -> String {
    let base = target.config.parent().unwrap_or(Path::new(""));
    path.strip_prefix(base).unwrap_or(path).display().to_string()
}

/// The file with the slot, all its records, and which of them it is.
fn find(name: &str, target: &Target) -> Result<(PathBuf, Vec<SlotRecord>, usize), Failure> {
    let file = target.file(&SLOTS)?;
    let records = file.as_deref().map(in_file).transpose()?.unwrap_or_default();
    match (file, records.iter().position(|record| record.name == name)) {
        (Some(file), Some(index)) => Ok((file, records, index)),
        (_, _) => {
            let loaded = target.load()?;
            let all = &loaded.config.credentials.slots;
            if all.iter().any(|record| record.name == name) {
                return Err(by_hand(&format!("slot {name}"), &SLOTS, &target.config));
            }
            Err(Failure::usage(format!("there is no slot `{}`", name.escape_debug()))
                .hint("`iop slot list` lists them"))
        }
    }
}

/// Whether the slot that is changed has a secret, where this machine can tell: the Edge has its own environment, and may
/// run programs that are not here.
fn loads(record: &SlotRecord, config: &Path) -> Result<(), Failure> {
    if !matches!(SecretReference::parse(&record.secret), Ok(SecretReference::File(_))) {
        return Ok(());
    }
    let base = config.parent().unwrap_or(Path::new(""));
    read(record, base).map(|_| ()).map_err(|error| {
        Failure::usage(format!("the secret of slot {} can't be used: {error}; nothing was changed", record.name))
    })
}

fn revoked(name: &str) -> Failure {
    Failure::usage(format!("slot {name} is revoked, for ever"))
        .hint("make a new one: `iop slot new NAME`, and name it in routes and providers")
}

async fn set(name: &str, status: SlotStatusConfig, target: &Target) -> Result<(), Failure> {
    let (file, ..) = find(name, target)?;
    let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
    let (file, mut records, index) = find(name, target)?;
    let Some(record) = records.get_mut(index) else { return Err(Failure::fatal("the slot is gone")) };
    if record.status == SlotStatusConfig::Revoked && status != SlotStatusConfig::Revoked {
        return Err(revoked(name));
    }
    record.status = status;
    if status == SlotStatusConfig::Enabled {
        loads(record, &target.config)?;
    }
    let revision = record.revision;
    let effect = put(target, &SLOTS, &file, &lines(&records)).await?;
    if target.edge.json {
        say_json(&serde_json::json!({ "name": name, "revision": revision, "status": word(status), "effect": effect }));
    } else {
        say(format!("slot {name} is {}", word(status)));
        note(told(&effect, Some(&file)));
    }
    effect.settled()
}

async fn rotate(name: &str, in_place: bool, target: &Target) -> Result<(), Failure> {
    let (file, ..) = find(name, target)?;
    let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
    let (file, mut records, index) = find(name, target)?;
    let Some(record) = records.get_mut(index) else { return Err(Failure::fatal("the slot is gone")) };
    if record.status == SlotStatusConfig::Revoked {
        return Err(revoked(name));
    }
    let place = SecretReference::parse(&record.secret).map_err(Failure::usage)?;
    let (mut stored, mut restart) = (None, None);
    match place {
        SecretReference::Env(variable) if in_place => {
            // A process keeps the environment it was started with, so that nobody is told.
            restart = Some(format!("a running Edge keeps the old {variable}: restart it with the new one"));
        }
        SecretReference::File(_) | SecretReference::Command(_) if in_place => loads(record, &target.config)?,
        SecretReference::File(path) => {
            let path = resolve_path(target.config.parent().unwrap_or(Path::new("")), &path);
            stored = Some((path, read_secret(&format!("iop slot rotate {name}"))?));
        }
        SecretReference::Env(_) | SecretReference::Command(_) => {
            return Err(Failure::usage(format!(
                "the secret of slot {name} is at {}, where no command can write",
                record.secret
            ))
            .hint(format!("change it there, then: iop slot rotate {name} --in-place")));
        }
    }
    record.revision = record.revision.saturating_add(1);
    let (revision, status) = (record.revision, record.status);
    let lines = lines(&records);
    let effect = match (stored, restart) {
        (Some((path, secret)), _) => put_secret(name, (&path, &secret), target, (&file, &lines)).await?,
        (None, Some(next)) => {
            write(target, &SLOTS, &file, &lines)?;
            Effect::Written { next }
        }
        (None, None) => put(target, &SLOTS, &file, &lines).await?,
    };
    if target.edge.json {
        say_json(&serde_json::json!({ "name": name, "revision": revision, "status": word(status), "effect": effect }));
        return effect.settled();
    }
    say(format!("slot {name} has revision {revision} and is {}", word(status)));
    note(told(&effect, Some(&file)));
    if status == SlotStatusConfig::Disabled {
        note(format!("`iop slot enable {name}` lets it be used"));
    }
    Ok(())
}

/// Writes a new secret and then its slot's new revision. An error means that neither was changed.
pub(super) async fn put_secret(
    name: &str,
    (path, secret): (&Path, &str),
    target: &Target,
    (file, lines): (&Path, &[String]),
) -> Result<Effect, Failure> {
    // All that can be known before is known before: the provider may not show the old key a second time.
    let loaded = target.load_with(Some((file, &record::file_text(&SLOTS, lines))))?;
    fits(name, secret, &loaded)?;
    let failed =
        |error: std::io::Error| Failure::fatal(format!("can't write {}: {error}; nothing was changed", path.display()));
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new(""))).map_err(failed)?;
    let kept = files::replace_keeping(path, &format!("{secret}\n"), Readers::Owner).map_err(failed)?;
    let effect = put(target, &SLOTS, file, lines).await?;
    kept.stays();
    Ok(effect)
}

/// Whether the profiles that a slot is used with can carry a secret.
fn fits(name: &str, secret: &str, loaded: &LoadedEdge) -> Result<(), Failure> {
    let providers = loaded.config.nodes.iter().flat_map(|node| &node.providers);
    let uses = providers.filter_map(|provider| provider.credential.as_ref()).filter(|used| used.slot == name);
    for used in uses {
        let profile = loaded.config.credentials.profiles.iter().find(|profile| profile.name == used.profile);
        let Some(form) = profile.and_then(ProfileRecord::form) else { continue };
        SlotSecret::new(secret.as_bytes().to_vec()).credential(&form).map_err(|error| {
            Failure::usage(format!(
                "it can't stand in what profile {} sends: {error}; nothing was changed",
                used.profile
            ))
        })?;
    }
    Ok(())
}

/// Providers and routes that name a slot.
fn users<'a>(loaded: &'a LoadedEdge, name: &str) -> (Vec<&'a str>, Vec<&'a str>) {
    let config = &loaded.config;
    let providers = config.nodes.iter().flat_map(|node| &node.providers);
    let uses = providers.filter(|provider| provider.credential.as_ref().is_some_and(|used| used.slot == name));
    let routes = config.credentials.routes.iter().filter(|route| route.slots.iter().any(|slot| slot == name));
    (uses.map(|provider| provider.id.as_str()).collect(), routes.map(|route| route.name.as_str()).collect())
}

fn list(target: &Target) -> Result<(), Failure> {
    let loaded = target.load()?;
    let file = target.file(&SLOTS)?;
    let written = file.as_deref().map(in_file).transpose()?.unwrap_or_default();
    let place = |record: &SlotRecord| match &file {
        Some(file) if written.iter().any(|known| known.name == record.name) => file.display().to_string(),
        Some(_) | None => target.config.display().to_string(),
    };
    let slots = &loaded.config.credentials.slots;
    if target.edge.json {
        let all: Vec<_> = slots
            .iter()
            .map(|record| {
                let (providers, routes) = users(&loaded, &record.name);
                let (name, status, file) = (record.name.as_str(), word(record.status), place(record));
                Listed { name, status, revision: record.revision, secret: &record.secret, providers, routes, file }
            })
            .collect();
        say_json(&serde_json::json!({ "slots": all }));
        return Ok(());
    }
    if slots.is_empty() {
        say("no slot is configured: `iop slot new NAME` stores the key of a provider");
        return Ok(());
    }
    let rows: Vec<_> = slots
        .iter()
        .map(|record| {
            let (providers, routes) = users(&loaded, &record.name);
            let paint = match record.status {
                SlotStatusConfig::Enabled => Paint::Good,
                SlotStatusConfig::Disabled => Paint::Warn,
                SlotStatusConfig::Revoked => Paint::Bad,
            };
            let names = |names: Vec<&str>| if names.is_empty() { "nobody".to_owned() } else { names.join(", ") };
            vec![
                Cell::plain(&record.name),
                Cell::painted(word(record.status), paint),
                Cell::plain(record.revision.to_string()),
                Cell::plain(&record.secret),
                Cell::plain(names(providers)),
                Cell::plain(names(routes)),
                Cell::painted(place(record), Paint::Dim),
            ]
        })
        .collect();
    let head = ["SLOT", "STATUS", "REVISION", "SECRET", "PROVIDERS", "ROUTES", "FILE"];
    say(columns(&head, &rows, has_colours()).trim_end());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_line_that_can_stand_in_a_header_is_a_secret() {
        // CRD-11
        for (text, good) in
            [("sk-1\n", true), ("\n  sk-1  \n\n", true), ("", false), ("a\nb\n", false), ("a\u{7}b", false)]
        {
            let result = checked(text.to_owned(), "iop slot new acme");
            assert_eq!(result.is_ok(), good, "{text:?}");
            if let Err(failure) = result {
                assert!(!failure.to_string().contains("a\u{7}b"), "a secret is not repeated");
                let next = failure.hint.as_deref();
                assert_eq!(next, (text != "a\u{7}b").then_some("iop slot new acme < key.txt"), "{text:?}");
            }
        }
    }
}
