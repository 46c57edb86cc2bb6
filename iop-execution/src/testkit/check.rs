//! Decides whether a provider keeps the contract, as far as that can be seen from outside.
//!
//! ```
//! # use std::sync::Arc;
//! # use iop_execution::Target;
//! # use iop_execution::testkit::{CheckOptions, Script, ScriptedProvider, check_provider};
//! # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
//! # runtime.block_on(async {
//! let provider = Arc::new(ScriptedProvider::new(Script::text("hello")));
//! let report = check_provider(provider, CheckOptions::new(Target::new("my-model").unwrap())).await;
//! assert!(report.is_ok(), "{report}");
//! # });
//! ```

mod backpressure;
mod order;
mod report;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::timeout;

use self::order::{FrameOrder, RunOrder};
pub use self::report::{Check, CheckReport, Verdict};
use super::{run_request, tunnel_request};
use crate::chat::ChatInput;
use crate::event::{CancelReason, RunEvent, RunEventKind};
use crate::execution::{Emit, Execution, RunExecution, TunnelExecution};
use crate::failure::FailureCode;
use crate::frame::TunnelFrame;
use crate::id::Target;
use crate::provider::{Health, Provider};

/// What [`check_provider`] asks, and how long it waits.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CheckOptions {
    /// Which model is asked.
    pub target: Target,
    /// What it is asked. By default something that makes a model talk for a while.
    pub input: ChatInput,
    /// How soon a cancelled call must have returned; 1 s by default.
    pub close_within: Duration,
    /// How long any single answer may take; 60 s by default.
    pub patience: Duration,
}

impl CheckOptions {
    /// Defaults for this target.
    ///
    /// The default request is a literal that always parses.
    #[must_use]
    #[allow(clippy::expect_used, reason = "the request is made here and is valid")]
    pub fn new(target: Target) -> Self {
        let text = super::chat_json(target.as_str(), "Tell a story of three sentences about a lighthouse.", true);
        Self {
            target,
            input: ChatInput::parse(text).expect("a valid request"),
            close_within: Duration::from_secs(1),
            patience: Duration::from_secs(60),
        }
    }

    /// With this request instead.
    #[must_use]
    pub fn with_input(mut self, input: ChatInput) -> Self {
        self.input = input;
        self
    }
}

/// Checks one provider: ordering, single terminal, cancellation latency, backpressure, usage, probe semantics, honesty of
/// its capabilities. Makes up to ten calls of it, one after another; calls neither `start` nor `stop`.
///
/// Needs a tokio runtime with time; under paused time its waits cost nothing.
///
/// # Cancel safety
/// Dropping the future drops the call that runs.
pub async fn check_provider(provider: Arc<dyn Provider>, options: CheckOptions) -> CheckReport {
    let checker = Checker { provider, options };
    let mut report = CheckReport::default();
    report.add("capabilities", checker.capabilities().await);
    let capabilities = checker.provider.capabilities();
    if capabilities.runs {
        report.add("run: order, one terminal", checker.run_order().await);
        report.add("run: usage", checker.run_usage().await);
        report.add("run: cancel where it waits first", checker.cancel_at_first_wait(checker.run()).await);
        report.add("run: cancel in output", checker.cancel_in_output(checker.run(), is_run_output).await);
        report.add("run: backpressure", backpressure::run(&checker).await);
    } else {
        report.skip("run", "not supported");
    }
    if capabilities.tunnels {
        report.add("tunnel: order, one terminal", checker.tunnel_order().await);
        report.add("tunnel: cancel where it waits first", checker.cancel_at_first_wait(checker.tunnel()).await);
        report.add("tunnel: cancel in output", checker.cancel_in_output(checker.tunnel(), is_body).await);
        report.add("tunnel: backpressure", backpressure::tunnel(&checker).await);
        report.add("tunnel: paths", checker.tunnel_paths().await);
    } else {
        report.skip("tunnel", "not supported");
    }
    report.add("probe", checker.probe().await);
    report
}

struct Checker {
    provider: Arc<dyn Provider>,
    options: CheckOptions,
}

const NO_CHANCE: &str = "ended before it could be cancelled";

/// What one check found: a remark, or what is wrong.
type Found = Result<String, String>;

const fn is_run_output(event: &RunEvent) -> bool {
    !matches!(event.kind, RunEventKind::Start)
}

const fn is_body(frame: &TunnelFrame) -> bool {
    matches!(frame, TunnelFrame::Body { .. })
}

impl Checker {
    fn run(&self) -> RunExecution {
        let request = run_request(&self.options.target, self.options.input.clone());
        RunExecution::run(Arc::clone(&self.provider), request)
    }

    fn tunnel(&self) -> TunnelExecution {
        let request = tunnel_request(&self.options.target, self.options.input.raw().clone(), true);
        TunnelExecution::tunnel(Arc::clone(&self.provider), request)
    }

    /// Everything a call emits, if it ends in time.
    async fn collect<E: Emit>(&self, mut execution: Execution<E>) -> Result<Vec<E>, String> {
        let mut items = Vec::new();
        loop {
            match timeout(self.options.patience, execution.next()).await {
                Ok(Some(item)) => items.push(item),
                Ok(None) => return Ok(items),
                Err(_) => return Err(format!("silent for {:?}", self.options.patience)),
            }
        }
    }

    async fn run_order(&self) -> Found {
        let events = self.collect(self.run()).await?;
        let mut order = RunOrder::default();
        events.iter().try_for_each(|event| order.next(event))?;
        order.end()
    }

