//! Decides what must fit together in `edge.yaml`: names that refer to each other, files, addresses, protection.
//!
//! It reads the tree and not the typed config, so that it says its part of a file that has other mistakes too.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::path::Path;

use iop_adapters::http::{InvalidOrigin, Origin};
use iop_edge_core::openai::AllowedOrigins;
use iop_execution::StallTimeout;
use iop_wire::{TrustDomain, WorkloadIdentity, WorkloadRole};

use super::records::{API_KEYS, Files, Form, NODE_TOKENS, RecordFile};
use super::table::{MIN_PROBE_MS, MIN_STALL_MS, MIN_SUSPICION_WITHDRAW_MS};
use super::{ADMIN_PORT, Listener, NODES_PORT, OPENAI_PORT};
use crate::config::exposure::{Exposed, Protection, exposed, is_loopback};
use crate::config::problem::{Position, Problems, did_you_mean};
use crate::config::secret::{readable_by_all, resolve_hash, resolve_path};
use crate::config::tree::{Tree, Value};
use crate::tls;

pub(super) fn cross(tree: &Tree, files: &Files, base: &Path, problems: &mut Problems) {
    let providers = nodes(tree, files, base, problems);
    models(tree, files, &providers, problems);
    keys(tree, files, base, problems);
    admin(tree, base, problems);
    super::credentials::check(&files.grafted(tree), base, problems);
    health(tree, problems);
    recovery(tree, problems);
    tls_files(tree, base, problems);
    identities(tree, problems);
    cors(tree, problems);
    listeners(tree, files, problems);
}

/// The records of a file.
fn listed<'a>(file: Option<&'a RecordFile>, form: &'static Form) -> &'a [Tree] {
    file.map(|file| file.tree.list(form.list)).unwrap_or_default()
}

/// Names that must be unique, and where each was first.
#[derive(Default)]
pub(super) struct Unique<'a>(HashMap<&'a str, Position>);

impl<'a> Unique<'a> {
    pub(super) fn add(&mut self, what: &str, name: &'a str, at: Position, problems: &mut Problems) {
        if name.len() > iop_execution::id::MAX_NAME_BYTES {
            problems.error(at, format!("{what} is longer than 256 bytes"), None);
        }
        match self.0.get(name) {
            Some(first) => problems.error(
                at,
                format!("{what} `{}` is there twice", name.escape_debug()),
                Some(format!("the first one is in line {}", first.line)),
            ),
            None => {
                self.0.insert(name, at);
            }
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn names(&self) -> Vec<&'a str> {
        let mut names: Vec<_> = self.0.keys().copied().collect();
        names.sort_unstable();
        names
    }
}

/// Tokens of the file: whose they are, and that nobody has two.
fn node_tokens<'a>(
    tree: &'a Tree,
    file: &'a RecordFile,
    (tokens, hashes): (&mut Unique<'a>, &mut Unique<'a>),
    base: &Path,
    problems: &mut Problems,
) {
    let mut own = Problems::of(file.path.display().to_string());
    let known: Vec<_> = tree.list("nodes").iter().filter_map(|node| node.text("id")).map(|(id, _)| id).collect();
    let mut owners = Unique::default();
    for record in file.tree.list(NODE_TOKENS.list) {
        if let Some((node, at)) = record.text("node") {
            owners.add("token of node", node, at, &mut own);
            if !known.contains(&node) {
                let message = format!("edge.yaml has no node `{}`: its token opens nothing", node.escape_debug());
                own.warning(at, message, did_you_mean(node, &known));
            }
            let stands = tree.list("nodes").iter().find(|known| known.text("id").is_some_and(|(id, _)| id == node));
            if let Some((_, elsewhere)) = stands.and_then(|node| node.text("token_hash")) {
                let message = format!("node `{}` has a token in edge.yaml, too", node.escape_debug());
                own.error(at, message, Some(format!("take `token_hash` out of line {} there", elsewhere.line)));
            }
        }
        if let Some((id, at)) = record.text("token_id") {
            tokens.add("token id", id, at, &mut own);
        }
        if let Some((hash, at)) = record.text("token_hash") {
            hashes.add("token hash", hash, at, &mut own);
            hash_file(hash, at, base, &mut own);
        }
        previous(record.get("previous"), base, &mut own);
    }
    problems.absorb(&own, file.at);
}

