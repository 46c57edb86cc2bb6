//! Decides whether a managed fleet tells its secrets: everything that it writes, shows and answers is searched for them.
//!
//! Real binaries, as `iop init --managed` sets them up, at the level of log that tells most. Requests succeed and fail in every
//! way that has to do with a key. Only the backend may have seen one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use iop_app::config::edge::credentials::Secrets;
use iop_app::config::{EdgeConfig, NodeOptions};
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::{Metrics, address_of};
use iop_tests::leaks::{Secret, base64, hex};
use iop_tests::machine::{Folder, eventually};
use iop_tests::process::{MAX_LINES, Process};
use iop_tests::wire_client::{Connection, Request, ask};
use serde_json::json;

use crate::{PROGRAMS, chats, hello, says};

/// Key of the backend at first: it looks like one.
const FIRST: &str = "acme-9f86d081884c7d659a2feaa0c55ad015-SENTINEL";
/// And the next: it looks like nothing in particular.
const SECOND: &str = "correct-horse-battery-staple-SENTINEL";
/// Keys of a further provider, which commands read from standard input.
const THIRD: &str = "umbrella-kettle-lantern-thimble-SENTINEL";
const FOURTH: &str = "gravel-pigeon-marble-saffron-SENTINEL";

/// A managed fleet of one Node, and everything it has said.
struct Managed {
    folder: Folder,
    edge: Process,
    node: Process,
    openai: SocketAddr,
    admin: SocketAddr,
    node_metrics: SocketAddr,
    api_key: String,
    said: BTreeMap<String, Vec<u8>>,
    /// Secrets that commands made and showed, and such that were replaced.
    secrets: Vec<Secret>,
}

const LOUD: [(&str, &str); 2] = [("IOP_LOG", "trace"), ("RUST_BACKTRACE", "1")];

fn edit(folder: &Folder, name: &str, changes: &[(&str, &str)]) {
    let path = folder.path().join(name);
    let text = std::fs::read_to_string(&path).unwrap();
    let changed = changes.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{from} is not in {text}");
        text.replace(from, to)
    });
    std::fs::write(&path, changed).unwrap();
}

impl Managed {
    async fn start(backend: &ScriptedBackend, models: &[String]) -> Self {
        let folder = Folder::new();
        folder.write("key.txt", FIRST);
        let mut arguments = vec!["init", "--managed", "--node", "gpu-1", "--secret-file", "key.txt", "--backend"];
        let url = backend.base_url();
        arguments.push(&url);
        arguments.extend(models.iter().flat_map(|model| ["--model", model.as_str()]));
        let mut init = Process::start(PROGRAMS.iop, &arguments, folder.path(), &LOUD);
        assert_eq!(init.exit_code().await, 0, "{:?}", init.lines());
        let shown = init.lines().join("\n");
        let api_key = token_in(&shown, "iopk_");
        // The one secret that it may show, and in the command to try it with.
        let said = BTreeMap::from([("init".to_owned(), shown.replace(&api_key, "SHOWN").into_bytes())]);
        // Free ports; and a provider that can't be reached, with the same key.
        let gone = "    providers:\n      - { id: gone, kind: openai_compat, base_url: \"http://127.0.0.1:1\", \
                    targets: [gone], credential: { slot: main, profile: bearer } }\n";
        // And a Node that is still to be made.
        let further = "nodes:\n  - { id: gpu-2, providers: [ { id: gpu-2-demo, kind: demo } ] }\n";
        edit(
            &folder,
            "edge.yaml",
            &[
                (":8180\"", ":0\""),
                (":8443\"", ":0\""),
                (":9190\"", ":0\""),
                ("    providers:\n", gone),
                ("nodes:\n", further),
                ("  - auto\n", "  - auto\n  - { name: gone, candidates: [ { provider: gone } ] }\n"),
            ],
        );
        let variables = [LOUD[0], LOUD[1], ("IOP_LOG_FORM", "json")];
        let edge = Process::start(PROGRAMS.edge, &["serve", "--config", "edge.yaml"], folder.path(), &variables);
        let [openai, nodes, admin] = [
            edge.find("the OpenAI address", |line| address_of(line, "openai")).await,
            edge.find("the address for nodes", |line| address_of(line, "nodes")).await,
            edge.find("the admin address", |line| address_of(line, "admin")).await,
        ];
        let more = "\nmetrics: { listen: 127.0.0.1:0 }\njournal: { dsn: runs.db }\nreconnect:";
        edit(&folder, "gpu-1/node.yaml", &[(":8443", &format!(":{}", nodes.port())), ("\nreconnect:", more)]);
        let arguments = ["serve", "--config", "gpu-1/node.yaml"];
        let node = Process::start(PROGRAMS.node, &arguments, folder.path(), &LOUD);
        let node_metrics = node.find("its metrics", |line| address_of(line, "metrics")).await;
        node.find("that it is ready", |line| line.starts_with("ready ").then_some(())).await;
        Self { folder, edge, node, openai, admin, node_metrics, api_key, said, secrets: Vec::new() }
    }

