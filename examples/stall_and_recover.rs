//! A provider goes mute in the middle of a request. Its Node notices, ends the call and asks whether it lives; the Edge sends
//! the request to another provider, and the client sees one answer. Prints the timeline.
//!
//! Run it: `cargo run -p iop-examples --example stall_and_recover`

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::{body::Body, body::to_bytes, http::Request};
use iop_adapters::Demo;
use iop_edge_core::Edge;
use iop_edge_core::catalog::{Catalog, NodeEntry, ProviderEntry, Strategy};
use iop_edge_core::observe::{Observation, Observer};
use iop_edge_core::openai::{LivenessObservation, OpenAiConfig, OpenAiService, RequestObserver, RequestRecord};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::provider::{Capabilities, Health, Provider, ProviderError, TargetInfo};
use iop_execution::{Completion, EventSink, FinishReason, RunRequest, Usage, async_trait};
use iop_execution::{NodeId, ProviderId, Redacted, Target};
use iop_node_core::{CUSTOM_KIND, Node, NodeObserver, StallObservation};
use iop_wire::ProviderConfig;
use iop_wire::link::memory::{MemoryMode, memory_listener};
use tokio_util::sync::CancellationToken;

/// Listens to everybody who has something to say, and is the provider that goes mute.
#[derive(Debug, Clone, Copy)]
struct Timeline(Instant);

impl Timeline {
    fn say(self, who: &str, what: impl AsRef<str>) {
        println!("{:>5} ms  {who:<10}  {}", self.0.elapsed().as_millis(), what.as_ref());
    }
}

#[async_trait]
impl Provider for Timeline {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only().with_targets(Target::new("iop-demo").map(TargetInfo::new).into_iter().collect())
    }

    async fn execute(&self, _: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        self.say("provider a", "has the request");
        tokio::time::sleep(Duration::from_millis(200)).await;
        sink.usage(Usage { input_tokens: Some(5), ..Usage::default() }).await?;
        self.say("provider a", "has read the prompt: its last progress. Now it is mute");
        sink.cancelled().await;
        self.say("provider a", "stall claimed: it is told to stop");
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.say("provider a", "has stopped");
        Ok(Completion::new(FinishReason::Stop))
    }

    async fn probe_health(&self, _: &Target) -> Health {
        self.say("provider a", "is probed: unavailable");
        Health::Unavailable
    }
}

impl NodeObserver for Timeline {
    fn response_stalled(&self, stall: &StallObservation) {
        let (health, close) = (stall.provider_health, stall.ownership_close.as_str());
        self.say("node a", format!("tells of the stall: provider_health={health}, ownership_close={close}"));
    }
}

impl Observer for Timeline {
    fn observe(&self, observation: &Observation) {
        match observation {
            Observation::HealthEvidence { .. } | Observation::HealthTransition { .. } => {
                self.say("edge", format!("{observation:?}"));
            }
            _ => {}
        }
    }
}

impl RequestObserver for Timeline {
    fn request_ended(&self, record: &RequestRecord) {
        self.say("edge", format!("the request ended: {} after {} attempts", record.outcome, record.attempts));
    }
    fn liveness(&self, observation: &LivenessObservation) {
        self.say("edge", format!("recovery: {observation:?}"));
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (timeline, stop) = (Timeline(Instant::now()), CancellationToken::new());
    let mut catalog = Catalog::builder().models_auto(true).auto_strategy(Some(Strategy::Ordered));
    let (connector, mut links) = memory_listener(MemoryMode::Direct);
    let (connector, mut nodes) = (Arc::new(connector), Vec::new());
    for (name, provider) in [("a", Arc::new(timeline) as Arc<dyn Provider>), ("b", Arc::new(Demo::default()))] {
        let (id, token) = (NodeId::new(format!("node-{name}"))?, Token::generate(TokenKind::Node)?);
        let mut config = ProviderConfig::new(ProviderId::new(name)?, CUSTOM_KIND)?;
        config.response_stall_timeout_ms = 1_000;
        let entry = NodeEntry::new(id, token.id().clone(), token.hash(), vec![ProviderEntry::new(config)]);
        catalog = catalog.node(entry);
        let node = Node::builder(Redacted::new(token.reveal()), connector.clone()).provider(name, provider);
        nodes.push(node.observer(Arc::new(timeline)).build()?);
    }
    let edge = Edge::builder(catalog.build()?).observer(Arc::new(timeline)).build();
    tokio::spawn(edge.drive());
    let openai = OpenAiService::new(Arc::new(edge.clone()), OpenAiConfig::default().with_observer(Arc::new(timeline)));
    tokio::spawn(async move { while links.accept().await.map(|link| tokio::spawn(edge.attach(link))).is_some() {} });
    for node in nodes {
        let mut status = node.status();
        tokio::spawn(node.serve(stop.clone()));
        status.wait_ready().await;
    }

    timeline.say("client", "asks");
    let ask = r#"{"model":"iop-demo","messages":[{"role":"user","content":"anybody there?"}],"max_tokens":8}"#;
    let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    let response = openai.answer(request.body(Body::from(ask))?).await;
    let body = to_bytes(Body::new(response.into_body()), 1 << 20).await?;
    timeline.say("client", String::from_utf8_lossy(&body));
    stop.cancel();
    Ok(())
}
