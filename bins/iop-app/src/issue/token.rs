//! Decides what `iop token` does: tokens of Nodes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use iop_edge_core::token::{Token, TokenKind};
use serde::Serialize;

use super::key::{generate, renamed, state};
use super::{Effect, Target, by_hand, put, record, say_json, told};
use crate::config::edge::records::{self, NODE_TOKENS};
use crate::config::edge::{NodeRecord, NodeTokenRecord, PreviousSecret};
use crate::config::problem::did_you_mean;
use crate::config::time::{Timestamp, parse_end, parse_span};
use crate::exit::Failure;
use crate::files::{self, Readers};
use crate::term::{Cell, Paint, columns, has_colours, note, say};

/// Commands for tokens of Nodes.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make the token of a Node and show it once; only its hash is kept
    New {
        /// Id of the Node, as in edge.yaml
        node: String,
        /// When it ends: 90d, 24h, or 2027-01-31T00:00:00Z [default: never]
        #[arg(long, value_name = "WHEN", value_parser = parse_end)]
        expires: Option<Timestamp>,
        /// Write it to this new file, for this user only, instead of showing it
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// List the tokens of Nodes, and until when they are good
    List {
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Give a Node's token a new secret; the old one works beside it for a while
    Rotate {
        /// Id of the Node, as in edge.yaml
        node: String,
        /// How long the old secret goes on to work: 24h, 7d, 0
        #[arg(long, default_value = "24h", value_name = "SPAN", value_parser = parse_span)]
        overlap: Duration,
        /// Write it to this new file, for this user only, instead of showing it
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Take a Node's token back: its connection is closed, and it can't register
    Revoke {
        /// Id of the Node, as in edge.yaml
        node: String,
        /// The config
        #[command(flatten)]
        target: Target,
    },
}

/// A token that was made, as JSON.
#[derive(Debug, Serialize)]
struct Made<'a> {
    node: &'a str,
    token_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_file: Option<String>,
    record: String,
    effect: &'a Effect,
}

/// A token in a list, as JSON.
#[derive(Debug, Serialize)]
struct Listed<'a> {
    node: &'a str,
    token_id: Option<&'a str>,
    state: &'static str,
    expires_at: Option<String>,
    previous_expires_at: Option<String>,
    file: Option<String>,
}

/// Does it.
///
/// # Errors
/// [`Failure`] with the next step.
pub async fn run(command: TokenCommand) -> Result<(), Failure> {
    match command {
        TokenCommand::New { node, expires, out, target } => make(&node, expires, out.as_deref(), &target).await,
        TokenCommand::List { target } => list(&target),
        TokenCommand::Rotate { node, overlap, out, target } => rotate(&node, overlap, out.as_deref(), &target).await,
        TokenCommand::Revoke { node, target } => revoke(&node, &target).await,
    }
}

fn in_file(file: &Path) -> Result<Vec<NodeTokenRecord>, Failure> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let unreadable = |message: String| Failure::usage(format!("{}: {message}", file.display()));
    let text = crate::config::edge::read(file).map_err(unreadable)?;
    records::parse(&NODE_TOKENS, file, &text).map_err(|problems| super::unusable(&problems))
}

fn lines(records: &[NodeTokenRecord]) -> Vec<String> {
    records.iter().map(record::node_token).collect()
}

fn out_is_free(out: Option<&Path>) -> Result<(), Failure> {
    match out.filter(|out| out.exists()) {
        Some(out) => Err(Failure::usage(format!("{} is there already; nothing was changed", out.display()))
            .hint("--out FILE writes a new file only")),
        None => Ok(()),
    }
}

/// The Node as the config has it.
pub(super) fn node_of(node: &str, target: &Target) -> Result<NodeRecord, Failure> {
    let loaded = target.load()?;
    let known: Vec<_> = loaded.config.nodes.iter().map(|node| node.id.as_str()).collect();
    loaded.config.nodes.iter().find(|known| known.id == node).cloned().ok_or_else(|| {
        let failure = Failure::usage(format!("{} has no node `{}`", target.config.display(), node.escape_debug()));
        failure.hint(did_you_mean(node, &known).unwrap_or_else(|| "add it under `nodes:` first".to_owned()))
    })
}

/// A token that was made.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) made: NodeTokenRecord,
    token: Token,
    pub(super) effect: Effect,
    pub(super) file: Option<PathBuf>,
}

