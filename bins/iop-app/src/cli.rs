//! Decides which commands the binaries have. Each `main` calls one function of this module.

use std::io::{IsTerminal as _, Read as _, stdin};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::Redacted;

use crate::config::edge::edge_schema;
use crate::config::tree::Tree;
use crate::config::{EdgeConfig, NodeOptions, Problems};
use crate::doctor::DoctorOptions;
use crate::exit::{Exit, Failure};
use crate::init::{InitOptions, init};
use crate::issue::key::KeyCommand;
use crate::issue::lease::LeaseCommand;
use crate::issue::slot::SlotCommand;
use crate::issue::token::TokenCommand;
use crate::operate::{Operate, operate};
use crate::telemetry::LogOptions;
use crate::term::{note, say};
use crate::up::UpOptions;
use crate::{doctor, issue, serve_edge, serve_node, up};

#[cfg(test)]
mod tests;

/// Variable that holds a Node's token. A flag for it would be visible to other users of the machine.
const TOKEN_VARIABLE: &str = "IOP_NODE_TOKEN";

/// One OpenAI base URL for every model server you run
#[derive(Debug, Parser)]
#[command(name = "iop", version, disable_help_subcommand = true)]
struct Iop {
    #[command(subcommand)]
    command: IopCommand,
    #[command(flatten)]
    log: LogOptions,
}

#[derive(Debug, Subcommand)]
enum IopCommand {
    /// Serve what runs on this machine: finds Ollama, vLLM, llama.cpp, LM Studio and SGLang, or uses a demo model
    Up(Box<UpOptions>),
    /// Write what an Edge and a Node on two machines need: certificates, token, key, configs
    Init(InitOptions),
    #[command(flatten)]
    Operate(Operate),
    /// Make, list, rotate and revoke API keys of clients
    #[command(subcommand)]
    Key(KeyCommand),
    /// Make, list, rotate and revoke tokens of Nodes
    #[command(subcommand)]
    Token(TokenCommand),
    /// Make what a further Node of a managed fleet needs, and new certificates, with the CA of `iop init --managed`
    #[command(subcommand)]
    Node(issue::node::NodeCommand),
    /// Check config files without starting anything; exit code 2 if one can't be used
    Check {
        /// edge.yaml or node.yaml
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Store, list, rotate, disable and revoke keys of providers that the Edge lends to Nodes
    #[command(subcommand)]
    Slot(SlotCommand),
    /// Make keys that sign credential leases, and show what may be lent
    #[command(subcommand)]
    Lease(LeaseCommand),
    /// Look for what stands in the way: name, connection, TLS, token, clock, backends; exit code 1 if something does
    Doctor(Box<DoctorOptions>),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
        /// Of this program
        #[arg(long, value_enum, default_value_t = Program::Iop)]
        of: Program,
    },
    /// Write man pages of all programs and commands
    Man {
        /// Directory to write to
        #[arg(long, default_value = "man", value_name = "DIR")]
        out: PathBuf,
    },
}

/// The programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Program {
    /// The front door
    Iop,
    /// The Edge
    IopEdge,
    /// The Node
    IopNode,
}

impl Program {
    fn command(self) -> clap::Command {
        match self {
            Self::Iop => Iop::command(),
            Self::IopEdge => IopEdge::command(),
            Self::IopNode => IopNode::command(),
        }
    }
}

/// The Edge: takes OpenAI requests and gives them to Nodes
#[derive(Debug, Parser)]
#[command(name = "iop-edge", version, disable_help_subcommand = true)]
struct IopEdge {
    #[command(subcommand)]
    command: EdgeCommand,
    #[command(flatten)]
    log: LogOptions,
}

#[derive(Debug, Args)]
struct EdgeFile {
    /// Config file; `iop init` writes one
    #[arg(long, short, env = "IOP_EDGE_CONFIG", default_value = "edge.yaml", value_name = "FILE")]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum EdgeCommand {
    /// Serve until SIGTERM or Ctrl-C; a second one ends at once
    Serve(EdgeFile),
    /// Check the config without starting anything; exit code 2 if it can't be used
    Check(EdgeFile),
    /// Print the JSON Schema of edge.yaml
    Schema,
    /// Read a token or key from standard input and print what edge.yaml holds of it
    Hash {
        /// Make a new one of that kind instead, and print it, too
        #[arg(long, value_name = "KIND")]
        new: Option<NewToken>,
    },
}

/// What `hash --new` makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum NewToken {
    /// A Node's token
    Node,
    /// A client's API key
    ApiKey,
    /// The key of the admin API
    Admin,
}

/// The Node: runs beside the models and dials out to its Edge
#[derive(Debug, Parser)]
#[command(name = "iop-node", version, disable_help_subcommand = true)]
struct IopNode {
    #[command(subcommand)]
    command: NodeCommand,
    #[command(flatten)]
    log: LogOptions,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Serve until SIGTERM or Ctrl-C; a second one ends at once
    Serve(Box<NodeOptions>),
    /// Check the settings without connecting; exit code 2 if they can't be used
    Check(Box<NodeOptions>),
}

