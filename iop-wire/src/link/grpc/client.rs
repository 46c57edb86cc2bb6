//! Decides how a Node dials an Edge: its own TCP connection, TLS by rustls, one call.

use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use http::Uri;
use http::uri::PathAndQuery;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls_pki_types::{ServerName, UnixTime};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::{Request, Response, Status, Streaming};

use super::codec::EnvelopeCodec;
use super::{
    ALPN, Congestion, Decoded, Guard, NodeTls, SESSION, Shared, Written, link_error, poll_received, prepare, reason,
};
use crate::limits::{
    CLOSE_LINGER, DIAL_TIMEOUT, H2_CONNECTION_WINDOW, H2_SEND_BUFFER, H2_STREAM_WINDOW, MAX_CONFIG_ENVELOPE,
    MAX_ENVELOPE,
};
use crate::link::{
    ConnectError, Connector, HandshakeError, HandshakeFailure, Incoming, Link, LinkError, NodeLink, Outgoing,
    PeerIdentity,
};
use crate::message::{ToEdge, ToNode};

/// Dials one Edge. Cheap to clone; every dial resolves the name again.
#[derive(Clone)]
pub struct GrpcConnector {
    address: String,
    authority: Uri,
    tls: Option<Tls>,
    congestion: Congestion,
}

/// What gives the TLS of the next dial.
type TlsOf = Arc<dyn Fn() -> NodeTls + Send + Sync>;

#[derive(Clone)]
struct Tls {
    next: TlsOf,
    name: ServerName<'static>,
}

impl fmt::Debug for GrpcConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.tls.as_ref().map(|tls| &tls.name);
        f.debug_struct("GrpcConnector")
            .field("address", &self.address)
            .field("server_name", &name)
            .finish_non_exhaustive()
    }
}

impl GrpcConnector {
    /// Dials `address` (`host:port`) without TLS.
    ///
    /// # Errors
    /// [`ConnectError::Fatal`] when the address has no host or port.
    pub fn plaintext(address: impl Into<String>) -> Result<Self, ConnectError> {
        let address = address.into();
        let authority = authority("http", &address)?;
        Ok(Self { address, authority, tls: None, congestion: Congestion::System })
    }

    /// Dials `address` (`host:port`) with TLS; the Edge's certificate must be valid for `server_name`, or for the host of
    /// the address without one. The configuration's ALPN list is set to HTTP/2. A link has an identity of the Edge only with
    /// [`NodeTls::identified`].
    ///
    /// # Errors
    /// [`ConnectError::Fatal`] when the address has no host or port, or the name is no DNS name or IP address.
    pub fn tls(
        address: impl Into<String>,
        tls: impl Into<NodeTls>,
        server_name: Option<&str>,
    ) -> Result<Self, ConnectError> {
        let NodeTls { config, edge } = tls.into();
        let mut config = Arc::unwrap_or_clone(config);
        config.alpn_protocols = vec![ALPN.to_vec()];
        let tls = NodeTls { config: Arc::new(config), edge };
        Self::tls_from(address, move || tls.clone(), server_name)
    }

    /// The same with TLS that is asked for before every dial, so that certificates can be renewed. Its ALPN list must be `h2`, and TLS 1.3 without tickets is advised.
    ///
    /// # Errors
    /// As [`tls`](Self::tls).
    pub fn tls_from(
        address: impl Into<String>,
        next: impl Fn() -> NodeTls + Send + Sync + 'static,
        server_name: Option<&str>,
    ) -> Result<Self, ConnectError> {
        let address = address.into();
        let authority = authority("https", &address)?;
        let host = authority.host().unwrap_or_default();
        let name = server_name.unwrap_or_else(|| host.trim_start_matches('[').trim_end_matches(']'));
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| ConnectError::Fatal(format!("{name:?} is no name that a certificate can be for")))?;
        let tls = Some(Tls { next: Arc::new(next), name });
        Ok(Self { address, authority, tls, congestion: Congestion::System })
    }

    /// With this congestion control of its sockets, where the system allows it. The system's own without this.
    #[must_use]
    pub const fn with_congestion(mut self, congestion: Congestion) -> Self {
        self.congestion = congestion;
        self
    }

    /// One link over a stream that the caller has opened in its own way: a proxy, a tunnel, a simulated network. TLS, if any,
    /// is the caller's.
    ///
    /// # Errors
    /// [`ConnectError::Handshake`] when the HTTP/2 handshake fails.
    pub async fn over<S>(&self, stream: S, peer: PeerIdentity) -> Result<NodeLink, ConnectError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.open(stream, peer).await.map_err(ConnectError::Handshake)
    }

    async fn dial(&self) -> Result<NodeLink, HandshakeError> {
        let socket = TcpStream::connect(&self.address).await.map_err(|error| reason::of(&error))?;
        prepare(&socket, self.congestion).map_err(|error| reason::of(&error))?;
        let mut peer = PeerIdentity::new(socket.peer_addr().ok(), None);
        let Some(Tls { next, name }) = &self.tls else {
            return self.open(socket, peer).await;
        };
        let NodeTls { config, edge } = next();
        let connector = TlsConnector::from(config);
        let stream = connector.connect(name.clone(), socket).await.map_err(|error| reason::of(&error))?;
        if stream.get_ref().1.alpn_protocol() != Some(ALPN) {
            return Err(HandshakeFailure::NotHttp2.into());
        }
        if let Some(edge) = edge {
            let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
            peer.identity = Some(edge.prove(chain, name, UnixTime::now())?);
        }
        self.open(stream, peer).await
    }

    async fn open<S>(&self, stream: S, peer: PeerIdentity) -> Result<NodeLink, HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .adaptive_window(false)
            .initial_connection_window_size(H2_CONNECTION_WINDOW)
            .initial_stream_window_size(H2_STREAM_WINDOW)
            .keep_alive_interval(None)
            .max_send_buf_size(H2_SEND_BUFFER)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| reason::of(&error))?;
        let shared = Arc::new(Shared::default());
        let closed = shared.closed.clone();
        // The only task of a link. It ends with its connection, or soon after the link was dropped.
        tokio::spawn(async move {
            let mut connection = pin!(connection);
            let ended = tokio::select! {
                ended = &mut connection => Some(ended),
                () = closed.cancelled() => timeout(CLOSE_LINGER, connection).await.ok(),
            };
            if let Some(Err(error)) = ended {
                tracing::debug!(reason = %reason::of(&error), "the connection to the Edge broke");
            }
        });
        let guard = Guard(shared);
        Ok(Box::new(GrpcNodeLink { peer, sender, authority: self.authority.clone(), guard }))
    }
}

