//! Decides how registration and configuration cross the wire.

use std::time::Duration;

use bytes::Bytes;
use iop_execution::Redacted;

use super::bounds::{Checked, adapter, ensure, list, named, node_id, provider_id, required, target, text};
use super::{ConvertError, enums};
use crate::limits::{MAX_CREDENTIAL_STATES, MAX_LEASE_SIGNERS, MAX_LIST, MAX_PATH, MAX_TARGETS, MAX_TEXT, MAX_TOKEN};
use crate::message::{
    AdapterInventory, ConfigAck, ConfigUpdate, CredentialState, CredentialUse, Hello, HelloAck, LeaseSigner,
    NodeConfigPayload, NodeReadyRequest, NodeReadyResponse, ProviderConfig, ProviderReady, ReadyTarget,
    RegisterRefusal, RegisterRequest, RegisterResponse, Registered,
};
use crate::proto;
use proto::register_response::Outcome;

pub(super) const NO_ERROR: &str = "error is no valid text";

/// Bytes of an X25519 public key.
const KEY: usize = 32;

fn features(values: Vec<String>) -> Checked<Vec<String>> {
    list(values, MAX_LIST, "too many features", |feature| text(feature, MAX_TEXT, "a feature is no valid text"))
}

fn signers(values: Vec<Bytes>) -> Checked<Vec<LeaseSigner>> {
    list(values, MAX_LEASE_SIGNERS, "too many lease signers", |key| {
        key.as_ref().try_into().map_err(|_| ConvertError::new("the key of a lease signer is not 32 bytes long"))
    })
}

fn signers_to_wire(signers: Vec<LeaseSigner>) -> Vec<Bytes> {
    signers.iter().map(|key| Bytes::copy_from_slice(key)).collect()
}

impl From<Hello> for proto::Hello {
    fn from(hello: Hello) -> Self {
        Self {
            proto_min: hello.proto_min,
            proto_max: hello.proto_max,
            features: hello.features,
            node_version: hello.node_version,
            instance_id: hello.instance_id.to_vec().into(),
            connection_ordinal: hello.connection_ordinal,
            max_envelope: hello.max_envelope,
        }
    }
}

impl TryFrom<proto::Hello> for Hello {
    type Error = ConvertError;

    fn try_from(hello: proto::Hello) -> Checked<Self> {
        Ok(Self {
            proto_min: hello.proto_min,
            proto_max: ensure(hello.proto_max, hello.proto_max >= hello.proto_min, "the protocol range is empty")?,
            features: features(hello.features)?,
            node_version: text(hello.node_version, MAX_TEXT, "node_version is no valid text")?,
            instance_id: hello
                .instance_id
                .as_ref()
                .try_into()
                .map_err(|_| ConvertError::new("instance_id is not 16 bytes long"))?,
            connection_ordinal: ensure(
                hello.connection_ordinal,
                hello.connection_ordinal != 0,
                "connection_ordinal is 0",
            )?,
            max_envelope: hello.max_envelope,
        })
    }
}

impl From<HelloAck> for proto::HelloAck {
    fn from(ack: HelloAck) -> Self {
        let HelloAck { proto, features, max_envelope, edge_id } = ack;
        Self { proto, features, max_envelope, edge_id }
    }
}

impl TryFrom<proto::HelloAck> for HelloAck {
    type Error = ConvertError;

    fn try_from(ack: proto::HelloAck) -> Checked<Self> {
        Ok(Self {
            proto: ack.proto,
            features: features(ack.features)?,
            max_envelope: ack.max_envelope,
            edge_id: text(ack.edge_id, MAX_TEXT, "edge_id is no valid text")?,
        })
    }
}

impl From<RegisterRequest> for proto::RegisterRequest {
    fn from(request: RegisterRequest) -> Self {
        Self {
            token: request.token.into_inner(),
            recipient_key: request.recipient_key,
            inventory: request
                .inventory
                .into_iter()
                .map(|AdapterInventory { kind, version }| proto::AdapterInventory { kind, version })
                .collect(),
            claimed_node_id: request.claimed_node_id.map(|id| id.as_str().to_owned()),
        }
    }
}

impl TryFrom<proto::RegisterRequest> for RegisterRequest {
    type Error = ConvertError;

    fn try_from(request: proto::RegisterRequest) -> Checked<Self> {
        let key = request.recipient_key.len();
        Ok(Self {
            token: Redacted::new(text(request.token, MAX_TOKEN, "token is no valid text")?),
            recipient_key: ensure(request.recipient_key, key == 0 || key == KEY, "recipient_key is not 32 bytes long")?,
            inventory: list(request.inventory, MAX_LIST, "too many adapter kinds", |entry| {
                Ok(AdapterInventory {
                    kind: text(entry.kind, MAX_TEXT, "kind is no valid text")?,
                    version: text(entry.version, MAX_TEXT, "version is no valid text")?,
                })
            })?,
            claimed_node_id: request.claimed_node_id.map(|id| node_id(&id)).transpose()?,
        })
    }
}

