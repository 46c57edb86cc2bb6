//! Decides what operators may ask a running Edge, and what it answers: JSON below `/admin/v1`.
//!
//! No request has a body, and none is read. Lists are as long as the config, but for runs, which have a limit.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, post};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use iop_edge_core::api::{CancelRun, Engine as _};
use iop_edge_core::catalog::Strategy;
use iop_edge_core::snapshot::{
    EdgeSnapshot, GroupSnapshot, NodeSnapshot, ProviderHealth, ProviderSnapshot, RunSnapshot, Status,
};
use iop_execution::{NodeId, RunId};
use serde::Serialize;
use tokio::time::Instant;

use super::guard::{AdminKey, Denied, admit};
use super::usage;
use super::view::{
    CancelledView, CandidateView, ConfigView, ErrorView, LastReloadView, ModelView, ModelsView, NodeCounts, NodeView,
    NodesView, ProblemView, ProviderCounts, ProviderView, RefusalView, ReloadView, RequestCounts, RunView, RunsView,
    StatusView, ms,
};
use crate::edge_runtime::EdgeRuntime;
use crate::reload::{ReloadError, Reloaded, Reloader};

/// Runs that are listed when nobody says how many.
pub const DEFAULT_RUNS: usize = 100;
/// Most runs that are listed.
pub const MAX_RUNS: usize = 1000;

/// The admin API of one Edge.
#[derive(Debug, Clone)]
pub struct Api {
    edge_id: String,
    listen: SocketAddr,
    key: AdminKey,
    runtime: EdgeRuntime,
    reloader: Reloader,
    started: Instant,
}

impl Api {
    /// For the Edge of that name whose admin listener is at `listen`. Its uptime counts from now.
    #[must_use]
    pub fn new(edge_id: &str, listen: SocketAddr, key: AdminKey, runtime: EdgeRuntime, reloader: Reloader) -> Self {
        Self { edge_id: edge_id.to_owned(), listen, key, runtime, reloader, started: Instant::now() }
    }

    /// Everything below `/admin/v1`.
    pub fn router(self) -> Router {
        let api = Router::new()
            .route("/status", get(status))
            .route("/nodes", get(nodes))
            .route("/nodes/{id}/drain", post(drain))
            .route("/nodes/{id}/resume", post(resume))
            .route("/models", get(models))
            .route("/runs", get(runs))
            .route("/runs/{id}", delete(cancel))
            .route("/keys", get(keys))
            .route("/leases", get(leases))
            .route("/reload", post(reload))
            .fallback(async || refusal(StatusCode::NOT_FOUND, ErrorView::new("unknown_path", "There is no such path.")))
            .method_not_allowed_fallback(async || {
                let error = ErrorView::new("method_not_allowed", "That path has another method.");
                refusal(StatusCode::METHOD_NOT_ALLOWED, error)
            })
            .layer(from_fn_with_state(self.clone(), guarded))
            .with_state(self);
        Router::new().nest("/admin/v1", api)
    }
}

