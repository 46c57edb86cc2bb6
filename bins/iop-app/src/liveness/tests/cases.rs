//! The cases of docs/recovery.md, as a client and an operator see them.

use iop_execution::failure::{ExecutionFailure, FailureCode, FailureStage, ProviderContacted};
use iop_execution::{FrameFlags, ToolCallDelta};

use super::*;

/// A streaming client's view: status, whether the answer is whole, the code of its error.
type Seen = (u16, bool, Option<&'static str>);
/// Name, first provider, whether there is a second one, the client's view, outcome, reason.
type Case = (&'static str, Arc<dyn Provider>, bool, Seen, &'static str, &'static str);

fn provider(script: Script, health: Health) -> Arc<dyn Provider> {
    Arc::new(ScriptedProvider::new(script).with_health(health))
}

fn fails(code: FailureCode) -> Script {
    let failure = ExecutionFailure::new(code, FailureStage::Prefill, ProviderContacted::No, "it broke");
    Script::new().fail(ProviderError::new(failure))
}

fn refuses(status: u16) -> Arc<dyn Provider> {
    let script = Script::new().head(http::StatusCode::from_u16(status).unwrap(), "application/json");
    let script = script.frame("{\"error\":{\"message\":\"no\"}}", FrameFlags::ERROR);
    Arc::new(ScriptedProvider::new(script).with_tunnels())
}

#[tokio::test(start_paused = true)]
async fn s05_each_case_looks_to_its_client_as_it_is_told() {
    // REC-3 to REC-7, HLT-4; docs/recovery.md
    let tool = ToolCallDelta { index: 0, id: Some("c".into()), name: Some("f".into()), arguments: "{".into() };
    let cases: Vec<Case> = vec![
        (
            "after content",
            provider(Script::new().delta("half").hang(), Health::Available),
            true,
            (200, false, Some("response_stalled")),
            "ineligible",
            "committed",
        ),
        (
            "after a part of a tool call",
            provider(Script::new().tool_call(tool).hang(), Health::Available),
            true,
            (200, false, Some("response_stalled")),
            "ineligible",
            "tool_call",
        ),
        (
            "the call does not end",
            provider(Script::new().ignore_cancel(), Health::Available),
            true,
            (504, false, Some("response_stalled")),
            "ineligible",
            "ownership_unconfirmed",
        ),
        (
            "unhealthy, and nobody else",
            provider(Script::new().hang(), Health::Unavailable),
            false,
            (504, false, Some("response_stalled")),
            "recovery_exhausted",
            "no_candidate",
        ),
        (
            "alive, and nobody else: three times the same",
            provider(Script::new().hang(), Health::Available),
            false,
            (504, false, Some("response_stalled")),
            "recovery_exhausted",
            "budget",
        ),
        (
            "busy",
            provider(fails(FailureCode::Busy), Health::Available),
            true,
            (200, true, None),
            "recovered_completed",
            "",
        ),
        (
            "unreachable",
            provider(fails(FailureCode::ProviderUnreachable), Health::Available),
            true,
            (200, true, None),
            "recovered_completed",
            "",
        ),
        ("a status that is not covered", refuses(503), true, (502, false, None), "ineligible", "policy_off"),
    ];
    for (case, one, two, (status, whole, code), outcome, reason) in cases {
        let (logged, _guard) = Logged::begin();
        let mut providers = vec![("one", one)];
        providers.extend(two.then(|| ("two", text("hello"))));
        let rig = Rig::new(providers).await;
        let (got, answer) = rig.ask(crate::testhttp::chat("m", true)).await;
        assert_eq!((got, answer.ends_with("data: [DONE]\n\n")), (status, whole), "{case}: {answer}");
        assert_eq!(answer.contains("\"error\""), !whole, "{case}: {answer}");
        assert!(code.is_none_or(|code| answer.contains(&format!("\"code\":\"{code}\""))), "{case}: {answer}");
        let lines = logged.of("edge_liveness_recovery_observation");
        assert_eq!(lines.last(), Some(&recovery(json!({ "outcome": outcome }))), "{case}");
        let reasons: Vec<_> =
            lines.iter().filter_map(|line| line["reason"].as_str()).filter(|why| *why != "none").collect();
        assert_eq!(reasons, if reason.is_empty() { vec![] } else { vec![reason] }, "{case}");
        let unhealthy = count_providers(&rig.runtime.edge().snapshot()).unhealthy;
        if unhealthy == 1 {
            let (got, answer) = rig.ask(crate::testhttp::chat("m", true)).await;
            assert!(got == 503 && answer.contains("no_provider_available"), "{case}: {answer}");
        }
        assert_eq!(unhealthy, usize::from(case.starts_with("unhealthy")), "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn s05_a_client_that_waits_for_a_stall_is_shown_comments_and_then_one_answer() {
    // REC-8; field report 86
    let mut openai = OpenAiConfig::default();
    openai.keepalive_after = Duration::from_secs(1);
    let mute = || provider(Script::new().hang(), Health::Available);
    let rig = Rig::with("m", vec![("one", mute()), ("two", text("hello"))], openai.clone(), "").await;
    let (status, answer) = rig.ask(crate::testhttp::chat("m", true)).await;
    assert!(status == 200 && answer.starts_with(": waiting\n\ndata: "), "{answer}");
    assert!(answer.ends_with("data: [DONE]\n\n") && !answer.contains("error"), "{answer}");
    // With nobody to answer it, the failure is an event of the stream, for the status has gone.
    openai.max_extra_attempts = 0;
    let rig = Rig::with("m", vec![("one", mute())], openai, "").await;
    let (status, answer) = rig.ask(crate::testhttp::chat("m", true)).await;
    assert!(status == 200 && answer.starts_with(": waiting\n\ndata: {\"error\""), "{answer}");
    assert!(answer.contains("response_stalled") && !answer.contains("[DONE]"), "{answer}");
}
