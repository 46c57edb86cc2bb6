use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use iop_execution::failure::{
    BindingField, CredentialReason, LivenessClassification, OwnershipClose, ProviderReason, StallDetail,
    TimeoutSetting, safe_message,
};
use iop_execution::{
    AdapterKey, CancelReason, Capabilities, ExecutionFailure, FailureCode, FailureStage, FinishReason, FrameFlags,
    Health, NodeId, Principal, ProviderContacted, ProviderId, Redacted, RunEvent, RunEventKind, RunId, SessionId,
    Target, ToolCallDelta, TunnelFrame, TunnelHead, Usage,
};
use prost::Message;

use super::*;
use crate::limits::{INITIAL_WINDOW, MAX_CHUNK, MAX_DELTA, MAX_WINDOW, MIN_WINDOW};
use crate::message::*;

mod checks;
mod round_trip;
mod violations;

fn target(name: &str) -> Target {
    Target::new(name).unwrap()
}

fn adapter() -> AdapterKey {
    AdapterKey::new("vllm-a").unwrap()
}

fn failure() -> ExecutionFailure {
    ExecutionFailure::new(
        FailureCode::ProviderRejected,
        FailureStage::Prefill,
        ProviderContacted::Yes,
        "context is full",
    )
    .with_status(400)
    .with_retry_after_ms(Some(1500))
    .with_reason(Some(ProviderReason::ContextLengthExceeded))
}

fn stalled() -> ExecutionFailure {
    let mut stall = StallDetail::new(adapter(), target("m"), TimeoutSetting::FirstResponse);
    stall.liveness_classification = LivenessClassification::ProviderUnhealthy;
    stall.health_observation_seq = NonZeroU64::new(300);
    stall.ownership_close = OwnershipClose::Confirmed { retryable: true };
    stall.idle_ms = 300_001;
    stall.timeout_ms = 300_000;
    ExecutionFailure::new(FailureCode::ResponseStalled, FailureStage::Stream, ProviderContacted::Yes, "no progress")
        .with_stall(stall)
}

fn mismatched() -> ExecutionFailure {
    ExecutionFailure::new(FailureCode::CredentialRejected, FailureStage::Credential, ProviderContacted::No, "no")
        .with_credential(CredentialReason::BindingMismatch(BindingField::Slot))
}

fn usage() -> Usage {
    Usage { input_tokens: Some(11), output_tokens: Some(0), reasoning_tokens: None, cached_input_tokens: Some(7) }
}

fn headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.append("content-type", HeaderValue::from_static("text/event-stream"));
    headers.append("x-twice", HeaderValue::from_static("1"));
    headers.append("x-twice", HeaderValue::from_bytes(b"\xff2").unwrap());
    headers
}

fn dispatch() -> DispatchHead {
    DispatchHead {
        run_id: RunId::from_bytes([0xab; 16]),
        run: RunNumber(3),
        provider_id: ProviderId::new("node-1/vllm").unwrap(),
        adapter: adapter(),
        target: target("meta-llama/Llama-3.1-8B"),
        session_id: Some(SessionId::new("chat 7").unwrap()),
        background: true,
        stream: true,
        response_stall_timeout_ms: 300_000,
        deadline_ms: 60_000,
        body_len: 1234,
        window: INITIAL_WINDOW,
        prompt_tokens_estimate: 300,
        credential_lease: Redacted::new(Bytes::from_static(b"sealed")),
        credential_scope: Some(Box::new(CredentialScope {
            principal: Principal::new("team-a").unwrap(),
            route: "default".into(),
            slot: "openai".into(),
            profile: "bearer".into(),
        })),
    }
}

