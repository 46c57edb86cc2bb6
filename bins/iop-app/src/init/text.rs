//! Decides what stands in the files that `iop init` writes, and what it says of them.

use std::path::Path;

use iop_edge_core::token::Token;

use super::{CA_DIR, EDGE_ID, ISSUER_KEY, InitOptions, Parts, SLOT, SLOT_FILE};
use crate::certs::VALID_DAYS;
use crate::config::edge::credentials::{SlotRecord, SlotStatusConfig};
use crate::config::edge::records;
use crate::config::edge::{ApiKeyRecord, NODES_PORT, NodeTokenRecord, OPENAI_PORT};
use crate::issue::record;
use crate::operate::client::KEY_FILE;

pub(super) const API_KEYS: &str = "api-keys.yaml";
pub(super) const NODE_TOKENS: &str = "node-tokens.yaml";
pub(super) const SLOTS: &str = "slots.yaml";

pub(super) fn api_keys(key: &Token) -> String {
    let record = ApiKeyRecord {
        id: key.id().as_str().to_owned(),
        hash: key.hash().to_string(),
        principal: Some("default".to_owned()),
        models: vec!["*".to_owned()],
        priority: 0,
        max_priority: None,
        limits: Default::default(),
        expires_at: None,
        previous: None,
    };
    record::file_text(&records::API_KEYS, &[record::api_key(&record)])
}

pub(super) fn node_tokens(nodes: &[(String, Token)]) -> String {
    let lines: Vec<_> = nodes
        .iter()
        .map(|(id, token)| {
            record::node_token(&NodeTokenRecord {
                node: id.clone(),
                token_id: token.id().as_str().to_owned(),
                token_hash: token.hash().to_string(),
                expires_at: None,
                previous: None,
            })
        })
        .collect();
    record::file_text(&records::NODE_TOKENS, &lines)
}

/// The backend's slot: disabled until its key is there.
pub(super) fn slots(parts: &Parts<'_>) -> String {
    let status = if parts.secret.is_some() { SlotStatusConfig::Enabled } else { SlotStatusConfig::Disabled };
    let (name, secret) = (SLOT.to_owned(), format!("file:{SLOT_FILE}"));
    let slot = parts.options.backend.as_ref().map(|_| record::slot(&SlotRecord { name, secret, revision: 1, status }));
    record::file_text(&records::SLOTS, &Vec::from_iter(slot))
}

fn listeners(options: &InitOptions) -> String {
    let ip = if options.host.is_empty() { "127.0.0.1" } else { "0.0.0.0" };
    format!("listen: {{ openai: \"{ip}:{OPENAI_PORT}\", nodes: \"{ip}:{NODES_PORT}\", admin: \"127.0.0.1:9190\" }}")
}

/// What a Node without a backend runs, and what could stand in its place.
fn demo(id: &str, example: &str) -> String {
    format!(
        "- {{ id: {id}, kind: demo }}          # a model without weights; replace it by something like\n      # - {example}"
    )
}

fn provider(parts: &Parts<'_>, node: &str) -> String {
    let Parts { options, .. } = parts;
    let models: Vec<_> = options.models.iter().map(|model| record::quoted(model)).collect();
    match (&options.backend, options.managed) {
        (None, false) => demo("demo", "{ id: vllm, kind: vllm, base_url: \"http://127.0.0.1:8000\", capacity: 32 }"),
        (None, true) => demo(
            &record::quoted(&format!("{node}-demo")),
            "{ id: cloud, kind: openai_compat, base_url: \"https://api.example\", targets: [\"model\"], \
             credential: { slot: main, profile: bearer } }   # iop slot new main",
        ),
        (Some(url), false) => format!("- {{ id: backend, kind: openai_compat, base_url: \"{url}\" }}"),
        (Some(url), true) => format!(
            "- {{ id: {}, kind: openai_compat, base_url: \"{url}\", targets: [{}],\n          \
             credential: {{ slot: {SLOT}, profile: bearer }} }}",
            record::quoted(&format!("{node}-{SLOT}")),
            models.join(", ")
        ),
    }
}

