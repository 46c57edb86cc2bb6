//! Decides which seeds run, on how many threads, and what is printed when one fails.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `IOP_SIM_SEED` | one seed, with its whole history |
//! | `IOP_SIM_SEEDS` | how many random seeds |
//! | `IOP_SIM_START` | the first of them; without it they differ from run to run |
//! | `IOP_SIM_REPEATED` | how many of the fixed seeds are played twice |
//! | `IOP_SIM_PROGRESS` | a line for each so many seeds |
//! | `IOP_SIM_KEEP_GOING` | all seeds, also after a failure; a line for each that fails |

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::sim::stage::{Played, play};

/// No seed takes longer than this in real time, however slow the machine: it hangs.
const HANG: Duration = Duration::from_secs(120);

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A panic on this thread since the last look: tasks swallow them.
pub(super) fn panicked() -> Option<String> {
    PANIC.with(|panic| panic.borrow_mut().take())
}

fn watch_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANIC.with(|panic| *panic.borrow_mut() = Some(info.to_string()));
            before(info);
        }));
    });
}

/// A number from the environment.
#[must_use]
pub fn setting(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.trim().parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// The seeds of `sim-seeds.txt`: a number a line, and after `#` what it once found.
#[must_use]
pub fn fixed() -> Vec<u64> {
    let lines = include_str!("../../sim-seeds.txt").lines();
    let numbers = lines.map(|line| line.split('#').next().unwrap_or_default().trim()).filter(|line| !line.is_empty());
    numbers.map(|number| number.parse().unwrap()).collect()
}

/// Plays one seed and prints what it does.
pub fn show(seed: u64) -> Played {
    watch_panics();
    play(seed, true)
}

/// What many seeds came to.
#[derive(Debug, Default)]
pub struct Summary {
    /// How often each thing happened in all of them.
    pub counts: BTreeMap<(&'static str, &'static str), u64>,
    /// Hashes, by seed.
    pub hashes: BTreeMap<u64, u64>,
}

impl Summary {
    /// How often something happened, whatever its detail.
    #[must_use]
    pub fn count(&self, what: &str) -> u64 {
        self.counts.iter().filter(|((name, _), _)| *name == what).map(|(_, count)| count).sum()
    }

    /// How often something happened in this way.
    #[must_use]
    pub fn count_of(&self, what: &str, detail: &str) -> u64 {
        self.counts.iter().filter(|((name, way), _)| *name == what && *way == detail).map(|(_, count)| count).sum()
    }
}

/// Plays these seeds, on all processors.
///
/// # Panics
/// When one breaks a rule: with the command that repeats it.
#[must_use]
pub fn play_all(seeds: &[u64]) -> Summary {
    watch_panics();
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let summary = Mutex::new(Summary::default());
    let failures = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let running: Vec<Mutex<Option<(u64, Instant)>>> = (0..threads).map(|_| Mutex::new(None)).collect();
    let progress = setting("IOP_SIM_PROGRESS");
    let keep_going = setting("IOP_SIM_KEEP_GOING").is_some();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for slot in &running {
            let (next, failed, summary, failures, done) = (&next, &failed, &summary, &failures, &done);
            scope.spawn(move || {
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
                    if failed.load(Ordering::Relaxed) {
                        break;
                    }
                    *lock(slot) = Some((seed, Instant::now()));
                    let played = play(seed, false);
                    *lock(slot) = None;
                    if let Some(failure) = played.failure {
                        if keep_going {
                            eprintln!("seed {seed}: {}", failure.lines().next().unwrap_or_default());
                        }
                        lock(failures).push((seed, failure));
                        failed.store(!keep_going, Ordering::Relaxed);
                    }
                    let mut summary = lock(summary);
                    played.counts.into_iter().for_each(|(what, n)| *summary.counts.entry(what).or_default() += n);
                    summary.hashes.insert(seed, played.hash);
                    drop(summary);
                    let count = done.fetch_add(1, Ordering::Relaxed) + 1;
                    if progress.is_some_and(|each| (count as u64).is_multiple_of(each.max(1))) {
                        eprintln!("{count} seeds");
                    }
                }
            });
        }
        scope.spawn(|| {
            while done.load(Ordering::Relaxed) < seeds.len() && !failed.load(Ordering::Relaxed) {
                std::thread::park_timeout(Duration::from_millis(20));
                for (seed, since) in running.iter().filter_map(|slot| *lock(slot)) {
                    if since.elapsed() > HANG {
                        eprintln!("a seed does not end: {}", command(seed));
                        std::process::exit(101);
                    }
                }
            }
        });
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some((seed, failure)) = failures.into_iter().next() {
        panic!("seed {seed}: {failure}\nrepeat it with\n    {}", command(seed));
    }
    summary.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn command(seed: u64) -> String {
    format!("IOP_SIM_SEED={seed} cargo test -p iop-tests --test sim one_seed -- --nocapture")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
