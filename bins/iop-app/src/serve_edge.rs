//! Decides what `iop-edge serve` does: listeners from the config, Nodes over gRPC, clients over HTTP.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use iop_wire::link::grpc::{Congestion, GrpcListener};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use crate::admin::{AdminKey, Api};
use crate::certificates::EdgeCertificates;
use crate::config::LoadedEdge;
use crate::config::edge::credentials::Secrets;
use crate::edge_runtime::EdgeRuntime;
use crate::exit::Failure;
use crate::lifecycle::HandshakeLog;
use crate::listener::{HttpListener, Limits};
use crate::reload::{FIRST_REVISION, Reloader};
use crate::shutdown::{Hangup, Shutdown};
use crate::term::say;
use crate::timers;

#[cfg(test)]
mod tests;

/// An Edge whose addresses are bound and that is not serving yet.
#[derive(Debug)]
pub struct BoundEdge {
    runtime: EdgeRuntime,
    openai: HttpListener,
    admin: HttpListener,
    reloader: Reloader,
    api: Api,
    nodes: TcpListener,
    certificates: EdgeCertificates,
    congestion: Congestion,
    /// Where clients connect.
    pub openai_address: SocketAddr,
    /// Where Nodes connect.
    pub nodes_address: SocketAddr,
    /// Metrics and health.
    pub admin_address: SocketAddr,
}

fn cannot_listen(name: &str, address: SocketAddr, error: &std::io::Error) -> Failure {
    let failure = Failure::fatal(format!("can't listen at {address} (listen.{name}): {error}"));
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            failure.hint(format!("another program has that port; write another one under listen.{name}"))
        }
        std::io::ErrorKind::PermissionDenied => failure.hint("ports below 1024 need a privilege; use one above"),
        _ => failure,
    }
}

/// Binds everything a config names.
///
/// # Errors
/// [`Failure`] with the listener's name.
pub async fn bind(loaded: &LoadedEdge) -> Result<BoundEdge, Failure> {
    let config = &loaded.config;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let secrets = loaded.slot_secrets(&Secrets::default());
    let catalog = loaded.catalog_with(created, FIRST_REVISION, &secrets)?;
    let key = AdminKey::new(loaded.admin_key()?);
    let runtime = EdgeRuntime::start(catalog, config.edge_id(), loaded.openai()?);
    let certificates = EdgeCertificates::load(loaded, &runtime)?;
    timers::log(None, config);
    let reloader = Reloader::new(loaded.clone(), created, runtime.clone(), key.clone());
    reloader.with_certificates(certificates.clone());
    reloader.with_secrets(secrets);

    let limits = Limits {
        connections: config.limits.connections,
        connections_per_address: config.limits.connections_per_address,
        ..Limits::default()
    };
    let address = config.listen.openai.address;
    let openai = HttpListener::bind_with(address, certificates.openai(), limits)
        .await
        .map_err(|error| cannot_listen("openai", address, &error))?;
    let address = config.listen.nodes.address;
    let nodes = TcpListener::bind(address).await.map_err(|error| cannot_listen("nodes", address, &error))?;
    let address = config.listen.admin.address;
    let admin = HttpListener::bind(address, None, Limits::default())
        .await
        .map_err(|error| cannot_listen("admin", address, &error))?;
    let unknown = |error: std::io::Error| Failure::fatal(format!("can't tell where it listens: {error}"));
    let admin_address = admin.local_addr().map_err(unknown)?;
    Ok(BoundEdge {
        api: Api::new(config.edge_id(), admin_address, key, runtime.clone(), reloader.clone()),
        reloader,
        openai_address: openai.local_addr().map_err(unknown)?,
        nodes_address: nodes.local_addr().map_err(unknown)?,
        admin_address,
        runtime,
        openai,
        admin,
        nodes,
        certificates,
        congestion: config.link.congestion.into(),
    })
}

impl BoundEdge {
    /// The running Edge.
    #[must_use]
    pub const fn runtime(&self) -> &EdgeRuntime {
        &self.runtime
    }

    /// Takes new configs for it.
    #[must_use]
    pub const fn reloader(&self) -> &Reloader {
        &self.reloader
    }

    /// Serves until `shutdown`.
    pub async fn serve(self, shutdown: Shutdown) {
        let Self { runtime, openai, admin, api, nodes, certificates, congestion, .. } = self;
        let router = runtime.admin().merge(api.router());
        let (links, edge) = (TaskTracker::new(), runtime.edge().clone());
        let accept = tokio_util::sync::CancellationToken::new();
        let spawn = links.clone();
        let failures = HandshakeLog::new(runtime.metrics().clone());
        let mut listener = GrpcListener::new(nodes)
            .with_congestion(congestion)
            .with_failures(move |peer, error| failures.failed(peer, error));
        if let Some(tls) = certificates.nodes() {
            listener = listener.with_tls_from(move || tls());
        }
        let renewing = tokio::spawn(certificates.keep());
        let attach = move |link| {
            spawn.spawn(edge.attach(link));
        };
        let accepting = tokio::spawn(listener.serve(attach, accept.clone()));
        runtime.serve(openai, Some((admin, router)), shutdown, shutting_down).await;
        // After Goodbye; the engine refuses Nodes since the shutdown began.
        accept.cancel();
        accepting.abort();
        renewing.abort();
    }
}

/// Says that the end has begun.
pub(crate) fn shutting_down(running: usize) {
    say(format!("shutting down: finishing {running} running request(s), up to 30 s; a second signal ends at once"));
}

/// `iop-edge serve`.
///
/// # Errors
/// [`Failure`] when it can't start.
pub async fn serve(loaded: LoadedEdge) -> Result<(), Failure> {
    let shutdown =
        Shutdown::on_signals().map_err(|error| Failure::fatal(format!("can't listen for signals: {error}")))?;
    let mut hangup = Hangup::new().map_err(|error| Failure::fatal(format!("can't listen for signals: {error}")))?;
    let bound = bind(&loaded).await?;
    let reloader = bound.reloader().clone();
    let reloading = tokio::spawn(async move {
        loop {
            hangup.next().await;
            // The log says how it went.
            let _logged = reloader.reload().await;
        }
    });
    let scheme = |tls: bool| if tls { "https" } else { "http" };
    say(format!(
        "listening openai={}://{} nodes={}://{} admin=http://{}",
        scheme(loaded.config.tls.openai.is_some()),
        bound.openai_address,
        scheme(loaded.config.tls.nodes.is_some()),
        bound.nodes_address,
        bound.admin_address,
    ));
    bound.serve(shutdown).await;
    reloading.abort();
    say("stopped");
    Ok(())
}
