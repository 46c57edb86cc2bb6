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
            None => format!("{kind}: {}", clean(&error.to_string())),
        },
    }
}

fn of_tls(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(certificate) => of_certificate(certificate),
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => "the peer requires a client certificate".into(),
            AlertDescription::UnknownCA => "the peer does not know the CA of our certificate".into(),
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied => "the peer refused our certificate".into(),
            AlertDescription::CertificateExpired => "the peer says our certificate has expired".into(),
            AlertDescription::CertificateRevoked => "the peer says our certificate is revoked".into(),
            AlertDescription::NoApplicationProtocol => "the peer does not speak HTTP/2".into(),
            alert => format!("the peer ended TLS: {alert:?}"),
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
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "the peer's certificate has expired".into(),
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
