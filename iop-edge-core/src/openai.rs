//! Decides how OpenAI's chat API looks from outside: requests in, the engine's output out.
//!
//! [`OpenAiService`] is a tower service over `http` types. An embedder mounts it in axum, hyper or tonic; listeners, TLS and
//! connection limits stay there.
//!
//! | module | decides |
//! | --- | --- |
//! | [`service`](OpenAiService), `routes` | who answers, and what every answer carries |
//! | [`auth`], [`cors`] | who calls and which models it may use; which web pages may read answers |
//! | `kind` | in what chats, completions and embeddings differ |
//! | `upload`, `request`, `json`, `edit` | which bodies are requests, and which of their bytes change |
//! | `chat`, `chat::commit`, `chat::idle` | how one request goes; what is held until content; when a waiting client counts as gone |
//! | `recovery`, `chat::live` | whether a failed attempt is repeated; the life of one request over its attempts |
//! | `chat::tunnel`, `rewrite`, `mend` | what a tunnelled answer means; which of its bytes change; what SDKs can't read |
//! | `chat::run`, `chat::render` | what a run's events mean; the bytes built from them |
//! | `responses` | which chat a response is, and its events |
//! | `errors`, `provider_error` | how a failure looks |
//! | `models` | which models are shown |
//! | `limits` | how a caller is told where its key stands |
//! | [`record`] | what is remembered of a request |
//!
//! A token's way: the engine's frame → [`api::Output`](crate::api::Output) → `chat` → `chat::tunnel` → `rewrite` → the gate
//! in `chat::commit` → [`OpenAiBody`]. Bytes that need no edit are never copied.

pub mod auth;
mod body;
mod chat;
pub mod config;
pub mod cors;
mod edit;
mod errors;
mod json;
pub(crate) mod kind;
mod limits;
pub(crate) mod mend;
mod models;
pub(crate) mod provider_error;
pub mod record;
mod recovery;
pub(crate) mod request;
pub(crate) mod responses;
pub(crate) mod rewrite;
mod routes;
mod service;
mod upload;

pub use auth::{AllowedModels, ApiKeyRecord, ApiKeys, InvalidApiKey};
pub use body::{AnswerCut, OpenAiBody};
pub use config::{OpenAiConfig, ResponseModel};
pub use cors::{AllowedOrigins, InvalidOrigin};
pub use record::{
    Edit, Edits, EndedBy, Endpoint, LivenessObservation, Outcome, RequestId, RequestObserver, RequestRecord,
};
pub use recovery::{LivenessDecision, LivenessReason};
pub use request::estimate_prompt_tokens;
pub use service::OpenAiService;

#[cfg(test)]
mod tests;
