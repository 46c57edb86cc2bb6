//! Decides what `iop lease` does: the keys that sign credential leases, and what leases there were.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use iop_credential_lease::TrustedIssuers;
use iop_edge_core::catalog::{IssuerKey, KeyFileError};
use serde::Serialize;

use super::record::quoted;
use super::{Target, say_json};
use crate::admin::usage::{LeaseReasonView, LeasesView};
use crate::config::LoadedEdge;
use crate::config::edge::credentials::{SlotStatusConfig, public_key_text, resolve_public_key};
use crate::exit::Failure;
use crate::term::{Cell, Paint, columns, has_colours, human, note, say};

/// Commands for credential leases.
#[derive(Debug, Subcommand)]
pub enum LeaseCommand {
    /// Show who signs leases, whom Nodes trust, what may be lent, and what became of the leases of a running Edge
    Status {
        /// The config
        #[command(flatten)]
        target: Target,
    },
    /// Make keys that sign leases
    #[command(subcommand)]
    IssuerKey(IssuerKeyCommand),
}

/// Commands for keys that sign leases.
#[derive(Debug, Subcommand)]
pub enum IssuerKeyCommand {
    /// Make a key in a new file, for this user only
    New {
        /// The file
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the id and the public half of a key
    Show {
        /// The file
        file: PathBuf,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Serialize)]
struct Key {
    key_id: String,
    public_key: String,
    role: &'static str,
}

/// Does it.
///
/// # Errors
/// [`Failure`] with the next step.
pub async fn run(command: LeaseCommand) -> Result<(), Failure> {
    match command {
        LeaseCommand::Status { target } => status(&target).await,
        LeaseCommand::IssuerKey(IssuerKeyCommand::New { out, json }) => {
            if out.exists() {
                return Err(Failure::usage(format!("{} is there already; nothing was changed", out.display()))
                    .hint("--out FILE writes a new file only; `iop lease issuer-key show FILE` says what is in it"));
            }
            let failed = |error: KeyFileError| match error {
                KeyFileError::Io(error) => Failure::fatal(format!("can't write {}: {error}", out.display())),
                error => Failure::usage(format!("{}: {error}", out.display())),
            };
            if let Some(directory) = out.parent() {
                std::fs::create_dir_all(directory)
                    .map_err(|error| Failure::fatal(format!("can't make {}: {error}", directory.display())))?;
            }
            let key = IssuerKey::create(&out).map_err(failed)?;
            show(&key, json);
            if !json {
                let (config, name) = named(&out);
                note(format!(
                    "in {}, for this user only. In {}:\n  credentials: {{ issuer_key: {} }}\n\
                     To replace a key without a failed request: name the new one as `issuer_key` and the old one under\n\
                     `previous_issuers: [\"file:OLD.pem\"]`, `iop reload`, and take the old one out once its leases are over:\n\
                     after `lease_ttl_ms`, a minute by default.",
                    out.display(),
                    config.display(),
                    quoted(&name.display().to_string())
                ));
            }
            Ok(())
        }
        LeaseCommand::IssuerKey(IssuerKeyCommand::Show { file, json }) => {
            let failed = |error| Failure::usage(format!("{}: {error}", file.display()));
            show(&IssuerKey::load(&file).map_err(failed)?, json);
            Ok(())
        }
    }
}

/// Which config names this file, and how: the nearest `edge.yaml` above it, whose paths start at its own directory.
fn named(file: &Path) -> (PathBuf, PathBuf) {
    let config = file.ancestors().skip(1).map(|above| above.join("edge.yaml")).find(|config| config.is_file());
    let found = config.and_then(|config| {
        let name = file.strip_prefix(config.parent()?).ok()?.to_path_buf();
        Some((config, name))
    });
    found.unwrap_or_else(|| ("edge.yaml".into(), std::path::absolute(file).unwrap_or_else(|_| file.to_path_buf())))
}

fn show(key: &IssuerKey, json: bool) {
    let (key_id, public_key) = (key.id().to_string(), public_key_text(&key.public_bytes()));
    if json {
        say_json(&Key { key_id, public_key, role: "issuer" });
    } else {
        say(format!("key id      {key_id}\npublic key  {public_key}"));
    }
}

/// Every key that Nodes are told to trust, the one that signs first.
fn keys(loaded: &LoadedEdge) -> Result<Vec<Key>, Failure> {
    let credentials = &loaded.config.credentials;
    let mut keys = Vec::new();
    if let Some(path) = &credentials.issuer_key {
        let path = loaded.base().join(path);
        let key = IssuerKey::load(&path).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
        let (key_id, public_key) = (key.id().to_string(), public_key_text(&key.public_bytes()));
        keys.push(Key { key_id, public_key, role: "signs" });
    }
    for text in &credentials.previous_issuers {
        let public = resolve_public_key(loaded.base(), text).map_err(Failure::usage)?;
        let trusted = TrustedIssuers::new([public]).map_err(|error| Failure::usage(error.to_string()))?;
        let key_id = trusted.ids().next().map(|id| id.to_string()).unwrap_or_default();
        keys.push(Key { key_id, public_key: public_key_text(&public), role: "trusted" });
    }
    Ok(keys)
}

async fn status(target: &Target) -> Result<(), Failure> {
    let loaded = target.load()?;
    let credentials = &loaded.config.credentials;
    let keys = keys(&loaded)?;
    let count = |status| credentials.slots.iter().filter(|slot| slot.status == status).count();
    let counts = [SlotStatusConfig::Enabled, SlotStatusConfig::Disabled, SlotStatusConfig::Revoked].map(count);
    let [enabled, disabled, revoked] = counts;
    let providers = loaded.config.nodes.iter().flat_map(|node| &node.providers);
    let managed = providers.filter(|provider| provider.credential.is_some()).count();
    let live = target.live::<LeasesView>(&loaded, "leases").await;
    if target.edge.json {
        say_json(&serde_json::json!({
            "issuers": keys,
            "lease_ttl_ms": credentials.lease_ttl_ms,
            "slots": { "enabled": enabled, "disabled": disabled, "revoked": revoked },
            "routes": credentials.routes.len(),
            "managed_providers": managed,
            "leases": live.as_ref().ok(),
            "live": live.is_ok(),
            "live_error": live.as_ref().err(),
        }));
        return Ok(());
    }
    if keys.is_empty() {
        say("no issuer key: no lease can be signed. `iop lease issuer-key new --out keys/lease-issuer.pem` makes one");
        return Ok(());
    }
    let rows: Vec<_> = keys
        .iter()
        .map(|key| {
            let paint = if key.role == "signs" { Paint::Good } else { Paint::Dim };
            vec![Cell::plain(&key.key_id), Cell::painted(key.role, paint), Cell::plain(&key.public_key)]
        })
        .collect();
    say(columns(&["ISSUER KEY", "ROLE", "PUBLIC KEY"], &rows, has_colours()).trim_end());
    let slots = format!("{enabled} enabled, {disabled} disabled, {revoked} revoked");
    say(format!(
        "\nslots      {slots}\nroutes     {}\nproviders  {managed} with a credential\nlease      valid for {} s",
        credentials.routes.len(),
        credentials.lease_ttl_ms / 1000
    ));
    match live {
        Ok(leases) => say(became(&leases)),
        Err(why) => note(why),
    }
    Ok(())
}

/// What became of leases, in lines like those before.
fn became(leases: &LeasesView) -> String {
    let LeasesView { uptime_ms, issued, opened, refused, unused, denied, reasons } = leases;
    let mut text =
        format!("leases     {issued} issued in {}: {opened} opened, {refused} refused by Nodes", human(*uptime_ms));
    text.push_str(&format!(", {unused} unused\nrequests   {denied} got no lease"));
    for LeaseReasonView { by, reason, count } in reasons {
        text.push_str(&format!("\nrefused    {count} by the {by}: {reason}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testdir::TestDir;

    #[tokio::test]
    async fn a_new_issuer_key_replaces_none_and_is_named_as_its_config_takes_it() {
        // BIN-3, CRD-11
        let (dir, elsewhere) = (TestDir::new(), TestDir::new());
        let config = dir.write("edge.yaml", "");
        let key = dir.path().join("keys/issuer2.pem");
        assert_eq!(named(&key), (config, "keys/issuer2.pem".into()));
        let alone = elsewhere.path().join("issuer.pem");
        assert_eq!(named(&alone), ("edge.yaml".into(), alone.clone()));
        assert!(named(Path::new("keys/issuer.pem")).1.is_absolute());
        let new = |out: PathBuf| run(LeaseCommand::IssuerKey(IssuerKeyCommand::New { out, json: false }));
        new(key.clone()).await.unwrap();
        let before = std::fs::read(&key).unwrap();
        let failure = new(key.clone()).await.unwrap_err().to_string();
        assert!(failure.contains("is there already; nothing was changed"), "{failure}");
        assert_eq!(std::fs::read(&key).unwrap(), before);
    }
}
