//! Decides how a broken connection is explained: the one cause an operator can act on, found in the chain of errors.

use std::error::Error;
use std::io;

use rustls::{AlertDescription, CertificateError, InvalidMessage};
use tonic::Status;

use super::workload::IdentityProblem;
use crate::link::{HandshakeError, HandshakeFailure as Failure};

/// Longest explanation that a peer may give, in bytes.
const MAX_PEER_TEXT: usize = 200;

/// Why an error happened, from its chain of sources.
pub(super) fn of(error: &(dyn Error + 'static)) -> HandshakeError {
    find(error).unwrap_or_else(|| HandshakeError::new(Failure::Http2, Some(clean(&error.to_string()))))
}

/// Why a call ended.
pub(super) fn of_status(status: &Status) -> HandshakeError {
    status.source().and_then(find).unwrap_or_else(|| {
        HandshakeError::new(Failure::Http2, Some(format!("{:?}: {}", status.code(), clean(status.message()))))
    })
}

fn find(error: &(dyn Error + 'static)) -> Option<HandshakeError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(tls) = error.downcast_ref::<rustls::Error>() {
            return Some(of_tls(tls));
        }
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return Some(match io.get_ref() {
                // `source` of an io::Error skips the error it holds.
                Some(inner) => find(inner).unwrap_or_else(|| of_io(io)),
                None => of_io(io),
            });
        }
        next = error.source();
    }
    None
}

fn of_io(error: &io::Error) -> HandshakeError {
    let failure = match error.kind() {
        io::ErrorKind::ConnectionRefused => Failure::ConnectionRefused,
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Failure::ConnectionReset,
        io::ErrorKind::UnexpectedEof => Failure::ConnectionClosed,
        io::ErrorKind::TimedOut => Failure::TimedOut,
        _ => {
            return of_text(&error.to_string())
                .unwrap_or_else(|| HandshakeError::new(Failure::Network, Some(clean(&error.to_string()))));
        }
    };
    failure.into()
}

/// HTTP/2 keeps only the text of an error below it.
fn of_text(text: &str) -> Option<HandshakeError> {
    let (_, name) = text.split_once("received fatal alert: ")?;
    ALERTS.iter().find(|(alert, _)| format!("{alert:?}") == name).map(|(_, failure)| (*failure).into())
}

/// What a peer may say of us at the end of a handshake. An IOP peer sends `CertificateUnknown` only for an identity.
const ALERTS: [(AlertDescription, Failure); 11] = [
    (AlertDescription::CertificateRequired, Failure::OurCertificateRequired),
    (AlertDescription::UnknownCA, Failure::OurUnknownCa),
    (AlertDescription::BadCertificate, Failure::OurRefused),
    (AlertDescription::DecryptError, Failure::OurRefused),
    (AlertDescription::AccessDenied, Failure::OurRefused),
    (AlertDescription::UnsupportedCertificate, Failure::OurWrongPurpose),
    (AlertDescription::CertificateUnknown, Failure::OurIdentityRefused),
    (AlertDescription::CertificateExpired, Failure::OurNotValidNow),
    (AlertDescription::CertificateRevoked, Failure::OurRevoked),
    (AlertDescription::NoApplicationProtocol, Failure::NotHttp2),
    (AlertDescription::ProtocolVersion, Failure::TlsVersion),
];

fn of_tls(error: &rustls::Error) -> HandshakeError {
    match error {
        rustls::Error::InvalidCertificate(certificate) => of_certificate(certificate),
        rustls::Error::AlertReceived(alert) => match ALERTS.iter().find(|(known, _)| known == alert) {
            Some((_, failure)) => (*failure).into(),
            None => HandshakeError::new(Failure::Tls, Some(format!("the peer ended it with {alert:?}"))),
        },
        rustls::Error::NoCertificatesPresented => Failure::PeerNoCertificate.into(),
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => Failure::NotTls.into(),
        rustls::Error::InvalidMessage(_) => Failure::NotTls.into(),
        rustls::Error::PeerIncompatible(_) => Failure::TlsVersion.into(),
        error => HandshakeError::new(Failure::Tls, Some(clean(&error.to_string()))),
    }
}

fn of_certificate(error: &CertificateError) -> HandshakeError {
    let failure = match error {
        CertificateError::UnknownIssuer => Failure::PeerUnknownCa,
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => Failure::PeerWrongName,
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => Failure::PeerExpired,
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Failure::PeerNotYetValid,
        CertificateError::Revoked => Failure::PeerRevoked,
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => Failure::PeerWrongPurpose,
        CertificateError::Other(other) => {
            if let Some(problem) = other.0.downcast_ref::<IdentityProblem>() {
                return Failure::from(*problem).into();
            }
            // webpki has no word of rustls for a CA's certificate that is used as a leaf.
            if other.to_string().contains("CaUsedAsEndEntity") {
                Failure::PeerWrongPurpose
            } else {
                Failure::PeerMalformed
            }
        }
        error => return HandshakeError::new(Failure::PeerMalformed, Some(clean(&error.to_string()))),
    };
    failure.into()
}

/// Text that may come from a peer: short, on one line.
fn clean(text: &str) -> String {
    let mut clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if clean.len() > MAX_PEER_TEXT {
        let mut end = MAX_PEER_TEXT;
        while !clean.is_char_boundary(end) {
            end -= 1;
        }
        clean.truncate(end);
    }
    clean
}
