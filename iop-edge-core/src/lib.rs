//! Decides who runs a request: the Edge engine.
//!
//! Nodes connect ([`Edge::attach`]), requests come in ([`api::Engine`], [`Edge::submit_run`], [`Edge::submit_tunnel`]).
//! Everything that concerns more than one of them is decided in one plain state machine without clock, task or socket;
//! the `driver` feature puts it on tokio, the `openai` feature an HTTP surface in front of it.
//!
//! | module | decides |
//! | --- | --- |
//! | [`api`] | what a caller may ask, and what it gets |
//! | [`catalog`] | what is configured |
//! | [`token`] | whether a token is the one that was issued |
//! | [`rate_limit`] | whether a key may send another request now |
//! | `state` | who is ready, who gets a place, who waits, what a fence takes with it |
//! | `driver` | how that state meets connections, clients and time |
//! | [`events`], [`observe`], [`snapshot`] | what others can see of it |
//! | `openai` | the OpenAI HTTP surface |

pub mod api;
pub mod catalog;
#[cfg(feature = "driver")]
mod driver;
#[cfg(feature = "driver")]
mod edge;
#[cfg_attr(not(feature = "driver"), allow(dead_code, reason = "only the driver publishes"))]
pub mod events;
#[cfg(all(feature = "fuzzing", feature = "openai"))]
#[doc(hidden)]
pub mod fuzz;
pub mod observe;
#[cfg(feature = "openai")]
pub mod openai;
pub mod rate_limit;
pub mod snapshot;
#[cfg_attr(not(feature = "driver"), allow(dead_code, unused_imports, reason = "only the driver calls the engine"))]
mod state;
pub mod token;
#[cfg_attr(not(feature = "driver"), allow(dead_code, reason = "only the driver wakes"))]
mod wake;

#[cfg(feature = "driver")]
pub use edge::{Edge, EdgeBuilder, TunnelCall};
pub use state::{
    AtCapacity, AttemptId, CANCEL_GRACE, CapacityLease, CapacityLedger, ConnectionId, EdgeNodeEvent, FreeCandidate,
    Generation, IDENTITY_DRAIN, LeastLoaded, Ledger, Ordered, PlaceCounters, PlaceLimits, PrefixAffinity,
    REVISION_OVERLAP, ReleaseCause, RoundRobin, SelectionPolicy, SelectionRequest, WorkClass,
};
