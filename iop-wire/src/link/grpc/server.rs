//! Decides how an Edge takes connections: bounded handshakes, one link for each call, nothing kept for a link that ended.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use hyper::body::Incoming as RequestBody;
use hyper::server::conn::http2::Builder;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::server::{Grpc, StreamingService};
use tonic::{Request, Response, Status, Streaming};

use super::codec::EnvelopeCodec;
use super::{ALPN, Congestion, Decoded, Guard, SESSION, Shared, Written, poll_received, prepare, reason, workload};
use crate::limits::{
    ACCEPT_QUEUE, CLOSE_LINGER, H2_CONNECTION_WINDOW, H2_SEND_BUFFER, H2_STREAM_WINDOW, HANDSHAKE_TIMEOUT,
    HANDSHAKES_PER_ADDRESS, MAX_CONFIG_ENVELOPE, MAX_ENVELOPE, SESSIONS_PER_CONNECTION,
};
use crate::link::{EdgeLink, HandshakeError, HandshakeFailure, Incoming, Link, Outgoing, PeerIdentity};
use crate::message::{Sequenced, ToEdge, ToNode};

/// Wait after the system refused to accept: it is out of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Largest header list of a request, in bytes.
const MAX_REQUEST_HEADERS: u32 = 16 * 1024;

/// What gives the TLS configuration of the next connection.
type ConfigOf = Arc<dyn Fn() -> Arc<rustls::ServerConfig> + Send + Sync>;
/// Who is told of connections that could not be made.
type OnFailure = Box<dyn Fn(&PeerIdentity, &HandshakeError) + Send + Sync>;

/// Takes the connections of Nodes.
pub struct GrpcListener {
    listener: TcpListener,
    tls: Option<ConfigOf>,
    on_failure: OnFailure,
    congestion: Congestion,
}

impl fmt::Debug for GrpcListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcListener")
            .field("address", &self.listener.local_addr().ok())
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