/// A backend whose key the Edge lends is not asked for its models, so that they are named.
fn models(parts: &Parts<'_>) -> String {
    let options = parts.options;
    if !options.managed || options.backend.is_none() {
        return "models: auto\n".to_owned();
    }
    let providers = parts.nodes.iter().map(|(node, _)| record::quoted(&format!("{node}-{SLOT}")));
    let candidates: Vec<_> = providers.map(|provider| format!("{{ provider: {provider} }}")).collect();
    options.models.iter().fold("models:\n  - auto\n".to_owned(), |text, model| {
        format!("{text}  - {{ name: {}, candidates: [ {} ] }}\n", record::quoted(model), candidates.join(", "))
    })
}

fn credentials(parts: &Parts<'_>) -> String {
    let route = format!("[ {{ name: default, principals: [\"*\"], models: [\"*\"], slots: [{SLOT}] }} ]");
    let routes = if parts.options.backend.is_some() { route } else { format!("[]          # {route}") };
    format!(
        "credentials:                          # keys of providers, lent to Nodes call by call; `iop slot` keeps them
  issuer_key: {ISSUER_KEY}
  slots_file: {SLOTS}
  profiles: [ {{ name: bearer, kind: bearer }} ]
  routes: {routes}
"
    )
}

pub(super) fn edge_yaml(parts: &Parts<'_>) -> String {
    let Parts { options, nodes, admin, identities, .. } = parts;
    let mut text = format!(
        "# Written by `iop init`. `iop-edge check` says what is wrong with it, `iop-edge schema` what else it may hold.
edge_id: {EDGE_ID}
{}
tls:
  openai: {{ cert: certs/edge.pem, key: certs/edge-key.pem }}
  nodes: {{ cert: certs/edge.pem, key: certs/edge-key.pem{} }}
auth:
  api_keys_file: {API_KEYS}        # `iop key new|list|rotate|revoke`
  node_tokens_file: {NODE_TOKENS}  # `iop token new|list|rotate|revoke`
admin: {{ key_hash: \"{}\" }}
",
        listeners(options),
        if options.managed { ", client_ca: certs/ca.pem" } else { "" },
        admin.hash(),
    );
    if options.managed {
        text.push_str(&credentials(parts));
    }
    text.push_str("nodes:\n");
    let identities = identities.as_ref().map(|all| all.nodes.as_slice()).unwrap_or_default();
    for (index, (id, _)) in nodes.iter().enumerate() {
        text.push_str(&format!("  - id: \"{id}\"\n"));
        if let Some(identity) = identities.get(index) {
            text.push_str(&format!("    identities: [\"{identity}\"]\n"));
        }
        text.push_str(&format!("    providers:\n      {}\n", provider(parts, id)));
    }
    text.push_str(&models(parts));
    text.push_str("queue: { max_waiting: 1024, timeout_ms: 30000 }\n");
    text
}

pub(super) fn edge_host(options: &InitOptions) -> String {
    match options.host.first() {
        None => "127.0.0.1".to_owned(),
        Some(host) if host.contains(':') && !host.starts_with('[') => format!("[{host}]"),
        Some(host) => host.clone(),
    }
}

pub(super) fn node_yaml(options: &InitOptions) -> String {
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

/// Where a file is, as it is typed.
fn at(options: &InitOptions, name: &str) -> String {
    let dir = &options.dir;
    if dir == Path::new(".") { name.to_owned() } else { dir.join(name).display().to_string() }
}

/// The command that makes the same for other machines to reach, in the place of this.
fn again(options: &InitOptions) -> String {
    let InitOptions { dir, host: _, node, backend, managed, models, secret_file, force: _ } = options;
    let mut words = vec!["iop init".to_owned()];
    words.extend(managed.then(|| "--managed".to_owned()));
    words.extend((dir != Path::new(".")).then(|| format!("--dir {}", typed(&dir.display().to_string()))));
    words.push(format!("--node {}", typed(node)));
    words.extend(backend.iter().map(|url| format!("--backend {}", typed(url))));
    words.extend(models.iter().map(|model| format!("--model {}", typed(model))));
    words.extend(secret_file.iter().map(|file| format!("--secret-file {}", typed(&file.display().to_string()))));
    words.push("--force --host NAME-OF-THIS-MACHINE".to_owned());
    words.join(" ")
}

/// A word as a shell takes it.
fn typed(word: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:,@%+=".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

fn status(options: &InitOptions) -> String {
    match at(options, KEY_FILE) {
        key if key == KEY_FILE => "iop status".to_owned(),
        key => format!("iop status --key-file {key}"),
    }
}

pub(super) fn plain(parts: &Parts<'_>) -> String {
    let Parts { options, key, nodes, .. } = parts;
    let at = |name: &str| at(options, name);
    let host = edge_host(options);
    let token = nodes.first().map(|(_, token)| token.reveal()).unwrap_or_default();
    let (edge_yaml, node_yaml, ca) = (at("edge.yaml"), at("node.yaml"), at("certs/ca.pem"));
    let (node_token, admin_key, key) = (at("node.token"), at(KEY_FILE), key.reveal());
    let elsewhere = if options.host.is_empty() {
        format!("Both on this machine. For a Node on another one: {}", again(options))
    } else {
        format!("Copy {node_token} and {ca} to the Node's machine first.")
    };
    format!(
        "wrote {edge_yaml}, {node_yaml}, {}, {}, {node_token}, {admin_key}, {ca}, {}, {} (certificates are valid for {VALID_DAYS} days)

Shown once, kept nowhere but here:
  API key     {key}
  node token  {token}   (also in {node_token})

Next:
  iop-edge serve --config {edge_yaml}
  iop-node serve --edge https://{host}:{NODES_PORT} --token-file {node_token} --ca {ca}
  curl --cacert {ca} https://{host}:{OPENAI_PORT}/v1/models -H 'Authorization: Bearer {key}'
  {}

{elsewhere}",
        at(API_KEYS),
        at(NODE_TOKENS),
        at("certs/edge.pem"),
        at("certs/edge-key.pem"),
        status(options),
    )
}

pub(super) fn managed(parts: &Parts<'_>) -> String {
    let Parts { options, key, nodes, .. } = parts;
    let at = |name: &str| at(options, name);
    let (host, ca, edge_yaml) = (edge_host(options), at("certs/ca.pem"), at("edge.yaml"));
    let directories: Vec<_> = nodes.iter().map(|(id, _)| at(&format!("{id}/"))).collect();
    let mut text = format!(
        "wrote {edge_yaml}, {}, {}, {}, {}, {}, {}, and {} (certificates are valid for {VALID_DAYS} days)

Shown once, kept nowhere but here:
  API key     {}

Next:
  iop-edge serve --config {edge_yaml}
",
        at(API_KEYS),
        at(NODE_TOKENS),
        at(SLOTS),
        at(KEY_FILE),
        at(ISSUER_KEY),
        at(&format!("{CA_DIR}/")),
        directories.join(", "),
        key.reveal(),
    );
    for (id, _) in nodes {
        text.push_str(&format!("  iop-node serve --config {}\n", at(&format!("{id}/node.yaml"))));
    }
    text.push_str(&format!(
        "  curl --cacert {ca} https://{host}:{OPENAI_PORT}/v1/models -H 'Authorization: Bearer {}'\n",
        key.reveal()
    ));
    if options.backend.is_some() && parts.secret.is_none() {
        text.push_str(&format!(
            "\nThe key of the backend is not there yet; slot {SLOT} is disabled until it is:
  iop slot rotate {SLOT} --config {edge_yaml} < FILE-WITH-THE-KEY
  iop slot enable {SLOT} --config {edge_yaml}\n"
        ));
    }
    text.push_str(&if options.host.is_empty() {
        format!("\nAll on this machine. For Nodes on others: {}\n", again(options))
    } else {
        format!("\nCopy each Node's directory ({}) to its machine; it is all the Node needs.\n", directories.join(", "))
    });
    text.push_str(&format!(
        "{} makes Nodes of this fleet: move it to a place that is offline. For a further Node, or a new certificate:
  iop node add NAME --config {edge_yaml} --ca {}",
        at(&format!("{CA_DIR}/")),
        at(CA_DIR),
    ));
    text
}
