use iop_edge_core::observe::{CredentialRefuser, Violation, WaitOutcome};
use iop_execution::failure::{BindingField, CredentialReason};
use iop_wire::CloseCode;

use super::*;

#[test]
fn every_observation_has_a_metric_with_a_closed_label() {
    // OPS-1
    let metrics = EdgeMetrics::new();
    metrics.observe(&Observation::ConnectionOpened);
    metrics.observe(&Observation::LateMessage);
    metrics.observe(&Observation::PoolExhausted);
    for code in CloseCode::ALL {
        metrics.observe(&Observation::ConnectionClosed { node: None, code: *code });
    }
    for violation in Violation::ALL {
        metrics.observe(&Observation::Violated { violation: *violation });
    }
    for outcome in WaitOutcome::ALL {
        let model = iop_execution::ModelName::new("SENTINEL").unwrap();
        metrics.observe(&Observation::Waited { model, wait: Duration::ZERO, outcome: *outcome });
    }
    let (node, provider) = (iop_execution::NodeId::new("gpu-1").unwrap(), iop_execution::ProviderId::new("p").unwrap());
    metrics.observe(&Observation::Penalised { provider: provider.clone() });
    metrics.observe(&Observation::Cooling { provider });
    metrics.observe(&Observation::Suspected { node: node.clone() });
    metrics.observe(&Observation::Withdrawn { node: node.clone() });
    metrics.observe(&Observation::ReceiptMissing);
    metrics.observe(&Observation::ConfigPushed { node, applied: false });
    metrics.observe(&Observation::CredentialIssued);
    metrics.observe(&Observation::CredentialUnused);
    let reason = CredentialReason::BindingMismatch(BindingField::Slot);
    metrics.observe(&Observation::CredentialRefused { by: CredentialRefuser::Node, reason });
    let counts = metrics.credentials();
    assert_eq!(
        (counts.issued, counts.unused, &*counts.refusals),
        (1, 1, &[(CredentialRefuser::Node, "binding_mismatch", 1)][..])
    );
    let text = metrics.render(&Gauges::default());
    for line in [
        r#"iop_credential_leases_total{outcome="issued"} 1"#,
        r#"iop_credential_leases_total{outcome="unused"} 1"#,
        r#"iop_credential_refusals_total{by="node",reason="binding_mismatch"} 1"#,
        r#"iop_provider_penalties_total{provider="p"} 1"#,
        r#"iop_provider_coolings_total{provider="p"} 1"#,
        r#"iop_node_suspicions_total{node="gpu-1"} 1"#,
        r#"iop_runs_withdrawn_total{node="gpu-1"} 1"#,
        "iop_receipts_missing_total 1",
        r#"iop_config_pushes_total{result="refused"} 1"#,
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(
        text.contains("iop_late_messages_total 1") && text.contains("iop_receive_pool_exhausted_total 1"),
        "{text}"
    );
    for violation in Violation::ALL {
        assert!(text.contains(&format!("iop_violations_total{{kind=\"{violation}\"}} 1")), "{text}");
    }
    assert!(!text.contains("SENTINEL"), "{text}");
}

#[test]
fn names_begin_with_iop_and_gauges_show_what_they_are_told() {
    // OPS-1
    let gauges = Gauges {
        nodes: vec![
            NodeGauge { id: "gpu-1".to_owned(), ready: true, draining: false, suspect: true },
            NodeGauge { id: "gpu-2".to_owned(), ready: false, draining: true, suspect: false },
        ],
        providers: vec![ProviderGauge {
            id: "p".to_owned(),
            capacity: 32,
            in_use: 5,
            quarantined: 2,
            ready: true,
            cooling: true,
            unhealthy: true,
        }],
        models: vec![
            ModelGauge { name: "a".to_owned(), waiting: 3, oldest_wait: Duration::from_millis(1500) },
            ModelGauge { name: "b".to_owned(), waiting: 4, oldest_wait: Duration::ZERO },
        ],
    };
    let metrics = EdgeMetrics::new();
    let text = metrics.render(&gauges);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        assert!(line.starts_with("iop_"), "{line}");
    }
    for line in [
        r#"iop_node_ready{node="gpu-1"} 1"#,
        r#"iop_node_ready{node="gpu-2"} 0"#,
        r#"iop_provider_capacity{provider="p"} 32"#,
        r#"iop_provider_in_use{provider="p"} 5"#,
        "iop_requests_waiting 7",
        r#"iop_node_suspect{node="gpu-1"} 1"#,
        r#"iop_node_suspect{node="gpu-2"} 0"#,
        r#"iop_node_draining{node="gpu-1"} 0"#,
        r#"iop_node_draining{node="gpu-2"} 1"#,
        r#"iop_provider_quarantined{provider="p"} 2"#,
        r#"iop_provider_ready{provider="p"} 1"#,
        r#"iop_provider_cooling{provider="p"} 1"#,
        r#"iop_provider_unhealthy{provider="p"} 1"#,
        r#"iop_model_waiting{model="a"} 3"#,
        r#"iop_model_oldest_wait_seconds{model="a"} 1.5"#,
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let node = NodeGauge { id: "gpu-1".to_owned(), ready: false, draining: false, suspect: false };
    metrics.config_revision(4);
    metrics.reloaded(true);
    let text = metrics.render(&Gauges { nodes: vec![node], ..Gauges::default() });
    assert!(text.contains(r#"iop_node_ready{node="gpu-1"} 0"#), "{text}");
    assert!(text.contains("iop_config_revision 4") && text.contains(r#"iop_config_reloads_total{result="applied"} 1"#));
    // CFG-2: what a reload took out has no series
    assert!(!text.contains("gpu-2") && !text.contains(r#"provider="p""#) && !text.contains(r#"model="a""#), "{text}");
}
