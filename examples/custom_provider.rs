//! A provider in under 40 lines, and the check that tells whether it keeps the contract.
//!
//! Run it: `cargo run -p iop-examples --example custom_provider`

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use iop_execution::testkit::{CheckOptions, check_provider};
use iop_execution::{
    AdapterKey, Capabilities, ChatInput, Completion, EventSink, FinishReason, Provider, ProviderError, RunEventKind,
    RunId, RunRequest, RunStream, Target, async_trait, provider::TargetInfo,
};

/// Counts down from a number, one delta per step.
#[derive(Debug)]
struct Countdown {
    step: Duration,
}

#[async_trait]
impl Provider for Countdown {
    fn capabilities(&self) -> Capabilities {
        let targets = Target::new("countdown").map(TargetInfo::new);
        Capabilities::runs_only().with_targets(targets.into_iter().collect())
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let asked = run.input.messages().last().map(|message| message.text()).unwrap_or_default();
        let from: u32 = asked.trim().parse().unwrap_or(3);
        for left in (1..=from).rev() {
            // Wherever a provider waits it also listens for the cancel, so that nothing runs on for nobody.
            tokio::select! {
                () = tokio::time::sleep(self.step) => {}
                () = sink.cancelled() => return Err(iop_execution::Fenced.into()),
            }
            sink.delta(format!("{left} ")).await?;
        }
        sink.delta("go").await?;
        Ok(Completion::new(FinishReason::Stop))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let provider: Arc<dyn Provider> = Arc::new(Countdown { step: Duration::from_millis(20) });
    let target = Target::new("countdown")?;

    // Alone, without Edge or Node.
    let input = ChatInput::parse(r#"{"messages":[{"role":"user","content":"5"}]}"#)?;
    let request = RunRequest::new(RunId::generate()?, AdapterKey::new("countdown")?, target.clone(), input);
    let mut events = RunStream::local(Arc::clone(&provider), request);
    while let Some(event) = events.next().await {
        if let RunEventKind::Delta(text) = &event.kind {
            print!("{text}");
        }
    }
    println!();

    // The same checks that IOP's own adapters pass.
    let report = check_provider(provider, CheckOptions::new(target)).await;
    println!("{report}");
    if report.is_ok() { Ok(()) } else { Err("the provider breaks its contract".into()) }
}
