//! Decides what a fleet on several machines needs to start: certificates, tokens, keys, and configs that fit together.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use iop_adapters::http::Origin;

use iop_edge_core::catalog::{IssuerKey, KeyFileError};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::NodeId;
use iop_wire::{TrustDomain, WorkloadIdentity, WorkloadRole};
use rustls_pki_types::ServerName;

use crate::certs::{self, DevCertificates, Identities};
use crate::config::edge::NODES_PORT;
use crate::config::secret::read_secret;
use crate::exit::Failure;
use crate::files::{Kept, Readers, create, create_keeping};
use crate::operate::client::KEY_FILE;

pub(crate) mod directory;
#[cfg(test)]
mod tests;
mod text;

use directory::NodeDirectory;

/// Name of the Edge.
const EDGE_ID: &str = "edge";
/// Where a managed fleet keeps the key that signs leases.
const ISSUER_KEY: &str = "keys/lease-issuer.pem";
/// Where a managed fleet keeps its CA, to be moved away: nothing that runs reads it.
pub(crate) const CA_DIR: &str = "ca";
/// The CA's certificate there.
pub(crate) const CA_CERT: &str = "ca.pem";
/// The CA's private key there.
pub(crate) const CA_KEY: &str = "ca-key.pem";
/// Slot of the backend's key, and its file.
const SLOT: &str = "main";
const SLOT_FILE: &str = "keys/main.key";

/// Flags of `iop init`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct InitOptions {
    /// Directory to write to
    #[arg(long, default_value = ".", value_name = "DIR")]
    pub dir: PathBuf,
    /// Name or address under which other machines reach the Edge; repeatable. With one, the Edge listens to all of them
    #[arg(long, value_name = "HOST")]
    pub host: Vec<String>,
    /// Id of the Node; of several in a managed fleet: gpu-1,gpu-2
    #[arg(long, default_value = "node-1", value_name = "ID")]
    pub node: String,
    /// Backend as the Nodes reach it [default: the built-in demo model]
    #[arg(long, value_name = "URL")]
    pub backend: Option<String>,
    /// Managed mode: certificates with identities on both sides, and the backend's key on the Edge, lent call by call
    #[arg(long)]
    pub managed: bool,
    /// With --managed and --backend: model that the backend serves; repeatable
    #[arg(long = "model", value_name = "NAME", requires = "managed")]
    pub models: Vec<String>,
    /// With --managed and --backend: file with the backend's key, which is copied [default: `iop slot rotate` stores it later]
    #[arg(long, value_name = "FILE", requires = "managed")]
    pub secret_file: Option<PathBuf>,
    /// Overwrite files that are there already
    #[arg(long)]
    pub force: bool,
}

/// What was written, and what is shown once.
#[derive(Debug)]
pub struct Init {
    /// The files, in the order they were written.
    pub files: Vec<PathBuf>,
    /// The text for the terminal. It holds the API key and, but for a managed fleet, the token.
    pub text: String,
}

/// A file to be written.
pub(crate) struct File {
    pub(crate) name: String,
    pub(crate) text: String,
    pub(crate) readers: Readers,
}

impl File {
    fn open(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { name: name.into(), text: text.into(), readers: Readers::All }
    }

    fn secret(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { name: name.into(), text: text.into(), readers: Readers::Owner }
    }

    fn within(self, directory: &str) -> Self {
        Self { name: format!("{directory}/{}", self.name), ..self }
    }
}

/// What a fleet is made of.
struct Parts<'a> {
    options: &'a InitOptions,
    /// Nodes and their tokens.
    nodes: Vec<(String, Token)>,
    key: Token,
    admin: Token,
    certs: DevCertificates,
    identities: Option<Identities>,
    /// The backend's key.
    secret: Option<String>,
}

/// Writes everything.
///
/// # Errors
/// [`Failure`] with the next step. Everything is as it was then, also where files were to be overwritten.
pub fn init(options: &InitOptions, now: SystemTime) -> Result<Init, Failure> {
    let parts = parts(options, now)?;
    let files = if options.managed { managed_files(&parts) } else { plain_files(&parts) };
    let issuer = options.managed.then(|| options.dir.join(ISSUER_KEY));
    write_all(&options.dir, &files, issuer.as_deref(), options.force)?;
    let text = if options.managed { text::managed(&parts) } else { text::plain(&parts) };
    let files = files.iter().map(|file| options.dir.join(&file.name)).chain(issuer).collect();
    Ok(Init { files, text })
}

