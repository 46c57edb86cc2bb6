//! Edge and Node that prove to each other who they are, and what happens to those who can't.
//!
//! Run it: `cargo run -p iop-examples --example mtls_pair`

use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use iop_adapters::Demo;
use iop_edge_core::Edge;
use iop_edge_core::api::Submit;
use iop_edge_core::catalog::{Catalog, NodeEntry, ProviderEntry};
use iop_edge_core::token::{Token, TokenKind};
use iop_examples::{Ca, Failure, node_uri};
use iop_execution::{ModelName, NodeId, ProviderId, Redacted, RunEventKind};
use iop_node_core::{CUSTOM_KIND, Node, ReconnectPolicy};
use iop_wire::link::grpc::{GrpcConnector, GrpcListener};
use iop_wire::{ProviderConfig, WorkloadIdentity};
use rcgen::ExtendedKeyUsagePurpose;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let (ca, stranger) = (Ca::new("the fleet's CA")?, Ca::new("a stranger's CA")?);
    let (token, other) = (Token::generate(TokenKind::Node)?, Token::generate(TokenKind::Node)?);
    let seen = Seen::default();
    let (edge, address) = start_edge(&ca, &[("gpu-1", &token), ("gpu-2", &other)], Arc::clone(&seen)).await?;

    // Each of these is refused, and each for its own reason.
    let client = ExtendedKeyUsagePurpose::ClientAuth;
    for (who, config, token) in [
        ("a Node of another CA", ca.node(stranger.issue(&node_uri("gpu-1"), client.clone())?, "edge")?, &token),
        ("gpu-1 with the token of gpu-2", ca.node(ca.issue(&node_uri("gpu-1"), client.clone())?, "edge")?, &other),
        ("a Node that wants another Edge", ca.node(ca.issue(&node_uri("gpu-1"), client.clone())?, "edge-2")?, &token),
    ] {
        let connector = GrpcConnector::tls(address.as_str(), config, None)?;
        // It gives up soon; by default it would go on for a while.
        let node = Node::builder(Redacted::new(token.reveal()), Arc::new(connector))
            .provider("demo", Arc::new(Demo::default()))
            .reconnect(ReconnectPolicy::new(Some(1), None)?)
            .build()?;
        let ended = node.serve(CancellationToken::new()).await;
        println!("{who}:\n    the Node: {}", ended.map_or_else(|error| error.to_string(), |end| format!("{end:?}")));
        if let Some(reason) = seen.lock().map_err(|_| "a task panicked")?.take() {
            println!("    the Edge: {reason}");
        }
    }

    let config = ca.node(ca.issue(&node_uri("gpu-1"), client)?, "edge")?;
    let connector = GrpcConnector::tls(address.as_str(), config, None)?;
    let node = Node::builder(Redacted::new(token.reveal()), Arc::new(connector))
        .provider("demo", Arc::new(Demo::default()))
        .build()?;
    let (mut status, stop) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(stop.clone()));
    println!("gpu-1 with its own token and certificate:\n    ready: {}", status.wait_ready().await);

    let input = r#"{"messages":[{"role":"user","content":"hello"}],"max_tokens":12}"#;
    let (_, mut events) = edge.submit_run(Submit::to_model(ModelName::new("iop-demo")?), input.into()).await?;
    print!("    ");
    while let Some(event) = events.next().await {
        if let RunEventKind::Delta(text) = event.kind {
            print!("{text}");
        }
    }
    println!();
    stop.cancel();
    serving.await??;
    Ok(())
}

/// Why the last handshake failed, as the Edge sees it.
type Seen = Arc<Mutex<Option<String>>>;

/// An Edge that takes these Nodes, each by its token and its identity together.
async fn start_edge(ca: &Ca, nodes: &[(&str, &Token)], seen: Seen) -> Result<(Edge, String), Failure> {
    let mut catalog = Catalog::builder().models_auto(true).require_identity(true);
    for (id, token) in nodes {
        let provider = ProviderConfig::new(ProviderId::new(format!("{id}-demo"))?, CUSTOM_KIND)?;
        let mut provider = ProviderEntry::new(provider);
        provider.config.adapter = iop_execution::AdapterKey::new("demo")?;
        let entry = NodeEntry::new(NodeId::new(*id)?, token.id().clone(), token.hash(), vec![provider]);
        catalog = catalog.node(entry.with_identities(vec![WorkloadIdentity::parse(&node_uri(id))?]));
    }
    let edge = Edge::builder(catalog.build()?).build();
    tokio::spawn(edge.drive());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let attaching = edge.clone();
    let attach = move |link| {
        tokio::spawn(attaching.attach(link));
    };
    let listener = GrpcListener::new(listener).with_tls(ca.edge("edge")?).with_failures(move |_, error| {
        if let Ok(mut seen) = seen.lock() {
            *seen = Some(error.to_string());
        }
    });
    tokio::spawn(listener.serve(attach, CancellationToken::new()));
    Ok((edge, address))
}
