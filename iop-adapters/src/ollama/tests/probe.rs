//! ADP-2 for Ollama.

use super::*;

fn listing(names: &[&str]) -> Answer {
    let all: Vec<_> = names.iter().map(|name| json!({ "name": name, "model": name, "context_length": 4096 })).collect();
    Answer::json(200, json!({ "models": all }).to_string())
}

fn token() -> Answer {
    Answer::json(
        200,
        r#"{"model":"m","created_at":"x","response":"b","done":true,"done_reason":"length","eval_count":1}"#,
    )
}

/// What is found of the model `m`, and how often a token was asked for.
async fn probed(ps: Answer, tags: Answer, made: Answer) -> (Health, usize) {
    let backend = ScriptedBackend::builder()
        .route("GET", "/api/ps", ps)
        .route("GET", "/api/tags", tags)
        .route("POST", "/api/generate", made)
        .route("GET", "/api/version", Answer::json(200, r#"{"version":"0.12.0"}"#))
        .start()
        .await
        .unwrap();
    let adapter = adapter(&backend);
    let health = tokio::time::timeout(Duration::from_millis(300), adapter.probe_health(&target("m"))).await;
    let received = backend.received();
    assert!(!received.iter().any(|asked| asked.path == "/" || asked.path == "/api/version"), "these prove nothing");
    let asked: Vec<_> = received.iter().filter(|asked| asked.path == "/api/generate").collect();
    for asked in &asked {
        let body: Value = serde_json::from_slice(&asked.body).unwrap();
        assert_eq!(
            body["options"],
            json!({ "num_predict": 1, "num_ctx": 4096 }),
            "another context would load it again"
        );
        assert!(body.get("keep_alive").is_none() && body["model"] == "m");
    }
    (health.unwrap_or(Health::Unknown), asked.len())
}

#[tokio::test]
async fn only_a_loaded_model_is_asked_for_a_token() {
    // ADP-2: a probe never loads a model
    for (loaded, listed, made, want, asked) in [
        (&["m:latest"][..], &["m:latest"][..], token(), Health::Available, 1),
        (&["x", "m"], &["m"], token(), Health::Available, 1),
        (&["m"], &["m"], Answer::new(200).late_head().hang(), Health::Unknown, 1),
        (&["m"], &["m"], Answer::json(500, r#"{"error":"x"}"#), Health::Unknown, 1),
        (&["m"], &["m"], Answer::json(200, r#"{"done":true,"done_reason":"load"}"#), Health::Unknown, 1),
        (&["m"], &["m"], Answer::json(200, r#"{"error":"x","done":true}"#), Health::Unknown, 1),
        (&["m"], &["m"], Answer::json(200, r#"{"response":"b","done":false}"#), Health::Unknown, 1),
        // Pulled but not loaded, another tag of it loaded, gone.
        (&[], &["m"], token(), Health::Unknown, 0),
        (&["m:7b"], &["m", "m:7b"], token(), Health::Unknown, 0),
        (&["x"], &["x"], token(), Health::Unavailable, 0),
        (&[], &[], token(), Health::Unavailable, 0),
    ] {
        let got = probed(listing(loaded), listing(listed), made).await;
        assert_eq!(got, (want, asked), "{loaded:?} {listed:?}");
    }
}

#[tokio::test]
async fn doubt_is_unknown_and_refused_is_unavailable() {
    // ADP-2
    for odd in [
        Answer::json(200, "{}"),
        Answer::json(200, "<html>"),
        Answer::json(500, r#"{"models":[]}"#),
        Answer::reset_at_once(),
        Answer::new(200).late_head().hang(),
    ] {
        assert_eq!(probed(odd.clone(), listing(&[]), token()).await, (Health::Unknown, 0));
        assert_eq!(probed(listing(&[]), odd, token()).await, (Health::Unknown, 0));
    }
    let free_port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let adapter = Ollama::new(OllamaConfig::new(format!("http://{free_port}"))).unwrap();
    assert_eq!(adapter.probe_health(&target("m")).await, Health::Unavailable);
}
