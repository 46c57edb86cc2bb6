//! Decides nothing: a Node driven by a scripted Edge that speaks raw messages over a memory link, in virtual time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod backends;
mod commands;
mod configs;
mod fakes;
mod flow;
mod handshake;
mod journal;
mod liveness;
mod read_out;
mod reconnect;
mod refreshes;
mod runs;
mod shutdown;
mod stalls;
mod stops;
mod support;
mod violations;