fn config() -> NodeConfigPayload {
    NodeConfigPayload {
        revision: 9,
        providers: vec![ProviderConfig {
            provider_id: ProviderId::new("node-1/vllm").unwrap(),
            adapter: adapter(),
            kind: "vllm".into(),
            base_url: "http://127.0.0.1:8000".into(),
            wire: WireMode::Run,
            capacity: 16,
            long_capacity: 2,
            targets: vec![target("m")],
            response_stall_timeout_ms: 1,
            first_response_timeout_ms: 2,
            stall_per_1k_prompt_ms: 3,
            close_grace_ms: 4,
            probe_timeout_ms: 5,
            terminal_linger_ms: 6,
            cancel_policy: CancelPolicy::Drain,
            auth: "env:KEY".into(),
            credential: None,
        }],
    }
}

/// The same, whose provider needs a lease for each call.
fn managed() -> NodeConfigPayload {
    let mut config = config();
    for provider in &mut config.providers {
        provider.auth.clear();
        provider.credential = Some(CredentialUse { slot: "acme".into(), profile: "bearer".into() });
    }
    config
}

fn event(kind: RunEventKind) -> ToEdge {
    ToEdge::Event(RunNumber(3), RunEvent { seq: 5, kind, usage: None })
}

fn frame(frame: TunnelFrame) -> ToEdge {
    ToEdge::Frame(RunNumber(3), 5, frame)
}

fn answer(result: CommandResult) -> ToEdge {
    ToEdge::CommandResponse(CommandResponse { command_id: 2, session_id: None, outcome: Ok(result) })
}

fn capabilities() -> CapabilitiesResult {
    let mut capabilities = Capabilities::runs_only().with_max_concurrency(NonZeroU32::new(8)).with_features(true, true);
    capabilities.embeddings = true;
    let seq = NonZeroU64::MIN;
    let health = TargetHealth { target: target("m"), status: Health::Available, health_observation_seq: seq };
    CapabilitiesResult { adapter: adapter(), capabilities, health: Some(health) }
}