impl GrpcListener {
    /// Takes connections without TLS.
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, tls: None, on_failure: Box::new(|_, _| {}), congestion: Congestion::System }
    }

    /// With TLS. The configuration's ALPN list is set to HTTP/2; whether certificates of clients are asked for and checked
    /// is its own. A workload identity is read out of a certificate that it has verified: see [`NodeVerifier`](super::NodeVerifier).
    #[must_use]
    pub fn with_tls(self, config: Arc<rustls::ServerConfig>) -> Self {
        let mut config = Arc::unwrap_or_clone(config);
        config.alpn_protocols = vec![ALPN.to_vec()];
        let config = Arc::new(config);
        self.with_tls_from(move || Arc::clone(&config))
    }

    /// The same with a configuration that is asked for before every handshake, so that certificates and roots can be renewed.
    /// Its ALPN list must be `h2`, and it must send no tickets: a resumed session skips the check of its certificate.
    #[must_use]
    pub fn with_tls_from(mut self, config: impl Fn() -> Arc<rustls::ServerConfig> + Send + Sync + 'static) -> Self {
        self.tls = Some(Arc::new(config));
        self
    }

    /// With somebody who is told of each connection that failed before it had a session. Called within the connection's task:
    /// it must return at once.
    #[must_use]
    pub fn with_failures(mut self, told: impl Fn(&PeerIdentity, &HandshakeError) + Send + Sync + 'static) -> Self {
        self.on_failure = Box::new(told);
        self
    }

    /// With this congestion control of its connections, where the system allows it. The system's own without this.
    #[must_use]
    pub const fn with_congestion(mut self, congestion: Congestion) -> Self {
        self.congestion = congestion;
        self
    }

    /// Takes connections until `shutdown`, then waits for those that are open. `on_link` gets each link and must return at
    /// once: it is the place to spawn a session.
    ///
    /// Dropping the future closes every connection.
    pub async fn serve(self, on_link: impl Fn(EdgeLink) + Send + Sync + 'static, shutdown: CancellationToken) {
        let Self { listener, tls, on_failure, congestion } = self;
        let handler = Handler { on_link: Box::new(on_link), congestion, shutdown: shutdown.clone() };
        let (handler, on_failure) = (Arc::new(handler), Arc::new(on_failure));
        let handshakes = Arc::new(Semaphore::new(ACCEPT_QUEUE));
        let (seats, mut connections) = (Seats::default(), JoinSet::new());
        loop {
            // Whoever finds no place waits in the system's queue.
            let accepted = async {
                let permit = Arc::clone(&handshakes).acquire_owned().await.ok()?;
                Some((permit, listener.accept().await))
            };
            let (permit, accepted) = tokio::select! {
                () = shutdown.cancelled() => break,
                _ = connections.join_next(), if !connections.is_empty() => continue,
                accepted = accepted => match accepted {
                    Some(accepted) => accepted,
                    None => break,
                },
            };
            match accepted {
                Ok((socket, address)) => {
                    let Some(seat) = seats.take(address.ip()) else {
                        tracing::debug!(%address, "a connection was closed: its address has too many in handshake");
                        continue;
                    };
                    let place = Place { _permit: permit, _seat: Some(seat) };
                    let handler = Arc::clone(&handler);
                    let (tls, on_failure) = (tls.clone(), Arc::clone(&on_failure));
                    connections.spawn(async move {
                        let peer = PeerIdentity::new(Some(address), None);
                        match handler.connection(socket, tls, peer.clone(), place).await {
                            Ok(()) => {}
                            Err(Broken::Early(error)) => on_failure(&peer, &error),
                            Err(Broken::Late(error)) => {
                                tracing::debug!(%address, reason = %error, "a connection was closed");
                            }
                        }
                    });
                }
                Err(error) => {
                    drop(permit);
                    tracing::warn!(reason = %reason::of(&error), "no connection could be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(listener);
        while connections.join_next().await.is_some() {}
    }
}

/// Takes connections on `listener` until `shutdown`, with TLS if it is given: see [`GrpcListener`].
pub async fn serve_edge(
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    on_link: impl Fn(EdgeLink) + Send + Sync + 'static,
    shutdown: CancellationToken,
) {
    let listener = GrpcListener::new(listener);
    let listener = match tls {
        Some(config) => listener.with_tls(config),
        None => listener,
    };
    listener.serve(on_link, shutdown).await;
}

/// Serves one connection that the caller has accepted in its own way: a proxy, a tunnel, a simulated network. TLS, if any, is
/// the caller's. Ends with the connection, or soon after `shutdown`.
pub async fn serve_stream<S>(
    stream: S,
    peer: PeerIdentity,
    on_link: impl Fn(EdgeLink) + Send + Sync + 'static,
    shutdown: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let handler = Handler { on_link: Box::new(on_link), congestion: Congestion::System, shutdown };
    let Ok(permit) = Arc::new(Semaphore::new(1)).acquire_owned().await else { return };
    let place = Place { _permit: permit, _seat: None };
    if let Err(Broken::Early(error) | Broken::Late(error)) = Arc::new(handler).http2(stream, peer, place).await {
        tracing::debug!(reason = %error, "a connection was closed");
    }
}

/// A connection's place among those in handshake; given back on drop.
struct Place {
    _permit: OwnedSemaphorePermit,
    _seat: Option<Seat>,
}

/// How many connections of each address are in handshake. At most [`ACCEPT_QUEUE`] addresses, as each has one.
#[derive(Debug, Clone, Default)]
struct Seats(Arc<Mutex<HashMap<IpAddr, usize>>>);

#[derive(Debug)]
struct Seat {
    seats: Seats,
    address: IpAddr,
}

impl Seats {
    /// A seat, unless the address has [`HANDSHAKES_PER_ADDRESS`]: one address must not keep all Nodes out.
    fn take(&self, address: IpAddr) -> Option<Seat> {
        let address = match address.to_canonical() {
            IpAddr::V4(_) => address.to_canonical(),
            // Whoever has one address of a network of 64 bits has all of them.
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        };
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let here = taken.entry(address).or_insert(0);
        if *here >= HANDSHAKES_PER_ADDRESS {
            return None;
        }
        *here += 1;
        drop(taken);
        Some(Seat { seats: self.clone(), address })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get_mut(&self.address) {
            Some(count) if *count > 1 => *count -= 1,
            Some(_) | None => {
                taken.remove(&self.address);
            }
        }
    }
}

struct Handler {
    on_link: Box<dyn Fn(EdgeLink) + Send + Sync>,
    congestion: Congestion,
    shutdown: CancellationToken,
}

/// A connection broke before it had a session, or afterwards.
enum Broken {
    Early(HandshakeError),
    Late(HandshakeError),
}

impl Handler {
    async fn connection(
        self: &Arc<Self>,
        socket: TcpStream,
        tls: Option<ConfigOf>,
        mut peer: PeerIdentity,
        place: Place,
    ) -> Result<(), Broken> {
        let early = |error: std::io::Error| Broken::Early(reason::of(&error));
        prepare(&socket, self.congestion).map_err(early)?;
        let Some(tls) = tls else {
            return self.http2(socket, peer, place).await;
        };
        let stream = timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls()).accept(socket))
            .await
            .map_err(|_| Broken::Early(HandshakeFailure::TimedOut.into()))?
            .map_err(early)?;
        peer.identity = workload::verified_node(stream.get_ref().1.peer_certificates());
        self.http2(stream, peer, place).await
    }

    async fn http2<S>(self: &Arc<Self>, stream: S, peer: PeerIdentity, place: Place) -> Result<(), Broken>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let sessions = Arc::new(Sessions::default());
        let service = hyper::service::service_fn(|request: http::Request<RequestBody>| {
            let call = Accepted { handler: Arc::clone(self), peer: peer.clone(), sessions: Arc::clone(&sessions) };
            async move { Ok::<_, std::convert::Infallible>(call.answer(request).await) }
        });
        let connection = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .adaptive_window(false)
            .initial_connection_window_size(H2_CONNECTION_WINDOW)
            .initial_stream_window_size(H2_STREAM_WINDOW)
            .keep_alive_interval(None)
            .max_send_buf_size(H2_SEND_BUFFER)
            .max_concurrent_streams(SESSIONS_PER_CONNECTION)
            .max_header_list_size(MAX_REQUEST_HEADERS)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        tokio::select! {
            ended = &mut connection => return ended.map_err(|error| Broken::Early(reason::of(&error))),
            () = sessions.began.cancelled() => drop(place),
            () = sleep(HANDSHAKE_TIMEOUT) => return Err(Broken::Early(HandshakeFailure::NoSession.into())),
            () = self.shutdown.cancelled() => return Ok(()),
        }
        // From here on the connection belongs to its sessions.
        tokio::select! {
            ended = &mut connection => return ended.map_err(|error| Broken::Late(reason::of(&error))),
            () = sessions.ended.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        match timeout(CLOSE_LINGER, connection).await {
            Ok(ended) => ended.map_err(|error| Broken::Late(reason::of(&error))),
            Err(_) => Ok(()),
        }
    }
}

/// Sessions of one connection: it ends with the last one.
#[derive(Debug, Default)]
struct Sessions {
    open: AtomicUsize,
    began: CancellationToken,
    ended: CancellationToken,
}

#[derive(Debug)]
struct Session(Arc<Sessions>);

impl Session {
    fn new(sessions: Arc<Sessions>) -> Self {
        sessions.open.fetch_add(1, Ordering::AcqRel);
        sessions.began.cancel();
        Self(sessions)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.ended.cancel();
        }
    }
}

