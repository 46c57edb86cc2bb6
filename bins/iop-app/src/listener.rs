//! Decides what a client may cost before it is known: an HTTP listener with timers, caps and a graceful end.
//!
//! `axum::serve` is not used here: it builds hyper without a timer, so that its header timeout never fires.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::service::Service as _;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;

mod guard;
mod head;
mod sniff;
#[cfg(test)]
mod tests;

use guard::Guarded;
use head::{Answering, Busy, Heads, Turns};
use sniff::{Version, sniff};

use crate::shutdown::Shutdown;

/// Headers of one HTTP/1.1 request.
const MAX_HEADERS: usize = 64;
/// Bytes of one request's headers.
const MAX_HEADER_BYTES: usize = 16 << 10;
/// Bytes that one HTTP/1.1 connection buffers in each direction: a slow reader must not pull much ahead.
const MAX_BUFFER_BYTES: usize = 64 << 10;
/// Streams of one HTTP/2 connection.
const MAX_STREAMS: u32 = 100;
/// Streams that an HTTP/2 peer may have reset before we have looked at them; with more the connection ends (rapid reset).
/// Whoever gives up cancels a handful. h2's own limit is 20: that of this listener is another, so that a test can tell them.
const MAX_PENDING_RESETS: usize = 16;
/// Streams of an HTTP/2 peer that we may have reset for its errors, in all its time; with more the connection ends. hyper's
/// own limit is 1024.
const MAX_ERROR_RESETS: usize = 128;
/// Receive window of one HTTP/2 stream.
const STREAM_WINDOW: u32 = 64 << 10;
/// Receive window of one HTTP/2 connection.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// An HTTP/2 peer that is quiet for that long is pinged.
const H2_PING_EVERY: Duration = Duration::from_secs(30);
/// An HTTP/2 peer that answers no ping for that long is gone.
const H2_PING_WAIT: Duration = Duration::from_secs(20);
/// A client that pools connections must not find most of them closed; one that keeps many idle must not hold them for ever.
const IDLE_TIME: Duration = Duration::from_secs(75);
/// Wait after the operating system refused to accept (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limits of one listener (SEC-3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections in total.
    pub connections: usize,
    /// Connections per address.
    pub connections_per_address: usize,
    /// For the first byte of a connection, for the headers of an HTTP/1.1 request from their first byte, and for the first
    /// request of an HTTP/2 connection. Default: 10 s.
    pub header_time: Duration,
    /// Between two requests of one HTTP/1.1 connection, and for an HTTP/2 connection without any. Default: 75 s.
    pub idle_time: Duration,
    /// For a TLS handshake.
    pub handshake_time: Duration,
    /// A client that reads nothing for that long is cut.
    pub write_stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            connections_per_address: 256,
            header_time: Duration::from_secs(10),
            idle_time: IDLE_TIME,
            handshake_time: Duration::from_secs(5),
            write_stall: Duration::from_secs(60),
        }
    }
}

/// What gives the TLS configuration of the next connection.
pub type TlsSource = Arc<dyn Fn() -> Arc<rustls::ServerConfig> + Send + Sync>;

/// A bound HTTP/1.1 and HTTP/2 listener.
pub struct HttpListener {
    listener: TcpListener,
    tls: Option<TlsSource>,
    limits: Limits,
}

impl std::fmt::Debug for HttpListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpListener")
            .field("listener", &self.listener)
            .field("tls", &self.tls.is_some())
            .field("limits", &self.limits)
            .finish()
    }
}

impl HttpListener {
    /// Binds.
    ///
    /// # Errors
    /// What the operating system says.
    pub async fn bind(address: SocketAddr, tls: Option<Arc<rustls::ServerConfig>>, limits: Limits) -> io::Result<Self> {
        let tls = tls.map(|config| -> TlsSource { Arc::new(move || Arc::clone(&config)) });
        Self::bind_with(address, tls, limits).await
    }

    /// Binds, with TLS whose configuration is asked for before every handshake, so that certificates can be renewed.
    ///
    /// # Errors
    /// What the operating system says.
    pub async fn bind_with(address: SocketAddr, tls: Option<TlsSource>, limits: Limits) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, tls, limits })
    }

    /// Where it really listens: port 0 has become a port.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until stopped; returns when the last connection has ended.
    ///
    /// # Cancel safety
    /// Dropping it closes the listener; open connections go on until `stop` fires.
    pub async fn serve<S, B>(self, service: S, stop: Shutdown)
    where
        S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
        S::Error: Into<Box<dyn StdError + Send + Sync>>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        let (tracker, seats) = (TaskTracker::new(), Arc::new(Seats::new(self.limits)));
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = stop.gracefully.cancelled() => break,
                () = stop.now.cancelled() => break,
            };
            let (socket, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "can't accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Some(seat) = Seats::take(&seats, peer.ip()) else {
                tracing::debug!(%peer, "connection refused: too many are open");
                continue;
            };
            let acceptor = self.tls.as_ref().map(|source| TlsAcceptor::from(source()));
            let (service, limits, stop) = (service.clone(), self.limits, stop.clone());
            tracker.spawn(async move {
                let now = stop.now.clone();
                tokio::select! {
                    () = connection(socket, acceptor, service, limits, stop.gracefully) => {}
                    () = now.cancelled() => {}
                }
                drop(seat);
            });
        }
        drop(self.listener);
        tracker.close();
        tracker.wait().await;
    }
}

