//! Decides how a script becomes provider calls, and what is recorded about them.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use tokio::sync::{Semaphore, watch};

use super::chunk;
use super::script::{Script, Step};
use crate::event::Completion;
use crate::frame::FrameFlags;
use crate::id::Target;
use crate::provider::{Capabilities, Health, Provider, ProviderError, Refreshed, TargetInfo};
use crate::request::{RunRequest, TunnelRequest};
use crate::sink::{BodySink, EventSink, Fenced, HeadSink, TunnelEnd};

/// Most calls whose request is kept; older ones are forgotten, the counts go on.
pub(super) const MAX_RECORDED_CALLS: usize = 1024;

/// A provider that does what its [`Script`]s say. See [`ScriptHandle`] for what it records.
///
/// The first call takes the first script, the second the second, and so on; the last script repeats. It does runs, and
/// tunnels after [`with_tunnels`](Self::with_tunnels). A probe answers [`Health::Available`] for targets it lists or has
/// a script for, [`Health::Unknown`] for others, unless [`with_health`](Self::with_health) says otherwise.
pub struct ScriptedProvider {
    scripts: Mutex<VecDeque<Script>>,
    by_target: HashMap<Target, Script>,
    capabilities: Capabilities,
    health: Option<Health>,
    shared: Arc<Shared>,
}

struct Shared {
    counts: watch::Sender<Counts>,
    calls: Mutex<Vec<ScriptedCall>>,
    release: Semaphore,
}

/// How often something happened to a [`ScriptedProvider`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Calls of `execute` and `tunnel`.
    pub calls: u64,
    /// Calls that run now.
    pub active: u64,
    /// Most calls that ever ran at once.
    pub max_active: u64,
    /// Calls that returned by themselves.
    pub returned: u64,
    /// Calls whose future was dropped before it returned (a panic counts here too).
    pub dropped: u64,
    /// Calls that saw the cancel: a fenced push or `cancelled()`.
    pub cancels_seen: u64,
    /// Calls that wait in a pause now.
    pub paused: u64,
    /// Probes.
    pub probes: u64,
    /// Calls of `start`.
    pub starts: u64,
    /// Calls of `stop`.
    pub stops: u64,
    /// Calls of `refresh`.
    pub refreshes: u64,
}

/// What one call was given.
#[derive(Clone)]
#[non_exhaustive]
pub enum ScriptedCall {
    /// `execute`.
    Run(RunRequest),
    /// `tunnel`.
    Tunnel {
        /// Which model.
        target: Target,
        /// Method and path.
        line: String,
        /// Headers.
        headers: HeaderMap,
        /// The whole body.
        body: Bytes,
    },
}

impl ScriptedCall {
    /// The bytes the caller sent: the body, or the chat-completions object.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        match self {
            Self::Run(run) => run.input.raw(),
            Self::Tunnel { body, .. } => body,
        }
    }
}

impl fmt::Debug for ScriptedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Run(_) => "Run",
            Self::Tunnel { .. } => "Tunnel",
        })
    }
}

/// Watches and steers a [`ScriptedProvider`] that was given away. Cheap to clone.
#[derive(Clone)]
pub struct ScriptHandle(Arc<Shared>);

impl ScriptHandle {
    /// The counts now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *self.0.counts.borrow()
    }

    /// Waits until the counts are as wanted and answers them. Bound it with a timeout of the test.
    ///
    /// Cancel safe.
    pub async fn wait_for(&self, mut wanted: impl FnMut(&Counts) -> bool) -> Counts {
        let mut counts = self.0.counts.subscribe();
        match counts.wait_for(|counts| wanted(counts)).await {
            Ok(counts) => *counts,
            Err(_) => self.counts(),
        }
    }

    /// Lets one pause go on: the one that waits, or the next one.
    pub fn release(&self) {
        self.0.release.add_permits(1);
    }

    /// Lets all pauses go on, also those to come.
    pub fn release_all(&self) {
        self.0.release.add_permits(Semaphore::MAX_PERMITS >> 1);
    }

    /// The calls so far, oldest first.
    #[must_use]
    pub fn calls(&self) -> Vec<ScriptedCall> {
        lock(&self.0.calls).clone()
    }
}

