//! Decides how an Edge process and a Node process are configured and connected: TLS, a token, providers, models.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::SystemTime;

use iop_edge_core::token::{Token, TokenKind};

use crate::machine::{Folder, eventually};
use crate::process::{Process, Programs};
use crate::relay::Relay;
use crate::wire_client::{Answer, Connection, Request, ask};

/// One provider of a Node.
#[derive(Debug, Clone)]
pub struct ProviderPlan {
    /// Which Node runs it, from 0.
    pub node: usize,
    /// Its id.
    pub id: String,
    /// Where its backend is.
    pub base_url: String,
    /// Its places.
    pub capacity: u32,
    /// `auto` or `run`.
    pub wire: &'static str,
    /// The models it serves, by their public names. Providers may share one.
    pub models: Vec<String>,
    /// What the public names begin with before the provider's own names.
    pub prefix: &'static str,
    /// More of its keys in edge.yaml, each after a comma.
    pub more: &'static str,
}

impl ProviderPlan {
    /// A provider that serves these models by tunnel.
    #[must_use]
    pub fn new(id: &str, base_url: &str, capacity: u32, models: &[&str]) -> Self {
        let models = models.iter().map(|&model| model.to_owned()).collect();
        Self {
            node: 0,
            id: id.to_owned(),
            base_url: base_url.to_owned(),
            capacity,
            wire: "auto",
            models,
            prefix: "",
            more: "",
        }
    }

    /// On this Node instead of the first.
    #[must_use]
    pub const fn on_node(mut self, node: usize) -> Self {
        self.node = node;
        self
    }

    /// Public names are the provider's own names with this in front.
    #[must_use]
    pub fn prefixed(mut self, prefix: &'static str) -> Self {
        self.models.iter_mut().for_each(|model| model.insert_str(0, prefix));
        self.prefix = prefix;
        self
    }

    /// With these keys of edge.yaml more, each after a comma.
    #[must_use]
    pub const fn with(mut self, more: &'static str) -> Self {
        self.more = more;
        self
    }

    /// With normalised runs only.
    #[must_use]
    pub const fn by_run(mut self) -> Self {
        self.wire = "run";
        self
    }
}

/// What a fleet shall be.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What the Nodes run.
    pub providers: Vec<ProviderPlan>,
    /// More lines of edge.yaml.
    pub more: String,
    /// Clients need a key.
    pub keyed: bool,
    /// Nodes reach the Edge through a relay that tests can move and cut.
    pub relayed: bool,
    /// The Edge may send a request again, and comforts clients that wait, as it does by default. Off in these tests unless
    /// they are about it: what happens to one attempt is what the client sees.
    pub recovering: bool,
}

impl Plan {
    /// As many Nodes as these providers name.
    #[must_use]
    pub fn new(providers: Vec<ProviderPlan>) -> Self {
        Self { providers, more: String::new(), keyed: false, relayed: false, recovering: false }
    }

    /// With these lines of edge.yaml more.
    #[must_use]
    pub fn with(mut self, yaml: &str) -> Self {
        self.more.push_str(yaml);
        self.more.push('\n');
        self
    }

    /// With an API key.
    #[must_use]
    pub const fn keyed(mut self) -> Self {
        self.keyed = true;
        self
    }

    /// With a relay between Node and Edge.
    #[must_use]
    pub const fn relayed(mut self) -> Self {
        self.relayed = true;
        self
    }

    /// With the Edge's own ways of recovery.
    #[must_use]
    pub const fn recovering(mut self) -> Self {
        self.recovering = true;
        self
    }

    /// How many Nodes there are.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.providers.iter().map(|provider| provider.node + 1).max().unwrap_or(1)
    }

    fn yaml(&self, tokens: &[Token], api_key: &Token) -> String {
        let mut yaml = "listen: { openai: 127.0.0.1:0, nodes: 127.0.0.1:0, admin: 127.0.0.1:0 }\n\
            tls: { nodes: { cert: edge.pem, key: edge-key.pem } }\n"
            .to_owned();
        if self.keyed {
            let (id, hash) = (api_key.id().as_str(), api_key.hash());
            yaml.push_str(&format!("auth: {{ api_keys: [ {{ id: \"{id}\", hash: \"{hash}\" }} ] }}\n"));
        }
        yaml.push_str("nodes:\n");
        for (node, token) in tokens.iter().enumerate() {
            let (id, hash) = (token.id().as_str(), token.hash());
            yaml.push_str(&format!(
                "  - id: node-{node}\n    token_id: \"{id}\"\n    token_hash: \"{hash}\"\n    providers:\n"
            ));
            for ProviderPlan { id, base_url, capacity, wire, more, .. } in
                self.providers.iter().filter(|p| p.node == node)
            {
                yaml.push_str(&format!(
                    "      - {{ id: {id}, kind: openai_compat, base_url: \"{base_url}\", capacity: {capacity}, wire: {wire}{more} }}\n"
                ));
            }
        }
        let mut models: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for provider in &self.providers {
            for model in &provider.models {
                let target = model.strip_prefix(provider.prefix).unwrap_or(model);
                let candidate = format!("{{ provider: {}, target: \"{target}\" }}", provider.id);
                models.entry(model).or_default().push(candidate);
            }
        }
        yaml.push_str("models:\n");
        for (model, candidates) in models {
            yaml.push_str(&format!("  - {{ name: \"{model}\", candidates: [ {} ] }}\n", candidates.join(", ")));
        }
        if !self.recovering {
            yaml.push_str("recovery: { max_extra_attempts: 0, keepalive_after_ms: 0 }\n");
        }
        yaml.push_str(&self.more);
        yaml
    }
}

