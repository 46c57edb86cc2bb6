//! Decides what a simulated provider does: what the request itself asks for, unless its backend is ill: then it makes no
//! progress until it is well again. It counts its live calls, marks every piece of output with the client and the call it
//! belongs to, and says of itself what the seed makes it say.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};
use iop_execution::failure::{FailureStage, ProviderReason};
use iop_execution::{
    Capabilities, Completion, EventSink, Fenced, FinishReason, FrameFlags, HeadSink, Health, Provider, ProviderError,
    RunId, RunRequest, Target, TunnelEnd, TunnelRequest, async_trait,
};
use tokio::time::sleep;

use crate::sim::history::Who;
use crate::sim::world::{Answer, Call, World};

/// How often an ill provider looks whether it is well, in milliseconds.
const LOOK: u64 = 250;
/// Longest wait for the first piece once a provider behaves.
const QUICK: u64 = 100;

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
    /// The backend has an error of its own.
    Down,
    /// Nobody listens there.
    Unreachable,
    /// The adapter panics.
    Panic,
    /// Never.
    Hang,
}

const ENDINGS: [(Ending, &str); 8] = [
    (Ending::Whole, "whole"),
    (Ending::Broken, "broken"),
    (Ending::Busy, "busy"),
    (Ending::Refused, "refused"),
    (Ending::Down, "down"),
    (Ending::Unreachable, "unreachable"),
    (Ending::Panic, "panic"),
    (Ending::Hang, "hang"),
];

/// What an answer by tunnel looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Pieces and nothing else.
    Raw,
    /// One JSON document.
    Document,
    /// An event stream.
    Stream,
}

const FORMS: [(Form, &str); 3] = [(Form::Raw, "raw"), (Form::Document, "document"), (Form::Stream, "stream")];

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
    /// How many attempts of an OpenAI client go like that. Later ones are quick and whole.
    pub bad: usize,
    /// What a tunnel's answer looks like.
    pub form: Form,
}

impl Work {
    /// The request's body, padded to about this size.
    #[must_use]
    pub fn body(&self, model: &str, padding: usize) -> Bytes {
        let Self { client, pieces, size, first, pace, ending, deaf, bad, form } = self;
        let ending = ENDINGS.iter().find(|(value, _)| value == ending).map_or("", |(_, name)| name);
        let name = FORMS.iter().find(|(value, _)| value == form).map_or("", |(_, name)| name);
        let stream = if *form == Form::Stream { ",\"stream\":true" } else { "" };
        let pad = "x".repeat(padding);
        Bytes::from(format!(
            "{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"user\",\"content\":\"sim {client} {pieces} {size} {first} \
             {pace} {ending} {deaf} {bad} {name} {pad}\"}}]{stream}}}"
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
        let (deaf, bad) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let name = words.next()?;
        let form = FORMS.iter().find(|(_, known)| *known == name)?.0;
        Some(Self { client, pieces, size: usize::try_from(size).ok()?, first, pace, ending, deaf, bad, form })
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
    /// A call begins. Answers what is to be done in it: an OpenAI client's later attempts may go better.
    fn begin(&self, run_id: RunId, by_tunnel: bool, body: &[u8]) -> Result<(Live, Work), ProviderError> {
        let Some(mut work) = Work::parse(body) else {
            return Err(ProviderError::invalid_request("not a request of the simulation"));
        };
        let (node, process) = self.process;
        let (who, client) = (Who::Node(node, process), work.client);
        let mut facts = self.world.facts();
        facts.last_call += 1;
        let (call, since) = (facts.last_call, facts.now);
        facts.calls.insert(call, Call { process, provider: self.index, run_id, client, since });
        let mine = |call: &&Call| call.process == process && call.provider == self.index;
        let live = facts.calls.values().filter(mine).count();
        if live > self.capacity as usize && !facts.reconfigured {
            let problem = format!("NOD-4: {live} calls at p{}, which takes {}", self.index, self.capacity);
            facts.broken.push(problem);
        }
        if let Some(asking) = facts.askings.get_mut(&client) {
            let mut hasher = DefaultHasher::new();
            body.hash(&mut hasher);
            let hash = hasher.finish();
            let first = *asking.bodies[usize::from(by_tunnel)].get_or_insert(hash);
            asking.calls.push(call);
            let count = asking.calls.len();
            let budget = asking.budget;
            if count > work.bad {
                (work.ending, work.first) = (Ending::Whole, work.first.min(QUICK));
            }
            if first != hash {
                facts.broken.push(format!("REC-4: client {client}: another body than the first attempt had"));
            }
            if count > budget as usize + 1 {
                facts.broken.push(format!("I8: client {client} has {count} calls, and {budget} more than one allowed"));
            }
        }
        facts.note(who, "call", "", [call, u64::from(client)]);
        drop(facts);
        Ok((Live { world: Arc::clone(&self.world), who, call }, work))
    }

    /// Waits while the backend is ill.
    async fn well(&self, mut cancelled: impl Future<Output = ()> + Unpin) -> Result<(), Fenced> {
        while self.world.facts().condition(self.index).ill {
            wait(LOOK, &mut cancelled).await?;
        }
        Ok(())
    }

    async fn follow(
        &self,
        work: &Work,
        call: u64,
        mut out: Out<'_>,
        mut cancelled: impl Future<Output = ()> + Unpin,
    ) -> Result<Option<TunnelEnd>, ProviderError> {
        out.begin().await?;
        for number in 0..work.pieces {
            self.well(&mut cancelled).await?;
            out.push(piece(work, call, number)).await?;
            wait(work.pace, &mut cancelled).await?;
        }
        self.well(&mut cancelled).await?;
        match work.ending {
            Ending::Whole => Ok(out.finish().await?),
            Ending::Broken => Err(ProviderError::broken(FailureStage::Stream)),
            Ending::Busy => Err(ProviderError::rejected(429, Some(ProviderReason::Overloaded))),
            Ending::Refused => Err(ProviderError::rejected(400, None)),
            Ending::Down => Err(ProviderError::rejected(503, None)),
            Ending::Unreachable => Err(ProviderError::unreachable()),
            // Not `panic!`: that would call the hook that finds defects.
            Ending::Panic => std::panic::resume_unwind(Box::new("the request says so")),
            Ending::Hang => {
                cancelled.await;
                Err(Fenced.into())
            }
        }
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
    Tunnel(iop_execution::BodySink, Form),
}

impl Out<'_> {
    async fn begin(&mut self) -> Result<(), Fenced> {
        let Self::Tunnel(body, form) = self else { return Ok(()) };
        match form {
            Form::Raw => Ok(()),
            Form::Document => {
                let begin = "{\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"";
                body.data(Bytes::from_static(begin.as_bytes()), FrameFlags::NONE).await
            }
            Form::Stream => body.data(event("{\"role\":\"assistant\"}"), FrameFlags::LIFECYCLE).await,
        }
    }

    async fn finish(self) -> Result<Option<TunnelEnd>, Fenced> {
        let Self::Tunnel(mut body, form) = self else { return Ok(None) };
        match form {
            Form::Raw => {}
            Form::Document => {
                let end = "\"},\"finish_reason\":\"stop\"}]}";
                body.data(Bytes::from_static(end.as_bytes()), FrameFlags::NONE).await?;
            }
            Form::Stream => {
                body.data(event("{}"), FrameFlags::LIFECYCLE).await?;
                body.data(Bytes::from_static(b"data: [DONE]\n\n"), FrameFlags::TERMINAL).await?;
            }
        }
        Ok(Some(body.finish()))
    }

    async fn push(&mut self, text: String) -> Result<(), Fenced> {
        let escaped = |text: &str| text.replace('\n', "\\n");
        match self {
            Self::Run(sink) => sink.delta(text).await,
            Self::Tunnel(body, Form::Raw) => body.data(Bytes::from(text), FrameFlags::NONE).await,
            Self::Tunnel(body, Form::Document) => body.data(Bytes::from(escaped(&text)), FrameFlags::NONE).await,
            Self::Tunnel(body, Form::Stream) => {
                let delta = format!("{{\"content\":\"{}\"}}", escaped(&text));
                body.data(event(&delta), FrameFlags::CONTENT).await
            }
        }
    }
}

fn event(delta: &str) -> Bytes {
    Bytes::from(format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta}}}]}}\n\n"))
}