    /// Writes down what somebody was told.
    fn heard(&mut self, by: &str, what: impl AsRef<[u8]>) {
        let all = self.said.entry(by.to_owned()).or_default();
        all.extend_from_slice(what.as_ref());
        all.push(b'\n');
    }

    /// Asks as a client, with this key, and writes down head and body of the answer.
    async fn ask(&mut self, request: Request, key: &str) -> (u16, Outcome) {
        let mut client = Connection::open_tls(self.openai, &self.folder.path().join("certs/ca.pem")).await;
        let answer = client.ask(&request.key(key)).await;
        self.heard("a client", format!("{:?}", answer.head));
        self.heard("a client", answer.body());
        (answer.status(), read(&answer))
    }

    /// Asks as the client whose key is good.
    async fn chat(&mut self, model: &str, stream: bool) -> (u16, Outcome) {
        let key = self.api_key.clone();
        self.ask(Request::chat(model, stream), &key).await
    }

    /// Runs a command of an operator, loudly; answers how it ended and what it said, which is still to be written down.
    async fn run(&self, program: &str, arguments: &[&str]) -> (i32, String) {
        let (admin, config) = (format!("http://{}", self.admin), "edge.yaml");
        let variables = [LOUD[0], LOUD[1], ("IOP_ADMIN", admin.as_str()), ("IOP_EDGE_CONFIG", config)];
        let mut process = Process::start(program, arguments, self.folder.path(), &variables);
        let code = process.exit_code().await;
        let lines = process.lines().join("\n");
        assert!(!lines.contains("unexpected argument"), "{arguments:?}: {lines}");
        (code, lines)
    }

    async fn command(&mut self, program: &str, line: &str) -> String {
        let (_, lines) = self.run(program, &line.split(' ').collect::<Vec<_>>()).await;
        self.heard(line, &lines);
        lines
    }

    /// A command that does what it says.
    async fn done(&mut self, line: &str) {
        let (code, lines) = self.run(PROGRAMS.iop, &line.split(' ').collect::<Vec<_>>()).await;
        assert_eq!(code, 0, "{line}: {lines}");
        self.heard(line, &lines);
    }

    /// A command that makes a key or token that begins so, and shows it once; answers its id.
    async fn shows(&mut self, line: &str, start: &str) -> String {
        let (code, lines) = self.run(PROGRAMS.iop, &line.split(' ').collect::<Vec<_>>()).await;
        assert_eq!(code, 0, "{line}: {lines}");
        let token = token_in(&lines, start);
        self.heard(line, lines.replacen(&token, "SHOWN", 1));
        self.secrets.push(Secret::new("what a command showed", secret_of(&token), &[]));
        token.split('_').nth(1).unwrap().to_owned()
    }

    /// A command that reads a secret from standard input.
    async fn reads(&mut self, line: &str, file: &str) {
        let redirected = format!("exec \"$0\" \"$@\" < {file}");
        let arguments: Vec<_> = ["-c", redirected.as_str(), PROGRAMS.iop].into_iter().chain(line.split(' ')).collect();
        let (code, lines) = self.run("sh", &arguments).await;
        assert_eq!(code, 0, "{line}: {lines}");
        self.heard(line, &lines);
    }

    /// Remembers the private key that is about to be replaced there.
    fn replaces(&mut self, file: &str) {
        self.secrets.push(Secret::new("a private key that was replaced", &middle_of(&self.read(file)), &[]));
    }

    async fn iop(&mut self, line: &str) -> String {
        self.command(PROGRAMS.iop, line).await
    }

