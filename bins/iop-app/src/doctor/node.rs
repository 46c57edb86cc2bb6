//! Decides what is looked at from a Node's place: the way to the Edge, step by step, and the backends beside it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt as _;
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::Redacted;
use iop_node_core::AllowUpstream;
use iop_wire::limits::{FEATURES, MAX_ENVELOPE, PROTO_MAX, PROTO_MIN};
use iop_wire::{
    ConnectError, Hello, NodeLink, RefusalReason, RegisterRequest, RegisterResponse, Registered, Sequenced, ToEdge,
    ToNode,
};
use rustls_pki_types::ServerName;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::{Report, backend, certificate};
use crate::config::time::Timestamp;
use crate::config::{NodeOptions, NodeSettings};
use crate::node_files::NodeFiles;
use crate::node_metrics::NodeMetrics;
use crate::{serve_node, tls};

/// For each step.
const PATIENCE: Duration = Duration::from_secs(10);
/// Difference of the clocks that is a warning, in milliseconds.
const CLOCK_WARN_MS: i128 = 5_000;
/// Difference of the clocks that breaks certificates, in milliseconds.
const CLOCK_FAIL_MS: i128 = 300_000;

/// Goes the way of a Node with these settings.
pub(super) async fn examine(options: NodeOptions, report: &mut Report) {
    let (settings, problems) = options.load();
    for problem in problems.sorted() {
        let next = problem.suggestion.clone().unwrap_or_else(|| "iop-node check says more".to_owned());
        match problem.severity {
            crate::config::Severity::Error => report.fail("settings", &problem.message, next),
            crate::config::Severity::Warning => report.warn("settings", &problem.message, next),
        }
    }
    let Some(settings) = settings else { return };
    let Some(address) = reach(&settings, report).await else { return };
    let Some(link) = connect(&settings, address, report).await else { return };
    let Some(registered) = register(link, &settings, report).await else { return };
    let allowed = match &settings.allow_upstream {
        Some(rules) => AllowUpstream::parse(rules).unwrap_or_default(),
        None => AllowUpstream::default(),
    };
    if registered.config.providers.is_empty() {
        report.warn(
            "backends",
            "the Edge gives this Node no provider",
            "add one under its `nodes:` entry of edge.yaml",
        );
    }
    for provider in &registered.config.providers {
        if !provider.base_url.is_empty()
            && let Err(refused) = allowed.check(&provider.base_url)
        {
            let next = "allow it with --allow-upstream, or correct `base_url` in edge.yaml";
            report.fail(format!("backend {}", provider.provider_id), refused.to_string(), next);
            continue;
        }
        backend::examine(provider, report).await;
    }
}

/// Name and port of the Edge lead somewhere.
async fn reach(settings: &NodeSettings, report: &mut Report) -> Option<SocketAddr> {
    let dial = &settings.edge.dial;
    let host = dial.rsplit_once(':').map_or(dial.as_str(), |(host, _)| host);
    let found: Vec<SocketAddr> = match timeout(PATIENCE, lookup_host(dial.as_str())).await {
        Ok(Ok(found)) => found.collect(),
        Ok(Err(error)) => {
            report.fail(
                "dns",
                format!("{host}: {error}"),
                "correct the host of --edge, or the name service of this machine",
            );
            return None;
        }
        Err(_) => {
            report.fail(
                "dns",
                format!("{host}: no answer within {} s", PATIENCE.as_secs()),
                "look at the name service of this machine",
            );
            return None;
        }
    };
    let mut shown: Vec<_> = found.iter().map(|address| address.ip().to_string()).collect();
    shown.dedup();
    if host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_err() {
        report.ok("dns", format!("{host} is {}", shown.join(", ")));
    }
    let mut last = String::new();
    for address in found {
        let began = Instant::now();
        match timeout(PATIENCE, TcpStream::connect(address)).await {
            Ok(Ok(_)) => {
                report.ok("tcp", format!("{address} answers in {} ms", began.elapsed().as_millis()));
                return Some(address);
            }
            Ok(Err(error)) => last = format!("{address}: {error}"),
            Err(_) => last = format!("{address}: no answer within {} s", PATIENCE.as_secs()),
        }
    }
    let next =
        "is iop-edge up, does `listen.nodes` of its edge.yaml listen to that address, does a firewall stand between?";
    report.fail("tcp", last, next);
    None
}

