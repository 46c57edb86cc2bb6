//! Decides when a client that still waits counts as gone: it was given nothing for as long as it said it would wait.
//!
//! This is the client-idle timer (EXE-10). It runs only while the client has taken everything and waits; the hard deadline
//! and the queue's timeout are others' and go on beside it.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::HeaderMap;
use tokio::time::{Instant, Sleep, sleep};

use crate::openai::config::MAX_CLIENT_IDLE;

/// How long a client waits for the next byte, in seconds; openai-python sends it.
const HEADER: &str = "x-stainless-read-timeout";

/// The timer of one request. Without a limit it never runs.
#[derive(Debug)]
pub(crate) struct ClientIdle {
    limit: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
    waits: bool,
}

impl ClientIdle {
    /// With the limit that the client told. What is no positive number is ignored, for it is a hint, not a field.
    pub(crate) fn told_by(headers: &HeaderMap) -> Self {
        let seconds = headers.get(HEADER).and_then(|value| value.to_str().ok()?.trim().parse::<f64>().ok());
        let seconds = seconds.filter(|seconds| seconds.is_finite());
        // Too large for a duration is longer than the cap too.
        let limit = seconds.map(|seconds| match Duration::try_from_secs_f64(seconds) {
            Ok(limit) => limit.min(MAX_CLIENT_IDLE),
            Err(_) if seconds > 0.0 => MAX_CLIENT_IDLE,
            Err(_) => Duration::ZERO,
        });
        Self { limit: limit.filter(|limit| !limit.is_zero()), timer: None, waits: false }
    }

    /// The client got bytes: its next wait is a new one.
    pub(crate) const fn gave(&mut self) {
        self.waits = false;
    }

    /// There is nothing to give. Ready when that has lasted too long.
    pub(crate) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(limit) = self.limit else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        if !std::mem::replace(&mut self.waits, true) {
            timer.as_mut().reset(Instant::now() + limit);
        }
        timer.as_mut().poll(cx)
    }
}
