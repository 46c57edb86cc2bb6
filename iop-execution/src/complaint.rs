//! Decides what a provider complained about, from its status, headers and text; keeps none of the text.
//!
//! The Node reads complaints for the failure of a run, the Edge for what it shows of a tunnelled error answer: both here.

use std::time::Duration;

use http::HeaderMap;

use crate::failure::ProviderReason;

/// Most bytes of an error body that are looked at.
pub const MAX_ERROR_BODY: usize = 64 * 1024;
/// Longest wait a provider may ask for, in milliseconds; what is longer is cut to it.
pub const MAX_RETRY_AFTER_MS: u32 = 24 * 3_600_000;

/// How servers say that a prompt is too long, in lower case.
const CONTEXT_PHRASES: [&str; 9] = [
    "context length",
    "context size",
    "context window",
    "context_length_exceeded",
    "exceed_context_size",
    "exceeds context",
    "exceeds the context",
    "longer than the context",
    "n_ctx",
];
/// How servers say that they are full, in lower case.
const OVERLOAD_PHRASES: [&str; 8] = [
    "at capacity",
    "maximum pending requests",
    "maximum queue size",
    "overloaded",
    "queue is full",
    "rate_limit",
    "server busy",
    "too many requests",
];

/// The reason a status and an error text name, if they name one.
///
/// A prompt that is too long is recognised under any status but 401 and 403: some servers answer it with 500.
#[must_use]
pub fn reason(status: Option<u16>, text: &[u8]) -> Option<ProviderReason> {
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

/// How long a provider asks to wait, in milliseconds: `retry-after-ms`, else `retry-after` in seconds. Dates are not read.
#[must_use]
pub fn retry_after_ms(headers: &HeaderMap) -> Option<u32> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok().filter(|n| *n >= 0.0);
    let ms = number("retry-after-ms").or_else(|| number("retry-after").map(|seconds| seconds * 1_000.0))?;
    let wait = Duration::try_from_secs_f64(ms / 1_000.0).ok()?;
    Some(u32::try_from(wait.as_millis()).unwrap_or(u32::MAX).min(MAX_RETRY_AFTER_MS))
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
    fn a_wait_is_read_in_either_unit_and_junk_is_none() {
        // API-5
        let wait = |name: &'static str, value: &str| {
            retry_after_ms(&HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())]))
        };
        assert_eq!(wait("retry-after", "2"), Some(2_000));
        assert_eq!(wait("retry-after", "0.5"), Some(500));
        assert_eq!(wait("retry-after-ms", "70"), Some(70));
        assert_eq!(wait("retry-after", "9999999"), Some(MAX_RETRY_AFTER_MS));
        for junk in ["-1", "soon", "NaN", "inf", "1e300", "", "Wed, 21 Oct 2015 07:28:00 GMT"] {
            assert_eq!(wait("retry-after", junk), None, "{junk}");
        }
    }
}
