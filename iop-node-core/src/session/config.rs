//! Decides what a ready connection does about configs and offers: a pushed config is built in the background and then changes
//! places with what serves (REG-7); backends are asked again what they serve, and the Edge is told when that has changed
//! (ADP-5).

use std::collections::HashSet;
use std::sync::Arc;

use iop_execution::AdapterKey;
use iop_wire::limits::FEATURE_PROVIDER_OFFERS;
use iop_wire::{ConfigAck, ConfigUpdate, ToEdge};
use tokio::task::JoinError;

use super::{End, Session, now};
use crate::install::{Prepared, Refused, ask, discard, prepare, swap};
use crate::state::config::{Step, Verdict};
use crate::state::refresh::Question;

/// Longest reason in a ConfigAck, in bytes; the log has all of it.
const MAX_REASON: usize = 512;

impl Session<'_> {
    /// The Edge pushed a config. Nothing waits for it: pings are answered and runs go on.
    pub(super) fn config_pushed(&mut self, update: ConfigUpdate) -> Result<(), End> {
        // At once, whatever becomes of the config: a slot that is taken away does not wait for an adapter to be built (CRD-8).
        if let Some(leases) = &self.leases {
            leases.update(&update.trusted_lease_signers, &update.credential_states);
        }
        let Some(config) = update.config else { return Ok(()) };
        if self.draining.is_some() {
            return self.refuse_push(config.revision, "the Node is shutting down".into());
        }
        let step = self.configs.pushed(config);
        self.follow(step)
    }

    /// Everything that a pushed config needs is there, or can't be.
    pub(super) fn prepared(&mut self, prepared: Result<Prepared, Refused>) -> Result<(), End> {
        self.update = None;
        let outcome = match prepared {
            // What comes after a drain began would serve nobody.
            Ok(unused) if self.draining.is_some() => {
                self.discard(unused);
                Err("the Node is shutting down".into())
            }
            Ok(prepared) => Ok(prepared),
            Err(refused) => Err(refused),
        };
        let (outcome, ready) = match outcome {
            Ok(prepared) => (Ok(()), Some(prepared)),
            Err(refused) => (Err(refused), None),
        };
        let step = self.configs.finished(outcome);
        if let Some(prepared) = ready {
            let replaced = prepared.keys();
            self.offers = swap(self.node, self.configs.in_force(), prepared);
            self.plan_refreshes(&replaced);
        }
        self.follow(step)
    }

    fn follow(&mut self, step: Step) -> Result<(), End> {
        if let Some(config) = step.apply {
            tracing::info!(revision = config.revision, "the Edge pushed a config: building what is new in it");
            self.update = Some(prepare(self.node, &config, self.configs.in_force()));
        }
        match step.answer {
            Some(verdict) => self.answer_push(verdict),
            None => Ok(()),
        }
    }

    fn refuse_push(&self, seen: u64, error: Refused) -> Result<(), End> {
        self.answer_push(Verdict { seen, in_force: self.configs.in_force().revision, error })
    }

    fn answer_push(&self, verdict: Verdict) -> Result<(), End> {
        let Verdict { seen, in_force, error } = verdict;
        let applied = error.is_empty();
        if applied {
            tracing::info!(revision = in_force, "the pushed config is in force");
        } else {
            tracing::warn!(revision = seen, in_force, %error, "the pushed config is not in force");
        }
        self.node.observer.config_pushed(applied);
        let mut error = error.into_owned();
        if error.len() > MAX_REASON {
            let end = (0..=MAX_REASON).rev().find(|end| error.is_char_boundary(*end)).unwrap_or(0);
            error.truncate(end);
        }
        self.control(ToEdge::ConfigAck(ConfigAck {
            seen_revision: seen,
            applied_revision: in_force,
            error,
            providers: if applied { self.offers.clone() } else { Vec::new() },
        }))
    }

    /// The connection ends: what was being built for it is not used.
    pub(super) fn abandon_update(&mut self) {
        let Some(mut update) = self.update.take() else { return };
        // From here on the builder sees that nobody waits, and cleans up itself.
        update.close();
        if let Ok(Ok(unused)) = update.try_recv() {
            self.discard(unused);
        }
    }

    fn discard(&self, unused: Prepared) {
        let node = Arc::clone(self.node);
        self.node.background.spawn(async move { discard(&node, unused).await });
    }

    /// Every instance of the config in force is asked again from now on, each in its own time. Those that stay keep their turn.
    pub(super) fn plan_refreshes(&mut self, replaced: &HashSet<AdapterKey>) {
        let now = now();
        let adapters = self.node.adapters().all();
        let mut stays: HashSet<_> = adapters.iter().map(|adapter| adapter.config().adapter.clone()).collect();
        stays.retain(|key| !replaced.contains(key));
        self.refreshes.retain(|key| stays.contains(key));
        for adapter in adapters {
            let key = &adapter.config().adapter;
            if !self.refreshes.contains(key) {
                self.refreshes.add(key.clone(), adapter.lists_something(), now, self.node.jitter());
            }
        }
    }

    /// Asks the backends whose time has come.
    pub(super) fn ask(&mut self, now: std::time::Instant) {
        while let Some(question) = self.refreshes.poll(now) {
            let adapter = self.node.adapters().by_key(&question.adapter).cloned();
            // One that left meanwhile is out of the plan, too.
            let Some(adapter) = adapter else { continue };
            self.asking.spawn(async move { (question, ask(adapter).await) });
        }
    }

    /// A backend was asked; if that changed what the Node offers, the Edge is told.
    pub(super) fn asked(&mut self, answer: Result<(Question, bool), JoinError>) -> Result<(), End> {
        let Ok((question, useful)) = answer else {
            // Panics of an adapter are caught inside; this is ours. That backend is asked again with the next config.
            tracing::error!("asking a backend panicked");
            return Ok(());
        };
        self.refreshes.done(&question, useful, now(), self.node.jitter());
        let in_force = Arc::clone(self.configs.in_force());
        // This also takes a changed number of places over into the gates (LEA-8).
        let offers = self.node.adapters().ready(&in_force);
        if offers == self.offers || !self.takes_new_work() {
            return Ok(());
        }
        tracing::info!(provider = %question.adapter, "what the providers offer has changed");
        self.offers.clone_from(&offers);
        if !self.handshake.shares(FEATURE_PROVIDER_OFFERS) {
            // This Edge learns of it at the next registration.
            return Ok(());
        }
        let revision = in_force.revision;
        self.control(ToEdge::ConfigAck(ConfigAck {
            seen_revision: revision,
            applied_revision: revision,
            error: String::new(),
            providers: offers,
        }))
    }
}
