//! Decides how the tests run the whole of IOP: real processes, engines paired in one process, and clients that see
//! every byte and when it came.
//!
//! | module | decides |
//! | --- | --- |
//! | [`wire_client`] | what was sent and received over HTTP/1.1, byte for byte, with times |
//! | [`answer`] | what an answer means to a client: text, a typed error, or a defect |
//! | [`process`] | how a binary is started, watched, signalled, and put away |
//! | [`fleet`] | how an Edge process and a Node process are configured and connected |
//! | [`relay`] | how a connection between two processes is moved or cut |
//! | [`sim`] | how the whole is simulated: seeds, processes, clocks, links, faults |
//! | [`pair`] | how both engines run in one process over a memory link |
//! | [`storm`] | how many clients ask at once while something breaks, and what they are told |
//! | [`swarm`] | how many Nodes live in this process, over real connections |
//! | [`leaks`] | whether a secret stands somewhere, in whatever form |
//! | [`machine`] | what the tests ask of the operating system: folders, memory, polling |
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "everything here serves tests: a broken assumption fails the test, with its log"
)]

pub mod answer;
pub mod fleet;
pub mod leaks;
pub mod machine;
pub mod pair;
pub mod process;
pub mod relay;
pub mod sim;
pub mod storm;
pub mod swarm;
pub mod wire_client;
