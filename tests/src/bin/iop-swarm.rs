//! Decides nothing itself: many Nodes in one process, for benches. Says when they were ready, in one JSON line.
//!
//! `iop-swarm HOST:PORT TOKENS [CA]`: dials with one Node for each line of TOKENS, all at once, with TLS if there is a CA.
#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a program of the benches: what it can't use ends it, and its result is printed"
)]

use std::path::Path;
use std::time::{Duration, Instant};

use iop_tests::swarm::Swarm;

#[tokio::main]
async fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [edge, tokens, ca @ ..] = arguments.as_slice() else {
        println!("usage: iop-swarm HOST:PORT TOKENS [CA]");
        return;
    };
    let tokens = std::fs::read_to_string(tokens).expect("a file with tokens");
    let begin = Instant::now();
    let edge = edge.parse().expect("an address");
    let swarm = Swarm::start(edge, ca.first().map(Path::new), tokens.lines().map(str::to_owned).collect());
    let mut times: Vec<_> = swarm.ready_times(begin).await;
    times.sort_unstable();
    let at = |share: f64| {
        times.get((times.len() as f64 * share) as usize).or(times.last()).map_or(0.0, Duration::as_secs_f64)
    };
    println!(
        "{{\"nodes\":{},\"first_s\":{:.3},\"p50_s\":{:.3},\"p90_s\":{:.3},\"all_s\":{:.3}}}",
        times.len(),
        at(0.0),
        at(0.5),
        at(0.9),
        at(1.0)
    );
}
