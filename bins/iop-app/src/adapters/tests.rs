use iop_execution::{AdapterKey, ProviderId};
use iop_wire::{CancelPolicy, WireMode};

use super::*;

fn config(kind: &str, base_url: &str, auth: &str) -> ProviderConfig {
    ProviderConfig {
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new("p").unwrap(),
        kind: kind.to_owned(),
        base_url: base_url.to_owned(),
        wire: WireMode::Auto,
        capacity: 0,
        long_capacity: 0,
        targets: Vec::new(),
        response_stall_timeout_ms: 0,
        first_response_timeout_ms: 0,
        stall_per_1k_prompt_ms: 0,
        close_grace_ms: 0,
        probe_timeout_ms: 0,
        terminal_linger_ms: 0,
        cancel_policy: CancelPolicy::Abort,
        auth: auth.to_owned(),
        credential: None,
    }
}

#[tokio::test]
async fn every_kind_that_config_may_name_is_made() {
    // ADP-1
    for kind in crate::config::edge::KINDS {
        let url = if *kind == "demo" { "" } else { "http://127.0.0.1:1" };
        assert!(BuiltIn::default().build(&config(kind, url, "")).await.is_ok(), "{kind}");
        assert!(BuiltIn::default().inventory().iter().any(|known| known.kind == *kind), "{kind}");
    }
    let unknown = BuiltIn::default().build(&config("tgi", "http://127.0.0.1:1", "")).await;
    assert!(matches!(unknown, Err(AdapterBuildError::UnknownKind(_))));
}

#[tokio::test]
async fn a_key_that_is_not_there_is_told_by_its_reference_only() {
    // CRD-16
    for (auth, words) in [
        ("env:IOP_TEST_NEVER_SET", "IOP_TEST_NEVER_SET"),
        ("file:/nowhere/key", "/nowhere/key"),
        ("sk-SENTINEL", "reference"),
    ] {
        let error = BuiltIn::default()
            .build(&config("openai_compat", "http://127.0.0.1:1", auth))
            .await
            .map(|_| ())
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words) && !text.contains("SENTINEL"), "{text}");
    }
}
