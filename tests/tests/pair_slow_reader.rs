//! Decides what a slow client, and a slow provider, cost: bounded bytes, nobody else's time, in virtual time.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use iop_edge_core::openai::OpenAiConfig;
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{
    Capabilities, Completion, EventSink, FinishReason, FrameFlags, HeadSink, Provider, ProviderError, RunRequest,
    TunnelEnd, TunnelRequest, async_trait,
};
use iop_tests::answer::{Outcome, read};
use iop_tests::pair::{Pair, PairPlan, PairProvider};
use iop_tests::wire_client::Request;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// Text of one push.
const PART: usize = 4 * 1024;
/// What one run may hold on its way: window, the Node's queue, a chunk here and there (WIR-7).
const HELD: usize = 256 * 1024;

/// Talks without end, and counts what was taken from it.
#[derive(Debug, Default)]
struct Talker {
    taken: AtomicUsize,
    active: AtomicUsize,
}

struct Active<'a>(&'a AtomicUsize);

impl<'a> Active<'a> {
    fn enter(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Provider for Talker {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only().with_tunnels()
    }

    async fn execute(&self, _run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        let _active = Active::enter(&self.active);
        for _ in 0..100_000 {
            sink.delta("x".repeat(PART)).await?;
            self.taken.fetch_add(PART, Ordering::SeqCst);
        }
        Ok(Completion::new(FinishReason::Stop))
    }

    async fn tunnel(&self, _request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        let _active = Active::enter(&self.active);
        let mut headers = http::HeaderMap::new();
        headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("text/event-stream"));
        let mut body = head.head(http::StatusCode::OK, headers).await?;
        let text = "x".repeat(PART);
        let event = format!(
            "data: {{\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",             \"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
        );
        for _ in 0..100_000 {
            body.data(event.clone().into(), FrameFlags::CONTENT).await?;
            self.taken.fetch_add(PART, Ordering::SeqCst);
        }
        Ok(body.finish())
    }
}

/// An endless provider (models `tunnel` and `run`) beside one that says 1 MiB and ends (`lively`).
async fn pair() -> (Pair, Arc<Talker>) {
    let talker = Arc::new(Talker::default());
    let shared = || -> Arc<dyn Provider> { Arc::<Talker>::clone(&talker) };
    let lively = (0..256).fold(Script::new(), |script, _| script.delta("x".repeat(PART)));
    let (lively, _) = ScriptedProvider::new(lively).with_tunnels().into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", shared(), 4, &["tunnel"]),
        PairProvider::new("r", shared(), 4, &["run"]).by_run(),
        PairProvider::new("l", lively, 64, &["lively"]),
    ]);
    (Pair::start(plan).await, talker)
}

