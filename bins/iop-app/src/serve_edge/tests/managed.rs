//! An Edge whose Nodes show who they are: over real sockets, with certificates that are good, bad, and renewed.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iop_node_core::{NodeError, NodeStatus};
use iop_wire::{CloseCode, RefusalReason};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
};
use tokio::task::JoinHandle;

use super::*;
use crate::node_files::NodeFiles;
use crate::node_metrics::NodeMetrics;
use crate::testhttp::{get, send};

pub(super) struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    pub(super) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes `<name>.pem` and `<name>-key.pem` for this URI name.
    fn issue(&self, dir: &TestDir, name: &str, uri: Option<&str>, usage: ExtendedKeyUsagePurpose) {
        self.issue_with(dir, name, &Vec::from_iter(uri), |params| params.extended_key_usages = vec![usage]);
    }

    /// The same for these URI names, after a change.
    pub(super) fn issue_with(
        &self,
        dir: &TestDir,
        name: &str,
        uris: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) {
        let mut params = CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        params.subject_alt_names.extend(uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())));
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        dir.write(&format!("{name}.pem"), &certificate.pem());
        dir.write(&format!("{name}-key.pem"), &key.serialize_pem());
    }

    fn issue_edge(&self, dir: &TestDir) {
        self.issue(dir, "edge", Some("spiffe://iop.local/iop/edge/edge"), ExtendedKeyUsagePurpose::ServerAuth);
    }

    pub(super) fn issue_node(&self, dir: &TestDir, node: &str) {
        let uri = format!("spiffe://iop.local/iop/node/{node}");
        self.issue(dir, node, Some(&uri), ExtendedKeyUsagePurpose::ClientAuth);
    }
}

const NODES: [&str; 2] = ["n1", "n2"];

/// An Edge with two Nodes in its config, each of which can serve `iop-demo`.
pub(super) struct Managed {
    pub(super) dir: TestDir,
    pub(super) ca: Ca,
    openai: SocketAddr,
    pub(super) nodes: SocketAddr,
    admin: SocketAddr,
    reloader: Reloader,
    pub(super) runtime: EdgeRuntime,
    stop: Shutdown,
}

impl Managed {
    pub(super) async fn start() -> Self {
        let (dir, ca) = (TestDir::new(), Ca::new("first"));
        ca.issue_edge(&dir);
        dir.write("ca.pem", &ca.pem());
        let mut yaml = "listen: { openai: 127.0.0.1:0, nodes: 127.0.0.1:0, admin: 127.0.0.1:0 }\n\
            tls: { nodes: { cert: edge.pem, key: edge-key.pem, client_ca: ca.pem } }\nnodes:\n"
            .to_owned();
        for node in NODES {
            ca.issue_node(&dir, node);
            let token = Token::generate(TokenKind::Node).unwrap();
            dir.write(&format!("{node}.token"), &token.reveal());
            let (id, hash) = (token.id().as_str(), token.hash());
            yaml.push_str(&format!(
                "  - {{ id: {node}, token_id: {id}, token_hash: \"{hash}\", providers: [ {{ id: demo-{node}, kind: demo }} ] }}\n"
            ));
        }
        yaml.push_str("models: [ { name: m, candidates: [ { provider: demo-n1, target: iop-demo }, { provider: demo-n2, target: iop-demo } ] } ]\n");
        let (loaded, problems) = EdgeConfig::load(&dir.write("edge.yaml", &yaml));
        let bound = bind(&loaded.unwrap_or_else(|| panic!("{problems}"))).await.unwrap();
        let (openai, nodes, admin) = (bound.openai_address, bound.nodes_address, bound.admin_address);
        let (reloader, runtime, stop) = (bound.reloader().clone(), bound.runtime().clone(), Shutdown::default());
        tokio::spawn(bound.serve(stop.clone()));
        Self { dir, ca, openai, nodes, admin, reloader, runtime, stop }
    }

