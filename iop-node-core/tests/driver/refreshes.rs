use std::sync::Arc;
use std::time::Duration;

use iop_execution::provider::Refreshed;
use iop_execution::testkit::Script;
use iop_execution::{AdapterKey, FailureCode, ProviderId, RunEventKind};
use iop_wire::limits::FEATURE_PROVIDER_OFFERS;
use iop_wire::*;
use tokio::time::Instant;

use crate::fakes::{Fakes, Instance, fake};
use crate::support::*;

struct Asked {
    node: Harness,
    conn: Conn,
    instance: Arc<Instance>,
    fakes: Arc<Fakes>,
}

/// A Node with one provider, ready at an Edge that takes offers (or not).
async fn ready(offers: bool, script: Script) -> Asked {
    let fakes = Fakes::new(script);
    let factory = Arc::clone(&fakes);
    let mut node = Harness::with(|node| node.factory(factory));
    let conn = connect(&mut node, offers).await;
    Asked { node, conn, instance: fakes.newest("a"), fakes }
}

async fn connect(node: &mut Harness, offers: bool) -> Conn {
    let mut conn = node.accept().await;
    conn.features = if offers { vec![FEATURE_PROVIDER_OFFERS.into()] } else { vec![] };
    let hello = conn.register(vec![ProviderConfig { capacity: 0, ..fake("a", "ok") }]).await;
    assert!(hello.features.contains(&FEATURE_PROVIDER_OFFERS.to_owned()));
    conn.get_ready().await;
    conn
}

fn targets(ack: &ConfigAck) -> Vec<&str> {
    ack.providers[0].targets.iter().map(|target| target.target.as_str()).collect()
}

fn on_a(number: u64) -> DispatchHead {
    DispatchHead {
        provider_id: ProviderId::new("p-a").unwrap(),
        adapter: AdapterKey::new("a").unwrap(),
        ..head(number)
    }
}

