use std::collections::BTreeSet;

use super::*;
use crate::config::{EdgeConfig, NodeOptions};
use crate::exit::Exit;
use crate::init::{InitOptions, init};
use crate::issue::typed::{said, typed};
use crate::testdir::TestDir;

/// A fleet of `gpu-1` at `edge.example`, and its config, which has a Node more that nobody has made anything for.
fn fleet() -> (TestDir, PathBuf) {
    let dir = TestDir::new();
    let options = InitOptions {
        dir: dir.path().to_owned(),
        host: vec!["edge.example".to_owned(), "10.1.2.3".to_owned()],
        node: "gpu-1".to_owned(),
        managed: true,
        ..InitOptions::default()
    };
    init(&options, SystemTime::now()).unwrap();
    let config = dir.path().join("edge.yaml");
    let record = "nodes:\n  - { id: gpu-2, providers: [ { id: paid, kind: openai_compat, base_url: \"https://api.acme.example\" } ] }\n";
    fs::write(&config, text(&config).replacen("nodes:\n", record, 1)).unwrap();
    (dir, config)
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// Every file below a directory and what is in it.
fn everything(dir: &Path) -> BTreeSet<(PathBuf, String)> {
    let mut all = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(everything(&path));
        } else {
            all.insert((path.clone(), text(&path)));
        }
    }
    all
}

fn shown_identity(cert: &Path) -> String {
    certificate_identity(&tls::load_certificates(cert).unwrap()[0]).unwrap().to_string()
}

#[tokio::test]
async fn a_further_node_gets_a_directory_like_the_first_ones() {
    // BIN-3, CRD-10, CRD-12, CRD-6
    let (dir, config) = fleet();
    let told = said(&config, "node add gpu-2 --no-reload").await;
    let at = |name: &str| dir.path().join("gpu-2").join(name);
    assert!(told.contains("spiffe://iop.local/iop/node/gpu-2") && told.contains("90 days"), "{told}");
    let names = |node: &str| -> BTreeSet<_> {
        let entries = fs::read_dir(dir.path().join(node)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names("gpu-2"), names("gpu-1"));
    assert_eq!(shown_identity(&at("cert.pem")), "spiffe://iop.local/iop/node/gpu-2");
    let yaml = text(&at("node.yaml"));
    assert!(yaml.contains("edge: \"https://edge.example:8443\"") && yaml.contains("spiffe://iop.local/iop/edge/edge"));
    assert!(yaml.contains("allow_upstream: [loopback, private, \"api.acme.example\"]"), "{yaml}");
    let (node, problems) = NodeOptions { config: Some(at("node.yaml")), ..NodeOptions::default() }.load();
    assert_eq!((node.is_some(), problems.to_string()), (true, String::new()));
    // The token is that of the record, and the config as a whole is good.
    let (edge, problems) = EdgeConfig::load(&config);
    assert_eq!(problems.to_string(), "");
    let token =
        iop_edge_core::token::Token::parse(iop_edge_core::token::TokenKind::Node, text(&at("node.token")).trim());
    let nodes = edge.unwrap().config.nodes;
    assert_eq!(nodes[0].token_hash, Some(token.unwrap().hash().to_string()));
    let key = text(&dir.path().join("ca/ca-key.pem"));
    for (path, text) in everything(&dir.path().join("gpu-2")) {
        assert!(!text.contains(&key), "the CA's key is in {}", path.display());
        #[cfg(unix)]
        {
            let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap()) & 0o777;
            let secret = path.ends_with("key.pem") || path.ends_with("node.token");
            assert_eq!(mode & 0o077 == 0, secret, "{} {mode:o}", path.display());
        }
    }
    let again = typed(&config, "node add gpu-2").await.unwrap_err();
    assert!(again.exit == Exit::Usage && again.to_string().contains("`iop node renew gpu-2`"), "{again}");
}

