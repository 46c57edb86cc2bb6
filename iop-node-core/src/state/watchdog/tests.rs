mod schedules;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn provider(first: u64, per_1k: u64, probe: u64) -> ProviderConfig {
    let mut config = ProviderConfig::new(iop_execution::ProviderId::new("p").unwrap(), "custom").unwrap();
    config.first_response_timeout_ms = first;
    config.stall_per_1k_prompt_ms = per_1k;
    config.probe_timeout_ms = probe;
    config
}

#[test]
fn the_first_progress_may_take_longer_and_never_less_than_the_requests_own_timeout() {
    // WDG-7, EXE-13; field report 16
    let stall = StallTimeout::from_ms(10_000).unwrap();
    for (first, per_1k, tokens, want) in [
        (0, 0, 100_000, 10_000),
        (5_000, 0, 0, 10_000),
        (60_000, 0, 0, 60_000),
        (60_000, 1_000, 100_000, 160_000),
        (0, 1_000, 100_000, 110_000),
        (0, 1_000, 500, 10_500),
        (5_000, 1_000, 2_000, 12_000),
        (u64::MAX, u64::MAX, u32::MAX, 21_600_000),
    ] {
        let limits = Limits::new(stall, &provider(first, per_1k, 0), ms(5_000), tokens);
        assert_eq!((limits.first, limits.stall), (ms(want), ms(10_000)), "{first} {per_1k} {tokens}");
        assert!(limits.first >= limits.stall);
    }
    let longest = StallTimeout::from_ms(StallTimeout::MAX_MS).unwrap();
    assert_eq!(Limits::new(longest, &provider(1, 0, 0), ms(1), 0).first, longest.get());
}

#[test]
fn a_probe_has_five_seconds_unless_the_config_says_otherwise() {
    // WDG-3
    assert_eq!(probe_timeout(&provider(0, 0, 0)), ms(5_000));
    assert_eq!(probe_timeout(&provider(0, 0, 700)), ms(700));
    assert_eq!(probe_timeout(&provider(0, 0, u64::MAX)), MAX_PROBE_TIMEOUT);
}

fn watchdog(now: Instant) -> Watchdog {
    let limits = Limits { stall: ms(1_000), first: ms(3_000), close_grace: ms(500), probe: ms(200) };
    Watchdog::new(limits, CancelPolicy::Abort, now)
}

#[test]
fn the_terminal_names_the_setting_that_fired() {
    // WDG-7; field report 17
    let start = Instant::now();
    for (progress, want) in [
        (None, (TimeoutSetting::FirstResponse, ms(3_000), false)),
        (Some(2_000), (TimeoutSetting::ResponseStall, ms(1_000), true)),
    ] {
        let mut dog = watchdog(start);
        if let Some(at) = progress {
            assert!(dog.begin(Activity::Progress, start + ms(at)));
            dog.emitted();
        }
        let now = start + ms(3_000);
        assert_eq!(dog.poll_timeout(), Some(now));
        dog.handle_timeout(now);
        assert_eq!((dog.poll_action(), dog.poll_action()), (Some(Action::Cancel), Some(Action::Probe)));
        dog.returned(now);
        dog.probed(Health::Available, NonZeroU64::new(7), now + ms(100));
        let Some(Action::Finish(verdict)) = dog.poll_action() else { panic!("a verdict") };
        assert_eq!((verdict.setting, verdict.limit, verdict.progressed), want);
        assert_eq!(verdict.idle, want.1);
        assert_eq!(verdict.duration, want.1 + ms(100));
        assert_eq!(verdict.observation, NonZeroU64::new(7));
    }
}

#[test]
fn idle_time_without_credit_does_not_count_and_what_was_counted_is_kept() {
    // WDG-1, WIR-16
    let start = Instant::now();
    let mut dog = watchdog(start);
    assert!(dog.begin(Activity::Progress, start));
    dog.suspend(start + ms(600));
    assert_eq!(dog.poll_timeout(), None);
    dog.handle_timeout(start + ms(100_000));
    assert!(!dog.is_claimed() && dog.is_suspended());
    dog.emitted();
    dog.resume(start + ms(100_000));
    assert_eq!(dog.poll_timeout(), Some(start + ms(100_400)));
    dog.handle_timeout(start + ms(100_399));
    assert!(!dog.is_claimed());
    dog.handle_timeout(start + ms(100_400));
    assert!(dog.is_claimed());
}

#[test]
fn progress_moves_no_timer_it_only_makes_it_look_again() {
    // WDG-1: a timer armed for the old time finds that there is time left
    let start = Instant::now();
    let mut dog = watchdog(start);
    let armed = dog.poll_timeout().unwrap();
    for at in [500, 1_400, 2_200, 2_900] {
        assert!(dog.begin(Activity::Progress, start + ms(at)));
        dog.emitted();
    }
    dog.handle_timeout(armed);
    assert!(!dog.is_claimed());
    assert_eq!(dog.poll_timeout(), Some(start + ms(3_900)));
}

#[test]
fn evidence_is_one_of_three_pairs() {
    // WDG-5
    for (health, want) in [
        (Health::Available, ("available", "request_stalled")),
        (Health::Unavailable, ("unavailable", "provider_unhealthy")),
        (Health::Unknown, ("unknown", "health_unknown")),
    ] {
        let pair = LivenessClassification::from(health);
        assert_eq!((pair.provider_health().as_str(), pair.as_str()), want);
    }
}
