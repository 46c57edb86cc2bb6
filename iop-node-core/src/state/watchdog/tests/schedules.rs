//! Every order of inputs over a small grid of times, against a reference that only counts whole seconds.

use super::*;

const FIRST: u64 = 3;
const STALL: u64 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    Progress,
    Neutral,
    /// Something neutral that is not passed on at once.
    Begin,
    Emitted,
    Suspend,
    Resume,
    Terminal,
    Cancel,
    Deadline,
    Disconnect,
    Returned,
    Probed,
}

const INPUTS: [Input; 12] = [
    Input::Progress,
    Input::Neutral,
    Input::Begin,
    Input::Emitted,
    Input::Suspend,
    Input::Resume,
    Input::Terminal,
    Input::Cancel,
    Input::Deadline,
    Input::Disconnect,
    Input::Returned,
    Input::Probed,
];

#[derive(Debug, Clone, Copy)]
struct Shape {
    policy: CancelPolicy,
    grace: u64,
    probe: u64,
}

/// What is expected, told in whole seconds and whole drains.
#[derive(Debug, Clone, Copy, Default)]
struct Reference {
    idle: u64,
    since_progress: u64,
    progressed: bool,
    suspended: bool,
    emitting: bool,
    /// The strongest of what ended the run in the drain in which it ended.
    ended: Option<Ended>,
    /// The end is of an earlier drain.
    settled: bool,
    claimed: Option<Claimed>,
}

#[derive(Debug, Clone, Copy)]
struct Claimed {
    at: u64,
    idle: u64,
    limit: u64,
    /// When the call ended for us, and whether it returned in time.
    closed: Option<(u64, bool)>,
    probed: Option<(u64, bool)>,
    disconnected: bool,
    told: bool,
}

#[derive(Debug, Clone)]
struct World {
    shape: Shape,
    start: Instant,
    now: u64,
    dog: Watchdog,
    reference: Reference,
    observations: u64,
    /// The machine knows that the call ended.
    call_over: bool,
    probing: bool,
    cancels: u32,
    probes: u32,
    finishes: u32,
}

impl World {
    fn new(shape: Shape, start: Instant) -> Self {
        let seconds = Duration::from_secs;
        let limits = Limits {
            stall: seconds(STALL),
            first: seconds(FIRST),
            close_grace: seconds(shape.grace),
            probe: seconds(shape.probe),
        };
        Self {
            shape,
            start,
            now: 0,
            dog: Watchdog::new(limits, shape.policy, start),
            reference: Reference::default(),
            observations: 0,
            call_over: false,
            probing: false,
            cancels: 0,
            probes: 0,
            finishes: 0,
        }
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_secs(self.now)
    }

    /// One input within the present drain.
    fn apply(&mut self, input: Input) {
        let now = self.instant();
        let open = self.reference.ended.is_none() && self.reference.claimed.is_none();
        match input {
            Input::Progress => {
                self.emit(Activity::Progress, open);
                self.dog.emitted();
                if open {
                    let suspended = self.reference.suspended;
                    self.reference = Reference { progressed: true, suspended, ..Reference::default() };
                }
            }
            Input::Neutral => {
                self.emit(Activity::Neutral, open);
                self.dog.emitted();
                self.reference.emitting &= !open;
            }
            Input::Begin => {
                self.emit(Activity::Neutral, open);
                self.reference.emitting |= open;
            }
            Input::Emitted => {
                self.dog.emitted();
                self.reference.emitting &= !open;
            }
            Input::Terminal => {
                self.emit(Activity::Terminal, open);
                if open {
                    self.end(Ended::Provider);
                } else {
                    self.returned();
                }
            }
            Input::Suspend => {
                self.dog.suspend(now);
                self.reference.suspended |= open;
            }
            Input::Resume => {
                self.dog.resume(now);
                self.reference.suspended &= !open;
            }
            Input::Cancel => self.stop(Ended::Cancelled),
            Input::Deadline => self.stop(Ended::Deadline),
            Input::Disconnect => self.stop(Ended::Disconnected),
            Input::Returned => self.returned(),
            Input::Probed => {
                if self.probing {
                    self.probed(Health::Available);
                }
            }
        }
        self.act();
    }

    /// After the fence, and after an end, nothing may be passed on.
    fn emit(&mut self, activity: Activity, open: bool) {
        assert_eq!(self.dog.begin(activity, self.instant()), open, "WDG-3: late output: {self:?}");
    }

