//! Decides what SGLang's own counters say of one model.
//!
//! They are there only with `--enable-metrics`; without them one token is asked for. `/health` is not: a busy scheduler makes
//! it true, but it takes a second at best and twenty at worst, and it names no model.

use http::Method;
use iop_execution::Target;

use super::super::OpenAiCompat;
use super::metrics::{samples, whole};
use super::{Look, Mark, NoAnswer, Reading, ask};

/// Counters that grow when the scheduler has done something.
const PROGRESS: [&str; 2] = ["generation_tokens_total", "prompt_tokens_total"];

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
        let Some(name) = sample.name.strip_prefix("sglang:").or_else(|| sample.name.strip_prefix("sglang_")) else {
            continue;
        };
        match name {
            "num_running_reqs" => running += sample.value,
            "num_queue_reqs" => waiting += sample.value,
            name if PROGRESS.contains(&name) => progress = Some(progress.unwrap_or(0.0) + sample.value),
            _ => {}
        }
    }
    Some(Reading {
        marks: vec![Mark { who: 0, task: 0, count: whole(progress?) }],
        busy: running > 0.0 || waiting > 0.0,
        free: waiting == 0.0,
    })
}