/// An Edge process and its Node processes, over TLS.
#[derive(Debug)]
pub struct Fleet {
    programs: Programs,
    folder: Folder,
    relay: Option<Relay>,
    api_key: Token,
    edge: Option<EdgeProcess>,
    nodes: Vec<Option<Process>>,
}

#[derive(Debug)]
struct EdgeProcess {
    process: Process,
    openai: SocketAddr,
    nodes: SocketAddr,
    admin: SocketAddr,
}

impl Fleet {
    /// Starts all processes and waits until the Edge says it is ready.
    pub async fn start(programs: Programs, plan: Plan) -> Self {
        let mut fleet = Self::prepare(programs, plan).await;
        fleet.start_edge().await;
        for node in 0..fleet.nodes.len() {
            fleet.start_node(node);
        }
        fleet.ready().await;
        fleet
    }

    /// Writes config, certificates and tokens; starts nothing.
    pub async fn prepare(programs: Programs, plan: Plan) -> Self {
        let folder = Folder::new();
        let certificates = iop_app::certs::generate(&[], SystemTime::now()).expect("certificates");
        folder.write("ca.pem", &certificates.ca);
        folder.write("edge.pem", &certificates.edge);
        folder.write("edge-key.pem", certificates.edge_key.expose());
        let tokens: Vec<_> = (0..plan.nodes()).map(|_| Token::generate(TokenKind::Node).expect("randomness")).collect();
        let api_key = Token::generate(TokenKind::ApiKey).expect("randomness");
        for (node, token) in tokens.iter().enumerate() {
            folder.write(&token_file(node), &token.reveal());
        }
        folder.write("edge.yaml", &plan.yaml(&tokens, &api_key));
        let relay = if plan.relayed { Some(Relay::start().await) } else { None };
        let nodes = tokens.iter().map(|_| None).collect();
        Self { programs, folder, relay, api_key, edge: None, nodes }
    }

    /// Starts the Edge, and leads the relay to it.
    pub async fn start_edge(&mut self) {
        let folder = self.folder.path();
        let process = Process::start(self.programs.edge, &["serve", "--config", "edge.yaml"], folder, &[]);
        let openai = process.find("the OpenAI address", |line| address_of(line, "openai")).await;
        let nodes = process.find("the address for nodes", |line| address_of(line, "nodes")).await;
        let admin = process.find("the admin address", |line| address_of(line, "admin")).await;
        if let Some(relay) = &self.relay {
            relay.lead_to(Some(nodes));
        }
        self.edge = Some(EdgeProcess { process, openai, nodes, admin });
    }

    /// Starts a Node.
    pub fn start_node(&mut self, node: usize) {
        let process = self.node_process(&token_file(node), 0, 1);
        self.nodes[node] = Some(process);
    }

    /// A Node process with this token file and `reconnect.*`, not remembered.
    #[must_use]
    pub fn node_process(&self, token_file: &str, attempts: u32, interval_sec: u32) -> Process {
        let addr = self.nodes_addr();
        let (edge, attempts, interval) = (format!("https://{addr}"), attempts.to_string(), interval_sec.to_string());
        let arguments = [
            "serve",
            "--edge",
            &edge,
            "--token-file",
            token_file,
            "--ca",
            "ca.pem",
            "--reconnect-max-attempts",
            &attempts,
            "--reconnect-interval-sec",
            &interval,
        ];
        Process::start(self.programs.node, &arguments, self.folder.path(), &[])
    }

    /// Waits until the Edge has a ready provider.
    pub async fn ready(&self) {
        let addr = self.openai();
        eventually("the Edge is ready", || async move {
            let answer = ask(addr, &Request::get("/readyz")).await;
            (answer.status() == 200).then_some(())
        })
        .await;
    }

    fn running_edge(&self) -> &EdgeProcess {
        self.edge.as_ref().expect("the Edge runs")
    }