/// A Node without a token can't connect.
fn has_token(node: &Tree, files: &Files, managed: bool, problems: &mut Problems) {
    let Some((id, at)) = node.text("id") else { return };
    if node.get("token_hash").is_some() {
        return;
    }
    match &files.node_tokens {
        Some(file) => {
            let mut records = file.tree.list(NODE_TOKENS.list).iter();
            if !records.any(|record| record.text("node").is_some_and(|(of, _)| of == id)) {
                let message = format!("node `{}` has no token: it can't connect", id.escape_debug());
                let command = if managed { "iop node add" } else { "iop token new" };
                problems.warning(at, message, Some(format!("{command} {id}")));
            }
        }
        None => problems.error(
            node.at,
            "a node needs the key `token_hash`",
            Some("token_hash: `sha256:` of the token's secret part, from `iop-edge hash --new node`".to_owned()),
        ),
    }
}

/// A secret from before a rotation.
fn previous(record: Option<&Tree>, base: &Path, problems: &mut Problems) {
    if let Some((hash, at)) = record.and_then(|previous| previous.text("hash")) {
        hash_file(hash, at, base, problems);
    }
}

fn nodes<'a>(tree: &'a Tree, files: &'a Files, base: &Path, problems: &mut Problems) -> Unique<'a> {
    let (mut nodes, mut tokens, mut hashes, mut providers) =
        (Unique::default(), Unique::default(), Unique::default(), Unique::default());
    if tree.list("nodes").is_empty() {
        problems.warning(
            tree.get("nodes").map_or(tree.at, |nodes| nodes.at),
            "no node is configured: nothing can be served",
            Some("add one under `nodes:`, or let `iop init` write a config".to_owned()),
        );
    }
    for node in tree.list("nodes") {
        if let Some((id, at)) = node.text("id") {
            nodes.add("node", id, at, problems);
        }
        if let Some((id, at)) = node.text("token_id") {
            tokens.add("token id", id, at, problems);
        }
        if let Some((hash, at)) = node.text("token_hash") {
            hashes.add("token hash", hash, at, problems);
            hash_file(hash, at, base, problems);
        }
        previous(node.get("previous_token"), base, problems);
        has_token(node, files, shows_certificates(tree), problems);
        let mut adapters = Unique::default();
        for provider in node.list("providers") {
            if let Some((id, at)) = provider.text("id") {
                providers.add("provider", id, at, problems);
            }
            if let Some((adapter, at)) = provider.text("adapter").or_else(|| provider.text("id")) {
                adapters.add("adapter", adapter, at, problems);
            }
            one_provider(provider, problems);
        }
    }
    if let Some(file) = &files.node_tokens {
        node_tokens(tree, file, (&mut tokens, &mut hashes), base, problems);
    }
    providers
}

fn one_provider(provider: &Tree, problems: &mut Problems) {
    let kind = provider.text("kind").map(|(kind, _)| kind);
    match (kind, provider.text("base_url")) {
        (Some("demo"), Some((_, at))) => problems.error(at, "kind `demo` has no backend, and so no `base_url`", None),
        (Some("demo") | None, None) => {}
        (_, Some((url, at))) => {
            if let Err(error) = Origin::parse(url) {
                let hint = match error {
                    InvalidOrigin::UserInfo => "name the key under `auth: { bearer: \"env:NAME\" }`",
                    _ => "for example http://127.0.0.1:8000",
                };
                problems.error(at, format!("`base_url`: {error}"), Some(hint.to_owned()));
            }
        }
        (Some(kind), None) if super::KINDS.contains(&kind) => {
            let port = crate::adapters::usual_port(kind);
            problems.error(
                provider.at,
                format!("a provider of kind `{kind}` needs `base_url`"),
                Some(format!("base_url: \"http://127.0.0.1:{port}\"")),
            );
        }
        (Some(_), None) => {}
    }
    timers(provider, problems);
    if let (Some((long, at)), Some((all, _))) = (provider.int("long_capacity"), provider.int("capacity"))
        && long > all
    {
        problems.error(at, format!("`long_capacity` can't be larger than `capacity` ({all})"), None);
    }
}

