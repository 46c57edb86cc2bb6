//! Decides what a pair on two machines needs to start: certificates, a token, a key, and configs that fit together.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use iop_adapters::http::Origin;
use iop_edge_core::token::{Token, TokenKind};
use rustls_pki_types::ServerName;

use crate::certs::{self, VALID_DAYS};
use crate::config::edge::{NODES_PORT, OPENAI_PORT};
use crate::exit::Failure;
use crate::files::{Readers, create};
use crate::operate::client::KEY_FILE;

#[cfg(test)]
mod tests;

/// Flags of `iop init`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct InitOptions {
    /// Directory to write to
    #[arg(long, default_value = ".", value_name = "DIR")]
    pub dir: PathBuf,
    /// Name or address under which other machines reach the Edge; repeatable. With one, the Edge listens to all of them
    #[arg(long, value_name = "HOST")]
    pub host: Vec<String>,
    /// Id of the Node
    #[arg(long, default_value = "node-1", value_name = "ID")]
    pub node: String,
    /// Backend beside the Node, as the Node reaches it [default: the built-in demo model]
    #[arg(long, value_name = "URL")]
    pub backend: Option<String>,
    /// Overwrite files that are there already
    #[arg(long)]
    pub force: bool,
}

/// What was written, and what is shown once.
#[derive(Debug)]
pub struct Init {
    /// The files, in the order they were written.
    pub files: Vec<PathBuf>,
    /// The text for the terminal. It holds the API key and the token.
    pub text: String,
}

struct File {
    name: &'static str,
    text: String,
    secret: bool,
}

/// Writes everything.
///
/// # Errors
/// [`Failure`] with the next step. Nothing is written when a file is there already.
pub fn init(options: &InitOptions, now: SystemTime) -> Result<Init, Failure> {
    if iop_execution::NodeId::new(&options.node).is_err() || options.node.contains(['"', '\\']) {
        return Err(
            Failure::usage(format!("`{}` can't be the id of a Node", options.node.escape_debug())).hint("--node gpu-1")
        );
    }
    if let Some(url) = &options.backend {
        Origin::parse(url)
            .map_err(|error| Failure::usage(format!("--backend: {error}")).hint("for example http://127.0.0.1:8000"))?;
    }
    for host in &options.host {
        if ServerName::try_from(host.trim_matches(['[', ']'])).is_err() {
            let message = format!("--host: `{}` is no DNS name and no IP address", host.escape_debug());
            return Err(Failure::usage(message).hint("for example --host edge.example --host 192.168.1.5"));
        }
    }
    let random = |error: getrandom::Error| Failure::fatal(format!("the operating system gives no randomness: {error}"));
    let token = Token::generate(TokenKind::Node).map_err(random)?;
    let key = Token::generate(TokenKind::ApiKey).map_err(random)?;
    let admin = Token::generate(TokenKind::Admin).map_err(random)?;
    let certs = certs::generate(&options.host, now).map_err(|error| {
        Failure::usage(format!("the certificate can't be made: {error}"))
            .hint("--host takes a DNS name or an IP address")
    })?;
    let files = [
        File { name: "certs/ca.pem", text: certs.ca, secret: false },
        File { name: "certs/edge.pem", text: certs.edge, secret: false },
        File { name: "certs/edge-key.pem", text: certs.edge_key.into_inner(), secret: true },
        File { name: "node.token", text: format!("{}\n", token.reveal()), secret: true },
        File { name: KEY_FILE, text: format!("{}\n", admin.reveal()), secret: true },
        File { name: "edge.yaml", text: edge_yaml(options, &token, &key, &admin), secret: false },
        File { name: "node.yaml", text: node_yaml(options), secret: false },
    ];
    write_all(&options.dir, &files, options.force)?;
    let text = shown(options, &token, &key);
    Ok(Init { files: files.iter().map(|file| options.dir.join(file.name)).collect(), text })
}

