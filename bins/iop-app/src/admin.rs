//! Decides what operators see and do, on a listener of their own: metrics and health without a key, the API with one.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;

pub(crate) mod api;
mod guard;
#[cfg(test)]
mod tests;
pub mod usage;
pub mod view;

pub use api::{Api, DEFAULT_RUNS, MAX_RUNS};
pub use guard::AdminKey;

/// Content type of `/metrics`.
pub const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the admin listener shows.
#[derive(Clone)]
pub struct Admin {
    /// True if work can be done now.
    pub ready: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Metrics as text.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

/// `/metrics`, `/healthz` and `/readyz`.
pub fn router(admin: Admin) -> Router {
    let Admin { ready, metrics } = admin;
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route(
            "/readyz",
            get(move || {
                let answer = if ready() {
                    (StatusCode::OK, "ready\n")
                } else {
                    (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
                };
                async move { answer }
            }),
        )
        .route(
            "/metrics",
            get(move || {
                let text = metrics();
                async move { ([(CONTENT_TYPE, METRICS_TYPE)], text) }
            }),
        )
}
