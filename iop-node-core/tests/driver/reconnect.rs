use std::sync::Arc;
use std::time::Duration;

use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{Redacted, RunEventKind, async_trait};
use iop_node_core::{Node, NodeError, ServeEnd};
use iop_wire::*;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_connection_takes_its_runs_with_it_before_the_next_one_is_used() {
    // NOD-5, FEN-4
    let (mut node, calls) = Harness::scripted(
        ScriptedProvider::new(Script::text("x").hang_then_linger(Duration::from_secs(4)))
            .then(Script::new().ignore_cancel())
            .then(Script::text("new"))
            .with_tunnels(),
    );
    let mut conn = node.ready().await;
    conn.run(1).await;
    conn.send(tunnel(2, 4));
    conn.send(chunk(2, "body", true));
    calls.wait_for(|counts| counts.active == 2).await;
    let began = Instant::now();
    drop(conn);
    let mut conn = node.accept().await;
    assert!(began.elapsed() >= Duration::from_secs(5), "the close grace comes first");
    assert_eq!((calls.counts().active, calls.counts().returned, calls.counts().dropped), (0, 1, 1));
    assert_eq!(conn.register(vec![config()]).await.connection_ordinal, 2);
    conn.get_ready().await;
    assert!(conn.is_silent(Duration::from_secs(3600)).await, "nothing about old runs is said");
    conn.run(1).await;
    let events = conn.rest(1).await;
    assert!(matches!(&events[1], RunEventKind::Delta(text) if text == "new"), "numbers begin again");
    assert_eq!(node.record.lines().iter().filter(|line| line.contains("Abandoned")).count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_waits_for_its_body_or_for_credit_ends_with_its_connection() {
    // NOD-5
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x".repeat(100_000))).with_tunnels());
    let mut conn = node.ready_with(ProviderConfig { capacity: 3, ..config() }).await;
    conn.send(ToNode::Run(RunDispatch { head: DispatchHead { body_len: 50, ..head(1) } }));
    conn.send_run(DispatchHead { window: 0, ..head(2) });
    conn.send(tunnel(3, 50));
    settle().await;
    let began = Instant::now();
    drop(conn);
    node.accept().await;
    assert!(began.elapsed() <= Duration::from_secs(6));
    assert_eq!(calls.counts().active, 0);
}

#[tokio::test(start_paused = true)]
async fn an_equal_config_keeps_the_adapter_and_another_one_replaces_it() {
    // EXE-14, NOD-4
    let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    drop(node.ready().await);
    drop(node.ready().await);
    assert_eq!((calls.counts().starts, calls.counts().stops), (1, 0));
    assert_eq!(calls.counts().refreshes, 1, "at each later ready the backend is asked again");
    let mut conn = node.ready_with(ProviderConfig { capacity: 1, ..config() }).await;
    assert_eq!((calls.counts().starts, calls.counts().stops), (2, 1));
    conn.send(ToNode::Goodbye(Goodbye { code: CloseCode::Restart, retry_after_ms: 0 }));
    let mut conn = node.accept().await;
    conn.register(vec![]).await;
    assert!(conn.get_ready().await.providers.is_empty());
    assert_eq!(calls.counts().stops, 2, "what is no longer configured is stopped");
}

#[tokio::test(start_paused = true)]
async fn accept_then_drop_uses_up_the_attempts() {
    // NOD-1
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut dials = 0;
    let error = loop {
        tokio::select! {
            Some(link) = node.edge.accept() => {
                let mut conn = Conn::new(link);
                conn.register(vec![config()]).await;
                conn.get_ready().await;
                dials += 1;
            }
            end = &mut node.node => break end.unwrap().unwrap_err(),
        }
    };
    // 1 first dial, 1 wait of 1 s, 3 waits at the interval of 2 s.
    assert_eq!(dials, 5);
    assert_eq!((error.exit_code(), error), (3, NodeError::Exhausted { attempts: 3 }));
}

#[tokio::test(start_paused = true)]
async fn sixty_seconds_ready_give_all_attempts_back() {
    // NOD-1
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    for _ in 0..20 {
        let mut conn = node.ready().await;
        assert!(conn.is_silent(Duration::from_secs(61)).await);
    }
    assert!(!node.node.is_finished());
}

#[tokio::test(start_paused = true)]
async fn an_edge_that_is_not_there_is_given_up_and_a_shutdown_interrupts_the_wait() {
    // NOD-1
    let node = Harness::scripted(ScriptedProvider::new(Script::text("x"))).0;
    let Harness { edge, node, .. } = node;
    drop(edge);
    assert_eq!(node.await.unwrap(), Err(NodeError::Exhausted { attempts: 3 }));

    let node = Harness::scripted(ScriptedProvider::new(Script::text("x"))).0;
    let Harness { edge, node, shutdown, .. } = node;
    drop(edge);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let began = Instant::now();
    shutdown.cancel();
    assert_eq!(node.await.unwrap(), Ok(ServeEnd::Drained));
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_goodbye_says_when_to_come_back_and_whether() {
    // NOD-1, WIR-13
    for code in CloseCode::ALL {
        let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
        let mut conn = node.ready().await;
        let began = Instant::now();
        conn.send(ToNode::Goodbye(Goodbye { code: *code, retry_after_ms: 40_000 }));
        let fatal = matches!(code, CloseCode::UnsupportedProtocol | CloseCode::RemovedFromConfig);
        if fatal {
            let error = node.end().await.unwrap_err();
            assert_eq!((error.exit_code(), error), (1, NodeError::Closed(*code)));
        } else {
            node.accept().await;
            let waited = began.elapsed().as_secs_f64();
            assert!((40.0..=50.0).contains(&waited), "{code}: {waited}");
        }
    }
}

#[derive(Debug)]
struct Broken(fn() -> Option<ConnectError>);

#[async_trait]
impl Connector for Broken {
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        match (self.0)() {
            Some(error) => Err(error),
            None => std::future::pending().await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_dial_that_can_not_work_is_fatal_and_one_that_hangs_is_a_failed_one() {
    // NOD-1
    let serve = async |connect: fn() -> Option<ConnectError>| {
        let node = Node::builder(Redacted::new(TOKEN.into()), Arc::new(Broken(connect))).build().unwrap();
        node.serve(CancellationToken::new()).await
    };
    let fatal = serve(|| Some(ConnectError::Fatal("bad certificate".into()))).await;
    assert_eq!(fatal, Err(NodeError::Connect("bad certificate".into())));
    let began = Instant::now();
    assert_eq!(
        serve(|| Some(ConnectError::Retryable("down".into()))).await,
        Err(NodeError::Exhausted { attempts: 10 })
    );
    assert!(began.elapsed() >= Duration::from_secs(100), "max_attempts × interval");
    assert_eq!(serve(|| None).await, Err(NodeError::Exhausted { attempts: 10 }));
}

#[tokio::test(start_paused = true)]
async fn a_thousand_flaps_leave_nothing_behind() {
    // NOD-5; field reports 40, 73
    let (provider, calls) =
        ScriptedProvider::new(Script::text("x").hang()).then(Script::text("x").hang()).with_tunnels().into_parts();
    let forever = iop_node_core::ReconnectPolicy::new(Some(0), Some(Duration::from_secs(1))).unwrap();
    let mut node = Harness::with(|node| node.provider("a", provider).reconnect(forever));
    let mut baseline = None;
    for flap in 0..1000_u64 {
        let mut conn = node.ready().await;
        conn.send_run(head(1));
        conn.send(tunnel(2, 4));
        conn.send(chunk(2, "body", true));
        calls.wait_for(|counts| counts.calls == 2 * (flap + 1) && counts.active == 2).await;
        drop(conn);
        calls.wait_for(|counts| counts.active == 0).await;
        settle().await;
        let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
        assert_eq!(tasks, *baseline.get_or_insert(tasks), "flap {flap}");
    }
    assert_eq!((calls.counts().max_active, calls.counts().starts), (2, 1));
    let mut conn = node.ready().await;
    for number in [1, 2] {
        conn.run(number).await;
        assert_eq!(conn.event(number).await.kind, RunEventKind::Start, "every place is free");
    }
}

#[tokio::test(start_paused = true)]
async fn an_edge_that_refuses_for_an_hour_is_not_hammered() {
    // NOD-1; field report T7
    let (provider, _) = ScriptedProvider::new(Script::text("x")).into_parts();
    let forever = iop_node_core::ReconnectPolicy::new(Some(0), None).unwrap();
    let mut node = Harness::with(|node| node.provider("a", provider).reconnect(forever));
    let began = Instant::now();
    let mut dials = 0;
    while began.elapsed() < Duration::from_secs(3600) {
        let mut conn = node.accept().await;
        conn.hello().await;
        conn.registration().await;
        conn.refuse_registration(RefusalReason::DuplicateConnection, Duration::ZERO);
        assert_eq!(conn.try_next().await, None);
        dials += 1;
    }
    assert!((280..=366).contains(&dials), "{dials} dials in an hour");
}
