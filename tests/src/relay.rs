//! Decides where a Node's connection really goes: a TCP relay whose target can change while the address stays.
//!
//! It stands for the stable name of an Edge that restarts somewhere else, and for the network between the two.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A relay on a free port of 127.0.0.1. Dropping it cuts everything.
#[derive(Debug)]
pub struct Relay {
    addr: SocketAddr,
    target: Arc<Mutex<Option<SocketAddr>>>,
    arrivals: Arc<Mutex<Vec<Instant>>>,
    cut: watch::Sender<u64>,
    task: JoinHandle<()>,
}

impl Relay {
    /// A relay without a target: it closes what comes.
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let target = Arc::new(Mutex::new(None));
        let cut = watch::Sender::new(0);
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let task = tokio::spawn(accept(listener, Arc::clone(&target), Arc::clone(&arrivals), cut.subscribe()));
        Self { addr, target, arrivals, cut, task }
    }

    /// Where it listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// New connections go there; open ones stay where they are.
    pub fn lead_to(&self, target: Option<SocketAddr>) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    /// When each connection came, whether there was a target or not.
    #[must_use]
    pub fn arrivals(&self) -> Vec<Instant> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends every open connection.
    pub fn cut(&self) {
        self.cut.send_modify(|count| *count += 1);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    target: Arc<Mutex<Option<SocketAddr>>>,
    arrivals: Arc<Mutex<Vec<Instant>>>,
    cut: watch::Receiver<u64>,
) {
    while let Ok((mut near, _)) = listener.accept().await {
        arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        let Some(addr) = *target.lock().unwrap_or_else(PoisonError::into_inner) else { continue };
        let mut cut = cut.clone();
        cut.mark_unchanged();
        tokio::spawn(async move {
            let Ok(mut far) = TcpStream::connect(addr).await else { return };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                _ = cut.changed() => {}
            }
        });
    }
}
