//! Both engines in one process on tokio's clock: a provider that goes mute, and what is told of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use iop_edge_core::Edge;
use iop_edge_core::catalog::{Candidate, Catalog, ModelGroup, NodeEntry, ProviderEntry, QueueDefaults, Strategy};
use iop_edge_core::observe::{EvidenceResult, EvidenceSource, ProviderLevel};
use iop_edge_core::openai::{
    LivenessDecision, LivenessReason, OpenAiConfig, OpenAiService, Outcome, RequestObserver as _,
};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{
    AdapterKey, Capabilities, Completion, EventSink, FinishReason, Health, ModelName, NodeId, Provider, ProviderError,
    ProviderId, Redacted, RunRequest, Target, async_trait,
};
use iop_node_core::{CUSTOM_KIND, NoObserver, Node, NodeObserver};
use iop_wire::ProviderConfig;
use iop_wire::link::memory::{MemoryMode, memory_listener};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;
use crate::access::AccessLog;
use crate::admin::api::{count_providers, node_view};
use crate::edge_runtime::EdgeRuntime;
use crate::metrics::Gauges;
use crate::node_metrics::NodeMetrics;
use crate::testlog::Logged;

mod cases;
mod sentinel;

/// Stall timeout of the first provider, in milliseconds.
const STALL_MS: u64 = 2_000;

/// Says nothing, and ends when it is told to; probes find what is next in the list, and its last again and again.
#[derive(Debug)]
struct Mute(Mutex<VecDeque<Health>>);

impl Mute {
    fn found(healths: impl IntoIterator<Item = Health>) -> Arc<dyn Provider> {
        Arc::new(Self(Mutex::new(healths.into_iter().collect())))
    }
}

#[async_trait]
impl Provider for Mute {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only()
    }
    async fn execute(&self, _: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        sink.cancelled().await;
        Ok(Completion::new(FinishReason::Stop))
    }
    async fn probe_health(&self, _: &Target) -> Health {
        let mut list = self.0.lock().unwrap();
        if list.len() > 1 { list.pop_front().unwrap() } else { list[0] }
    }
}

fn text(text: &str) -> Arc<dyn Provider> {
    Arc::new(ScriptedProvider::new(Script::text(text)))
}

/// A Node: its token, its adapter, its provider.
type Planned = (Token, String, Arc<dyn Provider>);

/// A Node for each provider.
fn plan(model: &str, providers: Vec<(&str, Arc<dyn Provider>)>, mark: &str) -> (Catalog, Vec<Planned>) {
    let (mut catalog, mut candidates, mut nodes) = (Catalog::builder(), Vec::new(), Vec::new());
    for (name, provider) in providers {
        let token = Token::generate(TokenKind::Node).unwrap();
        let adapter = format!("{mark}adapter-{name}");
        let id = ProviderId::new(format!("{mark}{name}")).unwrap();
        let mut config = ProviderConfig::new(id.clone(), CUSTOM_KIND).unwrap();
        config.adapter = AdapterKey::new(&adapter).unwrap();
        config.response_stall_timeout_ms = STALL_MS;
        if !mark.is_empty() {
            config.base_url = format!("http://127.0.0.1:1/{mark}url");
        }
        let node = NodeId::new(format!("{mark}node-{name}")).unwrap();
        let entry = NodeEntry::new(node, token.id().clone(), token.hash(), vec![ProviderEntry::new(config)]);
        catalog = catalog.node(entry);
        candidates.push(Candidate::new(id, Target::new(format!("{mark}target")).unwrap()));
        nodes.push((token, adapter, provider));
    }
    let mut group = ModelGroup::new(ModelName::new(model).unwrap(), candidates, QueueDefaults::default());
    group.strategy = Some(Strategy::Ordered);
    (catalog.model(group).build().unwrap(), nodes)
}

/// An Edge and a Node for each provider: the model `m` takes the first one that has a place.
struct Rig {
    runtime: EdgeRuntime,
    metrics: NodeMetrics,
    /// Tokens of the Nodes.
    secrets: Vec<String>,
    _stop: DropGuard,
}

impl Rig {
    async fn new(providers: Vec<(&str, Arc<dyn Provider>)>) -> Self {
        Self::with("m", providers, OpenAiConfig::default(), "").await
    }

    /// Every name of the config begins with `mark`.
    async fn with(model: &str, providers: Vec<(&str, Arc<dyn Provider>)>, openai: OpenAiConfig, mark: &str) -> Self {
        let (catalog, nodes) = plan(model, providers, mark);
        let runtime = EdgeRuntime::start(catalog, &format!("{mark}edge"), openai);
        let (stop, metrics) = (CancellationToken::new(), NodeMetrics::new());
        let secrets = nodes.iter().map(|(token, ..)| token.reveal()).collect();
        for node in nodes {
            join(runtime.edge(), node, Arc::new(metrics.clone()), &stop).await;
        }
        Self { runtime, metrics, secrets, _stop: stop.drop_guard() }
    }

