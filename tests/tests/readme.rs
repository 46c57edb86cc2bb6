//! Decides whether the commands of the README do what it says, and whether what they print can be pasted.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::net::SocketAddr;
use std::time::Duration;

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, event_data, read};
use iop_tests::fleet::address_of;
use iop_tests::machine::{Folder, eventually};
use iop_tests::process::{Process, Programs};
use iop_tests::wire_client::{Connection, Request, ask};
use serde_json::json;

const PROGRAMS: Programs = iop_tests::programs!();

/// Splits a line as a POSIX shell does, for the quoting that occurs: single and double quotes, backslashes.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None | Some('"'), '\\') => word.get_or_insert_default().push(chars.next().expect("something is escaped")),
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    assert_eq!(quote, None, "an open quote in {line}");
    words.extend(word);
    words
}

/// What a curl line asks for.
struct Curl {
    tls: bool,
    addr: SocketAddr,
    ca: Option<String>,
    request: Request,
}

fn curl(line: &str) -> Curl {
    let words = words(line);
    assert_eq!(words[0], "curl");
    let (mut url, mut ca, mut headers, mut body) = (None, None, Vec::new(), None);
    let mut rest = words[1..].iter();
    while let Some(word) = rest.next() {
        let mut value = || rest.next().expect("a value").clone();
        match word.as_str() {
            "-N" => {}
            "-H" => headers.push(value()),
            "-d" => body = Some(value()),
            "--cacert" => ca = Some(value()),
            other if !other.starts_with('-') => url = Some(other.to_owned()),
            other => panic!("curl takes {other} here?"),
        }
    }
    let url = url.expect("a URL");
    let (scheme, rest) = url.split_once("://").expect("a scheme");
    let (host, path) = rest.split_once('/').expect("a path");
    let path = format!("/{path}");
    let mut request = body.map_or_else(|| Request::get(&path), |body| Request::post(&path, body));
    for header in &headers {
        let (name, value) = header.split_once(':').expect("a header");
        request = request.header(name, value.trim());
    }
    Curl { tls: scheme == "https", addr: host.parse().expect("an address"), ca, request }
}

async fn up(folder: &Folder, more: &[&str]) -> (Process, SocketAddr) {
    let arguments = [&["up", "--listen", "127.0.0.1:0"], more].concat();
    let process = Process::start(PROGRAMS.iop, &arguments, folder.path(), &[]);
    let base = process.find("the base URL", |line| Some(line.strip_prefix("base url: ")?.to_owned())).await;
    let addr = base.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/v1")).expect("a loopback base URL");
    (process, addr.parse().unwrap())
}

#[tokio::test]
async fn iop_up_serves_the_demo_model_and_its_curl_line_streams() {
    // BIN-1, API-1, API-6, OPS-3
    let folder = Folder::new();
    let (mut process, addr) = up(&folder, &["--demo"]).await;
    let line = process
        .find("a curl line", |line| Some(line.trim()).filter(|line| line.starts_with("curl ")).map(str::to_owned))
        .await;
    let lines = process.lines().join("\n");
    assert!(
        lines.contains("demo model") && lines.contains("api key: any value") && lines.contains("models: iop-demo"),
        "{lines}"
    );

    let pasted = curl(&line);
    assert_eq!((pasted.addr, pasted.tls), (addr, false));
    let answer = ask(addr, &pasted.request).await;
    let Outcome::Whole { text } = read(&answer) else { panic!("{:?}", read(&answer)) };
    assert!(!text.trim().is_empty());
    assert_eq!(event_data(&answer.body()).last().map(String::as_str), Some("[DONE]"));
    // At 40 tokens a second the pieces come one after the other, not all at the end.
    let spread = answer.pieces.last().unwrap().at - answer.pieces.first().unwrap().at;
    assert!(
        answer.pieces.len() >= 5 && spread > Duration::from_millis(50),
        "{} pieces in {spread:?}",
        answer.pieces.len()
    );
    let again = ask(addr, &pasted.request).await;
    assert_eq!(read(&again), Outcome::Whole { text: text.clone() }, "deterministic");

    // The real curl, where there is one.
    if let Ok(output) = tokio::process::Command::new("sh").args(["-c", &line]).output().await
        && output.status.success()
    {
        let body: bytes::Bytes = output.stdout.into();
        assert_eq!(event_data(&body).last().map(String::as_str), Some("[DONE]"));
    }

    let models = ask(addr, &Request::get("/v1/models").key("iop")).await.json();
    assert_eq!(models["data"][0]["id"], "iop-demo");
    for path in ["/healthz", "/readyz"] {
        assert_eq!(ask(addr, &Request::get(path)).await.status(), 200);
    }
    // Everything works on it: a tool call, a limit, a stop.
    let tools = json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }]);
    let more = json!({ "tools": tools, "tool_choice": "required" });
    let called = ask(addr, &Request::chat_with("iop-demo", false, &more)).await.json();
    assert_eq!(called["choices"][0]["finish_reason"], "tool_calls");
    let limited = ask(addr, &Request::chat_with("iop-demo", false, &json!({ "max_tokens": 2 }))).await.json();
    assert_eq!(limited["choices"][0]["finish_reason"], "length");
    process.signal("TERM");
    assert_eq!(process.exit_code().await, 0);
}

