//! An adapter author checks their own provider: the contract, on a real server or a scripted one, and every odd answer that
//! servers are known to give. Put your adapter into `provider_for` below.
//!
//! Run it: `cargo run -p iop-examples --example conformance` (scripted), or
//! `cargo run -p iop-examples --example conformance -- http://127.0.0.1:8080 MODEL` (contract only, on your server).
//! Exit status 1 if something is wrong.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use iop_adapters::{OpenAiCompat, OpenAiCompatConfig};
use iop_execution::testkit::cases::{CaseEnd, ChatCase, chat_cases};
use iop_execution::testkit::{Answer, CheckOptions, ScriptedBackend, chat_json, check_provider, run_request};
use iop_execution::{ChatInput, Provider, RunEventKind, RunStream, Target};

/// How long a case may be silent until it counts as a stall, which is right for those that are one.
const SILENCE: Duration = Duration::from_secs(2);

/// Your adapter. This one is for servers that speak OpenAI chat completions, as the cases do.
fn provider_for(base_url: &str) -> Result<Arc<dyn Provider>, Box<dyn Error>> {
    let mut config = OpenAiCompatConfig::new(base_url);
    config.terminal_linger = Duration::from_millis(200);
    Ok(Arc::new(OpenAiCompat::new(config)?))
}

/// A server that talks for a while, says its counts, and ends as it should.
async fn well_behaved() -> std::io::Result<ScriptedBackend> {
    let chunk = |delta: &str, finish: &str| {
        format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":{finish}}}]}}\n\n")
    };
    let word = format!("{{\"content\":\"{} \"}}", "word".repeat(1_000));
    let mut answer = Answer::events().write(chunk("{\"role\":\"assistant\"}", "null"));
    for _ in 0..200 {
        answer = answer.write(chunk(&word, "null"));
    }
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":200}}\n\ndata: [DONE]\n\n";
    ScriptedBackend::builder().model("m", answer.write(chunk("{}", "\"stop\"")).write(usage)).start().await
}

/// What a case came to: its text, and how it ended.
async fn outcome(provider: &Arc<dyn Provider>, case: &ChatCase) -> Result<(String, CaseEnd), Box<dyn Error>> {
    let input = ChatInput::parse(chat_json(case.name, "hello", true))?;
    let mut events = RunStream::local(Arc::clone(provider), run_request(&Target::new(case.name)?, input));
    let mut text = String::new();
    loop {
        match tokio::time::timeout(SILENCE, events.next()).await {
            Err(_) => return Ok((text, CaseEnd::Stall)),
            Ok(None) => return Err("a run without a terminal".into()),
            Ok(Some(event)) => match event.kind {
                RunEventKind::Delta(more) => text.push_str(&more),
                RunEventKind::Complete(_) => return Ok((text, CaseEnd::Ok)),
                RunEventKind::Error(_) | RunEventKind::Cancelled(_) => return Ok((text, CaseEnd::Error)),
                _ => {}
            },
        }
    }
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (scripted, base_url, model) = match &arguments[..] {
        [] => {
            let backend = well_behaved().await?;
            let base_url = backend.base_url();
            (Some(backend), base_url, "m")
        }
        [base_url, model] => (None, base_url.clone(), model.as_str()),
        _ => return Err("give a base URL and a model, or nothing".into()),
    };

    println!("the contract, on {base_url}:\n");
    let report = check_provider(provider_for(&base_url)?, CheckOptions::new(Target::new(model)?)).await;
    println!("{report}\n");
    let mut ok = report.is_ok();
    if scripted.is_none() {
        return Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }

    // Each case is an answer, byte by byte, and what it must come to: its text, an error, or silence that a watchdog ends.
    let backend = ScriptedBackend::with_all_cases().await?;
    let provider = provider_for(&backend.base_url())?;
    let (mut right, mut stricter) = (0, Vec::new());
    for case in chat_cases() {
        let (text, end) = outcome(&provider, &case).await?;
        if text == case.stream.text && end == case.stream.end {
            right += 1;
        } else if end == CaseEnd::Error {
            stricter.push(case.name);
        } else {
            ok = false;
            println!(
                "WRONG {}: {text:?} and {end:?} instead of {:?} and {:?}",
                case.name, case.stream.text, case.stream.end
            );
        }
    }
    println!("known odd answers: {right} as they must be");
    println!("an error where a text was possible, which is allowed: {}", stricter.join(", "));
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
