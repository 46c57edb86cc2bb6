//! Decides what the built-in demo model answers, and how fast: everything IOP can do, without weights.
//!
//! The answer is a function of the request: of the last user message above all. Same request, same answer, on every machine.

mod sample;
mod text;

use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{Either, select};
use iop_execution::failure::FailureCode;
use iop_execution::provider::TargetInfo;
use iop_execution::{
    Capabilities, ChatInput, CommandOutput, Completion, EventSink, ExecutionFailure, Fenced, FinishReason, HeadSink,
    Health, Provider, ProviderCommand, ProviderError, Refreshed, RunRequest, Target, ToolCallDelta, TunnelEnd,
    TunnelRequest, Usage,
};
use serde_json::Value;
use tokio::time::{Instant, sleep_until};

/// The demo's only model.
pub const DEMO_TARGET: &str = "iop-demo";
/// How many calls it takes at once.
const MAX_CONCURRENCY: Option<NonZeroU32> = NonZeroU32::new(64);

/// How fast the demo speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "two plain settings")]
pub struct DemoPace {
    /// Time to the first token.
    pub first_token: Duration,
    /// Time from one token to the next.
    pub per_token: Duration,
}

impl DemoPace {
    /// 200 ms to the first token, then 40 tokens a second.
    pub const REALISTIC: Self = Self { first_token: Duration::from_millis(200), per_token: Duration::from_millis(25) };
    /// Everything at once, for tests.
    pub const INSTANT: Self = Self { first_token: Duration::ZERO, per_token: Duration::ZERO };
}

impl Default for DemoPace {
    fn default() -> Self {
        Self::REALISTIC
    }
}

/// The demo model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Demo {
    pace: DemoPace,
}

impl Demo {
    /// A demo that speaks at this pace.
    #[must_use]
    pub const fn new(pace: DemoPace) -> Self {
        Self { pace }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Provider for Demo {
    fn capabilities(&self) -> Capabilities {
        let targets = Target::new(DEMO_TARGET).map(TargetInfo::new).into_iter().collect();
        Capabilities::runs_only().with_features(true, true).with_max_concurrency(MAX_CONCURRENCY).with_targets(targets)
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        if run.target.as_str() != DEMO_TARGET {
            let failure = ExecutionFailure::refused(FailureCode::UnknownTarget, "the demo has one model: iop-demo");
            return Err(ProviderError::new(failure));
        }
        let answer = Answer::to(&run.input)?;
        let mut speaker = Speaker::new(self.pace);
        speaker.say(&answer, run.input.max_tokens(), sink).await
    }

    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        drop((request, head));
        Err(ProviderError::unsupported("the demo has no tunnel"))
    }

    async fn probe_health(&self, target: &Target) -> Health {
        if target.as_str() == DEMO_TARGET { Health::Available } else { Health::Unknown }
    }

    async fn command(&self, command: ProviderCommand) -> Result<CommandOutput, ProviderError> {
        drop(command);
        Err(ProviderError::unsupported("the demo has no commands"))
    }

    async fn start(&self) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn refresh(&self) -> Refreshed {
        Refreshed::Answered
    }

    async fn stop(&self) {}
}

/// What the demo is going to say.
struct Answer {
    input_tokens: u64,
    reasoning: String,
    body: Body,
}

enum Body {
    Text(String),
    Call { name: String, arguments: String },
}

impl Answer {
    fn to(input: &ChatInput) -> Result<Self, ProviderError> {
        let body = input.body();
        if body.n.is_some_and(|choices| choices > 1) {
            return Err(ProviderError::invalid_request("the demo gives one choice per request: n must be 1"));
        }
        let message = text::last_user_message(input);
        let answer = if let Some(tool) = wanted_tool(input, &message)? {
            let arguments = sample::of(tool.get("parameters").unwrap_or(&Value::Null), &message);
            Body::Call { name: text::name_of(tool).to_owned(), arguments: arguments.to_string() }
        } else {
            let full =
                json_answer(body.response_format.as_ref(), &message).unwrap_or_else(|| text::answer(input, &message));
            Body::Text(text::cut_at_stop(full, &input.stop()))
        };
        let reasoning = match body.reasoning_effort.as_deref() {
            None | Some("none") => String::new(),
            Some(effort) => text::reasoning(&message, effort),
        };
        let input_tokens = input.messages().iter().map(|message| text::tokens(&message.text()).count() as u64).sum();
        Ok(Self { input_tokens, reasoning, body: answer })
    }
}

/// The tool to call, as its `function` object: the one `tool_choice` names, the first when one is required, or the one that
/// the message says to call, unless its result is here already.
fn wanted_tool<'a>(input: &'a ChatInput, message: &str) -> Result<Option<&'a Value>, ProviderError> {
    let tools: Vec<&Value> = input.body().tools.iter().filter_map(|tool| tool.get("function")).collect();
    let choice = input.body().tool_choice.as_ref();
    let named = choice.and_then(|choice| choice.get("function")).map(text::name_of);
    if let Some(name) = named {
        return match tools.iter().find(|tool| text::name_of(tool) == name) {
            Some(tool) => Ok(Some(tool)),
            None => Err(ProviderError::invalid_request("tool_choice names a tool that is not among the tools")),
        };
    }
    match choice.and_then(Value::as_str) {
        Some("none") => Ok(None),
        Some("required") => match tools.first() {
            Some(tool) => Ok(Some(tool)),
            None => Err(ProviderError::invalid_request("tool_choice is required but there are no tools")),
        },
        _ if input.messages().last().is_some_and(|last| last.role == "tool") => Ok(None),
        _ => Ok(tools.into_iter().find(|tool| text::asks_to_call(message, text::name_of(tool)))),
    }
}

