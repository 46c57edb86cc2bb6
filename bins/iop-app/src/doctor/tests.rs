use std::sync::Arc;
use std::time::SystemTime;

use iop_node_core::NoObserver;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::config::EdgeConfig;
use crate::init::{InitOptions, init};
use crate::operate::client::DEFAULT_ADMIN;
use crate::serve_edge::bind;
use crate::serve_node;
use crate::shutdown::Shutdown;
use crate::testdir::TestDir;

/// What `iop init` wrote, on free ports, with this backend if any.
fn written(dir: &TestDir, backend: Option<String>) -> crate::config::LoadedEdge {
    let options =
        InitOptions { dir: dir.path().to_owned(), node: "gpu-1".to_owned(), backend, ..InitOptions::default() };
    init(&options, SystemTime::now()).unwrap();
    let path = dir.path().join("edge.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let free = [":8180", ":8443", ":9190"].iter().fold(text, |text, port| text.replace(port, ":0"));
    std::fs::write(&path, free).unwrap();
    let (loaded, problems) = EdgeConfig::load(&path);
    loaded.unwrap_or_else(|| panic!("{problems}"))
}

fn dial(dir: &TestDir, edge: std::net::SocketAddr) -> DialOptions {
    DialOptions {
        edge: Some(format!("https://{edge}")),
        token_file: Some(dir.path().join("node.token")),
        ca: Some(dir.path().join("certs/ca.pem")),
        ..DialOptions::default()
    }
}

fn as_node(dir: &TestDir, edge: std::net::SocketAddr) -> DoctorOptions {
    DoctorOptions { dial: dial(dir, edge), ..DoctorOptions::default() }
}

/// Verdict and text of one check.
fn of<'a>(report: &'a Report, check: &str) -> (Verdict, &'a str) {
    let found = report.findings.iter().find(|finding| finding.check == check);
    let found = found.unwrap_or_else(|| panic!("{check} is not in\n{}", report.table(false)));
    assert_eq!(found.next.is_some(), matches!(found.verdict, Verdict::Warn | Verdict::Fail), "{found:?}");
    (found.verdict, &found.detail)
}

/// A model server that answers each path with its JSON, and everything else with 404.
async fn backend(answers: &'static [(&'static str, &'static str)]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") && socket.read(&mut byte).await.is_ok_and(|read| read > 0) {
                request.extend(byte);
            }
            let request = String::from_utf8_lossy(&request).into_owned();
            let body =
                answers.iter().find(|(path, _)| request.starts_with(&format!("GET {path} "))).map(|(_, body)| body);
            let answer = match body {
                Some(body) => format!("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{body}"),
                None => "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned(),
            };
            let _gone = socket.write_all(answer.as_bytes()).await;
        }
    });
    url
}

