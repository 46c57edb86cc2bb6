use std::sync::Arc;
use std::time::Duration;

use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{AdapterKey, CancelReason, FailureCode, ProviderId, RunEventKind};
use iop_wire::*;
use tokio::time::Instant;

use crate::fakes::{Fakes, SLOW, fake};
use crate::support::*;

/// A Node whose factory makes fakes, ready with these providers under revision 5.
async fn node_with(script: Script, providers: Vec<ProviderConfig>) -> (Harness, Conn, Arc<Fakes>) {
    let fakes = Fakes::new(script);
    let factory = Arc::clone(&fakes);
    let mut node = Harness::with(|node| node.factory(factory));
    let mut conn = node.accept().await;
    conn.register(providers).await;
    conn.get_ready().await;
    (node, conn, fakes)
}

fn on(key: &str, number: u64) -> DispatchHead {
    DispatchHead {
        provider_id: ProviderId::new(format!("p-{key}")).unwrap(),
        adapter: AdapterKey::new(key).unwrap(),
        ..head(number)
    }
}

fn ids(ack: &ConfigAck) -> Vec<&str> {
    ack.providers.iter().map(|provider| provider.provider_id.as_str()).collect()
}

async fn serves(conn: &mut Conn, key: &str, number: u64) {
    conn.send_run(on(key, number));
    conn.expect_accepted(number).await;
    assert!(matches!(conn.rest(number).await.pop(), Some(RunEventKind::Complete(_))), "{key}");
}

async fn refused(conn: &mut Conn, key: &str, number: u64) -> FailureCode {
    conn.send_run(on(key, number));
    conn.expect_accepted(number).await;
    conn.failure(number).await.code
}

