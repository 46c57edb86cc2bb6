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
    assert_eq!((with.slots.map(NonZeroU32::get), with.server), (Some(4), Server::LlamaCpp));
    assert_eq!(with.targets[0].context_length, Some(2048));
    let without = found(models, Some(Answer::json(404, "{}"))).await;
    assert_eq!((without.slots, without.targets[0].context_length), (None, Some(32768)));
}

#[tokio::test]
async fn a_server_serves_messages_if_it_has_the_path() {
    // API-1: vLLM and Ollama say that the path takes another method, others that there is none, some answer anything
    let ask = async |status: Option<u16>, models: &str| {
        let mut builder = ScriptedBackend::builder().route("GET", "/v1/models", list(models));
        if let Some(status) = status {
            builder = builder.route("GET", "/v1/messages", Answer::json(status, "{}"));
        }
        let backend = builder.start().await.unwrap();
        let adapter = adapter(&backend);
        adapter.start().await.unwrap();
        adapter.start().await.unwrap();
        let asked = backend.received().iter().filter(|request| request.path == "/v1/messages").count();
        (adapter.capabilities().messages, asked)
    };
    let (vllm, llama) = (r#"{"id":"m","owned_by":"vllm"}"#, r#"{"id":"m","owned_by":"llamacpp"}"#);
    assert_eq!(ask(Some(405), vllm).await, (true, 1), "it is asked once");
    assert_eq!(ask(Some(200), vllm).await, (false, 1));
    assert_eq!(ask(None, r#"{"id":"m"}"#).await, (false, 1));
    assert_eq!(ask(None, llama).await, (true, 0), "it does not tell");
}

#[tokio::test]
async fn a_server_is_known_by_the_owner_of_its_models() {
    // ADP-1, BIN-1
    for (models, want) in [
        (r#"{"id":"a"},{"id":"m","owned_by":"vllm","max_model_len":4}"#, Server::Vllm),
        (r#"{"id":"m","owned_by":"sglang","root":"m","max_model_len":4}"#, Server::Sglang),
        (r#"{"id":"m","owned_by":"library"}"#, Server::Any),
        (r#"{"id":"m","owned_by":null}"#, Server::Any),
    ] {
        assert_eq!(found(list(models), None).await.server, want, "{models}");
    }
}

#[tokio::test]
async fn a_llama_cpp_by_config_is_asked_for_its_slots_whatever_its_list_says() {
    // LEA-8
    let props = Answer::json(200, r#"{"total_slots":3}"#);
    let backend = ScriptedBackend::builder()
        .route("GET", "/v1/models", list(r#"{"id":"m"}"#))
        .route("GET", "/props", props)
        .start()
        .await
        .unwrap();
    let config = OpenAiCompatConfig::new(backend.base_url()).with_server(Server::LlamaCpp);
    let adapter = OpenAiCompat::new(config).unwrap();
    adapter.start().await.unwrap();
    assert_eq!(adapter.capabilities().max_concurrency.map(NonZeroU32::get), Some(3));
}

/// An adapter of this kind that has discovered once, with these answers beside the list of models.
async fn discovered(server: Server, models: &str, routes: &[(&str, Answer)]) -> OpenAiCompat {
    let builder = ScriptedBackend::builder().route("GET", "/v1/models", list(models));
    let builder = routes.iter().fold(builder, |builder, (path, answer)| builder.route("GET", path, answer.clone()));
    let backend = builder.otherwise(Answer::json(404, "{}")).start().await.unwrap();
    let adapter = OpenAiCompat::new(OpenAiCompatConfig::new(backend.base_url()).with_server(server)).unwrap();
    adapter.start().await.unwrap();
    adapter
}

#[tokio::test]
async fn sglang_tells_how_many_requests_it_runs_under_either_name_of_its_info() {
    // LEA-8, ADP-5
    let models = r#"{"id":"m","owned_by":"sglang","root":"m","max_model_len":8192}"#;
    let info = |ranks: &str| {
        Answer::json(
            200,
            format!(
                r#"{{"model_path":"m",{ranks}"max_running_requests":null,"internal_states":[{{"last_gen_throughput":1.5,"memory_usage":{{"weight":1}},"effective_max_running_requests_per_dp":128}}]}}"#
            ),
        )
    };
    for (server, path, ranks, slots) in [
        (Server::Sglang, "/server_info", r#""dp_size":2,"#, Some(256)),
        (Server::Any, "/server_info", "", Some(128)),
        (Server::Sglang, "/get_server_info", r#""dp_size":1,"#, Some(128)),
        (Server::Sglang, "/elsewhere", "", None),
    ] {
        let adapter = discovered(server, models, &[(path, info(ranks))]).await;
        let capabilities = adapter.capabilities();
        assert_eq!(capabilities.max_concurrency.map(NonZeroU32::get), slots, "{path} {ranks}");
        assert_eq!(capabilities.targets[0].context_length, Some(8192));
    }
}

#[tokio::test]
async fn lm_studio_tells_the_context_a_model_is_loaded_with() {
    // ADP-5
    let models = r#"{"id":"a","object":"model","owned_by":"organization_owner"},{"id":"b"},{"id":"c"}"#;
    let own = Answer::json(
        200,
        r#"{"object":"list","data":[
            {"id":"a","type":"llm","state":"loaded","max_context_length":32768,"loaded_context_length":4096},
            {"id":"b","type":"vlm","state":"not-loaded","max_context_length":8192},
            {"id":"unlisted","state":"loaded","loaded_context_length":1}]}"#,
    );
    for (own, want) in [
        (own, [Some(4096), Some(8192), None]),
        (Answer::json(404, "{}"), [None; 3]),
        (Answer::json(200, "<html>"), [None; 3]),
    ] {
        let adapter = discovered(Server::LmStudio, models, &[("/api/v0/models", own)]).await;
        let contexts: Vec<_> = adapter.capabilities().targets.iter().map(|info| info.context_length).collect();
        assert_eq!(contexts, want);
    }
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

/// The way to a server that is replaced by another one, or goes away.
#[derive(Debug)]
struct Switch(Mutex<Option<Arc<HttpClient>>>);

impl Switch {
    fn to(&self, backend: Option<&ScriptedBackend>) {
        let client =
            backend.map(|backend| Arc::new(HttpClient::new(Origin::parse(&backend.base_url()).unwrap()).unwrap()));
        *self.0.lock().unwrap() = client;
    }
}

#[async_trait]
impl Upstream for Switch {
    async fn send(&self, request: UpstreamRequest) -> Result<UpstreamResponse, UpstreamError> {
        let client = self.0.lock().unwrap().clone();
        match client {
            Some(client) => client.send(request).await,
            None => Err(UpstreamError::Connect("nobody listens".into())),
        }
    }
}

fn names(adapter: &OpenAiCompat) -> Vec<String> {
    adapter.capabilities().targets.iter().map(|info| info.target.as_str().to_owned()).collect()
}

#[tokio::test]
async fn a_refresh_follows_what_the_server_has_and_a_silent_server_has_lost_nothing() {
    // ADP-5
    let serving =
        async |models: &str| ScriptedBackend::builder().route("GET", "/v1/models", list(models)).start().await.unwrap();
    let switch = Arc::new(Switch(Mutex::new(None)));
    let adapter =
        OpenAiCompat::with_upstream(OpenAiCompatConfig::new("http://unused"), Arc::clone(&switch) as Arc<dyn Upstream>)
            .unwrap();
    adapter.start().await.unwrap();
    assert!(names(&adapter).is_empty(), "a server that is down is no error");
    let (one, two) = (serving(r#"{"id":"a"}"#).await, serving(r#"{"id":"a"},{"id":"b"}"#).await);
    let (none, loading) = (serving("").await, {
        let busy = Answer::json(503, r#"{"error":{"message":"Loading model"}}"#);
        ScriptedBackend::builder().route("GET", "/v1/models", busy).start().await.unwrap()
    });
    for (backend, answered, want) in [
        (Some(&one), Refreshed::Answered, vec!["a"]),
        (Some(&two), Refreshed::Answered, vec!["a", "b"]),
        (None, Refreshed::Silent, vec!["a", "b"]),
        (Some(&loading), Refreshed::Silent, vec!["a", "b"]),
        (Some(&one), Refreshed::Answered, vec!["a"]),
        (Some(&none), Refreshed::Answered, vec![]),
    ] {
        switch.to(backend);
        assert_eq!(adapter.refresh().await, answered, "{want:?}");
        assert_eq!(names(&adapter), want);
    }
}

#[tokio::test]
async fn slots_that_a_busy_server_does_not_tell_again_are_those_it_told_before() {
    // ADP-5, LEA-8: no flapping between 4 places and 16
    let models = r#"{"id":"gemma","owned_by":"llamacpp","meta":{"n_ctx_train":32768}}"#;
    let serving = async |props: Answer| {
        let backend = ScriptedBackend::builder().route("GET", "/v1/models", list(models)).route("GET", "/props", props);
        backend.start().await.unwrap()
    };
    let switch = Arc::new(Switch(Mutex::new(None)));
    let adapter =
        OpenAiCompat::with_upstream(OpenAiCompatConfig::new("http://unused"), Arc::clone(&switch) as Arc<dyn Upstream>)
            .unwrap();
    let props = |slots: u32| {
        Answer::json(200, format!(r#"{{"default_generation_settings":{{"n_ctx":2048}},"total_slots":{slots}}}"#))
    };
    for (answer, slots) in [(props(4), 4), (Answer::json(503, "{}"), 4), (Answer::reset_at_once(), 4), (props(2), 2)] {
        let backend = serving(answer).await;
        switch.to(Some(&backend));
        assert_eq!(adapter.refresh().await, Refreshed::Answered);
        let capabilities = adapter.capabilities();
        assert_eq!(capabilities.max_concurrency.map(NonZeroU32::get), Some(slots));
        assert_eq!(capabilities.targets[0].context_length, Some(2048));
    }
}