/// A call that arrived.
struct Accepted {
    handler: Arc<Handler>,
    peer: PeerIdentity,
    sessions: Arc<Sessions>,
}

impl Accepted {
    async fn answer(self, request: http::Request<RequestBody>) -> http::Response<Body> {
        if request.uri().path() != SESSION {
            return Status::unimplemented("no such call").into_http();
        }
        let shared = Arc::new(Shared::default());
        let codec = EnvelopeCodec::<ToEdge, ToNode>::new(&shared);
        let mut server =
            Grpc::new(codec).max_decoding_message_size(MAX_ENVELOPE).max_encoding_message_size(MAX_CONFIG_ENVELOPE);
        server.streaming(Call { accepted: self, shared }, request).await
    }
}

struct Call {
    accepted: Accepted,
    shared: Arc<Shared>,
}

impl StreamingService<Decoded<ToEdge>> for Call {
    type Response = Sequenced<ToNode>;
    type ResponseStream = Responses;
    type Future = std::future::Ready<Result<Response<Responses>, Status>>;

    /// Answers at once: the Node waits for the headers.
    fn call(&mut self, request: Request<Streaming<Decoded<ToEdge>>>) -> Self::Future {
        let (start, started) = oneshot::channel();
        let link = GrpcEdgeLink {
            peer: self.accepted.peer.clone(),
            requests: request.into_inner(),
            start,
            guard: Guard(Arc::clone(&self.shared)),
            session: Session::new(Arc::clone(&self.accepted.sessions)),
        };
        (self.accepted.handler.on_link)(Box::new(link));
        std::future::ready(Ok(Response::new(Responses::Waiting(started))))
    }
}