#[tokio::test(start_paused = true)]
async fn a_pushed_config_keeps_what_is_unchanged_and_lets_the_rest_finish() {
    // REG-7, EXE-14
    let script = Script::text("a").pause();
    let (_node, mut conn, fakes) =
        node_with(script, vec![fake("kept", "ok"), fake("changed", "ok"), fake("gone", "ok")]).await;
    let (kept, changed, gone) = (fakes.newest("kept"), fakes.newest("changed"), fakes.newest("gone"));
    for (number, key) in [(1, "kept"), (2, "changed"), (3, "gone")] {
        conn.send_run(on(key, number));
        conn.expect_accepted(number).await;
        assert_eq!(conn.event(number).await.kind, RunEventKind::Start);
    }
    let new = ProviderConfig { base_url: "http://127.0.0.1:9".into(), ..fake("changed", "ok") };
    conn.push(6, vec![fake("added", "ok"), fake("kept", "ok"), new]);
    let ack = conn.ack().await;
    assert_eq!((ack.seen_revision, ack.applied_revision, ack.error.as_str()), (6, 6, ""));
    assert_eq!(ids(&ack), ["p-added", "p-kept", "p-changed"]);
    assert_eq!(ack.providers[0].targets[0].target.as_str(), "t");
    settle().await;
    assert_eq!(fakes.alive(), ["added", "changed", "changed", "gone", "kept"], "nothing stops while it runs something");
    assert_eq!(refused(&mut conn, "gone", 4).await, FailureCode::UnknownAdapter);
    // What ran before goes on where it is, and ends well.
    let second = fakes.newest("changed");
    assert!(!Arc::ptr_eq(&changed, &second) && Arc::ptr_eq(&kept, &fakes.newest("kept")));
    for (number, instance) in [(1, &kept), (2, &changed), (3, &gone)] {
        instance.calls.release();
        assert!(matches!(conn.rest(number).await.pop(), Some(RunEventKind::Complete(_))));
        assert_eq!(instance.calls.counts().calls, 1);
    }
    settle().await;
    assert_eq!((changed.lifecycle().stops, gone.lifecycle().stops), (1, 1), "stopped once, when they have finished");
    assert_eq!(fakes.alive(), ["added", "changed", "kept"]);
    for (number, key) in [(5, "kept"), (6, "changed"), (7, "added")] {
        fakes.newest(key).calls.release();
        serves(&mut conn, key, number).await;
    }
    assert_eq!((second.calls.counts().calls, kept.calls.counts().calls), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn one_provider_that_can_not_be_built_refuses_the_whole_revision() {
    // REG-7
    let (_node, mut conn, fakes) = node_with(Script::text("x"), vec![fake("a", "ok")]).await;
    let outside = ProviderConfig { base_url: "https://api.example.com".into(), ..fake("bad", "ok") };
    let own = ProviderConfig { kind: "custom".into(), ..fake("bad", "ok") };
    let cases = [
        (vec![fake("bad", "refuse")], "it can't", 0),
        (vec![fake("bad", "panic")], "it panicked while it started", 0),
        (vec![fake("bad", "hang")], "it did not start in time", 30),
        (vec![fake("bad", "unknown")], "no adapter of kind `unknown`", 0),
        (vec![outside], "allow_upstream", 0),
        (vec![own], "registered no provider under this adapter key", 0),
        (vec![fake("bad", "ok"), ProviderConfig { capacity: 9, ..fake("bad", "ok") }], "adapter key is taken", 0),
    ];
    for ((bad, words, takes), revision) in cases.into_iter().zip(6..) {
        let began = Instant::now();
        let changed = ProviderConfig { capacity: 7, ..fake("a", "ok") };
        conn.push(revision, [vec![changed, fake("good", "ok")], bad].concat());
        let ack = conn.ack().await;
        assert_eq!((ack.seen_revision, ack.applied_revision), (revision, 5));
        assert!(ack.error.contains("`p-bad`") && ack.error.contains(words), "{}", ack.error);
        assert!(ack.providers.is_empty());
        assert_eq!(began.elapsed(), Duration::from_secs(takes));
        settle().await;
        let good = fakes.alive().iter().filter(|key| *key == "good").count();
        assert_eq!(good, 0, "what was made for it is stopped again: {words}");
        serves(&mut conn, "a", 2 * revision).await;
        assert_eq!(refused(&mut conn, "good", 2 * revision + 1).await, FailureCode::UnknownAdapter);
    }
    conn.push(50, vec![fake("good", "ok")]);
    let ack = conn.ack().await;
    assert_eq!((ack.applied_revision, ack.error.as_str(), ids(&ack)), (50, "", vec!["p-good"]));
}

#[tokio::test(start_paused = true)]
async fn pings_are_answered_and_runs_go_on_while_a_config_is_built() {
    // REG-7
    let (_node, mut conn, _fakes) = node_with(Script::text("x"), vec![fake("a", "ok")]).await;
    let began = Instant::now();
    conn.push(6, vec![fake("a", "ok"), fake("b", "slow"), fake("c", "slow")]);
    settle().await;
    serves(&mut conn, "a", 1).await;
    assert_eq!(refused(&mut conn, "b", 2).await, FailureCode::UnknownAdapter, "not before all of it is there");
    conn.answers_pings = false;
    conn.send(ToNode::Ping(Ping { nonce: 9 }));
    assert_eq!(conn.next().await, ToEdge::Pong(Pong { nonce: 9, edge_time_ms: 0 }));
    assert_eq!(began.elapsed(), Duration::ZERO);
    conn.answers_pings = true;
    assert_eq!(conn.ack().await.applied_revision, 6);
    assert_eq!(began.elapsed(), SLOW, "side by side");
    serves(&mut conn, "b", 3).await;
}

#[tokio::test(start_paused = true)]
async fn one_update_at_a_time_and_the_latest_wins() {
    // REG-7
    let (_node, mut conn, fakes) = node_with(Script::text("x"), vec![fake("a", "ok")]).await;
    conn.push(6, vec![fake("first", "slow")]);
    conn.push(7, vec![fake("skipped", "slow")]);
    conn.push(8, vec![fake("last", "ok")]);
    let acks = [conn.ack().await, conn.ack().await, conn.ack().await];
    let told: Vec<_> = acks.iter().map(|ack| (ack.seen_revision, ack.applied_revision, ack.error.is_empty())).collect();
    assert_eq!(told, [(7, 5, false), (6, 6, true), (8, 8, true)]);
    settle().await;
    assert_eq!(fakes.alive(), ["last"], "what was overtaken was never built");
}

#[tokio::test(start_paused = true)]
async fn a_push_that_is_not_newer_changes_nothing() {
    // W13, REG-7
    let (_node, mut conn, fakes) = node_with(Script::text("x"), vec![fake("a", "ok")]).await;
    for (revision, error) in [(5, ""), (4, "older than the config in force")] {
        conn.push(revision, vec![]);
        let ack = conn.ack().await;
        assert_eq!((ack.seen_revision, ack.applied_revision, ack.error.as_str()), (revision, 5, error));
    }
    assert_eq!(fakes.alive(), ["a"]);
    serves(&mut conn, "a", 1).await;
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_takes_a_backend_over_does_not_overload_it() {
    // REG-7, NOD-4, LEA-5; field report 47
    let at = |capacity| ProviderConfig { base_url: "http://127.0.0.1:9".into(), capacity, ..fake("a", "ok") };
    let (_node, mut conn, fakes) = node_with(Script::text("x").pause(), vec![at(2)]).await;
    let old = fakes.newest("a");
    for number in [1, 2] {
        conn.send_run(on("a", number));
        conn.expect_accepted(number).await;
    }
    conn.push(6, vec![at(3)]);
    assert_eq!(conn.ack().await.applied_revision, 6);
    conn.send_run(on("a", 3));
    conn.expect_accepted(3).await;
    assert_eq!(refused(&mut conn, "a", 4).await, FailureCode::Busy, "two of the three places are the old instance's");
    old.calls.release();
    let _ = conn.rest(1).await;
    fakes.newest("a").calls.release_all();
    serves(&mut conn, "a", 5).await;
    let both = old.calls.counts().max_active + fakes.newest("a").calls.counts().max_active;
    assert!(both <= 4, "{both}");
}

#[tokio::test(start_paused = true)]
async fn an_update_ends_with_its_connection_and_leaves_nothing_behind() {
    // REG-7, NOD-5
    let (mut node, mut conn, fakes) = node_with(Script::text("x"), vec![fake("a", "ok")]).await;
    conn.push(6, vec![fake("quick", "ok"), fake("late", "hang")]);
    settle().await;
    assert!(fakes.alive().contains(&"quick".to_owned()));
    drop(conn);
    let mut conn = node.accept().await;
    settle().await;
    assert_eq!(fakes.newest("quick").lifecycle().stops, 1, "made for nobody: stopped again");
    conn.register(vec![fake("a", "ok")]).await;
    conn.get_ready().await;
    assert!(conn.is_silent(Duration::from_secs(600)).await, "no answer to a push of an older connection");
    assert_eq!(refused(&mut conn, "quick", 1).await, FailureCode::UnknownAdapter);
    serves(&mut conn, "a", 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_drains_takes_no_config() {
    // REG-7, NOD-8
    let (node, mut conn, fakes) = node_with(Script::text("x").pause(), vec![fake("a", "ok")]).await;
    conn.send_run(on("a", 1));
    conn.expect_accepted(1).await;
    conn.push(6, vec![fake("b", "slow")]);
    settle().await;
    node.shutdown.cancel();
    settle().await;
    conn.push(7, vec![]);
    for _ in 0..2 {
        let ack = conn.ack().await;
        assert_eq!((ack.applied_revision, ack.error.as_str()), (5, "the Node is shutting down"));
    }
    fakes.newest("a").calls.release();
    conn.expect_goodbye(CloseCode::Drained).await;
    drop(conn);
    node.end().await.unwrap();
    assert_eq!(fakes.alive(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_never_worked_does_not_keep_later_changes_away() {
    // REG-7
    let (_node, mut conn, fakes) = node_with(Script::text("x"), vec![fake("a", "ok"), fake("broken", "refuse")]).await;
    conn.push(6, vec![fake("a", "ok"), fake("broken", "refuse"), fake("b", "ok")]);
    let ack = conn.ack().await;
    assert_eq!((ack.applied_revision, ack.error.as_str(), ids(&ack)), (6, "", vec!["p-a", "p-b"]));
    assert_eq!(fakes.newest("broken").lifecycle().starts, 1, "it was tried again: a new instance");
    conn.push(7, vec![fake("a", "ok"), ProviderConfig { capacity: 1, ..fake("broken", "refuse") }]);
    assert!(conn.ack().await.error.contains("`p-broken`"), "once it is changed it must work");
}

#[tokio::test(start_paused = true)]
async fn a_provider_of_the_program_is_started_and_stopped_once_however_its_config_changes() {
    // REG-7
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x").hang()));
    let mut conn = node.ready().await;
    conn.run(1).await;
    for (revision, capacity) in [(6, 3), (7, 2)] {
        conn.push(revision, vec![ProviderConfig { capacity, ..config() }]);
        assert_eq!(conn.ack().await.applied_revision, revision);
    }
    conn.run(2).await;
    assert_eq!(conn.event(2).await.kind, RunEventKind::Start);
    conn.run(3).await;
    assert_eq!(conn.failure(3).await.code, FailureCode::Busy, "its places are one count through all configs");
    settle().await;
    assert_eq!((calls.counts().starts, calls.counts().stops), (1, 0));
    conn.push(8, vec![]);
    assert_eq!(conn.ack().await.applied_revision, 8);
    settle().await;
    assert_eq!(calls.counts().stops, 0, "it still runs something");
    for number in [1, 2] {
        conn.send(cancel(number));
        assert_eq!(conn.rest(number).await.pop(), Some(RunEventKind::Cancelled(CancelReason::Client)));
    }
    settle().await;
    assert_eq!((calls.counts().starts, calls.counts().stops), (1, 1));
}
