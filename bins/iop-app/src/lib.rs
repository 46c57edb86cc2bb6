//! Decides what the binaries have in common: config, certificates, listeners, metrics, and the commands themselves.
//!
//! | module | decides |
//! | --- | --- |
//! | [`cli`] | which commands the binaries have |
//! | [`up`], [`serve_edge`], [`serve_node`], [`init`] | what each command does |
//! | [`config`] | what config files say, and how mistakes are told |
//! | [`edge_runtime`], [`reload`] | how an Edge lives in a process, how it takes a new config, and how it ends |
//! | [`operate`] | how `iop` asks a running Edge, and how the answers look |
//! | [`doctor`] | what is looked at when something does not work |
//! | [`issue`] | how keys and tokens are made, rotated and taken back |
//! | [`listener`], [`track`] | what a client may cost; when its request is over |
//! | [`admin`], [`metrics`], [`node_metrics`], [`access`], [`liveness`], [`lifecycle`], [`telemetry`] | what operators see and do |
//! | [`tls`], [`certs`], [`certificates`], [`renew`] | certificates, and when they are read again |
//! | [`adapters`] | which adapter runs which backend |
//! | [`shutdown`], [`exit`], [`term`] | how a process ends, and how it talks |

pub mod access;
pub mod adapters;
pub mod admin;
pub mod certificates;
pub mod certs;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod edge_runtime;
pub mod exit;
mod files;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzz;
pub mod init;
pub mod issue;
pub mod lifecycle;
pub mod listener;
pub mod liveness;
pub mod metrics;
pub mod node_files;
pub mod node_metrics;
pub mod operate;
pub mod reload;
pub mod renew;
pub mod serve_edge;
pub mod serve_node;
pub mod shutdown;
pub mod telemetry;
pub mod term;
mod timers;
pub mod tls;
pub mod track;
pub mod up;

#[cfg(test)]
mod testdir;
#[cfg(test)]
mod testfleet;
#[cfg(test)]
mod testhttp;
#[cfg(test)]
mod testlog;
