//! What `iop init --managed` wrote, running: Edge, Node and a backend that wants a key.

use std::sync::Mutex;
use std::time::Duration;

use http::StatusCode;
use iop_node_core::NoObserver;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::config::DialOptions;
use crate::issue;
use crate::issue::slot::SlotCommand;
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

#[tokio::test]
async fn a_managed_fleet_serves_with_the_backends_key_and_takes_the_next_one() {
    // BIN-3, CRD-10, CRD-11: everything as it was written, but for the ports
    let (dir, keys) = (TestDir::new(), TestDir::new());
    let (url, calls) = paid().await;
    let options = InitOptions {
        dir: dir.path().to_owned(),
        node: "gpu-1".to_owned(),
        managed: true,
        backend: Some(url),
        models: vec!["m".to_owned()],
        secret_file: Some(keys.write("key.txt", "sk-first\n")),
        ..InitOptions::default()
    };
    let shown = init(&options, SystemTime::now()).unwrap().text;
    let key = shown.split_whitespace().find(|word| word.starts_with("iopk_")).unwrap().to_owned();
    let config = dir.path().join("edge.yaml");
    let yaml = fs::read_to_string(&config).unwrap();
    let free = [":8180", ":8443", ":9190"].iter().fold(yaml, |text, port| text.replace(&format!("{port}\""), ":0\""));
    fs::write(&config, free).unwrap();
    let (loaded, problems) = EdgeConfig::load(&config);
    let bound = bind(&loaded.unwrap_or_else(|| panic!("{problems}"))).await.unwrap();
    let (openai, nodes, admin) = (bound.openai_address, bound.nodes_address, bound.admin_address);
    let stop = Shutdown::default();
    let edge = tokio::spawn(bound.serve(stop.clone()));
    let (settings, problems) = NodeOptions {
        config: Some(dir.path().join("gpu-1/node.yaml")),
        dial: DialOptions { edge: Some(format!("https://{nodes}")), ..DialOptions::default() },
        ..NodeOptions::default()
    }
    .load();
    let settings = settings.unwrap_or_else(|| panic!("{problems}"));
    let node = serve_node::node(&settings, std::sync::Arc::new(NoObserver)).unwrap();
    let (mut status, leave) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(leave.clone()));
    assert!(timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap());

    let ca = dir.path().join("certs/ca.pem");
    let ask = async || {
        let answer = send_tls(openai, &ca, with_key(chat("m", false), &key)).await;
        (answer.status(), text(answer).await)
    };
    let (status, body) = ask().await;
    assert!(status == StatusCode::OK && body.contains("paid for"), "{status} {body}");
    assert_eq!(*calls.lock().unwrap(), ["bearer sk-first"], "the backend's own key, and the client's never");

    // The next key: written, and in force because the command told the Edge.
    fs::write(dir.path().join("keys/main.key"), "sk-second\n").unwrap();
    let target = issue::Target {
        config: config.clone(),
        no_reload: false,
        edge: crate::operate::client::AdminOptions {
            admin: admin.to_string(),
            key_file: Some(dir.path().join("admin.key")),
            json: false,
        },
    };
    let name = || "main".to_owned();
    let rotate = SlotCommand::Rotate { name: name(), in_place: true, target: target.clone() };
    issue::slot::run(rotate).await.unwrap();
    // The Node learns of the revision beside its work: until then it refuses, and never calls with the old key.
    let second = async {
        while ask().await.0 != StatusCode::OK {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), second).await.unwrap();
    assert!(calls.lock().unwrap()[1..].iter().all(|shown| shown == "bearer sk-second"));

    let before = calls.lock().unwrap().len();
    issue::slot::run(SlotCommand::Revoke { name: name(), target }).await.unwrap();
    assert_eq!(ask().await.0, StatusCode::BAD_GATEWAY);
    assert_eq!(calls.lock().unwrap().len(), before, "what is revoked is not lent");
    leave.cancel();
    let _ended = timeout(Duration::from_secs(20), serving).await;
    stop.force();
    let _ended = timeout(Duration::from_secs(20), edge).await;
}