    pub(super) fn options(&self, token: &str, certificate: Option<&str>) -> NodeOptions {
        let at = |name: String| self.dir.path().join(name);
        NodeOptions {
            dial: DialOptions {
                edge: Some(format!("https://{}", self.nodes)),
                token_file: Some(at(format!("{token}.token"))),
                ca: Some(at("ca.pem".into())),
                cert: certificate.map(|name| at(format!("{name}.pem"))),
                cert_key: certificate.map(|name| at(format!("{name}-key.pem"))),
                ..DialOptions::default()
            },
            reconnect_max_attempts: Some(1),
            reconnect_interval_sec: Some(1),
            ..NodeOptions::default()
        }
    }

    /// Why a Node with these options can't serve.
    async fn refusal(&self, options: NodeOptions) -> NodeError {
        timeout(Duration::from_secs(30), node(options).serve(CancellationToken::new())).await.unwrap().unwrap_err()
    }

    /// The metrics have this line, or get it soon: what ended at a Node may not be counted here yet.
    pub(super) async fn metric(&self, line: &str) -> bool {
        let counted = async {
            while !text(send(self.admin, get("/metrics")).await).await.lines().any(|known| known == line) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(Duration::from_secs(10), counted).await.is_ok()
    }

    /// How many changes of certificate files had this result. The running Edge looks at them by itself as well.
    async fn reloads(&self, result: &str) -> u64 {
        let name = format!("iop_certificate_reloads_total{{result=\"{result}\"}} ");
        let metrics = text(send(self.admin, get("/metrics")).await).await;
        metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0)
    }

    pub(super) async fn ready(&self, name: &str) -> Running {
        let options = NodeOptions { reconnect_max_attempts: Some(0), ..self.options(name, Some(name)) };
        let (node, stop) = (node(options), CancellationToken::new());
        let mut status = node.status();
        let running = Running { status: status.clone(), task: tokio::spawn(node.serve(stop.clone())), stop };
        assert!(timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap());
        running
    }

    fn connections(&self) -> usize {
        self.runtime.edge().snapshot().nodes.iter().filter(|node| node.connected && !node.draining).count()
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        self.stop.force();
    }
}

pub(super) struct Running {
    status: iop_node_core::StatusHandle,
    task: JoinHandle<Result<ServeEnd, NodeError>>,
    stop: CancellationToken,
}

impl Running {
    pub(super) async fn end(self) {
        self.stop.cancel();
        let _status = self.status;
        assert_eq!(timeout(Duration::from_secs(40), self.task).await.unwrap().unwrap(), Ok(ServeEnd::Drained));
    }
}

#[tokio::test]
async fn identity_and_token_of_one_record_serve_and_any_other_pair_is_refused_in_words() {
    // CRD-10, REG-4, REG-6
    let edge = Managed::start().await;
    assert_eq!(edge.refusal(edge.options("n1", None)).await, NodeError::Refused(RefusalReason::IdentityRequired));
    assert_eq!(edge.refusal(edge.options("n1", Some("n2"))).await, NodeError::Refused(RefusalReason::IdentityMismatch));
    edge.ca.issue_node(&edge.dir, "stranger");
    let stranger = edge.refusal(edge.options("n1", Some("stranger"))).await;
    assert_eq!(stranger, NodeError::Refused(RefusalReason::IdentityMismatch));
    for reason in ["identity_required", "identity_mismatch"] {
        let count = if reason == "identity_required" { 1 } else { 2 };
        assert!(edge.metric(&format!("iop_node_registrations_refused_total{{kind=\"{reason}\"}} {count}")).await);
    }
    // The next step is told.
    let (settings, _) = edge.options("n1", None).load();
    let failure = serve_node::failure(&NodeError::Refused(RefusalReason::IdentityRequired), &settings.unwrap());
    assert!(failure.to_string().contains("--cert"), "{failure}");

    let n1 = edge.ready("n1").await;
    let answer = send(edge.openai, chat("m", false)).await;
    assert_eq!(answer.status(), StatusCode::OK);
    n1.end().await;
}

