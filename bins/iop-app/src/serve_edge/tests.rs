mod ingress;
mod managed;
mod matrix;

use std::time::Duration;

use http::{Method, StatusCode};
use iop_edge_core::token::{Token, TokenKind};
use iop_node_core::{NoObserver, ServeEnd};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::admin::view::{NodeView, NodesView, ReloadView, StatusView};
use crate::config::{DialOptions, EdgeConfig, NodeOptions};
use crate::init::{InitOptions, init};
use crate::operate::client::{AdminClient, AdminOptions, CallError};
use crate::serve_node;
use crate::testdir::TestDir;
use crate::testhttp::{chat, send, send_tls, text, with_key};

/// What `iop init` wrote, on free ports, and the API key.
fn written(dir: &TestDir) -> (LoadedEdge, String) {
    let options = InitOptions { dir: dir.path().to_owned(), node: "gpu-1".to_owned(), ..InitOptions::default() };
    let shown = init(&options, SystemTime::now()).unwrap().text;
    let key = shown.split_whitespace().find(|word| word.starts_with("iopk_")).unwrap().to_owned();
    let path = dir.path().join("edge.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let free = [":8180", ":8443", ":9190"].iter().fold(text, |text, port| text.replace(port, ":0"));
    std::fs::write(&path, free).unwrap();
    let (loaded, problems) = EdgeConfig::load(&path);
    (loaded.unwrap_or_else(|| panic!("{problems}")), key)
}

fn node_options(dir: &TestDir, edge: SocketAddr) -> NodeOptions {
    NodeOptions {
        dial: DialOptions {
            edge: Some(format!("https://{edge}")),
            token_file: Some(dir.path().join("node.token")),
            ca: Some(dir.path().join("certs/ca.pem")),
            ..DialOptions::default()
        },
        ..NodeOptions::default()
    }
}

fn node(options: NodeOptions) -> iop_node_core::Node {
    let (settings, problems) = options.load();
    serve_node::node(&settings.unwrap_or_else(|| panic!("{problems}")), std::sync::Arc::new(NoObserver)).unwrap()
}

#[tokio::test]
async fn the_pair_that_init_wrote_serves_over_tls_and_ends_in_order() {
    // BIN-2, BIN-5, OPS-3
    let dir = TestDir::new();
    let (loaded, key) = written(&dir);
    let bound = bind(&loaded).await.unwrap();
    let (openai, nodes, admin) = (bound.openai_address, bound.nodes_address, bound.admin_address);
    let edge_stop = Shutdown::default();
    let edge = tokio::spawn(bound.serve(edge_stop.clone()));
    assert_eq!(send(admin, crate::testhttp::get("/readyz")).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(send(admin, crate::testhttp::get("/healthz")).await.status(), StatusCode::OK);

    let node = node(node_options(&dir, nodes));
    let (mut status, node_stop) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(node_stop.clone()));
    assert!(timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap());
    assert_eq!(send(admin, crate::testhttp::get("/readyz")).await.status(), StatusCode::OK);

    let ca = dir.path().join("certs/ca.pem");
    assert_eq!(send_tls(openai, &ca, chat("iop-demo", false)).await.status(), StatusCode::UNAUTHORIZED);
    let answer = send_tls(openai, &ca, with_key(chat("iop-demo", true), &key)).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(text(answer).await.ends_with("data: [DONE]\n\n"));

    node_stop.cancel();
    assert_eq!(timeout(Duration::from_secs(20), serving).await.unwrap().unwrap(), Ok(ServeEnd::Drained));
    edge_stop.gracefully.cancel();
    timeout(Duration::from_secs(20), edge).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_token_that_the_edge_does_not_know_is_fatal_with_the_next_step() {
    // REG-4, BIN-5
    let (dir, other) = (TestDir::new(), TestDir::new());
    let ((loaded, _), _) = (written(&dir), written(&other));
    let bound = bind(&loaded).await.unwrap();
    let nodes = bound.nodes_address;
    let stop = Shutdown::default();
    let _edge = tokio::spawn(bound.serve(stop.clone()));
    let mut options = node_options(&dir, nodes);
    options.dial.token_file = Some(other.path().join("node.token"));
    let ended =
        timeout(Duration::from_secs(20), node(options).serve(CancellationToken::new())).await.unwrap().unwrap_err();
    assert_eq!(ended.exit_code(), crate::exit::Exit::Fatal.code());
    stop.force();
}

#[tokio::test]
async fn a_taken_address_is_told_with_the_name_of_its_listener() {
    // BIN-5
    let dir = TestDir::new();
    let (mut loaded, _) = written(&dir);
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    loaded.config.listen.admin.address = taken.local_addr().unwrap();
    let failure = bind(&loaded).await.map(|_| ()).unwrap_err();
    assert_eq!(failure.exit, crate::exit::Exit::Fatal);
    assert!(failure.to_string().contains("listen.admin"), "{failure}");
}

/// What the operator of that pair uses.
fn admin(dir: &TestDir, address: SocketAddr) -> AdminClient {
    let options =
        AdminOptions { admin: address.to_string(), key_file: Some(dir.path().join("admin.key")), json: false };
    AdminClient::new(&options).unwrap()
}

fn edit(dir: &TestDir, from: &str, to: &str) {
    let path = dir.path().join("edge.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from}");
    std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
}

#[tokio::test]
async fn the_admin_api_of_a_running_edge_opens_with_the_key_that_init_wrote() {
    // BIN-3, SEC-4
    let dir = TestDir::new();
    let (loaded, _) = written(&dir);
    let bound = bind(&loaded).await.unwrap();
    let (openai, address) = (bound.openai_address, bound.admin_address);
    let stop = Shutdown::default();
    let edge = tokio::spawn(bound.serve(stop.clone()));
    let client = admin(&dir, address);
    let status: StatusView = client.ask(Method::GET, "status").await.unwrap();
    assert_eq!((status.edge.as_str(), status.nodes.configured, status.config.revision), ("edge", 1, 1));
    let nodes: NodesView = client.ask(Method::GET, "nodes").await.unwrap();
    assert_eq!(nodes.nodes[0].id, "gpu-1");
    let Err(error) = client.ask::<NodeView>(Method::POST, "nodes/nope/drain").await else { panic!("there is none") };
    let failure = client.failure(error);
    assert!(failure.to_string().contains("`iop nodes`"), "{failure}");
    // The OpenAI listener has none of it.
    let there = admin(&dir, openai).text(Method::GET, "status").await;
    assert!(matches!(there, Err(CallError::Failed(_))), "{there:?}");
    stop.force();
    timeout(Duration::from_secs(20), edge).await.unwrap().unwrap();
    let Err(gone) = client.text(Method::GET, "status").await else { panic!("it is gone") };
    assert!(client.failure(gone).to_string().contains("iop-edge serve"));
}

#[tokio::test]
async fn a_running_pair_takes_a_new_config_and_a_drain_without_a_restart() {
    // CFG-2, CFG-3, BIN-3: new key, new alias; then nothing new for a drained Node until it is resumed
    let dir = TestDir::new();
    let (loaded, key) = written(&dir);
    let bound = bind(&loaded).await.unwrap();
    let (openai, nodes, address) = (bound.openai_address, bound.nodes_address, bound.admin_address);
    let stop = Shutdown::default();
    let _edge = tokio::spawn(bound.serve(stop.clone()));
    let (node, node_stop) = (node(node_options(&dir, nodes)), CancellationToken::new());
    let mut status = node.status();
    let _serving = tokio::spawn(node.serve(node_stop.clone()));
    assert!(timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap());
    let (client, ca) = (admin(&dir, address), dir.path().join("certs/ca.pem"));
    let status_of =
        async |model: &str, key: &str| send_tls(openai, &ca, with_key(chat(model, false), key)).await.status();
    assert_eq!(status_of("house", &key).await, StatusCode::NOT_FOUND);

    let second = Token::generate(TokenKind::ApiKey).unwrap();
    let keys = dir.path().join("api-keys.yaml");
    let record = format!("  - {{ id: \"{}\", hash: \"{}\" }}\n", second.id().as_str(), second.hash());
    std::fs::write(&keys, std::fs::read_to_string(&keys).unwrap() + &record).unwrap();
    edit(
        &dir,
        "models: auto",
        "models: [ auto, { name: house, candidates: [ { provider: demo, target: iop-demo } ] } ]",
    );
    let running = send_tls(openai, &ca, with_key(chat("iop-demo", true), &key)).await;
    let view: ReloadView = client.ask(Method::POST, "reload").await.unwrap();
    assert_eq!((view.revision, view.settings_changed), (2, vec!["auth.api_keys".to_owned()]));
    assert!(text(running).await.ends_with("data: [DONE]\n\n"), "what runs goes on");
    assert_eq!(status_of("house", &key).await, StatusCode::OK);
    assert_eq!(status_of("iop-demo", &second.reveal()).await, StatusCode::OK);

    let drained: NodeView = client.ask(Method::POST, "nodes/gpu-1/drain").await.unwrap();
    assert!(drained.draining && drained.connected, "{drained:?}");
    assert_eq!(status_of("house", &key).await, StatusCode::SERVICE_UNAVAILABLE);
    let resumed: NodeView = client.ask(Method::POST, "nodes/gpu-1/resume").await.unwrap();
    assert!(!resumed.draining, "{resumed:?}");
    assert_eq!(status_of("house", &key).await, StatusCode::OK);

    let text = std::fs::read_to_string(&keys).unwrap();
    let other = Token::generate(TokenKind::ApiKey).unwrap().hash().to_string();
    std::fs::write(&keys, text.replace(&second.hash().to_string(), &other)).unwrap();
    client.ask::<ReloadView>(Method::POST, "reload").await.unwrap();
    assert_eq!(status_of("iop-demo", &second.reveal()).await, StatusCode::UNAUTHORIZED);
    node_stop.cancel();
    stop.force();
}
