//! Whatever is in range arrives exactly as it was sent.

use proptest::prelude::*;

use super::*;
use crate::limits::MAX_EXEMPT;

fn name() -> impl Strategy<Value = String> {
    proptest::collection::vec(prop_oneof![Just('é'), proptest::char::range('!', '~')], 1..20)
        .prop_map(|chars| chars.into_iter().collect())
}

fn text(limit: usize) -> impl Strategy<Value = String> {
    proptest::collection::vec(prop_oneof![Just('\n'), Just('€'), proptest::char::any()], 0..limit / 4)
        .prop_map(|chars| chars.into_iter().collect())
}

fn plain(limit: usize) -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::char::range(' ', '~'), 0..limit).prop_map(|chars| chars.into_iter().collect())
}

fn data(limit: usize) -> impl Strategy<Value = Bytes> {
    prop_oneof![proptest::collection::vec(any::<u8>(), 0..300), Just(vec![7; limit])].prop_map(Bytes::from)
}

fn one_of<T: Copy + std::fmt::Debug + 'static>(all: &'static [T]) -> impl Strategy<Value = T> {
    proptest::sample::select(all)
}

fn usages() -> impl Strategy<Value = Usage> {
    any::<[Option<u64>; 4]>().prop_map(|[input_tokens, output_tokens, reasoning_tokens, cached_input_tokens]| Usage {
        input_tokens,
        output_tokens,
        reasoning_tokens,
        cached_input_tokens,
    })
}

fn stalls() -> impl Strategy<Value = StallDetail> {
    let lists = (one_of(LivenessClassification::ALL), one_of(TimeoutSetting::ALL));
    let close = prop_oneof![
        Just(OwnershipClose::Unconfirmed),
        any::<bool>().prop_map(|retryable| OwnershipClose::Confirmed { retryable }),
    ];
    (name(), targets(), lists, close, any::<u64>(), any::<[u64; 2]>()).prop_map(
        |(adapter, target, (class, setting), close, seq, [idle_ms, timeout_ms])| {
            let mut stall = StallDetail::new(AdapterKey::new(adapter).unwrap(), target, setting);
            stall.liveness_classification = class;
            stall.health_observation_seq = NonZeroU64::new(seq % 4);
            stall.ownership_close = close;
            stall.idle_ms = idle_ms;
            stall.timeout_ms = timeout_ms;
            stall
        },
    )
}

fn credentials() -> impl Strategy<Value = CredentialReason> {
    let mismatch = one_of(BindingField::ALL).prop_map(CredentialReason::BindingMismatch);
    prop_oneof![2 => one_of(CredentialReason::PLAIN).boxed(), 1 => mismatch.boxed()]
}

/// Whatever can be built, with a message of any text.
fn failures() -> impl Strategy<Value = ExecutionFailure> {
    let code = (one_of(FailureCode::ALL), one_of(FailureStage::ALL), one_of(ProviderContacted::ALL));
    let reason = proptest::option::of(one_of(ProviderReason::ALL));
    let message = prop_oneof![text(1200), plain(256), any::<String>()];
    let details = (proptest::option::of(stalls()), proptest::option::of(credentials()));
    (code, message, any::<u16>(), any::<Option<u32>>(), reason, details).prop_map(
        |((code, stage, contacted), message, status, wait, reason, (stall, credential))| {
            let mut failure = ExecutionFailure::new(code, stage, contacted, message)
                .with_status(status % 1100)
                .with_retry_after_ms(wait)
                .with_reason(reason);
            failure.stall = stall.map(Box::new);
            failure.credential = credential;
            failure
        },
    )
}

fn header_maps() -> impl Strategy<Value = HeaderMap> {
    let value = proptest::collection::vec(prop_oneof![32..127_u8, 128..=255_u8], 0..40);
    proptest::collection::vec(("[a-z][a-z0-9-]{0,20}", value), 0..64).prop_map(|pairs| {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(http::HeaderName::try_from(name).unwrap(), HeaderValue::from_bytes(&value).unwrap());
        }
        headers
    })
}

fn run() -> impl Strategy<Value = RunNumber> {
    prop_oneof![1..100_u64, 1..=u64::MAX].prop_map(RunNumber)
}

