//! Decides what a provider complained about, from its status and text; keeps none of the text.

use iop_execution::failure::ProviderReason;
use iop_execution::{ExecutionFailure, ProviderError};

use crate::json::Scanner;

/// Most bytes of an error body that are looked at.
pub(crate) const MAX_ERROR_BODY: usize = 64 * 1024;

/// How servers say that a prompt is too long, in lower case.
const CONTEXT_PHRASES: [&str; 9] = [
    "exceed_context_size",
    "context_length_exceeded",
    "maximum context length",
    "exceeds the context",
    "exceeds the available context",
    "exceeds context",
    "longer than the context",
    "context window",
    "n_ctx",
];
/// How servers say that they are full, in lower case.
const OVERLOAD_PHRASES: [&str; 8] = [
    "at capacity",
    "maximum pending requests exceeded",
    "maximum queue size",
    "overloaded",
    "queue is full",
    "rate_limit",
    "server busy",
    "too many requests",
];

/// The reason a status and an error text name, if they name one.
///
/// A prompt that is too long is recognised under any status: some servers answer it with 500.
pub(crate) fn reason(status: Option<u16>, text: &[u8]) -> Option<ProviderReason> {
    let text = text.get(..MAX_ERROR_BODY).unwrap_or(text).to_ascii_lowercase();
    let says = |phrase: &&str| memchr::memmem::find(&text, phrase.as_bytes()).is_some();
    match status {
        Some(401 | 403) => Some(ProviderReason::AuthFailed),
        _ if CONTEXT_PHRASES.iter().any(&says) => Some(ProviderReason::ContextLengthExceeded),
        Some(429) => Some(ProviderReason::Overloaded),
        _ if OVERLOAD_PHRASES.iter().any(says) => Some(ProviderReason::Overloaded),
        _ => None,
    }
}

/// The error of an answer that was an HTTP error. `retry_after_ms` is the provider's own wish.
pub(crate) fn rejected(status: u16, body: &[u8], retry_after_ms: Option<u32>) -> ProviderError {
    // A bare 503 is a server that does not work (it still loads, say); one that names a time is busy.
    let busy = (status == 503 && retry_after_ms.is_some()).then_some(ProviderReason::Overloaded);
    let failure = ProviderError::rejected(status, reason(Some(status), body).or(busy)).into_failure();
    ProviderError::new(failure.with_retry_after_ms(retry_after_ms))
}

/// The error of an error object inside an answer of status 200.
pub(crate) fn reported(text: &[u8]) -> ProviderError {
    let status = embedded_status(text);
    let failure: ExecutionFailure = ProviderError::reported("the provider reported an error in its answer")
        .into_failure()
        .with_reason(reason(status, text));
    ProviderError::new(match status {
        Some(status) => failure.with_status(status),
        None => failure,
    })
}

/// The HTTP status that an error object names as its `code` or `status`.
fn embedded_status(text: &[u8]) -> Option<u16> {
    fn look(scan: &mut Scanner<'_>, key: &[u8], found: &mut Option<u16>) -> Result<(), crate::json::NotJson> {
        if matches!(key, b"code" | b"status" | b"status_code") {
            let status = scan.count()?.and_then(|code| u16::try_from(code).ok());
            *found = status.filter(|status| (400..600).contains(status)).or(*found);
            Ok(())
        } else {
            scan.skip()
        }
    }
    let mut found = None;
    let result = Scanner::new(text).object(|scan, key| {
        if key == b"error" { scan.object(|scan, key| look(scan, key, &mut found)) } else { look(scan, key, &mut found) }
    });
    result.ok().and(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_told_from_status_and_text() {
        // ADP-3; field report 66: an over-long prompt answered with 500
        use ProviderReason::{AuthFailed, ContextLengthExceeded, Overloaded};
        for (status, text, want) in [
            (Some(400), r#"{"error":{"type":"exceed_context_size_error","n_ctx":4096}}"#, Some(ContextLengthExceeded)),
            (Some(500), "Requested tokens exceed N_CTX", Some(ContextLengthExceeded)),
            (Some(400), "This model's maximum context length is 4096 tokens.", Some(ContextLengthExceeded)),
            (Some(400), "bad", None),
            (Some(401), "maximum context length", Some(AuthFailed)),
            (Some(403), "", Some(AuthFailed)),
            (Some(429), "", Some(Overloaded)),
            (Some(503), "", None),
            (Some(503), r#"{"error":{"message":"Loading model","type":"unavailable_error"}}"#, None),
            (Some(503), "the queue is full", Some(Overloaded)),
            (Some(500), "exceeds maximum queue size", Some(Overloaded)),
            (None, "boom", None),
        ] {
            assert_eq!(reason(status, text.as_bytes()), want, "{status:?} {text}");
        }
    }

    #[test]
    fn an_error_in_an_answer_keeps_its_number_and_none_of_its_text() {
        // SEC-2, EXE-9
        for (text, status) in [
            (r#"{"error":{"message":"SENTINEL","code":503}}"#, Some(503)),
            (r#"{"object":"error","message":"SENTINEL","code":400}"#, Some(400)),
            (r#"{"error":"SENTINEL"}"#, None),
            (r#"{"error":{"code":"SENTINEL"}}"#, None),
            (r#"{"error":{"code":7}}"#, None),
            ("SENTINEL", None),
        ] {
            let error = reported(text.as_bytes());
            assert_eq!(error.failure().upstream_status, status, "{text}");
            assert!(!format!("{error} {error:?}").contains("SENTINEL"));
        }
    }
}
