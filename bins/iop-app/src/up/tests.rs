use std::convert::Infallible;
use std::task::{Context, Poll};

use bytes::Bytes;
use clap::Parser as _;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;

use iop_execution::testkit::alone;

use super::*;
use crate::exit::Exit;
use crate::testdir::TestDir;
use crate::testhttp::{chat, get, send, send_tls, text, with_key};

#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    up: UpOptions,
}

/// Options from flags; any free port unless they say otherwise, no waiting in the demo.
fn options(flags: &[&str]) -> UpOptions {
    let mut all = vec!["up", "--demo-pace", "none"];
    if !flags.contains(&"--listen") {
        all.extend(["--listen", "127.0.0.1:0"]);
    }
    all.extend(flags);
    Flags::try_parse_from(all).unwrap_or_else(|error| panic!("{error}")).up
}

async fn started(flags: &[&str]) -> (Up, Shutdown) {
    let shutdown = Shutdown::default();
    let up = start(&options(flags), shutdown.clone()).await.unwrap_or_else(|failure| panic!("{failure}"));
    (up, shutdown)
}

async fn refused(flags: &[&str]) -> Failure {
    start(&options(flags), Shutdown::default()).await.map(|_| ()).unwrap_err()
}

#[tokio::test]
async fn without_a_backend_the_demo_answers_at_the_base_url_that_was_said() {
    // BIN-1, OPS-3
    let (up, _shutdown) = started(&["--demo"]).await;
    assert_eq!(up.models, ["iop-demo"]);
    let banner = banner::banner(&up);
    let base = format!("base url: http://{}/v1", up.address);
    for words in
        [base.as_str(), "demo model", "api key: any value, e.g. iop", "models: iop-demo", "curl -N http://127.0.0.1:"]
    {
        assert!(banner.contains(words), "{words}: {banner}");
    }
    for key in [None, Some("iop"), Some("anything")] {
        let request = chat("iop-demo", true);
        let answer = send(up.address, key.map_or(request.clone(), |key| with_key(request, key))).await;
        assert_eq!((answer.status(), answer.headers()["x-iop-edge"].to_str().unwrap()), (StatusCode::OK, "1"));
        let stream = text(answer).await;
        assert!(stream.starts_with("data: {") && stream.ends_with("data: [DONE]\n\n"), "{stream}");
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(send(up.address, get(path)).await.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn a_key_of_the_command_line_is_asked_for_and_not_printed() {
    // BIN-1, API-13
    let (up, _shutdown) = started(&["--demo", "--api-key", "SENTINEL-key"]).await;
    assert!(!banner::banner(&up).contains("SENTINEL") && !format!("{up:?}").contains("SENTINEL"));
    assert_eq!(send(up.address, get("/v1/models")).await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(send(up.address, with_key(get("/v1/models"), "SENTINEL-key")).await.status(), StatusCode::OK);
    assert_eq!(refused(&["--demo", "--api-key", "two words"]).await.exit, Exit::Usage);
}

#[tokio::test]
async fn a_taken_port_moves_to_the_next_free_one_and_that_is_said() {
    // BIN-1
    let (first, _shutdown) = started(&["--demo"]).await;
    let wanted = first.address.to_string();
    let (second, _shutdown) = started(&["--demo", "--listen", &wanted]).await;
    assert_ne!(second.address, first.address);
    let banner = banner::banner(&second);
    assert!(
        banner.contains(&format!("port {} is taken: using {} instead", first.address.port(), second.address.port())),
        "{banner}"
    );
    assert_eq!(send(second.address, get("/readyz")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn outside_addresses_need_tls_or_the_word_and_always_have_a_key() {
    // BIN-1, BIN-6
    let failure = refused(&["--demo", "--listen", "0.0.0.0:0"]).await;
    assert_eq!(failure.exit, Exit::Usage);
    let words = failure.to_string();
    assert!(words.contains("--insecure-plaintext") && words.contains("--tls-cert"), "{words}");

    let (up, _shutdown) = started(&["--demo", "--listen", "0.0.0.0:0", "--insecure-plaintext"]).await;
    let Access::Made(key) = &up.access else { panic!("{:?}", up.access) };
    assert!(banner::banner(&up).contains(key.expose()));
    let inside = SocketAddr::from(([127, 0, 0, 1], up.address.port()));
    assert_eq!(send(inside, get("/v1/models")).await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(send(inside, with_key(get("/v1/models"), key.expose())).await.status(), StatusCode::OK);

    let failure = refused(&["--demo", "--metrics-listen", "0.0.0.0:0"]).await;
    assert!(failure.exit == Exit::Usage && failure.to_string().contains("127.0.0.1"), "{failure}");
}

#[tokio::test]
async fn with_a_certificate_it_serves_https() {
    // BIN-1
    let dir = TestDir::new();
    let certs = crate::certs::generate(&[], SystemTime::now()).unwrap();
    let ca = dir.write("ca.pem", &certs.ca);
    let cert = dir.write("edge.pem", &certs.edge).display().to_string();
    let key = dir.write("key.pem", certs.edge_key.expose()).display().to_string();
    let (up, _shutdown) = started(&["--demo", "--listen", "0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key]).await;
    assert_eq!(up.base_url, format!("https://localhost:{}/v1", up.address.port()));
    let Access::Made(made) = &up.access else { panic!("{:?}", up.access) };
    let inside = SocketAddr::from(([127, 0, 0, 1], up.address.port()));
    assert_eq!(send_tls(inside, &ca, with_key(get("/v1/models"), made.expose())).await.status(), StatusCode::OK);
}

/// A backend with one model that answers every chat alike.
#[derive(Clone)]
struct Backend(&'static str);

const ANSWER: &str = r#"{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"from the backend"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}"#;

impl tower_service::Service<Request<Incoming>> for Backend {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let model = self.0;
        Box::pin(async move {
            let models = request.uri().path() == "/v1/models";
            let _body = request.into_body().collect().await;
            let body =
                if models { format!(r#"{{"object":"list","data":[{{"id":"{model}"}}]}}"#) } else { ANSWER.to_owned() };
            Ok(Response::builder().header("content-type", "application/json").body(Full::from(body)).unwrap())
        })
    }
}

async fn backend(model: &'static str) -> (String, Shutdown) {
    let listener = HttpListener::bind("127.0.0.1:0".parse().unwrap(), None, Limits::default()).await.unwrap();
    let (url, stop) = (format!("http://{}", listener.local_addr().unwrap()), Shutdown::default());
    tokio::spawn(listener.serve(Backend(model), stop.clone()));
    (url, stop)
}

#[tokio::test]
async fn every_model_of_every_backend_is_served_and_iop_itself_is_skipped() {
    // BIN-1
    let (other, _keep) = started(&["--demo"]).await;
    let ((one, _a), (two, _b)) = (backend("m1").await, backend("m2").await);
    let flags = ["--backend", &one, "--backend", &format!("{two}/v1"), "--backend", &other.base_url];
    let (up, _shutdown) = started(&flags).await;
    assert_eq!((up.models.as_slice(), up.demo), (["m1".to_owned(), "m2".to_owned()].as_slice(), None));
    let banner = banner::banner(&up);
    assert!(banner.contains("1 model") && banner.contains("is IOP itself: skipped"), "{banner}");
    for model in ["m1", "m2"] {
        let answer = send(up.address, chat(model, false)).await;
        assert_eq!(answer.status(), StatusCode::OK);
        let body = text(answer).await;
        assert!(body.contains("from the backend") && body.contains(&format!("\"model\":\"{model}\"")), "{body}");
    }
}

#[tokio::test]
async fn a_loading_and_a_hung_backend_are_listed_as_that_and_ollama_is_served_over_its_own_api() {
    // BIN-1, ADP-1
    use iop_execution::testkit::{Answer, ScriptedBackend};
    let models = Answer::json(200, r#"{"object":"list","data":[{"id":"llama3.2:latest","owned_by":"library"}]}"#);
    let tags = Answer::json(200, r#"{"models":[{"name":"llama3.2:latest","model":"llama3.2:latest"}]}"#);
    let lines = concat!(
        r#"{"model":"llama3.2:latest","message":{"role":"assistant","content":"in lines"},"done":false}"#,
        "\n",
        r#"{"model":"llama3.2:latest","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop"}"#,
        "\n"
    );
    let ollama = ScriptedBackend::builder()
        .route("GET", "/v1/models", models)
        .route("GET", "/api/version", Answer::json(200, r#"{"version":"0.12.0"}"#))
        .route("GET", "/api/tags", tags)
        .route("POST", "/api/chat", Answer::new(200).header("content-type", "application/x-ndjson").write(lines))
        .otherwise(Answer::json(404, "{}"))
        .start()
        .await
        .unwrap();
    let loading = r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#;
    let loading = ScriptedBackend::builder()
        .otherwise(Answer::json(503, loading))
        .route("GET", "/v1/models", Answer::json(503, loading))
        .start()
        .await
        .unwrap();
    let hung = ScriptedBackend::builder()
        .route("GET", "/v1/models", Answer::new(200).late_head().hang())
        .start()
        .await
        .unwrap();
    let urls = [ollama.base_url(), loading.base_url(), hung.base_url()];
    let flags: Vec<_> = urls.iter().flat_map(|url| ["--backend", url.as_str()]).collect();
    let (up, _shutdown) = started(&flags).await;
    let kinds: Vec<_> = up.probed.iter().map(|probed| probed.kind).collect();
    assert_eq!(kinds, ["ollama", "llama_cpp", "openai_compat"]);
    assert_eq!((up.models.as_slice(), up.demo), (["llama3.2:latest".to_owned()].as_slice(), None));
    let banner = banner::banner(&up);
    for words in ["1 model", "is loading its model: served", "does not answer (hung, or no HTTP): skipped"] {
        assert!(banner.contains(words), "{words}: {banner}");
    }
    let answer = text(send(up.address, chat("llama3.2:latest", false)).await).await;
    assert!(answer.contains("in lines"), "{answer}");
    // One that only loads is worth waiting for; one that hangs is not.
    let (up, _shutdown) = started(&["--backend", &urls[1]]).await;
    assert_eq!((up.models.as_slice(), up.demo), (["iop-demo".to_owned()].as_slice(), Some(Asked::No)));
    assert!(refused(&["--backend", &urls[2]]).await.to_string().contains("does not answer"));
}

#[tokio::test]
async fn backends_that_were_named_and_do_not_answer_end_it_with_the_reason() {
    // BIN-1, BIN-5
    let gone = {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let failure = refused(&["--backend", &gone]).await;
    assert_eq!(failure.exit, Exit::Fatal);
    assert!(failure.to_string().contains("no answer") && failure.hint.is_some(), "{failure}");
    assert_eq!(refused(&["--backend", "localhost:1"]).await.exit, Exit::Usage);
    assert_eq!(refused(&["--backend", &gone, "--backend", &format!("{gone}/v1")]).await.exit, Exit::Usage);
}

#[tokio::test]
async fn metrics_count_requests_and_hold_no_text_of_a_client() {
    // OPS-1, API-15, T9
    let (up, _shutdown) = started(&["--demo", "--metrics-listen", "127.0.0.1:0"]).await;
    text(send(up.address, chat("iop-demo", false)).await).await;
    for n in 0..20 {
        assert_eq!(send(up.address, chat(&format!("SENTINEL-{n}"), false)).await.status(), StatusCode::NOT_FOUND);
        send(up.address, with_key(get(&format!("/v1/SENTINEL{n}")), &format!("SENTINEL-{n}"))).await;
    }
    let address = up.metrics.unwrap();
    let metrics = text(send(address, get("/metrics")).await).await;
    assert!(!metrics.contains("SENTINEL"), "{metrics}");
    for line in [
        r#"iop_requests_total{endpoint="chat",outcome="completed",ended_by="completed",status="2xx"} 1"#,
        r#"iop_requests_total{endpoint="chat",outcome="failed",ended_by="request",status="4xx"} 20"#,
        r#"iop_output_tokens_total{model="iop-demo"}"#,
        r#"iop_node_ready{node="local"} 1"#,
        r#"iop_provider_in_use{provider="demo"} 0"#,
        "iop_requests_inflight 0",
        "iop_requests_waiting 0",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert_eq!(send(address, get("/readyz")).await.status(), StatusCode::OK);
    assert_eq!(send(address, get("/healthz")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_shutdown_finishes_what_runs_and_refuses_what_comes() {
    // BIN-5
    let (mut up, shutdown) = {
        let shutdown = Shutdown::default();
        let options = UpOptions { demo_pace: Pace::Real, ..options(&["--demo"]) };
        (start(&options, shutdown.clone()).await.unwrap(), shutdown)
    };
    // Its head is here, its content takes a while.
    let running = send(up.address, chat("iop-demo", true)).await;
    shutdown.gracefully.cancel();
    let refused = loop {
        let answer = send(up.address, chat("iop-demo", false)).await;
        if answer.status() != StatusCode::OK {
            break answer;
        }
    };
    assert_eq!(
        (refused.status(), refused.headers()["connection"].to_str().unwrap()),
        (StatusCode::SERVICE_UNAVAILABLE, "close")
    );
    assert!(text(refused).await.contains("shutting_down"));
    assert!(text(running).await.ends_with("data: [DONE]\n\n"));
    timeout(Duration::from_secs(20), &mut up.serving).await.unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(up.address).await.is_err());
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    // BIN-5
    let shutdown = Shutdown::default();
    let options = UpOptions { demo_pace: Pace::Real, ..options(&["--demo"]) };
    let mut up = start(&options, shutdown.clone()).await.unwrap();
    let running = send(up.address, chat("iop-demo", true)).await;
    shutdown.force();
    timeout(Duration::from_secs(10), &mut up.serving).await.unwrap().unwrap();
    let cut = running.into_body().collect().await;
    assert!(cut.is_err() || !cut.unwrap().to_bytes().ends_with(b"[DONE]\n\n"));
}

/// Collects what is logged.
#[derive(Clone, Default)]
struct Sink(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn each_request_has_one_access_line_and_no_log_holds_a_prompt_or_a_key() {
    // OPS-2: everything that is logged at all, down to TRACE; the runtime of this test has one thread
    if !alone("up::tests::each_request_has_one_access_line_and_no_log_holds_a_prompt_or_a_key").unwrap() {
        return;
    }
    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let (up, _shutdown) = started(&["--demo", "--api-key", "SENTINEL-key"]).await;
    let body = r#"{"model":"iop-demo","messages":[{"role":"user","content":"SENTINEL-prompt"}]}"#;
    let request = Request::post("/v1/chat/completions?x=SENTINEL-query")
        .header("host", "x")
        .header("content-type", "application/json");
    let request = request.body(Full::from(body)).unwrap();
    let answer = send(up.address, with_key(request.clone(), "SENTINEL-key")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    text(answer).await;
    assert_eq!(send(up.address, with_key(request, "SENTINEL-wrong")).await.status(), StatusCode::UNAUTHORIZED);

    let log = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    let ours = |line: &&str| !line.contains("\"target\":\"hyper");
    for line in log.lines().filter(ours) {
        assert!(!line.contains("SENTINEL"), "{line}");
    }
    let lines: Vec<serde_json::Value> = log
        .lines()
        .filter(|line| line.contains(crate::telemetry::ACCESS_TARGET))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 2, "{log}");
    let fields = &lines[0]["fields"];
    for (name, value) in [
        ("status", 200.into()),
        ("ended_by", "completed".into()),
        ("model", "iop-demo".into()),
        ("provider", "demo".into()),
        ("attempts", serde_json::Value::from(1)),
    ] {
        assert_eq!(fields[name], value, "{name}: {fields}");
    }
    for name in ["request_id", "outcome", "queue_ms", "ttft_ms", "duration_ms", "input_tokens", "output_tokens"] {
        assert!(!fields[name].is_null(), "{name}: {fields}");
    }
    assert_eq!((&lines[1]["fields"]["status"], &lines[1]["fields"]["code"]), (&401.into(), &"invalid_api_key".into()));
}
