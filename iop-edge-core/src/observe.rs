//! Decides what an embedder may measure: typed observations with closed labels, never a payload or a secret.

use std::fmt;
use std::time::Duration;

use iop_execution::failure::CredentialReason;
use iop_execution::{ModelName, NodeId, ProviderId};
use iop_wire::{CloseCode, RefusalReason};

pub use crate::state::ledger::ReleaseCause;
use iop_execution::closed_list as closed;

closed! {
    /// How waiting for a place ended.
    WaitOutcome {
        /// With a place.
        Admitted = "admitted",
        /// The client left, or cancelled.
        Cancelled = "cancelled",
        /// The request's deadline passed.
        Deadline = "deadline",
        /// The Edge goes down.
        ShuttingDown = "shutting_down",
        /// The queue timeout passed.
        TimedOut = "timed_out",
        /// No provider is left that could serve it.
        Unavailable = "unavailable",
    }
}

closed! {
    /// How a Node broke the protocol. The first group ends the connection, the second one run.
    Violation {
        /// Numbers of envelopes have a gap (W1).
        EnvelopeOrder = "envelope_order",
        /// The message is not allowed now (W2).
        State = "state",
        /// An envelope is too large (W3).
        Size = "size",
        /// A run number that was never given (W4).
        UnknownRun = "unknown_run",
        /// More bytes, or more credit, than allowed (W8).
        Credit = "credit",
        /// Ready with another node id, revision or provider (W10).
        Ready = "ready",
        /// A message can't be decoded (W17).
        Malformed = "malformed",
        /// Numbers of a run's messages have a gap (W5).
        RunOrder = "run_order",
        /// Frames of a tunnel in the wrong order (W7).
        FrameOrder = "frame_order",
        /// A frame for a run, or an event for a tunnel.
        WrongWire = "wrong_wire",
    }
}

closed! {
    /// Why a registration was refused: the reasons of the wire (REG-4), and those that the wire has no word for.
    Refusal {
        /// No Node has this token.
        UnknownToken = "unknown_token",
        /// The Node's token has expired, or its old secret has after a rotation. The peer is told `unknown_token`.
        ExpiredToken = "expired_token",
        /// The Node is connected already.
        DuplicateConnection = "duplicate_connection",
        /// The Node's config can't be had.
        ConfigUnavailable = "config_unavailable",
        /// No common protocol version.
        UnsupportedProtocol = "unsupported_protocol",
        /// Managed mode wants a workload identity.
        IdentityRequired = "identity_required",
        /// Identity and token belong to different records.
        IdentityMismatch = "identity_mismatch",
        /// The Edge goes down.
        Draining = "draining",
        /// The address or the token failed too often lately (REG-8). The peer is told `draining`, and when to come back.
        RateLimited = "rate_limited",
    }
}

impl From<RefusalReason> for Refusal {
    fn from(reason: RefusalReason) -> Self {
        match reason {
            RefusalReason::UnknownToken => Self::UnknownToken,
            RefusalReason::DuplicateConnection => Self::DuplicateConnection,
            RefusalReason::ConfigUnavailable => Self::ConfigUnavailable,
            RefusalReason::UnsupportedProtocol => Self::UnsupportedProtocol,
            RefusalReason::IdentityRequired => Self::IdentityRequired,
            RefusalReason::IdentityMismatch => Self::IdentityMismatch,
            RefusalReason::Draining => Self::Draining,
        }
    }
}

closed! {
    /// Where evidence about a provider's health came from (OBS-2).
    EvidenceSource {
        /// A stalled call.
        Stall = "stall",
        /// A CAPABILITIES command.
        Capabilities = "capabilities",
    }
}

closed! {
    /// What became of evidence about a provider's health (OBS-2).
    EvidenceResult {
        /// It moved the overlay.
        Applied = "applied",
        /// It is not newer than what was accepted, or has no sequence.
        Stale = "stale",
        /// It is not about what was asked, or of a connection that is not current.
        Mismatch = "mismatch",
        /// It can't be read as evidence.
        Malformed = "malformed",
        /// It fits more than one provider.
        Ambiguous = "ambiguous",
        /// Nothing could be found out.
        Unknown = "unknown",
        /// It says what is known already.
        NoOp = "no_op",
    }
}

