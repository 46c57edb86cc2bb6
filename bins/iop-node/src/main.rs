//! Decides nothing itself: `iop-node` is the library `iop-app` with a name.

use std::process::ExitCode;

fn main() -> ExitCode {
    iop_app::cli::iop_node()
}