    /// Asks an admin endpoint, as who may, and answers the status.
    async fn operate(&mut self, method: &str, path: &str) -> u16 {
        let key = self.read("admin.key");
        let request = Request::get(&format!("/admin/v1/{path}")).method(method).key(key.trim());
        let request = request.header("host", &self.admin.to_string());
        let answer = ask(self.admin, &request).await;
        self.heard(path, format!("{:?}", answer.head));
        self.heard(path, answer.body());
        answer.status()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap()
    }
}

/// The first key or token in a text that begins so: a prefix, an id and a secret.
fn token_in(text: &str, start: &str) -> String {
    let from = text.find(start).unwrap_or_else(|| panic!("no {start} in {text}"));
    let part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    text[from..].chars().take_while(|letter| part(*letter)).collect()
}

/// The secret of a key or token.
fn secret_of(token: &str) -> &str {
    token.trim().splitn(3, '_').nth(2).unwrap()
}

/// Of a private key as PEM, what is neither the same in all of them nor public.
fn middle_of(pem: &str) -> String {
    pem.lines().nth(2).unwrap()[..24].to_owned()
}

/// The same of a key that signs leases.
fn middle_of_issuer(pem: &str) -> String {
    pem.lines().nth(1).unwrap()[24..48].to_owned()
}

/// Every file below a folder, by its path in there.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let bytes = std::fs::read(&path).unwrap();
                found.push((path.strip_prefix(folder).unwrap().to_path_buf(), bytes));
            }
        }
    }
    found
}

/// An error of the backend that repeats the key, in as many ways as fit.
fn repeats(key: &str) -> String {
    let [plain, url] = [base64(key, 0, *b"+/"), base64(key, 0, *b"-_")].map(|text| String::from_utf8(text).unwrap());
    let message =
        format!("Incorrect API key provided: {key}. (Bearer {key}, key={key}, {plain}, {url}, {})", hex(key, false));
    json!({ "error": { "message": message, "type": "invalid_request_error", "code": key, "param": key } }).to_string()
}

async fn backend() -> ScriptedBackend {
    let mut backend = ScriptedBackend::builder().model("ok", hello());
    for (n, key) in [FIRST, SECOND].into_iter().enumerate() {
        for status in [400, 401, 404, 429, 500] {
            let answer = Answer::json(status, repeats(key)).header("x-request-id", key).header("x-key", key);
            backend = backend.model(format!("echo-{n}-{status}"), answer);
        }
        let event = format!("data: {}\n\n", repeats(key));
        let whole = Answer::json(200, repeats(key));
        backend = backend
            .model(format!("echo-{n}-event"), Answer::events().write(event.clone()).without_stream(whole.clone()))
            .model(format!("echo-{n}-late"), Answer::events().write(says("so")).write(event).without_stream(whole))
            .model(format!("echo-{n}-html"), Answer::new(502).write(format!("<html>{key}</html>")));
    }
    backend.start().await.unwrap()
}

fn echoes(n: usize) -> Vec<String> {
    ["400", "401", "404", "429", "500", "event", "late", "html"].map(|what| format!("echo-{n}-{what}")).into()
}

/// How often the backend was asked with this key.
fn used(backend: &ScriptedBackend, key: &str) -> usize {
    let bearer = format!("Bearer {key}");
    backend.received().iter().filter(|request| request.header("authorization") == Some(&bearer)).count()
}

/// Requests that are answered, and such that fail: at the provider, on the way to it, at the door, for want of a good key.
async fn asked(fleet: &mut Managed, backend: &ScriptedBackend) {
    let whole = Outcome::Whole { text: "Hello".to_owned() };
    for stream in [true, false] {
        assert_eq!(fleet.chat("ok", stream).await, (200, whole.clone()));
        for model in echoes(0) {
            assert_ne!(fleet.chat(&model, stream).await.1, whole, "{model}");
        }
        assert!(fleet.chat("gone", stream).await.0 >= 500);
        assert_eq!(fleet.chat("nobody", stream).await.0, 404);
    }
    let good = fleet.api_key.clone();
    let wrong = good.replace(&good[14..], &good[14..].chars().rev().collect::<String>());
    for (key, body, status) in [(&wrong, None, 401), (&wrong, Some("{"), 401), (&good, Some("{"), 400)] {
        let request = match body {
            Some(body) => Request::post("/v1/chat/completions", body),
            None => Request::chat("ok", false),
        };
        assert_eq!(fleet.ask(request, key).await.0, status);
    }
    // The next key, which nothing would take for one.
    fleet.folder.write("keys/main.key", SECOND);
    let told = fleet.iop("slot rotate main --in-place --json").await;
    assert!(told.contains("\"in_force\""), "{told}");
    eventually("the next key is used", || async {
        let mut client = Connection::open_tls(fleet.openai, &fleet.folder.path().join("certs/ca.pem")).await;
        // Until the Node knows of it, it refuses.
        let _refused_at_first = client.ask(&Request::chat("ok", false).key(&good)).await;
        (used(backend, SECOND) > 0).then_some(())
    })
    .await;
    for stream in [true, false] {
        for model in echoes(1) {
            assert_ne!(fleet.chat(&model, stream).await.1, whole, "{model}");
        }
    }
    assert!(used(backend, FIRST) >= 17 && used(backend, SECOND) >= 17);
}

