use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::token::TokenId;

const SECOND: Duration = Duration::from_secs(1);

fn id(text: &str) -> TokenId {
    TokenId::parse(text).unwrap()
}

fn meter(requests: u32, tokens: u64, concurrent: u32) -> Meter {
    let limiter = RateLimiter::default();
    limiter.configure([(id("aaaaaaaa"), KeyLimits::new(requests, tokens, concurrent))]);
    limiter.meter(&id("aaaaaaaa")).unwrap()
}

#[test]
fn requests_of_a_minute_are_counted_and_the_wait_is_the_truth() {
    // CRD-12
    let (meter, t0) = (meter(2, 0, 0), Instant::now());
    meter.admit(t0).unwrap().settle(0, t0);
    meter.admit(t0 + 10 * SECOND).unwrap().settle(0, t0);
    let refusal = meter.admit(t0 + 20 * SECOND).unwrap_err();
    assert_eq!((refusal.kind, refusal.limit, refusal.used), (RateKind::Requests, 2, 2));
    let wait = refusal.retry_after.unwrap();
    assert_eq!(wait, 41 * SECOND, "the first leaves 61 s after it came");
    assert!(meter.admit(t0 + 20 * SECOND + wait - Duration::from_millis(1)).is_err());
    assert!(meter.admit(t0 + 20 * SECOND + wait).is_ok());
    assert!(meter.admit(t0 + 20 * SECOND + wait).is_err(), "one has left, not two");
}

#[test]
fn tokens_are_held_back_while_a_request_runs_and_counted_when_it_ends() {
    // CRD-12
    let (meter, t0) = (meter(0, 100, 0), Instant::now());
    let mut first = meter.admit(t0).unwrap();
    first.reserve(60, t0).unwrap();
    let mut second = meter.admit(t0).unwrap();
    let refusal = second.reserve(41, t0).unwrap_err();
    assert_eq!((refusal.kind, refusal.used, refusal.requested), (RateKind::Tokens, 60, 41));
    assert_eq!(refusal.retry_after, Some(UNKNOWN_WAIT), "nobody knows when the first one ends");
    second.reserve(40, t0).unwrap();
    assert!(meter.admit(t0).unwrap().reserve(0, t0).is_err(), "no request is free");
    second.settle(5, t0 + SECOND);
    assert_eq!(meter.standings(t0 + SECOND).tokens.unwrap().remaining, 35);
    // Hours later the first one still holds what it was given.
    let late = t0 + Duration::from_secs(7200);
    assert_eq!(meter.standings(late).tokens.unwrap().remaining, 40);
    first.settle(250, late);
    let standing = meter.standings(late).tokens.unwrap();
    assert_eq!((standing.remaining, standing.limit), (0, 100), "more than was expected is a debt");
    assert!(standing.reset > 60 * SECOND - SECOND && standing.reset <= 61 * SECOND);
    assert!(meter.admit(late).unwrap().reserve(1, late).is_err());
    assert!(meter.admit(late).unwrap().reserve(1, late + 61 * SECOND).is_ok());
}

#[test]
fn a_request_larger_than_the_limit_is_told_never() {
    // CRD-12
    let (meter, t0) = (meter(0, 100, 0), Instant::now());
    let refusal = meter.admit(t0).unwrap().reserve(101, t0).unwrap_err();
    assert_eq!((refusal.retry_after, refusal.requested), (None, 101));
    assert!(meter.admit(t0).unwrap().reserve(100, t0).is_ok());
}

#[test]
fn requests_at_once_are_counted_until_they_end_whatever_way() {
    // CRD-12
    let (meter, t0) = (meter(0, 0, 2), Instant::now());
    let (first, second) = (meter.admit(t0).unwrap(), meter.admit(t0).unwrap());
    let refusal = meter.admit(t0).unwrap_err();
    assert_eq!((refusal.kind, refusal.retry_after), (RateKind::Concurrent, Some(UNKNOWN_WAIT)));
    drop(first);
    let third = meter.admit(t0).unwrap();
    assert!(meter.admit(t0).is_err());
    second.settle(3, t0);
    drop(third);
    assert_eq!(meter.running(), 0);
}

