//! Decides how clients keep a fleet busy while it breaks, and what they may be told: one outcome each, and never a wrong one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::answer::{Outcome, read};
use crate::machine::eventually;
use crate::wire_client::{Connection, PATIENCE, Request};

/// How long a client leaves an Edge alone that refused it: all of them together must not flood its log while no Node is there.
const PAUSE: Duration = Duration::from_millis(20);

/// A request, and the whole text of its answer.
#[derive(Debug, Clone)]
pub struct Shot {
    /// What is asked.
    pub request: Request,
    /// What a whole answer says.
    pub text: String,
}

impl Shot {
    /// A request whose whole answer says this.
    #[must_use]
    pub fn new(request: Request, text: &str) -> Self {
        Self { request, text: text.to_owned() }
    }
}

/// How many requests ended in which way. Each has exactly one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Complete answers with the right text.
    pub whole: u64,
    /// Typed errors by code, before content or as the last event of a stream.
    pub failed: BTreeMap<String, u64>,
    /// Bodies that broke off, as every HTTP client reports.
    pub broken: u64,
    /// Connections that ended before the head of an answer.
    pub unanswered: u64,
    /// Connections that did not come about.
    pub refused: u64,
    /// The longest that one took.
    pub slowest: Duration,
}

impl Tally {
    /// Typed errors.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Requests that got an answer, or the beginning of one.
    #[must_use]
    pub fn answered(&self) -> u64 {
        self.whole + self.errors() + self.broken
    }

    /// All requests.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.answered() + self.unanswered + self.refused
    }

    /// Checks that all were answered, and every error has one of these codes.
    ///
    /// # Panics
    /// When not.
    pub fn assert_only(&self, codes: &[&str]) {
        assert!(self.failed.keys().all(|code| codes.contains(&code.as_str())), "other errors than {codes:?}: {self:?}");
        assert_eq!((self.broken, self.unanswered, self.refused), (0, 0, 0), "{self:?}");
    }

    /// Counts the outcome of one request.
    ///
    /// # Panics
    /// When a client could not know what it got, or got a wrong text.
    pub fn count(&mut self, shot: &Shot, outcome: Option<&Outcome>) {
        match outcome {
            None => self.unanswered += 1,
            Some(Outcome::Whole { text }) => {
                assert_eq!(*text, shot.text, "a whole answer says all of it");
                self.whole += 1;
            }
            Some(Outcome::Failed { text, code, kind, .. }) => {
                assert!(shot.text.starts_with(text), "{text:?} is no beginning of {:?}", shot.text);
                *self.failed.entry(code.clone().unwrap_or_else(|| kind.clone())).or_default() += 1;
            }
            Some(Outcome::Broken { text }) => {
                assert!(shot.text.starts_with(text), "{text:?} is no beginning of {:?}", shot.text);
                self.broken += 1;
            }
            Some(Outcome::Defect(what)) => panic!("{what}"),
        }
    }

    /// With those of another one.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.whole += other.whole;
        self.broken += other.broken;
        self.unanswered += other.unanswered;
        self.refused += other.refused;
        self.slowest = self.slowest.max(other.slowest);
        other.failed.into_iter().for_each(|(code, count)| *self.failed.entry(code).or_default() += count);
        self
    }
}

/// Clients that ask, each one request at a time over a new connection.
#[derive(Debug)]
pub struct Storm {
    shared: Arc<Shared>,
    clients: JoinSet<Tally>,
    paced: bool,
}

#[derive(Debug)]
struct Shared {
    aim: Mutex<SocketAddr>,
    shots: Vec<Shot>,
    permits: Semaphore,
    stop: CancellationToken,
}

impl Storm {
    fn begin(edge: SocketAddr, clients: usize, shots: Vec<Shot>, permits: usize, paced: bool) -> Self {
        let (permits, stop) = (Semaphore::new(permits), CancellationToken::new());
        let shared = Arc::new(Shared { aim: Mutex::new(edge), shots, permits, stop });
        let all = (0..clients).map(|client| ask_on(Arc::clone(&shared), client)).collect();
        Self { shared, clients: all, paced }
    }

    /// Clients that ask until [`end`](Self::end), in turn what `shots` holds.
    #[must_use]
    pub fn start(edge: SocketAddr, clients: usize, shots: Vec<Shot>) -> Self {
        Self::begin(edge, clients, shots, Semaphore::MAX_PERMITS, false)
    }

    /// Clients that ask as often as they are [allowed](Self::allow) to.
    #[must_use]
    pub fn paced(edge: SocketAddr, clients: usize, shots: Vec<Shot>) -> Self {
        Self::begin(edge, clients, shots, 0, true)
    }

    /// Lets so many requests more be asked.
    pub fn allow(&self, requests: usize) {
        self.shared.permits.add_permits(requests);
    }

    /// Later requests go there.
    pub fn aim(&self, edge: SocketAddr) {
        *self.shared.aim.lock().unwrap_or_else(PoisonError::into_inner) = edge;
    }

    /// Lets every request that was begun end.
    ///
    /// # Panics
    /// When one of them never ends, or a client could not know what it got.
    pub async fn end(mut self) -> Tally {
        if self.paced {
            eventually("all is asked", || async { (self.shared.permits.available_permits() == 0).then_some(()) }).await;
        }
        self.shared.stop.cancel();
        let mut tally = Tally::default();
        while let Some(one) = self.clients.join_next().await {
            tally = tally.and(one.expect("a client that was told something right"));
        }
        tally
    }
}

async fn ask_on(shared: Arc<Shared>, client: usize) -> Tally {
    let mut tally = Tally::default();
    for shot in shared.shots.iter().cycle().skip(client % shared.shots.len()) {
        let permit = tokio::select! {
            biased;
            () = shared.stop.cancelled() => break,
            permit = shared.permits.acquire() => permit.expect("it is never closed"),
        };
        permit.forget();
        let (edge, begun) = (*shared.aim.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        let Some(mut connection) = Connection::try_open(edge).await else {
            tally.refused += 1;
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let answer = timeout(PATIENCE, connection.try_ask(&shot.request)).await.expect("every request ends");
        let outcome = answer.as_ref().map(read);
        tally.count(shot, outcome.as_ref());
        tally.slowest = tally.slowest.max(begun.elapsed());
        if matches!(outcome, Some(Outcome::Failed { .. })) {
            tokio::time::sleep(PAUSE).await;
        }
    }
    tally
}