/// One of each message that a Node sends.
fn to_edge() -> Vec<(&'static str, ToEdge)> {
    let call = ToolCallDelta { index: 1, id: Some("c".into()), name: Some("f".into()), arguments: "{}".into() };
    let ready = ProviderReady {
        provider_id: ProviderId::new("node-1/vllm").unwrap(),
        max_concurrency: 8,
        tunnels: true,
        runs: true,
        tools: true,
        reasoning: true,
        messages: false,
        targets: vec![ReadyTarget { target: target("m"), context_length: 8192 }],
    };
    let with_usage = RunEvent { seq: 6, kind: RunEventKind::Complete(FinishReason::Length), usage: Some(usage()) };
    vec![
        (
            "Hello",
            ToEdge::Hello(Hello {
                proto_min: 1,
                proto_max: 2,
                features: vec!["grants".into()],
                node_version: "0.1.0".into(),
                instance_id: [7; 16],
                connection_ordinal: 4,
                max_envelope: 65536,
            }),
        ),
        (
            "RegisterRequest",
            ToEdge::Register(RegisterRequest {
                token: Redacted::new("token".into()),
                recipient_key: Bytes::from_static(&[1; 32]),
                inventory: vec![AdapterInventory { kind: "vllm".into(), version: "1".into() }],
                claimed_node_id: Some(NodeId::new("node-1").unwrap()),
            }),
        ),
        (
            "NodeReadyRequest",
            ToEdge::Ready(NodeReadyRequest {
                node_id: NodeId::new("node-1").unwrap(),
                config_revision: 9,
                providers: vec![ready],
            }),
        ),
        ("RunAccepted", ToEdge::Accepted(RunNumber(3))),
        ("RunEvent.Start", event(RunEventKind::Start)),
        ("RunEvent.Delta", event(RunEventKind::Delta("text".into()))),
        ("RunEvent.ReasoningDelta", event(RunEventKind::ReasoningDelta("why".into()))),
        ("RunEvent.ToolCallDelta", event(RunEventKind::ToolCallDelta(call))),
        (
            "RunEvent.Usage",
            ToEdge::Event(RunNumber(3), RunEvent { seq: 5, kind: RunEventKind::Usage, usage: Some(usage()) }),
        ),
        ("RunEvent.Complete", ToEdge::Event(RunNumber(3), with_usage)),
        ("RunEvent.Error", event(RunEventKind::Error(failure()))),
        ("RunEvent.Cancelled", event(RunEventKind::Cancelled(CancelReason::EdgeDeadline))),
        (
            "ProviderTunnelFrame.Head",
            frame(TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers: headers() })),
        ),
        (
            "ProviderTunnelFrame.Body",
            frame(TunnelFrame::Body { bytes: Bytes::from_static(b"data: x\n\n"), flags: FrameFlags::CONTENT }),
        ),
        ("ProviderTunnelFrame.Usage", frame(TunnelFrame::Usage(usage()))),
        ("ProviderTunnelFrame.End", frame(TunnelFrame::End)),
        ("ProviderTunnelFrame.Failed", frame(TunnelFrame::Failed(failure()))),
        ("RunEvent.Error.Stall", event(RunEventKind::Error(stalled()))),
        ("ProviderTunnelFrame.Failed.Credential", frame(TunnelFrame::Failed(mismatched()))),
        ("ProviderTunnelFrame.Cancelled", frame(TunnelFrame::Cancelled(CancelReason::Drain))),
        ("WindowCredit", ToEdge::Credit(RunNumber(3), 65536)),
        ("NodeCommandResponse.TransportStatus", answer(CommandResult::TransportStatus { active_runs: 3 })),
        ("NodeCommandResponse.Capabilities", answer(CommandResult::Capabilities(capabilities()))),
        (
            "NodeCommandResponse.OllamaApi",
            answer(CommandResult::OllamaApi {
                status: StatusCode::NOT_FOUND,
                body: Redacted::new(Bytes::from_static(b"{}")),
            }),
        ),
        (
            "NodeCommandResponse.Failed",
            ToEdge::CommandResponse(CommandResponse {
                command_id: 2,
                session_id: Some(SessionId::new("s").unwrap()),
                outcome: Err(failure()),
            }),
        ),
        (
            "ConfigAck",
            ToEdge::ConfigAck(ConfigAck {
                seen_revision: 9,
                applied_revision: 8,
                error: "no such kind".into(),
                providers: Vec::new(),
            }),
        ),
        ("Ping", ToEdge::Ping(Ping { nonce: 1 })),
        ("Pong", ToEdge::Pong(Pong { nonce: 1, edge_time_ms: 0 })),
        ("Drain", ToEdge::Drain(Drain { deadline_ms: 30_000, returning: false })),
        ("Drain.Returning", ToEdge::Drain(Drain { deadline_ms: 30_000, returning: true })),
        ("Goodbye", ToEdge::Goodbye(Goodbye { code: CloseCode::Drained, retry_after_ms: 0 })),
    ]
}

