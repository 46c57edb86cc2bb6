//! The whole of IOP under seeded trouble. See `iop_tests::sim`.

use std::time::{SystemTime, UNIX_EPOCH};

use iop_tests::sim::seeds::{fixed, play_all, setting, show};
use iop_tests::sim::stage::play;

/// Seeds that are played on each run of the tests, beside the fixed ones.
const RANDOM: u64 = 2_000;
/// Fixed seeds.
const FIXED: usize = 200;
/// Of which so many are played twice.
const REPEATED: usize = 25;

/// What the fixed seeds together must have seen: each kind of trouble, and each outcome.
const SEEN: [(&str, &str); 73] = [
    ("block", "both ways"),
    ("block", "to the edge"),
    ("block", "to the node"),
    ("cancel", "reached"),
    ("config", "applied"),
    ("crash", ""),
    ("crash", "mute"),
    ("crash edge", ""),
    ("crash edge", "mute"),
    ("cut", ""),
    ("heal", "reset"),
    ("in service", "off"),
    ("pause", ""),
    ("pause edge", ""),
    ("quarantined", ""),
    ("shutdown", ""),
    ("stick", ""),
    ("stop edge", ""),
    ("suspected", ""),
    ("trusted", ""),
    ("disconnected", "closed"),
    ("disconnected", "drained"),
    ("disconnected", "heartbeat_timeout"),
    ("disconnected", "protocol_violation"),
    ("disconnected", "restart"),
    ("disconnected", "superseded"),
    ("refused", "duplicate_connection"),
    ("outcome", "cancelled"),
    ("outcome", "client"),
    ("outcome", "deadline"),
    ("outcome", "disconnected"),
    ("outcome", "edge_deadline"),
    ("outcome", "internal"),
    ("outcome", "left"),
    ("outcome", "left waiting"),
    ("outcome", "node required"),
    ("outcome", "node_suspect"),
    ("outcome", "provider_rejected"),
    ("outcome", "provider_unreachable"),
    ("outcome", "queue full"),
    ("outcome", "queue timeout"),
    ("outcome", "receive_pool"),
    ("outcome", "shutting down"),
    ("outcome", "slow_client"),
    ("outcome", "whole"),
    ("answer", "available"),
    ("answer", "unavailable"),
    ("attempt", "elsewhere"),
    ("considered", "budget"),
    ("considered", "committed"),
    ("considered", "no_candidate"),
    ("considered", "none"),
    ("considered", "ownership_unconfirmed"),
    ("considered", "policy_off"),
    ("ill", ""),
    ("lowered", ""),
    ("probe", "never"),
    ("probe", "panics"),
    ("probe", "unavailable"),
    ("probe", "unknown"),
    ("raised", "answer"),
    ("raised", "new generation"),
    ("record", "completed"),
    ("record", "failed"),
    ("record", "ineligible"),
    ("record", "recovered_completed"),
    ("record", "recovery_exhausted"),
    ("stall", "confirmed"),
    ("stall", "health_unknown"),
    ("stall", "provider_unhealthy"),
    ("stall", "request_stalled"),
    ("stall", "unconfirmed"),
    ("outcome", "response_stalled"),
];

#[test]
fn fixed_seeds() {
    // LEA-4, LEA-6, LEA-7, FEN-1 to FEN-6, FEN-8, QUE-1, QUE-2, EDG-3, NOD-1, NOD-4, NOD-5, WIR-6, WIR-11, WIR-12
    // WDG-4, HLT-3 to HLT-7, REC-2 to REC-4, REC-6 to REC-8
    let seeds = fixed();
    assert_eq!(seeds.len(), FIXED);

    let summary = play_all(&seeds);
    // Seeds that see nothing prove nothing.
    for (what, how) in SEEN {
        assert!(summary.count_of(what, how) > 0, "no seed has seen: {what} {how}\n{:#?}", summary.counts);
    }
    for how in ["corrupt", "lose", "reorder", "repeat"] {
        assert!(summary.counts.keys().any(|(_, detail)| *detail == how), "no message did: {how}");
    }
}

#[test]
fn random_seeds() {
    let count = setting("IOP_SIM_SEEDS").unwrap_or(RANDOM);
    let start = setting("IOP_SIM_START").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        u64::try_from(now.as_micros()).unwrap() << 8
    });
    eprintln!("IOP_SIM_START={start} IOP_SIM_SEEDS={count}");
    let seeds: Vec<u64> = (start..start + count).collect();
    let summary = play_all(&seeds);
    eprintln!("{:#?}", summary.counts);
}

#[test]
fn a_seed_played_twice_has_one_history() {
    let count = setting("IOP_SIM_REPEATED").and_then(|count| usize::try_from(count).ok()).unwrap_or(REPEATED);
    for seed in fixed().into_iter().take(count) {
        let (one, two) = (play(seed, false), play(seed, false));
        assert_eq!((one.hash, one.lines), (two.hash, two.lines), "seed {seed}");
    }
}

#[test]
fn one_seed() {
    let Some(seed) = setting("IOP_SIM_SEED") else { return };
    let played = show(seed);
    eprintln!("seed {seed}: {} lines, hash {:016x}", played.lines, played.hash);
    if let Some(failure) = played.failure {
        panic!("{failure}");
    }
}