impl From<RegisterResponse> for proto::RegisterResponse {
    fn from(response: RegisterResponse) -> Self {
        let outcome = match response.outcome {
            Ok(registered) => Outcome::Accepted(proto::Registered {
                node_id: registered.node_id.as_str().to_owned(),
                config: Some(registered.config.into()),
                trusted_lease_signers: signers_to_wire(registered.trusted_lease_signers),
            }),
            Err(refusal) => Outcome::Refused(proto::RegisterRefusal {
                reason: proto::RefusalReason::from(refusal.reason).into(),
                retry_after_ms: u32::try_from(refusal.retry_after.as_millis()).unwrap_or(u32::MAX),
            }),
        };
        Self { edge_time_ms: response.edge_time_ms, outcome: Some(outcome) }
    }
}

impl TryFrom<proto::RegisterResponse> for RegisterResponse {
    type Error = ConvertError;

    fn try_from(response: proto::RegisterResponse) -> Checked<Self> {
        let outcome = match required(response.outcome, "a registration without outcome")? {
            Outcome::Accepted(registered) => Ok(Registered {
                node_id: node_id(&registered.node_id)?,
                config: required(registered.config, "a registration without config")?.try_into()?,
                trusted_lease_signers: signers(registered.trusted_lease_signers)?,
            }),
            Outcome::Refused(refusal) => Err(RegisterRefusal {
                reason: enums::value::<proto::RefusalReason, _>(refusal.reason, "no known refusal reason")?,
                retry_after: Duration::from_millis(refusal.retry_after_ms.into()),
            }),
        };
        Ok(Self { edge_time_ms: response.edge_time_ms, outcome })
    }
}

impl From<NodeConfigPayload> for proto::NodeConfigPayload {
    fn from(config: NodeConfigPayload) -> Self {
        Self { revision: config.revision, providers: config.providers.into_iter().map(Into::into).collect() }
    }
}

impl TryFrom<proto::NodeConfigPayload> for NodeConfigPayload {
    type Error = ConvertError;

    fn try_from(config: proto::NodeConfigPayload) -> Checked<Self> {
        let providers = list(config.providers, MAX_LIST, "too many providers", TryInto::try_into)?;
        Ok(Self { revision: config.revision, providers })
    }
}

impl From<ProviderConfig> for proto::ProviderConfig {
    fn from(provider: ProviderConfig) -> Self {
        Self {
            provider_id: provider.provider_id.as_str().to_owned(),
            adapter: provider.adapter.as_str().to_owned(),
            kind: provider.kind,
            base_url: provider.base_url,
            wire: proto::WireMode::from(provider.wire).into(),
            capacity: provider.capacity,
            long_capacity: provider.long_capacity,
            targets: provider.targets.iter().map(|target| target.as_str().to_owned()).collect(),
            response_stall_timeout_ms: provider.response_stall_timeout_ms,
            first_response_timeout_ms: provider.first_response_timeout_ms,
            stall_per_1k_prompt_ms: provider.stall_per_1k_prompt_ms,
            close_grace_ms: provider.close_grace_ms,
            probe_timeout_ms: provider.probe_timeout_ms,
            terminal_linger_ms: provider.terminal_linger_ms,
            cancel_policy: proto::CancelPolicy::from(provider.cancel_policy).into(),
            auth: provider.auth,
            credential: provider
                .credential
                .map(|CredentialUse { slot, profile }| proto::CredentialUse { slot, profile }),
        }
    }
}

impl TryFrom<proto::ProviderConfig> for ProviderConfig {
    type Error = ConvertError;

    fn try_from(provider: proto::ProviderConfig) -> Checked<Self> {
        Ok(Self {
            provider_id: provider_id(&provider.provider_id)?,
            adapter: adapter(&provider.adapter)?,
            kind: text(provider.kind, MAX_TEXT, "kind is no valid text")?,
            base_url: text(provider.base_url, MAX_PATH, "base_url is no valid text")?,
            wire: enums::value::<proto::WireMode, _>(provider.wire, "no known wire mode")?,
            capacity: provider.capacity,
            long_capacity: provider.long_capacity,
            targets: list(provider.targets, MAX_TARGETS, "too many targets", |name| target(&name))?,
            response_stall_timeout_ms: provider.response_stall_timeout_ms,
            first_response_timeout_ms: provider.first_response_timeout_ms,
            stall_per_1k_prompt_ms: provider.stall_per_1k_prompt_ms,
            close_grace_ms: provider.close_grace_ms,
            probe_timeout_ms: provider.probe_timeout_ms,
            terminal_linger_ms: provider.terminal_linger_ms,
            cancel_policy: enums::value::<proto::CancelPolicy, _>(provider.cancel_policy, "no known cancel policy")?,
            auth: text(provider.auth, MAX_PATH, "auth is no valid text")?,
            credential: provider.credential.map(credential_use).transpose()?,
        })
    }
}

