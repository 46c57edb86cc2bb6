//! Decides how failures and usage cross the wire: exactly as they were reported.

use std::num::NonZeroU64;

use http::StatusCode;
use iop_execution::failure::{
    BindingField, CredentialReason, LivenessClassification, MAX_MESSAGE_BYTES, OwnershipClose, ProviderReason,
    StallDetail, TimeoutSetting, safe_message,
};
use iop_execution::{ExecutionFailure, FailureCode, FailureStage, Health, ProviderContacted, Usage};

use super::bounds::{Checked, adapter, ensure, required, target, text};
use super::{ConvertError, enums};
use crate::proto;

/// Which statuses an HTTP answer can have.
const STATUSES: std::ops::RangeInclusive<u32> = 100..=999;

impl From<ExecutionFailure> for proto::ExecutionFailure {
    /// A failure is a terminal, and must not be refused by the peer for a detail: what can't travel is mended.
    fn from(failure: ExecutionFailure) -> Self {
        let (credential, binding_field) = failure.credential.map(credential_to_wire).unzip();
        Self {
            code: proto::FailureCode::from(failure.code).into(),
            stage: proto::FailureStage::from(failure.stage).into(),
            provider_contacted: proto::ProviderContacted::from(failure.provider_contacted).into(),
            upstream_status: failure.upstream_status.map(u32::from).filter(|status| STATUSES.contains(status)),
            retry_after_ms: failure.retry_after_ms,
            message: safe_message(failure.message).into_owned(),
            provider_reason: failure.provider_reason.map(|reason| proto::ProviderReason::from(reason).into()),
            stall: failure.stall.map(|stall| Box::new((*stall).into())),
            credential,
            binding_field: binding_field.flatten(),
        }
    }
}

impl TryFrom<proto::ExecutionFailure> for ExecutionFailure {
    type Error = ConvertError;

    fn try_from(failure: proto::ExecutionFailure) -> Result<Self, ConvertError> {
        let code: FailureCode = enums::value::<proto::FailureCode, _>(failure.code, "no known failure code")?;
        let stage: FailureStage = enums::value::<proto::FailureStage, _>(failure.stage, "no known failure stage")?;
        let contacted: ProviderContacted =
            enums::value::<proto::ProviderContacted, _>(failure.provider_contacted, "no known provider_contacted")?;
        let reason: Option<ProviderReason> = failure
            .provider_reason
            .map(|reason| enums::value::<proto::ProviderReason, _>(reason, "no known provider reason"))
            .transpose()?;
        let status = failure.upstream_status.map(status).transpose()?;
        let message =
            text(failure.message, MAX_MESSAGE_BYTES, "a failure's message is too long or holds control characters")?;
        let mut result =
            Self::new(code, stage, contacted, message).with_retry_after_ms(failure.retry_after_ms).with_reason(reason);
        result.upstream_status = status;
        result.stall = failure.stall.map(|stall| (*stall).try_into().map(Box::new)).transpose()?;
        result.credential = credential(failure.credential, failure.binding_field)?;
        Ok(result)
    }
}

impl From<StallDetail> for proto::StallDetail {
    fn from(stall: StallDetail) -> Self {
        let ownership_close = match stall.ownership_close {
            OwnershipClose::Confirmed { .. } => proto::OwnershipClose::Confirmed,
            OwnershipClose::Unconfirmed => proto::OwnershipClose::Unconfirmed,
        };
        Self {
            provider_health: proto::ProviderHealth::from(stall.provider_health()).into(),
            liveness_classification: proto::LivenessClassification::from(stall.liveness_classification).into(),
            health_observation_seq: stall.health_observation_seq.map(NonZeroU64::get),
            ownership_close: ownership_close.into(),
            retryable: stall.retryable(),
            idle_ms: stall.idle_ms,
            timeout_ms: stall.timeout_ms,
            timeout_setting: proto::TimeoutSetting::from(stall.timeout_setting).into(),
            adapter: stall.adapter.as_str().to_owned(),
            target: stall.target.as_str().to_owned(),
        }
    }
}

impl TryFrom<proto::StallDetail> for StallDetail {
    type Error = ConvertError;

