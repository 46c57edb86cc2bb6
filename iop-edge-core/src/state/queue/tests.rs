use std::time::Duration;

use super::*;

mod model;

fn need(class: WorkClass) -> Need {
    Need { class, wanted: None, too_small: 0, avoid: None, barred: Vec::new() }
}

fn ticket(arrival: u64, priority: i8, caller: &str, since: Instant) -> Ticket {
    let caller = (!caller.is_empty()).then(|| Principal::new(caller).unwrap());
    Ticket { attempt: AttemptId(arrival), priority, caller, since, passed: 0 }
}

/// Takes everyone out in order, each charged one token.
fn order(queue: &mut WaitQueue, clock: &mut FairClock) -> Vec<u64> {
    let mut order = Vec::new();
    loop {
        let Some(Head { need, rank, .. }) = queue.heads(clock).min_by_key(|head| head.rank) else { return order };
        let (need, attempt) = (need.clone(), rank.attempt);
        let ticket = queue.remove(&need, attempt).unwrap();
        clock.served(&ticket.caller, 1);
        order.push(attempt.0);
    }
}

#[test]
fn higher_priority_goes_first_and_one_callers_requests_in_order_of_arrival() {
    // QUE-1
    let now = Instant::now();
    let mut queue = WaitQueue::default();
    for (arrival, priority) in [(1, 0), (2, -1), (3, 5), (4, 0), (5, 5)] {
        assert!(queue.push(need(WorkClass::Normal), ticket(arrival, priority, "a", now), 9));
    }
    assert_eq!(order(&mut queue, &mut FairClock::default()), [3, 5, 1, 4, 2]);
    assert_eq!(queue.len(), 0);
}

#[test]
fn callers_take_turns_whatever_each_has_waiting() {
    // QUE-1
    let now = Instant::now();
    let mut queue = WaitQueue::default();
    for arrival in 1..=4 {
        assert!(queue.push(need(WorkClass::Normal), ticket(arrival, 0, "greedy", now), 9));
    }
    assert!(queue.push(need(WorkClass::Normal), ticket(5, 0, "b", now), 9));
    assert!(queue.push(need(WorkClass::Long), ticket(6, 0, "c", now), 9));
    assert!(queue.push(need(WorkClass::Normal), ticket(7, 0, "b", now), 9));
    assert_eq!(order(&mut queue, &mut FairClock::default()), [1, 5, 6, 2, 7, 3, 4]);
}

#[test]
fn the_bound_holds_over_all_lines_and_removal_makes_room() {
    // QUE-1, QUE-2
    let start = Instant::now();
    let mut queue = WaitQueue::default();
    let (normal, long) = (need(WorkClass::Normal), need(WorkClass::Long));
    assert!(queue.push(normal.clone(), ticket(1, 0, "", start + Duration::from_secs(1)), 2));
    assert!(queue.push(long.clone(), ticket(2, 0, "", start), 2));
    assert!(!queue.push(normal.clone(), ticket(3, 0, "", start), 2));
    assert_eq!((queue.len(), queue.oldest()), (2, Some(start)));
    assert!(queue.remove(&long, AttemptId(2)).is_some());
    assert!(queue.remove(&long, AttemptId(2)).is_none() && queue.remove(&long, AttemptId(1)).is_none());
    assert!(queue.push(normal.clone(), ticket(3, 0, "", start), 2));
    assert_eq!(queue.line(&normal).collect::<Vec<_>>(), [AttemptId(1), AttemptId(3)]);
    assert!(!queue.push(normal, ticket(4, 0, "", start), 0));
    assert_eq!(queue.take_all().len(), 2);
    assert_eq!((queue.len(), queue.oldest()), (0, None));
}