#[test]
fn a_reload_keeps_the_counts_of_keys_that_stay_and_forgets_those_that_go() {
    // CRD-12, CFG-2
    let (limiter, t0) = (RateLimiter::default(), Instant::now());
    let (stays, goes) = (id("aaaaaaaa"), id("bbbbbbbb"));
    limiter.configure([&stays, &goes].map(|id| (id.clone(), KeyLimits::new(1, 0, 0))));
    let running = limiter.meter(&goes).unwrap().admit(t0).unwrap();
    limiter.meter(&stays).unwrap().admit(t0).unwrap().settle(0, t0);
    limiter.configure([(stays.clone(), KeyLimits::new(2, 0, 0))]);
    assert!(limiter.meter(&goes).is_none());
    let meter = limiter.meter(&stays).unwrap();
    assert_eq!(meter.standings(t0).requests.unwrap().remaining, 1, "one of now two");
    // A key of the same name that comes later owes nothing to the one before, and takes nothing from it.
    limiter.configure([&stays, &goes].map(|id| (id.clone(), KeyLimits::new(2, 0, 1))));
    let again = limiter.meter(&goes).unwrap();
    drop(running);
    assert_eq!((again.running(), again.standings(t0).requests.unwrap().remaining), (0, 2));
    limiter.configure([(stays.clone(), KeyLimits::default())]);
    assert_eq!(limiter.meter(&stays).unwrap().usage(t0).requests, 1, "without a limit it is counted all the same");
    limiter.configure([]);
    assert!(limiter.is_empty());
}

#[test]
fn who_operates_the_edge_sees_what_each_key_uses() {
    // CRD-12, BIN-3
    let (limiter, t0) = (RateLimiter::default(), Instant::now());
    let (limited, free) = (id("bbbbbbbb"), id("aaaaaaaa"));
    limiter.configure([(limited.clone(), KeyLimits::new(5, 100, 2)), (free.clone(), KeyLimits::default())]);
    let mut first = limiter.meter(&limited).unwrap().admit(t0).unwrap();
    first.reserve(60, t0).unwrap();
    limiter.meter(&limited).unwrap().admit(t0 + 10 * SECOND).unwrap().settle(7, t0 + 10 * SECOND);
    let running: Vec<_> = (0..50).map(|_| limiter.meter(&free).unwrap().admit(t0).unwrap()).collect();
    let [(one, of_free), (two, of_limited)] = limiter.usage(t0 + 20 * SECOND).try_into().unwrap();
    assert_eq!((one, two), (free, limited), "by id");
    assert_eq!((of_free.running, of_free.requests, of_free.limits), (50, 50, KeyLimits::default()));
    let expected = KeyUsage {
        limits: KeyLimits::new(5, 100, 2),
        running: 1,
        requests: 2,
        requests_reset: 51 * SECOND,
        tokens: 7,
        held: 60,
        tokens_reset: 51 * SECOND,
    };
    assert_eq!(of_limited, expected);
    assert!(first.counts_tokens() && !running[0].counts_tokens());
    drop((first, running));
    let [(_, of_free), (_, of_limited)] = limiter.usage(t0 + 100 * SECOND).try_into().unwrap();
    assert_eq!((of_free.running, of_free.requests), (0, 0));
    assert_eq!((of_limited.running, of_limited.held, of_limited.requests, of_limited.tokens), (0, 0, 0, 0));
}

#[test]
fn keys_that_nobody_configured_create_no_state() {
    // CRD-12
    let limiter = RateLimiter::default();
    limiter.configure([(id("aaaaaaaa"), KeyLimits::new(1, 1, 1))]);
    for number in 0..1000 {
        assert!(limiter.meter(&id(&format!("x{number:07}"))).is_none());
    }
    assert_eq!(limiter.len(), 1);
}

