//! Decides how a chat answer becomes the events of a run: one choice, one spelling, whatever the server writes.

use futures_util::StreamExt;
use http::{HeaderMap, Method};
use iop_execution::failure::FailureStage;
use iop_execution::sse::{SseDecoder, SseLimits};
use iop_execution::{Completion, EventSink, FinishReason, ProviderError, RequestBody, RunRequest};
use tokio::time::{Instant, timeout_at};

use super::tool_calls::{ToolCalls, text};
use super::{Media, OpenAiCompat, edit, failed, in_prefill, media};
use crate::chunk::{self, Choice, Chunk};
use crate::http::UpstreamResponse;
use crate::json::Text;
use crate::rules;
use crate::tracker::{Tracker, not_an_event_stream};

/// Largest JSON answer where an event stream was asked for.
const MAX_WHOLE: usize = 8 * 1024 * 1024;

pub(super) async fn execute(
    adapter: &OpenAiCompat,
    run: RunRequest,
    sink: &mut EventSink,
) -> Result<Completion, ProviderError> {
    if run.input.body().n.is_some_and(|choices| choices > 1) {
        return Err(ProviderError::invalid_request("this provider gives one choice per request: n must be 1"));
    }
    let body = edit::streaming_request(run.input.raw(), run.target.as_str())
        .ok_or_else(|| ProviderError::invalid_request("the request is not a JSON object"))?;
    let headers = rules::request_headers(&HeaderMap::new(), run.run_id);
    let body = RequestBody::full(body);
    let lent = run.credential.as_deref();
    let response = adapter.call(Method::POST, "/v1/chat/completions", headers, body, lent).await?;
    match media(&response.headers) {
        Media::Html => Err(in_prefill(ProviderError::protocol("the provider answered with HTML"))),
        Media::Json => whole(response, sink).await,
        Media::Events | Media::Other => events(adapter, response, sink).await,
    }
}

async fn events(
    adapter: &OpenAiCompat,
    response: UpstreamResponse,
    sink: &mut EventSink,
) -> Result<Completion, ProviderError> {
    let mut body = response.body;
    let mut decoder = SseDecoder::new(SseLimits::default());
    let mut tracker = Tracker::new(1).only_chat();
    let mut answer = Answer::default();
    let mut linger_until = None;
    loop {
        let read = match linger_until {
            None => body.next().await,
            Some(until) => match timeout_at(until, body.next()).await {
                Ok(read) => read,
                Err(_) => break,
            },
        };
        match read {
            Some(Ok(bytes)) => decoder.feed(bytes),
            Some(Err(_)) if tracker.is_complete() => break,
            Some(Err(error)) => return Err(failed(error, FailureStage::Stream)),
            None => {
                tracker.end(&decoder.finish())?;
                break;
            }
        }
        while let Some(block) = decoder.next_block() {
            let block = block.map_err(|error| not_an_event_stream().with_source(error))?;
            let looked = tracker.look(&block)?;
            if let Some(chunk) = &looked.chunk {
                answer.push(chunk, sink).await?;
            }
            if looked.usage.is_some() {
                sink.usage(tracker.usage()).await?;
            }
            if tracker.is_done() {
                break;
            }
        }
        if tracker.is_done() {
            break;
        }
        if tracker.is_complete() && linger_until.is_none() {
            linger_until = Some(Instant::now() + adapter.terminal_linger);
        }
    }
    Ok(answer.completion(&tracker))
}

/// A whole answer where an event stream was asked for: all of it is there, so all of it counts.
async fn whole(response: UpstreamResponse, sink: &mut EventSink) -> Result<Completion, ProviderError> {
    let mut body = response.body;
    let mut read = Vec::new();
    while let Some(bytes) = body.next().await {
        read.extend_from_slice(&bytes.map_err(|error| failed(error, FailureStage::Prefill))?);
        if read.len() > MAX_WHOLE {
            return Err(in_prefill(ProviderError::protocol("the provider's answer is too large")));
        }
    }
    super::tunnel::check(&read)?;
    let chunk = chunk::read(read.trim_ascii())
        .map_err(|_| in_prefill(ProviderError::protocol("the provider's answer is not a JSON object")))?;
    let mut tracker = Tracker::new(1);
    let mut answer = Answer::default();
    answer.push(&chunk, sink).await?;
    tracker.take(chunk)?;
    if tracker.is_complete() { Ok(answer.completion(&tracker)) } else { Err(ProviderError::ended_without_terminal()) }
}

/// What of the answer is remembered until its end.
#[derive(Default)]
struct Answer {
    calls: ToolCalls,
    function_call: bool,
    finish: Option<FinishReason>,
}

impl Answer {
    async fn push(&mut self, chunk: &Chunk<'_>, sink: &mut EventSink) -> Result<(), ProviderError> {
        for choice in chunk.choices.iter().filter(|choice| choice.index == 0) {
            self.push_choice(choice, sink).await?;
        }
        Ok(())
    }

    async fn push_choice(&mut self, choice: &Choice<'_>, sink: &mut EventSink) -> Result<(), ProviderError> {
        if let Some(reasoning) = &choice.reasoning {
            sink.reasoning_delta(text(reasoning)).await?;
        }
        // A run has no events of its own for a refusal: it is what the model said.
        for piece in choice.content.iter().chain(&choice.refusal) {
            sink.delta(text(piece)).await?;
        }
        for piece in &choice.calls {
            let call = self.calls.piece(piece)?;
            sink.tool_call(call).await?;
        }
        if let Some(piece) = &choice.function_call {
            self.function_call = true;
            let call = self.calls.piece(piece)?;
            sink.tool_call(call).await?;
        }
        if let Some(finish) = &choice.finish {
            self.finish = Some(finish_reason(finish));
        }
        Ok(())
    }

    fn completion(&self, tracker: &Tracker) -> Completion {
        let finish = match self.finish {
            Some(FinishReason::Stop) | None if !self.calls.is_empty() => FinishReason::ToolCalls,
            Some(FinishReason::FunctionCall) if !self.function_call => FinishReason::ToolCalls,
            Some(finish) => finish,
            None => FinishReason::Stop,
        };
        let usage = tracker.usage();
        Completion::new(finish).with_usage((!usage.is_empty()).then_some(usage))
    }
}

/// OpenAI's five as they are; whatever else a server says (`eos`, `end_turn`, …) is a stop.
fn finish_reason(text: &Text<'_>) -> FinishReason {
    FinishReason::ALL.iter().copied().find(|reason| text.is(reason.as_str())).unwrap_or(FinishReason::Stop)
}
