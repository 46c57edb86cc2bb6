//! Decides which config is sent to a ready Node, and when: one at a time, the latest wins, a refused one is not sent again
//! (REG-7).

use std::sync::Arc;

use iop_wire::{ConfigAck, NodeConfigPayload};

/// An ack that fits nothing that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the node acknowledged a config it was not sent")]
pub(crate) struct UnknownAck;

/// What an ack means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Acked {
    /// This config is in force from now on.
    Applied(Arc<NodeConfigPayload>),
    /// The Node keeps what it had.
    Refused,
    /// Nobody waited for it: what the providers offer has changed.
    Offers,
}

/// The pushes of one connection.
#[derive(Debug, Default)]
pub(crate) struct Push {
    outstanding: Option<Arc<NodeConfigPayload>>,
    wanted: Option<Arc<NodeConfigPayload>>,
}

impl Push {
    /// The Node shall have this config. Gives it back if it is to be sent now.
    pub(crate) fn want(&mut self, config: Arc<NodeConfigPayload>) -> Option<Arc<NodeConfigPayload>> {
        self.wanted = Some(config);
        self.next()
    }

    /// The config that is on its way, or waits to be sent: what the Node will have.
    pub(crate) fn latest(&self) -> Option<&Arc<NodeConfigPayload>> {
        self.wanted.as_ref().or(self.outstanding.as_ref())
    }

    /// The next one to send, once none is outstanding.
    pub(crate) fn next(&mut self) -> Option<Arc<NodeConfigPayload>> {
        if self.outstanding.is_none() {
            self.outstanding = self.wanted.take();
            return self.outstanding.clone();
        }
        None
    }

    /// An ack came; `in_force` is the revision the Node had.
    pub(crate) fn acked(&mut self, ack: &ConfigAck, in_force: u64) -> Result<Acked, UnknownAck> {
        match self.outstanding.take_if(|sent| sent.revision == ack.seen_revision) {
            Some(sent) if ack.applied_revision == sent.revision && ack.error.is_empty() => Ok(Acked::Applied(sent)),
            Some(_) if ack.applied_revision == in_force => Ok(Acked::Refused),
            None if ack.seen_revision == in_force && ack.applied_revision == in_force => Ok(Acked::Offers),
            Some(_) | None => Err(UnknownAck),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(revision: u64) -> Arc<NodeConfigPayload> {
        Arc::new(NodeConfigPayload { revision, providers: Vec::new() })
    }

    fn ack(seen: u64, applied: u64, error: &str) -> ConfigAck {
        ConfigAck { seen_revision: seen, applied_revision: applied, error: error.to_owned(), providers: Vec::new() }
    }

    #[test]
    fn one_is_outstanding_the_latest_wins_and_a_refused_one_is_not_sent_again() {
        // REG-7
        let mut push = Push::default();
        assert_eq!(push.want(config(2)), Some(config(2)));
        assert_eq!((push.want(config(3)), push.want(config(4))), (None, None));
        assert_eq!(push.latest(), Some(&config(4)));
        assert_eq!(push.acked(&ack(2, 2, ""), 1), Ok(Acked::Applied(config(2))));
        assert_eq!(push.next(), Some(config(4)), "3 is never sent");
        assert_eq!(push.acked(&ack(4, 2, "no such kind"), 2), Ok(Acked::Refused));
        assert_eq!(push.next(), None);
    }

    #[test]
    fn an_ack_of_what_is_in_force_brings_offers_and_any_other_fits_nothing() {
        // REG-7, W13
        let mut push = Push::default();
        assert_eq!(push.acked(&ack(1, 1, ""), 1), Ok(Acked::Offers));
        for (seen, applied) in [(2, 2), (2, 1), (1, 2), (0, 0)] {
            assert_eq!(push.acked(&ack(seen, applied, ""), 1), Err(UnknownAck));
        }
        push.want(config(2));
        assert_eq!(push.acked(&ack(1, 1, ""), 1), Ok(Acked::Offers), "it crossed the push");
        assert_eq!(push.acked(&ack(2, 3, ""), 1), Err(UnknownAck), "it says what can't be");
    }
}
