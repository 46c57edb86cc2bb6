//! What a peer may not send, and whose fault it is.

use super::*;
use proto::envelope::Body;

/// A message to an Edge, and that it is one.
fn edge_envelope(name: &str) -> (bool, proto::Envelope) {
    let (_, message) = to_edge().into_iter().find(|(known, _)| *known == name).expect("a known message");
    (true, Sequenced { seq: 2, message }.into())
}

fn node_envelope(name: &str) -> (bool, proto::Envelope) {
    let (_, message) = to_node().into_iter().find(|(known, _)| *known == name).expect("a known message");
    (false, Sequenced { seq: 2, message }.into())
}

/// Breaks a message and returns who is to blame: a run, or the connection.
macro_rules! broken {
    ($direction:ident, $name:literal, $body:ident, |$message:ident| $break:expr) => {{
        let (to_edge, mut envelope) = $direction($name);
        let Some(Body::$body($message)) = &mut envelope.body else { panic!("{} is no {}", $name, stringify!($body)) };
        $break;
        blame(to_edge, envelope, $name)
    }};
}

fn blame(to_edge: bool, envelope: proto::Envelope, name: &str) -> Option<u64> {
    let bytes = Bytes::from(envelope.encode_to_vec());
    let error = if to_edge {
        ToEdge::decode(bytes).map(|_| ()).expect_err(name)
    } else {
        ToNode::decode(bytes).map(|_| ()).expect_err(name)
    };
    match error {
        LinkError::MalformedRun { seq: 2, run, .. } => Some(run.0),
        LinkError::Malformed(_) => None,
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn an_envelope_without_a_known_body_ends_the_connection() {
    // WIR-3
    let empty = proto::Envelope { seq: 2, body: None };
    assert_eq!(blame(true, empty.clone(), "empty"), None);
    assert_eq!(blame(false, empty, "empty"), None);
    // A later version's body: field 40, one byte.
    let unknown = Bytes::from_static(&[0x08, 0x02, 0xc2, 0x02, 0x01, 0x00]);
    assert_eq!(ToEdge::decode(unknown.clone()), Err(LinkError::Malformed("an envelope without a known body")));
    assert_eq!(ToNode::decode(unknown), Err(LinkError::Malformed("an envelope without a known body")));
}

#[test]
fn a_body_of_the_wrong_role_ends_the_connection() {
    // WIR-1, W2
    let both = ["WindowCredit", "Ping", "Pong", "Drain", "Drain.Returning", "Goodbye"];
    for (name, message) in to_edge().into_iter().filter(|(name, _)| !both.contains(name)) {
        assert_eq!(blame(false, Sequenced { seq: 2, message }.into(), name), None, "{name}");
    }
    for (name, message) in to_node().into_iter().filter(|(name, _)| !both.contains(name)) {
        assert_eq!(blame(true, Sequenced { seq: 2, message }.into(), name), None, "{name}");
    }
}

#[test]
fn what_is_wrong_with_one_run_ends_that_run() {
    // WIR-15, W17
    use proto::provider_tunnel_frame::{Body as TunnelBody, Head, Part};
    use proto::run_event::Kind;
    let blamed = [
        broken!(edge_envelope, "RunEvent.Delta", RunEvent, |m| m.kind = None),
        broken!(edge_envelope, "RunEvent.Delta", RunEvent, |m| m.n = 0),
        broken!(edge_envelope, "RunEvent.Delta", RunEvent, |m| m.kind = Some(Kind::Delta("x".repeat(MAX_DELTA + 1)))),
        broken!(edge_envelope, "RunEvent.Usage", RunEvent, |m| m.usage = None),
        broken!(edge_envelope, "RunEvent.Complete", RunEvent, |m| m.kind = Some(Kind::Complete(0))),
        broken!(edge_envelope, "RunEvent.Complete", RunEvent, |m| m.kind = Some(Kind::Complete(99))),
        broken!(edge_envelope, "RunEvent.Cancelled", RunEvent, |m| m.kind = Some(Kind::Cancelled(0))),
        broken!(edge_envelope, "ProviderTunnelFrame.End", TunnelFrame, |m| m.part = None),
        broken!(edge_envelope, "ProviderTunnelFrame.End", TunnelFrame, |m| m.n = 0),
        broken!(edge_envelope, "ProviderTunnelFrame.Body", TunnelFrame, |m| m.part =
            Some(Part::Body(TunnelBody { bytes: Bytes::new(), flags: 1 << 6 }))),
        broken!(edge_envelope, "ProviderTunnelFrame.Body", TunnelFrame, |m| m.part =
            Some(Part::Body(TunnelBody { bytes: vec![0; MAX_CHUNK + 1].into(), flags: 0 }))),
        broken!(edge_envelope, "ProviderTunnelFrame.Head", TunnelFrame, |m| m.part =
            Some(Part::Head(Head { status: 99, headers: vec![] }))),
        broken!(edge_envelope, "ProviderTunnelFrame.Head", TunnelFrame, |m| m.part =
            Some(Part::Head(Head { status: 70_000, headers: vec![] }))),
        broken!(edge_envelope, "ProviderTunnelFrame.Cancelled", TunnelFrame, |m| m.part = Some(Part::Cancelled(0))),
        broken!(node_envelope, "RequestChunk", RequestChunk, |m| m.data = vec![0; MAX_CHUNK + 1].into()),
        broken!(node_envelope, "CancelRequest", CancelRequest, |m| m.reason = 0),
        broken!(node_envelope, "ProviderTunnelRequest", TunnelRequest, |m| m.method = "NO METHOD".into()),
        broken!(node_envelope, "ProviderTunnelRequest", TunnelRequest, |m| m.path = "/a\nb".into()),
    ];
    assert_eq!(blamed, [Some(3); 18]);
}

#[test]
fn heads_of_requests_are_checked_field_by_field() {
    // WIR-4, W17
    type Break = fn(&mut proto::DispatchHead);
    let breaks: [Break; 15] = [
        |head| head.run_id = Bytes::from_static(&[1; 15]),
        |head| head.provider_id.clear(),
        |head| head.adapter = "a\0".into(),
        |head| head.target = "x".repeat(257),
        |head| head.session_id = Some(String::new()),
        |head| head.window = MIN_WINDOW - 1,
        |head| head.window = MAX_WINDOW + 1,
        |head| head.window = 0,
        |head| head.credential_lease = vec![0; 17 * 1024].into(),
        |head| head.credential_lease = Bytes::new(),
        |head| head.credential_scope = None,
        |head| head.credential_scope.as_mut().unwrap().principal.clear(),
        |head| head.credential_scope.as_mut().unwrap().route = "a\nb".into(),
        |head| head.credential_scope.as_mut().unwrap().slot.clear(),
        |head| head.credential_scope.as_mut().unwrap().profile = "x".repeat(257),
    ];
    for change in breaks {
        let run = broken!(node_envelope, "RunRequest", RunRequest, |m| change(m.head.as_mut().unwrap()));
        let tunnel =
            broken!(node_envelope, "ProviderTunnelRequest", TunnelRequest, |m| change(m.head.as_mut().unwrap()));
        assert_eq!((run, tunnel), (Some(3), Some(3)));
    }
    let nameless = broken!(node_envelope, "RunRequest", RunRequest, |m| m.head = None);
    let numberless = broken!(node_envelope, "RunRequest", RunRequest, |m| m.head.as_mut().unwrap().run = 0);
    assert_eq!((nameless, numberless), (None, None), "no run can be blamed");
}

#[test]
fn headers_are_bounded() {
    // WIR-8
    let header = |name: &str, value: usize| proto::Header { name: name.into(), value: vec![b'v'; value].into() };
    let invalid = [
        vec![header("a", 1); 65],
        vec![header("a", 16 * 1024)],
        vec![header("not a name", 1)],
        vec![proto::Header { name: "a".into(), value: Bytes::from_static(b"a\r\nb: c") }],
    ];
    for headers in invalid {
        let blamed = broken!(node_envelope, "ProviderTunnelRequest", TunnelRequest, |m| m.headers = headers.clone());
        assert_eq!(blamed, Some(3));
    }
}

#[test]
fn doubt_about_order_or_credit_ends_the_connection() {
    // WIR-15: a message that names no run can't be held against one
    let blamed = [
        broken!(edge_envelope, "RunEvent.Delta", RunEvent, |m| m.run = 0),
        broken!(edge_envelope, "ProviderTunnelFrame.End", TunnelFrame, |m| m.run = 0),
        broken!(edge_envelope, "RunAccepted", RunAccepted, |m| m.run = 0),
        broken!(edge_envelope, "WindowCredit", WindowCredit, |m| m.run = 0),
        broken!(node_envelope, "WindowCredit", WindowCredit, |m| m.run = 0),
        broken!(node_envelope, "RequestChunk", RequestChunk, |m| m.run = 0),
        broken!(node_envelope, "CancelRequest", CancelRequest, |m| m.run = 0),
    ];
    assert_eq!(blamed, [None; 7]);
}

#[test]
fn failures_are_taken_exactly_or_not_at_all() {
    // WIR-3, EXE-9
    type Break = fn(&mut proto::ExecutionFailure);
    let breaks: [Break; 22] = [
        |failure| failure.code = 0,
        |failure| failure.code = 18,
        |failure| failure.stage = 0,
        |failure| failure.provider_contacted = 0,
        |failure| failure.provider_reason = Some(0),
        |failure| failure.provider_reason = Some(-1),
        |failure| failure.upstream_status = Some(99),
        |failure| failure.upstream_status = Some(1000),
        |failure| failure.message = "x".repeat(257),
        |failure| failure.message = "two\nlines".into(),
        |failure| failure.credential = Some(0),
        |failure| failure.credential = Some(18),
        |failure| failure.credential = Some(proto::CredentialReason::BindingMismatch.into()),
        |failure| failure.binding_field = Some(proto::BindingField::Slot.into()),
        |failure| (failure.credential, failure.binding_field) = (Some(1), Some(1)),
        |failure| (failure.credential, failure.binding_field) = (Some(9), Some(0)),
        |failure| failure.stall.as_mut().unwrap().ownership_close = 0,
        |failure| failure.stall.as_mut().unwrap().ownership_close = 3,
        |failure| failure.stall.as_mut().unwrap().timeout_setting = 0,
        |failure| failure.stall.as_mut().unwrap().adapter.clear(),
        |failure| failure.stall.as_mut().unwrap().target = "\n".into(),
        |failure| failure.stall.as_mut().unwrap().health_observation_seq = Some(0),
    ];
    for change in breaks {
        let mut broken: proto::ExecutionFailure = stalled().into();
        change(&mut broken);
        let event = broken!(edge_envelope, "RunEvent.Error", RunEvent, |m| m.kind =
            Some(proto::run_event::Kind::Error(broken.clone())));
        let command = broken!(edge_envelope, "NodeCommandResponse.Failed", NodeCommandResponse, |m| m.outcome =
            Some(proto::node_command_response::Outcome::Failed(broken.clone())));
        assert_eq!((event, command), (Some(3), None));
    }
}

#[test]
fn evidence_that_is_no_pair_is_unknown() {
    // WDG-5
    for health in -1..=4 {
        for class in -1..=4 {
            let mut sent = proto::StallDetail::from(*stalled().stall.unwrap());
            sent.provider_health = health;
            sent.liveness_classification = class;
            let expected = match (health, class) {
                (1, 1) => LivenessClassification::RequestStalled,
                (2, 2) => LivenessClassification::ProviderUnhealthy,
                _ => LivenessClassification::HealthUnknown,
            };
            assert_eq!(StallDetail::try_from(sent).map(|stall| stall.liveness_classification), Ok(expected));
        }
    }
}

#[test]
fn a_stall_without_a_confirmed_close_is_never_retryable() {
    // WDG-4
    let mut sent = proto::StallDetail::from(*stalled().stall.unwrap());
    assert!(StallDetail::try_from(sent.clone()).unwrap().retryable());
    sent.ownership_close = proto::OwnershipClose::Unconfirmed.into();
    assert!(sent.retryable && !StallDetail::try_from(sent).unwrap().retryable());
}

#[test]
fn stall_details_have_the_names_of_the_specification() {
    // WDG-4
    let schema = include_str!("../../../proto/iop/wire/v1/wire.proto");
    let (_, rest) = schema.split_once("message StallDetail {").unwrap();
    let (body, _) = rest.split_once('}').unwrap();
    let fields: Vec<_> = body
        .lines()
        .filter_map(|line| line.trim().strip_suffix(';')?.split_once(" = "))
        .filter_map(|(field, _)| field.split(' ').next_back())
        .collect();
    let expected = "provider_health liveness_classification health_observation_seq ownership_close retryable idle_ms \
                    timeout_ms timeout_setting adapter target";
    assert_eq!(fields.join(" "), expected);
}

#[test]
fn messages_of_the_session_are_complete_or_refused() {
    // WIR-3, WIR-4
    use proto::register_response::Outcome;
    let refusal = |reason| Some(Outcome::Refused(proto::RegisterRefusal { reason, retry_after_ms: 0 }));
    let nobody = Some(Outcome::Accepted(proto::Registered { node_id: "n".into(), ..Default::default() }));
    let blamed = [
        broken!(edge_envelope, "Hello", Hello, |m| m.instance_id = Bytes::new()),
        broken!(edge_envelope, "Hello", Hello, |m| m.proto_min = 3),
        broken!(edge_envelope, "Hello", Hello, |m| m.connection_ordinal = 0),
        broken!(edge_envelope, "Hello", Hello, |m| m.features = vec![String::new(); 257]),
        broken!(edge_envelope, "Hello", Hello, |m| m.node_version = "x".repeat(257)),
        broken!(edge_envelope, "RegisterRequest", RegisterRequest, |m| m.recipient_key = Bytes::from_static(&[1; 31])),
        broken!(edge_envelope, "RegisterRequest", RegisterRequest, |m| m.token = "x".repeat(1025)),
        broken!(edge_envelope, "RegisterRequest", RegisterRequest, |m| m.claimed_node_id = Some(String::new())),
        broken!(edge_envelope, "NodeReadyRequest", NodeReadyRequest, |m| m.node_id.clear()),
        broken!(edge_envelope, "NodeReadyRequest", NodeReadyRequest, |m| m.providers[0].provider_id.clear()),
        broken!(edge_envelope, "NodeReadyRequest", NodeReadyRequest, |m| m.providers[0].targets[0].target.clear()),
        broken!(edge_envelope, "NodeCommandResponse.Failed", NodeCommandResponse, |m| m.outcome = None),
        broken!(edge_envelope, "Goodbye", Goodbye, |m| m.code = 0),
        broken!(node_envelope, "Goodbye", Goodbye, |m| m.code = 15),
        broken!(node_envelope, "RegisterResponse.Refused", RegisterResponse, |m| m.outcome = refusal(0)),
        broken!(node_envelope, "RegisterResponse.Refused", RegisterResponse, |m| m.outcome = refusal(8)),
        broken!(node_envelope, "RegisterResponse.Refused", RegisterResponse, |m| m.outcome = None),
        broken!(node_envelope, "RegisterResponse.Accepted", RegisterResponse, |m| m.outcome = nobody),
        broken!(node_envelope, "ConfigUpdate.Managed", ConfigUpdate, |m| {
            m.config.as_mut().unwrap().providers[0].credential.as_mut().unwrap().slot.clear();
        }),
        broken!(node_envelope, "ConfigUpdate.Managed", ConfigUpdate, |m| {
            m.config.as_mut().unwrap().providers[0].credential.as_mut().unwrap().profile = "a\nb".into();
        }),
        broken!(node_envelope, "ConfigUpdate", ConfigUpdate, |m| m.config.as_mut().unwrap().providers[0].wire = 0),
        broken!(node_envelope, "ConfigUpdate", ConfigUpdate, |m| m.config.as_mut().unwrap().providers[0]
            .cancel_policy = 3),
        broken!(node_envelope, "NodeCommandRequest.TransportStatus", NodeCommandRequest, |m| m.command = None),
        broken!(node_envelope, "NodeCommandRequest.OllamaApi", NodeCommandRequest, |m| m.session_id =
            Some("\n".into())),
    ];
    assert_eq!(blamed, [None; 24]);
}

#[test]
fn credentials_and_answers_to_commands_are_complete_or_refused() {
    // WIR-3, WIR-4
    use proto::node_command_response::{CapabilitiesResult, OllamaApiResult, Outcome};
    type Break = fn(&mut CapabilitiesResult);
    let breaks: [Break; 6] = [
        |result| result.adapter.clear(),
        |result| result.health.as_mut().unwrap().target.clear(),
        |result| result.health.as_mut().unwrap().status = 0,
        |result| result.health.as_mut().unwrap().status = 4,
        |result| result.health.as_mut().unwrap().health_observation_seq = 0,
        |result| result.health = Some(Default::default()),
    ];
    for change in breaks {
        let blamed = broken!(edge_envelope, "NodeCommandResponse.Capabilities", NodeCommandResponse, |m| {
            let mut result = CapabilitiesResult::from(capabilities());
            change(&mut result);
            m.outcome = Some(Outcome::Capabilities(result));
        });
        assert_eq!(blamed, None);
    }
    let answer = |status, len| Some(Outcome::OllamaApi(OllamaApiResult { status, body: vec![0; len].into() }));
    let key = |len| Bytes::from(vec![1; len]);
    let state = |slot: &str| proto::CredentialState { slot: slot.into(), revision: 1, disabled: false };
    let blamed = [
        broken!(edge_envelope, "NodeCommandResponse.OllamaApi", NodeCommandResponse, |m| m.outcome = answer(99, 0)),
        broken!(edge_envelope, "NodeCommandResponse.OllamaApi", NodeCommandResponse, |m| m.outcome =
            answer(200, 32 * 1024 + 1)),
        broken!(node_envelope, "RegisterResponse.Accepted", RegisterResponse, |m| {
            let Some(proto::register_response::Outcome::Accepted(registered)) = &mut m.outcome else { panic!() };
            registered.trusted_lease_signers = vec![key(31)];
        }),
        broken!(node_envelope, "ConfigUpdate", ConfigUpdate, |m| m.trusted_lease_signers = vec![key(33)]),
        broken!(node_envelope, "ConfigUpdate", ConfigUpdate, |m| m.trusted_lease_signers = vec![key(32); 9]),
        broken!(node_envelope, "ConfigUpdate", ConfigUpdate, |m| m.credential_states = vec![state("")]),
        broken!(node_envelope, "ConfigUpdate", ConfigUpdate, |m| m.credential_states = vec![state("s"); 4097]),
    ];
    assert_eq!(blamed, [None; 7]);
}

#[test]
fn problems_name_fields_and_never_values() {
    // OBS-4
    let (_, mut envelope) = node_envelope("ProviderTunnelRequest");
    if let Some(Body::TunnelRequest(request)) = &mut envelope.body {
        request.path = "SENTINEL\n".into();
    }
    let error = ToNode::decode(envelope.encode_to_vec().into()).unwrap_err();
    assert!(!error.to_string().contains("SENTINEL") && !format!("{error:?}").contains("SENTINEL"));
}
