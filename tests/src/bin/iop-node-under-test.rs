//! Decides nothing itself: `iop-node`, built beside the tests so that cargo tells them where it is.

use std::process::ExitCode;

fn main() -> ExitCode {
    iop_app::cli::iop_node()
}
