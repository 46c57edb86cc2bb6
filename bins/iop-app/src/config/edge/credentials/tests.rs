use super::*;
use crate::config::edge::{EdgeConfig, LoadedEdge};
use crate::config::problem::Problems;
use crate::testdir::TestDir;

const HASH: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

pub(crate) fn folder() -> TestDir {
    let folder = TestDir::new();
    IssuerKey::create(&folder.path().join("issuer.pem")).unwrap();
    let key = folder.write("acme.key", "sk-SENTINEL\n");
    let certificates = crate::certs::generate(&["localhost".to_owned()], std::time::SystemTime::now()).unwrap();
    folder.write("edge.pem", &certificates.edge);
    let edge_key = folder.write("edge-key.pem", certificates.edge_key.expose());
    folder.write("ca.pem", &certificates.ca);
    #[cfg(unix)]
    for secret in [&key, &edge_key] {
        std::fs::set_permissions(secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    folder
}

pub(crate) fn good() -> String {
    format!(
        "auth:
  api_keys: [ {{ id: a1b2c3d4, hash: \"{HASH}\", principal: team-a }} ]
credentials:
  issuer_key: issuer.pem
  previous_issuers: []
  slots:
    - {{ name: acme-main, secret: \"file:acme.key\", revision: 3, status: enabled }}
  profiles:
    - {{ name: bearer, kind: bearer }}
    - {{ name: x-key, kind: header, header: x-api-key }}
  routes:
    - {{ name: default, principals: [\"team-a\"], models: [\"*\"], slots: [\"acme-main\"] }}
nodes:
  - id: gpu-1
    token_hash: \"{}\"
    providers:
      - id: acme
        kind: openai_compat
        base_url: \"https://api.acme.example\"
        targets: [large]
        credential: {{ slot: acme-main, profile: bearer }}
tls: {{ nodes: {{ cert: edge.pem, key: edge-key.pem, client_ca: ca.pem }} }}
models: [ {{ name: large, candidates: [ {{ provider: acme }} ] }} ]
",
        HASH.replace("ba", "cd")
    )
}

fn parse(folder: &TestDir, text: &str) -> (Option<EdgeConfig>, String) {
    let mut problems = Problems::of("edge.yaml");
    let config = EdgeConfig::parse(text, folder.path(), &mut problems);
    (config, problems.to_string())
}

#[test]
fn the_documented_shape_becomes_a_catalog() {
    // CRD-11, CFG-1
    let folder = folder();
    let (config, problems) = parse(&folder, &good());
    assert_eq!(problems, "");
    let loaded = LoadedEdge { config: config.unwrap(), path: folder.path().join("edge.yaml") };
    let catalog = loaded.catalog(1, 1).unwrap();
    let credentials = catalog.credentials();
    let slot = credentials.slot("acme-main").unwrap();
    assert_eq!((slot.revision, slot.status), (3, SlotStatus::Enabled));
    assert_eq!(credentials.signers().len(), 1);
    assert_eq!(credentials.ttl_ms, 60_000);
    let config = &catalog.nodes()[0].providers[0].config;
    assert_eq!(config.credential, Some(CredentialUse { slot: "acme-main".into(), profile: "bearer".into() }));
    let printed = format!("{catalog:?}{loaded:?}");
    assert!(!printed.contains("SENTINEL"), "{printed}");
}

#[test]
fn every_mistake_is_told_with_its_line_and_what_to_do() {
    // CRD-11, CRD-16, CFG-1
    let folder = folder();
    folder.write("open.pem", "no key");
    folder.write("spaced.key", "two words in two\u{7f}lines");
    for (from, to, line, parts) in [
        ("slot: acme-main,", "slot: acme-mian,", 21, &["no credential slot is named `acme-mian`", "acme-main"][..]),
        ("profile: bearer }", "profile: baerer }", 21, &["no credential profile is named `baerer`", "bearer"]),
        ("slots: [\"acme-main\"]", "slots: [\"acme\"]", 12, &["no credential slot is named `acme`"]),
        ("models: [\"*\"], slots", "models: [\"lagre\"], slots", 12, &["no model `lagre` is configured", "large"]),
        ("[\"team-a\"]", "[\"two words\"]", 12, &["visible ASCII characters"]),
        ("kind: header, header: x-api-key", "kind: header", 10, &["needs the name of the header", "x-api-key"]),
        ("header: x-api-key", "header: X-Api-Key", 10, &["lower-case letters"]),
        ("header: x-api-key", "header: host", 10, &["frames a message"]),
        ("kind: bearer }", "kind: query }", 9, &["never holds `query`", "ends up in logs"]),
        ("kind: bearer }", "kind: bearer, header: x }", 9, &["`authorization`"]),
        ("\"file:acme.key\"", "sk-SENTINEL", 7, &["must be `file:PATH`", "never stands here"]),
        ("\"file:acme.key\"", "\"${ACME_KEY}\"", 7, &["env:ACME_KEY"]),
        ("\"file:acme.key\"", "\"file:none.key\"", 7, &["can't read", "none.key"]),
        ("\"file:acme.key\"", "\"file:spaced.key\"", 7, &["visible ASCII"]),
        ("status: enabled", "status: on-hold", 7, &["`status` can't be `on-hold`"]),
        ("revision: 3", "revision: 0", 7, &["it goes from 1"]),
        ("issuer_key: issuer.pem", "issuer_key: none.pem", 4, &["can't be read", "iop lease issuer-key new"]),
        ("  issuer_key: issuer.pem\n", "", 20, &["can be signed", "iop lease issuer-key new"]),
        ("previous_issuers: []", "previous_issuers: [\"ed25519:00\"]", 5, &["64 hex digits", "file:"]),
        ("targets: [large]", "targets: [large]\n        auth: { bearer: \"env:KEY\" }", 21, &["not both"]),
        (", client_ca: ca.pem", "", 21, &["set `tls.nodes.client_ca`"]),
        ("kind: openai_compat", "kind: ollama", 18, &["can't be called with a `credential`"]),
        ("https://api.acme", "http://api.acme", 19, &["anybody between reads it", "https://"]),
        ("        targets: [large]\n", "", 20, &["is asked for no list of models"]),
        ("slots: [\"acme-main\"]", "slots: []", 7, &["no route names the credential slot `acme-main`"]),
    ] {
        let text = good().replacen(from, to, 1);
        assert_ne!(text, good(), "{from}");
        let (_, problems) = parse(&folder, &text);
        for part in parts {
            assert!(problems.contains(part), "{to}: {part:?} is not in {problems}");
        }
        let place = format!("edge.yaml:{line}:");
        assert!(problems.contains(&place), "{to}: {place} is not in {problems}");
        assert!(!problems.contains("SENTINEL"), "{problems}");
    }
}

#[test]
fn a_principal_that_no_lease_can_hold_is_told_where_every_one_may_use_a_slot() {
    // CRD-2, CRD-11
    let folder = folder();
    let all = good().replace("[\"team-a\"]", "[\"*\"]");
    assert_eq!(parse(&folder, &all).1, "");
    let (config, problems) = parse(&folder, &all.replace("principal: team-a", "principal: \"team a\""));
    assert!(problems.contains("edge.yaml:2:") && problems.contains("`team a` can't stand in a lease"), "{problems}");
    assert!(config.is_some(), "it may still use what needs no lease");
}

#[test]
fn a_slot_that_nobody_may_use_needs_no_secret() {
    // CRD-11
    let folder = folder();
    let text = good().replace("file:acme.key", "file:gone.key").replace("status: enabled", "status: revoked");
    let (config, problems) = parse(&folder, &text);
    assert_eq!(problems, "");
    let loaded = LoadedEdge { config: config.unwrap(), path: folder.path().join("edge.yaml") };
    assert_eq!(loaded.catalog(1, 1).unwrap().credentials().slots[0].status, SlotStatus::Revoked);
}

#[test]
fn issuers_are_named_by_their_public_keys_or_by_a_file() {
    // CRD-8
    let folder = folder();
    let old = IssuerKey::create(&folder.path().join("old.pem")).unwrap();
    let public = public_key_text(&old.public_bytes());
    assert_eq!(parse_public_key(&public), Some(old.public_bytes()));
    assert_eq!(resolve_public_key(folder.path(), "file:old.pem"), Ok(old.public_bytes()));
    folder.write("old.pub", &public);
    assert_eq!(resolve_public_key(folder.path(), "file:old.pub"), Ok(old.public_bytes()));
    for text in ["ed25519:", "ed25519:zz", &public[1..], &format!("{public}0"), "ed25519:é"] {
        assert_eq!(parse_public_key(text), None, "{text}");
    }
    let text = good().replace("previous_issuers: []", &format!("previous_issuers: [\"{public}\"]"));
    let (config, problems) = parse(&folder, &text);
    assert_eq!(problems, "");
    let loaded = LoadedEdge { config: config.unwrap(), path: folder.path().join("edge.yaml") };
    assert_eq!(loaded.catalog(1, 1).unwrap().credentials().signers()[1], old.public_bytes());
}

#[test]
fn a_secret_that_does_not_fit_its_profile_refuses_its_slot_only() {
    // CRD-8, CRD-9
    let folder = folder();
    std::fs::write(folder.path().join("acme.key"), "Two SENTINEL words").unwrap();
    let (config, problems) = parse(&folder, &good());
    assert_eq!(problems, "");
    let loaded = LoadedEdge { config: config.unwrap(), path: folder.path().join("edge.yaml") };
    let secrets = loaded.slot_secrets(&Secrets::default());
    let told = secrets.missing()[0].to_string();
    assert!(told.contains("slot acme-main: ") && told.contains("profile bearer"), "{told}");
    assert!(!format!("{told}{secrets:?}").contains("SENTINEL"));
    let catalog = loaded.catalog_with(1, 1, &secrets).unwrap();
    assert_eq!(catalog.credentials().slots[0].status, SlotStatus::Disabled, "it alone is refused");
}
