//! Certificates for tests, and what an operator reads when TLS fails.

use std::sync::Arc;

use bytes::Bytes;
use iop_execution::{AdapterKey, ProviderId, Redacted, RunId, Target};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::*;
use crate::identity::{TrustDomain, WorkloadIdentity};
use crate::link::{HandshakeError, HandshakeFailure};
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

fn domain() -> TrustDomain {
    TrustDomain::new("test").unwrap()
}

fn uri(text: &str) -> SanType {
    SanType::URI(text.try_into().unwrap())
}

fn server_with(
    (chain, key): (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    clients: Option<&Ca>,
) -> Arc<ServerConfig> {
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let builder = match clients {
        Some(ca) => {
            let verifier = NodeVerifier::new(Arc::new(ca.roots()), domain(), provider()).unwrap();
            builder.with_client_cert_verifier(Arc::new(verifier))
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

fn edge_verifier(ca: &Ca, domain: TrustDomain) -> Arc<EdgeVerifier> {
    let wanted = WantedEdge::OfDomain(domain);
    Arc::new(EdgeVerifier::new(Arc::new(ca.roots()), wanted, provider()).unwrap())
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

async fn refusal(connector: &GrpcConnector) -> HandshakeFailure {
    match soon(connector.connect()).await {
        Ok(link) => {
            // A client of TLS 1.3 learns of a refused certificate only after its own handshake.
            let outbox = OutboxHandle::<ToEdge>::new();
            outbox.push_control(hello()).unwrap();
            match soon(link.start(outbox.outgoing()).next()).await {
                Some(Err(LinkError::Handshake(error))) => error.failure,
                other => panic!("{other:?}"),
            }
        }
        Err(ConnectError::Handshake(error)) => {
            assert!(error.to_string().starts_with(error.failure.message()));
            error.failure
        }
        Err(other) => panic!("{other:?}"),
    }
}

/// A server that says why handshakes failed.
async fn telling(config: Arc<ServerConfig>) -> (Server, mpsc::UnboundedReceiver<HandshakeError>) {
    let (told, failures) = mpsc::unbounded_channel();
    let server = Server::start(|listener| {
        listener.with_tls(config).with_failures(move |peer, error| {
            assert!(peer.address.is_some());
            told.send(error.clone()).unwrap();
        })
    });
    (server.await, failures)
}

#[tokio::test]
async fn a_refused_server_certificate_is_explained_on_both_ends() {
    // NOD-2, CRD-10
    let (ca, other) = (Ca::new(), Ca::named("other"));
    let (server, mut told) = telling(server(&ca, &["edge.test"], None)).await;
    assert_eq!(refusal(&connector(&server, &ca, "other.test")).await, HandshakeFailure::PeerWrongName);
    assert_eq!(told.recv().await.unwrap().failure, HandshakeFailure::OurRefused);
    assert_eq!(refusal(&connector(&server, &other, "edge.test")).await, HandshakeFailure::PeerUnknownCa);
    assert_eq!(told.recv().await.unwrap().failure, HandshakeFailure::OurUnknownCa);
    server.stop().await;

    let expired = ca.issue(&["edge.test"], |params| params.not_after = rcgen::date_time_ymd(2001, 1, 1));
    let early = ca.issue(&["edge.test"], |params| params.not_before = rcgen::date_time_ymd(4000, 1, 1));
    let wrong = ca.issue(&["edge.test"], |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    });
    let authority = ca.issue(&["edge.test"], |params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
    for (certificate, here, there) in [
        (expired, HandshakeFailure::PeerExpired, HandshakeFailure::OurNotValidNow),
        (early, HandshakeFailure::PeerNotYetValid, HandshakeFailure::OurNotValidNow),
        (wrong, HandshakeFailure::PeerWrongPurpose, HandshakeFailure::OurWrongPurpose),
        (authority, HandshakeFailure::PeerWrongPurpose, HandshakeFailure::OurIdentityRefused),
    ] {
        let (server, mut told) = telling(server_with(certificate, None)).await;
        assert_eq!(refusal(&connector(&server, &ca, "edge.test")).await, here);
        assert_eq!(told.recv().await.unwrap().failure, there, "{here}");
        server.stop().await;
    }
}

#[tokio::test]
async fn a_wrong_kind_of_server_is_explained() {
    // NOD-2
    let ca = Ca::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    assert_eq!(refusal(&plain(address)).await, HandshakeFailure::ConnectionRefused);

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answering = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        socket
    });
    let connector = GrpcConnector::tls(address.to_string(), client(&ca, None), Some("edge.test")).unwrap();
    assert_eq!(refusal(&connector).await, HandshakeFailure::NotTls);
    drop(answering);
}

/// A Node's certificate with these URI names.
fn node_certificate(ca: &Ca, uris: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Arc<ClientConfig> {
    let certificate = ca.issue(&["node.test"], |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.subject_alt_names.extend(uris.iter().map(|text| uri(text)));
        change(params);
    });
    client(ca, Some(certificate))
}

const NODE: &str = "spiffe://test/iop/node/n1";
const EDGE: &str = "spiffe://test/iop/edge/e1";

#[tokio::test]
async fn a_node_s_certificate_is_good_in_every_respect_or_refused_and_both_ends_say_why() {
    // CRD-10, REG-4
    let (ca, other) = (Ca::new(), Ca::named("other"));
    let good = &[NODE][..];
    let foreign = {
        // Trusts the right CA and shows a certificate of another one.
        let certificate = other.issue(&[], |params| params.subject_alt_names.push(uri(NODE)));
        client(&ca, Some(certificate))
    };
    use HandshakeFailure as F;
    let cases = [
        ("other CA", foreign, F::PeerUnknownCa, F::OurUnknownCa),
        (
            "wrong use",
            node_certificate(&ca, good, |params| {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]
            }),
            F::PeerWrongPurpose,
            F::OurWrongPurpose,
        ),
        (
            "expired",
            node_certificate(&ca, good, |params| params.not_after = rcgen::date_time_ymd(2001, 1, 1)),
            F::PeerExpired,
            F::OurNotValidNow,
        ),
        (
            "future",
            node_certificate(&ca, good, |params| params.not_before = rcgen::date_time_ymd(4000, 1, 1)),
            F::PeerNotYetValid,
            F::OurNotValidNow,
        ),
        (
            "two URI names",
            node_certificate(&ca, &[NODE, "spiffe://test/iop/node/n2"], |_| {}),
            F::PeerIdentityAmbiguous,
            F::OurIdentityRefused,
        ),
        (
            "the same URI name twice",
            node_certificate(&ca, &[NODE, NODE], |_| {}),
            F::PeerIdentityAmbiguous,
            F::OurIdentityRefused,
        ),
        (
            "no URI name, and a common name that looks like one",
            node_certificate(&ca, &[], |params| params.distinguished_name.push(DnType::CommonName, NODE)),
            F::PeerIdentityMissing,
            F::OurIdentityRefused,
        ),
        (
            "another scheme",
            node_certificate(&ca, &["https://test/iop/node/n1"], |_| {}),
            F::PeerIdentityMalformed,
            F::OurIdentityRefused,
        ),
        (
            "another trust domain",
            node_certificate(&ca, &["spiffe://else/iop/node/n1"], |_| {}),
            F::PeerIdentityForeign,
            F::OurIdentityRefused,
        ),
        ("an Edge's", node_certificate(&ca, &[EDGE], |_| {}), F::PeerIdentityRole, F::OurIdentityRefused),
        (
            "a CA's",
            node_certificate(&ca, good, |params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained)),
            F::PeerWrongPurpose,
            F::OurIdentityRefused,
        ),
    ];
    let (server, mut told) = telling(server(&ca, &["edge.test"], Some(&ca))).await;
    for (case, config, at_edge, at_node) in cases {
        let connector = GrpcConnector::tls(server.address.to_string(), config, Some("edge.test")).unwrap();
        assert_eq!(refusal(&connector).await, at_node, "{case}");
        assert_eq!(told.recv().await.unwrap().failure, at_edge, "{case}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_identity_of_a_verified_certificate_is_the_peer_s_and_who_shows_none_has_none() {
    // CRD-10
    let ca = Ca::new();
    let edge = ca.issue(&["edge.test"], |params| params.subject_alt_names.push(uri(EDGE)));
    let mut server = Server::start(|listener| listener.with_tls(server_with(edge, Some(&ca)))).await;
    let name = rustls_pki_types::ServerName::try_from("edge.test").unwrap();
    let (now, far) = (rustls_pki_types::UnixTime::now(), std::time::Duration::from_secs(1 << 40));
    let later = rustls_pki_types::UnixTime::since_unix_epoch(far);
    for (config, expected) in [(node_certificate(&ca, &[NODE], |_| {}), Some(NODE)), (client(&ca, None), None)] {
        // A configuration alone proves nothing, whatever stands in the certificate.
        let unasked = GrpcConnector::tls(server.address.to_string(), Arc::clone(&config), Some("edge.test")).unwrap();
        assert_eq!(unasked.connect().await.unwrap().peer().identity, None);
        let tls = NodeTls::identified(config, edge_verifier(&ca, domain()));
        let connector = GrpcConnector::tls(server.address.to_string(), tls, Some("edge.test")).unwrap();
        let outbox = OutboxHandle::<ToEdge>::new();
        let link = connector.connect().await.unwrap();
        let edge = link.peer().identity.unwrap();
        assert_eq!(edge.identity().to_string(), EDGE);
        // CRD-10: what proved it can be looked at again, with other roots, at another time.
        for (verifier, now, failure) in [
            (edge_verifier(&ca, domain()), now, None),
            (edge_verifier(&Ca::named("other"), domain()), now, Some(HandshakeFailure::PeerUnknownCa)),
            (edge_verifier(&ca, domain()), later, Some(HandshakeFailure::PeerExpired)),
            (edge_verifier(&ca, TrustDomain::default()), now, Some(HandshakeFailure::PeerIdentityForeign)),
        ] {
            let checked = verifier.check_again(&edge, &name, now);
            assert_eq!(checked.err().map(|error| error.failure), failure);
        }
        let mut at_node = link.start(outbox.outgoing());
        let edge = tokio::select! {
            edge = server.links.recv() => edge.unwrap(),
            item = at_node.next() => panic!("{item:?}"),
        };
        let shown = edge.peer().identity;
        assert_eq!(shown.as_ref().map(|shown| shown.identity().to_string()).as_deref(), expected);
        if let Some(shown) = shown {
            let same = NodeVerifier::new(Arc::new(ca.roots()), domain(), provider()).unwrap();
            assert_eq!(same.check_again(&shown, now), Ok(()));
            let other = NodeVerifier::new(Arc::new(Ca::named("other").roots()), domain(), provider()).unwrap();
            assert_eq!(other.check_again(&shown, now).unwrap_err().failure, HandshakeFailure::PeerUnknownCa);
            assert_eq!(same.check_again(&shown, later).unwrap_err().failure, HandshakeFailure::PeerExpired);
            let elsewhere = NodeVerifier::new(Arc::new(ca.roots()), TrustDomain::default(), provider()).unwrap();
            assert_eq!(elsewhere.check_again(&shown, now).unwrap_err().failure, HandshakeFailure::PeerIdentityForeign);
        }
        drop((edge, at_node));
    }
    server.stop().await;
}

#[tokio::test]
async fn a_node_takes_the_edge_it_was_told_to_take_and_no_other() {
    // CRD-10
    use HandshakeFailure as F;
    let ca = Ca::new();
    let exactly = || WantedEdge::Exactly(WorkloadIdentity::parse(EDGE).unwrap());
    let any = || WantedEdge::OfDomain(domain());
    for (uris, wanted, expected) in [
        (&[EDGE][..], exactly(), None),
        (&["spiffe://test/iop/edge/other"], any(), None),
        (&["spiffe://test/iop/edge/other"], exactly(), Some(F::PeerIdentityUnexpected)),
        (&["spiffe://else/iop/edge/e1"], any(), Some(F::PeerIdentityForeign)),
        (&["spiffe://else/iop/edge/e1"], exactly(), Some(F::PeerIdentityForeign)),
        (&["spiffe://test/iop/node/e1"], any(), Some(F::PeerIdentityRole)),
        (&[], any(), Some(F::PeerIdentityMissing)),
        (&[EDGE, EDGE], exactly(), Some(F::PeerIdentityAmbiguous)),
        (&["spiffe://test/iop/edge"], exactly(), Some(F::PeerIdentityMalformed)),
    ] {
        let edge =
            ca.issue(&["edge.test"], |params| params.subject_alt_names.extend(uris.iter().map(|text| uri(text))));
        let tls = server_with(edge, None);
        let verifier = Arc::new(EdgeVerifier::new(Arc::new(ca.roots()), wanted, provider()).unwrap());
        // What the connector checks by itself, after the handshake.
        let server = Server::start(|listener| listener.with_tls(Arc::clone(&tls))).await;
        let late = NodeTls::identified(client(&ca, None), Arc::clone(&verifier));
        let late = GrpcConnector::tls(server.address.to_string(), late, Some("edge.test")).unwrap();
        match expected {
            None => drop(soon(late.connect()).await.unwrap()),
            Some(failure) => assert_eq!(refusal(&late).await, failure, "{uris:?}"),
        }
        server.stop().await;
        // And what is checked in the handshake, where both ends are told.
        let (server, mut told) = telling(tls).await;
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        let connector =
            |name| GrpcConnector::tls(server.address.to_string(), Arc::new(config.clone()), Some(name)).unwrap();
        match expected {
            None => drop(soon(connector("edge.test").connect()).await.unwrap()),
            Some(failure) => {
                assert_eq!(refusal(&connector("edge.test")).await, failure, "{uris:?}");
                assert_eq!(told.recv().await.unwrap().failure, F::OurIdentityRefused, "{uris:?}");
            }
        }
        // The name still counts.
        assert_eq!(refusal(&connector("other.test")).await, F::PeerWrongName);
        server.stop().await;
    }
}

#[tokio::test]
async fn certificates_are_renewed_between_two_connections() {
    // CRD-10
    let (old, new) = (Ca::named("old"), Ca::named("new"));
    let configs = [&old, &new].map(|ca| {
        let mut config = Arc::unwrap_or_clone(server(ca, &["edge.test"], None));
        config.alpn_protocols = vec![b"h2".to_vec()];
        Arc::new(config)
    });
    let turned = Arc::new(AtomicBool::new(false));
    let server = Server::start(|listener| {
        let turned = Arc::clone(&turned);
        listener.with_tls_from(move || Arc::clone(&configs[usize::from(turned.load(Ordering::Relaxed))]))
    })
    .await;
    let before = soon(connector(&server, &old, "edge.test").connect()).await.unwrap();
    turned.store(true, Ordering::Relaxed);
    assert_eq!(refusal(&connector(&server, &old, "edge.test")).await, HandshakeFailure::PeerUnknownCa);
    assert!(soon(connector(&server, &new, "edge.test").connect()).await.is_ok());
    drop(before);
    server.stop().await;
}

#[test]
fn a_certificate_that_can_t_be_read_has_no_identity() {
    // CRD-10
    let ca = Ca::new();
    let (chain, _) = ca.issue(&[], |params| params.subject_alt_names.push(uri(NODE)));
    let der = chain[0].to_vec();
    assert_eq!(certificate_identity(&der).unwrap().to_string(), NODE);
    for end in 0..der.len() {
        assert_eq!(certificate_identity(&der[..end]), Err(IdentityProblem::Unreadable), "{end}");
    }
    let trailing = [&der[..], b"x"].concat();
    assert_eq!(certificate_identity(&trailing), Err(IdentityProblem::Unreadable));
    let large = vec![0x30; (64 << 10) + 1];
    assert_eq!(certificate_identity(&large), Err(IdentityProblem::Unreadable));
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
