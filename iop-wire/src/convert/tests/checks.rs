//! What is checked before a message is pushed is what the peer would check.

use http::HeaderName;
use proptest::prelude::*;

use super::round_trip::{to_edges, to_nodes};
use super::*;
use crate::limits::{MAX_COMMAND_BODY, MAX_HEADER_BYTES, MAX_HEADERS, MAX_LEASE, MAX_PATH};

/// Lengths around a limit.
fn around(limit: usize) -> impl Strategy<Value = usize> {
    prop_oneof![limit - 2..=limit + 2, 0..limit]
}

fn filler(len: usize) -> String {
    "x".repeat(len)
}

fn zeros(len: usize) -> Bytes {
    vec![0; len].into()
}

/// A text that may be too long, empty, or hold a control character.
fn texts(limit: usize) -> impl Strategy<Value = String> {
    (around(limit), any::<bool>()).prop_map(|(len, control)| match control && len > 0 {
        true => format!("\n{}", filler(len - 1)),
        false => filler(len),
    })
}

/// Header maps around both limits.
fn maps() -> impl Strategy<Value = HeaderMap> {
    (around(MAX_HEADERS), around(MAX_HEADER_BYTES)).prop_map(|(count, bytes)| {
        let mut headers = HeaderMap::new();
        for n in 0..count {
            let name = HeaderName::try_from(format!("x-{n:03}")).unwrap();
            let rest = if n == 0 { bytes.saturating_sub(count * 5) } else { 0 };
            headers.append(name, HeaderValue::try_from(filler(rest)).unwrap());
        }
        headers
    })
}

fn edge_messages() -> impl Strategy<Value = ToEdge> {
    let call = (around(MAX_DELTA), around(MAX_DELTA), around(MAX_DELTA)).prop_map(|(id, name, arguments)| {
        RunEventKind::ToolCallDelta(ToolCallDelta {
            index: 0,
            id: Some(filler(id)),
            name: Some(filler(name)),
            arguments: filler(arguments),
        })
    });
    let kind = prop_oneof![
        around(MAX_DELTA).prop_map(|len| RunEventKind::Delta(filler(len))),
        around(MAX_DELTA).prop_map(|len| RunEventKind::ReasoningDelta(filler(len))),
        call,
        Just(RunEventKind::Usage),
    ];
    let part = prop_oneof![
        around(MAX_CHUNK).prop_map(|len| TunnelFrame::Body {
            bytes: zeros(len),
            flags: FrameFlags::NONE.with(FrameFlags::PROGRESS)
        }),
        maps().prop_map(|headers| TunnelFrame::Head(TunnelHead { status: StatusCode::OK, headers })),
    ];
    let list = (0..260_usize, texts(256)).prop_map(|(len, kind)| {
        ToEdge::Register(RegisterRequest {
            token: Redacted::new("t".into()),
            recipient_key: Bytes::new(),
            inventory: vec![AdapterInventory { kind, version: String::new() }; len],
            claimed_node_id: None,
        })
    });
    let answered = around(MAX_COMMAND_BODY)
        .prop_map(|len| answer(CommandResult::OllamaApi { status: StatusCode::OK, body: Redacted::new(zeros(len)) }));
    prop_oneof![
        4 => to_edges().boxed(),
        2 => kind.prop_map(event).boxed(),
        2 => part.prop_map(frame).boxed(),
        1 => list.boxed(),
        1 => answered.boxed(),
        1 => texts(MAX_PATH)
            .prop_map(|error| ToEdge::ConfigAck(ConfigAck { seen_revision: 1, applied_revision: 1, error, providers: Vec::new() }))
            .boxed(),
    ]
}

fn scopes() -> impl Strategy<Value = Option<Box<CredentialScope>>> {
    let scope = [texts(256), texts(256), texts(256)].prop_map(|[route, slot, profile]| {
        Box::new(CredentialScope { principal: Principal::new("p").unwrap(), route, slot, profile })
    });
    proptest::option::of(scope)
}

