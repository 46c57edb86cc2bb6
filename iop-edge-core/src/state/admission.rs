//! Decides who gets a place: admission, waiting, whose turn it is, and who has nobody left to wait for.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use iop_execution::{AdapterKey, ModelName, NodeId, Principal, RunId, Target};

use crate::api::{Destination, SubmitError, Wanted, WireKind};
use crate::catalog::{Candidate, ModelGroup};
use crate::observe::{Observation, ProviderLevel, WaitOutcome};
use crate::state::credential::Denial;
use crate::state::effect::{Effect, Grant};
use crate::state::fleet::{Online, ProviderState};
use crate::state::id::AttemptId;
use crate::state::ledger::{CapacityLease, WorkClass};
use crate::state::queue::{Avoid, Head, Need, Rank, Ticket};
use crate::state::selection::{self, FreeCandidate, SelectionRequest};
use crate::state::timers::Timer;
use crate::state::{Attempt, EdgeState, Stage, Wants};

/// Least and most a client is asked to wait before it tries a full queue again.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Places that a waiter could have had and that may be given to others, by priority or by turn, before it gets one, once it is
/// the one in its line who came first: nobody starves (QUE-1).
pub(crate) const STARVATION_GRANTS: u32 = 8;

/// One request for a place.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) run_id: RunId,
    pub(crate) destination: Destination,
    /// The wire the caller insists on.
    pub(crate) wanted: Option<Wanted>,
    pub(crate) caller: Option<Principal>,
    pub(crate) priority: i8,
    pub(crate) deadline: Option<Instant>,
    pub(crate) prompt_tokens_estimate: u32,
    /// Hash of the leading prompt text; 0 = none.
    pub(crate) prompt_prefix: u64,
    pub(crate) avoid: Option<Avoid>,
}

/// What became of a request for a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Admission {
    Granted(Box<Grant>),
    /// It waits, at most until then.
    Queued(AttemptId, Instant),
    /// Its caller may use none of what could serve it (CRD-15).
    Denied(Box<Denial>),
}

/// Who of a line is next, and why: smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    /// Too many places went to others.
    Starving(AttemptId),
    InTurn(Rank),
}

/// A provider that could serve a need, busy or not.
struct Eligible<'a> {
    /// Its place among the model's candidates.
    position: usize,
    candidate: &'a Candidate,
    provider: &'a ProviderState,
    wire: WireKind,
}

impl EdgeState {
    /// Asks for a place. Candidates are resolved afresh here and whenever a waiter is looked at (QUE-3).
    pub(crate) fn submit(&mut self, ask: Ask, now: Instant) -> Result<Admission, SubmitError> {
        self.handle_timeout(now);
        let Ask {
            run_id,
            destination,
            wanted,
            caller,
            priority,
            deadline,
            prompt_tokens_estimate,
            prompt_prefix,
            avoid,
        } = ask;
        let model = match destination {
            Destination::Model(model) => model,
            Destination::Direct { node, adapter, target } => {
                let wants = Wants { caller, ..Wants::direct(wanted, prompt_tokens_estimate) };
                return self.submit_direct(run_id, node, &adapter, target, wants, deadline, now);
            }
        };
        // First of all: any other answer says that the name is known (API-15).
        let at = self.groups.find(&model).ok_or(SubmitError::UnknownModel)?;
        let model = &self.groups.get(at).ok_or(SubmitError::UnknownModel)?.model;
        let (name, bound) = (model.name.clone(), model.max_waiting);
        let queue_timeout = model.queue_timeout;
        self.takes_requests(deadline, now)?;
        if let Some(denial) =
            self.groups.get(at).and_then(|group| self.deny_model(&group.model, run_id, caller.as_ref(), wanted))
        {
            return Ok(Admission::Denied(Box::new(denial)));
        }
        let prefix = match (prompt_prefix, &caller) {
            (0, _) => 0,
            (prefix, None) => prefix,
            (prefix, Some(caller)) => selection::hash(prefix, caller.as_str()),
        };
        let wants = Wants { model: Some(name), wanted, caller, prompt_tokens: prompt_tokens_estimate, prefix, avoid };
        let need = self.need(at, &wants);
        let eligible = self.is_eligible(at, &need);
        let absence_grace = if eligible { Duration::ZERO } else { self.absence_grace(at, &need, now) };
        if !eligible && absence_grace.is_zero() {
            return Err(SubmitError::Unavailable);
        }

        let ticket = |attempt| Ticket { attempt, priority, caller: wants.caller.clone(), since: now, passed: 0 };
        let attempt = self.begin(run_id, wants.clone(), deadline, now);
        // Nobody who waits is overtaken: whoever could be placed was placed when the place became free.
        if let Some(grant) = self.place(at, &need, attempt, now) {
            return Ok(Admission::Granted(Box::new(grant)));
        }
        let queued =
            self.groups.get_mut(at).is_some_and(|group| group.queue.push(need.clone(), ticket(attempt), bound));
        if !queued {
            self.forget(attempt);
            return Err(SubmitError::QueueFull { retry_after: self.retry_after(at, &need) });
        }
        if let Some(entry) = self.attempts.get_mut(&attempt) {
            entry.stage = Stage::Waiting(need);
        }
        let until = now + queue_timeout;
        self.timers.arm(Timer::Queue(attempt), until);
        if !eligible {
            self.timers.arm(Timer::Absence(attempt), now + absence_grace);
        }
        Ok(Admission::Queued(attempt, deadline.map_or(until, |deadline| deadline.min(until))))
    }