/// What goes to the Node, from the moment the link is started.
enum Responses {
    Waiting(oneshot::Receiver<Written<ToNode>>),
    Writing(Written<ToNode>),
    Ended,
}

impl Stream for Responses {
    type Item = Result<Sequenced<ToNode>, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match &mut *self {
                Self::Waiting(started) => match ready!(Pin::new(started).poll(cx)) {
                    Ok(written) => *self = Self::Writing(written),
                    // The link was dropped before it was started.
                    Err(_) => *self = Self::Ended,
                },
                Self::Writing(written) => {
                    let message = ready!(Pin::new(written).poll_next(cx));
                    if message.is_none() {
                        *self = Self::Ended;
                    }
                    return Poll::Ready(message.map(Ok));
                }
                Self::Ended => return Poll::Ready(None),
            }
        }
    }
}

struct GrpcEdgeLink {
    peer: PeerIdentity,
    requests: Streaming<Decoded<ToEdge>>,
    start: oneshot::Sender<Written<ToNode>>,
    guard: Guard,
    session: Session,
}

impl fmt::Debug for GrpcEdgeLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcEdgeLink").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Link for GrpcEdgeLink {
    type In = ToEdge;
    type Out = ToNode;

    fn peer(&self) -> PeerIdentity {
        self.peer.clone()
    }

    fn start(self: Box<Self>, outgoing: Outgoing<ToNode>) -> Incoming<ToEdge> {
        let Self { requests, start, guard, session, .. } = *self;
        // If the call is gone already, the incoming stream says so.
        let _ = start.send(Written::new(outgoing, &guard.0));
        Box::pin(Received { requests: Some(requests), guard, _session: session })
    }
}

/// What arrives. Dropping it ends the answer, and with the last session the connection.
struct Received {
    requests: Option<Streaming<Decoded<ToEdge>>>,
    guard: Guard,
    _session: Session,
}

impl Stream for Received {
    type Item = Decoded<ToEdge>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { requests, guard, .. } = &mut *self;
        let Some(stream) = requests else { return Poll::Ready(None) };
        let (item, last) = ready!(poll_received(stream, &guard.0, cx));
        if last {
            *requests = None;
        }
        Poll::Ready(item)
    }
}

#[cfg(test)]
mod seats {
    use super::*;

    #[test]
    fn one_address_takes_some_of_the_seats_and_gives_them_back() {
        // REG-8, SEC-3
        let seats = Seats::default();
        for (one, other) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8:0:1::1")] {
            let (one, other): (IpAddr, IpAddr) = (one.parse().unwrap(), other.parse().unwrap());
            let mut held: Vec<_> = (0..HANDSHAKES_PER_ADDRESS).map(|_| seats.take(one).unwrap()).collect();
            assert!(seats.take(one).is_none() && seats.take(other).is_some());
            held.pop();
            assert!(seats.take(one).is_some());
        }
        let mapped = seats.take("::ffff:192.0.2.1".parse().unwrap()).unwrap();
        assert_eq!(mapped.address, "192.0.2.1".parse::<IpAddr>().unwrap());
        drop(mapped);
        assert!(seats.0.lock().unwrap().is_empty(), "nothing is kept of who is gone");
        let neighbour = seats.take("2001:db8::2".parse().unwrap()).unwrap();
        assert_eq!(neighbour.address, "2001:db8::".parse::<IpAddr>().unwrap());
    }
}