    async fn ask(&self, request: Request<Full<Bytes>>) -> (u16, String) {
        ask(self.runtime.openai(), request).await
    }

    /// Series of the six metrics, in the order of their text.
    fn series(&self) -> Vec<String> {
        let text = self.runtime.metrics().render(&Gauges::default()) + &self.metrics.render();
        let six = ["iop_edge_provider_health_", "iop_edge_liveness_recovery_", "iop_node_response_stall"];
        let of_six = |line: &&str| six.iter().any(|name| line.starts_with(name));
        let mut lines: Vec<_> = text.lines().filter(of_six).map(String::from).collect();
        lines.sort();
        lines
    }

    fn edge_series(&self) -> Vec<String> {
        self.series().into_iter().filter(|line| line.starts_with("iop_edge_")).collect()
    }
}

/// Such a Node, ready when this returns.
async fn join(
    edge: &Edge,
    (token, adapter, provider): Planned,
    observer: Arc<dyn NodeObserver>,
    stop: &CancellationToken,
) {
    let (connector, mut listener) = memory_listener(MemoryMode::Encoded);
    let edge = edge.clone();
    tokio::spawn(async move {
        while let Some(link) = listener.accept().await {
            tokio::spawn(edge.attach(link));
        }
    });
    let node = Node::builder(Redacted::new(token.reveal()), Arc::new(connector))
        .provider(adapter, provider)
        .observer(observer)
        .build()
        .unwrap();
    let mut status = node.status();
    tokio::spawn(node.serve(stop.clone()));
    assert!(status.wait_ready().await);
}

