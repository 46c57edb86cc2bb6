use std::time::Duration;

use http::StatusCode;
use iop_node_core::{NoObserver, ServeEnd};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::config::{EdgeConfig, NodeOptions};
use crate::init::{InitOptions, init};
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
        edge: Some(format!("https://{edge}")),
        token_file: Some(dir.path().join("node.token")),
        ca: Some(dir.path().join("certs/ca.pem")),
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
    let options = NodeOptions { token_file: Some(other.path().join("node.token")), ..node_options(&dir, nodes) };
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