impl fmt::Debug for ScriptHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counts().fmt(f)
    }
}

impl ScriptedProvider {
    /// A provider for runs that follows this script in every call.
    #[must_use]
    pub fn new(script: Script) -> Self {
        Self {
            scripts: Mutex::new(VecDeque::from([script])),
            by_target: HashMap::new(),
            capabilities: Capabilities::runs_only().with_features(true, true),
            health: None,
            shared: Arc::new(Shared {
                counts: watch::Sender::new(Counts::default()),
                calls: Mutex::new(Vec::new()),
                release: Semaphore::new(0),
            }),
        }
    }

    /// The next call follows this script, and so do all later ones.
    #[must_use]
    pub fn then(self, script: Script) -> Self {
        lock(&self.scripts).push_back(script);
        self
    }

    /// Calls for this target follow this script, whichever call it is.
    #[must_use]
    pub fn on_target(mut self, target: Target, script: Script) -> Self {
        self.capabilities.targets.push(TargetInfo::new(target.clone()));
        self.by_target.insert(target, script);
        self
    }

    /// With tunnels.
    #[must_use]
    pub fn with_tunnels(mut self) -> Self {
        self.capabilities.tunnels = true;
        self
    }

    /// With these capabilities instead.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Every probe answers this.
    #[must_use]
    pub const fn with_health(mut self, health: Health) -> Self {
        self.health = Some(health);
        self
    }

    /// What watches and steers it.
    #[must_use]
    pub fn handle(&self) -> ScriptHandle {
        ScriptHandle(Arc::clone(&self.shared))
    }

    /// The provider as engines take it, with its handle.
    #[must_use]
    pub fn into_parts(self) -> (Arc<dyn Provider>, ScriptHandle) {
        let handle = self.handle();
        (Arc::new(self), handle)
    }

    fn script_for(&self, target: &Target) -> Script {
        if let Some(script) = self.by_target.get(target) {
            return script.clone();
        }
        let mut scripts = lock(&self.scripts);
        let next = if scripts.len() > 1 { scripts.pop_front() } else { scripts.front().cloned() };
        next.unwrap_or_default()
    }

    fn begin(&self, call: ScriptedCall) -> Active<'_> {
        {
            let mut calls = lock(&self.shared.calls);
            if calls.len() == MAX_RECORDED_CALLS {
                calls.remove(0);
            }
            calls.push(call);
        }
        self.shared.counts.send_modify(|counts| {
            counts.calls += 1;
            counts.active += 1;
            counts.max_active = counts.max_active.max(counts.active);
        });
        Active { shared: &self.shared, cancel_seen: false, returned: false }
    }
}

impl fmt::Debug for ScriptedProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedProvider").field("counts", &*self.shared.counts.borrow()).finish_non_exhaustive()
    }
}

/// One call that runs; counts how it ended.
struct Active<'a> {
    shared: &'a Shared,
    cancel_seen: bool,
    returned: bool,
}

