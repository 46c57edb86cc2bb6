//! A Node inside a service of our own, dialling an Edge over gRPC. The Edge runs in the same program to keep this short.
//!
//! Run it: `cargo run -p iop-examples --example embed_node`

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;

use futures_util::StreamExt;
use iop_adapters::Demo;
use iop_adapters::decorators::Limit;
use iop_edge_core::Edge;
use iop_edge_core::api::Submit;
use iop_edge_core::catalog::{Catalog, NodeEntry, ProviderEntry};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::{ModelName, NodeId, ProviderId, Redacted, RunEventKind};
use iop_node_core::{CUSTOM_KIND, Node, ReconnectPolicy};
use iop_wire::ProviderConfig;
use iop_wire::link::grpc::{GrpcConnector, GrpcListener};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let token = Token::generate(TokenKind::Node)?;
    let (edge, address) = start_edge(&token).await?;

    // What a service that embeds a Node writes: a connector, its providers, and `serve`.
    let connector = GrpcConnector::plaintext(address)?; // across a network: `GrpcConnector::tls`
    let provider = Limit::new(Arc::new(Demo::default()), NonZeroU32::MIN);
    let node = Node::builder(Redacted::new(token.reveal()), Arc::new(connector))
        .provider("demo", Arc::new(provider))
        .reconnect(ReconnectPolicy::default())
        .build()?;
    let (mut status, stop) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(stop.clone()));
    println!("node ready: {}", status.wait_ready().await);

    let input = r#"{"messages":[{"role":"user","content":"hello"}],"max_tokens":12}"#;
    let (_, mut events) = edge.submit_run(Submit::to_model(ModelName::new("iop-demo")?), input.into()).await?;
    while let Some(event) = events.next().await {
        match event.kind {
            RunEventKind::Delta(text) => print!("{text}"),
            RunEventKind::Complete(finish) => println!("\nfinish: {finish}, usage: {:?}", event.usage),
            other => println!("{other:?}"),
        }
    }

    // A shutdown finishes what runs, says Goodbye, and returns.
    stop.cancel();
    println!("node ended: {:?}", serving.await??);
    Ok(())
}

async fn start_edge(token: &Token) -> Result<(Edge, String), Box<dyn Error>> {
    let provider = ProviderConfig::new(ProviderId::new("demo")?, CUSTOM_KIND)?;
    let node =
        NodeEntry::new(NodeId::new("gpu-1")?, token.id().clone(), token.hash(), vec![ProviderEntry::new(provider)]);
    let edge = Edge::builder(Catalog::builder().node(node).models_auto(true).build()?).build();
    tokio::spawn(edge.drive());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let attaching = edge.clone();
    let attach = move |link| {
        tokio::spawn(attaching.attach(link));
    };
    tokio::spawn(GrpcListener::new(listener).serve(attach, CancellationToken::new()));
    Ok((edge, address))
}
