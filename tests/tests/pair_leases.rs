//! Decides whether a place is given back exactly once, whenever and however a request ends, in virtual time.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "all of it is test code: a broken assumption fails the test"
)]

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use iop_edge_core::api::{CancelRun, Submit, SubmitError};
use iop_execution::testkit::{Script, ScriptHandle, ScriptedProvider};
use iop_execution::{CancelReason, FrameFlags, ModelName, RunEventKind, Target};
use iop_tests::answer::{Outcome, read};
use iop_tests::pair::{Pair, PairPlan, PairProvider};
use iop_tests::wire_client::{Request, chat_body};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, advance, sleep, timeout};

/// A provider with so many places by tunnel (`t`), and one by run (`r`), each with its own gate and handle. Streams begin
/// with "some" if it is `talking`, whole answers with half a JSON object; both go on with `then`.
async fn pair(talking: bool, then: impl Fn(Script) -> Script, capacity: u32) -> (Pair, [ScriptHandle; 2]) {
    let (mut stream, mut whole) = (Script::new(), Script::new());
    if talking {
        stream = stream.delta("some");
        whole = whole.head(http::StatusCode::OK, "application/json").frame("{\"id\":", FrameFlags::CONTENT);
    }
    let (stream, whole) = (then(stream), then(whole));
    let tunnels = ScriptedProvider::new(stream.clone()).with_tunnels();
    let (tunnels, tunnel_calls) = tunnels.on_target(Target::new("tunnel-whole").unwrap(), whole).into_parts();
    let (runs, run_calls) = ScriptedProvider::new(stream).into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", tunnels, capacity, &["tunnel", "tunnel-whole"]),
        PairProvider::new("r", runs, capacity, &["run"]).by_run(),
    ]);
    (Pair::start(plan).await, [tunnel_calls, run_calls])
}

/// Model, streamed, and which handle sees it.
const CELLS: [(&str, bool, usize); 4] =
    [("tunnel", true, 0), ("tunnel-whole", false, 0), ("run", true, 1), ("run", false, 1)];

/// Bounds a wait for something that must happen: a paused clock runs out of other things to do.
async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(3_600), future).await.expect("it happens")
}

