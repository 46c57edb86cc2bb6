use super::*;
use crate::openai::AllowedOrigins;

const APP: &str = "https://app.example";

fn rig(origins: &[&str]) -> Rig {
    let cors = AllowedOrigins::new(origins).unwrap();
    Rig::with([], |mut config| {
        config.cors = cors;
        config.with_keys(Arc::new(ApiKeys::fixed("k")))
    })
}

fn from(origin: &str, method: &str, path: &str) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("origin", origin);
    request.body(Full::<Bytes>::default()).unwrap()
}

fn allowed(response: &Response<OpenAiBody>) -> Option<&str> {
    response.headers().get("access-control-allow-origin").map(|value| value.to_str().unwrap())
}

#[tokio::test(start_paused = true)]
async fn pages_of_listed_origins_may_read_answers_and_no_others() {
    // SEC-4
    for (origins, origin, expected) in [
        (&[][..], APP, None),
        (&[APP], APP, Some(APP)),
        (&[APP], "https://app.example.evil", None),
        (&[APP], "http://app.example", None),
        (&[APP], "null", None),
        (&["*"], "https://anybody.example", Some("*")),
    ] {
        let rig = rig(origins);
        // A refusal too: a page must be able to say why.
        let response = rig.send(from(origin, "GET", "/v1/models")).await;
        assert_eq!((response.status().as_u16(), allowed(&response)), (401, expected), "{origins:?} {origin}");
        assert_eq!(response.headers().contains_key("vary"), !origins.is_empty());
        assert!(!response.headers().contains_key("access-control-allow-credentials"));
    }
    let response = rig(&[APP]).send(get("/v1/models")).await;
    assert_eq!(allowed(&response), None, "no page asked");
}

#[tokio::test(start_paused = true)]
async fn the_question_before_a_request_is_answered_for_listed_origins_without_a_key() {
    // SEC-4
    let ask = |origin: &str, headers: &str| {
        let mut request = from(origin, "OPTIONS", "/v1/chat/completions");
        request.headers_mut().insert("access-control-request-method", "POST".parse().unwrap());
        request.headers_mut().insert("access-control-request-headers", headers.parse().unwrap());
        request
    };
    let rig = rig(&[APP]);
    let response = rig.send(ask(APP, "authorization,content-type,x-stainless-os")).await;
    assert_eq!((response.status().as_u16(), allowed(&response)), (204, Some(APP)));
    assert_eq!(response.headers()["access-control-allow-methods"], "POST");
    assert_eq!(response.headers()["access-control-allow-headers"], "authorization,content-type,x-stainless-os");
    let response = rig.send(ask(APP, "a;b")).await;
    assert!(!response.headers().contains_key("access-control-allow-headers"));
    let response = rig.send(ask("https://other.example", "authorization")).await;
    assert_eq!((response.status().as_u16(), allowed(&response)), (204, None));
    assert!(!response.headers().contains_key("access-control-allow-methods"));
}