fn node_messages() -> impl Strategy<Value = ToNode> {
    let window = prop_oneof![MIN_WINDOW - 1..=MIN_WINDOW, MAX_WINDOW..=MAX_WINDOW + 1];
    let lease = prop_oneof![Just(0), around(MAX_LEASE)];
    let head = (window, lease, scopes()).prop_map(|(window, lease, credential_scope)| DispatchHead {
        window,
        credential_lease: Redacted::new(zeros(lease)),
        credential_scope,
        ..dispatch()
    });
    let head = head.boxed();
    let tunnel =
        (prop_oneof![Just(dispatch()), head.clone()], texts(MAX_PATH), maps()).prop_map(|(head, path, headers)| {
            ToNode::Tunnel(TunnelDispatch {
                head,
                method: Method::POST,
                path: Redacted::new(path),
                headers: Redacted::new(headers),
            })
        });
    let command = (texts(MAX_PATH), around(MAX_COMMAND_BODY)).prop_map(|(path, body)| {
        let body = Redacted::new(zeros(body));
        let command = NodeCommand::OllamaApi { adapter: adapter(), method: Method::GET, path, body };
        ToNode::Command(CommandRequest { command_id: 1, session_id: None, deadline_ms: 1, command })
    });
    let signers = (0..12_usize, texts(256)).prop_map(|(signers, slot)| {
        ToNode::ConfigUpdate(ConfigUpdate {
            config: Some(config()),
            trusted_lease_signers: vec![[1; 32]; signers],
            credential_states: vec![CredentialState { slot, revision: 1, disabled: false }],
        })
    });
    prop_oneof![
        4 => to_nodes().boxed(),
        2 => head.prop_map(|head| ToNode::Run(RunDispatch { head })).boxed(),
        2 => tunnel.boxed(),
        1 => command.boxed(),
        1 => signers.boxed(),
        1 => around(MAX_CHUNK)
            .prop_map(|len| ToNode::Chunk(RequestChunk { run: RunNumber(3), data: zeros(len), last: true }))
            .boxed(),
    ]
}

/// What became of a message at the peer.
fn taken<M: WireMessage>(message: &M) -> bool {
    match M::encode(Sequenced { seq: 1, message: message.clone() }) {
        Ok(bytes) => M::decode(bytes).is_ok(),
        Err(_) => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    // W3, WIR-8: nothing that the peer takes is refused here, nothing that it refuses passes.
    #[test]
    fn a_message_to_an_edge_passes_exactly_if_the_edge_takes_it(message in edge_messages()) {
        prop_assert_eq!(message.check().is_ok(), taken(&message));
        prop_assert_eq!(message.check().is_ok(), check::by_encoding(&message).is_ok());
    }

    // W3, WIR-8
    #[test]
    fn a_message_to_a_node_passes_exactly_if_the_node_takes_it(message in node_messages()) {
        prop_assert_eq!(message.check().is_ok(), taken(&message));
        prop_assert_eq!(message.check().is_ok(), check::by_encoding(&message).is_ok());
    }
}

#[test]
fn what_an_outbox_numbers_passes_before_it_has_a_number() {
    // W3, WIR-11
    let mut head = dispatch();
    head.run = RunNumber(0);
    assert_eq!(ToNode::Run(RunDispatch { head: head.clone() }).check(), Ok(()));
    let delta = RunEvent { seq: 0, kind: RunEventKind::Delta("x".into()), usage: None };
    assert_eq!(ToEdge::Event(RunNumber(0), delta).check(), Ok(()));
    assert_eq!(ToEdge::Frame(RunNumber(0), 0, TunnelFrame::End).check(), Ok(()));
    assert_eq!(ToEdge::Accepted(RunNumber(0)).check(), Ok(()));
    head.window = 0;
    let refused = ToNode::Run(RunDispatch { head: head.clone() }).check();
    assert_eq!(refused, Err(ConvertError::new("window is out of range")), "no run has the number 0");
    head.run = RunNumber(3);
    let refused = ToNode::Run(RunDispatch { head }).check().unwrap_err();
    assert_eq!((refused.problem, refused.run), ("window is out of range", Some(RunNumber(3))));
}