fn event_kinds() -> impl Strategy<Value = RunEventKind> {
    let call = (any::<u32>(), proptest::option::of(text(40)), proptest::option::of(text(40)), text(400))
        .prop_map(|(index, id, name, arguments)| ToolCallDelta { index, id, name, arguments });
    prop_oneof![
        Just(RunEventKind::Start),
        text(MAX_DELTA).prop_map(RunEventKind::Delta),
        text(MAX_DELTA).prop_map(RunEventKind::ReasoningDelta),
        call.prop_map(RunEventKind::ToolCallDelta),
        one_of(FinishReason::ALL).prop_map(RunEventKind::Complete),
        failures().prop_map(RunEventKind::Error),
        one_of(CancelReason::ALL).prop_map(RunEventKind::Cancelled),
    ]
}

fn events() -> impl Strategy<Value = RunEvent> {
    let any_kind = (1..=u64::MAX, event_kinds(), proptest::option::of(usages()));
    let usage = (1..=u64::MAX, Just(RunEventKind::Usage), usages().prop_map(Some));
    prop_oneof![4 => any_kind.boxed(), 1 => usage.boxed()].prop_map(|(seq, kind, usage)| RunEvent { seq, kind, usage })
}

fn frames() -> impl Strategy<Value = TunnelFrame> {
    let flags = (0..64_u32).prop_map(|bits| FrameFlags::from_wire(bits).unwrap());
    let head = (100..=999_u16, header_maps())
        .prop_map(|(status, headers)| TunnelHead { status: StatusCode::from_u16(status).unwrap(), headers });
    prop_oneof![
        head.prop_map(TunnelFrame::Head),
        (data(MAX_CHUNK), flags).prop_map(|(bytes, flags)| TunnelFrame::Body { bytes, flags }),
        usages().prop_map(TunnelFrame::Usage),
        Just(TunnelFrame::End),
        failures().prop_map(TunnelFrame::Failed),
        one_of(CancelReason::ALL).prop_map(TunnelFrame::Cancelled),
    ]
}

fn session() -> impl Strategy<Value = Option<SessionId>> {
    proptest::option::of(name().prop_map(|name| SessionId::new(name).unwrap()))
}

fn targets() -> impl Strategy<Value = Target> {
    name().prop_map(|name| Target::new(name).unwrap())
}

fn goodbyes() -> impl Strategy<Value = Goodbye> {
    (one_of(CloseCode::ALL), any::<u32>()).prop_map(|(code, retry_after_ms)| Goodbye { code, retry_after_ms })
}

fn hellos() -> impl Strategy<Value = Hello> {
    let features = proptest::collection::vec(plain(30), 0..5);
    (0..5_u32, 0..5_u32, features, plain(40), any::<[u8; 16]>(), 1..=u64::MAX, any::<u32>()).prop_map(
        |(proto_min, more, features, node_version, instance_id, connection_ordinal, max_envelope)| Hello {
            proto_min,
            proto_max: proto_min + more,
            features,
            node_version,
            instance_id,
            connection_ordinal,
            max_envelope,
        },
    )
}

fn registers() -> impl Strategy<Value = RegisterRequest> {
    let key = prop_oneof![Just(Bytes::new()), any::<[u8; 32]>().prop_map(|key| Bytes::copy_from_slice(&key))];
    let entry = (plain(30), plain(30)).prop_map(|(kind, version)| AdapterInventory { kind, version });
    (plain(100), key, proptest::collection::vec(entry, 0..5), proptest::option::of(name())).prop_map(
        |(token, recipient_key, inventory, node)| RegisterRequest {
            token: Redacted::new(token),
            recipient_key,
            inventory,
            claimed_node_id: node.map(|node| NodeId::new(node).unwrap()),
        },
    )
}

fn readies() -> impl Strategy<Value = NodeReadyRequest> {
    let target = (targets(), any::<u64>()).prop_map(|(target, context_length)| ReadyTarget { target, context_length });
    let provider = (name(), any::<u32>(), any::<[bool; 5]>(), proptest::collection::vec(target, 0..4)).prop_map(
        |(id, max_concurrency, [tunnels, runs, tools, reasoning, messages], targets)| ProviderReady {
            provider_id: ProviderId::new(id).unwrap(),
            max_concurrency,
            tunnels,
            runs,
            tools,
            reasoning,
            messages,
            targets,
        },
    );
    (name(), any::<u64>(), proptest::collection::vec(provider, 0..4)).prop_map(|(node, config_revision, providers)| {
        NodeReadyRequest { node_id: NodeId::new(node).unwrap(), config_revision, providers }
    })
}