fn authority(scheme: &str, address: &str) -> Result<Uri, ConnectError> {
    let uri: Option<Uri> = format!("{scheme}://{address}/").parse().ok();
    uri.filter(|uri| uri.host().is_some_and(|host| !host.is_empty()) && uri.port().is_some() && uri.path() == "/")
        .ok_or_else(|| ConnectError::Fatal(format!("{address:?} is no address of the form host:port")))
}

#[iop_execution::async_trait]
impl Connector for GrpcConnector {
    async fn connect(&self) -> Result<NodeLink, ConnectError> {
        match timeout(DIAL_TIMEOUT, self.dial()).await {
            Ok(Ok(link)) => Ok(link),
            Ok(Err(error)) => Err(ConnectError::Handshake(error)),
            Err(_) => Err(ConnectError::Handshake(HandshakeFailure::TimedOut.into())),
        }
    }
}

struct GrpcNodeLink {
    peer: PeerIdentity,
    sender: SendRequest<Body>,
    authority: Uri,
    guard: Guard,
}

impl fmt::Debug for GrpcNodeLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcNodeLink").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Link for GrpcNodeLink {
    type In = ToNode;
    type Out = ToEdge;

    fn peer(&self) -> PeerIdentity {
        self.peer.clone()
    }

    fn start(self: Box<Self>, outgoing: Outgoing<ToEdge>) -> Incoming<ToNode> {
        let Self { sender, authority, guard, .. } = *self;
        let written = Written::new(outgoing, &guard.0);
        let codec = EnvelopeCodec::<ToNode, ToEdge>::new(&guard.0);
        let mut client = Grpc::with_origin(Calls(sender), authority)
            .max_decoding_message_size(MAX_CONFIG_ENVELOPE)
            .max_encoding_message_size(MAX_ENVELOPE);
        // The answer's headers may come after the first message: the call is a part of the incoming stream.
        let call = async move {
            client.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
            client.streaming(Request::new(written), PathAndQuery::from_static(SESSION), codec).await
        };
        Box::pin(Received { state: State::Calling(Box::pin(call)), guard })
    }
}

type Call = Pin<Box<dyn Future<Output = Result<Response<Streaming<Decoded<ToNode>>>, Status>> + Send>>;

enum State {
    Calling(Call),
    Receiving(Box<Streaming<Decoded<ToNode>>>),
    Ended,
}

/// What arrives. Dropping it drops the call, which resets its stream, and ends the connection.
struct Received {
    state: State,
    guard: Guard,
}

impl Stream for Received {
    type Item = Decoded<ToNode>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Self { state, guard } = &mut *self;
            match state {
                State::Calling(call) => match call.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(response)) => *state = State::Receiving(Box::new(response.into_inner())),
                    Poll::Ready(Err(status)) => {
                        let error: LinkError = link_error(&status, &guard.0);
                        *state = State::Ended;
                        return Poll::Ready(Some(Err(error)));
                    }
                },
                State::Receiving(stream) => {
                    let Poll::Ready((item, last)) = poll_received(stream, &guard.0, cx) else { return Poll::Pending };
                    if last {
                        *state = State::Ended;
                    }
                    return Poll::Ready(item);
                }
                State::Ended => return Poll::Ready(None),
            }
        }
    }
}

/// A connection as a service of calls.
struct Calls(SendRequest<Body>);

impl tower_service::Service<http::Request<Body>> for Calls {
    type Response = http::Response<hyper::body::Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}