/// `iop`.
#[must_use]
pub fn iop() -> ExitCode {
    let Iop { command, log } = Iop::parse();
    finish(match command {
        IopCommand::Up(options) => start_log(&log, "warn,iop::access=info").and_then(|()| block_on(up::up(*options))),
        IopCommand::Init(options) => run_init(&options),
        IopCommand::Check { files } => check_files(&files),
        IopCommand::Key(command) => start_log(&log, "warn").and_then(|()| block_on(issue::key::run(command))),
        IopCommand::Token(command) => start_log(&log, "warn").and_then(|()| block_on(issue::token::run(command))),
        IopCommand::Node(command) => start_log(&log, "warn").and_then(|()| block_on(issue::node::run(command))),
        IopCommand::Slot(command) => start_log(&log, "warn").and_then(|()| block_on(issue::slot::run(command))),
        IopCommand::Lease(command) => start_log(&log, "warn").and_then(|()| block_on(issue::lease::run(command))),
        IopCommand::Doctor(options) => start_log(&log, "error").and_then(|()| block_on(doctor::doctor(*options))),
        IopCommand::Completions { shell, of } => {
            completions(shell, of);
            Ok(())
        }
        IopCommand::Man { out } => man(&out),
        IopCommand::Operate(command) => start_log(&log, "warn").and_then(|()| block_on(operate(command))),
    })
}

/// `iop-edge`.
#[must_use]
pub fn iop_edge() -> ExitCode {
    let IopEdge { command, log } = IopEdge::parse();
    finish(match command {
        EdgeCommand::Serve(EdgeFile { config }) => match EdgeConfig::load(&config) {
            (Some(loaded), problems) => {
                let wanted = &loaded.config.observability;
                let log = log.or(wanted.log, wanted.filter.clone());
                report(&problems);
                start_log(&log, crate::telemetry::DEFAULT_FILTER).and_then(|()| block_on(serve_edge::serve(loaded)))
            }
            (None, problems) => Err(refused(&problems)),
        },
        EdgeCommand::Check(EdgeFile { config }) => checked(&EdgeConfig::load(&config).1),
        EdgeCommand::Schema => {
            say(format!("{:#}", edge_schema()));
            Ok(())
        }
        EdgeCommand::Hash { new: None } => hash(),
        EdgeCommand::Hash { new: Some(kind) } => new_token(kind),
    })
}

/// `iop-node`.
#[must_use]
pub fn iop_node() -> ExitCode {
    let IopNode { command, log } = IopNode::parse();
    finish(match command {
        NodeCommand::Serve(options) => match with_token(*options).load() {
            (Some(settings), problems) => {
                report(&problems);
                start_log(&log, crate::telemetry::DEFAULT_FILTER).and_then(|()| block_on(serve_node::serve(settings)))
            }
            (None, problems) => Err(refused(&problems)),
        },
        NodeCommand::Check(options) => checked(&with_token(*options).load().1),
    })
}

pub(crate) fn with_token(options: NodeOptions) -> NodeOptions {
    let token = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty()).map(Redacted::new);
    NodeOptions { token, ..options }
}

fn start_log(log: &LogOptions, default: &str) -> Result<(), Failure> {
    log.clone().or(None, Some(default.to_owned())).start().map_err(Failure::usage)
}

fn block_on<F>(work: F) -> Result<(), Failure>
where
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::fatal(format!("can't start: {error}")))?;
    // On a worker, beside the tasks it talks to: from this thread every message of theirs would wake another one.
    let work = runtime.spawn(work);
    let result = runtime.block_on(work).unwrap_or_else(|_| Err(Failure::fatal("a defect ended the program")));
    // Blocking calls that hang (a name resolver) must not hold the exit.
    runtime.shutdown_background();
    result
}

fn finish(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => Exit::Shutdown.into(),
        Err(failure) => {
            note(&failure);
            failure.exit.into()
        }
    }
}

/// Warnings of a config that is used all the same.
fn report(problems: &Problems) {
    let text = problems.to_string();
    if !text.is_empty() {
        note(text.trim_end());
    }
}

fn refused(problems: &Problems) -> Failure {
    report(problems);
    Failure::usage(format!("{}: {}", problems.file(), problems.summary()))
}

fn checked(problems: &Problems) -> Result<(), Failure> {
    if problems.has_errors() {
        return Err(refused(problems));
    }
    report(problems);
    say(format!("{}: {}", problems.file(), problems.summary()));
    Ok(())
}

