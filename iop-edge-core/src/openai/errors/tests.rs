use std::time::Duration;

use iop_execution::FailureStage;
use serde_json::{Value, json};

use super::*;

fn failure(code: FailureCode) -> ExecutionFailure {
    ExecutionFailure::new(code, FailureStage::Stream, ProviderContacted::Yes, "one sentence")
}

/// Status, type, code.
fn shown(error: &ApiError) -> (u16, Value, Value) {
    let object: Value = serde_json::from_slice(&error.to_json(Dialect::OpenAi)).unwrap();
    let keys: Vec<_> = object["error"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["code", "message", "param", "type"], "the object is exact");
    assert_eq!(object.as_object().unwrap().len(), 1);
    (error.status().as_u16(), object["error"]["type"].clone(), object["error"]["code"].clone())
}

#[test]
fn every_refusal_of_the_engine_has_its_row() {
    // API-5
    for (error, status, kind, code) in [
        (SubmitError::InvalidRequest("no"), 400, INVALID_REQUEST, json!(null)),
        (SubmitError::UnknownModel, 404, INVALID_REQUEST, json!("model_not_found")),
        (SubmitError::Unavailable, 503, SERVER, json!("no_provider_available")),
        (SubmitError::QueueFull { retry_after: Duration::from_secs(7) }, 429, RATE_LIMIT, json!("queue_full")),
        (SubmitError::QueueTimeout, 503, SERVER, json!("queue_timeout")),
        (SubmitError::NodeRequired, 500, SERVER, json!("internal_error")),
        (SubmitError::DeadlineExceeded, 504, SERVER, json!("deadline_exceeded")),
        (SubmitError::Cancelled, 503, SERVER, json!("cancelled")),
        (SubmitError::ShuttingDown, 503, SERVER, json!("shutting_down")),
    ] {
        let mapped = ApiError::from_submit(&error, "m");
        assert_eq!(shown(&mapped), (status, json!(kind), code), "{error:?}");
        check_retry(&mapped);
    }
}

#[test]
fn every_failure_code_has_its_row() {
    // API-5; a fault of the transport is never the client's
    use FailureCode as F;
    for code in F::ALL {
        let (status, kind, name) = match code {
            F::Busy | F::Draining | F::Disconnected | F::DispatchUnacknowledged | F::NodeSuspect => {
                (503, SERVER, json!("provider_unavailable"))
            }
            F::ProviderUnreachable => (503, SERVER, json!("provider_unavailable")),
            F::CredentialRejected => (502, SERVER, json!("provider_auth_failed")),
            F::DeadlineExceeded => (504, SERVER, json!("deadline_exceeded")),
            F::Internal => (500, SERVER, json!("internal_error")),
            F::InvalidRequest => (400, INVALID_REQUEST, json!(null)),
            F::ProviderEndedWithoutTerminal | F::ProviderProtocol | F::ProviderRejected => {
                (502, SERVER, json!("bad_gateway"))
            }
            F::ResponseStalled => (504, SERVER, json!("response_stalled")),
            F::UnknownAdapter | F::UnknownTarget | F::Unsupported => (502, SERVER, json!("bad_gateway")),
        };
        let mapped = ApiError::from_failure(&failure(*code), None);
        assert_eq!(shown(&mapped), (status, json!(kind), name), "{code}");
        check_retry(&mapped);
    }
}

#[test]
fn a_providers_status_is_translated() {
    // API-5
    for (status, want, code) in [
        (400, 400, json!(null)),
        (401, 502, json!("provider_auth_failed")),
        (403, 502, json!("provider_auth_failed")),
        (404, 502, json!("bad_gateway")),
        (402, 502, json!("bad_gateway")),
        (405, 502, json!("bad_gateway")),
        (408, 502, json!("bad_gateway")),
        (409, 502, json!("bad_gateway")),
        (413, 400, json!(null)),
        (415, 400, json!(null)),
        (418, 502, json!("bad_gateway")),
        (422, 400, json!(null)),
        (429, 429, json!("rate_limit_exceeded")),
        (500, 502, json!("bad_gateway")),
        (503, 502, json!("bad_gateway")),
    ] {
        let mapped = ApiError::from_failure(&failure(FailureCode::ProviderRejected).with_status(status), None);
        let (status, _, found) = shown(&mapped);
        assert_eq!((status, found), (want, code), "{status}");
        check_retry(&mapped);
    }
    for (reason, want, code) in [
        (ProviderReason::AuthFailed, 502, "provider_auth_failed"),
        (ProviderReason::ContextLengthExceeded, 400, "context_length_exceeded"),
        (ProviderReason::Overloaded, 429, "rate_limit_exceeded"),
    ] {
        for base in [FailureCode::ProviderRejected, FailureCode::InvalidRequest] {
            let mapped = ApiError::from_failure(&failure(base).with_status(500).with_reason(Some(reason)), None);
            let (status, _, found) = shown(&mapped);
            assert_eq!((status, found), (want, json!(code)));
        }
    }
}