#[tokio::test(start_paused = true)]
async fn leaving_frees_the_place_in_every_stage() {
    // EDG-3, EXE-4, LEA-4, LEA-7, NOD-4; field reports 23, 24, 26, 33, 38, 40
    type Then = fn(Script) -> Script;
    let stages: [(&str, bool, Then, Duration); 4] = [
        ("prefill", false, Script::hang, Duration::ZERO),
        ("decode", true, Script::hang, Duration::ZERO),
        ("slow to stop", true, |script| script.hang_then_linger(Duration::from_secs(3)), Duration::from_secs(3)),
        ("deaf", true, Script::ignore_cancel, Duration::from_secs(5)),
    ];
    for (stage, talking, then, bound) in stages {
        let (pair, handles) = pair(talking, then, 2).await;
        for (model, stream, handle) in CELLS {
            let handle = &handles[handle];
            let before = handle.counts().calls;
            let asked = tokio::spawn(pair.begin(&Request::chat(model, stream)));
            soon(handle.wait_for(|counts| counts.active == 1 && counts.calls == before + 1)).await;
            if stream && talking {
                let mut exchange = soon(asked).await.unwrap();
                exchange.piece().await.unwrap();
                drop(exchange);
            } else {
                asked.abort();
            }
            let left = Instant::now();
            pair.at_rest().await;
            let after = left.elapsed();
            assert_eq!(handle.counts().active, 0, "{stage} {model}: the place is free only when the call is over");
            assert!(after >= bound && after < bound + Duration::from_millis(100), "{stage} {model}: {after:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_lets_the_next_one_in_only_when_the_backend_has_stopped() {
    // LEA-6, LEA-5; field reports 26, 27
    let script = Script::new().delta("some").hang_then_linger(Duration::from_secs(4));
    let (provider, handle) = ScriptedProvider::new(script).then(Script::text("second")).into_parts();
    let pair = Pair::start(PairPlan::new(vec![PairProvider::new("p", provider, 1, &["m"])])).await;
    let mut first = pair.begin(&Request::chat("m", true)).await;
    first.piece().await.unwrap();
    let second = tokio::spawn(pair.ask(&Request::chat("m", true)));
    pair.until("the second one waits", |snapshot| snapshot.models[0].waiting == 1).await;
    drop(first);
    let left = Instant::now();
    let answer = second.await.unwrap();
    assert_eq!(read(&answer), Outcome::Whole { text: "second".to_owned() });
    assert!(left.elapsed() >= Duration::from_secs(4));
    assert_eq!(handle.counts().max_active, 1);
    pair.at_rest().await;
}

#[tokio::test(start_paused = true)]
async fn leaving_the_queue_leaves_nothing_behind() {
    // QUE-2, EDG-3; field report 35
    let (pair, handles) = pair(true, Script::hang, 1).await;
    for (model, handle) in ["tunnel", "run"].into_iter().zip(&handles) {
        let mut running = pair.begin(&Request::chat(model, true)).await;
        running.piece().await.unwrap();
        let mut waiters: Vec<_> = (0..50).map(|n| tokio::spawn(pair.ask(&Request::chat(model, n % 2 == 0)))).collect();
        pair.until("all wait", |snapshot| snapshot.models.iter().any(|model| model.waiting == 50)).await;
        waiters.drain(..).for_each(|waiter| waiter.abort());
        pair.until("none waits", |snapshot| snapshot.models.iter().all(|model| model.waiting == 0)).await;
        drop(running);
        pair.at_rest().await;
        assert_eq!(handle.counts().calls, 1, "no waiter was dispatched");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_a_request_in_every_stage_at_its_time() {
    // API-14, EDG-1, EXE-10, LEA-6, NOD-3; field report 2: no timer waits for a chunk
    let (half, full) = (Duration::from_secs(10), Duration::from_secs(20));
    let request = |model, stream, deadline: Duration| {
        Request::chat(model, stream).header("x-iop-deadline-ms", &deadline.as_millis().to_string())
    };
    for talking in [false, true] {
        let (pair, handles) = pair(talking, Script::hang, 1).await;
        for (model, stream, handle) in CELLS {
            let start = Instant::now();
            let running = tokio::spawn(pair.ask(&request(model, stream, full)));
            pair.until("it runs", |snapshot| !snapshot.is_at_rest()).await;
            let waiting = tokio::spawn(pair.ask(&request(model, stream, half)));
            for (place, asked, deadline) in [("waiting", waiting, half), ("running", running, full)] {
                let answer = asked.await.unwrap();
                let after = start.elapsed();
                assert!(after >= deadline && after < deadline + Duration::from_millis(100), "{place}: {after:?}");
                let Outcome::Failed { status, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
                assert_eq!(code.as_deref(), Some("deadline_exceeded"), "{model} {stream} {place}");
                let committed = talking && stream && place == "running";
                assert_eq!(status, if committed { 200 } else { 504 }, "{model} {stream} {place}");
            }
            pair.at_rest().await;
            assert_eq!(handles[handle].counts().active, 0);
        }
        assert_eq!(handles.map(|handle| handle.counts().calls), [2, 2], "the waiting ones never started");
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_timeout_ends_only_the_waiter() {
    // QUE-1, QUE-2, EXE-10
    let (provider, handle) = ScriptedProvider::new(Script::new().delta("some").pause()).into_parts();
    let plan = PairPlan::new(vec![PairProvider::new("p", provider, 1, &["m"])]).queue(16, Duration::from_secs(30));
    let pair = Pair::start(plan).await;
    let running = tokio::spawn(pair.ask(&Request::chat("m", true)));
    soon(handle.wait_for(|counts| counts.paused == 1)).await;
    let start = Instant::now();
    let answer = pair.ask(&Request::chat("m", true)).await;
    let Outcome::Failed { status: 503, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
    assert_eq!(code.as_deref(), Some("queue_timeout"));
    assert!(answer.head.header("retry-after").is_some(), "API-5");
    assert!(start.elapsed() >= Duration::from_secs(30) && start.elapsed() < Duration::from_secs(31));
    handle.release();
    assert_eq!(read(&running.await.unwrap()), Outcome::Whole { text: "some".to_owned() });
    pair.at_rest().await;
}

/// A small generator: the same drops in every run of the test.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_requests_that_leave_at_any_time_leave_nothing() {
    // LEA-1, LEA-4, LEA-7, NOD-4; field reports 38, 40, 42
    let ms = Duration::from_millis;
    let script = Script::new().wait(ms(5)).delta("a").wait(ms(5)).delta("b").wait(ms(5)).delta("c");
    let (tunnels, tunnel_calls) = ScriptedProvider::new(script.clone()).with_tunnels().into_parts();
    let (runs, run_calls) = ScriptedProvider::new(script).into_parts();
    let plan = PairPlan::new(vec![
        PairProvider::new("t", tunnels, 8, &["tunnel", "tunnel-too"]),
        PairProvider::new("r", runs, 8, &["run", "run-too"]).by_run(),
    ])
    .queue(10_000, Duration::from_secs(600));
    let pair = Arc::new(Pair::start(plan).await);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut clients = JoinSet::new();
    for number in 0..1_000_u64 {
        let model = ["tunnel", "tunnel-too", "run", "run-too"][usize::try_from(random.below(4)).unwrap()];
        let request = Request::chat(model, random.below(2) == 0);
        let (begin, patience) = (random.below(1_500), random.below(60));
        let pair = Arc::clone(&pair);
        clients.spawn(async move {
            sleep(ms(begin)).await;
            // One in ten stays to its end.
            let patience = if number % 10 == 0 { Duration::from_secs(300) } else { ms(patience) };
            let answer = timeout(patience, pair.ask(&request)).await;
            answer.is_ok_and(|answer| matches!(read(&answer), Outcome::Whole { .. }))
        });
    }
    let mut completed = 0;
    while let Some(whole) = clients.join_next().await {
        completed += u32::from(whole.unwrap());
    }
    assert!(completed >= 100, "{completed}");
    pair.at_rest().await;
    for counts in [tunnel_calls.counts(), run_calls.counts()] {
        assert_eq!(counts.active, 0);
        assert!(counts.max_active <= 8, "{counts:?}");
        assert!(counts.cancels_seen > 50, "the drops did reach the provider: {counts:?}");
        assert_eq!(counts.calls, counts.returned + counts.dropped);
    }
    assert_eq!(pair.snapshot().late_releases, 0, "each place was given back once");
}

#[tokio::test(start_paused = true)]
async fn a_hung_provider_with_200_requests_holds_up_nobody_else() {
    // LEA-1, QUE-1, WIR-7; field report 4
    let (hung, _) = ScriptedProvider::new(Script::new().hang()).with_tunnels().into_parts();
    let (good, _) = ScriptedProvider::new(Script::new().wait(Duration::from_millis(10)).delta("a")).into_parts();
    let plan =
        PairPlan::new(vec![PairProvider::new("hung", hung, 100, &["a"]), PairProvider::new("good", good, 4, &["b"])])
            .queue(1_000, Duration::from_secs(10_000));
    let pair = Pair::start(plan).await;
    let _stuck: Vec<_> = (0..200).map(|_| tokio::spawn(pair.ask(&Request::chat("a", true)))).collect();
    pair.until("all are stuck", |snapshot| snapshot.models.iter().any(|model| model.waiting == 100)).await;
    for _ in 0..100 {
        let start = Instant::now();
        let answer = pair.ask(&Request::chat("b", true)).await;
        assert_eq!(read(&answer), Outcome::Whole { text: "a".to_owned() });
        assert!(start.elapsed() <= Duration::from_millis(15), "{:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn the_engine_never_sees_more_than_its_places() {
    // LEA-1, LEA-5, LEA-8, QUE-1; field report 47: 8 requests on 4 places, by two models that share the provider
    let script = Script::new().delta("a").wait(Duration::from_secs(1));
    let (provider, handle) = ScriptedProvider::new(script).into_parts();
    let pair = Pair::start(PairPlan::new(vec![PairProvider::new("p", provider, 4, &["one", "two"])])).await;
    let asked = (0..8).map(|n| pair.ask(&Request::chat(["one", "two"][n % 2], true)));
    for answer in join_all(asked).await {
        assert_eq!(read(&answer), Outcome::Whole { text: "a".to_owned() });
    }
    assert_eq!(handle.counts().max_active, 4);
    pair.at_rest().await;
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_at_once_fill_a_bounded_queue_and_the_rest_hears_when_to_come_back() {
    // QUE-2, API-5, API-15; field reports 46, T8
    let (provider, handle) = ScriptedProvider::new(Script::new().delta("a").pause()).into_parts();
    let plan = PairPlan::new(vec![PairProvider::new("p", provider, 4, &["m"])])
        .direct()
        .queue(100, Duration::from_secs(10_000));
    let pair = Pair::start(plan).await;
    let mut clients = FuturesUnordered::new();
    for number in 0..10_000_u32 {
        let asked = pair.ask(&Request::chat("m", number % 2 == 0));
        clients.push(tokio::spawn(asked));
    }
    let refused = 10_000 - 104;
    for _ in 0..refused {
        let answer = clients.next().await.unwrap().unwrap();
        let Outcome::Failed { status: 429, code, kind, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
        assert_eq!((code.as_deref(), kind.as_str()), (Some("queue_full"), "rate_limit_error"));
        let wait: u64 = answer.head.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&wait));
    }
    soon(handle.wait_for(|counts| counts.paused == 4)).await;
    assert_eq!((pair.waiting(), handle.counts().active), (100, 4));
    handle.release_all();
    while let Some(answer) = clients.next().await {
        assert_eq!(read(&answer.unwrap()), Outcome::Whole { text: "a".to_owned() });
    }
    pair.at_rest().await;
    assert_eq!((handle.counts().calls, handle.counts().max_active), (104, 4));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_by_id_reaches_that_run_only() {
    // EDG-3, EDG-1
    let (pair, handles) = pair(true, Script::pause, 4).await;
    let submit = || Submit::to_model(ModelName::new("run").unwrap());
    let body = chat_body("run", true, &json!({})).to_string();
    let (first, first_events) = pair.edge().submit_run(submit(), body.clone().into()).await.unwrap();
    let (second, second_events) = pair.edge().submit_run(submit(), body.into()).await.unwrap();
    soon(handles[1].wait_for(|counts| counts.paused == 2)).await;
    assert_ne!(first.run_id, second.run_id);
    assert_eq!(pair.edge().cancel(first.run_id), CancelRun::Cancelled);
    let last = first_events.collect::<Vec<_>>().await.pop().unwrap();
    assert_eq!(last.kind, RunEventKind::Cancelled(CancelReason::Client));
    soon(handles[1].wait_for(|counts| counts.cancels_seen == 1 && counts.paused == 1)).await;
    handles[1].release();
    let last = second_events.collect::<Vec<_>>().await.pop().unwrap();
    assert!(matches!(last.kind, RunEventKind::Complete { .. }), "{last:?}");
    for over in [first.run_id, second.run_id] {
        assert_eq!(pair.edge().cancel(over), CancelRun::UnknownRun);
    }
    pair.at_rest().await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_refuses_what_is_new_and_waits_for_what_runs() {
    // WIR-13, EDG-1, QUE-2, BIN-5; field report 79
    let (provider, handle) = ScriptedProvider::new(Script::new().delta("a").pause().delta("b")).into_parts();
    let plan = PairPlan::new(vec![PairProvider::new("p", provider, 1, &["m"])]).queue(8, Duration::from_secs(60));
    let pair = Pair::start(plan).await;
    let running = tokio::spawn(pair.ask(&Request::chat("m", true)));
    soon(handle.wait_for(|counts| counts.paused == 1)).await;
    let waiting = tokio::spawn(pair.ask(&Request::chat("m", true)));
    pair.until("one waits", |snapshot| snapshot.models[0].waiting == 1).await;
    let edge = pair.edge().clone();
    let down = tokio::spawn(async move { edge.shutdown(Duration::from_secs(30)).await });
    let waited = waiting.await.unwrap();
    for answer in [waited, pair.ask(&Request::chat("m", true)).await] {
        let Outcome::Failed { status: 503, code, .. } = read(&answer) else { panic!("{:?}", read(&answer)) };
        assert_eq!(code.as_deref(), Some("shutting_down"));
    }
    advance(Duration::from_secs(10)).await;
    assert!(!down.is_finished());
    handle.release();
    assert_eq!(read(&running.await.unwrap()), Outcome::Whole { text: "ab".to_owned() });
    timeout(Duration::from_secs(5), down).await.expect("nothing is left to wait for").unwrap();
    let body = chat_body("m", true, &json!({})).to_string();
    let submit = Submit::to_model(ModelName::new("m").unwrap());
    assert_eq!(pair.edge().submit_run(submit, body.into()).await.unwrap_err(), SubmitError::ShuttingDown);
}
