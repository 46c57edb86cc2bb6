//! Names and texts are planted wherever they can come from, and looked for wherever they must not be (OBS-4).

use futures_util::StreamExt as _;
use http::StatusCode;
use iop_edge_core::api::Submit;
use iop_edge_core::openai::{AllowedModels, ApiKeyRecord, ApiKeys};
use iop_execution::failure::{ExecutionFailure, FailureCode, FailureStage, ProviderContacted};
use iop_execution::{FrameFlags, Principal, SessionId};

use super::*;

/// Begins every name that a config gives.
const NAME: &str = "PLANTED-NAME-";
/// Texts that no log, metric, error or `Debug` may hold.
const PROMPT: &str = "PLANTED-PROMPT";
const OUTPUT: &str = "PLANTED-OUTPUT";
const ERROR: &str = "PLANTED-ERROR";
const HEADER: &str = "PLANTED-HEADER";
const URL: &str = "PLANTED-URL";
const KEY: &str = "PLANTED-KEY";
const MADE_UP: &str = "PLANTED-MADE-UP";

fn request(key: &str, model: &str, stream: bool) -> Request<Full<Bytes>> {
    let body = format!(
        r#"{{"model":"{model}","stream":{stream},"user":"{PROMPT}","messages":[{{"role":"user","content":"{PROMPT}"}}]}}"#
    );
    Request::post(format!("/v1/chat/completions?key={URL}"))
        .header("host", "x")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {key}"))
        .header("cookie", HEADER)
        .header("x-request-id", HEADER)
        .header("traceparent", HEADER)
        .body(Full::from(body))
        .unwrap()
}

fn failing(code: FailureCode) -> ProviderError {
    let failure = ExecutionFailure::new(code, FailureStage::Prefill, ProviderContacted::Yes, "it broke");
    ProviderError::new(failure).with_source(ERROR)
}

fn scripted(script: Script) -> Arc<dyn Provider> {
    Arc::new(ScriptedProvider::new(script).with_health(Health::Unavailable))
}

fn tunnelled(script: Script) -> Arc<dyn Provider> {
    Arc::new(ScriptedProvider::new(script).with_tunnels().with_health(Health::Unavailable))
}

/// Pairs of providers for the model, the first of which fails in its own way.
fn failures() -> Vec<Vec<(&'static str, Arc<dyn Provider>)>> {
    let two = || ("two", text(OUTPUT));
    let chunk = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{OUTPUT}\"}}}}]}}\n\n");
    let refusal = format!("{{\"error\":{{\"message\":\"{ERROR}\"}}}}");
    let refused = Script::new().head(StatusCode::SERVICE_UNAVAILABLE, "application/json");
    vec![
        vec![("one", scripted(Script::new().hang())), two()],
        vec![("one", scripted(Script::new().delta(OUTPUT).reasoning(OUTPUT).hang())), two()],
        vec![("one", scripted(Script::new().ignore_cancel())), two()],
        vec![("one", tunnelled(Script::new().hang())), two()],
        vec![("one", tunnelled(Script::new().frame(chunk, FrameFlags::CONTENT).hang())), two()],
        vec![("one", tunnelled(refused.frame(refusal, FrameFlags::ERROR))), two()],
        vec![("one", scripted(Script::new().fail(failing(FailureCode::ProviderUnreachable)))), two()],
        vec![("one", scripted(Script::new().fail(failing(FailureCode::Busy))))],
        vec![("one", scripted(Script::new().delta(OUTPUT).fail(failing(FailureCode::ProviderProtocol))))],
    ]
}

/// Everything that was written down or could be, and what must not be in it.
#[derive(Default)]
struct Found {
    logs: String,
    metrics: String,
    /// What clients were told that failed, and `Debug` of what holds requests, answers and secrets.
    others: String,
    six: String,
    secrets: Vec<String>,
}