#[test]
fn a_providers_refused_credential_repeats_nothing() {
    // SEC-2
    let error = failure(FailureCode::ProviderRejected).with_status(401);
    let mapped = ApiError::from_failure(&error, Some("Incorrect API key SENTINEL".into()));
    assert!(!String::from_utf8(mapped.to_json(Dialect::OpenAi)).unwrap().contains("SENTINEL"));
}

#[test]
fn a_client_is_not_told_why_a_lease_was_refused() {
    // CRD-5
    use iop_execution::failure::{BindingField, CredentialReason};
    let error = failure(FailureCode::CredentialRejected);
    let plain = ApiError::from_failure(&error, None).to_json(Dialect::OpenAi);
    for reason in CredentialReason::PLAIN.iter().copied().chain([CredentialReason::BindingMismatch(BindingField::Slot)])
    {
        assert_eq!(
            ApiError::from_failure(&error.clone().with_credential(reason), None).to_json(Dialect::OpenAi),
            plain,
            "{reason}"
        );
    }
    assert!(String::from_utf8(plain).unwrap().contains("No credential may be used"));
}

#[test]
fn cancels_have_rows_too() {
    // API-5
    for reason in CancelReason::ALL {
        let (status, code) = match reason {
            CancelReason::Client => (503, "cancelled"),
            CancelReason::EdgeDeadline => (504, "deadline_exceeded"),
            CancelReason::Withdrawn | CancelReason::ReceivePool | CancelReason::Drain => (503, "provider_unavailable"),
            CancelReason::SlowClient => (408, "slow_client"),
        };
        let mapped = ApiError::from_cancel(*reason);
        let (found, _, name) = shown(&mapped);
        assert_eq!((found, name), (status, json!(code)), "{reason}");
        check_retry(&mapped);
    }
}

#[test]
fn waits_are_whole_seconds_and_capped() {
    // API-5
    for (ms, seconds) in [(0, "1"), (1, "1"), (1_001, "2"), (60_000, "60"), (3_600_000, "60")] {
        let error = ApiError::from_submit(&SubmitError::QueueFull { retry_after: Duration::from_millis(ms) }, "m");
        assert_eq!(error.to_response(Dialect::OpenAi).headers()[RETRY_AFTER], seconds);
    }
    let limited = failure(FailureCode::ProviderRejected).with_status(429).with_retry_after_ms(Some(300_000));
    assert_eq!(ApiError::from_failure(&limited, None).to_response(Dialect::OpenAi).headers()[RETRY_AFTER], "60");
}

#[test]
fn special_headers_stand_where_they_belong() {
    // API-5, API-13
    assert_eq!(ApiError::unauthorized().to_response(Dialect::OpenAi).headers()[WWW_AUTHENTICATE], "Bearer");
    let draining = ApiError::from_submit(&SubmitError::ShuttingDown, "m").to_response(Dialect::OpenAi);
    assert_eq!(
        (&draining.headers()[CONNECTION], &draining.headers()[RETRY_AFTER]),
        (&"close".parse().unwrap(), &"1".parse().unwrap())
    );
    assert_eq!(ApiError::method_not_allowed("POST").to_response(Dialect::OpenAi).headers()[ALLOW], "POST");
}

