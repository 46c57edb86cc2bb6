use iop_execution::testkit::Answer;

use super::*;

async fn found(list: Answer, props: Option<Answer>) -> Discovery {
    let mut builder = ScriptedBackend::builder().route("GET", "/v1/models", list);
    if let Some(props) = props {
        builder = builder.route("GET", "/props", props);
    }
    let backend = builder.start().await.unwrap();
    let adapter = adapter(&backend);
    adapter.start().await.unwrap();
    let found = adapter.found();
    assert_eq!(adapter.capabilities().targets, found.targets);
    (*found).clone()
}

fn list(models: &str) -> Answer {
    Answer::json(200, format!(r#"{{"object":"list","data":[{models}]}}"#))
}

#[tokio::test]
async fn models_come_with_the_context_length_their_server_tells() {
    // ADP-1, EXE-2
    let found = found(
        list(concat!(
            r#"{"id":"vllm","max_model_len":4096},{"id":"router/a:b","context_length":8192},"#,
            r#"{"id":"lm","max_context_length":1000},{"id":"plain"},{"id":""},{"id":7},{"no":"id"}"#
        )),
        None,
    )
    .await;
    let targets: Vec<_> = found.targets.iter().map(|info| (info.target.as_str(), info.context_length)).collect();
    assert_eq!(targets, [("vllm", Some(4096)), ("router/a:b", Some(8192)), ("lm", Some(1000)), ("plain", None)]);
    assert!(!found.is_iop && found.slots.is_none());
}

#[tokio::test]
async fn llama_cpp_tells_its_slots_and_its_real_context() {
    // LEA-8
    let models = list(r#"{"id":"gemma","owned_by":"llamacpp","meta":{"n_ctx_train":32768}}"#);
    let props = Answer::json(200, r#"{"default_generation_settings":{"n_ctx":2048},"total_slots":4}"#);
    let with = found(models.clone(), Some(props)).await;
    assert_eq!(with.slots.map(NonZeroU32::get), Some(4));
    assert_eq!(with.targets[0].context_length, Some(2048));
    let without = found(models, Some(Answer::json(404, "{}"))).await;
    assert_eq!((without.slots, without.targets[0].context_length), (None, Some(32768)));
}

#[tokio::test]
async fn an_iop_edge_is_recognised() {
    // BIN-1
    assert!(found(list(r#"{"id":"m"}"#).header("x-iop-edge", "1"), None).await.is_iop);
}

#[tokio::test]
async fn lists_are_bounded_and_bad_ones_change_nothing() {
    let many: Vec<_> = (0..2000).map(|at| format!(r#"{{"id":"m{at}"}}"#)).collect();
    assert_eq!(found(list(&many.join(",")), None).await.targets.len(), MAX_TARGETS);
    for bad in [Answer::json(200, "<html>"), Answer::json(200, "[]"), Answer::json(401, "{}"), Answer::reset_at_once()]
    {
        assert_eq!(found(bad, None).await, Discovery::default());
    }
}

#[tokio::test]
async fn a_probe_that_has_no_proof_says_unknown() {
    // ADP-2: health endpoints lie
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    let adapter = adapter(&backend);
    assert_eq!(adapter.probe_health(&target("ok")).await, Health::Unknown);
    assert_eq!(adapter.probe_health(&target("no such model")).await, Health::Unknown);
}
