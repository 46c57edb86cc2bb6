//! Decides which number stands for which value of a closed list; 0 and unknown numbers are violations (WIR-3).

use iop_execution::failure::{BindingField, LivenessClassification, ProviderReason, TimeoutSetting};
use iop_execution::{CancelReason, FailureCode, FailureStage, FinishReason, Health, ProviderContacted};

use super::ConvertError;
use crate::message::{CancelPolicy, CloseCode, RefusalReason, WireMode};
use crate::proto;

/// Reads an enum field.
pub(super) fn value<W, D>(number: i32, problem: &'static str) -> Result<D, ConvertError>
where
    W: TryFrom<i32>,
    D: TryFrom<W>,
{
    W::try_from(number).ok().and_then(|wire| D::try_from(wire).ok()).ok_or(ConvertError::new(problem))
}

macro_rules! enums {
    ($($name:ident $(= $wire:ident)? { $($variant:ident,)* })*) => {
        $(enums!(@one $name, ($($wire,)? $name,), $($variant,)*);)*
    };
    (@one $name:ident, ($wire:ident, $($own:ident,)?), $($variant:ident,)*) => {
        impl From<$name> for proto::$wire {
            fn from(value: $name) -> Self {
                match value { $($name::$variant => Self::$variant,)* }
            }
        }

        impl TryFrom<proto::$wire> for $name {
            type Error = ConvertError;

            fn try_from(value: proto::$wire) -> Result<Self, ConvertError> {
                match value {
                    proto::$wire::Unspecified => Err(ConvertError::new(concat!(stringify!($wire), " is unspecified"))),
                    $(proto::$wire::$variant => Ok(Self::$variant),)*
                }
            }
        }
    };
}

enums! {
    BindingField { Node, Principal, Profile, Route, RunId, Slot, Target, Upstream, }
    CancelPolicy { Abort, Drain, }
    CancelReason { Client, EdgeDeadline, Withdrawn, ReceivePool, SlowClient, Drain, }
    CloseCode {
        Closed, HeartbeatTimeout, ProtocolViolation, FlowControl, ControlOverflow, Superseded, Drained, Restart, Shutdown,
        RegisterTimeout, ReadyTimeout, UnsupportedProtocol, IdentityRevoked, RemovedFromConfig,
    }
    FailureCode {
        Busy, CredentialRejected, DeadlineExceeded, Disconnected, DispatchUnacknowledged, Draining, Internal, InvalidRequest,
        NodeSuspect, ProviderEndedWithoutTerminal, ProviderProtocol, ProviderRejected, ProviderUnreachable, ResponseStalled,
        UnknownAdapter, UnknownTarget, Unsupported,
    }
    FailureStage { Admission, Credential, Connect, Prefill, Stream, Close, }
    FinishReason { Stop, Length, ToolCalls, ContentFilter, FunctionCall, }
    Health = ProviderHealth { Available, Unavailable, Unknown, }
    LivenessClassification { RequestStalled, ProviderUnhealthy, HealthUnknown, }
    ProviderContacted { No, Unknown, Yes, }
    ProviderReason { AuthFailed, ContextLengthExceeded, Overloaded, }
    RefusalReason {
        UnknownToken, DuplicateConnection, ConfigUnavailable, UnsupportedProtocol, IdentityRequired, IdentityMismatch, Draining,
    }
    TimeoutSetting { ResponseStall, FirstResponse, }
    WireMode { Auto, Run, }
}