/// TLS, by the very connector that `iop-node serve` uses.
async fn connect(settings: &NodeSettings, address: SocketAddr, report: &mut Report) -> Option<NodeLink> {
    let connector =
        match NodeFiles::read(settings, NodeMetrics::new()).and_then(|files| serve_node::connector(settings, &files)) {
            Ok(connector) => connector,
            Err(failure) => {
                report.fail("tls", failure.message, failure.hint.unwrap_or_default());
                return None;
            }
        };
    let link = match connector.connect().await {
        Ok(link) => link,
        Err(error) => {
            let next = match &error {
                ConnectError::Fatal(_) => "correct --edge or --tls-name",
                _ => "the text says which side has to change; --ca names the CA of the Edge's certificate",
            };
            report.fail("tls", error.to_string(), next);
            return None;
        }
    };
    if !settings.edge.tls {
        report.warn("tls", "plain text: token and prompts can be read on the way", "use https:// outside this machine");
        return Some(link);
    }
    let name = &settings.edge.tls_name;
    report.ok("tls", format!("TLS 1.3, the Edge's certificate is good for {name}"));
    let proven = link.peer().identity;
    let shown = match proven.as_ref().and_then(|proven| proven.chain().first()) {
        Some(leaf) => Some(leaf.clone()),
        None => shown_certificate(settings, address).await,
    };
    match shown.as_deref().and_then(certificate::facts) {
        Some(facts) => certificate::tell(&facts, "certificate", Timestamp::now(), report),
        None => report.skip("certificate", "it can't be read a second time"),
    }
    match &proven {
        Some(proven) => report.ok("identity", format!("the Edge is {}", proven.identity())),
        None => report.skip("identity", "nothing says which Edge this must be (`identity`, or a certificate of its own); managed credentials need that"),
    }
    if let Some(own) = &settings.own {
        let chain = tls::load_certificates(&own.cert).unwrap_or_default();
        match chain.first().and_then(|leaf| certificate::facts(leaf)) {
            Some(facts) => certificate::tell(&facts, "own certificate", Timestamp::now(), report),
            None => report.skip("own certificate", "it can't be read"),
        }
    }
    Some(link)
}

/// The certificate that the Edge shows.
async fn shown_certificate(settings: &NodeSettings, address: SocketAddr) -> Option<Vec<u8>> {
    let config = tls::node_client(settings.ca.as_deref()).ok()?;
    let name = ServerName::try_from(settings.edge.tls_name.clone()).ok()?;
    let handshake = async {
        let socket = TcpStream::connect(address).await.ok()?;
        let stream = tokio_rustls::TlsConnector::from(Arc::clone(&config)).connect(name, socket).await.ok()?;
        stream.get_ref().1.peer_certificates()?.first().map(|certificate| certificate.to_vec())
    };
    timeout(PATIENCE, handshake).await.ok().flatten()
}

fn unix_ms() -> i128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| i128::try_from(since.as_millis()).unwrap_or(i128::MAX))
}

