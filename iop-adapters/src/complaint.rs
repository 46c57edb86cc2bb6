//! Decides what a provider complained about, from its status and text; keeps none of the text.

pub(crate) use iop_execution::complaint::MAX_ERROR_BODY;
use iop_execution::complaint::reason;
use iop_execution::failure::ProviderReason;
use iop_execution::{ExecutionFailure, ProviderError};

use crate::json::Scanner;

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