async fn make(node: &str, expires: Option<Timestamp>, out: Option<&Path>, target: &Target) -> Result<(), Failure> {
    let Issued { made, token, effect, file } = issue(node, expires, out, target).await?;
    show(&made, &token, &effect, file.as_deref(), out, target);
    effect.settled()
}

/// Makes the token of a Node that has none, in a new file if one is named. An error means that nothing was written.
pub(super) async fn issue(
    node: &str,
    expires: Option<Timestamp>,
    out: Option<&Path>,
    target: &Target,
) -> Result<Issued, Failure> {
    out_is_free(out)?;
    let file = target.file(&NODE_TOKENS)?;
    let token = generate(TokenKind::Node)?;
    let made = NodeTokenRecord {
        node: node.to_owned(),
        token_id: token.id().as_str().to_owned(),
        token_hash: token.hash().to_string(),
        expires_at: expires,
        previous: None,
    };
    let Some(file) = file else {
        // A new Node's record needs its token first.
        write_out(out, &token)?;
        return Ok(Issued { made, token, effect: Effect::Shown, file: None });
    };
    let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
    if node_of(node, target)?.token_hash.is_some() {
        return Err(Failure::usage(format!("node {node} has a token already")).hint(format!(
            "`iop token rotate {node}` gives it a new secret; `iop token revoke {node}` takes it back"
        )));
    }
    let mut records = in_file(&file)?;
    records.push(made.clone());
    let effect = put_with(target, &file, &records, out, &token).await?;
    Ok(Issued { made, token, effect, file: Some(file) })
}

/// The token in a file of its own, if one is wanted.
fn write_out(out: Option<&Path>, token: &Token) -> Result<(), Failure> {
    let Some(out) = out else { return Ok(()) };
    files::create(out, &format!("{}\n", token.reveal()), Readers::Owner)
        .map_err(|error| Failure::fatal(format!("can't write {}: {error}; nothing was changed", out.display())))
}

/// Writes the token before its record, so that no record is of a token that nobody has.
async fn put_with(
    target: &Target,
    file: &Path,
    records: &[NodeTokenRecord],
    out: Option<&Path>,
    token: &Token,
) -> Result<Effect, Failure> {
    write_out(out, token)?;
    put(target, &NODE_TOKENS, file, &lines(records)).await.inspect_err(|_| {
        if let Some(out) = out {
            let _best_effort = std::fs::remove_file(out);
        }
    })
}

fn show(
    made: &NodeTokenRecord,
    token: &Token,
    effect: &Effect,
    file: Option<&Path>,
    out: Option<&Path>,
    target: &Target,
) {
    let text = token.reveal();
    if target.edge.json {
        say_json(&Made {
            node: &made.node,
            token_id: &made.token_id,
            token: out.is_none().then_some(&text),
            token_file: out.map(|out| out.display().to_string()),
            record: record::node_token(made),
            effect,
        });
        return;
    }
    match out {
        Some(out) => note(format!("token of node {} in {}", made.node, out.display())),
        None => {
            note(format!("token of node {}, shown once; put it into its token file:", made.node));
            say(&text);
        }
    }
    if *effect == Effect::Shown {
        note(format!(
            "{} names no file for tokens. Put this into the record of {} and run `iop reload`,\n\
             or write `auth: {{ node_tokens_file: node-tokens.yaml }}` there, and `iop token` does it from then on:\n    \
             token_id: {}\n    token_hash: {}",
            target.config.display(),
            made.node,
            record::quoted(&made.token_id),
            record::quoted(&made.token_hash)
        ));
        if let Some(at) = made.expires_at {
            note(format!("    token_expires_at: \"{at}\""));
        }
    } else {
        note(told(effect, file));
    }
}

/// The file with the token, all its records, and which of them it is.
fn find(node: &str, target: &Target) -> Result<(PathBuf, Vec<NodeTokenRecord>, usize), Failure> {
    let file = target.file(&NODE_TOKENS)?;
    let records = file.as_deref().map(in_file).transpose()?.unwrap_or_default();
    let index = records.iter().position(|record| record.node == node);
    match (file, index) {
        (Some(file), Some(index)) => Ok((file, records, index)),
        (_, _) => Err(match node_of(node, target)?.token_hash {
            Some(_) => by_hand(&format!("the token of node {node}"), &NODE_TOKENS, &target.config),
            None => Failure::usage(format!("node {node} has no token")).hint(format!("iop token new {node}")),
        }),
    }
}

