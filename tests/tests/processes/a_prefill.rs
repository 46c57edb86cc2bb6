//! Decides whether long silence of a provider, and slowness of a client, are taken for what they are: nothing wrong.
//!
//! It runs beside everything else; its name makes it the first to start.

use std::time::{Duration, Instant};

use iop_execution::testkit::{Answer, ScriptedBackend};
use iop_tests::answer::{Outcome, read};
use iop_tests::fleet::Fleet;
use iop_tests::wire_client::{Answer as Got, Connection, Request, ask};

use crate::{chats, finish, fleet, provider, says};

/// Text of one event of the long answer.
const PART: usize = 4 * 1024;
/// How many there are: more than all windows and socket buffers on the way hold.
const PARTS: usize = 2_000;
/// What the slow reader takes at a time, and how long it rests after that.
const SIP: usize = 256 * 1024;
const REST: Duration = Duration::from_millis(150);

fn mute_then_long(mute: Duration) -> Answer {
    let part = says(&"x".repeat(PART));
    (0..PARTS).fold(Answer::events().wait(mute), |answer, _| answer.write(part.clone())).write(finish())
}

async fn read_slowly(fleet: &Fleet, model: &str, mute: Duration) {
    let start = Instant::now();
    let mut client = Connection::open_small(fleet.openai(), 32 * 1024).await;
    client.send(&Request::chat(model, true)).await;
    let head = tokio::time::timeout(mute + Duration::from_secs(20), client.try_head()).await;
    let head = head.expect("a head after the prefill").expect("a head before the connection ends");
    assert!(start.elapsed() >= mute);
    let (mut pieces, mut sip) = (Vec::new(), 0);
    let end = loop {
        match client.piece().await {
            Ok(piece) => {
                sip += piece.bytes.len();
                pieces.push(piece);
            }
            Err(end) => break end,
        }
        if sip >= SIP {
            sip = 0;
            tokio::time::sleep(REST).await;
        }
    };
    match read(&Got { head, pieces, end }) {
        Outcome::Whole { text } => assert_eq!(text.len(), PART * PARTS),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_mute_prefill_of_6_s_and_one_of_100_s_and_then_a_slow_reader_trip_nothing() {
    // Field report T4: no hidden wall of 30 s, and no broken body without an error.
    // NOD-2, WIR-12, WIR-16, EXE-10; field reports 13, 14, 16, 20, 21
    let (short, long) = (Duration::from_secs(6), Duration::from_secs(100));
    let backend = ScriptedBackend::builder()
        .model("short", mute_then_long(short))
        .model("long", mute_then_long(long))
        .start()
        .await
        .unwrap();
    let fleet = fleet(provider(&backend, 4, &["short", "long"])).await;

    let watch = async {
        loop {
            let answer = ask(fleet.openai(), &Request::get("/readyz")).await;
            assert_eq!(answer.status(), 200, "the Node stays connected and healthy all along");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::select! {
        _ = async { tokio::join!(read_slowly(&fleet, "short", short), read_slowly(&fleet, "long", long)) } => {}
        () = watch => {}
    }

    assert_eq!(backend.traffic().client_closed, 0, "nothing was cancelled");
    assert_eq!(chats(&backend), 2);
    fleet.at_rest().await;
    let metrics = fleet.metrics().await;
    assert_eq!(metrics.sum("iop_node_connections_total", &[]), 1.0, "one connection all along");
}
