use proptest::prelude::*;

use super::*;

fn table(numbers: &[(u64, u64)]) -> RunTable<&'static str> {
    let mut table = RunTable::new();
    for (number, body_len) in numbers {
        table.begin(RunNumber(*number)).unwrap();
        table.open(RunNumber(*number), *body_len, "handle");
    }
    table
}

#[test]
fn numbers_must_rise_and_gaps_are_legal() {
    // W9, WIR-11
    let mut table = table(&[(1, 0), (5, 0)]);
    for number in [0, 1, 4, 5] {
        let violation = RunViolation::NotRising { number: RunNumber(number), highest: RunNumber(5) };
        assert_eq!(table.begin(RunNumber(number)), Err(violation));
    }
    assert_eq!(table.begin(RunNumber(6)), Ok(()));
    assert_eq!(table.highest(), RunNumber(6));
    assert!(RunTable::<()>::new().begin(RunNumber(0)).is_err(), "numbers are from 1");
    table.finish(RunNumber(5));
    assert!(table.begin(RunNumber(5)).is_err(), "an ended number is not free again");
}

#[test]
fn messages_of_ended_runs_are_late_and_of_numbers_never_given_a_violation() {
    // W4
    let mut table = table(&[(1, 10), (3, 0)]);
    assert_eq!(table.finish(RunNumber(1)), Some("handle"));
    assert_eq!(table.finish(RunNumber(1)), None);
    assert_eq!(table.find(RunNumber(1)), Ok(None));
    assert_eq!(table.chunk(RunNumber(1), 3, false), Ok(ChunkStep::Late));
    assert_eq!(table.find(RunNumber(2)), Ok(None), "below the highest counts as known");
    assert_eq!(table.late(), 3);
    assert!(table.find(RunNumber(3)).is_ok_and(|handle| handle.is_some()));
    for number in [0, 4, u64::MAX] {
        let violation = RunViolation::NeverGiven { number: RunNumber(number) };
        assert_eq!(table.find(RunNumber(number)), Err(violation));
        assert_eq!(table.chunk(RunNumber(number), 0, true), Err(violation));
    }
    assert_eq!((table.late(), table.len()), (3, 1));
}

#[test]
fn a_request_that_was_refused_is_known_and_its_body_is_late() {
    // W4
    let mut table = RunTable::<()>::new();
    table.begin(RunNumber(1)).unwrap();
    assert_eq!(table.chunk(RunNumber(1), 5, true), Ok(ChunkStep::Late));
    assert!(table.is_empty());
}

#[test]
fn a_body_has_exactly_its_announced_length() {
    // W17, WIR-8
    let deliver = |complete| Ok(ChunkStep::Deliver { complete });
    let run = RunNumber(1);
    let mut exact = table(&[(1, 10)]);
    assert_eq!(exact.chunk(run, 4, false), deliver(false));
    assert_eq!(exact.chunk(run, 0, false), deliver(false));
    assert_eq!(exact.chunk(run, 6, true), deliver(true));
    assert_eq!(exact.chunk(run, 1, true), Ok(ChunkStep::Broken), "more than announced");

    let mut closed_later = table(&[(1, 10)]);
    assert_eq!(closed_later.chunk(run, 10, false), deliver(true));
    assert_eq!(closed_later.chunk(run, 0, true), deliver(true));

    let mut long = table(&[(1, 10)]);
    assert_eq!(long.chunk(run, 11, true), Ok(ChunkStep::Broken));
    assert_eq!(long.chunk(run, 1, true), Ok(ChunkStep::Late), "after the break the rest is dropped");
    let mut short = table(&[(1, 10)]);
    assert_eq!(short.chunk(run, 9, true), Ok(ChunkStep::Broken));
    let mut empty = table(&[(1, 0)]);
    assert_eq!(empty.chunk(run, 0, true), deliver(true));
    let mut huge = table(&[(1, u64::MAX)]);
    assert_eq!(huge.chunk(run, u64::MAX, false), deliver(true));
    assert_eq!(huge.chunk(run, u64::MAX, false), Ok(ChunkStep::Broken));
}

#[derive(Debug, Clone)]
enum Op {
    Begin(u64),
    Find(u64),
    Chunk(u64),
    Finish(u64),
}

proptest! {
    #[test]
    fn the_table_agrees_with_a_model_that_remembers_everything(
        ops in prop::collection::vec((0..4_u8, 0..8_u64), 0..60)
    ) {
        // W4, W9
        let mut table = RunTable::new();
        let (mut given, mut open, mut late) = (Vec::new(), Vec::new(), 0);
        for (kind, number) in ops {
            let op = match kind { 0 => Op::Begin(number), 1 => Op::Find(number), 2 => Op::Chunk(number), _ => Op::Finish(number) };
            let highest = given.iter().max().copied().unwrap_or(0);
            match op {
                Op::Begin(n) => {
                    prop_assert_eq!(table.begin(RunNumber(n)).is_ok(), n > highest);
                    if n > highest {
                        given.push(n);
                        open.push(n);
                        table.open(RunNumber(n), 0, n);
                    }
                }
                Op::Find(n) => match table.find(RunNumber(n)) {
                    Ok(handle) => {
                        prop_assert!(n >= 1 && n <= highest);
                        prop_assert_eq!(handle.map(|n| *n), open.contains(&n).then_some(n));
                        late += u64::from(!open.contains(&n));
                    }
                    Err(_) => prop_assert!(n == 0 || n > highest),
                },
                Op::Chunk(n) => match table.chunk(RunNumber(n), 0, false) {
                    Ok(step) => {
                        prop_assert!(n >= 1 && n <= highest);
                        prop_assert_eq!(step == ChunkStep::Late, !open.contains(&n));
                        late += u64::from(!open.contains(&n));
                    }
                    Err(_) => prop_assert!(n == 0 || n > highest),
                },
                Op::Finish(n) => {
                    prop_assert_eq!(table.finish(RunNumber(n)).is_some(), open.contains(&n));
                    open.retain(|open| *open != n);
                }
            }
            prop_assert_eq!((table.len(), table.late()), (open.len(), late));
        }
    }
}