async fn rotate(node: &str, overlap: Duration, out: Option<&Path>, target: &Target) -> Result<(), Failure> {
    out_is_free(out)?;
    let (file, ..) = find(node, target)?;
    let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
    let (file, mut records, index) = find(node, target)?;
    let token = generate(TokenKind::Node)?;
    let Some(record) = records.get_mut(index) else { return Err(Failure::fatal("the token is gone")) };
    let until = Timestamp::now().plus(overlap);
    record.previous =
        (!overlap.is_zero()).then(|| PreviousSecret { hash: record.token_hash.clone(), expires_at: until });
    record.token_hash = token.hash().to_string();
    let (made, token) = (record.clone(), renamed(TokenKind::Node, &token, &record.token_id)?);
    let effect = put_with(target, &file, &records, out, &token).await?;
    show(&made, &token, &effect, Some(&file), out, target);
    if !target.edge.json {
        note(match &made.previous {
            Some(previous) => {
                format!("the old secret works until {}: restart the Node with the new one before", previous.expires_at)
            }
            None => "the old secret opens no new connection; a connection that is open goes on".to_owned(),
        });
    }
    effect.settled()
}

async fn revoke(node: &str, target: &Target) -> Result<(), Failure> {
    let (file, ..) = find(node, target)?;
    let _turn = files::turn(file.parent().unwrap_or(Path::new("")));
    let (file, mut records, index) = find(node, target)?;
    records.remove(index);
    let effect = put(target, &NODE_TOKENS, &file, &lines(&records)).await?;
    if target.edge.json {
        say_json(&serde_json::json!({ "node": node, "revoked": true, "effect": effect }));
    } else {
        say(format!("the token of node {node} is revoked; `iop token new {node}` makes another"));
        note(told(&effect, Some(&file)));
    }
    effect.settled()
}

fn list(target: &Target) -> Result<(), Failure> {
    let loaded = target.load()?;
    let file = target.file(&NODE_TOKENS)?;
    let written = file.as_deref().map(in_file).transpose()?.unwrap_or_default();
    let (nodes, now) = (&loaded.config.nodes, Timestamp::now());
    let place = |node: &NodeRecord| {
        node.token_hash.as_ref()?;
        Some(match &file {
            Some(file) if written.iter().any(|known| known.node == node.id) => file.display().to_string(),
            Some(_) | None => target.config.display().to_string(),
        })
    };
    let good = |node: &NodeRecord| match &node.token_hash {
        Some(_) => state(now, node.token_expires_at, node.previous_token.as_ref()),
        None => ("none", Paint::Bad),
    };
    if target.edge.json {
        let all: Vec<_> = nodes
            .iter()
            .map(|node| Listed {
                node: &node.id,
                token_id: node.token_id.as_deref(),
                state: good(node).0,
                expires_at: node.token_expires_at.map(|at| at.to_string()),
                previous_expires_at: node.previous_token.as_ref().map(|old| old.expires_at.to_string()),
                file: place(node),
            })
            .collect();
        say_json(&serde_json::json!({ "node_tokens": all }));
        return Ok(());
    }
    if nodes.is_empty() {
        say("no node is configured: add one under `nodes:` in edge.yaml");
        return Ok(());
    }
    let rows: Vec<_> = nodes
        .iter()
        .map(|node| {
            let (state, paint) = good(node);
            let end = node.token_expires_at.map_or_else(|| "never".to_owned(), |at| at.to_string());
            let old = node.previous_token.as_ref().filter(|old| old.expires_at > now);
            vec![
                Cell::plain(&node.id),
                Cell::plain(node.token_id.as_deref().unwrap_or("-")),
                Cell::painted(state, paint),
                Cell::plain(if node.token_hash.is_some() { end } else { "-".to_owned() }),
                Cell::plain(old.map_or_else(String::new, |old| old.expires_at.to_string())),
                Cell::painted(place(node).unwrap_or_default(), Paint::Dim),
            ]
        })
        .collect();
    say(columns(&["NODE", "TOKEN", "STATE", "EXPIRES", "OLD SECRET UNTIL", "FILE"], &rows, has_colours()).trim_end());
    Ok(())
}
