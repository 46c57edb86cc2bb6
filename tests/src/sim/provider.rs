//! Decides what a simulated provider does: what the request itself asks for. It counts its live calls and marks every piece
//! of output with the client and the call it belongs to.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::{HeaderMap, StatusCode};
use iop_execution::failure::{FailureStage, ProviderReason};
use iop_execution::{
    Capabilities, Completion, EventSink, Fenced, FinishReason, FrameFlags, HeadSink, Provider, ProviderError, RunId,
    RunRequest, TunnelEnd, TunnelRequest, async_trait,
};
use tokio::time::sleep;

use crate::sim::history::Who;
use crate::sim::world::{Call, World};

/// How a call ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Well.
    Whole,
    /// The backend breaks off.
    Broken,
    /// The backend says that it is busy.
    Busy,
    /// The backend refuses the request itself.
    Refused,
    /// The adapter panics.
    Panic,
    /// Never.
    Hang,
}

const ENDINGS: [(Ending, &str); 6] = [
    (Ending::Whole, "whole"),
    (Ending::Broken, "broken"),
    (Ending::Busy, "busy"),
    (Ending::Refused, "refused"),
    (Ending::Panic, "panic"),
    (Ending::Hang, "hang"),
];

/// What a request asks its provider to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Who asks.
    pub client: u32,
    /// Pieces of output.
    pub pieces: u64,
    /// Bytes of one piece, at least.
    pub size: usize,
    /// Wait before the first piece, in milliseconds.
    pub first: u64,
    /// Wait after each piece.
    pub pace: u64,
    /// How it ends.
    pub ending: Ending,
    /// How long it goes on after a cancel.
    pub deaf: u64,
}

impl Work {
    /// The request's body, padded to about this size.
    #[must_use]
    pub fn body(&self, target: &str, padding: usize) -> Bytes {
        let Self { client, pieces, size, first, pace, ending, deaf } = self;
        let ending = ENDINGS.iter().find(|(value, _)| value == ending).map_or("", |(_, name)| name);
        let pad = "x".repeat(padding);
        Bytes::from(format!(
            "{{\"model\":\"{target}\",\"messages\":[{{\"role\":\"user\",\"content\":\"sim {client} {pieces} {size} {first} \
             {pace} {ending} {deaf} {pad}\"}}]}}"
        ))
    }

    fn parse(body: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(body).ok()?;
        let mut words = text.split_once("\"sim ")?.1.split(' ');
        let client = words.next()?.parse().ok()?;
        let mut number = || words.next()?.parse::<u64>().ok();
        let (pieces, size, first, pace) = (number()?, number()?, number()?, number()?);
        let name = words.next()?;
        let ending = ENDINGS.iter().find(|(_, known)| *known == name)?.0;
        let deaf = words.next()?.parse().ok()?;
        Some(Self { client, pieces, size: usize::try_from(size).ok()?, first, pace, ending, deaf })
    }
}

/// A provider of one process.
#[derive(Debug)]
pub struct SimProvider {
    /// What it tells.
    pub world: Arc<World>,
    /// In which process, of which Node.
    pub process: (usize, u64),
    /// Which provider it is.
    pub index: usize,
    /// Calls that it may have at once.
    pub capacity: u32,
    /// It takes tunnels too.
    pub tunnels: bool,
}

/// Counts a call while it lives.
struct Live {
    world: Arc<World>,
    who: Who,
    call: u64,
}

impl Drop for Live {
    fn drop(&mut self) {
        let mut facts = self.world.facts();
        facts.calls.remove(&self.call);
        facts.note(self.who, "call over", "", [self.call, 0]);
    }
}

impl SimProvider {
    fn begin(&self, run_id: RunId, client: u32) -> Live {
        let (node, process) = self.process;
        let who = Who::Node(node, process);
        let mut facts = self.world.facts();
        facts.last_call += 1;
        let call = facts.last_call;
        facts.calls.insert(call, Call { process, provider: self.index, run_id });
        let mine = |call: &&Call| call.process == process && call.provider == self.index;
        let live = facts.calls.values().filter(mine).count();
        if live > self.capacity as usize && !facts.reconfigured {
            let problem = format!("NOD-4: {live} calls at p{}, which takes {}", self.index, self.capacity);
            facts.broken.push(problem);
        }
        facts.note(who, "call", "", [call, u64::from(client)]);
        drop(facts);
        Live { world: Arc::clone(&self.world), who, call }
    }
}

