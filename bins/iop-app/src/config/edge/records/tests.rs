use iop_edge_core::token::{Token, TokenKind};

use crate::config::edge::{EdgeConfig, LoadedEdge};
use crate::config::problem::Problems;
use crate::testdir::TestDir;

fn hash(kind: TokenKind) -> String {
    Token::generate(kind).unwrap().hash().to_string()
}

/// An edge.yaml that names both files; what it holds of its own is `auth` and `node`.
fn written(dir: &TestDir, auth: &str, node: &str, keys: &str, tokens: &str) -> (Option<LoadedEdge>, Problems) {
    let text = format!(
        "auth:\n  api_keys_file: keys.yaml\n  node_tokens_file: tokens.yaml\n{auth}nodes:\n  - id: gpu-1\n{node}    \
         providers: [ {{ id: p, kind: demo }} ]\nmodels: auto\n"
    );
    dir.write("keys.yaml", keys);
    dir.write("tokens.yaml", tokens);
    EdgeConfig::load(&dir.write("edge.yaml", &text))
}

#[test]
fn records_of_both_files_are_a_part_of_the_config() {
    // CRD-12, BIN-3
    let dir = TestDir::new();
    let (key, old, token) = (hash(TokenKind::ApiKey), hash(TokenKind::ApiKey), hash(TokenKind::Node));
    let keys = format!(
        "api_keys:
  - {{ id: a1b2c3d4, hash: \"{key}\", principal: team-a, models: [m], priority: 1, max_priority: 3,
      limits: {{ requests_per_minute: 60, tokens_per_minute: 1000, concurrent: 2 }},
      expires_at: 2027-01-31T00:00:00Z, previous: {{ hash: \"{old}\", expires_at: \"2026-12-01T00:00:00+01:00\" }} }}
"
    );
    let tokens = format!("node_tokens: [ {{ node: gpu-1, token_id: n1n1n1n1, token_hash: \"{token}\" }} ]\n");
    let (loaded, problems) = written(&dir, "", "", &keys, &tokens);
    assert_eq!(problems.to_string(), "");
    let loaded = loaded.unwrap();
    let record = &loaded.config.auth.api_keys[0];
    assert_eq!((record.priority, record.max_priority, record.limits.concurrent), (1, Some(3), 2));
    assert_eq!(
        record.previous.as_ref().map(|previous| previous.expires_at.to_string()).as_deref(),
        Some("2026-11-30T23:00:00Z")
    );
    assert_eq!(loaded.config.nodes[0].token_hash.as_deref(), Some(&*token));
    assert!(!loaded.api_keys().unwrap().is_open());
    assert!(loaded.catalog(0, 1).unwrap().nodes()[0].token.is_some());
}

#[test]
fn a_file_without_keys_is_not_open_and_a_missing_one_is_an_error() {
    // CRD-12: whoever deletes a file does not open the Edge
    let dir = TestDir::new();
    let (loaded, problems) = written(&dir, "", "", "api_keys: []\n", "node_tokens: []\n");
    let text = problems.to_string();
    assert!(text.contains("nobody may call") && text.contains("iop key new"), "{text}");
    assert!(text.contains("node `gpu-1` has no token") && text.contains("iop token new gpu-1"), "{text}");
    let loaded = loaded.unwrap();
    assert!(!loaded.api_keys().unwrap().is_open());
    assert!(loaded.catalog(0, 1).unwrap().nodes()[0].token.is_none());
    std::fs::remove_file(dir.path().join("keys.yaml")).unwrap();
    let (loaded, problems) = EdgeConfig::load(&dir.path().join("edge.yaml"));
    assert!(loaded.is_none() && problems.to_string().contains("edge.yaml:2:"), "{problems}");
    assert!(problems.to_string().contains("`iop key new` makes it"), "{problems}");
}

#[test]
fn mistakes_in_a_file_are_told_with_its_own_name_and_line() {
    // CFG-1, BIN-4
    let dir = TestDir::new();
    let (one, two) = (hash(TokenKind::ApiKey), hash(TokenKind::ApiKey));
    let plain = Token::generate(TokenKind::ApiKey).unwrap().reveal();
    let here = format!("  api_keys: [ {{ id: a1b2c3d4, hash: \"{one}\" }} ]\n");
    let own = format!("    token_hash: \"{}\"\n", hash(TokenKind::Node));
    for (auth, node, keys, tokens, words) in [
        (
            "",
            "",
            format!("api_keys:\n  - {{ id: a1b2c3d4, hash: \"{plain}\" }}\n"),
            String::new(),
            ["keys.yaml:2:", "`hash` holds a plain token", "iop-edge hash"],
        ),
        (
            &*here,
            "",
            format!("api_keys:\n  - {{ id: a1b2c3d4, hash: \"{two}\" }}\n"),
            String::new(),
            ["keys.yaml:2:", "API key `a1b2c3d4` is there twice", "edge.yaml:2:"],
        ),
        (
            "",
            "",
            format!("api_keys:\n  - id: a1b2c3d4\n    hash: \"{one}\"\n    limts: {{}}\n"),
            String::new(),
            ["keys.yaml:4:", "no key `limts`", "did you mean `limits`?"],
        ),
        (
            "",
            "",
            format!("api_keys:\n  - id: a1b2c3d4\n    hash: \"{one}\"\n    expires_at: 2027-01-31\n"),
            String::new(),
            ["keys.yaml:4:", "must be a time (RFC 3339)", "2027-01-31T00:00:00Z"],
        ),
        (
            "",
            "",
            format!("api_keys:\n  - {{ id: a1b2c3d4, hash: \"{one}\", priority: 2, max_priority: 1 }}\n"),
            String::new(),
            ["keys.yaml:2:", "`max_priority` is lower", "(2)"],
        ),
        (
            "",
            "",
            format!("api_keys:\n  - {{ id: a1b2c3d4, hash: \"{one}\", limits: {{ concurrent: 0 }} }}\n"),
            String::new(),
            ["keys.yaml:2:", "`concurrent` can't be 0", "it goes from 1"],
        ),
        (
            "",
            &*own,
            "api_keys: []\n".to_owned(),
            format!("node_tokens:\n  - {{ node: gpu-1, token_id: n1n1n1n1, token_hash: \"{one}\" }}\n"),
            ["tokens.yaml:2:", "has a token in edge.yaml, too", "line 6"],
        ),
        (
            "",
            "",
            "api_keys: []\n".to_owned(),
            format!("node_tokens:\n  - {{ node: gpu-2, token_id: n1n1n1n1, token_hash: \"{one}\" }}\n"),
            ["tokens.yaml:2:", "edge.yaml has no node `gpu-2`", "did you mean `gpu-1`?"],
        ),
    ] {
        let tokens = if tokens.is_empty() { "node_tokens: []\n".to_owned() } else { tokens };
        let (_, problems) = written(&dir, auth, node, &keys, &tokens);
        let text = problems.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{words:?} is not in\n{text}");
        assert!(!text.contains(&plain[14..]), "{text}");
    }
}