fn timers(provider: &Tree, problems: &mut Problems) {
    for (name, least) in [
        ("response_stall_timeout_ms", MIN_STALL_MS),
        ("first_response_timeout_ms", MIN_STALL_MS),
        ("probe_timeout_ms", MIN_PROBE_MS),
    ] {
        if let Some((set, at)) = provider.int(name)
            && (1..i128::from(least)).contains(&set)
        {
            let message = format!("`{name}` must be 0 or at least {least}");
            problems.error(at, message, Some("it is in milliseconds; 0 = default".to_owned()));
        }
    }
    let stall = provider.int("response_stall_timeout_ms").map_or(0, |(set, _)| set);
    let stall = if stall == 0 { i128::from(StallTimeout::DEFAULT_MS) } else { stall };
    if let Some((first, at)) = provider.int("first_response_timeout_ms")
        && first > 0
        && first < stall
    {
        let message =
            "`first_response_timeout_ms` is shorter than `response_stall_timeout_ms`, so that it means nothing";
        let suggestion = format!("set it above {stall}, or shorten `response_stall_timeout_ms`");
        problems.warning(at, message, Some(suggestion));
    }
}

fn models<'a>(tree: &'a Tree, files: &'a Files, providers: &Unique<'a>, problems: &mut Problems) {
    let mut names = Unique::default();
    let known = providers.names();
    let mut auto: Option<Position> = None;
    for model in tree.list("models") {
        if matches!(&model.value, Value::Text(word) if word == "auto") {
            match auto {
                Some(first) => problems.error(
                    model.at,
                    "`auto` is there twice",
                    Some(format!("the first one is in line {}", first.line)),
                ),
                None => auto = Some(model.at),
            }
        }
        if let Some((name, at)) = model.text("name") {
            names.add("model", name, at, problems);
        }
        for alias in model.list("aliases") {
            if let Value::Text(name) = &alias.value {
                names.add("model", name, alias.at, problems);
            }
        }
        if model.get("candidates").is_some_and(|list| matches!(&list.value, Value::List(items) if items.is_empty())) {
            problems.error(model.at("candidates"), "a model needs at least one candidate", None);
        }
        for candidate in model.list("candidates") {
            if let Some((provider, at)) = candidate.text("provider")
                && !providers.0.contains_key(provider)
            {
                let message = format!("no node has a provider `{}`", provider.escape_debug());
                problems.error(at, message, did_you_mean(provider, &known));
            }
        }
        candidates(model, problems);
    }
    // What providers list is known only when they are there.
    let explicit = auto.is_none() && tree.get("models").is_some_and(|models| matches!(models.value, Value::List(_)));
    if !explicit {
        return;
    }
    for key in tree.get("auth").map(|auth| auth.list("api_keys")).unwrap_or_default() {
        allowed_models(key, &names, problems);
    }
    if let Some(file) = &files.api_keys {
        let mut own = Problems::of(file.path.display().to_string());
        file.tree.list(API_KEYS.list).iter().for_each(|key| allowed_models(key, &names, &mut own));
        problems.absorb(&own, file.at);
    }
}

/// Models that a key may use must be there.
fn allowed_models(key: &Tree, names: &Unique<'_>, problems: &mut Problems) {
    for allowed in key.list("models") {
        if let Value::Text(name) = &allowed.value
            && name != "*"
            && !names.0.contains_key(name.as_str())
        {
            let message = format!("no model `{}` is configured", name.escape_debug());
            problems.error(allowed.at, message, did_you_mean(name, &names.names()));
        }
    }
}