/// One of each message that an Edge sends.
fn to_node() -> Vec<(&'static str, ToNode)> {
    let command = |command| {
        ToNode::Command(CommandRequest {
            command_id: 2,
            session_id: Some(SessionId::new("s").unwrap()),
            deadline_ms: 5000,
            command,
        })
    };
    let refused = RegisterRefusal { reason: RefusalReason::DuplicateConnection, retry_after: Duration::from_secs(10) };
    vec![
        (
            "HelloAck",
            ToNode::HelloAck(HelloAck { proto: 1, features: vec![], max_envelope: 65536, edge_id: "edge-1".into() }),
        ),
        (
            "RegisterResponse.Accepted",
            ToNode::RegisterResponse(RegisterResponse {
                edge_time_ms: 1_800_000_000_000,
                outcome: Ok(Registered {
                    node_id: NodeId::new("node-1").unwrap(),
                    config: config(),
                    trusted_lease_signers: vec![[5; 32]],
                }),
            }),
        ),
        (
            "RegisterResponse.Refused",
            ToNode::RegisterResponse(RegisterResponse { edge_time_ms: 1_800_000_000_000, outcome: Err(refused) }),
        ),
        (
            "NodeReadyResponse",
            ToNode::ReadyResponse(NodeReadyResponse { ready: true, lease_generation: 0x0123_4567_89ab_cdef }),
        ),
        ("RunRequest", ToNode::Run(RunDispatch { head: dispatch() })),
        (
            "ProviderTunnelRequest",
            ToNode::Tunnel(TunnelDispatch {
                head: dispatch(),
                method: Method::POST,
                path: Redacted::new("/v1/chat/completions?x=1".into()),
                headers: Redacted::new(headers()),
            }),
        ),
        (
            "RequestChunk",
            ToNode::Chunk(RequestChunk { run: RunNumber(3), data: Bytes::from_static(b"{\"model\":"), last: true }),
        ),
        ("WindowCredit", ToNode::Credit(RunNumber(3), 65536)),
        ("CancelRequest", ToNode::Cancel(RunNumber(3), CancelReason::Client)),
        (
            "NodeCommandRequest.Capabilities",
            command(NodeCommand::Capabilities { adapter: adapter(), target: Some(target("m")) }),
        ),
        ("NodeCommandRequest.TransportStatus", command(NodeCommand::TransportStatus)),
        (
            "NodeCommandRequest.OllamaApi",
            command(NodeCommand::OllamaApi {
                adapter: adapter(),
                method: Method::GET,
                path: "/api/ps".into(),
                body: Redacted::new(Bytes::from_static(b"{}")),
            }),
        ),
        (
            "ConfigUpdate",
            ToNode::ConfigUpdate(ConfigUpdate {
                config: Some(config()),
                trusted_lease_signers: vec![[5; 32], [6; 32]],
                credential_states: vec![CredentialState { slot: "openai".into(), revision: 4, disabled: true }],
            }),
        ),
        ("ConfigUpdate.Managed", ToNode::ConfigUpdate(ConfigUpdate::new(managed()))),
        (
            "ConfigUpdate.CredentialsOnly",
            ToNode::ConfigUpdate(ConfigUpdate {
                config: None,
                trusted_lease_signers: Vec::new(),
                credential_states: vec![CredentialState { slot: "acme".into(), revision: 1, disabled: false }],
            }),
        ),
        ("Ping", ToNode::Ping(Ping { nonce: 300 })),
        ("Pong", ToNode::Pong(Pong { nonce: 300, edge_time_ms: 1_800_000_000_000 })),
        ("Drain", ToNode::Drain(Drain { deadline_ms: 30_000, returning: false })),
        ("Goodbye", ToNode::Goodbye(Goodbye { code: CloseCode::Restart, retry_after_ms: 700 })),
    ]
}

fn encoded<M: WireMessage>(message: &M) -> Bytes {
    M::encode(Sequenced { seq: 2, message: message.clone() }).unwrap()
}

/// Bytes of a gRPC message's prefix and of an HTTP/2 frame's header.
const FRAMING: usize = 5 + 9;

#[test]
fn a_token_costs_at_most_sixty_bytes_on_the_wire() {
    // WIR-11: even at the end of a very long life of a connection
    let token = ToEdge::Event(
        RunNumber(u64::MAX),
        RunEvent { seq: u64::MAX, kind: RunEventKind::Delta("word".into()), usage: None },
    );
    let worst = ToEdge::encode(Sequenced { seq: u64::MAX, message: token }).unwrap();
    assert!(worst.len() + FRAMING <= 60, "{}", worst.len() + FRAMING);
    let usual =
        ToEdge::Event(RunNumber(90_000), RunEvent { seq: 900, kind: RunEventKind::Delta("word".into()), usage: None });
    let usual = ToEdge::encode(Sequenced { seq: 90_000_000, message: usual }).unwrap();
    assert!(usual.len() + FRAMING <= 36, "{}", usual.len() + FRAMING);
}

#[test]
fn bytes_on_the_wire_never_change() {
    // WIR-3: an Edge serves Nodes of the version before its own
    use std::fmt::Write as _;
    let mut found = String::new();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    for (name, message) in to_edge() {
        let _ = writeln!(found, "ToEdge {name} {}", hex(&encoded(&message)));
    }
    for (name, message) in to_node() {
        let _ = writeln!(found, "ToNode {name} {}", hex(&encoded(&message)));
    }
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/convert/tests/golden.txt");
    if std::env::var_os("IOP_REGEN").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(golden, found, "an encoding changed: old peers would not understand it");
}

