use iop_edge_core::token::{Token, TokenKind};

use super::typed::{said, typed, typed_to};
use super::*;
use crate::config::edge::credentials::SlotStatusConfig;
use crate::exit::Exit;
use crate::testdir::TestDir;

/// An Edge with one Node, whose keys and tokens are in files that are not there yet.
fn written(dir: &TestDir, auth: &str) -> PathBuf {
    let text = format!(
        "auth: {{ {auth} }}\nnodes: [ {{ id: gpu-1, providers: [ {{ id: p, kind: demo }} ] }} ]\nmodels: auto\n"
    );
    dir.write("edge.yaml", &text)
}

const FILES: &str = "api_keys_file: keys.yaml, node_tokens_file: tokens.yaml";

fn loaded(config: &Path) -> LoadedEdge {
    let (loaded, problems) = EdgeConfig::load(config);
    loaded.unwrap_or_else(|| panic!("{problems}"))
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[tokio::test]
async fn a_key_is_made_rotated_and_revoked_in_the_file_that_edge_yaml_names() {
    // BIN-3, CRD-12
    let dir = TestDir::new();
    let (config, keys) = (written(&dir, FILES), dir.path().join("keys.yaml"));
    let line = "key new --principal team-a --model m --model n --priority -1 --max-priority 5 --rpm 60 --tpm 90000 --concurrent 4 --expires 2099-01-31T00:00:00Z";
    typed(&config, line).await.unwrap();
    typed(&config, "key new").await.unwrap();
    typed(&config, "token new gpu-1").await.unwrap();
    let before = loaded(&config).config.auth.api_keys;
    assert_eq!(before.len(), 2);
    let record = &before[0];
    assert_eq!((record.principal.as_deref(), &*record.models), (Some("team-a"), &["m".to_owned(), "n".to_owned()][..]));
    assert_eq!((record.priority, record.max_priority, record.limits.tokens_per_minute), (-1, Some(5), 90_000));
    assert_eq!(record.expires_at.map(|at| at.to_string()).as_deref(), Some("2099-01-31T00:00:00Z"));
    assert!(text(&keys).starts_with("# Written by `iop key`"), "{}", text(&keys));
    assert!(!text(&keys).contains("iopk_"), "hashes only");
    #[cfg(unix)]
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&keys).unwrap()) & 0o777, 0o600);

    typed(&config, &format!("key rotate {} --overlap 2h", record.id)).await.unwrap();
    let rotated = loaded(&config).config.auth.api_keys[0].clone();
    assert!(rotated.hash != record.hash && rotated.id == record.id);
    let previous = rotated.previous.clone().unwrap();
    assert_eq!(previous.hash, record.hash);
    let left = previous.expires_at.0 - crate::config::time::Timestamp::now().0;
    assert!((7_190..=7_200).contains(&left), "{left}");
    assert_eq!((&rotated.models, rotated.limits), (&record.models, record.limits), "the rest stays");
    typed(&config, &format!("key rotate iopk_{} --overlap 0", record.id)).await.unwrap();
    assert!(loaded(&config).config.auth.api_keys[0].previous.is_none());

    typed(&config, "key list").await.unwrap();
    for key in before {
        typed(&config, &format!("key revoke {}", key.id)).await.unwrap();
    }
    assert!(loaded(&config).config.auth.api_keys.is_empty());
    assert!(!loaded(&config).api_keys().unwrap().is_open(), "no key is not an open door");
    let failure = typed(&config, "key revoke a1b2c3d4").await.unwrap_err();
    assert!(failure.exit == Exit::Usage && failure.to_string().contains("`iop key list`"), "{failure}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing else is left there");
}