    fn stop(&mut self, ended: Ended) {
        self.dog.end(ended, self.instant());
        match &mut self.reference.claimed {
            Some(claimed) => claimed.disconnected |= ended == Ended::Disconnected && !claimed.told,
            None => self.end(ended),
        }
    }

    fn end(&mut self, ended: Ended) {
        let reference = &mut self.reference;
        if !reference.settled {
            reference.ended = Some(reference.ended.map_or(ended, |first| first.min(ended)));
        }
    }

    /// The call returned after the claim; before it that is a terminal.
    fn returned(&mut self) {
        let now = self.now;
        let Some(claimed) = self.reference.claimed.as_mut().filter(|_| !self.call_over) else { return };
        self.call_over = true;
        claimed.closed.get_or_insert((now, true));
        self.dog.returned(self.instant());
    }

    fn probed(&mut self, health: Health) {
        self.probing = false;
        self.observations += 1;
        if let Some(claimed) = &mut self.reference.claimed {
            claimed.probed = Some((self.now, health == Health::Available));
        }
        self.dog.probed(health, NonZeroU64::new(self.observations), self.instant());
    }

    /// The end of a drain: the timer looks, then the reference says what must have happened.
    fn close(&mut self) {
        let now = self.instant();
        if self.dog.poll_timeout().is_some_and(|due| due <= now) {
            self.dog.handle_timeout(now);
        }
        let reference = &mut self.reference;
        let limit = if reference.progressed { STALL } else { FIRST };
        reference.settled |= reference.ended.is_some();
        if reference.ended.is_none()
            && reference.claimed.is_none()
            && !reference.suspended
            && !reference.emitting
            && reference.idle >= limit
        {
            let drain = self.shape.policy == CancelPolicy::Drain;
            reference.claimed = Some(Claimed {
                at: self.now,
                idle: reference.idle,
                limit,
                closed: drain.then_some((self.now, false)),
                probed: None,
                disconnected: false,
                told: false,
            });
            self.call_over = drain;
        }
        self.act();
        if let Some(claimed) = self.reference.claimed {
            let late = self.now >= claimed.at + self.shape.grace;
            assert!(!late || claimed.closed.is_some(), "the call is not dropped: {self:?}");
        }
        assert_eq!(self.dog.is_claimed(), self.waits(), "{self:?}");
        assert_eq!(self.dog.ended(), self.expected_end(), "WDG-2: {self:?}");
        assert!(!self.dog.is_over() || self.dog.poll_timeout().is_none(), "a timer stays armed: {self:?}");
    }

    /// Whether something is still waited for after a claim.
    fn waits(&self) -> bool {
        self.reference
            .claimed
            .is_some_and(|claimed| if claimed.disconnected { claimed.closed.is_none() } else { !claimed.told })
    }

