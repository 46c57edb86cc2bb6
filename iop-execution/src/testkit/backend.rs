//! Decides what a scripted model server answers, and what it records about those who ask.
//!
//! A minimal HTTP/1.1 server on 127.0.0.1 that answers by script: the request's `model` names the answer. It is honest
//! about bytes (one step is one write and one chunk) and about connections (how many, and when the client closed one).

mod http1;
mod serve;

use std::collections::HashMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

/// What the server answers to one request.
#[derive(Clone)]
pub struct Answer {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) steps: Vec<Step>,
    pub(super) without_stream: Option<Box<Self>>,
    pub(super) late_head: bool,
}

#[derive(Clone)]
pub(super) enum Step {
    Write(Bytes),
    Pause,
    Wait(Duration),
    Hang,
    Reset,
    Close,
}

impl Answer {
    /// An answer with this status and no header. Without `content-length` its body is chunked.
    #[must_use]
    pub const fn new(status: u16) -> Self {
        Self { status, headers: Vec::new(), steps: Vec::new(), without_stream: None, late_head: false }
    }

    /// A `200` event stream.
    #[must_use]
    pub fn events() -> Self {
        Self::new(200).header("content-type", "text/event-stream")
    }

    /// A whole JSON body of known length.
    #[must_use]
    pub fn json(status: u16, body: impl Into<Bytes>) -> Self {
        let body = body.into();
        Self::new(status)
            .header("content-type", "application/json")
            .header("content-length", &body.len().to_string())
            .write(body)
    }

    /// The connection is reset instead of an answer.
    #[must_use]
    pub const fn reset_at_once() -> Self {
        Self::new(0)
    }

    /// With this header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    /// Writes these bytes at once: one write, one chunk.
    #[must_use]
    pub fn write(self, bytes: impl Into<Bytes>) -> Self {
        self.step(Step::Write(bytes.into()))
    }

    /// Waits for one [`ScriptedBackend::release`], or until the client closes the connection.
    #[must_use]
    pub fn pause(self) -> Self {
        self.step(Step::Pause)
    }

    /// Waits this long on tokio's clock, or until the client closes the connection.
    #[must_use]
    pub fn wait(self, time: Duration) -> Self {
        self.step(Step::Wait(time))
    }

    /// Sends the head only with the first byte of the body, as servers do that wait for a free slot first.
    #[must_use]
    pub const fn late_head(mut self) -> Self {
        self.late_head = true;
        self
    }

    /// Writes nothing more and waits until the client closes the connection.
    #[must_use]
    pub fn hang(self) -> Self {
        self.step(Step::Hang)
    }

    /// Resets the connection.
    #[must_use]
    pub fn reset(self) -> Self {
        self.step(Step::Reset)
    }

    /// Closes the connection without the end of the body.
    #[must_use]
    pub fn close(self) -> Self {
        self.step(Step::Close)
    }

    /// What a request without `"stream": true` gets instead.
    #[must_use]
    pub fn without_stream(mut self, answer: Self) -> Self {
        self.without_stream = Some(Box::new(answer));
        self
    }

    /// Every byte its steps write, joined: the body as the provider sent it.
    #[must_use]
    pub fn body(&self) -> Bytes {
        let writes = self.steps.iter().filter_map(|step| match step {
            Step::Write(bytes) => Some(bytes.as_ref()),
            Step::Pause | Step::Wait(_) | Step::Hang | Step::Reset | Step::Close => None,
        });
        Bytes::from(writes.collect::<Vec<_>>().concat())
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("status", &self.status).field("steps", &self.steps.len()).finish_non_exhaustive()
    }
}

/// One request the server got.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Received {
    /// Which connection it came over, from 1.
    pub connection: u64,
    /// The method.
    pub method: String,
    /// The path with its query, as sent.
    pub path: String,
    /// The headers, names in lower case, in order.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Bytes,
}

impl Received {
    /// The first header of this name (in lower case).
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// What happened so far, as counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Connections accepted.
    pub connections: u64,
    /// Connections open now.
    pub open: u64,
    /// Requests whose head and body arrived.
    pub requests: u64,
    /// Answers that are being written now.
    pub answering: u64,
    /// Most answers that were ever written at once.
    pub max_answering: u64,
    /// Answers written to their end.
    pub answered: u64,
    /// Answers during which the client closed the connection.
    pub client_closed: u64,
    /// Answers that wait in a pause or hang now.
    pub waiting: u64,
    /// Body bytes written.
    pub written: u64,
    /// When the client last closed a connection during an answer.
    pub last_client_close: Option<Instant>,
}

pub(super) struct Shared {
    by_model: HashMap<String, Answer>,
    by_route: HashMap<(String, String), Answer>,
    fallback: Option<Answer>,
    traffic: watch::Sender<Traffic>,
    received: Mutex<Vec<Received>>,
    release: Semaphore,
}

/// Most requests that are kept; older ones are forgotten, the counts go on.
const MAX_RECEIVED: usize = 4096;