fn answers() -> impl Strategy<Value = CommandResponse> {
    let health = (targets(), one_of(Health::ALL), 1..=u64::MAX).prop_map(|(target, status, seq)| TargetHealth {
        target,
        status,
        health_observation_seq: NonZeroU64::new(seq).unwrap(),
    });
    let capabilities = (name(), any::<[bool; 7]>(), any::<u32>(), proptest::option::of(health)).prop_map(
        |(adapter, [runs, tunnels, commands, tools, reasoning, embeddings, messages], limit, health)| {
            let mut capabilities = Capabilities::runs_only()
                .with_max_concurrency(NonZeroU32::new(limit % 3))
                .with_features(tools, reasoning);
            capabilities.runs = runs;
            capabilities.tunnels = tunnels;
            capabilities.commands = commands;
            capabilities.embeddings = embeddings;
            capabilities.messages = messages;
            CapabilitiesResult { adapter: AdapterKey::new(adapter).unwrap(), capabilities, health }
        },
    );
    let ollama = (100..=999_u16, data(32 * 1024)).prop_map(|(status, body)| CommandResult::OllamaApi {
        status: StatusCode::from_u16(status).unwrap(),
        body: Redacted::new(body),
    });
    let outcome = prop_oneof![
        any::<u32>().prop_map(|active_runs| Ok(CommandResult::TransportStatus { active_runs })),
        capabilities.prop_map(|result| Ok(CommandResult::Capabilities(result))),
        ollama.prop_map(Ok),
        failures().prop_map(Err),
    ];
    (any::<u64>(), session(), outcome).prop_map(|(command_id, session_id, outcome)| CommandResponse {
        command_id,
        session_id,
        outcome,
    })
}

pub(super) fn to_edges() -> impl Strategy<Value = ToEdge> {
    prop_oneof![
        hellos().prop_map(ToEdge::Hello),
        registers().prop_map(ToEdge::Register),
        readies().prop_map(ToEdge::Ready),
        run().prop_map(ToEdge::Accepted),
        (run(), events()).prop_map(|(run, event)| ToEdge::Event(run, event)),
        (run(), 1..=u64::MAX, frames()).prop_map(|(run, n, frame)| ToEdge::Frame(run, n, frame)),
        (run(), any::<u32>()).prop_map(|(run, bytes)| ToEdge::Credit(run, bytes)),
        answers().prop_map(ToEdge::CommandResponse),
        (any::<u64>(), any::<u64>(), plain(100), readies()).prop_map(
            |(seen_revision, applied_revision, error, ready)| ToEdge::ConfigAck(ConfigAck {
                seen_revision,
                applied_revision,
                error,
                providers: ready.providers,
            })
        ),
        any::<u64>().prop_map(|nonce| ToEdge::Ping(Ping { nonce })),
        any::<(u64, u64)>().prop_map(|(nonce, edge_time_ms)| ToEdge::Pong(Pong { nonce, edge_time_ms })),
        any::<(u64, bool)>().prop_map(|(deadline_ms, returning)| ToEdge::Drain(Drain { deadline_ms, returning })),
        goodbyes().prop_map(ToEdge::Goodbye),
    ]
}

fn configs() -> impl Strategy<Value = NodeConfigPayload> {
    let names = (name(), name(), plain(20), plain(60), plain(30));
    let modes = (one_of(WireMode::ALL), one_of(CancelPolicy::ALL));
    let credential = proptest::option::of((name(), name()).prop_map(|(slot, profile)| CredentialUse { slot, profile }));
    let lists = (proptest::collection::vec(targets(), 0..4), credential);
    let provider = (names, modes, any::<[u32; 2]>(), any::<[u64; 6]>(), lists).prop_map(
        |((id, key, kind, base_url, auth), (wire, cancel_policy), capacity, times, (targets, credential))| {
            ProviderConfig {
                provider_id: ProviderId::new(id).unwrap(),
                adapter: AdapterKey::new(key).unwrap(),
                kind,
                base_url,
                wire,
                capacity: capacity[0],
                long_capacity: capacity[1],
                targets,
                response_stall_timeout_ms: times[0],
                first_response_timeout_ms: times[1],
                stall_per_1k_prompt_ms: times[2],
                close_grace_ms: times[3],
                probe_timeout_ms: times[4],
                terminal_linger_ms: times[5],
                cancel_policy,
                auth,
                credential,
            }
        },
    );
    (any::<u64>(), proptest::collection::vec(provider, 0..4))
        .prop_map(|(revision, providers)| NodeConfigPayload { revision, providers })
}

fn signers() -> impl Strategy<Value = Vec<LeaseSigner>> {
    proptest::collection::vec(any::<[u8; 32]>(), 0..=8)
}

