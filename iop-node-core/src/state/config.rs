//! Decides which pushed config is applied when, and that every answer tells the truth about what is in force (REG-7, W13).
//!
//! ```text
//!            newer, nothing at work             applied ─► in force
//! push ──────────────────────────► applying ──┤
//!   │ newer, something at work                  refused ─► what was in force stays
//!   └─────────► waiting (one place: a newer push takes it, the older one is told so)
//! ```
//!
//! One update at a time; the latest wins, and what was overtaken while it waited is never built. A push that is not newer
//! changes nothing. It does not decide how a config is put into force, nor whether it can be.

use std::borrow::Cow;
use std::sync::Arc;

use iop_wire::NodeConfigPayload;

/// What the Edge is told about one push; `error` is empty exactly when that revision is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the driver takes it apart")]
pub struct Verdict {
    /// Revision of the push.
    pub seen: u64,
    /// Revision in force.
    pub in_force: u64,
    /// Why the push is not.
    pub error: Cow<'static, str>,
}

/// What to do after a push or the end of an application.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "the driver takes it apart")]
pub struct Step {
    /// Tell the Edge.
    pub answer: Option<Verdict>,
    /// Build what is new in this config, then call [`ConfigSync::finished`].
    pub apply: Option<Arc<NodeConfigPayload>>,
}

/// The configs of one connection.
#[derive(Debug)]
pub struct ConfigSync {
    in_force: Arc<NodeConfigPayload>,
    applying: Option<Arc<NodeConfigPayload>>,
    waiting: Option<Arc<NodeConfigPayload>>,
}

impl ConfigSync {
    /// The registration brought this config.
    #[must_use]
    pub const fn new(in_force: Arc<NodeConfigPayload>) -> Self {
        Self { in_force, applying: None, waiting: None }
    }

    /// What serves.
    #[must_use]
    pub const fn in_force(&self) -> &Arc<NodeConfigPayload> {
        &self.in_force
    }

    /// The Edge pushed a config.
    pub fn pushed(&mut self, config: NodeConfigPayload) -> Step {
        let seen = config.revision;
        if seen <= self.in_force.revision {
            let error = if seen == self.in_force.revision { "" } else { "older than the config in force" };
            return self.answer(seen, error);
        }
        let Some(applying) = &self.applying else {
            return self.apply(Arc::new(config));
        };
        let newest = self.waiting.as_ref().unwrap_or(applying).revision;
        if seen == newest || seen == applying.revision {
            // Its answer is on the way.
            return Step::default();
        }
        if seen < newest {
            return self.answer(seen, OVERTAKEN);
        }
        match self.waiting.replace(Arc::new(config)) {
            Some(overtaken) => self.answer(overtaken.revision, OVERTAKEN),
            None => Step::default(),
        }
    }

    /// What was to be applied is in force now, or could not be for a reason that is safe to tell.
    pub fn finished(&mut self, outcome: Result<(), Cow<'static, str>>) -> Step {
        let Some(applied) = self.applying.take() else { return Step::default() };
        let seen = applied.revision;
        let error = match outcome {
            Ok(()) => {
                self.in_force = applied;
                Cow::Borrowed("")
            }
            Err(error) => error,
        };
        let answer = Some(Verdict { seen, in_force: self.in_force.revision, error });
        match self.waiting.take() {
            Some(next) => Step { answer, ..self.apply(next) },
            None => Step { answer, apply: None },
        }
    }

    fn apply(&mut self, config: Arc<NodeConfigPayload>) -> Step {
        self.applying = Some(Arc::clone(&config));
        Step { answer: None, apply: Some(config) }
    }

    fn answer(&self, seen: u64, error: &'static str) -> Step {
        let verdict = Verdict { seen, in_force: self.in_force.revision, error: Cow::Borrowed(error) };
        Step { answer: Some(verdict), apply: None }
    }
}

const OVERTAKEN: &str = "overtaken by a newer revision before it was applied";

#[cfg(test)]
mod tests;
