//! The OpenAI surface of an Edge inside an axum application, beside its own routes. A demo Node runs in the same process.
//!
//! Run it: `cargo run -p iop-examples --example embed_edge_axum`

use std::error::Error;
use std::sync::Arc;

use axum::{Router, routing::get};
use iop_adapters::Demo;
use iop_edge_core::Edge;
use iop_edge_core::catalog::{Catalog, NodeEntry, ProviderEntry};
use iop_edge_core::openai::{OpenAiConfig, OpenAiService};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::{NodeId, ProviderId, Redacted};
use iop_node_core::{CUSTOM_KIND, Node};
use iop_wire::ProviderConfig;
use iop_wire::link::memory::{MemoryMode, memory_listener};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let token = Token::generate(TokenKind::Node)?;
    let provider = ProviderConfig::new(ProviderId::new("demo")?, CUSTOM_KIND)?;
    let node =
        NodeEntry::new(NodeId::new("local")?, token.id().clone(), token.hash(), vec![ProviderEntry::new(provider)]);
    let edge = Edge::builder(Catalog::builder().node(node).models_auto(true).build()?).build();
    tokio::spawn(edge.drive());

    let (connector, mut nodes) = memory_listener(MemoryMode::Direct);
    let attaching = edge.clone();
    tokio::spawn(async move {
        while let Some(link) = nodes.accept().await {
            tokio::spawn(attaching.attach(link));
        }
    });
    let node = Node::builder(Redacted::new(token.reveal()), Arc::new(connector))
        .provider("demo", Arc::new(Demo::default()))
        .build()?;
    let (mut status, stop) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(stop.clone()));
    status.wait_ready().await;

    // The surface is a tower service: axum takes it as it is. Real listeners want TLS and keys: see `OpenAiConfig`.
    let openai = OpenAiService::new(Arc::new(edge), OpenAiConfig::default());
    let app = Router::new().route("/hello", get(|| async { "this route is ours" })).fallback_service(openai);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });

    let chat = r#"{"model":"iop-demo","messages":[{"role":"user","content":"hello"}],"max_tokens":8}"#;
    for request in [
        "GET /hello HTTP/1.1\r\nhost: iop\r\nconnection: close\r\n\r\n".to_owned(),
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: iop\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{chat}",
            chat.len()
        ),
    ] {
        let mut socket = TcpStream::connect(address).await?;
        socket.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await?;
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        println!("{} -> {}\n  {body}", request.lines().next().unwrap_or(""), answer.lines().next().unwrap_or(""));
    }

    stop.cancel();
    serving.await??;
    Ok(())
}
