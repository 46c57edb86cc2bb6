use iop_execution::testkit::ManualClock;

use super::*;

fn key(name: &str) -> AdapterKey {
    AdapterKey::new(name).unwrap()
}

/// Waits after each of these answers.
fn waits(plan: &mut RefreshPlan, mut now: Instant, useful: &[bool], random: u32) -> Vec<u64> {
    let mut waits = Vec::new();
    for useful in useful {
        let due = plan.poll_timeout().unwrap();
        waits.push(u64::try_from(due.saturating_duration_since(now).as_millis()).unwrap());
        assert_eq!(plan.poll(due - Duration::from_nanos(1)), None, "not before it is due");
        now = due;
        let question = plan.poll(now).unwrap();
        plan.done(&question, *useful, now, random);
    }
    waits
}

#[test]
fn a_silent_backend_is_asked_sooner_and_less_and_less_often_and_one_that_lists_something_every_half_minute() {
    // ADP-5
    let now = ManualClock::new().now();
    let mut plan = RefreshPlan::default();
    plan.add(key("a"), false, now, 0);
    let useful = [false, false, false, false, false, false, true, true, false, true];
    let want = [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000, 30_000, 1_000];
    assert_eq!(waits(&mut plan, now, &useful, 0), want);
    let mut plan = RefreshPlan::default();
    plan.add(key("a"), true, now, u32::MAX);
    let least = waits(&mut plan, now, &[true, false, false], u32::MAX);
    assert_eq!(least, [22_500, 22_500, 750], "jitter goes down to three quarters");
}

#[test]
fn nobody_is_asked_twice_at_once() {
    // ADP-5
    let now = ManualClock::new().now();
    let late = now + REFRESH_INTERVAL * 100;
    let mut plan = RefreshPlan::default();
    plan.add(key("a"), true, now, 0);
    plan.add(key("b"), true, now, 0);
    let (first, second) = (plan.poll(late).unwrap(), plan.poll(late).unwrap());
    assert_ne!(first.adapter, second.adapter);
    assert_eq!((plan.poll(late), plan.poll_timeout()), (None, None));
    plan.done(&first, true, late, 0);
    assert!(plan.poll_timeout().is_some());
}

#[test]
fn an_answer_about_a_replaced_instance_is_nobody_s() {
    // ADP-5, REG-7
    let now = ManualClock::new().now();
    let late = now + REFRESH_INTERVAL;
    let mut plan = RefreshPlan::default();
    plan.add(key("a"), true, now, 0);
    let old = plan.poll(late).unwrap();
    plan.add(key("a"), true, late, 0);
    let new = plan.poll(late + REFRESH_INTERVAL).unwrap();
    plan.done(&old, true, late, 0);
    assert_eq!(plan.poll_timeout(), None, "the new one is still being asked");
    plan.done(&new, true, late, 0);
    assert!(plan.poll_timeout().is_some());
    plan.retain(|_| false);
    assert_eq!(plan.poll_timeout(), None);
}
