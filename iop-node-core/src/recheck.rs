//! Decides how a live connection learns that the Edge at its other end must prove itself again, or that it is to be made anew:
//! certificates or roots have changed, or time has passed (CRD-10).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use iop_wire::VerifiedIdentity;
use tokio::sync::watch;

type Good = Arc<dyn Fn(&VerifiedIdentity) -> bool + Send + Sync>;

/// What live connections are told when certificates or roots change: look at the Edge again, begin anew. Cheap to clone; works
/// before, while and after the Node serves.
#[derive(Clone)]
pub struct EdgeCheck(Arc<Asked>);

struct Asked {
    good: watch::Sender<Option<Good>>,
    renew: watch::Sender<Duration>,
}

impl fmt::Debug for EdgeCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EdgeCheck").finish_non_exhaustive()
    }
}

impl Default for EdgeCheck {
    fn default() -> Self {
        Self(Arc::new(Asked { good: watch::Sender::new(None), renew: watch::Sender::new(Duration::ZERO) }))
    }
}

impl EdgeCheck {
    /// `good` gets the identity of the Edge with the certificates that proved it, once for each live connection and once for
    /// each that begins later, until the next call. An Edge that is no longer good gets no new work done: what runs may finish
    /// within the drain grace, then the connection ends as `identity_revoked` and the Node dials again. A link on which the Edge
    /// has proved nothing is not asked about.
    ///
    /// `good` is called on the connection's task: it may check signatures, not wait.
    pub fn recheck(&self, good: impl Fn(&VerifiedIdentity) -> bool + Send + Sync + 'static) {
        self.0.good.send_replace(Some(Arc::new(good)));
    }

    /// Live connections are made anew, because what the next dial shows or sees is newer: each as soon as nothing runs on it, and
    /// else at a random time in the second half of `within`, at most a day. What runs then may finish, for five minutes or the drain grace,
    /// whichever is longer, and new requests wait for the Node or go elsewhere.
    ///
    /// False if there is no connection, and none is being made.
    pub fn renew(&self, within: Duration) -> bool {
        self.0.renew.send_replace(within);
        self.0.renew.receiver_count() > 0
    }

    /// For a connection that is about to be made: whether it is to be made anew since now.
    pub(crate) fn renewals(&self) -> Renewals {
        Renewals(self.0.renew.subscribe())
    }

    /// For a connection that begins, with what its Edge has proved.
    pub(crate) fn watch(&self, edge: Option<VerifiedIdentity>, Renewals(renewed): Renewals) -> Watch {
        let mut asked = self.0.good.subscribe();
        // What was asked before counts too: TLS may have begun with what was in force then.
        asked.mark_changed();
        Watch { asked, renewed, edge }
    }
}

/// Wishes to begin anew since a connection was begun.
pub(crate) struct Renewals(watch::Receiver<Duration>);

/// What one connection watches.
pub(crate) struct Watch {
    asked: watch::Receiver<Option<Good>>,
    renewed: watch::Receiver<Duration>,
    edge: Option<VerifiedIdentity>,
}

impl Watch {
    /// The Edge has proved who it is.
    pub(crate) const fn is_authenticated(&self) -> bool {
        self.edge.is_some()
    }

    /// The Edge is good by what was asked last.
    pub(crate) fn is_good(&self) -> bool {
        let good = self.asked.borrow().clone();
        match (good, &self.edge) {
            (Some(good), Some(edge)) => good(edge),
            (None, _) | (_, None) => true,
        }
    }

    /// What was said since this was asked last.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn told(&mut self) -> Told {
        let Self { asked, renewed, .. } = self;
        tokio::select! {
            biased;
            Ok(()) = asked.changed() => Told::Recheck,
            Ok(()) = renewed.changed() => Told::Renew(*renewed.borrow_and_update()),
            // The Node is gone, and with it whoever could say something.
            else => std::future::pending().await,
        }
    }
}

/// What a connection is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// Ask whether the Edge is still good.
    Recheck,
    /// Begin anew within this time.
    Renew(Duration),
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use iop_wire::WorkloadIdentity;

    use super::*;

    fn told(watch: &mut Watch) -> Option<Told> {
        std::pin::pin!(watch.told()).now_or_never()
    }

    fn asked(watch: &mut Watch) -> bool {
        told(watch) == Some(Told::Recheck)
    }

    #[test]
    fn each_question_is_asked_once_of_each_connection_whenever_it_began() {
        // CRD-10
        let edge = VerifiedIdentity::vouched(WorkloadIdentity::parse("spiffe://test/iop/edge/e1").unwrap(), []);
        let check = EdgeCheck::default();
        let mut before = check.watch(Some(edge.clone()), check.renewals());
        assert!(asked(&mut before) && before.is_good());
        assert!(!asked(&mut before));
        check.recheck(|edge| edge.identity().to_string() != "spiffe://test/iop/edge/e1");
        let (mut after, mut nobody) = (check.watch(Some(edge), check.renewals()), check.watch(None, check.renewals()));
        for (watch, good) in [(&mut before, false), (&mut after, false), (&mut nobody, true)] {
            assert!(asked(watch));
            assert_eq!(watch.is_good(), good);
            assert!(!asked(watch));
        }
        check.recheck(|_| true);
        assert!(asked(&mut before) && before.is_good());
        // A connection that begins later is new enough; one that is being made may not be.
        let dialling = check.renewals();
        assert!(check.renew(Duration::from_secs(9)));
        let mut dialled = check.watch(None, dialling);
        assert_eq!(
            [told(&mut dialled), told(&mut dialled)],
            [Some(Told::Recheck), Some(Told::Renew(Duration::from_secs(9)))]
        );
        let mut later = check.watch(None, check.renewals());
        assert_eq!([told(&mut before), told(&mut before)], [Some(Told::Renew(Duration::from_secs(9))), None]);
        assert_eq!([told(&mut later), told(&mut later)], [Some(Told::Recheck), None]);
        drop(check);
        assert_eq!(told(&mut before), None, "nobody can ask any more");
    }
}
