use std::path::Path;

use super::*;
use crate::config::problem::Severity;
use crate::config::schema::{Kind, Object};

const HASH: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

fn good() -> String {
    format!(
        "listen: {{ openai: 127.0.0.1:8180, nodes: 127.0.0.1:8443, admin: 127.0.0.1:9190 }}
auth:
  api_keys: [ {{ id: a1b2c3d4, hash: \"{HASH}\", principal: team-a, models: [\"*\"] }} ]
nodes:
  - id: gpu-1
    token_id: n0n0n0n0
    token_hash: \"{}\"
    providers:
      - {{ id: gpu-1-vllm, kind: openai_compat, base_url: \"http://127.0.0.1:8000\", capacity: 32 }}
models:
  - name: llama-3.1-8b
    candidates: [ {{ provider: gpu-1-vllm, target: meta-llama/Llama-3.1-8B-Instruct }} ]
queue: {{ max_waiting: 1024, timeout_ms: 30000 }}
",
        HASH.replace("ba", "cd")
    )
}

fn parse(text: &str) -> (Option<EdgeConfig>, Problems) {
    let mut problems = Problems::of("edge.yaml");
    let config = EdgeConfig::parse(text, Path::new("."), &mut problems);
    (config, problems)
}

#[test]
fn the_documented_shape_is_accepted_without_a_word() {
    // CFG-1
    let (config, problems) = parse(&good());
    assert_eq!(problems.to_string(), "");
    let config = config.unwrap();
    assert_eq!(config.nodes[0].providers[0].capacity, Some(32));
    assert!(config.nodes[0].providers[0].enabled);
    assert_eq!(config.auth.api_keys[0].models, ["*"]);
    let ModelsConfig::Groups(models) = &config.models else { panic!("groups were configured") };
    assert_eq!((models[0].candidates[0].weight, models[0].aliases.len()), (1, 0));
}

#[test]
fn what_is_left_out_has_its_documented_default() {
    // CFG-1, BIN-6
    let (config, problems) = parse("nodes: []\n");
    let config = config.unwrap();
    assert_eq!(config.listen.openai, Listener::at("127.0.0.1:8180".parse().unwrap()));
    assert_eq!(config.listen.nodes, Listener::at("127.0.0.1:8443".parse().unwrap()));
    assert_eq!(config.listen.admin, Listener::at("127.0.0.1:9190".parse().unwrap()));
    assert_eq!(
        (config.queue, config.models),
        (QueueConfig { max_waiting: 1024, timeout_ms: 30_000, strategy: None }, ModelsConfig::Auto)
    );
    assert_eq!(
        config.limits,
        LimitsConfig { request_body_bytes: 33_554_432, connections: 4096, connections_per_address: 256 }
    );
    assert!(problems.sorted().iter().all(|problem| problem.severity == Severity::Warning), "{problems}");
}

/// What somebody is told who names a cause that is none.
const ALL_CAUSES: &str = "it may hold: busy, draining, disconnected, provider_unreachable, node_suspect, \
                          dispatch_unacknowledged, http_429, http_502, http_503, http_504";

/// Replace this text of the good config by that one: then there is an error in that line, with these words.
const MISTAKES: &[(&str, &str, u64, &[&str])] = &[
    ("capacity: 32", "capcity: 32", 9, &["no key `capcity`", "did you mean `capacity`?"]),
    ("queue:", "que:", 13, &["no key `que`", "did you mean `queue`?"]),
    ("principal: team-a", "teem: a", 3, &["no key `teem`", "known here: id, hash, principal, models, priority"]),
    ("capacity: 32", "capacity: 0", 9, &["`capacity` can't be 0", "1 to 65536"]),
    ("capacity: 32", "capacity: many", 9, &["whole number, not text"]),
    ("capacity: 32", "capacity: 32, long_capacity: 33", 9, &["`long_capacity` can't be larger", "(32)"]),
    ("capacity: 32", "response_stall_timeout_ms: 30", 9, &["0 or at least 1000", "milliseconds"]),
    ("kind: openai_compat", "kind: openai_compatible", 9, &["`kind` can't be", "did you mean `openai_compat`?"]),
    ("kind: openai_compat", "kind: demo", 9, &["no backend"]),
    (", base_url: \"http://127.0.0.1:8000\"", "", 9, &["needs `base_url`", "http://127.0.0.1:8000"]),
    ("\"http://127.0.0.1:8000\"", "\"127.0.0.1:8000\"", 9, &["http://127.0.0.1:8"]),
    ("\"http://127.0.0.1:8000\"", "\"http://me:key@h:1\"", 9, &["user name or password", "bearer"]),
    ("\"http://127.0.0.1:8000\"", "\"http://h:1/?key=x\"", 9, &["query"]),
    (
        "provider: gpu-1-vllm,",
        "provider: gpu-1-vlm,",
        12,
        &["no node has a provider `gpu-1-vlm`", "did you mean `gpu-1-vllm`?"],
    ),
    ("candidates: [ ", "candidates: [ ] # ", 12, &["at least one candidate"]),
    ("    token_hash", "    # token_hash", 5, &["a node needs the key `token_hash`"]),
    ("n0n0n0n0", "n0n0", 6, &["`token_id` is no token id", "8 letters or digits"]),
    ("id: gpu-1\n", "id: 17\n", 5, &["`id` must be text", "put it in quotes"]),
    ("openai: 127.0.0.1:8180", "openai: localhost:8180", 1, &["IP address and a port", "127.0.0.1:8180"]),
    ("nodes: 127.0.0.1:8443", "nodes: 127.0.0.1:8180", 1, &["`nodes` and `openai` can't both listen"]),
    (
        "admin: 127.0.0.1:9190",
        "admin: 0.0.0.0:9190",
        1,
        &["`admin` at 0.0.0.0:9190 is reachable from other machines and has no TLS"],
    ),
    (
        "admin: 127.0.0.1:9190",
        "admin: 0.0.0.0:9190",
        1,
        &[
            "asks for no key",
            "listen on 127.0.0.1, or write admin: { address: \"0.0.0.0:9190\", insecure_no_auth: true }",
        ],
    ),
    (
        "openai: 127.0.0.1:8180",
        "openai: \"[::]:8180\"",
        1,
        &["`openai` at [::]:8180", "has no TLS", "iop init", "insecure_plaintext: true"],
    ),
    ("nodes: 127.0.0.1:8443", "nodes: 10.0.0.1:8443", 1, &["`nodes` at 10.0.0.1:8443", "has no TLS", "tls: { nodes:"]),
    ("models: [\"*\"]", "models: [llama-3.1]", 3, &["no model `llama-3.1` is configured", "llama-3.1-8b"]),
    ("queue: {", "tls: { nodes: { cert: nowhere.pem, key: nowhere.key } }\nqueue: {", 13, &["nowhere.pem", "iop init"]),
    ("id: a1b2c3d4, hash", "id: a1b2c3d4, id: a1b2c3d4, hash", 3, &["id"]),
    ("capacity: 32", "auth: { bearer: sk-live-0123456789 }", 9, &["`env:NAME` or `file:PATH`", "stays on the Node"]),
    ("capacity: 32", "auth: { bearer: \"${OPENAI_API_KEY}\" }", 9, &["env:OPENAI_API_KEY"]),
    (
        "\"http://127.0.0.1:8000\"",
        "\"${IOP_TEST_NEVER_SET}\"",
        9,
        &["IOP_TEST_NEVER_SET, which is not set", "export IOP_TEST_NEVER_SET="],
    ),
    ("  - id: gpu-1\n", "  - id: gpu-1\n    provider: []\n", 6, &["no key `provider`", "did you mean `providers`?"]),
    ("models:\n", "models: all\nmodel2:\n", 10, &["`auto` or a list"]),
    ("models:\n", "models:\n  - all\n", 11, &["`auto` or a mapping"]),
    ("models:\n", "models:\n  - auto\n  - auto\n", 12, &["`auto` is there twice", "line 11"]),
    ("    candidates", "    strategy: round-robin\n    candidates", 12, &["can't be `round-robin`", "`round_robin`?"]),
    ("queue: {", "queue: { strategy: fastest,", 13, &["can't be `fastest`", "least_loaded, round_robin"]),
    ("    candidates", "    absence_grace_ms: -1\n    candidates", 12, &["can't be -1", "0 to 86400000"]),
    ("    candidates", "    queue_timeout_ms: 0\n    candidates", 12, &["can't be 0"]),
    (
        "candidates: [ {",
        "candidates: [ { provider: gpu-1-vllm, target: meta-llama/Llama-3.1-8B-Instruct }, {",
        12,
        &["`gpu-1-vllm` is there twice with one target", "`weight`"],
    ),
    ("principal: team-a", "priority: 101", 3, &["`priority` can't be 101", "-100 to 100"]),
    ("capacity: 32", "cancel_policy: abord", 9, &["did you mean `abort`?"]),
    ("    token_hash", "    enabled: no way\n    token_hash", 7, &["`enabled` must be true or false"]),
    ("queue: {", "health: { suspicion_withdraw_ms: 2999 }\nqueue: {", 13, &["0 or at least 3000", "milliseconds"]),
    ("queue: {", "admin: { api_key: x }\nqueue: {", 13, &["admin has no key `api_key`", "known here: key_hash"]),
    ("queue: {", "admin: { key_hash: hunter2 }\nqueue: {", 13, &["`key_hash` is not a hash", "iop-edge hash"]),
    ("queue: {", "admin: { key_hash: \"file:nowhere.hash\" }\nqueue: {", 13, &["nowhere.hash"]),
    ("capacity: 32", "first_response_timeout_ms: 5", 9, &["0 or at least 1000", "milliseconds"]),
    ("capacity: 32", "first_response_timeout_ms: 3600001", 9, &["can't be 3600001", "0 to 3600000"]),
    ("capacity: 32", "response_stall_timeout_ms: 3600001", 9, &["can't be 3600001", "0 to 3600000"]),
    ("capacity: 32", "response_stall_timeout_ms: 999", 9, &["`response_stall_timeout_ms` must be 0 or at least 1000"]),
    ("capacity: 32", "first_response_per_1k_prompt_ms: -1", 9, &["can't be -1", "0 to 3600000"]),
    ("capacity: 32", "probe_timeout_ms: 99", 9, &["`probe_timeout_ms` must be 0 or at least 100"]),
    ("capacity: 32", "probe_timeout_ms: 60001", 9, &["can't be 60001", "0 to 60000"]),
    ("queue: {", "health: { dispatch_ack_timeout_ms: 249 }\nqueue: {", 13, &["can't be 249", "250 to 600000"]),
    ("queue: {", "recovery: { max_extra_attempts: 11 }\nqueue: {", 13, &["can't be 11", "0 to 10"]),
    ("queue: {", "recovery: { keepalive_after_ms: soon }\nqueue: {", 13, &["whole number, not text"]),
    ("queue: {", "recovery: { retry: [busy] }\nqueue: {", 13, &["recovery has no key `retry`", "retry_on"]),
    ("queue: {", "recovery: { retry_on: busy }\nqueue: {", 13, &["`retry_on` must be a list"]),
    (
        "queue: {",
        "recovery: { retry_on: [busy, credential_rejected] }\nqueue: {",
        13,
        &["never holds `credential_rejected`: another attempt has the same key", ALL_CAUSES],
    ),
    (
        "    candidates",
        "    retry_on: [invalid_request]\n    candidates",
        12,
        &["never holds `invalid_request`: another attempt is the same request", ALL_CAUSES],
    ),
    ("queue: {", "recovery: { retry_on: [http_500] }\nqueue: {", 13, &["can't hold `http_500`", ALL_CAUSES]),
    ("    candidates", "    retry_on: [disconect]\n    candidates", 12, &["can't hold `disconect`", ALL_CAUSES]),
    ("queue: {", "recovery: { retry_on: [response_stalled] }\nqueue: {", 13, &["needs no name", ALL_CAUSES]),
];

#[test]
fn every_mistake_is_told_with_its_line_and_a_suggestion() {
    // CFG-1, BIN-4, BIN-6
    for (from, to, line, words) in MISTAKES {
        let text = good().replacen(from, to, 1);
        assert_ne!(text, good(), "{from} is not in the config");
        let (config, problems) = parse(&text);
        assert!(config.is_none() && problems.has_errors(), "{to}");
        let told = problems.sorted().iter().any(|problem| {
            let all = format!("{} {}", problem.message, problem.suggestion.as_deref().unwrap_or_default());
            problem.at.line == *line && words.iter().all(|word| all.contains(word))
        });
        assert!(told, "{to}: {words:?} in line {line} is not in\n{problems}");
        assert!(!problems.to_string().contains("sk-live"), "{problems}");
    }
}

#[test]
fn every_problem_is_told_at_once_mistakes_of_form_beside_wrong_references() {
    // BIN-4
    let text = good()
        .replace("capacity: 32", "capcity: 32")
        .replace("provider: gpu-1-vllm", "provider: gpu-2")
        .replace("openai: 127.0.0.1:8180", "openai: 0.0.0.0:8180")
        .replace("timeout_ms: 30000", "timeout_ms: soon");
    let (_, problems) = parse(&text);
    let lines: Vec<_> = problems.sorted().iter().map(|problem| problem.at.line).collect();
    assert_eq!(lines, [1, 9, 12, 13], "{problems}");
}

#[test]
fn a_plain_token_is_an_error_that_names_the_command_and_not_the_token() {
    // REG-6
    let token = iop_edge_core::token::Token::generate(iop_edge_core::token::TokenKind::ApiKey).unwrap().reveal();
    let (_, problems) = parse(&good().replacen(HASH, &token, 1));
    let text = problems.to_string();
    assert!(text.contains("edge.yaml:3:") && text.contains("iop-edge hash"), "{text}");
    assert!(!text.contains(&token[14..]), "{text}");
}

#[test]
fn names_that_are_there_twice_are_errors() {
    // CFG-1
    let twice = good().replace("models:\n", "  - id: gpu-1\n    token_id: n0n0n0n0\n    token_hash: \"sha256:00\"\n    providers: [ { id: gpu-1-vllm, kind: demo } ]\nmodels:\n");
    let (_, problems) = parse(&twice);
    let text = problems.to_string();
    for word in [
        "node `gpu-1` is there twice",
        "token id `n0n0n0n0` is there twice",
        "provider `gpu-1-vllm` is there twice",
        "line 5",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn insecure_listeners_need_their_words_on_the_listener_itself() {
    // BIN-6
    let open = good().replace("api_keys: [ {", "api_keys: [ ] # ");
    let both = "openai: { address: 0.0.0.0:8180, insecure_no_auth: true, insecure_plaintext: true }";
    let (config, problems) = parse(&open.replace("openai: 127.0.0.1:8180", both));
    assert!(config.is_some_and(|config| config.listen.openai.insecure_no_auth), "{problems}");
    for part in [", insecure_no_auth: true", ", insecure_plaintext: true"] {
        let (config, problems) = parse(&open.replace("openai: 127.0.0.1:8180", &both.replace(part, "")));
        assert!(config.is_none(), "{problems}");
        assert_eq!(problems.counts().0, 1, "{problems}");
    }
    let (config, problems) = parse(&open);
    assert!(config.is_some() && problems.to_string().contains("warning: no API key is configured"), "{problems}");
}

#[test]
fn an_environment_variable_stands_for_a_whole_text() {
    // CFG-1: PATH is set wherever tests run
    let (config, problems) = parse(&good().replace("principal: team-a", "principal: \"${PATH}\""));
    assert_eq!(config.unwrap().auth.api_keys[0].principal, std::env::var("PATH").ok(), "{problems}");
}

/// Every key of the tables, with a value that its kind accepts.
fn sample(object: &Object) -> serde_json::Value {
    object.fields.iter().map(|field| (field.name.to_owned(), sample_of(&field.kind))).collect()
}

fn sample_of(kind: &Kind) -> serde_json::Value {
    match kind {
        Kind::Address => "127.0.0.1:1".into(),
        Kind::AddressOr(object) | Kind::Object(object) => sample(object),
        Kind::AutoOr(inner) => sample_of(inner),
        Kind::Bool => true.into(),
        Kind::Choice(words) => words[0].into(),
        Kind::Closed(list) => list.words[0].into(),
        Kind::Hash => HASH.into(),
        Kind::Integer { min, .. } => (*min).into(),
        Kind::Signed { min, .. } => (*min).into(),
        Kind::List(inner) => vec![sample_of(inner)].into(),
        Kind::Reference | Kind::Secret => "env:A".into(),
        Kind::Text => "x".into(),
        Kind::Time => "2026-12-01T00:00:00Z".into(),
        Kind::TokenId => "a1b2c3d4".into(),
    }
}

#[test]
fn the_tables_and_the_types_know_the_same_keys() {
    // CFG-1: every key of a table is a field (unknown ones are refused), and each field is in a table
    let all = sample(&EDGE);
    let config: EdgeConfig = serde_json::from_value(all.clone()).unwrap();
    let debug = format!("{config:#?}");
    let keys: std::collections::BTreeSet<_> = debug
        .lines()
        .filter_map(|line| line.trim().split_once(": "))
        .map(|(key, _)| key.to_owned())
        .filter(|key| key.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit()))
        .collect();
    let mut known = std::collections::BTreeSet::new();
    collect(&all, &mut known);
    assert_eq!(keys, known);
    let node: crate::config::node::NodeFile = serde_json::from_value(sample(&crate::config::node::NODE_FILE)).unwrap();
    assert!(node.insecure_plaintext);
}

fn collect(value: &serde_json::Value, keys: &mut std::collections::BTreeSet<String>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                keys.insert(key.clone());
                collect(value, keys);
            }
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| collect(item, keys)),
        _ => {}
    }
}

#[test]
fn the_schema_closes_every_object_and_describes_every_key() {
    // CFG-1
    fn walk(schema: &serde_json::Value, objects: &mut usize) {
        if let Some(properties) = schema.get("properties").and_then(|p| p.as_object()) {
            *objects += 1;
            assert_eq!(schema["additionalProperties"], false);
            for (name, property) in properties {
                assert!(property["description"].as_str().is_some_and(|text| !text.is_empty()), "{name}");
                walk(property, objects);
            }
        }
        for part in ["items", "anyOf"] {
            match schema.get(part) {
                Some(serde_json::Value::Array(items)) => items.iter().for_each(|item| walk(item, objects)),
                Some(item) => walk(item, objects),
                None => {}
            }
        }
    }
    let schema = edge_schema();
    let mut objects = 0;
    walk(&schema, &mut objects);
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    assert_eq!(
        objects, 31,
        "root, listen and 3 listeners, tls and 2 pairs, auth, key with its limits and old secret, credentials with slot, profile and route, node and its old secret, provider and its auth and credential, model, candidate, admin, health, recovery, and 5 more"
    );
}

#[test]
fn identities_of_nodes_are_read_and_what_can_t_be_one_is_told() {
    // CRD-10, REG-6
    let with = |identities: &str| good().replacen("token_id:", &format!("identities: {identities}\n    token_id:"), 1);
    let (config, problems) = parse(&with("[\"spiffe://iop.local/iop/node/gpu-1\", \"spiffe://iop.local/iop/node/b\"]"));
    assert_eq!(problems.to_string(), "");
    assert_eq!(config.unwrap().nodes[0].identities.len(), 2);
    for (identities, expected) in [
        ("[\"gpu-1\"]", "is no workload identity of a node"),
        ("[\"spiffe://iop.local/iop/edge/gpu-1\"]", "is no workload identity of a node"),
        ("[\"spiffe://else/iop/node/gpu-1\"]", "is of another trust domain than `iop.local`"),
        ("[]", "`identities` is empty"),
        (
            "[\"spiffe://iop.local/iop/node/x\", \"spiffe://iop.local/iop/node/x\"]",
            "workload identity `spiffe://iop.local/iop/node/x` is there twice",
        ),
    ] {
        let (_, problems) = parse(&with(identities));
        assert!(problems.to_string().contains(expected), "{identities}: {problems}");
    }
    let (_, problems) = parse(&("trust_domain: \"Not A Domain\"\n".to_owned() + &good()));
    assert!(problems.to_string().contains("`trust_domain` can't be"), "{problems}");
    // Without a CA whose certificates are believed nobody is asked for an identity, so any id will do.
    let odd = good().replacen("id: gpu-1\n", "id: \"gpu/1\"\n", 1);
    assert_eq!(parse(&odd).1.to_string(), "");
    let mut problems = Problems::of("edge.yaml");
    let managed = odd.replacen("queue:", "tls: { nodes: { cert: a, key: b, client_ca: c } }\nqueue:", 1);
    let _ = EdgeConfig::parse(&managed, Path::new("/nowhere"), &mut problems);
    let text = problems.to_string();
    assert!(text.contains("the id of a node can't stand in a workload identity"), "{text}");
    assert!(text.contains("certificate /nowhere/c"), "{text}");
}

#[test]
fn a_models_threshold_and_the_links_congestion_control_are_read() {
    // LEA-2, WIR-11
    let text = format!("{}\nlink: {{ congestion: bbr }}\n", good()).replacen(
        "candidates:",
        "long_context_threshold: 32768\n    candidates:",
        1,
    );
    let mut problems = Problems::of("edge.yaml");
    let config = EdgeConfig::parse(&text, Path::new("."), &mut problems).unwrap();
    assert!(!problems.has_errors(), "{problems}");
    assert_eq!(config.link.congestion, crate::config::link::CongestionConfig::Bbr);
    let ModelsConfig::Groups(groups) = &config.models else { panic!("groups") };
    assert_eq!(groups[0].long_context_threshold, Some(32_768));
}

#[test]
fn models_may_be_auto_a_list_or_a_list_with_auto() {
    // CFG-3
    let name = |config: &EdgeConfig| config.models.groups().iter().map(|group| group.name.clone()).collect::<Vec<_>>();
    let with = |models: &str| {
        let text = good().replacen("models:\n", models, 1);
        parse(&text).0.unwrap_or_else(|| panic!("{}", parse(&text).1))
    };
    let list = with("models:\n");
    assert_eq!((list.models.is_auto(), name(&list)), (false, vec!["llama-3.1-8b".to_owned()]));
    let both = with("models:\n  - auto\n");
    assert_eq!((both.models.is_auto(), name(&both)), (true, vec!["llama-3.1-8b".to_owned()]));
    let (auto, _) = parse("nodes: []\nmodels: [auto]\n");
    assert!(auto.is_some_and(|config| config.models.is_auto() && config.models.groups().is_empty()));
    // A key for a model that only a provider lists can't be checked before it is there.
    let (config, problems) =
        parse(&good().replacen("models:\n", "models:\n  - auto\n", 1).replace("[\"*\"]", "[qwen]"));
    assert!(config.is_some(), "{problems}");
    let loaded = LoadedEdge { config: both, path: PathBuf::new() };
    let catalog = loaded.catalog(7, 3).unwrap();
    assert_eq!((catalog.models_auto(), catalog.models().len(), catalog.created(), catalog.revision()), (true, 1, 7, 3));
}

#[test]
fn what_a_model_says_goes_before_what_the_queue_says() {
    // CFG-1, SEL-1, QUE-1, FEN-3
    use iop_edge_core::catalog::Strategy;
    use std::time::Duration;
    let own =
        "strategy: ordered\n    absence_grace_ms: 20000\n    max_waiting: 7\n    queue_timeout_ms: 9\n    candidates";
    let text = good().replacen("    candidates", &format!("    {own}"), 1);
    let text = text.replacen("queue: {", "queue: { strategy: round_robin,", 1);
    let text =
        text.replacen("models:\n", "models:\n  - { name: other, candidates: [ { provider: gpu-1-vllm } ] }\n", 1);
    let (config, problems) = parse(&text);
    let loaded = LoadedEdge { config: config.unwrap_or_else(|| panic!("{problems}")), path: PathBuf::new() };
    let catalog = loaded.catalog(0, 1).unwrap();
    let [other, own] = catalog.models() else { panic!("two models") };
    assert_eq!((own.strategy, own.max_waiting), (Some(Strategy::Ordered), 7));
    assert_eq!((own.queue_timeout, own.absence_grace), (Duration::from_millis(9), Duration::from_secs(20)));
    assert_eq!((other.strategy, other.max_waiting), (Some(Strategy::RoundRobin), 1024));
    assert_eq!((other.queue_timeout, other.absence_grace), (Duration::from_secs(30), Duration::ZERO));
    assert_eq!(catalog.auto_strategy(), Some(Strategy::RoundRobin));
}

#[test]
fn every_strategy_of_the_engine_has_its_word() {
    // SEL-1
    use iop_edge_core::catalog::Strategy;
    for strategy in Strategy::ALL {
        assert!(STRATEGIES.contains(&strategy.as_str()), "{strategy}");
        let config: StrategyConfig = serde_json::from_value(strategy.as_str().into()).unwrap();
        assert_eq!(Strategy::from(config), *strategy);
    }
}

#[test]
fn suspicion_may_be_off_and_has_the_engines_bounds() {
    // FEN-7
    use iop_edge_core::catalog::{DEFAULT_SUSPICION_WITHDRAW, MIN_SUSPICION_WITHDRAW};
    use std::time::Duration;
    assert_eq!(Duration::from_millis(table::MIN_SUSPICION_WITHDRAW_MS), MIN_SUSPICION_WITHDRAW);
    let after = |health: &str| {
        let (config, problems) = parse(&format!("{}{health}", good()));
        let config = config.unwrap_or_else(|| panic!("{problems}"));
        LoadedEdge { config, path: PathBuf::new() }.catalog(0, 1).unwrap().suspicion_withdraw()
    };
    assert_eq!(after(""), Some(DEFAULT_SUSPICION_WITHDRAW));
    assert_eq!(after("health: { suspicion_withdraw_ms: 3000 }\n"), Some(MIN_SUSPICION_WITHDRAW));
    assert_eq!(after("health: { suspicion_withdraw_ms: 0 }\n"), None);
}

#[test]
fn nodes_providers_and_keys_carry_their_new_settings() {
    // CFG-1, SEC-4
    let text = good()
        .replace("capacity: 32", "capacity: 32, cancel_policy: drain")
        .replace("    token_hash", "    enabled: false\n    token_hash")
        .replace("principal: team-a", "principal: team-a, priority: -3")
        + &format!("admin: {{ key_hash: \"{}\" }}\n", HASH.replace("ba", "ef"));
    let (config, problems) = parse(&text);
    let loaded = LoadedEdge { config: config.unwrap_or_else(|| panic!("{problems}")), path: PathBuf::new() };
    assert_eq!(loaded.config.auth.api_keys[0].priority, -3);
    let catalog = loaded.catalog(0, 1).unwrap();
    let node = &catalog.nodes()[0];
    assert!(!node.enabled);
    assert_eq!(node.providers[0].config.cancel_policy, iop_wire::CancelPolicy::Drain);
    assert!(loaded.admin_key().unwrap().is_some());
    let (config, _) = parse(&good());
    assert!(LoadedEdge { config: config.unwrap(), path: PathBuf::new() }.admin_key().unwrap().is_none());
}

#[test]
fn settings_that_mean_nothing_together_are_told() {
    // BIN-4
    let told = |from: &str, to: &str| parse(&good().replacen(from, to, 1)).1.to_string();
    let text = told("    candidates: [ {", "    strategy: ordered\n    candidates: [ { weight: 2,");
    assert!(text.contains("warning: `strategy: ordered`"), "{text}");
    let text = told("    candidates", "    max_waiting: 0\n    absence_grace_ms: 5\n    candidates");
    assert!(text.contains("warning: `max_waiting: 0`"), "{text}");
    let text = told("queue: {", &format!("admin: {{ key_hash: \"{HASH}\" }}\nqueue: {{"));
    assert!(text.contains("error: the admin key has the hash of the API key in line 3"), "{text}");
}

#[test]
fn recovery_is_read_and_a_model_goes_before_it() {
    // CFG-1, CFG-3, REC-4, REC-5, REC-8, WIR-14
    use iop_edge_core::catalog::{RetryCause, RetryOn};
    use iop_edge_core::openai::OpenAiConfig;
    use iop_wire::limits::{DISPATCH_ACK_TIMEOUT, MIN_DISPATCH_ACK_TIMEOUT};
    use std::time::Duration;
    let loaded = |text: &str| {
        let (config, problems) = parse(text);
        assert_eq!(problems.to_string(), "");
        LoadedEdge { config: config.unwrap(), path: PathBuf::new() }
    };
    let (plain, engine) = (loaded(&good()), OpenAiConfig::default());
    let (catalog, openai) = (plain.catalog(0, 1).unwrap(), plain.openai().unwrap());
    assert_eq!((catalog.retry_on(), catalog.models()[0].retry_on), (RetryOn::default(), None));
    assert_eq!(catalog.dispatch_ack_timeout(), DISPATCH_ACK_TIMEOUT);
    assert_eq!(
        (openai.max_extra_attempts, openai.keepalive_after),
        (engine.max_extra_attempts, engine.keepalive_after)
    );

    let text = good().replacen("    candidates", "    retry_on: []\n    candidates", 1).replacen(
        "models:\n",
        "models:\n  - { name: other, candidates: [ { provider: gpu-1-vllm } ], retry_on: [draining] }\n",
        1,
    ) + "recovery: { max_extra_attempts: 1, retry_on: [http_503, busy], keepalive_after_ms: 0 }\n\
           health: { dispatch_ack_timeout_ms: 250 }\n";
    let loaded = loaded(&text);
    let (catalog, openai) = (loaded.catalog(0, 1).unwrap(), loaded.openai().unwrap());
    assert_eq!(catalog.retry_on(), RetryOn::of(&[RetryCause::Busy, RetryCause::Http503]));
    let [other, own] = catalog.models() else { panic!("two models") };
    assert_eq!((own.retry_on, other.retry_on), (Some(RetryOn::NONE), Some(RetryOn::of(&[RetryCause::Draining]))));
    assert_eq!((openai.max_extra_attempts, openai.keepalive_after), (1, Duration::ZERO));
    assert_eq!(catalog.dispatch_ack_timeout(), MIN_DISPATCH_ACK_TIMEOUT);
    assert_eq!(MIN_DISPATCH_ACK_TIMEOUT, Duration::from_millis(table::MIN_DISPATCH_ACK_MS));
}

#[test]
fn every_cause_of_the_engine_has_its_word() {
    // REC-5
    use iop_edge_core::catalog::{RetryCause, RetryOn};
    let words: Vec<_> = RetryCause::ALL.iter().map(|cause| cause.as_str()).collect();
    assert_eq!(RETRY_CAUSES, words);
    for cause in RetryCause::ALL {
        let list: RetryList = serde_json::from_value(vec![cause.as_str()].into()).unwrap();
        assert_eq!(list.0, RetryOn::of(&[*cause]));
    }
    assert!(serde_json::from_value::<RetryList>(vec!["credential_rejected"].into()).is_err());
}

#[test]
fn a_provider_carries_its_timers_to_the_node() {
    // WDG-3, WDG-7
    let timers = "response_stall_timeout_ms: 60000, first_response_timeout_ms: 120000, first_response_per_1k_prompt_ms: 900, \
                  probe_timeout_ms: 100, close_grace_ms: 7";
    let (config, problems) = parse(&good().replace("capacity: 32", timers));
    assert_eq!(problems.to_string(), "");
    let provider = config.unwrap().nodes[0].providers[0].provider_config().unwrap();
    assert_eq!((provider.response_stall_timeout_ms, provider.first_response_timeout_ms), (60_000, 120_000));
    assert_eq!((provider.stall_per_1k_prompt_ms, provider.probe_timeout_ms, provider.close_grace_ms), (900, 100, 7));
}

#[test]
fn timers_and_causes_that_mean_nothing_are_told() {
    // BIN-4, WDG-7
    let told = |from: &str, to: &str| parse(&good().replacen(from, to, 1)).1.to_string();
    let text = told("capacity: 32", "first_response_timeout_ms: 60000");
    assert!(
        text.contains("warning: `first_response_timeout_ms` is shorter") && text.contains("above 300000"),
        "{text}"
    );
    let text = told("capacity: 32", "response_stall_timeout_ms: 60000, first_response_timeout_ms: 60000");
    assert_eq!(text, "");
    let text = told("queue: {", "recovery: { max_extra_attempts: 0, retry_on: [busy] }\nqueue: {");
    assert!(text.contains("warning: `max_extra_attempts: 0`"), "{text}");
}
