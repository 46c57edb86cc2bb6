//! Decides what must hold for any request of a client, any answer of a provider, any history of the engine. Fuzz targets: plain
//! functions (SEC-5).
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a panic is how a target reports"
)]

use bytes::Bytes;
use http::header::{AUTHORIZATION, HeaderName};
use http::{HeaderMap, HeaderValue};
use iop_execution::sse::{BlockContent, split_blocks};
use iop_execution::{FrameFlags, ModelName, Principal};
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::openai::kind::Kind;
use crate::openai::mend::Form;
use crate::openai::provider_error::ProviderSaid;
use crate::openai::request::ChatRequest;
use crate::openai::rewrite::Rewrite;
use crate::openai::{AllowedModels, ApiKeyRecord, ApiKeys, responses};
use crate::token::{Token, TokenHash, TokenId, TokenKind};

pub use crate::driver::fuzz::{run_event_sequence, tunnel_frame_sequence};

/// Histories of the engine: see `state/fuzz.rs`.
pub fn engine_edge(data: &[u8]) {
    crate::state::fuzz::engine_edge(data, std::time::Instant::now());
}

/// Bodies of requests: what passes is one JSON object, and only `model` and `stream_options` of it change (API-3, API-4).
pub fn openai_request_parse(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    for kind in [Kind::Chat, Kind::Completions, Kind::Embeddings, Kind::Responses] {
        let Ok(request) = ChatRequest::parse(body.clone(), kind) else { continue };
        let text = std::str::from_utf8(data).unwrap();
        serde_json::from_str::<IgnoredAny>(text).expect("it is JSON");
        assert_eq!(request.body(), &body);
        assert!(!request.model().is_empty());
        assert!(request.prompt_prefix() != 0 || kind == Kind::Completions);
        for target in [request.model(), "another \"model\"\n"] {
            let sent = request.for_target(target);
            // Some JSON has no value that serde_json can hold: half characters, numbers without end.
            let (Ok(before), after) = (serde_json::from_str::<Value>(text), serde_json::from_slice::<Value>(&sent))
            else {
                continue;
            };
            let (Value::Object(mut before), Value::Object(mut after)) = (before, after.unwrap()) else {
                panic!("objects")
            };
            assert_eq!(after.remove("model"), Some(Value::from(target)));
            before.remove("model");
            let (had, has) = (before.remove("stream_options"), after.remove("stream_options"));
            if request.stream() {
                assert_eq!(has.unwrap()["include_usage"], Value::Bool(true));
            } else {
                assert_eq!(had, has);
            }
            assert_eq!(before, after, "nothing else changed");
        }
    }
    if let Ok((chat, echo)) = responses::read(body, "resp_fuzz".to_owned()) {
        serde_json::from_slice::<IgnoredAny>(chat.body()).expect("the chat it becomes is JSON");
        assert_eq!(chat.model(), echo.model());
        assert!(!chat.stores());
    }
}

/// Events of a provider: where they are cut into frames never matters, and only `model` and `choices` change (API-10).
pub fn openai_response_rewrite(data: &[u8]) {
    let (mode, data) = data.split_first().map_or((0, data), |(mode, rest)| (*mode, rest));
    let flags = match mode & 3 {
        0 | 1 => FrameFlags::CONTENT,
        2 => FrameFlags::USAGE,
        _ => FrameFlags::NONE,
    };
    let body = Bytes::copy_from_slice(data);
    let blocks: Result<Vec<_>, _> = split_blocks(&body).collect();
    let Ok(blocks) = blocks else {
        // Frames hold whole events; whatever this is, it does no harm.
        let _out = Rewrite::new(Some("\"public\"".into()), true, Form::Chat).events(body, flags);
        return;
    };
    for form in [Form::Other, Form::Chat, Form::Completions, Form::Messages] {
        let rewrite = || Rewrite::new(Some("\"public\"".into()), mode & 4 == 0, form);
        let whole = rewrite().events(body.clone(), flags).unwrap_or_default();
        let mut by_block = rewrite();
        let mut out = Vec::new();
        for block in &blocks {
            let after = by_block.events(block.raw.clone(), flags);
            out.extend_from_slice(after.as_deref().unwrap_or_default());
            if form == Form::Other {
                check_event(block, after.as_ref(), flags);
            }
        }
        // The first LF of a block may end the line of the block before.
        if !blocks.iter().any(|block| block.raw.starts_with(b"\n")) {
            assert_eq!(whole, out, "cuts don't matter");
        }
    }
}

