//! What every part of IOP agrees on: who runs a request, what a run emits, how it fails, what counts as progress.
//!
//! This crate is a leaf: no networking, no protobuf, no clock, no task. An adapter author needs nothing else:
//! implement [`Provider`], push into the sink you are given, return how it ended. The terminal of a run is derived from
//! that return value, so a run has exactly one whatever an adapter does.
//!
//! | module | decides |
//! | --- | --- |
//! | [`id`] | what a valid name is |
//! | [`request`] | what a run and a tunnel ask for |
//! | [`event`], [`frame`] | what they emit |
//! | [`complaint`] | what a provider complained about |
//! | [`failure`] | how they fail |
//! | [`activity`] | what counts as progress |
//! | [`provider`], [`sink`] | the contract with adapter authors |
//! | [`execution`] | how the outcome of a provider call becomes one terminal |
//! | [`stream`] | what a caller holds |
//! | [`registry`], [`gate`] | which adapter serves a key, and how many calls it takes |
//! | [`entropy`] | where random numbers come from |
//! | [`address`] | which addresses no backend may have |
//! | [`sse`], [`ndjson`] | how provider bytes become events |

pub mod activity;
pub mod address;
pub mod chat;
mod closed;
pub mod complaint;
pub mod credential;
pub mod entropy;
pub mod event;
pub mod execution;
pub mod failure;
pub mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzz;
pub mod gate;
pub mod id;
pub mod ndjson;
mod pipe;
pub mod provider;
pub mod redact;
pub mod registry;
pub mod request;
pub mod sink;
pub mod sse;
pub mod stream;
#[cfg(feature = "testkit")]
pub mod testkit;
pub mod usage;

pub use activity::{Activity, classify_event, classify_frame};
pub use async_trait::async_trait;
pub use chat::ChatInput;
pub use credential::CallCredential;
pub use entropy::Entropy;
pub use event::{CancelReason, Completion, FinishReason, RunEvent, RunEventKind, ToolCallDelta};
pub use execution::{RunExecution, TunnelExecution};
pub use failure::{ExecutionFailure, FailureCode, FailureStage, ProviderContacted};
pub use frame::{FrameFlags, TunnelFrame, TunnelHead};
pub use gate::{CapacityGate, GatePermit};
pub use id::{AdapterKey, InvalidName, ModelName, NodeId, Principal, ProviderId, RunId, SessionId, Target};
pub use provider::{Capabilities, CommandOutput, Health, Provider, ProviderCommand, ProviderError, Refreshed};
pub use redact::Redacted;
pub use registry::ProviderRegistry;
pub use request::{RequestBody, RunRequest, StallTimeout, TunnelRequest};
pub use sink::{BodySink, EventSink, Fenced, HeadSink, TunnelEnd};
pub use stream::{RunStream, TunnelStream};
pub use usage::Usage;