#[test]
fn envelopes_are_checked_for_size_before_they_are_encoded() {
    // WIR-8, W3
    let body = |len| frame(TunnelFrame::Body { bytes: Bytes::from(vec![0; len]), flags: FrameFlags::NONE });
    assert!(body(MAX_CHUNK).check().is_ok());
    assert!(body(MAX_CHUNK + 1).check().is_err());
    let oversize = ToEdge::encode(Sequenced { seq: 1, message: body(MAX_ENVELOPE) });
    assert_eq!(oversize, Err(LinkError::TooLarge));

    let mut large = config();
    large.providers[0].targets = (0..4000).map(|n| target(&format!("{n:0>200}"))).collect();
    let update = ToNode::ConfigUpdate(ConfigUpdate::new(large.clone()));
    assert!(encoded(&update).len() > 10 * MAX_ENVELOPE, "config may be larger than other messages");
    large.providers[0].targets = (0..4000).map(|n| target(&format!("{n:0>256}"))).collect();
    large.providers.push(large.providers[0].clone());
    let update = ToNode::ConfigUpdate(ConfigUpdate::new(large));
    assert!(update.check().is_err());
    assert_eq!(ToNode::encode(Sequenced { seq: 1, message: update }), Err(LinkError::TooLarge));
}

#[test]
fn a_node_that_has_not_registered_may_send_little() {
    // REG-8, WIR-8
    let inventory = |entries| {
        ToEdge::Register(RegisterRequest {
            token: Redacted::new("t".into()),
            recipient_key: Bytes::new(),
            inventory: vec![AdapterInventory { kind: "k".repeat(200), version: String::new() }; entries],
            claimed_node_id: None,
        })
    };
    assert!(inventory(70).check().is_ok());
    let bytes = proto::Envelope::from(Sequenced { seq: 1, message: inventory(100) }).encode_to_vec();
    assert!(bytes.len() > MAX_PRE_REGISTER_ENVELOPE && bytes.len() < MAX_ENVELOPE);
    assert_eq!(ToEdge::decode(bytes.into()), Err(LinkError::TooLarge));
}

#[test]
fn a_small_payload_does_not_keep_the_transport_s_buffer_alive() {
    // WIR-7: what waits for a slow reader costs what it is charged
    let buffer = encoded(&frame(TunnelFrame::Body { bytes: Bytes::from(vec![1; 100]), flags: FrameFlags::NONE }));
    let decoded = ToEdge::decode(buffer.clone()).unwrap();
    assert!(buffer.is_unique(), "{decoded:?}");
}

#[test]
fn the_schema_has_the_names_and_the_call_that_the_code_uses() {
    // WIR-1, WIR-5
    let schema = include_str!("../../proto/iop/wire/v1/wire.proto");
    assert!(schema.contains("package iop.wire.v1;") && schema.contains("service Session {"));
    assert!(schema.contains("rpc Session(stream Envelope) returns (stream Envelope);"));
    assert_eq!(schema.matches("rpc ").count(), 1);
    for name in [
        "Hello",
        "HelloAck",
        "RegisterRequest",
        "RegisterResponse",
        "NodeConfigPayload",
        "NodeReadyRequest",
        "NodeReadyResponse",
        "RunRequest",
        "RunAccepted",
        "RequestChunk",
        "RunEvent",
        "ProviderTunnelRequest",
        "ProviderTunnelFrame",
        "ExecutionFailure",
        "WindowCredit",
        "CancelRequest",
        "NodeCommandRequest",
        "NodeCommandResponse",
        "ConfigUpdate",
        "ConfigAck",
        "Ping",
        "Pong",
        "Drain",
        "Goodbye",
    ] {
        assert!(schema.contains(&format!("\nmessage {name} {{")), "{name}");
    }
    assert!(!schema.contains("message CapacityGrant") && !schema.contains("message DemandReport"));
}
