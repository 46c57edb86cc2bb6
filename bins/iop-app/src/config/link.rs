//! Decides how the connection between Edge and Node uses the network: one setting, the same word on both sides (WIR-11).

use iop_wire::link::grpc::Congestion;
use serde::Deserialize;

use super::schema::{Kind, Object, optional};

/// The table of `link`.
pub(super) static LINK: Object = Object {
    name: "link",
    fields: &[optional(
        "congestion",
        Kind::Choice(&["system", "bbr", "cubic"]),
        "congestion control of this side's sockets, where the system allows it; default system",
    )],
};

/// `link` of either config file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinkConfig {
    /// Congestion control.
    pub congestion: CongestionConfig,
}

/// Congestion control of a socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum CongestionConfig {
    /// What the system uses.
    #[default]
    System,
    /// BBR.
    Bbr,
    /// CUBIC.
    Cubic,
}

impl From<CongestionConfig> for Congestion {
    fn from(config: CongestionConfig) -> Self {
        match config {
            CongestionConfig::System => Self::System,
            CongestionConfig::Bbr => Self::Bbr,
            CongestionConfig::Cubic => Self::Cubic,
        }
    }
}
