//! Decides how many Nodes live in this process: the real engine over real connections with TLS, without a process for each.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_app::adapters::BuiltIn;
use iop_execution::Redacted;
use iop_node_core::{Node, ReconnectPolicy, StatusHandle};
use iop_wire::link::grpc::GrpcConnector;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Nodes that dial one address. Dropping it drops their connections.
#[derive(Debug)]
pub struct Swarm {
    status: Vec<StatusHandle>,
    _serving: JoinSet<()>,
}

impl Swarm {
    /// Makes a Node for each token and lets it dial `edge`, all at once. The Edge's certificate must be of this CA; without
    /// one there is no TLS.
    #[must_use]
    pub fn start(edge: SocketAddr, ca: Option<&Path>, tokens: Vec<String>) -> Self {
        let config = ca.map(|ca| iop_app::tls::node_client(Some(ca)).expect("a CA"));
        let connector = match config {
            Some(config) => GrpcConnector::tls(edge.to_string(), config, Some("127.0.0.1")),
            None => GrpcConnector::plaintext(edge.to_string()),
        };
        let connector = Arc::new(connector.expect("an address"));
        let policy = ReconnectPolicy::new(Some(0), Some(Duration::from_secs(10))).expect("a policy");
        let (mut status, mut serving) = (Vec::new(), JoinSet::new());
        for token in tokens {
            let builder = Node::builder(Redacted::new(token), Arc::clone(&connector) as _);
            let node = builder.factory(Arc::new(BuiltIn::default())).reconnect(policy).build().expect("randomness");
            status.push(node.status());
            serving.spawn(async move {
                node.serve(CancellationToken::new()).await.expect("a Node that is known");
            });
        }
        Self { status, _serving: serving }
    }

    /// How long after `begin` each was ready for the first time; waits until all are.
    ///
    /// # Panics
    /// When one ends instead.
    pub async fn ready_times(&self, begin: Instant) -> Vec<Duration> {
        let waits = self.status.iter().map(async |status| {
            let mut status = status.clone();
            assert!(status.wait_ready().await, "it serves");
            begin.elapsed()
        });
        futures_util::future::join_all(waits).await
    }
}
