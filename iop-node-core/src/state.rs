//! Decides everything about a Node that needs no clock, task or socket: plain values that are told what happened.
//!
//! | module | decides |
//! | --- | --- |
//! | [`handshake`] | which message may come when, from Hello to Ready |
//! | [`runs`] | which run numbers are new, open, or over, and whether a body keeps its announced length |
//! | [`emit`] | what a run sends: numbered pieces of bounded size, then one terminal |
//! | [`admit`] | in which order a dispatch is checked |
//! | [`leases`] | whether the credential lease of a request becomes the key of one call |
//! | [`config`] | which pushed config is applied when, and what the Edge is told |
//! | [`refresh`] | when each backend is asked again what it serves |
//! | [`reconnect`] | how long to wait before the next connection, and when to give up |
//! | [`watchdog`] | when a run is stuck, and what becomes of it then |

pub mod admit;
pub mod config;
pub mod emit;
pub mod handshake;
pub mod leases;
pub mod reconnect;
pub mod refresh;
pub mod runs;
pub mod watchdog;
