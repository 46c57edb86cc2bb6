use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use iop_execution::{FinishReason, RunEventKind};
use iop_wire::{RunNumber, ToEdge, ToNode};
use tokio::sync::mpsc;

use super::script::*;
use crate::api::Submit;
use crate::edge::Edge;

/// A small generator: the same steps for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Answers every request after a while, and every cancel, until it is told to break the link.
async fn serve(mut node: Node, mut stop: mpsc::Receiver<()>, mut random: Random) {
    let mut open: Vec<(RunNumber, u64)> = Vec::new();
    loop {
        tokio::select! {
            _ = stop.recv() => return node.cut().await,
            message = node.try_recv() => match message {
                None => return,
                Some(ToNode::Run(request)) => {
                    node.send(ToEdge::Accepted(request.head.run));
                    open.push((request.head.run, 1));
                }
                Some(ToNode::Cancel(run, reason)) => {
                    if let Some(at) = open.iter().position(|(number, _)| *number == run) {
                        let (run, n) = open.swap_remove(at);
                        node.event(run, n, RunEventKind::Cancelled(reason));
                    }
                }
                Some(_) => {}
            },
            () = tokio::time::sleep(Duration::from_millis(1 + random.below(20))), if !open.is_empty() => {
                let at = usize::try_from(random.below(open.len() as u64)).unwrap();
                let (run, n) = open[at];
                if random.below(3) == 0 {
                    open.swap_remove(at);
                    node.event(run, n, RunEventKind::Complete(FinishReason::Stop));
                } else {
                    open[at].1 += 1;
                    node.event(run, n, delta("x"));
                }
            }
        }
    }
}

async fn client(edge: Edge, seed: u64) {
    let mut random = Random(seed * 2_654_435_761 + 1);
    let model = ["any", "only-a", "long"][usize::try_from(random.below(3)).unwrap()];
    let limit = Duration::from_millis(random.below(120));
    let deadline = (random.below(4) == 0).then(|| (tokio::time::Instant::now() + limit * 2).into_std());
    let request = Submit { deadline, ..to(model) };
    let work = async {
        let Ok((_, mut stream)) = edge.submit_run(request, Bytes::from_static(INPUT)).await else { return };
        let mut expected = 1;
        let mut terminals = 0;
        while let Some(event) = stream.next().await {
            assert_eq!(event.seq, expected, "I3: no gap");
            expected += 1;
            assert_eq!(terminals, 0, "I2: nothing after the terminal");
            terminals += u32::from(event.kind.is_terminal());
        }
        assert_eq!(terminals, 1, "I1: one terminal");
    };
    // Dropped wherever it is by then.
    let _dropped = tokio::time::timeout(limit, work).await;
}

#[tokio::test(start_paused = true)]
async fn a_thousand_clients_that_leave_anywhere_leave_nothing_behind() {
    // EDG-3, LEA-4, LEA-7, FEN-2
    let edge = edge();
    let mut clients = tokio::task::JoinSet::new();
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let mut nodes: [Option<(mpsc::Sender<()>, tokio::task::JoinHandle<()>)>; 2] = [None, None];
    for seed in 0..1000 {
        for (at, slot) in nodes.iter_mut().enumerate() {
            match slot {
                None => {
                    let node = Node::connect(&edge, ["n1", "n2"][at]).await;
                    let (stop, stopped) = mpsc::channel(1);
                    *slot = Some((stop, tokio::spawn(serve(node, stopped, Random(seed + 7)))));
                }
                Some((stop, task)) if random.below(60) == 0 => {
                    stop.send(()).await.unwrap();
                    task.await.unwrap();
                    *slot = None;
                }
                Some(_) => {}
            }
        }
        clients.spawn(client(edge.clone(), seed));
        tokio::time::sleep(Duration::from_millis(random.below(10))).await;
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_at_rest(&edge);
    for (stop, task) in nodes.into_iter().flatten() {
        stop.send(()).await.unwrap();
        task.await.unwrap();
    }
    assert_at_rest(&edge);
}