/// What of a model's settings its candidates make void.
fn candidates(model: &Tree, problems: &mut Problems) {
    let list = model.list("candidates");
    let mut seen = HashMap::new();
    for candidate in list {
        let Some((provider, at)) = candidate.text("provider") else { continue };
        let target = candidate.text("target").or_else(|| model.text("name")).map(|(target, _)| target);
        if let Some(first) = seen.insert((provider, target), at) {
            let message = format!("provider `{}` is there twice with one target", provider.escape_debug());
            let suggestion = format!("the first one is in line {}; `weight` gives it a larger share", first.line);
            problems.error(at, message, Some(suggestion));
        }
    }
    if let (Some(("ordered", at)), Some((weighted, _))) =
        (model.text("strategy"), list.iter().find_map(|candidate| candidate.int("weight")))
        && weighted != 1
    {
        problems.warning(
            at,
            "`strategy: ordered` takes the first candidate that has a place: `weight` means nothing",
            None,
        );
    }
    if let (Some((0, at)), Some((grace, _))) = (model.int("max_waiting"), model.int("absence_grace_ms"))
        && grace > 0
    {
        let message = "`max_waiting: 0` lets nobody wait, so `absence_grace_ms` means nothing";
        problems.warning(at, message, Some("leave one of them out".to_owned()));
    }
}

fn admin(tree: &Tree, base: &Path, problems: &mut Problems) {
    let key = tree.get("admin").and_then(|admin| admin.text("key_hash"));
    let Some((hash, at)) = key else { return };
    hash_file(hash, at, base, problems);
    let clients = tree.get("auth").map(|auth| auth.list("api_keys")).unwrap_or_default();
    if let Some((_, client)) = clients.iter().filter_map(|key| key.text("hash")).find(|(known, _)| *known == hash) {
        let message = format!("the admin key has the hash of the API key in line {}", client.line);
        problems.error(at, message, Some("make a key of its own: iop-edge hash --new admin".to_owned()));
    }
}

fn health(tree: &Tree, problems: &mut Problems) {
    let after = tree.get("health").and_then(|health| health.int("suspicion_withdraw_ms"));
    if let Some((after, at)) = after
        && (1..i128::from(MIN_SUSPICION_WITHDRAW_MS)).contains(&after)
    {
        let message = format!("`suspicion_withdraw_ms` must be 0 or at least {MIN_SUSPICION_WITHDRAW_MS}");
        problems.error(at, message, Some("it is in milliseconds; 0 = never".to_owned()));
    }
}

fn recovery(tree: &Tree, problems: &mut Problems) {
    let Some(recovery) = tree.get("recovery") else { return };
    if let (Some((0, _)), Some(causes)) = (recovery.int("max_extra_attempts"), recovery.get("retry_on")) {
        let message = "`max_extra_attempts: 0` sends nothing again, so `retry_on` means nothing";
        problems.warning(causes.at, message, Some("leave one of them out".to_owned()));
    }
}

fn keys(tree: &Tree, files: &Files, base: &Path, problems: &mut Problems) {
    let (mut ids, mut hashes) = (Unique::default(), Unique::default());
    let here = tree.get("auth").map(|auth| auth.list("api_keys")).unwrap_or_default();
    for key in here {
        one_key(key, (&mut ids, &mut hashes), base, problems);
    }
    if let Some(file) = &files.api_keys {
        let mut own = Problems::of(file.path.display().to_string());
        for key in file.tree.list(API_KEYS.list) {
            one_key(key, (&mut ids, &mut hashes), base, &mut own);
        }
        problems.absorb(&own, file.at);
        if here.is_empty() && listed(files.api_keys.as_ref(), &API_KEYS).is_empty() {
            problems.warning(file.at, "there is no API key: nobody may call", Some("iop key new".to_owned()));
        }
    }
}

