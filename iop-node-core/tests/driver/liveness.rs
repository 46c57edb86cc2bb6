use std::time::Duration;

use iop_execution::RunEventKind;
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_wire::*;
use tokio::time::Instant;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_mute_prefill_of_100_seconds_trips_nothing() {
    // NOD-2, WIR-12
    for secs in [6, 100] {
        let script = Script::new().wait(Duration::from_secs(secs)).delta("at last");
        let (mut node, _) = Harness::scripted(ScriptedProvider::new(script));
        let mut conn = node.ready().await;
        conn.answers_pings = false;
        conn.run_without_pings(1).await;
        let began = Instant::now();
        let (mut pings, mut pongs, mut asked) = (0, 0, 0);
        let mut ask = tokio::time::interval(Duration::from_secs(30));
        let mut kinds = Vec::new();
        while !kinds.last().is_some_and(RunEventKind::is_terminal) {
            tokio::select! {
                _ = ask.tick() => {
                    asked += 1;
                    conn.send(ToNode::Ping(Ping { nonce: asked }));
                }
                message = conn.next() => match message {
                    ToEdge::Ping(ping) => {
                        pings += 1;
                        conn.send(ToNode::Pong(Pong { nonce: ping.nonce, edge_time_ms: 1 }));
                    }
                    ToEdge::Pong(pong) => {
                        pongs += 1;
                        assert_eq!(pong.nonce, pongs);
                    }
                    ToEdge::Event(RunNumber(1), event) => kinds.push(event.kind),
                    other => panic!("{other:?}"),
                },
            }
        }
        assert_eq!(began.elapsed(), Duration::from_secs(secs));
        assert!(matches!(kinds.pop(), Some(RunEventKind::Complete(_))));
        if secs == 100 {
            assert!(pings >= 3 && pongs >= 3, "{pings} {pongs}");
        }
        assert_eq!(node.record.lines()[..2], ["connected", "ready"]);
        assert!(!node.record.lines().iter().any(|line| line.starts_with("closed")));
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_lives_for_ever() {
    // WIR-12
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    assert!(conn.is_silent(Duration::from_secs(86_400)).await);
    conn.run(1).await;
    assert_eq!(conn.rest(1).await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn an_edge_that_answers_no_ping_or_a_wrong_one_is_left_and_dialled_again() {
    // WIR-12, W16
    for wrong in [false, true] {
        let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::new().hang()));
        let mut conn = node.ready().await;
        conn.answers_pings = false;
        conn.run_without_pings(1).await;
        let mut first = None;
        // What the Edge says otherwise keeps nothing alive: only pongs count.
        while let Some(message) = conn.try_next().await {
            if let ToEdge::Ping(ping) = message {
                first.get_or_insert_with(Instant::now);
                conn.send(ToNode::Ping(Ping { nonce: 1 }));
                if wrong {
                    conn.send(ToNode::Pong(Pong { nonce: ping.nonce + 1000, edge_time_ms: 1 }));
                }
            }
        }
        assert_eq!(first.unwrap().elapsed(), Duration::from_secs(45));
        drop(conn);
        node.accept().await;
        assert_eq!(calls.counts().active, 0);
        assert!(node.record.lines().contains(&"closed heartbeat_timeout".to_owned()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_busy_in_every_way_still_answers_a_ping_at_once() {
    // FEN-7, WIR-12; field report 9: only a Node that is really frozen is silent
    let fakes = crate::fakes::Fakes::new(Script::new().ignore_cancel());
    let factory = std::sync::Arc::clone(&fakes);
    let mut node = Harness::with(|node| node.factory(factory));
    let mut conn = node.accept().await;
    conn.register(vec![ProviderConfig { capacity: 24, ..crate::fakes::fake("a", "ok") }]).await;
    conn.get_ready().await;
    let instance = fakes.newest("a");
    for number in 1..=24 {
        conn.send_run(DispatchHead { provider_id: iop_execution::ProviderId::new("p-a").unwrap(), ..head(number) });
        conn.expect_accepted(number).await;
        assert_eq!(conn.event(number).await.kind, RunEventKind::Start);
    }
    instance.answers(None);
    instance.wait_for(|counts| counts.asking == 1).await;
    conn.push(6, vec![crate::fakes::fake("b", "hang")]);
    settle().await;
    conn.answers_pings = false;
    let began = Instant::now();
    conn.send(ToNode::Ping(Ping { nonce: 77 }));
    loop {
        match conn.next().await {
            ToEdge::Pong(pong) => break assert_eq!(pong.nonce, 77),
            ToEdge::Ping(ping) => conn.send(ToNode::Pong(Pong { nonce: ping.nonce, edge_time_ms: 1 })),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
}