/// The guard comes before everything else, so that a stranger does not learn which paths there are.
async fn guarded(State(api): State<Api>, request: Request, next: Next) -> Response {
    match admit(request.uri(), request.headers(), api.listen, &api.key) {
        Ok(()) => next.run(request).await,
        Err(denied) => {
            let mut response = refusal(denied.status(), denied.view());
            if matches!(denied, Denied::NoKey | Denied::WrongKey) {
                response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            response
        }
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    // Texts and numbers always serialise.
    let body = serde_json::to_vec(value).unwrap_or_default();
    let headers = [(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")];
    (status, headers, body).into_response()
}

fn refusal(status: StatusCode, error: ErrorView) -> Response {
    json(status, &RefusalView { error })
}

async fn status(State(api): State<Api>) -> Response {
    let edge = api.runtime.edge();
    let (snapshot, in_force) = (edge.snapshot(), api.reloader.in_force());
    let last_reload =
        in_force.last.map(|last| LastReloadView { applied: last.applied, age_ms: ms(last.ago), summary: last.summary });
    json(
        StatusCode::OK,
        &StatusView {
            edge: api.edge_id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: ms(api.started.elapsed()),
            ready: edge.is_ready(),
            config: ConfigView { revision: in_force.revision, last_reload },
            nodes: count_nodes(&snapshot),
            providers: count_providers(&snapshot),
            requests: RequestCounts {
                in_flight: api.runtime.inflight().count(),
                waiting: snapshot.models.iter().map(|model| model.waiting).sum(),
            },
        },
    )
}

fn count_nodes(snapshot: &EdgeSnapshot) -> NodeCounts {
    let count = |is: fn(&NodeSnapshot) -> bool| snapshot.nodes.iter().filter(|node| is(node)).count();
    NodeCounts {
        configured: snapshot.nodes.len(),
        ready: count(|node| node.status == Status::Ready),
        draining: count(|node| node.status == Status::Draining),
        suspect: count(|node| node.suspect),
    }
}

pub(crate) fn count_providers(snapshot: &EdgeSnapshot) -> ProviderCounts {
    let mut counts = ProviderCounts::default();
    for provider in snapshot.nodes.iter().flat_map(|node| &node.providers) {
        counts.configured += 1;
        counts.ready += usize::from(provider.status == Status::Ready);
        counts.cooling += usize::from(provider.cooling.is_some());
        counts.unhealthy += usize::from(provider.health == ProviderHealth::Unavailable);
        counts.places += u64::from(provider.effective.capacity);
        counts.in_use += u64::from(provider.in_use.in_use());
        counts.quarantined += u64::from(provider.in_use.quarantined);
    }
    counts
}

async fn nodes(State(api): State<Api>) -> Response {
    let snapshot = api.runtime.edge().snapshot();
    json(StatusCode::OK, &NodesView { nodes: snapshot.nodes.iter().map(node_view).collect() })
}

pub(crate) fn node_view(node: &NodeSnapshot) -> NodeView {
    NodeView {
        id: node.node.to_string(),
        status: node.status.as_str().to_owned(),
        enabled: node.enabled,
        connected: node.connected,
        draining: node.draining,
        suspect: node.suspect,
        config_revision: node.config_revision,
        running: node.providers.iter().map(|provider| provider.in_use.in_use()).sum(),
        providers: node.providers.iter().map(provider_view).collect(),
    }
}

fn provider_view(provider: &ProviderSnapshot) -> ProviderView {
    ProviderView {
        id: provider.provider.to_string(),
        status: provider.status.as_str().to_owned(),
        health: provider.health.as_str().to_owned(),
        enabled: provider.enabled,
        cooling_ms: provider.cooling.map(ms),
        penalty: provider.penalty,
        configured_capacity: provider.configured_capacity,
        capacity: provider.effective.capacity,
        long_capacity: provider.effective.long,
        in_use: provider.in_use.in_use(),
        long_in_use: provider.in_use.long,
        quarantined: provider.in_use.quarantined,
    }
}

async fn models(State(api): State<Api>) -> Response {
    let edge = api.runtime.edge();
    let (snapshot, listed) = (edge.snapshot(), edge.models());
    let models = snapshot.models.iter().map(|model| {
        let available = listed.iter().any(|listing| listing.name == model.model && listing.available);
        model_view(model, &snapshot, available)
    });
    json(StatusCode::OK, &ModelsView { models: models.collect() })
}

fn model_view(model: &GroupSnapshot, snapshot: &EdgeSnapshot, available: bool) -> ModelView {
    let candidates = model.candidates.iter().map(|candidate| {
        let found = snapshot.nodes.iter().find_map(|node| {
            let provider = node.providers.iter().find(|provider| provider.provider == candidate.provider)?;
            Some((node.node.to_string(), provider.status.as_str().to_owned()))
        });
        let (node, status) = found.unwrap_or_default();
        CandidateView {
            provider: candidate.provider.to_string(),
            node,
            target: candidate.target.to_string(),
            weight: candidate.weight,
            status,
        }
    });
    ModelView {
        name: model.model.to_string(),
        available,
        strategy: model.strategy.unwrap_or(Strategy::LeastLoaded).as_str().to_owned(),
        candidates: candidates.collect(),
        waiting: model.waiting,
        oldest_wait_ms: ms(model.oldest_wait),
    }
}

async fn runs(State(api): State<Api>, RawQuery(query): RawQuery) -> Response {
    let Some(limit) = limit(query.as_deref()) else {
        let message = format!("The only parameter is `limit`, from 1 to {MAX_RUNS}.");
        return refusal(StatusCode::BAD_REQUEST, ErrorView::new("invalid_query", message));
    };
    let mut runs = api.runtime.edge().runs(limit + 1);
    let more = runs.len() > limit;
    runs.truncate(limit);
    json(StatusCode::OK, &RunsView { runs: runs.iter().map(run_view).collect(), more })
}

fn limit(query: Option<&str>) -> Option<usize> {
    match query {
        None | Some("") => Some(DEFAULT_RUNS),
        Some(query) => {
            let limit = query.strip_prefix("limit=")?.parse().ok()?;
            (1..=MAX_RUNS).contains(&limit).then_some(limit)
        }
    }
}

fn run_view(run: &RunSnapshot) -> RunView {
    let (node, provider) = run.place.as_ref().map(|(node, provider)| (node.to_string(), provider.to_string())).unzip();
    RunView {
        id: run.run_id.to_string(),
        model: run.model.as_ref().map(ToString::to_string),
        principal: run.principal.as_ref().map(ToString::to_string),
        stage: run.stage.as_str().to_owned(),
        node,
        provider,
        age_ms: ms(run.age),
    }
}

async fn drain(State(api): State<Api>, id: Result<Path<String>, PathRejection>) -> Response {
    in_service(&api, id, false)
}

async fn resume(State(api): State<Api>, id: Result<Path<String>, PathRejection>) -> Response {
    in_service(&api, id, true)
}

fn in_service(api: &Api, id: Result<Path<String>, PathRejection>, on: bool) -> Response {
    let unknown = || refusal(StatusCode::NOT_FOUND, ErrorView::new("unknown_node", "The config has no such Node."));
    let Some(id) = id.ok().and_then(|Path(id)| NodeId::new(id).ok()) else { return unknown() };
    let edge = api.runtime.edge();
    let done = if on { edge.resume(&id) } else { edge.drain(&id) };
    if done.is_err() {
        return unknown();
    }
    match edge.snapshot().nodes.iter().find(|node| node.node == id) {
        Some(node) => json(StatusCode::OK, &node_view(node)),
        None => unknown(), // a reload took it out in between
    }
}

async fn cancel(State(api): State<Api>, id: Result<Path<String>, PathRejection>) -> Response {
    let Some(id) = id.ok().and_then(|Path(id)| run_id(&id)) else {
        let error = ErrorView::new("invalid_run_id", "A run id has 32 hex digits.");
        return refusal(StatusCode::BAD_REQUEST, error);
    };
    match api.runtime.edge().cancel(id) {
        CancelRun::Cancelled => {
            tracing::info!(run_id = %id, "an operator cancels a run");
            json(StatusCode::OK, &CancelledView { id: id.to_string(), cancelled: true })
        }
        CancelRun::UnknownRun => {
            refusal(StatusCode::NOT_FOUND, ErrorView::new("unknown_run", "There is no such run, or it is over."))
        }
    }
}

fn run_id(text: &str) -> Option<RunId> {
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(text, 16).ok().map(|id| RunId::from_bytes(id.to_be_bytes()))
}

async fn keys(State(api): State<Api>) -> Response {
    json(StatusCode::OK, &usage::keys(api.runtime.openai().limiter()))
}

async fn leases(State(api): State<Api>) -> Response {
    json(StatusCode::OK, &usage::leases(&api.runtime.metrics().credentials(), api.started.elapsed()))
}

async fn reload(State(api): State<Api>) -> Response {
    match api.reloader.reload().await {
        Ok(reloaded) => json(StatusCode::OK, &reload_view(&reloaded)),
        Err(error) => reload_refused(&error),
    }
}

fn reload_view(reloaded: &Reloaded) -> ReloadView {
    fn texts<N: ToString>(names: &[N]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }
    ReloadView {
        revision: reloaded.change.revision,
        summary: reloaded.to_string(),
        nodes_added: texts(&reloaded.change.nodes_added),
        nodes_removed: texts(&reloaded.change.nodes_removed),
        nodes_changed: texts(&reloaded.change.nodes_changed),
        models_changed: texts(&reloaded.change.models_changed),
        settings_changed: texts(&reloaded.settings),
        file: reloaded.warnings.file().to_owned(),
        warnings: ProblemView::all(&reloaded.warnings),
    }
}

fn reload_refused(error: &ReloadError) -> Response {
    let message = error.to_string();
    let (status, code) = match error {
        ReloadError::Invalid(_) | ReloadError::Unusable(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_config"),
        ReloadError::NeedsRestart { .. } => (StatusCode::CONFLICT, "needs_restart"),
        ReloadError::Refused(_) => (StatusCode::CONFLICT, "refused"),
        ReloadError::Broken => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
    };
    let mut view = ErrorView::new(code, message);
    match error {
        ReloadError::Invalid(problems) => {
            problems.file().clone_into(&mut view.file);
            view.problems = ProblemView::all(problems);
        }
        ReloadError::NeedsRestart { keys, .. } => view.keys = keys.iter().map(|key| (*key).to_owned()).collect(),
        ReloadError::Unusable(_) | ReloadError::Refused(_) | ReloadError::Broken => {}
    }
    refusal(status, view)
}
