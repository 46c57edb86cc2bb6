//! Decides what `iop key` does: API keys of clients.

use std::path::Path;
use std::time::Duration;

use clap::{Args, Subcommand};
use iop_edge_core::token::{Token, TokenKind};
use serde::Serialize;

use super::{Effect, Target, by_hand, put, record, say_json, told};
use crate::admin::usage::{KeyUseView, KeysView, WindowView};
use crate::config::edge::records::{self, API_KEYS};
use crate::config::edge::{ApiKeyRecord, KeyLimitsConfig, PreviousSecret};
use crate::config::time::{Timestamp, parse_end, parse_span};
use crate::exit::Failure;
use crate::files;
use crate::term::{Cell, Paint, columns, has_colours, note, say};

/// Commands for API keys.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key and show it once; only its hash is kept
    New(Box<NewKey>),
    /// List the keys: who uses them, for what, until when, and how much of their limits now
    List {
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Give a key a new secret; the old one works beside it for a while
    Rotate {
        /// Its id: the 8 characters after `iopk_`
        id: String,
        /// How long the old secret goes on to work: 24h, 7d, 0
        #[arg(long, default_value = "24h", value_name = "SPAN", value_parser = parse_span)]
        overlap: Duration,
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Take a key back: it is refused from now on
    Revoke {
        /// Its id: the 8 characters after `iopk_`
        id: String,
        /// The config
        #[command(flatten)]
        target: Target,
    },
}

/// Flags of `iop key new`.
#[derive(Debug, Args)]
pub struct NewKey {
    /// Who uses it, as logs and fair queueing name them [default: the key's id]
    #[arg(long, value_name = "NAME")]
    principal: Option<String>,
    /// Model it may use; repeatable [default: all]
    #[arg(long = "model", value_name = "NAME")]
    models: Vec<String>,
    /// Who waits for a place with a higher one goes first
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(i8).range(-100..=100))]
    priority: i8,
    /// The highest priority a request may ask for by `x-iop-priority` [default: --priority]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i8).range(-100..=100))]
    max_priority: Option<i8>,
    /// Requests in any 60 seconds [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rpm: Option<u32>,
    /// Input and output tokens in any 60 seconds [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 50))]
    tpm: Option<u64>,
    /// Requests at once [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    concurrent: Option<u32>,
    /// When it ends: 90d, 24h, or 2027-01-31T00:00:00Z [default: never]
    #[arg(long, value_name = "WHEN", value_parser = parse_end)]
    expires: Option<Timestamp>,
    /// The config
    #[command(flatten)]
    target: Target,
}

/// A key that was made, as JSON.
#[derive(Debug, Serialize)]
struct Made<'a> {
    id: &'a str,
    key: &'a str,
    record: String,
    file: Option<String>,
    effect: &'a Effect,
}

/// A key in a list, as JSON.
#[derive(Debug, Serialize)]
struct Listed<'a> {
    id: &'a str,
    principal: &'a str,
    models: &'a [String],
    priority: i8,
    max_priority: i8,
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u64>,
    concurrent: Option<u32>,
    expires_at: Option<String>,
    previous_expires_at: Option<String>,
    state: &'static str,
    file: String,
    /// `null` where the running Edge does not know the key, or none was asked.
    usage: Option<&'a KeyUseView>,
}

/// Does it.
///
/// # Errors
/// [`Failure`] with the next step.
pub async fn run(command: KeyCommand) -> Result<(), Failure> {
    match command {
        KeyCommand::New(new) => make(*new).await,
        KeyCommand::List { target } => list(&target).await,
        KeyCommand::Rotate { id, overlap, target } => rotate(&id, overlap, &target).await,
        KeyCommand::Revoke { id, target } => revoke(&id, &target).await,
    }
}