/// An answer in JSON where the request wants one.
fn json_answer(format: Option<&Value>, message: &str) -> Option<String> {
    let format = format?;
    match format.get("type")?.as_str()? {
        "json_object" => Some(serde_json::json!({ "model": DEMO_TARGET, "you_said": message }).to_string()),
        "json_schema" => Some(sample::of(format.get("json_schema")?.get("schema")?, message).to_string()),
        _ => None,
    }
}

/// Says an answer token by token.
struct Speaker {
    due: Instant,
    pace: DemoPace,
    said: u64,
}

impl Speaker {
    fn new(pace: DemoPace) -> Self {
        Self { due: Instant::now() + pace.first_token, pace, said: 0 }
    }

    /// Waits for the next token's time. Times are absolute, so a slow reader or machine does not slow the pace further.
    async fn next_token(&mut self, sink: &EventSink) -> Result<(), Fenced> {
        if self.due > Instant::now()
            && let Either::Left(_) =
                select(std::pin::pin!(sink.cancelled()), std::pin::pin!(sleep_until(self.due))).await
        {
            return Err(Fenced);
        }
        self.due += self.pace.per_token;
        self.said += 1;
        Ok(())
    }

    async fn say(
        &mut self,
        answer: &Answer,
        max_tokens: Option<u64>,
        sink: &mut EventSink,
    ) -> Result<Completion, ProviderError> {
        let max = max_tokens.unwrap_or(u64::MAX);
        let mut cut = false;
        for token in text::tokens(&answer.reasoning) {
            cut = self.said >= max;
            if cut {
                break;
            }
            self.next_token(sink).await?;
            sink.reasoning_delta(token).await?;
        }
        let reasoning_tokens = (!answer.reasoning.is_empty()).then_some(self.said);
        let (spoken, call) = match &answer.body {
            Body::Text(text) => (text, None),
            Body::Call { name, arguments } => (arguments, Some(name)),
        };
        let mut first = true;
        for token in text::tokens(spoken) {
            cut = cut || self.said >= max;
            if cut {
                break;
            }
            self.next_token(sink).await?;
            match call {
                None => sink.delta(token).await?,
                Some(name) => {
                    let begin = std::mem::take(&mut first);
                    let call = ToolCallDelta {
                        index: 0,
                        id: begin.then(|| text::call_id(name, spoken)),
                        name: begin.then(|| name.clone()),
                        arguments: token.to_owned(),
                    };
                    sink.tool_call(call).await?;
                }
            }
        }
        let finish = match (cut, call) {
            (true, _) => FinishReason::Length,
            (false, Some(_)) => FinishReason::ToolCalls,
            (false, None) => FinishReason::Stop,
        };
        let usage = Usage {
            input_tokens: Some(answer.input_tokens),
            output_tokens: Some(self.said),
            reasoning_tokens,
            cached_input_tokens: None,
        };
        Ok(Completion::new(finish).with_usage(Some(usage)))
    }
}

#[cfg(test)]
mod tests;
