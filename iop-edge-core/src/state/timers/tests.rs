use std::time::Duration;

use super::*;

#[test]
fn timers_come_in_order_and_a_moved_one_comes_once() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let (queue, deadline) = (Timer::Queue(AttemptId(1)), Timer::Deadline(AttemptId(1)));
    let mut timers = Timers::default();
    timers.arm(queue, at(5));
    timers.arm(deadline, at(3));
    timers.arm(queue, at(1));
    assert_eq!(timers.next(), Some(at(1)));
    assert_eq!(timers.pop_due(at(0)), None);
    assert_eq!(timers.pop_due(at(9)), Some((at(1), queue)));
    assert_eq!(timers.pop_due(at(9)), Some((at(3), deadline)));
    assert_eq!((timers.pop_due(at(9)), timers.len()), (None, 0));
    timers.arm(Timer::CancelGrace(AttemptId(2)), at(1));
    timers.disarm_attempt(AttemptId(2));
    assert_eq!(timers.next(), None);
}