/// The records of the file; none while there is no file.
pub(super) fn in_file(file: &Path) -> Result<Vec<ApiKeyRecord>, Failure> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let unreadable = |message: String| Failure::usage(format!("{}: {message}", file.display()));
    let text = crate::config::edge::read(file).map_err(unreadable)?;
    records::parse(&API_KEYS, file, &text).map_err(|problems| super::unusable(&problems))
}

fn lines(records: &[ApiKeyRecord]) -> Vec<String> {
    records.iter().map(record::api_key).collect()
}

pub(super) fn generate(kind: TokenKind) -> Result<Token, Failure> {
    Token::generate(kind).map_err(|error| Failure::fatal(format!("the operating system gives no randomness: {error}")))
}

async fn make(new: NewKey) -> Result<(), Failure> {
    let NewKey { principal, models, priority, max_priority, rpm, tpm, concurrent, expires, target } = new;
    let file = target.file(&API_KEYS)?;
    let token = generate(TokenKind::ApiKey)?;
    let made = ApiKeyRecord {
        id: token.id().as_str().to_owned(),
        hash: token.hash().to_string(),
        principal,
        models: if models.is_empty() { vec!["*".to_owned()] } else { models },
        priority,
        max_priority,
        limits: KeyLimitsConfig {
            requests_per_minute: rpm.unwrap_or(0),
            tokens_per_minute: tpm.unwrap_or(0),
            concurrent: concurrent.unwrap_or(0),
        },
        expires_at: expires,
        previous: None,
    };
    let effect = match &file {
        Some(file) => {
            let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
            let mut records = in_file(file)?;
            records.push(made.clone());
            put(&target, &API_KEYS, file, &lines(&records)).await?
        }
        None => Effect::Shown,
    };
    show(&made, &token, &effect, file.as_deref(), &target);
    effect.settled()
}

/// The key on standard output, alone, so that a script can take it; everything else beside it.
fn show(made: &ApiKeyRecord, token: &Token, effect: &Effect, file: Option<&Path>, target: &Target) {
    let (key, line) = (token.reveal(), record::api_key(made));
    if target.edge.json {
        let file = file.map(|file| file.display().to_string());
        return say_json(&Made { id: &made.id, key: &key, record: line, file, effect });
    }
    note(format!("API key of {}, shown once:", made.principal.as_deref().unwrap_or(&made.id)));
    say(&key);
    if *effect == Effect::Shown {
        note(format!(
            "{} names no file for keys. Put this line into it under `auth: api_keys:` and run `iop reload`,\n\
             or write `auth: {{ api_keys_file: api-keys.yaml }}` there, and `iop key` does it from then on:\n  - {line}",
            target.config.display()
        ));
    } else {
        note(told(effect, file));
    }
}

/// The file with the key, all its records, and which of them it is.
fn find(id: &str, target: &Target) -> Result<(std::path::PathBuf, Vec<ApiKeyRecord>, usize), Failure> {
    let id = id.strip_prefix("iopk_").unwrap_or(id).get(..8).unwrap_or(id);
    let file = target.file(&API_KEYS)?;
    let records = file.as_deref().map(in_file).transpose()?.unwrap_or_default();
    match (file, records.iter().position(|record| record.id == id)) {
        (Some(file), Some(index)) => Ok((file, records, index)),
        (_, _) => {
            let loaded = target.load()?;
            if loaded.config.auth.api_keys.iter().any(|record| record.id == id) {
                return Err(by_hand(&format!("API key {id}"), &API_KEYS, &target.config));
            }
            // Whatever was typed may be a whole key.
            Err(Failure::usage("there is no API key of that id").hint("`iop key list` lists them"))
        }
    }
}

