use futures_util::{FutureExt, StreamExt, stream};

use super::*;
use crate::link::memory::memory_link;
use crate::message::Ping;

/// What arrives of six messages: pings 1 and 2, accepted 3 to 6 of runs 3 to 6, with one fault at the third.
fn arriving(fault: Fault) -> Vec<Result<(u64, ToEdge), LinkError>> {
    let sent: Vec<_> = (1..=6)
        .map(|seq| {
            let message = if seq <= 2 { ToEdge::Ping(Ping { nonce: seq }) } else { ToEdge::Accepted(RunNumber(seq)) };
            Sequenced { seq, message }
        })
        .collect();
    let (edge, node) = memory_link();
    let script = move |count, _: &ToEdge| if count == 3 { fault } else { Fault::None };
    let mut at_edge =
        faulty(edge, script, Some(Box::new(|| Box::pin(std::future::ready(()))))).start(Box::pin(stream::pending()));
    let _at_node = node.start(Box::pin(stream::iter(sent)));
    std::iter::from_fn(|| at_edge.next().now_or_never().flatten())
        .map(|item| item.map(|envelope| (envelope.seq, envelope.message)))
        .collect()
}

/// The numbers and the runs (or pings) that arrive, and whether an error ends them.
fn shape(fault: Fault) -> (Vec<u64>, Vec<u64>, bool) {
    let items = arriving(fault);
    let failed = items.last().is_some_and(Result::is_err);
    let (seqs, names) = items
        .into_iter()
        .flatten()
        .map(|(seq, message)| match message {
            ToEdge::Ping(ping) => (seq, ping.nonce),
            ToEdge::Accepted(run) => (seq, run.0),
            other => panic!("{other:?}"),
        })
        .unzip();
    (seqs, names, failed)
}

#[test]
fn each_fault_does_what_it_says() {
    let all = vec![1, 2, 3, 4, 5, 6];
    let cases = [
        (Fault::None, all.clone(), all.clone(), false),
        (Fault::Delay, all.clone(), all.clone(), false),
        (Fault::Lose, vec![1, 2, 4, 5, 6], vec![1, 2, 4, 5, 6], false),
        (Fault::Swallow, vec![1, 2, 3, 4, 5], vec![1, 2, 4, 5, 6], false),
        (Fault::Repeat, vec![1, 2, 3, 3, 4, 5, 6], vec![1, 2, 3, 3, 4, 5, 6], false),
        (Fault::Corrupt, vec![1, 2], vec![1, 2], true),
        (Fault::End, vec![1, 2], vec![1, 2], false),
        (Fault::Reorder, all, vec![1, 2, 4, 3, 5, 6], false),
    ];
    for (fault, seqs, names, failed) in cases {
        assert_eq!(shape(fault), (seqs, names, failed), "{fault:?}");
    }
}

#[test]
fn messages_of_one_run_never_change_places() {
    // WIR-2
    let (edge, node) = memory_link();
    let mut at_edge = faulty(edge, |_, _: &ToEdge| Fault::Reorder, None).start(Box::pin(stream::pending()));
    let sent = (1..=3).map(|seq| Sequenced { seq, message: ToEdge::Credit(RunNumber(1), seq as u32) });
    let _at_node = node.start(Box::pin(stream::iter(sent.collect::<Vec<_>>())));
    let arrived: Vec<_> = std::iter::from_fn(|| at_edge.next().now_or_never().flatten()).map(Result::unwrap).collect();
    let credits: Vec<_> = arrived.iter().map(|envelope| envelope.message.clone()).collect();
    assert_eq!(credits, [1, 2, 3].map(|bytes| ToEdge::Credit(RunNumber(1), bytes)));
}

#[test]
fn a_delayed_message_waits_for_the_hook_and_holds_back_what_follows() {
    let (open, gate) = tokio::sync::oneshot::channel::<()>();
    let mut gate = Some(gate);
    let delay: Delay = Box::new(move || {
        let gate = gate.take();
        Box::pin(async move {
            if let Some(gate) = gate {
                let _ = gate.await;
            }
        })
    });
    let (edge, node) = memory_link();
    let script = |count, _: &ToEdge| if count == 1 { Fault::Delay } else { Fault::None };
    let mut at_edge = faulty(edge, script, Some(delay)).start(Box::pin(stream::pending()));
    let sent: Vec<_> = (1..=2).map(|seq| Sequenced { seq, message: ToEdge::Accepted(RunNumber(seq)) }).collect();
    let _at_node = node.start(Box::pin(stream::iter(sent)));
    assert!(at_edge.next().now_or_never().is_none());
    open.send(()).unwrap();
    let seqs: Vec<_> =
        std::iter::from_fn(|| at_edge.next().now_or_never().flatten()).map(|item| item.unwrap().seq).collect();
    assert_eq!(seqs, [1, 2]);
}
