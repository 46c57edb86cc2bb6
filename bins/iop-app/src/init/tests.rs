use std::collections::BTreeSet;

mod fleet;

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
            // Hashes are nobody else's business either.
            let hashes = text.contains("Written by `iop key`") || text.contains("Written by `iop token`");
            let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(path).unwrap()) & 0o777;
            assert_eq!(mode & 0o077 == 0, secret || hashes, "{} {mode:o}", path.display());
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

fn managed(dir: &TestDir) -> InitOptions {
    InitOptions { managed: true, node: "gpu-1,gpu-2".to_owned(), ..options(dir) }
}

#[test]
fn a_managed_fleet_passes_the_checks_and_each_certificate_names_one_workload() {
    // BIN-3, CRD-10, CRD-11
    let keys = TestDir::new();
    let backend = InitOptions {
        backend: Some("https://api.example".to_owned()),
        models: vec!["m".to_owned()],
        secret_file: Some(keys.write("key.txt", "sk-provider\n")),
        ..InitOptions::default()
    };
    for options in [InitOptions::default(), backend] {
        let dir = TestDir::new();
        let with_backend = options.backend.is_some();
        let options =
            InitOptions { dir: dir.path().to_owned(), node: "gpu-1,gpu-2".to_owned(), managed: true, ..options };
        let done = init(&options, SystemTime::now()).unwrap();
        let (edge, problems) = EdgeConfig::load(&dir.path().join("edge.yaml"));
        assert_eq!(problems.to_string(), "");
        let edge = edge.unwrap();
        let catalog = edge.catalog(0, 1).unwrap();
        assert!(catalog.identity_required() && catalog.credentials().issuer.is_some());
        assert_eq!(edge.config.credentials.slots.len(), usize::from(with_backend));
        let identity = |path: &str| {
            let chain = crate::tls::load_certificates(&dir.path().join(path)).unwrap();
            iop_wire::link::grpc::certificate_identity(&chain[0]).unwrap().to_string()
        };
        assert_eq!(identity("certs/edge.pem"), "spiffe://iop.local/iop/edge/edge");
        for (index, id) in ["gpu-1", "gpu-2"].into_iter().enumerate() {
            assert_eq!(identity(&format!("{id}/cert.pem")), format!("spiffe://iop.local/iop/node/{id}"));
            let node = NodeOptions { config: Some(dir.path().join(id).join("node.yaml")), ..NodeOptions::default() };
            let (node, problems) = node.load();
            let node = node.unwrap_or_else(|| panic!("{problems}"));
            assert_eq!(problems.to_string(), "");
            let token = Token::parse(TokenKind::Node, node.token.expose()).unwrap();
            let secrets = catalog.nodes()[index].token.unwrap();
            assert_eq!(secrets.check(&token, 0), iop_edge_core::token::TokenProof::Accepted);
            assert!(done.text.contains(&format!("{id}/node.yaml")), "{}", done.text);
        }
        // The CA's key is in its own directory, alone with its certificate, and nowhere else.
        let ca_key = fs::read_to_string(dir.path().join("ca/ca-key.pem")).unwrap();
        let with_it: Vec<_> =
            done.files.iter().filter(|path| fs::read_to_string(path).unwrap().contains(&ca_key)).collect();
        assert_eq!(with_it, [&dir.path().join("ca/ca-key.pem")]);
        assert_eq!(fs::read_dir(dir.path().join("ca")).unwrap().count(), 2);
        #[cfg(unix)]
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(dir.path().join("ca")).unwrap()) & 0o777, 0o700);
        assert!(done.text.contains("ca/") && done.text.contains("iop node add NAME"), "{}", done.text);
        // Every secret is this user's; none but the API key is shown.
        assert!(!done.text.contains("iopn_") && !done.text.contains("sk-provider"), "{}", done.text);
        #[cfg(unix)]
        for path in &done.files {
            let text = fs::read_to_string(path).unwrap();
            let secret = ["iopn_", "iopa_", "PRIVATE KEY", "sk-provider"].iter().any(|word| text.contains(word));
            let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(path).unwrap()) & 0o777;
            assert!(!secret || mode == 0o600, "{} {mode:o}", path.display());
        }
        let again = init(&options, SystemTime::now()).unwrap_err();
        assert!(again.to_string().contains("keys/lease-issuer.pem"), "{again}");
        init(&InitOptions { force: true, ..options }, SystemTime::now()).unwrap();
    }
}

