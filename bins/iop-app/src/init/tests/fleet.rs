//! What `iop init --managed` wrote, running: Edge, Node and a backend that wants a key.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use http::StatusCode;
use iop_node_core::NoObserver;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::config::DialOptions;
use crate::edge_runtime::EdgeRuntime;
use crate::issue;
use crate::serve_edge::bind;
use crate::serve_node;
use crate::shutdown::Shutdown;
use crate::testhttp::{chat, send_tls, text, with_key};

type Calls = std::sync::Arc<Mutex<Vec<String>>>;

/// A paid backend: answers every request, and writes down what it was shown.
async fn paid() -> (String, Calls) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let calls = Calls::default();
    let seen = std::sync::Arc::clone(&calls);
    tokio::spawn(async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            let seen = std::sync::Arc::clone(&seen);
            tokio::spawn(async move {
                let (mut request, mut chunk) = (Vec::new(), [0; 4096]);
                while !request.ends_with(b"}") {
                    match socket.read(&mut chunk).await {
                        Ok(read) if read > 0 => request.extend_from_slice(&chunk[..read]),
                        _ => return,
                    }
                }
                let request = String::from_utf8_lossy(&request).into_owned();
                let key = request
                    .lines()
                    .find_map(|line| line.to_ascii_lowercase().strip_prefix("authorization: ").map(str::to_owned));
                seen.lock().unwrap().push(key.unwrap_or_default());
                let body = r#"{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"paid for"},"finish_reason":"stop"}]}"#;
                let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
                let answer = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
                let _gone = socket.write_all(answer.as_bytes()).await;
            });
        }
    });
    (url, calls)
}

/// What `iop init --managed` wrote for `gpu-1`, running on free ports.
struct Fleet {
    dir: TestDir,
    config: PathBuf,
    key: String,
    openai: SocketAddr,
    nodes: SocketAddr,
    admin: SocketAddr,
    edge: EdgeRuntime,
    stop: Shutdown,
    leave: CancellationToken,
    running: JoinSet<()>,
}

impl Fleet {
    /// The Edge; everything as it was written, but for the ports.
    async fn start(options: InitOptions) -> Self {
        let dir = TestDir::new();
        let options = InitOptions { dir: dir.path().to_owned(), node: "gpu-1".to_owned(), managed: true, ..options };
        let shown = init(&options, SystemTime::now()).unwrap().text;
        let key = shown.split_whitespace().find(|word| word.starts_with("iopk_")).unwrap().to_owned();
        let config = dir.path().join("edge.yaml");
        let yaml = fs::read_to_string(&config).unwrap();
        let free =
            [":8180", ":8443", ":9190"].iter().fold(yaml, |text, port| text.replace(&format!("{port}\""), ":0\""));
        fs::write(&config, free).unwrap();
        let (loaded, problems) = EdgeConfig::load(&config);
        let bound = bind(&loaded.unwrap_or_else(|| panic!("{problems}"))).await.unwrap();
        let (openai, nodes, admin) = (bound.openai_address, bound.nodes_address, bound.admin_address);
        let (edge, stop, mut running) = (bound.runtime().clone(), Shutdown::default(), JoinSet::new());
        running.spawn(bound.serve(stop.clone()));
        Self { dir, config, key, openai, nodes, admin, edge, stop, leave: CancellationToken::new(), running }
    }

    /// Starts the Node of that directory and waits until it is ready.
    async fn node(&mut self, directory: &Path) {
        let (settings, problems) = NodeOptions {
            config: Some(directory.join("node.yaml")),
            dial: DialOptions { edge: Some(format!("https://{}", self.nodes)), ..DialOptions::default() },
            ..NodeOptions::default()
        }
        .load();
        let settings = settings.unwrap_or_else(|| panic!("{problems}"));
        let node = serve_node::node(&settings, std::sync::Arc::new(NoObserver)).unwrap();
        let (mut status, leave) = (node.status(), self.leave.clone());
        self.running.spawn(async move {
            let _ended = node.serve(leave).await;
        });
        assert!(timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap());
    }

    async fn ask(&self, model: &str) -> (StatusCode, String) {
        let ca = self.dir.path().join("certs/ca.pem");
        let answer = send_tls(self.openai, &ca, with_key(chat(model, false), &self.key)).await;
        (answer.status(), text(answer).await)
    }

    /// The flags by which a command finds this Edge.
    fn flags(&self) -> String {
        format!("--admin {} --key-file {}", self.admin, self.dir.path().join("admin.key").display())
    }

