//! Decides how the engine meets the world: one lock around its state, one task per connection, one for its timers.
//!
//! | file | what it does |
//! | --- | --- |
//! | `shared` | the critical section: runs an input, carries out its effects, wakes and tells the observer afterwards |
//! | `connection` | a Node's connection: handshake, order, heartbeat, frames to their runs |
//! | `dispatch` | a request: a place, or a wait for one; then the pre-send fence and the request in one step |
//! | `lease` | the credential lease of a dispatch, made outside of the lock |
//! | `run` | the bounded buffer between a connection and a client |
//! | `stream` | what the client polls; dropping it cancels |
//! | `pool` | how much may wait in all buffers together |
//!
//! A token travels `connection` → `run` → `stream`: two short locks of its own run, never the engine's.
//! Locks nest in this order: engine, table of streams, runs of a connection, one run, outbox. Nothing is held over an
//! await. Tasks are woken once no lock is held, but for a link's writer: what must keep its order towards a Node goes into
//! the outbox under the engine's lock, and the outbox wakes its writer at once.

pub(crate) mod connection;
pub(crate) mod dispatch;
#[cfg(feature = "fuzzing")]
#[allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a panic is how a target reports")]
pub(crate) mod fuzz;
mod lease;
pub(crate) mod pool;
pub(crate) mod run;
pub(crate) mod shared;
pub(crate) mod stream;

#[cfg(any(test, feature = "fuzzing"))]
mod raw_link;
#[cfg(test)]
mod tests;
