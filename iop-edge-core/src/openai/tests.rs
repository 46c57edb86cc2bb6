//! The surface over a scripted engine: no socket, paused time.

mod chat_run;
mod chat_tunnel;
mod client_idle;
mod cooling;
mod cors;
mod key_limits;
mod limits;
mod messages;
mod passed;
mod records;
mod recovery;
mod reload;
mod responses;
mod surface;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use iop_execution::{
    AdapterKey, ExecutionFailure, FailureCode, FrameFlags, ModelName, NodeId, ProviderId, RunEvent, RunEventKind,
    RunId, RunStream, Target, TunnelFrame, TunnelHead, TunnelStream,
};
use serde_json::Value;
use tokio::sync::mpsc;

use super::*;
use crate::api::{Admitted, EndNote, Engine, ModelListing, Output, Payload, Submit, SubmitError, Submitted, WireKind};

type Frames = Pin<Box<dyn Stream<Item = TunnelFrame> + Send>>;
type Events = Pin<Box<dyn Stream<Item = RunEvent> + Send>>;

/// What the engine answers next.
enum Reply {
    Noted(EndNote, Box<Self>),
    Refuse(SubmitError),
    Wait,
    Tunnel(Frames),
    Run(Events),
}

/// What reached the engine.
struct Seen {
    request: Submit,
    payload: Option<Payload>,
}

struct Script {
    models: Vec<ModelListing>,
    ready: bool,
    replies: Mutex<VecDeque<Reply>>,
    seen: Mutex<Vec<Seen>>,
    /// Set once the output of the last request was dropped.
    dropped: Arc<AtomicBool>,
}

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script")
    }
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn guarded<T: Send + 'static>(
    inner: Pin<Box<dyn Stream<Item = T> + Send>>,
    dropped: &Arc<AtomicBool>,
) -> impl Stream<Item = T> + Send + 'static {
    let guard = SetOnDrop(Arc::clone(dropped));
    inner.map(move |item| {
        let _ = &guard;
        item
    })
}

#[iop_execution::async_trait]
impl Engine for Script {
    async fn submit(
        &self,
        request: Submit,
        prepare: Box<dyn for<'a> FnOnce(&'a Admitted) -> Payload + Send>,
    ) -> Result<Submitted, SubmitError> {
        let crate::api::Destination::Model(model) = &request.destination else { return Err(SubmitError::NodeRequired) };
        if !self.models.iter().any(|known| known.name == *model) {
            return Err(SubmitError::UnknownModel);
        }
        let mut reply = self.replies.lock().unwrap().pop_front().expect("no reply is scripted");
        let notes = crate::api::EndNotes::default();
        if let Reply::Noted(note, inner) = reply {
            notes.set(note);
            reply = *inner;
        }
        // A run can't be chosen for what only goes by a tunnel.
        if request.wire == Some(WireKind::Tunnel) && matches!(reply, Reply::Run(_)) {
            return Err(SubmitError::Unavailable);
        }
        let run_id = RunId::from_bytes([0xab; 16]);
        let wire = if matches!(reply, Reply::Run(_)) { WireKind::Run } else { WireKind::Tunnel };
        let admitted = Admitted {
            run_id,
            node: NodeId::new("node-1").unwrap(),
            provider: ProviderId::new("provider-1").unwrap(),
            adapter: AdapterKey::new("adapter").unwrap(),
            target: Target::new("org/target").unwrap(),
            wire,
            queued: Duration::from_millis(3),
            retry_on: Default::default(),
        };
        let output = match reply {
            Reply::Refuse(error) => {
                self.seen.lock().unwrap().push(Seen { request, payload: None });
                return Err(error);
            }
            Reply::Wait => std::future::pending().await,
            Reply::Noted(..) => unreachable!("a note has one reply"),
            Reply::Tunnel(frames) => Output::Tunnel(TunnelStream::new(run_id, guarded(frames, &self.dropped))),
            Reply::Run(events) => Output::Run(RunStream::new(run_id, guarded(events, &self.dropped))),
        };
        let payload = Some(prepare(&admitted));
        self.seen.lock().unwrap().push(Seen { request, payload });
        Ok(Submitted { admitted, commit: Default::default(), notes, output })
    }

    fn models(&self) -> Vec<ModelListing> {
        self.models.clone()
    }

    fn is_ready(&self) -> bool {
        self.ready
    }
}

#[derive(Debug, Default)]
struct Records(Mutex<Vec<RequestRecord>>, Mutex<Vec<LivenessObservation>>);

impl RequestObserver for Records {
    fn request_ended(&self, record: &RequestRecord) {
        self.0.lock().unwrap().push(record.clone());
    }

    fn liveness(&self, observation: &LivenessObservation) {
        self.1.lock().unwrap().push(*observation);
    }
}

fn listing(name: &str, available: bool) -> ModelListing {
    ModelListing {
        name: ModelName::new(name).unwrap(),
        created: 1_700_000_000,
        owned_by: "iop".into(),
        context_length: (name == "m").then_some(8_192),
        available,
        tools: true,
        reasoning: false,
    }
}

/// One service over a script.
struct Rig {
    service: OpenAiService,
    script: Arc<Script>,
    records: Arc<Records>,
}

impl Rig {
    fn new(replies: impl IntoIterator<Item = Reply>) -> Self {
        Self::with(replies, |config| config)
    }