    /// Runs a command as it is typed.
    async fn typed(&self, line: &str) {
        issue::typed::typed_to(&self.config, &format!("{line} {}", self.flags())).await.unwrap();
    }

    async fn end(mut self) {
        self.leave.cancel();
        self.stop.force();
        let all = async { while self.running.join_next().await.is_some() {} };
        timeout(Duration::from_secs(20), all).await.unwrap();
    }
}

#[tokio::test]
async fn a_managed_fleet_serves_with_the_backends_key_and_takes_the_next_one() {
    // BIN-3, CRD-10, CRD-11
    let keys = TestDir::new();
    let (url, calls) = paid().await;
    let options = InitOptions {
        backend: Some(url),
        models: vec!["m".to_owned()],
        secret_file: Some(keys.write("key.txt", "sk-first\n")),
        ..InitOptions::default()
    };
    let mut fleet = Fleet::start(options).await;
    fleet.node(&fleet.dir.path().join("gpu-1")).await;
    let (status, body) = fleet.ask("m").await;
    assert!(status == StatusCode::OK && body.contains("paid for"), "{status} {body}");
    assert_eq!(*calls.lock().unwrap(), ["bearer sk-first"], "the backend's own key, and the client's never");

    // The next key: written, and in force because the command told the Edge.
    fs::write(fleet.dir.path().join("keys/main.key"), "sk-second\n").unwrap();
    fleet.typed("slot rotate main --in-place").await;
    // The Node learns of the revision beside its work: until then it refuses, and never calls with the old key.
    let second = async {
        while fleet.ask("m").await.0 != StatusCode::OK {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), second).await.unwrap();
    assert!(calls.lock().unwrap()[1..].iter().all(|shown| shown == "bearer sk-second"));

    let before = calls.lock().unwrap().len();
    fleet.typed("slot revoke main").await;
    assert_eq!(fleet.ask("m").await.0, StatusCode::BAD_GATEWAY);
    assert_eq!(calls.lock().unwrap().len(), before, "what is revoked is not lent");
    fleet.end().await;
}

#[tokio::test]
async fn a_fleet_gets_a_second_node_by_the_ca_that_was_moved_away_and_renewed_certificates_are_good() {
    // BIN-3, CRD-10, REG-6
    let mut fleet = Fleet::start(InitOptions::default()).await;
    fleet.node(&fleet.dir.path().join("gpu-1")).await;
    let (safe, elsewhere) = (TestDir::new(), TestDir::new());
    let (ca, theirs) = (safe.path().join("ca"), elsewhere.path().join("gpu-2"));
    fs::rename(fleet.dir.path().join("ca"), &ca).unwrap();
    // What it runs is for a person to say.
    let record = "nodes:\n  - { id: gpu-2, providers: [ { id: gpu-2-demo, kind: demo } ] }\n";
    let yaml = fs::read_to_string(&fleet.config).unwrap().replacen("nodes:\n", record, 1);
    fs::write(&fleet.config, yaml).unwrap();
    let add = format!("node add gpu-2 --ca {} --out {}", ca.display(), theirs.display());
    fleet.typed(&add).await;
    fleet.node(&theirs).await;
    let connected = |fleet: &Fleet| {
        let nodes = fleet.edge.edge().snapshot().nodes;
        nodes.iter().filter(|node| node.connected).map(|node| node.node.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(connected(&fleet), ["gpu-2", "gpu-1"]);
    // Both serve: with the first one out of service, it is the second.
    fleet.edge.edge().drain(&NodeId::new("gpu-1").unwrap()).unwrap();
    let (status, body) = fleet.ask("iop-demo").await;
    assert_eq!(status, StatusCode::OK, "{body}");

    // Renewed on both sides, the old ones gone: the pair finds each other again.
    fleet.typed(&format!("node renew gpu-2 --ca {} --out {}", ca.display(), theirs.display())).await;
    fleet.typed(&format!("node renew --edge --ca {}", ca.display())).await;
    fleet.typed("key new").await;
    let metrics = fleet.edge.metrics().render(&fleet.edge.gauges());
    assert!(metrics.contains("iop_certificate_reloads_total{result=\"applied\"} "), "{metrics}");
    fleet.leave.cancel();
    let left = async {
        while !connected(&fleet).is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), left).await.unwrap();
    fleet.leave = CancellationToken::new();
    fleet.node(&theirs).await;
    assert_eq!(connected(&fleet), ["gpu-2"]);
    fleet.end().await;
}
