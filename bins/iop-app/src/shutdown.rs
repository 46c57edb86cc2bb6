//! Decides what signals ask of a process: the first to stop finishes work, the second one ends at once, SIGHUP reloads.

use std::io;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// How long running work may take after the first signal (BIN-5).
pub const DRAIN: Duration = Duration::from_secs(30);

/// Asks for an end. Clones ask together.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// No new work; finish what runs.
    pub gracefully: CancellationToken,
    /// End at once.
    pub now: CancellationToken,
}

impl Shutdown {
    /// Fires on SIGTERM and Ctrl-C: the first one `gracefully`, the second one `now`.
    ///
    /// # Errors
    /// When the operating system does not allow to listen for signals. Must be called within a tokio runtime.
    pub fn on_signals() -> io::Result<Self> {
        let shutdown = Self::default();
        let fire = shutdown.clone();
        let mut signals = Signals::new()?;
        tokio::spawn(async move {
            signals.next().await;
            fire.gracefully.cancel();
            signals.next().await;
            fire.gracefully.cancel();
            fire.now.cancel();
        });
        Ok(shutdown)
    }

    /// Ends at once.
    pub fn force(&self) {
        self.gracefully.cancel();
        self.now.cancel();
    }
}

/// SIGHUP: read the config again (BIN-5). Where there is no such signal, it never comes.
#[derive(Debug)]
pub struct Hangup {
    #[cfg(unix)]
    signal: tokio::signal::unix::Signal,
}

impl Hangup {
    /// Listens from now on; until then the signal ends the process.
    ///
    /// # Errors
    /// When the operating system does not allow to listen for signals. Must be called within a tokio runtime.
    #[cfg(unix)]
    pub fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { signal: signal(SignalKind::hangup())? })
    }

    /// Never fires here.
    ///
    /// # Errors
    /// None here.
    #[cfg(not(unix))]
    #[allow(clippy::unnecessary_wraps, reason = "fails on other systems")]
    pub fn new() -> io::Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next one. Several that came meanwhile are one.
    ///
    /// # Cancel safety
    /// May be dropped at any time.
    pub async fn next(&mut self) {
        #[cfg(unix)]
        if self.signal.recv().await.is_some() {
            return;
        }
        std::future::pending().await
    }
}

#[cfg(unix)]
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    #[allow(clippy::unnecessary_wraps, reason = "fails on other systems")]
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