#[test]
fn a_credential_that_may_not_be_used_is_not_asked_for_again() {
    // CRD-5, API-5: it would end the same way, and what is said is true whether a provider was called or not
    let refused = ApiError::from_failure(&failure(FailureCode::CredentialRejected), None);
    let response = refused.to_response(Dialect::OpenAi);
    assert_eq!(response.headers().get("x-should-retry").unwrap(), "false");
    assert_eq!(refused.message(), "No credential may be used for this request.");
    let other = ApiError::from_failure(&failure(FailureCode::Disconnected), None).to_response(Dialect::OpenAi);
    assert!(!other.headers().contains_key("x-should-retry"));
}

fn check_retry(error: &ApiError) {
    let response = error.to_response(Dialect::OpenAi);
    let wait = response.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap().parse::<u64>().unwrap());
    match error.status().as_u16() {
        429 | 503 => assert!(wait.is_some_and(|wait| (1..=60).contains(&wait)), "{error:?}"),
        _ => assert_eq!(wait, None),
    }
}

/// Status, type and code of every error there is.
fn every_error() -> Vec<ApiError> {
    let said = |status: u16| failure(FailureCode::ProviderRejected).with_status(status);
    let mut all = vec![
        ApiError::bad_request(None, "no"),
        ApiError::unauthorized(),
        ApiError::model_not_found("m"),
        ApiError::unknown_url(),
        ApiError::method_not_allowed("POST"),
        ApiError::not_supported(),
        ApiError::not_served(),
        ApiError::no_state("conversation"),
        ApiError::body_too_large(1),
        ApiError::unsupported_media("no"),
        ApiError::body_timeout(),
        ApiError::not_ready(),
        ApiError::deadline(),
        ApiError::client_idle(),
        ApiError::internal("no"),
        ApiError::bad_gateway("no"),
    ];
    all.extend(
        [
            SubmitError::Unavailable,
            SubmitError::QueueFull { retry_after: Duration::ZERO },
            SubmitError::QueueTimeout,
            SubmitError::Cancelled,
            SubmitError::ShuttingDown,
        ]
        .map(|error| ApiError::from_submit(&error, "m")),
    );
    all.extend(FailureCode::ALL.iter().map(|code| ApiError::from_failure(&failure(*code), None)));
    all.extend(CancelReason::ALL.iter().map(|reason| ApiError::from_cancel(*reason)));
    all.extend((400..600).map(|status| ApiError::from_failure(&said(status), None)));
    let long = failure(FailureCode::InvalidRequest).with_reason(Some(ProviderReason::ContextLengthExceeded));
    all.push(ApiError::from_failure(&long, None));
    all.push(ApiError::key_expired());
    // CRD-12
    for kind in RateKind::ALL.iter().copied() {
        for retry_after in [Some(Duration::from_secs(70)), None] {
            let refusal = RateRefusal { kind, limit: 5, used: 5, requested: 1, retry_after };
            // Only tokens can be more than there ever are.
            if retry_after.is_some() || kind == RateKind::Tokens {
                all.push(ApiError::rate_limited(&refusal));
            }
        }
    }
    all
}

#[test]
fn the_documented_table_is_what_is_sent() {
    // API-5
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/spec/07-openai.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text.split_once("## Errors (API-5)").unwrap().1;
    let rows = section.lines().skip_while(|line| !line.starts_with("| ---")).skip(1);
    let documented: Vec<_> = rows
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.split('|').map(str::trim).collect::<Vec<_>>())
        .filter(|cells| !cells[1].starts_with("*not yet:*") && !cells[2].starts_with("499"))
        .map(|cells| {
            let code = cells[4].split(';').next().unwrap();
            let header = |name: &str| cells[5].contains(name);
            (
                (cells[2].parse().unwrap(), json!(cells[3]), if code == "null" { json!(null) } else { json!(code) }),
                (header("Retry-After"), header("connection: close"), header("Allow"), header("www-authenticate")),
            )
        })
        .collect();
    let sent: Vec<_> = every_error()
        .iter()
        .map(|error| {
            let headers = error.to_response(Dialect::OpenAi).headers().clone();
            let header = |name: &str| headers.contains_key(name);
            (shown(error), (header("retry-after"), header("connection"), header("allow"), header("www-authenticate")))
        })
        .collect();
    for error in &sent {
        assert!(documented.contains(error), "sent, but not documented: {error:?}");
    }
    for row in &documented {
        assert!(sent.contains(row), "documented, but never sent: {row:?}");
    }
}
