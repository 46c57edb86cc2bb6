use bytes::Bytes;
use http::{HeaderMap, Method};
use iop_execution::testkit::ManualClock;
use iop_execution::{AdapterKey, CancelReason, ProviderId, Redacted, RunId, Target};
use iop_wire::*;

use super::*;

fn head() -> DispatchHead {
    DispatchHead {
        run_id: RunId::from_bytes([1; 16]),
        run: RunNumber(1),
        provider_id: ProviderId::new("p").unwrap(),
        adapter: AdapterKey::new("a").unwrap(),
        target: Target::new("t").unwrap(),
        session_id: None,
        background: false,
        stream: true,
        response_stall_timeout_ms: 0,
        deadline_ms: 0,
        body_len: 0,
        window: 0,
        prompt_tokens_estimate: 0,
        credential_lease: Redacted::new(Bytes::new()),
        credential_scope: None,
    }
}

fn hello_ack() -> ToNode {
    ToNode::HelloAck(HelloAck { proto: 1, features: vec![], max_envelope: 65_536, edge_id: "e".into() })
}

fn accepted() -> ToNode {
    let node_id = NodeId::new("n").unwrap();
    let outcome = Ok(Registered { node_id, config: NodeConfigPayload::default(), trusted_lease_signers: Vec::new() });
    ToNode::RegisterResponse(RegisterResponse { edge_time_ms: 1, outcome })
}

fn started_with() -> Step {
    Step::Start { config: NodeConfigPayload::default(), edge_time_ms: 1, lease_signers: Vec::new() }
}

fn ready(ready: bool) -> ToNode {
    ToNode::ReadyResponse(NodeReadyResponse { ready, lease_generation: 9 })
}

/// Every message an Edge can send.
fn messages() -> Vec<ToNode> {
    vec![
        hello_ack(),
        accepted(),
        ready(true),
        ToNode::Run(RunDispatch { head: head() }),
        ToNode::Tunnel(TunnelDispatch {
            head: head(),
            method: Method::POST,
            path: Redacted::new("/".into()),
            headers: Redacted::new(HeaderMap::new()),
        }),
        ToNode::Chunk(RequestChunk { run: RunNumber(1), data: Bytes::new(), last: true }),
        ToNode::Credit(RunNumber(1), 1),
        ToNode::Cancel(RunNumber(1), CancelReason::Client),
        ToNode::Command(CommandRequest {
            command_id: 1,
            session_id: None,
            deadline_ms: 0,
            command: NodeCommand::TransportStatus,
        }),
        ToNode::ConfigUpdate(ConfigUpdate::new(NodeConfigPayload::default())),
        ToNode::Ping(Ping { nonce: 1 }),
        ToNode::Pong(Pong { nonce: 1, edge_time_ms: 1 }),
        ToNode::Drain(Drain { deadline_ms: 0, returning: false }),
        ToNode::Goodbye(Goodbye { code: CloseCode::Shutdown, retry_after_ms: 0 }),
    ]
}

fn at(state: State, now: Instant) -> Handshake {
    let mut machine = Handshake::new(now);
    let steps: &[ToNode] = &[hello_ack(), accepted(), ready(true)];
    let (messages, started) = match state {
        State::AwaitingHelloAck => (0, false),
        State::AwaitingRegistration => (1, false),
        State::Starting => (2, false),
        State::AwaitingReady => (2, true),
        State::Ready | State::Draining => (3, true),
    };
    for (at, message) in steps.iter().take(messages).enumerate() {
        machine.handle(message.clone(), now).unwrap();
        if at == 1 && started {
            machine.started(now);
        }
    }
    if state == State::Draining {
        assert!(machine.drain());
    }
    assert_eq!(machine.state(), state);
    machine
}

