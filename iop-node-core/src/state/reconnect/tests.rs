use iop_execution::testkit::ManualClock;
use proptest::prelude::*;

use super::*;

const MAX: u32 = u32::MAX;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Waits until the policy gives up, at most `limit`.
fn waits(policy: ReconnectPolicy, random: u32, limit: usize) -> Vec<Duration> {
    let now = ManualClock::new().now();
    let mut machine = Reconnect::new(policy);
    let mut waits = Vec::new();
    while waits.len() < limit
        && let Next::Dial(wait) = machine.ended(now, Duration::ZERO, random)
    {
        waits.push(wait);
    }
    waits
}

#[test]
fn omitted_zero_and_n_mean_what_the_rule_says() {
    // NOD-1
    assert_eq!(ReconnectPolicy::new(None, None), Ok(ReconnectPolicy::default()));
    assert_eq!(ReconnectPolicy::default().max_attempts(), Some(10));
    assert_eq!(ReconnectPolicy::default().interval(), secs(10));
    assert_eq!(ReconnectPolicy::new(Some(0), None).map(|p| p.max_attempts()), Ok(None));
    assert_eq!(ReconnectPolicy::new(Some(3), None).map(|p| p.max_attempts()), Ok(Some(3)));
    assert_eq!(ReconnectPolicy::new(Some(0), Some(Duration::ZERO)), Err(InvalidPolicy));
    assert!(ReconnectPolicy::new(Some(1), Some(Duration::ZERO)).is_ok());
}

#[test]
fn waits_double_from_one_second_then_stay_at_the_interval() {
    // NOD-1
    let low = waits(ReconnectPolicy::default(), 0, 99);
    let ms: Vec<_> = low.iter().map(Duration::as_millis).collect();
    assert_eq!(ms[..4], [100, 200, 400, 800], "below the interval jitter goes down to a tenth");
    assert_eq!(ms[4..], [10_000; 10], "at the interval it goes up only, and only these count");
    let high = waits(ReconnectPolicy::default(), MAX, 99);
    let ms: Vec<_> = high.iter().map(|wait| wait.as_secs_f64().round()).collect();
    assert_eq!(ms[..4], [1.0, 2.0, 4.0, 8.0]);
    assert!(high[4..].iter().all(|wait| *wait > secs(12) && *wait <= secs(10) + Duration::from_millis(2500)));
    assert_eq!(high.len(), 14);
}

#[test]
fn an_interval_below_the_first_wait_counts_from_the_start() {
    // NOD-1
    let policy = ReconnectPolicy::new(Some(2), Some(Duration::from_millis(200))).unwrap();
    assert_eq!(waits(policy, 0, 99), [Duration::from_millis(200); 2]);
    let policy = ReconnectPolicy::new(Some(2), Some(secs(1))).unwrap();
    assert_eq!(waits(policy, 0, 99), [secs(1); 2]);
}

#[test]
fn unlimited_never_gives_up() {
    // NOD-1
    let policy = ReconnectPolicy::new(Some(0), Some(secs(2))).unwrap();
    assert_eq!(waits(policy, 7, 5000).len(), 5000);
}

#[test]
fn a_retry_after_is_a_minimum_and_capped() {
    // NOD-1
    let now = ManualClock::new().now();
    for (asked, want) in [(0, secs(1) / 10), (7, secs(7)), (300, secs(300)), (86_400, secs(300))] {
        let mut machine = Reconnect::new(ReconnectPolicy::default());
        assert_eq!(machine.ended(now, secs(asked), 0), Next::Dial(want));
    }
    let mut machine = Reconnect::new(ReconnectPolicy::default());
    for _ in 0..4 {
        machine.ended(now, Duration::ZERO, 0);
    }
    assert_eq!(machine.ended(now, secs(1), 0), Next::Dial(secs(10)), "it never shortens a wait");
    let mut machine = Reconnect::new(ReconnectPolicy::default());
    let Next::Dial(wait) = machine.ended(now, secs(20), MAX) else { panic!() };
    assert!(wait > secs(24) && wait <= secs(25), "{wait:?}: the jitter of a retry-after goes up only");
}

/// Most of these within any window of this length.
fn busiest(times: &mut [Duration], window: Duration) -> usize {
    times.sort();
    let within = |at: usize| times[at..].iter().take_while(|time| **time < times[at] + window).count();
    (0..times.len()).map(within).max().unwrap_or(0)
}

