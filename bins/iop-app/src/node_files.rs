//! Decides which files a Node reads again while it serves, and what changes by that: how it dials, whether the Edge at the
//! other end of a live connection is still good (CRD-10), and whose credential leases it takes (CRD-8).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use iop_node_core::{EdgeCheck, LeaseIssuers, OwnIssuers, TrustedIssuers};
use iop_wire::link::grpc::{NodeTls, WantedEdge};
use iop_wire::{VerifiedIdentity, WorkloadRole};
use rustls_pki_types::{ServerName, UnixTime};

use crate::config::NodeSettings;
use crate::config::node::IssuerSource;
use crate::doctor::certificate;
use crate::exit::Failure;
use crate::node_metrics::{FilesOf, NodeMetrics};
use crate::renew::{Look, Looks, Renewable};
use crate::shutdown::Hangup;
use crate::tls::{self, TlsError};

/// How long a connection that was made with other files than those of now may stay if it is never idle.
const RENEW_WITHIN: Duration = Duration::from_secs(600);
/// Later than this before its end nobody is asked any more: what would be won?
const LEAST_LEFT: Duration = Duration::from_secs(60);
/// A connection is made anew in this last part of the time for which the Edge's certificate is good: it may have another by now.
const LAST_PART: u32 = 10;

/// What a Node has from files that may change. Clones are one.
#[derive(Debug, Clone)]
pub struct NodeFiles {
    /// None: no TLS is spoken.
    tls: Option<Dial>,
    issuers: Issuers,
    metrics: NodeMetrics,
}

#[derive(Debug, Clone)]
struct Dial {
    tls: Renewable<NodeTls>,
    name: ServerName<'static>,
    edge: Arc<Mutex<EdgeLeaf>>,
}

/// What is known of the Edge's own certificate.
#[derive(Debug, Default)]
struct EdgeLeaf {
    shown: Vec<u8>,
    /// A connection was asked to begin anew; not again before then, whichever certificate is seen.
    next: u64,
}

impl EdgeLeaf {
    /// The time in which a connection should be made anew, if the certificate ends soon. It is asked again each time half of what
    /// is left has gone by: an Edge may get its new certificate late.
    fn renew_within(&self, now: UnixTime) -> Option<Duration> {
        let facts = certificate::facts(&self.shown)?;
        let (from, until) = (facts.from.0, facts.until.0);
        let left = Duration::from_secs(until.saturating_sub(now.as_secs()));
        let last_part = Duration::from_secs(until.saturating_sub(from)) / LAST_PART;
        (left <= last_part && left >= LEAST_LEFT && now.as_secs() >= self.next).then(|| RENEW_WITHIN.min(left / 2))
    }

    /// Somebody was asked.
    fn asked(&mut self, now: UnixTime) {
        let until = certificate::facts(&self.shown).map_or(0, |facts| facts.until.0);
        self.next = now.as_secs() + until.saturating_sub(now.as_secs()) / 2;
    }
}

#[derive(Debug, Clone)]
enum Issuers {
    Fixed(LeaseIssuers),
    Read { from: Renewable<TrustedIssuers>, own: OwnIssuers },
}

impl NodeFiles {
    /// Reads what the settings name.
    ///
    /// # Errors
    /// [`Failure`] with what can't be used.
    pub fn read(settings: &NodeSettings, metrics: NodeMetrics) -> Result<Self, Failure> {
        let tls = settings.edge.tls.then(|| dial(settings)).transpose()?;
        let issuers = match &settings.lease_issuers {
            IssuerSource::Nobody => Issuers::Fixed(LeaseIssuers::Nobody),
            IssuerSource::Edge => Issuers::Fixed(LeaseIssuers::OfEdge),
            IssuerSource::Named(named) => {
                let again = named.clone();
                let from = Renewable::new(named.files(), move || again.read()).map_err(Failure::usage)?;
                let own = OwnIssuers::from(TrustedIssuers::clone(&from.get()));
                Issuers::Read { from, own }
            }
        };
        Ok(Self { tls, issuers, metrics })
    }