/// What operators see and do while all of that is known.
async fn operated(fleet: &mut Managed) {
    for path in ["status", "nodes", "models", "runs", "keys", "leases"] {
        assert_eq!(fleet.operate("GET", path).await, 200, "{path}");
    }
    for (method, path, status) in [
        ("POST", "nodes/gpu-1/drain", 200),
        ("POST", "nodes/gpu-1/resume", 200),
        ("POST", "nodes/none/drain", 404),
        ("DELETE", "runs/00000000000000000000000000000000", 404),
        ("POST", "reload", 200),
        ("GET", "nowhere", 404),
    ] {
        assert_eq!(fleet.operate(method, path).await, status, "{path}");
    }
    fleet.replaces("gpu-1/key.pem");
    for line in [
        "status",
        "nodes",
        "models",
        "runs",
        "drain gpu-1",
        "resume gpu-1",
        "cancel abcd",
        "reload",
        "key list",
        "token list",
        "slot list",
        "lease status",
        "slot disable main",
        "slot enable main",
        "doctor --config edge.yaml",
        "doctor --config gpu-1/node.yaml",
        "node renew gpu-1",
    ] {
        fleet.iop(line).await;
        fleet.iop(&format!("{line} --json")).await;
    }
    for line in [
        "lease issuer-key show keys/lease-issuer.pem",
        "check edge.yaml gpu-1/node.yaml",
        "slot new other --secret env:NOT_THERE",
        "slot rotate nothing --in-place",
    ] {
        fleet.iop(line).await;
    }
    fleet.command(PROGRAMS.edge, "check --config edge.yaml").await;
    fleet.command(PROGRAMS.node, "check --config gpu-1/node.yaml").await;
}

/// What operators make: each command may show one secret, once, or none where it goes to a file.
async fn made(fleet: &mut Managed) {
    fleet.done("node add gpu-2").await;
    fleet.replaces("certs/edge-key.pem");
    fleet.done("node renew --edge").await;
    fleet.replaces("certs/edge-key.pem");
    fleet.done("node renew --edge --json").await;
    for json in ["", " --json"] {
        let id = fleet.shows(&format!("key new{json}"), "iopk_").await;
        fleet.shows(&format!("key rotate {id}{json}"), "iopk_").await;
        fleet.done(&format!("key revoke {id}{json}")).await;
        fleet.done(&format!("token revoke gpu-2{json}")).await;
        fleet.shows(&format!("token new gpu-2{json}"), "iopn_").await;
        fleet.shows(&format!("token rotate gpu-2{json}"), "iopn_").await;
    }
    fleet.done("token revoke gpu-2").await;
    fleet.done("token new gpu-2 --out new.token").await;
    fleet.done("token rotate gpu-2 --out rotated.token").await;
    fleet.done("token revoke gpu-2").await;
    fleet.done("node add gpu-2 --out again --json").await;
    for (line, file, key) in [("slot new third", "third.txt", THIRD), ("slot rotate third", "fourth.txt", FOURTH)] {
        fleet.folder.write(file, key);
        fleet.reads(line, file).await;
    }
    fleet.done("lease issuer-key new --out keys/next.pem").await;
    fleet.done("lease issuer-key new --out keys/next-but-one.pem --json").await;
    let token = |name: &str| secret_of(&fleet.read(name)).to_owned();
    let made = [
        Secret::new("the third key", THIRD, &["third.txt"]),
        Secret::new("the fourth key", FOURTH, &["fourth.txt", "keys/third.key"]),
        Secret::new("a new Node's token", &token("gpu-2/node.token"), &["gpu-2/node.token"]),
        Secret::new("a token in a file", &token("new.token"), &["new.token"]),
        Secret::new("a rotated token in a file", &token("rotated.token"), &["rotated.token"]),
        Secret::new("the token of a Node that was added again", &token("again/node.token"), &["again/node.token"]),
        Secret::new("a new Node's private key", &middle_of(&fleet.read("gpu-2/key.pem")), &["gpu-2/key.pem"]),
        Secret::new("its next private key", &middle_of(&fleet.read("again/key.pem")), &["again/key.pem"]),
        Secret::new("the next issuer", &middle_of_issuer(&fleet.read("keys/next.pem")), &["keys/next.pem"]),
        Secret::new(
            "the next issuer but one",
            &middle_of_issuer(&fleet.read("keys/next-but-one.pem")),
            &["keys/next-but-one.pem"],
        ),
    ];
    fleet.secrets.extend(made);
}