#[test]
fn five_hundred_nodes_do_not_come_back_in_step() {
    // NOD-1; field reports T7, 77
    let now = ManualClock::new().now();
    let policy = ReconnectPolicy::new(Some(0), None).unwrap();
    // Everybody lost the Edge in the same instant; it is away for a while, or sends everybody away with the same words.
    for (asked, most_per_second) in [(0, 500), (20, 150), (300, 20)] {
        let entropy = iop_execution::Entropy::seeded(7);
        let mut at = vec![Duration::ZERO; 500];
        let mut machines: Vec<_> = at.iter().map(|_| Reconnect::new(policy)).collect();
        for round in 0..8 {
            for (machine, at) in machines.iter_mut().zip(&mut at) {
                let random = u32::try_from(entropy.number() >> 32).unwrap();
                let Next::Dial(wait) = machine.ended(now + *at, secs(asked), random) else { panic!("unlimited") };
                assert!(wait >= secs(1) / 10, "never a hot loop");
                *at += wait;
            }
            let mut sorted = at.clone();
            let busiest = busiest(&mut sorted, secs(1));
            let allowed = if round == 0 { most_per_second } else { most_per_second * 2 / 3 };
            assert!(busiest <= allowed.max(2), "{asked} s, round {round}: {busiest} dials in one second");
            let close = busiest_pair(&sorted);
            assert!(close < 50, "{asked} s, round {round}: {close} dials within 50 ms");
        }
        if asked == 0 {
            assert!(at.iter().all(|at| *at < secs(60)), "an Edge that is back finds everybody within a minute");
        }
    }
}

fn busiest_pair(times: &[Duration]) -> usize {
    busiest(&mut times.to_vec(), Duration::from_millis(50))
}

#[test]
fn a_refusal_is_never_answered_by_a_hot_loop() {
    // NOD-1; field report T7: 5 357 attempts in a minute
    let start = ManualClock::new().now();
    for random in [0, MAX / 2, MAX] {
        let mut machine = Reconnect::new(ReconnectPolicy::new(Some(0), None).unwrap());
        let (mut now, mut dials) = (start, 0);
        while now < start + secs(60) {
            // Accepted, ready, and dropped at once changes nothing.
            machine.ready(now);
            let Next::Dial(wait) = machine.ended(now, Duration::ZERO, random) else { panic!("unlimited") };
            now += wait;
            dials += 1;
        }
        assert!(dials <= 11, "{dials} dials in a minute");
    }
}

#[test]
fn sixty_seconds_ready_forget_the_past_and_less_do_not() {
    // NOD-1
    let now = ManualClock::new().now();
    let policy = ReconnectPolicy::new(Some(1), Some(secs(1))).unwrap();
    for (ready_for, forgotten) in [(Duration::from_millis(59_999), false), (secs(60), true)] {
        let mut machine = Reconnect::new(policy);
        assert_eq!(machine.ended(now, Duration::ZERO, 0), Next::Dial(secs(1)));
        machine.ready(now);
        let next = machine.ended(now + ready_for, Duration::ZERO, 0);
        assert_eq!(next == Next::Exhausted, !forgotten, "{ready_for:?}");
    }
}

#[test]
fn accept_then_drop_is_given_up() {
    // NOD-1
    let mut now = ManualClock::new().now();
    let mut machine = Reconnect::new(ReconnectPolicy::default());
    let mut dials = 0;
    while let Next::Dial(wait) = machine.ended(now, Duration::ZERO, 0) {
        now += wait;
        machine.ready(now);
        now += secs(5);
        dials += 1;
        assert!(dials < 100);
    }
    assert_eq!((dials, machine.attempts()), (14, 10));
}

#[test]
fn only_what_needs_another_config_or_credential_is_fatal() {
    // NOD-1, WIR-13
    let fatal: Vec<_> = CloseCode::ALL.iter().filter(|code| is_fatal_close(**code)).map(|code| code.as_str()).collect();
    assert_eq!(fatal, ["unsupported_protocol", "removed_from_config"]);
}

proptest! {
    #[test]
    fn an_outage_of_max_attempts_times_interval_is_survived(
        max in 1..20_u32, interval_ms in 1..60_000_u64, randoms in prop::collection::vec(any::<u32>(), 200)
    ) {
        // NOD-1
        let interval = Duration::from_millis(interval_ms);
        let policy = ReconnectPolicy::new(Some(max), Some(interval)).unwrap();
        let now = ManualClock::new().now();
        let mut machine = Reconnect::new(policy);
        let (mut total, mut counted) = (Duration::ZERO, 0);
        for random in randoms {
            match machine.ended(now, Duration::ZERO, random) {
                Next::Exhausted => break,
                Next::Dial(wait) => {
                    prop_assert!(wait <= interval + interval / 4);
                    counted += u32::from(wait >= interval);
                    total += wait;
                }
            }
        }
        prop_assert_eq!(counted, max);
        prop_assert!(total >= interval * max);
        prop_assert_eq!(machine.ended(now, Duration::ZERO, 0), Next::Exhausted);
    }
}