    fn with(replies: impl IntoIterator<Item = Reply>, change: impl FnOnce(OpenAiConfig) -> OpenAiConfig) -> Self {
        Self::full(replies, true, change)
    }

    fn full(
        replies: impl IntoIterator<Item = Reply>,
        ready: bool,
        change: impl FnOnce(OpenAiConfig) -> OpenAiConfig,
    ) -> Self {
        let script = Arc::new(Script {
            models: vec![listing("m", true), listing("org/name:tag", true), listing("absent", false)],
            ready,
            replies: Mutex::new(replies.into_iter().collect()),
            seen: Mutex::default(),
            dropped: Arc::default(),
        });
        let records = Arc::new(Records::default());
        let mut config = OpenAiConfig::default().with_observer(Arc::clone(&records) as Arc<dyn RequestObserver>);
        config.unix_time = || 1_234;
        // One attempt, unless a test says otherwise.
        config.max_extra_attempts = 0;
        let service = OpenAiService::new(Arc::clone(&script) as Arc<dyn Engine>, change(config));
        Self { service, script, records }
    }

    async fn send<B>(&self, request: Request<B>) -> Response<OpenAiBody>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Send,
    {
        let mut service = self.service.clone();
        let Ok(response) = tower_service::Service::call(&mut service, request).await;
        response
    }

    async fn chat(&self, body: &str) -> Response<OpenAiBody> {
        self.send(post(body)).await
    }

    /// Status and whole body of a chat request.
    async fn answer(&self, body: &str) -> (u16, String) {
        whole(self.chat(body).await).await
    }

    fn dropped(&self) -> bool {
        self.script.dropped.load(Ordering::SeqCst)
    }

    fn record(&self) -> RequestRecord {
        let mut records = self.records.0.lock().unwrap();
        assert_eq!(records.len(), 1, "one record a request");
        records.remove(0)
    }

    /// Headers and body of a chat that went to the provider.
    fn sent(&self) -> (HeaderMap, String) {
        self.sent_to("/v1/chat/completions")
    }

    /// Headers and body that went to a path of the provider.
    fn sent_to(&self, want: &str) -> (HeaderMap, String) {
        match self.script.seen.lock().unwrap().pop().and_then(|seen| seen.payload) {
            Some(Payload::Tunnel { headers, body, method, path }) => {
                assert_eq!((method.as_str(), path.as_str()), ("POST", want));
                (headers, String::from_utf8(body.to_vec()).unwrap())
            }
            Some(Payload::Run { input }) => (HeaderMap::new(), String::from_utf8(input.to_vec()).unwrap()),
            None => panic!("nothing was sent"),
        }
    }
}

fn post(body: &str) -> Request<Full<Bytes>> {
    post_to("/v1/chat/completions", body)
}

fn post_to(path: &str, body: &str) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
        .unwrap()
}

fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(path).body(Full::default()).unwrap()
}

async fn whole(response: Response<OpenAiBody>) -> (u16, String) {
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

/// The one event or document that is an error, as its object.
fn error_of(text: &str) -> Value {
    let json = text.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap_or(text);
    let value: Value = serde_json::from_str(json).unwrap_or_else(|_| panic!("no error object: {text}"));
    value["error"].clone()
}

fn head(status: u16, kind: &'static str) -> TunnelFrame {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", kind.parse().unwrap());
    TunnelFrame::Head(TunnelHead { status: status.try_into().unwrap(), headers })
}

fn sse() -> TunnelFrame {
    head(200, "text/event-stream; charset=utf-8")
}

fn body(text: &str, flags: FrameFlags) -> TunnelFrame {
    TunnelFrame::Body { bytes: Bytes::copy_from_slice(text.as_bytes()), flags }
}

fn content(text: &str) -> TunnelFrame {
    body(text, FrameFlags::CONTENT)
}

fn lifecycle(text: &str) -> TunnelFrame {
    body(text, FrameFlags::LIFECYCLE)
}

fn done() -> TunnelFrame {
    body("data: [DONE]\n\n", FrameFlags::TERMINAL)
}

fn failed(code: FailureCode) -> TunnelFrame {
    TunnelFrame::Failed(ExecutionFailure::refused(code, "it failed"))
}

fn tunnel(frames: impl IntoIterator<Item = TunnelFrame>) -> Reply {
    let frames: Vec<_> = frames.into_iter().collect();
    Reply::Tunnel(Box::pin(stream::iter(frames)))
}

/// Frames, then silence.
fn hanging(frames: impl IntoIterator<Item = TunnelFrame>) -> Reply {
    let frames: Vec<_> = frames.into_iter().collect();
    Reply::Tunnel(Box::pin(stream::iter(frames).chain(stream::pending())))
}

/// Frames that come when the test says so.
fn stepped() -> (mpsc::UnboundedSender<TunnelFrame>, Reply) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let frames =
        stream::unfold(receiver, |mut receiver| async { receiver.recv().await.map(|frame| (frame, receiver)) });
    (sender, Reply::Tunnel(Box::pin(frames)))
}

fn run(kinds: impl IntoIterator<Item = RunEventKind>) -> Reply {
    let events: Vec<_> = (1..).zip(kinds).map(|(seq, kind)| RunEvent { seq, kind, usage: None }).collect();
    Reply::Run(Box::pin(stream::iter(events)))
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
const STREAM: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
const STREAM_USAGE: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}"#;
