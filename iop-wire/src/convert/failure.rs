//! Decides how failures and usage cross the wire: exactly as they were reported.

use iop_execution::failure::{MAX_MESSAGE_BYTES, ProviderReason};
use iop_execution::{ExecutionFailure, FailureCode, FailureStage, ProviderContacted, Usage};

use super::bounds::{ensure, text};
use super::{ConvertError, enums};
use crate::proto;

/// Which statuses an HTTP answer can have.
const STATUSES: std::ops::RangeInclusive<u32> = 100..=999;

impl From<ExecutionFailure> for proto::ExecutionFailure {
    fn from(failure: ExecutionFailure) -> Self {
        Self {
            code: proto::FailureCode::from(failure.code).into(),
            stage: proto::FailureStage::from(failure.stage).into(),
            provider_contacted: proto::ProviderContacted::from(failure.provider_contacted).into(),
            upstream_status: failure.upstream_status.map(u32::from),
            retry_after_ms: failure.retry_after_ms,
            message: failure.message.into_owned(),
            provider_reason: failure.provider_reason.map(|reason| proto::ProviderReason::from(reason).into()),
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
        Ok(result)
    }
}

/// An HTTP status.
pub(super) fn status(status: u32) -> Result<u16, ConvertError> {
    ensure((), STATUSES.contains(&status), "no HTTP status")?;
    u16::try_from(status).map_err(|_| ConvertError::new("no HTTP status"))
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
