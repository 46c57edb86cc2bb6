use proptest::prelude::*;

use super::*;

fn at(start: Instant, seconds: u64) -> Instant {
    start + Duration::from_secs(seconds)
}

#[test]
fn an_answered_connection_lives_for_ever() {
    // WIR-12
    let start = Instant::now();
    let mut heartbeat = Heartbeat::new(start, HeartbeatProfile::default());
    for round in 0..10_000_u64 {
        let now = heartbeat.poll_timeout();
        assert_eq!(now, at(start, 30 * round));
        assert_eq!(heartbeat.handle_timeout(now), Some(HeartbeatAction::Ping(round + 1)));
        assert_eq!(heartbeat.handle_timeout(now), None);
        heartbeat.handle_pong(now + Duration::from_secs(1), round + 1);
    }
}

#[test]
fn silence_is_found_after_45_to_75_seconds() {
    // WIR-12: whenever the peer falls silent between two pings
    let start = Instant::now();
    for shift in 0..=30 {
        for silent in 0..=120 {
            let profile = HeartbeatProfile { first_shift: Duration::from_secs(shift), ..HeartbeatProfile::default() };
            let mut heartbeat = Heartbeat::new(start, profile);
            let dead = loop {
                let now = heartbeat.poll_timeout();
                match heartbeat.handle_timeout(now).expect("something is due") {
                    HeartbeatAction::Ping(nonce) if now < at(start, silent) => heartbeat.handle_pong(now, nonce),
                    HeartbeatAction::Ping(_) => {}
                    HeartbeatAction::Dead => break now,
                }
            };
            let took = (dead - at(start, silent)).as_secs();
            assert!((45..=75).contains(&took), "shift {shift}, silent from {silent}: {took} s");
        }
    }
}

#[test]
fn the_first_ping_is_shifted_by_at_most_an_interval() {
    // WIR-12
    let start = Instant::now();
    for (shift, first) in [(0, 0), (17, 17), (30, 30), (99, 30)] {
        let profile = HeartbeatProfile { first_shift: Duration::from_secs(shift), ..HeartbeatProfile::default() };
        assert_eq!(Heartbeat::new(start, profile).poll_timeout(), at(start, first));
    }
}

#[test]
fn only_a_ping_s_own_pong_or_a_later_one_s_answers_it() {
    // WIR-12, W16
    let start = Instant::now();
    for (pong, answered) in [(0, false), (1, false), (2, true), (3, true), (4, false), (u64::MAX, false)] {
        let mut heartbeat = Heartbeat::new(start, HeartbeatProfile::default());
        assert_eq!(heartbeat.ping_now(start), 1);
        assert_eq!(heartbeat.ping_now(start), 2);
        heartbeat.handle_pong(start, 1);
        assert_eq!(heartbeat.ping_now(at(start, 1)), 3);
        heartbeat.handle_pong(at(start, 2), pong);
        let ping = heartbeat.handle_timeout(at(start, 31));
        assert_eq!(ping, Some(HeartbeatAction::Ping(4)));
        let due = heartbeat.handle_timeout(at(start, 45));
        assert_eq!(due == Some(HeartbeatAction::Dead), !answered, "pong {pong}");
    }
}

#[test]
fn a_suspended_process_pings_afresh_before_it_judges() {
    // WIR-12
    let start = Instant::now();
    for woken in [36, 46, 55, 100, 100_000] {
        let mut heartbeat = Heartbeat::new(start, HeartbeatProfile::default());
        assert_eq!(heartbeat.handle_timeout(start), Some(HeartbeatAction::Ping(1)));
        assert_eq!(heartbeat.poll_timeout(), at(start, 30));
        let woken = at(start, woken);
        assert_eq!(heartbeat.handle_timeout(woken), Some(HeartbeatAction::Ping(2)), "not dead: it was us who slept");
        assert_eq!(heartbeat.handle_timeout(woken), None);
        assert_eq!(heartbeat.handle_timeout(at(woken, 30)), Some(HeartbeatAction::Ping(3)));
        assert_eq!(heartbeat.handle_timeout(at(woken, 44)), None);
        assert_eq!(
            heartbeat.handle_timeout(at(woken, 45)),
            Some(HeartbeatAction::Dead),
            "the fresh ping had its own 45 s"
        );
    }
}

#[test]
fn many_demanded_pings_stay_bounded_and_the_oldest_decides() {
    // WIR-12
    let start = Instant::now();
    let mut heartbeat = Heartbeat::new(start, HeartbeatProfile::default());
    for n in 0..1000 {
        heartbeat.ping_now(start + Duration::from_millis(n));
    }
    assert_eq!(heartbeat.outstanding.len(), HEARTBEAT_OUTSTANDING);
    assert_eq!(heartbeat.handle_timeout(heartbeat.next_ping), Some(HeartbeatAction::Ping(1001)));
    assert_eq!(heartbeat.handle_timeout(at(start, 45)), Some(HeartbeatAction::Dead));
    heartbeat.handle_pong(at(start, 45), 1001);
    assert!(heartbeat.outstanding.is_empty());
}

proptest! {
    // WIR-12: timers that run up to the slack late change nothing of that.
    #[test]
    fn late_timers_do_not_kill_an_answered_connection(delays in proptest::collection::vec(0..4_900_u64, 1..200)) {
        let mut heartbeat = Heartbeat::new(Instant::now(), HeartbeatProfile::default());
        for delay in delays {
            let now = heartbeat.poll_timeout() + Duration::from_millis(delay);
            match heartbeat.handle_timeout(now) {
                Some(HeartbeatAction::Ping(nonce)) => heartbeat.handle_pong(now, nonce),
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }
}