/// Registers, and leaves before it is ready: no work comes, and a Node that is connected keeps its place.
async fn register(link: NodeLink, settings: &NodeSettings, report: &mut Report) -> Option<Registered> {
    let mut instance_id = [0; 16];
    // An id of zeros is one, too.
    let _random = getrandom::fill(&mut instance_id);
    let hello = ToEdge::Hello(Hello {
        proto_min: PROTO_MIN,
        proto_max: PROTO_MAX,
        features: FEATURES.iter().map(|feature| (*feature).to_owned()).collect(),
        node_version: concat!("doctor/", env!("CARGO_PKG_VERSION")).to_owned(),
        instance_id,
        connection_ordinal: 1,
        max_envelope: u32::try_from(MAX_ENVELOPE).unwrap_or(u32::MAX),
    });
    let request = ToEdge::Register(RegisterRequest {
        token: Redacted::new(settings.token.expose().clone()),
        recipient_key: bytes::Bytes::new(),
        inventory: Vec::new(),
        claimed_node_id: None,
    });
    let messages = [hello, request].into_iter().zip(1..).map(|(message, seq)| Sequenced { seq, message });
    // The direction stays open until the answer is there.
    let outgoing = futures_util::stream::iter(messages).chain(futures_util::stream::pending());
    let (mut incoming, began) = (link.start(Box::pin(outgoing)), unix_ms());
    let answer = async {
        while let Some(message) = incoming.next().await {
            match message {
                Ok(Sequenced { message: ToNode::RegisterResponse(response), .. }) => return Ok(response),
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("the Edge ended the connection without an answer".to_owned())
    };
    let response = match timeout(PATIENCE, answer).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => {
            report.fail("token", error, "the log of iop-edge says why; are Edge and Node of the same version?");
            return None;
        }
        Err(_) => {
            report.fail("token", format!("no answer within {} s", PATIENCE.as_secs()), "look at the log of iop-edge");
            return None;
        }
    };
    let RegisterResponse { edge_time_ms, outcome } = response;
    clock(i128::from(edge_time_ms), began, unix_ms(), report);
    let id = Token::parse(TokenKind::Node, settings.token.expose());
    let id = id.as_ref().map(|token| token.id().as_str().to_owned()).unwrap_or_default();
    match outcome {
        Ok(registered) => {
            report.ok("token", format!("accepted: this is node {}", registered.node_id));
            Some(registered)
        }
        Err(refusal) => {
            refused(refusal.reason, &id, report);
            None
        }
    }
}

fn clock(edge: i128, began: i128, ended: i128, report: &mut Report) {
    let skew = edge - i128::midpoint(began, ended);
    let (ahead, size) = (skew < 0, skew.abs());
    let seconds = format!("{}.{} s", size / 1000, size % 1000 / 100);
    let how = if ahead { "ahead of" } else { "behind" };
    let detail = format!("this machine is {seconds} {how} the Edge");
    if size >= CLOCK_FAIL_MS {
        report.fail("clock", detail, "certificates are judged by this clock: let NTP set it");
    } else if size >= CLOCK_WARN_MS {
        report.warn("clock", detail, "let NTP set both clocks: their logs can't be compared");
    } else {
        report.ok("clock", detail);
    }
}

fn refused(reason: RefusalReason, id: &str, report: &mut Report) {
    match reason {
        RefusalReason::UnknownToken => report.fail(
            "token",
            format!("refused: no Node has token {id}, or it has expired"),
            "`iop token list` at the Edge shows the ids; `iop token new NODE` or `iop token rotate NODE` makes one",
        ),
        RefusalReason::DuplicateConnection => {
            report.ok("token", "accepted: this Node is connected already");
            report.skip(
                "backends",
                "what the Edge gives the Node is told to the one that is connected; --backend URL looks at one",
            );
        }
        RefusalReason::ConfigUnavailable => report.fail(
            "token",
            "accepted, but this Node is not enabled",
            "`enabled: false` stands in its `nodes:` entry of edge.yaml",
        ),
        RefusalReason::UnsupportedProtocol => {
            report.fail("token", "Edge and Node speak no common protocol version", "update the older one");
        }
        RefusalReason::IdentityRequired => report.fail(
            "token",
            "refused: the Edge wants a certificate with a workload identity",
            "--cert and --cert-key name this Node's; `iop init --managed` makes one",
        ),
        RefusalReason::IdentityMismatch => report.fail(
            "token",
            "refused: token and certificate are of different Nodes",
            "`identities` of the Node's entry in edge.yaml must name the identity of its certificate",
        ),
        RefusalReason::Draining => {
            report.warn(
                "token",
                "the Edge takes nobody now: it goes down, or too many tries have failed",
                "try again in a minute",
            );
        }
    }
}