    fn try_from(stall: proto::StallDetail) -> Checked<Self> {
        let setting: TimeoutSetting =
            enums::value::<proto::TimeoutSetting, _>(stall.timeout_setting, "no known timeout_setting")?;
        let mut result = Self::new(adapter(&stall.adapter)?, target(&stall.target)?, setting);
        result.liveness_classification = evidence(stall.provider_health, stall.liveness_classification);
        result.health_observation_seq = stall.health_observation_seq.map(observation).transpose()?;
        result.ownership_close = match proto::OwnershipClose::try_from(stall.ownership_close) {
            Ok(proto::OwnershipClose::Confirmed) => OwnershipClose::Confirmed { retryable: stall.retryable },
            Ok(proto::OwnershipClose::Unconfirmed) => OwnershipClose::Unconfirmed,
            Ok(proto::OwnershipClose::Unspecified) | Err(_) => {
                return Err(ConvertError::new("no known ownership_close"));
            }
        };
        result.idle_ms = stall.idle_ms;
        result.timeout_ms = stall.timeout_ms;
        Ok(result)
    }
}

/// One of three pairs; anything else is the third of them (WDG-5).
fn evidence(health: i32, class: i32) -> LivenessClassification {
    let health = enums::value::<proto::ProviderHealth, Health>(health, "");
    let class = enums::value::<proto::LivenessClassification, LivenessClassification>(class, "");
    match (health, class) {
        (Ok(health), Ok(class)) if class.provider_health() == health => class,
        _ => LivenessClassification::HealthUnknown,
    }
}

/// Observations count from 1.
pub(super) fn observation(seq: u64) -> Checked<NonZeroU64> {
    required(NonZeroU64::new(seq), "health_observation_seq is 0")
}

macro_rules! credential_reasons {
    ($($variant:ident,)*) => {
        fn credential_to_wire(reason: CredentialReason) -> (i32, Option<i32>) {
            let wire = match reason {
                CredentialReason::BindingMismatch(field) => {
                    let reason = proto::CredentialReason::BindingMismatch;
                    return (reason.into(), Some(proto::BindingField::from(field).into()));
                }
                $(CredentialReason::$variant => proto::CredentialReason::$variant,)*
            };
            (wire.into(), None)
        }

        fn credential(reason: Option<i32>, field: Option<i32>) -> Checked<Option<CredentialReason>> {
            let field: Option<BindingField> = field
                .map(|field| enums::value::<proto::BindingField, _>(field, "no known binding field"))
                .transpose()?;
            let Some(reason) = reason else {
                return ensure(None, field.is_none(), "a binding field without a credential reason");
            };
            let plain = match proto::CredentialReason::try_from(reason) {
                Ok(proto::CredentialReason::BindingMismatch) => {
                    let field = required(field, "a binding mismatch without its field")?;
                    return Ok(Some(CredentialReason::BindingMismatch(field)));
                }
                Ok(proto::CredentialReason::Unspecified) | Err(_) => {
                    return Err(ConvertError::new("no known credential reason"));
                }
                $(Ok(proto::CredentialReason::$variant) => CredentialReason::$variant,)*
            };
            ensure(Some(plain), field.is_none(), "a binding field with another credential reason")
        }
    };
}

credential_reasons! {
    Malformed, UnsupportedVersion, UnknownIssuer, BadSignature, WrongRecipient, NotYetValid, Expired, TtlTooLong,
    StaleRevision, StaleGeneration, Revoked, Disabled, Replayed, ReplayStoreFull, OpenFailed, ClockUnavailable,
}

/// An HTTP status.
pub(super) fn status(status: u32) -> Result<u16, ConvertError> {
    ensure((), STATUSES.contains(&status), "no HTTP status")?;
    u16::try_from(status).map_err(|_| ConvertError::new("no HTTP status"))
}

pub(super) fn http_status(number: u32) -> Checked<StatusCode> {
    StatusCode::from_u16(status(number)?).map_err(|_| ConvertError::new("no HTTP status"))
}

impl From<Usage> for proto::Usage {
    fn from(usage: Usage) -> Self {
        let Usage { input_tokens, output_tokens, reasoning_tokens, cached_input_tokens } = usage;
        Self { input_tokens, output_tokens, reasoning_tokens, cached_input_tokens }
    }
}

impl From<proto::Usage> for Usage {
    fn from(usage: proto::Usage) -> Self {
        let proto::Usage { input_tokens, output_tokens, reasoning_tokens, cached_input_tokens } = usage;
        Self { input_tokens, output_tokens, reasoning_tokens, cached_input_tokens }
    }
}
