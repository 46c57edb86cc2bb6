//! Decides what config files say: strict, with a line and a suggestion for every mistake.

pub mod edge;
pub mod exposure;
pub mod link;
pub mod node;
pub mod problem;
pub mod schema;
pub mod secret;
pub mod time;
pub mod tree;

pub use edge::{EdgeConfig, LoadedEdge};
pub use exposure::{Exposed, Protection, exposed, is_loopback};
pub use node::{DialOptions, NodeOptions, NodeSettings};
pub use problem::{Position, Problem, Problems, Severity};