fn credential_use(of: proto::CredentialUse) -> Checked<CredentialUse> {
    Ok(CredentialUse {
        slot: named(of.slot, "slot is no valid name")?,
        profile: named(of.profile, "profile is no valid name")?,
    })
}

impl From<NodeReadyRequest> for proto::NodeReadyRequest {
    fn from(ready: NodeReadyRequest) -> Self {
        Self {
            node_id: ready.node_id.as_str().to_owned(),
            config_revision: ready.config_revision,
            providers: ready.providers.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<proto::NodeReadyRequest> for NodeReadyRequest {
    type Error = ConvertError;

    fn try_from(ready: proto::NodeReadyRequest) -> Checked<Self> {
        Ok(Self {
            node_id: node_id(&ready.node_id)?,
            config_revision: ready.config_revision,
            providers: list(ready.providers, MAX_LIST, "too many providers", TryInto::try_into)?,
        })
    }
}

impl From<ProviderReady> for proto::ProviderReady {
    fn from(provider: ProviderReady) -> Self {
        Self {
            provider_id: provider.provider_id.as_str().to_owned(),
            max_concurrency: provider.max_concurrency,
            tunnels: provider.tunnels,
            runs: provider.runs,
            tools: provider.tools,
            reasoning: provider.reasoning,
            messages: provider.messages,
            targets: provider
                .targets
                .into_iter()
                .map(|ready| proto::ReadyTarget {
                    target: ready.target.as_str().to_owned(),
                    context_length: ready.context_length,
                })
                .collect(),
        }
    }
}

impl TryFrom<proto::ProviderReady> for ProviderReady {
    type Error = ConvertError;

    fn try_from(provider: proto::ProviderReady) -> Checked<Self> {
        Ok(Self {
            provider_id: provider_id(&provider.provider_id)?,
            max_concurrency: provider.max_concurrency,
            tunnels: provider.tunnels,
            runs: provider.runs,
            tools: provider.tools,
            reasoning: provider.reasoning,
            messages: provider.messages,
            targets: list(provider.targets, MAX_TARGETS, "too many targets", |ready| {
                Ok(ReadyTarget { target: target(&ready.target)?, context_length: ready.context_length })
            })?,
        })
    }
}

impl From<NodeReadyResponse> for proto::NodeReadyResponse {
    fn from(response: NodeReadyResponse) -> Self {
        let NodeReadyResponse { ready, lease_generation } = response;
        Self { ready, lease_generation }
    }
}

impl From<proto::NodeReadyResponse> for NodeReadyResponse {
    fn from(response: proto::NodeReadyResponse) -> Self {
        let proto::NodeReadyResponse { ready, lease_generation } = response;
        Self { ready, lease_generation }
    }
}

impl From<ConfigUpdate> for proto::ConfigUpdate {
    fn from(update: ConfigUpdate) -> Self {
        Self {
            config: update.config.map(Into::into),
            trusted_lease_signers: signers_to_wire(update.trusted_lease_signers),
            credential_states: update
                .credential_states
                .into_iter()
                .map(|CredentialState { slot, revision, disabled }| proto::CredentialState { slot, revision, disabled })
                .collect(),
        }
    }
}

impl TryFrom<proto::ConfigUpdate> for ConfigUpdate {
    type Error = ConvertError;

    fn try_from(update: proto::ConfigUpdate) -> Checked<Self> {
        Ok(Self {
            config: update.config.map(TryInto::try_into).transpose()?,
            trusted_lease_signers: signers(update.trusted_lease_signers)?,
            credential_states: list(
                update.credential_states,
                MAX_CREDENTIAL_STATES,
                "too many credential slots",
                |state| {
                    Ok(CredentialState {
                        slot: named(state.slot, "slot is no valid name")?,
                        revision: state.revision,
                        disabled: state.disabled,
                    })
                },
            )?,
        })
    }
}

impl From<ConfigAck> for proto::ConfigAck {
    fn from(ack: ConfigAck) -> Self {
        let ConfigAck { seen_revision, applied_revision, error, providers } = ack;
        let providers = providers.into_iter().map(Into::into).collect();
        Self { seen_revision, applied_revision, error, providers }
    }
}

impl TryFrom<proto::ConfigAck> for ConfigAck {
    type Error = ConvertError;

    fn try_from(ack: proto::ConfigAck) -> Checked<Self> {
        Ok(Self {
            seen_revision: ack.seen_revision,
            applied_revision: ack.applied_revision,
            error: text(ack.error, MAX_PATH, NO_ERROR)?,
            providers: list(ack.providers, MAX_LIST, "too many providers", TryInto::try_into)?,
        })
    }
}
