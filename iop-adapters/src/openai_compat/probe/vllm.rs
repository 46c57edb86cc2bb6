//! Decides what vLLM's own counters say of one model.
//!
//! Its API process answers `/health` and `/v1/models` while the engine process is frozen. These counters move only with what
//! the engine sent. Their names are of vLLM 0.4 to 0.32.

use http::Method;
use iop_execution::Target;

use super::super::OpenAiCompat;
use super::metrics::{Sample, samples};
use super::{Look, Mark, NoAnswer, Reading, ask};

/// Counters that grow when the engine has done something.
const PROGRESS: [&str; 3] = ["generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_count"];

pub(super) async fn look(adapter: &OpenAiCompat, target: &Target) -> Look {
    match ask(adapter, Method::GET, "/metrics", "").await {
        Ok(answer) if answer.status.is_success() => read(&answer.body, target).map_or(Look::Nothing, Look::Seen),
        Ok(_) | Err(NoAnswer::Broken) => Look::Nothing,
        Err(NoAnswer::Refused) => Look::Refused,
    }
}

/// None if it counts nothing under this name: an adapter model is counted under its base.
fn read(text: &[u8], target: &Target) -> Option<Reading> {
    let (mut progress, mut running, mut waiting) = (None, 0.0, 0.0);
    for sample in samples(text).filter(|sample| sample.label_is("model_name", target.as_str())) {
        let Sample { name, value, .. } = sample;
        let Some(name) = name.strip_prefix("vllm:").or_else(|| name.strip_prefix("vllm_")) else { continue };
        match name {
            "num_requests_running" => running += value,
            "num_requests_waiting" => waiting += value,
            name if PROGRESS.contains(&name) => progress = Some(progress.unwrap_or(0.0) + value),
            _ => {}
        }
    }
    Some(Reading {
        marks: vec![Mark { who: 0, task: 0, count: super::metrics::whole(progress?) }],
        busy: running > 0.0 || waiting > 0.0,
        free: waiting == 0.0,
    })
}