#[test]
fn a_managed_backend_without_its_key_waits_for_it_and_wrong_flags_are_told() {
    // BIN-3
    let dir = TestDir::new();
    let backend = Some("https://api.example".to_owned());
    let waiting = InitOptions { backend: backend.clone(), models: vec!["m".to_owned()], ..managed(&dir) };
    let done = init(&waiting, SystemTime::now()).unwrap();
    assert!(done.text.contains("iop slot rotate main") && done.text.contains("iop slot enable main"), "{}", done.text);
    let (edge, problems) = EdgeConfig::load(&dir.path().join("edge.yaml"));
    assert!(edge.is_some(), "{problems}");
    let dir = TestDir::new();
    for (bad, words) in [
        (InitOptions { backend, ..managed(&dir) }, "--model NAME"),
        (InitOptions { models: vec!["m".to_owned()], ..managed(&dir) }, "--backend"),
        (InitOptions { node: "a,a".to_owned(), ..managed(&dir) }, "gpu-1,gpu-2"),
        (InitOptions { node: "a/b".to_owned(), ..managed(&dir) }, "A-Z a-z 0-9"),
        (InitOptions { node: "gpu-1,CA".to_owned(), ..managed(&dir) }, "give the Node another id"),
        (InitOptions { node: "a,b".to_owned(), ..options(&dir) }, "--managed"),
    ] {
        let failure = init(&bad, SystemTime::now()).unwrap_err();
        assert!(failure.to_string().contains(words), "{failure}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{failure}");
    }
}

/// What is below a directory, with the content and mode of files.
fn everything(dir: &Path) -> BTreeSet<(PathBuf, String, u32)> {
    let mut all = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        #[cfg(unix)]
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap());
        #[cfg(not(unix))]
        let mode = 0;
        if path.is_dir() {
            all.extend(everything(&path));
            all.insert((path, String::new(), mode));
        } else {
            all.insert((path.clone(), fs::read_to_string(&path).unwrap(), mode));
        }
    }
    all
}

#[test]
fn a_fleet_is_written_as_a_whole_or_not_at_all() {
    // BIN-2, BIN-3
    let dir = TestDir::new();
    for id in ["edge.yaml", "admin.key", "API-keys.yaml", "node-tokens.yaml", "slots.yaml", "ca", "certs", "keys"] {
        let failure = init(&InitOptions { node: id.to_owned(), ..managed(&dir) }, SystemTime::now()).unwrap_err();
        assert!(failure.to_string().contains("give the Node another id"), "{id}: {failure}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{id}");
    }
    // Everything that it writes beside the Nodes' directories is refused as the id of one.
    init(&managed(&dir), SystemTime::now()).unwrap();
    for entry in fs::read_dir(dir.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(is_reserved(&name) || name.starts_with("gpu-"), "{name}");
    }
    // The last file can't be written: what was there before is there as it was, and nothing else.
    let again = TestDir::new();
    again.write("keys", "in the way");
    let options = InitOptions { dir: again.path().join("new/fleet"), ..managed(&again) };
    init(&options, SystemTime::now()).unwrap();
    fs::remove_dir_all(again.path().join("new")).unwrap();
    for (dir, force) in [(again.path().to_owned(), false), (dir.path().to_owned(), true)] {
        if force {
            fs::remove_file(dir.join("gpu-2/node.env")).unwrap();
            fs::create_dir(dir.join("gpu-2/node.env")).unwrap();
        }
        let before = everything(&dir);
        let options = InitOptions { dir: dir.clone(), force, ..managed(&again) };
        let failure = init(&options, SystemTime::now()).unwrap_err();
        assert!(failure.to_string().contains("nothing was changed"), "{failure}");
        assert_eq!(everything(&dir), before);
    }
}

#[test]
fn the_command_for_other_machines_makes_the_same_fleet() {
    // BIN-2, BIN-3
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: InitOptions,
    }
    let dir = TestDir::new();
    let keys = TestDir::new();
    let paid = InitOptions {
        backend: Some("https://api.example".to_owned()),
        models: vec!["m".to_owned(), "org/n:latest".to_owned()],
        secret_file: Some(keys.write("key.txt", "sk-provider\n")),
        ..managed(&dir)
    };
    let local = InitOptions { backend: Some("http://127.0.0.1:8000".to_owned()), ..options(&dir) };
    for options in [paid, managed(&dir), local, options(&dir)] {
        let text = init(&InitOptions { force: true, ..options.clone() }, SystemTime::now()).unwrap().text;
        let line = text.lines().find_map(|line| line.split_once("iop init ")).unwrap().1;
        let words = std::iter::once("iop").chain(line.split(' '));
        let read = <Line as clap::Parser>::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).options;
        let host = vec!["NAME-OF-THIS-MACHINE".to_owned()];
        assert_eq!(format!("{read:?}"), format!("{:?}", InitOptions { host, force: true, ..options }));
    }
    let spaced = InitOptions { dir: dir.path().join("it's new"), ..options(&dir) };
    let text = init(&spaced, SystemTime::now()).unwrap().text;
    assert!(text.contains(r"/it'\''s new' --node"), "{text}");
}
