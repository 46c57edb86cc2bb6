use proptest::prelude::*;

use super::*;

#[test]
fn only_listed_calls_pass() {
    // SEC-1
    for (method, path, allowed) in [
        (Method::POST, "/v1/chat/completions", true),
        (Method::POST, "/v1/completions", true),
        (Method::POST, "/v1/embeddings", true),
        (Method::POST, "/v1/responses", true),
        (Method::GET, "/v1/models", true),
        (Method::GET, "/v1/chat/completions", false),
        (Method::DELETE, "/v1/models", false),
        (Method::CONNECT, "/v1/models", false),
        (Method::POST, "/v1/chat/completions/", false),
        (Method::POST, "/V1/chat/completions", false),
        (Method::POST, "/api/pull", false),
        (Method::GET, "/props", false),
        (Method::GET, "/", false),
    ] {
        assert_eq!(OPENAI.check(&method, path).is_ok(), allowed, "{method} {path}");
    }
}

#[test]
fn suspicious_paths_are_refused_and_never_repaired() {
    // SEC-1
    for path in [
        "",
        "v1/models",
        "/v1/../v1/models",
        "/v1/%2e%2e/models",
        "/v1%2Fmodels",
        "/v1%5cmodels",
        "/v1\\models",
        "//v1/models",
        "/v1//models",
        "/v1/models@evil",
        "http://evil/v1/models",
        "/v1/models\r\nx: y",
        "/v1/models\0",
        "/v1/mod els",
        "/v1/modéls",
        "/v1/%2E./models",
        "@evil/v1/models",
    ] {
        let error = OPENAI.check(&Method::GET, path).unwrap_err();
        assert_eq!(error.failure().code, iop_execution::FailureCode::InvalidRequest, "{path:?}");
    }
    for path in ["/v1/models?x=1", "/v1/models?", "/v1/models#a", "/v1/models;a", "/v1/%6dodels"] {
        assert!(OPENAI.check(&Method::GET, path).is_err(), "{path}");
    }
}

proptest! {
    #[test]
    fn whatever_passes_is_exactly_a_route(path in "[/v1models.%2eEfF\\\\@?# chat]{0,24}") {
        // SEC-1
        if let Ok(route) = OPENAI.check(&Method::GET, &path) {
            prop_assert_eq!(route, &path);
            prop_assert_eq!(route, "/v1/models");
        }
    }

    #[test]
    fn no_header_outside_the_list_passes(name in "[a-z-]{1,20}", value in "[ -~]{0,20}") {
        // SEC-1
        let mut from = HeaderMap::new();
        let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) else { return Ok(()) };
        from.insert(name.clone(), value.clone());
        let to = request_headers(&from, RunId::from_bytes([7; 16]));
        let ours = [CONTENT_TYPE, ACCEPT, USER_AGENT, OPENAI_BETA, ACCEPT_ENCODING, X_REQUEST_ID];
        prop_assert!(to.keys().all(|name| ours.contains(name)));
    }
}

#[test]
fn headers_pass_by_list_in_both_directions() {
    // SEC-1, SEC-2
    let mut from = HeaderMap::new();
    for name in [
        "authorization",
        "cookie",
        "host",
        "x-api-key",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
        "connection",
        "content-length",
        "forwarded",
        "x-forwarded-for",
        "content-encoding",
        "x-stainless-os",
        "openai-organization",
        "set-cookie",
        "location",
        "server",
        "x_y",
    ] {
        from.insert(name, HeaderValue::from_static("SENTINEL"));
    }
    from.insert("accept-encoding", HeaderValue::from_static("gzip"));
    from.insert("x-request-id", HeaderValue::from_static("theirs"));
    from.insert("content-type", HeaderValue::from_static("application/json"));
    let to = request_headers(&from, RunId::from_bytes([7; 16]));
    assert_eq!(to.len(), 3);
    assert_eq!(to[ACCEPT_ENCODING], "identity");
    assert_eq!(to[X_REQUEST_ID], "07".repeat(16), "ours, not the caller's");

    let back = response_headers(&from);
    assert_eq!(back.len(), 2);
    from.insert("x-request-id", HeaderValue::from_static("a b"));
    assert_eq!(response_headers(&from).len(), 1);
}

#[test]
fn an_encoding_nobody_asked_for_is_noticed() {
    // SEC-1
    let with = |value: &'static str| {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static(value));
        is_encoded(&headers)
    };
    assert!(with("gzip") && with("br") && with("identity, gzip") && with(""));
    assert!(!with("identity") && !with("Identity") && !is_encoded(&HeaderMap::new()));
}
