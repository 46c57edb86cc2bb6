//! Decides how a connection that can't be made is told of: one closed reason, and what to do about it (CRD-10, NOD-2).

use std::fmt;

use iop_execution::closed_list as closed;

closed! {
    /// Why a connection could not be made, as one side sees it. "Peer" is the other side, "our" this one.
    HandshakeFailure {
        /// Nothing listens there.
        ConnectionRefused = "connection_refused",
        /// The peer or the network ended the connection.
        ConnectionReset = "connection_reset",
        /// The peer closed it without a word.
        ConnectionClosed = "connection_closed",
        /// It took too long.
        TimedOut = "timed_out",
        /// The network said something else.
        Network = "network",
        /// The peer speaks something else than TLS.
        NotTls = "not_tls",
        /// The peer speaks TLS, and no version or cipher of ours.
        TlsVersion = "tls_version",
        /// TLS failed in another way.
        Tls = "tls",
        /// The peer speaks no HTTP/2.
        NotHttp2 = "not_http2",
        /// The peer broke HTTP/2, or ended it.
        Http2 = "http2",
        /// The peer opened a connection and no session.
        NoSession = "no_session",
        /// The peer showed no certificate.
        PeerNoCertificate = "peer_no_certificate",
        /// The peer's certificate is not from our CA.
        PeerUnknownCa = "peer_unknown_ca",
        /// The peer's certificate is for another DNS name or address.
        PeerWrongName = "peer_wrong_name",
        /// The peer's certificate is over.
        PeerExpired = "peer_expired",
        /// The peer's certificate is for later.
        PeerNotYetValid = "peer_not_yet_valid",
        /// The peer's certificate was revoked.
        PeerRevoked = "peer_revoked",
        /// The peer's certificate is not for this use (extended key usage, or it is a CA's).
        PeerWrongPurpose = "peer_wrong_purpose",
        /// The peer's certificate can't be read, or its signature is wrong.
        PeerMalformed = "peer_malformed",
        /// The peer's certificate has no URI name: no workload identity.
        PeerIdentityMissing = "peer_identity_missing",
        /// The peer's certificate has more than one URI name.
        PeerIdentityAmbiguous = "peer_identity_ambiguous",
        /// The URI name of the peer's certificate is no workload identity.
        PeerIdentityMalformed = "peer_identity_malformed",
        /// The peer's workload identity is of another trust domain.
        PeerIdentityForeign = "peer_identity_foreign",
        /// The peer's workload identity is of the wrong kind: a Node's where an Edge is wanted, or the other way round.
        PeerIdentityRole = "peer_identity_role",
        /// The peer is another Edge than the one that was asked for.
        PeerIdentityUnexpected = "peer_identity_unexpected",
        /// The peer wants a certificate and we have none.
        OurCertificateRequired = "our_certificate_required",
        /// The peer does not know the CA of our certificate.
        OurUnknownCa = "our_unknown_ca",
        /// The peer says our certificate is expired, or not valid yet.
        OurNotValidNow = "our_not_valid_now",
        /// The peer says our certificate is revoked.
        OurRevoked = "our_revoked",
        /// The peer says our certificate is not for this use.
        OurWrongPurpose = "our_wrong_purpose",
        /// The peer does not accept the workload identity in our certificate.
        OurIdentityRefused = "our_identity_refused",
        /// The peer refused our certificate for another reason.
        OurRefused = "our_refused",
    }
}

