use super::*;
use crate::limits::{MIN_CHARGE, MIN_WINDOW};

#[test]
fn credit_returns_when_half_the_window_is_consumed() {
    // WIR-7
    let mut window = ReceiveWindow::new(128 * 1024);
    for _ in 0..5 {
        window.receive(16 * 1024).unwrap();
    }
    let grants: Vec<_> = (0..5).map(|_| window.consume(16 * 1024)).collect();
    assert_eq!(grants, [None, None, None, Some(64 * 1024), None]);
    assert_eq!(window.held(), 0);
}

#[test]
fn more_than_the_credit_is_a_violation() {
    // WIR-7, W8
    let mut window = ReceiveWindow::new(MIN_WINDOW);
    window.receive(MIN_WINDOW - 1).unwrap();
    assert_eq!(window.receive(2), Err(CreditExceeded));
    assert_eq!(window.receive(1), Ok(()));
    assert_eq!(window.receive(MIN_CHARGE), Err(CreditExceeded));
    assert_eq!(window.receive(0), Ok(()), "exempt frames always pass");
}

#[test]
fn a_sender_that_lacks_credit_for_one_largest_frame_is_not_left_waiting() {
    // WIR-7: half of a small window is less than a largest frame
    let mut window = ReceiveWindow::new(MIN_WINDOW);
    window.receive(MIN_CHARGE).unwrap();
    assert_eq!(window.consume(MIN_CHARGE), Some(MIN_CHARGE));
    window.receive(MIN_CHARGE).unwrap();
    window.receive(MIN_CHARGE).unwrap();
    assert_eq!(window.consume(MIN_CHARGE), None, "more is held: its consumption comes");
    assert_eq!(window.consume(MIN_CHARGE), Some(2 * MIN_CHARGE));
}

#[test]
fn consuming_what_was_never_received_grants_nothing() {
    let mut window = ReceiveWindow::new(MIN_WINDOW);
    assert_eq!(window.consume(MIN_WINDOW), None);
    assert_eq!(window.receive(MIN_WINDOW), Ok(()));
    assert_eq!(window.receive(1), Err(CreditExceeded));
}
