//! Decides when a run or tunnel is stuck, and what becomes of it then (WDG-1 to WDG-7). Health is evidence here, never a reason.
//!
//! ```text
//!           idle for the limit, nothing else is ready,
//!           no emission is open                                   closed and probed
//! Watching ───────────────────────────────────────────► Joining ───────────────────► Over: one terminal
//!    │ disconnect > deadline > cancel > provider's end     │ disconnect
//!    ▼                                                     ▼
//!   Over                                                Leaving ── the call returned, or its grace is over ──► Over: none
//! ```
//!
//! Joining waits for two things side by side: for the cancelled call to return, up to the close grace, and for a probe of
//! exactly this provider and target, up to its own limit. So it lasts no longer than the longer of the two.
//!
//! Idle time counts only while the run may send (WIR-16): without credit nobody reads the provider, so its silence says
//! nothing. What was counted before is kept.
//!
//! Contract of the driver: within one drain it tells everything that is ready ([`Watchdog::end`], [`Watchdog::begin`],
//! [`Watchdog::returned`], [`Watchdog::probed`]) before [`Watchdog::handle_timeout`], and applies all actions after it.
//! Progress stores a time and moves no timer: an armed timer that comes too early looks again.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use iop_execution::activity::Activity;
use iop_execution::failure::{LivenessClassification, OwnershipClose, TimeoutSetting};
use iop_execution::{Health, StallTimeout};
use iop_wire::{CancelPolicy, ProviderConfig};

/// How long a probe may take, when the config does not say.
pub const DEFAULT_PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for a probe that a config can ask for.
pub const MAX_PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the first progress, whatever the config and the prompt say: 6 hours.
pub const MAX_FIRST_RESPONSE: Duration = Duration::from_secs(6 * 60 * 60);

/// The times of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the times of WDG-3 and WDG-7")]
pub struct Limits {
    /// Longest time without progress.
    pub stall: Duration,
    /// Longest time up to the first progress; never below `stall`.
    pub first: Duration,
    /// How long the cancelled call may take to return.
    pub close_grace: Duration,
    /// How long the probe may take.
    pub probe: Duration,
}

impl Limits {
    /// The request's stall timeout, and what its provider's config adds to it for a prompt of that many tokens (WDG-7).
    #[must_use]
    pub fn new(stall: StallTimeout, provider: &ProviderConfig, close_grace: Duration, prompt_tokens: u32) -> Self {
        let stall = stall.get();
        let base = Duration::from_millis(provider.first_response_timeout_ms).max(stall);
        let allowance = provider.stall_per_1k_prompt_ms.saturating_mul(u64::from(prompt_tokens)) / 1_000;
        let first = base.saturating_add(Duration::from_millis(allowance)).min(MAX_FIRST_RESPONSE).max(stall);
        Self { stall, first, close_grace, probe: probe_timeout(provider) }
    }
}

/// How long a probe of this provider may take.
#[must_use]
pub fn probe_timeout(provider: &ProviderConfig) -> Duration {
    match provider.probe_timeout_ms {
        0 => DEFAULT_PROBE_TIMEOUT,
        ms => Duration::from_millis(ms).min(MAX_PROBE_TIMEOUT),
    }
}

/// What ends a run before it can stall, the stronger first (WDG-2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(clippy::exhaustive_enums, reason = "closed by WDG-2")]
pub enum Ended {
    /// Its connection is gone.
    Disconnected,
    /// Its hard deadline passed.
    Deadline,
    /// It was cancelled, or broke a rule.
    Cancelled,
    /// The provider's call ended by itself.
    Provider,
}

/// What the driver has to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the driver must know them all")]
pub enum Action {
    /// Fence the call and tell the provider.
    Cancel,
    /// Hand the call over, untold, to a reader that keeps its place (NOD-9).
    ReadOut,
    /// Begin to probe exactly this provider and target.
    Probe,
    /// Drop the call: it has not returned within its grace.
    Abandon,
    /// The probe has had its time: drop it, and answer [`Watchdog::probed`] with unknown.
    EndProbe,
    /// Nobody wants to know any more: drop the probe.
    ForgetProbe,
    /// Send the terminal.
    Finish(Verdict),
}

/// What is known of a stall when it is told (WDG-4).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verdict {
    /// What the probe says.
    pub liveness: LivenessClassification,
    /// Which observation of the connection that was.
    pub observation: Option<NonZeroU64>,
    /// Whether the call returned within its grace.
    pub close: OwnershipClose,
    /// Idle time when the stall was claimed.
    pub idle: Duration,
    /// The limit it reached.
    pub limit: Duration,
    /// Whose limit that was.
    pub setting: TimeoutSetting,
    /// Whether there had been any progress.
    pub progressed: bool,
    /// From the last progress, or the start, to the terminal.
    pub duration: Duration,
}

