//! Decides which models a caller sees, and how they are shown (API-12).

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response};
use serde::Serialize;

use super::auth::Caller;
use super::body::OpenAiBody;
use super::config::OpenAiConfig;
use super::errors::ApiError;
use crate::api::{Engine, ModelListing};

/// `GET /v1/models`.
pub(crate) fn list(engine: &dyn Engine, config: &OpenAiConfig, caller: &Caller) -> Response<OpenAiBody> {
    let models = engine.models();
    let data = models.iter().filter(|model| is_visible(model, config, caller)).map(Shown::from).collect();
    json(&List { object: "list", data })
}

/// `GET /v1/models/{id}`.
///
/// # Errors
/// The same 404 whether it does not exist, may not be used, or can't be served now.
pub(crate) fn one(
    engine: &dyn Engine,
    config: &OpenAiConfig,
    caller: &Caller,
    id: &str,
) -> Result<Response<OpenAiBody>, ApiError> {
    let models = engine.models();
    let model = models.iter().find(|model| model.name.as_str() == id && is_visible(model, config, caller));
    model.map(|model| json(&Shown::from(model))).ok_or_else(|| ApiError::model_not_found(id))
}

fn is_visible(model: &ModelListing, config: &OpenAiConfig, caller: &Caller) -> bool {
    (model.available || config.list_unavailable) && caller.models.allows(model.name.as_str())
}

fn json(value: &impl Serialize) -> Response<OpenAiBody> {
    // Strings and numbers always serialise.
    let mut response = Response::new(OpenAiBody::full(serde_json::to_vec(value).unwrap_or_default()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Shown<'a>>,
}

#[derive(Serialize)]
struct Shown<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_length: Option<u64>,
    capabilities: Capabilities,
    available: bool,
}

#[derive(Serialize)]
struct Capabilities {
    tools: bool,
    reasoning: bool,
}

impl<'a> From<&'a ModelListing> for Shown<'a> {
    fn from(model: &'a ModelListing) -> Self {
        Self {
            id: model.name.as_str(),
            object: "model",
            created: model.created,
            owned_by: &model.owned_by,
            context_length: model.context_length,
            capabilities: Capabilities { tools: model.tools, reasoning: model.reasoning },
            available: model.available,
        }
    }
}