impl Active<'_> {
    fn returned<T>(mut self, outcome: Result<T, ProviderError>) -> Result<T, ProviderError> {
        if outcome.as_ref().is_err_and(ProviderError::is_fenced) {
            self.see_cancel();
        }
        self.returned = true;
        outcome
    }

    fn see_cancel(&mut self) {
        if !std::mem::replace(&mut self.cancel_seen, true) {
            self.shared.counts.send_modify(|counts| counts.cancels_seen += 1);
        }
    }

    /// The steps that are the same in runs and tunnels: waiting, failing, panicking.
    async fn wait_or_end(&mut self, step: &Step, cancelled: impl Future<Output = ()>) -> Result<(), ProviderError> {
        match step {
            Step::Pause => {
                let _paused = Paused::enter(self.shared);
                tokio::select! {
                    biased;
                    () = cancelled => Err(Fenced.into()),
                    permit = self.shared.release.acquire() => {
                        if let Ok(permit) = permit {
                            permit.forget();
                        }
                        Ok(())
                    }
                }
            }
            Step::Wait(time) => tokio::select! {
                biased;
                () = cancelled => Err(Fenced.into()),
                () = tokio::time::sleep(*time) => Ok(()),
            },
            Step::Hang => {
                cancelled.await;
                Err(Fenced.into())
            }
            Step::Linger(time) => {
                cancelled.await;
                self.see_cancel();
                tokio::time::sleep(*time).await;
                Err(Fenced.into())
            }
            Step::IgnoreCancel => std::future::pending().await,
            Step::Fail(failure) => Err(ProviderError::new((**failure).clone())),
            Step::Panic => scripted_panic(),
            Step::Delta(_)
            | Step::Reasoning(_)
            | Step::ToolCall(_)
            | Step::Usage(_)
            | Step::Head { .. }
            | Step::Frame { .. } => Ok(()),
        }
    }
}

#[allow(clippy::panic, reason = "a test asked for it")]
fn scripted_panic() -> Result<(), ProviderError> {
    panic!("the script says so")
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.shared.counts.send_modify(|counts| {
            counts.active -= 1;
            if self.returned {
                counts.returned += 1;
            } else {
                counts.dropped += 1;
            }
        });
    }
}

struct Paused<'a>(&'a Shared);

impl<'a> Paused<'a> {
    fn enter(shared: &'a Shared) -> Self {
        shared.counts.send_modify(|counts| counts.paused += 1);
        Self(shared)
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.counts.send_modify(|counts| counts.paused -= 1);
    }
}

#[async_trait]
impl Provider for ScriptedProvider {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        if !self.capabilities.runs {
            return Err(ProviderError::unsupported("the script has no runs"));
        }
        let script = self.script_for(&run.target);
        let mut active = self.begin(ScriptedCall::Run(run));
        let outcome = follow_run(&script, sink, &mut active).await;
        active.returned(outcome)
    }

    async fn tunnel(&self, mut request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        if !self.capabilities.tunnels {
            return Err(ProviderError::unsupported("the script has no tunnels"));
        }
        let script = self.script_for(&request.target);
        let mut body = BytesMut::new();
        while let Some(chunk) = request.body.next().await {
            let Ok(chunk) = chunk else {
                return Err(ProviderError::invalid_request("the request body broke off"));
            };
            body.extend_from_slice(&chunk);
        }
        let mut active = self.begin(ScriptedCall::Tunnel {
            target: request.target,
            line: format!("{} {}", request.method, request.path),
            headers: request.headers,
            body: body.freeze(),
        });
        let outcome = follow_tunnel(&script, head, &mut active).await;
        active.returned(outcome)
    }

    async fn probe_health(&self, target: &Target) -> Health {
        self.shared.counts.send_modify(|counts| counts.probes += 1);
        let listed = self.capabilities.targets.iter().any(|info| info.target == *target);
        self.health.unwrap_or(if listed { Health::Available } else { Health::Unknown })
    }

    async fn start(&self) -> Result<(), ProviderError> {
        self.shared.counts.send_modify(|counts| counts.starts += 1);
        Ok(())
    }

    async fn refresh(&self) -> Refreshed {
        self.shared.counts.send_modify(|counts| counts.refreshes += 1);
        Refreshed::Answered
    }

    async fn stop(&self) {
        self.shared.counts.send_modify(|counts| counts.stops += 1);
    }
}

