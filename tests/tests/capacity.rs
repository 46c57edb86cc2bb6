//! What a backend says about its places counts, whatever the config hopes for.

use iop_app::adapters::BuiltIn;
use iop_execution::ProviderId;
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_node_core::AdapterFactory;
use iop_node_core::adapters::effective_capacity;
use iop_wire::ProviderConfig;

#[tokio::test]
async fn a_configured_capacity_does_not_hide_the_slots_of_the_backend() {
    // LEA-8, field report 47: an engine must never see more than it has places for
    let models = r#"{"object":"list","data":[{"id":"m"}]}"#;
    let backend = ScriptedBackend::builder()
        .route("GET", "/v1/models", Answer::json(200, models).header("server", "llama.cpp"))
        .route("GET", "/props", Answer::json(200, r#"{"total_slots":4}"#))
        .start()
        .await
        .unwrap();
    let mut config = ProviderConfig::new(ProviderId::new("llama").unwrap(), "llama_cpp").unwrap();
    config.base_url = backend.base_url();
    for (capacity, places) in [(32, 4), (2, 2), (0, 4)] {
        config.capacity = capacity;
        let provider = BuiltIn::default().build(&config).await.unwrap();
        provider.start().await.unwrap();
        let slots = provider.capabilities().max_concurrency;
        assert_eq!(slots.map(u32::from), Some(4));
        assert_eq!(effective_capacity(capacity, slots), places);
    }
}