    const fn takes_requests_now(&self) -> Result<(), SubmitError> {
        if self.shutting_down { Err(SubmitError::ShuttingDown) } else { Ok(()) }
    }

    fn takes_requests(&self, deadline: Option<Instant>, now: Instant) -> Result<(), SubmitError> {
        self.takes_requests_now()?;
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(SubmitError::DeadlineExceeded);
        }
        Ok(())
    }

    /// A new attempt, about to be placed.
    fn begin(&mut self, run_id: RunId, wants: Wants, deadline: Option<Instant>, now: Instant) -> AttemptId {
        self.last_attempt += 1;
        let attempt = AttemptId(self.last_attempt);
        self.attempts.insert(
            attempt,
            Attempt { run_id, wants, since: now, sent: None, receipt_asked: false, stage: Stage::Reserved },
        );
        self.runs.insert(run_id, attempt);
        if let Some(deadline) = deadline {
            self.timers.arm(Timer::Deadline(attempt), deadline);
        }
        attempt
    }

    /// One adapter instance, without a queue: the rules of models do not apply (EDG-1). Without a Node it is the only one that
    /// is ready.
    #[allow(clippy::too_many_arguments, reason = "the parts of one address and one request")]
    fn submit_direct(
        &mut self,
        run_id: RunId,
        node: Option<NodeId>,
        adapter: &AdapterKey,
        target: Target,
        wants: Wants,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Result<Admission, SubmitError> {
        self.takes_requests(deadline, now)?;
        let node = match node {
            Some(node) if self.catalog.nodes().iter().any(|entry| entry.id == node) => node,
            Some(_) => return Err(SubmitError::InvalidRequest("there is no node with that id")),
            None => {
                let ready =
                    |node: &&NodeId| self.registry.node_phase(node) == (true, false) && !self.held.contains(*node);
                let mut ready = self.catalog.nodes().iter().map(|entry| &entry.id).filter(ready);
                match (ready.next().cloned(), ready.next()) {
                    (Some(only), None) => only,
                    (Some(_), Some(_)) => return Err(SubmitError::NodeRequired),
                    (None, _) => return Err(SubmitError::Unavailable),
                }
            }
        };
        let key = |provider: &ProviderState| match &provider.online {
            Some(online) => online.adapter == *adapter,
            None => provider.config.adapter == *adapter,
        };
        let mut of_node = self.fleet.providers().iter().filter(|provider| provider.node == node);
        let Some(provider) = of_node.find(|provider| key(provider)) else {
            return Err(SubmitError::InvalidRequest("the node has no adapter with that key"));
        };
        if let Some(denial) = self.deny_direct(provider, &target, run_id, wants.caller.as_ref(), wants.wanted) {
            return Ok(Admission::Denied(Box::new(denial)));
        }
        let wire = provider.wire(wants.wanted).ok_or(SubmitError::Unavailable)?;
        let id = provider.config.provider_id.clone();
        let retry_after = provider.wear.service().unwrap_or_default().clamp(RETRY_AFTER.0, RETRY_AFTER.1);
        let attempt = self.begin(run_id, wants, deadline, now);
        let candidate = Candidate::new(id, target);
        match self.acquire(&candidate, wire, WorkClass::Normal, attempt, now) {
            Some(grant) => Ok(Admission::Granted(Box::new(grant))),
            None => {
                self.forget(attempt);
                Err(SubmitError::QueueFull { retry_after })
            }
        }
    }

    /// When a place should be free for one more request: what waits, times what requests take, over the places there are.
    /// Before anything was measured a request is taken to need the least that is ever answered here.
    fn retry_after(&self, at: usize, need: &Need) -> Duration {
        let waiting = self.groups.get(at).map_or(0, |group| group.queue.len());
        let (mut places, mut service, mut measured) = (0_u32, Duration::ZERO, 0_u32);
        for eligible in self.eligible(at, need) {
            places += eligible.provider.online.as_ref().map_or(0, |online| online.limits.capacity);
            if let Some(average) = eligible.provider.wear.service() {
                service += average;
                measured += 1;
            }
        }
        let average = service.checked_div(measured).unwrap_or(RETRY_AFTER.0);
        let waiting = u32::try_from(waiting).unwrap_or(u32::MAX).saturating_add(1);
        let wait = average.saturating_mul(waiting).checked_div(places).unwrap_or(RETRY_AFTER.1);
        wait.clamp(RETRY_AFTER.0, RETRY_AFTER.1)
    }

    /// What kind of place a request needs of a model as it is now.
    fn need(&self, at: usize, wants: &Wants) -> Need {
        let model = self.groups.get(at).map(|group| &group.model);
        let long = model.and_then(|model| model.long_context_threshold).is_some_and(|from| wants.prompt_tokens >= from);
        let candidates = model.into_iter().flat_map(|model| &model.candidates);
        let contexts = candidates.filter_map(|candidate| {
            let context = self.fleet.provider(&candidate.provider)?.context(&candidate.target);
            (context < u64::from(wants.prompt_tokens)).then_some(context)
        });
        Need {
            class: if long { WorkClass::Long } else { WorkClass::Normal },
            wanted: wants.wanted,
            too_small: contexts.max().unwrap_or(0),
            avoid: wants.avoid.clone(),
            barred: model.map_or_else(Vec::new, |model| self.barred(model, wants.caller.as_ref())),
        }
    }

    /// Providers that are runtime-eligible for a need: connected, enabled, fitting; an avoided one only where its request
    /// allows it and nobody else is (SEL-2).
    fn eligible(&self, at: usize, need: &Need) -> Vec<Eligible<'_>> {
        let Some(group) = self.groups.get(at) else { return Vec::new() };
        let candidates = group.model.candidates.iter().enumerate();
        let configured: Vec<_> = candidates
            .filter(|(_, candidate)| !need.barred.contains(&candidate.provider))
            .filter_map(|(position, candidate)| {
                let provider = self.fleet.provider(&candidate.provider).filter(|provider| provider.enabled)?;
                Some((position, candidate, provider, provider.context(&candidate.target)))
            })
            .collect();
        // An estimate never becomes an error (LEA-2): where it exceeds every context that is configured, the largest fits.
        let largest = configured.iter().map(|(.., context)| *context).max().unwrap_or(0);
        let known = configured.iter().all(|(.., context)| *context != 0);
        let too_small = if known && largest <= need.too_small { largest.saturating_sub(1) } else { need.too_small };
        let mut eligible: Vec<_> = configured
            .into_iter()
            .filter(|(.., context)| *context == 0 || *context > too_small)
            .filter_map(|(position, candidate, provider, _)| {
                let wire = provider.wire(need.wanted)?;
                let limits = provider.online.as_ref()?.limits;
                let ever_fits = match need.class {
                    WorkClass::Normal => limits.capacity > 0,
                    WorkClass::Long => limits.long > 0,
                };
                ever_fits.then_some(Eligible { position, candidate, provider, wire })
            })
            .collect();
        if let Some(Avoid { provider, fallback }) = &need.avoid {
            let others = eligible.iter().any(|eligible| eligible.candidate.provider != *provider);
            if others || !fallback {
                eligible.retain(|eligible| eligible.candidate.provider != *provider);
            }
        }
        eligible
    }

    fn is_eligible(&self, at: usize, need: &Need) -> bool {
        !self.eligible(at, need).is_empty()
    }

    /// How long a request waits for a configured provider that could serve it and is away: what the model says, and at least
    /// until a Node that makes its connection anew should be back. Zero = nobody is waited for (FEN-3).
    fn absence_grace(&self, at: usize, need: &Need, now: Instant) -> Duration {
        let grace = self.groups.get(at).map(|group| group.model.absence_grace).unwrap_or_default();
        let absent = self.absent(at, need).map(|provider| provider.returns_in(now).max(grace));
        absent.max().unwrap_or_default()
    }

    /// How long it is until a Node that makes its connection anew should be back.
    fn returns_in(&self, at: usize, need: &Need, now: Instant) -> Duration {
        self.absent(at, need).map(|provider| provider.returns_in(now)).max().unwrap_or_default()
    }

    /// Configured providers that could serve this, are away, and may return.
    fn absent<'a>(&'a self, at: usize, need: &'a Need) -> impl Iterator<Item = &'a ProviderState> {
        let candidates = self.groups.get(at).into_iter().flat_map(|group| &group.model.candidates);
        let avoided = need.avoid.as_ref().filter(|avoid| !avoid.fallback).map(|avoid| &avoid.provider);
        let candidates = candidates.filter(move |candidate| {
            Some(&candidate.provider) != avoided && !need.barred.contains(&candidate.provider)
        });
        candidates
            .filter_map(|candidate| self.fleet.provider(&candidate.provider))
            .filter(|provider| provider.is_absent())
    }

    /// Takes a place for an attempt, if there is one and the policy wants it. New work prefers Nodes that are no suspects
    /// (FEN-7), even where it has to wait for them.
    fn place(&mut self, at: usize, need: &Need, attempt: AttemptId, now: Instant) -> Option<Grant> {
        let entry = self.attempts.get(&attempt)?;
        let prefix = entry.wants.prefix;
        let mut eligible = self.eligible(at, need);
        let suspect = |eligible: &Eligible<'_>| eligible.provider.online.as_ref().is_some_and(|online| online.suspect);
        if eligible.iter().any(|eligible| !suspect(eligible)) {
            eligible.retain(|eligible| !suspect(eligible));
        }
        let group = self.groups.get(at)?;
        // One that is left alone for longer than a request may wait is asked all the same where there is no other: its own
        // answer says more than a wait in vain.
        let in_vain = |eligible: &Eligible<'_>| {
            eligible.provider.wear.cooling(now).is_some_and(|left| left > group.model.queue_timeout)
        };
        let all_in_vain = eligible.iter().all(in_vain);
        let mut views = Vec::with_capacity(eligible.len());
        eligible.retain(|eligible| {
            let Eligible { position, candidate, provider, .. } = eligible;
            let counters = self.ledger.counters(&provider.node, &candidate.provider);
            let has_place = |online: &&Online| online.settled && counters.has_place(need.class, online.limits);
            let online = provider.online.as_ref().filter(has_place);
            let Some(online) = online.filter(|_| all_in_vain || provider.wear.cooling(now).is_none()) else {
                return false;
            };
            views.push(FreeCandidate {
                provider: &candidate.provider,
                in_use: counters.in_use(),
                capacity: online.limits.capacity,
                weight: candidate.weight,
                penalty: provider.wear.penalty(now),
                turn: group.turn(*position),
                last_admission: provider.last_admission,
            });
            true
        });
        let request = SelectionRequest { prefix };
        let chosen = match (views.is_empty(), group.model.strategy) {
            (true, _) => None,
            (false, Some(strategy)) => selection::policy(strategy).choose(request, &views),
            (false, None) => self.policy.choose(request, &views),
        }?;
        let Eligible { position, candidate, wire, .. } = eligible.get(chosen)?;
        let (position, candidate, wire) = (*position, (*candidate).clone(), *wire);
        let grant = self.acquire(&candidate, wire, need.class, attempt, now)?;
        if let Some(group) = self.groups.get_mut(at) {
            group.took_turn(position);
        }
        Some(grant)
    }

    /// Claims a place of one provider.
    fn acquire(
        &mut self,
        candidate: &Candidate,
        wire: WireKind,
        class: WorkClass,
        attempt: AttemptId,
        now: Instant,
    ) -> Option<Grant> {
        let entry = self.attempts.get(&attempt)?;
        let (run_id, queued) = (entry.run_id, now.saturating_duration_since(entry.since));
        let (caller, prompt_tokens) = (entry.wants.caller.clone(), entry.wants.prompt_tokens);
        let group = entry.wants.model.as_ref().and_then(|name| self.groups.get(self.groups.find(name)?));
        let model = group.map(|group| &group.model);
        let provider = self.fleet.provider(&candidate.provider)?;
        let online = provider.online.as_ref().filter(|online| online.settled)?;
        let lease = CapacityLease {
            attempt,
            node: provider.node.clone(),
            generation: online.generation,
            provider: candidate.provider.clone(),
            adapter: online.adapter.clone(),
            target: candidate.target.clone(),
            class,
            config_revision: self.catalog.revision(),
        };
        let grant = Grant {
            attempt,
            run_id,
            node: lease.node.clone(),
            provider: lease.provider.clone(),
            adapter: lease.adapter.clone(),
            target: lease.target.clone(),
            wire,
            class,
            stall_timeout_ms: provider.config.response_stall_timeout_ms,
            queued,
            retry_on: model.and_then(|model| model.retry_on).unwrap_or(self.catalog.retry_on()),
            needs_lease: !matches!(online.bound, Ok(None)),
        };
        let limits = online.limits;
        self.ledger.acquire(lease, limits).ok()?;
        self.fleet.admitted(&grant.provider);
        self.clock.served(&caller, prompt_tokens);
        if let Some(entry) = self.attempts.get_mut(&attempt) {
            entry.stage = Stage::Reserved;
        }
        Some(grant)
    }

    /// Gives free places to whoever may have them, over all models: highest priority first, then whose turn it is, then who
    /// came first; and before all of them whoever has seen too many places of its model's providers go to others.
    pub(super) fn pump(&mut self, now: Instant) {
        // Places only become fewer in here: a line that found none finds none later.
        let mut stuck: BTreeSet<(usize, Need)> = BTreeSet::new();
        loop {
            let mut open = Vec::new();
            for at in 0..self.groups.len() {
                let Some(group) = self.groups.get(at).filter(|group| group.queue.len() > 0) else { continue };
                if !self.has_room(&group.model) {
                    continue;
                }
                for Head { need, rank, oldest, passed } in group.queue.heads(&self.clock) {
                    let turn = if passed >= STARVATION_GRANTS { Next::Starving(oldest) } else { Next::InTurn(rank) };
                    open.push((turn, at, need.clone()));
                }
            }
            open.retain(|(_, at, need)| stuck.is_empty() || !stuck.contains(&(*at, need.clone())));
            open.sort_unstable();
            let mut granted = false;
            for (turn, at, need) in open {
                let attempt = match turn {
                    Next::Starving(oldest) => oldest,
                    Next::InTurn(rank) => rank.attempt,
                };
                let Some(grant) = self.place(at, &need, attempt, now) else {
                    stuck.insert((at, need));
                    continue;
                };
                for group in self.groups.waiting_for(&grant.provider) {
                    group.queue.passed_over(attempt);
                }
                if let Some(group) = self.groups.get_mut(at) {
                    group.queue.remove(&need, attempt);
                }
                self.timers.disarm(Timer::Queue(attempt));
                self.timers.disarm(Timer::Absence(attempt));
                self.waited(attempt, WaitOutcome::Admitted, now);
                self.effects.push_back(Effect::Granted(Box::new(grant)));
                granted = true;
                break;
            }
            if !granted {
                return;
            }
        }
    }

    /// Some provider of the model has a free place of some kind: most releases are nothing to most models, and this says so
    /// at little cost.
    fn has_room(&self, model: &ModelGroup) -> bool {
        model.candidates.iter().any(|candidate| {
            let provider = self.fleet.provider(&candidate.provider);
            let online = provider.and_then(|provider| Some((provider, provider.online.as_ref()?)));
            online.is_some_and(|(provider, online)| {
                let counters = self.ledger.counters(&provider.node, &candidate.provider);
                counters.has_place(WorkClass::Normal, online.limits)
            })
        })
    }

    /// Resolves every waiter again after providers came, went or changed: who has no candidate left ends now, or once its
    /// absence grace is over (FEN-2, FEN-3).
    pub(super) fn resolve_waiters(&mut self, now: Instant) {
        for _ in 0..self.fleet.take_raised() {
            let to = ProviderLevel::Available;
            self.effects.push_back(Effect::Observe(Observation::HealthTransition { to }));
        }
        let mut hopeless = Vec::new();
        for at in 0..self.groups.len() {
            let Some(group) = self.groups.get(at) else { continue };
            let needs: Vec<_> = group.queue.needs().cloned().collect();
            for need in needs {
                let eligible = self.is_eligible(at, &need);
                let grace = if eligible { Duration::ZERO } else { self.absence_grace(at, &need, now) };
                let line: Vec<_> = self.groups.get(at).into_iter().flat_map(|group| group.queue.line(&need)).collect();
                if eligible {
                    line.iter().for_each(|attempt| self.timers.disarm(Timer::Absence(*attempt)));
                } else if !grace.is_zero() {
                    line.iter().for_each(|attempt| self.timers.arm_earlier(Timer::Absence(*attempt), now + grace));
                } else {
                    hopeless.extend(line);
                }
            }
        }
        hopeless.sort_unstable();
        for attempt in hopeless {
            self.refuse(attempt, SubmitError::Unavailable, WaitOutcome::Unavailable, now);
        }
        self.pump(now);
    }

    /// What providers offer has changed: models that come from it, and the line of every waiter.
    pub(super) fn offers_changed(&mut self, now: Instant) {
        if self.catalog.models_auto() {
            self.regroup(now);
        } else {
            self.requeue(now);
        }
    }

    /// What models are has changed.
    pub(super) fn regroup(&mut self, now: Instant) {
        for orphan in self.groups.apply(&self.catalog, &self.fleet) {
            self.refuse(orphan, SubmitError::Unavailable, WaitOutcome::Unavailable, now);
        }
        self.requeue(now);
    }

    /// Sorts every waiter into its line again, and looks who can be placed.
    fn requeue(&mut self, now: Instant) {
        for at in 0..self.groups.len() {
            let Some(group) = self.groups.get_mut(at).filter(|group| group.queue.len() > 0) else { continue };
            for ticket in group.queue.take_all() {
                let attempt = ticket.attempt;
                let Some(need) = self.attempts.get(&attempt).map(|entry| self.need(at, &entry.wants)) else { continue };
                if let Some(entry) = self.attempts.get_mut(&attempt) {
                    entry.stage = Stage::Waiting(need.clone());
                }
                // They waited before: a bound that is lower now refuses new ones only.
                if let Some(group) = self.groups.get_mut(at) {
                    group.queue.push(need, ticket, usize::MAX);
                }
            }
        }
        self.resolve_waiters(now);
    }

    /// A waiter's provider did not return in time.
    pub(super) fn absence_over(&mut self, attempt: AttemptId, now: Instant) {
        let Some((Stage::Waiting(need), Some(model))) =
            self.attempts.get(&attempt).map(|entry| (entry.stage.clone(), entry.wants.model.clone()))
        else {
            return;
        };
        let at = self.groups.find(&model);
        if at.is_some_and(|at| self.is_eligible(at, &need)) {
            return;
        }
        // Its Node may have said meanwhile that it comes back, or later than it said before.
        match at.map(|at| self.returns_in(at, &need, now)).filter(|longer| !longer.is_zero()) {
            Some(longer) => self.timers.arm(Timer::Absence(attempt), now + longer),
            None => self.refuse(attempt, SubmitError::Unavailable, WaitOutcome::Unavailable, now),
        }
    }

    fn waited(&mut self, attempt: AttemptId, outcome: WaitOutcome, now: Instant) {
        let entry = self.attempts.get(&attempt);
        if let Some((model, since)) = entry.and_then(|entry| Some((entry.wants.model.clone()?, entry.since))) {
            let wait = now.saturating_duration_since(since);
            self.effects.push_back(Effect::Observe(Observation::Waited { model, wait, outcome }));
        }
    }

    /// Takes a waiter out of its queue. False if the attempt does not wait.
    pub(super) fn unqueue(&mut self, attempt: AttemptId, outcome: WaitOutcome, now: Instant) -> bool {
        let Some((Stage::Waiting(need), model)) =
            self.attempts.get(&attempt).map(|entry| (entry.stage.clone(), entry.wants.model.clone()))
        else {
            return false;
        };
        // A model that is gone took its queue with it.
        if let Some(group) =
            model.and_then(|model: ModelName| self.groups.find(&model)).and_then(|at| self.groups.get_mut(at))
        {
            group.queue.remove(&need, attempt);
        }
        self.waited(attempt, outcome, now);
        self.forget(attempt);
        true
    }

    /// Ends a waiter with an error.
    pub(super) fn refuse(&mut self, attempt: AttemptId, error: SubmitError, outcome: WaitOutcome, now: Instant) {
        if self.unqueue(attempt, outcome, now) {
            self.effects.push_back(Effect::Refused { attempt, error });
        }
    }
}
