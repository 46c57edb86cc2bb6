//! Decides how a broken connection is explained: the one cause an operator can act on, found in the chain of errors.

use std::error::Error;
use std::io;

use rustls::{AlertDescription, CertificateError};
use tonic::Status;

/// Longest explanation that a peer may give, in bytes.
const MAX_PEER_TEXT: usize = 200;

/// Why an error happened, from its chain of sources.
pub(super) fn of(error: &(dyn Error + 'static)) -> String {
    find(error).unwrap_or_else(|| clean(&error.to_string()))
}

/// Why a call ended.
pub(super) fn of_status(status: &Status) -> String {
    let cause = status.source().and_then(find);
    cause.unwrap_or_else(|| format!("{:?}: {}", status.code(), clean(status.message())))
}

fn find(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(tls) = error.downcast_ref::<rustls::Error>() {
            return Some(of_tls(tls));
        }
        if let Some(io) = error.downcast_ref::<io::Error>() {
            match io.get_ref() {
                // `source` of an io::Error skips the error it holds.
                Some(inner) => match find(inner) {
                    Some(found) => return Some(found),
                    None => return Some(of_io(io)),
                },
                None => return Some(of_io(io)),
            }
        }
        next = error.source();
    }
    None
}

fn of_io(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused: nothing listens at that address".into(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "the connection was reset".into(),
        io::ErrorKind::UnexpectedEof => "the connection was closed".into(),
        io::ErrorKind::TimedOut => "the connection timed out".into(),
        kind => match error.raw_os_error() {
            Some(_) => error.to_string(),
            None => of_text(&error.to_string()).unwrap_or_else(|| format!("{kind}: {}", clean(&error.to_string()))),
        },
    }
}

/// HTTP/2 keeps only the text of an error below it.
fn of_text(text: &str) -> Option<String> {
    let (_, name) = text.split_once("received fatal alert: ")?;
    ALERTS.iter().find(|(alert, _)| format!("{alert:?}") == name).map(|(_, reason)| (*reason).to_owned())
}

/// What a peer may say of us at the end of a handshake.
const ALERTS: [(AlertDescription, &str); 9] = [
    (AlertDescription::CertificateRequired, "the peer requires a client certificate"),
    (AlertDescription::UnknownCA, "the peer does not know the CA of our certificate"),
    (AlertDescription::BadCertificate, "the peer refused our certificate"),
    (AlertDescription::UnsupportedCertificate, "the peer refused our certificate"),
    (AlertDescription::CertificateUnknown, "the peer refused our certificate"),
    (AlertDescription::AccessDenied, "the peer refused our certificate"),
    (AlertDescription::CertificateExpired, "the peer says our certificate has expired"),
    (AlertDescription::CertificateRevoked, "the peer says our certificate is revoked"),
    (AlertDescription::NoApplicationProtocol, "the peer does not speak HTTP/2"),
];

fn of_tls(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(certificate) => of_certificate(certificate),
        rustls::Error::AlertReceived(alert) => match ALERTS.iter().find(|(known, _)| known == alert) {
            Some((_, reason)) => (*reason).to_owned(),
            None => format!("the peer ended TLS: {alert:?}"),
        },
        rustls::Error::NoCertificatesPresented => "the peer presented no certificate".into(),
        rustls::Error::InvalidMessage(_) => "the peer does not speak TLS".into(),
        error => format!("TLS failed: {}", clean(&error.to_string())),
    }
}

fn of_certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::UnknownIssuer => "the peer's certificate was issued by an unknown CA".into(),
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the peer's certificate is for another name".into()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "the peer's certificate has expired".into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "the peer's certificate is not valid yet".into()
        }
        CertificateError::Revoked => "the peer's certificate is revoked".into(),
        CertificateError::InvalidPurpose => "the peer's certificate is for another purpose".into(),
        error => format!("the peer's certificate is not acceptable: {}", clean(&error.to_string())),
    }
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