/// Checks the flags and makes what is random.
fn parts(options: &InitOptions, now: SystemTime) -> Result<Parts<'_>, Failure> {
    let ids = node_ids(options)?;
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
    let secret = credential(options)?;
    let identities = options.managed.then(|| identities(&ids)).transpose()?;
    let random = |error: getrandom::Error| Failure::fatal(format!("the operating system gives no randomness: {error}"));
    let mut nodes = Vec::new();
    for id in ids {
        nodes.push((id, Token::generate(TokenKind::Node).map_err(random)?));
    }
    let key = Token::generate(TokenKind::ApiKey).map_err(random)?;
    let admin = Token::generate(TokenKind::Admin).map_err(random)?;
    let certs = match &identities {
        Some(identities) => certs::generate_managed(&options.host, identities, now),
        None => certs::generate(&options.host, now),
    };
    let certs = certs.map_err(|error| {
        Failure::usage(format!("the certificate can't be made: {error}"))
            .hint("--host takes a DNS name or an IP address")
    })?;
    Ok(Parts { options, nodes, key, admin, certs, identities, secret })
}

fn node_ids(options: &InitOptions) -> Result<Vec<String>, Failure> {
    let ids: Vec<String> = options.node.split(',').map(|id| id.trim().to_owned()).collect();
    for id in &ids {
        if NodeId::new(id).is_err() || id.contains(['"', '\\']) {
            return Err(
                Failure::usage(format!("`{}` can't be the id of a Node", id.escape_debug())).hint("--node gpu-1")
            );
        }
        if options.managed && is_reserved(id) {
            return Err(Failure::usage(format!("`{id}` is a file or directory of the fleet itself"))
                .hint("give the Node another id"));
        }
        if ids.iter().filter(|other| *other == id).count() > 1 {
            return Err(Failure::usage(format!("node `{id}` is there twice")).hint("--node gpu-1,gpu-2"));
        }
    }
    if ids.len() > 1 && !options.managed {
        return Err(Failure::usage("several Nodes are for a managed fleet")
            .hint("add --managed, or add the second one to edge.yaml and give it a token with `iop token new`"));
    }
    Ok(ids)
}

/// What a managed fleet has in its directory beside the Nodes' own ones.
const OWN_NAMES: [&str; 8] =
    [CA_DIR, "certs", "keys", KEY_FILE, text::API_KEYS, text::NODE_TOKENS, text::SLOTS, "edge.yaml"];

/// True if a Node of that id would have its files among those of the fleet, which it must never be given, or in the place of one.
pub(crate) fn is_reserved(id: &str) -> bool {
    OWN_NAMES.iter().any(|taken| taken.eq_ignore_ascii_case(id))
}

fn identities(ids: &[String]) -> Result<Identities, Failure> {
    let identity = |role, id: &str| {
        WorkloadIdentity::new(TrustDomain::default(), role, id).map_err(|_| {
            Failure::usage(format!("`{}` can't stand in a workload identity", id.escape_debug()))
                .hint("--node takes A-Z a-z 0-9 . - _ here")
        })
    };
    let nodes: Result<_, _> = ids.iter().map(|id| identity(WorkloadRole::Node, id)).collect();
    Ok(Identities { edge: identity(WorkloadRole::Edge, EDGE_ID)?, nodes: nodes? })
}

/// The backend's key, if it was given; what goes with it must be there.
fn credential(options: &InitOptions) -> Result<Option<String>, Failure> {
    if !options.managed || options.backend.is_none() {
        if !options.models.is_empty() || options.secret_file.is_some() {
            return Err(Failure::usage("--model and --secret-file are about the backend of a managed fleet")
                .hint("--managed --backend https://api.example --model NAME --secret-file key.txt"));
        }
        return Ok(None);
    }
    if options.models.is_empty() {
        return Err(Failure::usage("a backend whose key the Edge lends is not asked for its models")
            .hint("name them: --model NAME, repeatable"));
    }
    let read = |path: &PathBuf| read_secret(path).map_err(|error| Failure::usage(format!("--secret-file: {error}")));
    options.secret_file.as_ref().map(read).transpose()
}

/// What both kinds of fleet have.
fn common_files(parts: &Parts<'_>) -> Vec<File> {
    let Parts { certs, key, admin, .. } = parts;
    vec![
        File::open("certs/ca.pem", &certs.ca),
        File::open("certs/edge.pem", &certs.edge),
        File::secret("certs/edge-key.pem", certs.edge_key.expose()),
        File::secret(KEY_FILE, format!("{}\n", admin.reveal())),
        File::secret(text::API_KEYS, text::api_keys(key)),
        File::secret(text::NODE_TOKENS, text::node_tokens(&parts.nodes)),
        File::open("edge.yaml", text::edge_yaml(parts)),
    ]
}

