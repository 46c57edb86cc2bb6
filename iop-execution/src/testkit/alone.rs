//! Decides whether a test runs in a process of its own: for what belongs to a whole process, like who reads its logs.

use std::io;
use std::process::Command;

/// Set in the process that runs one test alone.
const ALONE: &str = "IOP_TEST_ALONE";

/// Runs the test with this full name (`module::name`) again, alone, in a child process of the same test program.
///
/// `true`: this *is* that process, go on. `false`: the child has passed, return at once. Call it first thing.
///
/// Log lines of one test can't be collected beside others: `tracing` remembers per place in the code whether anybody
/// listens, and a place that another thread meets first just then may stay off.
///
/// # Errors
/// With the child's output, when the test failed there.
pub fn alone(test: &str) -> io::Result<bool> {
    if std::env::var_os(ALONE).is_some() {
        return Ok(true);
    }
    let child =
        Command::new(std::env::current_exe()?).args([test, "--exact", "--nocapture"]).env(ALONE, "1").output()?;
    let text = String::from_utf8_lossy(&child.stdout);
    if child.status.success() && text.contains("1 passed") {
        return Ok(false);
    }
    Err(io::Error::other(format!("{text}{}", String::from_utf8_lossy(&child.stderr))))
}