async fn follow_run(
    script: &Script,
    sink: &mut EventSink,
    active: &mut Active<'_>,
) -> Result<Completion, ProviderError> {
    for step in &script.steps {
        match step {
            Step::Delta(text) => sink.delta(text.clone()).await?,
            Step::Reasoning(text) => sink.reasoning_delta(text.clone()).await?,
            Step::ToolCall(call) => sink.tool_call(call.clone()).await?,
            Step::Usage(usage) => sink.usage(*usage).await?,
            Step::Head { .. } | Step::Frame { .. } => {}
            Step::Pause
            | Step::Wait(_)
            | Step::Hang
            | Step::Linger(_)
            | Step::IgnoreCancel
            | Step::Fail(_)
            | Step::Panic => active.wait_or_end(step, sink.cancelled()).await?,
        }
    }
    Ok(Completion::new(script.finish_reason()))
}

/// The tunnel's sink on its way from head to body.
enum Out {
    Head(HeadSink),
    Body(BodySink),
}

impl Out {
    fn cancelled(&self) -> impl Future<Output = ()> + use<> {
        match self {
            Self::Head(head) => head.cancelled(),
            Self::Body(body) => body.cancelled(),
        }
    }

    async fn body(self, status: StatusCode, content_type: &'static str) -> Result<BodySink, Fenced> {
        match self {
            Self::Head(head) => {
                let mut headers = HeaderMap::new();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
                head.head(status, headers).await
            }
            Self::Body(body) => Ok(body),
        }
    }
}

async fn follow_tunnel(script: &Script, head: HeadSink, active: &mut Active<'_>) -> Result<TunnelEnd, ProviderError> {
    const EVENTS: &str = "text/event-stream";
    let mut out = Out::Head(head);
    let mut chunks = false;
    for step in &script.steps {
        let frame = match step {
            Step::Delta(text) => {
                Some((chunk::event(&chunk::delta(serde_json::json!({ "content": text }))), FrameFlags::CONTENT))
            }
            Step::Reasoning(text) => Some((
                chunk::event(&chunk::delta(serde_json::json!({ "reasoning_content": text }))),
                FrameFlags::CONTENT,
            )),
            Step::ToolCall(call) => Some((chunk::event(&chunk::tool_call(call)), FrameFlags::CONTENT)),
            Step::Usage(usage) => Some((chunk::event(&chunk::usage(usage)), FrameFlags::USAGE)),
            Step::Head { status, content_type } => {
                out = Out::Body(out.body(*status, content_type).await?);
                continue;
            }
            Step::Frame { bytes, flags } => {
                let mut body = out.body(StatusCode::OK, EVENTS).await?;
                body.data(bytes.clone(), *flags).await?;
                out = Out::Body(body);
                continue;
            }
            Step::Pause
            | Step::Wait(_)
            | Step::Hang
            | Step::Linger(_)
            | Step::IgnoreCancel
            | Step::Fail(_)
            | Step::Panic => {
                active.wait_or_end(step, out.cancelled()).await?;
                continue;
            }
        };
        let mut body = out.body(StatusCode::OK, EVENTS).await?;
        if !std::mem::replace(&mut chunks, true) {
            body.data(chunk::event(&chunk::role()), FrameFlags::LIFECYCLE).await?;
        }
        if let Some((bytes, flags)) = frame {
            body.data(bytes, flags).await?;
        }
        if let Step::Usage(usage) = step {
            body.usage(*usage).await?;
        }
        out = Out::Body(body);
    }
    let raw = script.steps.iter().any(|step| matches!(step, Step::Head { .. } | Step::Frame { .. }));
    let mut body = out.body(StatusCode::OK, EVENTS).await?;
    if !raw {
        body.data(chunk::event(&chunk::finish(script.finish_reason())), FrameFlags::LIFECYCLE).await?;
        body.data(Bytes::from_static(chunk::DONE), FrameFlags::TERMINAL).await?;
    }
    Ok(body.finish())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