#[tokio::test]
async fn a_certificate_of_another_ca_ends_the_handshake_and_both_ends_count_it() {
    // CRD-10
    let edge = Managed::start().await;
    Ca::new("other").issue_node(&edge.dir, "n1");
    assert!(matches!(edge.refusal(edge.options("n1", Some("n1"))).await, NodeError::Exhausted { .. }));
    assert!(edge.metric("iop_node_handshakes_failed_total{reason=\"peer_unknown_ca\"} 2").await);
    assert_eq!(edge.connections(), 0);
    // An Edge that is another one than the Node was told to take.
    edge.ca.issue_node(&edge.dir, "n1");
    let (settings, problems) = edge.options("n1", Some("n1")).load();
    let mut settings = settings.unwrap_or_else(|| panic!("{problems}"));
    settings.edge.identity = Some(iop_wire::WorkloadIdentity::parse("spiffe://iop.local/iop/edge/other").unwrap());
    let node = serve_node::node(&settings, Arc::new(NoObserver)).unwrap();
    let ended = timeout(Duration::from_secs(30), node.serve(CancellationToken::new())).await.unwrap();
    assert!(matches!(ended, Err(NodeError::Exhausted { .. })), "{ended:?}");
    assert!(edge.metric("iop_node_handshakes_failed_total{reason=\"our_identity_refused\"} 2").await);
}

#[tokio::test]
async fn a_certificate_without_the_right_identity_is_told_before_anybody_is_dialled() {
    // CRD-10
    let edge = Managed::start().await;
    edge.ca.issue(&edge.dir, "bare", None, ExtendedKeyUsagePurpose::ClientAuth);
    for (name, expected) in [("bare", "it has no URI name"), ("edge", "of the wrong kind"), ("gone", "gone.pem")] {
        let (settings, problems) = edge.options("n1", Some(name)).load();
        assert!(settings.is_none() && problems.to_string().contains(expected), "{name}: {problems}");
    }
    // The same for the Edge: it does not start.
    edge.ca.issue(&edge.dir, "edge", None, ExtendedKeyUsagePurpose::ServerAuth);
    let (loaded, problems) = EdgeConfig::load(&edge.dir.path().join("edge.yaml"));
    let failure = bind(&loaded.unwrap_or_else(|| panic!("{problems}"))).await.map(|_| ()).unwrap_err();
    assert_eq!(failure.exit, crate::exit::Exit::Usage);
    assert!(failure.to_string().contains("spiffe://<trust domain>/iop/edge/<id>"), "{failure}");
}