#[test]
fn every_state_takes_exactly_the_messages_that_may_come_in_it() {
    // REG-1, REG-2, W2
    let now = ManualClock::new().now();
    // Columns: the message names; rows: what each state does with them (S = a step, P = passed on, . = violation).
    let want = [
        (State::AwaitingHelloAck, "S.........PPPP"),
        (State::AwaitingRegistration, ".S........PPPP"),
        (State::Starting, "..........PPPP"),
        (State::AwaitingReady, "..S.......PPPP"),
        (State::Ready, "...PPPPPPPPPPP"),
        (State::Draining, "...PPPPPPPPPPP"),
    ];
    assert_eq!(want.len(), State::ALL.len());
    for (state, row) in want {
        let got: String = messages()
            .into_iter()
            .map(|message| {
                let mut machine = at(state, now);
                match machine.handle(message.clone(), now) {
                    Ok(Step::Pass(passed)) => {
                        assert_eq!(passed, message);
                        assert_eq!(machine.state(), state);
                        'P'
                    }
                    Ok(_) => 'S',
                    Err(violation) => {
                        assert_eq!(machine.state(), state, "a violation changes nothing");
                        assert_eq!(violation.close_code(), CloseCode::ProtocolViolation);
                        assert!(violation.to_string().contains(state.as_str()), "{violation}");
                        '.'
                    }
                }
            })
            .collect();
        assert_eq!(got, row, "{state:?}");
    }
}

#[test]
fn the_whole_way_names_node_config_and_lease_generation() {
    // REG-1, CRD-2
    let now = ManualClock::new().now();
    let mut machine = Handshake::new(now);
    assert_eq!(machine.handle(hello_ack(), now), Ok(Step::Register { max_envelope: 65_536 }));
    assert_eq!(machine.handle(accepted(), now), Ok(started_with()));
    assert_eq!(machine.node_id().map(NodeId::as_str), Some("n"));
    assert!(!machine.takes_messages_of_runs());
    machine.started(now);
    assert_eq!(machine.handle(ready(true), now), Ok(Step::Ready { lease_generation: 9 }));
    assert!(machine.takes_messages_of_runs() && machine.poll_timeout().is_none());
}

#[test]
fn refusals_end_the_handshake_with_their_reason() {
    // REG-4, REG-3
    let now = ManualClock::new().now();
    for reason in RefusalReason::ALL {
        let refusal = RegisterRefusal { reason: *reason, retry_after: Duration::from_secs(3) };
        let response = ToNode::RegisterResponse(RegisterResponse { edge_time_ms: 1, outcome: Err(refusal) });
        assert_eq!(at(State::AwaitingRegistration, now).handle(response, now), Ok(Step::Refused(refusal)));
    }
    assert_eq!(at(State::AwaitingReady, now).handle(ready(false), now), Ok(Step::NeverReady));
}

#[test]
fn a_version_or_feature_that_was_not_offered_is_refused() {
    // WIR-3
    let now = ManualClock::new().now();
    for proto in [0, 2, u32::MAX] {
        let ack = HelloAck { proto, features: vec![], max_envelope: 1, edge_id: String::new() };
        let violation = Handshake::new(now).handle(ToNode::HelloAck(ack), now).unwrap_err();
        assert_eq!(violation.close_code(), CloseCode::UnsupportedProtocol);
    }
    let ack = HelloAck { proto: 1, features: vec!["grants".into()], max_envelope: 1, edge_id: String::new() };
    assert_eq!(Handshake::new(now).handle(ToNode::HelloAck(ack), now), Err(Violation::Feature));
}

#[test]
fn each_awaited_answer_has_its_own_time_limit() {
    // REG-1
    let now = ManualClock::new().now();
    for (state, limit, code) in [
        (State::AwaitingHelloAck, 10, CloseCode::RegisterTimeout),
        (State::AwaitingRegistration, 10, CloseCode::RegisterTimeout),
        (State::Starting, 60, CloseCode::ReadyTimeout),
        (State::AwaitingReady, 10, CloseCode::ReadyTimeout),
    ] {
        let machine = at(state, now);
        let limit = now + Duration::from_secs(limit);
        assert_eq!(machine.poll_timeout(), Some(limit), "{state:?}");
        assert_eq!(machine.handle_timeout(limit - Duration::from_nanos(1)), None);
        assert_eq!(machine.handle_timeout(limit), Some(code));
    }
    for state in [State::Ready, State::Draining] {
        let far = now + Duration::from_secs(1_000_000);
        assert_eq!((at(state, now).poll_timeout(), at(state, now).handle_timeout(far)), (None, None));
    }
}

#[test]
fn only_a_ready_connection_has_something_to_drain() {
    // NOD-8
    let now = ManualClock::new().now();
    for state in State::ALL {
        let mut machine = at(*state, now);
        let ready = matches!(state, State::Ready | State::Draining);
        assert_eq!(machine.drain(), ready, "{state:?}");
        assert_eq!(machine.state() == State::Draining, ready);
    }
    let mut late = at(State::Ready, now);
    late.started(now);
    assert_eq!(late.state(), State::Ready, "a late start changes nothing");
}
