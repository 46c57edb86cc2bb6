use std::time::Duration;

use super::*;

const NORMAL: Need = Need { class: WorkClass::Normal, wire: None };
const LONG: Need = Need { class: WorkClass::Long, wire: None };

fn order(queue: &WaitQueue, need: Need) -> Vec<u64> {
    queue.line(need).map(|position| position.attempt().0).collect()
}

#[test]
fn higher_priority_goes_first_and_equals_in_order_of_arrival() {
    // QUE-1
    let now = Instant::now();
    let mut queue = WaitQueue::default();
    for (arrival, priority) in [(1, 0), (2, -1), (3, 5), (4, 0), (5, 5)] {
        assert!(queue.push(NORMAL, Position::new(priority, AttemptId(arrival)), now, 9));
    }
    assert_eq!(order(&queue, NORMAL), [3, 5, 1, 4, 2]);
    assert_eq!(queue.heads().map(|(_, position)| position.attempt().0).collect::<Vec<_>>(), [3]);
}

#[test]
fn the_bound_holds_over_all_lines_and_removal_makes_room() {
    // QUE-1, QUE-2
    let start = Instant::now();
    let mut queue = WaitQueue::default();
    let position = |arrival| Position::new(0, AttemptId(arrival));
    assert!(queue.push(NORMAL, position(1), start + Duration::from_secs(1), 2));
    assert!(queue.push(LONG, position(2), start, 2));
    assert!(!queue.push(NORMAL, position(3), start, 2));
    assert_eq!((queue.len(), queue.oldest()), (2, Some(start)));
    assert!(queue.remove(LONG, position(2)));
    assert!(!queue.remove(LONG, position(2)) && !queue.remove(LONG, position(1)));
    assert!(queue.push(NORMAL, position(3), start, 2));
    assert_eq!(queue.len(), 2);
    assert!(!queue.push(NORMAL, position(4), start, 0));
}
