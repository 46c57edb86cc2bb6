use serde_json::json;

use super::*;
use crate::config::LoadedEdge;
use crate::testdir::TestDir;
use crate::testlog::Logged;

fn config(dir: &TestDir, provider: &str, rest: &str) -> LoadedEdge {
    let text = format!(
        "nodes:
  - id: gpu-1
    token_hash: \"sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\"
    providers:
      - {{ id: one, kind: demo }}
      - {{ id: two, kind: vllm, base_url: \"http://127.0.0.1:8000\"{provider} }}
      - {{ id: three, kind: demo, enabled: false }}
{rest}"
    );
    let (loaded, problems) = EdgeConfig::load(&dir.write("edge.yaml", &text));
    loaded.unwrap_or_else(|| panic!("{problems}"))
}

#[test]
fn every_timer_in_force_is_in_the_log_under_its_own_name_defaults_too() {
    // OPS-1, WDG-7; field reports 17, 20
    let (dir, (logged, _guard)) = (TestDir::new(), Logged::begin());
    let set = ", response_stall_timeout_ms: 60000, first_response_timeout_ms: 90000, first_response_per_1k_prompt_ms: 500, \
               probe_timeout_ms: 1000, close_grace_ms: 2000, terminal_linger_ms: 3000";
    log(None, &config(&dir, set, "").config);
    let line = |provider: &str, times: [u64; 6]| {
        json!({
            "level": "INFO", "target": "iop_app::timers", "message": "timers of a provider", "provider": provider,
            "response_stall_timeout_ms": times[0], "first_response_timeout_ms": times[1],
            "first_response_per_1k_prompt_ms": times[2], "probe_timeout_ms": times[3], "close_grace_ms": times[4],
            "terminal_linger_ms": times[5],
        })
    };
    let mut two = line("two", [60_000, 90_000, 500, 1_000, 2_000, 3_000]);
    two["connect_timeout_ms"] = 10_000.into();
    let one = line("one", [300_000, 300_000, 0, 5_000, 5_000, 2_000]);
    assert_eq!(logged.of("timers of a provider"), [one, two]);
    assert_eq!(
        logged.of("timers of the edge"),
        [json!({
            "level": "INFO", "target": "iop_app::timers", "message": "timers of the edge", "queue_timeout_ms": 30_000,
            "request_deadline_ms": 0, "keepalive_after_ms": 20_000, "suspicion_withdraw_ms": 10_000,
            "dispatch_ack_timeout_ms": 2_000,
        })]
    );
}

#[test]
fn a_reload_logs_the_timers_that_it_changed() {
    // CFG-2; field report 20
    let dir = TestDir::new();
    let before = config(&dir, "", "").config;
    let (logged, _guard) = Logged::begin();
    log(Some(&before), &before);
    assert_eq!(logged.text(), "");
    log(Some(&before), &config(&dir, ", response_stall_timeout_ms: 60000", "").config);
    let lines = logged.of("timers of a provider");
    assert_eq!(lines.len(), 1);
    assert_eq!((&lines[0]["provider"], &lines[0]["first_response_timeout_ms"]), (&json!("two"), &json!(60_000)));
    log(Some(&before), &config(&dir, "", "recovery: { keepalive_after_ms: 0 }\n").config);
    assert_eq!(logged.of("timers of the edge").len(), 1);
    assert_eq!(logged.of("timers of a provider").len(), 1);
}
