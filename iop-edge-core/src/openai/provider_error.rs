//! Decides what a provider's error says, in whatever shape it comes, and which of its words a client may see.

use iop_execution::complaint;
use iop_execution::failure::ProviderReason;
use iop_execution::sse::{BlockContent, split_blocks};
use serde_json::{Map, Value};

use bytes::Bytes;

/// What could be read of a provider's error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProviderSaid {
    /// Its HTTP-like status, where the error itself has one.
    pub(crate) status: Option<u16>,
    /// What it is about, where that can be told.
    pub(crate) reason: Option<ProviderReason>,
    /// Its text, scrubbed and cut.
    pub(crate) message: Option<String>,
}

/// Longest text of a provider that is shown, in bytes.
const SHOWN_BYTES: usize = 300;
/// A word this long that has letters and digits may be a secret.
const SECRET_BYTES: usize = 20;

impl ProviderSaid {
    /// Reads the body of an error answer.
    pub(crate) fn in_body(body: &[u8]) -> Self {
        serde_json::from_slice(body.trim_ascii()).map_or_else(|_| Self::default(), |value| Self::in_value(&value))
    }

    /// Reads the first error among the events of a frame.
    pub(crate) fn in_events(frame: &Bytes) -> Self {
        for block in split_blocks(frame) {
            let text = match block.map(|block| block.content) {
                Ok(BlockContent::Event(event)) => event.data,
                Ok(BlockContent::ErrorField(text)) => text,
                Ok(BlockContent::Blank | BlockContent::Comment | BlockContent::NoData) => continue,
                Err(_) => break,
            };
            return Self::in_body(&text);
        }
        Self::default()
    }

    fn in_value(value: &Value) -> Self {
        let Value::Object(outer) = value else { return Self::default() };
        match outer.get("error") {
            Some(Value::Object(error)) => Self::in_object(error),
            Some(Value::String(text)) => Self::about(text, &[]),
            // Flat, or a framework's own.
            _ if outer.get("message").is_some_and(Value::is_string) => Self::in_object(outer),
            _ => match outer.get("detail") {
                Some(Value::String(text)) => Self::about(text, &[]),
                _ => Self::default(),
            },
        }
    }

    fn in_object(error: &Map<String, Value>) -> Self {
        let text = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
        let status = error.get("code").and_then(|code| code.as_u64().or_else(|| code.as_str()?.parse().ok()));
        let mut said = Self::about(text("message"), &[text("type"), text("code")]);
        said.status = status.and_then(|status| u16::try_from(status).ok()).filter(|status| (400..600).contains(status));
        said
    }

    fn about(message: &str, names: &[&str]) -> Self {
        let reason = if names.iter().any(|name| matches!(*name, "authentication_error" | "invalid_api_key")) {
            Some(ProviderReason::AuthFailed)
        } else {
            complaint::reason(None, [&[message], names].concat().join("\n").as_bytes())
        };
        Self { status: None, reason, message: scrubbed(message) }
    }
}

/// Text without what may be a key, an address or a control character, and not too long (SEC-2).
fn scrubbed(text: &str) -> Option<String> {
    let mut out = String::new();
    let mut hide_next = false;
    for word in text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty()) {
        let hidden = std::mem::take(&mut hide_next) || may_be_secret(word);
        hide_next = word.trim_matches(|c: char| !c.is_alphanumeric()).eq_ignore_ascii_case("bearer");
        let word = if hidden { "[removed]" } else { word };
        if out.len() + word.len() + 1 > SHOWN_BYTES {
            out.push('…');
            break;
        }
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(word);
    }
    Some(out).filter(|out| !out.is_empty())
}

fn may_be_secret(word: &str) -> bool {
    // Whatever stands in quotes or brackets is looked at alone too: `key=sk-…`, `("https://…")`.
    word.contains("://")
        || word.split(|c: char| !(c.is_ascii_alphanumeric() || "-_.*".contains(c))).any(|part| {
            part.starts_with("sk-")
                || part.starts_with("iopk_")
                || part.contains("***")
                || (part.len() >= SECRET_BYTES
                    && part.bytes().any(|byte| byte.is_ascii_digit())
                    && part.bytes().any(|byte| byte.is_ascii_alphabetic()))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(body: &str) -> ProviderSaid {
        ProviderSaid::in_body(body.as_bytes())
    }

    #[test]
    fn every_known_shape_is_read() {
        // API-5, API-7
        for (body, status, message) in [
            (r#"{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}"#, Some(400), Some("no")),
            (r#"{"error":{"message":"no","code":"404"}}"#, Some(404), Some("no")),
            (r#"{"error":{"message":"no","code":"bad"}}"#, None, Some("no")),
            (r#"{"object":"error","message":"no","type":"x","code":500}"#, Some(500), Some("no")),
            (r#"{"error":"no"}"#, None, Some("no")),
            (r#"{"detail":"Not Found"}"#, None, Some("Not Found")),
            (r#"{"detail":[{"msg":"x"}]}"#, None, None),
            ("<html>502</html>", None, None),
            ("", None, None),
            ("\n\n{\"error\":\"no\"}", None, Some("no")),
        ] {
            let said = said(body);
            assert_eq!((said.status, said.message.as_deref()), (status, message), "{body}");
        }
    }

    #[test]
    fn an_overlong_prompt_is_recognised() {
        // API-5
        for body in [
            r#"{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}"#,
            r#"{"object":"error","message":"This model's maximum context length is 8192 tokens."}"#,
            r#"{"error":{"message":"x","code":"context_length_exceeded"}}"#,
            r#"{"error":"input length exceeds the context length"}"#,
        ] {
            assert_eq!(said(body).reason, Some(ProviderReason::ContextLengthExceeded), "{body}");
        }
        assert_eq!(
            said(r#"{"error":"server busy, please try again.  maximum pending requests exceeded"}"#).reason,
            Some(ProviderReason::Overloaded)
        );
    }

    #[test]
    fn errors_are_found_among_events_of_any_form() {
        // API-10 c
        for frame in [
            "data: {\"error\":{\"message\":\"no\"}}\n\n",
            ": x\n\nevent: error\ndata: {\"error\":\ndata: \"no\"}\n\n",
            "error: {\"error\":{\"message\":\"no\"}}\r\n\r\n",
        ] {
            let said = ProviderSaid::in_events(&Bytes::copy_from_slice(frame.as_bytes()));
            assert_eq!(said.message.as_deref(), Some("no"), "{frame}");
        }
        assert_eq!(ProviderSaid::in_events(&Bytes::from_static(b"data: plain text\n\n")), ProviderSaid::default());
    }

    #[test]
    fn keys_and_addresses_are_removed_and_text_is_cut() {
        // SEC-2
        let shown = scrubbed(
            "bad key sk-abc (key='abcdefghij0123456789') at http://10.0.0.1:8000/v1?k=1 \u{1}Authorization: Bearer shorty iopk_aaaaaaaa_b x***y",
        )
        .unwrap();
        assert_eq!(
            shown,
            "bad key [removed] [removed] at [removed] Authorization: Bearer [removed] [removed] [removed]"
        );
        assert!(scrubbed(&"words and ".repeat(200)).unwrap().len() <= SHOWN_BYTES + '…'.len_utf8());
        assert_eq!(scrubbed(" \n"), None);
    }
}
