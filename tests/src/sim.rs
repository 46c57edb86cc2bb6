//! Decides how the whole of IOP is simulated: real engines in processes of their own, simulated links, clients and
//! providers; one seed decides everything.
//!
//! | module | decides |
//! | --- | --- |
//! | [`rng`] | what a seed draws |
//! | [`plan`] | what one seed does: topology, requests, trouble |
//! | [`host`] | what a process is: a runtime and a clock of its own |
//! | [`net`] | how messages cross, and what may happen to them |
//! | [`provider`] | what a provider does, and how its calls are counted |
//! | [`client`] | what a client asks and may see |
//! | [`openai`] | what an OpenAI client asks and may see, over all attempts of its request |
//! | [`ills`] | which providers get ill, and which clients speak the OpenAI API |
//! | [`health`] | what evidence the Edge was told, and what it must do |
//! | [`world`] | what really happened |
//! | [`history`] | the log, its hash, its tail |
//! | [`stage`] | how a seed is played: windows, troubles, the end |
//! | [`check`] | what must hold after every window |
//! | [`seeds`] | which seeds run, on how many threads, and what is printed when one fails |

pub mod check;
pub mod client;
pub mod health;
pub mod history;
pub mod host;
pub mod ills;
pub mod net;
pub mod openai;
pub mod plan;
pub mod provider;
pub mod rng;
pub mod seeds;
pub mod stage;
pub mod world;
