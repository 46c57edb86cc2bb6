use std::collections::BTreeSet;

use super::*;
use crate::config::{EdgeConfig, NodeOptions};
use crate::testdir::TestDir;

fn options(dir: &TestDir) -> InitOptions {
    InitOptions { dir: dir.path().to_owned(), node: "gpu-1".to_owned(), ..InitOptions::default() }
}

#[test]
fn what_is_written_passes_the_checks_and_fits_together() {
    // BIN-2, BIN-4
    for (host, backend) in
        [(vec![], None), (vec!["edge.example".to_owned(), "10.1.2.3".to_owned()], Some("http://127.0.0.1:8000"))]
    {
        let dir = TestDir::new();
        let outside = !host.is_empty();
        let options = InitOptions { host, backend: backend.map(ToOwned::to_owned), ..options(&dir) };
        let done = init(&options, SystemTime::now()).unwrap();
        let (edge, problems) = EdgeConfig::load(&dir.path().join("edge.yaml"));
        assert_eq!(problems.to_string(), "");
        let edge = edge.unwrap().config;
        assert_eq!(!crate::config::is_loopback(edge.listen.openai.address), outside);
        let node = NodeOptions { config: Some(dir.path().join("node.yaml")), ..NodeOptions::default() };
        let (node, problems) = node.load();
        let node = node.unwrap_or_else(|| panic!("{problems}"));
        assert_eq!(node.max_attempts, Some(0));
        let token = Token::parse(TokenKind::Node, node.token.expose()).unwrap();
        assert_eq!(edge.nodes[0].token_hash, Some(token.hash().to_string()));
        assert_eq!(edge.nodes[0].token_id.as_deref(), Some(token.id().as_str()));
        let admin = fs::read_to_string(dir.path().join("admin.key")).unwrap();
        let admin = Token::parse(TokenKind::Admin, admin.trim()).unwrap();
        assert_eq!(edge.admin.as_ref().map(|admin| admin.key_hash.clone()), Some(admin.hash().to_string()));
        let key = done.text.split_whitespace().find(|word| word.starts_with("iopk_")).unwrap();
        assert_eq!(edge.auth.api_keys[0].hash, Token::parse(TokenKind::ApiKey, key).unwrap().hash().to_string());
        assert!(
            done.text.contains("iop-edge serve --config ") && done.text.contains("iop-node serve --edge https://"),
            "{}",
            done.text
        );
    }
}

#[test]
fn secrets_are_in_files_of_this_user_only_and_in_no_config() {
    // BIN-2
    let dir = TestDir::new();
    let done = init(&options(&dir), SystemTime::now()).unwrap();
    let key = done.text.split_whitespace().find(|word| word.starts_with("iopk_")).unwrap();
    for path in &done.files {
        let text = fs::read_to_string(path).unwrap();
        assert!(!text.contains(&key[14..]), "{}", path.display());
        let secret = text.contains("iopn_") || text.contains("iopa_") || text.contains("PRIVATE KEY");
        #[cfg(unix)]
        {
            let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(path).unwrap()) & 0o777;
            assert_eq!(mode & 0o077 == 0, secret, "{} {mode:o}", path.display());
        }
        assert_eq!(
            secret,
            ["node.token", "admin.key", "edge-key.pem"].iter().any(|name| path.ends_with(name)),
            "{}",
            path.display()
        );
    }
}

#[test]
fn nothing_is_overwritten_unless_forced() {
    // BIN-2
    let dir = TestDir::new();
    dir.write("edge.yaml", "mine");
    let failure = init(&options(&dir), SystemTime::now()).unwrap_err();
    assert_eq!(failure.exit, crate::exit::Exit::Usage);
    assert!(failure.to_string().contains("edge.yaml") && failure.to_string().contains("--force"), "{failure}");
    let names: BTreeSet<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1, "{names:?}");
    init(&InitOptions { force: true, ..options(&dir) }, SystemTime::now()).unwrap();
    assert_ne!(fs::read_to_string(dir.path().join("edge.yaml")).unwrap(), "mine");
}

#[test]
fn the_node_trusts_the_certificate_by_every_name_and_no_other() {
    // BIN-2: a real handshake for each name
    let dir = TestDir::new();
    let options = InitOptions { host: vec!["edge.example".to_owned(), "10.1.2.3".to_owned()], ..options(&dir) };
    init(&options, SystemTime::now()).unwrap();
    let at = |name: &str| dir.path().join(name);
    let pair = crate::tls::load_pair(&at("certs/edge.pem"), &at("certs/edge-key.pem")).unwrap();
    let (server, client) =
        (crate::tls::nodes_server(&pair).unwrap(), crate::tls::node_client(Some(&at("certs/ca.pem"))).unwrap());
    for (name, fine) in [
        ("localhost", true),
        ("127.0.0.1", true),
        ("::1", true),
        ("edge.example", true),
        ("10.1.2.3", true),
        ("other.example", false),
    ] {
        let name = ServerName::try_from(name).unwrap();
        let mut client = rustls::ClientConnection::new(std::sync::Arc::clone(&client), name.to_owned()).unwrap();
        let mut server = rustls::ServerConnection::new(std::sync::Arc::clone(&server)).unwrap();
        assert_eq!(handshake(&mut client, &mut server).is_ok(), fine, "{name:?}");
        if fine {
            assert_eq!(client.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
        }
    }
}

fn handshake(
    client: &mut rustls::ClientConnection,
    server: &mut rustls::ServerConnection,
) -> Result<(), rustls::Error> {
    while client.is_handshaking() || server.is_handshaking() {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut read = bytes.as_slice();
        while !read.is_empty() {
            server.read_tls(&mut read).unwrap();
            server.process_new_packets()?;
        }
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut read = bytes.as_slice();
        while !read.is_empty() {
            client.read_tls(&mut read).unwrap();
            client.process_new_packets()?;
        }
    }
    Ok(())
}

#[test]
fn bad_arguments_are_told_before_anything_is_written() {
    // BIN-5
    let dir = TestDir::new();
    for bad in [
        InitOptions { host: vec!["not a name".to_owned()], ..options(&dir) },
        InitOptions { backend: Some("localhost:8000".to_owned()), ..options(&dir) },
        InitOptions { node: "a\"b".to_owned(), ..options(&dir) },
    ] {
        let failure = init(&bad, SystemTime::now()).unwrap_err();
        assert!(failure.hint.is_some(), "{failure}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{failure}");
    }
}