#[tokio::test(start_paused = true)]
async fn one_stopped_reader_among_32_holds_its_window_and_delays_nobody() {
    // WIR-7, WIR-9, WIR-16; field reports 40, 43
    for model in ["tunnel", "run"] {
        let (pair, talker) = pair().await;
        let mut stopped = pair.begin(&Request::chat(model, true)).await;
        stopped.piece().await.unwrap();
        sleep(Duration::from_secs(1)).await;
        let held = talker.taken.load(Ordering::SeqCst);
        assert!((PART..HELD).contains(&held), "{model}: {held} bytes were taken for a client that reads nothing");
        let mut others = JoinSet::new();
        let start = Instant::now();
        (0..31).for_each(|_| {
            others.spawn(pair.ask(&Request::chat("lively", true)));
        });
        while let Some(answer) = others.join_next().await {
            let Outcome::Whole { text } = read(&answer.unwrap()) else { panic!("an answer") };
            assert_eq!(text.len(), 256 * PART);
        }
        assert!(
            start.elapsed() < Duration::from_millis(50),
            "nothing waits for the stopped one: {:?}",
            start.elapsed()
        );
        assert_eq!(talker.taken.load(Ordering::SeqCst), held, "{model}: not a byte more");
        // It goes on as soon as the client does.
        for _ in 0..200 {
            stopped.piece().await.unwrap();
        }
        assert!(talker.taken.load(Ordering::SeqCst) > held);
        drop(stopped);
        pair.at_rest().await;
        assert_eq!(talker.active.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_nothing_for_60_s_is_cancelled_and_one_that_sips_is_not() {
    // WIR-16, EXE-10; field reports 3, 43
    for model in ["tunnel", "run"] {
        let (pair, talker) = pair().await;
        let mut sipping = pair.begin(&Request::chat(model, true)).await;
        let mut stopped = pair.begin(&Request::chat(model, true)).await;
        stopped.piece().await.unwrap();
        let last = Instant::now();
        while talker.active.load(Ordering::SeqCst) == 2 {
            sipping.piece().await.expect("one sip every 20 s is enough");
            sleep(Duration::from_secs(20)).await;
            assert!(last.elapsed() < Duration::from_secs(120), "{model}: it is never cancelled");
        }
        assert!(last.elapsed() >= Duration::from_secs(60), "{model}: after {:?}", last.elapsed());
        let end = timeout(Duration::from_secs(1), stopped.rest()).await.expect("its end is there at once");
        let Outcome::Failed { code, .. } = read(&end) else { panic!("{:?}", read(&end)) };
        assert_eq!(code.as_deref(), Some("slow_client"), "{model}");
        for _ in 0..10 {
            sleep(Duration::from_secs(30)).await;
            sipping.piece().await.expect("it goes on for ever");
        }
        drop(sipping);
        pair.at_rest().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_may_take_hours_as_long_as_it_goes_on() {
    // API-14, WDG-2, REC-8; surfaces 4: rows 7, 33. No limit of a whole stream by default, only of its gaps, and no comment of
    // the Edge once the first content is there.
    const GAP: Duration = Duration::from_secs(240);
    let slow = (0..60).fold(Script::new(), |script, _| script.wait(GAP).delta("x"));
    let (tunnels, _) = ScriptedProvider::new(slow.clone()).with_tunnels().into_parts();
    let (runs, _) = ScriptedProvider::new(slow).into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", tunnels, 1, &["tunnel"]),
        PairProvider::new("r", runs, 1, &["run"]).by_run(),
    ]);
    let pair = Pair::start(plan.openai(OpenAiConfig::default())).await;
    let start = Instant::now();
    let ask = async |model: &str| {
        let answer = pair.ask(&Request::chat(model, true)).await;
        let text = answer.text();
        let content = text.find("\"content\":\"x\"").expect("some content");
        let waited = text.match_indices(": waiting").map(|(at, _)| at).collect::<Vec<_>>();
        assert!(waited.len() > 3 && waited.iter().all(|at| *at < content), "{model}: {waited:?} {content}");
        read(&answer)
    };
    let (tunnel, run) = tokio::join!(ask("tunnel"), ask("run"));
    assert_eq!(tunnel, Outcome::Whole { text: "x".repeat(60) });
    assert_eq!(run, tunnel);
    assert!(start.elapsed() >= GAP * 60, "four hours");
}

#[tokio::test(start_paused = true)]
async fn thirty_clients_that_leave_large_streams_at_once_disturb_nobody() {
    // LEA-3, WIR-12; surfaces 4: row 31
    let talker = Arc::new(Talker::default());
    let (other, _) = ScriptedProvider::new(Script::new().delta("whole")).with_tunnels().into_parts();
    let pair = Pair::start(PairPlan::new(vec![
        PairProvider::new("talker", Arc::clone(&talker) as Arc<dyn Provider>, 30, &["endless"]),
        PairProvider::new("other", other, 1, &["m"]),
    ]))
    .await;
    let mut open = Vec::new();
    for _ in 0..30 {
        let mut exchange = pair.begin(&Request::chat("endless", true)).await;
        exchange.piece().await.unwrap();
        open.push(exchange);
    }
    assert_eq!(talker.active.load(Ordering::SeqCst), 30);
    drop(open);
    let asked = timeout(Duration::from_secs(1), pair.ask(&Request::chat("m", true)));
    assert_eq!(read(&asked.await.expect("at once")), Outcome::Whole { text: "whole".to_owned() });
    // It is their leaving that frees the places, not the bound of clients that read nothing.
    timeout(Duration::from_secs(1), pair.at_rest()).await.expect("at once");
    assert_eq!(talker.active.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_hundred_seconds_of_prefill_and_a_slow_reader_trip_nothing() {
    // NOD-2, WIR-12, WIR-16, EXE-13; field reports 3, 13, 14, 16, 18
    let long = (0..500).fold(Script::new().wait(Duration::from_secs(100)), |script, _| script.delta("x".repeat(PART)));
    let (tunnels, _) = ScriptedProvider::new(long.clone()).with_tunnels().into_parts();
    let (runs, _) = ScriptedProvider::new(long).into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", tunnels, 1, &["tunnel"]),
        PairProvider::new("r", runs, 1, &["run"]).by_run(),
    ]);
    let pair = Pair::start(plan).await;
    let slow = async |model: &str| {
        let start = Instant::now();
        let mut exchange = pair.begin(&Request::chat(model, true)).await;
        assert!(start.elapsed() >= Duration::from_secs(100));
        let (head, mut pieces) = (exchange.head.clone(), Vec::new());
        let end = loop {
            match exchange.piece().await {
                Ok(piece) => pieces.push(piece),
                Err(end) => break end,
            }
            sleep(Duration::from_millis(500)).await;
        };
        let Outcome::Whole { text } = read(&iop_tests::wire_client::Answer { head, pieces, end }) else {
            panic!("{model}: an answer")
        };
        assert_eq!(text.len(), 500 * PART);
    };
    tokio::join!(slow("tunnel"), slow("run"));
    assert_eq!(pair.connections(0), 1);
    pair.at_rest().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_lives_for_days() {
    // WIR-12; field report 70
    let (provider, _) = ScriptedProvider::new(Script::text("a")).into_parts();
    let pair = Pair::start(PairPlan::new(vec![PairProvider::new("p", provider, 1, &["m"])])).await;
    sleep(Duration::from_secs(3 * 86_400)).await;
    assert!(pair.is_connected(0));
    assert_eq!(pair.connections(0), 1);
    assert_eq!(read(&pair.ask(&Request::chat("m", true)).await), Outcome::Whole { text: "a".to_owned() });
}