/// `Debug` of what is made of the files.
fn debugged(fleet: &mut Managed) {
    let at = |name: &str| fleet.folder.path().join(name);
    let loaded = EdgeConfig::load(&at("edge.yaml")).0.unwrap();
    let secrets = loaded.slot_secrets(&Secrets::default());
    let catalog = loaded.catalog_with(0, 1, &secrets).unwrap();
    let edge = format!("{loaded:?} {:?} {secrets:?} {catalog:?} {catalog:#?}", loaded.openai());
    assert!(edge.contains("gpu-1-main"), "{edge}");
    let (settings, _) = NodeOptions { config: Some(at("gpu-1/node.yaml")), ..NodeOptions::default() }.load();
    let node = format!("{:?}", settings.unwrap());
    fleet.heard("Debug of the Edge's config", edge);
    fleet.heard("Debug of the Node's settings", node);
}

/// What the backend was shown, but for its own key.
fn shown(fleet: &mut Managed, backend: &ScriptedBackend) {
    for request in backend.received() {
        let bearer = request.header("authorization");
        let good = [FIRST, SECOND].map(|key| format!("Bearer {key}"));
        assert!(bearer.is_none_or(|shown| good.iter().any(|key| shown == key)), "{bearer:?}");
        let rest = request.headers.iter().filter(|(name, _)| name != "authorization");
        let rest: String = rest.map(|(name, value)| format!("{name}: {value}\n")).collect();
        fleet.heard("the backend, but for its key", format!("{}\n{rest}", request.path));
        fleet.heard("the backend, but for its key", &request.body);
    }
}

/// Metrics of both processes, which agree about leases with each other and with what operators are told.
async fn counted(fleet: &mut Managed) {
    let [edge, node] =
        [fleet.admin, fleet.node_metrics].map(|at| async move { ask(at, &Request::get("/metrics")).await.text() });
    let (edge, node) = (edge.await, node.await);
    let status = fleet.iop("lease status --json").await;
    let status: serde_json::Value = serde_json::from_str(status.lines().last().unwrap()).unwrap();
    let leases = &status["leases"];
    let at_node = |outcome| Metrics::parse(&node).sum("iop_node_credential_leases_total", &[outcome]);
    let issued = Metrics::parse(&edge).sum("iop_credential_leases_total", &["issued"]);
    assert_eq!(leases["issued"].as_f64(), Some(issued), "{leases}");
    assert_eq!(leases["opened"].as_f64(), Some(at_node("opened")), "{leases}");
    assert_eq!(leases["refused"].as_f64(), Some(at_node("refused")), "{leases}");
    assert!(at_node("opened") >= 34.0 && leases["denied"].as_u64() >= Some(2), "{leases}");
    let strangers = Metrics::parse(&edge).sum("iop_node_registrations_refused_total", &["unknown_token"]);
    assert_eq!(strangers, 1.0, "{edge}");
    fleet.heard("metrics of the Edge", edge);
    fleet.heard("metrics of the Node", node);
}