#[tokio::test(start_paused = true)]
async fn a_model_that_is_pulled_or_removed_is_told_within_half_a_minute() {
    // ADP-5
    let Asked { node: _node, mut conn, instance, .. } = ready(true, Script::text("x")).await;
    assert!(conn.is_silent(Duration::from_secs(300)).await, "nothing changed, nothing to say");
    assert!((10..=14).contains(&instance.lifecycle().asked), "{:?}", instance.lifecycle());
    for list in [vec!["t", "u"], vec!["u"], vec![]] {
        instance.lists(&list);
        let began = Instant::now();
        let ack = conn.ack().await;
        assert_eq!((ack.seen_revision, ack.applied_revision, ack.error.as_str()), (5, 5, ""));
        assert_eq!(targets(&ack), list);
        assert!(began.elapsed() <= Duration::from_secs(30), "{:?}", began.elapsed());
        assert!(conn.is_silent(Duration::from_secs(100)).await, "told once");
    }
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_comes_up_after_its_node_is_usable_soon_and_without_a_reconnect() {
    // ADP-5
    let fakes = Fakes::new(Script::text("x"));
    let factory = Arc::clone(&fakes);
    let mut node = Harness::with(|node| node.factory(factory));
    let mut conn = node.accept().await;
    conn.features = vec![FEATURE_PROVIDER_OFFERS.into()];
    conn.hello().await;
    conn.registration().await;
    conn.accept_registration(vec![fake("a", "slow")]);
    settle().await;
    let instance = fakes.newest("a");
    instance.lists(&[]);
    instance.answers(Some(Refreshed::Silent));
    assert!(conn.get_ready().await.providers[0].targets.is_empty());
    assert!(conn.is_silent(Duration::from_secs(5)).await);
    let early = instance.lifecycle().asked;
    assert!((2..=4).contains(&early), "about 1 s, 2 s, 4 s: {early}");
    instance.lists(&["t"]);
    instance.answers(Some(Refreshed::Answered));
    let began = Instant::now();
    assert_eq!(targets(&conn.ack().await), ["t"]);
    assert!(began.elapsed() <= Duration::from_secs(5), "{:?}", began.elapsed());
    conn.send_run(on_a(1));
    conn.expect_accepted(1).await;
    assert!(matches!(conn.rest(1).await.pop(), Some(RunEventKind::Complete(_))));
}

#[tokio::test(start_paused = true)]
async fn a_silent_backend_has_lost_nothing_and_is_asked_more_often() {
    // ADP-5: no flapping
    let Asked { node: _node, mut conn, instance, .. } = ready(true, Script::text("x")).await;
    instance.answers(Some(Refreshed::Silent));
    let before = instance.lifecycle().asked;
    assert!(conn.is_silent(Duration::from_secs(65)).await);
    assert!(instance.lifecycle().asked - before >= 5, "{:?}", instance.lifecycle());
}

#[tokio::test(start_paused = true)]
async fn an_edge_that_does_not_know_the_feature_is_told_nothing_but_the_gate_follows() {
    // ADP-5, LEA-8
    let Asked { mut node, mut conn, instance, .. } = ready(false, Script::text("x").hang()).await;
    instance.lists(&["u"]);
    instance.has_places(1);
    assert!(conn.is_silent(Duration::from_secs(120)).await);
    for (number, want) in [(1, None), (2, Some(FailureCode::Busy))] {
        conn.send_run(on_a(number));
        conn.expect_accepted(number).await;
        match want {
            None => assert_eq!(conn.event(number).await.kind, RunEventKind::Start),
            Some(code) => assert_eq!(conn.failure(number).await.code, code, "one place, not sixteen"),
        }
    }
    drop(conn);
    let mut conn = node.accept().await;
    conn.register(vec![ProviderConfig { capacity: 0, ..fake("a", "ok") }]).await;
    let ready = conn.get_ready().await;
    assert_eq!(ready.providers[0].targets[0].target.as_str(), "u", "at the next registration it learns of it");
}

#[tokio::test(start_paused = true)]
async fn more_places_are_told_and_taken() {
    // LEA-8
    let Asked { node: _node, mut conn, instance, .. } = ready(true, Script::text("x").hang()).await;
    for places in [1, 3] {
        instance.has_places(places);
        assert_eq!(conn.ack().await.providers[0].max_concurrency, places);
    }
    for number in 1..=4 {
        conn.send_run(on_a(number));
        conn.expect_accepted(number).await;
    }
    assert_eq!(conn.failure(4).await.code, FailureCode::Busy);
    assert_eq!(instance.calls.counts().active, 3);
}

#[tokio::test(start_paused = true)]
async fn a_question_that_hangs_is_bounded_holds_nothing_up_and_is_never_asked_twice_at_once() {
    // ADP-5
    let Asked { mut node, mut conn, instance, fakes } = ready(true, Script::text("x")).await;
    instance.answers(None);
    instance.wait_for(|counts| counts.asking == 1).await;
    let began = Instant::now();
    conn.send_run(on_a(1));
    conn.expect_accepted(1).await;
    assert!(matches!(conn.rest(1).await.pop(), Some(RunEventKind::Complete(_))));
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert!(conn.is_silent(Duration::from_secs(200)).await);
    assert!(instance.lifecycle().asked >= 4, "it is asked again after its time: {:?}", instance.lifecycle());
    instance.wait_for(|counts| counts.asking == 1).await;
    drop(conn);
    instance.answers(Some(Refreshed::Answered));
    let mut conn = connect(&mut node, true).await;
    assert!(conn.is_silent(Duration::from_secs(100)).await);
    assert_eq!(instance.lifecycle().most_asking, 1, "not across connections either");
    assert_eq!(fakes.alive(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_pushed_config_is_asked_about_from_then_on() {
    // ADP-5, REG-7
    let Asked { node: _node, mut conn, instance, fakes } = ready(true, Script::text("x")).await;
    conn.push(6, vec![fake("b", "ok")]);
    assert_eq!(conn.ack().await.applied_revision, 6);
    let asked = instance.lifecycle().asked;
    fakes.newest("b").lists(&["new"]);
    let ack = conn.ack().await;
    assert_eq!((ack.seen_revision, ack.applied_revision, targets(&ack)), (6, 6, vec!["new"]));
    assert_eq!(instance.lifecycle().asked, asked, "what left is asked no more");
}

#[tokio::test(start_paused = true)]
async fn a_push_does_not_ask_an_instance_that_stays_a_second_time() {
    // ADP-5, REG-7
    let Asked { node: _node, mut conn, instance, .. } = ready(true, Script::text("x")).await;
    instance.lists(&[]);
    instance.answers(None);
    instance.wait_for(|counts| counts.asking == 1).await;
    conn.push(6, vec![ProviderConfig { capacity: 0, ..fake("a", "ok") }, fake("b", "ok")]);
    assert_eq!(conn.ack().await.applied_revision, 6);
    assert!(conn.is_silent(Duration::from_secs(5)).await);
    assert_eq!((instance.lifecycle().starts, instance.lifecycle().most_asking), (1, 1));
}
