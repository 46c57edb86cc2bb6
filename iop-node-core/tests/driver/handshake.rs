use std::time::Duration;

use async_trait::async_trait;
use iop_execution::testkit::{Script, ScriptedProvider};
use iop_execution::{Capabilities, Completion, EventSink, Provider, ProviderError, RunRequest, Target};
use iop_node_core::{NodeError, NodeStatus, ServeEnd};
use iop_wire::*;
use tokio::time::Instant;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn the_way_to_ready_says_who_what_and_with_which_adapters() {
    // REG-1, REG-2
    let provider = ScriptedProvider::new(Script::text("x")).on_target(Target::new("t").unwrap(), Script::text("x"));
    let (mut node, calls) = Harness::scripted(provider);
    let mut conn = node.accept().await;
    let hello = conn.hello().await;
    assert_eq!((hello.proto_min, hello.proto_max, hello.connection_ordinal), (1, 1, 1));
    assert_ne!(hello.instance_id, [0; 16]);
    assert_eq!(hello.max_envelope, 64 * 1024);
    let request = conn.registration().await;
    assert_eq!(request.token.expose(), TOKEN);
    assert_eq!(request.inventory[0].kind, "custom");
    assert!(request.recipient_key.is_empty());
    assert_eq!(calls.counts().starts, 0, "nothing starts before the registration is accepted");
    conn.accept_registration(vec![config()]);
    let ready = conn.get_ready().await;
    assert_eq!((ready.node_id.as_str(), ready.config_revision), ("node", 5));
    assert_eq!(ready.providers[0].targets[0].target.as_str(), "t");
    assert_eq!(calls.counts().starts, 1);
    settle().await;
    assert_eq!(node.record.lines(), ["connected", "ready"]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_dispatched_before_ready() {
    // REG-2, W2
    for message in
        [ToNode::Run(RunDispatch { head: head(1) }), tunnel(1, 0), cancel(1), credit(1, 1), chunk(1, "x", true)]
    {
        let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
        let mut conn = node.accept().await;
        conn.register(vec![config()]).await;
        conn.send(message);
        conn.expect_goodbye(CloseCode::ProtocolViolation).await;
        assert_eq!(calls.counts().calls, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_gap_in_the_order_of_messages_ends_the_connection() {
    // W1, WIR-6
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.ready().await;
    conn.skip_a_number();
    conn.send(ToNode::Ping(Ping { nonce: 1 }));
    conn.expect_goodbye(CloseCode::ProtocolViolation).await;
}

#[tokio::test(start_paused = true)]
async fn an_edge_that_says_nothing_is_left_after_ten_seconds_and_the_next_connection_counts_on() {
    // REG-1
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let began = Instant::now();
    let mut conn = node.accept().await;
    let ToEdge::Hello(first) = conn.next().await else { panic!() };
    conn.expect_goodbye(CloseCode::RegisterTimeout).await;
    assert_eq!(began.elapsed(), Duration::from_secs(10));
    drop(conn);
    let mut conn = node.accept().await;
    let second = conn.hello().await;
    assert_eq!((first.instance_id, second.connection_ordinal), (second.instance_id, 2));
}

type Start = fn() -> Option<Result<(), ProviderError>>;

/// Starts when it is told how.
#[derive(Debug)]
struct Starter(Start);

#[async_trait]
impl Provider for Starter {
    fn capabilities(&self) -> Capabilities {
        Capabilities::runs_only()
    }
    async fn execute(&self, _: RunRequest, _: &mut EventSink) -> Result<Completion, ProviderError> {
        Err(ProviderError::unsupported("never called"))
    }
    async fn start(&self) -> Result<(), ProviderError> {
        match (self.0)() {
            Some(result) => result,
            None => std::future::pending().await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_adapter_that_fails_panics_or_hangs_at_start_is_left_out_and_the_others_serve() {
    // REG-1
    let starters: [(&str, Start); 4] = [
        ("a", || Some(Ok(()))),
        ("b", || Some(Err(ProviderError::unsupported("no")))),
        ("c", || panic!("at start")),
        ("d", || None),
    ];
    let mut node = Harness::with(|node| {
        starters
            .into_iter()
            .fold(node, |node, (key, starter)| node.provider(key, std::sync::Arc::new(Starter(starter))))
    });
    let configs = ["a", "b", "c", "d", "e"].map(|key| ProviderConfig {
        provider_id: iop_execution::ProviderId::new(format!("p-{key}")).unwrap(),
        adapter: iop_execution::AdapterKey::new(key).unwrap(),
        ..config()
    });
    let mut conn = node.accept().await;
    conn.register(configs.to_vec()).await;
    let began = Instant::now();
    conn.answers_pings = false;
    conn.send(ToNode::Ping(Ping { nonce: 77 }));
    let pong = loop {
        match conn.next().await {
            ToEdge::Pong(pong) => break pong,
            ToEdge::Ping(ping) => conn.send(ToNode::Pong(Pong { nonce: ping.nonce, edge_time_ms: 1 })),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((pong.nonce, began.elapsed()), (77, Duration::ZERO), "pings are answered while adapters start");
    conn.answers_pings = true;
    let ready = conn.get_ready().await;
    assert_eq!(ready.providers.iter().map(|p| p.provider_id.as_str()).collect::<Vec<_>>(), ["p-a"]);
    assert_eq!(began.elapsed(), Duration::from_secs(30));
}

#[tokio::test(start_paused = true)]
async fn a_backend_outside_allow_upstream_is_left_out() {
    // CRD-6
    for (url, allowed) in [
        ("http://127.0.0.1:8080/v1", true),
        ("http://169.254.169.254/latest", false),
        ("https://api.example.com", false),
    ] {
        let (mut node, calls) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
        let mut conn = node.accept().await;
        conn.register(vec![ProviderConfig { base_url: url.into(), ..config() }]).await;
        assert_eq!(conn.get_ready().await.providers.len(), usize::from(allowed), "{url}");
        assert_eq!(calls.counts().starts, u64::from(allowed));
        if !allowed {
            conn.run(1).await;
            assert_eq!(conn.failure(1).await.code, iop_execution::FailureCode::UnknownAdapter);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn fatal_refusals_end_serving_and_the_others_are_tried_again() {
    // REG-4, NOD-1
    for reason in RefusalReason::ALL {
        let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
        let mut conn = node.accept().await;
        conn.hello().await;
        conn.registration().await;
        conn.refuse_registration(*reason, Duration::from_secs(20));
        let began = Instant::now();
        if reason.is_fatal() {
            let error = node.end().await.unwrap_err();
            assert_eq!((error.exit_code(), &error), (1, &NodeError::Refused(*reason)));
        } else {
            assert_eq!(conn.try_next().await, None);
            node.accept().await;
            let waited = began.elapsed().as_secs_f64();
            assert!((20.0..=25.0).contains(&waited), "retry-after is a minimum: {waited}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_will_never_be_ready_is_dialled_again() {
    // REG-3
    let (mut node, _) = Harness::scripted(ScriptedProvider::new(Script::text("x")));
    let mut conn = node.accept().await;
    conn.register(vec![config()]).await;
    let ToEdge::Ready(_) = conn.next().await else { panic!() };
    conn.send(ToNode::ReadyResponse(NodeReadyResponse { ready: false, lease_generation: 0 }));
    assert_eq!(conn.try_next().await, None);
    assert_eq!(node.accept().await.hello().await.connection_ordinal, 2);
}

#[tokio::test(start_paused = true)]
async fn the_status_follows_the_connection() {
    // OPS-2
    let (provider, _) = ScriptedProvider::new(Script::text("x")).into_parts();
    let (connector, mut edge) = link::memory::memory_listener(link::memory::MemoryMode::Direct);
    let node = iop_node_core::Node::builder(iop_execution::Redacted::new(TOKEN.into()), std::sync::Arc::new(connector))
        .provider("a", provider)
        .build()
        .unwrap();
    assert!(!format!("{node:?}").contains(TOKEN), "CRD-9");
    let mut status = node.status();
    let shutdown = tokio_util::sync::CancellationToken::new();
    let served = tokio::spawn(node.serve(shutdown.clone()));
    assert_eq!(status.get(), NodeStatus::Connecting);
    let mut conn = Conn::new(edge.accept().await.unwrap());
    conn.register(vec![config()]).await;
    conn.get_ready().await;
    assert!(status.wait_ready().await);
    assert_eq!(status.get(), NodeStatus::Ready);
    shutdown.cancel();
    conn.expect_goodbye(CloseCode::Drained).await;
    drop(conn);
    assert_eq!(served.await.unwrap(), Ok(ServeEnd::Drained));
    assert_eq!(status.get(), NodeStatus::Stopped);
    assert!(!status.wait_ready().await);
}
