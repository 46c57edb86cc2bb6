use super::*;

mod model;

fn lease(attempt: u64, generation: u64, provider: &str, class: WorkClass) -> CapacityLease {
    CapacityLease {
        attempt: AttemptId(attempt),
        node: NodeId::new("n").unwrap(),
        generation: Generation(generation),
        provider: ProviderId::new(provider).unwrap(),
        adapter: AdapterKey::new(provider).unwrap(),
        target: Target::new("t").unwrap(),
        class,
        config_revision: 1,
    }
}

fn counters(ledger: &Ledger, provider: &str) -> PlaceCounters {
    ledger.counters(&NodeId::new("n").unwrap(), &ProviderId::new(provider).unwrap())
}

const LIMITS: PlaceLimits = PlaceLimits { capacity: 3, long: 1 };

fn provider(second: bool) -> &'static str {
    if second { "b" } else { "a" }
}

#[test]
fn long_requests_draw_on_their_part_only() {
    // LEA-2
    let mut ledger = Ledger::default();
    assert_eq!(ledger.acquire(lease(1, 1, "a", WorkClass::Long), LIMITS), Ok(()));
    assert_eq!(ledger.acquire(lease(2, 1, "a", WorkClass::Long), LIMITS), Err(AtCapacity));
    assert_eq!(ledger.acquire(lease(2, 1, "a", WorkClass::Normal), LIMITS), Ok(()));
    assert_eq!(ledger.acquire(lease(3, 1, "a", WorkClass::Normal), LIMITS), Ok(()));
    assert_eq!(ledger.acquire(lease(4, 1, "a", WorkClass::Normal), LIMITS), Err(AtCapacity));
    assert_eq!(
        ledger.acquire(lease(4, 1, "b", WorkClass::Normal), LIMITS),
        Ok(()),
        "another provider has its own pool"
    );
}

#[test]
fn a_lease_is_what_it_was_claimed_as_until_it_is_taken() {
    // LEA-3: neither another claim nor a quarantine changes a record
    let mut ledger = Ledger::default();
    let claimed = lease(1, 7, "a", WorkClass::Long);
    assert_eq!(ledger.acquire(claimed.clone(), LIMITS), Ok(()));
    assert_eq!(ledger.acquire(lease(1, 8, "b", WorkClass::Normal), LIMITS), Err(AtCapacity));
    assert!(ledger.quarantine(AttemptId(1)));
    assert_eq!(ledger.lease(AttemptId(1)), Some(&claimed));
    assert_eq!(ledger.take(AttemptId(1)), Some(claimed));
}

#[test]
fn a_provider_that_moved_has_places_of_its_own_on_each_node() {
    // LEA-1
    let mut ledger = Ledger::default();
    let moved = CapacityLease { node: NodeId::new("m").unwrap(), ..lease(2, 2, "a", WorkClass::Normal) };
    assert_eq!(ledger.acquire(lease(1, 1, "a", WorkClass::Normal), LIMITS), Ok(()));
    assert_eq!(ledger.acquire(moved.clone(), LIMITS), Ok(()));
    assert!(ledger.take(AttemptId(1)).is_some());
    assert_eq!(counters(&ledger, "a"), PlaceCounters::default());
    assert_eq!(ledger.counters(&moved.node, &moved.provider).normal, 1);
    assert!(ledger.take(AttemptId(2)).is_some() && ledger.counters.is_empty(), "nothing is kept at rest");
}
