use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_util::{FutureExt as _, Stream, StreamExt as _};
use iop_execution::{FinishReason, RunEventKind};

use super::script::*;
use crate::api::{CancelRun, SubmitError};
use crate::edge::Edge;

/// A waker that looks whether the engine could be called from here.
#[derive(Debug)]
struct Probe {
    edge: Edge,
    free: AtomicUsize,
    locked: AtomicUsize,
}

impl Probe {
    fn new(edge: &Edge) -> Arc<Self> {
        Arc::new(Self { edge: edge.clone(), free: AtomicUsize::new(0), locked: AtomicUsize::new(0) })
    }

    /// Since the last call: how often it was woken with the engine free, and with it locked.
    fn woken(&self) -> (usize, usize) {
        (self.free.swap(0, Ordering::Relaxed), self.locked.swap(0, Ordering::Relaxed))
    }

    fn wait_for<S: Stream + Unpin>(self: &Arc<Self>, stream: &mut S) {
        let waker = Waker::from(Arc::clone(self));
        assert!(stream.poll_next_unpin(&mut Context::from_waker(&waker)).is_pending());
    }
}

impl Wake for Probe {
    fn wake(self: Arc<Self>) {
        let count = if self.edge.shared().is_free() { &self.free } else { &self.locked };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_is_woken_while_the_engine_is_locked() {
    // EDG-1, EDG-2
    let edge = builder(crate::state::tests::catalog()).build();
    let probe = Probe::new(&edge);
    let (mut nodes, mut runs) = (edge.subscribe_nodes(), edge.subscribe_runs());
    probe.wait_for(&mut nodes);
    let mut node = Node::connect(&edge, "n1").await;
    assert_eq!(probe.woken(), (1, 0), "a subscriber of nodes");

    // A run that is cancelled: its client, and whoever reads all runs.
    let (mut stream, _) = started(&edge, &mut node, "only-a").await;
    probe.wait_for(&mut stream);
    probe.wait_for(&mut runs);
    assert_eq!(edge.cancel(stream.run_id()), CancelRun::Cancelled);
    assert_eq!(probe.woken(), (2, 0), "a cancelled run");

    node.pending().await;

    // A run whose node goes away, and a request that waits for it.
    let (mut stream, _) = started(&edge, &mut node, "long").await;
    probe.wait_for(&mut stream);
    let waker = Waker::from(Arc::clone(&probe));
    let mut waiting = pin!(run(&edge, "only-a"));
    assert!(waiting.as_mut().poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    node.cut().await;
    assert_eq!(probe.woken(), (2, 0), "a lost node");
    assert_eq!(waiting.await.unwrap_err(), SubmitError::Unavailable);

    // A request that gets its place, and the timer task.
    let mut node = Node::connect(&edge, "n1").await;
    let (_stream, number) = started(&edge, &mut node, "only-a").await;
    let mut waiting = pin!(run(&edge, "only-a"));
    assert!(waiting.as_mut().poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    node.event(number, 1, RunEventKind::Complete(FinishReason::Stop));
    settle().await;
    assert_eq!(probe.woken(), (1, 0), "a granted place");
    drop(waiting.await.unwrap());
    let mut timers = pin!(edge.drive());
    assert!(timers.as_mut().poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    probe.woken();
    let deadline = Some((tokio::time::Instant::now() + Duration::from_secs(1)).into_std());
    let request = crate::api::Submit { deadline, ..to("only-a") };
    let submitted = edge.submit_run(request, bytes::Bytes::from_static(INPUT)).await.unwrap();
    let (free, locked) = probe.woken();
    assert!(free > 0 && locked == 0, "the timer task: {free} {locked}");
    drop(submitted);
}
