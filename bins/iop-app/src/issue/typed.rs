//! Decides how tests run these commands: as they are typed.

use std::path::Path;

use super::key::KeyCommand;
use super::lease::LeaseCommand;
use super::node::NodeCommand;
use super::slot::SlotCommand;
use super::token::TokenCommand;
use super::{key, lease, node, slot, token};
use crate::exit::Failure;

#[derive(Debug, clap::Parser)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    #[command(subcommand)]
    Key(KeyCommand),
    #[command(subcommand)]
    Token(TokenCommand),
    #[command(subcommand)]
    Node(NodeCommand),
    #[command(subcommand)]
    Slot(SlotCommand),
    #[command(subcommand)]
    Lease(LeaseCommand),
}

/// Runs it for this config, and tells no Edge.
pub(crate) async fn typed(config: &Path, line: &str) -> Result<(), Failure> {
    typed_to(config, &format!("{line} --no-reload")).await
}

/// Runs it for this config.
pub(crate) async fn typed_to(config: &Path, line: &str) -> Result<(), Failure> {
    let mut words: Vec<String> = std::iter::once("iop").chain(line.split(' ')).map(str::to_owned).collect();
    words.extend(["--config".to_owned(), config.display().to_string()]);
    match <Line as clap::Parser>::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).command {
        Command::Key(command) => key::run(command).await,
        Command::Token(command) => token::run(command).await,
        Command::Node(command) => node::run(command).await,
        Command::Slot(command) => slot::run(command).await,
        Command::Lease(command) => lease::run(command).await,
    }
}

/// What it prints as its result.
pub(crate) async fn said(config: &Path, line: &str) -> String {
    crate::term::heard::take();
    typed_to(config, line).await.unwrap();
    crate::term::heard::take()
}