closed! {
    /// Where the overlay has moved a provider (OBS-2).
    ProviderLevel {
        /// It takes part in admission again.
        Available = "available",
        /// It is out of admission.
        Unavailable = "unavailable",
    }
}

closed! {
    /// Who refused to use a credential.
    CredentialRefuser {
        /// This Edge: no lease was issued (CRD-15).
        Edge = "edge",
        /// The Node: the lease was refused (CRD-5).
        Node = "node",
    }
}

/// Something that happened, for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Observation {
    /// A connection came up. It is no Node yet.
    ConnectionOpened,
    /// A connection ended.
    ConnectionClosed {
        /// Which Node it was, once it was ready.
        node: Option<NodeId>,
        /// Why.
        code: CloseCode,
    },
    /// A registration was refused.
    RegistrationRefused {
        /// Why.
        reason: Refusal,
    },
    /// A place became free.
    LeaseReleased {
        /// Of which provider.
        provider: ProviderId,
        /// Why.
        cause: ReleaseCause,
    },
    /// A cancelled run had no terminal in time: its place stays taken.
    Quarantined {
        /// Of which provider.
        provider: ProviderId,
    },
    /// A request that had to wait waits no longer.
    Waited {
        /// For which model.
        model: ModelName,
        /// How long it waited.
        wait: Duration,
        /// How that ended.
        outcome: WaitOutcome,
    },
    /// A provider failed: it counts as loaded for a while (SEL-4).
    Penalised {
        /// Which.
        provider: ProviderId,
    },
    /// A provider said that it is busy: it gets nothing new for a while (SEL-4).
    Cooling {
        /// Which.
        provider: ProviderId,
    },
    /// A Node left a question unanswered (FEN-7).
    Suspected {
        /// Which.
        node: NodeId,
    },
    /// An uncommitted run of a suspect was ended (FEN-7).
    Withdrawn {
        /// Of which Node.
        node: NodeId,
    },
    /// The receipt of a dispatch is missing (WIR-14).
    ReceiptMissing,
    /// What became of a config push (REG-7).
    ConfigPushed {
        /// To which Node.
        node: NodeId,
        /// It is in force there.
        applied: bool,
    },
    /// Evidence about a provider's health was judged.
    HealthEvidence {
        /// Where it came from.
        source: EvidenceSource,
        /// What became of it.
        result: EvidenceResult,
    },
    /// The overlay moved a provider.
    HealthTransition {
        /// Where to.
        to: ProviderLevel,
    },
    /// A message of a run that ended already was dropped (WIR-11).
    LateMessage,
    /// A Node broke the protocol.
    Violated {
        /// How.
        violation: Violation,
    },
    /// The Node confirmed the receipt of a dispatch (WIR-14).
    Receipt {
        /// Time since the dispatch.
        after: Duration,
    },
    /// A credential lease was issued and handed to a connection. Its record is in the log (CRD-13).
    CredentialIssued,
    /// A credential was not used.
    CredentialRefused {
        /// Who said so.
        by: CredentialRefuser,
        /// Why.
        reason: CredentialReason,
    },
    /// A lease that was issued never reached its Node: the request was withdrawn, or the connection ended (CRD-13).
    CredentialUnused,
    /// The receive pool was exhausted and a run was cancelled for it (WIR-7).
    PoolExhausted,
}

/// Receives observations. Called outside of every lock, from whatever task caused them: be quick, never block.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// Takes one; does nothing by default.
    fn observe(&self, observation: &Observation) {
        let _ = observation;
    }
}

/// Observes nothing.
impl Observer for () {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_the_names_of_the_wire() {
        // REG-4
        for reason in RefusalReason::ALL {
            assert_eq!(Refusal::from(*reason).as_str(), reason.as_str());
        }
    }
}
