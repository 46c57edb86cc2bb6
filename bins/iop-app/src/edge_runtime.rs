//! Decides how an Edge lives in a process: its engine, its listeners, its end.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use iop_edge_core::Edge;
use iop_edge_core::api::Engine;
use iop_edge_core::catalog::Catalog;
use iop_edge_core::openai::{OpenAiConfig, OpenAiService};
use iop_edge_core::snapshot::{ProviderHealth, Status};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::access::AccessLog;
use crate::admin::{Admin, router};
use crate::lifecycle;
use crate::listener::HttpListener;
use crate::liveness::HealthLog;
use crate::metrics::{EdgeMetrics, Gauges, ModelGauge, NodeGauge, ProviderGauge};
use crate::shutdown::{DRAIN, Shutdown};
use crate::track::{Inflight, Tracked};

/// For answers to reach their clients after the last run has ended, and for connections to close.
const FLUSH: Duration = Duration::from_secs(2);

/// An Edge with its metrics.
#[derive(Debug, Clone)]
pub struct EdgeRuntime {
    edge: Edge,
    metrics: EdgeMetrics,
    inflight: Inflight,
    openai: OpenAiService,
}

impl EdgeRuntime {
    /// Starts the engine. Must be called within a tokio runtime.
    #[must_use]
    pub fn start(catalog: Catalog, edge_id: &str, openai: OpenAiConfig) -> Self {
        let metrics = EdgeMetrics::new();
        let edge = Edge::builder(catalog).edge_id(edge_id).observer(Arc::new(HealthLog::new(metrics.clone()))).build();
        tokio::spawn(edge.drive());
        tokio::spawn(lifecycle::log(edge.clone()));
        let inflight = Inflight::new(metrics.inflight().clone());
        let openai = OpenAiService::new(Arc::new(edge.clone()), observed(openai, &metrics));
        Self { edge, metrics, inflight, openai }
    }

    /// The engine.
    #[must_use]
    pub const fn edge(&self) -> &Edge {
        &self.edge
    }

    /// Its metrics.
    #[must_use]
    pub const fn metrics(&self) -> &EdgeMetrics {
        &self.metrics
    }

    /// The OpenAI surface.
    #[must_use]
    pub const fn openai(&self) -> &OpenAiService {
        &self.openai
    }

    /// Client requests that are being answered.
    #[must_use]
    pub const fn inflight(&self) -> &Inflight {
        &self.inflight
    }

    /// Replaces the settings of the OpenAI surface; a request keeps those it began with (CFG-2).
    pub fn replace_openai(&self, openai: OpenAiConfig) {
        self.openai.replace_config(observed(openai, &self.metrics));
    }

    /// What gauges show now.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let snapshot = self.edge.snapshot();
        let providers = snapshot.nodes.iter().flat_map(|node| &node.providers);
        Gauges {
            providers: providers
                .map(|provider| ProviderGauge {
                    id: provider.provider.to_string(),
                    capacity: provider.effective.capacity,
                    in_use: provider.in_use.in_use(),
                    quarantined: provider.in_use.quarantined,
                    ready: provider.status == Status::Ready,
                    cooling: provider.cooling.is_some(),
                    unhealthy: provider.health == ProviderHealth::Unavailable,
                })
                .collect(),
            nodes: snapshot
                .nodes
                .iter()
                .map(|node| NodeGauge {
                    id: node.node.to_string(),
                    ready: node.connected,
                    draining: node.draining,
                    suspect: node.suspect,
                })
                .collect(),
            models: snapshot
                .models
                .iter()
                .map(|model| ModelGauge {
                    name: model.model.to_string(),
                    waiting: model.waiting as u64,
                    oldest_wait: model.oldest_wait,
                })
                .collect(),
        }
    }

    /// What the admin listener serves to everybody.
    pub fn admin(&self) -> Router {
        let (ready, runtime) = (self.edge.clone(), self.clone());
        router(Admin {
            ready: Arc::new(move || ready.is_ready()),
            metrics: Arc::new(move || runtime.metrics.render(&runtime.gauges())),
        })
    }

    /// Serves until `shutdown`: then refuses new work with a typed answer, finishes what runs for up to 30 s, says Goodbye
    /// to the Nodes, and closes the listeners. `shutdown.now` cuts all of that short. `told` is called when it begins,
    /// with the number of requests being answered.
    pub async fn serve(
        self,
        openai: HttpListener,
        admin: Option<(HttpListener, Router)>,
        shutdown: Shutdown,
        told: impl FnOnce(usize),
    ) {
        let stop = Shutdown::default();
        let mut listeners = JoinSet::new();
        listeners.spawn(openai.serve(Tracked::new(self.openai.clone(), self.inflight.clone()), stop.clone()));
        if let Some((listener, router)) = admin {
            listeners.spawn(listener.serve(router, stop.clone()));
        }
        shutdown.gracefully.cancelled().await;
        told(self.inflight.count());
        let orderly = async {
            // The listeners stay open meanwhile, so that clients are told to go elsewhere.
            self.edge.shutdown(DRAIN).await;
            let _late = timeout(FLUSH, self.inflight.none()).await;
            stop.gracefully.cancel();
            let _late = timeout(FLUSH, all(&mut listeners)).await;
        };
        tokio::select! {
            () = orderly => {}
            () = shutdown.now.cancelled() => {}
        }
        stop.force();
        let _aborted = timeout(FLUSH, all(&mut listeners)).await;
    }
}

/// With the access log and the metrics.
fn observed(openai: OpenAiConfig, metrics: &EdgeMetrics) -> OpenAiConfig {
    openai.with_observer(Arc::new(AccessLog::new(metrics.clone())))
}

async fn all(tasks: &mut JoinSet<()>) {
    while tasks.join_next().await.is_some() {}
}