async fn rotate(id: &str, overlap: Duration, target: &Target) -> Result<(), Failure> {
    let (file, ..) = find(id, target)?;
    let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
    let (file, mut records, index) = find(id, target)?;
    let token = generate(TokenKind::ApiKey)?;
    let Some(record) = records.get_mut(index) else { return Err(Failure::fatal("the key is gone")) };
    let until = Timestamp::now().plus(overlap);
    record.previous = (!overlap.is_zero()).then(|| PreviousSecret { hash: record.hash.clone(), expires_at: until });
    record.hash = token.hash().to_string();
    let (made, token) = (record.clone(), renamed(TokenKind::ApiKey, &token, &record.id)?);
    let effect = put(target, &API_KEYS, &file, &lines(&records)).await?;
    show(&made, &token, &effect, Some(&file), target);
    if !target.edge.json {
        note(match &made.previous {
            Some(previous) => format!("the old secret works until {}", previous.expires_at),
            None => "the old secret is refused from now on".to_owned(),
        });
    }
    effect.settled()
}

/// The secret of a fresh token under an id that stays.
pub(super) fn renamed(kind: TokenKind, token: &Token, id: &str) -> Result<Token, Failure> {
    let text = token.reveal().replacen(token.id().as_str(), id, 1);
    Token::parse(kind, &text).ok_or_else(|| Failure::usage(format!("`{}` is no id of a token", id.escape_debug())))
}

async fn revoke(id: &str, target: &Target) -> Result<(), Failure> {
    let (file, ..) = find(id, target)?;
    let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
    let (file, mut records, index) = find(id, target)?;
    let gone = records.remove(index);
    let effect = put(target, &API_KEYS, &file, &lines(&records)).await?;
    if target.edge.json {
        say_json(&serde_json::json!({ "id": gone.id, "revoked": true, "effect": effect }));
    } else {
        say(format!("API key {} of {} is revoked", gone.id, gone.principal.as_deref().unwrap_or(&gone.id)));
        note(told(&effect, Some(&file)));
    }
    effect.settled()
}

/// Whether a secret is good now.
pub(super) fn state(
    now: Timestamp,
    expires_at: Option<Timestamp>,
    previous: Option<&PreviousSecret>,
) -> (&'static str, Paint) {
    if expires_at.is_some_and(|at| at <= now) {
        ("expired", Paint::Bad)
    } else if previous.is_some_and(|previous| previous.expires_at > now) {
        ("rotating", Paint::Warn)
    } else {
        ("active", Paint::Good)
    }
}

async fn list(target: &Target) -> Result<(), Failure> {
    let loaded = target.load()?;
    let file = target.file(&API_KEYS)?;
    let written = file.as_deref().map(in_file).transpose()?.unwrap_or_default();
    let place = |record: &ApiKeyRecord| match &file {
        Some(file) if written.iter().any(|known| known.id == record.id) => file.display().to_string(),
        Some(_) | None => target.config.display().to_string(),
    };
    let (keys, now) = (&loaded.config.auth.api_keys, Timestamp::now());
    let live = target.live::<KeysView>(&loaded, "keys").await;
    if target.edge.json {
        let all: Vec<_> = keys.iter().map(|record| listed(record, now, place(record), used(&live, record))).collect();
        say_json(&serde_json::json!({ "api_keys": all, "live": live.is_ok(), "live_error": live.as_ref().err() }));
        return Ok(());
    }
    if keys.is_empty() {
        say(if loaded.config.auth.is_open() {
            "no key is configured: every program on this machine may use the Edge. `iop key new` makes one"
        } else {
            "no key is configured: nobody may use the Edge. `iop key new` makes one"
        });
        return Ok(());
    }
    say(table(keys, now, place, &live).trim_end());
    if let Err(why) = live {
        note(why);
    }
    Ok(())
}

/// What the running Edge says of this key.
fn used<'a>(live: &'a Result<KeysView, String>, record: &ApiKeyRecord) -> Option<&'a KeyUseView> {
    live.as_ref().ok()?.keys.iter().find(|key| key.id == record.id)
}