/// Both processes end; what they were started with, and what they logged.
async fn ended(fleet: &mut Managed) {
    #[cfg(target_os = "linux")]
    for (name, pid) in [("Edge", fleet.edge.pid()), ("Node", fleet.node.pid())] {
        for what in ["cmdline", "environ"] {
            let bytes = std::fs::read(format!("/proc/{pid}/{what}")).unwrap();
            fleet.heard(&format!("{what} of the {name}"), bytes);
        }
    }
    fleet.node.signal("TERM");
    fleet.edge.signal("TERM");
    assert_eq!((fleet.node.exit_code().await, fleet.edge.exit_code().await), (0, 0));
    for (name, lines) in [("log of the Edge", fleet.edge.lines()), ("log of the Node", fleet.node.lines())] {
        assert!(lines.len() < MAX_LINES, "{name} has lines that were not kept");
        assert!(lines.iter().any(|line| line.contains("TRACE")), "{name} is not loud");
        fleet.heard(name, lines.join("\n"));
    }
}

#[tokio::test]
async fn no_sink_of_a_managed_fleet_holds_a_secret_in_any_form() {
    // CRD-9, CRD-12, CRD-13, SEC-2, SEC-4, OPS-2; field report 88
    let backend = backend().await;
    let models: Vec<_> = ["ok".to_owned()].into_iter().chain(echoes(0)).chain(echoes(1)).collect();
    let mut fleet = Managed::start(&backend, &models).await;
    asked(&mut fleet, &backend).await;
    // A Node that shows a token of nobody.
    let stranger = Token::generate(TokenKind::Node).unwrap().reveal();
    fleet.folder.write("gpu-1/other.token", &stranger);
    let line = "serve --config gpu-1/node.yaml --token-file gpu-1/other.token --metrics-listen 127.0.0.1:0 \
                --reconnect-max-attempts 1";
    fleet.command(PROGRAMS.node, line).await;
    operated(&mut fleet).await;
    made(&mut fleet).await;
    debugged(&mut fleet);
    // Nobody may use the key any more.
    let told = fleet.iop("slot revoke main --json").await;
    assert!(told.contains("\"revoked\""), "{told}");
    let before = chats(&backend);
    for stream in [true, false] {
        assert_eq!(fleet.chat("ok", stream).await.0, 502);
    }
    assert_eq!(chats(&backend), before, "what is revoked is not lent");
    shown(&mut fleet, &backend);
    counted(&mut fleet).await;
    ended(&mut fleet).await;

    let of_file = |name: &str| secret_of(&fleet.read(name)).to_owned();
    let middle_of = |name: &str| middle_of(&fleet.read(name));
    let signs = middle_of_issuer(&fleet.read("keys/lease-issuer.pem"));
    let secrets = [
        Secret::new("the backend's first key", FIRST, &["key.txt"]),
        Secret::new("the backend's second key", SECOND, &["keys/main.key"]),
        Secret::new("the client's key", secret_of(&fleet.api_key), &[]),
        Secret::new("the Node's token", &of_file("gpu-1/node.token"), &["gpu-1/node.token"]),
        Secret::new("a wrong token", secret_of(&stranger), &["gpu-1/other.token"]),
        Secret::new("the operator's key", &of_file("admin.key"), &["admin.key"]),
        Secret::new("the key of the CA", &middle_of("ca/ca-key.pem"), &["ca/ca-key.pem"]),
        Secret::new("the Edge's private key", &middle_of("certs/edge-key.pem"), &["certs/edge-key.pem"]),
        Secret::new("the Node's private key", &middle_of("gpu-1/key.pem"), &["gpu-1/key.pem"]),
        Secret::new("the key that signs leases", &signs, &["keys/lease-issuer.pem"]),
    ];
    let stored = files(fleet.folder.path());
    // SQLite may leave its newest pages in a second file.
    let journal = stored.iter().filter(|(path, _)| path.to_string_lossy().starts_with("runs.db"));
    let journal: Vec<u8> = journal.flat_map(|(_, bytes)| bytes.clone()).collect();
    assert!(memchr::memmem::find(&journal, b"gpu-1-main").is_some(), "the journal has runs");
    for secret in secrets.iter().chain(&fleet.secrets) {
        for (path, bytes) in &stored {
            let (name, at_home) = (path.to_str().unwrap(), secret.homes.iter().any(|home| path == Path::new(home)));
            assert_eq!(!secret.found(bytes).is_empty(), at_home, "{} in the file {name}", secret.name);
        }
        for (sink, bytes) in &fleet.said {
            assert_eq!(secret.found(bytes), [""; 0], "{} in {sink}", secret.name);
        }
    }
}