#[tokio::test]
async fn a_nodes_token_is_made_once_rotated_and_revoked() {
    // BIN-3, CRD-12
    let dir = TestDir::new();
    let (config, out) = (written(&dir, FILES), dir.path().join("gpu-1.token"));
    typed(&config, "key new").await.unwrap();
    let to = out.display();
    typed(&config, &format!("token new gpu-1 --out {to}")).await.unwrap();
    let token = Token::parse(TokenKind::Node, text(&out).trim()).unwrap();
    let node = || loaded(&config).config.nodes[0].clone();
    assert_eq!(node().token_hash, Some(token.hash().to_string()));
    for (line, words) in [
        ("token new gpu-1", "`iop token rotate gpu-1`"),
        ("token new gpu-2", "did you mean `gpu-1`?"),
        ("token rotate gpu-2", "did you mean `gpu-1`?"),
        (&*format!("token rotate gpu-1 --out {to}"), "is there already; nothing was changed"),
    ] {
        let failure = typed(&config, line).await.unwrap_err();
        assert!(failure.exit == Exit::Usage && failure.to_string().contains(words), "{line}: {failure}");
    }
    assert_eq!(node().token_hash, Some(token.hash().to_string()), "nothing was changed");

    let second = dir.path().join("second.token");
    typed(&config, &format!("token rotate gpu-1 --out {}", second.display())).await.unwrap();
    let new = Token::parse(TokenKind::Node, text(&second).trim()).unwrap();
    assert_eq!(new.id(), token.id());
    let secrets = loaded(&config).catalog(0, 1).unwrap().nodes()[0].token.unwrap();
    let now = crate::config::time::Timestamp::now().0;
    for (token, at, good) in [(&token, now, true), (&token, now + 86_500, false), (&new, now + 86_500, true)] {
        assert_eq!(secrets.check(token, at) == iop_edge_core::token::TokenProof::Accepted, good);
    }
    typed(&config, "token list").await.unwrap();
    typed(&config, "token revoke gpu-1").await.unwrap();
    assert_eq!(node().token_hash, None);
    let failure = typed(&config, "token revoke gpu-1").await.unwrap_err();
    assert!(failure.to_string().contains("iop token new gpu-1"), "{failure}");
}

#[tokio::test]
async fn what_a_person_wrote_is_never_edited() {
    // BIN-3
    let dir = TestDir::new();
    let (key, token) = (Token::generate(TokenKind::ApiKey).unwrap(), Token::generate(TokenKind::Node).unwrap());
    let yaml = format!(
        "auth: {{ api_keys: [ {{ id: {}, hash: \"{}\" }} ] }}\nnodes:\n  - {{ id: gpu-1, token_hash: \"{}\" }} # mine\n",
        key.id().as_str(),
        key.hash(),
        token.hash()
    );
    let config = dir.write("edge.yaml", &yaml);
    typed(&config, "key new").await.unwrap();
    typed(&config, "token new gpu-1").await.unwrap();
    for line in [
        format!("key rotate {}", key.id().as_str()),
        format!("key revoke {}", key.id().as_str()),
        "token rotate gpu-1".to_owned(),
    ] {
        let failure = typed(&config, &line).await.unwrap_err().to_string();
        assert!(failure.contains("itself, which no command edits") && failure.contains("_file` names"), "{failure}");
    }
    assert_eq!((text(&config), std::fs::read_dir(dir.path()).unwrap().count()), (yaml, 1));
}

#[tokio::test]
async fn a_change_that_the_config_does_not_allow_is_not_written() {
    // CFG-2
    let dir = TestDir::new();
    let config = written(&dir, FILES);
    typed(&config, "key new").await.unwrap();
    let keys = text(&dir.path().join("keys.yaml"));
    let explicit = text(&config).replace("models: auto", "models: [ { name: m, candidates: [ { provider: p } ] } ]");
    std::fs::write(&config, explicit).unwrap();
    let failure = typed(&config, "key new --model mm").await.unwrap_err();
    assert!(failure.exit == Exit::Usage && failure.message.contains("edge.yaml"), "{failure}");
    assert_eq!(text(&dir.path().join("keys.yaml")), keys);
    typed(&config, "key new --model m").await.unwrap();
    let none = typed(&dir.path().join("none.yaml"), "key list").await.unwrap_err();
    assert!(none.exit == Exit::Usage, "{none}");
}

