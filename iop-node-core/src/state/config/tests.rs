use proptest::prelude::*;

use super::*;

fn config(revision: u64) -> NodeConfigPayload {
    NodeConfigPayload { revision, providers: Vec::new() }
}

fn sync() -> ConfigSync {
    ConfigSync::new(Arc::new(config(5)))
}

fn told(step: &Step) -> Option<(u64, u64, &str)> {
    step.answer.as_ref().map(|verdict| (verdict.seen, verdict.in_force, &*verdict.error))
}

fn to_apply(step: &Step) -> Option<u64> {
    step.apply.as_ref().map(|config| config.revision)
}

#[test]
fn a_push_that_is_not_newer_changes_nothing_and_is_told_what_is_in_force() {
    // W13, REG-7
    let mut sync = sync();
    assert_eq!(told(&sync.pushed(config(5))), Some((5, 5, "")));
    assert_eq!(told(&sync.pushed(config(4))), Some((4, 5, "older than the config in force")));
    assert_eq!(sync.in_force().revision, 5);
}

#[test]
fn a_refused_revision_leaves_the_last_good_one_in_force() {
    // REG-7
    let mut sync = sync();
    assert_eq!(to_apply(&sync.pushed(config(6))), Some(6));
    assert_eq!(sync.in_force().revision, 5, "not before it is built");
    let step = sync.finished(Err("provider `x`: no".into()));
    assert_eq!(told(&step), Some((6, 5, "provider `x`: no")));
    assert_eq!(to_apply(&sync.pushed(config(7))), Some(7));
    assert_eq!(told(&sync.finished(Ok(()))), Some((7, 7, "")));
}

#[test]
fn one_at_a_time_and_the_latest_wins() {
    // REG-7
    let mut sync = sync();
    assert_eq!(to_apply(&sync.pushed(config(6))), Some(6));
    assert_eq!(sync.pushed(config(6)), Step::default(), "its answer is on the way");
    assert_eq!(sync.pushed(config(7)), Step::default());
    assert_eq!(told(&sync.pushed(config(9))), Some((7, 5, OVERTAKEN)));
    assert_eq!(told(&sync.pushed(config(8))), Some((8, 5, OVERTAKEN)));
    let step = sync.finished(Ok(()));
    assert_eq!((told(&step), to_apply(&step)), (Some((6, 6, "")), Some(9)));
    let step = sync.finished(Ok(()));
    assert_eq!((told(&step), to_apply(&step)), (Some((9, 9, "")), None));
    assert_eq!(sync.finished(Ok(())), Step::default(), "nothing is at work");
}

proptest! {
    #[test]
    fn every_answer_is_true_and_the_newest_good_revision_ends_in_force(
        inputs in prop::collection::vec((0..30_u64, any::<bool>(), any::<bool>()), 1..60)
    ) {
        // REG-7: never back, never two at once, an empty error exactly when the revision is in force
        let mut sync = sync();
        let mut at_work = None;
        let check = |sync: &ConfigSync, step: Step, at_work: &mut Option<u64>| {
            if let Some(verdict) = step.answer {
                prop_assert_eq!(verdict.in_force, sync.in_force().revision);
                prop_assert_eq!(verdict.error.is_empty(), verdict.seen == verdict.in_force);
            }
            if let Some(config) = step.apply {
                prop_assert!(at_work.is_none() && config.revision > sync.in_force().revision);
                *at_work = Some(config.revision);
            }
            Ok(())
        };
        for (revision, finish, good) in inputs {
            let before = sync.in_force().revision;
            if finish {
                let done = at_work.take();
                let step = sync.finished(if good { Ok(()) } else { Err("no".into()) });
                prop_assert_eq!(sync.in_force().revision, done.filter(|_| good).unwrap_or(before));
                check(&sync, step, &mut at_work)?;
            } else {
                let step = sync.pushed(config(revision));
                prop_assert_eq!(sync.in_force().revision, before);
                check(&sync, step, &mut at_work)?;
            }
        }
    }
}