#[tokio::test]
async fn the_way_of_a_node_is_looked_at_step_by_step() {
    // BIN-4
    let models: &[_] =
        &[("/v1/models", r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#), ("/version", r#"{"version":"0.11.2"}"#)];
    let (dir, other) = (TestDir::new(), TestDir::new());
    let loaded = written(&dir, Some(backend(models).await));
    written(&other, None);
    let bound = bind(&loaded).await.unwrap();
    let (nodes, stop) = (bound.nodes_address, Shutdown::default());
    let edge = tokio::spawn(bound.serve(stop.clone()));

    let report = as_node(&dir, nodes).examine().await.unwrap();
    let checks: Vec<_> = report.findings.iter().map(|finding| &*finding.check).collect();
    let expected = ["tcp", "tls", "certificate", "identity", "clock", "token", "backend backend", "backend backend"];
    assert_eq!(checks, expected);
    let advice = &report.findings[7];
    assert!(advice.verdict == Verdict::Warn && advice.next.as_ref().is_some_and(|next| next.contains("kind: vllm")));
    assert_eq!(report.count(Verdict::Fail), 0, "{}", report.table(false));
    assert_eq!(of(&report, "token"), (Verdict::Ok, "accepted: this is node gpu-1"));
    assert!(of(&report, "certificate").1.contains("days left, until"), "{}", report.table(false));
    assert!(of(&report, "backend backend").1.ends_with("vllm 0.11.2, m"), "{}", report.table(false));

    // Each step that fails is told with the next one, and ends the way.
    let with = |change: fn(&mut DoctorOptions, &TestDir)| {
        let mut options = as_node(&dir, nodes);
        change(&mut options, &other);
        async move { options.examine().await.unwrap() }
    };
    let token = with(|options, other| options.dial.token_file = Some(other.path().join("node.token"))).await;
    assert!(matches!(of(&token, "token"), (Verdict::Fail, text) if text.contains("no Node has token")));
    assert!(!token.table(false).contains("iopn_"), "no secret is shown");
    let ca = with(|options, other| options.dial.ca = Some(other.path().join("certs/ca.pem"))).await;
    assert!(matches!(of(&ca, "tls"), (Verdict::Fail, text) if text.contains("certificate")), "{}", ca.table(false));
    let name = with(|options, _| options.dial.tls_name = Some("other.example".to_owned())).await;
    assert!(
        matches!(of(&name, "tls"), (Verdict::Fail, text) if text.contains("another name")),
        "{}",
        name.table(false)
    );
    let missing = with(|options, other| options.dial.token_file = Some(other.path().join("none"))).await;
    assert_eq!(of(&missing, "settings").0, Verdict::Fail);
    let host = with(|options, _| options.dial.edge = Some("https://no-such-host.invalid:8443".to_owned())).await;
    assert_eq!(of(&host, "dns").0, Verdict::Fail);

    // A Node that is there keeps its place.
    let (settings, problems) = NodeOptions { dial: dial(&dir, nodes), ..NodeOptions::default() }.load();
    let node = serve_node::node(&settings.unwrap_or_else(|| panic!("{problems}")), Arc::new(NoObserver)).unwrap();
    let (mut status, leave) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(leave.clone()));
    assert!(status.wait_ready().await);
    let there = as_node(&dir, nodes).examine().await.unwrap();
    assert_eq!(of(&there, "token"), (Verdict::Ok, "accepted: this Node is connected already"));
    assert_eq!(status.get(), iop_node_core::NodeStatus::Ready);
    leave.cancel();
    let _ended = serving.await;
    stop.force();
    let _ended = edge.await;
    let gone = as_node(&dir, nodes).examine().await.unwrap();
    assert!(matches!(of(&gone, "tcp"), (Verdict::Fail, text) if text.contains("refused")), "{}", gone.table(false));
}

#[tokio::test]
async fn backends_are_told_as_they_are() {
    // BIN-4
    let hung = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let _ = hung;
    for (url, verdict, words) in [
        (backend(&[("/v1/models", r#"{"data":[]}"#)]).await, Verdict::Warn, "lists no model"),
        (backend(&[]).await, Verdict::Fail, "answered 404"),
        (format!("http://{free}"), Verdict::Fail, "nothing answers"),
        ("http://a b".to_owned(), Verdict::Fail, "is no URL"),
    ] {
        let mut report = Report::default();
        backend::examine_urls(&[url], &mut report).await;
        let finding = &report.findings[0];
        assert!(finding.verdict == verdict && finding.detail.contains(words), "{finding:?}");
    }
}

#[tokio::test]
async fn the_edges_place_shows_its_config_certificates_and_what_runs() {
    // BIN-4
    let dir = TestDir::new();
    let loaded = written(&dir, None);
    let options = DoctorOptions { config: Some(loaded.path.clone()), ..DoctorOptions::default() };
    let report = options.examine().await.unwrap();
    assert_eq!(of(&report, "config").0, Verdict::Ok);
    assert!(of(&report, "certificate nodes").1.contains("localhost, 127.0.0.1"));
    assert_eq!(of(&report, "listener openai").0, Verdict::Fail, "nobody listens at port 0");
    assert_eq!(of(&report, "edge").0, Verdict::Skip);
    let text = std::fs::read_to_string(&loaded.path).unwrap();
    std::fs::write(&loaded.path, text.replace("models: auto", "model: auto")).unwrap();
    let report = options.examine().await.unwrap();
    assert!(matches!(of(&report, "config"), (Verdict::Fail, text) if text.contains("no key `model`")));
    assert_eq!(report.findings.len(), 1, "what can't be read is not guessed at");
}

#[tokio::test]
async fn a_managed_node_that_is_not_there_is_started_by_its_config_and_keys_that_all_can_read_are_told() {
    // BIN-3, BIN-4, CRD-12
    let dir = TestDir::new();
    let options =
        InitOptions { dir: dir.path().to_owned(), node: "gpu-1".to_owned(), managed: true, ..InitOptions::default() };
    init(&options, SystemTime::now()).unwrap();
    let path = dir.path().join("edge.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let free = [":8180\"", ":8443\"", ":9190\""].iter().fold(text, |text, port| text.replace(port, ":0\""));
    std::fs::write(&path, &free).unwrap();
    let (loaded, problems) = EdgeConfig::load(&path);
    let bound = bind(&loaded.unwrap_or_else(|| panic!("{problems}"))).await.unwrap();
    let ports = [bound.openai_address, bound.nodes_address, bound.admin_address].map(|address| address.port());
    let stop = Shutdown::default();
    let edge = tokio::spawn(bound.serve(stop.clone()));
    let running = ports.iter().fold(free, |text, port| text.replacen(":0\"", &format!(":{port}\""), 1));
    std::fs::write(&path, running).unwrap();
    let examine = async |file: &str| {
        let config = Some(dir.path().join(file));
        let admin = AdminOptions { admin: DEFAULT_ADMIN.to_owned(), ..AdminOptions::default() };
        DoctorOptions { config, admin, ..DoctorOptions::default() }.examine().await.unwrap()
    };
    let report = examine("edge.yaml").await;
    assert_eq!(of(&report, "node gpu-1").0, Verdict::Fail);
    let next = report.findings.iter().find(|finding| finding.check == "node gpu-1").unwrap().next.clone().unwrap();
    assert!(next.contains("iop-node serve --config gpu-1/node.yaml") && !next.contains("--token-file"), "{next}");
    assert_eq!(of(&report, "config").0, Verdict::Ok, "{}", report.table(false));
    stop.force();
    let _ended = edge.await;

    #[cfg(unix)]
    for (file, key, check) in
        [("edge.yaml", "certs/edge-key.pem", "config"), ("gpu-1/node.yaml", "gpu-1/key.pem", "settings")]
    {
        let key = dir.path().join(key);
        std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        let report = examine(file).await;
        let told: Vec<_> = report.findings.iter().filter(|finding| finding.check == check).collect();
        assert_eq!(told.len(), 1, "{}", report.table(false));
        assert_eq!(
            (told[0].verdict, told[0].next.clone()),
            (Verdict::Warn, Some(format!("chmod 600 {}", key.display())))
        );
        assert!(told[0].detail.contains("everybody on this machine can read"), "{:?}", told[0]);
    }
}

#[test]
fn a_table_has_a_row_for_each_finding_and_its_next_step() {
    // BIN-4
    let mut report = Report::default();
    report.ok("tcp", "it answers");
    report.warn("clock", "6.0 s behind", "let NTP set it");
    report.fail("token", "refused", "iop token new");
    report.skip("backends", "not known");
    let text = report.table(false);
    assert_eq!(
        text,
        "      CHECK     FOUND\nok    tcp       it answers\nwarn  clock     6.0 s behind\n                → let NTP set it\nfail  token     refused\n                → iop token new\nskip  backends  not known\n"
    );
    assert_eq!(report.summary(), "1 ok, 1 warning, 1 failed");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!((json["findings"][2]["verdict"].as_str(), json["findings"][0].get("next")), (Some("fail"), None));
}
