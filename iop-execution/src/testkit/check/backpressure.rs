//! Decides whether a provider waits for a reader that has stopped: neither gives up, nor spins, nor loses anything.

use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::FutureExt;
use tokio::time::timeout;

use super::{Checker, Found};
use crate::pipe::Pipe;
use crate::provider::ProviderError;
use crate::sink::{EventSink, HeadSink};
use crate::testkit::{run_request, tunnel_request};

/// More polls than this while nothing can be pushed is a spin.
const MAX_IDLE_POLLS: u64 = 10_000;

pub(super) async fn run(checker: &Checker) -> Found {
    let pipe = Pipe::new();
    let mut sink = EventSink::new(Arc::clone(&pipe));
    let request = run_request(&checker.options.target, checker.options.input.clone());
    let call = checker.provider.execute(request, &mut sink);
    stopped_reader(checker, &pipe, call).await
}

pub(super) async fn tunnel(checker: &Checker) -> Found {
    let pipe = Pipe::new();
    let head = HeadSink::new(Arc::clone(&pipe));
    let request = tunnel_request(&checker.options.target, checker.options.input.raw().clone(), true);
    let call = checker.provider.tunnel(request, head);
    stopped_reader(checker, &pipe, call).await
}

async fn stopped_reader<T, P>(
    checker: &Checker,
    pipe: &Pipe<P>,
    call: impl Future<Output = Result<T, ProviderError>>,
) -> Found {
    let mut call = pin!(AssertUnwindSafe(call).catch_unwind());
    let mut polls = 0_u64;
    let held = poll_fn(|cx| {
        polls += 1;
        call.as_mut().poll(cx)
    });
    match timeout(checker.options.close_within, held).await {
        Ok(Ok(Ok(_))) => return Ok("too little output to fill a pipe".to_owned()),
        Ok(Ok(Err(error))) => return Err(format!("gave up while nobody read: {error}")),
        Ok(Err(_)) => return Err("panicked while nobody read".to_owned()),
        Err(_) if polls > MAX_IDLE_POLLS => return Err(format!("was polled {polls} times while nobody read")),
        Err(_) => {}
    }
    // The reader goes on: everything must arrive, to the end.
    let mut read = 0_u64;
    let rest = poll_fn(|cx| {
        loop {
            let ended = call.as_mut().poll(cx);
            let before = read;
            while pipe.pop().is_some() {
                read += 1;
            }
            match ended {
                Poll::Ready(outcome) => return Poll::Ready(outcome),
                Poll::Pending if read == before && pipe.poll_ready(cx).is_pending() => return Poll::Pending,
                Poll::Pending => {}
            }
        }
    });
    match timeout(checker.options.patience, rest).await {
        Ok(Ok(Ok(_))) => Ok(format!("waited, then {read} emissions")),
        Ok(Ok(Err(error))) => Err(format!("failed when reading went on: {error}")),
        Ok(Err(_)) => Err("panicked when reading went on".to_owned()),
        Err(_) => Err("did not go on when reading went on".to_owned()),
    }
}
