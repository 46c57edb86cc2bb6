//! What operators see of a stall: one line of closed values, and the same to the observer (OBS-1, OBS-4, OBS-6).

use std::time::Duration;

use iop_execution::Health;
use iop_execution::testkit::{Logged, Script, alone};
use iop_wire::*;

use super::fixtures::*;
use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_stall_is_one_log_line_and_one_observation_of_closed_values_and_times() {
    // OBS-1, OBS-4, OBS-6, S06
    if !alone("stalls::observed::a_stall_is_one_log_line_and_one_observation_of_closed_values_and_times").unwrap() {
        return;
    }
    let (log, _guard) = Logged::begin();
    let script = Script::text("SENTINEL-OUTPUT").hang_then_linger(Duration::from_millis(250));
    let (mut node, _) = scripted(script, Answer::now(Health::Unavailable));
    let mut conn = node.ready().await;
    stall(&mut conn, 1, Wire::Run).await;
    stall(&mut conn, 2, Wire::Tunnel).await;
    settle().await;
    let mut of_stalls = log.lines();
    of_stalls.retain(|line| line.fields.contains("node_response_stall_observation"));
    let of_stalls: Vec<_> = of_stalls.iter().map(|line| format!("{} {}", line.level, line.fields)).collect();
    let want = |path| {
        format!(
            "INFO message=node_response_stall_observation path={path} provider_health=unavailable \
             liveness_classification=provider_unhealthy ownership_close=confirmed retryable=true \
             timeout_setting=response_stall_timeout_ms timeout_ms=2000 idle_ms=2000 duration_ms=2250"
        )
    };
    assert_eq!(of_stalls, [want("run"), want("tunnel")]);
    assert!(!log.text().contains("SENTINEL"), "{}", log.text());
    let told: Vec<_> = node.record.lines().into_iter().filter(|line| line.starts_with("stalled")).collect();
    assert_eq!(
        told,
        [
            "stalled run unavailable provider_unhealthy confirmed 2.25s",
            "stalled tunnel unavailable provider_unhealthy confirmed 2.25s",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn the_evidence_of_each_kind_is_told_as_its_pair() {
    // WDG-5, OBS-1
    for (health, want) in [
        (Health::Available, "available request_stalled"),
        (Health::Unavailable, "unavailable provider_unhealthy"),
        (Health::Unknown, "unknown health_unknown"),
    ] {
        let (mut node, _) = scripted(Script::new().ignore_cancel(), Answer::now(health));
        let mut conn = node.ready_with(ProviderConfig { close_grace_ms: 1_000, ..config() }).await;
        stall(&mut conn, 1, Wire::Run).await;
        let told = node.record.lines().into_iter().find(|line| line.starts_with("stalled")).unwrap();
        assert_eq!(told, format!("stalled run {want} unconfirmed 3s"));
    }
}