#[test]
fn counts_do_not_overflow_and_time_does_not_go_back() {
    // CRD-12
    let (meter, t0) = (meter(0, u64::MAX, 0), Instant::now() + 100 * SECOND);
    meter.admit(t0).unwrap().settle(u64::MAX, t0);
    meter.admit(t0 - 90 * SECOND).unwrap().settle(u64::MAX, t0 - 90 * SECOND);
    assert_eq!(meter.standings(t0).tokens.unwrap().remaining, 0);
    assert_eq!(meter.standings(t0 + 61 * SECOND).tokens.unwrap().remaining, u64::MAX);
}

#[derive(Debug, Clone)]
enum Step {
    Wait(u64),
    Ask {
        tokens: u64,
    },
    /// Ends the n-th running one: with a share of what it reserved, or dropped.
    End {
        which: usize,
        share: Option<u8>,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0_u64..40_000).prop_map(Step::Wait),
        1 => (0_u64..3).prop_map(Step::Wait),
        6 => (0_u64..60).prop_map(|tokens| Step::Ask { tokens }),
        5 => (any::<usize>(), proptest::option::of(0_u8..=100)).prop_map(|(which, share)| Step::End { which, share }),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    // CRD-12
    #[test]
    fn no_minute_holds_more_than_a_limit_and_each_request_settles_once(
        steps in steps(),
        (requests, tokens, concurrent) in (1_u32..6, 20_u64..100, 1_u32..5),
    ) {
        let meter = meter(requests, tokens, concurrent);
        let (t0, mut now) = (Instant::now(), Duration::ZERO);
        let (mut running, mut admitted, mut counted) = (Vec::<Permit>::new(), Vec::new(), Vec::<(Duration, u64)>::new());
        for step in steps {
            match step {
                Step::Wait(ms) => now += Duration::from_millis(ms),
                Step::Ask { tokens: wanted } => {
                    let minute = |at: &Duration| *at + 60 * SECOND > now;
                    let recent = admitted.iter().filter(|at| minute(at)).count();
                    match meter.admit(t0 + now) {
                        Ok(mut permit) => {
                            admitted.push(now);
                            prop_assert!(recent < requests as usize);
                            prop_assert!(running.len() < concurrent as usize);
                            match permit.reserve(wanted, t0 + now) {
                                Ok(()) => running.push(permit),
                                Err(refusal) => {
                                    // Told the truth: it never fits, or something must end or be forgotten first.
                                    prop_assert_eq!(refusal.retry_after.is_none(), wanted > tokens);
                                    permit.settle(0, t0 + now);
                                }
                            }
                        }
                        Err(refusal) => match refusal.kind {
                            RateKind::Concurrent => prop_assert_eq!(running.len(), concurrent as usize),
                            RateKind::Requests => {
                                let wait = refusal.retry_after.unwrap();
                                prop_assert!(wait <= 61 * SECOND);
                            }
                            RateKind::Tokens => prop_assert!(false, "not before the body is read"),
                        },
                    }
                }
                Step::End { which, share } if !running.is_empty() => {
                    let permit = running.swap_remove(which % running.len());
                    let held = permit.reserved();
                    let used = share.map_or(held, |share| held * u64::from(share) / 100);
                    match share {
                        Some(_) => permit.settle(used, t0 + now),
                        None => {
                            let _told = meter.standings(t0 + now);
                            drop(permit);
                        }
                    }
                    counted.push((now, used));
                }
                Step::End { .. } => {}
            }
            let held: u64 = running.iter().map(Permit::reserved).sum();
            let used: u64 = counted.iter().filter(|(at, _)| *at + 60 * SECOND > now).map(|(_, used)| used).sum();
            prop_assert!(used + held <= tokens, "{} counted and {} held of {}", used, held, tokens);
            prop_assert_eq!(meter.running() as usize, running.len());
        }
        let left: u64 = running.drain(..).map(|permit| permit.reserved()).sum();
        let _ = left;
        prop_assert_eq!(meter.running(), 0);
        let later = t0 + now + 61 * SECOND;
        let standings = meter.standings(later);
        prop_assert_eq!(standings.tokens.map(|tokens| tokens.remaining), Some(tokens), "nothing is held for ever");
        prop_assert_eq!(standings.requests.map(|left| left.remaining), Some(u64::from(requests)));
    }
}