/// Answers of a [`ScriptedBackend`], before it starts.
#[derive(Debug, Default)]
pub struct BackendBuilder {
    by_model: HashMap<String, Answer>,
    by_route: HashMap<(String, String), Answer>,
    fallback: Option<Answer>,
}

impl BackendBuilder {
    /// A `POST` whose `model` is this gets this answer. `GET /v1/models` lists the name.
    #[must_use]
    pub fn model(mut self, model: impl Into<String>, answer: Answer) -> Self {
        self.by_model.insert(model.into(), answer);
        self
    }

    /// Every case of [`chat_cases`](super::cases::chat_cases) under its name.
    #[must_use]
    pub fn all_cases(mut self) -> Self {
        self.by_model.extend(super::cases::chat_cases().into_iter().map(|case| (case.name.to_owned(), case.answer)));
        self
    }

    /// This method and exact path get this answer, whatever the body says.
    #[must_use]
    pub fn route(mut self, method: &str, path: &str, answer: Answer) -> Self {
        self.by_route.insert((method.to_owned(), path.to_owned()), answer);
        self
    }

    /// Every other request gets this answer (otherwise a 404 in OpenAI's form).
    #[must_use]
    pub fn otherwise(mut self, answer: Answer) -> Self {
        self.fallback = Some(answer);
        self
    }

    /// Listens on a free port of 127.0.0.1 and serves until the backend is dropped.
    ///
    /// # Errors
    /// When the socket can't be opened.
    pub async fn start(self) -> std::io::Result<ScriptedBackend> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared {
            by_model: self.by_model,
            by_route: self.by_route,
            fallback: self.fallback,
            traffic: watch::Sender::new(Traffic::default()),
            received: Mutex::new(Vec::new()),
            release: Semaphore::new(0),
        });
        let task = tokio::spawn(serve::accept(listener, Arc::clone(&shared)));
        Ok(ScriptedBackend { addr, shared, task })
    }
}

/// A model server that answers by script. Dropping it closes everything.
pub struct ScriptedBackend {
    addr: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl ScriptedBackend {
    /// A backend without answers.
    #[must_use]
    pub fn builder() -> BackendBuilder {
        BackendBuilder::default()
    }

    /// A backend that knows every case of [`chat_cases`](super::cases::chat_cases).
    ///
    /// # Errors
    /// When the socket can't be opened.
    pub async fn with_all_cases() -> std::io::Result<Self> {
        Self::builder().all_cases().start().await
    }

    /// Where it listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its origin, `http://127.0.0.1:port`.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// What happened so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        *self.shared.traffic.borrow()
    }

    /// Waits until the traffic is as wanted and answers it. Bound it with a timeout of the test.
    ///
    /// Cancel safe.
    pub async fn wait_for(&self, mut wanted: impl FnMut(&Traffic) -> bool) -> Traffic {
        let mut traffic = self.shared.traffic.subscribe();
        match traffic.wait_for(|traffic| wanted(traffic)).await {
            Ok(traffic) => *traffic,
            Err(_) => self.traffic(),
        }
    }

    /// Lets one pause go on: the one that waits, or the next one.
    pub fn release(&self) {
        self.shared.release.add_permits(1);
    }

    /// The requests so far, oldest first.
    #[must_use]
    pub fn received(&self) -> Vec<Received> {
        lock(&self.shared.received).clone()
    }
}

impl fmt::Debug for ScriptedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedBackend").field("addr", &self.addr).field("traffic", &self.traffic()).finish()
    }
}

impl Drop for ScriptedBackend {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    fn note(&self, change: impl FnOnce(&mut Traffic)) {
        self.traffic.send_modify(change);
    }

    fn record(&self, request: Received) {
        let mut received = lock(&self.received);
        if received.len() == MAX_RECEIVED {
            received.remove(0);
        }
        received.push(request);
    }

    fn answer(&self, request: &Received) -> Answer {
        #[derive(serde::Deserialize, Default)]
        #[serde(default)]
        struct Asked {
            model: String,
            stream: bool,
        }
        let path = request.path.split('?').next().unwrap_or_default();
        if let Some(answer) = self.by_route.get(&(request.method.clone(), path.to_owned())) {
            return answer.clone();
        }
        if request.method == "GET" && path == "/v1/models" {
            return Answer::json(200, self.model_list());
        }
        let asked: Asked = serde_json::from_slice(&request.body).unwrap_or_default();
        match self.by_model.get(&asked.model).or(self.fallback.as_ref()) {
            Some(answer) if !asked.stream => answer.without_stream.as_deref().unwrap_or(answer).clone(),
            Some(answer) => answer.clone(),
            None => super::cases::model_not_found(),
        }
    }

    fn model_list(&self) -> String {
        let mut names: Vec<_> = self.by_model.keys().collect();
        names.sort_unstable();
        let data: Vec<_> = names
            .into_iter()
            .map(|id| serde_json::json!({ "id": id, "object": "model", "created": 1, "owned_by": "scripted" }))
            .collect();
        serde_json::json!({ "object": "list", "data": data }).to_string()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