async fn connection<S, B>(
    socket: TcpStream,
    tls: Option<TlsAcceptor>,
    service: S,
    limits: Limits,
    stop: CancellationToken,
) where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn StdError + Send + Sync>>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    // Without it, the second small write of an answer waits for the peer's delayed ACK: 40 ms.
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY was refused");
    }
    let socket = Guarded::new(socket, limits.write_stall);
    let Some(tls) = tls else {
        return plain(socket, None, service, limits, stop).await;
    };
    match timeout(limits.handshake_time, tls.accept(socket)).await {
        Ok(Ok(stream)) => {
            let version = match stream.get_ref().1.alpn_protocol() {
                Some(b"h2") => Some(Version::Http2),
                Some(b"http/1.1") => Some(Version::Http1),
                Some(_) | None => None,
            };
            plain(stream, version, service, limits, stop).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => tracing::debug!("TLS handshake took too long"),
    }
}

async fn plain<IO, S, B>(mut io: IO, version: Option<Version>, service: S, limits: Limits, stop: CancellationToken)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn StdError + Send + Sync>>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    let sniffed = tokio::select! {
        // hyper's own timers start only when the version is known: a silent peer would stay for ever.
        sniffed = timeout(limits.header_time, sniff(&mut io, version)) => sniffed,
        () = stop.cancelled() => return,
    };
    let Ok(Ok((version, prefix))) = sniffed else {
        tracing::debug!("a peer sent no request in time");
        return;
    };
    let io = sniff::Prefixed::new(prefix, io);
    let service = TowerToHyperService::new(service);
    let ended = match version {
        Version::Http1 => {
            let turns = Turns::default();
            let io = TokioIo::new(Heads::new(io, turns.clone(), limits.header_time));
            let service = hyper::service::service_fn(move |request| {
                let (turn, answer) = (turns.begin(), service.call(request));
                async move { Ok::<_, S::Error>(answer.await?.map(|body| Answering::new(body, turn))) }
            });
            let mut builder = hyper::server::conn::http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                // Counts from the end of the answer before, so it is the wait between two requests.
                .header_read_timeout(limits.idle_time)
                .max_headers(MAX_HEADERS)
                .max_header_size(MAX_HEADER_BYTES)
                .max_buf_size(MAX_BUFFER_BYTES);
            let mut connection = std::pin::pin!(builder.serve_connection(io, service));
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = stop.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        }
        Version::Http2 => {
            let (busy, mut changes) = Busy::new();
            let service = hyper::service::service_fn(move |request| {
                let (stream, answer) = (busy.begin(), service.call(request));
                async move { Ok::<_, S::Error>(answer.await?.map(|body| Answering::new(body, stream))) }
            });
            let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .adaptive_window(false)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_concurrent_streams(MAX_STREAMS)
                .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
                .max_local_error_reset_streams(MAX_ERROR_RESETS)
                .max_header_list_size(u32::try_from(MAX_HEADER_BYTES).unwrap_or(u32::MAX))
                .max_send_buf_size(MAX_BUFFER_BYTES)
                .keep_alive_interval(H2_PING_EVERY)
                .keep_alive_timeout(H2_PING_WAIT);
            let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(io), service));
            // A peer that answers pings and asks nothing must not stay for ever; half a head of a request is nothing asked.
            let mut idle = std::pin::pin!(sleep(limits.header_time));
            let mut is_idle = true;
            loop {
                tokio::select! {
                    ended = connection.as_mut() => break ended,
                    () = stop.cancelled() => {
                        connection.as_mut().graceful_shutdown();
                        break connection.await;
                    }
                    Ok(()) = changes.changed() => {
                        is_idle = *changes.borrow_and_update() == 0;
                        idle.as_mut().reset(Instant::now() + limits.idle_time);
                    }
                    () = idle.as_mut(), if is_idle => {
                        connection.as_mut().graceful_shutdown();
                        break match timeout(limits.header_time, connection).await {
                            Ok(ended) => ended,
                            Err(_) => Ok(()),
                        };
                    }
                }
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client connection ended early");
    }
}

/// Who sits on how many connections.
#[derive(Debug)]
struct Seats {
    limits: Limits,
    taken: Mutex<HashMap<IpAddr, usize>>,
}

/// One connection's place; given back on drop.
#[derive(Debug)]
struct Seat {
    seats: Arc<Seats>,
    address: IpAddr,
}

impl Seats {
    fn new(limits: Limits) -> Self {
        Self { limits, taken: Mutex::default() }
    }

    fn take(seats: &Arc<Self>, address: IpAddr) -> Option<Seat> {
        let mut taken = seats.taken.lock().unwrap_or_else(PoisonError::into_inner);
        // Linear in the number of addresses, which the total bounds; only when a connection is made.
        let total: usize = taken.values().sum();
        let here = taken.get(&address).copied().unwrap_or(0);
        if total >= seats.limits.connections || here >= seats.limits.connections_per_address {
            return None;
        }
        taken.insert(address, here + 1);
        drop(taken);
        Some(Seat { seats: Arc::clone(seats), address })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get_mut(&self.address) {
            Some(count) if *count > 1 => *count -= 1,
            Some(_) | None => {
                taken.remove(&self.address);
            }
        }
    }
}