/// Type of an answer.
fn headers(form: Form) -> HeaderMap {
    let kind = match form {
        Form::Raw => return HeaderMap::new(),
        Form::Document => HeaderValue::from_static("application/json"),
        Form::Stream => HeaderValue::from_static("text/event-stream"),
    };
    HeaderMap::from_iter([(CONTENT_TYPE, kind)])
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
        let (live, work) = self.begin(run.run_id, false, run.input.raw())?;
        let mut cancelled = Box::pin(sink.cancelled());
        let outcome = match wait(work.first, &mut cancelled).await {
            Ok(()) => self.follow(&work, live.call, Out::Run(sink), cancelled).await,
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
        let (live, work) = self.begin(request.run_id, true, &body)?;
        let mut cancelled = Box::pin(head.cancelled());
        let outcome = async {
            wait(work.first, &mut cancelled).await?;
            self.well(&mut cancelled).await?;
            if work.pieces == 0 && matches!(work.ending, Ending::Unreachable) {
                return Err(ProviderError::unreachable());
            }
            let body = head.head(StatusCode::OK, headers(work.form)).await?;
            self.follow(&work, live.call, Out::Tunnel(body, work.form), cancelled).await
        };
        let outcome = outcome.await;
        linger(&work, outcome).await?.ok_or_else(|| ProviderError::protocol("no end"))
    }

    async fn probe_health(&self, _: &Target) -> Health {
        let (node, process) = self.process;
        let answer = {
            let mut facts = self.world.facts();
            let answer = facts.condition(self.index).answer;
            let name = match answer {
                Answer::Is(health, _) => health.as_str(),
                Answer::Never => "never",
                Answer::Panics => "panics",
            };
            facts.note(Who::Node(node, process), "probe", name, [self.index as u64, 0]);
            answer
        };
        match answer {
            Answer::Is(health, after) => {
                sleep(Duration::from_millis(after)).await;
                health
            }
            Answer::Never => std::future::pending().await,
            Answer::Panics => std::panic::resume_unwind(Box::new("the seed says so")),
        }
    }
}