#[tokio::test]
async fn a_slot_is_made_disabled_rotated_and_revoked_for_ever() {
    // BIN-3, CRD-11
    let dir = TestDir::new();
    let config = written(&dir, FILES);
    for line in ["key new", "token new gpu-1"] {
        typed(&config, line).await.unwrap();
    }
    let failure = typed(&config, "slot new main --secret env:A").await.unwrap_err();
    assert!(failure.to_string().contains("slots_file: slots.yaml"), "{failure}");
    let issuer = dir.path().join("keys/issuer.pem");
    iop_edge_core::catalog::IssuerKey::create({
        std::fs::create_dir_all(dir.path().join("keys")).unwrap();
        &issuer
    })
    .unwrap();
    let credentials = "credentials: { issuer_key: keys/issuer.pem, slots_file: slots.yaml }\n";
    std::fs::write(&config, text(&config) + credentials).unwrap();
    dir.write("acme.key", "sk-1\n");
    typed(&config, "slot new main --secret file:acme.key").await.unwrap();
    let slot = || loaded(&config).config.credentials.slots[0].clone();
    assert_eq!((slot().secret.as_str(), slot().revision), ("file:acme.key", 1));
    typed(&config, "slot disable main").await.unwrap();
    typed(&config, "slot rotate main --in-place").await.unwrap();
    assert_eq!((slot().revision, slot().status), (2, SlotStatusConfig::Disabled));
    typed(&config, "slot enable main").await.unwrap();
    for line in ["slot list", "lease status"] {
        typed(&config, line).await.unwrap();
    }
    for (line, words) in [
        ("slot new main --secret env:A", "`iop slot rotate main`"),
        ("slot new a/b --secret env:A", "acme-main"),
        ("slot new b --secret sk-live", "must be `file:PATH`"),
        ("slot disable other", "`iop slot list`"),
    ] {
        let failure = typed(&config, line).await.unwrap_err();
        assert!(failure.exit == Exit::Usage && failure.to_string().contains(words), "{line}: {failure}");
        assert!(!failure.to_string().contains("sk-live"), "{failure}");
    }
    typed(&config, "slot revoke main").await.unwrap();
    assert_eq!(slot().status, SlotStatusConfig::Revoked);
    for line in ["slot enable main", "slot disable main", "slot rotate main"] {
        let failure = typed(&config, line).await.unwrap_err();
        assert!(failure.to_string().contains("revoked, for ever"), "{line}: {failure}");
    }
    let shown = text(&dir.path().join("slots.yaml"));
    assert!(shown.contains("status: revoked") && !shown.contains("sk-1"), "{shown}");
}

/// An admin listener that says this to everybody and closes; nothing = closes at once.
async fn answering(dir: &TestDir, answer: impl Into<String>) -> (tokio::task::JoinHandle<()>, String) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let key = dir.write("told.key", &Token::generate(TokenKind::Admin).unwrap().reveal());
    let flags = format!(" --admin http://{} --key-file {}", listener.local_addr().unwrap(), key.display());
    let answer = answer.into();
    let task = tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            if !answer.is_empty() {
                let _read = socket.read(&mut [0; 1024]).await;
                let _gone = socket.write_all(answer.as_bytes()).await;
            }
        }
    });
    (task, flags)
}

const REFUSED: &str = "HTTP/1.1 422 Unprocessable Entity\r\nconnection: close\r\ncontent-length: 61\r\n\r\n\
                       {\"error\":{\"code\":\"invalid_config\",\"message\":\"no, thank you\"}}";

#[tokio::test]
async fn a_new_secret_is_shown_whatever_the_running_edge_makes_of_it() {
    // CRD-12
    let dir = TestDir::new();
    let config = written(&dir, FILES);
    for line in ["key new", "token new gpu-1"] {
        typed(&config, line).await.unwrap();
    }
    let (edge, flags) = answering(&dir, REFUSED).await;
    for line in ["token rotate gpu-1", "key rotate ID", "key new"] {
        let line = line.replace("ID", &loaded(&config).config.auth.api_keys[0].id);
        crate::term::heard::take();
        let failure = typed_to(&config, &format!("{line}{flags}")).await.unwrap_err();
        assert!(failure.message.contains("it is written") && failure.message.contains("no, thank you"), "{failure}");
        let said = crate::term::heard::take();
        let kind = if line.starts_with("key") { TokenKind::ApiKey } else { TokenKind::Node };
        let token = Token::parse(kind, said.trim()).unwrap_or_else(|| panic!("{line} said: {said}"));
        let config = loaded(&config).config;
        let hash = match kind {
            TokenKind::ApiKey => config.auth.api_keys.last().unwrap().hash.clone(),
            _ => config.nodes[0].token_hash.clone().unwrap(),
        };
        assert_eq!(hash, token.hash().to_string(), "what is shown is what is written");
    }
    edge.abort();
}

#[tokio::test]
async fn a_token_that_cant_be_kept_replaces_nothing() {
    // CRD-12
    let dir = TestDir::new();
    let config = written(&dir, FILES);
    for line in ["key new", "token new gpu-1"] {
        typed(&config, line).await.unwrap();
    }
    let before = text(&dir.path().join("tokens.yaml"));
    let nowhere = dir.path().join("none/gpu-1.token");
    let failure = typed(&config, &format!("token rotate gpu-1 --out {}", nowhere.display())).await.unwrap_err();
    assert!(failure.message.contains("nothing was changed"), "{failure}");
    assert_eq!(text(&dir.path().join("tokens.yaml")), before);
}