/// Watches one run or tunnel.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Watchdog {
    limits: Limits,
    policy: CancelPolicy,
    state: State,
    actions: VecDeque<Action>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum State {
    Watching(Watch),
    Joining(Join),
    Leaving { grace_at: Instant },
    Over(Option<(Ended, Instant)>),
}

#[derive(Debug, Clone, Copy)]
struct Watch {
    progressed: bool,
    last_progress: Instant,
    /// Idle time before `counting`.
    idle: Duration,
    /// Since when idle time counts; none while the run may not send.
    counting: Option<Instant>,
    /// Something was taken from the provider and is not passed on yet.
    emitting: bool,
}

impl Watch {
    const fn from(now: Instant) -> Self {
        Self { progressed: false, last_progress: now, idle: Duration::ZERO, counting: Some(now), emitting: false }
    }

    fn idle_at(&self, now: Instant) -> Duration {
        self.idle + self.counting.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    const fn limit(&self, limits: &Limits) -> Duration {
        if self.progressed { limits.stall } else { limits.first }
    }

    fn due(&self, limits: &Limits) -> Option<Instant> {
        let since = self.counting.filter(|_| !self.emitting)?;
        Some(since + self.limit(limits).saturating_sub(self.idle))
    }
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Join {
    last_progress: Instant,
    progressed: bool,
    idle: Duration,
    limit: Duration,
    grace_at: Instant,
    /// None once the probe was told to end.
    probe_at: Option<Instant>,
    close: Option<OwnershipClose>,
    probed: Option<(LivenessClassification, Option<NonZeroU64>)>,
}

impl Watchdog {
    /// Watches a call that begins now and may send.
    #[must_use]
    pub const fn new(limits: Limits, policy: CancelPolicy, now: Instant) -> Self {
        Self { limits, policy, state: State::Watching(Watch::from(now)), actions: VecDeque::new() }
    }

    /// The call begins only now.
    pub fn start(&mut self, now: Instant) {
        if let State::Watching(watch) = &mut self.state {
            *watch = Watch::from(now);
        }
    }

    /// Something came from the provider and is about to be passed on. False: it must not be, the fence is closed.
    #[must_use]
    pub fn begin(&mut self, activity: Activity, now: Instant) -> bool {
        let State::Watching(watch) = &mut self.state else { return false };
        match activity {
            Activity::Terminal => self.end(Ended::Provider, now),
            Activity::Neutral => watch.emitting = true,
            Activity::Progress => {
                watch.emitting = true;
                watch.progressed = true;
                watch.last_progress = now;
                watch.idle = Duration::ZERO;
                watch.counting = watch.counting.map(|_| now);
            }
        }
        true
    }

    /// What was begun is passed on, whole.
    pub const fn emitted(&mut self) {
        if let State::Watching(watch) = &mut self.state {
            watch.emitting = false;
        }
    }

    /// The run may not send any more.
    pub fn suspend(&mut self, now: Instant) {
        if let State::Watching(watch) = &mut self.state {
            watch.idle = watch.idle_at(now);
            watch.counting = None;
        }
    }

    /// True while idle time does not count.
    #[must_use]
    pub const fn is_suspended(&self) -> bool {
        matches!(&self.state, State::Watching(Watch { counting: None, .. }))
    }

    /// The run may send again.
    pub fn resume(&mut self, now: Instant) {
        if let State::Watching(watch) = &mut self.state
            && watch.counting.is_none()
        {
            watch.counting = Some(now);
        }
    }

    /// The run ends by something else. Of what is ready in one instant the stronger stands; after the claim only a
    /// disconnect changes anything, and then nothing is told.
    pub fn end(&mut self, ended: Ended, now: Instant) {
        match &self.state {
            State::Watching(_) => self.state = State::Over(Some((ended, now))),
            State::Over(Some((first, at))) if *at == now && ended < *first => {
                self.state = State::Over(Some((ended, now)));
            }
            State::Joining(join) if ended == Ended::Disconnected => {
                let (closed, grace_at, probing) = (join.close.is_some(), join.grace_at, join.probed.is_none());
                self.state = if closed { State::Over(Some((ended, now))) } else { State::Leaving { grace_at } };
                self.actions.clear();
                if probing {
                    self.actions.push_back(Action::ForgetProbe);
                }
            }
            State::Over(_) | State::Joining(_) | State::Leaving { .. } => {}
        }
    }

    /// The call returned, as it was told.
    pub fn returned(&mut self, now: Instant) {
        match &mut self.state {
            State::Joining(join) if join.close.is_none() => {
                let in_time = now <= join.grace_at;
                let confirmed = OwnershipClose::Confirmed { retryable: true };
                join.close = Some(if in_time { confirmed } else { OwnershipClose::Unconfirmed });
                self.finish(now);
            }
            State::Leaving { .. } => self.state = State::Over(Some((Ended::Disconnected, now))),
            State::Joining(_) | State::Watching(_) | State::Over(_) => {}
        }
    }

    /// The probe ended, as the connection's observation of that number.
    pub fn probed(&mut self, health: Health, observation: Option<NonZeroU64>, now: Instant) {
        if let State::Joining(join) = &mut self.state
            && join.probed.is_none()
        {
            join.probed = Some((health.into(), observation));
            self.finish(now);
        }
    }

    /// When [`Self::handle_timeout`] has something to do at the earliest. Moves only with what was told.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match &self.state {
            State::Watching(watch) => watch.due(&self.limits),
            State::Joining(join) => {
                let grace = join.close.is_none().then_some(join.grace_at);
                grace.into_iter().chain(join.probe_at.filter(|_| join.probed.is_none())).min()
            }
            State::Leaving { grace_at } => Some(*grace_at),
            State::Over(_) => None,
        }
    }