impl HandshakeFailure {
    /// What happened, and what to do about it.
    #[must_use]
    pub const fn message(self) -> &'static str {
        match self {
            Self::ConnectionRefused => "connection refused: nothing listens at that address",
            Self::ConnectionReset => "the connection was reset",
            Self::ConnectionClosed => "the connection was closed",
            Self::TimedOut => "the connection timed out",
            Self::Network => "the network failed",
            Self::NotTls => "the peer does not speak TLS: is one side http:// and the other https://?",
            Self::TlsVersion => "the peer speaks no TLS 1.3",
            Self::Tls => "TLS failed",
            Self::NotHttp2 => "the peer does not speak HTTP/2: is this the port for Nodes?",
            Self::Http2 => "HTTP/2 failed",
            Self::NoSession => "no session was opened",
            Self::PeerNoCertificate => "the peer presented no certificate",
            Self::PeerUnknownCa => {
                "the peer's certificate was issued by an unknown CA: compare it with the CA file here"
            }
            Self::PeerWrongName => {
                "the peer's certificate is for another name: use the name in it, or make one for this name"
            }
            Self::PeerExpired => "the peer's certificate has expired: renew it there, or set the clocks",
            Self::PeerNotYetValid => "the peer's certificate is not valid yet: set the clocks",
            Self::PeerRevoked => "the peer's certificate is revoked",
            Self::PeerWrongPurpose => {
                "the peer's certificate is for another purpose: an Edge needs serverAuth, a Node clientAuth, neither a CA's"
            }
            Self::PeerMalformed => "the peer's certificate is not acceptable",
            Self::PeerIdentityMissing => {
                "the peer's certificate holds no workload identity: it needs one URI name spiffe://<trust domain>/iop/<edge or node>/<id>"
            }
            Self::PeerIdentityAmbiguous => {
                "the peer's certificate holds more than one URI name: exactly one is allowed"
            }
            Self::PeerIdentityMalformed => {
                "the URI name of the peer's certificate is not of the form spiffe://<trust domain>/iop/<edge or node>/<id>"
            }
            Self::PeerIdentityForeign => "the peer's workload identity is of another trust domain",
            Self::PeerIdentityRole => {
                "the peer's workload identity is of the wrong kind: Edge and Node have different ones"
            }
            Self::PeerIdentityUnexpected => "the peer is another Edge than the one that `identity` names",
            Self::OurCertificateRequired => {
                "the peer requires a client certificate: name one with --cert and --cert-key"
            }
            Self::OurUnknownCa => "the peer does not know the CA of our certificate: add it to the CA file there",
            Self::OurNotValidNow => {
                "the peer says our certificate has expired or is not valid yet: renew it, or set the clocks"
            }
            Self::OurRevoked => "the peer says our certificate is revoked",
            Self::OurWrongPurpose => {
                "the peer says our certificate is for another purpose: an Edge needs serverAuth, a Node clientAuth"
            }
            Self::OurIdentityRefused => {
                "the peer refused the workload identity in our certificate: it needs exactly one URI name spiffe://<trust domain>/iop/<edge or node>/<id> of the peer's trust domain"
            }
            Self::OurRefused => "the peer refused our certificate",
        }
    }

    /// True if a certificate is the reason: trying again helps only once one is another.
    #[must_use]
    pub const fn is_about_certificates(self) -> bool {
        match self {
            Self::ConnectionRefused
            | Self::ConnectionReset
            | Self::ConnectionClosed
            | Self::TimedOut
            | Self::Network
            | Self::NotTls
            | Self::TlsVersion
            | Self::Tls
            | Self::NotHttp2
            | Self::Http2
            | Self::NoSession => false,
            Self::PeerNoCertificate
            | Self::PeerUnknownCa
            | Self::PeerWrongName
            | Self::PeerExpired
            | Self::PeerNotYetValid
            | Self::PeerRevoked
            | Self::PeerWrongPurpose
            | Self::PeerMalformed
            | Self::PeerIdentityMissing
            | Self::PeerIdentityAmbiguous
            | Self::PeerIdentityMalformed
            | Self::PeerIdentityForeign
            | Self::PeerIdentityRole
            | Self::PeerIdentityUnexpected
            | Self::OurCertificateRequired
            | Self::OurUnknownCa
            | Self::OurNotValidNow
            | Self::OurRevoked
            | Self::OurWrongPurpose
            | Self::OurIdentityRefused
            | Self::OurRefused => true,
        }
    }
}

/// A connection that could not be made: the reason, and what the system or a library said where that adds something.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HandshakeError {
    /// The reason.
    pub failure: HandshakeFailure,
    /// More, for people; short and on one line. Holds no secret.
    pub detail: Option<String>,
}

impl HandshakeError {
    /// With what somebody said.
    #[must_use]
    pub const fn new(failure: HandshakeFailure, detail: Option<String>) -> Self {
        Self { failure, detail }
    }
}

impl From<HandshakeFailure> for HandshakeError {
    fn from(failure: HandshakeFailure) -> Self {
        Self { failure, detail: None }
    }
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.failure.message())?;
        match &self.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for HandshakeError {}