async fn ask(openai: &OpenAiService, request: Request<Full<Bytes>>) -> (u16, String) {
    let response = openai.answer(request).await;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

fn health(fields: Value) -> Value {
    line(HEALTH_TARGET, "edge_provider_health_observation", fields)
}

fn recovery(fields: Value) -> Value {
    line(RECOVERY_TARGET, "edge_liveness_recovery_observation", fields)
}

fn line(target: &str, message: &str, mut fields: Value) -> Value {
    fields["level"] = "INFO".into();
    fields["target"] = target.into();
    fields["message"] = message.into();
    fields
}

#[tokio::test(start_paused = true)]
async fn s06_a_stall_a_question_and_a_recovery_are_exactly_these_series_and_lines() {
    // OBS-2, OBS-3, OBS-6, HLT-3, HLT-5, HLT-6, REC-3, REC-7, BIN-3
    let (logged, _guard) = Logged::begin();
    let found = [Health::Unavailable, Health::Unavailable, Health::Unknown, Health::Available];
    let rig = Rig::new(vec![("one", Mute::found(found)), ("two", text("hello"))]).await;
    assert_eq!(rig.series(), [""; 0], "no series before the first observation");
    let (status, answer) = rig.ask(crate::testhttp::chat("m", true)).await;
    assert!(status == 200 && answer.contains("hello") && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    let stalled = [
        "iop_edge_liveness_recovery_eligibility_total{decision=\"eligible\",reason=\"none\"} 1",
        "iop_edge_liveness_recovery_results_total{outcome=\"recovered_completed\"} 1",
        "iop_edge_provider_health_evidence_total{source=\"stall\",result=\"applied\"} 1",
        "iop_edge_provider_health_transitions_total{to=\"unavailable\"} 1",
    ];
    assert_eq!(rig.edge_series(), stalled);
    let seen = rig.runtime.edge().snapshot();
    let (counts, node) = (count_providers(&seen), node_view(&seen.nodes[0]));
    assert_eq!((counts.configured, counts.ready, counts.unhealthy), (2, 1, 1));
    assert_eq!((node.status.as_str(), node.providers[0].health.as_str()), ("ready", "unavailable"));
    let gauges = rig.runtime.metrics().render(&rig.runtime.gauges());
    for line in ["iop_provider_unhealthy{provider=\"one\"} 1", "iop_provider_unhealthy{provider=\"two\"} 0"] {
        assert!(gauges.contains(line), "{gauges}");
    }

    // Questions 5 s, 15 s and 35 s after the stall: still unavailable, nothing found out, available.
    tokio::time::sleep(Duration::from_secs(34)).await;
    let mut asked = vec![
        "iop_edge_provider_health_evidence_total{source=\"capabilities\",result=\"no_op\"} 1",
        "iop_edge_provider_health_evidence_total{source=\"capabilities\",result=\"unknown\"} 1",
    ];
    asked.extend(stalled);
    asked.sort_unstable();
    assert_eq!(rig.edge_series(), asked);
    tokio::time::sleep(Duration::from_secs(2)).await;
    asked.push("iop_edge_provider_health_evidence_total{source=\"capabilities\",result=\"applied\"} 1");
    asked.push("iop_edge_provider_health_transitions_total{to=\"available\"} 1");
    asked.sort_unstable();
    assert_eq!(rig.edge_series(), asked);

    assert_eq!(
        logged.of("edge_provider_health_observation"),
        [
            health(json!({"source": "stall", "result": "applied"})),
            health(json!({"to": "unavailable"})),
            health(json!({"source": "capabilities", "result": "no_op"})),
            health(json!({"source": "capabilities", "result": "unknown"})),
            health(json!({"to": "available"})),
            health(json!({"source": "capabilities", "result": "applied"})),
        ]
    );
    assert_eq!(
        logged.of("edge_liveness_recovery_observation"),
        [
            recovery(json!({"decision": "eligible", "reason": "none"})),
            recovery(json!({"outcome": "recovered_completed"})),
        ]
    );
    // OPS-2: the access log tells the client's side of it: one request, two attempts.
    let text = logged.text();
    let access: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|line: &Value| line["target"] == "iop::access")
        .collect();
    assert_eq!(access.len(), 1);
    assert_eq!((&access[0]["outcome"], &access[0]["attempts"]), (&json!("recovered_completed"), &json!(2)));
    assert_eq!((&access[0]["provider"], &access[0]["duration_ms"]), (&json!("two"), &json!(STALL_MS)));
    let requests = rig.runtime.metrics().render(&Gauges::default());
    let series =
        "iop_requests_total{endpoint=\"chat\",outcome=\"recovered_completed\",ended_by=\"completed\",status=\"2xx\"} 1";
    assert!(requests.contains(series), "{requests}");
}

#[tokio::test(start_paused = true)]
async fn s06_a_stall_that_nobody_mends_is_told_once_with_its_reason() {
    // OBS-3, OBS-6, REC-4, REC-7; field report 54
    let never = || {
        let mut openai = OpenAiConfig::default();
        openai.max_extra_attempts = 0;
        openai
    };
    for (openai, provider, reason, outcome, attempts) in [
        (never(), Mute::found([Health::Available]), "policy_off", "ineligible", 1),
        (OpenAiConfig::default(), Mute::found([Health::Available]), "budget", "recovery_exhausted", 3),
        (OpenAiConfig::default(), Mute::found([Health::Unavailable]), "no_candidate", "recovery_exhausted", 1),
    ] {
        let (logged, _guard) = Logged::begin();
        let rig = Rig::with("m", vec![("one", provider)], openai, "").await;
        let (status, answer) = rig.ask(crate::testhttp::chat("m", true)).await;
        assert_eq!(status, 504, "{answer}");
        assert!(answer.contains("response_stalled"), "{answer}");
        let lines = logged.of("edge_liveness_recovery_observation");
        let ended =
            [recovery(json!({"decision": "ineligible", "reason": reason})), recovery(json!({"outcome": outcome}))];
        assert_eq!(lines[lines.len() - 2..], ended);
        let considered = lines.len() - 1;
        assert_eq!(considered, attempts, "once for each failure: {lines:?}");
        let series = rig.edge_series();
        for want in [
            format!("iop_edge_liveness_recovery_eligibility_total{{decision=\"ineligible\",reason=\"{reason}\"}} 1"),
            format!("iop_edge_liveness_recovery_results_total{{outcome=\"{outcome}\"}} 1"),
        ] {
            assert!(series.contains(&want), "{want}: {series:?}");
        }
        let access = logged.text();
        assert!(access.contains(&format!("\"outcome\":\"{outcome}\"")), "{access}");
        assert!(access.contains(&format!("\"attempts\":{attempts}")), "{access}");
    }
}

#[tokio::test(start_paused = true)]
async fn s06_a_request_without_trouble_leaves_no_trace_of_liveness() {
    // OBS-3
    let (logged, _guard) = Logged::begin();
    let rig = Rig::new(vec![("one", text("hello"))]).await;
    assert_eq!(rig.ask(crate::testhttp::chat("m", false)).await.0, 200);
    assert_eq!(rig.series(), [""; 0]);
    assert!(!logged.text().contains("_observation"));
}

#[tokio::test(start_paused = true)]
async fn a_healthy_stream_that_is_longer_than_its_stall_timeout_completes() {
    // WDG-1; field report 3: 30 s of one word a second, with a limit of 2 s
    let script = (0..30).fold(Script::new(), |script, _| script.wait(Duration::from_secs(1)).delta("word "));
    let rig = Rig::new(vec![("one", Arc::new(ScriptedProvider::new(script)))]).await;
    let (status, answer) = rig.ask(crate::testhttp::chat("m", true)).await;
    assert!(status == 200 && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    assert_eq!(answer.matches("word ").count(), 30);
    assert_eq!(rig.series(), [""; 0]);
}

#[test]
fn s06_every_closed_value_has_its_series_and_its_field() {
    // OBS-2, OBS-3, OBS-6
    let (logged, _guard) = Logged::begin();
    let metrics = EdgeMetrics::new();
    let (engine, surface) = (HealthLog::new(metrics.clone()), AccessLog::new(metrics.clone()));
    let (mut want, mut health_lines, mut recovery_lines) = (Vec::new(), Vec::new(), Vec::new());
    for source in EvidenceSource::ALL.iter().copied() {
        for result in EvidenceResult::ALL.iter().copied() {
            engine.observe(&Observation::HealthEvidence { source, result });
            want.push(format!("provider_health_evidence_total{{source=\"{source}\",result=\"{result}\"}} 1"));
            health_lines.push(health(json!({"source": source.as_str(), "result": result.as_str()})));
        }
    }
    for to in ProviderLevel::ALL.iter().copied() {
        engine.observe(&Observation::HealthTransition { to });
        want.push(format!("provider_health_transitions_total{{to=\"{to}\"}} 1"));
        health_lines.push(health(json!({"to": to.as_str()})));
    }
    for decision in LivenessDecision::ALL.iter().copied() {
        for reason in LivenessReason::ALL.iter().copied() {
            surface.liveness(&LivenessObservation::Considered { decision, reason });
            want.push(format!("liveness_recovery_eligibility_total{{decision=\"{decision}\",reason=\"{reason}\"}} 1"));
            recovery_lines.push(recovery(json!({"decision": decision.as_str(), "reason": reason.as_str()})));
        }
    }
    for outcome in Outcome::ALL.iter().copied() {
        surface.liveness(&LivenessObservation::Ended { outcome });
        want.push(format!("liveness_recovery_results_total{{outcome=\"{outcome}\"}} 1"));
        recovery_lines.push(recovery(json!({"outcome": outcome.as_str()})));
    }
    let text = metrics.render(&Gauges::default());
    let mut got: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("iop_edge_")).map(String::from).collect();
    got.sort();
    want.sort();
    assert_eq!(got, want);
    assert_eq!(logged.of("edge_provider_health_observation"), health_lines);
    assert_eq!(logged.of("edge_liveness_recovery_observation"), recovery_lines);
    // OBS-4: and no other line says any of it.
    assert_eq!(logged.text().lines().count(), health_lines.len() + recovery_lines.len());
}

#[tokio::test(start_paused = true)]
async fn s06_observing_changes_nothing() {
    // OBS-5: with and without anybody who observes, the same calls, probes and answers at the same times.
    let mut histories = Vec::new();
    for observed in [true, false] {
        let one = ScriptedProvider::new(Script::new().hang_then_linger(Duration::from_millis(300)));
        let (one, mute) = one.with_health(Health::Unavailable).into_parts();
        let (two, answers) = ScriptedProvider::new(Script::text("hello")).into_parts();
        let (catalog, nodes) = plan("m", vec![("one", one), ("two", two)], "");
        let stop = CancellationToken::new();
        let (edge, openai) = if observed {
            let runtime = EdgeRuntime::start(catalog, "edge", OpenAiConfig::default());
            (runtime.edge().clone(), runtime.openai().clone())
        } else {
            let edge = Edge::builder(catalog).edge_id("edge").build();
            tokio::spawn(edge.drive());
            (edge.clone(), OpenAiService::new(Arc::new(edge), OpenAiConfig::default()))
        };
        for node in nodes {
            let observer: Arc<dyn NodeObserver> =
                if observed { Arc::new(NodeMetrics::new()) } else { Arc::new(NoObserver) };
            join(&edge, node, observer, &stop).await;
        }
        let began = tokio::time::Instant::now();
        let (status, answer) = ask(&openai, crate::testhttp::chat("m", true)).await;
        assert!(answer.contains("hello"), "{answer}");
        let took = began.elapsed();
        tokio::time::sleep(Duration::from_secs(40)).await;
        histories.push((status, took, mute.counts(), answers.counts()));
        stop.cancel();
    }
    assert_eq!(histories[0], histories[1]);
    assert_eq!((histories[0].1, histories[0].2.probes), (Duration::from_millis(STALL_MS + 300), 4));
}