fn updates() -> impl Strategy<Value = ConfigUpdate> {
    let state = (name(), any::<u64>(), any::<bool>()).prop_map(|(slot, revision, disabled)| CredentialState {
        slot,
        revision,
        disabled,
    });
    (proptest::option::of(configs()), signers(), proptest::collection::vec(state, 0..4)).prop_map(
        |(config, trusted_lease_signers, credential_states)| ConfigUpdate {
            config,
            trusted_lease_signers,
            credential_states,
        },
    )
}

fn registered() -> impl Strategy<Value = RegisterResponse> {
    let outcome = prop_oneof![
        (name(), configs(), signers()).prop_map(|(node, config, trusted_lease_signers)| {
            Ok(Registered { node_id: NodeId::new(node).unwrap(), config, trusted_lease_signers })
        }),
        (one_of(RefusalReason::ALL), any::<u32>())
            .prop_map(|(reason, ms)| Err(RegisterRefusal { reason, retry_after: Duration::from_millis(ms.into()) })),
    ];
    (any::<u64>(), outcome).prop_map(|(edge_time_ms, outcome)| RegisterResponse { edge_time_ms, outcome })
}

/// A lease with its scope, or neither.
fn leases() -> impl Strategy<Value = (Bytes, Option<Box<CredentialScope>>)> {
    let scope = [name(), name(), name(), name()].prop_map(|[principal, route, slot, profile]| {
        Box::new(CredentialScope { principal: Principal::new(principal).unwrap(), route, slot, profile })
    });
    let lease = proptest::collection::vec(any::<u8>(), 1..1000).prop_map(Bytes::from);
    prop_oneof![
        Just((Bytes::new(), None)).boxed(),
        (lease, scope).prop_map(|(lease, scope)| (lease, Some(scope))).boxed()
    ]
}

fn heads() -> impl Strategy<Value = DispatchHead> {
    let names = (name(), name(), targets(), session());
    let counts = (any::<[u64; 3]>(), MIN_WINDOW..=MAX_WINDOW, any::<u32>());
    (any::<[u8; 16]>(), run(), names, any::<[bool; 2]>(), counts, leases()).prop_map(
        |(
            id,
            run,
            (provider, adapter, target, session_id),
            [background, stream],
            (times, window, tokens),
            (lease, scope),
        )| {
            DispatchHead {
                run_id: RunId::from_bytes(id),
                run,
                provider_id: ProviderId::new(provider).unwrap(),
                adapter: AdapterKey::new(adapter).unwrap(),
                target,
                session_id,
                background,
                stream,
                response_stall_timeout_ms: times[0],
                deadline_ms: times[1],
                body_len: times[2],
                window,
                prompt_tokens_estimate: tokens,
                credential_lease: Redacted::new(lease),
                credential_scope: scope,
            }
        },
    )
}

fn methods() -> impl Strategy<Value = Method> {
    proptest::sample::select(vec![Method::GET, Method::POST, Method::DELETE, Method::from_bytes(b"PURGE").unwrap()])
}

fn commands() -> impl Strategy<Value = NodeCommand> {
    let key = || name().prop_map(|name| AdapterKey::new(name).unwrap());
    prop_oneof![
        (key(), proptest::option::of(targets()))
            .prop_map(|(adapter, target)| NodeCommand::Capabilities { adapter, target }),
        Just(NodeCommand::TransportStatus),
        (key(), methods(), plain(60), data(32 * 1024)).prop_map(|(adapter, method, path, body)| {
            NodeCommand::OllamaApi { adapter, method, path, body: Redacted::new(body) }
        }),
    ]
}