#[tokio::test]
async fn iop_up_serves_a_backend_and_skips_another_iop() {
    // BIN-1, CFG-3
    let folder = Folder::new();
    let whole = json!({ "id": "x", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": "Hi" }, "finish_reason": "stop" }] });
    let backend =
        ScriptedBackend::builder().model("org/model:7b", Answer::json(200, whole.to_string())).start().await.unwrap();
    let (_process, addr) = up(&folder, &["--backend", &backend.base_url()]).await;
    let models = ask(addr, &Request::get("/v1/models")).await.json();
    assert_eq!(models["data"][0]["id"], "org/model:7b");
    assert_eq!(ask(addr, &Request::get("/v1/models/org%2Fmodel:7b")).await.json()["id"], "org/model:7b");
    let answer = ask(addr, &Request::chat("org/model:7b", false)).await;
    assert_eq!(read(&answer), Outcome::Whole { text: "Hi".to_owned() });

    let url = format!("http://{addr}");
    let mut other =
        Process::start(PROGRAMS.iop, &["up", "--listen", "127.0.0.1:0", "--backend", &url], folder.path(), &[]);
    other.find("why it is no backend", |line| line.contains("is IOP itself").then_some(())).await;
    assert_eq!(other.exit_code().await, 1, "no backend is left");
}

#[tokio::test]
async fn a_taken_port_moves_to_the_next_one_and_says_so() {
    // BIN-1
    let folder = Folder::new();
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let wanted = taken.local_addr().unwrap();
    let process = Process::start(PROGRAMS.iop, &["up", "--demo", "--listen", &wanted.to_string()], folder.path(), &[]);
    process
        .find("the port is taken", |line| line.contains(&format!("port {} is taken", wanted.port())).then_some(()))
        .await;
    let base = process.find("the base URL", |line| Some(line.strip_prefix("base url: ")?.to_owned())).await;
    let addr: SocketAddr = base.trim_start_matches("http://").trim_end_matches("/v1").parse().unwrap();
    assert_ne!(addr.port(), wanted.port());
    assert_eq!(ask(addr, &Request::get("/readyz")).await.status(), 200);
}

#[tokio::test]
async fn what_iop_init_prints_works_when_pasted() {
    // BIN-2, BIN-3, BIN-4, CFG-1, REG-6. The ports are the only thing changed: free ones instead of the usual ones.
    let folder = Folder::new();
    let mut init = Process::start(PROGRAMS.iop, &["init", "--dir", "fleet"], folder.path(), &[]);
    assert_eq!(init.exit_code().await, 0);
    let printed = init.lines();
    let command = |name: &str| {
        let line = printed.iter().map(|line| line.trim()).find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name} command in {printed:?}")).to_owned()
    };
    let mut check = Process::start(PROGRAMS.iop, &["check", "fleet/edge.yaml", "fleet/node.yaml"], folder.path(), &[]);
    assert_eq!(check.exit_code().await, 0, "{:?}", check.lines());

    let path = folder.path().join("fleet/edge.yaml");
    let mut yaml = std::fs::read_to_string(&path).unwrap();
    for port in [":8180\"", ":8443\"", ":9190\""] {
        assert!(yaml.contains(port), "{yaml}");
        yaml = yaml.replace(port, ":0\"");
    }
    std::fs::write(&path, yaml).unwrap();
    let run = |program, line: &str| {
        let words = words(line);
        let arguments: Vec<_> = words[1..].iter().map(String::as_str).collect();
        Process::start(program, &arguments, folder.path(), &[])
    };
    let mut edge = run(PROGRAMS.edge, &command("iop-edge"));
    let openai = edge.find("the OpenAI address", |line| address_of(line, "openai")).await;
    let nodes = edge.find("the address for nodes", |line| address_of(line, "nodes")).await;
    let mut node = run(PROGRAMS.node, &command("iop-node").replace(":8443", &format!(":{}", nodes.port())));

    let pasted = curl(&command("curl"));
    assert!(pasted.tls);
    let ca = folder.path().join(pasted.ca.expect("the CA is named"));
    let list = eventually("a model", || async {
        let list = Connection::open_tls(openai, &ca).await.ask(&pasted.request).await;
        assert_eq!(list.status(), 200);
        list.json()["data"].as_array().is_some_and(|models| !models.is_empty()).then(|| list.json())
    })
    .await;
    assert_eq!(list["data"][0]["id"], "iop-demo");
    let key = printed.iter().find_map(|line| line.trim().strip_prefix("API key")).expect("an API key").trim();
    let mut client = Connection::open_tls(openai, &ca).await;
    let answer = client.ask(&Request::chat("iop-demo", true).key(key)).await;
    assert!(matches!(read(&answer), Outcome::Whole { .. }), "{:?}", read(&answer));
    let answer = client.ask(&Request::chat("iop-demo", true).key("iopk_wrong")).await;
    assert_eq!(answer.status(), 401);
    for process in [&mut node, &mut edge] {
        process.signal("TERM");
        assert_eq!(process.exit_code().await, 0);
        assert!(!process.lines().iter().any(|line| line.contains(key)), "a key is in no log");
    }

    let mut again = Process::start(PROGRAMS.iop, &["init", "--dir", "fleet"], folder.path(), &[]);
    assert_eq!(again.exit_code().await, 2, "nothing is overwritten unasked");
}

#[test]
fn the_code_of_the_readme_is_code_of_a_compiled_example() {
    // BIN-1: what a newcomer copies must build
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let example = std::fs::read_to_string(root.join("examples/hello_pair.rs")).unwrap();
    let lines: Vec<&str> = example.lines().map(str::trim).collect();
    let block = readme.split("```rust\n").nth(1).unwrap().split("```").next().unwrap();
    let parts: Vec<&str> = block.split("// in main:\n").collect();
    assert_eq!(parts.len(), 2);
    for part in parts {
        let wanted: Vec<&str> = part.trim().lines().map(str::trim).collect();
        assert!(wanted.len() > 10 && lines.windows(wanted.len()).any(|window| window == wanted), "{part}");
    }
}
