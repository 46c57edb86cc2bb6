use iop_execution::provider::TargetInfo;

use super::*;

const TAGS: &str = r#"{"models":[
    {"name":"llama3.2:latest","model":"llama3.2:latest","size":1,"digest":"d1","details":{"family":"llama"}},
    {"name":"qwen3:8b","model":"qwen3:8b","digest":"d2"},
    {"name":"nomic-embed-text:latest","model":"nomic-embed-text:latest","digest":"d3"},
    {"name":"","model":""}]}"#;

fn show(context: u64, parameters: &str, can: &[&str]) -> Answer {
    let info = json!({ "general.architecture": "llama", "llama.context_length": context, "llama.embedding_length": 9 });
    Answer::json(200, json!({ "model_info": info, "parameters": parameters, "capabilities": can }).to_string())
}

fn targets(adapter: &Ollama) -> Vec<(String, Option<u64>)> {
    let all = adapter.capabilities().targets;
    all.iter().map(|info: &TargetInfo| (info.target.to_string(), info.context_length)).collect()
}

/// A server with this list, these loaded models, and one answer for every `/api/show` that names a model.
async fn server(tags: &str, ps: Answer, shown: Answer) -> ScriptedBackend {
    let backend = ScriptedBackend::builder()
        .route("GET", "/api/tags", Answer::json(200, tags.to_owned()))
        .route("GET", "/api/ps", ps)
        .model("llama3.2:latest", shown.clone())
        .model("qwen3:8b", shown)
        .model("nomic-embed-text:latest", show(2048, "", &["embedding"]));
    backend.start().await.unwrap()
}

#[tokio::test]
async fn models_come_with_their_context_and_what_is_no_chat_model_is_left_out() {
    // ADP-5
    let ps = Answer::json(
        200,
        r#"{"models":[{"name":"qwen3:8b","model":"qwen3:8b","expires_at":"2026-08-21T10:05:00Z","size_vram":1,"context_length":4096}]}"#,
    );
    let backend = server(
        TAGS,
        ps,
        show(131_072, "stop \"<|x|>\"\nnum_ctx                        8192", &["completion", "tools"]),
    )
    .await;
    let adapter = adapter(&backend);
    assert_eq!(adapter.refresh().await, Refreshed::Answered);
    // The loaded one with what it runs with, the other with what it would be loaded with.
    let want = [("llama3.2:latest".to_owned(), Some(8192)), ("qwen3:8b".to_owned(), Some(4096))];
    assert_eq!(targets(&adapter), want);
    let capabilities = adapter.capabilities();
    assert!(capabilities.tools && !capabilities.reasoning && capabilities.commands && !capabilities.tunnels);
    assert_eq!(
        (adapter.found().thinks(&target("qwen3:8b")), adapter.found().thinks(&target("x"))),
        (Some(false), None)
    );
    assert_eq!(adapter.found().thinks(&target("llama3.2")), Some(false), "no tag is the tag latest");
    // Versions that are known are not asked about again.
    let shows = |backend: &ScriptedBackend| backend.received().iter().filter(|asked| asked.path == "/api/show").count();
    assert_eq!(shows(&backend), 3);
    assert_eq!(adapter.refresh().await, Refreshed::Answered);
    assert_eq!((shows(&backend), targets(&adapter).len()), (3, 2));
}

#[tokio::test]
async fn details_that_are_not_told_cost_no_model() {
    // ADP-5
    for (ps, shown) in [
        (Answer::json(404, "{}"), Answer::json(404, "{}")),
        (Answer::json(200, "<html>"), Answer::json(200, "{}")),
        (Answer::reset_at_once(), Answer::reset_at_once()),
    ] {
        let backend = server(r#"{"models":[{"name":"qwen3:8b"}]}"#, ps, shown).await;
        let adapter = adapter(&backend);
        assert_eq!(adapter.refresh().await, Refreshed::Answered);
        assert_eq!(targets(&adapter), [("qwen3:8b".to_owned(), None)]);
        let capabilities = adapter.capabilities();
        assert!(capabilities.tools && capabilities.reasoning, "not known is not unable");
    }
}

#[tokio::test]
async fn a_server_without_models_has_none_and_one_that_does_not_answer_keeps_its_list() {
    // ADP-5
    for empty in [r#"{"models":[]}"#, r#"{"models":null}"#] {
        let backend = server(empty, Answer::json(200, empty), Answer::json(404, "{}")).await;
        let adapter = adapter(&backend);
        assert_eq!(adapter.refresh().await, Refreshed::Answered, "{empty}");
        assert!(targets(&adapter).is_empty());
    }
    let backend = server(TAGS, Answer::json(404, "{}"), Answer::json(404, "{}")).await;
    let adapter = adapter(&backend);
    adapter.start().await.unwrap();
    assert_eq!(targets(&adapter).len(), 2);
    drop(backend);
    assert_eq!(adapter.refresh().await, Refreshed::Silent);
    assert_eq!(targets(&adapter).len(), 2);
    for bad in [Answer::json(500, "{}"), Answer::json(200, "{}"), Answer::json(200, "<html>"), Answer::reset_at_once()]
    {
        let backend = ScriptedBackend::builder().route("GET", "/api/tags", bad).start().await.unwrap();
        assert_eq!(super::adapter(&backend).refresh().await, Refreshed::Silent);
    }
}

#[tokio::test]
async fn a_list_is_bounded() {
    // ADP-5
    let many: Vec<_> = (0..2000).map(|at| format!(r#"{{"name":"m{at}"}}"#)).collect();
    let tags = format!(r#"{{"models":[{}]}}"#, many.join(","));
    let backend = ScriptedBackend::builder()
        .route("GET", "/api/tags", Answer::json(200, tags))
        .route("POST", "/api/show", Answer::reset_at_once())
        .start()
        .await
        .unwrap();
    let adapter = adapter(&backend);
    adapter.refresh().await;
    assert_eq!(targets(&adapter).len(), MAX_TARGETS);
}