#[tokio::test]
async fn an_edge_that_breaks_off_is_no_edge_that_is_not_there() {
    // BIN-3
    let dir = TestDir::new();
    let config = written(&dir, FILES);
    typed(&config, "token new gpu-1").await.unwrap();
    let (edge, flags) = answering(&dir, "").await;
    let failure = typed_to(&config, &format!("key new{flags}")).await.unwrap_err();
    assert!(failure.exit == Exit::Fatal && failure.message.contains("may have taken it or not"), "{failure}");
    edge.abort();
    let _ended = edge.await;
    typed_to(&config, &format!("key new{flags}")).await.unwrap();
}

/// An answer of the admin API.
fn ok(body: &serde_json::Value) -> String {
    let body = body.to_string();
    format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn a_list_of_keys_shows_what_a_running_edge_counts_and_without_one_what_stands_in_the_files() {
    // BIN-3, CRD-12
    let dir = TestDir::new();
    let config = written(&dir, FILES);
    for line in ["key new --rpm 60 --tpm 90000 --concurrent 4", "key new", "key new", "token new gpu-1"] {
        typed(&config, line).await.unwrap();
    }
    let ids: Vec<_> = loaded(&config).config.auth.api_keys.into_iter().map(|record| record.id).collect();
    let used = serde_json::json!({"keys": [
        {"id": ids[0], "running": 2, "concurrent": 4, "requests": {"used": 12, "limit": 60, "reset_ms": 9},
         "tokens": {"used": 5400, "held": 70, "limit": 90000, "reset_ms": 9}},
        {"id": ids[1], "running": 0, "requests": {"used": 1, "reset_ms": 9}},
        {"id": "gone0000", "running": 0, "requests": {"used": 1, "reset_ms": 9}},
    ]});
    let (edge, flags) = answering(&dir, ok(&used)).await;
    let list = said(&config, &format!("key list{flags}")).await;
    let row = |id: &str| list.lines().find(|line| line.starts_with(id)).unwrap_or_default().to_owned();
    assert!(row("KEY").contains("LAST MINUTE"), "{list}");
    assert!(row(&ids[0]).contains("  12 of 60 requests, 5400 + 70 held of 90000 tokens, 2 of 4 now  "), "{list}");
    assert!(row(&ids[1]).contains("  1 request, 0 now  "), "{list}");
    assert!(row(&ids[2]).contains("  not loaded: `iop reload`  ") && !list.contains("gone0000"), "{list}");
    let json: serde_json::Value =
        serde_json::from_str(&said(&config, &format!("key list --json{flags}")).await).unwrap();
    assert_eq!((&json["live"], &json["live_error"]), (&true.into(), &serde_json::Value::Null));
    assert_eq!(json["api_keys"][0]["usage"]["tokens"]["held"], 70);
    assert_eq!(json["api_keys"][2]["usage"], serde_json::Value::Null);

    edge.abort();
    let _ended = edge.await;
    for (flags, why) in [
        (flags, "no Edge answers at"),
        (" --no-reload".to_owned(), "--no-reload"),
        (String::new(), "no admin key here"),
    ] {
        let list = said(&config, &format!("key list{flags}")).await;
        assert!(!list.contains("LAST MINUTE") && ids.iter().all(|id| list.contains(id)), "{list}");
        let json = said(&config, &format!("key list --json{flags}")).await;
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let error = json["live_error"].as_str().unwrap();
        assert!(error.starts_with("only what stands in the files") && error.contains(why), "{error}");
        assert!(json["live"] == false && !error.contains('\n') && json["api_keys"].as_array().unwrap().len() == 3);
    }
    let (edge, flags) = answering(&dir, REFUSED).await;
    let json: serde_json::Value =
        serde_json::from_str(&said(&config, &format!("key list --json{flags}")).await).unwrap();
    assert!(json["live_error"].as_str().unwrap().contains("no, thank you"), "{json}");
    edge.abort();
}

#[tokio::test]
async fn the_status_of_leases_shows_what_became_of_them() {
    // BIN-3, CRD-13
    let (dir, target) = managed();
    let counts = serde_json::json!({
        "uptime_ms": 62_000, "issued": 12, "opened": 9, "refused": 2, "unused": 1, "denied": 3,
        "reasons": [{"by": "edge", "reason": "disabled", "count": 3}, {"by": "node", "reason": "expired", "count": 2}],
    });
    let (edge, flags) = answering(&dir, ok(&counts)).await;
    let status = said(&target.config, &format!("lease status{flags}")).await;
    let expected = "
leases     12 issued in 1m02s: 9 opened, 2 refused by Nodes, 1 unused
requests   3 got no lease
refused    3 by the edge: disabled
refused    2 by the node: expired
";
    assert!(status.ends_with(expected), "{status}");
    let json = said(&target.config, &format!("lease status --json{flags}")).await;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["leases"], &json["live"], &json["slots"]["enabled"]), (&counts, &true.into(), &1.into()));
    edge.abort();
    let _ended = edge.await;
    let status = said(&target.config, &format!("lease status{flags}")).await;
    assert!(status.contains("slots      1 enabled") && !status.contains("leases  "), "{status}");
    let json = said(&target.config, &format!("lease status --json{flags}")).await;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["leases"].is_null() && json["live_error"].as_str().unwrap().contains("no Edge answers"), "{json}");
}