#[tokio::test]
async fn the_ca_is_found_where_it_was_moved_and_what_does_not_fit_changes_nothing() {
    // BIN-3, CRD-10
    let (dir, config) = fleet();
    let (other, _) = fleet();
    let (safe, taken) = (TestDir::new(), TestDir::new());
    fs::rename(dir.path().join("ca"), safe.path().join("moved")).unwrap();
    taken.write("node.yaml", "mine");
    let moved = safe.path().join("moved");
    let before = everything(dir.path());
    let [ca, others, taken] = [&moved, &other.path().join("ca"), taken.path()].map(|path| path.display().to_string());
    for (line, words) in [
        ("node add gpu-2".to_owned(), "--ca DIR says where it is now"),
        ("node renew gpu-1".to_owned(), "--ca DIR says where it is now"),
        (format!("node add gpu-2 --ca {others}"), "`tls.nodes.client_ca`"),
        (format!("node renew --edge --ca {others}"), "`tls.nodes.client_ca`"),
        (format!("node add gpu-2 --ca {ca} --host elsewhere.example"), "edge.example, 10.1.2.3"),
        (format!("node add gpu-2 --ca {ca} --out {taken}"), "node.yaml is there already"),
        (format!("node add gpu-2 --ca {ca} --out /dev/null/gpu-2"), "nothing was changed"),
        (format!("node add gpu-3 --ca {ca}"), "\n    say first what it runs"),
        (format!("node add gpu-3 --ca {ca}"), "- { id: \"gpu-3\", providers: ["),
        (format!("node add gpx-1 --ca {ca}"), "did you mean `gpu-1`? If not, say first what it runs"),
        (format!("node add the-new-one --ca {ca}"), "- { id: \"the-new-one\", providers: ["),
        (format!("node add gpu-1 --ca {ca}"), "has a token already"),
        (format!("node renew gpu-9x --ca {ca}"), "has no node `gpu-9x`"),
    ] {
        let failure = typed(&config, &line).await.unwrap_err();
        assert!(failure.to_string().contains(words), "{line}: {failure}");
        assert_eq!(everything(dir.path()), before, "{line}");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let key = moved.join("ca-key.pem");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
        let failure = typed(&config, &format!("node add gpu-2 --ca {ca}")).await.unwrap_err();
        assert!(failure.to_string().contains("chmod 600"), "{failure}");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    }
    // A token that can't be kept: nothing of the Node is left.
    let good = text(&config);
    fs::write(&config, good.replace("node_tokens_file: node-tokens.yaml", "node_tokens_file: none/tokens.yaml"))
        .unwrap();
    let failure = typed(&config, &format!("node add gpu-2 --ca {ca}")).await.unwrap_err();
    assert!(failure.to_string().contains("can't write") && !dir.path().join("gpu-2").exists(), "{failure}");
    fs::write(&config, good).unwrap();
    typed(&config, &format!("node add gpu-2 --ca {ca} --host 10.1.2.3")).await.unwrap();
    assert!(text(&dir.path().join("gpu-2/node.yaml")).contains("https://10.1.2.3:8443"));
}

#[tokio::test]
async fn without_certificates_of_nodes_there_is_nothing_to_make() {
    // BIN-3
    let (_dir, config) = fleet();
    let plain = text(&config).replace(", client_ca: certs/ca.pem", "");
    fs::write(&config, plain).unwrap();
    let failure = typed(&config, "node renew gpu-1").await.unwrap_err();
    assert!(failure.to_string().contains("`iop token new NODE`"), "{failure}");
}

