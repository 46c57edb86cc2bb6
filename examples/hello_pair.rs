//! An Edge and a Node in one program, a provider of our own, one request: the whole path in one file.
//!
//! Run it: `cargo run -p iop-examples --example hello_pair`

use std::error::Error;
use std::sync::Arc;

use futures_util::StreamExt;
use iop_edge_core::Edge;
use iop_edge_core::api::Submit;
use iop_edge_core::catalog::{Catalog, NodeEntry, ProviderEntry};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::{
    Capabilities, Completion, EventSink, FinishReason, ModelName, NodeId, Provider, ProviderError, ProviderId,
    Redacted, RunEventKind, RunRequest, Target, async_trait, provider::TargetInfo,
};
use iop_node_core::{CUSTOM_KIND, Node};
use iop_wire::ProviderConfig;
use iop_wire::link::memory::{MemoryMode, memory_listener};
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
struct Parrot;

#[async_trait]
impl Provider for Parrot {
    fn capabilities(&self) -> Capabilities {
        let parrot = Target::new("parrot").map(TargetInfo::new);
        Capabilities::runs_only().with_targets(parrot.into_iter().collect())
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let said = run.input.messages().last().map(|message| message.text()).unwrap_or_default();
        for word in said.split_inclusive(' ') {
            sink.delta(word).await?;
        }
        Ok(Completion::new(FinishReason::Stop))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The Edge: one Node it will accept, one provider on it; models are whatever that provider lists.
    let token = Token::generate(TokenKind::Node)?;
    let provider = ProviderConfig::new(ProviderId::new("parrot")?, CUSTOM_KIND)?;
    let node =
        NodeEntry::new(NodeId::new("laptop")?, token.id().clone(), token.hash(), vec![ProviderEntry::new(provider)]);
    let edge = Edge::builder(Catalog::builder().node(node).models_auto(true).build()?).build();
    tokio::spawn(edge.drive());

    // A link in memory. Over a network: `iop_wire::link::grpc`.
    let (connector, mut listener) = memory_listener(MemoryMode::Direct);
    let serving = edge.clone();
    tokio::spawn(async move {
        while let Some(link) = listener.accept().await {
            tokio::spawn(serving.attach(link));
        }
    });

    // The Node dials, registers, starts its providers, and takes work.
    let node = Node::builder(Redacted::new(token.reveal()), Arc::new(connector))
        .provider("parrot", Arc::new(Parrot))
        .build()?;
    let (mut status, stop) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(stop.clone()));
    status.wait_ready().await;

    let input = r#"{"messages":[{"role":"user","content":"hello from both ends"}]}"#;
    let (admitted, mut events) = edge.submit_run(Submit::to_model(ModelName::new("parrot")?), input.into()).await?;
    println!("{} on {} answers:", admitted.provider, admitted.node);
    while let Some(event) = events.next().await {
        match event.kind {
            RunEventKind::Delta(text) => println!("  {:>2}  {text:?}", event.seq),
            other => println!("  {:>2}  {other:?}", event.seq),
        }
    }

    stop.cancel();
    serving.await??;
    Ok(())
}
