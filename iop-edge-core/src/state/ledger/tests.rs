use proptest::prelude::*;

use super::*;

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

#[derive(Debug, Clone)]
enum Op {
    Acquire(u64, u64, bool, bool),
    Take(u64),
    Quarantine(u64),
    Fence(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0..8u64, 0..3u64, any::<bool>(), any::<bool>()).prop_map(|(a, g, p, l)| Op::Acquire(a, g, p, l)),
        (0..8u64).prop_map(Op::Take),
        (0..8u64).prop_map(Op::Quarantine),
        (0..3u64).prop_map(Op::Fence),
    ]
}

fn provider(second: bool) -> &'static str {
    if second { "b" } else { "a" }
}

proptest! {
    /// The counters are always the sum of the records, never above the limits, and each record goes exactly once.
    #[test]
    fn counters_are_the_sum_of_the_records(ops in proptest::collection::vec(op(), 0..80)) {
        // LEA-2, LEA-4, LEA-7
        let mut ledger = Ledger::default();
        let (mut acquired, mut released) = (0, 0);
        for op in ops {
            match op {
                Op::Acquire(attempt, generation, second, long) => {
                    let class = if long { WorkClass::Long } else { WorkClass::Normal };
                    let fits = counters(&ledger, provider(second)).has_place(class, LIMITS);
                    let free = ledger.lease(AttemptId(attempt)).is_none();
                    let result = ledger.acquire(lease(attempt, generation, provider(second), class), LIMITS);
                    prop_assert_eq!(result.is_ok(), fits && free);
                    acquired += u32::from(result.is_ok());
                }
                Op::Take(attempt) => {
                    let held = ledger.lease(AttemptId(attempt)).cloned();
                    let late = ledger.late_releases();
                    let taken = ledger.take(AttemptId(attempt));
                    prop_assert_eq!(&taken, &held);
                    prop_assert_eq!(ledger.late_releases() - late, u64::from(held.is_none()));
                    prop_assert!(ledger.take(AttemptId(attempt)).is_none());
                    released += u32::from(taken.is_some());
                }
                Op::Quarantine(attempt) => {
                    let held = ledger.lease(AttemptId(attempt)).is_some();
                    let first = ledger.quarantine(AttemptId(attempt));
                    prop_assert!(!first || held);
                    prop_assert!(!ledger.quarantine(AttemptId(attempt)));
                }
                Op::Fence(generation) => {
                    for attempt in ledger.held_by(Generation(generation)) {
                        prop_assert!(ledger.take(attempt).is_some_and(|lease| lease.generation == Generation(generation)));
                        released += 1;
                    }
                    prop_assert!(ledger.held_by(Generation(generation)).is_empty());
                }
            }
            for second in [false, true] {
                let id = ProviderId::new(provider(second)).unwrap();
                let mut sum = PlaceCounters::default();
                for record in ledger.records.values().filter(|record| record.lease.provider == id) {
                    *class_counter(&mut sum, record.lease.class) += 1;
                    sum.quarantined += u32::from(record.quarantined);
                }
                let counters = counters(&ledger, provider(second));
                prop_assert_eq!(counters, sum);
                prop_assert!(counters.in_use() <= LIMITS.capacity && counters.long <= LIMITS.long);
            }
        }
        prop_assert_eq!(acquired - released, u32::try_from(ledger.records.len()).unwrap());
    }
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