fn write_all(dir: &Path, files: &[File], force: bool) -> Result<(), Failure> {
    let there: Vec<_> = files.iter().filter(|file| dir.join(file.name).exists()).map(|file| file.name).collect();
    if !there.is_empty() && !force {
        let message =
            format!("{} already there: {}", if there.len() == 1 { "a file is" } else { "files are" }, there.join(", "));
        return Err(
            Failure::usage(message).hint("nothing was written; --force overwrites them, --dir DIR writes elsewhere")
        );
    }
    let failed = |path: &Path, error: io::Error| Failure::fatal(format!("can't write {}: {error}", path.display()));
    let certs = dir.join("certs");
    fs::create_dir_all(&certs).map_err(|error| failed(&certs, error))?;
    for file in files {
        let path = dir.join(file.name);
        // A new file, so that its mode is ours whatever was there before.
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&path, error)),
        }
        let readers = if file.secret { Readers::Owner } else { Readers::All };
        create(&path, &file.text, readers).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

fn edge_yaml(options: &InitOptions, token: &Token, key: &Token, admin: &Token) -> String {
    let ip = if options.host.is_empty() { "127.0.0.1" } else { "0.0.0.0" };
    let provider = options.backend.as_ref().map_or_else(
        || "- { id: demo, kind: demo }          # a model without weights; replace it by something like\n      # - { id: vllm, kind: vllm, base_url: \"http://127.0.0.1:8000\", capacity: 32 }".to_owned(),
        |url| format!("- {{ id: backend, kind: openai_compat, base_url: \"{url}\" }}"),
    );
    format!(
        "# Written by `iop init`. `iop-edge check` says what is wrong with it, `iop-edge schema` what else it may hold.
listen: {{ openai: \"{ip}:{OPENAI_PORT}\", nodes: \"{ip}:{NODES_PORT}\", admin: \"127.0.0.1:9190\" }}
tls:
  openai: {{ cert: certs/edge.pem, key: certs/edge-key.pem }}
  nodes: {{ cert: certs/edge.pem, key: certs/edge-key.pem }}
auth:
  api_keys:
    - {{ id: \"{}\", hash: \"{}\", principal: default, models: [\"*\"] }}
admin: {{ key_hash: \"{}\" }}
nodes:
  - id: \"{}\"
    token_id: \"{}\"
    token_hash: \"{}\"
    providers:
      {provider}
models: auto
queue: {{ max_waiting: 1024, timeout_ms: 30000 }}
",
        key.id().as_str(),
        key.hash(),
        admin.hash(),
        options.node,
        token.id().as_str(),
        token.hash(),
    )
}

fn edge_host(options: &InitOptions) -> String {
    match options.host.first() {
        None => "127.0.0.1".to_owned(),
        Some(host) if host.contains(':') && !host.starts_with('[') => format!("[{host}]"),
        Some(host) => host.clone(),
    }
}

fn node_yaml(options: &InitOptions) -> String {
    format!(
        "# Written by `iop init`, for `iop-node serve --config node.yaml`.
edge: \"https://{}:{NODES_PORT}\"
token_file: node.token
tls: {{ ca: certs/ca.pem }}
reconnect: {{ max_attempts: 0 }}          # 0 = never give up
",
        edge_host(options)
    )
}

fn shown(options: &InitOptions, token: &Token, key: &Token) -> String {
    let (dir, host) = (&options.dir, edge_host(options));
    let at = |name: &str| if dir == Path::new(".") { name.to_owned() } else { dir.join(name).display().to_string() };
    let (edge_yaml, node_token, ca) = (at("edge.yaml"), at("node.token"), at("certs/ca.pem"));
    let admin_key = at(KEY_FILE);
    let status =
        if admin_key == KEY_FILE { "iop status".to_owned() } else { format!("iop status --key-file {admin_key}") };
    let elsewhere = if options.host.is_empty() {
        "Both on this machine. For a Node on another one: iop init --force --host NAME-OF-THIS-MACHINE".to_owned()
    } else {
        format!("Copy {node_token} and {ca} to the Node's machine first.")
    };
    format!(
        "wrote {edge_yaml}, {}, {node_token}, {admin_key}, {ca}, {}, {} (certificates are valid for {VALID_DAYS} days)

Shown once, kept nowhere but here:
  API key     {}
  node token  {}   (also in {node_token})

Next:
  iop-edge serve --config {edge_yaml}
  iop-node serve --edge https://{host}:{NODES_PORT} --token-file {node_token} --ca {ca}
  curl --cacert {ca} https://{host}:{OPENAI_PORT}/v1/models -H 'Authorization: Bearer {}'
  {status}

{elsewhere}",
        at("node.yaml"),
        at("certs/edge.pem"),
        at("certs/edge-key.pem"),
        key.reveal(),
        token.reveal(),
        key.reveal(),
    )
}