    /// Time has passed, and everything else that is ready was told.
    pub fn handle_timeout(&mut self, now: Instant) {
        match &mut self.state {
            State::Watching(watch) => {
                if watch.due(&self.limits).is_some_and(|due| due <= now) {
                    let watch = *watch;
                    self.claim(watch, now);
                }
            }
            State::Joining(join) => {
                if join.close.is_none() && join.grace_at <= now {
                    join.close = Some(OwnershipClose::Unconfirmed);
                    self.actions.push_back(Action::Abandon);
                }
                if join.probed.is_none() && join.probe_at.take_if(|at| *at <= now).is_some() {
                    self.actions.push_back(Action::EndProbe);
                }
                self.finish(now);
            }
            State::Leaving { grace_at } => {
                if *grace_at <= now {
                    self.state = State::Over(Some((Ended::Disconnected, now)));
                    self.actions.push_back(Action::Abandon);
                }
            }
            State::Over(_) => {}
        }
    }

    /// The next thing to do.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// True once the stall is claimed: nothing of the call may be passed on any more.
    #[must_use]
    pub const fn is_claimed(&self) -> bool {
        matches!(&self.state, State::Joining(_) | State::Leaving { .. })
    }

    /// True when nothing is waited for any more.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(&self.state, State::Over(_))
    }

    /// What ended the run, if that was no stall.
    #[must_use]
    pub const fn ended(&self) -> Option<Ended> {
        match &self.state {
            State::Over(Some((ended, _))) => Some(*ended),
            State::Over(None) | State::Watching(_) | State::Joining(_) | State::Leaving { .. } => None,
        }
    }

    fn claim(&mut self, watch: Watch, now: Instant) {
        let (close, told) = match self.policy {
            CancelPolicy::Abort => (None, Action::Cancel),
            // The reader outlives the run: nobody sees the call end in time, so it never counts as confirmed (NOD-9).
            CancelPolicy::Drain => (Some(OwnershipClose::Unconfirmed), Action::ReadOut),
        };
        self.state = State::Joining(Join {
            last_progress: watch.last_progress,
            progressed: watch.progressed,
            idle: watch.idle_at(now),
            limit: watch.limit(&self.limits),
            grace_at: now + self.limits.close_grace,
            probe_at: Some(now + self.limits.probe),
            close,
            probed: None,
        });
        self.actions.extend([told, Action::Probe]);
    }

    /// The terminal, once both are known.
    fn finish(&mut self, now: Instant) {
        let State::Joining(join) = &self.state else { return };
        let (Some(close), Some((liveness, observation))) = (join.close, join.probed) else { return };
        let first = !join.progressed && self.limits.first > self.limits.stall;
        let verdict = Verdict {
            liveness,
            observation,
            close,
            idle: join.idle,
            limit: join.limit,
            setting: if first { TimeoutSetting::FirstResponse } else { TimeoutSetting::ResponseStall },
            progressed: join.progressed,
            duration: now.saturating_duration_since(join.last_progress),
        };
        self.actions.push_back(Action::Finish(verdict));
        self.state = State::Over(None);
    }
}

#[cfg(test)]
mod tests;