fn one_key<'a>(key: &'a Tree, (ids, hashes): (&mut Unique<'a>, &mut Unique<'a>), base: &Path, problems: &mut Problems) {
    if let Some((id, at)) = key.text("id") {
        ids.add("API key", id, at, problems);
    }
    if let Some((hash, at)) = key.text("hash") {
        hashes.add("API key hash", hash, at, problems);
        hash_file(hash, at, base, problems);
    }
    previous(key.get("previous"), base, problems);
    let usual = key.int("priority").map_or(0, |(usual, _)| usual);
    if let Some((max, at)) = key.int("max_priority")
        && max < usual
    {
        let message = format!("`max_priority` is lower than the key's own priority ({usual})");
        problems.error(at, message, Some("set it to that or above, or leave it out".to_owned()));
    }
}

fn hash_file(text: &str, at: Position, base: &Path, problems: &mut Problems) {
    if text.starts_with("file:")
        && let Err(message) = resolve_hash(base, text)
    {
        problems.error(at, message, None);
    }
}

fn tls_files(tree: &Tree, base: &Path, problems: &mut Problems) {
    let mut told = BTreeSet::new();
    for name in ["openai", "nodes"] {
        let Some(pair) = tree.get("tls").and_then(|tls| tls.get(name)) else { continue };
        if let (Some((cert, cert_at)), Some((key, key_at))) = (pair.text("cert"), pair.text("key")) {
            let key = resolve_path(base, key);
            if let Err(error) = tls::load_pair(&resolve_path(base, cert), &key) {
                let at = if error.is_about_key() { key_at } else { cert_at };
                problems.error(at, error.to_string(), Some("`iop init` makes a certificate for tests".to_owned()));
            }
            // Both listeners may have one pair: it is told once.
            if told.insert(key.clone()) {
                readable_by_all(&key, key_at, problems);
            }
        }
        if let Some((ca, at)) = pair.text("client_ca")
            && let Err(error) = tls::load_roots(&resolve_path(base, ca))
        {
            problems.error(at, error.to_string(), Some("it must hold the CA of the Nodes' certificates".to_owned()));
        }
    }
}

fn cors(tree: &Tree, problems: &mut Problems) {
    for item in tree.get("cors").map(|cors| cors.list("allowed_origins")).unwrap_or_default() {
        let Value::Text(text) = &item.value else { continue };
        if let Err(error) = AllowedOrigins::new([text]) {
            problems.error(item.at, format!("`{}`: {error}", text.escape_debug()), None);
        }
    }
}

/// True if Nodes are asked for a certificate.
fn shows_certificates(tree: &Tree) -> bool {
    tree.get("tls").and_then(|tls| tls.get("nodes")).is_some_and(|nodes| nodes.get("client_ca").is_some())
}

/// Identities of Nodes, and that each Node has one where one is asked for.
fn identities(tree: &Tree, problems: &mut Problems) {
    let domain = match tree.text("trust_domain") {
        Some((text, at)) => match TrustDomain::new(text) {
            Ok(domain) => domain,
            Err(_) => {
                let message = format!("`trust_domain` can't be `{}`", text.escape_debug());
                return problems.error(at, message, Some("small letters, digits, `.`, `-` and `_`".to_owned()));
            }
        },
        None => TrustDomain::default(),
    };
    let required = shows_certificates(tree);
    let mut seen = Unique::default();
    for node in tree.list("nodes") {
        let Some((id, id_at)) = node.text("id") else { continue };
        let example = format!("spiffe://{domain}/iop/node/{}", if id.contains('/') { "NAME" } else { id });
        let Some(given) = node.get("identities") else {
            if required && WorkloadIdentity::new(domain.clone(), WorkloadRole::Node, id).is_err() {
                let message = "the id of a node can't stand in a workload identity, and `identities` names no other";
                problems.error(id_at, message, Some("use A-Z a-z 0-9 . - _, or write `identities`".to_owned()));
            }
            continue;
        };
        if node.list("identities").is_empty() {
            problems.error(given.at, "`identities` is empty", Some(format!("leave it out for [\"{example}\"]")));
        }
        for item in node.list("identities") {
            let Value::Text(text) = &item.value else { continue };
            seen.add("workload identity", text, item.at, problems);
            match WorkloadIdentity::parse(text).ok().filter(|identity| identity.role() == WorkloadRole::Node) {
                Some(identity) if *identity.trust_domain() == domain => {}
                Some(_) => {
                    let message = format!("`{text}` is of another trust domain than `{domain}`");
                    problems.error(item.at, message, Some("set `trust_domain`, or change it".to_owned()));
                }
                None => {
                    let message = format!("`{}` is no workload identity of a node", text.escape_debug());
                    problems.error(item.at, message, Some(format!("for example {example}")));
                }
            }
        }
    }
}