    /// The Edge process.
    pub fn edge(&mut self) -> &mut Process {
        &mut self.edge.as_mut().expect("the Edge runs").process
    }

    /// A Node process.
    pub fn node(&mut self, node: usize) -> &mut Process {
        self.nodes[node].as_mut().expect("the Node runs")
    }

    /// Kills the Edge without warning.
    pub async fn kill_edge(&mut self) {
        self.edge.take().expect("the Edge runs").process.kill().await;
    }

    /// Kills a Node without warning.
    pub async fn kill_node(&mut self, node: usize) {
        self.nodes[node].take().expect("the Node runs").kill().await;
    }

    /// Where clients connect.
    #[must_use]
    pub fn openai(&self) -> SocketAddr {
        self.running_edge().openai
    }

    /// Where Nodes connect: the relay, if the plan has one.
    #[must_use]
    pub fn nodes_addr(&self) -> SocketAddr {
        self.relay.as_ref().map_or_else(|| self.running_edge().nodes, Relay::addr)
    }

    /// Waits until this Node is ready and `connections` of Nodes came up since the Edge started.
    pub async fn node_ready(&self, node: usize, connections: usize) {
        let label = format!("node=\"node-{node}\"");
        eventually("the Node is back", || async {
            let metrics = self.metrics().await;
            let ready = metrics.sum("iop_node_ready", &[&label]) == 1.0;
            (ready && metrics.sum("iop_node_connections_total", &[]) >= connections as f64).then_some(())
        })
        .await;
    }

    /// Waits until as many Nodes are ready.
    pub async fn all_ready(&self, nodes: usize) {
        eventually("all Nodes are ready", || async {
            (self.metrics().await.sum("iop_node_ready", &[]) == nodes as f64).then_some(())
        })
        .await;
    }

    /// Where operators connect.
    #[must_use]
    pub fn admin(&self) -> SocketAddr {
        self.running_edge().admin
    }

    /// The API key, as a client sends it.
    #[must_use]
    pub fn api_key(&self) -> String {
        self.api_key.reveal()
    }

    /// The folder with all files.
    #[must_use]
    pub const fn folder(&self) -> &Folder {
        &self.folder
    }

    /// The relay between Node and Edge.
    #[must_use]
    pub const fn relay(&self) -> &Relay {
        self.relay.as_ref().expect("the plan has a relay")
    }

    /// A client's connection.
    pub async fn client(&self) -> Connection {
        Connection::open(self.openai()).await
    }

    /// Asks over a connection of its own.
    pub async fn ask(&self, request: &Request) -> Answer {
        ask(self.openai(), request).await
    }

    /// The Edge's metrics now.
    pub async fn metrics(&self) -> Metrics {
        Metrics::parse(&ask(self.running_edge().admin, &Request::get("/metrics")).await.text())
    }

    /// Waits until no request runs or waits anywhere in the Edge.
    pub async fn at_rest(&self) {
        eventually("all counters are 0", || async { self.metrics().await.is_at_rest().then_some(()) }).await;
    }
}

/// The file with a Node's token, in the fleet's folder.
#[must_use]
pub fn token_file(node: usize) -> String {
    format!("node-{node}.token")
}

/// The loopback address in a line that says where a listener is.
pub fn address_of(line: &str, listener: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once(&format!("{listener}="))?;
    let start = rest.find("127.0.0.1:")?;
    let text: String = rest[start..].chars().take_while(|c| c.is_ascii_digit() || matches!(c, '.' | ':')).collect();
    text.parse().ok()
}

/// Prometheus text, read.
#[derive(Debug, Clone)]
pub struct Metrics(Vec<(String, String, f64)>);

impl Metrics {
    /// Reads the text format.
    ///
    /// # Panics
    /// On a line that is neither a comment nor a sample.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let value = value.parse().unwrap_or_else(|_| panic!("no value: {line}"));
            (name.to_owned(), labels.trim_end_matches('}').to_owned(), value)
        });
        Self(samples.collect())
    }

    /// How many series there are.
    #[must_use]
    pub const fn series(&self) -> usize {
        self.0.len()
    }

    /// The sum of all series of this name whose labels hold all of these texts, like `outcome="failed"`.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let matching =
            self.0.iter().filter(|(known, text, _)| known == name && labels.iter().all(|label| text.contains(label)));
        matching.map(|(_, _, value)| value).sum()
    }

    /// True if there is a series of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(known, _, _)| known == name)
    }

    /// Nobody holds a place, nobody waits, nothing is quarantined.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        AT_REST.iter().all(|name| {
            assert!(self.has(name), "the metric {name} is missing");
            self.sum(name, &[]) == 0.0
        })
    }
}

/// Gauges that are 0 when nothing happens.
const AT_REST: &[&str] = &["iop_provider_in_use", "iop_requests_waiting", "iop_requests_inflight"];
