//! What one token costs in each part it passes: envelope, scheduler, observer, sink to stream.
//!
//! `cargo bench -p iop-benches`. Names are stable; results with machine and command are in `docs/performance.md`.

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use futures_util::StreamExt;
use iop_adapters::observer::Observer;
use iop_execution::{
    AdapterKey, Capabilities, ChatInput, Completion, EventSink, FinishReason, FrameFlags, Provider, ProviderError,
    RunEvent, RunEventKind, RunId, RunRequest, RunStream, Target, TunnelFrame, async_trait,
};
use iop_wire::convert::WireMessage;
use iop_wire::{Outbox, RunNumber, Sequenced, ToEdge};

/// One event as llama.cpp and vLLM send it.
const EVENT: &str = "data: {\"id\":\"chatcmpl-7\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"bench\",\
    \"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";

fn delta(n: u64) -> ToEdge {
    ToEdge::Event(RunNumber(7), RunEvent { seq: n, kind: RunEventKind::Delta(" tok".into()), usage: None })
}

fn frame(n: u64) -> ToEdge {
    let bytes = Bytes::from_static(EVENT.as_bytes());
    ToEdge::Frame(RunNumber(7), n, TunnelFrame::Body { bytes, flags: FrameFlags::CONTENT })
}

fn envelope(c: &mut Criterion) {
    let mut group = c.benchmark_group("envelope");
    for (name, message) in [("delta", delta(9)), ("tunnel_frame", frame(9))] {
        let encoded = Sequenced { seq: 1_000, message: message.clone() };
        let bytes = ToEdge::encode(encoded.clone()).unwrap_or_default();
        println!("envelope/{name}: {} bytes encoded", bytes.len());
        group.bench_function(format!("encode_{name}"), |b| {
            b.iter_batched(|| encoded.clone(), |message| black_box(ToEdge::encode(message)), BatchSize::SmallInput);
        });
        group.bench_function(format!("decode_{name}"), |b| b.iter(|| black_box(ToEdge::decode(bytes.clone()))));
    }
    group.finish();
}

/// 64 runs push a frame each, all are written, credit comes back.
fn scheduler(c: &mut Criterion) {
    const RUNS: u64 = 64;
    let mut group = c.benchmark_group("scheduler");
    group.throughput(Throughput::Elements(RUNS));
    let mut outbox = Outbox::<ToEdge>::new();
    let keys: Vec<_> = (1..=RUNS).map(|run| outbox.open(RunNumber(run), 128 * 1024)).collect();
    group.bench_function("push_pop_64_runs", |b| {
        b.iter(|| {
            for key in &keys {
                outbox.push(*key, frame(0));
            }
            while let Some(message) = outbox.pop() {
                black_box(message);
            }
            for key in &keys {
                let _ = outbox.grant(*key, 256);
            }
        });
    });
    group.finish();
}

/// One read of a body through the SSE parser and the classifier.
fn observer(c: &mut Criterion) {
    let mut group = c.benchmark_group("observer");
    for events in [1_usize, 16] {
        let chunk = Bytes::from(EVENT.repeat(events));
        group.throughput(Throughput::Elements(events as u64));
        group.bench_function(format!("{events}_events_per_read"), |b| {
            b.iter_batched_ref(
                || Observer::new(1),
                |observer| {
                    observer.feed(chunk.clone());
                    while let Some(seen) = observer.next() {
                        black_box(&seen);
                    }
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

#[derive(Debug)]
struct Burst(usize);

#[async_trait]
impl Provider for Burst {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only()
    }

    async fn execute(&self, _: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        for _ in 0..self.0 {
            sink.delta(" tok").await?;
        }
        Ok(Completion::new(FinishReason::Stop))
    }
}

/// A provider's pushes as the events a caller reads, in one task.
fn sink_to_stream(c: &mut Criterion) {
    const DELTAS: usize = 1_000;
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let provider: Arc<dyn Provider> = Arc::new(Burst(DELTAS));
    let input = ChatInput::parse("{}").expect("an object");
    let (adapter, target) = (AdapterKey::new("a").expect("a key"), Target::new("t").expect("a name"));
    let request = RunRequest::new(RunId::from_bytes([0; 16]), adapter, target, input);
    let mut group = c.benchmark_group("sink_to_stream");
    group.throughput(Throughput::Elements(DELTAS as u64));
    group.bench_function("1000_deltas", |b| {
        b.iter(|| {
            let events = RunStream::local(Arc::clone(&provider), request.clone());
            runtime.block_on(events.for_each(|event| {
                black_box(event);
                std::future::ready(())
            }));
        });
    });
    group.finish();
}

criterion_group!(benches, envelope, scheduler, observer, sink_to_stream);
criterion_main!(benches);
