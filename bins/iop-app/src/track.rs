//! Decides when a request is over for a drain: when its answer's body was written to its end or given up.

use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use hyper::body::{Body, Frame, SizeHint};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tower_service::Service;

/// Counts requests that are being answered.
#[derive(Debug, Clone)]
pub struct Inflight {
    count: watch::Sender<usize>,
    gauge: Gauge,
}

impl Inflight {
    /// None yet; `gauge` shows the same number.
    #[must_use]
    pub fn new(gauge: Gauge) -> Self {
        Self { count: watch::Sender::new(0), gauge }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.count.borrow()
    }

    /// Waits until there is none.
    ///
    /// # Cancel safety
    /// May be dropped at any time.
    pub async fn none(&self) {
        let mut count = self.count.subscribe();
        let _sender_lives = count.wait_for(|count| *count == 0).await.is_ok();
    }

    fn enter(&self) -> Guard {
        self.count.send_modify(|count| *count += 1);
        self.gauge.inc();
        Guard(self.clone())
    }
}

#[derive(Debug)]
struct Guard(Inflight);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.count.send_modify(|count| *count = count.saturating_sub(1));
        self.0.gauge.dec();
    }
}

/// A service whose requests are counted.
#[derive(Debug, Clone)]
pub struct Tracked<S> {
    inner: S,
    inflight: Inflight,
}

impl<S> Tracked<S> {
    /// Counts the requests of `inner`.
    pub const fn new(inner: S, inflight: Inflight) -> Self {
        Self { inner, inflight }
    }
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<S, B, R> Service<Request<B>> for Tracked<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = Response<TrackedBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let guard = self.inflight.enter();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            Ok(answer.map(|body| TrackedBody { body: Box::pin(body), guard: Some(guard) }))
        })
    }
}

/// A body that is counted until it ends or is dropped.
#[derive(Debug)]
pub struct TrackedBody<B> {
    body: Pin<Box<B>>,
    guard: Option<Guard>,
}

impl<B: Body> Body for TrackedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let polled = self.body.as_mut().poll_frame(cx);
        if matches!(polled, Poll::Ready(None)) {
            self.guard = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