fn listed<'a>(record: &'a ApiKeyRecord, now: Timestamp, file: String, usage: Option<&'a KeyUseView>) -> Listed<'a> {
    let KeyLimitsConfig { requests_per_minute, tokens_per_minute, concurrent } = record.limits;
    Listed {
        id: &record.id,
        principal: record.principal.as_deref().unwrap_or(&record.id),
        models: &record.models,
        priority: record.priority,
        max_priority: record.max_priority.unwrap_or(record.priority),
        requests_per_minute: Some(requests_per_minute).filter(|limit| *limit > 0),
        tokens_per_minute: Some(tokens_per_minute).filter(|limit| *limit > 0),
        concurrent: Some(concurrent).filter(|limit| *limit > 0),
        expires_at: record.expires_at.map(|at| at.to_string()),
        previous_expires_at: record.previous.as_ref().map(|previous| previous.expires_at.to_string()),
        state: state(now, record.expires_at, record.previous.as_ref()).0,
        file,
        usage,
    }
}

/// What is used, each with its limit, in the order of the limits.
fn usage(key: &KeyUseView) -> String {
    let of = |limit: Option<u64>| limit.map(|limit| format!(" of {limit}")).unwrap_or_default();
    let counted = |window: &WindowView, what: &str| {
        let held = if window.held > 0 { format!(" + {} held", window.held) } else { String::new() };
        let one = window.used == 1 && window.limit.is_none();
        format!("{}{held}{} {what}{}", window.used, of(window.limit), if one { "" } else { "s" })
    };
    let mut parts = vec![counted(&key.requests, "request")];
    parts.extend(key.tokens.as_ref().map(|tokens| counted(tokens, "token")));
    parts.push(format!("{}{} now", key.running, of(key.concurrent.map(Into::into))));
    parts.join(", ")
}

fn limits(limits: KeyLimitsConfig) -> String {
    let KeyLimitsConfig { requests_per_minute, tokens_per_minute, concurrent } = limits;
    let parts = [
        (u64::from(requests_per_minute), " requests/min"),
        (tokens_per_minute, " tokens/min"),
        (u64::from(concurrent), " at once"),
    ];
    let parts: Vec<_> = parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n}{what}")).collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

fn table(
    keys: &[ApiKeyRecord],
    now: Timestamp,
    place: impl Fn(&ApiKeyRecord) -> String,
    live: &Result<KeysView, String>,
) -> String {
    let rows: Vec<_> = keys
        .iter()
        .map(|record| {
            let (state, paint) = state(now, record.expires_at, record.previous.as_ref());
            let models = if record.models.iter().any(|model| model == "*") {
                "all".to_owned()
            } else {
                record.models.join(", ")
            };
            let max = record.max_priority.filter(|max| *max != record.priority);
            let priority = match (record.priority, max) {
                (0, None) => String::new(),
                (priority, None) => priority.to_string(),
                (priority, Some(max)) => format!("{priority}, up to {max}"),
            };
            vec![
                Cell::plain(&record.id),
                Cell::plain(record.principal.as_deref().unwrap_or(&record.id)),
                Cell::painted(state, paint),
                Cell::plain(models),
                Cell::plain(limits(record.limits)),
                match (live, used(live, record)) {
                    (Err(_), _) => Cell::plain(""),
                    (Ok(_), Some(key)) => Cell::plain(usage(key)),
                    (Ok(_), None) => Cell::painted("not loaded: `iop reload`", Paint::Warn),
                },
                Cell::plain(priority),
                Cell::plain(record.expires_at.map_or_else(|| "never".to_owned(), |at| at.to_string())),
                Cell::plain(
                    record
                        .previous
                        .as_ref()
                        .filter(|old| old.expires_at > now)
                        .map_or_else(String::new, |old| old.expires_at.to_string()),
                ),
                Cell::painted(place(record), Paint::Dim),
            ]
        })
        .collect();
    let head = [
        "KEY",
        "PRINCIPAL",
        "STATE",
        "MODELS",
        "LIMITS",
        "LAST MINUTE",
        "PRIORITY",
        "EXPIRES",
        "OLD SECRET UNTIL",
        "FILE",
    ];
    columns(&head, &rows, has_colours())
}
