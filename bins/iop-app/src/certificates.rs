//! Decides which certificates an Edge serves with, when they are renewed, and what becomes of Nodes whose own are no longer good.

use std::path::PathBuf;
use std::sync::Arc;

use iop_edge_core::Edge;
use iop_wire::link::grpc::NodeVerifier;
use rustls::ServerConfig;
use rustls_pki_types::UnixTime;

use crate::config::LoadedEdge;
use crate::config::secret::resolve_path;
use crate::edge_runtime::EdgeRuntime;
use crate::exit::Failure;
use crate::listener::TlsSource;
use crate::metrics::EdgeMetrics;
use crate::renew::{Look, Looks, Renewable};
use crate::tls::{self, TlsError};

/// What the listener of Nodes needs.
#[derive(Debug)]
struct Nodes {
    config: Arc<ServerConfig>,
    /// None: Nodes are not asked for a certificate.
    verifier: Option<Arc<NodeVerifier>>,
}

/// The certificates of one Edge. Clones are one.
#[derive(Debug, Clone)]
pub struct EdgeCertificates {
    openai: Option<Renewable<Arc<ServerConfig>>>,
    nodes: Option<Renewable<Nodes>>,
    edge: Edge,
    metrics: EdgeMetrics,
}

impl EdgeCertificates {
    /// Reads what a config names.
    ///
    /// # Errors
    /// [`Failure`] with the file and what is wrong with it.
    pub fn load(loaded: &LoadedEdge, runtime: &EdgeRuntime) -> Result<Self, Failure> {
        let unusable = |error: TlsError| Failure::usage(error.to_string());
        let at = |path: &PathBuf| resolve_path(loaded.base(), &path.to_string_lossy());
        let config = &loaded.config;
        let openai = config.tls.openai.as_ref().map(|pair| {
            let (cert, key) = (at(&pair.cert), at(&pair.key));
            Renewable::new(vec![cert.clone(), key.clone()], move || tls::openai_server(&tls::load_pair(&cert, &key)?))
        });
        let nodes = config.tls.nodes.as_ref().map(|nodes| {
            let (cert, key, ca) = (at(&nodes.cert), at(&nodes.key), nodes.client_ca.as_ref().map(at));
            let domain = config.trust_domain();
            let files = [cert.clone(), key.clone()].into_iter().chain(ca.clone()).collect();
            Renewable::new(files, move || {
                let pair = tls::load_pair(&cert, &key)?;
                let Some(ca) = &ca else {
                    return Ok(Nodes { config: tls::nodes_server(&pair)?, verifier: None });
                };
                let (config, verifier) = tls::identified_nodes_server(&pair, ca, domain.clone())?;
                Ok(Nodes { config, verifier: Some(verifier) })
            })
        });
        Ok(Self {
            openai: openai.transpose().map_err(unusable)?,
            nodes: nodes.transpose().map_err(unusable)?,
            edge: runtime.edge().clone(),
            metrics: runtime.metrics().clone(),
        })
    }

    /// For the OpenAI listener.
    #[must_use]
    pub fn openai(&self) -> Option<TlsSource> {
        let openai = self.openai.clone()?;
        Some(Arc::new(move || Arc::clone(&openai.get())))
    }

    /// For the listener of Nodes.
    #[must_use]
    pub fn nodes(&self) -> Option<TlsSource> {
        let nodes = self.nodes.clone()?;
        Some(Arc::new(move || Arc::clone(&nodes.get().config)))
    }

    /// Looks whether files have changed, and takes what they hold now. Then, or if `recheck` says so, the certificates of all
    /// connected Nodes are looked at again. Reads files and checks signatures: not for a task that others wait for.
    pub fn look(&self, recheck: bool) {
        if let Some(openai) = &self.openai {
            self.tell("openai", openai.files(), &openai.look());
        }
        let Some(nodes) = &self.nodes else { return };
        let look = nodes.look();
        self.tell("nodes", nodes.files(), &look);
        if recheck || look == Look::Renewed {
            self.recheck();
        }
    }

    fn tell(&self, listener: &'static str, files: &[PathBuf], look: &Look) {
        match look {
            Look::Same | Look::Bad { again: true, .. } => {}
            Look::Renewed => {
                self.metrics.certificates_changed(true);
                let files: Vec<_> = files.iter().map(|path| path.display().to_string()).collect();
                tracing::info!(listener, files = files.join(", "), "certificates renewed");
            }
            Look::Bad { problem, again: false } => {
                self.metrics.certificates_changed(false);
                tracing::error!(listener, %problem, "the changed certificates can't be used: the old ones stay in force");
            }
        }
    }

    /// Looks at the certificates of connected Nodes again, with the roots and the time of now.
    fn recheck(&self) {
        let Some(verifier) = self.nodes.as_ref().and_then(|nodes| nodes.get().verifier.clone()) else { return };
        let now = UnixTime::now();
        self.edge.recheck_identities(|peer| match verifier.check_again(peer, now) {
            Ok(()) => true,
            Err(error) => {
                let (identity, reason) = (peer.identity(), error.failure);
                tracing::warn!(%identity, %reason, "a node's certificate is no longer good: {error}");
                false
            }
        });
    }

    /// Looks again and again.
    ///
    /// # Cancel safety
    /// May be dropped at any time.
    pub async fn keep(self) {
        let mut looks = Looks::default();
        loop {
            let recheck = looks.next().await;
            let this = self.clone();
            let _done = tokio::task::spawn_blocking(move || this.look(recheck)).await;
        }
    }
}