fn plain_files(parts: &Parts<'_>) -> Vec<File> {
    let mut files = common_files(parts);
    for (_, token) in &parts.nodes {
        files.push(File::secret("node.token", format!("{}\n", token.reveal())));
        files.push(File::open("node.yaml", text::node_yaml(parts.options)));
    }
    files
}

/// Each Node has a directory of its own, to be copied to its machine as it is.
fn managed_files(parts: &Parts<'_>) -> Vec<File> {
    let mut files = common_files(parts);
    files.push(File::secret(text::SLOTS, text::slots(parts)));
    if let Some(secret) = &parts.secret {
        files.push(File::secret(SLOT_FILE, format!("{secret}\n")));
    }
    if let Some(key) = &parts.certs.ca_key {
        files.push(File::open(format!("{CA_DIR}/{CA_CERT}"), &parts.certs.ca));
        files.push(File::secret(format!("{CA_DIR}/{CA_KEY}"), key.expose()));
    }
    let Some(identities) = &parts.identities else { return files };
    for ((id, token), pair) in parts.nodes.iter().zip(&parts.certs.nodes) {
        let directory = NodeDirectory {
            authority: format!("{}:{NODES_PORT}", text::edge_host(parts.options)),
            edge: &identities.edge,
            ca: &parts.certs.ca,
            pair,
            backends: parts.options.backend.as_deref().into_iter().collect(),
        };
        files.extend(directory.files().into_iter().map(|file| file.within(id)));
        files.push(File::secret(directory::TOKEN, format!("{}\n", token.reveal())).within(id));
    }
    files
}

fn write_all(dir: &Path, files: &[File], issuer: Option<&Path>, force: bool) -> Result<(), Failure> {
    let mut there: Vec<_> =
        files.iter().filter(|file| dir.join(&file.name).exists()).map(|file| file.name.as_str()).collect();
    there.extend(issuer.filter(|path| path.exists()).map(|_| ISSUER_KEY));
    if !there.is_empty() && !force {
        let message =
            format!("{} already there: {}", if there.len() == 1 { "a file is" } else { "files are" }, there.join(", "));
        return Err(
            Failure::usage(message).hint("nothing was written; --force overwrites them, --dir DIR writes elsewhere")
        );
    }
    let mut written = Written::default();
    for file in files {
        written.add(&dir.join(&file.name), |path| Ok(create(path, &file.text, file.readers)?))?;
    }
    #[cfg(unix)]
    if files.iter().any(|file| Path::new(&file.name).starts_with(CA_DIR)) {
        let path = dir.join(CA_DIR);
        let owner = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(&path, owner).map_err(|error| unwritten(&path, &error))?;
    }
    if let Some(path) = issuer {
        written.add(path, |path| IssuerKey::create(path).map(|_| ()))?;
    }
    written.stays();
    Ok(())
}

fn unwritten(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::fatal(format!("can't write {}: {error}; nothing was changed", path.display()))
}

/// What was written, until all of it is: dropped before, it is taken back.
#[derive(Debug, Default)]
struct Written {
    files: Vec<Kept>,
    /// Those that were made, the outer ones first.
    directories: Vec<PathBuf>,
}

impl Written {
    fn add(&mut self, path: &Path, make: impl FnOnce(&Path) -> Result<(), KeyFileError>) -> Result<(), Failure> {
        if let Some(parent) = path.parent() {
            let mut missing: Vec<_> = parent.ancestors().filter(|directory| !directory.exists()).collect();
            missing.retain(|directory| !directory.as_os_str().is_empty());
            self.directories.extend(missing.into_iter().rev().map(Path::to_path_buf));
            fs::create_dir_all(parent).map_err(|error| unwritten(parent, &error))?;
        }
        let kept = create_keeping(path, make).map_err(|error: KeyFileError| match error {
            KeyFileError::Io(error) => unwritten(path, &error),
            error => unwritten(path, &error),
        })?;
        self.files.push(kept);
        Ok(())
    }

    fn stays(mut self) {
        self.files.drain(..).for_each(Kept::stays);
        self.directories.clear();
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        self.files.clear();
        for directory in self.directories.iter().rev() {
            let _not_empty = fs::remove_dir(directory);
        }
    }
}