fn check_event(block: &iop_execution::sse::Block, after: Option<&Bytes>, flags: FrameFlags) {
    let data = |block: &iop_execution::sse::Block| match &block.content {
        BlockContent::Event(event) => serde_json::from_slice::<Value>(&event.data).ok(),
        _ => None,
    };
    let once = |name: &[u8]| block.raw.windows(name.len()).filter(|window| *window == name).count() <= 1;
    let plain = once(b"model") && once(b"choices") && !block.raw.contains(&b'\\');
    let (Some(Value::Object(mut before)), Some(after), true) = (data(block), after, plain) else { return };
    let again: Vec<_> = split_blocks(after).map(Result::unwrap).collect();
    let Some(Value::Object(mut after)) = again.iter().find_map(data) else { panic!("the event is gone") };
    if flags != FrameFlags::NONE && before.get("model").is_some_and(Value::is_string) {
        assert_eq!(after.get("model"), Some(&Value::from("public")));
    } else {
        assert_eq!(after.get("model"), before.get("model"));
    }
    if flags == FrameFlags::USAGE && before.get("choices").is_none_or(Value::is_null) {
        assert_eq!(after.remove("choices"), Some(Value::Array(Vec::new())));
        before.remove("choices");
    }
    before.remove("model");
    after.remove("model");
    assert_eq!(before, after, "nothing else changed");
}

/// Errors of providers: what a client sees is short, printable, and holds no key (SEC-2).
pub fn error_scrubber(data: &[u8]) {
    const KEY: &str = "sk-SENTINEL0123456789";
    let with_key = |text: &str| serde_json::json!({"error": {"message": text, "code": "x"}}).to_string();
    let text = String::from_utf8_lossy(data);
    if text.contains("SENTINEL") {
        return;
    }
    // The key stands alone, after `Bearer`, in quotes, or before a sign.
    let around = [
        format!("{text} {KEY} {text}"),
        format!("Bearer {KEY}"),
        format!("{text}'{KEY}'{text}"),
        format!("{text}={KEY},"),
    ];
    let bodies = around.iter().map(|text| with_key(text).into_bytes()).chain([data.to_vec()]);
    for (at, body) in bodies.enumerate() {
        for said in [
            ProviderSaid::in_body(&body),
            ProviderSaid::in_events(&Bytes::from([b"data: ", &body[..], b"\n\n"].concat())),
        ] {
            let Some(shown) = said.message else { continue };
            assert!(shown.len() <= 320 && !shown.chars().any(char::is_control));
            if at < around.len() {
                assert!(!shown.contains("SENTINEL"), "{shown:?}");
            }
            assert!(said.status.is_none_or(|status| (400..600).contains(&status)));
        }
    }
}

/// Keys of clients: the one that was issued opens, and no other text does (CRD-12, API-13).
pub fn api_key_parse(data: &[u8]) {
    let key = Token::parse(TokenKind::ApiKey, &format!("iopk_abcdefgh_{}", "s".repeat(43))).unwrap();
    let record = ApiKeyRecord::new(
        key.id().clone(),
        key.hash(),
        Principal::new("p").unwrap(),
        AllowedModels::Only(vec![ModelName::new("m").unwrap()]),
    );
    let keys = ApiKeys::records([record]).unwrap();
    if let Ok(text) = std::str::from_utf8(data) {
        for kind in [TokenKind::ApiKey, TokenKind::Node, TokenKind::Admin] {
            if let Some(token) = Token::parse(kind, text) {
                assert_eq!(token.reveal(), text);
                assert!(!format!("{token:?}").contains(&text[text.len() - 43..]));
            }
        }
        let _hash: Option<TokenHash> = TokenHash::parse(text);
        if let Some(id) = TokenId::parse(text) {
            assert_eq!(id.as_str(), text);
        }
    }
    for name in [AUTHORIZATION, HeaderName::from_static("api-key")] {
        let Ok(value) = HeaderValue::from_bytes(data) else { return };
        let opens = keys.authenticate(&HeaderMap::from_iter([(name, value)]), 0).is_ok();
        assert!(!opens || data.windows(57).any(|window| window == key.reveal().as_bytes()));
    }
}
