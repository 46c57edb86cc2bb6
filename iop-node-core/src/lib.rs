//! Decides everything a Node does between an Edge and its providers: connect, register, take work, run it, send it back.
//!
//! A Node dials out to an Edge and owns the adapters beside the models. Construct one with `Node::builder`, give it a
//! connector and a factory (or providers of your own), and `Node::serve` it.
//!
//! | module | decides |
//! | --- | --- |
//! | [`state`] | handshake, run numbers, emission, dispatch order, reconnect: plain values without clock or task |
//! | [`adapters`], [`factory`] | which adapter instances there are, and how config becomes one |
//! | [`upstream`] | which backends the Node may call |
//! | [`observe`] | what an observer is told |
//! | [`journal`] | what is written down about runs; with feature `journal` into an SQLite file |
//! | [`error`] | how serving ends |
//! | `node` (feature `driver`) | which Edge to dial and when: the supervisor |
//! | `session` (feature `driver`) | one connection: timers, messages, tasks of runs |
//! | `install` (feature `driver`) | how a config is put into force, at registration and when it is pushed |
//! | `background` (feature `driver`) | where work lives that no connection owns |
//! | `drive`, `run`, `tunnel` (feature `driver`) | one run or tunnel: backpressure, cancel, close grace, deadline, stall |
//! | `probe` (feature `driver`) | how a target is probed, and the number of an observation |
//!
//! The Node opens no listening socket, and retries nothing: one dispatch makes at most one provider call.

pub mod adapters;
#[cfg(feature = "driver")]
mod background;
#[cfg(feature = "driver")]
mod body;
#[cfg(feature = "driver")]
mod drive;
pub mod error;
pub mod factory;
#[cfg(all(feature = "fuzzing", feature = "driver"))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(feature = "driver")]
mod install;
pub mod journal;
#[cfg(feature = "driver")]
pub mod node;
pub mod observe;
#[cfg(feature = "driver")]
mod probe;
#[cfg(feature = "driver")]
mod recheck;
#[cfg(feature = "driver")]
mod run;
#[cfg(feature = "driver")]
mod session;
pub mod state;
#[cfg(feature = "driver")]
mod tunnel;
pub mod upstream;

pub use error::{NodeError, ServeEnd};
pub use factory::{AdapterBuildError, AdapterFactory, CUSTOM_KIND, NoFactory};
pub use iop_credential_lease::{TrustedIssuers, UntrustedIssuer};
pub use journal::{NoJournal, RunJournal};
#[cfg(feature = "driver")]
pub use node::{Node, NodeBuilder, NodeStatus, StatusHandle};
pub use observe::{LeaseOutcome, NoObserver, NodeObserver, RunOutcome, RunPath, StallObservation};
#[cfg(feature = "driver")]
pub use recheck::EdgeCheck;
pub use state::leases::issuers::{LeaseIssuers, OwnIssuers};
pub use state::reconnect::{InvalidPolicy, ReconnectPolicy};
pub use upstream::{AllowUpstream, InvalidRule, UpstreamRefused};