/// A managed fleet whose slot is in a file that `iop slot` writes.
fn managed() -> (TestDir, Target) {
    use crate::config::edge::credentials::tests::{folder, good};
    let dir = folder();
    let slot = "    - { name: acme-main, secret: \"file:acme.key\", revision: 3, status: enabled }\n";
    dir.write("slots.yaml", &format!("slots:\n{slot}"));
    let config = dir.write("edge.yaml", &good().replace(&format!("  slots:\n{slot}"), "  slots_file: slots.yaml\n"));
    (dir, Target { config, no_reload: true, edge: AdminOptions::default() })
}

#[tokio::test]
async fn a_rotation_that_fails_anywhere_leaves_the_old_secret() {
    // CRD-11
    let (dir, target) = managed();
    let (secret, file) = (dir.path().join("acme.key"), dir.path().join("slots.yaml"));
    let records = text(&file);
    let lines = ["{ name: acme-main, secret: \"file:acme.key\", revision: 4 }".to_owned()];
    let unwritable = dir.path().join("none/slots.yaml");
    let good = text(&target.config);
    for (config, new, file, words) in [
        (good.clone(), "two words", &file, "profile bearer"),
        (good.replace("kind: bearer", "kind: baerer"), "sk-2", &file, "edge.yaml"),
        (good.clone(), "sk-2", &unwritable, "can't write"),
    ] {
        std::fs::write(&target.config, config).unwrap();
        let failure = slot::put_secret("acme-main", (&secret, new), &target, (file, &lines)).await.unwrap_err();
        assert!(failure.message.contains(words) && !failure.message.contains(new), "{failure}");
        assert_eq!(text(&secret), "sk-SENTINEL\n", "{words}");
    }
    std::fs::write(&target.config, good).unwrap();
    assert_eq!(text(&file), records);
    slot::put_secret("acme-main", (&secret, "sk-2"), &target, (&file, &lines)).await.unwrap();
    assert_eq!(text(&secret), "sk-2\n");
    assert_eq!(loaded(&target.config).config.credentials.slots[0].revision, 4);
}

#[tokio::test]
async fn a_secret_of_the_environment_needs_a_restart_and_says_so() {
    // CRD-8, CRD-11
    let (dir, target) = managed();
    let (edge, flags) = answering(&dir, "").await;
    let slots = dir.path().join("slots.yaml");
    std::fs::write(&slots, text(&slots).replace("file:acme.key", "env:ACME")).unwrap();
    crate::term::heard::take();
    typed_to(&target.config, &format!("slot rotate acme-main --in-place --json{flags}")).await.unwrap();
    let said = crate::term::heard::take();
    assert!(said.contains("\"written\"") && said.contains("restart it"), "{said}");
    assert_eq!(loaded(&target.config).config.credentials.slots[0].revision, 4);
    edge.abort();
}

#[tokio::test]
async fn a_slot_is_revoked_although_another_ones_secret_cant_be_read_here() {
    // CRD-8, CRD-11
    let (dir, target) = managed();
    let slots = dir.path().join("slots.yaml");
    let before =
        text(&slots) + "    - { name: other, secret: \"file:not-for-you.key\", revision: 1, status: enabled }\n";
    std::fs::write(&slots, &before).unwrap();
    for line in ["slot new third --secret file:nowhere.key", "slot rotate other --in-place", "slot enable other"] {
        let failure = typed(&target.config, line).await.unwrap_err();
        assert!(
            failure.message.contains("can't be used") && failure.message.contains("nothing was changed"),
            "{failure}"
        );
    }
    assert_eq!(text(&slots), before, "one's own secret must be there");
    typed(&target.config, "slot revoke acme-main").await.unwrap();
    assert_eq!(loaded(&target.config).config.credentials.slots[0].status, SlotStatusConfig::Revoked);
}
