//! Each rule of ADP-2, on engines that are scripted answer by answer, in virtual time.

use std::collections::HashMap;
use std::io::{Error as IoError, ErrorKind};

use iop_execution::testkit::Answer;
use tokio::time::{Instant, timeout};

use super::*;

/// How long the Node lets a probe take.
const NODE_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone)]
enum Reply {
    Says(u16, String),
    /// It takes the request and says nothing.
    Hangs,
    Refuses,
    /// The connection opened and broke.
    Breaks,
    /// No connection, and nobody said why.
    TimesOut,
}

fn ok(body: impl Into<String>) -> Reply {
    Reply::Says(200, body.into())
}

/// A backend: what each path answers, one after another; the last answer repeats. What is not listed is 404.
#[derive(Default)]
struct Engine {
    replies: Mutex<HashMap<&'static str, Vec<Reply>>>,
    asked: Mutex<Vec<String>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Engine")
    }
}

#[async_trait]
impl Upstream for Engine {
    async fn send(&self, request: UpstreamRequest) -> Result<UpstreamResponse, UpstreamError> {
        let body = request.body.as_full().map(|body| String::from_utf8_lossy(body).into_owned()).unwrap_or_default();
        self.asked.lock().unwrap().push(format!("{} {body}", request.path));
        let reply = {
            let mut replies = self.replies.lock().unwrap();
            let all = replies.get_mut(request.path);
            let or_missing = || Reply::Says(404, r#"{"detail":"Not Found"}"#.to_owned());
            all.map_or_else(or_missing, |all| if all.len() > 1 { all.remove(0) } else { all[0].clone() })
        };
        match reply {
            Reply::Says(status, text) => Ok(UpstreamResponse {
                status: StatusCode::from_u16(status).unwrap(),
                headers: HeaderMap::new(),
                body: Box::pin(futures_util::stream::iter([Ok(Bytes::from(text))])),
            }),
            Reply::Hangs => std::future::pending().await,
            Reply::Refuses => Err(UpstreamError::Connect(IoError::from(ErrorKind::ConnectionRefused).into())),
            Reply::Breaks => Err(UpstreamError::Broken("broke".into())),
            Reply::TimesOut => Err(UpstreamError::Connect("took too long".into())),
        }
    }
}

fn engine(replies: &[(&'static str, &[Reply])]) -> Arc<Engine> {
    let replies = replies.iter().map(|(path, replies)| (*path, replies.to_vec())).collect();
    Arc::new(Engine { replies: Mutex::new(replies), asked: Mutex::default() })
}

fn over(engine: &Arc<Engine>, server: Server, base_url: &str) -> OpenAiCompat {
    let config = OpenAiCompatConfig::new(base_url).with_server(server);
    OpenAiCompat::with_upstream(config, Arc::clone(engine) as Arc<dyn Upstream>).unwrap()
}

/// What the Node learns of the target `m`, and how long that took.
async fn probed(engine: &Arc<Engine>, server: Server) -> (Health, Duration) {
    let adapter = over(engine, server, "http://127.0.0.1:8000");
    let began = Instant::now();
    let health = timeout(NODE_PATIENCE, adapter.probe_health(&target("m"))).await.unwrap_or(Health::Unknown);
    (health, began.elapsed())
}

/// How often a token was asked for.
fn tokens_asked(engine: &Engine) -> usize {
    engine.asked.lock().unwrap().iter().filter(|line| line.contains("completions")).count()
}

fn token() -> Reply {
    ok(r#"{"choices":[{"index":0,"text":"","finish_reason":"length"}],"usage":{"completion_tokens":1}}"#)
}

fn models(ids: &[&str]) -> Reply {
    let all: Vec<_> = ids.iter().map(|id| format!(r#"{{"id":"{id}"}}"#)).collect();
    ok(format!(r#"{{"object":"list","data":[{}]}}"#, all.join(",")))
}

/// vLLM's metrics: tokens made for `m`, running, waiting. Another model is always at work.
fn vllm(made: u32, running: u32, waiting: u32) -> Reply {
    static OTHERS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let other = OTHERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    ok(format!(
        "# TYPE vllm:generation_tokens_total counter\n\
         vllm:generation_tokens_total{{engine=\"0\",model_name=\"m\"}} {made}.0\n\
         vllm:generation_tokens_total{{engine=\"0\",model_name=\"other\"}} {other}.0\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"m\"}} {running}.0\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"m\"}} {waiting}.0\n"
    ))
}

#[tokio::test(start_paused = true)]
async fn vllm_whose_counters_move_is_available_and_nothing_is_added_to_its_queue() {
    // ADP-2; field report 13
    let engine = engine(&[
        ("/v1/models", &[models(&["m"])]),
        ("/metrics", &[vllm(10, 8, 40), vllm(10, 8, 40), vllm(18, 8, 39)]),
        ("/v1/completions", &[Reply::Hangs]),
    ]);
    assert_eq!(probed(&engine, Server::Vllm).await, (Health::Available, Duration::from_millis(500)));
    assert_eq!(tokens_asked(&engine), 0);
}

#[tokio::test(start_paused = true)]
async fn a_saturated_vllm_whose_counters_rest_is_unknown() {
    // ADP-2; field reports 13, 14: a long prefill is not a death
    let engine =
        engine(&[("/v1/models", &[models(&["m"])]), ("/metrics", &[vllm(10, 8, 40)]), ("/v1/completions", &[token()])]);
    assert_eq!(probed(&engine, Server::Vllm).await, (Health::Unknown, NODE_PATIENCE));
    assert_eq!(tokens_asked(&engine), 0);
}

#[tokio::test(start_paused = true)]
async fn a_frozen_engine_behind_a_lively_front_is_unknown() {
    // ADP-2; field reports 10, 12
    for running in [0, 1] {
        let engine = engine(&[
            ("/health", &[ok("")]),
            ("/v1/models", &[models(&["m"])]),
            ("/metrics", &[vllm(10, running, 0)]),
            ("/v1/completions", &[Reply::Hangs]),
        ]);
        assert_eq!(probed(&engine, Server::Vllm).await, (Health::Unknown, NODE_PATIENCE));
        assert_eq!(tokens_asked(&engine), 1, "one request, not one a reading");
        assert!(
            !engine.asked.lock().unwrap().iter().any(|line| line.starts_with("/health")),
            "its word is worth nothing"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_vllm_that_makes_a_token_is_available() {
    // ADP-2
    for metrics in
        [vllm(10, 0, 0), Reply::Says(404, "{}".into()), ok("vllm:generation_tokens_total{model_name=\"base\"} 1")]
    {
        let engine = engine(&[
            ("/v1/models", &[models(&["base", "m"])]),
            ("/metrics", &[metrics]),
            ("/v1/completions", &[token()]),
        ]);
        assert_eq!(probed(&engine, Server::Vllm).await.0, Health::Available);
        let asked = engine.asked.lock().unwrap().clone();
        assert!(
            asked.iter().any(|line| line.contains(r#""model":"m""#) && line.contains(r#""max_tokens":1"#)),
            "{asked:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn counters_of_another_model_prove_nothing() {
    // ADP-2: exact target
    let other = |made| ok(format!("vllm:generation_tokens_total{{model_name=\"m2\"}} {made}\n"));
    let engine = engine(&[
        ("/v1/models", &[models(&["m", "m2"])]),
        ("/metrics", &[other(1), other(2), other(3)]),
        ("/v1/completions", &[Reply::Hangs]),
    ]);
    assert_eq!(probed(&engine, Server::Vllm).await.0, Health::Unknown);
}

#[tokio::test(start_paused = true)]
async fn a_vllm_that_is_gone_or_lost_the_model_is_unavailable_and_later_available_again() {
    // ADP-2: what can be lowered can be raised
    let engine = engine(&[
        ("/v1/models", &[Reply::Refuses, models(&["else"]), models(&["m"])]),
        ("/metrics", &[Reply::Refuses, vllm(0, 0, 0)]),
        ("/v1/completions", &[token()]),
    ]);
    for want in [Health::Unavailable, Health::Unavailable, Health::Available] {
        assert_eq!(probed(&engine, Server::Vllm).await.0, want);
    }
}

#[tokio::test(start_paused = true)]
async fn doubt_is_unknown_for_every_kind() {
    // ADP-2
    for server in [Server::Any, Server::LlamaCpp, Server::LmStudio, Server::Sglang, Server::Vllm] {
        for reply in [
            Reply::Hangs,
            Reply::Breaks,
            Reply::TimesOut,
            Reply::Says(401, r#"{"error":{}}"#.into()),
            Reply::Says(500, "<html>".into()),
            ok("{}"),
            ok(r#"{"choices":[]}"#),
            ok(r#"{"choices":[{"index":0,"text":"a","finish_reason":null}]}"#),
            ok(r#"{"object":"list","data":[]}"#),
            ok("<html>it works</html>"),
        ] {
            let paths = [
                "/v1/models",
                "/api/v0/models",
                "/metrics",
                "/slots",
                "/v1/completions",
                "/v1/chat/completions",
                "/health",
            ];
            let all: Vec<_> = paths.iter().map(|path| (*path, std::slice::from_ref(&reply))).collect();
            assert_eq!(probed(&engine(&all), server).await.0, Health::Unknown, "{server:?}");
        }
    }
}

/// llama.cpp's slots: (task, decoded), or free.
fn slots(all: &[Option<(u32, u32)>]) -> Reply {
    let all: Vec<_> = all
        .iter()
        .enumerate()
        .map(|(id, slot)| match slot {
            Some((task, decoded)) => format!(
                r#"{{"id":{id},"id_task":{task},"is_processing":true,"params":{{"n_predict":-1}},"next_token":[{{"n_decoded":{decoded},"n_remain":-1}}]}}"#
            ),
            None => format!(r#"{{"id":{id},"id_task":-1,"is_processing":false}}"#),
        })
        .collect();
    ok(format!("[{}]", all.join(",")))
}

#[tokio::test(start_paused = true)]
async fn llama_cpp_is_judged_by_slots_that_move_or_a_token_on_a_free_one() {
    // ADP-2; field report 13
    let busy = slots(&[Some((3, 10)), Some((4, 7))]);
    for (replies, made, want, asked) in [
        // Full and moving; full, and a slot has a newer task.
        (vec![busy.clone(), slots(&[Some((3, 11)), Some((4, 7))])], Reply::Hangs, Health::Available, 0),
        (vec![busy.clone(), slots(&[Some((9, 0)), Some((4, 7))])], Reply::Hangs, Health::Available, 0),
        // Full and still.
        (vec![busy.clone()], token(), Health::Unknown, 0),
        // A free one that makes a token; one that does not.
        (vec![slots(&[Some((3, 10)), None])], token(), Health::Available, 1),
        (vec![slots(&[Some((3, 10)), None])], Reply::Hangs, Health::Unknown, 1),
        // The cancelled call's slot becomes free while the probe runs: no progress by itself, but a place to ask for a token.
        (vec![slots(&[Some((3, 10))]), slots(&[None])], token(), Health::Available, 1),
        (vec![slots(&[Some((3, 10))]), slots(&[None])], Reply::Hangs, Health::Unknown, 1),
        (vec![slots(&[None])], Reply::Says(500, "{}".into()), Health::Unknown, 1),
    ] {
        let engine = engine(&[("/slots", &replies), ("/v1/completions", &[made])]);
        assert_eq!((probed(&engine, Server::LlamaCpp).await.0, tokens_asked(&engine)), (want, asked));
    }
}

#[tokio::test(start_paused = true)]
async fn llama_cpp_without_slots_is_judged_by_its_counters_and_without_those_by_a_token() {
    // ADP-2
    let off = Reply::Says(501, r#"{"error":{"type":"not_supported_error"}}"#.into());
    let counters = |made: u32, processing: u32, deferred: u32| {
        ok(format!(
            "llamacpp:tokens_predicted_total {made}\nllamacpp:requests_processing {processing}\nllamacpp:requests_deferred {deferred}\n"
        ))
    };
    for (metrics, made, want) in [
        (vec![counters(5, 1, 2), counters(6, 1, 2)], Reply::Hangs, Health::Available),
        (vec![counters(5, 1, 2)], token(), Health::Unknown),
        (vec![counters(5, 0, 0)], token(), Health::Available),
        (vec![off.clone()], token(), Health::Available),
        (vec![off.clone()], Reply::Hangs, Health::Unknown),
    ] {
        let engine =
            engine(&[("/slots", std::slice::from_ref(&off)), ("/metrics", &metrics), ("/v1/completions", &[made])]);
        assert_eq!(probed(&engine, Server::LlamaCpp).await.0, want);
    }
}

#[tokio::test(start_paused = true)]
async fn a_llama_cpp_that_is_gone_or_loading_is_unavailable_and_a_stopped_one_unknown() {
    // ADP-2
    let loading =
        Reply::Says(503, r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#.into());
    for (reply, want) in
        [(Reply::Refuses, Health::Unavailable), (loading, Health::Unavailable), (Reply::Hangs, Health::Unknown)]
    {
        let engine = engine(&[
            ("/slots", std::slice::from_ref(&reply)),
            ("/metrics", std::slice::from_ref(&reply)),
            ("/v1/completions", std::slice::from_ref(&reply)),
        ]);
        assert_eq!(probed(&engine, Server::LlamaCpp).await.0, want);
    }
}

/// SGLang's metrics: tokens made for `m`, running, waiting.
fn sglang(made: u32, running: u32, waiting: u32) -> Reply {
    let labels = r#"{engine_type="unified",model_name="m",tp_rank="0"}"#;
    ok(format!(
        "sglang:generation_tokens_total{labels} {made}.0\nsglang:prompt_tokens_total{labels} 7.0\n\
         sglang:num_running_reqs{labels} {running}.0\nsglang:num_queue_reqs{labels} {waiting}.0\n"
    ))
}

#[tokio::test(start_paused = true)]
async fn sglang_is_judged_by_its_schedulers_counters_and_without_those_by_a_token() {
    // ADP-2; field reports 10, 13
    let off = Reply::Says(404, "{}".into());
    for (what, list, metrics, made, want, asked) in [
        ("moving", models(&["m"]), vec![sglang(5, 8, 40), sglang(6, 8, 40)], Reply::Hangs, Health::Available, 0),
        ("full and still", models(&["m"]), vec![sglang(5, 8, 40)], token(), Health::Unknown, 0),
        ("idle", models(&["m"]), vec![sglang(5, 0, 0)], token(), Health::Available, 1),
        ("frozen", models(&["m"]), vec![sglang(5, 1, 0)], Reply::Hangs, Health::Unknown, 1),
        ("no metrics", models(&["m"]), vec![off.clone()], token(), Health::Available, 1),
        ("no metrics, silent", models(&["m"]), vec![off.clone()], Reply::Hangs, Health::Unknown, 1),
        ("model gone", models(&["x"]), vec![sglang(5, 0, 0)], token(), Health::Unavailable, 0),
        ("gone", Reply::Refuses, vec![Reply::Refuses], Reply::Refuses, Health::Unavailable, 0),
    ] {
        let engine = engine(&[
            ("/v1/models", &[list]),
            ("/metrics", &metrics),
            ("/v1/completions", &[made]),
            ("/health", &[ok("")]),
        ]);
        assert_eq!((probed(&engine, Server::Sglang).await.0, tokens_asked(&engine)), (want, asked), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn lm_studio_is_asked_for_a_token_only_of_a_model_that_is_loaded() {
    // ADP-2: a probe never loads a model
    let list = |id: &str, state: &str| {
        ok(format!(r#"{{"object":"list","data":[{{"id":"{id}","object":"model","type":"llm","state":"{state}"}}]}}"#))
    };
    for (what, listed, made, want, asked) in [
        ("loaded", list("m", "loaded"), token(), Health::Available, 1),
        ("loaded and silent", list("m", "loaded"), Reply::Hangs, Health::Unknown, 1),
        ("not loaded", list("m", "not-loaded"), token(), Health::Unknown, 0),
        ("removed", list("x", "loaded"), token(), Health::Unavailable, 0),
        ("older than that API", Reply::Says(404, "{}".into()), token(), Health::Available, 1),
        ("gone", Reply::Refuses, token(), Health::Unavailable, 0),
    ] {
        let engine = engine(&[("/api/v0/models", &[listed]), ("/v1/chat/completions", &[made])]);
        assert_eq!((probed(&engine, Server::LmStudio).await.0, tokens_asked(&engine)), (want, asked), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_unknown_kind_is_judged_by_a_token_where_tokens_are_free_and_else_not_at_all() {
    // ADP-2: hosted APIs only by opt-in, and what can't answer available answers unknown
    for (made, url, free, want, asked) in [
        (token(), "http://127.0.0.1:1234", None, Health::Available, 1),
        (Reply::Refuses, "http://192.168.0.2:1234", None, Health::Unavailable, 1),
        (Reply::Says(404, "{}".into()), "http://127.0.0.1:1234", None, Health::Unknown, 1),
        (token(), "https://api.example.com", None, Health::Unknown, 0),
        (Reply::Refuses, "https://api.example.com", None, Health::Unknown, 0),
        (token(), "https://api.example.com", Some(true), Health::Available, 1),
        (Reply::Refuses, "https://api.example.com", Some(true), Health::Unavailable, 1),
        (Reply::Refuses, "http://127.0.0.1:1234", Some(false), Health::Unknown, 0),
    ] {
        let engine = engine(&[("/v1/models", &[models(&["m"])]), ("/v1/chat/completions", &[made])]);
        let mut config = OpenAiCompatConfig::new(url);
        config.free_tokens = free;
        let adapter = OpenAiCompat::with_upstream(config, Arc::clone(&engine) as Arc<dyn Upstream>).unwrap();
        assert_eq!((adapter.probe_health(&target("m")).await, tokens_asked(&engine)), (want, asked), "{url}");
    }
}

#[tokio::test]
async fn a_server_that_answers_for_any_model_proves_only_those_that_it_lists() {
    // ADP-2: llama.cpp with one model does not look at the name
    let answer = Answer::json(200, iop_execution::testkit::cases::full_answer().to_string());
    let backend = ScriptedBackend::builder()
        .route("GET", "/v1/models", Answer::json(200, r#"{"data":[{"id":"m"}]}"#))
        .route("POST", "/v1/chat/completions", answer)
        .start()
        .await
        .unwrap();
    let adapter = adapter(&backend);
    adapter.start().await.unwrap();
    assert_eq!(adapter.probe_health(&target("m")).await, Health::Available);
    assert_eq!(adapter.probe_health(&target("other")).await, Health::Unknown);
}

#[tokio::test]
async fn over_a_socket_refused_is_unavailable_and_a_token_is_available() {
    // ADP-2, with the real client
    let free_port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let backend = ScriptedBackend::with_all_cases().await.unwrap();
    for server in [Server::Any, Server::LlamaCpp, Server::LmStudio, Server::Sglang, Server::Vllm] {
        let config = OpenAiCompatConfig::new(format!("http://{free_port}")).with_server(server);
        let adapter = OpenAiCompat::new(config).unwrap();
        assert_eq!(adapter.probe_health(&target("ok")).await, Health::Unavailable, "{server:?}");
    }
    let adapter = adapter(&backend);
    assert_eq!(adapter.probe_health(&target("ok")).await, Health::Available);
    for silent in ["http_503", "reset_before_head", "no such model"] {
        let health = timeout(Duration::from_millis(300), adapter.probe_health(&target(silent))).await;
        assert_eq!(health.unwrap_or(Health::Unknown), Health::Unknown, "{silent}: every GET is answered 200 there");
    }
}