    async fn run_usage(&self) -> Found {
        let events = self.collect(self.run()).await?;
        order::usage(events.iter().filter_map(|event| event.usage))
    }

    async fn tunnel_order(&self) -> Found {
        let frames = self.collect(self.tunnel()).await?;
        let mut order = FrameOrder::default();
        frames.iter().try_for_each(|frame| order.next(frame))?;
        order.end()?;
        order::usage(frames.iter().filter_map(|frame| match frame {
            TunnelFrame::Usage(usage) => Some(*usage),
            TunnelFrame::Head(_)
            | TunnelFrame::Body { .. }
            | TunnelFrame::End
            | TunnelFrame::Failed(_)
            | TunnelFrame::Cancelled(_) => None,
        }))
    }

    async fn cancel_at_first_wait<E: Emit>(&self, mut execution: Execution<E>) -> Found {
        let ended = poll_fn(|cx| {
            loop {
                match execution.poll_next_unpin(cx) {
                    Poll::Ready(Some(_)) => {}
                    Poll::Ready(None) => return Poll::Ready(true),
                    Poll::Pending => return Poll::Ready(false),
                }
            }
        });
        if ended.await { Ok(NO_CHANCE.to_owned()) } else { self.cancel(execution).await }
    }

    async fn cancel_in_output<E: Emit>(&self, mut execution: Execution<E>, is_output: impl Fn(&E) -> bool) -> Found {
        let output = async {
            while let Some(item) = execution.next().await {
                if is_output(&item) {
                    return true;
                }
            }
            false
        };
        match timeout(self.options.patience, output).await {
            Ok(true) => self.cancel(execution).await,
            Ok(false) => Ok(NO_CHANCE.to_owned()),
            Err(_) => Err(format!("silent for {:?}", self.options.patience)),
        }
    }

    async fn cancel<E: Emit>(&self, mut execution: Execution<E>) -> Found {
        execution.cancel(CancelReason::Client);
        let began = tokio::time::Instant::now();
        let end = async {
            let mut items = 0_u32;
            while execution.next().await.is_some() {
                items += 1;
            }
            items
        };
        match timeout(self.options.close_within, end).await {
            // What was waited for was the terminal itself.
            Ok(0) => Ok(NO_CHANCE.to_owned()),
            Ok(1) => Ok(format!("returned after {:?}", began.elapsed())),
            Ok(items) => Err(format!("{items} emissions after the cancel")),
            Err(_) => Err(format!("did not return within {:?} of the cancel", self.options.close_within)),
        }
    }

    /// What it says it can do, it does; what it says it can't do, it refuses as unsupported.
    async fn capabilities(&self) -> Found {
        let capabilities = self.provider.capabilities();
        if !capabilities.runs && !capabilities.tunnels {
            return Err("neither runs nor tunnels".to_owned());
        }
        if capabilities != self.provider.capabilities() {
            return Err("two calls gave two answers".to_owned());
        }
        let run = first_failure(self.collect(self.run()).await?, |event| match &event.kind {
            RunEventKind::Error(failure) => Some(failure.code),
            _ => None,
        });
        let tunnel = first_failure(self.collect(self.tunnel()).await?, |frame| match frame {
            TunnelFrame::Failed(failure) => Some(failure.code),
            TunnelFrame::Head(_)
            | TunnelFrame::Body { .. }
            | TunnelFrame::Usage(_)
            | TunnelFrame::End
            | TunnelFrame::Cancelled(_) => None,
        });
        for (what, says, failed) in [("runs", capabilities.runs, run), ("tunnels", capabilities.tunnels, tunnel)] {
            let refused = failed == Some(FailureCode::Unsupported);
            if says && refused {
                return Err(format!("says it supports {what}, but refuses them"));
            }
            if !says && !refused {
                return Err(format!("says it has no {what}, but does not refuse them as unsupported"));
            }
        }
        Ok(format!("runs: {}, tunnels: {}", capabilities.runs, capabilities.tunnels))
    }

    async fn probe(&self) -> Found {
        let Ok(nobody) = Target::new("no-such-model-5b1f6c") else {
            return Ok("not checked".to_owned());
        };
        for (target, known) in [(&nobody, false), (&self.options.target, true)] {
            match timeout(self.options.patience, self.provider.probe_health(target)).await {
                Ok(Health::Available) if !known => return Err("a target that does not exist is available".to_owned()),
                Ok(health) if known => return Ok(format!("{} for the target", health.as_str())),
                Ok(_) => {}
                Err(_) => return Err(format!("no answer within {:?}", self.options.patience)),
            }
        }
        Ok(String::new())
    }

    /// SEC-1: no path that leaves the API is passed on.
    async fn tunnel_paths(&self) -> Found {
        for path in ["/v1/../etc", "/v1/%2e%2e/x", "//host/x", "/v1/models\\x", "http://host/", "/no/such/path?x=1"] {
            let mut request = tunnel_request(&self.options.target, self.options.input.raw().clone(), true);
            path.clone_into(&mut request.path);
            let frames = self.collect(TunnelExecution::tunnel(Arc::clone(&self.provider), request)).await?;
            if !matches!(frames.first(), Some(TunnelFrame::Failed(_))) {
                return Err(format!("the path {path} was passed on"));
            }
        }
        Ok("none outside the API".to_owned())
    }
}

fn first_failure<E>(items: Vec<E>, code: impl Fn(&E) -> Option<FailureCode>) -> Option<FailureCode> {
    items.iter().find_map(code)
}
