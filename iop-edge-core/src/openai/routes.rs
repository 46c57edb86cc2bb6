//! Decides what a method and a path ask for (API-1).

use http::Method;

use super::kind::Kind;

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    /// The process is alive.
    Health,
    /// A provider is ready.
    Ready,
    /// Something that a provider answers.
    Ask(Kind),
    /// The list of models.
    Models,
    /// One model, its id decoded; `None` if it can't be decoded.
    Model(Option<String>),
    /// What a path takes was asked.
    Options(&'static str),
    /// A path of ours, another method.
    WrongMethod(&'static str),
    /// A path of the API that this surface does not have.
    Unsupported,
    /// No path at all.
    Unknown,
}

const READ: &str = "GET, HEAD";
const WRITE: &str = "POST";

/// First segments of the API's other paths.
const OTHERS: [&str; 17] = [
    "assistants",
    "audio",
    "batches",
    "containers",
    "conversations",
    "evals",
    "files",
    "fine_tuning",
    "images",
    "moderations",
    "realtime",
    "rerank",
    "responses",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
];

/// Resolves a request. Base URLs with and without `/v1`, and a slash at the end, are the same.
pub(crate) fn resolve(method: &Method, path: &str) -> Route {
    let path = path.strip_suffix('/').unwrap_or(path);
    match path {
        "/healthz" => return by_method(method, READ, Route::Health),
        "/readyz" => return by_method(method, READ, Route::Ready),
        _ => {}
    }
    let path = path.strip_prefix("/v1").filter(|rest| rest.starts_with('/')).unwrap_or(path);
    let Some(path) = path.strip_prefix('/') else { return Route::Unknown };
    if let Some(id) = path.strip_prefix("models/").filter(|id| !id.is_empty()) {
        return by_method(method, READ, Route::Model(percent_decoded(id)));
    }
    match path {
        "chat/completions" => by_method(method, WRITE, Route::Ask(Kind::Chat)),
        "completions" => by_method(method, WRITE, Route::Ask(Kind::Completions)),
        "responses" => by_method(method, WRITE, Route::Ask(Kind::Responses)),
        "embeddings" => by_method(method, WRITE, Route::Ask(Kind::Embeddings)),
        "messages" => by_method(method, WRITE, Route::Ask(Kind::Messages)),
        "models" => by_method(method, READ, Route::Models),
        _ => {
            let first = path.split('/').next().unwrap_or_default();
            let stored_chat = path.starts_with("chat/completions/");
            if stored_chat || path.starts_with("messages/") || OTHERS.contains(&first) {
                Route::Unsupported
            } else {
                Route::Unknown
            }
        }
    }
}

fn by_method(method: &Method, allow: &'static str, route: Route) -> Route {
    let allowed = match allow {
        READ => method == Method::GET || method == Method::HEAD,
        _ => method == Method::POST,
    };
    if allowed {
        route
    } else if method == Method::OPTIONS {
        Route::Options(allow)
    } else {
        Route::WrongMethod(allow)
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|d| d.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_and_method_has_one_meaning() {
        // API-1
        let model = |id: &str| Route::Model(Some(id.into()));
        for (method, path, want) in [
            ("POST", "/v1/chat/completions", Route::Ask(Kind::Chat)),
            ("POST", "/chat/completions", Route::Ask(Kind::Chat)),
            ("POST", "/v1/chat/completions/", Route::Ask(Kind::Chat)),
            ("GET", "/v1/chat/completions", Route::WrongMethod(WRITE)),
            ("HEAD", "/v1/chat/completions", Route::WrongMethod(WRITE)),
            ("OPTIONS", "/v1/chat/completions", Route::Options(WRITE)),
            ("GET", "/v1/chat/completions/x", Route::Unsupported),
            ("GET", "/v1/models", Route::Models),
            ("HEAD", "/models/", Route::Models),
            ("DELETE", "/v1/models", Route::WrongMethod(READ)),
            ("GET", "/v1/models/org/name:tag", model("org/name:tag")),
            ("GET", "/models/org%2Fname%3atag/", model("org/name:tag")),
            ("GET", "/v1/models/%c3%a9", model("é")),
            ("GET", "/v1/models/%ff", Route::Model(None)),
            ("GET", "/v1/models/%2", Route::Model(None)),
            ("GET", "/v1/models/%+1", Route::Model(None)),
            ("DELETE", "/v1/models/x", Route::WrongMethod(READ)),
            ("GET", "/healthz", Route::Health),
            ("GET", "/v1/healthz", Route::Unknown),
            ("HEAD", "/readyz", Route::Ready),
            ("POST", "/readyz", Route::WrongMethod(READ)),
            ("POST", "/v1/responses", Route::Ask(Kind::Responses)),
            ("GET", "/v1/responses", Route::WrongMethod(WRITE)),
            ("GET", "/v1/responses/resp_1", Route::Unsupported),
            ("POST", "/v1/responses/resp_1/cancel", Route::Unsupported),
            ("POST", "/embeddings", Route::Ask(Kind::Embeddings)),
            ("POST", "/v1/completions", Route::Ask(Kind::Completions)),
            ("GET", "/v1/completions", Route::WrongMethod(WRITE)),
            ("GET", "/v1/embeddings/x", Route::Unknown),
            ("POST", "/v1/messages", Route::Ask(Kind::Messages)),
            ("GET", "/v1/messages", Route::WrongMethod(WRITE)),
            ("POST", "/v1/messages/count_tokens", Route::Unsupported),
            ("GET", "/v1/files/abc/content", Route::Unsupported),
            ("GET", "/v1", Route::Unknown),
            ("GET", "/", Route::Unknown),
            ("GET", "", Route::Unknown),
            ("GET", "*", Route::Unknown),
            ("GET", "/v1/nothing", Route::Unknown),
            ("GET", "/v1x/models", Route::Unknown),
        ] {
            assert_eq!(resolve(&method.parse().unwrap(), path), want, "{method} {path}");
        }
    }
}
