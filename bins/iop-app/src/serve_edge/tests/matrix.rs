//! Who may be which Node: each identity with each token, and each bad certificate, over the real listener. What one end is told,
//! the other end counts.

use std::collections::BTreeMap;

use futures_util::{FutureExt as _, StreamExt as _, stream};
use iop_edge_core::EdgeNodeEvent;
use iop_edge_core::events::Notice;
use iop_execution::Redacted;
use iop_node_core::NodeError;
use iop_wire::RefusalReason::{IdentityMismatch, IdentityRequired, UnknownToken};
use iop_wire::link::grpc::GrpcConnector;
use iop_wire::{ConnectError, Connector as _, HandshakeFailure, LinkError, RefusalReason};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa};

use super::managed::{Ca, Managed};
use super::*;
use crate::tls;

/// What a Node shows beside its certificate.
#[derive(Debug, Clone, Copy)]
enum Shown {
    /// The token of this record.
    Of(&'static str),
    /// The public id of n1's token with another secret.
    Forged,
    /// A token that nobody made for this Edge.
    Unknown,
    /// None.
    Nothing,
}

impl Shown {
    fn token(self, edge: &Managed) -> String {
        let of = |node: &str| std::fs::read_to_string(edge.dir.path().join(format!("{node}.token"))).unwrap();
        let stranger = Token::generate(TokenKind::Node).unwrap();
        match self {
            Self::Of(node) => of(node),
            Self::Forged => {
                let own = Token::parse(TokenKind::Node, &of("n1")).unwrap();
                stranger.reveal().replacen(stranger.id().as_str(), own.id().as_str(), 1)
            }
            Self::Unknown => stranger.reveal(),
            Self::Nothing => String::new(),
        }
    }
}

/// What became of a Node with this certificate and token: the Node it was taken for, or why it was refused, once both ends say
/// the same. Each try has an Edge of its own, so that none is one of too many (REG-8).
async fn outcome(certificate: Option<&str>, shown: Shown) -> Result<String, RefusalReason> {
    let edge = Managed::start().await;
    edge.ca.issue_node(&edge.dir, "stranger");
    let (settings, problems) = edge.options("n1", certificate).load();
    let mut settings = settings.unwrap_or_else(|| panic!("{problems}"));
    settings.token = Redacted::new(shown.token(&edge));
    let mut events = edge.runtime.edge().subscribe_nodes();
    let node = serve_node::node(&settings, std::sync::Arc::new(NoObserver)).unwrap();
    let (mut status, stop) = (node.status(), CancellationToken::new());
    let serving = tokio::spawn(node.serve(stop.clone()));
    let is_ready = timeout(Duration::from_secs(20), status.wait_ready()).await.unwrap();
    let connected = |edge: &Managed| {
        let nodes = edge.runtime.edge().snapshot().nodes;
        nodes.iter().filter(|node| node.connected).map(|node| node.node.to_string()).collect::<Vec<_>>()
    };
    let nodes = connected(&edge);
    stop.cancel();
    let ended = timeout(Duration::from_secs(20), serving).await.unwrap().unwrap();
    let mut refused = Vec::new();
    while let Some(Some(Notice::Event(event))) = events.next().now_or_never() {
        if let EdgeNodeEvent::Refused { reason, .. } = event {
            refused.push(reason);
        }
    }
    let kinds = RefusalReason::ALL.iter().map(|reason| reason.as_str()).chain(["expired_token", "rate_limited"]);
    let counted: Vec<_> = edge.refusals(kinds);
    if is_ready {
        assert_eq!((ended, refused, counted), (Ok(ServeEnd::Drained), vec![], vec![]));
        let [node] = nodes.try_into().unwrap();
        return Ok(node);
    }
    let Err(NodeError::Refused(reason)) = ended else { panic!("{ended:?}") };
    assert_eq!((nodes, refused), (vec![], vec![reason]));
    assert_eq!(counted, [(reason.as_str(), 1)]);
    Err(reason)
}

impl Managed {
    /// The refusals that its metrics count, of these kinds.
    fn refusals<'a>(&self, kinds: impl Iterator<Item = &'a str>) -> Vec<(&'a str, u64)> {
        let metrics = self.runtime.metrics().render(&self.runtime.gauges());
        let count = |kind: &str| {
            let name = format!("iop_node_registrations_refused_total{{kind=\"{kind}\"}} ");
            metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok())
        };
        kinds.filter_map(|kind| Some((kind, count(kind)?))).collect()
    }
}

#[tokio::test]
async fn only_identity_and_token_of_one_record_are_a_node_and_every_other_pair_is_refused_on_both_ends() {
    // REG-4, REG-6, CRD-10: identity {n1, n2, of a stranger, none} × token {n1, n2, wrong (unknown, forged), none}
    let tokens = [Shown::Of("n1"), Shown::Of("n2"), Shown::Unknown, Shown::Forged, Shown::Nothing];
    let table = [
        (Some("n1"), [Ok("n1"), Err(IdentityMismatch), Err(UnknownToken), Err(UnknownToken), Err(UnknownToken)]),
        // The forged one has the id of n1's: the identity is matched before any secret is compared.
        (Some("n2"), [Err(IdentityMismatch), Ok("n2"), Err(UnknownToken), Err(IdentityMismatch), Err(UnknownToken)]),
        (Some("stranger"), [Err(IdentityMismatch); 5]),
        (None, [Err(IdentityRequired); 5]),
    ];
    for (certificate, row) in table {
        for (shown, expected) in tokens.into_iter().zip(row) {
            let got = outcome(certificate, shown).await;
            assert_eq!(got.as_deref().map_err(|reason| *reason), expected, "{certificate:?} {shown:?}");
        }
    }
}