    fn expected_end(&self) -> Option<Ended> {
        match self.reference.claimed {
            Some(claimed) => (claimed.disconnected && claimed.closed.is_some()).then_some(Ended::Disconnected),
            None => self.reference.ended,
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.dog.poll_action() {
            let Some(mut claimed) = self.reference.claimed else { panic!("{action:?} without a claim: {self:?}") };
            match action {
                Action::Cancel | Action::ReadOut => {
                    self.cancels += 1;
                    assert_eq!(claimed.at, self.now);
                    assert_eq!(action == Action::ReadOut, self.shape.policy == CancelPolicy::Drain, "NOD-9");
                    assert_eq!(self.probes, 0, "the fence comes first");
                }
                Action::Probe => {
                    self.probes += 1;
                    self.probing = true;
                    assert_eq!((claimed.at, self.cancels), (self.now, 1), "WDG-3: side by side");
                }
                Action::Abandon => {
                    assert_eq!(claimed.at + self.shape.grace, self.now);
                    assert!(!self.call_over);
                    self.call_over = true;
                    claimed.closed = Some((self.now, false));
                    self.reference.claimed = Some(claimed);
                }
                Action::EndProbe => {
                    assert_eq!(claimed.at + self.shape.probe, self.now);
                    assert!(self.probing && !claimed.disconnected);
                    self.probed(Health::Unknown);
                }
                Action::ForgetProbe => {
                    assert!(self.probing && claimed.disconnected);
                    self.probing = false;
                }
                Action::Finish(verdict) => {
                    self.finishes += 1;
                    assert!(!claimed.disconnected, "WDG-2: nothing is told after a disconnect: {self:?}");
                    self.check(&verdict, claimed);
                    claimed.told = true;
                    self.reference.claimed = Some(claimed);
                }
            }
        }
    }

    fn check(&self, verdict: &Verdict, claimed: Claimed) {
        let (Some((closed, in_time)), Some((probed, alive))) = (claimed.closed, claimed.probed) else {
            panic!("told before both were known: {self:?}")
        };
        let seconds = Duration::from_secs;
        assert_eq!(self.now, closed.max(probed), "WDG-3: {self:?}");
        assert!(self.now - claimed.at <= self.shape.grace.max(self.shape.probe), "WDG-3: {self:?}");
        assert_eq!((verdict.idle, verdict.limit), (seconds(claimed.idle), seconds(claimed.limit)));
        assert_eq!(verdict.duration, seconds(self.reference.since_progress));
        assert_eq!(verdict.progressed, self.reference.progressed);
        let confirmed = OwnershipClose::Confirmed { retryable: true };
        assert_eq!(verdict.close, if in_time { confirmed } else { OwnershipClose::Unconfirmed }, "{self:?}");
        assert_eq!(verdict.close.retryable(), in_time, "WDG-4");
        let evidence =
            if alive { LivenessClassification::RequestStalled } else { LivenessClassification::HealthUnknown };
        let setting =
            if self.reference.progressed { TimeoutSetting::ResponseStall } else { TimeoutSetting::FirstResponse };
        assert_eq!((verdict.liveness, verdict.setting), (evidence, setting), "WDG-5, WDG-7");
        assert_eq!(verdict.observation, NonZeroU64::new(1), "WDG-6");
    }

    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.close();
            self.now += 1;
            self.reference.since_progress += 1;
            self.reference.idle += u64::from(!self.reference.suspended);
        }
    }

    /// Lets time pass until nothing can happen any more. True if the run ended as a stall.
    fn finish(mut self) -> bool {
        self.pass(FIRST + self.shape.grace.max(self.shape.probe) + 1);
        self.close();
        let told = self.reference.claimed.is_some_and(|claimed| claimed.told);
        assert_eq!(self.finishes, u32::from(told), "WDG-4: exactly one terminal: {self:?}");
        assert_eq!(self.cancels, self.probes);
        assert!(!self.probing, "a probe is left behind: {self:?}");
        if let Some(claimed) = self.reference.claimed {
            assert!(claimed.told != claimed.disconnected && self.dog.is_over(), "a stall without an end: {self:?}");
        }
        told
    }
}

/// Plays every schedule of `depth` more inputs; says how many there were, and how many ended as a stall.
fn every(world: &World, depth: u32) -> (u64, u64) {
    let (mut all, mut stalled) = (0, 0);
    let mut later = world.clone();
    for _ in 0..3 {
        for input in INPUTS {
            let mut next = later.clone();
            next.apply(input);
            let (count, stalls) = if depth == 1 { (1, u64::from(next.finish())) } else { every(&next, depth - 1) };
            all += count;
            stalled += stalls;
        }
        later.pass(1);
    }
    (all, stalled)
}

#[test]
fn every_schedule_of_a_call_that_is_aborted() {
    // WDG-1, WDG-2, WDG-3, WDG-4, S01, S02
    let shape = Shape { policy: CancelPolicy::Abort, grace: 2, probe: 1 };
    let (all, stalled) = every(&World::new(shape, Instant::now()), 4);
    assert_eq!(all, 1_679_616);
    assert!(stalled > all / 10 && stalled < all, "{stalled} of {all} ended as a stall");
}

#[test]
fn every_schedule_with_a_slow_probe_or_a_call_that_is_read_out() {
    // WDG-3, NOD-9
    for shape in [
        Shape { policy: CancelPolicy::Abort, grace: 1, probe: 3 },
        Shape { policy: CancelPolicy::Drain, grace: 2, probe: 1 },
        Shape { policy: CancelPolicy::Drain, grace: 1, probe: 2 },
    ] {
        let (all, stalled) = every(&World::new(shape, Instant::now()), 3);
        assert!(stalled > all / 10 && stalled < all, "{shape:?}: {stalled} of {all} ended as a stall");
    }
}