    /// TLS of the next dial: files are looked at before. `None` = no TLS is spoken.
    #[must_use]
    pub fn tls(&self) -> Option<impl Fn() -> NodeTls + Send + Sync + 'static> {
        let Dial { tls, .. } = self.tls.clone()?;
        let metrics = self.metrics.clone();
        Some(move || {
            // Between two connections: nobody else waits for this task.
            tell(&metrics, FilesOf::Certificates, tls.files(), &tls.look());
            NodeTls::clone(&tls.get())
        })
    }

    /// Whose credential leases are taken.
    #[must_use]
    pub fn issuers(&self) -> LeaseIssuers {
        match &self.issuers {
            Issuers::Fixed(issuers) => issuers.clone(),
            Issuers::Read { own, .. } => LeaseIssuers::Only(own.clone()),
        }
    }

    /// Looks whether files have changed, and takes what they hold now. The Edge of a live connection has to be good by it; when
    /// nothing has changed, only if `recheck` says so. A connection that was made with what is no longer there is made anew in a
    /// quiet moment, and so is one whose Edge will need another certificate soon. Reads files: not for a task that others wait
    /// for.
    pub fn look(&self, check: &EdgeCheck, recheck: bool) {
        if let Issuers::Read { from, own } = &self.issuers {
            let look = from.look();
            tell(&self.metrics, FilesOf::LeaseIssuers, from.files(), &look);
            if look == Look::Renewed {
                own.replace(TrustedIssuers::clone(&from.get()));
            }
        }
        let Some(Dial { tls, name, edge }) = self.tls.clone() else { return };
        let look = tls.look();
        tell(&self.metrics, FilesOf::Certificates, tls.files(), &look);
        let known = Arc::clone(&edge);
        if recheck || look == Look::Renewed {
            // Later connections are asked about too: by what is in force then.
            check.recheck(move |shown| {
                leaf(&edge).shown = shown.chain().first().cloned().unwrap_or_default();
                is_good(&tls.get(), &name, shown)
            });
        }
        // After that: an Edge that is no longer good is left for that reason.
        let now = UnixTime::now();
        if look == Look::Renewed {
            check.renew(RENEW_WITHIN);
        } else {
            let mut known = leaf(&known);
            if known.renew_within(now).is_some_and(|within| check.renew(within)) {
                known.asked(now);
            }
        }
    }

    /// Looks again and again, and at once on SIGHUP.
    ///
    /// # Cancel safety
    /// May be dropped at any time.
    pub async fn keep(self, check: EdgeCheck, mut hangup: Hangup) {
        let mut looks = Looks::default();
        loop {
            let recheck = tokio::select! {
                recheck = looks.next() => recheck,
                () = hangup.next() => {
                    tracing::info!("SIGHUP: certificates and lease issuers are read again; other settings need a restart");
                    true
                }
            };
            let (this, check) = (self.clone(), check.clone());
            let _done = tokio::task::spawn_blocking(move || this.look(&check, recheck)).await;
        }
    }
}

fn leaf(edge: &Mutex<EdgeLeaf>) -> MutexGuard<'_, EdgeLeaf> {
    edge.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_good(tls: &NodeTls, name: &ServerName<'_>, shown: &VerifiedIdentity) -> bool {
    // Nothing has to be proved any more.
    let Some(edge) = tls.edge() else { return true };
    match edge.check_again(shown, name, UnixTime::now()) {
        Ok(()) => true,
        Err(error) => {
            let (identity, reason) = (shown.identity(), error.failure);
            tracing::warn!(%identity, %reason, "the Edge's certificate is no longer good: {error}");
            false
        }
    }
}

/// TLS as these settings ask for it, made again when a file changes.
fn dial(settings: &NodeSettings) -> Result<Dial, Failure> {
    let unusable = |error: TlsError| Failure::usage(error.to_string());
    let (ca, own, identity) = (settings.ca.clone(), settings.own.clone(), settings.edge.identity.clone());
    let own_files = own.iter().flat_map(|pair| [pair.cert.clone(), pair.key.clone()]);
    let files = ca.iter().cloned().chain(own_files).collect();
    let tls = Renewable::new(files, move || {
        let pair = own.as_ref().map(|pair| tls::load_pair(&pair.cert, &pair.key)).transpose()?;
        let domain = pair.as_ref().map(|pair| tls::own_identity(pair, WorkloadRole::Node)).transpose()?;
        let wanted = match (&identity, domain) {
            (Some(identity), _) => Some(WantedEdge::Exactly(identity.clone())),
            // Managed: the Edge proves who it is, too.
            (None, Some(own)) => Some(WantedEdge::OfDomain(own.trust_domain().clone())),
            (None, None) => None,
        };
        tls::identified_node_client(ca.as_deref(), pair.as_ref(), wanted)
    });
    let name = ServerName::try_from(settings.edge.tls_name.clone()).map_err(|_| {
        Failure::usage(format!("{:?} is no name that a certificate can be for", settings.edge.tls_name))
    })?;
    Ok(Dial { tls: tls.map_err(unusable)?, name, edge: Arc::default() })
}

fn tell(metrics: &NodeMetrics, what: FilesOf, files: &[PathBuf], look: &Look) {
    match look {
        Look::Same | Look::Bad { again: true, .. } => {}
        Look::Renewed => {
            metrics.files_changed(what, true);
            let files: Vec<_> = files.iter().map(|path| path.display().to_string()).collect();
            tracing::info!(%what, files = files.join(", "), "renewed");
        }
        Look::Bad { problem, again: false } => {
            metrics.files_changed(what, false);
            tracing::error!(%what, %problem, "what changed can't be used: the old stays in force");
        }
    }
}

#[cfg(test)]
mod tests;