fn listeners(tree: &Tree, files: &Files, problems: &mut Problems) {
    let has_keys = files.api_keys.is_some() || tree.get("auth").is_some_and(|auth| !auth.list("api_keys").is_empty());
    let has_tls = |name: &str| tree.get("tls").is_some_and(|tls| tls.get(name).is_some());
    let mut seen: Vec<(&str, SocketAddr)> = Vec::new();
    for (name, port, auth, tls) in [
        ("openai", OPENAI_PORT, has_keys, has_tls("openai")),
        ("nodes", NODES_PORT, true, has_tls("nodes")),
        ("admin", ADMIN_PORT, false, false),
    ] {
        let place = tree.get("listen").and_then(|listen| listen.get(name));
        let at = place.map_or(tree.at, |place| place.at);
        let address = place.and_then(|place| match &place.value {
            Value::Text(text) => Some(text.as_str()),
            _ => place.text("address").map(|(text, _)| text),
        });
        let address = match address.map(str::parse::<SocketAddr>) {
            Some(Ok(address)) => address,
            Some(Err(_)) => continue, // said by the table
            None => Listener::loopback(port).address,
        };
        if let Some((other, _)) = seen.iter().find(|(_, used)| *used == address && address.port() != 0) {
            problems.error(at, format!("`{name}` and `{other}` can't both listen at {address}"), None);
        }
        seen.push((name, address));
        let set = |key: &str| place.is_some_and(|place| place.is_set(key));
        let protection = Protection {
            auth,
            tls,
            insecure_no_auth: set("insecure_no_auth"),
            insecure_plaintext: set("insecure_plaintext"),
        };
        for exposed in exposed(address, protection) {
            let fix = fix(name, address, exposed);
            problems.error(at, format!("the listener `{name}` at {address} {exposed}"), Some(fix));
        }
        if name == "openai" && !auth && is_loopback(address) {
            problems.warning(at, "no API key is configured: every program on this machine may use it", None);
        }
    }
}

fn fix(name: &str, address: SocketAddr, exposed: Exposed) -> String {
    let insecure = |key: &str| format!("{name}: {{ address: \"{address}\", {key}: true }}");
    match (name, exposed) {
        ("openai", Exposed::NoAuth) => {
            format!(
                "add a key under `auth.api_keys` (`iop key new` makes one), or write {}",
                insecure("insecure_no_auth")
            )
        }
        ("admin", Exposed::NoAuth) => {
            format!("metrics have no key: listen on 127.0.0.1, or write {}", insecure("insecure_no_auth"))
        }
        ("admin", Exposed::NoTls) => {
            format!(
                "metrics and the admin API have no TLS: listen on 127.0.0.1, or write {}",
                insecure("insecure_plaintext")
            )
        }
        (_, Exposed::NoAuth) => insecure("insecure_no_auth"),
        (_, Exposed::NoTls) => {
            format!(
                "write tls: {{ {name}: {{ cert: …, key: … }} }} (`iop init` makes them), or {}",
                insecure("insecure_plaintext")
            )
        }
    }
}
