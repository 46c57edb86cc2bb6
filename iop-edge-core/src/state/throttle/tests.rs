use super::*;

#[test]
fn a_source_is_blocked_after_a_burst_and_forgiven_with_time() {
    // REG-8
    let start = Instant::now();
    let address = |last| Source::Address(IpAddr::from([10, 0, 0, last]));
    let mut throttle = Throttle::default();
    for _ in 0..BURST {
        throttle.failed(address(1), start);
        assert_eq!(throttle.blocked(&address(1), start), None);
    }
    throttle.failed(address(1), start);
    assert_eq!(throttle.blocked(&address(1), start), Some(FORGET));
    assert_eq!(throttle.blocked(&address(2), start), None, "nobody else pays");
    assert_eq!(throttle.blocked(&address(1), start + FORGET), None);
    for _ in 0..100 {
        throttle.failed(address(1), start);
    }
    assert_eq!(throttle.blocked(&address(1), start), Some(FORGET * BURST), "the block is bounded");
}

#[test]
fn what_is_remembered_is_bounded() {
    // API-15, REG-8
    let start = Instant::now();
    let mut throttle = Throttle::default();
    for key in 0..2 * u32::try_from(MAX_KEYS).unwrap() {
        throttle.failed(Source::Address(IpAddr::from(key.to_be_bytes())), start);
    }
    assert_eq!(throttle.clear_at.len(), MAX_KEYS);
    throttle.failed(Source::Address(IpAddr::from([255; 4])), start + FORGET * 2);
    assert_eq!(throttle.clear_at.len(), 1, "old entries make room");
}