#[tokio::test]
async fn a_bad_pair_of_files_changes_nothing_and_a_removed_root_ends_the_sessions_it_proved() {
    // CRD-10
    let edge = Managed::start().await;
    let mut n1 = edge.ready("n1").await;
    edge.dir.write("edge-key.pem", "no key");
    edge.reloader.reload().await.unwrap_err();
    assert!(edge.reloads("refused").await >= 1);
    assert_eq!(send(edge.openai, chat("m", false)).await.status(), StatusCode::OK);
    // A new CA, and the Node still shows a certificate of the old one.
    let second = Ca::new("second");
    second.issue_edge(&edge.dir);
    edge.dir.write("ca.pem", &second.pem());
    edge.reloader.reload().await.unwrap();
    timeout(Duration::from_secs(20), async {
        while edge.connections() > 0 || n1.status.get() == NodeStatus::Ready {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    let metrics = text(send(edge.admin, get("/metrics")).await).await;
    let closed = |line: &str| {
        line.starts_with("iop_node_connections_closed_total") && line.contains(CloseCode::IdentityRevoked.as_str())
    };
    assert!(metrics.lines().any(closed), "{metrics}");
    assert_eq!(send(edge.openai, chat("m", false)).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    // Once it has a certificate of the new one, it is back by itself.
    second.issue_node(&edge.dir, "n1");
    assert!(timeout(Duration::from_secs(30), n1.status.wait_ready()).await.unwrap());
    assert_eq!(send(edge.openai, chat("m", false)).await.status(), StatusCode::OK);
    n1.end().await;
}

/// Clients that ask all the time. Every answer must be a whole one.
struct Load {
    stop: CancellationToken,
    asked: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<Vec<String>>>,
}

impl Load {
    fn start(openai: SocketAddr) -> Self {
        let (stop, asked) = (CancellationToken::new(), Arc::new(AtomicU64::new(0)));
        let tasks = (0..8).map(|client| {
            let (stop, asked) = (stop.clone(), Arc::clone(&asked));
            tokio::spawn(async move {
                let mut failed = Vec::new();
                while !stop.is_cancelled() {
                    let answer = send(openai, chat("m", client % 2 == 0)).await;
                    let status = answer.status();
                    let body = text(answer).await;
                    let whole =
                        if client % 2 == 0 { body.ends_with("data: [DONE]\n\n") } else { body.contains("\"stop\"") };
                    if status != StatusCode::OK || !whole {
                        failed.push(format!("{status} {body}"));
                    }
                    asked.fetch_add(1, Ordering::Relaxed);
                }
                failed
            })
        });
        let tasks = tasks.collect();
        Self { stop, asked, tasks }
    }

    /// Lets some requests go by.
    async fn some(&self) {
        let until = self.asked.load(Ordering::Relaxed) + 8;
        timeout(Duration::from_secs(60), async {
            while self.asked.load(Ordering::Relaxed) < until {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .unwrap();
    }

    async fn end(self) -> u64 {
        self.stop.cancel();
        for task in self.tasks {
            assert_eq!(task.await.unwrap(), Vec::<String>::new());
        }
        self.asked.load(Ordering::Relaxed)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_and_their_ca_are_rotated_under_load_without_a_failed_request() {
    // CRD-10
    let edge = Managed::start().await;
    let mut running = [Some(edge.ready("n1").await), Some(edge.ready("n2").await)];
    let load = Load::start(edge.openai);
    load.some().await;

    // A renewed certificate of the same CA, under the same path: sessions stay, new ones are shown the new one.
    edge.ca.issue_edge(&edge.dir);
    edge.reloader.reload().await.unwrap();
    load.some().await;
    assert_eq!(edge.connections(), 2, "nobody was asked to leave");

    // The CA: both are trusted, then everybody gets a new certificate, then the old one goes.
    let second = Ca::new("second");
    let roots: PathBuf = edge.dir.write("ca.pem", &(edge.ca.pem() + &second.pem()));
    edge.reloader.reload().await.unwrap();
    assert_eq!(edge.connections(), 2);
    second.issue_edge(&edge.dir);
    edge.reloader.reload().await.unwrap();
    load.some().await;
    for (at, name) in NODES.iter().enumerate() {
        second.issue_node(&edge.dir, name);
        // One after the other; what it runs it finishes.
        running[at].take().unwrap().end().await;
        running[at] = Some(edge.ready(name).await);
        load.some().await;
    }
    std::fs::write(&roots, second.pem()).unwrap();
    edge.reloader.reload().await.unwrap();
    load.some().await;
    assert_eq!(edge.connections(), 2, "every session is one of the new CA");
    assert!(edge.reloads("applied").await >= 4);
    let asked = load.end().await;
    assert!(asked >= 40, "{asked}");
    for node in running.into_iter().flatten() {
        node.end().await;
    }
}

#[tokio::test]
async fn an_edge_whose_ca_the_node_does_not_trust_any_more_is_left_and_found_again() {
    // CRD-10: the Node looks at its live session, too
    let edge = Managed::start().await;
    let roots = edge.dir.write("node-ca.pem", &edge.ca.pem());
    let mut options = NodeOptions { reconnect_max_attempts: Some(0), ..edge.options("n1", Some("n1")) };
    options.dial.ca = Some(roots.clone());
    let (settings, problems) = options.load();
    let settings = settings.unwrap_or_else(|| panic!("{problems}"));
    let files = NodeFiles::read(&settings, NodeMetrics::new()).unwrap();
    let (node, stop) =
        (serve_node::node_with(&settings, &files, Arc::new(NoObserver)).unwrap(), CancellationToken::new());
    let (check, mut status) = (node.edge_check(), node.status());
    let running = Running { status: status.clone(), task: tokio::spawn(node.serve(stop.clone())), stop };
    assert!(timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap());

    // What is no certificate changes nothing, and neither does another look at a good one.
    std::fs::write(&roots, "no certificate").unwrap();
    files.look(&check, true);
    assert_eq!(send(edge.openai, chat("m", false)).await.status(), StatusCode::OK);
    assert_eq!((status.get(), edge.connections()), (NodeStatus::Ready, 1));

    std::fs::write(&roots, Ca::new("other").pem()).unwrap();
    files.look(&check, false);
    timeout(Duration::from_secs(20), async {
        while edge.connections() > 0 || status.get() == NodeStatus::Ready {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    let closed = format!("iop_node_connections_closed_total{{kind=\"{}\"}} 1", CloseCode::IdentityRevoked);
    assert!(edge.metric(&closed).await);

    std::fs::write(&roots, edge.ca.pem()).unwrap();
    assert!(timeout(Duration::from_secs(30), status.wait_ready()).await.unwrap());
    assert_eq!(send(edge.openai, chat("m", false)).await.status(), StatusCode::OK);
    running.end().await;
}

/// What is shown first in a PEM file.
fn leaf_of(dir: &TestDir, name: &str) -> Vec<u8> {
    let chain = crate::tls::load_certificates(&dir.path().join(name)).unwrap();
    chain.first().unwrap().to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_node_takes_renewed_certificates_of_both_ends_under_load_and_no_request_fails() {
    // CRD-10, FEN-3: a session is made anew long before the certificates end that it was made with
    let edge = Managed::start().await;
    let options = NodeOptions { reconnect_max_attempts: Some(0), ..edge.options("n1", Some("n1")) };
    let (settings, problems) = options.load();
    let settings = settings.unwrap_or_else(|| panic!("{problems}"));
    let metrics = NodeMetrics::new();
    let files = NodeFiles::read(&settings, metrics.clone()).unwrap();
    let node = serve_node::node_with(&settings, &files, Arc::new(NoObserver)).unwrap();
    let (check, mut status, stop) = (node.edge_check(), node.status(), CancellationToken::new());
    let running = Running { status: status.clone(), task: tokio::spawn(node.serve(stop.clone())), stop };
    assert!(timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap());
    let load = Load::start(edge.openai);
    load.some().await;

    // What each end was shown by the other one on the connection that is there now.
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let shown = async |expected: &dyn Fn() -> [Vec<u8>; 2]| {
        timeout(Duration::from_secs(40), async {
            loop {
                let of_node = std::cell::RefCell::new(Vec::new());
                edge.runtime.edge().recheck_identities(|peer| {
                    *of_node.borrow_mut() = peer.chain()[0].clone();
                    true
                });
                let into = Arc::clone(&seen);
                check.recheck(move |peer| {
                    *into.lock().unwrap() = peer.chain()[0].clone();
                    true
                });
                tokio::time::sleep(Duration::from_millis(20)).await;
                if [of_node.into_inner(), seen.lock().unwrap().clone()] == expected() {
                    break;
                }
            }
        })
        .await
        .expect("the session is made anew");
    };
    let now = || [leaf_of(&edge.dir, "n1.pem"), leaf_of(&edge.dir, "edge.pem")];
    shown(&now).await;
    let first = now();

    edge.ca.issue_node(&edge.dir, "n1");
    files.look(&check, false);
    // It may never be idle: not later than this.
    check.renew(Duration::from_secs(1));
    shown(&now).await;
    load.some().await;
    edge.ca.issue_edge(&edge.dir);
    edge.reloader.reload().await.unwrap();
    check.renew(Duration::from_secs(1));
    shown(&now).await;
    assert!(first.iter().zip(now()).all(|(old, new)| *old != new));
    load.some().await;
    assert!(load.end().await >= 30);
    assert!(metrics.render().contains("iop_node_file_reloads_total{what=\"certificates\",result=\"applied\"} 1"));
    running.end().await;
}
