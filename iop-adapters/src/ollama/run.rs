//! Decides how Ollama's lines become the events of a run.

use futures_util::StreamExt;
use http::{HeaderMap, Method};
use iop_execution::failure::{FailureCode, FailureStage, ProviderContacted};
use iop_execution::ndjson::{NdjsonDecoder, NdjsonLimits};
use iop_execution::{
    Completion, EventSink, ExecutionFailure, FinishReason, ProviderError, RequestBody, RunId, RunRequest,
    ToolCallDelta, Usage,
};

use super::line::{self, Call, Line};
use super::{Ollama, request};
use crate::call::{self, Key, Media, failed, in_prefill, media};
use crate::complaint;
use crate::http::UpstreamRequest;
use crate::json::Text;
use crate::rules;

/// Most tool calls of one answer.
const MAX_CALLS: usize = 128;

pub(super) async fn execute(
    adapter: &Ollama,
    run: RunRequest,
    sink: &mut EventSink,
) -> Result<Completion, ProviderError> {
    let body = request::chat(&run.input, &run.target, adapter.found().thinks(&run.target))?;
    let headers = rules::request_headers(&HeaderMap::new(), run.run_id);
    let request = UpstreamRequest { method: Method::POST, path: "/api/chat", headers, body: RequestBody::full(body) };
    let response = call::call(adapter.upstream.as_ref(), Key::Own(adapter.bearer.as_ref()), request).await?;
    if media(&response.headers) == Media::Html {
        return Err(in_prefill(ProviderError::protocol("the provider answered with HTML")));
    }
    let mut body = response.body;
    let mut decoder = NdjsonDecoder::new(NdjsonLimits::default());
    let mut answer = Answer::new(run.run_id);
    loop {
        match body.next().await {
            Some(Ok(bytes)) => decoder.feed(bytes),
            Some(Err(error)) => return Err(failed(error, answer.stage())),
            None => {
                // The last line may lack its line end; a piece of one is no line.
                let rest = decoder.finish();
                let line = rest.as_deref().and_then(|rest| line::read(rest).ok());
                let Some(line) = line else { return Err(answer.at_stage(ProviderError::ended_without_terminal())) };
                return match answer.take(&line, rest.as_deref().unwrap_or_default(), sink).await? {
                    Some(completion) => Ok(completion),
                    None => Err(answer.at_stage(ProviderError::ended_without_terminal())),
                };
            }
        }
        while let Some(bytes) = decoder.next_line() {
            let bytes = bytes.map_err(|error| answer.at_stage(not_lines().with_source(error)))?;
            let line = line::read(&bytes).map_err(|_| answer.at_stage(not_lines()))?;
            if let Some(completion) = answer.take(&line, &bytes, sink).await? {
                return Ok(completion);
            }
        }
    }
}

fn not_lines() -> ProviderError {
    ProviderError::protocol("the provider's answer is not made of JSON objects, one a line")
}

/// What of the answer is remembered until its end.
struct Answer {
    run_id: RunId,
    calls: Vec<String>,
    output: bool,
    usage: Usage,
}

impl Answer {
    const fn new(run_id: RunId) -> Self {
        Self { run_id, calls: Vec::new(), output: false, usage: NO_USAGE }
    }

    const fn stage(&self) -> FailureStage {
        if self.output { FailureStage::Stream } else { FailureStage::Prefill }
    }

    fn at_stage(&self, error: ProviderError) -> ProviderError {
        if self.output { error } else { in_prefill(error) }
    }

    /// Pushes what a line says; its end, if it is the last one. What follows the last one means nothing.
    async fn take(
        &mut self,
        line: &Line<'_>,
        bytes: &[u8],
        sink: &mut EventSink,
    ) -> Result<Option<Completion>, ProviderError> {
        if line.error {
            return Err(self.at_stage(complaint::reported(bytes)));
        }
        self.usage.update(line.usage);
        if let Some(thinking) = &line.thinking {
            self.output = true;
            sink.reasoning_delta(characters(thinking)).await?;
        }
        if let Some(content) = &line.content {
            self.output = true;
            sink.delta(characters(content)).await?;
        }
        for call in &line.calls {
            let call = self.call(call)?;
            self.output = true;
            sink.tool_call(call).await?;
        }
        if line.done { self.end(line).map(Some) } else { Ok(None) }
    }

    fn end(&self, line: &Line<'_>) -> Result<Completion, ProviderError> {
        let is = |reason: &str| line.reason.as_ref().is_some_and(|own| own.is(reason));
        if !self.output && (is("load") || is("unload")) {
            return Err(ProviderError::new(ExecutionFailure::new(
                FailureCode::ProviderEndedWithoutTerminal,
                FailureStage::Prefill,
                ProviderContacted::Yes,
                "the provider loaded or unloaded the model and generated nothing",
            )));
        }
        // A length is a length, also with calls: the last one may be missing. Everything else is a stop.
        let finish = match (is("length"), self.calls.is_empty()) {
            (true, _) => FinishReason::Length,
            (false, false) => FinishReason::ToolCalls,
            (false, true) => FinishReason::Stop,
        };
        Ok(Completion::new(finish).with_usage((!self.usage.is_empty()).then_some(self.usage)))
    }

    /// A whole call: an own number, one id that no other call of the answer has, arguments as text.
    fn call(&mut self, call: &Call<'_>) -> Result<ToolCallDelta, ProviderError> {
        let at = self.calls.len();
        if at == MAX_CALLS {
            return Err(self.at_stage(ProviderError::protocol("the provider's answer holds too many tool calls")));
        }
        let Some(name) = call.name.as_ref().map(characters) else {
            return Err(
                self.at_stage(ProviderError::protocol("the provider's answer holds a tool call without a name"))
            );
        };
        let arguments = match (call.arguments, &call.arguments_text) {
            (Some(object), _) => String::from_utf8_lossy(object).into_owned(),
            (None, Some(text)) => characters(text),
            (None, None) => "{}".to_owned(),
        };
        let given = call.id.as_ref().map(characters).filter(|id| !self.calls.contains(id));
        // Later turns of a conversation hold the calls of earlier ones: a made-up id must differ from those too.
        let id = given.unwrap_or_else(|| format!("call_{}_{at}", self.run_id));
        self.calls.push(id.clone());
        let index = u32::try_from(at).unwrap_or(u32::MAX);
        Ok(ToolCallDelta { index, id: Some(id), name: Some(name), arguments })
    }
}

const NO_USAGE: Usage =
    Usage { input_tokens: None, output_tokens: None, reasoning_tokens: None, cached_input_tokens: None };

/// The characters of a string; half a character becomes U+FFFD.
fn characters(text: &Text<'_>) -> String {
    text.get().map_or_else(|| char::REPLACEMENT_CHARACTER.to_string(), std::borrow::Cow::into_owned)
}