/// Why this end could not connect with that certificate.
async fn refusal(edge: &Managed, certificate: &str) -> HandshakeFailure {
    let at = |name: String| edge.dir.path().join(name);
    let pair = tls::load_pair(&at(format!("{certificate}.pem")), &at(format!("{certificate}-key.pem"))).unwrap();
    // Without the look at one's own certificate that `iop-node` takes first.
    let config = tls::identified_node_client(Some(&at("ca.pem".into())), Some(&pair), None).unwrap();
    let connector = GrpcConnector::tls(edge.nodes.to_string(), config, Some("localhost")).unwrap();
    let dialled = timeout(Duration::from_secs(20), connector.connect()).await.unwrap();
    match dialled {
        Err(ConnectError::Handshake(error)) => error.failure,
        Err(other) => panic!("{other:?}"),
        // A client of TLS 1.3 is told of its certificate after its own handshake.
        Ok(link) => match timeout(Duration::from_secs(20), link.start(stream::pending().boxed()).next()).await.unwrap()
        {
            Some(Err(LinkError::Handshake(error))) => error.failure,
            other => panic!("{other:?}"),
        },
    }
}

/// A certificate with one fault.
struct Bad {
    case: &'static str,
    uris: &'static [&'static str],
    change: fn(&mut CertificateParams),
    /// Why the Edge refuses it.
    at_edge: HandshakeFailure,
    /// What the Node hears of that.
    at_node: HandshakeFailure,
}

const N1: &str = "spiffe://iop.local/iop/node/n1";

impl Bad {
    /// With another name than it must have.
    const fn named(case: &'static str, uris: &'static [&'static str], at_edge: HandshakeFailure) -> Self {
        Self { case, uris, change: |_| {}, at_edge, at_node: HandshakeFailure::OurIdentityRefused }
    }

    /// With the right name, and this fault.
    const fn made(
        case: &'static str,
        change: fn(&mut CertificateParams),
        at_edge: HandshakeFailure,
        at_node: HandshakeFailure,
    ) -> Self {
        Self { case, uris: &[N1], change, at_edge, at_node }
    }
}

#[tokio::test]
async fn a_certificate_that_is_wrong_in_one_respect_ends_the_handshake_and_both_ends_say_why() {
    // CRD-10, REG-4
    use HandshakeFailure as F;
    let for_servers: fn(&mut CertificateParams) =
        |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let expired: fn(&mut CertificateParams) = |params| params.not_after = rcgen::date_time_ymd(2001, 1, 1);
    let early: fn(&mut CertificateParams) = |params| params.not_before = rcgen::date_time_ymd(4000, 1, 1);
    let a_ca: fn(&mut CertificateParams) = |params| params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let cases = [
        Bad::made("of another CA", |_| {}, F::PeerUnknownCa, F::OurUnknownCa),
        Bad::made("for servers", for_servers, F::PeerWrongPurpose, F::OurWrongPurpose),
        Bad::made("expired", expired, F::PeerExpired, F::OurNotValidNow),
        Bad::made("of the future", early, F::PeerNotYetValid, F::OurNotValidNow),
        Bad::made("a CA's", a_ca, F::PeerWrongPurpose, F::OurIdentityRefused),
        Bad::named("with two URI names", &[N1, "spiffe://iop.local/iop/node/n2"], F::PeerIdentityAmbiguous),
        Bad::named("with its URI name twice", &[N1, N1], F::PeerIdentityAmbiguous),
        Bad::named("with no URI name", &[], F::PeerIdentityMissing),
        Bad::named("with another URI", &["https://n1.iop.local/"], F::PeerIdentityMalformed),
        Bad::named("of another trust domain", &["spiffe://else/iop/node/n1"], F::PeerIdentityForeign),
        Bad::named("an Edge's", &["spiffe://iop.local/iop/edge/n1"], F::PeerIdentityRole),
    ];
    let (edge, other) = (Managed::start().await, Ca::new("other"));
    let mut counted = BTreeMap::<_, u64>::new();
    for Bad { case, uris, change, at_edge, at_node } in cases {
        let ca = if at_edge == F::PeerUnknownCa { &other } else { &edge.ca };
        ca.issue_with(&edge.dir, "bad", uris, |params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            change(params);
        });
        assert_eq!(refusal(&edge, "bad").await, at_node, "{case}");
        let count = counted.entry(at_edge.as_str()).or_default();
        *count += 1;
        let line = format!("iop_node_handshakes_failed_total{{reason=\"{at_edge}\"}} {count}");
        assert!(edge.metric(&line).await, "{case}: {line}");
    }
    assert_eq!(edge.refusals(RefusalReason::ALL.iter().map(|reason| reason.as_str())), [], "nobody could register");
    // Without any fault it is good.
    edge.ready("n1").await.end().await;
}
