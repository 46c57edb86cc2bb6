//! Certificates for tests, and what an operator reads when TLS fails.

use std::sync::Arc;

use bytes::Bytes;
use iop_execution::{AdapterKey, ProviderId, Redacted, RunId, Target};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::*;
use crate::message::{DispatchHead, RequestChunk, RunDispatch};

pub(super) struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    pub(super) fn new() -> Self {
        Self::named("CA")
    }

    /// Chains are built by name: two authorities of one name would differ in their signatures only.
    fn named(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        roots
    }

    fn issue(
        &self,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn server_with(
    (chain, key): (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    clients: Option<&Ca>,
) -> Arc<ServerConfig> {
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let builder = match clients {
        Some(ca) => {
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(ca.roots()), provider()).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    Arc::new(builder.with_single_cert(chain, key).unwrap())
}

pub(super) fn server(ca: &Ca, names: &[&str], clients: Option<&Ca>) -> Arc<ServerConfig> {
    server_with(ca.issue(names, |_| {}), clients)
}

fn client(ca: &Ca, certificate: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(ca.roots());
    Arc::new(match certificate {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
        None => builder.with_no_client_auth(),
    })
}

pub(super) fn connector(server: &Server, ca: &Ca, name: &str) -> GrpcConnector {
    GrpcConnector::tls(server.address.to_string(), client(ca, None), Some(name)).unwrap()
}

pub(super) fn request(tag: u8) -> ToNode {
    ToNode::Run(RunDispatch {
        head: DispatchHead {
            run_id: RunId::from_bytes([tag; 16]),
            run: RunNumber(0),
            provider_id: ProviderId::new("p").unwrap(),
            adapter: AdapterKey::new("a").unwrap(),
            target: Target::new("t").unwrap(),
            session_id: None,
            background: false,
            stream: true,
            response_stall_timeout_ms: 0,
            deadline_ms: 0,
            body_len: 0,
            window: INITIAL_WINDOW,
            prompt_tokens_estimate: 0,
            credential_lease: Redacted::default(),
            credential_scope: None,
        },
    })
}

pub(super) fn chunk(len: usize) -> ToNode {
    ToNode::Chunk(RequestChunk { run: RunNumber(0), data: Bytes::from(vec![0; len]), last: false })
}

async fn refusal(connector: &GrpcConnector) -> String {
    match soon(connector.connect()).await {
        Ok(link) => {
            // A client of TLS 1.3 learns of a refused certificate only after its own handshake.
            let outbox = OutboxHandle::<ToEdge>::new();
            outbox.push_control(hello()).unwrap();
            match soon(link.start(outbox.outgoing()).next()).await {
                Some(Err(LinkError::Transport(reason))) => reason,
                other => panic!("{other:?}"),
            }
        }
        Err(ConnectError::Retryable(reason)) => reason,
        Err(other) => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_refused_server_certificate_is_explained() {
    // NOD-2
    let (ca, other) = (Ca::new(), Ca::named("other"));
    let server = Server::start(|listener| listener.with_tls(server(&ca, &["edge.test"], None))).await;
    let wrong_name = refusal(&connector(&server, &ca, "other.test")).await;
    assert_eq!(wrong_name, "the peer's certificate is for another name");
    let unknown = refusal(&connector(&server, &other, "edge.test")).await;
    assert_eq!(unknown, "the peer's certificate was issued by an unknown CA");
    server.stop().await;

    let expired = ca.issue(&["edge.test"], |params| params.not_after = rcgen::date_time_ymd(2001, 1, 1));
    let server = Server::start(|listener| listener.with_tls(server_with(expired, None))).await;
    assert_eq!(refusal(&connector(&server, &ca, "edge.test")).await, "the peer's certificate has expired");
    server.stop().await;

    let early = ca.issue(&["edge.test"], |params| params.not_before = rcgen::date_time_ymd(4000, 1, 1));
    let server = Server::start(|listener| listener.with_tls(server_with(early, None))).await;
    assert_eq!(refusal(&connector(&server, &ca, "edge.test")).await, "the peer's certificate is not valid yet");
    server.stop().await;
}

#[tokio::test]
async fn a_wrong_kind_of_server_is_explained() {
    // NOD-2
    let ca = Ca::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let refused = refusal(&plain(address)).await;
    assert_eq!(refused, "connection refused: nothing listens at that address");

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answering = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        socket
    });
    let connector = GrpcConnector::tls(address.to_string(), client(&ca, None), Some("edge.test")).unwrap();
    assert_eq!(refusal(&connector).await, "the peer does not speak TLS");
    drop(answering);
}

#[tokio::test]
async fn a_client_without_the_right_certificate_is_told() {
    // CRD-10
    let (ca, other) = (Ca::new(), Ca::named("other"));
    let server = Server::start(|listener| listener.with_tls(server(&ca, &["edge.test"], Some(&ca)))).await;
    assert_eq!(refusal(&connector(&server, &ca, "edge.test")).await, "the peer requires a client certificate");
    let foreign = client(&ca, Some(other.issue(&["node.test"], |_| {})));
    let foreign = GrpcConnector::tls(server.address.to_string(), foreign, Some("edge.test")).unwrap();
    assert_eq!(refusal(&foreign).await, "the peer does not know the CA of our certificate");
    server.stop().await;
}

#[tokio::test]
async fn the_identity_of_a_verified_certificate_is_the_peer_s() {
    // CRD-10
    let ca = Ca::new();
    let config = server(&ca, &["edge.test"], Some(&ca));
    let mut server = Server::start(|listener| {
        listener.with_tls(config).with_identity(|chain| Some(format!("{} certificate", chain.len())))
    })
    .await;
    let own = client(&ca, Some(ca.issue(&["node.test"], |_| {})));
    let connector = GrpcConnector::tls(server.address.to_string(), own, Some("edge.test")).unwrap();
    let outbox = OutboxHandle::<ToEdge>::new();
    let mut at_node = connector.connect().await.unwrap().start(outbox.outgoing());
    let edge = tokio::select! {
        edge = server.links.recv() => edge.unwrap(),
        item = at_node.next() => panic!("{item:?}"),
    };
    assert_eq!(edge.peer().identity.as_deref(), Some("1 certificate"));
    drop((edge, at_node));
    server.stop().await;
}

#[test]
fn addresses_and_names_are_checked_before_the_first_dial() {
    let ca = Ca::new();
    for address in ["", "edge", "edge:", ":443", "edge:99999", "http://edge:1", "edge:1/path", "a b:1"] {
        assert!(matches!(GrpcConnector::plaintext(address), Err(ConnectError::Fatal(_))), "{address:?}");
    }
    for address in ["edge.test:443", "127.0.0.1:1", "[::1]:1"] {
        assert!(GrpcConnector::plaintext(address).is_ok(), "{address:?}");
        assert!(GrpcConnector::tls(address, client(&ca, None), None).is_ok(), "{address:?}");
    }
    assert!(matches!(GrpcConnector::tls("e:1", client(&ca, None), Some("no name")), Err(ConnectError::Fatal(_))));
}