/// One history with each of the failures.
async fn history(providers: Vec<(&'static str, Arc<dyn Provider>)>, found: &mut Found) {
    let (logged, _guard) = Logged::begin();
    let key = Token::generate(TokenKind::ApiKey).unwrap();
    let principal = Principal::new(format!("{NAME}team")).unwrap();
    let record = ApiKeyRecord::new(key.id().clone(), key.hash(), principal, AllowedModels::All);
    let openai = OpenAiConfig::default().with_keys(Arc::new(ApiKeys::records(vec![record]).unwrap()));
    let model = format!("{NAME}model");
    let rig = Rig::with(&model, providers, openai, NAME).await;
    let secret = key.reveal();
    for stream in [true, false] {
        let (status, answer) = rig.ask(request(&secret, &model, stream)).await;
        if status != 200 {
            found.others.push_str(&answer.replace(ERROR, "what a provider says goes to its own client"));
        }
    }
    for bad in [request(KEY, &model, true), request(&secret, MADE_UP, true)] {
        let (status, answer) = rig.ask(bad).await;
        assert!([401, 404].contains(&status));
        found.others.push_str(&answer.replace(MADE_UP, ""));
    }
    let mut torn = request(&secret, &model, true);
    *torn.body_mut() = Full::from(format!("{{\"model\":\"{model}\",\"messages\":[{PROMPT}"));
    found.others.push_str(&rig.ask(torn).await.1);

    // The engine by itself, which takes a session.
    let mut submit = Submit::to_model(ModelName::new(&model).unwrap());
    submit.session_id = Some(SessionId::new(format!("{NAME}session")).unwrap());
    submit.principal = Some(Principal::new(format!("{NAME}team")).unwrap());
    let input = format!(r#"{{"messages":[{{"role":"user","content":"{PROMPT}"}}]}}"#);
    found.others.push_str(&format!("{submit:?}"));
    match rig.runtime.edge().submit_run(submit, input.into()).await {
        Ok((admitted, mut events)) => {
            found.others.push_str(&format!("{admitted:?} {events:?}"));
            while let Some(event) = events.next().await {
                found.others.push_str(&format!("{event:?}"));
            }
        }
        Err(error) => found.others.push_str(&format!("{error} {error:?}")),
    }
    tokio::time::sleep(Duration::from_secs(40)).await;
    found.others.push_str(&format!("{:?} {:?} {:?}", rig.runtime, rig.runtime.edge().snapshot(), key));
    found.six.push_str(&rig.series().join("\n"));
    found.metrics.push_str(&(rig.runtime.metrics().render(&rig.runtime.gauges()) + &rig.metrics.render()));
    found
        .secrets
        .extend(rig.secrets.iter().chain([&secret]).map(|token| token.splitn(3, '_').nth(2).unwrap().to_owned()));
    found.logs.push_str(&logged.text());
}

#[tokio::test(start_paused = true)]
async fn s06_nothing_that_names_somebody_is_in_the_dedicated_logs_and_metrics_and_no_text_is_anywhere() {
    // OBS-4, OBS-6, API-15, OPS-2
    let mut found = Found::default();
    for providers in failures() {
        history(providers, &mut found).await;
    }
    let lines = |names: &[&str]| {
        let of: Vec<_> = found.logs.lines().filter(|line| names.iter().any(|name| line.contains(name))).collect();
        assert!(of.len() > 3, "{names:?}");
        of.join("\n")
    };
    let dedicated =
        ["node_response_stall_observation", "edge_provider_health_observation", "edge_liveness_recovery_observation"];
    let of_dedicated = dedicated.map(|name| lines(&[name])).join("\n");
    for metric in [
        "iop_node_response_stalls_total",
        "iop_node_response_stall_duration_seconds",
        "iop_edge_provider_health_evidence_total",
        "iop_edge_provider_health_transitions_total",
        "iop_edge_liveness_recovery_eligibility_total",
        "iop_edge_liveness_recovery_results_total",
    ] {
        assert!(found.six.contains(metric), "{metric} was never moved");
    }
    // The markers are where they may be, so that not finding them means something.
    let access = lines(&["iop::access"]);
    assert!(access.contains(NAME) && found.metrics.contains(NAME) && found.others.contains(NAME));

    let mut ids: Vec<String> = found.secrets.clone();
    for line in access.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        ids.extend(["request_id", "run_id"].iter().filter_map(|id| line[id].as_str()).map(String::from));
    }
    assert!(ids.len() > 40);
    for text in [&of_dedicated, &found.six] {
        assert!(!text.contains("PLANTED"), "{text}");
        for id in &ids {
            assert!(!text.contains(id.as_str()), "{id}: {text}");
        }
    }
    for (place, text) in [("logs", &found.logs), ("metrics", &found.metrics), ("errors and Debug", &found.others)] {
        for marker in [PROMPT, OUTPUT, ERROR, HEADER, URL, KEY, MADE_UP] {
            let at = text.find(marker);
            assert!(at.is_none(), "{marker} in {place}: {}", &text[at.unwrap().saturating_sub(300)..][..400]);
        }
        assert!(found.secrets.iter().all(|secret| !text.contains(secret.as_str())), "a token in {place}");
    }
    // Not repeated in general logs: the closed words of the six metrics stand in the dedicated lines only.
    for word in ["provider_unhealthy", "health_unknown", "request_stalled", "\"decision\"", "\"result\""] {
        let of_word = found.logs.lines().filter(|line| line.contains(word));
        let elsewhere: Vec<_> = of_word.filter(|line| !dedicated.iter().any(|name| line.contains(name))).collect();
        assert_eq!(elsewhere, [""; 0], "{word}");
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_made_up_names_add_no_series() {
    // OBS-4, API-15; field report 89
    let rig = Rig::new(vec![("one", text("hello"))]).await;
    let series = |rig: &Rig| {
        let text = rig.runtime.metrics().render(&rig.runtime.gauges()) + &rig.metrics.render();
        let names = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
        names.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    };
    let named = |name: &str| Request::get(format!("/v1/models/{name}")).body(Full::<Bytes>::default()).unwrap();
    assert_eq!(rig.ask(crate::testhttp::chat("m", true)).await.0, 200);
    assert_eq!(rig.ask(crate::testhttp::chat("nobody", true)).await.0, 404);
    assert_eq!(rig.ask(named("nobody")).await.0, 404);
    let before = series(&rig);
    for n in 0_u64..5_000 {
        // Names without a pattern.
        let name = format!("{:016x}", n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        assert_eq!(rig.ask(crate::testhttp::chat(&name, n % 2 == 0)).await.0, 404);
        assert_eq!(rig.ask(named(&format!("x{name}"))).await.0, 404);
    }
    assert_eq!(series(&rig), before);
    assert!(before.len() > 50);
}
