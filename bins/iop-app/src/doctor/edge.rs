//! Decides what is looked at from the Edge's place: the config with all it names, and the Edge that runs.

use std::path::Path;
use std::time::Duration;

use http::Method;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Report, certificate};
use crate::admin::view::{NodesView, StatusView};
use crate::config::edge::{NodesTls, TlsPair};
use crate::config::secret::resolve_path;
use crate::config::time::Timestamp;
use crate::config::{EdgeConfig, LoadedEdge, Severity};
use crate::operate::client::{AdminClient, AdminOptions, CallError, DEFAULT_ADMIN, KEY_FILE, KEY_VARIABLE};
use crate::tls;

/// Time before its end from which a key or token is a warning, in seconds.
const SOON: u64 = 14 * 86_400;
const PATIENCE: Duration = Duration::from_secs(5);

/// Looks at a config and the Edge that runs with it.
pub(super) async fn examine(file: &Path, admin: &AdminOptions, report: &mut Report) {
    let (loaded, problems) = EdgeConfig::load(file);
    for problem in problems.sorted() {
        let at = if problem.at.line > 0 { format!("line {}: ", problem.at.line) } else { String::new() };
        let next = problem.suggestion.clone().unwrap_or_else(|| format!("correct it in {}", file.display()));
        match problem.severity {
            Severity::Error => report.fail("config", format!("{at}{}", problem.message), next),
            Severity::Warning => report.warn("config", format!("{at}{}", problem.message), next),
        }
    }
    let Some(loaded) = loaded else { return };
    if problems.sorted().is_empty() {
        report.ok("config", format!("{}: no problem found", file.display()));
    }
    let tls = &loaded.config.tls;
    pair("certificate openai", tls.openai.as_ref(), &loaded, report);
    pair("certificate nodes", tls.nodes.as_ref().map(NodesTls::pair).as_ref(), &loaded, report);
    ends(&loaded, report);
    running(&loaded, admin, report).await;
}

fn pair(check: &str, pair: Option<&TlsPair>, loaded: &LoadedEdge, report: &mut Report) {
    let Some(pair) = pair else { return };
    let path = resolve_path(loaded.base(), &pair.cert.to_string_lossy());
    // A pair that can't be used is a mistake of the config, which is told.
    let chain = tls::load_certificates(&path).unwrap_or_default();
    match chain.first().and_then(|leaf| certificate::facts(leaf)) {
        Some(facts) => certificate::tell(&facts, check, Timestamp::now(), report),
        None => report.fail(check, format!("{} can't be read", path.display()), "`iop init` makes one for tests"),
    }
}

/// Keys and tokens that end soon, or have.
fn ends(loaded: &LoadedEdge, report: &mut Report) {
    let (config, now) = (&loaded.config, Timestamp::now());
    let keys = config.auth.api_keys.iter().filter_map(|key| {
        let whose = format!("API key {} of {}", key.id, key.principal.as_deref().unwrap_or(&key.id));
        Some((whose, key.expires_at?, "`iop key new` makes another one".to_owned()))
    });
    let tokens = config.nodes.iter().filter_map(|node| {
        let next = format!("`iop token revoke {0}` and `iop token new {0}` make another one", node.id);
        Some((format!("token of node {}", node.id), node.token_expires_at?, next))
    });
    let mut told = false;
    for (whose, end, next) in keys.chain(tokens) {
        if end <= now {
            told = true;
            report.warn("keys", format!("{whose} expired at {end}"), next);
        } else if end.0 - now.0 < SOON {
            told = true;
            report.warn("keys", format!("{whose} expires at {end}"), next);
        }
    }
    if !told {
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let (keys, nodes) = (config.auth.api_keys.len(), config.nodes.len());
        report.ok("keys", format!("{}, {}: none ends soon", count(keys, "API key"), count(nodes, "node")));
    }
}

async fn running(loaded: &LoadedEdge, admin: &AdminOptions, report: &mut Report) {
    let start = format!("start it: iop-edge serve --config {}", loaded.path.display());
    let listen = &loaded.config.listen;
    let mut up = 0;
    for (name, address) in
        [("openai", listen.openai.address), ("nodes", listen.nodes.address), ("admin", listen.admin.address)]
    {
        let address = reachable(address);
        let check = format!("listener {name}");
        match timeout(PATIENCE, TcpStream::connect(address)).await {
            Ok(Ok(_)) => {
                up += 1;
                report.ok(check, format!("{address} takes connections"));
            }
            Ok(Err(error)) => report.fail(check, format!("{address}: {error}"), &start),
            Err(_) => report.fail(check, format!("{address}: no answer"), "look at the log of iop-edge"),
        }
    }
    if up == 0 {
        return report.skip("edge", "it is not running");
    }
    let mut options = admin.clone();
    if options.admin == DEFAULT_ADMIN {
        options.admin = reachable(listen.admin.address).to_string();
    }
    let beside = loaded.base().join(KEY_FILE);
    if options.key_file.is_none() && std::env::var_os(KEY_VARIABLE).is_none() && beside.exists() {
        options.key_file = Some(beside);
    }
    let client = match AdminClient::new(&options) {
        Ok(client) => client,
        Err(failure) => return report.skip("edge", format!("{}: it is not asked", failure.message)),
    };
    let status: Result<StatusView, CallError> = client.ask(Method::GET, "status").await;
    let nodes: Result<NodesView, CallError> = client.ask(Method::GET, "nodes").await;
    match (status, nodes) {
        (Ok(status), Ok(nodes)) => {
            if status.ready {
                report.ok("edge", format!("{} {} is ready", status.edge, status.version));
            } else {
                report.fail(
                    "edge",
                    format!("{} {} has no provider that can take work", status.edge, status.version),
                    "the rows below say why",
                );
            }
            let managed = loaded.config.tls.nodes.as_ref().is_some_and(|tls| tls.client_ca.is_some());
            connected(&nodes, managed, report);
        }
        (Err(error), _) | (_, Err(error)) => {
            let failure = client.failure(error);
            report.fail(
                "edge",
                failure.message,
                failure.hint.unwrap_or_else(|| "look at the log of iop-edge".to_owned()),
            );
        }
    }
}

/// Who listens to all addresses is asked on loopback.
fn reachable(mut address: std::net::SocketAddr) -> std::net::SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn connected(nodes: &NodesView, managed: bool, report: &mut Report) {
    for node in &nodes.nodes {
        let check = format!("node {}", node.id);
        if !node.enabled {
            report.skip(check, "not enabled");
            continue;
        }
        if !node.connected {
            // A Node with a certificate has a directory with its config, as `iop init --managed` and `iop node add` write it.
            let next = if managed {
                let config = format!("{}/node.yaml", node.id);
                format!(
                    "start it: iop-node serve --config {config}; `iop doctor --config {config}` there says what stands in its way"
                )
            } else {
                "start it: iop-node serve --edge … --token-file …; `iop doctor --edge …` there says what stands in its way".to_owned()
            };
            report.fail(check, "not connected", next);
            continue;
        }
        if node.suspect {
            report.warn(check, "connected, and does not answer", "look at its machine and its log");
        } else {
            report.ok(check, format!("connected, {}", node.status));
        }
        for provider in &node.providers {
            let check = format!("backend {}", provider.id);
            match provider.status.as_str() {
                "ready" => report.ok(check, format!("ready, {}/{} places in use", provider.in_use, provider.capacity)),
                status => {
                    let next = "`iop doctor --config node.yaml` on its machine looks at the backend itself";
                    report.fail(check, format!("{status} ({})", provider.health), next);
                }
            }
        }
    }
}