/// One piece of output: who it is for, which call made it, and where it stands.
fn piece(work: &Work, call: u64, number: u64) -> String {
    let mut text = format!("{} {call} {number} ", work.client);
    let missing = work.size.saturating_sub(text.len() + 1);
    text.push_str(&".".repeat(missing));
    text.push('\n');
    text
}

/// Where pieces go.
enum Out<'a> {
    Run(&'a mut EventSink),
    Tunnel(iop_execution::BodySink),
}

impl Out<'_> {
    fn finish(self) -> Option<TunnelEnd> {
        match self {
            Self::Run(_) => None,
            Self::Tunnel(body) => Some(body.finish()),
        }
    }

    async fn push(&mut self, text: String) -> Result<(), Fenced> {
        match self {
            Self::Run(sink) => sink.delta(text).await,
            Self::Tunnel(body) => body.data(Bytes::from(text), FrameFlags::NONE).await,
        }
    }
}

async fn wait(time: u64, cancelled: impl Future<Output = ()>) -> Result<(), Fenced> {
    if time == 0 {
        return Ok(());
    }
    tokio::select! {
        biased;
        () = cancelled => Err(Fenced),
        () = sleep(Duration::from_millis(time)) => Ok(()),
    }
}

async fn follow(
    work: &Work,
    call: u64,
    mut out: Out<'_>,
    mut cancelled: impl Future<Output = ()> + Unpin,
) -> Result<Option<TunnelEnd>, ProviderError> {
    for number in 0..work.pieces {
        out.push(piece(work, call, number)).await?;
        wait(work.pace, &mut cancelled).await?;
    }
    match work.ending {
        Ending::Whole => Ok(out.finish()),
        Ending::Broken => Err(ProviderError::broken(FailureStage::Stream)),
        Ending::Busy => Err(ProviderError::rejected(429, Some(ProviderReason::Overloaded))),
        Ending::Refused => Err(ProviderError::rejected(400, None)),
        // Not `panic!`: that would call the hook that finds defects.
        Ending::Panic => std::panic::resume_unwind(Box::new("the request says so")),
        Ending::Hang => {
            cancelled.await;
            Err(Fenced.into())
        }
    }
}

/// A provider that hears of a cancel takes its time.
async fn linger<T>(work: &Work, outcome: Result<T, ProviderError>) -> Result<T, ProviderError> {
    if outcome.as_ref().is_err_and(ProviderError::is_fenced) && work.deaf > 0 {
        sleep(Duration::from_millis(work.deaf)).await;
    }
    outcome
}

#[async_trait]
impl Provider for SimProvider {
    fn capabilities(&self) -> Capabilities {
        if self.tunnels { Capabilities::runs_only().with_tunnels() } else { Capabilities::runs_only() }
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let Some(work) = Work::parse(run.input.raw()) else {
            return Err(ProviderError::invalid_request("not a request of the simulation"));
        };
        let live = self.begin(run.run_id, work.client);
        let mut cancelled = Box::pin(sink.cancelled());
        let outcome = match wait(work.first, &mut cancelled).await {
            Ok(()) => follow(&work, live.call, Out::Run(sink), cancelled).await,
            Err(fenced) => Err(fenced.into()),
        };
        linger(&work, outcome).await.map(|_| Completion::new(FinishReason::Stop))
    }

    async fn tunnel(&self, mut request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        let mut body = BytesMut::new();
        while let Some(chunk) = request.body.next().await {
            let Ok(chunk) = chunk else {
                return Err(ProviderError::invalid_request("the request body broke off"));
            };
            body.extend_from_slice(&chunk);
        }
        let Some(work) = Work::parse(&body) else {
            return Err(ProviderError::invalid_request("not a request of the simulation"));
        };
        let live = self.begin(request.run_id, work.client);
        let mut cancelled = Box::pin(head.cancelled());
        let outcome = async {
            wait(work.first, &mut cancelled).await?;
            let body = head.head(StatusCode::OK, HeaderMap::new()).await?;
            follow(&work, live.call, Out::Tunnel(body), cancelled).await
        };
        let outcome = outcome.await;
        linger(&work, outcome).await?.ok_or_else(|| ProviderError::protocol("no end"))
    }
}