#[tokio::test]
async fn certificates_are_renewed_in_their_place_under_the_names_and_identities_they_have() {
    // BIN-3, CRD-10
    let (dir, config) = fleet();
    let at = |name: &str| dir.path().join(name);
    let pairs = [("gpu-1/cert.pem", "gpu-1/key.pem"), ("certs/edge.pem", "certs/edge-key.pem")];
    let before = pairs.map(|(cert, key)| (text(&at(cert)), text(&at(key)), shown_identity(&at(cert))));
    let names = || facts(&tls::load_certificates(&at("certs/edge.pem")).unwrap()[0]).unwrap().names;
    let named = names();
    for line in ["node renew gpu-1", "node renew --edge"] {
        typed(&config, line).await.unwrap();
    }
    for ((cert, key), (old_cert, old_key, identity)) in pairs.iter().zip(&before) {
        assert!(text(&at(cert)) != *old_cert && text(&at(key)) != *old_key, "{cert}");
        assert_eq!(shown_identity(&at(cert)), *identity);
        tls::load_pair(&at(cert), &at(key)).unwrap();
        #[cfg(unix)]
        {
            let mode = |name| std::os::unix::fs::MetadataExt::mode(&fs::metadata(at(name)).unwrap()) & 0o777;
            assert_eq!((mode(cert), mode(key)), (0o644, 0o600));
        }
    }
    assert_eq!((names(), named.len()), (named, 5), "localhost, 127.0.0.1, ::1, and the two that were asked for");
    // Where the Node's directory is not here any more.
    let out = at("for-gpu-1");
    typed(&config, &format!("node renew gpu-1 --out {}", out.display())).await.unwrap();
    assert_eq!(fs::read_dir(&out).unwrap().count(), 2);
    let json = said(&config, "node renew gpu-1 --json --no-reload").await;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["identity"], &json["valid_days"]), (&"spiffe://iop.local/iop/node/gpu-1".into(), &90.into()));
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_replaced_by_force_only() {
    // BIN-3, CRD-10
    let (dir, config) = fleet();
    let (other, _) = fleet();
    let at = |name: &str| dir.path().join(name);
    for name in ["certs/edge.pem", "certs/edge-key.pem"] {
        fs::copy(other.path().join(name), at(name)).unwrap();
    }
    let issuer = facts(&tls::load_certificates(&at("certs/edge.pem")).unwrap()[0]).unwrap().issuer;
    assert!(issuer.contains("IOP development CA "), "{issuer}");
    let before = everything(dir.path());
    let failure = typed(&config, "node renew --edge").await.unwrap_err().to_string();
    assert!(failure.contains(&issuer) && failure.contains("--force"), "{failure}");
    assert_eq!(everything(dir.path()), before);
    typed(&config, "node renew --edge --force").await.unwrap();
    assert_ne!(facts(&tls::load_certificates(&at("certs/edge.pem")).unwrap()[0]).unwrap().issuer, issuer);
    // One of this CA that has ended is renewed as ever.
    let cas = ["ca/ca.pem", "ca/ca-key.pem"].map(|name| text(&at(name)));
    let long_ago = SystemTime::now() - Duration::from_secs(100 * 86_400);
    let chain = tls::load_certificates(&at("certs/edge.pem")).unwrap();
    let names = facts(&chain[0]).unwrap().names;
    let identity = certificate_identity(&chain[0]).unwrap();
    let root = tls::load_certificates(&at("ca/ca.pem")).unwrap().swap_remove(0);
    let ca = Ca::read(&cas[0], &Redacted::new(cas[1].clone()), SystemTime::now()).unwrap();
    let ended = ca.edge(names, Some(&identity), long_ago).unwrap();
    fs::write(at("certs/edge.pem"), &ended.cert).unwrap();
    fs::write(at("certs/edge-key.pem"), ended.key.expose()).unwrap();
    typed(&config, "node renew --edge").await.unwrap();
    let chain = tls::load_certificates(&at("certs/edge.pem")).unwrap();
    assert_eq!(tls::is_of_ca(&chain, root, UnixTime::now()), Ok(()));
}

#[tokio::test]
async fn a_ca_that_is_not_good_now_is_told_with_what_to_do() {
    // BIN-5, CRD-10
    let (_dir, config) = fleet();
    let (loaded, _) = EdgeConfig::load(&config);
    let loaded = loaded.unwrap();
    let place = CaPlace { ca: None };
    let far = SystemTime::now() + Duration::from_secs((crate::certs::CA_VALID_DAYS + 1) * 86_400);
    let Err(failure) = open(&place, &loaded, far) else { panic!("it has ended") };
    assert!(failure.to_string().contains("clock") && failure.to_string().contains("client_ca"), "{failure}");
}
