use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::*;

/// A server with a certificate for `name`, and a client that trusts its issuer.
struct TlsStage {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    origin: Origin,
    roots: Arc<RootCertStore>,
}

impl TlsStage {
    async fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, format!("issuer of {name}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![cert.der().clone()],
                PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
            )
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(ca.der().clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = Origin::parse(&format!("https://{}/v1", listener.local_addr().unwrap())).unwrap();
        Self { listener, acceptor: TlsAcceptor::from(Arc::new(config)), origin, roots: Arc::new(roots) }
    }

    async fn accept(&self) -> std::io::Result<TlsStream<TcpStream>> {
        let (tcp, _) = soon(self.listener.accept()).await?;
        soon(Box::pin(self.acceptor.accept(tcp))).await
    }
}

#[tokio::test]
async fn requests_pass_over_tls_and_its_connection_is_used_again() {
    // ADP-1
    let stage = TlsStage::new("127.0.0.1").await;
    let client = HttpClient::with_roots(stage.origin.clone(), Arc::clone(&stage.roots)).unwrap();
    let large = vec![7; 1024 * 1024];
    let server = async {
        let mut stream = stage.accept().await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        for _ in 0..3 {
            let (head, body) = read_request(&mut stream).await;
            assert!(head.starts_with("POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:"), "{head}");
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(&body).await.unwrap();
            stream.flush().await.unwrap();
        }
        stream
    };
    let calls = async {
        for body in [b"question".to_vec(), large, b"again".to_vec()] {
            let response = client.send(post(body.clone())).await.unwrap();
            assert!(collect(response.body).await.0.concat() == body);
            assert_eq!(client.idle(), 1);
        }
    };
    soon(async { tokio::join!(calls, server) }).await;
    settle().await;
    let again = async {
        let mut stream = stage.accept().await.unwrap();
        read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nans").await.unwrap();
        stream.flush().await.unwrap();
        // Closed without TLS's own farewell: that may be a cut.
    };
    let (response, ()) = soon(async { tokio::join!(client.send(post("question")), again) }).await;
    let (items, error) = collect(response.unwrap().body).await;
    assert_eq!(items.concat(), b"ans");
    assert!(matches!(error, Some(UpstreamError::Broken(_))), "{error:?}");
}

#[tokio::test]
async fn a_server_that_cannot_prove_its_name_gets_no_request() {
    // SEC-1: names of certificates are not repeated
    let (ours, other, named) =
        (TlsStage::new("127.0.0.1").await, TlsStage::new("127.0.0.1").await, TlsStage::new("sentinel.example").await);
    for (server, roots, want) in [
        (&ours, &other.roots, "the certificate is not signed by a known issuer"),
        (&ours, &named.roots, "the certificate is not signed by a known issuer"),
        (&named, &named.roots, "the certificate is for another name"),
    ] {
        let client = HttpClient::with_roots(server.origin.clone(), Arc::clone(roots)).unwrap();
        let (response, accepted) = soon(async { tokio::join!(client.send(post("question")), server.accept()) }).await;
        let error = response.unwrap_err();
        assert!(accepted.is_err());
        assert!(matches!(error, UpstreamError::Connect(_)), "{error:?}");
        let text = whole_text(&error);
        assert!(text.contains(want) && !text.contains("sentinel"), "{text}");
    }
}

#[tokio::test]
async fn a_server_without_tls_gets_no_request() {
    let stage = TlsStage::new("127.0.0.1").await;
    let client = HttpClient::with_roots(stage.origin.clone(), Arc::clone(&stage.roots)).unwrap();
    let server = async {
        let (mut stream, _) = stage.listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        stream
    };
    let (response, _stream) = soon(async { tokio::join!(client.send(post("question")), server) }).await;
    assert!(matches!(response, Err(UpstreamError::Connect(_))), "{response:?}");
}

#[test]
fn a_client_can_be_set_up_for_either_scheme_without_a_process_wide_provider() {
    // ADP-1: TLS brings its own crypto, so nothing needs to be installed first
    for url in ["http://127.0.0.1:1", "https://127.0.0.1:1", "https://host"] {
        let client = HttpClient::new(Origin::parse(url).unwrap()).unwrap();
        assert!(format!("{client:?}").contains(url));
    }
    let error = HttpClient::new(Origin::parse("https://sentinel_.-").unwrap()).unwrap_err();
    assert!(matches!(error, HttpClientError::HostName));
    assert!(!format!("{error} {error:?}").contains("sentinel"));
}
