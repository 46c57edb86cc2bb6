//! Decides what LM Studio says of one model: loaded or not. It has no counters, so a token must prove the rest.

use http::{Method, StatusCode};
use iop_execution::Target;

use super::super::{OpenAiCompat, discovery};
use super::{NoAnswer, ask};

/// What LM Studio says of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Loaded,
    NotLoaded,
    /// Its list does not have it.
    Missing,
    /// It is older than its own API.
    Untold,
    Refused,
    Nothing,
}

pub(super) async fn state(adapter: &OpenAiCompat, target: &Target) -> State {
    match ask(adapter, Method::GET, discovery::LM_STUDIO_MODELS, "").await {
        Ok(answer) if answer.status.is_success() => match discovery::lm_studio(&answer.body) {
            Some(models) => match models.iter().find(|model| model.target == *target) {
                Some(model) if model.loaded => State::Loaded,
                Some(_) => State::NotLoaded,
                // One with too many models, or none, says nothing of this one.
                None if !models.is_empty() && models.len() < discovery::MAX_TARGETS => State::Missing,
                None => State::Nothing,
            },
            None => State::Nothing,
        },
        Ok(answer) if answer.status == StatusCode::NOT_FOUND => State::Untold,
        Ok(_) | Err(NoAnswer::Broken) => State::Nothing,
        Err(NoAnswer::Refused) => State::Refused,
    }
}