pub(super) fn to_nodes() -> impl Strategy<Value = ToNode> {
    let ack = (any::<u32>(), proptest::collection::vec(plain(30), 0..4), any::<u32>(), plain(30))
        .prop_map(|(proto, features, max_envelope, edge_id)| HelloAck { proto, features, max_envelope, edge_id });
    let tunnel = (heads(), methods(), plain(100), header_maps()).prop_map(|(head, method, path, headers)| {
        TunnelDispatch { head, method, path: Redacted::new(path), headers: Redacted::new(headers) }
    });
    let command = (any::<u64>(), session(), any::<u64>(), commands()).prop_map(
        |(command_id, session_id, deadline_ms, command)| CommandRequest {
            command_id,
            session_id,
            deadline_ms,
            command,
        },
    );
    prop_oneof![
        ack.prop_map(ToNode::HelloAck),
        registered().prop_map(ToNode::RegisterResponse),
        any::<(bool, u64)>()
            .prop_map(|(ready, lease_generation)| ToNode::ReadyResponse(NodeReadyResponse { ready, lease_generation })),
        heads().prop_map(|head| ToNode::Run(RunDispatch { head })),
        tunnel.prop_map(ToNode::Tunnel),
        (run(), data(MAX_CHUNK), any::<bool>()).prop_map(|(run, data, last)| ToNode::Chunk(RequestChunk {
            run,
            data,
            last
        })),
        (run(), any::<u32>()).prop_map(|(run, bytes)| ToNode::Credit(run, bytes)),
        (run(), one_of(CancelReason::ALL)).prop_map(|(run, reason)| ToNode::Cancel(run, reason)),
        command.prop_map(ToNode::Command),
        updates().prop_map(ToNode::ConfigUpdate),
        any::<u64>().prop_map(|nonce| ToNode::Ping(Ping { nonce })),
        any::<(u64, u64)>().prop_map(|(nonce, edge_time_ms)| ToNode::Pong(Pong { nonce, edge_time_ms })),
        any::<(u64, bool)>().prop_map(|(deadline_ms, returning)| ToNode::Drain(Drain { deadline_ms, returning })),
        goodbyes().prop_map(ToNode::Goodbye),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    // WIR-4, WIR-8: what is in range is below the size limits and comes back as it was.
    #[test]
    fn every_message_to_an_edge_comes_back_as_it_was(seq in any::<u64>(), message in to_edges()) {
        prop_assert!(message.check().is_ok());
        let sent = Sequenced { seq, message };
        let bytes = ToEdge::encode(sent.clone()).unwrap();
        prop_assert_eq!(ToEdge::decode(bytes), Ok(sent));
    }

    // WIR-4, WIR-8
    #[test]
    fn every_message_to_a_node_comes_back_as_it_was(seq in any::<u64>(), message in to_nodes()) {
        prop_assert!(message.check().is_ok());
        let sent = Sequenced { seq, message };
        let bytes = ToNode::encode(sent.clone()).unwrap();
        prop_assert_eq!(ToNode::decode(bytes), Ok(sent));
    }

    // EXE-9: the peer never refuses a terminal for what a provider, or a caller of ours, put into it.
    #[test]
    fn every_failure_arrives(failure in failures(), message in any::<String>(), status in any::<Option<u16>>()) {
        let sent = |failure: &ExecutionFailure| ToEdge::decode(encoded(&frame(TunnelFrame::Failed(failure.clone()))));
        let arrived = |failure| Ok(Sequenced { seq: 2, message: frame(TunnelFrame::Failed(failure)) });
        prop_assert_eq!(sent(&failure), arrived(failure.clone()));
        // WIR-7: exempt from credit, so bounded.
        prop_assert!(encoded(&frame(TunnelFrame::Failed(failure.clone()))).len() <= MAX_EXEMPT);
        let mut changed = failure;
        changed.message = message.into();
        changed.upstream_status = status;
        prop_assert!(frame(TunnelFrame::Failed(changed.clone())).check().is_ok());
        let mut mended = changed.clone();
        mended.message = safe_message(mended.message);
        mended.upstream_status = status.filter(|status| (100..=999).contains(status));
        prop_assert_eq!(sent(&changed), arrived(mended));
    }

    // WIR-4: nothing a peer sends can do more than be refused.
    #[test]
    fn arbitrary_bytes_are_refused_and_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = ToEdge::decode(bytes.clone().into());
        let _ = ToNode::decode(bytes.into());
    }

    // WIR-4: the same for a message that was changed on its way.
    #[test]
    fn damaged_messages_are_refused_or_valid(message in to_edges(), at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let mut bytes = ToEdge::encode(Sequenced { seq: 1, message }).unwrap().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(decoded) = ToEdge::decode(bytes.into()) {
            prop_assert!(decoded.message.check().is_ok());
        }
    }
}

#[test]
fn one_of_each_message_comes_back_as_it_was() {
    // WIR-5
    for (name, message) in to_edge() {
        assert_eq!(ToEdge::decode(encoded(&message)).map(|decoded| decoded.message), Ok(message), "{name}");
    }
    for (name, message) in to_node() {
        assert_eq!(ToNode::decode(encoded(&message)).map(|decoded| decoded.message), Ok(message), "{name}");
    }
}

#[test]
fn progress_stays_on_the_node() {
    // API-10
    let flags = FrameFlags::USAGE.with(FrameFlags::PROGRESS);
    let sent = frame(TunnelFrame::Body { bytes: Bytes::new(), flags });
    let received = frame(TunnelFrame::Body { bytes: Bytes::new(), flags: FrameFlags::USAGE });
    assert_eq!(ToEdge::decode(encoded(&sent)).map(|decoded| decoded.message), Ok(received));
}