fn check_files(files: &[PathBuf]) -> Result<(), Failure> {
    let mut last = Ok(());
    for file in files {
        let problems = if is_node_file(file) {
            with_token(NodeOptions { config: Some(file.clone()), ..NodeOptions::default() }).load().1
        } else {
            EdgeConfig::load(file).1
        };
        if let Err(failure) = checked(&problems)
            && let Err(earlier) = std::mem::replace(&mut last, Err(failure))
        {
            note(earlier);
        }
    }
    last
}

/// A Node's file says where its Edge is; an Edge's file can't.
pub(crate) fn is_node_file(path: &std::path::Path) -> bool {
    let Ok(text) = std::fs::read_to_string(path) else { return false };
    Tree::parse(&text, &mut Problems::default()).is_some_and(|tree| {
        ["edge", "token_file", "token", "dial_address", "reconnect"].iter().any(|key| tree.get(key).is_some())
    })
}

fn completions(shell: clap_complete::Shell, of: Program) {
    let mut command = of.command();
    let (name, mut script) = (command.get_name().to_owned(), Vec::new());
    clap_complete::generate(shell, &mut command, name, &mut script);
    say(String::from_utf8_lossy(&script).trim_end());
}

/// A page for each program and each of its commands.
fn man(out: &std::path::Path) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::fatal(format!("can't write man pages to {}: {error}", out.display()));
    std::fs::create_dir_all(out).map_err(failed)?;
    let pages = man_pages().map_err(failed)?;
    for (name, text) in &pages {
        std::fs::write(out.join(name), text).map_err(failed)?;
    }
    say(format!("{} pages in {1}; read one with: man {1}/iop.1", pages.len(), out.display()));
    Ok(())
}

/// What the page of `iop node` is called: `iop-node` is a program.
const NODE_PAGE: &str = "iop-cmd-node";

/// The pages by their file names.
fn man_pages() -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let mut pages = Vec::new();
    for program in [Program::Iop, Program::IopEdge, Program::IopNode] {
        let mut command = program.command();
        if program == Program::Iop {
            command = command.mut_subcommand("node", |node| node.display_name(NODE_PAGE));
        }
        command.build();
        pages_below(command, &mut pages)?;
    }
    Ok(pages)
}

fn pages_below(command: clap::Command, pages: &mut Vec<(String, Vec<u8>)>) -> std::io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages_below(below.clone(), pages)?;
    }
    let page = clap_mangen::Man::new(command);
    let (name, mut text) = (page.get_filename(), Vec::new());
    page.render(&mut text)?;
    if name == "iop.1" {
        // Its list of commands, which names pages by their commands.
        let list = String::from_utf8_lossy(&text);
        text = list.replace("iop\\-node(1)", &format!("{}(1)", NODE_PAGE.replace('-', "\\-"))).into_bytes();
    }
    pages.push((name, text));
    Ok(())
}

fn run_init(options: &InitOptions) -> Result<(), Failure> {
    let done = init(options, SystemTime::now())?;
    say(done.text);
    Ok(())
}

fn hash() -> Result<(), Failure> {
    if stdin().is_terminal() {
        note("paste the token, then press Enter and Ctrl-D:");
    }
    let mut text = String::new();
    stdin()
        .take(4096)
        .read_to_string(&mut text)
        .map_err(|error| Failure::usage(format!("can't read the token: {error}")))?;
    say(hash_lines(&text)?);
    Ok(())
}

fn hash_lines(text: &str) -> Result<String, Failure> {
    let text = text.trim();
    if let Some(token) = Token::parse(TokenKind::Node, text) {
        return Ok(format!("token_id: \"{}\"\ntoken_hash: \"{}\"", token.id().as_str(), token.hash()));
    }
    if let Some(key) = Token::parse(TokenKind::ApiKey, text) {
        return Ok(format!("id: \"{}\"\nhash: \"{}\"", key.id().as_str(), key.hash()));
    }
    if let Some(key) = Token::parse(TokenKind::Admin, text) {
        return Ok(format!("admin: {{ key_hash: \"{}\" }}", key.hash()));
    }
    let message =
        "that is no token: iopn_<8 characters>_<43 characters> for a Node, iopk_… for a client, iopa_… for operators";
    Err(Failure::usage(message).hint("`iop-edge hash --new node` makes one; so do `--new api-key` and `--new admin`"))
}

fn new_token(kind: NewToken) -> Result<(), Failure> {
    let (kind, what) = match kind {
        NewToken::Node => (TokenKind::Node, "the node's token file"),
        NewToken::ApiKey => (TokenKind::ApiKey, "the client"),
        NewToken::Admin => (TokenKind::Admin, "admin.key, for `iop`"),
    };
    let random = |error: getrandom::Error| Failure::fatal(format!("the operating system gives no randomness: {error}"));
    let token = Token::generate(kind).map_err(random)?.reveal();
    note(format!("for {what}, shown once:"));
    say(&token);
    note("for edge.yaml:");
    say(hash_lines(&token)?);
    Ok(())
}
